"""A slot that is being filled, as its writer follows it: it is written as far as it is there.

The trainer copies a snapshot into the slot in the order of its bytes, and moves the fill mark behind them
(`ckpt.ipc.arena`). What was written of a snapshot that is never sealed is taken away again, and nothing is named before
two things are there: the seal, after which all is digested, and the trainer's request that the slot be written. Whoever
waits for neither in vain: a trainer that has died, has lost the run, or does not go on, ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.checkpoint.write import WrittenPart
from ckpt.errors import SaveError
from ckpt.failpoints import point
from ckpt.ipc.arena import SEALED, Arena, Label

LOOK_S = 0.002  # between two looks at the mark
STALLED_S = 5.0  # without anything new, until it is given up: others may want to write there


@dataclass(eq=False)
class Following:
    """One slot on its way to one tier. `label`: what it was found with; `alive()`: whether its trainer still has the
    run. Used in the event loop of the writer."""

    arena: Arena
    slot: int
    label: Label
    alive: Callable[[], bool]
    task: asyncio.Task[WrittenPart | None] | None = None
    waited_s: float = 0.0  # for bytes that were not there yet
    is_wanted: bool = False
    _there: int = 0
    _stopped: bool = False
    _moved: float = field(default_factory=time.monotonic)  # when there was anything new
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one looks for all

    def is_of(self, arena: Arena, slot: int, label: Label) -> bool:
        mine = self.label
        return (arena, slot) == (self.arena, self.slot) and (label.order, label.attempt) == (mine.order, mine.attempt)

    def stop(self) -> None:
        """Somebody has better use for the tier."""
        self._stopped = True

    async def want(self) -> WrittenPart | None:
        """It is to be written: what has become of that, None if it has to be written anew."""
        self.is_wanted = True
        assert self.task is not None
        return await asyncio.shield(self.task)

    # -- what the writing waits for --

    async def until(self, nbytes: int) -> None:
        """Until so many bytes are there. SaveError if they never will be."""
        began = time.monotonic()
        async with self._turn:
            while self.look() < nbytes:
                await asyncio.sleep(LOOK_S)
            self.waited_s += time.monotonic() - began

    async def sealed(self) -> None:
        """Until all is there, and stays."""
        while self.look() < self.label.data_size or self.label.state != SEALED:
            await asyncio.sleep(LOOK_S)
        point("follow.sealed")

    async def wanted(self) -> None:
        """Until the trainer has asked for it."""
        point("follow.stored")
        self._moved = time.monotonic()
        while not self.is_wanted:
            self.look()
            await asyncio.sleep(LOOK_S)
        self.check()

    def check(self) -> None:
        """SaveError unless the slot holds what was sealed."""
        if self.label.state != SEALED or self.arena.label(self.slot) != self.label:
            raise self._gone()

    def look(self) -> int:
        """How much is there."""
        found, now = self.arena.filled(self.slot, self.label), self.arena.label(self.slot)
        if found is None or self._stopped or not (self.is_wanted or self.alive()):
            raise self._gone()
        if now is not None and now.state == SEALED != self.label.state and self.is_of(self.arena, self.slot, now):
            self.label, self._moved = now, time.monotonic()
        if found > self._there:
            self._there, self._moved = found, time.monotonic()
        if time.monotonic() > self._moved + STALLED_S:
            raise self._gone("its trainer does not go on")
        return self._there

    def _gone(self, why: str = "it is not there any more, or not of use") -> SaveError:
        assert self.label.attempt is not None
        return SaveError(f"step {self.label.attempt.step} cannot be followed: {why}")
