"""When to save out of turn, as the user says it. Values only: `ckpt.guard` acts on them.

    triggers="auto"                                    all of these, with the defaults below
    triggers=[ckpt.on_signal("SIGTERM"), ckpt.on_hang(action="exit", min_s=20)]
    triggers=[]                                        none

A trigger is a best effort. What is guaranteed is the cadence of the tiers.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from ckpt.errors import UsageError

GRACE_S = 25.0  # of the 30 s that torchrun, Slurm (KillWait) and Kubernetes leave between SIGTERM and SIGKILL
DEADLY = (  # not to be handled, or handled by faulthandler already
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
)  # fmt: skip
SOURCES = ("ec2", "gce", "azure")

# What a launcher or scheduler can act on: see `ADVICE` in ckpt/guard/report.py.
RETRY_CODE = 75  # sysexits.h: EX_TEMPFAIL
REPLACE_CODE = 76
RESUBMIT_CODE = 77


@dataclass(frozen=True, slots=True)
class OnSignal:
    """`leave`: end the process once the state is safe. None: where the signal would have ended it without us."""

    numbers: tuple[signal.Signals, ...]
    grace_s: float = GRACE_S
    leave: bool | None = None


@dataclass(frozen=True, slots=True)
class OnPreemption:
    """`sources`: of `SOURCES`, or () to find out from what the firmware says. `base_url` instead of the cloud's own."""

    sources: tuple[str, ...] = ()
    base_url: str | None = None
    poll_s: float = 5.0


@dataclass(frozen=True, slots=True)
class OnDeadline:
    """`at`: seconds since 1970, None for the end of the Slurm job. Saved `before_s` seconds ahead of it."""

    at: float | None = None
    before_s: float = 60.0
    leave: bool = False


@dataclass(frozen=True, slots=True)
class OnException:
    """An exception that leaves the `with` block, or the script."""


@dataclass(frozen=True, slots=True)
class OnOom:
    """No memory, on the device or on the host, as an exception of torch or Python."""


@dataclass(frozen=True, slots=True)
class OnHang:
    """No step for `factor` times the usual step, and at least `min_s` seconds. `action`: "report" or "exit"."""

    action: str = "report"
    factor: float = 10.0
    min_s: float = 30.0


@dataclass(frozen=True, slots=True)
class OnMemoryPressure:
    """Less than `share` of the memory is available, or processes wait for memory that much of the time."""

    share: float = 0.05


Trigger = OnSignal | OnPreemption | OnDeadline | OnException | OnOom | OnHang | OnMemoryPressure


def on_signal(*names: str | int, grace_s: float = GRACE_S, leave: bool | None = None) -> OnSignal:
    """Save when a signal comes, by name or number: SIGTERM and SIGUSR1 if none is given.

    Your own handlers still run, whether they were there before or come later. `grace_s`: seconds until the sender will
    kill. `leave`: whether to end the process when the state is safe, with exit code 128 + the signal's number; by
    default where the signal would have ended it, if no handler of yours decides: SIGTERM, SIGHUP, SIGXCPU, and not the
    SIGUSRs, which say "save and go on".
    """
    found = []
    for name in names or ("SIGTERM", "SIGUSR1"):
        try:
            found.append(signal.Signals[name] if isinstance(name, str) else signal.Signals(name))
        except (KeyError, ValueError):
            raise UsageError(f"{name!r} is not a signal: use names such as 'SIGTERM' and 'SIGUSR1'") from None
        if found[-1] in DEADLY:
            raise UsageError(f"{found[-1].name} cannot be handled; the writer notices such a death by itself")
    _positive("grace_s", grace_s)
    return OnSignal(tuple(dict.fromkeys(found)), float(grace_s), leave)


def on_preemption(*sources: str, base_url: str | None = None, poll_s: float = 5.0) -> OnPreemption:
    """Save when the cloud says that it will take this machine away: "ec2", "gce" or "azure".

    Without `sources` the machine's firmware tells which cloud this is, and nothing is asked anywhere else. `base_url`
    replaces the address of the metadata service; `poll_s`: seconds between two questions where there is no long poll.
    """
    if bad := [source for source in sources if source not in SOURCES]:
        raise UsageError(f"preemption notices come from {', '.join(SOURCES)}, not {bad[0]!r}")
    if base_url is not None and not sources:
        raise UsageError("base_url needs the source that is served there: on_preemption('ec2', base_url=...)")
    _positive("poll_s", poll_s)
    return OnPreemption(tuple(dict.fromkeys(sources)), base_url, float(poll_s))


def on_deadline(
    at: float | datetime | None = None, *, in_s: float | None = None, before_s: float = 60.0, leave: bool = False
) -> OnDeadline:
    """Save `before_s` seconds ahead of a moment: `at` (a datetime, or seconds since 1970), or `in_s` seconds from now.

    Without either, the end of the Slurm job (SLURM_JOB_END_TIME); outside of Slurm that is no trigger at all.
    `leave`: end the process when the state is safe, so that the scheduler can go on.
    """
    if at is not None and in_s is not None:
        raise UsageError("a deadline is given as `at` or as `in_s`, not both")
    if in_s is not None:
        _positive("in_s", in_s)
        at = time.time() + in_s
    if isinstance(at, datetime):
        at = at.timestamp()
    number = isinstance(at, (int, float)) and not isinstance(at, bool)
    if at is not None and not (number and math.isfinite(at)):
        raise UsageError(f"a deadline is a moment, not {at!r}")
    if not isinstance(before_s, (int, float)) or not 0 <= before_s < math.inf:
        raise UsageError(f"before_s is a number of seconds from 0, not {before_s!r}")
    return OnDeadline(None if at is None else float(at), float(before_s), leave)


def on_exception() -> OnException:
    """Save when an exception leaves the `with` block, or the script."""
    return OnException()


def on_oom() -> OnOom:
    """Save when memory runs out, on a device (torch.OutOfMemoryError) or on the host."""
    return OnOom()


def on_hang(*, action: str = "report", factor: float = 10.0, min_s: float = 30.0) -> OnHang:
    """Save when no step has come for `factor` times the usual step time, and for `min_s` seconds at least.

    The usual time is learnt from the steps; put what takes longer than a step, such as an evaluation, into
    `with cp.pause():`. `action="report"` saves and says who hangs, and where; "exit" then ends the trainer as well
    (exit code 75), so that the launcher starts it again.
    """
    if action not in ("report", "exit"):
        raise UsageError(f'the action on a hang is "report" or "exit", not {action!r}')
    _positive("min_s", min_s)
    if not isinstance(factor, (int, float)) or not 2 <= factor < math.inf:
        raise UsageError(f"factor={factor!r} would take every slow step for a hang: use 2 or more")
    return OnHang(action, float(factor), float(min_s))


def on_memory_pressure(*, share: float = 0.05) -> OnMemoryPressure:
    """Save, and give memory of ours back, when less than `share` of the machine's or container's memory is left."""
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise UsageError(f"share={share!r}: a part of the memory, between 0 and 1")
    return OnMemoryPressure(float(share))


def as_triggers(triggers: object) -> tuple[Trigger, ...]:
    """What the user passed: "auto", None for none, or a list."""
    if isinstance(triggers, str) and triggers == "auto":
        return (
            on_signal(), on_preemption(), on_deadline(), on_exception(), on_oom(), on_hang(), on_memory_pressure(),
        )  # fmt: skip
    given = () if triggers is None else (triggers,) if isinstance(triggers, Trigger) else triggers
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, dict)):
        raise UsageError(f'triggers is "auto" or a list such as [ckpt.on_signal("SIGTERM")], not {triggers!r}')
    found = tuple(given)
    for one in found:
        if not isinstance(one, Trigger):
            hint = f": call it, {one.__name__}()" if callable(one) and hasattr(one, "__name__") else ""
            raise UsageError(f"{one!r} is not a trigger{hint}")
    for kind in (OnHang, OnMemoryPressure):
        if sum(isinstance(one, kind) for one in found) > 1:
            raise UsageError(f"{kind.__name__} is among the triggers twice")
    numbers = [number for one in found if isinstance(one, OnSignal) for number in one.numbers]
    if len(set(numbers)) != len(numbers):
        raise UsageError("the same signal is among the triggers twice")
    return found


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UsageError(f"{name} is a number of seconds above 0, not {value!r}")
