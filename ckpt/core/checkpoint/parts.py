"""Read the parts and the index of a checkpoint. Each must match its digest, else CorruptError is raised."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ckpt.core.checkpoint import steady
from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.checkpoint.write import WrittenPart
from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import (
    MAX_JSON,
    Attempt,
    PackInfo,
    Part,
    index_key,
    part_key,
    rank_and_try,
    unpress,
)
from ckpt.core.format.rank_index import MAX_DIRECTORY, Directory, is_directory
from ckpt.core.format.slim import Slim
from ckpt.core.format.table import MAX_TABLE, Table, empty
from ckpt.core.log.records import Commit
from ckpt.errors import CorruptError, FormatError, NotFoundError, TruncatedError
from ckpt.events import log as logger
from ckpt.store import Store

FEW = 4  # packs, each of which is asked for by itself
AT_ONCE = 16  # parts
NO_SIZES: Mapping[str, int] = MappingProxyType({})
MANY = 64  # ranks: what their parts say alike is kept once


async def read_exact(store: Store, key: str, digest: str, limit: int) -> memoryview:
    """A small file. CorruptError unless it is the one with this digest."""
    raw = await steady.get(store, key, limit=limit)
    if file_digest(raw) != digest:
        raise CorruptError(f"{key} is damaged: its digest does not match")
    return raw


async def read_header(store: Store, pack: PackInfo) -> memoryview:
    head = await steady.get(store, pack.key, start=0, length=pack.header_size)
    if file_digest(head) != pack.header:
        raise CorruptError(f"{pack.key} is damaged: its header does not match its digest")
    return head


async def load_part(
    store: Store,
    attempt: Attempt,
    rank: int,
    number: int,
    *,
    expected: str | None = None,
    sizes: Mapping[str, int] = NO_SIZES,
    slim: Slim | None = None,
) -> WrittenPart:
    """Read a part, check it against its digest, and its packs against their sizes.

    sizes: of packs, as far as they are known.
    slim: keep only what a directory needs.
    """
    layout_of = unpress if slim is None else slim.layout
    part, digest = await read_part(store, attempt, rank, number, expected=expected, layout_of=layout_of)
    await check_sizes(store, part, sizes)
    table = table_of(part)
    if slim is not None:
        return WrittenPart(slim.part(part), digest, empty(), slim.pieces(table))
    return WrittenPart(part, digest, table)


async def load_parts(store: Store, attempt: Attempt, wanted: Sequence[tuple[int, int, str]]) -> list[WrittenPart]:
    """Those of all ranks, each by its rank, try and digest. Of very many, only what a directory of them needs."""
    sizes = await sizes_of_many(store, attempt, len(wanted))
    slim = Slim() if len(wanted) > MANY else None

    async def load(one: tuple[int, int, str]) -> WrittenPart:
        rank, number, digest = one
        return await load_part(store, attempt, rank, number, expected=digest, sizes=sizes, slim=slim)

    return await of_each(wanted, load)


async def read_part(
    store: Store,
    attempt: Attempt,
    rank: int,
    number: int,
    *,
    expected: str | None = None,
    layout_of: Callable[[str], dict[str, Any]] = unpress,
) -> tuple[Part, str]:
    """Read a part. Return it and its digest. `layout_of`: see `Part.from_bytes`."""
    raw = await steady.get(store, part_key(attempt, rank, number), limit=MAX_JSON)
    digest = file_digest(raw)
    what = part_key(attempt, rank, number)
    if expected is not None and digest != expected:
        raise CorruptError(f"{what} is damaged: its digest is not the committed one")
    part = Part.from_bytes(raw, what, layout_of)
    if (part.attempt, part.rank, part.number) != (str(attempt), rank, number):
        raise CorruptError(f"{what} says it is a part of {part.attempt}")
    return part, digest


def table_of(part: Part) -> Table:
    """Return the chunk table of a part. CorruptError if it is damaged, or names packs that the part does not."""
    what = f"the table of {part_key(Attempt.parse(part.attempt), part.rank, part.number)}"
    table = Table.from_bytes(part.table, what)
    if not {pack.key for pack in part.packs}.issuperset(table.packs):
        raise CorruptError(f"{what} names packs that its part does not")
    return table


async def check_sizes(store: Store, part: Part, known: Mapping[str, int] = NO_SIZES) -> None:
    """Raise CorruptError unless each pack of a part has its size, NotFoundError if one is missing."""
    there = await _sizes(store, part, known)
    for pack in part.packs:
        if there[pack.key] != pack.size:
            raise CorruptError(f"{pack.key} holds {there[pack.key]} bytes, not {pack.size}")


async def sizes_of_many(store: Store, attempt: Attempt, ranks: int) -> Mapping[str, int]:
    """Of all packs of an attempt, if so many parts are to be read: a listing says as much as thousands of questions."""
    if ranks <= MANY:
        return NO_SIZES
    return {info.key: info.size async for info in store.list("packs/") if info.key.startswith(f"packs/{attempt}.")}


async def _sizes(store: Store, part: Part, known: Mapping[str, int]) -> dict[str, int]:
    """Of all packs of a part. NotFoundError if one is not there."""
    found = {pack.key: known[pack.key] for pack in part.packs if pack.key in known}
    keys = [pack.key for pack in part.packs if pack.key not in found]
    if store.remote and len(keys) > FEW:  # an answer to a listing says as much as many to single questions
        wanted = set(keys)
        found |= {info.key: info.size async for info in store.list("packs/") if info.key in wanted}
    infos = await of_each([key for key in keys if key not in found], functools.partial(steady.head, store))
    return found | {info.key: info.size for info in infos}


async def load_index(store: Store, commit: Commit) -> Table | Directory:
    """All tables as one, or the directory of them. CorruptError or NotFoundError if it is damaged or gone."""
    key = index_key(commit.attempt, commit.index)
    raw = await read_exact(store, key, commit.index, max(MAX_TABLE, MAX_DIRECTORY))
    return Directory.from_bytes(raw, key, commit.world) if is_directory(raw) else Table.from_bytes(raw, key)


async def load_tables(store: Store, commit: Commit, ranks: Sequence[int]) -> dict[int, Table]:
    """Read the tables of some ranks, out of their parts."""
    return {part.rank: table_of(part) for part in await _parts_of(store, commit, ranks)}


def no_layout(text: str) -> dict[str, Any]:
    """In place of one that nobody wants: to read thousands of them takes long."""
    return {}


async def load_values(store: Store, commit: Commit, ranks: Sequence[int]) -> dict[int, list[Any]]:
    """Read the plain values of some ranks, out of their parts."""
    return {part.rank: part.values for part in await _parts_of(store, commit, ranks)}


async def _parts_of(store: Store, commit: Commit, ranks: Sequence[int]) -> list[Part]:
    known = {rank: (number, digest) for rank, number, digest in commit.parts}

    async def one(rank: int) -> Part:
        number, digest = known[rank]
        part, _ = await read_part(store, commit.attempt, rank, number, expected=digest, layout_of=no_layout)
        if part.world != commit.world:
            raise CorruptError(f"the part of rank {rank} at step {commit.step} is of another number of ranks")
        return part

    return await of_each(ranks, one)


# -- of attempts that no record names --


async def stored_part(store: Store, attempt: Attempt, rank: int) -> WrittenPart | None:
    """What a rank has stored of an attempt, if it is sound."""
    keys = [info.key async for info in store.list("parts/") if info.key.startswith(f"parts/{attempt}.{rank}.")]
    return (await sound_parts(store, attempt, keys)).get(rank)


async def sound_parts(
    store: Store, attempt: Attempt, keys: list[str], own: WrittenPart | None = None, *, partial: bool = False
) -> dict[int, WrittenPart]:
    """The parts of an attempt that are sound, by rank: of each the highest try. `own`: what needs no reading.

    Of many, only what a directory of them needs; not if `partial`, when those of some ranks are to be told as they are.
    StoreError if the store failed, so that nobody can say.
    """
    newest: dict[int, WrittenPart] = {} if own is None else {own.part.rank: own}
    found: dict[int, list[int]] = {}
    for rank, number in tries(keys):
        if rank not in newest:
            found.setdefault(rank, []).append(number)
    slim = Slim() if len(newest) + len(found) > MANY and not partial else None
    sizes = await sizes_of_many(store, attempt, len(found))
    read = await of_each(list(found.items()), functools.partial(_newest, store, attempt, sizes, slim), AT_ONCE)
    return newest | {written.part.rank: written for written in read if written is not None}


async def _newest(
    store: Store, attempt: Attempt, sizes: Mapping[str, int], slim: Slim | None, there: tuple[int, Iterable[int]]
) -> WrittenPart | None:
    """The first of these tries of a rank that is sound."""
    rank, numbers = there
    for number in numbers:
        try:
            try:
                return await load_part(store, attempt, rank, number, sizes=sizes, slim=slim)
            except CorruptError:
                if not store.remote:
                    raise
                return await load_part(
                    store, attempt, rank, number, sizes=sizes, slim=slim
                )  # perhaps damaged on its way
        except (CorruptError, FormatError, NotFoundError, TruncatedError) as error:
            logger.warning("attempt %s, rank %d, try %d does not count: %s", attempt, rank, number, error)
    return None


def tries(keys: Iterable[str]) -> list[tuple[int, int]]:
    """(rank, try) of every part among some files, the highest first; what is called otherwise is nobody's."""
    found = []
    for key in keys:
        if key.startswith("parts/") and key.endswith(".json"):
            with contextlib.suppress(CorruptError):
                found.append(rank_and_try(key))
    return sorted(found, reverse=True)
