"""Tests of resharding: how ranks cut their shards, restores on any number of ranks, and agreement with torch.

Many ranks are simulated in one process, with the library's own functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt.core.checkpoint.commits import acquire, commit, create_run, index_of
from ckpt.core.checkpoint.write import RankSnapshot as ToWrite
from ckpt.core.checkpoint.write import WrittenManifest, digest_chunks, write_part
from ckpt.core.format import boxes as share_module
from ckpt.core.format.boxes import GLOBAL, Box, Holding, Seat, intersect, share
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.layout import BITS, Layout, TensorSpec, pages
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.format.saved_state import Key, SavedState
from ckpt.core.ipc.arena import SEALED, Arena, Label
from ckpt.core.log.run_log import Commit, RunLog
from ckpt.core.restore.sources import HeldSnapshot, MemorySource, RestoreSource, StoreSource
from ckpt.core.state.capture import _spec
from ckpt.core.state.filler import Filler, Target
from ckpt.core.state.sharding import indices
from ckpt.core.state.tensors import DTYPE_NAME, TORCH_DTYPE
from ckpt.errors import SaveError
from ckpt.store import Store, open_store
from ckpt_backends.memory import MemoryStore
from toy_states import fill, raw

Bytes = npt.NDArray[np.uint8]

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
# The smallest floats lack some operations that the oracle needs.
DTYPES = sorted((d for d in DTYPE_NAME if "float4" not in str(d) and d != torch.complex32), key=str)


# -- other ranks and other shardings: many ranks, simulated in one process --

Grid = npt.NDArray[np.int64]
RESHARD_LONG = settings(QUICK, max_examples=20_000)


@dataclass(frozen=True)
class Division:
    """How ranks shard a tensor: mesh dimension `i` cuts tensor dimension `cuts[i]`; None means replicated.

    `order`: the order in which mesh dimensions cut. With `groups[i]` above 1, a dimension is first cut into this many
    groups, and every rank has its share of each: not one piece but several.
    """

    mesh: Grid
    cuts: tuple[int | None, ...]
    groups: tuple[int, ...]
    order: tuple[int, ...]

    def at(self, rank: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.argwhere(self.mesh == rank)[0])

    def indices(self, shape: tuple[int, ...], rank: int) -> list[list[int]]:
        """Return the indices of every dimension that a rank has, computed by torch.chunk."""
        found = [torch.arange(n) for n in shape]
        for i in self.order:
            dim = self.cuts[i]
            if dim is not None:
                mine = [chunks(g, self.mesh.shape[i])[self.at(rank)[i]] for g in chunks(found[dim], self.groups[i])]
                found[dim] = torch.cat(mine)
        return [each.tolist() for each in found]

    def alike(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same shard as this one."""
        cutting = [i for i, dim in enumerate(self.cuts) if dim is not None]
        place = self.at(rank)
        return tuple(sorted(r for r in self.mesh.ravel().tolist() if all(self.at(r)[i] == place[i] for i in cutting)))


def chunks(tensor: Tensor, count: int) -> list[Tensor]:
    found = list(torch.chunk(tensor, count))
    return found + [tensor[:0]] * (count - len(found))


def stretches(indices: list[int]) -> list[tuple[int, int, int]]:
    """Return ascending indices as spans: (first index, length, position in the list)."""
    breaks = [int(i) + 1 for i in np.flatnonzero(np.diff(np.array(indices)) != 1)]
    spans = itertools.pairwise([0, *breaks, len(indices)]) if indices else ()
    return [(indices[start], stop - start, start) for start, stop in spans]


@dataclass(frozen=True)
class Whole:
    """A tensor: its bytes have its shape, with the bytes of an element as the last dimension."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True)
class Ranks:
    """How this many ranks shard every tensor."""

    size: int
    divisions: dict[Key, Division]

    def holdings(self, whole: Whole, rank: int) -> list[tuple[Holding, Box]]:
        """Return a rank's pieces of a tensor, and their parts of its local array. This is an independent oracle."""
        division, shape = self.divisions[whole.key], whole.shape
        if rank not in division.mesh:
            return []
        mine = division.indices(shape, rank)
        places = list(itertools.product(*map(stretches, mine)))
        boxes = [tuple(tuple(each[k] for each in place) for k in range(3)) for place in places]
        if 0 in shape:
            zeros = (0,) * len(shape)
            boxes = [(zeros, shape, zeros)]
        name, instance = whole.key
        alike = division.alike(rank)
        return [(Holding(name, whole.dtype, shape, at, n, alike, instance), (here, n)) for at, n, here in boxes]


def part(array: Any, box: Box) -> Any:
    return array[(*(slice(i, i + n) for i, n in zip(*box, strict=True)), ...)]


def local_array(whole: Whole, ranks: Ranks, rank: int) -> Bytes:
    """Return a rank's part of a tensor as one array."""
    found = whole.data
    for dim, mine in enumerate(ranks.divisions[whole.key].indices(whole.shape, rank)):
        if 0 not in whole.shape and len(mine) < whole.shape[dim]:
            found = found.take(mine, axis=dim)
    return found


Pieces = list[tuple[TensorSpec, bytes]]


def staged(wholes: list[Whole], ranks: Ranks, rank: int) -> Pieces:
    """Return the pieces that a rank stages, by the library's own plan."""
    arrays = {w.key: local_array(w, ranks, rank) for w in wholes if rank in ranks.divisions[w.key].mesh}
    mine = [(h, part(arrays[w.key], box)) for w in wholes for h, box in ranks.holdings(w, rank)]
    mine = mine[::-1] if rank % 2 else mine  # ranks need not list their tensors in the same order
    cuts = share([holding for holding, _ in mine], Seat(rank, ranks.size))
    return [(_spec(mine[cut.holding][0], cut), part(mine[cut.holding][1], cut.box).tobytes()) for cut in cuts]


def to_write(checkpoint: CheckpointId, wholes: list[Whole], ranks: Ranks, rank: int, pieces: Pieces) -> ToWrite:
    held = [w.key for w in wholes if rank in ranks.divisions[w.key].mesh]
    node = {"path": ["model"], "kind": "module", "facts": {}, "names": list(dict.fromkeys(name for name, _ in held))}
    instances = {name: instance for name, instance in held if instance != GLOBAL}
    layout = Layout(tuple(spec for spec, _ in pieces), {}, [node], rank, ranks.size, instances)
    arrangement = layout.arrangement
    data = bytearray(arrangement.data_size)
    for offset, (_, raw_piece) in zip(arrangement.offsets, pieces, strict=True):
        data[offset : offset + len(raw_piece)] = raw_piece
    return ToWrite(checkpoint, layout, memoryview(data), [None])


async def written(store: Store, parts: Callable[[CheckpointId], list[ToWrite]]) -> tuple[Commit, list[WrittenManifest]]:
    """Create a run in an empty store, with one checkpoint of these manifests."""
    await create_run(store)
    log = RunLog(store)
    await log.open()
    owner = await acquire(log, "0badcafe")
    found = [await write_part(store, each) for each in parts(CheckpointId(owner.term, 1, owner.nonce))]
    made = await commit(log, owner, found)
    await store.aclose()
    return made, found


@contextlib.contextmanager
def opened(store: MemoryStore, commit: Commit) -> Iterator[StoreSource]:
    """Open the checkpoint as a restore does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.core.checkpoint.read.open_store", lambda url: store)
        source = StoreSource(store.url, commit.checkpoint, commit)
        source.open([])
        yield source


@contextlib.contextmanager
def in_memory_of_nodes(parts: list[ToWrite], nodes: list[int]) -> Iterator[list[MemorySource]]:
    """Store the same as snapshots in memory; each node's description is sent to all nodes."""
    texts = [json.dumps(each.values).encode() for each in parts]
    room = max(pages(len(each.data)) + len(text) for each, text in zip(parts, texts, strict=True))
    arena, snapshots = Arena.create(len(parts), room), list[HeldSnapshot]()
    for slot, (each, text) in enumerate(zip(parts, texts, strict=True)):
        size, digest = len(each.data), each.layout.digest
        arena.data(slot, size)[:] = each.data
        arena.data(slot)[pages(size) : pages(size) + len(text)] = text
        arena.set_label(slot, Label(SEALED, slot + 1, each.checkpoint, digest, size, len(text)))
        digests = digest_chunks(each.layout, each.data) + chunk_digest(text)
        snapshots.append(HeldSnapshot(arena, slot, arena.label(slot) or Label(SEALED), each.layout, digests))
    by_node = [[s for s, of in zip(snapshots, nodes, strict=True) if of == node] for node in sorted(set(nodes))]
    sources = [MemorySource(parts[0].checkpoint, here, alone=False) for here in by_node]
    described = json.dumps([source.describe() for source in sources])
    for source in sources:
        source.open(json.loads(described))
    try:
        yield sources
    finally:
        arena.close()


def check_shares(wholes: list[Whole], ranks: Ranks, pieces: list[Pieces], grain: int) -> None:
    """Check that every element is staged once, and that replicas stage the same amount, up to a grain (bytes)."""
    times = {w.key: np.zeros(w.shape, np.int64) for w in wholes}
    for spec, _ in itertools.chain(*pieces):
        part(times[spec.name, spec.instance], (spec.at, spec.shape))[...] += 1
    assert all((count == 1).all() for count in times.values())
    every = {h for w in wholes for rank in range(ranks.size) for h, _ in ranks.holdings(w, rank)}
    for replicas in {h.replicas for h in every}:
        line = [h for h in every if h.replicas == replicas]
        share_of_each = sum(h.elements * h.item_size for h in line) / len(replicas)
        for rank in replicas:
            mine = sum(spec.nbytes for spec, _ in pieces[rank] if any(cut_from(spec, h) for h in line))
            # Adjacent pieces are cut at the same elements, of at most 16 bytes.
            assert abs(mine - share_of_each) <= max(grain, 16 * len(wholes[::2])) + 1


def cut_from(spec: TensorSpec, holding: Holding) -> bool:
    same = (spec.name, spec.instance) == (holding.name, holding.instance)
    return same and intersect((holding.offsets, holding.sizes), (spec.at, spec.shape)) is not None


def wanted_chunks(saved: SavedState, targets: dict[Key, list[Target]]) -> list[int]:
    """Return the chunks that contain any element of a target, checked element by element."""
    found: list[int] = []
    for key, tensor in saved.tensors.items():
        wanted = np.zeros(tensor.spec.shape, bool)
        for target in targets.get(key, ()):
            part(wanted, target.box)[...] = True
        item = BITS[tensor.spec.dtype] // 8
        for number in tensor.shards:
            elements = part(wanted, saved.table.shards[number].box).reshape(-1)
            for chunk in saved.table.chunks(number):
                start, length = int(saved.position[chunk]), int(saved.table.length[chunk])
                if elements[start // item : (start + length) // item].any():
                    found.append(chunk)
    return sorted(found)


def check_restored(sources: Sequence[RestoreSource], wholes: list[Whole], ranks: Ranks, *, turned: bool) -> None:
    """Check that every rank of another job fills its part of every tensor, with exactly the chunks it needs.

    Like ranks that pass chunks on, all share one read of what each source can read. `turned`: into memory with another
    order of dimensions.
    """
    wanted: list[dict[Key, list[Target]]] = []
    boxes: dict[Key, list[Box]] = {}
    expected: list[tuple[Tensor, Bytes]] = []
    for rank in range(ranks.size):
        targets: dict[Key, list[Target]] = {}
        for whole in (w for w in wholes if rank in ranks.divisions[w.key].mesh):
            array = local_array(whole, ranks, rank)
            shape = array.shape[:-1]
            mine = torch.empty(shape[::-1] if turned else shape, dtype=TORCH_DTYPE[whole.dtype])
            mine = fill(mine.permute(tuple(reversed(range(mine.dim())))) if turned else mine, 99)
            for holding, box in ranks.holdings(whole, rank):
                targets.setdefault(whole.key, []).append(Target(part(mine, box), (holding.offsets, holding.sizes)))
            expected.append((mine, array))
        wanted.append(targets)
        for key, some in targets.items():
            boxes.setdefault(key, []).extend(target.box for target in some)
    for source in sources:
        source.narrow(boxes)
    saved = sources[0].saved
    fillers = [Filler(saved, targets) for targets in wanted]
    for filler, targets in zip(fillers, wanted, strict=True):
        assert filler.chunks == wanted_chunks(saved, targets)
    wants = [set(filler.chunks) for filler in fillers]

    def sink(chunk: int, data: memoryview) -> None:
        odd = chunk % 2  # bytes may start at any address
        own = memoryview(bytearray(odd) + data)[odd:]
        for filler, wanted in zip(fillers, wants, strict=True):
            if chunk in wanted:
                filler.add(chunk, own)

    readable = [source.readable() for source in sources]
    assert (np.sum(readable, axis=0) == 1).all()
    for source, mine in zip(sources, readable, strict=True):
        source.read([chunk for chunk in sorted(set().union(*wants)) if mine[chunk]], sink)
    for filler in fillers:
        filler.finish()
    assert all(raw(mine) == array.tobytes() for mine, array in expected)


@dataclass(frozen=True)
class Case:
    """What is saved by which ranks, restored by which ranks, and cut how finely (bytes). `nodes`: of all saving ranks,
    for a restore from their memory; `listed`: only the index and the needed manifests are read."""

    wholes: list[Whole]
    before: Ranks
    after: Ranks
    grain: int
    chunk: int
    turned: bool
    nodes: list[int] | None
    listed: bool = False


def check_resharding(case: Case) -> None:
    store = MemoryStore()
    wholes, before = case.wholes, case.before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.core.format.boxes.GRAIN", case.grain)
        patch.setattr("ckpt.core.format.boxes.LEAST", 1)
        patch.setattr("ckpt.core.format.layout.CHUNK", case.chunk)
        patch.setattr("ckpt.core.checkpoint.read.FEW", 1 if case.listed else 1000)
        pieces = [staged(wholes, before, rank) for rank in range(before.size)]
        check_shares(wholes, before, pieces, case.grain)

        def parts(checkpoint: CheckpointId) -> list[ToWrite]:
            return [to_write(checkpoint, wholes, before, rank, mine) for rank, mine in enumerate(pieces)]

        if case.nodes is not None:
            with in_memory_of_nodes(parts(CheckpointId(1, 1, "0badcafe")), case.nodes) as sources:
                check_restored(sources, wholes, case.after, turned=case.turned)
            return
        made, found = asyncio.run(written(store, parts))
        index_of(found)
        with opened(store, made) as source:
            assert source.saved.tensors.keys() == {w.key for w in wholes}
            assert source.saved.complete != (case.listed and before.size > 1)
            check_restored([source], wholes, case.after, turned=case.turned)


@st.composite
def divisions(draw: st.DrawFn, ranks: list[int], dims: int) -> Division:
    """Draw a mesh of some of the ranks, in any order, with any placements."""
    count = len(ranks)
    sides = draw(st.sampled_from([s for s in SIDES if math.prod(s) <= count]))
    mesh = np.array(draw(st.permutations(ranks))[: math.prod(sides)]).reshape(sides)
    cuts = tuple(draw(st.sampled_from([None, *range(dims)])) for _ in sides)
    groups = tuple(draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in sides)
    return Division(mesh, cuts, groups, tuple(draw(st.permutations(range(len(sides))))))


SIDES = [s for n in (1, 2, 3) for s in itertools.product(range(1, 9), repeat=n) if math.prod(s) <= 8]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    before, after = Ranks(draw(st.integers(1, 8)), {}), Ranks(draw(st.integers(1, 8)), {})
    wholes: list[Whole] = []
    for i in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4) | st.lists(st.integers(1, 50), max_size=2)))
        left = list(range(before.size))
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):  # ranks may have several tensors with one name
            if not left:
                break
            division = draw(divisions(left, len(shape)))
            members = division.mesh.ravel().tolist()
            key = (f"t{i}", GLOBAL if len(members) == before.size else min(members))
            data = raw(fill(torch.empty(shape, dtype=dtype), draw(st.integers(0, 2**31))))
            item = BITS[DTYPE_NAME[dtype]] // 8
            wholes.append(Whole(key, DTYPE_NAME[dtype], shape, np.frombuffer(data, np.uint8).reshape(*shape, item)))
            before.divisions[key] = division
            after.divisions[key] = draw(divisions(list(range(after.size)), len(shape)))
            left = [rank for rank in left if rank not in members]
    grain, chunk = draw(st.sampled_from([16, 40, 300, 64 << 10])), draw(st.sampled_from([16, 48, 256, 4 << 20]))
    nodes = draw(st.none() | st.lists(st.integers(0, 3), min_size=before.size, max_size=before.size))
    return Case(wholes, before, after, grain, chunk, draw(st.booleans()), nodes, draw(st.booleans()))


@QUICK
@given(cases())
def test_any_ranks_restore_from_any_others(case: Case) -> None:
    """Any mesh restores every bit that any mesh saved: uneven and empty shards, replicas, and tensors of single ranks.

    The source is a store, or the memory of nodes, none of which has everything.
    """
    check_resharding(case)


@pytest.mark.long
@pytest.mark.timeout(7200)
@RESHARD_LONG
@given(cases())
def test_any_ranks_restore_from_any_others_long(case: Case) -> None:
    """The same with many more examples."""
    check_resharding(case)


def grid(shape: tuple[int, ...], cuts: tuple[int | None, ...], *, first: int = 0) -> Division:
    """Return a mesh of consecutive ranks that cuts like DTensor."""
    mesh = np.arange(first, first + math.prod(shape)).reshape(shape)
    return Division(mesh, cuts, (1,) * len(cuts), tuple(range(len(cuts))))


def numbered(key: Key, *shape: int) -> Whole:
    data = np.arange(math.prod(shape), dtype=np.uint32).view(np.uint8)
    return Whole(key, "F32", shape, data.reshape(*shape, 4))


def four_ranks() -> tuple[list[Whole], Ranks]:
    """Return `w` in quarters, `alike` in slices of its replicas, and an `own` for each half of the ranks."""
    wholes = [
        numbered(("w", -1), 5, 6),
        numbered(("alike", -1), 4, 2),
        numbered(("own", 0), 3),
        numbered(("own", 2), 3),
    ]
    divided = [grid((2, 2), (0, 1)), grid((4,), (None,)), grid((2,), (0,)), grid((2,), (0,), first=2)]
    return wholes, Ranks(4, {w.key: d for w, d in zip(wholes, divided, strict=True)})


def swap(pieces: Pieces, name: str, **changes: Any) -> None:
    """Describe the same bytes differently."""
    (i,) = [i for i, (spec, _) in enumerate(pieces) if spec.name == name]
    pieces[i] = (replace(pieces[i][0], **changes), pieces[i][1])


def drop(pieces: Pieces, name: str) -> tuple[TensorSpec, bytes]:
    (found,) = [piece for piece in pieces if piece[0].name == name]
    pieces.remove(found)
    return found


def half(piece: tuple[TensorSpec, bytes]) -> tuple[TensorSpec, bytes]:
    spec, content = piece
    rows = (1, *spec.shape[1:])
    return replace(spec, shape=rows), content[: math.prod(rows) * 4]


def last_of(pieces: Pieces, name: str) -> tuple[TensorSpec, bytes]:
    return next(piece for piece in pieces if piece[0].name == name)


TAMPERED: dict[str, tuple[str, Callable[[list[Pieces]], object]]] = {
    "one shard less": ("w", lambda p: drop(p[1], "w")),
    "no shard at all": ("w", lambda p: [drop(mine, "w") for mine in p]),
    "one shard twice": ("w", lambda p: p[3].append(last_of(p[0], "w"))),
    "an offset above": ("w", lambda p: swap(p[0], "w", offsets=(1, 0))),
    "another instance": ("w", lambda p: swap(p[3], "w", instance=2)),
    "the instance of others": ("own", lambda p: swap(p[0], "own", instance=2)),
    "another shape": ("w", lambda p: swap(p[2], "w", whole=(5, 7))),
    "another dtype": ("w", lambda p: swap(p[2], "w", dtype="I32")),
}


@pytest.mark.parametrize("change", TAMPERED)
def test_inconsistent_shards_are_rejected(change: str) -> None:
    """Negative control of the tests above: unchanged manifests are accepted."""
    wholes, ranks = four_ranks()
    pieces = [staged(wholes, ranks, rank) for rank in range(4)]
    name, tamper = TAMPERED[change]

    def parts(checkpoint: CheckpointId) -> list[ToWrite]:
        return [to_write(checkpoint, wholes, ranks, rank, mine) for rank, mine in enumerate(pieces)]

    sound, odd = MemoryStore(), MemoryStore()
    made, found = asyncio.run(written(sound, parts))
    index_of(found)
    with opened(sound, made) as source:
        check_restored([source], wholes, ranks, turned=False)
    tamper(pieces)
    with pytest.raises(SaveError, match=rf"\b{name}\b"):
        asyncio.run(written(odd, parts))


def test_negative_control_one_wrong_byte_is_detected() -> None:
    """The comparison in the tests above covers every byte of every rank."""
    wholes, ranks = four_ranks()
    store = MemoryStore()

    def parts(checkpoint: CheckpointId) -> list[ToWrite]:
        return [to_write(checkpoint, wholes, ranks, rank, staged(wholes, ranks, rank)) for rank in range(4)]

    made, _ = asyncio.run(written(store, parts))
    with opened(store, made) as source:
        for i, whole in enumerate(wholes):
            other = whole.data.copy()
            other.reshape(-1)[-1] ^= 1
            wrong = [*wholes[:i], replace(whole, data=other), *wholes[i + 1 :]]
            with pytest.raises(AssertionError):
                check_restored([source], wrong, ranks, turned=False)
        check_restored([source], wholes, ranks, turned=False)


def test_replicas_share_work_with_real_sizes(tmp_path: Path) -> None:
    """Real grain and a folder: megabytes that eight replicas share, read by three ranks."""
    shapes: list[tuple[int, ...]] = [(700, 300), (), (5,), (1 << 15, 7), (3, 200_000), (2, 2, 17)]
    wholes = [numbered((f"t{i}", -1), *shape) for i, shape in enumerate(shapes)]
    ranks = Ranks(8, {w.key: grid((8,), (None,)) for w in wholes})
    pieces = [staged(wholes, ranks, rank) for rank in range(8)]
    check_shares(wholes, ranks, pieces, share_module.GRAIN)
    url = f"file://{tmp_path}"

    def parts(checkpoint: CheckpointId) -> list[ToWrite]:
        return [to_write(checkpoint, wholes, ranks, rank, mine) for rank, mine in enumerate(pieces)]

    made, _ = asyncio.run(written(open_store(url, writable=True), parts))
    source = StoreSource(url, made.checkpoint, made)
    source.open([])
    after = Ranks(3, {w.key: grid((3,), (0,) if w.shape else (None,)) for w in wholes})
    for turned in (False, True):
        check_restored([source], wholes, after, turned=turned)


# -- agreement with torch --


def torch_part(shape: tuple[int, ...], mesh: tuple[int, ...], place: tuple[int, ...], placements: Any) -> Tensor:
    """Return the part that torch cuts out of an array of numbers, one mesh dimension after the other."""
    found = torch.arange(math.prod(shape)).reshape(shape)
    for count, at, placement in zip(mesh, place, placements, strict=True):
        if not placement.is_replicate():
            found = placement._split_tensor(found, count, with_padding=False)[0][at]
    return found


def our_part(shape: tuple[int, ...], mesh: tuple[int, ...], place: tuple[int, ...], placements: Any) -> Tensor:
    runs = indices(shape, mesh, place, placements)
    chosen = [[i for first, count in each for i in range(first, first + count)] for each in runs]
    return torch.from_numpy(np.arange(math.prod(shape)).reshape(shape)[np.ix_(*chosen)])


def check_placements(shape: tuple[int, ...], mesh: tuple[int, ...], placements: Any) -> None:
    for place in itertools.product(*map(range, mesh)):
        theirs, ours = torch_part(shape, mesh, place, placements), our_part(shape, mesh, place, placements)
        assert theirs.tolist() == ours.tolist() and theirs.shape == ours.shape


@QUICK
@given(st.data())
def test_shards_match_those_of_torch(data: st.DataObject) -> None:
    """Covered are shards of any dimension, several of one, uneven and empty; and a strided shard of each group."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    placements = [data.draw(st.just(Replicate()) | dims.map(Shard)) for _ in mesh]
    check_placements(shape, mesh, placements)
    strided, factor = data.draw(st.integers(0, len(mesh) - 1)), data.draw(st.integers(2, 4))
    alone = [_StridedShard(0, split_factor=factor) if i == strided else Replicate() for i in range(len(mesh))]
    check_placements(shape, mesh, alone)


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Make torch treat this process as one of several ranks, without communication."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


Held = tuple[tuple[int, ...], Any, Tensor]


def fsdp_over_tensor_parallelism(rows: int, sides: tuple[int, ...]) -> list[Held]:
    """Return every rank's position in the mesh, the placements of a weight, and the rank's rows."""
    found: list[Held] = []
    names = ("replicate", "shard", "tensor")[-len(sides) :]
    for rank in range(math.prod(sides)):
        with as_rank(rank, math.prod(sides)):
            mesh = init_device_mesh("cpu", sides, mesh_dim_names=names)
            full = torch.arange(rows, dtype=torch.float32)[:, None].repeat(1, 2)
            net = nn.Module()
            net.weight = nn.Parameter(distribute_tensor(full, mesh["tensor"], [Shard(0)], src_data_rank=None))
            fully_shard(net, mesh=mesh[names[:-1]])
            local = net.weight._local_tensor.detach()[:, 0].int()
            found.append((tuple(mesh.get_coordinate()), net.weight.placements, local))
    return found


@pytest.mark.parametrize("sides", [(4, 2), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 9, 13])
def test_fsdp_over_tensor_parallelism_with_uneven_sizes(sides: tuple[int, ...], rows: int) -> None:
    """FSDP cuts the shards of tensor parallelism, even with remainders: the result must match each rank's rows."""
    seen = torch.zeros(rows, dtype=torch.int64)
    for place, placements, local in fsdp_over_tensor_parallelism(rows, sides):
        assert isinstance(placements[-2], _StridedShard)
        assert our_part((rows,), sides, place, placements).tolist() == local.tolist()
        seen[local] += 1
    assert (seen == math.prod(sides[:-2])).all()


def test_negative_control_left_to_right_cutting_is_wrong() -> None:
    """For uneven sizes the placements mean something else: some ranks have other rows, some even as many."""
    wrong = []
    for sides, rows in [((4, 2), 9), ((2, 2), 10)]:
        for place, placements, local in fsdp_over_tensor_parallelism(rows, sides):
            finest = math.prod(sides)
            chunk = -(-rows // finest)
            groups = [list(range(rows))[i * chunk : (i + 1) * chunk] for i in range(finest)]
            mine = [i for g in groups[place[0] :: sides[0]] for i in g]
            side = -(-len(mine) // sides[1])
            mine = mine[place[1] * side : (place[1] + 1) * side]
            if mine != local.tolist():
                wrong.append(len(mine) == len(local))
            assert our_part((rows,), sides, place, placements).tolist() == local.tolist()
    assert True in wrong and False in wrong
