"""Repair damaged files of a run, bit for bit, from intact copies in any location.

    look, survey   find the files that live checkpoints need, and their damage   (`ckpt.tools.maintain.audit`)
    seek           find an intact copy of each damaged chunk                     (`ckpt.tools.maintain.find_copies`)
    mend           write the complete files again under their names

A chunk is used only if its digest is the one in the checkpoint. A data file is replaced completely by a new, verified
one, and the old file stays until the new one is complete. Bytes without an intact copy are copied as they are. A file
is not touched if some of its bytes exist in no location. A running job is not disturbed. A repair may be interrupted at
any moment and repeated. Nothing is deleted. Log records are not repaired, because no other copy of them exists.

A file that cannot be read now may be intact. In that case `look`, `survey` and `seek` raise StoreError before a write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt.core.checkpoint import chunks
from ckpt.core.checkpoint.concurrent import all_of
from ckpt.core.checkpoint.manifests import read_header
from ckpt.core.checkpoint.write import CHUNK, page_aligned
from ckpt.core.format.digest import RangeHasher
from ckpt.core.format.manifest import DataFile, is_data, owner
from ckpt.errors import CorruptError, ExistsError, StoreError, is_unreadable
from ckpt.failpoints import point
from ckpt.store import Store
from ckpt.tools.maintain.audit import Audit, OnBytes
from ckpt.tools.maintain.damage import DataFileDamage, SoundCopy
from ckpt.tools.maintain.find_copies import CopyFinder

CURES = 8  # number of chunks that are read at the same time


@dataclass
class Repaired:
    """The result of a repair. `left`: files that the run no longer needs. `failed`: (name, reason) of each."""

    files: list[str] = field(default_factory=list)
    data_files: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


class Repair(Audit):
    """An audit that can also repair the damage."""

    async def seek(self, on_bytes: OnBytes = None) -> None:
        """Find an intact copy of every damaged chunk and header. Each copy is read once to verify it."""
        if not self.found.data_files:
            return
        seeker = CopyFinder(self)
        pieces = iter([piece for data_file in self.found.data_files for piece in data_file.pieces if data_file.known])

        async def work() -> None:
            for piece in pieces:
                piece.cure = await seeker.cure(piece)
                if on_bytes is not None:
                    on_bytes(piece.stored)

        await all_of(work() for _ in range(CURES))
        for data_file in self.found.data_files:
            if not data_file.known:
                for piece in data_file.pieces:
                    piece.why = "the manifest with the size of its file is lost"
                continue
            if data_file.header:
                data_file.header_cure = await seeker.header(data_file.info)
            data_file.unavailable = await self._unavailable(data_file)

    async def _unavailable(self, data_file: DataFileDamage) -> int:
        """Return how many bytes of a data file no location has. Only bytes of a missing end that has no copy count."""
        cured = [(p.offset, p.offset + p.stored) for p in data_file.cured]
        if data_file.header_cure is not None:
            cured.append((0, data_file.info.header_size))
        lacking = without([(data_file.there or 0, data_file.info.size)], cured)
        if lacking and await alike(self, data_file.info):  # it has all bytes that are not known to be lost
            lacking = without(lacking, without(lacking, [(p.offset, p.offset + p.stored) for p in data_file.lost]))
        return sum(end - start for start, end in lacking)

    async def mend(self, on_bytes: OnBytes = None) -> Repaired:
        """Write the repairable files again. If a file fails, its old version stays, and the others continue."""
        done = Repaired()
        for file in self.found.files:
            if file.raw is None:
                continue
            if not await self._is_live(file.key):
                done.left.append(file.key)
                continue
            try:
                await self.store.put(file.key, file.raw, create=file.absent)
                done.files.append(file.key)
            except ExistsError:
                done.left.append(file.key)  # a job has written the file again in the meantime
            except StoreError as error:
                done.failed.append((file.key, str(error)))
        for data_file in self.found.data_files:
            if not data_file.worth:
                continue
            key = data_file.info.key
            if not await self._is_live(key):
                done.left.append(key)
                continue
            try:
                await _Rewrite(self, data_file, await alike(self, data_file.info)).run(on_bytes)
                done.data_files.append(key)
            except (CorruptError, StoreError) as error:
                done.failed.append((key, str(error)))
        return done

    async def _is_live(self, key: str) -> bool:
        """Return True if a live checkpoint needs this file. A running job may have deleted its checkpoint."""
        live = (await self.log.refresh()).commits
        if not is_data(key):
            checkpoint = owner(key)
            return checkpoint is None or checkpoint in live
        return any(sheet.commit.checkpoint in live for sheet in self.sheets if key in sheet.files)


async def alike(audit: Audit, info: DataFile) -> list[Store]:
    """Return the stores of other locations that have this file with the same size and header."""
    found = []
    for other in audit.others:
        try:
            same_size = (await chunks.head(other.store, info.key)).size == info.size
            await read_header(other.store, info)
        except (CorruptError, StoreError) as error:
            if is_unreadable(error):
                raise
            continue
        if same_size:
            found.append(other.store)
    return found


class _Rewrite:
    """Streams the new version of one data file. Verifies all ranges that live checkpoints reference."""

    def __init__(self, repair: Repair, data_file: DataFileDamage, alike: list[Store]) -> None:
        self.store, self.file, self.info, self._alike = repair.store, data_file, data_file.info, alike
        gone = {(p.offset, p.offset + p.stored) for p in data_file.lost}  # lost ranges, which are not verified
        self._digests: dict[tuple[int, int], set[bytes]] = {}
        for piece in repair.named(data_file.info.key):
            self._digests.setdefault((piece.offset, piece.offset + piece.stored), set()).add(piece.digest)
        self._named = list(self._digests)
        self._hasher = RangeHasher(named for named in self._named if named not in gone)
        self._patches: list[tuple[int, int, SoundCopy]] = [
            (p.offset, p.offset + p.stored, p.cure) for p in data_file.cured if p.cure
        ]
        if data_file.header_cure is not None:
            self._patches.append((0, self.info.header_size, data_file.header_cure))
        self._last: tuple[SoundCopy, bytes | memoryview] | None = None

    async def run(self, on_bytes: OnBytes) -> None:
        upload = await self.store.upload(self.info.key, size=self.info.size, replace=True)
        point("data_file.opened")
        try:
            most = upload.part or CHUNK
            for start in range(0, self.info.size, most):
                view = await self._range(start, min(most, self.info.size - start))
                await asyncio.to_thread(self._check, start, view)
                await upload.write_at(start, view)
                if on_bytes is not None:
                    on_bytes(len(view))
            await upload.finish()
        except BaseException:
            await upload.abort()
            raise

    def _check(self, start: int, view: memoryview) -> None:
        """Raise CorruptError if a range that ends in this view does not match its digest."""
        for (low, high), digest in self._hasher.feed(start, view):
            if self._digests[low, high] != {digest}:
                where = f"{high - low} bytes at {low} of {self.info.key}"
                raise CorruptError(f"{where} changed while they were copied, so the old file stays")

    async def _range(self, start: int, length: int) -> memoryview:
        view = page_aligned(length)
        await self._as_it_is(start, view)
        for low, high, cure in self._patches:
            a, b = max(low, start), min(high, start + length)
            if a < b:
                data = await self._cured(cure)
                view[a - start : b - start] = data[a - low : b - low]
        return view

    async def _cured(self, cure: SoundCopy) -> bytes | memoryview:
        """Return the intact bytes of a chunk. Keep the last ones: two reads may need the same chunk."""
        if self._last is None or self._last[0] is not cure:
            self._last = cure, await cure.get()
        return self._last[1]

    async def _as_it_is(self, start: int, view: memoryview) -> None:
        """Read the bytes that this file has. Read bytes beyond its end from the same file in another location."""
        there, end = min(self.file.there or 0, self.info.size), start + len(view)
        if start < there:
            part = view[: min(end, there) - start]
            part[:] = await chunks.get(self.store, self.info.key, start=start, length=len(part))
        for a, b in without([(max(start, there), end)], [(low, high) for low, high, _ in self._patches]):
            if not self._alike:
                raise CorruptError(
                    f"no location has the {b - a} bytes at {a} of {self.info.key}, so the old file stays"
                )
            part = view[a - start : b - start]
            part[:] = await chunks.get(self._alike[0], self.info.key, start=a, length=len(part))


def without(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of `ranges` that `others` do not cover. Does no I/O."""
    left = [span for span in ranges if span[0] < span[1]]
    for low, high in others:
        left = [(a, b) for start, end in left for a, b in ((start, min(end, low)), (max(start, high), end)) if a < b]
    return left
