"""From memory to durable places: what a writer writes, commits, retires, and persists after a fault.

A `Persister` knows the run's owner, its tiers and their logs. It is told what to write by the trainer, and by the
writer when the trainer is gone or cannot come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from typing import Any

from ckpt import events
from ckpt.checkpoint import commit, promote
from ckpt.checkpoint.byte_source import ByteSource, InMemory, InStore, bases_in, bases_near, no_bases
from ckpt.checkpoint.in_use import check_free
from ckpt.checkpoint.open_tier import OpenTier, open_place, renew
from ckpt.checkpoint.retention import remember_packs
from ckpt.checkpoint.settle import settle
from ckpt.checkpoint.write import RankSnapshot, WrittenPart
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    FencedError,
    FullError,
    SaveError,
    SkippedError,
    StoreError,
    UsageError,
)
from ckpt.format.digest import blob_digest
from ckpt.format.layout import Layout
from ckpt.format.manifest import Attempt, part_key, rank_and_try, table_key
from ckpt.format.manifest import owner as owner_of
from ckpt.format.table import Table
from ckpt.goodput.ledger import Account
from ckpt.ipc import requests
from ckpt.ipc.arena import Arena, Label
from ckpt.ipc.notes import HeldNote, SaidNote, StoredNote, UnpinnedNote
from ckpt.ipc.protocol import Note
from ckpt.ipc.requests import SavedInTier, TierFound
from ckpt.redo.append import holds_logs
from ckpt.runlog.log import Acquire, Commit, RunLog, in_history
from ckpt.writer.held_memory import HeldMemory
from ckpt.writer.throttle import IdleCores, threads

COMMON_S = 1.0  # until the step before the newest will do, if not all ranks have the newest
OTHERS_S = 5.0  # for other ranks to bring theirs, when ours is written
FAR_QUEUE = 2  # checkpoints on their way from memory to a place that is slow, the one that waits among them
FAR_PATIENCE = 6  # how much longer ranks wait for each other's parts where these take their time
LOST_S = 5.0  # for a place to say which run it is
LATE_S = 30.0  # for the parts of other ranks, when nobody is left to wait for them


class Persister:
    """Everything runs in the writer's event loop; blocking work goes to threads.

    `tell`: sends the trainer a message, if it is there; `spawn`: runs something beside; `pace`: what threads that
    compress call after a while of work, with its seconds, to be held back.
    """

    def __init__(
        self,
        held_memory: HeldMemory,
        tell: Callable[[Note], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        pace: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.held_memory, self.tell, self.spawn, self.pace = held_memory, tell, spawn, pace
        self.hurried = 0  # saves that somebody waits for who has little time
        self.adoptions = 0  # trainers that have taken this writer over
        self.owner: Acquire | None = None
        self.successor = ""  # the nonce of the owner that our trainer is about to be
        self.acquires: list[Acquire] = []  # the history that the snapshots in memory belong to
        self.tiers: list[OpenTier] = []
        self.writing: dict[tuple[str, int], int] = {}  # (arena, slot) -> writes in progress
        self.settling: dict[int, int] = {}  # parts that are written and not committed yet, by adoption
        self._late = 0  # the same of what was written out of turn: other ranks may never bring their parts
        self.ownership = asyncio.Lock()  # held while the run is taken over by us
        self.tries: dict[Attempt, int] = {}
        self.retracted: set[Attempt] = set()
        self._resuming: asyncio.Task[None] | None = None
        self._parts: dict[tuple[str, Attempt], asyncio.Future[bool]] = {}  # by place: whether our part is stored
        self.first_try = 0
        self.linger_s = 600.0
        self.commit_s = 600.0  # how long the parts of other ranks are waited for

    def _rest(self, seconds: float) -> None:
        """Between two pieces of work: as long as the training wants, unless there is no time."""
        if not self.hurried:
            self.pace(seconds)

    def _forget_old(self) -> None:
        held = self.held_memory.forget_old()
        self.tries = {attempt: n for attempt, n in self.tries.items() if attempt in held}

    # -- taking the run over --

    async def open(
        self, request: requests.OpenRun, ours: Callable[[Account], bool] = lambda account: False
    ) -> list[TierFound]:
        """Open the durable places, without changing anything in them. With `check`: InUseError if somebody trains the
        run; `ours`: whether an account is of a trainer of this writer that has ended."""
        self.linger_s, self.commit_s = request.linger_s, request.commit_s
        self.first_try, self.successor = request.first_try, request.successor
        self.acquires = [_acquire(*row) for row in request.acquires]
        begun = self.adoptions
        known = {tier.url: tier for tier in self.tiers}  # one of them may be writing the ring at this moment
        tiers: list[OpenTier] = []
        for spec in request.tiers:
            tier = known.pop(spec["url"], None)
            if tier is not None and tier.url in await self.lost([tier]):
                tier = None  # what was there was removed, and is no run or another one now
            if tier is None:
                # A writer that takes the place of a dead one must not fail for a bucket that is out of reach just now.
                tier = await open_place(spec, later=bool(self.first_try and tiers))
                tier.tell = self.tell
                tier.encoder.threads, tier.encoder.pace, tier.encoder.idle = threads(), self._rest, IdleCores()
            else:
                await renew(tier, spec)
            tiers.append(tier)
        if request.check:
            for tier in (tier for tier in tiers if tier.opened):
                await check_free(tier.log, lambda text: self.tell(SaidNote(text)), ours)
        self._check_still(begun)
        self.tiers = tiers
        for tier in tiers:  # what was kept here for a place that is gone
            tier.anchors = {url: a for url, a in tier.anchors.items() if any(url == t.url for t in tiers[1:])}
        return [_found(tier) for tier in tiers]

    def _check_still(self, begun: int) -> None:
        """FencedError if another trainer has come meanwhile: nothing of what it does must be undone."""
        if begun != self.adoptions:
            raise FencedError("another process has taken this run over")

    async def lost(self, tiers: Iterable[OpenTier] | None = None) -> list[str]:
        """Places that are not the run any more that was opened there; of one that does not answer nothing is known."""
        found = []
        for tier in (tier for tier in (self.tiers if tiers is None else tiers) if tier.opened):
            with contextlib.suppress(CheckpointError, TimeoutError):
                if not await asyncio.wait_for(tier.log.same(), LOST_S):
                    found.append(tier.url)
        return found

    async def acquire(self, request: requests.AcquireRun) -> list[int]:
        """Take the places numbered `tiers` over, for all ranks. With `restored` as a rollback of the present owner."""
        begun = self.adoptions
        nonce, back = request.nonce, None if request.restored is None else Attempt.parse(request.restored)
        tiers = [self.tiers[i] for i in request.tiers]
        for tier in tiers if back is not None else ():
            await tier.log.refresh()
            if all(acquire.nonce != nonce for acquire in tier.log.state.acquires):
                tier.log.check_owner(self._mine())
        async with self.ownership:
            self._check_still(begun)
            floor = max([request.floor, *(t.log.state.epoch for t in tiers)])
            taken = [await commit.acquire(t.log, nonce, restored=back, floor=floor) for t in tiers]
        return sorted({a.epoch for a in taken} or {floor + 1})

    async def own(self, request: requests.OwnRun) -> list[requests.PartsHere]:
        """All ranks have agreed who the owner is, and this writer's part in committing."""
        owner, begun = _acquire(*request.owner), self.adoptions
        async with self.ownership:
            for tier in (tier for tier in self.tiers if tier.opened):
                await tier.log.refresh()  # the writer of another rank appended it: by an older log we would be fenced
            self._check_still(begun)
            self._become(owner)
        for tier, (ranks, place, world) in zip(self.tiers, request.roles, strict=True):
            tier.role = commit.Role(tuple(ranks), place, world)
            if tier.opened:
                await tier.log.refresh()  # another rank's writer has appended who the owner is
        for tier in (tier for tier in self.tiers if tier.opened):
            tier.scrub_slowly()
        for i in request.recover:
            tier = self.tiers[i]
            wanted = self._to_promote(tier)
            spared = frozenset(tier.in_flight | wanted)
            await commit.recover(tier.log, self._mine(), spared, partial=tier.role.partial)
            await tier.drop_uploads(self._mine(), wanted)
        parts = []
        for i in request.recover:
            state = self.tiers[i].log.state
            if self.tiers[i].role.partial:
                for attempt, one in {**state.held, **state.commits}.items():
                    ranks = [rank for rank, _, _ in one.parts]
                    parts.append(requests.PartsHere(i, str(attempt), one.world, ranks))
        return parts

    def _mine(self) -> Acquire:
        if self.owner is None:
            raise UsageError("the run has not been opened")
        return self.owner

    def _succeed(self, log: RunLog) -> None:
        """Go on as the owner that the log names, if it is the successor: the trainer may die before it can say so."""
        if log.state.acquires and log.state.acquires[-1].nonce == self.successor:
            self._become(log.state.acquires[-1])

    def _become(self, owner: Acquire) -> None:
        if self.owner is None or (owner.epoch, owner.nonce) != (self.owner.epoch, self.owner.nonce):
            self.owner = owner
            self.acquires.append(owner)

    async def doubt(self, request: requests.Doubt) -> None:
        """The trainer has found damage in a place when it restored."""
        ranges = set(request.ranges)
        for tier in (tier for tier in self.tiers if tier.url == request.url):
            tier.encoder.suspects |= ranges
            await tier.prepare()
            await commit.doubt(tier.log, self._mine(), Attempt.parse(request.attempt), ranges)

    async def complete(self, request: requests.Complete) -> None:
        """The other places hold their parts of these attempts too."""
        tier = self.tiers[request.tier]
        for attempt in request.attempts:
            try:
                await commit.complete(tier.log, self._mine(), Attempt.parse(attempt))
            except SaveError as error:  # what it builds on is gone: it has been ended
                events.log.warning("%s: %s", tier.url, error)

    # -- writing --

    async def write(self, request: requests.WriteSlot) -> int:
        """Make a checkpoint of a sealed slot in one tier; when it is durable, how many bytes were stored for it.

        The slot is free again once `stored` is told. A further tier that is busy, or fails, gets the step from the
        nearest one, so that memory does not wait for a network.
        """
        tier, attempt = self.tiers[request.tier], Attempt.parse(request.attempt)
        arena, slot = self.held_memory.arenas[request.arena], request.slot
        told = StoredNote(request.tier, request.attempt)
        near = self._near(tier)
        if near is not None and (near.url, attempt) not in self._parts and attempt not in near.log.state.commits:
            near = None  # not due there
        part = self._parts.setdefault((tier.url, attempt), asyncio.get_running_loop().create_future())
        if near is not None:
            near.promoting[attempt] += 1
        written: WrittenPart | None = None
        try:
            with self._settles():
                label = arena.label(slot)
                if request.stored or label is None or label.attempt != attempt:
                    # A predecessor stored it, and died before it was committed: the slot may be used again any time.
                    written = await self._stored_by_predecessor(tier, near, attempt, slot)
                elif near is not None and (tier.busy.locked() or tier.waiting):
                    written = await self._promote(tier, near, attempt, lambda: self.tell(told))
                else:
                    written = await self._store_or_promote(tier, near, arena, slot, label, lambda: self.tell(told))
                _resolve(part, written is not None or attempt in tier.log.state.commits)
                self.tell(told)
                if written is not None:
                    await self._settle(tier, written)
        except Exception as error:
            tier.flow.fail(error)
            raise
        finally:
            _resolve(part, False)
            self._parts.pop((tier.url, attempt), None)
            if near is not None:
                near.unpin(attempt)
        packs = () if written is None else written.part.packs
        return sum(pack.size for pack in packs if owner_of(pack.key) == attempt)

    async def _stored_by_predecessor(
        self, tier: OpenTier, near: OpenTier | None, attempt: Attempt, slot: int
    ) -> WrittenPart | None:
        rank = tier.role.ranks[tier.role.place]
        written = await commit.stored_part(tier.log.store, attempt, rank)
        if written is None and near is None and tier is not self.tiers[0]:
            near = self._near(tier)
        if written is None and near is not None:
            return await self._promote(tier, near, attempt, lambda: None)
        if written is None:
            raise SaveError(f"slot {slot} does not hold {attempt} any more")
        tier.in_flight.add(attempt)
        return written

    # -- from a nearer place --

    def _near(self, tier: OpenTier) -> OpenTier | None:
        """From where a further tier is filled: a nearest tier that is quicker than the network."""
        nearest = self.tiers[0] if self.tiers else None
        return nearest if nearest is not None and nearest is not tier and not nearest.store.remote else None

    async def _store_or_promote(
        self, tier: OpenTier, near: OpenTier | None, arena: Arena, slot: int, label: Label, free: Callable[[], None]
    ) -> WrittenPart | None:
        """From memory, which is quickest; from the nearest tier, if that fails."""
        if near is None and tier.store.remote:
            return await self._store_far(tier, arena, slot, label, free)
        try:
            return await self._store(tier, arena, slot, label, last=near is None)
        except FencedError:
            raise
        except CheckpointError as error:
            if near is None or label.attempt is None:
                raise
            events.log.warning("%s: step %d is taken from %s: %s", tier.url, label.attempt.step, near.url, error)
            return await self._promote(tier, near, label.attempt, free)

    async def _store_far(
        self, tier: OpenTier, arena: Arena, slot: int, label: Label, free: Callable[[], None]
    ) -> WrittenPart | None:
        """With nothing nearer one may wait behind the one on its way: the other slots are for the training."""
        assert label.attempt is not None
        if tier.waiting >= FAR_QUEUE:
            free()
            error = _too_slow(tier, label.attempt)
            self.spawn(self._tell_others(tier, label.attempt, tier.role.ranks[tier.role.place], error))
            raise error
        tier.waiting += 1
        try:
            return await self._store(tier, arena, slot, label)
        finally:
            tier.waiting -= 1

    async def _promote(
        self, tier: OpenTier, near: OpenTier, attempt: Attempt, free: Callable[[], None]
    ) -> WrittenPart | None:
        """Copy this rank's part from a nearer place, when it is there; None if the attempt is a checkpoint already.

        `free` is called when memory is not needed for it any more. SkippedError if the further place cannot keep up.
        """
        rank = near.role.ranks[near.role.place]
        tier.in_flight.add(attempt)
        tier.waiting += 1
        try:
            if tier.waiting > promote.BACKLOG or len(tier.in_flight) > promote.BACKLOG + 2:
                free()
                raise _too_slow(tier, attempt)
            known = self._parts.get((near.url, attempt))
            if known is not None and not await asyncio.shield(known):
                raise SaveError(f"step {attempt.step} is not in {near.url} either")
            free()
            async with tier.busy:
                await tier.prepare()
                self._check_wanted(tier, attempt)
                if tier.log.state.ended(attempt):
                    tier.in_flight.discard(attempt)
                    return None
                here = await commit.stored_part(near.store, attempt, rank)
                if here is None:
                    raise SaveError(f"step {attempt.step} is not in {near.url} any more")
                written = await self._transfer(tier, near, here)
            self._check_wanted(tier, attempt)
            return written
        except BaseException as error:
            tier.in_flight.discard(attempt)
            self.spawn(self._tell_others(tier, attempt, rank, error))
            raise
        finally:
            tier.waiting -= 1

    async def _transfer(self, tier: OpenTier, near: OpenTier, here: WrittenPart) -> WrittenPart:
        """A part of a nearer place, stored as the further one stores its parts; taken up where a crash cut it off."""
        attempt, part = Attempt.parse(here.part.attempt), here.part
        there = await commit.stored_part(tier.store, attempt, part.rank)
        if there is not None:
            return there
        layout, source = Layout.from_json(part.layout), InStore(near.store, here.table)
        previous = await tier.encoder.previous(tier.log, attempt, layout)
        tried = [info.key async for info in tier.store.list(f"packs/{attempt}.{part.rank}.")]
        plain = not part.needs and not here.table.codec.any() and len(part.packs) == 1
        if plain and set(tried) <= {part.packs[0].key} and not tier.encoder.worth(tier.store, source, layout, previous):
            with tier.flow.writing(attempt.step, part.packs[0].size):
                written = await promote.copy_part(
                    near.store, tier.store, attempt, part.rank, part.number, on_bytes=tier.flow.add
                )
            tier.encoder.remember(written)
            return written
        tried += [info.key async for info in tier.store.list(f"parts/{attempt}.{part.rank}.")]
        number = max([self.first_try, *(rank_and_try(key)[1] + 1 for key in tried)])
        snapshot = RankSnapshot(attempt, layout, memoryview(b""), part.values, part.finite)
        return await self._encode(tier, snapshot, source, number, reason=part.reason)

    def _check_wanted(self, tier: OpenTier, attempt: Attempt) -> None:
        """Not if it was taken back, or another rank has given it up."""
        state = tier.log.state
        if attempt in self.retracted:
            raise SaveError(f"step {attempt.step} was taken back")
        if attempt in state.aborted or (attempt in state.retired and attempt in state.reasons):
            raise commit.given_up(state, attempt)

    def _to_promote(self, tier: OpenTier) -> set[Attempt]:
        """What a further tier may still get from the nearest, from before a crash: not to be given up there."""
        near = self._near(tier)
        if near is None:
            return set()
        return {commit.attempt for commit in self._pending(near, tier)} | set(near.log.state.held)

    def resume(self) -> None:
        """After a start, when all ranks have recovered: go on with what a crash has interrupted."""
        self._resuming = self.spawn(self._resume())

    async def _resume(self) -> None:
        """The ranks share the parts that they see out. What they find pending does not depend on when they look."""
        adoptions = self.adoptions
        for tier in self.tiers[1:]:
            near = self._near(tier)
            if near is None:
                continue
            try:
                await near.log.refresh()
                await tier.prepare()
                wanted = self._pending(near, tier)
            except CheckpointError as error:
                events.log.warning("nothing of before the start is taken to %s: %s", tier.url, error)
                continue
            for one in wanted:  # one that is damaged, say, does not hold the others up
                if one.attempt not in tier.in_flight and adoptions == self.adoptions:
                    try:
                        await self._resume_one(tier, near, one)
                    except CheckpointError as error:
                        events.log.warning("step %d is not in %s: %s", one.step, tier.url, error)
                        await self._tell_others(tier, one.attempt, near.role.ranks[near.role.place], error)

    def _pending(self, near: OpenTier, tier: OpenTier) -> list[Commit]:
        return promote.pending(near.log.state, tier.log.state, tier.every, before=self._mine().epoch)

    async def _resume_one(self, tier: OpenTier, near: OpenTier, one: Commit) -> None:
        mine = one.parts[near.role.place :: len(near.role.ranks)]
        if not mine:
            return
        near.promoting[one.attempt] += 1
        tier.in_flight.add(one.attempt)
        try:
            async with tier.busy:
                here = [
                    await commit.load_part(near.store, one.attempt, rank, number, expected=digest)
                    for rank, number, digest in mine
                ]
                written = [await self._transfer(tier, near, part) for part in here]
            await self._settle(tier, written[0])
        finally:
            near.unpin(one.attempt)
            tier.in_flight.discard(one.attempt)

    # -- from memory --

    async def _store(
        self, tier: OpenTier, arena: Arena, slot: int, label: Label, reason: str = "due", *, last: bool = True
    ) -> WrittenPart | None:
        """Write this rank's part; None if the attempt is a checkpoint already.

        Alone, a failed attempt stays open: it may be written again by a higher try, and recovery ends what is left.
        With others it is given up at once, so that they need not wait; unless it is not tried for the `last` time.
        """
        with self.reading(arena, slot):
            return await self._store_slot(tier, arena, slot, label, reason, last)

    @contextlib.contextmanager
    def reading(self, arena: Arena, slot: int) -> Iterator[None]:
        """A slot is being written somewhere: whoever takes the memory over leaves it alone until it is told."""
        key, adopted = (arena.id.hex(), slot), self.adoptions
        self.writing[key] = self.writing.get(key, 0) + 1
        try:
            yield
        finally:
            self.writing[key] -= 1
            if not self.writing[key]:
                del self.writing[key]
                if adopted != self.adoptions:  # the new trainer was told that this slot is being written
                    self.tell(UnpinnedNote(arena.id.hex(), slot))

    async def _store_slot(
        self, tier: OpenTier, arena: Arena, slot: int, label: Label, reason: str, last: bool
    ) -> WrittenPart | None:
        attempt, layout = label.attempt, self.held_memory.layouts[label.layout]
        assert attempt is not None
        tier.in_flight.add(attempt)
        try:
            async with tier.busy:
                await tier.prepare()
                if attempt in tier.log.state.commits:
                    tier.in_flight.discard(attempt)
                    return None  # a predecessor did it, and could not say so
                number = self.tries.get(attempt, self.first_try)
                self.tries[attempt] = number + 1
                if arena.label(slot) != label:
                    raise SaveError(f"step {attempt.step} is not in memory any more")
                values = json.loads(bytes(arena.values(slot, label)))
                snapshot = RankSnapshot(attempt, layout, arena.data(slot, label.data_size), values, label.finite)
                async with self.ownership:
                    self._succeed(tier.log)
                    tier.log.check_owner(self._mine())

                def check() -> None:
                    # A trainer that lives may go round the ring: before it changes a byte it changes the label.
                    if arena.label(slot) != label:
                        raise SaveError(f"step {attempt.step} was overwritten in memory while it was written")

                written = await self._encode(
                    tier, snapshot, InMemory(layout, snapshot.data), number, reason=reason, check=check
                )
                if attempt in self.retracted:
                    raise SaveError(f"step {attempt.step} was taken back while it was written")
            values_digest = blob_digest(arena.values(slot, label))
            self.held_memory.digests[attempt, layout.rank] = (
                written.table.digest[: written.table.owned].tobytes() + values_digest
            )
            return written
        except BaseException as error:
            tier.in_flight.discard(attempt)
            if last and reason == "due":
                await self._tell_others(tier, attempt, layout.rank, error)
                if attempt in tier.log.state.commits:
                    return None  # the part was whole, and others were quick
            raise

    async def _encode(
        self,
        tier: OpenTier,
        snapshot: RankSnapshot,
        source: ByteSource,
        number: int,
        *,
        reason: str,
        check: Callable[[], None] = lambda: None,
    ) -> WrittenPart:
        attempt, rank = snapshot.attempt, snapshot.layout.rank

        async def begin(built_on: Attempt) -> bool:
            """The writer that commits pins what is built on; that it is still there is seen again at the commit."""
            try:
                while tier.role.place == 0:
                    mine = self._mine()
                    try:
                        await commit.begin(tier.log, mine, attempt, (built_on,))
                        break
                    except FencedError:
                        async with self.ownership:  # is it we ourselves who are taking over?
                            self._succeed(tier.log)
                            if self._mine() == mine:
                                raise
            except SaveError:
                return False
            return built_on in tier.log.state.commits

        previous = await tier.encoder.previous(tier.log, attempt, snapshot.layout)
        near = self._near(tier)
        bases = no_bases if tier.store.remote or reason == "ring" else bases_in(tier.store)  # which have to be read
        if near is not None and reason != "ring":
            known: dict[Attempt, Table | None] = {}

            async def find(older: Attempt) -> Table | None:
                if older not in known:
                    known[older] = await self._table_of(near, older, rank)
                return known[older]

            bases = bases_near(near.store, find)
        with tier.flow.writing(attempt.step, snapshot.layout.arrangement.data_size):
            written = await tier.encoder.write(
                tier.log.store,
                snapshot,
                source,
                previous,
                number=number,
                reason=reason,
                on_needs=begin,
                bases=bases,
                check=check,
            )
        if near is not None:
            self._anchor(tier, near, written)
        return written

    def _anchor(self, tier: OpenTier, near: OpenTier, written: WrittenPart) -> None:
        """Keep in the nearer place what deltas in the further one are taken against, if there are any."""
        if tier.encoder.policy.compression == "none" or not tier.encoder.uses_bases:
            near.anchors.pop(tier.url, None)
        elif not written.part.needs:
            near.anchors[tier.url] = Attempt.parse(written.part.attempt)

    async def _table_of(self, near: OpenTier, attempt: Attempt, rank: int) -> Table | None:
        """A rank's table of a checkpoint in a nearer place."""
        found = near.log.state.commits.get(attempt)
        mine = next((part for part in found.parts if part[0] == rank), None) if found is not None else None
        if mine is None:
            return None
        try:
            return (await commit.load_part(near.store, attempt, rank, mine[1], expected=mine[2])).table
        except (CorruptError, StoreError):
            return None

    async def _tell_others(self, tier: OpenTier, attempt: Attempt, rank: int, error: BaseException) -> None:
        """That this rank's part will not come, if there are others who wait for it."""
        if tier.role.world > 1 and isinstance(error, Exception) and not isinstance(error, FencedError):
            with contextlib.suppress(CheckpointError):
                await commit.abort(tier.log, self._mine(), attempt, f"rank {rank}: {error}")

    @contextlib.contextmanager
    def _settles(self) -> Iterator[None]:
        begun = self.adoptions
        self.settling[begun] = self.settling.get(begun, 0) + 1
        try:
            yield
        finally:
            self.settling[begun] -= 1

    async def _settle(self, tier: OpenTier, written: WrittenPart) -> None:
        """From a part to a checkpoint: with the parts of the other ranks, if there are any."""
        attempt = Attempt.parse(written.part.attempt)
        try:
            await self._commit(tier, written)
            if written.part.world == 1:
                remember_packs(tier.log, attempt, written.table.packs)
            own = sum(pack.size for pack in written.part.packs if owner_of(pack.key) == attempt)
            tier.flow.committed(int(written.table.length[: written.table.owned].sum()), own)
            events.log.info("step %d is a checkpoint in %s", attempt.step, tier.url)
        except FullError:
            await self._make_room(tier, attempt)
            raise
        except Exception as error:
            if written.part.world > 1:
                await self._give_up(tier, written, error)
            if attempt in tier.log.state.held:
                self._sweep_soon(tier)  # others of its kind may have been there for long
            raise
        finally:
            tier.in_flight.discard(attempt)
        await self._let_go(tier, attempt)
        self._forget_old()
        self._sweep_soon(tier)

    async def _let_go(self, tier: OpenTier, newer: Attempt) -> None:
        """What failed to be written, and keeps what it was to be built on from being retired, is not tried again once
        a newer one is there."""
        mine = self._mine()
        for attempt in [a for a in tier.log.state.pins if a < newer and a not in tier.in_flight]:
            if tier.role.place == 0 and tier.role.world == 1 and attempt.epoch <= mine.epoch:
                with contextlib.suppress(CheckpointError):
                    await commit.abort(tier.log, mine, attempt, "it could not be written, and a newer one was")

    async def _commit(self, tier: OpenTier, written: WrittenPart) -> None:
        """Commit as whoever we are by then: a restore may open our next epoch while a checkpoint is on its way."""
        part, number = written.part, self.tiers.index(tier) if tier in self.tiers else -1
        role = (
            tier.role if part.world == tier.role.world else commit.Role(tuple(range(part.world)), part.rank, part.world)
        )
        held = HeldNote(number, part.attempt)
        while True:
            mine = self._mine()
            try:
                patience_s = self.commit_s * (FAR_PATIENCE if tier.store.remote else 1)
                await settle(
                    tier.log, self._mine, written, role, deadline_s=patience_s, on_held=lambda: self.tell(held)
                )
                return
            except FencedError:
                async with self.ownership:  # is it we ourselves who are taking over?
                    self._succeed(tier.log)
                    if self._mine() == mine:
                        raise

    async def _make_room(self, tier: OpenTier, attempt: Attempt) -> None:
        """All of it was written, and then the disk was full: give the attempt up, and its space back."""
        with contextlib.suppress(CheckpointError):
            await commit.abort(tier.log, self._mine(), attempt, "no space left")
            if attempt in tier.log.state.aborted:
                for prefix in ("packs/", "parts/", "index/"):
                    for key in [i.key async for i in tier.log.store.list(f"{prefix}{attempt}")]:
                        if owner_of(key) == attempt:
                            await tier.log.store.delete(key)

    async def _give_up(self, tier: OpenTier, written: WrittenPart, error: Exception) -> None:
        """The others need not wait for a committer that failed; and our part of what they gave up takes no space."""
        part, attempt = written.part, Attempt.parse(written.part.attempt)
        with contextlib.suppress(CheckpointError):
            if not isinstance(error, FencedError) and part.reason == "due":
                await commit.abort(tier.log, self._mine(), attempt, f"rank {part.rank}: {error}")
            if attempt in tier.log.state.aborted:
                own = [pack.key for pack in part.packs if owner_of(pack.key) == attempt]
                keys = [*own, part_key(attempt, part.rank, part.number)]
                for key in [*keys, table_key(attempt, part.rank, part.number)]:
                    await tier.log.store.delete(key)

    async def retract(self, request: requests.Retract) -> None:
        """A snapshot failed, or turned out not to be of one moment: it must not be committed, or not stay so."""
        attempt, reason = Attempt.parse(request.attempt), request.reason
        self.retracted.add(attempt)
        self.held_memory.mirror.take_back(attempt)
        failures: list[CheckpointError] = []
        with self._settles():
            for tier in self.tiers:  # all of them, whatever happens in one
                try:
                    async with tier.busy:
                        await tier.prepare()
                        await commit.retract(tier.log, self._mine(), attempt, reason)
                except CheckpointError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def begun(self) -> set[Attempt]:
        """What is being made a checkpoint, somewhere, since the trainer wanted it."""
        return {attempt for _, attempt in self._parts} if self.unfinished else set()

    @property
    def unfinished(self) -> bool:
        """Whether something is; not if an earlier trainer began it, which may wait for parts that never come."""
        return bool(self.writing or self.settling.get(self.adoptions))

    async def close(self) -> None:
        """Finish what was begun, clean up, and let go of the stores."""
        if self._resuming is not None:  # the next start goes on with it
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)
        while self.unfinished:
            await asyncio.sleep(0.01)
        for tier in self.tiers:
            await tier.close(self.owner, self.tell)

    def _sweep_soon(self, tier: OpenTier) -> None:
        if tier.role.place == 0 and (tier.sweeping is None or tier.sweeping.done()):
            tier.sweeping = self.spawn(tier.sweep(self._mine(), self.tell))

    # -- the ring, after a fault --

    async def persist(
        self, deadline_s: float, *, far: bool = False, attempts: list[Attempt] | None = None
    ) -> list[SavedInTier]:
        """Have what is in memory (or these attempts) written to the nearest tier, whether the trainer lives or not.

        Waits until the newest step is durable, or at most `deadline_s`: what it began goes on after that. With `far`
        the newest one is written to the further tiers as well, for a machine that is about to go. Returns, for each
        step and tier, what became of it: `error` is empty if it is durable.
        """
        self.hurried += 1
        try:
            return await self._persist(deadline_s, far, attempts)
        finally:
            self.hurried -= 1

    async def _persist(self, deadline_s: float, far: bool, attempts: list[Attempt] | None) -> list[SavedInTier]:
        began = time.monotonic()
        steps = self.wanted(attempts)
        tasks = [self.spawn(self._drain_alive(steps))]
        if far:
            tasks += [self.spawn(self._persist_one(tier, a)) for tier in self.tiers[1:] for a in steps[:1]]
        durable_since = stored_since = 0.0
        while time.monotonic() < began + deadline_s:
            done = [attempt for attempt in steps if self.tiers and attempt in self.tiers[0].log.state.commits]
            if not self.tiers or not steps or (done[:1] == steps[:1] and all(task.done() for task in tasks)):
                break
            if all(task.done() for task in tasks):
                stored_since = stored_since or time.monotonic()
                durable_since = durable_since or (time.monotonic() if done else 0.0)
                if (done and time.monotonic() > durable_since + COMMON_S) or time.monotonic() > stored_since + OTHERS_S:
                    break  # other ranks have not come as far as this one, or do not come at all
            await asyncio.sleep(0.02)
        seconds = time.monotonic() - began
        return [
            SavedInTier(a.step, tier.url, seconds, self._missing(tier, a))
            for i, tier in enumerate(self.tiers[: None if far else 1])
            for a in (steps if i == 0 else steps[:1])
        ]

    def durable(self) -> list[tuple[int, str]]:
        """What of the memory is durable, as far as we know: step and tier, the newest first."""
        return [(a.step, t.url) for t in self.tiers[:1] for a in self.wanted() if a in t.log.state.commits]

    def wanted(self, attempts: Collection[Attempt] | None = None) -> list[Attempt]:
        """What is in memory (of these, if they are given) and belongs to the history, newest first."""
        ring = [label.attempt for _, _, label in self.held_memory.ring() if label.attempt is not None]
        found = in_history(self.acquires, set(ring) - self.retracted)
        return [attempt for attempt in found if attempts is None or attempt in attempts]

    def _missing(self, tier: OpenTier, attempt: Attempt) -> str:
        state = tier.log.state
        if attempt in state.commits:
            return ""
        if attempt in state.reasons:
            return state.reasons[attempt]
        return "not all of it is written yet" if attempt in tier.in_flight else "it could not be written"

    async def _drain_alive(self, attempts: list[Attempt]) -> None:
        with contextlib.suppress(CheckpointError):
            await self.drain(self.adoptions, attempts)

    async def _persist_one(self, tier: OpenTier, attempt: Attempt) -> None:
        """To a tier that is not the nearest."""
        for arena, slot, label in self.held_memory.ring():
            done = attempt in tier.in_flight or tier.log.state.ended(attempt)
            if label.attempt == attempt and label.layout in self.held_memory.layouts and not done:
                with contextlib.suppress(CheckpointError):
                    await self._save_late(tier, arena, slot, label)
                return

    async def drain(self, adoptions: int, attempts: list[Attempt] | None = None) -> bool:
        """Write every sealed snapshot (or those of these attempts) that is not durable yet to the nearest tier, newest
        first. False: try again."""
        complete = True
        history = set(self.wanted() if attempts is None else attempts)
        for arena, slot, label in self.held_memory.ring():
            if label.attempt not in history or label.layout not in self.held_memory.layouts:
                continue  # undone by a rollback
            for tier in self.tiers[:1]:
                if adoptions != self.adoptions:
                    return True  # the next incarnation has the memory now, and decides
                if label.attempt is None or label.attempt in tier.in_flight or tier.log.state.ended(label.attempt):
                    continue
                complete &= await self._save_late(tier, arena, slot, label)
        return complete

    async def _save_late(self, tier: OpenTier, arena: Arena, slot: int, label: Label) -> bool:
        """One snapshot of the ring, after the trainer's death. False: it has to be tried again."""
        assert label.attempt is not None
        stored = False
        try:
            written = await self._store(tier, arena, slot, label, "ring")
            stored = True
            if written is not None and written.part.world == 1:
                with self._settles():
                    await self._settle(tier, written)
            elif written is not None:  # other ranks may never have taken this step: do not wait for them here
                self.spawn(self._settle_late(tier, written))
        except FencedError:
            raise
        except Exception as error:
            tier.flow.fail(error)
            events.log.warning("step %d is not durable yet: %s", label.attempt.step, error)
            return stored and self.held_memory.layouts[label.layout].world > 1
        return True

    async def _settle_late(self, tier: OpenTier, written: WrittenPart) -> None:
        self._late += 1
        try:
            await self._settle(tier, written)
        except CheckpointError as error:
            events.log.warning("step %d is in memory only: %s", Attempt.parse(written.part.attempt).step, error)
        finally:
            self._late -= 1

    async def check_owner(self, tiers: Iterable[OpenTier] | None = None) -> None:
        """FencedError once another job has taken the run over: nobody will come for this memory then. `tiers`: where to
        look, by default everywhere."""
        for tier in (tier for tier in tiers or self.tiers if tier.opened):
            with contextlib.suppress(StoreError):
                await tier.log.refresh()
                self._succeed(tier.log)
                tier.log.check_owner(self._mine())

    async def finish_begun(self) -> None:
        """What is being written is finished; for the parts of other ranks, which may never come, only a while."""
        end = time.monotonic() + self.commit_s
        while (self.writing or any(tier.waiting for tier in self.tiers)) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        end = time.monotonic() + min(LATE_S, self.commit_s)
        while (self._late or any(self.settling.values())) and time.monotonic() < end:
            await asyncio.sleep(0.01)


def _too_slow(tier: OpenTier, attempt: Attempt) -> SkippedError:
    return SkippedError(
        f"step {attempt.step} {commit.LEFT_OUT} {tier.url}, which is slower than its steps come: raise its every=, or "
        "max_mib_s if it is throttled"
    )


def _acquire(epoch: int, nonce: str, restored: str | None) -> Acquire:
    return Acquire(epoch, nonce, None if restored is None else Attempt.parse(restored))


def _found(tier: OpenTier) -> TierFound:
    state = tier.log.state
    checkpoints = len(state.commits) + len(state.held) + holds_logs(tier.url)
    return TierFound(tier.log.root, state.epoch, checkpoints, state.damaged)


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
