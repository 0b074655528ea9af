"""The best checkpoints of a run by some score, kept in it however old they get: `ckpt.Best`.

What is best is a value (`Best`), which a `Checkpointer` or a callback is given. That they stay is said by KEEP records
of the run's own log, which the writer appends, so `ckpt ls` shows them and every retention respects them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.core.checkpoint import read
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import THE_BEST, words_of
from ckpt.errors import CheckpointError, UsageError
from ckpt.events import log as logger

END = "its end"


@dataclass
class Best:
    """The `keep` best of the steps that were scored stay in every tier. `monitor`: what the score is called; `mode`:
    "min" if a smaller one is better, or "max". `ckpt.load(run, best=True)` and RUN@best are the very best.

        cp = ckpt.Checkpointer(state, run, best=ckpt.Best("val_loss", keep=3))
        ...
        cp.score(step, validate())

    `scores`: (score, step) of each of them, the best first, as the last `score()` has found them.
    """

    monitor: str
    mode: str = "min"
    keep: int = 1
    scores: list[tuple[float, int]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise UsageError(f'mode is "min" or "max", not {self.mode!r}')
        if type(self.keep) is not int or self.keep < 1:
            raise UsageError(f"so many of the best are kept: a number from 1, not {self.keep!r}")

    def add(self, score: float, step: int) -> bool:
        """Whether the step is among the best now. Of equal scores the older stays; what is no number is never good."""
        if math.isnan(score):
            return False
        rest = [(s, at) for s, at in self.scores if at != step]
        sign = 1 if self.mode == "min" else -1
        self.scores = sorted([*rest, (score, step)], key=lambda one: (sign * one[0], one[1]))[: self.keep]
        return any(at == step for _, at in self.scores)

    def take(self, notes: Mapping[int, str]) -> dict[int, str]:
        """Be what such notes say; what else they say."""
        others = {}
        for step, note in notes.items():
            ours, _, more = note.removeprefix(THE_BEST).partition(", ")
            name, _, score = ours.rpartition("=")
            try:
                self.add(float(score) if name == self.monitor else math.nan, step)
                more = more if name == self.monitor else note
            except ValueError:  # somebody's words
                more = note
            if more:
                others[step] = more
        return others

    def notes(self) -> dict[int, str]:
        """What to write beside each of them."""
        first = self.scores[0][1] if self.scores else None
        return {step: f"{THE_BEST * (step == first)}{self.monitor}={score!r}" for score, step in self.scores}


def kept(url: str) -> dict[int, str]:
    """What is kept by us in a place, with the notes; nothing if it cannot be read."""

    async def look() -> dict[int, str]:
        log: RunLog = await read.open_run(url)
        try:
            return {a.step: ours for a, note in log.state.kept.items() if (ours := words_of(note)[0])}
        finally:
            await log.store.aclose()

    try:
        return read.run(look())
    except CheckpointError as error:
        logger.warning("which checkpoints of %s are kept cannot be read: %s", url, error)
        return {}
