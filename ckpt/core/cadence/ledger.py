"""The account of each job attempt: its events with their times, in `ledger/<term>.<nonce>.<rank>.json` of the run.

Each job attempt has one object in each tier. The writer of the rank that is responsible for the tier keeps it. A store
cannot append, so the writer puts the whole object again every few seconds and at every event. If it is killed, only the
events since the last put are lost. The object stays small however long the job runs, because `append` merges rows.

    born -> opening -> opened -> restores, rows of steps, saves, faults -> end

All times are seconds of the machine's monotonic clock, which never jumps and is the same in all processes. `boot`
identifies the machine and its boot, and `anchor` has one moment by the wall clock and by the monotonic clock.
`ckpt.core.writer.bookkeeper` writes the accounts. `ckpt.tools.observe.goodput.accounting` computes goodput from the
accounts of all job attempts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from ckpt.core.format.manifest import decoded, typed
from ckpt.errors import CorruptError, FormatError

VERSION = 1
PREFIX = "ledger/"
MAX_SIZE = 4 << 20
FINE_ROWS = 64  # number of rows after each start that are not merged, so that recomputed steps can be found
MOST_ROWS = 600
MOST_LANDED = 256
TOGETHER_S = 45.0  # faults at most this far apart belong to one incident, because the grace period may be 30 s
MOST_EVENTS = 256  # restores, faults and decisions kept of each kind: the first half, and the last half
_NAME = re.compile(r"ledger/(\d+\.[0-9a-z]+)\.(\d+)\.json")
T = TypeVar("T")
Moment = Annotated[float, Meta(gt=-1e11, lt=1e11)]  # time in seconds; larger numbers are invalid
StepNumber = Annotated[int, Meta(ge=-(2**62), le=2**62)]


@dataclass(slots=True)
class StepRow:
    """Consecutive steps. `at` and `step` belong to the last step. All other fields are sums over the steps.

    `at`: time when the step ended. `seconds`: time since the end of the previous step or restore, without pauses.
    `stalled`: part of `seconds` in which the training loop waited for saving. `slowed`: part of `seconds` by which the
    steps took longer than steps without saves, without the wait (an estimate; it may be negative in single rows).
    `quiet`: number of steps during which no save ran. `paused`: time in `Checkpointer.not_training()`. `saves`,
    `skipped`: number of snapshots taken and skipped.
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
    """A call of restore().

    `step`: None if nothing was restored. `source`: "memory" or the URL of the tier. `checkpoint`: restored checkpoint
    id, "" for none. `term`: the term that the restore opened. `repaired`: number of chunks that came from another tier.
    `passed_over`: number of newer checkpoints that could not be used. `why`: reason why the first of these was skipped.
    """

    at: Moment
    seconds: Moment
    step: StepNumber | None
    source: str = ""
    checkpoint: str = ""
    term: str = ""
    repaired: int = 0
    passed_over: int = 0
    why: str = ""


@dataclass(slots=True)
class SaveTotals:
    """The totals of a durable tier. `seconds`: sum of the times from the order to write until the commit. `nbytes`:
    bytes of the states. `stored`: bytes that were written for them."""

    count: int = 0
    failed: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    nbytes: int = 0
    stored: int = 0

    def plus(self, other: SaveTotals | None) -> SaveTotals:
        """Return the sum of these totals and `other`."""
        if other is None:
            return self
        found = SaveTotals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(SaveTotals)))
        found.longest_s = max(self.longest_s, other.longest_s)
        return found


@dataclass(slots=True)
class LandedSave:
    """A save that was ordered for a durable tier. `at`: time when it was committed or failed. `seconds`: time since the
    order. `behind`: number of steps trained since its step. `nbytes`, `stored`: as in `SaveTotals`."""

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
    """A fault, or a request to save. `at`: time of detection. `by`: "fault handler" (in the trainer) or "writer".
    `ends`: True if it ended the job attempt."""

    at: Moment
    kind: str
    summary: str
    rank: int = 0
    step: int = -1
    ends: bool = False
    by: str = ""

    def last_thing(self, beat: float) -> bool:
        """Return True if the fault may have ended the job attempt, and no step ended after it. `beat`: end of the last
        step. A hang without an order to exit counts, because a user or another program may have ended it. The trainer
        has survived a fault that was detected before its last step."""
        return self.at > beat if self.kind == "hang" else self.ends and self.at >= beat


@dataclass(slots=True)
class End:
    """The end of a job attempt. `how`: "closed" (by the user), "left" (by an exception, or without the other ranks) or
    "died". `at`: time of detection. `gone`: time when the process or its closing ended."""

    how: str
    at: Moment
    gone: Moment


@dataclass(slots=True)
class Decision:
    """The save intervals that apply from `step`. `every`: steps by tier ("memory" or a URL), 0 for never. `why`: the
    reasons as text. `costs`: seconds of training that a save costs. `mtbf_s`: the assumed time between faults.
    `step_s`: duration of a step at the time of the decision."""

    step: int
    every: dict[str, int]
    why: dict[str, str] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    mtbf_s: dict[str, float] = field(default_factory=dict)
    at: float = 0.0
    step_s: float = 0.0


@dataclass(slots=True)
class Account:
    """The record of one job attempt.

    term: "<term>.<nonce>" of the first term that the job attempt opened
    url, inode: URL of the nearest tier, and inode of the file that identifies it as a run, which shows if the run was
        copied; 0 in object stores
    anchor: one moment by the wall clock and by the monotonic clock
    namespace: PID namespace of the trainer on its machine
    born, opening, opened: times when the process started, when its Checkpointer began, and when it was ready
    kept: time when this object was last updated
    step, beat: the last step that ended, and the time of its end (-1 and 0 if none)
    calls: number of calls of step()
    stalls: number of saves by the time that training waited, see `stall_bucket`
    landed: saves to each tier, thinned out if there are many
    versions: versions of programs; accounts of old everystep versions lack this and later fields
    """

    term: str
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
        """Return the key of this account in a store."""
        return f"{PREFIX}{self.term}.{self.rank}.json"

    @property
    def number(self) -> int:
        """Return the term as a number. The job attempts of a run are ordered by this number."""
        return int(self.term.partition(".")[0])

    @property
    def failed(self) -> bool:
        """Return True if the job attempt ended in an interruption: it died, or left, or was closed after a fault
        without a further step, for example after a hang that a user ended. Return False while the end is unknown."""
        if self.end is None:
            return False
        return self.end.how != "closed" or any(seen.last_thing(self.beat) for seen in self.faults)

    def of(self, term: str) -> bool:
        """Return True if the job attempt opened this term, at its start or by a restore."""
        return term == self.term or any(restore.term == term for restore in self.restores)

    def wall(self, at: float) -> float:
        """Convert a time in this account to seconds since 1970."""
        return self.anchor[0] + at - self.anchor[1]

    def to_bytes(self) -> bytes:
        data = asdict(self)
        data["rows"] = {name: [_rounded(getattr(row, name)) for row in self.rows] for name in _COLUMNS}
        data["landed"] = {name: [_rounded(getattr(one, name)) for one in self.landed] for name in _OF_LANDED}
        return json.dumps({"version": VERSION, **data}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview) -> Account:
        """Decode an account. Raise CorruptError if it is invalid, and FormatError if a newer version wrote it."""
        try:
            data = decoded(raw)
            if data.pop("version") > VERSION:
                raise FormatError("this ledger was written by a newer version of everystep")
            data["rows"] = _in_lines(data["rows"], _COLUMNS)
            data["landed"] = _in_lines(data.get("landed") or dict.fromkeys(_OF_LANDED, ()), _OF_LANDED)
            account = typed(cls, data)
            if not _NAME.fullmatch(account.key):
                raise ValueError("its term is invalid")
            return account
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"not the run metrics of a job attempt, or truncated: {error!r}") from None


def _in_lines(columns: dict[str, list[Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    values = zip(*(columns[name] for name in names), strict=True)
    return [dict(zip(names, one, strict=True)) for one in values]


def is_account(key: str) -> bool:
    """Return True if a key has the form of an account's key."""
    return _NAME.fullmatch(key) is not None


def append(rows: list[StepRow], row: StepRow, fine: int = FINE_ROWS) -> None:
    """Add a row. If there are too many rows, merge pairs, but not the first `fine` rows, and not across a rollback."""
    rows.append(row)
    if len(rows) <= MOST_ROWS:
        return
    waiting, merged = list(reversed(rows[fine:])), list[StepRow]()
    while waiting:
        one = waiting.pop()
        merged.append(one.merged(waiting.pop()) if waiting and waiting[-1].step > one.step else one)
    rows[fine:] = merged


def stall_bucket(seconds: float) -> str:
    """Return the number of the bucket for a wait. Bucket n begins at 10 ** (n / 8) seconds, so a decade has eight."""
    return str(min(32, max(-56, math.floor(8 * math.log10(seconds)))) if seconds > 0 else -56)


def thinned(landed: Sequence[LandedSave]) -> list[LandedSave]:
    """If there are too many saves, remove one: the save closest to its neighbours, in the tier with the most saves. The
    kept saves are spread over the whole time, and include the first and the newest."""
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
    """Return the events. If there are too many, return only the first and last half of the maximum."""
    half = MOST_EVENTS // 2
    return list(events) if len(events) <= MOST_EVENTS else [*events[:half], *events[-half:]]


def term_of(checkpoint: str) -> str:
    """Return the term of a checkpoint id in the form of accounts, `<term>.<nonce>`; "" for an empty id."""
    return checkpoint.partition(".")[2].replace("-", ".")


def in_order(accounts: Iterable[Account]) -> list[Account]:
    return sorted(accounts, key=lambda one: (one.number, one.wall(one.opening)))


def _rounded(value: float | int) -> float | int:
    return round(value, 6) if isinstance(value, float) else value
