"""A run of 256 ranks, with real bytes: whoever reads it reads the small files of those ranks that have what is wanted,
each once, and asks for none of the others."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from ckpt_backends.local import LocalStore
from processes import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import scale
from ckpt.checkpoint import commit as commits
from ckpt.checkpoint import parts as parts_of
from ckpt.checkpoint import read, write
from ckpt.convert.source import Want
from ckpt.convert.source_run import checkpoint_of
from ckpt.dcp import read as dcp_read
from ckpt.format.digest import file_digest
from ckpt.format.manifest import Attempt, PackInfo, pack_key
from ckpt.format.partition import Seat
from ckpt.format.table import Table
from ckpt.runlog.log import RunLog
from ckpt.state.capture import Capture
from ckpt.state.filler import Target
from ckpt.store import open_store
from commands import call

assert call  # a fixture

WORLD = scale.World(stages=4, tensor=2, fsdp=32, layers=4, width=64)
CHANGED = "model.layers.2.attention_norm.weight"
STEPS = (1000, 2000)


def content(name: str, at: tuple[int, ...], size: int, step: int) -> bytes:
    """Of a piece; only one tensor differs between the steps."""
    seed = xxhash.xxh3_64_intdigest(f"{name} {at} {step if name == CHANGED else 0}".encode())
    return np.random.default_rng(seed).bytes(size)


def write_rank(root: Path, attempt: Attempt, rank: int, like: Any) -> None:
    layout = scale.layout_of(WORLD, rank, like.layout)
    arrangement = layout.arrangement
    tensors = [layout.tensors[i] for i in arrangement.order]
    data = b"".join(content(t.name, t.at, t.nbytes, attempt.step) for t in tensors)
    key, header = pack_key(attempt, rank, 0), arrangement.header
    (root / "packs").mkdir(parents=True, exist_ok=True)
    (root / key).write_bytes(header + data)
    snapshot = write.RankSnapshot(attempt, layout, memoryview(data), like.values, finite=True)
    table = write.build_table(layout, key, write.digest_blobs(layout, snapshot.data))
    pack = PackInfo(key, len(header) + len(data), len(header), file_digest(header))
    store: Any = scale.Folder(root)
    asyncio.run(write.finish_part(store, snapshot, table, [pack], number=0, reason="due"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of 256 ranks."""
    root = tmp_path_factory.mktemp("many") / "run"
    attempts = [Attempt(1, step, "0badcafe") for step in STEPS]
    for first in range(0, WORLD.size, WORLD.per_stage):
        with scale.as_rank(first, WORLD.size):
            like = Capture(scale.state_of(WORLD, first), Seat(first, WORLD.size)).read()
        for rank in range(first, first + WORLD.per_stage):
            for attempt in attempts:
                write_rank(root, attempt, rank, like)
    (root / "FORMAT.json").write_bytes(scale.new_format())

    async def make() -> None:
        store = open_store(root.as_uri(), writable=True)
        log = RunLog(store)
        await log.open()
        mine = await commits.acquire(log, "0badcafe")
        done = await commits.recover(log, mine)
        assert done.rolled_forward == attempts
        await store.aclose()

    asyncio.run(make())
    return root


Reads = Counter[str]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """How often each file of any folder was read, or asked about."""
    seen: Reads = Counter()
    get, head = LocalStore.get, LocalStore.head

    async def counted(self: LocalStore, key: str, **options: Any) -> Any:
        seen[key] += 1
        return await get(self, key, **options)

    async def asked(self: LocalStore, key: str) -> Any:
        seen[f"head {key}"] += 1
        return await head(self, key)

    monkeypatch.setattr(LocalStore, "get", counted)
    monkeypatch.setattr(LocalStore, "head", asked)
    yield seen


def parts(reads: Reads) -> int:
    """How many parts were read."""
    return sum(n for key, n in reads.items() if key.startswith("parts/") and key.endswith(".json"))


def tables(reads: Reads) -> list[str]:
    """Each as often as it was read."""
    return sorted(key for key in reads.elements() if key.startswith("parts/") and key.endswith(".safetensors"))


def questions(reads: Reads) -> int:
    return sum(n for key, n in reads.items() if key.startswith("head "))


def holders(root: Path, name: str, step: int) -> list[str]:
    """The tables of the ranks that have something of a tensor, as the tables themselves say."""
    found = []
    for path in sorted((root / "parts").glob(f"*-{step}.*.safetensors")):
        if name in Table.from_bytes(path.read_bytes(), "a table").columns.names:
            found.append(f"parts/{path.name}")
    return found


def test_a_committer_asks_for_no_pack_by_itself(run: Path, reads: Reads) -> None:
    """Sizes of the packs of 256 ranks come from one listing. Negative control: few parts ask for each."""

    async def look(ranks: int) -> None:
        async with read.opened(run.as_uri()) as store:
            keys = [info.key async for info in store.list("parts/") if f"-{STEPS[0]}." in info.key]
            some = [key for key in keys if int(key.split(".")[2]) < ranks]
            assert len(await parts_of.sound_parts(store, Attempt(1, STEPS[0], "0badcafe"), some)) == ranks

    asyncio.run(look(WORLD.size))
    assert questions(reads) == 0 and parts(reads) == len(tables(reads)) == WORLD.size
    reads.clear()
    asyncio.run(look(8))
    assert questions(reads) == 8


def test_diff_reads_the_tables_of_what_differs(run: Path, reads: Reads, call: Any) -> None:
    """Of plain values, which any rank may have for itself, all parts, once; of tables, those of one norm's ranks."""
    found = call("diff", f"{run}@{STEPS[0]}", f"{run}@{STEPS[1]}", "--json")
    assert found.code == 1 and [t["name"] for t in found.json["tensors"]] == [CHANGED]
    expected = sorted(holders(run, CHANGED, STEPS[0]) + holders(run, CHANGED, STEPS[1]))
    assert tables(reads) == expected and 0 < len(expected) < WORLD.size // 2
    assert parts(reads) == 2 * WORLD.size and questions(reads) == 0


def test_restoring_one_tensor_reads_the_tables_that_have_it(run: Path, reads: Reads, call: Any, tmp_path: Path) -> None:
    """And of the parts those that say what the plain values of the first rank are."""
    assert call("restore", run, "--only", CHANGED, "--to", tmp_path / "one.safetensors").code == 0
    assert tables(reads) == holders(run, CHANGED, STEPS[1])
    assert parts(reads) <= 2 and questions(reads) <= 2


def test_a_plan_of_a_restore_reads_no_table(run: Path, reads: Reads, call: Any, tmp_path: Path) -> None:
    """Cut for 4 ranks: names and forms are in the directory."""
    assert call("restore", run, "--to", tmp_path / "four", "--world-size", 4, "--dry-run").code == 0
    assert not tables(reads) and parts(reads) <= 8


def test_cut_for_another_number_of_ranks_it_is_the_same(run: Path, reads: Reads, call: Any, tmp_path: Path) -> None:
    """Every table is read once, though tensors pass by in windows; and every tensor is what it was."""
    assert call("restore", run, "--to", tmp_path / "two", "--world-size", 2).code == 0
    assert len(tables(reads)) == len(set(tables(reads))) == WORLD.size
    found = call("diff", run, tmp_path / "two", "--json").json
    assert not (found["tensors"] or found["changed"] or found["only_in_a"] or found["only_in_b"])


def test_a_window_after_another_reads_no_table_again(run: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are right whatever is kept of the tables: of all ranks so far, or only of those that a reading wants."""
    for most in (1 << 20, 0):
        monkeypatch.setattr("ckpt.convert.source_run.MOST_ROWS", most)
        reads.clear()
        asyncio.run(read_by_turns(run))
        there = {name: holders(run, name, STEPS[1]) for name in (CHANGED, OTHER)}
        assert not set(there[CHANGED]) & set(there[OTHER])
        once = sorted(there[CHANGED] + there[OTHER])
        assert tables(reads) == (once if most else sorted(once * 2))


OTHER = "model.layers.0.ffn_norm.weight"


async def read_by_turns(run: Path) -> None:
    """Two tensors of two stages, in turn, half by half."""
    origin = await checkpoint_of(await read.open_run(run.as_uri()), STEPS[1])
    for start, stop in ((0, 32), (32, 64)):
        for name in (CHANGED, OTHER):
            into = np.empty(4 * (stop - start), np.uint8)
            await origin.read([Want(name, ((0,), (64,)), start, stop, into)])
            assert into.tobytes() == whole(run, name)[4 * start : 4 * stop]
    await origin.aclose()


def whole(run: Path, name: str) -> bytes:
    """A tensor of one dimension, put together of what each rank wrote."""
    found = np.zeros(64 * 4, np.uint8)
    for key in holders(run, name, STEPS[1]):
        table = Table.from_bytes((run / key).read_bytes(), key)
        for shard in table.shards:
            if shard.name == name:
                raw = content(name, shard.offsets, shard.nbytes, STEPS[1])
                found[4 * shard.offsets[0] :][: len(raw)] = np.frombuffer(raw, np.uint8)
    return found.tobytes()


@pytest.mark.parametrize("command", [("verify",), ("verify", "--no-data"), ("show", "--json"), ("repair", "--json")])
def test_who_looks_at_everything_reads_each_small_file_once(
    run: Path, reads: Reads, call: Any, command: tuple[str, ...]
) -> None:
    """All parts and tables; the index too."""
    assert call(command[0], run, *command[1:]).code == 0
    small = {key: n for key, n in reads.items() if key.startswith(("parts/", "index/"))}
    checkpoints = 2 if command[0] == "repair" else 1
    assert set(small.values()) == {1} and len(small) == checkpoints * (2 * WORLD.size + 1)
    assert questions(reads) == 0


def test_dcp_reads_what_its_plan_wants(run: Path, reads: Reads) -> None:
    """What there is, and how it is divided, is in the directory; what a plan wants is in few tables."""
    found = asyncio.run(dcp_read.find([run.as_uri()], None))
    metadata = dcp_read.metadata_of(found.saved)
    assert found.attempt.step == STEPS[1] and not parts(reads) and not tables(reads)
    everything = asyncio.run(all_of(run))
    assert metadata.state_dict_metadata == dcp_read.metadata_of(everything).state_dict_metadata
    reads.clear()
    into = torch.empty(64)
    dcp_read._read(found, {found.key(CHANGED): [Target.whole(into)]})
    assert into.numpy().tobytes() == whole(run, CHANGED)
    assert tables(reads) == holders(run, CHANGED, STEPS[1]) and not parts(reads)


async def all_of(run: Path) -> Any:
    """As all parts and tables say it."""
    log = await read.open_run(run.as_uri())
    manifest = await read.manifest_of(log, None)
    await log.store.aclose()
    return manifest.saved()
