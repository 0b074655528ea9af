"""The interface of a store (a folder or bucket), and the function that opens the store of a URL.

A store keeps objects under keys, for example `log/000000000042.json`. The library uses folders and
buckets only through this interface. The implementations are in `ckpt_backends`.
"""

from __future__ import annotations

import errno
import importlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckpt.errors import InvalidArgumentError, NotFoundError

Buffer = bytes | bytearray | memoryview
PAGE = 4096
UNLOCKABLE = (
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.ENOLCK,
    errno.EINVAL,
)  # error numbers of flock on file systems without locks
_NEARLY = re.compile(r"(s3a?|gs|gcs|az|abfss?|https?|sftp|file|memory)(?::|//)", re.IGNORECASE)
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object in a listing. `size`: bytes."""

    key: str
    size: int


class Upload(Protocol):
    """A large object that is being written. Do not read it before `finish`, although a store may already list it.

    `part`: size in bytes of the ranges [k * part, (k + 1) * part) in which the object must be written; only the last
        range is shorter. 0 allows any ranges. Each range is written once. Ranges may be passed in any order, but a
        store may delay a later range until an earlier one has arrived.
    """

    part: int

    async def write_at(self, offset: int, view: memoryview) -> None:
        """Write bytes at an offset. Return when the next range may be written. Calls may run concurrently.

        The bytes must not change until `finish` or `abort` has returned.
        """

    async def finish(self) -> None:
        """Make the object durable and visible.

        After an error, the caller must write the object again: under a new name, or under the same name if it replaces
        another object.
        """

    async def abort(self) -> None:
        """Discard the written ranges. May be called at any time. Raises no error if there is nothing to discard."""


class Store(Protocol):
    """The contract of a store, which is created as `Class(url, writable=False)`. It raises only
    `ckpt.errors.StoreError` and its subclasses, never errors of a driver.

    `remote`: True if requests are slow and cost money, and if deleting an object makes it unreadable for open readers.

    Two optional methods make restores faster. `scatter(key, start, views)`, for stores that are not remote, fills the
    views one after another with the bytes from `start` on, in the calling thread, through the page cache. `soon(key,
    start, length)` announces that `scatter` will soon request these bytes, and never raises an error.
    """

    url: str
    remote: bool

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        """Store a small object completely or not at all, durable on return. `create`: ExistsError if it exists."""

    async def upload(self, key: str, *, size: int, replace: bool = False) -> Upload:
        """Begin to write a large object of exactly `size` bytes under an unused name. A store need not check the name.

        `replace`: allow a name that is in use. The old object stays unchanged until `finish` replaces it completely and
            durably; without `finish` it stays forever. Concurrent writers of one object must write the same bytes.
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
        """Return bytes [start, start + length), or all bytes from `start` on if `length` is None.

        Raise TruncatedError if the object ends before the range. `into`: scratch memory in which the result may be
        returned at any offset; with page-aligned memory of `length + 2 * PAGE` bytes, a store that reads whole pages
        needs no copy. `limit`: if a whole object has more bytes, raise CorruptError and keep nothing of the object.
        """

    async def head(self, key: str) -> ObjectInfo:
        """Return the key and the size of an object. Raise NotFoundError if it does not exist."""

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """List each object whose key starts with `prefix` once, in any order. Unfinished objects may not be listed.

        `prefix`: a folder with its slash, for example `log/`, or empty for all objects. Anything else raises
            InvalidArgumentError. A listing may lack objects that are created or deleted while it runs.
        """

    async def delete(self, key: str) -> None:
        """Delete an object. Deleting an absent object succeeds."""

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete several objects with as few requests as possible."""

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        """Abort unfinished uploads of dead processes, except if `wanted(key)` is True. Return their number.

        A store that lists unfinished objects like complete ones has no uploads to abort. A store for folders also
        passes the names of temporary files that crashed writers left (`is_temporary`) to `wanted`.
        """

    async def aclose(self) -> None:
        """Release descriptors and threads."""


def check_key(key: str) -> str:
    """Raise InvalidArgumentError for a key that could leave the root, because keys may come from data in files."""
    if not _KEY.fullmatch(key) or len(key) > 512:
        raise InvalidArgumentError(f"not a valid object key: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """Raise InvalidArgumentError unless `prefix` is empty or a folder, because directory buckets list only folders."""
    if prefix and not (prefix.endswith("/") and _KEY.fullmatch(prefix[:-1])):
        raise InvalidArgumentError(
            f"not a valid prefix of a listing: {prefix!r} must be a folder that ends in '/', or empty"
        )
    return prefix


def is_temporary(key: str) -> bool:
    """Return True for the name of a temporary file, which `drop_uploads` passes to `wanted`."""
    return key.rpartition("/")[2].startswith(".")


async def get_small(store: Store, key: str, limit: int) -> memoryview:
    """Return a whole object. If it is larger than `limit`, raise CorruptError and keep nothing of it."""
    return await store.get(key, limit=limit)


async def exists(store: Store, key: str) -> bool:
    """Return True if there is an object under this key."""
    try:
        await store.head(key)
    except NotFoundError:
        return False
    return True


LEASE = "lease.json"  # key of the object that names the process that trains a run: `ckpt.core.checkpoint.lease`
_FSSPEC = "ckpt_backends.remote:RemoteStore"
_BUILT_IN = {
    "file": "ckpt_backends.local:LocalStore",
    "s3": "ckpt_backends.s3:S3Store",
}
_ALIASES = {"s3a": "s3", "gcs": "gs"}  # so that a bucket has only one URL
_LIMIT, _RETRY = "ckpt_backends.limit:Limit", "ckpt_backends.retry:Retry"
_options: dict[str, Mapping[str, Any]] = {}
_FILE = "file://"
_ANYWHERE = ""  # key in `_options` for options that apply to every URL


def folder_of(url: str) -> Path | None:
    """Return the local folder of a normalised URL, or None if it is remote."""
    return Path(url.removeprefix(_FILE)) if url.startswith(_FILE) else None


def url_of(folder: str | Path) -> str:
    """Return the URL of a local folder, given its absolute path."""
    return f"{_FILE}{folder}"


def normalise(url: str | Path) -> str:
    """Return a URL with a scheme. A plain path becomes an absolute `file://` URL."""
    text = str(url)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{text!r} is not UTF-8: choose a folder with another name") from None
    scheme, separator, rest = text.partition("://")
    if not separator and (match := _NEARLY.match(text)):
        raise InvalidArgumentError(
            f"{text!r} looks like a URL without its two slashes: write {match[1]}://bucket/run1 (pathlib.Path removes "
            f"one: pass a str). For a folder of that name write './{text}'"
        )
    if not separator:
        scheme, rest = "file", text
    if not rest:
        raise InvalidArgumentError(
            f"{text!r} does not name a folder: pass a folder or a URL, for example file:///data/run1"
        )
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if scheme == "file":
        if separator and rest.partition("/")[0] == "localhost":
            rest = rest.removeprefix("localhost")
        try:
            return url_of(Path(rest).expanduser().resolve())  # links are resolved, so that a folder has only one URL
        except RuntimeError as error:
            raise InvalidArgumentError(f"{text!r}: {error}") from None
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if at and ":" in user:
        raise InvalidArgumentError(
            f"the {scheme}:// URL contains a password, which would appear in logs and reports: remove it, and pass "
            "credentials in storage_options, the environment or configuration files"
        )
    rest = rest.rstrip("/")
    segments = rest.split("/")
    if not {"", ".", ".."}.isdisjoint(segments[1:]):
        plain = "/".join([segments[0], *(segment for segment in segments[1:] if segment not in ("", ".", ".."))])
        raise InvalidArgumentError(
            f"{scheme}://{rest} has an empty segment, '.' or '..' in its path, which S3 clients resolve to different "
            f"keys. Use a path without them, for example {scheme}://{plain}"
        )
    return f"{scheme}://{rest}"


def remember_options(url: str | Path | None, options: Mapping[str, Any] | None) -> None:
    """Remember fsspec's `storage_options` for a URL, in addition to the environment and configuration files.

    `url`: None applies the options to every URL. They apply to this process and are never written to a file. Raises
        InvalidArgumentError if they are not a dict.
    """
    if options is not None and not isinstance(options, Mapping):
        raise InvalidArgumentError(
            f"storage_options must be a dict of fsspec options like {{'endpoint_url': ...}}, not "
            f"{type(options).__name__}"
        )
    if options is not None:
        _options[_ANYWHERE if url is None else normalise(url)] = dict(options)


def options_of(url: str | Path) -> Mapping[str, Any]:
    """Return the options that `remember_options` has stored for a URL and for every URL."""
    return {**_options.get(_ANYWHERE, {}), **_options.get(normalise(url), {})}


def open_store(
    url: str | Path, *, writable: bool = False, limits: Mapping[str, Any] | None = None, patience_s: float = 60.0
) -> Store:
    """Open the store of a URL: by a built-in scheme, by the entry-point group `ckpt.stores`, or otherwise by fsspec.

    - `writable`: True creates a missing folder; buckets are never created.
    - `limits`: arguments of `ckpt_backends.limit.Limit` for remote stores.
    - `patience_s`: seconds for which transient errors of remote stores are retried; 0 disables retries.

    Raises InvalidArgumentError for an unknown scheme, StoreError if the folder or bucket cannot be used.
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
    from importlib.metadata import entry_points  # imported here, because it is slow and rarely needed

    for entry in entry_points(group="ckpt.stores", name=scheme):
        return entry.value
    from fsspec import available_protocols

    if scheme in available_protocols():
        return _FSSPEC
    raise InvalidArgumentError(
        f"no store is installed for {scheme}:// (available: {', '.join(sorted(_BUILT_IN))}, and the schemes of fsspec)"
    )


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
