"""`Checkpointer`, the class that users create. Its two main calls:

    step() -> capture the state -> stage it in memory -> seal the slot -> the writer stores it in the scheduled tiers
    restore() -> choose the newest checkpoint -> fill the state -> open a new term that continues from it

No call waits for a disk unless the caller requests it. An error in the background is raised once, by the next call.
Modules of `ckpt.core.run` (saver, restoring, closing, emergency) implement these calls on one `TrainingRun`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, overload

import torch

import ckpt.adapters  # noqa: F401 - registers the adapters
from ckpt.best import Best
from ckpt.core.cadence.cadence import Auto
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.restore.restore import Restored
from ckpt.core.run.closing import Closing, EmergencySaver, ProcessEnd
from ckpt.core.run.restoring import MISSING, KeptSteps, Restoring
from ckpt.core.run.saver import Saver
from ckpt.core.run.training_run import Settings, Stats, TrainingRun
from ckpt.core.snapshot.device import traced
from ckpt.errors import CheckpointError, InvalidArgumentError, UsageError, public_class
from ckpt.events import log
from ckpt.guard.fault_handler import FaultHandler
from ckpt.guard.report import Fault, explain_if_uncaught
from ckpt.options import DEFAULT_OPTIONS, Options
from ckpt.saving import Save
from ckpt.tiers import DEFAULT_MEMORY, Memory
from ckpt.triggers import Trigger, as_triggers

PINNED = "by training"
STOP_S = 30.0  # seconds to wait until a fault that is being handled has been reported
T = TypeVar("T")

# Open Checkpointers by URL. Those that are still open when the interpreter exits are closed at exit.
_open: dict[str, Checkpointer] = {}
_opening = threading.Lock()


@public_class
class Checkpointer:
    """Saves a training run while it trains and restores it after a restart.

    - `state`: dict of modules, optimizers, objects with state_dict and load_state_dict, tensors and plain values. Only
      what state_dict() returns is saved, even if load_state_dict() needs more.
    - `tiers`: folder, URL, `ckpt.Tier`, or a list of these, nearest first. Default None: snapshots stay in memory only,
      and `Options(name=)` names the run.
    - `memory`: snapshots in host memory that outlive this process, see `ckpt.Memory`. Default: a snapshot of every
      step, or, if `every` is "auto", as often as 1 % of the training time allows. None: no snapshots in memory.
    - `every`: save interval of tiers that are given as strings: steps (default 100), a time ("10min"), or "auto" (see
      `ckpt.Auto`).
    - `keep`: number of checkpoints that each tier given as a string keeps, default "all"; see `ckpt.Tier`.
    - `best`: score whose best checkpoints are kept regardless of age; see `ckpt.Best` and `score()`.
    - `triggers`: events that request an emergency save: "auto" (default) or a list like
      [ckpt.triggers.on_signal("SIGTERM")]; None for none.
    - `takeover`: take ownership of the run from the process that trains it, at the newest checkpoint in a tier. That
      process is fenced, so it saves nothing more. An older Checkpointer of the run here is closed. Default False.
    - `options`: settings that few runs change, see `ckpt.Options`.

    Raises InvalidArgumentError if an argument is wrong, StateError if the state cannot be saved, FormatError or
    StoreError if a tier cannot be used, and InUseError if another process trains the run. Use it as a context manager,
    or call `close()`.
    """

    def __init__(
        self,
        state: dict[str, Any],
        tiers: object = None,
        *,
        memory: Memory | None = DEFAULT_MEMORY,
        every: int | str | Auto | None = None,
        keep: Keep | int | str | None = None,
        best: Best | None = None,
        triggers: object = "auto",
        takeover: bool = False,
        options: Options = DEFAULT_OPTIONS,
    ) -> None:
        armed = as_triggers(triggers)
        self._settings = Settings.checked(tiers, memory, every, keep, best, options)
        try:
            with contextlib.ExitStack() as undo:  # if any step fails, or on Ctrl-C, undo the completed steps
                self._reserve(undo, takeover)
                self._start(undo, TrainingRun(self._settings, state, takeover, undo), armed, options.on_fault)
                undo.pop_all()
        except CheckpointError as error:
            explain_if_uncaught(error, self._settings.world.rank, self._settings.world.size)
            raise

    def __repr__(self) -> str:
        step = self._run.step if hasattr(self, "_run") else None
        ended = ", closed" if step is not None and self._run.closed else ""
        return f"<Checkpointer of {self._settings.places}, step {step}{ended}>"

    def _reserve(self, undo: contextlib.ExitStack, takeover: bool) -> None:
        """Register this Checkpointer as the only one of its run in this process, or raise UsageError.

        With `takeover`, close an older Checkpointer first, because a notebook may have lost the variable that held it.
        """
        url = self._settings.url
        if takeover and (older := _open.get(url)) is not None and hasattr(older, "_closing"):
            older.close()
        with _opening:
            if url in _open:
                raise UsageError(
                    f"another Checkpointer in this process uses {url}: close() it first, or pass takeover=True"
                )
            undo.callback(_open.pop, url, None)
            _open[url] = self

    def _start(
        self,
        undo: contextlib.ExitStack,
        run: TrainingRun,
        triggers: tuple[Trigger, ...],
        on_fault: Callable[[Fault], None] | None,
    ) -> None:
        """Create and start the objects that work on the run. `undo`: stops the started objects if a later one fails."""
        self._run, self._saver = run, Saver(run)
        self._kept = KeptSteps(run, self._saver)
        self._emergency = EmergencySaver(run, self._saver)
        self.faults = list[Fault]()
        for data in run.supervisor.faults:
            with contextlib.suppress(CheckpointError):
                self.faults.append(Fault.from_json(data))
        reached = max((step for fault in self.faults for step in fault.steps.values()), default=0)
        self._restoring = Restoring(run, self._saver, reached)
        self._fault_handler = FaultHandler(triggers, run, self._emergency, on_fault)
        self._closing = Closing(run, self._saver, self._fault_handler)
        run.orders.start()
        undo.callback(self._fault_handler.stop, STOP_S)
        self._fault_handler.start()
        for fault in self.faults:
            log.warning("an earlier job attempt failed: %s", fault.line)
            self._fault_handler.tell(fault)
        run.ends.callback(_open.pop, self._settings.url, None)
        run.ends.callback(ProcessEnd(self._closing.close_at_exit, self._after_fork).cancel)
        run.introduce()

    @property
    def writer_pid(self) -> int:
        """Process id of the writer, which holds the snapshots and outlives this process; 0 if none is running."""
        client = self._run.supervisor.client
        return client.pid if client.alive else 0

    @property
    def stats(self) -> Stats:
        """The cost of saving in this process so far: stalls, copies and counts."""
        return self._run.stats

    @property
    def last_restore(self) -> Restored | None:
        """The step that the last restore() restored, and the checkpoints that it skipped."""
        return self._restoring.last

    # -- saving --

    @traced("ckpt.step")
    def step(self, step: int, *, finite: bool | torch.Tensor | None = None) -> Save | None:
        """Save this step if a save is scheduled. Call once after each optimizer step with the number of steps done.

        Returns without waiting for a disk. The handle reports when the step is staged and committed; None: no save was
        scheduled. The first save, and the first save after the state has grown, wait until memory is allocated.

        - `step`: number of completed steps; it must increase from call to call.
        - `finite`: False if training has diverged, for example `torch.isfinite(loss)`. The step is then saved for
          inspection. It never replaces the last finite step, and only `restore(step=N)` restores it. If `finite` is a
          tensor on an accelerator, the call waits for its value.
        """
        if step == 0:
            raise InvalidArgumentError(
                "step(0): pass the number of completed steps, which is 1 after the first. In a loop that counts from "
                "0, call step(step + 1)"
            )
        with self._run.in_turn():
            return self._saver.step(step, None if finite is None else bool(finite))

    def request_save(self, why: str = "no reason given") -> None:
        """Request a save of a coming step to every tier on all ranks. Any thread of any rank may call this method.

        - `why`: reason, for the log and the report.

        Returns immediately.
        """
        self._run.check_usable()
        if not self._fault_handler.armed:
            raise UsageError(
                "this Checkpointer has triggers=[], so it cannot save on request: call save() at the same step on "
                "all ranks"
            )
        self._fault_handler.request(why)

    def before_untracked_update(self) -> None:
        """Call this before modifying weights or optimizer state in a way that PyTorch cannot track (`.data`, replay of
        a CUDA graph).

        The call counts as the start of an optimizer step. On the current streams, work that is queued later runs after
        the copies in progress; the host waits only for copies that it makes itself. Without the call, snapshots are
        still consistent, but the tensors are copied inside `step()`. Raises UsageError during a graph capture.
        """
        self._run.check_not_forked()
        self._run.capture.guard_again()
        self._run.hook.fence(self._run.capture.optimizers)

    @contextlib.contextmanager
    def not_training(self, *, changes_state: bool = False) -> Iterator[None]:
        """Suspend hang detection and step timing in a `with` block that does not train, for example an evaluation.

        - `changes_state`: True if the block replaces the weights, for example by averaged weights. A fault inside the
          block then saves no new copy of the state. Default False.
        """
        self._run.check_not_forked()
        with self._run.pause(changes_state):
            yield

    @traced("ckpt.step")
    def save(self, step: int | None = None) -> Save:
        """Save now to every tier.

        - `step`: number of the step, default that of the last `step()`.

        Without a durable tier the step is only staged. If memory has no snapshot of the step, the current state is
        saved with that step number, so call this right after `step()`. Raises UsageError if an optimizer has begun
        another step, or if the weights are replaced (see `not_training`).
        """
        with self._run.in_turn():
            self._run.check_usable()
            save = self._saver.save_last() if step in (None, self._run.step) else self._saver.save_as(step)
            self._run.errors.raise_pending()
            return save

    def stage(self) -> Save:
        """Copy the last step into memory even if no snapshot of it is scheduled, so that a later `save()` can write it.

        Returns when the copy is complete. If the copy fails later, the next call raises the error.
        """
        with self._run.in_turn():
            self._run.check_usable()
            return self._saver.stage()

    def pin(self, step: int, note: str = PINNED) -> None:
        """Protect the checkpoints of this step in every tier from retention and clean-up until `unpin`.

        - `step`: number of the step. Pin it before the `save()` of the step, so that no later checkpoint can expire it.
        - `note`: reason that `ckpt ls` shows.

        Earlier pins stay. All ranks must make the same call. Returns immediately; `wait()` waits for the pin.
        """
        with self._run.in_turn():
            self._run.check_usable()
            self._kept.pin(step, note)

    def unpin(self, step: int) -> None:
        """Remove the protection of `pin`: retention applies to the checkpoints of this step again.

        - `step`: number of the step.

        All ranks must make the same call. Does nothing if the step is not pinned. A pin that `ckpt pin` or `Run.pin`
        set stays.
        """
        with self._run.in_turn():
            self._run.check_usable()
            self._kept.unpin(step)

    def score(self, step: int, value: float | torch.Tensor) -> bool:
        """Record the score of a step. Return True if the step is among the `best`, which stay in every tier.

        - `step`: number of the last step, or of an earlier step that is saved.
        - `value`: the score. If it is a tensor on an accelerator, the call waits for its value.

        If the last `step()` is among the best, it is saved to every tier; an older step stays where it is stored. All
        ranks must make the same call, and rank 0's value decides. After `wait()` returns, a score is as durable as its
        step; before that, a score is lost if the process is killed. NaN never counts as best and logs a warning. Raises
        UsageError and changes nothing if the step is in the future, or is a past step that no tier or memory has.
        """
        with self._run.in_turn():
            self._run.check_usable()
            among = self._kept.score(step, value)
            self._run.errors.raise_pending()
            return among

    # -- restoring --

    @overload
    def restore(self, *, step: int | Literal["best"] | None = None, strict: bool = True) -> int: ...
    @overload
    def restore(self, *, default: T, step: int | Literal["best"] | None = None, strict: bool = True) -> int | T: ...

    @traced("ckpt.restore")
    def restore(self, *, default: Any = MISSING, step: int | Literal["best"] | None = None, strict: bool = True) -> Any:
        """Restore the state to the newest step from the nearest tier that has it, and return the step.

        Tensors are filled in place. Damaged checkpoints are skipped with a warning and listed in `last_restore`.

        - `default`: value to return if no tier has a checkpoint. If omitted, NoCheckpointError is raised instead.
        - `step`: number of the step to restore, or "best" for the step with the best score. Later steps leave the
          history: a later `restore()` without `step` does not return to them.
        - `strict`: False restores the entries that fit, and casts entries of another dtype. Default True.

        Raises NoCheckpointError, CorruptError if no checkpoint is intact, or MismatchError. After each of these errors,
        the state is unchanged.
        """
        with self._run.in_turn(alone=True):
            self._run.check_usable(restoring=True)
            try:
                number = self._kept.number_of(step) if isinstance(step, str) else step
                found = self._restoring.restore(default, number, strict)
                self._kept.went_back()
                return found
            finally:
                self._saver.forget_answers()
                self._run.orders.resume()

    # -- the end --

    def wait(self, timeout_s: float | None = None, *, step: int | None = None) -> None:
        """Wait until every save begun so far has been staged and written or has failed.

        - `timeout_s`: longest wait, seconds, default no limit. Raises DeadlineError after it.
        - `step`: wait only for the save of this step.

        Also waits until pinned and scored steps are recorded.
        """
        self._run.check_not_forked()
        self._kept.wait(timeout_s, step)
        self._saver.note_owed()
        self._run.errors.raise_pending()

    def close(self, timeout_s: float | None = None) -> None:
        """Make the last step durable in every tier, wait for all saves and end the writer. Further calls do nothing.

        If memory does not have the last step, the current state is saved. If an optimizer has begun another step, an
        exception is propagating, or another thread calls this, the newest step in memory is saved instead, with a
        warning. A run without tiers frees its memory, except after an exception: the memory then stays for a restart.

        Raises DeadlineError after `timeout_s` seconds (default: `Options.close_timeout_s`); the writer still finishes.
        Raises DeadlineError or PeerError if other ranks do not close. The writer then keeps the memory for a restart,
        as after a crash.
        """
        self._closing.close_as_asked(timeout_s)

    def _after_fork(self) -> None:
        if not self._run.closed:
            self._run.forked = True
            _open.pop(self._settings.url, None)  # the child process may open the run itself once its parent has ended
            self._run.hook.silence()
            self._fault_handler.forget()
            self._run.supervisor.forget()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, Exception) and not self._run.closed and not self._run.forked:
            self._fault_handler.exception(error)
        self._closing.close_after(error)
