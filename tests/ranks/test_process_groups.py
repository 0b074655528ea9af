"""Ranks agree independently of the process group: unusable, aborted or destroyed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
import toy
from parallel import free_port, launch, reports
from processes import PYTHONPATH

CALLS: list[str] = []


class StandIn(dist.ProcessGroup):
    """A backend whose collectives hang, like NCCL's after the death of a peer. Each call is recorded and fails."""

    def getBackendName(self) -> str:
        return "standin"

    def __getattribute__(self, name: str) -> Any:
        if name in ("allreduce", "allgather", "_allgather_base", "broadcast", "barrier", "gather", "scatter", "send"):
            CALLS.append(name)
            raise RuntimeError(f"{name}: this would hang")
        return super().__getattribute__(name)


def _make(store: Any, rank: int, size: int, timeout: Any) -> StandIn:
    return StandIn(rank, size)


def begin() -> None:
    """Create this rank's process group: of the stand-in, for tensors of any device."""
    dist.Backend.register_backend("standin", _make, devices=["cpu", "cuda"])
    dist.init_process_group("standin")


def save(root: str, end: str) -> dict[str, Any]:
    """Save steps 1 to 3 before the group ends in this way, and 4 to 6 afterwards."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(f"{root}/{end}", every=2)) as cp:
        start = cp.restore(default=0)
        for step in range(1, 4):
            toy.train_step(state)
            cp.step(step)
        if end == "aborted":
            dist.distributed_c10d._abort_process_group()  # type: ignore[attr-defined]
        elif end == "destroyed":
            dist.destroy_process_group()
        for step in range(4, 7):
            toy.train_step(state)
            cp.step(step)
        cp.save().wait_durable(60.0)
    if not dist.is_initialized():
        begin()  # as in a job that continues with other peers
    was, other = toy.digest(state), toy.build(seed=1)
    with ckpt.Checkpointer(other, ckpt.Tier(f"{root}/{end}", every=2)) as cp:
        back = cp.restore()
    return {"start": start, "back": back, "calls": CALLS, "exact": toy.digest(other) == was}


def main() -> None:
    torch.set_num_threads(1)
    begin()
    print(json.dumps({"mode": sys.argv[2], **save(sys.argv[1], sys.argv[2])}), flush=True)


@pytest.mark.parametrize("end", ["there", "aborted", "destroyed"])
def test_checkpointing_never_uses_process_group(tmp_path: Path, end: str) -> None:
    """Open, save, close, reopen and restore never use the group, whatever its state."""
    code = "import test_process_groups as t; t.main()"
    here = {"PYTHONPATH": f"{Path(__file__).parent}:{PYTHONPATH}"}
    said = reports(launch(2, code, tmp_path, end, port=free_port(), **here))[end]
    want = {"mode": end, "start": 0, "back": 6, "calls": [], "exact": True}
    assert said == [want, want]


def test_negative_control_stand_in_detects_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    group = StandIn(0, 1)
    monkeypatch.setitem(globals(), "CALLS", [])
    with pytest.raises(RuntimeError, match="would hang"):
        group.allreduce([torch.ones(1)])
    assert CALLS == ["allreduce"]
