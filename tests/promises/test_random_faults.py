"""Deaths and signals at random moments: no acknowledged step is lost, and every bit is right.

Each chain is one run that is killed, crashed and ended repeatedly at any moment: during opening, staging, writing,
committing and restoring. The next process is checked against the steps that the trainer acknowledged before its end.
"""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

import toy
from kills import DISK, MEMORY, TRAIN, Chain, Told, Trainer, kill_all, lost, problems
from processes import eventually, writers

FAULTS = 5  # of a chain
QUICK, LONG = range(2), range(2, 1002)  # 10 faults, and 5,000
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT, "term": signal.SIGTERM}


def fault(chain: Chain, folder: Path, dice: random.Random) -> None:
    """Start, wait for a moment, end it; and hold the start to what was safe before."""
    how = dice.choice([*SIGNALS, "both", "writer, then both", "usr1 and kill"])
    safe = chain.told.safe(chain.left)
    trainer = Trainer(TRAIN, *chain.words(100_000))
    said = trainer.read_until(dice.choice(["start", "staged", "committed"]))
    before = Told()
    before.hear(said)
    eventually(lambda: False, dice.uniform(0, 0.7))
    if "both" in how:
        kill_all(writers(folder))
    if how == "writer, then both":
        eventually(lambda: False, dice.uniform(0, 1.0))
    if how == "usr1 and kill":
        for _ in range(3):
            trainer.process.send_signal(signal.SIGUSR1)
        eventually(lambda: False, dice.uniform(0, 0.1))
    if how == "term" and dice.random() < 0.5:
        trainer.process.send_signal(signal.SIGTERM)  # and once more
    trainer.process.send_signal(SIGNALS.get(how, signal.SIGKILL))
    said += trainer.read_until("the end")
    code = trainer.process.wait(60)
    assert code == (128 + signal.SIGTERM if how == "term" else -SIGNALS.get(how, signal.SIGKILL)), how
    chain.told.start = -1
    chain.told.hear(said)
    assert chain.told.start >= 0 and not lost(chain.told.start, safe), how
    chain.left = MEMORY
    if how == "term":
        chain.told.committed = max(chain.told.committed, durable(chain.run))
        assert chain.told.committed >= before.staged  # it left when that was safe
    if "both" in how or (how == "term" and dice.random() < 0.5):
        kill_all(writers(folder))
        chain.left = DISK


def durable(run: str) -> int:
    """The newest step that the account of the last SIGTERM calls durable."""
    found = [json.loads(path.read_text()) for path in sorted(Path(run, "faults").glob("*.json"))]
    last = [one for one in found if one["kind"] == "signal" and one["exit_code"] == 143][-1]
    return max((s["step"] for s in last["saved"] if s["tier"] != "memory" and not s["error"]), default=-1)


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.long) for seed in LONG)])
def test_faults_at_random_moments(run_dir: str, own_sockets: Path, seed: int) -> None:
    """Whatever happens, and whenever: no acknowledged step is lost, and the bits are those of an undisturbed run."""
    dice, chain = random.Random(seed), Chain(run_dir, Told())
    for _ in range(FAULTS):
        fault(chain, own_sockets, dice)
    at = max(chain.told.staged, chain.told.start) + 5
    result = chain.train(steps=at)
    assert result.returncode == 0, result.stderr
    assert chain.told.digest == toy.reference(max(at, chain.told.start))
    assert problems(run_dir) == []
    assert eventually(lambda: not writers(own_sockets)), "a process is left"


def test_negative_control_a_lost_step_is_seen(run_dir: str, own_sockets: Path) -> None:
    """With the writers killed where only the trainer should die, what was staged is gone, and the checks see it."""
    chain = Chain(run_dir, Told(), settings={"every": 1_000_000})
    trainer = Trainer(TRAIN, *chain.words(100_000))
    said = trainer.read_until("staged 5")
    kill_all(writers(own_sockets))
    trainer.kill()
    chain.told.hear(said + trainer.read_until("the end"))
    kill_all(writers(own_sockets))
    with pytest.raises(AssertionError, match="was safe"):
        chain.train(steps=10)
