"""A run of 72 ranks with real bytes: a reader reads only the small files of the ranks that have the wanted data, each
one once."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from ckpt_backends.local import LocalStore
from processes import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import ckpt
import run_files
import scale
from ckpt.core.checkpoint import commits as commits
from ckpt.core.checkpoint import manifests as manifests_of
from ckpt.core.checkpoint import read, write
from ckpt.core.format.boxes import Seat
from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import CheckpointId, DataFile, Manifest, data_key, metadata_of
from ckpt.core.format.table import Table
from ckpt.core.log.run_log import RunLog
from ckpt.core.state.capture import Capture
from ckpt.core.state.filler import Target
from ckpt.dcp import read as dcp_read
from ckpt.store import open_store
from ckpt.tools import describe
from commands import call, flip
from trees import tree

assert call  # a fixture

WORLD = scale.World(stages=4, tensor=2, fsdp=9, layers=4, width=64)
CHANGED = "model.layers.2.attention_norm.weight"
STEPS = (1000, 2000)


def content(name: str, at: tuple[int, ...], size: int, step: int) -> bytes:
    """Return the bytes of a piece. Only one tensor differs between the steps."""
    seed = xxhash.xxh3_64_intdigest(f"{name} {at} {step if name == CHANGED else 0}".encode())
    return np.random.default_rng(seed).bytes(size)


def write_rank(root: Path, checkpoint: CheckpointId, rank: int, like: Any) -> None:
    layout = scale.layout_of(WORLD, rank, like.layout)
    arrangement = layout.arrangement
    tensors = [layout.tensors[i] for i in arrangement.order]
    data = b"".join(content(t.name, t.at, t.nbytes, checkpoint.step) for t in tensors)
    key = data_key(checkpoint, rank)
    header = arrangement.header(metadata_of(key))
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    (root / key).write_bytes(header + data)
    snapshot = write.RankSnapshot(checkpoint, layout, memoryview(data), like.values, finite=True)
    table = write.build_table(layout, key, write.digest_chunks(layout, snapshot.data))
    file = DataFile(key, len(header) + len(data), len(header), file_digest(header))
    store: Any = scale.Folder(root)
    asyncio.run(write.finish_manifest(store, snapshot, table, [file], reason="due"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with two checkpoints of 72 ranks."""
    root = tmp_path_factory.mktemp("many") / "run"
    checkpoints = [CheckpointId(1, step, "0badcafe") for step in STEPS]
    for first in range(0, WORLD.size, WORLD.per_stage):
        with scale.as_rank(first, WORLD.size):
            like = Capture(scale.state_of(WORLD, first), Seat(first, WORLD.size)).read()
        for rank in range(first, first + WORLD.per_stage):
            for checkpoint in checkpoints:
                write_rank(root, checkpoint, rank, like)
    (root / "FORMAT.json").write_bytes(scale.new_format())

    async def make() -> None:
        store = open_store(root.as_uri(), writable=True)
        log = RunLog(store)
        await log.open()
        mine = await commits.acquire(log, "0badcafe")
        done = await commits.recover(log, mine)
        assert done.rolled_forward == checkpoints
        await store.aclose()

    asyncio.run(make())
    return root


Reads = Counter[str]
SMALL = (run_files.MANIFEST, run_files.INDEX)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Count how often each file was read or queried."""
    seen: Reads = Counter()
    get, head = LocalStore.get, LocalStore.head

    async def counted(self: LocalStore, key: str, **options: Any) -> Any:
        seen[key] += 1
        return await get(self, key, **options)

    async def queried(self: LocalStore, key: str) -> Any:
        seen[f"head {key}"] += 1
        return await head(self, key)

    monkeypatch.setattr(LocalStore, "get", counted)
    monkeypatch.setattr(LocalStore, "head", queried)
    yield seen


def manifests(reads: Reads) -> list[str]:
    """Return the manifests that were read, each as often as it was read."""
    return sorted(key for key in reads.elements() if run_files.kind_of(key) == run_files.MANIFEST)


def first_part(step: int) -> str:
    """Return the manifest with the plain values that are equal on all ranks."""
    return run_files.manifest_key(run_files.checkpoint_id(step))


def head_requests(reads: Reads) -> int:
    return sum(n for key, n in reads.items() if key.startswith("head "))


def holders(root: Path, name: str, step: int) -> list[str]:
    """Return the manifests of the ranks that have a part of a tensor."""
    paths = [path for path in run_files.manifests(root, step) if name in table_in(path).columns.names]
    return sorted(str(path.relative_to(root)) for path in paths)


def test_committer_reads_sizes_from_one_listing(run: Path, reads: Reads) -> None:
    """One listing gives the sizes of the data files of 72 ranks. Negative control: a few are queried one by one."""

    async def check(ranks: int) -> None:
        async with read.opened(run.as_uri()) as store:
            keys = run_files.select([info.key async for info in store.list()], step=STEPS[0])
            some = [key for key in keys if (run_files.rank_of(key) or 0) < ranks]
            assert len(await manifests_of.intact_manifests(store, CheckpointId(1, STEPS[0], "0badcafe"), some)) == ranks

    asyncio.run(check(WORLD.size))
    assert head_requests(reads) == 0 and len(manifests(reads)) == WORLD.size
    reads.clear()
    asyncio.run(check(8))
    assert head_requests(reads) == 8


def test_diff_reads_only_tables_that_differ(run: Path, reads: Reads, call: Any) -> None:
    """It reads one manifest for the plain values, and the tables of the ranks that have the changed tensor."""
    found = call("diff", f"{run}@{STEPS[0]}", f"{run}@{STEPS[1]}", "--json")
    assert found.code == 1 and [t["name"] for t in found.json["tensors"]] == [CHANGED]
    expected = [key for step in STEPS for key in (*holders(run, CHANGED, step), first_part(step))]
    assert manifests(reads) == sorted(expected) and 2 < len(expected) < WORLD.size // 2
    assert head_requests(reads) <= 2


def test_show_reads_the_index_and_one_manifest(run: Path, reads: Reads, call: Any) -> None:
    """Names, forms and sizes come from the index and equal those of --all, which reads each small file once. How
    tensors are stored, as --all shows it, equals the merged table."""
    few = call("show", run, "--json").json
    assert manifests(reads) == [first_part(STEPS[1])] and head_requests(reads) <= 1
    everything = call("show", run, "--all", "--json").json
    stored = ("stored", "held", "depth", "reads")
    plain = [{k: None if k in stored else v for k, v in t.items()} for t in everything["tensors"]]
    assert [t for t in few["tensors"] if t["alias_of"] is None] == [t for t in plain if t["alias_of"] is None]
    for key in ("components", "values", "stored_bytes", "tensor_bytes", "distinct_tensors", "older_files"):
        assert few[key] == everything[key], key
    assert not few["files"] and few["restore_bytes"] is None and len(everything["files"]) == WORLD.size
    manifest = asyncio.run(manifest_of(run))
    saved = manifest.saved()
    storages = describe.Storages(manifest.checkpoint, saved.labels.values())
    storages.add(manifest.table)
    for tensor in everything["tensors"]:
        if tensor["alias_of"] is None:
            assert {k: tensor[k] for k in stored} == asdict(storages.of(saved.labels[tensor["name"]]))
    assert everything["restore_bytes"] == sum(storages.used.values()) == sum(p["used"] for p in everything["files"])
    text, file = call("show", run).out, run_files.data_key(run_files.checkpoint_id(STEPS[1]))
    assert "--all shows what each rank has stored" in text and file not in text
    assert file in call("show", run, "--all").out


def test_load_of_a_tensor_reads_only_its_tables(run: Path, reads: Reads) -> None:
    """Each table is read once. Another tensor of the same ranks reads none."""
    found = ckpt.load(run)
    assert found[CHANGED].numpy().tobytes() == whole(run, CHANGED)
    assert manifests(reads) == holders(run, CHANGED, STEPS[1])
    assert found.slice(CHANGED, slice(0, 8)).numpy().tobytes() == whole(run, CHANGED)[:32]
    assert manifests(reads) == holders(run, CHANGED, STEPS[1])


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """Return a copy that may be damaged."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def file_of(run: Path, rank: int, step: int) -> Path:
    return run_files.data_file(run, step, rank)


def hurt(run: Path, rank: int, step: int) -> None:
    """Flip a bit of the last tensor in a data file."""
    file = file_of(run, rank, step)
    flip(file, file.stat().st_size - 3)


def test_repair_rereads_only_damaged_ranks(copy: Path, run: Path, reads: Reads, call: Any) -> None:
    """With an intact copy, only the damaged rank's manifest is read twice, and the run is restored. Without one, the
    other step has the same bytes."""
    before = tree(copy)
    for source in (["--from", run], []):
        hurt(copy, 60, STEPS[1])
        reads.clear()
        assert call("repair", copy, *source, "--yes").code == 0
        again = [key for key, n in reads.items() if n > 1 and run_files.kind_of(key) in SMALL]
        own = [run_files.manifest_key(run_files.checkpoint_id(STEPS[1]), 60)]
        assert tree(copy) == before
        if source:
            assert sorted(again) == own


def table_of(run: Path, rank: int, step: int) -> Table:
    return table_in(run_files.manifests(run, step, rank)[0])


def table_in(path: Path) -> Table:
    return manifests_of.table_of(Manifest.from_bytes(path.read_bytes(), "a part"))


def test_export_to_fewer_ranks_keeps_all_tensors(run: Path, reads: Reads, call: Any, tmp_path: Path) -> None:
    """Every manifest is read once, although tensors are copied in windows. All tensors are equal."""
    assert call("export", run, "--to", tmp_path / "two", "--world-size", 2).code == 0
    read_again = [key for key, n in Counter(manifests(reads)).items() if n > 1]
    assert len(set(manifests(reads))) == WORLD.size and not read_again
    found = call("diff", run, tmp_path / "two", "--json").json
    assert not (found["tensors"] or found["changed"] or found["only_in_a"] or found["only_in_b"])


def whole(run: Path, name: str) -> bytes:
    """Return a one-dimensional tensor, assembled from its parts."""
    found = np.zeros(64 * 4, np.uint8)
    for key in holders(run, name, STEPS[1]):
        table = table_in(run / key)
        for shard in table.shards:
            if shard.name == name:
                raw = content(name, shard.offsets, shard.nbytes, STEPS[1])
                found[4 * shard.offsets[0] :][: len(raw)] = np.frombuffer(raw, np.uint8)
    return found.tobytes()


@pytest.mark.parametrize("command", [("verify",), ("repair", "--json")])
def test_full_checks_read_each_small_file_once(run: Path, reads: Reads, call: Any, command: tuple[str, ...]) -> None:
    """This covers all manifests, tables and the index."""
    assert call(command[0], run, *command[1:]).code == 0
    small = {
        key: n for key, n in reads.items() if run_files.kind_of(key) not in (run_files.DATA, "log", "format", None)
    }
    checkpoints = 2 if command[0] == "repair" else 1
    assert set(small.values()) == {1} and len(small) == checkpoints * (WORLD.size + 1)
    assert head_requests(reads) == 0


def test_dcp_reads_only_tables_of_its_plan(run: Path, reads: Reads) -> None:
    """The index has the metadata, and a plan reads only a few tables."""
    found = asyncio.run(dcp_read.find([run.as_uri()], None))
    metadata = dcp_read.metadata_of(found.saved)
    assert found.checkpoint.step == STEPS[1] and not manifests(reads)
    there, everything = metadata.state_dict_metadata, asyncio.run(manifest_of(run)).saved()
    assert there == dcp_read.metadata_of(everything).state_dict_metadata
    alike = [there[f"model.layers.0.attention.{one}.weight"].chunks for one in ("wq", "wk")]  # type: ignore[union-attr]
    assert len(alike[0]) > 1 and alike[0] is alike[1], "thousands of ranks, thousands of tensors: millions of pieces"
    reads.clear()
    into = torch.empty(64)
    dcp_read._read(found, {found.key(CHANGED): [Target.whole(into)]})
    assert into.numpy().tobytes() == whole(run, CHANGED)
    assert manifests(reads) == holders(run, CHANGED, STEPS[1])


async def manifest_of(run: Path) -> read.Manifests:
    """Return the manifest of the newest checkpoint, with all ranks and tables."""
    log = await read.open_run(run.as_uri())
    manifest = await read.load_all(log.store, read.choose(log))
    await log.store.aclose()
    return manifest
