"""Whether a training loop hangs, and which rank holds the others up. Plain values and rules, nothing is read or asked.

`StepPace` compares looks at a trainer's heartbeat with the usual time of a step. When that is exceeded, every rank's
`Evidence` (ckpt/faults/probe.py gathers it) says what it is doing; `still` is whether one rank does not move at all,
and
`diagnose` compares all ranks and says, in words for people, whom they wait for.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.faults.report import Fault
from ckpt.ipc.heartbeat import TRAINING, Beat
from ckpt.triggers import OnHang

ENOUGH = 5  # steps to learn from before anything is said
_MEANS = 64
_GAPS = 32
_HOLE = 8.0  # so many times the usual time between two looks, and at least:
_HOLE_S = 1.0
_LINE = 16  # bytes; background threads that wake each other write a few
_IDLE_SHARE = 0.05  # of one core: hardly any


class StepPace:
    """Learns the usual time of a step from looks at the heartbeat; says when it has been too long."""

    def __init__(self, trigger: OnHang) -> None:
        self._trigger = trigger
        self._gaps = deque[float](maxlen=_GAPS)  # between two looks
        self._looked: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._means = deque[float](maxlen=_MEANS)  # seconds a step, each over the steps between two looks
        self._steps = 0
        self._usual: float | None = None
        self._last: Beat | None = None
        self._from: Beat | None = None  # a beat since which nothing but training was seen
        self._excused = 0.0  # seconds since the last sign of life in which nobody looked

    @property
    def usual_s(self) -> float | None:
        """Seconds a step; None until enough steps were seen."""
        return self._usual if self._steps >= ENOUGH else None

    @property
    def limit_s(self) -> float | None:
        """Seconds after which it is too long; None until enough steps were seen."""
        usual = self.usual_s
        return None if usual is None else max(self._trigger.min_s, self._trigger.factor * usual)

    def look(self, now: float, beat: Beat) -> float | None:
        """Call it a few times a second. How long nothing has come, in seconds, if that is too long; else None.

        `now`: of the monotonic clock, as `beat.when`.
        """
        if self._last is not None and beat.calls < self._last.calls:
            self._forget()  # another trainer
        self._excuse(now, beat)
        self._learn(beat)
        self._last = beat
        silent, limit = now - beat.when - self._excused, self.limit_s
        return silent if beat.state == TRAINING and limit is not None and silent > limit else None

    def _excuse(self, now: float, beat: Beat) -> None:
        """Whoever did not look, because it was stopped itself, cannot blame the trainer for that time."""
        looked, self._looked = self._looked, now
        if self._last is None or beat.when != self._last.when:
            self._excused = 0.0
        if looked is None or now < looked:
            return
        gap = now - looked
        if not self._gaps or gap > max(_HOLE_S, _HOLE * statistics.median(self._gaps)):
            self._excused += max(0.0, now - max(looked, beat.when))
        self._gaps.append(gap)

    def _learn(self, beat: Beat) -> None:
        last, start = self._last, self._from
        if beat.state != TRAINING:
            self._from = None
        elif last is None or beat.calls != last.calls:  # so `when` is that of a step
            if last is not None and start is not None and beat.calls > start.calls and beat.when > start.when:
                self._steps += beat.calls - start.calls
                self._means.append((beat.when - start.when) / (beat.calls - start.calls))
                self._usual = statistics.median(self._means)
            self._from = beat
        elif beat.when != last.when:  # no step: something else was done between the two looks
            self._from = None


RUNNING, SLEEPING, DISK, STOPPED, ZOMBIE, GONE, UNKNOWN = _STATES = (
    "running", "sleeping", "disk", "stopped", "zombie", "gone", "unknown",
)  # fmt: skip
_HALTED = {
    STOPPED: "is stopped (SIGSTOP, or a debugger); `kill -CONT {pid}` there lets it go on",
    ZOMBIE: "has ended, and nobody has taken note of it",
    GONE: "is gone",
}
MAX_ITEMS, MAX_TEXT, _MAX_RANK = 100, 1000, 1 << 24


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one rank's trainer is doing.

    `step`, `calls`: as in `Beat`. `idle_s`: seconds since its last sign of life. `state`: "running", "sleeping",
    "disk" (cannot be interrupted), "stopped", "zombie", "gone" or "unknown". `cpu_s`: CPU seconds of the process so
    far; `written`: bytes it wrote so far, -1 if that cannot be read; `received`: bytes its host received so far.
    `stack`: of the main thread, innermost first, each as "function (file:line)". `collective`: what it waits in, ""
    for nothing known. `flight`: the last entries of torch's flight recorder, oldest first, each as
    "seq=12 all_reduce started", with " in GROUP" at the end for any group but the default one.
    """

    rank: int
    host: str
    pid: int
    step: int
    calls: int
    idle_s: float
    state: str
    cpu_s: float
    written: int
    received: int
    stack: tuple[str, ...] = ()
    collective: str = ""
    flight: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "stack": list(self.stack), "flight": list(self.flight)}

    @classmethod
    def from_json(cls, data: object) -> Evidence:
        """ValueError for what `to_json` cannot have made; a newer version's additions are left out."""
        if type(data) is not dict:
            raise ValueError("evidence of a rank is an object")
        state = _text(data, "state")
        if state not in _STATES:
            raise ValueError(f"no process is {state!r}")
        return cls(
            rank=_whole(data, "rank", 0, _MAX_RANK),
            host=_text(data, "host"),
            pid=_whole(data, "pid", 0),
            step=_whole(data, "step", -(2**63)),
            calls=_whole(data, "calls", 0),
            idle_s=_seconds(data, "idle_s"),
            state=state,
            cpu_s=_seconds(data, "cpu_s"),
            written=_whole(data, "written", -1),
            received=_whole(data, "received", 0),
            stack=_texts(data, "stack"),
            collective=_text(data, "collective"),
            flight=_texts(data, "flight"),
        )


def _whole(data: dict[Any, Any], name: str, low: int, high: int = 2**63 - 1) -> int:
    value = data.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is not a whole number from {low} to {high}")
    return value


def _seconds(data: dict[Any, Any], name: str) -> float:
    value = data.get(name)
    if type(value) not in (int, float) or not abs(value) < 1e15:  # type: ignore[arg-type]
        raise ValueError(f"{name} is not a number of seconds")
    return float(value)  # type: ignore[arg-type]


def _text(data: dict[Any, Any], name: str) -> str:
    return _checked(data.get(name), name)


def _texts(data: dict[Any, Any], name: str) -> tuple[str, ...]:
    values = data.get(name)
    if type(values) is not list or len(values) > MAX_ITEMS:
        raise ValueError(f"{name} is not a list of at most {MAX_ITEMS}")
    return tuple(_checked(value, name) for value in values)


def _checked(value: object, name: str) -> str:
    """Printable, since people will read it in a terminal."""
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"{name} is not a printable text of at most {MAX_TEXT} characters")
    return value


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
    found = found or _not_there(ranks) or _recorded(ranks)
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
    waiting = [one for one in ranks.values() if _waits_in(one)]
    suspects = [one for one in ranks.values() if not _waits_in(one)]
    if not waiting or not suspects:
        return None
    where = ", ".join(sorted({_waits_in(one) for one in waiting}))
    said = [f"{_name(one)} has not come to it and {_place(one)}." for one in suspects[:4]]
    kind = "blocked" if all(one.state == DISK for one in suspects) else "missing from a collective"
    why = " ".join([f"{_names(_of(waiting)).capitalize()} {_verb(waiting)} in {where}.", *said, *_more(suspects)])
    return HangDiagnosis(_of(suspects), why, kind)


_ENTRY = re.compile(r"(seq|p2p)=([0-9]{1,18}) (\S+) (scheduled|started|completed)(?: in (.+))?")


@dataclass(frozen=True, slots=True)
class _Entry:
    """Of the flight recorder. Numbers of a group count the same calls on all its ranks; those of p2p do not."""

    group: str
    number: int
    name: str
    done: bool
    p2p: bool


def _entries(one: Evidence) -> list[_Entry]:
    found = map(_ENTRY.fullmatch, one.flight)
    return [_Entry(m[5] or "", int(m[2]), m[3], m[4] == "completed", m[1] == "p2p") for m in found if m]


def _waits_in(one: Evidence) -> str:
    """The stack knows, or, where a wait is not visible in Python, the recorder: what began and has not completed."""
    return one.collective or next((entry.name for entry in _entries(one) if not entry.done), "")


def _recorded(ranks: Ranks) -> HangDiagnosis | None:
    """Groups in which the ranks do not call the same collectives, or not as many."""
    groups: dict[str, dict[int, dict[int, _Entry]]] = {}  # by name, rank and number
    for rank, one in ranks.items():
        for entry in _entries(one):
            if not entry.p2p:
                groups.setdefault(entry.group, {}).setdefault(rank, {})[entry.number] = entry
    for group, by_rank in groups.items():
        found = _mismatch(group, by_rank) or _fewer(ranks, group, by_rank)
        if found:
            return found
    return None


def _mismatch(group: str, by_rank: dict[int, dict[int, _Entry]]) -> HangDiagnosis | None:
    for number in sorted({number for entries in by_rank.values() for number in entries}):
        names = {rank: entries[number].name for rank, entries in by_rank.items() if number in entries}
        if len(set(names.values())) > 1:
            why = f"Collective {number}{_in_group(group)} is not the same everywhere: {_by_value(names)}."
            return HangDiagnosis(_odd(names), f"{why} They wait for each other.", "missing from a collective")
    return None


def _fewer(ranks: Ranks, group: str, by_rank: dict[int, dict[int, _Entry]]) -> HangDiagnosis | None:
    tops = {rank: entries[max(entries)] for rank, entries in by_rank.items()}
    ahead, least = max(top.number for top in tops.values()), min(top.number for top in tops.values())
    leaders = [rank for rank, top in tops.items() if top.number == ahead and not top.done]
    if ahead == least or not leaders:
        return None
    suspects = [ranks[rank] for rank, top in tops.items() if top.number == least]
    why = (
        f"{_names(leaders).capitalize()} {_verb(leaders)} in collective {ahead} ({tops[leaders[0]].name})"
        f"{_in_group(group)}; {_names(_of(suspects))} came only to {least}."
    )
    return HangDiagnosis(_of(suspects), " ".join([why, *_where(suspects)]), "behind")


def _nothing_heard(ranks: Ranks, unseen: tuple[int, ...]) -> HangDiagnosis:
    where = {_waits_in(one) for one in ranks.values()}
    if "" in where:  # then nobody waits: `_not_there` found nothing
        said = [f"Nothing was heard of {_names(unseen)}.", *_where(list(ranks.values()))]
        return HangDiagnosis(unseen, " ".join(said), "unknown")
    heard = f"{_names(list(ranks)).capitalize()} {_verb(list(ranks))} in {', '.join(sorted(where))}"
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
    names = {rank: name for rank, one in ranks.items() if (name := _waits_in(one)) and name not in _VAGUE}
    if len(set(names.values())) < 2:
        return None
    why = f"The ranks wait in different collectives: {_by_value(names)}. They wait for each other."
    return HangDiagnosis(_odd(names), why, "missing from a collective")


def _all_in_one(ranks: Ranks) -> HangDiagnosis | None:
    """`_not_there` has ruled out that only some wait."""
    where = sorted({_waits_in(one) for one in ranks.values()})
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


def _in_group(group: str) -> str:
    return f" of group {group}" if group else ""


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
        waits = _waits_in(one)
        return f"{doing} in {waits}" if waits else f"{doing}, nobody knows where"
    frame = _own_frame(one.stack)
    return f"{doing} at {frame}" + ("" if frame == one.stack[0] else f", inside {one.stack[0]}")


_FRAME = re.compile(r"(.*) \((.*):[0-9?]+\)")
_FOREIGN = re.compile(r"^<frozen |/(site|dist)-packages/|/lib(64)?/python3[^/]*/|/ckpt/trainer/optimizer_hooks\.py$")


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
