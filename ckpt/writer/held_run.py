"""The run, as its writer holds it open: who owns it, and its durable tiers.

The owner is who the run log names last. The writer acts as that one, or as the one that its own trainer is about to be:
a restore may open the next epoch while a checkpoint is on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from ckpt.checkpoint.open_tier import OpenTier
from ckpt.errors import CheckpointError, FencedError, StoreError, UsageError
from ckpt.format.manifest import Attempt
from ckpt.ipc.requests import Owner, Successor
from ckpt.runlog.log import Acquire, RunLog
from ckpt.writer.dispatch import handles
from ckpt.writer.present_trainer import PresentTrainer

LOST_S = 5.0  # for a tier to say which run it is
T = TypeVar("T")


class HeldRun:
    """`tiers`: the nearest first. What the trainer said when it opened the run: `linger_s`, how long memory is kept
    for the next one; `commit_s`, how long the parts of other ranks are waited for; `first_try`, of all parts."""

    def __init__(self, trainer: PresentTrainer) -> None:
        self._trainer = trainer
        self.tiers: list[OpenTier] = []
        self.owner: Acquire | None = None
        self.successor = ""  # the nonce of the owner that our trainer is about to be
        self.acquires: list[Acquire] = []  # the history that the snapshots in memory belong to
        self.taking = asyncio.Lock()  # held while the run is taken over by us
        self.linger_s, self.commit_s, self.first_try = 600.0, 600.0, 0

    # -- who owns it --

    def mine(self) -> Acquire:
        """As whom we write. UsageError before the run was opened."""
        if self.owner is None:
            raise UsageError("the run has not been opened")
        return self.owner

    def become(self, owner: Acquire) -> None:
        """We act as this one from now on."""
        if self.owner is None or (owner.epoch, owner.nonce) != (self.owner.epoch, self.owner.nonce):
            self.owner = owner
            self.acquires.append(owner)

    @handles(Successor)
    def know_successor(self, request: Successor) -> None:
        self.successor = request.nonce

    def succeed(self, log: RunLog) -> None:
        """Go on as the owner that the log names, if it is the successor: the trainer may die before it can say so."""
        if log.state.acquires and log.state.acquires[-1].nonce == self.successor:
            self.become(log.state.acquires[-1])

    async def as_owner(self, log: RunLog, act: Callable[[Acquire], Awaitable[T]]) -> T:
        """Do this as whoever we are; once more, if it is we ourselves who are taking over meanwhile."""
        while True:
            mine = self.mine()
            try:
                return await act(mine)
            except FencedError:
                async with self.taking:
                    self.succeed(log)
                    if self.mine() == mine:
                        raise

    def check_still(self, begun: int) -> None:
        """FencedError if another trainer has come since this adoption: nothing of what it does must be undone."""
        if begun != self._trainer.adoptions:
            raise FencedError("another process has taken this run over")

    async def check_owner(self, tiers: Iterable[OpenTier] | None = None) -> None:
        """FencedError once another job has taken the run over: nobody will come for this memory then. `tiers`: where to
        look, by default everywhere."""
        for tier in (tier for tier in tiers or self.tiers if tier.opened):
            with contextlib.suppress(StoreError):
                await tier.log.refresh()
                self.succeed(tier.log)
                tier.log.check_owner(self.mine())

    # -- its tiers --

    def near(self, tier: OpenTier) -> OpenTier | None:
        """From where a further tier is filled: a nearest tier that is quicker than the network."""
        nearest = self.tiers[0] if self.tiers else None
        return nearest if nearest is not None and nearest is not tier and not nearest.store.remote else None

    def spoken_for(self) -> list[OpenTier]:
        """Those that this rank speaks for."""
        return [tier for tier in self.tiers if tier.role.place == 0]

    async def lost(self, tiers: Iterable[OpenTier] | None = None) -> list[str]:
        """Those that are not the run any more that was opened there; of one that does not answer nothing is known."""
        found = []
        for tier in (tier for tier in (self.tiers if tiers is None else tiers) if tier.opened):
            with contextlib.suppress(CheckpointError, TimeoutError):
                if not await asyncio.wait_for(tier.log.same(), LOST_S):
                    found.append(tier.url)
        return found


def acquire_of(owner: Owner) -> Acquire:
    """An owner, as messages have it."""
    epoch, nonce, restored = owner
    return Acquire(epoch, nonce, None if restored is None else Attempt.parse(restored))
