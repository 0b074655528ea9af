"""Arguments of users: few, and validated before anything is created."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CheckpointError, InvalidArgumentError


@pytest.mark.parametrize("kind", [ckpt.Checkpointer, ckpt.Tier, ckpt.Memory, ckpt.Options])
def test_constructor_has_at_most_nine_arguments(kind: Any) -> None:
    assert len(inspect.signature(kind).parameters) <= 9


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("name", ""), ("name", 3), ("on_busy", "never"), ("on_error", None), ("busy_timeout_s", -1),
        ("close_timeout_s", float("nan")), ("agree_timeout_s", True), ("on_fault", "page me"), ("metrics", "9400"),
        ("metrics", 0),
    ],
)  # fmt: skip
def test_options_reject_wrong_values(name: str, wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name if name != "metrics" else "metrics|prometheus_port"):
        ckpt.Options(**{name: wrong})
    ckpt.Options(**{name: getattr(ckpt.Options(), name)})


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0}, {"keep": 0}, {"every": "now and then"}, {"memory": True}, {"best": "loss"}, {"triggers": "none"},
        {"options": {"on_error": "warn"}}, {"tiers": [ckpt.Memory()]}, {"tiers": []}, {"tiers": 5},
    ],
)  # fmt: skip
def test_wrong_arguments_create_nothing(wrong: dict[str, Any], tmp_path: Path) -> None:
    """The error is a CheckpointError and a ValueError. Negative control: valid arguments create a run."""
    place = tmp_path / "run"
    with pytest.raises(InvalidArgumentError) as raised:
        ckpt.Checkpointer({"w": torch.zeros(3)}, **{"tiers": place, **wrong})
    assert isinstance(raised.value, CheckpointError) and isinstance(raised.value, ValueError)
    assert list(tmp_path.iterdir()) == []
    with ckpt.Checkpointer({"w": torch.zeros(3)}, place):
        assert place.exists()


def test_step_0_explains_what_the_argument_means(run_dir: str) -> None:
    with ckpt.Checkpointer({"w": torch.zeros(3)}, run_dir) as cp:
        for default in (0, None):
            cp.restore(default=default)
            with pytest.raises(InvalidArgumentError, match=r"number of completed steps.*step\(step \+ 1\)"):
                cp.step(0)
        cp.step(1)
