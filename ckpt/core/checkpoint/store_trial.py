"""Whether a remote place guarantees what a run needs, tried with one small object before a run begins there.

An error names the missing guarantee as docs/guide/storage.md does.

The object has a name that `ckpt doctor` knows for one of ours, and is removed again. An answer that was lost is no
lie: the bytes of each try are its own, so that whoever repeats a request cannot take another's object for theirs.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any

from ckpt.errors import AccessError, CheckpointError, ExistsError, FormatError, NotFoundError, StoreError
from ckpt.store import Store, exists

PREFIX = "doctor-"  # so begins all that is written to a place only to try it out
CREATE, READ, RANGES = "create if absent", "read after write", "ranges"
START, LENGTH = 7, 13  # of a range: neither the object's beginning nor its end


async def check_empty(store: Store) -> None:
    """FormatError if somebody else's files are there. A run, or what is only a trial, is none."""
    async for info in store.list():
        if info.key == "FORMAT.json":
            return  # another rank or job was quicker
        if not info.key.startswith(PREFIX):  # `ckpt doctor` is at work, or another start tries the place out
            if await exists(store, "FORMAT.json"):
                return
            raise FormatError(
                f"{store.url} is not empty and not a run: it holds {info.key}, and no FORMAT.json. Choose another "
                "location"
            )


async def try_out(store: Store) -> None:
    """Raise StoreError with the place, the guarantee that is missing, and what it did instead."""
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
            raise refused(store, CREATE, "it says that an object is there already, and overwrites it all the same")
        if key not in [info.key async for info in store.list(folder)]:
            raise refused(store, READ, "an object that was just stored is not listed")
        await check_ranges(store, key, first)
    finally:
        with contextlib.suppress(CheckpointError):
            await store.delete(key)


async def check_ranges(store: Store, key: str, whole: bytes) -> None:
    """StoreError unless a part of an object is read as what it is."""
    what = f"asked for {LENGTH} bytes of an object from byte {START} on, it"
    try:
        got = bytes(await store.get(key, start=START, length=LENGTH))
    except (AccessError, NotFoundError):
        raise
    except StoreError as error:
        if error.retryable:
            raise
        raise refused(store, RANGES, f"{what} does not give them ({error})") from None
    if got != whole[START : START + LENGTH]:
        raise refused(store, RANGES, f"{what} gives others")


def created_twice(store: Store) -> StoreError:
    return refused(
        store, CREATE, "it lets an object be created twice, so that two jobs could overwrite each other's commits"
    )


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
