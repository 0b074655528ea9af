"""The records of a run log, and the state of a run, which results from applying all records in order (`fold`).

ACQUIRE   term, nonce, restored       a job takes ownership, or rolls back to `restored` (a checkpoint id or null)
COMMIT    checkpoint, world, manifests, index, finite, reason    the checkpoint exists, with the files of these ranks
          time                        time of the commit, in seconds since 1970
          needs                       the older checkpoints that it was built on, if any
ABORT     checkpoint, reason          the checkpoint will never exist
PLAN      retire, delete, reason      checkpoints to retire and files to delete; the reason, if it is not retention
KEEP      checkpoint, note, keep      never retire this checkpoint; `keep` false cancels an earlier KEEP
SNAPSHOT  the state after all earlier records

`CheckpointIds` is a compact set of checkpoint ids, because the steps of retired checkpoints usually have equal strides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, MutableSet
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from ckpt.core.format.manifest import MAX_TERM, MAX_WORLD, CheckpointId, needs_texts, owner, read_needs
from ckpt.errors import CorruptError

Group = tuple[int, str]  # term and nonce
MOST = 20_000_000  # maximum number of steps in one file, because more would exhaust memory


class CheckpointIds(MutableSet[CheckpointId]):
    """A set of checkpoint ids, grouped by job attempt."""

    def __init__(self, checkpoints: Iterable[CheckpointId] = ()) -> None:
        self._steps: dict[Group, set[int]] = {}
        self._rows: dict[Group, list[list[int]]] = {}  # rows of `to_json`, cached
        for checkpoint in checkpoints:
            self.add(checkpoint)

    def __contains__(self, checkpoint: object) -> bool:
        if not isinstance(checkpoint, CheckpointId):
            return False
        return checkpoint.step in self._steps.get((checkpoint.term, checkpoint.nonce), ())

    def __iter__(self) -> Iterator[CheckpointId]:
        return (CheckpointId(term, step, nonce) for (term, nonce), steps in self._steps.items() for step in steps)

    def __len__(self) -> int:
        return sum(map(len, self._steps.values()))

    def __repr__(self) -> str:
        return f"Attempts({sorted(self)})"

    def __or__(self, others: AbstractSet[Any]) -> CheckpointIds:
        found = CheckpointIds()
        found._steps = {group: set(steps) for group, steps in self._steps.items()}
        for one in others:
            found.add(one)
        return found

    def add(self, value: CheckpointId) -> None:
        group = value.term, value.nonce
        steps = self._steps.setdefault(group, set())
        if value.step in steps:
            return
        rows = self._rows.get(group) if steps else self._rows.setdefault(group, [])
        steps.add(value.step)
        if rows is not None and (not rows or _last(rows[-1]) < value.step):
            _extend(rows, value.step)
        else:
            self._rows.pop(group, None)

    def discard(self, value: CheckpointId) -> None:
        self._rows.pop((value.term, value.nonce), None)
        self._steps.get((value.term, value.nonce), set()).discard(value.step)

    def to_json(self) -> dict[str, list[list[int]]]:
        """Return rows of [first step, stride, count], by `<term>-<nonce>`. Equal sets return equal rows."""
        for group, steps in self._steps.items():
            if group not in self._rows:
                rows = self._rows[group] = []
                for step in sorted(steps):
                    _extend(rows, step)
        found = sorted((group, rows) for group, rows in self._rows.items() if rows)
        return {f"{term}-{nonce}": [list(row) for row in rows] for (term, nonce), rows in found}

    @classmethod
    def from_json(cls, groups: dict[str, list[Any]], most: int = MOST) -> CheckpointIds:
        """Decode a set. Raise CorruptError, ValueError or TypeError if it is impossible or exceeds `most` steps."""
        found, left = cls(), min(most, MOST)
        for name, rows in groups.items():
            any_one = _at_step(name, 0)
            steps = found._steps.setdefault((any_one.term, any_one.nonce), set())
            for row in rows:
                first, stride, count = (row, 1, 1) if type(row) is int else row
                if any(type(n) is not int for n in (first, stride, count)) or stride < 1 or not 1 <= count <= left:
                    raise CorruptError(f"impossible steps: {row!r}")
                left -= count
                for end in (first, first + stride * (count - 1)):
                    _at_step(name, end)
                steps.update(range(first, first + stride * count, stride))
        return found


def _at_step(group: str, step: int) -> CheckpointId:
    return CheckpointId.parse(f"{step:09d}.{group}")


def _extend(rows: list[list[int]], step: int) -> None:
    """Add a step that is higher than all others to rows, each of which has equal strides and is as long as possible."""
    if rows:
        first, stride, count = last = rows[-1]
        if count == 1 or step == first + stride * count:
            last[1:] = [step - first if count == 1 else stride, count + 1]
            return
    rows.append([step, 1, 1])


def _last(row: list[int]) -> int:
    first, stride, count = row
    return first + stride * (count - 1)


# -- records, and the state of a run --


SNAPSHOT_EVERY = 256
KEPT_REQUESTS = 512  # number of records before a SNAPSHOT whose request ids it contains
LOOSE = {"reasons", "requests"}  # a SNAPSHOT has only the last entries, and versions may differ in their number
LAST_TIME = 253_402_300_800  # seconds from 1970 to the year 10,000
MAX_REASONS = 64  # number of ended checkpoints whose reasons a SNAPSHOT contains, newest first
_DIGEST = re.compile(r"[0-9a-f]{64}")

MARK = "kept by training: "  # prefix of KEEP notes written by a training; it leaves other notes alone
THE_BEST = "best, "  # prefix of the rest of the note, for the checkpoint with the best score
LONGEST = 500  # maximum characters in a note
FEW_ENDED, ENDED_EACH = 4096, 64  # maximum ended checkpoints in a SNAPSHOT: in all, plus for each record before it
BY_HAND = "; by hand: "  # separates a user's note, which a training must not remove


def words_of(note: str) -> tuple[str, str]:
    """Return the parts of a KEEP note that training and a user wrote; "" for a missing part."""
    if not note.startswith(MARK):
        return "", note
    ours, _, others = note.removeprefix(MARK).partition(BY_HAND)
    return ours, others


@dataclass(frozen=True, slots=True)
class Record:
    """A record to append. `id` identifies the request. The log never gets two records with the same id."""

    type: str
    body: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class Acquire:
    """The ownership of a job attempt, or a rollback within a job attempt."""

    term: int
    nonce: str
    restored: CheckpointId | None


@dataclass(frozen=True, slots=True)
class Commit:
    """The log record of a checkpoint.

    manifests: (rank, digest of its manifest) for every rank whose files are in this store. `world` ranks saved it. On
        a disk of one node, these are the ranks of that node
    index: digest of the index
    needs: the older checkpoints whose data files it uses too, in their order. They may have been retired since, but
        those data files stay as long as this checkpoint uses them
    time: time of the commit, in seconds since 1970
    """

    checkpoint: CheckpointId
    world: int
    manifests: tuple[tuple[int, str], ...]
    index: str
    finite: bool | None = None
    reason: str = "due"  # or "ring": an emergency save, or "late": saved after the trainer's death
    needs: tuple[CheckpointId, ...] = ()
    time: float = 0.0

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def whole(self) -> bool:
        """Return True if this store has the manifest of every rank."""
        return len(self.manifests) == self.world

    @property
    def full(self) -> bool:
        """Return True if its own data files have all its bytes. Otherwise it is an increment."""
        return not self.needs


@dataclass
class RunState:
    """The state of a run after all records before `next_seq`."""

    next_seq: int = 0
    last: str = ""  # SHA-256 of the bytes of the newest record
    acquires: list[Acquire] = field(default_factory=list)
    commits: dict[CheckpointId, Commit] = field(default_factory=dict)  # checkpoints that exist
    retired: CheckpointIds = field(default_factory=CheckpointIds)
    aborted: CheckpointIds = field(default_factory=CheckpointIds)
    reasons: dict[CheckpointId, str] = field(default_factory=dict)  # reasons why checkpoints were aborted or retired
    kept: dict[CheckpointId, str] = field(default_factory=dict)  # notes of pinned checkpoints
    requests: dict[str, int] = field(default_factory=dict)  # numbers of records, by request id, from `requests_from` on
    requests_from: int = 0
    damaged: list[int] = field(default_factory=list)
    seen_term: int = 0  # the highest term in any record, because the ACQUIRE record may be damaged or deleted

    @property
    def term(self) -> int:
        return max(self.seen_term, self.acquires[-1].term if self.acquires else 0)

    def ended(self, checkpoint: CheckpointId) -> bool:
        return checkpoint in self.commits or checkpoint in self.retired or checkpoint in self.aborted

    def lineage(self) -> list[Commit]:
        """Return the live checkpoints of the present history, newest first.

        A job attempt that rolled back to a checkpoint continues from it. Later steps of older attempts leave the
        history immediately, even before the new attempt has saved a step, so a restart cannot undo a rollback.
        """
        history = in_history(self.acquires, self.commits)
        return [self.commits[checkpoint] for checkpoint in history]


def in_history(acquires: Iterable[Acquire], checkpoints: Iterable[CheckpointId]) -> list[CheckpointId]:
    """Return the checkpoint ids that are in the present history, newest first; see `RunState.lineage`."""
    restored = {a.term: a.restored for a in acquires}
    by_term: dict[int, list[CheckpointId]] = {}
    for checkpoint in checkpoints:
        by_term.setdefault(checkpoint.term, []).append(checkpoint)
    found: list[CheckpointId] = []
    limit: tuple[float, float] = (float("inf"), float("inf"))
    for term in sorted(restored.keys() | by_term.keys(), reverse=True):
        if term > limit[0]:
            continue  # a later job attempt rolled back to a step before this attempt
        last_step = limit[1] if term == limit[0] else float("inf")
        here = [a for a in by_term.get(term, ()) if a.step <= last_step]
        found += sorted(here, key=lambda a: a.step, reverse=True)
        back = restored.get(term)
        if back is not None:
            limit = min(limit, (back.term, back.step))
    return found


def fold(state: RunState, record: dict[str, Any]) -> None:
    """Apply one record. Raise CorruptError before any change if its body is impossible."""
    try:
        kind, body, request, seq = record["type"], record["body"], str(record["id"]), record["seq"]
        term = record.get("term", 0)
        if kind not in _FOLDS or type(term) is not int or not 0 <= term < MAX_TERM:
            raise CorruptError(f"not a record: {kind!r} of term {term!r}")
        _FOLDS[kind](state, body)
        state.requests[request] = seq
        state.seen_term = max(state.seen_term, term)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"impossible record: {error}") from None


def _acquire(state: RunState, body: dict[str, Any]) -> None:
    term, restored = body["term"], body["restored"]
    if type(term) is not int or not state.term < term < MAX_TERM:
        raise CorruptError(f"term {term!r} after {state.term}")
    state.acquires.append(Acquire(term, str(body["nonce"]), None if restored is None else CheckpointId.parse(restored)))


def _commit(state: RunState, body: dict[str, Any]) -> None:
    commit = _checked(body)
    if not state.ended(commit.checkpoint):
        state.commits[commit.checkpoint] = commit


def _abort(state: RunState, body: dict[str, Any]) -> None:
    checkpoint = CheckpointId.parse(body["checkpoint"])
    if not state.ended(checkpoint):
        state.reasons[checkpoint] = str(body["reason"])[:500]
        state.aborted.add(checkpoint)


def _plan(state: RunState, body: dict[str, Any]) -> None:
    for checkpoint in [CheckpointId.parse(text) for text in body["retire"]]:
        state.commits.pop(checkpoint, None)
        state.retired.add(checkpoint)
        if "reason" in body:
            state.reasons[checkpoint] = str(body["reason"])[:500]


def _keep(state: RunState, body: dict[str, Any]) -> None:
    checkpoint = CheckpointId.parse(body["checkpoint"])
    if body.get("keep", True) is False:
        state.kept.pop(checkpoint, None)
    else:
        state.kept[checkpoint] = str(body["note"])[:LONGEST]


def _snapshot(state: RunState, body: dict[str, Any]) -> None:
    own = summary(state)
    differs = [key for key in own.keys() - LOOSE if body[key] != own[key]]  # keys of later versions are ignored
    most = {"retired": len(state.retired), "aborted": len(state.aborted)}
    if any(key not in most or _ended(body[key], most[key]) != own[key] for key in differs):
        raise CorruptError("a snapshot contradicts the records before it")


def _ended(groups: Any, most: int) -> Any:
    """Return the groups in the form in which `summary` writes them."""
    return CheckpointIds.from_json(groups, most).to_json()


_FOLDS = {
    "ACQUIRE": _acquire, "COMMIT": _commit, "ABORT": _abort, "PLAN": _plan, "KEEP": _keep, "SNAPSHOT": _snapshot,
}  # fmt: skip
TYPES = tuple(_FOLDS)
TITLES = {  # for messages
    "ACQUIRE": "this job's ownership",
    "COMMIT": "the checkpoint",
    "ABORT": "the abort of a save",
    "PLAN": "the list of checkpoints to delete",
    "KEEP": "the note that keeps a checkpoint",
    "SNAPSHOT": "a summary of the log",
}


def _checked(body: dict[str, Any]) -> Commit:
    """Return the checkpoint of a COMMIT record. Raise CorruptError if its ranks or values are invalid."""
    checkpoint = CheckpointId.parse(body["checkpoint"])
    manifests = tuple((rank, digest) for rank, digest in body["manifests"])
    world, index, finite = body["world"], body["index"], body["finite"]
    if type(world) is not int or not 1 <= len(manifests) <= world <= MAX_WORLD or not _is_digest(index):
        raise CorruptError(f"checkpoint {checkpoint} has an impossible world or index")
    last = -1
    for rank, digest in manifests:
        if type(rank) is not int or not _is_digest(digest):
            raise CorruptError(f"impossible manifest of checkpoint {checkpoint}")
        if not last < rank < world:
            raise CorruptError(f"impossible rank {rank} in checkpoint {checkpoint}")
        last = rank
    if finite is not None and type(finite) is not bool:
        raise CorruptError(f"impossible finite: {finite!r}")
    needs, when = read_needs(body.get("needs", []), checkpoint), body["time"]
    if type(when) not in (int, float) or not 0 <= when < LAST_TIME:
        raise CorruptError(f"impossible time: {when!r}")
    return Commit(checkpoint, world, manifests, index, finite, str(body["reason"]), needs, when)


def commit_body(commit: Commit) -> dict[str, Any]:
    """Return the body of a COMMIT record. A full checkpoint has no `needs`."""
    body: dict[str, Any] = {
        "checkpoint": str(commit.checkpoint),
        "world": commit.world,
        "manifests": [list(manifest) for manifest in commit.manifests],
        "index": commit.index,
        "finite": commit.finite,
        "reason": commit.reason,
        "time": commit.time,
    }
    return body | {"needs": needs_texts(commit.needs)} if commit.needs else body


def summary(state: RunState) -> dict[str, Any]:
    """Return the body of a SNAPSHOT at `state.next_seq`. The body is the same in every process."""
    seq = state.next_seq
    return {
        "acquires": [[a.term, a.nonce, a.restored and str(a.restored)] for a in state.acquires],
        "commits": [commit_body(state.commits[a]) for a in sorted(state.commits)],
        "retired": state.retired.to_json(),
        "aborted": state.aborted.to_json(),
        "reasons": [[str(a), why] for a, why in list(state.reasons.items())[-MAX_REASONS:]],
        "kept": [[str(a), note] for a, note in sorted(state.kept.items())],
        "requests": {request: n for request, n in state.requests.items() if n >= seq - KEPT_REQUESTS},
    }


def expand(body: dict[str, Any], seq: int = MOST) -> RunState:
    """Return the state in the body of SNAPSHOT number `seq`. Raise CorruptError if the body is impossible."""
    most = FEW_ENDED + ENDED_EACH * seq
    try:
        state = RunState(
            commits={one.checkpoint: one for one in map(_checked, body["commits"])},
            retired=CheckpointIds.from_json(body["retired"], most),
            aborted=CheckpointIds.from_json(body["aborted"], most),
            reasons={CheckpointId.parse(a): str(why) for a, why in body.get("reasons", ())},
            kept={CheckpointId.parse(a): str(note) for a, note in body["kept"]},
            requests={str(request): int(n) for request, n in body.get("requests", {}).items()},
            requests_from=max(0, seq - KEPT_REQUESTS),
        )
        for term, nonce, restored in body["acquires"]:
            _acquire(state, {"term": term, "nonce": nonce, "restored": restored})
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptError(f"impossible snapshot: {error}") from None
    return state


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def live_files(state: RunState, files: Iterable[str], used: Iterable[str]) -> set[str]:
    """Return the listed data files that must stay: those `used` by live checkpoints or owned by an unfinished one.

    An unfinished checkpoint may also use files of older checkpoints. These files stay only as long as a live checkpoint
    uses them, so the COMMIT of the unfinished one checks that they exist.
    """
    protected = set(used)
    return {key for key in files if key in protected or (a := owner(key)) is None or not state.ended(a)}
