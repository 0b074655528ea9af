"""Restoring: every bit, in place, from memory and from disk alike; or an error that tells all and changes nothing."""

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
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckpt
import ckpt.format.partition as share_module
from ckpt.checkpoint.commit import acquire, check_fit, commit, create_run
from ckpt.checkpoint.write import RankSnapshot as ToWrite
from ckpt.checkpoint.write import WrittenPart, digest_blobs, write_part
from ckpt.errors import CorruptError, MismatchError, NoCheckpointError, SaveError, StateError, UsageError
from ckpt.format.boxes import Box, intersect
from ckpt.format.digest import blob_digest
from ckpt.format.layout import BITS, Layout, TensorSpec, pages
from ckpt.format.manifest import Attempt
from ckpt.format.partition import GLOBAL, Holding, Seat, share
from ckpt.format.saved_state import Key, SavedState
from ckpt.ipc.arena import SEALED, Arena, Label
from ckpt.ranks.world import World
from ckpt.restore import sources as sources_module
from ckpt.restore.restore_first import Restored, restore_first
from ckpt.restore.sources import HeldSnapshot, MemorySource, RestoreSource, StoreSource, fill_from_store
from ckpt.runlog.log import Acquire, Commit, RunLog
from ckpt.state.capture import Capture
from ckpt.state.filler import Filler, Target
from ckpt.state.sharding import StateEntry, indices
from ckpt.state.sharding import pieces as of_rank
from ckpt.state.structure import Structure, _spec
from ckpt.state.tensors import DTYPE_NAME, TORCH_DTYPE
from ckpt.store import Store, open_store
from ckpt.trainer.staging.snapshot import PendingSnapshot
from ckpt.trainer.staging.stage import Stager
from ckpt_backends.memory import MemoryStore
from plain_values import values as plain_values
from processes import run_script
from toy_states import Loader, State, differences, fill, freeze, raw

Bytes = npt.NDArray[np.uint8]

# -- a place to save in, without a writer process --


class Bench:
    """Stages states into shared memory, and commits them to a folder, by the library's own parts."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}"
        self._step = 0
        self._stager, self._arenas = Stager(), list[Arena]()
        self._owner: Acquire = asyncio.run(self._open())

    async def _open(self) -> Acquire:
        store = open_store(self.url, writable=True)
        await create_run(store)
        log = RunLog(store)
        await log.open()
        owner = await acquire(log, "0badcafe")
        await store.aclose()
        return owner

    def snapshot(self, state: State, *, verified: bool = True) -> HeldSnapshot:
        reading = Capture(state).read()
        layout, text = reading.layout, json.dumps(reading.values).encode()
        size = layout.arrangement.data_size
        arena = Arena.create(2, pages(size) + len(text) + 4096)
        self._arenas.append(arena)
        self._stager.use(arena, lambda: None)
        self._step += 1
        job = PendingSnapshot(Attempt(self._owner.epoch, self._step, self._owner.nonce), reading, text)
        self._stager.submit(job)
        assert job.copied.wait(30.0) and job.error is None, job.error
        assert job.place is not None
        label = arena.label(job.place[1])
        assert label is not None
        digests = digest_blobs(layout, arena.data(job.place[1], size)) + blob_digest(text)
        return HeldSnapshot(arena, job.place[1], label, layout, digests if verified else None)

    def memory(self, state: State, *, verified: bool = True) -> MemorySource:
        return in_memory(self.snapshot(state, verified=verified))

    def disk(self, state: State) -> StoreSource:
        return self.store(self.snapshot(state))

    def store(self, snapshot: HeldSnapshot) -> StoreSource:
        layout, attempt = snapshot.layout, snapshot.attempt
        data = snapshot.arena.data(snapshot.slot, layout.arrangement.data_size)
        values = json.loads(snapshot.values())

        async def write() -> Any:
            log = RunLog(open_store(self.url, writable=True))
            await log.open()
            try:
                written = await write_part(log.store, ToWrite(attempt, layout, data, values))
                return await commit(log, self._owner, [written])
            finally:
                await log.store.aclose()

        return StoreSource(self.url, attempt, asyncio.run(write()))

    def close(self) -> None:
        self._stager.stop()
        for arena in self._arenas:
            arena.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "bench")
    yield made
    made.close()


def in_memory(snapshot: HeldSnapshot) -> MemorySource:
    return MemorySource(snapshot.attempt, [snapshot], alone=True)


def restore(*sources: RestoreSource, into: State, strict: bool = True, untouched: bool = False) -> Restored:
    """By the library's own steps, from the first that is sound; CorruptError if none is.

    `untouched`: fails as soon as anything of the state would be changed.
    """
    result, touched = Restored(step=None), list[bool]()

    def on_touch() -> None:
        assert not untouched, "touched"
        touched.append(True)

    capture = Capture(into)
    with contextlib.suppress(StateError):
        capture.read()  # as whoever opens a run does
    if restore_first(World(), sources, capture, result, strict=strict, on_touch=on_touch) is None:
        raise CorruptError("; ".join(skipped.reason for skipped in result.skipped))
    assert touched
    return result


PLACES = ["memory", "disk"]


def model(seed: int, *, tied: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.ModuleDict({"a": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6), "b": nn.Linear(6, 6)})
    if tied:
        net["b"].weight = net["a"].weight
    return net


def build(seed: int, steps: int = 2, net: nn.Module | None = None) -> State:
    net = model(seed) if net is None else net
    optim = torch.optim.AdamW(net.parameters(), lr=1e-2 * (seed + 1))
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optim.step()
    return {
        "model": net,
        "optim": optim,
        "sched": torch.optim.lr_scheduler.StepLR(optim, seed + 1),
        "loader": Loader({"at": seed, "order": torch.arange(4) + seed}),
        "rng": ckpt.RNG(),
        "mine": {"losses": [seed * 0.5, float("nan")], "t": torch.randn(3), "a": np.arange(3) + seed, seed: "key"},
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("steps", [0, 2])
def test_everything_returns_in_place(place: str, steps: int, bench: Bench) -> None:
    """Used or fresh, the twin becomes the same in every bit; tensors it has keep their memory, containers theirs."""
    state, twin = build(0), build(1, steps)
    rng = torch.get_rng_state()
    wanted, source = freeze(state), getattr(bench, place)(state)
    held = [*twin["model"].state_dict().values(), twin["mine"]["t"]]
    held += [v for values in twin["optim"].state.values() for v in values.values()]
    pointers = [t.data_ptr() for t in held]
    containers = [twin["mine"], twin["mine"]["losses"], twin["mine"]["a"], twin["optim"].param_groups]
    torch.rand(5)
    assert restore(source, into=twin).verified is True
    assert differences(freeze(twin), wanted) == []
    assert torch.equal(torch.get_rng_state(), rng)
    again = [*twin["model"].state_dict().values(), twin["mine"]["t"]]
    again += [v for values in twin["optim"].state.values() for v in values.values()]
    assert [t.data_ptr() for t in again][: len(held)] == pointers
    now = [twin["mine"], twin["mine"]["losses"], twin["mine"]["a"], twin["optim"].param_groups]
    assert all(a is b for a, b in zip(containers, now, strict=True))


def test_memory_that_nobody_digested_says_so(bench: Bench) -> None:
    """A snapshot without digests is restored as unverified."""
    state, twin = build(0), build(1)
    wanted = freeze(state)
    assert restore(bench.memory(state, verified=False), into=twin).verified is False
    assert differences(freeze(twin), wanted) == []


def flipped(snapshot: HeldSnapshot, at: int) -> HeldSnapshot:
    snapshot.arena.data(snapshot.slot)[at] ^= 1
    return snapshot


@pytest.mark.parametrize("at", ["first", "last", "values"])
def test_one_flipped_bit_in_memory_is_seen_and_not_taken(at: str, bench: Bench) -> None:
    """In any tensor or in the plain values. A small piece that is damaged never reaches the state, and in the values it
    is seen before anything changes. Negative control: without digests the wrong bit comes through."""
    state, twin = build(0), build(1)
    del state["rng"], twin["rng"]  # which they share
    snapshot = bench.snapshot(state)
    size, order, offsets = (
        snapshot.label.data_size,
        snapshot.layout.arrangement.order,
        snapshot.layout.arrangement.offsets,
    )
    others = [n for n in order if not snapshot.layout.tensors[n].name.endswith(".step")]  # which are alike in both
    damaged = {"first": others[0], "last": others[-1]}.get(at)
    flipped(snapshot, pages(size) + 10 if damaged is None else offsets[damaged])
    before = freeze(twin)
    with pytest.raises(CorruptError) as caught:
        restore(in_memory(snapshot), into=twin, untouched=at == "values")
    if damaged is None:
        assert differences(freeze(twin), before) == []
        return
    name = snapshot.layout.tensors[damaged].name
    assert f"{name} is damaged in memory" in str(caught.value)
    old, new = (plain_bytes(one, name) for one in (build(1), twin))
    assert old == new != plain_bytes(state, name)
    restore(in_memory(replace(snapshot, digests=None)), into=twin)
    wrong = differences(freeze(twin), freeze(state))
    assert len(wrong) == 1, wrong


def plain_bytes(state: State, name: str) -> bytes:
    """What a state has under the name of one of its tensors."""
    reading = Capture(state).read()
    return raw(dict(zip([t.name for t in reading.layout.tensors], reading.tensors, strict=True))[name])


@pytest.mark.parametrize("at", ["first", "last", "values"])
def test_a_damaged_snapshot_in_memory_gives_way_to_the_next_place(at: str, bench: Bench) -> None:
    """The disk has the same step: the whole state comes from there, and what was skipped is said."""
    state, twin = build(0), build(1)
    wanted, snapshot = freeze(state), bench.snapshot(state)
    disk, size = bench.store(snapshot), snapshot.label.data_size
    flipped(snapshot, {"first": 0, "last": size - 1, "values": pages(size) + 10}[at])
    result = restore(in_memory(snapshot), disk, into=twin)
    assert (result.tier, [skipped.tier for skipped in result.skipped]) == (bench.url, ["memory"])
    assert differences(freeze(twin), wanted) == []


@pytest.mark.parametrize("strict", [True, False])
def test_a_large_piece_is_copied_and_verified_in_one_go(strict: bool, bench: Bench) -> None:
    """What a strict restore has copied of a damaged snapshot is gone when it says that it has restored: the next place
    fills all of it. A lenient one, which may leave out what it cannot have, takes nothing of a damaged piece."""
    make = [{"a": torch.randn(3 << 18), "model": nn.Linear(512, 1024)} for _ in range(2)]
    (state, twin), wanted = make, freeze(make[0])
    snapshot = bench.snapshot(state)
    disk, size = bench.store(snapshot), snapshot.label.data_size
    flipped(snapshot, size - 5)
    name = snapshot.layout.tensors[snapshot.layout.arrangement.order[-1]].name
    old = plain_bytes(twin, name)
    with pytest.raises(CorruptError, match=f"{name} is damaged in memory"):
        restore(in_memory(snapshot), into=twin, strict=strict)
    if not strict:
        assert plain_bytes(twin, name) == old
    result = restore(in_memory(snapshot), disk, into=twin, strict=strict)
    assert (result.tier, [skipped.tier for skipped in result.skipped]) == (bench.url, ["memory"])
    assert differences(freeze(twin), wanted) == []


def test_negative_control_a_large_piece_without_a_digest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody compared the digest, the flipped bit would be there, and nothing said."""
    put = sources_module.put

    def trusting(memory: Any, starts: Any, lengths: Any, digests: Any, places: Any) -> list[int]:
        return put(memory, starts, lengths, None, places)

    monkeypatch.setattr(sources_module, "put", trusting)
    with pytest.raises(pytest.fail.Exception):
        test_a_large_piece_is_copied_and_verified_in_one_go(True, bench)


def test_negative_control_another_layout_is_not_taken_for_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the layouts were not compared, what does not fit would not be noticed."""
    monkeypatch.setattr(Structure, "is_as_saved", lambda self, saved, pieces: True)
    with pytest.raises(AssertionError, match="touched"):
        test_what_does_not_fit_is_listed_whole_and_nothing_is_changed("memory", "groups", bench)


@pytest.mark.parametrize("place", PLACES)
def test_a_state_of_the_same_layout_returns_as_any_other(
    place: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is filled as it lies is the same as what is placed tensor by tensor, in every bit, and autograd is told of
    it; modules and optimizers lie so, other objects are asked."""
    state, source = build(0), getattr(bench, place)(build(0))
    seen: list[list[Any]] = []
    fill = Filler.__init__

    def noting(self: Filler, saved: Any, fills: Any, lying: Any = (), **options: Any) -> None:
        seen.append([saved.table.shards[number].name for number, _ in lying])
        fill(self, saved, fills, lying, **options)

    monkeypatch.setattr(Filler, "__init__", noting)
    found = []
    for as_saved in (True, False):
        if not as_saved:
            monkeypatch.setattr(Structure, "is_as_saved", lambda self, saved, pieces: False)
        twin = build(1)
        versions = [p._version for p in twin["model"].parameters()]
        restore(source, into=twin)
        assert all(p._version > was for p, was in zip(twin["model"].parameters(), versions, strict=True))
        found.append(freeze(twin))
    assert differences(found[0], found[1]) == [] and differences(found[0], freeze(state)) == []
    assert {name.partition(".")[0] for name in seen[0]} == {"model", "optim"} and not seen[1]


def test_a_snapshot_that_is_overwritten_meanwhile_is_not_taken(bench: Bench) -> None:
    """Another process owns that memory and may reuse the slot, before we read or while we do."""
    state, twin = build(0), build(1)
    snapshot = bench.snapshot(state)
    other = replace(snapshot.label, order=snapshot.label.order + 1)
    before = freeze(twin)
    snapshot.arena.set_label(snapshot.slot, other)
    with pytest.raises(CorruptError, match="overwritten meanwhile"):
        restore(in_memory(snapshot), into=twin, untouched=True)
    assert differences(freeze(twin), before) == []
    snapshot.arena.set_label(snapshot.slot, snapshot.label)

    def on_touch() -> None:
        snapshot.arena.set_label(snapshot.slot, other)

    result = Restored(step=None)
    assert not restore_first(World(), [in_memory(snapshot)], Capture(twin), result, strict=True, on_touch=on_touch)
    assert "overwritten meanwhile" in result.skipped[0].reason


def narrower() -> nn.Module:
    net = model(1)
    net["b"] = nn.Linear(6, 5)
    return net


MISFITS: dict[str, tuple[Callable[[], State], list[str]]] = {
    "shape": (lambda: build(1, net=narrower()), ["model.b.bias has shape [6] in the checkpoint and [5] here"]),
    "dtype": (lambda: build(1, net=model(1).double()), ["model.a.weight has dtype F32 in the checkpoint and F64 here"]),
    "missing": (
        lambda: build(1, net=nn.ModuleDict({**model(1), "late": nn.Linear(2, 2)})),
        ["model.late.weight is not in the checkpoint", "model.late.bias is not in the checkpoint"],
    ),
    "unexpected": (
        lambda: build(1, net=nn.ModuleDict({"a": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6)})),
        ["model.b.weight is in the checkpoint, and not in model", "model.b.bias is in the checkpoint"],
    ),
    "untied": (lambda: build(1, net=model(1, tied=False)), ["model.a.weight and model.b.weight were one tensor"]),
    "groups": (
        lambda: {**(s := build(1)), "optim": torch.optim.AdamW([{"params": [p]} for p in s["model"].parameters()])},
        ["optim: the parameter groups differ (5 groups here, 1 saved"],
    ),
    "entry missing": (lambda: {**build(1), "late": 1}, ["late is not in the checkpoint"]),
    "entry unexpected": (
        lambda: {k: v for k, v in build(1).items() if k != "loader"},
        ["loader is in the checkpoint, and not in the state"],
    ),
    "kind": (lambda: {**build(1), "loader": 5}, ["loader is a stateful in the checkpoint and a plain here"]),
    "several": (
        lambda: {**build(1, net=narrower().double()), "late": 1},
        ["[5] here", "dtype F32 in the checkpoint and F64 here", "late is not"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_listed_whole_and_nothing_is_changed(place: str, misfit: str, bench: Bench) -> None:
    """One error says everything that differs; the state, generators included, is as it was."""
    make, expected = MISFITS[misfit]
    source, twin = getattr(bench, place)(build(0)), make()
    before = freeze(twin)
    with pytest.raises(MismatchError) as caught:
        restore(source, into=twin, untouched=True)
    assert [text for text in expected if text not in str(caught.value)] == []
    assert differences(freeze(twin), before) == []


def test_a_tied_model_does_not_take_an_untied_checkpoint(bench: Bench) -> None:
    """Nor the other way round, which is above."""
    with pytest.raises(MismatchError, match="one tensor here, and were not when they were saved"):
        restore(bench.memory(build(0, net=model(0, tied=False))), into=build(1))


@pytest.mark.parametrize("place", PLACES)
def test_lenient_restores_take_what_fits(place: str, bench: Bench) -> None:
    """Names and shapes that fit are taken, dtypes cast; everything else stays as it is here."""
    net = nn.ModuleDict({"a": nn.Linear(6, 6).double(), "norm": nn.BatchNorm1d(6), "b": nn.Linear(6, 5)})
    net["late"] = nn.Linear(2, 2)
    state: State = {"model": model(0, tied=False), "n": 1, "gone": 5}
    twin: State = {"model": net, "n": 2, "late": [7]}
    kept = freeze([net["b"], net["late"], twin["late"]])
    restore(getattr(bench, place)(state), into=twin, strict=False)
    assert differences(freeze([net["b"], net["late"], twin["late"]]), kept) == []
    assert net["a"].weight.dtype == torch.float64
    assert torch.equal(net["a"].weight, state["model"]["a"].weight.double())
    assert differences(freeze(net["norm"]), freeze(state["model"]["norm"])) == []
    assert twin["n"] == 1 and "gone" not in twin


def test_lenient_restores_leave_an_optimizer_that_can_go_on(bench: Bench) -> None:
    """A parameter that has another shape now begins anew; the others keep what was learnt about them."""

    def built(width: int) -> State:
        net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, width))
        return {"model": net, "optim": torch.optim.AdamW(net.parameters())}

    def trained(state: State) -> None:
        state["model"](torch.ones(2, 4)).sum().backward()
        state["optim"].step()

    state, twin = built(5), built(7)
    trained(state)
    trained(twin)
    result = restore(bench.disk(state), into=twin, strict=False)
    learnt, net = twin["optim"].state, twin["model"]
    assert set(learnt) == {net[0].weight, net[0].bias}
    assert torch.equal(learnt[net[0].weight]["exp_avg"], state["optim"].state[state["model"][0].weight]["exp_avg"])
    assert any("1.weight: begins anew" in line for line in result.left_out)
    trained(twin)
    assert learnt[net[1].weight]["exp_avg"].shape == (7, 6)


def test_plain_values_are_written_back_into_the_users_own_containers(bench: Bench) -> None:
    """Dicts, lists and arrays keep their identity; entries are added, removed and ordered as they were saved."""
    state: State = {"p": {"b": 1, "a": [1, 2, 3], "new": {"x": 1}, "arr": np.arange(3), "kind": [1]}, "n": 5, "l": [1]}
    inner: dict[str, Any] = {"a": [9], "gone": 1, "b": 0, "arr": np.zeros(3, int), "kind": {"was": "a dict"}}
    twin: State = {"p": inner, "n": 0, "l": [4, 5]}
    containers = (inner, inner["a"], inner["arr"], twin["l"])
    wanted = freeze(state)
    restore(bench.disk(state), into=twin)
    assert differences(freeze(twin), wanted) == []
    assert all(a is b for a, b in zip(containers, (twin["p"], inner["a"], inner["arr"], twin["l"]), strict=True))


# -- through a Checkpointer --


def train(state: State, seed: int) -> None:
    for i, p in enumerate(state["model"].parameters()):
        p.grad = torch.full_like(p, float(seed + i))
    state["optim"].step()
    state["mine"]["losses"].append(float(seed))


def saved_run(tiers: Any, steps: int) -> list[Any]:
    """Train, commit every step everywhere, close. The frozen state at every step, from 0."""
    state = build(0)
    frozen = [freeze(state)]
    with ckpt.Checkpointer(state, tiers) as cp:
        cp.restore(default=0)
        for step in range(1, steps + 1):
            train(state, step)
            frozen.append(freeze(state))
            cp.step(step)
            cp.save()
            cp.wait(60.0)
    return frozen


def flip(folder: str, attempt_step: int) -> None:
    """One bit, in the pack of a step, of weights that are others at each step: nothing else has the same bytes."""
    (pack,) = [p for p in Path(folder, "packs").iterdir() if f"-{attempt_step}.0." in p.name]
    data = bytearray(pack.read_bytes())
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    weights = [name for name, entry in entries.items() if name.startswith("model.") and entry["dtype"] == "F32"]
    name = min(weights) if weights else max(entries)
    data[8 + size + entries[name]["data_offsets"][0]] ^= 4
    pack.chmod(0o600)
    pack.write_bytes(data)


def test_memory_and_disk_bring_back_the_same(run_dir: str) -> None:
    """The newest step from memory in place, then from the folder into a fresh state: both equal to the bit."""
    state = build(0)
    with ckpt.Checkpointer(state, [ckpt.Memory(), ckpt.Tier(run_dir, every=2)]) as cp:
        assert cp.restore(default=0) == 0
        train(state, 1)
        wanted = freeze(state)
        save = cp.step(2)
        assert save is not None
        save.committed(60.0)
        train(state, 2)
        state["mine"].clear()
        assert differences(freeze(state), wanted)
        assert cp.restore() == 2
        assert cp.last_restore is not None and cp.last_restore.tier == "memory"
        assert differences(freeze(state), wanted) == []
    fresh = build(1, 0)
    with ckpt.Checkpointer(fresh, run_dir) as cp:
        assert cp.restore() == 2
        assert cp.last_restore is not None and cp.last_restore.tier == f"file://{run_dir}" and cp.last_restore.verified
        assert differences(freeze(fresh), wanted) == []


def test_a_damaged_newest_checkpoint_is_passed_over(run_dir: str) -> None:
    """The one before is restored, whole, and `last_restore` says what was wrong with the newest."""
    frozen = saved_run(run_dir, 3)
    flip(run_dir, 3)
    twin = build(1)
    with ckpt.Checkpointer(twin, run_dir) as cp:
        assert cp.restore() == 2
        assert cp.last_restore is not None
        (skipped,) = cp.last_restore.skipped
        assert (skipped.step, skipped.tier) == (3, f"file://{run_dir}")
        assert "damaged" in skipped.reason
        assert differences(freeze(twin), frozen[2]) == []


def test_another_tier_has_the_same_step(tmp_path: Path) -> None:
    """What is damaged in the first folder comes from the second, at the same step, and only that."""
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    frozen = saved_run([near, far], 2)
    flip(near, 2)
    twin = build(1)
    with ckpt.Checkpointer(twin, [near, far]) as cp:
        assert cp.restore() == 2
        assert cp.last_restore is not None and cp.last_restore.tier == f"file://{near}"
        assert not cp.last_restore.skipped and f"file://{far}" in cp.last_restore.repaired[0]
        assert differences(freeze(twin), frozen[2]) == []


def test_when_all_are_damaged_training_cannot_go_on(run_dir: str) -> None:
    """CorruptError names every checkpoint; the half-restored state is not accepted by step() or save()."""
    saved_run(run_dir, 2)
    flip(run_dir, 1)
    flip(run_dir, 2)
    twin = build(1)
    with ckpt.Checkpointer(twin, run_dir) as cp:
        with pytest.raises(CorruptError, match="partly overwritten") as caught:
            cp.restore(default=0)
        assert "step 1 in" in str(caught.value) and "step 2 in" in str(caught.value)
        for call in (cp.step, cp.save):
            with pytest.raises(UsageError, match="half-way"):
                call(3)


def test_a_mismatch_leaves_the_run_and_the_state_usable(run_dir: str) -> None:
    """After MismatchError nothing has changed; a lenient restore, or the right state, still works."""
    frozen = saved_run(run_dir, 1)
    twin = build(1, net=narrower())
    before = freeze(twin)
    with ckpt.Checkpointer(twin, run_dir) as cp:
        with pytest.raises(MismatchError):
            cp.restore()
        assert differences(freeze(twin), before) == []
        with pytest.raises(UsageError, match="call restore"):
            cp.step(1)
    twin = build(1)
    with ckpt.Checkpointer(twin, run_dir) as cp:
        assert cp.restore() == 1
        assert differences(freeze(twin), frozen[1]) == []


PEAK = """
import re, sys, threading, torch, ckpt
MB = 1 << 20
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
state = {"w": [torch.full((16 * MB // 4,), float(i)) for i in range(16)]}
cp = ckpt.Checkpointer(state, [ckpt.Tier(sys.argv[1], every=1)] if sys.argv[2] == "save" else sys.argv[1])
if sys.argv[2] == "save":
    cp.restore(default=0)
    cp.save(1).committed(120)
    cp.close()
else:
    before = peak()
    for t in state["w"]: t.zero_()
    assert cp.restore() == 1
    assert [t[-1].item() for t in state["w"]] == list(range(16))
    if sys.argv[2] == "control":
        state["w"] = [t.clone() for t in state["w"] for _ in range(2)][:32]
    print(peak() - before)
"""


def test_restoring_does_not_hold_the_state_twice(run_dir: str) -> None:
    """256 MiB come back through a few buffers of 8 MiB. Negative control: a copy of the state is seen."""
    assert run_script(PEAK, run_dir, "save").returncode == 0
    growth = {}
    for mode in ("restore", "control"):
        result = run_script(PEAK, run_dir, mode)
        assert result.returncode == 0, result.stderr
        growth[mode] = int(result.stdout)
    assert growth["restore"] < 200 < growth["control"]


# -- ckpt.load --


def test_load_reads_what_is_asked_for_when_it_is_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, by pattern, below a prefix; plain values by path; ties kept; a tensor is read once, and alone."""
    state = build(0)
    bench.disk(state)
    read: list[str] = []
    fetch = fill_from_store

    async def counted(url: str, attempt: Attempt, saved: Any, fills: dict[Any, Any]) -> None:
        read.extend(name for name, _ in fills)
        await fetch(url, attempt, saved, fills)

    monkeypatch.setattr("ckpt.loading.fill_from_store", counted)
    loaded = ckpt.load(bench.url)
    assert loaded.step == 1 and not read
    weights = state["model"].state_dict()
    assert {n for n in loaded if n.startswith("model.")} == {f"model.{k}" for k in weights}
    assert raw(loaded["model.b.weight"]) == raw(weights["b.weight"])
    assert raw(loaded["model.a.weight"]) == raw(weights["a.weight"])
    assert read == ["model.a.weight"]
    everything = loaded.all()
    assert everything["model.a.weight"] is everything["model.b.weight"]
    part = ckpt.load(bench.url, step=1, only="model.a.*")
    assert set(part) == {"model.a.weight", "model.a.bias"} and "model.b.weight" not in part
    other = model(5)
    other.load_state_dict(loaded.sub("model"))
    assert differences(freeze(other), freeze(state["model"])) == []
    assert differences(freeze(loaded.plain("mine")), freeze(state["mine"])) == []
    assert differences(freeze(loaded.plain("loader")), freeze(state["loader"].state)) == []


def test_load_says_what_is_not_there(bench: Bench, tmp_path: Path) -> None:
    """Wrong places, steps, patterns, prefixes and paths are errors of their own kinds."""
    bench.disk(build(0))
    loaded = ckpt.load(bench.url)
    with pytest.raises(NoCheckpointError, match="steps there: 1"):
        ckpt.load(bench.url, step=7)
    with pytest.raises(ckpt.FormatError):
        ckpt.load(tmp_path / "nothing")
    with pytest.raises(UsageError, match="matches"):
        ckpt.load(bench.url, only="nobody.*")
    with pytest.raises(UsageError, match="starts with"):
        loaded.sub("nobody")
    for call in (loaded.plain, loaded.__getitem__):
        with pytest.raises(KeyError):
            call("nobody")


def test_load_refuses_a_damaged_tensor_and_gives_the_others(bench: Bench) -> None:
    """Every tensor is verified by itself."""
    state: State = {"a": torch.randn(100), "b": torch.randn(100)}
    bench.disk(state)
    flip(bench.url.removeprefix("file://"), 1)
    loaded = ckpt.load(bench.url)
    assert raw(loaded["a"]) == raw(state["a"])
    with pytest.raises(CorruptError, match="b is damaged"):
        loaded["b"]


# -- any state at all --

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=5_000)
# Not every operation that the oracle needs is there for the smallest floats.
DTYPES = sorted((d for d in DTYPE_NAME if "float4" not in str(d) and d != torch.complex32), key=str)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """A tensor of random bits and its twin: the same form, other bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    seed = draw(st.integers(0, 2**31))
    pair = [fill(torch.empty(shape, dtype=dtype), seed + i) for i in range(2)]
    change = draw(st.sampled_from(["plain", "transposed", "sliced", "parameter", "frozen"]))
    if change == "transposed" and shape:
        return [t.transpose(0, -1) for t in pair]
    if change == "sliced" and shape:
        return [t[::2] for t in pair]
    if change in ("parameter", "frozen"):
        grad = change == "parameter" and (dtype.is_floating_point or dtype.is_complex)
        return [nn.Parameter(t, requires_grad=grad) for t in pair]
    return pair


@st.composite
def states(draw: st.DrawFn) -> tuple[State, State]:
    """A state and a twin of the same form: tensors, ties between them, modules, optimizer state, plain values."""
    one: State = {}
    two: State = {}
    pool = draw(st.lists(tensors(), min_size=1, max_size=6))
    count = draw(st.integers(0, 8))
    for side, state in enumerate((one, two)):
        state["loose"] = {f"t{i}": pair[side] for i, pair in enumerate(pool)}
        net = nn.Module()
        for i in range(count):
            tensor = pool[i % len(pool)][side]  # each again, and again: aliases
            if isinstance(tensor, nn.Parameter):
                net.register_parameter(f"p{i}", tensor)
            else:
                net.register_buffer(f"b{i}", tensor)
        state["deep"] = [{"net": net}]
        floats = [p for p in net.parameters() if p.requires_grad]
        if floats:
            optim = torch.optim.SGD(floats, lr=0.5 + side)
            state["optim"] = optim
    if "optim" in one:
        for p in one["optim"].param_groups[0]["params"]:
            if draw(st.booleans()):
                one["optim"].state[p] = {"buffer": draw(tensors())[0].detach(), "note": draw(plain_values)}
    one["plain"], two["plain"] = draw(plain_values), draw(plain_values)
    return one, two


def check_any_state(bench: Bench, pair: tuple[State, State], place: str) -> None:
    state, twin = pair
    try:
        Capture(state).read()
    except ckpt.StateError as error:  # keys such as 1 and "1" with an array under each
        assert "get this name" in str(error)
        assume(False)
    wanted, source = freeze(state), getattr(bench, place)(state)
    pointers = {k: t.data_ptr() for k, t in twin["loose"].items()}
    restore(source, into=twin)
    assert differences(freeze(twin), wanted) == []
    assert {k: t.data_ptr() for k, t in twin["loose"].items()} == pointers
    assert differences(freeze(state), wanted) == []


@QUICK
@given(states(), st.sampled_from(PLACES))
def test_any_state_returns(tmp_path_factory: pytest.TempPathFactory, pair: tuple[State, State], place: str) -> None:
    """Odd dtypes, strides, ties, empty and 0-d tensors, optimizer state of any kind, plain values of any kind."""
    bench = Bench(tmp_path_factory.mktemp("any"))
    try:
        check_any_state(bench, pair, place)
    finally:
        bench.close()


@pytest.mark.long
@pytest.mark.timeout(7200)
@LONG
@given(states(), st.sampled_from(PLACES))
def test_any_state_returns_long(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[State, State], place: str
) -> None:
    """The same, many times."""
    test_any_state_returns.hypothesis.inner_test(tmp_path_factory, pair, place)


# -- other ranks, and other ways to divide: many ranks, simulated in one process --

Grid = npt.NDArray[np.int64]
RESHARD = settings(QUICK, max_examples=300)
RESHARD_LONG = settings(QUICK, max_examples=20_000)


@dataclass(frozen=True)
class Division:
    """How ranks hold a tensor: dimension `i` of the mesh cuts tensor dimension `cuts[i]`, or None: they hold it alike.

    `order`: which mesh dimension cuts first. With `groups[i]` above 1 a dimension is cut into so many groups first, and
    every rank has its share of each: not one piece but several.
    """

    mesh: Grid
    cuts: tuple[int | None, ...]
    groups: tuple[int, ...]
    order: tuple[int, ...]

    def at(self, rank: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.argwhere(self.mesh == rank)[0])

    def indices(self, shape: tuple[int, ...], rank: int) -> list[list[int]]:
        """The indices of every dimension that a rank has, by torch.chunk itself."""
        found = [torch.arange(n) for n in shape]
        for i in self.order:
            dim = self.cuts[i]
            if dim is not None:
                mine = [chunks(g, self.mesh.shape[i])[self.at(rank)[i]] for g in chunks(found[dim], self.groups[i])]
                found[dim] = torch.cat(mine)
        return [each.tolist() for each in found]

    def alike(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same as this one."""
        cutting = [i for i, dim in enumerate(self.cuts) if dim is not None]
        place = self.at(rank)
        return tuple(sorted(r for r in self.mesh.ravel().tolist() if all(self.at(r)[i] == place[i] for i in cutting)))


def chunks(tensor: Tensor, count: int) -> list[Tensor]:
    found = list(torch.chunk(tensor, count))
    return found + [tensor[:0]] * (count - len(found))


def stretches(indices: list[int]) -> list[tuple[int, int, int]]:
    """Ascending indices as (first, how many, place in the list)."""
    breaks = [int(i) + 1 for i in np.flatnonzero(np.diff(np.array(indices)) != 1)]
    spans = itertools.pairwise([0, *breaks, len(indices)]) if indices else ()
    return [(indices[start], stop - start, start) for start, stop in spans]


@dataclass(frozen=True)
class Whole:
    """A tensor: its bytes have its shape, and those of an element as last dimension."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True)
class Ranks:
    """How so many ranks divide every tensor."""

    size: int
    divisions: dict[Key, Division]

    def holdings(self, whole: Whole, rank: int) -> list[tuple[Holding, Box]]:
        """What a rank has of a tensor, and which part of its local array each piece is. By an oracle of our own."""
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
    """What a rank has of a tensor as one array."""
    found = whole.data
    for dim, mine in enumerate(ranks.divisions[whole.key].indices(whole.shape, rank)):
        if 0 not in whole.shape and len(mine) < whole.shape[dim]:
            found = found.take(mine, axis=dim)
    return found


Pieces = list[tuple[TensorSpec, bytes]]


def staged(wholes: list[Whole], ranks: Ranks, rank: int) -> Pieces:
    """What a rank stages, by the library's own plan."""
    arrays = {w.key: local_array(w, ranks, rank) for w in wholes if rank in ranks.divisions[w.key].mesh}
    mine = [(h, part(arrays[w.key], box)) for w in wholes for h, box in ranks.holdings(w, rank)]
    mine = mine[::-1] if rank % 2 else mine  # ranks need not list in the same order what they have
    cuts = share([holding for holding, _ in mine], Seat(rank, ranks.size))
    return [(_spec(mine[cut.holding][0], cut), part(mine[cut.holding][1], cut.box).tobytes()) for cut in cuts]


def to_write(attempt: Attempt, wholes: list[Whole], ranks: Ranks, rank: int, pieces: Pieces) -> ToWrite:
    held = [w.key for w in wholes if rank in ranks.divisions[w.key].mesh]
    node = {"path": ["model"], "kind": "module", "facts": {}, "names": list(dict.fromkeys(name for name, _ in held))}
    instances = {name: instance for name, instance in held if instance != GLOBAL}
    layout = Layout(tuple(spec for spec, _ in pieces), {}, [node], rank, ranks.size, instances)
    arrangement = layout.arrangement
    data = bytearray(arrangement.data_size)
    for offset, (_, raw_piece) in zip(arrangement.offsets, pieces, strict=True):
        data[offset : offset + len(raw_piece)] = raw_piece
    return ToWrite(attempt, layout, memoryview(data), [None])


async def written(store: Store, parts: Callable[[Attempt], list[ToWrite]]) -> tuple[Commit, list[WrittenPart]]:
    """A run in an empty place, with one checkpoint of these parts."""
    await create_run(store)
    log = RunLog(store)
    await log.open()
    owner = await acquire(log, "0badcafe")
    found = [await write_part(store, each) for each in parts(Attempt(owner.epoch, 1, owner.nonce))]
    made = await commit(log, owner, found)
    await store.aclose()
    return made, found


@contextlib.contextmanager
def opened(store: MemoryStore, commit: Commit) -> Iterator[StoreSource]:
    """The checkpoint as restoring sees it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.checkpoint.read.open_store", lambda url: store)
        source = StoreSource(store.url, commit.attempt, commit)
        source.open([])
        yield source


@contextlib.contextmanager
def in_memory_of_nodes(parts: list[ToWrite], nodes: list[int]) -> Iterator[list[MemorySource]]:
    """The same as snapshots in memory: what each node sees, told to all."""
    texts = [json.dumps(each.values).encode() for each in parts]
    room = max(pages(len(each.data)) + len(text) for each, text in zip(parts, texts, strict=True))
    arena, snapshots = Arena.create(len(parts), room), list[HeldSnapshot]()
    for slot, (each, text) in enumerate(zip(parts, texts, strict=True)):
        size, digest = len(each.data), each.layout.digest
        arena.data(slot, size)[:] = each.data
        arena.data(slot)[pages(size) : pages(size) + len(text)] = text
        arena.set_label(slot, Label(SEALED, slot + 1, each.attempt, digest, size, len(text)))
        digests = digest_blobs(each.layout, each.data) + blob_digest(text)
        snapshots.append(HeldSnapshot(arena, slot, arena.label(slot) or Label(SEALED), each.layout, digests))
    by_node = [[s for s, of in zip(snapshots, nodes, strict=True) if of == node] for node in sorted(set(nodes))]
    sources = [MemorySource(parts[0].attempt, here, alone=False) for here in by_node]
    described = json.dumps([source.describe() for source in sources])
    for source in sources:
        source.open(json.loads(described))
    try:
        yield sources
    finally:
        arena.close()


def check_shares(wholes: list[Whole], ranks: Ranks, pieces: list[Pieces], grain: int) -> None:
    """Every element is staged once, and replicas stage equally much, but for a grain (bytes)."""
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
            # What lies side by side is cut at the same elements, of 16 bytes at most.
            assert abs(mine - share_of_each) <= max(grain, 16 * len(wholes[::2])) + 1


def cut_from(spec: TensorSpec, holding: Holding) -> bool:
    same = (spec.name, spec.instance) == (holding.name, holding.instance)
    return same and intersect((holding.offsets, holding.sizes), (spec.at, spec.shape)) is not None


def wanted_blobs(saved: SavedState, targets: dict[Key, list[Target]]) -> list[int]:
    """The blobs that hold any element of a target: element by element."""
    found: list[int] = []
    for key, tensor in saved.tensors.items():
        wanted = np.zeros(tensor.spec.shape, bool)
        for target in targets.get(key, ()):
            part(wanted, target.box)[...] = True
        item = BITS[tensor.spec.dtype] // 8
        for number in tensor.shards:
            elements = part(wanted, saved.table.shards[number].box).reshape(-1)
            for blob in saved.table.blobs(number):
                start, length = int(saved.position[blob]), int(saved.table.length[blob])
                if elements[start // item : (start + length) // item].any():
                    found.append(blob)
    return sorted(found)


def check_restored(sources: Sequence[RestoreSource], wholes: list[Whole], ranks: Ranks, *, turned: bool) -> None:
    """Every rank of another job fills what it has of every tensor: every bit of it, from the blobs that it needs.

    Like ranks that pass blobs on, all are served by one reading, of what each source can read. `turned`: into memory
    of another order.
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
        assert filler.blobs == wanted_blobs(saved, targets)
    wants = [set(filler.blobs) for filler in fillers]

    def sink(blob: int, data: memoryview) -> None:
        odd = blob % 2  # bytes may come at any address
        own = memoryview(bytearray(odd) + data)[odd:]
        for filler, wanted in zip(fillers, wants, strict=True):
            if blob in wanted:
                filler.add(blob, own)

    readable = [source.readable() for source in sources]
    assert (np.sum(readable, axis=0) == 1).all()
    for source, mine in zip(sources, readable, strict=True):
        source.read([blob for blob in sorted(set().union(*wants)) if mine[blob]], sink)
    for filler in fillers:
        filler.finish()
    assert all(raw(mine) == array.tobytes() for mine, array in expected)


@dataclass(frozen=True)
class Case:
    """What is saved by whom, restored by whom, and how finely it is cut (bytes). `nodes`: of all ranks that save, if
    it is restored from their memory; `listed`: its index is a directory."""

    wholes: list[Whole]
    before: Ranks
    after: Ranks
    grain: int
    blob: int
    turned: bool
    nodes: list[int] | None
    listed: bool = False


def check_resharding(case: Case) -> None:
    store = MemoryStore()
    wholes, before = case.wholes, case.before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.format.partition.GRAIN", case.grain)
        patch.setattr("ckpt.format.partition.LEAST", 1)
        patch.setattr("ckpt.format.layout.BLOB", case.blob)
        if case.listed:
            patch.setattr("ckpt.checkpoint.commit_checks.WHOLE", -1)
        pieces = [staged(wholes, before, rank) for rank in range(before.size)]
        check_shares(wholes, before, pieces, case.grain)

        def parts(attempt: Attempt) -> list[ToWrite]:
            return [to_write(attempt, wholes, before, rank, mine) for rank, mine in enumerate(pieces)]

        if case.nodes is not None:
            with in_memory_of_nodes(parts(Attempt(1, 1, "0badcafe")), case.nodes) as sources:
                check_restored(sources, wholes, case.after, turned=case.turned)
            return
        made, found = asyncio.run(written(store, parts))
        check_fit(found)
        with opened(store, made) as source:
            assert source.saved.tensors.keys() == {w.key for w in wholes}
            assert (source.saved.directory is not None) == (case.listed and before.size > 1)
            check_restored([source], wholes, case.after, turned=case.turned)


@st.composite
def divisions(draw: st.DrawFn, ranks: list[int], dims: int) -> Division:
    """A mesh of some of the ranks, in any order, and any placements on it."""
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
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):  # of one name, ranks may have several
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
    grain, blob = draw(st.sampled_from([16, 40, 300, 64 << 10])), draw(st.sampled_from([16, 48, 256, 4 << 20]))
    nodes = draw(st.none() | st.lists(st.integers(0, 3), min_size=before.size, max_size=before.size))
    return Case(wholes, before, after, grain, blob, draw(st.booleans()), nodes, draw(st.booleans()))


@RESHARD
@given(cases())
def test_any_ranks_take_over_from_any_others(case: Case) -> None:
    """Whatever mesh saved it, uneven and empty shards, replicas and ranks' own tensors: every bit, in any mesh.

    From a store, or from the memory of nodes none of which has it all.
    """
    check_resharding(case)


@pytest.mark.long
@pytest.mark.timeout(7200)
@RESHARD_LONG
@given(cases())
def test_any_ranks_take_over_from_any_others_long(case: Case) -> None:
    """The same, many times."""
    check_resharding(case)


def grid(shape: tuple[int, ...], cuts: tuple[int | None, ...], *, first: int = 0) -> Division:
    """A mesh of consecutive ranks that cuts like DTensor does."""
    mesh = np.arange(first, first + math.prod(shape)).reshape(shape)
    return Division(mesh, cuts, (1,) * len(cuts), tuple(range(len(cuts))))


def numbered(key: Key, *shape: int) -> Whole:
    data = np.arange(math.prod(shape), dtype=np.uint32).view(np.uint8)
    return Whole(key, "F32", shape, data.reshape(*shape, 4))


def four_ranks() -> tuple[list[Whole], Ranks]:
    """`w` in quarters, `alike` in slices of its replicas, and an `own` for each half of the ranks."""
    wholes = [
        numbered(("w", -1), 5, 6),
        numbered(("alike", -1), 4, 2),
        numbered(("own", 0), 3),
        numbered(("own", 2), 3),
    ]
    divided = [grid((2, 2), (0, 1)), grid((4,), (None,)), grid((2,), (0,)), grid((2,), (0,), first=2)]
    return wholes, Ranks(4, {w.key: d for w, d in zip(wholes, divided, strict=True)})


def swap(pieces: Pieces, name: str, **changes: Any) -> None:
    """Other words about the same bytes."""
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
    "no shard of one instance": ("own", lambda p: [drop(mine, "own") for mine in p[2:]]),
    "one shard twice": ("w", lambda p: p[3].append(last_of(p[0], "w"))),
    "half a shard twice": ("w", lambda p: p[3].append(half(last_of(p[0], "w")))),
    "an offset below": ("w", lambda p: swap(p[3], "w", offsets=(2, 3))),
    "an offset above": ("w", lambda p: swap(p[0], "w", offsets=(1, 0))),
    "an offset outside": ("w", lambda p: swap(p[3], "w", offsets=(3, 4))),
    "another instance": ("w", lambda p: swap(p[3], "w", instance=2)),
    "the instance of others": ("own", lambda p: swap(p[0], "own", instance=2)),
    "another shape": ("w", lambda p: swap(p[2], "w", whole=(5, 7))),
    "another dtype": ("w", lambda p: swap(p[2], "w", dtype="I32")),
}


@pytest.mark.parametrize("change", TAMPERED)
def test_shards_that_do_not_fit_together_are_refused(change: str) -> None:
    """A shard too few or too many, elsewhere, or of another tensor: the error names it, when saving and restoring.

    Negative control of the tests above too: what is not tampered with is taken.
    """
    wholes, ranks = four_ranks()
    pieces = [staged(wholes, ranks, rank) for rank in range(4)]
    name, tamper = TAMPERED[change]

    def parts(attempt: Attempt) -> list[ToWrite]:
        return [to_write(attempt, wholes, ranks, rank, mine) for rank, mine in enumerate(pieces)]

    sound, odd = MemoryStore(), MemoryStore()
    made, found = asyncio.run(written(sound, parts))
    check_fit(found)
    with opened(sound, made) as source:
        check_restored([source], wholes, ranks, turned=False)
    tamper(pieces)
    made, found = asyncio.run(written(odd, parts))
    with pytest.raises(SaveError, match=rf"\b{name}\b"):
        check_fit(found)
    with pytest.raises(CorruptError, match=rf"\b{name}\b"), opened(odd, made):
        pass


def test_negative_control_one_wrong_byte_is_seen() -> None:
    """The comparison in the tests above is of every byte that every rank has."""
    wholes, ranks = four_ranks()
    store = MemoryStore()

    def parts(attempt: Attempt) -> list[ToWrite]:
        return [to_write(attempt, wholes, ranks, rank, staged(wholes, ranks, rank)) for rank in range(4)]

    made, _ = asyncio.run(written(store, parts))
    with opened(store, made) as source:
        for i, whole in enumerate(wholes):
            other = whole.data.copy()
            other.reshape(-1)[-1] ^= 1
            wrong = [*wholes[:i], replace(whole, data=other), *wholes[i + 1 :]]
            with pytest.raises(AssertionError):
                check_restored([source], wrong, ranks, turned=False)
        check_restored([source], wholes, ranks, turned=False)


@pytest.mark.parametrize(
    "shapes", [[(4096, 500)], [(700, 300), (), (5,), (1 << 15, 7), (3, 200_000), (2, 2, 17)]], ids=["one", "several"]
)
def test_replicas_share_the_work_and_real_sizes_return(shapes: list[tuple[int, ...]], tmp_path: Path) -> None:
    """With the true grain, through a folder: megabytes that eight replicas share, read by three ranks."""
    wholes = [numbered((f"t{i}", -1), *shape) for i, shape in enumerate(shapes)]
    ranks = Ranks(8, {w.key: grid((8,), (None,)) for w in wholes})
    pieces = [staged(wholes, ranks, rank) for rank in range(8)]
    check_shares(wholes, ranks, pieces, share_module.GRAIN)
    url = f"file://{tmp_path}"

    def parts(attempt: Attempt) -> list[ToWrite]:
        return [to_write(attempt, wholes, ranks, rank, mine) for rank, mine in enumerate(pieces)]

    made, _ = asyncio.run(written(open_store(url, writable=True), parts))
    source = StoreSource(url, made.attempt, made)
    source.open([])
    after = Ranks(3, {w.key: grid((3,), (0,) if w.shape else (None,)) for w in wholes})
    for turned in (False, True):
        check_restored([source], wholes, after, turned=turned)


# -- what torch does --


def torch_part(shape: tuple[int, ...], mesh: tuple[int, ...], place: tuple[int, ...], placements: Any) -> Tensor:
    """What torch cuts out of an array of numbers, one mesh dimension after the other."""
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
def test_shards_lie_where_torch_cuts_them(data: st.DataObject) -> None:
    """Shards of any dimensions, several of one, uneven and empty; and a strided one, which takes some of each group."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    placements = [data.draw(st.just(Replicate()) | dims.map(Shard)) for _ in mesh]
    check_placements(shape, mesh, placements)
    strided, factor = data.draw(st.integers(0, len(mesh) - 1)), data.draw(st.integers(2, 4))
    alone = [_StridedShard(0, split_factor=factor) if i == strided else Replicate() for i in range(len(mesh))]
    check_placements(shape, mesh, alone)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (4, 2), (2, 2, 2)], ids=str)
def test_strided_shards_of_even_sizes_lie_where_torch_cuts_them(mesh: tuple[int, ...]) -> None:
    """FSDP over tensor parallelism, where every way to cut gives the same. Negative control: a plain shard does not."""
    size = 3 * math.prod(mesh)
    strided = [_StridedShard(0, split_factor=math.prod(mesh[i + 1 :])) for i in range(len(mesh) - 1)]
    check_placements((size, 2), mesh, [*strided, Shard(0)])
    last = (*(n - 1 for n in mesh[:-1]), 0)
    plain = our_part((size, 2), mesh, last, [Shard(0)] * len(mesh))
    assert plain.tolist() != torch_part((size, 2), mesh, last, [*strided, Shard(0)]).tolist()


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """torch believes that this process is one of several; nothing is sent."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shape", [(7, 5), (4, 4), (1, 3), (0, 3), (2, 9, 3)], ids=str)
def test_pieces_of_a_dtensor_are_what_distribute_tensor_puts_there(shape: tuple[int, ...]) -> None:
    """By rank, of arrays of numbers: each piece holds the numbers of its box, and lies in the tensor's own memory."""
    full = torch.arange(math.prod(shape)).reshape(shape)
    for placements in [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Shard(1)), (Replicate(), Replicate())]:
        seen = torch.zeros(shape, dtype=torch.int64)
        for rank in range(6):
            with as_rank(rank, 6):
                mesh = init_device_mesh("cpu", (2, 3))
                tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
                found = of_rank(StateEntry("w", tensor), Seat(rank, 6))
            for piece in found:
                box = (piece.holding.offsets, piece.holding.sizes)
                assert (piece.holding.full, piece.holding.instance) == (shape, GLOBAL)
                assert torch.equal(piece.tensor, part(full, box))
                assert piece.tensor.untyped_storage().data_ptr() == tensor._local_tensor.untyped_storage().data_ptr()
                assert rank in piece.holding.replicas
                if rank == piece.holding.replicas[0]:
                    part(seen, box).add_(1)
        assert (seen == 1).all()


Held = tuple[tuple[int, ...], Any, Tensor]


def fsdp_over_tensor_parallelism(rows: int, sides: tuple[int, ...]) -> list[Held]:
    """Of every rank its place in the mesh, the placements of a weight, and which rows it holds."""
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


@pytest.mark.parametrize("sides", [(2, 2), (4, 2), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 9, 10, 13, 24])
def test_fsdp_over_tensor_parallelism_is_exact_for_uneven_sizes(sides: tuple[int, ...], rows: int) -> None:
    """FSDP cuts what tensor parallelism has cut already, also where both leave a rest: by what each rank then holds."""
    seen = torch.zeros(rows, dtype=torch.int64)
    for place, placements, local in fsdp_over_tensor_parallelism(rows, sides):
        assert isinstance(placements[-2], _StridedShard)
        assert our_part((rows,), sides, place, placements).tolist() == local.tolist()
        seen[local] += 1
    assert (seen == math.prod(sides[:-2])).all()


def test_negative_control_cutting_from_left_to_right_would_be_wrong() -> None:
    """The placements do not mean that for uneven sizes: some ranks hold other rows, some even as many others."""
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
