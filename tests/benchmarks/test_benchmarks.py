"""Tests of the benchmark of libraries: failures are reported, wrong restores are named, goals are judged."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from processes import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import figures

Json = dict[str, Any]


def test_slow_child_is_ended_with_its_children() -> None:
    """A grandchild that keeps the output open does not delay the benchmark."""
    said: list[Json] = []
    late = 'import time; time.sleep(20); print(\'{"kind": "late"}\')'
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {late!r}])"
    assert not figures.child(["-c", code], {}, keep=said.append, limit_s=0.5)
    assert [line["kind"] for line in said] == ["failed"]
    assert said[0]["why"] == "not done after 0.5 s"


# -- the summary, from lines made by hand --

NBYTES = 1_000_000_000


def library(
    name: str,
    *,
    lost: list[float],
    durable: float = 1.0,
    cold: float = 1.0,
    blocks: float = 0.002,
    equal: bool = True,
    fsync: bool = True,
    held: int = 0,
    slots: int = 0,
    number: int = 0,
) -> list[Json]:
    """Return the lines of one round."""
    cycle = {"kind": "cycle", "blocks_s": blocks, "durable_s": durable, "cpu_s": {"compute": [0.1, 0.2]}}
    told: list[Json] = [
        {"kind": "alone", "memory": 500, "nbytes": NBYTES, "step_s": 0.1},
        {"kind": "start", "step_s": 0.1, "open_s": 0.5, "first_blocks_s": 1.0, "first_durable_s": 1.0, "fsync": fsync},
        *({**cycle, "lost_s": one} for one in lost),
        {"kind": "memory", "before": 400 + held, "most": 500 + held, "slots": slots},
        {"kind": "end", "written": NBYTES},
        *(
            {"kind": "restored", "source": source, "seconds": cold, "open_s": 0.25, "equal": equal}
            for source in ("cold", "warm", "warm")
        ),
        {"kind": "end"},
    ]
    return [{**line, "library": name, "round": number} for line in told]


def limit(name: str, gb_s: float) -> Json:
    return {"kind": "limit", "name": name, "gb_s": gb_s, "cpu_s_per_gb": 0.1}


def verdicts(found: Json) -> dict[str, bool | None]:
    return {one["what"]: one["met"] for one in found["goals"]}


GIB = figures.GIB
OURS = library("everystep", lost=[0.1, 0.3, 0.2], durable=0.3, cold=0.5, held=4 * GIB, slots=4 * GIB - NBYTES // 20)
SLOW = library("slow", lost=[0.9], durable=0.9, cold=2.0)
QUICK = library("quick", lost=[0.5], durable=0.8, cold=0.9)
FAILED: list[Json] = [
    {"kind": "cycle", "blocks_s": 0.0, "lost_s": 0.001, "durable_s": 0.001, "cpu_s": {}, "library": "bad", "round": 0},
    {"kind": "failed", "library": "bad", "round": 0, "part": "save", "why": "ended with 1", "said": ["a", "no module"]},
]


def test_best_peer_is_minimum_of_finished() -> None:
    """A library that failed is listed with the reason, and its figures are not compared with."""
    found = figures.summary([*OURS, *SLOW, *QUICK, *FAILED])
    assert found["libraries"]["everystep"]["figures"]["lost_s"] == 0.2
    assert found["best"]["lost_s"] == {"peer": "quick", "value": 0.5, "ratio": 0.4}
    assert found["best"]["cold_s"]["peer"] == "quick"
    assert "memory_s" not in found["best"]
    assert found["libraries"]["bad"]["failures"] == ["save ended with 1: no module"]
    assert found["wrong"] == []
    shown = figures.library_table(found)
    assert "bad failed: save ended with 1: no module" in shown and "0.40 x" in shown


def test_peer_with_wrong_restore_is_never_best() -> None:
    """The exit status reports it."""
    found = figures.summary([*OURS, *SLOW, *library("liar", lost=[0.01], equal=False)])
    assert found["best"]["lost_s"]["peer"] == "slow"
    assert found["wrong"] == ["liar restored something else than was saved"]
    assert "NO" in figures.library_table(found)


def test_failure_of_everystep_is_always_wrong() -> None:
    """Also of one round of two."""
    again = [{**line, "library": "everystep", "round": 1} for line in FAILED]
    assert figures.summary([*OURS, *again, *QUICK])["wrong"] == ["everystep failed"]


def test_goals_are_judged_by_measurements() -> None:
    """Upper and lower bounds are checked, and a goal that was not measured is neither met nor missed."""
    limits = [limit("O_DIRECT read", 2.5), limit("O_DIRECT write", 2.0), limit("populate a memfd", 4.0)]
    own: list[Json] = [
        {"figure": "every step", "blocks_p99_s": 0.02, "ratio": 1.2},
        {"figure": "alone", "nbytes": NBYTES, "written_s": 0.6},
        {"figure": "start", "arena_bytes": 4 * NBYTES, "ready_s": 4.0},
        {"figure": "tensors", "count": 1_000, "blocks_s": 1.0, "staged_s": 1.0, "committed_s": 1.0, "restore_s": 1.0},
        {"figure": "tensors", "count": 10_000, "blocks_s": 9.0, "staged_s": 9.0, "committed_s": 9.0, "restore_s": 30.0},
    ]
    own_lines = [{"kind": "own", **line} for line in own]
    found = figures.summary([*limits, *OURS, *SLOW, *QUICK, *own_lines])
    met = verdicts(found)
    assert met["blocks, median"] is True
    assert met["blocks, 99th percentile"] is False
    assert met["lost / best peer"] is True  # 0.2 of 0.5
    assert met["durable / best peer"] is True  # 0.3 of 0.8
    assert met["staged to durable, rate / raw O_DIRECT write"] is True
    assert met["memory beyond slots / state"] is True  # a twentieth
    assert met["restore, cold, rate / raw O_DIRECT read"] is True  # 2 of 2.5 GB/s
    assert met["arena ready, rate / populating a memfd"] is False
    assert met["restore, cold / best peer"] is True
    assert met["restore from memory / best peer"] is None
    assert met["every step to memory, time / a step without saves"] is True
    assert met["10,000 small tensors, cost of one / among 1,000"] is False  # restores
    assert met["restore from memory, time / memcpy by 2 threads"] is None
    shown = figures.goal_table(found)
    assert "not measured" in shown and "missed" in shown and "0.40 x" in shown
    worse = library("everystep", lost=[0.3], durable=0.5, cold=1.5, blocks=0.004, held=4 * GIB)
    met = verdicts(figures.summary([*limits, *worse, *SLOW, *QUICK]))
    for what in (
        "blocks, median", "lost / best peer", "durable / best peer", "memory beyond slots / state",
        "restore, cold, rate / raw O_DIRECT read", "restore, cold / best peer",
    ):  # fmt: skip
        assert met[what] is False, what


def test_waits_measures_import_and_ls() -> None:
    """`import ckpt` and `ckpt ls` are timed as processes, and the JSON output has both."""
    command = [sys.executable, str(REPO / "benchmarks" / "waits.py"), "--checkpoints", "3", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    said = json.loads(done.stdout)
    assert said["checkpoints"] == 3 and set(said["seconds"]) == {"python -c pass", "import ckpt", "ckpt ls"}
    assert said["seconds"]["ckpt ls"]["median"] > said["seconds"]["python -c pass"]["median"] > 0
