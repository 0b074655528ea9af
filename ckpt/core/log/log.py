"""The run log: numbered records, created only if absent; the state of a run is a fold over them.

    log/000000000042.json    {"seq", "prev", "root", "epoch", "id", "type", "body", "digest"}

`prev` is the SHA-256 of the bytes of the record before; `root` the run's id; `id` the request that made the record, so
that a writer who lost the answer finds its own success again. What a record says, by its type, is in
`ckpt.core.log.records`.

Each record whose number is a multiple of SNAPSHOT_EVERY is a SNAPSHOT. A reader starts at the newest intact one and
reads what follows, however long the log has become. Records below the older of the two newest are deleted
(`log.files`, `log.trimming`). So a late writer may find the place of a deleted record free: whoever has put a record
lists the log again before he believes that it counts. What a reader has read counts only after another listing shows
the same floor; and a record is missing only if it was missing twice.

A damaged or missing record does not make a run unreadable: it is skipped, reported in `damaged`, and nothing is ever
deleted from such a run, since the record might have protected it. Nor is a SNAPSHOT made of what is left.

A SNAPSHOT keeps the request ids of the last KEPT_REQUESTS records. A writer that returns later, and whose record may or
may not have landed, gets OutcomeUnknownError and writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from random import SystemRandom

from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import MAX_FORMAT, read_format, seal, unseal
from ckpt.core.log.files import MAX_RECORD, NOTHING, Listed, LogFiles, record_key, sequence
from ckpt.core.log.records import (
    IN_WORDS,
    SNAPSHOT_EVERY,
    TYPES,
    Acquire,
    Commit,
    Record,
    RunState,
    fold,
    in_history,
    live_packs,
    summary,
)
from ckpt.errors import (
    AccessError,
    CorruptError,
    ExistsError,
    FencedError,
    FormatError,
    FullError,
    NotFoundError,
    OutcomeUnknownError,
    RunGoneError,
    StoreError,
    UnreadableError,
)
from ckpt.events import log as logger
from ckpt.failpoints import point
from ckpt.store import Store, get_small

__all__ = ["Acquire", "Commit", "Record", "RunLog", "RunState", "in_history", "infer_root", "live_packs", "record_key"]

_DICE = SystemRandom()  # the training's own random numbers are not ours to draw
MAX_PARTS = 1_000_000  # in a SNAPSHOT: with more it could become too large to be read, and is left out
MAX_GAP = 100_000  # missing records, in all, before ones that are believed to belong to the log
VANISHED_S = 1.0  # for FORMAT.json to vanish from a folder, once a record did
BATCH = 1024  # records that are read before any is taken in


class RunLog(LogFiles):
    """The log of one store, and its fold. Not safe for concurrent appends from one object; use one lock or task.

    `whole`: start at the older of the two newest SNAPSHOTs, to see whether all records that count are intact.
    """

    def __init__(self, store: Store, *, whole: bool = False) -> None:
        super().__init__(store)
        self.state = RunState()
        self.floor = 0  # the highest that was seen
        self._whole, self._begun = whole, False
        self._damaged: set[int] = set()  # as in the state
        self._missing = 0  # so many were passed over
        self._tried: dict[str, int] = {}  # requests that may have landed, and from which number on
        self._lock = asyncio.Lock()

    async def same(self) -> bool:
        """Whether what is there is still the run that was opened: not if it was moved away, emptied or replaced."""
        try:
            return read_format(await get_small(self.store, "FORMAT.json", MAX_FORMAT)) == self.root
        except (NotFoundError, CorruptError):
            root = await infer_root(self.store)
            if root is None and [one async for one in self.store.list("log/") if sequence(one.key) is not None]:
                raise UnreadableError(
                    f"{self.store.url} cannot be read now: it lists records of a run, and returns none of them"
                ) from None
            return root == self.root and not await self._beheaded()

    async def _beheaded(self) -> bool:
        """Return True if the two newest records that were read are not both there: the run is being deleted."""
        seen = await self.look()
        newest = self.state.next_seq - 1
        wanted = {seq for seq in (newest - 1, newest) if seq >= seen.floor and seq not in self._damaged}
        return not wanted <= seen.sizes.keys()

    async def check_same(self) -> None:
        """RunGoneError if it is not."""
        if not await self.same():
            raise RunGoneError.of(self.store.url)

    async def replaced(self) -> bool:
        """Return True if another run has begun there: another root id, and a log that has records."""
        try:
            if read_format(await get_small(self.store, "FORMAT.json", MAX_FORMAT)) == self.root:
                return False
        except (NotFoundError, CorruptError):
            return False
        return await infer_root(self.store) not in (None, self.root)

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
        self.watch()
        await self.refresh()

    def watch(self) -> None:
        """Have a local store check before each change that its folder is still this run."""
        if (watch := getattr(self.store, "watch", None)) is not None:
            watch(self.check_same)

    async def refresh(self) -> RunState:
        """Fold what was appended since. Damaged and missing records are skipped and listed in `state.damaged`."""
        async with self._lock:
            return await self._refresh()

    async def _refresh(self, own: Mapping[int, bytes] = NOTHING) -> RunState:
        """`own`: a record that was put just now, whether it is listed or not; it need not be read."""
        seen = await self._look_on(own)
        lacking: list[int] = []
        while True:
            if not self._begun or self.state.next_seq < seen.floor:
                await self._restart(seen)
            batch = self._batch(seen)
            if not batch:
                self._states.clear()
                return self.state
            raws = await self._read_all(batch, seen, own)
            before, seen = seen, await self._look_on(own)
            if seen.floor != before.floor:
                continue  # records of the batch may be deleted, and others may lie in their places
            missing = [seq for seq, raw in raws.items() if raw is None]
            if missing and missing != lacking:
                lacking = missing  # once more
                continue
            for seq in missing:
                if seen.sizes.get(seq, MAX_RECORD + 1) <= MAX_RECORD:
                    raise self._away(record_key(seq))
            for seq, raw in raws.items():
                self._apply(seq, raw)

    async def _restart(self, seen: Listed) -> None:
        """Continue from a SNAPSHOT, if there is one: the newest, or the one at the floor to read all that counts."""
        at = seen.snapshots[-1 if self._whole else 0] if seen.snapshots else 0
        if at >= self.state.next_seq and at > 0:
            found = self._states.get(at) or self.snapshot(at, await self.read(at, seen.sizes.get(at)))
            if found is None:
                raise self._away(record_key(at))
            found.damaged = self.state.damaged
            self.state = found
        elif not self._begun and seen.sizes and (first := _first_of_most(sorted(seen.sizes))) > 0:
            self._note_damage(first - 1)  # both SNAPSHOTs are damaged, and what they summarised was deleted
            self.state.next_seq = first
        self._begun, self._states = True, {}

    async def _look_on(self, own: Mapping[int, bytes]) -> Listed:
        """List the log. RunGoneError if the newest record that we know has vanished with the run."""
        seen = await self.look(own)
        self.floor = max(self.floor, seen.floor)
        newest = self.state.next_seq - 1
        if newest >= seen.floor and newest >= 0 and newest not in seen.sizes and newest not in self._damaged:
            await self._check_vanished()
        return seen

    async def _check_vanished(self) -> None:
        """RunGoneError if the run is gone. A record vanished, and `rm -rf` may delete FORMAT.json a moment later."""
        await self.check_same()
        end = time.monotonic() + (0 if self.store.remote else VANISHED_S)
        while time.monotonic() < end:
            await asyncio.sleep(0.1)
            await self.check_same()

    def _end(self, seen: Listed) -> int:
        """The number behind the last record that belongs to the log."""
        end, gap = self.state.next_seq, max(0, MAX_GAP - self._missing)
        for seq in sorted(seen.sizes):
            if end <= seq <= end + gap:
                end, gap = seq + 1, gap - (seq - end)
            elif seq >= end:
                self._note_damage(seq)  # so far off that it cannot be one of ours
        return end

    def _batch(self, seen: Listed) -> range:
        """The numbers that are taken in next: of BATCH records, and of all that are missing between them."""
        first, end = self.state.next_seq, self._end(seen)
        there = sorted(seq for seq in seen.sizes if first <= seq < end)
        return range(first, there[BATCH] if len(there) > BATCH else end)

    async def _read_all(self, batch: range, seen: Listed, own: Mapping[int, bytes]) -> dict[int, bytes | None]:
        raws: dict[int, bytes | None] = {}
        for start in range(batch.start, batch.stop, 64):
            chunk = range(start, min(start + 64, batch.stop))
            wanted = [seq for seq in chunk if seq in seen.sizes and seq not in own]
            found = await asyncio.gather(*(self.read(seq, seen.sizes[seq]) for seq in wanted))
            read = dict(zip(wanted, found, strict=True))
            raws |= {seq: own[seq] if seq in own else read.get(seq) for seq in chunk}
        return raws

    def _apply(self, seq: int, raw: bytes | None) -> None:
        state = self.state
        self._missing += raw is None
        try:
            record = self.unsealed(seq, raw)
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
                if record is None:
                    return state
                if record.id in state.requests:
                    self._tried.pop(record.id, None)
                    return state
                self.check_owner(owner)
                if self._tried.get(record.id, state.requests_from) < state.requests_from:
                    raise OutcomeUnknownError(
                        f"whether {IN_WORDS[record.type]} is recorded in {self.store.url} is not known: so many others "
                        "were recorded meanwhile that the log does not say any more"
                    )
                due = self._snapshot_due()
                if due is None:
                    self._tried.setdefault(record.id, state.next_seq)
                if await self._land(due or record, end) and due is None:
                    self._tried.pop(record.id, None)
                    return self.state

    async def _land(self, record: Record, end: float) -> bool:
        """Put it where the next record belongs. False: another one is there, or perhaps this one; it has to be read."""
        state = self.state
        raw, seq = self._sealed(record, state), state.next_seq
        try:
            await self.store.put(record_key(seq), raw, create=True)
        except ExistsError:
            await self._check_place(seq)
            if time.monotonic() > end:
                raise
            await asyncio.sleep(_DICE.uniform(0, 0.02))
            return False
        except FullError:
            raise
        except StoreError as error:
            await self._unknown(record, error, end, put=False)
            return False
        counts = await self._confirm(record, seq, raw, end)
        point("log.appended")
        return counts

    async def _confirm(self, record: Record, seq: int, raw: bytes, end: float) -> bool:
        """Return True if what was put counts. It does not below the floor: we were so late that its place was free."""
        while True:
            try:
                await self._refresh({seq: raw})
                await self._check_before(seq, raw)
            except RunGoneError:
                await self._take_back(seq, raw)
                raise
            except StoreError as error:
                await self._unknown(record, error, end)
            else:
                return record.id in self.state.requests

    async def _check_before(self, seq: int, raw: bytes) -> None:
        """RunGoneError if the record before vanished from a folder while this one was put: the run is being deleted."""
        if not self.store.remote and seq > self.floor and seq - 1 not in self._damaged:
            try:
                await self.store.head(record_key(seq - 1))
            except NotFoundError:
                if (await self.look()).floor < seq:
                    await self._check_vanished()

    async def _take_back(self, seq: int, raw: bytes) -> None:
        """Delete a record that was put while the run was being deleted: a start would take it for a damaged run."""
        with contextlib.suppress(StoreError):
            if bytes(await self.store.get(record_key(seq))) == raw:
                await getattr(self.store, "discard", self.store.delete)(record_key(seq))

    async def _unknown(self, record: Record, error: StoreError, end: float, *, put: bool = True) -> None:
        """A disk that fails is no network that lost a reply: there nothing is tried twice."""
        if not (error.retryable and self.store.remote) or time.monotonic() > end:
            raise not_recorded(record, self.store, error, put=put) from error
        await asyncio.sleep(_DICE.uniform(0, 0.2))

    async def _check_place(self, seq: int) -> None:
        """StoreError if there is no record where one is in the way, but something else, which never becomes one."""
        if self.store.remote:
            return  # an answer may be older than what there is
        try:
            await self.store.head(record_key(seq))
        except NotFoundError:
            if (await self.look()).floor > seq:
                return  # it was deleted
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
                f"another job took {self.store.url} over, and this one saves nothing there any more. Stop this one, or "
                "give it a folder of its own"
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


def _first_of_most(numbers: Sequence[int]) -> int:
    """Return the first of those sorted numbers that lie together: files far off were put too late, or are junk."""
    starts = [i for i, seq in enumerate(numbers) if i == 0 or seq - numbers[i - 1] > MAX_GAP]
    sizes = [stop - start for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True)]
    return numbers[starts[sizes.index(max(sizes))]]


def not_recorded(record: Record, store: Store, error: StoreError, *, put: bool) -> StoreError:
    """A folder that allows nothing has nothing new; from elsewhere an answer may have been lost before."""
    what = IN_WORDS[record.type]
    if isinstance(error, AccessError) and not put and not store.remote:
        return AccessError(f"{what} cannot be recorded: {error}")
    return OutcomeUnknownError(f"whether {what} is recorded in {store.url} is not known: {error}")


async def infer_root(store: Store) -> str | None:
    """The id of a run by the first sound record of its log: one bad file must not make a run unreadable."""
    async for info in store.list("log/"):
        if sequence(info.key) is None:
            continue
        try:
            root = unseal(await get_small(store, info.key, MAX_RECORD), info.key).get("root")
        except (CorruptError, NotFoundError):
            continue
        if isinstance(root, str):
            return root
    return None
