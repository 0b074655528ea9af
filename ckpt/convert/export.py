"""Move the bytes of an export to planned files, window by window, within a bound of memory.

    for each window: read -> cast -> write -> note;   then: finish -> appear

All is made in `<target>.partial` beside the target, and appears under its name by one rename, when it is whole and
durable. What has been written is noted in a journal with its digest: an export that was stopped, by whatever, goes on
from there when it is called again, and takes nothing for granted that it does not find as it was noted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import shutil
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from ckpt.convert.cast import cast
from ckpt.convert.output import Literal, OutFile, Output, Run, Sum, Sums
from ckpt.convert.source import Bytes, Origin, Want
from ckpt.errors import CorruptError, FullError, StoreError, UsageError
from ckpt.events import point
from ckpt.format.digest import blob_digest, file_digest
from ckpt.format.layout import BITS
from ckpt.format.manifest import canonical
from ckpt.format.regular_file import open_regular, read_regular
from ckpt.store import PAGE

SMALLEST, LARGEST = 1 << 20, 64 << 20  # bytes of a window
SHARES = 8  # what a window costs in all, in windows: two to write from, what is read, cast, and kept for the next
SPARE = 48 << 20  # bytes for what reading needs at least, and whatever is loaded on the way
LEAST = 256 << 10  # bytes of a window of one of many files
OPEN_FILES = 128
M_MMAP_THRESHOLD = -3  # of malloc.h
SYNC = 256 << 20  # bytes written between two entries of the journal

OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Exported:
    """`nbytes` of the files, of which `resumed` were there from a call before."""

    nbytes: int
    resumed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FileWindow:
    """Bytes of a file. Both ends are at whole pages, but for the end of the file."""

    file: int
    start: int
    stop: int


def window_for(max_memory: int) -> int:
    """Bytes of a window, so that this whole process needs at most so many. UsageError if that cannot be."""
    here = resident()
    window = (max_memory - here - SPARE) // SHARES // PAGE * PAGE
    if window < SMALLEST:
        least = here + SPARE + SHARES * SMALLEST
        raise UsageError(f"--max-memory is too little: this process needs at least {-(-least >> 20)} MiB")
    give_back_freed()
    return min(window, LARGEST)


def give_back_freed() -> None:
    """Memory of whole windows goes back to the system when it is freed. By itself glibc keeps it in the heap of each
    thread once some was freed, where others do not find it: a third more, by chance."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 256 << 10)


def resident() -> int:
    """Bytes of memory that this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def batches(output: Output, size: int) -> Iterator[list[FileWindow]]:
    """All bytes of all files, so many at once. Those of each file come in their order."""
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


def check_target(target: Path, *, single: bool = False) -> None:
    """UsageError if something is there that an export would have to replace, or that it cannot become."""
    if os.path.ismount(target):
        raise UsageError(f"{target} is where a file system is mounted: give a name inside it")
    if single and target.is_dir():
        raise UsageError(f"{target} is a folder, and a file is to be made: give another name")
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UsageError(f"{target} exists: nothing is ever replaced. Remove it, or choose another name")


def partial_of(target: Path) -> Path:
    """Where an export is made until it is whole."""
    return target.with_name(f"{target.name}.partial")


async def export(
    origin: Origin, output: Output, target: Path, *, window: int = LARGEST, on_bytes: OnBytes = None
) -> Exported:
    """Make the files of `output` and let them appear as `target`. Called again after an interruption, it goes on.

    UsageError if the target exists, or something else is being made there; FullError if there is no room, of which
    nothing is left then; CorruptError, with the tensor's name, if the origin is damaged.
    """
    started = time.monotonic()
    check_target(target, single=output.single)
    for file in output.files:
        file.check()
    with _Workshop(target, identity(origin, output)) as workshop:
        workshop.prepare(output)
        mover = _Mover(origin, output, workshop, window, on_bytes)
        try:
            await mover.move()
            await origin.unchanged()
            await asyncio.to_thread(_complete, workshop, output, mover.sums)
        except OSError as error:
            raise _failed(error, workshop) from error
        except CorruptError as error:
            raise CorruptError(f"{error}. {workshop.stays}") from error
        point("export.whole")
        workshop.appear()
    return Exported(sum(file.size for file in output.files), mover.resumed, time.monotonic() - started)


def identity(origin: Origin, output: Output) -> str:
    """Equal for exports of the same to the same files."""
    files = [[f.name, f.size, [_said(part) for part in f.parts], [asdict(one) for one in f.sums]] for f in output.files]
    return file_digest(canonical([origin.identity, output.kind, output.single, files]))


def _said(part: Literal | Run) -> list[Any]:
    if isinstance(part, Literal):
        return [part.at, part.size, file_digest(part.data)]
    return [part.at, part.label, part.box, part.dtype]


# -- the place where it is made --


class _Workshop:
    """`<target>.partial`: who works there, on what, and how far it is. One process at a time."""

    def __init__(self, target: Path, plan: str) -> None:
        self.target, self.plan = target, plan
        self.folder = partial_of(target)
        self.out = self.folder / "out"
        self.noted: dict[tuple[str, int, int], str] = {}
        self._lock = -1

    def __enter__(self) -> _Workshop:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open_regular(self.folder / "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(f"another process is making {self.target} right now") from None
        except OSError as error:
            if self._lock >= 0:
                os.close(self._lock)
            raise StoreError(f"{self.folder} cannot be written: {error.strerror}") from None
        try:
            self._adopt()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)

    def _adopt(self) -> None:
        """What was begun here, if it is the same."""
        about = self.folder / "plan.json"
        try:
            begun = json.loads(read_regular(about))["plan"]
        except FileNotFoundError:
            if any(path.name not in ("lock", "plan.new") for path in self.folder.iterdir()):
                raise UsageError(f"{self.folder} is not ours: remove it, or choose another target") from None
            deferred = self.folder / "plan.new"
            _write(deferred, canonical({"plan": self.plan}))
            deferred.rename(about)
            return
        except (OSError, ValueError, KeyError, TypeError):
            begun = None
        if begun != self.plan:
            raise UsageError(
                f"{self.folder} holds an unfinished export of something else, or with other options: remove it, or "
                "choose another target"
            )
        with contextlib.suppress(FileNotFoundError):
            for line in read_regular(self.folder / "journal").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # the last one may be cut off
                    name, start, stop, digest = json.loads(line)
                    self.noted[name, start, stop] = digest

    @property
    def stays(self) -> str:
        return f"Nothing was made; what is sound so far stays in {self.folder}, for the next call: or remove it"

    def path(self, file: OutFile, output: Output) -> Path:
        return self.out if output.single else self.out / file.name

    def prepare(self, output: Output) -> None:
        """All files at their full size: a disk that is too small is found out before anything is written."""
        try:
            for file in output.files:
                path = self.path(file, output)
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = open_regular(path, os.O_RDWR | os.O_CREAT)
                try:
                    if os.fstat(fd).st_size != file.size:
                        os.ftruncate(fd, 0)
                        if file.size:
                            os.posix_fallocate(fd, 0, file.size)
                finally:
                    os.close(fd)
            if not output.single:
                self.out.mkdir(exist_ok=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreError(f"{self.folder} cannot be written: {error.strerror}") from None
            shutil.rmtree(self.folder, ignore_errors=True)
            need, free = sum(f.size for f in output.files), shutil.disk_usage(self.target.parent).free
            raise FullError(
                f"{self.target} needs {need >> 20} MiB, and {free >> 20} MiB are free there ({error.strerror}): "
                "nothing was written. Make room, or choose another place"
            ) from None

    def note(self, done: Sequence[tuple[str, int, int, str]]) -> None:
        """In the journal, durably: these bytes lie on the disk."""
        fd = open_regular(self.folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, b"".join(b"\n" + json.dumps(one).encode() for one in done) + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def appear(self) -> None:
        """Under the target's name, by one rename."""
        _sync_tree(self.out)
        check_target(self.target)
        try:
            if self.out.is_dir():
                os.rename(self.out, self.target)
            else:
                _rename_new(self.out, self.target)
        except OSError as error:
            raise UsageError(
                f"{self.target} appeared meanwhile, or cannot be made ({error.strerror}). What was exported is whole "
                f"and lies in {self.out}"
            ) from None
        _sync(self.target.parent)
        point("export.appeared")
        shutil.rmtree(self.folder, ignore_errors=True)


def _rename_new(path: Path, target: Path) -> None:
    """OSError if the target is there."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise
        check_target(target)  # a file system without links
        os.rename(path, target)
    else:
        path.unlink()


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(path: Path) -> None:
    """Files and the folders that name them."""
    if path.is_dir():
        for folder, _, files in os.walk(path):
            for name in files:
                _sync(Path(folder) / name)
            _sync(Path(folder))
    else:
        _sync(path)
    _sync(path.parent)


def _failed(error: OSError, workshop: _Workshop) -> StoreError:
    stays = f"What was exported so far stays in {workshop.folder}: call the same again, and it goes on from there"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError(f"no room for {workshop.target} any more. {stays}")
    return StoreError(f"{workshop.target} cannot be written: {error}. {stays}")


def _complete(workshop: _Workshop, output: Output, sums: Sums) -> None:
    """Checksums to their places, and what can only be written now."""
    for file in output.files:
        places = [(at, sums[file.name][one.start]) for one in file.sums for at in one.patch]
        if places:
            fd = os.open(workshop.path(file, output), os.O_WRONLY | os.O_CLOEXEC)
            try:
                for at, value in places:
                    os.pwrite(fd, value, at)
                os.fsync(fd)
            finally:
                os.close(fd)
    output.finish(workshop.out, sums)


# -- the bytes --


class _Mover:
    """One batch of windows is read while the one before it is written."""

    def __init__(self, origin: Origin, output: Output, workshop: _Workshop, window: int, on_bytes: OnBytes) -> None:
        self._origin, self._output, self._workshop, self._on_bytes = origin, output, workshop, on_bytes
        self._size = max(PAGE, min(window, -(-sum(f.size for f in output.files) // PAGE) * PAGE))
        self._summers = [_Summer(file.sums) for file in output.files]
        self._writers = _Writers(workshop, output)
        self._written: list[tuple[str, int, int, str]] = []
        self.resumed = 0

    @property
    def sums(self) -> Sums:
        return {file.name: s.found for file, s in zip(self._output.files, self._summers, strict=True)}

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
                self._tell(sum(map(len, views.values())))
            if writing is not None:
                await writing
        finally:
            if writing is not None:
                await asyncio.wait((writing,))
            await asyncio.to_thread(self._close)

    def _missing(self, views: Mapping[FileWindow, Bytes]) -> dict[FileWindow, Bytes]:
        """Those that no earlier call has written, or that do not lie there as they were noted. The others are in their
        views then."""
        return {window: view for window, view in views.items() if not self._there(window, view)}

    def _there(self, window: FileWindow, view: Bytes) -> bool:
        name = self._output.files[window.file].name
        noted = self._workshop.noted.get((name, window.start, window.stop))
        if noted is None:
            return False
        return self._writers[window.file].read(window.start, view) and blob_digest(view.data).hex() == noted

    def _settle(self, views: Mapping[FileWindow, Bytes], missing: Mapping[FileWindow, Bytes]) -> None:
        """What comes after reading: checksums, in the order of the bytes, and writing what is not there."""
        for window, view in views.items():
            self._summers[window.file].feed(window.start, view)
        self._write(missing)

    async def _fill(self, views: Mapping[FileWindow, Bytes]) -> None:
        """The windows' bytes, as the plan has them."""
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
            self._writers[window.file].write(window.start, view)
            name = self._output.files[window.file].name
            self._written.append((name, window.start, window.stop, blob_digest(view.data).hex()))
        if sum(stop - start for _, start, stop, _ in self._written) >= SYNC:
            self._note()

    def _note(self) -> None:
        self._writers.sync()
        self._workshop.note(self._written)
        self._written = []

    def _tell(self, count: int) -> None:
        if self._on_bytes is not None:
            self._on_bytes(count)

    def _close(self) -> None:
        try:
            if self._written:
                self._note()
        finally:
            self._writers.close()


def _carve(buffer: Bytes, batch: Sequence[FileWindow]) -> dict[FileWindow, Bytes]:
    """Memory for each window, at whole pages."""
    found, at = dict[FileWindow, Bytes](), 0
    for window in batch:
        size = window.stop - window.start
        found[window] = buffer[at : at + size]
        at += -(-size // PAGE) * PAGE
    return found


def _cast_all(casts: Sequence[tuple[Bytes, str, str, Bytes]]) -> None:
    for raw, dtype, to, place in casts:
        cast(raw, dtype, to, place)


def _parts(file: OutFile, window: FileWindow) -> Iterator[Literal | Run]:
    """Those that lie in a window."""
    first = max(0, bisect_right(file.parts, window.start, key=lambda part: part.at) - 1)
    for part in file.parts[first:]:
        if part.at >= window.stop:
            return
        if part.size and part.at + part.size > window.start:
            yield part


def _pages(size: int) -> Bytes:
    """Memory at whole pages, as direct I/O wants it."""
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class _Writers:
    """Open files, not too many at once. What was written to one that is closed lies on the disk."""

    def __init__(self, workshop: _Workshop, output: Output) -> None:
        self._paths = [workshop.path(file, output) for file in output.files]
        self._open: dict[int, _Writer] = {}

    def __getitem__(self, number: int) -> _Writer:
        if number not in self._open:
            while len(self._open) >= OPEN_FILES:
                oldest = self._open.pop(next(iter(self._open)))
                oldest.sync()
                oldest.close()
            self._open[number] = _Writer(self._paths[number])
        return self._open[number]

    def sync(self) -> None:
        for writer in self._open.values():
            writer.sync()

    def close(self) -> None:
        for writer in self._open.values():
            writer.close()
        self._open = {}


class _Writer:
    """A file that is written past the page cache, where the file system allows."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            self._direct = -1

    def write(self, at: int, data: Bytes) -> None:
        whole = len(data) // PAGE * PAGE
        if self._direct >= 0 and whole:
            try:
                _write_all(self._direct, data[:whole].data, at)
                at, data = at + whole, data[whole:]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)
                self._direct = -1
        _write_all(self._fd, data.data, at)

    def read(self, at: int, view: Bytes) -> bool:
        """False if there is not as much."""
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:].data], at + done)
            if not count:
                return False
            done += count
        return True

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        if self._direct >= 0:
            os.close(self._direct)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count


class _Hash(Protocol):
    def update(self, data: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


class _Crc:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "little")


class _Summer:
    """Checksums of ranges of a file whose bytes pass by in their order. `found`: by where the ranges start."""

    def __init__(self, sums: Sequence[Sum]) -> None:
        self._sums, self._next, self.found = sorted(sums, key=lambda one: one.start), 0, dict[int, bytes]()
        self._hash: _Hash | None = None

    def feed(self, at: int, data: Bytes) -> None:
        end = at + len(data)
        while self._next < len(self._sums) and self._sums[self._next].start < end:
            one = self._sums[self._next]
            if self._hash is None:
                self._hash = _Crc() if one.kind == "crc32" else xxhash.xxh3_128()
            self._hash.update(data[max(one.start, at) - at : min(one.stop, end) - at].data)
            if one.stop > end:
                return
            self.found[one.start] = self._hash.digest()
            self._hash, self._next = None, self._next + 1
