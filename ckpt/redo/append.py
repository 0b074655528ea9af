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
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from ckpt.errors import FullError, StoreError
from ckpt.format.layout import Layout
from ckpt.format.manifest import REDO, Attempt, parse_redo, redo_name
from ckpt.format.regular_file import reading
from ckpt.redo import has_logs
from ckpt.redo.adam import AdamSettings
from ckpt.redo.encode_frame import POOR, FrameEncoder, Logged, Sealed
from ckpt.redo.frame import MAGIC, Recipe
from ckpt.redo.frame_file import Appender, scan
from ckpt.store import folder_of

TAKEN_BACK = ".void"  # behind the name that a log beginning with that step would have
NEAR = 6  # steps that logs of ranks may be apart: their steps wait for each other, and slots for the log
SHY = 64  # frames at most, for which a parameter that could not be predicted is not tried again
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
    if root is None or not has_logs(url):
        return False
    return any(_has_frames(str(path)) for path in (root / REDO).iterdir() if parse_redo(path.name))


def _has_frames(path: str) -> bool:
    try:
        with reading(path) as file:
            return file.read(len(MAGIC)) == MAGIC or bool(scan(path, verify=False)[0])
    except OSError:
        return True  # whatever it is, it is not for a training that begins anew to pass over


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
        self._last: Logged | None = None
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
        settings: Sequence[AdamSettings | None],
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
                work = FrameEncoder(self, sealed, tuple(recipes), settings, self._base(sealed))
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
        self._note(sealed, work)
        base = None if work.base is None else work.base.sealed.attempt.step
        raw = sealed.layout.arrangement.data_size
        return Appended(raw, stored, work.known, work.predicted, base, time.monotonic() - began)

    def _note(self, sealed: Sealed, work: FrameEncoder) -> None:
        """What the next frames go by."""
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
        self._last = Logged(sealed, work.digests, work.steps)

    def _base(self, sealed: Sealed) -> Logged | None:
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
