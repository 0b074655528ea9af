"""A log that has become long is archived by the writer beside training: killed at every point, and with a late one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import stranger
import toy
from ckpt.core.checkpoint import commit as commits
from ckpt.core.checkpoint import read
from ckpt.core.format.manifest import Attempt, new_nonce
from ckpt.core.log.archive import Archive
from ckpt.core.log.archiving import Archivist
from ckpt.core.log.log import RunLog, record_key
from ckpt.core.log.records import SNAPSHOT_EVERY, Acquire, Record, summary
from ckpt.failpoints import ARCHIVE_POINTS
from ckpt.store import open_store
from ckpt_backends.memory import MemoryStore
from kills import STEPS, Chain, Told, Trainer, problems
from processes import eventually, writers


async def talk(log: RunLog, mine: Acquire, until: int, archivist: Archivist | None = None) -> None:
    """Records that say nothing of what there is."""
    body = {"attempt": str(Attempt(mine.epoch, 1, mine.nonce)), "ranges": []}
    while log.state.next_seq < until:
        await log.append(lambda state: Record("DOUBT", body, f"said:{mine.nonce}:{state.next_seq}"), owner=mine)
        if archivist is not None:
            await archivist.step(log, mine)


def long_run(folder: str, count: int) -> None:
    """A run whose log has so many records, archived as far as it is due."""

    async def grown() -> dict[str, bytes]:
        store = MemoryStore()
        await commits.create_run(store)
        log = RunLog(store)
        await log.open()
        await talk(log, await commits.acquire(log, new_nonce()), count, Archivist())
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


def files(folder: str) -> tuple[int, int]:
    """Of records, and of archives."""
    return len(list(Path(folder, "log").glob("*.json"))), len(list(Path(folder, "log", "archive").iterdir()))


def test_a_writer_killed_at_every_point_while_it_archives(run_dir: str, own_sockets: Path) -> None:
    """Half deleted, archived and nothing deleted, merged and nothing deleted: the next writer goes on with it, training
    notices nothing, and no record is lost. A stranger reads it by the document."""
    long_run(run_dir, 16 * SNAPSHOT_EVERY + SNAPSHOT_EVERY - 10)
    before = whole(run_dir).state
    assert files(run_dir)[1] == 15
    chain = Chain(run_dir, Told())
    fails = [f"writer/{point}:kill:1" for point in ("archive.deleting", "archive.stored", "archive.merged")]
    assert sorted(fails) == sorted(f"writer/{point}:kill:1" for point in ARCHIVE_POINTS)
    result = chain.train(fails[0], spares=tuple(fails[1:]))
    assert result.returncode == 0, result.stderr
    assert chain.told.replaced, result.stderr  # the later ones may get to their points while the run is closed
    assert chain.told.digest == toy.reference(STEPS)
    merged = Path(run_dir, Archive(16 * SNAPSHOT_EVERY - 1, 0).key)
    if not merged.exists():  # the run was closed before the last writer had come to it
        assert chain.train(steps=STEPS + 1).returncode == 0
    assert merged.exists(), "nothing was merged"
    assert problems(run_dir) == []
    assert eventually(lambda: not writers(own_sockets))
    state = whole(run_dir).state
    assert not state.damaged and state.next_seq > before.next_seq and before.requests.items() <= state.requests.items()
    records, archives = files(run_dir)
    assert records <= 3 * SNAPSHOT_EVERY and archives <= 17
    chain.train(steps=STEPS + 3)
    assert eventually(lambda: not writers(own_sockets))
    assert not whole(run_dir).state.damaged
    attempt = next(of for of in whole(run_dir).state.commits if of.step == STEPS + 3)
    assert stranger.newest(Path(run_dir))["attempt"] == str(attempt)


SAVE = """
import sys
import ckpt, toy

state = toy.build()
cp = ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier(sys.argv[1], every=1)])
toy.train_step(state)
save = cp.step(1)
print("staged", flush=True)
try:
    save.committed(90)
    print("committed", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def test_a_writer_that_was_suspended_is_told_that_it_came_too_late(run_dir: str, own_sockets: Path) -> None:
    """It stands still with a COMMIT on its way. Meanwhile the run is taken over, goes far, and what was at that number
    is archived and deleted. When the writer goes on its record finds its place free; and yet it is no checkpoint, for
    nobody, and the trainer is told that it has lost the run."""
    with Trainer(SAVE, run_dir, fail="writer/log.synced:stop:2") as trainer:
        assert trainer.line() == "staged"
        (writer,) = writers(own_sockets)
        assert eventually(lambda: writer.status() == "stopped")

        async def overtake() -> tuple[int, dict[str, Any]]:
            log = RunLog(open_store(run_dir, writable=True))
            await log.open()
            at = log.state.next_seq
            mine, archivist = await commits.acquire(log, new_nonce()), Archivist()
            while Path(run_dir, record_key(at)).exists():
                await talk(log, mine, log.state.next_seq + SNAPSHOT_EVERY)
                await archivist.step(log, mine)
            await log.store.aclose()
            return at, summary(log.state)

        at, expected = asyncio.run(overtake())
        assert at < SNAPSHOT_EVERY and not Path(run_dir, record_key(at)).exists()
        writer.send_signal(signal.SIGCONT)
        assert trainer.line() == "FencedError"
        assert Path(run_dir, record_key(at)).exists(), "it must have put it, or this shows nothing"
    found = whole(run_dir).state
    assert not found.damaged and not found.commits and summary(found) == expected
