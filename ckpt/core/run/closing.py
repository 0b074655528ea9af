"""The end of a run: the last step goes to every tier, then memory and the writer are let go of."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from ckpt.core.format.manifest import Attempt
from ckpt.core.ipc.heartbeat import LEAVING
from ckpt.core.run.departures import Departures
from ckpt.core.run.progress import TURN_S, Progress, Staged, StagedStep
from ckpt.core.run.saves import TierWrites
from ckpt.core.run.session import Session
from ckpt.core.run.step_keeper import NO_TIME, StepKeeper
from ckpt.errors import CheckpointError, DeadlineError, SaveError
from ckpt.events import log
from ckpt.subscribers import flush, publish

STOP_S = 30.0  # for an incident that is being dealt with
MOST_NAMED = 8  # ranks in a message
INSIST_S = 10.0  # for the last step to get into memory; then one more Ctrl-C ends that, too


class Guard(Protocol):
    """The part of the guard that closing uses. `saw_exception`: an exception has ended the training."""

    @property
    def saw_exception(self) -> bool: ...

    def stop(self, timeout_s: float) -> None: ...


class Closing:
    """Of one Checkpointer. `failed`: an exception has ended the training."""

    def __init__(
        self,
        session: Session,
        progress: Progress,
        staged: Staged,
        writes: TierWrites,
        keeper: StepKeeper,
        guard: Guard,
        departures: Departures,
    ) -> None:
        self._session, self._progress, self._staged = session, progress, staged
        self._writes, self._keeper, self._guard = writes, keeper, guard
        self._departures = departures
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
            raise under_way from None  # it ends the script, also where we are called by `finally`

    def close_after(self, error: BaseException) -> None:
        """An exception has left the `with` block."""
        self.failed = isinstance(error, Exception) or (isinstance(error, SystemExit) and bool(error.code))
        clean = isinstance(error, SystemExit) and not error.code
        # The other ranks may be in a collective, and never come to close. sys.exit(0) ends a script like the end of the
        # block; a subclass is raised elsewhere, for example by Lightning at SIGTERM.
        if self._session.world.size > 1 and not (clean and type(error) is SystemExit):
            self.abandon()
            return
        try:
            self.close(clean=clean)
        except CheckpointError as failure:
            if clean:  # else the script would exit with code 0
                raise
            _add(error, failure)

    def close_at_exit(self) -> None:
        """The interpreter ends, and nobody has closed us."""
        if self._session.world.size > 1 and self._guard.saw_exception:  # the others may never come to close
            self.abandon()
            return
        try:
            self.close(clean=False)
        except CheckpointError as failure:  # the exit code cannot be changed any more
            log.error("closing the Checkpointer at the end of the script failed: %s", failure)
        except BaseException:  # Ctrl-C: nobody will call close() again, so the last step goes to memory at least
            self.abandon()
            raise

    def close(self, timeout_s: float | None = None, *, clean: bool) -> None:
        """`clean`: the training has come to its end, as far as can be known."""
        progress = self._progress
        if progress.closed or progress.forked:
            return
        timeout_s = self._session.settings.close_timeout_s if timeout_s is None else timeout_s
        if not progress.turn.acquire(timeout=timeout_s):
            raise DeadlineError("another thread has been in step(), save() or restore() all the time")
        try:
            if not progress.closed:
                self._close(time.monotonic() + timeout_s, clean)
        finally:
            progress.turn.release()

    def _close(self, end: float, clean: bool) -> None:
        session, failure = self._session, None
        session.heartbeat.touch(LEAVING)
        self._staged.forgo_begun()
        try:
            self._save_last(end, clean)
        except CheckpointError as error:
            failure = error
        if self._progress.closed:  # by a signal handler, which came into this
            return
        try:
            leave = self._keeps_memory(clean)
            self._end(max(1.0, end - time.monotonic()))
            self._let_go(leave, end)
        except CheckpointError as error:
            if not session.errors.is_known(error):
                failure = failure or error
        except BaseException:  # Ctrl-C: the writer does the rest, and another Checkpointer may open the run
            session.supervisor.leave(TURN_S)
            session.stager.stop(TURN_S)
            raise
        session.stager.stop(max(1.0, end - time.monotonic()))
        if self._agreed or session.world.rank > 0:  # rank 0 would wait for those that did not come
            session.world.farewell()
        self._staged.forget()
        self._say_closed()
        if failure is not None:
            raise failure
        session.errors.raise_pending()

    def abandon(self) -> None:
        """Leave everything to the writer, as if this process had died, but for the last step, which memory gets."""
        session, progress, timeout_s = self._session, self._progress, self._session.settings.close_timeout_s
        if progress.closed or progress.forked:
            return
        in_turn, why = False, "it was interrupted"
        try:
            with _ctrl_c_later(INSIST_S):
                try:
                    in_turn = progress.turn.acquire(timeout=timeout_s)
                    with contextlib.suppress(CheckpointError):  # a copy under way is finished
                        session.stager.do(lambda: None, session.settings.busy_timeout_s)
                    why = self._keeper.stage_last(time.monotonic() + timeout_s, live=False)
                finally:  # whatever ends it
                    if why:
                        self._say_lost(self._staged.newest, why)
            session.world.leave(f"left without close() after step {progress.step}")
            self._departures.leave("left without close()")
            self._guard.stop(STOP_S)
            session.supervisor.leave(timeout_s)
            self._end()
            session.stager.stop()
            self._say_closed()
        finally:
            if in_turn:
                progress.turn.release()

    def _let_go(self, leave: bool, end: float) -> None:
        """Of memory, and of the writer. `leave`: as if this process had died."""
        session = self._session
        if leave:
            session.supervisor.leave(max(1.0, end - time.monotonic()))
            return
        failed = self._has_failed or session.errors.fenced is not None
        session.supervisor.close(end - time.monotonic(), failed=failed)

    @property
    def _has_failed(self) -> bool:
        return self.failed or self._guard.saw_exception

    def _end(self, timeout_s: float = STOP_S) -> None:
        self._progress.closed = True
        self._session.ends.close()
        self._guard.stop(timeout_s)

    def _say_closed(self) -> None:
        publish("closed", self._progress.step)
        flush()

    def _save_last(self, end: float, clean: bool) -> None:
        """Have the newest step that all ranks can have in every tier by then. `clean`: see `Checkpointer.close`.

        DeadlineError or PeerError if the others do not come: they have died, or go on training.
        """
        self._agreed = False
        why = self._keeper.stage_last(end, live=clean) if self._session.tiers or not clean else ""
        if self._session.world.size > 1:
            self._departures.leave("closed")
            self._agree_last(end)
            try:
                self._departures.look(all_left=True)
            except CheckpointError as error:
                log.info("posts of ranks that left cannot be read: %s", error)
        self._agreed = True
        if self._session.errors.fenced is None and (self._session.tiers or why):
            self._write_last(end, why)
        self._writes.wait(max(0.0, end - time.monotonic()))
        self._writes.note_owed()
        if why == NO_TIME:
            raise DeadlineError(f"step {self._progress.step} was the last one: {why}, and it is lost")
        if self._session.tiers and self._session.errors.fenced is None:
            self._check_any_saved(why)

    def _keeps_memory(self, clean: bool) -> bool:
        """Whether the writer is to keep it, and go on trying, as after a death: an earlier run's memory that was
        neither restored nor replaced, a disk that would not take the last step, or somebody who comes for it soon."""
        staged, progress = self._staged, self._progress
        # What was restored by another number of ranks than saved it cannot be saved by these.
        untouched = staged.newest is None and (not progress.restored or staged.restored is not None)
        only_copy = self._is_only_in_memory() if self._session.tiers else not clean
        if (untouched and self._session.supervisor.inherits) or only_copy or not self._agreed:
            return True
        return self._has_failed and self._session.errors.fenced is None and _starts_again()

    def _agree_last(self, end: float) -> None:
        """The newest step that all ranks have in memory becomes the newest here; none if they have none in common."""
        staged, world = self._staged, self._session.world
        if staged.last is not None:
            staged.last[1].copied.wait(max(0.0, end - time.monotonic()))
        timeout_s = max(0.1, min(world.timeout_s, end - time.monotonic()))
        dead = lambda: self._session.dead_ranks  # noqa: E731
        common = world.agree("close", staged.sealed(), _worth_keeping, timeout_s=timeout_s, dead=dead)
        attempt = None if not common else Attempt.parse(common[0])
        staged.sound = staged.held(Attempt.parse(common[1])) if len(common) > 1 else None
        if attempt is not None and staged.newest is not None and staged.newest.attempt == attempt:
            return
        staged.last = None
        staged.newest = None if attempt is None else staged.held(attempt)

    def _write_last(self, end: float, why: str) -> None:
        """The newest step that is in memory, to all tiers that it is not on its way to: the nearest first, the others
        when nothing is before them. `why`: the last step is not in memory."""
        staged, stepped = self._staged, self._progress.stepped
        newest = staged.newest
        if staged.last is not None:
            save, job = staged.last
            job.copied.wait(max(0.0, end - time.monotonic()))
            # Else the one before it is the newest, or one that was copied out of turn.
            if job.place is not None and (newest is None or newest.attempt < job.attempt):
                newest = StagedStep(save, job.attempt, job.place)
        if self._session.world.size == 1 and len(worth := _worth_keeping([staged.sealed()])) > 1:
            staged.sound = staged.held(Attempt.parse(worth[1]))
        self._say_lost(newest, why)
        if newest is None or not (stepped or not newest.save.tiers):
            return
        # What was restored is in its tiers already, but for the nearest, where memory may have been ahead of it.
        tiers = self._session.settings.everywhere
        for some in (tiers[:1], tiers[1:] if stepped else []):
            for one in (newest, staged.sound if stepped else None):
                if one is not None:
                    self._writes.write_missing(one, some)
            self._writes.wait(max(0.0, end - time.monotonic()))

    def _say_lost(self, newest: StagedStep | None, why: str) -> None:
        """Once, at the end, if the step that stays is not the last one."""
        restored, last = self._session.supervisor.owner.restored, self._progress.step
        kept = newest.save.step if newest else restored.step if restored is not None else None
        if self._writes.committed is not None:
            kept = max(kept if kept is not None else -1, self._writes.committed)
        speaks = bool(why) or self._session.world.rank == 0
        if not self._progress.stepped or last is None or kept == last or not speaks:
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
        staged, last = self._staged, self._staged.last
        if not self._progress.stepped or self._writes.committed is not None:
            return
        in_memory = staged.newest is not None or (last is not None and last[1].place is not None)
        if in_memory or self._session.settings.on_error == "warn":
            if self._session.world.rank == 0:
                log.error("step %s was the last one, and no step of this start is in any tier", self._progress.step)
        elif self._session.supervisor.owner.restored is None:
            what = f"no step of this run was saved, and step {self._progress.step} was the last one"
            self._session.errors.note(SaveError(f"{what}: {why or self._why_not_common(self._progress.step or 0)}"))

    def _is_only_in_memory(self) -> bool:
        """Whether the newest step should be on disk by now, and is not."""
        newest = self._staged.newest
        if newest is None or self._session.errors.fenced is not None or self._session.supervisor.failure is not None:
            return False
        return all(newest.save._failed(url) for url in newest.save.tiers)


def _add(error: BaseException, failure: CheckpointError) -> None:
    """Report that closing failed while the user's own exception ends the script."""
    error.add_note(f"closing the Checkpointer failed too: {failure}")
    if not isinstance(error, Exception):  # notes of these are not always printed
        log.error("closing the Checkpointer failed: %s", failure)


def _worth_keeping(posts: list[Any]) -> list[str]:
    """Of what each rank holds: the newest that all have, and if it is broken the newest that is not. Pure."""
    common = set.intersection(*({attempt for attempt, _ in post} for post in posts))
    sound = common - {attempt for post in posts for attempt, fine in post if not fine}
    newest = [max(some, key=Attempt.parse) for some in (common, sound) if some]
    return list(dict.fromkeys(newest))


def _starts_again() -> bool:
    """Whether torchrun starts this process once more if it fails."""
    done, most = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done.isdecimal() and most.isdecimal() and int(done) < int(most)


@contextlib.contextmanager
def _ctrl_c_later(patience_s: float) -> Iterator[None]:
    """In the main thread Ctrl-C comes after this, or after so many seconds to whoever insists."""
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
