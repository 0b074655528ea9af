"""Tests of killed Lightning trainings, compared bit for bit with undisturbed ones."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from processes import PYTHONPATH, REPO, start_python, warm

pytest.importorskip("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

import lightning_toy as toy
from ckpt.best import END, kept
from ckpt.lightning import CheckpointCallback, CheckpointIO
from ckpt.lightning.loop_hooks import BatchFeed
from run_files import data_files

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def imported() -> Any:
    with warm("lightning.pytorch", "torchmetrics"):
        yield


def start(spec: dict[str, Any], *, ranks: int = 1) -> list[subprocess.Popen[str]]:
    """Start the toy in its own processes."""
    path = PYTHONPATH
    base = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    found = []
    for rank in range(ranks):
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "RANK": str(rank)}
        world |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "test"}
        found.append(
            start_python(
                [sys.executable, str(REPO / "tests" / "lib" / "lightning_toy.py"), json.dumps(spec)],
                env={**base, **(world if ranks > 1 else {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return found


def end(processes: list[subprocess.Popen[str]], code: int) -> list[dict[str, Any]]:
    """Wait for the end with this exit code, and return the output of rank 0."""
    ended = [process.communicate(timeout=240) for process in processes]
    for process, (out, err) in zip(processes, ended, strict=True):
        assert process.returncode == code, f"{process.returncode}\n{out[-2000:]}\n{err[-6000:]}"
    return [json.loads(line) for line in ended[0][0].splitlines() if line.startswith("{")]


def lines(out: Path) -> list[str]:
    return out.read_text().splitlines() if out.exists() else []


def told(out: Path, after: int) -> list[list[Any]]:
    return [json.loads(line) for line in lines(out)[after:]]


CASES: dict[str, tuple[list[Any], dict[str, Any], list[Any]]] = {
    # the kill, the training, and the first event after the restart
    "in the middle of accumulation, with workers": (["batch", 13], {"accumulate": 3, "workers": 2}, ["batch", 11]),
    "in the middle of validation": (["val", 8], {"val_every": 0.5, "accumulate": 2}, ["val", 6]),
    "in an epoch, with a loader that knows": (["batch", 0], {"loader": "stateful"}, ["batch", 0]),
}


def test_killed_run_continues_exactly(tmp_path: Path) -> None:
    """SIGKILL at any point: losses, validations, metrics of each epoch and weights are equal."""
    step = random.Random(os.environ.get("CKPT_SEED")).randrange(2, 23)
    CASES["in an epoch, with a loader that knows"][0][1] = step
    # The previous batch was saved last; after the last batch of an epoch, a validation follows.
    CASES["in an epoch, with a loader that knows"][2][:] = ["val" if step % 8 == 0 else "batch", step]
    killed = {}
    for number, (name, (kill, spec, _)) in enumerate(CASES.items()):
        run, out = str(tmp_path / f"run{number}"), tmp_path / f"out{number}"
        killed[name] = start({"run": run, "out": str(out), "kill": kill, **spec}), run, out
    for name, (processes, run, out) in killed.items():
        end(processes, -signal.SIGKILL)
        seen, reference = len(lines(out)), f"{out}.reference"
        whole = toy.fit(out=reference, **CASES[name][1])
        again = toy.fit(run=run, out=str(out), **CASES[name][1])
        assert told(out, seen)[0][:2] == CASES[name][2], (name, step)
        assert toy.curve(str(out)) == toy.curve(reference), (name, step)
        assert (again["digest"], again["steps"]) == (whole["digest"], whole["steps"]), (name, step)


def test_killed_ranks_continue_together(tmp_path: Path) -> None:
    """Two ranks with DDP and FSDP2 (ModelParallelStrategy) are killed in an epoch: the same comparison."""
    runs: dict[str, dict[str, Any]] = {"ddp": {"accumulate": 2}, "fsdp2": {"persistent": True}}
    jobs: list[dict[str, Any]] = []
    killed = []
    for strategy, spec in runs.items():
        run, out = str(tmp_path / strategy), str(tmp_path / f"{strategy}.out")
        job = {"run": run, "out": out, "strategy": strategy, "devices": 2, **spec}
        killed.append(start({**job, "kill": ["batch", 11]}, ranks=2))
        jobs += [job, {**job, "run": None, "out": out + ".reference"}]
    for processes in killed:
        end(processes, -signal.SIGKILL)
    found = end(start({"jobs": jobs}, ranks=2), 0)
    for strategy, again, whole in zip(runs, found[::2], found[1::2], strict=True):
        assert again == whole, strategy
        said = tmp_path / f"{strategy}.out"
        for rank in ("", ".1"):
            assert toy.curve(f"{said}{rank}") == toy.curve(f"{said}.reference{rank}"), (strategy, rank)
        batches = [count for what, count, _ in told(said, 0) if what == "batch"]
        assert batches.count(9) == 1, f"{strategy} began anew"


def test_sigterm_saves_and_exits(tmp_path: Path) -> None:
    """Lightning ends after the batch, the exit code shows the signal, and the same script continues."""
    run, out = str(tmp_path / "run"), tmp_path / "out"
    end(start({"run": run, "out": str(out), "kill": ["term batch", 10]}), 128 + signal.SIGTERM)
    assert ckpt.load(run).step == 11, "the last step is on the disk"
    seen = len(lines(out))
    whole = toy.fit(out=f"{out}.reference")
    handler = signal.getsignal(signal.SIGTERM)
    again = toy.fit(run=run, out=str(out))
    assert signal.getsignal(signal.SIGTERM) is handler
    assert told(out, seen)[0][:2] == ["batch", 11]
    assert again["digest"] == whole["digest"] and toy.curve(str(out)) == toy.curve(f"{out}.reference")


def interrupted(kill: list[Any], **spec: Any) -> None:
    """Run a training in this process that ends with an exception."""
    with pytest.raises(RuntimeError, match="stop here"):
        toy.fit(kill=kill, **spec)


def test_best_checkpoints_by_metric_stay(tmp_path: Path) -> None:
    """The best by a logged metric stay with the weights of their step, also after interruptions. A validation that was
    interrupted is repeated, and does not belong to its step's checkpoint."""
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    places = [ckpt.Tier(run, every=1, keep=7)]  # steps of milliseconds leave time to mark one of them
    spec = {"run": places, "out": out, "epochs": 5, "callback": {"every": None, "monitor": "val_loss", "top_k": 2}}
    interrupted(["raise batch", 26], **spec)
    interrupted(["raise val", 2], **spec)  # the first of them belongs to step 32
    steps = [one.step for one in ckpt.Run(run).list()]
    found = toy.fit(**spec)["callback"]
    scores = {int(name[4:]): float.fromhex(value) for name, value in toy.curve(out).items() if name[:3] == "val"}
    expected = sorted(scores, key=lambda step: scores[step])[:2]
    assert len(scores) == 5 and [step for _, step in found._best.scores] == expected
    assert (found.best_step, found.best_score) == (expected[0], pytest.approx(scores[expected[0]]))
    for step in expected:
        assert ckpt.load(run, step=step).step == step
    again = [one.step for one in ckpt.Run(run).list()]
    assert steps[0] == 32 and len(set(steps)) == len(steps) and len(set(again)) == len(again)
    with pytest.raises(ckpt.errors.NoCheckpointError):
        ckpt.load(run, step=min(scores, key=lambda step: -scores[step]))
    model = toy.Model(toy.DEFAULTS)
    model.load_state_dict(found.best_model.all())
    assert toy.digest(model) == toy.digest(toy.fit(epochs=expected[0] // toy.BATCHES)["model"])


def test_changed_model_does_not_score_a_stored_step(tmp_path: Path) -> None:
    """With strict=False and a changed layer, the repeated validation of the restored step scores nothing, because the
    stored weights are others. Later steps are scored."""
    run, out = str(tmp_path / "run"), tmp_path / "out"
    callback = {"monitor": "val_loss", "top_k": 9}
    first = toy.fit(run=run, out=str(out), epochs=2, callback=callback)["callback"]._best.scores
    seen = len(lines(out))
    found = toy.fit(run=run, out=str(out), epochs=3, width=32, callback={**callback, "strict": False})
    assert told(out, seen)[0][:2] == ["val", 16] and told(out, seen)[0][2] not in {value.hex() for value, _ in first}
    scores = found["callback"]._best.scores
    assert sorted(step for _, step in scores) == [8, 16, 24] and set(first) < set(scores)


def test_other_callbacks_continue_exactly(tmp_path: Path) -> None:
    """EarlyStopping stops at the same step, and averaged weights (EMA) are equal, although their callback comes after
    ours and swaps weights in each validation."""
    for name, of in (("stopping", {"patience": 3, "epochs": 9}), ("average", {"epochs": 2})):

        def spec(of: dict[str, Any] = of, name: str = name) -> dict[str, Any]:
            return {**of, "more": [EMAWeightAveraging(decay=0.9)] if name == "average" else []}

        run, out = str(tmp_path / name), str(tmp_path / f"{name}.out")
        whole = toy.fit(out=f"{out}.reference", **spec())
        interrupted(["raise val", 4], run=run, out=out, **spec())
        again = toy.fit(run=run, out=out, **spec())
        assert (again["digest"], again["steps"]) == (whole["digest"], whole["steps"]), name
        assert toy.curve(out) == toy.curve(f"{out}.reference"), name
    assert whole["steps"] == 2 * toy.BATCHES


class Plateau(toy.Model):
    """Its schedule depends on a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.spec["monitor"]}}


def test_epoch_state_continues_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covered are schedules that use metrics, stopped in training or validation, batch counts that depend on the epoch,
    and stochastic weight averaging."""
    cases: dict[str, tuple[list[Any], dict[str, Any], type[toy.Model], Any]] = {
        "train_loss_epoch": (["raise batch", 13], {"epochs": 3}, Plateau, None),
        "val_loss": (["raise val", 5], {"epochs": 3}, Plateau, None),
        "accumulation": (["raise batch", 13], {}, toy.Model, lambda: GradientAccumulationScheduler({0: 1, 1: 3})),
        "averages": (
            ["raise batch", 11], {"epochs": 4}, toy.Model, lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=2),
        ),
    }  # fmt: skip
    for name, (kill, more, model, other) in cases.items():

        def spec(more: dict[str, Any] = more, name: str = name, other: Any = other) -> dict[str, Any]:
            return {**more, "monitor": name, "more": [] if other is None else [other()]}

        monkeypatch.setattr(toy, "Model", model)
        run, out = str(tmp_path / name), str(tmp_path / f"{name}.out")
        whole = toy.fit(out=f"{out}.reference", **spec())
        interrupted(kill, run=run, out=out, **spec())
        again = toy.fit(run=run, out=out, **spec())
        assert (again["digest"], again["steps"]) == (whole["digest"], whole["steps"]), name
        assert toy.curve(out) == toy.curve(f"{out}.reference"), name


def test_changed_accumulation_is_used_after_restart(tmp_path: Path) -> None:
    """A restart with another accumulate_grad_batches uses the new value."""
    run = str(tmp_path / "run")
    interrupted(["raise batch", 8], run=run)
    assert toy.fit(run=run, accumulate=2)["steps"] == 8 + 8


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Any:
    """Capture all messages that Lightning's users see."""
    logger = logging.getLogger("lightning.pytorch")
    logger.setLevel(logging.INFO)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_finished_run_trains_only_with_more_epochs(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    """It logs that; with more epochs it continues as if it had never ended. `max_steps` works the same."""
    run, out = str(tmp_path / "run"), tmp_path / "out"
    first = toy.fit(run=run, out=str(out), epochs=2)
    seen = len(lines(out))
    assert kept(f"file://{run}") == {16: END}
    again = toy.fit(run=run, out=str(out), epochs=2)
    assert "finished at step 16 (max_epochs=2)" in heard.text
    assert len(lines(out)) == seen and again["digest"] == first["digest"] and again["steps"] == 16
    whole = toy.fit(out=f"{out}.reference", epochs=3)
    heard.clear()
    more = toy.fit(run=run, out=str(out), epochs=3)
    assert "everystep continues at step 16 (from file://" in heard.text
    assert more["digest"] == whole["digest"] and toy.curve(str(out)) == toy.curve(f"{out}.reference")
    heard.clear()
    toy.fit(run=run, limits={"max_steps": 20}, epochs=None)
    assert "finished at step" in heard.text


def test_early_stopped_run_stays_finished(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    """After EarlyStopping within an epoch and accumulation, restarts do no work, and log the final step. With more
    patience, training continues as if it had it from the start."""
    run, out = str(tmp_path / "run"), tmp_path / "out"
    settings = {"val_every": 0.5, "accumulate": 3, "callback": {"monitor": "val_loss"}}
    first = toy.fit(run=run, out=str(out), patience=2, **settings)
    seen, saved = len(lines(out)), ckpt.Run(run).list()
    assert 0 < first["steps"] < 9
    for _ in range(2):
        again = toy.fit(run=run, out=str(out), patience=2, **settings)
        assert (again["digest"], again["steps"]) == (first["digest"], first["steps"])
        assert again["callback"].best_step == first["callback"].best_step
        assert len(lines(out)) == seen and ckpt.Run(run).list() == saved
        assert f"finished at step {first['steps']} (stopped early" in heard.text and "goes on" not in heard.text
    whole = toy.fit(out=f"{out}.reference", patience=4, **settings)
    more = toy.fit(run=run, out=str(out), patience=4, **settings)
    assert (more["digest"], more["steps"]) == (whole["digest"], whole["steps"])
    assert toy.curve(str(out)) == toy.curve(f"{out}.reference")


def test_mismatches_raise_errors_with_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second callback, another model, another start or a misspelt argument raises an error with the remedy."""
    run = str(tmp_path / "run")
    with pytest.raises(ckpt.errors.UsageError, match="two CheckpointCallbacks"):
        toy.fit(run=run, more=[CheckpointCallback(run)])
    interrupted(["raise batch", 9], run=run)
    with pytest.raises(ckpt.errors.MismatchError, match=r"model\.net\.0\.weight"):
        toy.fit(run=run, width=32)
    found = toy.fit(run=str(tmp_path / "copy"), epochs=1, more=[])
    found["trainer"].save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(ckpt.errors.UsageError, match="began without ckpt_path") as caught:
        toy.fit(run=run, ckpt_path=str(tmp_path / "other.ckpt"))
    frames = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1].endswith("trainer.py") and frames[-2] == toy.__file__ and "began without" not in caplog.text
    with pytest.raises(ckpt.errors.MismatchError, match=r"model\.more\.0\.weight"):
        toy.fit(run=run, extra=1)
    assert toy.fit(run=run, extra=1, callback={"strict": False})["steps"] == 24
    for word, hint in (
        ("on_bussy", r"options=ckpt\.Options\(on_busy="),
        ("save_top_k", "top_k="),
        ("every_n_train_steps", "every="),
    ):
        with pytest.raises(ckpt.errors.UsageError, match=f"unknown keyword {word}=: did you mean {hint}"):
            CheckpointCallback(run, **{word: 1})
    with pytest.raises(ckpt.errors.UsageError, match=r"unknown keyword dirpath=: did you mean the first argument"):
        CheckpointCallback(dirpath=run)
    with pytest.raises(ckpt.errors.UsageError, match="given as strings"):
        CheckpointCallback([ckpt.Tier(run)], every=5, memory=None)


def test_run_started_from_file_continues_itself(tmp_path: Path) -> None:
    """`ckpt_path` is its start; restarted by the same script, it continues from its own checkpoints."""
    whole = toy.fit(epochs=1)
    file = str(tmp_path / "begin.ckpt")
    whole["trainer"].save_checkpoint(file)
    spec = {"ckpt_path": file, "epochs": 3}
    reference = toy.fit(out=str(tmp_path / "reference"), **spec)
    interrupted(["raise batch", 20], run=str(tmp_path / "run"), out=str(tmp_path / "out"), **spec)
    again = toy.fit(run=str(tmp_path / "run"), out=str(tmp_path / "out"), **spec)
    assert again["digest"] == reference["digest"]
    assert toy.curve(str(tmp_path / "out")) == toy.curve(str(tmp_path / "reference"))


def test_negative_control_other_batches_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without returning to its batch, an interrupted run differs, so the comparisons above can fail."""
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    toy.fit(out=f"{out}.reference")
    interrupted(["raise batch", 11], run=run, out=out)
    monkeypatch.setattr(BatchFeed, "come_back", lambda self, fetcher: None)
    toy.fit(run=run, out=out)
    assert toy.curve(out) != toy.curve(f"{out}.reference")


class Odd(Callback):
    """Has a state that cannot be stored without pickle."""

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [object()]}


def test_checkpoint_io_stores_lightning_checkpoints(tmp_path: Path) -> None:
    """With CheckpointIO, ModelCheckpoint's files are runs: they load verified, can be deleted, and contain no pickle.
    An export equals the file that Lightning would have written."""
    folder = tmp_path / "files"
    saver = ModelCheckpoint(folder, save_top_k=2, monitor="val_loss", save_last=True)
    limits = {"plugins": [CheckpointIO()], "enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    toy.fit(more=[saver], limits=limits)
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 3 and "last.ckpt" in names
    last = CheckpointIO().load_checkpoint(folder / "last.ckpt")
    assert last["global_step"] == 24 and last["callbacks"] and last["optimizer_states"][0]["state"]
    ckpt.Run(str(folder / "last.ckpt")).export(tmp_path / "file.ckpt")
    loaded, weights = toy.Model.load_from_checkpoint(tmp_path / "file.ckpt", spec=toy.DEFAULTS), last["state_dict"]
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    assert torch.load(tmp_path / "file.ckpt", weights_only=True)["global_step"] == 24
    whole = toy.fit(epochs=4)
    again = toy.fit(epochs=4, ckpt_path=str(folder / "last.ckpt"), limits=limits)
    assert again["steps"] == whole["steps"] == 32
    for file in data_files((folder / "last.ckpt").resolve()):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    with pytest.raises(ckpt.errors.CorruptError):
        CheckpointIO().load_checkpoint(folder / "last.ckpt")
    CheckpointIO().remove_checkpoint(saver.best_model_path)
    assert not Path(saver.best_model_path).exists()
    with pytest.raises(ckpt.errors.StateError, match=r"callbacks\.Odd\.deep\.0"):
        toy.fit(epochs=1, more=[Odd(), ModelCheckpoint(folder / "odd")], limits=limits)
    assert isinstance(CheckpointIO(), pl.plugins.io.CheckpointIO) and isinstance(CheckpointCallback("x"), Callback)
    with pytest.raises(ckpt.errors.UsageError, match="not an everystep checkpoint"):
        CheckpointIO().remove_checkpoint(tmp_path)


def test_lightning_example_continues_after_kill(tmp_path: Path) -> None:
    """Killed and restarted, it prints the losses, weights and best step of an undisturbed run."""

    def run(name: str, *more: str) -> subprocess.Popen[str]:
        script, path = REPO / "examples" / "lightning_fit.py", f"{REPO}:{REPO / 'backends'}"
        command = [sys.executable, str(script), str(tmp_path / name), *more]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
        return start_python(command, env=environment, stdout=subprocess.PIPE, text=True)

    whole, killed = run("whole"), run("killed", "--kill-at", "70")
    before = killed.communicate(timeout=240)[0].splitlines()
    assert killed.returncode == -signal.SIGKILL
    after = run("killed").communicate(timeout=240)[0].splitlines()
    expected = whole.communicate(timeout=240)[0].splitlines()
    assert before[0] == expected[0] == "starts at step 0" and after[0] in ("starts at step 69", "starts at step 70")
    assert list(dict.fromkeys([*before, *after[1:]])) == expected and expected[-2].startswith("done: 192 steps")
