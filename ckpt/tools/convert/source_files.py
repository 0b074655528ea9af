"""Files of other libraries as an origin: safetensors, `torch.save`, torch's distributed checkpoints.

They are first parsed to a `Foreign` value (`convert.parse_safetensors`, `convert.parse_torch`, `convert.parse_dcp`),
which maps each box of each tensor to a byte range of a file. No code in the files is executed. The files have no
digests, so damage in the bytes of tensors cannot be detected.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from ckpt.core.checkpoint import chunks
from ckpt.core.checkpoint.reference import matches
from ckpt.core.format.boxes import Box, Dims, TangledError, times_covered
from ckpt.core.format.digest import file_digest
from ckpt.core.format.layout import BITS, TensorSpec, check_components, check_tensors
from ckpt.core.format.regular_file import LOST, open_regular
from ckpt.core.format.values import Json, Path, show
from ckpt.errors import CheckpointError, CorruptError, UnreadableError, UsageError
from ckpt.tools.convert.source import Assembly, Bytes, Origin, OriginEntry, RankView, Want

READ = 8 << 20  # maximum bytes per read
THREADS = 2
SOME = 8  # maximum objects listed in a message
CLOSE = 16 << 10  # elements whose distance is at most this many bytes are read together
CHANGED = "{} changed while it was read: wait until it is written, and repeat the command"


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A box of a tensor whose bytes are stored in row-major order at byte `at` of a file. `strides`: in elements, if
    the order is another one; `at` is then the position of the first element."""

    name: str
    dtype: str  # this library's name of the dtype
    whole: Dims
    offsets: Dims
    sizes: Dims
    file: str  # relative to the folder
    at: int
    strides: Dims | None = None

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes

    @property
    def span(self) -> int:
        """The length of the range of the file from the first element to the last, bytes."""
        item = BITS[self.dtype] // 8
        if 0 in self.sizes:
            return 0
        if self.strides is None:
            return int(np.prod(self.sizes, dtype=object)) * item
        return (1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))) * item


@dataclass(frozen=True)
class Foreign:
    """The contents of files of another library. `what`: kind of the files for users, for example "a torch.save file".

    `entries`: entries of the state, with kinds like "module" for weights and "optimizer", so that a Checkpointer can
        restore them. `notes`: what was skipped or changed, and why. `held`: byte strings used as files in memory, for
        tensors whose bytes are in no file, for example numpy arrays in a pickle. `objects`: unsupported objects by
        path, which only code could create; see `admit`.
    """

    what: str
    folder: FilePath
    pieces: tuple[FilePiece, ...]
    aliases: dict[str, str]
    entries: tuple[OriginEntry, ...]
    notes: tuple[str, ...] = ()
    step: int | None = None
    held: dict[str, bytes] = field(default_factory=dict)
    objects: Mapping[Path, str] = field(default_factory=dict)


def admit(foreign: Foreign, only: Sequence[str] = (), *, skip: bool = False) -> Foreign:
    """Add a note for each skipped object. Raise UsageError listing the objects, unless `skip` is True or `only`
    excludes them."""
    wanted = {
        path: what
        for path, what in foreign.objects.items()
        if not only or any(matches(show(path[:n]), only) for n in range(1, len(path) + 1))
    }
    objects = [f"{show(path)} ({what})" for path, what in wanted.items()]
    if objects and not skip:
        named = ", ".join(objects[:SOME]) + (f" and {len(objects) - SOME} more" if len(objects) > SOME else "")
        modules = [show(entry.path) for entry in foreign.entries if entry.kind == "module"]
        raise UsageError(
            f"these objects need code to recreate, which was not run: {named}. Add "
            f"--skip-objects to skip them, or select other entries, for example --only {(modules or ['model'])[0]}"
        )
    return replace(foreign, notes=(*foreign.notes, *(f"skipped {item}" for item in objects)))


class FilesOrigin:
    """Reads ranges of files. Raises CorruptError if pieces do not cover their tensors, or if a file is too short.

    `before`: result of `stamps_of` before the files were parsed. `elsewhere`: tensors of the entries that a subclass
        reads in another way.
    """

    def __init__(
        self,
        foreign: Foreign,
        before: Mapping[str, Stamp] | None = None,
        elsewhere: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        self.title, self.about = foreign.what, dict[str, Any](path=str(foreign.folder), step=foreign.step)
        self._foreign, self.keep = foreign, 0
        self._pieces: dict[str, list[int]] = {}
        for i, piece in enumerate(foreign.pieces):
            self._pieces.setdefault(piece.name, []).append(i)
        here = {name: _whole([foreign.pieces[i] for i in found]) for name, found in self._pieces.items()}
        self.tensors = {**(elsewhere or {}), **here}
        check_tensors(self.tensors.values())
        self.names = {**{name: name for name in self.tensors}, **foreign.aliases}
        if dangling := [a for a, name in foreign.aliases.items() if name not in self.tensors or a in self.tensors]:
            raise CorruptError(f"{dangling[0]} is an alias of a missing tensor")
        check_components([e.component for e in foreign.entries], self.tensors.keys() | foreign.aliases.keys())
        self._stamps = {name: self._stamp(name) for name in {p.file for p in foreign.pieces} - foreign.held.keys()}
        self._before = {**self._stamps, **(before or {})}
        if any(self._before[name] != stamp for name, stamp in self._stamps.items()):
            raise CorruptError(CHANGED.format(foreign.folder))
        held = {name: file_digest(data) for name, data in foreign.held.items()}
        self.identity = f"{foreign.folder.resolve()} {sorted(self._before.items())} {sorted(held.items())}"
        sizes = {name: size for name, (size, *_) in self._stamps.items()}
        sizes |= {name: len(data) for name, data in foreign.held.items()}
        for piece in foreign.pieces:
            if piece.at < 0 or piece.at + piece.span > sizes[piece.file]:
                raise CorruptError(f"{piece.name} is beyond the end of {piece.file}: the file is truncated")

    def view(self, rank: int = 0, world: int = 1) -> RankView:
        names = {name: name for name in self.tensors}
        foreign = self._foreign
        return RankView(foreign.entries, names, foreign.aliases, foreign.notes, foreign.step)

    def plain(self, wanted: Callable[[str], bool] = lambda path: True) -> dict[str, tuple[dict[str, Any], Json]]:
        return {
            path: ({"path": list(entry.path), "kind": entry.kind, "facts": entry.facts}, entry.values)
            for entry in self._foreign.entries
            if wanted(path := show(entry.path))
        }

    def same(self, label: str, other: Origin, theirs: str) -> bool:
        return False  # without digests, equality cannot be proved

    async def read(self, wants: Sequence[Want]) -> None:
        await chunks.files(self._read, wants)

    def _read(self, wants: Sequence[Want]) -> None:
        assembly, pieces = Assembly(), self._foreign.pieces
        for want in wants:
            for number in self._pieces[want.label]:
                assembly.meet(number, pieces[number].box, want)
        ranges = list[tuple[int, int, int]]()
        for number, start, stop in assembly.runs():
            if pieces[number].strides is not None:
                for region, target in assembly.landings(number):
                    self._gather(pieces[number], region, target)
                continue
            cuts = [*range(start, stop, READ), stop]
            ranges += [(number, a, b) for a, b in itertools.pairwise(cuts) if assembly.needs(number, a, b)]
        with ThreadPoolExecutor(THREADS, "ckpt-read") as pool:
            list(pool.map(lambda one: self._take(assembly, *one), ranges))

    def _take(self, assembly: Assembly, number: int, start: int, stop: int) -> None:
        piece = self._foreign.pieces[number]
        room = assembly.room(number, start, stop)
        data = self._bytes(piece, piece.at + start, stop - start, room)
        if room is None:
            assembly.add(number, start, data)

    def _gather(self, piece: FilePiece, region: Box, target: Bytes) -> None:
        """Read a box of a piece that is not in row-major order. Read elements that are close to each other together."""
        assert piece.strides is not None
        (offsets, sizes), strides, item = region, piece.strides, target.shape[-1]
        span = (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))) * item
        if span > max(CLOSE, 4 * target.size) or span > READ:
            dim = max((d for d, n in enumerate(sizes) if n > 1), key=lambda d: strides[d])
            half = sizes[dim] // 2
            for first, count in ((0, half), (half, sizes[dim] - half)):
                at = tuple(o + first * (d == dim) for d, o in enumerate(offsets))
                box = at, tuple(count if d == dim else n for d, n in enumerate(sizes))
                self._gather(piece, box, target[(slice(None),) * dim + (slice(first, first + count),)])
            return
        start = piece.at + sum(o * s for o, s in zip(offsets, strides, strict=True)) * item
        raw = np.frombuffer(self._bytes(piece, start, span), np.uint8)
        steps = (*(s * item for s in strides), 1)
        target[...] = np.lib.stride_tricks.as_strided(raw, (*sizes, item), steps, writeable=False)

    def _bytes(self, piece: FilePiece, at: int, length: int, into: memoryview | None = None) -> memoryview:
        view = memoryview(bytearray(length)) if into is None else into
        if piece.file in self._foreign.held:
            view[:] = self._foreign.held[piece.file][at : at + length]
        else:
            self._read_file(piece.file, at, view)
        return view

    def _stamp(self, name: str) -> Stamp:
        with _opened(self._foreign.folder, name) as fd:
            return stamp_of(os.fstat(fd))

    def _read_file(self, name: str, at: int, view: memoryview) -> None:
        """Read bytes of a file. Raise CorruptError if the file has changed since it was parsed."""
        with _opened(self._foreign.folder, name) as fd:
            if stamp_of(os.fstat(fd)) != self._stamps[name]:
                raise CorruptError(CHANGED.format(self._foreign.folder / name))
            done = 0
            while done < len(view):
                try:
                    count = os.preadv(fd, [view[done:]], at + done)
                except OSError as error:
                    raise cannot_read(self._foreign.folder / name, error) from None
                if not count:
                    raise CorruptError(f"{name} became shorter while it was read")
                done += count

    async def unchanged(self) -> None:
        """Raise CorruptError unless everything was read from one version of the files."""
        folder = self._foreign.folder
        try:
            same = self._before == await chunks.files(lambda: {n: stamp_of(os.stat(folder / n)) for n in self._before})
        except OSError:  # a file is missing
            same = False
        if not same:
            raise CorruptError(CHANGED.format(folder))

    async def aclose(self) -> None:
        """Do nothing: no file is open between reads."""


Stamp = tuple[int, int, int]
"""Size, modification time and inode of a file. A change of the file changes at least one of them."""


def stamp_of(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def stamps_of(path: FilePath) -> dict[str, Stamp]:
    """Return the stamp of a file, or for a folder the stamps of the small files that describe the others."""
    if not path.is_dir():
        return {path.name: stamp_of(path.stat())}
    return {
        one.name: stamp_of(one.stat()) for one in path.iterdir() if one.name == ".metadata" or one.suffix == ".json"
    }


def _whole(pieces: list[FilePiece]) -> TensorSpec:
    first = pieces[0]
    if any((p.dtype, p.whole) != (first.dtype, first.whole) for p in pieces):
        raise CorruptError(f"the files have different shapes or dtypes for {first.name}")
    spec = TensorSpec(first.name, first.dtype, first.whole)
    check_tensors([spec, *(TensorSpec(p.name, p.dtype, p.sizes, False, p.whole, p.offsets) for p in pieces)])
    try:
        least, most = times_covered(first.whole, [p.box for p in pieces])
    except TangledError as error:
        raise CorruptError(f"{first.name}: {error}") from None
    if (least, most) != (1, 1):
        raise CorruptError(f"part of {first.name} is {'missing' if least == 0 else f'stored {most} times'}")
    return spec


def refuse(path: tuple[str | int, ...], problem: str) -> UsageError:
    return UsageError(f"{show(path)}: this {problem}")


def cannot_read(path: FilePath, error: OSError) -> CheckpointError:
    """Return the error for a file that could not be read: CorruptError if it is gone or not a regular file, or if its
    content led to an impossible request, otherwise UnreadableError."""
    if error.errno in LOST:
        return CorruptError(f"cannot read {path}: {error.strerror or error}")
    return UnreadableError(f"{path} cannot be read now: {error.strerror or error}")


@contextmanager
def _opened(folder: FilePath, name: str) -> Iterator[int]:
    """Open a file inside the folder. A name from a file must not lead outside the folder. A link may lead outside,
    because the user created it, as in caches of model hubs."""
    if FilePath(name).is_absolute() or ".." in FilePath(name).parts or "\0" in name:
        raise CorruptError(f"references a file outside its folder: {name!r}")
    try:
        fd = open_regular(folder / name)
    except OSError as error:
        raise cannot_read(folder / name, error) from None
    try:
        yield fd
    finally:
        os.close(fd)
