"""Any store that fsspec supports: gs://, az://, memory:// and many more.

The first request connects, and its event loop becomes the loop of the store. Create-if-absent needs a file system that
supports it, so callers that rely on it test it.

Errors of all drivers are converted to the StoreError with the same meaning (`ckpt_backends.refusals`). Their messages
contain the driver's text without secrets: URL queries, which may be signed, and keys and tokens of the options.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpt.errors import CheckpointError, CorruptError, NotFoundError, StoreError, TruncatedError, UsageError
from ckpt.store import Buffer, ObjectInfo, Upload, check_key, check_prefix, options_of
from ckpt_backends.refusals import meaning, without_secrets
from ckpt_backends.remote_upload import FileUpload, only_if_absent

REQUESTS = 16  # requests in flight for operations on many objects


class RemoteStore:
    """Implements `ckpt.store.Store`. For connection options (fsspec's `storage_options`), see `remember_options`."""

    remote = True

    def __init__(self, url: str, *, writable: bool = False) -> None:
        from fsspec import get_filesystem_class

        self.url = url
        self.options = dict(options_of(url))
        self.engine = self.options.pop("engine", None)
        try:
            self._class: Any = get_filesystem_class(url.partition("://")[0])
        except ImportError as error:
            raise UsageError(f"{url} needs a package that is not installed: {error}") from None
        self._root: str = self._class._strip_protocol(url)
        self._fs: Any = None
        self._connecting = asyncio.Lock()

    # -- small objects --

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        path = self.path(key)
        with self.errors(f"cannot store {key}"):
            fs = await self.connected()
            condition = only_if_absent(fs) if create else {}
            if create and not condition:
                raise StoreError(
                    f"{self.clean(self.url)} cannot store a run, because it does not guarantee create if absent: its "
                    "driver, "
                    f"{self._class.__name__}, cannot create an object only if it is absent, so two jobs could "
                    "overwrite each other's commits. Nothing was written. Use a folder, S3, gs:// or az://, or a "
                    "driver that supports mode='create'"
                )
            await fs._pipe_file(path, bytes(data), **condition)

    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        limit: int | None = None,
    ) -> memoryview:
        path = self.path(key)
        size = None
        if length is None or length == 0:
            size = (await self.head(key)).size
            if limit is not None and size > limit:
                raise CorruptError(f"{key} is implausibly large: {size} bytes")
            if length is None:
                length = max(size - start, 0)
            if start + length > size:
                raise TruncatedError(f"{key} has {size} bytes, but {start + length} were requested")
        if length == 0:
            return memoryview(b"")
        with self.errors(f"cannot read {key}"):
            fs = await self.connected()
            whole = size == length
            data = await (fs._cat_file(path) if whole else fs._cat_file(path, start=start, end=start + length))
        if len(data) != length:
            raise await self.short(key, start, length, len(data))
        return memoryview(data)

    async def short(self, key: str, start: int, length: int, got: int) -> StoreError:
        """Return the error for a response with `got` of `length` bytes. It is retryable if the object has the bytes."""
        size = (await self.head(key)).size
        if start + length > size:
            return TruncatedError(f"{key} has {size} bytes, but {start + length} were requested")
        if got > length:
            return StoreError(
                f"{key}: {length} bytes were requested, but {got} arrived: the server does not seem to support ranges"
            )
        return StoreError(f"{key} ended early, at {got} of {length} bytes", retryable=got < length)

    async def head(self, key: str) -> ObjectInfo:
        path = self.path(key)
        with self.errors(f"cannot inspect {key}"):
            fs = await self.connected()
            info = await fs._info(path)
        if info["type"] != "file" or info["size"] is None:
            raise NotFoundError(f"{key} is not an object in {self.url}")
        return ObjectInfo(key, int(info["size"]))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        found: Mapping[str, Any] = {}
        with self.errors(f"cannot list {prefix or 'everything'}"), contextlib.suppress(FileNotFoundError):
            fs = await self.connected()
            found = await fs._find(f"{self._root}/{prefix}".rstrip("/"), detail=True)
        base = f"{self._root}/"  # with a slash, because the keys of a run named run10 also begin with "run1"
        for name, info in found.items():
            key = name.removeprefix(base)
            hidden = key.rpartition("/")[2].startswith(".")
            if name.startswith(base + prefix) and info.get("type") == "file" and not hidden:
                yield ObjectInfo(key, int(info["size"]))

    async def delete(self, key: str) -> None:
        path = self.path(key)
        with self.errors(f"cannot delete {key}"), contextlib.suppress(FileNotFoundError):
            fs = await self.connected()
            await fs._rm_file(path)

    async def delete_many(self, keys: Sequence[str]) -> None:
        await self.in_parallel(self.delete, keys)

    async def in_parallel(self, work: Callable[[str], Awaitable[None]], keys: Sequence[str]) -> None:
        """Send several requests in parallel. Try all of them before raising the first error."""
        window = asyncio.Semaphore(REQUESTS)

        async def one(key: str) -> None:
            async with window:
                await work(key)

        for result in await asyncio.gather(*(one(key) for key in keys), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        return 0  # fsspec cannot list unfinished uploads; a lifecycle rule of the bucket can abort them

    # -- large objects --

    async def upload(self, key: str, *, size: int, replace: bool = False) -> Upload:
        """Begin an upload without checking whether the object exists, because keys of large objects are unique."""
        self.path(key)
        return FileUpload(self, key, size, replace=replace)

    def blocking(self) -> Any:
        """Return the file system for use in threads, if it supports files."""
        sync_fs = getattr(self._fs, "sync_fs", None)
        return self._made() if sync_fs is None else sync_fs

    # -- the driver --

    @property
    def endpoint(self) -> str:
        """Return the endpoint in the options, or "" if the options contain none."""
        given = self.options.get("endpoint_url") or (self.options.get("client_kwargs") or {}).get("endpoint_url")
        return self.clean(str(given or ""))

    def path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    async def connected(self) -> Any:
        async with self._connecting:
            if self._fs is None:
                self._fs = await self._connect()
        return self._fs

    async def _connect(self) -> Any:
        if self._class.async_impl:
            return self._made(asynchronous=True)
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

        return AsyncFileSystemWrapper(self._made(), asynchronous=True)

    def _made(self, **more: Any) -> Any:
        try:
            return self._class(**self._quiet(), **more, skip_instance_cache=True)
        except TypeError as error:
            if "use_listings_cache" not in str(error):
                raise
            return self._class(**self.options, **more, skip_instance_cache=True)  # for drivers without a listings cache

    def _quiet(self) -> dict[str, Any]:
        """Return options that disable cached listings."""
        return {**self.options, "use_listings_cache": False}

    async def aclose(self) -> None:
        fs, self._fs = self._fs, None
        for name in ("_session", "service_client"):  # attributes in which drivers keep open connections
            close = getattr(getattr(fs, name, None), "close", None)
            if close is not None:
                closing = close()
                if inspect.isawaitable(closing):
                    await closing
        if fs is not None:
            _let_go(fs)

    # -- errors --

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Convert the driver's errors to StoreErrors. They are not chained, because their text may contain secrets."""
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError:
            raise NotFoundError(f"{what} in {self.clean(self.url)}: no such object") from None
        except Exception as error:
            raise self.translated(error, f"{what} in {self.clean(self.url)}") from None

    def translated(self, error: Exception, what: str) -> StoreError:
        return meaning(error, self.clean(f"{what}: {str(error) or type(error).__name__}"))

    def clean(self, text: str) -> str:
        """Remove secrets from a text."""
        return without_secrets(text, self.options, os.environ)


def _let_go(fs: Any) -> None:
    """Prevent adlfs from closing a second time at exit, when its event loop is gone, which would print a traceback."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        held = finalizer.peek()
        if held is not None and held[0] is fs:
            finalizer.detach()
