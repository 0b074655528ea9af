"""One writer process for each rank, compared with one writer for all ranks of a node.

    python benchmarks/writers.py [--ranks 8] [--mib 256] [--rounds 5] [--folder DIR]

The library starts a writer for each rank. A job of one rank that has the state of all ranks shows what a single writer
for the node could gain at best: it starts one process, and writes the same bytes to one data file. Both jobs run in
alternation. The line of each job has

    durable_s   from step() until the checkpoint is committed, on the slowest rank; median of the saves
    writer_mib  memory of all writers without the shared snapshots, when they are idle
    writer_cpu  CPU seconds of all writers for each save
    idle_cpu    CPU of all writers while no save is under way, in percent of one core
    opening_s   time to create the Checkpointer, on the slowest rank; median of the rounds
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SAVES = 5
IDLE_S = 4.0
WRITER = "ckpt-writer"

RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
import ckpt
folder, mib, saves, idle_s = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world > 1:
    dist.init_process_group("gloo")
own = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1 << 18)) for _ in range(int(mib))])
state = {f"rank{rank}": own}
began = time.monotonic()
cp = ckpt.Checkpointer(state, [ckpt.Tier(folder, every=1, compression="none")])
opening, times = time.monotonic() - began, []
def meet():
    if world > 1:
        dist.barrier()
for step in range(1, saves + 2):
    with torch.no_grad():
        for p in own:
            p.add_(1.0)
    meet()
    if step == 2:
        print(json.dumps("measured from here"), flush=True)
        sys.stdin.readline()
    began = time.monotonic()
    cp.step(step).wait_durable(120)
    times.append(time.monotonic() - began)
meet()
print(json.dumps({"opening_s": opening, "times": times[1:]}), flush=True)
sys.stdin.readline()
cp.close()
"""


def run(ranks: int, mib: float, folder: Path, port: int) -> dict[str, float]:
    """Run a job of this number of ranks, each with `mib` MiB of state, and return its figures."""
    shutil.rmtree(folder, ignore_errors=True)
    home = folder.parent / "home"
    common = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "CKPT_RUNTIME_DIR": str(home), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = [sys.executable, "-c", RANK, str(folder), str(mib), str(SAVES), str(IDLE_S)]
    jobs = [
        subprocess.Popen(
            words, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for job in jobs:
            _line(job)  # the first save, which makes the memory, is not measured
        writers = [p for p in psutil.process_iter() if _writes_to(p, folder)]
        assert len(writers) == ranks, f"{len(writers)} writers for {ranks} ranks"
        before = _cpu(writers)
        _go_on(jobs)
        found = [json.loads(_line(job)) for job in jobs]
        worked = _cpu(writers) - before
        began, before = time.monotonic(), _cpu(writers)
        time.sleep(IDLE_S)
        idle = (_cpu(writers) - before) / (time.monotonic() - began)
        memory = sum(p.memory_full_info().uss for p in writers) / 2**20
        _go_on(jobs)
        assert [job.wait(120) for job in jobs] == [0] * ranks
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    durable = [max(times) for times in zip(*(one["times"] for one in found), strict=True)]
    return {
        "durable_s": statistics.median(durable),
        "writer_mib": memory,
        "writer_cpu": worked / SAVES,
        "idle_cpu": 100 * idle,
        "opening_s": max(one["opening_s"] for one in found),
    }


def _writes_to(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.name() == WRITER and str(folder) in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


def _line(job: subprocess.Popen[str]) -> str:
    assert job.stdout is not None
    line = job.stdout.readline()
    assert line, f"a rank ended with exit code {job.wait(30)}"
    return line


def _go_on(jobs: list[subprocess.Popen[str]]) -> None:
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mib", type=int, default=256, help="size of the whole state, default 256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write, default: a temporary folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        rows: dict[int, list[dict[str, float]]] = {asked.ranks: [], 1: []}
        for n in range(asked.rounds):
            for at, ranks in enumerate(rows if n % 2 else reversed(rows)):
                rows[ranks].append(run(ranks, asked.mib / ranks, Path(folder) / "run", 29600 + 2 * n + at))
                print(f"round {n + 1} of {asked.rounds}, {ranks} writers: {rows[ranks][-1]}", file=sys.stderr)
    for ranks, found in rows.items():
        medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
        print(json.dumps({"writers": ranks, **{name: round(value, 3) for name, value in medians.items()}}))


if __name__ == "__main__":
    main()
