"""Runs for the command line, and how tests call it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import inside
import toy
from processes import PYTHONPATH, REPO, eventually, start_python


def save(run: Path, state: dict[str, Any], steps: range, *, every: int = 2, **settings: Any) -> None:
    """A run that trains over `steps` and keeps every checkpoint."""
    with ckpt.Checkpointer(state, ckpt.Tier(str(run), every=every, keep=10, **settings)) as cp:
        cp.restore(default=0)
        for step in steps:
            if "optim" in state:
                toy.train_step(state)
            cp.step(step)


def save_increments(places: list[Path], steps: range, *, compression: str = "zstd", full_every: int = 10) -> None:
    """A run in several tiers, with tensors of each kind: frozen, partly trained in two precisions, noise."""
    draw = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {
        "frozen": torch.randn(400, 256, generator=draw),
        "master": torch.randn(64, 128, generator=draw),
        "rounded": torch.empty(64, 128, dtype=torch.bfloat16),
        "noise": torch.empty(64, 64),
        "tiny": torch.zeros(3),
    }
    tiers = [ckpt.Tier(str(p), every=1, keep=20, compression=compression, full_every=full_every) for p in places]
    with ckpt.Checkpointer(state, [*tiers]) as cp:
        cp.restore(default=0)
        for step in steps:
            state["master"][: 4 * step] *= 1 + 1e-6
            state["rounded"].copy_(state["master"])
            state["noise"].copy_(torch.randn(64, 64, generator=draw))
            state["tiny"] += 1
            save = cp.save(step)
            save.wait_durable(60.0, tier="all")


@pytest.fixture(scope="module")
def increments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with five checkpoints, the first two and the fifth full, the others increments."""
    folder = tmp_path_factory.mktemp("increments")
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(folder))
    save_increments([folder / "run"], range(1, 6), full_every=5)
    patch.undo()
    return folder / "run"


class Result:
    """The output and exit code of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        """One document, without the NaN that JSON does not know."""

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command in this process, on a terminal so wide that no line is wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")

    def run_command(*arguments: object) -> Result:
        code = inside.main([str(a) for a in arguments])
        return Result(code, *capsys.readouterr())

    return run_command


def run_here(*arguments: object) -> Result:
    """Run a command in this process, where no fixture can capture its output: in fixtures of modules, for example."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = inside.main([str(a) for a in arguments])
    return Result(code, out.getvalue(), err.getvalue())


def spawn(*arguments: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, as a shell would."""
    code = f"import sys\n{code}\nfrom ckpt.tools.cli import main\nstatus = main()\nsys.exit(status)"
    environment = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'backends'}"}
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)


def flip(path: Path, at: int) -> None:
    """Flip a bit of a byte in a file, in place. A negative position counts from the end."""
    path.chmod(0o600)
    with path.open("r+b", buffering=0) as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def stopped(point: str, *arguments: object, main: str = "ckpt.tools.cli") -> str:
    """Return the stderr of a command that gets SIGINT at this point. `main`: the module of its main()."""
    code = f"import sys\nfrom {main} import main\nsys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "CKPT_FAIL": f"{point.replace('@', ':stop:')}"}
    words = [sys.executable, "-c", code, *map(str, arguments)]
    with start_python(words, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        assert eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        said: str = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130 and "Traceback" not in said, said
    (line,) = (one for one in said.splitlines() if "fail point" not in one and "Waiting" not in one)
    return line
