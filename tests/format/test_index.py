"""The index agrees with the chunk tables, and a rank reads only what it needs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_backends.local import LocalStore
from processes import REPO

sys.path.insert(0, str(REPO / "benchmarks"))


import looks
import scale
from ckpt.core.checkpoint import commits, manifests, read
from ckpt.core.format.boxes import GLOBAL, Box, Seat
from ckpt.core.format.index import COLUMNS, FILE, Index, Share, build
from ckpt.core.format.layout import OWN
from ckpt.core.format.manifest import CheckpointId, Manifest, SharedLayout, data_key, index_key, manifest_key
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.table import SavedShard, Table
from ckpt.core.log.run_log import Commit
from ckpt.core.restore.sources import StoreSource
from ckpt.core.state.capture import Capture
from ckpt.core.state.filler import Filler
from ckpt.core.state.placement import Placement
from ckpt.errors import CorruptError, SaveError
from run_files import DATA, MANIFEST, kind_of

Json = dict[str, Any]
WORLD = scale.World(stages=2, tensor=2, fsdp=8, layers=4, width=64)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with one checkpoint of 32 ranks and its index."""
    root = tmp_path_factory.mktemp("scale") / "run"
    make(WORLD, root)
    return root


def make(world: scale.World, root: Path) -> None:
    root.mkdir()
    (root / "FORMAT.json").write_bytes(scale.new_format())
    for first in range(0, world.size, world.per_stage):
        scale.write_ranks(world, str(root), first, first + world.per_stage)
    scale.take_over(root)


def committed(root: Path) -> Commit:
    return read.run(scale.newest(root.as_uri()))


async def with_store(root: Path, work: Callable[[Any], Any]) -> Any:
    async with read.opened(root.as_uri()) as store:
        return await work(store)


def whole(root: Path) -> SavedState:
    """Return the state as described by all ranks."""
    commit = committed(root)
    return read.run(with_store(root, lambda store: read.load_all(store, commit))).saved()


def listed(root: Path) -> SavedState:
    commit = committed(root)
    return read.run(with_store(root, lambda store: read.load_saved(store, commit)))


def index_of(root: Path) -> Path:
    commit = committed(root)
    return root / index_key(commit.checkpoint)


def place(world: scale.World, rank: int, saved: SavedState) -> Placement:
    with scale.as_rank(rank, world.size):
        placement = Capture(scale.state_of(world, rank), Seat(rank, world.size)).place(saved)
    placement.check()
    return placement


def boxes(placement: Placement) -> dict[Any, list[Box]]:
    return {key: [target.box for target in targets] for key, targets in placement.fills.items()}


# -- the simulation --


@pytest.mark.parametrize("world", [scale.World(2, 2, 2, 2, 64), scale.World(1, 2, 3, 1, 64)], ids=["8", "6"])
def test_simulated_layouts_are_those_of_real_ranks(world: scale.World) -> None:
    """For every rank, the simulated layout equals the one that `Capture` reads from real DTensors."""
    like = None
    for rank in range(world.size):
        with scale.as_rank(rank, world.size):
            real = Capture(scale.state_of(world, rank), Seat(rank, world.size)).read().layout
        if rank % world.per_stage == 0:
            like = real
        assert like is not None
        assert scale.layout_of(world, rank, like).to_json() == real.to_json()


# -- restoring with the index --

OTHERS = {
    "the same": WORLD,
    "another TP": replace(WORLD, tensor=4, stages=1),
    "uneven": replace(WORLD, fsdp=3),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_index_gives_the_same_chunks(run: Path, kind: str) -> None:
    """The index gives the same chunks as all manifests: the same numbers, positions and digests."""
    other, everything = OTHERS[kind], whole(run)
    for rank in (0, other.size // 2 + 1, other.size - 1):
        one = place(other, rank, everything)
        expected = Filler(everything, one.fills).chunks
        two = place(other, rank, listed(run))
        assert boxes(one) == boxes(two) and one.problems == two.problems
        found = two.saved.narrowed(boxes(two))
        filler = Filler(found, two.fills)
        assert found.numbers[filler.chunks].tolist() == expected
        assert (found.table.digest[filler.chunks] == everything.table.digest[expected]).all()
        assert rows(found.table, filler.chunks) == rows(everything.table, expected)


def rows(table: Table, chunks: list[int]) -> list[tuple[str, int, int]]:
    return [(table.files[int(table.file[b])], int(table.offset[b]), int(table.length[b])) for b in chunks]


@pytest.fixture
def got(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the keys that are read from any folder."""
    seen: list[str] = []
    get = LocalStore.get

    async def counted(self: LocalStore, key: str, **options: Any) -> memoryview:
        seen.append(key)
        return await get(self, key, **options)

    monkeypatch.setattr(LocalStore, "get", counted)
    yield seen


def test_restore_reads_only_the_manifests_it_needs(run: Path, got: list[str]) -> None:
    """A rank that restores its own tensors reads few manifests: those of ranks that have its tensors, and that of the
    first rank with the same plain values. Negative control: without the index it reads all of them."""
    commit, rank = committed(run), 21
    needed = {r for r, rest in enumerate(ranks_with(run, rank)) if rest}
    got.clear()
    source = StoreSource(run.as_uri(), commit.checkpoint, commit)
    source.open([])
    placement = place(WORLD, rank, source.saved)
    source.narrow(boxes(placement))
    read_parts = {key for key in got if kind_of(key) == MANIFEST}
    assert read_parts == {manifest_key(commit.checkpoint, r) for r in {0, *needed}} and len(needed) < 6
    assert not any(kind_of(key) == DATA for key in got)
    got.clear()
    whole(run)
    assert len({key for key in got if kind_of(key) == MANIFEST}) == WORLD.size


def ranks_with(root: Path, rank: int) -> list[bool]:
    """Return for each rank whether it saved something that `rank` needs."""
    everything = whole(root)
    filler = Filler(everything, place(WORLD, rank, everything).fills)
    wanted = set(everything.table.columns.rank[everything.shard_of_chunk[filler.chunks]].tolist())
    return [r in wanted for r in range(WORLD.size)]


def test_manifests_replace_a_lost_or_damaged_index(run: Path, tmp_path: Path) -> None:
    """The manifests replace it, and the same chunks are requested."""
    expected = Filler(whole(run), place(WORLD, 3, whole(run)).fills).chunks
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9] + bytes(9))):
        root = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(run, root)
        damage(index_of(root))
        saved = listed(root)
        assert saved.complete
        assert Filler(saved, place(WORLD, 3, saved).fills).chunks == expected


# -- the index agrees with the tables --


@st.composite
def states(draw: st.DrawFn) -> list[list[SavedShard]]:
    """Draw the shards of a few ranks: tensors of any shape, divided in any way, some with own instances."""
    world = draw(st.integers(1, 4))
    found: list[list[SavedShard]] = [[] for _ in range(world)]
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        dtype = draw(st.sampled_from(["F32", "BF16", "U8"]))
        instance = draw(st.sampled_from([GLOBAL, *range(world)]))
        for box in draw(cut(shape)):
            owner = draw(st.integers(max(0, instance), world - 1))
            found[owner].append(SavedShard(f"t{number % 3}.é" * (1 + number), dtype, shape, *box, owner, instance))
    return found


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    pieces = [(tuple(0 for _ in shape), shape)]
    for dim, size in enumerate(shape):
        if size > 1 and draw(st.booleans()):
            at = draw(st.integers(1, size - 1))
            pieces = [half for piece in pieces for half in halves(piece, dim, at)]
    return draw(st.permutations(pieces))


def halves(box: Box, dim: int, at: int) -> Iterator[Box]:
    (offsets, sizes), end = box, box[1][dim]
    yield offsets, (*sizes[:dim], at, *sizes[dim + 1 :])
    yield (*offsets[:dim], at, *offsets[dim + 1 :]), (*sizes[:dim], end - at, *sizes[dim + 1 :])


CHECKPOINT = CheckpointId(1, 1, "0badcafe")


def table_of(shards: list[SavedShard], rank: int, seed: int = 0) -> Table:
    length = np.array([s.nbytes for s in shards if s.nbytes], np.int64)
    digest = np.random.default_rng([rank, seed]).integers(0, 256, (len(length), 16), np.uint8)
    zero = np.zeros(len(length), np.int64)
    starts = np.cumsum([0, *(bool(s.nbytes) for s in shards)], dtype=np.int64)
    files = (data_key(CHECKPOINT, rank),)
    offset = np.cumsum(length) - length
    return Table(shards, starts, zero, offset, length, length, zero, zero - 1, digest, digest, files)


def part_of(table: Table, rank: int, world: int, alike: Set[str] = frozenset()) -> Manifest:
    names = sorted({s.name for s in table.shards} | alike)
    layout = SharedLayout(
        {
            "aliases": {"alias": names[0]} if names else {},
            "components": [{"path": ["model"], "kind": "module", "facts": {}, "names": names}],
            "instances": {s.name: OWN if s.instance == rank else s.instance for s in table.shards if s.instance >= 0},
            "forms": {s.name: [s.dtype, list(s.global_shape)] for s in table.shards if s.instance == GLOBAL},
        }
    )
    return Manifest(str(CHECKPOINT), rank, world, layout, [None], table.to_bytes(), [], True)


def joined(tables: list[Table], alike: Set[str] = frozenset()) -> Index:
    parts = [part_of(table, rank, len(tables), alike) for rank, table in enumerate(tables)]
    return build([Share(p.rank, p.world, p.layout, p.values, t) for p, t in zip(parts, tables, strict=True)])


def built(state: list[list[SavedShard]]) -> tuple[Index, list[Table]]:
    tables = [table_of(shards, rank) for rank, shards in enumerate(state)]
    alike = {s.name for shards in state for s in shards if s.instance == GLOBAL}
    return joined(tables, alike), tables


@settings(max_examples=50, deadline=None)
@given(states())
def test_index_agrees_with_the_tables(state: list[list[SavedShard]]) -> None:
    """Owners, boxes, dtypes, shapes and tables agree, also after a round trip through bytes."""
    made, tables = built(state)
    for found in (made, Index.from_bytes(made.to_bytes(), "an index", len(state))):
        contents = {
            (*key, found.spec(i).dtype, found.spec(i).shape, rank, box)
            for i, key in enumerate(found.keys)
            for rank, box in zip(found.holders(i).tolist(), found.pattern(i).boxes(), strict=True)
        }
        assert contents == {
            (s.name, s.instance, s.dtype, s.global_shape, s.rank, s.box) for table in tables for s in table.shards
        }
        assert found.columns["owned"].tolist() == [table.owned for table in tables]
        assert found.files == tuple(sorted(key for table in tables for key in table.files))
    assert made.to_bytes() == built(state)[0].to_bytes()


@settings(max_examples=50, deadline=None)
@given(states(), st.data())
def test_negative_control_lost_or_doubled_piece(state: list[list[SavedShard]], data: st.DataObject) -> None:
    """The error names the tensor of a piece that is saved by no rank or twice."""
    places = [(r, i) for r, shards in enumerate(state) for i, s in enumerate(shards) if s.nbytes]
    if not places:
        return
    rank, i = data.draw(st.sampled_from(places))
    broken, one = [list(shards) for shards in state], state[rank][i]
    alone = sum(s.name == one.name and s.instance == one.instance for shards in state for s in shards) == 1
    if alone or data.draw(st.booleans()):
        broken[rank].append(replace(one))
    else:
        del broken[rank][i]
    with pytest.raises(CorruptError) as raised:
        built(broken)
    assert one.name in str(raised.value)


# -- damaged and hostile indexes --


def parts_of(run: Path) -> tuple[bytes, dict[str, Any], Json]:
    """Return the bytes of an index, its columns and counts."""
    raw = index_of(run).read_bytes()
    frames = safetensors.numpy.load(raw)
    counts = json.loads(frames.pop("counts").tobytes())
    columns = {name: np.frombuffer(plain(name, frame), COLUMNS[name]).copy() for name, frame in frames.items()}
    return raw, columns, counts


def plain(name: str, frame: Any) -> bytes:
    raw: bytes = frame.tobytes()
    return raw if name in FILE.whole else zstandard.decompress(raw)


def forged(columns: dict[str, Any]) -> bytes:
    return Index(columns, (), (), ()).to_bytes()


def test_flipped_bits_of_an_index_raise_our_errors(run: Path) -> None:
    """The index is read without its digest, which would detect the change: only our own errors are raised."""
    raw, rng = index_of(run).read_bytes(), np.random.default_rng(0)
    for at in rng.integers(0, len(raw) * 8, 400).tolist():
        bad = bytearray(raw)
        bad[at // 8] ^= 1 << at % 8
        try:
            Index.from_bytes(bytes(bad), "an index", WORLD.size)
        except CorruptError:
            continue


def change(name: str, at: int, value: int) -> Callable[[dict[str, Any]], None]:
    def work(columns: dict[str, Any]) -> None:
        columns[name][at] = value

    return work


def cut_off(name: str) -> Callable[[dict[str, Any]], None]:
    def work(columns: dict[str, Any]) -> None:
        columns[name] = columns[name][:-1]

    return work


def views(edit: Callable[[Json], None]) -> Callable[[dict[str, Any]], None]:
    def work(columns: dict[str, Any]) -> None:
        data = json.loads(columns["views"].tobytes())
        edit(data)
        columns["views"] = np.frombuffer(json.dumps(data).encode(), np.uint8)

    return work


HOSTILE = {
    **{f"{name} is cut off": cut_off(name) for name in COLUMNS},
    "rank beyond the world": change("piece_rank", 0, WORLD.size),
    "unknown name": change("tensor_name", 5, 10**6),
    "a tensor twice": lambda columns: columns["tensor_name"].__setitem__(1, columns["tensor_name"][0]),
    "huge shape": change("pattern_shape", 0, 2**62),
    "falling ends": change("pattern_ends", 0, 2**40),
    "impossible instance": change("tensor_instance", 0, WORLD.size),
    "data files outside": lambda columns: columns.update(files=np.frombuffer(b'["../../x"]', np.uint8)),
    "views of nothing": views(lambda data: data["views"].clear()),
    "a view of another layout": views(lambda data: data["views"][0].__setitem__(1, 99)),
    "an alias of nothing": views(lambda data: data["layouts"][0]["aliases"].update(x="nothing")),
    "a component without a kind": views(lambda data: data["layouts"][0]["components"][0].pop("kind")),
    "a view with too few values": views(lambda data: data["views"][0][2].pop()),
    "alike one that is not like itself": lambda columns: columns["alike"].__setitem__(slice(0, 3), [0, 0, 1]),
    "views too deep": lambda columns: columns.update(views=np.frombuffer(b"[" * 100_000, np.uint8)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_index_is_rejected(run: Path, kind: str) -> None:
    """Negative control: the unchanged index is accepted."""
    _, columns, _ = parts_of(run)
    assert Index.from_bytes(forged(columns), "an index", WORLD.size).keys
    HOSTILE[kind](columns)
    with pytest.raises(CorruptError):
        Index.from_bytes(forged(columns), "an index", WORLD.size)


def lying(run: Path, edit: Callable[[dict[str, Any], Index], str]) -> tuple[SavedState, str]:
    """Return a state from a valid index that differs from the tables, and the name of the tensor."""
    raw, columns, _ = parts_of(run)
    name = edit(columns, Index.from_bytes(raw, "an index", WORLD.size))
    found, commit = Index.from_bytes(forged(columns), "an index", WORLD.size), committed(run)

    def fetch(ranks: Sequence[int]) -> Any:
        return read.run(with_store(run, lambda store: manifests.load_ranks(store, commit, ranks)))

    return SavedState.listed(found, fetch), name


def first_dims(columns: dict[str, Any], found: Index) -> tuple[str, int]:
    """Return a weight, and the position of the dimensions of its pieces."""
    i = next(i for i, (name, _) in enumerate(found.keys) if name.startswith("model.") and name.endswith("wo.weight"))
    return found.keys[i][0], int(found._starts[2][found.columns["tensor_pattern"][i]])


def hole(columns: dict[str, Any], found: Index) -> str:
    name, at = first_dims(columns, found)
    columns["piece_dims"][at + 2] -= 1
    return name


def swapped(columns: dict[str, Any], found: Index) -> str:
    """Swap two ranks in the index."""
    name, _ = first_dims(columns, found)
    start = int(found._starts[1][found.columns["tensor_pattern"][found.number[name, 0]]])
    columns["piece_rank"][[start, start + 1]] = columns["piece_rank"][[start + 1, start]]
    return name


def other_dtype(columns: dict[str, Any], found: Index) -> str:
    name, _ = first_dims(columns, found)
    columns["tensor_dtype"][found.number[name, 0]] = 5
    return name


@pytest.mark.parametrize("lie", [hole, swapped, other_dtype], ids=lambda f: f.__name__)
def test_index_that_contradicts_the_tables_is_rejected(run: Path, lie: Any) -> None:
    """The error comes before any read and names the tensor. Negative control: the correct index is accepted."""
    for edit, right in ((lambda columns, found: first_dims(columns, found)[0], True), (lie, False)):
        saved, name = lying(run, edit)
        shape = saved.tensors[name, 0].spec.shape
        wanted = {(name, 0): [((0,) * len(shape), shape)]}
        if right:
            assert len(saved.narrowed(wanted).tensors[name, 0].shards) == WORLD.per_stage
        else:
            with pytest.raises(CorruptError, match=name.replace(".", r"\.")):
                saved.narrowed(wanted)


def test_inconsistent_ranks_are_not_committed() -> None:
    """The committer's error names the tensor. Negative control: consistent ranks have an index."""
    state = [[SavedShard("w", "F32", (4,), (2 * rank,), (2,), rank)] for rank in range(2)]
    for second, right in ((state[1], True), ([replace(state[1][0], offsets=(1,))], False)):
        tables = [table_of(state[0], 0), table_of(second, 1)]
        written = [commits.WrittenManifest(part_of(t, rank, 2), "", t) for rank, t in enumerate(tables)]
        if right:
            assert Index.from_bytes(commits.index_of(written), "an index", 2).keys == [("w", GLOBAL)]
        else:
            with pytest.raises(SaveError, match="about w"):
                commits.index_of(written)


# -- the benchmark --


def test_benchmark_reports_all_figures(run: Path) -> None:
    """Its tasks run on 32 ranks. All judged figures exist, and a figure that is too high is named."""
    found = {
        "plan": scale.plan(WORLD, 5),
        "sizes": scale.sizes(run),
        "reshard": {"the same": scale.reshard(run, WORLD, 5), "names": scale.names_of_a_stage(run, 2)},
        "looks": {task: looks.look(run, task) | {"peak_mb": 1.0} for task in ("show", "repair, all but data files")},
        "commit": {"read_s": 1.0, "merge_s": 1.0, "cpu_s": 1.0, "peak_mb": 1.0},
    }
    for one in found["reshard"].values():
        one["peak_mb"] = 1.0
    scale.show_all({"32": found})
    assert found["reshard"]["names"]["tables_read"] == WORLD.per_stage
    found["plan"]["cached_s"] = 0.5
    assert any("cached_s" in text for text in scale.judged({"32": found}))
