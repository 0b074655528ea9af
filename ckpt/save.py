"""The handle of one save, which reports when the step is staged, committed and copied to all tiers."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from dataclasses import dataclass

from ckpt.errors import CheckpointError, DeadlineError, SaveError
from ckpt.store import normalise

SETTLE_S = 600.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A step that is stored at `tier`.

    "memory" survives the trainer, and a URL survives a power failure. "trainer" survives neither: this is a step in
    memory with `Memory(linger_s=0)` and no durable tier.
    """

    step: int
    attempt: str
    tier: str


class Save:
    """One save in progress. Each wait raises the error of the save, or DeadlineError after its timeout."""

    def __init__(self, step: int, attempt: str, durable: list[str]) -> None:
        self.step, self.attempt = step, attempt
        self.told = False  # True if an error of this save was raised to the user
        self.began = 0.0  # by perf_counter()
        self.stalled_s: float | None = None  # how long step() took for it, once it has returned
        self._staged: Future[Checkpoint] = Future()
        self._durable: dict[str, Future[Checkpoint]] = {url: Future() for url in durable}
        self._cut_off: set[str] = set()  # tiers it may never have been sent to, because Ctrl-C interrupted

    def __repr__(self) -> str:
        return f"<Save of step {self.step}: {self.status}>"

    @property
    def status(self) -> str:
        """Return "staging", "failed", "staged" or "committed" (in at least one durable tier)."""
        if any(f.done() and f.exception() is None for f in self._durable.values()):
            return "committed"
        if not self._staged.done():
            return "staging"
        failed = self._staged.exception() is not None or any(f.done() for f in self._durable.values())
        return "failed" if failed else "staged"

    def staged(self, timeout_s: float | None = None) -> Checkpoint:
        """Wait until the writer process holds the step in memory, so that it survives the trainer."""
        return self._wait(self._staged, timeout_s, f"staging step {self.step}")

    def committed(self, timeout_s: float | None = None, *, tier: str | None = None) -> Checkpoint:
        """Wait until the step is a checkpoint in the nearest durable tier, or in the tier with URL `tier`."""
        if not self._durable:
            raise SaveError(
                f"step {self.step} is not scheduled in a durable tier, so it stays in memory. Use save() to write it "
                "now, or "
                "give the Checkpointer a folder if it has none"
            )
        url = next(iter(self._durable)) if tier is None else normalise(tier)
        if url not in self._durable:
            raise SaveError(f"step {self.step} is not written to {url}, only to {', '.join(self._durable)}")
        return self._until_written(url, timeout_s)

    def promoted(self, timeout_s: float | None = None) -> Checkpoint:
        """Wait until the step is a checkpoint in every durable tier that has scheduled it. Return the one in the
        furthest."""
        if not self._durable:
            return self.committed()
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for url in list(self._durable):
            last = self._until_written(url, None if end is None else max(0.0, end - time.monotonic()))
        return last

    def _until_written(self, url: str, timeout_s: float | None) -> Checkpoint:
        return self._wait(self._durable[url], timeout_s, f"writing step {self.step} to {url}")

    def _wait(self, future: Future[Checkpoint], timeout_s: float | None, task: str) -> Checkpoint:
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if not isinstance(error, CheckpointError):
                raise DeadlineError(f"{task} has not finished within {timeout_s:g} s; it goes on") from None
            self.told = True
            raise
        except CheckpointError:
            self.told = True
            raise

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until no copy of this save is in progress, however it ends.

        After that, code other than optimizers may write to the state.
        """
        with contextlib.suppress(TimeoutError):
            self._staged.exception(timeout_s)

    # -- for the Checkpointer --

    def set_staged(self, survives: bool = True) -> None:
        _settle(self._staged, Checkpoint(self.step, self.attempt, "memory" if survives else "trainer"))

    def set_unstaged(self, error: CheckpointError) -> None:
        """Record that no process besides the trainer holds the step; durable tiers may still store it."""
        _settle(self._staged, error)

    def set_committed(self, url: str) -> None:
        _settle(self._durable[url], Checkpoint(self.step, self.attempt, url))

    def set_failed(self, error: CheckpointError, url: str | None = None) -> None:
        """Record an error of one tier, or of the whole save."""
        futures = [self._durable[url]] if url else [self._staged, *self._durable.values()]
        for future in futures:
            _settle(future, error)

    def add_tier(self, url: str) -> None:
        """Add a tier that the step is to be written to, for the first time or again."""
        self._durable[url] = Future()
        self._cut_off.discard(url)

    def cut_off(self, url: str, error: CheckpointError) -> None:
        """Record that the request for this tier may never have been sent."""
        self._cut_off.add(url)
        if url in self._durable:
            self.set_failed(error, url)

    def misses(self, url: str) -> bool:
        """Return True if the step is not on its way to this tier and never was."""
        return url not in self._durable or url in self._cut_off

    def written(self, url: str) -> bool:
        future = self._durable[url]
        return future.done() and future.exception() is None

    def failed(self, url: str) -> bool:
        future = self._durable[url]
        return future.done() and future.exception() is not None

    @property
    def tiers(self) -> list[str]:
        return list(self._durable)

    def unfinished(self) -> list[Future[Checkpoint]]:
        return [f for f in (self._staged, *self._durable.values()) if not f.done()]


def _settle(future: Future[Checkpoint], result: Checkpoint | CheckpointError) -> None:
    if future.done():
        return
    if isinstance(result, CheckpointError):
        future.set_exception(result)
    else:
        future.set_result(result)
