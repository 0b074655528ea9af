"""What torch's flight recorder knows of a rank that waits, where its stack says nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ckpt.guard import look_around
from ckpt.guard.hang import Collective, Evidence
from parallel import free_port, launch, reports

ENTRY = {
    "record_id": 7, "retired": False, "state": "started", "is_p2p": False, "collective_seq_id": 57, "p2p_seq_id": 0,
    "profiling_name": "nccl:_all_gather_base", "process_group": ["1", "mesh_dp"],
}  # fmt: skip


def dump(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"version": "2.10", "entries": [{**ENTRY, **entry} for entry in entries]}).encode()


def test_what_has_not_ended_the_oldest_first() -> None:
    """As NCCL's and gloo's say it: what is retired or completed has ended; messages to one rank count by themselves."""
    text = dump(
        {"record_id": 9, "state": "scheduled", "is_p2p": True, "p2p_seq_id": 3, "profiling_name": "nccl:send 0->1"},
        {"record_id": 6, "retired": True},
        {"record_id": 5, "state": "completed"},
        {},
    )
    assert look_around.parse(text) == [
        Collective("all_gather_base", 57, "mesh_dp", "started"),
        Collective("send 0->1", 3, "mesh_dp", "scheduled"),
    ]


def test_a_recorder_that_says_something_else() -> None:
    """A report does without: nothing but the three errors that are said comes of any dump."""
    dice, sound = random.Random(1), dump({}, {"record_id": 8})
    for _ in range(500):
        broken = bytearray(sound)
        for _ in range(dice.randrange(1, 4)):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        try:
            found = look_around.parse(bytes(broken))
        except (ValueError, KeyError, TypeError):
            continue
        assert all(isinstance(one, Collective) for one in found)


def evidence(rank: int, **facts: Any) -> Evidence:
    usual: dict[str, Any] = {"host": "a", "pid": 10 + rank, "step": 4, "calls": 4, "idle_s": 60.0, "state": "sleeping"}
    return Evidence(**{**usual, "rank": rank, "cpu_s": 1.0, "written": 0, "received": 0, **facts})


def test_evidence_with_collectives_goes_over_the_wire() -> None:
    """Unchanged; and what is not printable, too much or of another kind is refused."""
    one = evidence(0, collective="all_reduce", pending=(Collective("all_reduce", 57, "default_pg", "started"),))
    assert Evidence.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert "pending" not in evidence(0).to_json()
    for pending in ([{"operation": "x"}], [None], "all", [{**one.to_json()["pending"][0], "group": "\x1b[2J"}]):
        with pytest.raises(ValueError):
            Evidence.from_json({**one.to_json(), "pending": pending})
    with pytest.raises(ValueError):
        Evidence.from_json({**one.to_json(), "pending": one.to_json()["pending"] * 1000})


HANGS = """
import json, sys, time, torch, torch.distributed as dist, toy, ckpt
dist.init_process_group("gloo")
rank, faults = dist.get_rank(), []
state = toy.build()
def load_batch():
    while not faults:
        time.sleep(0.02)
def need_the_result(handle):  # as .item() does where NCCL has it: no frame of torch.distributed is on the stack
    while not faults:
        time.sleep(0.02)
triggers = [ckpt.triggers.on_hang(min_s=1.0, factor=3.0)]
with ckpt.Checkpointer(state, sys.argv[1], triggers=triggers, options=ckpt.Options(on_fault=faults.append)) as cp:
    cp.restore(default=0)
    for step in range(1, 61):
        toy.train_step(state)
        dist.all_reduce(torch.ones(2))
        cp.step(step)
        time.sleep(0.02)
    if rank == 1:
        load_batch()
    if rank == 0:
        need_the_result(dist.all_reduce(torch.ones(2), async_op=True))
    else:
        dist.all_reduce(torch.ones(2))
    [fault] = faults
print(json.dumps({"mode": "hang", "suspects": fault.suspects, "summary": fault.summary}), flush=True)
"""


def test_ranks_whose_stacks_say_nothing(tmp_path: Path) -> None:
    """Two ranks; one waits for a result in code of its own, the other has not come: each of them says so."""
    said = reports(launch(2, HANGS, tmp_path / "run", port=free_port()))["hang"]
    assert len(said) == 2
    for one in said:
        assert one["suspects"] == [1], one
        assert "Rank 0 waits in all_reduce (number " in one["summary"] and "default_pg" in one["summary"], one
        assert "load_batch" in one["summary"], one
