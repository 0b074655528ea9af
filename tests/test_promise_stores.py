"""Where a run is kept: what stays there, who may read it, and which places are refused."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from conftest import eventually, killed, run_script

# -- who may read a run --

LIFE = """
import os, signal, sys
os.umask(int(sys.argv[2], 8))
import ckpt, toy
state = toy.build()
tiers = [ckpt.Memory(linger_s=0), ckpt.Tier(sys.argv[1], every=2, keep=2, log_every_step=True)]
with ckpt.Checkpointer(state, tiers, metrics=ckpt.Metrics(tensorboard=sys.argv[3])) as cp:
    cp.restore(default=0)
    for step in range(1, 12):
        toy.train_step(state)
        cp.step(step).staged(30)
        if step % 2 == 0:
            cp.save(step).committed(30)
    os.kill(os.getpid(), signal.SIGKILL)
"""
COMMAND = """
import os, sys
os.umask(int(sys.argv[1], 8))
sys.argv = ["ckpt", *sys.argv[2:]]
from ckpt.cli import main
main()
"""


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002, 0o077])
def test_a_run_is_as_readable_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    """Every file of a run has mode 0666 less the umask, every folder 0777: after commits, redo logs, retirement, a
    SIGKILL and what the writer then says about it; the folders above it, what is exported, and a report as well."""
    home = tmp_path / "team"
    run, text = home / "someone" / "run", f"{umask:o}"
    result = run_script(LIFE, run, text, home / "boards")
    assert killed(result), result.stderr
    assert eventually(lambda: any(run.glob("faults/*.json"))), "the writer tells what it saw"
    for words in (
        ["restore", run, "--to", home / "out" / "exp.safetensors"],
        ["restore", run, "--to", home / "out" / "other", "--format", "run"],
        ["report", run, "-o", home / "page.html"],
    ):
        result = run_script(COMMAND, text, *words)
        assert result.returncode == 0, result.stderr
    made = [home, *home.rglob("*")]
    kinds = {path.relative_to(home).parts[-2] for path in made[1:] if path.is_file() and run in path.parents}
    assert {"run", "log", "packs", "parts", "index", "redo", "faults", "ledger"} <= kinds
    wrong = {str(path): f"{mode:o}" for path in made if (mode := mode_of(path)) != usual(path) & ~umask}
    assert not wrong


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def usual(path: Path) -> int:
    return 0o777 if path.is_dir() else 0o666
