"""What each incarnation of a job did, and when: `ledger/<epoch>.<nonce>.<rank>.json` in the run.

One object an incarnation, kept by the writer of the rank that speaks for a place. A store cannot append, so the object
is put anew as a whole, every few seconds and at every event: what a kill cuts off is what came since. It stays small,
however long the job runs, since neighbouring rows are merged when there are many (`Rows`).

    born -> opening -> opened -> restores, rows of steps, saves, faults -> end

All times are seconds of the machine's monotonic clock, which never jumps and which all its processes share; `boot` says
which machine and boot that is, and `anchor` is one moment by both clocks. What follows from it, over all incarnations,
is in `ckpt.tools.observe.goodput.accounting`; who keeps it, in `ckpt.core.writer.bookkeeper`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from ckpt.core.format.typed_json import decoded, typed
from ckpt.errors import CorruptError, FormatError

VERSION = 1
PREFIX = "ledger/"
MAX_SIZE = 4 << 20
FINE_ROWS = 64  # the first rows after each start are not merged: what is recomputed is found in them
MOST_ROWS = 600
MOST_LANDED = 256
TOGETHER_S = 45.0  # faults whose times lie this close to the one before are of one incident: 30 s of grace, and more
MOST_EVENTS = 256  # restores, faults and decisions that are kept of each kind: the first half, and the last
_NAME = re.compile(r"ledger/(\d+\.[0-9a-z]+)\.(\d+)\.json")
T = TypeVar("T")
Moment = Annotated[float, Meta(gt=-1e11, lt=1e11)]  # and seconds: beyond that, numbers are nonsense
StepNumber = Annotated[int, Meta(ge=-(2**62), le=2**62)]


@dataclass(slots=True)
class StepRow:
    """Consecutive steps. Sums over them, but for `at` and `step`, which are of the last one.

    `at`: when it was done; `seconds`: from the end of the step before, or of the restore, without pauses; of that,
    `stalled`: what saving made the training loop wait, and `slowed`: how much longer the steps took than those beside
    which nothing is saved, the wait not counted (an estimate; in single rows it may be negative). `quiet`: steps
    beside which nothing was saved. `paused`: in `Checkpointer.not_training()`. `saves`, `skipped`: snapshots taken and
    left out.
    """

    at: Moment
    step: StepNumber
    steps: StepNumber
    seconds: Moment
    stalled: Moment = 0.0
    slowed: Moment = 0.0
    quiet: int = 0
    paused: Moment = 0.0
    saves: int = 0
    skipped: int = 0

    def merged(self, later: StepRow) -> StepRow:
        sums = {name: getattr(self, name) + getattr(later, name) for name in _SUMS}
        return StepRow(later.at, later.step, **sums)


_COLUMNS = tuple(f.name for f in fields(StepRow))
_SUMS = _COLUMNS[2:]


@dataclass(slots=True)
class Restore:
    """One call of restore(). `step`: None if there was nothing to restore; `source`: "memory" or the URL of the tier;
    `attempt`: what was restored, "" for nothing; `epoch`: the one that it opened. `repaired`: pieces that came from a
    further place; `passed_over`: newer checkpoints that could not be used, and `why` the first of them could not."""

    at: Moment
    seconds: Moment
    step: StepNumber | None
    source: str = ""
    attempt: str = ""
    epoch: str = ""
    repaired: int = 0
    passed_over: int = 0
    why: str = ""


@dataclass(slots=True)
class SaveTotals:
    """Of one durable tier. `seconds`: from the order to write until committed, summed up; `nbytes`: of the states;
    `stored`: of what was written for them."""

    count: int = 0
    failed: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    nbytes: int = 0
    stored: int = 0

    def plus(self, other: SaveTotals | None) -> SaveTotals:
        """Both together."""
        if other is None:
            return self
        found = SaveTotals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(SaveTotals)))
        found.longest_s = max(self.longest_s, other.longest_s)
        return found


@dataclass(slots=True)
class LandedSave:
    """One save that was ordered for a durable tier. `at`: when it was committed, or had failed; `seconds`: from the
    order until then; `behind`: steps trained meanwhile; `nbytes`, `stored`: of it, as in `SaveTotals`."""

    url: str
    at: float
    step: int
    seconds: float
    behind: int = 0
    nbytes: int = 0
    stored: int = 0
    failed: bool = False


_OF_LANDED = tuple(f.name for f in fields(LandedSave))


@dataclass(slots=True)
class SeenFault:
    """A fault, or a call to save, in short. `at`: when it was noticed; `by`: "fault handler", in the training process,
    or "writer"; `ends`: the incarnation."""

    at: Moment
    kind: str
    summary: str
    rank: int = 0
    step: int = -1
    ends: bool = False
    by: str = ""

    def last_thing(self, beat: float) -> bool:
        """Whether no step was done after it, the last one at `beat`, and it may be why. A hang may that nobody was
        told to leave for: somebody ended it by hand, or something else did. One that was seen before was survived."""
        return self.at > beat if self.kind == "hang" else self.ends and self.at >= beat


@dataclass(slots=True)
class End:
    """`how`: "closed" (as the user wanted), "left" (by an exception, or without the other ranks) or "died"; `at`: when
    that was seen; `gone`: when the process was gone, or closing had ended."""

    how: str
    at: Moment
    gone: Moment


@dataclass(slots=True)
class Decision:
    """A cadence from some step on. `every`: by place, "memory" or a URL, steps, 0 for never; `why`: by place, for
    people. `costs`: by place, seconds that a save takes from training; `mtbf_s`: by place, what was assumed; `step_s`:
    how long a step took then."""

    step: int
    every: dict[str, int]
    why: dict[str, str] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    mtbf_s: dict[str, float] = field(default_factory=dict)
    at: float = 0.0
    step_s: float = 0.0


@dataclass(slots=True)
class Account:
    """One incarnation. `epoch`: "<epoch>.<nonce>", the first one that it opened; `url`: of the nearest tier, and
    `inode` of what makes it a run, by which a copy is known, 0 in object stores; `anchor`: the same moment by the wall
    clock and by ours; `namespace`: of process numbers, on that machine; `born`: when the process was started, `opening`
    and `opened`: when its Checkpointer began and was ready; `kept`: up to when this is complete; `step`, `beat`: the
    last step that was done, and when (-1, 0);
    `calls`: of step() so far. `stalls`: how many saves made training wait how long, by `stall_bucket`; `landed`: of
    each tier its saves, some of them where there are many; `versions`: of programs. Older accounts have
    none of these."""

    epoch: str
    rank: int = 0
    world: int = 1
    host: str = ""
    boot: str = ""
    pid: int = 0
    url: str = ""
    inode: int = 0
    anchor: tuple[Moment, Moment] = (0.0, 0.0)
    born: Moment = 0.0
    opening: Moment = 0.0
    opened: Moment = 0.0
    kept: Moment = 0.0
    step: StepNumber = -1
    beat: Moment = 0.0
    calls: int = 0
    restores: list[Restore] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)
    saves: dict[str, SaveTotals] = field(default_factory=dict)
    faults: list[SeenFault] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    end: End | None = None
    stalls: dict[str, int] = field(default_factory=dict)
    landed: list[LandedSave] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    namespace: int = 0

    @property
    def key(self) -> str:
        """Its name in a store."""
        return f"{PREFIX}{self.epoch}.{self.rank}.json"

    @property
    def number(self) -> int:
        """Of the epoch: incarnations of a run are in order by it."""
        return int(self.epoch.partition(".")[0])

    @property
    def failed(self) -> bool:
        """Whether its end was an interruption: it died, or left, or was closed after a fault after which no step was
        done, as a hang that somebody ended by hand. False as long as no end is known."""
        if self.end is None:
            return False
        return self.end.how != "closed" or any(seen.last_thing(self.beat) for seen in self.faults)

    def of(self, epoch: str) -> bool:
        """Whether it opened this epoch, at its start or by a restore."""
        return epoch == self.epoch or any(restore.epoch == epoch for restore in self.restores)

    def wall(self, at: float) -> float:
        """Seconds since 1970 of a moment in this account."""
        return self.anchor[0] + at - self.anchor[1]

    def to_bytes(self) -> bytes:
        data = asdict(self)
        data["rows"] = {name: [_rounded(getattr(row, name)) for row in self.rows] for name in _COLUMNS}
        data["landed"] = {name: [_rounded(getattr(one, name)) for one in self.landed] for name in _OF_LANDED}
        return json.dumps({"version": VERSION, **data}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview) -> Account:
        """CorruptError if it is cut off or is no account; FormatError if a newer version wrote it."""
        try:
            data = decoded(raw)
            if data.pop("version") > VERSION:
                raise FormatError("this ledger was written by a newer version of everystep")
            data["rows"] = _in_lines(data["rows"], _COLUMNS)
            data["landed"] = _in_lines(data.get("landed") or dict.fromkeys(_OF_LANDED, ()), _OF_LANDED)
            account = typed(cls, data)
            if not _NAME.fullmatch(account.key):
                raise ValueError("its epoch makes no sense")
            return account
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"this is not the account of an incarnation, or not all of it: {error!r}") from None


def _in_lines(columns: dict[str, list[Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    values = zip(*(columns[name] for name in names), strict=True)
    return [dict(zip(names, one, strict=True)) for one in values]


def is_account(key: str) -> bool:
    """Whether an object of this name is one."""
    return _NAME.fullmatch(key) is not None


def append(rows: list[StepRow], row: StepRow, fine: int = FINE_ROWS) -> None:
    """Add a row; where they are too many, merge pairs of neighbours, but not the first `fine` ones, and not across a
    restore that went back."""
    rows.append(row)
    if len(rows) <= MOST_ROWS:
        return
    waiting, merged = list(reversed(rows[fine:])), list[StepRow]()
    while waiting:
        one = waiting.pop()
        merged.append(one.merged(waiting.pop()) if waiting and waiting[-1].step > one.step else one)
    rows[fine:] = merged


def stall_bucket(seconds: float) -> str:
    """Eight of them a decade, by number: number n begins at 10 ** (n / 8) seconds."""
    return str(min(32, max(-56, math.floor(8 * math.log10(seconds)))) if seconds > 0 else -56)


def thinned(landed: Sequence[LandedSave]) -> list[LandedSave]:
    """Where there is one too many, without one: of the tier that has most, the one that lies closest between its
    neighbours. So what is kept is spread over all of the time, and the first and the newest are there."""
    kept = list(landed)
    if len(kept) <= MOST_LANDED:
        return kept
    places: dict[str, list[int]] = {}
    for place, one in enumerate(kept):
        places.setdefault(one.url, []).append(place)
    most = max(places.values(), key=len)
    between = zip(most, most[1:], most[2:], strict=False)
    del kept[min(between, key=lambda three: kept[three[2]].at - kept[three[0]].at, default=(0, 0, 0))[1]]
    return kept


def bounded(events: Sequence[T]) -> list[T]:
    """The first ones and the last ones, where there are too many."""
    half = MOST_EVENTS // 2
    return list(events) if len(events) <= MOST_EVENTS else [*events[:half], *events[-half:]]


def term_of(checkpoint: str) -> str:
    """Return the term of a checkpoint id as accounts write it, `<term>.<nonce>`; "" for an empty id."""
    return checkpoint.partition(".")[2].replace("-", ".")


def in_order(accounts: Iterable[Account]) -> list[Account]:
    return sorted(accounts, key=lambda one: (one.number, one.wall(one.opening)))


def _rounded(value: float | int) -> float | int:
    return round(value, 6) if isinstance(value, float) else value
