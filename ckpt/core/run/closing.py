"""Ends a run, and makes emergency saves.

`Closing.close` saves the last step to every tier, then releases memory and the writer. `Closing.abandon` stages the
last step and leaves the rest to the writer, as if this process had died. `Departures` announces that this rank leaves,
and fails saves to which a departed rank did not contribute. `ProcessEnd` closes the run when the interpreter ends.

`EmergencySaver` saves the newest step that all ranks can provide before a deadline:

    request_save -> order a step that all training loops save; or stage the last step and use the steps in memory
                 -> the writer makes it durable -> Outcome

The guard calls `request_save` on a fault or when a user requests a save. Other ranks receive orders through
`ckpt.core.ranks.orders`, and `EmergencySaver` executes them on every rank. Threads that wait for an ordered save find
it in `Saver.answers`. Every wait for the training loop, another rank or the writer has a deadline."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.heartbeat import LEAVING, OPENING, RESTORING
from ckpt.core.ipc.messages import Persist, SavedInTier
from ckpt.core.log.run_log import Acquire
from ckpt.core.ranks.orders import Order
from ckpt.core.ranks.world import Mailbox
from ckpt.core.run.save_plan import Late
from ckpt.core.run.saver import NO_TIME, TOO_LATE, Saver
from ckpt.core.run.training_run import TURN_S, TrainingRun
from ckpt.core.run.writer_link import start_thread
from ckpt.core.snapshot.snapshot import Snapshot, WriteState
from ckpt.errors import CheckpointError, DeadlineError, FencedError, PeerError, SaveError, WriterError
from ckpt.events import log
from ckpt.saving import Save
from ckpt.subscribers import flush, publish
from ckpt.units import count_of

STOP_S = 30.0  # timeout to stop the guard while it handles a fault
MOST_NAMED = 8  # maximum number of ranks that a message names
INSIST_S = 10.0  # Ctrl-C is delayed for this time while the last step is copied into memory
CHECK_S, CHECKS_PER_S = 1.0, 500  # shortest pause between two checks of the store; limit of checks by the whole job
AGAIN_S = 30.0  # longest pause between checks if the store does not respond
POST_S = 5.0  # timeout to write a post to the store, or to read the posts of other ranks


class Guard(Protocol):
    """The methods of the guard that closing uses. `saw_exception`: True if an exception has ended the training."""

    @property
    def saw_exception(self) -> bool: ...

    def stop(self, timeout_s: float) -> None: ...


class Departures:
    """Announces that this rank leaves, and fails saves to which a departed rank did not contribute.

    A departing rank posts the list of checkpoints for which it has saved its files. While a save of this rank is under
    way, a background thread reads these posts. If a departed rank has no files for that save, the thread fails the save
    with an error that names the rank. Slow ranks fail no save, but the writer reports them (`ckpt.core.writer.parts`).
    """

    def __init__(self, run: TrainingRun, saver: Saver) -> None:
        self._run, self._saver = run, saver
        self._others = [rank for rank in range(run.world.size) if rank != run.world.rank]
        self._posts: dict[int, dict[str, Any]] = {}  # the posts of departed ranks, by rank
        self._seen: set[str] = set()  # ids of checkpoints that were found to lack the files of a departed rank
        self._checking = threading.RLock()  # a signal handler may close the run while this thread holds the lock
        self._stopped = threading.Event()
        self._mail: Mailbox | None = None
        if self._others and run.tiers:
            self._thread = threading.Thread(target=self._watch, name="ckpt-departures", daemon=True)
            self._thread.start()
            run.ends.callback(self._stop)

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join(CHECK_S)

    def leave(self, how: str) -> None:
        """Post that this rank saves nothing more. Never raises."""
        if not self._others:
            return
        posted = threading.Event()
        start_thread(lambda: self._post(how, posted), "ckpt-departs")
        posted.wait(POST_S)

    def _post(self, how: str, posted: threading.Event) -> None:
        sealed = [checkpoint for checkpoint, _ in self._saver.sealed()]
        step = self._run.step if self._run.stepped else None
        post = {"how": how, "step": step, "has": sorted({*sealed, *self._saver.sent})}
        try:
            mail = self._run.ownership.mailbox()
            mail.put(f"left/{self._run.world.rank}", post)
            mail.put("left/any", True)
        except CheckpointError as error:
            log.info("could not notify other ranks that this rank leaves: %s", error)
        finally:
            posted.set()

    def check(self, *, all_left: bool = False) -> None:
        """Read the posts of departed ranks, and fail the saves that lack files of these ranks. `all_left`: every rank
        has posted. Raises PeerError if the store cannot be reached."""
        with self._checking:
            if self._mail is None:
                self._mail = self._run.world.mailbox()
            new = [rank for rank in self._others if rank not in self._posts]
            if not all_left:
                any_left = bool(new) and self._mail.poll(["left/any"])
                new = [rank for rank in new if any_left and self._mail.poll([f"left/{rank}"])]
            self._posts |= zip(new, self._mail.wait([f"left/{rank}" for rank in new], POST_S), strict=True)
            for save in self._saver.under_way():
                self._fail_if_missing(save.id, at_once=all_left)

    def _fail_if_missing(self, checkpoint: str, *, at_once: bool) -> None:
        """Fail a save that lacks a departed rank's files. Ranks that do not commit fail it only at the second check."""
        missing = [rank for rank, post in sorted(self._posts.items()) if checkpoint not in post["has"]]
        if not missing:
            return
        supervisor = self._run.supervisor
        if at_once or checkpoint in self._seen or any(role.place == 0 for role in supervisor.run.roles):
            parsed = CheckpointId.parse(checkpoint)
            reason = f"{self.describe(missing[0])} without saving step {parsed.step}"
            supervisor.writes.retract(parsed, reason)
        self._seen.add(checkpoint)

    def describe(self, rank: int) -> str:
        """Describe how far a departed rank had trained."""
        post = self._posts[rank]
        came = f"after step {post['step']}" if post["step"] is not None else "without any step()"
        return f"rank {rank} {post['how']} {came}"

    def behind(self, step: int) -> list[str]:
        """Describe the ranks that left before this step."""
        steps = {rank: -1 if post["step"] is None else post["step"] for rank, post in sorted(self._posts.items())}
        return [self.describe(rank) for rank, last in steps.items() if last < step]

    def _watch(self) -> None:
        usual_s = max(CHECK_S, self._run.world.size / CHECKS_PER_S)
        pause_s = usual_s
        while not self._stopped.wait(pause_s):
            if not self._saver.under_way():
                continue
            try:
                self.check()
                pause_s = usual_s
            except CheckpointError as error:
                log.debug("could not read the posts of departed ranks: %s", error)
                pause_s = min(2 * pause_s, AGAIN_S)


class Closing:
    """Closes one run. `failed`: True if an exception has ended the training."""

    def __init__(self, run: TrainingRun, saver: Saver, guard: Guard) -> None:
        self._run, self._saver, self._guard = run, saver, guard
        self._departures = Departures(run, saver)
        self._agreed = False  # True once all other ranks have called close()
        self.failed = False

    def close_as_asked(self, timeout_s: float | None) -> None:
        """See `Checkpointer.close`, which may be called while an exception propagates."""
        under_way = sys.exc_info()[1]
        try:
            self.close(timeout_s, clean=under_way is None)
        except CheckpointError as failure:
            if not (isinstance(under_way, KeyboardInterrupt) or (isinstance(under_way, SystemExit) and under_way.code)):
                raise
            _add(under_way, failure)
            raise under_way from None  # ends the script even if a `finally` block calls this method

    def close_after(self, error: BaseException) -> None:
        """Close after an exception has left the `with` block."""
        self.failed = isinstance(error, Exception) or (isinstance(error, SystemExit) and bool(error.code))
        clean = isinstance(error, SystemExit) and not error.code
        # Other ranks may be blocked in a collective and never call close(), so only a plain sys.exit(0) is a normal
        # end. A subclass of SystemExit may report a fault: Lightning, for example, raises one on SIGTERM.
        if self._run.world.size > 1 and not (clean and type(error) is SystemExit):
            self.abandon()
            return
        try:
            self.close(clean=clean)
        except CheckpointError as failure:
            if clean:  # otherwise the script would exit with code 0
                raise
            _add(error, failure)

    def close_at_exit(self) -> None:
        """Close when the interpreter ends and the user has not closed the run."""
        if self._run.world.size > 1 and self._guard.saw_exception:  # other ranks may never call close()
            self.abandon()
            return
        try:
            self.close(clean=False)
        except CheckpointError as failure:  # too late to change the exit code
            log.error("closing the Checkpointer at the end of the script failed: %s", failure)
        except BaseException:  # Ctrl-C: close() is not called again, so at least stage the last step
            self.abandon()
            raise

    def close(self, timeout_s: float | None = None, *, clean: bool) -> None:
        """Save the last step to every tier and close the run. `clean`: the training does not end with an exception."""
        run = self._run
        if run.closed or run.forked:
            return
        timeout_s = run.settings.close_timeout_s if timeout_s is None else timeout_s
        if not run.turn.acquire(timeout=timeout_s):
            raise DeadlineError("another thread has been in step(), save() or restore() all the time")
        try:
            if not run.closed:
                self._close(time.monotonic() + timeout_s, clean)
        finally:
            run.turn.release()

    def _close(self, end: float, clean: bool) -> None:
        run, failure = self._run, None
        run.heartbeat.touch(LEAVING)
        self._saver.forgo_begun()
        try:
            self._save_last(end, clean)
        except CheckpointError as error:
            failure = error
        if self._run.closed:  # a signal handler has interrupted this method and closed the run
            return
        try:
            leave = self._keeps_memory(clean)
            self._end(max(1.0, end - time.monotonic()))
            self._release(leave, end)
        except CheckpointError as error:
            if not run.errors.is_known(error):
                failure = failure or error
        except BaseException:  # Ctrl-C: the writer finishes alone, and another Checkpointer may open the run
            run.supervisor.leave(TURN_S)
            run.stager.stop(TURN_S)
            raise
        run.stager.stop(max(1.0, end - time.monotonic()))
        if self._agreed or run.world.rank > 0:  # rank 0 would wait for ranks that never call close()
            run.world.farewell()
        self._saver.forget()
        self._publish_closed()
        if failure is not None:
            raise failure
        run.errors.raise_pending()

    def abandon(self) -> None:
        """Stage the last step, then leave everything to the writer as if this process had died."""
        run, timeout_s = self._run, self._run.settings.close_timeout_s
        if run.closed or run.forked:
            return
        in_turn, why = False, "it was interrupted"
        try:
            with _ctrl_c_later(INSIST_S):
                try:
                    in_turn = run.turn.acquire(timeout=timeout_s)
                    with contextlib.suppress(CheckpointError):  # let a copy that is under way finish
                        run.stager.do(lambda: None, run.settings.busy_timeout_s)
                    why = self._saver.stage_last(time.monotonic() + timeout_s, live=False)
                finally:  # even after another Ctrl-C
                    if why:
                        self._warn_if_lost(self._saver.newest, why)
            run.world.leave(f"left without close() after step {run.step}")
            self._departures.leave("left without close()")
            self._guard.stop(STOP_S)
            run.supervisor.leave(timeout_s)
            self._end()
            run.stager.stop()
            self._publish_closed()
        finally:
            if in_turn:
                run.turn.release()

    def _release(self, leave: bool, end: float) -> None:
        """Release memory and the writer. With `leave`, the writer keeps the memory as if this process had died."""
        run = self._run
        if leave:
            run.supervisor.leave(max(1.0, end - time.monotonic()))
            return
        failed = self._has_failed or run.errors.fenced is not None
        run.supervisor.close(end - time.monotonic(), failed=failed)

    @property
    def _has_failed(self) -> bool:
        return self.failed or self._guard.saw_exception

    def _end(self, timeout_s: float = STOP_S) -> None:
        self._run.closed = True
        self._run.ends.close()
        self._guard.stop(timeout_s)

    def _publish_closed(self) -> None:
        publish("closed", self._run.step)
        flush()

    def _save_last(self, end: float, clean: bool) -> None:
        """Save the newest step that all ranks have to every tier by `end`. `clean`: see `close`.

        Raises DeadlineError or PeerError if the other ranks do not close because they have died or continue to train.
        """
        self._agreed = False
        why = self._saver.stage_last(end, live=clean) if self._run.tiers or not clean else ""
        if self._run.world.size > 1:
            self._departures.leave("closed")
            self._agree_last(end)
            try:
                self._departures.check(all_left=True)
            except CheckpointError as error:
                log.info("could not read the posts of departed ranks: %s", error)
        self._agreed = True
        if self._run.errors.fenced is None and (self._run.tiers or why):
            self._write_last(end, why)
        self._saver.wait(max(0.0, end - time.monotonic()))
        self._saver.note_owed()
        if why == NO_TIME:
            raise DeadlineError(f"the last step, {self._run.step}, is lost: {why}")
        if self._run.tiers and self._run.errors.fenced is None:
            self._check_any_saved(why)

    def _keeps_memory(self, clean: bool) -> bool:
        """Return True if the writer must keep the memory and continue to write, as if this process had died.

        The writer keeps the memory in four cases: memory of an earlier job attempt was neither restored nor replaced,
        no tier has the last step, other ranks did not close, or the launcher restarts this process.
        """
        run, saver = self._run, self._saver
        # After a restore from another number of ranks, `pinned` is set and `newest` is not.
        untouched = saver.newest is None and (not run.restored or saver.pinned is not None)
        only_copy = self._is_only_in_memory() if self._run.tiers else not clean
        if (untouched and self._run.supervisor.inherits) or only_copy or not self._agreed:
            return True
        return self._has_failed and self._run.errors.fenced is None and _starts_again()

    def _agree_last(self, end: float) -> None:
        """Agree with the other ranks on the newest step that is in the memory of all ranks, and set it as `newest`."""
        saver, world = self._saver, self._run.world
        if saver.last is not None:
            saver.last.copied.wait(max(0.0, end - time.monotonic()))
        timeout_s = max(0.1, min(world.timeout_s, end - time.monotonic()))
        dead = lambda: self._run.dead_ranks  # noqa: E731
        common = world.agree("close", saver.sealed(), _worth_keeping, timeout_s=timeout_s, dead=dead)
        checkpoint = None if not common else CheckpointId.parse(common[0])
        saver.finite = saver.in_memory(CheckpointId.parse(common[1])) if len(common) > 1 else None
        if checkpoint is not None and saver.newest is not None and saver.newest.checkpoint == checkpoint:
            return
        common_step = None if checkpoint is None else saver.in_memory(checkpoint)
        saver.last, saver.newest = None, common_step

    def _write_last(self, end: float, why: str) -> None:
        """Write the newest step in memory to all tiers without it, nearest first. `why`: why the last step is lost."""
        saver, stepped = self._saver, self._run.stepped
        newest = saver.newest
        if (last := saver.last) is not None:
            last.copied.wait(max(0.0, end - time.monotonic()))
            # If the last snapshot failed, an earlier one in memory is the newest.
            there = last.place is not None or last.stored
            if there and (newest is None or newest.checkpoint < last.checkpoint):
                newest = last
        if self._run.world.size == 1 and len(worth := _worth_keeping([saver.sealed()])) > 1:
            saver.finite = saver.in_memory(CheckpointId.parse(worth[1]))
        self._warn_if_lost(newest, why)
        if newest is None or not (stepped or not newest.writes):
            return
        # All tiers have a step that was restored from a tier. The nearest tier may lack a step restored from memory.
        tiers = self._run.settings.everywhere
        for some in (tiers[:1], tiers[1:] if stepped else []):
            for one in (newest, saver.finite if stepped else None):
                if one is not None:
                    self._saver.write_missing(one, some)
            self._saver.wait(max(0.0, end - time.monotonic()))

    def _warn_if_lost(self, newest: Snapshot | None, why: str) -> None:
        """Log one warning if the newest saved step is not the last step."""
        restored, last = self._run.supervisor.owner.restored, self._run.step
        kept = newest.checkpoint.step if newest else restored.step if restored is not None else None
        if self._saver.committed is not None:
            kept = max(kept if kept is not None else -1, self._saver.committed)
        speaks = bool(why) or self._run.world.rank == 0
        if not self._run.stepped or last is None or kept == last or not speaks:
            return
        what = "no step is" if kept is None else f"only step {kept} is"
        again = f"; a restart repeats {count_of(last - kept, 'step')}" if kept is not None else ""
        log.warning("the last step is %d, but %s saved: %s%s", last, what, why or self._why_not_common(last), again)

    def _why_not_common(self, step: int) -> str:
        return "; ".join(self._departures.behind(step)[:MOST_NAMED]) or "not all ranks have a newer one"

    def _check_any_saved(self, why: str) -> None:
        """Make close() raise SaveError if the training has done steps and none of them was saved, because a chain of
        such starts would never advance.

        If the newest step is in memory, or with on_error="warn", only log that no tier has a step.
        """
        saver, last = self._saver, self._saver.last
        if not self._run.stepped or self._saver.committed is not None:
            return
        in_memory = saver.newest is not None or (last is not None and last.place is not None)
        if in_memory or self._run.settings.on_error == "warn":
            if self._run.world.rank == 0:
                log.error("step %s was the last step, but no tier has a step of this job attempt", self._run.step)
        else:
            restored = self._run.supervisor.owner.restored
            which = "run" if restored is None else f"start, which continued from step {restored.step},"
            what = f"no step of this {which} was saved, and step {self._run.step} was the last step"
            self._run.errors.note(SaveError(f"{what}: {why or self._why_not_common(self._run.step or 0)}"))

    def _is_only_in_memory(self) -> bool:
        """Return True if no write of the newest step to a tier has succeeded or is under way."""
        newest = self._saver.newest
        if newest is None or self._run.errors.fenced is not None or self._run.supervisor.failure is not None:
            return False
        return all(state is WriteState.FAILED for state in newest.writes.values())


def _add(error: BaseException, failure: CheckpointError) -> None:
    """Attach the error of closing to the user's own exception, which ends the script."""
    error.add_note(f"closing the Checkpointer failed too: {failure}")
    if not isinstance(error, Exception):  # Python does not always print notes of KeyboardInterrupt and SystemExit
        log.error("closing the Checkpointer failed: %s", failure)


def _worth_keeping(posts: list[Any]) -> list[str]:
    """Return the newest checkpoint id that all ranks hold, and the newest finite one if it differs. Pure."""
    common = set.intersection(*({checkpoint for checkpoint, _ in post} for post in posts))
    sound = common - {checkpoint for post in posts for checkpoint, fine in post if not fine}
    newest = [max(some, key=CheckpointId.parse) for some in (common, sound) if some]
    return list(dict.fromkeys(newest))


def _starts_again() -> bool:
    """Return True if torchrun restarts this process when it fails."""
    done, most = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done.isdecimal() and most.isdecimal() and int(done) < int(most)


@contextlib.contextmanager
def _ctrl_c_later(patience_s: float) -> Iterator[None]:
    """Delay Ctrl-C in the main thread until the block has ended. Any Ctrl-C after `patience_s` interrupts the block."""
    before, heard = signal.getsignal(signal.SIGINT), list[Any]()
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    end = time.monotonic() + patience_s

    def later(number: int, frame: Any) -> None:
        heard.append(frame)
        if time.monotonic() > end:
            before(number, frame)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is later:
            signal.signal(signal.SIGINT, before)
    if heard:
        before(signal.SIGINT, heard[0])


class ProcessEnd:
    """Calls `at_end` when the interpreter ends, and `after_fork` in a forked child. Keeps weak references to both."""

    def __init__(self, at_end: Callable[[], None], after_fork: Callable[[], None]) -> None:
        self._at_end = _weakly(at_end)
        os.register_at_fork(after_in_child=_weakly(after_fork))
        atexit.register(self._at_end)
        self._at_child_end = _at_child_end(self._at_end)

    def cancel(self) -> None:
        """Unregister the call of `at_end`."""
        atexit.unregister(self._at_end)
        if self._at_child_end is not None:
            self._at_child_end.cancel()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls the method if its object is still alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call


def _at_child_end(call: Callable[[], None]) -> Any:
    """Register `call` for the end of a `multiprocessing` child, which skips atexit. Return None in other processes."""
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        return None

    def end() -> None:
        threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, which a child does not do by itself
        call()

    return util.Finalize(None, end, exitpriority=100)


# -- emergency saves --


PATIENT_S = 600.0  # timeout of a save without a deadline
LIVE_S = 10.0  # timeout to copy the step that an exception has interrupted
PERSIST_S = 60.0  # timeout to make the steps in memory durable, if the other ranks have them too
COPYING_S = 2.0  # timeout for a copy that is under way
GUESS_S = 0.1
PATIENCE_S = 0.5  # extra time for the training loop to reach an ordered step
AHEAD = 2  # an ordered step is this many steps ahead of the posting rank, plus the steps done during two polls
TRIES = 3  # maximum orders for one request; the next one is posted if some rank had passed the ordered step
MOST_WHY = 200  # characters of a reason that other ranks log


@dataclass
class Outcome:
    """The result of a request. All times are in seconds since the request.

    saved: steps and their location ("memory" or a URL), grouped by how they were saved: "agreed" by the training
        loops; "live" staged after an exception in step(); "ring" already in memory
    staged_s: time when staging of the last step ended; None if the training loops saved a step
    durable_s: time when the steps were durable or had failed; None if the writer got no request or did not reply
    """

    began: float = field(default_factory=time.monotonic)
    saved: dict[str, list[SavedInTier]] = field(default_factory=dict)
    staged_s: float | None = None
    durable_s: float | None = None

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.began

    def add(self, how: str, step: int, tier: str, seconds: float, error: str = "") -> None:
        self.saved.setdefault(how, []).append(SavedInTier(step, tier, seconds, error))


class EmergencySaver:
    """Saves the state of a run on request."""

    def __init__(self, run: TrainingRun, saver: Saver) -> None:
        self._run, self._saver = run, saver
        self._world, self._supervisor, self._heartbeat = run.world, run.supervisor, run.heartbeat
        self._orders = run.orders
        self._turn = threading.Lock()  # held by the thread that handles a local request or an order of another rank
        self._stopped = False
        self._orders.hear("save", self._on_save)
        self._orders.hear("persist", self._on_persist)
        self._orders.hear("interval", self._on_interval)

    def stop(self, timeout_s: float) -> None:
        """Stop accepting requests. Wait up to `timeout_s` for the request that is being handled."""
        self._stopped = True
        with self._saver.answered:
            self._saver.answered.notify_all()
        if self._turn.acquire(timeout=timeout_s):
            self._turn.release()

    # -- the port --

    def request_save(
        self,
        why: str,
        deadline: float | None = None,
        *,
        far: bool = False,
        leaving: bool = False,
        hung: bool = False,
        loop_ended: bool = False,
    ) -> Outcome:
        """Save the newest step that all ranks can provide. Return the result by the deadline or soon after.

        why: the reason, for the logs of the other ranks
        deadline: a time of time.monotonic(), or None
        far: also write to the tiers beyond the nearest one
        leaving: this process ends after the save
        hung: the training loop of some rank does not proceed
        loop_ended: the caller is the training thread, and will not call step() again

        Before the first step, nothing is saved, because memory and tiers contain the steps of earlier job attempts.
        """
        outcome, alone = Outcome(), self._world.size == 1
        end = outcome.began + PATIENT_S if deadline is None else deadline
        with contextlib.nullcontext() if loop_ended else self._turn:  # the training thread must not wait for `_turn`
            if not self._can_save:
                return outcome
            blocked = hung or bool(self._run.dead_ranks)  # the training loop of some rank cannot save
            held = self._saver.newest_step(min(COPYING_S, _left(end)))
            ready = held is not None and held == self._heartbeat.step
            # A step in memory is enough, unless there is time for all ranks to save the same step.
            ask = not (blocked or loop_ended) and (not ready or not (alone or leaving))
            if ask and self._save_ordered(outcome, why, end, hurried=deadline is not None):
                return outcome
            if not ready and (step := self._stage_last()) is not None:
                outcome.add("live", step, "memory", outcome.passed_s)
            outcome.staged_s = outcome.passed_s
            if not alone and not blocked:
                self._order("persist", -1, why, end, 0, join=-1)
            if blocked and leaving and self._supervisor.memory.outlives_us:
                self._note_memory(outcome)  # the writer makes memory durable while the launcher starts the next trainer
            else:
                self._persist(outcome, end, far=far)
        return outcome

    def await_copy(self) -> None:
        """Wait until a copy that is under way has ended."""
        if self._can_save:
            self._saver.newest_step(COPYING_S)

    def give_memory_back(self) -> int:
        """Release one slot and return its size in bytes. In a multi-rank job, keep enough slots for a step that all
        ranks have."""
        if not self._can_save:
            return 0
        stager = self._run.stager
        return stager.give_up_slot() if self._world.size == 1 else stager.give_up_slot(3)

    @property
    def _can_save(self) -> bool:
        return self._heartbeat.step >= 0 and self._heartbeat.state not in (OPENING, RESTORING)

    def _stage_last(self) -> int | None:
        """Stage the last step if an exception interrupted step(). Return the step if memory has it.

        Only the training thread can stage it: in any other thread, return None.
        """
        if threading.get_ident() != self._run.thread:
            return None
        self._saver.stage_last(time.monotonic() + LIVE_S, live=False)
        return self._run.step if self._saver.newest_step(0.0) == self._run.step else None

    # -- one step, saved by all training loops --

    def _save_ordered(self, outcome: Outcome, why: str, end: float, *, hurried: bool) -> bool:
        """Make the training loops of all ranks save one step. Return False if they do not save it in time."""
        before, usual_s = self._heartbeat.step, self._usual_s()
        if (order := self._order_save(usual_s, why, end, TRIES)) is None:
            return False
        needed_s = max(1, order.step - before) * usual_s
        patience_s = min(_left(end) / 2, 3 * needed_s + PATIENCE_S) if hurried else _left(end)
        patient, tried = time.monotonic() + patience_s, list[Save]()
        while time.monotonic() < patient and not self._stopped:
            with self._saver.answered:  # find the save of this step, or of a step that was ordered later
                found = [save for save in self._saver.answers if save.step >= order.step and save not in tried]
                if not found:
                    self._saver.answered.wait(min(1.0, _left(patient)))
                    continue
            tried.append(found[0])
            if self._follow_save(outcome, found[0], end):
                return True
        return False

    def _order_save(self, usual_s: float, why: str, end: float, tries: int) -> Order | None:
        """Order the save of the first step that all ranks can still save, or join an order of another rank."""
        step = self._heartbeat.step
        pauses = math.ceil(2 * self._orders.pause_s / usual_s) if usual_s > 0 else 0
        ahead = 1 if self._world.size == 1 else AHEAD + pauses
        return self._order("save", step + ahead, why, end, tries, join=step + 1)

    def _usual_s(self) -> float:
        """Return the duration of a step in seconds. Measure it if the heartbeat does not know it yet."""
        if usual_s := self._heartbeat.usual_s:
            return usual_s
        before = self._heartbeat.step
        time.sleep(GUESS_S)
        return GUESS_S / max(1, self._heartbeat.step - before)

    def _order(self, kind: str, step: int, why: str, end: float, tries: int, *, join: int) -> Order | None:
        """Post an order, or join an order of another rank. Return None if the store does not respond."""
        try:
            body = {"why": why[:MOST_WHY], "grace_s": _left(end), "tries": tries}
            return self._orders.post(kind, step, body, join=join)
        except PeerError as error:
            log.warning("%s", error)
            return None

    def _follow_save(self, outcome: Outcome, save: Save, end: float) -> bool:
        """Wait until a save is in all its tiers. Return False if it failed, for example if a rank was past it."""
        passed = dict[str, float]()
        try:
            passed[save.wait_staged(_left(end)).tier] = outcome.passed_s
            for tier in save.tiers:
                save.wait_durable(_left(end), tier=tier)
                passed[tier] = outcome.passed_s
        except CheckpointError as error:
            log.info("the requested save of step %d failed: %s", save.step, error)
            return False
        for tier, seconds in passed.items():
            outcome.add("agreed", save.step, tier, seconds)
        outcome.durable_s = outcome.passed_s
        return True

    # -- orders to the whole job, handled in the thread that reads or posts them --

    def _on_save(self, order: Order) -> None:
        if order.rank != self._world.rank:
            log.info("rank %d requests a save: %s", order.rank, order.body["why"])
        late = self._run.intervals.plan.order(order.step)
        if late is not None:
            work = partial(self._save_late, order, late, self._supervisor.owner, time.monotonic())
            start_thread(work, "ckpt-late-save")

    def _save_late(self, order: Order, late: Late, owner: Acquire, began: float) -> None:
        """Save a step that this rank had already passed from memory. If memory has lost it, order a later step."""
        self._saver.newest_step(COPYING_S)
        if owner != self._supervisor.owner:
            return  # the state was restored since, so this step number now means another step
        save = self._saver.save_late(late, owner, f"had passed step {late.step} when it was ordered")
        if save is not None:
            self._saver.answer(save)
        elif order.body["tries"] > 1 and not (self._run.intervals.plan.awaits_step or self._stopped):
            end = began + order.body["grace_s"]
            self._order_save(self._usual_s(), order.body["why"], end, order.body["tries"] - 1)

    def _on_persist(self, order: Order) -> None:
        if order.rank != self._world.rank:
            log.info("rank %d requests a save of the steps in memory: %s", order.rank, order.body["why"])
            start_thread(partial(self._persist_ordered, time.monotonic() + order.body["grace_s"]), "ckpt-persist")

    def _persist_ordered(self, end: float) -> None:
        with self._turn:
            if not self._stopped and self._can_save:
                self.await_copy()
                self._persist(Outcome(), end, far=False)

    def _on_interval(self, order: Order) -> None:
        for late in self._run.intervals.change(order):
            self._saver.save_late(late, self._supervisor.owner, TOO_LATE)

    # -- steps in memory --

    def _persist(self, outcome: Outcome, end: float, *, far: bool) -> None:
        """Make the writer write the steps in memory to durable tiers."""
        before_s = outcome.passed_s
        self._note_memory(outcome)
        deadline_s = min(_left(end), PERSIST_S)
        try:
            with self._supervisor.held.holding_still(alone=self._world.size == 1) as checkpoints:
                request = Persist(deadline_s, far, [str(checkpoint) for checkpoint in checkpoints])
                saved = self._supervisor.client.ask(request, deadline_s + 1.0)
        except CheckpointError as error:
            if not isinstance(error, FencedError):  # a FencedError is raised or logged elsewhere
                log.warning("the steps in memory were not made durable: %s", error)
            return
        for one in saved:
            outcome.add("ring", one.step, one.tier, before_s + one.seconds, one.error)
        outcome.durable_s = outcome.passed_s

    def _note_memory(self, outcome: Outcome) -> None:
        if isinstance(self._supervisor.failure, WriterError):
            return  # no writer survives this process, so its memory is lost with it
        known = {saved.step for saved in outcome.saved.get("live", ())}
        steps = sorted((checkpoint.step for checkpoint in self._supervisor.held.sealed()), reverse=True)
        wanted = steps[:1] if self._world.size == 1 else steps  # with several ranks, one may lack the newest step
        for step in wanted:
            if step not in known:
                outcome.add("ring", step, "memory", outcome.passed_s)


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())
