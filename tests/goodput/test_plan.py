"""The cost model and `ckpt plan`: predictions equal the results of a simulated job."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from accounts import run, write
from ckpt.core.cadence.cadence import Costs, TierCost, best_interval, nice_steps, predict
from ckpt.core.cadence.ledger import Account, End, Restore, SaveTotals, StepRow
from ckpt.errors import UsageError
from ckpt.tools.cli.plan import plan
from ckpt.tools.observe.goodput import job_plan
from ckpt.tools.observe.goodput.job_plan import PlannedJob, PlannedTier

__all__ = ["run"]  # a fixture

LLAMA = ("--gpus", "16384", "--params", "405e9", "--step-s", "5.9")

# -- a simulated job --


def play(
    costs: Costs,
    mtbf_s: float,
    step_s: float,
    faults: int,
    *,
    recovering: bool = True,
) -> tuple[float, float, dict[str, float]]:
    """Simulate a job step by step. Return its effective training time, the wall time per fault, and the parts of a
    recovery per fault."""
    rng = random.Random(7)
    every = [0 if math.isinf(p.every_s) else round(p.every_s / step_s) for p in costs.tiers]
    weights = [p.served for p in costs.tiers]
    parts = {"perceive": 0.0, "restart": 0.0, "restore": 0.0}
    now, step, seen, fault = 0.0, 0, 0, rng.expovariate(1 / mtbf_s)
    newest, writing = [0] * len(every), [list[tuple[float, int]]() for _ in every]
    while seen < faults:
        end = now + step_s
        if end < fault:
            step += 1
            for i, tier in enumerate(costs.tiers):
                if every[i] and step % every[i] == 0:
                    writing[i].append((now + step_s + tier.write_s, step))
                    end += tier.cost_s
        if end < fault:
            now = end
            continue
        now, need = fault, 0
        for i in range(len(every)):
            newest[i] = max([newest[i], *(number for at, number in writing[i] if at <= now)])
            writing[i] = []
        while True:  # until a recovery is not interrupted by the next fault
            seen += 1
            need = max(need, rng.choices(range(len(every)), weights)[0])
            following = now + rng.expovariate(1 / mtbf_s) if recovering else math.inf
            times = (costs.perceive_s, costs.restart_s, costs.tiers[need].restore_s)
            for name, lasts in zip(parts, times, strict=True):
                parts[name] += min(lasts, following - now)
                now = min(now + lasts, following)
            if now < following:
                break
        step = newest[need]
        newest = [step if i < need else min(step, number) for i, number in enumerate(newest)]
        fault = now + rng.expovariate(1 / mtbf_s)
    return step * step_s / now, now / seen, {name: value / seen for name, value in parts.items()}


GAMES = {
    "memory at every step": (Costs(1, 20, [TierCost("m", 0.02, 1, 1, 0.1)]), 300.0),
    "a save that blocks, and is long": (Costs(0, 5, [TierCost("d", 2, 10, 1, 2)]), 50.0),
    "a save that takes long in the background": (Costs(0, 5, [TierCost("d", 0.2, 20, 1, 9)]), 150.0),
    "three tiers": (Costs(1, 3, [
        TierCost("m", 0.05, 1, 1, 0.1, 0.5), TierCost("d", 0.2, 20, 3, 5, 0.4), TierCost("s", 0.5, 50, 5, 20, 0.1)
    ]), 400.0),
    "faults as often as restarts": (
        Costs(5, 60, [TierCost("m", 0.05, 5, 1, 0.1, 0.5), TierCost("d", 0.2, 10, 3, 5, 0.5)]), 60.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "recovering"),
    [*((name, True) for name in GAMES), ("three tiers", False), ("faults as often as restarts", False)],
)
def test_prediction_matches_the_simulation(name: str, recovering: bool) -> None:
    """Effective time, loss per fault and each part of a recovery agree within the precision of 12,000 faults."""
    costs, mtbf_s = GAMES[name]
    effective, wall_s, parts = play(costs, mtbf_s, 1.0, 12_000, recovering=recovering)
    found = predict(costs, mtbf_s, recovering=recovering)
    assert found.invalid_s == pytest.approx((1 - effective) * wall_s, rel=0.03)
    assert found.effective == pytest.approx(effective, abs=0.006)
    assert found.wall_s == pytest.approx(wall_s, rel=0.03)
    for part, value in parts.items():
        assert found.parts[part] == pytest.approx(value, rel=0.02, abs=1e-9), part


def test_negative_control_simulation_rejects_wrong_formulas() -> None:
    """The simulation rejects a formula without the duration of a write or the cost of a save."""
    for name, wrong in (
        ("a save that takes long in the background", "write_s"),
        ("a save that blocks, and is long", "cost_s"),
    ):
        costs, mtbf_s = GAMES[name]
        effective, wall_s, _ = play(costs, mtbf_s, 1.0, 12_000)
        broken = replace(costs, tiers=[replace(costs.tiers[0], **{wrong: 0.0})])
        assert abs(predict(broken, mtbf_s).invalid_s / ((1 - effective) * wall_s) - 1) > 0.06, wrong


# -- properties --


# -- save intervals --


@given(cost=st.floats(1e-4, 100), mtbf=st.floats(1, 1e7))
@settings(max_examples=100, deadline=None)
def test_best_interval_is_optimal(cost: float, mtbf: float) -> None:
    """For a blocking save, other intervals lose more, or at most 1 % less."""

    def lost(every_s: float) -> float:
        return 1 - predict(Costs(0, 0, [TierCost("d", cost, every_s, 0, cost)]), mtbf).effective

    best = best_interval(cost, mtbf)
    if cost < mtbf / 2:
        assert lost(best) <= min(lost(best * f) for f in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)) * 1.01


def test_nice_steps_are_round_numbers() -> None:
    """The result is the nearest of 1, 2, 5, 10, … by ratio, at least one, and 0 for an infinite interval."""
    found = [nice_steps(steps * 0.1, 0.1) for steps in (0.01, 1, 1.4, 1.5, 3, 3.2, 7, 7.2, 14, 15, 99, 1000, 3.3e6)]
    assert found == [1, 1, 1, 2, 2, 5, 5, 10, 10, 20, 100, 1000, 5_000_000]
    assert nice_steps(math.inf, 1.0) == 0
    for wrong in ((1.0, 0.0), (math.nan, 1.0), (1.0, math.nan), (-1.0, 1.0), (1.0, math.inf)):
        with pytest.raises(UsageError):
            nice_steps(*wrong)


# -- a whole job --

JOB = PlannedJob(1024, 1e12, 2.0)


def numbers(job: PlannedJob = JOB, **changes: float) -> dict[str, float]:
    return {**job_plan.defaults(job), **changes}


def shared_by(node: float, everywhere: float, **changes: float) -> dict[str, float]:
    return numbers(mtbf_s=10_000.0, node_share=node, all_share=everywhere, **changes)


def test_unsurvivable_faults_and_unneeded_tiers() -> None:
    near = PlannedTier("memory", 0.02, 0.1, 1, ("process",))
    with pytest.raises(UsageError, match=r"nothing survives 25\.0% of the faults \(all\)"):
        job_plan.cadences(JOB, shared_by(0.0, 0.25), [near])
    found = job_plan.plan(JOB, shared_by(0.0, 0.0))
    assert [one.every == 0 for one in found.tiers] == [False, True, True]


# -- measured runs --


def account(number: int, start: float, steps: int, **changes: Any) -> Account:
    """Return the metrics of an attempt: it opens at `start`, restores for 2 s; steps take 1 s, the first 6 s."""
    rows = [StepRow(start + 8, 1, 1, 6.0)]
    rows += [StepRow(start + 8 + 1.1 * i, 1 + i, 1, 1.1, 0.06, 0.04, saves=1) for i in range(1, steps)]
    return Account(
        term=f"{number}.abc",
        world=4,
        boot="b",
        born=start - 5,
        opening=start - 1,
        opened=start,
        kept=rows[-1].at + 1,
        step=steps,
        beat=rows[-1].at,
        restores=[Restore(start, 2.0, 0 if number > 1 else None, "memory" if number > 1 else "")],
        rows=rows,
        saves={"file:///r": SaveTotals(2, seconds=3.0, nbytes=2_000_000)},
        **changes,
    )


# -- the command --


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(plan, [str(one) for one in arguments], catch_exceptions=False)


def planned(*arguments: object) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_plan_for_llama_3() -> None:
    """99.5 % needs a restart within 35 s. The parts add up, and every number has its source."""
    found = planned(*LLAMA)
    seen = found["forecast"]
    parts = sum(seen[f"{part}_s"] for part in ("perceive", "restart", "restore", "recompute", "saving"))
    assert parts == pytest.approx(seen["invalid_s"]) == pytest.approx((1 - seen["effective"]) * seen["wall_s"])
    assert seen["effective"] == pytest.approx(0.9928, abs=1e-4) and found["restart_s"] == pytest.approx(35, abs=0.5)
    assert [one["every"] for one in found["tiers"]] == [2, 2, 50]
    text = invoke(*LLAMA).output
    line = "memory=ckpt.Memory(every=2, replicas=2)"
    for text_part in ("matters most", "time: 99.28", line, "a restart of at most", "419 interruptions", "on_hang"):
        assert text_part in text, text_part


@pytest.mark.parametrize(
    "options",
    [
        (*LLAMA, "--goal", "99.5%"),
        (*LLAMA, "--goal", "0.99"),
        ("--gpus", 64, "--params", "8B", "--step-s", 1.3, "--mtbf", "5h", "--goal", "99.2%"),
        ("--gpus", 8, "--state", "1TB", "--step-s", 1, "--mtbf", "1h", "--goal", "0.9"),
    ],
)
def test_required_values_meet_the_goal(options: tuple[object, ...]) -> None:
    wanted = planned(*options)

    def met(name: str, value: float) -> bool:
        found = planned(*options, name, f"{value}s")
        return bool(found["forecast"]["effective"] >= found["goal"])

    assert met("--mtbf", wanted["mtbf_s"] * 1.001) and not met("--mtbf", wanted["mtbf_s"] / 1.2)
    if (restart_s := wanted["restart_s"]) is not None:
        assert met("--restart", restart_s * 0.999) and not met("--restart", restart_s * 1.1)


def test_numbers_may_have_units() -> None:
    same = planned(
        "--gpus", 64, "--state", "1TB", "--step-s", "1500ms", "--mtbf", "0.5d", "--assume", "network=40Gbit/s"
    )
    assert same["job"]["step_s"] == 1.5 and same["numbers"]["mtbf_s"] == 43200 and same["numbers"]["network"] == 5e9
    assert same["job"]["state"] == 1e12 and planned(*LLAMA, "--assume", "felt=20%")["numbers"]["felt"] == 0.2
    first, second = (planned(*LLAMA, "--goal", goal) for goal in ("0.995", "99.5 %"))
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*LLAMA, "--assume", "open_s=5GB"), "not a duration"),
        ((*LLAMA, "--assume", "network=400Gb/s"), "not a rate"),
        ((*LLAMA, "--assume", "felt=2"), "felt"),
        ((*LLAMA, "--assume", "cores=0"), "cores"),
        ((*LLAMA, "--assume", "wheels=4"), "--assume"),
        ((*LLAMA, "--assume", "all_share=0.9"), "sum to more than 1"),
        ((*LLAMA, "--goal", "99.5"), "0.995 or 99.5%"),
        ((*LLAMA, "--goal", "nan"), "--goal"),
        (("--gpus", 0, "--params", "7B", "--step-s", 1), "--gpus"),
        (("--params", "7B", "--step-s", 1), "give --gpus"),
        (("--gpus", 8, "--step-s", 1), "give --params or --state"),
        (("--gpus", 8, "--params", "7B"), "give --step-s"),
        (("--gpus", 8, "--params", "-7B", "--step-s", 1), "--params"),
        (("--gpus", 8, "--params", 0, "--step-s", 1), "--params"),
        (("--gpus", 8, "--params", "1e400", "--step-s", 1), "too large"),
        (("--gpus", 8, "--state", "5 parsecs", "--step-s", 1), "not a size"),
        (("--gpus", 8, "--params", "7B", "--state", "1TB", "--step-s", 1), "give one"),
        (("--gpus", 8, "--params", "7B", "--step-s", 0), "--step-s"),
        (("--gpus", 8, "--params", "7B", "--step-s", "2h", "--mtbf", "1h"), "longer than the time between faults"),
        ((*LLAMA, "--mtbf", 0), "mtbf_s"),
    ],
)
def test_invalid_options_are_named(arguments: tuple[object, ...], expected: str) -> None:
    """The exit code is 2, and the message names the option without a traceback."""
    result = invoke(*arguments)
    assert result.exit_code == 2 and expected in result.output, result.output


def test_plan_uses_metrics_of_a_run(run: Path) -> None:
    """Size, steps, costs and faults come from run metrics. Damaged ones are skipped, and options override them."""
    url = run
    result = invoke("--from", url)
    assert result.exit_code == 2 and "has no run metrics" in result.output
    ends = [End("died", 165.0 + 200 * i, 165.5 + 200 * i) for i in range(3)]
    write(url, *(account(i + 1, 100.0 + 200 * i, 50, end=end) for i, end in enumerate(ends)), account(4, 700.0, 50))
    (url / "ledger" / "9.zzz.0.json").write_bytes(b"cut o")
    found = planned("--from", url)
    assert found["job"]["gpus"] == 4 and found["job"]["step_s"] == pytest.approx(1.0)
    assert found["job"]["state"] == 4_000_000
    assert found["tiers"][0]["cost_s"] == pytest.approx(0.1) and found["tiers"][1]["write_s"] == 1.5
    assert found["sources"]["mtbf_s"] == found["sources"]["memory.cost_s"] == f"measured: {url}"
    larger = planned("--from", url, "--gpus", 8, "--restart", "1m")
    assert larger["numbers"]["mtbf_s"] == pytest.approx(found["numbers"]["mtbf_s"] / 2)
    assert larger["numbers"]["restart_s"] == 60
    wide = planned("--from", url, "--gpus", 4096, "--mtbf", "1h")
    assert any("with 4 ranks" in note for note in wide["notes"])
    named = invoke("--costs", url, "--mtbf", "1h").output.replace("\n", "")
    assert "ckpt.Tier('/r', every=" in named and "s3://" not in invoke(*LLAMA).output
