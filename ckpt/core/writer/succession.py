"""Whose the writer is: who comes and takes it over, whose process is gone, and who has lost the run.

A thread for each trainer waits for the end of its process; one for each arena sits in the trainer's robust mutex until
the trainer dies, which says so within milliseconds. What a device copies may outlive that, but not the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from dataclasses import dataclass

from ckpt import events
from ckpt.core.ipc import channel as link
from ckpt.core.ipc import requests
from ckpt.core.ipc.arena import Arena
from ckpt.core.ipc.channel import Channel
from ckpt.core.ipc.mutex import Got
from ckpt.core.ipc.notes import GoneNote
from ckpt.core.ipc.process import Process
from ckpt.core.writer.after_death import AfterDeath
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.dispatch import Answer, Background, Caller, check_version, handles
from ckpt.core.writer.held_run import HeldRun, PresentTrainer
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.opening import TierOpener
from ckpt.core.writer.parts import PartWriter
from ckpt.core.writer.server import Server
from ckpt.core.writer.watch import TrainerWatch
from ckpt.errors import FencedError, InUseError

OWNER_S = 10.0  # between two looks at who owns the run
LET_GO_S = 0.1  # between two looks whether a trainer that lives, and has left, has let go of its memory


@dataclass(eq=False)
class Succession:
    """Everything runs in the writer's event loop, but for the threads that wait."""

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    parts: PartWriter
    opener: TierOpener
    books: Bookkeeper
    watch: TrainerWatch
    after_death: AfterDeath
    server: Server
    background: Background
    _previous_gone: bool = True  # whether no earlier trainer can write to the arenas any more
    _lingering: bool = False  # whether one of those has left, and lives
    _looking: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._await_death()

    # -- deaths --

    def _await_death(self) -> None:
        """Of the trainer that we have from now on; for each of its arenas see `watch_arena`."""
        self.background.thread(self._wait_gone, self.trainer.process)
        self.background.spawn(self._wait_crashed(self.trainer.crashed, self.trainer.adoptions))

    async def _wait_crashed(self, crashed: asyncio.Event, adoptions: int) -> None:
        await crashed.wait()
        self.after_death.died(adoptions)

    @handles(requests.WatchArena)
    def watch_arena(self, request: requests.WatchArena) -> None:
        adoptions = self.trainer.adoptions
        self.held_memory.locked_by[request.arena] = adoptions
        self.background.thread(self._wait_owner_died, self.held_memory.arenas[request.arena], adoptions)

    def _wait_owner_died(self, arena: Arena, adoptions: int) -> None:
        """Sits in the mutex of the trainer's staging thread until it is let go of, or its owner dies."""
        got = arena.mutex.lock()
        arena.mutex.unlock()
        if got is Got.OWNER_DIED:
            self.background.post(self.after_death.died, adoptions)

    def _wait_gone(self, process: Process) -> None:
        """Copies by a device may outlive the notice of death; after this nobody writes the memory any more."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(process.pid)
            if Process.of(process.pid) == process:  # else another has its number by now
                select.select([fd], [], [])
            os.close(fd)
        self.background.post(self._on_gone, process)

    def _on_gone(self, process: Process) -> None:
        self.books.gone(process.pid)
        if process == self.trainer.process:
            self.after_death.process_gone()
        elif not self._previous_gone:
            self._tell_gone()

    def _tell_gone(self) -> None:
        self._previous_gone = True
        self.trainer.tell(GoneNote())

    # -- who comes --

    @handles(requests.Greeting)
    async def greet(self, request: requests.Greeting, caller: Caller) -> Answer:
        """InUseError for a trainer that this writer cannot see, WriterError for one that comes too late."""
        check_version(request)
        trainer, memory, visit = self.trainer, self.held_memory, request.visit
        trainer.knows_losers(request.losers)
        if caller.channel is not trainer.channel:
            await memory.until_handed_over()
        self._check_welcome(visit)
        lost = [] if visit else await self.run.lost()  # before anything changes
        self._check_welcome(visit)
        process = _process_of(caller.channel, visit)
        lives = process != trainer.process and trainer.process.alive
        taken = request.takeover and lives and not trainer.left
        if taken:
            self._dispossess(process.pid)
        copies = memory.copies.values() if visit else ()  # no trainer goes on in them
        shown = [*memory.arenas.values(), *copies]
        alive = lives and not trainer.dead
        adopts = not alive and caller.channel is not trainer.channel and not visit
        gone = trainer.dispossessed or (self._previous_gone and (not lives or (trainer.left and self._unlocked())))
        reply = requests.GreetingReply(
            pid=os.getpid(),
            alive=alive,
            taken=taken,
            trainer=trainer.pid,
            since=trainer.since,
            gone=gone,
            lost=lost,
            arenas=[arena.id.hex() for arena in shown],
            foreign=list(memory.foreign),
            layouts=memory.layouts_in_use(shown),
            digests=memory.known_digests(),
            writing=list(self.parts.reads),
            acquires=[(a.epoch, a.nonce, str(a.restored) if a.restored else None) for a in self.run.acquires],
            faults=self.watch.hand_over() if adopts else [],
            losers=trainer.losers(process),
        )
        if adopts:
            self._adopted_by(process, caller.channel, gone)
        return Answer(reply, tuple(arena.fd for arena in shown))

    def _check_welcome(self, visit: bool) -> None:
        if not visit:
            self.server.check_stays()

    def _adopted_by(self, process: Process, channel: Channel, gone: bool) -> None:
        """This is our trainer from now on. `gone`: none before it can write to the arenas any more."""
        self._previous_gone = gone
        self._lingering = self.trainer.left or (self._lingering and not gone)
        self.trainer.adopted_by(channel, process)
        if self._lingering and not gone:
            self.background.spawn(self._await_let_go(self.trainer.adoptions))
        self._await_death()

    def _unlocked(self) -> bool:
        """Whether nobody has locked any memory, but for what the present trainer has: nobody else copies further."""
        return self.held_memory.unlocked(None if self.trainer.left else self.trainer.adoptions)

    async def _await_let_go(self, adoptions: int) -> None:
        """The trainer before lives, has left, and was still copying when the present one came, which waits for that."""
        while adoptions == self.trainer.adoptions and not self._previous_gone:
            if self._unlocked():
                self._tell_gone()
            await asyncio.sleep(LET_GO_S)

    # -- who has lost it --

    def _dispossess(self, taker: int) -> None:
        """Our trainer has lost the run: nothing is taken from it any more. It lives, and may go on writing where it
        did: nobody else ever does there, so that nobody has to wait for its end."""
        self.trainer.dispossess(
            f"process {taker} has taken this run over (takeover=True). Stop this one, or give it another location"
        )
        self.held_memory.disown()
        self.watch.stop()
        self.after_death.ended("left")

    @handles(requests.Lose)
    def lose(self, request: requests.Lose, caller: Caller) -> None:
        """Another job takes the run over, and may have no rank in the place of our trainer. What that one had is kept
        for whoever comes, as after a death."""
        if not self.trainer.dead and not self.server.left.is_set():
            self._dispossess(link.peer_pid(caller.channel.sock))
            self.after_death.outlive()

    @handles(requests.Whose)
    def whose(self, request: requests.Whose) -> requests.WhoseReply:
        owner = self.run.owner
        opened = None if owner is None else (owner.epoch, owner.nonce)
        return requests.WhoseReply(
            self.trainer.pid,
            opened,
            self.trainer.losers(self.trainer.process),
            self.run.roots,
            bool(request.proof) and self.run.sees(request.proof),
        )

    @handles(requests.OwnRun)
    async def own(self, request: requests.OwnRun) -> list[requests.PartsHere]:
        if self._looking is None or self._looking.done():  # it ends when an earlier trainer has lost the run
            self._looking = self.background.spawn(self._look_at_owner())
        return await self.opener.own(request)

    async def _look_at_owner(self) -> None:
        """Tell the trainer, soon, that another job has taken the run over, also if it saves nothing meanwhile."""
        while not self.server.left.is_set():
            await asyncio.sleep(OWNER_S)
            if self.trainer.dead or self.run.taking.locked():
                continue
            try:
                await self.run.check_owner(self.run.spoken_for())
            except FencedError as error:
                self.trainer.fenced(str(error))
                return
            except Exception as error:
                events.log.warning("who owns the run cannot be seen: %s", error)

    @handles(requests.Drop)
    async def drop(self, request: requests.Drop) -> bool:
        """Another run has begun where ours was."""
        begun = self.trainer.adoptions
        if not self.trainer.dead or not await self.run.replaced() or begun != self.trainer.adoptions:
            return False
        self.trainer.disown()
        self.trainer.closed = True
        for arena in list(self.held_memory.arenas):
            if not any(key == arena for key, _ in self.parts.reads):
                self.held_memory.release(requests.ReleaseArena(arena))
        events.log.warning("another run has begun in place of this one: its memory is released")
        self.after_death.leave_soon()
        return True

    @handles(requests.Taken)
    def taken(self, request: requests.Taken) -> None:
        """Another writer has these arenas as well, and goes on: nothing keeps us here if our trainer is dead, and these
        are all we have."""
        if self.trainer.dead and {arena.id.hex() for arena in self.held_memory.all()} <= set(request.arenas):
            self.trainer.disown()  # what we would do after its death is not ours to do any more
            self.after_death.leave_soon()


def _process_of(channel: Channel, visit: bool) -> Process:
    process = Process.of(link.peer_pid(channel.sock))
    if process.started < 0 and not visit:
        raise InUseError(
            "the memory of this run is held by a writer in another container, which cannot see this process"
        )
    return process
