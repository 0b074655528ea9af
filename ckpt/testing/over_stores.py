"""Runs tests of stores, and contains the code that these tests share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import mmap
from collections.abc import Awaitable, Callable
from typing import Any

from ckpt.store import Store

BLOB = bytes(range(256)) * 100 + b"tail"  # 25,604 bytes: several whole pages and a part of one


async def keys(store: Store, prefix: str = "") -> list[str]:
    """Return the sorted keys of a listing."""
    return sorted([info.key async for info in store.list(prefix)])


def aligned(size: int, shift: int = 0) -> memoryview:
    """Return memory that begins `shift` bytes after the start of a page."""
    return memoryview(mmap.mmap(-1, max(1, size + shift)))[shift : shift + size]


def pieces(part: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges, as (start, end), in which an upload with this `part` accepts an object."""
    return [(start, min(start + part, size)) for start in range(0, size, part)] if part else [(0, size)]


async def upload(store: Store, key: str, data: bytes, *, replace: bool = False) -> None:
    """Write a large object as the library does: begin its ranges in order, several at a time."""
    target = await store.upload(key, size=len(data), **({"replace": True} if replace else {}))
    try:
        view = memoryview(data)
        await asyncio.gather(*(target.write_at(a, view[a:b]) for a, b in pieces(target.part, len(data))))
        await target.finish()
    except BaseException:
        await target.abort()
        raise


class OverStores:
    """Base class of the tests, which are coroutines. The argument `store` is open until the test ends. Some tests also
    have an argument `other`, a second store for the same location."""

    has_unfinished = False
    """True if a listing omits an abandoned upload, and `drop_uploads` finds it."""
    creates_uploads = True
    """True if an upload rejects an existing name. Stores need not do this, because names of data files are unique."""
    many = 1500
    """Number of objects in the test of listings. It should exceed the number of objects on one page of a listing."""

    def make(self) -> Store:
        """Return a writable store for this test's location. Called while an event loop runs."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store:
        """Return a second store for the same location, as another process would open it."""
        return self.make()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, test in list(vars(cls).items()):
            if name.startswith("test_") and inspect.iscoroutinefunction(test):
                setattr(cls, name, _given_stores(test))


def _given_stores(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Return the test as pytest must call it: as a plain function that has only the parametrized arguments."""
    parameters = inspect.signature(test).parameters

    async def main(suite: OverStores, arguments: dict[str, Any]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stores = {"store": suite.make()}
            stack.push_async_callback(stores["store"].aclose)
            if "other" in parameters:
                stores["other"] = suite.reopen(stores["store"])
                stack.push_async_callback(stores["other"].aclose)
            await test(suite, **stores, **arguments)

    @functools.wraps(test)
    def run(self: OverStores, **arguments: Any) -> None:
        asyncio.run(main(self, arguments))

    asked = [one for name, one in parameters.items() if name not in ("store", "other")]
    run.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
    return run
