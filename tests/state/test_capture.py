"""A state is read as it lies: what modules and optimizers are asked for, and what is read of them."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.core.state.capture import Capture
from ckpt.core.state.placement import comes_from_user
from test_promise_state import Container, Fused, State


class Turned(nn.Module):
    """Its hook says a copy of its weight, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.register_state_dict_post_hook(turn)


def turn(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
    state[prefix + "turned"] = state.pop(prefix + "weight").detach().t().contiguous()


class Forwarding(torch.optim.Optimizer):
    """A wrapper around one: its state is that one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


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


def test_a_wrapper_that_forwards_is_read_like_what_it_wraps() -> None:
    """State by parameter name, guarded as ever."""
    net = nn.Linear(2, 2)
    inner = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    inner.step()
    plain = Capture({"m": net, "o": inner}).read()
    wrapped = Capture({"m": net, "o": Forwarding(inner)}).read()
    assert wrapped.layout == plain.layout and wrapped.guarded == plain.guarded


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


def raised_in(file: str) -> Exception:
    """Return an error that code of this file has raised."""
    try:
        exec(compile("raise KeyError('lr')", file, "exec"))
    except KeyError as error:
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next)  # without the frame of this file
    raise AssertionError


SITE = os.path.dirname(os.path.dirname(torch.__file__))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (f"{SITE}/torchdata/stateful_dataloader.py", True),
        (f"{SITE}/torch/optim/adam.py", False),
        (f"{os.path.dirname(os.path.dirname(ckpt.__file__))}/ckpt_runs/train.py", True),
        (f"{os.path.dirname(ckpt.__file__)}/state/adapters.py", False),
        (f"{os.path.dirname(os.__file__)}/json/decoder.py", False),
        (f"{os.path.dirname(os.__file__)}/site-packages/lightning/trainer.py", True),
        (f"{os.path.dirname(os.__file__)}/dist-packages/lightning/trainer.py", True),
        ("numpy/random/_pcg64.pyx", False),
        ("<string>", True),
    ],
)
def test_error_comes_from_user_when_a_frame_is_of_another_package(file: str, expected: bool) -> None:
    """Names of packages may begin with the name of another one."""
    assert comes_from_user(raised_in(file)) == expected
