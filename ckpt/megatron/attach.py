"""A Checkpointer for Megatron-core.

Its state has four entries, in addition to those that the user passes:

- `model`: the fp32 master weights of each parameter, under its name in the whole model; a reader sees whole tensors.
  Frozen parameters keep their own dtype.
- `optim`: `state.NAME.exp_avg` and `state.NAME.exp_avg_sq`.
- `megatron`: the optimizer's step, the settings of its groups, and the loss scale.
- `rng`: random states, including those of Megatron's tracker.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ckpt.adapters.shards import Shards
from ckpt.checkpointer import Checkpointer
from ckpt.core.ranks.world import made_together
from ckpt.core.state.nodes import RNG
from ckpt.errors import InvalidArgumentError
from ckpt.megatron.internals import Megatron, OptimizerParamScheduler
from ckpt.megatron.random_numbers import RandomNumbers

OURS = ("model", "optim", "megatron", "rng")


def attach(
    model_chunks: Sequence[Any], optimizer: Any, tiers: object, *, state: dict[str, Any] | None = None, **arguments: Any
) -> Checkpointer:
    """Return a Checkpointer for Megatron's DDP-wrapped model chunks and for the optimizer that `get_megatron_optimizer`
    returned for them.

        cp = ckpt.megatron.attach(model, optimizer, "runs/exp1", state={"sched": opt_param_scheduler})
        for iteration in range(cp.restore(default=0), iterations):
            train_step(...)  # ends with optimizer.step()
            cp.step(iteration + 1)
        cp.close()

    Call it on all ranks before the first step. `tiers`, `arguments`: see `ckpt.Checkpointer`. `state`: further objects
    to save, for example loaders and the learning rate schedule. Random states are always saved. A run can be resumed
    with other sizes of tensor, pipeline and data parallelism. If one rank finds something unsupported, all ranks raise
    InvalidArgumentError with advice. With an unsupported version of megatron-core, the import raises ImportError.
    """
    own = dict(state or {})
    if taken := sorted(own.keys() & set(OURS)):
        raise InvalidArgumentError(
            f"{', '.join(taken)}: ckpt.megatron uses these names for its own entries: rename yours"
        )
    if twice := sorted(name for name, one in own.items() if isinstance(one, RNG)):
        raise InvalidArgumentError(f"{', '.join(twice)}: ckpt.megatron saves random states already: remove ckpt.RNG()")
    inside = made_together("attach", partial(Megatron, model_chunks, optimizer))
    ours = {
        "model": Shards(
            inside.weights, optimizer=inside.optimizer, restored=inside.weights_restored, ranks=inside.ranks
        ),
        "optim": Shards(inside.moments, optimizer=inside.optimizer, ranks=inside.ranks),
        "megatron": inside,
        "rng": RandomNumbers(),
    }
    return Checkpointer(ours | {name: _reloadable(one) for name, one in own.items()}, tiers, **arguments)


class _Schedule:
    """Megatron's learning rate schedule. Megatron adds a loaded step to the current one, so that is set to 0 first."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        return dict(self._schedule.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._schedule.num_steps = 0
        self._schedule.load_state_dict(state)


def _reloadable(value: Any) -> Any:
    """Return an object that can be restored more than once: the value itself, or a wrapper of it."""
    return _Schedule(value) if isinstance(value, OptimizerParamScheduler) else value
