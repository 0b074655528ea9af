"""Modules with their own loaders are restored through them. Modules with torch's loader stay strict."""

from __future__ import annotations

import copy
import logging
import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt
from ckpt.core.state.capture import Capture
from ckpt.errors import MismatchError
from inside import Saved
from toy_states import State, differences, freeze


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("count", torch.zeros(1))
        self.log: list[str] = []

    def grow(self, size: int = 3) -> None:
        self.seen = torch.cat([self.seen, torch.randn(size)])
        self.count += size


class InLoad(Grows):
    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.zeros_like(state[prefix + "seen"])
        super()._load_from_state_dict(state, prefix, *rest)


class InOwn(Grows):
    def load_state_dict(self, state: Any, *rest: Any, **more: Any) -> Any:
        self.seen = torch.zeros_like(state["seen"])
        return super().load_state_dict(state, *rest, **more)


class OfParent(nn.Module):
    """A module whose parent resizes and replaces its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"deep": Grows()})
        self.register_load_state_dict_pre_hook(self.resize)

    def grow(self) -> None:
        self.inner["deep"].grow()  # type: ignore[operator]

    def resize(self, module: Any, state: State, prefix: str, *rest: Any) -> None:
        self.inner["deep"].seen = torch.zeros_like(state[prefix + "inner.deep.seen"])


class FromNone(Grows):
    """A module whose buffer is None until it has a value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None)

    def grow(self, size: int = 3) -> None:
        super().grow(size)
        self.late = torch.randn(size)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("seen", "late"):
            if prefix + name in state:
                self._buffers[name] = torch.zeros_like(state[prefix + name])
        super()._load_from_state_dict(state, prefix, *rest)


KINDS: dict[str, Callable[[], Any]] = {
    **{k.__name__: k for k in (InLoad, InOwn, OfParent, FromNone)},
    "compiled": lambda: torch.compile(InLoad()),
}


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_module_whose_loader_accepts_another_size_is_restored(kind: str, grown: bool) -> None:
    saved, fresh, last = KINDS[kind](), KINDS[kind](), KINDS[kind]()
    saved.grow()
    if grown:
        fresh.grow()
        fresh.grow()
    capture = Capture({"m": fresh})
    capture.read()
    Saved(Capture({"m": saved}).read()).restore({"m": fresh})
    assert differences(freeze(fresh), freeze(saved)) == []
    Saved(capture.read()).restore({"m": last})
    assert differences(freeze(last), freeze(saved)) == []


class Careful(Grows):
    """Its own loader accepts no other size."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.log.append(prefix)
        super()._load_from_state_dict(state, prefix, *rest)


def test_loader_that_accepts_no_other_size_is_an_error_by_name(caplog: pytest.LogCaptureFixture) -> None:
    saved = Careful()
    saved.grow()
    moment, fresh = Saved(Capture({"m": saved}).read()), Careful()
    with pytest.raises(MismatchError, match=r"m: the loader of Careful .*seen of shape \[3\]: (.|\n)*size mismatch"):
        moment.restore({"m": fresh})
    with caplog.at_level(logging.WARNING):
        moment.restore({"m": fresh}, strict=False)
    assert "seen of shape [3]" in caplog.text and fresh.seen.shape == (0,) and fresh.count == 3


def test_module_with_the_loader_of_torch_stays_strict() -> None:
    saved = Grows()
    saved.grow()
    moment, fresh = Saved(Capture({"m": saved}).read()), Grows()
    with pytest.raises(MismatchError, match=r"m\.seen has shape \[3\] in the checkpoint and \[0\] here"):
        moment.restore({"m": fresh})
    with pytest.raises(MismatchError, match=r"m\.1\.weight has shape"):  # next to one that has a loader
        Saved(Capture({"m": nn.Sequential(InLoad(), nn.Linear(2, 3))}).read()).restore(
            {"m": nn.Sequential(InLoad(), nn.Linear(2, 2))}
        )


class Parts(nn.Module):
    """A module whose loader appends to a ParameterList and a ModuleList until all saved entries fit."""

    def __init__(self) -> None:
        super().__init__()
        self.ps, self.layers = nn.ParameterList(), nn.ModuleList()

    def grow(self) -> None:
        self.ps.append(nn.Parameter(torch.randn(3)))
        self.layers.append(nn.Linear(2, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        while f"{prefix}ps.{len(self.ps)}" in state:
            self.grow()
        super()._load_from_state_dict(state, prefix, *rest)


class Renamed(nn.Module):
    """A module that was saved as q, k and v, with another submodule name and without one buffer."""

    def __init__(self, now: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        if now:
            self.qkv, self.proj = nn.Linear(4, 12), nn.Linear(4, 4)
            self.register_buffer("count", torch.tensor(7))
            self.register_load_state_dict_pre_hook(fuse)
        else:
            self.q, self.k, self.v, self.fc = (nn.Linear(4, 4) for _ in range(4))


def fuse(module: Any, state: State, prefix: str, *rest: Any) -> None:
    if f"{prefix}q.weight" in state:
        for kind in ("weight", "bias"):
            state[f"{prefix}qkv.{kind}"] = torch.cat([state.pop(f"{prefix}{one}.{kind}") for one in "qkv"])
            state[f"{prefix}proj.{kind}"] = state.pop(f"{prefix}fc.{kind}")
        state[f"{prefix}count"] = torch.tensor(0)


class Listed(nn.Module):
    """A module whose state_dict() has a list of tensors, as for metrics, unless it is empty."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.seen = [torch.randn(i) for i in range(size)]

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        if self.seen:
            state[prefix + "seen"] = list(self.seen)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = state.pop(prefix + "seen", [])
        super()._load_from_state_dict(state, prefix, *rest)


class Forgiving(nn.Module):
    """Its loader accepts a missing second layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        self.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())


class OtherName(nn.Module):
    """A module that was saved as `old`. Hooks that retain entries use that name."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.new, pairs = nn.Linear(2, 2), [("old.", "new.")]

        def rename(state: State, prefix: str, names: Any) -> None:
            for key in list(state):
                for before, after in names:
                    if key.startswith(prefix + before):
                        state[prefix + after + key.removeprefix(prefix + before)] = state.pop(key)

        self.rename = rename
        if hook == "self":
            self._register_load_state_dict_pre_hook(lambda state, prefix, *rest: self.rename(state, prefix, pairs))
        elif hook == "weak":
            this = weakref.ref(self)
            self._register_load_state_dict_pre_hook(lambda state, prefix, *rest: this().rename(state, prefix, pairs))
        elif hook == "lock":
            lock = threading.Lock()
            self._register_load_state_dict_pre_hook(lambda state, *rest: lock.locked() or rename(state, "", pairs))


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Linear(2, 2)


class Lenient(nn.Module):
    """Load entries that fit, and return the others."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.add_module(name, nn.Linear(2, 2))

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False)


@pytest.mark.parametrize(("hook", "reason"), [("weak", "weak references"), ("lock", "cannot pickle '_thread.lock'")])
def test_loader_that_cannot_be_tried_is_refused_with_the_reason(hook: str, reason: str) -> None:
    saved, fresh = {"m": Old()}, {"m": OtherName(hook)}
    before = freeze(fresh)
    with pytest.raises(MismatchError, match=rf"m: its loader cannot be tried on a copy of the module: .*{reason}"):
        Saved(Capture(saved).read()).restore(fresh)
    assert differences(freeze(fresh), before) == []


def test_keys_that_a_lenient_loader_leaves_out_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    saved, fresh = {"m": Lenient("before")}, {"m": Lenient("after")}
    kept = freeze(fresh["m"].after)
    with caplog.at_level(logging.WARNING, "ckpt"):
        Saved(Capture(saved).read()).restore(fresh)
    assert differences(freeze(fresh["m"].lin), freeze(saved["m"].lin)) == []
    assert differences(freeze(fresh["m"].after), kept) == []
    assert re.search(r"m: .*not in the checkpoint: after\.weight, after\.bias", caplog.text)
    assert re.search(r"m: .*not in the module: before\.weight, before\.bias", caplog.text)


def parts(size: int, kind: type[Parts] = Parts) -> nn.Module:
    found = kind()
    for _ in range(size):
        found.grow()
    return found


def weight_normed(function: Any) -> nn.Module:
    return function(nn.Linear(4, 3))  # type: ignore[no-any-return]


ACCEPTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "more children": (lambda: parts(3), lambda: parts(1)),
    "other names": (lambda: Renamed(False), lambda: Renamed(True)),
    "weight_norm": (
        lambda: weight_normed(nn.utils.weight_norm),
        lambda: weight_normed(nn.utils.parametrizations.weight_norm),
    ),
    "hook keeps the module": (Old, partial(OtherName, "self")),
    "missing": (lambda: Forgiving(1), lambda: Forgiving(2)),
    "longer list": (lambda: Listed(4), lambda: Listed(2)),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.filterwarnings("ignore")
def test_module_is_restored_if_its_loader_accepts_other_names(kind: str, nested: bool) -> None:
    """The result equals that of load_state_dict(), neighbours included. Then it is saved and restored again."""
    saved, fresh, twin, last = (
        {"m": nn.Sequential(nn.Linear(2, 2), make()) if nested else make()}
        for make in (ACCEPTED[kind][0], *[ACCEPTED[kind][1]] * 3)
    )
    twin["m"].load_state_dict(copy.deepcopy(saved["m"].state_dict()))
    if kind == "missing":  # missing entries stay unchanged
        twin["m"].load_state_dict(fresh["m"].state_dict() | saved["m"].state_dict())
    capture = Capture(fresh)
    capture.read()
    Saved(Capture(saved).read()).restore(fresh)
    assert differences(freeze(fresh["m"]), freeze(twin["m"])) == []
    Saved(capture.read()).restore(last)
    assert differences(freeze(last["m"]), freeze(twin["m"])) == []


class Logs(Parts):
    """Record loaded names in its own list and in that of a hook. It accepts no more children."""

    def __init__(self) -> None:
        super().__init__()
        self.log = log = list[str]()
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: log.append(prefix))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.log.append(prefix)
        self.ps.requires_grad_(False)
        nn.Module._load_from_state_dict(self, state, prefix, *rest)


class Silent(Parts):
    """A module whose loader does not return missing keys."""

    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        nn.Module.load_state_dict(self, state, strict=False)

    def _load_from_state_dict(self, *rest: Any) -> None:
        nn.Module._load_from_state_dict(self, *rest)


@pytest.mark.parametrize("kind", [Logs, Silent])
def test_module_is_unchanged_if_its_loader_refuses_other_names(kind: type[Parts]) -> None:
    saved, fresh = parts(2, kind), parts(1, kind)
    before = freeze(fresh)
    with pytest.raises(MismatchError, match=r"m\.layers\.1\.bias is in the checkpoint, but not in m\n"):
        Saved(Capture({"m": saved}).read()).restore({"m": fresh})
    assert differences(freeze(fresh), before) == [] and vars(fresh).get("log", []) == []
    assert all(parameter.requires_grad for parameter in fresh.parameters())


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lin(x)) * self.scale  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
def test_script_modules_are_trained_saved_and_restored(tmp_path: Path) -> None:
    """One was loaded from a file."""

    def build() -> tuple[nn.Module, State]:
        torch.manual_seed(0)
        torch.jit.save(torch.jit.script(Scripted()), tmp_path / "x.pt")
        found = nn.Sequential(torch.jit.load(tmp_path / "x.pt"), torch.jit.script(Scripted()), nn.Linear(2, 2))
        return found, {"m": found, "optim": torch.optim.Adam(found.parameters(), lr=0.1)}

    module, state = build()
    capture = Capture(state)
    for _ in range(3):
        module(torch.randn(4, 2)).sum().backward()
        state["optim"].step()
        reading = capture.read()
    assert capture.read().layout is reading.layout
    fresh, twin = build()
    Saved(capture.read()).restore(twin)
    assert differences(freeze(fresh), freeze(module)) == []
    assert differences(freeze(twin["optim"]), freeze(state["optim"])) == []
    names = {spec.name for spec in reading.layout.tensors if spec.name.startswith("m.")}
    assert names == {f"m.{name}" for name in module.state_dict()}


ODD = "a\ud800b"
WITH_SURROGATES: dict[str, Callable[[float], State]] = {
    "tensor": lambda x: {"a": {ODD: torch.full((2,), x), "é": x}},
    "module in a module": lambda x: {"m": nn.ModuleDict({ODD: filled(x)})},
    "optimizer": lambda x: stepped(filled(x)),
}


def filled(x: float) -> nn.Module:
    found = nn.Linear(2, 2)
    nn.init.constant_(found.weight, x)
    return found


def stepped(module: nn.Module) -> State:
    optim = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optim.step()
    return {ODD: module, "optim": optim}


def test_run_with_surrogates_in_keys_can_be_read(tmp_path: Path) -> None:
    state, twin = ({str(i): make(x) for i, make in enumerate(WITH_SURROGATES.values())} for x in (1.5, 2.5))
    with ckpt.Checkpointer(state, tmp_path / "run", every=1) as cp:
        cp.step(1)
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        cp.restore()
    assert differences(freeze(twin), freeze(state)) == []
    for name in ckpt.load(tmp_path / "run"):
        name.encode()


class Pretrained(nn.Linear):
    """Its own load_state_dict() is for files of pretrained weights. A second one resets the bias after it."""

    fails = True

    def load_state_dict(self, state: Any, *rest: Any, **more: Any) -> Any:
        found = super().load_state_dict(state["model"] if self.fails else state, *rest, **more)
        nn.init.zeros_(self.bias)
        return found


class ResetsWithEntry(Pretrained):
    """A hook adds an entry to the state_dict(), so this is called at every save."""

    fails = False

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen = 0
        self._register_state_dict_hook(lambda m, state, prefix, _: state.update({prefix + "seen": m.seen}))
        self._register_load_state_dict_pre_hook(
            lambda state, prefix, *_: setattr(self, "seen", state.pop(prefix + "seen"))
        )


@pytest.mark.parametrize("kind", [Pretrained, ResetsWithEntry])
def test_restore_calls_no_load_state_dict_of_an_inner_module(kind: type[Pretrained], tmp_path: Path) -> None:
    """torch's own load_state_dict() of the outer module does not call it either, but runs its hooks."""
    net, twin, other = (nn.Sequential(kind(4, 4), nn.Linear(4, 1)) for _ in range(3))
    net[0].seen = 5  # type: ignore[assignment]
    with ckpt.Checkpointer({"net": net}, tmp_path / "run") as cp:
        cp.step(1)
    with ckpt.Checkpointer({"net": twin}, tmp_path / "run") as cp:
        cp.restore()
    ckpt.load(tmp_path / "run", into={"net": other})
    for one in (twin, other):
        assert all(map(torch.equal, one.parameters(), net.parameters()))
        assert not isinstance(one[0], ResetsWithEntry) or one[0].seen == 5


class Halved(nn.Linear):
    """Its state_dict() is in half precision, for small files, and its loader casts back."""

    def state_dict(self, *rest: Any, **more: Any) -> Any:
        found = super().state_dict(*rest, **more)
        found.update({name: tensor.half() for name, tensor in found.items()})
        return found

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        found = super().load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict)
        self.norm = self.weight.norm().item()
        return found


class GrowsInHalf(InOwn):
    """Rounds the weights of `lin` in its state_dict(), and resizes a buffer in its loader."""

    norm = 1.0

    def state_dict(self, *rest: Any, **more: Any) -> Any:
        found = super().state_dict(*rest, **more)
        found.update({name: tensor.half() for name, tensor in found.items() if name.startswith("lin.")})
        return found


@pytest.mark.parametrize(
    "make",
    [
        partial(Halved, 4, 4),
        GrowsInHalf,
    ],
)
def test_loader_does_not_change_restored_tensors(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Their bytes are as they were saved, and what the loader derives from them elsewhere stays."""
    net, twin, other = make(), make(), make()
    if isinstance(net, GrowsInHalf):
        net.grow()
    with ckpt.Checkpointer({"net": net}, tmp_path / "run") as cp:
        cp.step(1)
    with ckpt.Checkpointer({"net": twin}, tmp_path / "run") as cp:
        cp.restore()
    ckpt.load(tmp_path / "run", into={"net": other})
    for one in (twin, other):
        assert all(map(torch.equal, (*one.parameters(), *one.buffers()), (*net.parameters(), *net.buffers())))
        assert any(hasattr(inner, "norm") for inner in one.modules())
