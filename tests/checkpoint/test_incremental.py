"""Incremental checkpoints without processes: plans, valid chunk tables, and reads that return the saved bytes.

A job here saves states to a store in memory with the library's own encoder, log and retention. Chunks and data files
are small, so a few kilobytes cover the same cases as gigabytes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.core.checkpoint import chunks as chunks_module
from ckpt.core.checkpoint import commits, encode, incremental, open_tier, read, retention, write
from ckpt.core.checkpoint.encode import Encoder
from ckpt.core.checkpoint.incremental import ChunkPlan, InMemory, Policy, WrittenManifest, bases_in, plan_chunks
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.checkpoint.write import DataFileWriter, Encoded, RankSnapshot, digest_chunks
from ckpt.core.format import layout as plan
from ckpt.core.format import table as tables
from ckpt.core.format.codec import CODECS, DELTA, PLANES, RAW, word_of
from ckpt.core.format.codec import encode as coded
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.layout import BITS, Layout, TensorSpec
from ckpt.core.format.manifest import CheckpointId, DataFile, Manifest, is_data, new_nonce, owner, rank_of
from ckpt.core.format.table import SavedShard, Table
from ckpt.core.format.table import columns_of as table_columns
from ckpt.core.log.run_log import Acquire, Commit, RunLog, RunState
from ckpt.errors import CheckpointError, CorruptError, FormatError, SaveError
from ckpt.tools.maintain.listing import sizes_of
from ckpt_backends.memory import MemoryStore
from run_files import DATA, checkpoint_id, data_key, manifest_key, select

CHUNK = 8192
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
State = dict[str, tuple[str, int, bytes]]  # by tensor name: dtype, number of elements, bytes


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit chunks, data files, windows and reads to a few kilobytes."""
    for module in (plan, incremental):
        monkeypatch.setattr(module, "CHUNK", CHUNK)
    monkeypatch.setattr(encode, "SMALL", 64)
    monkeypatch.setattr(encode, "LITTLE", 64)
    monkeypatch.setattr(encode, "LEAST", 0)
    monkeypatch.setattr(write, "FILE", (2 * CHUNK, 8 * CHUNK))
    monkeypatch.setattr(encode, "WINDOW", 3 * CHUNK)
    monkeypatch.setattr(encode, "SELF_CHECK", 3)
    monkeypatch.setattr(chunks_module, "READ", 3 * CHUNK)
    monkeypatch.setattr(chunks_module, "GAP", 300)


# -- a job --


def layout_of(state: State, rank: int = 0, world: int = 1) -> Layout:
    names = sorted(state)
    tensors = tuple(TensorSpec(n, state[n][0], (state[n][1],)) for i, n in enumerate(names) if i % world == rank)
    elsewhere = {n: (state[n][0], (state[n][1],)) for i, n in enumerate(names) if i % world != rank}
    components = [{"path": ["state"], "kind": "module", "facts": {}, "names": names}]  # every rank lists all
    return Layout(tensors, {}, components, rank=rank, world=world, elsewhere=elsewhere)


def data_of(layout: Layout, state: State) -> memoryview:
    return memoryview(b"".join(state[layout.tensors[i].name][2] for i in layout.arrangement.order))


@dataclass
class Job:
    """Ranks that save to one store, one after the other. `saved`: the expected state of each checkpoint."""

    log: RunLog
    mine: Acquire
    encoders: list[Encoder]
    saved: dict[CheckpointId, State] = field(default_factory=dict)

    @classmethod
    async def open(cls, policy: Policy = Policy(), world: int = 1) -> Job:  # noqa: B008
        store = MemoryStore()
        await commits.create_run(store)
        log = RunLog(store)
        await log.open()
        return cls(log, await commits.acquire(log, new_nonce()), [Encoder(policy) for _ in range(world)])

    async def write(self, step: int, state: State, rank: int = 0, number: int = 0) -> WrittenManifest:
        checkpoint = CheckpointId(self.mine.term, step, self.mine.nonce)
        layout = layout_of(state, rank, len(self.encoders))
        data = data_of(layout, state)

        encoder = self.encoders[rank]
        previous = await encoder.previous(self.log, checkpoint, layout)
        return await encoder.write(
            self.log.store,
            RankSnapshot(checkpoint, layout, data, [None]),
            InMemory(layout, data),
            previous,
            numbers=itertools.count(number),
            bases=bases_in(self.log.store),
        )

    async def save(self, step: int, state: State) -> Commit:
        written = [await self.write(step, state, rank) for rank in range(len(self.encoders))]
        found = await commits.commit(self.log, self.mine, written)
        self.saved[found.checkpoint] = dict(state)
        return found

    async def retire(self, last: int) -> None:
        newest = self.log.state.lineage()[0].checkpoint
        await retention.retire(self.log, self.mine, Keep(last), {newest})

    async def table(self, commit: Commit) -> Table:
        return (await read.load_all(self.log.store, commit)).table


async def fetched(store: MemoryStore, table: Table, chunks: Iterable[int]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}

    def sink(chunk: int, data: memoryview) -> None:
        assert chunk not in found, "handed over twice"
        found[chunk] = bytes(data)

    await read.fetch(store, table, read.plan_reads(table, chunks), sink)
    return found


def expected(table: Table, state: State) -> dict[int, bytes]:
    """Return the expected bytes of every chunk of the shards."""
    found: dict[int, bytes] = {}
    for i, shard in enumerate(table.shards):
        at = 0
        for chunk in table.chunks(i):
            length = int(table.length[chunk])
            found[chunk] = state[shard.name][2][at : at + length]
            at += length
        assert at == len(state[shard.name][2])
    return found


async def check(job: Job, pick: Callable[[int], list[int]]) -> None:
    """Check that all live checkpoints have the saved bytes, read whole and by the chunks that `pick` selects."""
    for commit in job.log.state.lineage():
        table = await job.table(commit)
        assert {s.name for s in table.shards} == set(job.saved[commit.checkpoint])
        wanted = expected(table, job.saved[commit.checkpoint])
        assert await fetched(job.log.store, table, range(table.owned)) == wanted  # type: ignore[arg-type]
        some = pick(table.owned)
        assert await fetched(job.log.store, table, some) == {b: wanted[b] for b in some}  # type: ignore[arg-type]
        bases = await fetched(job.log.store, table, range(table.owned, len(table.length)))  # type: ignore[arg-type]
        assert all(chunk_digest(data) == table.digest[chunk].tobytes() for chunk, data in bases.items())
        assert await read.verify(job.log.store, commit) == []


async def check_files(job: Job) -> None:
    """Check that every data file in a live table exists, and that a cleanup leaves no others."""
    named = {key for commit in job.log.state.commits.values() for key in (await job.table(commit)).files}
    there = set(select([info.key async for info in job.log.store.list()], DATA))
    assert named <= there, f"gone: {named - there}"
    assert there <= named, f"nobody needs {there - named}"


# -- states that change --

DTYPES = sorted(BITS)
COUNTS = [0, 1, 7, 100, CHUNK // 4, CHUNK // 4 + 1, 5000]


def content(dice: np.random.Generator, dtype: str, count: int) -> bytes:
    """Return noise, numbers, zeros or edge cases: NaNs, denormals, both zeros, infinities."""
    nbytes, word = count * BITS[dtype] // 8, word_of(dtype)
    match dice.integers(4):
        case 0:
            return dice.bytes(nbytes)
        case 1:
            kind = {8: np.float64, 4: np.float32, 2: np.float16, 1: np.int8}[word]
            return (dice.normal(size=nbytes // word) * 3).astype(kind).tobytes()
        case 2:
            return bytes(nbytes)
    top = 1 << (8 * word - 1)
    odd = np.array([0, 1, top, top + 1, top - 1, 2 * top - 1, top // 2, 3 * (top // 2)], dtype=object) % (2 * top)
    return np.array(dice.choice(odd, nbytes // word), dtype=f"<u{word}").tobytes()


def changed(dice: np.random.Generator, state: State, history: list[State], name: str) -> bytes:
    """Return the bytes of a tensor after a step."""
    dtype, count, data = state[name]
    word, alike = word_of(dtype), [n for n in state if len(state[n][2]) == len(data)]
    match int(dice.choice([0, 0, 0, 1, 1, 2, 3, 4, 5])) if data else 0:
        case 1:  # a few words
            words = np.frombuffer(data, f"<u{word}").copy()
            words[dice.integers(len(words), size=3)] += 1
            return words.tobytes()
        case 2:  # every word a little
            words = np.frombuffer(data, f"<u{word}").copy()
            words += dice.integers(0, 100, size=len(words)).astype(words.dtype)
            return words.tobytes()
        case 3:
            return content(dice, dtype, count)
        case 4:
            return state[str(dice.choice(alike))][2]
        case 5:
            older = history[int(dice.integers(len(history)))].get(name)
            return older[2] if older is not None and older[:2] == (dtype, count) else data
    return data


def next_state(dice: np.random.Generator, history: list[State]) -> State:
    state = dict(history[-1])
    for name in state:
        state[name] = (*state[name][:2], changed(dice, state, history, name))
    if not dice.integers(6):
        del state[str(dice.choice(sorted(state)))]
    if not dice.integers(6) or not state:
        add(dice, state, f"model.more{len(history)}.{dice.integers(3)}.weight")
    return state


def add(dice: np.random.Generator, state: State, name: str) -> None:
    dtype = str(dice.choice(["F32", "F32", "BF16", "BF16", *DTYPES]))
    count = int(dice.choice(COUNTS))
    state[name] = (dtype, count, content(dice, dtype, count))


def first_state(dice: np.random.Generator) -> State:
    state: State = {}
    for i in range(int(dice.integers(1, 7))):
        add(dice, state, f"model.{i}.{dice.choice(['weight', 'bias', 'exp_avg'])}")
    state["model.copy"] = state[sorted(state)[0]]
    count = int(dice.choice(COUNTS))  # a mixed pair
    master = dice.normal(size=count).astype(np.float32)
    state["model.half"] = ("BF16", count, (master.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    state["optim.master"] = ("F32", count, master.tobytes())
    return state


policies = st.builds(
    Policy,
    incremental=st.sampled_from([True, True, True, False]),
    compression=st.sampled_from(["none", "zstd", "zstd", "auto"]),
    full_every=st.integers(1, 8),
)


async def live(seed: int, policy: Policy, world: int, steps: int, keep: int, owners: int) -> Job:
    """Save a series of checkpoints, and check everything after each one."""
    dice = np.random.default_rng(seed)
    job = await Job.open(policy, world)
    history = [first_state(dice)]
    for encoder in job.encoders:
        encoder.sink = float(dice.choice([1e3, 1e15]))  # "auto" depends on it
    with mock.patch.object(incremental, "MAX_OWNERS", owners):
        for step in range(1, steps + 1):
            history.append(next_state(dice, history))
            await job.save(step, history[-1])
            if dice.integers(2):
                await job.retire(keep)
                await check_files(job)
            await check(job, lambda n: sorted(dice.choice(n, size=min(n, 3), replace=False).tolist()) if n else [])
    full = [c for c in job.log.state.lineage() if c.full]
    assert len(full) >= min(2, steps)
    return job


SERIES: dict[str, Any] = {
    "seed": st.integers(0, 2**32 - 1),
    "policy": policies,
    "world": st.sampled_from([1, 1, 2]),
    "steps": st.integers(2, 8),
    "keep": st.integers(1, 4),
    "owners": st.sampled_from([1, 2, 32]),
}


@QUICK
@given(**SERIES)
def test_fetched_bytes_equal_saved_bytes(**series: Any) -> None:
    """For any state, changes and retired checkpoints, all chunks together and any of them alone have every bit. Every
    data file in a table exists, and a cleanup leaves no others."""
    asyncio.run(live(**series))


@pytest.mark.long
@settings(QUICK, max_examples=2000)
@given(**SERIES | {"world": st.sampled_from([1, 1, 2, 3]), "steps": st.integers(2, 30)})
def test_fetched_bytes_equal_saved_bytes_long(**series: Any) -> None:
    """The same test with longer series."""
    asyncio.run(live(**series))


def test_series_cover_all_codecs_and_references() -> None:
    """The states of the test above create references, every codec, and bases in old data files."""
    seen: set[int] = set()
    referred = based = shared = 0

    async def inspect(seed: int) -> None:
        nonlocal referred, based, shared
        job = await live(seed, Policy(compression="zstd", full_every=6), 1, 8, 3, 32)
        for commit in job.log.state.lineage():
            table = await job.table(commit)
            seen.update(table.codec.tolist())
            referred += any(owner(key) != commit.checkpoint for key in table.files)
            based += len(table.length) > table.owned
            locations = list(zip(table.file.tolist(), table.offset.tolist(), table.stored.tolist(), strict=True))
            locations = [p for p in locations if p[2]]
            shared += len(set(locations)) < len(locations)

    for seed in range(8):
        asyncio.run(inspect(seed))
        if seen == set(CODECS) and referred and based and shared:
            return
    raise AssertionError(f"codecs {seen}, references {referred}, bases {based}, shared {shared}")


def test_negative_control_wrong_rows_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """References to the wrong rows, planned without checking digests, are detected."""
    right = plan_chunks

    def wrong(layout: Layout, digests: Any, previous: WrittenManifest | None, **more: Any) -> ChunkPlan:
        found = right(layout, digests, previous, **more)
        taken = found.taken.copy()
        here = np.flatnonzero(taken >= 0)
        taken[here] = np.roll(taken[here], 1)
        return replace(found, taken=taken)

    monkeypatch.setattr(encode, "plan_chunks", wrong)
    failures = 0
    for seed in range(8):
        try:
            asyncio.run(live(seed, Policy(full_every=8), 1, 6, 3, 32))
        except (AssertionError, CheckpointError):
            failures += 1
    assert failures >= 4


def test_negative_control_cleanup_without_references_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only a checkpoint's own files counted as used, a cleanup would delete data files of live tables."""
    right = retention.files_of

    async def wrong(log: RunLog, of: Iterable[Commit]) -> dict[CheckpointId, set[str]]:
        return {a: {k for k in keys if owner(k) == a} for a, keys in (await right(log, of)).items()}

    monkeypatch.setattr(retention, "files_of", wrong)

    async def run() -> None:
        job = await Job.open(Policy(compression="none", full_every=50))
        state: State = {"frozen": ("F32", 5000, np.random.default_rng(0).bytes(20000)), "x": ("F32", 5000, b"")}
        for step in range(1, 9):
            state["x"] = ("F32", 5000, np.random.default_rng(step).bytes(20000))
            await job.save(step, state)
            await job.retire(2)
            await check_files(job)

    monkeypatch.setattr(retention, "ALWAYS", 1)
    with pytest.raises((AssertionError, CheckpointError)):
        asyncio.run(run())
    monkeypatch.setattr(retention, "files_of", right)
    asyncio.run(run())  # the missing references caused the failure


# -- plans --


def noise(layout: Layout, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(layout.arrangement.data_size)


def digests_of(layout: Layout, data: bytes) -> Any:
    return np.frombuffer(digest_chunks(layout, memoryview(data)), np.uint8).reshape(-1, 16)


def previous_of(layout: Layout, digests: Any, *, step: int = 1, size: int | None = None) -> WrittenManifest:
    """Return a checkpoint stored raw in one data file. `size`: the recorded size of the file."""
    checkpoint = CheckpointId(1, step, "0badcafe")
    key = data_key(checkpoint, layout.rank)
    table = write.build_table(layout, key, np.ascontiguousarray(digests).tobytes())
    file = DataFile(key, size or 8192 + layout.arrangement.data_size, 8192, "")
    return WrittenManifest(part_of(checkpoint, [file]), "", table)


def part_of(checkpoint: CheckpointId, files: list[DataFile]) -> Manifest:
    return Manifest(str(checkpoint), 0, 1, {}, [], b"", files)


def test_mostly_unused_data_file_is_dropped() -> None:
    """If less than a quarter of an old data file is needed, that part is stored again."""
    layout = Layout(tuple(TensorSpec(f"t{i}", "U8", (1000,)) for i in range(10)), {}, [])
    data = bytearray(noise(layout, 0))
    was = digests_of(layout, bytes(data))
    old = previous_of(layout, was)
    newer = WrittenManifest(replace(old.manifest, checkpoint=checkpoint_id(2)), "", old.table)
    for count in range(11):
        now = digests_of(layout, noise(layout, 9)).copy()
        now[:count] = was[:count]
        assert (plan_chunks(layout, now, old).taken >= 0).sum() == count
        assert (plan_chunks(layout, now, newer).taken >= 0).sum() == (count if count >= 5 else 0), count


def test_data_files_of_too_many_checkpoints_are_dropped() -> None:
    """Only the newest data files, up to the limit, are used. Other chunks are stored again."""
    count = incremental.MAX_OWNERS + 5
    layout = Layout(tuple(TensorSpec(f"t{i:02}", "U8", (100,)) for i in range(count)), {}, [])
    now = digests_of(layout, noise(layout, 0))
    keys = [data_key(checkpoint_id(i + 1)) for i in range(count)]
    table = replace(previous_of(layout, now).table, file=np.arange(count), offset=np.full(count, 64), files=tuple(keys))
    files = [DataFile(k, 164, 64, "") for k in keys]
    previous = WrittenManifest(part_of(CheckpointId(1, 99, "0badcafe"), files), "", table)
    taken = plan_chunks(layout, now, previous).taken
    assert (taken >= 0).sum() == incremental.MAX_OWNERS
    assert (taken[:5] < 0).all()


def run_state(*commits_: tuple[int, bool]) -> RunState:
    """Return a run with checkpoints, given by step and whether they are full."""
    state = RunState(acquires=[Acquire(1, "0badcafe", None)])
    last = None
    for step, full in commits_:
        checkpoint = CheckpointId(1, step, "0badcafe")
        state.commits[checkpoint] = Commit(checkpoint, 1, ((0, "0" * 64),), "0" * 64, needs=() if full else (last,))  # type: ignore[arg-type]
        last = checkpoint
    return state


def test_policy_decides_which_checkpoints_are_full() -> None:
    """The first two checkpoints are full, then one at a fixed number of save intervals, so that all ranks agree. A long
    chain or a policy without increments also requires a full one."""
    policy = Policy(full_every=10, cadence=100)

    def full(policy: Policy, step: int, state: RunState, chain: int = 0) -> bool:
        return policy.full(state, CheckpointId(1, step, "0badcafe"), chain)

    two = run_state((100, True), (200, True))
    assert full(policy, 100, run_state()) and full(policy, 200, run_state((100, True)))
    assert not full(policy, 300, two)
    assert full(policy, 1000, two) and full(policy, 2000, two)
    assert not full(policy, 1001, two) and not full(policy, 210, two)
    assert full(policy, 1234, two, chain=19) and not full(policy, 1234, two, chain=18)
    assert full(Policy(full_every=1000), 7, two, chain=incremental.MAX_CHAIN - 1)
    assert full(replace(policy, incremental=False), 300, two)
    assert full(Policy(full_every=1), 7, two)
    assert full(policy, 300, run_state((100, True), (200, False))), "one is not enough"
    assert full(policy, 150, two), "what comes after it does not count"


# -- data files --


def packed(state: State, encoded: Callable[[Layout, InMemory], list[Encoded]]) -> tuple[MemoryStore, DataFileWriter]:
    layout = layout_of(state)
    source = InMemory(layout, data_of(layout, state))
    store = MemoryStore()

    async def work() -> DataFileWriter:
        writer = DataFileWriter(
            store, RankSnapshot(CheckpointId(1, 1, "0badcafe"), layout, source.data, []), itertools.count(), 1 << 20
        )
        for one in encoded(layout, source):
            await writer.add(one)
        await writer.finish()
        return writer

    return store, asyncio.run(work())


def test_data_files_are_valid_safetensors() -> None:
    """Any safetensors reader opens a data file: raw tensors by name and dtype, other chunks as bytes."""
    dice = np.random.default_rng(0)
    state: State = {
        "a": ("F32", 5000, dice.bytes(20000)),
        "b": ("I16", 100, dice.bytes(200)),
        "c": ("C128", 3, dice.bytes(48)),
        "d": ("F32", 5000, bytes(20000)),
    }

    def some(layout: Layout, source: InMemory) -> list[Encoded]:
        found = []
        for i, chunk in enumerate(layout.arrangement.chunks):
            plain = source.peek(i)
            encoded = layout.tensors[chunk.tensor].name == "d" and i % 2
            data = coded(PLANES, plain, 4) if encoded else plain
            found.append(Encoded(i, PLANES if encoded else RAW, data))
        return found

    store, writer = packed(state, some)
    (info,) = writer.files
    tensors = safetensors.numpy.load(store.objects[info.key])
    assert tensors["a"].tobytes() == state["a"][2] and tensors["a"].dtype == np.float32
    assert tensors["c[0]"].tobytes() == state["c"][2] and tensors["c[0]"].dtype == np.uint8
    assert {name for name in tensors if name.startswith("d")} == {"d[0]", "d[1]", "d[2]"}


def test_names_that_look_like_chunks_do_not_collide() -> None:
    """A tensor may be named like a chunk of another one: every byte of the data file still has an entry."""
    dice = np.random.default_rng(0)
    for names in (("a", "a[0]"), ("a[0]", "a")):
        state: State = {names[0]: ("U8", 9000, dice.bytes(9000)), names[1]: ("U8", 100, dice.bytes(100))}

        def first_only(layout: Layout, source: InMemory) -> list[Encoded]:
            """Encode one chunk of the long tensor and the whole short one."""
            chunks = layout.arrangement.chunks
            keep = [i for i, b in enumerate(chunks) if b.length in (100, CHUNK)]
            return [Encoded(i, RAW, source.peek(i)) for i in keep]

        store, writer = packed(state, first_only)
        tensors = safetensors.numpy.load(store.objects[writer.files[0].key])
        assert sum(t.nbytes for t in tensors.values()) == CHUNK + 100, names


# -- valid tables --

KEY = data_key(checkpoint_id(1), number=1)
COUNT, HALF = 1024, 2048  # elements of a tensor, bytes of half an fp32 tensor


def genuine() -> tuple[MemoryStore, Table, dict[int, bytes]]:
    """Return a table made by hand: two fp32 tensors, the first with a delta, a bf16 tensor, and bases after them."""
    dice = np.random.default_rng(0)
    old = dice.normal(size=COUNT).astype(np.float32)
    one, two = old + np.float32(1e-3), dice.normal(size=COUNT).astype(np.float32)
    half = torch.from_numpy(one).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    plain = [one.tobytes()[:HALF], one.tobytes()[HALF:], two.tobytes(), half]
    bases = [old.tobytes()[:HALF], old.tobytes()[HALF:]]
    rows = [
        (DELTA, coded(DELTA, plain[0], 4, bases[0]), 4),
        (RAW, plain[1], -1),
        (PLANES, coded(PLANES, plain[2], 4), -1),
        (PLANES, coded(PLANES, half, 2), -1),
        (RAW, bases[0], -1),
        (RAW, bases[1], -1),
    ]
    store, offset, offsets = MemoryStore(), 64, []
    for _, data, _ in rows:
        offsets.append(offset)
        offset += len(data)
    store.objects[KEY] = bytes(64) + b"".join(data for _, data, _ in rows)
    shards = [("one", "F32", COUNT, 2), ("two", "F32", COUNT, 1), ("half", "BF16", COUNT, 1)]
    table = Table(
        shards=tuple(SavedShard(name, dtype, (n,), (0,), (n,)) for name, dtype, n, _ in shards),
        starts=np.cumsum([0, *(n for *_, n in shards)]),
        file=np.zeros(6, np.int64),
        offset=np.array(offsets, np.int64),
        stored=np.array([len(data) for _, data, _ in rows], np.int64),
        length=np.array([len(p) for p in (*plain, *bases)], np.int64),
        codec=np.array([codec for codec, *_ in rows], np.int64),
        base=np.array([base for *_, base in rows], np.int64),
        digest=as_digests([*plain, *bases]),
        stored_digest=as_digests([data for _, data, _ in rows]),
        files=(KEY,),
    )
    return store, table, dict(enumerate([*plain, *bases]))


def as_digests(data: list[bytes]) -> Any:
    return np.frombuffer(b"".join(chunk_digest(d) for d in data), np.uint8).reshape(-1, 16)


def at(column: str, row: int, value: int) -> Callable[[Table], Table]:
    def change(table: Table) -> Table:
        found = getattr(table, column).copy()
        found[row] = value
        return replace(table, **{column: found})

    return change


def both(*changes: Callable[[Table], Table]) -> Callable[[Table], Table]:
    def change(table: Table) -> Table:
        for one in changes:
            table = one(table)
        return table

    return change


IMPOSSIBLE: dict[str, Callable[[Table], Table]] = {
    "a delta against itself": at("base", 0, 0),
    "a delta against nothing": at("base", 0, -1),
    "a delta against a chunk of another length": at("length", 4, HALF - 4),
    "a base far behind the end": at("base", 0, 2**40),
    "a base that is a delta": both(at("codec", 4, DELTA), at("base", 4, 5)),
    "bases in a circle": both(at("codec", 4, DELTA), at("codec", 5, DELTA), at("base", 4, 5), at("base", 5, 4)),
    "stored in more than it is": at("stored", 2, 2 * HALF + 1),
    "a negative length": at("length", 4, -1),
    "a data file that is not there": at("file", 0, 1),
    "a chunk larger than any": both(at("length", 4, tables.MAX_CHUNK + 1), at("length", 0, tables.MAX_CHUNK + 1)),
    "starts behind the end": lambda table: replace(table, starts=np.array([0, 2, 3, 9])),
}


def test_table_is_unchanged_after_a_round_trip() -> None:
    """The valid table of these tests is accepted. All columns survive, and reads in any order return the bytes."""
    store, table, plain = genuine()
    again = Table.from_bytes(table.to_bytes(), "a table")
    for name in ("starts", "file", "offset", "stored", "length", "codec", "base", "digest", "stored_digest"):
        assert (getattr(again, name) == getattr(table, name)).all(), name
    assert (again.shards, again.files) == (table.shards, table.files)
    for count in range(1, 7):
        for chunks in itertools.combinations(range(6), count):
            assert asyncio.run(fetched(store, again, chunks)) == {b: plain[b] for b in chunks}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_table_raises_corrupt_error(name: str) -> None:
    """An impossible or circular table raises CorruptError before any read."""
    with pytest.raises(CorruptError):
        Table.from_bytes(IMPOSSIBLE[name](genuine()[1]).to_bytes(), "a table")


def test_unknown_codec_raises_format_error() -> None:
    """The file is not damaged, so the error recommends an upgrade."""
    for row, codec in ((2, 77), (4, 255), (0, 3)):
        with pytest.raises(FormatError, match=rf"codec {codec}, .*pip install -U everystep"):
            Table.from_bytes(at("codec", row, codec)(genuine()[1]).to_bytes(), "a table")


def columns_of(raw: bytes) -> dict[str, Any]:
    return dict(table_columns(raw, "a table"))


def test_wrong_base_is_detected_by_the_digest() -> None:
    """The stored bytes are intact but the base is wrong, so the digest of the decoded bytes does not match."""
    store, table, _ = genuine()
    swapped = at("base", 0, 5)(table)
    with pytest.raises(CorruptError, match="its decoded bytes do not match their digest"):
        asyncio.run(fetched(store, swapped, [0]))


@QUICK
@given(seed=st.integers(0, 2**32 - 1), wanted=st.data())
def test_reads_are_bounded_and_cover_all_chunks(seed: int, wanted: st.DataObject) -> None:
    """Every chunk is in one batch, with all its bases. Only a read of a single chunk may exceed the limit."""
    dice = np.random.default_rng(seed)
    state = first_state(dice)

    async def made() -> Table:
        job = await Job.open(Policy(compression="zstd", full_every=100))
        for step in range(1, 5):
            commit = await job.save(step, state)
            for name in state:
                state[name] = (*state[name][:2], changed(dice, state, [state], name))
        return await job.table(commit)

    table = asyncio.run(made())
    chunks = wanted.draw(st.sets(st.integers(0, len(table.length) - 1))) if len(table.length) else set()
    batches = read.plan_reads(table, chunks)
    assert sorted(b for batch in batches for b in batch.chunks) == sorted(chunks)
    for batch in batches:
        inside = {b for r in batch.reads for b in r.chunks}
        assert {b for b in chunks_module.closure(table, batch.chunks) if table.stored[b]} == inside
        for r in batch.reads:
            assert r.length <= chunks_module.READ or len(r.chunks) == 1
            for b in r.chunks:
                assert r.file == table.files[table.file[b]]
                assert r.start <= table.offset[b] and table.offset[b] + table.stored[b] <= r.start + r.length
    order = chunks_module.closure(table, sorted(chunks))
    assert set(order) >= chunks and len(set(order)) == len(order)
    bases = {b: int(table.base[b]) for b in order if table.base[b] >= 0}
    assert all(order.index(base) < order.index(b) for b, base in bases.items())


def test_increment_of_adapters_stores_only_changes() -> None:
    """With frozen weights, an increment stores at most 1.02 times the bytes of the adapters, headers included."""

    async def run() -> None:
        job = await Job.open(Policy(compression="zstd", full_every=50))
        dice = np.random.default_rng(0)
        state: State = {f"frozen{i}": ("F32", 50_000, dice.bytes(200_000)) for i in range(10)}
        for step in range(1, 6):
            for i in range(4):
                state[f"lora{i}"] = ("F32", 20_000, dice.bytes(80_000))
            commit = await job.save(step, state)
        objects = job.log.store.objects  # type: ignore[attr-defined]
        stored = sum(len(objects[key]) for key in select(objects, DATA, of=commit.checkpoint))
        assert not commit.full and 4 * 80_000 <= stored <= 1.02 * 4 * 80_000

    asyncio.run(run())


def random_state(count: int = 4) -> State:
    dice = np.random.default_rng(0)
    return {f"t{i}": ("F32", 5000, dice.normal(size=5000).astype(np.float32).tobytes()) for i in range(count)}


def test_next_checkpoint_is_full_if_others_commit_while_damage_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification of step 5 finds damage while steps 6 and 7 are committed: step 8 builds on none of them.
    Negative control: without damage it is an increment."""

    async def run(damaged: bool) -> bool:
        job, state = await Job.open(Policy(compression="none", full_every=50)), random_state()
        tier = OpenTier("memory://", Keep(1), job.log, encoder=job.encoders[0])
        for step in (1, 2, 3, 4, 5):
            await job.save(step, state)

        async def slow(*_: Any, **__: Any) -> list[str]:
            for step in (6, 7):
                await job.save(step, state)
            return ["a chunk is damaged"] if damaged else []

        monkeypatch.setattr(open_tier, "verify", slow)
        notes = list[Any]()
        await tier.sweep(job.mine, notes.append)
        assert [(note.error, "step 5" in note.text) for note in notes] == [("SaveError", True)] * damaged
        return (await job.save(8, state)).full

    assert asyncio.run(run(True)) and not asyncio.run(run(False))


def test_save_fails_if_its_base_was_found_damaged() -> None:
    """SaveError names the step, the checkpoint is aborted, and the next one of each rank is full. A checkpoint in
    flight when the damage was found is committed. Negative control: a committer unaware of the damage commits it."""

    async def run() -> None:
        job, state = await Job.open(Policy(compression="none", full_every=50), world=2), random_state()
        found = [await job.save(step, state) for step in (1, 2, 3)]
        first, second = job.encoders
        checkpoints = [CheckpointId(job.mine.term, step, job.mine.nonce) for step in (4, 5)]
        parts = {step: [await job.write(step, state, rank) for rank in (0, 1)] for step in (4, 5)}
        first.distrust(checkpoints[0])
        await commits.commit_or_end(job.log, job.mine, parts[4], distrusted=first.distrusted)
        assert checkpoints[0] in job.log.state.commits
        with pytest.raises(SaveError, match="step 5 builds on step 3, which is damaged: the next save will be whole"):
            await commits.commit_or_end(job.log, job.mine, parts[5], distrusted=first.distrusted)
        assert commits.WHOLE_NEXT in job.log.state.reasons[checkpoints[1]]
        commits.check_trusted(
            [replace(one, manifest=replace(one.manifest, reason="ring")) for one in parts[5]], checkpoints[0]
        )
        for encoder in (first, second):
            encoder.distrust(checkpoints[1])
        assert (await job.save(6, state)).full and found[-1].checkpoint in job.log.state.commits

        other = await Job.open(Policy(compression="none", full_every=50), world=2)
        for step in (1, 2, 3):
            await other.save(step, state)
        parts[4] = [await other.write(4, state, rank) for rank in (0, 1)]
        await commits.commit_or_end(other.log, other.mine, parts[4])
        assert other.log.state.lineage()[0].step == 4

    asyncio.run(run())


# -- failures --


def test_promotion_uses_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads from the source tier are limited to one window, however many tensors there are."""
    most: list[int] = []
    right = incremental.InStore.load

    async def counted(self: incremental.InStore, chunks: Any) -> Any:
        most.append(sum(int(self.table.length[b]) for b in chunks))
        return await right(self, chunks)

    monkeypatch.setattr(incremental.InStore, "load", counted)

    async def run() -> None:
        dice = np.random.default_rng(0)
        near, far = await Job.open(Policy(compression="none")), await Job.open(Policy(compression="zstd"))
        state: State = {}
        for i in range(40):
            state[f"m{i}"] = ("F32", CHUNK // 4, dice.normal(size=CHUNK // 4).astype(np.float32).tobytes())
        written = await near.write(1, state)
        layout = layout_of(state)
        snapshot = RankSnapshot(CheckpointId(1, 1, "0badcafe"), layout, memoryview(b""), [])
        source = incremental.InStore(near.log.store, written.table)
        there = await far.encoders[0].write(far.log.store, snapshot, source, None)
        wanted = expected(there.table, state)
        assert await fetched(far.log.store, there.table, range(there.table.owned)) == wanted  # type: ignore[arg-type]

    asyncio.run(run())
    assert 0 < max(most) <= encode.WINDOW, f"{max(most)} bytes"


def test_rank_without_own_bytes_is_not_gone() -> None:
    """A rank without tensors has no data file in a compressed tier: its full checkpoint still has a size. It is gone if
    the data file of the other rank was deleted, or the manifest of the rank without one."""

    async def scenario() -> None:
        for lost in (None, "data", "manifest"):
            job = await Job.open(Policy(compression="zstd"), world=2)
            commit = await job.save(1, {"a": ("F32", 512, bytes(range(256)) * 8)})
            keys = [info.key async for info in job.log.store.list("steps/")]
            (data,) = (key for key in keys if is_data(key))
            assert commit.full and commit.world == 2 and rank_of(data) == 0
            if lost is not None:
                await job.log.store.delete(data if lost == "data" else manifest_key(commit.checkpoint, 1))
            (size,), total = await sizes_of(job.log, [commit])
            assert (size is None) == (lost is not None), lost
            assert total == size or lost is not None

    asyncio.run(scenario())
