"""From a part to a checkpoint: with the parts of the other ranks, if there are any; and back, if it must not be one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt import events
from ckpt.checkpoint import commit
from ckpt.checkpoint.open_tier import OpenTier
from ckpt.checkpoint.retention import remember_packs
from ckpt.checkpoint.settle import settle
from ckpt.checkpoint.write import WrittenPart
from ckpt.errors import CheckpointError, FencedError, FullError
from ckpt.format.manifest import Attempt, part_key, table_key
from ckpt.format.manifest import owner as owner_of
from ckpt.ipc.notes import HeldNote
from ckpt.ipc.requests import KeepSteps, Retract
from ckpt.writer.background import Background
from ckpt.writer.dispatch import handles
from ckpt.writer.held_run import HeldRun
from ckpt.writer.memory.held_memory import HeldMemory
from ckpt.writer.present_trainer import PresentTrainer

FAR_PATIENCE = 6  # how much longer ranks wait for each other's parts where these take their time
OUT_OF_TURN = -1


@dataclass(eq=False)
class Settler:
    """Everything runs in the writer's event loop. `settling`: parts that are written and not committed yet, by the
    adoption whose trainer wants that; or `OUT_OF_TURN`, for which other ranks may never bring their parts."""

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    background: Background
    settling: Counter[int] = field(default_factory=Counter)

    @contextlib.contextmanager
    def under_way(self, adoption: int | None = None) -> Iterator[None]:
        """Around what has to come to its end before the writer leaves; by default for the present trainer."""
        begun = self.trainer.adoptions if adoption is None else adoption
        self.settling[begun] += 1
        try:
            yield
        finally:
            self.settling[begun] -= 1

    async def settle(self, tier: OpenTier, written: WrittenPart) -> None:
        """Returns when it is a checkpoint in this tier. SaveError if it was given up."""
        attempt = Attempt.parse(written.part.attempt)
        try:
            await self._commit(tier, written)
            if written.part.world == 1:
                remember_packs(tier.log, attempt, written.table.packs)
            tier.flow.committed(int(written.table.length[: written.table.owned].sum()), own_bytes(written))
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
        self.held_memory.forget_old()
        self._sweep_soon(tier)

    async def _commit(self, tier: OpenTier, written: WrittenPart) -> None:
        part, run = written.part, self.run
        number = run.tiers.index(tier) if tier in run.tiers else -1
        role = (
            tier.role if part.world == tier.role.world else commit.Role(tuple(range(part.world)), part.rank, part.world)
        )
        held = HeldNote(number, part.attempt)
        await run.as_owner(
            tier.log,
            lambda mine: settle(
                tier.log,
                run.mine,
                written,
                role,
                deadline_s=run.commit_s * (FAR_PATIENCE if tier.store.remote else 1),
                on_held=lambda: self.trainer.tell(held),
            ),
        )

    async def _let_go(self, tier: OpenTier, newer: Attempt) -> None:
        """What failed to be written, and keeps what it was to be built on from being retired, is not tried again once
        a newer one is there."""
        mine = self.run.mine()
        for attempt in [a for a in tier.log.state.pins if a < newer and a not in tier.in_flight]:
            if tier.role.place == 0 and tier.role.world == 1 and attempt.epoch <= mine.epoch:
                with contextlib.suppress(CheckpointError):
                    await commit.abort(tier.log, mine, attempt, "it could not be written, and a newer one was")

    def _sweep_soon(self, tier: OpenTier) -> None:
        if tier.role.place == 0 and (tier.sweeping is None or tier.sweeping.done()):
            tier.sweeping = self.background.spawn(tier.sweep(self.run.mine(), self.trainer.tell))

    @handles(KeepSteps)
    def keep_steps(self, request: KeepSteps) -> None:
        """From now on no clean-up takes them; the records that say so come after."""
        for tier in self.run.spoken_for():
            tier.notes = dict(request.notes)
            if tier.opened:
                self.background.spawn(tier.keep_noted(self.run.mine()))

    # -- what does not become one --

    async def tell_others(self, tier: OpenTier, attempt: Attempt, rank: int, error: BaseException) -> None:
        """That this rank's part will not come, if there are others who wait for it."""
        if tier.role.world > 1 and isinstance(error, Exception) and not isinstance(error, FencedError):
            with contextlib.suppress(CheckpointError):
                await commit.abort(tier.log, self.run.mine(), attempt, f"rank {rank}: {error}")

    async def _make_room(self, tier: OpenTier, attempt: Attempt) -> None:
        """All of it was written, and then the disk was full: give the attempt up, and its space back."""
        with contextlib.suppress(CheckpointError):
            await commit.abort(tier.log, self.run.mine(), attempt, "no space left")
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
                await commit.abort(tier.log, self.run.mine(), attempt, f"rank {part.rank}: {error}")
            if attempt in tier.log.state.aborted:
                own = [pack.key for pack in part.packs if owner_of(pack.key) == attempt]
                keys = [*own, part_key(attempt, part.rank, part.number)]
                for key in [*keys, table_key(attempt, part.rank, part.number)]:
                    await tier.log.store.delete(key)

    @handles(Retract)
    async def retract(self, request: Retract) -> None:
        """A snapshot failed, or turned out not to be of one moment: it must not be committed, or not stay so."""
        attempt = Attempt.parse(request.attempt)
        self.held_memory.take_back(attempt)
        failures: list[CheckpointError] = []
        with self.under_way():
            for tier in self.run.tiers:  # all of them, whatever happens in one
                try:
                    async with tier.busy:
                        await tier.prepare()
                        await commit.retract(tier.log, self.run.mine(), attempt, request.reason)
                except CheckpointError as error:
                    failures.append(error)
        if failures:
            raise failures[0]


def own_bytes(written: WrittenPart | None) -> int:
    """What was stored for it, not counting what it shares with older ones."""
    if written is None:
        return 0
    attempt = Attempt.parse(written.part.attempt)
    return sum(pack.size for pack in written.part.packs if owner_of(pack.key) == attempt)
