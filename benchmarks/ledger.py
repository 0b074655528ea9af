"""The cost of the ledger per step, and its deviation from a stopwatch.

    python benchmarks/ledger.py [--json FILE]

The training loop pays for one entry in shared memory, the writer for reading it, and for writing the ledger to the run
every ten seconds. Both are measured alone, since they are invisible during training: `beat` many times, and a
bookkeeper with as many steps.

The stopwatch is this process. It restarts a job with steps of equal length, which is killed, hangs, raises, gets
SIGTERM, and dies together with its writer. The job reports each step in one line. Lost time is all time from the first
step to the last that does not belong to a step that counts. It is compared with the result of `ckpt report`,
including its "other" (first steps, and the last one to the end).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "backends")]  # if not installed

from ckpt.core.checkpoint import lease
from ckpt.core.checkpoint.open_tier import open_place
from ckpt.core.ipc.heartbeat import Heartbeat
from ckpt.core.ipc.messages import Books, Introduce
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.tiers import Tier
from figures import goal, machine

STEPS = 200_000
BATCH = 100  # steps between two reads: half a second of steps of 5 ms
GOAL_S = 20e-6
STEP_S, STEPS_OF_A_JOB = 0.05, 70
FAULTS = ("SIGKILL", "raise", "hang", "SIGTERM", "both", "")
WITHIN = 0.02


def loop_s() -> float:
    """Return the seconds per step in the training loop."""
    heartbeat = Heartbeat.create()
    started = time.perf_counter()
    for step in range(STEPS):
        heartbeat.beat(step, 0.25, step, 0)
    return (time.perf_counter() - started) / STEPS


async def writer_s(folder: str) -> tuple[float, float, int]:
    """Return the writer's CPU time per step and per put of a full ledger, and the bytes of the latter."""
    place = await open_place(Tier(folder).spec())
    books = Bookkeeper(lambda: [place], lambda message: None)
    heartbeat, now = Heartbeat.create(), time.monotonic()
    books.begin(Introduce(place.url, 0, 1, 0, now, now), Books("1.ab", [], {}), os.dup(heartbeat.fd), os.getpid())
    books.look_by_hand()
    started = time.process_time()
    for step in range(STEPS):
        heartbeat.beat(step, 0.001 * step, step, 0)
        if step % BATCH == 0:
            books.look()
    fed = time.process_time() - started - STEPS * loop_s()
    assert books.account is not None
    rows = books.account.rows
    rows += [rows[0]] * (600 - len(rows))
    started = time.process_time()
    for _ in range(20):
        await place.log.store.put(books.account.key, books.account.to_bytes())
    put = (time.process_time() - started) / 20
    size = len(books.account.to_bytes())
    books.stop()
    await place.store.aclose()
    return fed / STEPS, put, size


def job(run: str, fault: str, steps: int) -> None:
    """Run one job attempt: `steps` steps, and then the fault."""
    import torch

    import ckpt

    model = torch.nn.Linear(256, 256)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    triggers = [
        ckpt.triggers.on_signal(),
        ckpt.triggers.on_exception(),
        ckpt.triggers.on_hang(action="exit", min_s=1.5),
    ]
    with ckpt.Checkpointer(
        state, ckpt.Tier(run, every=20, keep=3), triggers=triggers, memory=ckpt.Memory(every=3)
    ) as cp:
        start = cp.restore(default=0)
        tell("ready", start)
        for step in range(start + 1, start + steps + 1):
            end = time.monotonic() + STEP_S
            model(torch.randn(8, 256)).sum().backward()
            state["optim"].step()
            state["optim"].zero_grad()
            time.sleep(max(0.0, end - time.monotonic()))
            tell("step", step)
            cp.step(step)
        if fault == "raise":
            raise RuntimeError("as planned")
        if fault == "both":
            writers = [cp.writer_pid]
            time.sleep(0.6)  # so that the writer has read the last step
            for pid in writers:
                os.kill(pid, signal.SIGKILL)
        if fault in ("both", "SIGKILL", "SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL)
        if fault:
            time.sleep(60.0)  # a hang, or SIGTERM is being handled


def tell(what: str, step: int) -> None:
    os.write(1, f"{time.monotonic()} {what} {step}\n".encode())


def stopwatch(run: str) -> tuple[float, float]:
    """Return the seconds lost, by the stopwatch and by the ledger."""
    from ckpt.core.cadence.ledger import Account
    from ckpt.tools.observe.goodput.accounting import settled

    paths = os.pathsep.join([str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "backends")])
    stamps: list[tuple[float, str, int]] = []
    for fault in FAULTS:
        words = [sys.executable, __file__, "--job", run, fault]
        done = subprocess.run(
            words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120.0, check=False
        )
        for line in done.stdout.splitlines():
            at, what, step = line.split()
            stamps.append((float(at), what, int(step)))
    steps = [(at, step) for at, what, step in stamps if what == "step"]
    lengths = [b - a for (a, first), (b, second) in pairwise(steps) if second == first + 1]
    usual = statistics.median(lengths)
    wall = steps[-1][0] - stamps[0][0]
    lost = wall - usual * len({step for _, step in steps})
    accounts = [Account.from_bytes(path.read_bytes()) for path in Path(run, "ledger").iterdir()]
    found = settled(accounts).statement
    return lost, found.invalid_s + found.other_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", nargs=2, metavar=("RUN", "FAULT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        job(*asked.job, STEPS_OF_A_JOB)
        return
    loop = min(loop_s() for _ in range(5))
    with tempfile.TemporaryDirectory() as folder:
        fed, put, size = asyncio.run(writer_s(folder))
    share = put / lease.KEEP_S
    print(f"a step, in the training loop: {loop * 1e6:.2f} us; in the writer: {fed * 1e6:.2f} us of CPU")
    print(f"a put of the ledger, once in {lease.KEEP_S:g} s: {put * 1e3:.1f} ms of CPU, {share:.3%} of a core")
    print(f"a ledger, at the most: {size / 1000:.0f} kB")
    with tempfile.TemporaryDirectory() as folder:
        lost, said = stopwatch(f"{folder}/run")
    off = abs(said - lost) / lost
    asks = goal("the ledger, of a step", loop + fed, GOAL_S, "s")
    agrees = goal("invalid time, by the ledger and by a stopwatch", off, WITHIN, "")
    print(f"both together: {(loop + fed) * 1e6:.2f} us; at most {GOAL_S * 1e6:g}: {'met' if asks['met'] else 'missed'}")
    print(
        f"lost to {len(FAULTS) - 1} faults: {lost:.2f} s by the stopwatch, {said:.2f} s by the ledger, {off:.2%} off; ",
        end="",
    )
    print(f"at most {WITHIN:.0%}: {'met' if agrees['met'] else 'missed'}")
    if asked.json:
        facts = {
            "loop_s": loop,
            "writer_s": fed,
            "put_s": put,
            "bytes": size,
            "lost_s": lost,
            "ledger_s": said,
            "machine": machine(Path.cwd()),
        }
        found = {**facts, "goals": [asks, agrees]}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
