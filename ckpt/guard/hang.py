"""Which rank holds the others up, where a training loop hangs. Plain values and rules, nothing is read or asked.

When the usual time of a step is exceeded (`ckpt.guard.pace`), every rank's `Evidence` (`ckpt.guard.probe` gathers it)
says what it is doing; `still` is whether one rank does not move at all, and `diagnose` compares all ranks and says, in
words for people, whom they wait for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from ckpt.core.format.typed_json import typed
from ckpt.guard.report import Fault

_LINE = 16  # bytes; background threads that wake each other write a few
_IDLE_SHARE = 0.05  # of one core: hardly any

RUNNING, SLEEPING, DISK, STOPPED, ZOMBIE, GONE, UNKNOWN = _STATES = (
    "running", "sleeping", "disk", "stopped", "zombie", "gone", "unknown",
)  # fmt: skip
_HALTED = {
    STOPPED: "is stopped (SIGSTOP, or a debugger); `kill -CONT {pid}` there lets it go on",
    ZOMBIE: "has ended, and nobody has taken note of it",
    GONE: "is gone",
}
MAX_ITEMS, MAX_TEXT, _MAX_RANK, _MOST = 100, 1000, 1 << 24, 2**63 - 1
_Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Count = Annotated[int, Meta(ge=0, le=_MOST)]
_Seconds = Annotated[float, Meta(ge=-1e15, le=1e15)]


@dataclass(frozen=True, slots=True)
class Collective:
    """One that a rank has called and that has not ended. `number`: among those of its process group, from 1; `state`:
    "scheduled", or "started" where that is known."""

    operation: _Text
    number: Annotated[int, Meta(ge=-1, le=_MOST)]
    group: _Text
    state: _Text

    @property
    def line(self) -> str:
        return f"{self.operation} (number {self.number} of {self.group})"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one rank's trainer is doing.

    `step`, `calls`: as in `Beat`. `idle_s`: seconds since its last sign of life. `state`: "running", "sleeping",
    "disk" (cannot be interrupted), "stopped", "zombie", "gone" or "unknown". `cpu_s`: CPU seconds of the process so
    far; `written`: bytes it wrote so far, -1 if that cannot be read; `received`: bytes its host received so far.
    `stack`: of the main thread, innermost first, each as "function (file:line)". `collective`: what it waits in, ""
    for nothing known. `pending`: collectives that have not ended, the oldest first, as it says itself.
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
        """For people; "" for nothing known."""
        return self.pending[0].line if self.collective and self.pending else self.collective

    @classmethod
    def from_json(cls, data: object) -> Evidence:
        """ValueError for what `to_json` cannot have made; a newer version's additions are left out."""
        found = typed(cls, data)
        if found.state not in _STATES:
            raise ValueError(f"no process is {found.state!r}")
        texts = [text for one in found.pending for text in (one.operation, one.group, one.state)]
        if not all(text.isprintable() for text in (found.host, found.collective, *found.stack, *texts)):
            raise ValueError("not all of it is printable, and people will read it in a terminal")
        return found


def plain(text: str) -> str:
    """A text that may come from anywhere, made fit for `Evidence`."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_TEXT])


def still(samples: Sequence[Evidence]) -> bool:
    """Whether a rank did not move over samples of it, the oldest first.

    It makes no step, writes nothing (not even a line of a log), stays in the same functions, and either uses hardly any
    CPU or does not leave one line. A process that is stopped or gone is still. One sample alone shows nothing else.
    """
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
    """`suspects`: the ranks that hold the others up, () if none can be named. `why`: a sentence or two for people.

    `kind`: "stopped" (or dead), "missing from a collective", "behind", "blocked", "busy" or "unknown".
    """

    suspects: tuple[int, ...]
    why: str
    kind: str


Ranks = Mapping[int, Evidence]


def diagnose(evidence: Sequence[Evidence], world: int) -> HangDiagnosis:
    """Whom the ranks of a job that does not go on are waiting for. Of several samples of one rank the last one counts.

    The surest signs are asked first. Unless a process is stopped or dead it remains a guess, and `why` says on which
    grounds.
    """
    last = {one.rank: one for one in evidence if 0 <= one.rank < world}
    ranks = {rank: last[rank] for rank in sorted(last)}
    if not ranks:
        return HangDiagnosis((), "Nothing was heard of any rank.", "unknown")
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
    return HangDiagnosis(found.suspects, f"{found.why} Nothing was heard of {_names(unseen)}.", found.kind)


def _halted(ranks: Ranks) -> HangDiagnosis | None:
    suspects = [one for one in ranks.values() if one.state in _HALTED]
    if not suspects:
        return None
    said = [f"{_name(one)} {_HALTED[one.state].format(pid=one.pid)}." for one in suspects[:4]]
    return HangDiagnosis(_of(suspects), " ".join([*said, *_more(suspects)]), "stopped")


def _alone(one: Evidence) -> HangDiagnosis:
    kind = {RUNNING: "busy", SLEEPING: "blocked", DISK: "blocked"}.get(one.state, "unknown")
    return HangDiagnosis((one.rank,), f"{_name(one)} {_place(one)}.", kind)


def _not_there(ranks: Ranks) -> HangDiagnosis | None:
    """Some wait in a collective, others are not in any."""
    waiting = [one for one in ranks.values() if one.collective]
    suspects = [one for one in ranks.values() if not one.collective]
    if not waiting or not suspects:
        return None
    where = ", ".join(sorted({one.waits_in for one in waiting}))
    said = [f"{_name(one)} has not come to it and {_place(one)}." for one in suspects[:4]]
    kind = "blocked" if all(one.state == DISK for one in suspects) else "missing from a collective"
    why = " ".join([f"{_names(_of(waiting)).capitalize()} {_verb(waiting)} in {where}.", *said, *_more(suspects)])
    return HangDiagnosis(_of(suspects), why, kind)


def _nothing_heard(ranks: Ranks, unseen: tuple[int, ...]) -> HangDiagnosis:
    where = {one.collective for one in ranks.values()}
    if "" in where:  # then nobody waits: `_not_there` found nothing
        said = [f"Nothing was heard of {_names(unseen)}.", *_where(list(ranks.values()))]
        return HangDiagnosis(unseen, " ".join(said), "unknown")
    shown = ", ".join(sorted({one.waits_in for one in ranks.values()}))
    heard = f"{_names(list(ranks)).capitalize()} {_verb(list(ranks))} in {shown}"
    why = f"{heard}, and nothing was heard of {_names(unseen)}: look at their hosts and the way there."
    return HangDiagnosis(unseen, why, "missing from a collective")


def _steps_behind(ranks: Ranks) -> HangDiagnosis | None:
    least, ahead = min(one.step for one in ranks.values()), max(one.step for one in ranks.values())
    if least == ahead:
        return None
    suspects = [one for one in ranks.values() if one.step == least]
    why = f"{_names(_of(suspects)).capitalize()} made step {least} last, others came to {ahead}."
    return HangDiagnosis(_of(suspects), " ".join([why, *_where(suspects)]), "behind")


_VAGUE = ("wait", "backward")  # may be any collective


def _in_different(ranks: Ranks) -> HangDiagnosis | None:
    names = {rank: name for rank, one in ranks.items() if (name := one.collective) and name not in _VAGUE}
    if len(set(names.values())) < 2:
        return None
    why = f"The ranks wait in different collectives: {_by_value(names)}. They wait for each other."
    return HangDiagnosis(_odd(names), why, "missing from a collective")


def _all_in_one(ranks: Ranks) -> HangDiagnosis | None:
    """`_not_there` has ruled out that only some wait."""
    where = sorted({one.waits_in for one in ranks.values()})
    if where == [""]:
        return None
    hosts = sorted({one.host for one in ranks.values()})
    shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
    between = f"between the hosts {shown}" if len(hosts) > 1 else f"of {shown}"
    why = f"All ranks wait in {', '.join(where)}: look at the network {between}, and at the devices."
    return HangDiagnosis((), why, "blocked")


def _elsewhere(ranks: Ranks) -> HangDiagnosis:
    """Nobody is in a collective that we know of."""
    disks = [one for one in ranks.values() if one.state == DISK]
    if disks:
        return HangDiagnosis(_of(disks), " ".join([*_where(disks), *_more(disks)]), "blocked")
    places = {rank: _function(_own_frame(one.stack)) for rank, one in ranks.items()}
    suspects = [ranks[rank] for rank in _odd(places)]
    if not any(places.values()) or len(set(places.values())) == 1 or len(suspects) == len(ranks):
        said = ["No rank is seen in a collective.", *_where(list(ranks.values()))]
        return HangDiagnosis((), " ".join(said), "unknown")
    kind = "busy" if all(one.state == RUNNING for one in suspects) else "blocked"
    said = [f"{_names(_of(suspects)).capitalize()} {_verb(suspects, 'stand')} elsewhere than the others."]
    return HangDiagnosis(_of(suspects), " ".join([*said, *_where(suspects)]), kind)


# -- words --


def _of(some: Iterable[Evidence]) -> tuple[int, ...]:
    return tuple(one.rank for one in some)


def _odd(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks whose value is not that of the majority; all of them if there is no majority."""
    [(usual, count)] = Counter(values.values()).most_common(1)
    return tuple(rank for rank, value in values.items() if value != usual or 2 * count <= len(values))


def _name(one: Evidence) -> str:
    return f"Rank {one.rank} (process {one.pid} on {one.host})"


def _names(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
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
    return [f"So it is with {len(some) - 4} more: {_names(_of(some[4:]))}."] if len(some) > 4 else []


def _where(some: Sequence[Evidence]) -> list[str]:
    return [f"{_name(one)} {_place(one)}." for one in some[:4]]


def _place(one: Evidence) -> str:
    """`computes at load (train.py:31), inside read (socket.py:7)`."""
    doing = {
        RUNNING: "computes",
        SLEEPING: "sleeps",
        DISK: "is in a wait of the kernel that cannot be interrupted, mostly for a disk or network file system,",
    }.get(one.state, "stands")
    if not one.stack:
        waits = one.waits_in
        return f"{doing} in {waits}" if waits else f"{doing}, nobody knows where"
    frame = _own_frame(one.stack)
    return f"{doing} at {frame}" + ("" if frame == one.stack[0] else f", inside {one.stack[0]}")


_FRAME = re.compile(r"(.*) \((.*):[0-9?]+\)")
_FOREIGN = re.compile(r"^<frozen |/(site|dist)-packages/|/lib(64)?/python3[^/]*/|/ckpt/core/snapshot/update_gate\.py$")


def _own_frame(stack: Sequence[str]) -> str:
    """The innermost frame of the user's own code; of any code if there is none."""
    for frame in stack:
        match = _FRAME.fullmatch(frame)
        if match and not _FOREIGN.search(match[2]):
            return frame
    return stack[0] if stack else ""


def _function(frame: str) -> str:
    """The frame without the line number."""
    return frame.rpartition(":")[0] or frame


def note_evidence(fault: Fault, evidence: list[Evidence], what: str) -> None:
    """What all ranks that could be looked at do, and who holds the others up."""
    verdict = diagnose(evidence, fault.world)
    fault.summary = f"{what}: {verdict.why}"
    fault.suspects = list(verdict.suspects)
    fault.evidence = [one.to_json() for one in evidence]
    fault.steps |= {str(one.rank): one.step for one in evidence if one.step >= 0}
    fault.stacks |= {str(one.rank): list(one.stack) for one in evidence if one.stack}
