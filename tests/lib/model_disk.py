"""Disks that tests stand in the doorway of.

`RecordingDisk` works in a real folder and writes down every operation in order; it can also make any one of them fail,
or stop the process there. `PowerCut` replays such a recording and draws what a disk may hold once the power is back:
pages and names persist each on its own unless they were synced. `violation` is the oracle: it opens such a disk with
the code that opens real ones. `Volume` is a real file system on a loop device, whose power can be cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import itertools
import mmap
import os
import random
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckpt.core.checkpoint import read
from ckpt.core.checkpoint.commits import abort, acquire, commit, create_run, recover
from ckpt.core.checkpoint.retention import Keep, retire
from ckpt.core.checkpoint.write import RankSnapshot, WrittenManifest, write_part
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import CheckpointId, new_nonce
from ckpt.core.log.run_log import Acquire, RunLog
from ckpt.errors import CheckpointError
from ckpt.store import Store
from ckpt_backends.disk import Disk
from ckpt_backends.local import LocalStore
from ckpt_backends.memory import MemoryStore
from processes import eventually
from run_files import DATA_FOLDER, kind_of

SECTOR = 512  # what a disk writes as a whole
LAYOUT = Layout(
    tensors=(TensorSpec("w", "F32", (30, 11)), TensorSpec("n", "I64", (5,)), TensorSpec("b", "BF16", (7,))),
    aliases={},
    components=[],
)
MEGABYTE = Layout((TensorSpec("w", "F32", (1 << 18,)),), {}, [])


# -- a small run, without torch --


def payload(checkpoint: CheckpointId, size: int = LAYOUT.arrangement.data_size) -> bytes:
    """The state that an attempt saves: its bytes follow from its name, so that any restore can be checked."""
    return random.Random(str(checkpoint)).randbytes(size)


def snapshot(checkpoint: CheckpointId, layout: Layout = LAYOUT) -> RankSnapshot:
    data = memoryview(mmap.mmap(-1, layout.arrangement.data_size))  # page-aligned, as in an arena
    data[:] = payload(checkpoint, len(data))
    return RankSnapshot(checkpoint, layout, data, [])


@dataclass
class Run:
    """A job that has a run open, as the writer process does."""

    log: RunLog
    mine: Acquire

    @classmethod
    async def open(cls, store: Store) -> Run:
        await create_run(store)
        log = RunLog(store)
        await log.open()
        run = cls(log, await acquire(log, new_nonce()))
        await recover(log, run.mine)
        return run

    def checkpoint(self, step: int) -> CheckpointId:
        return CheckpointId(self.mine.term, step, self.mine.nonce)

    async def write(self, step: int, number: int = 0, layout: Layout = LAYOUT) -> WrittenManifest:
        return await write_part(
            self.log.store, snapshot(self.checkpoint(step), layout), numbers=itertools.count(number)
        )

    async def save(self, step: int, number: int = 0, layout: Layout = LAYOUT) -> CheckpointId:
        """Returns when the step is acknowledged."""
        await commit(self.log, self.mine, [await self.write(step, number, layout)])
        return self.checkpoint(step)

    async def abort(self, step: int, reason: str) -> None:
        """Append an ABORT record for a step."""
        await abort(self.log, self.mine, self.checkpoint(step), reason)

    @property
    def records(self) -> int:
        """Return the number of log records."""
        return self.log.state.next_seq

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in the order in which they were committed."""
        return [checkpoint.step for checkpoint in self.log.state.commits]

    async def problems(self, step: int) -> list[str]:
        """Verify a checkpoint of this job."""
        return await read.verify(self.log.store, self.log.state.commits[self.checkpoint(step)])

    async def retire(self, last: int = 1) -> None:
        newest = self.log.state.lineage()[0].checkpoint
        await retire(self.log, self.mine, Keep(last=last), {newest})


async def restored(log: RunLog, checkpoint: CheckpointId) -> bytes:
    """The bytes of a checkpoint, verified by the reader, in the order of the layout."""
    manifest = await read.load_all(log.store, log.state.commits[checkpoint])
    layout, saved = manifest.layout(), manifest.saved()
    data = bytearray(layout.arrangement.data_size)
    number = {t.name: i for i, t in enumerate(layout.tensors)}

    def sink(chunk: int, view: memoryview) -> None:
        name = manifest.table.shards[int(saved.shard_of_chunk[chunk])].name
        at = layout.arrangement.offsets[number[name]] + int(saved.position[chunk])
        data[at : at + len(view)] = view

    reads = read.plan_reads(manifest.table, range(len(manifest.table.length)))
    await read.fetch(log.store, manifest.table, reads, sink)
    return bytes(data)


# -- a disk that remembers --


class Killed(BaseException):
    """The process ends here: nothing after this reaches the disk."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `folder` is relative to the base, `node` numbers files in the order they were made."""

    kind: str  # mkdir, name, rename, unname, write, size, fsync, fsync_dir, or ack: the caller was notified of "saved"
    folder: str = ""
    name: str = ""
    node: int = -1
    offset: int = 0
    data: bytes = b""
    source: str = ""


@dataclass
class Fault:
    """Fail operation number `at`, counted from 0, and, with `forever`, all that follow. `late`: it happens all the
    same, and only its answer is lost. `number` is an errno; None kills the process."""

    at: int
    number: int | None = errno.EIO
    forever: bool = False
    late: bool = False

    def hits(self, count: int) -> bool:
        return count == self.at or (count > self.at and (self.forever or self.number is None))

    def error(self) -> BaseException:
        return Killed() if self.number is None else OSError(self.number, os.strerror(self.number))


class RecordingDisk(Disk):
    """Works below `base`, and syncs nothing for real: what is synced is a matter of the recording."""

    def __init__(self, base: str | Path) -> None:
        self.base = str(base)
        self.ops: list[Op] = []
        self.fault: Fault | None = None
        self.count = 0  # operations so far, also those that failed
        self.synced_again: list[str] = []  # files that were synced after their fsync had failed
        self._lock = threading.RLock()
        self._nodes = 0
        self._names: dict[str, int] = {}
        self._fds: dict[int, int] = {}
        self._content: dict[int, bytearray] = {}
        self._failed: set[int] = set()

    def ack(self, checkpoint: CheckpointId) -> None:
        self.ops.append(Op("ack", name=str(checkpoint)))

    @contextlib.contextmanager
    def _step(self) -> Iterator[bool]:
        """Run one operation, and raise the injected fault before or after it."""
        with self._lock:
            hit = self.fault is not None and self.fault.hits(self.count)
            self.count += 1
            if hit and self.fault is not None and not self.fault.late:
                raise self.fault.error()
            yield hit
            if hit and self.fault is not None:
                raise self.fault.error()

    def _split(self, path: str) -> tuple[str, str]:
        folder, name = os.path.split(os.path.relpath(path, self.base))
        return folder, name

    def _record(self, kind: str, path: str, node: int = -1, source: str = "") -> None:
        folder, name = self._split(path)
        self.ops.append(Op(kind, folder, name, node, source=source))

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        with self._step():
            fd = super().open(path, flags, mode)
            if flags & os.O_CREAT:
                node = self._names[path] = self._nodes
                self._nodes += 1
                self._content[node] = bytearray()
                self._record("name", path, node)
            self._fds[fd] = self._names.get(path, -1)
        if flags & os.O_CREAT and path.endswith(".tmp"):
            return self._small_file(path, fd)
        return fd

    def _small_file(self, path: str, fd: int) -> int:
        """Small files are not written through us: a descriptor that refuses stands in for a failing write."""
        try:
            with self._step():
                pass
        except OSError as error:
            os.close(fd)
            return os.open("/dev/full", os.O_WRONLY) if error.errno == errno.ENOSPC else os.open(path, os.O_RDONLY)
        return fd

    def mkdir(self, path: str) -> None:
        with self._step():
            super().mkdir(path)
            self._record("mkdir", path)

    def reserve(self, fd: int, size: int) -> None:
        with self._step():
            super().reserve(fd, size)
            self._resize(fd, max(size, len(self._content[self._fds[fd]])))

    def truncate(self, fd: int, size: int) -> None:
        with self._step():
            super().truncate(fd, size)
            self._resize(fd, size)

    def _resize(self, fd: int, size: int) -> None:
        content = self._content[self._fds[fd]]
        content[:] = content[:size].ljust(size, b"\0")
        self.ops.append(Op("size", node=self._fds[fd], offset=size))

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        with self._step():
            written = super().pwrite(fd, view, offset)
            self._wrote(self._fds[fd], offset, bytes(view[:written]))
        return written

    def _wrote(self, node: int, offset: int, data: bytes) -> None:
        content = self._content[node]
        content[offset : offset + len(data)] = data
        self.ops.append(Op("write", node=node, offset=offset, data=data))

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        with self._step():
            return super().preadv(fd, view, offset)

    def fsync(self, fd: int) -> None:
        node = self._fds[fd]
        if node in self._failed:
            self.synced_again.append(os.readlink(f"/proc/self/fd/{fd}"))
        try:
            with self._step():
                data = Path(f"/proc/self/fd/{fd}").read_bytes()
                if data != self._content[node]:  # what aiofiles has written
                    self._wrote(node, 0, data)
                self.ops.append(Op("fsync", node=node))
        except OSError:
            self._failed.add(node)
            raise

    def fsync_dir(self, path: str) -> None:
        with self._step():
            if not os.path.isdir(path):
                raise FileNotFoundError(errno.ENOENT, "no such folder", path)
            relative = os.path.relpath(path, self.base)
            self.ops.append(Op("fsync_dir", "" if relative == "." else relative))

    def link(self, source: str, target: str) -> None:
        with self._step():
            super().link(source, target)
            self._names[target] = self._names[source]
            self._record("name", target, self._names[source])

    def replace(self, source: str, target: str) -> None:
        with self._step():
            super().replace(source, target)
            self._names[target] = self._names.pop(source)
            self._record("rename", target, self._names[target], os.path.basename(source))

    def unlink(self, path: str) -> None:
        with self._step():
            super().unlink(path)
            self._names.pop(path, None)
            self._record("unname", path)


def kind_of_sync(ops: Iterable[Op]) -> dict[int, str]:
    """Return the kind of each file, by its number, as `run_files.kind_of` has it."""
    kinds: dict[int, str] = {}
    for op in ops:
        if op.kind in ("name", "rename") and not op.name.startswith("."):
            key = f"{op.folder}/{op.name}".partition("/")[2]
            kinds[op.node] = kind_of(key) or key
    return kinds


def folder_of_sync(path: str) -> str:
    """Return the kind of a folder of the run: its name, or "checkpoint"."""
    above, name = os.path.split(path)
    return f"folder {'checkpoint' if os.path.basename(above) == DATA_FOLDER else name}"


# -- what a power cut leaves --


@dataclass
class _File:
    """`whole` is what the program wrote; `synced` is what is safe of it."""

    synced: bytes = b""
    whole: bytes = b""
    dirty: bool = False

    def apply(self, op: Op) -> None:
        if op.kind == "fsync":
            self.synced, self.dirty = self.whole, False
        else:
            self.whole, self.dirty = _changed(self.whole, op), True

    def draw(self, rng: random.Random) -> bytes:
        if not self.dirty:
            return self.synced
        fate = rng.random()
        if fate < 0.15:
            return self.synced
        if fate < 0.3:
            return self.whole
        size = rng.choice((len(self.synced), len(self.whole), len(self.whole)))
        data = bytearray(self.synced[:size].ljust(size, b"\0"))
        for start in range(0, size, SECTOR):
            if rng.random() < 0.5:
                data[start : start + SECTOR] = self.whole[start : min(start + SECTOR, size)]
        return bytes(data)


def _changed(data: bytes, op: Op) -> bytes:
    if op.kind == "size":
        return data[: op.offset].ljust(op.offset, b"\0")
    return data[: op.offset].ljust(op.offset, b"\0") + op.data + data[op.offset + len(op.data) :]


@dataclass
class _Folder:
    """`names` maps to a file's number, or to None for a folder."""

    names: dict[str, int | None] = field(default_factory=dict)
    pending: list[Op] = field(default_factory=list)

    def sync(self) -> None:
        for op in self.pending:
            _rename(self.names, op)
        self.pending.clear()

    def draw(self, rng: random.Random, ordered: bool) -> dict[str, int | None]:
        names = dict(self.names)
        until = rng.randint(0, len(self.pending)) if ordered else len(self.pending)
        for op in self.pending[:until]:
            if ordered or rng.random() < 0.5:
                _rename(names, op)
        return names


def _rename(names: dict[str, int | None], op: Op) -> None:
    names.pop(op.source, None)
    if op.kind == "unname":
        names.pop(op.name, None)
    else:
        names[op.name] = None if op.kind == "mkdir" else op.node


class PowerCut:
    """The possible disk contents after a power cut. `draw` gives one of them, as objects by key.

    `ordered`: names of one folder persist in the order of creation, as with journals; otherwise independently.
    """

    def __init__(self, root: str) -> None:
        self.root = root  # the run's folder, relative to the base
        self.acked: list[str] = []
        self._files: dict[int, _File] = {}
        self._folders: dict[str, _Folder] = {}

    def apply(self, op: Op) -> None:
        if op.kind == "ack":
            self.acked.append(op.name)
        elif op.kind == "fsync_dir":
            self._folders.setdefault(op.folder, _Folder()).sync()
        elif op.kind in ("write", "size", "fsync"):
            self._files[op.node].apply(op)
        else:
            self._folders.setdefault(op.folder, _Folder()).pending.append(op)
            if op.node >= 0:
                self._files.setdefault(op.node, _File())

    def draw(self, rng: random.Random, *, ordered: bool) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        content = {node: file.draw(rng) for node, file in self._files.items()}
        pending = [""]
        while pending:
            path = pending.pop()
            names = self._folders.get(path, _Folder()).draw(rng, ordered)
            for name, node in names.items():
                full = f"{path}/{name}" if path else name
                if node is None:
                    pending.append(full)
                elif not name.startswith("."):  # temporary: a store does not list it
                    found[full.removeprefix(f"{self.root}/")] = content[node]
        return found


def after(ops: Iterable[Op], root: str = "run") -> PowerCut:
    cut = PowerCut(root)
    for op in ops:
        cut.apply(op)
    return cut


# -- the oracle --


async def violation(objects: dict[str, bytes], acked: Iterable[str]) -> str | None:
    """Return what is wrong with a run after a power cut. Return None if every promise holds, also for later saves.

    Every acknowledged checkpoint that no landed PLAN retired exists, and always the newest one. Every checkpoint in
    the log restores to exactly the saved bytes. The log is intact. The next job can save and clean up.
    """
    store = MemoryStore(objects=dict(objects))
    try:
        await create_run(store)
        for log in [RunLog(store), RunLog(store, whole=True)]:
            await log.open()
            if lost := await _lost(log, acked):
                return lost
        return await _goes_on(store, frozenset(log.state.commits))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"


async def _lost(log: RunLog, acked: Iterable[str]) -> str | None:
    state, expected = log.state, [CheckpointId.parse(text) for text in acked]
    if state.damaged:
        return f"log records {state.damaged} are damaged"
    for checkpoint in expected:
        if checkpoint not in state.commits and checkpoint not in state.retired:
            return f"step {checkpoint.step} was acknowledged, but has no record"
    if expected and max(expected) not in state.commits:
        return f"step {max(expected).step}, the newest acknowledged, is not live"
    if expected and state.lineage()[0].checkpoint < max(expected):
        return f"step {state.lineage()[0].step} passes for the newest"
    return await _unsound(log)


async def _unsound(log: RunLog, known: Iterable[CheckpointId] = ()) -> str | None:
    """Return what is wrong with checkpoints that are not `known` to be intact. The newest is compared with the saved
    bytes."""
    for checkpoint in log.state.commits.keys() - set(known):
        problems = await read.verify(log.store, log.state.commits[checkpoint])
        if problems:
            return f"step {checkpoint.step}: {problems[0]}"
    newest = max(log.state.commits, default=None)
    if newest is not None and newest not in known and await restored(log, newest) != payload(newest):
        return f"step {newest.step} restores to other bytes"
    return None


async def _goes_on(store: Store, sound: frozenset[CheckpointId]) -> str | None:
    """The next job recovers, saves and cleans up; all that it then finds is sound."""
    run = await Run.open(store)
    newest = max((checkpoint.step for checkpoint in run.log.state.commits), default=0)
    wrong = await _unsound(run.log, sound)
    if wrong:
        return f"after recovery, {wrong}"
    saved = await run.save(newest + 1)
    await run.retire()
    again = RunLog(store)
    await again.open()
    if again.state.damaged or again.state.lineage()[0].checkpoint != saved:
        return "what was saved after recovery is not the newest"
    wrong = await _unsound(again)
    return f"after clean-up, {wrong}" if wrong else None


def check_disk(disk: RecordingDisk, rng: random.Random, draws: int = 10) -> str | None:
    """The power goes out now: the first violation among some of the disks that this may leave."""
    cut = after(disk.ops)
    for i in range(draws):
        wrong = asyncio.run(violation(cut.draw(rng, ordered=i % 2 == 1), cut.acked))
        if wrong:
            return wrong
    return None


# -- real file systems --

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
_NO_LOG_FLUSH = 2


class Volume:
    """A file system of its own in a file, mounted at `path`."""

    def __init__(self, image: Path, path: Path, kind: str, size_mb: int) -> None:
        self.image, self.path, self.kind = image, path, kind
        path.mkdir()
        if kind != "tmpfs":
            image.touch()
            os.truncate(image, size_mb << 20)
            _command(f"mkfs.{kind}", *(("-q", "-F") if kind == "ext4" else ("-q", "-f")), image)
        self._options = ("-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs") if kind == "tmpfs" else ("-o", "loop", image)
        self.mounted = False
        self.mount()

    def mount(self) -> None:
        _command("mount", *self._options, self.path)
        self.mounted = True

    def unmount(self) -> None:
        """Raise AssertionError if a file is still open here. A thread in its last write may finish first."""
        words = ["umount", str(self.path)]
        assert eventually(lambda: subprocess.run(words, check=False, capture_output=True).returncode == 0, 10.0)
        self.mounted = False

    def cut_power(self) -> None:
        """Nothing that is not on the disk by now gets there; every later operation fails."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)


def _command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=60)


@functools.cache
def why_not(kind: str) -> str | None:
    """Why a file system of this kind cannot be had here."""
    if os.geteuid() != 0:
        return "only root may mount"
    tools = ["mount", "umount"] + ([] if kind == "tmpfs" else [f"mkfs.{kind}"])
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed"
    return None


@contextlib.contextmanager
def volume(folder: Path, kind: str, size_mb: int) -> Iterator[Volume]:
    """A mounted file system; skips the test where there cannot be one."""
    if reason := why_not(kind):
        pytest.skip(f"no {kind} here: {reason}")
    made = None
    try:
        try:
            made = Volume(folder / "image", folder / "volume", kind, size_mb)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no {kind} here: {error.stderr.decode().strip()}")
        yield made
    finally:
        if made is not None:
            made.close()


class CuttingDisk(Disk):
    """Cuts the power of its volume right before the change number `at`. `lazy` leaves out every fsync."""

    def __init__(self, place: Volume, at: int, *, lazy: bool = False) -> None:
        self._place, self._left, self._lazy = place, at, lazy
        self._lock = threading.Lock()

    def _step(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._place.cut_power()

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        if flags & os.O_CREAT:
            self._step()
        return super().open(path, flags, mode)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        self._step()
        return super().pwrite(fd, view, offset)

    def fsync(self, fd: int) -> None:
        self._step()
        if not self._lazy:
            super().fsync(fd)

    def fsync_dir(self, path: str) -> None:
        self._step()
        if not self._lazy:
            super().fsync_dir(path)

    def link(self, source: str, target: str) -> None:
        self._step()
        super().link(source, target)

    def replace(self, source: str, target: str) -> None:
        self._step()
        super().replace(source, target)

    def unlink(self, path: str) -> None:
        self._step()
        super().unlink(path)


@contextlib.asynccontextmanager
async def local(root: str | Path, disk: Disk | None = None, *, direct: bool = True):  # type: ignore[no-untyped-def]
    """A local store that is closed, with every descriptor, when the test is done with it."""
    store = LocalStore(f"file://{root}", writable=True, direct=direct, disk=disk)
    try:
        yield store
    finally:
        await store.aclose()
