"""An arena that is page-locked for the driver, so that copies are quick and nobody waits for them.

To lock memory takes about 0.1 s a GB, behind one lock of the driver for all processes of a machine, and while a call is
in it no kernel of the process is launched. So it is done beside training, by a thread of its own, in pieces, with
pauses as long as each took: training waits for one piece at most. Some kernels (Linux 6.11 to 6.13) refuse more than
2 GiB in one call, which no piece has. Memory that is not locked yet is used as it is: its copies are slower.

A copy may not reach over the end of a piece: to the driver these are different memories.
"""

from __future__ import annotations

import contextlib
import threading
import time

import torch

from ckpt.core.ipc.arena import LOCK, Arena
from ckpt.core.snapshot import device
from ckpt.core.snapshot.slots import ready_slots
from ckpt.events import log

LEAST_PAUSE_S = 0.001  # between two: whoever waits for its turn gets it
STOP_S = 10.0  # for the piece that is being locked


class PageLocks:
    """Of one arena at a time; the staging thread calls. `held`: the addresses of the pieces, by slot."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}
        self.steady = threading.Lock()  # while it is held, no further piece is locked
        self._given_up: set[int] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, arena: Arena, where: torch.device) -> None:
        """Have all of it locked beside training, for a device that is in use; once."""
        if self._thread is not None or where.type != "cuda":
            return
        self._stopped = stopped = threading.Event()
        thread = threading.Thread(target=self._lock, args=(arena, where, stopped), name="ckpt-lock", daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts none at the end of the interpreter
            thread.start()
            self._thread = thread

    def release(self, slot: int) -> None:
        """This slot is locked no longer, and not again: its memory may be given back."""
        with self.steady:
            self._given_up.add(slot)
            for address in self.held.pop(slot, ()):
                device.unlock_pages(address)

    def release_all(self) -> None:
        """The next arena is another."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        for slot in list(self.held):
            self.release(slot)
        self._given_up.clear()
        self._thread = None

    # -- in a thread of its own --

    def _lock(self, arena: Arena, where: torch.device, stopped: threading.Event) -> None:
        device.begin_thread([where])
        began = time.monotonic()
        for slot in ready_slots(arena, stopped):
            for start in range(0, arena.slot_size, LOCK):
                started = time.monotonic()
                if not self._lock_piece(arena, slot, start, where, stopped):
                    return
                stopped.wait(max(LEAST_PAUSE_S, time.monotonic() - started))
        log.info("memory for snapshots was page-locked within %.1f s: copies are quick now", time.monotonic() - began)

    def _lock_piece(self, arena: Arena, slot: int, start: int, where: torch.device, stopped: threading.Event) -> bool:
        """Whether to go on."""
        with self.steady:
            if stopped.is_set():
                return False
            if slot in self._given_up:
                return True
            size = min(LOCK, arena.slot_size - start)
            address = torch.frombuffer(arena.data(slot), dtype=torch.uint8).data_ptr() + start
            error = device.lock_pages(address, size, where)
            if not error:
                self.held.setdefault(slot, []).append(address)
                return True
        log.warning("memory could not be page-locked for %s (error %d): copies stay slower", where, error)
        return False
