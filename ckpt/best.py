"""The best checkpoints of a run by some score, kept in it however old they get: `ckpt.Best`.

What is best is a value (`Best`). That they stay is said by KEEP records of the run's own log, which the writer appends
(`Checkpointer.keep_steps`), so `ckpt ls` shows them and every retention respects them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.checkpoint import read
from ckpt.checkpointer import Checkpointer
from ckpt.errors import CheckpointError, UsageError
from ckpt.events import log as logger
from ckpt.ranks.world import together
from ckpt.runlog.log import RunLog
from ckpt.runlog.records import MARK, THE_BEST

END = "its end"


@dataclass
class Best:
    """The `keep` best of the steps that were scored stay in every tier. `monitor`: what the score is called; `mode`:
    "min" if a smaller one is better, or "max". `ckpt.load(run, best=True)` and RUN@best are the very best.

        best = ckpt.Best("val_loss", keep=3)
        ...
        best.score(cp, step, validate())
    """

    monitor: str
    mode: str = "min"
    keep: int = 1
    scores: list[tuple[float, int]] = field(default_factory=list)  # best first

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise UsageError(f'mode is "min" or "max", not {self.mode!r}')
        if type(self.keep) is not int or self.keep < 1:
            raise UsageError(f"so many of the best are kept: a number from 1, not {self.keep!r}")
        self._known = False  # whether what earlier starts have scored has been looked up

    def add(self, score: float, step: int) -> bool:
        """Whether the step is among the best now. Of equal scores the older stays; what is no number is never good."""
        if math.isnan(score):
            return False
        rest = [(s, at) for s, at in self.scores if at != step]
        sign = 1 if self.mode == "min" else -1
        self.scores = sorted([*rest, (score, step)], key=lambda one: (sign * one[0], one[1]))[: self.keep]
        return any(at == step for _, at in self.scores)

    def score(self, cp: Checkpointer, step: int, value: float) -> bool:
        """Say what a step scored; whether it is one of the best now. All ranks call this alike, after `restore()`.

        If it is the step that the last `step()` named, it is saved to every tier; an older one stays where it is saved.
        What earlier starts have scored is read from the nearest durable tier, once. What is no number is never good.
        """
        session = cp._session
        if not session.tiers:
            raise UsageError("the best are kept in a durable tier: give the Checkpointer a folder or URL")
        if not self._known:
            url, first = session.tiers[0].url, session.world.rank == 0
            found = together(session.world, "best", lambda: list(kept(url).items()) if first else [], max)
            self.take(dict(found))
            self._known = True
        if not self.add(float(value), step):
            return False
        cp.keep_steps(self.notes())
        if step == cp._progress.step:
            cp.save()
        return True

    def take(self, notes: Mapping[int, str]) -> None:
        """Be what such notes say."""
        for step, note in notes.items():
            name, _, score = note.removesuffix(f", {END}").removeprefix(THE_BEST).rpartition("=")
            if name == self.monitor:
                self.add(float(score), step)

    def notes(self) -> dict[int, str]:
        """What to write beside each of them."""
        first = self.scores[0][1] if self.scores else None
        return {step: f"{THE_BEST * (step == first)}{self.monitor}={score!r}" for score, step in self.scores}


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
