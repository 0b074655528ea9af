"""Accounts of runs, made by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.core.cadence.ledger import PREFIX, Account, End, Restore, SeenFault, StepRow
from ckpt.guard.report import Fault
from ckpt.tools.cli import report as cli_report
from ckpt.tools.observe.goodput import accounting
from ckpt.tools.observe.goodput.breakdown import InterruptionCost, Statement

WALL = 1_900_000_000.0  # of the moment 0 of the clocks here


PARTS = ("productive_s", "stalled_s", "slowed_s", "paused_s", "other_s")


def account(number: int, born: float, first: int = 1, steps: int = 10, step_s: float = 1.0, **given: Any) -> Account:
    """Born, opening after 2 s, opened after 3, ready after 4, then `steps` steps from `first` on. `back`: seconds that
    restoring took, of the step before `first`, which `of` saved."""
    given = {"back": 1.0, "of": "", "source": "memory", "clock": WALL, "boot": "one", **given}
    back, of, source, clock = (given.pop(name) for name in ("back", "of", "source", "clock"))
    restored = first - 1 if of else None
    checkpoint = f"{restored or 0:09d}.{of.replace('.', '-')}" if of else ""
    found = Account(
        f"{number}.abc", anchor=(clock, 0.0), born=born, opening=born + 2, opened=born + 3, inode=7, url="file:///run"
    )
    found.restores = [Restore(born + 3, back, restored, source if of else "", checkpoint, found.term)]
    begin = born + 3 + back
    found.rows = [StepRow(begin + (n + 1) * step_s, first + n, 1, step_s, quiet=1) for n in range(steps)]
    found.beat, found.step = (found.rows[-1].at, found.rows[-1].step) if steps else (begin, restored or -1)
    found.kept = found.beat
    for name, value in given.items():
        setattr(found, name, value)
    return found


def died(one: Account, after_s: float = 0.5, gone_s: float = 0.25, *, how: str = "died") -> Account:
    """Noticed so long after its last step."""
    at = one.beat + after_s
    return replace(one, end=End(how, at, at + gone_s), kept=at + gone_s)


def seen(at: float, kind: str = "signal", rank: int = 0, *, ends: bool = True) -> SeenFault:
    return SeenFault(at, kind, f"{kind} of rank {rank}", rank, ends=ends)


def total(found: Statement) -> float:
    return math.fsum([found.cost.total, *(getattr(found, name) for name in PARTS)])


def check(found: Statement) -> None:
    """Check properties that every result must have."""
    assert total(found) == pytest.approx(found.wall_s, abs=1e-6)
    values = [getattr(found, name) for name in PARTS]
    values += [found.first_start_s, found.idle_s, found.moved_s, found.wall_s]
    for one in found.interruptions:
        values += [getattr(one.cost, name) for name in InterruptionCost.__dataclass_fields__]
        assert one.lost_steps is None or one.lost_steps >= 0
    assert all(value >= 0 for value in values)
    assert found.effective is None or 0 <= found.effective <= 1
    assert found.steps >= 0 and found.redone_steps >= 0
    json.dumps(found.to_json(), allow_nan=False)


def settled(*accounts: Account, faults: tuple[Fault, ...] = (), **options: Any) -> Statement:
    found = accounting.settled(accounts, faults, **options).statement
    check(found)
    return found


def near(value: float) -> Any:
    return pytest.approx(value, abs=1e-9)


def costs(cost: InterruptionCost) -> dict[str, float]:
    """Return the costs that are not 0."""
    return {
        name: round(getattr(cost, name), 9)
        for name in InterruptionCost.__dataclass_fields__
        if abs(getattr(cost, name)) > 1e-9
    }


@pytest.fixture
def run(run_dir: str) -> Path:
    """A run with one checkpoint, and no ledger but what a test writes."""
    with ckpt.Checkpointer({"model": nn.Linear(2, 2)}, [ckpt.Tier(run_dir, every=1)], memory=None) as cp:
        cp.restore(default=0)
        cp.save(1).wait_durable(60.0, tier="all")
    for path in Path(run_dir).glob(f"{PREFIX}*"):
        path.unlink()
    return Path(run_dir)


def write(run: Path, *accounts: Account) -> None:
    (run / PREFIX).mkdir(exist_ok=True)
    for one in accounts:
        (run / one.key).write_bytes(one.to_bytes())


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli_report.report, [str(a) for a in arguments], standalone_mode=False)
