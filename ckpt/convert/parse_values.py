"""What torch's loader has made of a file, in our terms: tensors by where their bytes lie, and plain values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckpt.convert.source_files import refuse
from ckpt.errors import CorruptError, UsageError
from ckpt.format.boxes import Dims
from ckpt.format.layout import BITS
from ckpt.format.values import MAX_DEPTH, Path, show
from ckpt.state.tensors import DTYPE_NAME, overlaps_itself


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor's bytes lie. `strides`, in elements: None if in row-major order. Equal: the same view."""

    dtype: str
    shape: Dims
    file: str
    at: int
    strides: Dims | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """What torch has read at byte `start` of a file. `root`: with tensors that have no memory; `records`: the bytes of
    each record, by where in the container it begins."""

    root: Any
    file: str
    start: int
    records: dict[int, int]


@dataclass
class Values:
    """Turns what torch has read into plain values and TensorRef. UsageError names the path of what is neither.

    `changes`: what does not come back as what it was, and where.
    """

    changes: dict[str, list[Path]] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"{show(paths[0])}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: {text}"
            for text, paths in self.changes.items()
        )

    def note(self, path: Path, text: str) -> None:
        self.changes.setdefault(text, []).append(path)

    def all_of(self, container: Container, path: Path = ()) -> Any:
        return self._plain(container.root, path, container)

    def _plain(self, value: Any, path: Path, container: Container) -> Any:
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{show(path[:4])}…: nested deeper than {MAX_DEPTH}")
        if isinstance(value, torch.Tensor):
            return tensor_ref(value, path, container)
        if isinstance(value, (np.generic, np.ndarray)) and (value.dtype.hasobject or value.dtype.names):
            raise refuse(path, "is a numpy value with objects or fields in it, which cannot be kept safely")
        if value is None or kind in (bool, int, float, str, bytes) or isinstance(value, (np.generic, np.ndarray)):
            return value
        if kind in (list, tuple):
            return kind(self._plain(part, (*path, i), container) for i, part in enumerate(value))
        if kind in (dict, OrderedDict, Counter):
            pairs = self._pairs(value, path, container)
            return (
                OrderedDict(pairs) if kind is OrderedDict else Counter(dict(pairs)) if kind is Counter else dict(pairs)
            )
        if kind is torch.Size:
            self.note(path, "a torch.Size became a tuple")
            return tuple(value)
        if kind in (torch.device, torch.dtype):
            self.note(path, f"a torch.{kind.__name__} became its name")
            return str(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise refuse(path, f"is a {name}, which cannot be kept safely: save plain values instead")

    def _pairs(self, value: dict[Any, Any], path: Path, container: Container) -> list[tuple[Any, Any]]:
        if not all(type(key) in (str, int) for key in value):
            raise UsageError(f"{show(path)}: a key that is neither str nor int cannot be kept")
        return [(key, self._plain(one, (*path, key), container)) for key, one in value.items()]


def tensor_ref(tensor: torch.Tensor, path: Path, container: Container) -> TensorRef:
    """Where its bytes lie. UsageError if they are not the whole truth about it."""
    if problem := _problem(tensor):
        raise refuse(path, problem)
    dtype, shape, strides = DTYPE_NAME[tensor.dtype], tuple(tensor.shape), tensor.stride()
    storage, item = tensor.untyped_storage(), BITS[dtype] // 8
    start = getattr(storage, "_checkpoint_offset", None)  # torch's word for where the bytes of a storage begin
    if start is None:
        raise refuse(path, "lies where this torch does not say: import the file with torch 2.7 or newer")
    if container.records.get(start) != storage.nbytes() and storage.nbytes():
        raise CorruptError(f"{show(path)}: the file does not hold its {storage.nbytes()} bytes")
    at = container.start + start + tensor.storage_offset() * item
    return TensorRef(dtype, shape, container.file, at, None if tensor.is_contiguous() else strides)


def _problem(tensor: torch.Tensor) -> str:
    if hasattr(tensor, "placements"):
        return "is one rank's part of a DTensor: save .full_tensor(), or with torch.distributed.checkpoint"
    if tensor.layout != torch.strided:
        return "is sparse: convert it with .to_dense()"
    if tensor.is_quantized or tensor.is_nested:
        return "is quantized or nested: save its parts"
    if tensor.is_conj() or tensor.is_neg():
        return "is a conjugate or negated view: call .resolve_conj().resolve_neg() before saving"
    if tensor.is_meta:
        return "is on the meta device: it has no values"
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        return "is expanded, so its elements share memory: use .contiguous() before saving"
    return "" if tensor.dtype in DTYPE_NAME else f"has dtype {tensor.dtype}, which cannot be stored"
