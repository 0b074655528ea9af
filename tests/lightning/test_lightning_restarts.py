"""Lightning trainings with several interruptions end like uninterrupted ones, bit for bit.

Each recipe is a common form of training: hooks and callbacks of epochs, sources of batches, collected values.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

pytest.importorskip("lightning")
import lightning.pytorch as pl
import torchmetrics
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, LambdaCallback, ModelPruning
from lightning.pytorch.utilities import CombinedLoader, rank_zero_only

import ckpt
from ckpt.lightning import CheckpointCallback

pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS, BATCHES = 4, 6
STOPS = (4, 10, 18)  # batches that are begun and not completed; 18 is the first of an epoch


def data(n: int = 4 * BATCHES, seed: int = 7) -> TensorDataset:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.roll(1, 1))


class Model(pl.LightningModule):
    """A backbone with batch norm, and a head with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8))
        self.told: list[list[Any]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        if isinstance(batch, dict):
            x, y = batch["a"]
            x = x + batch["b"][0][: len(x)].mean()
        else:
            x, y = batch
        return self.loss(x, y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.backbone(x)) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(data(), 4, shuffle=True)

    def tell(self, *values: Any) -> None:
        """Record a value of an epoch. The last record of each epoch counts."""
        self.told.append([self.current_epoch, *(v.tolist() if isinstance(v, Tensor) else v for v in values)])


class Stop(Callback):
    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.at:
            raise RuntimeError("stop here")


def fit(recipe: Any, run: str | None, stop: int | None = None, epochs: int = EPOCHS) -> Any:
    """Run one process of a training, and return the module and the trainer."""
    pl.seed_everything(0, verbose=False)
    module, callbacks, settings = recipe()
    saving = [] if run is None else [CheckpointCallback(run, every=5)]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[*saving, *callbacks, Stop(stop)],
        **settings,
    )
    trainer.fit(module)
    return module, trainer


def compare(recipe: Any, run: str, stops: tuple[int, ...] = STOPS) -> None:
    """Interrupt a training at each of these batches, and compare it with an uninterrupted one."""
    whole, _ = fit(recipe, None)
    told: dict[int, Any] = {}
    for stop in stops:
        with pytest.raises(RuntimeError, match="stop here"):
            fit(recipe, run, stop)
    last, trainer = fit(recipe, run)
    assert trainer.global_step == EPOCHS * BATCHES
    for name, value in whole.state_dict().items():
        assert torch.equal(value, last.state_dict()[name]), name
    told |= {epoch: values for epoch, *values in last.told}
    expected = {epoch: values for epoch, *values in whole.told}
    assert told == {epoch: expected[epoch] for epoch in told} and (not expected or told)


Recipe = Callable[[], tuple[Any, list[Any], dict[str, Any]]]
RECIPES: dict[str, Recipe] = {}


def recipe(make: Recipe) -> Recipe:
    RECIPES[make.__name__] = make
    return make


# -- callbacks and hooks that change the model or the optimizer by the epoch --


@recipe
def backbone_finetuning() -> Any:
    class Head(Model):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.head.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    return Head(), [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)], {}


@recipe
def attributes_of_the_epoch() -> Any:
    """Set attributes in the module, in a callback, and in a function of a LambdaCallback."""

    class Weighted(Model):
        weight = offset = scale = 1.0

        def on_train_start(self) -> None:
            self.table = [0.5, 1.0, 2.0, 3.0]

        def on_train_epoch_start(self) -> None:
            self.weight = self.table[self.current_epoch]

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss(x * self.scale, y) * self.weight + self.offset * self.head[1].weight.square().mean()

    class Sets(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.offset = 0.1 * trainer.current_epoch

    def scale(trainer: Any, pl_module: Any) -> None:
        pl_module.scale = 1 + trainer.current_epoch

    return Weighted(), [Sets(), LambdaCallback(on_train_epoch_start=scale)], {}


@recipe
def hook_that_changes_the_state() -> Any:
    """Change settings, moments, weights, schedules, counters and logs once an epoch, not again after a resume."""

    class Changes(Model):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()
            self.register_buffer("scale", torch.ones(()), persistent=False)
            self.epochs = 0

        def on_train_epoch_start(self) -> None:
            self.epochs += 1
            self.mean.reset()
            self.scale.fill_(1.0 + self.current_epoch)  # not in the state, so the hook has to set it again
            optimizer, schedule = self.optimizers().optimizer, self.lr_schedulers()
            optimizer.param_groups[0]["weight_decay"] *= 0.5
            schedule.step()
            self.log("begun", float(self.current_epoch + torch.rand(())))
            with torch.no_grad():
                self.head[1].weight.mul_(0.9)
            self.head[1].bias.data.add_(torch.randn(8))
            self.backbone[0].weight.data = self.backbone[0].weight.data * 1.1
            if self.current_epoch == 2:
                optimizer.state.clear()
            for values in optimizer.state.values():
                values["exp_avg"].mul_(0.5)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index) * self.scale
            self.mean(loss.detach())
            self.log("loss", loss, on_epoch=True, on_step=False)
            return loss

        def on_train_epoch_end(self) -> None:
            metrics = self.trainer.callback_metrics
            self.tell(self.epochs, self.mean.compute(), metrics["begun"], metrics["loss"])

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["epochs"] = self.epochs

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.epochs = checkpoint["epochs"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)]

    return Changes(), [], {}


# -- sources of batches --


def with_loader(make: Callable[[Any], Any], **settings: Any) -> Any:
    class Loads(Model):
        def train_dataloader(self) -> Any:
            return make(self)

    return Loads(), [], settings


@recipe
def cycled_loader_with_augmentation() -> Any:
    class Noisy(Dataset[Any]):
        def __init__(self, n: int) -> None:
            self.inner = data(n)

        def __len__(self) -> int:
            return len(self.inner)

        def __getitem__(self, index: int) -> Any:
            x, y = self.inner[index]
            return x + 0.1 * torch.randn(8) + random.random() + np.random.rand(), y.float()

    def make(_: Any) -> Any:
        loaders = {"b": DataLoader(Noisy(10), 4, shuffle=True), "a": DataLoader(Noisy(4 * BATCHES), 4, shuffle=True)}
        return CombinedLoader(loaders, "max_size_cycle")

    class Floats(Model):
        def train_dataloader(self) -> Any:
            return make(self)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss(x.float(), y)

    return Floats(), [], {}


@recipe
def shuffle_buffer() -> Any:
    class Buffer(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            held: list[Any] = []
            for item in data(4 * BATCHES):
                held.append(item)
                if len(held) > 8:
                    yield held.pop(int(torch.randint(len(held), ())))
            random.shuffle(held)
            yield from held

    return with_loader(lambda _: DataLoader(Buffer(), 4))


@recipe
def samplers_with_counters() -> Any:
    """Count epochs, and use generators that are seeded only once."""

    class Counts(Sampler[int]):
        def __init__(self) -> None:
            self.epoch, self.python, self.numpy = 0, random.Random(3), np.random.default_rng(3)
            self.old, self.torch = np.random.RandomState(3), torch.Generator().manual_seed(3)

        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            order = list(range(4 * BATCHES))
            random.Random(self.epoch).shuffle(order)
            self.python.shuffle(order)
            self.numpy.shuffle(order)
            self.old.shuffle(order)
            yield from (order[i] for i in torch.randperm(len(order), generator=self.torch).tolist())

        def __len__(self) -> int:
            return 4 * BATCHES

    class Counted(Dataset[Any]):
        def __init__(self) -> None:
            self.inner, self.read = data(), 0

        def __len__(self) -> int:
            return len(self.inner)

        def __getitem__(self, index: int) -> Any:
            self.read += 1
            x, y = self.inner[index]
            return x + 0.01 * self.read, y

    return with_loader(lambda _: DataLoader(Counted(), 4, sampler=Counts()))


class Shuffles(Sampler[int]):
    """Shuffles its own order in place each time."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.items)
        return iter([one["at"] if isinstance(one, dict) else int(one) for one in self.items])

    def __len__(self) -> int:
        return len(self.items)


@recipe
def order_shuffled_in_place() -> Any:
    class Remote(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return data()[index]

        def __len__(self) -> int:
            return 24

    return with_loader(lambda _: DataLoader(Remote(), 4, sampler=Shuffles([{"at": i} for i in range(24)])))


@recipe
def stateful_loaders_of_several_lengths() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return with_loader(
        lambda _: {"a": StatefulDataLoader(data(), 4, shuffle=True), "b": StatefulDataLoader(data(10), 4, shuffle=True)}
    )


@recipe
def reloaded_loaders() -> Any:
    """Load and draw training and validation data in the epoch that uses them."""

    class Reloads(Model):
        def train_dataloader(self) -> Any:
            order = torch.randperm(4 * BATCHES)
            return DataLoader([data(seed=100 + self.current_epoch)[i] for i in order.tolist()], 4, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(data(8, 200 + self.current_epoch + int(torch.randint(50, ()))), 4)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", self.loss(*batch))

        def on_train_epoch_end(self) -> None:
            self.tell(self.trainer.callback_metrics["val"])

    return Reloads(), [], {"reload_dataloaders_every_n_epochs": 2}


# -- collected values --


class Averages(Model):
    """Read the collected values at the end of an epoch."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.collect(loss, batch)
        return loss

    def collect(self, loss: Tensor, batch: Any) -> None:
        raise NotImplementedError


@recipe
def outputs_of_steps() -> Any:
    """Collect outputs as in Lightning's documentation: dicts, plain numbers, tuples, and lists in a dict."""

    class Outputs(Averages):
        def __init__(self) -> None:
            super().__init__()
            self.training_step_outputs: list[Tensor] = []
            self.predictions: list[dict[str, Any]] = []
            self.numbers: list[float] = []
            self.by_name: dict[str, list[Any]] = {"loss": []}

        def collect(self, loss: Tensor, batch: Any) -> None:
            self.training_step_outputs.append(loss)
            x = batch[0][: 1 + len(self.numbers) % 3]
            self.predictions.append({"x": x, "name": "a", "both": (loss.item(), x.sum())})
            self.numbers.append(loss.item())
            self.by_name["loss"].append(loss.detach())

        def on_train_epoch_end(self) -> None:
            self.tell(torch.stack(self.training_step_outputs).mean(), self.rest())
            for one in (self.training_step_outputs, self.predictions, self.numbers, self.by_name["loss"]):
                one.clear()

        def rest(self) -> Any:
            x = torch.cat([one["x"] for one in self.predictions])
            both = [[loss, float(total)] for loss, total in (one["both"] for one in self.predictions)]
            return [x.tolist(), both, list(self.numbers), torch.stack(self.by_name["loss"]).tolist()]

    return Outputs(), [], {}


class Kept(Model):
    """Keep losses for other objects."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.kept.append(super().training_step(batch, index).detach())
        return super().training_step(batch, index)


@recipe
def outputs_that_decorated_and_inherited_hooks_read() -> Any:
    def plain(function: Any) -> Any:
        return lambda *given: function(*given)  # without functools.wraps

    class Reads(Kept):
        @torch.no_grad()
        def on_train_epoch_end(self) -> None:
            self.tell(torch.stack(self.kept).mean(), self.rest(), self.total)
            self.kept.clear()

        @plain
        def rest(self) -> Any:
            return [float(one) for one in self.more]

    class Child(Reads):
        def __init__(self) -> None:
            super().__init__()
            self.more: list[Any] = []
            self.total = 0.0

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.more.append(outputs["loss"].detach())

        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            self.more = []

    class Once(Callback):
        def __init__(self) -> None:
            self.losses: list[Any] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(outputs["loss"].item())

        @rank_zero_only
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.total = sum(self.losses)
            self.losses = []

    return Child(), [Once()], {}


def with_metrics(make: Callable[[], dict[str, Any]], *, plain: bool = False) -> Any:
    """Return a module that updates metrics with its loss, in a ModuleDict or in a plain dict."""

    class Metrics(Averages):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = make() if plain else nn.ModuleDict(make())
            self.found: dict[str, Any] = {}

        def collect(self, loss: Tensor, batch: Any) -> None:
            for metric in self.metrics.values():
                metric.update(loss.detach().reshape(1))

        def on_train_epoch_end(self) -> None:
            for name, metric in self.metrics.items():
                found = metric.compute()
                values = found if isinstance(found, dict) else {name: found}
                self.found[name] = sorted((key, value.tolist()) for key, value in values.items())
                metric.reset()
            self.tell(*self.found.values())

    return Metrics(), [], {}


@recipe
def wrapped_metrics() -> Any:
    def make() -> dict[str, Any]:
        return {
            "minmax": torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()),
            "running": torchmetrics.wrappers.Running(torchmetrics.SumMetric(), window=4),
            "boot": torchmetrics.BootStrapper(torchmetrics.MeanMetric(), num_bootstraps=3),
            "sum of two": torchmetrics.MeanMetric() + torchmetrics.SumMetric(),
        }

    return with_metrics(make)


@recipe
def metrics_in_a_plain_dict() -> Any:
    return with_metrics(lambda: {"mean": torchmetrics.MeanMetric(), "last": torchmetrics.CatMetric()}, plain=True)


@pytest.mark.parametrize("name", list(RECIPES))
def test_interrupted_training_ends_like_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    compare(RECIPES[name], str(tmp_path / "run"))


def test_hooks_see_the_keys_of_lightnings_checkpoints(tmp_path: Path) -> None:
    """Hooks see them when they save, and those of the saved step when they load."""
    seen: dict[str, Any] = {}

    def note(when: str, checkpoint: Any) -> None:
        [optimizer], [schedule] = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
        steps = {int(one["step"]) for one in optimizer["state"].values()}
        names = ("hyper_parameters", "hparams_name", "datamodule_hyper_parameters", Data.__qualname__, "global_step")
        seen[when] = [steps, schedule["last_epoch"], *(str(checkpoint[name]) for name in names)]

    class Data(pl.LightningDataModule):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return DataLoader(data(), self.hparams["size"])

        def state_dict(self) -> Any:
            return {"a": 1}

    class Hooked(Model):
        def __init__(self, lr: float, odd: Any = object) -> None:
            super().__init__()
            self.save_hyperparameters()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), self.hparams["lr"])
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            note("saved", checkpoint)

    class Loads(Callback):
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            note("loaded", checkpoint)

    def start(steps: int, lr: float) -> None:
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, callbacks=[CheckpointCallback(str(tmp_path / "run"), every=1), Loads()],
        )  # fmt: skip
        trainer.fit(Hooked(lr), datamodule=Data(4))

    start(4, 0.01)
    first = dict(seen)
    assert list(first) == ["saved"] and first["saved"][0] == {4} and "'lr': 0.01" in first["saved"][2]
    start(5, 0.01)
    assert seen["loaded"] == first["saved"] and seen["saved"][0] == {5}


# -- warnings --

OURS = Path(str(sys.modules[CheckpointCallback.__module__].__file__)).parent


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return the log messages of our code for Lightning users since the last call."""
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(caplog.handler)

    def read() -> list[str]:
        records = {id(record): record for record in caplog.records}.values()
        ours = [r for r in records if r.levelno >= logging.WARNING and Path(r.pathname).parent == OURS]
        caplog.clear()
        return [record.getMessage() for record in ours]

    yield read
    logger.removeHandler(caplog.handler)


def interrupt_and_continue(make: Recipe, run: str) -> None:
    with pytest.raises(RuntimeError, match="stop here"):
        fit(make, run, 10)
    fit(make, run)


@pytest.mark.parametrize("name", ["shuffle_buffer", "cycled_loader_with_augmentation"])
def test_too_many_draws_of_batches_give_one_warning_per_epoch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    """Only draws that decide later batches count: loaders that start again draw rarely."""
    monkeypatch.setattr("ckpt.lightning.batches.MAX_DRAWS", 1)
    fit(RECIPES[name], str(tmp_path / "run"), epochs=1)
    found = warned()
    assert len(found) == (name == "shuffle_buffer")
    assert all("more than 1 batches of this epoch drew from the shared random generators" in text for text in found)


def test_changed_long_orders_are_reported_once_unlike_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr("ckpt.lightning.orders.MAX_NUMBERS", 20)

    class Caches(Dataset[Any]):
        def __init__(self) -> None:
            self.cache: list[Any] = [None] * 24
            self.array, self.names = np.zeros(24), [f"{i}" for i in range(24)]

        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            self.cache[index], self.array[index] = index, index
            return data()[index]

    def make() -> Any:
        return with_loader(lambda _: DataLoader(Caches(), 4, sampler=Shuffles([*range(24)])))

    fit(make, str(tmp_path / "run"))
    [text] = warned()
    assert "training changes Shuffles.items, which has more than 20 items" in text


def test_hook_that_cannot_run_twice_gives_a_warning_only(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    def make() -> Any:
        class Once(Model):
            def on_train_epoch_start(self) -> None:
                with torch.no_grad():
                    self.head[1].weight.mul_(0.9)
                if self.trainer.fit_loop.total_batch_idx % BATCHES != BATCHES - 1:
                    raise ValueError("not in the middle")

        return Once(), [], {}

    compare(make, str(tmp_path / "run"), (10,))
    [text] = warned()
    assert "Once.on_train_epoch_start failed when it ran again" in text and "not in the middle" in text


def test_pruning_resets_to_the_initial_weights_of_the_run(tmp_path: Path) -> None:
    """The lottery ticket hypothesis needs the weights of the first process, not those that a restart begins with."""

    def make(seed: int) -> Recipe:
        def recipe() -> Any:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                module = Model()
            return module, [ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=True)], {}

        return recipe

    whole, _ = fit(make(1), None)
    for stop, seed in ((4, 1), (10, 2)):
        with pytest.raises(RuntimeError, match="stop here"):
            fit(make(seed), str(tmp_path / "run"), stop)
    last, _ = fit(make(3), str(tmp_path / "run"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, last.state_dict()[name]), name


# -- steps that Lightning does not count --


class Manual(Model):
    """Make the updates in `update`. Counts the batches of this process in `done`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.done = 0

    def training_step(self, batch: Any, index: int) -> None:
        self.done += 1
        self.update(self.loss(*batch))

    def update(self, loss: Tensor) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class ByHand(Manual):
    """Accumulates the gradients of two batches."""

    def configure_optimizers(self) -> Any:
        return None

    def update(self, loss: Tensor) -> None:
        loss.backward()
        if self.trainer.fit_loop.total_batch_idx % 2:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.sub_(1e-2 * parameter.grad)
                    parameter.grad.zero_()


class ByHandOnData(ByHand):
    def update(self, loss: Tensor) -> None:
        self.zero_grad()
        loss.backward()
        for parameter in self.parameters():
            parameter.data -= 1e-2 * parameter.grad


def newest(run: str) -> int:
    return max(one.step for one in ckpt.Run(run).list())


# steps that are saved after ten batches, and when the training ends
UNCOUNTED = {Manual: (10, 24), ByHand: (5, 12), ByHandOnData: (5, 19)}


@pytest.mark.parametrize("kind", list(UNCOUNTED))
def test_steps_that_lightning_does_not_count_are_saved(kind: type[Manual], tmp_path: Path) -> None:
    """Manual optimization continues exactly without any step of Lightning's optimizers."""
    run = str(tmp_path / "run")
    whole, trainer = fit(lambda: (kind(), [], {}), None)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(lambda: (kind(), [], {}), run, 10)
    stopped, ended = UNCOUNTED[kind]
    assert (trainer.global_step, newest(run)) == (0, stopped)
    last, _ = fit(lambda: (kind(), [], {}), run)
    assert (last.done, newest(run)) == (EPOCHS * BATCHES - 10, ended)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, last.state_dict()[name]), name


def test_training_that_saves_nothing_raises_error(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    """With gradients left in mid-epoch it is unknown whether a batch made a step."""

    class Halts(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    class Validated(ByHandOnData):
        def val_dataloader(self) -> Any:
            return self.train_dataloader()

        def validation_step(self, batch: Any, index: int) -> None:
            self.loss(*batch)

    settings = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    with pytest.raises(ckpt.errors.SaveError, match="ended without a saved step, because no optimizer"):
        fit(lambda: (Validated(), [Halts()], settings), str(tmp_path / "run"))
