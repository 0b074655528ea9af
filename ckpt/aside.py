"""A step that is not staged, kept so that it can be staged after all when the training ends right behind it.

What optimizers change stays where it is until one begins the next step. Everything else (batches, random numbers,
buffers, settings) moves on before that, so it is taken at once. Where that is much, as with a large frozen model, it is
left in place too, and its versions say later whether somebody has written to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter, not_

from torch import Tensor

from ckpt.fingerprint import Fingerprint
from ckpt.state import Reading

LITTLE = 1 << 20  # bytes that are cloned; of a tensor, and of all

_VERSION = attrgetter("_version")


@dataclass(frozen=True)
class Moment:
    """One step. `watched`: what was left in place and others than optimizers may write to, with the `versions` that it
    had; what optimizers remember is left alone by everybody. `fingerprints`: of what optimizers change, since a write
    need not be counted. `whole`: all that is no optimizer's was taken."""

    step: int
    reading: Reading
    watched: Sequence[Tensor]
    versions: Sequence[int]
    fingerprints: Sequence[Fingerprint]
    whole: bool

    @classmethod
    def take(cls, step: int, reading: Reading, weights: Sequence[bool]) -> Moment:
        """`reading`: what the state is at this step, which must not be used otherwise; `weights`: see `Capture`."""
        tensors, left, room, whole = list(reading.tensors), list(weights), LITTLE, True
        for i in compress(range(len(tensors)), map(not_, reading.guarded)):
            left[i] = tensors[i].nbytes > room
            if left[i]:
                whole = False
            else:
                room -= tensors[i].nbytes
                tensors[i] = tensors[i].clone()
        watched = list(compress(tensors, left))
        prints = [spots.look() for spots in reading.spots]
        return cls(step, replace(reading, tensors=tensors), watched, list(map(_VERSION, watched)), prints, whole)

    def holds(self, now: Reading) -> bool:
        """Whether what was left in place is as it was. `now`: the same state, read again."""
        same = now.layout is self.reading.layout and list(map(_VERSION, self.watched)) == self.versions
        return same and not any(one.changed() for one in self.fingerprints)
