"""When a snapshot may be called staged: a process that survives this one has it, and can make use of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt.errors import CheckpointError, FencedError, SaveError, WriterError
from ckpt.format.manifest import Attempt
from ckpt.ipc import requests
from ckpt.ipc.arena import Arena
from ckpt.trainer.supervise.current_writer import CurrentWriter, WriterUser
from ckpt.trainer.supervise.layouts import KnownLayouts
from ckpt.trainer.supervise.writer_client import WriterClient

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
            heard.add_done_callback(
                lambda _: done(closed) if self._writer.closing else self.acknowledge(attempt, arena, slot, done)
            )
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
