"""Describes tensors: dtype names, which tensors can be saved, which share memory, and how to create one again.

The module also encodes other special values: numpy arrays, constants of torch, members of enums and named tuples. It
never imports a class named in a file. An adapter encodes and restores objects of other classes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from enum import Enum, Flag
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.values import Json, Path, check_array, encode, is_plain_dtype, show
from ckpt.errors import CheckpointError, CorruptError, MismatchError, StateError

_NAMES = {
    "float64": "F64", "int64": "I64", "uint64": "U64", "complex64": "C64", "float32": "F32", "int32": "I32",
    "uint32": "U32", "float16": "F16", "bfloat16": "BF16", "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex128": "C128", "complex32": "C32",
    "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4_E2M1X2",
}  # fmt: skip
DTYPE_NAME = {getattr(torch, name): ours for name, ours in _NAMES.items() if hasattr(torch, name)}
TORCH_DTYPE = {ours: dtype for dtype, ours in DTYPE_NAME.items()}

Memory = tuple[int, torch.dtype, torch.Size, tuple[int, ...], torch.device, bool, bool]
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def check(tensor: Tensor, path: Path) -> Tensor:
    """Return the tensor. Raise StateError with its path if its bytes alone do not describe it completely."""
    inner = getattr(tensor, "_local_tensor", None)
    if isinstance(inner, Tensor) and hasattr(tensor, "placements"):  # for a DTensor, check this rank's shard
        check(inner, path)
        return tensor
    problem = None
    if torch.nn.parameter.is_lazy(tensor):
        problem = "has no shape yet: run the model once before it is saved"
    elif type(tensor) not in PLAIN and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        problem = f"is a {type(tensor).__name__}, a tensor subclass with its own kind of storage"
    elif tensor.layout != torch.strided:
        problem = f"is {tensor.layout}: convert it with .to_dense()"
    elif tensor.is_quantized or tensor.is_nested:
        problem = "is quantized or nested: save its parts"
    elif tensor.is_meta:
        problem = "is on the meta device: it has no values"
    elif tensor.dtype not in DTYPE_NAME:
        problem = f"has dtype {tensor.dtype}, which cannot be stored"
    elif not tensor.is_contiguous() and overlaps_itself(tensor):
        problem = "is expanded, so its elements share memory: use .contiguous()"
    if problem:
        raise StateError(f"{show(path)}: this tensor {problem}")
    check_memory(tensor, path)
    return tensor


def check_memory(tensor: Tensor, path: Path) -> None:
    """Raise StateError with the path if a tensor has elements outside its storage, for example after `resize_(0)`."""
    if tensor._is_zerotensor():
        raise StateError(f"{show(path)}: this tensor is a ZeroTensor, which has no memory: save a .clone() of it")
    if tensor.device.type not in ("cpu", "cuda") or not tensor.numel():
        return  # on other devices, an address may have another meaning
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        raise StateError(
            f"{show(path)}: this tensor is inside a transform, for example vmap: save it outside the transform"
        ) from None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed, there = (tensor.storage_offset() + reach + 1) * tensor.itemsize, storage.nbytes()
    if needed > there or not storage.data_ptr():
        raise StateError(
            f"{show(path)}: this tensor needs {needed} bytes, and its storage has {there}. Its memory was freed, for "
            "example by untyped_storage().resize_(): allocate it again before you save or restore, or take the tensor "
            "out of the state"
        )


def dims_of_expansion(tensor: Tensor) -> list[list[int]]:
    """Return each dimension along which a tensor is expanded, with its length. Return [] for special tensors."""
    if type(tensor) not in PLAIN or tensor.is_nested or tensor.layout != torch.strided or tensor.is_contiguous():
        return []
    return [[d, n] for d, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if n > 1 > stride]


def once(tensor: Tensor, expanded: list[list[int]]) -> Tensor:
    """Return a view of an expanded tensor that has each element once."""
    for dim, _ in reversed(expanded):
        tensor = tensor.select(dim, 0)
    return tensor.detach()


def is_expansion(expanded: Json, dims: int) -> bool:
    """Return True if `expand` accepts `expanded` for a tensor with that number of dimensions."""
    if type(expanded) is not list or not all(type(row) is list and len(row) == 2 for row in expanded):
        return False
    if not all(type(n) is int and 0 <= n < 2**40 for row in expanded for n in row) or len(expanded) > 64:
        return False
    return all(dim <= dims + i for i, (dim, _) in enumerate(expanded))


def expand(tensor: Tensor, expanded: list[list[int]]) -> Tensor:
    """Return the expanded tensor from a view that `once` made of it."""
    for dim, size in expanded:
        tensor = tensor.unsqueeze(dim)
        tensor = tensor.expand(*(size if d == dim else n for d, n in enumerate(tensor.shape)))
    return tensor


def overlaps_itself(tensor: Tensor) -> bool:
    """Return True if two elements may have the same address. Such a tensor cannot be written to."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, DTYPE_NAME[tensor.dtype], tuple(tensor.shape), tensor.device.type != "cpu")


def memory_of(tensor: Tensor) -> Memory | None:
    """Return a key that is equal for the same view of the same memory, or None for a tensor without memory."""
    if tensor.numel() == 0 or not (address := tensor.data_ptr()):
        return None
    return address, tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg()


def empty(
    of: TensorSpec, device: torch.device | str, *, like: Tensor | None = None, order: Sequence[int] | None = None
) -> Tensor:
    """Return a new tensor to restore into.

    like: a tensor. The new one gets its memory layout, by torch's rule for `zeros_like`, if both have the same shape.
        Fused optimizer kernels ignore strides, so a moment needs the memory layout of its parameter.
    order: the dimensions from the outermost to the innermost in memory, default: the order of the shape.
    """
    dtype = TORCH_DTYPE[of.dtype]
    try:
        if like is not None and like.shape == of.shape:
            return torch.empty_like(_form(like), dtype=dtype, device=device)
        if order is not None:
            return torch.empty_permuted(of.shape, tuple(order), dtype=dtype, device=device)
        return torch.empty(of.shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise CheckpointError(f"no memory for {of.name}, {of.nbytes / 2**20:.0f} MiB: {error}") from error


def order_of(tensor: Tensor) -> list[int] | None:
    """Return the dimensions from the outermost to the innermost in memory, or None if they are in order."""
    if tensor.is_contiguous() and 1 not in tensor.shape:  # a dimension of length 1 may have any stride
        return None
    strides = torch.empty_like(_form(tensor)).stride()  # strides of the same order without gaps
    # With equal strides, a dimension of length 1 is inner, because as the outer one its stride would be larger.
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], tensor.shape[dim] == 1))
    return None if order == list(range(len(order))) else order


def _form(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and strides that has no memory and is not a subclass."""
    return torch.empty_strided(tensor.shape, tensor.stride(), device="meta")


def saved_device(of: TensorSpec) -> torch.device:
    """Return the device for a new tensor: the accelerator if the saved tensor was on one and this host has one."""
    if of.accelerator and torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return found
    return torch.device("cpu")


def device_in_use() -> bool:
    """Return True if CUDA has been initialized. This check does not initialize it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a one-dimensional tensor of bytes."""
    # A tensor of at most one element is contiguous with any stride, but `view` needs stride 1.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# -- numpy arrays: stored as tensors, returned as arrays --


def from_array(array: npt.NDArray[Any], path: Path) -> tuple[Tensor, Json]:
    """Return a tensor with the array's bytes, and the reference (without a name) that `to_array` decodes."""
    kind = type(array)
    if kind is not np.ndarray:
        raise StateError(
            f"{show(path)}: a {kind.__module__}.{kind.__qualname__} would come back as a plain numpy array: save "
            "np.asarray() of it, and save anything else it has, for example a mask, as a separate entry"
        )
    if not is_plain_dtype(array.dtype):
        raise StateError(
            f"{show(path)}: a numpy array of dtype {array.dtype} cannot be saved safely: save a view() as a numpy dtype"
        )
    reference = {"$": "ndarray", "dtype": array.dtype.str, "shape": list(array.shape)}
    plain = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy()), reference


def to_array(tensor: Tensor, reference: Json) -> npt.NDArray[Any]:
    dtype, shape = check_array(spec(reference["name"], tensor), reference)
    found: npt.NDArray[Any] = tensor.numpy().view(dtype).reshape(shape)
    return found


# -- the kind of a tensor, for tensors that must be created again --

_KINDS = {torch.nn.Parameter: "parameter", torch.nn.Buffer: "buffer"}


def kind_of_tensor(tensor: Tensor, path: Path) -> dict[str, Json]:
    """Return the fields of a reference that `of_kind` needs. Raise StateError for unknown subclasses."""
    if type(tensor) not in PLAIN and not hasattr(tensor, "placements"):
        raise StateError(
            f"{show(path)}: a {type(tensor).__module__}.{type(tensor).__qualname__} would come back as a plain tensor: "
            "save .as_subclass(torch.Tensor) of it"
        )
    return plain_kind(tensor)


def plain_kind(tensor: Tensor) -> dict[str, Json]:
    """Return the same fields as `kind_of_tensor`, but treat unknown subclasses as plain tensors."""
    kind = next((name for kind, name in _KINDS.items() if isinstance(tensor, kind)), None)
    fields: dict[str, Json] = {} if kind is None else {"kind": kind}
    if kind == "buffer" and not getattr(tensor, "persistent", True):
        fields["persistent"] = False
    return {**fields, "grad": True} if tensor.requires_grad and tensor.is_leaf else fields


def of_kind(tensor: Tensor, reference: Json) -> Tensor:
    """Return the tensor as the kind that the reference describes: parameter, buffer or plain."""
    kind, grad = reference.get("kind"), bool(reference.get("grad"))
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=grad)
    made: Tensor = tensor.detach().requires_grad_() if grad else tensor
    if kind == "buffer":
        made = torch.nn.Buffer(made, persistent=reference.get("persistent") is not False)
    return made


class Versioned(Protocol):
    """An object that counts the writes to it, for example a tensor."""

    @property
    def _version(self) -> int: ...

    def is_inference(self) -> bool: ...


def version_of(tensor: Versioned) -> int | None:
    """Return the number of counted writes, or None for an inference tensor, whose writes are not counted."""
    return None if tensor.is_inference() else tensor._version


# -- special values --


class Collecting(Protocol):
    """Encodes values that are not plain. Collects tensors and arrays in `entries` and `objects`."""

    entries: list[Any]
    objects: dict[str, object]

    def __call__(self, value: object, path: Path) -> Json | None: ...


class ObjectEncoder(Protocol):
    """Encodes objects that are not constants."""

    def encode(self, value: object, path: Path, extern: Collecting) -> Json | None: ...


class ObjectDecoder(Protocol):
    """Restores objects from all values that were saved with them."""

    def check(self, values: Json) -> list[str]:
        """Return the differences between saved and live objects. Raise an error if an object cannot be restored."""

    def key(self, data: Json) -> Any: ...

    def decode(self, reference: dict[str, Any]) -> object: ...


OBJECT_TAGS = ("object", "generator", "given", "parameter")
_CONSTANTS: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format)


def encode_constant(value: object, path: Path, extern: Collecting) -> Json | None:
    """Encode a constant of torch, a member of an enum or a named tuple. Return None for everything else."""
    if isinstance(value, _CONSTANTS):
        return {"$": f"torch.{type(value).__name__}", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {"$": "torch.Size", "v": [int(n) for n in value]}
    if isinstance(value, torch.device):
        return {"$": "torch.device", "v": str(value)}
    if isinstance(value, Enum):
        member = value.name if value.name in type(value).__members__ else encode(value.value, path)
        return {"$": "enum", "class": class_name(type(value), path), "v": member}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [encode(one, (*path, key), extern) for key, one in zip(value._fields, value, strict=True)]
        return {"$": "namedtuple", "class": class_name(type(value), path), "v": items}
    return None


def class_name(kind: type, path: Path) -> list[str]:
    """Return module and qualified name of a class. Raise StateError if these names do not lead to the class."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__  # the script, in a spawned process
    if loaded_class(module, kind.__qualname__) is not kind:
        raise StateError(
            f"{show(path)}: an object of type {kind.__module__}.{kind.__qualname__} cannot be saved, because a "
            "restarted process cannot find this class by its name. Define the class at the top level of its module"
        )
    return [module, kind.__qualname__]


def loaded_class(module: object, name: object) -> type | None:
    """Return the class with this name if its module is imported. This lookup runs no code."""
    found: Any = sys.modules.get(module) if type(module) is str else None
    for part in name.split(".") if type(name) is str else ("",):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def class_of(reference: dict[str, Any]) -> type:
    """Return the class that a reference names. Raise MismatchError if it is not loaded."""
    module, name = reference["class"]
    if (found := loaded_class(module, name)) is None:
        raise MismatchError(
            f"the checkpoint has an object of type {module}.{name}, and this process has no such class: import "
            f"{module} before restore()"
        )
    return found


def decode_constant(reference: dict[str, Any]) -> Any:
    """Decode a result of `encode_constant`. Raise CorruptError for other tags, MismatchError for unknown classes."""
    tag, value = reference["$"], reference.get("v")
    for kind in _CONSTANTS:
        if tag == f"torch.{kind.__name__}":
            found = vars(torch).get(value) if type(value) is str else None
            if not isinstance(found, kind):
                raise CorruptError(f"not a {tag}: {value!r:.80}")
            return found
    if tag == "torch.Size" and type(value) is list and all(type(n) is int and 0 <= n < 2**62 for n in value):
        return torch.Size(value)
    if tag == "torch.device" and type(value) is str and re.fullmatch(r"[a-z]{1,20}(:\d{1,4})?", value):
        return torch.device(value)
    if tag == "enum":
        found = class_of(reference)
        if not issubclass(found, Enum):
            raise CorruptError(f"{reference['class']!r:.200} is not an Enum")
        if type(value) is str and value in found.__members__:
            return found.__members__[value]
        if issubclass(found, Flag) and type(value) is int:
            return found(value)
        raise MismatchError(f"{'.'.join(reference['class'])} has no member {value!r:.80}, which the checkpoint has")
    if tag == "namedtuple":
        found = class_of(reference)
        if not issubclass(found, tuple) or type(value) is not list or len(getattr(found, "_fields", ())) != len(value):
            raise CorruptError(f"{reference['class']!r:.200} is not a named tuple with the saved fields")
        return tuple.__new__(found, value)
    raise CorruptError(f"unknown tag {tag!r}: written by a newer version?")


def as_plain(reference: dict[str, Any]) -> Any:
    """Decode for readers without the classes. Objects become dicts, and members of enums become names."""
    tag = reference.get("$")
    if tag in ("enum", "parameter", "given", "torch.layout", "torch.memory_format"):
        return reference.get("v")
    if tag == "namedtuple":
        return tuple(reference["v"])
    if tag in ("object", "generator"):
        found = [reference[key] for key in ("attributes", "state") if key in reference]
        return found[0] if found else f"<the same object as {reference.get('name')}>"
    return decode_constant(reference)
