"""What the callbacks of several trainers share: keywords that are looked at when a callback is made, and what a script
says of its optimizers, so that it is heard when a checkpoint overrules it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.checkpointer import Checkpointer
from ckpt.errors import UsageError

PLACE = "the first argument, a folder or URL"
MEANT = {  # how trainers call it
    "save_total_limit": "keep=",
    "save_steps": "every=",
    "every_n_train_steps": "every=",
    "train_time_interval": 'every="10min"',
    "dirpath": PLACE,
    "output_dir": PLACE,
}

Settings = list[dict[str, Any]]  # of each group of each optimizer, in their order


def check_keywords(callback: type, arguments: Mapping[str, object], meant: Mapping[str, str]) -> None:
    """UsageError that says what is meant, if neither the callback nor a Checkpointer has a keyword. `meant`: further
    names that trainers have, and ours."""
    known: set[str] = set()
    for kind in (callback, Checkpointer):
        known |= inspect.signature(kind.__init__).parameters.keys() - {"self", "state", "arguments"}  # type: ignore[misc]
    for word in arguments.keys() - known:
        near = [f"{one}=" for one in difflib.get_close_matches(word, known, 1)]
        hint = {**MEANT, **meant}.get(word) or next(iter(near), None)
        raise UsageError(f"there is no {word}= here" + (f": did you mean {hint}?" if hint else ""))


def settings_of(optimizers: Iterable[Any]) -> Settings:
    """The numbers that the groups of these were made with. A learning rate: as it is before a schedule."""
    found = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        plain = {k: v for k, v in group.items() if type(v) in (int, float) or (type(v) is tuple and _numbers(v))}
        plain["lr"] = plain.pop("initial_lr", plain.get("lr"))
        found.append(plain)
    return found


def _numbers(values: tuple[Any, ...]) -> bool:
    return all(type(one) in (int, float) for one in values)


def overruled(then: Settings, now: Settings, in_effect: Settings, how: str) -> str:
    """A sentence on what the script says otherwise now than when the run began, and is not `in_effect` after a restore,
    since the checkpoint's settings count; "" if nothing. `how`: to have the script's."""
    differ = []
    for number, (old, new, real) in enumerate(zip(then, now, in_effect, strict=False)):
        where = f" (group {number})" if len(in_effect) > 1 else ""
        differ += [
            f"{name} {real[name]}, not the script's {new[name]}{where}"
            for name in sorted(old.keys() & new.keys() & real.keys())
            if old[name] != new[name] != real[name]
        ]
    if not differ:
        return ""
    return f"the checkpoint's settings of the optimizer were taken: {'; '.join(differ)}. To have the script's, {how}"
