"""What the trainer wants to be saved: made a checkpoint in a durable tier, from where its bytes are had soonest.

memory, or a nearer tier -> part (parts, promotion) -> checkpoint (settle)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ckpt import events
from ckpt.checkpoint import commit
from ckpt.checkpoint.open_tier import OpenTier
from ckpt.checkpoint.write import WrittenPart
from ckpt.errors import CheckpointError, FencedError, SaveError
from ckpt.format.manifest import Attempt
from ckpt.ipc.arena import Arena, Label
from ckpt.ipc.notes import StoredNote
from ckpt.ipc.requests import WriteSlot, WriteSlotReply
from ckpt.writer.background import Background
from ckpt.writer.dispatch import handles
from ckpt.writer.held_run import HeldRun
from ckpt.writer.memory.held_memory import HeldMemory
from ckpt.writer.present_trainer import PresentTrainer
from ckpt.writer.tiers.parts import PartWriter
from ckpt.writer.tiers.promotion import Promoter, too_slow
from ckpt.writer.tiers.settle import Settler, own_bytes
from ckpt.writer.watch.bookkeeper import Bookkeeper

FAR_QUEUE = 2  # checkpoints on their way from memory to a tier that is slow, the one that waits among them
LATE_S = 30.0  # for the parts of other ranks, when nobody is left to wait for them


class Persister:
    """Everything runs in the writer's event loop; blocking work goes to threads."""

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

        The slot is free again once `StoredNote` is told. A further tier that is busy, or fails, gets the step from the
        nearest one, so that memory does not wait for a network.
        """
        tier, attempt = self._run.tiers[request.tier], Attempt.parse(request.attempt)
        label = self._held_memory.arenas[request.arena].label(request.slot)
        size = 0 if label is None else label.data_size
        with self._books.saving(tier.url, size, attempt.step) as save:
            save.stored = own_bytes(await self._write(tier, attempt, request))
            return WriteSlotReply(size, save.stored)

    async def _write(self, tier: OpenTier, attempt: Attempt, request: WriteSlot) -> WrittenPart | None:
        near, stored = self._run.near(tier), self.parts.stored
        if near is not None and (near.url, attempt) not in stored and attempt not in near.log.state.commits:
            near = None  # not due there
        part = stored.setdefault((tier.url, attempt), asyncio.get_running_loop().create_future())
        if near is not None:
            near.promoting[attempt] += 1
        try:
            with self.settler.under_way():
                written = await self._store(tier, near, attempt, request)
                _resolve(part, written is not None or attempt in tier.log.state.commits)
                self._tell_stored(request)
                if written is not None:
                    await self.settler.settle(tier, written)
        except Exception as error:
            tier.flow.fail(error)
            raise
        finally:
            _resolve(part, False)
            stored.pop((tier.url, attempt), None)
            if near is not None:
                near.unpin(attempt)
        return written

    def _tell_stored(self, request: WriteSlot) -> None:
        self._trainer.tell(StoredNote(request.tier, request.attempt))

    async def _store(
        self, tier: OpenTier, near: OpenTier | None, attempt: Attempt, request: WriteSlot
    ) -> WrittenPart | None:
        """From where it is had best; None if it is a checkpoint already."""
        arena, slot = self._held_memory.arenas[request.arena], request.slot
        label = arena.label(slot)

        def free() -> None:
            self._tell_stored(request)

        if request.stored or label is None or label.attempt != attempt:
            # A predecessor stored it, and died before it was committed: the slot may be used again any time.
            return await self._stored_by_predecessor(tier, near, attempt, slot)
        if near is not None and (tier.busy.locked() or tier.waiting):
            return await self.promoter.promote(tier, near, attempt, free)
        if near is None and tier.store.remote:
            return await self._store_far(tier, attempt, arena, slot, label, free)
        try:
            return await self.parts.store(tier, arena, slot, label, last=near is None)
        except FencedError:
            raise
        except CheckpointError as error:
            if near is None:
                raise
            events.log.warning("%s: step %d is taken from %s: %s", tier.url, attempt.step, near.url, error)
            return await self.promoter.promote(tier, near, attempt, free)

    async def _stored_by_predecessor(
        self, tier: OpenTier, near: OpenTier | None, attempt: Attempt, slot: int
    ) -> WrittenPart | None:
        written = await commit.stored_part(tier.log.store, attempt, tier.role.ranks[tier.role.place])
        if written is not None:
            tier.in_flight.add(attempt)
            return written
        near = near or self._run.near(tier)
        if near is None:
            raise SaveError(f"slot {slot} does not hold {attempt} any more")
        return await self.promoter.promote(tier, near, attempt, lambda: None)

    async def _store_far(
        self, tier: OpenTier, attempt: Attempt, arena: Arena, slot: int, label: Label, free: Callable[[], None]
    ) -> WrittenPart | None:
        """With nothing nearer one may wait behind the one on its way: the other slots are for the training."""
        if tier.waiting >= FAR_QUEUE:
            free()
            error = too_slow(tier, attempt)
            rank = tier.role.ranks[tier.role.place]
            self._background.spawn(self.settler.tell_others(tier, attempt, rank, error))
            raise error
        tier.waiting += 1
        try:
            return await self.parts.store(tier, arena, slot, label)
        finally:
            tier.waiting -= 1

    # -- the end --

    def begun(self) -> set[Attempt]:
        """What is being made a checkpoint, somewhere, since the trainer wanted it."""
        return {attempt for _, attempt in self.parts.stored} if self.unfinished else set()

    @property
    def unfinished(self) -> bool:
        """Whether something is; not if an earlier trainer began it, which may wait for parts that never come."""
        return bool(self.parts.reads or self.settler.settling[self._trainer.adoptions])

    async def close(self) -> None:
        """Finish what was begun, clean up, and let go of the stores."""
        await self.promoter.stop()
        while self.unfinished:
            await asyncio.sleep(0.01)
        for tier in self._run.tiers:
            await tier.close(self._run.owner, self._trainer.tell)

    async def finish_begun(self) -> None:
        """What is being written is finished; for the parts of other ranks, which may never come, only a while."""
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
