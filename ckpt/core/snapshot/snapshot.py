"""One snapshot: its contents, the progress of its copy, and the check that it is consistent.

`Snapshot` is a step in a slot, with the handle of its save and the state of its write to each tier. `NewSnapshot` is a
snapshot during its copy. The training thread makes it, and the staging thread copies it (`ckpt.core.snapshot.stage`).
On an accelerator, events on streams track the progress. No code in this module waits for an event.

A snapshot is consistent if only optimizers wrote to its tensors during the copy. This is checked after all copies,
before the slot is sealed, in three ways: by torch's version counters, which count a write when it has ended, by sampled
elements of the tensors, and by the same elements of the copies (`ckpt.core.state.fingerprint`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import compress
from operator import attrgetter

import torch
from torch import Tensor

from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.arena import Arena, Label
from ckpt.core.snapshot.device import Pack, Packs, PerDevice, compute_streams, events_behind
from ckpt.core.state.capture import CapturedState
from ckpt.core.state.fingerprint import Fingerprint
from ckpt.errors import CheckpointError, SaveError
from ckpt.events import log
from ckpt.saving import Save

LITTLE = 1 << 20  # step() itself clones up to this many host bytes, because waking another thread would take longer
MOST = 64 << 20  # maximum bytes that are cloned on devices

_VERSION = attrgetter("_version")
Slot = tuple[Arena, int]


class WriteState(Enum):
    """The state of the write of a snapshot to one tier. `ckpt.core.run.saver` describes the transitions."""

    QUEUED = "queued"  # scheduled, and not yet requested from the writer
    WRITING = "writing"
    COMMITTED = "committed"
    FAILED = "failed"


class Snapshot:
    """A step that is in memory, or is being copied to memory.

    - `save`: the handle returned to the user.
    - `place`: the arena and the slot in which it is sealed; None before it is sealed.
    - `direct`: True if it is written to its nearest tier without using a slot.
    - `writes`: states by tier number; a tier is missing if it neither has the step nor will get it.
    """

    def __init__(self, checkpoint: CheckpointId, save: Save | None = None, place: Slot | None = None) -> None:
        self.checkpoint, self.place = checkpoint, place
        self.save = save or Save(checkpoint.step, str(checkpoint), [])
        self.writes: dict[int, WriteState] = {}
        self.direct = False


class NewSnapshot(Snapshot):
    """A snapshot that this process makes. Its fields are in the order in which they are set."""

    def __init__(
        self,
        checkpoint: CheckpointId,
        captured: CapturedState,
        values: bytes,
        *,
        save: Save | None = None,
        tiers: Sequence[int] = (),
        required: bool = True,
        busy: str = "wait",
        deadline: float = float("inf"),
        finite: bool | None = None,
    ) -> None:
        """- `tiers`: numbers of the tiers that get the snapshot.
        - `required`: True if the user requested it, or a tier has scheduled it.
        - `busy`: "wait" for a free slot until `deadline` (by time.monotonic()), or "skip" the snapshot.
        - `finite`: the argument of step().
        """
        super().__init__(checkpoint, save)
        self.writes = dict.fromkeys(tiers, WriteState.QUEUED)
        self.captured, self.values, self.finite = captured, values, finite
        self.required, self.busy, self.deadline = required, busy, deadline
        self.beside: Callable[[], None] | None = None  # also called during the copy, while no optimizer steps
        self.sources: Sequence[Tensor] = captured.tensors
        self.replicas: Sequence[Fingerprint] = [places.look(checkpoint.step) for _, places in captured.replicas]
        self.overlapped = list(compress(captured.counters, captured.guarded))
        self.versions = list(map(_VERSION, self.overlapped))
        self.fingerprints: list[Fingerprint] = [spots.look() for spots in captured.spots]  # of tensors to copy later
        self.streams: PerDevice = (
            compute_streams(captured.tensors) if captured.layout.accelerated else {}
        )  # streams of the caller
        self.ready: PerDevice = {}  # events on the caller's streams, which copies wait for
        self.early: list[Pack] = []  # small tensors, gathered before step() returned
        self.taken_early = False  # True if tensors that may change before the next optimizer step were cloned
        self.submitted = False  # True once it is submitted, or about to be
        self.begun = False  # True once the staging thread has begun its copy
        self.slot: Slot | None = None  # the slot in which it is being staged
        self.order = 0  # the order in the label of its slot
        self.eager: PerDevice = {}  # events after copies of tensors that may change before the next optimizer step
        self.eager_done = threading.Event()  # set when step() may return
        self.late: list[Pack] = []  # small tensors, gathered during training
        self.done: PerDevice = {}  # events after all copies
        self.enqueued = threading.Event()  # set when all copies are queued on their streams
        self.all_there = threading.Event()  # set when devices have reached `done`
        self.copied = threading.Event()  # set when the snapshot is sealed, or has failed
        self.error: CheckpointError | None = None
        self.written_by_others: list[str] = []
        self._checking = threading.Lock()
        self._checked = False

    @property
    def stored(self) -> bool:
        """Return True if the snapshot was written to its nearest tier without using a slot."""
        return self.direct and self.copied.is_set() and self.error is None

    def label(self, state: int) -> Label:
        """Return the label that its slot has in this state."""
        layout = self.captured.layout
        size = layout.arrangement.data_size
        return Label(
            state, self.order, self.checkpoint, layout.digest, size, len(self.values), time.time(), self.finite
        )

    def clone_early(self, packs: Packs) -> bool:
        """Clone tensors that may change before the next update, on their device. Return False if they are too large.

        On devices, kernels on the caller's streams clone them, so later kernels on these streams cannot change them.
        """
        sizes, sources = self.captured.layout.sizes, list(self.sources)
        sums = {True: 0, False: 0}  # bytes on the host, and on devices
        for n in self.captured.early:
            sums[sources[n].is_cpu] += sizes[n]
        if sums[True] > LITTLE or sums[False] > MOST:
            return False
        try:
            if self.streams:
                self.early = packs.lend(self.captured, late=False)
            for pack in self.early:
                pack.gather(sources)
            packed = self.packed
            for n in self.captured.early:
                if n not in packed:
                    sources[n] = sources[n].clone()
        except torch.OutOfMemoryError:
            log.info("the device has no memory for a copy of the state: copying it in the background instead")
            packs.give_back(self.early)
            self.early = []
            return False
        self.sources, self.taken_early = sources, bool(self.streams)
        return True

    def mark_ready(self) -> None:
        """Make the copies wait for the work that is on the caller's streams now."""
        self.ready = events_behind(self.streams)

    @property
    def packed(self) -> set[int]:
        """Return the numbers of the tensors that are copied in packs."""
        return {number for pack in (*self.early, *self.late) for number in pack.numbers}

    def check_memory(self, numbers: Sequence[int]) -> None:
        """Raise SaveError if the memory of one of the tensors `numbers` was freed after the state was read."""
        here = [n for n in numbers if self.sources[n].device.type in ("cpu", "cuda")]
        sizes = map(self.captured.layout.sizes.__getitem__, here)
        there = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, map(self.sources.__getitem__, here)))
        for n, size, has in zip(here, sizes, there, strict=True):
            if has < size:
                name = self.captured.layout.tensors[n].name
                raise SaveError(
                    f"step {self.checkpoint.step} was dropped: the memory of {name} was freed or shrunk while it "
                    "was copied. Call before_untracked_update() of the Checkpointer first"
                )

    def check_versions(self) -> None:
        """Record tensors that code other than optimizers has written to since this snapshot began. Only the first call,
        after the last copy or before an optimizer changes anything, counts."""
        with self._checking:
            if self._checked:
                return
            self._checked = True
            if list(map(_VERSION, self.overlapped)) != self.versions:
                numbers = (number for number, guarded in enumerate(self.captured.guarded) if guarded)
                pairs = zip(numbers, self.overlapped, self.versions, strict=True)
                self._note({number for number, tensor, version in pairs if tensor._version != version})
            self.overlapped = []

    def check_sources(self) -> None:
        """Record host tensors that were written to since this snapshot began. Call it before any optimizer steps."""
        for one in self.fingerprints:
            self._note(one.changed())

    def check_copies(self, slot: Tensor) -> None:
        """Record tensors whose copies in the slot (bytes) differ from the samples taken when this snapshot began."""
        for one in self.fingerprints:
            self._note(one.differing(slot))
        self.fingerprints = []

    def check_whole(self, slot: Tensor) -> None:
        """Set `error` if code other than optimizers wrote to the tensors during the copy. Call it after all copies."""
        self.check_copies(slot)
        self.check_versions()  # last, so that a short write that was in progress has been counted
        if self.written_by_others:
            self.error = self._torn("From now on, step() copies it before it returns")

    def check_live(self) -> None:
        """Raise SaveError if any code, including an optimizer, wrote to the tensors since this snapshot began. Call it
        when all data is stored."""
        self.check_sources()
        self.check_versions()
        if self.written_by_others:
            raise self._torn("Do not change it while it is written")

    def _torn(self, advice: str) -> SaveError:
        shown = ", ".join(self.written_by_others[:3])
        return SaveError(
            f"step {self.checkpoint.step} was dropped: {shown} changed outside an optimizer step while it was copied. "
            f"{advice}"
        )

    def _note(self, numbers: set[int]) -> None:
        specs, guarded = self.captured.layout.tensors, self.captured.guarded
        names = (specs[number].name for number in sorted(numbers) if guarded[number])
        self.written_by_others = list(dict.fromkeys([*self.written_by_others, *names]))

    def release(self) -> None:
        """Wake all threads that wait for this snapshot."""
        for event in (self.eager_done, self.enqueued, self.copied):
            event.set()

    @property
    def ended(self) -> bool:
        return self.place is not None or self.error is not None
