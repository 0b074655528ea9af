"""The system calls of the local store.

Every call that can lose data is a method of `Disk`, so that a test can record the order of writes and syncs, or make
any call fail. If a file system lacks a capability, `Disk` uses a substitute that keeps the same promise, or raises
an error that names the capability.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence

from ckpt.errors import StoreError
from ckpt.store import UNLOCKABLE

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY})
"""Error numbers with which file systems reject a call that they do not implement."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


class Disk:
    """Plain blocking system calls. They raise OSError. The umask determines permissions. `folders_unsynced`: True
    once the file system has rejected the fsync of a folder."""

    folders_unsynced = False

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        # O_NONBLOCK does not affect regular files. It prevents open() from waiting if the name is that of a pipe.
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def reserve(self, fd: int, size: int) -> None:
        """Allocate the space now, so that a full disk is detected before the first byte is written. If the file system
        cannot allocate space in advance, do nothing; the writes then detect a full disk."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno in _FULL:
                raise

    def lock(self, fd: int) -> bool:
        """Lock a file until it is closed. Return False if another process has locked it. Return True if the lock was
        acquired, or if the file system does not support locks."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in UNLOCKABLE:
                raise
        return True

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwrite(fd, view, offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)

    def scatter(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, views, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fsync_dir(self, path: str) -> None:
        """Make the names in a folder durable. Set `folders_unsynced` if the file system cannot do this."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync_folder(fd)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.folders_unsynced = True
        finally:
            os.close(fd)

    def fsync_folder(self, fd: int) -> None:
        os.fsync(fd)

    def link(self, source: str, target: str) -> None:
        """Give the complete file `source` the name `target`; `source` may remain. Raise FileExistsError if `target`
        exists, and StoreError if no call of the file system creates a name only if it is absent."""
        try:
            self.hard_link(source, target)
        except OSError as error:
            if error.errno not in UNSUPPORTED | {errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EACCES}:
                raise
            self._rename_noreplace(source, target)

    def hard_link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def _rename_noreplace(self, source: str, target: str) -> None:
        try:
            self.rename_noreplace(source, target)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            raise StoreError(
                f"the file system of {os.path.dirname(target)} does not guarantee create if absent: it has neither "
                "hard links nor renameat2(RENAME_NOREPLACE), so two jobs could write the same log record. Use a folder "
                "on another file system, or a bucket"
            ) from error

    def rename_noreplace(self, source: str, target: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        rename = getattr(libc, "renameat2", None)
        if rename is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
        if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), target)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)
