"""The byte interface of a place, and how a URL becomes one.

A store keeps objects under keys such as `log/000000000042.json`. The contract below is all the rest of
the library knows about any place; the classes live in `ckpt_backends`.
"""

from __future__ import annotations

import errno
import importlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckpt.errors import NotFoundError, UsageError

Buffer = bytes | bytearray | memoryview
PAGE = 4096
UNLOCKABLE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)  # errors of flock where nothing is locked
_NEARLY = re.compile(r"(s3a?|gs|gcs|az|abfss?|https?|sftp|file|memory)(?::|//)", re.IGNORECASE)
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """`size` in bytes."""

    key: str
    size: int


class Upload(Protocol):
    """A large object being written. Until `finish` it means nothing, though a store may list it by then.

    `part`: the object is taken in ranges [k * part, (k + 1) * part) of so many bytes, the last one shorter, each once;
    0: in any ranges. They may come out of order, though none much before the others: a store may wait for an earlier
    one before it takes a later.
    """

    part: int

    async def write_at(self, offset: int, view: memoryview) -> None:
        """Write bytes at an offset; calls may overlap in time. Returns when the next range may come.

        The bytes must stay as they are until `finish` or `abort` has returned.
        """

    async def finish(self) -> None:
        """Make the object durable and visible. After an error here the object must be written again by a new name,
        or, if it replaces another, once more."""

    async def abort(self) -> None:
        """Drop what was written. Safe to call at any time; never raises for something already gone."""


class Store(Protocol):
    """The whole contract; made as `Class(url, writable=False)`. Errors are `ckpt.errors.StoreError` and its children,
    never a driver's own.

    `remote`: requests take long and cost money, and deleting an object takes it away from those who are reading it.
    A store that is not may have one more method, `scatter(key, start, views)`: fill these views, one after another,
    with the bytes from `start` on, in the calling thread, through whatever cache there is. Restores are quicker then.
    And `soon(key, start, length)`: these bytes will be asked for so before long; it never fails.
    """

    url: str
    remote: bool

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        """Store a small object, all or nothing, durable on return. `create=True`: ExistsError if it is there."""

    async def upload(self, key: str, *, size: int, replace: bool = False) -> Upload:
        """Begin a large object of exactly `size` bytes under a name that nobody uses: not every store looks.

        `replace`: what may be there under this name stays what it was until `finish` has put the new object in its
        place, whole and durable; and for good if that never happens. Two who replace one object must agree about its
        bytes.
        """

    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        limit: int | None = None,
    ) -> memoryview:
        """Bytes [start, start + length), to the end if `length` is None.

        TruncatedError if the object ends before the range does. `into` is scratch space that the result may lie in, at
        any offset: give page-aligned memory of `length + 2 * PAGE` bytes and a store that reads in whole pages needs no
        copy. `limit`: for a whole object; CorruptError if it has more bytes, and nothing of it is kept.
        """

    async def head(self, key: str) -> ObjectInfo:
        """NotFoundError if the object is not there."""

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """List each object whose key starts with `prefix` once, in any order; nothing half-written.

        `prefix`: a folder with its slash, `log/`, or empty for all objects. UsageError for anything else. Objects that
        are created or deleted while a listing runs may be missing from it.
        """

    async def delete(self, key: str) -> None:
        """Remove an object; deleting what is not there succeeds."""

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Remove several objects, in as few requests as the store allows."""

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        """Abort uploads that a dead process has left unfinished and that nobody sees, unless their key is wanted.

        How many. Stores where an unfinished object is an object like any other have none. A folder also passes the
        names of temporary files that crashed writers left (`is_temporary`).
        """

    async def aclose(self) -> None:
        """Release descriptors and threads."""


def check_key(key: str) -> str:
    """Refuse keys that could leave the root: names from data never become paths."""
    if not _KEY.fullmatch(key) or len(key) > 512:
        raise UsageError(f"not a valid object key: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """Raise UsageError unless `prefix` is empty or names a folder: directory buckets list nothing else."""
    if prefix and not (prefix.endswith("/") and _KEY.fullmatch(prefix[:-1])):
        raise UsageError(f"not a valid prefix of a listing: {prefix!r} must be a folder that ends in '/', or empty")
    return prefix


def is_temporary(key: str) -> bool:
    """Return True for the name of a temporary file, which `drop_uploads` passes to `wanted` as it is."""
    return key.rpartition("/")[2].startswith(".")


async def get_small(store: Store, key: str, limit: int) -> memoryview:
    """A whole object, unless it is implausibly large: then CorruptError, and nothing of it is kept."""
    return await store.get(key, limit=limit)


async def exists(store: Store, key: str) -> bool:
    """Return True if there is an object under this key."""
    try:
        await store.head(key)
    except NotFoundError:
        return False
    return True


_FSSPEC = "ckpt_backends.remote:RemoteStore"
_BUILT_IN = {
    "file": "ckpt_backends.local:LocalStore",
    "s3": "ckpt_backends.s3:S3Store",
    "s3a": "ckpt_backends.s3:S3Store",
}
_LIMIT, _RETRY = "ckpt_backends.limit:Limit", "ckpt_backends.retry:Retry"
_options: dict[str, Mapping[str, Any]] = {}
_FILE = "file://"
_ANYWHERE = ""  # among them, what holds for every tier


def folder_of(url: str) -> Path | None:
    """The folder of this machine that a normalised URL is; None if it is elsewhere."""
    return Path(url.removeprefix(_FILE)) if url.startswith(_FILE) else None


def url_of(folder: str | Path) -> str:
    """Of a folder of this machine, by its absolute path."""
    return f"{_FILE}{folder}"


def normalise(url: str | Path) -> str:
    """A URL with a scheme; a plain path becomes an absolute `file://` URL."""
    text = str(url)
    scheme, separator, rest = text.partition("://")
    if not separator and (found := _NEARLY.match(text)):
        raise UsageError(
            f"{text!r} is no folder and no URL: a URL has two slashes, {found[1]}://bucket/run1 (pathlib.Path takes "
            f"one away: pass a str). A folder of that name is './{text}'"
        )
    if not separator:
        scheme, rest = "file", text
    if not rest:
        raise UsageError(f"no folder or URL in {text!r}: give a folder or a URL such as file:///data/run1")
    scheme = scheme.lower()
    if scheme == "file":
        return url_of(Path(rest).expanduser().resolve())  # one name for one folder, links or not
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if at and ":" in user:
        raise UsageError(
            f"a password in a URL would be seen in logs and reports: leave it out of that {scheme}:// URL, and say who "
            "you are by storage_options, the environment, or configuration files"
        )
    rest = rest.rstrip("/")
    segments = rest.split("/")
    if not {"", ".", ".."}.isdisjoint(segments[1:]):
        plain = "/".join([segments[0], *(one for one in segments[1:] if one not in ("", ".", ".."))])
        raise UsageError(
            f"{scheme}://{rest} has an empty segment, '.' or '..' in its path, which S3 clients resolve to different "
            f"keys. Use a path without them, for example {scheme}://{plain}"
        )
    return f"{scheme}://{rest}"


def remember_options(url: str | Path | None, options: Mapping[str, Any] | None) -> None:
    """How this process reaches a place (None: any), besides what environment and configuration files say: fsspec's
    `storage_options`. They hold wherever the place is opened from now on, and are never written down. UsageError if
    they are no dict."""
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(
            f"storage_options are fsspec's, a dict such as {{'endpoint_url': ...}}, and not a {type(options).__name__}"
        )
    if options is not None:
        _options[_ANYWHERE if url is None else normalise(url)] = dict(options)


def options_of(url: str | Path) -> Mapping[str, Any]:
    """What `remember_options` was told about a place."""
    return {**_options.get(_ANYWHERE, {}), **_options.get(normalise(url), {})}


def open_store(
    url: str | Path, *, writable: bool = False, limits: Mapping[str, Any] | None = None, patience_s: float = 60.0
) -> Store:
    """The store behind a URL: a built-in scheme, else the entry-point group `ckpt.stores`, else whatever fsspec knows.

    `writable=True` creates a folder that is missing; buckets are never created. In remote places what is worth it is
    tried again for `patience_s`, with 0 never; `limits`: what bounds such a place, see `ckpt_backends.limit`. Raises
    UsageError for an unknown scheme, StoreError if the place cannot be used.
    """
    url = normalise(url)
    store: Store = _load(_class_of(url.partition("://")[0]))(url, writable=writable)
    if store.remote:
        store = store if limits is None else _load(_LIMIT)(store, **limits)
        store = _load(_RETRY)(store, budget_s=patience_s) if patience_s else store
    return store


def _class_of(scheme: str) -> str:
    if scheme in _BUILT_IN:
        return _BUILT_IN[scheme]
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    for entry in entry_points(group="ckpt.stores", name=scheme):
        return entry.value
    from fsspec import available_protocols

    if scheme in available_protocols():
        return _FSSPEC
    raise UsageError(
        f"no store is installed for {scheme}:// (known: {', '.join(sorted(_BUILT_IN))}, and whatever fsspec knows)"
    )


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
