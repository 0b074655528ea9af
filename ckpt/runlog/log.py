"""The run log: numbered records, created only if absent; the state of a run is a fold over them.

    log/000000000042.json    {"seq", "prev", "root", "epoch", "id", "type", "body", "digest"}

`prev` is the SHA-256 of the bytes of the record before; `root` the run's id; `id` the request that made the record, so
that a writer who lost the answer finds its own success again. What a record says, by its type, is in
`ckpt.runlog.records`.

Each record whose number is a multiple of SNAPSHOT_EVERY is a SNAPSHOT, so that a reader finds the newest one by its
name, and reads that and what follows, however long the log has become. Records are never deleted: a late writer must
not find the place of an old one free.

A damaged or missing record does not make a run unreadable: it is skipped, reported in `damaged`, and nothing is ever
deleted from such a run, since the record might have protected it. Nor is a SNAPSHOT made of what is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import SystemRandom
from typing import Any

from ckpt.errors import (
    CorruptError,
    ExistsError,
    FencedError,
    FormatError,
    FullError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
)
from ckpt.events import log as logger
from ckpt.failpoints import point
from ckpt.format.digest import file_digest
from ckpt.format.manifest import MAX_FORMAT, read_format, seal, unseal
from ckpt.runlog.records import (
    SNAPSHOT_EVERY,
    TYPES,
    Acquire,
    Commit,
    Record,
    RunState,
    expand,
    fold,
    in_history,
    live_packs,
    summary,
)
from ckpt.store import Store, get_small

__all__ = ["Acquire", "Commit", "Record", "RunLog", "RunState", "in_history", "infer_root", "live_packs", "record_key"]

_DICE = SystemRandom()  # the training's own random numbers are not ours to draw
MAX_PARTS = 1_000_000  # in a SNAPSHOT: with more it could become too large to be read, and is left out
MAX_RECORD = 256 << 20
MAX_GAP = 100_000  # missing records, in all, before ones that are believed to belong to the log


def record_key(seq: int) -> str:
    return f"log/{seq:012d}.json"


class RunLog:
    """The log of one store, and its fold. Not safe for concurrent appends from one object; use one lock or task.

    `whole`: read every record, also those before the newest SNAPSHOT, to see whether they are sound.
    """

    def __init__(self, store: Store, *, whole: bool = False) -> None:
        self.store = store
        self.state = RunState()
        self.root = ""
        self._whole = whole
        self._damaged: set[int] = set()  # as in the state
        self._lock = asyncio.Lock()

    async def same(self) -> bool:
        """Whether what is there is still the run that was opened: not if it was moved away, emptied or replaced."""
        try:
            return read_format(await get_small(self.store, "FORMAT.json", MAX_FORMAT)) == self.root
        except (NotFoundError, CorruptError):
            return await infer_root(self.store) == self.root

    async def check_same(self) -> None:
        """StoreError if it is not."""
        if not await self.same():
            raise StoreError(
                f"{self.store.url} is not the run any more that it was: it was moved, emptied or replaced meanwhile. "
                "Nothing was written there. Put it back, or start again"
            )

    async def open(self) -> None:
        """Read FORMAT.json and fold the log. FormatError if this is not a run."""
        try:
            self.root = read_format(await get_small(self.store, "FORMAT.json", MAX_FORMAT))
        except (NotFoundError, CorruptError) as error:
            root = await infer_root(self.store)
            if root is None and isinstance(error, NotFoundError):
                raise FormatError(f"no run at {self.store.url}: it has no FORMAT.json") from None
            if root is None:
                raise FormatError(f"{self.store.url} is not a run, or nothing of its log is whole: {error}") from None
            logger.warning("%s: FORMAT.json is lost (%s); the log says what it was", self.store.url, error)
            self.root = root
        await self.refresh()

    async def refresh(self) -> RunState:
        """Fold what was appended since. Damaged and missing records are skipped and listed in `state.damaged`."""
        async with self._lock:
            return await self._refresh()

    async def _refresh(self) -> RunState:
        first = self.state.next_seq == 0
        newest = self.state.next_seq - 1
        after = "" if newest < 1 else record_key(newest - 1)
        listed = [info async for info in self.store.list("log/", after=after)]
        sizes = {n: info.size for info in listed if (n := _sequence(info.key)) is not None}
        if not first and newest not in sizes and newest not in self._damaged:
            await self.check_same()
        end, gap = self.state.next_seq, MAX_GAP
        for seq in sorted(sizes):
            if end <= seq <= end + gap:
                end, gap = seq + 1, gap - (seq - end)
            elif seq >= end:
                self._note_damage(seq)  # so far off that it cannot be one of ours
        if first and not self._whole:
            await self._jump(sizes, end)
        wanted = sorted(seq for seq in sizes if self.state.next_seq <= seq < end)
        for start in range(0, len(wanted), 64):
            chunk = wanted[start : start + 64]
            raws = await asyncio.gather(*(self._read(seq, sizes.get(seq)) for seq in chunk))
            for seq, raw in zip(chunk, raws, strict=True):
                for missing in range(self.state.next_seq, seq):
                    self._apply(missing, None)
                self._apply(seq, raw)
        return self.state

    async def _jump(self, sizes: dict[int, int], end: int) -> None:
        """To the newest sound SNAPSHOT, if there is one."""
        for seq in range((end - 1) // SNAPSHOT_EVERY * SNAPSHOT_EVERY, 0, -SNAPSHOT_EVERY):
            raw = await self._read(seq, sizes.get(seq))
            try:
                record = self._unsealed(seq, raw)
                if record["type"] != "SNAPSHOT":
                    continue  # whoever came here had not read all that was before
                state = expand(record["body"])
                state.requests[str(record["id"])] = seq
            except (CorruptError, FormatError, KeyError, TypeError):
                continue
            state.damaged = self.state.damaged
            state.next_seq, state.last = seq + 1, file_digest(raw or b"")
            self.state = state
            return

    async def _read(self, seq: int, size: int | None) -> bytes | None:
        """None if it is not there. From a remote place twice, if need be: it may have been damaged on its way."""
        if size is None or size > MAX_RECORD:
            return None
        raw = await self._get(seq)
        return raw if not self.store.remote or self._is_sound(seq, raw) else await self._get(seq)

    async def _get(self, seq: int) -> bytes | None:
        try:
            return bytes(await self.store.get(record_key(seq)))
        except NotFoundError:
            return None

    def _is_sound(self, seq: int, raw: bytes | None) -> bool:
        try:
            self._unsealed(seq, raw)
        except CorruptError:
            return False
        return True

    def _unsealed(self, seq: int, raw: bytes | None) -> dict[str, Any]:
        if raw is None:
            raise CorruptError("missing")
        record = unseal(raw, f"log record {seq}")
        if record.get("seq") != seq or record.get("root") != self.root:
            raise CorruptError(f"log record {seq} belongs elsewhere")
        return record

    def _apply(self, seq: int, raw: bytes | None) -> None:
        state = self.state
        try:
            record = self._unsealed(seq, raw)
            if record.get("prev") != state.last:
                self._note_damage(seq - 1)  # this one is whole, so the one before is not what it was
            if record["type"] not in TYPES:
                raise FormatError(f"log record {seq} is a {record['type']!r}: written by a newer version, upgrade")
            if record["type"] != "SNAPSHOT" or not state.damaged:
                fold(state, record)  # else it may know more than we do
        except (CorruptError, KeyError):
            self._note_damage(seq)
        state.next_seq, state.last = seq + 1, file_digest(raw or b"")

    def _note_damage(self, seq: int) -> None:
        if seq not in self._damaged:  # there may be very many
            self._damaged.add(seq)
            self.state.damaged.append(seq)

    async def append(
        self, make: Callable[[RunState], Record | None], *, owner: Acquire | None, deadline_s: float = 60.0
    ) -> RunState:
        """Append what `make` says of the newest state; called again whenever another record came first.

        `make` returns None when there is nothing left to do. `owner` is the incarnation that writes: FencedError if a
        newer one has taken over (None: whoever owns the run). Returns the state with the record in it, and durable.
        When an answer is lost, the log is read again to see whether the record has landed; OutcomeUnknownError if that
        cannot be found out within `deadline_s`. Nothing must be deleted then.
        """
        end = time.monotonic() + deadline_s
        async with self._lock:
            while True:
                state = await self._refresh()
                record = make(state)
                if record is None or record.id in state.requests:
                    return state
                self.check_owner(owner)
                due = self._snapshot_due()
                if await self._land(due or record, end) and due is None:
                    return state

    async def _land(self, record: Record, end: float) -> bool:
        """Put it where the next record belongs. False: another one is there, or perhaps this one; it has to be read."""
        state = self.state
        raw = self._sealed(record, state)
        try:
            await self.store.put(record_key(state.next_seq), raw, create=True)
        except ExistsError:
            await self._check_place(state.next_seq)
            if time.monotonic() > end:
                raise
            await asyncio.sleep(_DICE.uniform(0, 0.02))
            return False
        except FullError:
            raise
        except StoreError as error:
            # A disk that fails is no network that lost a reply: there nothing is tried twice.
            if not (error.retryable and self.store.remote) or time.monotonic() > end:
                raise OutcomeUnknownError(f"a {record.type} may or may not have landed: {error}") from error
            await asyncio.sleep(_DICE.uniform(0, 0.2))
            return False
        self._apply(state.next_seq, raw)
        point("log.appended")
        return True

    async def _check_place(self, seq: int) -> None:
        """StoreError if there is no record where one is in the way, but something else, which never becomes one."""
        if self.store.remote:
            return  # an answer may be older than what there is
        try:
            await self.store.head(record_key(seq))
        except NotFoundError:
            raise StoreError(
                f"{record_key(seq)} in {self.store.url} is not a file, so nothing can be recorded there: move it away"
            ) from None

    def _snapshot_due(self) -> Record | None:
        state = self.state
        if state.next_seq == 0 or state.next_seq % SNAPSHOT_EVERY or state.damaged:
            return None
        if sum(len(commit.parts) for commit in (*state.commits.values(), *state.held.values())) > MAX_PARTS:
            return None
        return Record("SNAPSHOT", summary(state), f"snapshot:{state.next_seq}")

    def check_owner(self, owner: Acquire | None) -> None:
        if owner is None or not self.state.acquires:
            return
        newest = self.state.acquires[-1]
        # An older one only means that what we have read of the log is older than we are.
        if newest.epoch >= owner.epoch and (newest.epoch, newest.nonce) != (owner.epoch, owner.nonce):
            raise FencedError(
                f"another job took {self.store.url} over (epoch {newest.epoch}, this one has {owner.epoch}). "
                "Stop this one, or give it a folder of its own"
            )

    def _sealed(self, record: Record, state: RunState) -> bytes:
        return seal(
            {
                "seq": state.next_seq,
                "prev": state.last,
                "root": self.root,
                "epoch": record.body.get("epoch", state.epoch),
                "id": record.id,
                "type": record.type,
                "body": record.body,
            }
        )


async def infer_root(store: Store) -> str | None:
    """The id of a run by the first sound record of its log: one bad file must not make a run unreadable."""
    async for info in store.list("log/"):
        try:
            root = unseal(await get_small(store, info.key, MAX_RECORD), info.key).get("root")
        except (CorruptError, NotFoundError):
            continue
        if isinstance(root, str):
            return root
    return None


def _sequence(key: str) -> int | None:
    name = key.removeprefix("log/").removesuffix(".json")
    return int(name) if len(name) == 12 and name.isdigit() and name.isascii() else None
