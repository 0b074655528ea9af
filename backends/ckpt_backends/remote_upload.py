"""Large objects on their way to a remote place: what all such uploads have in common, and those by fsspec."""

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

PART = 16 << 20  # bytes; 64 MiB gained nothing against a real server, and cost memory


class RemoteUpload(ABC):
    """What is not larger than one part is stored by one request, at the end, and only if its name is free. All else
    goes part by part, in ways of the store's own: `_send`, `_complete`, `_drop`.

    `resumable`: each call may be repeated after an error (`ckpt_backends.retry`). `keeps`: the memory of what was
    written is in use until the end (`ckpt_backends.limit`).
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
            raise StoreError(f"a range of {len(view)} bytes at {offset} is no part of {size} bytes by {part}")
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
        with contextlib.suppress(StoreError):  # beyond reach: a later clean-up finds it
            await self._drop()
            if self._once.undecided and not self._replace:  # and perhaps finished
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
    """Through fsspec's own file object, in a thread. It holds a few parts in memory, whatever the size.

    What replaces another object is written under a name that no listing shows, and moved: some file systems know no
    other way.
    """

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
        with contextlib.suppress(Exception):  # gone already, or beyond reach
            await asyncio.to_thread(file.discard)
        with contextlib.suppress(Exception):
            file.closed = True  # or it would be finished when it is collected
        with contextlib.suppress(Exception):
            await asyncio.to_thread(lambda: self._store.blocking().rm_file(self._path))


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


def only_if_absent(fs: Any) -> dict[str, Any]:
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


def check_complete(key: str, written: int, size: int) -> None:
    if written != size:
        raise StoreError(f"{key} is incomplete: {written} of {size} bytes were written")
