"""Encodes one snapshot: finds what is new in it, chooses how to store each chunk, and writes data files.

digests -> plan -> forms, by samples -> encoding in threads, one window at a time -> data files -> table -> manifest
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpt.core.checkpoint.byte_source import Bases, ByteSource, Peek
from ckpt.core.checkpoint.incremental import BlobPlan, Digests, Previous, kind_of, plan_blobs
from ckpt.core.checkpoint.packs import Encoded, Packer, pack_size, table_of
from ckpt.core.checkpoint.write import RankSnapshot, WrittenPart, digest_blobs, finish_part
from ckpt.core.format import codec
from ckpt.core.format.codec import DELTA, PLANES, RAW
from ckpt.core.format.digest import DIGEST_SIZE, blob_digest
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import owner
from ckpt.core.log.log import RunLog
from ckpt.errors import SaveError
from ckpt.store import Store

if TYPE_CHECKING:
    from ckpt.core.checkpoint.encode import Encoder

SMALL = 4096  # bytes; smaller chunks are stored raw
WINDOW = 32 << 20  # plain bytes whose bases are in memory at the same time
PROBES = 5  # sampled chunks of each kind
WORTH, LEAST = 0.1, 256 << 10  # share, bytes: a smaller saving is not worth a dependency on another checkpoint
SELF_CHECK = 16  # one of this many encoded chunks is decoded again as a check
# relative size from which on chunks are stored raw; the second value applies if they were encoded before
WHOLE, WHOLE_AGAIN = 0.95, 0.97
BASE, BASE_AGAIN = 0.85, 0.9  # size relative to the size without a base, from which on a base is not used


@dataclass(slots=True)
class Learnt:
    """The encodings to try for chunks of one kind: none ("raw"), planes ("whole"), or also a base ("delta")."""

    whole: float = 0.8  # stored / plain size without a base
    form: str = "whole"

    def choose(self, whole: Sequence[float], gains: Sequence[float]) -> str:
        """Choose by new samples. The former choice stays if it is nearly as good.

        `gains`: sizes with a base relative to sizes without. The best sample decides: one idle expert among busy ones
            is reason enough to try a base for all of them.
        """
        self.whole = _mean(whole)
        limit = WHOLE_AGAIN if self.form != "raw" else WHOLE
        if gains and min(gains) < (BASE_AGAIN if self.form == "delta" else BASE):
            self.form = "delta"
        else:
            self.form = "whole" if self.whole < limit else "raw"
        return self.form


class PartEncoder:
    """Encodes one rank's snapshot for one tier."""

    def __init__(
        self,
        encoder: Encoder,
        store: Store,
        snapshot: RankSnapshot,
        source: ByteSource,
        previous: Previous | None,
        numbers: Iterator[int],
        bases: Bases,
        compress: bool,
        log: RunLog | None,
    ) -> None:
        self.encoder, self.store, self.snapshot, self.source = encoder, store, snapshot, source
        self.previous, self.numbers, self.bases, self.compress = previous, numbers, bases, compress
        self.log = log
        self.layout = snapshot.layout
        self.blobs = self.layout.arrangement.blobs
        self.digests: Digests
        self.plan: BlobPlan  # how each chunk is stored
        self.forms: dict[str, str] = {}
        self.encode_s, self.plain = 0.0, 0

    async def run(self, reason: str, check: Callable[[], None]) -> WrittenPart:
        digests = self.source.digests
        if digests is None:
            digests = await asyncio.to_thread(_digests, self.layout, self.snapshot.data)
        self.digests = digests
        await self._plan()
        packer = await self._packed(check)
        self.encoder.learn(packer.nbytes, packer.busy_s, self.plain, self.encode_s)
        table, packs = table_of(self.layout, self.plan, digests, self.previous, packer)
        built_on = any(owner(pack.key) != self.snapshot.attempt for pack in packs)
        return await finish_part(
            self.store,
            self.snapshot,
            table,
            packs,
            reason=reason,
            base=self.previous if built_on else None,
            check=check,
        )

    async def _plan(self) -> None:
        self.plan = plan_blobs(self.layout, self.digests, self.previous)
        if self.compress:
            await self._choose()
        if not self._any_delta():
            self.plan.base[:] = -1
            if self.previous is not None and not self._worth():
                self._build_on_nothing()
        builds = ((self.plan.taken >= 0) | (self.plan.base >= 0)).any()
        if self.previous is not None and self.log is not None and builds:
            await self.log.refresh()
            if self.previous.attempt not in self.log.state.commits:
                self._build_on_nothing()

    def _build_on_nothing(self) -> None:
        self.previous, self.plan = None, plan_blobs(self.layout, self.digests, None)

    async def _packed(self, check: Callable[[], None]) -> Packer:
        """Write all chunks that must be stored into data files."""
        todo = self.plan.anew
        anew = sum(self.blobs[blob].length for blob in todo)
        self.encoder.flow.expect(anew)
        packer = Packer(self.store, self.snapshot, self.numbers, pack_size(anew), self.encoder.flow.add)
        try:
            with ThreadPoolExecutor(self.encoder.threads, "ckpt-encode") as pool:
                async with contextlib.aclosing(self._encoded(pool, todo)) as found:
                    async for encoded in found:
                        await packer.add(encoded)
            await packer.finish()
            check()
        except BaseException:
            await packer.abort()
            raise
        return packer

    def _worth(self) -> bool:
        """Return True if enough chunks need not be stored again."""
        taken = sum(self.blobs[blob].length for blob in np.flatnonzero(self.plan.taken >= 0))
        return bool(taken > max(LEAST, WORTH * self.layout.arrangement.data_size))

    # -- the form for each kind of chunk --

    async def _choose(self) -> None:
        """Choose how chunks of each kind are stored, from a few samples of each kind."""
        kinds: dict[str, list[int]] = {}
        for blob in self.plan.anew:
            if self.blobs[blob].length >= SMALL:
                kinds.setdefault(kind_of(self._tensor(blob)), []).append(blob)
        probes = {kind: _spread(blobs) for kind, blobs in kinds.items()}
        wanted = sorted({blob for blobs in probes.values() for blob in blobs})
        whole, gains = dict[int, float](), dict[int, float]()
        for window in self._windows(wanted):
            peek, bases = await self._load(window)
            await asyncio.to_thread(self._sample, window, peek, bases, whole, gains)
        self.encoder.sampled |= bool(gains)
        for kind, blobs in probes.items():
            learnt = self.encoder.kinds.setdefault(kind, Learnt())
            self.forms[kind] = learnt.choose([whole[b] for b in blobs], [gains[b] for b in blobs if b in gains])

    def _sample(
        self,
        blobs: list[int],
        peek: Peek,
        bases: dict[int, memoryview],
        whole: dict[int, float],
        gains: dict[int, float],
    ) -> None:
        """Estimate the size of each sample. `gains`: the size with a base, relative to the size without."""
        for blob in blobs:
            dtype, plain, base = self._tensor(blob).dtype, peek(blob), bases.get(int(self.plan.base[blob]))
            word = codec.word_of(dtype)
            whole[blob] = codec.estimate(PLANES, plain, word)
            if base is not None:
                gains[blob] = codec.estimate(DELTA, plain, word, base) / min(whole[blob], 1.0)

    def _any_delta(self) -> bool:
        return "delta" in self.forms.values()

    def _tensor(self, blob: int) -> TensorSpec:
        return self.layout.tensors[self.blobs[blob].tensor]

    # -- encoding --

    def _windows(self, blobs: Sequence[int]) -> Iterator[list[int]]:
        window: list[int] = []
        nbytes = 0
        for blob in blobs:
            if window and nbytes + self.blobs[blob].length > WINDOW:
                yield window
                window, nbytes = [], 0
            window.append(blob)
            nbytes += self.blobs[blob].length
        if window:
            yield window

    async def _load(self, window: Sequence[int]) -> tuple[Peek, dict[int, memoryview]]:
        peek = await self.source.load(window)
        base = self.plan.base
        rows = sorted({int(base[b]) for b in window if base[b] >= 0 and self._form(b) in ("delta", "")})
        bases = await self.bases(self.previous, rows) if self.previous is not None and rows else {}
        return peek, bases

    def _form(self, blob: int) -> str:
        """Return the form that was chosen for a chunk, "" before any was chosen."""
        if not self.compress:
            return "raw"
        return self.forms.get(kind_of(self._tensor(blob)), "")

    async def _encoded(self, pool: ThreadPoolExecutor, todo: Sequence[int]) -> AsyncGenerator[Encoded, None]:
        """Yield the encoded chunks in order. The next window is loaded while one is encoded."""
        loop = asyncio.get_running_loop()
        windows = list(self._windows(todo))
        loading = asyncio.ensure_future(self._load(windows[0])) if windows else None
        for i, window in enumerate(windows):
            assert loading is not None
            peek, bases = await loading
            loading = asyncio.ensure_future(self._load(windows[i + 1])) if i + 1 < len(windows) else None
            tasks = [loop.run_in_executor(pool, self._encode, blob, peek, bases) for blob in window]
            try:
                for task in tasks:
                    encoded, seconds = await task
                    if encoded.codec != RAW:
                        self.encode_s += seconds
                        self.plain += self.blobs[encoded.blob].length
                    yield encoded
            except BaseException:
                await asyncio.gather(*tasks, *([loading] if loading else []), return_exceptions=True)
                raise

    def _encode(self, blob: int, peek: Peek, bases: dict[int, memoryview]) -> tuple[Encoded, float]:
        """Encode a chunk in the form chosen for its kind, unless another form is smaller. Runs in a thread."""
        began, plain = time.perf_counter(), peek(blob)
        encoded = self._smallest(blob, plain, bases)
        if encoded.codec != RAW and blob % SELF_CHECK == 0:
            self._prove(encoded, plain, bases)
        self.encoder.pace(time.perf_counter() - began)
        return encoded, time.perf_counter() - began

    def _smallest(self, blob: int, plain: memoryview, bases: dict[int, memoryview]) -> Encoded:
        raw = Encoded(blob, RAW, plain)
        if not self.compress or len(plain) < SMALL:
            return raw
        tensor = self._tensor(blob)
        word, kind, row = codec.word_of(tensor.dtype), kind_of(tensor), int(self.plan.base[blob])
        form, base = self.forms.get(kind, "whole"), bases.get(row)
        if form == "delta" and base is not None:
            with_base = codec.estimate(DELTA, plain, word, base)
            if with_base < BASE_AGAIN * min(codec.estimate(PLANES, plain, word), 1.0):
                data = codec.encode(DELTA, plain, word, base)
                return Encoded(blob, DELTA, data, row) if len(data) < WHOLE_AGAIN * len(plain) else raw
        if form == "raw":
            return raw
        data = codec.encode(PLANES, plain, word)
        return Encoded(blob, PLANES, data) if len(data) < WHOLE_AGAIN * len(plain) else raw

    def _prove(self, encoded: Encoded, plain: memoryview, bases: dict[int, memoryview]) -> None:
        """Raise SaveError if an encoded chunk cannot be decoded, because of a faulty machine or a bug."""
        room = memoryview(bytearray(len(plain)))
        codec.decode(encoded.codec, encoded.data, len(plain), bases.get(encoded.base), room)
        if blob_digest(room) != self.digests[encoded.blob].tobytes():
            name = self._tensor(encoded.blob).name
            raise SaveError(
                f"{name} does not decode to the saved bytes: they changed during the save, or the machine is faulty"
            )


def _digests(layout: Layout, data: memoryview) -> Digests:
    return np.frombuffer(digest_blobs(layout, data), np.uint8).reshape(-1, DIGEST_SIZE)


def _spread(blobs: Sequence[int]) -> list[int]:
    """Return a few of these chunks, evenly spaced."""
    return list(dict.fromkeys(blobs[i * (len(blobs) - 1) // max(1, PROBES - 1)] for i in range(PROBES)))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
