"""One checkpoint in a store into tensors, where there is no job whose ranks have to agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt.checkpoint import read, read_repair
from ckpt.format.manifest import Attempt
from ckpt.format.saved_state import Key, SavedState
from ckpt.state.filler import Filler, Target


async def fill_from_store(
    url: str, attempt: Attempt, saved: SavedState, fills: Mapping[Key, list[Target]], others: Sequence[str] = ()
) -> None:
    """Read what these targets want of a checkpoint in a store, verified; `others`: as of `StoreSource`. CorruptError
    names the tensor that cannot be had anywhere; what came before it is filled by then."""
    filler = Filler(saved, fills)
    async with read.opened(url) as store:
        await read_repair.fetch(store, attempt, saved.table, filler.blobs, filler.add, others, filler.room)
    filler.finish()
