"""Put damaged files of a run right again, bit for bit, from whatever is sound somewhere.

    look, survey   what live checkpoints name, and which of it is damaged   (`ckpt.tools.maintain.audit`)
    seek           where each damaged piece can be had                      (`ckpt.tools.maintain.find_copies`)
    mend           the files are written again, whole, under their names

Content decides: a piece is put back only if its digest is the one that the checkpoint says, wherever it came from. A
pack is replaced as a whole, by a new file that is verified on its way; until that is complete the old one stays. Bytes
that cannot be cured are copied as they are, and a file that lacks bytes which no location has is left alone. So
a running job is not disturbed, and all of it may be stopped at any moment and called again. Nothing here deletes
anything, and log records are not repaired: what is lost of the log, nobody else knows.

A file that cannot be read now may be intact. Then `look`, `survey` and `seek` raise StoreError, and nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt.core.checkpoint import steady
from ckpt.core.checkpoint.concurrent import all_of
from ckpt.core.checkpoint.parts import read_header
from ckpt.core.checkpoint.write import CHUNK, page_aligned
from ckpt.core.format.digest import RangeHasher
from ckpt.core.format.manifest import PackInfo, is_data, owner
from ckpt.errors import CorruptError, ExistsError, StoreError, is_unreadable
from ckpt.failpoints import point
from ckpt.store import Store
from ckpt.tools.maintain.audit import Audit, OnBytes
from ckpt.tools.maintain.damage import PackDamage, SoundCopy
from ckpt.tools.maintain.find_copies import CopyFinder

CURES = 8  # pieces fetched at the same time


@dataclass
class Repaired:
    """What was written again. `left`: given up by the run meanwhile; `failed`: (name, why)."""

    files: list[str] = field(default_factory=list)
    packs: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


class Repair(Audit):
    """What can be done about damage, and doing it."""

    async def seek(self, on_bytes: OnBytes = None) -> None:
        """For everything that is damaged: where it can be had. Each is fetched once, to be sure."""
        if not self.found.packs:
            return
        seeker = CopyFinder(self)
        pieces = iter([piece for pack in self.found.packs for piece in pack.pieces if pack.known])

        async def work() -> None:
            for piece in pieces:
                piece.cure = await seeker.cure(piece)
                if on_bytes is not None:
                    on_bytes(piece.stored)

        await all_of(work() for _ in range(CURES))
        for pack in self.found.packs:
            if not pack.known:
                for piece in pack.pieces:
                    piece.why = "the part that says the size of its file cannot be had"
                continue
            if pack.header:
                pack.header_cure = await seeker.header(pack.info)
            pack.unavailable = await self._unavailable(pack)

    async def _unavailable(self, pack: PackDamage) -> int:
        """Return how many bytes of a pack no location has: of its missing end, what is not cured."""
        cured = [(p.offset, p.offset + p.stored) for p in pack.cured]
        if pack.header_cure is not None:
            cured.append((0, pack.info.header_size))
        lacking = without([(pack.there or 0, pack.info.size)], cured)
        if lacking and await alike(self, pack.info):  # it has all that is not known to be lost
            lacking = without(lacking, without(lacking, [(p.offset, p.offset + p.stored) for p in pack.lost]))
        return sum(end - start for start, end in lacking)

    async def mend(self, on_bytes: OnBytes = None) -> Repaired:
        """Write again what can be had. What fails is left as it is, and the rest is gone on with."""
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
                done.left.append(file.key)  # it has come back
            except StoreError as error:
                done.failed.append((file.key, str(error)))
        for pack in self.found.packs:
            if not pack.worth:
                continue
            key = pack.info.key
            if not await self._is_live(key):
                done.left.append(key)
                continue
            try:
                await _Rewrite(self, pack, await alike(self, pack.info)).run(on_bytes)
                done.packs.append(key)
            except (CorruptError, StoreError) as error:
                done.failed.append((key, str(error)))
        return done

    async def _is_live(self, key: str) -> bool:
        """Whether a live checkpoint needs this file: a running job may have given it up."""
        live = (await self.log.refresh()).commits
        if not is_data(key):
            attempt = owner(key)
            return attempt is None or attempt in live
        return any(sheet.commit.attempt in live for sheet in self.sheets if key in sheet.packs)


async def alike(audit: Audit, info: PackInfo) -> list[Store]:
    """Return the other locations that have this file, with its size and its header."""
    found = []
    for other in audit.others:
        try:
            same_size = (await steady.head(other.store, info.key)).size == info.size
            await read_header(other.store, info)
        except (CorruptError, StoreError) as error:
            if is_unreadable(error):
                raise
            continue
        if same_size:
            found.append(other.store)
    return found


class _Rewrite:
    """One pack, streamed into its place. All that live checkpoints name in it is verified on its way."""

    def __init__(self, repair: Repair, pack: PackDamage, alike: list[Store]) -> None:
        self.store, self.pack, self.info, self._alike = repair.store, pack, pack.info, alike
        gone = {(p.offset, p.offset + p.stored) for p in pack.lost}  # which nobody expects to be right
        self._digests: dict[tuple[int, int], set[bytes]] = {}
        for piece in repair.named(pack.info.key):
            self._digests.setdefault((piece.offset, piece.offset + piece.stored), set()).add(piece.digest)
        self._named = list(self._digests)
        self._hasher = RangeHasher(named for named in self._named if named not in gone)
        self._patches: list[tuple[int, int, SoundCopy]] = [
            (p.offset, p.offset + p.stored, p.cure) for p in pack.cured if p.cure
        ]
        if pack.header_cure is not None:
            self._patches.append((0, self.info.header_size, pack.header_cure))
        self._last: tuple[SoundCopy, bytes | memoryview] | None = None

    async def run(self, on_bytes: OnBytes) -> None:
        upload = await self.store.upload(self.info.key, size=self.info.size, replace=True)
        point("pack.opened")
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
        """CorruptError if a range that ends here is not what it has to be."""
        for (low, high), digest in self._hasher.feed(start, view):
            if self._digests[low, high] != {digest}:
                where = f"{high - low} bytes at {low} of {self.info.key}"
                raise CorruptError(f"{where} came out wrong while they were copied, so the old file stays")

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
        """One that goes over the end of a range is needed twice."""
        if self._last is None or self._last[0] is not cure:
            self._last = cure, await cure.get()
        return self._last[1]

    async def _as_it_is(self, start: int, view: memoryview) -> None:
        """Read what this file has, and what it lacks from the same file elsewhere. No byte is invented."""
        there, end = min(self.pack.there or 0, self.info.size), start + len(view)
        if start < there:
            part = view[: min(end, there) - start]
            part[:] = await steady.get(self.store, self.info.key, start=start, length=len(part))
        for a, b in without([(max(start, there), end)], [(low, high) for low, high, _ in self._patches]):
            if not self._alike:
                raise CorruptError(
                    f"no location has the {b - a} bytes at {a} of {self.info.key}, so the old file stays"
                )
            part = view[a - start : b - start]
            part[:] = await steady.get(self._alike[0], self.info.key, start=a, length=len(part))


def without(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is left of some ranges when others are taken out of them. Pure."""
    left = [one for one in ranges if one[0] < one[1]]
    for low, high in others:
        left = [(a, b) for start, end in left for a, b in ((start, min(end, low)), (max(start, high), end)) if a < b]
    return left
