"""Everything that depends on DeepSpeed's internals: it finds each parameter's fp32 weights and optimizer state.

Each optimizer of DeepSpeed keeps an fp32 copy of the trained parameters, in flat buffers or as whole tensors.
`_fragments` finds which elements of each parameter this rank has, and their position in the copy. A function `_of_*`
does this for each kind of optimizer. Importing this module raises ImportError unless
the version is in the range `KNOWN` and DeepSpeed has every name that is used here.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

try:
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
except ImportError as missing:
    raise ImportError("ckpt.deepspeed needs deepspeed: pip install 'everystep[deepspeed]'") from missing

from ckpt.adapters.shards import Shard
from ckpt.errors import StateError, UsageError
from ckpt.version import check_known

KNOWN = ((0, 18), (0, 20))  # the first supported version, and the first unsupported one
USED: dict[Any, tuple[str, ...]] = {
    DeepSpeedZeroOptimizer: ("update_lp_params", "_lazy_init_hp_params_optimizer_state"),
    BF16_Optimizer: ("update_lp_params", "_lazy_init_hp_params_optimizer_state"),
    DeepSpeedZeroOptimizer_Stage3: (
        "get_param_id",
        "checkpoint_event_prologue",
        "checkpoint_event_epilogue",
        "_unflatten_partitioned_parameters",
    ),
}


check_known("ckpt.deepspeed", "DeepSpeed", deepspeed.__version__, KNOWN)
for _class, _names in USED.items():
    for _name in _names:
        if not hasattr(_class, _name):
            raise ImportError(f"DeepSpeed {deepspeed.__version__} has no {_class.__name__}.{_name}")

_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # attributes of a loss scaler that change


@dataclass(frozen=True, slots=True)
class Fragment:
    """`count` elements of a flattened parameter, from `start` on. In the fp32 copy `master` they begin at `at`, as they
    do in the optimizer's state of `master`. `alike`: True if every rank has the same elements."""

    master: Tensor
    at: int
    start: int
    count: int
    alike: bool


class Engine:
    """Reads and restores one DeepSpeed engine. `optimizer`: the torch optimizer inside. `ranks`: the ranks that
    together hold the parameters of this pipeline stage, None for all ranks."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._zero = engine, engine.optimizer
        refuse(engine)
        self.optimizer: Any = getattr(self._zero, "optimizer", self._zero)
        group = dist.get_all_ranks_from_group(engine.seq_data_parallel_group)
        self.ranks: tuple[int, ...] | None = None if len(group) == dist.get_world_size() else tuple(sorted(group))
        self._every = tuple(sorted(group))
        self._names = {p: name for name, p in engine.module.named_parameters()}
        self._fragments: dict[Tensor, Fragment] = _fragments(engine, self._zero)
        self._masters = list({id(f.master): f.master for f in self._fragments.values()}.values())
        self._last: dict[str, tuple[list[Tensor], list[int], dict[str, Any]]] = {}
        self._homes = [(f"{name}." if name else "", m) for name, m in engine.module.named_modules() if m._buffers]
        self._begin()

    # -- read the state to save --

    def weights(self) -> dict[str, Shard | Tensor]:
        """Return the weights of every parameter, and the buffers, by name."""
        others = [self._untrained_memory(p) for p in self._names if not self._is_trained(p)]
        return self._unless_same("weights", [*self._masters, *others, *self._buffers().values()], self._all_weights)

    def moments(self) -> dict[str, Shard | Tensor]:
        """Return the optimizer's values for every parameter, by `state.NAME.KEY`."""
        keys = self._keys()
        there = [self.optimizer.state[master][key] for key in keys for master in self._masters]
        return self._unless_same("moments", [*self._masters, *there], lambda: self._all_moments(keys))

    def _unless_same(self, what: str, of: list[Tensor], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the previous dict if the tensors `of` have not moved, because creating one takes milliseconds."""
        known, now = self._last.get(what), list(map(Tensor.data_ptr, of))
        same = known is not None and now == known[1] and all(map(is_, of, known[0]))
        if known is None or not same:
            known = self._last[what] = of, now, make()
        return known[2]

    def _all_weights(self) -> dict[str, Shard | Tensor]:
        found: dict[str, Shard | Tensor] = {}
        shards: dict[Tensor, Shard] = {}
        for name, p in self._engine.module.named_parameters(remove_duplicate=False):
            if p not in shards:
                shards[p] = self._shard(p, lambda master: master) if self._is_trained(p) else self._untrained(p)
            found[name] = shards[p]
        return found | self._buffers()

    def _buffers(self) -> dict[str, Tensor]:
        return {
            prefix + key: buffer
            for prefix, module in self._homes
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        }

    def _all_moments(self, keys: list[str]) -> dict[str, Shard | Tensor]:
        state = self.optimizer.state
        return {
            f"state.{name}.{key}": self._shard(p, lambda master, key=key: state[master][key])  # type: ignore[misc]
            for p, name in self._names.items()
            if self._is_trained(p)
            for key in keys
        }

    def _is_trained(self, p: Tensor) -> bool:
        """Return True for a trained parameter, even if this rank has no elements of it."""
        return p in self._fragments or hasattr(p, "_hp_mapping")

    def _shard(self, p: Any, memory: Callable[[Tensor], Tensor]) -> Shard:
        one = self._fragments.get(p) or Fragment(self._masters[0], 0, 0, 0, False)  # other ranks have all elements
        flat = memory(one.master).detach().view(-1)[one.at : one.at + one.count]
        return Shard(flat, _shape(p), start=one.start, replicas=self._every if one.alike else None)

    def _untrained(self, p: Any) -> Shard:
        """Return a shard of a parameter that no optimizer trains, in its own precision."""
        if not hasattr(p, "ds_id"):
            return Shard(p.detach(), tuple(p.shape), replicas=self._every)
        start, count = _piece(p)
        return Shard(self._untrained_memory(p).detach().view(-1)[:count], _shape(p), start=start)

    def _untrained_memory(self, p: Any) -> Tensor:
        found: Tensor = p.ds_tensor if hasattr(p, "ds_id") else p
        return found

    def _keys(self) -> list[str]:
        """Return the keys of the optimizer's values that have one number per element. Raise StateError for other
        tensors, because they cannot be divided among ranks."""
        found: dict[str, None] = {}
        for master in self._masters:
            for key, value in self.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    if value.shape != master.shape:
                        raise StateError(
                            f"{type(self.optimizer).__name__} keeps {key} of shape {list(value.shape)} for weights "
                            f"of shape {list(master.shape)}: ckpt.deepspeed cannot divide it among other ranks"
                        )
                    if value.dim():
                        found[key] = None
        return [key for key in found if all(key in self.optimizer.state.get(m, {}) for m in self._masters)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks: counters, loss scale, settings of groups."""
        engine = self._engine
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
            "boundaries": engine.micro_steps // engine.gradient_accumulation_steps(),
            "scale": {k: getattr(s, k) for k in _SCALES if hasattr(s, k)} if (s := self._scaler()) else None,
            "groups": groups,
            "counts": self._counts(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        engine = self._engine
        engine.global_steps, engine.global_samples = state["global_steps"], state["global_samples"]
        engine.skipped_steps = state["skipped_steps"]
        engine.micro_steps = state["boundaries"] * engine.gradient_accumulation_steps()
        if (scaler := self._scaler()) and state["scale"]:
            for key, value in state["scale"].items():
                if hasattr(scaler, key):
                    setattr(scaler, key, value)
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)
        for own in self.optimizer.state.values():
            for key, value in state["counts"].items():
                live = own.get(key, value)
                own[key] = torch.full_like(live, value) if isinstance(live, Tensor) else type(live)(value)

    def _scaler(self) -> Any:
        """Return the loss scaler if its scale changes during the training, otherwise None."""
        scaler = getattr(self._zero, "loss_scaler", None) or getattr(self._zero, "loss_scale_config", None)
        dynamic = getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False))
        return scaler if dynamic else None

    def _counts(self) -> dict[str, float]:
        """Return the optimizer's scalars, for example its step. Raise StateError if they differ between parameters."""
        found: dict[str, float] = {}
        for master in self._masters:
            for key, value in self.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor) and not (value.numel() == 1 and not value.dim()):
                    continue
                number = value.item() if isinstance(value, Tensor) else value
                if found.setdefault(key, number) != number:
                    raise StateError(f"the optimizer's {key} differs between parameters: {found[key]}, {number}")
        return found

    # -- position in the training --

    @property
    def global_steps(self) -> int:
        return int(self._engine.global_steps)

    @property
    def between_steps(self) -> bool:
        """True unless gradients are being accumulated. Accumulated gradients are not saved."""
        return bool(self._engine.micro_steps % self._engine.gradient_accumulation_steps() == 0)

    # -- resume --

    def _begin(self) -> None:
        """Create the optimizer state that its first step would create, so that it can be saved and restored before the
        first step. The loss scale may make the engine skip that step."""
        for master in self._masters:
            if not self.optimizer.state.get(master):
                if any(group.get("dampening") for group in self.optimizer.param_groups):
                    raise UsageError("ckpt.deepspeed does not support SGD with dampening: it does not start from zeros")
                self.optimizer.state[master] = self._example(master)
        if hasattr(self._zero, "_lazy_init_hp_params_optimizer_state"):
            self._zero._lazy_init_hp_params_optimizer_state()

    def _example(self, master: Tensor) -> dict[str, Any]:
        """Return the state of a parameter as the first step creates it, filled with zeros. It is found by a step of a
        small parameter."""
        small = torch.zeros(8, dtype=master.dtype, device=master.device, requires_grad=True)
        small.grad = torch.zeros_like(small)
        trial = copy.copy(self.optimizer)
        trial.state = defaultdict(dict)
        trial.param_groups = [{**self.optimizer.param_groups[0], "params": [small]}]
        trial.step()
        found: dict[str, Any] = {}
        for key, value in trial.state[small].items():
            if isinstance(value, Tensor):
                shape = master.shape if value.shape == small.shape else value.shape
                found[key] = torch.zeros(shape, dtype=value.dtype, device=value.device)
            else:
                found[key] = 0 if type(value) is int else value
        return found

    @torch.no_grad()
    def weights_restored(self) -> None:
        """Compute the weights of the model from the fp32 weights. All ranks must call this."""
        zero = self._zero
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            zero.checkpoint_event_prologue()
            flats = zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True)
            for number, (low, high) in enumerate(flats):
                low.copy_(high)
                zero._unflatten_partitioned_parameters(number)
            zero.checkpoint_event_epilogue()
        elif isinstance(zero, DeepSpeedZeroOptimizer | BF16_Optimizer):
            zero.update_lp_params()
        else:
            for p, one in self._fragments.items():
                if one.master is not p:
                    p.copy_(one.master.view(-1)[one.at : one.at + one.count].view_as(p))


def refuse(engine: Any) -> None:
    """Raise UsageError for engines whose state this module cannot divide among ranks."""
    zero = engine.optimizer
    why = ""
    if zero is None or not hasattr(getattr(zero, "optimizer", zero), "param_groups"):
        why = "this engine has no optimizer: save engine.module with ckpt.Checkpointer"
    elif getattr(engine, "has_moe_layers", False):
        why = "experts (MoE) are on other ranks than the rest: not supported yet"
    elif _slices(engine) > 1:
        why = "tensor parallelism inside DeepSpeed (AutoTP, an mpu) is not supported yet"
    elif getattr(zero, "swap_optimizer", False) or getattr(zero, "params_in_nvme_and_cpu", False):
        why = "states that are offloaded to NVMe are not in memory: offload them to the host instead"
    elif getattr(engine, "zenflow", False) or "SuperOffload" in type(zero).__name__:
        why = f"{type(zero).__name__} keeps states separately: not supported yet"
    elif own := _tied_in_part(engine.module):
        why = (
            f"pipeline stages that share a layer have separate copies of {own}: build that layer without it, or tie it"
        )
    elif any(_divided_otherwise(p, engine) for p in engine.module.parameters()):
        why = "parameters are divided within groups of ranks (MiCS, hpZ): not supported yet"
    if why:
        raise UsageError(f"ckpt.deepspeed: {why}")


def _slices(engine: Any) -> int:
    """Return the number of ranks that share each tensor, not counting pipeline stages, which share none."""
    pipeline = getattr(engine, "grid", None)
    return int(engine.mp_world_size if pipeline is None else pipeline.get_slice_parallel_world_size())


def _tied_in_part(module: Any) -> str:
    """Return the name of a parameter of which each stage has a separate copy under the same name, or ""."""
    for key, tied in getattr(module, "tied_comms", {}).items():
        for name, _ in tied["module"].named_parameters():
            if len(tied["ranks"]) > 1 and name not in tied["weight_attr"]:
                return f"tied_modules.{key}.{name}"
    return ""


def _divided_otherwise(p: Any, engine: Any) -> bool:
    if not hasattr(p, "ds_id"):
        return False
    return bool(dist.get_world_size(p.ds_process_group) != dist.get_world_size(engine.seq_data_parallel_group))


def _shape(p: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter, which ZeRO-3 empties."""
    return tuple(getattr(p, "ds_shape", p.shape))


def _piece(p: Any) -> tuple[int, int]:
    """Return start and count of the elements that this rank has of a parameter of ZeRO-3, without the padding."""
    size = int(p.ds_tensor.ds_numel)
    start = min(size * int(dist.get_rank(p.ds_process_group)), int(p.ds_numel))
    return start, min(size, int(p.ds_numel) - start)


def _fragments(engine: Any, zero: Any) -> dict[Tensor, Fragment]:
    """Return this rank's fragments by parameter. Frozen parameters, and those entirely on other ranks, have none."""
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        return dict(_of_stage_3(engine, zero))
    if isinstance(zero, DeepSpeedZeroOptimizer):
        return dict(_of_mapping(engine, zero.single_partition_of_fp32_groups))
    if isinstance(zero, BF16_Optimizer):
        return dict(_of_mapping(engine, zero.fp32_groups_flat_partition))
    if isinstance(zero, FP16_UnfusedOptimizer):
        pairs = zip(zero.fp16_groups, zero.fp32_groups, strict=True)
        return {
            p: Fragment(master, 0, 0, p.numel(), True)
            for low, high in pairs
            for p, master in zip(low, high, strict=True)
        }
    if isinstance(zero, FP16_Optimizer):
        return dict(_of_flat(zero))
    if isinstance(zero, torch.optim.Optimizer):
        return {p: Fragment(p, 0, 0, p.numel(), True) for group in zero.param_groups for p in group["params"]}
    raise UsageError(f"ckpt.deepspeed does not support {type(zero).__name__}")


def _of_stage_3(engine: Any, zero: Any) -> Iterator[tuple[Tensor, Fragment]]:
    for p in engine.module.parameters():
        if p.requires_grad:
            group, at, _ = zero.grad_position[zero.get_param_id(p)]
            yield p, Fragment(zero.fp32_partitioned_groups_flat[group], at, *_piece(p), False)


def _of_mapping(engine: Any, masters: list[Tensor]) -> Iterator[tuple[Tensor, Fragment]]:
    """Yield fragments for optimizers that divide the flat buffer of a group among the ranks in any way."""
    for p in engine.module.parameters():
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is not None:
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield p, Fragment(masters[mapping.param_group_index], high.start, low.start, low.numel, False)


def _of_flat(zero: Any) -> Iterator[tuple[Tensor, Fragment]]:
    """Yield fragments for optimizers with one flat buffer per group that is complete on every rank."""
    for params, master in zip(zero.fp16_groups, zero.fp32_groups_flat, strict=True):
        at = 0
        for p in params:
            yield p, Fragment(master, at, 0, p.numel(), True)
            at += p.numel()
