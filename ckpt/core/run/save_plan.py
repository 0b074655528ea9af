"""Decides where each step is saved, by save intervals of memory and tiers, and by orders (`ckpt.core.ranks.orders`).

The training loop calls `SavePlan.decide` once for each step. Other threads change the plan with `order` and `change`.
Both methods return the steps that were decided earlier although the change applies to them. A lock makes decisions and
changes mutually exclusive, so every step either follows the change or is returned by it.

    rank 0's writer measures the cost of saves (`ckpt.core.writer.bookkeeper`) and proposes other intervals
        -> `Intervals.propose` posts an interval order for a step well ahead -> every rank executes it in `change`

If a rank reads the order too late, it uses memory to save the steps that only the new intervals schedule, and fails the
checkpoints that only the old intervals schedule. At a restore, all ranks agree on the change that was ordered last.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.core.cadence import cadence
from ckpt.core.cadence.cadence import MEMORY
from ckpt.core.cadence.ledger import Decision
from ckpt.core.ipc.heartbeat import Heartbeat
from ckpt.core.ipc.messages import CadenceNote, CadenceOf, RunEvent
from ckpt.core.ranks.orders import Order, Orders
from ckpt.core.ranks.world import World
from ckpt.core.run.writer_link import start_thread
from ckpt.core.run.writer_supervisor import WriterSupervisor
from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.store import folder_of
from ckpt.subscribers import publish
from ckpt.tiers import Memory, Tier

REMEMBERED = 1024  # number of decided steps to remember, many more than a rank can be ahead of another
AHEAD, AHEAD_S = 10, 10.0  # steps plus seconds from rank 0's step to a change; with a single rank, 1 step


@dataclass(frozen=True, slots=True)
class Change:
    """Save intervals that apply from `step` on. `memory`, `tiers`: the intervals in steps; 0 means never."""

    step: int
    memory: int
    tiers: tuple[int, ...]

    def tiers_due(self, step: int) -> set[int]:
        return {i for i, every in enumerate(self.tiers) if every > 0 and step % every == 0}


@dataclass(slots=True)
class StepDecision:
    """The decision where a step is saved. `tiers`: numbers of the tiers. `memory`: True if a snapshot is scheduled.
    `ordered`: True if an order requests the step in all tiers."""

    step: int
    tiers: set[int]
    memory: bool
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """A step that was decided before a change or an order that applies to it. `has`: tiers that it was saved to.
    `wants`: tiers that it should be in."""

    step: int
    has: set[int]
    wants: set[int]


class SavePlan:
    """Plans the saves of this rank. `newest`: the save intervals that were set last."""

    def __init__(self, memory: int, tiers: Sequence[int]) -> None:
        self._lock = threading.RLock()  # a signal handler may close the run inside step()
        self._everywhere = set(range(len(tiers)))
        self.reset(Change(-1, memory, tuple(tiers)))

    def reset(self, change: Change) -> None:
        """Forget all decisions and orders, and use these intervals. Restores call this, because step numbers repeat."""
        with self._lock:
            self.newest = Change(-1, change.memory, change.tiers)
            self._changes = [self.newest]
            self._ordered: list[int] = []  # the first step at or after each of these numbers is saved to all tiers
            self._decided: deque[StepDecision] = deque(maxlen=REMEMBERED)
            self._on_purpose: deque[int] = deque(maxlen=REMEMBERED)  # steps saved to all tiers regardless of intervals

    def at(self, step: int) -> Change:
        """Return the intervals that apply at a step."""
        return next((one for one in reversed(self._changes) if one.step <= step), self._changes[0])

    # -- the training loop --

    def decide(self, step: int) -> StepDecision:
        """Decide where this step is saved. A repeated call for the last step returns the same decision."""
        with self._lock:
            if self._decided and self._decided[-1].step == step:
                return self._decided[-1]
            due = self.at(step)
            found = StepDecision(step, due.tiers_due(step), due.memory > 0 and step % due.memory == 0)
            if any(one <= step for one in self._ordered):
                found.ordered, found.tiers = True, set(self._everywhere)
                self._ordered = [one for one in self._ordered if one > step]
                self._on_purpose.append(step)
            self._decided.append(found)
            return found

    def saved_everywhere(self, step: int) -> None:
        """Record that all ranks save this step to all tiers, regardless of the save intervals."""
        with self._lock:
            self._on_purpose.append(step)

    # -- orders, in other threads --

    @property
    def awaits_step(self) -> bool:
        """Return True if an ordered step is still to come."""
        return bool(self._ordered)

    def order(self, step: int) -> Late | None:
        """Order a save of this step or the first one after it. If that step was already decided, return it."""
        with self._lock:
            passed = [one for one in self._decided if one.step >= step]
            if not passed:
                self._ordered.append(step)
                return None
            if passed[0] is self._decided[0] and len(self._decided) == REMEMBERED:
                return Late(step, set(), set(self._everywhere))  # too old to be still in memory
            first = passed[0]
            has = self._everywhere if first.step in self._on_purpose else first.tiers
            self._on_purpose.append(first.step)  # from now on, this step is saved to all tiers or fails
            return Late(first.step, set(has), set(self._everywhere))

    def change(self, change: Change) -> list[Late]:
        """Change the intervals from a step on, and drop earlier changes for later steps. Return the steps that were
        already decided, and that the new intervals save to other tiers."""
        with self._lock:
            past = [one for one in self._decided if one.step >= change.step and one.step not in self._on_purpose]
            late = [Late(one.step, one.tiers, change.tiers_due(one.step)) for one in past]
            for one in past:
                one.tiers = change.tiers_due(one.step)
            now = self.at(self._decided[-1].step) if self._decided else self._changes[0]
            self._changes = [one for one in self._changes if now.step <= one.step < change.step] + [change]
            self.newest = change
            return [one for one in late if one.has != one.wants]


class Intervals:
    """Holds the save intervals of a Checkpointer. `plan`: makes the decisions for the training loop. `began`: the
    intervals adopted from an earlier job attempt, if any."""

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
        """known: the last interval decision of an earlier job attempt, see `ckpt.core.run.ownership`."""
        self._world, self._orders, self._supervisor, self._heartbeat = world, orders, supervisor, heartbeat
        self._memory, self._tiers = memory, tiers
        auto = any(isinstance(one.every, cadence.Auto) for one in (memory, *tiers) if one is not None)
        every = dict(known.get("every") or {})
        first = [_first(tier.every, every.get(tier.url), cadence.FIRST_DURABLE) for tier in tiers]
        steps = _first(memory.every, every.get(MEMORY), cadence.FIRST_MEMORY) if memory is not None else 0
        self.plan = SavePlan(steps, first)
        self.began = known if auto and known else None
        self._number = -1  # number of the order that changed the plan last

    def places(self) -> list[CadenceOf]:
        """Return the intervals that the writer may adjust, see `ckpt.core.writer.bookkeeper`."""
        now = self.plan.newest
        found: list[CadenceOf] = []
        if self._memory is not None:
            found.append(CadenceOf(MEMORY, _wire(self._memory.every), now.memory, False))
        for tier, every in zip(self._tiers, now.tiers, strict=True):
            found.append(CadenceOf(tier.url, _wire(tier.every), every, folder_of(tier.url) is None))
        return found

    def propose(self, note: CadenceNote) -> None:
        """Order the intervals that the writer proposes, in the background, because the receiving thread calls this."""
        start_thread(lambda: self._propose(note.decision), "ckpt-intervals")

    def _propose(self, data: dict[str, Any]) -> None:
        try:
            fastest_s = (Decision(**data).step_s or self._heartbeat.usual_s) / 2
            ahead = AHEAD + (math.ceil(AHEAD_S / fastest_s) if fastest_s > 0 else 0)
            self._orders.post("interval", self._heartbeat.step + (ahead if self._world.size > 1 else 1), data)
        except CheckpointError as error:  # the writer proposes it again
            log.info("kept the present save intervals: %s", error)

    def change(self, order: Order) -> list[Late]:
        """Execute an interval order. Return the steps that this rank has already decided by the old intervals."""
        decision = Decision(**order.body)
        decision.step = order.step
        old = self.plan.newest
        tiers = tuple(decision.every.get(tier.url, every) for tier, every in zip(self._tiers, old.tiers, strict=True))
        late = self.plan.change(Change(order.step, decision.every.get(MEMORY, old.memory), tiers))
        self._number = order.number
        if self._world.rank == 0:
            log.info("from step %d on: %s", order.step, "; ".join(cadence.lines(decision)))
        self._supervisor.tell(RunEvent(decision=asdict(decision)))
        publish("decided", order.step, every=dict(decision.every), why=dict(decision.why))
        return late

    # -- a restore, in which all ranks take part --

    def suspend(self) -> list[Any]:
        """Execute no more orders until the state is restored. Return a list that describes the present intervals. Pass
        the greatest list of all ranks, which has the change that was ordered last, to `begin`."""
        generation = self._orders.suspend()
        return [generation, self._number, self.plan.newest.memory, list(self.plan.newest.tiers)]

    def begin(self, agreed: list[Any]) -> None:
        """Use the agreed intervals from now on, and read the orders that are posted after the restore."""
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
