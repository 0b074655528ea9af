"""Triggers of emergency saves, as the user configures them. `ckpt.guard` acts on these values.

    triggers="auto"                                    all triggers, with the defaults below
    triggers=[ckpt.on_signal("SIGTERM"), ckpt.on_hang(action="exit", min_s=20)]
    triggers=[]                                        no trigger

A trigger saves if it can, without a guarantee. Only the save intervals of the tiers are guaranteed.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from ckpt.errors import InvalidArgumentError

GRACE_S = 25.0  # torchrun, Slurm (KillWait) and Kubernetes allow 30 s between SIGTERM and SIGKILL
DEADLY = (  # signals that cannot be triggers: Python cannot handle them, or faulthandler handles them
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
)  # fmt: skip
SOURCES = ("ec2", "gce", "azure")

# Exit codes for launchers and schedulers; `ADVICE` in ckpt/guard/report.py describes what to do for each.
RETRY_CODE = 75  # EX_TEMPFAIL of sysexits.h
REPLACE_CODE = 76
RESUBMIT_CODE = 77


@dataclass(frozen=True, slots=True)
class OnSignal:
    """Save on signals. `leave`: True exits after the save, None only if the signal would have ended the process."""

    numbers: tuple[signal.Signals, ...]
    grace_s: float = GRACE_S
    leave: bool | None = None


@dataclass(frozen=True, slots=True)
class OnPreemption:
    """Save on preemption notices. `sources`: clouds in `SOURCES` to query; () identifies the cloud by the firmware."""

    sources: tuple[str, ...] = ()
    base_url: str | None = None
    poll_s: float = 5.0


@dataclass(frozen=True, slots=True)
class OnDeadline:
    """Save `before_s` seconds before `at`, in seconds since 1970. If `at` is None, before the end of the Slurm job."""

    at: float | None = None
    before_s: float = 60.0
    leave: bool = False


@dataclass(frozen=True, slots=True)
class OnException:
    """Save when an exception leaves the `with` block or the script."""


@dataclass(frozen=True, slots=True)
class OnOom:
    """Save when torch or Python raises an out-of-memory error, on the device or the host."""


@dataclass(frozen=True, slots=True)
class OnHang:
    """Save when no step has ended for `factor` times the usual step time and at least `min_s` seconds."""

    action: str = "report"
    factor: float = 10.0
    min_s: float = 30.0


@dataclass(frozen=True, slots=True)
class OnMemoryPressure:
    """Save when less than `share` of memory is free, or when processes wait for memory for `share` of the time."""

    share: float = 0.05


Trigger = OnSignal | OnPreemption | OnDeadline | OnException | OnOom | OnHang | OnMemoryPressure


def on_signal(*names: str | int, grace_s: float = GRACE_S, leave: bool | None = None) -> OnSignal:
    """Save when a signal arrives.

    - `names`: names or numbers of signals, default SIGTERM and SIGUSR1.
    - `grace_s`: seconds from the signal until the sender kills the process, default 25.
    - `leave`: True ends the process after the save with exit code 128 + the signal's number. By default, the process
      ends if the signal would have ended it and no handler of yours decides otherwise. This is so for SIGTERM, SIGHUP
      and SIGXCPU, but not for SIGUSR1 and SIGUSR2, after which training continues.

    Your own handlers still run, whether they were installed before or later. Raises InvalidArgumentError for signals
    that are unknown or cannot be handled.
    """
    signals = []
    for name in names or ("SIGTERM", "SIGUSR1"):
        try:
            signals.append(signal.Signals[name] if isinstance(name, str) else signal.Signals(name))
        except (KeyError, ValueError):
            raise InvalidArgumentError(f"{name!r} is not a signal: use a name like 'SIGTERM' or 'SIGUSR1'") from None
        if signals[-1] in DEADLY:
            raise InvalidArgumentError(
                f"{signals[-1].name} cannot be a trigger, because Python cannot handle it; the writer detects this "
                "death without one"
            )
    _positive("grace_s", grace_s)
    return OnSignal(tuple(dict.fromkeys(signals)), float(grace_s), leave)


def on_preemption(*sources: str, base_url: str | None = None, poll_s: float = 5.0) -> OnPreemption:
    """Save when the cloud announces that it will take this machine away.

    - `sources`: any of "ec2", "gce" and "azure". By default the machine's firmware identifies the cloud, and no other
      cloud's service is queried.
    - `base_url`: address to query instead of that of the cloud's metadata service.
    - `poll_s`: seconds between requests if the service has no long poll, default 5.
    """
    if bad := [source for source in sources if source not in SOURCES]:
        raise InvalidArgumentError(f"unknown source of preemption notices {bad[0]!r}: use {', '.join(SOURCES)}")
    if base_url is not None and not sources:
        raise InvalidArgumentError("base_url= needs the name of its source: on_preemption('ec2', base_url=...)")
    _positive("poll_s", poll_s)
    return OnPreemption(tuple(dict.fromkeys(sources)), base_url, float(poll_s))


def on_deadline(
    at: float | datetime | None = None, *, in_s: float | None = None, before_s: float = 60.0, leave: bool = False
) -> OnDeadline:
    """Save before a deadline.

    - `at`: the deadline, as a datetime or in seconds since 1970. Default: the end of the Slurm job
      (SLURM_JOB_END_TIME). Outside Slurm, the trigger then does nothing.
    - `in_s`: the deadline as a number of seconds from now, instead of `at`.
    - `before_s`: number of seconds before the deadline at which the save begins, default 60.
    - `leave`: True ends the process after the save, so that the scheduler can continue. Default False.
    """
    if at is not None and in_s is not None:
        raise InvalidArgumentError("pass `at` or `in_s`, not both")
    if in_s is not None:
        _positive("in_s", in_s)
        at = time.time() + in_s
    if isinstance(at, datetime):
        at = at.timestamp()
    number = isinstance(at, (int, float)) and not isinstance(at, bool)
    if at is not None and not (number and math.isfinite(at)):
        raise InvalidArgumentError(f"at={at!r}: it must be a datetime or seconds since 1970")
    if not isinstance(before_s, (int, float)) or not 0 <= before_s < math.inf:
        raise InvalidArgumentError(f"before_s={before_s!r}: it must be a number of seconds of at least 0")
    return OnDeadline(None if at is None else float(at), float(before_s), leave)


def on_exception() -> OnException:
    """Save when an exception leaves the `with` block, or the script."""
    return OnException()


def on_oom() -> OnOom:
    """Save when memory runs out, on a device (torch.OutOfMemoryError) or on the host."""
    return OnOom()


def on_hang(*, action: str = "report", factor: float = 10.0, min_s: float = 30.0) -> OnHang:
    """Save when no step has ended for `factor` times the usual step time and at least `min_s` seconds.

    - `action`: "report" (default) saves, and reports which rank hangs and where. "exit" then also ends the trainer with
      exit code 75, so that the launcher restarts it.
    - `factor`: multiple of the usual step time, at least 2, default 10.
    - `min_s`: shortest time that counts as a hang, seconds, default 30.

    The usual step time is measured during training. Put work that takes longer than a step, for example an evaluation,
    into `with cp.not_training():`.
    """
    if action not in ("report", "exit"):
        raise InvalidArgumentError(f'action={action!r}: it must be "report" or "exit"')
    _positive("min_s", min_s)
    if not isinstance(factor, (int, float)) or not 2 <= factor < math.inf:
        raise InvalidArgumentError(
            f"factor={factor!r}: it must be at least 2, or every slow step would count as a hang"
        )
    return OnHang(action, float(factor), float(min_s))


def on_memory_pressure(*, share: float = 0.05) -> OnMemoryPressure:
    """Save, and release snapshots in memory, when little memory is free on the machine or in the container.

    - `share`: share of the memory; the trigger acts when less is free. Between 0 and 1, default 0.05.
    """
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise InvalidArgumentError(f"share={share!r}: it must be a number between 0 and 1")
    return OnMemoryPressure(float(share))


def as_triggers(triggers: object) -> tuple[Trigger, ...]:
    """Convert the user's argument, which is "auto", None (no triggers) or a list, to a tuple of triggers."""
    if isinstance(triggers, str) and triggers == "auto":
        return (
            on_signal(), on_preemption(), on_deadline(), on_exception(), on_oom(), on_hang(), on_memory_pressure(),
        )  # fmt: skip
    given = () if triggers is None else (triggers,) if isinstance(triggers, Trigger) else triggers
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, dict)):
        raise InvalidArgumentError(
            f'triggers is "auto" or a list such as [ckpt.triggers.on_signal("SIGTERM")], not {triggers!r}'
        )
    found = tuple(given)
    for one in found:
        if not isinstance(one, Trigger):
            hint = f": call it, {one.__name__}()" if callable(one) and hasattr(one, "__name__") else ""
            raise InvalidArgumentError(f"{one!r} is not a trigger{hint}")
    for kind in (OnHang, OnMemoryPressure):
        if sum(isinstance(one, kind) for one in found) > 1:
            raise InvalidArgumentError(f"triggers contains {kind.__name__} twice: remove one")
    numbers = [number for one in found if isinstance(one, OnSignal) for number in one.numbers]
    if len(set(numbers)) != len(numbers):
        raise InvalidArgumentError("triggers contains the same signal twice: remove one")
    return found


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidArgumentError(f"{name}={value!r}: it must be a number of seconds above 0")
