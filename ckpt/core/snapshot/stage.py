"""Copies live tensors into slots in shared memory while training goes on.

One thread (`Stager`) owns the arena: it holds the robust mutex, changes the states of slots, and copies. For each step:

1. `Stager.submit` gives the thread a `NewSnapshot`. The caller waits only for tensors that may change before the next
   optimizer step. If they are small, the caller clones them and does not wait. Otherwise it waits for `eager_done`.
2. The staging thread takes a slot (`Slots`) and labels it FILLING. It copies these tensors, and then all others, during
   the next forward and backward pass.
3. Every optimizer passes the `UpdateGate` before it changes anything (`UpdateHook`). On the host, the optimizer waits
   for the copy. On a device, its stream waits.
4. When all copies have ended and the check finds the snapshot consistent, the slot is labelled SEALED.

When a snapshot is sealed or has failed, the staging thread calls `on_ended`, which the saver sets once.

Invariants:

1. No update overtakes a copy. After the gate, a stream of an update is behind the copies, or the copies have ended.
2. A slot is sealed only after the check of the whole snapshot, and is not reused while it is pinned or a device copies
   into it.
3. Every submitted snapshot ends as sealed or failed, whatever raises an error, and all threads that wait for it wake.
4. The staging thread survives every error, because its end would release the robust mutex as if the trainer had died.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.core.ipc.arena import EMPTY, FILLING, SEALED, Arena, Got, Label
from ckpt.core.ipc.heartbeat import Process
from ckpt.core.snapshot import device
from ckpt.core.snapshot.device import (
    READY_S,
    Packs,
    PageLocks,
    Waiter,
    begin_thread,
    is_capturing,
    ready_slots,
    traced,
    wait_for,
)
from ckpt.core.snapshot.fill import SlotFiller
from ckpt.core.snapshot.snapshot import NewSnapshot, Slot
from ckpt.errors import (
    CheckpointError,
    ClosedError,
    CorruptError,
    DeadlineError,
    SaveError,
    SkippedError,
    UsageError,
    WriterError,
)
from ckpt.events import log
from ckpt.failpoints import point

WARN_S = 5.0  # training may wait this long for a copy before a warning explains the wait
LEAST_SLOTS = 2  # one slot for the newest snapshot, one for the next
LEAVING_S = 30.0  # timeout for a writer to release the mutex of a dead trainer
ALL_BUSY = "all snapshots are still being written"
Work = Callable[[], None]


class Stager:
    """The staging thread of this trainer."""

    def __init__(self) -> None:
        self.slots = Slots()
        self.gate = UpdateGate()
        self.page_locks = PageLocks()
        self.arena: Arena | None = None  # only the staging thread sets it
        self.on_ended: Callable[[NewSnapshot], None] | None = None
        self._filler = SlotFiller(self.page_locks.steady)
        self._waiter = Waiter()
        self._packs = Packs()
        self._toucher = SlotToucher()
        self._flying: deque[NewSnapshot] = deque()  # snapshots that a device still copies; for the staging thread only
        self._order = 0
        self._stopped = False
        self._worker = Worker(self._leave)

    # -- from any thread --

    def submit(self, snapshot: NewSnapshot) -> None:
        """Begin a snapshot. Return when tensors that may change before the next update are copied, or it has failed."""
        self._check_running()
        before, self.gate.snapshot = self.gate.snapshot, snapshot
        try:
            idle = before is None or before.copied.is_set()  # otherwise clones would accumulate
            cloned = idle and snapshot.clone_early(self._packs)
            snapshot.mark_ready()
            snapshot.submitted = True
            self._worker.put(lambda: self._stage(snapshot))
            if not cloned:
                self.gate.wait_for(snapshot.eager_done, "step()")
        except BaseException:  # Ctrl-C: end the snapshot, even if it has not begun, so that no thread waits for it
            snapshot.error = snapshot.error or SaveError(f"saving step {snapshot.checkpoint.step} was interrupted")
            self._worker.put(lambda: self._end(snapshot))
            raise
        if before is not None:
            self.gate.follow(before)

    def _check_running(self) -> None:
        if self._stopped:
            raise ClosedError("this Checkpointer is closed: make a new one")

    def before_update(self, timeout_s: float = 600.0) -> float:
        """Wait until an optimizer may change the state. Return the seconds waited. If a copy does not end in time, its
        snapshot fails and the training continues."""
        return 0.0 if self._worker.is_here else self.gate.wait(timeout_s)

    def give_up_slot(self, least: int = LEAST_SLOTS) -> int:
        """Release the memory of one slot to the system, until another arena is used. Return its size in bytes, or 0 if
        only `least` slots are left."""
        given: list[int] = []

        def give() -> None:
            arena = self.arena
            slot = None if arena is None else self._free_slot(arena)
            if arena is None or slot is None or len(self.slots.unpinned(arena)) <= least:
                return
            arena.most = arena.slots  # no slot is added to this arena from now on
            self.slots.pin(arena, slot)
            self._filler.digests.forget(slot)
            self._toucher.stop()
            self.page_locks.release(slot)
            given.append(arena.give_up(slot))

        self.do(give)
        return sum(given)

    def use(self, arena: Arena, on_locked: Work) -> None:
        """Stage into this arena from now on. Call `on_locked` when its mutex is locked."""

        def switch() -> None:
            if self.arena is arena:
                return
            self._unlock()
            _lock(arena)
            self._filler.clear()
            self.arena = arena
            self._toucher.start(arena)
            self._order = max([self._order, *(label.order for _, label in arena.sealed())])
            on_locked()

        self.do(switch)

    def do(self, work: Work, timeout_s: float = 60.0) -> None:
        """Run `work` in the staging thread after all copies, and wait for it. Raises DeadlineError."""
        self._check_running()

        def run() -> None:
            self._land(wait=True)
            work()

        self._worker.do(run, timeout_s)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Finish the submitted snapshots, release the mutex and the memory, and end the thread."""
        self._stopped = True
        self._worker.end(timeout_s)
        self._filler.clear()
        self.gate.snapshot = None

    # -- in the staging thread --

    @traced("ckpt.stage")
    def _stage(self, snapshot: NewSnapshot) -> None:
        snapshot.begun = True
        self._land(wait=False)
        with self._ending(snapshot):
            arena = self.arena
            if arena is None:
                raise SkippedError(f"step {snapshot.checkpoint.step} was not saved: no memory is ready yet")
            if self._free_slot(arena) is None:
                self._begin_slot(arena)
                self.slots.await_added()
                if self._free_slot(arena) is None:
                    self._land(wait=True)
            begin_thread(snapshot.streams)
            for where in snapshot.streams:
                self.page_locks.begin(arena, where)
            slot = self.slots.take(arena, {flying.slot for flying in self._flying}, snapshot)
            self._order += 1
            snapshot.order, snapshot.slot = self._order, (arena, slot)
            arena.set_label(slot, snapshot.label(FILLING))
            point("stage.claimed")
            if len(self.slots.unpinned(arena)) < self.slots.keep:  # a tier still reads a slot
                self._begin_slot(arena)
            self._filler.fill_eager(arena, slot, snapshot)
            point("stage.eager")
            snapshot.eager_done.set()
            if snapshot.streams:
                snapshot.late = self._packs.lend(snapshot.captured, late=True)
            self._filler.fill_guarded(arena, slot, snapshot)
            self._filler.digests.close(slot)
            if snapshot.streams:
                self._flying.append(snapshot)
                land = partial(self._worker.put, partial(self._land, wait=False))
                self._waiter.when_reached(snapshot.done, snapshot.all_there, land)
            snapshot.enqueued.set()
            if not snapshot.streams:
                self._seal(arena, slot, snapshot)

    def _free_slot(self, arena: Arena) -> int | None:
        return self.slots.free(arena, {snapshot.slot for snapshot in self._flying})

    def _land(self, *, wait: bool) -> None:
        """Seal the snapshots that devices have copied, in order. If `wait` is true, wait for all copies first."""
        while self._flying and (wait or self._flying[0].all_there.is_set()):
            snapshot = self._flying.popleft()
            assert snapshot.slot is not None
            with self._ending(snapshot):
                self._seal(*snapshot.slot, snapshot)

    def _seal(self, arena: Arena, slot: int, snapshot: NewSnapshot) -> None:
        """Wait for the last copy of a snapshot, and seal the snapshot if it is consistent."""
        wait_for(snapshot.done)
        snapshot.check_whole(self._filler.deal_out(arena, slot, snapshot))
        point("stage.copied")
        if snapshot.error is None:
            arena.set_label(slot, snapshot.label(SEALED))
            snapshot.place = (arena, slot)
            point("stage.sealed")

    @contextlib.contextmanager
    def _ending(self, snapshot: NewSnapshot) -> Iterator[None]:
        """Record the result of a snapshot, free its resources, wake waiting threads, and call `on_ended`."""
        try:
            yield
        except CheckpointError as error:
            snapshot.error = error
        except BaseException as error:
            log.exception("staging step %d failed", snapshot.checkpoint.step)
            snapshot.error = SaveError(
                f"step {snapshot.checkpoint.step} could not be staged: {type(error).__name__}: {error}"
            )
        if snapshot.place is None and snapshot.error is None:
            return  # a device still copies it
        if snapshot.place is None:  # a sealed snapshot stays, even if `submit` is interrupted at that moment
            self._flying = deque(one for one in self._flying if one is not snapshot)
            if snapshot.slot is not None:  # without a slot, no stream has work for it
                self._filler.settle(snapshot)
            if snapshot.slot is not None and self.arena is snapshot.slot[0]:
                self.arena.set_label(snapshot.slot[1], Label(EMPTY))
        self._packs.give_back([*snapshot.early, *snapshot.late])
        self._end(snapshot)

    def _end(self, snapshot: NewSnapshot) -> None:
        if snapshot.copied.is_set():  # `submit` was interrupted after the snapshot had ended
            return
        snapshot.sources = []
        snapshot.release()
        if self.on_ended is not None:
            try:
                self.on_ended(snapshot)
            except Exception:
                log.exception("after step %d was staged", snapshot.checkpoint.step)

    def _begin_slot(self, arena: Arena) -> None:
        """Begin to add a slot in the background, so that the next step need not wait until a tier has read its slot."""
        if not self.slots.adding and arena.ready == arena.slots < arena.most:
            self.slots.adding = True
            thread = threading.Thread(target=self._add_slot, args=(arena,), name="ckpt-slot", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # Python 3.12 starts no thread at exit
                self.slots.end_adding()

    def _add_slot(self, arena: Arena) -> None:
        """Add a slot permanently. If it does not fit into memory, no slot is added to this arena from now on."""
        try:
            arena.add_slot()
            arena.touch(arena.slots - 1, lambda: arena.fd >= 0)
        except MemoryError as error:
            arena.most = arena.slots
            log.warning("memory is short: staging pauses while all snapshots are written (%d): %s", arena.slots, error)
        finally:
            self.slots.end_adding()

    def _leave(self) -> None:
        self._waiter.stop()
        try:
            self._land(wait=True)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        self._toucher.stop()
        if self.arena is not None:
            self.page_locks.release_all()
            self._filler.digests.clear()
            try:
                self.arena.mutex.unlock()
            except OSError as error:
                log.warning("cannot release the lock of the shared memory, because its header is damaged: %s", error)
            self.arena = None


def _lock(arena: Arena) -> None:
    end = time.monotonic() + LEAVING_S
    while arena.mutex.try_lock() is Got.BUSY:  # the writer has detected the death, and will soon release the mutex
        if arena.mutex.is_orphaned():
            raise CorruptError("the header of the shared memory is damaged: it can no longer be locked")
        if time.monotonic() > end:
            raise WriterError("the memory of the last job attempt is still locked by another process")
        time.sleep(0.001)


class Slots:
    """The slots in use. Any thread may pin slots, or block all slots. Only the staging thread takes slots."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pinned: dict[tuple[bytes, int], int] = {}
        self.keep = LEAST_SLOTS  # number of slots that staging needs, not counting slots that a tier reads
        self.adding = False  # True while a slot is being added
        self._holds = 0  # above 0 while a predecessor may still write into an adopted arena

    def pin(self, arena: Arena, slot: int) -> None:
        """Protect this slot from being overwritten, until `unpin` was called as often as `pin`, in any order."""
        self._count((arena.id, slot), 1)

    def unpin(self, arena_id: bytes, slot: int) -> None:
        self._count((arena_id, slot), -1)

    def _count(self, key: tuple[bytes, int], change: int) -> None:
        with self._changed:
            self._pinned[key] = self._pinned.get(key, 0) + change
            if self._pinned[key] == 0:
                del self._pinned[key]
            self._changed.notify_all()

    def hold(self, change: int) -> None:
        """Block all slots (`change` +1) while a previous trainer may still write to them; unblock them with -1."""
        with self._changed:
            self._holds += change
            self._changed.notify_all()

    def await_added(self) -> None:
        """Wait until no slot is being added."""
        with self._changed:
            self._changed.wait_for(lambda: not self.adding)

    def end_adding(self) -> None:
        """Wake a step that waits for the slot that was being added."""
        with self._changed:
            self.adding = False
            self._changed.notify_all()

    def unpinned(self, arena: Arena) -> list[int]:
        with self._changed:
            return [slot for slot in range(arena.ready) if self._pinned.get((arena.id, slot), 0) <= 0]

    def free(self, arena: Arena, flying: Container[Slot | None]) -> int | None:
        """Return an empty slot, or that of the oldest snapshot. Never return a pinned slot, one that a device copies
        into (`flying`), the newest snapshot, or the newest finite one. Return None if no slot is free. While a slot is
        being added, the newest `keep - 1` snapshots stay, because the other ranks may be a step behind."""
        with self._changed:
            if self._holds > 0:
                return None
            free = [slot for slot in self.unpinned(arena) if (arena, slot) not in flying]
        sealed = arena.sealed()  # newest first
        if arena.slots == 1:  # memory is short, so the only snapshot is overwritten once a tier has it
            return next(iter(free), None)
        held = {slot for slot, _ in sealed}
        empty = [slot for slot in free if slot not in held]
        finite = [slot for slot, label in sealed if label.finite is not False][:1]  # kept if newer ones are broken
        older = sealed[self.keep - 1 if self.adding or arena.ready < arena.slots else 1 :]
        oldest = [slot for slot, _ in reversed(older) if slot in free and slot not in finite]
        broken = [slot for slot, label in sealed[:1] if label.finite is False and slot in free and finite]
        return next(iter([*empty, *oldest, *broken]), None)

    def take(self, arena: Arena, flying: Container[Slot | None], snapshot: NewSnapshot) -> int:
        """Wait for a slot for this snapshot. Raise SkippedError if it may not wait, or DeadlineError."""
        if not arena.fits(snapshot.captured.layout.arrangement.data_size, len(snapshot.values)):
            raise SkippedError(
                f"step {snapshot.checkpoint.step} was not saved: memory for its new layout is not ready yet"
            )
        with self._changed:
            while True:
                # Read this before free(): a slot may become ready after free() has checked, and nothing would wake us.
                being_made = self.adding or arena.ready < arena.slots
                if (slot := self.free(arena, flying)) is not None:
                    return slot
                if snapshot.busy == "skip" and not being_made:
                    raise SkippedError(f"step {snapshot.checkpoint.step} was not saved: {ALL_BUSY}")
                left_s = snapshot.deadline - time.monotonic()
                if left_s > 0:
                    self._changed.wait(min(left_s, READY_S if being_made else 3600.0))
                else:
                    why = (
                        "the previous trainer has not released the memory yet"
                        if self._holds > 0
                        else "the disk is too slow for the save interval; save less often"
                    )
                    raise DeadlineError(
                        f"step {snapshot.checkpoint.step} was not saved: no slot became free in time: {why}"
                    )


class SlotToucher:
    """Touches the pages of each slot of an arena once it is ready, in a separate thread, so that copies are faster."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, arena: Arena) -> None:
        self.stop()
        self._stopped = stopped = threading.Event()

        def touch() -> None:
            for slot in ready_slots(arena, stopped):
                arena.touch(slot, lambda: not stopped.is_set())

        thread = threading.Thread(target=touch, name="ckpt-touch", daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at exit; copies are just slower then
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Stop touching pages, because touching a released page would allocate it again."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class Worker:
    """A thread that runs work from other threads. At its end, it runs `at_end`."""

    def __init__(self, at_end: Work) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # None ends the thread
        self._at_end = at_end
        self._thread = threading.Thread(target=self._run, name="ckpt-stage", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Return True if the calling thread is this worker."""
        return threading.current_thread() is self._thread

    def put(self, work: Work) -> None:
        self._queue.put(work)

    def do(self, work: Work, timeout_s: float) -> None:
        """Run `work` and wait for it. If called in this thread, run it directly. Raise its error, or DeadlineError."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        if self.is_here:
            run()
        else:
            self.put(run)
        try:
            failure = done.exception(timeout_s)
        except TimeoutError:
            raise DeadlineError(f"the staging thread did not respond within {timeout_s:g} s") from None
        if failure is not None:
            raise failure

    def end(self, timeout_s: float) -> None:
        """End the thread after all earlier work is done."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with torch.no_grad():
            while (work := self._queue.get()) is not None:
                self._do(work)
            self._do(self._at_end)

    def _do(self, work: Work) -> None:
        try:
            work()
        except BaseException:  # if the thread ended, its robust mutex would signal the death of the trainer
            log.exception("an operation of the staging thread failed; the thread continues")


# -- optimizers wait for copies --


class UpdateGate:
    """The gate that optimizers of this trainer pass before an update. Any thread may shut it.

    writer_pid: process id of the writer, which allocates the memory that a copy may wait for; 0 if unknown
    """

    def __init__(self) -> None:
        self.writer_pid = 0
        self.snapshot: NewSnapshot | None = None  # the newest snapshot; None once an optimizer has stepped since
        self._unchecked: list[NewSnapshot] = []  # older snapshots that are not sealed yet
        self._copying: NewSnapshot | None = None  # a snapshot still copied by a device; streams of updates wait for it
        self._shut: tuple[threading.Event, ...] = ()  # optimizers wait while any of these events is unset
        self._shutting = threading.RLock()  # a signal handler may interrupt the thread that holds it

    def follow(self, before: NewSnapshot) -> None:
        """Record that a snapshot after `before` was submitted. All copies of `before` are at least on their streams."""
        self._line_up(before)
        self._unchecked = [one for one in (*self._unchecked, before) if not one.ended]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep optimizers from starting a step in this block. A step that has already started is counted."""
        opened = threading.Event()
        with self._shutting:
            self._shut = (*(one for one in self._shut if not one.is_set()), opened)
        try:
            yield
        finally:
            opened.set()

    def wait(self, timeout_s: float) -> float:
        """Wait until an optimizer may change the state. Return the seconds waited. If a copy does not end in time, its
        snapshot fails and the training continues."""
        self._line_up_again()
        snapshot, shut = self.snapshot, self._shut
        if snapshot is None and all(one.is_set() for one in shut):
            return 0.0
        started = time.perf_counter()
        for opened in shut:
            self.wait_for(opened, "an optimizer", timeout_s)
        snapshot = self.snapshot
        if snapshot is None:
            return time.perf_counter() - started
        if snapshot.streams:
            in_time = self.wait_for(snapshot.enqueued, "an optimizer", timeout_s)
            self._line_up(snapshot)
        else:
            in_time = self.wait_for(snapshot.copied, "an optimizer", timeout_s)
        if not in_time:
            snapshot.error = DeadlineError(f"copying step {snapshot.checkpoint.step} took more than {timeout_s:g} s")
        for one in (*self._unchecked, snapshot):
            if not one.ended:  # a device still copies it; only the update can raise version counters now
                one.check_versions()
        self.snapshot, self._unchecked = None, []
        return time.perf_counter() - started

    def wait_for(self, event: threading.Event, waiter: str, timeout_s: float | None = None) -> bool:
        """Wait for an event in the training thread. After 5 s, log one warning that names the cause.

        waiter: the name of the waiting call, for the message
        Returns False if the event was not set within `timeout_s`.
        """
        first = WARN_S if timeout_s is None else min(WARN_S, timeout_s)
        if event.wait(first):
            return True
        rest = None if timeout_s is None else timeout_s - first
        if rest is None or rest > 0:
            self.warn(waiter)
        return event.wait(rest)

    def warn(self, waiter: str) -> None:
        """Log that the training waits for memory or for a copy, and why."""
        writer = Process.of(self.writer_pid)
        if self.writer_pid and writer.suspended:
            cause = (
                f"the writer process {writer.pid} is stopped. Training resumes when that process continues "
                f"(kill -CONT {writer.pid}) or ends"
            )
        else:
            cause = f"the writer process {writer.pid} has not allocated the memory yet, or the machine is busy"
        log.warning("%s has waited %g s for the copy of a step: %s", waiter, WARN_S, cause)

    def _line_up(self, snapshot: NewSnapshot) -> None:
        """Make later work on the caller's streams wait for the copies of this snapshot."""
        device.queue_caller_behind(snapshot.done)
        if snapshot.done:  # without events, it was skipped, and an older snapshot is still being copied
            self._copying = snapshot

    def _line_up_again(self) -> None:
        """Make the streams of another optimizer wait too."""
        snapshot = self._copying
        if snapshot is not None and snapshot.copied.is_set():
            self._copying = None
        elif snapshot is not None:
            self._line_up(snapshot)


class UpdateHook:
    """Calls `before()` before an optimizer changes the saved state, and counts the steps of such optimizers.

    - `concerns`: returns True for an optimizer of the saved state.
    - `on_captured`: called with an optimizer whose step is captured into a graph. A replay of the graph runs no hooks.

    An optimizer that gets a closure runs forward and backward inside its step, so `before` is called when the closure
    first returns.
    """

    def __init__(
        self, before: Callable[[], None], on_captured: Callable[[object], None], concerns: Callable[[Any], bool]
    ) -> None:
        self.count = 0
        self._announced: dict[int, object] = {}
        self._before, self._on_captured, self._concerns = before, on_captured, concerns
        self._handle = register_optimizer_step_pre_hook(_untraced(self._hook))
        self._active = True

    def remove(self) -> None:
        self._active = False
        self._handle.remove()

    def announced(self) -> list[object]:
        """Return the optimizers that have begun a step since the last call."""
        found, self._announced = self._announced, {}
        return list(found.values())

    def fence(self, optimizers: list[Any]) -> None:
        """Count a step that the caller is about to make in place of these optimizers. Raises UsageError during a graph
        capture, because a replay would not wait."""
        if is_capturing():
            raise UsageError("call before_untracked_update() before the replay of a graph, not in its capture")
        self.count += 1
        self._announced.update((id(one), one) for one in optimizers)
        self._before()

    def silence(self) -> None:
        """Disable the hook in a forked child, where threads that do not exist in the child may hold locks."""
        self._active = False

    def _hook(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active or not self._concerns(optimizer):
            return None
        self.count += 1
        self._announced[id(optimizer)] = optimizer
        if is_capturing():
            self._on_captured(optimizer)
            return None
        closure = kwargs.get("closure") or next((a for a in args[1:2] if callable(a)), None)
        if closure is None:
            self._before()
            return None

        def first_then_wait(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            self._before()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": first_then_wait}
        return (args[0], first_then_wait, *args[2:]), kwargs


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that torch.compile does not trace, because a traced hook would treat its values as constants."""

    def call(*arguments: Any) -> Any:
        return hook(*arguments)

    disable: Callable[..., Callable[..., Any]] | None = getattr(torch, "_disable_dynamo", None)
    return call if disable is None else disable(call)  # torch.compiler.disable would import the compiler
