"""Uploads of large objects to a remote store: the common base class, and uploads through fsspec."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ckpt.errors import ExistsError, NotFoundError, StoreError
from ckpt_backends.refusals import GoneError

if TYPE_CHECKING:
    from ckpt_backends.remote import RemoteStore

PART = 16 << 20  # bytes; 64 MiB was not faster with a real server and needs more memory


class RemoteUpload(ABC):
    """Base class of uploads. An object of up to one part is stored by one request in `finish`, only if its name is
    free. A larger object is stored part by part with the methods `_send`, `_complete` and `_drop` of a subclass.

    `resumable`: True if each call may be repeated after an error (`ckpt_backends.retry`). `keeps`: True if the memory
        that was written stays in use until the upload ends (`ckpt_backends.limit`).
    """

    def __init__(self, store: RemoteStore, key: str, size: int, part: int, *, replace: bool) -> None:
        self.part = part
        self.resumable = self.keeps = size <= part
        self._store, self._key, self._size, self._replace = store, key, size, replace
        self._whole: memoryview = memoryview(b"")
        self._once = MaybeDone(store, key, size, replace=replace)
        self._over = False

    async def write_at(self, offset: int, view: memoryview) -> None:
        if offset % self.part or len(view) != min(self.part, self._size - offset):
            size, part = self._size, self.part
            raise StoreError(
                f"a range of {len(view)} bytes at {offset} is not a part of {size} bytes in parts of {part}"
            )
        if self.keeps:
            self._whole = view
        else:
            await self._send(offset, view)

    async def finish(self) -> None:
        if self.keeps:
            check_complete(self._key, len(self._whole), self._size)
            await self._once.run(self._put)
        else:
            await self._complete()
        self._over = True

    async def abort(self) -> None:
        self._whole = memoryview(b"")
        over, self._over = self._over, True
        if over:
            return
        with contextlib.suppress(StoreError):  # if the store is unreachable, a later clean-up deletes the upload
            await self._drop()
            if self._once.undecided and not self._replace:  # the object may exist, because a response was lost
                await self._store.delete(self._key)

    async def _put(self) -> None:
        await self._store.put(self._key, self._whole, create=not self._replace)

    @abstractmethod
    async def _send(self, offset: int, view: memoryview) -> None: ...

    @abstractmethod
    async def _complete(self) -> None: ...

    @abstractmethod
    async def _drop(self) -> None: ...


class FileUpload(RemoteUpload):
    """An upload through fsspec's file object, in a thread. It holds a few parts in memory, whatever the size. To
    replace an object, it writes a hidden file and renames it, because some file systems cannot replace a file in
    another way."""

    def __init__(self, store: RemoteStore, key: str, size: int, *, replace: bool = False) -> None:
        super().__init__(store, key, size, PART, replace=replace)
        path = store.path(key)
        folder, _, name = path.rpartition("/")
        self._path = f"{folder}/.{name}.new" if replace else path
        self._order = InOrder()
        self._file: Any = None

    async def _put(self) -> None:
        create = not self._replace and bool(only_if_absent(await self._store.connected()))
        await self._store.put(self._key, self._whole, create=create)

    async def _send(self, offset: int, view: memoryview) -> None:
        async with self._order.turn(offset, len(view)):
            with self._store.errors(f"cannot write to {self._key}"):
                if self._file is None:
                    await self._store.connected()
                    self._file = await asyncio.to_thread(self._open)
                await asyncio.to_thread(self._file.write, view)

    def _open(self) -> Any:
        return self._store.blocking().open(self._path, "wb", block_size=self.part)

    async def _complete(self) -> None:
        self._order.check_complete(self._key, self._size)
        with self._store.errors(f"cannot finish {self._key}"):
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._file.close()
        if self._replace:
            self._store.blocking().mv(self._path, self._store.path(self._key))

    async def _drop(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with contextlib.suppress(Exception):  # the upload is gone or unreachable
            await asyncio.to_thread(file.discard)
        with contextlib.suppress(Exception):
            file.closed = True  # otherwise the garbage collector would finish the upload
        with contextlib.suppress(Exception):
            await asyncio.to_thread(lambda: self._store.blocking().rm_file(self._path))


class InOrder:
    """Admits overlapping calls one after another, by offset. After a failure, every further call raises an error."""

    def __init__(self) -> None:
        self.at = 0
        self.error: BaseException | None = None
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def turn(self, offset: int, length: int) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self.error is not None or self.at >= offset)
            if self.error is not None or self.at > offset:
                raise StoreError(f"this upload cannot continue: {self.error or f'byte {offset} was written before'}")
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
            raise StoreError(f"cannot finish {key}: {self.error}")
        check_complete(key, self.at, size)


class MaybeDone:
    """Sends the last request of an upload, which may be repeated because its response was lost. `replace`: an object of
    that name and size may have existed before, so the existence of the object does not prove success."""

    def __init__(self, store: RemoteStore, key: str, size: int, *, replace: bool = False) -> None:
        self._store, self._key, self._size, self._replace = store, key, size, replace
        self.undecided = False  # True if the request may have been carried out without a response

    async def run(self, request: Callable[[], Awaitable[Any]]) -> Any:
        """Send the request. Return its response, or None if an earlier try has already created the object."""
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
        """Raise StoreError unless the object exists with its size. The name is unique, so the size is enough."""
        if self._replace:
            raise StoreError(f"it is unknown whether {self._key} was replaced: write it again")
        found = (await self._store.head(self._key)).size
        if found != self._size:
            self.undecided = False  # another writer created the object that exists
            raise StoreError(f"{self._key} has {found} bytes, but {self._size} were written")


def only_if_absent(fs: Any) -> dict[str, Any]:
    """Return the arguments with which a file system creates an object only if it is absent, or {} if it has none.
    Without them, fsspec checks first and then writes, so two writers may create the same object."""
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


def check_complete(key: str, written: int, size: int) -> None:
    if written != size:
        raise StoreError(f"{key} is incomplete: {written} of {size} bytes were written")
