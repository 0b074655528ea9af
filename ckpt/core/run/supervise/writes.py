"""Tracks this rank's snapshots in the writer, which gets their layouts, holds them, and writes them to tiers.

A writer that replaces a dead one gets all of these requests again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import Attempt
from ckpt.core.format.replicas import Replicas
from ckpt.core.ipc import requests
from ckpt.core.ipc.arena import Arena
from ckpt.core.ipc.notes import SlotReadNote
from ckpt.core.run.supervise.memory import SnapshotMemory
from ckpt.core.run.supervise.writer_link import CurrentWriter, WriterClient, WriterUser
from ckpt.core.snapshot.stage import Stager
from ckpt.errors import CheckpointError, SaveError, WriterError
from ckpt.failpoints import point

MOST_TRIES = 3  # number of writers that try one write, because the write may be what kills them
MOST_S = 3600.0  # timeout to append to a run log; the store has its own retries


@dataclass
class WriteInFlight:
    """The write of one slot to one tier."""

    attempt: Attempt
    arena: Arena | None  # None if its bytes were stored without a slot
    slot: int
    tier: int
    done: Callable[[CheckpointError | None, WriteInFlight], None]  # gets the write: a cycle would keep the arena alive
    tries: int = 0
    stored: bool = False  # its bytes are in the store, so the slot can be reused
    nbytes: int = 0  # size of the snapshot, and of the bytes stored for it; set when the write is done
    nbytes_stored: int = 0
    replicas: Replicas = field(default_factory=dict)  # digests of replicated tensors, for its part


class Writes(WriterUser):
    """The writes of this rank that are under way. If the writer dies, the next one gets them."""

    def __init__(self, writer: CurrentWriter, stager: Stager) -> None:
        self._writer, self._stager = writer, stager
        self._writes: list[WriteInFlight] = []
        self._retracts: dict[Attempt, str] = {}
        self._kept: requests.KeepSteps | None = None  # the last request to keep steps, for the next writer

    def write(self, write: WriteInFlight) -> None:
        """Request the write of a sealed slot, and pin it until its bytes are stored. Calls `write.done` at the end."""
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
        future = client.send(requests.WriteSlot(write.tier, *place, str(write.attempt), write.stored, write.replicas))
        future.add_done_callback(lambda f: self._on_written(write, f))

    def _on_written(self, write: WriteInFlight, future: Future[tuple[requests.WriteSlotReply, list[int]]]) -> None:
        error = future.exception()
        with self._writer.lock:
            if isinstance(error, WriterError) and write.tries <= MOST_TRIES and not self._writer.closing:
                return  # the next writer gets it
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

    def on_stored(self, note: SlotReadNote) -> None:
        with self._writer.lock:
            for write in self._writes:
                if (write.tier, str(write.attempt)) == (note.tier, note.attempt):
                    self._release(write)

    def _release(self, write: WriteInFlight) -> None:
        """Unpin the slot of a write, once."""
        if not write.stored:
            write.stored = True
            if write.arena is not None:
                self._stager.slots.unpin(write.arena.id, write.slot)

    def retract(self, attempt: Attempt, reason: str) -> None:
        """Retract a snapshot: it must not become a checkpoint, or must not remain one."""
        with self._writer.lock:
            self._retracts[attempt] = reason  # kept until done, because the writer may die before
            self._send_retract(self._writer.client, attempt, reason)

    def _send_retract(self, client: WriterClient, attempt: Attempt, reason: str) -> None:
        def done(future: Future[tuple[None, list[int]]]) -> None:
            if not isinstance(future.exception(), WriterError):
                self._retracts.pop(attempt, None)

        client.send(requests.Retract(str(attempt), reason)).add_done_callback(done)

    def keep_steps(self, notes: Mapping[int, str]) -> None:
        """Keep these steps in every tier regardless of their age. This replaces the steps kept before."""
        with self._writer.lock:
            self._kept = requests.KeepSteps(list(notes.items()))
            self._writer.client.send(self._kept)

    def note_down(self, timeout_s: float) -> None:
        """Wait until the run logs contain the kept steps. Raises StoreError if one cannot be written now, and
        DeadlineError."""
        if (kept := self._kept) is not None and self._writer.failure is None:
            self._writer.insist(lambda client: client.ask(kept, max(0.1, min(timeout_s, MOST_S))))

    def on_new_writer(self, client: WriterClient) -> None:
        if self._kept is not None:
            client.send(self._kept)
        for attempt, reason in list(self._retracts.items()):
            self._send_retract(client, attempt, reason)
        for write in list(self._writes):
            self._send(client, write)

    def on_no_writer(self, error: CheckpointError) -> None:
        for write in self._writes:
            self._release(write)
            write.done(error, write)
        self._writes.clear()

    def in_use(self) -> set[bytes]:
        return {write.arena.id for write in self._writes if write.arena is not None}


MOST_LAYOUTS = 64  # number of layouts kept before unused ones are dropped
NEWEST = 8  # number of newest layouts that are always kept


class KnownLayouts(WriterUser):
    """Layouts that the writer has. `known`: those of this rank and of the memory in its writer, by digest."""

    def __init__(self, writer: CurrentWriter, memory: SnapshotMemory) -> None:
        self._writer, self._memory = writer, memory
        self.known: dict[str, Layout] = {}
        self._heard: dict[str, Future[tuple[None, list[int]]]] = {}  # done when the writer has the layout

    def heard(self, digest: str) -> Future[tuple[None, list[int]]] | None:
        """Return a future that is done when the writer has this layout; None if it had it before."""
        return self._heard.get(digest)

    def differ_from(self, world: int) -> bool:
        """Return True if a layout is for another number of ranks. Then a restore compares replicated tensors."""
        return any(layout.world not in (1, world) for layout in self.known.values())

    def take(self, layouts: Mapping[str, Layout]) -> None:
        """Send the layouts of another writer to ours."""
        with self._writer.lock:
            for digest, layout in layouts.items():
                if digest not in self.known:
                    self.known[digest] = layout
                    self._writer.send(requests.KnowLayout(layout.to_json()))

    def tell(self, layout: Layout) -> None:
        """Send a layout to the writer, before a slot is sealed with it."""
        if layout.digest in self.known:
            return
        said = layout.to_json()  # slow, so not under the lock, which a signal handler may need
        with self._writer.lock:
            if len(self.known) > MOST_LAYOUTS:
                self._forget_unused()
            self._heard[layout.digest] = self._writer.send(requests.KnowLayout(said))
            self.known[layout.digest] = layout  # last, because Ctrl-C may interrupt this

    def _forget_unused(self) -> None:
        """Drop layouts that no snapshot uses. A state whose shapes keep changing creates many."""
        used = {label.layout for arena in self._memory.arenas() for _, label in arena.sealed()}
        used |= {*list(self.known)[-NEWEST:]}
        self.known = {digest: layout for digest, layout in self.known.items() if digest in used}
        self._heard = {digest: heard for digest, heard in self._heard.items() if digest in used}

    def on_new_writer(self, client: WriterClient) -> None:
        for layout in self.known.values():
            client.send(requests.KnowLayout(layout.to_json()))


Done = Callable[[CheckpointError | None], None]


@dataclass(frozen=True)
class AwaitedSlot:
    """A sealed slot. `done` is called when a writer holds it and has its layout, or with the error if none will."""

    attempt: Attempt
    layout: str
    arena: Arena
    slot: int
    done: Done


class Acknowledgements(WriterUser):
    """Reports for each snapshot of this rank when a process that survives the trainer holds it."""

    def __init__(self, writer: CurrentWriter, layouts: KnownLayouts) -> None:
        self._writer, self._layouts = writer, layouts
        self._awaited: dict[tuple[bytes, int], AwaitedSlot] = {}

    def acknowledge(self, attempt: Attempt, arena: Arena, slot: int, done: Done) -> None:
        """Call `done` when a writer holds the slot and its layout: immediately, unless the writer has died or the
        layout is new. `done` gets an error if no further writer starts, or if the slot is reused before that."""
        label = arena.label(slot)
        layout = "" if label is None else label.layout
        with self._writer.lock:
            before = self._awaited.pop((arena.id, slot), None)
            self._awaited[arena.id, slot] = AwaitedSlot(attempt, layout, arena, slot, done)
        if before is not None:
            before.done(_used_again(before))
        heard = self._layouts.heard(layout)
        if heard is not None and not heard.done():
            heard.add_done_callback(lambda _: self.settle())  # no reference to the slot, as futures keep callbacks
        self.settle()

    def settle(self) -> None:
        """Report all snapshots for which it is known whether a writer holds them."""
        with self._writer.lock:  # the next writer gets the memory while this is locked
            found = [(key, one, self._state(one)) for key, one in self._awaited.items()]
            known = [(key, one, error) for key, one, (is_known, error) in found if is_known]
            for key, _, _ in known:
                del self._awaited[key]
        for _, one, error in known:
            one.done(error)

    def _state(self, one: AwaitedSlot) -> tuple[bool, CheckpointError | None]:
        """Return True if it is known whether a writer holds this snapshot, and the error if none ever will."""
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
        return True, None if label is not None and label.attempt == one.attempt else _used_again(one)

    def on_no_writer(self, error: CheckpointError) -> None:
        with self._writer.lock:
            found, self._awaited = list(self._awaited.values()), {}
        for one in found:
            one.done(error)


def _used_again(one: AwaitedSlot) -> SaveError:
    return SaveError(
        f"step {one.attempt.step} was only in the trainer's memory, because the writer had died, and a newer step took "
        "its place before another writer held it"
    )
