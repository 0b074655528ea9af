"""The example of a home-made ZeRO: killed, it goes on bit for bit; other numbers of ranks begin with the same bits."""

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
    """The ranks of the example, as torchrun would start them."""
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
    """What the first rank printed, by words; with `kill_after`, until all were killed when it had told of that step."""
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


def test_killed_it_goes_on_bit_for_bit_and_other_numbers_of_ranks_take_it_over(tmp_path: Path) -> None:
    """SIGKILL of both ranks at step 6 of 8, where the disk has step 5: losses and digests go on as if nothing had been.
    Then three ranks, and then one, begin with the digest of all weights and moments with which the last ones ended."""
    untouched = train(2, tmp_path / "untouched", STEPS)
    killed = train(2, tmp_path / "run", STEPS, kill_after=6)
    resumed = train(2, tmp_path / "run", STEPS)
    assert resumed[0][0] == "restored" and int(resumed[0][1]) in (5, 6, 7)
    at = int(resumed[0][1])
    assert resumed[0][2] == untouched[at][3]
    assert killed[1:7] == untouched[1:7] and resumed[1:] == untouched[at + 1 :]
    ended = resumed[-1][3]
    for world, steps in ((3, 9), (1, 10)):
        found = train(world, tmp_path / "run", steps)
        assert found[0] == ["restored", str(steps - 1), ended]
        ended = found[-1][3]
