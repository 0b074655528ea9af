"""Write the bytes of an export to planned files, window by window, within a memory limit.

    for each window: read -> cast -> write -> note;   then: finish -> appear

All files are first written next to the target (`convert.partial`). A repeated export continues after an interruption.
It reuses only windows that the journal lists and whose digest still matches.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.core.format.digest import RangeHasher, chunk_digest, file_digest
from ckpt.core.format.layout import BITS
from ckpt.core.format.manifest import canonical
from ckpt.errors import CorruptError, UsageError
from ckpt.failpoints import point
from ckpt.store import PAGE
from ckpt.tools.convert.cast import cast
from ckpt.tools.convert.output import Literal, OutFile, Output, TensorRun
from ckpt.tools.convert.partial import Workshop, check_target, failed
from ckpt.tools.convert.source import Bytes, Origin, Want

SMALLEST, LARGEST = 1 << 20, 64 << 20  # minimum and maximum bytes of a window
SHARES = 8  # windows that fit into the memory limit: two being written, plus data that was read, cast and cached
SPARE = 48 << 20  # bytes for buffers of reads and for modules that are loaded during the export
LEAST = 256 << 10  # minimum bytes of a window if many files are written together
M_MMAP_THRESHOLD = -3  # constant in glibc's malloc.h
SYNC = 256 << 20  # bytes that are written between two entries of the journal

OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export. `nbytes`: size of the files; `resumed`: bytes that an earlier call had written."""

    nbytes: int
    resumed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FileWindow:
    """A range of a file. It begins and ends at page boundaries, except at the end of the file."""

    file: int
    start: int
    stop: int


def window_for(max_memory: int) -> int:
    """Return the window size for a memory limit of the whole process. Raise UsageError if the limit is too low."""
    here = resident()
    window = (max_memory - here - SPARE) // SHARES // PAGE * PAGE
    if window < SMALLEST:
        least = here + SPARE + SHARES * SMALLEST
        raise UsageError(f"--max-memory is too low: this process needs at least {-(-least >> 20)} MiB")
    give_back_freed()
    return min(window, LARGEST)


def give_back_freed() -> None:
    """Return the memory of freed windows to the system. By default glibc keeps freed memory for each thread, which can
    cost a third more memory."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 256 << 10)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def batches(output: Output, size: int) -> Iterator[list[FileWindow]]:
    """Yield all bytes of all files in batches of `size` bytes. Within each file, the order is that of the bytes."""
    files = output.files
    if not output.side_by_side:
        for number, file in enumerate(files):
            for start in range(0, file.size, size):
                yield [FileWindow(number, start, min(start + size, file.size))]
        return
    each = min(size, max(LEAST, size // max(1, len(files)) // PAGE * PAGE))
    count = max(1, size // each)
    for start in range(0, max((file.size for file in files), default=0), each):
        row = [FileWindow(n, start, min(start + each, f.size)) for n, f in enumerate(files) if start < f.size]
        yield from (row[first : first + count] for first in range(0, len(row), count))


async def export(
    origin: Origin, output: Output, target: Path, *, window: int = LARGEST, on_bytes: OnBytes = None
) -> Exported:
    """Write the files of `output`, and make them appear as `target`. A repeated call continues after an interruption.
    Raise UsageError if the target exists or another export is writing it, FullError if there is too little space (all
    files are then removed), and CorruptError with the tensor's name if the origin is damaged."""
    started = time.monotonic()
    check_target(target, single=output.single)
    for file in output.files:
        file.check()
    with Workshop(target, identity(origin, output)) as workshop:
        workshop.prepare(output)
        mover = _Mover(origin, output, workshop, window, on_bytes)
        try:
            await mover.move()
            await origin.unchanged()
            await asyncio.to_thread(output.finish, workshop.out, mover.sums)
        except OSError as error:
            raise failed(error, workshop) from error
        except CorruptError as error:
            raise CorruptError(f"{error}. {workshop.stays}") from error
        point("export.whole")
        workshop.appear()
    nbytes = sum(size for _, size in written(output, target))
    return Exported(nbytes, min(mover.resumed, nbytes), time.monotonic() - started)


def written(output: Output, target: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the exported files. Staged files are intermediate, so they do not count."""
    if not output.staged:
        return [(file.name or target.name, file.size) for file in output.files]
    if output.single:
        return [(target.name, target.stat().st_size)]
    return [
        (str(path.relative_to(target)), path.stat().st_size) for path in sorted(target.rglob("*")) if path.is_file()
    ]


def identity(origin: Origin, output: Output) -> str:
    """Return a digest that is equal for two exports of the same source to the same files."""
    files = [[f.name, f.size, [_part_id(part) for part in f.parts], f.sums] for f in output.files]
    return file_digest(canonical([origin.identity, output.kind, output.single, files]))


def _part_id(part: Literal | TensorRun) -> list[Any]:
    if isinstance(part, Literal):
        return [part.at, part.size, file_digest(part.data)]
    return [part.at, part.label, part.box, part.dtype]


# -- move bytes --


class _Mover:
    """Reads one batch of windows while the previous one is written."""

    def __init__(self, origin: Origin, output: Output, workshop: Workshop, window: int, on_bytes: OnBytes) -> None:
        self._origin, self._output, self._workshop, self._on_bytes = origin, output, workshop, on_bytes
        self._size = max(PAGE, min(window, -(-sum(f.size for f in output.files) // PAGE) * PAGE))
        self._hashers = [RangeHasher(file.sums) for file in output.files]
        self.sums: dict[str, dict[int, bytes]] = {file.name: {} for file in output.files}
        self._paths = [workshop.path(file, output) for file in output.files]
        self._written: list[tuple[str, int, int, str]] = []
        self.resumed = 0

    async def move(self) -> None:
        buffers = [_pages(self._size), _pages(self._size)]
        writing: asyncio.Task[None] | None = None
        try:
            for number, batch in enumerate(batches(self._output, self._size)):
                views = _carve(buffers[number % 2], batch)
                missing = await asyncio.to_thread(self._missing, views)
                await self._fill(missing)
                if writing is not None:
                    await writing
                self.resumed += sum(len(view) for window, view in views.items() if window not in missing)
                writing = asyncio.create_task(asyncio.to_thread(self._settle, views, missing))
                self._report(sum(map(len, views.values())))
            if writing is not None:
                await writing
        finally:
            if writing is not None:
                await asyncio.wait((writing,))
            await asyncio.to_thread(self._write_journal)

    def _missing(self, views: Mapping[FileWindow, Bytes]) -> dict[FileWindow, Bytes]:
        """Return the windows to write: those that are not in the journal or whose digest differs. Read the other
        windows from the files into their views."""
        return {window: view for window, view in views.items() if not self._there(window, view)}

    def _there(self, window: FileWindow, view: Bytes) -> bool:
        name = self._output.files[window.file].name
        noted = self._workshop.noted.get((name, window.start, window.stop))
        if noted is None:
            return False
        return _read(self._paths[window.file], window.start, view) and chunk_digest(view.data).hex() == noted

    def _settle(self, views: Mapping[FileWindow, Bytes], missing: Mapping[FileWindow, Bytes]) -> None:
        """Compute checksums in the order of the bytes, and write the windows that are missing."""
        for window, view in views.items():
            for (start, _), digest in self._hashers[window.file].feed(window.start, view.data):
                self.sums[self._output.files[window.file].name][start] = digest
        self._write(missing)

    async def _fill(self, views: Mapping[FileWindow, Bytes]) -> None:
        """Read the contents of the windows, and cast them, as planned."""
        wants, casts = list[Want](), list[tuple[Bytes, str, str, Bytes]]()
        for window, view in views.items():
            for part in _parts(self._output.files[window.file], window):
                low, high = max(window.start, part.at), min(window.stop, part.at + part.size)
                place = view[low - window.start : high - window.start]
                if isinstance(part, Literal):
                    place[:] = np.frombuffer(part.data, np.uint8)[low - part.at : high - part.at]
                    continue
                item, spec = BITS[part.dtype] // 8, self._origin.tensors[part.label]
                start, stop = (low - part.at) // item, (high - part.at) // item
                into = place
                if spec.dtype != part.dtype:
                    into = np.empty((stop - start) * BITS[spec.dtype] // 8, np.uint8)
                    casts.append((into, spec.dtype, part.dtype, place))
                wants.append(Want(part.label, part.box, start, stop, into))
        if wants:
            await self._origin.read(wants)
        if casts:
            await asyncio.to_thread(_cast_all, casts)

    def _write(self, views: Mapping[FileWindow, Bytes]) -> None:
        for window, view in views.items():
            point("export.window")
            _write(self._paths[window.file], window.start, view, direct=not self._output.staged)
            name = self._output.files[window.file].name
            self._written.append((name, window.start, window.stop, chunk_digest(view.data).hex()))
        if sum(stop - start for _, start, stop, _ in self._written) >= SYNC:
            self._write_journal()

    def _write_journal(self) -> None:
        names = {name for name, *_ in self._written}
        for file, path in zip(self._output.files, self._paths, strict=True):
            if file.name in names and not self._output.staged:  # staged files are temporary, so not synced
                with _opened(path, os.O_RDONLY) as fd:
                    os.fdatasync(fd)
        if names:
            self._workshop.note(self._written)
        self._written = []

    def _report(self, count: int) -> None:
        if self._on_bytes is not None:
            self._on_bytes(count)


def _carve(buffer: Bytes, batch: Sequence[FileWindow]) -> dict[FileWindow, Bytes]:
    """Split a buffer into page-aligned views, one for each window."""
    views, at = dict[FileWindow, Bytes](), 0
    for window in batch:
        size = window.stop - window.start
        views[window] = buffer[at : at + size]
        at += -(-size // PAGE) * PAGE
    return views


def _cast_all(casts: Sequence[tuple[Bytes, str, str, Bytes]]) -> None:
    for raw, dtype, to, target in casts:
        cast(raw, dtype, to, target)


def _parts(file: OutFile, window: FileWindow) -> Iterator[Literal | TensorRun]:
    """Yield the parts of a file that overlap a window."""
    first = max(0, bisect_right(file.parts, window.start, key=lambda part: part.at) - 1)
    for part in file.parts[first:]:
        if part.at >= window.stop:
            return
        if part.size and part.at + part.size > window.start:
            yield part


def _pages(size: int) -> Bytes:
    """Return page-aligned memory, because direct I/O requires it."""
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _write(path: Path, at: int, data: Bytes, *, direct: bool) -> None:
    """Write bytes. `direct`: bypass the page cache if possible, because the bytes will not be read again soon."""
    whole = len(data) // PAGE * PAGE if direct else 0
    with contextlib.suppress(OSError), _opened(path, os.O_WRONLY | os.O_DIRECT) as fd:
        _write_all(fd, data[:whole].data, at)
        at, data = at + whole, data[whole:]
    with _opened(path, os.O_WRONLY) as fd:
        _write_all(fd, data.data, at)


def _read(path: Path, at: int, view: Bytes) -> bool:
    """Read bytes of a file into a view. Return False if the file is too short."""
    with path.open("rb") as file:
        file.seek(at)
        return file.readinto(view.data) == len(view)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count
