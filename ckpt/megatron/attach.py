"""A Checkpointer for Megatron-core.

Its state has four entries, and those of the user beside them:

- `model`: of each parameter the fp32 master weights, under the name that it has in the whole model, whole for who
  reads it; frozen parameters as they are.
- `optim`: `state.NAME.exp_avg` and `state.NAME.exp_avg_sq`.
- `megatron`: the optimizer's step, settings of its groups, the loss scale.
- `rng`: random numbers, those of Megatron's tracker among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ckpt.adapters.shards import Shards
from ckpt.checkpointer import Checkpointer
from ckpt.core.ranks.world import made_together
from ckpt.core.state.stateful import RNG
from ckpt.errors import UsageError
from ckpt.megatron.internals import Megatron, OptimizerParamScheduler
from ckpt.megatron.random_numbers import RandomNumbers

OURS = ("model", "optim", "megatron", "rng")


def attach(
    model_chunks: Sequence[Any], optimizer: Any, tiers: object, *, state: dict[str, Any] | None = None, **options: Any
) -> Checkpointer:
    """The Checkpointer of Megatron's DDP-wrapped model chunks and what `get_megatron_optimizer` made of them.

        cp = ckpt.megatron.attach(model, optimizer, "runs/exp1", state={"sched": opt_param_scheduler})
        for iteration in range(cp.restore(default=0), iterations):
            train_step(...)  # ends with optimizer.step()
            cp.step(iteration + 1)
        cp.close()

    Call it on all ranks before the first step. `tiers`, `options`: as of `ckpt.Checkpointer`. `state`: what else
    belongs to the training: the schedule of the learning rate, loaders. Random numbers are saved without being named.
    A run goes on with other sizes of tensor, pipeline and data parallelism. UsageError for what is not known, on all
    ranks if it is one of them, says what to do; ImportError at import for a version of megatron-core that is not known.
    """
    own = dict(state or {})
    if taken := sorted(own.keys() & set(OURS)):
        raise UsageError(f"{', '.join(taken)}: ckpt.megatron has entries of these names itself; name yours otherwise")
    if twice := sorted(name for name, one in own.items() if isinstance(one, RNG)):
        raise UsageError(f"{', '.join(twice)}: ckpt.megatron saves random numbers itself: leave ckpt.RNG() out")
    inside = made_together("attach", partial(Megatron, model_chunks, optimizer))
    ours = {
        "model": Shards(
            inside.weights, optimizer=inside.optimizer, restored=inside.weights_restored, ranks=inside.ranks
        ),
        "optim": Shards(inside.moments, optimizer=inside.optimizer, ranks=inside.ranks),
        "megatron": inside,
        "rng": RandomNumbers(),
    }
    return Checkpointer(ours | {name: _again(one) for name, one in own.items()}, tiers, **options)


class _Schedule:
    """Megatron's schedule of the learning rate, which counts from where it is when it loads."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        return dict(self._schedule.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._schedule.num_steps = 0
        self._schedule.load_state_dict(state)


def _again(value: Any) -> Any:
    """The same, or what can be restored more than once."""
    return _Schedule(value) if isinstance(value, OptimizerParamScheduler) else value
