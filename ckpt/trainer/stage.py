"""Live tensors into a slot, beside training.

One thread owns the arena: it holds the robust mutex, makes all transitions of slots, and copies. A `PendingSnapshot`
(`job.py`) is one snapshot; any thread may submit one. What the caller waits for is short: everything that may change
before the next optimizer step has been taken. If that is little, and in host memory, the caller clones it and waits for
nobody; else it waits for `eager_done`, when it is in the slot. The rest is copied during the next forward and backward,
and
`before_update`, called from a hook before any optimizer changes anything, waits for that.

On an accelerator the copies run on a stream of their own, which first waits for the compute stream; before an update
the compute stream waits for the copy, and the host does not.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ckpt.errors import CheckpointError, ClosedError, DeadlineError, SaveError, SkippedError, WriterError
from ckpt.events import log, point
from ckpt.format.layout import Layout, pages
from ckpt.ipc.arena import EAGER, EMPTY, FILLING, SEALED, Arena, Label
from ckpt.ipc.mutex import Got
from ckpt.state.tensors import TORCH_DTYPE, device_in_use
from ckpt.trainer.profiler import traced
from ckpt.trainer.snapshot import PendingSnapshot, event_behind, reached
from ckpt.trainer.unchanged import Frozen

LEAST_SLOTS = 2  # one to hold the newest snapshot, one to take the next
POLL_S = 0.001  # between two looks at what a device is copying
PORTABLE = 1  # page-locked for every device, not only for the one that is current
LARGE = 1 << 20  # bytes from which one memcpy, without the GIL, beats a batched copy

Pair = tuple[Tensor, Tensor, int]  # where a tensor goes, what goes there, and which one of the layout it is


def _end(job: PendingSnapshot) -> None:
    job.release()
    if job.place is None:
        job.on_end(job)


class Stager:
    """The staging thread of one trainer."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pinned: dict[tuple[bytes, int], int] = {}
        self._holds = 0  # above 0 while a predecessor may still write into an adopted arena
        self._arena: Arena | None = None
        self._views: dict[tuple[bytes, int], tuple[Layout, list[Tensor]]] = {}
        self._frozen = Frozen()
        self._streams: dict[torch.device, Any] = {}
        self._registered: list[int] = []
        self._refused = False  # the driver would not page-lock this arena
        self._touched = threading.Event()
        self._toucher: threading.Thread | None = None
        self._flying: deque[PendingSnapshot] = deque()  # all queued, and not all copied; for the staging thread only
        self._pending: PendingSnapshot | None = None
        self._unchecked: list[PendingSnapshot] = []  # older ones that no optimizer has come after, not sealed yet
        self._copying: PendingSnapshot | None = None  # still read by a device: every stream that updates waits for it
        self._gate = threading.Event()  # not set while something is copied that no optimizer may change
        self._gate.set()
        self._order = 0
        self._stopped = False  # nobody would do what is queued
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="ckpt-stage", daemon=True)
        self._thread.start()

    # -- from any thread --

    @property
    def arena(self) -> Arena | None:
        return self._arena

    @property
    def skipped_bytes(self) -> int:
        """How much was not copied so far, since it was in its slot already; see `ckpt.trainer.unchanged`."""
        return self._frozen.skipped_bytes

    def submit(self, job: PendingSnapshot) -> None:
        """Begin a snapshot and wait until its eager part has been taken, or it has failed."""
        self._check_running()
        before, self._pending = self._pending, job
        try:
            taken = (before is None or before.copied.is_set()) and job.clone_eager()  # else they would pile up
            job.submitted = True
            self._queue.put(lambda: self._stage(job))
            if not taken:
                job.eager_done.wait()
        except BaseException:  # Ctrl-C: whether it was begun or not, nobody shall wait for it
            job.error = job.error or SaveError(f"saving step {job.attempt.step} was interrupted")
            self._queue.put(lambda: _end(job))
            raise
        if before is not None:  # all of it is queued at least, since jobs are done in turn
            self._line_up(before)
            self._unchecked = [one for one in (*self._unchecked, before) if not one.ended]

    def _check_running(self) -> None:
        if self._stopped:
            raise ClosedError("this Checkpointer is closed: make a new one")

    def postpone(self, job: PendingSnapshot) -> None:
        """Copy of a job only what cannot be had later; `complete` may ask for the rest."""
        self._check_running()
        job.postponed = True
        self._queue.put(lambda: self._stage(job))
        job.eager_done.wait()

    def complete(self, job: PendingSnapshot, untouched: Callable[[], bool], timeout_s: float) -> bool:
        """The rest of a job that was postponed, while the training thread is elsewhere; whether it is whole now."""
        done = self.undisturbed(lambda: self._complete(job), untouched, timeout_s)
        return done and job.place is not None

    def undisturbed(self, work: Callable[[], None], untouched: Callable[[], bool], timeout_s: float) -> bool:
        """Do something in the staging thread before any optimizer goes on; False if one may have begun already.

        From the moment `_gate` is there, an optimizer waits before it changes anything. One that began before that has
        been counted, which is what `untouched` looks at.
        """
        gate = threading.Event()
        self._gate = gate
        if not untouched():
            gate.set()
            return False

        def run() -> None:
            try:
                work()
            finally:
                gate.set()

        self._queue.put(run)
        return gate.wait(timeout_s)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No optimizer changes anything meanwhile, but for one that has begun before and has been counted."""
        gate = self._gate = threading.Event()
        try:
            yield
        finally:
            gate.set()

    def give_up_slot(self, least: int = LEAST_SLOTS) -> int:
        """Return the memory of one slot to the system, for as long as this arena lives, unless only `least` are left;
        how many bytes, perhaps 0."""
        given: list[int] = []

        def give() -> None:
            arena = self._arena
            if arena is None or self._registered:  # what a device has page-locked cannot be given back
                return
            with self._changed:
                pinned = {slot for slot in range(arena.slots) if self._pinned.get((arena.id, slot), 0) > 0}
                slot = self._free(arena)
            if slot is None or arena.slots - len(pinned) <= least:
                return
            self.pin(arena, slot)
            self._frozen.forget(slot)
            self._stop_touching()
            given.append(arena.give_up(slot))

        self.do(give)
        return sum(given)

    def before_update(self, timeout_s: float = 600.0) -> float:
        """Called before an optimizer changes anything; returns the seconds it waited.

        A copy that does not end in time costs the snapshot, never the training.
        """
        self._line_up_again()
        job, gate = self._pending, self._gate
        if (job is None and gate.is_set()) or threading.current_thread() is self._thread:
            return 0.0
        started = time.perf_counter()
        gate.wait(timeout_s)
        job = self._pending
        if job is None:
            return time.perf_counter() - started
        if job.streams:
            in_time = job.enqueued.wait(timeout_s)
            self._line_up(job)
        else:
            in_time = job.copied.wait(timeout_s)
        if not in_time:
            job.error = DeadlineError(f"copying step {job.attempt.step} took more than {timeout_s:g} s")
        for one in (*self._unchecked, job):
            if not one.ended:  # by a device, which has not come so far; what is counted from now on is the update
                one.check_versions()
        self._pending, self._unchecked = None, []
        return time.perf_counter() - started

    def _line_up(self, job: PendingSnapshot) -> None:
        """What the caller queues from now on, on its current streams, comes after the copies of this job."""
        for device, event in job.done.items():
            torch.get_device_module(device).current_stream(device).wait_event(event)
        self._copying = job if job.done else None

    def _line_up_again(self) -> None:
        """Another optimizer may step on another stream."""
        job = self._copying
        if job is not None and job.copied.is_set():
            self._copying = None
        elif job is not None:
            self._line_up(job)

    def use(self, arena: Arena, on_locked: Callable[[], None]) -> None:
        """Stage into this arena from now on; `on_locked` is called when its mutex is held."""

        device = torch.cuda.current_device() if device_in_use() else None

        def switch() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # any thread begins with the first one, and would take memory there
            if self._arena is arena:
                return
            self._unlock()
            end = time.monotonic() + 30.0
            while arena.mutex.try_lock() is Got.BUSY:  # the writer, who noticed the death, is about to let go of it
                if time.monotonic() > end:
                    raise WriterError("the memory of the last run is still locked by another process")
                time.sleep(0.001)
            self._views.clear()
            self._frozen.clear()
            self._refused = False
            self._register(arena)
            self._arena = arena
            self._stop_touching()
            if not self._registered:  # that has done it
                self._touched = threading.Event()
                self._toucher = threading.Thread(target=self._touch, args=(arena,), name="ckpt-touch", daemon=True)
                self._toucher.start()
            self._order = max([self._order, *(label.order for _, label in arena.sealed())])
            on_locked()

        self.do(switch)

    def _touch(self, arena: Arena) -> None:
        """Before it is used, slot by slot: the copies are quicker then."""
        for slot in range(arena.slots):
            arena.touch(slot, lambda: not self._touched.is_set())

    def _stop_touching(self) -> None:
        """What is touched after it was given back would be taken again."""
        self._touched.set()
        if self._toucher is not None:
            self._toucher.join()
            self._toucher = None

    def do(self, work: Callable[[], None], timeout_s: float = 60.0) -> None:
        """Run something in the staging thread, between two jobs, and wait for it."""
        self._check_running()
        finished = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                self._land(wait=True)
                work()
            except BaseException as error:
                failure.append(error)
            finished.set()

        self._queue.put(run)
        if not finished.wait(timeout_s):
            raise DeadlineError(f"the staging thread did not answer within {timeout_s:g} s")
        if failure:
            raise failure[0]

    def pin(self, arena: Arena, slot: int) -> None:
        """Do not overwrite this slot until it is unpinned as often as it was pinned, in whichever order."""
        self._count_pin((arena.id, slot), 1)

    def unpin(self, arena_id: bytes, slot: int) -> None:
        self._count_pin((arena_id, slot), -1)

    def _count_pin(self, key: tuple[bytes, int], change: int) -> None:
        with self._changed:
            self._pinned[key] = self._pinned.get(key, 0) + change
            if self._pinned[key] == 0:
                del self._pinned[key]
            self._changed.notify_all()

    def hold(self, change: int) -> None:
        """+1: overwrite nothing, a predecessor may still write into this memory; -1: it has gone."""
        with self._changed:
            self._holds += change
            self._changed.notify_all()

    def stop(self, timeout_s: float = 60.0) -> None:
        """Let go of the mutex and of the memory, and end. Jobs submitted before are done first."""
        self._stopped = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._views.clear()
        self._pending = None

    # -- in the staging thread --

    def _run(self) -> None:
        with torch.no_grad():
            while not self._ended:
                try:
                    self._work()
                except BaseException:  # else the mutex that this thread holds would say that the trainer has died
                    log.exception("something failed in the staging thread, which goes on")
            self._unlock()

    def _work(self) -> None:
        work = self._next()
        if work is not None:
            work()
            return
        self._ended = True
        self._land(wait=True)

    def _next(self) -> Callable[[], None] | None:
        """What to do next; until there is something, what devices have copied is sealed."""
        while self._flying:
            try:
                return self._queue.get(timeout=POLL_S)
            except queue.Empty:
                self._land(wait=False)
        return self._queue.get()

    def _land(self, *, wait: bool) -> None:
        """Label and seal what devices have copied by now, in turn; `wait`: all that is on its way."""
        while self._flying:
            job = self._flying[0]
            slot = job.slot
            assert slot is not None
            if not wait and not reached(job.done):
                if job.eager and reached(job.eager):
                    slot[0].set_label(slot[1], self._label(EAGER, job))
                    job.eager = {}
                return
            self._flying.popleft()
            with self._ending(job):
                self._seal(*slot, job)

    def _unlock(self) -> None:
        self._stop_touching()
        if self._arena is not None:
            self._unregister()
            self._frozen.clear()
            self._arena.mutex.unlock()
            self._arena = None

    @traced("ckpt.stage")
    def _stage(self, job: PendingSnapshot) -> None:
        self._land(wait=False)
        with self._ending(job):
            arena = self._arena
            if arena is None:
                raise SkippedError(f"step {job.attempt.step} was not saved: no memory is ready yet")
            with self._changed:
                full = self._free(arena) is None
            if full:
                self._land(wait=True)
            for device in job.streams:
                torch.get_device_module(device).set_device(device)
            if job.streams and not self._registered and not self._refused:  # the device came into use since
                self._register(arena)
            job.slot = arena, self._claim(arena, job)
            self._frozen.open(job.slot[1], job.reading.layout)
            self._fill_eager(*job.slot, job)
            if job.postponed:
                self._settle_eager(*job.slot, job)
                self._frozen.close(job.slot[1])
                return
            if not job.streams:
                self._settle_eager(*job.slot, job)
            self._fill_guarded(*job.slot, job)
            if not job.streams:
                self._seal(*job.slot, job)

    def _complete(self, job: PendingSnapshot) -> None:
        """The rest of a job that was postponed."""
        with self._ending(job):
            arena, slot = job.slot or (None, 0)
            label = arena.label(slot) if arena is not None and arena is self._arena else None
            if arena is None or label is None or (label.state, label.attempt) != (EAGER, job.attempt):
                job.slot = None
                raise SkippedError(f"step {job.attempt.step} was not saved: its place in memory was taken")
            self._land(wait=True)
            job.postponed = False
            self._frozen.open(slot, job.reading.layout)
            self._fill_guarded(arena, slot, job)
            self._flying.clear()  # it is the only one, and waited for here
            self._seal(arena, slot, job)

    @contextlib.contextmanager
    def _ending(self, job: PendingSnapshot) -> Iterator[None]:
        """Whatever comes of a job, nobody waits for it any more afterwards."""
        try:
            yield
        except CheckpointError as error:
            job.error = error
        except BaseException as error:
            log.exception("staging step %d failed", job.attempt.step)
            job.error = SaveError(f"step {job.attempt.step} could not be staged: {type(error).__name__}: {error}")
        if job.error is None and (job.postponed or job in self._flying):
            return
        if job.error is not None:
            self._await_copies(job)
        if job.error is not None and job.slot is not None and self._arena is job.slot[0]:
            self._arena.set_label(job.slot[1], Label(EMPTY))
        job.sources = []
        job.release()
        try:
            job.on_end(job)
        except Exception:  # must not end the thread that holds the mutex
            log.exception("after step %d was staged", job.attempt.step)

    def _await_copies(self, job: PendingSnapshot) -> None:
        """A job that failed: nobody may have its slot, or free what it reads, while a device still copies."""
        if job in self._flying:
            self._flying.remove(job)
        for device in job.streams:
            with contextlib.suppress(Exception):  # a device that has failed copies nothing any more
                self._stream(device).synchronize()

    def _claim(self, arena: Arena, job: PendingSnapshot) -> int:
        """The emptiest or oldest slot. Never one being written, never the newest snapshot, nor the newest finite."""
        size = job.reading.layout.arrangement.data_size
        if not arena.fits(size, len(job.values)):
            raise SkippedError(f"step {job.attempt.step} was not saved: memory for its new layout is not ready yet")
        with self._changed:
            while (slot := self._free(arena)) is None:
                if job.busy == "skip":
                    raise SkippedError(f"step {job.attempt.step} was not saved: every slot is being written")
                if not self._changed.wait(max(0.0, min(job.deadline - time.monotonic(), 3600.0))):
                    why = (
                        "the last trainer is still leaving the memory it had"
                        if self._holds > 0
                        else "the disk does not keep up; save less often"
                    )
                    raise DeadlineError(f"step {job.attempt.step} was not saved: no slot became free in time: {why}")
        self._order += 1
        job.order = self._order
        arena.set_label(slot, self._label(FILLING, job))
        point("stage.claimed")
        return slot

    def _free(self, arena: Arena) -> int | None:
        if self._holds > 0:
            return None
        flying = {job.slot for job in self._flying}
        free = [slot for slot in range(arena.slots) if self._pinned.get((arena.id, slot), 0) <= 0]
        free = [slot for slot in free if (arena, slot) not in flying]
        sealed = arena.sealed()  # newest first
        if arena.slots == 1:  # memory is short: what is written, or could not be, makes room
            return next(iter(free), None)
        held = {slot for slot, _ in sealed}
        empty = [slot for slot in free if slot not in held]
        finite = [slot for slot, label in sealed if label.finite is not False][:1]  # while a training is broken
        oldest = [slot for slot, _ in reversed(sealed[1:]) if slot in free and slot not in finite]
        broken = [slot for slot, label in sealed[:1] if label.finite is False and slot in free and finite]
        return next(iter([*empty, *oldest, *broken]), None)

    def _fill_eager(self, arena: Arena, slot: int, job: PendingSnapshot) -> None:
        """What may change before the next optimizer step."""
        reading = job.reading
        streams = {device: self._stream(device) for device in job.streams}
        for device, stream in streams.items():
            stream.wait_event(job.ready[device])
        self._copy(self._pairs(arena, slot, job, guarded=False), streams)
        start = pages(reading.layout.arrangement.data_size)
        arena.data(slot)[start : start + len(job.values)] = job.values
        job.eager = {device: event_behind(device, stream) for device, stream in streams.items()}
        for device, event in job.eager.items():
            job.streams[device].wait_event(event)  # later kernels may change what we still read
        point("stage.eager")
        job.eager_done.set()

    def _settle_eager(self, arena: Arena, slot: int, job: PendingSnapshot) -> None:
        for event in job.eager.values():
            event.synchronize()
        job.eager = {}
        arena.set_label(slot, self._label(EAGER, job))

    def _fill_guarded(self, arena: Arena, slot: int, job: PendingSnapshot) -> None:
        """What only optimizers change. A device may have done nothing of it yet: see `_land`."""
        streams = {device: self._stream(device) for device in job.streams}
        self._copy(self._pairs(arena, slot, job, guarded=True), streams)
        job.check_sources()
        for one in job.fingerprints if streams else ():
            one.fetch(streams)
        if job.beside is not None:
            with contextlib.ExitStack() as stack:
                for device, stream in streams.items():
                    stack.enter_context(torch.get_device_module(device).stream(stream))
                job.beside()
        job.done = {device: event_behind(device, stream) for device, stream in streams.items()}
        self._frozen.close(slot)
        if job.streams:
            self._flying.append(job)
        job.enqueued.set()

    def _seal(self, arena: Arena, slot: int, job: PendingSnapshot) -> None:
        """When the last of its copies has ended."""
        for event in job.done.values():
            event.synchronize()
        job.check_copies(self._whole(arena, slot))
        job.check_versions()  # last: a short write that was going on is counted by now
        if job.written_by_others:
            shown = ", ".join(job.written_by_others[:3])
            job.error = SaveError(
                f"step {job.attempt.step} was dropped: {shown} changed outside an optimizer step while it was copied. "
                "From now on this is copied before step() returns"
            )
        point("stage.copied")
        if job.error is None:
            arena.set_label(slot, self._label(SEALED, job))
            point("stage.sealed")
            job.place = (arena, slot)

    def _pairs(self, arena: Arena, slot: int, job: PendingSnapshot, *, guarded: bool) -> list[Pair]:
        """Where each of these tensors goes, and what goes there."""
        views = self._slot_views(arena, slot, job.reading.layout)
        found = zip(views, job.sources, job.reading.guarded, strict=True)
        return [(view, source, i) for i, (view, source, one) in enumerate(found) if one is guarded]

    def _label(self, state: int, job: PendingSnapshot) -> Label:
        layout = job.reading.layout
        size = layout.arrangement.data_size
        return Label(state, job.order, job.attempt, layout.digest, size, len(job.values), time.time(), job.finite)

    def _whole(self, arena: Arena, slot: int) -> Tensor:
        return torch.frombuffer(arena.data(slot), dtype=torch.uint8)

    def _slot_views(self, arena: Arena, slot: int, layout: Layout) -> list[Tensor]:
        """The slot as tensors of the layout's shapes, made once."""
        key = (arena.id, slot)
        cached = self._views.get(key)
        if cached is not None and cached[0] is layout:
            return cached[1]
        whole = self._whole(arena, slot)
        views = [
            whole[offset : offset + t.nbytes].view(TORCH_DTYPE[t.dtype]).view(t.shape)
            for t, offset in zip(layout.tensors, layout.arrangement.offsets, strict=True)
        ]
        self._views[key] = (layout, views)
        return views

    def _copy(self, pairs: Sequence[Pair], streams: dict[torch.device, Any]) -> None:
        """What devices copy first, then what we copy: large contiguous host tensors one by one, unless they are there;
        the rest in one batched call a device."""
        batches: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {device: ([], []) for device in streams}
        large: list[Pair] = []
        for target, source, number in pairs:
            plain = source.is_contiguous() and not source.is_conj() and not source.is_neg()
            if target.nbytes >= LARGE and plain and source.device.type == "cpu":
                large.append((target, source, number))
                continue
            targets, sources = batches.setdefault(source.device, ([], []))
            targets.append(target)
            sources.append(source)
        for device, (targets, sources) in batches.items():
            if not targets:
                continue
            if device in streams:
                with torch.get_device_module(device).stream(streams[device]):
                    torch._foreach_copy_(targets, sources, non_blocking=True)
            else:
                torch._foreach_copy_(targets, sources)
        for target, source, number in large:
            self._frozen.put(number, target, source)

    # -- devices --

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]

    def _register(self, arena: Arena) -> None:
        """Page-lock the arena for the device driver, slot by slot, where there is one: faster, asynchronous copies."""
        if not device_in_use():  # a run on the CPU must not wake the device up
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for slot in range(arena.slots):
            address = torch.frombuffer(arena.data(slot), dtype=torch.uint8).data_ptr()
            if int(runtime.cudaHostRegister(address, arena.slot_size, PORTABLE)) == 0:
                self._registered.append(address)
            else:
                with contextlib.suppress(RuntimeError):  # CUDA keeps a thread's last error, for the next kernel's check
                    torch.ones(1, device="cuda")
                log.warning("memory could not be page-locked for the device: copies will be slower (see ulimit -l)")
                self._refused = True
                return

    def _unregister(self) -> None:
        if self._registered:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for address in self._registered:
                runtime.cudaHostUnregister(address)
        self._registered.clear()
