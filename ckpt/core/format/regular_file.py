"""Opens files whose names come from other programs. Only regular files are opened, because reading a pipe may block
forever and a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

MAX_SMALL = 256 << 20  # maximum bytes of a small file
LOST = frozenset(
    (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENOTSUP, errno.ENXIO, errno.EINVAL, errno.ENAMETOOLONG,
     errno.EFBIG)
)  # fmt: skip
"""Errors for absent files, irregular files and invalid requests. All other errors may be transient."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file and return its descriptor. Raise OSError if it cannot be opened or is not a regular file."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)  # so that opening a pipe does not wait
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENOTSUP, "it is not a regular file", os.fspath(path))
    return fd


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for reading. Raise OSError like `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        yield file


def read_regular(path: str | os.PathLike[str], limit: int = MAX_SMALL) -> bytes:
    """Return the content of a small file. Raise OSError like `open_regular`, and for more than `limit` bytes."""
    with reading(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, "it is implausibly large", os.fspath(path))
    return data


def start_of(path: str | os.PathLike[str], size: int) -> bytes:
    """Return the first bytes of a file, or b"" after an error in LOST. Raise OSError after another error."""
    try:
        with reading(path) as file:
            return file.read(size)
    except OSError as error:
        if error.errno not in LOST:
            raise
        return b""


def write_regular(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the content of a file durably. Raise OSError like `open_regular`."""
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
