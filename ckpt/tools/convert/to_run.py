"""Write a run with one checkpoint, sharded for a number of ranks, from which a job can continue or start.

Tensors that all ranks share are split along the first dimension, as `fully_shard` does, so that each rank finds its
part in one file. Values of single ranks are assigned by the rules of a restore.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from ckpt.core.checkpoint import read
from ckpt.core.checkpoint.commits import acquire, commit
from ckpt.core.checkpoint.write import RankSnapshot, WrittenManifest, build_table, finish_manifest
from ckpt.core.format.boxes import GLOBAL, Box, Dims
from ckpt.core.format.digest import file_digest
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import (
    MAX_WORLD,
    STEPS,
    CheckpointId,
    DataFile,
    canonical,
    data_key,
    is_data,
    metadata_of,
    new_format,
)
from ckpt.core.log.run_log import RunLog
from ckpt.errors import UsageError
from ckpt.store import Store, open_store
from ckpt.tools.convert.output import Literal, OutFile, Output, Sums, TensorRun
from ckpt.tools.convert.source import Origin, RankView


def plan(
    origin: Origin,
    views: list[RankView],
    dtypes: Mapping[str, str],
    *,
    step: int,
    finite: bool | None = None,
    parents: tuple[str, ...] = (),
) -> Output:
    """Plan the run. `views`: one per rank of the new run. `dtypes`: dtype to write, by label. `finite`: as recorded in
    the source checkpoint. `parents`: ids of the source checkpoint, if it is in a run."""
    world = len(views)
    if not 0 < world <= MAX_WORLD:
        raise UsageError(f"{world} ranks: choose a number from 1 to {MAX_WORLD}")
    chosen = [[[name, label, dtypes[label]] for name, label in view.tensors.items()] for view in views]
    nonce = file_digest(canonical([origin.identity, chosen, [len(view.entries) for view in views]]))[:8]
    checkpoint = CheckpointId(1, step, nonce)  # always the same id, so that an interrupted export can continue
    shared = _shared(views)
    planned = [_rank(origin, view, shared, dtypes, rank, world, checkpoint) for rank, view in enumerate(views)]
    layouts = [layout for layout, _ in planned]

    def finish(folder: Path, sums: Sums) -> None:
        values = [[entry.values for entry in view.entries] for view in views]
        ranks = zip(layouts, values, strict=True)
        snapshots = [RankSnapshot(checkpoint, la, memoryview(b""), v, finite, parents=parents) for la, v in ranks]
        read.run(_finish(folder, checkpoint, snapshots, sums))

    notes = tuple(dict.fromkeys(note for view in views for note in view.notes))
    what = "a run of 1 rank" if world == 1 else f"a run of {world} ranks"
    return Output(what, tuple(file for _, file in planned), finish, side_by_side=world > 1, notes=notes)


def _shared(views: list[RankView]) -> set[str]:
    """Return the names under which all ranks have the same tensor."""
    first = views[0].tensors
    return {name for name, label in first.items() if all(view.tensors.get(name) == label for view in views)}


def _rank(
    origin: Origin,
    view: RankView,
    shared: set[str],
    dtypes: Mapping[str, str],
    rank: int,
    world: int,
    checkpoint: CheckpointId,
) -> tuple[Layout, OutFile]:
    specs, labels = list[TensorSpec](), list[str]()
    elsewhere, instances = dict[str, tuple[str, Dims]](), dict[str, int]()
    for name, label in view.tensors.items():
        whole, dtype = origin.tensors[label], dtypes[label]
        if name not in shared:
            instances[name] = rank
            specs.append(TensorSpec(name, dtype, whole.shape, whole.accelerator, instance=rank))
        elif (box := chunk(whole.shape, rank, world)) is not None:
            at, sizes = box
            full = None if sizes == whole.shape else whole.shape
            specs.append(TensorSpec(name, dtype, sizes, whole.accelerator, full, () if full is None else at, GLOBAL))
        else:
            elsewhere[name] = dtype, whole.shape
            continue
        labels.append(label)
    components = [entry.component for entry in view.entries]
    layout = Layout(tuple(specs), dict(view.aliases), components, rank, world, instances, elsewhere)
    Layout.from_json(layout.to_json())  # raises an error if the layout could not be read back
    return layout, _out_file(layout, labels, checkpoint)


def chunk(shape: Dims, rank: int, world: int) -> Box | None:
    """Return a rank's box of a tensor that is split like `torch.chunk` along the first dimension, or None if empty."""
    if world == 1 or not shape or 0 in shape:
        return ((0,) * len(shape), shape) if rank == 0 else None
    step = -(-shape[0] // world)
    start, stop = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
    if start == stop:
        return None
    return (start, *(0 for _ in shape[1:])), (stop - start, *shape[1:])


def _out_file(layout: Layout, labels: list[str], checkpoint: CheckpointId) -> OutFile:
    arrangement, key = layout.arrangement, data_key(checkpoint, layout.rank)
    header = arrangement.header(metadata_of(key))
    first = len(header)
    parts: list[Literal | TensorRun] = [Literal(0, header)]
    for i in arrangement.order:
        spec = layout.tensors[i]
        if spec.nbytes:
            parts.append(TensorRun(first + arrangement.offsets[i], labels[i], (spec.at, spec.shape), spec.dtype))
    sums = ((first + b.offset, first + b.offset + b.length) for b in arrangement.chunks)
    return OutFile(key, first + arrangement.data_size, tuple(parts), tuple(sums))


async def _finish(folder: Path, checkpoint: CheckpointId, snapshots: list[RankSnapshot], sums: Sums) -> None:
    await asyncio.to_thread(shutil.rmtree, folder / "log", ignore_errors=True)  # an interrupted call may have left it
    store = open_store(folder, writable=True)
    try:
        listed = [info.key async for info in store.list(STEPS)]
        await store.delete_many([key for key in listed if not is_data(key)])
        with contextlib.suppress(FileNotFoundError):
            (folder / "FORMAT.json").unlink()
        await store.put("FORMAT.json", new_format())
        log = RunLog(store)
        await log.open()
        owner = await acquire(log, checkpoint.nonce)
        await commit(log, owner, [await _part(store, snapshot, sums) for snapshot in snapshots])
    finally:
        await store.aclose()


async def _part(store: Store, snapshot: RankSnapshot, sums: Sums) -> WrittenManifest:
    layout, arrangement = snapshot.layout, snapshot.layout.arrangement
    key = data_key(snapshot.checkpoint, layout.rank)
    header = arrangement.header(metadata_of(key))
    file = DataFile(key, len(header) + arrangement.data_size, len(header), file_digest(header))
    digests = b"".join(sums[key][len(header) + chunk.offset] for chunk in arrangement.chunks)
    table = build_table(layout, key, digests)
    return await finish_manifest(store, snapshot, table, [file], reason="exported")
