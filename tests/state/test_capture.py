"""Capture reads state in place: calls of modules and optimizers, and the values that it reads."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.core.state.capture import Capture
from test_promise_state import Fused, State


class Turned(nn.Module):
    """A module whose hook returns a transposed copy of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.register_state_dict_post_hook(turn)


def turn(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
    state[prefix + "turned"] = state.pop(prefix + "weight").detach().t().contiguous()


class Asked(nn.Linear):
    """Count the calls of state_dict()."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.asked = 0
        self.register_state_dict_pre_hook(self._note)

    def _note(self, *_: object) -> None:
        self.asked += 1


def test_capture_calls_a_module_once_and_reads_in_place(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks that only divide or transpose run once. Hooks that make copies give one warning."""
    state: State = {"net": nn.ModuleList([Fused(), Turned(), Turned(), Asked()])}
    capture = Capture(state)
    with caplog.at_level(logging.WARNING, "ckpt"):
        layouts = [capture.read().layout for _ in range(5)]
        Capture(state).read()
    assert set(layouts[0].by_name) == {"net.0.wqkv", "net.1.weight", "net.2.weight", "net.3.weight", "net.3.bias"}
    assert all(layout is layouts[0] for layout in layouts)
    assert state["net"][3].asked == 2  # once for each of two readings
    said = [r.getMessage() for r in caplog.records if "rearranges" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("net.1 and 1 more (Turned)")


def test_slices_of_saved_tensors_are_not_saved_again() -> None:
    """Parameters are views of one tensor of the state, with or without gradients. Views of another tensor are saved."""
    flat = torch.randn(12)
    slices = [nn.Parameter(flat[:8]), nn.Parameter(flat[8:])]
    state: State = {"masters": flat, "optim": torch.optim.SGD(slices, 0.1)}
    capture = Capture(state)
    assert set(capture.read().layout.by_name) == {"masters"}
    state["masters"] = flat.clone()
    assert {"optim.params.0.0", "optim.params.0.1"} <= set(capture.read().layout.by_name)
