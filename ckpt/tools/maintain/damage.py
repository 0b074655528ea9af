"""The data model of a run's damage, and of the possible repairs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import CheckpointId, DataFile
from ckpt.core.format.table import Table
from ckpt.core.log.records import Commit

Get = Callable[[], Awaitable[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class SoundCopy:
    """An intact copy of a damaged chunk. `get`: reads and verifies the copy, or raises CorruptError or StoreError."""

    where: str
    how: str
    get: Get


@dataclass(eq=False)
class AuditedTable:
    """A chunk table of a live checkpoint, and the data files that it references. `layout`: layout of the rank, if the
    table is of one rank. With thousands of ranks, both are read again when needed. `manifest`: rank and digest."""

    commit: Commit
    files: tuple[str, ...]
    manifest: tuple[int, str] | None = None
    content: Table | None = None
    layout: Layout | None = None

    @property
    def table(self) -> Table:
        assert self.content is not None
        return self.content


@dataclass(eq=False)
class DamagedRange:
    """A damaged range of a data file, and the table rows that reference it. `why`: why there is no intact copy."""

    data_file: str
    offset: int
    stored: int
    digest: bytes
    rows: list[tuple[AuditedTable, int]] = field(default_factory=list)
    cure: SoundCopy | None = None
    why: str = ""

    @property
    def steps(self) -> list[int]:
        return sorted({sheet.commit.step for sheet, _ in self.rows}, reverse=True)

    @property
    def tensors(self) -> list[str]:
        return list(dict.fromkeys(sheet.table.name_of(row) for sheet, row in self.rows))


@dataclass(eq=False)
class DataFileDamage:
    """The damage of one data file. `problem`: problem of the whole file, "" if its size is right. `there`: its size,
    None if it is gone. `unavailable`: bytes that exist nowhere. Unless it is 0, the file cannot be rewritten."""

    info: DataFile
    there: int | None
    problem: str = ""
    header: bool = False
    header_cure: SoundCopy | None = None
    pieces: list[DamagedRange] = field(default_factory=list)
    known: bool = True  # True if the right size and header of the file are known
    unavailable: int = 0

    @property
    def size_is_wrong(self) -> bool:
        return self.known and self.there != self.info.size

    @property
    def cured(self) -> list[DamagedRange]:
        return [piece for piece in self.pieces if piece.cure is not None]

    @property
    def lost(self) -> list[DamagedRange]:
        return [piece for piece in self.pieces if piece.cure is None]

    @property
    def whole_again(self) -> bool:
        header = not self.header or self.header_cure is not None
        return self.known and not self.lost and header and not self.unavailable

    @property
    def worth(self) -> bool:
        """Return True if the file can be written again, because every byte is known, and if this repairs something."""
        better = self.cured or self.header_cure is not None or self.size_is_wrong
        return self.known and not self.unavailable and bool(better)


@dataclass(eq=False)
class FileDamage:
    """The damage of a small file. `raw`: its correct content, None if it is lost. `source`: origin of this content.
    `absent`: True if the file is missing."""

    key: str
    step: int | None
    problem: str
    raw: bytes | None = None
    source: str = ""
    absent: bool = False


@dataclass
class AuditResult:
    """All damage of files that live checkpoints need. `records`: damaged log records, which cannot be repaired."""

    records: list[int] = field(default_factory=list)
    files: list[FileDamage] = field(default_factory=list)
    data_files: list[DataFileDamage] = field(default_factory=list)
    unread: list[tuple[CheckpointId, str]] = field(default_factory=list)  # checkpoints that were not fully audited, why

    @property
    def any(self) -> bool:
        return bool(self.records or self.files or self.data_files or self.unread)

    @property
    def remains(self) -> bool:
        """Return True if some damage cannot be repaired."""
        gone = any(file.raw is None for file in self.files) or any(
            not data_file.whole_again for data_file in self.data_files
        )
        return bool(self.records or self.unread) or gone
