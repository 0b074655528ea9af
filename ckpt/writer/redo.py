"""The writer's side of redo logs: steps that the trainer has sealed are appended, one after the other in each tier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.checkpoint.open_tier import OpenTier
from ckpt.errors import SaveError
from ckpt.format.digest import blob_digest
from ckpt.format.manifest import Attempt
from ckpt.ipc.requests import ForgetRedo, KnowRecipes, LogStep, LogStepReply
from ckpt.store import folder_of
from ckpt.writer.dispatch import handles
from ckpt.writer.held_run import HeldRun, PresentTrainer
from ckpt.writer.memory import HeldMemory
from ckpt.writer.parts import PartWriter

if TYPE_CHECKING:  # what does the work is imported when there is some
    from ckpt.redo.adam import AdamSettings
    from ckpt.redo.append import Appended, StepLog
    from ckpt.redo.encode_frame import Sealed
    from ckpt.redo.frame import Recipe

LOOK = 32  # steps, after which it is looked whether another job has taken the run over


@dataclass
class _Kept:
    log: StepLog
    course: tuple[int, int] = (-1, -1)  # of the training whose step was logged last
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0  # steps behind the one that has its turn

    @contextlib.asynccontextmanager
    async def in_turn(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self.turn.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.turn.release()


@dataclass(eq=False)
class RedoKeeper:
    """Of one writer. Everything runs in its event loop; what takes time goes to threads."""

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    parts: PartWriter
    _logs: dict[str, _Kept] = field(default_factory=dict)
    _recipes: dict[str, list[Recipe]] = field(default_factory=dict)  # by layout
    _returns: int = 0  # how often a trainer went back

    @handles(KnowRecipes)
    def learn(self, request: KnowRecipes) -> None:
        """What optimizers do with the tensors of a layout."""
        from ckpt.redo.frame import Recipe

        self._recipes[request.layout] = [Recipe(*row) for row in request.recipes]
        for old in list(self._recipes)[:-8]:
            del self._recipes[old]

    @handles(ForgetRedo)
    def forget(self, request: ForgetRedo) -> None:
        """The trainer has gone back: the next step that it sends has nothing to do with the last one, which may be on
        its way into a log just now."""
        self._returns += 1

    @handles(LogStep)
    async def append(self, request: LogStep) -> LogStepReply:
        """Log a sealed slot in one tier; replies when it is durable there."""
        from ckpt.redo.encode_frame import Sealed

        tier, attempt = self.run.tiers[request.tier], Attempt.parse(request.attempt)
        arena, slot = self.held_memory.arenas[request.arena], request.slot
        settings = [None if row is None else _settings(row) for row in request.settings]
        label = arena.label(slot)
        if label is None or label.attempt != attempt:
            raise SaveError(f"step {attempt.step} is not in memory any more")
        layout = self.held_memory.layouts[label.layout]
        kept = self._kept(tier, layout.rank, layout.world)
        sealed, course = Sealed(arena, slot, label, layout), (self.trainer.adoptions, self._returns)
        recipes = self._recipes.get(label.layout, [])
        with self.parts.reading(arena, slot):
            async with kept.in_turn():
                if kept.course != course:  # nobody holds the slot of the step before for this one
                    kept.course = course
                    kept.log.forget()
                await tier.prepare()
                if kept.log.frames % LOOK == 0:  # else one would go on until the next checkpoint fails
                    await self.run.check_owner([tier])
                committed = {**tier.log.state.held, **tier.log.state.commits}.keys() | set()
                found = await asyncio.to_thread(self._append, kept.log, sealed, recipes, settings, committed)
        return LogStepReply(found.raw, found.stored, found.known, found.predicted, found.base, found.seconds)

    def _append(
        self,
        log: StepLog,
        sealed: Sealed,
        recipes: list[Recipe],
        settings: list[AdamSettings | None],
        committed: set[Attempt],
    ) -> Appended:
        found = log.append(sealed, recipes, settings, committed)
        if log.digests is not None:
            values = blob_digest(sealed.arena.values(sealed.slot, sealed.label))
            self.held_memory.digests[sealed.attempt, sealed.layout.rank] = log.digests + values
        return found

    def _kept(self, tier: OpenTier, rank: int, world: int) -> _Kept:
        from ckpt.redo.append import StepLog

        found = self._logs.get(tier.url)
        if found is None or (found.log.rank, found.log.world) != (rank, world):
            if found is not None and not found.turn.locked():  # of another number of ranks
                found.log.close()
            root = str(folder_of(tier.url))

            def pace(seconds: float) -> None:
                if not self._logs[tier.url].waiting:  # else a training that waits for this would be held up by it
                    tier.encoder.pace(seconds)

            log = StepLog(
                root,
                rank,
                world,
                max_restore_s=float(tier.spec.get("max_restore_s", 60.0)),
                threads=tier.encoder.threads,
                pace=pace,
            )
            found = self._logs[tier.url] = _Kept(log)
        return found


def _settings(row: list[Any]) -> AdamSettings:
    from ckpt.redo.adam import AdamSettings

    *numbers, decoupled, step = row
    lr, beta1, beta2, eps, weight_decay = map(float, numbers)
    return AdamSettings(lr, beta1, beta2, eps, weight_decay, bool(decoupled), None if step is None else float(step))
