"""Finds the rank that blocks the others in a hang, by rules on plain values. This module does no I/O.

When a step exceeds its usual time (`ckpt.guard.pace`), `ckpt.guard.probe` collects an `Evidence` of each rank, which
describes the rank's activity. `still` checks whether one rank makes no progress at all. `diagnose` compares the ranks
and returns, as text, the ranks that the others wait for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from ckpt.core.format.manifest import typed
from ckpt.guard.report import Fault

_LINE = 16  # bytes written between two samples that count as a line; threads that wake each other write fewer
_IDLE_SHARE = 0.05  # a process that uses less than this share of one core counts as idle

RUNNING, SLEEPING, DISK, STOPPED, ZOMBIE, GONE, UNKNOWN = _STATES = (
    "running", "sleeping", "disk", "stopped", "zombie", "gone", "unknown",
)  # fmt: skip
_HALTED = {
    STOPPED: "is stopped (SIGSTOP, or a debugger); `kill -CONT {pid}` there resumes it",
    ZOMBIE: "has ended, but its parent has not collected it",
    GONE: "is gone",
}
MAX_ITEMS, MAX_TEXT, _MAX_RANK, _MOST = 100, 1000, 1 << 24, 2**63 - 1
_Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Count = Annotated[int, Meta(ge=0, le=_MOST)]
_Seconds = Annotated[float, Meta(ge=-1e15, le=1e15)]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a rank has called and that has not ended. `number`: its position in its process group, from 1.
    `state`: "scheduled", or "started" if the recorder reports this."""

    operation: _Text
    number: Annotated[int, Meta(ge=-1, le=_MOST)]
    group: _Text
    state: _Text

    @property
    def line(self) -> str:
        return f"{self.operation} (number {self.number} of {self.group})"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The activity of the trainer of a rank.

    `step`, `calls`: as in `Beat`. `idle_s`: seconds since the last sign of life. `state`: "running", "sleeping", "disk"
        (uninterruptible), "stopped", "zombie", "gone" or "unknown". `cpu_s`: CPU seconds of the process; `written`:
        bytes that it has written, -1 if unreadable; `received`: bytes that its host has received. `stack`: frames of
        the main thread, innermost first, each as "function (file:line)". `collective`: the collective in which the main
        thread waits, "" if unknown. `pending`: unfinished collectives as the rank itself reports them, oldest first.
    """

    rank: Annotated[int, Meta(ge=0, le=_MAX_RANK)]
    host: _Text
    pid: _Count
    step: Annotated[int, Meta(ge=-(2**63), le=_MOST)]
    calls: _Count
    idle_s: _Seconds
    state: _Text
    cpu_s: _Seconds
    written: Annotated[int, Meta(ge=-1, le=_MOST)]
    received: _Count
    stack: Annotated[tuple[_Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    collective: _Text = ""
    pending: Annotated[tuple[Collective, ...], Meta(max_length=MAX_ITEMS)] = ()

    def to_json(self) -> dict[str, Any]:
        found = {**asdict(self), "stack": list(self.stack), "pending": [asdict(one) for one in self.pending]}
        return found if self.pending else {name: value for name, value in found.items() if name != "pending"}

    @property
    def waits_in(self) -> str:
        """Return the collective in which the rank waits as text, or "" if it is unknown."""
        return self.pending[0].line if self.collective and self.pending else self.collective

    @classmethod
    def from_json(cls, data: object) -> Evidence:
        """Parse evidence. Raise ValueError for impossible values. Ignore fields that newer versions add."""
        evidence = typed(cls, data)
        if evidence.state not in _STATES:
            raise ValueError(f"unknown process state {evidence.state!r}")
        texts = [text for one in evidence.pending for text in (one.operation, one.group, one.state)]
        if not all(text.isprintable() for text in (evidence.host, evidence.collective, *evidence.stack, *texts)):
            raise ValueError("it contains characters that are not printable")
        return evidence


def plain(text: str) -> str:
    """Replace unprintable characters and shorten a text from any source, so that `Evidence` accepts it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_TEXT])


def still(samples: Sequence[Evidence]) -> bool:
    """Return True if a rank made no progress between its samples, which are sorted by time. Such a rank ends no step,
    writes not even a log line, and stays in the same functions. It uses almost no CPU, or stays on one line of code. A
    stopped or dead process is always still. In any other state, a single sample is not enough."""
    if not samples:
        return False
    if samples[-1].state in _HALTED:
        return True
    first, last = samples[0], samples[-1]
    moved = {(s.rank, s.pid, s.calls) for s in samples}
    spoke = last.written - first.written >= _LINE * (len(samples) - 1)
    if len(samples) < 2 or len(moved) > 1 or spoke or len({tuple(map(_function, s.stack)) for s in samples}) > 1:
        return False
    if first.stack and len({s.stack for s in samples}) == 1:
        return True
    return last.cpu_s - first.cpu_s <= _IDLE_SHARE * max(0.0, last.idle_s - first.idle_s)


@dataclass(frozen=True)
class HangDiagnosis:
    """The result of `diagnose`. `suspects`: ranks that block the others, () if unknown. `why`: one or two sentences for
    people. `kind`: "stopped" (or dead), "missing from a collective", "behind", "blocked", "busy" or "unknown"."""

    suspects: tuple[int, ...]
    why: str
    kind: str


Ranks = Mapping[int, Evidence]


def diagnose(evidence: Sequence[Evidence], world: int) -> HangDiagnosis:
    """Find the ranks that the others of a hanging job wait for. Only the last sample of each rank is used. The most
    reliable signs are checked first. Unless a process is stopped or dead, the result is a guess that `why` explains."""
    last = {one.rank: one for one in evidence if 0 <= one.rank < world}
    ranks = {rank: last[rank] for rank in sorted(last)}
    if not ranks:
        return HangDiagnosis((), "No rank has responded.", "unknown")
    unseen = tuple(rank for rank in range(world) if rank not in ranks) if len(ranks) < world else ()
    found = _halted(ranks)
    if found is None and world == 1:
        return _alone(ranks[0])
    found = found or _not_there(ranks)
    if found is None and unseen:
        return _nothing_heard(ranks, unseen)
    found = found or _steps_behind(ranks) or _in_different(ranks) or _all_in_one(ranks) or _elsewhere(ranks)
    if not unseen:
        return found
    return HangDiagnosis(found.suspects, f"{found.why} No response from {_names(unseen)}.", found.kind)


def _halted(ranks: Ranks) -> HangDiagnosis | None:
    suspects = [one for one in ranks.values() if one.state in _HALTED]
    if not suspects:
        return None
    sentences = [f"{_name(one)} {_HALTED[one.state].format(pid=one.pid)}." for one in suspects[:4]]
    return HangDiagnosis(_of(suspects), " ".join([*sentences, *_more(suspects)]), "stopped")


def _alone(one: Evidence) -> HangDiagnosis:
    kind = {RUNNING: "busy", SLEEPING: "blocked", DISK: "blocked"}.get(one.state, "unknown")
    return HangDiagnosis((one.rank,), f"{_name(one)} {_place(one)}.", kind)


def _not_there(ranks: Ranks) -> HangDiagnosis | None:
    """Find the ranks that have not reached the collective in which others wait."""
    waiting = [one for one in ranks.values() if one.collective]
    suspects = [one for one in ranks.values() if not one.collective]
    if not waiting or not suspects:
        return None
    where = ", ".join(sorted({one.waits_in for one in waiting}))
    sentences = [f"{_name(one)} has not reached it and {_place(one)}." for one in suspects[:4]]
    kind = "blocked" if all(one.state == DISK for one in suspects) else "missing from a collective"
    why = " ".join([f"{_names(_of(waiting)).capitalize()} {_verb(waiting)} in {where}.", *sentences, *_more(suspects)])
    return HangDiagnosis(_of(suspects), why, kind)


def _nothing_heard(ranks: Ranks, unseen: tuple[int, ...]) -> HangDiagnosis:
    where = {one.collective for one in ranks.values()}
    if "" in where:  # no rank waits in a collective: otherwise `_not_there` would have found a suspect
        sentences = [f"No response from {_names(unseen)}.", *_where(list(ranks.values()))]
        return HangDiagnosis(unseen, " ".join(sentences), "unknown")
    shown = ", ".join(sorted({one.waits_in for one in ranks.values()}))
    waiting = f"{_names(list(ranks)).capitalize()} {_verb(list(ranks))} in {shown}"
    why = f"{waiting}, without a response from {_names(unseen)}: check their hosts and the network."
    return HangDiagnosis(unseen, why, "missing from a collective")


def _steps_behind(ranks: Ranks) -> HangDiagnosis | None:
    least, ahead = min(one.step for one in ranks.values()), max(one.step for one in ranks.values())
    if least == ahead:
        return None
    suspects = [one for one in ranks.values() if one.step == least]
    why = f"{_names(_of(suspects)).capitalize()} did step {least} last, others reached {ahead}."
    return HangDiagnosis(_of(suspects), " ".join([why, *_where(suspects)]), "behind")


_VAGUE = ("wait", "backward")  # names in a stack that may belong to any collective


def _in_different(ranks: Ranks) -> HangDiagnosis | None:
    names = {rank: name for rank, one in ranks.items() if (name := one.collective) and name not in _VAGUE}
    if len(set(names.values())) < 2:
        return None
    why = f"The ranks wait in different collectives: {_by_value(names)}. They wait for each other."
    return HangDiagnosis(_odd(names), why, "missing from a collective")


def _all_in_one(ranks: Ranks) -> HangDiagnosis | None:
    """Describe a hang in which all ranks wait in collectives. `_not_there` handles hangs in which only some do."""
    where = sorted({one.waits_in for one in ranks.values()})
    if where == [""]:
        return None
    hosts = sorted({one.host for one in ranks.values()})
    shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
    between = f"between the hosts {shown}" if len(hosts) > 1 else f"of {shown}"
    why = f"All ranks wait in {', '.join(where)}: check the network {between}, and the devices."
    return HangDiagnosis((), why, "blocked")


def _elsewhere(ranks: Ranks) -> HangDiagnosis:
    """Describe a hang in which no rank is in a known collective."""
    disks = [one for one in ranks.values() if one.state == DISK]
    if disks:
        return HangDiagnosis(_of(disks), " ".join([*_where(disks), *_more(disks)]), "blocked")
    places = {rank: _function(_own_frame(one.stack)) for rank, one in ranks.items()}
    suspects = [ranks[rank] for rank in _odd(places)]
    if not any(places.values()) or len(set(places.values())) == 1 or len(suspects) == len(ranks):
        sentences = ["No rank is in a known collective.", *_where(list(ranks.values()))]
        return HangDiagnosis((), " ".join(sentences), "unknown")
    kind = "busy" if all(one.state == RUNNING for one in suspects) else "blocked"
    sentences = [f"{_names(_of(suspects)).capitalize()} {_verb(suspects, 'execute')} other code than the rest."]
    return HangDiagnosis(_of(suspects), " ".join([*sentences, *_where(suspects)]), kind)


# -- format as text --


def _of(some: Iterable[Evidence]) -> tuple[int, ...]:
    return tuple(one.rank for one in some)


def _odd(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks whose value differs from that of the majority. Without a majority, return all ranks."""
    [(usual, count)] = Counter(values.values()).most_common(1)
    return tuple(rank for rank, value in values.items() if value != usual or 2 * count <= len(values))


def _name(one: Evidence) -> str:
    return f"Rank {one.rank} (process {one.pid} on {one.host})"


def _names(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 3`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:16])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', …' if len(runs) > 16 else ''}"


def _verb(some: Sequence[object], verb: str = "wait") -> str:
    return verb if len(some) > 1 else f"{verb}s"


def _by_value(names: Mapping[int, str]) -> str:
    return ", ".join(
        f"{name} on {_names([rank for rank, other in names.items() if other == name])}"
        for name in sorted(set(names.values()))
    )


def _more(some: Sequence[Evidence]) -> list[str]:
    return [f"The same holds for {len(some) - 4} more: {_names(_of(some[4:]))}."] if len(some) > 4 else []


def _where(some: Sequence[Evidence]) -> list[str]:
    return [f"{_name(one)} {_place(one)}." for one in some[:4]]


def _place(one: Evidence) -> str:
    """Describe the activity of a rank: `computes at load (train.py:31), inside read (socket.py:7)`."""
    doing = {
        RUNNING: "computes",
        SLEEPING: "sleeps",
        DISK: "is in an uninterruptible wait of the kernel, usually for a disk or network file system,",
    }.get(one.state, "stands")
    if not one.stack:
        waits = one.waits_in
        return f"{doing} in {waits}" if waits else f"{doing} at an unknown line"
    frame = _own_frame(one.stack)
    return f"{doing} at {frame}" + ("" if frame == one.stack[0] else f", inside {one.stack[0]}")


_FRAME = re.compile(r"(.*) \((.*):[0-9?]+\)")
_FOREIGN = re.compile(r"^<frozen |/(site|dist)-packages/|/lib(64)?/python3[^/]*/|/ckpt/core/snapshot/update_gate\.py$")


def _own_frame(stack: Sequence[str]) -> str:
    """Return the innermost frame of the user's code. If there is none, return the innermost frame."""
    for frame in stack:
        match = _FRAME.fullmatch(frame)
        if match and not _FOREIGN.search(match[2]):
            return frame
    return stack[0] if stack else ""


def _function(frame: str) -> str:
    """Return a frame without its line number."""
    return frame.rpartition(":")[0] or frame


def note_evidence(fault: Fault, evidence: list[Evidence], what: str) -> None:
    """Add the activity of all queried ranks to a report, and the ranks that block the others."""
    verdict = diagnose(evidence, fault.world)
    fault.summary = f"{what}: {verdict.why}"
    fault.suspects = list(verdict.suspects)
    fault.evidence = [one.to_json() for one in evidence]
    fault.steps |= {str(one.rank): one.step for one in evidence if one.step >= 0}
    fault.stacks |= {str(one.rank): list(one.stack) for one in evidence if one.stack}
