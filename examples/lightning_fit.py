"""A Lightning training with one additional line, which kills itself and continues.

    pip install -e '.[lightning]'
    python examples/lightning_fit.py runs/fit --kill-at 120     # SIGKILL right after step 120
    python examples/lightning_fit.py runs/fit                   # continues at that step or the one before, in the epoch
    ckpt ls runs/fit
    python examples/lightning_fit.py runs/whole                 # never killed: prints the same losses and digest

A small character-level transformer learns to sort. The loader shuffles, dropout draws random numbers, and gradients
accumulate over two batches. The learning rate follows a schedule, and validation runs twice an epoch. A restart
continues all of these exactly. Only the line with `CheckpointCallback` concerns checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ckpt.lightning import CheckpointCallback

LENGTH, LETTERS, WIDTH = 12, 16, 48
EPOCHS, TRAIN, BATCH = 3, 4096, 32


class Sorter(pl.LightningModule):
    """A model that returns its input letters in alphabetical order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LETTERS)

    def loss(self, letters: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embed(letters) + self.place))
        return functional.cross_entropy(logits.flatten(0, 1), letters.sort(-1).values.flatten())

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss(batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * TRAIN // BATCH // 2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Tell(pl.Callback):
    """Print the exact loss of every 20th step, and kill this process on request."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(f"starts at step {trainer.global_step}", flush=True)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step % 20 == 0 and index % 2:
            loss = float(outputs["loss"])
            print(f"step {trainer.global_step}: loss {loss:.4f} ({loss.hex()})", flush=True)


def loader(count: int, seed: int, *, shuffle: bool) -> DataLoader[Any]:
    letters = torch.randint(LETTERS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(letters), BATCH, shuffle=shuffle)


def main() -> None:
    parser = argparse.ArgumentParser(description="A Lightning training that resumes.")
    parser.add_argument("run", nargs="?", default="runs/fit", help="folder or URL")
    parser.add_argument("--kill-at", type=int, metavar="N", help="SIGKILL after N optimizer steps")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    model = Sorter()
    saving = CheckpointCallback(given.run, every=50, monitor="val_loss", top_k=2)  # the one line
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        callbacks=[saving, Tell(given.kill_at)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(TRAIN, 1, shuffle=True), loader(256, 2, shuffle=False))
    digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values()))
    print(f"done: {trainer.global_step} steps, weights {digest.hexdigest()[:16]}")
    print(f"best: step {saving.best_step}, val_loss {saving.best_score:.4f}", flush=True)


if __name__ == "__main__":
    main()
