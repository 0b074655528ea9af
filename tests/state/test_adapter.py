"""The port for kinds of state that the core does not support, and state that needs no adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt.core.format.values import Path
from ckpt.core.state import wrappers
from ckpt.core.state.capture import Capture
from ckpt.core.state.nodes import StatefulNode
from ckpt.errors import StateError
from inside import Saved
from toy_states import State, differences, freeze
from wrapped_toy import Quantised


def trained(seed: int) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).square().mean().backward()
    optim.step()
    return {"model": model, "optim": optim, "losses": [float(seed)]}


@pytest.fixture
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "objects", [])
    monkeypatch.setattr(wrappers, "tensors", [])


def test_core_alone_restores_ordinary_state(core_alone: None) -> None:
    """Negative control: a tensor that is made of others needs an adapter."""
    state, twin = trained(1), trained(2)
    assert differences(freeze(twin), freeze(state))
    Saved(Capture(state).read()).restore(twin)
    assert differences(freeze(twin), freeze(state)) == []
    with pytest.raises(StateError, match="a tensor subclass with its own kind of storage"):
        Capture({"mine": [Quantised.of(torch.ones(4))]}).read()


class Bare:
    """An object without access to its state."""

    def __init__(self, value: int) -> None:
        self.value = value


class BareState:
    def __init__(self, bare: Bare) -> None:
        self._bare = bare

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._bare.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bare.value = state["value"]


class BareNode(StatefulNode):
    def __init__(self, path: Path, bare: Bare) -> None:
        super().__init__(path, BareState(bare))

    @staticmethod
    def owns(value: object) -> bool:
        return isinstance(value, Bare)


def test_object_is_restored_by_the_adapter_that_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects in lists are restored too. Negative control: without the adapter they cannot be saved."""
    state, twin = {"bare": [Bare(3)]}, {"bare": [Bare(0)]}
    with pytest.raises(StateError, match="Bare"):
        Capture(state).read()
    monkeypatch.setattr(wrappers, "objects", [*wrappers.objects, BareNode])
    Saved(Capture(state).read()).restore(twin)
    assert twin["bare"][0].value == 3
