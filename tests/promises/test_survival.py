"""The main promise, end to end: a killed run continues from exactly the step it had reached, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import toy
from processes import killed, run_script, writers

TOY = "import toy; toy.main()"


def test_killed_trainer_goes_on_from_memory_then_from_disk(run_dir: str, own_sockets: Path) -> None:
    """After SIGKILL no acknowledged step is lost, and the finished run equals an uninterrupted one in every bit."""
    assert killed(run_script(TOY, run_dir, 40, 17))
    assert killed(run_script(TOY, run_dir, 40, 30))  # once step 30 is acknowledged by the disk
    for process in writers(own_sockets):  # take the memory away as well
        process.kill()
    result = run_script(TOY, run_dir, 40)
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["tier"].startswith("file://")
    assert outcome["start"] == 30
    assert outcome["digest"] == toy.reference(40)


def test_memory_brings_back_the_last_acknowledged_step(run_dir: str) -> None:
    """A restart finds the writer that outlived the trainer and loses not one staged step. No tier had the step, so
    nothing could vouch for its bytes while the trainer lived."""
    assert killed(run_script(TOY, run_dir, 40, 17))
    outcome = json.loads(run_script(TOY, run_dir, 40).stdout)
    assert (outcome["start"], outcome["tier"], outcome["verified"]) == (17, "memory", False)
    assert outcome["digest"] == toy.reference(40)


def test_negative_control_a_fresh_seed_gives_another_digest() -> None:
    """The digest does see differences."""
    assert toy.reference(3) != toy.reference(4)
