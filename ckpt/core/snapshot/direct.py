"""Writes a state directly to the nearest tier while training waits, because memory has no room for a snapshot.

The trainer itself stores the data file and the manifest of its rank, range by range, from the live tensors. This needs
no copy of the state in memory, only buffers for the ranges being uploaded, 128 MiB at most. The writer then commits the
stored files as if it had stored them itself, and copies them to further tiers.

The training thread waits for the whole write. If another thread changes the state during the write, the save fails. The
data is stored raw, because it cannot be compared with an earlier checkpoint before it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ckpt.core.checkpoint.open_tier import open_place
from ckpt.core.checkpoint.write import RankSnapshot, build_table, drop, finish_manifest, page_aligned, upload_from
from ckpt.core.format.boxes import boxes_of_run
from ckpt.core.format.columns import Replicas
from ckpt.core.format.digest import chunk_hasher, file_digest
from ckpt.core.format.layout import CHUNK
from ckpt.core.format.manifest import CheckpointId, DataFile, data_key, folder_of, metadata_of
from ckpt.core.state.capture import CapturedState
from ckpt.core.state.sharding import slices
from ckpt.core.state.tensors import as_bytes

_NUMBER = re.compile(r"rank-(\d{5})(?:-(\d{5}))?\.safetensors")


async def write_directly(
    spec: Mapping[str, Any],
    root: str,
    checkpoint: CheckpointId,
    captured: CapturedState,
    *,
    finite: bool | None,
    replicas: Replicas,
    on_bytes: Callable[[int], None],
    check: Callable[[], None],
    check_whole: Callable[[], None],
) -> None:
    """Store the data and manifest of this rank in a tier. They are not a checkpoint until the writer commits them.

    spec: see `ckpt.tiers.Tier.spec`. root: the id of the run that the tier must hold.
    on_bytes: called with the size of each stored range.
    check: called before each range is read; raises if the save was interrupted.
    check_whole: called before the manifest is stored; raises if the state has changed during the write.
    Raises StoreError, FullError, RunGoneError or SaveError. After an error, no data file is left.
    """
    tier = await open_place(dict(spec), root=root)
    try:
        store, layout = tier.store, captured.layout
        key = data_key(checkpoint, layout.rank, await _next_number(tier.store, checkpoint, layout.rank))
        header = layout.arrangement.header(metadata_of(key))
        live = LiveBytes(captured)

        async def piece(offset: int, length: int) -> memoryview:
            check()
            view, start = page_aligned(length), min(length, max(0, len(header) - offset))
            view[:start] = header[offset : offset + start]
            if start < length:
                live.read(offset + start - len(header), view[start:])
            return view

        size = layout.arrangement.data_size
        await upload_from(store, key, len(header) + size, piece, on_bytes, first=len(header))
        file = DataFile(key, len(header) + size, len(header), file_digest(header))
        snapshot = RankSnapshot(checkpoint, layout, memoryview(b""), captured.values, finite, replicas)
        try:
            table = build_table(layout, key, live.digests())
        except BaseException:
            await drop(store, [key])
            raise
        await finish_manifest(store, snapshot, table, [file], reason="due", check=check_whole)
    finally:
        await tier.store.aclose()


async def _next_number(store: Any, checkpoint: CheckpointId, rank: int) -> int:
    """Return an unused data file number for this checkpoint and rank, because an earlier try may have left files."""
    names = [_NUMBER.fullmatch(info.key.rpartition("/")[2]) async for info in store.list(folder_of(checkpoint))]
    return max((int(name[2] or 0) + 1 for name in names if name is not None and int(name[1]) == rank), default=0)


class LiveBytes:
    """The bytes of live tensors in the order of their layout, and the digest of each chunk of 4 MiB.

    Ranges must be read in order, each once, because digests are computed as the bytes pass.
    """

    def __init__(self, captured: CapturedState) -> None:
        self._captured, self._arrangement = captured, captured.layout.arrangement
        self._position = self._tensor = self._within = 0  # offset in the data; index in the order; offset in the tensor
        self._digests: list[bytes] = []
        self._hasher = chunk_hasher()

    def read(self, start: int, into: memoryview) -> None:
        """Copy bytes [start, start + len(into)) of the data."""
        assert start == self._position, (start, self._position)
        target = torch.frombuffer(into, dtype=torch.uint8) if len(into) else torch.empty(0, dtype=torch.uint8)
        done = 0
        while done < len(into):
            number = self._arrangement.order[self._tensor]
            size = self._captured.layout.sizes[number]
            count = min(size - self._within, len(into) - done)
            _copy(self._captured.tensors[number], self._within, target[done : done + count])
            self._digest(into[done : done + count], size)
            done += count
            if self._within == size:
                self._tensor, self._within = self._tensor + 1, 0
        self._position += done

    def digests(self) -> bytes:
        """Return the digests of all chunks, joined, in the order of the data. All bytes must have been read."""
        assert self._position == self._arrangement.data_size
        return b"".join(self._digests)

    def _digest(self, view: memoryview, size: int) -> None:
        """Digest the next bytes of a tensor of `size` bytes. A chunk ends every 4 MiB and at the end of the tensor."""
        while view:
            left = min(CHUNK - self._within % CHUNK, size - self._within)
            self._hasher.update(view[:left])
            self._within += len(view[:left])
            if self._within % CHUNK == 0 or self._within == size:
                self._digests.append(self._hasher.digest())
                self._hasher = chunk_hasher()
            view = view[left:]


def _copy(source: Tensor, start: int, target: Tensor) -> None:
    """Copy the bytes of a tensor from `start` on, in row-major order, to a flat byte tensor. Also works if the range
    begins or ends inside an element."""
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        target.copy_(as_bytes(source)[start : start + len(target)])
        return
    item = source.element_size()
    first, last = start // item, -(-(start + len(target)) // item)
    run = torch.empty(last - first, dtype=source.dtype)  # a range may begin and end inside an element
    done = 0
    for at, sizes in boxes_of_run(tuple(source.shape), first, last):
        here = source[slices((at, sizes))]
        count = here.numel()
        run[done : done + count].view(here.shape).copy_(here)
        done += count
    skip = start - first * item
    target.copy_(as_bytes(run)[skip : skip + len(target)])
