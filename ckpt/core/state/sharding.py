"""How a live tensor lies on the ranks: shards of a DTensor, replicas of data parallel training, or a rank's own.

Everything is read off the tensors and their meshes; nothing is asked of other ranks. Whose own values a rank takes
back is in `ckpt.core.format.saved_state`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckpt.core.format.boxes import Box, Dims, boxes_of_runs, take
from ckpt.core.format.partition import GLOBAL, Holding, Seat
from ckpt.core.state.tensors import DTYPE_NAME
from ckpt.errors import StateError


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold a plain tensor alike. `first_only`: the first one's counts, as with broadcast buffers."""

    ranks: tuple[int, ...]
    first_only: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """How the user has divided one tensor: its shape, boxes of it in this rank's memory with their offsets, and the
    ranks that hold the same. `ranks`: that hold the whole together; None: all."""

    shape: Dims
    boxes: tuple[tuple[Tensor, Dims, tuple[int, ...] | None], ...]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StateEntry:
    """`guarded`: changes only inside optimizer steps, so its copy may overlap the next forward and backward.

    `alike`: which ranks hold the same, or the DTensor whose optimizer state it is, or a division that the user has
    named; None: this rank's own.
    `of`: the parameter whose optimizer state it is. `part_of`: what it is one tensor of, where that is made of several
    (`ckpt.core.state.wrappers`), and all that is `around` it there.
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
        """What optimizers and modules know it by."""
        return self.part_of or self


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A piece of a tensor in this rank's memory, and what it is a piece of."""

    holding: Holding
    tensor: Tensor


def is_dtensor(tensor: object) -> bool:
    """Whether this is a DTensor; asking does not import what nobody uses."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The memory that this rank has of a tensor."""
    found: Any = tensor
    return found._local_tensor if is_dtensor(tensor) else tensor  # to_local() would take part in autograd


def storage_of(tensor: Any) -> int:
    """Where the memory lies that a tensor is a part of; 0 if it has none, or nobody can tell."""
    try:
        return int(local(tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):  # a wrapper around others, say
        return 0


def pieces(entry: StateEntry, seat: Seat) -> list[LocalPiece]:
    """What this rank has of a tensor."""
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
    """Optimizer state of a DTensor that is itself a plain tensor."""
    ranks = members(param)
    if is_plain_share(tensor, param) and not tensor.numel() == param.numel() == 1:
        return _of_dtensor(name, param, seat, instead=tensor)
    if tensor.numel() == 1:  # a step count: every rank of the mesh has the same
        return [_whole(name, tensor, ranks, _instance(ranks, seat))]
    return [_whole(name, tensor, (seat.rank,), _instance((seat.rank,), seat))]


def is_plain_share(tensor: Tensor, beside: object) -> bool:
    """Return True for a plain tensor of the shape of a DTensor's local shard, as TransformerEngine keeps moments."""
    if not is_dtensor(beside) or is_dtensor(tensor):
        return False
    mine: Any = beside
    return tensor.dim() > 0 and tensor.shape == mine._local_tensor.shape


def _of_division(entry: StateEntry, division: Division, seat: Seat) -> list[LocalPiece]:
    together = division.ranks or tuple(range(seat.size))
    if not {seat.rank, *together} <= set(range(seat.size)) or seat.rank not in together:
        raise StateError(f"{entry.name}: is held by ranks {list(together)}, it says, and this is rank {seat.rank}")
    found, full = [], division.shape
    for view, offsets, replicas in division.boxes:
        ranks = (seat.rank,) if replicas is None else tuple(sorted(replicas))
        if seat.rank not in ranks or not set(ranks) <= set(together) or len(set(ranks)) < len(ranks):
            raise StateError(
                f"{entry.name}: replicas={list(ranks)} must be ranks of {list(together)}, each once, with this one, "
                f"{seat.rank}, among them"
            )
        if 0 in full:  # nothing at all is still a tensor, which the first of all names
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
    """All of a mesh, ascending."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


class _Cutting(NamedTuple):
    """What a placement says. Torch holds a strided shard equal to a plain one, so placements are no key by themselves.

    `dim` None: it does not cut.
    """

    dim: int | None
    split_factor: int


def _cuttings(placements: Any) -> tuple[_Cutting, ...]:
    return tuple(_Cutting(getattr(p, "dim", None), getattr(p, "split_factor", 1)) for p in placements)


def share_of(tensor: Any) -> tuple[Dims, ...]:
    """Which indices of every dimension of a DTensor this rank has: a start and a length, and so on."""
    mesh = tensor.device_mesh
    if (coordinate := mesh.get_coordinate()) is None:
        return ()
    runs = indices(tuple(tensor.shape), tuple(mesh.mesh.shape), coordinate, _cuttings(tensor.placements))
    return tuple(tuple(n for run in each for n in run) for each in runs)


def _of_dtensor(name: str, tensor: Any, seat: Seat, instead: Tensor | None = None) -> list[LocalPiece]:
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []  # this rank has no part in it
    if any(p.is_partial() for p in placements):
        raise StateError(f"{name}: is a sum that has not been reduced yet ({placements}): redistribute it first")
    mine = tensor._local_tensor if instead is None else instead
    full = tuple(tensor.shape)
    sizes, boxes, replicas = _lie(full, mesh, tuple(coordinate), _cuttings(placements))
    if sizes != tuple(mine.shape):
        raise StateError(f"{name}: the local shape {tuple(mine.shape)} is not what {placements} on {mesh} says")
    dtype, on_device = DTYPE_NAME[mine.dtype], mine.device.type != "cpu"
    instance = _instance(members(tensor), seat)
    if not boxes and 0 in full:  # nothing at all is still a tensor
        empty = Holding(name, dtype, full, (0,) * len(full), full, replicas, instance, on_device)
        return [LocalPiece(empty, mine.new_empty(full))]
    return [
        LocalPiece(Holding(name, dtype, full, *box, replicas, instance, on_device), mine[slices((at, box[1]))])
        for box, at in boxes
    ]


@lru_cache(4096)
def _lie(
    full: Dims, mesh: Any, coordinate: Dims, cuttings: tuple[_Cutting, ...]
) -> tuple[Dims, tuple[tuple[Box, Dims], ...], tuple[int, ...]]:
    """How tensors of one shape lie at one place of a mesh: the local shape, the boxes with their offsets in the local
    tensor, and the ranks that hold the same. Thousands of tensors ask the same of a mesh of thousands of ranks."""
    runs = indices(full, tuple(mesh.mesh.shape), coordinate, cuttings)
    place = tuple(at if c.dim is not None else slice(None) for at, c in zip(coordinate, cuttings, strict=True))
    replicas = tuple(sorted(mesh.mesh[place].flatten().tolist()))
    return tuple(sum(n for _, n in each) for each in runs), tuple(boxes_of_runs(runs)), replicas


def slices(box: tuple[Dims, Dims]) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


def indices(shape: Dims, mesh: Dims, coordinate: Any, placements: Any) -> list[list[tuple[int, int]]]:
    """Which indices of every dimension the rank at `coordinate` of a mesh has, as runs. Cut like `torch.chunk`."""
    runs = [[(0, n)] for n in shape]
    for dim in range(len(shape)):
        for i, groups in _cutting_order(dim, mesh, placements):
            length = sum(n for _, n in runs[dim])
            group, mine = -(-length // groups), list[tuple[int, int]]()
            for low in range(0, length, max(group, 1)):
                high = min(low + group, length)
                step = -(-(high - low) // mesh[i])
                mine += take(runs[dim], low + coordinate[i] * step, min(low + (coordinate[i] + 1) * step, high))
            runs[dim] = mine
    return runs


def _cutting_order(dim: int, mesh: Dims, placements: Any) -> list[tuple[int, int]]:
    """The mesh dimensions that cut a dimension, one after the other: (which, into how many groups first).

    They cut from left to right. A strided shard comes later than its place says: after those to its right that make
    `split_factor` pieces. So FSDP over tensor parallelism is written down, and this is exact for uneven sizes as well.
    Where no order gives that factor, each group is cut for itself.
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

_LAZY_WRAPPERS = (  # defining module, class, attribute of the wrapped module; looked up only if imported already
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


class NamedModule(NamedTuple):
    """`name`: without the parts that wrappers add; `raw_name`: as `nn.Module.named_modules()` has it."""

    name: str
    raw_name: str
    module: nn.Module


def wrapped_attribute(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper of torch keeps its module. Return None if `module` is not a wrapper.

    Only the class decides. Other modules may have attributes of the same names, or forward them to a wrapper inside.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    for home, name, attribute in _LAZY_WRAPPERS:
        kind = getattr(sys.modules.get(home), name, None)
        if kind is not None and isinstance(module, kind) and isinstance(module._modules.get(attribute), nn.Module):
            return attribute
    return None


def named_modules(module: nn.Module, name: str = "", raw_name: str = "") -> Iterator[NamedModule]:
    """Yield a module and all modules in it, shared ones repeatedly. Wrapped and plain modules get the same names."""
    yield NamedModule(name, raw_name, module)
    wrapped = wrapped_attribute(module)
    for key, child in module._modules.items():
        if child is not None:
            inner = name if key == wrapped else _joined(name, key)
            yield from named_modules(child, inner, _joined(raw_name, key))


def named_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by the names of `named_modules`, shared ones under each of their names."""
    return {
        _joined(n, key): p for n, _, m in named_modules(module) for key, p in m._parameters.items() if p is not None
    }


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return all persistent buffers by the names of `named_modules`, shared ones under each of their names."""
    return {
        _joined(name, key): buffer
        for name, _, each in named_modules(module)
        for key, buffer in each._buffers.items()
        if buffer is not None and key not in each._non_persistent_buffers_set
    }


def plain_key(module: nn.Module, key: str) -> str:
    """Return a key of `module.state_dict()` as `named_modules` would name the tensor, unchanged if there is none.

    A wrapper around `module` may hand out the state_dict() of one of its children, as Lightning Fabric's does.
    """
    return next((found for one in (module, *module.children()) if (found := _resolved(one, key)) is not None), key)


def _resolved(module: nn.Module, key: str) -> str | None:
    *path, last = key.split(".")
    found: list[str] = []
    for i, part in enumerate((*path, last)):
        while (wrapped := wrapped_attribute(module)) is not None and part != wrapped and not _has(module, part):
            inner = module._modules[wrapped]  # checkpoint wrappers leave their part out of state_dict()
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
    """Some parameters and buffers of a module, under the names that they have there: all that is saved of it."""

    def __init__(self, whole: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        object.__setattr__(self, "_ckpt_whole", whole)  # not a child: nothing else of it belongs to the state
        self.put(tensors)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Save these tensors, and nothing else."""
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
    """Return the module inside all wrappers of torch around it."""
    while (wrapped := wrapped_attribute(module)) is not None:
        inner = module._modules[wrapped]
        assert inner is not None
        module = inner
    return module


def replicated_by_ddp(module: nn.Module) -> dict[int, Replicas]:
    """Return the ranks on which DDP keeps a parameter or buffer equal, by the tensor's id, by DDP's own rules."""
    if isinstance(module, ModulePart):
        module = vars(module)["_ckpt_whole"]
    found: dict[int, Replicas] = {}
    for _, _, ddp in named_modules(module):
        if not isinstance(ddp, nn.parallel.DistributedDataParallel):
            continue
        replicas = replicas_of(ddp)
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
                elif ddp.broadcast_buffers:  # before each forward; without that, each rank's buffers are its own
                    found[id(tensor)] = Replicas(replicas.ranks, first_only=True)
    return found


def replicas_of(ddp: nn.parallel.DistributedDataParallel) -> Replicas | None:
    """The ranks among which DDP keeps parameters alike."""
    import torch.distributed as dist

    try:
        return Replicas(tuple(sorted(dist.get_process_group_ranks(ddp.process_group))))
    except KeyError:  # not a group of torch's: torchft's are between jobs, of which each saves what it has
        return None


def reshard(module: nn.Module) -> None:
    """Have FSDP free the whole parameters that an evaluation left behind, so that the shards are in place again."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and hasattr(fsdp, "FSDPModule"):
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()


def unsupported(value: nn.Module | torch.optim.Optimizer) -> str | None:
    """What to do instead, if this divides its state among ranks in a way that cannot be read off its tensors."""
    fsdp, optim = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.optim")
    flat = getattr(fsdp, "FullyShardedDataParallel", None)
    zero = getattr(optim, "ZeroRedundancyOptimizer", None)
    if flat is not None and isinstance(value, nn.Module) and any(isinstance(m, flat) for m in value.modules()):
        return (
            "FullyShardedDataParallel hides its parameters: use torch.distributed.fsdp.fully_shard. What has begun "
            "moves there by dcp.save of get_state_dict() with ckpt.dcp.StorageWriter(OLD), and "
            "`ckpt export OLD --to NEW --format run`"
        )
    if zero is not None and isinstance(value, zero):
        return (
            "ZeroRedundancyOptimizer hides its state: use torch.distributed.fsdp.fully_shard, and the optimizer in it. "
            "What has begun moves there by consolidate_state_dict(), torch.save of the state_dict()s of model and "
            "optimizer on rank 0, and `ckpt import FILE NEW --step N`"
        )
    return None


def belongs_to_torch(hook: Any) -> bool:
    """A state-dict hook of FSDP or activation checkpointing: what it does to names and shards is done here."""
    home = getattr(getattr(hook, "hook", hook), "__module__", "") or ""
    return home.startswith(("torch.distributed.fsdp._fully_shard", "torch.distributed.algorithms._checkpoint"))
