"""Training time of everystep's callbacks, in addition to `Checkpointer.step`.

    python benchmarks/callbacks.py            # a table
    python benchmarks/callbacks.py --json

A training with a tiny model, with every call to the callback in a batch timed. `step` is the time of
`Checkpointer.step`, which `own.py` measures in more detail. `state` is the part of it in which the callback returns the
loops, callbacks and random numbers that belong to a step.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

BATCHES, LEFT_OUT = 600, 50


class Clock:
    """Measures the seconds in some functions; nested ones count once, and also separately."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def around(self, owner: Any, method: str, name: str) -> None:
        theirs: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return theirs(*args, **arguments)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, method, timed)


def lightning() -> dict[str, float]:
    """Return median milliseconds per batch in `ckpt.lightning.CheckpointCallback`."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from torch.utils.data import DataLoader

    from ckpt.lightning import CheckpointCallback
    from ckpt.lightning.loop_hooks import LoopHooks
    from ckpt.lightning.trainer_state import TrainerState

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    clock = Clock()
    rows: list[dict[str, float]] = []
    for owner, method, name in (
        (LoopHooks, "_advance", "all"),
        (LoopHooks, "_on_advance_end", "all"),
        (pl.loops.training_epoch_loop._TrainingEpochLoop, "advance", "lightning"),
        (pl.loops.training_epoch_loop._TrainingEpochLoop, "on_advance_end", "lightning"),
        (TrainerState, "state_dict", "state"),
        (CheckpointCallback, "_done", "done"),
    ):
        clock.around(owner, method, name)

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            clock.around(trainer.callbacks[-1].checkpointer, "step", "step")

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            rows.append(dict(clock.spent))
            clock.spent.clear()

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            self.log("loss", found["loss"], on_step=True, on_epoch=True)
            return found

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=[Watch(), CheckpointCallback(folder, every=100_000)],
        )
        trainer.fit(Model(), DataLoader(RandomDataset(32, BATCHES)))
    whole = [row for row in rows[LEFT_OUT:] if "step" in row]
    callback = [row["all"] - row["lightning"] - row["step"] for row in whole]
    inside = {name: 1000 * statistics.median(row[name] for row in whole) for name in ("step", "state")}
    return {"callback": 1000 * statistics.median(callback), **inside}


MEASURED = {"lightning": lightning}


def main() -> None:
    parser = argparse.ArgumentParser(description="Milliseconds per batch in callbacks of everystep.")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = {name: measure() for name, measure in MEASURED.items()}
    if given.json:
        print(json.dumps(found))
        return
    print(f"{'ms a batch':<14}{'callback':>12}{'step':>12}{'of it state':>14}")
    for name, row in found.items():
        print(f"{name:<14}{row['callback']:>12.3f}{row['step']:>12.3f}{row['state']:>14.3f}")


if __name__ == "__main__":
    main()
