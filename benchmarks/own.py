"""Figures of everystep that have no peer. Run by `figures.py`; prints one JSON line per result.

    python benchmarks/own.py --folder DIR [--size full]

- `start`: the time from the first optimizer step until all memory is ready: a step is staged when the first slot is.
- `first save`: the training time of the first save, in step() and before the next update, and of later ones; in a tier,
  where the update waits for its copy, and in memory alone, where it may be skipped.
- `every step`: a training that saves every step to memory, compared with the same one without saves, in alternating
  blocks, so that other load affects both. `step()` blocks: all of them, for a 99th percentile.
- `alone`: staging and writing without training: bytes per second from `staged()` to `committed()`.
- `after death`: a new process restores from the memory of a killed one, and continues.
- `tensors`: the cost of a step per tensor, with 1,000 and 10,000 small ones.
- `fingerprint`: the cost for `step()` of sampling elements of 1,000 parameters and their moments, after an update.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn

import ckpt
from usage import Clock, shared
from workload import SIZES, Size, Training

BLOCK = 8  # steps with saves, and as many without
LEAST_SAVES = 208


def say(figure: str, **what: Any) -> None:
    print(json.dumps({"kind": "own", "figure": figure, **what}), flush=True)


def state_of(training: Training) -> dict[str, Any]:
    return {"model": training.model, "optim": training.optim}


def start(size: Size, folder: Path) -> None:
    """Measure from the end of the first optimizer step until a step is staged and the arena is complete."""
    training = Training.build(size)
    tiers = [ckpt.Tier(str(folder / "start"), every=10**6, keep=3)]
    with ckpt.Checkpointer(state_of(training), tiers) as checkpointer:
        checkpointer.restore(default=0)
        began = time.perf_counter()
        blocked: list[float] = []
        for step in range(1, 1000):
            before = time.perf_counter()
            save = checkpointer.step(step)
            blocked.append(time.perf_counter() - before)
            assert save is not None
            with contextlib.suppress(ckpt.errors.SkippedError):
                save.wait_staged(60.0)
                break
            training.step()
        while (arena := checkpointer._run.stager.arena) is not None and arena.ready < arena.slots:
            time.sleep(0.001)
        ready = time.perf_counter() - began
        slots = shared("ckpt-arena")
    say("start", ready_s=ready, skipped=step - 1, longest_block_s=max(blocked), arena_bytes=slots)


def first_save(mib: int, folder: Path, *, due: bool) -> None:
    """Open three times, with 0.1 s of other work before each step."""
    firsts: list[float] = []
    steps: list[float] = []
    others: list[float] = []
    model = nn.Sequential(*(nn.Linear(1024, mib * 2**20 // (8 * 12 * 1024), bias=False) for _ in range(8)))
    optim = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    for number in range(3):
        place = folder / f"first-{mib}-{due}-{number}"
        tiers = [ckpt.Tier(str(place), every=1 if due else 10**6, keep=2, compression="none")]
        with ckpt.Checkpointer({"model": model, "optim": optim}, tiers) as checkpointer:
            checkpointer.restore(default=0)
            for step in range(1, 9):
                time.sleep(0.1)
                optim.step()
                began = time.perf_counter()
                checkpointer.step(step)
                if step == 1:
                    steps.append(time.perf_counter() - began)
            checkpointer.wait(60.0)
            stalls = list(checkpointer.stats.stalls)
        firsts.append(stalls[0])
        others += stalls[1:]
        shutil.rmtree(place)
    say(
        "first save",
        mib=mib,
        due=due,
        first_step_s=statistics.median(steps),
        first_s=statistics.median(firsts),
        others_s=statistics.median(others),
    )


def every_step(size: Size, folder: Path) -> None:
    training = Training.build(size)
    tiers = [ckpt.Tier(str(folder / "every"), every=10**6, keep=3)]
    with_s: list[float] = []
    without_s: list[float] = []
    ratios: list[float] = []
    blocks: list[float] = []
    cpu: dict[str, list[float]] = {}
    with ckpt.Checkpointer(state_of(training), tiers) as checkpointer:
        checkpointer.restore(default=0)
        step = 1
        checkpointer.save(step).wait_durable(120.0)
        while len(blocks) < LEAST_SAVES:
            mine: list[float] = []
            others: list[float] = []
            clock = Clock.now()
            for _ in range(BLOCK):
                began = time.perf_counter()
                training.step()
                step += 1
                before = time.perf_counter()
                checkpointer.step(step)
                ended = time.perf_counter()
                blocks.append(ended - before)
                mine.append(ended - began)
            for who, used in Clock.now().since(clock).items():
                cpu.setdefault(who, []).append(used.total / BLOCK)
            training.step()  # waits for the last copy
            for _ in range(BLOCK):
                began = time.perf_counter()
                training.step()
                others.append(time.perf_counter() - began)
            with_s += mine
            without_s += others
            ratios.append(statistics.median(mine) / statistics.median(others))
    blocks.sort()
    say(
        "every step",
        saves=len(blocks),
        step_with_s=statistics.median(with_s),
        step_without_s=statistics.median(without_s),
        ratio=statistics.median(ratios),
        blocks_median_s=statistics.median(blocks),
        blocks_p99_s=blocks[int(len(blocks) * 0.99)],
        blocks_worst_s=blocks[-1],
        cpu_s_per_step={who: statistics.median(used) for who, used in cpu.items()},
    )


def alone(size: Size, folder: Path) -> None:
    """Measure the copy and the writer without training."""
    training = Training.build(size)
    tiers = [ckpt.Tier(str(folder / "alone"), every=10**6, keep=2)]
    staged, written, whole = [], [], []
    with ckpt.Checkpointer(state_of(training), tiers) as checkpointer:
        checkpointer.restore(default=0)
        checkpointer.save(1).wait_durable(120.0)
        for step in range(2, 8):
            training.step()
            time.sleep(2.0)  # for reading back and cleanup
            began = time.perf_counter()
            save = checkpointer.save(step)
            save.wait_staged(60.0)
            staged.append(time.perf_counter() - began)
            save.wait_durable(120.0)
            whole.append(time.perf_counter() - began)
            written.append(whole[-1] - staged[-1])
    say(
        "alone",
        nbytes=training.nbytes,
        staged_s=statistics.median(staged[1:]),
        written_s=statistics.median(written[1:]),
        durable_s=statistics.median(whole[1:]),
    )


def _victim(size: str, folder: str, pipe: Connection) -> None:
    training = Training.build(SIZES[size])
    checkpointer = ckpt.Checkpointer(state_of(training), ckpt.Tier(folder, every=10**6, keep=3))
    checkpointer.restore(default=0)
    checkpointer.save(1).wait_durable(120.0)
    training.step()
    checkpointer.save(2).wait_staged(60.0)
    pipe.send(training.digest())
    time.sleep(1000)


def _successor(size: str, folder: str, pipe: Connection) -> None:
    training = Training.build(SIZES[size], seed=1)
    training.spoil()
    gc.collect()
    began = time.perf_counter()
    checkpointer = ckpt.Checkpointer(state_of(training), ckpt.Tier(folder, every=10**6, keep=3))
    opened = time.perf_counter() - began
    step = checkpointer.restore()
    whole = time.perf_counter() - began
    last = checkpointer.last_restore
    assert last is not None
    pipe.send((opened, whole - opened, step, last.tier, last.verified, training.digest()))
    checkpointer.close()


def after_death(size: str, folder: Path) -> None:
    """Measure a new process after SIGKILL: opening, and restoring from the dead one's memory."""
    spawn = multiprocessing.get_context("spawn")
    for number in range(3):
        place = str(folder / f"death-{number}")
        here, there = spawn.Pipe()
        victim = spawn.Process(target=_victim, args=(size, place, there))
        victim.start()
        expected = here.recv()
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        successor = spawn.Process(target=_successor, args=(size, place, there))
        successor.start()
        opened, restored, step, tier, verified, digest = here.recv()
        successor.join()
        say(
            "after death",
            open_s=opened,
            restore_s=restored,
            tier=tier,
            verified=verified,
            equal=digest == expected and step == 2,
        )


def many_tensors(count: int, folder: Path) -> None:
    """Use parameters of 16 numbers each; two moments and a step count of each are tensors too."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(16)) for _ in range(count // 4)])
    optim = torch.optim.AdamW(model.parameters(), foreach=True)

    def update() -> None:
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optim.step()

    update()
    tiers = [ckpt.Tier(str(folder / f"tensors-{count}"), every=10**6, keep=3)]
    blocked, staged, committed, restored = [], [], [], []
    with ckpt.Checkpointer({"model": model, "optim": optim}, tiers) as checkpointer:
        checkpointer.restore(default=0)
        checkpointer.save(1).wait_durable(120.0)
        for step in range(2, 32):
            update()
            began = time.perf_counter()
            save = checkpointer.step(step)
            blocked.append(time.perf_counter() - began)
            assert save is not None
            save.wait_staged(60.0)
            staged.append(time.perf_counter() - began)
        for step in range(32, 37):
            update()
            began = time.perf_counter()
            checkpointer.save(step).wait_durable(120.0)
            committed.append(time.perf_counter() - began)
            began = time.perf_counter()
            checkpointer.restore()
            restored.append(time.perf_counter() - began)
    say(
        "tensors",
        count=count,
        blocks_s=statistics.median(blocked),
        staged_s=statistics.median(staged),
        committed_s=statistics.median(committed),
        restore_s=statistics.median(restored),
    )


def fingerprint(count: int, width: int) -> None:
    """Use parameters of `width` numbers under AdamW, which has just updated all of them."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(count)])
    optim = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    looks, blocked = [], []
    with ckpt.Checkpointer(
        {"model": model, "optim": optim}, triggers=(), options=ckpt.Options(name="fingerprint")
    ) as checkpointer:
        checkpointer.restore(default=0)
        optim.step()
        checkpointer.save(1).wait_staged(60.0)
        reading = checkpointer._run.capture.read()
        for step in range(2, 102):
            optim.step()
            began = time.perf_counter()
            for spots in reading.spots:
                spots.look()
            looks.append(time.perf_counter() - began)
            optim.step()
            began = time.perf_counter()
            save = checkpointer.step(step)
            blocked.append(time.perf_counter() - began)
            assert save is not None
            save.wait_staged(60.0)
    say(
        "fingerprint",
        parameters=count,
        tensors=len(reading.tensors),
        nbytes=reading.layout.arrangement.data_size,
        look_s=statistics.median(looks),
        look_best_s=min(looks),
        blocks_s=statistics.median(blocked),
        blocks_best_s=min(blocked),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--only", nargs="*", help="start, first, every, alone, death, tensors, fingerprint")
    arguments = parser.parse_args()
    size, folder = SIZES[arguments.size], arguments.folder
    work = {
        "start": lambda: start(size, folder),
        "first": lambda: [first_save(mib, folder, due=due) for mib in (256, 1024) for due in (True, False)],
        "every": lambda: every_step(size, folder),
        "alone": lambda: alone(size, folder),
        "death": lambda: after_death(arguments.size, folder),
        "tensors": lambda: [many_tensors(count, folder) for count in (1_000, 10_000)],
        "fingerprint": lambda: [fingerprint(1_000, width) for width in (16, 4_096)],
    }
    for name in arguments.only or work:
        work[name]()
        gc.collect()


if __name__ == "__main__":
    main()
