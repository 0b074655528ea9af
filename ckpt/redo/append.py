"""The redo log of one rank in one folder, written: every step between two checkpoints, as what it changed.

    sealed slot + the slot of the step before -> units -> predict -> encode -> frame, fsynced

Both snapshots are in the ring, so nothing is copied. The first frame of an incarnation, one after a step that was
missed, one of a new layout, and one after which a restore would take longer than `max_restore_s` stand alone. A file
holds the frames between two checkpoints; what is older than the last checkpoint but one is deleted. Runs in the writer.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.checkpoint.incremental import find_masters, kind_of
from ckpt.errors import CorruptError, FullError, SaveError, StoreError
from ckpt.format import codec
from ckpt.format.digest import DIGEST_SIZE, blob_digest
from ckpt.format.layout import Layout
from ckpt.format.manifest import REDO, Attempt, parse_redo, redo_name
from ckpt.format.regular_file import reading
from ckpt.ipc.arena import Arena, Label
from ckpt.redo import adam
from ckpt.redo.adam import Coefficients, Settings
from ckpt.redo.frame import (
    DELTA,
    DERIVED,
    MAGIC,
    PREDICTED,
    RAW,
    SAME,
    WHOLE,
    Appender,
    Columns,
    Frame,
    Recipe,
    scan,
    units,
)
from ckpt.store import folder_of

TAKEN_BACK = ".void"  # behind the name that a log beginning with that step would have
SMALL = 4096  # bytes; a smaller blob that has changed is stored as it is
POOR = 0.6  # of the plain size, from which on a prediction is not worth its time
NEAR = 6  # steps that logs of ranks may be apart: their steps wait for each other, and slots for the log
SHY = 64  # frames at most, for which a parameter that could not be predicted is not tried again
SELF_CHECK = 16  # one of so many predicted units is decoded again, and all of the first such frame
READ_A_SECOND = 1e9  # bytes of a checkpoint, until they are read
DECODED_A_SECOND = 500e6  # bytes by one thread, until it has been measured
WORTH = 0.9  # of the raw bytes, from which on a redo log saves next to nothing


def _parsed(name: str) -> tuple[Attempt, int]:
    return parse_redo(name) or (Attempt(0, 0, ""), -1)


def _at(attempt: Attempt) -> tuple[int, int]:
    return attempt.epoch, attempt.step


def holds_logs(url: str) -> bool:
    """Whether a place has any redo log with a frame in it, sound or not. One whose first frame was never complete holds
    nothing that anybody was told of."""
    root = folder_of(url)
    if root is None or not (root / REDO).is_dir():
        return False
    return any(_has_frames(str(path)) for path in (root / REDO).iterdir() if parse_redo(path.name))


def _has_frames(path: str) -> bool:
    try:
        with reading(path) as file:
            return file.read(len(MAGIC)) == MAGIC or bool(scan(path, verify=False)[0])
    except OSError:
        return True  # whatever it is, it is not for a training that begins anew to pass over


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


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of a step: bytes of the snapshot and of its frame, of optimizer state and weights that a recipe knows
    and of what was predicted of them; `base`: the step that it was applied to, None for a frame that stands alone."""

    raw: int
    stored: int
    known: int
    predicted: int
    base: int | None
    seconds: float


@dataclass
class _Last:
    """The newest frame: what the next one is applied to."""

    sealed: Sealed
    digests: np.ndarray[Any, np.dtype[np.uint8]]
    steps: dict[int, float]  # by recipe


class StepLog:
    """Of one rank. Its methods belong into threads, one at a time.

    `pace`: called in the threads that encode after a while of work, with its seconds; it may sleep.
    """

    def __init__(
        self,
        root: str,
        rank: int,
        world: int,
        *,
        max_restore_s: float,
        threads: int = 1,
        pace: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.folder = os.path.join(root, REDO)
        self.rank, self.world, self.max_restore_s, self.threads, self.pace = rank, world, max_restore_s, threads, pace
        self.frames = 0
        self._file: Appender | None = None
        self._logged: dict[Attempt, float] = {}  # since the last frame that stands alone: seconds to redo each
        self._last: _Last | None = None
        self._recent: list[Attempt] = []  # logged since the last of them that became a checkpoint
        self._checkpoints = 0
        self._begins: deque[tuple[int, int]] = deque(maxlen=2)  # epoch and step, where restores may begin
        self._decoded_a_second = DECODED_A_SECOND
        self._shy: dict[tuple[str, int], tuple[int, int]] = {}  # by layout and recipe: until which frame, how long next

    # -- one step --

    def append(
        self,
        sealed: Sealed,
        recipes: Sequence[Recipe],
        settings: Sequence[Settings | None],
        committed: Container[Attempt] = (),
    ) -> Appended:
        """Log a snapshot; durable when it returns. FullError, StoreError or SaveError: the step is not in the log, and
        the next one stands alone.

        `committed`: what is a checkpoint in this place.
        """
        began = time.monotonic()
        try:
            with _errors(self.folder):
                self._turn(committed)
                if self._file is not None and self._file.gone:
                    self.close()
                    self.forget()
                work = _Work(self, sealed, tuple(recipes), settings, self._base(sealed))
                if work.base is None:
                    self.close()
                file = self._open(sealed.attempt)
                try:
                    stored = work.run(file)
                except BaseException:
                    file.abandon()
                    raise
        except BaseException:
            self._last = None
            raise
        self.frames += 1
        if work.base is None:
            self._logged = {}
            epoch, step = sealed.attempt.epoch, sealed.attempt.step
            near = NEAR if self.world > 1 else 1
            later = not self._begins or (epoch, step) >= (self._begins[-1][0], self._begins[-1][1] + near)
            if later and sealed.label.finite is not False:  # to one that has gone wrong no restore goes by itself
                self._begin_at(epoch, step)
        self._logged[sealed.attempt] = work.settled_s
        if sealed.label.finite is not False:
            self._recent.append(sealed.attempt)
        self._last = _Last(sealed, work.digests, work.steps)
        base = None if work.base is None else work.base.sealed.attempt.step
        raw = sealed.layout.arrangement.data_size
        return Appended(raw, stored, work.known, work.predicted, base, time.monotonic() - began)

    def _base(self, sealed: Sealed) -> _Last | None:
        """The frame before this one, unless a restore by way of it would take too long."""
        last = self._last
        if last is None or last.sealed.layout.digest != sealed.layout.digest or last.sealed.attempt >= sealed.attempt:
            return None
        if not last.sealed.whole:
            return None
        size = sealed.layout.arrangement.data_size
        expected = size / READ_A_SECOND + sum(self._logged.values()) + self.guess_s(size)
        return None if self._logged and expected > self.max_restore_s else last

    def guess_s(self, nbytes: int) -> float:
        """To redo a step of so many bytes."""
        return nbytes / self._decoded_a_second / self.threads

    def learn(self, nbytes: int, seconds: float) -> None:
        """So long it took one thread to decode so much."""
        if seconds > 0 and nbytes > 1 << 20:
            self._decoded_a_second += 0.3 * (nbytes / seconds - self._decoded_a_second)

    def forget(self) -> None:
        """The next frame stands alone."""
        self._last = None

    @property
    def digests(self) -> bytes | None:
        """Of all blobs of the newest frame."""
        return None if self._last is None else self._last.digests.tobytes()

    # -- files --

    def _open(self, attempt: Attempt) -> Appender:
        if self._file is None:
            os.makedirs(self.folder, exist_ok=True)
            path = os.path.join(self.folder, redo_name(attempt, self.rank))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a writer that died with it: what it held is sent again, all of it
            appender = Appender(path)
            try:
                _sync(self.folder)
                _sync(os.path.dirname(self.folder))
            except BaseException:
                appender.close()
                raise
            self._file = appender
        return self._file

    def _turn(self, committed: Container[Attempt]) -> None:
        """If a step that was logged has become a checkpoint, a restore begins there now."""
        newest = next((attempt for attempt in reversed(self._recent) if attempt in committed), None)
        if newest is None:
            return
        self._recent = [attempt for attempt in self._recent if attempt > newest]
        self._logged = {attempt: s for attempt, s in self._logged.items() if attempt > newest}
        self.close()
        self._checkpoints += 1
        self._begin_at(newest.epoch, newest.step + 1)
        if self._checkpoints > 1:
            self._drop_older(newest.epoch)

    def _begin_at(self, epoch: int, step: int) -> None:
        """From this step on, and from the one before it of which the same was said, the log is needed; no further
        back. Each begins a file, and a file ends before the next begins."""
        self._begins.append((epoch, step))
        if len(self._begins) < 2:
            return
        needed = self._begins[0]
        names = os.listdir(self.folder)
        here = sorted(first for first, rank in map(_parsed, names) if rank == self.rank and first.epoch == epoch)
        needless = [
            redo_name(one, self.rank) for one, following in itertools.pairwise(here) if _at(following) <= needed
        ]
        voids = [(name, _parsed(name.removesuffix(TAKEN_BACK))) for name in names if name.endswith(TAKEN_BACK)]
        needless += [name for name, (one, rank) in voids if rank == self.rank and _at(one) < needed]
        for name in needless:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.folder, name))

    def _drop_older(self, epoch: int) -> None:
        """Logs of earlier incarnations, which ranks share among them."""
        for entry in list(os.scandir(self.folder)):
            found = parse_redo(entry.name.removesuffix(TAKEN_BACK))
            if found is not None and found[1] % self.world == self.rank and found[0].epoch < epoch:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- which predictions to try --

    def may_predict(self, layout: Layout, recipe: int) -> bool:
        return self.frames >= self._shy.get((layout.digest, recipe), (0, 1))[0]

    def predicted(self, layout: Layout, recipe: int, share: float) -> None:
        """How much of the plain bytes was left of a prediction."""
        key = layout.digest, recipe
        if share <= POOR:
            self._shy.pop(key, None)
            return
        pause = self._shy.get(key, (0, 1))[1]
        self._shy[key] = self.frames + 1 + pause, min(SHY, 2 * pause)
        if len(self._shy) > 1 << 16:
            self._shy.clear()


@dataclass
class _Unit:
    """What becomes of the blobs of a unit."""

    blobs: tuple[int, ...]
    forms: list[int] = field(default_factory=list)
    pieces: list[bytes | memoryview] = field(default_factory=list)
    predicted: int = 0


class _Work:
    """One frame. The blobs are encoded by several threads and appended in their order, a few at a time."""

    def __init__(
        self,
        log: StepLog,
        sealed: Sealed,
        recipes: tuple[Recipe, ...],
        settings: Sequence[Settings | None],
        base: _Last | None,
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
        columns = Columns(self.forms, self.rows, self.masters, self.stored, self.digests)
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


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _errors(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = FullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(f"the redo log in {folder} cannot be written: {error.strerror or error}") from error
