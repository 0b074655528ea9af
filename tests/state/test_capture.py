"""A state is read as it lies: what modules and optimizers are asked for, and what is read of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.core.state.capture import Capture
from test_promise_state import Container, Fused, State


class Turned(nn.Module):
    """Its hook says a copy of its weight, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.register_state_dict_post_hook(turn)


def turn(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
    state[prefix + "turned"] = state.pop(prefix + "weight").detach().t().contiguous()


class Asked(nn.Linear):
    """Counts how often it is asked for its state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.asked = 0
        self.register_state_dict_pre_hook(self._note)

    def _note(self, *_: object) -> None:
        self.asked += 1


def test_a_module_is_asked_once_and_read_as_it_lies(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks that only divide or turn are not run at every reading; where they make copies, that is said once."""
    state: State = {"net": nn.ModuleList([Fused(), Turned(), Turned(), Asked()])}
    capture = Capture(state)
    with caplog.at_level(logging.WARNING, "ckpt"):
        layouts = [capture.read().layout for _ in range(5)]
        Capture(state).read()
    assert set(layouts[0].by_name) == {"net.0.wqkv", "net.1.weight", "net.2.weight", "net.3.weight", "net.3.bias"}
    assert all(layout is layouts[0] for layout in layouts)
    assert state["net"][3].asked == 2  # by each of the two
    said = [r.getMessage() for r in caplog.records if "rearranges" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("net.1 and 1 more (Turned)")


def test_what_an_optimizer_keeps_and_cannot_be_saved_is_refused_by_name() -> None:
    """Rather than left out."""

    class Odd(Container):
        def state_dict(self) -> dict[str, Any]:
            return {"scaler": object()}

    with pytest.raises(ckpt.errors.StateError, match=r"optim\.scaler"):
        Capture({"optim": Odd([[nn.Parameter(torch.ones(2))]])}).read()


def test_slices_of_what_the_state_holds_are_not_saved_again() -> None:
    """Parameters that are views of one tensor of the state, with or without gradients; and once it is another tensor,
    they are."""
    flat = torch.randn(12)
    slices = [nn.Parameter(flat[:8]), nn.Parameter(flat[8:])]
    state: State = {"masters": flat, "optim": torch.optim.SGD(slices, 0.1)}
    capture = Capture(state)
    assert set(capture.read().layout.by_name) == {"masters"}
    state["masters"] = flat.clone()
    assert {"optim.params.0.0", "optim.params.0.1"} <= set(capture.read().layout.by_name)
