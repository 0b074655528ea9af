"""Tests of capturing a state and restoring it into a differently built twin: every bit, alias and type.

`freeze` and `differences` are the oracle here and in the tests of staging and restoring. They are independent of the
library: they query modules and optimizers directly, and compare bytes.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ckpt
from ckpt.core.state import nodes
from ckpt.core.state.capture import Capture
from ckpt.core.state.tensors import DTYPE_NAME
from ckpt.errors import StateError
from inside import Saved
from toy_states import Loader, State, differences, freeze, raw

# -- the oracle --


def check_twin(state: State, twin: State) -> None:
    """Check that a restore of `state` makes `twin`, which differs before, equal in every bit."""
    wanted = freeze(state)
    saved = Saved(Capture(state).read())
    assert differences(freeze(twin), wanted), "the twin must differ, or the test proves nothing"
    saved.restore(twin)
    assert differences(freeze(twin), wanted) == []
    assert differences(freeze(state), wanted) == []


def backward(module: nn.Module, *shape: int) -> None:
    x = torch.randn(*shape)
    y = module(x)
    y.pow(2).mean().backward()


# -- tensors --


def test_conjugated_and_negated_views_restore_exactly() -> None:
    """Lazy conj and neg bits are part of the value, in the source and in the target."""
    lazy = torch.randn(3, dtype=torch.complex64).conj()
    state: State = {"conj": lazy, "neg": torch.randn(3, dtype=torch.complex64).conj().imag, "into": torch.randn(3)}
    twin: State = {
        "conj": torch.randn(3, dtype=torch.complex64),
        "neg": torch.randn(3),
        "into": torch.randn(3, dtype=torch.complex64).conj().imag,
    }
    assert state["conj"].is_conj() and state["neg"].is_neg() and twin["into"].is_neg()
    check_twin(state, twin)


class Subclass(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


REFUSED: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_unsupported_tensors_are_rejected_by_path(kind: str) -> None:
    """In a buffer, as a plain value, in a Stateful: the error names the path."""
    tensor = REFUSED[kind]()
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.register_buffer("bad", tensor)
    with pytest.raises(StateError, match=r"net\.inner\.bad: this tensor"):
        Capture({"net": module}).read()
    with pytest.raises(StateError, match=r"deep\.1\.x: this tensor"):
        Capture({"deep": [0, {"x": tensor}]}).read()
    with pytest.raises(StateError, match=r"loader\.x: this tensor"):
        Capture({"loader": Loader({"x": tensor})}).read()
    Capture({"deep": [0, {"x": torch.ones(3)}], "loader": Loader({"x": torch.ones(1, 3)})}).read()  # negative control


def test_lazy_module_is_rejected_until_initialized() -> None:
    """A parameter without a shape cannot be saved; after the first forward it can."""
    module = nn.LazyLinear(3)
    with pytest.raises(StateError, match=r"net\.weight: .*run the model once"):
        Capture({"net": module}).read()
    module(torch.ones(1, 2))
    assert Capture({"net": module}).read().layout.by_name["net.weight"].shape == (3, 2)


MUTABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "deque": (lambda: deque([1], 9), lambda it: it.append([2])),
    "list in a deque": (lambda: deque([[1]]), lambda it: it[0].append(2)),
    "set": (lambda: {1}, lambda it: it.add(2)),
    "bytearray": (lambda: bytearray(b"a"), lambda it: it.extend(b"b")),
    "ordered": (lambda: OrderedDict(a=1), lambda it: it.update(b=2)),
    "counter": (lambda: Counter("a"), lambda it: it.update("ab")),
    "list in a tuple": (lambda: (0, [1]), lambda it: it[1].append(2)),
}


@pytest.mark.parametrize("kind", MUTABLE)
def test_containers_of_every_kind_are_updated_in_place(kind: str) -> None:
    make, change = MUTABLE[kind]
    state, twin = {"p": {"x": make()}}, {"p": {"x": make()}}
    change(state["p"]["x"])
    change(twin["p"]["x"])
    change(twin["p"]["x"])
    live = twin["p"]["x"]
    Saved(Capture(state).read()).restore(twin)
    (found, before) = (twin["p"]["x"][1], live[1]) if type(live) is tuple else (twin["p"]["x"], live)
    assert found is before and twin == state
    if isinstance(live, deque) and isinstance(live[0], list):
        assert twin["p"]["x"][0] is live[0]


# -- modules --


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.randn(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.embed(x)))
        return found


def test_module_is_saved_like_its_state_dict() -> None:
    """Names match, tied weights are saved once, and non-persistent buffers are skipped. A tied twin stays tied."""
    state, twin = {"m": Tied()}, {"m": Tied()}
    layout = Capture(state).read().layout
    assert set(layout.by_name) | set(layout.aliases) == {f"m.{k}" for k in state["m"].state_dict()}
    assert layout.aliases == {"m.head.weight": "m.embed.weight"}
    check_twin(state, twin)
    assert twin["m"].head.weight is twin["m"].embed.weight


class CustomTied(Tied):
    """Has extra state of plain values, tensors and arrays."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__(tied)
        self.extra: Any = {"seen": 0, "array": np.arange(3), "tensor": torch.randn(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class OwnStateDict(nn.Module):
    """Stores its weight transposed under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "flipped"] = self.weight.detach().t().contiguous()

    def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[prefix + "flipped"].t())


def hooked() -> nn.Module:
    """Return a module with a hook that adds an entry on saving, and one that removes it on loading."""
    module = nn.Linear(2, 2)
    module._register_state_dict_hook(lambda m, state, prefix, meta: state.update({prefix + "extra": torch.ones(1)}))
    module._register_load_state_dict_pre_hook(lambda state, prefix, *_: state.pop(prefix + "extra"))
    return module


@pytest.mark.parametrize("kind", [CustomTied, OwnStateDict, hooked], ids=["extra", "own", "hooks"])
def test_modules_with_custom_state_restore_exactly(kind: Callable[[], nn.Module]) -> None:
    """Extra state and hook entries return through the module's own methods; a transposed weight is saved as stored."""
    state: State = {"m": nn.Sequential(kind())}
    if kind is CustomTied:
        state["m"][0].extra["seen"] = 7
    capture = Capture(state)
    capture.read()
    assert capture.nodes[0].kind == ("module" if kind is OwnStateDict else "custom module")
    check_twin(state, {"m": nn.Sequential(kind())})


def test_frozen_parameters_may_be_unfrozen() -> None:
    """Names of optimizer state do not depend on which parameters are frozen."""

    def build(frozen: bool) -> State:
        model = nn.Linear(3, 3)
        model.weight.requires_grad_(not frozen)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        backward(model, 2, 3)
        optim.step()
        return {"model": model, "optim": optim}

    check_twin(build(False), build(True))
    check_twin(build(True), build(False))


# -- optimizers --


def trained(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> Callable[[int], State]:
    def build(seed: int) -> State:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optim = make(model.parameters())
        x = torch.randn(3, 4)

        def closure() -> Tensor:
            optim.zero_grad()
            loss: Tensor = (model(x) - x).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(steps):
            optim.step(closure)
        return {"model": model, "optim": optim}

    return build


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "lbfgs_wolfe": lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_restore_exactly(name: str) -> None:
    """They restore into an optimizer with and without state, and two more steps give the same bits."""
    build, fresh = trained(OPTIMIZERS[name], 3), trained(OPTIMIZERS[name], 0)
    check_twin(build(0), build(1))
    check_twin(fresh(0), build(1))  # state that is not in the checkpoint is removed
    state, twin = build(0), fresh(1)
    check_twin(state, twin)
    for one in (state, twin):
        x = torch.ones(3, 4)
        for _ in range(2):

            def closure(one: State = one, x: Tensor = x) -> Tensor:
                one["optim"].zero_grad()
                loss: Tensor = one["model"](x).pow(2).mean()
                loss.backward()
                return loss

            one["optim"].step(closure)
    assert differences(freeze(twin), freeze(state)) == []


# -- everything else --


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_schedulers_restore_exactly(name: str) -> None:
    """A scheduler of PyTorch returns with its learning rate, and its next steps are the same."""

    def build(steps: int) -> State:
        torch.manual_seed(steps)
        p = nn.Parameter(torch.randn(2))
        optim = torch.optim.SGD([p], lr=0.3, momentum=0.9)
        sched = SCHEDULERS[name](optim)
        state: State = {"p": p, "optim": optim, "sched": sched}
        for _ in range(steps):
            move(state)
        return state

    def move(state: State) -> None:
        state["p"].grad = torch.ones(2)
        state["optim"].step()
        state["sched"].step(*([1.0] if name == "plateau" else []))

    state, twin = build(4), build(0)
    check_twin(state, twin)
    for _ in range(3):
        move(state)
        move(twin)
    assert differences(freeze(twin), freeze(state)) == []


def test_generators_scalers_and_loaders_restore() -> None:
    def build(seed: int) -> State:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + seed))
        return {
            "torch": torch.Generator().manual_seed(seed),
            "numpy": {"new": np.random.default_rng(seed), "mt": np.random.Generator(np.random.MT19937(seed))},
            "python": [random.Random(seed)],
            "rng": ckpt.RNG(),
            "scaler": scaler,
            "off": torch.amp.GradScaler("cpu", enabled=False),
            "loader": Loader({"at": seed, "order": np.arange(5) + seed, "buffer": [torch.ones(2) * seed]}),
        }

    def draw(state: State) -> list[Any]:
        new, mt = state["numpy"]["new"], state["numpy"]["mt"]
        return [
            torch.rand(3, generator=state["torch"]).tolist(),
            new.normal(size=3).tolist(),
            new.integers(9, size=3, dtype=np.uint32).tolist(),
            mt.random(3).tolist(),
            [state["python"][0].gauss(0, 1) for _ in range(3)],
            [random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist()],
            state["scaler"].get_scale(),
        ]

    state, twin = build(1), build(2)
    for one in (random.gauss(0, 1), state["python"][0].gauss(0, 1), np.random.normal()):
        assert one is not None  # leaves a second Gaussian number behind, which belongs to the state
    saved = Saved(Capture(state).read())
    loader = freeze(state["loader"])
    wanted = draw(state)
    assert draw(twin) != wanted
    saved.restore(twin)
    assert draw(twin) == wanted
    assert differences(freeze(twin["loader"]), loader) == []


def test_stateful_with_tensors_of_model_restores() -> None:
    """A Stateful that returns the model's own tensors does not count as untied weights."""

    class Wrapper:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def state_dict(self) -> Any:
            return dict(self.model.state_dict(keep_vars=True))

        def load_state_dict(self, state: Any) -> None:
            self.model.load_state_dict(state)

    def build() -> State:
        model = nn.Linear(3, 3)
        return {"model": model, "again": Wrapper(model)}

    check_twin(build(), build())


# -- names --


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)},
        {"a": {1: torch.ones(1), "1": torch.ones(2)}},
        {"__metadata__": torch.ones(1)},
        {"\ud800": torch.ones(1), "\\ud800": torch.ones(2)},
    ],
    ids=["dots", "int and str", "reserved", "escaped"],
)
def test_clashing_names_are_rejected(state: State) -> None:
    """Two tensors never get the same name, and none gets a name that files cannot have."""
    with pytest.raises(StateError, match="have this name"):
        Capture(state).read()


@pytest.mark.parametrize("state", [[nn.Linear(1, 1)], None, nn.Linear(1, 1), OrderedDict()], ids=lambda s: type(s))
def test_state_must_be_a_dict(state: Any) -> None:
    """Anything else is rejected with an example."""
    with pytest.raises(StateError, match="must be a dict"):
        Capture(state)


def test_state_containing_itself_is_rejected() -> None:
    """With and without objects inside."""
    ring: State = {"m": nn.Linear(1, 1)}
    ring["again"] = ring
    with pytest.raises(StateError, match="containing itself"):
        Capture(ring)
    plain: State = {}
    plain["again"] = plain
    with pytest.raises(StateError, match="containing itself"):
        Capture(plain).read()


# -- the fast path --


def everything() -> State:
    """Return modules, optimizers with state, and everything that is captured again each time."""
    torch.manual_seed(0)
    model = Tied()
    optim = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1, 2, 3])).sum().backward()
    optim.step()
    return {
        "model": model,
        "optim": optim,
        "custom": CustomTied(),
        "loose": {"t": torch.ones(3), "a": np.zeros(4), "n": 1},
        "rng": ckpt.RNG(),
        "loader": Loader({"x": torch.ones(2)}),
        "heads": [nn.Linear(2, 2), {"deep": nn.Linear(2, 2)}],
    }


def replace_parameter(state: State) -> None:
    state["model"].body[0].weight = nn.Parameter(torch.ones(4, 4) * 7)
    state["optim"].param_groups[0]["params"] = list(state["model"].parameters())
    state["optim"].state.clear()


def add_group(state: State) -> None:
    state["optim"].add_param_group({"params": list(state["heads"][0].parameters())})


def set_data(state: State, value: Tensor) -> None:
    state["model"].body[0].weight.data = value


def untie(state: State) -> None:
    state["model"].head.weight = nn.Parameter(state["model"].embed.weight.detach().clone())
    state["optim"].add_param_group({"params": [state["model"].head.weight]})


def exchange_states(state: State) -> None:
    """Swap the moments of two parameters."""
    first, second = list(state["optim"].state)[:2]
    mine = state["optim"].state[first]
    state["optim"].state[first] = state["optim"].state[second]
    state["optim"].state[second] = mine


def renew_states(state: State) -> None:
    """Replace the dicts by new ones with more entries."""
    kept = state["optim"].state
    kept.update({param: {**held, "late": torch.ones(1)} for param, held in kept.items()})


def reorder_states(state: State) -> None:
    """Change only the order of entries."""
    first = next(iter(state["optim"].state))
    state["optim"].state[first] = state["optim"].state.pop(first)


def moment(state: State) -> Tensor:
    """Return a square moment of Adam."""
    found = state["optim"].state[state["model"].body[0].weight]["exp_avg"]
    assert isinstance(found, Tensor) and found.shape == (4, 4)
    return found


CHANGES: dict[str, Callable[[State], Any]] = {
    "parameter replaced": replace_parameter,
    "group added": add_group,
    "weights untied": untie,
    "buffer replaced": lambda s: setattr(s["model"].body[1], "running_mean", torch.ones(4)),
    "module added": lambda s: s["model"].add_module("late", nn.Linear(2, 2)),
    "module replaced": lambda s: s["model"].body.__setitem__(1, nn.BatchNorm1d(4)),
    "whole module replaced": lambda s: s.__setitem__("heads", [nn.Linear(3, 3), s["heads"][1]]),
    "stateful replaced": lambda s: s.__setitem__("loader", Loader({"y": torch.ones(5)})),
    "entry added": lambda s: s.__setitem__("late", torch.ones(2)),
    "entry removed": lambda s: s.pop("loose"),
    "data swapped": lambda s: set_data(s, torch.ones(4, 4) * 3),
    "data reshaped in place": lambda s: set_data(s, s["model"].body[0].weight.data.view(2, 8)),
    "data transposed in place": lambda s: set_data(s, s["model"].body[0].weight.data.t()),
    "data swapped and freed": lambda s: (set_data(s, torch.empty(0)), set_data(s, torch.ones(2, 8))),
    "moment transposed in place": lambda s: moment(s).t_(),
    "moment set within its storage": lambda s: moment(s).set_(moment(s).untyped_storage(), 0, (2, 2), (1, 2)),
    "moment negated by its view": lambda s: setattr(moment(s), "data", torch._neg_view(moment(s).data)),
    "optimizer state replaced": lambda s: next(iter(s["optim"].state.values())).update(step=torch.tensor(9.0)),
    "optimizer states exchanged": exchange_states,
    "optimizer states in another order": reorder_states,
    "optimizer state of another dict": renew_states,
    "optimizer state cleared": lambda s: s["optim"].state.clear(),
    "optimizer state loaded": lambda s: s["optim"].load_state_dict(copy.deepcopy(s["optim"].state_dict())),
    "loose shape": lambda s: s["loose"].update(t=torch.ones(4)),
    "loose alias": lambda s: s["loose"].update(t2=s["loose"]["t"]),
    "loader": lambda s: s["loader"].state.update(y=torch.ones(1)),
    "custom module": lambda s: s["custom"].extra.update(tensor=torch.ones(9)),
}  # fmt: skip


ANOTHER = ("weights untied", "loose shape", "loose alias", "data reshaped in place", "group added")


@pytest.mark.parametrize("change", CHANGES)
def test_every_structural_change_is_detected(change: str) -> None:
    """After a change, an updated capture equals a new one in names and bits.
    A different layout has a different digest, which distinguishes their snapshots."""
    state = everything()
    capture = Capture(state)
    before = capture.read().layout
    CHANGES[change](state)
    kept, fresh = capture.read(), Capture(state).read()
    assert kept.layout == fresh.layout and kept.guarded == fresh.guarded
    assert (kept.layout.digest == before.digest) is (kept.layout == before)
    assert kept.layout != before or change not in ANOTHER
    assert [raw(t) for t in kept.tensors] == [raw(t) for t in fresh.tensors]
    for spec, tensor in zip(kept.layout.tensors, kept.tensors, strict=True):
        assert (spec.shape, spec.dtype) == (tuple(tensor.shape), DTYPE_NAME[tensor.dtype])
    assert kept.values == fresh.values
    assert capture.read().layout is kept.layout


@pytest.mark.parametrize("change", [name for name in CHANGES if name.startswith(("moment", "data"))])
def test_forms_are_compared_without_torch_guards(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's guards are private and may disappear; they only save time."""
    assert nodes.guards([torch.ones(2)]) is not None, "this torch must have them"
    monkeypatch.setattr(nodes, "guards", lambda tensors: None)
    test_every_structural_change_is_detected(change)


@pytest.mark.parametrize("number", [255, 256])
def test_one_change_among_many_tensors_is_detected(number: int) -> None:
    """Tensors are checked in batches; the memory and form of each one count."""
    params = [nn.Parameter(torch.randn(2, 2)) for _ in range(600)]
    capture = Capture({"model": nn.ParameterList(params)})
    before = capture.read().layout
    assert capture.read().layout is before
    params[number].data = params[number].data.t()
    transposed = capture.read()
    where = next(i for i, t in enumerate(before.tensors) if t.name == f"model.{number}")
    assert raw(transposed.tensors[where]) == raw(params[number])
    params[number].data = torch.ones(2, 2)
    assert raw(capture.read().tensors[where]) == raw(torch.ones(2, 2))


def test_conjugate_view_is_another_tensor() -> None:
    """Equal memory, shape and strides with other values: both are saved and restored, also into one memory."""
    x = torch.randn(3, dtype=torch.complex64)
    state: State = {"a": x, "b": x.conj(), "c": x.imag.clone(), "d": [x.imag, x.conj().imag]}
    y = torch.zeros(3, dtype=torch.complex64)
    twin: State = {"a": y, "b": y.conj(), "c": torch.zeros(3), "d": [y.imag, y.conj().imag]}
    Saved(Capture(state).read()).restore(twin)
    assert differences(freeze(twin), freeze(state)) == []
    buffer = nn.Module()
    buffer.register_buffer("w", x.clone())
    capture = Capture({"m": buffer})
    capture.read()
    buffer.w.data = buffer.w.data.conj()
    assert [raw(t) for t in capture.read().tensors] == [raw(t) for t in Capture({"m": buffer}).read().tensors]


def test_only_optimizer_owned_tensors_are_guarded() -> None:
    """Guarded: stepped parameters, optimizer state. Eager: buffers, loose tensors, others' and frozen parameters."""
    state = everything()
    reading = Capture(state).read()
    late = {s.name for s, guarded in zip(reading.layout.tensors, reading.guarded, strict=True) if guarded}
    assert {"model.embed.weight", "model.body.0.weight", "optim.state.model.embed.weight.exp_avg"} <= late
    assert not {"model.body.1.running_mean", "loose.t", "loader.x", "heads.0.weight", "custom.embed.weight"} & late
    state["heads"][0].requires_grad_(False)
    reading = Capture(state).read()
    assert not reading.guarded[[s.name for s in reading.layout.tensors].index("heads.0.weight")]
