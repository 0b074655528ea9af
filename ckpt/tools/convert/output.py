"""The planned output of an export, without I/O: files that consist of literal bytes and of tensors at offsets.

A format (`convert.to_safetensors`, `convert.to_torch`, `convert.to_dcp`, `convert.to_run`) plans `OutFile`s and a final
step. `convert.export` writes the bytes, whatever the format.
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
    """A part of a file whose bytes are known when the export is planned."""

    at: int
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class TensorRun:
    """A part of a file: a box of an origin's tensor in row-major order, as `dtype`. `at` is a multiple of its size."""

    at: int
    label: str
    box: Box
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.box[1]) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class OutFile:
    """A file to write. `parts`: contiguous and in order. `name`: relative path. `sums`: byte ranges (from, to) whose
    digests the final step needs."""

    name: str
    size: int
    parts: tuple[Literal | TensorRun, ...]
    sums: tuple[tuple[int, int], ...] = ()

    def check(self) -> None:
        """Raise AssertionError if the parts leave a gap, overlap, or do not end at `size`."""
        at = 0
        for part in self.parts:
            assert part.at == at, (self.name, part.at, at)
            assert not isinstance(part, TensorRun) or part.at % (BITS[part.dtype] // 8) == 0, (self.name, part.label)
            at += part.size
        assert at == self.size, (self.name, at, self.size)


Sums = Mapping[str, Mapping[int, bytes]]
"""For each file, the digests of its `sums`, by the start of the byte range."""


@dataclass(frozen=True)
class Output:
    """Everything that an export writes. `single`: True if the target is the only file, False if it is a folder.

    `finish(out, sums)` durably writes small files that depend on digests (an index, a manifest). It may be repeated.
    `staged`: True if the files are only input for `finish`; they are then stored at `staged_path`. `side_by_side`: True
        if files contain parts of the same tensors. They are then written together, so that each chunk is read once.
    """

    kind: str  # name of the format for users: "safetensors", "torch.save", "DCP", "a run of 4 ranks"
    files: tuple[OutFile, ...]
    finish: Callable[[Path, Sums], None]
    single: bool = False
    staged: bool = False
    side_by_side: bool = False
    notes: tuple[str, ...] = ()

    def staged_path(self, out: Path, file: OutFile) -> Path:
        return out.with_name("staged") / (file.name or "tensors")


def local_path(target: str) -> Path:
    """Return the path of a local file or folder. Raise UsageError for a URL that is not local."""
    if folder_of(normalise(target)) is None:
        raise UsageError(
            f"{target} is not on this machine: write to a local folder, and copy it there (a run with `ckpt copy`)"
        )
    text = re.sub(r"^file://", "", target, flags=re.IGNORECASE)
    return Path(text).expanduser().absolute()  # without resolving links, so that a link at the target is detected
