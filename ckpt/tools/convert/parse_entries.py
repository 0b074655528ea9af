"""Build the entries of a state from another library, and record where the bytes of their tensors are in the files.

Objects that torch's loader returns become tensors (locations of bytes) and plain values (`Values`). A file that this
library exported describes its entries (`from_description`); for other files `parse_state` infers the entries.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from ckpt.core.format.boxes import Dims
from ckpt.core.format.layout import BITS
from ckpt.core.format.values import MAX_DEPTH, Json, Path, encode, is_text, plain_dtype, show
from ckpt.core.state.tensors import DTYPE_NAME, from_array, overlaps_itself
from ckpt.errors import CorruptError, UsageError
from ckpt.tools.convert.source import DESCRIPTION, OriginEntry, described, fingerprint
from ckpt.tools.convert.source_files import FilePiece, Foreign, refuse


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The location of a tensor's bytes. `strides`: in elements, None for row-major order. Equal references are views of
    the same memory."""

    dtype: str
    shape: Dims
    file: str
    at: int
    strides: Dims | None = None


@dataclass(frozen=True, slots=True)
class Chunks:
    """A tensor that is stored in chunks. Each chunk is a box of the tensor: (offsets, sizes, location)."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], TensorRef], ...]


AnyTensor = TensorRef | Chunks
Place = tuple[str | int, ...]


def is_tensor(value: object) -> bool:
    return type(value) in (TensorRef, Chunks)


@dataclass
class Parts:
    """The chunks and aliases of a `Foreign` that is being built. Raises UsageError if two tensors get the same name.
    Tensors that view the same bytes in the same way become one tensor with several names."""

    pieces: list[FilePiece] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    held: dict[str, bytes] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _owners: dict[AnyTensor, str] = field(default_factory=dict)

    def tensor(self, name: str, value: AnyTensor, *, shared: bool = True) -> None:
        if name in self._names or name == "__metadata__" or not is_text(name):
            raise UsageError(f"{name!r} is reserved, or the name of two tensors in the file")
        self._names.add(name)
        if shared and 0 not in value.shape:
            owner = self._owners.setdefault(value, name)
            if owner != name:
                self.aliases[name] = owner
                return
        if type(value) is TensorRef:
            zero = (0,) * len(value.shape)
            self.pieces.append(self._piece(name, value.shape, zero, value))
        else:
            assert isinstance(value, Chunks)
            self.pieces += [self._piece(name, value.shape, offsets, ref) for offsets, _, ref in value.parts]

    def _piece(self, name: str, whole: tuple[int, ...], offsets: tuple[int, ...], ref: TensorRef) -> FilePiece:
        return FilePiece(name, ref.dtype, whole, offsets, ref.shape, ref.file, ref.at, ref.strides)

    def array(self, name: str, value: np.ndarray[Any, Any]) -> Json:
        data, reference = from_array(value, (name,))
        file = f"(pickled) {name}"
        self.held[file] = data.numpy().tobytes()
        self.tensor(name, TensorRef("U8", (data.numel(),), file, 0), shared=False)
        return {**reference, "name": name}

    def values(self, value: Any, path: Path) -> tuple[Json, tuple[str, ...]]:
        """Return plain values with references to their tensors, and the names of these tensors."""
        names: list[str] = []

        def extern(found: object, path: Path) -> Json | None:
            name = show(path)
            if is_tensor(found):
                self.tensor(name, found)  # type: ignore[arg-type]
                reference: Json = {"$": "tensor", "name": name}
            elif isinstance(found, np.ndarray):
                reference = self.array(name, found)
            else:
                return None
            names.append(name)
            return reference

        return encode(value, path, extern), tuple(names)


# -- convert what torch has read --

OBJECT = object()  # marks a value that is neither a tensor nor a plain value
PLAIN = (bool, int, float, complex, str, bytes, bytearray)


@dataclass(frozen=True, slots=True)
class Container:
    """The objects that torch read at byte `start` of a file. `root`: the objects; their tensors have no memory.
    `storages`: by address, each storage with its offset in the container, or None if its bytes are missing."""

    root: Any
    file: str
    start: int
    storages: dict[int, tuple[torch.UntypedStorage, int | None]]


@dataclass
class Values:
    """Converts objects that torch has read to plain values and TensorRefs. Raises UsageError for unsupported tensors.

    `changes`: paths of values whose type was changed, by the kind of change. `objects`: unsupported objects by path.
        They are dropped, or replaced by None in a list.
    """

    changes: dict[str, list[Path]] = field(default_factory=dict)
    objects: dict[Path, str] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"{show(paths[0])}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: {text}"
            for text, paths in self.changes.items()
        )

    def note(self, path: Path, text: str) -> None:
        self.changes.setdefault(text, []).append(path)

    def all_of(self, container: Container, path: Path = ()) -> Any:
        """Convert the root of a container. Return OBJECT if the root is an unsupported object."""
        return self._plain(container.root, path, container)

    def _plain(self, value: Any, path: Path, container: Container) -> Any:
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{show(path[:4])}…: nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, torch.Tensor):
            return tensor_ref(value, path, container)
        if isinstance(value, (np.generic, np.ndarray)) and (value.dtype.hasobject or value.dtype.names):
            return self._object(path, "a numpy value with objects or fields")
        if value is None or kind in PLAIN or isinstance(value, (np.generic, np.ndarray)):
            return value
        if kind is set:
            return {self._plain(one, path, container) for one in value} - {OBJECT}
        if kind in (list, tuple):
            found = (self._plain(part, (*path, i), container) for i, part in enumerate(value))
            return kind(None if one is OBJECT else one for one in found)
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
        if isinstance(value, type):
            return self._object(path, f"the class {value.__module__}.{value.__qualname__}")
        return self._object(path, f"an object of {kind.__module__}.{kind.__qualname__}")

    def _object(self, path: Path, what: str) -> Any:
        self.objects[path] = what
        return OBJECT

    def _pairs(self, value: dict[Any, Any], path: Path, container: Container) -> list[tuple[Any, Any]]:
        if not all(type(key) in (str, int) for key in value):
            raise UsageError(f"{show(path)}: a key that is neither str nor int cannot be kept")
        pairs = [(key, self._plain(one, (*path, key), container)) for key, one in value.items()]
        return [(key, one) for key, one in pairs if one is not OBJECT]


def tensor_ref(tensor: torch.Tensor, path: Path, container: Container) -> TensorRef:
    """Return the location of a tensor's bytes. Raise UsageError if these bytes alone do not define the tensor."""
    if problem := _problem(tensor):
        raise refuse(path, problem)
    dtype, shape, strides = DTYPE_NAME[tensor.dtype], tuple(tensor.shape), tensor.stride()
    storage = tensor.untyped_storage()
    if storage._cdata not in container.storages:
        raise refuse(path, "is on the meta device and has no values")
    _, start = container.storages[storage._cdata]
    if start is None and storage.nbytes():
        raise CorruptError(f"{show(path)}: its {storage.nbytes()} bytes are missing in the file")
    at = container.start + (start or 0) + tensor.storage_offset() * BITS[dtype] // 8
    return TensorRef(dtype, shape, container.file, at, None if tensor.is_contiguous() else strides)


def _problem(tensor: torch.Tensor) -> str:
    if hasattr(tensor, "placements"):
        return "is one rank's shard of a DTensor: save .full_tensor(), or use torch.distributed.checkpoint"
    if tensor.layout != torch.strided:
        return "is sparse: convert it with .to_dense()"
    if tensor.is_quantized or tensor.is_nested:
        return "is quantized or nested: save its component tensors"
    if tensor.is_conj() or tensor.is_neg():
        return "is a conjugate or negated view: call .resolve_conj().resolve_neg() before saving"
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        return "is expanded, so its elements share memory: use .contiguous() before saving"
    return "" if tensor.dtype in DTYPE_NAME else f"has dtype {tensor.dtype}, which cannot be stored"


# -- read the description in a file --


def from_description(what: str, folder: FilePath, text: object, root: Any, find: Callable[[Place], Any]) -> Foreign:
    """Return the entries that a file's own description lists. `root`: contents without the description. `find`: returns
    the tensor at a path, or raises LookupError. Raise UsageError if the file was changed after the description."""
    if type(text) is not str:
        raise CorruptError(f"{DESCRIPTION} is damaged: not a text")
    description = described(text)
    entries, aliases, paths, step = description.entries, description.aliases, description.places, description.step
    if description.seal and description.seal != fingerprint(root, _form):
        raise UsageError(
            f"it was changed after its export, and {DESCRIPTION} in it describes the old contents: delete that "
            "key to import the current contents"
        )
    for entry in entries:
        _check_references(entry)
    parts = Parts()
    arrays = {aliases.get(name, name) for entry in entries for name in _arrays(entry.values)}
    names = dict.fromkeys(name for entry in entries for name in entry.names)
    for name in dict.fromkeys(aliases.get(name, name) for name in names):
        if name not in paths:
            raise CorruptError(f"{DESCRIPTION} is damaged: it has no path for {name}")
        try:
            value = find(paths[name])
        except (LookupError, TypeError):
            value = None
        if isinstance(value, np.ndarray):
            parts.array(name, value)
        elif is_tensor(value):
            parts.tensor(name, _row(value) if name in arrays else value, shared=False)
        else:
            raise CorruptError(f"{DESCRIPTION} is damaged: {name} is not at its path")
    return Foreign(what, folder, tuple(parts.pieces), aliases, entries, (), step, parts.held)


def _form(value: object) -> tuple[str, tuple[int, ...]] | None:
    return (value.dtype, value.shape) if isinstance(value, (TensorRef, Chunks)) else None


def _check_references(entry: OriginEntry) -> None:
    """Raise CorruptError if the plain values of an entry contain invalid references."""
    for reference in _tagged(entry.values):
        known = reference.get("name") in entry.names
        if reference["$"] == "ndarray":
            shape = reference.get("shape")
            known = known and type(shape) is list and all(type(n) is int and n >= 0 for n in shape)
            plain_dtype(reference.get("dtype"))
        if not known:
            raise CorruptError(f"{DESCRIPTION} is damaged: {show(entry.path)} refers to a missing tensor")


def _tagged(values: Json) -> Iterator[dict[str, Any]]:
    """Yield all references to tensors and arrays in plain values."""
    if type(values) is dict and values.get("$") in ("tensor", "ndarray"):
        yield values
    elif type(values) in (dict, list):
        for one in values.values() if type(values) is dict else values:
            yield from _tagged(one)


def _arrays(values: Json) -> Iterator[str]:
    """Yield the names of all numpy arrays in plain values."""
    return (str(reference.get("name")) for reference in _tagged(values) if reference["$"] == "ndarray")


def _row(value: AnyTensor) -> AnyTensor:
    """Return a tensor as one row of bytes, as a state stores arrays. A tensor with strides is returned unchanged."""
    if isinstance(value, Chunks) or value.strides is not None:
        return value
    return TensorRef("U8", (math.prod(value.shape) * BITS[value.dtype] // 8,), value.file, value.at)


def at_place(root: Any, place: Place) -> Any:
    """Return the value at a path of keys. Raise LookupError or TypeError if there is no value."""
    for key in place:
        if is_tensor(root) or type(root) is str:
            raise KeyError(key)
        root = root[key]
    return root
