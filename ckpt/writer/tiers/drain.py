"""What is in memory is made durable after a fault, whether the trainer lives or not: the newest first."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass

from ckpt import events
from ckpt.checkpoint.open_tier import OpenTier
from ckpt.checkpoint.write import WrittenPart
from ckpt.errors import CheckpointError, FencedError
from ckpt.format.manifest import Attempt
from ckpt.ipc.arena import Arena, Label
from ckpt.ipc.requests import Persist, SavedInTier
from ckpt.writer.background import Background
from ckpt.writer.dispatch import handles
from ckpt.writer.held_run import HeldRun
from ckpt.writer.memory.held_memory import HeldMemory
from ckpt.writer.present_trainer import PresentTrainer
from ckpt.writer.tiers.parts import PartWriter
from ckpt.writer.tiers.settle import OUT_OF_TURN, Settler
from ckpt.writer.tiers.throttle import Throttle

COMMON_S = 1.0  # until the step before the newest will do, if not all ranks have the newest
OTHERS_S = 5.0  # for other ranks to bring theirs, when ours is written


@dataclass(eq=False)
class Drain:
    """Everything runs in the writer's event loop."""

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    parts: PartWriter
    settler: Settler
    throttle: Throttle
    background: Background

    def wanted(self, attempts: Collection[Attempt] | None = None) -> list[Attempt]:
        """What is in memory (of these, if they are given) and belongs to the history, newest first."""
        return self.held_memory.wanted(self.run.acquires, attempts)

    def durable(self) -> list[tuple[int, str]]:
        """What of the memory is durable, as far as we know: step and tier, the newest first."""
        return [(a.step, t.url) for t in self.run.tiers[:1] for a in self.wanted() if a in t.log.state.commits]

    # -- while somebody waits --

    @handles(Persist)
    async def on_persist(self, request: Persist) -> list[SavedInTier]:
        attempts = [Attempt.parse(text) for text in request.attempts]
        return await self.persist(request.deadline_s, far=request.far, attempts=attempts)

    async def persist(
        self, deadline_s: float, *, far: bool = False, attempts: list[Attempt] | None = None
    ) -> list[SavedInTier]:
        """Have what is in memory (or these attempts) written to the nearest tier.

        Waits until the newest step is durable, or at most `deadline_s`: what it began goes on after that. With `far`
        the newest one is written to the further tiers as well, for a machine that is about to go. Returns, for each
        step and tier, what became of it: `error` is empty if it is durable.
        """
        began, tiers = time.monotonic(), self.run.tiers
        with self.throttle.hurry():
            steps = self.wanted(attempts)
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

    async def _wait(self, steps: list[Attempt], tasks: list[asyncio.Task[None]], deadline: float) -> None:
        """Until the newest is durable, or it is known that this takes other ranks, which may not come."""
        tiers, durable_since, stored_since = self.run.tiers, 0.0, 0.0
        while time.monotonic() < deadline:
            done = [attempt for attempt in steps if tiers and attempt in tiers[0].log.state.commits]
            stored = all(task.done() for task in tasks)
            if not tiers or not steps or (done[:1] == steps[:1] and stored):
                return
            if stored:
                stored_since = stored_since or time.monotonic()
                durable_since = durable_since or (time.monotonic() if done else 0.0)
                if (done and time.monotonic() > durable_since + COMMON_S) or time.monotonic() > stored_since + OTHERS_S:
                    return  # other ranks have not come as far as this one, or do not come at all
            await asyncio.sleep(0.02)

    async def _drain_alive(self, attempts: list[Attempt], tier: OpenTier | None = None) -> None:
        with contextlib.suppress(CheckpointError):
            await self.drain(self.trainer.adoptions, attempts, tier)

    # -- one by one --

    async def drain(
        self, adoptions: int, attempts: Collection[Attempt] | None = None, tier: OpenTier | None = None
    ) -> bool:
        """Write every sealed snapshot (or those of these attempts) that is not durable yet to a tier, by default the
        nearest. False: try again."""
        complete = True
        history = set(self.wanted() if attempts is None else attempts)
        for arena, slot, label in self.held_memory.ring():
            if label.attempt not in history or label.layout not in self.held_memory.layouts:
                continue  # undone by a rollback
            for target in self.run.tiers[:1] if tier is None else [tier]:
                if adoptions != self.trainer.adoptions:
                    return True  # the next incarnation has the memory now, and decides
                if label.attempt is None or label.attempt in target.in_flight or target.log.state.ended(label.attempt):
                    continue
                complete &= await self._save(target, arena, slot, label)
        return complete

    async def _save(self, tier: OpenTier, arena: Arena, slot: int, label: Label) -> bool:
        """One snapshot of the ring. False: it has to be tried again."""
        assert label.attempt is not None
        stored = False
        try:
            written = await self.parts.store(tier, arena, slot, label, "ring")
            stored = True
            if written is not None and written.part.world == 1:
                with self.settler.under_way():
                    await self.settler.settle(tier, written)
            elif written is not None:  # other ranks may never have taken this step: do not wait for them here
                self.background.spawn(self._settle_late(tier, written))
        except FencedError:
            raise
        except Exception as error:
            tier.flow.fail(error)
            events.log.warning("step %d is not durable yet: %s", label.attempt.step, error)
            return stored and self.held_memory.layouts[label.layout].world > 1
        return True

    async def _settle_late(self, tier: OpenTier, written: WrittenPart) -> None:
        with self.settler.under_way(OUT_OF_TURN):
            try:
                await self.settler.settle(tier, written)
            except CheckpointError as error:
                events.log.warning("step %d is in memory only: %s", Attempt.parse(written.part.attempt).step, error)


def _missing(tier: OpenTier, attempt: Attempt) -> str:
    state = tier.log.state
    if attempt in state.commits:
        return ""
    if attempt in state.reasons:
        return state.reasons[attempt]
    return "not all of it is written yet" if attempt in tier.in_flight else "it could not be written"
