"""The report of a fault: one line of text for people, and `faults/<time>.<rank>.json` in the run for programs.

A `Fault` is one rank's report of one incident. It has the fault that was detected first and its detector, the step of
every rank, the saved steps, the duration of each phase, and the advice to a launcher or scheduler (a key of `ADVICE`).
Ranks write their reports independently; `incidents` groups the reports about one incident.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from ckpt.core.cadence.ledger import TOGETHER_S
from ckpt.core.format.manifest import typed
from ckpt.errors import USER_ERRORS, CheckpointError, CorruptError
from ckpt.units import duration

PREFIX = "faults/"
MAX_REPORT = 4 << 20
MAX_STACK = 200  # maximum lines of a stack

ADVICE = {
    "retry": "start the job again on the same machines",
    "replace": "start the job again without this machine",
    "resubmit": "the time is over or the machine is taken away: submit the job again",
    "fix": "it will happen again: fix the error first",
    "none": "nothing to do",
}

KINDS = {  # texts for people, by the kinds in reports and in goodput.breakdown.Interruption, which programs use
    "signal": "stop signal",
    "preemption": "preemption notice",
    "deadline": "time limit",
    "oom": "out of memory",
    "memory": "memory is short",
    "death": "crash or kill",
    "left": "exception or early end",
    "unknown": "cause unknown",
    "none": "stopped on purpose",
    "moved": "copied",
}
ASKED = {  # texts for a requested save after which training continued, which is not a fault
    "request": "requested",
    "signal": "requested by a signal",
    "deadline": "before a time limit",
}

LAUNCHER = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "KUBERNETES_SERVICE_HOST",
)


def in_words(kind: str, *, asked: bool = False) -> str:
    """Return the text for people of a kind of fault or interruption. `asked`: True for a requested save."""
    return (ASKED if asked else KINDS).get(kind, kind)


def was_asked(kind: str, by: str, *, ends: bool) -> bool:
    """Return True for a requested save, or a save before a time limit, because neither is a fault. A signal detected
    only by the writer is a fault, because the trainer was blocked."""
    return kind == "request" or (kind in ASKED and by != "writer" and not ends)


@dataclass
class SavedStep:
    """A step saved because of an incident. `tier`: "memory" or a URL. `seconds`: time since the detection."""

    step: int
    tier: str
    how: str  # "ring": from a snapshot in memory; "live": staged after an exception in step(); "agreed": by all loops
    seconds: float
    error: str = ""


@dataclass
class Fault:
    """One rank's report of one incident.

    `kind`: "signal", "preemption", "deadline", "exception", "oom", "hang", "memory", "request" or "death"; `by`: the
        process that detected it first, "writer" or "fault handler"; `how`: the means of detection; `time`: UTC;
        `term`: "<term>.<nonce>" of the job attempt; `steps`: the last known step of each rank;
    `stacks`: frames by rank, innermost first; `evidence`: activity of each rank that could be inspected; `timings`:
        seconds since the detection; `exit_code`: exit code of the process, None if it continues.
    """

    kind: str
    summary: str
    by: str = "fault handler"
    how: str = ""
    rank: int = 0
    world: int = 1
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    term: str = ""
    steps: dict[str, int] = field(default_factory=dict)
    suspects: list[int] = field(default_factory=list)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    saved: list[SavedStep] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    advice: str = "retry"
    exit_code: int | None = None
    launcher: dict[str, str] = field(default_factory=lambda: {k: os.environ[k] for k in LAUNCHER if k in os.environ})

    @property
    def key(self) -> str:
        """Return the key of the report in a store."""
        return f"{PREFIX}{re.sub('[^0-9T]', '', self.time[:26])}.{self.rank}.json"

    @property
    def line(self) -> str:
        """Return the report as one line of the log."""
        durable = [s for s in self.saved if s.tier != "memory" and not s.error]
        held = [s for s in self.saved if s.tier == "memory" and not s.error]
        if durable:
            best = max(durable, key=lambda s: s.step)
            kept = f"step {best.step} is durable in {best.tier} after {duration(best.seconds)}"
        elif held:
            kept = f"step {max(s.step for s in held)} is in memory, not durable yet"
        else:
            kept = "nothing new was saved"
        return f"{self.summary} [{kept}]"

    def to_json(self) -> dict[str, Any]:
        found = {"version": 1, **asdict(self), "means": ADVICE.get(self.advice, "")}
        found["stacks"] = {rank: frames[:MAX_STACK] for rank, frames in self.stacks.items()}
        return found

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_json(), indent=1).encode()

    @classmethod
    def from_json(cls, data: Any) -> Fault:
        """Parse a report. Raise CorruptError if it is invalid."""
        try:
            fault = typed(cls, data)
            fault.when  # noqa: B018 - raises ValueError if `time` is not a time
            return fault
        except (OverflowError, ValueError) as error:
            raise CorruptError(f"not the report of a fault: {error}") from None

    @property
    def asked(self) -> bool:
        """Return True for a requested save, or a save before a time limit, because neither is a fault."""
        return was_asked(self.kind, self.by, ends=self.exit_code is not None)

    @property
    def ending(self) -> bool:
        """Return True if the fault may end this job attempt. Several such faults at the same time have one cause."""
        return self.exit_code is not None or self.kind in ("death", "hang", "exception", "oom")

    @property
    def when(self) -> float:
        """Return the time of the report, seconds since 1970."""
        return datetime.fromisoformat(self.time).timestamp()


def incidents(faults: Iterable[Fault]) -> list[list[Fault]]:
    """Group reports of several ranks about the same incident, or about saves before the same time limit. Each group is
    sorted by time, except that a lost connection to another rank comes after the end of that rank."""
    found: list[list[Fault]] = []
    for fault in sorted(faults, key=lambda one: one.when):
        last = found[-1] if found else []
        one_end = bool(last) and fault.ending and last[-1].ending
        one_limit = (
            bool(last) and fault.kind == last[-1].kind == "deadline" and fault.rank not in {f.rank for f in last}
        )
        same = (one_end or one_limit) and fault.term == last[-1].term
        if same and fault.when - last[-1].when < TOGETHER_S:
            last.append(fault)
        else:
            found.append([fault])
    return [sorted(one, key=lambda fault: fault.kind == "exception" and fault.advice == "retry") for one in found]


def explain_if_uncaught(error: CheckpointError, rank: int, world: int) -> None:
    """Report an error that ends this process while a run is being opened, because the guard does not run yet. torchrun
    then gets the reason, and the traceback ends at the caller's code."""
    before, known = sys.excepthook, weakref.ref(error)

    def hook(kind: type[BaseException], found: BaseException, trace: TracebackType | None) -> None:
        if found is known():
            at = trace if isinstance(found, USER_ERRORS) else None
            while at is not None:
                if at.tb_next is not None and str(at.tb_next.tb_frame.f_globals.get("__name__")).startswith("ckpt."):
                    at.tb_next = None
                at = at.tb_next
            who = f"rank {rank}" if world > 1 else "the trainer"
            fault = Fault("exception", f"{who} raised {kind.__name__}: {str(found)[:500]}", rank=rank, world=world)
            stack = reversed(traceback.extract_tb(trace))
            tell_launcher(fault, [f"{f.name} ({f.filename}:{f.lineno})" for f in stack])
        before(kind, found, trace)

    sys.excepthook = hook


def tell_launcher(fault: Fault, stack: Sequence[str] = ()) -> None:
    """Write the reason of a failure to the error file, which torchrun prints."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": "\n".join([fault.line, *stack]), "timestamp": str(int(time.time()))}
    message = {"message": {"message": fault.line, "extraInfo": extra}}
    with contextlib.suppress(OSError):
        with open(path, "w") as file:
            json.dump(message, file)
