"""The end of a file of frames, written: a frame is there when its head is, which comes last."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

import numpy as np
import xxhash
import zstandard

from ckpt.events import point
from ckpt.redo.adam import VERSION as PREDICTOR
from ckpt.redo.frame import HEAD, MAGIC, VERSION, Frame, meta_of, pack_columns
from ckpt.store import PAGE, Buffer

_ROOM = 4 << 20  # bytes that are gathered for one write
_WORTH = 256 << 10  # bytes, from which on it is quicker to go past the page cache


class _Tail:
    """Bytes on their way to the end of a file: whole pages go past the page cache where the file system lets them,
    since for a large frame the cache takes longer than the disk; the pages that frames share go through it."""

    def __init__(self, path: str, fd: int) -> None:
        room = mmap.mmap(-1, _ROOM)  # begins with a page, as O_DIRECT wants it
        self._fd, self._view, self._bytes = fd, memoryview(room), np.frombuffer(room, np.uint8)
        self._base = self._begin = self._end = 0  # the room lies at `base` of the file, and has bytes from begin to end
        self._direct: int | None = None
        with contextlib.suppress(OSError):
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def start(self, at: int) -> None:
        """The next byte goes here; what was put and not written is forgotten."""
        self._base = at // PAGE * PAGE
        self._begin = self._end = at - self._base

    def put(self, piece: Buffer) -> None:
        view = memoryview(piece).cast("B")
        while len(view):
            count = min(len(view), _ROOM - self._end)
            np.copyto(self._bytes[self._end : self._end + count], np.frombuffer(view[:count], np.uint8))
            self._end, view = self._end + count, view[count:]
            if self._end == _ROOM:
                self.write()

    def write(self) -> int:
        """All that was put; where that ends in the file."""
        first, last = -(-self._begin // PAGE) * PAGE, self._end // PAGE * PAGE
        if last - first >= _WORTH:
            self._through_the_cache(self._begin, first)
            self._begin = self._past_the_cache(first, last)
        self._through_the_cache(self._begin, self._end)
        at = self._base + self._end
        self.start(at)
        return at

    def _past_the_cache(self, first: int, last: int) -> int:
        """As many of these pages as go that way; how far that is."""
        while self._direct is not None and first < last:
            try:
                first += self._write(self._direct, first, last)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.close()  # it wants larger pages, or none at all
        return first

    def _through_the_cache(self, first: int, last: int) -> None:
        while first < last:
            first += self._write(self._fd, first, last)

    def _write(self, fd: int, first: int, last: int) -> int:
        done = os.pwrite(fd, self._view[first:last], self._base + first)
        point("frame.writing")
        return done

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


class Appender:
    """The end of a file that frames are appended to. One thread at a time."""

    def __init__(self, path: str) -> None:
        """A new file; FileExistsError if there is one."""
        self.path, self.size = path, 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._tail = _Tail(path, self._fd)
        except BaseException:
            os.close(self._fd)
            os.unlink(path)
            raise
        self._last: Frame | None = None

    def begin(self) -> None:
        self._digest, self._payload = xxhash.xxh3_128(), 0
        self._tail.start(self.size + HEAD.size)

    def add(self, piece: Buffer) -> None:
        """The next bytes of the payload; not looked at any more when this returns."""
        self._payload += memoryview(piece).nbytes
        self._put(piece)

    def end(self, frame: Frame, values: Buffer) -> int:
        """What is known of the frame when its blobs are there, and `values`, as JSON: it is durable afterwards. The
        bytes that it takes in the file."""
        packed_values = zstandard.compress(bytes(values), 1)
        self.add(packed_values)
        columns = pack_columns(frame.columns)
        text = meta_of(frame, self._last, len(packed_values))
        self._put(columns)
        self._put(text)
        head = HEAD.pack(MAGIC, VERSION, PREDICTOR, self._payload, len(columns), len(text))
        self._digest.update(head)
        self._tail.put(self._digest.digest())
        end = self._tail.write()
        point("frame.written")
        os.pwrite(self._fd, head, self.size)
        point("frame.headed")
        os.fdatasync(self._fd)
        point("frame.durable")
        taken, self.size, self._last = end - self.size, end, frame
        return taken

    def abandon(self) -> None:
        """What was begun is not wanted any more: the file ends where it did."""
        os.ftruncate(self._fd, self.size)

    @property
    def gone(self) -> bool:
        """Whether the file was deleted, or cut off: what is appended to it nobody will find."""
        found = os.fstat(self._fd)
        return found.st_nlink == 0 or found.st_size < self.size

    def close(self) -> None:
        self._tail.close()
        os.close(self._fd)

    def _put(self, piece: Buffer) -> None:
        self._digest.update(piece)
        self._tail.put(piece)
