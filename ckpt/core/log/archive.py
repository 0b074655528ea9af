"""Archives: many old records of a run log in one file each.

    log/archive/<last>-<first>.zst    zstd frames, one after the other: the bytes of the records, a line each

By their names they say how far the log is archived: no record up to there counts as a file of its own, whoever has put
it there. A listing has them behind all records, those that reach furthest last, so that whoever sees a record there
that was archived sees an archive that has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import zstandard

from ckpt.core.format.manifest import plain_size
from ckpt.errors import CorruptError
from ckpt.store import ObjectInfo

LEVEL = 9  # of zstd: 256 records in 10 ms
LEAST = 32  # bytes that a record takes in any archive: half of what its digest says
MAX_ARCHIVE = 1 << 30  # bytes; refused before it is read
_CHUNK = 1 << 20
_NAME = re.compile(r"log/archive/([0-9]{12})-([0-9]{12})\.zst")


@dataclass(frozen=True, order=True, slots=True)
class Archive:
    """A file with the records from `first` to `last`. `size` in bytes."""

    last: int
    first: int
    size: int = 0

    @property
    def key(self) -> str:
        return f"log/archive/{self.last:012d}-{self.first:012d}.zst"

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def covers(self, other: Archive) -> bool:
        return self.first <= other.first and other.last <= self.last and self.key != other.key


def archive_of(info: ObjectInfo) -> Archive | None:
    """What a file is by its name; None if that is no archive, or so small that it cannot be what it says."""
    found = _NAME.fullmatch(info.key)
    archive = Archive(int(found[1]), int(found[2]), info.size) if found is not None else None
    sane = archive is not None and archive.first <= archive.last and archive.count * LEAST <= info.size <= MAX_ARCHIVE
    return archive if sane else None


def chain(archives: Iterable[Archive]) -> list[Archive]:
    """The fewest that have all that these have, in the order of the records: none of them covers another."""
    left, found, seq = sorted(archives, key=lambda one: one.first), list[Archive](), 0
    while left := [one for one in left if one.last >= seq]:
        seq = max(seq, left[0].first)
        found.append(max((one for one in left if one.first <= seq), key=lambda one: (one.last, -one.first)))
        seq = found[-1].last + 1
    return found


def pack(records: Sequence[bytes]) -> bytes:
    """Some records, in their order, as one frame. Archives of neighbours, put together, are an archive as well."""
    text = b"".join(raw + b"\n" for raw in records)
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(text)


def unpack(raw: bytes | memoryview, count: int, most: int) -> Iterator[bytes]:
    """Yield the records of an archive of `count` records. Raises CorruptError at the first that cannot be had, if there
    are more, if one has more than `most` bytes, or if they have more bytes than a file of this size can hold."""
    left, pieces = plain_size(len(raw)), list[bytes]()
    try:
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as reader:
            while chunk := reader.read(_CHUNK):
                left -= len(chunk)
                if left < 0:
                    raise CorruptError(f"an archive of {len(raw)} bytes decompresses to implausibly many")
                *whole, rest = chunk.split(b"\n")
                for line in whole:
                    count -= 1
                    if count < 0:
                        raise CorruptError("an archive has more records than its name says")
                    yield b"".join((*pieces, line))
                    pieces.clear()
                pieces.append(rest)
                if sum(map(len, pieces)) > most:
                    raise CorruptError("an archive has an implausibly large record")
    except zstandard.ZstdError as error:
        raise CorruptError(f"an archive does not decompress: {error}") from None
    if any(pieces):
        raise CorruptError("an archive ends in the middle of a record")
