"""What is saved at each step: by the intervals of memory and tiers, and by orders (`ckpt.core.ranks.orders`).

The training loop calls `SavePlan.decide` once for each step. Other threads change the plan by `order` and `change`,
which return the steps that were decided too early for that. One lock makes a decision and a change exclude each other:
a step is either decided by the change, or returned by it.

    rank 0's writer measures what saving costs (`ckpt.core.writer.bookkeeper`) and proposes other intervals
        -> `Intervals.propose` posts an interval order for a step well ahead -> every rank executes it by `change`

A rank that reads the order too late saves from memory what the new intervals want of the steps since, and fails by name
what only the old ones wanted. At a restore all ranks agree on the change that was ordered last.
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
from ckpt.core.ipc.notes import CadenceNote
from ckpt.core.ipc.watch_requests import CadenceOf, SetCadence
from ckpt.core.ranks.orders import Order, Orders
from ckpt.core.ranks.world import World
from ckpt.core.run.supervise.writer_link import start_thread
from ckpt.core.run.supervise.writer_supervisor import WriterSupervisor
from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.store import folder_of
from ckpt.subscribers import publish
from ckpt.tiers import Memory, Tier

REMEMBERED = 1024  # decided steps, many more than one rank is ahead of another
AHEAD, AHEAD_S = 10, 10.0  # steps and seconds by which a change lies ahead of rank 0; of a single rank, one step


@dataclass(frozen=True, slots=True)
class Change:
    """Intervals from a step on, in steps; 0 for never. `memory`: of snapshots; `tiers`: of checkpoints in each tier."""

    step: int
    memory: int
    tiers: tuple[int, ...]

    def tiers_due(self, step: int) -> set[int]:
        return {i for i, every in enumerate(self.tiers) if every > 0 and step % every == 0}


@dataclass(slots=True)
class StepDecision:
    """What is saved at a step. `tiers`: their numbers; `ordered`: an order wants the step, in all of them; `memory`: a
    snapshot is due."""

    step: int
    tiers: set[int]
    memory: bool
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """A step that was decided too early for a change or an order. `has`: tiers that it went to; `wants`: to which it
    should have gone."""

    step: int
    has: set[int]
    wants: set[int]


class SavePlan:
    """Plan the saves of one rank. `newest`: the intervals that were set last."""

    def __init__(self, memory: int, tiers: Sequence[int]) -> None:
        self._lock = threading.RLock()  # a signal handler may close us within step()
        self._everywhere = set(range(len(tiers)))
        self.reset(Change(-1, memory, tuple(tiers)))

    def reset(self, change: Change) -> None:
        """Begin again with these intervals, because step numbers come again: no step is decided, none is ordered."""
        with self._lock:
            self.newest = Change(-1, change.memory, change.tiers)
            self._changes = [self.newest]
            self._ordered: list[int] = []  # each is served by the first step that is not below it
            self._decided: deque[StepDecision] = deque(maxlen=REMEMBERED)
            self._on_purpose: deque[int] = deque(maxlen=REMEMBERED)  # steps that went to all tiers whatever the plan

    def at(self, step: int) -> Change:
        """Return the intervals that hold at a step."""
        return next((one for one in reversed(self._changes) if one.step <= step), self._changes[0])

    # -- the training loop --

    def decide(self, step: int) -> StepDecision:
        """Decide what is saved at this step, once: the next call for the same step returns the same."""
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
        """Note that a step went to all tiers on purpose, on all ranks."""
        with self._lock:
            self._on_purpose.append(step)

    # -- orders, in other threads --

    @property
    def awaits_step(self) -> bool:
        """Return True if an ordered step lies ahead."""
        return bool(self._ordered)

    def order(self, step: int) -> Late | None:
        """Have the first step saved that is not below this one. Return it if it was decided already."""
        with self._lock:
            passed = [one for one in self._decided if one.step >= step]
            if not passed:
                self._ordered.append(step)
                return None
            if passed[0] is self._decided[0] and len(self._decided) == REMEMBERED:
                return Late(step, set(), set(self._everywhere))  # so long ago that memory cannot have it
            first = passed[0]
            has = self._everywhere if first.step in self._on_purpose else first.tiers
            self._on_purpose.append(first.step)  # if it cannot be, it fails
            return Late(first.step, set(has), set(self._everywhere))

    def change(self, change: Change) -> list[Late]:
        """Change the intervals from a step on; later changes are forgotten. Return the steps that were decided by the
        old ones, and that the new ones save elsewhere."""
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
