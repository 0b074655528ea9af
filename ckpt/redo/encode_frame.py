"""One frame of a redo log, made of two snapshots in memory: of each blob what was not foreseen, or has changed."""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ckpt.checkpoint.incremental import find_masters, kind_of
from ckpt.errors import CorruptError, SaveError
from ckpt.format import codec
from ckpt.format.columns import Bytes
from ckpt.format.digest import DIGEST_SIZE, blob_digest
from ckpt.format.layout import Layout
from ckpt.format.manifest import Attempt
from ckpt.ipc.arena import Arena, Label
from ckpt.redo import adam
from ckpt.redo.adam import AdamSettings, Coefficients
from ckpt.redo.frame import DELTA, DERIVED, PREDICTED, RAW, SAME, WHOLE, Frame, FrameColumns, Recipe, units
from ckpt.redo.frame_file import Appender

if TYPE_CHECKING:
    from ckpt.redo.append import StepLog

SMALL = 4096  # bytes; a smaller blob that has changed is stored as it is
POOR = 0.6  # of the plain size, from which on a prediction is not worth its time
SELF_CHECK = 16  # one of so many predicted units is decoded again, and all of the first such frame


@dataclass(frozen=True)
class Sealed:
    """A snapshot in the ring."""

    arena: Arena
    slot: int
    label: Label
    layout: Layout

    @property
    def attempt(self) -> Attempt:
        assert self.label.attempt is not None
        return self.label.attempt

    @property
    def data(self) -> memoryview:
        return self.arena.data(self.slot, self.label.data_size)

    def check(self) -> None:
        if not self.whole:
            raise SaveError(f"step {self.attempt.step} was overwritten in memory while it was logged")

    @property
    def whole(self) -> bool:
        """Whether it is still there."""
        with contextlib.suppress(CorruptError):
            return self.arena.label(self.slot) == self.label
        return False


@dataclass
class Logged:
    """The newest frame: what the next one is applied to."""

    sealed: Sealed
    digests: Bytes
    steps: dict[int, float]  # by recipe


@dataclass
class _Unit:
    """What becomes of the blobs of a unit."""

    blobs: tuple[int, ...]
    forms: list[int] = field(default_factory=list)
    pieces: list[bytes | memoryview] = field(default_factory=list)
    predicted: int = 0


class FrameEncoder:
    """One frame. The blobs are encoded by several threads and appended in their order, a few at a time."""

    def __init__(
        self,
        log: StepLog,
        sealed: Sealed,
        recipes: tuple[Recipe, ...],
        settings: Sequence[AdamSettings | None],
        base: Logged | None,
    ) -> None:
        self.log, self.sealed, self.recipes, self.settings, self.base = log, sealed, recipes, settings, base
        self.layout = sealed.layout
        self.blobs = self.layout.arrangement.blobs
        self.now = sealed.data
        self.old = None if base is None else base.sealed.data
        self.digests = np.zeros((len(self.blobs), DIGEST_SIZE), np.uint8)
        self.forms = np.zeros(len(self.blobs), np.int64)
        self.stored = np.zeros(len(self.blobs), np.int64)
        self.rows = np.full(len(self.blobs), -1, np.int64)
        self.masters = find_masters(self.layout, self._peek)
        self.coefficients: dict[Coefficients, int] = {}
        self.row_of: list[int] = []  # of each recipe
        self.of_row: list[Coefficients] = []
        self.steps: dict[int, float] = {}
        self.known = self.predicted = 0
        self.settled_s = log.guess_s(self.layout.arrangement.data_size)
        self._kinds: dict[str, int] = {}

    def run(self, appender: Appender) -> int:
        self._prepare()
        appender.begin()
        with ThreadPoolExecutor(self.log.threads, "ckpt-redo") as pool:
            for unit in self._encoded(pool):
                for blob, form, piece in zip(unit.blobs, unit.forms, unit.pieces, strict=True):
                    self.forms[blob], self.stored[blob] = form, len(piece)
                    if len(piece):
                        appender.add(piece)
                self.predicted += unit.predicted
        values = bytes(self.sealed.arena.values(self.sealed.slot, self.sealed.label))
        self.sealed.check()  # nothing is read from memory any more
        if self.base is not None:
            self.base.sealed.check()
        columns = FrameColumns(self.forms, self.rows, self.masters, self.stored, self.digests)
        frame = Frame(
            self.sealed.attempt,
            None if self.base is None else self.base.sealed.attempt,
            self.layout,
            self.recipes,
            tuple(self.coefficients),
            columns,
            self.sealed.label.time,
            self.sealed.label.finite,
            self.settled_s,
        )
        return appender.end(frame, values)

    def _prepare(self) -> None:
        """Which coefficients each recipe's prediction takes."""
        offsets = self.layout.arrangement.offsets
        for number, one in enumerate(self.recipes):
            row, spec = -1, None if one.step < 0 else self.layout.tensors[one.step]
            settings = self.settings[one.group] if 0 <= one.group < len(self.settings) else None
            step = None if settings is None else settings.step
            if spec is not None and (spec.dtype, spec.nbytes) == ("F32", 4):
                step = struct.unpack_from("<f", self.now, offsets[one.step])[0]
            if step is not None:
                self.steps[number] = step
                before = None if self.base is None else self.base.steps.get(number)
                if before is not None and step == before + 1 and settings is not None:
                    found = Coefficients.of(settings, step)
                    row = -1 if found is None else self.coefficients.setdefault(found, len(self.coefficients))
            self.row_of.append(row)
            if self.base is not None:
                self.known += 2 * self.layout.tensors[one.weight].nbytes
        self.of_row = list(self.coefficients)

    def _encoded(self, pool: ThreadPoolExecutor) -> Iterator[_Unit]:
        window = 2 * self.log.threads + 2
        waiting: deque[Future[_Unit]] = deque()
        for number, unit in enumerate(units(self.layout, self.recipes)):
            waiting.append(pool.submit(self._encode, number, unit))
            if len(waiting) >= window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    # -- in threads --

    def _peek(self, blob: int) -> memoryview:
        one = self.blobs[blob]
        return self.now[one.offset : one.offset + one.length]

    def _before(self, blob: int) -> memoryview | None:
        one = self.blobs[blob]
        return None if self.old is None else self.old[one.offset : one.offset + one.length]

    def _encode(self, number: int, unit: tuple[int, ...]) -> _Unit:
        began = time.monotonic()
        if len(unit) == 1:
            made = _Unit(unit)
            self._add(made, unit[0], self._by_itself(unit[0]))
        else:
            made = self._triple(number, *unit)
        self.log.pace(time.monotonic() - began)
        return made

    def _add(self, made: _Unit, blob: int, encoded: tuple[int, bytes | memoryview]) -> None:
        made.forms.append(encoded[0])
        made.pieces.append(encoded[1])

    def _same(self, blob: int) -> bool:
        """Notes the digest of a blob, and says whether it is what it was."""
        digest = np.frombuffer(blob_digest(self._peek(blob)), np.uint8)
        self.digests[blob] = digest
        return self.base is not None and bool((self.base.digests[blob] == digest).all())

    def _triple(self, number: int, mean: int, square: int, weight: int, recipe: int) -> _Unit:
        made, row = _Unit((mean, square, weight)), self.row_of[recipe]
        self._add(made, mean, self._by_itself(mean))
        tries = row >= 0 and self.log.may_predict(self.layout, recipe) and adam.is_exact()
        for blob in (square, weight):
            if self._same(blob):
                self._add(made, blob, (SAME, b""))
                made.predicted += self.blobs[blob].length
            elif tries and (found := self._predict(number, blob, mean, square, weight, row)) is not None:
                share = len(found) / self.blobs[blob].length
                self.log.predicted(self.layout, recipe, share)
                tries = share <= POOR
                if tries:
                    self.rows[blob] = row
                    made.predicted += self.blobs[blob].length
                    self._add(made, blob, (PREDICTED, found))
                else:
                    self._add(made, blob, self._chosen(blob))
            else:
                self._add(made, blob, self._chosen(blob))
        return made

    def _predict(self, number: int, blob: int, mean: int, square: int, weight: int, row: int) -> bytes | None:
        coefficients, plain = self.of_row[row], self._peek(blob)
        guess = foresee(blob == square, self._before, self._peek, mean, square, weight, coefficients)
        found = codec.encode(codec.DELTA, plain, 4, guess)  # signs are predicted too
        if number % SELF_CHECK == 0 or self.log.frames < 2:
            began, back = time.perf_counter(), memoryview(bytearray(len(plain)))
            again = foresee(blob == square, self._before, self._peek, mean, square, weight, coefficients)
            codec.decode(codec.DELTA, found, len(plain), again, back)
            self.log.learn(len(plain), time.perf_counter() - began)
            if blob_digest(back) != self.digests[blob].tobytes():
                return None
        return found if len(found) < len(plain) else None

    def _by_itself(self, blob: int) -> tuple[int, bytes | memoryview]:
        return (SAME, b"") if self._same(blob) else self._chosen(blob)

    def _chosen(self, blob: int) -> tuple[int, bytes | memoryview]:
        """Encoded without a prediction, as what is smallest for blobs of its kind; samples of one of them tell."""
        plain, tensor = self._peek(blob), self.layout.tensors[self.blobs[blob].tensor]
        master = int(self.masters[blob])
        if master >= 0 and codec.derives(self._masters(master, 2 * len(plain)), plain):
            return DERIVED, b""
        if len(plain) < SMALL:
            return RAW, plain
        kind, before, word = kind_of(tensor), self._before(blob), codec.word_of(tensor.dtype)
        form = self._kinds.get(kind)
        if form is None:
            form = self._kinds[kind] = self._choose(tensor.dtype, plain, before, word)
        if form == RAW:
            return RAW, plain
        if form == DELTA:
            found = codec.encode(codec.delta_codec(tensor.dtype), plain, word, before)
        else:
            found = codec.encode(codec.whole_codec(tensor.dtype), plain, word)
        return (form, found) if len(found) < len(plain) else (RAW, plain)

    def _choose(self, dtype: str, plain: memoryview, before: memoryview | None, word: int) -> int:
        whole = codec.estimate(codec.whole_codec(dtype), plain, word)
        delta = 1.0 if before is None else codec.estimate(codec.delta_codec(dtype), plain, word, before)
        if min(whole, delta) > 0.97:
            return RAW
        return DELTA if delta < whole else WHOLE

    def _masters(self, first: int, length: int) -> memoryview:
        begin = self.blobs[first].offset
        return self.now[begin : begin + length]


def foresee(
    is_square: bool,
    before: Callable[[int], memoryview | None],
    now: Callable[[int], memoryview],
    mean: int,
    square: int,
    weight: int,
    coefficients: Coefficients,
) -> memoryview:
    """The prediction of a blob of exp_avg_sq, or of weights: as it is made for writing, and for redoing."""

    def floats(data: memoryview | None) -> adam.Floats:
        assert data is not None
        return np.frombuffer(data, np.float32)

    found = np.empty(len(now(mean)) // 4, np.float32)
    if is_square:
        adam.second_moment(floats(before(mean)), floats(now(mean)), floats(before(square)), coefficients, found)
    else:
        adam.weights(floats(before(weight)), floats(now(mean)), floats(now(square)), coefficients, found)
    return found.data.cast("B")
