"""Reads the manifests and the index of a checkpoint. Raises CorruptError if a file does not match its digest."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ckpt.core.checkpoint import chunks
from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.checkpoint.incremental import WrittenManifest as WrittenManifest
from ckpt.core.format.digest import file_digest
from ckpt.core.format.index import MAX_INDEX, Index
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import (
    MAX_JSON,
    CheckpointId,
    DataFile,
    Manifest,
    folder_of,
    index_key,
    is_data,
    is_manifest,
    manifest_key,
    rank_of,
)
from ckpt.core.format.table import SavedShards, Table
from ckpt.core.log.records import Commit
from ckpt.errors import CorruptError, FormatError, NotFoundError, TruncatedError
from ckpt.events import log as logger
from ckpt.store import Store

FEW = 4  # request the sizes of up to this many data files one by one; for more files, list the folder
AT_ONCE = 16  # number of manifests to read concurrently
NO_SIZES: Mapping[str, int] = MappingProxyType({})
MANY = 64  # above this number of ranks, read manifests in batches, and keep only the needed parts


async def read_exact(store: Store, key: str, digest: str, limit: int) -> memoryview:
    """Read a small file. Raise CorruptError if it does not have this digest."""
    raw = await chunks.get(store, key, limit=limit)
    if file_digest(raw) != digest:
        raise CorruptError(f"{key} is damaged: its digest does not match")
    return raw


async def read_header(store: Store, file: DataFile) -> memoryview:
    head = await chunks.get(store, file.key, start=0, length=file.header_size)
    if file_digest(head) != file.header:
        raise CorruptError(f"{file.key} is damaged: its header does not match its digest")
    return head


async def load_manifest(
    store: Store,
    checkpoint: CheckpointId,
    rank: int,
    *,
    expected: str | None = None,
    sizes: Mapping[str, int] = NO_SIZES,
    compact: bool = False,
) -> WrittenManifest:
    """Read one rank's manifest. Verify its digest and the sizes of its data files.

    sizes: known sizes of data files, by key
    compact: True to keep only what the index needs
    """
    manifest, digest = await read_manifest(store, checkpoint, rank, expected=expected)
    await check_sizes(store, manifest, sizes)
    table = table_of(manifest)
    if compact:
        return WrittenManifest(replace(manifest, files=[], table=b""), digest, table.compact())
    return WrittenManifest(manifest, digest, table)


async def load_manifests(
    store: Store, checkpoint: CheckpointId, wanted: Sequence[tuple[int, str]]
) -> list[WrittenManifest]:
    """Read manifests, given (rank, digest) of each. With many ranks, keep only the parts that the index needs."""
    sizes, many = await sizes_of_many(store, checkpoint, len(wanted)), len(wanted) > MANY

    async def load(one: tuple[int, str]) -> WrittenManifest:
        return await load_manifest(store, checkpoint, one[0], expected=one[1], sizes=sizes, compact=many)

    return await of_each(wanted, load)


async def read_manifest(
    store: Store, checkpoint: CheckpointId, rank: int, *, expected: str | None = None
) -> tuple[Manifest, str]:
    """Read one rank's manifest. Return the manifest and its digest."""
    what = manifest_key(checkpoint, rank)
    raw = await chunks.get(store, what, limit=MAX_JSON)
    digest = file_digest(raw)
    if expected is not None and digest != expected:
        raise CorruptError(f"{what} is damaged: its digest differs from the digest in the log record")
    manifest = Manifest.from_bytes(raw, what)
    if (manifest.checkpoint, manifest.rank) != (str(checkpoint), rank):
        raise CorruptError(f"{what} belongs to rank {manifest.rank} of checkpoint {manifest.checkpoint}")
    return manifest, digest


def table_of(manifest: Manifest) -> Table:
    """Return the chunk table of a manifest. Raise CorruptError if it is damaged or points outside its data files."""
    what = f"the table of {manifest_key(CheckpointId.parse(manifest.checkpoint), manifest.rank)}"
    table, sizes = Table.from_bytes(manifest.table, what), {file.key: file.size for file in manifest.files}
    if not sizes.keys() >= set(table.files):
        raise CorruptError(f"{what} names data files that its manifest does not list")
    ends = np.zeros(len(table.files), np.int64)
    np.maximum.at(ends, table.file, table.offset + table.stored)
    for key, end in zip(table.files, ends.tolist(), strict=True):
        if end > sizes[key]:
            raise CorruptError(f"{what} points past the end of {key}")
    return table


def layout_of(manifest: Manifest, table: Table, known: Layout | None = None) -> Layout:
    """Return the layout of a manifest. Raise CorruptError if it is damaged.

    known: a layout to return instead of a new one if both are equal.
    """
    same = known is not None and (known.rank, known.world, known.shared) == (
        manifest.rank,
        manifest.world,
        manifest.layout,
    )
    if known is not None and same and SavedShards.of_layout(known).same(table.columns):
        return known
    return Layout.of_manifest(manifest.layout, manifest.rank, manifest.world, table.columns.specs())


async def check_sizes(store: Store, manifest: Manifest, known: Mapping[str, int] = NO_SIZES) -> None:
    """Raise CorruptError if a data file of a manifest has a wrong size, and NotFoundError if one is missing."""
    there = await _sizes(store, manifest, known)
    for file in manifest.files:
        if there[file.key] != file.size:
            raise CorruptError(f"{file.key} holds {there[file.key]} bytes, not {file.size}")


async def sizes_of_many(store: Store, checkpoint: CheckpointId, ranks: int) -> Mapping[str, int]:
    """Return the sizes of a checkpoint's data files if it has many ranks, else {}. One listing then replaces thousands
    of requests."""
    if ranks <= MANY:
        return NO_SIZES
    return {info.key: info.size async for info in store.list(folder_of(checkpoint)) if is_data(info.key)}


async def _sizes(store: Store, manifest: Manifest, known: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of all data files of a manifest. Raise NotFoundError if one is missing."""
    found = {file.key: known[file.key] for file in manifest.files if file.key in known}
    keys = [file.key for file in manifest.files if file.key not in found]
    if store.remote and len(keys) > FEW:  # a listing replaces many requests
        for folder in sorted({key[: key.rfind("/") + 1] for key in keys}):
            found |= {info.key: info.size async for info in store.list(folder) if info.key in keys}
    infos = await of_each([key for key in keys if key not in found], functools.partial(chunks.head, store))
    return found | {info.key: info.size for info in infos}


async def load_index(store: Store, commit: Commit) -> Index:
    """Read the index. Raise CorruptError if it is damaged, and NotFoundError if it is missing."""
    key = index_key(commit.checkpoint)
    raw = await read_exact(store, key, commit.index, MAX_INDEX)
    return Index.from_bytes(raw, key, commit.world, len(commit.manifests))


async def load_ranks(store: Store, commit: Commit, ranks: Sequence[int]) -> dict[int, tuple[list[Any], Table]]:
    """Return the plain values and the chunk table of each of some ranks."""
    known = dict(commit.manifests)

    async def one(rank: int) -> tuple[list[Any], Table]:
        manifest, _ = await read_manifest(store, commit.checkpoint, rank, expected=known[rank])
        if manifest.world != commit.world:
            raise CorruptError(f"the manifest of rank {rank} names {manifest.world} ranks, not {commit.world}")
        return manifest.values, table_of(manifest)

    return dict(zip(ranks, await of_each(ranks, one), strict=True))


# -- manifests of checkpoints without a log record --


async def stored_manifest(store: Store, checkpoint: CheckpointId, rank: int) -> WrittenManifest | None:
    """Return one rank's stored manifest of a checkpoint, or None if it is missing or damaged."""
    key = manifest_key(checkpoint, rank)
    keys = [info.key async for info in store.list(folder_of(checkpoint)) if info.key == key]
    return (await intact_manifests(store, checkpoint, keys)).get(rank)


async def intact_manifests(
    store: Store, checkpoint: CheckpointId, keys: Iterable[str], own: WrittenManifest | None = None
) -> dict[int, WrittenManifest]:
    """Read the manifests among these keys of a checkpoint. Return the intact ones, by rank.

    With many ranks, keep only the parts that the index needs. Raise StoreError if the store fails.

    own: a manifest that the caller has, which is not read again
    """
    found: dict[int, WrittenManifest] = {} if own is None else {own.manifest.rank: own}
    wanted = sorted(ranks_in(keys) - found.keys())
    many = len(found) + len(wanted) > MANY
    sizes = await sizes_of_many(store, checkpoint, len(wanted))
    read = await of_each(wanted, functools.partial(_sound, store, checkpoint, sizes, many), AT_ONCE)
    return found | {written.manifest.rank: written for written in read if written is not None}


async def _sound(
    store: Store, checkpoint: CheckpointId, sizes: Mapping[str, int], compact: bool, rank: int
) -> WrittenManifest | None:
    for again in (store.remote, False):  # try twice, because bytes from a bucket may be damaged in transit
        try:
            return await load_manifest(store, checkpoint, rank, sizes=sizes, compact=compact)
        except (CorruptError, FormatError, NotFoundError, TruncatedError) as error:
            if not (again and isinstance(error, CorruptError)):
                logger.warning("checkpoint %s: ignored the manifest of rank %d: %s", checkpoint, rank, error)
                return None
    return None


def ranks_in(keys: Iterable[str]) -> set[int]:
    """Return the ranks whose manifests are among these keys."""
    return {rank for key in keys if is_manifest(key) and (rank := rank_of(key)) is not None}
