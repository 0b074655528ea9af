"""The arena: shared memory with the snapshots, which outlives the trainer.

An arena is a memfd that is passed as a descriptor, so no /dev/shm quota applies, and the memory is freed when all
processes that map it have ended. The pages of a slot are allocated before the slot is used, because the first access to
a new page can take thirty times as long as later accesses. The size is sealed, so that no reader can get SIGBUS. The
first slot is `ready` when the arena is passed on. The process that created the arena makes the other slots ready while
the first slot is filled. The trainer may add slots later, up to `most`.

    page 0       magic, geometry, number of slots; the robust mutexes of the trainer's staging thread and of the process
                 that keeps the arena
    page 1       the slot table: a `Label` for each slot, with a sequence number that is odd while the label changes
    2 MiB        slot 0, slot 1, ...

A slot is EMPTY, FILLING or SEALED. While the trainer lives, only one of its threads changes the state of slots, and
this thread owns the first mutex. When the thread dies, for any reason, the kernel gives that mutex to a waiter and
reports the death (EOWNERDEAD) before it frees the memory of the process. Measured delay after SIGKILL: 0.1-5 ms at any
memory size. A pidfd or the end of a pipe reported the death of a process with 3 GB of resident memory 1.8 s later. The
mutexes use glibc through ctypes, because Python has no such lock.

Damage is detected by checksums of geometry, counts and labels, and by the kinds of the mutexes.

Numbers that another process may read during a change are aligned words of 8 bytes, each written in one store.
`struct.pack_into` is not used for them, because it first writes zeros, which a reader on another core may see.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path

from ckpt.core.format.layout import pages
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.heartbeat import number_in_proc
from ckpt.errors import CorruptError
from ckpt.store import PAGE

PROC, SYS = Path("/proc"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # without a limit, cgroup v1 shows 2**63 less a page
FREE_SHARE = 0.8  # share of the free memory that slots may use
SPARED = -500  # oom_score_adj, from -1000 (never killed) to 1000 (killed first)


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory of the machine or of the tightest cgroup, in bytes. `where`: "machine" or the cgroup's folder."""

    available: int
    total: int
    where: str

    @property
    def share(self) -> float:
        return self.available / self.total if self.total else 0.0


def room(proc: Path = PROC, sys: Path = SYS, pid: int | str = "self") -> MemoryRoom:
    """Return the memory that a process can allocate without swapping, in the machine or in the tightest cgroup around
    it. Any ancestor may have a limit, in v1 or v2 (Slurm limits the job and the step, Kubernetes the container). Kernel
    files that are missing or cannot be parsed are ignored."""
    rooms = [_of_machine(proc)]
    for chain in cgroup_chains(proc, sys, pid):
        rooms += [found for folder in chain if (found := _of_cgroup(folder))]
    return min(rooms, key=lambda one: one.available)


def spare_from_oom(pid: int | str = "self", *, proc: Path = PROC, score: int = SPARED) -> bool:
    """Make the kernel kill other processes first. Return False if the necessary privilege is missing.

    Killing the writer would free little memory, because it shares its snapshots with the trainer. It must save them.
    """
    file = proc / str(pid) / "oom_score_adj"
    with contextlib.suppress(OSError, ValueError):
        if int(file.read_bytes()) > score:
            file.write_text(f"{score}\n")
        return int(file.read_bytes()) <= score
    return False


def _of_machine(proc: Path) -> MemoryRoom:
    found = read_table(proc / "meminfo")
    total, available = found.get("MemTotal:", 0) << 10, found.get("MemAvailable:")
    if total <= 0 or available is None:  # use system calls, which do not count reclaimable caches
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryRoom(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page, "machine")
    return MemoryRoom(min(available << 10, total), total, "machine")


def _of_cgroup(folder: Path) -> MemoryRoom | None:
    """Return the memory left in a cgroup, or None without a limit. memory.high counts, because it throttles."""
    files = [folder / name for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limit = min((found for file in files if (found := read_number(file)) is not None), default=NO_LIMIT)
    if limit >= NO_LIMIT:
        return None
    used = read_number(folder / "memory.current")
    if used is None and (used := read_number(folder / "memory.usage_in_bytes")) is None:
        return None
    stat = read_table(folder / "memory.stat")  # in v1, only the `total_` values include child cgroups
    cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return MemoryRoom(max(0, min(limit - used + cache, limit)), limit, str(folder))


def cgroup_chains(proc: Path, sys: Path, pid: int | str, controller: str = "memory") -> list[list[Path]]:
    """Return the cgroup folders of a process for v1 and for v2, from its own cgroup to the root of the mount."""
    paths = {}
    for line in read(proc / str(pid) / "cgroup").splitlines():
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if controller.encode() in controllers.split(b","):
            paths[controller] = os.fsdecode(path)
        elif number == b"0" and not controllers:
            paths["unified"] = os.fsdecode(path)
    unified = sys / "unified" if os.path.isdir(sys / "unified") else sys
    roots = {controller: sys / controller, "unified": unified}
    return [_chain(root, paths.get(name, "/")) for name, root in roots.items() if name in paths or not paths]


def _chain(root: Path, path: str) -> list[Path]:
    """Return the existing folders from a cgroup to the root. In a container, the root may be the container's cgroup
    although the path begins at the machine's root, so use the longest suffix of the path that exists."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # the cgroup is not visible in this container
        parts = []
    while parts and not os.path.isdir(root.joinpath(*parts)):
        parts.pop(0)
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def read(file: Path) -> bytes:
    with contextlib.suppress(OSError, ValueError):
        return file.read_bytes()
    return b""


def read_number(file: Path) -> int | None:
    """Return the number in a file, or None for a word like "max" or a missing file."""
    text = read(file).strip()
    return int(text) if text.isdigit() and len(text) < 20 else None


def read_table(file: Path) -> dict[str, int]:
    """Parse lines that have a name, a number and possibly a unit. Other lines are ignored."""
    found = {}
    for line in read(file).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit() and len(words[1]) < 20:
            found[words[0].decode("ascii", "replace")] = int(words[1])
    return found


# -- the mutex --


_SHARED = 1
_ROBUST = 1
_KIND = 16  # offset of the kind in a glibc mutex, on 64-bit machines
_OWNER = 0x3FFFFFFF  # mask of the first word of a mutex, which gives the id of the owning thread

_libc = ctypes.CDLL(None)  # releases the GIL while it waits


class Got(Enum):
    """The result of an attempt to lock: the mutex was free, its owner had died, or it is busy."""

    FREE = "free"
    OWNER_DIED = "owner died"
    BUSY = "busy"


class RobustMutex:
    """A mutex at `offset` of a shared mapping. The thread that locked it must unlock it before the mapping ends."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._anchor = ctypes.c_char.from_buffer(memory, offset)  # keeps the mapping alive
        self._address = ctypes.c_void_p(ctypes.addressof(self._anchor))

    def initialise(self) -> None:
        """Initialize the mutex. Only the process that creates the memory calls this, once."""
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._address, attributes))

    def is_sound(self) -> bool:
        """Return False if damage to the memory has changed the kind of the mutex. glibc must not use such a mutex,
        because it would end the process."""
        return self._word(_KIND) == _sound_kind()

    def is_orphaned(self) -> bool:
        """Return True if the owning thread does not exist, so that the mutex will never be unlocked. This shows damage
        to the memory, because the kernel releases the mutexes of a dying thread before it removes the thread."""
        if number_in_proc(os.getpid()) != os.getpid():
            return False  # /proc belongs to another PID namespace, and lists threads by other ids
        owner = self._word(0) & _OWNER
        return bool(owner) and not os.path.exists(f"/proc/{owner}") and owner == self._word(0) & _OWNER

    def _word(self, offset: int) -> int:
        return ctypes.c_uint32.from_address((self._address.value or 0) + offset).value

    def lock(self) -> Got:
        """Wait until the owner unlocks the mutex or dies."""
        return self._got(_libc.pthread_mutex_lock(self._address))

    def try_lock(self) -> Got:
        return self._got(_libc.pthread_mutex_trylock(self._address))

    def unlock(self) -> None:
        _check(_libc.pthread_mutex_unlock(self._address))

    def _got(self, code: int) -> Got:
        if code == errno.EBUSY:
            return Got.BUSY
        if code == errno.EOWNERDEAD:
            _check(_libc.pthread_mutex_consistent(self._address))  # now this thread owns it, and it is usable again
            return Got.OWNER_DIED
        _check(code)
        return Got.FREE


@lru_cache(1)
def _sound_kind() -> int:
    mutex = RobustMutex(mmap.mmap(-1, mmap.PAGESIZE), 0)
    mutex.initialise()
    return mutex._word(_KIND)


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code), "robust mutex")


# -- the arena --


EMPTY, FILLING, SEALED = 0, 1, 2
MAX_SLOTS = 16

_MAGIC = b"EVSTEP02"
_HEADER = struct.Struct("<8sIIQ16s")  # magic, checksum of the rest, maximum slots, slot size, id
_COUNTS = 40  # offset of a word with the number of slots and of ready slots (16 bits each) and a checksum
_CHECKSUM = struct.Struct("<I")
_WORD = 8  # bytes
_LABEL = struct.Struct("<IIQQQ8s32sQQd")  # state, checksum of the rest, then the other fields of `Label`
_STATE, _FINITE = 0xFF, {0: None, 0x100: False, 0x200: True}  # state and `finite` share a field
_MUTEX = 256  # a glibc mutex needs 40 bytes on x86-64 and 48 on arm64
_KEEPER = 512
LOCK = 64 << 20  # bytes of a slot that one call page-locks for a device; no copy may cross such a boundary
_TABLE = PAGE
_ENTRY = PAGE // MAX_SLOTS
_LOOKS, _LOOK_S = 20, 0.001  # retries and pause while a label changes, after which the change counts as abandoned
_DATA = 2 << 20
_HUGE = 2 << 20
_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
_PREFERRED = 1  # MPOL_PREFERRED
_POPULATE_WRITE = 23
_SEALS = 0x0001 | 0x0002 | 0x0004  # no further seals, no shrinking, no growing
_ADD_SEALS = 1033
_CHUNK = 64 << 20
_TOUCHING_THREADS = 2
_PIECE = 8 << 20  # bytes allocated in one call, during which other threads cannot map memory
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02


@dataclass(frozen=True, slots=True)
class Label:
    """The content of a slot. `order`: increases with every snapshot. `layout`: digest of its layout. Sizes are in
    bytes, times in seconds. `finite`: whether the loss was finite, as reported by the user; None if unknown."""

    state: int
    order: int = 0
    checkpoint: CheckpointId | None = None
    layout: str = ""
    data_size: int = 0
    values_size: int = 0
    time: float = 0.0
    finite: bool | None = None


class Arena:
    """A mapped arena. `create` makes a new arena, `attach` maps an arena of another process."""

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        """Raises CorruptError if the header is damaged."""
        self.fd, self.memory = fd, memory
        self._words = memoryview(memory).cast("Q")
        magic, checksum, self.most, self.slot_size, self.id = _HEADER.unpack_from(memory, 0)
        if magic != _MAGIC or checksum != zlib.crc32(memory[12 : _HEADER.size]):
            raise CorruptError("the header of the shared memory is damaged, or of another version")
        self._known = (0, 0)  # numbers of slots and of ready slots when they were last read
        self._known_word = -1
        possible = 0 < self.ready <= self.slots <= self.most <= MAX_SLOTS
        if not possible or _DATA + self.most * self.slot_size > len(memory):
            raise CorruptError("the header of the shared memory is damaged: it counts impossible slots")
        self.mutex = RobustMutex(memory, _MUTEX)
        self._keeper, self._asking = RobustMutex(memory, _KEEPER), threading.Lock()
        self.view = memoryview(memory)

    @classmethod
    def create(
        cls,
        slots: int,
        slot_size: int,
        *,
        most: int | None = None,
        ready: int | None = None,
        node: int | None = None,
    ) -> Arena:
        """Make and seal an arena, and allocate the memory of its first `ready` slots (default: all). Raise MemoryError
        now if too little memory is free, so that no process is killed later.

        most: number of slots that the arena may have later, default `slots`
        node: the preferred NUMA node
        """
        slot_size = -(-slot_size // _HUGE) * _HUGE if slot_size > _HUGE else pages(slot_size)
        most, ready = most or slots, slots if ready is None else ready
        size = _DATA + most * slot_size
        fd = os.memfd_create("ckpt-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)  # fails if the kernel has disabled huge pages for shared memory
            if node is not None:
                _prefer(memory, node)
            _populate(fd, memory, _DATA + ready * slot_size)
            fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
            _HEADER.pack_into(memory, 0, _MAGIC, 0, most, slot_size, os.urandom(16))
            _CHECKSUM.pack_into(memory, 8, zlib.crc32(memory[12 : _HEADER.size]))
            _set_counts(memoryview(memory).cast("Q"), slots, ready)
            arena = cls(fd, memory)
            arena.mutex.initialise()
            arena._keeper.initialise()
            for slot in range(most):
                arena.set_label(slot, Label(EMPTY))  # because zeros are not a valid label
            return arena
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map an arena received as a descriptor. Forked children do not inherit the mapping. Raises CorruptError if the
        header is damaged."""
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        memory.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # map huge pages as huge pages
        arena = cls(fd, memory)
        if not (arena.mutex.is_sound() and arena._keeper.is_sound()):
            raise CorruptError("the header of the shared memory is damaged: its locks are no longer valid")
        return arena

    def close(self) -> None:
        """Close the descriptor. The memory is unmapped when its last view is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- the process that keeps it --

    def keep(self) -> ArenaKeeper:
        """Show other processes that this process keeps the arena, until the keeper is released or this process ends."""
        return ArenaKeeper(self._keeper)

    def is_kept(self) -> bool:
        """Return True if another process keeps this arena now. The kernel releases the mutex when that process dies."""
        with self._asking:  # otherwise two threads of this process would mistake each other for a keeper
            if self._keeper.try_lock() is Got.BUSY:
                return True
            self._keeper.unlock()
            return False

    # -- slots --

    @property
    def slots(self) -> int:
        """Return the number of slots, including those that are not ready yet."""
        return self._counts()[0]

    @property
    def ready(self) -> int:
        """Return the number of usable slots, whose memory is allocated."""
        return self._counts()[1]

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of slots and of ready slots. If they are damaged now, return the values read before."""
        raw = self._words[_COUNTS // _WORD]
        if raw != self._known_word and raw >> 32 == zlib.crc32(_CHECKSUM.pack(raw & 0xFFFFFFFF)):
            self._known, self._known_word = (raw & 0xFFFF, raw >> 16 & 0xFFFF), raw
        return self._known

    def make_ready(self) -> None:
        """Allocate the memory of the other slots, one after the other, in the process that keeps the arena. If there is
        too little for a slot, drop it and those after it, and raise MemoryError."""
        while self.ready < self.slots and self.fd >= 0:
            slot = self.ready
            try:
                if self._allocate(slot):
                    _set_counts(self._words, self.slots, slot + 1)
            except MemoryError:
                _set_counts(self._words, slot, slot)
                raise

    def add_slot(self) -> None:
        """Add one slot, in the process that fills the slots. Raise MemoryError if the arena has `most` slots, or if a
        slot does not fit into the free memory. The slot counts once all its memory is allocated, so that a kill leaves
        no slot that is not ready."""
        free, slot = room().available, self.slots
        if slot >= self.most or self.slot_size > FREE_SHARE * free:
            raise MemoryError(f"{self.slot_size / 2**20:.0f} MiB do not fit into {free / 2**20:.0f} MiB of free memory")
        if self._allocate(slot):
            _set_counts(self._words, slot + 1, slot + 1)

    def _allocate(self, slot: int) -> bool:
        """Allocate the memory of a slot. Return False if the arena is closed during the call. Raise MemoryError."""
        for at in range(0, self.slot_size, _PIECE):
            if self.fd < 0:
                return False
            _take(self.fd, self.memory, _DATA + slot * self.slot_size + at, min(_PIECE, self.slot_size - at))
        return True

    def touch(self, slot: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Enter the pages of a slot into this process's page table, in large pieces and without the GIL.

        The pages are allocated already, but the first store to each page would still cause a page fault. For 1.5 GiB,
        the faults cost 0.3 s of CPU time, and this call costs 0.1 s. Kernels before 5.14 do nothing. `wanted` is called
        before each piece. If it returns False, the remaining pieces are skipped.
        """
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + _DATA + slot * self.slot_size
        for at in range(0, self.slot_size, _PIECE):
            length = min(_PIECE, self.slot_size - at)
            if not wanted() or _libc.madvise(ctypes.c_void_p(start + at), ctypes.c_size_t(length), _POPULATE_WRITE):
                return

    def data(self, slot: int, size: int | None = None) -> memoryview:
        """Return the page-aligned bytes of a slot."""
        start = _DATA + slot * self.slot_size
        return self.view[start : start + (self.slot_size if size is None else size)]

    def values(self, slot: int, label: Label) -> memoryview:
        """Return the plain values of a slot, which follow its data."""
        start = pages(label.data_size)
        return self.data(slot)[start : start + label.values_size]

    def fits(self, data_size: int, values_size: int) -> bool:
        return bool(pages(data_size) + values_size <= self.slot_size)

    def label(self, slot: int) -> Label | None:
        """Return the label of a slot, or None while the label is changing. Raises CorruptError if it is damaged."""
        at = _TABLE + slot * _ENTRY
        before = self._words[at // _WORD]
        raw = bytes(self.memory[at + 8 : at + 8 + _LABEL.size])
        if before % 2 or self._words[at // _WORD] != before:
            return None
        return self._parsed(slot, raw)

    def settled(self, slot: int) -> Label:
        """Return the label of a slot, after waiting for a change to end. If the trainer died during the change, or the
        sequence number is damaged, return the stored label if it is intact, because it is stored before and after the
        slot changes. Raises CorruptError."""
        for _ in range(_LOOKS):
            if (label := self.label(slot)) is not None:
                return label
            time.sleep(_LOOK_S)
        at = _TABLE + slot * _ENTRY
        return self._parsed(slot, bytes(self.memory[at + 8 : at + 8 + _LABEL.size]))

    def damage(self) -> list[str]:
        """Return a description of each slot whose label is damaged."""
        found = []
        for slot in range(self.slots):
            try:
                self.settled(slot)
            except CorruptError as error:
                found.append(f"{error}: the snapshot in it, perhaps a newer step, is lost")
        return found

    def _parsed(self, slot: int, raw: bytes) -> Label:
        state, checksum, order, term, step, nonce, layout, data, values, at = _LABEL.unpack(raw)
        if checksum != zlib.crc32(raw[8:], state) or pages(data) + values > self.slot_size:
            raise CorruptError(f"slot {slot} of the shared memory is damaged")
        if state == EMPTY:
            return Label(EMPTY)
        checkpoint, finite = CheckpointId(term, step, nonce.decode()), _FINITE.get(state & ~_STATE)
        return Label(state & _STATE, order, checkpoint, layout.hex(), data, values, at, finite)

    def set_label(self, slot: int, label: Label) -> None:
        """Set the label of a slot. Only the thread that owns `mutex` may call this."""
        at = _TABLE + slot * _ENTRY
        number = self._words[at // _WORD] | 1
        self._words[at // _WORD] = number
        checkpoint = label.checkpoint or CheckpointId(0, 0, "0" * 8)
        fields = (
            label.order,
            checkpoint.term,
            checkpoint.step,
            checkpoint.nonce.encode(),
            bytes.fromhex(label.layout),
            label.data_size,
            label.values_size,
            label.time,
        )
        state = label.state | next(code for code, finite in _FINITE.items() if finite is label.finite)
        rest = _LABEL.pack(state, 0, *fields)[8:]
        _LABEL.pack_into(self.memory, at + 8, state, zlib.crc32(rest, state), *fields)
        self._words[at // _WORD] = (number + 1) % (1 << 64)  # a damaged number may be the largest possible

    def give_up(self, slot: int) -> int:
        """Empty a slot, free its pages and return the number of freed bytes. Only for the thread that owns `mutex`."""
        self.set_label(slot, Label(EMPTY))
        start = _DATA + slot * self.slot_size
        flags = _KEEP_SIZE | _PUNCH_HOLE
        failed: int = _libc.fallocate(self.fd, flags, ctypes.c_long(start), ctypes.c_long(self.slot_size))
        return 0 if failed else self.slot_size

    def sealed(self) -> list[tuple[int, Label]]:
        """Return the slots with a complete snapshot, newest first. Slots with damaged labels are skipped."""
        return self.labels(SEALED)

    def labels(self, state: int) -> list[tuple[int, Label]]:
        """Return the slots in this state, newest first."""
        found: list[tuple[int, Label]] = []
        for slot in range(self.slots):
            with contextlib.suppress(CorruptError):
                if (label := self.settled(slot)).state == state:
                    found.append((slot, label))
        return sorted(found, key=lambda item: -item[1].order)


def _set_counts(words: memoryview, slots: int, ready: int) -> None:
    counts = slots | ready << 16
    words[_COUNTS // _WORD] = counts | zlib.crc32(_CHECKSUM.pack(counts)) << 32


class ArenaKeeper:
    """A thread that owns a mutex while this process keeps an arena. `begun`: set once the thread owns the mutex, which
    another process may own until then."""

    def __init__(self, mutex: RobustMutex) -> None:
        self.begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, args=(mutex,), name="ckpt-keep", daemon=True)
        self._thread.start()

    def _keep(self, mutex: RobustMutex) -> None:
        mutex.lock()
        self.begun.set()
        self._over.wait()
        mutex.unlock()

    def let_go(self, timeout_s: float = 0.0) -> None:
        """Release the mutex. Wait up to `timeout_s` until it is free, unless another process still owns it."""
        self._over.set()
        if self.begun.is_set():
            self._thread.join(timeout_s)


def _prefer(memory: mmap.mmap, node: int) -> None:
    """Prefer this NUMA node for pages that any process touches from now on. If a container forbids this call, pages
    come from the node of the thread that touches them."""
    number = _MBIND.get(platform.machine())
    if number is not None and 0 <= node < 64:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        nodes = ctypes.c_ulong(1 << node)
        _libc.syscall(
            number, ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), _PREFERRED, ctypes.byref(nodes), 65, 0
        )


def _populate(fd: int, memory: mmap.mmap, size: int) -> None:
    """Touch the first `size` bytes now. With two cores, two threads do this: 9.5 GB/s instead of 5.4 GB/s."""

    def take(start: int) -> None:
        _take(fd, memory, start, min(_CHUNK, size - start))

    with ThreadPoolExecutor(min(_TOUCHING_THREADS, len(os.sched_getaffinity(0))), "ckpt-touch") as pool:
        list(pool.map(take, range(0, size, _CHUNK)))


def _take(fd: int, memory: mmap.mmap, start: int, length: int) -> None:
    """Touch bytes that no process uses yet, because reserving alone does not give huge pages. Raise MemoryError if too
    little memory is free."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start
    if not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _POPULATE_WRITE):
        return
    try:
        os.posix_fallocate(fd, start, length)  # on an old kernel, reserve the bytes, then touch them
    except OSError as error:
        raise MemoryError(f"no memory for an arena of {len(memory) / 2**30:.1f} GiB: {error}") from None
    for page in range(start, start + length, PAGE):
        memory[page] = 0
