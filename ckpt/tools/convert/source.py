"""The source of an export or import: a state of whole tensors and plain values, in any format.

    open -> view -> read

An *origin* is a checkpoint of a run (`ckpt.tools.convert.source_run`) or files of another library
(`convert.source_files`). Both store each tensor as pieces, which are boxes with contiguous bytes. `Assembly` copies
pieces in any order to the requested memory, so that no tensor must be in memory as a whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, structs

from ckpt.core.checkpoint.reference import matches
from ckpt.core.format.boxes import Box, Dims, boxes_of_run, intersect, run_of, within
from ckpt.core.format.digest import file_digest
from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.manifest import canonical
from ckpt.core.format.values import Json, show
from ckpt.errors import CorruptError, UsageError

Bytes = npt.NDArray[np.uint8]


class OriginEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a state, like a component of a layout. `names`: names of all its tensors, including aliases.
    `values`: its plain values, tagged."""

    path: tuple[str | int, ...]
    kind: str
    facts: dict[str, Any]
    names: tuple[str, ...]
    values: Any = None

    @property
    def component(self) -> dict[str, Any]:
        """Return the entry as a component of a layout."""
        return {"path": list(self.path), "kind": self.kind, "facts": self.facts, "names": list(self.names)}


@dataclass(frozen=True)
class RankView:
    """The part of an origin that one rank receives. `tensors`: for each name in the entries, the label of its tensor.

    `aliases`: for each further name of a tensor, its main name. `notes`: information for users, for example which
        rank's values were used. `step`: training step, None if unknown.
    """

    entries: tuple[OriginEntry, ...]
    tensors: Mapping[str, str]
    aliases: Mapping[str, str]
    notes: tuple[str, ...] = ()
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Want:
    """A request for the elements `start` to `stop` of a box of a tensor, in row-major order. `into`: memory of exactly
    their size."""

    label: str
    box: Box
    start: int
    stop: int
    into: Bytes


class Origin(Protocol):
    """A state that can be read. `title`: description for users. `about`: the same description for programs.

    `identity`: equal for two origins only if their contents are equal. `keep`: bytes that may be cached between reads.
        Raises CorruptError with the tensor's name, and StoreError.
    """

    title: str
    identity: str
    about: dict[str, Any]
    keep: int

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Specifications of the whole tensors, by their unique labels."""

    @property
    def names(self) -> Mapping[str, str]:
        """The label of the tensor for every name, including aliases."""

    def view(self, rank: int = 0, world: int = 1) -> RankView:
        """Return the part that one of `world` ranks receives. Raise MismatchError if that is ambiguous."""

    def plain(self, wanted: Callable[[str], bool] = ...) -> dict[str, tuple[dict[str, Any], Json]]:
        """Return the plain values by path of the selected entries: constant properties, and tagged plain values."""

    def same(self, label: str, other: Origin, theirs: str) -> bool:
        """Return True if digests prove that two tensors have the same bytes."""

    async def read(self, wants: Sequence[Want]) -> None:
        """Fill all requests. If this raises an error, the memory of the requests must not be used."""

    async def unchanged(self) -> None:
        """Raise CorruptError if the source may have changed since it was opened."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Landing:
    """The overlap of a piece and a request. `region`: box inside the piece. `target`: memory of the region's shape,
    with element bytes as the last dimension. `run`, `row`: byte range and memory, if both are contiguous."""

    region: Box
    target: Bytes
    run: tuple[int, int] | None


@dataclass
class Assembly:
    """Copies bytes of pieces into requests. Several threads may add bytes at the same time."""

    _landings: dict[int, list[_Landing]] = field(default_factory=dict)
    _pieces: dict[int, tuple[Dims, int]] = field(default_factory=dict)

    def meet(self, number: int, piece: Box, want: Want) -> None:
        """Record the overlap of a piece with a request. `number`: identifies the piece."""
        item = len(want.into) // max(1, want.stop - want.start)
        place = 0
        for offsets, sizes in boxes_of_run(want.box[1], want.start, want.stop):
            count = math.prod(sizes) * item
            target = want.into[place : place + count].reshape(*sizes, item)
            place += count
            at = tuple(i + j for i, j in zip(want.box[0], offsets, strict=True))
            common = intersect((at, sizes), piece)
            if common is None:
                continue
            region, inside = within(common, piece), within(common, (at, sizes))
            view = target[tuple(slice(i, i + n) for i, n in zip(*inside, strict=True))]
            self._landings.setdefault(number, []).append(_Landing(region, view, _row(region, piece[1], view, item)))
            self._pieces[number] = piece[1], item

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each piece the smallest contiguous range that is needed: (number, first byte, end)."""
        for number, overlaps in self._landings.items():
            sizes, item = self._pieces[number]
            ends = [run_of(landing.region, sizes) for landing in overlaps]
            yield number, min(low for low, _ in ends) * item, max(high for _, high in ends) * item

    def landings(self, number: int) -> list[tuple[Box, Bytes]]:
        """Return all requested boxes of a piece, each with memory of the box's shape and element bytes."""
        return [(landing.region, landing.target) for landing in self._landings[number]]

    def needs(self, number: int, start: int, stop: int) -> bool:
        """Return True if any of these bytes of a piece is requested."""
        sizes, item = self._pieces[number]
        for landing in self._landings[number]:
            low, high = landing.run or tuple(n * item for n in run_of(landing.region, sizes))
            if start < high and stop > low:
                boxes = boxes_of_run(sizes, start // item, stop // item)
                if landing.run or any(intersect(box, landing.region) for box in boxes):
                    return True
        return False

    def room(self, number: int, start: int, stop: int) -> memoryview | None:
        """Return memory into which these bytes can be read directly, or None unless one request alone needs them."""
        found = self._landings.get(number, ())
        if len(found) != 1 or found[0].run is None or start < found[0].run[0] or stop > found[0].run[1]:
            return None
        low = found[0].run[0]
        return found[0].target.reshape(-1)[start - low : stop - low].data

    def add(self, number: int, start: int, data: memoryview) -> None:
        """Add bytes of a piece that begin at byte `start` of the piece. They must be whole elements."""
        sizes, item = self._pieces[number]
        source = np.frombuffer(data, np.uint8)
        for landing in self._landings.get(number, ()):
            if landing.run is not None:
                low, high = landing.run
                first, last = max(low, start), min(high, start + len(source))
                if first < last:
                    landing.target.reshape(-1)[first - low : last - low] = source[first - start : last - start]
            else:
                _scatter(source, start, sizes, item, landing)


def _row(region: Box, sizes: Dims, view: Bytes, item: int) -> tuple[int, int] | None:
    start, stop = run_of(region, sizes)
    whole = stop - start == math.prod(region[1]) and view.flags.c_contiguous
    return (start * item, stop * item) if whole else None


def _scatter(source: Bytes, start: int, sizes: Dims, item: int, landing: _Landing) -> None:
    place = 0
    for box in boxes_of_run(sizes, start // item, (start + len(source)) // item):
        count = math.prod(box[1]) * item
        common = intersect(box, landing.region)
        if common is not None:
            piece = source[place : place + count].reshape(*box[1], item)
            there = tuple(slice(i, i + n) for i, n in zip(*within(common, landing.region), strict=True))
            here = tuple(slice(i, i + n) for i, n in zip(*within(common, box), strict=True))
            landing.target[there] = piece[here]
        place += count


def entry_matches(path: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches an entry: both `sched` and `sched.*` match the entry `sched`."""
    return matches(path, patterns) or matches(f"{path}.", patterns)


def select(view: RankView, patterns: Sequence[str], *, whole: bool = True) -> RankView:
    """Select the tensors whose names match a shell pattern, and matching entries without tensors. A module may be
    selected in part. Other entries that would lose a tensor are dropped, unless `whole` is False. A tensor of which
    only an alias matches is renamed to the alias."""
    entries, notes = list[OriginEntry](), list(view.notes)
    for entry in view.entries:
        names = tuple(name for name in entry.names if matches(name, patterns))
        if names and (entry.kind == "module" or not whole or len(names) == len(entry.names)):
            entries.append(structs.replace(entry, names=names))
        elif not entry.names and entry_matches(show(entry.path), patterns):
            entries.append(entry)
        elif names:
            notes.append(f"skipped {show(entry.path)}, because only some of its tensors match")
    tensors, aliases, called = dict[str, str](), dict[str, str](), dict[str, str]()
    kept = dict.fromkeys(name for entry in entries for name in entry.names)
    for name in sorted(kept, key=lambda name: name in view.aliases):  # main names before aliases
        of = view.aliases.get(name, name)
        if called.setdefault(of, name) == name:
            tensors[name] = view.tensors[of]
        else:
            aliases[name] = called[of]
    ordered = {name: tensors[name] for name in kept if name in tensors}
    return replace(view, entries=tuple(entries), tensors=ordered, aliases=aliases, notes=tuple(notes))


def check_patterns(views: Sequence[RankView], patterns: Sequence[str]) -> None:
    """Raise UsageError if a pattern matches no name."""
    names = {name for view in views for name in (*view.tensors, *view.aliases)}
    entries = [entry for view in views for entry in view.entries]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names) and not any(
            entry_matches(show(entry.path), [pattern]) for entry in entries
        ):
            some = ", ".join(sorted(names)[:3]) or "(there are no tensors)"
            raise UsageError(f"no name matches {pattern!r}: names are for example {some}; * matches any text")


def canonical_names(entries: Iterable[OriginEntry], aliases: Mapping[str, str]) -> list[str]:
    """Return the main names of all tensors of some entries, each once."""
    return list(dict.fromkeys(aliases.get(name, name) for entry in entries for name in entry.names))


# -- the description: written next to the tensors into files of other libraries, so that an import loses nothing --

DESCRIPTION = "__everystep__"  # key of the description in files of other libraries
MAX_DESCRIPTION = 64 << 20  # maximum bytes of a description


def fingerprint(root: Any, form: Callable[[Any], tuple[str, tuple[int, ...]] | None]) -> str:
    """Return a digest of everything in a file except the bytes of tensors.

    `form`: returns dtype and shape of a tensor, None for any other value. The digest ignores what some formats lose:
        types of containers, order, empty containers, and whether keys are numbers or text.
    """
    lines = list[Any]()
    pending: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while pending:
        path, value = pending.pop()
        if (tensor := form(value)) is not None:
            lines.append([path, "tensor", *tensor])
        elif isinstance(value, Mapping):
            # Settings by parameter are ignored, because they are aliases (`ckpt.tools.convert.to_dcp`).
            pending += [((*path, str(k)), v) for k, v in value.items() if not str(k).startswith("param_groups.")]
        elif isinstance(value, (list, tuple)):
            pending += [((*path, str(i)), one) for i, one in enumerate(value)]
        else:
            plain = sorted(repr(_plain(one)) for one in value) if isinstance(value, set) else _plain(value)
            lines.append([path, type(plain).__name__, repr(plain)])
    return file_digest("\n".join(sorted(json.dumps(line) for line in lines)).encode())


def _plain(value: Any) -> Any:
    """Return torch's dtypes and devices as text, because an import also converts them."""
    return str(value) if type(value).__module__ == "torch" else value


def describe(view: RankView, places: Mapping[str, Sequence[str | int]], seal: str = "") -> str:
    """Return entries and aliases as JSON. `places`: path of each tensor in the file. `seal`: result of `fingerprint`
    for the file."""
    aliases, at = dict(view.aliases), {name: tuple(place) for name, place in places.items()}
    return canonical(msgspec.to_builtins(Described(1, view.entries, aliases, at, view.step, seal))).decode()


class Described(msgspec.Struct, frozen=True):
    """The parsed contents of a description."""

    version: Annotated[int, Meta(le=1)]
    entries: tuple[OriginEntry, ...]
    aliases: dict[str, str]
    places: dict[str, tuple[str | int, ...]]
    step: Annotated[int, Meta(ge=0, lt=10**18)] | None
    seal: str = ""


def described(text: str) -> Described:
    """Parse a description. Raises CorruptError if it is invalid."""
    try:
        if len(text) > MAX_DESCRIPTION:
            raise ValueError("implausibly large")
        return msgspec.convert(json.loads(text), Described)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"{DESCRIPTION} is damaged, or of a newer version: {error}") from None
