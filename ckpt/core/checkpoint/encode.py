"""Stores a snapshot in a tier, as an increment or compressed if that helps.

    Encoder.write:  choose a checkpoint to build on -> digests -> plan -> encode -> data files -> table -> manifest

An `Encoder` belongs to one tier and one rank. It remembers how fast the tier takes bytes, how fast they are encoded
here, and which form suits each kind of tensor. If nothing can be shared and nothing is compressed, a snapshot is
written directly as one raw data file (`ckpt.core.checkpoint.write.write_part`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckpt.core.checkpoint.byte_source import Bases, ByteSource, InMemory, InStore, no_bases
from ckpt.core.checkpoint.commit_checks import vouches
from ckpt.core.checkpoint.encode_part import LEAST, WORTH, Learnt, PartEncoder
from ckpt.core.checkpoint.incremental import Policy, Previous, plan_blobs
from ckpt.core.checkpoint.parts import load_part
from ckpt.core.checkpoint.upload_stats import UploadStats
from ckpt.core.checkpoint.write import RankSnapshot, WrittenPart, write_part
from ckpt.core.format.digest import blob_digest
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import Attempt
from ckpt.core.log.log import RunLog
from ckpt.errors import CorruptError, FormatError, StoreError
from ckpt.events import log as logger
from ckpt.store import Store

LITTLE = 4 << 20  # bytes of a share below which "auto" does not compress, because it would save no time
SHARING_PROBES = 32
FASTER, STILL_FASTER = 0.7, 1.0  # a tier is slow below this share of the encoding speed
ENCODED_A_SECOND = 600e6  # bytes, by one thread, until measured
REMEMBERED = 4  # tables of checkpoints that this writer wrote
MEASURED = 16 << 20  # bytes; a smaller amount gives no reliable speed
LEARN = 0.3  # weight of the newest measurement


@dataclass
class Encoder:
    """Stores one rank's chunks in one tier. `threads`: number of encoding threads. `pace`: called between two
    chunks in each thread; it may sleep. `idle`: returns the number of recently idle cores."""

    policy: Policy = field(default_factory=Policy)
    threads: int = 1
    pace: Callable[[float], None] = lambda seconds: None
    idle: Callable[[], float] = lambda: float("inf")
    flow: UploadStats = field(default_factory=UploadStats)  # progress of the present save, for monitoring
    distrusted: Attempt | None = None  # build on none up to this one, because of damage
    sink: float | None = None  # bytes a second that the tier takes
    rate: float = ENCODED_A_SECOND  # bytes a second that one thread encodes
    kinds: dict[str, Learnt] = field(default_factory=dict)
    compressing: bool = False
    sampled: bool = False  # True if deltas have been tried
    _written: dict[tuple[Attempt, int], WrittenPart] = field(default_factory=dict)

    # -- the checkpoint to build on --

    async def previous(self, log: RunLog, attempt: Attempt, layout: Layout) -> Previous | None:
        """Return this rank's share of the newest checkpoint here, or None if the next one must be full."""
        if not self.policy.incremental:
            return None
        history = [c for c in log.state.lineage() if c.attempt < attempt]
        newest = history[0] if history else None
        entry = next((p for p in newest.parts if p[0] == layout.rank), None) if newest is not None else None
        if newest is None or entry is None or newest.world != layout.world:
            return None
        if self.distrusted is not None and newest.attempt <= self.distrusted:
            return None
        try:
            written = self._written.get((newest.attempt, layout.rank))
            if written is None or not vouches(log.state, written):  # another writer's manifest was committed
                written = await load_part(log.store, newest.attempt, layout.rank, expected=entry[1])
        except (CorruptError, FormatError, StoreError) as error:
            logger.warning(
                "cannot build on step %d of %s, so the next checkpoint is full: %s", newest.step, log.store.url, error
            )
            return None
        if self.policy.full(log.state, attempt, written.part.chain):
            return None
        return Previous(written.part, written.table)

    def distrust(self, attempt: Attempt) -> None:
        """Build on no checkpoint up to this one: the next checkpoint is full."""
        self.distrusted = attempt if self.distrusted is None else max(attempt, self.distrusted)

    def remember(self, written: WrittenPart) -> None:
        self._written[Attempt.parse(written.part.attempt), written.part.rank] = written
        for key in sorted(self._written)[:-REMEMBERED]:
            del self._written[key]

    # -- writing --

    async def write(
        self,
        store: Store,
        snapshot: RankSnapshot,
        source: ByteSource,
        previous: Previous | None,
        *,
        numbers: Iterator[int] | None = None,
        reason: str = "due",
        bases: Bases = no_bases,
        check: Callable[[], None] = lambda: None,
        log: RunLog | None = None,
    ) -> WrittenPart:
        """Store one rank's share of a checkpoint; see `ckpt.core.checkpoint.write.write_part`.

        `log`: of the tier. It is refreshed before anything is built on `previous`, which may have been retired.
        """
        compress = self._decide(store, snapshot.layout.arrangement.data_size)
        if isinstance(source, InMemory) and not compress and not await self._shares(source, previous):
            written = await self._write_raw(store, snapshot, numbers, reason, check)
            self.remember(written)
            return written
        numbers, bases = numbers or itertools.count(), bases if compress else no_bases
        work = PartEncoder(self, store, snapshot, source, previous, numbers, bases, compress, log)
        written = await work.run(reason, check)
        self.remember(written)
        return written

    async def _write_raw(
        self,
        store: Store,
        snapshot: RankSnapshot,
        numbers: Iterator[int] | None,
        reason: str,
        check: Callable[[], None],
    ) -> WrittenPart:
        began, on_bytes = time.monotonic(), self.flow.add
        written = await write_part(store, snapshot, numbers=numbers, reason=reason, on_bytes=on_bytes, check=check)
        self._learn_sink(snapshot.layout.arrangement.data_size, time.monotonic() - began)
        return written

    def _decide(self, store: Store, nbytes: int) -> bool:
        """Return True to compress: always, never, or if the tier is slower than encoding."""
        if self.policy.compression != "auto":
            return self.policy.compression == "zstd"
        if nbytes < LITTLE:
            return False
        if self.sink is None:
            self.compressing = store.remote  # the default until measured; a local disk is measured first
        else:
            slow = STILL_FASTER if self.compressing else FASTER
            self.compressing = self.sink < slow * self.rate * min(self.threads, self.idle())
        return self.compressing

    def worth(self, store: Store, source: InStore, layout: Layout, previous: Previous | None) -> bool:
        """Return True if raw bytes of another store should be encoded again here, instead of copied as files."""
        if self._decide(store, layout.arrangement.data_size):
            return True
        return bool((plan_blobs(layout, source.digests, previous).taken >= 0).any())

    @property
    def uses_bases(self) -> bool:
        """Return True if deltas were useful, or have not been tried."""
        return not self.sampled or any(learnt.form == "delta" for learnt in self.kinds.values())

    async def _shares(self, source: InMemory, previous: Previous | None) -> bool:
        """Return True if enough chunks are unchanged, judging by a few samples."""
        if previous is None:
            return False
        rows = previous.rows(source.layout)
        there = np.flatnonzero(rows >= 0)
        some = there[:: max(1, len(there) // SHARING_PROBES)].tolist()

        def probe() -> bool:
            alike = [blob_digest(source.peek(b)) == previous.table.digest[rows[b]].tobytes() for b in some]
            return _is_enough(source.layout, some, alike)

        return await asyncio.to_thread(probe)

    def _learn_sink(self, nbytes: int, seconds: float) -> None:
        if nbytes >= MEASURED and seconds > 0:
            self.sink = _mixed(self.sink, nbytes / seconds)

    def learn(self, stored: int, upload_s: float, plain: int, encode_s: float) -> None:
        """Record speeds. `upload_s`: time with writes in flight; `encode_s`: sum over all threads."""
        self._learn_sink(stored, upload_s)
        if plain >= MEASURED and encode_s > 0:
            self.rate = _mixed(self.rate, plain / encode_s)


def _is_enough(layout: Layout, blobs: Sequence[int], alike: Sequence[bool]) -> bool:
    sizes = [layout.arrangement.blobs[b].length for b in blobs]
    share = sum(n for n, same in zip(sizes, alike, strict=True) if same) / max(1, sum(sizes))
    return bool(share > WORTH and share * layout.arrangement.data_size > LEAST)


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else (1 - LEARN) * old + LEARN * new
