"""One save: the state is read, staged, and sent to the tiers that are due; what becomes of it, as the user is told."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ckpt.core.format.manifest import Attempt
from ckpt.core.format.replicas import DIFFER, Replicas
from ckpt.core.ipc.arena import Arena
from ckpt.core.log.log import Acquire
from ckpt.core.run.progress import Progress, Staged, StagedStep
from ckpt.core.run.replica_check import ReplicaCheck
from ckpt.core.run.save_plan import Late
from ckpt.core.run.session import Session
from ckpt.core.run.supervise.writer_link import HUNG_UP
from ckpt.core.run.supervise.writes import WriteInFlight
from ckpt.core.snapshot.awaited_memory import AwaitedMemory
from ckpt.core.snapshot.slots import ALL_BUSY
from ckpt.core.snapshot.snapshot import PendingSnapshot
from ckpt.core.state.capture import Reading
from ckpt.errors import CheckpointError, DeadlineError, FencedError, SaveError, SkippedError, WriterError
from ckpt.events import log
from ckpt.saving import Save
from ckpt.subscribers import publish
from ckpt.units import decimal, duration

SENT = 64  # attempts, more than can be under way
TOO_LATE = "received new save intervals too late"


class TierWrites:
    """Of one Checkpointer. Any thread may call."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()  # a signal handler may close us meanwhile
        self._active: list[Save] = []
        self.replicas_of: Callable[[Attempt], Replicas] = lambda attempt: {}  # what a part says of replicated tensors
        self.on_drift: Callable[[Attempt], None] = lambda attempt: None  # ranks were found to differ there
        self.sent: deque[str] = deque(maxlen=SENT)  # attempts that the writer was asked to write
        self.committed: int | None = None  # the newest step of this start that a tier has
        # By tier: the scheduled save that was not staged, and why; no error if that need not be raised (any more).
        self.owed: dict[int, tuple[Save, CheckpointError | None]] = {}

    def owe(self, tiers: Sequence[int], save: Save, error: CheckpointError | None) -> None:
        """Have the next step saved to these tiers instead of one that was not staged."""
        self.owed.update(dict.fromkeys(tiers, (save, error)))

    def note_owed(self) -> None:
        """Have the next call raise why scheduled saves are missing, unless a later step was saved in their place."""
        missed = {error: save for save, error in self.owed.values() if error is not None}
        self.owed = {tier: (save, None) for tier, (save, _) in self.owed.items()}
        for error, save in missed.items():
            self._session.errors.note(error, save)

    def follow(self, save: Save) -> None:
        """`wait` waits for it."""
        with self._lock:
            self._active = [*(s for s in self._active if s is not save and s._unfinished()), save]

    def wait(self, timeout_s: float | None = None, step: int | None = None) -> None:
        """Until every save that is followed, or that of one step, has ended well or not. DeadlineError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            active = [save for save in self._active if step in (None, save.step)]
        for save in active:
            for future in save._unfinished():
                try:
                    future.exception(None if end is None else max(0.0, end - time.monotonic()))
                except TimeoutError:
                    raise DeadlineError(f"saves are not finished after {timeout_s:g} s; they go on") from None

    def is_under_way(self, step: int) -> bool:
        """Whether it may yet come to a tier."""
        with self._lock:
            return any(save.step == step and save.tiers and save._unfinished() for save in self._active)

    def under_way(self) -> list[str]:
        """Return the attempts that are not committed yet in all their tiers, nor failed."""
        with self._lock:
            return [save.id for save in self._active if save.tiers and save._unfinished()]

    def write(self, save: Save, attempt: Attempt, place: tuple[Arena, int], tier: int) -> None:
        """Have the writer write it there."""
        url, began = self._session.tiers[tier].url, time.monotonic()
        self.sent.append(save.id)
        if tier in self.owed and self.owed[tier][0].step <= save.step:
            del self.owed[tier]

        def done(error: CheckpointError | None, write: WriteInFlight) -> None:
            if error is None:
                self.committed = max(save.step, -1 if self.committed is None else self.committed)
                self._say_committed(save, url, time.monotonic() - began, write)
                save._set_committed(url)
            else:
                self._on_failed(save, url, error)
                if DIFFER in str(error):
                    self.on_drift(attempt)

        write = WriteInFlight(attempt, *place, tier, done, replicas=self.replicas_of(attempt))
        self._session.supervisor.writes.write(write)

    def write_also(self, save: Save, attempt: Attempt, place: tuple[Arena, int], tier: int) -> None:
        """To a tier that it was not on its way to. Cut off by Ctrl-C, nobody waits for it, and close() tries again."""
        url = self._session.tiers[tier].url
        try:
            save._add_tier(url)
            self.write(save, attempt, place, tier)
        except BaseException as error:
            save._cut_off(url, SaveError(f"step {save.step} was not written to {url}: {error!r}"))
            raise

    def write_missing(self, staged: StagedStep, tiers: Sequence[int]) -> None:
        """To those of these tiers that it is not on its way to."""
        for i in tiers:
            if staged.save._misses(self._session.tiers[i].url):
                self.follow(staged.save)
                self.write_also(*staged, i)

    def _on_failed(self, save: Save, url: str, error: CheckpointError) -> None:
        if HUNG_UP in str(error):  # no failure
            save._set_failed(SaveError(f"step {save.step} is not known to be in {url}: {error}"), url)
            return
        publish("failed", save.step, tier=url, error=str(error))
        # A further tier is slow, or another rank: no reason to disturb the training.
        if isinstance(error, SkippedError) or TOO_LATE in str(error):
            self._session.stalls.stats.skipped += 1
            log.warning("%s", error)
            save._set_failed(error, url)
            return
        if not isinstance(error, FencedError):
            others = [other for other in save.tiers if other != url and save._written(other)]
            where = f"It is still in {others[0] if others else 'memory'}"
            if not others and isinstance(self._session.supervisor.writer.failure, WriterError):
                where = "No writer holds it: memory ends with this process"
            error = SaveError(f"step {save.step} was not written to {url}: {error}. {where}")
        self._session.errors.note(error, save)  # before anybody who waits for the save goes on
        save._set_failed(error, url)

    def _say_committed(self, save: Save, url: str, seconds: float, write: WriteInFlight) -> None:
        publish("committed", save.step, tier=url, seconds=seconds, nbytes=write.nbytes, stored=write.nbytes_stored)
        world = self._session.world
        level = logging.INFO if world.rank == 0 else logging.DEBUG
        of = "" if world.size == 1 else f" (of rank {world.rank})"
        sizes = f"{decimal(write.nbytes)} as {decimal(write.nbytes_stored)}{of}"
        log.log(level, "step %d committed to %s in %s, %s", save.step, url, duration(seconds), sizes)


SURELY_NEWER = 2  # snapshots of a rank: another may be one step behind
ASK_S, PAUSE_S = 0.02, 0.002  # between two looks at whether memory has been made


class Saves:
    """Of one Checkpointer. `begin` belongs to the thread that trains; what comes of it, to that of the stager."""

    def __init__(self, session: Session, progress: Progress, staged: Staged, writes: TierWrites) -> None:
        self._session, self._progress, self._staged, self._writes = session, progress, staged, writes
        self._stats = session.stalls.stats
        self._replicas = ReplicaCheck(session, progress)
        writes.replicas_of, writes.on_drift = self._replicas.said_of, self._replicas.find_differing
        self._dropped = False  # whether the last snapshot was: the next step is saved instead, due or not
        self._exposed: set[str] = set()  # tensors that others than optimizers write to; replaced, never changed
        self._plan = session.intervals.plan
        self._said_left_out = False
        self._noted_no_memory = False

    def decide(self, step: int) -> tuple[list[int], bool, bool]:
        """Decide what is saved at this step. Return the tiers that it goes to, whether it goes to memory at all, and
        whether it was ordered."""
        decision = self._plan.decide(step)
        tiers = sorted({*decision.tiers, *self._writes.owed})
        memory = (self._dropped or decision.memory) and self._session.supervisor.memory.rings
        return tiers, bool(tiers) or decision.ordered or memory, decision.ordered

    def new(self, step: int, tiers: list[int]) -> tuple[Save, Attempt]:
        owner = self._session.supervisor.owner
        attempt = Attempt(owner.epoch, step, owner.nonce)
        return Save(step, str(attempt), [self._session.tiers[i].url for i in tiers]), attempt

    def begin(
        self,
        step: int,
        tiers: list[int],
        *,
        explicit: bool,
        asked: bool = False,
        timeout_s: float | None = None,
    ) -> Save:
        """Save the state as it is now. `timeout_s`: given by close()."""
        started = time.perf_counter()
        save, attempt = self.new(step, tiers)
        if explicit and tiers:
            self._plan.saved_everywhere(step)
        save._raised = asked and not self.is_scheduled(step)  # a best effort is no error
        try:
            reading, values = self._read()
            sizes, must = (reading.layout.arrangement.data_size, len(values)), explicit or bool(tiers)
            memory = self._memory_for(step, sizes, must=must)
        except BaseException as error:
            what = error if isinstance(error, CheckpointError) else SaveError(f"step {step} was not saved: {error!r}")
            save._set_failed(what)
            self._retract(attempt, tiers, what)
            raise
        job = PendingSnapshot(
            attempt=attempt,
            reading=reading,
            values=values,
            finite=self._progress.finite,
            busy="wait" if explicit else self._session.settings.on_busy,
            deadline=time.monotonic() + (self._session.settings.busy_timeout_s if timeout_s is None else timeout_s),
            on_end=lambda job: self.on_ended(save, job, tiers, must=must),
            memory=memory,
        )
        self._replicas.begin(job, durable=bool(tiers), closing=timeout_s is not None)
        self._submit(save, job, started)
        return save

    def is_scheduled(self, step: int) -> bool:
        """Return True if the intervals want this step in some tier."""
        return bool(self._plan.at(step).tiers_due(step))

    def save_late(self, late: Late, owner: Acquire, why: str) -> Save | None:
        """Save a step that has passed, from memory. Return its save. If memory has lost the step, fail it by name on
        all ranks, unless it is in some tier already, and return None. `owner`: when the step was done."""
        attempt = Attempt(owner.epoch, late.step, owner.nonce)
        if late.has <= late.wants and (staged := self._staged.held(attempt)) is not None:
            self._writes.write_missing(staged, sorted(late.wants - late.has))  # fails if a later step takes the slot
            return staged.save
        if not late.has or late.has - late.wants:
            self._session.supervisor.writes.retract(attempt, f"rank {self._session.world.rank} {why}")
        return None

    def write_again(self, save: Save, job: PendingSnapshot) -> None:
        """It is in memory already, perhaps on its way to a tier: write it to the tiers that it misses."""
        assert job.place is not None
        if save._raised:
            self._session.errors.forget(save)
        self._plan.saved_everywhere(save.step)
        for i, tier in enumerate(self._session.tiers):
            if tier.url not in save.tiers or save._failed(tier.url):
                self._writes.write_also(save, job.attempt, job.place, i)

    def _read(self) -> tuple[Reading, bytes]:
        """The state, and its plain values as JSON."""
        session = self._session
        session.capture.copy_eagerly(self._exposed)
        session.capture.keep_apart(self._replicas.differing)
        reading = session.capture.read()
        values = json.dumps(reading.values, separators=(",", ":")).encode()
        session.supervisor.layouts.tell(reading.layout)
        return reading, values

    def _submit(self, save: Save, job: PendingSnapshot, started: float) -> None:
        save._began = started
        try:
            self._staged.last = (save, job)
            self._writes.follow(save)
            self._session.stager.submit(job)
        except BaseException as error:
            if not job.submitted:
                save._set_failed(SaveError(f"step {save.step} was not saved: {error!r}"))
            raise
        save._stalled_s = time.perf_counter() - started
        self._session.stalls.count(save._stalled_s)

    def _memory_for(self, step: int, sizes: tuple[int, int], *, must: bool) -> AwaitedMemory | None:
        """What a snapshot of this size waits for; None if its memory is there. Of several ranks none leaves a step out
        alone: that would leave none that all have."""
        session, arena = self._session, self._session.stager.arena
        if not (fits := session.fits(*sizes)):
            self._have_made(sizes, must=must)
        if not (must or session.supervisor.memory.rings):
            raise SkippedError(f"step {step} was not saved: memory is short, and it was due nowhere else")
        if fits and arena is not None and arena.ready == arena.slots:
            return None
        ask = partial(self._ask, step, sizes, must=must)
        return AwaitedMemory(ask, may_be_left_out=not must and session.world.size == 1)

    def _have_made(self, sizes: tuple[int, int], *, must: bool) -> None:
        """SkippedError if that was refused."""
        progress, following = self._progress, self._session.supervisor.memory.next
        following.prepare(*sizes, again=must)
        if progress.closed:  # by a signal handler
            progress.check_usable()
        try:
            following.wait(0.0)
        except SkippedError:
            raise
        except CheckpointError as error:
            if must:
                raise
            self._session.errors.note(error)
        if not must and following.refused(sum(sizes)):
            raise SkippedError("memory is short")

    def _ask(self, step: int, sizes: tuple[int, int], *, must: bool) -> None:
        """In the staging thread: see `AwaitedMemory`."""
        supervisor, session = self._session.supervisor, self._session
        if self._progress.closed or supervisor.failure is not None:
            why = "closed before it had memory" if self._progress.closed else str(supervisor.failure)
            raise SkippedError(f"step {step} was not saved: {why}")
        if not session.fits(*sizes):
            supervisor.memory.next.prepare(*sizes, again=must)  # the writer may have died meanwhile
            supervisor.memory.take_prepared(ASK_S)
            if not (must or supervisor.memory.rings):
                raise SkippedError(f"step {step} was not saved: there is room for one snapshot, and it was due nowhere")
        time.sleep(PAUSE_S)  # it may be touched yet

    # -- events, from the staging thread and the receiving thread --

    def on_ended(self, save: Save, job: PendingSnapshot, tiers: list[int], *, must: bool = False) -> None:
        """Send a staged snapshot to its tiers, or deal with one that was not staged. `must`: it was scheduled for a
        tier, or requested by the user."""
        if job.error is None and job.place is None:
            return
        self._exposed = self._exposed.union(job.written_by_others)  # before the user hears of it
        if job.error is not None:
            self._on_dropped(save, job, job.error, tiers, must=must)
            return
        assert job.place is not None
        self._staged.newest = StagedStep(save, job.attempt, job.place)
        self._dropped = self._said_left_out = self._noted_no_memory = False
        sound, supervisor = job.finite is not False, self._session.supervisor
        if sound:  # else what was there before is needed yet
            self._supersede(job)
        supervisor.acknowledgements.acknowledge(job.attempt, *job.place, lambda error: self._on_kept(save, job, error))
        supervisor.memory.on_sealed(sound=sound)
        for i in tiers:
            self._writes.write(save, job.attempt, job.place, i)

    def _supersede(self, job: PendingSnapshot) -> None:
        """What was restored, and what ranks keep for each other, is needed no longer."""
        supervisor, alone = self._session.supervisor, self._session.world.size == 1
        if supervisor.memory.superseded or alone:
            self._staged.unpin_restored()
        if not alone and supervisor.memory.newer == SURELY_NEWER:
            self._session.ownership.tell_newer(job.attempt.epoch)

    def on_refused(self, step: int, error: SkippedError) -> None:
        """Count a step that got no memory. If it was scheduled, the next call raises why."""
        self._stats.skipped += 1
        if self.is_scheduled(step) or self._writes.owed or self._is_noted_in_memory_alone():
            self._session.errors.note(_naming(step, error))
        else:
            log.info("%s", error)

    def _is_noted_in_memory_alone(self) -> bool:
        """Return True for the first step in a row that memory cannot take, in a run that has no other tier."""
        first, self._noted_no_memory = not self._noted_no_memory, True
        return first and not self._session.tiers

    def _on_dropped(
        self, save: Save, job: PendingSnapshot, error: CheckpointError, tiers: list[int], *, must: bool
    ) -> None:
        torn = bool(job.written_by_others)
        if torn or isinstance(error, SkippedError):
            alone = self._session.world.size == 1
            short = job.memory is not None and self._session.supervisor.memory.next.refused_any
            left_out = job.memory is not None and job.memory.left_out
            made_up = alone and not short  # the next step makes up for it; other ranks would not save that one
            if made_up:
                chosen = job.busy == "skip" and ALL_BUSY in str(error)
                self._writes.owe(tiers, save, None if chosen or save._raised else error)
            self._dropped = alone and (left_out or torn)
            self._stats.skipped += 1
            if left_out and self._said_left_out:
                pass
            elif left_out:
                self._said_left_out = True
                log.info("%s. So are those after it, until it is there", error)
            elif (must and not (made_up and tiers)) or (short and self._is_noted_in_memory_alone()):
                self._session.errors.note(_naming(save.step, error), save)
            else:
                log.warning("%s", error)
        else:
            self._session.errors.note(error, save)
        self._retract(job.attempt, tiers, error)
        publish("failed", save.step, tier="memory", error=str(error))
        save._set_failed(error)

    def _retract(self, attempt: Attempt, tiers: list[int], why: CheckpointError) -> None:
        """The others wait for this rank's part."""
        if tiers and self._session.world.size > 1:
            self._session.supervisor.writes.retract(attempt, f"rank {self._session.world.rank}: {why}")

    def _on_kept(self, save: Save, job: PendingSnapshot, error: CheckpointError | None) -> None:
        """A process that survives this one has the snapshot, or none will have it any more."""
        if error is not None:
            publish("failed", save.step, tier="memory", error=str(error))
            save._set_unstaged(error)
            return
        save._set_staged(self._session.supervisor.survives)
        stalled_s = self._session.stalls.until_staged(save)
        publish("staged", save.step, stall_s=stalled_s, nbytes=job.reading.layout.arrangement.data_size)


def _naming(step: int, error: CheckpointError) -> CheckpointError:
    """Return the error with the step that it is about."""
    return error if str(error).startswith(f"step {step} ") else SkippedError(f"step {step} was not saved: {error}")
