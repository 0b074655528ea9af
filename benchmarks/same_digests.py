"""Run two versions of everystep on the same seeds, and compare the digest of every state that they restore.

    python benchmarks/same_digests.py OLD [NEW] [--seeds 2] [--json FILE]

OLD and NEW are folders with a checkout, or revisions of this repository; NEW is this checkout by default. Each version
runs its own `benchmarks/torture_job.py`, so only the journal and the options of that script have to stay as they are.
For each seed and each kind of optimizer, a job trains and is continued:

  disk     from the newest checkpoint on disk
  memory   after SIGKILL, from the memory that the writer has kept
  earlier  from an earlier checkpoint, by its number
  1 rank, 3 ranks   from a checkpoint of two ranks (one kind of optimizer)

Training is deterministic, so both versions must restore the same steps with the same digests. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from torture import LIMIT_S, REPO, Job, Journal
from torture_job import VARIANTS

STEPS = 9

Found = dict[str, str]
"""By scenario: the step that was restored, and its digest; or how the job failed."""


@contextlib.contextmanager
def checkout(of: str) -> Iterator[Path]:
    """Yield a folder with this version. A revision gets a worktree for as long as it is needed."""
    if Path(of, "ckpt").is_dir():
        yield Path(of).resolve()
        return
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        subprocess.run(["git", "-C", REPO, "worktree", "add", "-q", "--detach", tree, of], check=True)
        try:
            for built in (REPO / "ckpt" / "format").glob("*.so"):  # the name contains a digest of its source
                shutil.copy(built, tree / "ckpt" / "format")
            yield tree
        finally:
            subprocess.run(["git", "-C", REPO, "worktree", "remove", "--force", tree], check=False)


def restored(tree: Path, run: Path, journal: Journal, *words: object, ranks: int = 1) -> str:
    """Start a job, and return what it continued from."""
    job = Job(str(run), journal.path, *words, ranks=ranks, repo=tree)
    code = job.wait(LIMIT_S)
    job.kill_all()
    journal.read()
    if code or (found := journal.restored) is None:
        return f"exit code {code}: {job.errors()[-300:]}"
    right = found["digest"] in journal.digests(found["restored"])
    return f"step {found['restored']} {found['digest']}{'' if right else ', which was never saved'}"


def run_all(tree: Path, seed: int, folder: Path) -> Found:
    """Run all scenarios of one seed with one version."""
    found: Found = {}
    for variant in VARIANTS:
        always = ("--variant", variant, "--salt", seed, "--every", 2)
        run, journal = folder / variant, Journal(folder / f"{variant}.journal")
        restored(tree, run, journal, *always, "--steps", STEPS, "--no-memory")
        copy = shutil.copytree(run, folder / f"{variant}-copy")
        found[f"{variant}, disk"] = restored(tree, run, journal, *always, "--steps", STEPS, "--no-memory")
        words = (*always, "--no-memory", "--at", STEPS // 2 // 2 * 2 + 2, "--steps", STEPS)
        found[f"{variant}, earlier"] = restored(tree, copy, journal, *words)
        run, journal = folder / f"{variant}-memory", Journal(folder / f"{variant}-memory.journal")
        Job(str(run), journal.path, *always, "--steps", STEPS, "--kill-at", STEPS - 2, repo=tree).wait(LIMIT_S)
        found[f"{variant}, memory"] = restored(tree, run, journal, *always, "--steps", STEPS)
    run, journal = folder / "ranks", Journal(folder / "ranks.journal")
    always = ("--salt", seed, "--every", 2, "--no-memory")
    restored(tree, run, journal, *always, "--steps", STEPS, ranks=2)
    for ranks in (1, 3):
        copy = shutil.copytree(run, folder / f"ranks-{ranks}")
        found[f"{ranks} rank{'s' * (ranks > 1)}"] = restored(
            tree, copy, journal, *always, "--steps", STEPS, ranks=ranks
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a checkout or a revision")
    parser.add_argument("new", nargs="?", default=str(REPO), help="the same; default: this checkout")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    given = parser.parse_args()
    console = Console()
    table = Table("seed", "scenario", "old", "new", "equal")
    found: list[tuple[int, Found, Found]] = []
    with checkout(given.old) as old, checkout(given.new) as new, tempfile.TemporaryDirectory() as place:
        for seed in range(1, given.seeds + 1):
            with console.status(f"seed {seed} of {given.seeds}"):
                both = [run_all(tree, seed, folder(place, seed, name)) for name, tree in (("old", old), ("new", new))]
            found.append((seed, both[0], both[1]))
    equal = True
    for seed, before, after in found:
        for scenario in sorted(before.keys() | after.keys()):
            one, other = before.get(scenario, ""), after.get(scenario, "")
            same = one == other and one.startswith("step ") and "never saved" not in one
            equal &= same
            table.add_row(str(seed), scenario, one, other, "yes" if same else "NO")
    console.print(table)
    if given.json:
        given.json.write_text(json.dumps([{"seed": s, "old": one, "new": other} for s, one, other in found], indent=1))
    return 0 if equal else 1


def folder(*parts: object) -> Path:
    path = Path(*map(str, parts))
    path.mkdir(parents=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
