"""Sets of very many attempts, small in memory and on disk: their steps mostly follow one another in equal strides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from collections.abc import Set as AbstractSet
from typing import Any

from ckpt.errors import CorruptError
from ckpt.format.manifest import Attempt

Group = tuple[int, str]  # epoch and nonce
MOST = 20_000_000  # steps that one file may say: more would be an attack on memory


class Attempts(MutableSet[Attempt]):
    """A set of attempts, by incarnations."""

    def __init__(self, attempts: Iterable[Attempt] = ()) -> None:
        self._steps: dict[Group, set[int]] = {}
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
        """Of what is the same only the names are copied."""
        found = Attempts()
        found._steps = dict(self._steps)
        own: set[Group] = set()
        for one in others:
            if (group := (one.epoch, one.nonce)) not in own:
                own.add(group)
                found._steps[group] = set(found._steps.get(group, ()))
            found._steps[group].add(one.step)
        return found

    def add(self, value: Attempt) -> None:
        self._steps.setdefault((value.epoch, value.nonce), set()).add(value.step)

    def discard(self, value: Attempt) -> None:
        self._steps.get((value.epoch, value.nonce), set()).discard(value.step)

    def to_json(self) -> dict[str, list[list[int]]]:
        """By `<epoch>.<nonce>`: rows of the first step, how far it is to the next one, and how many there are. The same
        for the same set, however it came about."""
        groups = sorted((group, steps) for group, steps in self._steps.items() if steps)
        return {f"{epoch}.{nonce}": _rows(sorted(steps)) for (epoch, nonce), steps in groups}

    @classmethod
    def from_json(cls, groups: dict[str, list[Any]]) -> Attempts:
        """CorruptError, ValueError or TypeError if that is impossible. A number alone is a step."""
        found, left = cls(), MOST
        for name, rows in groups.items():
            any_one = Attempt.parse(f"{name}-0")
            steps = found._steps.setdefault((any_one.epoch, any_one.nonce), set())
            for row in rows:
                first, stride, count = (row, 1, 1) if type(row) is int else row
                if any(type(n) is not int for n in (first, stride, count)) or stride < 1 or not 1 <= count <= left:
                    raise CorruptError(f"impossible steps: {row!r}")
                left -= count
                for end in (first, first + stride * (count - 1)):
                    Attempt.parse(f"{name}-{end}")
                steps.update(range(first, first + stride * count, stride))
        return found


def _rows(steps: list[int]) -> list[list[int]]:
    """Strides as long as they go, from the first step on."""
    found: list[list[int]] = []
    for step in steps:
        if found:
            first, stride, count = last = found[-1]
            if count == 1 or step == first + stride * count:
                last[1:] = [step - first if count == 1 else stride, count + 1]
                continue
        found.append([step, 1, 1])
    return found
