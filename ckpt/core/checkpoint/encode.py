"""A snapshot becomes an increment, or is stored smaller: what a place does with blobs before they are written.

    Encoder.write:  which checkpoint to build on -> digests -> plan -> encode -> packs -> table -> part

An `Encoder` belongs to one place and one rank, and remembers what it has learnt: how fast the place takes bytes, how
fast they are encoded here, and what becomes of tensors of each kind. Where nothing can be shared and nothing is
compressed, a snapshot goes the quick way, as one raw pack (`ckpt.core.checkpoint.write.write_part`).
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

LITTLE = 4 << 20  # bytes of a part, below which "auto" does not compress: there is no time to be won
SHARING_PROBES = 32
FASTER, STILL_FASTER = 0.7, 1.0  # of the speed of encoding, up to which a place counts as slow
ENCODED_A_SECOND = 600e6  # bytes, by one thread, until it has been measured
REMEMBERED = 4  # tables of checkpoints that we have written ourselves
MEASURED = 16 << 20  # bytes; less says little about a speed
LEARN = 0.3  # how much the newest measurement counts


@dataclass
class Encoder:
    """How one place stores the blobs of one rank.

    `threads`: that encode; `pace`: called between two blobs in each of them, and may sleep; `idle()`: cores that nobody
    has used of late.
    """

    policy: Policy = field(default_factory=Policy)
    threads: int = 1
    pace: Callable[[float], None] = lambda seconds: None
    idle: Callable[[], float] = lambda: float("inf")
    flow: UploadStats = field(default_factory=UploadStats)  # what is on its way, for those who watch
    distrusted: Attempt | None = None  # nothing up to this one is built on, because some of it is damaged or gone
    sink: float | None = None  # bytes a second that the place takes
    rate: float = ENCODED_A_SECOND  # of one thread
    kinds: dict[str, Learnt] = field(default_factory=dict)
    compressing: bool = False
    sampled: bool = False  # whether deltas have ever been tried
    _written: dict[tuple[Attempt, int], WrittenPart] = field(default_factory=dict)

    # -- what to build on --

    async def previous(self, log: RunLog, attempt: Attempt, layout: Layout) -> Previous | None:
        """This rank's share of the newest checkpoint here; None if it has to be a full one."""
        if not self.policy.incremental:
            return None
        history = [c for c in log.state.lineage() if c.attempt < attempt]
        newest = history[0] if history else None
        mine = next((p for p in newest.parts if p[0] == layout.rank), None) if newest is not None else None
        if newest is None or mine is None or newest.world != layout.world:
            return None
        if self.distrusted is not None and newest.attempt <= self.distrusted:
            return None
        try:
            written = self._written.get((newest.attempt, layout.rank))
            if written is None or not vouches(log.state, written):  # another writer's was committed
                written = await load_part(log.store, newest.attempt, layout.rank, expected=mine[1])
        except (CorruptError, FormatError, StoreError) as error:
            logger.warning("step %d of %s is not built on: %s", newest.step, log.store.url, error)
            return None
        if self.policy.full(log.state, attempt, written.part.chain):
            return None
        return Previous(written.part, written.table)

    def distrust(self, attempt: Attempt) -> None:
        """Build on no attempt up to this one: the next checkpoint is full."""
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
        """Store one rank's share of an attempt; see `ckpt.core.checkpoint.write.write_part`.

        `log`: of the place. It is read again before anything is built on `previous`, which may have been given up.
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
        """Whether to compress: always, never, or where the place is slower than encoding."""
        if self.policy.compression != "auto":
            return self.policy.compression == "zstd"
        if nbytes < LITTLE:
            return False
        if self.sink is None:
            self.compressing = store.remote  # as a rule; a local disk is measured first
        else:
            slow = STILL_FASTER if self.compressing else FASTER
            self.compressing = self.sink < slow * self.rate * min(self.threads, self.idle())
        return self.compressing

    def worth(self, store: Store, source: InStore, layout: Layout, previous: Previous | None) -> bool:
        """Whether what lies in another store, raw, should be stored otherwise here than as a copy of its files."""
        if self._decide(store, layout.arrangement.data_size):
            return True
        return bool((plan_blobs(layout, source.digests, previous).taken >= 0).any())

    @property
    def uses_bases(self) -> bool:
        """Whether deltas were worth it, as far as anybody knows: at first they may be."""
        return not self.sampled or any(learnt.form == "delta" for learnt in self.kinds.values())

    async def _shares(self, source: InMemory, previous: Previous | None) -> bool:
        """Whether enough is what it was, going by a few blobs."""
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
        """`upload_s`: while anything was on its way; `encode_s`: of all threads together."""
        self._learn_sink(stored, upload_s)
        if plain >= MEASURED and encode_s > 0:
            self.rate = _mixed(self.rate, plain / encode_s)


def _is_enough(layout: Layout, blobs: Sequence[int], alike: Sequence[bool]) -> bool:
    sizes = [layout.arrangement.blobs[b].length for b in blobs]
    share = sum(n for n, same in zip(sizes, alike, strict=True) if same) / max(1, sum(sizes))
    return bool(share > WORTH and share * layout.arrangement.data_size > LEAST)


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else (1 - LEARN) * old + LEARN * new
