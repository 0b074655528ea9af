"""Tests of triggers for emergency saves: every constructor, every rejected value, and its message."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import ckpt
from ckpt.errors import UsageError
from ckpt.triggers import (
    GRACE_S,
    SOURCES,
    OnDeadline,
    OnException,
    OnHang,
    OnMemoryPressure,
    OnOom,
    OnPreemption,
    OnSignal,
    as_triggers,
)


def test_each_constructor_keeps_its_arguments() -> None:
    """The value has the user's arguments, with numbers as floats and signals as signals."""
    assert ckpt.triggers.on_signal() == OnSignal((signal.SIGTERM, signal.SIGUSR1), GRACE_S, None)
    assert ckpt.triggers.on_signal("SIGHUP", 10, grace_s=5, leave=True) == OnSignal(
        (signal.SIGHUP, signal.SIGUSR1), 5.0, True
    )
    assert ckpt.triggers.on_preemption() == OnPreemption((), None, 5.0)
    assert ckpt.triggers.on_preemption("gce", "ec2", base_url="http://localhost:1", poll_s=1) == OnPreemption(
        ("gce", "ec2"), "http://localhost:1", 1.0
    )
    assert ckpt.triggers.on_deadline() == OnDeadline(None, 60.0, False)
    assert ckpt.triggers.on_exception() == OnException()
    assert ckpt.triggers.on_oom() == OnOom()
    assert ckpt.triggers.on_hang() == OnHang("report", 10.0, 30.0)
    assert ckpt.triggers.on_hang(action="exit", factor=2, min_s=1) == OnHang("exit", 2.0, 1.0)
    assert ckpt.triggers.on_memory_pressure() == OnMemoryPressure(0.05)
    assert ckpt.triggers.on_memory_pressure(share=0.5) == OnMemoryPressure(0.5)
    values = [ckpt.triggers.on_signal("SIGTERM", grace_s=5).grace_s, ckpt.triggers.on_hang(factor=3).factor]
    assert all(type(value) is float for value in values)


def test_duplicate_names_count_once() -> None:
    """A trigger may name a signal or a cloud twice; the order of first occurrence is kept."""
    assert ckpt.triggers.on_signal("SIGUSR1", "SIGTERM", 15, "SIGUSR1").numbers == (signal.SIGUSR1, signal.SIGTERM)
    assert ckpt.triggers.on_preemption("ec2", "azure", "ec2").sources == ("ec2", "azure")
    assert set(ckpt.triggers.on_preemption(*SOURCES).sources) == set(SOURCES)


def test_deadline_accepts_number_datetime_and_duration() -> None:
    """A number, a datetime in any zone and a duration give the same time, in seconds since 1970."""
    at = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert ckpt.triggers.on_deadline(at).at == ckpt.triggers.on_deadline(at.timestamp()).at == 1893553445.0
    assert ckpt.triggers.on_deadline(at.astimezone()).at == at.timestamp()
    assert ckpt.triggers.on_deadline(at.astimezone().replace(tzinfo=None)).at == at.timestamp()  # naive means local
    before = time.time()
    found = ckpt.triggers.on_deadline(in_s=100, before_s=0, leave=True)
    assert found.at is not None and before + 100 <= found.at <= time.time() + 100
    assert found.before_s == 0.0 and found.leave
    assert ckpt.triggers.on_deadline(int(before)).at == float(int(before))
    assert ckpt.triggers.on_deadline(datetime.now(UTC) - timedelta(days=1)).at is not None  # passed: saved immediately


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no such name": (lambda: ckpt.triggers.on_signal("TERM"), "'TERM' is not a signal: use a name like 'SIGTERM'"),
    "no such number": (lambda: ckpt.triggers.on_signal(0), "0 is not a signal"),
    "ours": (lambda: ckpt.triggers.on_signal(int(signal.SIGRTMIN) + 6), "is not a signal"),
    "a constant": (lambda: ckpt.triggers.on_signal("SIG_DFL"), "'SIG_DFL' is not a signal"),
    "a list": (lambda: ckpt.triggers.on_signal(["SIGTERM"]), "is not a signal"),  # type: ignore[arg-type]
    "KILL": (
        lambda: ckpt.triggers.on_signal("SIGKILL"),
        "SIGKILL cannot be a trigger, because Python cannot handle it",
    ),
    "STOP": (lambda: ckpt.triggers.on_signal(19), "SIGSTOP cannot be a trigger"),
    "SEGV": (lambda: ckpt.triggers.on_signal("SIGTERM", "SIGSEGV"), "SIGSEGV cannot be a trigger"),
    "grace 0": (lambda: ckpt.triggers.on_signal(grace_s=0), "grace_s=0: it must be a number of seconds above 0"),
    "grace below": (lambda: ckpt.triggers.on_signal(grace_s=-1), "grace_s=-1: it must be a number of seconds above 0"),
    "grace without end": (lambda: ckpt.triggers.on_signal(grace_s=math.inf), "grace_s=inf: it must"),
    "grace text": (lambda: ckpt.triggers.on_signal(grace_s="30s"), "grace_s='30s': it must"),  # type: ignore[arg-type]
    "cloud": (
        lambda: ckpt.triggers.on_preemption("aws"),
        "unknown source of preemption notices 'aws': use ec2, gce, azure",
    ),
    "second cloud": (lambda: ckpt.triggers.on_preemption("ec2", "GCE"), "unknown source of preemption notices 'GCE'"),
    "address alone": (
        lambda: ckpt.triggers.on_preemption(base_url="http://x"),
        "base_url= needs the name of its source",
    ),
    "poll 0": (
        lambda: ckpt.triggers.on_preemption("ec2", poll_s=0),
        "poll_s=0: it must be a number of seconds above 0",
    ),
    "both": (lambda: ckpt.triggers.on_deadline(1.0, in_s=1.0), "pass `at` or `in_s`, not both"),
    "at inf": (lambda: ckpt.triggers.on_deadline(math.inf), "at=inf: it must be a datetime"),
    "in 0": (lambda: ckpt.triggers.on_deadline(in_s=0), "in_s=0: it must be a number of seconds above 0"),
    "before below": (
        lambda: ckpt.triggers.on_deadline(before_s=-1),
        "before_s=-1: it must be a number of seconds of at least 0",
    ),
    "before inf": (
        lambda: ckpt.triggers.on_deadline(before_s=math.inf),
        "before_s=inf: it must be a number of seconds of at least 0",
    ),
    "action": (lambda: ckpt.triggers.on_hang(action="kill"), 'action=\'kill\': it must be "report" or "exit"'),
    "no action": (lambda: ckpt.triggers.on_hang(action=None), "action=None"),  # type: ignore[arg-type]
    "factor 0": (lambda: ckpt.triggers.on_hang(factor=0), "factor"),
    "factor low": (
        lambda: ckpt.triggers.on_hang(factor=1.5),
        "factor=1.5: it must be at least 2, or every slow step would count as a hang",
    ),
    "min 0": (lambda: ckpt.triggers.on_hang(min_s=0), "min_s=0: it must be a number of seconds above 0"),
    "share 0": (lambda: ckpt.triggers.on_memory_pressure(share=0), "share=0: it must be a number between 0 and 1"),
    "share text": (lambda: ckpt.triggers.on_memory_pressure(share="5%"), "share='5%'"),  # type: ignore[arg-type]
    "share in percent": (lambda: ckpt.triggers.on_memory_pressure(share=5), "share=5: it must"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_trigger_arguments_are_rejected(case: str) -> None:
    """A UsageError names the setting and the value, or the correct form."""
    call, message = REFUSED[case]
    with pytest.raises(UsageError, match=re.escape(message)):
        call()


def test_signal_of_faulthandler_is_rejected() -> None:
    """faulthandler handles SEGV, BUS, FPE, ILL and ABRT, so a trigger for them could never work."""
    with pytest.raises(UsageError, match="SIGABRT"):
        ckpt.triggers.on_signal("SIGABRT")


def test_auto_is_all_triggers_with_defaults() -> None:
    found = as_triggers("auto")
    kinds = [OnSignal, OnPreemption, OnDeadline, OnException, OnOom, OnHang, OnMemoryPressure]
    assert [type(one) for one in found] == kinds
    assert found == (
        ckpt.triggers.on_signal(), ckpt.triggers.on_preemption(), ckpt.triggers.on_deadline(),
        ckpt.triggers.on_exception(), ckpt.triggers.on_oom(),
        ckpt.triggers.on_hang(), ckpt.triggers.on_memory_pressure(),
    )  # fmt: skip


def test_none_and_empty_list_mean_no_triggers() -> None:
    assert as_triggers(None) == as_triggers([]) == as_triggers(()) == ()


def test_list_of_triggers_is_kept() -> None:
    one, two = ckpt.triggers.on_signal("SIGTERM"), ckpt.triggers.on_oom()
    assert as_triggers([one, two]) == as_triggers((one, two)) == as_triggers(iter([one, two])) == (one, two)
    assert as_triggers(one) == (one,)
    # Some kinds may occur more than once: different signals, clouds and times.
    several = [
        ckpt.triggers.on_signal("SIGHUP"),
        ckpt.triggers.on_deadline(1.0),
        ckpt.triggers.on_deadline(2.0),
        ckpt.triggers.on_preemption("ec2"),
    ]
    assert as_triggers([one, *several]) == (one, *several)


@pytest.mark.parametrize("given", ["none", "AUTO", "", b"auto", {"SIGTERM": 1}, 5, True, ckpt.triggers.on_signal])
def test_invalid_triggers_value_is_rejected(given: object) -> None:
    """The message shows the correct form and the given value."""
    with pytest.raises(UsageError, match=re.escape('triggers is "auto" or a list such as')) as caught:
        as_triggers(given)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("given", ["SIGTERM", 15, None, ["auto"]])
def test_invalid_item_among_triggers_is_rejected(given: object) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{given!r} is not a trigger")):
        as_triggers([ckpt.triggers.on_oom(), given])


def test_uncalled_trigger_function_gets_a_hint() -> None:
    """The common mistake, on_hang instead of on_hang(), gets a hint with the correct form."""
    with pytest.raises(UsageError, match=re.escape("is not a trigger: call it, on_hang()")):
        as_triggers([ckpt.triggers.on_hang])
    with pytest.raises(UsageError) as caught:  # negative control: what cannot be called gets no such hint
        as_triggers(["on_hang"])
    assert "call it" not in str(caught.value)


def test_duplicate_triggers_are_rejected() -> None:
    """Two settings for one hang, one memory or one signal are ambiguous."""
    with pytest.raises(UsageError, match="triggers contains OnHang twice"):
        as_triggers([ckpt.triggers.on_hang(), ckpt.triggers.on_hang(min_s=5)])
    with pytest.raises(UsageError, match="triggers contains OnMemoryPressure twice"):
        as_triggers([ckpt.triggers.on_memory_pressure(), ckpt.triggers.on_memory_pressure()])
    with pytest.raises(UsageError, match="triggers contains the same signal twice: remove one"):
        as_triggers([ckpt.triggers.on_signal("SIGTERM", "SIGUSR1"), ckpt.triggers.on_signal("SIGUSR1")])
    assert as_triggers([ckpt.triggers.on_signal("SIGTERM"), ckpt.triggers.on_signal("SIGUSR1")])  # negative control


def test_checkpointer_rejects_triggers_before_creating_files(run_dir: str, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="not a trigger"):
        ckpt.Checkpointer({"n": 1}, run_dir, triggers=[ckpt.triggers.on_signal])
    assert list(tmp_path.iterdir()) == []
