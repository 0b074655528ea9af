"""The recipe for a loop of one's own with Accelerate: killed and started again, it ends as if it never had been."""

from __future__ import annotations

import subprocess

import pytest

from parallel import free_port, launch
from processes import REPO, killed, run_script, warm

pytest.importorskip("accelerate")

SCRIPT = REPO / "examples" / "accelerate_loop.py"


def start(ranks: int, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """The script as so many ranks: of one no launcher says that there is a world."""
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    if ranks == 1:
        return [run_script(code, *arguments)]
    return launch(ranks, code, *arguments, port=free_port())


def lines(ended: list[subprocess.CompletedProcess[str]], beginning: str) -> list[str]:
    assert all(one.returncode == 0 for one in ended), ended
    return sorted(line for one in ended for line in one.stdout.splitlines() if line.startswith(beginning))


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed(run_dir: str, ranks: int) -> None:
    """Every loss of every batch, and all weights, are those of a run that was not killed, in the second epoch too."""
    with warm("accelerate"):
        ended = start(ranks, run_dir, "--kill-at", "17" if ranks == 2 else "29")
        assert all(one.returncode for one in ended) and any(map(killed, ended)), ended
        assert not any("rank 0" in one.stdout for one in ended), ended
        resumed = start(ranks, run_dir)
        assert int(lines(resumed, "starts at")[0].split()[-1]) in ((16, 17) if ranks == 2 else (28, 29))
        alone = start(ranks, f"{run_dir}-2")
    assert lines(resumed, "rank") == lines(alone, "rank")
    assert len(lines(resumed, "rank")) == ranks
