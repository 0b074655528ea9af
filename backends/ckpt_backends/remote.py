"""Any place that fsspec can reach: gs://, az://, memory:// and many more.

Nothing is asked of a place before the first request, which also decides the event loop that the store belongs to.
Creating an object only if it is absent needs a file system that does so by itself; whether it tells the truth about
that is found out by those who rely on it.

The errors of all drivers are translated by what they mean (`ckpt_backends.refusals`). A message of ours carries no
secret: what a driver said is repeated without the queries of URLs, which may be signed, and without what the options
call a key or a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpt.errors import CheckpointError, CorruptError, ExistsError, NotFoundError, StoreError, UsageError
from ckpt.store import Buffer, ObjectInfo, Upload, check_key, options_of
from ckpt_backends.refusals import GoneError, meaning, without_secrets

PART = 16 << 20  # bytes; 64 MiB gained nothing against a real server, and cost memory
REQUESTS = 16  # in flight for what is done to many objects at once


class RemoteStore:
    """See `ckpt.store.Store`. How to get there: `ckpt.store.remember_options`, with fsspec's `storage_options`."""

    remote = True

    def __init__(self, url: str, *, writable: bool = False) -> None:
        from fsspec import get_filesystem_class

        self.url = url
        self.options = dict(options_of(url))
        self.engine = self.options.pop("engine", None)
        try:
            self._class: Any = get_filesystem_class(url.partition("://")[0])
        except ImportError as error:
            raise UsageError(f"{url} needs another package: {error}") from None
        self._root: str = self._class._strip_protocol(url)
        self._fs: Any = None
        self._connecting = asyncio.Lock()

    # -- small objects --

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        path = self._path(key)
        with self.errors(f"cannot store {key}"):
            fs = await self._connected()
            condition = _only_if_absent(fs) if create else {}
            if create and not condition:
                raise StoreError(
                    f"{self.clean(self.url)} cannot hold a run: its driver, {self._class.__name__}, cannot create an "
                    "object only if it is absent, so that two jobs could overwrite each other's commits. Nothing was "
                    "written. Use a folder, S3, gs:// or az://, or a driver that knows mode='create' by itself"
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
        path = self._path(key)
        size = None
        if length is None or length == 0:
            size = (await self.head(key)).size
            if limit is not None and size > limit:
                raise CorruptError(f"{key} is implausibly large: {size} bytes")
            if length is None:
                length = max(size - start, 0)
            if start + length > size:
                raise StoreError(f"{key} holds {size} bytes, {start + length} were asked for")
        if length == 0:
            return memoryview(b"")
        with self.errors(f"cannot read {key}"):
            fs = await self._connected()
            whole = size == length
            data = await (fs._cat_file(path) if whole else fs._cat_file(path, start=start, end=start + length))
        if len(data) != length:
            raise await self.short(key, start, length, len(data))
        return memoryview(data)

    async def short(self, key: str, start: int, length: int, got: int) -> StoreError:
        """The error for an answer with `got` bytes where `length` were asked for: worth a retry if they are there."""
        size = (await self.head(key)).size
        if start + length > size:
            return StoreError(f"{key} holds {size} bytes, {start + length} were asked for")
        if got > length:
            return StoreError(f"{key}: {got} bytes came, {length} were asked for: ranges seem not to be known there")
        return StoreError(f"{key} ended early, at {got} of {length} bytes", retryable=got < length)

    async def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self.errors(f"cannot look at {key}"):
            fs = await self._connected()
            info = await fs._info(path)
        if info["type"] != "file" or info["size"] is None:
            raise NotFoundError(f"{key} is not an object in {self.url}")
        return ObjectInfo(key, int(info["size"]))

    async def list(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        found: Mapping[str, Any] = {}
        with self.errors(f"cannot list {prefix or 'everything'}"), contextlib.suppress(FileNotFoundError):
            fs = await self._connected()
            found = await fs._find(f"{self._root}/{folder}".rstrip("/"), detail=True)
        base = f"{self._root}/"  # with its slash: what is in run10 is not in run1
        for name, info in sorted(found.items()):
            key = name.removeprefix(base)
            hidden = key.rpartition("/")[2].startswith(".")
            if name.startswith(base + prefix) and key > after and info.get("type") == "file" and not hidden:
                yield ObjectInfo(key, int(info["size"]))

    async def delete(self, key: str) -> None:
        path = self._path(key)
        with self.errors(f"cannot delete {key}"), contextlib.suppress(FileNotFoundError):
            fs = await self._connected()
            await fs._rm_file(path)

    async def delete_many(self, keys: Sequence[str]) -> None:
        await self.in_parallel(self.delete, keys)

    async def in_parallel(self, work: Callable[[str], Awaitable[None]], keys: Sequence[str]) -> None:
        """Some requests at a time. All are tried before the first error is raised."""
        window = asyncio.Semaphore(REQUESTS)

        async def one(key: str) -> None:
            async with window:
                await work(key)

        for result in await asyncio.gather(*(one(key) for key in keys), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        return 0  # fsspec has no word for what is unfinished; a rule of the bucket's life cycle can drop it

    # -- large objects --

    async def upload(self, key: str, *, size: int, replace: bool = False) -> Upload:
        """Keys of large objects are names of their own: nobody looks whether there is something under them."""
        self._path(key)
        return FileUpload(self, key, size, replace=replace)

    def blocking(self) -> Any:
        """The same file system for threads, where it has files to write to."""
        sync_fs = getattr(self._fs, "sync_fs", None)
        return self._made() if sync_fs is None else sync_fs

    # -- the driver --

    @property
    def endpoint(self) -> str:
        """Where requests go, if the options say so."""
        given = self.options.get("endpoint_url") or (self.options.get("client_kwargs") or {}).get("endpoint_url")
        return self.clean(str(given or ""))

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    async def _connected(self) -> Any:
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
            return self._class(**self.options, **more, skip_instance_cache=True)  # of a driver that has no such cache

    def _quiet(self) -> dict[str, Any]:
        """Options under which a listing is never one that was seen before."""
        return {**self.options, "use_listings_cache": False}

    async def aclose(self) -> None:
        fs, self._fs = self._fs, None
        for name in ("_session", "service_client"):  # where drivers keep what they have open
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
        """The driver's errors, by their meaning. Its own text may hold secrets, so it is not chained to."""
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
        """Without anything secret."""
        return without_secrets(text, self.options, os.environ)


class InOrder:
    """Lets overlapping calls in one after another, by offset; after a failed one, none."""

    def __init__(self) -> None:
        self.at = 0
        self.error: BaseException | None = None
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def turn(self, offset: int, length: int) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self.error is not None or self.at >= offset)
            if self.error is not None or self.at > offset:
                raise StoreError(f"this upload cannot go on: {self.error or f'byte {offset} was written before'}")
            try:
                yield
            except BaseException as error:
                self.error = error
                raise
            else:
                self.at += length
            finally:
                self._changed.notify_all()

    def check_complete(self, key: str, size: int) -> None:
        if self.error is not None:
            raise StoreError(f"{key} cannot be finished: {self.error}")
        check_complete(key, self.at, size)


class FileUpload:
    """Part by part through fsspec's own file object, in a thread. It holds a few parts in memory, whatever the size.

    What is not larger than one part is stored in one request, at the end, and only if its name is free. What replaces
    another object is written under a name that no listing shows, and moved: some file systems know no other way.
    """

    part = PART

    def __init__(self, store: RemoteStore, key: str, size: int, *, replace: bool = False) -> None:
        self._store, self._key, self._size, self._replace = store, key, size, replace
        path = store._path(key)
        folder, _, name = path.rpartition("/")
        self._path = f"{folder}/.{name}.new" if replace else path
        self.resumable = self.keeps = size <= self.part  # see `ckpt_backends.retry`, `ckpt_backends.limit`
        self._order = InOrder()
        self._once = MaybeDone(store, key, size, replace=replace)
        self._whole: memoryview = memoryview(b"")
        self._file: Any = None
        self._finished = False

    async def write_at(self, offset: int, view: memoryview) -> None:
        check_range(self, offset, view, self._size)
        if self._size <= self.part:
            self._whole = view
            self._order.at = len(view)
            return
        async with self._order.turn(offset, len(view)):
            with self._store.errors(f"cannot write to {self._key}"):
                if self._file is None:
                    await self._store._connected()
                    self._file = await asyncio.to_thread(self._open)
                await asyncio.to_thread(self._file.write, view)

    def _open(self) -> Any:
        return self._store.blocking().open(self._path, "wb", block_size=self.part)

    def _close(self) -> None:
        self._file.close()
        if self._replace:
            self._store.blocking().mv(self._path, self._store._path(self._key))

    async def finish(self) -> None:
        self._order.check_complete(self._key, self._size)
        if self._size <= self.part:
            create = not self._replace and bool(_only_if_absent(await self._store._connected()))
            await self._once.run(lambda: self._store.put(self._key, self._whole, create=create))
        else:
            with self._store.errors(f"cannot finish {self._key}"):
                await asyncio.to_thread(self._close)
        self._finished = True

    async def abort(self) -> None:
        self._whole = memoryview(b"")
        if self._finished or self._file is None:
            return
        file, self._file = self._file, None
        with contextlib.suppress(Exception):  # gone already, or beyond reach
            await asyncio.to_thread(file.discard)
        with contextlib.suppress(Exception):
            file.closed = True  # or it would be finished when it is collected
        with contextlib.suppress(Exception):
            await asyncio.to_thread(lambda: self._store.blocking().rm_file(self._path))


class MaybeDone:
    """The last request of an upload, which may have to be repeated because its answer was lost.

    `replace`: there was an object of that name and size before, so nobody can see whether it was done.
    """

    def __init__(self, store: RemoteStore, key: str, size: int, *, replace: bool = False) -> None:
        self._store, self._key, self._size, self._replace = store, key, size, replace
        self.undecided = False  # it may have been carried out, though nobody said so

    async def run(self, request: Callable[[], Awaitable[Any]]) -> Any:
        """What the request gives; None if it finds the work done by an earlier try."""
        try:
            return await request()
        except (ExistsError, NotFoundError, GoneError):
            if not self.undecided:
                raise
            await self.check()
        except StoreError as error:
            self.undecided = self.undecided or error.retryable
            raise
        except BaseException:
            self.undecided = True
            raise

    async def check(self) -> None:
        """Raise unless the object is there with its size; its name being its own, that decides it."""
        if self._replace:
            raise StoreError(f"nobody knows whether {self._key} was replaced: do it again")
        found = (await self._store.head(self._key)).size
        if found != self._size:
            self.undecided = False  # somebody else's
            raise StoreError(f"{self._key} holds {found} bytes, {self._size} were written")


def _let_go(fs: Any) -> None:
    """adlfs asks to be closed once more when the process ends, by a loop that is gone: a traceback is all that does."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        held = finalizer.peek()
        if held is not None and held[0] is fs:
            finalizer.detach()


def _only_if_absent(fs: Any) -> dict[str, Any]:
    """How a file system is told to create an object and not to replace one; nothing if it cannot.

    What fsspec does for those that have no word for it is to look first and then to write, which is no promise.
    """
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    wrapped = getattr(fs, "sync_fs", None)
    if wrapped is None:
        generic = type(fs)._pipe_file is AsyncFileSystem._pipe_file
    else:
        generic = type(wrapped).pipe_file is AbstractFileSystem.pipe_file
    if generic:
        return {}
    known = inspect.signature(fs._pipe_file).parameters
    if "mode" in known:
        return {"mode": "create"}
    return {"overwrite": False} if "overwrite" in known else {}


def check_range(upload: Upload, offset: int, view: memoryview, size: int) -> None:
    """Refuse anything but one of the ranges that the contract names."""
    if offset % upload.part or len(view) != min(upload.part, size - offset):
        raise StoreError(f"a range of {len(view)} bytes at {offset} is no part of {size} bytes by {upload.part}")


def check_complete(key: str, written: int, size: int) -> None:
    if written != size:
        raise StoreError(f"{key} is incomplete: {written} of {size} bytes were written")
