"""Time of commands at a prompt: `import ckpt`, and `ckpt ls` of a run with many checkpoints.

    python benchmarks/waits.py                        # a table
    python benchmarks/waits.py --checkpoints 200 --json

Each is a new process timed from outside, alternating with a bare `python -c pass`, which is listed too. The import time
is net of it. A Checkpointer makes the run: it saves a small state at every step and keeps all steps. Pages are cached,
as in a second call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

GOALS_S = {"import ckpt": 0.1, "ckpt ls": 0.5}


def seconds(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def make_run(folder: str, checkpoints: int) -> None:
    import torch

    import ckpt

    tier = ckpt.Tier(folder, every=1, keep=checkpoints)
    with ckpt.Checkpointer({"model": torch.nn.Linear(8, 8)}, tier, memory=None) as cp:
        for step in range(1, checkpoints + 1):
            cp.save(step).wait_durable()
            if step % 200 == 0:
                print(f"{step} of {checkpoints} checkpoints", file=sys.stderr)


def measure(checkpoints: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return medians and minima in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        make_run(folder, checkpoints)
        commands = {
            "python -c pass": ("-c", "pass"),
            "import ckpt": ("-c", "import ckpt"),
            "ckpt ls": ("-m", "ckpt", "ls", folder),
        }
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, arguments in commands.items():
                taken[name].append(seconds(*arguments))
    bare = statistics.median(taken["python -c pass"])
    taken["import ckpt"] = [max(0.0, one - bare) for one in taken["import ckpt"]]
    return {name: {"median": statistics.median(found), "best": min(found)} for name, found in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.checkpoints, options.rounds)
    if options.json:
        print(json.dumps({"checkpoints": options.checkpoints, "seconds": found}, indent=1))
        return 0
    for name, row in found.items():
        goal = f"goal: {GOALS_S[name]:g} s" if name in GOALS_S else ""
        print(f"{name:16} median {row['median']:.3f} s   quickest {row['best']:.3f} s   {goal}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
