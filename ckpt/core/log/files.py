"""What lies in the folder of a run log: the records that count, each a file, and the archives of those before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.core.format.manifest import unseal
from ckpt.core.log.archive import MAX_ARCHIVE, Archive, archive_of
from ckpt.errors import CorruptError, NotFoundError
from ckpt.store import Store

MAX_RECORD = 256 << 20


def record_key(seq: int) -> str:
    return f"log/{seq:012d}.json"


def sequence(key: str) -> int | None:
    """Of a record, by its name; None for anything else."""
    name = key.removeprefix("log/").removesuffix(".json")
    return int(name) if len(name) == 12 and name.isdigit() and name.isascii() else None


@dataclass(frozen=True, slots=True)
class Listed:
    """What a listing says. `sizes`: of the records that count, by number; `floor`: the last one that is archived, -1 if
    none is; `below`: records up to there that lie about as files, and count for nobody."""

    sizes: dict[int, int]
    archives: Sequence[Archive]
    floor: int
    below: Sequence[int]


class LogFiles:
    """Reads them. `root`: the id of the run."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.root = ""
        self.floor = -1  # what is archived stays archived: it only rises

    async def look(self, after: str = "") -> Listed:
        """Of what comes after a name, and of all archives.

        A store lists the archives after the records, so that of any record that was archived before it was looked at,
        the archive is seen. The newest records are never archived: what says so is no archive.
        """
        listed = [info async for info in self.store.list("log/", after=after)]
        sizes = {n: info.size for info in listed if (n := sequence(info.key)) is not None}
        newest = max(sizes, default=None)
        named = [one for info in listed if (one := archive_of(info)) is not None]
        archives = [one for one in named if newest is None or one.last < newest]
        self.floor = floor = max([self.floor, *(one.last for one in archives)])
        below = [seq for seq in sizes if seq <= floor]
        return Listed({seq: size for seq, size in sizes.items() if seq > floor}, archives, floor, below)

    async def read(self, seq: int, size: int | None) -> bytes | None:
        """None if it is not there. From a remote place twice, if need be: it may have been damaged on its way. Nothing
        of a pipe, a link or a folder under its name, which a store lists as empty: what was there is lost."""
        if size is None or size > MAX_RECORD:
            return None
        if size == 0:
            return b""
        raw = await self._get(record_key(seq))
        return raw if not self.store.remote or self._is_sound(seq, raw) else await self._get(record_key(seq))

    async def read_archive(self, archive: Archive) -> bytes | None:
        """None if it is not there any more: its records are in a larger one."""
        return await self._get(archive.key, MAX_ARCHIVE)

    async def _get(self, key: str, limit: int | None = None) -> bytes | None:
        try:
            return bytes(await self.store.get(key, limit=limit))
        except NotFoundError:
            return None

    def _is_sound(self, seq: int, raw: bytes | None) -> bool:
        try:
            self.unsealed(seq, raw)
        except CorruptError:
            return False
        return True

    def unsealed(self, seq: int, raw: bytes | None) -> dict[str, Any]:
        """What a record says. CorruptError unless it is this one, of this run."""
        if raw is None:
            raise CorruptError("missing")
        record = unseal(raw, f"log record {seq}")
        if record.get("seq") != seq or record.get("root") != self.root:
            raise CorruptError(f"log record {seq} belongs elsewhere")
        return record
