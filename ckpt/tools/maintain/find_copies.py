"""Find intact copies of damaged chunks, equal bit for bit, for `ckpt repair`.

A copy counts only after it was read and its digest compared. The search order is: the same range of the same file in
another location; then any intact chunk with the same content, either as it is stored or encoded again in the same way.
The header of a data file is read from another location, or built again by the code that writes headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

from ckpt.core.checkpoint import chunks, read, write
from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.checkpoint.manifests import MANY, read_header
from ckpt.core.format.codec import DELTA, RAW, word_of
from ckpt.core.format.codec import encode as encoded_as
from ckpt.core.format.digest import chunk_digest, file_digest
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import CheckpointId, DataFile, metadata_of, rank_of
from ckpt.core.format.table import Content, Table
from ckpt.errors import CorruptError, FormatError, NotFoundError, StoreError, is_unreadable
from ckpt.events import log as logger
from ckpt.store import Store
from ckpt.tools.maintain.audit import Audit
from ckpt.tools.maintain.damage import AuditedTable, DamagedRange, Get, SoundCopy

TRIES = 8  # maximum chunks of the same content to try
WORDS = (4, 2, 8, 1)  # word sizes in bytes to try for chunks of tensors that no longer exist


class CopyFinder:
    """Finds intact copies of damaged chunks."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self._absent: set[tuple[str, str]] = set()  # (location, data file) that are known not to exist
        self._rows: dict[Content, list[tuple[Store, Table, int]]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def _look(self) -> None:
        """Find in all tiers where the needed contents are stored. This is done once, and only if needed."""
        audit = self.audit
        wanted: set[Content] = set()
        for data_file in audit.found.data_files:
            for piece in data_file.pieces:
                for sheet, row in piece.rows[:1]:
                    base = int(sheet.table.base[row])
                    wanted |= {sheet.table.content(one) for one in (row, base) if one >= 0}
        bad = {(piece.data_file, piece.offset) for data_file in audit.found.data_files for piece in data_file.pieces}
        for start in range(0, len(audit.sheets), MANY):
            for table in await of_each(audit.sheets[start : start + MANY], audit.load):
                if table is not None:
                    self._note(audit.store, table, wanted, bad)
        for other in (audit.log, *audit.others):
            known = {c.checkpoint for c in audit.commits} if other is audit.log else set[CheckpointId]()
            for checkpoint in sorted(other.state.commits.keys() - known, reverse=True):
                try:
                    async for table in read.tables_of(other.store, other.state.commits[checkpoint]):
                        self._note(other.store, table, wanted, bad if other is audit.log else set())
                except (CorruptError, FormatError, StoreError) as error:
                    if is_unreadable(error):
                        raise
                    logger.warning("cannot repair from step %d in %s: %s", checkpoint.step, other.store.url, error)

    def _note(self, store: Store, table: Table, wanted: set[Content], bad: set[tuple[str, int]]) -> None:
        for row, one in enumerate(zip(map(bytes, table.digest), table.length.tolist(), strict=True)):
            if one in wanted and table.place(row) not in bad:
                self._rows.setdefault(one, []).append((store, table, row))

    async def cure(self, piece: DamagedRange) -> SoundCopy | None:
        """Return an intact copy of a damaged chunk, or None with the reason in `piece.why`."""
        for other in self.audit.others:
            get = partial(self._same_range, other.store, piece)
            if await _works(get):
                return SoundCopy(other.store.url, "the same bytes", get)
        self._looking = self._looking or asyncio.ensure_future(self._look())
        await asyncio.shield(self._looking)
        sheet, row = piece.rows[0]
        table, codec = sheet.table, int(sheet.table.codec[row])
        piece.why = "no other copy of its content exists"
        for store, theirs, r in self._rows.get(table.content(row), ())[:TRIES]:
            have = partial(_chunk, store, theirs, r)
            if not await _works(have):
                piece.why = "every other copy of its content is damaged too"
                continue
            if codec == RAW:
                return SoundCopy(store.url, "the same content", have)
            for word in _words(table, row):
                make = partial(self._encoded, piece, table, row, word, have)
                if await _works(make):
                    return SoundCopy(store.url, "its content, encoded again", make)
            piece.why = "its content exists, but encoding it again gives different bytes"
        return None

    async def _same_range(self, store: Store, piece: DamagedRange) -> memoryview:
        location = store.url, piece.data_file
        if location in self._absent:
            raise NotFoundError(f"{piece.data_file} is not in {store.url}")
        try:
            view = await chunks.get(store, piece.data_file, start=piece.offset, length=piece.stored)
        except NotFoundError:
            self._absent.add(location)
            raise
        return _matching(view, piece)

    async def _base(self, content: Content) -> bytes:
        """Return the bytes of a delta's base. Raise CorruptError if no intact copy of the base exists."""
        for store, table, row in self._rows.get(content, ())[:TRIES]:
            try:
                return await _chunk(store, table, row)
            except (CorruptError, StoreError) as error:
                if is_unreadable(error):
                    raise
        raise CorruptError("no intact copy of its base exists")

    async def _encoded(
        self, piece: DamagedRange, table: Table, row: int, word: int, have: Callable[[], Awaitable[bytes]]
    ) -> memoryview:
        codec, base = int(table.codec[row]), None
        if codec == DELTA:
            base = await self._base(table.content(int(table.base[row])))
        plain = await have()
        if len(plain) % word:
            raise CorruptError("its length is not a multiple of the word size")
        return _matching(memoryview(await asyncio.to_thread(encoded_as, codec, plain, word, base)), piece)

    # -- headers --

    async def header(self, info: DataFile) -> SoundCopy | None:
        for other in self.audit.others:
            get = partial(read_header, other.store, info)
            if await _works(get):
                return SoundCopy(other.store.url, "the same bytes", get)
        tiles, rank = self._tiles(info), rank_of(info.key)
        layouts = {s.layout.digest: s.layout for s in self.audit.sheets if s.layout is not None}
        for layout in layouts.values():
            if layout.rank != rank:
                continue
            for make in (partial(_raw_header, info, layout), partial(_chunks_header, info, layout, tiles)):
                header = make()
                if header is not None and file_digest(header) == info.header:
                    return SoundCopy(self.audit.store.url, "made again", partial(_given, header))
        return None

    def _tiles(self, info: DataFile) -> dict[int, tuple[AuditedTable, int]]:
        """Return for each range of a data file a table row, or {} if the ranges leave gaps. Only tables of ranks that
        wrote the file count."""
        rank, rows = rank_of(info.key), dict[int, tuple[AuditedTable, int]]()
        for sheet in self.audit.sheets:
            table = sheet.content  # with many ranks, only tables that reference a damaged file are in memory
            if table is None or sheet.layout is None or sheet.layout.rank != rank or info.key not in table.files:
                continue
            in_file = (table.file[: table.owned] == table.files.index(info.key)) & (table.stored[: table.owned] > 0)
            for row in np.flatnonzero(in_file).tolist():
                rows.setdefault(int(table.offset[row]), (sheet, row))
        at = info.header_size
        for offset in sorted(rows):
            sheet, row = rows[offset]
            if offset != at:
                return {}
            at += int(sheet.table.stored[row])
        return dict(sorted(rows.items())) if at == info.size else {}


async def _chunk(store: Store, table: Table, row: int) -> bytes:
    """Return the decoded bytes of a row. Raise CorruptError or StoreError unless the chunk and its base are intact."""
    chunks: list[bytes] = []

    def receive(chunk: int, data: memoryview) -> None:
        chunks.append(bytes(data))

    await read.fetch(store, table, read.plan_reads(table, [row], far=store.remote), receive)
    if not chunks:
        raise CorruptError(f"{table.name_of(row)} cannot be read")
    return chunks[0]


def _words(table: Table, row: int) -> list[int]:
    """Return the word sizes by which a chunk may have been split into byte planes, most likely first."""
    shards = [table.shards[shard] for shard in table.users(row)]
    return list(dict.fromkeys([*(word_of(shard.dtype) for shard in shards), *WORDS]))


def _matching(view: memoryview, piece: DamagedRange) -> memoryview:
    if len(view) != piece.stored or chunk_digest(view) != piece.digest:
        raise CorruptError(f"these are not the bytes at {piece.offset} of {piece.data_file}")
    return view


async def _works(get: Get) -> bool:
    """Return True if the copy is intact. Raise StoreError if the store cannot be read now."""
    try:
        await get()
    except (CorruptError, FormatError, StoreError) as error:
        if is_unreadable(error):
            raise
        return False
    return True


async def _given(raw: bytes) -> bytes:
    return raw


def _raw_header(info: DataFile, layout: Layout) -> bytes:
    return layout.arrangement.header(metadata_of(info.key))


def _chunks_header(info: DataFile, layout: Layout, tiles: dict[int, tuple[AuditedTable, int]]) -> bytes | None:
    """Build the header of a data file again, with the code that writes headers. `tiles`: result of `_tiles`."""
    if not tiles or any(row >= len(layout.arrangement.chunks) for _, row in tiles.values()):
        return None
    zeros = memoryview(bytes(max(int(sheet.table.stored[row]) for sheet, row in tiles.values())))
    items = [
        write.Encoded(row, int(sheet.table.codec[row]), zeros[: int(sheet.table.stored[row])])
        for sheet, row in tiles.values()
    ]
    return write.data_file_header(layout, items, metadata_of(info.key))
