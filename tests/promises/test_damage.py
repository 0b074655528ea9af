"""Damage to what is stored: every byte of every small file, and many of the large ones.

One small run of three checkpoints is built once and copied for each injury. The oracle reads the newest checkpoint back
the way a restore does, older ones if it cannot be used: what comes back must be, bit for bit, what was saved for that
step, or there must be an error of ours. Nothing in between, no other error, no hang.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ckpt
import inside
from ckpt.errors import CheckpointError, CorruptError
from ckpt_backends.memory import MemoryStore
from inside import PAGE, PIECE, Contents, Job, ReadBack, Snapshot
from run_files import DATA, INDEX, KINDS, MANIFEST, kind_of, select

STEPS = (10, 20, 30)
TENSORS: inside.Tensors = {
    "model.weight": ("F32", (8, 4)),
    "model.bias": ("BF16", (4,)),
    "model.count": ("I64", ()),
    "nothing": ("F16", (0, 3)),
}
SMALL = Contents.of(TENSORS)
LARGE = Contents.of({**TENSORS, "big": ("F32", ((PIECE + 64) // 4,))})  # one tensor of two pieces
VALUES = [{"epoch": 3, "name": "größe", "tuple": {"$": "tuple", "v": [1, 2]}}]
Objects = dict[str, bytes]


def content(of: Contents, step: int) -> bytes:
    return random.Random(f"{step} {of.digest}").randbytes(of.size)


async def save(job: Job, of: Contents, step: int) -> None:
    await job.save(step, of, content(of, step), VALUES)


async def built(of: Contents, steps: tuple[int, ...]) -> Objects:
    store = MemoryStore()
    job = await Job.open(store, recover=False)
    for step in steps:
        await save(job, of, step)
    return store.objects


@pytest.fixture(scope="module")
def small() -> Objects:
    """Three checkpoints of small tensors."""
    return asyncio.run(built(SMALL, STEPS))


@pytest.fixture(scope="module")
def large() -> Objects:
    """Two checkpoints with a tensor of two chunks."""
    return asyncio.run(built(LARGE, STEPS[:2]))


# -- the oracle --


def outcome(objects: Objects, of: Contents) -> int | None:
    """The step that came back whole, None for an error of ours. Anything else fails the test."""

    async def bounded() -> ReadBack:
        return await asyncio.wait_for(inside.read_back(MemoryStore(objects=objects)), 20)

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
    """Return other damage to a file than a flipped bit."""
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
    return others.get(key) or next(v for k, v in sorted(others.items()) if kind_of(k) == kind_of(key))


def injured(objects: Objects, key: str, raw: bytes | None) -> Objects:
    changed = {**objects, key: raw or b""}
    if raw is None:
        del changed[key]
    return changed


def structure(objects: Objects) -> list[str]:
    return [key for key in sorted(objects) if kind_of(key) != DATA]


def header_size(file: bytes) -> int:
    return 8 + int.from_bytes(file[:8], "little")


def check_flips(objects: Objects, of: Contents, key: str, positions: list[int], bits: Callable[[], list[int]]) -> int:
    """Each flip alone: never wrong, and never more lost than what the file belongs to. Returns how many."""
    count, own, newest = 0, inside.step_of_file(key), max(inside.step_of_file(k) or 0 for k in objects)
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
    assert outcome(small, SMALL) == 30
    assert outcome(large, LARGE) == 20


@pytest.mark.parametrize("kind", ["format", "log", MANIFEST, INDEX])
def test_a_flip_in_any_structure_byte(small: Objects, kind: str) -> None:
    """One random bit of every seventh byte of the small files; of older checkpoints, of some. See `every bit` below."""
    dice, count = random.Random(kind), 0
    for key in [k for k in structure(small) if kind_of(k) == kind and inside.step_of_file(k) in (None, 20, 30)]:
        where = range(dice.randrange(7), len(small[key]), 7)
        some = dice.sample(where, 13) if inside.step_of_file(key) == 20 else list(where)
        count += check_flips(small, SMALL, key, some, lambda: [dice.randrange(8)])
    print(f"{count} flips in {kind}, no wrong tensor")


def test_a_flip_in_a_pack_header_is_harmless_and_noticed(small: Objects) -> None:
    """We do not read by the header of a data file, so the newest step comes back; `verify` notices, as others do."""
    check_header_flips(small, every=11)


def check_header_flips(small: Objects, every: int) -> None:
    (key,) = select(small, DATA, step=30)
    dice = random.Random(4)
    for position in range(0, header_size(small[key]), every):
        changed = injured(small, key, flipped(small[key], position, dice.randrange(8)))
        assert outcome(changed, SMALL) == 30
        assert problems_of(changed, 30)


def check_tensor_flips(objects: Objects, of: Contents, count: int) -> None:
    key = select(objects, DATA)[-1]
    start, dice = header_size(objects[key]), random.Random(5)
    assert count == 0 or len(objects[key]) > start
    for _ in range(count):
        position = dice.randrange(start, len(objects[key]))
        step = outcome(injured(objects, key, flipped(objects[key], position, dice.randrange(8))), of)
        assert step is not None and step < inside.step_of_file(key)  # type: ignore[operator]
    print(f"{count} flips in tensor data, all noticed")


def test_flips_in_tensor_data_fall_back_to_the_older_checkpoint(small: Objects, large: Objects) -> None:
    """Every flip makes the restore pass over that checkpoint; 150 in small tensors, 15 in one of several chunks."""
    check_tensor_flips(small, SMALL, 150)
    check_tensor_flips(large, LARGE, 15)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_bit_of_every_structure_file(small: Objects) -> None:
    """All eight bits of every byte, and 50,000 flips of tensor data."""
    check_header_flips(small, every=1)
    count = 0
    for key in structure(small):
        count += check_flips(small, SMALL, key, list(range(len(small[key]))), lambda: list(range(8)))
    print(f"{count} flips in structure files, no wrong tensor")
    check_tensor_flips(small, SMALL, 50_000)


# -- other injuries --


def test_other_damage_to_any_single_file(small: Objects) -> None:
    """Cut, extended, zeroed, doubled, replaced, removed, noise: some checkpoint always comes back, and a true one."""
    others = asyncio.run(built(Contents.of({"other": ("F32", (5,))}), STEPS))
    dice, count = random.Random(6), 0
    for key in sorted(small):
        for name, raw in injuries(small[key], counterpart(key, others), dice):
            step = outcome(injured(small, key, raw), SMALL)
            count += 1
            other_root = key == "FORMAT.json" and name == "another run's"
            assert step is not None or other_root, f"{key} {name}: nothing can be restored"
            if inside.step_of_file(key) not in (None, 30):
                assert step == 30, f"{key} {name}: damage to an older checkpoint cost the newest"
    print(f"{count} injuries of single files")


def test_any_two_files_swapped(small: Objects) -> None:
    """Every pair of files: what comes back is true, or an error of ours."""
    keys, seen = sorted(small), Counter[int | None]()
    for i, a in enumerate(keys):
        for b in keys[i + 1 :]:
            seen[outcome({**small, a: small[b], b: small[a]}, SMALL)] += 1
    print(f"{seen.total()} swaps: steps {dict(seen)}")
    assert seen[30] and seen[20]


def test_damage_to_everything_raises_our_error(small: Objects) -> None:
    """Noise in every file of a kind."""
    dice = random.Random(8)
    for kind in ("format", "log", *KINDS):
        noise = {k: dice.randbytes(len(v)) if kind_of(k) == kind else v for k, v in small.items()}
        step = outcome(noise, SMALL)
        # The log contains the identity of the run. The manifests have all that the index has.
        assert (step == 30) == (kind in ("format", INDEX)), kind


# -- the log --


def appended_after(objects: Objects) -> tuple[int | None, list[str]]:
    """Open a damaged run as a new job. Return the step that it saves and reads back, and the deleted files."""

    async def scenario() -> tuple[int | None, list[str]]:
        store = MemoryStore(objects=dict(objects))
        job = await Job.open(store)
        for step in (40, 50, 60, 70):
            await save(job, SMALL, step)
        assert job.damaged, "the damage was not noticed"
        assert await job.clean_up(last=1) == []
        back = await inside.read_back(store)
        assert back.data == content(SMALL, back.step)
        return back.step, [key for key in objects if key not in store.objects]

    return asyncio.run(scenario())


def test_run_with_a_damaged_record_continues_without_loss(small: Objects) -> None:
    """Whichever record is damaged: a new job can take over and save, and nothing is ever deleted from such a run."""
    dice = random.Random(9)
    for key in [k for k in sorted(small) if k.startswith("log/")]:
        for raw in (flipped(small[key], dice.randrange(len(small[key])), dice.randrange(8)), b"", small[key][:-1]):
            assert appended_after(injured(small, key, raw)) == (70, [])
    missing = injured(small, "log/000000000002.json", None)
    assert appended_after(missing) == (70, [])


def test_negative_control_an_intact_run_is_cleaned_up(small: Objects) -> None:
    """Without damage the same clean-up does delete, so the test above can fail."""
    with pytest.raises(AssertionError, match="the damage was not noticed"):
        appended_after(small)

    async def scenario() -> list[int]:
        return await (await Job.go_on(MemoryStore(objects=dict(small)))).clean_up(last=1)

    assert asyncio.run(scenario()) == [10]


# -- verify --


def problems_of(objects: Objects, step: int) -> list[str]:
    return asyncio.run(inside.problems_in(MemoryStore(objects=objects), step))


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.long)])
def test_verify_notices_every_flip_in_the_files_of_a_checkpoint(small: Objects, every: int) -> None:
    """In part, table and index, in the header, and in the data; in CI at every eleventh byte."""
    dice, count = random.Random(10), 0
    assert problems_of(small, 20) == []
    for key in [k for k in sorted(small) if inside.step_of_file(k) == 20]:
        raw = small[key]
        positions = list(range(len(raw)))
        if kind_of(key) == DATA:
            positions = [*range(0, header_size(raw), 7), *range(header_size(raw), len(raw))]
        for position in positions[::every]:
            assert problems_of(injured(small, key, flipped(raw, position, dice.randrange(8))), 20), (key, position)
            count += 1
    print(f"{count} flips, all noticed by verify")


# -- negative controls --


def test_negative_control_without_digests_of_blobs(small: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """If tensor data were not checked, a flip would be restored as a wrong tensor, and the oracle would detect it."""
    inside.trust_tensor_data(monkeypatch)
    with pytest.raises(AssertionError, match="wrong tensors"):
        check_tensor_flips(small, SMALL, 1)


def test_negative_control_without_digests_of_small_files(small: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """If manifests were not checked, a changed value would be restored, and the oracle would detect it."""
    (key,) = select(small, MANIFEST, step=30)
    at = small[key].index(b'"epoch":3') + 8

    damaged = injured(small, key, flipped(small[key], at, 0))
    assert outcome(damaged, SMALL) == 20
    inside.trust_small_files(monkeypatch)
    with pytest.raises(AssertionError, match="wrong values"):
        outcome(damaged, SMALL)


# -- memory --


def snapshot_in_memory() -> Snapshot:
    """A sealed snapshot of a real state, with the digests that the writer would have of it."""
    return inside.snapshot_of(live_state(), lambda of: content(of, 1))


def live_state() -> dict[str, Any]:
    import torch

    return {"x": torch.zeros(300), "y": torch.zeros(7, dtype=torch.int64), "meta": {"lr": 0.125, "seen": [1, 2, 3]}}


def restore_memory(
    snapshot: Snapshot, into: dict[str, Any], on_touch: Callable[[], None] = lambda: None
) -> ckpt.Restored:
    """Restore as `Checkpointer.restore` does. Raise CorruptError where it would try another source."""
    result = inside.restore_first_of([snapshot.source], into, on_touch=on_touch)
    if result.step is None:
        raise CorruptError(result.skipped[0].reason)
    assert into["meta"] == live_state()["meta"], "wrong values"
    return result


def held(of: Contents, state: dict[str, Any]) -> bytes:
    """The bytes of a state, as they lie in a snapshot."""
    return b"".join(state[name].numpy().tobytes() for name in of.names)


def restored_bytes(snapshot: Snapshot) -> bytes:
    state = live_state()
    result = restore_memory(snapshot, state)
    assert (result.verified, result.nbytes) == (True, snapshot.size)
    return held(snapshot.contents, state)


def test_a_flip_in_memory_after_it_was_digested_is_noticed() -> None:
    """Data, plain values, label: a flipped bit in a sealed slot is a CorruptError, and nothing damaged is handed over.

    Values and label are checked before the state is touched, data as it is filled: a small piece of it before it is.
    """
    snapshot = snapshot_in_memory()
    of, data = snapshot.contents, snapshot.data
    assert restored_bytes(snapshot) == content(of, 1)
    dice = random.Random(11)
    for view in (snapshot.values, snapshot.label):
        for position in range(len(view)):
            bit = 1 << dice.randrange(8)
            view[position] ^= bit
            with pytest.raises(CorruptError):
                restore_memory(snapshot, live_state(), lambda: pytest.fail("the state was touched"))
            view[position] ^= bit
    for position in range(0, snapshot.size, 3):
        bit, state = 1 << dice.randrange(8), live_state()
        data[position] ^= bit
        with pytest.raises(CorruptError):
            restore_memory(snapshot, state)
        data[position] ^= bit
        assert not state[of.name_at(position)].any(), "a damaged tensor was handed over"
    assert restored_bytes(snapshot) == content(of, 1)


def test_negative_control_memory_without_digests_comes_back_wrong() -> None:
    """A snapshot without digests is reported as unverified; a flip in it is not detected."""
    snapshot = snapshot_in_memory().without_digests()
    snapshot.data[-8] ^= 1
    state = live_state()
    result = restore_memory(snapshot, state)
    assert not result.verified and held(snapshot.contents, state) != content(snapshot.contents, 1)
