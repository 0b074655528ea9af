"""Everything that depends on Megatron's internals: it finds each parameter's fp32 weights and moments.

For each parameter, Megatron's distributed optimizer keeps the range of elements that belongs to this data parallel
rank. The model's `ShardedTensor`s give the box of the whole tensor that the parameter is. Together they determine which
elements of the whole tensor this rank has. Importing this module raises ImportError unless the version is in the range
`KNOWN` and Megatron has every name that is used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as OptimizerParamScheduler
    from megatron.core.utils import get_attr_wrapped_model
except ImportError as missing:
    raise ImportError("ckpt.megatron needs megatron-core: pip install 'everystep[megatron]'") from missing

from ckpt.adapters.shards import Shard
from ckpt.errors import StateError, UsageError
from ckpt.version import check_known

KNOWN = ((0, 16), (0, 17))  # the first supported version, and the first unsupported one
USED: dict[Any, tuple[str, ...]] = {
    DistributedOptimizer: ("_copy_main_params_to_model_params", "_get_model_param_range_map"),
    DistributedDataParallel: ("start_param_sync",),
    ShardedTensorFactory: ("build",),
    parallel_state: (
        "get_tensor_model_parallel_group",
        "get_data_parallel_group",
        "get_tensor_and_data_parallel_group",
    ),
}
GROUPS = (  # attributes of an optimizer: its parameters, and the ranges of the parameters that it steps
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)
MOMENTS = ("exp_avg", "exp_avg_sq")


check_known("ckpt.megatron", "megatron-core", megatron.core.__version__, KNOWN)
for _owner, _names in USED.items():
    for _name in _names:
        if not hasattr(_owner, _name):
            raise ImportError(f"megatron-core {megatron.core.__version__} has no {_owner.__name__}.{_name}")


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `start` to `stop` of a flattened parameter are a box of the tensor `name`, which has the given shape.

    `alike`: the tensor parallel ranks with the same elements. `everybody`: all ranks with the same elements. `copied`:
        True if another stage of the pipeline also has the tensor and saves it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int
    alike: tuple[int, ...] | None
    everybody: tuple[int, ...]
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Stepped:
    """This rank steps the elements from `start` on of a flattened parameter; their fp32 weights are in `master`."""

    master: Tensor
    start: int


class Megatron:
    """Reads and restores model chunks and their optimizer.

    `optimizer`: the torch optimizer inside, None if there are several or it may skip steps. `ranks`: the ranks that
        together hold the parameters of this pipeline stage, None for all ranks.
    """

    def __init__(self, model_chunks: Sequence[Any], optimizer: Any) -> None:
        self._chunks = list(model_chunks)
        self._parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        refuse(self._chunks, self._parts)
        stage = _ranks(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        self.ranks = None if len(stage) == dist.get_world_size() else stage
        self._scaler = self._parts[0].grad_scaler
        skips = self._scaler is not None and bool(self._scaler.state_dict())  # it skips steps if its scale changes
        self.optimizer = self._parts[0].optimizer if len(self._parts) == 1 and not skips else None
        boxes = {p: boxes for chunk in self._chunks for p, boxes in _boxes_of(chunk, stage)}
        self._held = {p: held for part in self._parts for p, held in _held_by(part)}
        if unknown := [name for chunk in self._chunks for name, p in chunk.named_parameters() if p not in boxes]:
            raise UsageError(f"ckpt.megatron: sharded_state_dict() has no entry for {unknown[0]}")
        self._tied = _tied_embedding(self._chunks)
        for p, own in boxes.items():
            if own[0].copied and (p is not self._tied or not p.requires_grad):
                raise UsageError(f"ckpt.megatron: {own[0].name} is a copy of another stage's: not supported yet")
        self._boxes = {p: own for p, own in boxes.items() if not own[0].copied}
        self._trained = [p for p in self._boxes if p.requires_grad]
        self._frozen = [p for p in self._boxes if not p.requires_grad]
        self._last: dict[str, tuple[list[Tensor], list[int], dict[str, list[Shard]]]] = {}
        self._begin()

    # -- read the state to save --

    def weights(self) -> dict[str, list[Shard]]:
        """Return the weights of every parameter by its name in the whole model."""
        memory = [*(held.master for held in self._held.values()), *self._frozen]
        return self._unless_same("weights", memory, self._all_weights)

    def moments(self) -> dict[str, list[Shard]]:
        """Return the optimizer's moments of every parameter, by `state.NAME.KEY`."""
        memory = [self._state(held.master)[key] for held in self._held.values() for key in MOMENTS]
        return self._unless_same("moments", memory, self._all_moments)

    def _unless_same(
        self, what: str, memory: list[Tensor], make: Callable[[], dict[str, list[Shard]]]
    ) -> dict[str, list[Shard]]:
        """Return the previous dict if the tensors have not moved, because creating one takes milliseconds."""
        known, now = self._last.get(what), list(map(Tensor.data_ptr, memory))
        same = known is not None and now == known[1] and all(map(is_, memory, known[0]))
        if known is None or not same:
            known = self._last[what] = memory, now, make()
        return known[2]

    def _all_weights(self) -> dict[str, list[Shard]]:
        found: dict[str, list[Shard]] = {}
        for p in self._trained:
            held = self._held.get(p)
            for box in self._boxes[p]:
                found.setdefault(box.name, []).extend(_run(held.master, held.start, box) if held else ())
        for p in self._frozen:
            for box in self._boxes[p]:
                found.setdefault(box.name, []).extend(_run(p, 0, box, box.everybody))
        return found

    def _all_moments(self) -> dict[str, list[Shard]]:
        found: dict[str, list[Shard]] = {}
        for p in self._trained:
            held = self._held.get(p)
            for box in self._boxes[p]:
                for key in MOMENTS:
                    runs = _run(self._state(held.master)[key], held.start, box) if held else ()
                    found.setdefault(f"state.{box.name}.{key}", []).extend(runs)
        return found

    def _state(self, master: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = next(
            part.optimizer.state[master] for part in self._parts if master in part.optimizer.state
        )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks: the step, settings of groups, the loss scale."""
        scale = dict(self._scaler.state_dict()) if self._scaler is not None else {}
        if isinstance(scale.get("scale"), Tensor):
            scale["scale"] = scale["scale"].item()
        return {"step": self._step(), "groups": [_settings(group) for group in self._groups()], "scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for group, saved in zip(self._groups(), state["groups"], strict=True):
            group.update(saved)
        if self._scaler is not None and (scale := state["scale"]):
            self._scaler.load_state_dict({**scale, "scale": torch.full_like(self._scaler.scale, scale["scale"])})
        if (step := state["step"]) is not None:
            self._set_step(step)
        elif self._held:
            raise StateError(
                "this rank does not know the optimizer's step: the rank that saved in its place had no parameters to "
                "train. Restore with the same sizes of parallelism as when saving, or on another number of ranks"
            )

    def _set_step(self, step: float) -> None:
        for group in self._groups():
            if not self._counts_by_parameter:
                group["step"] = int(step)
            elif "step" in group:
                group["step"] = step
        for held in self._held.values():
            own = self._state(held.master)
            if "step" in own:
                own["step"] = torch.full_like(own["step"], step)

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        """Load the state of any rank that trained parameters. Called if the number of ranks has changed."""
        self.load_state_dict(next((state for state in states if state["step"] is not None), states[0]))

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.optimizer.param_groups]

    @property
    def _counts_by_parameter(self) -> bool:
        """True for torch's Adam, which counts steps by parameter. Fused optimizers count them by group."""
        return any(isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW) for part in self._parts)

    def _step(self) -> float | None:
        """Return the optimizer's step, None if this rank steps nothing. Raise StateError if parameters differ in it."""
        if self._counts_by_parameter:
            steps = {float(self._state(held.master)["step"]) for held in self._held.values()}
        else:
            steps = {float(group["step"]) for group in self._groups() if group["params"] and "step" in group}
        if len(steps) > 1:
            raise StateError(f"the number of optimizer steps differs between parameters: {sorted(steps)}")
        return steps.pop() if steps else None if not self._held else 0.0

    # -- resume --

    def _begin(self) -> None:
        """Create the moments that the optimizer would create in its first step, so that they can be saved and restored
        before the first step."""
        for part in self._parts:
            part.init_state_fn(part.optimizer, part.config)
            for group in part.optimizer.param_groups:
                for master in group["params"]:
                    own = part.optimizer.state[master]
                    if self._counts_by_parameter and "step" not in own:
                        there = master.device if group.get("fused") or group.get("capturable") else "cpu"
                        own["step"] = torch.zeros((), dtype=torch.float32, device=there)

    @torch.no_grad()
    def weights_restored(self) -> None:
        """Compute the weights of the model from the fp32 weights. All ranks must call this."""
        if self._tied is not None:
            self._send_embedding(self._tied)
        for part in self._parts:
            part._copy_main_params_to_model_params()
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)  # only waits for a synchronization in progress
            chunk.start_param_sync(force_sync=True)

    def _send_embedding(self, weight: Tensor) -> None:
        """Send the first stage's embedding to the last stage, whose output layer has a copy that is divided in another
        way. The ranks of the last stage add it to zeros, which keeps its bits."""
        first, held = weight in self._boxes, self._held.get(weight)
        for key in (None, *MOMENTS):
            whole = torch.zeros(weight.numel(), dtype=torch.int32, device=weight.device)
            window, own = whole[:0], whole[:0]
            if held is not None:
                memory = held.master if key is None else self._state(held.master)[key]
                own = memory.detach().view(-1).view(torch.int32)
                window = whole[held.start : held.start + own.numel()]
            if first:
                window.copy_(own)
                dist.all_reduce(whole, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            dist.all_reduce(whole, group=parallel_state.get_embedding_group())
            if not first:
                own.copy_(window)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's group that a schedule changes, and the group's other plain values."""
    return {
        key: value
        for key, value in group.items()
        if key not in ("params", "step") and isinstance(value, bool | int | float | str | tuple | None)
    }


def _run(memory: Tensor, first: int, box: Box, replicas: tuple[int, ...] | None = None) -> list[Shard]:
    """Return the part of a box that is in flat memory. The memory begins with element `first` of a parameter."""
    flat = memory.detach().view(-1)
    start, stop = max(first, box.start), min(first + flat.numel(), box.stop)
    if start >= stop:
        return []
    piece, alike = flat[start - first : stop - first], replicas or box.alike
    return [Shard(piece, box.shape, box.offsets, within=box.sizes, start=start - box.start, replicas=alike)]


def _held_by(part: Any) -> Iterator[tuple[Tensor, Stepped]]:
    """Yield the part of each parameter that one optimizer steps."""
    for models, masters in GROUPS:
        for params, runs in zip(getattr(part, models), getattr(part, masters), strict=True):
            for p, master in zip(params, runs, strict=True):
                yield p, Stepped(master, part._get_model_param_range_map(p)["param"].start)


def _tied_embedding(chunks: list[Any]) -> Tensor | None:
    """Return this stage's embedding, or its copy of it, if the pipeline's first and last stage share the embedding."""
    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or group.size() == 1:
        return None
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        if getattr(model, "share_embeddings_and_output_weights", False) and (model.pre_process or model.post_process):
            weight: Tensor = model.shared_embedding_or_output_weight()
            return weight
    return None


def _boxes_of(chunk: Any, stage: tuple[int, ...]) -> Iterator[tuple[Tensor, list[Box]]]:
    """Yield each parameter of a chunk with the boxes of the whole model that it consists of. Layers differ in name."""
    sharded = chunk.module.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    for one in nested_values(sharded):
        if isinstance(one, ShardedTensor | ShardedTensorFactory) and not isinstance(one.data, torch.nn.Parameter):
            raise UsageError(f"ckpt.megatron: {one.key} is a buffer: not supported yet")
        if isinstance(one, ShardedTensor):
            yield one.data, _boxes(one, [one], stage)
        elif isinstance(one, ShardedTensorFactory):
            yield one.data, _boxes(one, [part for part in nested_values(one.build()) if part is not None], stage)
        elif not one.key.endswith("_extra_state"):  # extra state of Transformer Engine is empty without fp8
            raise UsageError(f"ckpt.megatron: {one.key} is not a tensor: not supported yet")


def _boxes(one: Any, parts: list[Any], stage: tuple[int, ...]) -> list[Box]:
    """Return a tensor as boxes of the whole tensor. Raise UsageError if its memory is not a sequence of boxes."""
    tp = _ranks(parallel_state.get_tensor_model_parallel_group())
    count, total = one.data.numel(), math.prod(parts[0].global_shape)
    if total not in (count, count * len(tp)):
        raise UsageError(f"ckpt.megatron: {one.key} is not divided among {len(tp)} ranks: not supported yet")
    replicated = total == count
    alike = tp if replicated and len(tp) > 1 else None
    everybody = stage if replicated else _ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    found, at = [], 0
    for part in parts:
        there = one.data.data_ptr() + at * one.data.element_size()
        known = isinstance(part, ShardedTensor) and part.key == one.key
        if not known or part.data.data_ptr() != there or not part.data.is_contiguous():
            raise UsageError(f"ckpt.megatron: {one.key} is rearranged when it is saved: not supported yet")
        sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        shape, offsets, stop = tuple(part.global_shape), tuple(part.global_offset), at + part.data.numel()
        copied = isinstance(part.replica_id, tuple) and part.replica_id[0] != 0
        found.append(Box(part.key, shape, offsets, sizes, at, stop, alike, everybody, copied))
        at = stop
    if at != count:
        raise UsageError(f"ckpt.megatron: {one.key} is not saved completely: not supported yet")
    return found


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def refuse(chunks: list[Any], parts: list[Any]) -> None:
    """Raise UsageError for models and optimizers whose state this module cannot divide among ranks."""
    why = _of_models(chunks) or _of_optimizers(parts)
    if why:
        raise UsageError(f"ckpt.megatron: {why}")


def _of_models(chunks: list[Any]) -> str:
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            return f"model_chunks must be a list of Megatron's DistributedDataParallel, not {type(chunk).__name__}"
        config = chunk.config
        if getattr(config, "fp8", None) or getattr(config, "fp4", None):
            return "weights in fp8 or fp4 are not supported yet"
        if getattr(config, "num_moe_experts", None):
            return "experts (MoE) are on other ranks than the rest: not supported yet"
        if getattr(config, "mtp_num_layers", None) and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            return "multi-token prediction in a pipeline is not supported yet"
        if chunk.ddp_config.num_distributed_optimizer_instances > 1:
            return "several instances of the distributed optimizer are not supported yet"
        if _ranks(chunk.dp_cp_group) != _ranks(parallel_state.get_data_parallel_group(with_context_parallel=True)):
            return "process groups other than those of parallel_state are not supported yet"
    return "" if chunks else "there are no model chunks"


def _of_optimizers(parts: list[Any]) -> str:
    for part in parts:
        if not isinstance(part, DistributedOptimizer):
            return f"{type(part).__name__} is not Megatron's DistributedOptimizer: set use_distributed_optimizer=True"
        if part.is_stub_optimizer:
            return "this rank's stage has nothing to train: not supported yet"
        if part.ddp_config.use_megatron_fsdp:
            return "Megatron's FSDP divides parameters in another way: not supported"
        if part.config.use_precision_aware_optimizer:
            return "a precision-aware optimizer keeps its weights internally: not supported yet"
        if part.config.optimizer_cpu_offload or part.init_state_fn is None:
            return "an optimizer that is offloaded to the host is not supported yet"
    return ""
