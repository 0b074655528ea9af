"""The settings of optimizers and schedulers, compared to report which ones a checkpoint overrides."""

from __future__ import annotations

import math
from typing import Any

Settings = list[dict[str, Any]]  # of each group, in order


def settings_of(optimizer: Any) -> Settings:
    """Return the numeric settings of each group, as JSON has them, with the learning rate before any schedule."""
    found = []
    for group in optimizer.param_groups:
        several = {k: list(v) if type(v) is tuple else v for k, v in group.items()}
        plain = {k: v for k, v in several.items() if all(map(_is_number, v if type(v) is list else [v]))}
        plain["lr"] = plain.pop("initial_lr", plain.get("lr"))
        found.append(plain)
    return found


def _is_number(value: object) -> bool:
    return type(value) in (bool, int, float) and math.isfinite(value) and abs(value) < 1 << 53  # type: ignore[arg-type]


def overruled(then: Settings, now: Settings, in_effect: Settings) -> str:
    """Return the settings that the script has changed since the run began, but that are not `in_effect` after a
    restore, because the checkpoint overrides them. Return "" if there are none."""
    differ: dict[str, list[str]] = {}
    for number, (old, new, real) in enumerate(zip(then, now, in_effect, strict=False)):
        for name in sorted(old.keys() & new.keys() & real.keys()):
            if old[name] != new[name] != real[name]:
                differ.setdefault(f"{name} {real[name]}, not the script's {new[name]}", []).append(str(number))
    return "; ".join(
        text if len(groups) == len(in_effect) else f"{text} (group {', '.join(groups)})"
        for text, groups in differ.items()
    )


PROGRESS = {
    "last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "_step_count", "_last_lr",
    "_get_lr_called_within_step", "_is_initial",
}  # fmt: skip
"""The keys of a scheduler's state_dict() that change during training."""


def scheduler_settings(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's numeric settings by name, including those of schedulers inside it."""
    found: dict[str, Any] = {}

    def collect(start: str, values: Any) -> None:
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            several = list(value) if isinstance(value, tuple) else value
            if isinstance(key, str) and key in PROGRESS:
                continue
            if _is_number(value) or (isinstance(several, list) and several and all(map(_is_number, several))):
                found[f"{start}{key}"] = several
            elif isinstance(several, dict | list):
                collect(f"{start}{key}.", several)

    try:
        collect("", scheduler.state_dict())
    except Exception:  # user code; the next save raises the error
        return {}
    return found


def overridden(script: dict[str, Any], now: dict[str, Any]) -> str:
    """Return which settings of the script the checkpoint overrides, "" if none."""
    differ = [key for key in sorted(script.keys() & now.keys()) if script[key] != now[key]]
    return "; ".join(f"{key} {now[key]}, not the script's {script[key]}" for key in differ)
