"""One step of a redo log: what a rank's snapshot became from one step to the next, as bytes in an append-only file.

    frame     head: magic, version, lengths | payload | columns: zstd | meta: zstd of JSON | digest (XXH3-128)
    payload   what is stored of the blobs, in the order of `units`; then the plain values, as zstd
    columns   of each blob: how it is stored, in how many bytes, what it is made from, and the digest of its plain bytes
    meta      attempt, base, layout (if it is another than that of the frame before), coefficients, ...
    digest    of payload, columns, meta, and head

The head is written last, so that a frame need not be in memory as a whole, and none is there before it is complete.
A frame with a base is applied to the snapshot of that attempt; one without is a snapshot by itself. A file is whatever
whole frames it holds: the torn end of a killed writer, or damage in the middle, is passed over by looking for the next
magic. No torch.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard

from ckpt.digest import DIGEST_SIZE
from ckpt.errors import CorruptError, FormatError
from ckpt.events import point
from ckpt.manifest import Attempt
from ckpt.plan import BLOB, Layout
from ckpt.predict import VERSION as PREDICTOR
from ckpt.predict import Coefficients
from ckpt.store import Buffer

RAW, WHOLE, DELTA, PREDICTED, SAME, DERIVED = range(6)
"""How a blob is stored: as it is; encoded by itself; as the difference to what it was one frame before; as the
difference to what was predicted from that; not at all, since nothing has changed; not at all, since it is the rounding
of another one."""

MAGIC = b"CKPTREDO"
VERSION = 1
MAX_META, MAX_COLUMNS, MAX_VALUES = 256 << 20, 1 << 30, 256 << 20
_CHUNK = 1 << 20  # bytes that are gathered for one write

_HEAD = struct.Struct("<8sIIQQQ")  # magic, version, predictor, bytes of payload, columns and meta
_COLUMNS = (("form", "<u1"), ("row", "<i4"), ("master", "<i4"), ("stored", "<u4"))
_TAIL = DIGEST_SIZE

I64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tensors of a layout, by their numbers, that one parameter's step changes: the fp32 weight, exp_avg, exp_avg_sq
    and the count of steps; `group`: whose settings count."""

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


@dataclass(frozen=True)
class Stored:
    """A whole frame in a file. `payload`: where it begins and how long it is; `values`: how much of it, at its end, are
    the plain values."""

    path: str
    frame: Frame
    offset: int
    size: int
    payload: tuple[int, int]
    values: int


class Appender:
    """The end of a file that frames are appended to. One thread at a time."""

    def __init__(self, path: str) -> None:
        """A new file; FileExistsError if there is one."""
        self.path, self.size = path, 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._last: Frame | None = None

    def begin(self) -> None:
        self._digest, self._at, self._waiting, self._room = xxhash.xxh3_128(), self.size + _HEAD.size, list[Buffer](), 0
        self._payload = 0

    def add(self, piece: Buffer) -> None:
        """The next bytes of the payload."""
        self._payload += memoryview(piece).nbytes
        self._put(piece)

    def end(self, frame: Frame, values: Buffer) -> int:
        """What is known of the frame when its blobs are there, and `values`, as JSON: it is durable afterwards. The
        bytes that it takes in the file."""
        packed_values = zstandard.compress(bytes(values), 1)
        self.add(packed_values)
        columns = _pack_columns(frame.columns)
        same = self._last is not None and (self._last.layout, self._last.recipes) == (frame.layout, frame.recipes)
        meta = {
            "attempt": str(frame.attempt),
            "base": None if frame.base is None else str(frame.base),
            "digest": frame.layout.digest,
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
        self._flush()
        self._digest.update(head)
        self._write(self._digest.digest())
        end = self._at
        point("frame.written")
        os.pwrite(self._fd, head, self.size)
        point("frame.headed")
        os.fdatasync(self._fd)
        point("frame.durable")
        taken, self.size, self._last = end - self.size, end, frame
        return taken

    def abandon(self) -> None:
        """What was begun is not wanted any more: the file ends where it did."""
        self._waiting = []
        os.ftruncate(self._fd, self.size)

    def close(self) -> None:
        os.close(self._fd)

    def _put(self, piece: Buffer) -> None:
        self._digest.update(piece)
        self._waiting.append(piece)
        self._room += memoryview(piece).nbytes
        if self._room >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        for piece in self._waiting:
            self._write(piece)
        self._waiting, self._room = [], 0

    def _write(self, piece: Buffer) -> None:
        view = memoryview(piece).cast("B")
        while len(view):
            done = os.pwrite(self._fd, view, self._at)
            self._at += done
            view = view[done:]
            point("frame.writing")


def units(layout: Layout, recipes: Sequence[Recipe]) -> list[tuple[int, ...]]:
    """Blobs in the order in which they are stored and redone: of each recipe exp_avg, exp_avg_sq and weight, piece by
    piece, with the number of the recipe behind them; then the others, one by one."""
    first: dict[int, int] = {}
    for number, blob in enumerate(layout.arrangement.blobs):
        first.setdefault(blob.tensor, number)
    found: list[tuple[int, ...]] = []
    for number, one in enumerate(recipes):
        for k in range(-(-layout.tensors[one.weight].nbytes // BLOB)):
            found.append((first[one.mean] + k, first[one.square] + k, first[one.weight] + k, number))
    taken = {blob for unit in found for blob in unit[:3]}
    return found + [(blob,) for blob in range(len(layout.arrangement.blobs)) if blob not in taken]


def scan(path: str, *, verify: bool = True) -> tuple[list[Stored], list[str]]:
    """The whole frames of a file, in their order; and what is wrong with the rest, in words. Each is compared with its
    digest, unless it is only to be listed (`verify=False`).

    OSError if it cannot be read. A newer version is among what is wrong: it is not damage, and not readable here.
    """
    found: list[Stored] = []
    problems: list[str] = []
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return [], []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at, last = 0, None
            while 0 <= at < size:
                try:
                    one = _read(path, data, at, last, verify)
                except (CorruptError, FormatError) as error:
                    if not problems or at > 0:
                        problems.append(f"{os.path.basename(path)}, byte {at}: {error}")
                    at = data.find(MAGIC, at + 1)
                    continue
                found.append(one)
                last, at = one.frame, at + one.size
    return found, problems


def values_of(stored: Stored, data: Buffer) -> bytes:
    """The plain values of a frame, as JSON; `data`: those bytes of the file that hold them."""
    try:
        reader = zstandard.ZstdDecompressor()
        if zstandard.frame_content_size(data) > MAX_VALUES:
            raise CorruptError("plain values of an impossible size")
        return bytes(reader.decompress(data))
    except zstandard.ZstdError as error:
        raise CorruptError(f"the plain values of step {stored.frame.attempt.step} are damaged: {error}") from None


def _read(path: str, data: mmap.mmap, at: int, last: Frame | None, verify: bool) -> Stored:
    left = len(data) - at
    if left < _HEAD.size + _TAIL:
        raise CorruptError(f"{left} bytes are no frame")
    magic, version, predictor, payload, columns, meta = _HEAD.unpack_from(data, at)
    if magic != MAGIC:
        raise CorruptError("no frame begins here")
    if version != VERSION or predictor != PREDICTOR:
        raise FormatError(f"a frame of version {version}.{predictor}, and this is {VERSION}.{PREDICTOR}")
    size = _HEAD.size + meta + columns + payload + _TAIL
    if meta > MAX_META or columns > MAX_COLUMNS or size > left:
        raise CorruptError(f"a frame of {size} bytes is cut off after {left}")
    begin = at + _HEAD.size
    with memoryview(data) as view:
        with view[begin : at + size - _TAIL] as body, view[at:begin] as head:
            digest = xxhash.xxh3_128(body if verify else b"")
            digest.update(head)
        claimed = bytes(view[at + size - _TAIL : at + size])
        table = bytes(view[begin + payload : begin + payload + columns])
        texts = bytes(view[begin + payload + columns : at + size - _TAIL])
    if verify and digest.digest() != claimed:
        raise CorruptError("a frame does not match its digest")
    frame, values = _parse(texts, table, last)
    if int(frame.columns.stored.sum()) + values != payload:
        raise CorruptError("the pieces of a frame do not add up")
    return Stored(path, frame, at, size, (begin, payload), values)


def _parse(texts: bytes, table: bytes, last: Frame | None) -> tuple[Frame, int]:
    try:
        meta = json.loads(_unzip(texts, MAX_META))
        if meta["layout"] is not None:
            layout = Layout.from_json(meta["layout"])
            recipes = _checked(layout, meta["recipes"])
        elif last is not None:
            layout, recipes = last.layout, last.recipes
        else:
            raise CorruptError("the frame with its layout is missing")
        if layout.digest != meta["digest"]:
            raise CorruptError("a frame of another layout than the one before it")
        coefficients = tuple(map(Coefficients.from_json, meta["coefficients"]))
        base = None if meta["base"] is None else Attempt.parse(meta["base"])
        frame = Frame(
            Attempt.parse(meta["attempt"]),
            base,
            layout,
            recipes,
            coefficients,
            _unpack_columns(table, len(layout.arrangement.blobs)),
            float(meta["time"]),
            {None: None, True: True, False: False}[meta["finite"]],
            float(meta["settled_s"]),
        )
        _check(frame)
        values = meta["values"]
        if type(values) is not int or not 0 <= values <= MAX_VALUES:
            raise CorruptError("plain values of an impossible size")
        return frame, values
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptError(f"not a frame: {error!r}") from None


def _checked(layout: Layout, rows: Any) -> tuple[Recipe, ...]:
    recipes = tuple(Recipe(*row) for row in rows)
    used: set[int] = set()
    for row in rows:
        if not all(type(i) is int and 0 <= i < len(layout.tensors) for i in row[:4]) or type(row[4]) is not int:
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
    problems = (
        (c.form > DERIVED).any(),
        (c.row >= len(frame.coefficients)).any() or ((c.form == PREDICTED) & (c.row < 0)).any(),
        (c.stored > lengths + 64).any() or (c.stored[(c.form == SAME) | (c.form == DERIVED)] != 0).any(),
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
    raw = _unzip(table, MAX_COLUMNS)
    sizes = [np.dtype(dtype).itemsize for _, dtype in _COLUMNS]
    if len(raw) != count * (sum(sizes) + DIGEST_SIZE):
        raise CorruptError(f"a frame of {len(raw)} bytes of columns for {count} blobs")
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


def chain(frames: Sequence[Stored]) -> dict[Attempt, Stored]:
    """By attempt; what was written twice is the same."""
    return {one.frame.attempt: one for one in frames}


def back(frames: dict[Attempt, Stored], newest: Attempt) -> Iterator[Stored]:
    """The frames that lead to an attempt, backwards, until one that stands alone or whose base is not among them."""
    seen: set[Attempt] = set()
    at: Attempt | None = newest
    while at is not None and at in frames and at not in seen:
        seen.add(at)
        yield frames[at]
        at = frames[at].frame.base
