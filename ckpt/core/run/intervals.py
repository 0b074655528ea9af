"""How often to save: the intervals of memory and of the tiers, and how all ranks change an automatic one together.

    Rank 0's writer measures what saving costs (`ckpt.core.writer.bookkeeper`) and proposes other intervals
        -> `propose` posts an `interval` order for a step well ahead -> every rank executes it by `change`

A rank that reads the order too late saves from memory what the new intervals want of the steps since, and fails by name
what only the old ones wanted. At a restore all ranks agree on the change that was ordered last, see `suspend`.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ckpt.core.cadence import cadence
from ckpt.core.cadence.cadence import MEMORY
from ckpt.core.cadence.ledger import Decision
from ckpt.core.ipc.heartbeat import Heartbeat
from ckpt.core.ipc.notes import CadenceNote
from ckpt.core.ipc.watch_requests import CadenceOf, SetCadence
from ckpt.core.ranks.orders import Order, Orders
from ckpt.core.ranks.world import World
from ckpt.core.run.save_plan import Change, Late, SavePlan
from ckpt.core.run.supervise.writer_client import start_thread
from ckpt.core.run.supervise.writer_supervisor import WriterSupervisor
from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.store import folder_of
from ckpt.subscribers import publish
from ckpt.tiers import Memory, Tier

AHEAD, AHEAD_S = 10, 10.0  # steps and seconds by which a change lies ahead of rank 0; of a single rank, one step


class Intervals:
    """Hold the intervals of one Checkpointer. `plan`: what the training loop asks. `began`: the intervals that an
    earlier start of this run used, if this one takes them over."""

    def __init__(
        self,
        world: World,
        orders: Orders,
        supervisor: WriterSupervisor,
        heartbeat: Heartbeat,
        memory: Memory | None,
        tiers: list[Tier],
        known: dict[str, Any],
    ) -> None:
        """known: the last decision of an earlier start, see `ckpt.core.run.ownership`"""
        self._world, self._orders, self._supervisor, self._heartbeat = world, orders, supervisor, heartbeat
        self._memory, self._tiers = memory, tiers
        auto = any(isinstance(one.every, cadence.Auto) for one in (memory, *tiers) if one is not None)
        every = dict(known.get("every") or {})
        first = [_first(tier.every, every.get(tier.url), cadence.FIRST_DURABLE) for tier in tiers]
        steps = _first(memory.every, every.get(MEMORY), cadence.FIRST_MEMORY) if memory is not None else 0
        self.plan = SavePlan(steps, first)
        self.began = known if auto and known else None
        self._number = -1  # of the order that changed the plan last

    def places(self) -> list[CadenceOf]:
        """Return what the writer decides about, see `ckpt.core.writer.bookkeeper`."""
        now = self.plan.newest
        found: list[CadenceOf] = []
        if self._memory is not None:
            found.append(CadenceOf(MEMORY, _wire(self._memory.every), now.memory, False))
        for tier, every in zip(self._tiers, now.tiers, strict=True):
            found.append(CadenceOf(tier.url, _wire(tier.every), every, folder_of(tier.url) is None))
        return found

    def propose(self, note: CadenceNote) -> None:
        """Order what the writer proposes. Returns immediately, because the thread that listens to the writer calls."""
        start_thread(lambda: self._propose(note.decision), "ckpt-intervals")

    def _propose(self, data: dict[str, Any]) -> None:
        try:
            fastest_s = (Decision(**data).step_s or self._heartbeat.usual_s) / 2
            ahead = AHEAD + (math.ceil(AHEAD_S / fastest_s) if fastest_s > 0 else 0)
            self._orders.post("interval", self._heartbeat.step + (ahead if self._world.size > 1 else 1), data)
        except CheckpointError as error:  # the writer proposes it again
            log.info("the save intervals stay as they are: %s", error)

    def change(self, order: Order) -> list[Late]:
        """Execute an interval order. Return the steps that this rank has decided by the old intervals."""
        decision = Decision(**order.body)
        decision.step = order.step
        old = self.plan.newest
        tiers = tuple(decision.every.get(tier.url, every) for tier, every in zip(self._tiers, old.tiers, strict=True))
        late = self.plan.change(Change(order.step, decision.every.get(MEMORY, old.memory), tiers))
        self._number = order.number
        if self._world.rank == 0:
            log.info("from step %d on: %s", order.step, "; ".join(cadence.lines(decision)))
        self._supervisor.standing.tell(SetCadence(asdict(decision)))
        publish("decided", order.step, every=dict(decision.every), why=dict(decision.why))
        return late

    # -- a restore, to which all ranks come --

    def suspend(self) -> list[Any]:
        """Execute no more orders until the state is restored. Return a list; the greatest of all ranks has the change
        that was ordered last, and goes to `begin`."""
        generation = self._orders.suspend()
        return [generation, self._number, self.plan.newest.memory, list(self.plan.newest.tiers)]

    def begin(self, agreed: list[Any]) -> None:
        """Use these intervals from any step on, and read the orders that are posted after the restore."""
        generation, _, memory, tiers = agreed
        self.plan.reset(Change(-1, memory, tuple(tiers)))
        self._number = -1
        self._orders.begin(generation + 1)


def _first(every: Any, known: Any, default: int) -> int:
    if not isinstance(every, cadence.Auto):
        return int(every)
    return known if type(known) is int and known >= 1 else default


def _wire(every: Any) -> int | tuple[float, float | None, float | None]:
    return (every.budget, every.mtbf_s, every.every_s) if isinstance(every, cadence.Auto) else int(every)
