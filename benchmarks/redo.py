"""What a redo log takes and gives: bytes of a step, time of training, and how fast a restore redoes it.

    make bench-redo     or: python benchmarks/redo.py [--quick] [--part bytes time replay] [--json FILE]

  bytes   a small GPT that learns real text (benchmarks/states.py), in fp32 and in bf16 with fp32 masters: stored / raw
          bytes of a step, after a warm-up, without rebases (steps that are logged as a whole) and with them
  time    the training of benchmarks/workload.py, with nothing saved, every step in memory, every step in the redo log,
          and every step saved raw to the same folder; in turns, medians. What a step loses to each; and the CPU time
          that trainer and writer take for a step, which tells them apart on a busy machine, too
  replay  GB of state a CPU second of redoing what `bytes` has logged, one thread; and whether restores of a run
          whose `max_restore_s` is small stay within it

Every run is restored at its end, and compared bit for bit with the training that wrote it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

import ckpt
import states
import workload
from ckpt.checkpoint import read
from ckpt.restore import redo_logs, redo_source
from ckpt.subscribers import flush

GOALS = {"fp32": 0.30, "mixed": 0.26, "replay": 0.5}
WARM = 60  # steps that are trained before anything is counted: moments begin with zeros
SMALL_LIMIT_S = 0.5  # of a restore, in the run that is to be rebased often

Json = dict[str, Any]


@dataclass
class Logged:
    """What was said of each step."""

    stored: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    raw: int = 0

    def hear(self, event: ckpt.events.Event) -> None:
        said = event.to_json()
        if event.kind == "logged":
            self.stored.append(said["stored"])
            self.seconds.append(said["seconds"])
            self.raw = said["nbytes"]


@contextmanager
def listening() -> Iterator[Logged]:
    found = Logged()
    stop = ckpt.events.subscribe(found.hear)
    try:
        yield found
    finally:
        stop()


def build(kind: str, size: states.Size) -> tuple[states.Training, Json]:
    """A training, and its state for a Checkpointer."""
    torch.manual_seed(0)
    made = states.Mixed if kind == "mixed" else states.Training
    training = made(size, states.Gpt(size), states.adamw(size))
    state: Json = {"model": training.model, "optim": training.optimizers[0], "batches": training.batches.generator}
    if isinstance(training, states.Mixed):
        state["masters"] = training.masters
    return training, state


def tensors_of(training: states.Training) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in training.tensors().items()}


def steps_of(kind: str, size: states.Size, folder: Path, steps: int, limit_s: float) -> Json:
    """Train on, every step logged, end without a checkpoint of the last steps; restore, and compare."""
    training, state = build(kind, size)
    for _ in range(WARM):
        training.step()
    tier = ckpt.Tier(str(folder), every=10**6, keep=3, log_every_step=True, max_restore_s=limit_s)
    cp = ckpt.Checkpointer(state, [ckpt.Memory(linger_s=0), tier])
    cp.restore(default=0)
    with listening() as heard:
        cp.save(WARM).promoted()
        for step in range(WARM + 1, WARM + 1 + steps):
            training.step()
            save = cp.step(step)
            assert save is not None
            save.logged(600)
        flush()
    wanted = tensors_of(training)
    kept = folder.with_name(folder.name + "-logs")
    shutil.copytree(folder, kept)  # as a machine would have left it: without what closing saves
    cp.close()
    other, fresh = build(kind, size)
    with ckpt.Checkpointer(fresh, [ckpt.Memory(linger_s=0), ckpt.Tier(str(kept), every=10**6)]) as again:
        restored = again.restore()
        result = again.last_restore
    found = other.tensors()
    equal = restored == WARM + steps and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert result is not None
    with_base = heard.stored[1:] if limit_s > 100 else heard.stored
    return {
        "raw": heard.raw,
        "share": statistics.mean(with_base) / heard.raw,
        "seconds": statistics.median(heard.seconds[1:]),
        "restored": equal,
        "redone": result.redone,
        "restore_s": result.seconds,
        "folder": str(kept),
    }


def bytes_part(size: states.Size, steps: int, scratch: Path, say: Callable[[str], None]) -> Json:
    found: Json = {}
    for kind in ("fp32", "mixed"):
        say(f"bytes of a step, {kind}")
        found[kind] = steps_of(kind, size, scratch / kind, steps, 10_000.0)
        found[f"{kind}, rebased"] = steps_of(kind, size, scratch / f"{kind}-rebased", steps, SMALL_LIMIT_S)
    return found


def replay_part(folder: str, say: Callable[[str], None]) -> Json:
    """Redo the whole log with one thread."""
    say("replay")
    url = Path(folder).as_uri()
    log = read.run(read.open_run(url))
    logs = redo_logs.look(url)
    commits = {**log.state.held, **log.state.commits}
    attempt = max(logs.frames[0], key=lambda one: (one.epoch, one.step))
    chain = logs.chains(0, attempt, commits)[0]
    threads, redo_source.THREADS = redo_source.THREADS, 1
    try:
        taken = {}
        for count in (1, len(chain.frames)):
            seconds = []
            for _ in range(3):
                began = time.process_time()
                made = redo_source.redo(url, replace(chain, frames=chain.frames[:count]))
                seconds.append(time.process_time() - began)
                made.arena.close()
            taken[count] = min(seconds)
    finally:
        redo_source.THREADS = threads
    nbytes, steps = made.layout.arrangement.data_size, len(chain.frames) - 1
    rate = nbytes * steps / (taken[len(chain.frames)] - taken[1]) / 1e9
    return {"steps": steps, "raw": nbytes, "gb_a_second": rate}


def cpu_s() -> float:
    """Of this process and its writer so far."""
    found = time.process_time()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(os.environ["CKPT_RUNTIME_DIR"] in word for word in process.cmdline()):
                times = process.cpu_times()
                found += times.user + times.system
    return found


def train(mode: str, size: workload.Size, folder: Path, steps: int) -> Json:
    """Seconds of a step of a training that saves in one of the ways, and CPU seconds."""
    training = workload.Training.build(size)
    memory = ckpt.Memory(linger_s=0)
    tiers: list[Any] = {
        "nothing": [],
        "memory": [memory],
        "redo log": [memory, ckpt.Tier(str(folder), every=10**6, keep=3, log_every_step=True)],
        "raw": [memory, ckpt.Tier(str(folder), every=1, keep=2, compression="none", incremental=False)],
    }[mode]
    taken: list[float] = []
    cp = ckpt.Checkpointer({"model": training.model, "optim": training.optim}, tiers, name="bench") if tiers else None
    if cp is not None:
        cp.restore(default=0)
        cp.save(0).staged()
    warm, before = steps // 3, 0.0
    for step in range(1, steps + 1):
        if step == warm + 1:
            before = cpu_s()
        began = time.perf_counter()
        training.step()
        if cp is not None:
            cp.step(step)
        taken.append(time.perf_counter() - began)
    worked = cpu_s() - before
    if cp is not None:
        cp.close()
    return {"step_s": statistics.mean(taken[warm:]), "cpu_s": worked / (steps - warm)}


def time_part(size: str, steps: int, rounds: int, scratch: Path, say: Callable[[str], None]) -> Json:
    taken: dict[str, list[Json]] = {}
    load = os.getloadavg()[0]
    for number in range(rounds):
        for mode in ("nothing", "memory", "redo log", "raw"):
            say(f"training, {mode}, round {number + 1} of {rounds}")
            folder = scratch / f"time-{mode.replace(' ', '-')}-{number}"
            # A process of its own, whose memory is gone when it ends.
            command = [sys.executable, __file__, "--train", mode, str(folder), size, str(steps)]
            with tempfile.TemporaryDirectory(prefix="redo-") as sockets:
                environment = {**os.environ, "CKPT_RUNTIME_DIR": sockets}
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
            taken.setdefault(mode, []).append(json.loads(done.stdout))
            shutil.rmtree(folder, ignore_errors=True)
    rounds_s = {mode: [one["step_s"] for one in found] for mode, found in taken.items()}
    medians = {mode: statistics.median(found) for mode, found in rounds_s.items()}
    lost = {mode: seconds - medians["nothing"] for mode, seconds in medians.items() if mode != "nothing"}
    cpu = {mode: statistics.median(one["cpu_s"] for one in found) for mode, found in taken.items()}
    found: Json = {"step_s": medians, "rounds_s": rounds_s, "lost_s": lost, "cpu_s": cpu}
    return {**found, "load": load, "log_against_raw": lost["redo log"] / max(1e-9, lost["raw"])}


def show(found: Json) -> None:
    console = Console()
    if "bytes" in found:
        table = Table("redo log of", "stored / raw a step", "goal", "encoded in", "steps redone", "restore", "equal")
        for kind, row in found["bytes"].items():
            goal = f"{GOALS[kind]:.2f}" if kind in GOALS else ""
            table.add_row(
                kind, f"{row['share']:.3f}", goal, f"{row['seconds']:.2f} s", str(row["redone"]),
                f"{row['restore_s']:.2f} s", "yes" if row["restored"] else "NO",
            )  # fmt: skip
        console.print(table)
    if "replay" in found:
        row = found["replay"]
        console.print(
            f"replay: {row['gb_a_second']:.2f} GB of state a second and core, {row['steps']} steps (goal: 0.5)"
        )
    if "time" in found:
        table = Table("every step", "step", "lost a step", "/ raw", "CPU time")
        lost = found["time"]["lost_s"]
        for mode, seconds in found["time"]["step_s"].items():
            more = ["", ""] if mode == "nothing" else [f"{lost[mode]:.3f} s", f"{lost[mode] / lost['raw']:.2f} x"]
            table.add_row(mode, f"{seconds:.3f} s", *more, f"{found['time']['cpu_s'][mode]:.2f} s")
        console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("bytes", "time", "replay"), default=["bytes", "time", "replay"])
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--json", metavar="FILE", help="where to write what was measured")
    parser.add_argument("--train", nargs=4, metavar=("MODE", "FOLDER", "SIZE", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        mode, folder, size_name, steps = options.train
        print(json.dumps(train(mode, workload.SIZES[size_name], Path(folder), int(steps))))
        return 0
    quick = options.quick

    def say(text: str) -> None:
        print(f"[{text}]", file=sys.stderr, flush=True)

    found: Json = {"machine": {"cores": workload.THREADS, "cpu": platform.machine(), "torch": torch.__version__}}
    with tempfile.TemporaryDirectory(prefix="ckpt-redo-") as name:
        scratch = Path(name)
        if "bytes" in options.part or "replay" in options.part:
            size = states.QUICK if quick else states.FULL
            found["bytes"] = bytes_part(size, 6 if quick else 24, scratch, say)
            found["replay"] = replay_part(found["bytes"]["fp32"]["folder"], say)
            for row in found["bytes"].values():
                del row["folder"]
        if "time" in options.part:
            found["time"] = time_part("small" if quick else "full", 6 if quick else 15, 1 if quick else 3, scratch, say)
    show(found)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row["restored"] for row in found.get("bytes", {}).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
