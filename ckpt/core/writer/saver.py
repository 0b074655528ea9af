"""Makes checkpoints of the snapshots in memory, on request of the trainer, and of all snapshots after a fault.

    write          a sealed slot, one tier: store this rank's files, then commit them with those of the other ranks
      store_part     from memory, in the encoding of the tier, without chunks that the tier already has
      promote        from a nearer tier, if this tier is busy or has failed, so that memory is free sooner
      commit         wait for the files of other ranks (`parts.settle`); abort failed saves, so that they need not wait
    resume         after a start: copies to further tiers that a crash has interrupted
    persist        at a fault: all snapshots in memory, within a deadline
    make_durable   after the trainer's end: all snapshots in memory, until another trainer comes

Everything runs in the writer's event loop; blocking work goes to threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from ckpt import events
from ckpt.core.checkpoint import commits, retention
from ckpt.core.checkpoint.incremental import Bases, ByteSource, InMemory, InStore, bases_in, bases_near, no_bases
from ckpt.core.checkpoint.manifests import layout_of
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.write import RankSnapshot, WrittenManifest
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.manifest import CheckpointId, data_number, folder_of, is_data, manifest_key, rank_of
from ckpt.core.format.manifest import owner as owner_of
from ckpt.core.format.table import Table
from ckpt.core.ipc.arena import Arena, Label
from ckpt.core.ipc.messages import Persist, ProblemNote, Retract, SavedInTier, StoredNote, WriteSlot, WriteSlotReply
from ckpt.core.log.run_log import Commit
from ckpt.core.writer import parts
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.held_run import Background, HeldRun, PresentTrainer, handles
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.promotion import BACKLOG, Throttle, Turns, copy_part, left_out, pending
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    FencedError,
    FullError,
    RunGoneError,
    SaveError,
    SkippedError,
    StoreError,
)
from ckpt.units import count_of

FAR_PATIENCE = 6  # factor by which the timeout for the files of other ranks is longer in buckets
FAR_QUEUE = 1  # maximum number of checkpoints that wait for a write from memory to a slow tier
LATE_S = 30.0  # timeout for the files of other ranks after the trainer's end
FAR_LATE_S = 600.0  # timeout for the files of other ranks in tiers beyond the nearest, after the trainer's end
COMMON_S = 1.0  # if not all ranks have the newest step, time after which an older step is enough
OTHERS_S = 5.0  # timeout for the files of other ranks after this rank's files are written
OUT_OF_TURN = -1


@dataclass(eq=False)
class WriterSaver:
    """Saves snapshots of one run.

    reads: number of writes that are reading a slot, by arena and slot
    stored: a future for each requested write, by tier URL and checkpoint. Its result is True if the write succeeded
    settling: number of saves that are not committed yet, by the adoption number of the trainer that requested them, or
    `OUT_OF_TURN` if other ranks may not write their files
    turns: the queue of each tier, by its URL
    """

    trainer: PresentTrainer
    run: HeldRun
    memory: HeldMemory
    books: Bookkeeper
    throttle: Throttle
    background: Background
    reads: Counter[tuple[str, int]] = field(default_factory=Counter)
    stored: dict[tuple[str, CheckpointId], asyncio.Future[bool]] = field(default_factory=dict)
    settling: Counter[int] = field(default_factory=Counter)
    turns: defaultdict[str, Turns] = field(default_factory=lambda: defaultdict(Turns))
    _resuming: asyncio.Task[None] | None = None

    # -- requests of the trainer --

    @handles(WriteSlot)
    async def write(self, request: WriteSlot) -> WriteSlotReply:
        """Make a checkpoint of a sealed slot in one tier.

        `StoredNote` reports that the slot is free again. If a further tier is busy or fails, the step is later copied
        to it from the nearest tier, so that memory does not wait for a network.
        """
        tier, checkpoint = self.run.tiers[request.tier], CheckpointId.parse(request.checkpoint)
        arena = self.memory.arenas.get(request.arena)
        label = None if arena is None else arena.label(request.slot)
        size = 0 if label is None else label.data_size
        if request.replicas:
            self.memory.replicas[checkpoint] = request.replicas
        with self.books.saving(tier.url, size, checkpoint.step) as save:
            written = await self._write(tier, checkpoint, request)
            save.stored = own_bytes(written)
            if arena is None and written is not None:
                size = int(written.table.length[: written.table.owned].sum())
            return WriteSlotReply(size, save.stored)

    async def _write(self, tier: OpenTier, checkpoint: CheckpointId, request: WriteSlot) -> WrittenManifest | None:
        near = self.run.near(tier)
        if near is not None and (near.url, checkpoint) not in self.stored and checkpoint not in near.log.state.commits:
            near = None  # the step is not scheduled in the nearest tier
        part = self.stored.setdefault((tier.url, checkpoint), asyncio.get_running_loop().create_future())
        note = StoredNote(request.tier, request.checkpoint, request.arena, request.slot)
        if near is not None:
            near.promoting[checkpoint] += 1
        try:
            with self.under_way():
                written = await self._store(tier, near, checkpoint, request, note)
                _resolve(part, written is not None or checkpoint in tier.log.state.commits)
                self.trainer.tell(note)
                if written is not None:
                    await self.commit(tier, written)
        except Exception as error:
            again = bool(tier.flow.error)
            tier.flow.fail(error)
            if isinstance(error, FullError) and not (again or tier.store.remote):
                raise FullError(f"{error}. {tier.room}") from error
            raise
        finally:
            _resolve(part, False)
            self.stored.pop((tier.url, checkpoint), None)
            if near is not None:
                near.unpin(checkpoint)
        return written

    async def _store(
        self, tier: OpenTier, near: OpenTier | None, checkpoint: CheckpointId, request: WriteSlot, note: StoredNote
    ) -> WrittenManifest | None:
        """Write this rank's files, from memory or a nearer tier. Return None if the step is a checkpoint already."""
        arena, slot = self.memory.arenas.get(request.arena), request.slot
        label = None if arena is None else arena.label(slot)
        if request.stored or arena is None or label is None or label.checkpoint != checkpoint:
            # The trainer or an earlier writer stored the files without committing them. No slot has the snapshot now.
            if checkpoint in tier.log.state.commits:
                return None
            written = await commits.stored_manifest(tier.log.store, checkpoint, _rank(tier))
            if written is not None:
                tier.in_flight.add(checkpoint)
                return written
            near = near or self.run.near(tier)
            if near is None:
                raise SaveError(f"step {checkpoint.step} is no longer in memory")
            return await self.promote(tier, near, checkpoint, note)
        if near is not None and (tier.busy.locked() or tier.waiting):
            return await self.promote(tier, near, checkpoint, note)
        if near is None and tier.store.remote:
            return await self._store_far(tier, checkpoint, arena, slot, label, note)
        try:
            return await self.store_part(tier, arena, slot, label, last=near is None)
        except FencedError:
            raise
        except CheckpointError as error:
            if near is None:
                raise
            events.log.warning("%s: copying step %d from %s instead: %s", tier.url, checkpoint.step, near.url, error)
            return await self.promote(tier, near, checkpoint, note)

    async def _store_far(
        self, tier: OpenTier, checkpoint: CheckpointId, arena: Arena, slot: int, label: Label, note: StoredNote
    ) -> WrittenManifest | None:
        """Write to a slow tier that is not filled from a nearer one. Only the newest step may wait while another is
        being written, so that training keeps the other slots."""
        tier.waiting += 1
        try:
            async with self.turns[tier.url].turn(tier, checkpoint, FAR_QUEUE):
                return await self.store_part(tier, arena, slot, label)
        except SkippedError as error:
            self.trainer.tell(note)
            self.background.spawn(self._tell_others(tier, checkpoint, _rank(tier), error))
            raise
        finally:
            tier.waiting -= 1

    # -- this rank's files, from memory --

    async def store_part(
        self, tier: OpenTier, arena: Arena, slot: int, label: Label, reason: str = "due", *, last: bool = True
    ) -> WrittenManifest | None:
        """Write this rank's files from memory. Return None if the step is already a checkpoint.

        With a single rank, a failed checkpoint stays open: it may be retried with other files, or recovery ends it.
        With several ranks, it is aborted immediately so that they need not wait, unless this was not the `last` try.
        """
        checkpoint, rank = label.checkpoint, self.memory.layouts[label.layout].rank
        assert checkpoint is not None
        tier.in_flight.add(checkpoint)
        try:
            with self._reading(arena, slot):
                written = await self._store_part(tier, arena, slot, label, checkpoint, reason)
        except BaseException as error:
            tier.in_flight.discard(checkpoint)
            if isinstance(error, RunGoneError):
                await tier.remove_rest(checkpoint, rank)
            if last and reason == "due":
                await self._tell_others(tier, checkpoint, rank, error)
                if checkpoint in tier.log.state.commits:
                    return None  # the files were complete, so another rank has committed the checkpoint
            raise
        if written is None:
            tier.in_flight.discard(checkpoint)
        return written

    @contextlib.contextmanager
    def _reading(self, arena: Arena, slot: int) -> Iterator[None]:
        """Mark a slot as being read. A trainer that inherits the memory overwrites the slot only after `StoredNote`."""
        key, adopted = (arena.id.hex(), slot), self.trainer.adoptions
        self.reads[key] += 1
        try:
            yield
        finally:
            self.reads[key] -= 1
            if not self.reads[key]:
                del self.reads[key]
                if adopted != self.trainer.adoptions:  # the new trainer waits until this slot is free
                    self.trainer.tell(StoredNote(arena=key[0], slot=slot))

    async def _store_part(
        self, tier: OpenTier, arena: Arena, slot: int, label: Label, checkpoint: CheckpointId, reason: str
    ) -> WrittenManifest | None:
        def check(problem: str = "was overwritten in memory while it was written") -> None:
            self.trainer.check_not_fenced()  # the slot may be released after fencing
            # A living trainer may reuse the slot. It changes the label before it writes the first byte.
            if arena.settled(slot) != label:
                raise SaveError(f"step {checkpoint.step} {problem}")

        memory, run, layout = self.memory, self.run, self.memory.layouts[label.layout]
        async with tier.busy:
            await tier.prepare()
            if checkpoint in tier.log.state.commits:
                return None  # the previous writer committed it but died before its reply
            check("is no longer in memory")
            numbers = memory.numbers(tier.url, checkpoint, run.first_number)
            values = json.loads(bytes(arena.values(slot, label)))
            data = arena.data(slot, label.data_size)
            snapshot = RankSnapshot(checkpoint, layout, data, values, label.finite, memory.replicas.get(checkpoint, {}))
            async with run.taking:
                run.succeed(tier.log)
                tier.log.check_owner(run.mine())
            written = await self._encode(tier, snapshot, InMemory(layout, data), numbers, reason=reason, check=check)
            if checkpoint in memory.retracted:
                raise SaveError(f"step {checkpoint.step} was aborted: {memory.retracted[checkpoint]}")
        digests = written.table.digest[: written.table.owned].tobytes()
        memory.know_digests(checkpoint, layout.rank, digests + chunk_digest(arena.values(slot, label)))
        return written

    async def _encode(
        self,
        tier: OpenTier,
        snapshot: RankSnapshot,
        source: ByteSource,
        numbers: Iterator[int],
        *,
        reason: str,
        check: Callable[[], None] = lambda: None,
    ) -> WrittenManifest:
        """Write this rank's files in the encoding of this tier, without chunks that the tier already has. `check`
        raises an error if the source has changed."""
        checkpoint, layout, near = snapshot.checkpoint, snapshot.layout, self.run.near(tier)
        previous = await tier.encoder.previous(tier.log, checkpoint, layout)
        if previous is not None:
            tier.builds_on(checkpoint, previous.checkpoint)
        with tier.flow.writing(checkpoint.step, layout.arrangement.data_size):
            written = await tier.encoder.write(
                tier.log.store,
                snapshot,
                source,
                previous,
                numbers=numbers,
                reason=reason,
                bases=_bases(tier, near, layout.rank, reason),
                check=check,
                log=tier.log,
            )
        if near is not None:  # the nearer tier keeps the bases of increments in this tier
            if tier.encoder.policy.compression == "none" or not tier.encoder.uses_bases:
                near.anchors.pop(tier.url, None)
            elif not written.manifest.needs:
                near.anchors[tier.url] = checkpoint
        return written

    # -- this rank's files, from a nearer tier --

    async def promote(
        self, tier: OpenTier, near: OpenTier, checkpoint: CheckpointId, note: StoredNote
    ) -> WrittenManifest | None:
        """Copy this rank's files once a nearer tier has them. Return None if the step is already a checkpoint.

        `note` is sent once the snapshot in memory is no longer needed. Raises SkippedError if the tier is too slow.
        """
        rank = _rank(near)
        tier.in_flight.add(checkpoint)
        tier.waiting += 1
        try:
            if (unsettled := len(tier.in_flight) - tier.waiting) >= BACKLOG:
                self.trainer.tell(note)
                before = count_of(unsettled, "step")
                raise left_out(tier, checkpoint, f"still waits for other ranks' files of {before} before it")
            known = self.stored.get((near.url, checkpoint))
            if known is not None and not await asyncio.shield(known):
                raise SaveError(f"step {checkpoint.step} is not in {near.url} either")
            self.trainer.tell(note)
            async with self.turns[tier.url].turn(tier, checkpoint, BACKLOG - 1), tier.busy:
                await tier.prepare()
                self._check_wanted(tier, checkpoint)
                if tier.log.state.ended(checkpoint):
                    tier.in_flight.discard(checkpoint)
                    return None
                here = await commits.stored_manifest(near.store, checkpoint, rank)
                if here is None:
                    raise SaveError(f"step {checkpoint.step} is no longer in {near.url}")
                written = await self._transfer(tier, near, here)
            self._check_wanted(tier, checkpoint)
            return written
        except BaseException as error:
            tier.in_flight.discard(checkpoint)
            if isinstance(error, RunGoneError):
                await tier.remove_rest(checkpoint, rank)
            self.background.spawn(self._tell_others(tier, checkpoint, rank, error))
            raise
        finally:
            tier.waiting -= 1

    async def _transfer(self, tier: OpenTier, near: OpenTier, here: WrittenManifest) -> WrittenManifest:
        """Copy one rank's files from a nearer tier, in the encoding of the further tier. Resume an interrupted copy."""
        checkpoint, part = here.checkpoint, here.manifest
        there = await commits.stored_manifest(tier.store, checkpoint, part.rank)
        if there is not None:
            return there
        layout, source = layout_of(part, here.table), InStore(near.store, here.table)
        previous = await tier.encoder.previous(tier.log, checkpoint, layout)
        listed = [info.key async for info in tier.store.list(folder_of(checkpoint))]
        left = [key for key in listed if is_data(key) and rank_of(key) == part.rank]
        plain = not part.needs and not here.table.codec.any() and len(part.files) == 1
        if plain and set(left) <= {part.files[0].key} and not tier.encoder.worth(tier.store, source, layout, previous):
            with tier.flow.writing(checkpoint.step, part.files[0].size):
                written = await copy_part(near.store, tier.store, checkpoint, part.rank, on_bytes=tier.flow.add)
            tier.encoder.remember(written)
            return written
        first = max([self.run.first_number, *(data_number(key) + 1 for key in left)])
        numbers = self.memory.numbers(tier.url, checkpoint, first)
        snapshot = RankSnapshot(checkpoint, layout, memoryview(b""), part.values, part.finite, part.replicas)
        return await self._encode(tier, snapshot, source, numbers, reason=part.reason)

    def _check_wanted(self, tier: OpenTier, checkpoint: CheckpointId) -> None:
        """Raise SaveError if this writer retracted the step, or another rank aborted it."""
        state = tier.log.state
        if checkpoint in self.memory.retracted:
            raise SaveError(f"step {checkpoint.step} was aborted: {self.memory.retracted[checkpoint]}")
        if checkpoint in state.aborted or (checkpoint in state.retired and checkpoint in state.reasons):
            raise commits.given_up(state, checkpoint)

    # -- commit --

    @contextlib.contextmanager
    def under_way(self, adoption: int | None = None) -> Iterator[None]:
        """Count a save that the writer has to finish before it leaves. `adoption`: default: the present one."""
        begun = self.trainer.adoptions if adoption is None else adoption
        self.settling[begun] += 1
        try:
            yield
        finally:
            self.settling[begun] -= 1

    async def commit(self, tier: OpenTier, written: WrittenManifest) -> None:
        """Wait until the checkpoint of these files is committed in this tier. Raises SaveError if it was aborted."""
        part, run, checkpoint = written.manifest, self.run, written.checkpoint
        alike = part.world == tier.role.world
        role = tier.role if alike else commits.Role(tuple(range(part.world)), part.rank, part.world)
        try:
            await run.as_owner(
                tier.log,
                lambda mine: parts.settle(
                    tier.log,
                    run.mine,
                    written,
                    role,
                    encoder=tier.encoder,
                    deadline_s=run.commit_s * (FAR_PATIENCE if tier.store.remote else 1),
                    on_slow=lambda text: self.trainer.tell(ProblemNote(text)),
                ),
            )
            if checkpoint.step in (tier.notes or ()) and tier.role.place == 0:
                await tier.keep_noted(run.mine())  # before the checkpoint is reported
            tier.flow.committed(int(written.table.length[: written.table.owned].sum()), own_bytes(written))
            events.log.info("step %d is a checkpoint in %s", checkpoint.step, tier.url)
        except FullError:
            with contextlib.suppress(CheckpointError):  # abort the checkpoint, and free its space
                await commits.abort(tier.log, run.mine(), checkpoint, "no space left")
                if checkpoint in tier.log.state.aborted:
                    listed = [info.key async for info in tier.log.store.list(folder_of(checkpoint))]
                    await retention.delete_unused(tier.log, [key for key in listed if owner_of(key) == checkpoint])
            raise
        except Exception as error:
            if isinstance(error, SaveError) and error.next_is_full:
                tier.encoder.distrust(checkpoint)
            if part.world > 1:
                await self._give_up(tier, written, error)
            if isinstance(error, RunGoneError):
                await tier.remove_rest(checkpoint, part.rank)
            raise
        finally:
            tier.in_flight.discard(checkpoint)
        self.memory.forget_old()
        self._sweep_soon(tier)

    def _sweep_soon(self, tier: OpenTier) -> None:
        if tier.role.place == 0 and (tier.sweeping is None or tier.sweeping.done()):
            tier.sweeping = self.background.spawn(tier.sweep(self.run.mine(), self.trainer.tell))

    async def _tell_others(self, tier: OpenTier, checkpoint: CheckpointId, rank: int, error: BaseException) -> None:
        """Abort a checkpoint because this rank will not write its files, so that other ranks do not wait for them."""
        if tier.role.world > 1 and isinstance(error, Exception) and not isinstance(error, FencedError):
            with contextlib.suppress(CheckpointError):
                await commits.abort(tier.log, self.run.mine(), checkpoint, f"rank {rank}: {error}")

    async def _give_up(self, tier: OpenTier, written: WrittenManifest, error: Exception) -> None:
        """Abort a checkpoint whose commit failed in this writer, so that other ranks do not wait. Delete this rank's
        files if the checkpoint was aborted."""
        part, checkpoint = written.manifest, written.checkpoint
        with contextlib.suppress(CheckpointError):
            if not isinstance(error, FencedError) and part.reason == "due":
                await commits.abort(tier.log, self.run.mine(), checkpoint, f"rank {part.rank}: {error}")
            if checkpoint in tier.log.state.aborted:
                own = [file.key for file in part.files if owner_of(file.key) == checkpoint]
                await retention.delete_unused(tier.log, [manifest_key(checkpoint, part.rank), *own])

    @handles(Retract)
    async def retract(self, request: Retract) -> None:
        """Abort or retire the checkpoint of a snapshot that failed or is inconsistent."""
        checkpoint = CheckpointId.parse(request.checkpoint)
        if request.tier is None:
            self.memory.retracted.setdefault(checkpoint, request.reason)
        failures: list[CheckpointError] = []
        with self.under_way():
            for tier in self.run.tiers if request.tier is None else [self.run.tiers[request.tier]]:  # even if one fails
                try:
                    async with tier.busy:
                        await tier.prepare()
                        await commits.retract(tier.log, self.run.mine(), checkpoint, request.reason)
                except CheckpointError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    # -- after a start --

    def to_copy(self, tier: OpenTier) -> set[CheckpointId]:
        """Return the checkpoints of earlier job attempts that are to be copied from the nearest tier to this tier."""
        near = self.run.near(tier)
        if near is None:
            return set()
        return {one.checkpoint for one in self._pending(near, tier)}

    def _pending(self, near: OpenTier, tier: OpenTier) -> list[Commit]:
        return pending(near.log.state, tier.log.state, tier.every, before=self.run.mine().term)

    def begin_to_resume(self) -> None:
        """Resume copies when all ranks have recovered."""
        self._resuming = self.background.spawn(self.resume())

    async def resume(self) -> None:
        """Resume the copies that a crash has interrupted. The ranks divide the manifests among themselves. All ranks
        find the same pending copies, whenever they check."""
        adoptions = self.trainer.adoptions
        for tier in self.run.tiers[1:]:
            near = self.run.near(tier)
            if near is None:
                continue
            try:
                await near.log.refresh()
                await tier.prepare()
                found = self._pending(near, tier)
            except CheckpointError as error:
                events.log.warning("could not copy earlier checkpoints to %s: %s", tier.url, error)
                continue
            if near.role.partial:  # other nodes may lack newer ones, so the other tier would wait for them in vain
                found = [one for one in found if near.everywhere is not None and one.checkpoint <= near.everywhere]
            for one in found:  # a damaged checkpoint must not block the others
                if one.checkpoint not in tier.in_flight and adoptions == self.trainer.adoptions:
                    try:
                        await self.resume_one(tier, near, one)
                    except CheckpointError as error:
                        events.log.warning("step %d is not in %s: %s", one.step, tier.url, error)
                        await self._tell_others(tier, one.checkpoint, _rank(near), error)

    async def resume_one(self, tier: OpenTier, near: OpenTier, one: Commit) -> None:
        """Copy those files of a checkpoint for which this rank is responsible."""
        mine = one.manifests[near.role.place :: len(near.role.ranks)]
        if not mine:
            return
        near.promoting[one.checkpoint] += 1
        tier.in_flight.add(one.checkpoint)
        try:
            async with tier.busy:
                here = [
                    await commits.load_manifest(near.store, one.checkpoint, rank, expected=digest)
                    for rank, digest in mine
                ]
                await tier.prepare()
                try:
                    written = [await self._transfer(tier, near, part) for part in here]
                except RunGoneError:
                    for part in here:
                        await tier.remove_rest(one.checkpoint, part.manifest.rank)
                    raise
            await self.commit(tier, written[0])
        finally:
            near.unpin(one.checkpoint)
            tier.in_flight.discard(one.checkpoint)

    # -- snapshots in memory, at a fault --

    def in_memory(self, checkpoints: Collection[CheckpointId] | None = None) -> list[CheckpointId]:
        """Return the ids of snapshots in memory in the history, newest first. `checkpoints`: only these."""
        return self.memory.wanted(self.run.acquires, checkpoints)

    def durable(self) -> list[tuple[int, str]]:
        """Return the steps in memory that are known to be durable, newest first, with the URL of their tier."""
        return [(a.step, t.url) for t in self.run.tiers[:1] for a in self.in_memory() if a in t.log.state.commits]

    @handles(Persist)
    async def on_persist(self, request: Persist) -> list[SavedInTier]:
        checkpoints = [CheckpointId.parse(text) for text in request.checkpoints]
        return await self.persist(request.deadline_s, far=request.far, checkpoints=checkpoints)

    async def persist(
        self, deadline_s: float, *, far: bool = False, checkpoints: list[CheckpointId] | None = None
    ) -> list[SavedInTier]:
        """Write the snapshots in memory, or only `checkpoints`, to the nearest tier.

        Wait until the newest step is durable, for at most `deadline_s`; writes that began continue. With `far`, also
        write the newest step to all other tiers, because the machine may be lost. Return the result for each step and
        tier; `error` is empty if the step is durable.
        """
        began, tiers = time.monotonic(), self.run.tiers
        with self.throttle.hurry():
            steps = self.in_memory(checkpoints)
            tasks = [self.background.spawn(self._drain_alive(steps))]
            if far:
                tasks += [self.background.spawn(self._drain_alive(steps[:1], tier)) for tier in tiers[1:]]
            await self._wait(steps, tasks, began + deadline_s)
        seconds = time.monotonic() - began
        return [
            SavedInTier(a.step, tier.url, seconds, _missing(tier, a))
            for i, tier in enumerate(tiers[: None if far else 1])
            for a in (steps if i == 0 else steps[:1])
        ]

    async def _wait(self, steps: list[CheckpointId], tasks: list[asyncio.Task[None]], deadline: float) -> None:
        """Wait until the newest step is durable, or only the files of other ranks are missing, which may never come."""
        tiers, durable_since, stored_since = self.run.tiers, 0.0, 0.0
        while time.monotonic() < deadline:
            done = [checkpoint for checkpoint in steps if tiers and checkpoint in tiers[0].log.state.commits]
            stored = all(task.done() for task in tasks)
            if not tiers or not steps or (done[:1] == steps[:1] and stored):
                return
            if stored:
                stored_since = stored_since or time.monotonic()
                durable_since = durable_since or (time.monotonic() if done else 0.0)
                if (done and time.monotonic() > durable_since + COMMON_S) or time.monotonic() > stored_since + OTHERS_S:
                    return  # other ranks are behind, or do not save this step
            await asyncio.sleep(0.02)

    async def _drain_alive(self, checkpoints: list[CheckpointId], tier: OpenTier | None = None) -> None:
        with contextlib.suppress(CheckpointError):
            await self.drain(self.trainer.adoptions, checkpoints, tier)

    # -- snapshots in memory, after the end of a trainer --

    async def make_durable(self, adoptions: int, tier: OpenTier, owed: Collection[CheckpointId] | None = None) -> bool:
        """Write the snapshots in memory, or only the `owed` snapshots, to a tier. The nearest tier gets all of them,
        and any other tier gets the newest step. Return False if a write has to be retried."""
        nearest = self.run.tiers[0]

        def is_over(checkpoints: list[CheckpointId], tier: OpenTier) -> bool:
            return adoptions != self.trainer.adoptions or tier.in_flight.isdisjoint(checkpoints)

        if tier.role.world == 1:
            while not is_over(due := self._due(tier, owed), tier):
                await asyncio.sleep(0.02)  # the write under way may still fail
            return await self.drain(adoptions, due, tier)
        if tier is nearest:
            return await self.drain(adoptions, self._due(tier, owed), tier)
        # All ranks choose the same step, because the nearest tier shows which steps all ranks have saved.
        await _until(lambda: is_over(self._newer(nearest, owed), nearest), LATE_S)
        due = self._due(tier, owed)
        stored = await self.drain(adoptions, due, tier)
        await _until(lambda: is_over(due, tier), FAR_LATE_S)
        return stored

    def _due(self, tier: OpenTier, owed: Collection[CheckpointId] | None) -> list[CheckpointId]:
        nearest, found = self.run.tiers[0], self.in_memory(owed)
        if tier is nearest:
            return found
        newer = self._newer(nearest, owed) if tier.role.world > 1 else []
        return found[len(newer) :][:1]

    def _newer(self, nearest: OpenTier, owed: Collection[CheckpointId] | None) -> list[CheckpointId]:
        """Return the steps in memory that are newer than all steps in the nearest tier."""
        there = nearest.log.state.commits
        return list(itertools.takewhile(lambda checkpoint: checkpoint not in there, self.in_memory(owed)))

    async def drain(
        self, adoptions: int, checkpoints: Collection[CheckpointId] | None = None, tier: OpenTier | None = None
    ) -> bool:
        """Write all sealed snapshots, or only `checkpoints`, to a tier (default: the nearest one), unless they are
        durable in it. Return False if a write has to be retried."""
        complete = True
        history = set(self.in_memory() if checkpoints is None else checkpoints)
        for arena, slot, label in self.memory.ring():
            if label.checkpoint not in history or label.layout not in self.memory.layouts:
                continue  # a rollback has undone this snapshot
            for target in self.run.tiers[:1] if tier is None else [tier]:
                if adoptions != self.trainer.adoptions:
                    return True  # another trainer has inherited the memory
                if (
                    label.checkpoint is None
                    or label.checkpoint in target.in_flight
                    or target.log.state.ended(label.checkpoint)
                ):
                    continue
                complete &= await self._drain_one(target, arena, slot, label)
        return complete

    async def _drain_one(self, tier: OpenTier, arena: Arena, slot: int, label: Label) -> bool:
        """Write one snapshot. Return False if the write has to be retried."""
        assert label.checkpoint is not None
        stored = False
        try:
            reason = "late" if self.trainer.dead else "ring"
            written = await self.store_part(tier, arena, slot, label, reason)
            stored = True
            if written is not None and written.manifest.world == 1:
                with self.under_way():
                    await self.commit(tier, written)
            elif written is not None:  # do not wait for other ranks, which may not have this step
                self.background.spawn(self._commit_late(tier, written))
        except FencedError:
            raise
        except Exception as error:
            tier.flow.fail(error)
            events.log.warning("step %d is not durable yet: %s", label.checkpoint.step, error)
            return stored and self.memory.layouts[label.layout].world > 1
        return True

    async def _commit_late(self, tier: OpenTier, written: WrittenManifest) -> None:
        with self.under_way(OUT_OF_TURN):
            try:
                await self.commit(tier, written)
            except CheckpointError as error:
                step = written.checkpoint.step
                events.log.warning("step %d is in memory only: %s", step, error)

    # -- the end --

    def begun(self) -> set[CheckpointId]:
        """Return the steps requested by the trainer that are being saved to some tier."""
        return {checkpoint for _, checkpoint in self.stored} if self.unfinished else set()

    @property
    def unfinished(self) -> bool:
        """Return True if saves are under way. Commits for earlier trainers do not count, as they may never complete."""
        return bool(self.reads or self.settling[self.trainer.adoptions])

    async def close(self) -> None:
        """Stop copies, which the next start resumes, finish saves that began, clean up, and close the stores."""
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)
        while self.unfinished:
            await asyncio.sleep(0.01)
        for tier in self.run.tiers:
            await tier.close(self.run.owner, self.trainer.tell)

    async def finish_begun(self) -> None:
        """Finish writes that began. Wait only for a while for the files of other ranks, which may never come."""
        commit_s = self.run.commit_s
        await _until(lambda: not self.reads and not any(tier.waiting for tier in self.run.tiers), commit_s)
        await _until(lambda: not any(self.settling.values()), min(LATE_S, commit_s))


def _bases(tier: OpenTier, near: OpenTier | None, rank: int, reason: str) -> Bases:
    """Return the source of the base chunks for increments."""
    if reason in ("ring", "late"):
        return no_bases
    if near is None:
        return no_bases if tier.store.remote else bases_in(tier.store)
    known: dict[CheckpointId, Table | None] = {}

    async def find(older: CheckpointId) -> Table | None:
        """Return this rank's chunk table of a checkpoint in the nearer tier."""
        if older not in known:
            found = near.log.state.commits.get(older)
            digest = None if found is None else dict(found.manifests).get(rank)
            known[older] = None
            if digest is not None:
                with contextlib.suppress(CorruptError, StoreError):
                    known[older] = (await commits.load_manifest(near.store, older, rank, expected=digest)).table
        return known[older]

    return bases_near(near.store, find)


def own_bytes(written: WrittenManifest | None) -> int:
    """Return the number of bytes of one rank's files, without files that it shares with older checkpoints."""
    if written is None:
        return 0
    checkpoint = written.checkpoint
    return sum(file.size for file in written.manifest.files if owner_of(file.key) == checkpoint)


def _rank(tier: OpenTier) -> int:
    return tier.role.ranks[tier.role.place]


def _missing(tier: OpenTier, checkpoint: CheckpointId) -> str:
    state = tier.log.state
    if checkpoint in state.commits:
        return ""
    if checkpoint in state.reasons:
        return state.reasons[checkpoint]
    return "not all of it is written yet" if checkpoint in tier.in_flight else "it could not be written"


async def _until(done: Callable[[], bool], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not done():
                await asyncio.sleep(0.01)


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
