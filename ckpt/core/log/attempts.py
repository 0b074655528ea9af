"""A compact set of checkpoint ids, in memory and on disk. Their steps usually have equal strides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from collections.abc import Set as AbstractSet
from typing import Any

from ckpt.core.format.manifest import Attempt
from ckpt.errors import CorruptError

Group = tuple[int, str]  # epoch and nonce
MOST = 20_000_000  # steps in one file: more would exhaust memory


class Attempts(MutableSet[Attempt]):
    """A set of checkpoint ids, grouped by job attempt."""

    def __init__(self, attempts: Iterable[Attempt] = ()) -> None:
        self._steps: dict[Group, set[int]] = {}
        self._rows: dict[Group, list[list[int]]] = {}  # cached rows of `to_json`
        for attempt in attempts:
            self.add(attempt)

    def __contains__(self, attempt: object) -> bool:
        if not isinstance(attempt, Attempt):
            return False
        return attempt.step in self._steps.get((attempt.epoch, attempt.nonce), ())

    def __iter__(self) -> Iterator[Attempt]:
        return (Attempt(epoch, step, nonce) for (epoch, nonce), steps in self._steps.items() for step in steps)

    def __len__(self) -> int:
        return sum(map(len, self._steps.values()))

    def __repr__(self) -> str:
        return f"Attempts({sorted(self)})"

    def __or__(self, others: AbstractSet[Any]) -> Attempts:
        found = Attempts()
        found._steps = {group: set(steps) for group, steps in self._steps.items()}
        for one in others:
            found.add(one)
        return found

    def add(self, value: Attempt) -> None:
        group = value.epoch, value.nonce
        steps = self._steps.setdefault(group, set())
        if value.step in steps:
            return
        rows = self._rows.get(group) if steps else self._rows.setdefault(group, [])
        steps.add(value.step)
        if rows is not None and (not rows or _last(rows[-1]) < value.step):
            _extend(rows, value.step)
        else:
            self._rows.pop(group, None)

    def discard(self, value: Attempt) -> None:
        self._rows.pop((value.epoch, value.nonce), None)
        self._steps.get((value.epoch, value.nonce), set()).discard(value.step)

    def to_json(self) -> dict[str, list[list[int]]]:
        """Return rows of [first step, stride, count], by `<term>-<nonce>`. Equal sets give equal rows."""
        for group, steps in self._steps.items():
            if group not in self._rows:
                rows = self._rows[group] = []
                for step in sorted(steps):
                    _extend(rows, step)
        found = sorted((group, rows) for group, rows in self._rows.items() if rows)
        return {f"{epoch}-{nonce}": [list(row) for row in rows] for (epoch, nonce), rows in found}

    @classmethod
    def from_json(cls, groups: dict[str, list[Any]], most: int = MOST) -> Attempts:
        """Decode a set. Raise CorruptError, ValueError or TypeError for impossible sets or more than `most` steps."""
        found, left = cls(), min(most, MOST)
        for name, rows in groups.items():
            any_one = _at_step(name, 0)
            steps = found._steps.setdefault((any_one.epoch, any_one.nonce), set())
            for row in rows:
                first, stride, count = (row, 1, 1) if type(row) is int else row
                if any(type(n) is not int for n in (first, stride, count)) or stride < 1 or not 1 <= count <= left:
                    raise CorruptError(f"impossible steps: {row!r}")
                left -= count
                for end in (first, first + stride * (count - 1)):
                    _at_step(name, end)
                steps.update(range(first, first + stride * count, stride))
        return found


def _at_step(group: str, step: int) -> Attempt:
    return Attempt.parse(f"{step:09d}.{group}")


def _extend(rows: list[list[int]], step: int) -> None:
    """Add a step, higher than all others, to rows of equal strides as long as possible."""
    if rows:
        first, stride, count = last = rows[-1]
        if count == 1 or step == first + stride * count:
            last[1:] = [step - first if count == 1 else stride, count + 1]
            return
    rows.append([step, 1, 1])


def _last(row: list[int]) -> int:
    first, stride, count = row
    return first + stride * (count - 1)
