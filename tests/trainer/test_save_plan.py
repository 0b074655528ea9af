"""What is saved at each step, by intervals and by orders. All orders of events are in
`tests/model/test_orders_at_random.py`."""

from __future__ import annotations

from ckpt.core.run.save_plan import REMEMBERED, Change, Late, SavePlan


def memory_steps(plan: SavePlan, steps: range) -> list[int]:
    return [step for step in steps if plan.decide(step).memory]


def test_new_intervals_hold_from_their_step_on() -> None:
    """Until then the old ones hold. The last change counts."""
    plan = SavePlan(2, [10])
    assert plan.change(Change(100, 5, (50,))) == []
    assert memory_steps(plan, range(90, 112)) == [90, 92, 94, 96, 98, 100, 105, 110]
    assert plan.at(90).tiers_due(90) == {0} and not plan.at(110).tiers_due(110) and plan.at(150).tiers_due(150) == {0}
    plan.change(Change(200, 1, (20,)))
    plan.change(Change(180, 3, (30,)))  # this one came later, so nothing begins at 200
    assert plan.at(300) == plan.newest == Change(180, 3, (30,)) and plan.at(179) == Change(100, 5, (50,))
    assert not memory_steps(SavePlan(0, [1]), range(10))  # 0 means never


def test_many_changes_can_lie_ahead() -> None:
    plan = SavePlan(1, [1])
    for step in range(10, 100, 10):
        plan.change(Change(step, step, (step,)))
    assert [plan.at(step).memory for step in range(5, 100, 10)] == [1, *range(10, 100, 10)]


def test_an_order_saves_the_first_step_from_there_on() -> None:
    """Steps need not be consecutive numbers. Several orders for one step are one save."""
    plan = SavePlan(1, [100, 0])
    assert plan.order(12) is None and plan.order(15) is None and plan.order(25) is None
    decided = {step: plan.decide(step) for step in (10, 20, 30, 40)}
    assert [step for step, one in decided.items() if one.ordered] == [20, 30]
    assert decided[20].tiers == {0, 1} and decided[40].tiers == set()


def test_a_step_is_decided_once() -> None:
    """A step() that was interrupted may be called again: its order is still there."""
    plan = SavePlan(1, [100])
    plan.order(5)
    assert plan.decide(5).ordered and plan.decide(5).ordered and not plan.decide(6).ordered


def test_an_order_for_a_passed_step_names_it() -> None:
    """With the tiers that the step went to: by its interval, or on purpose."""
    plan = SavePlan(1, [10, 0])
    for step in range(3, 30, 3):
        plan.decide(step)
    plan.saved_everywhere(21)
    assert plan.order(28) is None
    assert plan.order(26) == Late(27, set(), {0, 1})
    assert plan.order(29) is None and plan.order(20) == Late(21, {0, 1}, {0, 1})
    plan.decide(30)
    assert plan.order(30) == Late(30, {0, 1}, {0, 1})  # 28 and 29 have ordered it
    for step in range(31, 31 + REMEMBERED):
        plan.decide(step)
    assert plan.order(7) == Late(7, set(), {0, 1})  # too long ago to know


def test_late_intervals_name_the_steps_that_differ() -> None:
    """Steps that were saved on purpose stay as they are."""
    plan = SavePlan(1, [2, 6])
    for step in range(1, 13):
        plan.decide(step)
    plan.saved_everywhere(9)
    assert plan.change(Change(6, 1, (3, 6))) == [Late(8, {0}, set()), Late(10, {0}, set())]
    assert plan.change(Change(12, 1, (6, 0))) == [Late(12, {0, 1}, {0})]


def test_a_reset_forgets_steps_and_orders() -> None:
    """Step numbers come again after a restore."""
    plan = SavePlan(1, [10])
    plan.decide(5)
    plan.order(7)
    plan.change(Change(8, 2, (20,)))
    plan.reset(plan.newest)
    assert not plan.decide(8).ordered and not plan.awaits_step
    assert plan.order(5) == Late(8, set(), {0}) and plan.at(0) == Change(-1, 2, (20,))
