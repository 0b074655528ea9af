"""Saves of each step by intervals and orders. `tests/model/test_orders_at_random.py` covers all orders of events."""

from __future__ import annotations

from ckpt.core.run.save_plan import REMEMBERED, Change, Late, SavePlan


def memory_steps(plan: SavePlan, steps: range) -> list[int]:
    return [step for step in steps if plan.decide(step).memory]


def test_new_intervals_start_at_their_step() -> None:
    """The old ones hold until then. The last change counts."""
    plan = SavePlan(2, [10])
    assert plan.change(Change(100, 5, (50,))) == []
    assert memory_steps(plan, range(90, 112)) == [90, 92, 94, 96, 98, 100, 105, 110]
    assert plan.at(90).tiers_due(90) == {0} and not plan.at(110).tiers_due(110) and plan.at(150).tiers_due(150) == {0}
    plan.change(Change(200, 1, (20,)))
    plan.change(Change(180, 3, (30,)))  # this one came later, so nothing starts at 200
    assert plan.at(300) == plan.newest == Change(180, 3, (30,)) and plan.at(179) == Change(100, 5, (50,))
    assert not memory_steps(SavePlan(0, [1]), range(10))  # 0 means never


def test_plan_accepts_many_future_changes() -> None:
    plan = SavePlan(1, [1])
    for step in range(10, 100, 10):
        plan.change(Change(step, step, (step,)))
    assert [plan.at(step).memory for step in range(5, 100, 10)] == [1, *range(10, 100, 10)]


def test_order_saves_first_step_from_its_number() -> None:
    """Steps need not be consecutive numbers. Several orders for one step are one save."""
    plan = SavePlan(1, [100, 0])
    assert plan.order(12) is None and plan.order(15) is None and plan.order(25) is None
    decided = {step: plan.decide(step) for step in (10, 20, 30, 40)}
    assert [step for step, one in decided.items() if one.ordered] == [20, 30]
    assert decided[20].tiers == {0, 1} and decided[40].tiers == set()


def test_repeated_step_keeps_its_decision() -> None:
    """A repeated step() call, after an interruption, keeps its order."""
    plan = SavePlan(1, [100])
    plan.order(5)
    assert plan.decide(5).ordered and plan.decide(5).ordered and not plan.decide(6).ordered


def test_order_for_a_passed_step_reports_it() -> None:
    """The reply lists the tiers of the step, by interval or by request."""
    plan = SavePlan(1, [10, 0])
    for step in range(3, 30, 3):
        plan.decide(step)
    plan.saved_everywhere(21)
    assert plan.order(28) is None
    assert plan.order(26) == Late(27, set(), {0, 1})
    assert plan.order(29) is None and plan.order(20) == Late(21, {0, 1}, {0, 1})
    plan.decide(30)
    assert plan.order(30) == Late(30, {0, 1}, {0, 1})  # ordered by 28 and 29
    for step in range(31, 31 + REMEMBERED):
        plan.decide(step)
    assert plan.order(7) == Late(7, set(), {0, 1})  # too long ago to know


def test_late_intervals_report_steps_that_differ() -> None:
    """Requested saves of steps stay unchanged."""
    plan = SavePlan(1, [2, 6])
    for step in range(1, 13):
        plan.decide(step)
    plan.saved_everywhere(9)
    assert plan.change(Change(6, 1, (3, 6))) == [Late(8, {0}, set()), Late(10, {0}, set())]
    assert plan.change(Change(12, 1, (6, 0))) == [Late(12, {0, 1}, {0})]


def test_reset_removes_steps_and_orders() -> None:
    """Step numbers repeat after a restore."""
    plan = SavePlan(1, [10])
    plan.decide(5)
    plan.order(7)
    plan.change(Change(8, 2, (20,)))
    plan.reset(plan.newest)
    assert not plan.decide(8).ordered and not plan.awaits_step
    assert plan.order(5) == Late(8, set(), {0}) and plan.at(0) == Change(-1, 2, (20,))
