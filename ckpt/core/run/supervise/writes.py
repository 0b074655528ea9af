"""What a writer, and the next one, has to know of snapshots: their layouts, that it keeps them, that it writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import Attempt
from ckpt.core.format.replicas import Replicas
from ckpt.core.ipc import requests
from ckpt.core.ipc.arena import Arena
from ckpt.core.ipc.notes import StoredNote
from ckpt.core.run.supervise.current_writer import CurrentWriter, WriterUser
from ckpt.core.run.supervise.memory import SnapshotMemory
from ckpt.core.run.supervise.writer_client import WriterClient
from ckpt.core.snapshot.stage import Stager
from ckpt.errors import CheckpointError, FencedError, SaveError, WriterError
from ckpt.failpoints import point

MOST_TRIES = 3  # by so many writers, and no more
MOST_S = 3600.0  # for a run log to take a record: the store has its own patience


@dataclass
class WriteInFlight:
    """A slot on its way to one tier."""

    attempt: Attempt
    arena: Arena | None  # None: its bytes were stored without a slot
    slot: int
    tier: int
    done: Callable[[CheckpointError | None, WriteInFlight], None]  # a cycle would keep the arena after close()
    tries: int = 0
    stored: bool = False  # its bytes are in the store: the slot may be used again
    nbytes: int = 0  # when it is done: of the snapshot, and of what was stored for it
    nbytes_stored: int = 0
    replicas: Replicas = field(default_factory=dict)  # what its part says of replicated tensors


class Writes(WriterUser):
    """Of one rank. What is to be written when the writer has died waits here for the next one."""

    def __init__(self, writer: CurrentWriter, stager: Stager) -> None:
        self._writer, self._stager = writer, stager
        self._writes: list[WriteInFlight] = []
        self._retracts: dict[Attempt, str] = {}
        self._kept: requests.KeepSteps | None = None  # what the next writer is told as well

    def write(self, write: WriteInFlight) -> None:
        """Have a sealed slot written; its slot is pinned until then. `done` is called with the error, if any."""
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

    def on_stored(self, note: StoredNote) -> None:
        with self._writer.lock:
            for write in self._writes:
                if (write.tier, str(write.attempt)) == (note.tier, note.attempt):
                    self._release(write)

    def _release(self, write: WriteInFlight) -> None:
        """Its slot."""
        if not write.stored:
            write.stored = True
            if write.arena is not None:
                self._stager.slots.unpin(write.arena.id, write.slot)

    def retract(self, attempt: Attempt, reason: str) -> None:
        """This snapshot must not become a checkpoint, or not stay one."""
        with self._writer.lock:
            self._retracts[attempt] = reason  # until it is done: the writer may die before
            self._send_retract(self._writer.client, attempt, reason)

    def _send_retract(self, client: WriterClient, attempt: Attempt, reason: str) -> None:
        def done(future: Future[tuple[None, list[int]]]) -> None:
            if not isinstance(future.exception(), WriterError):
                self._retracts.pop(attempt, None)

        client.send(requests.Retract(str(attempt), reason)).add_done_callback(done)

    def keep_steps(self, notes: Mapping[int, str]) -> None:
        """These steps stay in every tier, however old they get; no others do that were kept so before."""
        with self._writer.lock:
            self._kept = requests.KeepSteps(list(notes.items()))
            self._writer.client.send(self._kept)

    def note_down(self, timeout_s: float) -> None:
        """Return when the run logs say which steps stay. StoreError if one cannot be written now, or DeadlineError."""
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


MOST_LAYOUTS = 64  # that are kept without asking whether they are needed
NEWEST = 8  # that are kept in any case


class KnownLayouts(WriterUser):
    """`known`: by digest, those of this rank, and of the memory that its writer holds."""

    def __init__(self, writer: CurrentWriter, memory: SnapshotMemory) -> None:
        self._writer, self._memory = writer, memory
        self.known: dict[str, Layout] = {}
        self._heard: dict[str, Future[tuple[None, list[int]]]] = {}  # when the writer has

    def heard(self, digest: str) -> Future[tuple[None, list[int]]] | None:
        """Done when the writer knows it; None of one that was there before."""
        return self._heard.get(digest)

    def differ_from(self, world: int) -> bool:
        """Whether there are some of another number of ranks: it matters then what is the same in their snapshots."""
        return any(layout.world not in (1, world) for layout in self.known.values())

    def take(self, layouts: Mapping[str, Layout]) -> None:
        """What another writer knows, ours has to know as well."""
        for digest, layout in layouts.items():
            if digest not in self.known:
                self.known[digest] = layout
                self._writer.send(requests.KnowLayout(layout.to_json()))

    def tell(self, layout: Layout) -> None:
        """Before a slot is sealed with it."""
        if layout.digest in self.known:
            return
        said = layout.to_json()  # takes a while: not with the lock, which a signal handler may need
        with self._writer.lock:
            if len(self.known) > MOST_LAYOUTS:
                self._forget_unused()
            self._heard[layout.digest] = self._writer.send(requests.KnowLayout(said))
            self.known[layout.digest] = layout  # last: Ctrl-C may come in between

    def _forget_unused(self) -> None:
        """A state whose shapes keep changing must not fill the memory with layouts."""
        used = {label.layout for arena in self._memory.arenas() for _, label in arena.sealed()}
        used |= {*list(self.known)[-NEWEST:]}
        self.known = {digest: layout for digest, layout in self.known.items() if digest in used}
        self._heard = {digest: heard for digest, heard in self._heard.items() if digest in used}

    def on_new_writer(self, client: WriterClient) -> None:
        for layout in self.known.values():
            client.send(requests.KnowLayout(layout.to_json()))


Done = Callable[[CheckpointError | None], None]


@dataclass(frozen=True)
class UnheldSlot:
    """A sealed slot of memory that only we have. `done`: told when the next writer has it too, or why none has."""

    attempt: Attempt
    arena: Arena
    slot: int
    done: Done

    @property
    def used_again(self) -> SaveError:
        return SaveError(
            f"step {self.attempt.step} was in the trainer's memory only, since the writer had died, and a newer step "
            "took its place before another writer had it"
        )


class Acknowledgements(WriterUser):
    """Of one rank."""

    def __init__(self, writer: CurrentWriter, layouts: KnownLayouts) -> None:
        self._writer, self._layouts = writer, layouts
        self._unheld: dict[tuple[bytes, int], UnheldSlot] = {}  # by slot

    def acknowledge(self, attempt: Attempt, arena: Arena, slot: int, done: Done) -> None:
        """Call `done` once a process that survives this one has the slot, and knows its layout: at once, unless our
        writer has died, or the layout is new. With an error if there will be none any more, or if the slot was used
        again before there was one."""
        label = arena.label(slot)
        heard = None if label is None else self._layouts.heard(label.layout)
        if heard is not None and not heard.done():
            closed = WriterError(f"closed before the writer had heard of the layout of step {attempt.step}")
            later = [(attempt, arena, slot, done)]  # a future keeps what it has called, which must not keep the memory

            def go_on(_: object) -> None:
                one = later.pop()
                if self._writer.closing:
                    one[-1](closed)
                else:
                    self.acknowledge(*one)

            heard.add_done_callback(go_on)
            return
        refusal = None if heard is None else heard.exception()
        if isinstance(refusal, CheckpointError) and not isinstance(refusal, WriterError):
            done(refusal)  # who has lost the run, say, is not listened to
        elif arena.is_kept():
            done(None)
        else:
            self._await_keeper(UnheldSlot(attempt, arena, slot, done))

    def _await_keeper(self, one: UnheldSlot) -> None:
        key = one.arena.id, one.slot
        with self._writer.lock:
            error, before = self._writer.failure, self._unheld.pop(key, None)
            if self._writer.closing:
                error = error or WriterError("the Checkpointer was closed, and there is no writer any more")
            if error is None:
                self._unheld[key] = one
                self._ask_to_keep(self._writer.client, one.arena)
        if before is not None:
            before.done(before.used_again)
        if error is not None:
            one.done(error)

    def _ask_to_keep(self, client: WriterClient, arena: Arena) -> None:
        future = client.send(requests.KeepArena(arena.id.hex()))
        future.add_done_callback(lambda future: self._on_keep(client, arena, future.exception()))

    def _on_keep(self, client: WriterClient, arena: Arena, error: BaseException | None) -> None:
        """The writer should have it by now."""
        if isinstance(error, WriterError):
            return  # the next one is asked
        with self._writer.lock:
            kept = arena.is_kept()
            if error is None and not kept:
                self._ask_to_keep(client, arena)
                return
            found = [self._unheld.pop(key) for key in list(self._unheld) if key[0] == arena.id]
        for one in found:
            holds = any((slot, label.attempt) == (one.slot, one.attempt) for slot, label in arena.sealed())
            refusal = error if isinstance(error, FencedError) else None  # who has lost the run is not kept anything for
            one.done(refusal or (None if kept and holds else one.used_again))

    def on_new_writer(self, client: WriterClient) -> None:
        for arena in {one.arena.id: one.arena for one in self._unheld.values()}.values():
            self._ask_to_keep(client, arena)

    def on_no_writer(self, error: CheckpointError) -> None:
        with self._writer.lock:
            found, self._unheld = list(self._unheld.values()), {}
        for one in found:
            one.done(error)
