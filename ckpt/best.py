"""`ckpt.Best`: keep the checkpoints of a run with the best scores, regardless of their age.

A `Checkpointer` or a callback receives a `Best`. The writer appends KEEP records to the run's log for these
checkpoints, so `ckpt ls` shows them and no retention rule deletes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.core.checkpoint import read
from ckpt.core.log.records import THE_BEST, words_of
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CheckpointError, InvalidArgumentError
from ckpt.events import log as logger

END = "its end"


@dataclass
class Best:
    """Keeps the checkpoints with the best scores in every tier.

    - `monitor`: name of the score.
    - `mode`: "min" (default) if a smaller score is better, or "max".
    - `keep`: number of checkpoints to keep, default 1.
    - `scores`: list of (score, step), best first, after the last `score()`.

        cp = ckpt.Checkpointer(state, run, best=ckpt.Best("val_loss", keep=3))
        ...
        cp.score(step, validate())

    `ckpt.load(run, best=True)` and RUN@best open the checkpoint with the best score.
    """

    monitor: str
    mode: str = "min"
    keep: int = 1
    scores: list[tuple[float, int]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise InvalidArgumentError(f'mode={self.mode!r}: it must be "min" or "max"')
        if type(self.keep) is not int or self.keep < 1:
            raise InvalidArgumentError(f"keep={self.keep!r}: it must be a whole number of at least 1")

    def add(self, score: float, step: int) -> bool:
        """Add a score. Return True if the step is now among the best. Of equal scores, that of the older step ranks
        first. NaN never counts as best."""
        if math.isnan(score):
            return False
        rest = [(s, at) for s, at in self.scores if at != step]
        sign = 1 if self.mode == "min" else -1
        self.scores = sorted([*rest, (score, step)], key=lambda one: (sign * one[0], one[1]))[: self.keep]
        return any(at == step for _, at in self.scores)

    def take(self, notes: Mapping[int, str]) -> dict[int, str]:
        """Add the scores in these notes. Return the texts in the notes that are not scores."""
        others = {}
        for step, note in notes.items():
            ours, _, more = note.removeprefix(THE_BEST).partition(", ")
            name, _, score = ours.rpartition("=")
            try:
                self.add(float(score) if name == self.monitor else math.nan, step)
                more = more if name == self.monitor else note
            except ValueError:  # a note written by a user
                more = note
            if more:
                others[step] = more
        return others

    def notes(self) -> dict[int, str]:
        """Return the text for the KEEP record of each step."""
        first = self.scores[0][1] if self.scores else None
        return {step: f"{THE_BEST * (step == first)}{self.monitor}={score!r}" for score, step in self.scores}


def kept(url: str) -> dict[int, str]:
    """Return the kept steps of a run whose notes have scores, or {} if the run cannot be read."""

    async def read_notes() -> dict[int, str]:
        log: RunLog = await read.open_run(url)
        try:
            return {a.step: ours for a, note in log.state.kept.items() if (ours := words_of(note)[0])}
        finally:
            await log.store.aclose()

    try:
        return read.run(read_notes())
    except CheckpointError as error:
        logger.warning("cannot read the list of kept checkpoints of %s: %s", url, error)
        return {}
