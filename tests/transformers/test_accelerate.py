"""The recipe for a custom loop with Accelerate: training that is killed and restarted ends like uninterrupted
training."""

from __future__ import annotations

import subprocess

import pytest

from parallel import free_port, launch
from processes import REPO, killed, run_script, warm

pytest.importorskip("accelerate")

SCRIPT = REPO / "examples" / "accelerate_loop.py"


def start(ranks: int, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Start the script on several ranks. One rank has no launcher."""
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    if ranks == 1:
        return [run_script(code, *arguments)]
    return launch(ranks, code, *arguments, port=free_port())


def lines(ended: list[subprocess.CompletedProcess[str]], beginning: str) -> list[str]:
    assert all(one.returncode == 0 for one in ended), ended
    return sorted(line for one in ended for line in one.stdout.splitlines() if line.startswith(beginning))


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_killed_accelerate_training_continues_exactly(run_dir: str, ranks: int) -> None:
    """All losses and weights equal those of an uninterrupted run, in the second epoch too."""
    with warm("accelerate"):
        ended = start(ranks, run_dir, "--kill-at", "17" if ranks == 2 else "29")
        assert all(one.returncode for one in ended) and any(map(killed, ended)), ended
        assert not any("rank 0" in one.stdout for one in ended), ended
        resumed = start(ranks, run_dir)
        assert int(lines(resumed, "starts at")[0].split()[-1]) in ((16, 17) if ranks == 2 else (28, 29))
        alone = start(ranks, f"{run_dir}-2")
    assert lines(resumed, "rank") == lines(alone, "rank")
    assert len(lines(resumed, "rank")) == ranks
