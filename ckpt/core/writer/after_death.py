"""After the trainer's death, or its end: what is in memory is made durable, reported, kept for a while and let go of.

died, left   persist the ring, keep the memory for the next incarnation, leave after `linger_s`
closed       finish what was begun, clean up, leave
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from ckpt import events, failpoints
from ckpt.core.format.manifest import Attempt
from ckpt.core.ipc.requests import Close, Leave
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.dispatch import Background, Caller, handles
from ckpt.core.writer.held_run import LOST_S, HeldRun, PresentTrainer
from ckpt.core.writer.memory import HAND_OVER_S, HeldMemory
from ckpt.core.writer.persist import Drain, Persister
from ckpt.core.writer.server import Server
from ckpt.core.writer.watch import TrainerWatch
from ckpt.errors import FencedError

RETRY_S = 5.0
LOOK_S = 0.2  # between two looks whether somebody has come


@dataclass(eq=False)
class AfterDeath:
    """Everything runs in the writer's event loop."""

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    persister: Persister
    drain: Drain
    books: Bookkeeper
    watch: TrainerWatch
    server: Server
    background: Background

    def died(self, adoptions: int) -> None:
        """The trainer of this adoption is dead to us."""
        if not self.trainer.dead and not self.server.left.is_set() and adoptions == self.trainer.adoptions:
            self.trainer.dead = True
            self.ended("died")
            self.outlive()

    def ended(self, how: str) -> None:
        """The trainer has "died", "left" or "closed"."""
        self.trainer.end()
        self.books.ended(how)

    def process_gone(self) -> None:
        """So is its process."""
        adoptions = self.trainer.adoptions
        if self.trainer.dead and not self.trainer.closed:
            # A crash was noticed before its end: something may have been sealed in between.
            self.background.spawn(self._drain_again(adoptions))
        self.died(adoptions)

    async def _drain_again(self, adoptions: int) -> None:
        await asyncio.to_thread(self.held_memory.digest_ring)
        await self.drain.drain(adoptions)

    def outlive(self) -> None:
        """Persist the ring, keep the memory for the next incarnation, leave at the deadline."""
        self.background.spawn(self._outlive(self.trainer.adoptions))

    async def _outlive(self, adoptions: int) -> None:
        failpoints.point("drain.started")
        deadline, drained = time.monotonic() + self.run.linger_s, asyncio.Event()
        self.watch.died(drained)
        await self._until_all_is_read(adoptions)
        await asyncio.to_thread(self.held_memory.digest_ring)
        try:
            await self._drain_until(adoptions, deadline)
            drained.set()
            await self._keep_until(adoptions, deadline)
        except FencedError as error:
            events.log.warning("%s", error)  # a newer job went on without us
        finally:
            if adoptions == self.trainer.adoptions:
                self.server.leave()
                await self._finish()

    async def _until_all_is_read(self, adoptions: int) -> None:
        """A trainer that died while it handed us the memory of a dead writer has sent some that we have yet to read."""
        end = time.monotonic() + HAND_OVER_S
        while not self.held_memory.handed_over.is_set() and adoptions == self.trainer.adoptions:
            if self.trainer.channel is None or time.monotonic() > end:
                return
            await asyncio.sleep(0.01)

    async def _drain_until(self, adoptions: int, deadline: float, owed: Collection[Attempt] | None = None) -> None:
        """What failed is tried again, until the deadline, or until somebody else has come for it or another run has
        begun there."""
        while adoptions == self.trainer.adoptions:
            attempts = None if owed is None else self.drain.wanted(owed)
            if await self.drain.drain(adoptions, attempts) or time.monotonic() >= deadline:
                return
            if await self.run.replaced():
                return
            await asyncio.sleep(min(RETRY_S, self.run.linger_s))

    async def _keep_until(self, adoptions: int, deadline: float) -> None:
        """As long as there is something to come for. FencedError if a newer job went on without us."""
        looked = float("-inf")
        while adoptions == self.trainer.adoptions and time.monotonic() < deadline and self.held_memory.something():
            if time.monotonic() > looked + RETRY_S:
                looked = time.monotonic()
                await self.run.check_owner()
                if await self.run.replaced():
                    events.log.warning("another run has begun in place of this one: its memory is released")
                    return
            await asyncio.sleep(min(LOOK_S, self.run.linger_s))

    # -- leaving --

    def leave_soon(self) -> None:
        """Nobody comes for what we have."""
        self.server.leave()
        self.background.spawn(self._finish())

    async def _finish(self) -> None:
        await self.books.finish()
        await self.persister.finish_begun()
        self.server.finished.set()

    @handles(Leave)
    def on_leave(self, request: Leave, caller: Caller) -> None:
        if self.trainer.channel not in (caller.channel, None):
            return  # another one has come in its place
        self.trainer.announced = self.trainer.left = True
        self.books.ended("left")
        self.died(self.trainer.adoptions)

    @handles(Close)
    async def on_close(self, request: Close, caller: Caller) -> None:
        """The trainer is done. Finish what was begun, clean up and leave.

        As long as something is unfinished it is dead to us: whoever opens the run finds its memory, and goes on with
        us.
        """
        trainer = self.trainer
        if trainer.channel not in (caller.channel, None):
            return  # another one has come in its place
        adoptions, owed = trainer.adoptions, self.persister.begun()
        trainer.announced = trainer.left = trainer.closed = True
        self.watch.stop()
        self.ended("left" if request.failed else "closed")
        if owed:
            trainer.dead = True
            await self._see_out(adoptions, owed)
            if adoptions != trainer.adoptions:
                return  # another one has come for it
        self.server.leave()
        try:
            await self.books.finish()
            try:
                # Who lost the run has to know, at its end at last.
                await asyncio.wait_for(self.run.check_owner(self.run.spoken_for()), LOST_S)
            except TimeoutError:
                pass  # a bucket that does not answer says nothing of that
            finally:
                await self.persister.close()
        finally:
            self.background.loop.call_later(0.05, self.server.finished.set)  # after the reply has left

    async def _see_out(self, adoptions: int, owed: set[Attempt]) -> None:
        """Have these made durable, which a trainer wanted to be before it closed. Until another one comes for them, or
        what failed has been tried for as long as memory is kept."""
        while adoptions == self.trainer.adoptions and self.persister.unfinished:
            await asyncio.sleep(0.01)
        try:
            await self._drain_until(adoptions, time.monotonic() + self.run.linger_s, owed)
        except FencedError as error:
            events.log.warning("%s", error)
        if adoptions == self.trainer.adoptions:
            await self.persister.finish_begun()
