"""The best checkpoints of a run by some score, kept in it however old they get.

What is best is a value (`Best`). That they stay is said by KEEP records of the run's own log, which the writer appends
(`Checkpointer.keep_steps`), so `ckpt ls` shows them and every retention respects them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.checkpoint import read
from ckpt.checkpoint.retention import MARK
from ckpt.errors import CheckpointError, UsageError
from ckpt.events import log as logger
from ckpt.runlog.log import RunLog

END = "its end"


@dataclass
class Best:
    """The `top_k` best of the steps that were scored. `mode`: "min" if a smaller score is better, or "max"."""

    monitor: str
    mode: str = "min"
    top_k: int = 1
    scores: list[tuple[float, int]] = field(default_factory=list)  # best first

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise UsageError(f'mode is "min" or "max", not {self.mode!r}')
        if type(self.top_k) is not int or self.top_k < 1:
            raise UsageError(f"top_k is a number from 1, not {self.top_k!r}")

    def add(self, score: float, step: int) -> bool:
        """Whether the step is among the best now. Of equal scores the older stays; what is no number is never good."""
        if math.isnan(score):
            return False
        rest = [(s, at) for s, at in self.scores if at != step]
        sign = 1 if self.mode == "min" else -1
        self.scores = sorted([*rest, (score, step)], key=lambda one: (sign * one[0], one[1]))[: self.top_k]
        return any(at == step for _, at in self.scores)

    def take(self, notes: Mapping[int, str]) -> None:
        """Be what such notes say."""
        for step, note in notes.items():
            name, _, score = note.removesuffix(f", {END}").rpartition("=")
            if name == self.monitor:
                self.add(float(score), step)

    def notes(self) -> dict[int, str]:
        """What to write beside each of them."""
        return {step: f"{self.monitor}={score!r}" for score, step in self.scores}


def kept(url: str) -> dict[int, str]:
    """What is kept by us in a place, with the notes; nothing if it cannot be read."""

    async def look() -> dict[int, str]:
        log: RunLog = await read.open_run(url)
        try:
            notes = log.state.kept.items()
            return {a.step: note.removeprefix(MARK) for a, note in notes if note.startswith(MARK)}
        finally:
            await log.store.aclose()

    try:
        return read.run(look())
    except CheckpointError as error:
        logger.warning("which checkpoints of %s are kept cannot be read: %s", url, error)
        return {}
