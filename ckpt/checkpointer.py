"""What the user holds: `Checkpointer`.

    step() -> read the state -> stage it -> (sealed) -> have it written to the tiers that are due
    restore() -> newest source in the history -> fill -> open a new epoch that continues from it

Nothing here waits for a disk, unless asked to. Errors of the background are raised by the next call, once. What is done
in these calls stands in `ckpt.core.run`: saves, step_keeper, restoring, closing, all over one session.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, overload

import torch

import ckpt.adapters  # noqa: F401 - registers them
from ckpt.best import Best
from ckpt.core.cadence.cadence import Auto
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.restore.restore_first import Restored
from ckpt.core.run.closing import Closing
from ckpt.core.run.departures import Departures
from ckpt.core.run.kept_steps import KeptSteps
from ckpt.core.run.out_of_turn import OutOfTurn
from ckpt.core.run.process_end import ProcessEnd
from ckpt.core.run.progress import Progress, Staged
from ckpt.core.run.restoring import MISSING, Restoring
from ckpt.core.run.saves import Saves, TierWrites
from ckpt.core.run.session import Session, Settings, Stats
from ckpt.core.run.step_keeper import StepKeeper
from ckpt.core.snapshot.device import traced
from ckpt.errors import CheckpointError, SkippedError, UsageError, door
from ckpt.events import log
from ckpt.guard.fault_handler import FaultHandler
from ckpt.guard.report import Fault, tell_if_uncaught
from ckpt.save import Save
from ckpt.triggers import Trigger, as_triggers

STOP_S = 30.0  # for an incident that is being dealt with
T = TypeVar("T")

# Until they are closed: also one that nobody holds any more is closed when the interpreter ends.
_open: dict[str, Checkpointer] = {}
_opening = threading.Lock()


@door
class Checkpointer:
    """Saves a training run as it goes, and brings it back.

    `state`: a dict of modules, optimizers, anything with state_dict and load_state_dict, tensors and plain values. What
    an object's state_dict() does not say, though its load_state_dict() needs it, is not saved: nobody else can know it.
    `tiers`: a folder or URL, or a list of them, with memory before them; or a list of `Memory` and `Tier`, which has
    memory only if it names it; None keeps snapshots in memory only, found again by `name`. `every` and `keep` are of a
    tier that is given as a string: steps between checkpoints (100), a time such as "10min", or "auto", see `ckpt.Auto`;
    and how many stay ("all"), see `ckpt.Tier`. Memory is saved at every step.
    `best`: by which score some of them stay however old they get, see `ckpt.Best` and `score()`.
    `on_busy`: whether a step waits for a free slot ("wait", at most `busy_timeout_s`) or is not saved ("skip").
    `on_error`: "raise" lets the next call raise what went wrong in the background, "warn" only logs it.
    `agree_timeout_s`: how long the other ranks are waited for where all must come: here, in restore() and in close().
    `triggers`: when to save out of turn, see `ckpt.triggers`: "auto", or a list such as [ckpt.on_signal("SIGTERM")].
    `on_fault`: called in a background thread with the account of each fault, those that ended earlier incarnations
    on this machine included; `faults` holds the latter.
    `metrics`: a port for Prometheus, or `ckpt.Metrics`, which has TensorBoard too.
    `takeover`: open a run that another process trains. That one is told, and saves no more. Another Checkpointer of the
    run in this process is closed.

    Raises StateError for a state that cannot be saved, FormatError or StoreError for a tier that cannot be used,
    InUseError for a run that another process trains.
    Use it as a context manager, or call `close()`.
    """

    def __init__(
        self,
        state: dict[str, Any],
        tiers: object = None,
        *,
        name: str | None = None,
        every: int | str | Auto | None = None,
        keep: Keep | int | str | None = None,
        best: Best | None = None,
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
        wanted, timeouts_s = as_triggers(triggers), (busy_timeout_s, close_timeout_s, agree_timeout_s)
        self._settings = Settings.checked(tiers, name, every, keep, best, (on_busy, on_error), timeouts_s, metrics)
        try:
            with contextlib.ExitStack() as undo:  # whatever comes in between, Ctrl-C too
                self._reserve(undo, takeover)
                self._start(undo, Session(self._settings, state, takeover, undo), wanted, on_fault)
                undo.pop_all()
        except CheckpointError as error:
            tell_if_uncaught(error, self._settings.world.rank, self._settings.world.size)
            raise

    def _reserve(self, undo: contextlib.ExitStack, takeover: bool) -> None:
        """UsageError if there is another one of this run in this process, also one that is just being made. To take
        over is to close it: in a notebook its name may be lost."""
        url = self._settings.url
        if takeover and (older := _open.get(url)) is not None and hasattr(older, "_closing"):
            older.close()
        with _opening:
            if url in _open:
                raise UsageError(
                    f"another Checkpointer in this process uses {url}: close() it first, or give takeover=True"
                )
            undo.callback(_open.pop, url, None)
            _open[url] = self

    def _start(
        self,
        undo: contextlib.ExitStack,
        session: Session,
        wanted: tuple[Trigger, ...],
        on_fault: Callable[[Fault], None] | None,
    ) -> None:
        """Put together what works on a session. `undo`: what ends it all again if something fails."""
        progress = self._progress = Progress(session)
        undo.callback(setattr, progress, "closed", True)
        self._session, self._staged, self._writes = session, Staged(session, progress), TierWrites(session)
        self._saves = Saves(session, progress, self._staged, self._writes)
        self._keeper = StepKeeper(session, progress, self._staged, self._saves)
        self._kept = KeptSteps(session, progress, self._keeper, self._writes)
        self._out_of_turn = OutOfTurn(session, progress, self._staged, self._saves, self._keeper)
        self.faults = list[Fault]()
        for data in session.supervisor.faults:
            with contextlib.suppress(CheckpointError):
                self.faults.append(Fault.from_json(data))
        reached = max((step for fault in self.faults for step in fault.steps.values()), default=0)
        self._restoring = Restoring(session, progress, self._staged, self._writes, reached)
        self._fault_handler = FaultHandler(wanted, session, self._out_of_turn, on_fault)
        departures = Departures(session, progress, self._staged, self._writes)
        self._closing = Closing(
            session, progress, self._staged, self._writes, self._keeper, self._fault_handler, departures
        )
        session.orders.start()
        undo.callback(self._fault_handler.stop, STOP_S)
        self._fault_handler.start()
        for fault in self.faults:
            log.warning("before this start: %s", fault.line)
            self._fault_handler.tell(fault)
        session.ends.callback(_open.pop, self._settings.url, None)
        session.ends.callback(ProcessEnd(self._closing.close_at_exit, self._after_fork).cancel)
        session.introduce()

    @property
    def writer_pid(self) -> int:
        """The process that holds this one's snapshots, writes them, and outlives it; 0 if there is none just now."""
        client = self._session.supervisor.client
        return client.pid if client.alive else 0

    @property
    def stats(self) -> Stats:
        """What saving has cost this process so far."""
        return self._session.stalls.stats

    @property
    def last_restore(self) -> Restored | None:
        """What the last restore() brought back, and what it passed over."""
        return self._restoring.last

    # -- saving --

    @traced("ckpt.step")
    def step(self, step: int, *, finite: bool | torch.Tensor | None = None) -> Save | None:
        """Call once after every optimizer step with the number of steps done. Saves what is due; returns at once.

        `finite`: False if the training has gone wrong, as `torch.isfinite(loss)` says. Such a step is saved to be
        looked at, never displaces the last one that was not, and is only restored by its number. (On an accelerator,
        to look at a tensor waits for it.) The handle says when the step is staged and committed; None if nothing was
        due. Memory is made in the background: a step that is due in no tier may be left out until it is there, and
        `staged()` of its handle raises SkippedError then; what is due makes the next update wait.
        """
        with self._progress.in_turn():
            return self._step(step, None if finite is None else bool(finite))

    def _step(self, step: int, finite: bool | None) -> Save | None:
        self._progress.check_usable()
        self._progress.check_next(step)
        tiers, due, ordered = self._saves.decide(step)
        save = None
        try:
            with self._progress.saving(step):
                self._progress.begin(step, finite)
                if due:
                    save = self._saves.begin(step, tiers, explicit=ordered, asked=ordered)
        except SkippedError as error:  # there is no memory for it
            self._saves.on_refused(step, error)
        if save is not None and ordered:
            self._out_of_turn.answer(save)
        self._session.errors.raise_pending()
        return save

    def request(self, why: str = "no reason given") -> None:
        """Have all ranks save one of the next steps to every tier; for any thread of any rank. Returns at once."""
        self._progress.check_usable()
        if not self._fault_handler.armed:
            raise UsageError("this Checkpointer was made without triggers: call save() at the same step on all ranks")
        self._fault_handler.request(why)

    def fence(self) -> None:
        """Call right before weights or moments are changed in a way that torch tells nobody: a CUDA graph of yours is
        replayed, or `.data` is written to. It counts as the beginning of an optimizer's step.

        What is queued from now on, on the current streams, comes after the copies under way; the host waits only for
        those that it makes itself. Nothing is torn without it either, but what changes unsaid is copied within
        `step()`. UsageError while a graph is captured.
        """
        self._progress.check_not_forked()
        self._session.capture.guard_again()
        self._session.hook.fence(self._session.capture.optimizers)

    @contextlib.contextmanager
    def pause(self, *, changes_state: bool = False) -> Iterator[None]:
        """Around what is no training, such as an evaluation: it is not taken for a hang.

        `changes_state`: weights are exchanged meanwhile, as for averages; at a fault in it nothing is copied any more.
        """
        self._progress.check_not_forked()
        with self._progress.pause(changes_state):
            yield

    @traced("ckpt.step")
    def save(self, step: int | None = None) -> Save:
        """Save now, to every tier: the step given, or the one that the last `step()` named.

        Without a durable tier it is staged only. If memory does not have the step that `step()` named, it is saved as
        it is now: call this right after `step()`. Raises UsageError if an optimizer has begun a further step, or if
        weights are exchanged (see `pause`).
        """
        with self._progress.in_turn():
            self._progress.check_usable()
            save = self._keeper.save_again() if step in (None, self._progress.step) else self._save_as(step)
            self._session.errors.raise_pending()
            return save

    def _save_as(self, step: int) -> Save:
        self._progress.check_next(step)
        with self._progress.saving(step):
            self._progress.begin(step, None)
            return self._saves.begin(step, self._settings.everywhere, explicit=True)

    def stage(self) -> Save:
        """Have the step that the last `step()` named in memory, due there or not, so that `save()` may write it later.

        Returns when it is copied; what goes wrong then is raised by the next call.
        """
        with self._progress.in_turn():
            self._progress.check_usable()
            return self._keeper.stage_again()

    def keep_steps(self, notes: Mapping[int, str]) -> None:
        """The checkpoints of these steps stay in every tier, however old they get: `{step: why}`, as `ckpt ls` shows.

        What an earlier call has named and this one does not may go again. Say it before the `save()` of such a step
        and no later checkpoint pushes it out. All ranks call this alike; it returns at once.
        """
        with self._progress.in_turn():
            self._progress.check_usable()
            self._kept.keep(notes)

    def score(self, step: int, value: float | torch.Tensor) -> bool:
        """Say what a step scored, now or long after it; whether it is among the `best`, which stay in every tier.

        The step that the last `step()` named is saved to every tier if it is one of them; an older one stays where it
        is saved. All ranks call this alike, and the first one's value decides. A score is as durable as its step once
        `wait()` returns; until then a process that is killed may lose it. A value that is no number is none of the
        best, says a warning. UsageError, and nothing has changed, for a step that was not made yet, or is saved nowhere
        and past.
        """
        with self._progress.in_turn():
            self._progress.check_usable()
            among = self._kept.score(step, value)
            self._session.errors.raise_pending()
            return among

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
        to go back: what was saved after it is not restored by itself any more. `strict=False` takes what fits, and
        casts what has another dtype.

        Raises NoCheckpointError, CorruptError if none of the checkpoints is sound, or MismatchError, after which
        nothing has been changed.
        """
        with self._progress.in_turn(alone=True):
            self._progress.check_usable(restoring=True)
            try:
                found = self._restoring.restore(default, step, strict)
                self._kept.went_back()
                return found
            finally:
                self._out_of_turn.went_back()
                self._session.orders.resume()

    # -- the end --

    def wait(self, timeout_s: float | None = None, *, step: int | None = None) -> None:
        """Until every save begun so far, or that of one step, is staged and written, or has failed, and what stays is
        noted. DeadlineError past `timeout_s`."""
        self._progress.check_not_forked()
        self._kept.wait(timeout_s, step)
        self._writes.note_owed()
        self._session.errors.raise_pending()

    def close(self, timeout_s: float | None = None) -> None:
        """Make the last step durable in every tier, wait for all saves, let the writer leave. Harmless when called
        again. A step that memory does not have is saved as it is now. If an optimizer has begun a further step, an
        exception is on its way, or another thread closes, it is the newest step that memory holds; a warning says so.

        DeadlineError if that takes longer than `timeout_s` (default: `close_timeout_s`); the writer finishes by itself.
        DeadlineError or PeerError if other ranks do not come to close: memory stays with the writer as after a death.
        A run in memory alone is let go of, unless an exception is on its way: then a restart finds it.
        """
        self._closing.close_as_asked(timeout_s)

    def _after_fork(self) -> None:
        if not self._progress.closed:
            self._progress.forked = True
            _open.pop(self._settings.url, None)  # the child may open the run itself, once its parent is gone
            self._session.hook.silence()
            self._fault_handler.forget()
            self._session.supervisor.forget()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, Exception) and not self._progress.closed and not self._progress.forked:
            self._fault_handler.exception(error)
        self._closing.close_after(error)
