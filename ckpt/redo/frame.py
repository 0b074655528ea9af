"""One step of a redo log: what a rank's snapshot became from one step to the next, as bytes in an append-only file.

    frame     head: magic, version, lengths | payload | columns: zstd | meta: zstd of JSON | digest (XXH3-128)
    payload   what is stored of the blobs, in the order of `units`; then the plain values, as zstd
    columns   of each blob: how it is stored, in how many bytes, what it is made from, and the digest of its plain bytes
    meta      attempt, base, layout and recipes (if it stands alone, or they are not those of the frame before), ...
    digest    of payload, columns, meta, and head

The head is written last, so that a frame need not be in memory as a whole, and none is there before it is complete.
A frame with a base is applied to the snapshot of that attempt; one without is a snapshot by itself. A file is whatever
whole frames it holds: the torn end of a killed writer, or damage in the middle, is passed over by looking for the next
magic. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
import zstandard

from ckpt.errors import CorruptError, FormatError
from ckpt.events import point
from ckpt.format.digest import DIGEST_SIZE, file_digest
from ckpt.format.layout import BLOB, Layout
from ckpt.format.manifest import Attempt, canonical
from ckpt.format.regular_file import reading
from ckpt.redo.adam import VERSION as PREDICTOR
from ckpt.redo.adam import Coefficients
from ckpt.store import PAGE, Buffer

RAW, WHOLE, DELTA, PREDICTED, SAME, DERIVED = range(6)
"""How a blob is stored: as it is; encoded by itself; as the difference to what it was one frame before; as the
difference to what was predicted from that; not at all, since nothing has changed; not at all, since it is the rounding
of another one."""

MAGIC = b"CKPTREDO"
VERSION = 1
MAX_META, MAX_COLUMNS, MAX_VALUES = 256 << 20, 128 << 20, 256 << 20
_CHUNK = 1 << 20  # bytes that are read at a time
_ROOM = 4 << 20  # bytes that are gathered for one write
_TRIES = 16  # places where a meta may begin
_WORTH = 256 << 10  # bytes, from which on it is quicker to go past the page cache

_HEAD = struct.Struct("<8sIIQQQ")  # magic, version, predictor, bytes of payload, columns and meta
_COLUMNS = (("form", "<u1"), ("row", "<i4"), ("master", "<i4"), ("stored", "<u4"))
_TAIL = DIGEST_SIZE

I64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tensors of a layout, by their numbers, that one parameter's step changes: the fp32 weight, exp_avg, exp_avg_sq
    and the count of steps, -1 if another rank stages that; `group`: whose settings count."""

    weight: int
    mean: int
    square: int
    step: int
    group: int

    def to_json(self) -> list[int]:
        return [self.weight, self.mean, self.square, self.step, self.group]


@dataclass(frozen=True)
class Columns:
    """Of each blob of the layout. `row`: of `coefficients`, -1 for none; `master`: the first of the fp32 blobs that it
    is the rounding of, -1 for none; `digest`: 16 bytes each."""

    form: I64
    row: I64
    master: I64
    stored: I64
    digest: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Frame:
    """One step of one rank. `base`: what it is applied to, None if it stands alone; `settled_s`: how long redoing it
    takes, as its writer guessed; `time`: when it was staged, in seconds since 1970."""

    attempt: Attempt
    base: Attempt | None
    layout: Layout
    recipes: tuple[Recipe, ...]
    coefficients: tuple[Coefficients, ...]
    columns: Columns
    time: float
    finite: bool | None = None
    settled_s: float = 0.0

    @property
    def rank(self) -> int:
        return self.layout.rank

    @cached_property
    def form(self) -> str:
        """Of layout and recipes: what is to be known of them to read the frame."""
        return _form(self.layout, self.recipes)


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
        self._tail.start(self.size + _HEAD.size)

    def add(self, piece: Buffer) -> None:
        """The next bytes of the payload; not looked at any more when this returns."""
        self._payload += memoryview(piece).nbytes
        self._put(piece)

    def end(self, frame: Frame, values: Buffer) -> int:
        """What is known of the frame when its blobs are there, and `values`, as JSON: it is durable afterwards. The
        bytes that it takes in the file."""
        packed_values = zstandard.compress(bytes(values), 1)
        self.add(packed_values)
        columns = _pack_columns(frame.columns)
        # One that stands alone says everything, so that no damage before it can take it away.
        same = frame.base is not None and self._last is not None and self._last.form == frame.form
        meta = {
            "attempt": str(frame.attempt),
            "base": None if frame.base is None else str(frame.base),
            "form": frame.form,
            "layout": None if same else frame.layout.to_json(),
            "recipes": None if same else [one.to_json() for one in frame.recipes],
            "coefficients": [one.to_json() for one in frame.coefficients],
            "time": frame.time,
            "finite": frame.finite,
            "settled_s": frame.settled_s,
            "values": len(packed_values),
        }
        text = zstandard.compress(json.dumps(meta, separators=(",", ":")).encode(), 1)
        self._put(columns)
        self._put(text)
        head = _HEAD.pack(MAGIC, VERSION, PREDICTOR, self._payload, len(columns), len(text))
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


def units(layout: Layout, recipes: Sequence[Recipe]) -> list[tuple[int, ...]]:
    """Blobs in the order in which they are stored and redone: of each recipe exp_avg, exp_avg_sq and weight, piece by
    piece, with the number of the recipe behind them; then the others, one by one."""
    first = layout.arrangement.first_blob
    found: list[tuple[int, ...]] = []
    for number, one in enumerate(recipes):
        for k in range(-(-layout.tensors[one.weight].nbytes // BLOB)):
            found.append((first[one.mean] + k, first[one.square] + k, first[one.weight] + k, number))
    taken = {blob for unit in found for blob in unit[:3]}
    return found + [(blob,) for blob in range(len(layout.arrangement.blobs)) if blob not in taken]


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
        _, _, _, payload, columns, meta = _HEAD.unpack(data.get(at, _HEAD.size))
        begin = at + _HEAD.size + payload + columns
        if meta <= _ROOM and begin + meta + _TAIL <= data.size:
            yield from _attempt_of(data.get(begin, meta))


def _named_at_the_end(data: _Bytes, hole: int) -> Iterator[Attempt]:
    """Of a frame with a damaged head at the end of a file: its meta is found from behind."""
    end = data.size - _TAIL
    begin = max(hole + _HEAD.size, end - _ROOM)
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
        said = json.loads(_unzip(meta, MAX_META))
        if said["finite"] is not False:
            yield Attempt.parse(said["attempt"])


def _is_torn(data: _Bytes, at: int, named: bool) -> bool:
    """Whether what begins here, and no whole frame follows, is what a writer leaves that died with it, or lost power:
    its head is not written yet, or not all of it came to the disk."""
    with contextlib.suppress(CorruptError):
        if data.size - at < _HEAD.size:
            return True
        head = data.get(at, _HEAD.size)
        if not any(head):
            return True
        magic, version, predictor, payload, columns, meta = _HEAD.unpack(head)
        cut_off = at + _HEAD.size + payload + columns + meta + _TAIL > data.size
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
        reader = zstandard.ZstdDecompressor()
        if zstandard.frame_content_size(data) > MAX_VALUES:
            raise CorruptError("plain values of an impossible size")
        return bytes(reader.decompress(data))
    except zstandard.ZstdError as error:
        raise CorruptError(f"the plain values of step {stored.frame.attempt.step} are damaged: {error}") from None


def _read(path: str, data: _Bytes, at: int, last: Frame | None, verify: bool) -> StoredFrame:
    left = data.size - at
    if left < _HEAD.size + _TAIL:
        raise CorruptError(f"{left} bytes are no frame")
    head = data.get(at, _HEAD.size)
    magic, version, predictor, payload, columns, meta = _HEAD.unpack(head)
    if magic != MAGIC:
        raise CorruptError("no frame begins here")
    if version != VERSION or predictor != PREDICTOR:
        raise FormatError(
            f"a frame of version {version}.{predictor}, and this reads {VERSION}.{PREDICTOR}: upgrade with `pip install"
            " -U everystep`"
        )
    size = _HEAD.size + meta + columns + payload + _TAIL
    if meta > MAX_META or columns > MAX_COLUMNS or size > left:
        raise CorruptError(f"a frame of {size} bytes is cut off after {left}")
    begin = at + _HEAD.size
    if verify and not _matches(data, at, head, payload + columns + meta):
        raise CorruptError("a frame does not match its digest")
    table = data.get(begin + payload, columns)
    frame, values = _parse(data.get(begin + payload + columns, meta), table, last)
    if int(frame.columns.stored.sum()) + values != payload:
        raise CorruptError("the pieces of a frame do not add up")
    return StoredFrame(path, frame, at, size, (begin, payload), values)


def matches(stored: StoredFrame) -> bool:
    """Whether a frame that was only listed is what its digest says. OSError if it cannot be read."""
    with reading(stored.path) as file:
        data = _Bytes(file.fileno())
        try:
            return _matches(data, stored.offset, data.get(stored.offset, _HEAD.size), stored.size - _HEAD.size - _TAIL)
        except CorruptError:
            return False


def _matches(data: _Bytes, at: int, head: bytes, size: int) -> bool:
    digest = xxhash.xxh3_128()
    for piece in data.pieces(at + _HEAD.size, size):
        digest.update(piece)
    digest.update(head)
    return digest.digest() == data.get(at + _HEAD.size + size, _TAIL)


def _parse(texts: bytes, table: bytes, last: Frame | None) -> tuple[Frame, int]:
    try:
        meta = json.loads(_unzip(texts, MAX_META))
        if last is not None and last.form == meta["form"]:
            layout, recipes = last.layout, last.recipes
        elif meta["layout"] is None:
            raise CorruptError("the frame with its layout is missing")
        else:
            layout = Layout.from_json(meta["layout"])
            recipes = _checked(layout, meta["recipes"])
            if _form(layout, recipes) != meta["form"]:
                raise CorruptError("a frame of another layout than it says")
        coefficients = tuple(map(Coefficients.from_json, meta["coefficients"]))
        base = None if meta["base"] is None else Attempt.parse(meta["base"])
        frame = Frame(
            Attempt.parse(meta["attempt"]),
            base,
            layout,
            recipes,
            coefficients,
            _unpack_columns(table, sum(-(-size // BLOB) for size in layout.sizes)),
            _number(meta["time"]),
            {None: None, True: True, False: False}[meta["finite"]],
            _number(meta["settled_s"]),
        )
        _check(frame)
        values = meta["values"]
        if type(values) is not int or not 0 <= values <= MAX_VALUES:
            raise CorruptError("plain values of an impossible size")
        return frame, values
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CorruptError(f"not a frame: {error!r}") from None


def _form(layout: Layout, recipes: Sequence[Recipe]) -> str:
    return file_digest(canonical([layout.digest, [one.to_json() for one in recipes]]))


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise CorruptError("a time that is none")
    return float(value)


def _checked(layout: Layout, rows: Any) -> tuple[Recipe, ...]:
    recipes = tuple(Recipe(*row) for row in rows)
    used: set[int] = set()
    for row in rows:
        numbers = zip(row, (0, 0, 0, -1), strict=False)
        if not all(type(i) is int and low <= i < len(layout.tensors) for i, low in numbers) or type(row[4]) is not int:
            raise CorruptError("a recipe of tensors that are not there")
        tensors = [layout.tensors[i] for i in row[:3]]
        alike = {t.dtype for t in tensors} == {"F32"} and len({t.nbytes for t in tensors}) == 1
        if not alike or len(used | {*row[:3]}) != len(used) + 3:
            raise CorruptError("a recipe of tensors that do not belong together")
        used |= {*row[:3]}
    return recipes


def _check(frame: Frame) -> None:
    """That redoing it cannot go beyond what is there."""
    blobs, c = frame.layout.arrangement.blobs, frame.columns
    lengths = np.array([blob.length for blob in blobs], np.int64)
    tensors = np.array([blob.tensor for blob in blobs], np.int64)
    foreseen = [i for one in frame.recipes for i in (one.square, one.weight)]
    problems = (
        (c.form > DERIVED).any(),
        (c.row >= len(frame.coefficients)).any() or ((c.form == PREDICTED) & (c.row < 0)).any(),
        not np.isin(tensors[c.form == PREDICTED], foreseen).all(),
        (c.stored > lengths).any() or (c.stored[(c.form == SAME) | (c.form == DERIVED)] != 0).any(),
        (c.stored[c.form == RAW] != lengths[c.form == RAW]).any(),
        ((c.form == DERIVED) & ((c.master < 0) | (c.master >= len(blobs)))).any(),
        frame.base is None and np.isin(c.form, (DELTA, PREDICTED, SAME)).any(),
    )
    if any(problems):
        raise CorruptError("a frame stores its blobs in an impossible way")


def _pack_columns(columns: Columns) -> bytes:
    rows = [getattr(columns, name).astype(dtype).tobytes() for name, dtype in _COLUMNS]
    return zstandard.compress(b"".join([*rows, columns.digest.tobytes()]), 1)


def _unpack_columns(table: bytes, count: int) -> Columns:
    sizes = [np.dtype(dtype).itemsize for _, dtype in _COLUMNS]
    wanted = count * (sum(sizes) + DIGEST_SIZE)
    if wanted > MAX_COLUMNS or len(raw := _unzip(table, wanted)) != wanted:
        raise CorruptError(f"a frame whose columns are not those of {count} blobs")
    found, at = dict[str, I64](), 0
    for (name, dtype), size in zip(_COLUMNS, sizes, strict=True):
        found[name] = np.frombuffer(raw, dtype, count, at).astype(np.int64)
        at += size * count
    digest = np.frombuffer(raw, np.uint8, count * DIGEST_SIZE, at).reshape(count, DIGEST_SIZE)
    return Columns(**found, digest=digest)


def _unzip(data: bytes, most: int) -> bytes:
    try:
        if zstandard.frame_content_size(data) > most:
            raise CorruptError("a part of a frame that is implausibly large")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a part of a frame does not decompress: {error}") from None


def back(frames: dict[Attempt, StoredFrame], newest: Attempt) -> Iterator[StoredFrame]:
    """The frames that lead to an attempt, backwards, until one that stands alone or whose base is not among them."""
    seen: set[Attempt] = set()
    at: Attempt | None = newest
    while at is not None and at in frames and at not in seen:
        seen.add(at)
        yield frames[at]
        at = frames[at].frame.base
