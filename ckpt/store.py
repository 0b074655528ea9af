"""The byte interface of a place, and how a URL becomes one.

A store keeps objects under keys such as `packs/1.0f3a9c21-50.0.0.safetensors`. The contract below is all the rest of
the library knows about any place; the classes live in `ckpt_backends`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckpt.errors import CorruptError, UsageError

Buffer = bytes | bytearray | memoryview
PAGE = 4096
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """`size` in bytes."""

    key: str
    size: int


class Upload(Protocol):
    """A large object being written. Until `finish` it means nothing, though a store may list it by then."""

    async def write_at(self, offset: int, view: memoryview) -> None:
        """Write bytes at an offset; calls may overlap in time. The view is not kept after the call returns."""

    async def finish(self) -> None:
        """Make the object durable and visible. After an error here the object must be written again by a new name."""

    async def abort(self) -> None:
        """Drop what was written. Safe to call at any time; never raises for something already gone."""


class Store(Protocol):
    """The whole contract. Errors are `ckpt.errors.StoreError` and its children, never a driver's own."""

    url: str

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        """Store a small object, all or nothing, durable on return. `create=True`: ExistsError if it is there."""

    async def upload(self, key: str, *, size: int) -> Upload:
        """Begin a create-only large object of exactly `size` bytes."""

    async def get(
        self, key: str, *, start: int = 0, length: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """Bytes [start, start + length), to the end if `length` is None.

        A short range is an error. `into` is scratch space that the result may lie in, at any offset: give page-aligned
        memory of `length + 2 * PAGE` bytes and a store that reads in whole pages needs no copy.
        """

    async def head(self, key: str) -> ObjectInfo:
        """NotFoundError if the object is not there."""

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, sorted by key; nothing half-written."""

    async def delete(self, key: str) -> None:
        """Remove an object; deleting what is not there succeeds."""

    async def aclose(self) -> None:
        """Release descriptors and threads."""


def check_key(key: str) -> str:
    """Refuse keys that could leave the root: names from data never become paths."""
    if not _KEY.fullmatch(key) or len(key) > 512:
        raise UsageError(f"not a valid object key: {key!r}")
    return key


async def get_small(store: Store, key: str, limit: int) -> memoryview:
    """A whole object, unless it is implausibly large: then CorruptError, and nothing of it is read."""
    size = (await store.head(key)).size
    if size > limit:
        raise CorruptError(f"{key} is implausibly large: {size} bytes")
    return await store.get(key)


_BUILT_IN = {
    "file": "ckpt_backends.local:LocalStore",
    "memory": "ckpt_backends.memory:MemoryStore",
}


def normalise(url: str | Path) -> str:
    """A URL with a scheme; a plain path becomes an absolute `file://` URL."""
    text = str(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "file", text
    if not rest:
        raise UsageError(f"no place named in {text!r}: give a folder or a URL such as file:///data/run1")
    if scheme == "file":
        return "file://" + str(Path(rest).expanduser().resolve())  # one name for one folder, links or not
    return text


def open_store(url: str | Path, *, writable: bool = False) -> Store:
    """The store behind a URL: a built-in scheme, else the entry-point group `ckpt.stores`.

    `writable=True` creates the place if it is missing. Raises UsageError for an unknown scheme, StoreError if the
    place cannot be used.
    """
    url = normalise(url)
    scheme = url.partition("://")[0]
    target = _BUILT_IN.get(scheme)
    if target is None:
        from importlib.metadata import entry_points  # slow to import, and rarely needed

        for entry in entry_points(group="ckpt.stores", name=scheme):
            target = entry.value
            break
        else:
            known = ", ".join(sorted(_BUILT_IN))
            raise UsageError(f"no store is installed for {scheme}:// (known: {known})")
    module, _, name = target.partition(":")
    store: Store = getattr(importlib.import_module(module), name)(url, writable=writable)
    return store
