"""The memory that a writer holds: arenas, the layouts and digests of the snapshots in them, and requests for them.

A writer holds the arenas of its trainer, arenas that the trainer inherited from ranks that no longer exist (`foreign`),
and copies of the memory of other nodes (`copies`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from ckpt.core.checkpoint.write import digest_chunks
from ckpt.core.format.columns import Replicas
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc import messages
from ckpt.core.ipc.arena import FREE_SHARE, Arena, ArenaKeeper, Label, room
from ckpt.core.ipc.messages import Digest
from ckpt.core.log.run_log import Acquire, in_history
from ckpt.core.writer.held_run import Answer, Caller, PresentTrainer, handles
from ckpt.errors import SaveError, SkippedError, WriterError
from ckpt.events import log
from ckpt.units import count_of

MAX_LAYOUTS = 256  # maximum number of layouts; far more than a trainer expects the writer to have
RING_SHARE = 0.5  # share of a machine's memory that all arenas may use for slots beyond the second one
KEEP_S = 1.0  # timeout for another process to release an arena that it keeps


def room_for(slots: int, slot_size: int, least: int, ranks: int = 1) -> int:
    """Return the number of slots of this size that fit into free memory, at most `slots`. If this is more than two,
    the arenas of all `ranks` on this machine take at most half of its memory. Raises SkippedError below `least`."""
    there = room()
    free = there.available
    fair = int(RING_SHARE * there.total) // ranks // slot_size
    found = min(slots, int(FREE_SHARE * free) // slot_size, max(2, fair))
    if found < least:
        some = "a snapshot" if least == 1 else f"{least} snapshots"
        fits = "does" if least == 1 else "do"
        raise SkippedError(
            f"{some} of {slot_size / 2**20:.0f} MiB {fits} not fit into {FREE_SHARE:.0%} of the {free / 2**20:.0f} "
            "MiB of memory that are free: give the job more memory"
        )
    return found


def check_room(slots: int, slot_size: int) -> None:
    """Raise SkippedError if an arena of this size does not fit into free memory."""
    room_for(slots, slot_size, slots)


def make_arena(
    slots: int, slot_size: int, least: int, *, most: int = 0, ranks: int = 1, node: int | None = None
) -> Arena:
    """Make an arena with as many slots as fit, at most `slots`, of which the first is ready. Raises SkippedError if
    fewer than `least` fit. `most`, `ranks`, `node`: see `MakeArena`."""
    wanted = slots
    slots = room_for(slots, slot_size, least, max(1, ranks))
    while True:
        try:
            return Arena.create(
                slots, slot_size, most=max(most, slots) if slots == wanted else slots, ready=1, node=node
            )
        except (MemoryError, OSError) as error:  # other processes took the memory, or memory locking is limited
            if slots == least:
                raise SkippedError(f"no room in memory for {count_of(slots, 'snapshot')}: {error}") from error
            slots -= 1


def _make_ready(arena: Arena) -> None:
    """Make the other slots ready in a thread while the trainer fills the first slot."""

    def work() -> None:
        try:
            arena.make_ready()
        except MemoryError as error:
            log.warning("keeping only %s in memory: %s", count_of(arena.slots, "snapshot"), error)

    threading.Thread(target=work, name="ckpt-ready", daemon=True).start()


class HeldMemory:
    """The snapshots that this writer holds. All methods run in the event loop of the writer, except that `digest_ring`
    runs in a thread because it takes long."""

    def __init__(self, trainer: PresentTrainer) -> None:
        self._trainer = trainer
        self.arenas: dict[str, Arena] = {}
        self.keeping: dict[str, ArenaKeeper] = {}  # a keeper for each of these arenas
        self.foreign: set[str] = set()  # ids of arenas that other ranks staged into, which are only read
        self.layouts: dict[str, Layout] = {}
        self.digests: dict[tuple[CheckpointId, int], bytes] = {}  # by checkpoint id, and rank that made the snapshot
        self.late: set[tuple[CheckpointId, int]] = set()  # keys of digests from `digest_ring` or from after a death
        self.retracted: dict[CheckpointId, str] = {}  # snapshots that must not become checkpoints, and the reasons
        self.replicas: dict[CheckpointId, Replicas] = {}  # digests of replicated tensors, for manifests of this rank
        self._numbers: dict[tuple[str, CheckpointId], Iterator[int]] = {}
        self.copies: dict[int, Arena] = {}  # copies of the memory of other nodes, by rank, which a plug-in fills

    def all(self) -> list[Arena]:
        return [*self.arenas.values(), *self.copies.values()]

    def add(self, arena: Arena, *, foreign: bool = False) -> None:
        self.arenas[arena.id.hex()], self.keeping[arena.id.hex()] = arena, arena.keep()
        if foreign:
            self.foreign.add(arena.id.hex())

    def free_all(self) -> None:
        """Return the memory to the system although the trainer may live, because the trainer has lost the run. Its
        later copies are never acknowledged. Only this method changes slots without holding their mutex. This is safe,
        because readers compare the label afterwards or are fenced too."""
        for key, arena in list(self.arenas.items()):
            for slot in range(arena.slots):
                arena.give_up(slot)
            self.release(key)

    def release(self, key: str) -> None:
        """Release an arena that this writer holds."""
        arena = self.arenas.pop(key, None)
        if arena is not None:
            self.keeping.pop(key).let_go()
            arena.close()

    def layouts_in_use(self, arenas: Iterable[Arena]) -> dict[str, Any]:
        """Return the layouts of the snapshots in these arenas, as JSON. Unused layouts are omitted, because a state
        whose shapes keep changing leaves many."""
        used = {label.layout for arena in arenas for _, label in arena.sealed()}
        return {digest: layout.to_json() for digest, layout in self.layouts.items() if digest in used}

    def ring(self) -> list[tuple[Arena, int, Label]]:
        """Return all sealed snapshots, newest first, except copies from other nodes."""
        found = [(arena, slot, label) for arena in self.arenas.values() for slot, label in arena.sealed()]
        return sorted(found, key=lambda one: -one[2].order)

    def keep_layout(self, layout: Layout) -> None:
        self.layouts[layout.digest] = layout
        if len(self.layouts) > MAX_LAYOUTS:  # shapes keep changing; the trainer sends a forgotten layout again
            used = {label.layout for arena in self.all() for _, label in arena.sealed()}
            recent = list(self.layouts)[-MAX_LAYOUTS // 2 :]
            self.layouts = {key: self.layouts[key] for key in self.layouts if key in used or key in recent}

    def known_digests(self) -> list[Digest]:
        return [(str(key[0]), key[1], found.hex(), key in self.late) for key, found in list(self.digests.items())]

    def know_digests(self, checkpoint: CheckpointId, rank: int, digests: bytes) -> None:
        """Keep the digests of a written snapshot. Raises SaveError if earlier digests differ, so memory was damaged."""
        key = checkpoint, rank
        if not self._trainer.dead:
            self.digests[key] = digests
            return
        if key not in self.digests:
            self.late.add(key)
        if self.digests.setdefault(key, digests) != digests:
            raise SaveError(
                f"step {checkpoint.step} of rank {rank} was damaged in memory: its bytes do not match the digests that "
                "were computed before"
            )

    def numbers(self, url: str, checkpoint: CheckpointId, first: int) -> Iterator[int]:
        """Return an iterator over the data file numbers that this writer may still use for a checkpoint in a tier."""
        return self._numbers.setdefault((url, checkpoint), itertools.count(first))

    def forget_old(self) -> None:
        """Forget digests and numbers of snapshots that are no longer in memory."""
        held = {label.checkpoint for arena in self.all() for _, label in arena.sealed()}
        self.digests = {(checkpoint, rank): d for (checkpoint, rank), d in self.digests.items() if checkpoint in held}
        self.late &= self.digests.keys()
        self.replicas = {checkpoint: found for checkpoint, found in self.replicas.items() if checkpoint in held}
        self._numbers = {key: numbers for key, numbers in self._numbers.items() if key[1] in held}

    def wanted(
        self, history: Sequence[Acquire], checkpoints: Collection[CheckpointId] | None = None
    ) -> list[CheckpointId]:
        """Return the ids of the snapshots in this history, newest first, without retracted ones. If `checkpoints` is
        given, return only ids in it."""
        ring = {label.checkpoint for _, _, label in self.ring() if label.checkpoint is not None}
        found = in_history(history, ring - self.retracted.keys())
        return [checkpoint for checkpoint in found if checkpoints is None or checkpoint in checkpoints]

    def something(self) -> bool:
        """Return True if memory has a snapshot, or damage that the next start has to report."""
        return any(arena.sealed() or arena.damage() for arena in self.all())

    def digest_ring(self) -> None:
        for arena in self.all():
            for problem in arena.damage():
                log.warning("%s", problem)
            for slot, label in arena.sealed():
                layout = self.layouts.get(label.layout)
                if layout is None or label.checkpoint is None or (label.checkpoint, layout.rank) in self.digests:
                    continue
                chunks = digest_chunks(layout, arena.data(slot, label.data_size))
                found = chunks + chunk_digest(arena.values(slot, label))
                if arena.settled(slot) == label:  # otherwise a living trainer may have overwritten it
                    self.late.add((label.checkpoint, layout.rank))
                    self.digests[label.checkpoint, layout.rank] = found

    # -- requests --

    @handles(messages.MakeArena)
    async def make(self, request: messages.MakeArena) -> Answer:
        begun = self._trainer.adoptions
        arena = await asyncio.to_thread(
            make_arena,
            request.slots,
            request.slot_size,
            request.least,
            most=request.most,
            ranks=request.ranks,
            node=request.node,
        )
        if begun != self._trainer.adoptions:  # the next trainer would never release this arena
            arena.close()
            raise SkippedError("the trainer that requested this memory has lost the run, or died")
        self.add(arena)
        await self._kept(arena.id.hex())
        _make_ready(arena)
        return Answer(arena.id.hex(), (arena.fd,))

    async def _kept(self, key: str) -> None:
        await asyncio.to_thread(self.keeping[key].begun.wait, KEEP_S)

    @handles(messages.AttachArena)
    async def attach(self, request: messages.AttachArena, caller: Caller) -> None:
        """Hold an arena of the trainer. Raises WriterError if this writer now serves another trainer, because that
        trainer would never release the arena."""
        if self._trainer.channel not in (caller.channel, None):
            os.close(caller.fds[0])
            raise WriterError("this writer now serves another trainer")
        arena = Arena.attach(caller.fds[0])
        self.add(arena, foreign=request.foreign)
        if not request.foreign:  # the previous writer may not have made all slots ready
            _make_ready(arena)
        await self._kept(arena.id.hex())

    @handles(messages.KnowLayout)
    def know_layout(self, request: messages.KnowLayout) -> None:
        self.keep_layout(Layout.from_json(request.layout))
