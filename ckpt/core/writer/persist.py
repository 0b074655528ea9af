"""Saves the snapshots that the trainer requests, and after a fault the snapshots in memory.

memory, or a nearer tier -> part (parts, promotion) -> checkpoint (Settler)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ckpt import events
from ckpt.core.checkpoint import commits
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.write import WrittenManifest
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.arena import Arena, Label
from ckpt.core.ipc.messages import Persist, SavedInTier, StoredNote, WriteSlot, WriteSlotReply
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.held_run import Background, HeldRun, PresentTrainer, handles
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.parts import OUT_OF_TURN, PartWriter, Settler, own_bytes
from ckpt.core.writer.promotion import Promoter, Throttle
from ckpt.errors import CheckpointError, FencedError, FullError, SaveError, SkippedError

FAR_QUEUE = 1  # number of checkpoints that may wait for a write from memory to a slow tier
LATE_S = 30.0  # timeout for the parts of other ranks after the trainer's end
FAR_LATE_S = 600.0  # the same in a slow tier
COMMON_S = 1.0  # after which the step before the newest is enough, if not all ranks have the newest
OTHERS_S = 5.0  # timeout for the parts of other ranks when ours is written


class Persister:
    """Handles requests to save, in the writer's event loop; blocking work goes to threads."""

    def __init__(
        self,
        trainer: PresentTrainer,
        run: HeldRun,
        held_memory: HeldMemory,
        books: Bookkeeper,
        background: Background,
    ) -> None:
        self._trainer, self._run, self._held_memory = trainer, run, held_memory
        self._books, self._background = books, background
        self.settler = Settler(trainer, run, held_memory, background)
        self.parts = PartWriter(trainer, run, held_memory, self.settler)
        self.promoter = Promoter(trainer, run, held_memory, self.parts, self.settler, background)

    @handles(WriteSlot)
    async def write(self, request: WriteSlot) -> WriteSlotReply:
        """Make a checkpoint of a sealed slot in one tier.

        `StoredNote` reports that the slot is free again. If a further tier is busy or fails, it gets the step from
        the nearest tier later, so that memory does not wait for a network.
        """
        tier, checkpoint = self._run.tiers[request.tier], CheckpointId.parse(request.checkpoint)
        arena = self._held_memory.arenas.get(request.arena)
        label = None if arena is None else arena.label(request.slot)
        size = 0 if label is None else label.data_size
        if request.replicas:
            self._held_memory.replicas[checkpoint] = request.replicas
        with self._books.saving(tier.url, size, checkpoint.step) as save:
            written = await self._write(tier, checkpoint, request)
            save.stored = own_bytes(written)
            if arena is None and written is not None:
                size = int(written.table.length[: written.table.owned].sum())
            return WriteSlotReply(size, save.stored)

    async def _write(self, tier: OpenTier, checkpoint: CheckpointId, request: WriteSlot) -> WrittenManifest | None:
        near, stored = self._run.near(tier), self.parts.stored
        if near is not None and (near.url, checkpoint) not in stored and checkpoint not in near.log.state.commits:
            near = None  # the step is not scheduled there
        part = stored.setdefault((tier.url, checkpoint), asyncio.get_running_loop().create_future())
        if near is not None:
            near.promoting[checkpoint] += 1
        try:
            with self.settler.under_way():
                written = await self._store(tier, near, checkpoint, request)
                _resolve(part, written is not None or checkpoint in tier.log.state.commits)
                self._tell_stored(request)
                if written is not None:
                    await self.settler.settle(tier, written)
        except Exception as error:
            again = bool(tier.flow.error)
            tier.flow.fail(error)
            if isinstance(error, FullError) and not (again or tier.store.remote):
                raise FullError(f"{error}. {tier.room}") from error
            raise
        finally:
            _resolve(part, False)
            stored.pop((tier.url, checkpoint), None)
            if near is not None:
                near.unpin(checkpoint)
        return written

    def _tell_stored(self, request: WriteSlot) -> None:
        self._trainer.tell(StoredNote(request.tier, request.checkpoint, request.arena, request.slot))

    async def _store(
        self, tier: OpenTier, near: OpenTier | None, checkpoint: CheckpointId, request: WriteSlot
    ) -> WrittenManifest | None:
        """Write the part from memory or a nearer tier. Return None if it is a checkpoint already."""
        arena, slot = self._held_memory.arenas.get(request.arena), request.slot
        label = None if arena is None else arena.label(slot)

        def free() -> None:
            self._tell_stored(request)

        if request.stored or arena is None or label is None or label.checkpoint != checkpoint:
            # The trainer or an earlier writer stored the part without committing it. No slot has it.
            return await self._stored_before(tier, near, checkpoint)
        if near is not None and (tier.busy.locked() or tier.waiting):
            return await self.promoter.promote(tier, near, checkpoint, free)
        if near is None and tier.store.remote:
            return await self._store_far(tier, checkpoint, arena, slot, label, free)
        try:
            return await self.parts.store(tier, arena, slot, label, last=near is None)
        except FencedError:
            raise
        except CheckpointError as error:
            if near is None:
                raise
            events.log.warning("%s: step %d is taken from %s: %s", tier.url, checkpoint.step, near.url, error)
            return await self.promoter.promote(tier, near, checkpoint, free)

    async def _stored_before(
        self, tier: OpenTier, near: OpenTier | None, checkpoint: CheckpointId
    ) -> WrittenManifest | None:
        if checkpoint in tier.log.state.commits:
            return None
        written = await commits.stored_manifest(tier.log.store, checkpoint, tier.role.ranks[tier.role.place])
        if written is not None:
            tier.in_flight.add(checkpoint)
            return written
        near = near or self._run.near(tier)
        if near is None:
            raise SaveError(f"step {checkpoint.step} is no longer in memory")
        return await self.promoter.promote(tier, near, checkpoint, lambda: None)

    async def _store_far(
        self, tier: OpenTier, checkpoint: CheckpointId, arena: Arena, slot: int, label: Label, free: Callable[[], None]
    ) -> WrittenManifest | None:
        """Write to a slow tier that has no nearer one. Only the newest step may wait for the one under way, so that
        training keeps the other slots."""
        tier.waiting += 1
        try:
            async with self.promoter.turns[tier.url].turn(tier, checkpoint, FAR_QUEUE):
                return await self.parts.store(tier, arena, slot, label)
        except SkippedError as error:
            free()
            rank = tier.role.ranks[tier.role.place]
            self._background.spawn(self.settler.tell_others(tier, checkpoint, rank, error))
            raise
        finally:
            tier.waiting -= 1

    # -- the end --

    def begun(self) -> set[CheckpointId]:
        """Return the steps requested by the trainer that are being saved to some tier."""
        return {checkpoint for _, checkpoint in self.parts.stored} if self.unfinished else set()

    @property
    def unfinished(self) -> bool:
        """Return True if saves are under way, except those of earlier trainers, whose other parts may never come."""
        return bool(self.parts.reads or self.settler.settling[self._trainer.adoptions])

    async def close(self) -> None:
        """Finish the saves that began, clean up, and close the stores."""
        await self.promoter.stop()
        while self.unfinished:
            await asyncio.sleep(0.01)
        for tier in self._run.tiers:
            await tier.close(self._run.owner, self._trainer.tell)

    async def finish_begun(self) -> None:
        """Finish writes that began. Wait for the parts of other ranks only for a while, because they may never come."""
        commit_s = self._run.commit_s
        await _until(lambda: not self.parts.reads and not any(tier.waiting for tier in self._run.tiers), commit_s)
        await _until(lambda: not any(self.settler.settling.values()), min(LATE_S, commit_s))


async def _until(done: Callable[[], bool], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not done():
                await asyncio.sleep(0.01)


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


@dataclass(eq=False)
class Drain:
    """Saves what is in memory. Everything runs in the writer's event loop."""

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    parts: PartWriter
    settler: Settler
    throttle: Throttle
    background: Background

    def wanted(self, checkpoints: Collection[CheckpointId] | None = None) -> list[CheckpointId]:
        """Return the snapshots in memory that belong to the history, newest first; only these, if given."""
        return self.held_memory.wanted(self.run.acquires, checkpoints)

    def durable(self) -> list[tuple[int, str]]:
        """Return the steps in memory that are known to be durable, with their tier, newest first."""
        return [(a.step, t.url) for t in self.run.tiers[:1] for a in self.wanted() if a in t.log.state.commits]

    # -- at a request --

    @handles(Persist)
    async def on_persist(self, request: Persist) -> list[SavedInTier]:
        checkpoints = [CheckpointId.parse(text) for text in request.checkpoints]
        return await self.persist(request.deadline_s, far=request.far, checkpoints=checkpoints)

    async def persist(
        self, deadline_s: float, *, far: bool = False, checkpoints: list[CheckpointId] | None = None
    ) -> list[SavedInTier]:
        """Write the snapshots in memory, or only these, to the nearest tier.

        Wait until the newest step is durable, for at most `deadline_s`; writes that began go on. With `far`, the newest
        one is also written to all other tiers, because the machine may be lost. Returns the result for each
        step and tier; `error` is empty if it is durable.
        """
        began, tiers = time.monotonic(), self.run.tiers
        with self.throttle.hurry():
            steps = self.wanted(checkpoints)
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
        """Wait until the newest is durable, or only the parts of other ranks are missing, which may not come."""
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

    # -- after the end of a trainer --

    async def make_durable(self, adoptions: int, tier: OpenTier, owed: Collection[CheckpointId] | None = None) -> bool:
        """Write the snapshots in memory, or only the `owed` ones, to a tier: all of them to the nearest tier, and the
        newest step to any other. Return False if a write has to be retried."""
        nearest = self.run.tiers[0]

        def is_over(checkpoints: list[CheckpointId], tier: OpenTier) -> bool:
            return adoptions != self.trainer.adoptions or tier.in_flight.isdisjoint(checkpoints)

        if tier.role.world == 1:
            while not is_over(due := self._due(tier, owed), tier):
                await asyncio.sleep(0.02)  # it may fail yet
            return await self.drain(adoptions, due, tier)
        if tier is nearest:
            return await self.drain(adoptions, self._due(tier, owed), tier)
        # All ranks choose the same step, because the nearest tier shows which steps all of them have.
        await _until(lambda: is_over(self._newer(nearest, owed), nearest), LATE_S)
        due = self._due(tier, owed)
        stored = await self.drain(adoptions, due, tier)
        await _until(lambda: is_over(due, tier), FAR_LATE_S)
        return stored

    def _due(self, tier: OpenTier, owed: Collection[CheckpointId] | None) -> list[CheckpointId]:
        nearest, found = self.run.tiers[0], self.wanted(owed)
        if tier is nearest:
            return found
        newer = self._newer(nearest, owed) if tier.role.world > 1 else []
        return found[len(newer) :][:1]

    def _newer(self, nearest: OpenTier, owed: Collection[CheckpointId] | None) -> list[CheckpointId]:
        """Return steps in memory that are newer than all steps of these ranks in the nearest tier."""
        there = nearest.log.state.commits.keys() | nearest.log.state.held.keys()
        return list(itertools.takewhile(lambda checkpoint: checkpoint not in there, self.wanted(owed)))

    # -- one by one --

    async def drain(
        self, adoptions: int, checkpoints: Collection[CheckpointId] | None = None, tier: OpenTier | None = None
    ) -> bool:
        """Write all sealed snapshots, or only these, to a tier if they are not durable there; by default to the
        nearest. Return False if a write has to be retried."""
        complete = True
        history = set(self.wanted() if checkpoints is None else checkpoints)
        for arena, slot, label in self.held_memory.ring():
            if label.checkpoint not in history or label.layout not in self.held_memory.layouts:
                continue  # undone by a rollback
            for target in self.run.tiers[:1] if tier is None else [tier]:
                if adoptions != self.trainer.adoptions:
                    return True  # another trainer has the memory now, and decides
                if (
                    label.checkpoint is None
                    or label.checkpoint in target.in_flight
                    or target.log.state.ended(label.checkpoint)
                ):
                    continue
                complete &= await self._save(target, arena, slot, label)
        return complete

    async def _save(self, tier: OpenTier, arena: Arena, slot: int, label: Label) -> bool:
        """Write one snapshot. Return False if it has to be retried."""
        assert label.checkpoint is not None
        stored = False
        try:
            reason = "late" if self.trainer.dead else "ring"
            written = await self.parts.store(tier, arena, slot, label, reason)
            stored = True
            if written is not None and written.manifest.world == 1:
                with self.settler.under_way():
                    await self.settler.settle(tier, written)
            elif written is not None:  # other ranks may not have this step: do not wait for them here
                self.background.spawn(self._settle_late(tier, written))
        except FencedError:
            raise
        except Exception as error:
            tier.flow.fail(error)
            events.log.warning("step %d is not durable yet: %s", label.checkpoint.step, error)
            return stored and self.held_memory.layouts[label.layout].world > 1
        return True

    async def _settle_late(self, tier: OpenTier, written: WrittenManifest) -> None:
        with self.settler.under_way(OUT_OF_TURN):
            try:
                await self.settler.settle(tier, written)
            except CheckpointError as error:
                events.log.warning(
                    "step %d is in memory only: %s", CheckpointId.parse(written.manifest.checkpoint).step, error
                )


def _missing(tier: OpenTier, checkpoint: CheckpointId) -> str:
    state = tier.log.state
    if checkpoint in state.commits:
        return ""
    if checkpoint in state.reasons:
        return state.reasons[checkpoint]
    return "not all of it is written yet" if checkpoint in tier.in_flight else "it could not be written"
