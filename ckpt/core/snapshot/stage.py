"""Live tensors into a slot, beside training.

One thread owns the arena: it holds the robust mutex, makes all transitions of slots, and copies. A `PendingSnapshot`
is one snapshot; any thread may submit one. What the caller waits for is short: everything that may change before the
next optimizer step has been taken. If that is little, and in host memory, the caller clones it and waits for nobody;
else it waits for `eager_done`, when it is in the slot. The rest is copied during the next forward and backward, and
`before_update`, called from a hook before any optimizer changes anything, waits for that.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from ckpt.core.ipc.arena import EAGER, EMPTY, FILLING, SEALED, Arena, Label
from ckpt.core.ipc.mutex import Got
from ckpt.core.snapshot.device import Waiter, begin_thread, traced, wait_for
from ckpt.core.snapshot.fill import SlotFiller
from ckpt.core.snapshot.packed import Packs
from ckpt.core.snapshot.page_locks import PageLocks
from ckpt.core.snapshot.slots import Slots, SlotToucher
from ckpt.core.snapshot.snapshot import PendingSnapshot
from ckpt.core.snapshot.update_gate import UpdateGate
from ckpt.core.snapshot.worker import Worker
from ckpt.errors import CheckpointError, ClosedError, CorruptError, SaveError, SkippedError, WriterError
from ckpt.events import log
from ckpt.failpoints import point

LEAST_SLOTS = 2  # one to hold the newest snapshot, one to take the next
FIRST_S = 2.0  # for memory that is being made, if a step cannot be cloned and could be left out
LEAVING_S = 30.0  # for a writer to let go of the mutex of a trainer that has died


class Stager:
    """The staging thread of one trainer."""

    def __init__(self) -> None:
        self.slots = Slots()
        self.page_locks = PageLocks()
        self._filler = SlotFiller(self.page_locks.steady)
        self._waiter = Waiter()
        self._packs = Packs()
        self._toucher = SlotToucher()
        self._gate = UpdateGate()
        self._arena: Arena | None = None
        self._flying: deque[PendingSnapshot] = deque()  # all queued, and not all copied; for the staging thread only
        self._order = 0
        self._stopped = False  # nobody would do what is queued
        self._worker = Worker(self._leave)

    # -- from any thread --

    @property
    def arena(self) -> Arena | None:
        return self._arena

    def on_writer(self, pid: int) -> None:
        """Set the writer process that hands out the memory from now on, for messages about a long wait."""
        self._gate.writer_pid = pid

    @property
    def skipped_bytes(self) -> int:
        """How much was not copied so far, since it was in its slot already; see `ckpt.core.snapshot.unchanged`."""
        return self._filler.frozen.skipped_bytes

    def submit(self, job: PendingSnapshot) -> None:
        """Begin a snapshot and wait until its eager part has been taken, or it has failed."""
        self._check_running()
        before, self._gate.job = self._gate.job, job
        try:
            # Else clones would pile up.
            idle = before is None or before.copied.is_set() or before.leave_out()
            taken = idle and job.take(self._packs)
            job.mark_ready()
            job.submitted = True
            self._worker.put(lambda: self._stage(job))
            if not taken and not (job.eager_done.wait(None if job.memory is None else FIRST_S) or job.leave_out()):
                self._gate.wait_for(job.eager_done, "step()")
        except BaseException:  # Ctrl-C: whether it was begun or not, nobody shall wait for it
            job.error = job.error or SaveError(f"saving step {job.attempt.step} was interrupted")
            self._worker.put(lambda: _end(job))
            raise
        if before is not None:
            self._gate.follow(before)

    def _check_running(self) -> None:
        if self._stopped:
            raise ClosedError("this Checkpointer is closed: make a new one")

    def held(self) -> contextlib.AbstractContextManager[None]:
        """No optimizer changes anything meanwhile, but for one that has begun before and has been counted."""
        return self._gate.held()

    def before_update(self, timeout_s: float = 600.0) -> float:
        """Called before an optimizer changes anything; returns the seconds it waited. A copy that does not end in time
        costs the snapshot, never the training."""
        return 0.0 if self._worker.is_here else self._gate.wait(timeout_s)

    def give_up_slot(self, least: int = LEAST_SLOTS) -> int:
        """Return the memory of one slot to the system, for as long as this arena lives, unless only `least` are left;
        how many bytes, perhaps 0."""
        given: list[int] = []

        def give() -> None:
            arena = self._arena
            if arena is None:
                return
            slot = self._free_slot(arena)
            if slot is None or len(self.slots.unpinned(arena)) <= least:
                return
            self.slots.pin(arena, slot)
            self._filler.frozen.forget(slot)
            self._toucher.stop()
            self.page_locks.release(slot)
            given.append(arena.give_up(slot))

        self.do(give)
        return sum(given)

    def use(self, arena: Arena, on_locked: Callable[[], None]) -> None:
        """Stage into this arena from now on; `on_locked` is called when its mutex is held."""

        def switch() -> None:
            if self._arena is arena:
                return
            self._unlock()
            _lock(arena)
            self._filler.clear()
            self._arena = arena
            self._toucher.start(arena)
            self._order = max([self._order, *(label.order for _, label in arena.sealed())])
            on_locked()

        self.do(switch)

    def do(self, work: Callable[[], None], timeout_s: float = 60.0) -> None:
        """Run something in the staging thread, between two jobs, and wait for it."""
        self._check_running()

        def run() -> None:
            self._land(wait=True)
            work()

        self._worker.do(run, timeout_s)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Let go of the mutex and of the memory, and end. Jobs submitted before are done first."""
        self._stopped = True
        self._worker.end(timeout_s)
        self._filler.clear()
        self._gate.job = None

    # -- in the staging thread --

    def _leave(self) -> None:
        self._waiter.stop()
        try:
            self._land(wait=True)
        finally:
            self._unlock()

    def _land(self, *, wait: bool) -> None:
        """Label and seal what devices have copied by now, in turn; `wait`: all that is on its way."""
        while self._flying:
            job = self._flying[0]
            slot = job.slot
            assert slot is not None
            if not wait and not job.all_there.is_set():
                if job.eager and job.eager_there.is_set():
                    self._filler.deal_out(*slot, job, job.early)
                    slot[0].set_label(slot[1], job.label(EAGER))
                    job.eager = {}
                return
            self._flying.popleft()
            with self._ending(job):
                self._seal(*slot, job)

    def _unlock(self) -> None:
        self._toucher.stop()
        if self._arena is not None:
            self.page_locks.release_all()
            self._filler.frozen.clear()
            try:
                self._arena.mutex.unlock()
            except OSError as error:
                log.warning("the header of the shared memory is damaged, its lock cannot be released: %s", error)
            self._arena = None

    @traced("ckpt.stage")
    def _stage(self, job: PendingSnapshot) -> None:
        job.begun = True
        self._land(wait=False)
        with self._ending(job):
            if job.memory is not None:
                job.memory.await_room(job, self._has_room)
            arena = self._arena
            if arena is None:
                raise SkippedError(f"step {job.attempt.step} was not saved: no memory is ready yet")
            if self._free_slot(arena) is None:
                self._land(wait=True)
            begin_thread(job.streams)
            for where in job.streams:
                self.page_locks.begin(arena, where)
            slot = self._claim(arena, job)
            self._filler.begin(slot, job)
            self._filler.fill_eager(arena, slot, job)
            point("stage.eager")
            job.eager_done.set()
            if not job.streams:
                arena.set_label(slot, job.label(EAGER))
            self._fill_guarded(arena, slot, job)
            if not job.streams:
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
        if job.error is None and job in self._flying:
            return
        if job.error is not None:
            self._flying = deque(one for one in self._flying if one is not job)
            if job.slot is not None:  # else it has put nothing on a stream: nobody waits for copies of those before
                self._filler.settle(job)
            if job.slot is not None and self._arena is job.slot[0]:
                self._arena.set_label(job.slot[1], Label(EMPTY))
        self._packs.give_back([*job.early, *job.late])
        job.end()

    def _has_room(self, job: PendingSnapshot) -> bool:
        """Whether a slot is free for it and touched, or all that will be are in use."""
        self._land(wait=False)
        arena = self._arena
        if arena is None or not job.fits(arena):
            return False
        slot = self._free_slot(arena)
        return arena.ready == arena.slots if slot is None else self._toucher.has_touched(slot)

    def _free_slot(self, arena: Arena) -> int | None:
        return self.slots.free(arena, {job.slot for job in self._flying})

    def _claim(self, arena: Arena, job: PendingSnapshot) -> int:
        slot = self.slots.take(arena, {flying.slot for flying in self._flying}, job)
        self._order += 1
        job.order, job.slot = self._order, (arena, slot)
        arena.set_label(slot, job.label(FILLING))
        point("stage.claimed")
        return slot

    def _fill_guarded(self, arena: Arena, slot: int, job: PendingSnapshot) -> None:
        if job.streams:
            job.late = self._packs.take(job.reading, late=True)
        self._filler.fill_guarded(arena, slot, job)
        self._filler.end(slot)
        if job.streams:
            self._flying.append(job)
            for events, there in ((job.eager, job.eager_there), (job.done, job.all_there)):
                self._waiter.when_reached(events, there, lambda: self._worker.put(partial(self._land, wait=False)))
        job.enqueued.set()

    def _seal(self, arena: Arena, slot: int, job: PendingSnapshot) -> None:
        """When the last of its copies has ended."""
        wait_for(job.done)
        self._filler.deal_out(arena, slot, job, [*job.early, *job.late])
        job.check_whole(self._filler.whole(arena, slot))
        point("stage.copied")
        if job.error is None:
            arena.set_label(slot, job.label(SEALED))
            point("stage.sealed")
            job.place = (arena, slot)


def _end(job: PendingSnapshot) -> None:
    """Whether or not the staging thread has done so."""
    job.release()
    if job.place is None:
        job.on_end(job)


def _lock(arena: Arena) -> None:
    end = time.monotonic() + LEAVING_S
    while arena.mutex.try_lock() is Got.BUSY:  # the writer, who noticed the death, is about to let go of it
        if arena.mutex.is_orphaned():
            raise CorruptError("the header of the shared memory is damaged: nobody can lock it any more")
        if time.monotonic() > end:
            raise WriterError("the memory of the last run is still locked by another process")
        time.sleep(0.001)
