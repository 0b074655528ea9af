"""Performs saves, from step() until every requested tier has committed the checkpoint.

A snapshot is one object (`ckpt.core.snapshot.snapshot`) that has one `WriteState` for each requested tier:

    state      entered when                      by                                on an error
    read       the state is read                 training thread, has the turn     the call raises
    submitted  step() gives it to the stager     training thread, has the turn     Ctrl-C: failed, unless sealed later
    copying    a slot is claimed                 staging thread                    failed; the slot is empty again
    sealed     the slot is labelled (`place`)    staging thread, owns the slots    a later step takes the slot
    failed     `error` is set                    staging thread                    see below
    staged     a writer holds the arena          thread of the writer's replies    waiting raises; writes go on

    QUEUED     the snapshot begins               training thread, has the turn     FAILED with the snapshot
    WRITING    the writer gets the request       staging thread, or has the turn   Ctrl-C: removed; close() retries
    COMMITTED  the writer has committed it       thread of the writer's replies    -
    FAILED     the snapshot or the write failed  staging or replies thread         raised once; save() retries

COMMITTED is final. A slot is pinned from WRITING until its bytes are stored (`run.memory`). Tiers are
independent: one may be COMMITTED while another is FAILED. States need no lock, because a single thread performs each
transition. `_lock` only guards the list of saves that `wait` waits for.

A snapshot is **dropped** if code other than an optimizer modified the state during the copy, and **skipped** if no slot
was free. A single rank then saves the next step to the same tiers (`owed`). With several ranks, the other ranks would
not save that next step. So this rank retracts its files, and the checkpoint fails on all ranks with an error.

Interruptions and faults:

- A signal handler calls save() or close() inside step(). `turn` is reentrant, so the call runs in the same thread. If
  step() had not submitted its save, `forgo_begun` fails that save, and `stage_last` reads the state again.
- An optimizer steps during a copy. Its hook waits (`UpdateGate`). `TrainingRun.moved_on` detects an optimizer that
  started before the copy.
- The writer dies. The snapshot stays sealed, or fails. Its writes fail or go to the next writer (`run.memory`).
- Memory has no room for one snapshot. A step for memory alone is skipped. A step for a tier is written from the live
  state while training waits (`ckpt.core.snapshot.direct`). It is never sealed, and counts as staged once COMMITTED.
- Another rank is a step ahead or behind. Each rank seals its own steps. A checkpoint needs the same step on all ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from ckpt.core.checkpoint.concurrent import run as run_async
from ckpt.core.format.columns import DIFFER
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.log.run_log import Acquire
from ckpt.core.run.common_state import CommonState
from ckpt.core.run.memory import WriteInFlight
from ckpt.core.run.replica_check import ReplicaCheck
from ckpt.core.run.save_plan import Late
from ckpt.core.run.training_run import TrainingRun
from ckpt.core.run.writer_link import HUNG_UP
from ckpt.core.snapshot.device import events_behind, wait_for
from ckpt.core.snapshot.direct import write_directly
from ckpt.core.snapshot.snapshot import NewSnapshot, Slot, Snapshot, WriteState
from ckpt.core.snapshot.stage import ALL_BUSY
from ckpt.core.state.capture import CapturedState
from ckpt.errors import (
    CheckpointError,
    ClosedError,
    DeadlineError,
    FencedError,
    SaveError,
    SkippedError,
    UsageError,
    WriterError,
)
from ckpt.events import log
from ckpt.saving import Save
from ckpt.subscribers import publish
from ckpt.units import decimal, duration

REMEMBERED = 64  # number of sent checkpoint ids to remember, more than can be under way
ANSWERS = 8  # number of ordered saves to remember
SURELY_NEWER = 2  # number of newer snapshots before older memory is released, because another rank may be a step behind
QUEUED_S = 30.0  # timeout for the staging thread to begin a queued job
MEASURED = 256 << 20  # bytes of a direct write after which its duration is estimated
ASK_S, PAUSE_S, WARN_S = 0.02, 0.002, 5.0  # pauses between polls for new memory; delay of the warning about this wait
LEAST_S = 1.0  # minimum timeout of a copy
TOO_LATE = "received new save intervals too late"
NO_TIME = "it could not be copied in time"


class Saver:
    """Saves the steps of a run.

    - `last`: the snapshot that was begun last. It is in memory or on its way to memory.
    - `newest`: the newest snapshot in memory, staged by this process or restored from memory.
    - `finite`: at the end of the run, the newest finite snapshot if `newest` is not finite.
    - `pinned`: the slot that was restored from, until a newer snapshot supersedes it.
    - `sent`: checkpoint ids sent to the writer. `committed`: the newest step that this job attempt committed in a tier.
    - `owed`: by tier, the scheduled save that was not staged, with its error, or None if its error need not be raised.
    - `answers`: the last ordered saves. The condition `answered` is notified of each new one.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._plan = run, run.intervals.plan
        self.last: NewSnapshot | None = None
        self.newest: Snapshot | None = None
        self.finite: Snapshot | None = None
        self.pinned: Slot | None = None
        self.sent: deque[str] = deque(maxlen=REMEMBERED)
        self.committed: int | None = None
        self.owed: dict[int, tuple[Save, CheckpointError | None]] = {}
        self.answers: deque[Save] = deque(maxlen=ANSWERS)
        self.answered = threading.Condition()
        self.replicas = ReplicaCheck(run)
        self._common = CommonState(run)
        self._active: list[Save] = []
        self._lock = threading.RLock()  # a signal handler may close the run while this thread holds the lock
        self._dropped = False  # the last snapshot was dropped, so save the next step even if it is not scheduled
        self._exposed: set[str] = set()  # tensors that code other than optimizers modifies; replaced, never changed
        self._noted_no_memory = False
        self._first_direct = True  # True until a step is written directly
        run.stager.on_ended = self._on_ended

    # -- the training thread, which has the turn --

    def step(self, step: int, finite: bool | None) -> Save | None:
        """Save a step if it is scheduled or ordered; see `Checkpointer.step`."""
        run = self._run
        run.check_usable()
        run.check_next(step)
        decision = self._plan.decide(step)
        tiers = sorted({*decision.tiers, *self.owed})
        memory = (self._dropped or decision.memory) and run.supervisor.memory.rings
        save, refusal = None, None
        try:
            with run.saving(step):
                run.begin_step(step, finite)
                if tiers or decision.ordered or memory:
                    save = self._begin(step, tiers, explicit=decision.ordered, ordered=decision.ordered)
        except SkippedError as error:
            refusal = error
        if save is not None and decision.ordered:
            self.answer(save)
        try:
            run.errors.raise_pending()
        finally:
            if refusal is not None:
                self._on_refused(step, refusal)
        return save

    def save_as(self, step: int) -> Save:
        """Save the state to every tier under a step number for which step() was not called."""
        run = self._run
        run.check_next(step)
        with run.saving(step):
            run.begin_step(step, None)
            return self._begin(step, run.settings.everywhere, explicit=True)

    def save_last(self) -> Save:
        """Save the last step to all tiers that do not have it yet. Tiers to which it is being written are left out."""
        with self._run.stager.gate.held():  # another thread may be training
            step, last = self._last_step("save() needs the step: call save(step)")
            if last is None or (last.place is None and not last.stored):
                self._check_same()
                return self._begin(step, self._run.settings.everywhere, explicit=True)
            if last.save._raised:
                self._run.errors.forget(last.save)
            self._plan.saved_everywhere(step)
            for tier in self._run.settings.everywhere:
                if last.writes.get(tier, WriteState.FAILED) is WriteState.FAILED:
                    self._write_also(last, tier)
            return last.save

    def stage(self) -> Save:
        """Copy the last step into memory if it is not in memory. Return when the copy has ended or failed."""
        with self._run.stager.gate.held():
            step, last = self._last_step("there is nothing to stage yet: call step() first")
            if last is not None and last.place is not None:
                return last.save
            self._check_same()
            save = self._begin(step, [], explicit=True)
            if (last := self.last_of(step)) is not None:
                last.copied.wait(self._run.settings.busy_timeout_s)
            return save

    def _last_step(self, if_none: str) -> tuple[int, NewSnapshot | None]:
        """Return the last step and its snapshot, after its copy. Raises UsageError if an optimizer has stepped."""
        step, timeout_s = self._run.step, self._run.settings.busy_timeout_s
        if step is None:
            raise UsageError(if_none)
        self._run.check_same()
        last = self.last_of(step)
        if last is not None and self._has_begun(last, timeout_s) and last.error is None:
            last.copied.wait(timeout_s)
        return step, last

    def _check_same(self) -> None:
        """Raise UsageError if the state is known to have changed since the last step."""
        exchanged = "the weights are replaced at the moment, see not_training()" if self._run.exchanged else ""
        if why := exchanged or self._why_torn():
            step = self._run.step
            raise UsageError(f"step {step} can no longer be saved: {why}. Call save() right after step()")

    def _begin(
        self, step: int, tiers: list[int], *, explicit: bool, ordered: bool = False, timeout_s: float | None = None
    ) -> Save:
        """Save the state as it is now.

        explicit: a caller requested this save, so it may wait for a slot
        ordered: an order requested this save, see `ckpt.core.ranks.orders`
        timeout_s: timeout to get a slot, passed only when the run is closing
        """
        run, started, required = self._run, time.perf_counter(), explicit or bool(tiers)
        owner, patience_s = run.supervisor.owner, run.settings.busy_timeout_s if timeout_s is None else timeout_s
        checkpoint = CheckpointId(owner.term, step, owner.nonce)
        save = Save(step, str(checkpoint), [run.tiers[i].url for i in tiers])
        deadline = time.monotonic() + patience_s
        if explicit and tiers:
            self._plan.saved_everywhere(step)
        save._raised = ordered and not self._is_scheduled(step)  # best effort, so its error need not be raised
        try:
            captured, values = self._read(checkpoint, patience_s, durable=bool(tiers))
            sizes = captured.layout.arrangement.data_size, len(values)
            fits = self._await_memory(step, sizes, deadline, required=required, tiers=bool(tiers))
        except BaseException as error:
            what = error if isinstance(error, CheckpointError) else SaveError(f"step {step} was not saved: {error!r}")
            save._set_failed(what)
            self._retract(checkpoint, tiers, what)
            raise
        snapshot = NewSnapshot(
            checkpoint,
            captured,
            values,
            save=save,
            tiers=tiers,
            required=required,
            busy="wait" if explicit else run.settings.on_busy,
            deadline=deadline,
            finite=run.finite,
        )
        self.replicas.begin(snapshot, durable=bool(tiers), closing=timeout_s is not None)
        save._began = started
        if not fits:
            self.last = snapshot
            self._write_directly(snapshot)
            save._stalled_s = time.perf_counter() - started
            run.count_stall(save._stalled_s)
            return save
        try:
            self.last = snapshot
            self._follow(save)
            run.stager.submit(snapshot)
        except BaseException as error:
            if not snapshot.submitted:
                save._set_failed(SaveError(f"step {step} was not saved: {error!r}"))
            raise
        save._stalled_s = time.perf_counter() - started
        run.count_stall(save._stalled_s)
        return save

    def _read(self, checkpoint: CheckpointId, timeout_s: float, *, durable: bool) -> tuple[CapturedState, bytes]:
        """Return the state, and its plain values as JSON. Send the layout to the writer if it is new.

        timeout_s: the timeout for other ranks, if this rank's optimizer state has changed
        """
        run = self._run
        run.capture.copy_eagerly(self._exposed)
        run.capture.keep_apart(self.replicas.differing)
        if durable and run.world.size > 1 and self._common.unsure:
            run.capture.find_own_again()
        captured = run.capture.read(
            (lambda groups: self._common.own(checkpoint, groups, timeout_s)) if run.world.size > 1 else None
        )
        values = json.dumps(captured.values, separators=(",", ":")).encode()
        run.supervisor.layouts.tell(captured.layout)
        return captured, values

    def _await_memory(self, step: int, sizes: tuple[int, int], deadline: float, *, required: bool, tiers: bool) -> bool:
        """Return True when memory has slots of this size. Return False if the step must be written directly, because it
        goes to `tiers` and memory has no room for a single snapshot.

        Raises SkippedError if memory is short otherwise, and ClosedError or DeadlineError like `_make_memory`.
        """
        try:
            self._make_memory(step, sizes, deadline, required=required)
        except SkippedError:
            supervisor = self._run.supervisor
            if tiers and supervisor.memory.next.refused_any and supervisor.failure is None:
                return False
            raise
        return True

    def _make_memory(self, step: int, sizes: tuple[int, int], deadline: float, *, required: bool) -> None:
        """Wait until memory has slots of this size. Only the first save, and saves of a larger state, have to wait.

        Raises SkippedError if memory is short and the step is not required, ClosedError if a signal handler has closed
        the run, or DeadlineError.
        """
        run, memory, warn_at = self._run, self._run.supervisor.memory, time.monotonic() + WARN_S
        while not run.fits(*sizes):
            if run.closed:
                run.check_usable()
            if run.supervisor.failure is not None:
                raise SkippedError(f"step {step} was not saved: {run.supervisor.failure}")
            memory.next.prepare(*sizes, again=required)
            try:
                made = memory.next.wait(ASK_S)
            except SkippedError:
                raise
            except CheckpointError as error:
                if required:
                    raise
                run.errors.note(error)
                made = None
            if not required and memory.next.refused(sum(sizes)):
                raise SkippedError("memory is short")
            now = time.monotonic()
            if now > deadline:
                raise DeadlineError(f"step {step} was not saved: no memory became free in time")
            if made is not None:
                run.stager.do(partial(memory.take_prepared, 0.0), deadline - now)
            elif now > warn_at:
                run.stager.gate.warn("step()")
                warn_at = float("inf")
            else:
                time.sleep(PAUSE_S)  # the next writer may still be starting
        if not (required or memory.rings):
            raise SkippedError(f"step {step} was not saved: memory is short, and no tier had scheduled it")

    def _write_directly(self, snapshot: NewSnapshot) -> None:
        """Write a step to its nearest tier while training waits. Then the writer commits it.

        The staging thread does the writing, so that a signal handler can wait for this save as for any other. The
        writer copies the step to further tiers. The calling method raises the errors. Memory never holds the step, so
        it counts as staged once a tier has committed it.
        """
        snapshot.direct = snapshot.submitted = snapshot.begun = True
        near, given_up, do = min(snapshot.writes), threading.Event(), self._run.stager.do
        snapshot.writes[near] = WriteState.WRITING
        self._follow(snapshot.save)

        def fail(error: BaseException) -> None:
            if not snapshot.copied.is_set():
                self._on_direct_failed(snapshot, near, error)

        try:
            wait_for(events_behind(snapshot.streams))  # the device may still be computing this step
            if snapshot.beside is not None:
                snapshot.beside()
            do(partial(self._store_directly, snapshot, near, given_up), threading.TIMEOUT_MAX)
        except Exception as error:  # a device error, or the staging thread has ended
            fail(error)
        except BaseException as error:  # Ctrl-C: make the thread stop, because training is about to change the state
            given_up.set()
            with contextlib.suppress(CheckpointError):
                do(partial(fail, error), 0.0)  # in case the write has not begun
            raise

    def _store_directly(self, snapshot: NewSnapshot, near: int, given_up: threading.Event) -> None:
        """Store a snapshot in a tier, in the staging thread. Then the writer commits it, or the snapshot fails."""
        run, checkpoint, nbytes = self._run, snapshot.checkpoint, snapshot.captured.layout.arrangement.data_size
        url, began, done, warned = run.tiers[near].url, time.monotonic(), 0, not self._first_direct
        self._first_direct = False

        def on_bytes(count: int) -> None:
            nonlocal done, warned
            run.heartbeat.touch(run.heartbeat.state)  # so that this long call is not detected as a hang
            done += count
            if not warned and done >= min(nbytes, MEASURED):
                warned, seconds = True, (time.monotonic() - began) * nbytes / done
                log.warning(
                    "writing step %d (%s) to %s while training waits, for about %s: memory has no room for it",
                    *(checkpoint.step, decimal(nbytes), url, duration(seconds)),
                )

        def check() -> None:
            if given_up.is_set():
                raise SaveError("it was interrupted")

        def check_whole() -> None:
            check()
            snapshot.check_live()

        try:
            run_async(
                write_directly(
                    run.tiers[near].spec(),
                    run.supervisor.run.roots.get(url, ""),
                    checkpoint,
                    snapshot.captured,
                    finite=snapshot.finite,
                    replicas=self.replicas.said_of(checkpoint),
                    on_bytes=on_bytes,
                    check=check,
                    check_whole=check_whole,
                )
            )
        except BaseException as error:
            self._on_direct_failed(snapshot, near, error)
            return
        for tier in sorted(snapshot.writes):  # nearest first, because the writer copies the step from the nearest tier
            self._write(snapshot, tier)
        snapshot.sources = []
        snapshot.release()

    def _on_direct_failed(self, snapshot: NewSnapshot, near: int, error: BaseException) -> None:
        run, checkpoint, url = self._run, snapshot.checkpoint, self._run.tiers[near].url
        why = error if isinstance(error, CheckpointError) else repr(error)
        snapshot.error = SaveError(
            f"step {checkpoint.step} was not written to {url}: {why}. Memory has no room for it, so it is not saved"
        )
        self._exposed = self._exposed.union(snapshot.written_by_others)
        snapshot.writes = dict.fromkeys(snapshot.writes, WriteState.FAILED)
        self._retract(checkpoint, list(snapshot.writes), snapshot.error)
        publish("failed", checkpoint.step, tier=url, error=str(why))
        run.errors.note(snapshot.error, snapshot.save)
        snapshot.save._set_failed(snapshot.error)
        snapshot.sources = []
        snapshot.release()

    def _is_scheduled(self, step: int) -> bool:
        return bool(self._plan.at(step).tiers_due(step))

    def _on_refused(self, step: int, error: SkippedError) -> None:
        """Count a step for which memory was short. If the step was scheduled, make the next call raise the error."""
        self._run.stats.skipped += 1
        if self._is_scheduled(step) or self.owed or self._is_first_without_memory():
            self._run.errors.note(_naming(step, error))
        else:
            log.info("%s", error)

    def _is_first_without_memory(self) -> bool:
        """In a run without durable tiers, return True for the first in a series of steps for which memory is short."""
        first, self._noted_no_memory = not self._noted_no_memory, True
        return first and not self._run.tiers

    # -- the contents of memory --

    def last_of(self, step: int | None) -> NewSnapshot | None:
        """Return the last snapshot if it has this step number, else None."""
        return self.last if self.last is not None and self.last.checkpoint.step == step else None

    def _is_stored(self, step: int) -> bool:
        """Return True if this step was written directly."""
        last = self.last_of(step)
        return last is not None and last.stored

    def newest_step(self, timeout_s: float) -> int | None:
        """Return the newest step in memory. If a copy is under way, wait up to `timeout_s` for its end."""
        if (last := self.last_of(self._run.step)) is not None:
            last.copied.wait(timeout_s)
            if last.place is not None:
                return last.checkpoint.step
        newest = self.newest
        return None if newest is None else newest.checkpoint.step

    def sealed(self) -> list[tuple[str, bool]]:
        """Return the ids of snapshots in the present history that can be written now, each with False if not finite.

        All are in memory, except that the last one may have been written directly.
        """
        arena = self._run.stager.arena
        broken = {
            label.checkpoint for _, label in (arena.sealed() if arena is not None else ()) if label.finite is False
        }
        found = [(str(checkpoint), checkpoint not in broken) for checkpoint in self._run.supervisor.held.sealed()]
        if (last := self.last) is not None and last.stored:
            found.insert(0, (str(last.checkpoint), last.finite is not False))
        return found

    def in_memory(self, checkpoint: CheckpointId) -> Snapshot | None:
        """Return the snapshot of a checkpoint id in memory, with a new handle. If the last snapshot has this id and was
        written directly, return it. Otherwise return None."""
        if (last := self.last) is not None and last.stored and last.checkpoint == checkpoint:
            return last
        arena, slot = self._run.stager.arena, self._run.supervisor.held.sealed().get(checkpoint)
        if arena is None or slot is None:
            return None
        found = Snapshot(checkpoint, place=(arena, slot))
        found.save._set_staged()
        return found

    def unpin_restored(self) -> None:
        """Release the slot that was restored from."""
        if self.pinned is not None:
            arena, slot = self.pinned
            self.pinned = None
            self._run.stager.slots.unpin(arena.id, slot)

    def _has_begun(self, snapshot: NewSnapshot, timeout_s: float) -> bool:
        """Return False if a snapshot was not submitted, because the calling signal handler interrupted step()."""
        if not snapshot.begun:
            with contextlib.suppress(CheckpointError):
                self._run.stager.do(lambda: None, timeout_s)  # wait until the staging thread has processed its queue
        return snapshot.begun

    def _why_torn(self) -> str:
        """Return why the last step is lost if code other than optimizers modified it during its copy; otherwise ""."""
        last = self.last_of(self._run.step)
        return str(last.error) if last is not None and last.written_by_others else ""

    # -- the end --

    def forgo_begun(self) -> None:
        """Fail a snapshot that was never submitted, because a signal handler interrupted step() and closes the run."""
        if self.last is not None and not self._has_begun(self.last, QUEUED_S):
            self.last.save._set_failed(ClosedError(f"closed before step {self._run.step} was staged"))
            self.last = None

    def stage_last(self, end: float, *, live: bool) -> str:
        """Copy the last step into memory by `end`. Return "" if it is in memory, otherwise the reason why it is not.

        This reads the present state, which is the last step only until an optimizer begins the next one. After an
        exception, at the end of the script or in another thread, buffers and random numbers may already have changed.
        Then nothing is staged, unless `step()` itself was interrupted.

        live: no exception ends the training, so the training thread may read the state
        """
        run = self._run
        with run.stager.gate.held():  # another thread may be training
            step = run.step
            if step is None or not run.stepped or run.errors.fenced is not None:
                return ""
            if run.supervisor.failure is not None:
                return str(run.supervisor.failure)
            try:
                run.stager.do(lambda: None, _left(end))
                if self.newest_step(0.0) == step or self._is_stored(step):
                    return ""
                if why := self._why_gone():
                    return why
                ended_here = live and threading.get_ident() == run.thread
                if not ended_here and run.within != step:
                    return self._why_not_staged()
                short = run.supervisor.memory.next.refused_any
                tiers = run.settings.everywhere[:1] if short else []
                self._begin(step, tiers, explicit=True, timeout_s=_left(end))
                if self.newest_step(_left(end)) == step or self._is_stored(step):
                    return ""
                return str((None if self.last is None else self.last.error) or NO_TIME)
            except DeadlineError:
                return NO_TIME
            except Exception as error:  # for example a device error: earlier snapshots remain
                return f"it could not be copied: {error}"

    def _why_gone(self) -> str:
        if self._run.moved_on:
            return "an optimizer has begun a further step"
        if self._run.torn:
            return "a restore has failed half-way since"
        if self._run.exchanged:
            return "the weights were replaced, see not_training()"
        return self._why_torn()

    def _why_not_staged(self) -> str:
        last = self.last_of(self._run.step)
        if last is not None and last.error is not None:
            return str(last.error)
        return "it was not in memory, and training ended without close(). Memory(every=1) stages every step"

    def forget(self) -> None:
        """Drop all references to memory."""
        self.last = self.newest = self.finite = None

    # -- orders, in other threads --

    def answer(self, save: Save) -> None:
        """Publish an ordered save to the threads that wait for it."""
        with self.answered:
            self.answers.append(save)
            self.answered.notify_all()

    def forget_answers(self) -> None:
        """Forget the ordered saves, because step numbers repeat after a restore."""
        with self.answered:
            self.answers.clear()

    def save_late(self, late: Late, owner: Acquire, why: str) -> Save | None:
        """Save an earlier step from memory, and return its save.

        If memory has lost the step, return None, and fail its checkpoint on all ranks unless some tier already has it.
        owner: the owner of the run when the step was done
        """
        checkpoint = CheckpointId(owner.term, late.step, owner.nonce)
        if late.has <= late.wants and (found := self.in_memory(checkpoint)) is not None:
            self.write_missing(found, sorted(late.wants - late.has))  # this write fails if a later step takes the slot
            return found.save
        if not late.has or late.has - late.wants:
            self._run.supervisor.writes.retract(checkpoint, f"rank {self._run.world.rank} {why}")
        return None

    # -- the end of a copy, in the staging thread --

    def _on_ended(self, snapshot: NewSnapshot) -> None:
        """Send a sealed snapshot to the writer, which keeps and writes it. If the snapshot failed, handle the error."""
        self._exposed = self._exposed.union(snapshot.written_by_others)  # before the user gets the error
        if snapshot.place is None:
            assert snapshot.error is not None
            self._on_failed(snapshot, snapshot.error)
            return
        self.newest = snapshot
        self._dropped = self._noted_no_memory = False
        run, finite = self._run, snapshot.finite is not False
        if finite:  # if it is not finite, older snapshots are still needed
            alone = run.world.size == 1
            if run.supervisor.memory.superseded or alone:
                self.unpin_restored()
            if not alone and run.supervisor.memory.newer == SURELY_NEWER:
                run.ownership.tell_newer(snapshot.checkpoint.term)
        done = partial(self._on_kept, snapshot.save, snapshot.captured.layout.arrangement.data_size)
        run.supervisor.acknowledgements.acknowledge(snapshot.checkpoint, *snapshot.place, done)
        run.supervisor.memory.on_sealed(sound=finite)
        for tier in list(snapshot.writes):
            self._write(snapshot, tier)

    def _on_failed(self, snapshot: NewSnapshot, error: CheckpointError) -> None:
        run, save, tiers = self._run, snapshot.save, list(snapshot.writes)
        torn = bool(snapshot.written_by_others)
        if torn or isinstance(error, SkippedError):
            alone = run.world.size == 1  # a single rank saves the next step instead
            if alone:
                chosen = snapshot.busy == "skip" and ALL_BUSY in str(error)
                owed = None if chosen or save._raised else error
                self.owed.update(dict.fromkeys(tiers, (save, owed)))
            self._dropped = alone and torn
            run.stats.skipped += 1
            if snapshot.required and not (alone and tiers):
                run.errors.note(_naming(save.step, error), save)
            else:
                log.warning("%s", error)
        else:
            run.errors.note(error, save)
        self._retract(snapshot.checkpoint, tiers, error)
        publish("failed", save.step, tier="memory", error=str(error))
        snapshot.writes = dict.fromkeys(tiers, WriteState.FAILED)
        save._set_failed(error)

    def _retract(self, checkpoint: CheckpointId, tiers: Sequence[int], why: CheckpointError) -> None:
        """Fail the checkpoint of this id, because other ranks wait for this rank's files."""
        if tiers and self._run.world.size > 1:
            self._run.supervisor.writes.retract(checkpoint, f"rank {self._run.world.rank}: {why}")

    def _on_kept(self, save: Save, nbytes: int, error: CheckpointError | None) -> None:
        """Resolve `staged`: a process that survives this one holds the snapshot, or none ever will (`error`)."""
        if error is not None:
            publish("failed", save.step, tier="memory", error=str(error))
            save._set_unstaged(error)
            return
        save._set_staged("memory" if self._run.supervisor.survives else "trainer")
        publish("staged", save.step, stall_s=self._run.stalled_by(save), nbytes=nbytes)

    # -- writes to tiers, in any thread --

    def _write(self, snapshot: Snapshot, tier: int) -> None:
        """Request the writer to write a sealed snapshot, or to commit a snapshot that was written directly."""
        step = snapshot.checkpoint.step
        self.sent.append(str(snapshot.checkpoint))
        if tier in self.owed and self.owed[tier][0].step <= step:
            del self.owed[tier]
        snapshot.writes[tier] = WriteState.WRITING
        done = partial(self._on_stored, snapshot, tier, time.monotonic())
        replicas = self.replicas.said_of(snapshot.checkpoint)
        arena, slot = snapshot.place or (None, -1)
        self._run.supervisor.writes.write(
            WriteInFlight(snapshot.checkpoint, arena, slot, tier, done, stored=arena is None, replicas=replicas)
        )

    def _write_also(self, snapshot: Snapshot, tier: int) -> None:
        """Write to one more tier, or retry. After Ctrl-C, waits ignore this write, and close() retries it."""
        url = self._run.tiers[tier].url
        try:
            snapshot.save._add_tier(url)
            self._write(snapshot, tier)
        except BaseException as error:
            snapshot.writes.pop(tier, None)
            if url in snapshot.save.tiers:
                what = SaveError(f"step {snapshot.checkpoint.step} was not written to {url}: {error!r}")
                snapshot.save._set_failed(what, url)
            raise

    def write_missing(self, snapshot: Snapshot, tiers: Sequence[int]) -> None:
        """Write a snapshot to each of `tiers` that does not have it and to which no write is under way."""
        for tier in tiers:
            if tier not in snapshot.writes:
                self._follow(snapshot.save)
                self._write_also(snapshot, tier)

    def _on_stored(
        self, snapshot: Snapshot, tier: int, began: float, error: CheckpointError | None, write: WriteInFlight
    ) -> None:
        """Record the result of a write. If the tier consists of the disks of nodes, first wait for all nodes."""
        done = partial(self._on_written, snapshot, tier, began, write)
        if self._run.ownership.is_on_nodes(tier) and HUNG_UP not in str(error):
            self._run.ownership.await_nodes(tier, snapshot.checkpoint, error, done)
        else:
            done(error)

    def _on_written(
        self, snapshot: Snapshot, tier: int, began: float, write: WriteInFlight, error: CheckpointError | None
    ) -> None:
        """Record the result of a write."""
        run, save, url, step = self._run, snapshot.save, self._run.tiers[tier].url, snapshot.checkpoint.step
        if error is None:
            snapshot.writes[tier] = WriteState.COMMITTED
            self.committed = max(step, -1 if self.committed is None else self.committed)
            seconds = time.monotonic() - began
            publish("committed", step, tier=url, seconds=seconds, nbytes=write.nbytes, stored=write.nbytes_stored)
            level = logging.INFO if run.world.rank == 0 else logging.DEBUG
            of = "" if run.world.size == 1 else f" (of rank {run.world.rank})"
            sizes = f"{decimal(write.nbytes)} as {decimal(write.nbytes_stored)}{of}"
            log.log(level, "step %d committed to %s in %s, %s", step, url, duration(seconds), sizes)
            if snapshot.direct:
                save._set_staged(url)
            save._set_committed(url)
            return
        snapshot.writes[tier] = WriteState.FAILED
        if snapshot.direct and tier == min(snapshot.writes):
            save._set_unstaged(error)
        if HUNG_UP in str(error):  # the result is unknown, which is not a failure
            save._set_failed(SaveError(f"cannot determine whether step {step} is in {url}: {error}"), url)
            return
        publish("failed", step, tier=url, error=str(error))
        if isinstance(error, SkippedError) or TOO_LATE in str(error):  # slowness does not disturb training
            run.stats.skipped += 1
            log.warning("%s", error)
        else:
            if not isinstance(error, FencedError):
                others = [run.tiers[i].url for i, state in snapshot.writes.items() if state is WriteState.COMMITTED]
                where = f"It is still in {others[0] if others else 'memory'}"
                if not others and snapshot.direct:
                    where = "Memory has no room for it, so it is not saved"
                if not others and isinstance(run.supervisor.failure, WriterError):
                    where = "No writer has it: memory is lost when this process ends"
                error = SaveError(f"step {step} was not written to {url}: {error}. {where}")
            run.errors.note(error, save)  # before threads that wait for this save continue
        save._set_failed(error, url)
        if DIFFER in str(error):
            self.replicas.find_differing(snapshot.checkpoint)

    def note_owed(self) -> None:
        """Make the next call raise the errors of scheduled saves that were missed and not replaced by a later step."""
        missed = {error: save for save, error in self.owed.values() if error is not None}
        self.owed = {tier: (save, None) for tier, (save, _) in self.owed.items()}
        for error, save in missed.items():
            self._run.errors.note(error, save)

    def _follow(self, save: Save) -> None:
        """Make `wait` include this save."""
        with self._lock:
            self._active = [*(s for s in self._active if s is not save and s._unfinished()), save]

    def wait(self, timeout_s: float | None = None, step: int | None = None) -> None:
        """Wait until all saves, or the saves of one step, have succeeded or failed. Raises DeadlineError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            active = [save for save in self._active if step in (None, save.step)]
        for save in active:
            for future in save._unfinished():
                try:
                    future.exception(None if end is None else max(0.0, end - time.monotonic()))
                except TimeoutError:
                    raise DeadlineError(f"saves have not finished within {timeout_s:g} s; they continue") from None

    def under_way(self) -> list[Save]:
        """Return the saves to tiers that have not ended yet."""
        with self._lock:
            return [save for save in self._active if save.tiers and save._unfinished()]


def _left(end: float) -> float:
    return max(LEAST_S, end - time.monotonic())


def _naming(step: int, error: CheckpointError) -> CheckpointError:
    """Return the error with the step number in its message."""
    return error if str(error).startswith(f"step {step} ") else SkippedError(f"step {step} was not saved: {error}")
