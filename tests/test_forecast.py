"""`ckpt.goodput.model` and `ckpt plan`: what it predicts is what happens to a job that is played step by step."""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import REPO
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.cli.plan import duration, lasting, plan, size, wanted
from ckpt.errors import UsageError
from ckpt.goodput import job_plan
from ckpt.goodput.job_plan import Faults, PlannedJob, PlannedTier
from ckpt.goodput.ledger import Account, Decision, End, Restore, Saves, SeenFault, StepRow
from ckpt.goodput.model import Costs, PlaceCost, best_interval, nice_steps, predict
from ckpt.store import open_store

LLAMA = ("--gpus", "16384", "--params", "405e9", "--step-s", "5.9")

# -- a job that is played --


def play(
    costs: Costs,
    mtbf_s: float,
    step_s: float,
    faults: int,
    *,
    recovering: bool = True,
    hangs: tuple[float, float] | None = None,
) -> tuple[float, float, dict[str, float]]:
    """Effective training time, wall-clock a fault, and the parts of a recovery a fault, of a job that makes one step
    after the other. `hangs`: their share, and how long one is not noticed; others are noticed at once."""
    rng = random.Random(7)
    every = [0 if math.isinf(p.every_s) else round(p.every_s / step_s) for p in costs.places]
    weights = [p.served for p in costs.places]
    parts = {"perceive": 0.0, "restart": 0.0, "restore": 0.0}
    now, step, seen, fault = 0.0, 0, 0, rng.expovariate(1 / mtbf_s)
    newest, writing = [0] * len(every), [list[tuple[float, int]]() for _ in every]
    while seen < faults:
        end = now + step_s
        if end < fault:
            step += 1
            for i, place in enumerate(costs.places):
                if every[i] and step % every[i] == 0:
                    writing[i].append((now + step_s + place.write_s, step))
                    end += place.cost_s
        if end < fault:
            now = end
            continue
        now, need = fault, 0
        for i in range(len(every)):
            newest[i] = max([newest[i], *(number for at, number in writing[i] if at <= now)])
            writing[i] = []
        while True:  # until a recovery is not hit by the next fault
            seen += 1
            need = max(need, rng.choices(range(len(every)), weights)[0])
            following = now + rng.expovariate(1 / mtbf_s) if recovering else math.inf
            perceive = costs.perceive_s
            if hangs is not None:
                perceive = hangs[1] if rng.random() < hangs[0] else 0.0
            for name, lasts in zip(parts, (perceive, costs.restart_s, costs.places[need].restore_s), strict=True):
                parts[name] += min(lasts, following - now)
                now = min(now + lasts, following)
            if now < following:
                break
        step = newest[need]
        newest = [step if i < need else min(step, number) for i, number in enumerate(newest)]
        fault = now + rng.expovariate(1 / mtbf_s)
    return step * step_s / now, now / seen, {name: value / seen for name, value in parts.items()}


GAMES = {
    "memory at every step": (Costs(1, 20, [PlaceCost("m", 0.02, 1, 1, 0.1)]), 300.0),
    "a save that blocks, and is long": (Costs(0, 5, [PlaceCost("d", 2, 10, 1, 2)]), 50.0),
    "a save that takes long in the background": (Costs(0, 5, [PlaceCost("d", 0.2, 20, 1, 9)]), 150.0),
    "two places": (Costs(1, 20, [PlaceCost("m", 0.01, 2, 1, 0.1, 0.7), PlaceCost("d", 0.5, 20, 5, 8, 0.3)]), 300.0),
    "three places": (
        Costs(
            1,
            3,
            [
                PlaceCost("m", 0.05, 1, 1, 0.1, 0.5),
                PlaceCost("d", 0.2, 20, 3, 5, 0.4),
                PlaceCost("s", 0.5, 50, 5, 20, 0.1),
            ],
        ),
        400.0,
    ),
    "faults as often as restarts": (
        Costs(5, 60, [PlaceCost("m", 0.05, 5, 1, 0.1, 0.5), PlaceCost("d", 0.2, 10, 3, 5, 0.5)]),
        60.0,
    ),
}


@pytest.mark.parametrize("recovering", [True, False])
@pytest.mark.parametrize("name", GAMES)
def test_what_is_predicted_is_what_happens(name: str, recovering: bool) -> None:
    """Effective time, what is lost per fault, and each part of a recovery, within what 12,000 faults can tell."""
    costs, mtbf_s = GAMES[name]
    effective, wall_s, parts = play(costs, mtbf_s, 1.0, 12_000, recovering=recovering)
    found = predict(costs, mtbf_s, 1.0, recovering=recovering)
    assert found.invalid_s == pytest.approx((1 - effective) * wall_s, rel=0.03)
    assert found.effective == pytest.approx(effective, abs=0.006)
    assert found.wall_s == pytest.approx(wall_s, rel=0.03)
    for part, value in parts.items():
        assert found.parts[part] == pytest.approx(value, rel=0.02, abs=1e-9), part


def test_of_hangs_the_mean_is_enough() -> None:
    """A tenth of the faults is noticed after 30 s, the others at once: as if each was after 3 s."""
    costs = Costs(3, 20, [PlaceCost("m", 0.05, 2, 1, 0.1)])
    effective, wall_s, _ = play(costs, 400.0, 1.0, 12_000, hangs=(0.1, 30.0))
    assert predict(costs, 400.0, 1.0).invalid_s == pytest.approx((1 - effective) * wall_s, rel=0.03)


def test_the_game_is_a_judge() -> None:
    """Of a formula that forgets how long a write takes, or what saving costs, it says that it is wrong."""
    for name, wrong in (
        ("a save that takes long in the background", "write_s"),
        ("a save that blocks, and is long", "cost_s"),
    ):
        costs, mtbf_s = GAMES[name]
        effective, wall_s, _ = play(costs, mtbf_s, 1.0, 12_000)
        broken = replace(costs, places=[replace(costs.places[0], **{wrong: 0.0})])
        assert abs(predict(broken, mtbf_s).invalid_s / ((1 - effective) * wall_s) - 1) > 0.06, wrong


# -- by hand --


def test_by_hand() -> None:
    """A fault an hour; steps of 10 s, each saved for 0.1 s, safe after 2 s: what each part has to be, nearly."""
    costs = Costs(1.5, 30, [PlaceCost("m", 0.1, 10, 4, 2)])
    found = predict(costs, 3600, 10)
    assert found.perceive_s == pytest.approx(1.5, rel=0.01)
    assert found.restart_s == pytest.approx(30, rel=0.01)
    assert found.restore_s == pytest.approx(4, rel=0.02)
    assert found.saving_s == pytest.approx((3600 - 35.5) * 0.1 / 10.1, rel=0.005)
    assert found.recompute_s == pytest.approx(10 / 2 + 2, rel=0.03)  # half an interval, and the write
    assert found.unfinished_s == 5
    assert found.effective == pytest.approx(1 - (1.5 + 30 + 4 + 7 + 35.3) / 3600, abs=2e-4)
    assert found.wall_s == pytest.approx(3600)


def test_one_place_is_dalys_complete_model() -> None:
    """Of a save that blocks: e^(R/M) (e^((T + c)/M) - 1) M for every T of work."""
    m, t, c, r = 600.0, 100.0, 20.0, 90.0
    daly = t / (m * math.exp(r / m) * math.expm1((t + c) / m))
    costs = Costs(10, 60, [PlaceCost("d", c, t, 20, c)])
    assert predict(costs, m).effective == pytest.approx(daly, rel=1e-9)


def test_a_farther_place_is_read_when_any_fault_of_a_series_needs_it() -> None:
    """Where every recovery is hit by faults, the far place is what nearly all recoveries end with."""
    places = [PlaceCost("m", 0, 1, 0, 0, 0.9), PlaceCost("s", 0, 1, 100, 0, 0.1)]
    rare, often = (predict(Costs(0, 100, places), mtbf_s) for mtbf_s in (1e6, 25.0))
    assert rare.restore_s == pytest.approx(10, rel=0.01)
    assert often.effective < 0.001 and often.invalid_s == pytest.approx(25, rel=0.001)
    reading = 25 * math.exp(-4) * -math.expm1(-4)  # seconds a fault, if every recovery were from there
    assert often.restore_s == pytest.approx(reading, rel=0.02)


@given(
    mtbf_s=st.floats(1, 1e8),
    perceive_s=st.floats(0, 1e4),
    restart_s=st.floats(0, 1e5),
    nearer=st.floats(0, 1),
    shape=st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.01, 1e6), st.floats(0, 1e4), st.floats(0, 1e4)), min_size=2, max_size=2
    ),
    recovering=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_parts_add_up_and_worse_is_never_better(
    mtbf_s: float,
    perceive_s: float,
    restart_s: float,
    nearer: float,
    shape: list[tuple[float, float, float, float]],
    recovering: bool,
) -> None:
    """Nothing is negative, parts are what is lost, and slower restarts, restores and more faults never help."""
    shares = (nearer, 1 - nearer)
    places = [
        PlaceCost(str(i), cost, every, restore, write, share)
        for i, ((cost, every, restore, write), share) in enumerate(zip(shape, shares, strict=True))
    ]
    costs = Costs(perceive_s, restart_s, places)

    def effective(costs: Costs, mtbf_s: float = mtbf_s) -> float:
        return predict(costs, mtbf_s, recovering=recovering).effective

    found = predict(costs, mtbf_s, recovering=recovering)
    assert 0 <= found.effective <= 1 and all(value >= 0 for value in found.parts.values())
    assert found.invalid_s == pytest.approx((1 - found.effective) * found.wall_s, rel=1e-6, abs=1e-6 * found.wall_s)
    alone = nearer in (0, 1)  # then it is exact
    first_order = max(place.every_s + place.write_s for place in places) < mtbf_s / 10
    tiny = 1e-9 if alone else 1e-5
    if alone or first_order:
        assert effective(replace(costs, restart_s=restart_s * 1.5 + 1)) <= found.effective + tiny
        assert effective(replace(costs, perceive_s=perceive_s * 1.5 + 1)) <= found.effective + tiny
        slower = [replace(place, restore_s=place.restore_s * 1.5 + 1) for place in places]
        assert effective(replace(costs, places=slower)) <= found.effective + tiny
    if first_order:
        assert effective(costs, mtbf_s / 1.5) <= found.effective + tiny


def test_a_place_that_is_hardly_ever_needed() -> None:
    """Its loss is half an interval, and what is on its way, however small the rate of such faults is."""
    often, never = PlaceCost("m", 0.0, 1, 0, 0, 1.0), PlaceCost("s", 0.0, 100, 0, 8, 0.0)
    for share in (1e-3, 1e-9, 1e-15, 1e-300):
        places = [replace(often, served=1 - share), replace(never, served=share)]
        found = predict(Costs(0, 0, places), 1e5)
        assert found.places[1].recompute_s == pytest.approx(58, rel=1e-3), share
    for seconds in (700, 740, 900):  # of which hardly any is survived
        assert predict(Costs(seconds, 0, [often]), 1.0).effective < 1e-90


# -- how often to save --


def test_best_interval_by_hand() -> None:
    """Young's root where a save costs little; not below the bound; never where no fault comes."""
    assert best_interval(2.0, 10_000) == pytest.approx(math.sqrt(2 * 2 * 10_000), rel=0.02)
    assert best_interval(2.0, 10_000, 500.0) == 500.0
    assert best_interval(0.0, 10_000) == 0 and best_interval(0.0, 10_000, 3.0) == 3.0
    assert best_interval(1.0, math.inf) == math.inf and best_interval(math.inf, 5.0) == math.inf
    assert best_interval(0.0, math.inf, 2.0) == 2.0
    assert math.isfinite(best_interval(1e300, 1e308)) and math.isfinite(best_interval(1e-300, 1e-308))
    for wrong in ((-1.0, 5.0), (1.0, -5.0), (math.nan, 5.0), (1.0, math.nan), (1.0, 5.0, math.nan)):
        with pytest.raises(UsageError):
            best_interval(*wrong)


@given(cost=st.floats(1e-4, 100), mtbf=st.floats(1, 1e7))
@settings(max_examples=100, deadline=None)
def test_no_other_interval_is_better(cost: float, mtbf: float) -> None:
    """Of a save that blocks, half and twice the interval lose more, and nothing is more than 1 % of the loss better."""

    def lost(every_s: float) -> float:
        return 1 - predict(Costs(0, 0, [PlaceCost("d", cost, every_s, 0, cost)]), mtbf).effective

    best = best_interval(cost, mtbf)
    if cost < mtbf / 2:
        assert lost(best) <= min(lost(best * f) for f in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)) * 1.01


def test_nice_steps() -> None:
    """The nearest of 1, 2, 5, 10, … by ratio, at least one, and never for what is infinite."""
    found = [nice_steps(steps * 0.1, 0.1) for steps in (0.01, 1, 1.4, 1.5, 3, 3.2, 7, 7.2, 14, 15, 99, 1000, 3.3e6)]
    assert found == [1, 1, 1, 2, 2, 5, 5, 10, 10, 20, 100, 1000, 5_000_000]
    assert nice_steps(math.inf, 1.0) == 0
    for wrong in ((1.0, 0.0), (math.nan, 1.0), (1.0, math.nan), (-1.0, 1.0), (1.0, math.inf)):
        with pytest.raises(UsageError):
            nice_steps(*wrong)


def job(**changes: Any) -> PlannedJob:
    return replace(PlannedJob(1024, 1e12, 2.0), **changes)


def test_a_place_is_saved_to_for_the_faults_that_nearer_ones_do_not_survive() -> None:
    """By Young's root with their rate, not below what the place can take, memory within its budget."""
    faults = Faults(10_000, {"process": 0.75, "all": 0.25})
    near, far = (
        PlannedTier("memory", 0.02, 0.1, 1, ("process",), share=0.001),
        PlannedTier("shared", 0.5, 10, 9, job_plan.CLASSES),
    )
    first, last = job_plan.cadences(job(), faults, [near, far])
    assert first.every == 10  # 0.02 s are 0.1 % of 20 s, where the root is 23 s
    assert last.every == 100  # the root of 2 x 0.5 x 40,000 is 200 s
    tight = job_plan.cadences(job(), faults, [replace(near, share=0.0002), far])[0]
    assert tight.every == 50 and "every 10 would lose least" in tight.note and "--budget" in tight.note
    assert not first.note and not last.note
    rare = replace(faults, mtbf_s=1_000_000.0)  # the root of 2 x 0.5 x 4,000,000 is 2,000 s
    bound = job_plan.cadences(job(), rare, [near, replace(far, write_s=300.0)])[1]
    assert bound.every == 2000  # not under 3,000 s: 1,500 steps
    assert "every 1,000 would lose least" in bound.note and "a tenth of the time" in bound.note
    assert job_plan.served([first, last], faults.shares, 2.0) == {"memory": 0.75, "shared": 0.25}
    given_by_hand = [replace(near, every=1000), replace(far, every=1, write_s=0.1)]
    assert job_plan.served(given_by_hand, faults.shares, 2.0) == {"memory": 0.0, "shared": 1.0}  # it is newer there


def test_the_replica_is_sent_what_memory_has() -> None:
    """As often as the network takes it, and its cost counts when memory's cadence is chosen."""
    faults = Faults(10_000, {"process": 0.5, "node": 0.5})
    near, copy = (
        PlannedTier("memory", 0.02, 0.1, 1, ("process",)),
        PlannedTier("replica", 0.16, 45, 1, ("process", "node")),
    )
    first, second = job_plan.cadences(job(), faults, [near, copy])
    assert (first.every, second.every) == (20, 40)  # the root is 60 s: 30 steps; 45 s are more than 40


def test_nothing_survives() -> None:
    """Where no place serves a kind of fault, that is said, and where none is needed, it is not saved to."""
    with pytest.raises(UsageError, match=r"nothing survives 25\.0% of the faults \(all\)"):
        near = PlannedTier("memory", 0.02, 0.1, 1, ("process",))
        job_plan.plan(job(), Faults(10_000, {"process": 0.75, "all": 0.25}), [near])
    found = job_plan.plan(job(), Faults(10_000, {"process": 1.0}), job_plan.places(job()))
    assert [place.every for place in found.places][2] == 0


def test_a_bound_gives_way_where_it_would_cost_too_much() -> None:
    """A shared place that is busy for a tenth of the time leaves next to nothing here: it is written to more often, in
    the end one write after the other, and that is said."""
    far = PlannedTier("shared", 0.5, 1350.0, 900, job_plan.CLASSES)
    faults = Faults(3600.0)
    (found,) = job_plan.cadences(job(step_s=1.0), faults, [far])
    assert found.every == 1400 and "all the time here" in found.note and "1.13 %" in found.note
    assert job_plan.expected(job(step_s=1.0), faults, [found]).effective > 0.4
    assert job_plan.expected(job(step_s=1.0), faults, [replace(far, every=20_000)]).effective < 0.012
    (fifth,) = job_plan.cadences(job(step_s=1.0), replace(faults, mtbf_s=200_000), [replace(far, write_s=500.0)])
    assert 2500 <= fifth.every < 5000 and "a fifth of the time" in fifth.note
    shown = told("--gpus", 8, "--state", "1TB", "--step-s", 1, "--mtbf", "1h")
    assert shown["forecast"]["effective"] > 0.35
    assert any("all the time here" in note for note in shown["notes"])


def test_what_serves_nothing_is_not_saved_to() -> None:
    """Where it costs something. What the user gave stays, and so does memory that a replica is made of."""
    faults = Faults(10_000, {"process": 0.5, "node": 0.25, "all": 0.25})
    memory, local = (
        PlannedTier("memory", 0.02, 0.1, 1, ("process",)),
        PlannedTier("local", 0.3, 1, 1, ("process", "host")),
    )
    far = PlannedTier("shared", 0.02, 1, 2, job_plan.CLASSES)
    found = job_plan.cadences(job(), faults, [memory, local, far])
    assert [bool(one.every) for one in found] == [True, False, True]
    found = job_plan.cadences(job(), faults, [memory, replace(local, every=9), far])
    assert found[1].every == 9
    often = job_plan.cadences(job(), faults, [replace(memory, cost_s=2.0), replace(far, every=20)])
    assert [one.every for one in often] == [0, 20]
    copy = PlannedTier("replica", 0.01, 0.5, 1, ("process", "node"))
    only = Faults(10_000, {"process": 0.0, "node": 0.75, "all": 0.25})
    assert [bool(one.every) for one in job_plan.cadences(job(), only, [memory, copy, far])] == [True, True, True]
    none = Faults(10_000, {"all": 1.0})
    assert [one.every for one in job_plan.cadences(job(), none, [memory, copy, far])][:2] == [0, 0]


def test_one_write_is_over_before_the_next_begins() -> None:
    """Also where the user says otherwise; a save that blocks is written meanwhile. No mean rate is above the peak."""
    faults = Faults(10_000, {"process": 1.0})
    (given,) = job_plan.cadences(job(), faults, [PlannedTier("shared", 0.5, 90, 9, job_plan.CLASSES, every=3)])
    assert given.every == 45 and "not every 3" in given.note
    (blocks,) = job_plan.cadences(job(), faults, [PlannedTier("shared", 90.0, 90, 9, job_plan.CLASSES, every=3)])
    assert blocks.every == 3 and not blocks.note
    (memory,) = job_plan.cadences(job(), faults, [PlannedTier("memory", 1e-6, 90, 9, ("process",))])
    assert memory.every * 2.0 >= 90 and "has to be over" in memory.note
    for place in (given, blocks, memory):
        (one,) = job_plan.storage(job(), [place])
        assert one.mean <= one.all_nodes
    text = told(*LLAMA, "--every", "shared=1")
    assert text["places"][2]["every"] == 5 and any("not every 1:" in note for note in text["notes"])


def steps_around(every: int) -> list[int]:
    """Nice numbers of steps within a factor of four, and never."""
    return [0, *(n * 10**k for k in range(7) for n in (1, 2, 5) if every / 4 < n * 10**k < every * 4)]


def better_than(job: PlannedJob, faults: Faults, found: list[PlannedTier]) -> float:
    """How much of what is lost another cadence of one place saves, at the best, that no bound forbids. Half a
    minute a week is not counted."""
    now, best = job_plan.expected(job, faults, found).effective, 0.0
    for place in found:
        for every in [0] if place.name == "replica" else steps_around(place.every or 1):  # it follows memory
            if place.note and 0 < every < (place.every or 0):
                continue
            without = ("memory", "replica") if every == 0 and place.name == "memory" else (place.name,)
            other = [replace(one, every=every) if one.name in without else one for one in found]
            if every == 0 and place.name == "shared":
                continue  # all of them need it
            best = max(best, (job_plan.expected(job, faults, other).effective - now - 5e-5) / (1 - now))
    return best


def test_as_often_as_is_best() -> None:
    """No other cadence of one place is more than a twentieth of what is lost better, for jobs of all kinds."""
    rng = random.Random(3)
    for _ in range(150):
        gpus = rng.choice([8, 64, 512, 4096, 16384])
        some = PlannedJob(gpus, gpus * 10 ** rng.uniform(7, 10), 10 ** rng.uniform(-0.5, 1.5))
        names = ["memory", "shared", *(["replica"] if gpus > 8 else []), *rng.choice([[], ["local"]])]
        faults = Faults(10 ** rng.uniform(3, 6.5))
        found = job_plan.cadences(some, faults, job_plan.places(some, names=names))
        assert better_than(some, faults, found) < 0.05, (some, faults, found)
    rarer = [replace(one, every=(one.every or 0) * 10) for one in found]
    assert better_than(some, faults, rarer) > 0.05  # negative control


@pytest.mark.parametrize(
    ("options", "goal"),
    [
        (("--gpus", 16384, "--params", "405B", "--step-s", 5.9), "0.995"),
        (("--gpus", 16384, "--params", "405B", "--step-s", 5.9, "--every", "memory=1"), "0.99"),
        (("--gpus", 64, "--params", "8B", "--step-s", 1.3, "--mtbf", "5h"), "99.2%"),
        (("--gpus", 8, "--state", "1TB", "--step-s", 1, "--mtbf", "1h"), "0.9"),
        (("--gpus", 1024, "--params", "70B", "--step-s", 20, "--mtbf", "30d"), "0.999"),
    ],
)
def test_what_it_would_take_is_what_it_takes(options: tuple[object, ...], goal: str) -> None:
    """What is shown is fed back, as it is shown: the goal is met, and it is not with 3 % more. Cadences are those that
    follow, so that rarer faults help where saving costs most."""
    options = (*options, "--goal", goal)
    found = told(*options)
    can = found["afford"]

    def met(*more: object) -> bool:
        plan = told(*options, *more)
        return bool(plan["forecast"]["effective"] >= plan["afford"]["goal"])

    def check(value: float | None, worse: float, *option: str) -> None:
        """Of an option `NAME` or `NAME NAME=`."""
        if value is None or value >= job_plan.ANY_S:
            return
        *before, last = option
        given = [[*before, last + text] if last.endswith("=") else [*option, text] for text in
                 (wanted(value).replace(" ", ""), f"{value * worse:.9g}s")]  # fmt: skip
        assert met(*given[0]), (given[0], value)
        assert not met(*given[1]), (given[1], value)

    check(can["restart_s"], 1.03, "--restart")
    check(can["perceive_s"], 1.03, "--hangs", "1", "--hang")
    check(can["mtbf_s"], 1 / 1.2, "--mtbf")  # cadences come in steps
    check(can["save_cost_s"], 2.0, "--save-cost", f"{can['place']}=")
    assert can["mtbf_s"] is not None and can["mtbf_s"] < job_plan.ANY_S


def test_cadences_follow_what_is_varied() -> None:
    """Faults that are rare enough are always enough, as saving is rarer then; by frozen cadences they would not be."""
    found = job_plan.plan(
        PlannedJob(8, 1e12, 1.0), Faults(3600.0), job_plan.places(PlannedJob(8, 1e12, 1.0), names=["memory", "shared"])
    )
    assert found.afford.mtbf_s is not None and found.afford.mtbf_s > 1e6
    frozen = job_plan.costs_of(found.job, found.faults, found.places)
    assert predict(frozen, 1e9).effective < 0.995


def test_the_table_of_causes() -> None:
    """It sums to the 419 interruptions of the paper, one every 3.1 hours; shares sum to 1."""
    assert sum(count for count, _ in job_plan.LLAMA3.values()) == 419
    assert pytest.approx(3.093, abs=0.001) == job_plan.LLAMA3_MTBF_S / 3600
    assert sum(Faults(1.0).shares.values()) == pytest.approx(1)
    assert job_plan.scaled_mtbf(32768) == pytest.approx(job_plan.LLAMA3_MTBF_S / 2)


def test_storage_by_hand() -> None:
    """1 TB on 1,024 ranks: slots in memory, one more than is kept elsewhere, 16 MiB pieces and ten requests a rank."""
    found = job_plan.plan(job(), Faults(20_000), job_plan.places(job()))
    memory, _, shared = found.storage
    assert memory.kept == 4 and memory.bytes == 4e12
    assert shared.kept == 4 and shared.objects == 1024 * (59 + 10)
    every_s = (found.places[2].every or 0) * 2.0
    assert shared.mean == pytest.approx(1e12 / every_s) and shared.day == pytest.approx(
        shared.objects * 86400 / every_s
    )


# -- measured --


def account(number: int, start: float, steps: int, **changes: Any) -> Account:
    """An incarnation that opens at `start`, restores for 2 s, and makes steps of 1 s, the first of 6 s."""
    rows = [StepRow(start + 8, 1, 1, 6.0)]
    rows += [StepRow(start + 8 + i, 1 + i, 1, 1.1, 0.06, 0.04, saves=1) for i in range(1, steps)]
    return Account(
        epoch=f"{number}.abc",
        world=4,
        boot="b",
        born=start - 5,
        opening=start - 1,
        opened=start,
        kept=start + 8 + steps,
        step=steps,
        beat=start + 7 + steps,
        restores=[Restore(start, 2.0, 1 if number > 1 else None, "memory" if number > 1 else "")],
        rows=rows,
        saves={"file:///r": Saves(2, seconds=3.0, nbytes=2_000_000)},
        **changes,
    )


def test_measured_by_hand() -> None:
    """Two interruptions: what was between them, what saves cost, what steps take."""
    died = account(1, 100.0, 50, end=End("died", 160.0, 160.5), faults=[SeenFault(158.5, "death", "x", ends=True)])
    hung = account(2, 180.0, 50, end=End("left", 260.0, 261.0), faults=[SeenFault(260.0, "hang", "x", ends=True)])
    last = account(3, 300.0, 50, decisions=[Decision(5, {"memory": 1}, costs={"file:///r": 0.3})])
    found = job_plan.measured([last, died, hung, replace(hung, rank=1, end=None)])
    assert found.world == 4 and found.step_s == pytest.approx(1.0)
    assert found.interruptions == 2
    assert found.training_s == pytest.approx(3 * (6 + 49 * 1.1)) and found.mtbf_s == pytest.approx(found.training_s / 2)
    assert found.crash_s == pytest.approx(158.5 - 157 - 1) and found.hang_s == pytest.approx(260 - 237 - 1)
    assert found.restart_s == pytest.approx(((180 - 158.5) + (300 - 260)) / 2 + 5)  # and what the first step took more
    assert found.cost_s == {"file:///r": 0.3, "memory": pytest.approx(0.1)}
    assert found.write_s == {"file:///r": 1.5} and found.restore_s == {"memory": 2.0}
    assert found.rank_bytes == 1_000_000
    assert found.costs()["places"]["shared"]["cost_s"] == 0.3 and found.costs()["places"]["memory"]["restore_s"] == 2.0


def test_measured_of_little() -> None:
    """No account, one without a step, one that goes on, one that was closed: nothing is made up."""
    assert job_plan.measured([]) == job_plan.Measured()
    empty = job_plan.measured([Account("1.abc")])
    assert empty.step_s is None and empty.mtbf_s is None and empty.cost_s == {}
    closed = account(1, 100.0, 9, end=End("closed", 120.0, 121.0))
    found = job_plan.measured([closed, account(2, 500.0, 9)])
    assert found.interruptions == 0 and found.mtbf_s is None and found.restart_s is None
    cut = job_plan.measured([account(1, 100.0, 9), account(2, 500.0, 9)])
    assert cut.interruptions == 1 and cut.restart_s is None  # when it ended, nobody knows


def test_a_hang_that_was_survived_is_no_end() -> None:
    """It was seen before the last step: neither what was noticed first, nor a hang. One that somebody ended by hand is
    an interruption, though the job was closed."""
    survived = SeenFault(130.0, "hang", "x", ends=True)
    died = account(
        1, 100.0, 50, end=End("died", 160.0, 160.5), faults=[survived, SeenFault(158.5, "death", "x", ends=True)]
    )
    found = job_plan.measured([died, account(2, 180.0, 50)])
    assert found.hang_s is None and found.crash_s == pytest.approx(158.5 - 157 - 1)
    assert found.restart_s == pytest.approx(180 - 158.5 + 5)
    closed = account(1, 100.0, 50, end=End("closed", 230.0, 230.5), faults=[SeenFault(187.0, "hang", "x")])
    found = job_plan.measured([closed, account(2, 250.0, 50)])
    assert found.interruptions == 1 and found.hang_s == pytest.approx(187 - 157 - 1)
    assert job_plan.measured([replace(closed, faults=[survived]), account(2, 250.0, 50)]).interruptions == 0


def test_what_is_fixed_is_not_scaled() -> None:
    """To fewer bytes, a restore still opens the run, and a snapshot still blocks; to more of them, it takes
    at least what is assumed for them, but not more than all of it, scaled."""
    small, large = PlannedJob(8, 8e9, 1.0), PlannedJob(8, 8e12, 1.0)
    costs = {"rank_bytes": 1e11, "places": {"memory": {"cost_s": 0.502, "restore_s": 10.8, "write_s": 4.0}}}
    (memory,) = job_plan.with_costs(costs, small, Faults(1e4), job_plan.places(small, names=["memory"]))[1]
    assert memory.cost_s == pytest.approx(0.002 + 0.005) and memory.restore_s == pytest.approx(0.8 + 0.1)
    assert memory.write_s == pytest.approx(0.04)
    costs = {"rank_bytes": 1e11, "places": {"shared": {"cost_s": 0.001, "write_s": 0.024, "restore_s": 0.3}}}
    (shared,) = job_plan.with_costs(costs, small, Faults(1e4), job_plan.places(small, names=["shared"]))[1]
    assert (shared.cost_s, shared.write_s, shared.restore_s) == (
        0.001,
        0.024,
        0.3,
    )  # less than what is fixed: as it was
    quick = {"rank_bytes": 1e9, "places": {"memory": {"restore_s": 0.5}}}
    (memory,) = job_plan.with_costs(quick, large, Faults(1e4), job_plan.places(large, names=["memory"]))[1]
    assert memory.restore_s == pytest.approx(0.8 + 1e12 / 25e9)  # as assumed
    tiny = {"rank_bytes": 1e9, "places": {"memory": {"restore_s": 0.001}}}
    (memory,) = job_plan.with_costs(tiny, large, Faults(1e4), job_plan.places(large, names=["memory"]))[1]
    assert memory.restore_s == pytest.approx(1.0)


# -- the command --


def run(*arguments: object) -> Result:
    return CliRunner().invoke(plan, [str(one) for one in arguments], catch_exceptions=False)


def told(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_llama_3() -> None:
    """419 faults in 54 days leave 56 s a fault for 99.5 %; the parts add up, and every number says where it is from."""
    found = told(*LLAMA)
    assert found["afford"]["invalid_s"] == pytest.approx(55.7, abs=0.1)
    seen = found["forecast"]
    parts = sum(seen[f"{part}_s"] for part in ("perceive", "restart", "restore", "recompute", "saving"))
    assert parts == pytest.approx(seen["invalid_s"]) == pytest.approx((1 - seen["effective"]) * seen["wall_s"])
    assert 0.98 < seen["effective"] < 0.995 and 10 < found["afford"]["restart_s"] < 50
    assert all(row["from"] for row in found["assumptions"])
    text = run(*LLAMA).output
    for words in ("NOT OURS", "effective training time: 99.", "ckpt.Memory(every=", "replicas=2", "restart at most"):
        assert words in text


def test_units() -> None:
    """Durations and sizes as people write them."""
    assert [duration(text) for text in ("90s", "5m", "3.1h", "2d", "250ms", "7", "1e3")] == pytest.approx(
        [90, 300, 11160, 172800, 0.25, 7, 1000]
    )
    assert [size(text) for text in ("5.7TB", "80GiB", "1e9", "3 MB", "2GB/s", "7")] == pytest.approx(
        [5.7e12, 80 * 2**30, 1e9, 3e6, 2e9, 7]
    )
    same = told("--gpus", 64, "--state", "1TB", "--step-s", "1500ms", "--mtbf", "0.5d")
    assert same["job"]["step_s"] == 1.5 and same["faults"]["mtbf_s"] == 43200
    assert told(*LLAMA, "--interruptions", 419)["faults"]["mtbf_s"] == pytest.approx(54 * 86400 / 419)
    half = told("--gpus", 512, "--params", "7B", "--step-s", 1, "--mtbf", "10h", "--of-gpus", 1024)
    assert half["faults"]["mtbf_s"] == pytest.approx(72000)
    assert size("400Gbit/s") == 50e9 and size("400gbit") == 50e9 and size("80 GiB") == 80 * 2**30
    first, *others = (
        told(*LLAMA, "--days", text, "--budget", share, "--goal", goal)
        for text, share, goal in (("54", "0.01", "0.995"), ("54d", "1%", "99.5%"), ("1296h", "1 %", ".995"))
    )
    assert others == [first, first]
    assert told(*LLAMA, "--machine", "blocks_s=5ms")["places"][0]["cost_s"] == pytest.approx(0.005, rel=0.4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*LLAMA, "--share", "process=0.9", "--share", "process=0.4"), "process is given twice"),
        ((*LLAMA, "--every", "memory=2", "--every", "memory=2"), "memory is given twice"),
        ((*LLAMA, "--machine", "network=400Gb/s"), "400GB for bytes, or 400Gbit for bits"),
        ((*LLAMA, "--state", "5tb"), "bits or bytes"),
        ((*LLAMA, "--machine", "open_s=5GB"), "a duration"),
        ((*LLAMA, "--machine", "felt=2"), "--machine felt"),
        ((*LLAMA, "--days", "54GB"), "--days"),
        ((*LLAMA, "--goal", "99.5"), "0.995 or 99.5%"),
        (("--gpus", 0, "--params", "7B", "--step-s", 1), "--gpus"),
        (("--gpus", "1" * 400, "--params", "7B", "--step-s", 1), "--gpus"),
        (("--params", "7B", "--step-s", 1), "give --gpus"),
        (("--gpus", 8, "--step-s", 1), "give --params or --state"),
        (("--gpus", 8, "--params", "7B"), "give --step-s"),
        (("--gpus", 8, "--params", "nan", "--step-s", 1), "--params"),
        (("--gpus", 8, "--params", "-7B", "--step-s", 1), "--params"),
        (("--gpus", 8, "--params", 0, "--step-s", 1), "--params"),
        (("--gpus", 8, "--params", "1e400", "--step-s", 1), "--params"),
        (("--gpus", 8, "--params", "1e17", "--step-s", 1), "the state"),
        (("--gpus", 8, "--state", "0GB", "--step-s", 1), "--state"),
        (("--gpus", 8, "--state", "5 parsecs", "--step-s", 1), "--state"),
        (("--gpus", 8, "--params", "7B", "--state", "1TB", "--step-s", 1), "give one"),
        (("--gpus", 8, "--params", "7B", "--step-s", 0), "--step-s"),
        (("--gpus", 8, "--params", "7B", "--step-s", "1 fortnight"), "--step-s"),
        (("--gpus", 8, "--params", "7B", "--step-s", "1e300"), "--step-s"),
        (("--gpus", 8, "--params", "7B", "--step-s", "2h", "--mtbf", "1h"), "longer than the time between faults"),
        ((*LLAMA, "--mtbf", 0), "--mtbf"),
        ((*LLAMA, "--mtbf", "inf"), "--mtbf"),
        ((*LLAMA, "--mtbf", "1h", "--interruptions", 3), "give one"),
        ((*LLAMA, "--of-gpus", 3), "--of-gpus"),
        ((*LLAMA, "--days", "nan"), "--days"),
        ((*LLAMA, "--goal", 1), "goal"),
        ((*LLAMA, "--goal", "nan"), "goal"),
        ((*LLAMA, "--share", "process=0.5"), "sum to 0.5"),
        ((*LLAMA, "--share", "gremlins=1"), "--share"),
        ((*LLAMA, "--share", "process"), "--share"),
        ((*LLAMA, "--hangs", 1.5), "--hangs"),
        ((*LLAMA, "--hangs", "nan"), "--hangs"),
        ((*LLAMA, "--bytes-per-param", "nan"), "--bytes-per-param"),
        ((*LLAMA, "--places", "memory,moon"), "moon"),
        ((*LLAMA, "--places", "memory"), "nothing survives"),
        ((*LLAMA, "--places", "shared", "--every", "memory=3"), "not among --places"),
        ((*LLAMA, "--every", "replica=3"), "--every memory"),
        ((*LLAMA, "--every", "memory=0"), "--every"),
        ((*LLAMA, "--machine", "cores=0"), "--machine cores"),
        ((*LLAMA, "--machine", "wheels=4"), "--machine"),
        ((*LLAMA, "--budget", 0), "--budget"),
        ((*LLAMA, "--price", "nan"), "--price"),
        (("--gpus", 8, "--params", "7B", "--step-s", 1, "--places", "memory,replica,shared"), "two nodes"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: tuple[object, ...], words: str) -> None:
    """Exit code 2, the option in the message, and no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.output, result.output


def test_no_progress_is_said() -> None:
    """Faults that come before a restart is over: about 0, never less, and in words."""
    found = told(*LLAMA, "--mtbf", "20s", "--restart", "10m")
    assert 0 <= found["forecast"]["effective"] < 1e-6 and "no progress" in found["notes"][0]
    assert "no progress" in run(*LLAMA, "--mtbf", "20s", "--restart", "10m").output
    assert not any("no progress" in note for note in told(*LLAMA)["notes"])


def test_what_is_given_counts(tmp_path: Path) -> None:
    """Options change what they name, and are called given."""
    options = (
        "--restart",
        "20s",
        "--every",
        "memory=7",
        "--save-cost",
        "shared=2s",
        "--keep",
        "shared=5",
        "--hang",
        "9s",
    )
    found = told(*LLAMA, *options, "--machine", "pcie=50GB", "--price", 20)
    memory, _, shared = found["places"]
    assert (memory["every"], shared["cost_s"], shared["keep"]) == (7, 2.0, 5)
    assert found["faults"]["restart_s"] == 20 and found["faults"]["hang_s"] == 9
    assert memory["write_s"] == pytest.approx(405e9 * 14 / 16384 / 50e9)
    assert found["price"] == pytest.approx(6 * 5.67 * 20)
    by_hand = {row["what"] for row in found["assumptions"] if row["from"] == "given"}
    assert by_hand >= {"restart_s", "hang_s", "pcie", "memory every", "shared cost_s", "mtbf"} - {"mtbf"}


def test_costs_come_back(tmp_path: Path) -> None:
    """What --json printed gives the same plan again, and at another size what is per byte is scaled."""
    options = ("--restart", "20s", "--save-cost", "shared=2s", "--restore", "memory=3s", "--hangs", "0.3")
    first = told(*LLAMA, *options)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(first))
    assert told(*LLAMA, "--costs", file)["forecast"] == first["forecast"]
    file.write_text(json.dumps(first["costs"]))
    assert told(*LLAMA, "--costs", file)["forecast"] == first["forecast"]
    half = told("--gpus", "16384", "--params", "202.5e9", "--step-s", "5.9", "--costs", file)
    assert half["places"][2]["cost_s"] == pytest.approx(0.002 + 1.998 / 2)
    assert told(*LLAMA, "--costs", file, "--restart", "9s")["faults"]["restart_s"] == 9
    file.write_text(json.dumps(told("--gpus", 16, "--params", "7B", "--step-s", 9, "--places", "memory,shared")))
    assert told(*LLAMA, "--costs", file)["faults"]["hang_s"] == told(*LLAMA)["faults"]["hang_s"]
    for wrong in ("", "[]", "{}", '{"costs": 3}', '{"places": {"moon": {}}}', '{"restart_s": "x"}', '{"places": [1]}'):
        file.write_text(wrong)
        result = run(*LLAMA, "--costs", file)
        assert result.exit_code == 2 and "Error" in result.output, wrong


def test_an_assumption_stays_one(tmp_path: Path) -> None:
    """What is saved is what was given or measured: read again, and saved again, everything has the source it had."""
    options = ("--restart", "20s", "--save-cost", "shared=2s", "--machine", "pcie=50GB", "--machine", "open_s=1500ms")
    first, file = told(*LLAMA, *options), tmp_path / "plan.json"
    file.write_text(json.dumps(first))
    again = told(*LLAMA, "--costs", file)
    assert again["forecast"] == first["forecast"] and again["assumptions"] == first["assumptions"]
    assert again["costs"] == first["costs"]
    assert set(first["costs"]["sources"]) == {"restart_s", "shared cost_s", "pcie", "open_s"}
    assert first["costs"]["machine"] == {"pcie": 50e9, "open_s": 1.5}
    file.write_text(json.dumps({"restart_s": 20, "places": {"shared": {"cost_s": 2}}}))  # by hand
    sources = {row["what"]: row["from"] for row in told(*LLAMA, "--costs", file)["assumptions"]}
    assert sources["restart_s"] == sources["shared cost_s"] == "--costs" and "assumed" in sources["pcie"]


def test_where_the_estimate_is_rough_that_is_said() -> None:
    """Several places, one of which is saved to as rarely as faults come: what is lost there is first order only."""
    found = told("--gpus", 8, "--state", "1TB", "--step-s", 1, "--mtbf", "1h")
    assert any(note.startswith("shared is saved to about as rarely as faults come") for note in found["notes"])
    assert not any("as rarely as" in note for note in told(*LLAMA)["notes"])


def test_what_is_shown_is_plain() -> None:
    """Units of what a machine has, digits where they are needed, none where they say nothing, and what to do."""
    text = run(*LLAMA).output
    for words in ('ckpt.on_hang(action="exit")]', "10.0 % hangs x 57 s", "800 ms that a restore", "10 % of the CPU",
                  "was NOT measured", 'every="auto" finds', 'triggers="auto"'):  # fmt: skip
        assert words in text, words
    eight = run("--gpus", 8, "--params", "405B", "--step-s", 1).output
    assert "Snapshots take 22.7 TB of a node's memory" in eight and "a fault every 264 d" in eight
    assert "99.69163 %" in eight and "99.69185 %" in eight  # otherwise all rows were the same
    assert "host_memory" in eight and "Snapshots take" not in text
    few = run("--gpus", 128, "--params", "7B", "--step-s", 1, "--mtbf", "33.6d").output
    assert "1.6 in 54 days" in few
    close = run("--gpus", 8, "--params", "7B", "--step-s", 1, "--goal", "0.99991").output
    assert "missed" not in close or "99.99 % (goal 99.99 %" not in close
    assert lasting(1e12) == "32,000 years" and lasting(86400 * 400) == "400 d"


def put(url: Path, *accounts: Account) -> None:
    async def all_of_them() -> None:
        store = open_store(str(url))
        try:
            for one in accounts:
                await store.put(one.key, one.to_bytes())
            await store.put("ledger/9.zzz.0.json", b"cut o")
        finally:
            await store.aclose()

    asyncio.run(all_of_them())


def test_a_run_as_the_source(tmp_path: Path, ledger_run: Callable[[], Path]) -> None:
    """Size, steps, costs and faults come from its accounts, a damaged one is passed over, and options still win."""
    url = ledger_run()
    ends = [End("died", 160.0 + 200 * i, 160.5 + 200 * i) for i in range(3)]
    put(url, *(account(i + 1, 100.0 + 200 * i, 50, end=end) for i, end in enumerate(ends)), account(4, 700.0, 50))
    found = told("--from", url)
    assert found["job"]["gpus"] == 4 and found["job"]["step_s"] == pytest.approx(1.0)
    assert found["job"]["state"] == 4_000_000
    assert found["faults"]["mtbf_s"] == pytest.approx(4 * (6 + 49 * 1.1) / 3)
    assert found["places"][0]["cost_s"] == pytest.approx(0.1) and found["places"][1]["write_s"] == 1.5
    assert found["faults"]["restart_s"] == pytest.approx(140 + 5)
    sources = {row["what"]: row["from"] for row in found["assumptions"]}
    assert "3 interruptions" in sources["mtbf"] and "measured" in sources["memory cost_s"]
    larger = told("--from", url, "--gpus", 8, "--restart", "1m")
    assert larger["faults"]["mtbf_s"] == pytest.approx(found["faults"]["mtbf_s"] / 2)
    assert larger["faults"]["restart_s"] == 60
    assert larger["places"][0]["cost_s"] == pytest.approx(0.002 + 0.098 / 2)  # what step() blocks is no matter of size
    assert sources["restart_s"].endswith("with 4 ranks")
    assert not any("4 ranks" in note for note in [*found["notes"], *larger["notes"]])  # given, there
    wide = told("--from", url, "--gpus", 4096, "--mtbf", "1h")
    assert any("with 4 ranks: with 4,096 it takes longer" in note for note in wide["notes"])
    assert any("is rough" in note for note in wide["notes"])
    huge = told(
        "--from", url, "--gpus", 400_000, "--state", "400GB", "--mtbf", "1d", *("--machine", "store_write_all=1GB")
    )
    assert huge["places"][-1]["write_s"] == 400  # more ranks do not make what they share faster


@pytest.fixture
def ledger_run(tmp_path: Path) -> Callable[[], Path]:
    """A run without accounts, made in another process, since its writer stays with that."""

    def make() -> Path:
        code = "import sys, ckpt\nwith ckpt.Checkpointer({'n': [1]}, sys.argv[1]) as cp:\n    cp.save(1).committed()\n"
        path = f"{REPO}:{REPO / 'backends'}"
        subprocess.run(
            [sys.executable, "-c", code, tmp_path / "run"], env={"PYTHONPATH": path, "PATH": ""}, check=True, timeout=60
        )
        for file in (tmp_path / "run" / "ledger").glob("*"):
            file.unlink()
        return tmp_path / "run"

    return make


def test_a_run_without_a_ledger(ledger_run: Callable[[], Path]) -> None:
    """It is said, with exit code 2; so is a place that is no run."""
    result = run("--from", ledger_run())
    assert result.exit_code == 2 and "keeps no ledger" in result.output


def test_it_needs_no_torch() -> None:
    """Neither does importing the module bring click or numpy along, since the writer imports it."""
    code = (
        "import sys, ckpt.goodput.model; assert not {'torch', 'click', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": f"{REPO}:{REPO / 'backends'}"}, check=True, timeout=60
    )
