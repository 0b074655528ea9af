"""A checkpoint of a run as an origin: verified, and what is damaged in it comes from wherever else it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np

from ckpt import mend
from ckpt.compare import Entries, entries_of, tensors_of
from ckpt.errors import CorruptError, MismatchError
from ckpt.log import RunLog
from ckpt.origin import Assembly, Entry, Origin, View, Want, canonical_names
from ckpt.read import Manifest
from ckpt.saved import Ambiguous, Key, Saved

KEEP = 32 << 20  # bytes of pieces that the next readings are likely to want the rest of


class RunOrigin:
    """`others`: URLs of places that may have what is damaged here. `repaired`: what came from elsewhere, in words."""

    def __init__(self, log: RunLog, manifest: Manifest, others: Sequence[str] = ()) -> None:
        self.manifest, self.saved, self.step = manifest, manifest.saved(), manifest.commit.step
        self.title = f"step {self.step} of {log.store.url}"
        self.identity = f"{log.store.url} {manifest.attempt}"
        self.about = {"url": log.store.url, "step": self.step, "attempt": str(manifest.attempt)}
        self.far = log.store.remote
        self.finite = manifest.commit.finite
        self.keys = _labels(self.saved)
        self.names = {t.name: t.alias_of or t.name for t in tensors_of(self.saved).values()}
        self.tensors = {label: self.saved.tensors[key].spec for label, key in self.keys.items()}
        self.repaired: list[str] = []
        self._log, self._others = log, others
        self.keep = KEEP
        self._kept: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def plain(self) -> Entries:
        return entries_of(self.manifest)

    def view(self, rank: int = 0, world: int = 1) -> View:
        """By the rules of a restore: a rank takes its own values if there are any, and in turn if there are more."""
        saved, labels = self.saved, {key: label for label, key in self.keys.items()}
        entries = tuple(Entry(n.path, n.kind, n.facts, n.names, n.values) for n in saved.nodes(rank))
        aliases = {name: of for e in entries for name in e.names if (of := saved.canonical(name, rank)) != name}
        tensors, own = dict[str, str](), list[str]()
        for name in canonical_names(entries, aliases):
            found = saved.resolve(name, rank, world, None, lenient=True)
            if found is None:
                raise CorruptError(f"{self.title} refers to {name}, which it does not hold")
            if isinstance(found, Ambiguous):
                ranks = ", ".join(map(str, found.ranks[:8]))
                raise MismatchError(
                    f"{name} was saved by ranks {ranks} with values of their own, which differ: it is not clear which "
                    f"rank {rank} of {world} should take. Leave it out with --only"
                )
            if len(saved.instances(name)) > 1 and found[1] >= 0 and not saved.identical(name):
                own.append(name)
            tensors[name] = labels[found] if found in labels else labels[_twin(saved, found, labels)]
        return View(entries, tensors, aliases, tuple(self._notes(own, rank, world)), self.step)

    def _notes(self, own: list[str], rank: int, world: int) -> list[str]:
        if self.saved.world == world or not (own or self._apart()):
            return []
        what = [*own[:3], *(f"{len(own) - 3} more tensors" for _ in own[3:4]), *self._apart()[:3]]
        return [f"ranks have values of their own of {', '.join(what)}: rank {rank} takes those of rank "
                f"{self.saved.mapped(rank)}"]  # fmt: skip

    def _apart(self) -> list[str]:
        """The entries of which ranks have plain values of their own."""
        return [path.partition(" (rank ")[0] for path in self.plain() if path.endswith(")") and " (rank " in path]

    def same(self, label: str, other: Origin, theirs: str) -> bool:
        if not isinstance(other, RunOrigin):
            return False
        return self.saved.content(self.keys[label]) == other.saved.content(other.keys[theirs])

    async def read(self, wants: Sequence[Want]) -> None:
        """Pieces of which only a part is wanted are kept for the next readings, within bounds."""
        saved, table, assembly = self.saved, self.saved.table, Assembly()
        for want in wants:
            for number in saved.tensors[self.keys[want.label]].shards:
                assembly.meet(number, table.shards[number].box, want)
        missing, kept = list[int](), list[int]()
        partly: set[int] = set()
        for number, low, high in assembly.runs():
            for blob in table.blobs(number):
                start = int(saved.position[blob])
                stop = start + int(table.length[blob])
                if start < high and stop > low and assembly.needs(number, start, stop):
                    (kept if blob in self._kept else missing).append(blob)
                    if start < low or stop > high:
                        partly.add(blob)

        def add(blob: int, data: memoryview) -> None:
            assembly.add(int(saved.shard_of_blob[blob]), int(saved.position[blob]), data)
            if blob in partly:
                self._keep(blob, bytes(data))

        def room(blob: int) -> memoryview | None:
            start = int(saved.position[blob])
            stop = start + int(table.length[blob])
            return None if blob in partly else assembly.room(int(saved.shard_of_blob[blob]), start, stop)

        def again() -> None:
            for blob in kept:
                assembly.add(int(saved.shard_of_blob[blob]), int(saved.position[blob]), memoryview(self._kept[blob]))

        await asyncio.to_thread(again)
        if missing:
            await asyncio.to_thread(self._announce, missing)
            store, attempt = self._log.store, self.manifest.attempt
            mended = await mend.fetch(store, attempt, table, missing, add, self._others, room)
            self.repaired += mended.repaired

    def _keep(self, blob: int, data: bytes) -> None:
        with self._lock:
            self._kept[blob] = data
            held = sum(map(len, self._kept.values()))
            while held > self.keep:
                oldest = next(iter(self._kept))
                held -= len(self._kept.pop(oldest))

    def _announce(self, blobs: Sequence[int]) -> None:
        """What follows in the same files is likely to be wanted next."""
        soon, table = getattr(self._log.store, "soon", None), self.saved.table
        if soon is None:
            return
        packs = table.pack[list(blobs)]
        ends = table.offset[list(blobs)] + table.stored[list(blobs)]
        for pack in np.unique(packs).tolist():
            there = packs == pack
            soon(table.packs[pack], int(ends[there].max()), int(table.stored[list(blobs)][there].sum()))

    async def aclose(self) -> None:
        await self._log.store.aclose()


def _labels(saved: Saved) -> dict[str, Key]:
    """Every tensor once, by the name that it is stored under: `name#rank` where ranks have different ones."""
    found: dict[str, Key] = {}
    for label, key in saved.labels.items():
        if label.partition("#")[0] == key[0] or label == key[0]:
            found.setdefault(label, key)
    return found


def _twin(saved: Saved, key: Key, labels: dict[Key, str]) -> Key:
    """Of several instances that hold the same, the one that has a label."""
    return next(other for other in labels if other[0] == key[0] and saved.same(other, key))
