"""A folder on a local (or POSIX-conforming shared) file system.

A small object is written under a temporary name, fsynced and linked to its name, and the folder is fsynced. So it
appears complete or not at all, even after a power cut. A large object is written directly to its final name, bypassing
the page cache (O_DIRECT) if possible, and is not read until a log record names it. On ext4 over NVMe, aligned O_DIRECT
wrote 1.0-1.7 GB/s. Buffered writes with fsync wrote 0.2-1.2 GB/s and took ten times the CPU time.

Names that begin with a dot are temporary and never listed. Only files are listed, with one exception: a pipe, a link or
anything else with the name of a log record is listed with size 0, so that readers detect that the record is lost.

A small object is first written as `.<random>.tmp`. A large object that replaces another one is first written as
`.<name>.<random>.new`. Its writer locks this temporary file, so an unlocked one was left by a crash. `drop_uploads`
deletes leftovers, and so does the next upload that replaces the same object. `.reserve` is a file of 1 MB that is
deleted when the disk is full, so that the log can still record the failure.

A path may stop naming the run while a process writes to it, because the folder was deleted, moved or replaced. After
`watch()`, each change first checks that FORMAT.json is still the same file. A missing subfolder is created again only
if FORMAT.json still exists a moment later.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import aiofiles

from ckpt.errors import CorruptError, FullError, NotFoundError, RunGoneError, StoreError, TruncatedError
from ckpt.failpoints import point
from ckpt.store import Buffer, ObjectInfo, check_key, check_prefix
from ckpt_backends.disk import Disk
from ckpt_backends.local_files import LocalUpload, OpenFiles, errors, open_direct, size_of, translated

P = ParamSpec("P")
T = TypeVar("T")
Listing = list[ObjectInfo]

THREADS = 8  # enough requests in flight to keep one NVMe drive busy
RESERVE = 1 << 20
_RECORD = re.compile(r"log/[0-9]{12}\.json")
VANISHED_S = 0.2  # seconds before a missing folder is created again, because `rm -rf` may be deleting the run
STEPS = "steps/"  # folders below it have names with a random part, so no other run uses the same name
TRIES = 3  # number of tries to create a temporary file: a clean-up may delete it before it is locked
_LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{16}\.new")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")


class LocalStore:
    """Implements `ckpt.store.Store` for a folder. `direct=False`: use the page cache instead of O_DIRECT."""

    remote = False

    def __init__(self, url: str, *, writable: bool = False, direct: bool = True, disk: Disk | None = None) -> None:
        self.url = url
        self.root = url.removeprefix("file://").rstrip("/") or "/"
        self.disk = disk or Disk()
        self.direct = direct
        self._pool = ThreadPoolExecutor(THREADS, "ckpt-io")
        self._calls: set[Future[Any]] = set()  # calls in progress in the pool
        self.open_files = OpenFiles(self.disk, direct)
        self._steps = f"{self.root}/{STEPS}"
        self._known_folders: set[str] = set()
        self._check: Callable[[], Awaitable[None]] | None = None
        self._format: tuple[int, ...] | None = None  # identifies the FORMAT.json that was checked last
        self._content: bytes | None = None  # content of FORMAT.json
        if writable:
            with errors(self.url, self.root):
                self._make_root()
                self._sync_folders()

    @property
    def caveat(self) -> str:
        """Return a warning about a promise that this file system cannot keep, or an empty string."""
        if not self.disk.folders_unsynced:
            return ""
        return (
            f"{self.root}: this file system does not guarantee fsync of folders, so a power cut may undo the newest "
            "checkpoints. The death of a process loses nothing"
        )

    # -- whether the folder is still the run --

    def watch(self, check: Callable[[], Awaitable[None]]) -> None:
        """Check before each change that the folder is still the run. check: raises RunGoneError if it is not, and is
        called only if FORMAT.json is not the file of the last check."""
        self._check = check

    def _identify(self) -> tuple[int, ...] | None:
        """Return a key that identifies this FORMAT.json file, or None if there is no such file."""
        try:
            found = os.stat(f"{self.root}/FORMAT.json", follow_symlinks=False)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    async def _check_run(self) -> None:
        """Raise RunGoneError if the folder is no longer the run that was opened."""
        if self._check is None:
            return
        found = await self.run(self._identify)
        if found is None or found != self._format:
            content = None
            with contextlib.suppress(OSError, StoreError, CorruptError):  # `_check` below raises the error
                content = await self.run(self._read_format)
            await self._check()
            self._format, self._content = found, content

    def _read_format(self) -> bytes:
        return bytes(self._read_whole(f"{self.root}/FORMAT.json", 0, RESERVE))

    def _check_again(self) -> None:
        """Raise RunGoneError if FORMAT.json has changed since `_check_run`. Called in the thread that is about to
        write. Compare the content, because some file systems change the inode number or device of an unchanged file."""
        if self._check is None or self._format is None:
            return
        found = self._identify()
        if found != self._format:
            try:
                same = self._read_format() == self._content
            except (FileNotFoundError, NotADirectoryError, NotFoundError, CorruptError):
                same = False
            if not same:
                raise RunGoneError.of(self.url)
            self._format = found

    # -- small objects --

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        path = self._path(key)
        try:
            await self._put(path, data, create)
        except FullError:
            # FORMAT.json may use the reserve too, because opening a run tries to create it, even on a full disk.
            vital = _is_record(key) or key == "FORMAT.json"
            if not vital or not await self.run(self._give_up_reserve):
                raise
            await self._put(path, data, create)
        else:
            if _is_record(key):
                await self.run(self._take_reserve)

    async def _put(self, path: str, data: Buffer, create: bool) -> None:
        folder = os.path.dirname(path)
        await self._check_run()
        with errors(self.url, path):
            for number in range(TRIES):
                await self.run(self._make_folders, folder)
                temporary = f"{folder}/.{secrets.token_hex(8)}.tmp"
                try:
                    await self._put_as(temporary, path, data, create)
                    return
                except FileNotFoundError:
                    # A clean-up deleted the unlocked file, or the folder while it was empty.
                    if number == TRIES - 1 or not (folder.startswith(self._steps) or os.path.isdir(folder)):
                        raise

    async def _put_as(self, temporary: str, path: str, data: Buffer, create: bool) -> None:
        folder = os.path.dirname(path)
        log = folder.endswith("/log")
        try:
            # Unbuffered, because the descriptor is synced before it is closed, and no bytes may remain in a buffer. The
            # file stays open until it has its name, because closing it would release the lock.
            async with aiofiles.open(temporary, "xb", buffering=0, opener=self._opener) as file:
                view = memoryview(data)
                while view:
                    written = await file.write(view)
                    view = view[written:]
                await self.run(self.disk.fsync, file.fileno())
                if log:
                    point("log.synced")
                try:
                    await self.run(self.disk.link if create else self.disk.replace, temporary, path)
                except FileExistsError:
                    # this writer may have created the object in an earlier try, and its caller relies on durability
                    await self.run(self.disk.fsync_dir, folder)
                    raise
            self.open_files.forget(path)
            if log:
                point("log.linked")
            await self.run(self.disk.fsync_dir, folder)
        finally:
            with contextlib.suppress(OSError):  # the file was replaced, renamed or never created, or the disk failed
                await self.run(self.disk.unlink, temporary)

    def _opener(self, path: str, flags: int) -> int:
        self._check_again()
        fd = self.disk.open(path, flags)
        with contextlib.suppress(OSError):  # without the lock, only protection from a clean-up is lost
            self.disk.lock(fd)
        return fd

    async def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with errors(self.url, path):
            found = await self.run(os.lstat, path)
        if not stat.S_ISREG(found.st_mode):
            raise NotFoundError(f"{path} is not a file")
        return ObjectInfo(key, found.st_size)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await self.run(self._scan, check_prefix(prefix)):
            yield info

    async def delete(self, key: str) -> None:
        if not key.startswith(STEPS):
            await self._check_run()
        await self.discard(key)

    async def discard(self, key: str) -> None:
        """Delete an object without checking that the folder is still the run. The caller has compared its bytes."""
        path = self._path(key)
        self.open_files.forget(path)  # an open descriptor would keep the disk space in use
        with errors(self.url, path), contextlib.suppress(FileNotFoundError):
            await self.run(self.disk.unlink, path)
        folder = os.path.dirname(path)
        if folder.startswith(self._steps):
            await self.run(self._drop_folder, folder)

    def _drop_folder(self, folder: str) -> None:
        """Delete the folder of a checkpoint if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(folder)
            self._known_folders.discard(folder)

    async def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self.delete(key)

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        """Delete temporary files of crashed writers, including uploads that were to replace an object. An unfinished
        upload of a new object has its final name, so it is not deleted here."""
        return await self.run(self._drop_leftovers, wanted)

    def _drop_leftovers(self, wanted: Callable[[str], bool]) -> int:
        dropped, pending = 0, [""]
        while pending:
            folder = pending.pop()
            with contextlib.suppress(OSError):
                for entry in list(os.scandir(f"{self.root}/{folder}")):
                    found = _LEFTOVER.fullmatch(entry.name)
                    key = folder + (found[1] if found is not None else entry.name)
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        pending.append(f"{folder}{entry.name}/")
                    elif found is not None or _TEMPORARY.fullmatch(entry.name):
                        with contextlib.suppress(OSError):  # its writer was faster, or it cannot be opened
                            dropped += self._drop_left(entry.path, lambda key=key: wanted(key))  # type: ignore[misc]
        return dropped

    def _drop_left(self, path: str, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Delete a temporary file unless its writer lives or `wanted` returns True. Return True if it was deleted. If
        locks do not work, keep the file, because a living writer cannot be detected."""
        fds: list[int] = []
        try:
            for free in (True, False):  # the second descriptor must fail to get the lock; otherwise locks do not work
                fds.append(self.disk.open(path, os.O_RDWR))
                if self.disk.lock(fds[-1]) is not free:
                    return False
            if wanted():
                return False
            self.disk.unlink(path)
            return True
        finally:
            for fd in fds:
                self.disk.close(fd)

    # -- large objects --

    async def upload(self, key: str, *, size: int, replace: bool = False) -> LocalUpload:
        path = self._path(key)
        await self._check_run()
        with errors(self.url, path):
            return await self.run(self._open_upload, path, size, replace)

    def _open_upload(self, final: str, size: int, replace: bool) -> LocalUpload:
        folder, name = os.path.split(final)
        path = final
        self._make_folders(folder)
        if replace:
            with contextlib.suppress(OSError):  # skip unreadable entries
                for entry in list(os.scandir(folder)):
                    found = _LEFTOVER.fullmatch(entry.name)
                    if found is not None and found[1] == name:
                        self._drop_left(entry.path)
            path = f"{folder}/.{name}.{secrets.token_hex(8)}.new"
        create = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        self._check_again()
        try:
            buffered = self.disk.open(path, create)
        except FileNotFoundError:  # another process deleted the folder, because it was empty
            self._make_folders(folder)
            buffered = self.disk.open(path, create)
        try:
            if replace:
                self.disk.lock(buffered)
            if size:
                self.disk.reserve(buffered, size)
            direct = open_direct(self.disk, path, os.O_WRONLY) if self.direct else None
        except BaseException:
            self.disk.close(buffered)
            with contextlib.suppress(OSError):
                self.disk.unlink(path)
            raise
        return LocalUpload(self, path, final, size, buffered, direct)

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
        with errors(self.url, path):
            if length is None:
                return await self.run(self._read_whole, path, start, limit)
            return await self.run(self._read_range, path, start, length, into)

    def _read_whole(self, path: str, start: int, limit: int | None) -> memoryview:
        fd = self.disk.open(path, os.O_RDONLY)
        try:
            size = size_of(fd, path)
            if start > size:
                raise TruncatedError(f"{path} ends before byte {start}")
            if limit is not None and size > limit:
                raise CorruptError(f"{path} is implausibly large: {size} bytes")
            data = memoryview(bytearray(size - start))
            done = 0
            while done < len(data) and (count := self.disk.preadv(fd, data[done:], start + done)) > 0:
                done += count
            return data[:done].toreadonly()
        finally:
            self.disk.close(fd)

    def _read_range(self, path: str, start: int, length: int, into: memoryview | None) -> memoryview:
        with self.open_files.reading(path) as file, self._reopening(path):
            return file.read(start, length, into)

    def scatter(self, key: str, start: int, views: Sequence[memoryview]) -> None:
        """Fill these views, one after another, with the object's bytes from `start` on. Read through the page cache, in
        the calling thread."""
        path = self._path(key)
        with errors(self.url, path), self.open_files.reading(path) as file, self._reopening(path):
            file.scatter(start, views)

    @contextlib.contextmanager
    def _reopening(self, path: str) -> Iterator[None]:
        """Open a file again after an error, because on NFS a stale descriptor fails forever (ESTALE)."""
        try:
            yield
        except (OSError, StoreError):
            self.open_files.forget(path)
            raise

    async def has_folder(self, key: str) -> bool:
        """Return True if a folder exists. A listing cannot distinguish a missing folder from an empty one."""
        path = self._path(key)
        with errors(self.url, path):
            try:
                return stat.S_ISDIR((await self.run(os.stat, path)).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def soon(self, key: str, start: int, length: int) -> None:
        """Ask the kernel to read ahead the bytes that `scatter` will request soon. Never raises an error."""
        with contextlib.suppress(OSError, StoreError), self.open_files.reading(self._path(key)) as file:
            file.soon(start, length)

    # -- folders and the reserve --

    def _path(self, key: str) -> str:
        return f"{self.root}/{check_key(key)}"

    def _make_root(self) -> None:
        missing: list[Path] = []
        folder = Path(self.root)
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another job may create the folder at the same moment
                self.disk.mkdir(str(folder))
            self.disk.fsync_dir(str(folder.parent))
        if not Path(self.root).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", self.root)

    def _sync_folders(self) -> None:
        """Sync the folders in which a killed process may have left names that are visible but not durable."""
        with contextlib.suppress(OSError):  # a folder may belong to another user; syncing matters only for a new root
            self.disk.fsync_dir(os.path.dirname(self.root))
        pending = [self.root]
        while pending:
            folder = pending.pop()
            self.disk.fsync_dir(folder)
            if f"{folder}/" == self._steps:
                continue  # the folder of a checkpoint is synced when its index is stored
            entries = list(os.scandir(folder))
            pending += [one.path for one in entries if one.is_dir(follow_symlinks=False) and one.name[0] != "."]

    def _make_folders(self, folder: str) -> None:
        if folder in self._known_folders:
            if os.path.isdir(folder):
                return
            time.sleep(VANISHED_S)
        self._check_again()
        above = os.path.dirname(folder)
        if folder.startswith(self._steps):
            self._make_folders(above)  # the folder above may have vanished too
        try:
            self.disk.mkdir(folder)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder of its own", folder) from None
        self.disk.fsync_dir(above)
        self._known_folders.add(folder)

    def _scan(self, prefix: str) -> Listing:
        found: Listing = []
        pending = [""]
        while pending:
            folder = pending.pop()
            try:
                entries = list(os.scandir(f"{self.root}/{folder}"))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise translated(error, self.url, folder) from error
            for entry in entries:
                key = folder + entry.name
                if entry.name.startswith(".") or not (key.startswith(prefix) or prefix.startswith(key + "/")):
                    continue
                is_file, wanted = entry.is_file(follow_symlinks=False), key.startswith(prefix)
                if not is_file and _RECORD.fullmatch(key) and wanted:
                    found.append(ObjectInfo(key, 0))
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(key + "/")
                elif is_file and wanted:
                    try:
                        found.append(ObjectInfo(key, entry.stat(follow_symlinks=False).st_size))
                    except FileNotFoundError:
                        pass  # the entry was deleted during the scan
                    except OSError as error:
                        raise translated(error, self.url, key) from error
        return found

    def _take_reserve(self) -> None:
        path = f"{self.root}/.reserve"
        try:
            self._check_again()
            fd = self.disk.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except (OSError, RunGoneError):
            return  # the reserve exists already, or there is no space yet
        try:
            self.disk.reserve(fd, RESERVE)
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.unlink(path)
        finally:
            self.disk.close(fd)

    def _give_up_reserve(self) -> bool:
        try:
            self.disk.unlink(f"{self.root}/.reserve")
            self.disk.fsync_dir(self.root)  # journalling file systems release the space only after a commit
        except OSError:
            return False
        return True

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = self._pool.submit(function, *args, **kwargs)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(call)

    async def aclose(self) -> None:
        self.open_files.close()
        self._pool.shutdown(wait=not self._calls)  # do not wait for cancelled calls, which may hang in the file system


def _is_record(key: str) -> bool:
    return key.startswith("log/")
