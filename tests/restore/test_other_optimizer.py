"""An optimizer that is not the one that was saved, other layers, and other dtypes."""

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
def test_another_kind_is_refused_or_begins_anew(saved: Any, here: Any, word: str, steps: int, tmp_path: Path) -> None:
    """Strict, an error names settings of both kinds; else the weights are taken, and the optimizer is the script's.
    So it is before the first step, when neither has a state."""
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


def test_schedulers_and_versions_of_torch_make_no_other_kind(tmp_path: Path) -> None:
    """Settings that a scheduler has added, or that a newer torch knows, are no reason to refuse an optimizer."""
    state, twin = trained(built(ADAMW)), built(ADAMW)
    torch.optim.lr_scheduler.OneCycleLR(state["optim"], max_lr=0.3, total_steps=9)
    del state["optim"].param_groups[0]["decoupled_weight_decay"]
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        cp.save(1).wait_durable()
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        assert cp.restore() == 1
    assert len(twin["optim"].state) == 4


def test_settings_of_the_script_that_do_not_count_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line names each that the script has changed since the run began, at every start, until it is in effect. What
    a schedule or a loop changes is the training's. AdamW's state in Adam goes on as AdamW's."""

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


def test_what_is_taken_is_not_said_to_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is cast is said as cast; of an optimizer, how many parameters go on, and whose settings count."""
    state, twin = trained(built(ADAMW)), built(lambda p: torch.optim.AdamW(p, lr=0.5), "ac")
    twin["model"]["a"].bfloat16()
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        cp.save(1).wait_durable()
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        with pytest.raises(ckpt.errors.MismatchError, match=r"strict=False .* cast other dtypes"):
            cp.restore()
        assert cp.restore(strict=False) == 1
        assert cp.last_restore is not None
        left_out = cp.last_restore.left_out
    assert "strict=False cast tensors: 2 to BF16" in caplog.text
    assert not [line for line in left_out if "dtype" in line or "model.a" in line.partition(":")[0]]
    kept = "optim: 2 parameters keep their state, 2 start without state (model.c.bias, model.c.weight); its settings"
    assert kept in str(left_out)
    assert torch.equal(twin["model"]["a"].weight, state["model"]["a"].weight.bfloat16())
    assert twin["optim"].param_groups[0]["lr"] == 0.2 and len(twin["optim"].state) == 2
