"""A state for which memory has no room is still saved: scheduled steps are written while training waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import inside
from parallel import free_port, launch
from processes import PYTHONPATH, fake_meminfo

# Trains `steps` steps, and prints a digest of the state at the start and after each step.
SCRIPT = """
import hashlib, json, logging, sys, torch, ckpt
logging.basicConfig(level=logging.WARNING, format="%(message)s")
near, far, steps, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
torch.manual_seed(1)
net = torch.nn.Linear(2290, 2290)
optim = torch.optim.AdamW(net.parameters(), lr=1e-3)

def digest():
    found = hashlib.sha256()
    for name, tensor in sorted({**net.state_dict(), **{f"{k}.{n}": v for k, s in enumerate(optim.state.values())
                                                       for n, v in s.items()}}.items()):
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()

said = {}
tiers = [ckpt.Tier(near, every=2, keep=9), ckpt.Tier(far, every=4, keep=9)]
on_error = options.pop("on_error", "raise")
try:
    with ckpt.Checkpointer({"net": net, "optim": optim}, tiers, options=ckpt.Options(on_error=on_error)) as cp:
        start = cp.restore(default=0)
        print(json.dumps(["start", start, digest() if start else ""]), flush=True)
        for step in range(start + 1, steps + 1):
            torch.manual_seed(step)
            net(torch.randn(4, 2290)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            print(json.dumps([step, digest()]), flush=True)
            cp.step(step)
except ckpt.CheckpointError as error:
    print(json.dumps(["error", type(error).__name__, str(error)]), flush=True)
    raise
"""


class Trained:
    """What one start of the script has printed."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.log = done.returncode, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        self.start, self.restored = next(((line[1], line[2]) for line in lines if line[0] == "start"), (None, ""))
        self.digests = {line[0]: line[1] for line in lines if isinstance(line[0], int)}
        self.error = next((line[2] for line in lines if line[0] == "error"), "")


def train(folder: Path, steps: int, *, mib: int | None, fail: str = "", **options: Any) -> Trained:
    """Train in a new process. mib: the free memory that it finds, None for that of this machine."""
    words = [sys.executable, "-c", SCRIPT, str(folder / "near"), str(folder / "far"), str(steps), json.dumps(options)]
    before = [] if mib is None else fake_meminfo(folder, mib)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_WAIT_POLICY": "passive", "CKPT_FAIL": fail}
    return Trained(
        subprocess.run([*before, *words], env=environment, capture_output=True, text=True, timeout=180, check=False)
    )


def test_scheduled_steps_are_saved_bit_for_bit_if_no_snapshot_fits(tmp_path: Path) -> None:
    """Each tier gets its scheduled steps and the last one, and a start with or without room continues from it."""
    first = train(tmp_path, 7, mib=40)
    assert first.code == 0, first.log
    assert inside.steps_at(tmp_path / "near") == [7, 6, 4, 2] and inside.steps_at(tmp_path / "far") == [7, 4]
    assert first.log.count("while training waits") == 1, first.log
    assert [str(p) for tier in ("near", "far") for p in inside.problems_at(tmp_path / tier)] == []
    second = train(tmp_path, 9, mib=40)
    assert (second.start, second.restored) == (7, first.digests[7]), second.log
    third = train(tmp_path, 9, mib=None)
    assert (third.start, third.restored) == (9, second.digests[9]), third.log
    whole = ckpt.load(str(tmp_path / "far"), step=7)  # by another reader
    assert torch.isfinite(whole["net.weight"]).all()


def test_kill_during_a_direct_write_costs_only_that_step(tmp_path: Path) -> None:
    """The trainer is killed at each point of its second write of a life, and continues from the step before it."""
    start, digests = 0, {}
    for point in ("data_file.opened", "data_file.written", "data_file.synced", "manifest.stored"):
        killed = train(tmp_path, start + 7, mib=40, fail=f"trainer/{point}:kill:2")
        assert killed.code == -signal.SIGKILL, killed.log
        assert killed.start >= start and killed.restored == digests.get(killed.start, ""), killed.log
        digests |= killed.digests
        known = inside.steps_at(tmp_path / "near")
        assert start < known[0] <= max(killed.digests) and inside.problems_at(tmp_path / "near") == []
        start = known[0]
    again = train(tmp_path, start + 3, mib=40)
    assert again.start >= start and again.restored == digests[again.start] and again.code == 0, again.log
    assert inside.problems_at(tmp_path / "near") == []


def test_failed_direct_write_is_an_error_that_says_so(tmp_path: Path) -> None:
    """The disk fails at the second file. The error names step and tier, and no claim of memory is made."""
    found = train(tmp_path, 7, mib=40, fail="trainer/data_file.written:eio:2")
    assert found.code == 1 and "step 4 was not written to" in found.error, found.log
    assert "Memory has no room for it" in found.error and "still in memory" not in found.log
    assert inside.steps_at(tmp_path / "near")[-1] == 2
    warned = train(tmp_path, 9, mib=40, fail="trainer/data_file.written:eio:2", on_error="warn")
    assert warned.code == 0 and inside.steps_at(tmp_path / "near")[0] == 9, warned.log


# Trains where no snapshot fits, with slow reads of the live state, and prints what happens in the case that is named.
CASES = """
import json, logging, os, signal, sys, threading, time, torch, ckpt, inside
logging.basicConfig(level=logging.WARNING, format="%(message)s")
run, case = sys.argv[1:]
net = torch.nn.Linear(2290, 2290)
optim = torch.optim.SGD(net.parameters(), lr=0.0)
for parameter in net.parameters():
    parameter.grad = torch.zeros_like(parameter)
with torch.no_grad():
    net.weight.fill_(0)
state = {"net": net, "optim": optim, "note": (note := {"n": 0})}
options = ckpt.Options(busy_timeout_s=600, close_timeout_s=600)  # a hang outlasts the test
cp = ckpt.Checkpointer(state, ckpt.Tier(run, every=2, keep=9), triggers=None, options=options)
cp.restore(default=0)
optim.step()
cp.step(1)
optim.step()
found = {}

def checkpoint(name, call):
    try:
        found[name] = str(call())
    except BaseException as error:
        found[name] = type(error).__name__ + ": " + str(error)

def during_the_write(signals, handler=None):
    inside.read_live_state_slowly(0.5)
    if handler is not None:
        signal.signal(signal.SIGUSR1, lambda *_: checkpoint("handler", handler))
    for number, (delay_s, which) in enumerate(signals):
        threading.Timer(delay_s, os.kill, (os.getpid(), which)).start()

if case == "evaluated":
    checkpoint("durable", lambda: cp.step(2).wait_durable(30))
    note["n"] = 7  # as after an evaluation
    checkpoint("close", cp.close)
elif case == "interrupted":
    during_the_write([(0.4, signal.SIGINT)])
    checkpoint("step", lambda: cp.step(2))
    with torch.no_grad():
        net.weight.add_(1)
    time.sleep(3)
    print(json.dumps(found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
elif case == "saved":
    during_the_write([(0.5, signal.SIGUSR1)], lambda: cp.save().wait_durable(30).step)
    checkpoint("step", lambda: cp.step(2).wait_durable(30).step)
    checkpoint("close", cp.close)
elif case == "closed":
    during_the_write([(0.5, signal.SIGUSR1)], cp.close)
    checkpoint("step", lambda: cp.step(2).wait_durable(30).step)
elif case == "written":
    inside.read_live_state_slowly(0.3)
    stop = threading.Event()
    def write():
        with torch.no_grad():
            while not stop.is_set():
                net.weight.add_(1)
    thread = threading.Thread(target=write)
    thread.start()
    checkpoint("step", lambda: cp.step(2).wait_durable(30))
    stop.set()
    thread.join()
    checkpoint("close", cp.close)
print(json.dumps(found), flush=True)
"""


def case(folder: Path, name: str) -> dict[str, Any]:
    """Return what one of CASES has printed."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_WAIT_POLICY": "passive"}
    command = [*fake_meminfo(folder, 10), sys.executable, "-c", CASES, str(folder / "run"), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    return json.loads(lines[-1]) | {"log": done.stderr}


def test_durable_step_stays_if_close_would_save_other_values(tmp_path: Path) -> None:
    """Plain values have changed since step(), as in an evaluation. The step that was acknowledged is the last one."""
    found = case(tmp_path, "evaluated")
    assert found["close"] == "None" and found["durable"].startswith("Checkpoint(step=2"), found
    assert inside.steps_at(tmp_path / "run") == [2] and inside.problems_at(tmp_path / "run") == []


def test_interrupted_direct_write_stores_nothing_later(tmp_path: Path) -> None:
    """After Ctrl-C training goes on, and what it changes never becomes the interrupted step."""
    found = case(tmp_path, "interrupted")
    assert found["step"].startswith("KeyboardInterrupt"), found
    weight = torch.ones(2290, 2290)
    with ckpt.Checkpointer({"net": {"weight": weight}}, str(tmp_path / "run")) as cp:
        assert cp.restore(default=0, strict=False) == 0
    assert not list((tmp_path / "run").rglob("rank-*.json"))


@pytest.mark.parametrize("name", ["saved", "closed"])
def test_signal_handler_saves_or_closes_during_a_direct_write(tmp_path: Path, name: str) -> None:
    found = case(tmp_path, name)
    assert found["handler"] == {"saved": "2", "closed": "None"}[name], found
    assert inside.steps_at(tmp_path / "run") == [2], found
    assert "not saved" not in found["log"] and inside.problems_at(tmp_path / "run") == []


def test_state_that_another_thread_changes_is_not_saved_directly(tmp_path: Path) -> None:
    found = case(tmp_path, "written")
    assert "net.weight changed outside an optimizer step" in found["step"], found
    assert inside.steps_at(tmp_path / "run") == []


# Two ranks with replicated and own tensors. Prints the digest of what each rank has.
RANKS = """
import hashlib, json, os, sys, torch, torch.distributed as dist, ckpt
dist.init_process_group("gloo")
rank, run, steps = dist.get_rank(), sys.argv[1], int(sys.argv[2])
tiers = [ckpt.Tier(run, every=2, keep=9), ckpt.Tier(run + "-far", every=4, keep=9)]
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2290, 2290))
optim = torch.optim.AdamW(net.parameters(), lr=1e-3)
with ckpt.Checkpointer({"net": net, "optim": optim}, tiers) as cp:
    start = cp.restore(default=0)
    weight = lambda: hashlib.sha256(net.module.weight.detach().numpy().tobytes()).hexdigest()
    print(json.dumps(["start", start, weight()]), flush=True)
    for step in range(start + 1, steps + 1):
        torch.manual_seed(step + rank)
        net(torch.randn(4, 2290)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        cp.step(step)
    print(json.dumps([steps, weight()]), flush=True)
dist.destroy_process_group()
"""


def test_ranks_with_and_without_room_save_one_checkpoint(tmp_path: Path) -> None:
    short = fake_meminfo(tmp_path, 20)  # a rank stages half of what both hold
    python = tmp_path / "python"
    quoted = " ".join(f"'{word}'" for word in short)
    python.write_text(f"""#!/bin/sh
if [ "$RANK" = 1 ]; then exec {quoted} {sys.executable} "$@"; fi
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    run = tmp_path / "run"
    first = [Trained(done) for done in launch(2, RANKS, run, 5, port=free_port(), python=python)]
    assert [one.code for one in first] == [0, 0], first[0].log + first[1].log
    assert ["while training waits" in one.log for one in first] == [False, True], first[1].log
    assert inside.steps_at(run) == [5, 4, 2] and inside.steps_at(f"{run}-far") == [5, 4]
    again = [Trained(done) for done in launch(2, RANKS, run, 5, port=free_port())]
    assert [(one.start, one.restored) for one in again] == [(5, first[0].digests[5])] * 2
