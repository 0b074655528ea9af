"""Shared code of the trainer benchmarks: the ranks of a job, and the extra time of steps around a save."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RANKS = 2


def timed(work: Callable[[], object]) -> float:
    """Return the seconds from when all ranks begin until all have finished."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def lost(
    step: Callable[[], object], ways: dict[str, tuple[Callable[[], object], Callable[[], object]]], saves: int
) -> dict[str, float]:
    """Return median seconds of a step (`step_s`), the extra time of two steps with a save between them (`lost_`), and
    the call alone (`call_`), which other work disturbs less. Each way is a save and its cleanup; they alternate."""
    spent: dict[str, list[float]] = {name: [] for name in ("nothing", *ways)}
    calls: dict[str, list[float]] = {name: [] for name in ways}

    def called(name: str, save: Callable[[], object]) -> None:
        began = time.perf_counter()
        save()
        calls[name].append(time.perf_counter() - began)

    for _ in range(saves):
        # A copy overlaps the next step, so that step counts for the save that caused it.
        spent["nothing"].append(timed(lambda: (step(), step())))
        for name, (save, after) in ways.items():
            spent[name].append(timed(lambda one=(name, save): (step(), called(*one), step())))  # type: ignore[misc]
            after()
            os.sync()
    nothing = statistics.median(spent.pop("nothing"))
    more = {f"lost_{k}_s": statistics.median(v) - nothing for k, v in spent.items()}
    return {"step_s": nothing / 2, **more, **{f"call_{k}_s": statistics.median(v) for k, v in calls.items()}}


def options_of(description: str | None, **sizes: int | None) -> argparse.Namespace:
    """Parse the arguments of all these benchmarks. `sizes`: options of the trainer's model, with defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {**sizes, "saves": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="where to write checkpoints (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def words_of(options: argparse.Namespace) -> list[str]:
    """Return the sizes as arguments for the ranks."""
    return [f"--{name}={number}" for name, number in vars(options).items() if type(number) is int]


def end(row: dict[str, Any]) -> None:
    """End this rank; rank 0 prints the results before."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        print(json.dumps({"row": row}), flush=True)
    dist.barrier()
    os._exit(0)  # some threads of gloo do not end


def run_ranks(script: str, options: argparse.Namespace, **environ: str) -> dict[str, Any]:
    """Run `script` on all ranks with these sizes and --rank-of FOLDER, and return the argument of `end`.
    The environment of packages has the trainer's name: `script` is TRAINER_saves.py."""
    sys.path.insert(0, str(HERE))
    from environments import python_of

    trainer = Path(script).stem.removesuffix("_saves")
    python = python_of(trainer)
    place = tempfile.mkdtemp(prefix=f"{trainer}-saves-", dir=options.folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {
        **os.environ,
        "PYTHONPATH": ":".join(str(HERE.parent / one) for one in (".", "backends", "tests/lib")),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **environ,
    }
    try:
        ranks = [
            subprocess.Popen(
                [str(word) for word in (python, script, *words_of(options), "--rank-of", place)],
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(RANKS)
        ]
        said = [rank.communicate()[0] for rank in ranks]
        rows = [line for line in said[0].splitlines() if line.startswith('{"row"')]
        if not rows:
            sys.exit(said[0][-4000:])
        found: dict[str, Any] = json.loads(rows[0])["row"]
        return found
    finally:
        shutil.rmtree(place, ignore_errors=True)


def show(row: dict[str, Any], as_json: bool, what: str, names: dict[str, str]) -> None:
    """Print JSON or text. `names`: the ways of saving and restoring, by the end of their key."""
    if as_json:
        return print(json.dumps(row))
    print(f"{what}, {row['parameters'] / 1e6:.0f} million parameters, {RANKS} ranks, a step without a save", end=" ")
    print(f"{row['step_s']:.2f} s")
    for title, start in (("lost a save", "lost_"), ("in the call", "call_"), ("restore", "restore_")):
        found = (f"{name} {row[f'{start}{key}_s']:.3f} s" for key, name in names.items() if f"{start}{key}_s" in row)
        print(f"  {title:<12}" + ", ".join(found))
    return None
