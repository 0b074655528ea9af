"""Stores a snapshot in a tier, as an increment or compressed if that helps.

    Encoder.write:  choose a checkpoint to build on -> digests -> plan -> forms, by samples -> encode in threads, one
                    window at a time -> data files -> table -> manifest

An `Encoder` belongs to one tier and one rank. It remembers how fast the tier takes bytes, how fast this machine encodes
them, and which form suits each kind of tensor. An `Encoding` is the work on one snapshot. If no chunk can be shared and
none is compressed, the snapshot is written directly as one raw data file (`ckpt.core.checkpoint.write.write_part`).
`UploadStats` counts the progress and the totals of the tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ckpt.core.checkpoint.commits import vouches
from ckpt.core.checkpoint.incremental import (
    Bases,
    ByteSource,
    Digests,
    InMemory,
    InStore,
    Peek,
    Policy,
    kind_of,
    no_bases,
    plan_chunks,
)
from ckpt.core.checkpoint.manifests import load_manifest
from ckpt.core.checkpoint.write import (
    DataFileWriter,
    Encoded,
    RankSnapshot,
    WrittenManifest,
    digest_chunks,
    file_size,
    finish_manifest,
    table_of,
    write_part,
)
from ckpt.core.format import codec
from ckpt.core.format.codec import DELTA, PLANES, RAW
from ckpt.core.format.digest import DIGEST_SIZE, chunk_digest
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import CheckpointId, owner
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CorruptError, FormatError, SaveError, SkippedError, StoreError
from ckpt.events import log as logger
from ckpt.store import Store

MOST_TEXT = 300  # maximum characters of an error that is kept


@dataclass(slots=True)
class UploadStats:
    """The progress and totals of a tier, to which one checkpoint at a time is written. Sizes are in bytes.

    `step`: step of the checkpoint that is being written, None if there is none. `total`: bytes of its state that must
    be stored. `done`: bytes that have arrived. `began`: time at which the write began. `moved`: time at which bytes
    last arrived. Both are by the monotonic clock. `rate`: bytes of state a second of the last write. `saves`: number of
    committed checkpoints. `failed`: number of failed checkpoints. `left_out`: number of checkpoints that were skipped
    because the tier was too slow. `raw`: bytes of all committed states. `stored`: bytes written for them. `error`: last
    error, "" after a success.
    """

    step: int | None = None
    done: int = 0
    total: int = 0
    began: float = 0.0
    moved: float = 0.0
    rate: float = 0.0
    saves: int = 0
    failed: int = 0
    left_out: int = 0
    raw: int = 0
    stored: int = 0
    error: str = ""

    @contextlib.contextmanager
    def writing(self, step: int, total: int) -> Iterator[None]:
        """Track the write of a state of `total` bytes, which the `with` block performs."""
        self.step, self.done, self.total, self.began = step, 0, total, time.monotonic()
        try:
            yield
            self.rate = self.speed
        finally:
            self.step = None

    def expect(self, total: int) -> None:
        """Set the number of bytes that must be stored. The tier already has the other bytes."""
        self.total = total

    def add(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        self.done += nbytes
        self.moved = time.monotonic()

    @property
    def speed(self) -> float:
        """Return the speed of the present write, in bytes of state a second."""
        return self.done / max(time.monotonic() - self.began, 1e-6)

    def committed(self, raw: int, stored: int) -> None:
        """Count a committed checkpoint."""
        self.saves += 1
        self.raw += raw
        self.stored += stored
        self.error = ""

    def fail(self, error: BaseException) -> None:
        """Count a failed or skipped checkpoint."""
        if isinstance(error, SkippedError):
            self.left_out += 1
        else:
            self.failed += 1
        self.error = (str(error) or type(error).__name__)[:MOST_TEXT]


# -- store a snapshot in a tier --


LITTLE = 4 << 20  # states smaller than this number of bytes are not compressed by "auto", because it would save no time
SHARING_PROBES = 32
FASTER, STILL_FASTER = 0.7, 1.0  # compress below this ratio of tier to encoding speed; second: if compressing now
ENCODED_A_SECOND = 600e6  # bytes that one thread encodes a second, until this is measured
REMEMBERED = 4  # number of manifests of this writer to remember
MEASURED = 16 << 20  # minimum bytes for a reliable measurement of a speed
LEARN = 0.3  # weight of the newest measurement


@dataclass
class Encoder:
    """Stores one rank's chunks in one tier. `threads`: number of encoding threads. `pace`: function that each thread
    calls between two chunks, and that may sleep. `idle`: function that returns the number of recently idle cores."""

    policy: Policy = field(default_factory=Policy)
    threads: int = 1
    pace: Callable[[float], None] = lambda seconds: None
    idle: Callable[[], float] = lambda: float("inf")
    flow: UploadStats = field(default_factory=UploadStats)  # progress of the present save, for monitoring
    distrusted: CheckpointId | None = None  # do not build on this checkpoint or older ones, because of damage
    sink: float | None = None  # bytes a second that the tier takes
    rate: float = ENCODED_A_SECOND  # bytes a second that one thread encodes
    kinds: dict[str, Learnt] = field(default_factory=dict)
    compressing: bool = False
    sampled: bool = False  # True if deltas have been tried
    _written: dict[tuple[CheckpointId, int], WrittenManifest] = field(default_factory=dict)

    # -- the checkpoint to build on --

    async def previous(self, log: RunLog, checkpoint: CheckpointId, layout: Layout) -> WrittenManifest | None:
        """Return this rank's manifest of the newest checkpoint in this tier, or None if the next one must be full."""
        if not self.policy.incremental:
            return None
        history = [c for c in log.state.lineage() if c.checkpoint < checkpoint]
        newest = history[0] if history else None
        entry = next((p for p in newest.manifests if p[0] == layout.rank), None) if newest is not None else None
        if newest is None or entry is None or newest.world != layout.world:
            return None
        if self.distrusted is not None and newest.checkpoint <= self.distrusted:
            return None
        try:
            written = self._written.get((newest.checkpoint, layout.rank))
            if written is None or not vouches(log.state, written):  # or another writer's was committed
                written = await load_manifest(log.store, newest.checkpoint, layout.rank, expected=entry[1])
        except (CorruptError, FormatError, StoreError) as error:
            logger.warning(
                "cannot build on step %d of %s, so the next checkpoint is full: %s", newest.step, log.store.url, error
            )
            return None
        if self.policy.full(log.state, checkpoint, written.manifest.chain):
            return None
        return written

    def distrust(self, checkpoint: CheckpointId) -> None:
        """Build on no checkpoint up to this one, so that the next checkpoint is full."""
        self.distrusted = checkpoint if self.distrusted is None else max(checkpoint, self.distrusted)

    def remember(self, written: WrittenManifest) -> None:
        self._written[written.checkpoint, written.manifest.rank] = written
        for key in sorted(self._written)[:-REMEMBERED]:
            del self._written[key]

    # -- writing --

    async def write(
        self,
        store: Store,
        snapshot: RankSnapshot,
        source: ByteSource,
        previous: WrittenManifest | None,
        *,
        numbers: Iterator[int] | None = None,
        reason: str = "due",
        bases: Bases = no_bases,
        check: Callable[[], None] = lambda: None,
        log: RunLog | None = None,
    ) -> WrittenManifest:
        """Store one rank's files of a checkpoint; see `ckpt.core.checkpoint.write.write_part`.

        `log`: the log of the tier. It is refreshed before `previous` is used, which may have been retired.
        """
        compress = self._decide(store, snapshot.layout.arrangement.data_size)
        layout = snapshot.layout
        if isinstance(source, InMemory) and not compress and not await self._shares(source, previous):
            began, on_bytes = time.monotonic(), self.flow.add
            written = await write_part(store, snapshot, numbers=numbers, reason=reason, on_bytes=on_bytes, check=check)
            self._learn_sink(layout.arrangement.data_size, time.monotonic() - began)
        else:
            digests = source.digests
            if digests is None:
                raw = await asyncio.to_thread(digest_chunks, layout, snapshot.data)
                digests = np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_SIZE)
            work = Encoding(self, store, snapshot, source, digests, previous, bases, compress)
            written = await work.run(numbers or itertools.count(), reason, check, log)
        self.remember(written)
        return written

    def _decide(self, store: Store, nbytes: int) -> bool:
        """Return True to compress. "auto" compresses if the tier is slower than encoding."""
        if self.policy.compression != "auto":
            return self.policy.compression == "zstd"
        if nbytes < LITTLE:
            return False
        if self.sink is None:
            self.compressing = store.remote  # until measured, assume that a bucket is slow and a disk is fast
        else:
            slow = STILL_FASTER if self.compressing else FASTER
            self.compressing = self.sink < slow * self.rate * min(self.threads, self.idle())
        return self.compressing

    def worth(self, store: Store, source: InStore, layout: Layout, previous: WrittenManifest | None) -> bool:
        """Return True if raw bytes of another store should be encoded again for this tier, not copied as files."""
        if self._decide(store, layout.arrangement.data_size):
            return True
        return bool((plan_chunks(layout, source.digests, previous).taken >= 0).any())

    @property
    def uses_bases(self) -> bool:
        """Return True if deltas were useful or have not been tried yet."""
        return not self.sampled or any(learnt.form == "delta" for learnt in self.kinds.values())

    async def _shares(self, source: InMemory, previous: WrittenManifest | None) -> bool:
        """Return True if, according to a few samples, sharing unchanged chunks is worthwhile."""
        if previous is None:
            return False
        rows = previous.rows(source.layout)
        there = np.flatnonzero(rows >= 0)
        some = there[:: max(1, len(there) // SHARING_PROBES)].tolist()

        def probe() -> bool:
            alike = [chunk_digest(source.peek(b)) == previous.table.digest[rows[b]].tobytes() for b in some]
            return _is_enough(source.layout, some, alike)

        return await asyncio.to_thread(probe)

    def _learn_sink(self, nbytes: int, seconds: float) -> None:
        if nbytes >= MEASURED and seconds > 0:
            self.sink = _mixed(self.sink, nbytes / seconds)

    def learn(self, stored: int, upload_s: float, plain: int, encode_s: float) -> None:
        """Record speeds. `upload_s`: time with writes in flight. `encode_s`: encoding time of all threads."""
        self._learn_sink(stored, upload_s)
        if plain >= MEASURED and encode_s > 0:
            self.rate = _mixed(self.rate, plain / encode_s)


def _is_enough(layout: Layout, chunks: Sequence[int], alike: Sequence[bool]) -> bool:
    sizes = [layout.arrangement.chunks[b].length for b in chunks]
    share = sum(n for n, same in zip(sizes, alike, strict=True) if same) / max(1, sum(sizes))
    return bool(share > WORTH and share * layout.arrangement.data_size > LEAST)


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else (1 - LEARN) * old + LEARN * new


# -- encode its chunks --


SMALL = 4096  # smaller chunks are stored raw
WINDOW = 32 << 20  # plain bytes of the chunks whose bases are in memory at a time
PROBES = 5  # number of chunks of each kind that are sampled
WORTH, LEAST = 0.1, 256 << 10  # build on a checkpoint only if this saves more than both (fraction, bytes)
SELF_CHECK = 16  # one of this many encoded chunks is decoded as a check
# Chunks are stored raw if encoding leaves at least this fraction of their bytes. Second: if the kind is encoded now.
WHOLE, WHOLE_AGAIN = 0.95, 0.97
BASE, BASE_AGAIN = 0.85, 0.9  # no base if it leaves at least this fraction of the size without one; second: if in use


@dataclass(slots=True)
class Learnt:
    """The result of samples of one kind. `form`: "raw" (unchanged), "whole" (byte planes) or "delta" (also bases)."""

    whole: float = 0.8  # stored size without a base, relative to the plain size
    form: str = "whole"

    def choose(self, whole: Sequence[float], gains: Sequence[float]) -> str:
        """Choose the form from new samples. Keep the former form if it is nearly as good. `whole`: sizes without base.

        `gains`: sizes with a base, relative to sizes without one. The smallest of them decides, because a base that
        helps one idle expert is worth a try for the whole kind.
        """
        self.whole = math.fsum(whole) / len(whole)
        limit = WHOLE_AGAIN if self.form != "raw" else WHOLE
        if gains and min(gains) < (BASE_AGAIN if self.form == "delta" else BASE):
            self.form = "delta"
        else:
            self.form = "whole" if self.whole < limit else "raw"
        return self.form


@dataclass
class Encoding:
    """Encodes one rank's snapshot for one tier. `plan`: the source of each chunk. `forms`: the form of each kind."""

    encoder: Encoder
    store: Store
    snapshot: RankSnapshot
    source: ByteSource
    digests: Digests
    previous: WrittenManifest | None
    bases: Bases
    compress: bool
    forms: dict[str, str] = field(default_factory=dict)
    encode_s: float = 0.0
    plain: int = 0

    def __post_init__(self) -> None:
        self.layout = self.snapshot.layout
        self.chunks = self.layout.arrangement.chunks
        self.plan = plan_chunks(self.layout, self.digests, self.previous)

    async def run(
        self, numbers: Iterator[int], reason: str, check: Callable[[], None], log: RunLog | None
    ) -> WrittenManifest:
        """Plan, encode and store the snapshot; see `Encoder.write`."""
        if self.compress:
            await self._choose()
        if "delta" not in self.forms.values():
            self.plan.base[:] = -1
            taken = sum(self.chunks[chunk].length for chunk in np.flatnonzero(self.plan.taken >= 0))
            if taken <= max(LEAST, WORTH * self.layout.arrangement.data_size):
                self._build_on_nothing()
        if self.previous is not None and log is not None and ((self.plan.taken >= 0) | (self.plan.base >= 0)).any():
            await log.refresh()
            if self.previous.checkpoint not in log.state.commits:
                self._build_on_nothing()
        writer = await self._packed(numbers, check)
        self.encoder.learn(writer.nbytes, writer.busy_s, self.plain, self.encode_s)
        table, files = table_of(self.layout, self.plan, self.digests, self.previous, writer)
        built_on = any(owner(file.key) != self.snapshot.checkpoint for file in files)
        base = self.previous if built_on else None
        return await finish_manifest(self.store, self.snapshot, table, files, reason=reason, base=base, check=check)

    def _build_on_nothing(self) -> None:
        if self.previous is not None:
            self.previous, self.plan = None, plan_chunks(self.layout, self.digests, None)

    async def _packed(self, numbers: Iterator[int], check: Callable[[], None]) -> DataFileWriter:
        """Write the chunks that must be stored into data files."""
        todo = self.plan.anew
        anew = sum(self.chunks[chunk].length for chunk in todo)
        self.encoder.flow.expect(anew)
        writer = DataFileWriter(self.store, self.snapshot, numbers, file_size(anew), self.encoder.flow.add)
        try:
            with ThreadPoolExecutor(self.encoder.threads, "ckpt-encode") as pool:
                async with contextlib.aclosing(self._encoded(pool, todo)) as found:
                    async for encoded in found:
                        await writer.add(encoded)
            await writer.finish()
            check()
        except BaseException:
            await writer.abort()
            raise
        return writer

    # -- the form for each kind of chunk --

    async def _choose(self) -> None:
        """Choose the form of each kind of chunk, from a few samples of each kind."""
        kinds: dict[str, list[int]] = {}
        for chunk in self.plan.anew:
            if self.chunks[chunk].length >= SMALL:
                kinds.setdefault(kind_of(self._tensor(chunk)), []).append(chunk)
        probes = {kind: _spread(chunks) for kind, chunks in kinds.items()}
        wanted = sorted({chunk for chunks in probes.values() for chunk in chunks})
        whole, gains = dict[int, float](), dict[int, float]()
        for window in self._windows(wanted):
            peek, bases = await self._load(window)
            await asyncio.to_thread(self._sample, window, peek, bases, whole, gains)
        self.encoder.sampled |= bool(gains)
        for kind, chunks in probes.items():
            learnt = self.encoder.kinds.setdefault(kind, Learnt())
            self.forms[kind] = learnt.choose([whole[b] for b in chunks], [gains[b] for b in chunks if b in gains])

    def _sample(
        self,
        chunks: list[int],
        peek: Peek,
        bases: dict[int, memoryview],
        whole: dict[int, float],
        gains: dict[int, float],
    ) -> None:
        """Estimate the size of each sample. `gains`: sizes with a base, relative to the sizes without one."""
        for chunk in chunks:
            dtype, plain, base = self._tensor(chunk).dtype, peek(chunk), bases.get(int(self.plan.base[chunk]))
            word = codec.word_of(dtype)
            whole[chunk] = codec.estimate(PLANES, plain, word)
            if base is not None:
                gains[chunk] = codec.estimate(DELTA, plain, word, base) / min(whole[chunk], 1.0)

    def _tensor(self, chunk: int) -> TensorSpec:
        return self.layout.tensors[self.chunks[chunk].tensor]

    # -- encoding --

    def _windows(self, chunks: Sequence[int]) -> Iterator[list[int]]:
        window: list[int] = []
        nbytes = 0
        for chunk in chunks:
            if window and nbytes + self.chunks[chunk].length > WINDOW:
                yield window
                window, nbytes = [], 0
            window.append(chunk)
            nbytes += self.chunks[chunk].length
        if window:
            yield window

    async def _load(self, window: Sequence[int]) -> tuple[Peek, dict[int, memoryview]]:
        peek = await self.source.load(window)
        base = self.plan.base
        rows = sorted({int(base[b]) for b in window if base[b] >= 0 and self._form(b) in ("delta", "")})
        bases = await self.bases(self.previous, rows) if self.previous is not None and rows else {}
        return peek, bases

    def _form(self, chunk: int) -> str:
        """Return the form that was chosen for the kind of a chunk, or "" before a form was chosen."""
        if not self.compress:
            return "raw"
        return self.forms.get(kind_of(self._tensor(chunk)), "")

    async def _encoded(self, pool: ThreadPoolExecutor, todo: Sequence[int]) -> AsyncGenerator[Encoded, None]:
        """Yield the encoded chunks in order. While a window is encoded, the next one is loaded."""
        loop = asyncio.get_running_loop()
        windows = list(self._windows(todo))
        loading = asyncio.ensure_future(self._load(windows[0])) if windows else None
        for i, window in enumerate(windows):
            assert loading is not None
            peek, bases = await loading
            loading = asyncio.ensure_future(self._load(windows[i + 1])) if i + 1 < len(windows) else None
            tasks = [loop.run_in_executor(pool, self._encode, chunk, peek, bases) for chunk in window]
            try:
                for task in tasks:
                    encoded, seconds = await task
                    if encoded.codec != RAW:
                        self.encode_s += seconds
                        self.plain += self.chunks[encoded.chunk].length
                    yield encoded
            except BaseException:
                await asyncio.gather(*tasks, *([loading] if loading else []), return_exceptions=True)
                raise

    def _encode(self, chunk: int, peek: Peek, bases: dict[int, memoryview]) -> tuple[Encoded, float]:
        """Encode a chunk in the form of its kind, unless another form is smaller. Called in a thread."""
        began, plain = time.perf_counter(), peek(chunk)
        encoded = self._smallest(chunk, plain, bases)
        if encoded.codec != RAW and chunk % SELF_CHECK == 0:
            self._prove(encoded, plain, bases)
        self.encoder.pace(time.perf_counter() - began)
        return encoded, time.perf_counter() - began

    def _smallest(self, chunk: int, plain: memoryview, bases: dict[int, memoryview]) -> Encoded:
        raw = Encoded(chunk, RAW, plain)
        if not self.compress or len(plain) < SMALL:
            return raw
        tensor = self._tensor(chunk)
        word, kind, row = codec.word_of(tensor.dtype), kind_of(tensor), int(self.plan.base[chunk])
        form, base = self.forms.get(kind, "whole"), bases.get(row)
        if form == "delta" and base is not None:
            with_base = codec.estimate(DELTA, plain, word, base)
            if with_base < BASE_AGAIN * min(codec.estimate(PLANES, plain, word), 1.0):
                data = codec.encode(DELTA, plain, word, base)
                return Encoded(chunk, DELTA, data, row) if len(data) < WHOLE_AGAIN * len(plain) else raw
        if form == "raw":
            return raw
        data = codec.encode(PLANES, plain, word)
        return Encoded(chunk, PLANES, data) if len(data) < WHOLE_AGAIN * len(plain) else raw

    def _prove(self, encoded: Encoded, plain: memoryview, bases: dict[int, memoryview]) -> None:
        """Raise SaveError if an encoded chunk does not decode to its bytes, because of a faulty machine or a bug."""
        room = memoryview(bytearray(len(plain)))
        codec.decode(encoded.codec, encoded.data, len(plain), bases.get(encoded.base), room)
        if chunk_digest(room) != self.digests[encoded.chunk].tobytes():
            name = self._tensor(encoded.chunk).name
            raise SaveError(
                f"{name} does not decode to the saved bytes: they changed during the save, or the machine is faulty"
            )


def _spread(chunks: Sequence[int]) -> list[int]:
    """Return a few of these chunks, at even distances."""
    return list(dict.fromkeys(chunks[i * (len(chunks) - 1) // max(1, PROBES - 1)] for i in range(PROBES)))
