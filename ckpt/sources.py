"""Places from which one checkpoint can be restored: a snapshot in memory, or a commit in a store.

Each verifies what it hands over, and takes part in one loop: try the newest, say why if it fails, try the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from ckpt import read
from ckpt.arena import Arena, Label
from ckpt.codec import DIGEST_SIZE, blob_digest
from ckpt.errors import CorruptError, StoreError
from ckpt.events import log as logger
from ckpt.events import point
from ckpt.log import Commit, RunLog
from ckpt.manifest import Attempt
from ckpt.plan import Blob, Layout
from ckpt.restore import Filler, Placement
from ckpt.state import Capture
from ckpt.table import Table

MEMORY_THREADS = 4
RETRY_AFTER_S = (0.2, 1.0)


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was newer and could not be used."""

    step: int
    tier: str
    reason: str


@dataclass
class Restored:
    """What `restore()` did. `verified` is False only for a snapshot that nobody has digested yet."""

    step: int | None
    attempt: str | None = None
    tier: str | None = None
    verified: bool = True
    seconds: float = 0.0
    nbytes: int = 0
    skipped: list[Skipped] = field(default_factory=list)


class Source(Protocol):
    """One checkpoint in one place."""

    attempt: Attempt
    tier: str
    undone: bool  # not in the present history: a later restore went back behind it

    def restore(self, capture: Capture, *, strict: bool, on_touch: Callable[[], None]) -> tuple[bool, int]:
        """Fill the state; (verified, bytes). `on_touch` is called before the first tensor is changed.

        CorruptError or StoreError if this source cannot be used, MismatchError if it does not fit the state.
        """


class MemorySource:
    """A sealed snapshot in an arena, ours or another process's. `digests`: of all blobs, then of the plain values."""

    tier = "memory"
    undone: bool = False

    def __init__(self, arena: Arena, slot: int, label: Label, layout: Layout, digests: bytes | None) -> None:
        assert label.attempt is not None
        self.attempt = label.attempt
        self._arena, self._slot, self._label, self._layout, self._digests = arena, slot, label, layout, digests
        self.place = (arena, slot)

    def restore(self, capture: Capture, *, strict: bool, on_touch: Callable[[], None]) -> tuple[bool, int]:
        self._check_label()
        if self._label.data_size != self._layout.arrangement.data_size:
            raise CorruptError("the snapshot in memory is of another size than its layout")
        blobs = self._layout.arrangement.blobs
        data = self._arena.data(self._slot, self._label.data_size)
        raw = bytes(self._arena.values(self._slot, self._label))
        if self._digests is not None and self._digests[-DIGEST_SIZE:] != blob_digest(raw):
            raise CorruptError("the plain values of the snapshot in memory do not match their digest")
        try:
            values = json.loads(raw)
        except (ValueError, RecursionError):
            raise CorruptError("the plain values of the snapshot in memory are damaged") from None
        shares = [blobs[i::MEMORY_THREADS] for i in range(MEMORY_THREADS)]
        with ThreadPoolExecutor(MEMORY_THREADS, "ckpt-restore") as pool:
            if self._digests is not None:
                if len(self._digests) != (len(blobs) + 1) * DIGEST_SIZE:
                    raise CorruptError("the digests of the snapshot in memory are of another layout")
                numbered = list(enumerate(blobs))
                list(pool.map(lambda i: self._verify(data, numbered[i::MEMORY_THREADS]), range(MEMORY_THREADS)))
            placement = _place(capture, self._layout, values, strict)
            filler = Filler(placement.fills, self._layout.by_name)
            point("restore.chosen")
            on_touch()
            wanted = set(filler.names)
            list(pool.map(lambda share: self._fill(filler, wanted, data, share), shares))
        self._check_label()  # another process's memory may have moved on while we read it
        _finish(filler, placement)
        return self._digests is not None, self._label.data_size

    def _check_label(self) -> None:
        if self._arena.label(self._slot) != self._label:
            raise CorruptError(f"the snapshot of step {self.attempt.step} in memory was overwritten meanwhile")

    def _verify(self, data: memoryview, blobs: list[tuple[int, Blob]]) -> None:
        assert self._digests is not None
        for i, blob in blobs:
            digest = self._digests[i * DIGEST_SIZE : (i + 1) * DIGEST_SIZE]
            if blob_digest(data[blob.offset : blob.offset + blob.length]) != digest:
                name = self._layout.tensors[blob.tensor].name
                raise CorruptError(f"{name} is damaged in memory: its bytes do not match their digest")

    def _fill(self, filler: Filler, wanted: set[str], data: memoryview, blobs: tuple[Blob, ...]) -> None:
        offsets, tensors = self._layout.arrangement.offsets, self._layout.tensors
        for blob in blobs:
            name = tensors[blob.tensor].name
            if name in wanted:
                filler.add(name, blob.offset - offsets[blob.tensor], data[blob.offset : blob.offset + blob.length])


class StoreSource:
    """A committed checkpoint in a store."""

    def __init__(self, url: str, commit: Commit, *, undone: bool = False) -> None:
        self.attempt, self.tier, self.undone, self._commit = commit.attempt, url, undone, commit

    def restore(self, capture: Capture, *, strict: bool, on_touch: Callable[[], None]) -> tuple[bool, int]:
        return read.run(self._restore(capture, strict, on_touch))

    async def _restore(self, capture: Capture, strict: bool, on_touch: Callable[[], None]) -> tuple[bool, int]:
        log = await read.open_run(self.tier)
        try:
            manifest = await read.load_manifest(log.store, self._commit)
            part, table = manifest.parts[0], manifest.table
            if len(manifest.parts) != 1:
                raise CorruptError(f"step {self.attempt.step} was saved by {len(manifest.parts)} ranks, this is one")
            layout = manifest.layout()
            for name in layout.by_name:
                shard_of(layout, table, name)  # before anything is allocated by what the layout says
            placement = _place(capture, layout, part.values, strict)
            filler = Filler(placement.fills, layout.by_name)
            shards = [shard_of(layout, table, name) for name in filler.names]
            reads = read.plan_reads(table, shards)
            point("restore.chosen")
            on_touch()
            names = [shard.name for shard in table.shards]
            await read.fetch(log.store, table, reads, lambda shard, at, data: filler.add(names[shard], at, data))
            _finish(filler, placement)
            return True, sum(r.length for r in reads)
        finally:
            await log.store.aclose()


def shard_of(layout: Layout, table: Table, name: str) -> int:
    """The shard that is all of a tensor; CorruptError if table and layout do not agree about it."""
    spec = layout.by_name.get(name)
    found = table.by_name.get(name, [])
    if spec is None or len(found) != 1:
        raise CorruptError(f"{name} is not in the table of the checkpoint exactly once")
    shard = table.shards[found[0]]
    if (shard.dtype, shard.global_shape, shard.sizes) != (spec.dtype, spec.shape, spec.shape):
        raise CorruptError(f"{name} is of another shape or dtype in the table than in the layout")
    return found[0]


def _place(capture: Capture, layout: Layout, values: object, strict: bool) -> Placement:
    if not isinstance(values, list) or len(values) != len(layout.components):
        raise CorruptError("the plain values do not belong to the layout")
    try:
        return capture.place(layout, values, strict=strict)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CorruptError(f"what was saved does not describe a state: {type(error).__name__}: {error}") from error


def _finish(filler: Filler, placement: Placement) -> None:
    point("restore.filled")
    filler.finish()
    for finish in (*placement.finishers, *placement.last):
        finish()


def gather(snapshots: list[MemorySource], urls: list[str], step: int | None) -> list[Source]:
    """Every checkpoint that may be restored, newest first, memory before disk, what was undone last.

    With `step` only those of that step, and without it nothing that was undone.
    """
    found: list[Source] = [s for s in snapshots if (not s.undone if step is None else s.attempt.step == step)]
    for url in urls:
        log = read.run(_log_of(url))
        history = {commit.attempt for commit in log.state.lineage()}
        sources = [StoreSource(url, c, undone=c.attempt not in history) for c in log.state.commits.values()]
        found += [s for s in sources if (not s.undone if step is None else s.attempt.step == step)]
        if log.state.damaged:
            logger.warning("%s: log records %s are damaged and were skipped", url, log.state.damaged)
    places = ["memory", *urls]
    return sorted(found, key=lambda s: (s.undone, -s.attempt.epoch, -s.attempt.step, places.index(s.tier)))


async def _log_of(url: str) -> RunLog:
    log = await read.open_run(url)
    await log.store.aclose()
    return log


def restore_first(
    sources: list[Source], capture: Capture, result: Restored, *, strict: bool, on_touch: Callable[[], None]
) -> Source | None:
    """Restore from the first source that is sound; why others were not is said, and noted in `result`."""
    for source in sources:
        for patience in (*RETRY_AFTER_S, None):
            try:
                result.verified, result.nbytes = source.restore(capture, strict=strict, on_touch=on_touch)
            except (CorruptError, StoreError) as error:
                if error.retryable and patience is not None:
                    time.sleep(patience)  # to fall back for a passing fault would cost steps for good
                    continue
                result.skipped.append(Skipped(source.attempt.step, source.tier, str(error)))
                logger.warning("step %d in %s cannot be used: %s", source.attempt.step, source.tier, error)
                break
            result.step, result.attempt, result.tier = source.attempt.step, str(source.attempt), source.tier
            return source
    return None
