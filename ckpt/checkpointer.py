"""What the user holds: `Checkpointer`.

    step() -> read the state -> stage it -> (sealed) -> have it written to the tiers that are due
    restore() -> newest source in the history -> fill -> open a new epoch that continues from it

Nothing here waits for a disk, unless asked to. Errors of the background are raised by the next call, once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import platform
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch

from ckpt import __version__
from ckpt.checkpoint.losses import Loss
from ckpt.errors import (
    CheckpointError,
    ClosedError,
    CorruptError,
    DeadlineError,
    FencedError,
    NoCheckpointError,
    SaveError,
    SkippedError,
    UsageError,
)
from ckpt.events import log
from ckpt.faults.report import Fault
from ckpt.format.manifest import Attempt
from ckpt.format.partition import Seat
from ckpt.goodput.breakdown import decimal, duration
from ckpt.goodput.cadence import Auto
from ckpt.ipc import channel
from ckpt.ipc.arena import Arena
from ckpt.ipc.heartbeat import LEAVING, OPENING, PAUSED, RESTORING, Heartbeat
from ckpt.ipc.notes import CadenceNote, DamagedNote
from ckpt.ipc.watch_requests import KeepBooks, RestoreDone, Show
from ckpt.metrics import as_metrics
from ckpt.ranks.world import World
from ckpt.restore.resume import Restored, gather, restore_first, together
from ckpt.restore.sources import MemorySource, RestoreSource
from ckpt.save import Save
from ckpt.state.capture import Capture, Reading
from ckpt.subscribers import flush, publish
from ckpt.tiers import Tier, as_tiers
from ckpt.trainer import replica_check, replica_rescue
from ckpt.trainer.cadence_sync import TOO_LATE, CadenceSync
from ckpt.trainer.deferred import MOST, DeferredStep, DeferredSteps
from ckpt.trainer.fault_handler import FaultHandler
from ckpt.trainer.optimizer_hooks import UpdateHook
from ckpt.trainer.ownership import Ownership
from ckpt.trainer.profiler import traced
from ckpt.trainer.redo import RedoClient
from ckpt.trainer.replica_rescue import MissingTensors
from ckpt.trainer.snapshot import PendingSnapshot
from ckpt.trainer.stage import Stager
from ckpt.trainer.writer_supervisor import WriteInFlight, WriterSupervisor
from ckpt.triggers import Trigger, as_triggers

SURELY_NEWER = 2  # snapshots of a rank: another may be one step behind
COMPARE_S = 120.0  # until the digests of other ranks' replicas are there
DEFERRED = 1 << 20  # bytes of a step that is not due, which are kept for a fault all the same
DEFER_SHARE = 0.001  # of a step, that it may cost
DEFER_AGAIN = 1000  # steps, after which it is measured again
KEEP_S, KEEP_SHARE, KEEP_MOST_S = 0.001, 0.05, 0.002  # of the CPU, to keep at each step what that is made of
KEEP_TRIES = 3  # that have to cost more, one after the other: one alone may just have been held up
STOP_S = 30.0  # for an incident that is being dealt with
LIVE_S = 10.0  # for a copy of the running state
TURN_S = 0.2  # between two looks at whether we were closed
FIRST_ARENA_S = 2.0  # the first save may wait this long for its memory, once
MISSING: Any = object()
T = TypeVar("T")

_open: weakref.WeakValueDictionary[str, Checkpointer] = weakref.WeakValueDictionary()


@dataclass
class Stats:
    """Seconds that saving took from training. `stalls`: of each of the last saves, the wait before updates included."""

    saves: int = 0
    skipped: int = 0
    stalled_s: float = 0.0
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=10_000), repr=False)


class Checkpointer:
    """Saves a training run as it goes, and brings it back.

    `state`: a dict of modules, optimizers, anything with state_dict and load_state_dict, tensors and plain values. What
    an object's state_dict() does not say, though its load_state_dict() needs it, is not saved: nobody else can know it.
    `tiers`: a folder or URL, or a list of `Memory` and `Tier`; None keeps snapshots in memory only, found again by
    `name`. `every`: "auto" has it found out how often to save, see `ckpt.Auto`; without it, memory is saved at every
    step, and a tier that is given as a string at every 100th.
    `on_busy`: whether a step waits for a free slot ("wait", at most `busy_timeout_s`) or is not saved ("skip").
    `on_error`: "raise" lets the next call raise what went wrong in the background, "warn" only logs it.
    `agree_timeout_s`: how long the other ranks are waited for where all must come: here, in restore() and in close().
    `triggers`: when to save out of turn, see `ckpt.triggers`: "auto", or a list such as [ckpt.on_signal("SIGTERM")].
    `on_fault`: called in a background thread with the account of each fault, those that ended earlier incarnations
    on this machine included; `faults` holds the latter.
    `metrics`: a port for Prometheus, or `ckpt.Metrics`, which has TensorBoard too.
    `takeover`: open a run that another process trains. That one is told, and saves no more.

    Raises StateError for a state that cannot be saved, FormatError or StoreError for a place that cannot be used,
    InUseError for a run that another process trains.
    Use it as a context manager, or call `close()`.
    """

    def __init__(
        self,
        state: dict[str, Any],
        tiers: object = None,
        *,
        name: str | None = None,
        every: str | Auto | None = None,
        on_busy: str = "wait",
        on_error: str = "raise",
        busy_timeout_s: float = 600.0,
        close_timeout_s: float = 300.0,
        agree_timeout_s: float = 300.0,
        triggers: object = "auto",
        on_fault: Callable[[Fault], None] | None = None,
        metrics: object = None,
        takeover: bool = False,
    ) -> None:
        if on_busy not in ("wait", "skip") or on_error not in ("raise", "warn"):
            raise UsageError('on_busy is "wait" or "skip", on_error is "raise" or "warn"')
        self._metrics = as_metrics(metrics)
        self._world = World.detect(channel.node_id(), timeout_s=agree_timeout_s)
        if on_busy == "skip" and self._world.size > 1:
            raise UsageError(
                'on_busy="skip" is for one rank only: a rank that skips alone leaves no step that all have'
            )
        if self._metrics is not None:
            self._metrics.port(self._world.local_rank)
        wanted = as_triggers(triggers)
        self._memory, self._tiers = as_tiers(tiers, every)
        place = self._tiers[0].url if self._tiers else f"memory:{name}"
        if not self._tiers and name is None:
            raise UsageError("a run that is kept in memory only needs name=, by which it is found again")
        if place in _open:
            raise UsageError(f"another Checkpointer in this process uses {place}: close() it first")
        self.stats = Stats()
        self.last_restore: Restored | None = None
        self._on_busy, self._on_error = on_busy, on_error
        self._busy_timeout_s, self._close_timeout_s = busy_timeout_s, close_timeout_s
        self._lock = threading.RLock()  # a signal handler may close us meanwhile
        self._turn = threading.RLock()  # of whoever is in step(), save(), restore() or close()
        self._errors: list[tuple[CheckpointError, Save | None]] = []
        self._fenced: FencedError | None = None
        self._heard = False  # whether a call has said so
        self._active: list[Save] = []
        self._owed: set[int] = set()  # tiers whose due snapshot was dropped
        self._dropped = False  # whether the last snapshot was: the next step is saved instead, due or not
        self._exposed: set[str] = set()  # tensors that others than optimizers write to; replaced, never changed
        self._last_step: int | None = None
        self._stepped = False  # whether that is a step that was done since the last restore
        self._thread = 0  # that did it
        self._finite: bool | None = None  # what was said of it
        self._moments = DeferredSteps(math.inf if self._between else MOST)
        self._within: int | None = None  # the step that step() or save() is at this moment dealing with
        self._moment: DeferredStep | None = None  # what it was made of, if it was not due
        self._dear = 0  # how often running it cost too much to keep that
        self._keep_after = 0  # steps that are not due, until it is tried again
        self._exchanged = False  # weights are others at the moment, as `pause` was told
        self._last: tuple[Save, PendingSnapshot] | None = None
        self._written: deque[int] = deque(maxlen=256)  # steps that went to a durable tier, or were to
        self._defer_s = 0.0  # what it cost the last time
        self._not_due = 0
        self._deferred: tuple[Save, PendingSnapshot] | None = (
            None  # how to copy the last step, which was not due, after all
        )
        self._newest: tuple[Save, Attempt, tuple[Arena, int]] | None = None  # in memory: staged, or restored from there
        self._sound: tuple[Save, Attempt, tuple[Arena, int]] | None = None  # the newest that is not broken, if that is
        self._updates_before = 0  # optimizer steps before the last call of step()
        self._restored = False
        self._restored_place: tuple[Arena, int] | None = None
        self._differing: set[str] = set()  # tensors that ranks should hold alike, and do not; replaced, never changed
        self._compared: int | None = None  # the epoch in which replicas were compared first
        self._torn = False  # a restore failed half-way
        self._waiting_since: float | None = None  # an optimizer waits for a copy
        self._said_paused = False
        self._forked = self._closed = self._failed = False
        self._place = place
        self._began = time.monotonic()
        self._stager = Stager()
        self._heartbeat = Heartbeat.create()
        self._ownership = Ownership(self._world, self._tiers, self._memory, place, busy_timeout_s)
        with contextlib.ExitStack() as undo:  # whatever comes in between, Ctrl-C too
            undo.callback(self._stager.stop)
            self._supervisor = self._ownership.open(lambda: self._prepare(state, takeover))
            undo.callback(self._supervisor.give_up)
            self._start(undo, wanted, on_fault)
            undo.pop_all()

    def _start(
        self, undo: contextlib.ExitStack, wanted: tuple[Trigger, ...], on_fault: Callable[[Fault], None] | None
    ) -> None:
        """Everything that needs a writer. `undo`: what ends it all again if something fails."""
        undo.callback(setattr, self, "_closed", True)
        self._cadence_sync = CadenceSync(
            self._world, self._supervisor, self._heartbeat, self._memory, self._tiers, self._ownership.cadence
        )
        undo.callback(self._cadence_sync.stop)
        self._supervisor.hear(DamagedNote, self._on_damaged)
        self._supervisor.on_failure = lambda error: self._note_error(error, None)
        self._fenced = self._supervisor.lost  # while it was opened
        self._hook = UpdateHook(self._wait_for_copy, self._capture.unguard, self._capture.concerns)
        undo.callback(self._hook.remove)
        logging_tiers = {i: tier.url for i, tier in enumerate(self._tiers) if tier.log_every_step}
        self._redo = RedoClient(logging_tiers, self._supervisor, self._stager, self._capture, self._note_error)
        self._hook.on_step = self._redo.watch.note if logging_tiers else None
        self.faults = list(self._supervisor.faults)
        self._fault_handler = FaultHandler(wanted, self._world, self._supervisor, self._heartbeat, self, on_fault)
        self._fault_handler.start()
        undo.callback(self._fault_handler.stop, STOP_S)
        for fault in self.faults:
            log.warning("before this start: %s", fault.line)
            self._fault_handler.tell(fault)
        _open[self._place] = self
        undo.callback(_open.pop, self._place, None)
        os.register_at_fork(after_in_child=_weakly(self._after_fork))
        self._atexit = _weakly(self._close_at_exit)
        atexit.register(self._atexit)
        self._at_child_exit = _at_child_exit(self._atexit)
        self._keep_books()
        self._show()
        if not self._ownership.has_checkpoints:  # else after restore(), which has better use for the cores
            self._supervisor.prepare(_predicted_size(self._capture), 1 << 14)

    def _prepare(self, state: dict[str, Any], takeover: bool) -> WriterSupervisor:
        self._capture = Capture(state, Seat(self._world.rank, self._world.size))
        self._capture.read()  # what cannot be saved is said now
        key = channel.run_key(self._place, self._world.local_rank)
        return WriterSupervisor(
            key, self._tiers, self._memory, self._stager, self._world, self._busy_timeout_s, takeover
        )

    def _show(self) -> None:
        """Whoever wants to know what we do asks the writer: `ckpt top`, and metrics."""
        seat = self._world.rank, self._world.size, self._world.local_rank
        metrics = None if self._metrics is None else self._metrics.to_json()
        request = Show(self._place, *seat, opening=self._began, opened=time.monotonic(), metrics=metrics)
        self._supervisor.show(request, (self._heartbeat.fd,))

    def _keep_books(self) -> None:
        """The writer of the rank that speaks for the nearest tier keeps the ledger, see `ckpt.writer.bookkeeper`."""
        if self._supervisor.roles[0].place > 0 if self._tiers else self._world.rank > 0:
            return
        owner = self._supervisor.owner
        request = KeepBooks(
            epoch=f"{owner.epoch}.{owner.nonce}",
            rank=self._world.rank,
            world=self._world.size,
            url=self._place,
            opening=self._began,
            opened=time.monotonic(),
            places=self._cadence_sync.places(),
            versions={"everystep": __version__, "torch": torch.__version__, "python": platform.python_version()},
            decides=self._world.rank == 0,
            cadence=self._cadence_sync.began,
        )
        self._supervisor.hear(CadenceNote, self._cadence_sync.propose)
        self._supervisor.keep_books(request, (self._heartbeat.fd,))

    @property
    def writer_pid(self) -> int:
        """The process that holds this one's snapshots, writes them, and outlives it; 0 if there is none just now."""
        client = self._supervisor.client
        return client.pid if client.alive else 0

    # -- saving --

    @traced("ckpt.step")
    def step(self, step: int, *, finite: bool | torch.Tensor | None = None) -> Save | None:
        """Call once after every optimizer step with the number of steps done. Saves what is due; returns at once.

        `finite`: False if the training has gone wrong, as `torch.isfinite(loss)` says. Such a step is saved to be
        looked at, never displaces the last one that was not, and is only restored by its number. (On an accelerator,
        to look at a tensor waits for it.) The handle says when the step is staged and committed; None if nothing was
        due.
        """
        with self._in_turn():
            return self._step(step, None if finite is None else bool(finite))

    def _step(self, step: int, finite: bool | None) -> Save | None:
        self._check_usable()
        self._check_step(step)
        asked = self._fault_handler.due(step)
        durable = list(range(len(self._tiers))) if asked else self._cadence_sync.schedule.tiers_due(step)
        if self._owed:
            durable = sorted({*durable, *self._owed})
        save = None
        try:
            with self._not_cut_off(step):
                self._begin_step(step, finite)
                kept = (self._dropped or self._cadence_sync.schedule.memory_due(step)) and self._supervisor.rings
                if durable or asked or self._redo.on or kept:
                    save = self._save(step, durable, explicit=asked, asked=asked)
                else:
                    self._keep(step)
                if save is not None and self._on_busy == "skip":  # it may be left out yet
                    self._moment = self._take(step)
        except SkippedError as error:  # there is no memory for it, which was said
            self.stats.skipped += 1
            log.info("%s", error)
            self._keep(step)
        finally:
            if asked:
                self._fault_handler.answer(save)
        self._raise_pending()
        return save

    def _begin_step(self, step: int, finite: bool | None) -> None:
        self._finite = finite
        self._last_step, self._updates_before, self._deferred, self._moment = step, self._hook.count, None, None
        self._heartbeat.beat(step, self.stats.stalled_s, self.stats.saves, self.stats.skipped)
        self._stepped, self._exchanged, self._thread = True, False, threading.get_ident()
        self._capture.trust(self._hook.announced())

    def request(self, why: str = "no reason given") -> None:
        """Have all ranks save one of the next steps to every tier; for any thread of any rank. Returns at once."""
        self._check_usable()
        if not self._fault_handler.armed:
            raise UsageError("this Checkpointer was made without triggers: call save() at the same step on all ranks")
        self._fault_handler.request(why)

    @contextlib.contextmanager
    def pause(self, *, changes_state: bool = False) -> Iterator[None]:
        """Around what is no training, such as an evaluation: it is not taken for a hang.

        `changes_state`: weights are exchanged meanwhile, as for averages; at a fault in it nothing is copied any more.
        """
        if self._forked:
            raise ClosedError("this process was forked from the trainer: only the trainer saves")
        outer = self._exchanged
        if changes_state:
            self._deferred, self._exchanged = None, True
        before, began = self._heartbeat.state, time.monotonic()
        self._heartbeat.touch(PAUSED)
        try:
            yield
            self._exchanged = outer  # after an exception they may be so still
        finally:
            self._heartbeat.paused(time.monotonic() - began if before != PAUSED else 0.0)
            self._heartbeat.touch(before)

    @traced("ckpt.step")
    def save(self, step: int | None = None) -> Save:
        """Save now, to every tier: the step given, or the one that the last `step()` named, as it was then.

        Without a durable tier it is staged only. UsageError if the step that `step()` named was not due and cannot be
        had any more: an optimizer has begun a further one, or weights were changed. Where nothing is kept of such steps
        (`Memory(between=False)`, or a state that is long to read, or more than 64 MiB of it moves within a step) it is
        saved as it is now: call this right after `step()`.
        """
        with self._in_turn():
            return self._save_now(step)

    def _save_now(self, step: int | None) -> Save:
        self._check_usable()
        if step is None or step == self._last_step:
            if self._last_step is None:
                raise UsageError("say which step this is: save(step)")
            self._check_same_step()
            save = self._save_again()
        else:
            self._check_step(step)
            with self._not_cut_off(step):
                self._begin_step(step, None)
                save = self._save(step, list(range(len(self._tiers))), explicit=True)
        self._raise_pending()
        return save

    def _check_same_step(self) -> None:
        if self._hook.count != self._updates_before:
            raise UsageError(f"training went on after step {self._last_step}: call save() right after step()")

    @contextlib.contextmanager
    def _not_cut_off(self, step: int) -> Iterator[None]:
        """Whatever ends this, such as Ctrl-C: as long as we are here nothing has moved on, so the step can be kept."""
        outer, self._within = self._within, step
        try:
            yield
        except SkippedError:
            raise
        except BaseException:
            if self._last_step == step and not self._closed:
                with contextlib.suppress(Exception):
                    self._moment = self._take(step)
            raise
        finally:
            self._within = outer

    def stage(self) -> Save:
        """Have the step that the last `step()` named in memory, due there or not, so that `save()` may write it later.

        Returns when it is copied; what goes wrong then is raised by the next call.
        """
        with self._in_turn():
            return self._stage_now()

    def _stage_now(self) -> Save:
        self._check_usable()
        assert self._last_step is not None
        self._check_same_step()
        if self._last is not None and self._last[0].step == self._last_step and self._last[1].under_way:
            save, job = self._last
            if job.copied.wait(self._busy_timeout_s) and job.place is not None:
                return save
        save = self._save(self._last_step, [], explicit=True, taken=self._as_stepped())
        assert self._last is not None
        self._last[1].copied.wait(self._busy_timeout_s)
        return save

    def _save_again(self) -> Save:
        """The last step is in memory already, perhaps on its way to a tier: write it to the tiers that it misses."""
        assert self._last_step is not None
        save, job = self._last or (None, None)
        if job is not None and job.under_way:
            job.copied.wait(self._busy_timeout_s)
        if save is None or job is None or save.step != self._last_step or job.place is None:
            everywhere = list(range(len(self._tiers)))
            return self._save(self._last_step, everywhere, explicit=True, taken=self._as_stepped())
        if save.told:  # that error is dealt with; the next one is news
            with self._lock:
                self._errors = [(error, of) for error, of in self._errors if of is not save]
            save.told = False
        self._written.append(save.step)
        for i, tier in enumerate(self._tiers):
            if tier.url not in save.tiers or save.failed(tier.url):
                self._write_to(save, job.attempt, job.place, i)
        return save

    def _write_to(self, save: Save, attempt: Attempt, place: tuple[Arena, int], tier: int) -> None:
        """To a tier that it was not on its way to. Cut off by Ctrl-C, nobody waits for it, and close() tries again."""
        url = self._tiers[tier].url
        try:
            save.add_tier(url)
            self._write(save, attempt, place, tier)
        except BaseException as error:
            save.cut_off(url, SaveError(f"step {save.step} was not written to {url}: {error!r}"))
            raise

    def _as_stepped(self) -> DeferredStep | None:
        """What the state was at the last step, which is not in memory; None if only the caller can know that it still
        is that now. UsageError if it is not."""
        moment = self._moment if self._moment is not None and not self._moment.too_large else None
        if self._exchanged:
            why = "weights are exchanged for others at the moment, see pause()"
        else:
            why = "" if moment is None else moment.gone(self._capture)
            if self._last is not None and self._last[0].step == self._last_step and self._last[1].written_by_others:
                why = str(self._last[1].error)
        if why:
            raise UsageError(f"step {self._last_step} cannot be saved any more: {why}. Call save() right after step()")
        return moment

    def _save(
        self,
        step: int,
        durable: list[int],
        *,
        explicit: bool,
        asked: bool = False,
        taken: DeferredStep | None = None,
        timeout_s: float | None = None,
    ) -> Save:
        """`taken`: what the state was at that step, if that is not what it is now."""
        started, closing = time.perf_counter(), timeout_s is not None
        timeout_s = self._busy_timeout_s if timeout_s is None else timeout_s
        self._deferred = None
        if durable:
            self._written.append(step)
        owner = self._supervisor.owner
        attempt = Attempt(owner.epoch, step, owner.nonce)
        save = Save(step, str(attempt), [self._tiers[i].url for i in durable])
        save.told = asked and not self._cadence_sync.schedule.tiers_due(step)  # a best effort is no error
        try:
            if taken is None:
                self._capture.copy_eagerly(self._exposed)
                self._capture.keep_apart(self._differing)
            reading = self._capture.read() if taken is None else taken.reading
            values = json.dumps(reading.values, separators=(",", ":")).encode()
            self._supervisor.tell_layout(reading.layout, reading.guarded)
            settings = self._begin_log(save, reading)
            must = explicit or bool(durable) or (self._redo.on and self._on_busy == "wait")
            self._ready_memory(reading.layout.arrangement.data_size, len(values), timeout_s if must else 0.0, must=must)
            if not (must or self._redo.on or self._supervisor.rings):
                raise SkippedError(f"step {step} was not saved: memory is short, and it was due nowhere else")
        except BaseException as error:
            what = error if isinstance(error, CheckpointError) else SaveError(f"step {step} was not saved: {error!r}")
            save.set_failed(what)
            if durable and self._world.size > 1:  # the others wait for this rank's part
                self._supervisor.retract(attempt, f"rank {self._world.rank}: {what}")
            raise
        job = PendingSnapshot(
            attempt=attempt,
            reading=reading,
            values=values,
            finite=self._finite,
            busy="wait" if explicit else self._on_busy,
            deadline=time.monotonic() + timeout_s,
            on_end=lambda job: self._on_staged(save, job, durable, settings),
            fingerprints=[] if taken is None else list(taken.fingerprints),
            watched={} if taken is None else taken.watched,
            alive=taken,
        )
        if not closing:  # nobody comes to compare any more
            self._compare_replicas(job)
        save.began = started
        try:
            self._last = (save, job)
            with self._lock:
                self._active = [s for s in self._active if s.unfinished()] + [save]
            self._stager.submit(job)
        except BaseException as error:
            if not job.submitted:
                save.set_failed(SaveError(f"step {step} was not saved: {error!r}"))
            raise
        save.stalled_s = time.perf_counter() - started
        self._count(save.stalled_s)
        return save

    def _begin_log(self, save: Save, reading: Reading) -> list[list[float] | None] | None:
        """What the redo log needs to know of a step that goes there."""
        if not self._redo.on:
            return None
        self._redo.prepare(reading)
        for url in self._redo.urls:
            save.add_log(url)
        return self._redo.told()

    def _compare_replicas(self, job: PendingSnapshot) -> None:
        """At the first save of an epoch, and now and then: see `ckpt.trainer.replica_check`. Nobody waits for the
        answer."""
        step, epoch, size = job.attempt.step, job.attempt.epoch, self._world.size
        due = self._compared != epoch or step % replica_check.EVERY == 0
        if size == 1 or not due or self._closed:
            return
        self._compared = epoch
        comparison = replica_check.Comparison(self._capture.replicated)

        def compare() -> None:
            if not job.copied.wait(self._busy_timeout_s) or job.error is not None:
                return
            try:
                key, mailbox = f"{job.attempt}", self._ownership.mailbox()
                names = replica_check.differing(mailbox, key, self._world.rank, size, comparison.digests(), COMPARE_S)
            except CheckpointError as error:
                log.warning("the replicas of step %d could not be compared: %s", step, error)
                return
            if names:
                shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                log.error(
                    "%s: ranks that should hold the same hold different values at step %d. Steps saved until now mix "
                    "them. From the next one on each rank's own are saved, but of sharded tensors (HSDP) still a "
                    "mixture. Look for what lets the replicas drift",
                    shown,
                    step,
                )
                self._differing = self._differing.union(names)

        job.beside = comparison.look
        threading.Thread(target=compare, name="ckpt-replicas", daemon=True).start()

    def _ready_memory(self, data_size: int, values_size: int, timeout_s: float, *, must: bool) -> None:
        arena = self._stager.arena
        if arena is not None and arena.fits(data_size, values_size):
            return
        first = arena is None and not self._said_paused
        end = time.monotonic() + (timeout_s if must else FIRST_ARENA_S if first else 0.0)
        while True:
            if self._closed:  # by a signal handler
                self._check_usable()
            self._supervisor.prepare(data_size, values_size, again=must)
            try:
                self._supervisor.take_prepared(max(0.0, end - time.monotonic()))
            except CheckpointError as error:
                if must or isinstance(error, SkippedError):
                    raise
                self._note_error(error, None)
                break
            if not must and self._supervisor.refused(data_size + values_size):
                raise SkippedError("memory is short")
            arena = self._stager.arena
            ready = arena is not None and arena.fits(data_size, values_size)
            if ready or self._supervisor.failure is not None or time.monotonic() >= end:
                break
            time.sleep(0.02)  # the writer died meanwhile, and the next one is asked
        arena = self._stager.arena
        if (arena is None or not arena.fits(data_size, values_size)) and not self._said_paused:
            self._said_paused = True
            log.warning("memory for snapshots is being prepared; until it is ready, steps are not kept in memory")

    def _count(self, seconds: float, *, more: bool = False) -> None:
        self.stats.stalled_s += seconds
        if more and self.stats.stalls:
            self.stats.stalls[-1] += seconds
        elif not more:
            self.stats.saves += 1
            self.stats.stalls.append(seconds)

    # -- steps that are not due --

    def _keep(self, step: int) -> None:
        """A step that is not due, for the case that the training ends behind it."""
        if self._fault_handler.armed and self._supervisor.rings and self._may_defer():
            began = time.perf_counter()
            self._defer(step)
            self._defer_s = time.perf_counter() - began
            self.stats.stalled_s += self._defer_s
        elif self._between is False:
            return
        elif self._keep_after > 0 and not self._between:
            self._keep_after -= 1
        else:
            began, cpu = time.perf_counter(), time.thread_time()
            self._moment = self._take(step)
            usual_s = self._heartbeat.usual_s
            most_s = max(KEEP_S, min(KEEP_SHARE * usual_s, KEEP_MOST_S), self._defer_share * usual_s)
            self._dear = self._dear + 1 if usual_s and time.thread_time() - cpu > most_s else 0
            self._keep_after = min(2 ** (self._dear - KEEP_TRIES), DEFER_AGAIN) if self._dear >= KEEP_TRIES else 0
            self.stats.stalled_s += time.perf_counter() - began

    def _take(self, step: int) -> DeferredStep:
        return self._moments.take(step, self._capture.read_on(), self._capture)

    @property
    def _between(self) -> bool | None:
        return None if self._memory is None else self._memory.between

    def _may_defer(self) -> bool:
        """Whether that is worth it: measured now and then."""
        if self._between is not None:
            return self._between
        usual_s = self._heartbeat.usual_s
        self._not_due += 1
        return usual_s == 0 or self._defer_s <= self._defer_share * usual_s or self._not_due % DEFER_AGAIN == 0

    @property
    def _defer_share(self) -> float:
        every = None if self._memory is None else self._memory.every
        return every.budget if isinstance(every, Auto) else DEFER_SHARE

    def _defer(self, step: int) -> None:
        """Keep of a step that is not due what cannot be read later; the rest stays as it is until an optimizer begins.

        It goes into the slot that is free, so that it outlives this process like all the rest. Nothing is kept aside
        where that would be much, as with a large frozen model.
        """
        reading = self._capture.read()
        self._moment = self._moments.take(step, reading, self._capture)
        apart = [t for t, guarded in zip(reading.tensors, reading.guarded, strict=True) if not guarded]
        if sum(t.nbytes for t in apart) > DEFERRED:
            return
        values = json.dumps(reading.values, separators=(",", ":")).encode()
        arena = self._stager.arena
        if arena is None or not arena.fits(reading.layout.arrangement.data_size, len(values)):
            self._supervisor.prepare(reading.layout.arrangement.data_size, len(values))
            with contextlib.suppress(CheckpointError):  # the next save says so
                self._supervisor.take_prepared(0.0)
            arena = self._stager.arena
            if arena is None or not arena.fits(reading.layout.arrangement.data_size, len(values)):
                return
        self._supervisor.tell_layout(reading.layout, reading.guarded)
        owner = self._supervisor.owner
        attempt = Attempt(owner.epoch, step, owner.nonce)
        save = Save(step, str(attempt), [])

        def on_end(job: PendingSnapshot) -> None:
            if job.place is not None:
                self._on_staged(save, job, [])

        job = PendingSnapshot(
            attempt=attempt, reading=reading, values=values, finite=self._finite, busy="skip", on_end=on_end
        )
        self._stager.postpone(job)
        self._deferred = save, job

    # -- without the main thread: see `ckpt.trainer.fault_handler.Levers` --

    def in_memory(self, timeout_s: float) -> int | None:
        if self._last is not None and self._last[0].step == self._last_step:
            save, job = self._last
            job.copied.wait(timeout_s)
            if job.place is not None:
                return save.step
        newest = self._newest
        return None if newest is None else newest[0].step

    def copy_live(self) -> int | None:
        deferred, count = self._deferred, self._updates_before
        if threading.get_ident() == self._thread:  # it is not training meanwhile, and so need not be held up
            self._stage_last(time.monotonic() + LIVE_S)
            return self._last_step if self.in_memory(0.0) == self._last_step else None
        if deferred is None or deferred[0].step != self._last_step or self._torn:
            return None
        self._deferred = None
        save, job = deferred
        whole = self._stager.complete(job, lambda: self._hook.count == count, LIVE_S)
        return save.step if whole else None

    def fill_in(self, gap: MissingTensors) -> list[int]:
        owner, count, filled = self._supervisor.owner, self._updates_before, list[int]()
        if self._last_step is None or gap.attempt != Attempt(owner.epoch, self._last_step, owner.nonce) or self._torn:
            return []
        self.in_memory(LIVE_S)  # our own copy comes first, and has waited for what the device does

        def work() -> None:
            filled.extend(replica_rescue.fill(gap, self._capture.replicated))

        return filled if self._stager.undisturbed(work, lambda: self._hook.count == count, LIVE_S) else []

    def give_up(self, attempt: Attempt) -> None:
        due = self._cadence_sync.schedule.tiers_due(attempt.step)
        if not due and attempt.step not in self._written:  # else it is saved in any case
            self._supervisor.retract(attempt, f"rank {self._world.rank} had passed step {attempt.step} by then")

    def give_memory_back(self) -> int:
        # Of several ranks one may be a step behind: what is left must still hold a step that all have.
        return self._stager.give_up_slot() if self._world.size == 1 else self._stager.give_up_slot(3)

    # -- events, from the staging thread and the receiving thread --

    def _on_staged(
        self, save: Save, job: PendingSnapshot, durable: list[int], settings: list[list[float] | None] | None = None
    ) -> None:
        if job.error is None and job.place is None:
            return
        self._exposed = self._exposed.union(job.written_by_others)  # before the user hears of it
        if job.error is not None:
            if job.written_by_others or isinstance(job.error, SkippedError):
                self._owe(durable)
                self._dropped = self._world.size == 1 and bool(job.written_by_others)
                self.stats.skipped += 1
                log.warning("%s", job.error)
            else:
                self._note_error(job.error, save)
            if durable and self._world.size > 1:  # the others wait for this rank's part
                self._supervisor.retract(job.attempt, f"rank {self._world.rank}: {job.error}")
            publish("failed", save.step, tier="memory", error=str(job.error))
            save.set_failed(job.error)
            return
        assert job.place is not None
        self._newest = (save, job.attempt, job.place)
        self._owed.difference_update(durable)
        self._dropped = False
        sound = job.finite is not False  # else what was there before is needed yet
        if sound and (self._supervisor.superseded or self._world.size == 1):
            self._unpin_restored()
        if sound and self._world.size > 1 and self._supervisor.newer == SURELY_NEWER:
            self._ownership.tell_newer(job.attempt.epoch)
        self._supervisor.acknowledge(job.attempt, *job.place, lambda error: self._on_kept(save, job, error))
        if settings is not None:
            self._redo.log(save, job.attempt, job.place, settings)
        self._supervisor.on_sealed(sound=sound)
        for i in durable:
            self._write(save, job.attempt, job.place, i)

    def _on_kept(self, save: Save, job: PendingSnapshot, error: CheckpointError | None) -> None:
        """A process that survives this one has the snapshot, or none will have it any more."""
        if error is not None:
            publish("failed", save.step, tier="memory", error=str(error))
            save.set_unstaged(error)
            return
        save.set_staged(self._supervisor.survives)
        self._say_staged(save, job)

    def _say_staged(self, save: Save, job: PendingSnapshot) -> None:
        """To subscribers: with what training has waited for it, in step() and, just now perhaps, before an update."""
        now, since = time.perf_counter(), self._waiting_since
        if save.stalled_s is not None:
            stalled_s = save.stalled_s + (0.0 if since is None else now - since)
        else:  # step() waits yet, or the step was kept aside and nobody waited
            stalled_s = now - save.began if save.began else 0.0
        publish("staged", save.step, stall_s=stalled_s, nbytes=job.reading.layout.arrangement.data_size)

    def _say_committed(self, save: Save, url: str, seconds: float, write: WriteInFlight) -> None:
        publish("committed", save.step, tier=url, seconds=seconds, nbytes=write.nbytes, stored=write.nbytes_stored)
        level = logging.INFO if self._world.rank == 0 else logging.DEBUG
        of = "" if self._world.size == 1 else f" (of rank {self._world.rank})"
        sizes = f"{decimal(write.nbytes)} as {decimal(write.nbytes_stored)}{of}"
        log.log(level, "step %d committed to %s in %s, %s", save.step, url, duration(seconds), sizes)

    def _owe(self, tiers: list[int]) -> None:
        """The next step makes up for it. Not where there are other ranks: they would not save that one."""
        if self._world.size == 1:
            self._owed.update(tiers)

    def _write(self, save: Save, attempt: Attempt, place: tuple[Arena, int], tier: int) -> None:
        url, began = self._tiers[tier].url, time.monotonic()

        def done(error: CheckpointError | None) -> None:
            if error is None:
                self._say_committed(save, url, time.monotonic() - began, write)
                save.set_committed(url)
                return
            publish("failed", save.step, tier=url, error=str(error))
            failure: CheckpointError = error
            # A further tier is slow, or another rank: no reason to disturb the training.
            if isinstance(error, SkippedError) or TOO_LATE in str(error):
                self.stats.skipped += 1
                log.warning("%s", error)
                save.set_failed(error, url)
                return
            if not isinstance(error, FencedError):
                failure = SaveError(
                    f"step {save.step} was not written to {url}: {error}. It is still {self._where_else(save, url)}"
                )
            self._note_error(failure, save)  # before anybody who waits for the save goes on
            save.set_failed(failure, url)

        write = WriteInFlight(attempt, *place, tier, done)
        self._supervisor.write(write)

    def _where_else(self, save: Save, url: str) -> str:
        others = [other for other in save.tiers if other != url and save.written(other)]
        return f"in {others[0]}" if others else "in memory"

    def _note_error(self, error: CheckpointError, save: Save | None) -> None:
        with self._lock:
            if isinstance(error, FencedError):
                self._fenced = error
            self._errors.append((error, save))
        log.warning("%s", error)

    def _on_damaged(self, note: DamagedNote) -> None:
        problems = "; ".join(note.problems)
        self._note_error(
            SaveError(
                f"step {note.step} in {note.tier} is damaged on disk: {problems}. Training can go on: the next "
                f"checkpoint does not build on it. `ckpt repair {note.tier}` says what can be mended"
            ),
            None,
        )

    @traced("ckpt.wait")
    def _wait_for_copy(self) -> None:
        self._heartbeat.update()
        self._waiting_since = time.perf_counter()
        waited = self._stager.before_update(self._busy_timeout_s)
        self._waiting_since = None
        if waited:
            self._count(waited, more=True)

    # -- restoring --

    @overload
    def restore(self, *, step: int | None = None, strict: bool = True) -> int: ...
    @overload
    def restore(self, default: T, *, step: int | None = None, strict: bool = True) -> int | T: ...

    @traced("ckpt.restore")
    def restore(self, default: Any = MISSING, *, step: int | None = None, strict: bool = True) -> Any:
        """Bring the state back to the newest step there is, from the nearest tier, and return the step.

        Tensors are filled in place. A damaged checkpoint is passed over, loudly: `last_restore` says which and why.
        `default` is returned only if every tier was read and none holds a checkpoint. `step` asks for that one, also
        to go back: what was saved after it is not restored by itself any more. `strict=False` takes what fits.

        Raises NoCheckpointError, CorruptError if none of the checkpoints is sound, or MismatchError, after which
        nothing has been changed.
        """
        with self._in_turn():
            self._check_usable(restoring=True)
            self._heartbeat.touch(RESTORING)
            self._deferred = None
            began = time.monotonic()
            try:
                found = self._restore(default, step, strict)
                self._note_restore(began)
                return found
            finally:
                self._heartbeat.touch(OPENING)
                self._fault_handler.went_back()

    def _note_restore(self, began: float) -> None:
        """For the ledger."""
        result, owner = self.last_restore, self._supervisor.owner
        request = RestoreDone(
            at=began,
            seconds=time.monotonic() - began,
            step=None if result is None else result.step,
            source=(result and result.tier) or "",
            attempt=str(owner.restored or ""),
            epoch=f"{owner.epoch}.{owner.nonce}",
            stalled=self.stats.stalled_s,
            saves=self.stats.saves,
            skipped=self.stats.skipped,
            paused=self._heartbeat.paused_s,
            repaired=0 if result is None else len(result.repaired),
            passed_over=0 if result is None else len(result.skipped),
            why=_first_reason(result),
        )
        self._supervisor.tell_restored(request)
        if result is not None and result.step is not None:
            facts = {"source": result.tier, "seconds": result.seconds, "repaired": len(result.repaired)}
            publish("restored", result.step, **facts)

    def _restore(self, default: Any, step: int | None, strict: bool) -> Any:
        started = time.perf_counter()
        together(self._world, "settle", lambda: self._settle_staging(step))
        self._cadence_sync.settle()
        result = Restored(step=None)
        urls = [tier.url for tier in self._tiers]
        with self._supervisor.snapshots() as snapshots:
            acquires = self._supervisor.inherited.acquires
            damage: list[Loss] = []
            sources = gather(self._world, snapshots, acquires, urls, self._ownership.roots, step, damage)
            self._redo.reset()
            source = restore_first(
                self._world, sources, self._capture, result, strict=strict, on_touch=self._touch, lost=damage, step=step
            )
        if source is not None:
            self._finish_restore(source, result, started)
            return result.step
        self.last_restore = result
        if result.skipped:
            self._restored = False
            lines = "\n  ".join(f"step {s.step} in {s.tier}: {s.reason}" for s in result.skipped)
            touched = ". The state is partly overwritten: do not train on it" if self._torn else ""
            raise CorruptError(
                f"no checkpoint could be restored{touched}. `ckpt repair URL`, with --from another location, may mend "
                f"it\n  {lines}"
            )
        if default is MISSING or self._ownership.has_checkpoints or step is not None:
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            lost = "" if self._world.size == 1 else ", at least none of which the parts of all ranks can be reached"
            raise NoCheckpointError(f"there is no {wanted} in {self._places()}{lost}")
        self._restored, self._finite = True, None
        if isinstance(default, int):
            self._last_step = default
        return default

    def _touch(self) -> None:
        self._torn = True

    def _finish_restore(self, source: RestoreSource, result: Restored, started: float) -> None:
        self._ownership.take_over(self._supervisor.owner.epoch, source.attempt)
        if source.damaged:
            self._supervisor.doubt(source.tier, source.attempt, source.damaged)
        self._heartbeat.went_back(source.attempt.step)
        memory = source if isinstance(source, MemorySource) else None
        place = memory.place_of(self._world.rank) if memory is not None else None
        newest: tuple[Save, Attempt, tuple[Arena, int]] | None = None
        kept = memory is not None and place is not None and self._supervisor.holds(place[0])
        if memory is not None and place is not None and kept:
            if memory.world == self._world.size:  # else it is not a share of what this rank has now
                newest = (Save(source.attempt.step, str(source.attempt), []), source.attempt, place)
                newest[0].set_staged()
            if self._supervisor.rings:
                # After a rollback it may be the oldest in the ring, and still it is the one that must not be lost.
                self._stager.pin(*place)
        before = self._restored_place
        # At once, so that Ctrl-C leaves either what was or what is.
        self._restored_place = place if kept and self._supervisor.rings else None
        self._last_step, self._updates_before = source.attempt.step, self._hook.count
        self._restored, self._last, self._newest, self._torn = True, None, newest, False
        self._stepped, self._moment, self._exchanged, self._finite = False, None, False, None
        if before is not None:
            self._stager.unpin(before[0].id, before[1])
        if newest is not None and not self._supervisor.rings:  # its slot is needed again
            self._write_missing(*newest, self._tiers[:1])
        result.seconds = time.perf_counter() - started
        self.last_restore = result
        how = "" if result.verified else ", not yet verified by a digest"
        if result.redone:
            how = f": step {result.base_step} was loaded, and {result.redone} steps after it redone{how}"
        log.info("restored step %d from %s in %.2f s%s", result.step, result.tier, result.seconds, how)
        reading = self._capture.read()
        self._supervisor.prepare(reading.layout.arrangement.data_size, len(json.dumps(reading.values)))

    def _unpin_restored(self) -> None:
        if self._restored_place is not None:
            arena, slot = self._restored_place
            self._restored_place = None
            self._stager.unpin(arena.id, slot)

    def _settle_staging(self, step: int | None) -> None:
        """No copy may be under way while the state is overwritten; the step that is asked for must have arrived."""
        self._stager.do(lambda: None, self._busy_timeout_s)
        if self._world.size > 1:  # the owner changes for all ranks at once: what is under way must not be fenced off
            self.wait(self._busy_timeout_s)
        elif step is not None:
            self.wait(self._busy_timeout_s, step=step)

    def _places(self) -> str:
        return " or ".join([*(["memory"] if self._memory else []), *(tier.url for tier in self._tiers)])

    # -- checks --

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One thread at a time. Whoever closes us may wait for a thread that waits here, such as that of `on_fault`."""
        while not self._turn.acquire(timeout=TURN_S):
            if self._closed:
                self._check_usable()
        try:
            yield
        finally:
            self._turn.release()

    def _check_usable(self, *, restoring: bool = False) -> None:
        if self._forked:
            raise ClosedError("this process was forked from the trainer: only the trainer saves")
        if self._closed:
            raise ClosedError("this Checkpointer is closed: make a new one")
        if self._fenced is not None:
            self._heard = True
            raise self._fenced
        if restoring:
            return
        if self._torn:
            raise UsageError("the last restore failed half-way, so the state is not one of any step: restore again")
        if self._ownership.has_checkpoints and not self._restored:
            raise UsageError(
                f"{self._places()} holds checkpoints: call restore() before the first step, or use another location"
            )

    def _check_step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
            raise UsageError(f"a step is a number from 0, not {step!r}")
        if self._last_step is not None and step <= self._last_step:
            raise UsageError(
                f"step {step} cannot follow step {self._last_step}: steps only go up (restore() goes back)"
            )
        silent = self._capture.has_scaler or self._capture.has_unguarded  # steps may be skipped, or run no hooks
        accumulating = 0 < self._hook.count == self._updates_before and not silent
        if accumulating and self._capture.holds_gradients():
            raise UsageError(
                f"no optimizer has stepped since step {self._last_step}: call step() once per optimizer step, not "
                "in the middle of gradient accumulation. After a batch left out on purpose, drop its gradients first"
            )

    def _raise_pending(self) -> None:
        with self._lock:
            errors = [(error, save) for error, save in self._errors if save is None or not save.told]
            self._errors = []
        if self._heard:
            errors = [one for one in errors if not isinstance(one[0], FencedError)]
        if not errors or self._on_error == "warn":
            return
        first = errors[0][0]
        for error, _ in errors[1:]:
            first.add_note(f"also: {error}")
        self._heard |= isinstance(first, FencedError)
        raise first

    # -- the end --

    def wait(self, timeout_s: float | None = None, *, step: int | None = None) -> None:
        """Until every save begun so far, or that of one step, is staged and written, or has failed. DeadlineError past
        `timeout_s`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            active = [save for save in self._active if step in (None, save.step)]
        for save in active:
            for future in save.unfinished():
                try:
                    future.exception(None if end is None else max(0.0, end - time.monotonic()))
                except TimeoutError:
                    raise DeadlineError(f"saves are not finished after {timeout_s:g} s; they go on") from None

    def close(self, timeout_s: float | None = None) -> None:
        """Make the last step durable in every tier, wait for all saves, let the writer leave. Harmless when called
        again. If an optimizer has begun a further step, it is the newest step that memory holds; a warning says so.

        DeadlineError if that takes longer than `timeout_s` (default: `close_timeout_s`); the writer finishes by itself.
        DeadlineError or PeerError if other ranks do not come to close: memory stays with the writer as after a death.
        A run in memory alone is let go of, unless an exception is on its way: then a restart finds it.
        """
        self._close(timeout_s, clean=sys.exc_info()[1] is None)

    def _close(self, timeout_s: float | None = None, *, clean: bool) -> None:
        """`clean`: the training has come to its end, as far as can be known."""
        if self._closed or self._forked:
            return
        timeout_s = self._close_timeout_s if timeout_s is None else timeout_s
        if not self._turn.acquire(timeout=timeout_s):
            raise DeadlineError("another thread has been in step(), save() or restore() all the time")
        try:
            if not self._closed:
                self._close_now(timeout_s, clean)
        finally:
            self._turn.release()

    def _close_now(self, timeout_s: float, clean: bool) -> None:
        self._heartbeat.touch(LEAVING)
        self._forgo_begun()
        end = time.monotonic() + timeout_s
        failure: CheckpointError | None = None
        agreed = False
        try:
            why = self._stage_last(end) if self._tiers or not clean else ""
            if self._world.size > 1:
                self._agree_last(end)
            agreed = True
            self._save_last(end, why)
            self.wait(max(0.0, end - time.monotonic()))
        except CheckpointError as error:
            failure = error
        if self._closed:  # by a signal handler, which came into this
            return
        # What was restored by another number of ranks than saved it cannot be saved by these.
        untouched = self._newest is None and (not self._restored or self._restored_place is not None)
        only_copy = self._is_only_in_memory() if self._tiers else not clean
        # An earlier run's memory that was neither restored nor replaced, or a disk that would not take the last step:
        # the writer keeps it, and goes on trying, as after a death.
        leave = (untouched and self._supervisor.inherits) or only_copy or not agreed
        try:
            self._end(max(1.0, end - time.monotonic()))
            self._let_go(leave, end)
        except CheckpointError as error:
            if not (self._heard and isinstance(error, FencedError)):
                failure = failure or error
        except BaseException:  # Ctrl-C: the writer does the rest, and another Checkpointer may open the run
            self._supervisor.leave()
            self._stager.stop(TURN_S)
            raise
        self._stager.stop(max(1.0, end - time.monotonic()))
        if agreed or self._world.rank > 0:  # rank 0 would wait for those that did not come
            self._world.farewell()
        self._last = self._newest = None
        self._say_closed()
        if failure is not None:
            raise failure
        self._raise_pending()

    def _forgo_begun(self) -> None:
        """A snapshot that a signal handler, which closes us within `step()`, has kept from being staged."""
        if self._last is not None and not self._last[1].submitted:
            self._last[0].set_failed(ClosedError(f"closed before step {self._last_step} was staged"))
            self._last = None

    def _let_go(self, leave: bool, end: float) -> None:
        """Of memory, and of the writer. `leave`: as if this process had died."""
        if leave:
            self._supervisor.leave()
            return
        failed = self._failed or self._fenced is not None or self._fault_handler.saw_exception
        self._supervisor.close(end - time.monotonic(), failed=failed)

    def _agree_last(self, end: float) -> None:
        """The newest step that all ranks have in memory becomes the newest here; none if they have none in common.

        DeadlineError or PeerError if the others do not come: they have died, or go on training.
        """
        if self._last is not None:
            self._last[1].copied.wait(max(0.0, end - time.monotonic()))
        timeout_s = max(0.1, min(self._world.timeout_s, end - time.monotonic()))
        common = self._world.agree("close", self._sealed(), _worth_keeping, timeout_s=timeout_s)
        attempt = None if not common else Attempt.parse(common[0])
        self._sound = self._held(Attempt.parse(common[1])) if len(common) > 1 else None
        if attempt is not None and self._newest is not None and self._newest[1] == attempt:
            return
        self._last = None
        self._newest = None if attempt is None else self._held(attempt)

    def _sealed(self) -> list[tuple[str, bool]]:
        """What memory holds of this history, and whether the training was sound then."""
        arena = self._stager.arena
        broken = {label.attempt for _, label in (arena.sealed() if arena is not None else ()) if label.finite is False}
        return [(str(attempt), attempt not in broken) for attempt in self._supervisor.sealed()]

    def _held(self, attempt: Attempt) -> tuple[Save, Attempt, tuple[Arena, int]] | None:
        arena, slot = self._stager.arena, self._supervisor.sealed().get(attempt)
        if arena is None or slot is None:
            return None
        save = Save(attempt.step, str(attempt), [])
        save.set_staged()
        return save, attempt, (arena, slot)

    def _stage_last(self, end: float) -> str:
        """Have the last step in memory, if it is not there yet and nothing has changed since; else why it is not."""
        with self._stager.held():  # another thread may be training
            return self._stage_held(end)

    def _stage_held(self, end: float) -> str:
        step = self._last_step
        if step is None or not self._stepped or self._fenced is not None:
            return ""
        if self._supervisor.failure is not None:
            return str(self._supervisor.failure)
        try:
            self._stager.do(lambda: None, max(0.0, end - time.monotonic()))
            if self.in_memory(0.0) == step:
                return ""
            if self._hook.count != self._updates_before:
                return "an optimizer has begun a further step"
            if self._torn:
                return "a restore has failed half-way since"
            if self._exchanged:
                return "weights were exchanged for others, see pause()"
            if self._last is not None and self._last[0].step == step and self._last[1].written_by_others:
                return str(self._last[1].error)
            moment = self._moment
            if moment is None and self._within == step:  # a signal handler closes us, and nothing has moved on
                moment = self._take(step)
            if moment is None:
                return self._why_not_kept()
            if why := moment.gone(self._capture):
                return why
            self._save(step, [], explicit=True, taken=moment, timeout_s=max(1.0, end - time.monotonic()))
            if self.in_memory(max(0.0, end - time.monotonic())) == step:
                return ""
            error = None if self._last is None else self._last[1].error
            return str(error or "there was no time to copy it")
        except Exception as error:  # of a device that has failed, say: what was saved before is all there is
            return f"it could not be copied: {error}"

    def _why_not_kept(self) -> str:
        if self._last is not None and self._last[0].step == self._last_step and self._last[1].error is not None:
            return str(self._last[1].error)
        if self._between is False:
            return "Memory(between=False) keeps nothing of steps that are not due"
        return "reading the state takes too long to keep what moves on within each step: see Memory(between=True)"

    def _save_last(self, end: float, why: str = "") -> None:
        """The newest step that is in memory, to all tiers that it is not on its way to: the nearest first, the others
        when nothing is before them. `why`: the last step is not in memory."""
        if self._fenced is not None or not (self._tiers or why):
            return
        newest = self._newest
        if self._last is not None:
            save, job = self._last
            job.copied.wait(max(0.0, end - time.monotonic()))
            # Else the one before it is the newest, or one that was copied out of turn.
            if job.place is not None and (newest is None or newest[1] < job.attempt):
                newest = (save, job.attempt, job.place)
        if self._world.size == 1 and len(worth := _worth_keeping([self._sealed()])) > 1:
            self._sound = self._held(Attempt.parse(worth[1]))
        self._say_lost(None if newest is None else newest[0].step, why)
        if newest is not None and (self._stepped or not newest[0].tiers):
            # What was restored has its places already, but for the nearest, where memory may have been ahead of it.
            for tiers in (self._tiers[:1], self._tiers[1:] if self._stepped else []):
                for one in (newest, self._sound if self._stepped else None):
                    if one is not None:
                        self._write_missing(*one, tiers)
                self.wait(max(0.0, end - time.monotonic()))

    def _write_missing(self, save: Save, attempt: Attempt, place: tuple[Arena, int], tiers: list[Tier]) -> None:
        for tier in tiers:
            if save.misses(tier.url):
                with self._lock:
                    self._active = [*(s for s in self._active if s is not save), save]
                self._write_to(save, attempt, place, self._tiers.index(tier))

    def _say_lost(self, kept: int | None, why: str) -> None:
        """Once, at the end, if the step that stays is not the last one."""
        restored, last = self._supervisor.owner.restored, self._last_step
        if kept is None and restored is not None:
            kept = restored.step
        if not self._stepped or last is None or kept == last or (not why and self._world.rank > 0):
            return
        what = "no step is" if kept is None else f"step {kept} is"
        again = f"; a restart does {last - kept} steps again" if kept is not None else ""
        log.warning(
            "step %d was the last one, and %s kept: %s%s", last, what, why or "not all ranks have a newer one", again
        )

    def _is_only_in_memory(self) -> bool:
        """Whether the newest step should be on disk by now, and is not."""
        if not self._tiers or self._fenced is not None or self._newest is None or self._supervisor.failure is not None:
            return False
        save = self._newest[0]
        return all(save.failed(url) for url in save.tiers)

    def _abandon(self) -> None:
        """Leave everything to the writer, as if this process had died."""
        if self._closed or self._forked:
            return
        in_turn = self._turn.acquire(timeout=self._close_timeout_s)
        try:
            with contextlib.suppress(CheckpointError):
                self._stager.do(lambda: None, self._busy_timeout_s)  # a copy under way is finished
            if why := self._stage_last(time.monotonic() + self._close_timeout_s):
                self._say_lost(None if self._newest is None else self._newest[0].step, why)
            self._fault_handler.stop(STOP_S)
            self._supervisor.leave()
            self._end()
            self._stager.stop()
            self._say_closed()
        finally:
            if in_turn:
                self._turn.release()

    def _say_closed(self) -> None:
        publish("closed", self._last_step)
        flush()

    def _end(self, timeout_s: float = STOP_S) -> None:
        self._closed = True
        _open.pop(self._place, None)
        self._hook.remove()
        atexit.unregister(self._atexit)
        if self._at_child_exit is not None:
            self._at_child_exit.cancel()
        self._cadence_sync.stop()
        self._fault_handler.stop(timeout_s)

    def _close_at_exit(self) -> None:
        if self._world.size > 1 and self._fault_handler.saw_exception:  # the others may never come to close
            self._abandon()
            return
        with contextlib.suppress(CheckpointError):
            self._close(clean=False)

    def _after_fork(self) -> None:
        if not self._closed:
            self._forked = True
            self._hook.silence()
            self._fault_handler.forget()
            self._supervisor.forget()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        self._failed = isinstance(error, Exception) or (isinstance(error, SystemExit) and bool(error.code))
        if isinstance(error, Exception) and not self._closed and not self._forked:
            self._fault_handler.exception(error)
        if self._world.size > 1:  # the other ranks may be in a collective, and never come to close
            self._abandon()
            return
        try:
            self._close(clean=isinstance(error, SystemExit) and not error.code)
        except CheckpointError as failure:  # the user's own error matters more
            error.add_note(f"besides, closing the Checkpointer failed: {failure}")


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls the method if its object still lives; does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call


def _at_child_exit(call: Callable[[], None]) -> Any:
    """Have it called at the end of a process that another has forked by `multiprocessing`, which ends by `os._exit`.
    None if this is none."""
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        return None
    return util.Finalize(None, call, exitpriority=100)


def _first_reason(result: Restored | None) -> str:
    """Why a restore passed something over; "" if it did not."""
    skipped = [] if result is None else result.skipped
    return f"step {skipped[0].step} in {skipped[0].tier}: {skipped[0].reason}"[:500] if skipped else ""


def _worth_keeping(posts: list[Any]) -> list[str]:
    """Of what each rank holds: the newest that all have, and if it is broken the newest that is not. Pure."""
    common = set.intersection(*({attempt for attempt, _ in post} for post in posts))
    sound = common - {attempt for post in posts for attempt, fine in post if not fine}
    newest = [max(some, key=Attempt.parse) for some in (common, sound) if some]
    return list(dict.fromkeys(newest))


def _predicted_size(capture: Capture) -> int:
    """Bytes of a snapshot once the optimizers have their state: so that memory can be made before the first step."""
    layout = capture.read().layout
    staged: dict[str, int] = {}
    for tensor in layout.tensors:
        staged[tensor.name] = staged.get(tensor.name, 0) + tensor.nbytes
    size = sum(staged.values())
    for optimizer in capture.optimizers:
        if optimizer.state:
            continue
        copies = 2
        if isinstance(optimizer, torch.optim.SGD):
            copies = int(any(group["momentum"] for group in optimizer.param_groups))
        elif any(group.get("amsgrad") for group in optimizer.param_groups):
            copies = 3
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        size += sum(copies * staged.get(capture.name_of(p), 0) + 64 for p in params)
    return size
