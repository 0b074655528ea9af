"""What `ckpt report -o` reads besides the ledger, and how it writes its page."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from ckpt.cli.terminal import SHOWN, opened, say
from ckpt.errors import CheckpointError
from ckpt.report.words import StoredBytes, TensorKind
from ckpt.runlog.log import RunLog

MOST_CLASSES = 12  # of tensors, on a page


def refuse_existing(output: str, force: bool) -> None:
    if output != "-" and os.path.lexists(output) and not force and not _is_stream(output):
        raise click.UsageError(f"{output} is there already: give another name, or --force to replace it")


def _is_stream(output: str) -> bool:
    """A device or a pipe: it takes what is written, and must never be replaced by a file."""
    with contextlib.suppress(OSError):
        mode = os.stat(output).st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


def write_page(output: str, text: str, force: bool) -> None:
    """All of it or nothing. A link stays one: what it leads to is replaced."""
    data = text.encode()
    if output == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    try:
        if _is_stream(output):
            with open(os.open(output, os.O_WRONLY), "wb") as stream:
                stream.write(data)
        else:
            _put(data, Path(os.path.realpath(output)) if force else Path(output), force)
    except FileExistsError:
        refuse_existing(output, force)
        raise
    except OSError as error:
        raise click.UsageError(f"{output} cannot be written: {error.strerror}") from None
    say(f"{output} is written: open it in a browser")


def _put(data: bytes, target: Path, force: bool) -> None:
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o666 & ~_umask())
            if force:
                os.replace(file.name, target)
            else:
                os.link(file.name, target)  # not if somebody has made it meanwhile
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@dataclass(frozen=True)
class RunContents:
    """Of a run: its newest checkpoint, all their steps, and what of that cannot be read."""

    stock: StoredBytes | None
    steps: tuple[int, ...]
    problems: tuple[str, ...]


async def read_holdings(url: str) -> RunContents:
    async with opened(url) as log:
        problems = []
        if damaged := log.state.damaged:
            shown = ", ".join(map(str, damaged[:SHOWN])) + ", …" * (len(damaged) > SHOWN)
            problems.append(f"log records {shown} are damaged or missing: checkpoints may be missing here")
        steps = tuple(sorted(attempt.step for attempt in log.state.commits))
        stock = None
        if steps:
            try:
                stock = await _stock(log)
            except CheckpointError as error:
                problems.append(f"the newest checkpoint cannot be looked into: {error}")
        return RunContents(stock, steps, tuple(problems))


async def _stock(log: RunLog) -> StoredBytes:
    from ckpt.checkpoint import describe, read

    manifest = await read.manifest_of(log, None)
    saved, table = manifest.saved(), manifest.table
    entries = describe.entries_of(saved)
    kinds = {path: str(facts.get("kind")) for path, (facts, _) in entries.items()}
    storages = describe.Storages(table, manifest.attempt)
    tensors = [t for t in describe.tensors_of(saved).values() if t.alias_of is None]
    classes: dict[str, list[int]] = {}
    for t in tensors:
        stored = storages.of(list(saved.blobs(saved.labels[t.name]))).stored
        count = classes.setdefault(class_of(t.name, kinds), [0, 0, 0])
        count[:] = count[0] + 1, count[1] + t.bytes, count[2] + stored
    ordered = sorted(classes.items(), key=lambda one: -one[1][1])
    rest = [count for _, count in ordered[MOST_CLASSES:]]
    shown = [TensorKind(name, *count) for name, count in ordered[:MOST_CLASSES]]
    if rest:
        shown.append(TensorKind("other", *(sum(one[n] for one in rest) for n in range(3))))
    reads = sum(describe.used_of(table).values())
    return StoredBytes(manifest.commit.step, manifest.commit.full, manifest.commit.world, reads, tuple(shown))


def class_of(name: str, kinds: Mapping[str, str]) -> str:
    """What kind of tensor that is: weights of a module, what an optimizer keeps of each, or the entry it is in."""
    inside = [path for path in kinds if name == path or name.startswith(f"{path}.")]
    path = max(inside, key=len, default="")
    kind = kinds.get(path, "")
    if kind == "module":
        return f"weights of {path}"
    if kind == "optimizer":
        return f"{name.rpartition('.')[2]} of {path}"
    return path or name.partition(".")[0]
