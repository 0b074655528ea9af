"""One snapshot on its way into memory: what is copied, how far it has come, and whether it is of one moment.

Pure bookkeeping, shared by the thread that trains, which begins a job, and the staging thread, which does the copying
(`ckpt.core.snapshot.stage`). On an accelerator "how far" means events on streams; nothing here waits for one.

Whether it is of one moment is known when its copies have ended, and before it is sealed: what somebody writes later is
no matter. Three things say it: torch's version counters, which count a write when it has ended; the elements at some
places of the tensors, and the same of their copies (`ckpt.core.state.fingerprint`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter

import torch
from torch import Tensor

from ckpt.core.format.manifest import Attempt
from ckpt.core.ipc.arena import Arena, Label
from ckpt.core.snapshot.awaited_memory import AwaitedMemory
from ckpt.core.snapshot.device import PerDevice, compute_streams, events_behind
from ckpt.core.snapshot.packed import Pack, Packs
from ckpt.core.state.capture import Reading
from ckpt.core.state.fingerprint import Fingerprint
from ckpt.errors import CheckpointError, SaveError
from ckpt.events import log

LITTLE = 1 << 20  # bytes that are cloned in any case: sooner than another thread has woken up
MOST = 64 << 20  # bytes that are cloned at most: on devices, or while memory is being made

_VERSION = attrgetter("_version")


@dataclass(eq=False)
class PendingSnapshot:
    """One snapshot on its way into memory."""

    attempt: Attempt
    reading: Reading
    values: bytes
    busy: str = "wait"  # or "skip"
    deadline: float = float("inf")  # of waiting for a slot, monotonic
    on_end: Callable[[PendingSnapshot], None] = lambda job: None
    memory: AwaitedMemory | None = None  # what it waits for, if its memory may not be there yet
    beside: Callable[[], None] | None = None  # to be done as well while the guarded tensors do not change
    submitted: bool = False  # or just about to be
    begun: bool = False  # by the staging thread
    eager_done: threading.Event = field(default_factory=threading.Event)
    enqueued: threading.Event = field(default_factory=threading.Event)  # all copies are on their stream
    copied: threading.Event = field(default_factory=threading.Event)
    error: CheckpointError | None = None
    written_by_others: list[str] = field(default_factory=list)
    finite: bool | None = None  # what the user said of this step
    slot: tuple[Arena, int] | None = None  # where it is being staged
    order: int = 0  # as in its label
    place: tuple[Arena, int] | None = None  # where it was sealed
    versions: list[int] = field(default_factory=list)
    fingerprints: list[Fingerprint] = field(default_factory=list)  # of what is copied beside training; when it begins
    replicas: Sequence[Fingerprint] = ()  # elements of what other ranks hold as well, as `reading.replicas` has it
    streams: PerDevice = field(default_factory=dict)  # the caller's compute streams
    ready: PerDevice = field(default_factory=dict)  # events on them
    eager: PerDevice = field(default_factory=dict)  # events after the copies of the eager part
    early: list[Pack] = field(default_factory=list)  # of small tensors, gathered before step() returned
    late: list[Pack] = field(default_factory=list)  # and beside training
    taken_early: bool = False  # what may change before the next optimizer step was cloned on its device
    done: PerDevice = field(default_factory=dict)  # events after the copies
    eager_there: threading.Event = field(default_factory=threading.Event)  # devices have reached these events
    all_there: threading.Event = field(default_factory=threading.Event)
    _checking: threading.Lock = field(default_factory=threading.Lock)
    _checked: bool = False

    def __post_init__(self) -> None:
        reading = self.reading
        self.replicas = [one.places.look(self.attempt.step) for one in reading.replicas]
        self.sources = reading.tensors
        self.overlapped = list(compress(reading.counters, reading.guarded))
        self.versions = list(map(_VERSION, self.overlapped))
        self.fingerprints = [spots.look() for spots in reading.spots]
        if reading.layout.accelerated:
            self.streams = compute_streams(reading.tensors)

    def label(self, state: int) -> Label:
        """Of its slot, in this state."""
        layout = self.reading.layout
        size = layout.arrangement.data_size
        return Label(state, self.order, self.attempt, layout.digest, size, len(self.values), time.time(), self.finite)

    def take(self, packs: Packs) -> bool:
        """Clone what may change before the next optimizer step, where it is, if it is little; whether that is done."""
        sizes = self.reading.layout.sizes
        little = LITTLE if self.memory is None else MOST  # a copy takes less time than memory that is being made
        if not self.streams and sum(sizes[n] for n in self.reading.early) > little:
            return False
        if not self.streams:
            self.sources = list(self.sources)
            for n in self.reading.early:
                self.sources[n] = self.sources[n].clone()
            return True
        here = [n for n in self.reading.early if self.sources[n].is_cpu]
        there = [n for n in self.reading.early if not self.sources[n].is_cpu]
        if sum(sizes[n] for n in here) > little or sum(sizes[n] for n in there) > MOST:
            return False
        return self._clone_on_devices(packs, [*here, *there])

    def _clone_on_devices(self, packs: Packs, numbers: list[int]) -> bool:
        """By kernels in the order of the caller's streams: what these do later is no matter, and they wait for
        nothing."""
        try:
            self.early = packs.take(self.reading, late=False)
            for pack in self.early:
                pack.gather(self.sources)
            packed = self.packed
            sources = list(self.sources)
            for n in numbers:
                if n not in packed:
                    sources[n] = sources[n].clone()
        except torch.OutOfMemoryError:
            log.info("the device has no room for a copy of its state: it is copied beside training")
            packs.give_back(self.early)
            self.early = []
            return False
        self.sources, self.taken_early = sources, True
        return True

    def fits(self, arena: Arena) -> bool:
        return arena.fits(self.reading.layout.arrangement.data_size, len(self.values))

    def leave_out(self) -> bool:
        """See `AwaitedMemory`."""
        return self.memory is not None and self.memory.leave_out()

    def mark_ready(self) -> None:
        """What is on the caller's streams by now comes before the copies."""
        self.ready = events_behind(self.streams)

    @property
    def packed(self) -> set[int]:
        """The numbers of tensors that come in packs."""
        return {number for pack in (*self.early, *self.late) for number in pack.numbers}

    def check_memory(self, numbers: Sequence[int]) -> None:
        """Raise SaveError if the memory of one of these sources was freed after it was read."""
        here = [n for n in numbers if self.sources[n].device.type in ("cpu", "cuda")]
        sizes = map(self.reading.layout.sizes.__getitem__, here)
        there = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, map(self.sources.__getitem__, here)))
        if (
            short := next((n for n, size, has in zip(here, sizes, there, strict=True) if has < size), None)
        ) is not None:
            raise SaveError(
                f"step {self.attempt.step} was dropped: the storage of {self.reading.layout.tensors[short].name} was "
                "freed or made smaller while it was copied. Call before_untracked_update() of the Checkpointer first"
            )

    def check_versions(self) -> None:
        """Note what others than optimizers have written to since this job began. Called when all has been copied, or
        before an optimizer is about to change something, whichever comes first: only the first time counts."""
        with self._checking:
            if self._checked:
                return
            self._checked = True
            if list(map(_VERSION, self.overlapped)) != self.versions:
                numbers = compress(range(len(self.reading.guarded)), self.reading.guarded)
                pairs = zip(numbers, self.overlapped, self.versions, strict=True)
                self._note({number for number, tensor, version in pairs if tensor._version != version})
            self.overlapped = []

    def check_sources(self) -> None:
        """Note what is being written to on the host just now, or was since this job began; before any optimizer is."""
        for one in self.fingerprints:
            self._note(one.changed())

    def check_copies(self, slot: Tensor) -> None:
        """Note what is not in its slot (bytes) as it was when this job began."""
        for one in self.fingerprints:
            self._note(one.differing(slot))
        self.fingerprints = []

    def check_whole(self, slot: Tensor) -> None:
        """When all has been copied: it has an error if somebody else has written to it meanwhile."""
        self.check_copies(slot)
        self.check_versions()  # last: a short write that was going on is counted by now
        if self.written_by_others:
            shown = ", ".join(self.written_by_others[:3])
            self.error = SaveError(
                f"step {self.attempt.step} was dropped: {shown} changed outside an optimizer step while it was copied. "
                "From now on this is copied before step() returns"
            )

    def _note(self, numbers: set[int]) -> None:
        specs, guarded = self.reading.layout.tensors, self.reading.guarded
        names = (specs[number].name for number in sorted(numbers) if guarded[number])
        self.written_by_others = list(dict.fromkeys([*self.written_by_others, *names]))

    def release(self) -> None:
        """Nobody waits for it any more, whatever came of it."""
        for event in (self.eager_done, self.enqueued, self.copied):
            event.set()

    def end(self) -> None:
        """Nobody waits for it, and it keeps nothing alive; for the staging thread, which goes on whatever comes."""
        self.sources = []
        self.release()
        try:
            self.on_end(self)
        except Exception:
            log.exception("after step %d was staged", self.attempt.step)

    @property
    def ended(self) -> bool:
        return self.place is not None or self.error is not None
