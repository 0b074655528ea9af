"""The run log: numbered records, each created only if absent. Applying them in order gives the state of a run.

    log/000000000042.json    {"seq", "prev", "root", "term", "id", "type", "body", "digest"}

    LogFiles   reads the valid records      RunLog   applies and appends records      Trimmer   deletes old records

`prev` is the SHA-256 of the bytes of the previous record. `root` is the id of the run. `id` names the request that made
the record, so that a writer whose reply was lost finds its own record. The record types are in `log.records`.

A record whose number is a multiple of SNAPSHOT_EVERY is a SNAPSHOT. A reader starts at the newest intact SNAPSHOT and
reads the records that follow. The *floor* is the number of the older of the two newest intact SNAPSHOTs, or 0 if there
are fewer than two. The owner of the run deletes the records below the floor in the background, after a save, so their
numbers become free: a writer that was suspended before its put may create such a file again. Three rules follow:

- After a put, the writer lists the log again. If the number is below the floor, the record does not count.
- Records that were read count only if the next listing has the same floor. A slow reader restarts at a newer SNAPSHOT.
- A record counts as missing only if it was missing twice in a row.

A SNAPSHOT contains the request ids of the last KEPT_REQUESTS records. If a record may have been put earlier than these,
a retry raises OutcomeUnknownError and writes nothing.

A damaged or missing record does not make a run unreadable. The record is skipped and listed in `damaged`. Nothing is
deleted from such a run, because the record may have protected it, and no SNAPSHOT is made of the other records.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import SystemRandom
from types import MappingProxyType
from typing import Any

from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import MAX_FORMAT, read_format, seal, unseal
from ckpt.core.log.records import (
    SNAPSHOT_EVERY,
    TITLES,
    TYPES,
    Acquire,
    Commit,
    Record,
    RunState,
    expand,
    fold,
    in_history,
    live_files,
    summary,
)
from ckpt.errors import (
    AccessError,
    CheckpointError,
    CorruptError,
    ExistsError,
    FencedError,
    FormatError,
    FullError,
    NoCheckpointError,
    NotFoundError,
    OutcomeUnknownError,
    RunGoneError,
    StoreError,
    UnreadableError,
)
from ckpt.events import log as logger
from ckpt.failpoints import point
from ckpt.store import Store, get_small

MAX_RECORD = 256 << 20  # bytes
MAX_RELISTS = 8  # maximum number of listings in a row in which a SNAPSHOT was deleted before it was read
NOTHING: Mapping[int, bytes] = MappingProxyType({})


def record_key(seq: int) -> str:
    return f"log/{seq:012d}.json"


def sequence(key: str) -> int | None:
    """Return the number in the name of a record, or None for any other name."""
    name = key.removeprefix("log/").removesuffix(".json")
    return int(name) if len(name) == 12 and name.isdigit() and name.isascii() else None


def is_snapshot_number(seq: int) -> bool:
    """Return True if the record with this number is a SNAPSHOT, unless the log was damaged when the record was put."""
    return seq > 0 and seq % SNAPSHOT_EVERY == 0


@dataclass(frozen=True, slots=True)
class Listed:
    """A listing of the log.

    sizes        size in bytes of each record that counts, by number
    below        numbers of the files below the floor
    snapshots    numbers of the two newest intact SNAPSHOTs, newest first; fewer if fewer exist
    """

    sizes: dict[int, int]
    below: Sequence[int]
    snapshots: Sequence[int]

    @property
    def floor(self) -> int:
        return self.snapshots[1] if len(self.snapshots) > 1 else 0


class LogFiles:
    """Reads the files of one log. `root`: the id of the run."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.root = ""
        self._intact: dict[int, bool] = {}  # True for each number of an intact SNAPSHOT, False for a damaged one
        self._ordinary: set[int] = set()  # multiples of SNAPSHOT_EVERY that have an intact record of another type
        self._states: dict[int, RunState] = {}  # states in the SNAPSHOTs of the last listing, for `RunLog._restart`

    async def list_records(self, own: Mapping[int, bytes] = NOTHING) -> Listed:
        """List the log, and read its new SNAPSHOTs. `own`: a record that was just put.

        A listing needs no order and may come in pages. It contains every file that exists during the whole call. A file
        that is created or deleted during the call may be missing, so callers compare the floors of two listings.
        """
        for _ in range(MAX_RELISTS):
            sizes = {n: info.size async for info in self.store.list("log/") if (n := sequence(info.key)) is not None}
            sizes.update({seq: len(raw) for seq, raw in own.items()})
            snapshots, vanished = list[int](), None
            for seq in sorted(filter(is_snapshot_number, sizes), reverse=True):
                if seq not in self._intact:
                    try:
                        raw = own[seq] if seq in own else await self.read(seq, sizes[seq])
                    except StoreError as error:
                        if error.retryable or not snapshots:
                            raise
                        continue  # the older SNAPSHOT is unreadable, but the newest is enough
                    if raw is None and sizes[seq] <= MAX_RECORD:
                        vanished = seq
                        break  # deleted during the call, so newer SNAPSHOTs exist
                    state = self.snapshot(seq, raw)
                    self._intact[seq] = state is not None
                    if state is not None:
                        self._states[seq] = state
                if self._intact[seq]:
                    snapshots.append(seq)
                if len(snapshots) == 2:
                    break
            if vanished is None:
                floor = snapshots[1] if len(snapshots) > 1 else 0
                self._states = {seq: state for seq, state in self._states.items() if seq in snapshots}
                below = [seq for seq in sizes if seq < floor]
                return Listed({seq: size for seq, size in sizes.items() if seq >= floor}, below, snapshots)
        raise self._not_found(record_key(vanished or 0))

    def _not_found(self, key: str) -> StoreError:
        """Return the error for a log file that the store lists but cannot find."""
        return StoreError(f"{key} in {self.store.url} is listed, but cannot be read now", retryable=True)

    async def read(self, seq: int, size: int | None) -> bytes | None:
        """Return the bytes of a record, or None if it is missing or too large.

        A damaged record of a remote store is read twice, because it may have been damaged in transit. A pipe, link or
        folder with the name of a record is listed as empty, so this record is lost.
        """
        if size is None or size > MAX_RECORD:
            return None
        if size == 0:
            return b""
        raw = await self._get(record_key(seq))
        return raw if not self.store.remote or self._is_sound(seq, raw) else await self._get(record_key(seq))

    async def _get(self, key: str) -> bytes | None:
        try:
            return bytes(await self.store.get(key))
        except NotFoundError:
            return None

    def _is_sound(self, seq: int, raw: bytes | None) -> bool:
        try:
            self.unsealed(seq, raw)
        except CorruptError:
            return False
        return True

    def unsealed(self, seq: int, raw: bytes | None) -> dict[str, Any]:
        """Decode a record. Raise CorruptError if it has another number or belongs to another run."""
        if raw is None:
            raise CorruptError("missing")
        record = unseal(raw, f"log record {seq}")
        if record.get("seq") != seq or record.get("root") != self.root:
            raise CorruptError(f"log record {seq} belongs to another run or has another number")
        return record

    def snapshot(self, seq: int, raw: bytes | None) -> RunState | None:
        """Return the state after a SNAPSHOT, or None if the SNAPSHOT is damaged or the record has another type."""
        try:
            record = self.unsealed(seq, raw)
            if record["type"] != "SNAPSHOT":
                self._ordinary.add(seq)  # the log was damaged when this record was put
                return None
            state = expand(record["body"], seq)
            state.requests[str(record["id"])] = seq
        except (CorruptError, FormatError, KeyError, TypeError):
            return None
        state.next_seq, state.last = seq + 1, file_digest(raw or b"")
        return state


# -- the log --


__all__ = ["Acquire", "Commit", "Record", "RunLog", "RunState", "in_history", "infer_root", "live_files", "record_key"]

_DICE = SystemRandom()  # does not change the random numbers of the training
MAX_PARTS = 1_000_000  # maximum number of manifests in a SNAPSHOT, because a larger one might be too large to read
MAX_LISTINGS = 1000  # maximum number of listings of a log that keeps changing
MAX_GAP = 100_000  # maximum number of missing records; a record after a larger gap does not belong to the log
VANISHED_S = 1.0  # maximum time between the deletions of a record and of FORMAT.json by one `rm`
BATCH = 1024  # number of records to read before they are applied


class RunLog(LogFiles):
    """The log of a store, and the state that results from it. Only one task at a time may append through one object.

    `whole`: read and check every record that counts, not only the newest SNAPSHOT and the records after it.
    """

    def __init__(self, store: Store, *, whole: bool = False) -> None:
        super().__init__(store)
        self.state = RunState()
        self.floor = 0  # the highest floor that was listed
        self._whole, self._begun = whole, False
        self._damaged: set[int] = set()  # the numbers in `state.damaged`
        self._missing = 0  # number of records that were skipped because they are missing
        self._tried: dict[str, int] = {}  # requests that may be recorded, with the number of the first attempt
        self._lock = asyncio.Lock()

    async def same(self) -> bool:
        """Return True if the store still has the run that was opened. It may have been moved, deleted or replaced."""
        try:
            return read_format(await get_small(self.store, "FORMAT.json", MAX_FORMAT)) == self.root
        except (NotFoundError, CorruptError):
            root = await infer_root(self.store)
            if root is None and [one async for one in self.store.list("log/") if sequence(one.key) is not None]:
                raise UnreadableError(
                    f"{self.store.url} cannot be read now: it lists records of a run, but returns none of them"
                ) from None
            return root == self.root and not await self._newest_missing()

    async def _newest_missing(self) -> bool:
        """Return True if one of the two newest known records is missing, which shows that the run is being deleted."""
        newest = self.state.next_seq - 1  # before the listing, because another task may append during it
        known = {newest - 1, newest} - self._damaged
        seen = await self.list_records()
        return any(seq >= max(0, seen.floor) and seq not in seen.sizes for seq in known)

    async def check_same(self) -> None:
        """Raise RunGoneError if the store no longer has this run."""
        if not await self.same():
            raise RunGoneError.of(self.store.url)

    async def replaced(self) -> bool:
        """Return True if the store has another run, which has another root id and a log with records."""
        try:
            if read_format(await get_small(self.store, "FORMAT.json", MAX_FORMAT)) == self.root:
                return False
        except (NotFoundError, CorruptError):
            return False
        return await infer_root(self.store) not in (None, self.root)

    async def open(self) -> None:
        """Read FORMAT.json and all records. Raise NoCheckpointError if there is no run."""
        try:
            self.root = read_format(await get_small(self.store, "FORMAT.json", MAX_FORMAT))
        except (NotFoundError, CorruptError) as error:
            root = await infer_root(self.store)
            if root is None and isinstance(error, NotFoundError):
                raise NoCheckpointError(
                    f"no run at {self.store.url}: it has no FORMAT.json. `ckpt import` creates a run from another "
                    "program's files"
                ) from None
            if root is None:
                raise FormatError(f"{self.store.url} is not a run, or its log is damaged: {error}") from None
            logger.warning("%s: FORMAT.json is unreadable (%s); using the run id in the log", self.store.url, error)
            self.root = root
        self.watch()
        await self.refresh()

    def watch(self) -> None:
        """Make a local store check before each change that its folder still has this run."""
        if (watch := getattr(self.store, "watch", None)) is not None:
            watch(self.check_same)

    async def refresh(self) -> RunState:
        """Apply new records. Damaged and missing records are skipped and listed in `state.damaged`."""
        async with self._lock:
            return await self._refresh()

    async def _refresh(self, own: Mapping[int, bytes] = NOTHING) -> RunState:
        """Refresh. `own`: a record that was just put. It is applied without being read, even if it is not listed."""
        seen, lacking = await self._list_known(own), list[int]()
        for _ in range(MAX_LISTINGS):
            if not self._begun:
                before, seen = seen, await self._list_known(own)
                if seen.floor != before.floor:
                    continue
            if (not self._begun or self.state.next_seq < seen.floor) and not await self._restart(seen):
                seen = await self._list_known(own)
                continue
            batch = self._batch(seen)
            if not batch:
                self._states.clear()
                return self.state
            raws = await self._read_all(batch, seen, own)
            before, seen = seen, await self._list_known(own)
            if seen.floor != before.floor:
                continue  # other records may have taken the numbers of this batch
            missing = [seq for seq, raw in raws.items() if raw is None]
            if missing and missing != lacking:
                lacking = missing  # repeat, because a record counts as missing only the second time
                continue
            if missing and seen.snapshots and missing[0] < seen.snapshots[0] and not self._whole:
                self._begun = False  # a newer SNAPSHOT contains the effect of the missing records
                continue
            for seq in missing:
                if seen.sizes.get(seq, MAX_RECORD + 1) <= MAX_RECORD:
                    raise self._not_found(record_key(seq))
            for seq, raw in raws.items():
                self._apply(seq, raw)
        raise self._not_found("log/")

    async def _restart(self, seen: Listed) -> bool:
        """Continue from a newer SNAPSHOT, if there is one. Return False if it was deleted or damaged during the call.
        Use the newest SNAPSHOT, or with `whole` the SNAPSHOT at the floor. Without a SNAPSHOT, start at the first
        record that counts."""
        at = seen.snapshots[-1 if self._whole else 0] if seen.snapshots else 0
        if at >= self.state.next_seq and at > 0:
            found = self._states.get(at) or self.snapshot(at, await self.read(at, seen.sizes.get(at)))
            if found is None:
                self._intact.pop(at, None)
                return False
            found.damaged = self.state.damaged
            self.state = found
            if self._whole and len(seen.snapshots) == 1:  # these records count, although the state does not need them
                before = range(max(0, at - SNAPSHOT_EVERY), at)
                for seq, raw in (await self._read_all(before, seen, NOTHING)).items():
                    if not self._is_sound(seq, raw):
                        self._note_damage(seq)
        elif not self._begun and seen.sizes and (first := self._first_that_counts(sorted(seen.sizes))) > 0:
            self._note_damage(first - 1)  # both SNAPSHOTs are damaged, and earlier records were deleted
            self.state.next_seq = first
        self._begun = True
        return True

    def _first_that_counts(self, numbers: Sequence[int]) -> int:
        """Return the number at which to start without an intact SNAPSHOT. `numbers`: all listed numbers, sorted.

        Start at the first record, or at the older of the two newest damaged SNAPSHOTs, because a suspended writer may
        have put records below it. Intact records of other types at these numbers were put after the damage, so all
        count.
        """
        places = [seq for seq in numbers if is_snapshot_number(seq) and seq not in self._ordinary]
        return places[-2] if numbers[0] > 0 and len(places) > 1 else numbers[0]

    async def _list_known(self, own: Mapping[int, bytes]) -> Listed:
        """List the log. Raise RunGoneError if the newest known record is missing and the run is gone."""
        seen = await self.list_records(own)
        self.floor = max(self.floor, seen.floor)
        newest = self.state.next_seq - 1
        trimmed = newest < max([seen.floor, *seen.snapshots[:1]])  # trimming has deleted the record
        if not trimmed and newest >= 0 and newest not in seen.sizes and newest not in self._damaged:
            await self._check_vanished()
        return seen

    async def _check_vanished(self) -> None:
        """Raise RunGoneError if the run is gone. Keep checking, as `rm -rf` may delete FORMAT.json after a record."""
        await self.check_same()
        end = time.monotonic() + (0 if self.store.remote else VANISHED_S)
        while time.monotonic() < end:
            await asyncio.sleep(0.1)
            await self.check_same()

    def _end(self, seen: Listed) -> int:
        """Return the number after the last record that belongs to the log."""
        end, gap = self.state.next_seq, max(0, MAX_GAP - self._missing)
        for seq in sorted(seen.sizes):
            if end <= seq <= end + gap:
                end, gap = seq + 1, gap - (seq - end)
            elif seq >= end:
                self._note_damage(seq)  # it does not belong to the log
        return end

    def _batch(self, seen: Listed) -> range:
        """Return the numbers to apply next, which cover BATCH records and all missing numbers between them."""
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
                self._note_damage(seq - 1)  # this record is intact, so its predecessor was changed
            if record["type"] not in TYPES:
                raise FormatError(f"log record {seq} is a {record['type']!r}: written by a newer version, upgrade")
            if record["type"] != "SNAPSHOT" or not state.damaged:
                fold(state, record)  # if `state` lacks damaged records, skip the SNAPSHOT, which may contain them
        except (CorruptError, KeyError):
            self._note_damage(seq)
        state.next_seq, state.last = seq + 1, file_digest(raw or b"")

    def _note_damage(self, seq: int) -> None:
        if seq not in self._damaged:  # a set, because a damaged log may have thousands
            self._damaged.add(seq)
            self.state.damaged.append(seq)

    async def append(
        self, make: Callable[[RunState], Record | None], *, owner: Acquire | None, deadline_s: float = 60.0
    ) -> RunState:
        """Append the record that `make` returns for the newest state. `make` is called again if another record was put
        first.

        `make`: returns None if there is nothing to append. `owner`: the job attempt that writes; None accepts any
        owner. Raises FencedError if a newer job attempt owns the run. `deadline_s`: seconds for retries.

        Return the state with the record, once the record is durable. If a reply was lost, the log is read again to find
        the record. If this fails, OutcomeUnknownError is raised, and the caller must not delete anything.
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
                        f"cannot determine whether {TITLES[record.type]} is recorded in {self.store.url}: too many "
                        "records followed, and the log no longer names this request"
                    )
                due = self._snapshot_due()
                if due is None:
                    self._tried.setdefault(record.id, state.next_seq)
                if await self._land(due or record, end) and due is None:
                    self._tried.pop(record.id, None)
                    return self.state

    async def _land(self, record: Record, end: float) -> bool:
        """Put a record at the next number. Return False if there is a record, perhaps this one, that must be read."""
        state = self.state
        raw, seq = self._sealed(record, state), state.next_seq
        try:
            await self.store.put(record_key(seq), raw, create=True)
        except ExistsError:
            if not self.store.remote:
                self._tried.pop(record.id, None)  # a folder loses no reply, so the other record is not ours
            await self._check_obstacle(seq)
            if time.monotonic() > end:
                raise
            await asyncio.sleep(_DICE.uniform(0, 0.02))
            return False
        except FullError:
            self._tried.pop(record.id, None)  # nothing was put
            raise
        except StoreError as error:
            await self._unknown(record, error, end, put=False)
            return False
        counts = await self._confirm(record, seq, raw, end)
        point("log.appended")
        return counts

    async def _confirm(self, record: Record, seq: int, raw: bytes, end: float) -> bool:
        """Return True if the record counts. A record below the floor does not, because its number was free."""
        while True:
            try:
                await self._refresh({seq: raw})
                await self._check_before(seq, raw)
            except RunGoneError:
                await self._delete_own(seq, raw)
                raise
            except StoreError as error:
                await self._unknown(record, error, end)
            else:
                return record.id in self.state.requests

    async def _check_before(self, seq: int, raw: bytes) -> None:
        """Raise RunGoneError if the previous record vanished from a folder during the put, as when a run is deleted."""
        if not self.store.remote and seq > self.floor and seq - 1 not in self._damaged:
            try:
                await self.store.head(record_key(seq - 1))
            except NotFoundError:
                if (await self.list_records()).floor < seq:
                    await self._check_vanished()

    async def _delete_own(self, seq: int, raw: bytes) -> None:
        """Delete a record that was put while the run was deleted, because the next start would report a damaged run."""
        with contextlib.suppress(StoreError):
            if bytes(await self.store.get(record_key(seq))) == raw:
                await getattr(self.store, "discard", self.store.delete)(record_key(seq))

    async def _unknown(self, record: Record, error: StoreError, end: float, *, put: bool = True) -> None:
        """Pause before a retry if a remote store's reply may be lost. Raise an error of a local disk immediately."""
        if not (error.retryable and self.store.remote) or time.monotonic() > end:
            raise not_recorded(record, self.store, error, put=put) from error
        await asyncio.sleep(_DICE.uniform(0, 0.2))

    async def _check_obstacle(self, seq: int) -> None:
        """Raise StoreError if something else has the name of the record, for example a folder."""
        if self.store.remote:
            return  # a bucket's reply may be outdated
        try:
            await self.store.head(record_key(seq))
        except NotFoundError:
            if (await self.list_records()).floor > seq:
                return  # the record was deleted
            raise StoreError(
                f"{record_key(seq)} in {self.store.url} is not a file, so no record can be created there: remove it"
            ) from None

    def _snapshot_due(self) -> Record | None:
        state = self.state
        if state.next_seq == 0 or state.next_seq % SNAPSHOT_EVERY or state.damaged:
            return None
        if sum(len(commit.manifests) for commit in state.commits.values()) > MAX_PARTS:
            return None
        return Record("SNAPSHOT", summary(state), f"snapshot:{state.next_seq}")

    def check_owner(self, owner: Acquire | None) -> None:
        if owner is None or not self.state.acquires:
            return
        newest = self.state.acquires[-1]
        # If the newest owner is older, this log was only read before our own record was appended.
        if newest.term >= owner.term and (newest.term, newest.nonce) != (owner.term, owner.nonce):
            raise FencedError(
                f"another job took ownership of {self.store.url}, so this one can no longer save there. Stop this job, "
                "or give it a folder of its own"
            )

    def _sealed(self, record: Record, state: RunState) -> bytes:
        return seal(
            {
                "seq": state.next_seq,
                "prev": state.last,
                "root": self.root,
                "term": record.body.get("term", state.term),
                "id": record.id,
                "type": record.type,
                "body": record.body,
            }
        )


def not_recorded(record: Record, store: Store, error: StoreError, *, put: bool) -> StoreError:
    """Return the error for a failed append. A folder without permission has no new record, but a bucket may have it."""
    title = TITLES[record.type]
    if isinstance(error, AccessError) and not put and not store.remote:
        return AccessError(f"{title} cannot be recorded: {error}", advice="")
    return OutcomeUnknownError(f"cannot determine whether {title} is recorded in {store.url}: {error}")


async def infer_root(store: Store) -> str | None:
    """Return the run id in the first intact record, because a single damaged file must not make a run unreadable."""
    for key in sorted([info.key async for info in store.list("log/") if sequence(info.key) is not None]):
        try:
            root = unseal(await get_small(store, key, MAX_RECORD), key).get("root")
        except (CorruptError, NotFoundError):
            continue
        if isinstance(root, str):
            return root
    return None


# -- trimming --


GRACE_S = 60.0  # seconds between a new floor and the deletion, in a remote store
AT_ONCE = 64  # number of files to delete in one call


class Trimmer:
    """Deletes old records of the log of a store."""

    def __init__(self) -> None:
        self._floor, self._since = 0, 0.0  # the newest floor, and the time when it was first listed
        self._done = False  # True if all records below the floor are deleted

    async def step(self, log: RunLog, owner: Acquire | None) -> None:
        """Delete the records below a new floor. An error is logged, and the next call tries again.

        owner: the owner on whose behalf this runs; None skips the check. If a record that counts is damaged, nothing is
            deleted.
        """
        newest = (log.state.next_seq - 1) // SNAPSHOT_EVERY * SNAPSHOT_EVERY
        if newest <= SNAPSHOT_EVERY or log.state.damaged or (self._done and newest == self._floor + SNAPSHOT_EVERY):
            return
        try:
            log.check_owner(owner)
            seen = await log.list_records()
            if seen.floor != self._floor:
                self._floor, self._since, self._done = seen.floor, time.monotonic(), False
            if log.store.remote and time.monotonic() < self._since + GRACE_S:
                return  # another reader may still be reading the records that it listed
            if not seen.below or await _stays(log, seen):
                await _delete(log, seen)
                self._done = True
        except FencedError:
            pass  # the next save raises this error
        except CheckpointError as error:
            logger.warning("%s: could not delete old log records, retrying later: %s", log.store.url, error)


async def _stays(log: RunLog, seen: Listed) -> bool:
    """Return True if both SNAPSHOTs of the listing are still intact.

    No fsync is needed, because each put syncs the folder, and many records were put after the older SNAPSHOT.
    """
    for seq in seen.snapshots:
        if log.snapshot(seq, await log.read(seq, seen.sizes[seq])) is None:
            return False
    return True


async def _delete(log: RunLog, seen: Listed) -> None:
    keys = [record_key(seq) for seq in sorted(seen.below)]
    for start in range(0, len(keys), AT_ONCE):
        await log.check_same()
        await log.store.delete_many(keys[start : start + AT_ONCE])
        point("log.trimming")
