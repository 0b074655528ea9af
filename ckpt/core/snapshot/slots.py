"""Chooses the slot that the next snapshot overwrites."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Container, Iterator

from ckpt.core.ipc.arena import Arena
from ckpt.core.snapshot.snapshot import NewSnapshot, Slot
from ckpt.errors import DeadlineError, SkippedError

ALL_BUSY = "all snapshots are still being written"
READY_S = 0.01  # between two checks whether the writer has made another slot


class Slots:
    """The slots in use. Any thread may pin slots, or hold all of them. The staging thread takes them."""

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
        """Return an empty slot, or the oldest. Never one that is being written, one that a device copies into
        (`flying`), the newest snapshot, or the newest finite one. None if no slot is free."""
        with self._changed:
            if self._holds > 0:
                return None
            free = [slot for slot in self.unpinned(arena) if (arena, slot) not in flying]
        sealed = arena.sealed()  # newest first
        if arena.slots == 1:  # memory is short, so the only snapshot is overwritten once it was written
            return next(iter(free), None)
        held = {slot for slot, _ in sealed}
        empty = [slot for slot in free if slot not in held]
        finite = [slot for slot, label in sealed if label.finite is not False][:1]  # while a training is broken
        oldest = [slot for slot, _ in reversed(sealed[1:]) if slot in free and slot not in finite]
        broken = [slot for slot, label in sealed[:1] if label.finite is False and slot in free and finite]
        return next(iter([*empty, *oldest, *broken]), None)

    def take(self, arena: Arena, flying: Container[Slot | None], snapshot: NewSnapshot) -> int:
        """Wait for a slot for this snapshot. Raise SkippedError if it may not wait, or DeadlineError."""
        if not snapshot.fits(arena):
            raise SkippedError(
                f"step {snapshot.attempt.step} was not saved: memory for its new layout is not ready yet"
            )
        with self._changed:
            while (slot := self.free(arena, flying)) is None:
                being_made = arena.ready < arena.slots
                if snapshot.busy == "skip" and not being_made:
                    raise SkippedError(f"step {snapshot.attempt.step} was not saved: {ALL_BUSY}")
                left_s = snapshot.deadline - time.monotonic()
                if left_s > 0:
                    self._changed.wait(min(left_s, READY_S if being_made else 3600.0))
                else:
                    why = (
                        "the last trainer is still leaving the memory it had"
                        if self._holds > 0
                        else "the disk does not keep up; save less often"
                    )
                    raise DeadlineError(
                        f"step {snapshot.attempt.step} was not saved: no slot became free in time: {why}"
                    )
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
    """Touches each slot of an arena when it is ready, in a thread of its own, so that copies are quicker."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, arena: Arena) -> None:
        self.stop()
        self._stopped = stopped = threading.Event()

        def touch() -> None:
            for slot in ready_slots(arena, stopped):
                arena.touch(slot, lambda: not stopped.is_set())

        thread = threading.Thread(target=touch, name="ckpt-touch", daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts none at the end of the interpreter: no matter
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Stop touching: pages that are touched after they were released would be allocated again."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
