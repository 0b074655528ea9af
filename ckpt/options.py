"""Settings of a Checkpointer that few runs change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt.errors import InvalidArgumentError
from ckpt.metrics import Metrics, as_metrics

MODES = {"on_busy": ("wait", "skip"), "on_error": ("raise", "warn")}
TIMEOUTS = ("busy_timeout_s", "close_timeout_s", "agree_timeout_s")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings that few runs change: `Checkpointer(..., options=ckpt.Options(on_error="warn"))`.

    - `name`: name of a run that has memory but no folder or URL. A restart with the same name finds its snapshots.
    - `on_busy`: behaviour if every slot in memory is busy: "wait" (default) blocks the step; "skip" skips the save.
    - `on_error`: "raise" (default) raises a background error in the next call; "warn" only logs it.
    - `busy_timeout_s`: longest wait for a slot, seconds, default 600.
    - `close_timeout_s`: longest wait in close(), seconds, default 300.
    - `agree_timeout_s`: longest wait for other ranks when opening, restoring and closing, seconds, default 300.
    - `on_fault`: function called in a background thread with each `Fault`, including faults that ended earlier job
      attempts on this machine. `Checkpointer.faults` lists these earlier faults.
    - `metrics`: port for Prometheus, or `ckpt.Metrics`, which also supports TensorBoard. Default None: no metrics.

    Raises InvalidArgumentError for wrong values.
    """

    name: str | None = None
    on_busy: str = "wait"
    on_error: str = "raise"
    busy_timeout_s: float = 600.0
    close_timeout_s: float = 300.0
    agree_timeout_s: float = 300.0
    on_fault: Callable[[Any], None] | None = None
    metrics: Metrics | int | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not (isinstance(self.name, str) and self.name):
            raise InvalidArgumentError(f"Options(name={self.name!r}): name must be a string that is not empty")
        for name, allowed in MODES.items():
            if getattr(self, name) not in allowed:
                rule = " or ".join(f'"{value}"' for value in allowed)
                raise InvalidArgumentError(f"Options({name}={getattr(self, name)!r}): {name} must be {rule}")
        for name in TIMEOUTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise InvalidArgumentError(f"Options({name}={value!r}): {name} must be a number of seconds from 0")
        if self.on_fault is not None and not callable(self.on_fault):
            raise InvalidArgumentError(f"Options(on_fault={self.on_fault!r}): on_fault must be a function")
        object.__setattr__(self, "metrics", as_metrics(self.metrics))


DEFAULT_OPTIONS = Options()
