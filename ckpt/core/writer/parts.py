"""From a snapshot to this rank's part of a checkpoint in one tier, out of memory or as a nearer tier has it; and to a
checkpoint, with the parts of the other ranks; and back, if it must not be one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckpt import events
from ckpt.core.checkpoint import commit, retention
from ckpt.core.checkpoint.byte_source import Bases, ByteSource, InMemory, bases_in, bases_near, no_bases
from ckpt.core.checkpoint.commit_checks import WHOLE_NEXT
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.settle import settle
from ckpt.core.checkpoint.write import RankSnapshot, WrittenPart
from ckpt.core.format.digest import blob_digest
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import Attempt, folder_of, manifest_key
from ckpt.core.format.manifest import owner as owner_of
from ckpt.core.format.table import Table
from ckpt.core.ipc.arena import Arena, Label
from ckpt.core.ipc.notes import HeldNote, SaidNote, SlotReadNote
from ckpt.core.ipc.requests import Retract
from ckpt.core.writer.dispatch import Background, handles
from ckpt.core.writer.held_run import HeldRun, PresentTrainer
from ckpt.core.writer.memory import HeldMemory
from ckpt.errors import CheckpointError, CorruptError, FencedError, FullError, RunGoneError, SaveError, StoreError

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
            if attempt.step in (tier.notes or ()) and tier.role.place == 0:
                await tier.keep_noted(self.run.mine())  # whoever is told of the checkpoint may rely on that, too
            tier.flow.committed(int(written.table.length[: written.table.owned].sum()), own_bytes(written))
            events.log.info("step %d is a checkpoint in %s", attempt.step, tier.url)
        except FullError:
            await self._make_room(tier, attempt)
            raise
        except Exception as error:
            if WHOLE_NEXT in str(error):
                tier.encoder.distrust(attempt)
            if written.part.world > 1:
                await self._give_up(tier, written, error)
            if attempt in tier.log.state.held:
                self._sweep_soon(tier)  # others of its kind may have been there for long
            if isinstance(error, RunGoneError):
                await tier.remove_rest(attempt, written.part.rank)
            raise
        finally:
            tier.in_flight.discard(attempt)
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
                encoder=tier.encoder,
                deadline_s=run.commit_s * (FAR_PATIENCE if tier.store.remote else 1),
                on_held=lambda: self.trainer.tell(held),
                on_slow=lambda text: self.trainer.tell(SaidNote(text)),
            ),
        )

    def _sweep_soon(self, tier: OpenTier) -> None:
        if tier.role.place == 0 and (tier.sweeping is None or tier.sweeping.done()):
            tier.sweeping = self.background.spawn(tier.sweep(self.run.mine(), self.trainer.tell))

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
                listed = [info.key async for info in tier.log.store.list(folder_of(attempt))]
                await retention.delete_unused(tier.log, [key for key in listed if owner_of(key) == attempt])

    async def _give_up(self, tier: OpenTier, written: WrittenPart, error: Exception) -> None:
        """The others need not wait for a committer that failed; and our part of what they gave up takes no space."""
        part, attempt = written.part, Attempt.parse(written.part.attempt)
        with contextlib.suppress(CheckpointError):
            if not isinstance(error, FencedError) and part.reason == "due":
                await commit.abort(tier.log, self.run.mine(), attempt, f"rank {part.rank}: {error}")
            if attempt in tier.log.state.aborted:
                own = [pack.key for pack in part.packs if owner_of(pack.key) == attempt]
                await retention.delete_unused(tier.log, [manifest_key(attempt, part.rank), *own])

    @handles(Retract)
    async def retract(self, request: Retract) -> None:
        """A snapshot failed, or turned out not to be of one moment: it must not be committed, or not stay so."""
        attempt = Attempt.parse(request.attempt)
        self.held_memory.take_back(attempt, request.reason)
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


@dataclass(eq=False)
class PartWriter:
    """Everything runs in the writer's event loop; blocking work goes to threads.

    `reads`: slots that are being written, by arena, and how often; `stored`: by tier, whether our part of what the
    trainer wants there is stored, as soon as it is known.
    """

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    settler: Settler
    reads: dict[tuple[str, int], int] = field(default_factory=dict)
    stored: dict[tuple[str, Attempt], asyncio.Future[bool]] = field(default_factory=dict)

    @contextlib.contextmanager
    def reading(self, arena: Arena, slot: int) -> Iterator[None]:
        """A slot is being written somewhere: whoever takes the memory over leaves it alone until it is told."""
        key, adopted = (arena.id.hex(), slot), self.trainer.adoptions
        self.reads[key] = self.reads.get(key, 0) + 1
        try:
            yield
        finally:
            self.reads[key] -= 1
            if not self.reads[key]:
                del self.reads[key]
                if adopted != self.trainer.adoptions:  # the new trainer was told that this slot is being written
                    self.trainer.tell(SlotReadNote(arena.id.hex(), slot))

    async def store(
        self, tier: OpenTier, arena: Arena, slot: int, label: Label, reason: str = "due", *, last: bool = True
    ) -> WrittenPart | None:
        """Write this rank's part from memory; None if the attempt is a checkpoint already.

        Alone, a failed attempt stays open: it may be written again to further files, and recovery ends what is left.
        With others it is given up at once, so that they need not wait; unless it is not tried for the `last` time.
        """
        attempt, layout = label.attempt, self.held_memory.layouts[label.layout]
        assert attempt is not None
        tier.in_flight.add(attempt)
        try:
            with self.reading(arena, slot):
                written = await self._store(tier, arena, slot, label, layout, attempt, reason)
        except BaseException as error:
            tier.in_flight.discard(attempt)
            if isinstance(error, RunGoneError):
                await tier.remove_rest(attempt, layout.rank)
            if last and reason == "due":
                await self.settler.tell_others(tier, attempt, layout.rank, error)
                if attempt in tier.log.state.commits:
                    return None  # the part was whole, and others were quick
            raise
        if written is None:
            tier.in_flight.discard(attempt)
        return written

    async def _store(
        self,
        tier: OpenTier,
        arena: Arena,
        slot: int,
        label: Label,
        layout: Layout,
        attempt: Attempt,
        reason: str,
    ) -> WrittenPart | None:
        def check(problem: str = "was overwritten in memory while it was written") -> None:
            self.trainer.check_not_fenced()  # else the slot may have been released meanwhile
            # A trainer that lives may go round the ring: before it changes a byte it changes the label.
            if arena.settled(slot) != label:
                raise SaveError(f"step {attempt.step} {problem}")

        memory, run = self.held_memory, self.run
        async with tier.busy:
            await tier.prepare()
            if attempt in tier.log.state.commits:
                return None  # a predecessor did it, and could not say so
            check("is not in memory any more")
            numbers = memory.numbers(tier.url, attempt, run.first_number)
            values = json.loads(bytes(arena.values(slot, label)))
            data = arena.data(slot, label.data_size)

            snapshot = RankSnapshot(attempt, layout, data, values, label.finite, memory.replicas.get(attempt, {}))
            async with run.taking:
                run.succeed(tier.log)
                tier.log.check_owner(run.mine())
            source = InMemory(layout, snapshot.data)
            written = await self.encode(tier, snapshot, source, numbers, reason=reason, check=check)
            if attempt in memory.retracted:
                raise SaveError(f"step {attempt.step} was given up: {memory.retracted[attempt]}")
        digests = written.table.digest[: written.table.owned].tobytes()
        memory.know_digests(attempt, layout.rank, digests + blob_digest(arena.values(slot, label)))
        return written

    async def encode(
        self,
        tier: OpenTier,
        snapshot: RankSnapshot,
        source: ByteSource,
        numbers: Iterator[int],
        *,
        reason: str,
        check: Callable[[], None] = lambda: None,
    ) -> WrittenPart:
        """The part as this tier stores its parts: what is new, and in which form. `check` raises if the source is not
        what it was any more."""
        attempt, layout, near = snapshot.attempt, snapshot.layout, self.run.near(tier)
        previous = await tier.encoder.previous(tier.log, attempt, layout)
        if previous is not None:
            tier.builds_on(attempt, previous.attempt)
        with tier.flow.writing(attempt.step, layout.arrangement.data_size):
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
        if near is not None:
            _anchor(tier, near, written)
        return written


def _bases(tier: OpenTier, near: OpenTier | None, rank: int, reason: str) -> Bases:
    """Where the bytes are read that deltas are taken against."""
    if reason in ("ring", "late"):
        return no_bases
    if near is None:
        return no_bases if tier.store.remote else bases_in(tier.store)
    known: dict[Attempt, Table | None] = {}

    async def find(older: Attempt) -> Table | None:
        if older not in known:
            known[older] = await _table_of(near, older, rank)
        return known[older]

    return bases_near(near.store, find)


def _anchor(tier: OpenTier, near: OpenTier, written: WrittenPart) -> None:
    """Keep in the nearer tier what deltas in the further one are taken against, if there are any."""
    if tier.encoder.policy.compression == "none" or not tier.encoder.uses_bases:
        near.anchors.pop(tier.url, None)
    elif not written.part.needs:
        near.anchors[tier.url] = Attempt.parse(written.part.attempt)


async def _table_of(near: OpenTier, attempt: Attempt, rank: int) -> Table | None:
    """A rank's table of a checkpoint in a nearer tier."""
    found = near.log.state.commits.get(attempt)
    mine = next((part for part in found.parts if part[0] == rank), None) if found is not None else None
    if mine is None:
        return None
    try:
        return (await commit.load_part(near.store, attempt, rank, expected=mine[1])).table
    except (CorruptError, StoreError):
        return None
