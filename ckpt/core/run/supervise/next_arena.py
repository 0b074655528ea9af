"""Memory that the writer makes in the background, for snapshots that do not fit into what there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future

from ckpt.core.ipc import requests
from ckpt.core.ipc.arena import Arena
from ckpt.core.run.supervise.current_writer import CurrentWriter
from ckpt.core.snapshot.stage import Stager
from ckpt.errors import CheckpointError, SkippedError, WriterError
from ckpt.events import log

Made = Future[tuple[str, list[int]]]
NOTHING = float("inf")


class NextArena:
    """The one that is being made, at most. `slots` are asked for, and `least` have to fit; `ranks`, `node`: see
    `MakeArena`."""

    def __init__(
        self, writer: CurrentWriter, stager: Stager, slots: int, least: int, ranks: int, node: Callable[[], int | None]
    ) -> None:
        self._writer, self._stager, self._slots, self._least = writer, stager, slots, least
        self._ranks, self._node = ranks, node
        self._making: Made | None = None
        self._asked_size = self._asked = 0  # bytes of a slot, and of the snapshot that it is for
        self._refused_size = NOTHING
        self._said_short = False

    def prepare(self, data_size: int, values_size: int, *, again: bool = False) -> None:
        """Have memory for snapshots of this size made in the background, unless there is enough or it is being made.

        Where memory is short it holds fewer of them. A size that was refused is asked for again only if told.
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
                requests.MakeArena(self._slots, size, self._least, self._ranks, self._node())
            )

    def drop(self, *, release: bool = False) -> None:
        """Nobody takes what is being made any more: its descriptor would hold all of that memory, and so would the
        writer, which is told to `release` it if it goes on."""
        with self._writer.lock:
            making, self._making = self._making, None
            client = self._writer.client if release else None

        def close(made: Made) -> None:
            if not made.cancelled() and made.exception() is None:
                key, fds = made.result()
                for fd in fds:
                    os.close(fd)
                if client is not None:
                    client.send(requests.ReleaseArena(key))

        if making is not None:
            making.add_done_callback(close)

    def wait(self, timeout_s: float) -> Made | None:
        """Until it is made; None if there is none by then. Raises why it could not be made."""
        with self._writer.lock:
            making = self._making
        if making is None:
            return None
        try:
            making.result(timeout_s)
        except WriterError:
            with self._writer.lock:
                self._making = None  # not a refusal: the next writer is asked again
            return None
        except CheckpointError as error:
            with self._writer.lock:
                self._making, self._refused_size = None, self._asked
            if isinstance(error, SkippedError):
                self._say_short(f"{error}. Until then training goes on, and steps are not saved")
            raise
        except TimeoutError:
            return None
        return making

    def attach(self, made: Made) -> Arena | None:
        """With the lock. None if another is being made instead. SkippedError if it cannot be mapped."""
        if made is not self._making:
            return None
        self._making = None
        key, fds = made.result()
        try:
            arena = Arena.attach(fds[0])
        except OSError as error:
            os.close(fds[0])
            self._writer.send(requests.ReleaseArena(key))
            self._refused_size = self._asked
            refusal = SkippedError(f"the memory for snapshots cannot be mapped: {error}. See ulimit -v")
            self._say_short(f"{refusal}. Training goes on, and steps are not saved")
            raise refusal from error
        self._refused_size = NOTHING
        self._said_short &= arena.slots < self._slots
        return arena

    def refused(self, nbytes: int) -> bool:
        """Whether memory for snapshots of this size was asked for, and is not there."""
        return nbytes >= self._refused_size

    @property
    def refused_any(self) -> bool:
        return self._refused_size != NOTHING

    def say_if_short(self, arena: Arena, so: str) -> None:
        """`so`: what comes of it."""
        if arena.slots < self._slots:
            size = f"{arena.slot_size / 2**20:.0f} MiB"
            self._say_short(f"{arena.slots} of {self._slots} snapshots of {size} fit{so}")

    def _say_short(self, what: str) -> None:
        """Once, as long as it is."""
        if not self._said_short:
            log.warning("memory is short: %s", what)
        self._said_short = True
