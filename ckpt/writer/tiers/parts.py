"""From a snapshot to this rank's part of a checkpoint in one tier: out of memory, or as a nearer tier has it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckpt.checkpoint import commit
from ckpt.checkpoint.byte_source import Bases, ByteSource, InMemory, bases_in, bases_near, no_bases
from ckpt.checkpoint.open_tier import OpenTier
from ckpt.checkpoint.write import RankSnapshot, WrittenPart
from ckpt.errors import CorruptError, SaveError, StoreError
from ckpt.format.digest import blob_digest
from ckpt.format.layout import Layout
from ckpt.format.manifest import Attempt
from ckpt.format.table import Table
from ckpt.ipc.arena import Arena, Label
from ckpt.ipc.notes import UnpinnedNote
from ckpt.writer.held_run import HeldRun
from ckpt.writer.memory.held_memory import HeldMemory
from ckpt.writer.present_trainer import PresentTrainer
from ckpt.writer.tiers.settle import Settler


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
                    self.trainer.tell(UnpinnedNote(arena.id.hex(), slot))

    async def store(
        self, tier: OpenTier, arena: Arena, slot: int, label: Label, reason: str = "due", *, last: bool = True
    ) -> WrittenPart | None:
        """Write this rank's part from memory; None if the attempt is a checkpoint already.

        Alone, a failed attempt stays open: it may be written again by a higher try, and recovery ends what is left.
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
            if last and reason == "due":
                await self.settler.tell_others(tier, attempt, layout.rank, error)
                if attempt in tier.log.state.commits:
                    return None  # the part was whole, and others were quick
            raise
        if written is None:
            tier.in_flight.discard(attempt)
        return written

    async def _store(
        self, tier: OpenTier, arena: Arena, slot: int, label: Label, layout: Layout, attempt: Attempt, reason: str
    ) -> WrittenPart | None:
        def check(problem: str = "was overwritten in memory while it was written") -> None:
            # A trainer that lives may go round the ring: before it changes a byte it changes the label.
            if arena.label(slot) != label:
                raise SaveError(f"step {attempt.step} {problem}")

        memory, run = self.held_memory, self.run
        async with tier.busy:
            await tier.prepare()
            if attempt in tier.log.state.commits:
                return None  # a predecessor did it, and could not say so
            number = memory.next_try(attempt, run.first_try)
            check("is not in memory any more")
            values = json.loads(bytes(arena.values(slot, label)))
            snapshot = RankSnapshot(attempt, layout, arena.data(slot, label.data_size), values, label.finite)
            async with run.taking:
                run.succeed(tier.log)
                tier.log.check_owner(run.mine())
            source = InMemory(layout, snapshot.data)
            written = await self.encode(tier, snapshot, source, number, reason=reason, check=check)
            if attempt in memory.retracted:
                raise SaveError(f"step {attempt.step} was taken back while it was written")
        digests = written.table.digest[: written.table.owned].tobytes()
        memory.digests[attempt, layout.rank] = digests + blob_digest(arena.values(slot, label))
        return written

    async def encode(
        self,
        tier: OpenTier,
        snapshot: RankSnapshot,
        source: ByteSource,
        number: int,
        *,
        reason: str,
        check: Callable[[], None] = lambda: None,
    ) -> WrittenPart:
        """The part as this tier stores its parts: what is new, and in which form. `check` raises if the source is not
        what it was any more."""
        attempt, layout, near = snapshot.attempt, snapshot.layout, self.run.near(tier)
        previous = await tier.encoder.previous(tier.log, attempt, layout)
        with tier.flow.writing(attempt.step, layout.arrangement.data_size):
            written = await tier.encoder.write(
                tier.log.store,
                snapshot,
                source,
                previous,
                number=number,
                reason=reason,
                on_needs=functools.partial(self._pin, tier, attempt),
                bases=_bases(tier, near, layout.rank, reason),
                check=check,
            )
        if near is not None:
            _anchor(tier, near, written)
        return written

    async def _pin(self, tier: OpenTier, attempt: Attempt, built_on: Attempt) -> bool:
        """The writer that commits pins what is built on; that it is still there is seen again at the commit."""
        try:
            if tier.role.place == 0:
                await self.run.as_owner(tier.log, lambda mine: commit.begin(tier.log, mine, attempt, (built_on,)))
        except SaveError:
            return False
        return built_on in tier.log.state.commits


def _bases(tier: OpenTier, near: OpenTier | None, rank: int, reason: str) -> Bases:
    """Where the bytes are read that deltas are taken against."""
    if reason == "ring":
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
        return (await commit.load_part(near.store, attempt, rank, mine[1], expected=mine[2])).table
    except (CorruptError, StoreError):
        return None
