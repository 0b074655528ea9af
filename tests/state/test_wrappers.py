"""Tests of tensor subclasses made of other tensors: saved by their own description, and recreated from it."""

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


@pytest.mark.parametrize("stepped", [False, True], ids=["an optimizer without moments", "in place"])
def test_wrappers_restore_bit_for_bit(stepped: bool) -> None:
    """All bits return. Existing wrappers are filled in place, and missing moments are created by their class."""
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


def test_missing_wrappers_in_values_are_created() -> None:
    """An empty list gets recreated wrappers."""
    state: State = {"mine": [Quantised.of(torch.randn(5), ("a", 3, torch.float16, torch.Size([2])))]}
    twin: State = {"mine": []}
    Saved(Capture(state).read()).restore(twin)
    assert type(twin["mine"][0]) is Quantised and differences(freeze(twin), freeze(state)) == []


@pytest.mark.parametrize("write", ["through it", "past it", "replaced within"])
def test_write_to_wrapper_is_captured(write: str) -> None:
    """The next capture has the written values; its counters differ, or it reads other memory."""
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
def test_different_wrapper_is_rejected_by_name(kind: str) -> None:
    """Nothing changes. A restore that is not strict skips the whole wrapper and fills the others."""
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


def test_class_not_imported_yet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the class and the remedy. Existing wrappers are filled without finding the class."""
    state = trained()
    saved = Saved(Capture(state).read())
    twin, filled = build(7), build(8)
    train(filled, 1)
    monkeypatch.delattr(wrapped_toy, "Quantised")
    with pytest.raises(MismatchError, match=r"import wrapped_toy first"):
        saved.restore(twin)
    saved.restore(filled)
    assert differences(everything(filled), everything(state)) == []


def test_wrapper_with_object_context_is_only_filled() -> None:
    """An existing wrapper is filled in place; creating a new one raises an error."""
    state: State = {"mine": [Shell(Quantised.of(torch.randn(4)), torch.randn(4), Odd())]}
    twin: State = {"mine": [Shell(Quantised.of(torch.randn(4)), torch.randn(4), Odd())]}
    saved = Saved(Capture(state).read())
    saved.restore(twin)
    assert torch.equal(twin["mine"][0].inner.codes, state["mine"][0].inner.codes)
    assert torch.equal(twin["mine"][0].shift, state["mine"][0].shift)
    with pytest.raises(MismatchError, match=r"cannot be created again, because it contains 'wrapped_toy\.Odd'"):
        saved.restore({"mine": []})


class Slotted:
    """Has no description of its attributes."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


CONTEXTS = {
    "dict": {"in": [torch.ones(2)]},
    "slots": Slotted(np.ones(2)),
    "partial": functools.partial(print, torch.ones(2)),
}


@pytest.mark.parametrize("kind", CONTEXTS)
def test_tensor_in_wrapper_context_is_rejected(kind: str) -> None:
    """A tensor or array in a context would be missing from the checkpoint, so saving fails instead."""
    with pytest.raises(StateError, match=r"mine\.0: .* keeps a tensor or an array in its context"):
        Capture({"mine": [Quantised.of(torch.ones(4), CONTEXTS[kind])]}).read()


def test_objects_in_wrapper_context_are_compared() -> None:
    """For example a scale: codes are not filled if the scale differs. Cycles and functions are handled."""
    saved = Saved(Capture({"mine": [Quantised.of(torch.ones(4), Slotted(3.0))]}).read())
    saved.restore({"mine": [Quantised.of(torch.zeros(4), Slotted(3.0))]})
    with pytest.raises(MismatchError, match=r"mine\.0: its .* has settings"):
        saved.restore({"mine": [Quantised.of(torch.zeros(4), Slotted(5.0))]})
    around = Slotted(None)
    around.held = [around, torch.relu, torch.float8_e4m3fn]
    again = Saved(Capture({"mine": [Quantised.of(torch.ones(4), around)]}).read())
    again.restore({"mine": [Quantised.of(torch.zeros(4), around)]})


class Liar(Quantised):
    """Creates a different tensor than the one given."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Quantised:
        return cls(inner["codes"].clone(), inner["scale"], *context)


class Thrower(Quantised):
    """Raises an error in its unflatten method."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Quantised:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("kind", "said"), [(Liar, "creates a different tensor"), (Thrower, "does not accept its saved tensors")]
)
def test_class_with_wrong_unflatten_is_rejected(kind: type[Quantised], said: str) -> None:
    """If the class creates unfilled tensors or raises, the restore fails by name, and nothing changes."""
    twin: State = {"mine": []}
    with pytest.raises(MismatchError, match=rf"mine\.0: .*{said}"):
        Saved(Capture({"mine": [kind.of(torch.randn(4))]}).read()).restore(twin)
    assert twin == {"mine": []}


@pytest.mark.parametrize("damage", [{"class": 3}, {"tensors": 3}, {"size": [-1]}, {"name": None}])
def test_damaged_wrapper_forms_are_rejected(damage: dict[str, Any]) -> None:
    """They count as damage of the file, among the facts and among the values."""
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


def test_killed_training_restores_wrappers_from_memory(run_dir: str) -> None:
    """Each step is staged while training continues; the last one is restored, bit for bit."""
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
def test_shares_restore_only_on_same_ranks(tmp_path: Path) -> None:
    """Codes and scales cannot be resharded: two ranks get theirs back, and a single one gets an error."""
    code = "import wrapped_toy; wrapped_toy.main()"
    first = reports(launch(2, code, tmp_path / "run", port=free_port()))["wrapped"]
    assert (
        first == [{"mode": "wrapped", "step": 3, "exact": True, "goes_on": True, "kinds": ["DTensor", "Quantised"]}] * 2
    )
    (said,) = reports(launch(1, code, tmp_path / "run", port=free_port()))["wrapped"]
    assert "exp_avg: this rank has a different share of the wrapped_toy.Quantised" in said["refused"]
    assert "restore on the same number of ranks" in said["refused"]
