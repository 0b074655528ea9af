"""Wrappers of torch add nothing to names. Modules that only resemble wrappers keep all their entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt.core.state.capture import Capture
from ckpt.core.state.sharding import replicated_by_ddp
from ckpt.errors import StateError
from inside import Saved
from toy_states import State, differences, freeze


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Two layers, tied weights, and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.layers[0].weight  # type: ignore[union-attr, assignment]


def names_of(state: State) -> set[str]:
    layout = Capture(state).read().layout
    return {*(spec.name for spec in layout.tensors), *layout.aliases}


def shuffled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape))
    return module


def inside(wrap: Callable[[Any], nn.Module]) -> Callable[[Net], nn.Module]:
    """Wrap one of the layers, not the whole model."""

    def wrapped(net: Net) -> nn.Module:
        net.layers[1] = wrap(net.layers[1])
        net.norm = wrap(net.norm)  # type: ignore[assignment]
        return net

    return wrapped


NESTINGS: dict[str, Callable[[Any], nn.Module]] = {
    "compiled": torch.compile,  # type: ignore[dict-item]
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
    "all": lambda m: checkpoint_wrapper(
        torch.compile(DistributedDataParallel(checkpoint_wrapper(torch.compile(m))))  # type: ignore[arg-type]
    ),
    "compiled fsdp": lambda m: torch.compile(fully_shard(m)),  # type: ignore[return-value]
    "fsdp of checkpointed": lambda m: fully_shard(checkpoint_wrapper(m)),
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("around", ["whole", "parts"])
@pytest.mark.usefixtures("one_rank")
def test_wrappers_add_nothing_to_names_in_any_nesting(nesting: str, around: str) -> None:
    """A run may use a different wrapper after a restart, or none."""
    wrap = NESTINGS[nesting] if around == "whole" else inside(NESTINGS[nesting])
    plain, wrapped = Net(), wrap(Net())
    assert names_of({"m": plain}) == names_of({"m": wrapped})
    if "fsdp" in nesting:
        return
    wanted = freeze(shuffled(plain))
    Saved(Capture({"m": plain}).read()).restore({"m": wrapped})
    again = Net()
    Saved(Capture({"m": wrapped}).read()).restore({"m": again})
    assert differences(freeze(again), wanted) == []


@pytest.mark.usefixtures("one_rank")
def test_module_is_recognised_in_its_wrappers() -> None:
    """The same module twice is refused, whatever its wrappers."""
    net = Net()
    with pytest.raises(StateError, match="b is the same object as a"):
        Capture({"a": net, "b": checkpoint_wrapper(DistributedDataParallel(torch.compile(net)))})  # type: ignore[arg-type]


class Adapter(nn.Module):
    """A module with attributes named like those of wrappers, and with weights next to them."""

    def __init__(self, attribute: str, beside: bool = True) -> None:
        super().__init__()
        self.add_module(attribute, nn.Linear(3, 3))
        if beside:
            self.gain = nn.Parameter(torch.ones(3))
            self.register_buffer("seen", torch.zeros(1))
            self.weight = nn.Parameter(torch.ones(2))


class Forwarding(nn.Module):
    """Forward missing attributes to a compiled model, as PEFT's and other wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = torch.compile(nn.Linear(3, 3))
        self.norm = nn.BatchNorm1d(3)
        self.prompt_encoder = nn.ModuleDict({"default": nn.Embedding(2, 3)})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "_orig_mod": lambda: Adapter("_orig_mod"),
    "module": lambda: Adapter("module"),
    "in another": lambda: nn.Sequential(Adapter("_orig_mod"), Adapter("_checkpoint_wrapped_module")),
    "compiled": lambda: torch.compile(Adapter("_orig_mod")),  # type: ignore[return-value]
    "forwarding, checkpointed": lambda: checkpoint_wrapper(Forwarding()),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_module_with_attributes_of_a_wrapper_is_saved_completely(kind: str) -> None:
    saved, fresh = shuffled(OTHERS[kind]()), OTHERS[kind]()
    Saved(Capture({"model": saved}).read()).restore({"model": fresh})
    assert differences(freeze(fresh), freeze(saved)) == []


class OwnWords(nn.Module):
    """A module with its own state_dict(), which contains a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.count = nn.Linear(2, 2), 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = self.count

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.count = state.pop(prefix + "count")
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("inner", [Net, OwnWords])
def test_tensors_of_a_wrapper_itself_are_saved(inner: Callable[[], nn.Module]) -> None:
    def wrapped() -> Any:
        found: Any = torch.compile(inner())
        found.register_buffer("average", torch.zeros(3))
        return found

    saved, fresh = shuffled(wrapped()), wrapped()
    Saved(Capture({"m": saved}).read()).restore({"m": fresh})
    assert differences(freeze(fresh), freeze(saved)) == []


def clash_in_a_wrapper() -> nn.Module:
    found: Any = torch.compile(nn.Linear(2, 2))
    found._buffers["weight"] = torch.zeros(3)
    return found  # type: ignore[no-any-return]


def clash_of_dots() -> nn.Module:
    found = nn.Sequential(nn.Linear(2, 2))
    found._parameters["0.weight"] = nn.Parameter(torch.zeros(1))
    return found


@pytest.mark.parametrize("kind", [clash_in_a_wrapper, clash_of_dots])
def test_two_tensors_of_one_name_are_refused(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(StateError, match=r"m\.(0\.)?weight: two tensors of the module get this name"):
        Capture({"m": kind()}).read()


@pytest.mark.usefixtures("one_rank")
def test_tensors_below_a_nested_ddp_are_replicated() -> None:
    """DDP may be nested in another module. Ignored tensors and tensors outside DDP belong to the rank."""
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net.layers, ["0.bias"])
    whole = nn.Sequential(DistributedDataParallel(net.layers), nn.Linear(2, 2), DistributedDataParallel(Norm()))
    found = replicated_by_ddp(whole)
    named = {name: t for name, t in (*whole.named_parameters(), *whole.named_buffers()) if id(t) in found}
    assert set(named) == {
        *("0.module.0.weight", "0.module.1.weight", "0.module.1.bias"),
        *(f"2.module.norm.{key}" for key in nn.BatchNorm1d(1).state_dict()),
    }
    assert [name for name, t in named.items() if found[id(t)].first_only] == [
        name for name, t in named.items() if not isinstance(t, nn.Parameter)
    ]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("has_state", [True, False])
def test_communication_hook_with_state_is_named_once(has_state: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A hook whose state is None or a process group has nothing to save, so no warning is logged."""
    module = DistributedDataParallel(Net())
    state, hook = (PowerSGDState(None), powerSGD_hook) if has_state else (dist.group.WORLD, allreduce_hook)
    module.register_comm_hook(state, hook)  # type: ignore[arg-type]
    for _ in range(2):
        Capture({"m": module}).read()
    warned = [one.getMessage() for one in caplog.records if "communication hook" in one.getMessage()]
    assert len(warned) == has_state and all("PowerSGDState" in text for text in warned)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]
