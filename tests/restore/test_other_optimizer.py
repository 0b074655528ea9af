"""Optimizers, layers and dtypes that differ from the saved ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt

SGD, ADAMW = (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)), (lambda p: torch.optim.AdamW(p, lr=0.2))


def built(make: Any, names: str = "ab") -> dict[str, Any]:
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
    return {"model": model, "optim": make(model.parameters())}


def trained(state: dict[str, Any]) -> dict[str, Any]:
    sum(layer(torch.ones(1, 3)).sum() for layer in state["model"].values()).backward()
    state["optim"].step()
    return state


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("saved", "here", "word"), [(ADAMW, SGD, "betas, .*eps"), (SGD, ADAMW, "dampening, momentum")])
def test_other_optimizer_kind_is_refused_or_starts_fresh(
    saved: Any, here: Any, word: str, steps: int, tmp_path: Path
) -> None:
    """The strict error names settings of both kinds. Otherwise weights are restored, and the script's optimizer stays.

    The same holds before the first step, when neither has a state."""
    state, twin = built(saved), built(here)
    for _ in range(steps):
        trained(state)
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        cp.save(1).wait_durable()
    settings = [{k: v for k, v in group.items() if k != "params"} for group in twin["optim"].param_groups]
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        with pytest.raises(ckpt.errors.MismatchError, match=f"another kind: the checkpoint has the settings .*{word}"):
            cp.restore()
        assert cp.restore(strict=False) == 1
        assert cp.last_restore is not None
        assert any(
            "optim starts without state, because it was saved by an opt" in line for line in cp.last_restore.left_out
        )
        assert torch.equal(twin["model"]["a"].weight, state["model"]["a"].weight) and not twin["optim"].state
        assert settings == [{k: v for k, v in g.items() if k != "params"} for g in twin["optim"].param_groups]
        trained(twin)


def test_settings_of_schedulers_and_torch_versions_are_accepted(tmp_path: Path) -> None:
    """Settings that a scheduler added, or that a newer torch defines, are accepted."""
    state, twin = trained(built(ADAMW)), built(ADAMW)
    torch.optim.lr_scheduler.OneCycleLR(state["optim"], max_lr=0.3, total_steps=9)
    del state["optim"].param_groups[0]["decoupled_weight_decay"]
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        cp.save(1).wait_durable()
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        assert cp.restore() == 1
    assert len(twin["optim"].state) == 4


def test_restore_reports_script_settings_without_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line names each setting of the script without effect, at every start. Changes of schedules are not listed.

    Adam continues from AdamW's state with AdamW's settings."""

    def start(make: Any, lr: float | None = None) -> tuple[list[str], dict[str, Any]]:
        caplog.clear()
        state = built(make)
        with ckpt.Checkpointer(state, tmp_path / "run") as cp:
            step = cp.restore(default=0, strict=False)
            if lr is not None:
                state["optim"].param_groups[0]["lr"] = lr
            state["new"] = torch.zeros(step)  # the state is walked through again
            cp.save(step + 1).wait_durable()
            said = [] if cp.last_restore is None else cp.last_restore.overridden
        assert len([line for line in caplog.messages if "not the script's" in line]) == len(said)
        assert all(line in caplog.text for line in said)
        return said, state["optim"].param_groups[0]

    changed = "optim: lr 0.1, not the script's 0.3; weight_decay 0.01, not the script's 0.5"
    assert start(ADAMW, lr=0.1)[0] == [] == start(ADAMW)[0]
    for _ in range(2):
        said, group = start(lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.5))
        assert said == [changed] and (group["lr"], group["weight_decay"]) == (0.1, 0.01)
    assert start(lambda p: torch.optim.AdamW(p, lr=0.3), lr=0.3)[0] == ["optim: lr 0.1, not the script's 0.3"]
    assert start(lambda p: torch.optim.AdamW(p, lr=0.3))[0] == []
    said, group = start(lambda p: torch.optim.Adam(p, lr=0.3, weight_decay=0.01))
    assert said == ["optim: decoupled_weight_decay True, not the script's False"] and group["decoupled_weight_decay"]


def test_restored_entries_are_not_reported_as_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Casts are reported as casts, with the number of parameters that continue and the source of settings."""
    state, twin = trained(built(ADAMW)), built(lambda p: torch.optim.AdamW(p, lr=0.5), "ac")
    twin["model"]["a"].bfloat16()
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        cp.save(1).wait_durable()
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        with pytest.raises(ckpt.errors.MismatchError, match=r"strict=False .*dtypes are converted"):
            cp.restore()
        assert cp.restore(strict=False) == 1
        assert cp.last_restore is not None
        left_out = cp.last_restore.left_out
    assert "strict=False cast tensors: 2 to BF16" in caplog.text
    assert not [line for line in left_out if "dtype" in line or "model.a" in line.partition(":")[0]]
    kept = "optim: restored the state of 2 parameters, 2 without state (model.c.bias, model.c.weight); its settings"
    assert kept in str(left_out)
    assert torch.equal(twin["model"]["a"].weight, state["model"]["a"].weight.bfloat16())
    assert twin["optim"].param_groups[0]["lr"] == 0.2 and len(twin["optim"].state) == 2
