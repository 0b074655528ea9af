"""Reads files of a checkpoint, and distinguishes lost files from files that cannot be read at the moment.

All reads of indexes, manifests, tables and data files use this module. If a read fails, it raises one of these errors:

    TruncatedError   the file is shorter than it must be: damage
    NotFoundError    the file is lost: it stayed absent for WINDOW_S, while its run and its folder could be listed
    UnreadableError  nothing is known about the bytes (`is_unreadable`): the caller must not treat them as lost

A mount that is away for a moment, a stale NFS handle, a process without free descriptors or a proxy that returns 400 or
404 look like loss to a single request. So each failure is retried for WINDOW_S. The reads of a store share that time,
because a store that is down would otherwise cost it once per file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ckpt.core.format.regular_file import LOST
from ckpt.errors import NotFoundError, StoreError, UnreadableError, is_unreadable
from ckpt.store import ObjectInfo, Store

T = TypeVar("T")

WINDOW_S = 4.0  # how long failures are retried
QUIET_S = 60.0  # after this time without a failure, the next one gets a new window
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0


async def get(
    store: Store,
    key: str,
    *,
    start: int = 0,
    length: int | None = None,
    into: memoryview | None = None,
    limit: int | None = None,
) -> memoryview:
    """Read bytes of a file, see `Store.get`."""
    return await _steadily(store, key, partial(store.get, key, start=start, length=length, into=into, limit=limit))


async def head(store: Store, key: str) -> ObjectInfo:
    """Read the size of a file, see `Store.head`."""
    return await _steadily(store, key, partial(store.head, key))


async def listing(store: Store, prefix: str) -> list[ObjectInfo]:
    """List files, see `Store.list`."""

    async def read() -> list[ObjectInfo]:
        return [info async for info in store.list(prefix)]

    return await _steadily(store, prefix, read)


async def _steadily(store: Store, key: str, read: Callable[[], Awaitable[T]]) -> T:
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await read()
        except StoreError as error:
            missing = isinstance(error, NotFoundError)
            if not missing and not is_unreadable(error):
                raise
            # A remote store has already retried this error, for longer than this window.
            left = 0.0 if store.remote and error.retryable else _faults(store).left()
            if left <= 0:
                if missing:
                    await _check_lost(store, key, error)
                    raise
                raise _unreadable(store, key, error) from error
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def files(read: Callable[..., T], *arguments: Any) -> T:
    """Call a function that reads files outside any store in a thread, and retry for WINDOW_S while they cannot be read.
    Then raise UnreadableError. The OSError of an absent file is raised unchanged."""
    while True:
        try:
            return await asyncio.to_thread(read, *arguments)
        except (OSError, UnreadableError) as error:
            if isinstance(error, OSError) and error.errno in LOST:
                raise
            if (left := _others.left()) <= 0:
                if isinstance(error, UnreadableError):
                    raise
                raise UnreadableError(f"{error.filename or 'a file'} cannot be read now: {error.strerror}") from None
        await asyncio.sleep(min(FIRST_PAUSE_S, left))


class _Faults:
    """Tracks the failures of a store."""

    def __init__(self) -> None:
        self._last = self._until = float("-inf")

    def left(self) -> float:
        """Return for how many seconds a new failure may be retried."""
        now = time.monotonic()
        if now - self._last > QUIET_S:
            self._until = now + WINDOW_S
        self._last = now
        return self._until - now


_known: WeakKeyDictionary[Any, _Faults] = WeakKeyDictionary()
_others = _Faults()  # for `files`, and for stores that cannot be weakly referenced or hashed


def _faults(store: Store) -> _Faults:
    try:
        return _known.setdefault(store, _Faults())
    except TypeError:
        return _others


async def _check_lost(store: Store, key: str, error: StoreError) -> None:
    """Raise UnreadableError unless the store lists the folder of a file, and the file is not in it."""
    try:
        folder = key[: key.rfind("/") + 1]
        if key in {info.key async for info in store.list(folder)}:
            raise _unreadable(store, key, f"it is listed, but reading it fails ({error})") from error
        if not await _is_there(store, key):
            raise _unreadable(store, key, f"its folder cannot be found now either ({error})") from error
    except StoreError as failure:
        if isinstance(failure, UnreadableError):
            raise
        raise _unreadable(store, key, failure) from failure


def _unreadable(store: Store, key: str, why: object) -> UnreadableError:
    return UnreadableError(f"cannot read {key} in {store.url} now: {why}")


async def _is_there(store: Store, key: str) -> bool:
    """Return True if the run can be listed, and has the top folder of a file. Folders of checkpoints come and go."""
    folder, has_folder = key.rpartition("/")[0].partition("/")[0], getattr(store, "has_folder", None)
    for prefix in ("log/", ""):
        async for _ in store.list(prefix):
            return not folder or has_folder is None or bool(await has_folder(folder))
    return False
