"""What a script says of its optimizers, so that it is heard when a checkpoint overrules it."""

from __future__ import annotations

import math
from typing import Any

Settings = list[dict[str, Any]]  # of each group, in their order


def settings_of(optimizer: Any) -> Settings:
    """The numbers that its groups were made with, as JSON has them. A learning rate: as it is before a schedule."""
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
    """What the script says otherwise now than when the run began, and is not `in_effect` after a restore, since the
    checkpoint's settings count; "" if nothing."""
    differ: dict[str, list[str]] = {}
    for number, (old, new, real) in enumerate(zip(then, now, in_effect, strict=False)):
        for name in sorted(old.keys() & new.keys() & real.keys()):
            if old[name] != new[name] != real[name]:
                differ.setdefault(f"{name} {real[name]}, not the script's {new[name]}", []).append(str(number))
    return "; ".join(
        text if len(groups) == len(in_effect) else f"{text} (group {', '.join(groups)})"
        for text, groups in differ.items()
    )
