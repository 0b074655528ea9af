"""Fill a state from another run, which is only read: nothing is written there, and its own job can continue."""

from __future__ import annotations

from typing import Any

import ckpt.adapters  # noqa: F401 - registers them
from ckpt.core.checkpoint import read, spelling
from ckpt.core.format.partition import Seat
from ckpt.core.ipc import channel
from ckpt.core.ranks.world import World
from ckpt.core.restore.restore import Candidates, Restored, restore_first
from ckpt.core.state.capture import Capture
from ckpt.errors import CorruptError, FormatError, MismatchError, NoCheckpointError
from ckpt.store import normalise


def is_run(url: str) -> bool:
    """Return whether there is a run at a URL, which may also name one of its steps. StoreError if it cannot be read."""
    try:
        log = read.run(read.open_run(normalise(spelling.split(url, None)[0])))
    except FormatError:
        return False
    read.run(log.store.aclose())
    return True


def fill(state: dict[str, Any], url: str, step: int | None = None, *, only: bool = False) -> Restored:
    """Fill the state with the newest checkpoint of a run, or that of `step`. All ranks take part, and must see it.

    `only`: ignore everything else in the checkpoint. Raises NoCheckpointError if there is none, MismatchError if it
        does not fit, CorruptError if all are damaged.
    """
    place, which = spelling.split(url, step)
    wanted, place = spelling.number(which), normalise(place)
    world = World.detect(channel.node_id())
    result = Restored(step=None)
    candidates = Candidates(world, (), (), [place], [[0] * world.size], wanted)
    sources = candidates.gather()
    capture = Capture(state, Seat(world.rank, world.size))
    capture.read()
    source = restore_first(
        world, sources, capture, result, strict=not only, on_touch=lambda: None, lost=candidates.lost, step=wanted
    )
    world.farewell()
    if source is None and result.skipped:
        raise CorruptError("; ".join(f"step {one.step} in {one.tier}: {one.reason}" for one in result.skipped))
    if source is None:
        raise NoCheckpointError(f"there is no checkpoint{'' if wanted is None else f' of step {wanted}'} in {place}")
    if odd := [one for one in result.left_out if _entry(one) in state]:
        raise MismatchError(f"step {result.step} of {place} does not fit: {'; '.join(odd[:5])}")
    return result


def _entry(problem: str) -> str:
    """Return the entry of the state that a problem is about: the text begins with its name."""
    return problem.split(maxsplit=1)[0].split(".")[0].rstrip(":")
