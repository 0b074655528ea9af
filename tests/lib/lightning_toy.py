"""A small Lightning training that tests start, kill and start again, in this process or in one of its own.

    python tests/lib/lightning_toy.py '{"run": "/tmp/run", "out": "/tmp/out", "kill": ["batch", 7]}'

Dropout, a metric, a schedule and two kinds of logged values: all of it has to come back. Each batch appends a line to
`out`, so that what a killed process did is known as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import ckpt
from ckpt.lightning import CheckpointCallback

WIDTH, BATCHES = 16, 8
DEFAULTS: dict[str, Any] = {
    "run": None, "out": None, "kill": None, "epochs": 3, "accumulate": 1, "workers": 0, "val_every": 1.0, "seed": 0,
    "strategy": "auto", "devices": 1, "callback": {}, "patience": 0, "width": WIDTH, "limits": {}, "loader": "plain",
    "interval": "step", "persistent": False, "extra": 0,
}  # fmt: skip
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class Model(pl.LightningModule):
    """`kill`: what kills this process: ["batch", n] in training_step n, ["val", n] in the n-th batch of validations."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        width = spec["width"]
        self.net = nn.Sequential(nn.Linear(WIDTH, width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, WIDTH))
        self.seen = MeanMetric()
        self.seen.persistent(spec["persistent"])
        self.more = nn.ModuleList(nn.Linear(3, 3) for _ in range(spec["extra"]))  # unused
        self.validated = 0
        self.history: list[float] = []

    def configure_model(self) -> None:
        if self.spec["strategy"] == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for layer in (self.net[0], self.net[3], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.reach("batch", self.trainer.fit_loop.total_batch_idx)
        loss: torch.Tensor = (self.net(batch[0]) - batch[1]).pow(2).mean()
        self.seen(loss.detach())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.tell("batch", self.trainer.fit_loop.total_batch_idx, loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated += 0 if self.trainer.sanity_checking else 1
        self.reach("val", self.validated)
        loss = (self.net(batch[0] + 0.01 * torch.randn_like(batch[0])) - batch[1]).pow(2).mean()
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.tell("val", self.trainer.global_step, self.trainer.callback_metrics["val_loss"])

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.tell("epoch", self.trainer.current_epoch, metrics["train_loss_epoch"] + metrics["seen"])

    def reach(self, what: str, count: int) -> None:
        if self.spec["kill"] == [what, count]:  # `staged()` covers only the share of its own rank
            save = self.trainer.callbacks[-1]._save
            if save is not None:
                save.wait_staged(60.0)
        if self.spec["kill"] == [what, count]:
            if self.trainer.world_size > 1:
                self.trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.spec["kill"] == ["term " + what, count]:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.spec["kill"] == ["raise " + what, count]:
            raise RuntimeError("stop here")

    def tell(self, what: str, count: int, value: torch.Tensor) -> None:
        line = json.dumps([what, count, float(value).hex()]) + "\n"
        if self.spec["out"]:
            path = self.spec["out"] if self.global_rank == 0 else f"{self.spec['out']}.{self.global_rank}"
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.write(fd, line.encode())
            os.close(fd)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": self.spec["interval"]}]


def loader(spec: dict[str, Any], *, train: bool) -> Any:
    generator = torch.Generator().manual_seed(7)
    count = 4 * (BATCHES if train else 3) * spec["devices"]
    x = torch.randn(count, WIDTH, generator=generator)
    data = TensorDataset(x, x.roll(1, 1))
    kind: Any = DataLoader
    if spec["loader"] == "stateful" and train:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    own = torch.Generator().manual_seed(11) if spec["loader"] == "generator" and train else None
    return kind(data, 4, shuffle=True, num_workers=spec["workers"] if train else 0, generator=own)


def fit(**given: Any) -> dict[str, Any]:
    """Train; the loss curve by batch, what was validated, a digest of the weights, and the callback."""
    spec = {**DEFAULTS, **given}
    pl.seed_everything(spec["seed"], verbose=False)
    model = Model(spec)
    callbacks: list[Any] = []
    if spec["run"] is not None:
        arguments = {"every": 5, "triggers": [ckpt.triggers.on_signal("SIGTERM")], **spec["callback"]}
        callbacks.append(CheckpointCallback(spec["run"], **arguments))  # first, as users may put it
    callbacks += spec.get("more", [])
    if spec["patience"]:  # no improvement is large enough, so it counts
        callbacks.append(EarlyStopping("val_loss", patience=spec["patience"], min_delta=100.0))
    strategy = spec["strategy"]
    if strategy == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(process_group_backend="gloo")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=spec["devices"],
        strategy=strategy,
        max_epochs=spec["epochs"],
        accumulate_grad_batches=spec["accumulate"],
        val_check_interval=spec["val_every"],
        callbacks=callbacks,
        logger=False,
        **{**quiet, **spec["limits"]},
    )
    trainer.fit(model, loader(spec, train=True), loader(spec, train=False), ckpt_path=spec.get("ckpt_path"))
    mine = next((c for c in callbacks if isinstance(c, CheckpointCallback)), None)
    return {"digest": digest(model), "steps": trainer.global_step, "model": model, "callback": mine, "trainer": trainer}


def digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        total.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def curve(out: str) -> dict[str, str]:
    """Return the last report of each batch, validation and epoch."""
    return {f"{what} {count}": value for what, count, value in map(json.loads, Path(out).read_text().splitlines())}


def main(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for one in spec.pop("jobs", [spec]):
        found = fit(**one)
        if os.environ.get("RANK", "0") == "0":
            os.write(1, (json.dumps({"digest": found["digest"], "steps": found["steps"]}) + "\n").encode())
    sys.stdout.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
