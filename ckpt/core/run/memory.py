"""The trainer's view of this rank's snapshots, which its writer holds in shared memory.

    SnapshotMemory     the arenas: the current one, the next one (`NextArena`), and arenas of earlier job attempts,
                       which are released when newer snapshots supersede them
    KnownLayouts       layouts that the writer has; it receives a layout before a slot with this layout is sealed
    Acknowledgements   reports a snapshot as staged once a process that survives the trainer has its slot and layout
    Writes             writes to tiers; a slot is pinned until its bytes are stored

If a writer dies, its replacement receives the layouts, the memory and the writes, in this order.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt.core.format.columns import Replicas
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc import messages
from ckpt.core.ipc.arena import MAX_SLOTS, Arena
from ckpt.core.ipc.heartbeat import Process
from ckpt.core.ipc.messages import StoredNote
from ckpt.core.log.run_log import Acquire
from ckpt.core.ranks.world import World
from ckpt.core.run.writer_link import REQUEST_S, WriterClient, start_thread
from ckpt.core.snapshot.stage import Stager
from ckpt.errors import CheckpointError, CorruptError, SaveError, SkippedError, WriterError
from ckpt.events import log
from ckpt.failpoints import point
from ckpt.tiers import Memory, Tier

if TYPE_CHECKING:
    from ckpt.core.run.writer_supervisor import WriterSupervisor


class KnownDigests(NamedTuple):
    """The digests of all chunks of a snapshot, then of its plain values. `late`: the digests were computed after the
    trainer's death or on request, so they do not prove that the memory was intact before."""

    digests: bytes
    late: bool


Digests = dict[tuple[CheckpointId, int], KnownDigests]
"""The known digests of snapshots, by checkpoint id and rank."""


@dataclass
class HeldElsewhere:
    """Memory that a writer holds for an earlier job attempt or for another rank. `damaged`: the reason why an arena
    cannot be used, by arena id."""

    arenas: list[Arena] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    digests: Digests = field(default_factory=dict)
    acquires: list[Acquire] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, hello: messages.LendReply, fds: list[int]) -> HeldElsewhere:
        """Map the memory that a writer has sent, and return it."""
        layouts = {digest: Layout.from_json(layout) for digest, layout in hello.layouts.items()}
        acquires = [Acquire(e, n, None if r is None else CheckpointId.parse(r)) for e, n, r in hello.acquires]
        held = cls([], layouts, as_digests(hello.digests), acquires)
        for key, fd in zip(hello.arenas, fds, strict=True):
            held._attach(key, fd)
        return held

    def _attach(self, key: str, fd: int) -> None:
        try:
            arena = Arena.attach(fd)
            if arena.id.hex() != key:
                raise CorruptError("the header of the shared memory is damaged: it is of another arena")
        except CorruptError as error:
            os.close(fd)
            self.damaged[key] = f"{error}. All snapshots in it are lost"
            log.warning("discarded the memory of the last job attempt: %s", self.damaged[key])
        else:
            self.arenas.append(arena)

    def learn(self, acquires: Iterable[Acquire]) -> None:
        self.acquires += [one for one in acquires if one not in self.acquires]

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


class SnapshotMemory:
    """The arenas of this rank. `next`: the arena being made. `inherited`: memory of earlier job attempts,
    and of ranks that this job does not have. `everyone`: True if every rank has sealed enough newer snapshots."""

    def __init__(
        self,
        writer: WriterSupervisor,
        stager: Stager,
        world: World,
        tiers: list[Tier],
        memory: Memory | None,
        node: Callable[[], int | None],
    ) -> None:
        """`node`: function that returns the NUMA node near the device of this rank, or None if it is unknown."""
        self._writer, self._stager, self._world = writer, stager, world
        self.lasts = memory is not None and memory.linger_s > 0
        # One rank needs the newest snapshot and the next one. With several ranks, one may be a step behind the others.
        slots = 2 if memory is None else max(memory.keep or 2, 2 if world.size == 1 else 3)
        stager.slots.keep = slots
        least, most = 1 if tiers else 2, min(MAX_SLOTS, slots + len(tiers) + 1)
        self.next = NextArena(writer, stager, slots, most, least, world.local_size, node)
        self.inherited = HeldElsewhere()
        self.everyone = False
        self._newer = 0  # finite snapshots since memory was inherited, outgrown or restored
        self._spares: list[Arena] = []  # inherited or outgrown arenas, kept until a newer snapshot is sealed
        self._foreign: set[bytes] = set()  # arenas that other ranks staged into
        self._arriving: Arena | None = None  # the next arena, until the stager uses it
        self._read_before: set[tuple[bytes, int]] = set()  # slots that the inherited writer was reading
        self._watched: tuple[WriterClient, bytes] | None = None  # the writer, and the arena whose mutex it watches
        self._attached: list[Future[tuple[None, list[int]]]] = []  # done when the next writer holds an arena of ours

    def arenas(self) -> list[Arena]:
        """Return the arenas that this rank's writer holds."""
        found = (*self._spares, self._stager.arena, self._arriving)
        return list({arena.id: arena for arena in found if arena is not None}.values())

    def all_arenas(self) -> list[Arena]:
        """Return the arenas of this rank and the inherited arenas that are only read, without duplicates."""
        return list({arena.id: arena for arena in (*self.inherited.arenas, *self.arenas())}.values())

    def holds(self, arena: Arena) -> bool:
        """Return True if this rank's writer holds this arena."""
        return any(arena is mine for mine in self.arenas())

    @property
    def outlives_us(self) -> bool:
        """Return True if snapshots outlive this process."""
        arena = self._stager.arena
        return self.lasts and self._writer.failure is None and (arena is None or arena.is_kept())

    def on_new_writer(self, client: WriterClient) -> None:
        self._stager.gate.writer_pid = client.pid
        self._attached = [
            client.send(messages.AttachArena(foreign=arena.id in self._foreign), (arena.fd,)) for arena in self.arenas()
        ]
        for arena_id, slot in list(self._read_before):  # the previous writer, which was reading these slots, has died
            self.on_read(arena_id.hex(), slot)
        if (current := self._stager.arena) is not None:
            self._watch(current, client)
        self.next.drop()

    def await_attached(self) -> None:
        """Wait until the next writer holds this rank's memory. Raises the writer's error if it cannot hold it."""
        for attached in self._attached:
            attached.result(REQUEST_S)

    # -- memory of earlier job attempts --

    def inherit(self, hello: messages.LendReply, fds: list[int]) -> None:
        """Map the memory of an existing writer. The newest arena that this rank staged into is reused, and all others
        are only read. A slot is not overwritten while the previous trainer may write to it or the writer reads it."""
        self.inherited = HeldElsewhere.of(hello, fds)
        self._foreign = {bytes.fromhex(arena) for arena in hello.foreign}
        usable = [arena for arena in self.inherited.arenas if arena.id not in self._foreign]
        self._arriving = usable[-1] if usable else None
        self._spares = [arena for arena in self.inherited.arenas if arena is not self._arriving]
        start_thread(partial(_touch_newest, self.inherited.arenas), "ckpt-touch")
        if earlier := [Process(*one) for one in hello.writing_on]:
            self._stager.slots.hold(1)
            start_thread(partial(self._await_gone, earlier), "ckpt-before")
        for arena in self.inherited.arenas:
            for slot in (slot for key, slot in hello.writing if key == arena.id.hex()):
                self._stager.slots.pin(arena, slot)
                self._read_before.add((arena.id, slot))

    def adopt(self) -> None:
        """Stage into the inherited arena. If it cannot be locked, use it only for reading. Release damaged arenas."""
        for key in self.inherited.damaged:
            self._writer.send(messages.UseArena(key, used=False))
        if self._arriving is not None:
            try:
                self._use(self._arriving)
            except (CorruptError, WriterError) as error:
                log.warning("read the memory of the last job attempt, but cannot reuse it: %s", error)
                self._spares.append(self._arriving)
            self._arriving = None

    def on_read(self, arena: str, slot: int) -> None:
        """Unpin a slot that the writer was reading when this trainer connected."""
        key = bytes.fromhex(arena), slot
        with self._writer.lock:
            pinned = key in self._read_before
            self._read_before.discard(key)
        if pinned:
            self._stager.slots.unpin(*key)

    def _await_gone(self, earlier: list[Process]) -> None:
        """Block all slots until the previous trainers have ended, because their devices may still copy into them."""
        while any(process.alive for process in earlier):
            time.sleep(0.05)
        self._stager.slots.hold(-1)

    def take(self, found: HeldElsewhere) -> None:
        """Transfer the memory of another writer to ours, for a rank that this job does not have."""
        self.inherited.layouts.update(found.layouts)
        self.inherited.digests.update(found.digests)
        self.inherited.learn(found.acquires)
        held = {arena.id for arena in self.inherited.arenas}  # an interrupted start may have transferred some arenas
        for arena in found.arenas:
            if arena.id in held:
                arena.close()
                continue
            self.inherited.arenas.append(arena)
            self._spares.append(arena)
            self._foreign.add(arena.id)
            self._writer.client.ask(messages.AttachArena(foreign=True), fds=(arena.fd,))

    def _use(self, arena: Arena) -> None:
        """Stage into this arena, and make the current writer watch its mutex."""
        self._stager.use(arena, lambda: self._watch(arena))

    def _watch(self, arena: Arena, client: WriterClient | None = None) -> None:
        with self._writer.lock:
            client = client or self._writer.client
            if self._watched != (client, arena.id):
                self._watched = client, arena.id
                client.send(messages.UseArena(arena.id.hex(), used=True))

    # -- more memory --

    def take_prepared(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the next arena, and switch to it. Raises an error if the writer cannot make it."""
        if (made := self.next.wait(timeout_s)) is None:
            return
        with self._writer.lock:
            if (arena := self.next.attach(made)) is None:
                return
            if (previous := self._stager.arena) is not None:
                self._spares.append(previous)
                self._newer = 0
            self._arriving = arena  # if the writer dies now, the next one gets this arena
        self._use(arena)  # without the lock, because the staging thread acquires it when a job ends
        self._arriving = None
        self.next.say_if_short(arena, "" if self.rings else NONE_KEPT)

    @property
    def rings(self) -> bool:
        """Return True if memory keeps one snapshot while the next one is staged. Otherwise a snapshot stays in memory
        only until a durable tier has it.

        This takes three slots in a multi-rank job: the newest common step must stay while a rank is a step behind.
        """
        arena = self._stager.arena
        if arena is None:
            return not self.next.refused_any
        return bool(arena.slots >= (2 if self._world.size == 1 else 3))

    # -- older memory --

    def on_sealed(self, *, sound: bool = True) -> None:
        """Count a snapshot that was sealed in the current arena. Release older memory when there are enough newer
        finite (`sound`) snapshots.

        One newer snapshot may not be enough, because the last common step is older if a rank is a step behind and dies.
        """
        self._newer += sound
        if (not self._spares and not self.inherited.arenas) or not self.superseded:
            return
        with self._writer.lock:
            busy = self._writer.writes.in_use()
            for arena in self.all_arenas():
                if arena not in (self._stager.arena, self._arriving) and arena.id not in busy:
                    self._writer.send(messages.UseArena(arena.id.hex(), used=False))
                    arena.close()
            self._spares = [arena for arena in self._spares if arena.id in busy]
            self.inherited.arenas = []

    @property
    def newer(self) -> int:
        """Return the number of finite snapshots sealed since the run was opened or restored."""
        return self._newer

    @property
    def superseded(self) -> bool:
        """Return True if every rank has newer snapshots, so that older memory can be released."""
        return self._newer >= 1 if self._world.size == 1 else self._newer >= 2 and self.everyone

    def count_anew(self) -> None:
        """Restart the count of newer snapshots, because a new history begins."""
        self._newer, self.everyone = 0, False

    # -- the end --

    def close(self) -> None:
        """Release all memory and the arena that is being made, with their file descriptors."""
        with self._writer.lock:  # the staging thread may be about to switch arenas
            self.next.drop()
            for arena in self.all_arenas():
                arena.close()
            self._spares, self.inherited.arenas, self._arriving = [], [], None

    def forget(self) -> None:
        """Close the descriptors of the parent's memory in a forked child, including the duplicates that `mmap` made.
        Otherwise they keep all of this memory allocated while the child lives."""
        for arena in self.all_arenas():
            os.close(arena.fd)
            arena.fd = -1
        with open(os.devnull) as nothing:
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:ckpt-"):
                        os.dup2(nothing.fileno(), int(name), inheritable=False)


def _touch_newest(arenas: list[Arena]) -> None:
    """Map the pages of the newest snapshot in advance, so that a restore does not fault on each page."""
    found = [(label.order, number, slot) for number, one in enumerate(arenas) for slot, label in one.sealed()[:1]]
    if found:
        _, number, slot = max(found)
        arena = arenas[number]
        arena.touch(slot, lambda: arena.fd >= 0)


NONE_KEPT = ", so memory keeps no snapshot: only steps that a tier has scheduled are saved"
NO_ROOM = "Until it has more, a step is saved only if a tier has scheduled it, and training waits for that write"


def as_digests(rows: list[messages.Digest]) -> Digests:
    return {
        (CheckpointId.parse(checkpoint), rank): KnownDigests(bytes.fromhex(d), late)
        for checkpoint, rank, d, late in rows
    }


Made = Future[tuple[str, list[int]]]
NOTHING = float("inf")


class NextArena:
    """The next arena, which the writer makes. `slots`: requested number of slots; `least`: minimum number of slots;
    `most`, `ranks`, `node`: see `MakeArena`."""

    def __init__(
        self,
        writer: WriterSupervisor,
        stager: Stager,
        slots: int,
        most: int,
        least: int,
        ranks: int,
        node: Callable[[], int | None],
    ) -> None:
        self._writer, self._stager, self._slots, self._most, self._least = writer, stager, slots, most, least
        self._ranks, self._node = ranks, node
        self._making: Made | None = None
        self._asked_size = self._asked = 0  # requested bytes of a slot, and bytes of the snapshot it must hold
        self._refused_size = NOTHING
        self._said_short = False

    def prepare(self, data_size: int, values_size: int, *, again: bool = False) -> None:
        """Request an arena for snapshots of this size in the background, unless one exists or is being made.

        If memory is short, the arena has fewer slots. After a refusal, request the same size again only with `again`.
        """
        size, wanted = data_size + 4 * values_size + (1 << 18), data_size + values_size
        with self._writer.lock:
            arena = self._stager.arena
            if self._writer.failure or (arena is not None and arena.fits(data_size, values_size)):
                return
            if (self._making is not None and self._asked_size >= wanted) or (self.refused(wanted) and not again):
                return
            self._asked_size, self._asked = size, wanted
            self.drop(release=True)
            self._making = self._writer.send(
                messages.MakeArena(self._slots, size, self._least, self._most, self._ranks, self._node())
            )

    def drop(self, *, release: bool = False) -> None:
        """Discard the arena that is being made, and close its descriptor, which would keep the memory allocated. With
        `release`, also make the writer release its mapping."""
        with self._writer.lock:
            making, self._making = self._making, None
            client = self._writer.client if release else None

        def close(made: Made) -> None:
            if not made.cancelled() and made.exception() is None:
                key, fds = made.result()
                for fd in fds:
                    os.close(fd)
                if client is not None:
                    client.send(messages.UseArena(key, used=False))

        if making is not None:
            making.add_done_callback(close)

    def wait(self, timeout_s: float) -> Made | None:
        """Wait until the arena is made. Return None after the timeout. Raises an error if the writer cannot make it."""
        with self._writer.lock:
            making = self._making
        if making is None:
            return None
        try:
            making.result(timeout_s)
        except WriterError:
            with self._writer.lock:
                self._making = None  # the death of the writer is not a refusal, so the next writer is asked
            return None
        except CheckpointError as error:
            with self._writer.lock:
                self._making, self._refused_size = None, self._asked
            if isinstance(error, SkippedError):
                self._say_short(f"{error}. {NO_ROOM}")
            raise
        except TimeoutError:
            return None
        return making

    def attach(self, made: Made) -> Arena | None:
        """Map a new arena. The caller holds the lock. Return None if a different arena was requested since. Raises
        SkippedError if the arena cannot be mapped."""
        if made is not self._making:
            return None
        self._making = None
        key, fds = made.result()
        try:
            arena = Arena.attach(fds[0])
        except OSError as error:
            os.close(fds[0])
            self._writer.send(messages.UseArena(key, used=False))
            self._refused_size = self._asked
            refusal = SkippedError(f"the memory for snapshots cannot be mapped: {error}. Check `ulimit -v`")
            self._say_short(f"{refusal}. {NO_ROOM}")
            raise refusal from error
        self._refused_size = NOTHING
        self._said_short &= arena.slots < self._slots
        return arena

    def refused(self, nbytes: int) -> bool:
        """Return True if memory for snapshots of this size was requested and refused."""
        return nbytes >= self._refused_size

    @property
    def refused_any(self) -> bool:
        return self._refused_size != NOTHING

    def say_if_short(self, arena: Arena, so: str) -> None:
        """Log a warning if the arena has fewer slots than requested. `so`: text of the consequence, for the log."""
        if arena.slots < self._slots:
            size = f"{arena.slot_size / 2**20:.0f} MiB"
            self._say_short(f"{arena.slots} of {self._slots} snapshots of {size} fit{so}")

    def _say_short(self, what: str) -> None:
        """Log that memory is short, unless this was logged since memory last sufficed."""
        if not self._said_short:
            log.warning("memory is short: %s", what)
        self._said_short = True


# -- snapshots in the writer --


MOST_TRIES = 3  # number of writers that attempt one write, because the write may be what crashes them
MOST_S = 3600.0  # timeout to append to a run log; the store has its own retries


@dataclass
class WriteInFlight:
    """The write of one slot to one tier."""

    checkpoint: CheckpointId
    arena: Arena | None  # None if its bytes were stored without a slot
    slot: int
    tier: int
    done: Callable[[CheckpointError | None, WriteInFlight], None]  # gets the write, so no cycle keeps the arena
    tries: int = 0
    stored: bool = False  # the bytes are in the store, so the slot can be reused
    nbytes: int = 0  # bytes of the snapshot and, on the next line, bytes stored; set when the write is done
    nbytes_stored: int = 0
    replicas: Replicas = field(default_factory=dict)  # digests of replicated tensors, for this rank's manifest


class Writes:
    """The writes of this rank that are under way. If the writer dies, they are sent to the next writer."""

    def __init__(self, writer: WriterSupervisor, stager: Stager) -> None:
        self._writer, self._stager = writer, stager
        self._writes: list[WriteInFlight] = []
        self._retracts: dict[messages.Retract, None] = {}  # requests without a reply, in their order
        self._kept: messages.KeepSteps | None = None  # the last request to keep steps, for the next writer

    def write(self, write: WriteInFlight) -> None:
        """Request the write of a sealed slot, and pin it until its bytes are stored. Finally call `write.done`."""
        with self._writer.lock:
            if write.arena is not None:
                self._stager.slots.pin(write.arena, write.slot)
            if self._writer.failure is not None:
                self._release(write)
                write.done(self._writer.failure, write)
                return
            self._writes.append(write)
            self._send(self._writer.client, write)
        point("save.requested")

    def _send(self, client: WriterClient, write: WriteInFlight) -> None:
        write.tries += 1
        place = "" if write.arena is None else write.arena.id.hex(), write.slot
        future = client.send(
            messages.WriteSlot(write.tier, *place, str(write.checkpoint), write.stored, write.replicas)
        )
        future.add_done_callback(lambda f: self._on_written(write, f))

    def _on_written(self, write: WriteInFlight, future: Future[tuple[messages.WriteSlotReply, list[int]]]) -> None:
        error = future.exception()
        with self._writer.lock:
            if isinstance(error, WriterError) and write.tries <= MOST_TRIES and not self._writer.closing:
                return  # the write is sent to the next writer
            if write not in self._writes:
                return
            self._writes.remove(write)
            self._release(write)
        if error is None:
            reply, _ = future.result()
            write.nbytes, write.nbytes_stored = reply.nbytes, reply.stored
        elif not isinstance(error, CheckpointError):
            error = SaveError(str(error))
        write.done(error, write)

    def on_stored(self, note: StoredNote) -> None:
        with self._writer.lock:
            for write in self._writes:
                if (write.tier, str(write.checkpoint)) == (note.tier, note.checkpoint):
                    self._release(write)

    def _release(self, write: WriteInFlight) -> None:
        """Unpin the slot of a write if that was not done before."""
        if not write.stored:
            write.stored = True
            if write.arena is not None:
                self._stager.slots.unpin(write.arena.id, write.slot)

    def retract(self, checkpoint: CheckpointId, reason: str, tier: int | None = None) -> None:
        """Make the writer abort the checkpoint of a snapshot, and retire it if it was committed. Default: all tiers."""
        request = messages.Retract(str(checkpoint), reason, tier)
        with self._writer.lock:
            self._retracts[request] = None  # kept until the writer replies, because the writer may die before
            self._send_retract(self._writer.client, request)

    def _send_retract(self, client: WriterClient, request: messages.Retract) -> None:
        def done(future: Future[tuple[None, list[int]]]) -> None:
            if not isinstance(future.exception(), WriterError):
                self._retracts.pop(request, None)

        client.send(request).add_done_callback(done)

    def keep_steps(self, notes: Mapping[int, str]) -> None:
        """Pin these steps in every tier. They replace the steps that were pinned before."""
        with self._writer.lock:
            self._kept = messages.KeepSteps(list(notes.items()))
            self._writer.client.send(self._kept)

    def note_down(self, timeout_s: float) -> None:
        """Wait until the run logs contain the pinned steps. Raises StoreError if a log cannot be written now, and
        DeadlineError after `timeout_s`."""
        if (kept := self._kept) is not None and self._writer.failure is None:
            self._writer.insist(lambda client: client.ask(kept, max(0.1, min(timeout_s, MOST_S))))

    def on_new_writer(self, client: WriterClient) -> None:
        if self._kept is not None:
            client.send(self._kept)
        for request in list(self._retracts):
            self._send_retract(client, request)
        for write in list(self._writes):
            self._send(client, write)

    def on_no_writer(self, error: CheckpointError) -> None:
        for write in self._writes:
            self._release(write)
            write.done(error, write)
        self._writes.clear()

    def in_use(self) -> set[bytes]:
        """Return the arenas that the writer still reads."""
        return {write.arena.id for write in self._writes if write.arena is not None}


MOST_LAYOUTS = 64  # number of layouts kept before unused ones are dropped
NEWEST = 8  # number of newest layouts that are always kept


class KnownLayouts:
    """The layouts that the writer has. `known`: layouts of this rank and of the memory in its writer, by digest."""

    def __init__(self, writer: WriterSupervisor, memory: SnapshotMemory) -> None:
        self._writer, self._memory = writer, memory
        self.known: dict[str, Layout] = {}
        self._heard: dict[str, Future[tuple[None, list[int]]]] = {}  # done when the writer has the layout

    def heard(self, digest: str) -> Future[tuple[None, list[int]]] | None:
        """Return a future that is done when the writer has this layout; None if this trainer did not send it."""
        return self._heard.get(digest)

    def differ_from(self, world: int) -> bool:
        """Return True if a layout has another number of ranks. In that case, a restore compares replicated tensors."""
        return any(layout.world not in (1, world) for layout in self.known.values())

    def take(self, layouts: Mapping[str, Layout]) -> None:
        """Send the layouts of another writer to our writer."""
        with self._writer.lock:
            for digest, layout in layouts.items():
                if digest not in self.known:
                    self.known[digest] = layout
                    self._writer.send(messages.KnowLayout(layout.to_json()))

    def tell(self, layout: Layout) -> None:
        """Send a layout to the writer. Call this before a slot with this layout is sealed."""
        if layout.digest in self.known:
            return
        said = layout.to_json()  # outside the lock, because this is slow and a signal handler may need the lock
        with self._writer.lock:
            if len(self.known) > MOST_LAYOUTS:
                self._forget_unused()
            self._heard[layout.digest] = self._writer.send(messages.KnowLayout(said))
            self.known[layout.digest] = layout  # after sending, because Ctrl-C may interrupt this method

    def _forget_unused(self) -> None:
        """Drop layouts that no snapshot uses, because a state whose shapes keep changing creates many layouts."""
        used = {label.layout for arena in self._memory.arenas() for _, label in arena.sealed()}
        used |= {*list(self.known)[-NEWEST:]}
        self.known = {digest: layout for digest, layout in self.known.items() if digest in used}
        self._heard = {digest: heard for digest, heard in self._heard.items() if digest in used}

    def on_new_writer(self, client: WriterClient) -> None:
        for layout in self.known.values():
            client.send(messages.KnowLayout(layout.to_json()))


Done = Callable[[CheckpointError | None], None]


@dataclass(frozen=True)
class AwaitedSlot:
    """A sealed slot. `done` is called when a writer holds it with its layout, or with an error if no writer will."""

    checkpoint: CheckpointId
    layout: str
    arena: Arena
    slot: int
    done: Done


class Acknowledgements:
    """Reports for each snapshot of this rank when a process that survives the trainer holds it."""

    def __init__(self, writer: WriterSupervisor, layouts: KnownLayouts) -> None:
        self._writer, self._layouts = writer, layouts
        self._awaited: dict[tuple[bytes, int], AwaitedSlot] = {}

    def acknowledge(self, checkpoint: CheckpointId, arena: Arena, slot: int, done: Done) -> None:
        """Call `done` when a writer holds the slot and its layout, which is immediately unless the writer has died or
        the layout is new. Call it with an error if no further writer starts, or if the slot is reused first."""
        label = arena.label(slot)
        layout = "" if label is None else label.layout
        with self._writer.lock:
            before = self._awaited.pop((arena.id, slot), None)
            self._awaited[arena.id, slot] = AwaitedSlot(checkpoint, layout, arena, slot, done)
        if before is not None:
            before.done(_used_again(before))
        heard = self._layouts.heard(layout)
        if heard is not None and not heard.done():
            heard.add_done_callback(lambda _: self.settle())  # no reference to the slot, as futures keep callbacks
        self.settle()

    def settle(self) -> None:
        """Call `done` for all snapshots whose outcome is known: a writer holds them, or no writer ever will."""
        with self._writer.lock:  # with the lock, which the transfer of memory to the next writer needs too
            found = [(key, one, self._state(one)) for key, one in self._awaited.items()]
            known = [(key, one, error) for key, one, (is_known, error) in found if is_known]
            for key, _, _ in known:
                del self._awaited[key]
        for _, one, error in known:
            one.done(error)

    def _state(self, one: AwaitedSlot) -> tuple[bool, CheckpointError | None]:
        """Return True if the outcome for this snapshot is known, and the error if no writer will ever hold it."""
        writer, heard = self._writer, self._layouts.heard(one.layout)
        error: CheckpointError | None = writer.lost or writer.failure
        if writer.closing:
            error = error or WriterError("the Checkpointer was closed before a writer held the snapshot")
        if heard is not None and not heard.done():
            return error is not None, error
        refusal = None if heard is None else heard.exception()
        if isinstance(refusal, CheckpointError) and not isinstance(refusal, WriterError):
            return True, refusal  # the run belongs to another job, for example
        if not one.arena.is_kept():
            return error is not None, error
        label = one.arena.label(one.slot)
        return True, None if label is not None and label.checkpoint == one.checkpoint else _used_again(one)

    def on_no_writer(self, error: CheckpointError) -> None:
        with self._writer.lock:
            found, self._awaited = list(self._awaited.values()), {}
        for one in found:
            one.done(error)


def _used_again(one: AwaitedSlot) -> SaveError:
    return SaveError(
        f"step {one.checkpoint.step} was only in the trainer's memory, because the writer had died. A newer step took "
        "its place before another writer held it"
    )
