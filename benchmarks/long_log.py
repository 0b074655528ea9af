"""Logs of very many records, written by the library's own functions: number of files and time to open.

A job that saves every step appends two records each time: COMMIT, and the PLAN that retires an old one. `make` folds
and seals them like a `RunLog`, without fsync, and retains the files that a `Trimmer` does.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt.core.checkpoint import commits as commits
from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import CheckpointId, data_key, index_key, manifest_key, new_format, read_format
from ckpt.core.log.records import KEPT_REQUESTS, SNAPSHOT_EVERY, Commit, Record, commit_body, fold, summary
from ckpt.core.log.run_log import RunLog, Trimmer, record_key
from ckpt.store import open_store
from ckpt_backends.memory import MemoryStore

KEEP, NONCE, OPENED = 3, "0badcafe", 7
WHOLE = 100_000  # records that are read from first to last


def spoken() -> Iterator[Record]:
    """Yield the records of such a job without end."""
    yield Record("ACQUIRE", {"term": 1, "nonce": NONCE, "restored": None}, f"acquire:{NONCE}")
    step = 0
    while True:
        step += 1
        checkpoint, base = CheckpointId(1, step, NONCE), CheckpointId(1, step - 1, NONCE)
        needs = (base,) if step % 10 != 1 else ()
        digest = f"{step:064x}"
        yield Record("COMMIT", commit_body(Commit(checkpoint, 1, ((0, digest),), digest, True, needs=needs)),
                     f"commit:{checkpoint}:0")  # fmt: skip
        if step > KEEP:
            old = CheckpointId(1, step - KEEP, NONCE)
            files = [data_key(old, 0), manifest_key(old, 0), index_key(old)]
            yield Record("PLAN", {"retire": [str(old)], "delete": files}, f"plan:{NONCE}:{step}")


class Made:
    """The folder of a log, trimmed as far as possible."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log, self.raws = RunLog(MemoryStore()), list[bytes]()
        self.first = 0  # index of the first of `raws`
        (root / "log").mkdir(parents=True)
        raw = new_format()
        (root / "FORMAT.json").write_bytes(raw)
        self.log.root = read_format(raw)

    def append(self, record: Record) -> None:
        state = self.log.state
        if state.next_seq and state.next_seq % SNAPSHOT_EVERY == 0 and record.type != "SNAPSHOT":
            self.append(Record("SNAPSHOT", summary(state), f"snapshot:{state.next_seq}"))
        raw = self.log._sealed(record, state)
        fold(state, {"type": record.type, "body": record.body, "id": record.id, "seq": state.next_seq})
        state.next_seq, state.last = state.next_seq + 1, file_digest(raw)
        self.raws.append(raw)
        if record.type == "SNAPSHOT":
            state.requests = {
                name: seq for name, seq in state.requests.items() if seq > state.next_seq - 2 * KEPT_REQUESTS
            }
            self.raws, self.first = self.raws[-SNAPSHOT_EVERY - 1 :], max(0, state.next_seq - 1 - SNAPSHOT_EVERY)

    def write(self) -> None:
        for seq, raw in enumerate(self.raws, self.first):
            (self.root / record_key(seq)).write_bytes(raw)


def make(root: Path, count: int) -> None:
    made = Made(root)
    for record in spoken():
        made.append(record)
        if made.log.state.next_seq >= count:
            break
    made.write()


def files_of(root: Path) -> dict[str, int]:
    """Return the number of files, their bytes and their disk usage."""
    found = [os.stat(path) for path in (root / "log").rglob("*") if path.is_file()]
    return {
        "files": len(found),
        "bytes": sum(one.st_size for one in found),
        "taken": sum(one.st_blocks for one in found) * 512,
    }


def opened(root: Path, *, whole: bool = False) -> float:
    """Return seconds until the log of an open store is read."""

    async def work() -> float:
        started = time.perf_counter()
        store = open_store(root)
        log = RunLog(store, whole=whole)
        await log.open()
        took = time.perf_counter() - started
        assert log.state.commits and not log.state.damaged
        await store.aclose()
        return took

    return asyncio.run(work())


def synthetic(root: Path, count: int) -> dict[str, Any]:
    make(root, count)
    first = opened(root)
    return {
        "records": count,
        **files_of(root),
        "first_s": first,
        "open_s": statistics.median(opened(root) for _ in range(OPENED)),
        "whole_s": opened(root, whole=True) if count <= WHOLE else None,
    }


def appended(root: Path, count: int, *, trimmed: bool) -> dict[str, Any]:
    """Measure a log with durable appends, record by record, with and without trimming."""

    async def work() -> tuple[float, float]:
        store = open_store(root, writable=True)
        await commits.create_run(store)
        log, trimmer, trimming_s = RunLog(store), Trimmer(), 0.0
        await log.open()
        mine, started = None, time.perf_counter()
        for record in spoken():
            state = await log.append(lambda _, record=record: record, owner=mine)
            mine = state.acquires[-1]
            if trimmed:
                before = time.perf_counter()
                await trimmer.step(log, mine)
                trimming_s += time.perf_counter() - before
            if state.next_seq >= count:
                break
        took = time.perf_counter() - started
        await store.aclose()
        return took, trimming_s

    took, trimming_s = asyncio.run(work())
    open_s = statistics.median(opened(root) for _ in range(OPENED))
    return {
        "records": count,
        "trimmed": trimmed,
        **files_of(root),
        "append_ms": 1000 * (took - trimming_s) / count,
        "trimming_ms": 1000 * trimming_s / count,
        "open_s": open_s,
    }
