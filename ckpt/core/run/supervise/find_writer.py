"""Finding the writer that survived the last incarnation, or starting one; another when the one that we had has died."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from ckpt.core.checkpoint.lease import check_unused, fence
from ckpt.core.checkpoint.read import run
from ckpt.core.ipc import channel, requests
from ckpt.core.run.supervise.current_writer import CurrentWriter
from ckpt.core.run.supervise.opening import OPEN_S, RunOpener
from ckpt.core.run.supervise.writer_client import WriterClient
from ckpt.errors import (
    CheckpointError,
    DeadlineError,
    FencedError,
    InUseError,
    NameTakenError,
    RunGoneError,
    StoreError,
    WriterError,
)
from ckpt.events import log
from ckpt.tiers import Tier

MEET_S = 60.0  # for the name of a run to be ours, or that of a writer that we can ask
DYING_S = 3.0  # for a trainer that was killed to be seen as dead
FREED_S = 15.0  # for a writer whose job is fenced to release its memory
HELLO_S = 10.0  # for a writer that was left to answer; it may be stopped
PATIENT_S = 60.0  # if it is not: at low priority it may get little of a busy machine, and it has the newest steps
RESPAWN_LIMIT = 3  # writers that die within RESPAWN_WINDOW_S, before we stop trying
RESPAWN_WINDOW_S = 60.0
TOLD = 4096  # bytes of a writer's own words that are looked through

Greeted = tuple[requests.GreetingReply, list[int]]
Found = tuple[WriterClient, Greeted | None]
"""And what it says about what it holds, with the descriptors; None of one that was started just now."""


class _Leaving(WriterError):
    """The writer that was found does not take another trainer any more."""


class _Ended(_Leaving):
    """It was killed, since it did not answer."""


def in_use(tiers: list[Tier], pid: int, age_s: float | None, what: str = "") -> InUseError:
    """By whom on this machine, and since when. `pid`: 0 if it cannot be seen; `what`: of the run."""
    who = f"process {pid}" if pid else "a process that cannot be seen from here (another container)"
    since = "" if age_s is None else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(time.time() - age_s))
    run = tiers[0].url if tiers else "this run, which is in memory only"
    return InUseError(f"{who} on this machine ({socket.gethostname()}) trains {what}{run}{since}")


class Intruder:
    """A start that finds a trainer of the run alive, on this machine. With `takeover` it fences that job in the log and
    waits until its writers have released their memory; otherwise it is refused."""

    def __init__(self, tiers: list[Tier], takeover: bool) -> None:
        self._tiers, self._takeover, self._fenced = tiers, takeover, False

    def make_way(self, found: WriterClient, hello: requests.LendReply, what: str = "") -> None:
        """Return when the writer has let go, or is about to. `what`: of the run, for messages.

        Raises InUseError if the trainer lives on, and what keeps us from using the tiers.
        """
        refusal = in_use(self._tiers, hello.trainer, time.time() - hello.since, what)
        if not self._takeover:
            raise refusal
        if not self._tiers:
            raise InUseError(f"{refusal}, and takeover=True needs a folder or URL, through which that job is fenced")
        if not self._fenced:
            run(fence([tier.spec() for tier in self._tiers]))
            self._fenced = True
            log.warning("%s: that job is fenced, and can save no more", refusal)
        end = time.monotonic() + FREED_S
        while time.monotonic() < end:
            try:
                if not found.ask(requests.Lend(fenced=True), max(0.1, end - time.monotonic())).alive:
                    return
            except WriterError:
                return
            except DeadlineError:
                break
            time.sleep(0.1)
        raise InUseError(
            f"{found.described()}, has not released it within {FREED_S:g} s, although its job is fenced. Start again "
            f"when it has, or end it: kill -9 {found.found_pid}"
        )


class WriterFinder:
    """Finds or starts the writer of one rank. `meanwhile` is what we have to do ourselves while a writer starts; if it
    fails, no writer has us as its trainer. `on_spawned` is called with each writer that was started."""

    def __init__(
        self,
        writer: CurrentWriter,
        run: RunOpener,
        key: str,
        tiers: list[Tier],
        intruder: Intruder,
        meanwhile: Callable[[], object],
        on_spawned: Callable[[WriterClient], None],
    ) -> None:
        self._writer, self._run, self._meanwhile, self._on_spawned = writer, run, meanwhile, on_spawned
        self._key, self._tiers, self._intruder = key, tiers, intruder
        self._deaths: list[float] = []
        self._respawns = 0
        self._said = 0  # bytes that had been said when the newest of our writers began

    def find_or_spawn(self) -> Found:
        """Return the writer that has this run's name on this machine, or a new one, which takes the name."""
        end = time.monotonic() + MEET_S
        while True:
            client = WriterClient.find(self._key)
            try:
                if client is not None:
                    return self._join(client)
                self._say_unreachable()
                return self.spawn(), None
            except _Ended:
                end = time.monotonic() + MEET_S
            except (NameTakenError, _Leaving):  # another start was quicker, or it is about to leave
                pass
            if time.monotonic() > end:
                raise WriterError(f"the last writer of this run has not let go of its name within {MEET_S:g} s")
            time.sleep(0.02)

    def spawn(self, *, next_one: bool = False) -> WriterClient:
        """Start a writer. NameTakenError if another one has the name of this run. `next_one`: see
        `WriterClient.spawn`."""
        client = WriterClient.spawn(self._key, next_one=next_one)
        try:
            self._meanwhile()
            client.greet(OPEN_S, OPEN_S)
        except BaseException:
            client.send(requests.Close())
            client.close()
            raise
        self._on_spawned(client)
        return client

    def _say_unreachable(self) -> None:
        if others := channel.writers_of(self._key):
            log.warning(
                "process %d holds memory of this run on this machine, and cannot be reached from here (another "
                "container, or another %s): it is not restored from",
                others[0],
                channel.RUNTIME,
            )

    def _join(self, found: WriterClient) -> Found:
        """Become the trainer of a writer that holds memory. _Leaving if it had to go: the name is free, or will be."""
        try:
            self._await_end_of_trainer(found)
            self._meanwhile()
            hello, fds = found.greet(HELLO_S, PATIENT_S)
            if hello.alive:  # another start was quicker
                for fd in fds:
                    os.close(fd)
                raise in_use(self._tiers, hello.trainer, time.time() - hello.since)
        except _Ended:
            raise
        except WriterError as error:
            found.close()
            raise _Leaving(str(error)) from None
        except BaseException:
            found.close()
            raise
        if self._tiers and self._tiers[0].url in hello.lost:  # deleted since we looked, or the writer sees another one
            for fd in fds:
                os.close(fd)
            found.send(requests.Leave())
            found.close()
            raise RunGoneError.of(self._tiers[0].url)
        return found, (hello, fds)

    def _await_end_of_trainer(self, found: WriterClient) -> None:
        """A trainer that was killed just now may take a moment to be seen as dead. One that lives has to make way."""
        end = time.monotonic() + DYING_S
        while (reply := self._look(found)).alive:
            if time.monotonic() > end:
                self._intruder.make_way(found, reply)
            time.sleep(0.1)

    def _look(self, found: WriterClient) -> requests.LendReply:
        """Ask a writer whose it is. One that does not answer is killed if the tiers prove that nobody trains."""
        try:
            return found.ask_patiently(requests.Lend(look=True), HELLO_S, PATIENT_S)[0]
        except DeadlineError as error:
            if not self._tiers:
                raise InUseError(f"{found.described()}, does not answer: end it to start without its memory") from None
            run(check_unused([tier.spec() for tier in self._tiers]))
            log.warning("%s, does not answer (%s): it is killed, and its memory is lost", found.described(), error)
            found.end()
            raise _Ended(str(error)) from None

    # -- when the one that we had has died --

    def respawn(self) -> WriterClient:
        """One that has opened the run, and knows nothing else yet. WriterError if one after the other dies, FencedError
        if the run is another's by now."""
        while (fresh := self._start_one()) is None:
            log.warning("the new writer cannot go on either")
        return fresh

    def _start_one(self) -> WriterClient | None:
        """None if it died of that, or the store did not answer."""
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if now - t < RESPAWN_WINDOW_S] + [now]
        path = channel.log_path(self._key)
        if len(self._deaths) > RESPAWN_LIMIT:
            words = last_line(path, self._said)
            why = f"; the last words of the last one: {words}" if words else ""
            raise WriterError(f"the writer died {len(self._deaths)} times within {RESPAWN_WINDOW_S:g} s{why}")
        self._respawns += 1
        self._said = os.path.getsize(path) if os.path.exists(path) else 0
        try:
            fresh = self._spawn_in_turn()
        except WriterError as error:
            words = last_line(path, self._said)
            log.warning("%s%s", error, f": {words}" if words else "")
            return None
        try:
            self._run.open_again(fresh, writers=self._respawns)
        except (WriterError, StoreError, DeadlineError) as error:
            log.warning("%s", error)
            fresh.send(requests.Close())
            fresh.close()
            return None
        return fresh

    def _spawn_in_turn(self) -> WriterClient:
        """Once whoever has the name goes: one of ours that is slow to end, or of a start that came to nothing.
        FencedError if the run is another's by now: who has lost it must not stand in the way."""
        end = time.monotonic() + MEET_S
        while True:
            if self._writer.lost is not None:
                raise self._writer.lost
            if channel.holder(self._key) is None:
                with contextlib.suppress(NameTakenError):
                    return self.spawn(next_one=True)
            self._check_mine()
            if self._writer.closing or time.monotonic() > end:
                raise WriterError("another writer has the name of this run")
            time.sleep(0.1)

    def _check_mine(self) -> None:
        """FencedError if the writer that has the name serves an owner that is none of ours."""
        found = None
        with contextlib.suppress(CheckpointError):
            found = channel.ask_once(self._key, requests.Lend(look=True), HELLO_S)
        if found is not None and found.acquires and not self._run.is_ours(found.acquires[-1]):
            raise FencedError(f"process {found.trainer} on this machine has opened this run")


def last_line(path: str, since: int) -> str:
    """Of what a writer has said there beyond so many bytes: of one that could not start, the reason. "" if nothing."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(since, os.path.getsize(path) - TOLD))
        lines = file.read(TOLD).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
