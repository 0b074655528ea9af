"""What is on its way to one durable tier, and what went there in all. Numbers only: whoever writes counts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.errors import SkippedError

MOST_TEXT = 300  # characters of an error that are kept


@dataclass(slots=True)
class UploadStats:
    """One checkpoint at a time is written to a place. Sizes are bytes.

    `step`: of what is being written, None for nothing; `done` of `total` bytes of its state; `began`: when, by the
    monotonic clock; `moved`: when bytes got there last; `rate`: bytes of state a second of the last one that was
    written. In all: `saves` that became checkpoints, `failed`, `left_out` since the place was too slow, `raw` bytes of
    states and `stored` bytes of what was written for them. `error`: why the last one failed, "" if another has
    succeeded since.
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
        """Around the writing of a state of so many bytes."""
        self.step, self.done, self.total, self.began = step, 0, total, time.monotonic()
        try:
            yield
            self.rate = self.speed
        finally:
            self.step = None

    def expect(self, total: int) -> None:
        """So many bytes of it have to be stored: the rest is there already."""
        self.total = total

    def add(self, nbytes: int) -> None:
        """So many more bytes are there."""
        self.done += nbytes
        self.moved = time.monotonic()

    @property
    def speed(self) -> float:
        """Bytes a second of what is being written."""
        return self.done / max(time.monotonic() - self.began, 1e-6)

    def committed(self, raw: int, stored: int) -> None:
        """It is a checkpoint now."""
        self.saves += 1
        self.raw += raw
        self.stored += stored
        self.error = ""

    def fail(self, error: BaseException) -> None:
        """It will be none."""
        if isinstance(error, SkippedError):
            self.left_out += 1
        else:
            self.failed += 1
        self.error = (str(error) or type(error).__name__)[:MOST_TEXT]
