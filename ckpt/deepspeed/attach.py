"""A Checkpointer for a DeepSpeed engine.

Its state has four entries, and those of the user beside them:

- `model`: of each parameter the fp32 master weights, under the name that it has in the model, whole for who reads it;
  frozen parameters as they are, buffers of each rank. So a plain model restores it too.
- `optim`: `state.NAME.exp_avg` and what else the optimizer keeps of each parameter.
- `engine`: counts, the loss scale, settings of the optimizer's groups.
- `sched`: the engine's schedule of the learning rate, if it has one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ckpt.adapters.shards import Shards
from ckpt.checkpointer import Checkpointer
from ckpt.core.ranks.world import made_together
from ckpt.deepspeed.internals import Engine
from ckpt.errors import UsageError
from ckpt.save import Save

OURS = ("model", "optim", "engine", "sched")


class EngineCheckpointer(Checkpointer):
    """A Checkpointer that counts the engine's steps. Made by `attach`."""

    def __init__(self, engine: Engine, state: dict[str, Any], tiers: object, **options: Any) -> None:
        self._engine = engine
        super().__init__(state, tiers, **options)

    def step(self, step: int | None = None, *, finite: bool | torch.Tensor | None = None) -> Save | None:
        """Call after every `engine.step()` (or `engine.train_batch()`). While gradients are being accumulated it does
        nothing. `step`: by default `engine.global_steps`. Else as `ckpt.Checkpointer.step`."""
        if not self._engine.between_steps:
            return None
        return super().step(self._engine.global_steps if step is None else step, finite=finite)


def attach(engine: Any, tiers: object, *, state: dict[str, Any] | None = None, **options: Any) -> EngineCheckpointer:
    """The Checkpointer of what `deepspeed.initialize` returned, before the first step.

        cp = ckpt.deepspeed.attach(engine, "runs/exp1", state={"rng": ckpt.RNG(), "loader": loader})
        for step in range(cp.restore(default=0), steps):
            engine.backward(engine(batch(step)))
            engine.step()
            cp.step()
        cp.close()

    `tiers`, `options`: as of `ckpt.Checkpointer`. `state`: what else belongs to the training: loaders, random numbers.
    ZeRO 0 to 3, bf16, fp16 with loss scaling, fp32, optimizer states offloaded to the host; a run goes on under another
    stage, another precision and with another number of ranks. UsageError for an engine that is none of these, says
    what to do; ImportError at import for a version of DeepSpeed that is not known.
    """
    own = dict(state or {})
    if taken := sorted(own.keys() & set(OURS)):
        raise UsageError(f"{', '.join(taken)}: ckpt.deepspeed has entries of these names itself; name yours otherwise")
    inside, ours = entries(engine)
    return EngineCheckpointer(inside, ours | own, tiers, **options)


def entries(engine: Any) -> tuple[Engine, dict[str, Any]]:
    """An engine's own entries of a state. UsageError as of `attach`."""
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
