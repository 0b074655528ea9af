"""The run log: numbered records, created only if absent; the state of a run is a fold over them.

    log/000000000042.json    {"seq", "prev", "root", "epoch", "id", "type", "body", "digest"}

`prev` is the SHA-256 of the bytes of the record before; `root` the run's id; `id` the request that made the record, so
that a writer who lost the answer finds its own success again. Types and bodies:

    ACQUIRE   epoch, nonce, restored      a job takes the run over, or goes back to `restored` (an attempt or null)
    BEGIN     attempt, pins               an open attempt builds on these checkpoints: they stay until it ends
    HELD      as COMMIT                   on a disk that only some ranks see: their parts are here
    COMMIT    attempt, world, parts, index, finite, reason    a checkpoint exists (there: its other parts do too);
              needs                       which older checkpoints it was built on, if it was
    ABORT     attempt, reason             this attempt never will
    PLAN      retire, delete, reason      checkpoints given up and the files that go with them; why, if not by retention
    DOUBT     attempt, ranges             bytes of it that were found damaged, by pack and offset: not to be built on
    KEEP      attempt, note, keep         never retire this one; `keep` false takes that back
    SNAPSHOT  everything that follows from the records before it

Each record whose number is a multiple of SNAPSHOT_EVERY is a SNAPSHOT, so that a reader finds the newest one by its
name, and reads that and what follows, however long the log has become. Records are never deleted: a late writer must
not find the place of an old one free.

A damaged or missing record does not make a run unreadable: it is skipped, reported in `damaged`, and nothing is ever
deleted from such a run, since the record might have protected it. Nor is a SNAPSHOT made of what is left.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
from ckpt.events import point
from ckpt.format.digest import file_digest
from ckpt.format.manifest import (
    MAX_EPOCH,
    MAX_FORMAT,
    MAX_WORLD,
    Attempt,
    needs_texts,
    read_format,
    read_needs,
    seal,
    unseal,
)
from ckpt.format.manifest import owner as owner_of
from ckpt.store import Store, get_small

_DICE = SystemRandom()  # the training's own random numbers are not ours to draw
TYPES = ("ACQUIRE", "BEGIN", "HELD", "COMMIT", "ABORT", "PLAN", "KEEP", "DOUBT", "SNAPSHOT")
SNAPSHOT_EVERY = 256
LOOSE = {
    "reasons",
    "requests",
    "doubts",
}  # in a SNAPSHOT: of these only the last ones, and versions may differ in how many
MAX_PARTS = 1_000_000  # in a SNAPSHOT: with more it could become too large to be read, and is left out
MAX_DOUBTS = 10_000
MAX_REASONS = 64  # why attempts ended, of so many of the last ones, in a SNAPSHOT
MAX_RECORD = 256 << 20
MAX_GAP = 100_000  # missing records, in all, before ones that are believed to belong to the log
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Acquire:
    """An incarnation, or a rollback inside one."""

    epoch: int
    nonce: str
    restored: Attempt | None


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint. `parts`: (rank, try, digest of the part) of every rank whose part is in this place, of `world`
    ranks that saved; `index`: digest of the merged table; `needs`: the older checkpoints that it was built on, in their
    order: it uses packs that they use. They may be retired since: what keeps the packs is that this one uses them."""

    attempt: Attempt
    world: int
    parts: tuple[tuple[int, int, str], ...]
    index: str
    finite: bool | None = None
    reason: str = "due"  # or "ring": persisted because the trainer died, besides the cadence
    needs: tuple[Attempt, ...] = ()

    @property
    def step(self) -> int:
        return self.attempt.step

    @property
    def whole(self) -> bool:
        """Whether this place has the parts of all ranks."""
        return len(self.parts) == self.world

    @property
    def full(self) -> bool:
        """Whether all its bytes are in packs of its own. Else it is an increment."""
        return not self.needs


@dataclass
class RunState:
    """The fold of a log up to `next_seq`."""

    next_seq: int = 0
    last: str = ""  # SHA-256 of the newest record's bytes
    acquires: list[Acquire] = field(default_factory=list)
    commits: dict[Attempt, Commit] = field(default_factory=dict)  # live ones
    held: dict[Attempt, Commit] = field(default_factory=dict)  # our parts of it are here; not known of the others
    retired: set[Attempt] = field(default_factory=set)
    aborted: set[Attempt] = field(default_factory=set)
    reasons: dict[Attempt, str] = field(default_factory=dict)  # why they were aborted, or taken back
    pins: dict[Attempt, tuple[Attempt, ...]] = field(default_factory=dict)  # what open attempts build on
    kept: dict[Attempt, str] = field(default_factory=dict)  # with the note that says why
    doubts: set[tuple[str, int]] = field(default_factory=set)  # packs and offsets of what was found damaged
    requests: dict[str, int] = field(default_factory=dict)  # of the last SNAPSHOT_EVERY records at least
    damaged: list[int] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        return self.acquires[-1].epoch if self.acquires else 0

    def ended(self, attempt: Attempt) -> bool:
        return attempt in self.commits or attempt in self.retired or attempt in self.aborted

    def lineage(self) -> list[Commit]:
        """Live checkpoints of the present history, newest first.

        An epoch that went back to an attempt continues from there: what was saved beyond it is not part of the history
        any more, even before the new epoch has saved anything. So a rollback cannot be undone by a restart.
        """
        history = in_history(self.acquires, self.commits)
        return [self.commits[attempt] for attempt in history]


def in_history(acquires: Iterable[Acquire], attempts: Iterable[Attempt]) -> list[Attempt]:
    """The attempts that belong to the present history, newest first; see `RunState.lineage`."""
    restored = {a.epoch: a.restored for a in acquires}
    by_epoch: dict[int, list[Attempt]] = {}
    for attempt in attempts:
        by_epoch.setdefault(attempt.epoch, []).append(attempt)
    found: list[Attempt] = []
    limit: tuple[float, float] = (float("inf"), float("inf"))
    for epoch in sorted(restored.keys() | by_epoch.keys(), reverse=True):
        if epoch > limit[0]:
            continue  # an incarnation that a later one went back behind
        last_step = limit[1] if epoch == limit[0] else float("inf")
        here = [a for a in by_epoch.get(epoch, ()) if a.step <= last_step]
        found += sorted(here, key=lambda a: a.step, reverse=True)
        back = restored.get(epoch)
        if back is not None:
            limit = min(limit, (back.epoch, back.step))
    return found


def fold(state: RunState, record: dict[str, Any]) -> None:
    """Apply one record. CorruptError if its body is impossible, before anything is changed."""
    try:
        body, kind, request, seq = record["body"], record["type"], str(record["id"]), record["seq"]
        if kind == "ACQUIRE":
            restored = None if body["restored"] is None else Attempt.parse(body["restored"])
            acquire = Acquire(body["epoch"], str(body["nonce"]), restored)
            if type(acquire.epoch) is not int or not state.epoch < acquire.epoch < MAX_EPOCH:
                raise CorruptError(f"epoch {acquire.epoch} after {state.epoch}")
            state.acquires.append(acquire)
        elif kind == "SNAPSHOT":
            mine = summary(state)
            if any(body[key] != mine[key] for key in mine.keys() - LOOSE):  # what a later version adds is its own
                raise CorruptError(f"record {seq} says something else than the records before it")
        elif kind == "PLAN":
            retire = [Attempt.parse(text) for text in body["retire"]]
            for attempt in retire:
                state.commits.pop(attempt, None)
                state.held.pop(attempt, None)
                state.pins.pop(attempt, None)
                state.retired.add(attempt)
                if "reason" in body:
                    state.reasons[attempt] = str(body["reason"])[:500]
        else:
            attempt = Attempt.parse(body["attempt"])
            if kind in ("COMMIT", "HELD"):
                commit = _commit(attempt, body)
                if not state.ended(attempt):
                    (state.commits if kind == "COMMIT" else state.held)[attempt] = commit
            elif kind == "ABORT" and not state.ended(attempt):
                state.reasons[attempt] = str(body["reason"])[:500]
                state.aborted.add(attempt)
            elif kind == "KEEP" and body.get("keep", True) is False:
                state.kept.pop(attempt, None)
            elif kind == "KEEP":
                state.kept[attempt] = str(body["note"])[:500]
            elif kind == "DOUBT":
                state.doubts |= {(str(pack), int(offset)) for pack, offset in body["ranges"][:MAX_DOUBTS]}
            elif kind == "BEGIN":
                pins = read_needs(body["pins"], attempt)
                if not state.ended(attempt):  # else nothing would ever take them back
                    state.pins[attempt] = pins
            elif kind not in TYPES:
                raise CorruptError(f"not a record: {kind!r}")
            if kind in ("COMMIT", "ABORT"):
                state.pins.pop(attempt, None)
                state.held.pop(attempt, None)
        state.requests[request] = seq
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"impossible record: {error}") from None


def _commit(attempt: Attempt, body: dict[str, Any]) -> Commit:
    """Checked: parts in the order of ranks, numbers and digests that can be made into names."""
    parts = tuple((rank, number, digest) for rank, number, digest in body["parts"])
    world, index, finite = body["world"], body["index"], body["finite"]
    if type(world) is not int or not 1 <= len(parts) <= world <= MAX_WORLD or not _is_digest(index):
        raise CorruptError(f"attempt {attempt} is not whole")
    last = -1
    for rank, number, digest in parts:
        if (type(rank), type(number)) != (int, int) or not 0 <= number < 10**9 or not _is_digest(digest):
            raise CorruptError(f"impossible part of attempt {attempt}")
        if not last < rank < world:
            raise CorruptError(f"impossible rank {rank} in attempt {attempt}")
        last = rank
    if finite is not None and type(finite) is not bool:
        raise CorruptError(f"impossible finite: {finite!r}")
    needs = read_needs(body.get("needs", []), attempt)
    return Commit(attempt, world, parts, index, finite, str(body["reason"]), needs)


def commit_body(commit: Commit) -> dict[str, Any]:
    """What a COMMIT or HELD record says. Of a full checkpoint it says no needs, as before there were increments."""
    body: dict[str, Any] = {
        "attempt": str(commit.attempt),
        "world": commit.world,
        "parts": [list(part) for part in commit.parts],
        "index": commit.index,
        "finite": commit.finite,
        "reason": commit.reason,
    }
    return body | {"needs": needs_texts(commit.needs)} if commit.needs else body


def summary(state: RunState) -> dict[str, Any]:
    """The body of a SNAPSHOT at `state.next_seq`: the same, whoever makes it and however far back he has read."""
    seq = state.next_seq
    return {
        "acquires": [[a.epoch, a.nonce, a.restored and str(a.restored)] for a in state.acquires],
        "commits": [commit_body(state.commits[a]) for a in sorted(state.commits)],
        "held": [commit_body(state.held[a]) for a in sorted(state.held)],
        "retired": _grouped(state.retired),
        "aborted": _grouped(state.aborted),
        "reasons": [[str(a), why] for a, why in list(state.reasons.items())[-MAX_REASONS:]],
        "pins": {str(a): needs_texts(state.pins[a]) for a in sorted(state.pins)},
        "kept": [[str(a), note] for a, note in sorted(state.kept.items())],
        "doubts": [list(one) for one in sorted(state.doubts)[:MAX_DOUBTS]],
        "requests": {request: n for request, n in state.requests.items() if n >= seq - SNAPSHOT_EVERY},
    }


def expand(body: dict[str, Any]) -> RunState:
    """The state that a SNAPSHOT says. CorruptError if that is impossible."""
    try:
        state = RunState(
            commits={(a := Attempt.parse(one["attempt"])): _commit(a, one) for one in body["commits"]},
            held={(a := Attempt.parse(one["attempt"])): _commit(a, one) for one in body["held"]},
            retired=_ungrouped(body["retired"]),
            aborted=_ungrouped(body["aborted"]),
            reasons={Attempt.parse(a): str(why) for a, why in body.get("reasons", ())},
            pins={(a := Attempt.parse(text)): read_needs(pins, a) for text, pins in body["pins"].items()},
            kept={Attempt.parse(a): str(note) for a, note in body["kept"]},
            doubts={(str(pack), int(offset)) for pack, offset in body.get("doubts", ())},
            requests={str(request): int(n) for request, n in body.get("requests", {}).items()},
        )
        for epoch, nonce, restored in body["acquires"]:
            if type(epoch) is not int or not state.epoch < epoch < MAX_EPOCH:
                raise CorruptError(f"epoch {epoch!r} after {state.epoch}")
            state.acquires.append(Acquire(epoch, str(nonce), None if restored is None else Attempt.parse(restored)))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptError(f"impossible snapshot: {error}") from None
    return state


def _grouped(attempts: Iterable[Attempt]) -> dict[str, list[int]]:
    """Thousands of attempts in few bytes: steps by `<epoch>.<nonce>`."""
    found: dict[str, list[int]] = {}
    for attempt in sorted(attempts):
        found.setdefault(f"{attempt.epoch}.{attempt.nonce}", []).append(attempt.step)
    return found


def _ungrouped(groups: dict[str, list[int]]) -> set[Attempt]:
    return {Attempt.parse(f"{owner}-{step}") for owner, steps in groups.items() for step in steps}


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def record_key(seq: int) -> str:
    return f"log/{seq:012d}.json"


@dataclass(frozen=True, slots=True)
class Record:
    """What an append wants to add. `id` names the request: the same id is never appended twice."""

    type: str
    body: dict[str, Any]
    id: str


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
                if self.store.remote and not self._is_sound(seq, raw):
                    raw = await self._read(seq, sizes.get(seq))  # what came may have been damaged on its way
                for missing in range(self.state.next_seq, seq):
                    self._apply(missing, None)
                self._apply(seq, raw)
        return self.state

    def _is_sound(self, seq: int, raw: bytes | None) -> bool:
        try:
            self._unsealed(seq, raw)
        except CorruptError:
            return False
        return True

    async def _jump(self, sizes: dict[int, int], end: int) -> None:
        """To the newest sound SNAPSHOT, if there is one."""
        for seq in range((end - 1) // SNAPSHOT_EVERY * SNAPSHOT_EVERY, 0, -SNAPSHOT_EVERY):
            raw = await self._read(seq, sizes.get(seq))
            if self.store.remote and not self._is_sound(seq, raw):
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
        if size is None or size > MAX_RECORD:
            return None
        try:
            return bytes(await self.store.get(record_key(seq)))
        except NotFoundError:
            return None

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
                if due := self._snapshot_due():
                    record = due
                raw = self._sealed(record, state)
                try:
                    await self.store.put(record_key(state.next_seq), raw, create=True)
                except ExistsError:
                    await self._check_place(state.next_seq)
                    if time.monotonic() > end:
                        raise
                    await asyncio.sleep(_DICE.uniform(0, 0.02))
                    continue
                except FullError:
                    raise
                except StoreError as error:
                    # A disk that fails is no network that lost a reply: there nothing is tried twice.
                    if not (error.retryable and self.store.remote) or time.monotonic() > end:
                        raise OutcomeUnknownError(f"a {record.type} may or may not have landed: {error}") from error
                    await asyncio.sleep(_DICE.uniform(0, 0.2))
                    continue
                self._apply(state.next_seq, raw)
                point("log.appended")
                if record is not due:
                    return state

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


def live_packs(state: RunState, packs: Iterable[str], used: Iterable[str]) -> set[str]:
    """Of the listed packs, those that must stay: `used` by live checkpoints, or of an attempt still open.

    What open attempts take from older checkpoints is `used` by these, which are pinned, and stay as long.
    """
    protected = set(used)
    return {key for key in packs if key in protected or (a := owner_of(key)) is None or not state.ended(a)}
