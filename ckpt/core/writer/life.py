"""The life of a writer: which trainer it serves, who may inherit its memory, and when it leaves.

`Server` listens under the name of the run on this machine while the writer holds memory. A thread reads each
connection. A task of the event loop handles each request. Tasks begin in the order in which requests arrive.

    state       meaning                                                next state
    SERVING     a trainer lives and may save                           DRAINING, FENCED, LEAVING
    DRAINING    the trainer is gone; all of memory is written to the   LINGERING, SERVING, FENCED, LEAVING
                nearest tier, and its newest step to every other tier
    LINGERING   that is done; memory is kept for `linger_s`, or until  SERVING, FENCED, LEAVING
                memory is short
    FENCED      another job owns the run; memory is released           LEAVING
    LEAVING     the socket name is free; writes that began are ended   -

Only the kernel proves that a trainer is dead (its robust mutex, its pidfd), and only the run log proves that a run has
a new owner. No message proves either. A trainer that leaves or closes decides this for itself only.

    trainer dies        mutex or pidfd -> `died` -> DRAINING; `_outlive` makes memory durable, lingers, leaves
    trainer leaves      `Leave(keep=True)` -> like a death, though its process may live
    trainer closes      `Leave` -> LEAVING; first DRAINING if a save is unfinished, so that a restart finds it
    a trainer comes     `Lend(inherit=True)` -> refused while ours lives; else it inherits memory, history, reports
    another job comes   it appends ACQUIRE to the log; `_check_owner_regularly`, or its `Lend(fenced=True)`, makes
                        this writer read the log: `_fence` notifies the trainer, releases memory, frees the name

Faults:

- Two trainers come at the same time: one event loop serves them in turn. The first inherits, and the second is refused
  because the first one lives. If both start a writer, the kernel gives the socket name to only one of the writers.
- A trainer is stopped (SIGSTOP) and resumes later: it lives, so no trainer inherits from it. If another job has fenced
it in the meantime, its next call raises FencedError, and its copies into released slots are never read.
- This process is stopped: it keeps its name and its memory. A start resumes it, or fails with an error that names this
  process and the size of its memory. It is killed only if a takeover or the ledger proves that no trainer needs it.
- A process id is reused: processes are compared by id and start time, and a pidfd is used to wait for them.
- A process of another user connects: the socket accepts only connections of this user.
- A trainer dies while it opens the run: it is ours since its `Lend`, so this death is handled like any other.
- A restart has fewer local ranks: its ranks divide the writers without a trainer among themselves. They borrow the
  memory (`Lend`), and pass it to their own writers (`AttachArena`) before the new job becomes the owner. The old
  writers detect the new owner in the log, and leave. With more local ranks, some find no writer, and start one.
- Another writer dies, and its trainer starts this one: the memory comes by `AttachArena`. If the trainer dies before
  that, this writer has no memory to keep, and leaves.
- The new job may have mapped the memory of a dead trainer, so `_fence` only closes this memory. No other process uses
  the memory of a living trainer, so `_fence` also returns its pages to the system.
- The trainer's devices may copy after its death was detected, until the process has ended. The new trainer waits for
  this end before it overwrites a slot; `LendReply.writing_on` lists the processes.
- A write is under way when memory is released: `PresentTrainer.check_not_fenced` fails it after its last read and
  before its manifest is stored, so that no other job can commit bytes of a released slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from ckpt import events, failpoints
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc import channel as link
from ckpt.core.ipc import messages
from ckpt.core.ipc.arena import Arena, Got, room
from ckpt.core.ipc.channel import Channel
from ckpt.core.ipc.heartbeat import Process
from ckpt.core.ipc.messages import Incoming, Request, failure
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.held_run import (
    LOST_S,
    Answer,
    Background,
    Caller,
    Dispatch,
    HeldRun,
    PresentTrainer,
    check_version,
    handles,
)
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.opening import TierOpener
from ckpt.core.writer.saver import WriterSaver
from ckpt.errors import CheckpointError, FencedError, InUseError, ProtocolError, WriterError
from ckpt.units import duration

AGAIN_S = 1.0  # pause after a connection could not be accepted because descriptors ran out


class Server:
    """Serves the connections of the writer. `path`: the path of its socket, "" if the socket has no path."""

    def __init__(self, path: str, listener: socket.socket, trainer: PresentTrainer, background: Background) -> None:
        self._path, self._trainer, self._background = path, trainer, background
        self._listener: socket.socket | None = listener
        self._dispatch: Dispatch | None = None
        self.left = asyncio.Event()  # once set, no trainer is accepted
        self.finished = asyncio.Event()

    async def run(self, dispatch: Dispatch) -> None:
        """Serve until the name is released. Replies and background work continue until `finished` is set."""
        assert self._listener is not None and self._trainer.channel is not None
        self._dispatch = dispatch
        self._listener.setblocking(False)
        self._listen()
        self._background.thread(self._read, self._trainer.channel)
        await self.left.wait()

    def leave(self) -> None:
        """Release the name, so that the next trainer starts its own writer."""
        self.left.set()
        listener, self._listener = self._listener, None
        if listener is None:
            return
        call_myself(link.LEAVING)
        self._background.loop.remove_reader(listener)
        listener.close()
        with contextlib.suppress(OSError):
            if self._path and os.path.getsize(self._path) == 0:
                os.unlink(self._path)

    def check_stays(self) -> None:
        """Raise WriterError for a trainer that connects while this writer leaves. The trainer then waits for the name
        and starts its own writer."""
        if self.left.is_set():
            raise WriterError("this writer is about to leave")

    # -- connections --

    def _listen(self) -> None:
        if self._listener is not None:
            self._background.loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # for example, out of descriptors; clients wait until the retry
            self._background.loop.remove_reader(listener)
            self._background.loop.call_later(AGAIN_S, self._listen)
            return
        if link.same_user(sock):
            sock.setblocking(True)
            self._background.thread(self._read, Channel(sock))
        else:
            sock.close()

    def _read(self, channel: Channel) -> None:
        assert self._dispatch is not None
        while (incoming := channel.receive()) is not None:
            try:
                request = self._dispatch.request(incoming)
            except ProtocolError as error:
                incoming.drop()
                events.log.warning("refused: %s", error)
                _reply(channel, incoming.id, failure(error))
                continue
            self._background.post(self._on_request, self._dispatch, channel, incoming, request)
        self._background.post(self._on_lost, channel)

    def _on_lost(self, channel: Channel) -> None:
        channel.close()
        self._trainer.hung_up(channel)

    def _on_request(self, dispatch: Dispatch, channel: Channel, incoming: Incoming, request: Request[object]) -> None:
        self._background.spawn(self._answer(dispatch, channel, incoming, request))

    async def _answer(self, dispatch: Dispatch, channel: Channel, incoming: Incoming, request: Request[object]) -> None:
        value: object
        try:
            self._trainer.check_not_fenced(channel)
            value = await dispatch.answer(request, Caller(channel, incoming.fds))
        except Exception as error:
            if self.left.is_set() and isinstance(error, RuntimeError):  # the worker threads have ended already
                error = WriterError("this writer is about to leave")
            elif not isinstance(error, CheckpointError):
                events.log.exception("the writer failed to handle the request %r", incoming.op)
            value = failure(error)
        _reply(channel, incoming.id, *(value if isinstance(value, Answer) else (value,)))


def _reply(channel: Channel, number: int | None, value: object, fds: tuple[int, ...] = ()) -> None:
    """Reply to a request that has a number. If this reply cannot be sent, send the error instead."""
    if number is not None:
        with contextlib.suppress(OSError):
            try:
                channel.reply(number, value, fds)
            except (ProtocolError, TypeError, ValueError) as error:
                channel.reply(number, failure(error))


def call_myself(name: str) -> None:
    """Set the name of this process, as shown by `ps` and read by `link.writers_of`."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def set_title(run: str, rank: str, key: str, path: str) -> None:
    """Replace the command line that `ps` shows by `ckpt-writer RUN rank N KEY LOG`. The kernel reads it from the memory
    in which the arguments of this process began, so RUN is cut if the title is longer than the arguments were."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    name, *rest = (os.fsencode(word) + b"\0" for word in (link.AT_WORK, "rank", rank, key, path))
    room = end - start - len(b"".join([name, *rest])) - 1
    if room >= 0:
        title = b"".join([name, os.fsencode(run)[:room] + b"\0", *rest])
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


# -- the life of a writer --


OWNER_S = 10.0  # pause between two checks of the owner of the run
RETRY_S = 5.0  # pause between two attempts to make memory durable
RETRY_FOR_S = 3600.0  # time after which the writer stops writing to a tier that fails
SHORT = 0.05  # if a smaller share of memory is available, release snapshots that every tier has
POLL_S = 0.2  # pause between two checks for a new trainer


class State(Enum):
    """The state of a writer; see the table in the module docstring."""

    SERVING = "serving"
    DRAINING = "draining"
    LINGERING = "lingering"
    FENCED = "fenced"
    LEAVING = "leaving"


NEXT = {
    State.SERVING: {State.DRAINING, State.FENCED, State.LEAVING},
    State.DRAINING: {State.LINGERING, State.SERVING, State.FENCED, State.LEAVING},
    State.LINGERING: {State.SERVING, State.FENCED, State.LEAVING},
    State.FENCED: {State.LEAVING},
    State.LEAVING: set[State](),
}


class TrainerWatch(Protocol):
    """The port to an object that watches the trainer: it detects why the trainer died, whether it hangs, and whether
    memory runs out. The core detects the death itself. `ckpt.guard.fault_reports` implements this port, and
    `ckpt.writer_process` passes it to the core.

    A watch handles its own requests. It reads `PresentTrainer`, `HeldRun`, `HeldMemory` and `WriterSaver`. It sets
    `PresentTrainer.crashed`, which is earlier than the end of the process, and `PresentTrainer.announced` if the
    trainer has explained its end, and calls `Bookkeeper.fault`. All methods are called in the event loop.
    """

    def died(self, drained: asyncio.Event) -> None:
        """Report the end of a trainer that has died, left or lost the run, unless the trainer has reported it itself.

        drained: set once memory is durable; never set if the next trainer comes first.
        """

    def hand_over(self) -> list[messages.Json]:
        """Stop watching, because another trainer comes. Return the reports that no trainer has received yet."""

    def stop(self) -> None:
        """Stop watching, because the trainer has closed or has lost the run."""


@dataclass(eq=False)
class Life:
    """Changes the state of the writer. It runs in the event loop, except for the threads that wait for a death."""

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    opener: TierOpener
    saver: WriterSaver
    books: Bookkeeper
    watch: TrainerWatch
    server: Server
    background: Background
    state: State = State.SERVING
    _checking: asyncio.Task[None] | None = None
    _owned_for: int = -1  # number of the adoption whose trainer has become the owner

    def __post_init__(self) -> None:
        self._await_death()

    def _enter(self, state: State) -> None:
        """Move to a state. A move that is not in the table is a bug in this file."""
        if state is not self.state:
            assert state in NEXT[self.state], f"{self.state.value} -> {state.value}"
            self.state = state

    # -- the end of a trainer --

    def _await_death(self) -> None:
        """Wait for the end of the present trainer. The mutex of an arena detects it earlier (`use_arena`)."""
        self.background.thread(self._wait_gone, self.trainer.process)
        self.background.spawn(self._wait_crashed(self.trainer.crashed, self.trainer.adoptions))

    async def _wait_crashed(self, crashed: asyncio.Event, adoptions: int) -> None:
        await crashed.wait()
        self.died(adoptions)

    @handles(messages.UseArena)
    def use_arena(self, request: messages.UseArena) -> None:
        if request.used:
            arena = self.held_memory.arenas[request.arena]
            self.background.thread(self._wait_owner_died, arena, self.trainer.adoptions)
        else:
            self.held_memory.release(request.arena)

    def _wait_owner_died(self, arena: Arena, adoptions: int) -> None:
        """Wait for the mutex of the trainer's staging thread, until it is unlocked or its owner dies."""
        got = arena.mutex.lock()
        arena.mutex.unlock()
        if got is Got.OWNER_DIED:
            self.background.post(self.died, adoptions)

    def _wait_gone(self, process: Process) -> None:
        """Wait for the end of a process, which comes later than the release of its mutex."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(process.pid)
            if Process.of(process.pid) == process:  # else the id belongs to another process now
                select.select([fd], [], [])
            os.close(fd)
        self.background.post(self._on_gone, process)

    def _on_gone(self, process: Process) -> None:
        self.books.gone(process.pid)
        if process != self.trainer.process:
            return
        adoptions = self.trainer.adoptions
        if self.state in (State.DRAINING, State.LINGERING) and not self.trainer.closed:
            # A crash is detected before the process ends, so a snapshot may have been sealed in between.
            self.background.spawn(self._drain_again(adoptions))
        self.died(adoptions)

    async def _drain_again(self, adoptions: int) -> None:
        await asyncio.to_thread(self.held_memory.digest_ring)
        await self.saver.drain(adoptions)

    def died(self, adoptions: int) -> None:
        """Begin to drain memory, because the trainer of this adoption number has died or left."""
        if self.state is State.SERVING and adoptions == self.trainer.adoptions:
            self._enter(State.DRAINING)
            self.trainer.dead = True
            self._ended("died")
            self.background.spawn(self._outlive(adoptions))

    def _ended(self, how: str) -> None:
        """Record that the trainer has "died", "left" or "closed"."""
        self.trainer.end()
        self.books.ended(how)

    async def _outlive(self, adoptions: int) -> None:
        """Make memory durable, keep it for the next trainer for a while, and leave."""
        failpoints.point("drain.started")
        drained = asyncio.Event()
        self.watch.died(drained)
        await asyncio.to_thread(self.held_memory.digest_ring)
        try:
            await self._make_durable(adoptions, drained)
            await self._linger(adoptions)
        except FencedError as error:
            self._fence(error)
        finally:
            if adoptions == self.trainer.adoptions:
                self._leave()
                await self._finish()

    async def _make_durable(
        self, adoptions: int, drained: asyncio.Event, owed: Collection[CheckpointId] | None = None
    ) -> None:
        """Write memory, or only the `owed` snapshots, to the nearest tier, and the newest step to every other tier.
        Retry failed writes until another trainer or another run has come.

        drained: set when the nearest tier has all of these snapshots
        """
        began, missing = time.monotonic(), list(self.run.tiers)
        while adoptions == self.trainer.adoptions:
            for tier in list(missing):
                if await self.saver.make_durable(adoptions, tier, owed):
                    missing.remove(tier)
                if self.run.tiers[0] not in missing:
                    drained.set()
            if not missing or await self.run.replaced():
                break
            await self.run.check_owner()
            seconds = time.monotonic() - began
            if seconds > max(RETRY_FOR_S, self.run.linger_s) or (seconds > self.run.linger_s and _memory_is_short()):
                urls = ", ".join(tier.url for tier in missing)
                events.log.warning("stopped writing memory to %s after %s", urls, duration(seconds))
                return
            await asyncio.sleep(RETRY_S)
        drained.set()

    async def _linger(self, adoptions: int) -> None:
        """Keep memory while a trainer may come for it. Raises FencedError if another job owns the run."""
        if adoptions != self.trainer.adoptions:
            return
        self._enter(State.LINGERING)
        checked, self.run.leaves_at = float("-inf"), time.monotonic() + self.run.linger_s
        while adoptions == self.trainer.adoptions and self.held_memory.something():
            now = time.monotonic()
            if now >= self.run.leaves_at:
                return
            if now > checked + RETRY_S:
                checked = now
                await self.run.check_owner()
                if await self.run.replaced():
                    events.log.warning("another run replaced this one: released its memory")
                    return
                if self.run.tiers and _memory_is_short():
                    events.log.warning("memory is short: released the snapshots, which every tier has")
                    return
            await asyncio.sleep(min(POLL_S, self.run.linger_s))

    # -- a trainer comes --

    async def _inherit(self, caller: Caller) -> Answer:
        """Serve this trainer from now on, unless our present trainer lives. Raises InUseError for a trainer that this
        process cannot see, and WriterError if this writer leaves."""
        trainer, memory = self.trainer, self.held_memory
        self.server.check_stays()
        lost = await self.run.lost()  # before anything changes
        self.server.check_stays()
        process = _process_of(caller.channel)
        lives = process != trainer.process and trainer.process.alive
        adopts = caller.channel is not trainer.channel and (not lives or trainer.dead)
        if trainer.left and lives:
            memory.foreign.update(memory.arenas)  # the previous trainer may copy into them until its process ends
        shown = list(memory.arenas.values())
        reply = self._lent(
            shown,
            process,
            writing_on=[(one.pid, one.started) for one in trainer.writing_on if one != process],
            lost=lost,
            writing=list(self.saver.reads),
            faults=self.watch.hand_over() if adopts else [],
        )
        if adopts:
            self._enter(State.SERVING)
            self.run.leaves_at = None
            trainer.adopted_by(caller.channel, process)
            self._await_death()
        return reply

    @handles(messages.Lend)
    async def lend(self, request: messages.Lend, caller: Caller) -> Answer:
        """Describe this writer's memory to another trainer, and send its arenas, which that trainer may keep."""
        check_version(request)
        if request.inherit:
            return await self._inherit(caller)
        if request.digest:
            await asyncio.to_thread(self.held_memory.digest_ring)
        if request.fenced:
            await self._check_owner(everywhere=True)
            self.server.check_stays()
        shown = [] if request.look or request.fenced else self.held_memory.all()
        sees = bool(request.proof) and self.run.sees(request.proof)
        return self._lent(shown, Process.of(link.peer_pid(caller.channel.sock)), sees=sees)

    def _lent(self, shown: list[Arena], process: Process, **more: Any) -> Answer:
        """Return the reply to `process`, with these arenas. `more`: further fields of the reply."""
        trainer, memory = self.trainer, self.held_memory
        reply = messages.LendReply(
            pid=os.getpid(),
            alive=process != trainer.process and trainer.process.alive and not trainer.dead,
            trainer=trainer.pid,
            since=trainer.since,
            arenas=[arena.id.hex() for arena in shown],
            foreign=list(memory.foreign),
            layouts=memory.layouts_in_use(shown),
            digests=memory.known_digests(),
            acquires=[(a.term, a.nonce, str(a.restored) if a.restored else None) for a in self.run.acquires],
            roots=self.run.roots,
            **more,
        )
        return Answer(reply, tuple(arena.fd for arena in shown))

    # -- another job owns the run --

    @handles(messages.OwnRun)
    async def own(self, request: messages.OwnRun) -> list[messages.PartsHere]:
        if self._checking is None:
            self._checking = self.background.spawn(self._check_owner_regularly())
        found = await self.opener.own(request)
        self._owned_for = self.trainer.adoptions
        return found

    async def _check_owner_regularly(self) -> None:
        while self.state not in (State.FENCED, State.LEAVING):
            await asyncio.sleep(OWNER_S)
            if self.state is State.SERVING:
                await self._check_owner()

    async def _check_owner(self, *, everywhere: bool = False) -> None:
        """Read the log, and release everything if another job owns the run. A rank checks only the tiers for which it
        is responsible, so that a bucket does not get a request from each rank."""
        if self.state is State.SERVING and (self._owned_for != self.trainer.adoptions or self.run.taking.locked()):
            return  # the newest owner in the log may be our own trainer
        try:
            await self.run.check_owner(None if everywhere else self.run.spoken_for())
        except FencedError as error:
            self._fence(error)
        except Exception as error:
            events.log.warning("cannot check who owns the run: %s", error)

    def _fence(self, error: FencedError) -> None:
        """Notify the trainer, release the memory, and free the name, because another job owns the run."""
        if self.state in (State.FENCED, State.LEAVING):
            return
        lives = self.state is State.SERVING
        self._enter(State.FENCED)
        self.trainer.fence(error)
        if lives:
            self.watch.stop()
            self._ended("left")
            self.held_memory.free_all()
        self._leave()
        self.background.spawn(self._finish())

    # -- leaving --

    def _leave(self) -> None:
        self._enter(State.LEAVING)
        self.server.leave()

    async def _finish(self) -> None:
        await self.books.finish()
        await self.saver.finish_begun()
        self.server.finished.set()

    @handles(messages.Leave)
    async def on_leave(self, request: messages.Leave, caller: Caller) -> None:
        """Finish the writes that began, clean up and leave. Until they have ended, a new trainer may inherit the memory
        as after a death. With `keep`, drain and keep the memory as after a death."""
        trainer = self.trainer
        if trainer.channel not in (caller.channel, None):
            return  # another trainer has replaced the sender
        trainer.announced = trainer.left = True
        if request.keep:
            self.books.ended("left")
            self.died(trainer.adoptions)
            return
        adoptions, owed = trainer.adoptions, self.saver.begun()
        trainer.closed = True
        self.watch.stop()
        self._ended("left" if request.failed else "closed")
        if owed:
            if self.state is State.SERVING:
                self._enter(State.DRAINING)
            trainer.dead = True
            await self._see_out(adoptions, owed)
            if adoptions != trainer.adoptions:
                return  # another trainer has inherited the memory
        if self.state is not State.LEAVING:
            self._leave()
        try:
            await self.books.finish()
            try:  # a trainer that lost the run must receive the error before it ends
                await asyncio.wait_for(self.run.check_owner(self.run.spoken_for()), LOST_S)
            except TimeoutError:
                pass  # a bucket does not reply
            finally:
                await self.saver.close()
        finally:
            self.background.loop.call_later(0.05, self.server.finished.set)  # after the reply was sent

    async def _see_out(self, adoptions: int, owed: set[CheckpointId]) -> None:
        """Make the requested saves of a closed trainer durable, unless another trainer inherits the memory first."""
        while adoptions == self.trainer.adoptions and self.saver.unfinished:
            await asyncio.sleep(0.01)
        try:
            await self._make_durable(adoptions, asyncio.Event(), owed)
        except FencedError as error:
            events.log.warning("%s", error)
        if adoptions == self.trainer.adoptions:
            await self.saver.finish_begun()


def _memory_is_short() -> bool:
    return room().share < SHORT


def _process_of(channel: Channel) -> Process:
    process = Process.of(link.peer_pid(channel.sock))
    if process.started < 0:
        raise InUseError(
            "the memory of this run is held by a writer in another container, which cannot see this process"
        )
    return process
