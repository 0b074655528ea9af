"""Fault reports: JSON round trip, sorting by time, grouping into incidents, and the file for torchrun."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ckpt.core.cadence.ledger import TOGETHER_S
from ckpt.errors import CorruptError
from ckpt.guard.incidents import is_of_a_peer
from ckpt.guard.report import ADVICE, Fault, SavedStep, incidents, tell_launcher
from ckpt.triggers import RESUBMIT_CODE

START = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def fault(kind: str = "exception", after_s: float = 0.0, **fields: Any) -> Fault:
    """Return a fault at a known time."""
    fields.setdefault("summary", f"{kind} after {after_s:g} s")
    at = (START + timedelta(seconds=after_s)).isoformat(timespec="microseconds")
    return Fault(kind, time=at, term=fields.pop("term", "3.abcdefgh"), **fields)


def full() -> Fault:
    """Return a fault in which every field has its own value."""
    return Fault(
        "hang", "rank 1 waits", by="writer", how="step counter", rank=1, world=4, host="node", pid=7,
        time="2030-01-02T03:04:05.000006+00:00", term="3.abcdefgh", steps={"0": 5, "1": 4}, suspects=[2],
        stacks={"1": ["f (a.py:1)", "g (a.py:2)"]}, evidence=[{"rank": 1, "state": "sleeping"}],
        saved=[SavedStep(5, "memory", "ring", 0.1), SavedStep(4, "file:///run", "agreed", 0.5, "no space left")],
        timings={"total_s": 1.5}, advice="replace", exit_code=76, launcher={"SLURM_JOB_ID": "9"},
    )  # fmt: skip


def test_report_survives_a_json_round_trip() -> None:
    """Every field survives the stored bytes."""
    for one in [full(), fault(), Fault("death", "")]:
        assert Fault.from_json(json.loads(one.to_bytes())) == one
    data = json.loads(full().to_bytes())
    assert data["version"] == 1 and data["means"] == ADVICE["replace"]


def test_negative_control_lost_field_is_detected() -> None:
    """Without any one of the fields the report is different."""
    for name in full().to_json():
        data = json.loads(full().to_bytes())
        del data[name]
        try:
            same = Fault.from_json(data) == full()
        except CorruptError:
            same = False
        assert same == (name in ("version", "means"))


HOSTILE: dict[str, Any] = {
    "nothing": None, "a number": 5, "text": "fault", "a list": [], "empty": {},
    "no kind": {"summary": "x"}, "kind": {"kind": 5, "summary": "x"}, "summary": {"kind": "x", "summary": None},
    "rank": {"rank": "0"}, "rank true": {"rank": True}, "rank list": {"rank": [0]},
    "time": {"time": "yesterday"}, "no time": {"time": None}, "time number": {"time": 5},
    "saved": {"saved": 5}, "saved none": {"saved": None}, "saved items": {"saved": [5]},
    "saved too little": {"saved": [{"step": 1}]},
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_invalid_report_raises_corrupt_error(case: str) -> None:
    """Any other JSON raises only CorruptError."""
    data = HOSTILE[case]
    if isinstance(data, dict) and data and "kind" not in data and "summary" not in data:
        data = {**full().to_json(), **data}
    with pytest.raises(CorruptError, match="not the report of a fault"):
        Fault.from_json(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"saved": [{"step": "5", "tier": "/run", "how": "ring", "seconds": "0"}]},
        {"stacks": 5},
        {"advice": ["retry"]},
        {"time": "0001-01-01T00:00:00"},
    ],
)
def test_field_of_another_type_is_rejected_or_handled(wrong: dict[str, Any]) -> None:
    """The field is rejected when it is read, or all functions that `ckpt faults` calls accept it."""
    try:
        read = Fault.from_json({**full().to_json(), **wrong})
    except CorruptError:
        return
    assert read.line and read.to_json() and incidents([read, full()])


def test_keys_sort_by_time() -> None:
    """The order of the keys is the order of the faults, from microseconds to years."""
    spans = [0, 1e-6, 1e-3, 0.5, 1, 59, 3600, 86400, 400 * 86400]
    for spaces in (spans, spans[::-1]):
        keys = {fault(after_s=s).key: s for s in spaces}
        assert [keys[key] for key in sorted(keys)] == spans
    assert fault().key == "faults/20300102T030405000000.0.json"
    assert len({fault(rank=rank).key for rank in range(3)}) == 3  # ranks do not overwrite each other
    key = Fault.from_json({**full().to_json(), "time": "2030-01-02 03:04:05+01:00"}).key
    assert "/" not in key.removeprefix("faults/") and ".." not in key


def test_reports_with_one_cause_form_an_incident() -> None:
    """Ranks of one job attempt that end close together form an incident, ordered by detection."""
    first = fault("death", 0.0, rank=2)
    later = [
        fault("exception", 1.0, rank=0, advice="fix"),
        fault("hang", 30.0, rank=1),
        fault("signal", 60.0, exit_code=143),
    ]
    assert incidents([*reversed(later), first]) == [[first, *later]]  # each close to the one before
    limit = [fault("deadline", 0.1 * rank, rank=rank) for rank in range(2)]  # all ranks save before it
    again = fault("deadline", 5.0, rank=1)
    assert incidents([*limit, again]) == [limit, [again]]


def test_death_is_listed_before_errors_of_peers() -> None:
    """A rank with a broken connection reports before the writer of the killed rank, but is listed after it. A rank's
    own earlier error is listed first."""
    torn, death = fault("exception", 0.0, rank=1, advice="retry"), fault("death", 0.2, rank=0)
    assert incidents([torn, death]) == [[death, torn]] and incidents([torn]) == [[torn]]
    own = fault("exception", 0.0, rank=1, advice="fix")
    assert incidents([own, death]) == [[own, death]]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:19731"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("broken pipe"), False),
    ],
)
def test_error_caused_by_a_peer_is_recognized(error: Exception, expected: bool) -> None:
    """The error is not caused by this rank's code, so a restart may help."""
    assert is_of_a_peer(error) == expected


def test_unrelated_reports_are_separate_incidents() -> None:
    """The attempts differ, the time between is long, or the job continued after the fault."""
    pairs = [
        (fault(), fault(after_s=1, term="4.bcdefghi")),
        (fault(), fault(after_s=TOGETHER_S + 1)),
        (fault("request"), fault(after_s=1)),
        (fault(), fault("request", after_s=1)),
        (fault("memory"), fault("memory", after_s=1)),
        (fault("signal"), fault("signal", after_s=1)),  # SIGUSR1, twice
    ]
    for one, two in pairs:
        assert incidents([two, one]) == [[one], [two]]
    assert incidents([fault(), fault(after_s=TOGETHER_S - 1)]) == [[fault(), fault(after_s=TOGETHER_S - 1)]]  # control
    assert incidents([]) == []


def test_ending_faults_are_recognized() -> None:
    """A fault ends the job if it has an exit code or a fatal kind."""
    assert [kind for kind in ("signal", "preemption", "deadline", "memory", "request") if fault(kind).ending] == []
    assert all(fault(kind).ending for kind in ("death", "hang", "exception", "oom"))
    assert fault("deadline", exit_code=RESUBMIT_CODE).ending


def test_torchrun_reads_the_error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own reader of a worker's error file finds the reason, the stack and the time, and prints the reason."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    before = int(time.time())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    tell_launcher(fault(summary="rank 0 raised ValueError: ä"), ("f (a.py:1)", "g (a.py:2)"))
    found = ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file=str(path))
    assert "rank 0 raised ValueError: ä" in str(found.message)
    assert "rank 0 raised ValueError" in str(ChildFailedError("train.py", {0: found}))
    assert before <= found.timestamp <= time.time()
    assert found.error_file_data["message"]["extraInfo"]["py_callstack"].endswith("f (a.py:1)\ng (a.py:2)")


def test_negative_control_without_the_error_file(tmp_path: Path) -> None:
    """Without a file, torch's reader makes up its own text."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    found = ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file=str(tmp_path / "none"))
    assert "traceback" in found.message


def test_no_file_is_written_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun nothing is written, and an unwritable path is ignored."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    tell_launcher(fault())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    tell_launcher(fault())
    assert list(tmp_path.iterdir()) == []
