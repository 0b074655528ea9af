"""What is called when this process ends, or is forked, without keeping alive what it is called on."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any


class ProcessEnd:
    """Calls `at_end` when the interpreter ends, and `after_fork` in a child, unless their object is gone by then."""

    def __init__(self, at_end: Callable[[], None], after_fork: Callable[[], None]) -> None:
        self._at_end = _weakly(at_end)
        os.register_at_fork(after_in_child=_weakly(after_fork))
        atexit.register(self._at_end)
        self._at_child_end = _at_child_end(self._at_end)

    def cancel(self) -> None:
        """Do not call `at_end` any more."""
        atexit.unregister(self._at_end)
        if self._at_child_end is not None:
            self._at_child_end.cancel()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls the method if its object still lives; does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call


def _at_child_end(call: Callable[[], None]) -> Any:
    """Have it called at the end of a process that another has started by `multiprocessing`, which may end by
    `os._exit`. None if this is none."""
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        return None

    def end() -> None:
        threading._shutdown()  # type: ignore[attr-defined]  # of any process the threads end first, here they would not
        call()

    return util.Finalize(None, end, exitpriority=100)
