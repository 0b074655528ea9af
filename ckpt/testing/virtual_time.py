"""An event loop with a clock that jumps, for tests of code that waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def in_virtual_time(work: Coroutine[Any, Any, T], *, turns: int | None = None) -> T:
    """Run a coroutine on an event loop whose clock starts at 0 and jumps to the next timer whenever all tasks wait. Use
    it only for code that waits for timers and other tasks, not for threads or sockets. Raise RuntimeError if all tasks
    wait and no timer is set, or if the loop runs more than `turns` iterations, for example because a task polls."""
    with asyncio.Runner(loop_factory=lambda: _VirtualLoop(turns)) as runner:
        return runner.run(work)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, turns: int | None) -> None:
        self._clock = _Clock(turns)
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Clock(selectors.SelectSelector):
    """A selector that advances the loop's time instead of waiting."""

    def __init__(self, turns: int | None) -> None:
        super().__init__()
        self.now = 0.0
        self._turns = turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._turns is not None:
            self._turns -= 1
        if timeout is None or self._turns == 0:
            self._turns = None  # no more limit, because the loop must still run to be closed
            raise RuntimeError(
                "the event loop does not end" if timeout is not None else "every task waits, and no timer is set"
            )
        self.now += max(0.0, timeout)
        return super().select(0)
