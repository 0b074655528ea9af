"""A checkpoint of a run as an origin. Every byte is verified, and damaged chunks are read from another copy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np
from msgspec import structs

from ckpt.core.checkpoint import read
from ckpt.core.checkpoint.read import Sink
from ckpt.core.checkpoint.reference import Which
from ckpt.core.format.columns import I64
from ckpt.core.format.kernels import Room, address_of
from ckpt.core.format.saved_state import Key, SavedState
from ckpt.core.format.table import Table
from ckpt.core.format.values import SHARED_KINDS, show
from ckpt.core.log.records import Commit
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CorruptError
from ckpt.tools.convert.source import Assembly, Origin, OriginEntry, RankView, Want, canonical_names
from ckpt.tools.describe import Entries, entries_of

DCP = "dcp"  # kind of the only entry in a checkpoint that torch's DCP saved (`ckpt.dcp`)
MOST_ROWS = 1 << 19  # maximum rows of chunk tables that are kept for later reads
KEEP = 32 << 20  # maximum bytes of chunks that are kept because later reads probably need them


class RunOrigin:
    """A checkpoint of a run. `repaired`: texts about bytes that were read from another copy. `far`: requests are slow.

    `finite`: False if training had diverged. `others`: URLs with other copies of the run. With very many ranks, only
        the chunk tables that are needed are read, and kept for later reads.
    """

    def __init__(self, log: RunLog, commit: Commit, saved: SavedState, others: Sequence[str] = ()) -> None:
        url, checkpoint = log.store.url, commit.checkpoint
        self.saved, self.step, self.far, self.finite = saved, checkpoint.step, log.store.remote, commit.finite
        self.title = f"step {self.step} of {url}"
        self.identity = f"{url} {checkpoint}"
        self.parents = (f"{log.root}/{checkpoint}",)
        self.about: dict[str, Any] = {"url": url, "step": self.step, "id": str(checkpoint)}
        self._labels = {key: label for label, key in reversed(saved.labels.items())}  # main names only
        self.keys = {label: key for key, label in sorted(self._labels.items())}
        self.names = {label: self._labels[key] for label, key in saved.labels.items()}
        self.tensors = {label: self.saved.tensors[key].spec for label, key in self.keys.items()}
        self.repaired: list[str] = []
        self.keep = KEEP
        self._kept: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._log, self._checkpoint, self._others = log, checkpoint, others
        self._ranks: frozenset[int] = frozenset()  # ranks whose chunk tables are in `_narrowed`
        self._narrowed = saved
        self._has: Set[Key] = frozenset()
        self._narrowing = threading.Lock()

    def plain(self, wanted: Callable[[str], bool] = lambda path: True) -> Entries:
        return entries_of(self.saved, wanted)

    def view(self, rank: int = 0, world: int = 1) -> RankView:
        """Assign values by the rules of a restore: a rank receives its own values. If there are more ranks than saved,
        the saved values are assigned in turn."""
        saved = self.saved
        entries = [OriginEntry(n.path, n.kind, n.facts, n.names, n.values) for n in saved.nodes(rank)]
        aliases = {name: of for e in entries for name in e.names if (of := saved.canonical(name, rank)) != name}
        tensors, own = dict[str, str](), list[str]()
        for name in canonical_names(entries, aliases):
            candidates = saved.instances(name)
            if not candidates:
                raise CorruptError(f"{self.title} refers to {name}, which it does not contain")
            if len(candidates) == 1 or saved.identical(name):
                tensors[name] = self._labels[name, candidates[0]]
                continue
            found = saved.resolve(name, rank, world, None, lenient=True)
            if isinstance(found, tuple):
                tensors[name] = self._labels[found]
            elif world == saved.world:
                continue  # these values belong to other ranks, and this rank saved none
            else:
                tensors[name] = self._labels[name, candidates[0]]
            own.append(name)
        kept = (structs.replace(e, names=tuple(n for n in e.names if aliases.get(n, n) in tensors)) for e in entries)
        aliases = {alias: name for alias, name in aliases.items() if name in tensors}
        return RankView(tuple(kept), tensors, aliases, tuple(self._notes(own, world)), self.step)

    def _notes(self, own: list[str], world: int) -> list[str]:
        if self.saved.world == world:
            return []
        what = list(dict.fromkeys([*own, *self._apart()]))
        if not what:
            return []
        named = ", ".join([*what[:4], *(f"{len(what) - 4} more" for _ in what[4:5])])
        had = "had" if self.saved.complete else "may have had"
        if world == 1:
            return [f"ranks {had} different values of {named}: those of the lowest rank that has any are used"]
        return [
            f"ranks {had} different values of {named}: each of the {world} ranks gets those of one of the "
            f"{self.saved.world}, so ranks may draw the same random numbers, or read the same data. If that "
            "matters, restore from the run with a Checkpointer, which divides them again"
        ]

    def _apart(self) -> Iterator[str]:
        """Yield entries whose plain values differ between ranks. With very many ranks, yield those that may differ."""
        if self.saved.complete:
            yield from (p.partition(" (rank ")[0] for p in self.plain() if p.endswith(")") and " (rank " in p)
        else:  # comparing the values would need the manifests of all ranks
            components = (component for view in self.saved.views for component in view.components)
            yield from (show(tuple(c["path"])) for c in components if c["kind"] not in SHARED_KINDS)

    def same(self, label: str, other: Origin, theirs: str) -> bool:
        if not isinstance(other, RunOrigin):
            return False
        return self.saved.content(self.keys[label]) == other.saved.content(other.keys[theirs])

    async def read(self, wants: Sequence[Want]) -> None:
        """Fill the requests. Keep chunks that are only partly needed for later reads, up to `KEEP` bytes."""
        saved, assembly = await asyncio.to_thread(self.narrowed, [want.label for want in wants]), Assembly()
        table = saved.table
        for want in wants:
            for number in saved.tensors[self.keys[want.label]].shards:
                assembly.meet(number, table.shards[number].box, want)
        missing, kept = list[int](), list[int]()
        partly: set[int] = set()
        for number, low, high in assembly.runs():
            for chunk in table.chunks(number):
                start = int(saved.position[chunk])
                stop = start + int(table.length[chunk])
                if start < high and stop > low and assembly.needs(number, start, stop):
                    (kept if int(saved.numbers[chunk]) in self._kept else missing).append(chunk)
                    if start < low or stop > high:
                        partly.add(chunk)

        def add(chunk: int, data: memoryview) -> None:
            assembly.add(int(saved.shard_of_chunk[chunk]), int(saved.position[chunk]), data)
            if chunk in partly:
                self._keep(int(saved.numbers[chunk]), bytes(data))

        def place(chunk: int) -> int:
            start = int(saved.position[chunk])
            stop = start + int(table.length[chunk])
            found = None if chunk in partly else assembly.room(int(saved.shard_of_chunk[chunk]), start, stop)
            return 0 if found is None else address_of(found)

        def room(chunks: I64) -> I64:
            return np.array([place(chunk) for chunk in chunks.tolist()], np.int64)

        def again() -> None:
            for chunk in kept:
                data = self._kept[int(saved.numbers[chunk])]
                assembly.add(int(saved.shard_of_chunk[chunk]), int(saved.position[chunk]), memoryview(data))

        await asyncio.to_thread(again)
        if missing:
            await self.fetch(table, missing, add, room)

    def _keep(self, number: int, data: bytes) -> None:
        with self._lock:
            self._kept[number] = data
            held = sum(map(len, self._kept.values()))
            while held > self.keep:
                oldest = next(iter(self._kept))
                held -= len(self._kept.pop(oldest))

    async def unchanged(self) -> None:
        """Do nothing, because every byte was verified when it was read."""

    def narrowed(self, labels: Sequence[str]) -> SavedState:
        """Return the saved state with the complete chunk tables of these tensors."""
        if self.saved.complete:
            return self.saved
        with self._narrowing:
            wanted = {self.keys[label] for label in labels}
            if not wanted <= self._has:
                self._widen(wanted)
            return self._narrowed

    def _widen(self, wanted: Set[Key]) -> None:
        saved = self.saved
        ranks = frozenset(rank for key in wanted for rank in saved.holders(key).tolist())
        both = ranks | self._ranks
        if int(saved.index.columns["owned"][sorted(both)].sum()) <= MOST_ROWS:
            ranks = both
        there = np.zeros(saved.world, np.bool_)
        there[sorted(ranks)] = True
        has = {key: saved.tensors[key].spec.shape for key in saved.tensors if there[saved.holders(key)].all()}
        self._narrowed = saved.narrowed({key: [((0,) * len(shape), shape)] for key, shape in has.items()})
        self._ranks, self._has = ranks, has.keys()

    async def fetch(self, table: Table, chunks: Sequence[int], sink: Sink, room: Room) -> None:
        """Read verified chunks of a table. Pass each to `sink`, or read it into the memory that `room` returns."""
        await asyncio.to_thread(self._announce, table, chunks)
        try:
            found = await read.fetch_repaired(
                self._log.store, self._checkpoint, table, chunks, sink, self._others, room
            )
        except CorruptError as error:
            raise CorruptError(
                f"{error}. Give another location of the run (--from) or an older step (RUN@STEP), or see `ckpt repair`"
            ) from error
        self.repaired += found

    def _announce(self, table: Table, chunks: Sequence[int]) -> None:
        """Announce to the store which bytes of the same files will probably be read next."""
        soon = getattr(self._log.store, "soon", None)
        if soon is None:
            return
        files = table.file[list(chunks)]
        ends = table.offset[list(chunks)] + table.stored[list(chunks)]
        for file in np.unique(files).tolist():
            there = files == file
            soon(table.files[file], int(ends[there].max()), int(table.stored[list(chunks)][there].sum()))

    async def aclose(self) -> None:
        await self._log.store.aclose()


async def checkpoint_of(log: RunLog, step: Which, others: Sequence[str] = ()) -> Origin:
    """Return a checkpoint of an open run, by default the newest. A checkpoint that torch's DCP saved is converted to
    entries of this library."""
    repaired: list[str] = []
    commit, saved = await read.saved_of(log, step, others, repaired.append)
    run = RunOrigin(log, commit, saved, others)
    run.repaired = repaired
    if {one["kind"] for view in run.saved.views for one in view.components} != {DCP}:
        return run
    from ckpt.tools.convert.source_dcp_run import untangled  # imported here, because it needs torch

    return await untangled(run)
