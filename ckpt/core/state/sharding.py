"""Describes the tensors of a state on this rank: how ranks share them, and how they are named.

`pieces` returns this rank's pieces of an entry: shards of a DTensor, a copy of a replicated tensor, boxes that the user
has described, or a tensor of this rank alone. All facts come from the tensors and their meshes, without communication.
`ckpt.core.format.saved_state` decides whose plain values a rank restores.

`named_modules` gives the names of modules and parameters without the wrappers of torch around them. `Names` has the
parameters by id, and the memory of all entries outside optimizers.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ckpt.core.format.boxes import GLOBAL, Box, Dims, Holding, Seat, boxes_of_runs, take
from ckpt.core.state.tensors import DTYPE_NAME
from ckpt.errors import StateError
from ckpt.events import log

_warned: WeakSet[nn.Module] = WeakSet()  # DDP modules whose communication hooks a warning has named


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks with identical copies of a tensor. `first_only`: only the first copy is saved (broadcast buffers)."""

    ranks: tuple[int, ...]
    first_only: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The user's description of a sharded tensor: its shape, and its boxes in this rank's memory, each with its offsets
    and the ranks that have the same box. `ranks`: the ranks that hold the whole tensor together, default: all."""

    shape: Dims
    boxes: tuple[tuple[Tensor, Dims, tuple[int, ...] | None], ...]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor of the state.

    `guarded`: True if only optimizer steps change it, so its copy may overlap the next forward and backward. `alike`:
    the ranks with the same tensor, or the DTensor whose optimizer state it is, or the user's description of its
    sharding, or None if it belongs to this rank alone. `of`: the parameter whose optimizer state it is. `part_of`: the
    wrapper tensor (`ckpt.core.state.wrappers`) that contains it. `around`: all wrappers that contain it.
    """

    name: str
    tensor: Tensor
    guarded: bool = False
    alike: Replicas | Division | Tensor | None = None
    of: Tensor | None = None
    part_of: StateEntry | None = None
    around: tuple[Tensor, ...] = ()

    @property
    def owner(self) -> StateEntry:
        """Return the entry that optimizers and modules use for it: its wrapper's entry, if it is part of a wrapper."""
        return self.part_of or self


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A piece of a tensor in this rank's memory, with its position in the tensor."""

    holding: Holding
    tensor: Tensor


def is_dtensor(tensor: object) -> bool:
    """Return True for a DTensor. This check does not import `torch.distributed.tensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's memory of a tensor: the local shard of a DTensor, otherwise the tensor."""
    found: Any = tensor
    return found._local_tensor if is_dtensor(tensor) else tensor  # not to_local(), which would take part in autograd


def storage_of(tensor: Any) -> int:
    """Return the address of a tensor's storage, or 0 if it has none."""
    try:
        return int(local(tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):  # a wrapper subclass may have none
        return 0


def pieces(entry: StateEntry, seat: Seat) -> list[LocalPiece]:
    """Return this rank's pieces of a tensor."""
    name, tensor, alike = entry.name, entry.tensor, entry.alike
    if isinstance(alike, Division):
        return _of_division(entry, alike, seat)
    if is_dtensor(tensor):
        return _of_dtensor(name, tensor, seat)
    if isinstance(alike, Replicas):
        ranks = alike.ranks[:1] if alike.first_only else alike.ranks
        return [_whole(name, tensor, ranks, _instance(alike.ranks, seat))]
    if alike is not None and is_dtensor(alike):
        return _beside(name, tensor, alike, seat)
    return [_whole(name, tensor, (seat.rank,), _instance((seat.rank,), seat))]


def _whole(name: str, tensor: Tensor, ranks: tuple[int, ...], instance: int) -> LocalPiece:
    shape = tuple(tensor.shape)
    start = (0,) * len(shape)
    on_device = tensor.device.type != "cpu"
    return LocalPiece(Holding(name, DTYPE_NAME[tensor.dtype], shape, start, shape, ranks, instance, on_device), tensor)


def _instance(ranks: tuple[int, ...], seat: Seat) -> int:
    return GLOBAL if len(ranks) == seat.size else min(ranks)


def _beside(name: str, tensor: Tensor, param: Any, seat: Seat) -> list[LocalPiece]:
    """Return this rank's piece of a plain tensor that is optimizer state of a DTensor."""
    ranks = members(param)
    if is_plain_share(tensor, param) and not tensor.numel() == param.numel() == 1:
        return _of_dtensor(name, param, seat, instead=tensor)
    if tensor.numel() == 1:  # a step count, which is equal on all ranks of the mesh
        return [_whole(name, tensor, ranks, _instance(ranks, seat))]
    return [_whole(name, tensor, (seat.rank,), _instance((seat.rank,), seat))]


def is_plain_share(tensor: Tensor, beside: object) -> bool:
    """Return True for a plain tensor with the shape of a DTensor's shard, as TransformerEngine stores moments."""
    if not is_dtensor(beside) or is_dtensor(tensor):
        return False
    param: Any = beside
    return tensor.dim() > 0 and tensor.shape == param._local_tensor.shape


def _of_division(entry: StateEntry, division: Division, seat: Seat) -> list[LocalPiece]:
    together = division.ranks or tuple(range(seat.size))
    if not {seat.rank, *together} <= set(range(seat.size)) or seat.rank not in together:
        raise StateError(
            f"{entry.name}: ranks={list(together)} must be ranks of this job and include this rank, {seat.rank}"
        )
    found, full = [], division.shape
    for view, offsets, replicas in division.boxes:
        ranks = (seat.rank,) if replicas is None else tuple(sorted(replicas))
        if seat.rank not in ranks or not set(ranks) <= set(together) or len(set(ranks)) < len(ranks):
            raise StateError(
                f"{entry.name}: replicas={list(ranks)} must be ranks of {list(together)} without repetition, "
                f"and include this rank, {seat.rank}"
            )
        if 0 in full:  # an empty tensor is still saved, once for all its ranks
            ranks = together
        dtype, on_device = DTYPE_NAME[view.dtype], view.device.type != "cpu"
        sizes, instance = tuple(view.shape), _instance(together, seat)
        found.append(LocalPiece(Holding(entry.name, dtype, full, offsets, sizes, ranks, instance, on_device), view))
    return found


def members(tensor: Any) -> tuple[int, ...]:
    """Return the ranks of a DTensor's mesh, ascending."""
    return _ranks(tensor.device_mesh)


@lru_cache(64)
def _ranks(mesh: Any) -> tuple[int, ...]:
    """Return the ranks of a mesh, ascending."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


class _Cutting(NamedTuple):
    """How a placement shards. `dim`: the sharded dimension, None if there is none. A placement alone is not a cache
    key, because torch considers a strided shard equal to a plain one."""

    dim: int | None
    split_factor: int


def _cuttings(placements: Any) -> tuple[_Cutting, ...]:
    return tuple(_Cutting(getattr(p, "dim", None), getattr(p, "split_factor", 1)) for p in placements)


def share_of(tensor: Any) -> tuple[Dims, ...]:
    """Return this rank's indices in every dimension of a DTensor, each as start, length, start, length and so on."""
    mesh = tensor.device_mesh
    if (coordinate := mesh.get_coordinate()) is None:
        return ()
    runs = indices(tuple(tensor.shape), tuple(mesh.mesh.shape), coordinate, _cuttings(tensor.placements))
    return tuple(tuple(n for run in each for n in run) for each in runs)


def _of_dtensor(name: str, tensor: Any, seat: Seat, instead: Tensor | None = None) -> list[LocalPiece]:
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []  # this rank is not in the mesh
    if any(p.is_partial() for p in placements):
        raise StateError(f"{name}: has partial sums ({placements}): call redistribute() before saving it")
    shard = tensor._local_tensor if instead is None else instead
    full = tuple(tensor.shape)
    sizes, boxes, replicas = _lie(full, mesh, tuple(coordinate), _cuttings(placements))
    if sizes != tuple(shard.shape):
        raise StateError(f"{name}: the local shape {tuple(shard.shape)} does not match {placements} on {mesh}")
    dtype, on_device = DTYPE_NAME[shard.dtype], shard.device.type != "cpu"
    instance = _instance(members(tensor), seat)
    if not boxes and 0 in full:  # an empty tensor is still saved
        empty = Holding(name, dtype, full, (0,) * len(full), full, replicas, instance, on_device)
        return [LocalPiece(empty, shard.new_empty(full))]
    return [
        LocalPiece(Holding(name, dtype, full, *box, replicas, instance, on_device), shard[slices((at, box[1]))])
        for box, at in boxes
    ]


@lru_cache(4096)
def _lie(
    full: Dims, mesh: Any, coordinate: Dims, cuttings: tuple[_Cutting, ...]
) -> tuple[Dims, tuple[tuple[Box, Dims], ...], tuple[int, ...]]:
    """Return the local shape, the boxes with their offsets in the local tensor, and the ranks with the same boxes, for
    tensors of one shape at one mesh coordinate. Cached, because thousands of tensors share a mesh."""
    runs = indices(full, tuple(mesh.mesh.shape), coordinate, cuttings)
    place = tuple(at if c.dim is not None else slice(None) for at, c in zip(coordinate, cuttings, strict=True))
    replicas = tuple(sorted(mesh.mesh[place].flatten().tolist()))
    return tuple(sum(n for _, n in each) for each in runs), tuple(boxes_of_runs(runs)), replicas


def slices(box: tuple[Dims, Dims]) -> tuple[slice, ...]:
    """Return the slices that index a box in a tensor."""
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


def indices(shape: Dims, mesh: Dims, coordinate: Any, placements: Any) -> list[list[tuple[int, int]]]:
    """Return the indices in every dimension that a mesh coordinate has, as runs, sharded like `torch.chunk`."""
    runs = [[(0, n)] for n in shape]
    for dim in range(len(shape)):
        for i, groups in _cutting_order(dim, mesh, placements):
            length = sum(n for _, n in runs[dim])
            group, taken = -(-length // groups), list[tuple[int, int]]()
            for low in range(0, length, max(group, 1)):
                high = min(low + group, length)
                step = -(-(high - low) // mesh[i])
                taken += take(runs[dim], low + coordinate[i] * step, min(low + (coordinate[i] + 1) * step, high))
            runs[dim] = taken
    return runs


def _cutting_order(dim: int, mesh: Dims, placements: Any) -> list[tuple[int, int]]:
    """Return the mesh dimensions that shard a tensor dimension, in order, as (mesh dimension, number of groups to form
    first).

    Mesh dimensions shard from left to right. A strided shard moves to the right, behind the dimensions whose sizes
    multiply to `split_factor`. PyTorch describes FSDP over tensor parallelism this way, and this order is exact for
    uneven sizes too. If no order gives that factor, each group is sharded separately.
    """
    cutting = [i for i, placement in enumerate(placements) if getattr(placement, "dim", None) == dim]
    factors = {i: getattr(placements[i], "split_factor", 1) for i in cutting}
    order: list[int] = []
    for i in reversed(cutting):
        before = [math.prod(mesh[j] for j in order[:n]) for n in range(len(order) + 1)]
        if factors[i] not in before:
            return list(factors.items())
        order.insert(before.index(factors[i]), i)
    return [(i, 1) for i in order]


# -- wrappers around modules --

_LAZY_WRAPPERS = (  # defining module, class, attribute of the wrapped module; used only if already imported
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


class NamedModule(NamedTuple):
    """A module with two names. `name`: without wrappers; `raw_name`: from `nn.Module.named_modules()`."""

    name: str
    raw_name: str
    module: nn.Module


def wrapped_attribute(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper of torch keeps its module. Return None if `module` is not a wrapper.

    Only the class decides, because other modules may have or forward attributes of the same names.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    for home, name, attribute in _LAZY_WRAPPERS:
        kind = getattr(sys.modules.get(home), name, None)
        if kind is not None and isinstance(module, kind) and isinstance(module._modules.get(attribute), nn.Module):
            return attribute
    return None


def named_modules(module: nn.Module, name: str = "", raw_name: str = "") -> Iterator[NamedModule]:
    """Yield a module and all modules in it. Shared modules are repeated. Wrappers do not change the names."""
    yield NamedModule(name, raw_name, module)
    wrapped = wrapped_attribute(module)
    for key, child in module._modules.items():
        if child is not None:
            inner = name if key == wrapped else _joined(name, key)
            yield from named_modules(child, inner, _joined(raw_name, key))


def named_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by the names of `named_modules`. A shared parameter has several names."""
    return {
        _joined(n, key): p for n, _, m in named_modules(module) for key, p in m._parameters.items() if p is not None
    }


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return all persistent buffers by the names of `named_modules`. A shared buffer has several names."""
    return {
        _joined(name, key): buffer
        for name, _, each in named_modules(module)
        for key, buffer in each._buffers.items()
        if buffer is not None and key not in each._non_persistent_buffers_set
    }


def plain_key(module: nn.Module, key: str) -> str:
    """Return the `named_modules` name for a key of `module.state_dict()`. Return the key if there is no such name.

    A wrapper around `module` may return the state_dict() of a child, as Lightning Fabric's wrapper does.
    """
    return next((found for one in (module, *module.children()) if (found := _resolved(one, key)) is not None), key)


def _resolved(module: nn.Module, key: str) -> str | None:
    *path, last = key.split(".")
    found: list[str] = []
    for i, part in enumerate((*path, last)):
        while (wrapped := wrapped_attribute(module)) is not None and part != wrapped and not _has(module, part):
            inner = module._modules[wrapped]  # checkpoint wrappers remove their own name from state_dict() keys
            assert inner is not None
            module = inner
        if i == len(path):
            return ".".join((*found, last)) if _has(module, last) else None
        child = module._modules[part] if part in module._modules else None  # noqa: SIM401 - a ScriptModule has no get()
        if child is None:
            return None
        if part != wrapped:
            found.append(part)
        module = child
    return None


def _has(module: nn.Module, key: str) -> bool:
    return any(key in members for members in (module._modules, module._parameters, module._buffers))


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


class ModulePart(nn.Module):
    """Some parameters and buffers of a module, under their names in that module. Only they are saved."""

    def __init__(self, whole: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        object.__setattr__(self, "_ckpt_whole", whole)  # not a child, so that the rest of the module is not saved
        self.put(tensors)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the tensors to save by these tensors."""
        for own in (self._modules, self._parameters, self._buffers):
            own.clear()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(last, tensor)
            else:
                owner.register_buffer(last, tensor)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all torch wrappers around it."""
    while (wrapped := wrapped_attribute(module)) is not None:
        inner = module._modules[wrapped]
        assert inner is not None
        module = inner
    return module


def replicated_by_ddp(module: nn.Module) -> dict[int, Replicas]:
    """Return the ranks on which DDP keeps each parameter or buffer equal, by the tensor's id, following DDP's rules."""
    if isinstance(module, ModulePart):
        module = vars(module)["_ckpt_whole"]
    found: dict[int, Replicas] = {}
    for _, _, ddp in named_modules(module):
        if not isinstance(ddp, nn.parallel.DistributedDataParallel):
            continue
        _warn_of_hooks(ddp)
        replicas = None
        with contextlib.suppress(KeyError):  # a torchft group connects jobs, and each job saves its own state
            replicas = Replicas(tuple(sorted(torch.distributed.get_process_group_ranks(ddp.process_group))))
        for name, raw_name, each in named_modules(ddp.module):
            for key, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is None:
                    continue
                found.pop(id(tensor), None)  # the innermost DDP decides
                ignored = not ddp.parameters_to_ignore.isdisjoint((_joined(name, key), _joined(raw_name, key)))
                if replicas is None or ignored:
                    continue
                if key in each._parameters:
                    found[id(tensor)] = replicas
                elif ddp.broadcast_buffers:  # before each forward; otherwise each rank has its own buffers
                    found[id(tensor)] = Replicas(replicas.ranks, first_only=True)
    return found


def _warn_of_hooks(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Log a warning once if a communication hook has state, for example PowerSGD's error feedback."""
    states = [state for _, state in getattr(ddp, "_comm_hooks", ()) if state is not None]
    lost = [type(state).__qualname__ for state in states if not isinstance(state, torch.distributed.ProcessGroup)]
    if lost and ddp not in _warned:
        _warned.add(ddp)
        log.warning(
            "the state of DistributedDataParallel's communication hook (%s) is not saved, so it begins again after a "
            "restart",
            ", ".join(lost),
        )


def reshard(module: nn.Module) -> None:
    """Make FSDP free the full parameters that an evaluation left behind, so that the shards are active again."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and hasattr(fsdp, "FSDPModule"):
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()


def unsupported(value: nn.Module | torch.optim.Optimizer) -> str | None:
    """Return advice against a class whose sharding cannot be read. Return None for all other classes."""
    fsdp, optim = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.optim")
    flat = getattr(fsdp, "FullyShardedDataParallel", None)
    zero = getattr(optim, "ZeroRedundancyOptimizer", None)
    if flat is not None and isinstance(value, nn.Module) and any(isinstance(m, flat) for m in value.modules()):
        return (
            "FullyShardedDataParallel hides its parameters: use torch.distributed.fsdp.fully_shard. To convert "
            "an existing run, dcp.save its get_state_dict() with ckpt.dcp.StorageWriter(OLD), then run "
            "`ckpt export OLD --to NEW --format run`"
        )
    if zero is not None and isinstance(value, zero):
        return (
            "ZeroRedundancyOptimizer hides its state: use torch.distributed.fsdp.fully_shard and a plain optimizer. "
            "To convert an existing run, call consolidate_state_dict(), torch.save the state_dict()s of model and "
            "optimizer on rank 0, then run `ckpt import FILE NEW --step N`"
        )
    return None


def belongs_to_torch(hook: Any) -> bool:
    """Return True for a state-dict hook of FSDP or activation checkpointing. This package does the same work itself."""
    home = getattr(getattr(hook, "hook", hook), "__module__", "") or ""
    return home.startswith(("torch.distributed.fsdp._fully_shard", "torch.distributed.algorithms._checkpoint"))


# -- names of parameters --


class Names(dict[int, StateEntry]):
    """The parameters and plain tensors that optimizers may step, by id, and the memory of all entries outside
    optimizers. `fixed` entries stay from step to step. Each reading creates the `loose` ones."""

    def __init__(self) -> None:
        super().__init__()
        self._fixed, self._loose = list[list[StateEntry]](), list[StateEntry]()
        self._spans: tuple[list[Span] | None, list[Span] | None] = None, None

    def note(self, fixed: list[list[StateEntry]], loose: list[StateEntry]) -> None:
        """Set the current entries. Their memory is computed when it is needed."""
        same = len(fixed) == len(self._fixed) and all(a is b for a, b in zip(fixed, self._fixed, strict=True))
        self._fixed, self._loose, self._spans = fixed, loose, (self._spans[0] if same else None, None)

    def hold(self, span: Span | None) -> bool:
        """Return True if the entries of the state, one or several, contain all of a tensor's memory."""
        if span is None:
            return False
        fixed, loose = self._spans
        if fixed is None or loose is None:
            fixed = fixed or _joined_names([entry for each in self._fixed for entry in each])
            loose = _joined_names(self._loose)
            self._spans = fixed, loose
        return _inside(span, fixed) or _inside(span, loose)


Span = tuple[str, int, float]


def span_of(tensor: Tensor) -> Span | None:
    """Return the device and address range of a tensor. Return None if it has gaps or no memory."""
    shard = local(tensor)
    if not shard.numel() or not shard.data_ptr():
        return None
    reach = sum((size - 1) * stride for size, stride in zip(shard.shape, shard.stride(), strict=True))
    if reach + 1 != shard.numel():
        return None
    return str(shard.device), shard.data_ptr(), shard.data_ptr() + shard.nbytes


def _inside(span: Span, spans: list[Span]) -> bool:
    device, start, stop = span
    i = bisect.bisect_right(spans, (device, start, math.inf)) - 1
    return i >= 0 and spans[i][0] == device and spans[i][2] >= stop


def _joined_names(entries: list[StateEntry]) -> list[Span]:
    """Return the memory of these tensors as ascending spans that do not touch."""
    found: list[Span] = []
    for device, start, stop in sorted(span for e in entries if (span := span_of(e.tensor)) is not None):
        if found and found[-1][0] == device and start <= found[-1][2]:
            found[-1] = device, found[-1][1], max(stop, found[-1][2])
        else:
            found.append((device, start, stop))
    return found
