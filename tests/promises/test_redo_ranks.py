"""Redo logs of several ranks: killed together, restored by any number of ranks, from one folder or one of each node."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
import parallel
from ckpt.cli.app import cli
from ckpt.ipc import channel
from ckpt.redo.frame import Frame
from ckpt.restore import redo_logs
from kills import Trainer
from model_disk import why_not
from parallel import free_port
from processes import eventually, writers

MODES = ("ddp", "fsdp")


def say(**words: object) -> None:
    """One whole line."""
    os.write(1, (json.dumps(words) + "\n").encode())


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{mode}/{name}": t for mode in MODES for name, t in parallel.gathered(part(state, mode)).items()}


def part(state: dict[str, Any], mode: str) -> dict[str, Any]:
    return {key.removeprefix(f"{mode}_"): one for key, one in state.items() if key.startswith(mode)}


def build() -> dict[str, Any]:
    """One model that all ranks hold alike and one that is divided among them."""
    state = {f"{mode}_{key}": one for mode in MODES for key, one in parallel.build(mode).items()}
    del state["ddp_rng"]
    return state


def main() -> None:
    """Restore and train; each step's gathered tensors go to `OUT/STEP.pt`, and what is restored is compared with it."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, state = dist.get_rank(), build()
    if settings.get("apart"):
        channel.node_id = lambda: f"node {rank}"
        os.environ["CKPT_RUNTIME_DIR"] += f"/{rank}"
    tier = ckpt.Tier(settings["run"], every=settings.get("every", 5), keep=2, log_every_step=True)
    with ckpt.Checkpointer(state, [ckpt.Memory(), tier]) as cp:
        start = cp.restore(default=0)
        done = cp.last_restore
        assert done is not None
        wrong = []
        if start:
            expected = torch.load(f"{settings['out']}/{start}.pt", weights_only=True)
            wrong = [name for name, t in whole(state).items() if not torch.equal(t, expected[name])]
        say(what="start", rank=rank, step=start, tier=done.tier, redone=done.redone, base=done.base_step, wrong=wrong)
        for step in range(start + 1, settings["steps"] + 1):
            for mode in MODES:
                parallel.train_step(mode, part(state, mode), step)
            found = whole(state)
            if rank == 0:
                torch.save(found, f"{settings['out']}/{step}.pt")
            save = cp.step(step)
            assert save is not None
            save.logged(60)
            say(what="logged", rank=rank, step=step)
        dist.barrier()
        say(what="hangs", rank=rank)
        signal.pause()
    os._exit(0)


# What a node has at a path is not there on the other: a disk of its own, which only this process and its children see.
APART = """
import ctypes, os, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "--bind", {disk!r}, {run!r}], check=True)
"""


class Job:
    """Some ranks on this machine, and what they said."""

    def __init__(self, world: int, **settings: Any) -> None:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        common |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self.ranks: list[Trainer] = []
        for rank in range(world):
            local = "0" if settings.get("apart") else str(rank)
            code = "import test_redo_ranks; test_redo_ranks.main()"
            if settings.get("apart"):
                code = APART.format(disk=f"{settings['run']}-{rank}", run=settings["run"]) + code
            self.ranks.append(Trainer(code, json.dumps(settings), RANK=str(rank), LOCAL_RANK=local, **common))

    def run(self, sockets: Path) -> list[dict[str, Any]]:
        """Until all have done everything; then all of them and their writers are gone for good. How each started."""
        said = [rank.read_until('{"what": "hangs"') for rank in self.ranks]
        for rank in self.ranks:
            rank.process.send_signal(signal.SIGSTOP)
        for process in writers(sockets):
            process.kill()
        for rank in self.ranks:
            rank.kill()
        assert eventually(lambda: not writers(sockets))
        lines = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]
        assert all(each and each[-1]["what"] == "hangs" for each in lines), said
        return [each[0] for each in lines]


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "out"
    folder.mkdir()
    yield folder


def cut(folder: Path, rank: int, after: int) -> None:
    """The log of a rank ends with this step, in the middle of the next."""
    frames = redo_logs.look(f"file://{folder}").frames[rank]
    one = next(stored for attempt, stored in frames.items() if attempt.step == after + 1)
    os.truncate(one.path, one.offset + one.size // 2)


def predictable(frame: Frame) -> set[str]:
    """Models of which every weight of two dimensions that this rank stages has its moments beside it."""
    tensors = frame.layout.tensors
    weights = {i: t.name.split(".")[0] for i, t in enumerate(tensors) if "_model." in t.name and len(t.shape) == 2}
    without = {name for i, name in weights.items() if i not in {recipe.weight for recipe in frame.recipes}}
    return set(weights.values()) - without


def exported(run: Path, to: Path, expected: dict[str, torch.Tensor]) -> None:
    """The command redoes the shares of all ranks, and makes one file of them."""
    assert cli.main(["restore", str(run), "--to", str(to)], standalone_mode=False) in (None, 0)
    found = torch.load(to, weights_only=True)
    for mode in MODES:
        weights = found[f"{mode}_model"]
        assert weights and all(torch.equal(t, expected[f"{mode}/{name}"]) for name, t in weights.items()), mode


def started(found: list[dict[str, Any]], step: int, redone: int) -> None:
    for one in found:
        assert one["step"] == step and one["wrong"] == [], one
    assert {one["redone"] for one in found} <= {redone, 0} and found[0]["redone"] == redone, found


def test_ranks_go_on_at_the_newest_step_that_all_logs_lead_to(tmp_path: Path, out: Path, own_sockets: Path) -> None:
    """Two ranks, under DDP and FSDP at once, killed with their writers: two, one and three ranks restore the last step
    that both have logged, bit for bit; and where one rank's log was cut shorter, the newest step of both."""
    run = tmp_path / "run"
    settings = {"out": str(out)}
    assert [one["step"] for one in Job(2, run=str(run), steps=13, **settings).run(own_sockets)] == [0, 0]
    for frames in redo_logs.look(f"file://{run}").frames.values():
        assert all(predictable(stored.frame) == {"ddp_model", "fsdp_model"} for stored in frames.values())
    for world in (2, 1, 3):
        shutil.copytree(run, tmp_path / f"by{world}")
        started(Job(world, run=str(tmp_path / f"by{world}"), steps=0, **settings).run(own_sockets), 13, 3)
    exported(run, tmp_path / "whole.pt", torch.load(out / "13.pt", weights_only=True))
    cut(run, 1, 11)
    shutil.copytree(run, tmp_path / "cut")
    started(Job(2, run=str(run), steps=15, **settings).run(own_sockets), 11, 1)
    started(Job(2, run=str(run), steps=15, **settings).run(own_sockets), 15, 0)


def test_nodes_with_folders_of_their_own(tmp_path: Path, out: Path, own_sockets: Path) -> None:
    """Each node logs what its rank saved: together they lead to a step, and neither does alone."""
    if reason := why_not("tmpfs"):
        pytest.skip(reason)
    (tmp_path / "run").mkdir()
    for rank in range(2):
        (own_sockets / str(rank)).mkdir(mode=0o700)
        (tmp_path / f"run-{rank}").mkdir()
    settings = {"run": str(tmp_path / "run"), "out": str(out), "apart": True}
    Job(2, steps=13, **settings).run(own_sockets)
    assert [sorted(redo_logs.look(f"file://{tmp_path}/run-{rank}").frames) for rank in range(2)] == [[0], [1]]
    cut(tmp_path / "run-1", 1, 12)
    started(Job(2, steps=12, **settings).run(own_sockets), 12, 2)
