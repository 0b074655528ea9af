"""Find damage in everything that live checkpoints reference, for `ckpt repair`. Every data file is read only once.

    look      read the small files of every checkpoint, and find the ranges of data files that they reference
    survey    read these ranges and compare them with their digests

Files of checkpoints that are retired during the audit do not count as damage. A small file is restored in memory
immediately if the rest of its checkpoint, or another location, determines its content.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ckpt.core.checkpoint import chunks
from ckpt.core.checkpoint.chunks import FAR_READ, PARALLEL, READ, near
from ckpt.core.checkpoint.concurrent import all_of, of_each
from ckpt.core.checkpoint.manifests import MANY, layout_of, read_exact, read_header, table_of
from ckpt.core.format.digest import chunk_digest, file_digest
from ckpt.core.format.index import MAX_INDEX, Share, build
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import (
    MAX_FORMAT,
    MAX_JSON,
    STEPS,
    CheckpointId,
    DataFile,
    Manifest,
    index_key,
    is_data,
    manifest_key,
    new_format,
    owner,
    read_format,
)
from ckpt.core.format.table import Table
from ckpt.core.log.records import Commit
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CorruptError, FormatError, NotFoundError, StoreError, is_unreadable
from ckpt.events import log as logger
from ckpt.tools.maintain.damage import AuditedTable, AuditResult, DamagedRange, DataFileDamage, FileDamage

OnBytes = Callable[[int], None] | None
Ranges = np.ndarray[Any, Any]
VERDICTS = ("sound", "sound after this", "stays damaged", "lost")
_RANGE = np.dtype([("file", "<i4"), ("offset", "<i8"), ("stored", "<i8"), ("low", "<u8"), ("high", "<u8")])


class Audit:
    """Finds the damage of the run of `log`. `others`: logs of the same run in other locations, which may have intact
    copies. `commits`: checkpoints to audit, default all live ones."""

    def __init__(self, log: RunLog, others: Sequence[RunLog] = (), commits: Sequence[Commit] | None = None) -> None:
        self.log, self.others, self.store = log, list(others), log.store
        state = log.state
        chosen = state.commits.values() if commits is None else commits
        self.commits = sorted(chosen, key=lambda c: c.checkpoint, reverse=True)
        self.found = AuditResult(records=list(state.damaged))
        self.sheets: list[AuditedTable] = []
        self.infos: dict[str, DataFile] = {}
        self.sizes: dict[str, int] = {}
        self._names: dict[str, int] = {}  # for the name of each data file, its number in `_ranges`
        self._ranges: Ranges = np.zeros(0, _RANGE)

    # -- find damage --

    async def look(self) -> int:
        """Read everything except tensors. Return the number of bytes that `survey` will read."""
        await self._format()
        for commit in self.commits:
            await self._structure(commit)
        self.sizes = {info.key: info.size async for info in self.store.list(STEPS) if is_data(info.key)}
        await of_each([key for key in self._names if self._is_missized(key)], self._measure)
        headers = sum(self.infos[key].header_size for key in self._names if key in self.infos)
        return int(self._ranges["stored"].sum()) + headers

    def _is_missized(self, key: str) -> bool:
        there, info = self.sizes.get(key), self.infos.get(key)
        return there is None or (info is not None and there != info.size)

    async def _measure(self, key: str) -> None:
        """Query the size of a file again, because the listing may have been made while the folder was unavailable."""
        self.sizes.pop(key, None)
        with contextlib.suppress(NotFoundError):
            self.sizes[key] = (await chunks.head(self.store, key)).size

    def _ranges_of(self, table: Table) -> Ranges:
        """Return all ranges of data files that a chunk table references."""
        rows = np.flatnonzero(table.stored > 0)
        numbers = np.array([self._names.setdefault(key, len(self._names)) for key in table.files], np.int32)
        ranges = np.zeros(len(rows), _RANGE)
        digests = np.ascontiguousarray(table.stored_digest[rows]).view("<u8").reshape(-1, 2)
        ranges["file"], ranges["offset"] = numbers[table.file[rows]], table.offset[rows]
        ranges["stored"], ranges["low"], ranges["high"] = table.stored[rows], digests[:, 0], digests[:, 1]
        return ranges

    async def audit(self, on_bytes: OnBytes = None) -> AuditResult:
        """Read every range that `look` has found, a few batches at a time, and record the damage."""
        damaged: dict[str, DataFileDamage] = {}

        def of(key: str) -> DataFileDamage:
            if key not in damaged:
                unknown = DataFile(key, self.sizes.get(key, 0), 0, "")
                info = self.infos.get(key, unknown)
                damaged[key] = DataFileDamage(info, self.sizes.get(key), known=key in self.infos)
            return damaged[key]

        for key in self._names:
            info, there = self.infos.get(key), self.sizes.get(key)
            if there is None:
                of(key).problem = "is gone"
            elif info is not None and there != info.size:
                of(key).problem = f"holds {there} bytes, not {info.size}"
        jobs = iter(self._jobs())

        async def work(pool: ThreadPoolExecutor) -> None:
            for key, pieces in jobs:
                if pieces is None:
                    count = self.infos[key].header_size
                    if not await self._header_is_sound(self.infos[key]):
                        of(key).header = True
                else:
                    if bad := await self._damaged(pool, pieces):
                        of(key).pieces += bad
                    count = sum(p.stored for p in pieces)
                if on_bytes is not None:
                    on_bytes(count)

        with ThreadPoolExecutor(PARALLEL, "ckpt-repair") as pool:
            await all_of(work(pool) for _ in range(PARALLEL))
        await self._forget_retired(damaged)
        await self._name_rows(damaged)
        self.found.data_files = [damaged[key] for key in sorted(damaged)]
        for data_file in self.found.data_files:
            data_file.pieces.sort(key=lambda p: p.offset)
        return self.found

    def _jobs(self) -> Iterator[tuple[str, list[DamagedRange] | None]]:
        """Yield each header to check (as None), and batches of ranges that are close together."""
        most = FAR_READ if self.store.remote else READ
        for key in self._names:
            if key in self.infos:
                yield key, None
            for *_, group in near(((0, p.offset, p.offset + p.stored, 0, p) for p in self.named(key)), most):
                yield key, group

    def named(self, key: str) -> Iterator[DamagedRange]:
        """Yield the ranges of a data file that live checkpoints reference, in the order of the file."""
        low, high = np.searchsorted(self._ranges["file"], [self._names[key], self._names[key] + 1])
        for row in self._ranges[low:high]:
            digest = np.array([row["low"], row["high"]], "<u8").tobytes()
            yield DamagedRange(key, int(row["offset"]), int(row["stored"]), digest)

    async def _damaged(self, pool: ThreadPoolExecutor, pieces: list[DamagedRange]) -> list[DamagedRange]:
        """Return the damaged ranges of a batch. Ranges beyond the end of the file are damaged and are not read."""
        there = self.sizes.get(pieces[0].data_file, 0)
        missing = [p for p in pieces if p.offset + p.stored > there]
        pieces = [p for p in pieces if p.offset + p.stored <= there]
        if not pieces:
            return missing
        start, end = pieces[0].offset, max(p.offset + p.stored for p in pieces)
        try:
            view = await chunks.get(self.store, pieces[0].data_file, start=start, length=end - start)
        except StoreError as error:
            if is_unreadable(error):
                raise
            if len(pieces) == 1:
                return missing + pieces
            return missing + [bad for piece in pieces for bad in await self._damaged(pool, [piece])]

        def bad() -> list[DamagedRange]:
            return [p for p in pieces if chunk_digest(view[p.offset - start :][: p.stored]) != p.digest]

        return missing + await asyncio.get_running_loop().run_in_executor(pool, bad)

    async def _header_is_sound(self, info: DataFile) -> bool:
        try:
            await read_header(self.store, info)
        except (CorruptError, StoreError) as error:
            if is_unreadable(error):
                raise
            return False
        return True

    async def _forget_retired(self, damaged: dict[str, DataFileDamage]) -> None:
        """Remove damage that affects only checkpoints that were retired during the audit."""
        if not (damaged or self.found.files or self.found.unread):
            return
        live = (await self.log.refresh()).commits.keys()
        gone = {c.checkpoint for c in self.commits} - live
        if not gone:
            return
        self.sheets = [sheet for sheet in self.sheets if sheet.commit.checkpoint in live]
        self.commits = [commit for commit in self.commits if commit.checkpoint in live]
        used = {key for sheet in self.sheets for key in sheet.files}
        for key in damaged.keys() - used:
            del damaged[key]
        self.found.files = [f for f in self.found.files if owner(f.key) not in gone]
        self.found.unread = [one for one in self.found.unread if one[0] not in gone]

    async def _name_rows(self, damaged: dict[str, DataFileDamage]) -> None:
        """Find the table rows that reference each damaged range. Tables with such rows then stay in memory."""
        by_place = {(p.data_file, p.offset, p.stored): p for data_file in damaged.values() for p in data_file.pieces}
        concerned = [sheet for sheet in self.sheets if not damaged.keys().isdisjoint(sheet.files)]
        await of_each(concerned, self._keep)
        for sheet in concerned:
            if (table := sheet.content) is None:
                continue
            hit = np.array([key in damaged for key in table.files], np.bool_)
            for row in np.flatnonzero(hit[table.file]).tolist():
                place = table.files[int(table.file[row])], int(table.offset[row]), int(table.stored[row])
                if place in by_place:
                    by_place[place].rows.append((sheet, row))
        for data_file in damaged.values():
            data_file.pieces = [piece for piece in data_file.pieces if piece.rows]

    def verdicts(self) -> list[tuple[CheckpointId, str]]:
        """Return a verdict for each checkpoint, newest first: "sound", or its state after a repair: "sound after this",
        "stays damaged", or "lost" if bytes that it needs exist nowhere."""
        found: dict[CheckpointId, int] = {commit.checkpoint: 0 for commit in self.commits}

        def worse(checkpoints: Iterable[CheckpointId | None], much: int) -> None:
            for checkpoint in checkpoints:
                if checkpoint in found:
                    found[checkpoint] = max(found[checkpoint], much)

        worse([checkpoint for checkpoint, _ in self.found.unread], 3)
        for file in self.found.files:
            worse([owner(file.key)], 2 if file.raw is None else 1)
        for data_file in self.found.data_files:
            users = {sheet.commit.checkpoint for sheet in self.sheets if data_file.info.key in sheet.files}
            for piece in data_file.pieces:
                worse([sheet.commit.checkpoint for sheet, _ in piece.rows], 3 if piece.cure is None else 1)
            if data_file.header or data_file.size_is_wrong:
                right = data_file.worth and (not data_file.header or data_file.header_cure is not None)
                worse(users, 1 if right else 2)
        return [(checkpoint, VERDICTS[much]) for checkpoint, much in sorted(found.items(), reverse=True)]

    # -- small files --

    async def _format(self) -> None:
        try:
            read_format(await chunks.get(self.store, "FORMAT.json", limit=MAX_FORMAT))
        except (CorruptError, NotFoundError) as error:
            self.found.files.append(
                FileDamage(
                    "FORMAT.json",
                    None,
                    str(error),
                    new_format(self.log.root),
                    f"the log of {self.store.url}",
                    isinstance(error, NotFoundError),
                )
            )

    async def _structure(self, commit: Commit) -> None:
        """Read the index and the manifests of a checkpoint, some ranks at a time, and record its chunk tables."""
        key, many = index_key(commit.checkpoint), len(commit.manifests) > MANY
        ((raw, damage),) = await self._files(commit, [(key, commit.index, MAX_INDEX)])
        sheets, columns, shares = list[AuditedTable](), [self._ranges], list[Share]()
        for start in range(0, len(commit.manifests), MANY):
            wanted = commit.manifests[start : start + MANY]
            for row, manifest, table in await self._ranks(commit, wanted):
                if raw is None:
                    shares.append(
                        Share(manifest.rank, manifest.world, manifest.layout, manifest.values, table.compact())
                    )
                sheet = AuditedTable(commit, table.files, row)
                if not many:
                    sheet.content, sheet.layout = table, _layout(manifest, table)
                sheets.append(sheet)
                columns.append(self._ranges_of(table))
        self.sheets += sheets
        if len(sheets) < len(commit.manifests):
            self.found.unread.append((commit.checkpoint, "some of its manifests are lost"))
        elif damage is not None and raw is None and (made := _index_of(shares, commit)) is not None:
            damage.raw, damage.source = made, "the manifests of its ranks"
        self._ranges = np.unique(np.concatenate(columns))

    async def _ranks(
        self, commit: Commit, rows: Sequence[tuple[int, str]]
    ) -> list[tuple[tuple[int, str], Manifest, Table]]:
        """Return the manifests and chunk tables of some ranks, as far as intact copies exist."""
        keys = [(manifest_key(commit.checkpoint, rank), digest, MAX_JSON) for rank, digest in rows]
        found = list[tuple[tuple[int, str], Manifest, Table]]()
        for row, (key, *_), (raw, _) in zip(rows, keys, await self._files(commit, keys), strict=True):
            if raw is not None:
                try:
                    manifest = Manifest.from_bytes(raw, key)
                    found.append((row, manifest, table_of(manifest)))
                except (CorruptError, FormatError) as error:
                    self.found.unread.append((commit.checkpoint, str(error)))
                else:
                    self.infos.update({data_file.key: data_file for data_file in manifest.files})
        return found

    async def load(self, sheet: AuditedTable) -> Table | None:
        """Return the chunk table of a sheet. Read it again if it is not in memory. Return None if it is lost by now."""
        if sheet.content is None and sheet.manifest is not None:
            manifest = await self._manifest_of(sheet.commit, sheet.manifest)
            return None if manifest is None else table_of(manifest)
        return sheet.content

    async def _keep(self, sheet: AuditedTable) -> None:
        """Keep the chunk table and the layout of a sheet in memory from now on."""
        sheet.content = await self.load(sheet)
        if sheet.layout is None and sheet.manifest is not None:
            manifest = await self._manifest_of(sheet.commit, sheet.manifest)
            sheet.layout = None if manifest is None else _layout(manifest, table_of(manifest))

    async def _manifest_of(self, commit: Commit, row: tuple[int, str]) -> Manifest | None:
        key = manifest_key(commit.checkpoint, row[0])
        raw, _ = await self._file(commit, key, row[1], MAX_JSON)
        return None if raw is None else Manifest.from_bytes(raw, key)

    async def _files(
        self, commit: Commit, wanted: Sequence[tuple[str, str, int]]
    ) -> list[tuple[bytes | None, FileDamage | None]]:
        """Read small files. `wanted`: key, digest and maximum size of each file."""
        found = await of_each(wanted, lambda one: self._file(commit, *one))
        self.found.files += [damage for _, damage in found if damage is not None]
        return found

    async def _file(self, commit: Commit, key: str, digest: str, limit: int) -> tuple[bytes | None, FileDamage | None]:
        """Return the correct content, from this or another location, and the damage of the file in this location."""
        damage: FileDamage | None = None
        for store in (self.store, *(other.store for other in self.others)):
            try:
                raw = bytes(await read_exact(store, key, digest, limit))
            except (CorruptError, StoreError) as error:
                if is_unreadable(error):
                    raise
                absent = isinstance(error, NotFoundError)
                problem = "is gone" if absent else str(error).removeprefix(f"{key} ")
                damage = damage or FileDamage(key, commit.step, problem, absent=absent)
                continue
            if damage is not None:
                damage.raw, damage.source = raw, store.url
            return raw, damage
        return None, damage


def _index_of(shares: Sequence[Share], commit: Commit) -> bytes | None:
    """Build the index from these manifests. Return None if its digest is not the committed one."""
    try:
        made = build(shares, partial=len(shares) < commit.world).to_bytes()
    except CorruptError:
        return None
    return made if file_digest(made) == commit.index else None


def _layout(manifest: Manifest, table: Table) -> Layout | None:
    try:
        return layout_of(manifest, table)
    except CorruptError as error:
        logger.warning("%s", error)
        return None
