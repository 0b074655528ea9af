"""Random schedules of ranks that post, read and execute orders.

They use the library's own channel (`ckpt.core.ranks.orders`) and plan (`ckpt.core.run.save_plan`). Each rank has a
training loop, a reading thread and posting threads. At each request to the key-value store, a seeded generator chooses
what happens first: steps, reads, posts and restores of any rank. A request may also fail before or after it took
effect. Training loops do not wait for each other, so that ranks are many steps apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.core.ranks.orders import Order, Orders
from ckpt.core.run.save_plan import Change, Late, SavePlan, StepDecision
from ckpt.errors import PeerError

SEEDS = 1500
CONTROL_SEEDS = 3000
SIZE, TIERS, RING = 3, {0, 1}, 2
EVENTS, DEPTH = 60, 3
INTERVALS = [0, 2, 3, 5]


class Broken(Exception):
    """Raised when an invariant does not hold."""


class FakeBoard:
    """A connection to the store of a simulated job."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim

    def _answer(self, work: Callable[[], Any]) -> Any:
        self._sim.interrupt()
        lost = self._sim.random.random() if self._sim.faults else 1.0
        if lost < 0.03:
            raise PeerError("lost before it arrived")
        found = work()
        if lost < 0.06:
            raise PeerError("done, but the reply was lost")
        self._sim.interrupt()
        return found

    def create(self, key: str, body: bytes) -> bytes:
        return self._answer(lambda: self._sim.store.setdefault(key, body))

    def has(self, keys: list[str]) -> bool:
        return self._answer(lambda: self._sim.store.keys() >= set(keys))

    def read(self, key: str) -> bytes:
        return self._answer(lambda: self._sim.store[key])


class FakeWorld:
    """Provides what `Orders` needs of a world."""

    prefix, size = "job/", SIZE

    def __init__(self, sim: Sim, rank: int) -> None:
        self._sim, self.rank = sim, rank

    def connect(self) -> FakeBoard:
        return FakeBoard(self._sim)


class Rank:
    """One rank. `at`: the last step of its loop; `saved`: tiers by step; `executed`: orders since the restore."""

    def __init__(self, sim: Sim, rank: int) -> None:
        self.sim, self.rank = sim, rank
        self.orders = sim.orders_class(FakeWorld(sim, rank))  # type: ignore[arg-type]
        self.plan: SavePlan = sim.plan_class(3, [2, 5])
        self.plan.sim = sim  # type: ignore[attr-defined]
        self.orders.hear("save", self.on_save)
        self.orders.hear("interval", self.on_interval)
        self.phase, self.restores, self.changed = "training", 0, -1
        self.forget()

    def forget(self) -> None:
        self.at, self.saved, self.executed = 0, dict[int, set[int]](), list[Order]()
        self.ordered = set[int]()
        self.ring: list[int] = []

    # -- the training loop --

    def step(self) -> None:
        self.at += self.sim.stride
        step = self.at
        found = self.plan.decide(step)
        self.saved[step] = set(found.tiers)
        if found.ordered:
            self.ordered.add(step)
        self.ring = [*self.ring, step][-RING:]

    def restore(self) -> None:
        """Advance a restore, in which all ranks take part, by one stage."""
        others = self.sim.ranks
        if self.phase == "training":
            self.post = [self.orders.suspend(), self.changed, self.plan.newest.memory, list(self.plan.newest.tiers)]
            self.phase = "agreeing"
        elif self.phase == "agreeing" and all(one.phase != "training" for one in others):
            generation, _, memory, tiers = max(one.post for one in others)
            self.plan.reset(Change(-1, memory, tuple(tiers)))
            self.changed = -1
            self.orders.begin(generation + 1)
            self.phase = "filling"
        elif self.phase == "filling":
            self.forget()
            self.restores += 1
            self.phase = "restored"
            self.orders.resume()

    # -- other threads --

    def read(self) -> None:
        self.orders.catch_up()

    def post_save(self) -> None:
        step = self.at + self.sim.random.choice([1, 2, 2, 4])
        self.orders.post("save", step, {"restores": self.restores}, join=self.sim.random.choice([None, self.at + 1]))

    def post_interval(self) -> None:
        some = [self.sim.random.choice(INTERVALS) for _ in range(3)]
        step = self.at + self.sim.random.choice([1, 2, 6])
        self.orders.post("interval", step, {"restores": self.restores, "every": some})

    def on_save(self, order: Order) -> None:
        self.note(order)
        if (late := self.plan.order(order.step)) is not None:
            self.save_late(late)

    def on_interval(self, order: Order) -> None:
        self.note(order)
        self.changed = order.number
        memory, *tiers = order.body["every"]
        for late in self.plan.change(Change(order.step, memory, tuple(tiers))):
            self.save_late(late)

    def note(self, order: Order) -> None:
        self.executed.append(order)
        if order.body["restores"] != self.restores:
            raise Broken(f"rank {self.rank} executes {order} after restore {self.restores}")

    def save_late(self, late: Late) -> None:
        """Save like `ckpt.core.run.saver.Saver.save_late`."""
        if late.has <= late.wants and late.step in self.ring:
            self.saved[late.step] = late.wants
        elif late.has != late.wants:
            self.sim.failed.add((self.restores, late.step))


class Sim:
    """One job. `failed`: steps that a rank reported as failed, each with the number of restores before it."""

    def __init__(self, seed: int, orders: type[Orders], plan: type[SavePlan], rank: type[Rank]) -> None:
        self.random, self.orders_class, self.plan_class = random.Random(seed), orders, plan
        self.stride = self.random.choice([1, 1, 3])
        self.store: dict[str, bytes] = {}
        self.failed: set[tuple[int, int]] = set()
        self.depth, self.faults = 0, self.random.random() < 0.5
        self.restoring, self.left = False, EVENTS
        self.ranks = [rank(self, number) for number in range(SIZE)]

    def interrupt(self) -> None:
        """Let other threads run first, at random."""
        if self.depth < DEPTH:
            while self.left > 0 and self.random.random() < 0.5:
                self.event()

    def event(self) -> None:
        self.left -= 1
        rank = self.random.choice(self.ranks)
        kind = self.random.random()
        if not self.restoring and kind < 0.03:
            self.restoring = True
            for one in self.ranks:
                one.phase = "training"
        self.depth += 1
        try:
            if kind < 0.5:
                self.loop(rank)
            elif kind < 0.75:
                rank.read()
            elif kind < 0.92:
                rank.post_save()
            else:
                self.ranks[0].post_interval()
        except PeerError:
            rank.orders._boards = None  # like the reader
        finally:
            self.depth -= 1

    def loop(self, rank: Rank) -> None:
        if self.restoring and rank.phase != "restored":
            rank.restore()
            self.restoring = any(one.phase != "restored" for one in self.ranks)
        else:
            rank.step()

    def run(self) -> None:
        while self.left > 0:
            self.event()
        self.depth, self.faults = DEPTH, False
        while self.restoring:
            for rank in self.ranks:
                self.loop(rank)
        for rank in self.ranks:
            rank.read()  # reconnects
        end = max(rank.at for rank in self.ranks) + 12
        for rank in self.ranks:
            while rank.at < end:
                rank.step()
        self.check()

    def check(self) -> None:
        """Check that every rank has read all orders and has done the same steps since the last restore."""
        first = self.ranks[0].executed
        if [one.number for one in first] != list(range(len(first))):
            raise Broken(f"rank 0 executes {[one.number for one in first]}")
        wanted = {-(-one.step // self.stride) * self.stride or self.stride for one in first if one.kind == "save"}
        for rank in self.ranks:
            if rank.executed != first:
                raise Broken(f"rank {rank.rank} executes {rank.executed}, rank 0 {first}")
            if not rank.ordered <= wanted:
                raise Broken(f"rank {rank.rank} saves {rank.ordered} for orders of {wanted}")
            for step in rank.saved:
                if (rank.restores, step) in self.failed:
                    continue
                if step in wanted and rank.saved[step] != TIERS:
                    raise Broken(f"rank {rank.rank} saves ordered step {step} in {rank.saved[step]}")
                if rank.saved[step] != self.ranks[0].saved.get(step):
                    raise Broken(f"step {step}: rank {rank.rank} saves it in {rank.saved[step]}, rank 0 not")


def search(
    seeds: int,
    orders: type[Orders] = Orders,
    plan: type[SavePlan] = SavePlan,
    rank: type[Rank] = Rank,
) -> str:
    """Return the first violation, or "" if there is none."""
    for seed in range(seeds):
        try:
            Sim(seed, orders, plan, rank).run()
        except Broken as broken:
            return f"seed {seed}: {broken}"
    return ""


@pytest.fixture(autouse=True)
def handlers_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an error in a handler end the schedule, though the library logs it."""

    def fail(*arguments: Any) -> None:
        raise

    monkeypatch.setattr("ckpt.core.ranks.orders.log.exception", fail)


def test_every_order_is_executed_at_one_step() -> None:
    """Or that step fails by name. No order from before a restore is executed after it."""
    assert search(SEEDS) == ""


def test_schedules_reach_difficult_cases() -> None:
    """They include late ranks with and without the step in memory, restores, joined and concurrent orders."""
    seen = dict.fromkeys(["late in memory", "late and lost", "restored", "two ordered", "late interval"], 0)

    class Watched(Rank):
        def save_late(self, late: Late) -> None:
            seen["late in memory" if late.step in self.ring else "late and lost"] += 1
            super().save_late(late)

        def on_interval(self, order: Order) -> None:
            seen["late interval"] += order.step <= self.at
            super().on_interval(order)

        def forget(self) -> None:
            seen["restored"] += self.phase == "filling"
            super().forget()

        def step(self) -> None:
            seen["two ordered"] += len(self.plan._ordered) > 1
            super().step()

    assert search(300, rank=Watched) == ""
    assert all(count > 20 for count in seen.values()), seen


class Twice(Orders):
    """Executes every fetched order."""

    def _execute(self, generation: int, number: int, raw: bytes) -> Order | None:
        if not self._suspended and generation == self._generation:
            self._next = number
        return super()._execute(generation, number, raw)


class SameGeneration(Orders):
    """Continues counting after a restore."""

    def begin(self, generation: int) -> None:
        pass


class ReadsOn(Orders):
    """Executes orders during a restore."""

    def suspend(self) -> int:
        return self._generation


class ExecutesItsOwn(Orders):
    """Executes its own posts, whether they reached the store or not."""

    def post(self, kind: str, step: int, body: Any, *, join: int | None = None) -> Order:
        try:
            return super().post(kind, step, body, join=join)
        except PeerError:
            if not self._suspended:
                self._handlers[kind](Order(self._generation, self._next, self._world.rank, kind, step, body))
            raise


class NextStep(Rank):
    """Saves the next step if it has passed the ordered one."""

    def on_save(self, order: Order) -> None:
        self.note(order)
        if order.step <= self.at:
            self.plan.order(self.at + 1)
        else:
            self.plan.order(order.step)


class WithoutLock(SavePlan):
    """Decides first, and records the decision later."""

    def decide(self, step: int) -> StepDecision:
        before = list(self._decided), list(self._ordered), list(self._on_purpose)
        found = super().decide(step)
        decided, ordered, on_purpose = list(self._decided), list(self._ordered), list(self._on_purpose)
        self._decided.clear()
        self._decided.extend(before[0])
        self._ordered = before[1]
        self.sim.interrupt()  # type: ignore[attr-defined]
        self._ordered = [*ordered, *self._ordered[len(before[1]) :]]
        self._decided.clear()
        self._decided.extend(decided)
        self._on_purpose.clear()
        self._on_purpose.extend(on_purpose)
        return found


class OneOrder(SavePlan):
    """Remembers only the last ordered step."""

    def order(self, step: int) -> Late | None:
        late = super().order(step)
        self._ordered = self._ordered[-1:]
        return late


class KeepsOldSteps(Rank):
    """Does not check earlier steps when the interval changes."""

    def on_interval(self, order: Order) -> None:
        self.note(order)
        self.changed = order.number
        memory, *tiers = order.body["every"]
        self.plan.change(Change(order.step, memory, tuple(tiers)))


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"orders": Twice}, id="a number is executed twice"),
        pytest.param({"rank": NextStep}, id="a rank saves the next step instead"),
        pytest.param({"plan": WithoutLock}, id="the loop decides without the lock"),
        pytest.param({"plan": OneOrder}, id="one order displaces another"),
        pytest.param({"rank": KeepsOldSteps}, id="a late rank keeps the steps of the old interval"),
        pytest.param({"orders": SameGeneration}, id="a restore keeps the generation"),
        pytest.param({"orders": ReadsOn}, id="orders are read during a restore"),
        pytest.param({"orders": ExecutesItsOwn}, id="a rank executes what it could not post"),
    ],
)
def test_negative_control_broken_rule_is_found(broken: dict[str, Any]) -> None:
    """Each case breaks a rule of `ckpt.core.ranks.orders`."""
    found = search(CONTROL_SEEDS, **broken)
    print(found)
    assert found, "the model does not detect it"
