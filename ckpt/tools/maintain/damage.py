"""What can be damaged in a run, and what can be done about each piece of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import Attempt, PackInfo
from ckpt.core.format.table import Table
from ckpt.core.log.records import Commit

Get = Callable[[], Awaitable[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class SoundCopy:
    """Where a damaged piece can be had, and how. `get` gives it, verified: CorruptError or StoreError if not."""

    where: str
    how: str
    get: Get


@dataclass(eq=False)
class AuditedTable:
    """A table that a live checkpoint consists of, and the packs that it names. `layout`: of the rank that wrote it, if
    it is of one rank.

    With thousands of ranks both are read again when they are needed. `part`: rank, try and digest of the manifest.
    """

    commit: Commit
    packs: tuple[str, ...]
    part: tuple[int, int, str] | None = None
    content: Table | None = None
    layout: Layout | None = None

    @property
    def table(self) -> Table:
        assert self.content is not None
        return self.content


@dataclass(eq=False)
class DamagedRange:
    """A range of a pack that is damaged, and the rows that name it. `why`: it cannot be had."""

    pack: str
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
class PackDamage:
    """`problem`: of the file as a whole, empty if it has its size. `there`: bytes that it has, None: it is gone.

    `unavailable`: bytes that neither this file, nor a cure, nor the same file elsewhere has. No file can be made then.
    """

    info: PackInfo
    there: int | None
    problem: str = ""
    header: bool = False
    header_cure: SoundCopy | None = None
    pieces: list[DamagedRange] = field(default_factory=list)
    known: bool = True  # its size and header are
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
        """Return True if the file is written again: it gets better, and no byte of it has to be invented."""
        better = self.cured or self.header_cure is not None or self.size_is_wrong
        return self.known and not self.unavailable and bool(better)


@dataclass(eq=False)
class FileDamage:
    """A small file. `raw`: what it has to be, None if that cannot be had; `source`: where it is from; `absent`: it is
    gone, not damaged."""

    key: str
    step: int | None
    problem: str
    raw: bytes | None = None
    source: str = ""
    absent: bool = False


@dataclass
class AuditResult:
    """All that is damaged among what live checkpoints name. `records`: of the log, which nobody can repair."""

    records: list[int] = field(default_factory=list)
    files: list[FileDamage] = field(default_factory=list)
    packs: list[PackDamage] = field(default_factory=list)
    unread: list[tuple[Attempt, str]] = field(default_factory=list)  # checkpoints not looked into as a whole, and why

    @property
    def any(self) -> bool:
        return bool(self.records or self.files or self.packs or self.unread)

    @property
    def remains(self) -> bool:
        """Whether something cannot be repaired."""
        gone = any(file.raw is None for file in self.files) or any(not pack.whole_again for pack in self.packs)
        return bool(self.records or self.unread) or gone
