"""Seconds that saving takes from training."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from ckpt.ipc.heartbeat import Heartbeat
from ckpt.save import Save
from ckpt.trainer.profiler import traced
from ckpt.trainer.staging.stage import Stager


@dataclass
class Stats:
    """Seconds that saving took from training. `stalls`: of each of the last saves, the wait before updates included."""

    saves: int = 0
    skipped: int = 0
    stalled_s: float = 0.0
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=10_000), repr=False)


class Stalls:
    """Counts them. `before_update` is called by each optimizer that is about to change what is being copied."""

    def __init__(self, stager: Stager, heartbeat: Heartbeat, timeout_s: float) -> None:
        self.stats = Stats()
        self._stager, self._heartbeat, self._timeout_s = stager, heartbeat, timeout_s
        self._waiting_since: float | None = None  # an optimizer waits for a copy

    def count(self, seconds: float) -> None:
        """Of one save."""
        self.stats.stalled_s += seconds
        self.stats.saves += 1
        self.stats.stalls.append(seconds)

    @traced("ckpt.wait")
    def before_update(self) -> None:
        self._heartbeat.update()
        self._waiting_since = time.perf_counter()
        waited = self._stager.before_update(self._timeout_s)
        self._waiting_since = None
        self.stats.stalled_s += waited
        if waited and self.stats.stalls:
            self.stats.stalls[-1] += waited

    def until_staged(self, save: Save) -> float:
        """What training has waited for this one, in step() and, just now perhaps, before an update."""
        now, since = time.perf_counter(), self._waiting_since
        if save.stalled_s is not None:
            return save.stalled_s + (0.0 if since is None else now - since)
        return now - save.began if save.began else 0.0  # step() waits yet; or it was kept aside, and nobody waited
