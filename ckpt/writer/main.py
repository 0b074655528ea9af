"""The writer process: holds the memory, writes it out, and outlives the trainer.

    python -c 'from ckpt.writer.main import main; main()' FD RUN_KEY LOG STARTED

It starts in its own session, at low CPU and I/O priority, without torch, and has the name of the run on this machine
for as long as it holds its memory: whoever finds the name taken does not start. Two kinds of threads feed one event
loop: a reader per connection, and a watcher per arena that sits in the trainer's robust mutex until the trainer dies.

When the trainer dies, the writer digests the snapshots, persists the ring, newest first, and waits for the next
incarnation, which finds it by RUN_KEY; after `linger_s` it leaves. When the trainer closes, it finishes and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import psutil

from ckpt import events
from ckpt.checkpoint.ledger_files import last_decision, read_back
from ckpt.checkpoint.open_tier import OpenTier
from ckpt.errors import (
    CheckpointError,
    FencedError,
    InUseError,
    NameTakenError,
    ProtocolError,
    SkippedError,
    UsageError,
    WriterError,
)
from ckpt.faults.memory_pressure import MemoryRoom, spare_from_oom
from ckpt.faults.report import Fault, SavedStep
from ckpt.format.layout import Layout
from ckpt.format.manifest import Attempt
from ckpt.goodput.ledger import Account, Decision
from ckpt.ipc import channel as link
from ckpt.ipc import notes, requests
from ckpt.ipc import watch_requests as watch
from ckpt.ipc.arena import Arena
from ckpt.ipc.channel import Channel
from ckpt.ipc.mutex import Got
from ckpt.ipc.process import Process, boot_id, namespace
from ckpt.ipc.protocol import Incoming, Note, Request, failure, message_of
from ckpt.metrics import Metrics
from ckpt.telemetry.exporter import Exporter
from ckpt.writer.bookkeeper import Bookkeeper
from ckpt.writer.dispatch import HANDLERS, Answer, Caller, check_version, handles, known
from ckpt.writer.fault_reports import FaultReporter, end
from ckpt.writer.held_memory import HeldMemory, make_arena
from ckpt.writer.persist import LOST_S, Persister
from ckpt.writer.redo import RedoKeeper
from ckpt.writer.status import StatusServer
from ckpt.writer.throttle import Throttle
from ckpt.writer.watchdog import Stall, Watchdog, WatchdogCalls

NICE = 10
LOOK_BACK = 4  # incarnations, one of which knows how often to save
RETRY_S = 5.0
OWNER_S = 10.0  # between two looks at who owns the run
AWAKE_S = 0.25  # for it to take a signal that the writer has seen
HEARD_S = 1.0  # for the trainer's fault handler to answer; else the writer deals with it
GOING_S = 20.0  # for it to leave, once it said that it would
TOLD_S = 20.0  # after a death, for what is in memory to become durable before the report is written without it
KEEP_S = 1.0  # for another process that keeps an arena to let go of it
LET_GO_S = 0.1  # between two looks whether a trainer that lives, and has left, has let go of its memory
ECHO_S = 0.5  # for the rest of what faulthandler says, while a trainer crashes


class Writer:
    """The state of the process. Everything runs in one event loop; blocking work goes to threads."""

    def __init__(self, channel: Channel, key: str, path: str, trainer: Process) -> None:
        self.key, self.path = key, path
        self.channel: Channel | None = channel
        self.process = trainer
        self.since = time.time()  # it has been our trainer
        self._owning: asyncio.Task[None] | None = None
        self.left = False  # whether it lives, and has said that it is done
        self._gone_by: list[Process] = []  # who has lost the run, to us or as our trainer says
        self._losers: dict[Channel, str] = {}  # who has lost the run to another trainer, and what they are told
        self.dead = False  # whether that trainer has died
        self.dispossessed = False  # whether it has lost the run instead, and lives
        self.leaving = False
        self.closing = -1  # the adoption whose trainer has closed, and waits no longer for what is unfinished
        self.watched: dict[str, int] = {}  # by arena, the last adoption whose trainer has locked it
        self.lingering = False  # whether one of those has left, and lives
        self.previous_gone = True  # whether no earlier trainer can write to the arenas any more
        self.finished = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.held_memory = HeldMemory()
        self.persister = Persister(self.held_memory, self._tell, self._spawn, Throttle(lambda: self.trainer))
        self.redo = RedoKeeper(self.held_memory, self.persister)
        self.fault_reporter = FaultReporter(key, self.held_memory, self.persister)
        self.books = Bookkeeper(lambda: self.persister.tiers, self._tell)
        self.status_server = StatusServer(self.held_memory, self.persister, self._state, lambda: self.books.account)
        self.exporter = Exporter(self.status_server.look, self._say, self._serves)
        self.fault_reporter.on_kept = self._on_kept
        self.watchdog: Watchdog | None = None
        self.heard = asyncio.Event()  # the fault handler deals with what it was told last
        self.announced = False  # the trainer has said that, and why, it is about to end
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def trainer(self) -> int:
        """The number of its process."""
        return self.process.pid

    async def run(self, listener: socket.socket) -> None:
        assert self.channel is not None
        self._listener: socket.socket | None = listener
        listener.setblocking(False)
        self.loop.add_reader(listener, self._accept, listener)
        self._start_thread(self._read, self.channel)
        self._start_thread(self._wait_gone, self.process)
        await self.finished.wait()
        self._give_name_up()
        await self.exporter.finish()

    def _give_name_up(self) -> None:
        """The next trainer starts with a writer of its own."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        _call_myself(link.LEAVING)
        self.loop.remove_reader(listener)
        listener.close()
        with contextlib.suppress(OSError):
            if self.path and os.path.getsize(self.path) == 0:
                os.unlink(self.path)

    # -- threads that feed the loop --

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: we are leaving
            self.loop.call_soon_threadsafe(function, *arguments)

    def _read(self, channel: Channel) -> None:
        while (incoming := channel.receive()) is not None:
            try:
                request = message_of(incoming, REQUESTS)
            except ProtocolError as error:
                incoming.drop()
                events.log.warning("refused: %s", error)
                self._reply(channel, incoming.id, failure(error))
                continue
            self._post(self._on_request, channel, incoming, request)
        self._post(self._on_lost, channel)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors, say: whoever asks waits meanwhile
            self.loop.remove_reader(listener)
            self.loop.call_later(1.0, self._accept_again)
            return
        if link.same_user(sock):
            sock.setblocking(True)
            self._start_thread(self._read, Channel(sock))
        else:
            sock.close()

    def _accept_again(self) -> None:
        if self._listener is not None:
            self.loop.add_reader(self._listener, self._accept, self._listener)

    def _watch(self, arena: Arena, adoptions: int) -> None:
        """Sits in the mutex of the trainer's staging thread until it is let go of, or its owner dies."""
        got = arena.mutex.lock()
        arena.mutex.unlock()
        if got is Got.OWNER_DIED:
            self._post(self._on_death, adoptions)

    def _wait_gone(self, process: Process) -> None:
        """Copies by a device may outlive the notice of death; after this nobody writes the memory any more."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(process.pid)
            if Process.of(process.pid) == process:  # else another has its number by now
                select.select([fd], [], [])
            os.close(fd)
        self._post(self._on_gone, process)

    # -- events --

    def _on_request(self, channel: Channel, incoming: Incoming, request: Request[Any]) -> None:
        self._spawn(self._handle(channel, incoming, request))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            events.log.error("something that ran beside failed", exc_info=error)

    def _on_lost(self, channel: Channel) -> None:
        """End-of-file is never evidence of death: the pidfd and the mutex are."""
        channel.close()
        self._losers.pop(channel, None)
        if channel is self.channel:
            self.channel = None

    def _on_gone(self, process: Process) -> None:
        if self.books.account is not None and self.books.account.pid == process.pid:
            self.books.gone()
        if process == self.process:
            # A crash was noticed before its end: something may have been sealed in between.
            if self.dead and self.closing != self.persister.adoptions:
                self._spawn(self._drain_again(self.persister.adoptions))
            self._on_death(self.persister.adoptions)
        elif not self.previous_gone:
            self.previous_gone = True
            self._tell(notes.GoneNote())

    async def _drain_again(self, adoptions: int) -> None:
        await asyncio.to_thread(self.held_memory.digest_ring)
        await self.persister.drain(adoptions)

    def _on_death(self, adoptions: int) -> None:
        if not self.dead and not self.leaving and adoptions == self.persister.adoptions:
            self.dead = True
            self.status_server.ended()
            self.books.ended("died")
            self._spawn(self._outlive(adoptions))

    def _tell(self, note: Note) -> None:
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(note)

    def _say(self, text: str) -> None:
        events.log.warning("%s", text)
        self._tell(notes.SaidNote(text))

    def _serves(self, where: str) -> None:
        self.status_server.serves = where

    def _on_kept(self, fault: Fault) -> None:
        self.books.fault(fault)
        self.status_server.fault(fault)

    def _state(self) -> tuple[int, str]:
        """Our trainer's process, and what became of it, as `ckpt.telemetry.status.RankStatus` says it."""
        if (self.leaving and not self.dead) or self.closing == self.persister.adoptions:
            return self.trainer, "closed"
        try:
            status = psutil.Process(self.trainer).status()
        except psutil.Error:
            return self.trainer, "dead"
        if not self.process.alive:
            return self.trainer, "dead"
        if self.dead:
            return self.trainer, "left"
        return self.trainer, "frozen" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"

    # -- requests --

    async def _handle(self, channel: Channel, incoming: Incoming, request: Request[Any]) -> None:
        try:
            if channel in self._losers:
                raise FencedError(self._losers[channel])
            value = await HANDLERS[type(request)](self, request, Caller(channel, incoming.fds))
        except Exception as error:
            if self.leaving and isinstance(error, RuntimeError):  # its threads have ended already
                error = WriterError("this writer is about to leave")
            elif not isinstance(error, CheckpointError):
                events.log.exception("the writer failed at %r", incoming.op)
            value = failure(error)
        self._reply(channel, incoming.id, *(value if isinstance(value, Answer) else (value,)))

    def _reply(self, channel: Channel, number: int | None, value: object, fds: tuple[int, ...] = ()) -> None:
        """Whoever asked with a number gets an answer, if only that there is none."""
        if number is not None:
            with contextlib.suppress(OSError):
                try:
                    channel.reply(number, value, fds)
                except (ProtocolError, TypeError, ValueError) as error:
                    channel.reply(number, failure(error))

    @handles(requests.Greeting)
    async def do_greeting(self, request: requests.Greeting, caller: Caller) -> Answer:
        check_version(request)
        visit = request.visit
        self._gone_by += map(Process.of, request.losers)
        self._check_stays(visit)
        lost = [] if visit else await self.persister.lost()  # before anything changes
        self._check_stays(visit)
        process = Process.of(link.peer_pid(caller.channel.sock))
        if process.started < 0 and not visit:
            raise InUseError(
                "the memory of this run is held by a writer in another container, which cannot see this process"
            )
        lives = process != self.process and self.process.alive
        taken = request.takeover and lives and not self.left
        if taken:
            self._dispossess(process.pid)
        copies = self.held_memory.mirror.arenas.values() if visit else ()  # no trainer goes on in them
        shown = [*self.held_memory.arenas.values(), *copies]
        alive = lives and not self.dead
        adopts = not alive and caller.channel is not self.channel and not visit
        reply = requests.GreetingReply(
            pid=os.getpid(),
            alive=alive,
            taken=taken,
            trainer=self.trainer,
            since=self.since,
            gone=self.dispossessed or (self.previous_gone and (not lives or self._let_go())),
            lost=lost,
            arenas=[arena.id.hex() for arena in shown],
            foreign=list(self.held_memory.foreign),
            layouts=self.held_memory.layouts_in_use(shown),
            digests=self.held_memory.known_digests(),
            writing=list(self.persister.writing),
            acquires=[(a.epoch, a.nonce, str(a.restored) if a.restored else None) for a in self.persister.acquires],
            faults=[fault.to_json() for fault in self.fault_reporter.faults] if adopts else [],
            losers=self._still_there(process),
        )
        if adopts:
            self._adopted_by(process, caller.channel, reply.gone)
        return Answer(reply, tuple(arena.fd for arena in shown))

    def _check_stays(self, visit: bool) -> None:
        """WriterError for a trainer that comes when it is too late: it waits for the name, and has a writer of its
        own."""
        if self.leaving and not visit:
            raise WriterError("this writer is about to leave")

    def _adopted_by(self, process: Process, channel: Channel, gone: bool) -> None:
        """This is our trainer from now on. `gone`: none before it can write to the arenas any more."""
        self.persister.adoptions += 1
        self.previous_gone = gone
        self.lingering = self.left or (self.lingering and not self.previous_gone)
        if self.lingering and not self.previous_gone:
            self._spawn(self._await_let_go(self.persister.adoptions))
        self.channel, self.process, self.dead, self.announced = channel, process, False, False
        self.since, self.left, self.dispossessed = time.time(), False, False
        self.fault_reporter.faults = []
        self._end_watchdog()
        self._start_thread(self._wait_gone, process)

    def _dispossess(self, taker: int) -> None:
        """Our trainer has lost the run: nothing is taken from it any more. It lives, and may go on writing where it
        did: nobody else ever does there, so that nobody has to wait for its end."""
        text = f"process {taker} has taken this run over (takeover=True). Stop this one, or give it another location"
        self._fenced(text)
        if self.channel is not None:
            self._losers[self.channel], self.channel = text, None
        self.held_memory.foreign.update(self.held_memory.arenas)
        self.dead = self.announced = self.dispossessed = True
        self.persister.adoptions += 1  # what it has asked for, and is under way, must not change whose run it is
        self._end_watchdog()
        self.status_server.ended()
        self.books.ended("left")

    @handles(requests.Lose)
    async def do_lose(self, request: requests.Lose, caller: Caller) -> None:
        """Another job takes the run over, and may have no rank in the place of our trainer. What that one had is kept
        for whoever comes, as after a death."""
        if not self.dead and not self.leaving:
            self._dispossess(link.peer_pid(caller.channel.sock))
            self._spawn(self._outlive(self.persister.adoptions))

    @handles(requests.Whose)
    async def do_whose(self, request: requests.Whose, caller: Caller) -> requests.WhoseReply:
        owner = self.persister.owner
        opened = None if owner is None else (owner.epoch, owner.nonce)
        return requests.WhoseReply(self.trainer, opened, self._still_there(self.process))

    def _still_there(self, trainer: Process) -> list[int]:
        """Who has lost this run, and lives: each is told when it looks, and none trains it any more. `trainer`: the one
        that has it, or is about to."""
        self._gone_by += [Process.of(link.peer_pid(loser.sock)) for loser in self._losers]
        self._gone_by = [one for one in dict.fromkeys(self._gone_by) if one.alive and one != trainer]
        return [one.pid for one in self._gone_by]

    @handles(requests.Drop)
    async def do_drop(self, request: requests.Drop, caller: Caller) -> None:
        if caller.channel is self.channel:
            self.persister.adoptions += 1
            self._leave_soon()

    def _let_go(self) -> bool:
        """Whether a trainer that lives, and has left, has locked none of its memory any more: it copies no further."""
        return self.left and self._unlocked()

    def _unlocked(self) -> bool:
        """Whether nobody has locked any memory, but for what the present trainer has."""
        for key, arena in self.held_memory.arenas.items():
            if self.watched.get(key) == self.persister.adoptions and not self.left:
                continue  # before it could lock this, the one before has let go of it
            if key in self.held_memory.foreign:
                continue  # of a trainer that has lost the run, where nobody else ever writes
            if arena.mutex.try_lock() is Got.BUSY:
                return False
            arena.mutex.unlock()
        return True

    async def _await_let_go(self, adoptions: int) -> None:
        """The trainer before lives, has left, and was still copying when the present one came, which waits for that."""
        while adoptions == self.persister.adoptions and not self.previous_gone:
            if self._unlocked():
                self.previous_gone = True
                self._tell(notes.GoneNote())
            await asyncio.sleep(LET_GO_S)

    def _fenced(self, text: str) -> None:
        events.log.warning("%s", text)
        self._tell(notes.FencedNote(text))

    @handles(requests.OpenRun)
    async def do_open(self, request: requests.OpenRun, caller: Caller) -> requests.OpenRunReply:
        tiers = await self.persister.open(request, self._has_ended)
        decision = await self._last_cadence() if request.auto else None
        for tier in self.persister.tiers:
            every = None if decision is None else decision.every.get(tier.url)
            if tier.url in request.auto and type(every) is int and every >= 1:
                tier.set_every(every)
        return requests.OpenRunReply(tiers, {} if decision is None else asdict(decision))

    def _has_ended(self, account: Account) -> bool:
        """Of a trainer that was this writer's, or is this very process."""
        mine = (self.trainer, boot_id(), namespace("pid"))
        known = self.books.account
        return (known is not None and known.epoch == account.epoch) or mine == (
            account.pid,
            account.boot,
            account.namespace,
        )

    async def _last_cadence(self) -> Decision | None:
        """What the last incarnation saved by, so that this one need not find it out again."""
        known = [
            *await read_back(self.persister.tiers, LOOK_BACK),
            *([self.books.account] if self.books.account else []),
        ]
        return last_decision(known)

    @handles(requests.AcquireRun)
    async def do_acquire(self, request: requests.AcquireRun, caller: Caller) -> list[int]:
        return await self.persister.acquire(request)

    @handles(requests.OwnRun)
    async def do_own(self, request: requests.OwnRun, caller: Caller) -> list[requests.PartsHere]:
        if self._owning is None or self._owning.done():  # it ends when an earlier trainer has lost the run
            self._owning = self._spawn(self._look_at_owner())
        return await self.persister.own(request)

    async def _look_at_owner(self) -> None:
        """Tell the trainer, soon, that another job has taken the run over, also if it saves nothing meanwhile."""
        while not self.leaving:
            await asyncio.sleep(OWNER_S)
            if self.dead or self.persister.ownership.locked():
                continue
            try:
                await self.persister.check_owner(self._spoken_for())
            except FencedError as error:
                self._fenced(str(error))
                return
            except Exception as error:
                events.log.warning("who owns the run cannot be seen: %s", error)

    def _spoken_for(self) -> list[OpenTier]:
        """The places that this rank speaks for."""
        return [tier for tier in self.persister.tiers if tier.role.place == 0]

    @handles(requests.Doubt)
    async def do_doubt(self, request: requests.Doubt, caller: Caller) -> None:
        await self.persister.doubt(request)

    @handles(requests.Complete)
    async def do_complete(self, request: requests.Complete, caller: Caller) -> None:
        await self.persister.complete(request)

    @handles(requests.WriteSlot)
    async def do_write(self, request: requests.WriteSlot, caller: Caller) -> requests.WriteSlotReply:
        label = self.held_memory.arenas[request.arena].label(request.slot)
        size = 0 if label is None else label.data_size
        step = Attempt.parse(request.attempt).step
        with self.books.saving(self.persister.tiers[request.tier].url, size, step) as write:
            write.stored = await self.persister.write(request)
            return requests.WriteSlotReply(size, write.stored)

    @handles(requests.Resume)
    async def do_resume(self, request: requests.Resume, caller: Caller) -> None:
        self.persister.resume()

    @handles(requests.Retract)
    async def do_retract(self, request: requests.Retract, caller: Caller) -> None:
        await self.persister.retract(request)

    @handles(requests.Successor)
    async def do_successor(self, request: requests.Successor, caller: Caller) -> None:
        self.persister.successor = request.nonce

    @handles(requests.MakeArena)
    async def do_arena(self, request: requests.MakeArena, caller: Caller) -> Answer:
        begun = self.persister.adoptions
        arena = await asyncio.to_thread(make_arena, request.slots, request.slot_size, request.least)
        if begun != self.persister.adoptions:  # whoever came meanwhile knows nothing of it
            arena.close()
            raise SkippedError("the trainer that asked for this memory has lost the run, or died")
        self.held_memory.add(arena)
        await self._kept(arena.id.hex())
        return Answer(arena.id.hex(), (arena.fd,))

    @handles(requests.KeepArena)
    async def do_keep(self, request: requests.KeepArena, caller: Caller) -> None:
        await self._kept(request.arena)

    async def _kept(self, key: str) -> None:
        await asyncio.to_thread(self.held_memory.keeping[key].begun.wait, KEEP_S)

    @handles(requests.AttachArena)
    async def do_attach(self, request: requests.AttachArena, caller: Caller) -> None:
        self.held_memory.add(Arena.attach(caller.fds[0]), foreign=request.foreign)

    @handles(requests.Taken)
    async def do_taken(self, request: requests.Taken, caller: Caller) -> None:
        """Another writer has these arenas as well, and goes on: nothing keeps us here if our trainer is dead, and these
        are all we have."""
        if self.dead and {arena.id.hex() for arena in self.held_memory.all()} <= set(request.arenas):
            self.persister.adoptions += 1  # what we would do after its death is not ours to do any more
            self._leave_soon()

    def _leave_soon(self) -> None:
        self.leaving = True
        self._give_name_up()
        self._spawn(self._leave())

    async def _leave(self) -> None:
        await self.books.finish()
        await self.persister.finish_begun()
        self.finished.set()

    @handles(requests.WatchArena)
    async def do_watch(self, request: requests.WatchArena, caller: Caller) -> None:
        self.watched[request.arena] = self.persister.adoptions
        self._start_thread(self._watch, self.held_memory.arenas[request.arena], self.persister.adoptions)

    @handles(requests.AskDigests)
    async def do_digests(self, request: requests.AskDigests, caller: Caller) -> list[requests.Digest]:
        if request.all:
            await asyncio.to_thread(self.held_memory.digest_ring)
        return self.held_memory.known_digests()

    @handles(requests.ReleaseArena)
    async def do_release(self, request: requests.ReleaseArena, caller: Caller) -> None:
        self.held_memory.release(request.arena)
        self.watched.pop(request.arena, None)

    @handles(requests.KnowLayout)
    async def do_layout(self, request: requests.KnowLayout, caller: Caller) -> None:
        self.held_memory.keep_layout(Layout.from_json(request.layout))

    @handles(requests.KnowGuarded)
    async def do_guarded(self, request: requests.KnowGuarded, caller: Caller) -> None:
        self.held_memory.know_guarded(request.layout, request.number, request.tensors)

    @handles(requests.KnowRecipes)
    async def do_recipes(self, request: requests.KnowRecipes, caller: Caller) -> None:
        self.redo.learn(request)

    @handles(requests.LogStep)
    async def do_log(self, request: requests.LogStep, caller: Caller) -> requests.LogStepReply:
        return await self.redo.append(request)

    @handles(requests.ForgetRedo)
    async def do_redo_forget(self, request: requests.ForgetRedo, caller: Caller) -> None:
        self.redo.forget()

    @handles(requests.AskGap)
    async def do_gap(self, request: requests.AskGap, caller: Caller) -> Answer | None:
        gap = self.held_memory.lend_gap() if self.dead else None
        if gap is None:
            return None
        arena, slot, label, missing = gap
        layout = self.held_memory.layouts[label.layout]
        return Answer(requests.FoundGap(str(label.attempt), slot, layout.to_json(), missing), (arena.fd,))

    @handles(requests.Filled)
    async def do_filled(self, request: requests.Filled, caller: Caller) -> bool:
        attempt = Attempt.parse(request.attempt)
        whole = self.dead and self.held_memory.fill_gap(attempt, request.tensors)
        if whole:
            await asyncio.to_thread(self.held_memory.digest_ring)
            self._spawn(self._persist_filled(attempt))
        return whole

    async def _persist_filled(self, attempt: Attempt) -> None:
        await self.persister.persist(TOLD_S, attempts=[attempt])

    @handles(requests.Serve)
    async def do_serve(self, request: requests.Serve, caller: Caller) -> requests.Json:
        return self.held_memory.mirror.serve()

    @handles(requests.Partner)
    async def do_partner(self, request: requests.Partner, caller: Caller) -> None:
        self.held_memory.mirror.send_to(request.contact, request.rank)

    @handles(requests.Push)
    async def do_push(self, request: requests.Push, caller: Caller) -> None:
        arena, slot = self.held_memory.arenas[request.arena], request.slot
        label = arena.label(slot)
        if label is not None and str(label.attempt) == request.attempt and label.layout in self.held_memory.layouts:
            self.held_memory.mirror.push(arena, slot, label, self.held_memory.layouts[label.layout])

    # -- faults --

    @handles(watch.Arm)
    async def do_arm(self, request: watch.Arm, caller: Caller) -> None:
        self._end_watchdog()
        eyes = WatchdogCalls(self._on_crash, self._on_signals, self._on_stall, self._on_pressure)
        self.watchdog = Watchdog(self.trainer, request, caller.fds, eyes)

    @handles(watch.KeepBooks)
    async def do_books(self, request: watch.KeepBooks, caller: Caller) -> None:
        self.books.begin(request, caller.fds, self.trainer)

    @handles(watch.RestoreDone)
    async def do_restored(self, request: watch.RestoreDone, caller: Caller) -> None:
        self.books.restored(request)
        self.status_server.restored(request)

    @handles(watch.Show)
    async def do_live(self, request: watch.Show, caller: Caller) -> None:
        self.status_server.begin(request, caller.fds, self.trainer)
        metrics = None if request.metrics is None else Metrics(**request.metrics)
        await self.exporter.begin(metrics, request.rank, request.local_rank)

    @handles(watch.Look)
    async def do_look(self, request: watch.Look, caller: Caller) -> requests.Json:
        return (await self.status_server.look()).to_json()

    @handles(watch.SetCadence)
    async def do_cadence(self, request: watch.SetCadence, caller: Caller) -> None:
        for tier in self.persister.tiers:
            tier.set_every(int(request.decision["every"].get(tier.url, tier.every)))
        self.books.decided(Decision(**request.decision))

    def _end_watchdog(self) -> None:
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None

    @handles(watch.Heard)
    async def do_heard(self, request: watch.Heard, caller: Caller) -> None:
        self.heard.set()

    @handles(requests.Persist)
    async def do_persist(self, request: requests.Persist, caller: Caller) -> list[requests.SavedInTier]:
        attempts = [Attempt.parse(text) for text in request.attempts]
        return await self.persister.persist(request.deadline_s, far=request.far, attempts=attempts)

    @handles(watch.Report)
    async def do_report(self, request: watch.Report, caller: Caller) -> str:
        fault = Fault.from_json(request.fault)
        if request.ends:
            self.announced = True
        await self.fault_reporter.keep(fault, untold=False)
        return fault.key

    @handles(watch.Sample)
    async def do_sample(self, request: watch.Sample, caller: Caller) -> requests.Json | None:
        return None if self.watchdog is None else (await self.watchdog.sample()).to_json()

    @handles(watch.AskEvidence)
    async def do_evidence(self, request: watch.AskEvidence, caller: Caller) -> list[requests.Json]:
        found = [] if self.watchdog is None else await self.fault_reporter.evidence(self.watchdog)
        return [one.to_json() for one in found]

    @handles(watch.PeerDied)
    async def do_peer(self, request: watch.PeerDied, caller: Caller) -> None:
        self.books.peer(request.rank, request.summary)
        self._tell(notes.PeerDiedNote(request.rank, request.summary, request.writer))

    @handles(watch.TriggerSave)
    async def do_trigger(self, request: watch.TriggerSave, caller: Caller) -> watch.TriggerSaveReply:
        if self.dead or self.channel is None or self.watchdog is None:
            raise UsageError("the trainer of this run does not live, or takes no triggers: nothing to save")
        self._tell(notes.TriggerNote(request.why[:200]))
        beat = self.watchdog.heartbeat.read()
        return watch.TriggerSaveReply(self.trainer, self.watchdog.rank, beat.step, beat.doing)

    def _on_crash(self, text: str) -> None:
        """It is dying; with a large process or a core dump that takes a while."""
        self._on_death(self.persister.adoptions)

    def _on_signals(self, numbers: list[int], raw: bytes) -> None:
        self._tell(notes.PassedNote(list(raw)))  # others may wait for them too
        for number in numbers:
            self._spawn(self._signal(number))

    async def _signal(self, number: int) -> None:
        """The fault handler has not taken it: perhaps it is only late; else something holds the interpreter's lock."""
        watchdog, began = self.watchdog, time.monotonic()
        if watchdog is None or self.dead:
            return
        fault = self.fault_reporter.signal(watchdog, number)
        self.heard.clear()
        self._tell(notes.SignalNote(number))
        try:
            await asyncio.wait_for(self.heard.wait(), AWAKE_S)
        except TimeoutError:
            await self.fault_reporter.held_up(fault, watchdog, began)

    def _on_stall(self, stall: Stall) -> None:
        self._spawn(self._stall(stall))

    async def _stall(self, stall: Stall) -> None:
        """The fault handler knows more, and can copy what runs. If it does not answer, it is up to us."""
        watchdog = self.watchdog
        if watchdog is None or self.dead:
            return
        self.heard.clear()
        evidence = stall.evidence.to_json()
        self._tell(notes.HangNote(stall.idle_s, stall.limit_s, stall.usual_s, stall.timings, evidence))
        try:
            await asyncio.wait_for(self.heard.wait(), HEARD_S)
        except TimeoutError:
            await self.fault_reporter.hang(watchdog, stall)
            return
        if watchdog.hang is not None and watchdog.hang.action == "exit":
            await asyncio.sleep(GOING_S)
            if self.watchdog is watchdog and not self.dead and watchdog.heartbeat.read().calls == stall.evidence.calls:
                end(watchdog, "it hangs, and did not leave")

    def _on_pressure(self, room: MemoryRoom, why: str) -> None:
        self._tell(notes.PressureNote(room.available, room.total, why))

    async def _record_death(self, fault: Fault, watchdog: Watchdog, began: float, drained: asyncio.Event) -> None:
        """Once what is in memory is durable; or not, if that takes too long or somebody takes the memory over."""
        await self.fault_reporter.tell_siblings(fault)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drained.wait(), TOLD_S)
        for step, url in self.persister.durable():
            fault.saved.append(SavedStep(step, url, "ring", time.monotonic() - began))
        fault.timings["durable_s"] = time.monotonic() - began
        if watchdog.crash:
            fault.stacks[str(watchdog.rank)] = watchdog.crash.splitlines()
        await self.fault_reporter.keep(fault, untold=False)

    @handles(requests.Leave)
    async def do_leave(self, request: requests.Leave, caller: Caller) -> None:
        if self.channel not in (caller.channel, None):
            return  # another one has come in its place
        self.announced = self.left = True
        self.books.ended("left")
        self._on_death(self.persister.adoptions)

    @handles(requests.Close)
    async def do_close(self, request: requests.Close, caller: Caller) -> None:
        """The trainer is done. Finish what was begun, clean up and leave.

        As long as something is unfinished it is dead to us: whoever opens the run finds its memory, and goes on with
        us.
        """
        if self.channel not in (caller.channel, None):
            return  # another one has come in its place
        adoptions, owed = self.persister.adoptions, self.persister.begun()
        self.announced = self.left = True
        self._end_watchdog()
        self.status_server.ended()
        self.books.ended("left" if request.failed else "closed")
        if owed:
            self.closing, self.dead = adoptions, True
            await self._see_out(adoptions, owed)
            if adoptions != self.persister.adoptions:
                return  # another one has come for it
        self.leaving = True
        self.exporter.stop_serving()
        self._give_name_up()
        try:
            await self.books.finish()
            try:
                # Who lost the run has to know, at its end at last.
                await asyncio.wait_for(self.persister.check_owner(self._spoken_for()), LOST_S)
            except TimeoutError:
                pass  # a bucket that does not answer says nothing of that
            finally:
                await self.persister.close()
        finally:
            self.loop.call_later(0.05, self.finished.set)  # after the reply has left

    async def _see_out(self, adoptions: int, owed: set[Attempt]) -> None:
        """Have these made durable, which a trainer wanted to be before it closed. Until another one comes for them, or
        what failed has been tried for as long as memory is kept."""
        while adoptions == self.persister.adoptions and self.persister.unfinished:
            await asyncio.sleep(0.01)
        deadline = time.monotonic() + self.persister.linger_s
        try:
            while (
                not await self.persister.drain(adoptions, self.persister.wanted(owed)) and time.monotonic() < deadline
            ):
                await asyncio.sleep(min(RETRY_S, self.persister.linger_s))
        except FencedError as error:
            events.log.warning("%s", error)
        if adoptions == self.persister.adoptions:
            await self.persister.finish_begun()

    # -- after the trainer's death --

    async def _outlive(self, adoptions: int) -> None:
        """Persist the ring, keep the memory for the next incarnation, leave at the deadline."""
        events.point("drain.started")
        began, watchdog = time.monotonic(), self.watchdog
        deadline, drained = began + self.persister.linger_s, asyncio.Event()
        fault = None if self.announced or watchdog is None else self.fault_reporter.death(watchdog)
        if fault is not None and watchdog is not None:
            self.fault_reporter.faults.append(fault)  # the next incarnation is told, however soon it comes
            self._spawn(self._record_death(fault, watchdog, began, drained))
        if watchdog is not None:
            self.loop.call_later(ECHO_S, watchdog.stop)
        await asyncio.to_thread(self.held_memory.digest_ring)
        try:
            while (
                adoptions == self.persister.adoptions
                and not await self.persister.drain(adoptions)
                and time.monotonic() < deadline
            ):
                await asyncio.sleep(min(RETRY_S, self.persister.linger_s))
            drained.set()
            looked = float("-inf")
            while (
                adoptions == self.persister.adoptions and time.monotonic() < deadline and self.held_memory.something()
            ):
                if time.monotonic() > looked + RETRY_S:
                    looked = time.monotonic()
                    await self.persister.check_owner()
                    if self.persister.tiers and len(await self.persister.lost()) == len(self.persister.tiers):
                        events.log.warning("the run was removed: its memory is let go of")
                        break
                await asyncio.sleep(min(0.2, self.persister.linger_s))
        except FencedError as error:
            events.log.warning("%s", error)  # a newer job went on without us
        finally:
            if adoptions == self.persister.adoptions:
                self.leaving = True
                self._give_name_up()
                await self.books.finish()
                await self.persister.finish_begun()
                self.finished.set()


REQUESTS = known()


def _be_modest() -> None:
    """Low priority: training comes first."""
    os.nice(NICE)
    os.chdir("/")  # do not keep a folder or a mount busy
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    spare_from_oom()


def _call_myself(name: str) -> None:
    """As `ps` and `link.writers_of` see it."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


async def _main(fd: int, key: str, path: str, started: int) -> None:
    """`started`: when the trainer was, as `identity.Process` says it; it may have died by now."""
    sock = socket.socket(fileno=fd)
    listener = link.listen(key)
    if listener is None:
        await _refuse(Channel(sock))
        return
    _call_myself(link.AT_WORK)
    await Writer(Channel(sock), key, path, Process(link.peer_pid(sock), started)).run(listener)


async def _refuse(channel: Channel) -> None:
    """Another writer has the name: say so to the first who asks."""
    incoming = await asyncio.to_thread(channel.receive)
    if incoming is not None and incoming.id is not None:
        channel.reply(incoming.id, failure(NameTakenError("another writer of this run has started meanwhile")))


def main() -> None:
    """Entry point of the process."""
    events.process = "writer"
    logging.basicConfig(level=logging.WARNING, format="everystep writer: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer; our end is bounded by deadlines
    _be_modest()
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
    os._exit(0)  # threads may still sit in a mutex
