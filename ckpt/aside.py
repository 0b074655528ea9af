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
    """One step. `watched`: the tensors that were left in place, with the `versions` that they had; `fingerprints`: of
    those that optimizers change, since a write to them need not be counted."""

    step: int
    reading: Reading
    watched: Sequence[Tensor]
    versions: Sequence[int]
    fingerprints: Sequence[Fingerprint]

    @classmethod
    def take(cls, step: int, reading: Reading) -> Moment:
        """`reading`: what the state is at this step, which must not be used otherwise."""
        tensors, left, room = list(reading.tensors), list(reading.guarded), LITTLE
        for i in list(compress(range(len(left)), map(not_, left))):
            left[i] = tensors[i].nbytes > room
            if not left[i]:
                room -= tensors[i].nbytes
                tensors[i] = tensors[i].clone()
        watched = list(compress(tensors, left))
        fingerprints = [spots.look() for spots in reading.spots]
        return cls(step, replace(reading, tensors=tensors), watched, list(map(_VERSION, watched)), fingerprints)

    def holds(self, now: Reading) -> bool:
        """Whether what was left in place is as it was. `now`: the same state, read again."""
        same = now.layout is self.reading.layout and list(map(_VERSION, self.watched)) == self.versions
        return same and not any(one.changed() for one in self.fingerprints)

    @property
    def whole(self) -> bool:
        """Whether nothing but what optimizers change was left in place."""
        return len(self.watched) == sum(self.reading.guarded)
