"""Open files of the local store: large files that are being written, and files that are being read."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt.errors import AccessError, ExistsError, FullError, NotFoundError, StoreError, TruncatedError
from ckpt.failpoints import point
from ckpt.store import PAGE
from ckpt_backends.disk import UNSUPPORTED, Disk

if TYPE_CHECKING:
    from ckpt_backends.local import LocalStore

OPEN_FILES = 16
PASSING = {  # error numbers of transient errors
    errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENODEV,
}  # fmt: skip
_VECTORS = 1024  # maximum vectors of one preadv


class LocalUpload:
    """Writes whole pages without the page cache, and unaligned bytes through it. One fsync makes both durable. `final`:
    the name that the file gets at the end; it differs from `path` if the upload replaces another object."""

    part = 0

    def __init__(self, store: LocalStore, path: str, final: str, size: int, buffered: int, direct: int | None) -> None:
        self._store, self._path, self._final, self._size = store, path, final, size
        self._buffered, self._direct = buffered, direct
        self._files = [fd for fd in (buffered, direct) if fd is not None]
        self._users = 1  # this object and each write in progress; the last user closes the files
        self._open = True
        self._lock = threading.Lock()

    async def write_at(self, offset: int, view: memoryview) -> None:
        if offset + len(view) > self._size:
            raise StoreError(f"{self._path}: write beyond the declared size")
        with errors(self._store.url, self._path):
            await self._store.run(self._write, offset, view)

    def _write(self, offset: int, view: memoryview) -> None:
        """Write in a thread. The thread may outlast the upload, because a cancelled write continues. It must not use a
        closed descriptor, because the number may belong to another file by then."""
        with self._lock:
            if not self._open:
                return  # the upload was aborted
            self._users += 1
        try:
            self._write_all(offset, view)
        finally:
            self._release()

    def _write_all(self, offset: int, view: memoryview) -> None:
        while view:
            pages = len(view) // PAGE * PAGE if offset % PAGE == 0 else 0
            direct = self._direct
            if pages and direct is not None and _address(view) % PAGE == 0:
                try:
                    written = self._store.disk.pwrite(direct, view[:pages], offset)
                except OSError as error:
                    if error.errno not in UNSUPPORTED:  # EINVAL means that this disk needs a coarser alignment
                        raise
                    self._direct = None
                    continue
            else:
                written = self._store.disk.pwrite(self._buffered, view, offset)
            offset += written
            view = view[written:]

    async def finish(self) -> None:
        with errors(self._store.url, self._path):
            await self._store.run(self._finish)

    def _finish(self) -> None:
        disk = self._store.disk
        try:
            disk.truncate(self._buffered, self._size)
            point("data_file.written")
            disk.fsync(self._buffered)
            if self._final != self._path:  # renamed while the file is locked
                disk.replace(self._path, self._final)
                self._store.open_files.forget(self._final)
        finally:
            self._close()
        disk.fsync_dir(os.path.dirname(self._path))
        point("data_file.synced")

    async def abort(self) -> None:
        await self._store.run(self._abort)

    def _abort(self) -> None:
        self._close()
        with contextlib.suppress(OSError):  # the file is gone, or the disk failed and a later clean-up deletes the file
            self._store.disk.unlink(self._path)

    def _close(self) -> None:
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._release()

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        for fd in self._files if last else ():
            with contextlib.suppress(OSError):
                self._store.disk.close(fd)


class OpenFiles:
    """Files being read. They stay open, so that a reader can finish reading a file that is deleted."""

    def __init__(self, disk: Disk, direct: bool) -> None:
        self._disk, self._direct = disk, direct
        self._readers: OrderedDict[str, _Reader] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[_Reader]:
        with self._lock:
            reader = self._readers.get(path)
            if reader is None:
                reader = self._readers[path] = _Reader(self._disk, path, self._direct)
                while len(self._readers) > OPEN_FILES:
                    self._readers.popitem(last=False)[1].release()
            reader.users += 1
        try:
            yield reader
        finally:
            with self._lock:
                reader.release()

    def forget(self, path: str) -> None:
        """Close the open file of a path that now names another file, or no file."""
        with self._lock:
            if (reader := self._readers.pop(path, None)) is not None:
                reader.release()

    def close(self) -> None:
        for path in list(self._readers):
            self.forget(path)


class _Reader:
    """One open file and the number of its users."""

    def __init__(self, disk: Disk, path: str, direct: bool) -> None:
        self._disk, self._path = disk, path
        self._buffered = self._disk.open(path, os.O_RDONLY)
        try:
            self._size = size_of(self._buffered, path)
        except BaseException:
            self._disk.close(self._buffered)
            raise
        self._direct = open_direct(disk, path, os.O_RDONLY) if direct else None
        self.users = 1  # number of users; the list of open files counts as one

    def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            for fd in (self._buffered, self._direct):
                if fd is not None:
                    self._disk.close(fd)

    def read(self, start: int, length: int, into: memoryview | None) -> memoryview:
        if start + length > self._size:
            raise TruncatedError(f"{self._path} has {self._size} bytes, but {start + length} were requested")
        first = start // PAGE * PAGE
        last = -(-(start + length) // PAGE) * PAGE
        if self._direct is not None and length >= PAGE:
            if into is None or len(into) < last - first:
                into = memoryview(mmap.mmap(-1, last - first))  # page-aligned memory
            try:
                self._fill(self._direct, into[: last - first], first, start + length - first)
                return into[start - first : start - first + length]
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
        if into is None or len(into) < length:
            into = memoryview(bytearray(length))
        self._fill(self._buffered, into[:length], start, length)
        return into[:length]

    def scatter(self, start: int, views: Sequence[memoryview]) -> None:
        if start + sum(map(len, views)) > self._size:
            raise TruncatedError(f"{self._path} has {self._size} bytes, but more were requested from {start} on")
        left = [view for view in views if len(view)]
        while left:
            count = self._disk.scatter(self._buffered, left[:_VECTORS], start)
            if count <= 0:
                raise StoreError(f"{self._path} ended early, at {start} of {self._size} bytes")
            start += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def soon(self, start: int, length: int) -> None:
        os.posix_fadvise(self._buffered, start, max(0, min(length, self._size - start)), os.POSIX_FADV_WILLNEED)

    def _fill(self, fd: int, view: memoryview, offset: int, needed: int) -> None:
        done = 0
        while done < needed:
            count = self._disk.preadv(fd, view[done:], offset + done)
            if count <= 0:
                raise StoreError(f"{self._path} ended early, at {offset + done} of {self._size} bytes")
            done += count
            if fd == self._direct and done < needed and done % PAGE:  # a direct read cannot continue inside a page
                raise OSError(errno.EINVAL, "short direct read", self._path)


def open_direct(disk: Disk, path: str, flags: int) -> int | None:
    """Open a second descriptor, without the page cache, for a file that is open already. Return None if the file system
    refuses with any error, because the descriptor with the page cache works in every case."""
    try:
        return disk.open(path, flags | os.O_DIRECT)
    except OSError:
        return None


def size_of(fd: int, path: str) -> int:
    """Return the size of an open file. Raise NotFoundError if it is not a regular file, for example a pipe."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise NotFoundError(f"{path} is not a file")
    return found.st_size


def _address(view: memoryview) -> int:
    import numpy as np  # not needed to open a store, list it or read a small file

    return np.frombuffer(view, np.uint8).ctypes.data


def translated(error: OSError, url: str, path: str) -> StoreError:
    what = f"{os.strerror(error.errno) if error.errno else error} ({path} in {url})"
    if isinstance(error, FileNotFoundError):
        return NotFoundError(what)
    if error.errno in (errno.ELOOP, errno.ENXIO):  # the path is a link, a socket or a device
        return NotFoundError(f"not a file: {what}")
    if isinstance(error, FileExistsError):
        return ExistsError(what)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError(f"no space left: {what}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessError(
            f"not allowed: {what}. Check the owner and mode of the folder, and that it is not mounted read-only"
        )
    if error.errno == errno.ENOTDIR:
        what = f"a file is in place of a folder: {what}. Use another folder, or the one that contains the file"
    return StoreError(what, retryable=error.errno in PASSING)


@contextlib.contextmanager
def errors(url: str, path: str) -> Iterator[None]:
    """Convert errors of the operating system to StoreErrors with the same meaning."""
    try:
        yield
    except OSError as error:
        raise translated(error, url, path) from error
