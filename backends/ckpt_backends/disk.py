"""The one door to the operating system that the local store uses.

Everything that can lose data goes through here, so that a test can stand in the doorway: record the order of writes
and syncs, or make any one of them fail.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


class Disk:
    """Plain system calls, blocking. Raises OSError. Who may read what is made here is the umask's to say."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        # O_NONBLOCK means nothing to a file, and keeps us from waiting for the other end of a pipe with a file's name.
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def reserve(self, fd: int, size: int) -> None:
        """Take the space now, so that a full disk is known before the first byte is written."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def lock(self, fd: int) -> bool:
        """Whether nobody else has this file locked; then we have, until it is closed. True where nothing is locked."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL):
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
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Give a finished file its name; FileExistsError if the name is taken. Leaves `source` or not."""
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            self._rename_noreplace(source, target)

    def _rename_noreplace(self, source: str, target: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
        if libc.renameat2(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), target)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)
