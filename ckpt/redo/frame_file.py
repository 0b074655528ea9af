"""Frames in a file: appended, and found again.

A frame is there when its head is, which is written last. A file is whatever whole frames it holds: what is wrong with
the rest is said.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import zstandard

from ckpt.errors import CorruptError, FormatError, SaveError
from ckpt.failpoints import point
from ckpt.format.digest import DIGEST_SIZE, blob_hasher
from ckpt.format.manifest import Attempt, plain_size
from ckpt.format.regular_file import reading
from ckpt.redo.adam import VERSION as PREDICTOR
from ckpt.redo.frame import (
    HEAD,
    MAGIC,
    MAX_COLUMNS,
    MAX_META,
    MAX_VALUES,
    VERSION,
    Frame,
    meta_of,
    pack_columns,
    parse,
    unzip,
)
from ckpt.store import PAGE, Buffer

_ROOM = 4 << 20  # bytes that are gathered for one write; of a meta that is looked at in what is damaged
_WORTH = 256 << 10  # bytes, from which on it is quicker to go past the page cache
_CHUNK = 1 << 20  # bytes that are read at a time
_TRIES = 16  # places where a meta may begin


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
        self._digest, self._payload = blob_hasher(), 0
        self._tail.start(self.size + HEAD.size)

    def add(self, piece: Buffer) -> None:
        """The next bytes of the payload; not looked at any more when this returns."""
        self._payload += memoryview(piece).nbytes
        self._put(piece)

    def end(self, frame: Frame, values: Buffer) -> int:
        """What is known of the frame when its blobs are there, and `values`, as JSON: it is durable afterwards. The
        bytes that it takes in the file."""
        packed_values = zstandard.compress(bytes(values), 1)
        if memoryview(values).nbytes > plain_size(len(packed_values)):
            raise SaveError(
                f"step {frame.attempt.step} was not logged: its plain values take {memoryview(values).nbytes} bytes, "
                f"compressed {len(packed_values)}, which readers reject as implausible. Keep such values in a tensor"
            )
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


# -- found again --


@dataclass(frozen=True)
class StoredFrame:
    """A whole frame in a file. `payload`: where it begins and how long it is; `values`: how much of it, at its end, are
    the plain values."""

    path: str
    frame: Frame
    offset: int
    size: int
    payload: tuple[int, int]
    values: int


@dataclass(frozen=True)
class Hole:
    """Bytes of a file that hold no whole frame, from `offset` on. `torn`: they are its end, as a writer leaves it that
    died: nobody was told of what was begun there. `named`: the steps that seem to lie in it, by what can be read of
    them; `after`: of the frame before it."""

    path: str
    offset: int
    problem: str
    torn: bool = False
    named: tuple[Attempt, ...] = ()
    after: Attempt | None = None

    def __str__(self) -> str:
        return f"{os.path.basename(self.path)}, byte {self.offset}: {self.problem}"


def scan(path: str, *, verify: bool = True) -> tuple[list[StoredFrame], list[Hole]]:
    """The whole frames of a file, in their order; and what is wrong with the rest. Each is compared with its digest,
    unless it is only to be listed (`verify=False`).

    OSError if it cannot be read. A newer version is among what is wrong: it is not damage, and not readable here.
    """
    found: list[StoredFrame] = []
    holes: list[Hole] = []
    with reading(path) as file:
        data = _Bytes(file.fileno())
        at, last, hole = 0, None, None
        named: dict[Attempt, None] = {}
        while 0 <= at < data.size:
            try:
                one = _read(path, data, at, last, verify)
            except (CorruptError, FormatError) as error:
                # Until the next whole frame it is all the same damage.
                hole = hole or Hole(path, at, str(error), after=None if last is None else last.attempt)
                named |= dict.fromkeys(_named(data, at))
                at = data.find(MAGIC, at + 1)
                continue
            if hole is not None:
                base = one.frame.base
                if base is not None and (last is None or base > last.attempt):
                    named[base] = None
                holes.append(replace(hole, named=tuple(named)))
            found.append(one)
            last, at, hole = one.frame, at + one.size, None
            named.clear()
        if hole is not None:
            named |= dict.fromkeys(_named_at_the_end(data, hole.offset))
            holes.append(replace(hole, named=tuple(named), torn=_is_torn(data, hole.offset, bool(named))))
    return found, holes


def _named(data: _Bytes, at: int) -> Iterator[Attempt]:
    """The step that a frame is about, as far as it can be read, whether it is what was written or not."""
    with contextlib.suppress(CorruptError, struct.error):
        _, _, _, payload, columns, meta = HEAD.unpack(data.get(at, HEAD.size))
        begin = at + HEAD.size + payload + columns
        if meta <= _ROOM and begin + meta + DIGEST_SIZE <= data.size:
            yield from _attempt_of(data.get(begin, meta))


def _named_at_the_end(data: _Bytes, hole: int) -> Iterator[Attempt]:
    """Of a frame with a damaged head at the end of a file: its meta is found from behind."""
    end = data.size - DIGEST_SIZE
    begin = max(hole + HEAD.size, end - _ROOM)
    if begin >= end:
        return
    with contextlib.suppress(CorruptError):
        tail = data.get(begin, end - begin)
        place = len(tail)
        for _ in range(_TRIES):
            place = tail.rfind(zstandard.FRAME_HEADER, 0, place)
            if place < 0:
                return
            if found := list(_attempt_of(tail[place:])):
                yield from found
                return


def _attempt_of(meta: bytes) -> Iterator[Attempt]:
    """Of a meta that is there as a whole. Nothing if it is none, or if no restore goes to that step by itself."""
    with contextlib.suppress(CorruptError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        said = json.loads(unzip(meta, MAX_META))
        if said["finite"] is not False:
            yield Attempt.parse(said["attempt"])


def _is_torn(data: _Bytes, at: int, named: bool) -> bool:
    """Whether what begins here, and no whole frame follows, is what a writer leaves that died with it, or lost power:
    its head is not written yet, or not all of it came to the disk."""
    with contextlib.suppress(CorruptError):
        if data.size - at < HEAD.size:
            return True
        head = data.get(at, HEAD.size)
        if not any(head):
            return True
        magic, version, predictor, payload, columns, meta = HEAD.unpack(head)
        cut_off = at + HEAD.size + payload + columns + meta + DIGEST_SIZE > data.size
        return not named and cut_off and (magic, version, predictor) == (MAGIC, VERSION, PREDICTOR)
    return True


class _Bytes:
    """A file that may change while it is looked at. Read and not mapped: where it was cut off meanwhile, or the disk
    fails, memory that is mapped would end the process."""

    def __init__(self, fd: int) -> None:
        self._fd, self.size = fd, os.fstat(fd).st_size

    def pieces(self, at: int, size: int) -> Iterator[bytes]:
        end = at + size
        while at < end:
            found = os.pread(self._fd, min(_CHUNK, end - at), at)
            if not found:
                raise CorruptError(f"cut off at byte {at}")
            yield found
            at += len(found)

    def get(self, at: int, size: int) -> bytes:
        return b"".join(self.pieces(at, size))

    def find(self, what: bytes, at: int) -> int:
        """Where it is next; -1 if it is not there any more."""
        tail = b""
        while found := os.pread(self._fd, _CHUNK, at):
            if (place := (tail + found).find(what)) >= 0:
                return at - len(tail) + place
            at += len(found)
            tail = (tail + found)[-len(what) + 1 :]
        return -1


def values_of(stored: StoredFrame, data: Buffer) -> bytes:
    """The plain values of a frame, as JSON; `data`: those bytes of the file that hold them."""
    try:
        return unzip(bytes(data), MAX_VALUES)
    except CorruptError as error:
        raise CorruptError(f"the plain values of step {stored.frame.attempt.step} are damaged: {error}") from None


def _read(path: str, data: _Bytes, at: int, last: Frame | None, verify: bool) -> StoredFrame:
    left = data.size - at
    if left < HEAD.size + DIGEST_SIZE:
        raise CorruptError(f"{left} bytes are no frame")
    head = data.get(at, HEAD.size)
    magic, version, predictor, payload, columns, meta = HEAD.unpack(head)
    if magic != MAGIC:
        raise CorruptError("no frame begins here")
    if version != VERSION or predictor != PREDICTOR:
        raise FormatError(
            f"a frame of version {version}.{predictor}, and this reads {VERSION}.{PREDICTOR}: upgrade with `pip install"
            " -U everystep`"
        )
    size = HEAD.size + meta + columns + payload + DIGEST_SIZE
    if meta > MAX_META or columns > MAX_COLUMNS or size > left:
        raise CorruptError(f"a frame of {size} bytes is cut off after {left}")
    begin = at + HEAD.size
    if verify and not _matches(data, at, head, payload + columns + meta):
        raise CorruptError("a frame does not match its digest")
    table = data.get(begin + payload, columns)
    frame, values = parse(data.get(begin + payload + columns, meta), table, last)
    if int(frame.columns.stored.sum()) + values != payload:
        raise CorruptError("the pieces of a frame do not add up")
    return StoredFrame(path, frame, at, size, (begin, payload), values)


def matches(stored: StoredFrame) -> bool:
    """Whether a frame that was only listed is what its digest says. OSError if it cannot be read."""
    with reading(stored.path) as file:
        data = _Bytes(file.fileno())
        try:
            return _matches(
                data, stored.offset, data.get(stored.offset, HEAD.size), stored.size - HEAD.size - DIGEST_SIZE
            )
        except CorruptError:
            return False


def _matches(data: _Bytes, at: int, head: bytes, size: int) -> bool:
    digest = blob_hasher()
    for piece in data.pieces(at + HEAD.size, size):
        digest.update(piece)
    digest.update(head)
    return digest.digest() == data.get(at + HEAD.size + size, DIGEST_SIZE)


def back(frames: dict[Attempt, StoredFrame], newest: Attempt) -> Iterator[StoredFrame]:
    """The frames that lead to an attempt, backwards, until one that stands alone or whose base is not among them."""
    seen: set[Attempt] = set()
    at: Attempt | None = newest
    while at is not None and at in frames and at not in seen:
        seen.add(at)
        yield frames[at]
        at = frames[at].frame.base
