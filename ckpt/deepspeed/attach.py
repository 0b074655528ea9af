"""A Checkpointer for a DeepSpeed engine.

Its state has four entries, in addition to those that the user passes:

- `model`: the fp32 master weights of each parameter, under its name in the model; a reader sees whole tensors, so a
  plain model can restore them too. Frozen parameters keep their own dtype. Each rank has its own buffers.
- `optim`: `state.NAME.exp_avg` and the other values that the optimizer has for each parameter NAME.
- `engine`: the counters, the loss scale, and the settings of the optimizer's groups.
- `sched`: the engine's learning rate schedule, if it has one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ckpt.adapters.shards import Shards
from ckpt.checkpointer import Checkpointer
from ckpt.core.ranks.world import made_together
from ckpt.deepspeed.internals import Engine
from ckpt.errors import InvalidArgumentError
from ckpt.saving import Save

OURS = ("model", "optim", "engine", "sched")


class EngineCheckpointer(Checkpointer):
    """A Checkpointer that uses the engine's step counter. Created by `attach`."""

    def __init__(self, engine: Engine, state: dict[str, Any], tiers: object, **arguments: Any) -> None:
        self._engine = engine
        super().__init__(state, tiers, **arguments)

    def step(self, step: int | None = None, *, finite: bool | torch.Tensor | None = None) -> Save | None:
        """Save like `ckpt.Checkpointer.step`. Call this after every `engine.step()` (or `engine.train_batch()`). It
        does nothing while gradients are being accumulated. `step`: default `engine.global_steps`."""
        if not self._engine.between_steps:
            return None
        return super().step(self._engine.global_steps if step is None else step, finite=finite)


def attach(engine: Any, tiers: object, *, state: dict[str, Any] | None = None, **arguments: Any) -> EngineCheckpointer:
    """Return a Checkpointer for the engine that `deepspeed.initialize` returned. Call it before the first step.

        cp = ckpt.deepspeed.attach(engine, "runs/exp1", state={"rng": ckpt.RNG(), "loader": loader})
        for step in range(cp.restore(default=0), steps):
            engine.backward(engine(batch(step)))
            engine.step()
            cp.step()
        cp.close()

    `tiers`, `arguments`: see `ckpt.Checkpointer`. `state`: further objects to save, for example loaders and random
        number states. Supported are ZeRO 0 to 3, bf16, fp16 with loss scaling, fp32, and optimizer states offloaded to
        the host. A run can be resumed with another ZeRO stage, precision or number of ranks. Raises
        InvalidArgumentError with advice for other engines. With an unsupported version of DeepSpeed, importing
        `ckpt.deepspeed` raises ImportError.
    """
    own = dict(state or {})
    if taken := sorted(own.keys() & set(OURS)):
        raise InvalidArgumentError(
            f"{', '.join(taken)}: ckpt.deepspeed uses these names for its own entries: rename yours"
        )
    inside, ours = entries(engine)
    return EngineCheckpointer(inside, ours | own, tiers, **arguments)


def entries(engine: Any) -> tuple[Engine, dict[str, Any]]:
    """Return the wrapped engine, and the entries that it adds to a state. Raise InvalidArgumentError like `attach`."""
    inside = made_together("attach", partial(Engine, engine))
    ours: dict[str, Any] = {
        "model": Shards(
            inside.weights, optimizer=inside.optimizer, restored=inside.weights_restored, ranks=inside.ranks
        ),
        "optim": Shards(inside.moments, optimizer=inside.optimizer, ranks=inside.ranks),
        "engine": inside,
    }
    if engine.lr_scheduler is not None:
        ours["sched"] = engine.lr_scheduler
    return inside, ours
