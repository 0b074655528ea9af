"""Tests that the documents' Python runs unchanged, and that the tutorial works. See tests/test_docs.py."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt
from documents import PAGES, Block, blocks, commands_of, named, shell_lines
from processes import PYTHONPATH, REPO, eventually, run_python, start_python
from s3_server import MotoServer, environment

TUTORIAL = REPO / "docs" / "tutorial.md"
RUN = [one for page in PAGES for one in blocks(page) if one.language == "python" and not one.fragment and not one.title]


class Training:
    """Provides the names that readers of the documents have already; each block gets new ones."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.sched = torch.optim.lr_scheduler.LinearLR(self.optim)
        self.state = {"model": self.model, "optim": self.optim, "rng": ckpt.RNG(), "meta": {"losses": []}}

    def train_step(self, batch: torch.Tensor) -> None:
        self.optim.zero_grad()
        self.model(batch).square().mean().backward()
        self.optim.step()
        self.sched.step()

    def names(self) -> dict[str, Any]:
        flat, rows, count = torch.zeros(700), torch.zeros(10, 32), torch.zeros(())
        return {
            **vars(self),
            "ckpt": ckpt,
            "torch": torch,
            "train_step": self.train_step,
            "batches": (torch.randn(4, 8) for _ in itertools.count()),
            "dataset": torch.randn(32, 8),
            "steps": 20,
            "epochs": 2,
            "step": 1,
            "loss": torch.zeros(()),
            "evaluate": lambda: None,
            "validate": lambda: float(self.model(torch.ones(8)).square().mean()),
            "page": print,
            "flat": flat,
            "rows": rows,
            "count": count,
            "inner": torch.optim.SGD([nn.Parameter(flat), nn.Parameter(rows)]),
            "gather_weights": lambda: None,
        }


def a_run(url: str) -> None:
    """Create a run with one step of a training."""
    training = Training()
    with ckpt.Checkpointer({**training.state, "losses": []}, url) as cp:
        cp.restore(default=0)
        training.train_step(torch.randn(4, 8))
        cp.step(1)


def before(block: Block) -> None:
    """Create what the text around a block assumes."""
    for url in set(re.findall(r'ckpt\.load\("([^"@]+)', block.text)):
        a_run(url)
    for name, run in re.findall(r"# \$ ckpt import (\S+) (\S+) --step 3000", block.text):
        training = Training()
        saved = {"model": training.model.state_dict(), "optimizer": training.optim.state_dict(), "epoch": 3}
        torch.save({**saved, "rng": torch.get_rng_state()}, name)
        assert cli("import", name, run, "--step", "3000").returncode == 0


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python(
        [sys.executable, "-c", "import sys; from ckpt.tools.cli import main; sys.exit(main())", *words],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    with MotoServer() as found:
        yield found


@pytest.fixture
def at_home(server: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a temporary working directory, an empty s3://bucket, and no process group afterwards."""
    monkeypatch.chdir(tmp_path)
    server.reset()
    server.make_bucket("bucket")
    for name, value in environment(server.url).items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{named(block.page)}:{block.line}")
@pytest.mark.usefixtures("at_home")
def test_block_of_documents_runs(block: Block, tmp_path: Path) -> None:
    """It has a model, an optimizer and a bucket, with /nvme and /scratch in the test's folder."""
    before(block)
    code = compile(re.sub(r'"/(nvme|scratch)/', rf'"{tmp_path}/\1/', block.text), named(block.page), "exec")
    given = Training().names()
    if "process_group=" in block.text:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        given["apart"] = torch.distributed.new_group(backend="gloo")
        model, optim = get_state_dict(given["model"], given["optim"])
        given["state"] = {"model": model, "optim": optim}  # as for DCP
    if "cp" in code.co_names and not re.search(r"\bcp = |as cp:", block.text):
        given["cp"] = ckpt.Checkpointer(given["state"], "runs/given")
    try:
        exec(code, given)
        if "stop" in given:
            given["stop"]()
    finally:
        if "cp" in given:
            given["cp"].close()


def test_pages_with_python_are_found() -> None:
    """No block is missed: these pages have Python that runs."""
    assert {named(block.page) for block in RUN} >= {"docs/guide/state.md", "docs/guide/faults.md"}


# -- the tutorial --


def train(folder: Path, **settings: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "train.py"]
    settings["env"] = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    return start_python(words, cwd=folder, stdout=subprocess.PIPE, text=True, **settings)


def test_readme_script_continues_after_a_kill(tmp_path: Path) -> None:
    """The quick start as a file: killed with SIGKILL, it restarts at a step that it had reached."""
    script = next(block for block in blocks(REPO / "README.md") if block.title == "train.py")
    (tmp_path / "train.py").write_text(script.text)
    first = train(tmp_path)
    assert first.stdout is not None and first.stdout.readline() == "start at step 0\n"
    log = tmp_path / "runs" / "exp1" / "log"
    assert eventually(lambda: log.is_dir() and any('"COMMIT"' in one.read_text() for one in log.glob("*.json")), 120)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    second = train(tmp_path)
    assert second.stdout is not None
    started = second.stdout.readline()
    second.kill()
    second.wait()
    assert int(started.removeprefix("start at step ")) >= 100


def test_tutorial_script_and_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script is killed and continues with the losses and weights of a normal run. All its commands exit with 0."""
    script = next(block for block in blocks(TUTORIAL) if block.title == "train.py")
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script.text)
    alone = train(tmp_path / "whole")
    first = train(tmp_path / "killed")
    assert first.stdout is not None
    said = [first.stdout.readline() for _ in range(4)]
    assert said[0].endswith(" starts at step 0\n"), said
    assert said[3].startswith("step 300: loss "), said
    first.kill()
    assert first.wait() == -signal.SIGKILL
    second, _ = train(tmp_path / "killed").communicate(timeout=120)
    whole, _ = alone.communicate(timeout=120)
    start, *losses = second.splitlines()
    assert int(start.rpartition(" ")[2]) >= 299
    assert losses[-2:] == whole.splitlines()[-2:]
    runs = [ckpt.load(str(tmp_path / name / "runs" / "tutorial")) for name in ("killed", "whole")]
    assert [run.step for run in runs] == [3000, 3000]
    for name, tensor in runs[0].all().items():
        if name.startswith(("model", "optim")):  # numpy's random numbers are not seeded
            assert torch.equal(tensor, runs[1][name]), name
    monkeypatch.chdir(tmp_path / "killed")
    asked = [words for block in blocks(TUTORIAL) if block.language == "console" for words in commands(block)]
    assert len(asked) == 6
    for words in asked:
        ended = cli(*words)
        assert ended.returncode == 0, f"{words}: {ended.stderr}"


def commands(block: Block) -> list[list[str]]:
    """Return the `ckpt` commands in a block of the tutorial."""
    every = [words for line in shell_lines(block) for words in commands_of(line)]
    return [words[1:] for words in every if words[0] == "ckpt"]
