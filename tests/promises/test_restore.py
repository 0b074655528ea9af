"""Restores set every bit, in place, from memory and disk; or raise an error that lists all problems and changes
nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ckpt
import inside
from ckpt.errors import CorruptError, MismatchError, NoCheckpointError, UsageError
from inside import Bench
from plain_values import values as plain_values
from processes import run_script
from run_files import data_file
from toy_states import Loader, State, differences, fill, freeze, raw


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "bench")
    yield made
    made.close()


def restore(*sources: Any, into: State, strict: bool = True, untouched: bool = False) -> ckpt.Restored:
    """By the library's own steps, from the first that is sound; CorruptError if none is.

    `untouched`: fails as soon as anything of the state would be changed.
    """
    touched = list[bool]()

    def on_touch() -> None:
        assert not untouched, "touched"
        touched.append(True)

    result = inside.restore_first_of(sources, into, strict=strict, known=True, on_touch=on_touch)
    if result.step is None:
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


def plain_bytes(state: State, name: str) -> bytes:
    """Return the bytes of a tensor of a state, by name."""
    return raw(inside.tensor_of(state, name))


@pytest.mark.parametrize("strict", [True, False])
def test_a_large_piece_is_copied_and_verified_in_one_go(strict: bool, bench: Bench) -> None:
    """A strict restore that has copied parts of a damaged snapshot overwrites all of them from the next source. A
    lenient one, which may skip entries, takes nothing from a damaged piece."""
    make = [{"a": torch.randn(3 << 18), "model": nn.Linear(512, 1024)} for _ in range(2)]
    (state, twin), wanted = make, freeze(make[0])
    snapshot = bench.snapshot(state)
    disk, name = bench.store(snapshot), snapshot.contents.names[-1]
    snapshot.data[-5] ^= 1
    old = plain_bytes(twin, name)
    with pytest.raises(CorruptError, match=f"{name} is damaged in memory"):
        restore(snapshot.source, into=twin, strict=strict)
    if not strict:
        assert plain_bytes(twin, name) == old
    result = restore(snapshot.source, disk, into=twin, strict=strict)
    assert (result.tier, [skipped.tier for skipped in result.skipped]) == (bench.url, ["memory"])
    assert differences(freeze(twin), wanted) == []


def test_negative_control_a_large_piece_without_a_digest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the digest were not compared, the flipped bit would be restored without a report."""
    inside.trust_memory(monkeypatch)
    with pytest.raises(pytest.fail.Exception):
        test_a_large_piece_is_copied_and_verified_in_one_go(True, bench)


def test_negative_control_another_layout_is_not_taken_for_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the layouts were not compared, a mismatch would not be noticed."""
    inside.take_every_layout_for_the_same(monkeypatch)
    with pytest.raises(AssertionError, match="touched"):
        test_what_does_not_fit_is_listed_whole_and_nothing_is_changed("memory", "groups", bench)


@pytest.mark.parametrize("place", PLACES)
def test_a_state_of_the_same_layout_returns_as_any_other(
    place: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors filled without a check of each equal tensors placed one by one, in every bit, and autograd is notified.
    This applies to modules and optimizers; other objects are loaded as always."""
    state, source = build(0), getattr(bench, place)(build(0))
    seen, found = inside.note_filled_as_they_lie(monkeypatch), []
    for as_saved in (True, False):
        if not as_saved:
            inside.take_no_layout_for_the_same(monkeypatch)
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
    before = freeze(twin)
    snapshot.overwrite()
    with pytest.raises(CorruptError, match="overwritten while it was read"):
        restore(snapshot.source, into=twin, untouched=True)
    assert differences(freeze(twin), before) == []
    snapshot.put_back()
    result = inside.restore_first_of([snapshot.source], twin, on_touch=snapshot.overwrite)
    assert result.step is None and "overwritten while it was read" in result.skipped[0].reason


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
        ["model.b.weight is in the checkpoint, but not in model", "model.b.bias is in the checkpoint"],
    ),
    "untied": (lambda: build(1, net=model(1, tied=False)), ["model.a.weight and model.b.weight were one tensor"]),
    "groups": (
        lambda: {**(s := build(1)), "optim": torch.optim.AdamW([{"params": [p]} for p in s["model"].parameters()])},
        ["optim: the parameter groups differ (5 groups here, 1 saved"],
    ),
    "entry missing": (lambda: {**build(1), "late": 1}, ["late is not in the checkpoint"]),
    "entry unexpected": (
        lambda: {k: v for k, v in build(1).items() if k != "loader"},
        ["loader is in the checkpoint, but not in the state"],
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
    """One error lists all differences; the state, including generators, is unchanged."""
    make, expected = MISFITS[misfit]
    source, twin = getattr(bench, place)(build(0)), make()
    before = freeze(twin)
    with pytest.raises(MismatchError) as caught:
        restore(source, into=twin, untouched=True)
    assert [text for text in expected if text not in str(caught.value)] == []
    assert differences(freeze(twin), before) == []


def test_a_tied_model_does_not_take_an_untied_checkpoint(bench: Bench) -> None:
    """Nor the other way round, which is above."""
    with pytest.raises(MismatchError, match="one tensor here, but were not when they were saved"):
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
    """A parameter with another shape starts without state; the others keep theirs."""

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
    assert any("1.weight: starts without state" in line for line in result.left_out)
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


def flip(folder: str, step: int) -> None:
    """Flip a bit in the data file of a step, in weights that differ at each step, so that no other file has these
    bytes."""
    file = data_file(folder, step)
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    weights = [name for name, entry in entries.items() if name.startswith("model.") and entry["dtype"] == "F32"]
    name = min(weights) if weights else max(entries)
    data[8 + size + entries[name]["data_offsets"][0]] ^= 4
    file.chmod(0o600)
    file.write_bytes(data)


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
    cp.save(1).wait_durable(120)
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
    read = inside.note_loaded(monkeypatch)
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
    with pytest.raises(NoCheckpointError, match="no run at"):
        ckpt.load(tmp_path / "nothing")
    with pytest.raises(UsageError, match="matches"):
        ckpt.load(bench.url, only="nobody.*")
    with pytest.raises(UsageError, match="starts with"):
        loaded.sub("nobody")
    for call in (loaded.plain, loaded.__getitem__):
        with pytest.raises(KeyError, match="'nobody' in step 1"):
            call("nobody")
    with pytest.raises(
        KeyError, match=r"no entry 'loadr' in step 1; did you mean loader\? The entries are: .*\bmine\b"
    ):
        loaded.plain("loadr")


def test_load_only_accepts_a_name_of_an_entry(bench: Bench, tmp_path: Path) -> None:
    """`only="model"` selects what `only="model.*"` and `ckpt export --only model` select, and no entry `model2`."""
    bench.disk({"model": nn.Linear(3, 2), "model2": nn.Linear(2, 2)})
    assert set(ckpt.load(bench.url, only="model")) == set(ckpt.load(bench.url, only="model.*"))
    assert set(ckpt.load(bench.url, only="model")) == {"model.weight", "model.bias"}
    shown = inside.invoke("show", bench.url, "--only", "model", "--json", standalone_mode=False)
    assert {one["name"] for one in json.loads(shown.output)["tensors"]} == {"model.weight", "model.bias"}
    target = tmp_path / "out.pt"
    inside.invoke("export", bench.url, "--to", str(target), "--only", "model", standalone_mode=False)
    assert set(torch.load(target, weights_only=True)["model"]) == {"weight", "bias"}


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
DTYPES = sorted((d for d in inside.DTYPES.values() if "float4" not in str(d) and d != torch.complex32), key=str)


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
        inside.readable(state)
    except ckpt.errors.StateError as error:  # keys like 1 and "1" with an array under each
        assert "have this name" in str(error)
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
