"""torch's flight recorder shows what a rank waits for if its stack does not."""

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


def test_pending_collectives_are_listed_oldest_first() -> None:
    """In NCCL and gloo dumps, retired and completed entries have ended. Messages have separate numbers."""
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


def test_broken_dumps_raise_only_expected_errors() -> None:
    """A dump in another format raises only the three expected errors, and the report is written without it."""
    dice, intact = random.Random(1), dump({}, {"record_id": 8})
    for _ in range(500):
        broken = bytearray(intact)
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


def test_evidence_with_collectives_survives_a_round_trip() -> None:
    """It survives a round trip. Unprintable, oversized and invalid values are rejected."""
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
def need_the_result(handle):  # like .item() with NCCL: no frame of torch.distributed is on the stack
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
    else:  # rank 2 has a frame of torch.distributed on its stack
        dist.all_reduce(torch.ones(2))
    [fault] = faults
print(json.dumps({"mode": "hang", "suspects": fault.suspects, "summary": fault.summary}), flush=True)
"""


def test_flight_recorder_finds_the_missing_rank(tmp_path: Path) -> None:
    """Rank 0 waits for a result in its own code, rank 2 in the collective, and rank 1 never joins. All name rank 1."""
    reported = reports(launch(3, HANGS, tmp_path / "run", port=free_port()))["hang"]
    assert len(reported) == 3
    for one in reported:
        assert one["suspects"] == [1], one
        assert "Ranks 0, 2 wait in all_reduce" in one["summary"], one
        assert "(number " in one["summary"] and "default_pg" in one["summary"], one
        assert "load_batch" in one["summary"], one
