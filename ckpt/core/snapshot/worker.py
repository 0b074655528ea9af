"""The thread that stages: what it is given it does in turn, and whatever comes of that, it goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from ckpt.errors import DeadlineError
from ckpt.events import log

Work = Callable[[], None]


class Worker:
    """Any thread may give it work. `at_end` is what it does last."""

    def __init__(self, at_end: Work) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._at_end, self._ended = at_end, False
        self._thread = threading.Thread(target=self._run, name="ckpt-stage", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the caller is in this thread."""
        return threading.current_thread() is self._thread

    def put(self, work: Work) -> None:
        self._queue.put(work)

    def do(self, work: Work, timeout_s: float) -> None:
        """And wait for it; at once, if that is this thread. Raises what it raises, and DeadlineError."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        if self.is_here:
            run()
        else:
            self.put(run)
        try:
            failure = done.exception(timeout_s)
        except TimeoutError:
            raise DeadlineError(f"the staging thread did not answer within {timeout_s:g} s") from None
        if failure is not None:
            raise failure

    def end(self, timeout_s: float) -> None:
        """When all that was given before is done."""
        self.put(self._end)
        self._thread.join(timeout_s)

    def _end(self) -> None:
        self._ended = True

    def _run(self) -> None:
        with torch.no_grad():
            while not self._ended:
                self._do(self._queue.get())
            self._do(self._at_end)

    def _do(self, work: Work) -> None:
        try:
            work()
        except BaseException:  # else the mutex that this thread holds would say that the trainer has died
            log.exception("something failed in the staging thread, which goes on")
