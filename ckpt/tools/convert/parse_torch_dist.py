"""Parse a `torch_dist` checkpoint of Megatron into the same entries as those of a run of `ckpt.megatron`.

The checkpoint is a folder of torch's distributed checkpoints (`convert.parse_dcp`) in which all layers of the decoder
are one tensor, plus `common.pt`, a torch.save file, and `metadata.json`. An optimizer that was saved as
`fully_reshardable` has whole tensors. Other kinds are rejected, because only Megatron can assemble them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from ckpt.core.format.layout import BITS
from ckpt.core.format.regular_file import start_of
from ckpt.core.format.values import Path, show
from ckpt.errors import CorruptError, UsageError
from ckpt.tools.convert.parse_dcp import items_of
from ckpt.tools.convert.parse_entries import AnyTensor, Chunks, Parts, TensorRef, Values, is_tensor
from ckpt.tools.convert.parse_torch import load, naming_file, opened
from ckpt.tools.convert.source import OriginEntry
from ckpt.tools.convert.source_files import Foreign

WHAT = "a torch_dist checkpoint of Megatron"
LAYERS = re.compile(r"(decoder\.layers)\.(?!\d)(.+)")  # matches keys of tensors that contain all layers
STATE = re.compile(r"optimizer\.state\.(param|exp_avg|exp_avg_sq)\.(.+)")
OPTIMIZER = ("optimizer.", "chained_")  # prefixes of the keys that belong to optimizers
NOWHERE = {"place": [0] * 5}  # random numbers of a rank that does not exist, so that no rank restores them
TOLD = ("checkpoint_version", "content_metadata", "iteration", "model", "opt_param_scheduler", "optimizer")
MAX_SAID = 1 << 20  # maximum bytes of Megatron's metadata.json


def sniff(path: FilePath) -> bool:
    """Return True if the folder contains Megatron's description of its checkpoint format."""
    return "sharded_backend" in _megatron_metadata(path)


def _megatron_metadata(path: FilePath) -> dict[str, Any]:
    try:
        found = json.loads(start_of(path / "metadata.json", MAX_SAID))
    except (ValueError, RecursionError):
        return {}
    return found if type(found) is dict else {}


def parse(path: FilePath, at: Path = ("model",)) -> Foreign:
    """Parse such a checkpoint, and place the model at `at`. Raise the errors of `parse_dcp`, and UsageError for another
    checkpoint format of Megatron."""
    if (backend := _megatron_metadata(path)["sharded_backend"]) != "torch_dist":
        raise UsageError(
            f"{path} has Megatron's format {backend!r:.40}, not torch_dist: load and save it with Megatron"
        )
    values, paths, _ = items_of(path, tensors_only=True)
    common = path / "common.pt"
    with opened(common) as file, naming_file(common):
        plain = Values()
        found = plain.all_of(load(file, common.name))
        if type(found) is not dict:
            raise CorruptError("not written by Megatron")
    with naming_file(path):
        others = {key.partition("/")[0] for key in paths if key not in values}
        return _Reading(path, values, found, at).read(others, plain.objects)


class _Reading:
    """Converts the contents of a checkpoint. `tensors`: by Megatron's keys. `common`: contents of common.pt."""

    def __init__(self, folder: FilePath, tensors: Mapping[str, AnyTensor], common: Mapping[str, Any], at: Path) -> None:
        self._folder, self._common, self._at = folder, common, at
        own = {key: one for key, one in tensors.items() if key.startswith(OPTIMIZER)}
        self._weights = dict(_by_layer({key: one for key, one in tensors.items() if key not in own}))
        self._trained = bool(own)
        self._state = {kind: dict[str, AnyTensor]() for kind in ("param", "exp_avg", "exp_avg_sq")}
        for key, one in own.items():
            if match := STATE.fullmatch(key):
                self._state[match[1]] |= _by_layer({match[2]: one})
        self._parts = Parts()

    def read(self, others: set[str], objects: Mapping[Path, str]) -> Foreign:
        """Return the contents. `others`: keys of values that are not tensors. `objects`: objects in common.pt that only
        code could create."""
        problem = self._problem() if self._trained else ""
        entries, parts, missed = [self._model(masters=not problem)], self._parts, dict[Path, str]()
        if self._trained and not problem:
            entries += [self._optim(), self._stateful(("megatron",), self._settings())]
            entries.append(self._stateful(("rng",), NOWHERE))
            if type(schedule := self._common.get("opt_param_scheduler")) is dict:
                entries.append(self._stateful(("sched",), schedule))
            taken = {"optimizer": "megatron", "opt_param_scheduler": "sched"}
            for there, what in objects.items():
                if ours := taken.get(str(there[0])):
                    missed[(ours, *there)] = f"{what}, in common.pt"
        step = self._common.get("iteration")
        step = step if type(step) is int and 0 <= step < 2**53 else None
        if problem:
            missed[("optim",)] = problem
        notes = (self._left_out(others | {show(one[:1]) for one in objects}),)
        return Foreign(
            WHAT, self._folder, tuple(parts.pieces), {}, tuple(entries), notes, step, parts.held, objects=missed
        )

    def _problem(self) -> str:
        """Return why only Megatron can assign the optimizer's state to the weights, or "" if this module can."""
        saved = self._common.get("optimizer")
        how = saved.get("param_state_sharding_type") if type(saved) is dict else None
        if how != "fully_reshardable":
            return (
                f"which Megatron saved {f'as {how}' if how else 'from another optimizer'}; load it in Megatron with "
                "the same sharding, and save it with --dist-ckpt-optim-fully-reshardable"
            )
        params, *moments = self._state.values()
        if any(params.keys() != one.keys() for one in moments) or not params.keys() <= self._weights.keys():
            return "which differs between weights"
        return ""

    def _model(self, *, masters: bool) -> OriginEntry:
        """Return the weights. `masters`: use the optimizer's fp32 copies for the trained weights."""
        better = self._state["param"] if masters else {}
        names = []
        for name, weight in self._weights.items():
            names.append(show((*self._at, name)))
            self._parts.tensor(names[-1], better.get(name, weight), shared=False)
        return OriginEntry(self._at, "module", {}, tuple(names))

    def _optim(self) -> OriginEntry:
        names = []
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, one in self._state[kind].items():
                names.append(show(("optim", "state", name, kind)))
                self._parts.tensor(names[-1], one, shared=False)
        return OriginEntry(("optim",), "module", {}, tuple(names))

    def _stateful(self, path: Path, value: dict[str, Any]) -> OriginEntry:
        data, names = self._parts.values(value, path)
        return OriginEntry(path, "stateful", {}, names, data)

    def _settings(self) -> dict[str, Any]:
        """Return the plain values that `ckpt.megatron` saves once for all ranks."""
        saved = self._common["optimizer"]
        try:
            groups = [
                {k: one for k, one in group.items() if k not in ("params", "step")}
                for group in saved["optimizer"]["param_groups"]
            ]
            steps = {float(group["step"]) for group in saved["optimizer"]["param_groups"]}
            (step,) = steps
            scale = {k: _number(self._folder, one) for k, one in saved.get("grad_scaler", {}).items()}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"common.pt: not the state of a Megatron optimizer: {error!r}") from None
        return {"step": step, "groups": groups, "scale": scale}

    def _left_out(self, keys: set[str]) -> str:
        keys = {key for key in keys if not key.startswith(OPTIMIZER) and not key.endswith("_extra_state")}
        named = ", ".join(sorted((keys | {str(key) for key in self._common}) - set(TOLD))) or "nothing"
        return f"skipped Megatron's own {named}; random numbers start from Megatron's seed"


def _by_layer(tensors: Mapping[str, AnyTensor]) -> Iterator[tuple[str, AnyTensor]]:
    """Split tensors of all layers into one tensor per layer, with the names that `ckpt.megatron` uses."""
    for key, tensor in tensors.items():
        match = LAYERS.fullmatch(key)
        if match is None:
            yield key, tensor
        else:
            yield from ((f"{match[1]}.{i}.{match[2]}", _layer(tensor, i)) for i in range(tensor.shape[0]))


def _layer(tensor: AnyTensor, number: int) -> AnyTensor:
    """Return the tensor of one layer, which is one index of the first dimension."""
    item = BITS[tensor.dtype] // 8
    whole = (((0,) * len(tensor.shape), tensor.shape, tensor),) if isinstance(tensor, TensorRef) else tensor.parts
    found = []
    for offsets, sizes, ref in whole:
        if offsets[0] <= number < offsets[0] + sizes[0]:
            apart = ref.strides[0] if ref.strides else math.prod(sizes[1:])
            at = ref.at + (number - offsets[0]) * apart * item
            strides = ref.strides[1:] if ref.strides else None
            found.append((offsets[1:], sizes[1:], TensorRef(ref.dtype, sizes[1:], ref.file, at, strides)))
    return Chunks(tensor.dtype, tensor.shape[1:], tuple(found))


def _number(folder: FilePath, value: Any) -> Any:
    """Read a tensor of one float, and return the number."""
    if not is_tensor(value):
        return value
    if value.dtype != "F32" or math.prod(value.shape) != 1:
        raise ValueError("the loss scale has an unexpected type")
    return float(np.fromfile(folder / value.file, "<f4", 1, offset=value.at)[0])
