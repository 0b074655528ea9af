"""Run logs in memory."""

from __future__ import annotations

from typing import Any

from ckpt.core.checkpoint import commits as commits
from ckpt.core.format.manifest import (
    CheckpointId,
    new_nonce,
)
from ckpt.core.log.records import Acquire, RunState, fold
from ckpt.core.log.run_log import RunLog
from ckpt.store import Store

DIGEST = "0" * 64


def checkpoint(term: int, step: int) -> CheckpointId:
    return CheckpointId(term, step, f"{term:08x}")


def record(kind: str, body: dict[str, Any], seq: int = 0, request: str = "") -> dict[str, Any]:
    return {"type": kind, "body": body, "id": request or f"{kind}:{seq}", "seq": seq}


def committed(of: CheckpointId) -> dict[str, Any]:
    body = {
        "checkpoint": str(of), "world": 1, "manifests": [[0, DIGEST]], "index": DIGEST, "finite": None, "reason": "due",
        "time": 0.0,
    }  # fmt: skip
    return record("COMMIT", body, request=f"commit:{of}")


def folded(*records: dict[str, Any]) -> RunState:
    state = RunState()
    for seq, one in enumerate(records):
        fold(state, {**one, "seq": seq})
    return state


async def new_log(store: Store) -> tuple[RunLog, Acquire]:
    await commits.create_run(store)
    log = RunLog(store)
    await log.open()
    return log, await commits.acquire(log, new_nonce())


async def reopened(store: Store) -> RunLog:
    log = RunLog(store)
    await log.open()
    return log
