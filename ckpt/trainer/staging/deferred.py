"""What a step that is not due is made of: cloned, or left in place and watched.

What optimizers change stays where it is until one begins the next step. Everything else (batches, random numbers,
buffers, settings) moves on before that, so it is taken at once. Parameters that nobody trains, as of a frozen model,
are left in place too where they are large. Versions and fingerprints say later whether somebody has written to what was
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter, not_

from torch import Tensor

from ckpt.format.layout import Layout
from ckpt.state.capture import Capture, Reading
from ckpt.state.fingerprint import Fingerprint, SampledPlaces
from ckpt.state.tensors import Versioned, version_of

LITTLE = 1 << 20  # bytes that are cloned in any case
MOST = 64 << 20  # bytes that are cloned at most; both of all tensors together

_VERSION = attrgetter("_version")


@dataclass(frozen=True)
class DeferredStep:
    """One step. `left`: the numbers of tensors that were left in place, with the `versions` that they had; the first
    `counted` of them are what optimizers change. `weights`: see `Capture`. `too_large`: a tensor that would have had to
    be taken, "" if there is none."""

    step: int
    reading: Reading
    left: Sequence[int]
    counted: int
    versions: Sequence[int | None]
    fingerprints: Sequence[Fingerprint]
    weights: Sequence[bool]
    alive: Sequence[Tensor]  # whose memory the fingerprints look at
    too_large: str = ""

    @property
    def watched(self) -> dict[int, int]:
        """The versions of what was left in place, by number, as far as anything counts them."""
        return {n: v for n, v in zip(self.left, self.versions, strict=True) if v is not None}

    def gone(self) -> str:
        """Why the step cannot be had any more, "" if it can. That the state consists of other tensors now is no matter:
        it holds those of its step."""
        if self.too_large:
            return f"{self.too_large} may have moved on since, and there was too much of it to keep at each step"
        changed = set[int]().union(*(one.changed() for one in self.fingerprints)) & set(self.left)
        now = _versions(self.reading.counters, self.left, self.counted)
        if now != self.versions:
            changed |= {n for n, was, is_now in zip(self.left, self.versions, now, strict=True) if was != is_now}
        if any(self.weights[n] for n in changed):
            return "weights were changed by hand since"
        names = [self.reading.layout.tensors[n].name for n in sorted(changed)]
        return f"{names[0]} was written to since, by something else than an optimizer's step" if names else ""


class DeferredSteps:
    """Takes one step after the other. `most`: bytes that are cloned of each, at most."""

    def __init__(self, most: float = MOST) -> None:
        self._most = most
        self._layout: Layout | None = None
        self._where: list[tuple[int, int]] = []
        self._spots: list[SampledPlaces] = []  # there

    def take(self, step: int, reading: Reading, capture: Capture) -> DeferredStep:
        """`reading`: the state at this step, as `capture` has just read it; it must not be used otherwise."""
        if reading.layout is not self._layout:
            self._layout, self._where, self._spots = reading.layout, [], []
        tensors, others, too_large, room = list(reading.tensors), list[int](), "", self._most
        for n in compress(range(len(tensors)), map(not_, reading.guarded)):
            size = tensors[n].nbytes
            if capture.parameters[n] and self._most - room + size > LITTLE:
                others.append(n)
            elif size > room:
                too_large = too_large or reading.layout.tensors[n].name
            else:
                room -= size
                tensors[n] = tensors[n].clone()
        stepped = list(compress(range(len(tensors)), reading.guarded))
        left = [*stepped, *others]
        prints = [spots.look() for spots in (*reading.spots, *self._look_at(reading, others))]
        versions = _versions(reading.counters, left, len(stepped))
        taken = replace(reading, tensors=tensors)
        return DeferredStep(
            step, taken, left, len(stepped), versions, prints, capture.weights, reading.tensors, too_large
        )

    def _look_at(self, reading: Reading, numbers: list[int]) -> list[SampledPlaces]:
        where = [(n, reading.tensors[n].data_ptr()) for n in numbers]
        if where != self._where:
            self._spots = (
                [SampledPlaces(reading.layout, numbers, [reading.tensors[n] for n in numbers])] if numbers else []
            )
            self._where = where
        return self._spots


def _versions(counters: Sequence[Versioned], numbers: Sequence[int], counted: int) -> list[int | None]:
    """`counted`: so many, the first ones, are known to count what is written to them."""
    found: list[int | None] = list(map(_VERSION, map(counters.__getitem__, numbers[:counted])))
    return found + [version_of(counters[n]) for n in numbers[counted:]]
