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
from processes import PYTHONPATH

STATE_MIB = 60  # of the scripts: weight and two moments

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


def fake_meminfo(folder: Path, mib: int) -> list[str]:
    """Return the beginning of a command line: what it runs finds so much free memory."""
    enter = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    meminfo = folder / f"meminfo-{mib}"
    meminfo.write_text(f"MemTotal: 9000000 kB\nMemAvailable: {mib << 10} kB\n")
    command = [*enter, "sh", "-c", 'mount --bind "$0" /proc/meminfo && exec "$@"', str(meminfo)]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount something over /proc/meminfo")
    return command


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


@pytest.mark.parametrize("point", ["pack.opened", "pack.written", "pack.synced", "part.stored"])
def test_kill_during_a_direct_write_costs_only_that_step(tmp_path: Path, point: str) -> None:
    killed = train(tmp_path, 7, mib=40, fail=f"trainer/{point}:kill:2")
    assert killed.code == -signal.SIGKILL, killed.log
    again = train(tmp_path, 7, mib=40)
    assert again.start in (2, 4) and again.restored == killed.digests[again.start], again.log
    assert again.code == 0 and inside.steps_at(tmp_path / "near")[:2] == [7, 6]
    assert inside.problems_at(tmp_path / "near") == []


def test_failed_direct_write_is_an_error_that_says_so(tmp_path: Path) -> None:
    """The disk fails at the second file. The error names step and tier, and no claim of memory is made."""
    found = train(tmp_path, 7, mib=40, fail="trainer/pack.written:eio:2")
    assert found.code == 1 and "step 4 was not written to" in found.error, found.log
    assert "Memory has no room for it" in found.error and "still in memory" not in found.log
    assert inside.steps_at(tmp_path / "near")[-1] == 2
    warned = train(tmp_path, 9, mib=40, fail="trainer/pack.written:eio:2", on_error="warn")
    assert warned.code == 0 and inside.steps_at(tmp_path / "near")[0] == 9, warned.log


# Two ranks with replicated and own tensors. Prints the digest of what each rank has.
RANKS = """
import hashlib, json, os, sys, torch, torch.distributed as dist, ckpt
dist.init_process_group("gloo")
rank, run, steps = dist.get_rank(), sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2290, 2290))
optim = torch.optim.AdamW(net.parameters(), lr=1e-3)
with ckpt.Checkpointer({"net": net, "optim": optim}, [ckpt.Tier(run, every=2, keep=9)]) as cp:
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
    assert inside.steps_at(run) == [5, 4, 2]
    again = [Trained(done) for done in launch(2, RANKS, run, 5, port=free_port())]
    assert [(one.start, one.restored) for one in again] == [(5, first[0].digests[5])] * 2
