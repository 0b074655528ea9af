"""Progress of the save to a durable tier, and totals. Numbers only, updated by the code that writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.errors import SkippedError

MOST_TEXT = 300  # characters of an error that are kept


@dataclass(slots=True)
class UploadStats:
    """The progress and totals of a tier, to which one checkpoint at a time is written. Sizes are bytes.

    `step`: of the checkpoint that is being written, None if there is none. `done`, `total`: bytes of its state.
    `began`, `moved`: start of the write, and when bytes arrived last, by the monotonic clock. `rate`: bytes of state a
    second of the last checkpoint that was written. `saves`, `failed`, `left_out`: checkpoints that were committed, that
    failed, and that were skipped because the tier was too slow. `raw`, `stored`: bytes of all states, and bytes that
    were written for them. `error`: why the last one failed, "" if another has succeeded since.
    """

    step: int | None = None
    done: int = 0
    total: int = 0
    began: float = 0.0
    moved: float = 0.0
    rate: float = 0.0
    saves: int = 0
    failed: int = 0
    left_out: int = 0
    raw: int = 0
    stored: int = 0
    error: str = ""

    @contextlib.contextmanager
    def writing(self, step: int, total: int) -> Iterator[None]:
        """Track the writing of a state of `total` bytes."""
        self.step, self.done, self.total, self.began = step, 0, total, time.monotonic()
        try:
            yield
            self.rate = self.speed
        finally:
            self.step = None

    def expect(self, total: int) -> None:
        """Set the bytes that must be stored. The rest is there already."""
        self.total = total

    def add(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        self.done += nbytes
        self.moved = time.monotonic()

    @property
    def speed(self) -> float:
        """Return the bytes a second of the present write."""
        return self.done / max(time.monotonic() - self.began, 1e-6)

    def committed(self, raw: int, stored: int) -> None:
        """Count a committed checkpoint."""
        self.saves += 1
        self.raw += raw
        self.stored += stored
        self.error = ""

    def fail(self, error: BaseException) -> None:
        """Count a failed or skipped checkpoint."""
        if isinstance(error, SkippedError):
            self.left_out += 1
        else:
            self.failed += 1
        self.error = (str(error) or type(error).__name__)[:MOST_TEXT]
