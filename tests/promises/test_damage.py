"""Damage to what is stored: every byte of every small file, and many of the large ones.

One small run of three checkpoints is built once and copied for each injury. The oracle reads the newest checkpoint back
the way a restore does, older ones if it cannot be used: what comes back must be, bit for bit, what was saved for that
step, or there must be an error of ours. Nothing in between, no other error, no hang.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ckpt.checkpoint import blobs, commit, parts, read, retention
from ckpt.checkpoint.retention import Keep
from ckpt.checkpoint.write import RankSnapshot, digest_blobs, write_part
from ckpt.errors import CheckpointError, CorruptError, NoCheckpointError
from ckpt.format import manifest
from ckpt.format.digest import blob_digest
from ckpt.format.layout import BLOB, Layout, TensorSpec
from ckpt.format.manifest import Attempt, new_nonce
from ckpt.ipc.arena import SEALED, Arena, Label
from ckpt.ranks.world import World
from ckpt.restore.restore_first import Restored, restore_first
from ckpt.restore.sources import HeldSnapshot as Sealed
from ckpt.restore.sources import MemorySource
from ckpt.runlog.log import Acquire, Commit, RunLog
from ckpt.state.capture import Capture
from ckpt_backends.memory import MemoryStore

STEPS = (10, 20, 30)
PAGE = 4096
LABEL = slice(PAGE + 8, PAGE + 104)  # of the first slot of an arena, behind its sequence number
BIG = TensorSpec("big", "F32", ((BLOB + 64) // 4,))  # two blobs
SMALL = (
    TensorSpec("model.weight", "F32", (8, 4)),
    TensorSpec("model.bias", "BF16", (4,)),
    TensorSpec("model.count", "I64", ()),
    TensorSpec("nothing", "F16", (0, 3)),
)
VALUES = [{"epoch": 3, "name": "größe", "tuple": {"$": "tuple", "v": [1, 2]}}]
Objects = dict[str, bytes]


def layout(*tensors: TensorSpec) -> Layout:
    component = {"path": ["x"], "kind": "plain", "facts": {}, "names": [t.name for t in tensors]}
    return Layout(tensors, {"tied": tensors[0].name}, [component])


def content(of: Layout, step: int) -> bytes:
    return random.Random(f"{step} {of.digest}").randbytes(of.arrangement.data_size)


async def save(log: RunLog, mine: Acquire, of: Layout, step: int, data: bytes | None = None) -> Commit:
    attempt = Attempt(mine.epoch, step, mine.nonce)
    snapshot = RankSnapshot(attempt, of, memoryview(data or content(of, step)), VALUES)
    return await commit.commit(log, mine, [await write_part(log.store, snapshot)])


async def built(of: Layout, steps: tuple[int, ...]) -> Objects:
    store = MemoryStore()
    await commit.create_run(store)
    log = RunLog(store)
    await log.open()
    mine = await commit.acquire(log, new_nonce())
    for step in steps:
        await save(log, mine, of, step)
    return store.objects


@pytest.fixture(scope="module")
def small() -> Objects:
    """Three checkpoints of small tensors."""
    return asyncio.run(built(layout(*SMALL), STEPS))


@pytest.fixture(scope="module")
def large() -> Objects:
    """Two checkpoints with a tensor of two blobs."""
    return asyncio.run(built(layout(*SMALL, BIG), STEPS[:2]))


# -- the oracle --


@dataclass(frozen=True)
class Read:
    step: int
    data: bytes
    values: Any


async def read_one(store: MemoryStore, found: Commit) -> Read:
    """One checkpoint, by the same steps as `ckpt.restore.sources.StoreSource`."""
    whole = await read.load_manifest(store, found)
    of, saved = whole.layout(), whole.saved()
    offsets = dict(zip((t.name for t in of.tensors), of.arrangement.offsets, strict=True))
    data = bytearray(of.arrangement.data_size)
    blobs = [blob for key in saved.tensors for blob in saved.blobs(key)]
    seen = 0

    def sink(blob: int, view: memoryview) -> None:
        nonlocal seen
        start = offsets[whole.table.shards[int(saved.shard_of_blob[blob])].name] + int(saved.position[blob])
        data[start : start + len(view)] = view
        seen += len(view)

    await read.fetch(store, whole.table, read.plan_reads(whole.table, blobs), sink)
    assert seen == len(data)
    return Read(found.step, bytes(data), whole.parts[0].values)


async def restored(objects: Objects) -> Read:
    """The newest checkpoint that can be read, or an error of ours."""
    store = MemoryStore(objects=objects)
    log = await read.open_run("memory://run", store)
    problems: list[str] = []
    for found in log.state.lineage():
        try:
            return await read_one(store, found)
        except CheckpointError as error:
            problems.append(str(error))
    raise NoCheckpointError(f"nothing can be restored: {problems}, log {log.state.damaged}")


def outcome(objects: Objects, of: Layout) -> int | None:
    """The step that came back whole, None for an error of ours. Anything else fails the test."""

    async def bounded() -> Read:
        return await asyncio.wait_for(restored(objects), 20)

    try:
        found = asyncio.run(bounded())
    except CheckpointError:
        return None
    assert found.data == content(of, found.step), f"step {found.step} came back with wrong tensors"
    assert found.values == VALUES, f"step {found.step} came back with wrong values"
    return found.step


def flipped(raw: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[position] ^= 1 << bit
    return bytes(changed)


def injuries(raw: bytes, other: bytes, dice: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """What else than a flipped bit can happen to one file."""
    cuts = {0, 1, len(raw) // 2, len(raw) - 1, max(0, len(raw) - PAGE)}
    yield from ((f"cut to {size}", raw[:size]) for size in sorted(cuts) if size < len(raw))
    yield "longer by a byte", raw + b"\0"
    yield "longer by a page", raw + bytes(PAGE)
    for start in range(0, len(raw), PAGE):
        zeroed = raw[:start] + bytes(len(raw[start : start + PAGE])) + raw[start + PAGE :]
        if zeroed != raw:
            yield f"page at {start} zeroed", zeroed
    at = dice.randrange(len(raw))
    yield "a part of it twice", raw[:at] + raw[at // 2 :]
    yield "another run's", other
    yield "gone", None
    yield "noise", dice.randbytes(len(raw))


def counterpart(key: str, others: Objects) -> bytes:
    """The file of another run that is most like this one."""
    folder = key.split("/")[0]
    ending = key.rpartition(".")[2]
    return others.get(key) or next(v for k, v in sorted(others.items()) if k.startswith(folder) and k.endswith(ending))


def injured(objects: Objects, key: str, raw: bytes | None) -> Objects:
    changed = {**objects, key: raw or b""}
    if raw is None:
        del changed[key]
    return changed


def belongs_to(key: str) -> int | None:
    """The step of the checkpoint that a file is part of."""
    found = manifest.owner(key)
    return found.step if found else None


def structure(objects: Objects) -> list[str]:
    return [key for key in sorted(objects) if not key.startswith("packs/")]


def header_size(pack: bytes) -> int:
    return 8 + int.from_bytes(pack[:8], "little")


def check_flips(objects: Objects, of: Layout, key: str, positions: list[int], bits: Callable[[], list[int]]) -> int:
    """Each flip alone: never wrong, and never more lost than what the file belongs to. Returns how many."""
    count, own, newest = 0, belongs_to(key), max(belongs_to(k) or 0 for k in objects)
    for position in positions:
        for bit in bits():
            step = outcome(injured(objects, key, flipped(objects[key], position, bit)), of)
            count += 1
            assert step is not None, f"one flipped bit at {position} of {key}, and nothing can be restored"
            assert step == newest or own in (None, newest), f"damage to step {own} cost step {newest}"
    return count


# -- flips --


def test_the_undamaged_run_comes_back(small: Objects, large: Objects) -> None:
    """The oracle accepts what is whole."""
    assert outcome(small, layout(*SMALL)) == 30
    assert outcome(large, layout(*SMALL, BIG)) == 20


@pytest.mark.parametrize("kind", ["FORMAT", "log", "parts", "index"])
def test_a_flip_in_any_structure_byte(small: Objects, kind: str) -> None:
    """One random bit of every third byte of the small files; of older checkpoints, of some. See `every bit` below."""
    dice, count = random.Random(kind), 0
    for key in [k for k in structure(small) if k.startswith(kind) and belongs_to(k) in (None, 20, 30)]:
        where = range(dice.randrange(3), len(small[key]), 3)
        some = dice.sample(where, 13) if belongs_to(key) == 20 else list(where)
        count += check_flips(small, layout(*SMALL), key, some, lambda: [dice.randrange(8)])
    print(f"{count} flips in {kind}, no wrong tensor")


def test_a_flip_in_a_pack_header_is_harmless_and_noticed(small: Objects) -> None:
    """We do not read by the header of a pack, so the newest step comes back; `verify` notices, as others do."""
    check_header_flips(small, every=5)


def check_header_flips(small: Objects, every: int) -> None:
    key = next(k for k in small if k.startswith("packs/") and belongs_to(k) == 30)
    dice = random.Random(4)
    for position in range(0, header_size(small[key]), every):
        changed = injured(small, key, flipped(small[key], position, dice.randrange(8)))
        assert outcome(changed, layout(*SMALL)) == 30
        assert problems_of(changed, 30)


def check_tensor_flips(objects: Objects, of: Layout, count: int) -> None:
    key = max(k for k in objects if k.startswith("packs/"))
    start, dice = header_size(objects[key]), random.Random(5)
    assert count == 0 or len(objects[key]) > start
    for _ in range(count):
        position = dice.randrange(start, len(objects[key]))
        step = outcome(injured(objects, key, flipped(objects[key], position, dice.randrange(8))), of)
        assert step is not None and step < belongs_to(key)  # type: ignore[operator]
    print(f"{count} flips in tensor data, all noticed")


def test_flips_in_tensor_data_fall_back_to_the_older_checkpoint(small: Objects, large: Objects) -> None:
    """Every flip makes the restore pass over that checkpoint; 500 in small tensors, 50 in one of several blobs."""
    check_tensor_flips(small, layout(*SMALL), 500)
    check_tensor_flips(large, layout(*SMALL, BIG), 50)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_bit_of_every_structure_file(small: Objects) -> None:
    """All eight bits of every byte, and 50,000 flips of tensor data."""
    check_header_flips(small, every=1)
    count = 0
    for key in structure(small):
        count += check_flips(small, layout(*SMALL), key, list(range(len(small[key]))), lambda: list(range(8)))
    print(f"{count} flips in structure files, no wrong tensor")
    check_tensor_flips(small, layout(*SMALL), 50_000)


# -- other injuries --


def test_other_injuries_of_any_one_file(small: Objects) -> None:
    """Cut, extended, zeroed, doubled, replaced, removed, noise: some checkpoint always comes back, and a true one."""
    others = asyncio.run(built(layout(TensorSpec("other", "F32", (5,))), STEPS))
    dice, count = random.Random(6), 0
    for key in sorted(small):
        for name, raw in injuries(small[key], counterpart(key, others), dice):
            step = outcome(injured(small, key, raw), layout(*SMALL))
            count += 1
            other_root = key == "FORMAT.json" and name == "another run's"
            assert step is not None or other_root, f"{key} {name}: nothing can be restored"
            if belongs_to(key) not in (None, 30):
                assert step == 30, f"{key} {name}: damage to an older checkpoint cost the newest"
    print(f"{count} injuries of single files")


def test_injuries_of_a_pack_of_several_blobs(large: Objects) -> None:
    """The same for the newest pack of the larger run: the older checkpoint comes back."""
    key, dice = max(k for k in large if k.startswith("packs/")), random.Random(7)
    raw = large[key]
    last = (len(raw) - 1) // PAGE * PAGE
    for start in (PAGE, BLOB, last):
        assert (
            outcome(
                injured(large, key, raw[:start] + bytes(len(raw[start : start + PAGE])) + raw[start + PAGE :]),
                layout(*SMALL, BIG),
            )
            == 10
        )
    for cut in (0, PAGE, BLOB, len(raw) - 1):
        assert outcome(injured(large, key, raw[:cut]), layout(*SMALL, BIG)) == 10
    swapped = raw[:PAGE] + raw[2 * PAGE : 3 * PAGE] + raw[PAGE : 2 * PAGE] + raw[3 * PAGE :]
    assert outcome(injured(large, key, swapped), layout(*SMALL, BIG)) == 10
    assert outcome(injured(large, key, raw + dice.randbytes(9)), layout(*SMALL, BIG)) == 10


def test_any_two_files_swapped(small: Objects) -> None:
    """Every pair of files: what comes back is true, or an error of ours."""
    keys, seen = sorted(small), Counter[int | None]()
    for i, a in enumerate(keys):
        for b in keys[i + 1 :]:
            seen[outcome({**small, a: small[b], b: small[a]}, layout(*SMALL))] += 1
    print(f"{seen.total()} swaps: steps {dict(seen)}")
    assert seen[30] and seen[20]


def test_everything_damaged_at_once_is_an_error_of_ours(small: Objects) -> None:
    """Noise in every file of a kind."""
    dice = random.Random(8)
    for kind in ("FORMAT", "log/", "parts/", "index/", "packs/"):
        noise = {k: dice.randbytes(len(v)) if k.startswith(kind) else v for k, v in small.items()}
        step = outcome(noise, layout(*SMALL))
        assert (step == 30) == (
            kind in ("FORMAT", "index/")
        )  # the log says whose it is, the parts what is in the index


# -- the log --


def appended_after(objects: Objects) -> tuple[int | None, list[str]]:
    """What a new job makes of a damaged run: the step it can save and read back, and what was deleted."""

    async def scenario() -> tuple[int | None, list[str]]:
        store = MemoryStore(objects=dict(objects))
        log = RunLog(store)
        await commit.create_run(store)
        await log.open()
        damaged = list(log.state.damaged)
        mine = await commit.acquire(log, new_nonce())
        await commit.recover(log, mine)
        saved = [await save(log, mine, layout(*SMALL), step) for step in (40, 50, 60, 70)]
        assert damaged, "the damage was not noticed"
        assert await retention.retire(log, mine, Keep(last=1), {saved[-1].attempt}) == set()
        back = await read_one(store, (await read.open_run("memory://run", store)).state.lineage()[0])
        assert back.data == content(layout(*SMALL), back.step)
        return back.step, [key for key in objects if key not in store.objects]

    return asyncio.run(scenario())


def test_a_run_with_a_damaged_record_goes_on_and_loses_nothing(small: Objects) -> None:
    """Whichever record is damaged: a new job can take over and save, and nothing is ever deleted from such a run."""
    dice = random.Random(9)
    for key in [k for k in sorted(small) if k.startswith("log/")]:
        for raw in (flipped(small[key], dice.randrange(len(small[key])), dice.randrange(8)), b"", small[key][:-1]):
            assert appended_after(injured(small, key, raw)) == (70, [])
    missing = injured(small, "log/000000000002.json", None)
    assert appended_after(missing) == (70, [])


def test_negative_control_a_whole_run_is_cleaned_up(small: Objects) -> None:
    """Without damage the same clean-up does delete, so the test above can fail."""
    with pytest.raises(AssertionError, match="the damage was not noticed"):
        appended_after(small)

    async def scenario() -> set[Attempt]:
        store = MemoryStore(objects=dict(small))
        log = await read.open_run("memory://run", store)
        mine = log.state.acquires[-1]
        return await retention.retire(log, mine, Keep(last=1), {log.state.lineage()[0].attempt})

    assert {a.step for a in asyncio.run(scenario())} == {10}


# -- verify --


def problems_of(objects: Objects, step: int) -> list[str]:
    async def scenario() -> list[str]:
        log = await read.open_run("memory://run", MemoryStore(objects=objects))
        return await read.verify(log.store, read.choose(log, step))

    return asyncio.run(scenario())


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_verify_notices_every_flip_in_the_files_of_a_checkpoint(small: Objects, every: int) -> None:
    """In part, table and index, in the header, and in the data; in CI at every fifth byte."""
    dice, count = random.Random(10), 0
    assert problems_of(small, 20) == []
    for key in [k for k in sorted(small) if belongs_to(k) == 20]:
        raw = small[key]
        positions = list(range(len(raw)))
        if key.startswith("packs/"):
            positions = [*range(0, header_size(raw), 7), *range(header_size(raw), len(raw))]
        for position in positions[::every]:
            assert problems_of(injured(small, key, flipped(raw, position, dice.randrange(8))), 20), (key, position)
            count += 1
    print(f"{count} flips, all noticed by verify")


def test_verify_notices_missing_and_cut_files(small: Objects) -> None:
    """Every file of a checkpoint, gone or one byte short, is a problem that is told and not an error that is raised."""
    for key in [k for k in sorted(small) if belongs_to(k) == 20]:
        assert problems_of(injured(small, key, None), 20)
        assert problems_of(injured(small, key, small[key][:-1]), 20)


# -- negative controls --


def test_negative_control_without_digests_of_blobs(small: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """If tensor data were not checked, a flip would come back as a wrong tensor, and the oracle says so."""
    monkeypatch.setattr(blobs, "blob_digest", lambda view: Anything())
    with pytest.raises(AssertionError, match="wrong tensors"):
        check_tensor_flips(small, layout(*SMALL), 1)


class _Equal:
    """Equals every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class Anything(_Equal, bytes):
    """The digest of every blob."""


class AnyText(_Equal, str):
    """The digest of every file."""


def test_negative_control_without_digests_of_small_files(small: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """If parts were not checked, a changed value would come back, and the oracle says so."""
    key = next(k for k in small if k.startswith("parts/") and k.endswith("30.0.0.json"))
    at = small[key].index(b'"epoch":3') + 8

    def trusting(raw: bytes, what: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(bytes(raw))
        del data["digest"]
        return data

    damaged = injured(small, key, flipped(small[key], at, 0))
    assert outcome(damaged, layout(*SMALL)) == 20
    monkeypatch.setattr(manifest, "unseal", trusting)
    monkeypatch.setattr(parts, "file_digest", lambda data: AnyText())
    with pytest.raises(AssertionError, match="wrong values"):
        outcome(damaged, layout(*SMALL))


# -- memory --


def snapshot_in_memory() -> Sealed:
    """A sealed slot of a real state, with the digests that the writer would have of it."""
    state = live_state()
    reading = Capture(state).read()
    of, values = reading.layout, json.dumps(reading.values).encode()
    arena = Arena.create(1, of.arrangement.data_size + PAGE + len(values))
    data = content(of, 1)
    arena.data(0)[: len(data)] = data
    label = Label(SEALED, 1, Attempt(1, 1, "0" * 8), of.digest, len(data), len(values), 0.0)
    arena.set_label(0, label)
    arena.values(0, label)[:] = values
    return Sealed(arena, 0, label, of, digest_blobs(of, memoryview(data)) + blob_digest(values))


def live_state() -> dict[str, Any]:
    import torch

    return {"x": torch.zeros(300), "y": torch.zeros(7, dtype=torch.int64), "meta": {"lr": 0.125, "seen": [1, 2, 3]}}


def restore_memory(snapshot: Sealed, into: dict[str, Any], on_touch: Callable[[], None] = lambda: None) -> Restored:
    """As `Checkpointer.restore` does it; CorruptError where it would go on to another source."""
    result = Restored(step=None)
    source = MemorySource(snapshot.attempt, [snapshot], alone=True)
    if restore_first(World(), [source], Capture(into), result, strict=True, on_touch=on_touch) is None:
        raise CorruptError(result.skipped[0].reason)
    assert into["meta"] == live_state()["meta"], "wrong values"
    return result


def held(of: Layout, state: dict[str, Any]) -> bytes:
    """The bytes of a state, in the order of its layout."""
    return b"".join(state[of.tensors[i].name].numpy().tobytes() for i in of.arrangement.order)


def restored_bytes(snapshot: Sealed) -> bytes:
    state = live_state()
    result = restore_memory(snapshot, state)
    assert (result.verified, result.nbytes) == (True, snapshot.label.data_size)
    return held(snapshot.layout, state)


def test_a_flip_in_memory_after_it_was_digested_is_noticed() -> None:
    """Data, plain values, label: a flipped bit in a sealed slot is a CorruptError, and nothing damaged is handed over.

    Values and label are checked before the state is touched, data as it is filled: a small piece of it before it is.
    """
    snapshot = snapshot_in_memory()
    arena, slot, label, of = snapshot.arena, snapshot.slot, snapshot.label, snapshot.layout
    assert restored_bytes(snapshot) == content(of, 1)
    dice = random.Random(11)
    data = arena.data(slot, label.data_size)
    for view, positions in ((arena.values(slot, label), range(label.values_size)), (arena.view[LABEL], range(96))):
        for position in positions:
            bit = 1 << dice.randrange(8)
            view[position] ^= bit
            with pytest.raises(CorruptError):
                restore_memory(snapshot, live_state(), lambda: pytest.fail("the state was touched"))
            view[position] ^= bit
    for position in range(0, label.data_size, 3):
        bit, state = 1 << dice.randrange(8), live_state()
        data[position] ^= bit
        with pytest.raises(CorruptError):
            restore_memory(snapshot, state)
        data[position] ^= bit
        blob = next(b for b in of.arrangement.blobs if b.offset <= position < b.offset + b.length)
        assert not state[of.tensors[blob.tensor].name].any(), "a damaged tensor was handed over"
    assert restored_bytes(snapshot) == content(of, 1)


def test_a_damaged_label_hides_its_slot_only() -> None:
    """Listing what is sealed goes on past a damaged label."""
    arena = Arena.create(2, 2 * PAGE)
    for slot in (0, 1):
        arena.set_label(slot, Label(SEALED, slot + 1, Attempt(1, slot + 1, "0" * 8), "00" * 32, 8, 8, 0.0))
    assert [slot for slot, _ in arena.sealed()] == [1, 0]
    arena.view[PAGE + PAGE // 16 + 40] ^= 4
    assert [slot for slot, _ in arena.sealed()] == [0]
    with pytest.raises(CorruptError):
        arena.label(1)


def test_negative_control_memory_without_digests_comes_back_wrong() -> None:
    """A snapshot that nobody digested says that it is unverified; a flip in it is not seen."""
    snapshot = replace(snapshot_in_memory(), digests=None)
    snapshot.arena.data(snapshot.slot)[-8 + snapshot.label.data_size] ^= 1
    state = live_state()
    result = restore_memory(snapshot, state)
    assert not result.verified and held(snapshot.layout, state) != content(snapshot.layout, 1)
