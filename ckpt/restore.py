"""Where the tensors of a checkpoint go: matched against the live state first, filled afterwards.

`Placement` is built without changing anything and lists every mismatch, so that one error tells all. `Filler` then
takes verified bytes, from whichever tier, straight into the tensors: no second copy of the state is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ckpt.errors import CorruptError, MismatchError
from ckpt.plan import Layout, TensorSpec
from ckpt.tensors import DTYPE_NAME, as_bytes, empty, memory_of, saved_device, to_array
from ckpt.values import Json, Path, decode, show


@dataclass(frozen=True)
class SavedNode:
    """One entry of a saved state. `names`: of its tensors, aliases too."""

    path: Path
    kind: str
    facts: dict[str, Any]
    values: Json
    names: tuple[str, ...]


@dataclass
class Placement:
    """`fills`: for every saved tensor (never an alias), the live or new tensors that it goes to."""

    layout: Layout
    strict: bool
    names: dict[int, str] = field(default_factory=dict)
    fills: dict[str, list[Tensor]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    finishers: list[Callable[[], object]] = field(default_factory=list)
    last: list[Callable[[], object]] = field(default_factory=list)  # after all finishers: they may draw random numbers
    _created: dict[str, Tensor] = field(default_factory=dict)
    _handed: set[str] = field(default_factory=set)  # created only to be handed to a load_state_dict, which copies
    _watched: dict[str, list[Tensor]] = field(default_factory=dict)  # live tensors that such a call will fill

    def __post_init__(self) -> None:
        self.accelerated = any(t.accelerator for t in self.layout.tensors)

    def canonical(self, name: str) -> str:
        return self.layout.aliases.get(name, name)

    def spec(self, name: str) -> TensorSpec:
        found = self.layout.by_name.get(self.canonical(name))
        if found is None:
            raise CorruptError(f"the checkpoint refers to {name}, which it does not hold")
        return found

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def fits(self, name: str, live: Tensor) -> bool:
        spec = self.spec(name)
        return spec.shape == tuple(live.shape) and spec.dtype == DTYPE_NAME.get(live.dtype)

    def match(self, path: Path, saved: Iterable[str], live: Mapping[str, Tensor]) -> None:
        """Fill live tensors by name; what is missing, unexpected or different is a problem."""
        for name in self.compare(path, saved, live):
            self.fill(name, live[name])

    def compare(self, path: Path, saved: Iterable[str], live: Mapping[str, Tensor]) -> list[str]:
        """Note every difference; the names that can be filled."""
        names = set(saved)
        for name in sorted(live.keys() - names):
            self.problem(f"{name} is not in the checkpoint")
        for name in sorted(names - live.keys()):
            self.problem(f"{name} is in the checkpoint, and not in {show(path)}")
        return [name for name in live if name in names and self._comparable(name, live[name])]

    def _comparable(self, name: str, live: Tensor) -> bool:
        spec, dtype = self.spec(name), DTYPE_NAME.get(live.dtype)
        if spec.shape != tuple(live.shape):
            self.problem(f"{name} has shape {list(spec.shape)} in the checkpoint and {list(live.shape)} here")
            return False
        if spec.dtype != dtype:
            self.problem(f"{name} has dtype {spec.dtype} in the checkpoint and {dtype} here")
        return True

    def fill(self, name: str, target: Tensor) -> None:
        self.fills.setdefault(self.canonical(name), []).append(target)

    def watch(self, name: str, live: Tensor) -> None:
        """The user's own code will fill this tensor: only what it shares memory with matters here."""
        self._watched.setdefault(self.canonical(name), []).append(live)

    def create(self, name: str, device: torch.device) -> Tensor:
        """A new tensor for `name`; the same one for its aliases."""
        name = self.canonical(name)
        if name not in self._created:
            self._created[name] = empty(self.spec(name), device)
            self.fill(name, self._created[name])
        return self._created[name]

    def build(self, values: Json, live: Mapping[str, Tensor] | None = None) -> Callable[[], Any]:
        """Plain values again, to be called when the tensors in them are filled: into `live` ones, or new ones."""
        tensors: dict[str, Tensor] = {}
        for name in references(values):
            have = (live or {}).get(name)
            if have is not None and self._comparable(name, have):
                self.fill(name, have)
                tensors[name] = have
            else:
                tensors[name] = self.create(name, saved_device(self.spec(name)))
                if live is None:
                    self._handed.add(self.canonical(name))

        def extern(reference: Json) -> object:
            if reference["$"] == "tensor":
                return tensors[reference["name"]]
            if reference["$"] == "ndarray":
                return to_array(tensors[reference["name"]].cpu(), reference)
            raise CorruptError(f"unknown tag {reference['$']!r}: written by a newer version?")

        return lambda: decode(values, extern)

    def check(self) -> None:
        """MismatchError that lists every problem, unless told to be lenient."""
        self._check_sharing()
        if self.problems and self.strict:
            shown = "\n  ".join(self.problems[:20])
            more = f"\n  and {len(self.problems) - 20} more" if len(self.problems) > 20 else ""
            raise MismatchError(
                f"the checkpoint does not fit this state, so nothing was changed:\n  {shown}{more}\n"
                "Make the state as it was, or pass strict=False to take what fits"
            )

    def _check_sharing(self) -> None:
        """Tied weights must be tied on both sides: silently untying them would change the training."""
        owners: dict[Any, str] = {}
        for name in [*self.fills, *(self._watched.keys() - self.fills.keys())]:
            handed = self._created.get(name) if name in self._handed else None
            targets = [t for t in self.fills.get(name, ()) if t is not handed] + self._watched.get(name, [])
            memories = {m for t in targets if (m := memory_of(t)) is not None}
            if len(memories) > 1:
                names = [name, *(a for a, n in self.layout.aliases.items() if n == name)]
                self.problem(f"{' and '.join(names)} were one tensor when they were saved, and are not here")
            for memory in memories:
                if owners.setdefault(memory, name) != name:
                    self.problem(f"{owners[memory]} and {name} are one tensor here, and were not when they were saved")


def references(values: Json) -> list[str]:
    """The names of all tensors that plain values refer to."""
    found: list[str] = []
    pending = [values]
    while pending:
        value = pending.pop()
        if type(value) is dict:
            if value.get("$") in ("tensor", "ndarray"):
                found.append(str(value.get("name")))
            else:
                pending.extend(value.values())
        elif type(value) is list:
            pending.extend(value)
    return found


class Filler:
    """Puts bytes into tensors. `add` may be called from several threads for different ranges."""

    def __init__(self, fills: Mapping[str, list[Tensor]], specs: Mapping[str, TensorSpec]) -> None:
        self._rows: dict[str, list[Tensor]] = {}
        self._later: list[tuple[Tensor, Tensor]] = []
        for name, targets in fills.items():
            rows = self._rows[name] = []
            for target in targets:
                spec = specs[name]
                direct = target.is_contiguous() and DTYPE_NAME[target.dtype] == spec.dtype
                direct = direct and not target.is_conj() and not target.is_neg()
                whole = target if direct else empty(spec, "cpu")
                if not direct:
                    self._later.append((target, whole))
                rows.append(as_bytes(whole))

    @property
    def names(self) -> list[str]:
        return list(self._rows)

    def add(self, name: str, offset: int, data: memoryview) -> None:
        source = torch.frombuffer(data, dtype=torch.uint8) if len(data) else None
        for row in self._rows[name]:
            if source is not None:
                row[offset : offset + len(data)].copy_(source)

    @torch.no_grad()
    def finish(self) -> None:
        """Tensors that could not take bytes as they are: other strides, or another dtype under strict=False."""
        for target, whole in self._later:
            target.detach().copy_(whole)
