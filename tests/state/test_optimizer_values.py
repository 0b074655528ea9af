"""Tests of optimizers of every form: a restored one continues like the saved one, or is rejected with the reason."""

from __future__ import annotations

import itertools
import logging
import math
import random
import re
import threading
from argparse import Namespace
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, Flag, IntEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ckpt
from ckpt.core.state.capture import Capture
from ckpt.core.state.optimizer_node import forgotten
from ckpt.errors import CorruptError, MismatchError, StateError
from ckpt.tools.cli import app
from inside import Saved
from toy_states import State


class Mode(Enum):
    SLOW = "slow"
    FAST = "fast"


class Level(IntEnum):
    HIGH = 3


class Options(Flag):
    NESTEROV = 1
    DECOUPLED = 2


Limits = namedtuple("Limits", "low high")


def halved(x: float) -> float:
    return x / 2


class Projector:
    """A helper object without state_dict(), like those of GaLore for each parameter."""

    def __init__(self, param: Tensor) -> None:
        self.basis = torch.ones_like(param, dtype=torch.float64)
        self.history = np.zeros(3)
        self.calls, self.sizes = 0, (param.shape, {0.5: [None]})
        self.inner: Any = None

    def scale(self) -> float:
        self.calls += 1
        self.basis = self.basis * 1.1
        self.history = np.roll(self.history, 1) + self.calls
        return 1 / (float(self.basis.mean()) + float(self.history.sum()))


@dataclass(slots=True)
class Slotted:
    """A helper object whose attributes are slots."""

    calls: int = 0
    values: list[Tensor] = field(default_factory=list)


class Counting:
    """A helper object that can only be filled, because it has a lock."""

    def __init__(self) -> None:
        self.lock, self.count, self.total = threading.Lock(), 0, torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.total = state["count"], state["total"]


class Base(torch.optim.Optimizer):
    """Scales the gradient by a number that depends on all its state."""

    settings: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, **self.settings})

    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * self.scale(p, group))


FORMS: dict[str, type[Base]] = {}


def form(kind: type[Base]) -> type[Base]:
    FORMS[kind.__name__] = kind
    return kind


@form
class TextKey(Base):
    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        shared = self.state.setdefault("global", {"k": torch.zeros(()), "n": 0})  # type: ignore[call-overload]
        shared["k"] += 1
        shared["n"] += 1
        return 1 / (float(shared["k"]) + shared["n"])


@form
class OtherKeys(Base):
    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        state: Any = self.state
        state[None] = state.get(None, 0) + 1
        state[0, "a"] = state.get((0, "a"), torch.ones(2)) * 1.5
        state[Mode.FAST] = [*state.get(Mode.FAST, ()), state[None]]
        return 1 / (state[None] + float(state[0, "a"].sum()) + sum(state[Mode.FAST]))


@form
class Collections(Base):
    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        state = self.state[p]
        state.setdefault("last", deque(maxlen=3)).append(float(p.grad.norm()))  # type: ignore[union-attr]
        state.setdefault("tensors", deque()).append(torch.ones(2) * len(state["tensors"]))
        state.setdefault("seen", set()).add((len(state["last"]), "x"))
        state["frozen"] = frozenset({*state.get("frozen", ()), len(state["tensors"])})
        state["phase"] = state.get("phase", 1j) * (1 + 1j)
        tensors = sum(float(one.sum()) for one in state["tensors"])
        return 1 / (1 + sum(state["last"]) + len(state["seen"]) + sum(state["frozen"]) + abs(state["phase"]) + tensors)


@form
class TypedDicts(Base):
    """Stores a dict of another type than dict for each parameter."""

    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        state: Any = self.state
        first = p is group["params"][0]
        if not state[p]:
            state[p] = defaultdict(int) if first else OrderedDict(a=torch.ones(1), b=1)
        if first:
            state[p]["seen"] += 1
            state[p][f"new {state[p]['seen']}"] += 1
            return float(1 / sum(state[p].values()))
        state[p].move_to_end("a")
        state[p]["a"] += 1
        return float(1 / state[p]["a"])


@form
class Settings(Base):
    settings = {  # noqa: RUF012
        "mode": Mode.SLOW, "level": Level.HIGH, "options": Options.NESTEROV | Options.DECOUPLED, "dtype": torch.float64,
        "format": torch.channels_last, "shape": torch.Size([2, 3]), "device": torch.device("cpu"), "fn": halved,
        "part": partial(halved, 1.0), "log": logging.getLogger("x"), "re": re.compile("x"), "math": math,
        "kind": Projector, "limits": Limits(1, [2.5]), "norm": torch.linalg.norm,
    }  # fmt: skip

    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        for key, value in self.settings.items():
            assert type(group[key]) is type(value)
        assert group["fn"] is halved and group["options"] is Options.NESTEROV | Options.DECOUPLED
        group["mode"] = Mode.FAST
        group["limits"] = Limits(group["limits"].low + 1, group["limits"].high)
        return float(group["fn"](1.0) / group["limits"].low)


@form
class Helpers(Base):
    """Creates helper objects in the first step: with a dict, with slots, and nested."""

    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        state = self.state[p]
        if "projector" not in state:
            state["projector"], state["slotted"] = Projector(p), Slotted()
            state["projector"].inner = [Projector(p), {"slotted": state["slotted"]}]
        state["slotted"].calls += 1
        state["slotted"].values.append(torch.ones(1))
        assert state["projector"].inner[1]["slotted"] is state["slotted"]
        scales = state["projector"].scale() + state["projector"].inner[0].scale()
        return float(scales / (state["slotted"].calls + len(state["slotted"].values)))


@form
class SharedHelper(Base):
    """Stores one object for all parameters, which refers to a parameter and to itself."""

    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        first = self.param_groups[0]["params"][0]
        state: Any = self.state
        shared = next((held["helper"] for held in state.values() if "helper" in held), None) or Projector(p)
        state[p]["helper"] = shared
        shared.inner = {"self": shared, "param": first}
        assert len({id(held["helper"]) for held in state.values()}) == 1 and shared.inner["param"] is first
        return shared.scale()


@form
class EarlyHelper(Base):
    """Creates objects in its constructor that a restore can only fill."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        state: Any = self.state
        state["counting"], state["numpy"] = {"one": Counting()}, np.random.default_rng(0)
        self.held = state["counting"]["one"]

    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        state: Any = self.state
        assert state["counting"]["one"] is self.held
        self.held.count += 1
        self.held.total = self.held.total + state["numpy"].random()
        return 1 / (self.held.count + float(self.held.total))


@form
class OtherGenerators(Base):
    """Creates generators of torch, numpy and Python in the first step. Some belong to all parameters."""

    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        state = self.state[p]
        for bits in (np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64, np.random.PCG64DXSM):
            state.setdefault(bits.__name__, np.random.Generator(bits(3)))
        shared = group.setdefault("shared", random.Random(1))
        state["python"] = shared
        state["old"] = old = group.setdefault("old", np.random.RandomState(2))
        numpy = sum(made.normal() for made in state.values() if isinstance(made, np.random.Generator))
        of_torch = torch.rand((), generator=state.setdefault("torch", torch.Generator().manual_seed(3)))
        return float(numpy + shared.random() + shared.gauss() + old.randn() + of_torch)


@form
class Namespaces(Base):
    """Stores a namespace for all parameters, with a tensor and another namespace in it."""

    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        shared = group.setdefault("shared", SimpleNamespace(n=0, sum=torch.zeros(1), inner=SimpleNamespace(last=[])))
        self.state[p]["shared"] = shared
        shared.n, shared.sum = shared.n + 1, shared.sum + 1
        shared.inner.last = [*shared.inner.last[-2:], shared.n]
        return 1 / (shared.n + float(shared.sum) + sum(shared.inner.last))


@form
class Expanded(Base):
    """Stores a row, and an expanded view of it."""

    def scale(self, p: Tensor, group: dict[str, Any]) -> float:
        state = self.state[p]
        if "view" not in state:
            state["row"] = torch.zeros(p.shape[0])
            state["view"] = state["row"].view(-1, *[1] * (p.dim() - 1)).expand_as(p) if p.dim() > 1 else None
            state["more"] = [torch.ones(3, 1, 2, 1).expand(-1, 4, -1, 5)]
        state["row"].add_(1)
        assert state["more"][0].shape == (3, 4, 2, 5)
        return 1 / (float(state["row"].sum() if p.dim() == 1 else state["view"].sum()) + float(state["more"][0].sum()))


def made(kind: Callable[[Any], Any], seed: int, dtype: torch.dtype = torch.float32) -> State:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    return {"net": net, "opt": kind(net.parameters())}


def train(state: State, steps: range) -> None:
    net, opt = state["net"], state["opt"]
    for step in steps:
        opt.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(next(net.parameters()).dtype)
        (net(x) - 1).square().mean().backward()
        opt.step()


def weights(state: State) -> list[Tensor]:
    return [p.detach().clone() for p in state["net"].parameters()]


def continues_alike(make: Callable[[int], State]) -> tuple[State, State]:
    """Check that a restored state continues like the one that was saved, whether or not it has stepped before."""
    state = make(0)
    capture = Capture(state)
    capture.read()  # when the Checkpointer is created
    train(state, range(3))
    saved = Saved(capture.read())
    twins = [make(1), make(2)]
    captures = [Capture(twin) for twin in twins]
    for one in captures:
        one.read()
    train(twins[1], range(7, 9))
    for twin in twins:
        assert any(not torch.equal(a, b) for a, b in zip(weights(state), weights(twin), strict=True))
        saved.restore(twin)
    train(state, range(3, 6))
    for twin in twins:
        train(twin, range(3, 6))
        assert all(torch.equal(a, b) for a, b in zip(weights(state), weights(twin), strict=True))
    return state, twins[0]


@pytest.mark.parametrize("kind", FORMS)
def test_optimizer_continues_exactly_after_restore(kind: str) -> None:
    continues_alike(lambda seed: made(FORMS[kind], seed))


def test_optimizers_continue_exactly_through_checkpointer(tmp_path: Path) -> None:
    """The same through files. Readers without the optimizer get plain values, and torch.load reads an export."""
    torch.set_num_threads(1)

    def make(seed: int) -> State:
        return {name: made(kind, seed) for name, kind in FORMS.items()}

    state, run = make(0), tmp_path / "run"
    with ckpt.Checkpointer(state, run) as cp:
        for one in state.values():
            train(one, range(3))
        cp.step(3)
        cp.save().wait_durable()
    for one in state.values():
        train(one, range(3, 5))
    twin = make(1)
    with ckpt.Checkpointer(twin, run) as cp:
        assert cp.restore() == 3
        for one in twin.values():
            train(one, range(3, 5))
    for name, one in state.items():
        assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(twin[name]), strict=True)), name
    loaded = ckpt.load(run)
    settings = loaded.plain("Settings.opt")["groups"][0]
    assert (settings["mode"], settings["dtype"], settings["limits"]) == ("FAST", torch.float64, (13, [2.5]))
    rows = {(name, key): value for name, key, value in loaded.plain("Helpers.opt")["state"]}
    assert rows["Helpers.net.0.weight", "projector"]["calls"] == 3
    exported = tmp_path / "state.pt"
    assert app.main(["restore", str(run), "--to", str(exported)]) == 0
    found = torch.load(exported, weights_only=True)
    assert found["TextKey"]["opt"]["state"]["global"]["n"] == 12
    fresh = made(FORMS["TextKey"], 1)["opt"]
    fresh.load_state_dict(found["TextKey"]["opt"])
    assert float(fresh.state["global"]["k"]) == 12


# -- objects of the script among the settings --


@pytest.fixture
def script_objects() -> Iterator[Callable[[int], dict[str, Any]]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda lr: {
        "process_group": dist.group.WORLD,
        "mesh": mesh,
        "args": Namespace(lr=lr),
        "user_dict": UserDict(lr=lr),
        "proxy": MappingProxyType({"lr": lr}),
    }
    dist.destroy_process_group()


def test_objects_of_the_script_stay_among_the_settings(
    script_objects: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    """A restore keeps those of the restarted script, with their values."""

    def make(lr: int) -> tuple[State, dict[str, Any]]:
        state, objects = made(torch.optim.AdamW, lr), script_objects(lr)
        state["opt"].param_groups[0].update(objects)
        return state, objects

    state, _ = make(1)
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        train(state, range(2))
        cp.step(2)
    twin, objects = make(5)
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        assert cp.restore() == 2
        cp.save().wait_durable()
    assert all(twin["opt"].param_groups[0][key] is value for key, value in objects.items())
    assert (objects["args"], objects["user_dict"]) == (Namespace(lr=5), {"lr": 5})
    train(state, range(2, 4))
    train(twin, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(weights(state), weights(twin), strict=True))
    other, _ = make(1)
    other["opt"].param_groups[0]["args"] = UserDict()
    with pytest.raises(MismatchError, match=r"args was 'argparse\.Namespace' in the checkpoint and is 'collections\.U"):
        ckpt.load(tmp_path / "run", into=other)


@pytest.mark.parametrize(
    "change", [lambda group: setattr(group["x"], "lr", 2), lambda group: group.update(y=UserDict())]
)
def test_setting_that_a_restart_would_lose_is_rejected(change: Callable[[dict[str, Any]], None]) -> None:
    """An object of the script was changed or added during the training."""
    state = made(torch.optim.AdamW, 0)
    state["opt"].param_groups[0]["x"] = Namespace(lr=1)
    capture = Capture(state)
    capture.read()
    capture.read()
    change(state["opt"].param_groups[0])
    with pytest.raises(StateError, match=r"opt\.param_groups\.0\.[xy]: this .* created or changed during the training"):
        capture.read()


@pytest.mark.parametrize("value", [Namespace(ema=torch.ones(2)), UserDict(x={"y": np.ones(2)}), itertools.count()])
def test_setting_with_a_state_of_its_own_is_rejected(value: Any) -> None:
    """Objects with tensors or arrays and iterators are not taken from the script."""
    state = made(torch.optim.AdamW, 0)
    state["opt"].param_groups[0]["x"] = value
    with pytest.raises(StateError, match=r"opt\.param_groups\.0\.x: an object of type .* cannot be saved"):
        Capture(state).read()


# -- unsupported state --


class Deleting(Projector):
    def __del__(self) -> None:
        pass


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def local_member() -> Any:
    class Hidden(Enum):
        ONE = 1

    return Hidden.ONE


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "class with __del__": (Deleting, r": .*Deleting cannot be saved: its class has its own __del__"),
    "lock": (lambda p: Locked(), r"\.lock: an object of type _thread\.lock cannot be saved: it has no attributes"),
    "class with __new__": (
        lambda p: defaultdict(list),
        r": .*defaultdict cannot be saved: its class has its own __new__",
    ),
    "late object that can only be filled": (lambda p: Counting(), r": .*created this .*Counting during the training"),
    "member of a local enum": (lambda p: local_member(), r": .*cannot find this class by its name.*top level"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_optimizer_state_is_rejected(kind: str) -> None:
    """The error names the path and the reason, at the first capture that finds the value."""
    make, reason = REFUSED[kind]
    state = made(torch.optim.AdamW, 0)
    capture = Capture(state)
    capture.read()
    train(state, range(1))
    first = next(iter(state["opt"].state))
    state["opt"].state[first]["x"] = make(first)
    state["opt"].__class__ = type("AdamW", (torch.optim.AdamW,), {"__module__": __name__})  # a class of this package
    with pytest.raises(StateError, match=r"opt\.state\.net\.0\.weight\.x" + reason):
        capture.read()


class OwnDict(dict[str, Any]):
    pass


@pytest.mark.parametrize(("make", "name"), [(OwnDict, "OwnDict"), (lambda: defaultdict(lambda: 0), "defaultdict")])
def test_state_in_unknown_dict_type_is_rejected(make: Callable[[], Any], name: str) -> None:
    """It would return as a plain dict."""
    state = made(torch.optim.AdamW, 0)
    first = next(iter(state["net"].parameters()))
    state["opt"].state[first] = make()
    with pytest.raises(StateError, match=rf"opt\.state\.net\.0\.weight: a .*{name}.* would come back as a plain dict"):
        Capture(state).read()


def test_object_of_another_package_is_rejected() -> None:
    """A class that the optimizer's package neither defines nor imports is not created."""
    state = made(torch.optim.AdamW, 0)
    train(state, range(1))
    next(iter(state["opt"].state.values()))["x"] = Projector(torch.ones(1))
    with pytest.raises(StateError, match="does not belong to the optimizer's package"):
        Capture(state).read()


def test_state_of_foreign_tensor_is_rejected_at_start(tmp_path: Path) -> None:
    """The Checkpointer is not created, and the error does not claim that keys must be tensors."""
    state = made(torch.optim.SGD, 0)
    state["opt"].state[nn.Parameter(torch.ones(1))] = {"m": torch.ones(1)}
    with pytest.raises(StateError, match="state of a tensor that is in none of its groups"):
        ckpt.Checkpointer(state, tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "old", "new", "error"),
    [
        ("Helpers", '"Projector"', '"Missing"', r"no such class: import test_optimizer_values"),
        ("Helpers", f'"{__name__}", "Projector"', '"threading", "Thread"', r"cannot be created again"),
        ("Settings", f'"{__name__}.halved"', '"os.system"', r"opt\.param_groups\.0\.fn was 'os\.system'"),
        ("Settings", '"float64"', '"system"', r"not a torch\.dtype"),
        ("Expanded", "[[1, 4], [3, 5]]", "[[9, 4], [3, 5]]", r"cannot be expanded by"),
        ("EarlyHelper", '"state": {"count"', '"stale": {"count"', r"has no contents of the object"),
        ("SharedHelper", '"v": "net.0.weight"', '"v": "net.9.weight"', r"refers to a parameter 'net\.9\.weight'"),
    ],
)
def test_object_of_forged_checkpoint_is_never_created(kind: str, old: str, new: str, error: str) -> None:
    """A name in a file leads to no class of another package and to no function. Nothing changes."""
    state = made(FORMS[kind], 0)
    Capture(state).read()
    train(state, range(1))
    saved = Saved(Capture(state).read())
    assert old in saved.values
    saved.values = saved.values.replace(old, new)
    twin = made(FORMS[kind], 1)
    capture, before = Capture(twin), weights(twin)
    capture.read()
    with pytest.raises((MismatchError, CorruptError), match=error):
        saved.restore(twin)
    assert all(torch.equal(a, b) for a, b in zip(weights(twin), before, strict=True))


# -- optimizers with more entries in state_dict() --


class Forwarding(torch.optim.Optimizer):
    """A wrapper that forwards everything, and adds an average of the gradients to the state_dict()."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.ema, self.hist = inner, 0.0, deque[float](maxlen=2)

    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.ema = 0.9 * self.ema + 0.1 * sum(float(g.norm()) for g in grads)
        self.hist.append(self.ema)
        for group in self.param_groups:
            group["lr"] = 0.01 / (1 + sum(self.hist))
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "ema": self.ema, "hist": self.hist}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        self.ema, self.hist = own.pop("ema"), own.pop("hist")
        self.inner.load_state_dict(own)


class Nesting(Forwarding):
    """The same, with the state of the inner optimizer in its own entry."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "ema": self.ema, (0, "hist"): self.hist}  # type: ignore[dict-item]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ema, self.hist = state_dict["ema"], state_dict[0, "hist"]  # type: ignore[index]
        self.inner.load_state_dict(state_dict["inner"])


class Momentum(torch.optim.Optimizer):
    """Stores moments in float32 for any dtype of the weights, some of them in lists."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["m"] = state.get("m", torch.zeros_like(p, dtype=torch.float32)) * 0.9 + p.grad.float()
                state["parts"] = [(state["m"] / 3,), {"half": state["m"] / 2}]
                update = state["m"] + state["parts"][0][0] + state["parts"][1]["half"]
                p.copy_(p.float() - group["lr"] * update)


def hooked(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer of torch with hooks that add an entry and remove it."""
    inner = Momentum(params)
    held = Forwarding(inner)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        held.ema += 0.5
        inner.param_groups[0]["lr"] = 0.01 / (1 + held.ema)

    inner.register_step_pre_hook(before)
    inner.register_state_dict_post_hook(lambda optimizer, state: {**state, "ema": held.ema})

    def take(optimizer: Any, state: dict[str, Any]) -> None:
        held.ema = state.pop("ema")

    inner.register_load_state_dict_pre_hook(take)
    return inner


@pytest.mark.parametrize("here", [torch.float64, torch.float32])
def test_tensor_among_the_settings_has_the_saved_dtype(here: torch.dtype) -> None:
    """A tensor of the same dtype stays the same object, which a captured graph reads."""

    def build(rate: float, dtype: torch.dtype) -> State:
        return {"optim": torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=torch.tensor(rate, dtype=dtype))}

    saved, fresh = build(0.1, torch.float64), build(0.5, here)
    live = fresh["optim"].param_groups[0]["lr"]
    Saved(Capture(saved).read()).restore(fresh)
    found = fresh["optim"].param_groups[0]["lr"]
    assert found.dtype == torch.float64 and found.item() == 0.1
    assert (found is live) == (here == torch.float64)


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "forwarding": lambda p: Forwarding(Momentum(p)),
    "nesting": lambda p: Nesting(Momentum(p)),
    "hooked": hooked,
    "accelerate": lambda p: AcceleratedOptimizer(Momentum(p)),
}


@pytest.fixture(autouse=True, scope="module")
def accelerator() -> Iterator[None]:
    """Create an Accelerator, whose state Accelerate's wrapper needs."""
    Accelerator(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("kind", WRAPPED)
def test_entries_of_state_dict_survive_next_to_exact_moments(kind: str) -> None:
    """No entry of a state_dict() is lost, and moments keep a dtype that PyTorch's own loader would cast."""
    state, twin = continues_alike(lambda seed: made(WRAPPED[kind], seed, torch.bfloat16))
    dtypes = [
        [value.dtype for held in one["opt"].state.values() for value in held.values() if isinstance(value, Tensor)]
        for one in (state, twin)
    ]
    assert dtypes[0] == dtypes[1]


class Deriving(torch.optim.SGD):
    """Its learning rate comes from a count outside of its state_dict()."""

    count = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.param_groups[0]["t"] = self.count
        self.param_groups[0]["lr"] = 0.1 / self.count
        return super().step(closure)


class DerivesInLoader(Deriving):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = self.param_groups[0].get("t", 0)


class DerivesInSetstate(Deriving):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.count = self.param_groups[0].get("t", 0)


def derives_in_hooks(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose hooks write the count into the groups before a save, and read it from there."""
    opt: Any = torch.optim.Adam(params)
    opt.count = 0

    def count(opt: Any, args: Any, kwargs: Any) -> None:
        opt.count += 1
        opt.param_groups[0]["lr"] = 0.01 / opt.count

    opt.register_step_pre_hook(count)
    opt.register_state_dict_pre_hook(lambda opt: opt.param_groups[0].__setitem__("n", opt.count))
    opt.register_load_state_dict_post_hook(lambda opt: setattr(opt, "count", opt.param_groups[0].get("n", 0)))
    made: torch.optim.Optimizer = opt
    return made


DERIVING: dict[str, Callable[[Any], Any]] = {
    "loader": DerivesInLoader,
    "__setstate__": DerivesInSetstate,
    "hooks": derives_in_hooks,
    "hooks inside": lambda p: AcceleratedOptimizer(derives_in_hooks(p)),
}


@pytest.mark.parametrize("kind", DERIVING)
def test_optimizer_with_derived_state_continues_exactly(kind: str) -> None:
    """Changes that its hooks, its loader or its __setstate__() make to saved state are made after a restore too."""
    continues_alike(lambda seed: made(DERIVING[kind], seed))


def halved_moments(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose state_dict() has moments in half precision, which its loader casts back."""
    opt = torch.optim.AdamW(params)

    def cast(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        rows = {i: {k: v if k == "step" else v.to(dtype) for k, v in row.items()} for i, row in state["state"].items()}
        return {**state, "state": rows}

    opt.register_state_dict_post_hook(lambda opt, state: cast(state, torch.half))
    opt.register_load_state_dict_pre_hook(lambda opt, state: cast(state, torch.float32))
    return opt


def test_moments_stay_exact_if_the_state_dict_rounds_them() -> None:
    """They are saved as they are in memory, and the loader gets them rounded."""
    state, twin = continues_alike(lambda seed: made(halved_moments, seed))
    for one, other in zip(state["opt"].state.values(), twin["opt"].state.values(), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_state_is_restored_with_a_warning_if_the_loader_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Momentum):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise NotImplementedError("no loader")

    state, twin = made(Fails, 0), made(Fails, 1)
    train(state, range(3))
    Saved(Capture(state).read()).restore(twin)
    assert "opt: its state was restored, but its own load_state_dict() failed" in caplog.text
    train(state, range(3, 5))
    train(twin, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(weights(state), weights(twin), strict=True))


def test_entries_without_a_loader_here_are_a_mismatch() -> None:
    """A plain optimizer cannot restore a wrapper's entries, and strict=False skips them."""
    state, twin = made(WRAPPED["forwarding"], 0), made(Momentum, 1)
    train(state, range(2))
    saved = Saved(Capture(state).read())
    with pytest.raises(MismatchError, match=r"opt: its saved state_dict\(\) has more entries"):
        saved.restore(twin)
    saved.restore(twin, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(weights(state), weights(twin), strict=True))


class Holding(torch.optim.Optimizer):
    """An optimizer that contains one per layer, with torch's state_dict()."""

    def __init__(self, net: nn.Sequential, hold: Callable[[list[torch.optim.Optimizer]], State], share: bool) -> None:
        inner = [torch.optim.Adam(layer.parameters(), 0.1) for layer in net]
        super().__init__(net.parameters(), {"lr": 0.1})
        vars(self).update(hold(inner))
        if share:
            self.param_groups = [group for one in inner for group in one.param_groups]


HOLDS: dict[str, tuple[Callable[[list[torch.optim.Optimizer]], State], str]] = {
    "attributes": (lambda inner: {"a": inner[0], "b": inner[1]}, r"\.a"),
    "list": (lambda inner: {"inner": inner}, r"\.inner\[0\]"),
    "lists in a dict": (lambda inner: {"inner": {"a": [inner[0]], "b": [inner[1]]}}, r"\.inner\['a'\]\[0\]"),
}


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kind", HOLDS)
def test_inner_optimizers_must_be_in_the_state(kind: str, share: bool) -> None:
    """This includes the second of two."""
    hold, where = HOLDS[kind]
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optim = Holding(net, hold, share)
    inner = [one for _, one in forgotten(optim)]
    state: State = {"net": net, "optim": optim}
    with pytest.raises(StateError, match=rf"optim: .* in {where}, .* add that optimizer to the state"):
        Capture(state)
    with pytest.raises(StateError, match=r"optim: .* add that optimizer to the state"):
        Capture({**state, "first": inner[0]})
    Capture({**state, "both": inner})
