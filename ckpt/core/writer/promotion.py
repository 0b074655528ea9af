"""Copies checkpoints from a nearer tier to a further one, so that memory is free sooner, and after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from ckpt import events
from ckpt.core.checkpoint import commit, promote
from ckpt.core.checkpoint.byte_source import InStore
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.parts import layout_of
from ckpt.core.checkpoint.write import RankSnapshot, WrittenPart
from ckpt.core.format.manifest import Attempt, data_number, folder_of, is_data, rank_of
from ckpt.core.ipc.requests import Resume
from ckpt.core.log.log import Commit
from ckpt.core.writer.dispatch import Background, handles
from ckpt.core.writer.held_run import HeldRun, PresentTrainer
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.parts import PartWriter, Settler
from ckpt.errors import CheckpointError, RunGoneError, SaveError, SkippedError
from ckpt.units import duration

STILL_S = 30.0  # time without a byte after which a tier counts as unresponsive rather than slow


@dataclass(eq=False)
class Turns:
    """The queue of a tier that is slower than its save interval. If the queue is too long, the oldest step is skipped,
    so that the last step of a run is never skipped."""

    taken: bool = False
    since: float = 0.0  # when the present step got its turn, by the monotonic clock
    line: list[tuple[Attempt, asyncio.Future[None]]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def turn(self, tier: OpenTier, attempt: Attempt, most: int) -> AsyncIterator[None]:
        """Wait for the turn of a step. If more than `most` steps wait, the oldest gets SkippedError."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.line.append((attempt, mine))
        self._call()
        if len(self.line) > most:
            oldest, waits = self._leave()
            if not waits.done():
                waits.set_exception(left_out(tier, oldest, self._why(tier)))
        try:
            await mine
            yield
        finally:
            if (attempt, mine) in self.line:  # cancelled
                self.line.remove((attempt, mine))
            elif not mine.cancelled() and mine.exception() is None:
                self.taken = False
                self._call()

    def _why(self, tier: OpenTier) -> str:
        """Return why steps are skipped. To save less often does not help if the tier is down or hangs."""
        still_s = time.monotonic() - max(self.since, tier.flow.moved)
        if still_s > STILL_S:
            return f"has taken nothing for {duration(still_s)}: check whether it responds. It gets the newest then"
        return "is slower than its steps come: raise its every=, or max_mib_s if it is throttled"

    def _call(self) -> None:
        while self.line and not self.taken:
            _, waits = self._leave()
            if not waits.done():  # otherwise it was cancelled, and its task has not run yet
                waits.set_result(None)
                self.taken, self.since = True, time.monotonic()

    def _leave(self) -> tuple[Attempt, asyncio.Future[None]]:
        oldest = min(self.line, key=lambda one: one[0])
        self.line.remove(oldest)
        return oldest


@dataclass(eq=False)
class Promoter:
    """Copies parts from a nearer tier to further ones, in the writer's event loop."""

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    parts: PartWriter
    settler: Settler
    background: Background
    turns: defaultdict[str, Turns] = field(default_factory=lambda: defaultdict(Turns))  # of each tier, by its URL
    _resuming: asyncio.Task[None] | None = None

    async def promote(
        self, tier: OpenTier, near: OpenTier, attempt: Attempt, free: Callable[[], None]
    ) -> WrittenPart | None:
        """Copy this rank's part once a nearer tier has it. Return None if the attempt is a checkpoint already.

        `free` is called when memory is no longer needed for it. Raises SkippedError if the further tier is too slow.
        """
        rank = _rank(near)
        tier.in_flight.add(attempt)
        tier.waiting += 1
        try:
            if (unsettled := len(tier.in_flight) - tier.waiting) >= promote.BACKLOG:
                free()
                raise left_out(tier, attempt, f"has yet to get other ranks' parts of {unsettled} steps before it")
            known = self.parts.stored.get((near.url, attempt))
            if known is not None and not await asyncio.shield(known):
                raise SaveError(f"step {attempt.step} is not in {near.url} either")
            free()
            async with self.turns[tier.url].turn(tier, attempt, promote.BACKLOG - 1), tier.busy:
                await tier.prepare()
                self._check_wanted(tier, attempt)
                if tier.log.state.ended(attempt):
                    tier.in_flight.discard(attempt)
                    return None
                here = await commit.stored_part(near.store, attempt, rank)
                if here is None:
                    raise SaveError(f"step {attempt.step} is no longer in {near.url}")
                written = await self._transfer(tier, near, here)
            self._check_wanted(tier, attempt)
            return written
        except BaseException as error:
            tier.in_flight.discard(attempt)
            if isinstance(error, RunGoneError):
                await tier.remove_rest(attempt, rank)
            self.background.spawn(self.settler.tell_others(tier, attempt, rank, error))
            raise
        finally:
            tier.waiting -= 1

    async def _transfer(self, tier: OpenTier, near: OpenTier, here: WrittenPart) -> WrittenPart:
        """Store a part of a nearer tier in the encoding of the further one. Resume a copy that a crash interrupted."""
        attempt, part = Attempt.parse(here.part.attempt), here.part
        there = await commit.stored_part(tier.store, attempt, part.rank)
        if there is not None:
            return there
        layout, source = layout_of(part, here.table), InStore(near.store, here.table)
        previous = await tier.encoder.previous(tier.log, attempt, layout)
        listed = [info.key async for info in tier.store.list(folder_of(attempt))]
        left = [key for key in listed if is_data(key) and rank_of(key) == part.rank]
        plain = not part.needs and not here.table.codec.any() and len(part.packs) == 1
        if plain and set(left) <= {part.packs[0].key} and not tier.encoder.worth(tier.store, source, layout, previous):
            with tier.flow.writing(attempt.step, part.packs[0].size):
                written = await promote.copy_part(near.store, tier.store, attempt, part.rank, on_bytes=tier.flow.add)
            tier.encoder.remember(written)
            return written
        first = max([self.run.first_number, *(data_number(key) + 1 for key in left)])
        numbers = self.held_memory.numbers(tier.url, attempt, first)
        snapshot = RankSnapshot(attempt, layout, memoryview(b""), part.values, part.finite, part.replicas)
        return await self.parts.encode(tier, snapshot, source, numbers, reason=part.reason)

    def _check_wanted(self, tier: OpenTier, attempt: Attempt) -> None:
        """Raise SaveError if the step was retracted here or aborted by another rank."""
        state = tier.log.state
        if attempt in self.held_memory.retracted:
            raise SaveError(f"step {attempt.step} was given up: {self.held_memory.retracted[attempt]}")
        if attempt in state.aborted or (attempt in state.retired and attempt in state.reasons):
            raise commit.given_up(state, attempt)

    # -- after a start --

    def wanted(self, tier: OpenTier) -> set[Attempt]:
        """Return the checkpoints from before a crash that are still to be copied from the nearest tier to this one."""
        near = self.run.near(tier)
        if near is None:
            return set()
        return {one.attempt for one in self.pending(near, tier)} | set(near.log.state.held)

    def pending(self, near: OpenTier, tier: OpenTier) -> list[Commit]:
        """Return checkpoints whose copy from one tier to the other a crash has interrupted."""
        return promote.pending(near.log.state, tier.log.state, tier.every, before=self.run.mine().epoch)

    @handles(Resume)
    def begin_to_resume(self, request: Resume) -> None:
        """Resume copies when all ranks have recovered."""
        self._resuming = self.background.spawn(self.resume())

    async def resume(self) -> None:
        """Resume the copies that a crash has interrupted. The ranks share the parts, and all find the same pending
        copies whenever they check."""
        adoptions = self.trainer.adoptions
        for tier in self.run.tiers[1:]:
            near = self.run.near(tier)
            if near is None:
                continue
            try:
                await near.log.refresh()
                await tier.prepare()
                wanted = self.pending(near, tier)
            except CheckpointError as error:
                events.log.warning("earlier checkpoints are not copied to %s: %s", tier.url, error)
                continue
            for one in wanted:  # a damaged one must not block the others
                if one.attempt not in tier.in_flight and adoptions == self.trainer.adoptions:
                    try:
                        await self.resume_one(tier, near, one)
                    except CheckpointError as error:
                        events.log.warning("step %d is not in %s: %s", one.step, tier.url, error)
                        await self.settler.tell_others(tier, one.attempt, _rank(near), error)

    async def resume_one(self, tier: OpenTier, near: OpenTier, one: Commit) -> None:
        """Copy this rank's share of a checkpoint."""
        mine = one.parts[near.role.place :: len(near.role.ranks)]
        if not mine:
            return
        near.promoting[one.attempt] += 1
        tier.in_flight.add(one.attempt)
        try:
            async with tier.busy:
                here = [await commit.load_part(near.store, one.attempt, rank, expected=digest) for rank, digest in mine]
                await tier.prepare()
                try:
                    written = [await self._transfer(tier, near, part) for part in here]
                except RunGoneError:
                    for part in here:
                        await tier.remove_rest(one.attempt, part.part.rank)
                    raise
            await self.settler.settle(tier, written[0])
        finally:
            near.unpin(one.attempt)
            tier.in_flight.discard(one.attempt)

    async def stop(self) -> None:
        """Stop the copies. The next start resumes them."""
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)


def _rank(tier: OpenTier) -> int:
    return tier.role.ranks[tier.role.place]


def left_out(tier: OpenTier, attempt: Attempt, why: str) -> SkippedError:
    return SkippedError(f"step {attempt.step} {commit.LEFT_OUT} {tier.url}, which {why}")
