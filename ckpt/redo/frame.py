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

import json
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
import zstandard

from ckpt.errors import CorruptError
from ckpt.format.columns import I64, ODD
from ckpt.format.digest import DIGEST_SIZE, file_digest
from ckpt.format.layout import BLOB, Layout
from ckpt.format.manifest import Attempt, canonical, plain_size
from ckpt.redo.adam import CoefficientRow, Coefficients

RAW, WHOLE, DELTA, PREDICTED, SAME, DERIVED = range(6)
"""How a blob is stored: as it is; encoded by itself; as the difference to what it was one frame before; as the
difference to what was predicted from that; not at all, since nothing has changed; not at all, since it is the rounding
of another one."""

MAGIC = b"CKPTREDO"
VERSION = 2
MAX_META, MAX_COLUMNS, MAX_VALUES = 256 << 20, 128 << 20, 256 << 20

HEAD = struct.Struct("<8sIIQQQ")  # magic, version, predictor, bytes of payload, columns and meta
_COLUMNS = (("form", "<u1"), ("row", "<i4"), ("master", "<i4"), ("stored", "<u4"))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tensors of a layout, by their numbers, that one parameter's step changes: the fp32 weight, exp_avg, exp_avg_sq
    and the count of steps, -1 if another rank stages that; `group`: whose settings count."""

    weight: int
    mean: int
    square: int
    step: int
    group: int


@dataclass(frozen=True)
class FrameColumns:
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
    columns: FrameColumns
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


_Row = tuple[int, int, int, int, int]


class _Meta(msgspec.Struct):
    """What the meta of a frame says; see `meta_of`."""

    attempt: str
    base: str | None
    form: str
    layout: dict[str, Any] | None
    recipes: list[_Row] | None
    coefficients: list[CoefficientRow]
    time: float
    finite: bool | None
    settled_s: float
    values: Annotated[int, msgspec.Meta(ge=0, le=MAX_VALUES)]


def meta_of(frame: Frame, last: Frame | None, values: int) -> bytes:
    """`last`: the frame before it in its file; `values`: bytes of the plain values."""
    # One that stands alone says everything, so that no damage before it can take it away.
    same = frame.base is not None and last is not None and last.form == frame.form
    meta = {
        "attempt": str(frame.attempt),
        "base": None if frame.base is None else str(frame.base),
        "form": frame.form,
        "layout": None if same else frame.layout.to_json(),
        "recipes": None if same else list(map(astuple, frame.recipes)),
        "coefficients": list(map(astuple, frame.coefficients)),
        "time": frame.time,
        "finite": frame.finite,
        "settled_s": frame.settled_s,
        "values": values,
    }
    return zstandard.compress(json.dumps(meta, separators=(",", ":")).encode(), 1)


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


def parse(texts: bytes, table: bytes, last: Frame | None) -> tuple[Frame, int]:
    """A frame of its meta and columns, and how many bytes its plain values take. `last`: the one before it in its file.

    CorruptError unless redoing it cannot go beyond what is there.
    """
    try:
        meta = msgspec.json.decode(unzip(texts, MAX_META), type=_Meta)
        if last is not None and last.form == meta.form:
            layout, recipes = last.layout, last.recipes
        elif meta.layout is None:
            raise CorruptError("the frame with its layout is missing")
        else:
            layout = Layout.from_json(meta.layout)
            recipes = _checked(layout, meta.recipes or [])
            if _form(layout, recipes) != meta.form:
                raise CorruptError("a frame of another layout than it says")
        frame = Frame(
            Attempt.parse(meta.attempt),
            None if meta.base is None else Attempt.parse(meta.base),
            layout,
            recipes,
            tuple(Coefficients(*row) for row in meta.coefficients),
            _unpack_columns(table, layout.arrangement.blob_starts[-1]),
            meta.time,
            meta.finite,
            meta.settled_s,
        )
    except (msgspec.MsgspecError, *ODD) as error:
        raise CorruptError(f"not a frame: {error!r}") from None
    _check(frame)
    return frame, meta.values


def _form(layout: Layout, recipes: Sequence[Recipe]) -> str:
    return file_digest(canonical([layout.digest, list(map(astuple, recipes))]))


def _checked(layout: Layout, rows: Sequence[_Row]) -> tuple[Recipe, ...]:
    used: set[int] = set()
    for *tensors, step, _ in rows:
        if not all(0 <= i < len(layout.tensors) for i in tensors) or not -1 <= step < len(layout.tensors):
            raise CorruptError("a recipe of tensors that are not there")
        specs = [layout.tensors[i] for i in tensors]
        alike = {t.dtype for t in specs} == {"F32"} and len({t.nbytes for t in specs}) == 1
        if not alike or len(used | {*tensors}) != len(used) + 3:
            raise CorruptError("a recipe of tensors that do not belong together")
        used |= {*tensors}
    return tuple(Recipe(*row) for row in rows)


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


def pack_columns(columns: FrameColumns) -> bytes:
    rows = [getattr(columns, name).astype(dtype).tobytes() for name, dtype in _COLUMNS]
    return zstandard.compress(b"".join([*rows, columns.digest.tobytes()]), 1)


def _unpack_columns(table: bytes, count: int) -> FrameColumns:
    sizes = [np.dtype(dtype).itemsize for _, dtype in _COLUMNS]
    wanted = count * (sum(sizes) + DIGEST_SIZE)
    if wanted > MAX_COLUMNS or len(raw := unzip(table, wanted)) != wanted:
        raise CorruptError(f"a frame whose columns are not those of {count} blobs")
    found, at = dict[str, I64](), 0
    for (name, dtype), size in zip(_COLUMNS, sizes, strict=True):
        found[name] = np.frombuffer(raw, dtype, count, at).astype(np.int64)
        at += size * count
    digest = np.frombuffer(raw, np.uint8, count * DIGEST_SIZE, at).reshape(count, DIGEST_SIZE)
    return FrameColumns(**found, digest=digest)


def unzip(data: bytes, most: int) -> bytes:
    """Decompress a part of a frame. Raises CorruptError if it would be larger than `most`, or than its size allows."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= min(most, plain_size(len(data))):
            raise CorruptError("a part of a frame that is implausibly large")
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a part of a frame does not decompress: {error}") from None
