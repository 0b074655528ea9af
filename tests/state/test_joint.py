"""Optimizers of several parts of a model, saved as one optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.core.state.capture import Capture
from ckpt.core.state.optimizer_node import Joint

LAYERS = 4


class Job:
    """A model whose layers are divided among several optimizers with parameter names."""

    def __init__(self, parts: int, rate: float = 0.1, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))
        named, each = list(self.model.named_parameters()), 2 * LAYERS // parts
        self.optims = [torch.optim.AdamW(named[at : at + each], lr=rate) for at in range(0, len(named), each)]
        self.optim = self.optims[0] if parts == 1 else Joint(self.optims)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}

    def step(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        for one in self.optims:
            one.step()
            one.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for name, param in self.model.named_parameters():
            home = next(one for one in self.optims if param in one.state)
            found |= {f"{name} {key}": value for key, value in home.state[param].items()}
        return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize(("saved", "restored"), [(2, 1), (1, 2), (2, 4), (2, 2)])
def test_joint_optimizers_restore_into_any_number_of_optimizers(run_dir: str, saved: int, restored: int) -> None:
    """Weights, moments and settings are restored bit for bit, and each optimizer keeps its parameter names.

    Both continue with equal numbers, and steps of the new one are saved too."""
    first, other = Job(saved), Job(restored, rate=0.5, seed=1)
    with ckpt.Checkpointer(first.state, run_dir, every=1) as cp:
        cp.restore(default=0)
        for step in (1, 2):
            first.step()
            cp.step(step)
    names = [one.param_groups[0]["param_names"] for one in other.optims]
    with ckpt.Checkpointer(other.state, run_dir, every=1) as cp:
        assert cp.restore() == 2
        assert [one.param_groups[0]["lr"] for one in other.optims] == [0.1] * restored
        assert [one.param_groups[0]["param_names"] for one in other.optims] == names
        equal(first.tensors(), other.tensors())
        for job in (first, other):
            job.step()
        cp.step(3)
    equal(first.tensors(), other.tensors())
    again = Job(saved, seed=2)
    with ckpt.Checkpointer(again.state, run_dir) as cp:
        assert cp.restore() == 3
    equal(first.tensors(), again.tensors())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_copy_overlaps_training_only_if_all_optimizers_announce_steps() -> None:
    """An optimizer that steps without a hook, as in a graph replay, would tear the copy."""
    job = Job(2)
    job.step()
    capture = Capture(job.state)
    for announced, may in (([], False), (job.optims[:1], False), (job.optims, True), ([job.optim], True)):
        capture.trust(announced)
        assert set(capture.read().guarded) == {may}, announced


def test_joint_refuses_optimizers_with_different_groups() -> None:
    """Unmatched groups would have no name in other divisions."""
    first, other = nn.Linear(2, 2), nn.Linear(2, 2)
    more = torch.optim.SGD([{"params": [other.weight]}, {"params": [other.bias], "lr": 1.0}], lr=0.1)
    with pytest.raises(ValueError, match="numbers of groups"):
        Joint([torch.optim.SGD(first.parameters(), lr=0.1), more])
