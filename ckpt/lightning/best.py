"""The best checkpoints of a run by some score, kept in it however old they get.

What is best is a value (`Best`); that they stay is said by KEEP records of the run's own log, as `ckpt keep` writes
them, so `ckpt ls` shows them and every retention respects them. `Keeper` brings the records to what is wanted, in a
thread of its own: once when it is made, and whenever that changes.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckpt.checkpoint import read
from ckpt.errors import CheckpointError, NoCheckpointError, UsageError
from ckpt.events import log as logger
from ckpt.format.manifest import Attempt
from ckpt.maintain.prune import set_keep
from ckpt.runlog.log import RunLog
from ckpt.save import Save

MARK = "kept by training: "  # so begin our notes; those of others are left alone
END = "its end"
COMMIT_S = 3600.0  # an upload may take long
CLOSE_S = 120.0


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


class Keeper:
    """Has checkpoints kept, and let go again, in the places of a run, by a thread of its own."""

    def __init__(self, urls: Iterable[str], *, first: bool = True) -> None:
        """`first`: this process speaks for all; the others for the parts on their own node's disk."""
        self._urls, self._first = list(urls), first
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="ckpt-keeper", daemon=True)
        self._thread.start()

    def want(self, notes: Mapping[int, str], after: Save | None = None) -> None:
        """From now on these steps stay, with these notes; `after`: once this save is written. Returns at once."""
        wanted = dict(notes)
        self._work.put(lambda: self._bring(wanted, after))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until all of that is done."""
        self._work.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("which checkpoints are kept is not written down after %g s", timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except CheckpointError as error:  # retention waits for nobody, but it is no reason to stop training
                logger.warning("the best checkpoints could not be marked to be kept: %s", error)

    def _bring(self, wanted: dict[int, str], after: Save | None) -> None:
        if after is not None:
            end = time.monotonic() + COMMIT_S
            for future in after.unfinished():  # not committed(): errors are for the training to hear of
                future.exception(max(0.0, end - time.monotonic()))
        for url in self._urls:
            read.run(settle(url, wanted, first=self._first))


async def settle(url: str, wanted: Mapping[int, str], *, first: bool) -> None:
    """Keep these steps of one place, and let go what was kept by us before and is not among them."""
    log = await read.open_run(url)
    try:
        mine: dict[Attempt, str] = {}
        for step, note in wanted.items():
            try:
                commit = read.choose(log, step)
            except NoCheckpointError:
                continue  # it was never due here, or failed
            if first or not commit.whole:
                mine[commit.attempt] = MARK + note
        for attempt, note in mine.items():
            if log.state.kept.get(attempt) != note:
                await set_keep(log, attempt, note)
        if first:
            for attempt in [a for a, note in log.state.kept.items() if note.startswith(MARK) and a not in mine]:
                await set_keep(log, attempt, None)
    finally:
        await log.store.aclose()


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
