"""Tensors that are made of other tensors: taken apart by what they say of themselves, and made whole again."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ckpt
import wrapped_toy
from ckpt.core.state.capture import Capture
from ckpt.core.state.wrappers import WrapperForm
from ckpt.errors import CorruptError, MismatchError, StateError
from inside import Saved
from parallel import SHARDS_HERE, free_port, launch, reports
from processes import killed, run_script
from toy_states import State, differences, freeze
from wrapped_toy import SIDE, Net, Odd, Other, Quantised, Shell, build, everything, train


def trained(steps: int = 3) -> State:
    state = build(0)
    for step in range(steps):
        train(state, step)
    return state


def test_a_wrapper_is_saved_as_what_it_is_made_of() -> None:
    """By name, in the layout; no tensor there is the wrapper's own, and nothing is left out."""
    layout = Capture(trained()).read().layout
    names = {spec.name for spec in layout.tensors}
    assert {"net.frozen.codes", "net.frozen.scale", "mine.1.shell.inner.codes", "mine.1.shell.shift"} <= names
    assert "optim.state.net.body.weight.exp_avg.scale" in names and "net.frozen" not in names


@pytest.mark.parametrize("stepped", [False, True], ids=["an optimizer without moments", "in place"])
def test_all_of_it_returns(stepped: bool) -> None:
    """Bit for bit. What lives is filled in place; moments that are not there yet are made by their class."""
    state, twin = trained(), build(7)
    if stepped:
        train(twin, 9)
    wanted, there = everything(state), twin["net"].frozen
    moments = [values["exp_avg"] for values in twin["optim"].state.values()]
    assert differences(everything(twin), wanted)
    Saved(Capture(state).read()).restore(twin)
    assert differences(everything(twin), wanted) == [] and differences(everything(state), wanted) == []
    assert twin["net"].frozen is there and type(twin["net"].table) is Quantised
    if stepped:
        assert all(a is v["exp_avg"] for a, v in zip(moments, twin["optim"].state.values(), strict=True))
    for one in (state, twin):
        train(one, 5)
    assert differences(everything(twin), everything(state)) == []


def test_plain_values_hold_new_ones_where_none_lived() -> None:
    """A list that was empty here gets wrappers that are made again."""
    state: State = {"mine": [Quantised.of(torch.randn(5), ("a", 3, torch.float16, torch.Size([2])))]}
    twin: State = {"mine": []}
    Saved(Capture(state).read()).restore(twin)
    assert type(twin["mine"][0]) is Quantised and differences(freeze(twin), freeze(state)) == []


@pytest.mark.parametrize("write", ["through it", "past it", "replaced within"])
def test_a_write_is_seen_wherever_it_is_made(write: str) -> None:
    """A reading after it has what was written; its counters differ, or it reads another memory."""
    state = trained()
    capture = Capture(state)
    capture.read()
    before = capture.read()
    one = state["net"].frozen
    with torch.no_grad():
        if write == "through it":
            one.copy_(torch.ones(SIDE, SIDE))
        elif write == "past it":
            one.codes.fill_(1)
        else:
            one.codes = torch.ones(SIDE, SIDE, dtype=torch.int8)
    after = capture.read()
    number = next(n for n, spec in enumerate(after.layout.tensors) if spec.name == "net.frozen.codes")
    assert torch.equal(after.tensors[number], one.codes)
    if write == "past it":
        assert before.counters[number]._version > 0
    twin = build(7)
    Saved(after).restore(twin)
    assert differences(everything(twin), everything(state)) == []


DIFFERENT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "class": (Other.of, r"net\.frozen is a wrapped_toy\.Quantised in the checkpoint and a wrapped_toy\.Other here"),
    "plain": (Tensor.clone, r"net\.frozen is a wrapped_toy\.Quantised in the checkpoint and a plain tensor here"),
    "context": (lambda plain: Quantised.of(plain, "b"), r"net\.frozen: its wrapped_toy\.Quantised has settings .*'b'"),
    "shape": (lambda plain: Quantised.of(plain[:, :4]), r"net\.frozen has shape \[6, 6\] .* \[6, 4\] here"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_lives_otherwise_is_refused_by_name(kind: str) -> None:
    """Nothing is changed; a restore that is not strict leaves the whole wrapper as it is, and fills the others."""
    make, message = DIFFERENT[kind]
    state: State = {"net": Net()}
    twin: State = {"net": Net(make)}
    was, saved = freeze(twin), Saved(Capture(state).read())
    with pytest.raises(MismatchError, match=message):
        saved.restore(twin)
    assert differences(freeze(twin), was) == []
    kept = freeze([twin["net"].frozen, twin["net"].table])
    saved.restore(twin, strict=False)
    assert differences(freeze([twin["net"].frozen, twin["net"].table]), kept) == []
    assert torch.equal(twin["net"].body.weight, state["net"].body.weight)


def test_a_plain_tensor_does_not_fill_a_wrapper() -> None:
    """The other way round."""
    with pytest.raises(MismatchError, match=r"frozen is a plain tensor in the checkpoint and a wrapped_toy\.Quantised"):
        Saved(Capture({"net": Net(Tensor.clone)}).read()).restore({"net": Net()})


def test_moments_of_another_kind_begin_anew_where_that_is_allowed() -> None:
    """Strict, it is refused; else that parameter's state begins anew and the rest is restored."""
    state, twin = trained(), build(7, label=(2, "n"))
    train(twin, 1)
    saved = Saved(Capture(state).read())
    with pytest.raises(MismatchError, match=r"optim\.state\.net\.body\.weight\.exp_avg: its .*Quantised has settings"):
        saved.restore(twin)
    saved.restore(twin, strict=False)
    assert not twin["optim"].state[twin["net"].body.weight]
    assert torch.equal(twin["net"].body.weight, state["net"].body.weight)
    train(twin, 2)


def test_a_class_that_nobody_imported_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with what to do. What lives needs no class to be found."""
    state = trained()
    saved = Saved(Capture(state).read())
    twin, filled = build(7), build(8)
    train(filled, 1)
    monkeypatch.delattr(wrapped_toy, "Quantised")
    with pytest.raises(MismatchError, match=r"import wrapped_toy first"):
        saved.restore(twin)
    saved.restore(filled)
    assert differences(everything(filled), everything(state)) == []


def test_a_context_that_is_not_plain_is_filled_and_not_made() -> None:
    """Whoever lives is filled in place; anew it cannot be made, which is said."""
    state: State = {"mine": [Shell(Quantised.of(torch.randn(4)), torch.randn(4), Odd())]}
    twin: State = {"mine": [Shell(Quantised.of(torch.randn(4)), torch.randn(4), Odd())]}
    saved = Saved(Capture(state).read())
    saved.restore(twin)
    assert torch.equal(twin["mine"][0].inner.codes, state["mine"][0].inner.codes)
    assert torch.equal(twin["mine"][0].shift, state["mine"][0].shift)
    with pytest.raises(MismatchError, match=r"cannot be created again, because it contains 'wrapped_toy\.Odd'"):
        saved.restore({"mine": []})


class Slotted:
    """Tells nothing of what it holds."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize("around", [lambda v: v, lambda v: {"in": [v]}, Slotted, lambda v: functools.partial(print, v)])
@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2)], ids=["tensor", "array"])
def test_values_that_would_not_be_saved_are_refused(around: Callable[[Any], Any], value: Any) -> None:
    """A tensor or an array in a context is state that nobody told us of: better no checkpoint than a torn one."""
    with pytest.raises(StateError, match=r"mine\.0: .* keeps a tensor or an array in its context"):
        Capture({"mine": [Quantised.of(torch.ones(4), around(value))]}).read()


def test_what_an_object_in_a_context_holds_is_compared() -> None:
    """A scale in an object, say: codes are not filled beside another one. Cycles and functions end somewhere."""
    saved = Saved(Capture({"mine": [Quantised.of(torch.ones(4), Slotted(3.0))]}).read())
    saved.restore({"mine": [Quantised.of(torch.zeros(4), Slotted(3.0))]})
    with pytest.raises(MismatchError, match=r"mine\.0: its .* has settings"):
        saved.restore({"mine": [Quantised.of(torch.zeros(4), Slotted(5.0))]})
    around = Slotted(None)
    around.held = [around, torch.relu, torch.float8_e4m3fn]
    again = Saved(Capture({"mine": [Quantised.of(torch.ones(4), around)]}).read())
    again.restore({"mine": [Quantised.of(torch.zeros(4), around)]})


class Liar(Quantised):
    """Makes another tensor of what it is given."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Quantised:
        return cls(inner["codes"].clone(), inner["scale"], *context)


class Thrower(Quantised):
    """Takes nothing back."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Quantised:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("kind", "said"), [(Liar, "creates a different tensor"), (Thrower, "does not accept its saved parts")]
)
def test_a_class_that_does_not_keep_its_word_is_refused(kind: type[Quantised], said: str) -> None:
    """Tensors that nobody fills, or an error of its own: an error of ours, by name, and nothing is changed."""
    twin: State = {"mine": []}
    with pytest.raises(MismatchError, match=rf"mine\.0: .*{said}"):
        Saved(Capture({"mine": [kind.of(torch.randn(4))]}).read()).restore(twin)
    assert twin == {"mine": []}


class Mixed(Quantised):
    """Says that something is a tensor in it which is none."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "label"], None


def test_a_part_that_is_no_tensor_is_refused() -> None:
    """By the name of the wrapper."""
    with pytest.raises(StateError, match=r"mine\.0: this Mixed lists an attribute that is not a tensor"):
        Capture({"mine": [Mixed.of(torch.randn(4))]}).read()


@pytest.mark.parametrize(
    "damage", [{"class": 3}, {"tensors": 3}, {"size": [-1]}, {"tensors": [[1, 2]]}, {"name": None}]
)
def test_forms_that_no_one_wrote_are_refused(damage: dict[str, Any]) -> None:
    """As damage of the file, wherever they lie: among the facts, and among the values."""
    state: State = {"net": Net(), "mine": [Quantised.of(torch.randn(4))]}
    reading = Capture(state).read()
    found = Saved(reading)
    layout, values = json.loads(found.layout), json.loads(found.values)
    facts = next(one["facts"] for one in layout["components"] if "wrappers" in one["facts"])
    with pytest.raises(CorruptError):
        WrapperForm.from_json(facts["wrappers"][0] | damage)
    found.values = json.dumps(values).replace('"wrapper"', '"wrapped"')
    with pytest.raises(CorruptError):
        found.restore({"net": Net(), "mine": []})
    found.values = json.dumps(values)
    facts["wrappers"][0] |= damage
    found.layout = json.dumps(layout)
    with pytest.raises(CorruptError):
        found.restore({"net": Net(), "mine": []})


LIFE = """
import os, signal, sys
import ckpt
from wrapped_toy import build, everything, train
state = build(0)
cp = ckpt.Checkpointer(state, ckpt.Tier(sys.argv[1], every=3))
for step in range(1, 6):
    train(state, step)
    save = cp.step(step)
save.wait_staged(30)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_and_back_from_memory(run_dir: str) -> None:
    """Each step is staged while training goes on; what comes back is the last one, bit for bit."""
    assert killed(run_script(LIFE, run_dir))
    wanted, twin = build(0), build(3)
    for step in range(1, 6):
        train(wanted, step)
    with ckpt.Checkpointer(twin, ckpt.Tier(run_dir, every=3)) as cp:
        assert cp.restore() == 5
        assert cp.last_restore is not None and cp.last_restore.tier == "memory"
        assert differences(everything(twin), everything(wanted)) == []
    found = ckpt.load(run_dir)
    assert torch.equal(found["net.frozen.codes"], wanted["net"].frozen.codes)
    assert torch.equal(found.plain("mine")[0]["codes"], wanted["mine"][0].codes)


@pytest.mark.skipif(not SHARDS_HERE, reason="this torch shards on a GPU only")
def test_shares_of_ranks_return_to_the_same_ranks_only(tmp_path: Path) -> None:
    """Codes of four and scales are no elements: two ranks get theirs back, one or three are told why they do not."""
    code = "import wrapped_toy; wrapped_toy.main()"
    first = reports(launch(2, code, tmp_path / "run", port=free_port()))["wrapped"]
    assert (
        first == [{"mode": "wrapped", "step": 3, "exact": True, "goes_on": True, "kinds": ["DTensor", "Quantised"]}] * 2
    )
    for world in (1, 3):
        for said in reports(launch(world, code, tmp_path / "run", port=free_port()))["wrapped"]:
            assert "exp_avg: this rank has a different share of the wrapped_toy.Quantised" in said["refused"]
            assert "restore on the same number of ranks" in said["refused"]
