"""The end of a run: the last step goes to every tier, then memory and the writer are released.

`Closing` ends the run in order (`close`), or leaves it to the writer as if this process had died (`abandon`).
`Departures` posts that this rank leaves, and fails what other ranks left without. `ProcessEnd` closes the run when the
interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ckpt.core.format.manifest import Attempt
from ckpt.core.ipc.heartbeat import LEAVING
from ckpt.core.ranks.world import Mailbox
from ckpt.core.run.saver import NO_TIME, Saver
from ckpt.core.run.supervise.writer_link import start_thread
from ckpt.core.run.training_run import TURN_S, TrainingRun
from ckpt.core.snapshot.snapshot import Snapshot, WriteState
from ckpt.errors import CheckpointError, DeadlineError, SaveError
from ckpt.events import log
from ckpt.subscribers import flush, publish

STOP_S = 30.0  # for a fault that is being handled
MOST_NAMED = 8  # ranks in a message
INSIST_S = 10.0  # for the last step to get into memory; then one more Ctrl-C interrupts that, too
CHECK_S, CHECKS_PER_S = 1.0, 500  # between two checks of the store; of all ranks together
AGAIN_S = 30.0  # if the store does not answer
POST_S = 5.0  # for the store to take a post, or to return those of other ranks


class Guard(Protocol):
    """The part of the guard that closing uses. `saw_exception`: an exception has ended the training."""

    @property
    def saw_exception(self) -> bool: ...

    def stop(self, timeout_s: float) -> None: ...


class Departures:
    """Posts that this rank leaves, and fails saves that other ranks left without.

    A rank that leaves posts which checkpoints it has a part of. While a save of this rank is under way, a background
    thread reads such posts, and fails each save that a rank which has left has no part of, with an error that names it.
    A rank that is merely slow is not failed: the writer reports it, see `ckpt.core.checkpoint.settle`.
    """

    def __init__(self, run: TrainingRun, saver: Saver) -> None:
        self._run, self._saver = run, saver
        self._others = [rank for rank in range(run.world.size) if rank != run.world.rank]
        self._posts: dict[int, dict[str, Any]] = {}  # by rank that has left
        self._seen: set[str] = set()  # attempts that were found to miss a rank
        self._checking = threading.RLock()  # a signal handler may close us meanwhile
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
        sealed = [attempt for attempt, _ in self._saver.sealed()]
        step = self._run.step if self._run.stepped else None
        post = {"how": how, "step": step, "has": sorted({*sealed, *self._saver.sent})}
        try:
            mail = self._run.ownership.mailbox()
            mail.put(f"left/{self._run.world.rank}", post)
            mail.put("left/any", True)
        except CheckpointError as error:
            log.info("other ranks cannot be told that this one leaves: %s", error)
        finally:
            posted.set()

    def check(self, *, all_left: bool = False) -> None:
        """Read the posts of ranks that have left, and fail what they have no part of. `all_left`: every rank has
        posted. PeerError if the store cannot be reached."""
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

    def _fail_if_missing(self, attempt: str, *, at_once: bool) -> None:
        """The rank that commits fails it first. If that one has left itself, another does at its next look."""
        missing = [rank for rank, post in sorted(self._posts.items()) if attempt not in post["has"]]
        if not missing:
            return
        supervisor = self._run.supervisor
        if at_once or attempt in self._seen or any(role.place == 0 for role in supervisor.run.roles):
            parsed = Attempt.parse(attempt)
            reason = f"{self.describe(missing[0])} and saved no step {parsed.step}"
            supervisor.writes.retract(parsed, reason)
        self._seen.add(attempt)

    def describe(self, rank: int) -> str:
        """Describe how far a rank came that has left."""
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
                log.debug("posts of ranks that left cannot be read: %s", error)
                pause_s = min(2 * pause_s, AGAIN_S)


class Closing:
    """Closes one run. `failed`: an exception has ended the training."""

    def __init__(self, run: TrainingRun, saver: Saver, guard: Guard) -> None:
        self._run, self._saver, self._guard = run, saver, guard
        self._departures = Departures(run, saver)
        self._agreed = False  # whether the other ranks have come to close
        self.failed = False

    def close_as_asked(self, timeout_s: float | None) -> None:
        """See `Checkpointer.close`, which may be called while an exception is on its way."""
        under_way = sys.exc_info()[1]
        try:
            self.close(timeout_s, clean=under_way is None)
        except CheckpointError as failure:
            if not (isinstance(under_way, KeyboardInterrupt) or (isinstance(under_way, SystemExit) and under_way.code)):
                raise
            _add(under_way, failure)
            raise under_way from None  # it ends the script, also when `finally` calls this

    def close_after(self, error: BaseException) -> None:
        """Close after an exception has left the `with` block."""
        self.failed = isinstance(error, Exception) or (isinstance(error, SystemExit) and bool(error.code))
        clean = isinstance(error, SystemExit) and not error.code
        # The other ranks may be in a collective, and never come to close. sys.exit(0) ends a script like the end of the
        # block; a subclass is raised elsewhere, for example by Lightning at SIGTERM.
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
        if self._run.world.size > 1 and self._guard.saw_exception:  # the others may never come to close
            self.abandon()
            return
        try:
            self.close(clean=False)
        except CheckpointError as failure:  # too late to change the exit code
            log.error("closing the Checkpointer at the end of the script failed: %s", failure)
        except BaseException:  # Ctrl-C: close() is not called again, so the last step goes to memory at least
            self.abandon()
            raise

    def close(self, timeout_s: float | None = None, *, clean: bool) -> None:
        """Save the last step everywhere, and end. `clean`: no exception ends the training."""
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
        if self._run.closed:  # by a signal handler, which came into this
            return
        try:
            leave = self._keeps_memory(clean)
            self._end(max(1.0, end - time.monotonic()))
            self._release(leave, end)
        except CheckpointError as error:
            if not run.errors.is_known(error):
                failure = failure or error
        except BaseException:  # Ctrl-C: the writer does the rest, and another Checkpointer may open the run
            run.supervisor.leave(TURN_S)
            run.stager.stop(TURN_S)
            raise
        run.stager.stop(max(1.0, end - time.monotonic()))
        if self._agreed or run.world.rank > 0:  # rank 0 would wait for those that did not come
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
                    with contextlib.suppress(CheckpointError):  # a copy under way is finished
                        run.stager.do(lambda: None, run.settings.busy_timeout_s)
                    why = self._saver.stage_last(time.monotonic() + timeout_s, live=False)
                finally:  # also after another Ctrl-C
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
        """Release memory and the writer. `leave`: the writer keeps the memory, as if this process had died."""
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
        """Have the newest step that all ranks can have in every tier by `end`. `clean`: see `close`.

        Raise DeadlineError or PeerError if other ranks do not close: they have died, or go on training.
        """
        self._agreed = False
        why = self._saver.stage_last(end, live=clean) if self._run.tiers or not clean else ""
        if self._run.world.size > 1:
            self._departures.leave("closed")
            self._agree_last(end)
            try:
                self._departures.check(all_left=True)
            except CheckpointError as error:
                log.info("posts of ranks that left cannot be read: %s", error)
        self._agreed = True
        if self._run.errors.fenced is None and (self._run.tiers or why):
            self._write_last(end, why)
        self._saver.wait(max(0.0, end - time.monotonic()))
        self._saver.note_owed()
        if why == NO_TIME:
            raise DeadlineError(f"step {self._run.step} was the last one: {why}, and it is lost")
        if self._run.tiers and self._run.errors.fenced is None:
            self._check_any_saved(why)

    def _keeps_memory(self, clean: bool) -> bool:
        """Return True if the writer must keep the memory and go on writing, as after a death.

        That is the case if memory of an earlier start was neither restored nor replaced, if no tier took the last step,
        if other ranks did not close, or if the launcher restarts this process.
        """
        run, saver = self._run, self._saver
        # A state that was saved by another number of ranks is not a snapshot of these ranks.
        untouched = saver.newest is None and (not run.restored or saver.pinned is not None)
        only_copy = self._is_only_in_memory() if self._run.tiers else not clean
        if (untouched and self._run.supervisor.inherits) or only_copy or not self._agreed:
            return True
        return self._has_failed and self._run.errors.fenced is None and _starts_again()

    def _agree_last(self, end: float) -> None:
        """Agree on the newest step that all ranks have in memory, None if they have none in common."""
        saver, world = self._saver, self._run.world
        if saver.last is not None:
            saver.last.copied.wait(max(0.0, end - time.monotonic()))
        timeout_s = max(0.1, min(world.timeout_s, end - time.monotonic()))
        dead = lambda: self._run.dead_ranks  # noqa: E731
        common = world.agree("close", saver.sealed(), _worth_keeping, timeout_s=timeout_s, dead=dead)
        attempt = None if not common else Attempt.parse(common[0])
        saver.finite = saver.in_memory(Attempt.parse(common[1])) if len(common) > 1 else None
        if attempt is not None and saver.newest is not None and saver.newest.attempt == attempt:
            return
        common_step = None if attempt is None else saver.in_memory(attempt)
        saver.last, saver.newest = None, common_step

    def _write_last(self, end: float, why: str) -> None:
        """Write the newest step in memory to all tiers that miss it, nearest first. `why`: the last step is lost."""
        saver, stepped = self._saver, self._run.stepped
        newest = saver.newest
        if (last := saver.last) is not None:
            last.copied.wait(max(0.0, end - time.monotonic()))
            # Otherwise the one before it is the newest, or one that was copied on request.
            there = last.place is not None or last.stored
            if there and (newest is None or newest.attempt < last.attempt):
                newest = last
        if self._run.world.size == 1 and len(worth := _worth_keeping([saver.sealed()])) > 1:
            saver.finite = saver.in_memory(Attempt.parse(worth[1]))
        self._warn_if_lost(newest, why)
        if newest is None or not (stepped or not newest.writes):
            return
        # A restored step is in its tiers already. Only the nearest may miss it, if it was restored from memory.
        tiers = self._run.settings.everywhere
        for some in (tiers[:1], tiers[1:] if stepped else []):
            for one in (newest, saver.finite if stepped else None):
                if one is not None:
                    self._saver.write_missing(one, some)
            self._saver.wait(max(0.0, end - time.monotonic()))

    def _warn_if_lost(self, newest: Snapshot | None, why: str) -> None:
        """Log one warning if the step that is kept is not the last one."""
        restored, last = self._run.supervisor.owner.restored, self._run.step
        kept = newest.attempt.step if newest else restored.step if restored is not None else None
        if self._saver.committed is not None:
            kept = max(kept if kept is not None else -1, self._saver.committed)
        speaks = bool(why) or self._run.world.rank == 0
        if not self._run.stepped or last is None or kept == last or not speaks:
            return
        what = "no step is" if kept is None else f"step {kept} is"
        again = f"; a restart does {last - kept} steps again" if kept is not None else ""
        log.warning("step %d was the last one, and %s kept: %s%s", last, what, why or self._why_not_common(last), again)

    def _why_not_common(self, step: int) -> str:
        return "; ".join(self._departures.behind(step)[:MOST_NAMED]) or "not all ranks have a newer one"

    def _check_any_saved(self, why: str) -> None:
        """Have close() raise SaveError if training has made steps and none was ever saved, in this start or before.

        If the newest step is in memory, or with on_error="warn", only log that no tier has one.
        """
        saver, last = self._saver, self._saver.last
        if not self._run.stepped or self._saver.committed is not None:
            return
        in_memory = saver.newest is not None or (last is not None and last.place is not None)
        if in_memory or self._run.settings.on_error == "warn":
            if self._run.world.rank == 0:
                log.error("step %s was the last one, and no step of this start is in any tier", self._run.step)
        elif self._run.supervisor.owner.restored is None:
            what = f"no step of this run was saved, and step {self._run.step} was the last one"
            self._run.errors.note(SaveError(f"{what}: {why or self._why_not_common(self._run.step or 0)}"))

    def _is_only_in_memory(self) -> bool:
        """Return True if no tier has the newest step, although it was to be written."""
        newest = self._saver.newest
        if newest is None or self._run.errors.fenced is not None or self._run.supervisor.failure is not None:
            return False
        return all(state is WriteState.FAILED for state in newest.writes.values())


def _add(error: BaseException, failure: CheckpointError) -> None:
    """Report that closing failed while the user's own exception ends the script."""
    error.add_note(f"closing the Checkpointer failed too: {failure}")
    if not isinstance(error, Exception):  # notes of these are not always printed
        log.error("closing the Checkpointer failed: %s", failure)


def _worth_keeping(posts: list[Any]) -> list[str]:
    """Return the newest attempt that all ranks hold, and the newest finite one if that is not finite. Pure."""
    common = set.intersection(*({attempt for attempt, _ in post} for post in posts))
    sound = common - {attempt for post in posts for attempt, fine in post if not fine}
    newest = [max(some, key=Attempt.parse) for some in (common, sound) if some]
    return list(dict.fromkeys(newest))


def _starts_again() -> bool:
    """Return True if torchrun restarts this process when it fails."""
    done, most = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done.isdecimal() and most.isdecimal() and int(done) < int(most)


@contextlib.contextmanager
def _ctrl_c_later(patience_s: float) -> Iterator[None]:
    """Delay Ctrl-C in the main thread until the block has ended. A second one after `patience_s` interrupts it."""
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
    """Calls `at_end` when the interpreter ends, and `after_fork` in a child, without keeping their object alive."""

    def __init__(self, at_end: Callable[[], None], after_fork: Callable[[], None]) -> None:
        self._at_end = _weakly(at_end)
        os.register_at_fork(after_in_child=_weakly(after_fork))
        atexit.register(self._at_end)
        self._at_child_end = _at_child_end(self._at_end)

    def cancel(self) -> None:
        """Forget `at_end`."""
        atexit.unregister(self._at_end)
        if self._at_child_end is not None:
            self._at_child_end.cancel()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls the method if its object still lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call


def _at_child_end(call: Callable[[], None]) -> Any:
    """Have `call` called at the end of a child of `multiprocessing`, which may end by `os._exit`. None in others."""
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        return None

    def end() -> None:
        threading._shutdown()  # type: ignore[attr-defined]  # other processes wait for their threads first, a child would not
        call()

    return util.Finalize(None, end, exitpriority=100)
