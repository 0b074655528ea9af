"""Fill a state from a run without writing to the run, so that the run's own job can continue."""

from __future__ import annotations

from typing import Any

import ckpt.adapters  # noqa: F401 - registers the adapters
from ckpt.core.checkpoint import read, reference
from ckpt.core.checkpoint.reference import Which
from ckpt.core.format.boxes import Seat
from ckpt.core.ipc import channel
from ckpt.core.ranks.world import World, together
from ckpt.core.restore.restore import Candidates, Restored, restore_first
from ckpt.core.state.capture import Capture
from ckpt.errors import CorruptError, FormatError, NoCheckpointError
from ckpt.store import normalise


def is_run(url: str) -> bool:
    """Return True if a URL, which may also name a step, is that of a run. Raise StoreError if it is unreadable."""
    try:
        log = read.run(read.open_run(normalise(reference.split(url, None)[0])))
    except (FormatError, NoCheckpointError):
        return False
    read.run(log.store.aclose())
    return True


def fill(state: dict[str, Any], location: str, which: Which, *, strict: bool = True, subset: bool = False) -> Restored:
    """Fill the state from a checkpoint of a run. All ranks must call this and must see the run.

    - `location`: URL of the run.
    - `which`: number of the step, "best", or None for the newest.
    - `strict`: False restores entries that fit, as `Checkpointer.restore` does.
    - `subset`: True ignores top-level entries of the checkpoint that the state does not have. Default False.

    Raises NoCheckpointError if there is no checkpoint, MismatchError if it does not fit (the state is then unchanged),
    and CorruptError if no checkpoint is intact.
    """
    number = None if which == reference.BEST else reference.number(which)
    world = World.detect(channel.node_id())
    touched: list[bool] = []
    result = Restored(step=None)
    capture = Capture(state, Seat(world.rank, world.size), subset=subset)

    def prepare() -> int | None:
        """Read the state. An error on any rank then ends the call on all ranks. Return the step on rank 0."""
        capture.read()
        return _step_of(location, which) if which == reference.BEST and world.rank == 0 else number

    wanted = together(world, "load", prepare, lambda steps: steps[0])
    candidates = Candidates(world, (), (), [location], [[0] * world.size], wanted)
    source = restore_first(
        world,
        candidates.gather(),
        capture,
        result,
        strict=strict,
        on_touch=lambda: touched.append(True),
        lost=candidates.lost,
        step=wanted,
    )
    world.farewell()
    if source is None and result.skipped:
        skipped = "; ".join(f"step {one.step} in {one.tier}: {one.reason}" for one in result.skipped)
        partly = ". The state is partly overwritten: do not use it" if touched else ""
        raise CorruptError(f"no checkpoint could be loaded{partly}: {skipped}")
    if source is None:
        raise NoCheckpointError(f"there is no checkpoint{'' if wanted is None else f' of step {wanted}'} in {location}")
    return result


def _step_of(location: str, which: Which) -> int:
    async def find() -> int:
        log = await read.open_run(location)
        try:
            return read.choose(log, which).step
        finally:
            await log.store.aclose()

    return read.run(find())
