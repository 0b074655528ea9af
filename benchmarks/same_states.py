"""Run two versions of everystep on the same seeds, and compare the digest of every state that they restore.

    python benchmarks/same_states.py OTHER [--seeds N] [--first N] [--json FILE]

OTHER is a checkout of the other version, for example `git worktree add ../before main`. Both versions run the same jobs
(`same_states_job.py`: one process, seeded models, optimizers, dtypes and options; `torture_job.py`: FSDP2 on two ranks,
restored by three and by one). The jobs use only public names. Prints each difference. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_S = 180.0
SAVED_BY, RESTORED_BY, LAST = 2, (3, 1), 6  # ranks, and the step at which ranks stop
Lines = dict[str, str]


def environment(checkout: Path, folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(checkout), str(checkout / "backends")])
    names = folder / "sockets"
    names.mkdir(mode=0o700, exist_ok=True)
    return {**os.environ, "PYTHONPATH": paths, "CKPT_RUNTIME_DIR": str(names), "OMP_NUM_THREADS": "1"}


def run(words: list[object], checkout: Path, folder: Path, *, killed: bool = False) -> str:
    """Run Python with one version. Return its output; RuntimeError unless it ends as expected."""
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment(checkout, folder), cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if ended.returncode != (-9 if killed else 0):
        raise RuntimeError(f"{words} with {checkout} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return ended.stdout


def one_process(checkout: Path, seed: int, folder: Path) -> Lines:
    """Save and restore the run of a seed. Return the digest after each action."""
    job, found = HERE / "same_states_job.py", Lines()
    for phase in ("save", "restore"):
        out = run([job, phase, folder / "run", seed], checkout, folder, killed=phase == "save" and seed % 2 == 1)
        found |= dict(map(json.loads, out.splitlines()))
    return found


def several_ranks(checkout: Path, seed: int, folder: Path) -> Lines:
    """Save with some ranks and restore with others. Return the digest of each state."""
    found = Lines()
    for ranks in (SAVED_BY, *RESTORED_BY):
        journal = folder / f"journal{ranks}"
        job = [HERE / "torture_job.py", folder / "run", journal, "--salt", seed, "--keep", 100, "--linger", 0]
        steps = ["--steps", LAST] if ranks == SAVED_BY else ["--steps", LAST, "--at", LAST - 2]
        torchrun: list[object] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        run([*(torchrun if ranks > 1 else []), *job, *steps], checkout, folder)
        for line in map(json.loads, journal.read_text().splitlines()):
            if "digest" in line:
                what = "restored" if "restored" in line else "step"
                found[f"{what} {line[what]} on {ranks} ranks"] = line["digest"]
    return found


def differences(one: Lines, other: Lines) -> list[str]:
    """List the actions after which the states differ, or that only one version performed."""
    return [what for what in sorted(one.keys() | other.keys()) if one.get(what) != other.get(what)]


def inconsistent(found: Lines) -> list[str]:
    """List the restored steps of one process whose state is not the one that was trained."""
    restored = {what: what.split()[-1] for what in found if what.startswith("restored") and "ranks" not in what}
    return [what for what, step in restored.items() if found[what] != found.get(f"trained {step}")]


def compare(checkouts: tuple[Path, Path], seed: int, ranks: bool) -> tuple[list[str], int]:
    """Run a seed with both versions. Return what differs, and how many states were compared."""
    found: list[Lines] = []
    for checkout in checkouts:
        with tempfile.TemporaryDirectory() as folder:
            found.append((several_ranks if ranks else one_process)(checkout, seed, Path(folder)))
    wrong = [f"{what}, with {c}" for c, lines in zip(checkouts, found, strict=True) for what in inconsistent(lines)]
    return differences(*found) + wrong, len(found[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("other", type=Path)
    parser.add_argument("--this", type=Path, default=HERE.parent)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    checkouts, total, wrong = (given.this.resolve(), given.other.resolve()), 0, dict[str, Any]()
    for seed in range(given.first, given.first + given.seeds):
        for ranks in (False, True) if seed % 5 == 0 else (False,):
            name = f"seed {seed}{', ranks' if ranks else ''}"
            differing, count = compare(checkouts, seed, ranks)
            total += count
            print(f"{name}: {count} states, {len(differing)} differ", *differing, sep="\n  ", flush=True)
            if differing:
                wrong[name] = differing
    print(f"{total} states compared, differences in {len(wrong)} runs")
    if given.json:
        given.json.write_text(json.dumps({"checkouts": [*map(str, checkouts)], "states": total, "differing": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
