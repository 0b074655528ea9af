"""How often to save, and the cost of saving: pure functions, tested on steps with known costs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.core.cadence import cadence
from ckpt.core.cadence.cadence import Auto, History, Meter, SaveCost, TierCadence, decide, differs
from ckpt.core.cadence.ledger import Account, Decision, End, Restore, SeenFault, StepRow
from ckpt.errors import InvalidArgumentError, UsageError
from ckpt.tiers import as_tiers

MEMORY, FOLDER, BUCKET = "memory", "file:///nvme/run", "s3://bucket/run"


def place(name: str, now: int, every: Any = None, *, remote: bool = False) -> TierCadence:
    return TierCadence(name, Auto() if every is None else every, now, remote)


# -- configuration --


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "often", None, "Auto"])
def test_invalid_interval_is_rejected(wrong: Any) -> None:
    """Memory and Tier raise the same error, which explains valid values."""
    for make in (lambda: ckpt.Memory(every=wrong), lambda: ckpt.Tier("/tmp/x", every=wrong)):
        with pytest.raises(UsageError, match=r'steps from 1.*10min.*"auto"'):
            make()


@pytest.mark.parametrize(
    "wrong", [{"budget": 0}, {"budget": 1}, {"budget": math.nan}, {"budget": "1 %"}, {"mtbf_s": 0}, {"mtbf_s": -1.0}]
)
def test_invalid_auto_setting_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Auto(**wrong)


def test_auto_applies_to_tiers_given_by_name() -> None:
    """ "auto" applies to tiers given by name and to memory. Tiers with their own interval reject it."""
    memory, (tier,) = as_tiers("/tmp/x", every="auto")
    assert memory is not None and memory.every == Auto() == tier.every
    assert as_tiers("/tmp/x", ckpt.Memory(), "auto")[0] == ckpt.Memory()  # memory= is used unchanged
    given, (first, second) = as_tiers([ckpt.Tier("/tmp/x", every=7), "/tmp/y"], every=Auto(budget=0.05))
    assert given is not None and (first.every, second.every, given.every) == (7, Auto(budget=0.05), Auto(budget=0.05))
    for tiers, every in (([ckpt.Tier("/tmp/x")], "auto"), ("/tmp/x", "always")):
        with pytest.raises(UsageError, match="every="):
            as_tiers(tiers, every=every)
    memory, (tier,) = as_tiers("/tmp/x")  # negative control
    assert memory is not None and (memory.every, tier.every) == (1, 100)


def test_number_or_time_applies_to_the_folder() -> None:
    """Memory is still saved at every step unless it is given explicitly."""
    for where in ("/tmp/x", ["/tmp/x"]):
        for every, found in ((50, 50), ("10min", Auto(every_s=600))):
            memory, (tier,) = as_tiers(where, every=every, keep=10)
            assert memory == ckpt.Memory() and (tier.every, tier.keeping.last) == (found, 10)
    memory, (tier,) = as_tiers(["/tmp/x"], ckpt.Memory(every=4), keep=3)
    assert memory is not None and (memory.every, tier.every, tier.keeping.last) == (4, 100, 3)
    assert as_tiers(None, ckpt.Memory(every=5)) == (ckpt.Memory(every=5), [])
    paths = ("/tmp/x", ["/tmp/x"], ("/tmp/x",), ["/tmp/x", "/tmp/y"], [Path("/tmp/x")], None)
    for tiers in (*paths, ckpt.Tier("/tmp/x"), [ckpt.Tier("/tmp/x")], [ckpt.Tier("/tmp/x"), "/tmp/y"]):
        assert as_tiers(tiers)[0] == ckpt.Memory()  # however the tiers are given
        assert tiers is None or as_tiers(tiers, None)[0] is None
    for tiers, options in ((None, {"keep": 3}), ([ckpt.Tier("/tmp/x")], {"keep": 3}), (None, {"every": 5})):
        with pytest.raises(InvalidArgumentError, match="given as strings"):
            as_tiers(tiers, **options)
    for tiers in ([], ["/tmp/x", "/tmp/x"]):
        with pytest.raises(InvalidArgumentError, match="at least one"):
            as_tiers(tiers)
    for tiers in (ckpt.Memory(), [ckpt.Memory()], ["/tmp/x", ckpt.Memory()]):
        with pytest.raises(InvalidArgumentError, match=r"memory=ckpt\.Memory"):
            as_tiers(tiers)
    with pytest.raises(InvalidArgumentError, match="nowhere to save"):
        as_tiers(None, None)
    with pytest.raises(InvalidArgumentError, match="memory=True"):
        as_tiers("/tmp/x", True)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("10min", 600), ("2h", 7200), ("1.5 h", 5400), ("0.5s", 0.5)]
)
def test_time_requires_a_unit(text: str, seconds: float) -> None:
    assert ckpt.Tier("/tmp/x", every=text).every == Auto(every_s=seconds)


@pytest.mark.parametrize("text", ["10", "10m", "0s", "-5min", "min", "1h30min", "10 minutes", "1e3s", "", "10MIN"])
def test_invalid_times_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="10min"):
        ckpt.Tier("/tmp/x", every=text)


# -- decisions from costs --


@pytest.mark.parametrize(
    ("cost_ms", "step_ms", "expected"),
    [(0.5, 500, 1), (5.2, 500, 1), (6, 500, 2), (20, 500, 5), (50, 500, 10), (500, 500, 100), (0.0, 1, 1)],
)
def test_memory_cost_stays_within_its_budget(cost_ms: float, step_ms: float, expected: int) -> None:
    """The interval is the next of 1, 2, 5, 10, … that keeps the cost within 1 %, never longer."""
    costs = {MEMORY: SaveCost(cost_ms / 1e3, 0.0, 100)}
    found = decide([place(MEMORY, 4)], 100, step_ms / 1e3, costs, History(), 1)
    assert found.every == {MEMORY: expected}
    assert cost_ms / (expected * step_ms) <= 0.01 * 1.2 and "%" in found.why[MEMORY]


def test_folder_interval_follows_young_and_daly() -> None:
    """The root of 2 x cost x time between faults: 0.3 s and 10,000 s give 77 s, about 150 steps of 0.5 s."""
    costs = {FOLDER: SaveCost(0.3, 1.0, 10)}
    found = decide([place(FOLDER, 1000, Auto(mtbf_s=10_000))], 9, 0.5, costs, History(), 1)
    assert found.every == {FOLDER: 200} and found.mtbf_s == {FOLDER: 10_000} and "configured" in found.why[FOLDER]


def test_more_faults_cause_more_saves() -> None:
    """The faults of the run count. A fault that memory recovered does not count for the folder."""

    def every(served: dict[str, int]) -> int:
        known = History(training_s=40_000.0, interruptions=9, deaths=9, served=served)
        return decide([place(FOLDER, 7)], 9, 0.5, {FOLDER: SaveCost(0.3, 1.0, 10)}, known, 1).every[FOLDER]

    assert every({FOLDER: 99}) < every({FOLDER: 9}) < every({MEMORY: 9}) == every({})


def test_memory_is_saved_more_often_with_frequent_faults() -> None:
    """With 0.036 s per snapshot and a fault every 50 s, Young's formula gives 1.9 s at a cost of 3 %. Without faults,
    or with rare ones, the budget decides."""
    costs, places = {MEMORY: SaveCost(0.036, 0.0, 100)}, [place(MEMORY, 20)]
    for known, expected in (
        (History(300, 6, 6), 5),
        (History(300, 6, 0), 20),  # the training loop saved its next step before each of them
        (History(300, 1, 1), 20),
        (History(10**6, 6, 6), 20),
        (History(), 20),
    ):
        found = decide(places, 100, 0.25, costs, known, 1)
        assert found.every == {MEMORY: expected}, known
        assert (MEMORY in found.mtbf_s) == ("budget" in found.why[MEMORY]) == (expected == 5)
    given = decide([place(MEMORY, 20, Auto(mtbf_s=50))], 100, 0.25, costs, History(), 1)
    assert given.every == {MEMORY: 5} and given.mtbf_s == {MEMORY: 50}
    assert decide([place(MEMORY, 20, 20)], 100, 0.25, costs, History(300, 6, 6), 1).every == {MEMORY: 20}, "as set"
    held = Decision(5, {MEMORY: 20}, {}, {MEMORY: 0.036}, {}, step_s=0.25)
    assert decide(places, 9, 0.25, {}, History(300, 6, 6), 1, held).every == {MEMORY: 5}, "by earlier measurements"


def test_tier_is_never_busy_all_the_time() -> None:
    """Even free saves are limited: a folder is busy half of the time, a bucket a tenth, at most once a minute."""
    costs = {FOLDER: SaveCost(0.0, 10.0, 9), BUCKET: SaveCost(0.0, 1.0, 9)}
    places = [place(FOLDER, 7, Auto(mtbf_s=10)), place(BUCKET, 7, Auto(mtbf_s=10), remote=True)]
    found = decide(places, 9, 1.0, costs, History(), 1)
    assert found.every == {FOLDER: 20, BUCKET: 50}


@pytest.mark.parametrize(("step_s", "every"), [(0.25, 2400), (1.0, 600), (7.0, 86), (599.0, 1), (4000.0, 1)])
def test_time_is_converted_to_steps(step_s: float, every: int) -> None:
    """The cost of a save does not matter. A small deviation changes nothing, a larger one changes the interval."""
    place = TierCadence("/x", Auto(every_s=600), 100)
    found = decide([place], 10, step_s, {}, History(), 1)
    assert found.every["/x"] == every and "10 min, in steps of" in found.why["/x"]
    assert differs(found, [place]) == (every != 100)
    settled = replace(place, now=every)
    for drift in (0.97, 1.0, 1.03):
        assert not differs(decide([settled], 20, step_s * drift, {}, History(), 1), [settled])
    if every > 10:
        assert differs(decide([settled], 20, step_s * 1.2, {}, History(), 1), [settled])


def test_defaults_apply_before_measurements() -> None:
    """Without measurements, memory keeps its interval, a folder is saved every 10 s, and a bucket keeps its
    interval."""
    places = [place(MEMORY, 4), place(FOLDER, 100), place(BUCKET, 100, remote=True)]
    assert decide(places, 9, 0.1, {}, History(), 1).every == {MEMORY: 4, FOLDER: 100, BUCKET: 100}
    assert decide(places, 9, 1.0, {}, History(), 1).every == {MEMORY: 4, FOLDER: 10, BUCKET: 100}


def test_earlier_decision_is_kept_without_measurements() -> None:
    held = Decision(5, {MEMORY: 20, FOLDER: 500}, {FOLDER: "for a reason"}, {MEMORY: 0.1, FOLDER: 0.3})
    found = decide([place(MEMORY, 20), place(FOLDER, 500)], 9, 1.0, {}, History(), 1, held)
    assert found.every == held.every and found.costs == held.costs and found.why[FOLDER] == "for a reason"


def test_uncertain_measurement_changes_nothing() -> None:
    for unsure, expected in ((0.05, 5), (0.001, 20)):
        costs = {MEMORY: SaveCost(0.08, 0.0, 50, unsure)}
        assert decide([place(MEMORY, 5)], 9, 0.5, costs, History(), 1).every == {MEMORY: expected}


@given(
    st.floats(0, 1e4), st.floats(1e-6, 1e4), st.floats(0, 1e4), st.floats(1e-3, 1e9), st.integers(1, 10**6),
    st.integers(4, 1000),
)  # fmt: skip
def test_decision_is_always_valid(
    save_s: float, step_s: float, write_s: float, mtbf_s: float, now: int, samples: int
) -> None:
    """For any measurements the interval is at least 1, and a reason is given."""
    costs = {MEMORY: SaveCost(save_s, 0.0, samples, save_s), FOLDER: SaveCost(save_s, write_s, samples)}
    places = [place(MEMORY, now), place(FOLDER, now, Auto(mtbf_s=mtbf_s))]
    found = decide(places, 9, step_s, costs, History(), 8)
    assert all(type(n) is int and n >= 1 for n in found.every.values()) and len(cadence.lines(found)) == 2


def test_history_counts_faults_that_need_a_snapshot() -> None:
    """A signal that the fault handler served lost nothing. An exception or a fault detected by the writer did. A normal
    end is not a fault."""
    accounts = []
    for number, (kind, by, how, source) in enumerate(
        [
            ("signal", "fault handler", "died", ""),
            ("exception", "fault handler", "died", MEMORY),
            ("signal", "writer", "died", MEMORY),
            ("", "", "closed", FOLDER),
            ("", "", "", BUCKET),
        ]  # a planned end
    ):
        account = Account(f"{number}.ab")
        account.rows = [StepRow(10.0, 5, 5, 10.0)]
        account.restores = [Restore(0.0, 1.0, 5 if source else None, source), Restore(0.0, 1.0, 1, "again")]
        account.faults = [SeenFault(9.0, kind, "", ends=True, by=by)] if by else []
        account.end = End(how, 10.0, 10.0) if how else None
        accounts.append(account)
    found = cadence.history(accounts)
    assert (found.training_s, found.interruptions, found.deaths) == (50.0, 3, 2)
    assert found.served == {MEMORY: 2, FOLDER: 1}


# -- the cost of saving --


def run(every: int, cost_s: float, *, durable: int = 0, takes: int = 4, each_s: float = 0.0, steps: int = 600) -> Meter:
    """Return a meter after steps of 0.5 s that vary by 2 %. A snapshot costs `cost_s`, a tenth of it waiting. A
    checkpoint takes `takes` steps, each longer by `each_s`."""
    meter, rng = Meter(), random.Random(1)
    writing = 0
    for step in range(steps):
        copied = step % every == 0
        writing = takes if durable and step % durable == 0 else max(0, writing - 1)
        seconds = rng.gauss(0.5, 0.01) + cost_s * copied + each_s * (writing > 0)
        meter.step(seconds, 0.1 * cost_s * copied, copied, [FOLDER] if writing else [])
        if writing == 1:
            meter.saved(FOLDER, takes * 0.5)
    return meter


def test_snapshot_cost_is_measured() -> None:
    """The error is within three standard errors. Free snapshots cost nothing."""
    for cost_s in (0.0, 0.05, 0.3):
        meter = run(4, cost_s)
        found = meter.snapshot_s
        assert found is not None and abs(found - cost_s) <= 3 * meter.snapshot_unsure_s + 1e-9
        assert meter.quiet_s == pytest.approx(0.5, abs=0.01) and meter.snapshots == 128


def test_checkpoint_cost_is_measured_separately() -> None:
    """Four steps that each take 0.1 s longer cost 0.4 s, whatever snapshots cost."""
    meter = run(4, 0.05, durable=40, each_s=0.1)
    assert meter.save_s(FOLDER) == pytest.approx(0.4, abs=0.05)
    assert meter.write_s(FOLDER) == 2.0 and meter.saves(FOLDER) >= 10


def test_cost_is_unknown_without_comparison() -> None:
    """If every step saves, or the steps without a save were long ago, the cost is unknown."""
    assert run(1, 0.05).snapshot_s is None
    meter = run(4, 0.05)
    assert meter.snapshot_s is not None
    for _ in range(600):
        meter.step(0.7, 0.0, True, [])
    assert meter.quiet_s is None and meter.snapshot_s is None


def test_evaluation_during_a_save_is_not_its_cost() -> None:
    """A step of minutes during a write of one second was slow for other reasons. A delay as long as the write may be
    due to it."""
    meter = run(4, 0.05, durable=40, each_s=0.1)
    assert meter.step(60.0, 0.0, False, [FOLDER], 1.0) == 0.0 and meter.step(60.0, 0.0, True, []) == 0.0
    assert meter.step(1.2, 0.0, False, [FOLDER], 1.0) == pytest.approx(0.7, abs=0.02)
    assert meter.step(2.0, 0.0, False, [FOLDER], 1.0) == 1.0 and 0 < meter.step(0.8, 0.1, True, []) < 0.3


def test_swapped_arguments_raise_a_short_error() -> None:
    """If the arguments are swapped, the error shows the correct order, but not the whole state."""
    with pytest.raises(UsageError, match=r"Checkpointer\(state, tiers\)") as refused:
        as_tiers({"model": list(range(10_000))})
    assert len(str(refused.value)) < 300
