"""Tests of the guide's recipe for MosaicML's Composer: killed and restarted, training ends exactly as without kills."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from documents import blocks
from foreign import warmed
from parallel import free_port, launch
from processes import REPO, killed

CALLBACK = next(one.text for one in blocks(REPO / "docs/guide/trainers/composer.md") if one.title)
TRAINING = """
import hashlib, json, os, sys
import torch
from composer import ComposerModel, Trainer
from composer.optim import CosineAnnealingWithWarmupScheduler
from composer.utils import dist, get_device

run, *kills = sys.argv[1:]


class Net(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8))

    def forward(self, batch):
        return self.layers(batch)

    def loss(self, outputs, batch):
        return (outputs - batch).square().mean()


class Says(Callback):
    def __init__(self, everystep, kill_at):
        self.everystep, self.kill_at = everystep, kill_at

    def epoch_start(self, state, logger):
        self.everystep.loader.set_epoch(state.timestamp.epoch.value)  # also where the other callback is not

    def batch_end(self, state, logger):
        at, (rate,) = state.timestamp, state.schedulers[0].get_last_lr()
        counts = at.epoch.value, at.batch.value, at.batch_in_epoch.value, at.sample.value
        print(json.dumps([at.total_wct.total_seconds(), *counts, state.loss.item(), rate]), flush=True)
        if at.batch.value == self.kill_at:
            self.everystep.cp.wait(60.0)
            dist.barrier()
            os.kill(os.getpid(), 9)


def train(kill_at):
    torch.manual_seed(0)
    model = Net()
    loader = ckpt.Loader(torch.randn(64, 8), batch_size=8, seed=0)
    everystep = Everystep(loader, run, every=100)
    printer = Says(everystep, kill_at)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), 1e-2),
        schedulers=CosineAnnealingWithWarmupScheduler("2ba"),
        step_schedulers_every_batch=True,
        train_dataloader=loader,
        max_duration="3ep",
        device="cpu",
        seed=7,
        spin_dataloaders=False,
        progress_bar=False,
        callbacks=[printer] if kill_at < 0 else [everystep, printer],
    )
    trainer.fit()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(json.dumps([0, hashlib.sha256(weights).hexdigest()]), flush=True)
    trainer.close()


torch.set_num_threads(1)
dist.initialize_dist(get_device("cpu"))
for kill_at in kills:
    train(int(kill_at))
"""


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Return an interpreter with Composer and our packages."""
    yield from warmed("composer", "composer_on_cpu", "composer.optim")


def test_killed_composer_training_continues_exactly(python: Path, tmp_path: Path) -> None:
    """Two ranks are killed within an epoch and after its last batch: counts, losses, learning rates and final weights
    equal those without the callback, dropout included, and the clock continues."""

    def start(*kills: int) -> list[list[list[Any]]]:
        """Train until each of these batches (-1: without the callback), and return each rank's lines, seconds first."""
        words = f"import composer_on_cpu\n{CALLBACK}{TRAINING}", tmp_path / "run", *kills
        alone = {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "PYTHONWARNINGS": "ignore"}
        done = launch(2, *words, port=free_port(), python=python, **alone)
        assert all(killed(one) if kills[-1] else one.returncode == 0 for one in done), done[0].stderr[-4000:]
        return [[json.loads(line) for line in one.stdout.splitlines() if line.startswith("[")] for one in done]

    for first, *parts in zip(start(-1, 6), start(8), start(0), strict=True):
        plain, parts = [said[1:] for said in first[:13]], [first[13:], *parts]
        assert len({said[-2] for said in plain[:-1]}) == 12
        assert [[said[1:] for said in part] for part in parts] == [plain[:6], plain[6:8], plain[8:]]
        assert parts[0][-1][0] < parts[1][0][0] and parts[1][-1][0] < parts[2][0][0]
