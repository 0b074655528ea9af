"""Distinguishes runs that have the same path or URL, as this process sees them.

A path alone does not identify a run. Two containers may mount different folders at one path, and two endpoints may have
buckets of the same name. The root id of FORMAT.json identifies a run; an empty folder gets one before anything else. A
copied folder has the same root id, so device and inode of a folder count too. They may change although the folder stays
the same (FUSE, NFS, a restored backup). Then `Identity.root` and the folder itself decide.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.core.checkpoint import commit
from ckpt.core.format.manifest import MAX_FORMAT, read_format
from ckpt.core.ipc import channel
from ckpt.core.log.log import infer_root
from ckpt.errors import CheckpointError, CorruptError, FormatError, NotFoundError
from ckpt.store import Store, folder_of, get_small, normalise, open_store


@dataclass(frozen=True)
class Identity:
    """A run as this process sees it.

    root: the root id, "" for a run that is kept in memory only.
    text: equal for all processes that see the same run at its path or URL.
    """

    root: str = ""
    text: str = ""


async def identify(spec: Mapping[str, Any], *, create: bool = False) -> Identity | None:
    """Identify the run of a tier. Return None if there is none, unless it is to be created.

    spec: see `ckpt.tiers.Tier.spec`.
    Raises FormatError if other files are there, StoreError if it cannot be read or created.
    """
    from ckpt.core.checkpoint.open_tier import store_of

    store = store_of(spec, writable=create)
    try:
        with contextlib.suppress(NotFoundError):
            return await _seen(store)
        if not create:
            return None
        await commit.create_run(store)
        return await _seen(store)
    finally:
        await store.aclose()


async def _seen(store: Store) -> Identity:
    try:
        root: str | None = read_format(await get_small(store, "FORMAT.json", MAX_FORMAT))
    except CorruptError as error:
        if (root := await infer_root(store)) is None:
            raise FormatError(f"{store.url} is not a run, or its log is damaged: {error}") from None
    assert root is not None
    return Identity(root, f"{root}\0{_where(store)}")


def _where(store: Any) -> str:
    """Return what distinguishes this folder or endpoint from others of the same path or URL."""
    if (folder := folder_of(store.url)) is not None:
        found = os.stat(folder)
        return f"{found.st_dev}:{found.st_ino}"
    while hasattr(store, "store"):
        store = store.store
    return str(getattr(store, "endpoint", ""))


def writer_keys(place: str) -> dict[int, str]:
    """Return the keys of the writers on this machine that own the run at a path, URL or memory:NAME, by local rank.

    If the run can be read from here, writers of another run with the same path or URL are left out. A bucket is read
    only if there are several.
    """
    found = channel.at_place(channel.run_key(place, 0))
    several = len({key.rpartition("-")[0] for key in found}) > 1
    identity = _read(place) if several or (found and folder_of(place) is not None) else None
    if identity is not None:
        return channel.siblings(channel.run_key(place, 0, identity.text))
    return {int(key.rpartition("-")[2]): key for key in found}


def _read(place: str) -> Identity | None:
    """Return the identity of the run at a path or URL, or None if it cannot be read from here."""
    from ckpt.core.checkpoint.concurrent import run

    async def read() -> Identity:
        store = open_store(place, patience_s=0)
        try:
            return await _seen(store)
        finally:
            await store.aclose()

    try:
        return run(read())
    except CheckpointError:
        return None


def key_of(folder: str | os.PathLike[str], local_rank: int = 0) -> str:
    """Return the key of the writer that owns the run in a folder, or would own it."""
    place = normalise(str(folder))
    found = _read(place)
    return channel.run_key(place, local_rank, "" if found is None else found.text)
