"""The number of a step: `trainer.global_step` plus the steps that Lightning does not count.

In manual optimization, Lightning counts only the steps of optimizers that it wraps. It does not count steps of
`self.optimizers(use_pl_optimizer=False)`, of optimizers that the module creates itself, or updates by hand.
"""

from __future__ import annotations

from typing import Any

from ckpt.checkpointer import Checkpointer
from ckpt.errors import SaveError
from ckpt.lightning.batches import State, warn
from ckpt.options import Options

NOTHING_SAVED = (
    "the training ended without a saved step, because no optimizer of the checkpoint has stepped and gradients were "
    "left after each batch: call step() of the optimizers that configure_optimizers() returns, or set the gradients "
    "to None after an update"
)


class StepCount:
    """Decides after each batch whether it made a step. `extra`: number of steps that `trainer.global_step` omits."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self.extra = 0
        self._by_batch = False  # True if no optimizer has stepped in the first epoch: each batch is a step
        self._some = self._none = False  # True if a batch of this training was saved; True if a batch was not saved

    def state_dict(self) -> State:
        return {"extra": self.extra, "by_batch": self._by_batch}

    def load_state_dict(self, saved: State) -> None:
        self.extra, self._by_batch = saved["extra"], saved["by_batch"]

    def begin(self, cp: Checkpointer) -> None:
        """Begin counting after the restore, because the restore writes to parameters."""
        self._run, self._writes = cp._run, self._count_writes()

    @property
    def now(self) -> int:
        return int(self._trainer.global_step) + self.extra

    def batch_done(self, last: int) -> bool:
        """Return True if the batch made a step. `last`: number of the last step that was saved."""
        if self.now <= last and not self._module.automatic_optimization and self._is_step():
            self.extra += 1
        found = self.now > last
        self._some, self._none = self._some or found, self._none or not found
        return found

    def _is_step(self) -> bool:
        if self._run.hook.count or self._trainer.global_step:
            return self._run.moved_on
        before, self._writes = self._writes, self._count_writes()
        if before != self._writes or self._by_batch or all(p.grad is None for p in self._module.parameters()):
            return True
        if self._trainer.should_stop or self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._by_batch = True
            warn(
                self._trainer,
                "no optimizer of the checkpoint has stepped in this epoch, so from now on each batch is saved as a "
                "step. Gradients that are accumulated over batches are not saved",
            )
        return self._by_batch

    def _count_writes(self) -> int:
        """Return the number of writes to all parameters so far. Writes to `parameter.data` do not count."""
        return sum(parameter._version for parameter in self._module.parameters())

    def check_any(self, options: Options) -> None:
        """Raise SaveError if batches were completed, but none of them was saved."""
        if self._none and not self._some and not self._module.automatic_optimization:
            if options.on_error != "warn":
                raise SaveError(NOTHING_SAVED)
            warn(self._trainer, NOTHING_SAVED)
