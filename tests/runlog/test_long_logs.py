"""Tests of a long log that the writer trims during training: kills during that, and a delayed writer."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import stranger
import toy
from ckpt.core.checkpoint import commits as commits
from ckpt.core.checkpoint import read
from ckpt.core.format.manifest import CheckpointId, new_nonce
from ckpt.core.log.records import SNAPSHOT_EVERY, Acquire, Record, summary
from ckpt.core.log.run_log import RunLog, Trimmer, record_key
from ckpt.store import open_store
from ckpt_backends.memory import MemoryStore
from kills import STEPS, Chain, Told, Trainer, problems
from processes import eventually, writers


async def talk(log: RunLog, mine: Acquire, until: int, trimmer: Trimmer | None = None) -> None:
    """Append records without effect."""
    body = {"checkpoint": str(CheckpointId(mine.term, 1, mine.nonce)), "note": "", "keep": False}
    while log.state.next_seq < until:
        await log.append(lambda state: Record("KEEP", body, f"said:{mine.nonce}:{state.next_seq}"), owner=mine)
        if trimmer is not None:
            await trimmer.step(log, mine)


def long_run(folder: str, count: int) -> None:
    """Create a run whose log has this many records, none deleted."""

    async def grown() -> dict[str, bytes]:
        store = MemoryStore()
        await commits.create_run(store)
        log = RunLog(store)
        await log.open()
        await talk(log, await commits.acquire(log, new_nonce()), count)
        return store.objects

    for key, raw in asyncio.run(grown()).items():
        path = Path(folder, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def whole(folder: str) -> RunLog:
    async def look() -> RunLog:
        log = RunLog(open_store(folder), whole=True)
        await log.open()
        await log.store.aclose()
        return log

    return read.run(look())


def numbers(folder: str) -> list[int]:
    return sorted(int(path.stem) for path in Path(folder, "log").glob("*.json"))


def test_writer_killed_while_trimming_loses_no_record(run_dir: str, own_sockets: Path) -> None:
    """Half of the old records are deleted: the next writer deletes the rest, training is unaffected, and no valid
    record is lost. A reader written from docs/format.md alone can read the run."""
    long_run(run_dir, 3 * SNAPSHOT_EVERY + SNAPSHOT_EVERY - 10)
    before = whole(run_dir).state
    chain = Chain(run_dir, Told())
    result = chain.train("writer/log.trimming:kill:1")
    assert result.returncode == 0, result.stderr
    assert chain.told.replaced, result.stderr
    assert chain.told.digest == toy.reference(STEPS)
    assert problems(run_dir) == []
    assert eventually(lambda: not writers(own_sockets))
    state = whole(run_dir).state
    assert not state.damaged and state.next_seq > before.next_seq
    chain.train(steps=STEPS + 3)
    assert eventually(lambda: not writers(own_sockets))
    newest = (whole(run_dir).state.next_seq - 1) // SNAPSHOT_EVERY * SNAPSHOT_EVERY
    assert numbers(run_dir)[0] == newest - SNAPSHOT_EVERY, "nothing was deleted"
    checkpoint = next(of for of in whole(run_dir).state.commits if of.step == STEPS + 3)
    assert stranger.newest(Path(run_dir))["checkpoint"] == str(checkpoint)


SAVE = """
import sys
import ckpt, toy

state = toy.build()
cp = ckpt.Checkpointer(state, ckpt.Tier(sys.argv[1], every=1))
toy.train_step(state)
save = cp.step(1)
print("staged", flush=True)
try:
    save.wait_durable(90)
    print("committed", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def test_suspended_writer_loses_run_after_trimming(run_dir: str, own_sockets: Path) -> None:
    """The trainer is suspended during a COMMIT. Another job acquires the run, and the record with its number is
    deleted. The late record is created, but is not a checkpoint for any reader, and the trainer learns that it lost the
    run."""
    with Trainer(SAVE, run_dir, fail="writer/log.synced:stop:2") as trainer:
        assert trainer.line() == "staged"
        (writer,) = writers(own_sockets)
        assert eventually(lambda: writer.status() == "stopped")

        async def overtake() -> tuple[int, dict[str, Any]]:
            log = RunLog(open_store(run_dir, writable=True))
            await log.open()
            at = log.state.next_seq
            mine, trimmer = await commits.acquire(log, new_nonce()), Trimmer()
            while Path(run_dir, record_key(at)).exists():
                await talk(log, mine, log.state.next_seq + SNAPSHOT_EVERY)
                await trimmer.step(log, mine)
            await log.store.aclose()
            return at, summary(log.state)

        at, expected = asyncio.run(overtake())
        assert at < SNAPSHOT_EVERY and not Path(run_dir, record_key(at)).exists()
        writer.send_signal(signal.SIGCONT)
        assert trainer.line() == "FencedError"
        assert Path(run_dir, record_key(at)).exists(), "the record must exist, or the test proves nothing"
    found = whole(run_dir).state
    assert not found.damaged and not found.commits and summary(found) == expected
