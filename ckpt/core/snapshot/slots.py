"""Which slots of the arena may be overwritten, and which one the next snapshot gets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Container, Iterator

from ckpt.core.ipc.arena import Arena
from ckpt.core.snapshot.snapshot import PendingSnapshot
from ckpt.errors import DeadlineError, SkippedError

ALL_BUSY = "all snapshots are still being written"
READY_S = 0.01  # between two looks at whether another slot is ready

Slot = tuple[Arena, int]


class Slots:
    """Any thread may pin slots, or hold all of them; the staging thread takes one after the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pinned: dict[tuple[bytes, int], int] = {}
        self._holds = 0  # above 0 while a predecessor may still write into an adopted arena

    def pin(self, arena: Arena, slot: int) -> None:
        """Do not overwrite this slot until it is unpinned as often as it was pinned, in whichever order."""
        self._count((arena.id, slot), 1)

    def unpin(self, arena_id: bytes, slot: int) -> None:
        self._count((arena_id, slot), -1)

    def _count(self, key: tuple[bytes, int], change: int) -> None:
        with self._changed:
            self._pinned[key] = self._pinned.get(key, 0) + change
            if self._pinned[key] == 0:
                del self._pinned[key]
            self._changed.notify_all()

    def hold(self, change: int) -> None:
        """+1: overwrite nothing, a predecessor may still write into this memory; -1: it has gone."""
        with self._changed:
            self._holds += change
            self._changed.notify_all()

    def unpinned(self, arena: Arena) -> list[int]:
        with self._changed:
            return [slot for slot in range(arena.ready) if self._pinned.get((arena.id, slot), 0) <= 0]

    def free(self, arena: Arena, flying: Container[Slot | None]) -> int | None:
        """The emptiest or oldest slot, None if there is none. Never one being written, nor one that a device copies
        into (`flying`), never the newest snapshot, nor the newest finite."""
        with self._changed:
            if self._holds > 0:
                return None
            free = [slot for slot in self.unpinned(arena) if (arena, slot) not in flying]
        sealed = arena.sealed()  # newest first
        if arena.slots == 1:  # memory is short: what is written, or could not be, makes room
            return next(iter(free), None)
        held = {slot for slot, _ in sealed}
        empty = [slot for slot in free if slot not in held]
        finite = [slot for slot, label in sealed if label.finite is not False][:1]  # while a training is broken
        oldest = [slot for slot, _ in reversed(sealed[1:]) if slot in free and slot not in finite]
        broken = [slot for slot, label in sealed[:1] if label.finite is False and slot in free and finite]
        return next(iter([*empty, *oldest, *broken]), None)

    def take(self, arena: Arena, flying: Container[Slot | None], job: PendingSnapshot) -> int:
        """A slot for this snapshot, waited for if it may. SkippedError, DeadlineError."""
        if not job.fits(arena):
            raise SkippedError(f"step {job.attempt.step} was not saved: memory for its new layout is not ready yet")
        with self._changed:
            while (slot := self.free(arena, flying)) is None:
                if job.busy == "skip":
                    raise SkippedError(f"step {job.attempt.step} was not saved: {ALL_BUSY}")
                if not self._changed.wait(max(0.0, min(job.deadline - time.monotonic(), 3600.0))):
                    why = (
                        "the last trainer is still leaving the memory it had"
                        if self._holds > 0
                        else "the disk does not keep up; save less often"
                    )
                    raise DeadlineError(f"step {job.attempt.step} was not saved: no slot became free in time: {why}")
        return slot


def ready_slots(arena: Arena, stopped: threading.Event) -> Iterator[int]:
    """All of them in turn, each when it is ready; ends early when `stopped` is set."""
    slot = 0
    while slot < arena.slots and not stopped.is_set():
        if slot < arena.ready:
            yield slot
            slot += 1
        else:
            stopped.wait(READY_S)


class SlotToucher:
    """Touches an arena before it is used, each slot as it gets ready, in a thread of its own: the copies are quicker
    then."""

    def __init__(self) -> None:
        self._touched = 0  # so many, the first ones
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, arena: Arena) -> None:
        self.stop()
        self._stopped = stopped = threading.Event()
        self._touched = 0

        def touch() -> None:
            for slot in ready_slots(arena, stopped):
                arena.touch(slot, lambda: not stopped.is_set())
                self._touched = slot + 1

        thread = threading.Thread(target=touch, name="ckpt-touch", daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts none at the end of the interpreter: no matter
            thread.start()
            self._thread = thread

    def has_touched(self, slot: int) -> bool:
        """Or nobody will."""
        thread = self._thread
        return slot < self._touched or thread is None or not thread.is_alive()

    def stop(self) -> None:
        """What is touched after it was given back would be taken again."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
