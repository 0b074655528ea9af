"""What an export writes, as pure values: files, of literal bytes and of tensors at their places.

A format (`convert.to_safetensors`, `convert.to_torch`, `convert.to_dcp`, `convert.to_run`) plans
`OutFile`s and says what is left to do when their bytes are there; `convert.export` moves the bytes, whatever the
format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt.core.format.boxes import Box
from ckpt.core.format.layout import BITS
from ckpt.errors import UsageError
from ckpt.store import folder_of, normalise


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that the plan knows."""

    at: int
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class TensorRun:
    """A box of a tensor of the origin, by its label, in row-major order as `dtype`.

    `at` is a multiple of the bytes of an element.
    """

    at: int
    label: str
    box: Box
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.box[1]) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class OutFile:
    """`parts` lie one behind the other, in the order of their places, and leave no gap; `name` is relative. `sums`:
    bytes (from, to) of which a digest is wanted."""

    name: str
    size: int
    parts: tuple[Literal | TensorRun, ...]
    sums: tuple[tuple[int, int], ...] = ()

    def check(self) -> None:
        """AssertionError if the parts leave a gap, overlap, or do not end at `size`."""
        at = 0
        for part in self.parts:
            assert part.at == at, (self.name, part.at, at)
            assert not isinstance(part, TensorRun) or part.at % (BITS[part.dtype] // 8) == 0, (self.name, part.label)
            at += part.size
        assert at == self.size, (self.name, at, self.size)


Sums = Mapping[str, Mapping[int, bytes]]
"""Digests of each file, by where their bytes start."""


@dataclass(frozen=True)
class Output:
    """All that an export makes. `single`: the target is that one file, else a folder that holds them.

    `finish(out, sums)` writes what can only be written now (small files: an index, a manifest), durably; it may be
    called again after it was interrupted. `staged`: the files are only what `finish` makes the target of; they lie at
    `staged_path` then. `side_by_side`: the files have parts of the same tensors at about the same places, and are
    written at the same time, so that each piece of the origin is read once.
    """

    kind: str  # for people: "safetensors", "torch.save", "DCP", "a run of 4 ranks"
    files: tuple[OutFile, ...]
    finish: Callable[[Path, Sums], None]
    single: bool = False
    staged: bool = False
    side_by_side: bool = False
    notes: tuple[str, ...] = ()

    def staged_path(self, out: Path, file: OutFile) -> Path:
        return out.with_name("staged") / (file.name or "tensors")


def local_path(target: str) -> Path:
    """A file or folder of this machine. UsageError if it is anything else."""
    if folder_of(normalise(target)) is None:
        raise UsageError(
            f"{target} is not on this machine: make it in a folder, and take it there, a run with `ckpt copy`"
        )
    text = re.sub(r"^file://", "", target, flags=re.IGNORECASE)
    return Path(text).expanduser().absolute()  # a link is not followed: it is there already
