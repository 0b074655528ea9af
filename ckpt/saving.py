"""The handle of one save, which reports when the step is staged and durable."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import CheckpointError, DeadlineError, SaveError
from ckpt.store import normalise

ALL = "all"  # value of `tier` that means every tier
COPY_S = 600.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A step that is stored at `tier`.

    A step in "memory" survives the trainer, and a step at a URL survives a power failure. A step in "trainer" ends with
    the trainer; this happens only with `Memory(linger_s=0)` and no durable tier.
    """

    step: int
    id: str
    tier: str


class Save:
    """One save in progress. Each wait raises the error of the save, or DeadlineError after its timeout."""

    def __init__(self, step: int, id: str, durable: list[str]) -> None:
        self.step, self.id = step, id
        self._raised = False  # True once an error of this save was raised to the user
        self._began = 0.0  # perf_counter() when the save began
        self._stalled_s: float | None = None  # seconds that step() took for this save; None until it has returned
        self._staged: Future[Checkpoint] = Future()
        self._durable: dict[str, Future[Checkpoint]] = {url: Future() for url in durable}

    def __repr__(self) -> str:
        return f"<Save of step {self.step}: {self.status}>"

    @property
    def status(self) -> str:
        """Return "staging", "failed", "staged", or "durable" (in at least one durable tier)."""
        if any(f.done() and f.exception() is None for f in self._durable.values()):
            return "durable"
        if not self._staged.done():
            return "staging"
        failed = self._staged.exception() is not None or any(f.done() for f in self._durable.values())
        return "failed" if failed else "staged"

    @property
    def tiers(self) -> list[str]:
        """Return the URLs of the durable tiers that have scheduled this step, nearest first."""
        return list(self._durable)

    def wait_staged(self, timeout_s: float | None = None) -> Checkpoint:
        """Wait until the writer process has the step in memory, so that it survives the trainer.

        - `timeout_s`: longest wait, seconds, default no limit.
        """
        return self._wait(self._staged, timeout_s, f"staging step {self.step}")

    def wait_durable(self, timeout_s: float | None = None, *, tier: str | Path | None = None) -> Checkpoint:
        """Wait until the step is committed in a durable tier, and return its checkpoint there.

        - `timeout_s`: longest wait, seconds, default no limit.
        - `tier`: folder or URL of the tier to wait for, default the nearest. "all" waits for every tier that has
          scheduled the step, and returns the checkpoint in the furthest.

        Raises SaveError if the step is not scheduled for that tier.
        """
        if not self._durable:
            raise SaveError(
                f"step {self.step} is not scheduled in a durable tier, so it stays in memory. Use save() to write it "
                "now, or give the Checkpointer a folder if it has none"
            )
        urls = list(self._durable) if tier == ALL else [next(iter(self._durable)) if tier is None else normalise(tier)]
        if unknown := [url for url in urls if url not in self._durable]:
            raise SaveError(f"step {self.step} is not written to {unknown[0]}, only to {', '.join(self._durable)}")
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for url in urls:
            left_s = None if end is None else max(0.0, end - time.monotonic())
            last = self._wait(self._durable[url], left_s, f"writing step {self.step} to {url}")
        return last

    def _wait(self, future: Future[Checkpoint], timeout_s: float | None, task: str) -> Checkpoint:
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if not isinstance(error, CheckpointError):
                raise DeadlineError(f"{task} has not finished within {timeout_s:g} s; it continues") from None
            self._raised = True
            raise
        except CheckpointError:
            self._raised = True
            raise

    def _wait_copied(self, timeout_s: float = COPY_S) -> None:
        """Wait until the copy of this save has ended, even if it has failed.

        Afterwards, code other than optimizers may write to the state.
        """
        with contextlib.suppress(TimeoutError):
            self._staged.exception(timeout_s)

    # -- for the Checkpointer --

    def _set_staged(self, where: str = "memory") -> None:
        """Record where the step is: "memory", "trainer" (memory that ends with this process), or a tier's URL."""
        _settle(self._staged, Checkpoint(self.step, self.id, where))

    def _set_unstaged(self, error: CheckpointError) -> None:
        """Record that the step could not be staged in memory; durable tiers may still store it."""
        _settle(self._staged, error)

    def _set_committed(self, url: str) -> None:
        _settle(self._durable[url], Checkpoint(self.step, self.id, url))

    def _set_failed(self, error: CheckpointError, url: str | None = None) -> None:
        """Record an error of one tier, or of the whole save."""
        futures = [self._durable[url]] if url else [self._staged, *self._durable.values()]
        for future in futures:
            _settle(future, error)

    def _add_tier(self, url: str) -> None:
        """Add a tier to which the step will be written, for the first time or again."""
        self._durable[url] = Future()

    def _unfinished(self) -> list[Future[Checkpoint]]:
        return [f for f in (self._staged, *self._durable.values()) if not f.done()]


def _settle(future: Future[Checkpoint], result: Checkpoint | CheckpointError) -> None:
    if future.done():
        return
    if isinstance(result, CheckpointError):
        future.set_exception(result)
    else:
        future.set_result(result)
