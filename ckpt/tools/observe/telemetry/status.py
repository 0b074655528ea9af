"""The current status of a rank as plain values. Its writer creates it, `ckpt top` shows it, and metrics are derived
from it.

The status costs the trainer nothing, because the writer reads shared memory, even after the trainer's death. It has no
credentials. Versions are compatible: unknown fields are ignored, and missing fields get their default.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ckpt.core.format.manifest import typed
from ckpt.errors import CorruptError

VERSION = 1
EMPTY, FILLING, SEALED = "empty", "filling", "sealed"
MOST_TIERS, MOST_SLOTS = 64, 256


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """Memory for one snapshot.

    `state`: "empty", "filling" (being copied) or "sealed" (complete).
    `step`: step of the snapshot, -1 for none. `nbytes`: size of the snapshot.
    """

    state: str = EMPTY
    step: int = -1
    checkpoint: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A durable tier. `every`: steps between its checkpoints. `committed`: the newest step in the tier, or None.

    `writing`: step that is being written, or None; `done` of its `total` bytes are written. `rate`: bytes of state per
        second, now or for the last checkpoint. `waiting`: number of checkpoints that are being written or queued.
        `lag_steps`, `lag_s`: training that would be lost if only this tier survived. Counts since this writer started:
        `saves` committed, `failed`, `left_out` because the tier was too slow, `raw` bytes of states, and bytes `stored`
        for these. `error`: error of the last save, "" if it succeeded.
    """

    url: str = ""
    every: int = 0
    committed: int | None = None
    writing: int | None = None
    done: int = 0
    total: int = 0
    rate: float = 0.0
    waiting: int = 0
    lag_steps: int = 0
    lag_s: float = 0.0
    saves: int = 0
    failed: int = 0
    left_out: int = 0
    raw: int = 0
    stored: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """An accelerator as its driver reports it. `busy`: share of the time, 0 to 1. Bytes of memory: `mine`, used by the
    trainer (None if unknown); `used`, by all processes; `total`."""

    name: str = ""
    busy: float | None = None
    mine: int | None = None
    used: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank. Values are seconds, bytes or steps. "Recent" is the last minute, or the last steps if steps are longer.

    `run`: URL of the run's first tier, or memory:NAME. `at`: time of the status, seconds since 1970. `pid`: process id
        of the trainer. `writer`: process id of its writer. `trainer`: "alive", "frozen" (stopped by a signal), "dead",
        "left" (alive, but has released its memory) or "closed".
    `doing`: "opening", "training", "paused", "restoring", "leaving", or "starting" before its first report. `step`:
        last step, -1 for none. `calls`: steps since opening. `idle_s`: seconds since the last sign of life. `usual_s`:
        usual duration of a step. `step_s`: duration of recent steps, 0 if unknown.

    `stall_s`: time that a recent step waited for saving. `stall_share`: share of the time. `stalled_s`: total so far.
        `slowed_s`: estimate of the extra time of steps during saves, None if not recorded. `trained_s`: seconds of
        `wall_s`, the time since this job attempt began, that were spent on steps. `saves`, `skipped`: number of
        snapshots taken and skipped. All of these exclude the last call of step().
    `started`: the restored step, or None. `restored_from`: its source. `restore_s`: duration of the restore.

    `in_memory`: newest complete step in memory. `memory_lag`: steps by which it is behind. `faults`: number of faults
        since the writer started, without requested saves. `fault`: the last one as a line. `fault_at`: its time.
        `leaves_s`: time until a writer without a trainer releases its memory, None with a trainer. Bytes:
        `trainer_rss`, `writer_rss` (both include the shared snapshots), `snapshots`, and `available` on this machine.
    """

    run: str = ""
    at: float = 0.0
    rank: int = 0
    world: int = 1
    host: str = ""
    pid: int = 0
    writer: int = 0
    term: str = ""
    trainer: str = "dead"
    doing: str = "starting"
    step: int = -1
    calls: int = 0
    idle_s: float = 0.0
    usual_s: float = 0.0
    step_s: float = 0.0
    stall_s: float = 0.0
    stall_share: float = 0.0
    stalled_s: float = 0.0
    slowed_s: float | None = None
    trained_s: float = 0.0
    wall_s: float = 0.0
    saves: int = 0
    skipped: int = 0
    started: int | None = None
    restore_s: float | None = None
    restored_from: str = ""
    in_memory: int | None = None
    memory_lag: int = 0
    leaves_s: float | None = None
    faults: int = 0
    fault: str = ""
    fault_at: str = ""
    trainer_rss: int = 0
    writer_rss: int = 0
    writer_cpu_s: float = 0.0
    snapshots: int = 0
    available: int = 0
    samples_per_step: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    serves: str = ""
    slots: tuple[SlotStatus, ...] = ()
    tiers: tuple[TierStatus, ...] = ()
    device: DeviceStatus | None = None

    @property
    def trains(self) -> bool:
        return self.trainer in ("alive", "frozen")

    @property
    def not_durable(self) -> int | None:
        """The newest step in memory that no tier has, or None. It would be lost if the writer were killed."""
        durable = max((tier.committed for tier in self.tiers if tier.committed is not None), default=-1)
        return self.in_memory if self.in_memory is not None and self.in_memory > durable else None

    @property
    def steps_s(self) -> float | None:
        """Steps per second, None if unknown."""
        return 1 / self.step_s if self.step_s > 0 else None

    @property
    def samples_s(self) -> float | None:
        """Samples per second of this rank, or None if samples_per_step is not configured."""
        rate = self.steps_s
        return None if rate is None or self.samples_per_step is None else rate * self.samples_per_step

    @property
    def flops_s(self) -> float | None:
        rate = self.steps_s
        return None if rate is None or self.flops_per_step is None else rate * self.flops_per_step

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: share of the device's peak, from 0 to 1."""
        flops = self.flops_s
        return None if flops is None or self.peak_flops is None else flops / self.peak_flops

    @property
    def goodput(self) -> float | None:
        """Share of the time since this job attempt began that was spent on steps. None before the first step."""
        return None if not self.calls or self.wall_s <= 0 else min(1.0, self.trained_s / self.wall_s)

    def to_json(self) -> dict[str, Any]:
        derived = ("steps_s", "samples_s", "flops_s", "mfu", "goodput", "not_durable")
        return {"version": VERSION, **asdict(self), **{name: getattr(self, name) for name in derived}}

    @classmethod
    def from_json(cls, data: Any) -> RankStatus:
        """Parse a status. Raises CorruptError if it is invalid."""
        try:
            most = {"slots": data.get("slots", [])[:MOST_SLOTS], "tiers": data.get("tiers", [])[:MOST_TIERS]}
            return typed(cls, {**data, **most})
        except (AttributeError, TypeError, ValueError) as error:
            raise CorruptError(f"not the status of a rank: {error}") from None


def shown(url: str) -> str:
    """Return a URL without user, password and query. Folders and names are unchanged."""
    parts = urlsplit(url)
    if not parts.scheme or parts.scheme in ("file", "memory"):
        return url
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
