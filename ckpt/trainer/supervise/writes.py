"""Slots that the writer was told to write, told to the next one too; and snapshots that must not get to a tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from ckpt.errors import CheckpointError, SaveError, WriterError
from ckpt.failpoints import point
from ckpt.format.manifest import Attempt
from ckpt.ipc import requests
from ckpt.ipc.arena import Arena
from ckpt.ipc.notes import StoredNote
from ckpt.trainer.staging.stage import Stager
from ckpt.trainer.supervise.current_writer import CurrentWriter, WriterUser
from ckpt.trainer.supervise.writer_client import WriterClient

MOST_TRIES = 3  # by so many writers, and no more


@dataclass
class WriteInFlight:
    """A slot on its way to one tier."""

    attempt: Attempt
    arena: Arena
    slot: int
    tier: int
    done: Callable[[CheckpointError | None], None]
    tries: int = 0
    stored: bool = False  # its bytes are in the store: the slot may be used again
    nbytes: int = 0  # when it is done: of the snapshot, and of what was stored for it
    nbytes_stored: int = 0


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
            self._stager.slots.pin(write.arena, write.slot)
            if self._writer.failure is not None:
                self._stager.slots.unpin(write.arena.id, write.slot)
                write.done(self._writer.failure)
                return
            self._writes.append(write)
            self._send(self._writer.client, write)
        point("save.requested")

    def _send(self, client: WriterClient, write: WriteInFlight) -> None:
        write.tries += 1
        place = write.arena.id.hex(), write.slot
        future = client.send(requests.WriteSlot(write.tier, *place, str(write.attempt), write.stored))
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
        write.done(error)

    def on_stored(self, note: StoredNote) -> None:
        with self._writer.lock:
            for write in self._writes:
                if (write.tier, str(write.attempt)) == (note.tier, note.attempt):
                    self._release(write)

    def _release(self, write: WriteInFlight) -> None:
        """Its slot."""
        if not write.stored:
            write.stored = True
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
            write.done(error)
        self._writes.clear()

    def in_use(self) -> set[bytes]:
        return {write.arena.id for write in self._writes}
