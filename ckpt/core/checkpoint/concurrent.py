"""Runs coroutines from synchronous code, and several coroutines concurrently, each to its end."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ckpt.errors import ClosedError, StoreError

S = TypeVar("S")
T = TypeVar("T")
AT_ONCE = 64


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from synchronous code, even if an event loop is already running (notebooks). Raise ClosedError in
    a thread that outlives the interpreter, and StoreError if no file descriptor is left for an event loop."""
    with ThreadPoolExecutor(1, "ckpt-run") as pool:
        try:
            result = pool.submit(asyncio.run, work)
        except RuntimeError:
            work.close()
            raise ClosedError("the interpreter is ending: join this thread before the script ends") from None
        try:
            return result.result()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            work.close()
            raise StoreError(f"no file can be opened now: {error.strerror}", retryable=True) from error


async def all_of(works: Iterable[Awaitable[T]]) -> list[T]:
    """Await all `works` and return their results. After errors, still await all, then raise the first unchanged."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


async def of_each(items: Sequence[S], work: Callable[[S], Awaitable[T]], at_once: int = AT_ONCE) -> list[T]:
    """Call `work` for every item, but for at most `at_once` items at a time, because a file may list many items."""
    found: list[T] = []
    for start in range(0, len(items), at_once):
        found += await all_of(map(work, items[start : start + at_once]))
    return found
