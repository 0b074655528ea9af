"""One warning names optimizers that train the state and are not saved. Others give no false alarm."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import ckpt


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def back(net: nn.Module) -> None:
    net(torch.ones(1, 3)).sum().backward()


class Nothing:
    def step(self) -> None:
        pass


class Container(torch.optim.Optimizer):
    """Several optimizers in one, saved by its state_dict()."""

    def __init__(self, net: nn.Sequential) -> None:
        self.parts = {"a": torch.optim.AdamW(net[0].parameters()), "b": torch.optim.AdamW(net[1].parameters())}
        super().__init__(net.parameters(), {})

    def step(self, closure: Any = None) -> None:
        for one in self.parts.values():
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, one in self.parts.items():
            one.load_state_dict(state_dict[name])


class Holder:
    """An object other than a torch optimizer that saves its inner optimizer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.inner.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class Hidden(torch.optim.Optimizer):
    """An optimizer that holds another one in an object."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), {})
        self.holder = Holder(torch.optim.AdamW(net.parameters()))

    def step(self, closure: Any = None) -> None:
        self.holder.step()


class Around(torch.optim.Optimizer):
    """SAM: an optimizer around another, both in the state."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


def layer_wise(net: nn.Module) -> Any:
    """Create one optimizer for each parameter, stepped in hooks during the backward pass."""
    optimizers = {p: torch.optim.Adam([p]) for p in net.parameters()}
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())  # type: ignore[arg-type,return-value]
    return Nothing()


Making = Callable[[nn.Sequential], tuple[dict[str, Any], list[Any]]]  # further state, and the optimizers that step

FORGOTTEN: dict[str, tuple[Making, str]] = {
    "second": (
        lambda net: (
            {"opt": (one := torch.optim.AdamW(net[0].parameters()))},
            [one, torch.optim.SGD(net[1].parameters(), 0.1)],
        ),
        r"torch\.optim\.sgd\.SGD \(2 parameters, net\.1\.weight\) stepped",
    ),
    "layer-wise": (
        lambda net: ({}, [layer_wise(net)]),
        r"Adam \(1 parameter, net\.\d\.\w+\) and 3 more optimizers stepped",
    ),
    "of a scheduler": (
        lambda net: ({"sched": LinearLR(one := torch.optim.AdamW(net.parameters()))}, [one]),
        r"AdamW \(4 parameters, net\.0\.weight\) stepped",
    ),
    "in an object that an optimizer holds": (
        lambda net: ({"opt": (one := Hidden(net))}, [one]),
        r"AdamW \(4 parameters, net\.0\.weight\) stepped",
    ),
    "next to a container": (
        lambda net: ({"opt": (one := Container(net))}, [one, torch.optim.SGD([net[0].weight], 0.1)]),
        r"SGD \(1 parameter, net\.0\.weight\) stepped",
    ),
}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "stepped parameters" in record.getMessage()]


def trained(net: nn.Module, steppers: list[Any], cp: ckpt.Checkpointer, steps: int = 3) -> None:
    for step in range(steps):
        back(net)
        for one in steppers:
            one.step()
        cp.step(step + 1)


@pytest.fixture(autouse=True, scope="module")
def accelerator() -> Any:
    """Create the state that Accelerate's wrapper needs."""
    Accelerator(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("kind", FORGOTTEN)
def test_optimizer_outside_the_state_is_named_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning has its class, the number of its parameters and the name of one."""
    make, text = FORGOTTEN[kind]
    net = two_layers()
    more, steppers = make(net)
    with (
        caplog.at_level(logging.WARNING, "ckpt"),
        ckpt.Checkpointer({"net": net, **more}, ckpt.Tier(tmp_path / "run", every=2)) as cp,
    ):
        trained(net, steppers, cp)
    (found,) = warnings_of(caplog)
    assert re.search(text, found), found


SAVED: dict[str, Making] = {
    "inner of accelerate": lambda net: (
        {"opt": (one := torch.optim.AdamW(net.parameters()))},
        [AcceleratedOptimizer(one)],
    ),
    "container": lambda net: ({"opt": (one := Container(net))}, [one]),
    "holder of a wrapper": lambda net: (
        {"opt": (one := Holder(AcceleratedOptimizer(torch.optim.AdamW(net.parameters()))))},
        [one],
    ),
    "around": lambda net: ({"opt": (one := Around(net)), "base": one.base}, [one]),
    "of other parameters": lambda net: (
        {"opt": (one := torch.optim.AdamW(net.parameters()))},
        [one, torch.optim.AdamW([nn.Parameter(torch.ones(2))])],
    ),
}


@pytest.mark.parametrize("kind", SAVED)
def test_optimizer_that_is_saved_gives_no_warning(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wrappers, their contents, and optimizers of parameters outside the state give no warning either."""
    net = two_layers()
    more, steppers = SAVED[kind](net)
    with (
        caplog.at_level(logging.WARNING, "ckpt"),
        ckpt.Checkpointer({"net": net, **more}, ckpt.Tier(tmp_path / "run", every=2)) as cp,
    ):
        trained(net, steppers, cp)
    assert warnings_of(caplog) == []


def test_optimizer_that_another_checkpointer_saves_gives_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights and optimizer may belong to different runs. The warning follows the close of the other one."""
    net = two_layers()
    opt = torch.optim.AdamW(net.parameters())
    with caplog.at_level(logging.WARNING, "ckpt"), ckpt.Checkpointer({"net": net}, tmp_path / "a") as weights:
        with ckpt.Checkpointer({"net": net, "opt": opt}, tmp_path / "b") as both:
            back(net)
            opt.step()
            weights.step(1)
            both.step(1)
        assert warnings_of(caplog) == []
        other = torch.optim.AdamW(net.parameters())
        other.step()
        weights.step(2)
        assert len(warnings_of(caplog)) == 1
    other.step()
    assert len(warnings_of(caplog)) == 1
