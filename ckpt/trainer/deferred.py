"""A step that is not staged, kept so that it can be staged after all when the training ends right behind it.

What optimizers change stays where it is until one begins the next step. Everything else (batches, random numbers,
buffers, settings) moves on before that, so it is taken at once. What is large and has not moved from one step to the
next, as a frozen model, is left in place too. Versions and fingerprints say later whether somebody has written to what
was left; of an array neither would, so it is taken, or the step cannot be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

from ckpt.format.layout import Layout
from ckpt.state.capture import Reading
from ckpt.state.fingerprint import Fingerprint, SampledPlaces
from ckpt.state.tensors import version_of

LITTLE = 1 << 20  # bytes that are cloned in any case
MOST = 64 << 20  # bytes that are cloned of what moves within a step; both of all tensors together


@dataclass(frozen=True)
class DeferredStep:
    """One step. `left`: the numbers of tensors that were left in place and others than optimizers may write to, with
    the `versions` that they had; what optimizers remember is left alone by everybody. `weights`: see `Capture`.
    `too_large`: a tensor that would have had to be taken, "" if there is none."""

    step: int
    reading: Reading
    left: Sequence[int]
    versions: Sequence[int | None]
    fingerprints: Sequence[Fingerprint]
    weights: Sequence[bool]
    too_large: str = ""

    def gone(self, now: Reading) -> str:
        """Why the step cannot be had any more, "" if it can. `now`: the same state, read again."""
        if self.too_large:
            return f"{self.too_large} may have moved on since, and is too large to be kept beside each step"
        if now.layout is not self.reading.layout:
            return "the state consists of other tensors since"
        tensors = self.reading.tensors
        pairs = zip(self.left, self.versions, strict=True)
        changed = {n for n, version in pairs if version_of(tensors[n]) != version}
        changed = changed.union(*(one.changed() for one in self.fingerprints))
        if any(self.weights[n] for n in changed):
            return "weights were changed by hand since"
        names = [self.reading.layout.tensors[n].name for n in sorted(changed)]
        return f"{names[0]} has moved on since" if names else ""


class DeferredSteps:
    """Takes one moment after the other, and learns what moves on from step to step."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._seen: dict[int, int | None] = {}  # versions of what might be left in place, by number
        self._movers: set[int] = set()  # what has been seen to move
        self._where: list[tuple[int, int]] = []
        self._spots: list[SampledPlaces] = []  # there

    def take(self, step: int, reading: Reading, weights: Sequence[bool], fixed: int) -> DeferredStep:
        """`reading`: what the state is at this step, which must not be used otherwise; its first `fixed` tensors are
        the same at each reading, and count what is written to them."""
        if reading.layout is not self._layout:
            self._layout, self._seen, self._movers = reading.layout, {}, set()
            self._where, self._spots = [], []
        tensors, others, too_large, room = list(reading.tensors), list[int](), "", MOST
        for n in compress(range(len(tensors)), (not guarded for guarded in reading.guarded)):
            tensor, size = tensors[n], tensors[n].nbytes
            if n < fixed and MOST - room + size > LITTLE and self._stays(n, version_of(tensor)):
                others.append(n)
            elif size > room:
                too_large = too_large or reading.layout.tensors[n].name
            else:
                room -= size
                tensors[n] = tensor.clone()
        left = [*compress(range(len(tensors)), weights), *others]
        versions = [version_of(tensors[n]) for n in left]
        prints = [spots.look() for spots in (*reading.spots, *self._look_at(reading, others))]
        return DeferredStep(step, replace(reading, tensors=tensors), left, versions, prints, weights, too_large)

    def _stays(self, number: int, version: int | None) -> bool:
        """Whether nobody was seen to write to it from one moment to the next, as far as writes are counted."""
        if self._seen.setdefault(number, version) != version:
            self._movers.add(number)
        return number not in self._movers

    def _look_at(self, reading: Reading, numbers: list[int]) -> list[SampledPlaces]:
        where = [(n, reading.tensors[n].data_ptr()) for n in numbers]
        if where != self._where:
            self._where = where
            self._spots = (
                [SampledPlaces(reading.layout, numbers, [reading.tensors[n] for n in numbers])] if numbers else []
            )
        return self._spots
