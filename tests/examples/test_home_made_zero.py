"""The example of a home-made ZeRO continues after a kill bit for bit, on any number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from parallel import free_port
from processes import PYTHONPATH, REPO, start_python

STEPS = 8


def start(world: int, run: Path, steps: int) -> list[subprocess.Popen[str]]:
    """Start the ranks of the example, as torchrun would."""
    base = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",  # as torchrun does
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
    }
    words = [sys.executable, str(REPO / "examples" / "home_made_zero.py"), str(run), "--steps", str(steps)]
    return [
        start_python(words, env={**base, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(world)
    ]


def train(world: int, run: Path, steps: int, kill_after: int = 0) -> list[list[str]]:
    """Return the words that the first rank printed. `kill_after`: kill all ranks after this step is reported."""
    ranks = start(world, run, steps)
    found: list[list[str]] = []
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            found.append(line.split())
            if kill_after and found[-1][:2] == ["step", str(kill_after)]:
                for rank in ranks:
                    rank.send_signal(signal.SIGKILL)
        codes = [rank.wait(60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()
    assert codes == [-signal.SIGKILL if kill_after else 0] * world
    return found


def test_home_made_zero_continues_exactly_on_other_rank_numbers(tmp_path: Path) -> None:
    """Both ranks are killed at step 6 of 8, with step 5 on disk. Losses and digests match an uninterrupted run.

    Then three ranks begin with the final digest of all weights and moments."""
    untouched = train(2, tmp_path / "untouched", STEPS)
    killed = train(2, tmp_path / "run", STEPS, kill_after=6)
    resumed = train(2, tmp_path / "run", STEPS)
    assert resumed[0][0] == "restored" and int(resumed[0][1]) in (5, 6, 7)
    at = int(resumed[0][1])
    assert resumed[0][2] == untouched[at][3]
    assert killed[1:7] == untouched[1:7] and resumed[1:] == untouched[at + 1 :]
    assert train(3, tmp_path / "run", STEPS + 1)[0] == ["restored", str(STEPS), resumed[-1][3]]
