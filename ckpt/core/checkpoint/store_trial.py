"""Tests with one small object whether a remote store has the guarantees that a run needs, before a run is created
there.

An error names the missing guarantee as docs/guide/storage.md does.

The object has a name that `ckpt doctor` recognizes, and is deleted afterwards. Each try writes its own bytes, so that a
retried request after a lost reply is not mistaken for another process's object.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any

from ckpt.errors import AccessError, CheckpointError, ExistsError, FormatError, NotFoundError, StoreError
from ckpt.store import Store, exists

PREFIX = "doctor-"  # prefix of all test objects
CREATE, READ, RANGES = "create if absent", "read after write", "ranges"
START, LENGTH = 7, 13  # a range with neither the beginning nor the end of the object


async def check_empty(store: Store) -> None:
    """Raise FormatError if the store has files other than a run or test objects."""
    async for info in store.list():
        if info.key == "FORMAT.json":
            return  # another rank or job created the run first
        if not info.key.startswith(PREFIX):  # `ckpt doctor` or another start is testing the store
            if await exists(store, "FORMAT.json"):
                return
            raise FormatError(
                f"{store.url} is not empty and not a run: it has {info.key}, but no FORMAT.json. Choose another "
                "location"
            )


async def try_out(store: Store) -> None:
    """Test the guarantees. Raise StoreError with the store, the missing guarantee, and the observed behaviour."""
    folder = f"{PREFIX}{int(time.time())}-{secrets.token_hex(4)}/"
    key = f"{folder}probe"
    first, second = secrets.token_hex(32).encode(), secrets.token_hex(32).encode()
    try:
        await store.put(key, first, create=True)
        try:
            await store.put(key, second, create=True)
        except ExistsError:
            pass
        else:
            raise created_twice(store)
        try:
            found = bytes(await store.get(key))
        except NotFoundError:
            raise refused(store, READ, "an object that was just stored cannot be found") from None
        if found != first:
            raise refused(store, CREATE, "it reports that an object exists, but overwrites it")
        if key not in [info.key async for info in store.list(folder)]:
            raise refused(store, READ, "an object that was just stored is not listed")
        await check_ranges(store, key, first)
    finally:
        with contextlib.suppress(CheckpointError):
            await store.delete(key)


async def check_ranges(store: Store, key: str, whole: bytes) -> None:
    """Raise StoreError unless a range of an object is read correctly."""
    request = f"a request for {LENGTH} bytes of an object from byte {START}"
    try:
        got = bytes(await store.get(key, start=START, length=LENGTH))
    except (AccessError, NotFoundError):
        raise
    except StoreError as error:
        if error.retryable:
            raise
        raise refused(store, RANGES, f"{request} fails ({error})") from None
    if got != whole[START : START + LENGTH]:
        raise refused(store, RANGES, f"{request} returns other bytes")


def created_twice(store: Store) -> StoreError:
    return refused(store, CREATE, "an object can be created twice, so two jobs could overwrite each other's commits")


def refused(store: Store, guarantee: str, did: str) -> StoreError:
    inner: Any = store
    while hasattr(inner, "store"):
        inner = inner.store
    endpoint = getattr(inner, "endpoint", "")
    return StoreError(
        f"{store.url}{endpoint and f' at {endpoint}'} cannot store a run, because it does not guarantee {guarantee}: "
        f"{did}. Nothing was saved there. Use a folder, S3, gs:// or az://, or another store that guarantees {CREATE}, "
        f"{READ} and {RANGES}"
    )
