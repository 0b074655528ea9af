"""Values as torch and numpy pickle them, from what `ckpt.convert.safe_pickle` has read: tensors by where their bytes
lie.

Nothing here is torch's: that a tensor was saved with its strides from its storage is the format, and is read as such.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.convert.safe_pickle import Name, Outside, PickleNode
from ckpt.errors import CorruptError, UsageError
from ckpt.format.boxes import Dims
from ckpt.format.layout import BITS, MAX_DIMS
from ckpt.format.values import MAX_DEPTH, Path, plain_dtype, show

DTYPES = {
    "float64": "F64", "int64": "I64", "uint64": "U64", "complex64": "C64", "float32": "F32", "int32": "I32",
    "uint32": "U32", "float16": "F16", "bfloat16": "BF16", "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex128": "C128", "complex32": "C32",
    "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4_E2M1X2",
}  # fmt: skip
"""Our names of torch's dtypes, as in `ckpt.state.tensors`, which needs torch."""

_TYPED = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "LongStorage": "I64", "IntStorage": "I32",
    "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL", "BFloat16Storage": "BF16",
    "ComplexDoubleStorage": "C128", "ComplexFloatStorage": "C64",
}  # fmt: skip
STORAGES = {f"torch.{name}": dtype for name, dtype in _TYPED.items()}
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
MORE_DTYPES = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
               "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
               "int1", "int2", "int3", "int4", "int5", "int6", "int7")  # fmt: skip

_AS_PLAIN = "save plain tensors instead"
REFUSED = {
    "torch._utils._rebuild_sparse_tensor": "is sparse: convert it with .to_dense()",
    "torch._utils._rebuild_sparse_csr_tensor": "is sparse: convert it with .to_dense()",
    "torch._utils._rebuild_qtensor": "is quantized: save its parts",
    "torch._utils._rebuild_nested_tensor": "is nested: save its parts",
    "torch._utils._rebuild_meta_tensor_no_storage": "is on the meta device: it has no values",
    "torch._utils._rebuild_wrapper_subclass": f"is a tensor subclass with storage of its own kind: {_AS_PLAIN}",
    "torch._utils._rebuild_device_tensor_from_numpy": "was on a device whose tensors are saved by numpy: save .cpu()",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "was on a device of its own kind: save .cpu()",
    "torch.distributed.tensor.DTensor": "is one rank's part of a DTensor: save .full_tensor(), or with "
    "torch.distributed.checkpoint",
    "torch.distributed._tensor.DTensor": "is one rank's part of a DTensor: save .full_tensor()",
}
"""Tensors whose bytes are not the whole truth about them. Nothing of them is run either."""

_TENSORS = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer",
            "torch.nn.Parameter", "torch.nn.Buffer")  # fmt: skip
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_FROM_BUFFER = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")
_DICTS = {
    "builtins.dict", "lightning_fabric.utilities.data.AttributeDict", "lightning.fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict", "lightning.pytorch.utilities.parsing.AttributeDict",
}  # fmt: skip
_BUILT_IN = ("int", "long", "float", "bool", "str", "unicode", "bytes", "bytearray", "list", "tuple", "set",
             "frozenset", "dict", "complex")  # fmt: skip

ALLOWED = frozenset(
    {*STORAGES, *UNTYPED, *REFUSED, *_TENSORS, *_FROM_BUFFER, *_DICTS}
    | {f"torch.{name}" for name in (*DTYPES, *MORE_DTYPES, "Size", "device")}
    | {f"torch.{name}Storage" for name in ("QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4")}
    | {f"torch.per_{name}" for name in ("tensor_affine", "channel_affine", "tensor_symmetric", "channel_symmetric")}
    | {"torch.per_channel_affine_float_qparams"}
    | {f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "parameter")}
    | {
        "torch._utils._rebuild_parameter_with_state",
        "torch._tensor._rebuild_from_type_v2",
        "torch.serialization._get_layout",
    }
    | {"torch.distributed.device_mesh.DeviceMesh", "torch.distributed._mesh_layout._MeshLayout"}
    | {f"torch.distributed.tensor.placement_types.{name}" for name in ("Shard", "Replicate", "Partial")}
    | {f"torch.distributed.tensor._dtensor_spec.{name}" for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")}
    | {f"{module}.{name}" for module in _NUMPY for name in ("scalar", "_reconstruct")}
    | {"numpy.dtype", "numpy.ndarray", "_codecs.encode"}
    | {"collections.OrderedDict", "collections.Counter", "collections.defaultdict"}
    | {f"builtins.{name}" for name in _BUILT_IN}
)
"""Names that are known here. That one is known does not mean that it is accepted everywhere."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor's bytes lie. `strides`, in elements: None if in row-major order. Equal: the same view."""

    dtype: str
    shape: Dims
    file: str
    at: int
    strides: Dims | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """A numpy array, whose bytes, in row-major order, are in memory."""

    dtype: str  # numpy's
    shape: Dims
    data: bytes


Find = Callable[[str], tuple[str, int, int]]
"""The file that holds a storage, and where and how long that is in it. KeyError if there is none."""


@dataclass
class Values:
    """Turns what is inert into plain values, TensorRef and ArrayRef. UsageError names the path of what is neither.

    `changes`: what does not come back as what it was, and where.
    """

    find: Find
    changes: dict[str, list[Path]] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"{show(paths[0])}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: {text}"
            for text, paths in self.changes.items()
        )

    def note(self, path: Path, text: str) -> None:
        self.changes.setdefault(text, []).append(path)

    def plain(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str, bytes, bytearray):
            return value
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{show(path[:4])}…: nested deeper than {MAX_DEPTH}")
        if kind is list or kind is tuple:
            return kind(self.plain(part, (*path, i)) for i, part in enumerate(value))
        if kind is dict:
            return dict(self._pairs(value.items(), path))
        if kind is Name:
            return self._name(value.text, path)
        if kind is PickleNode:
            return self._node(value, path)
        raise refuse(path, "is a storage without a tensor: save the tensor")

    def _pairs(self, pairs: Any, path: Path) -> list[tuple[Any, Any]]:
        found = []
        for key, value in pairs:
            if type(key) not in (str, int):
                raise UsageError(f"{show(path)}: a key that is neither str nor int cannot be kept")
            found.append((key, self.plain(value, (*path, key))))
        return found

    def _name(self, text: str, path: Path) -> str:
        if text.removeprefix("torch.") in (*DTYPES, *MORE_DTYPES):
            self.note(path, "a torch.dtype became its name")
            return text
        raise refuse(path, f"is {text} itself, a class or function: {_AS_PLAIN} and plain values")

    def _node(self, node: PickleNode, path: Path) -> Any:
        name, args = node.name, node.args
        if name in REFUSED:
            raise refuse(path, REFUSED[name])
        try:
            if name.startswith("torch._"):
                return self._tensor(node, path)
            if name == "collections.OrderedDict":
                return OrderedDict(self._pairs([*_pairs_of(args), *node.pairs], path))
            if name == "collections.Counter":
                return Counter(dict(self._pairs([*_pairs_of(args), *node.pairs], path)))
            if name == "collections.defaultdict" or name in _DICTS:
                self.note(path, f"a {name.rpartition('.')[2]} became a dict")
                rest = args[1:] if name == "collections.defaultdict" else args
                return dict(self._pairs([*_pairs_of(rest), *node.pairs], path))
            if name == "torch.Size":
                self.note(path, "a torch.Size became a tuple")
                return dims(args[0])
            if name == "torch.device":
                self.note(path, "a torch.device became its name")
                return ":".join(str(part) for part in args if type(part) in (str, int))
            if name in ("_codecs.encode", "builtins.bytes"):
                return as_bytes(node)
            if name == "builtins.bytearray":
                return bytearray(as_bytes(args[0]) if args else b"")
            if name in {f"{module}.scalar" for module in _NUMPY}:
                return _scalar(args, path)
            if name in _FROM_BUFFER or name in {f"{module}._reconstruct" for module in _NUMPY}:
                return _array(node, path)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise CorruptError(f"{show(path)}: a damaged {name}: {str(error)[:200]}") from None
        raise refuse(path, f"is a {name}, which cannot be kept safely: save plain values instead")

    # -- tensors --

    def _tensor(self, node: PickleNode, path: Path) -> TensorRef:
        args, short = node.args, node.name.rpartition(".")[2]
        if short in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            if short == "_rebuild_parameter_with_state":
                self.note(path, "attributes of this parameter were left out")
            return self._inner(args[0], path)
        if short == "_rebuild_from_type_v2":
            function, kind, inner, _ = args
            if type(kind) is not Name or kind.text not in _TENSORS:
                raise refuse(path, f"is a tensor of the class {kind}: {_AS_PLAIN}")
            return self._inner(PickleNode(function.text, inner), path)
        if short not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            raise refuse(path, f"is a {node.name}: {_AS_PLAIN}")
        storage, offset, shape, strides = args[0], args[1], dims(args[2]), dims(args[3])
        rest = args[4:]
        dtype, extra = None, rest[2:]
        if short == "_rebuild_tensor_v3":
            dtype, extra = self._dtype(rest[2], path), rest[3:]
        if extra and extra[0]:
            raise refuse(path, "is a conjugate or negated view: call .resolve_conj().resolve_neg() before saving")
        return self._view(storage, dtype, offset, shape, strides, path)

    def _inner(self, value: Any, path: Path) -> TensorRef:
        if type(value) is not PickleNode:
            raise CorruptError(f"{show(path)}: a parameter of something that is no tensor")
        if value.name in REFUSED:
            raise refuse(path, REFUSED[value.name])
        if not value.name.startswith("torch._"):
            raise CorruptError(f"{show(path)}: a parameter of something that is no tensor")
        return self._tensor(value, path)

    def _dtype(self, name: Any, path: Path) -> str:
        text = name.text.removeprefix("torch.") if type(name) is Name else ""
        if text not in DTYPES:
            raise refuse(path, f"has dtype {text or '?'}, which cannot be stored")
        return DTYPES[text]

    def _view(self, storage: Any, dtype: str | None, offset: int, shape: Dims, strides: Dims, path: Path) -> TensorRef:
        if type(storage) is not Outside or type(storage.key) is not tuple or len(storage.key) != 5:
            raise CorruptError(f"{show(path)}: a tensor without a storage")
        _, kind, key, _, count = storage.key
        if type(kind) is not Name or type(key) is not str or type(count) is not int or count < 0:
            raise CorruptError(f"{show(path)}: a damaged storage")
        typed = STORAGES.get(kind.text)
        if dtype is None and typed is None:
            raise refuse(path, f"is in a {kind.text.rpartition('.')[2]}, which cannot be stored")
        item = BITS[dtype or typed or "U8"] // 8
        nbytes = count * (BITS[typed] // 8 if typed else 1)
        if type(offset) is not int or offset < 0 or len(shape) != len(strides) or len(shape) > MAX_DIMS:
            raise CorruptError(f"{show(path)}: a tensor of an impossible form")
        try:
            file, at, size = self.find(key)
        except KeyError:
            raise CorruptError(f"{show(path)}: the file does not hold its bytes") from None
        if size != nbytes:
            raise CorruptError(f"{show(path)}: {size} bytes where {nbytes} should be")
        return view(path, dtype or typed or "U8", shape, strides, file, at + offset * item, at + size)


def view(path: Path, dtype: str, shape: Dims, strides: Dims, file: str, at: int, end: int) -> TensorRef:
    """A tensor at a place of a file, which must not reach behind `end`."""
    item = BITS[dtype] // 8
    if 0 in shape:
        return TensorRef(dtype, shape, file, min(at, end))
    if at + (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * item > end:
        raise CorruptError(f"{show(path)}: a tensor that reaches behind its bytes")
    if _overlaps_itself(shape, strides):
        raise refuse(path, "is expanded, so its elements share memory: use .contiguous() before saving")
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and stride != expected:
            return TensorRef(dtype, shape, file, at, strides)
        expected *= n
    return TensorRef(dtype, shape, file, at)


def _overlaps_itself(shape: Dims, strides: Dims) -> bool:
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def refuse(path: Path, problem: str) -> UsageError:
    return UsageError(f"{show(path)}: this {problem}")


def dims(value: Any) -> Dims:
    """A torch.Size, or a tuple or list of sizes. ValueError if it is none."""
    if type(value) is PickleNode and value.name == "torch.Size":
        value = value.args[0]
    if type(value) not in (tuple, list) or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise ValueError("not a shape")
    return tuple(value)


def _pairs_of(args: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """What a dict is made of: nothing, another dict, or pairs."""
    if not args or args[0] is None:
        return []
    return list(args[0].items()) if type(args[0]) is dict else [(key, value) for key, value in args[0]]


# -- bytes and numpy --


def as_bytes(value: Any) -> bytes:
    """Bytes, also as protocol 2 has them: text of which each character is a byte."""
    if type(value) is bytearray:
        return bytes(value)
    if type(value) is PickleNode and value.name == "_codecs.encode" and value.args[1] == "latin1":
        return bytes(value.args[0].encode("latin1"))
    if type(value) is PickleNode and value.name == "builtins.bytes" and value.args == ():
        return b""
    if type(value) is not bytes:
        raise ValueError("not bytes")
    return value


def _numpy_dtype(node: Any, path: Path) -> np.dtype[Any]:
    if type(node) is not PickleNode or node.name != "numpy.dtype":
        raise ValueError("not a numpy dtype")
    code, state = node.args[0], node.state
    if type(code) is not str or code.startswith("O") or (state is not None and (state[2], state[3]) != (None, None)):
        raise refuse(path, "is a numpy value with objects or fields in it, which cannot be kept safely")
    order = "|" if state is None else state[1]
    order = "<" if order == "=" else order
    unit = ""
    if code[:1] in "mM" and state is not None and len(state) > 8:
        found, count, *_ = state[8][1]
        if (name := as_bytes(found).decode("ascii")) != "generic":
            unit = f"[{count if count != 1 else ''}{name}]"
    try:
        return plain_dtype(f"{order}{code}{unit}")
    except CorruptError as error:
        raise ValueError(str(error)) from None


def _scalar(args: tuple[Any, ...], path: Path) -> np.generic:
    kind, raw = _numpy_dtype(args[0], path), as_bytes(args[1])
    if kind.itemsize != len(raw) or not raw:
        raise ValueError(f"a numpy scalar of {len(raw)} bytes")
    found: np.generic = np.frombuffer(raw, kind)[0]
    return found


def _array(node: PickleNode, path: Path) -> ArrayRef:
    if node.name in _FROM_BUFFER:
        data, dtype, shape, order = node.args
        fortran = order == "F"
    else:
        _, shape, dtype, fortran, data = node.state
    kind, sizes = _numpy_dtype(dtype, path), dims(shape)
    raw = as_bytes(data)
    if kind.itemsize * math.prod(sizes) != len(raw):
        raise ValueError(f"a numpy array of {len(raw)} bytes")
    if fortran and raw:
        raw = np.frombuffer(raw, kind).reshape(sizes, order="F").tobytes("C")
    return ArrayRef(kind.str, sizes, raw)
