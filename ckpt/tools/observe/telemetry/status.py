"""One look at what a rank does now, as plain values: made by its writer, shown by `ckpt top`, served as metrics.

A look costs the trainer nothing: it is read out of memory that the trainer shares with its writer, and it can be had
after the trainer's death as well. It holds no credentials. Versions are lenient with each other: a field that one does
not know is left out, and one that is missing has its default.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ckpt.core.format.typed_json import typed
from ckpt.errors import CorruptError

VERSION = 1
EMPTY, FILLING, EAGER, SEALED = "empty", "filling", "eager", "sealed"
MOST_TIERS, MOST_SLOTS = 64, 256


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """Memory for one snapshot. `state`: "empty", "filling" (a copy is under way), "eager" (all is there but what only
    optimizers change) or "sealed" (a whole snapshot); `step`: -1 for none; `nbytes`: of the snapshot."""

    state: str = EMPTY
    step: int = -1
    attempt: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A durable tier. `every`: steps between its checkpoints; `committed`: the newest step there, None for none.

    `writing`: the step on its way there now, None for none, with `done` of `total` bytes; `rate`: bytes of state a
    second, now or at the last one; `waiting`: checkpoints on their way, those that wait for their turn among them.
    `lag_steps`, `lag_s`: training that would be lost if this tier alone were left. Since this writer began: `saves`
    that became checkpoints, `failed`, `left_out` since the tier was too slow, bytes of states (`raw`) and of what was
    stored for them. `error`: of the last save that failed, "" once another has succeeded.
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
    """An accelerator as its driver sees it. `busy`: share of the time, from 0 to 1; bytes: `mine` those of the trainer
    (None where the driver does not tell), `used` by anybody, of `total`."""

    name: str = ""
    busy: float | None = None
    mine: int | None = None
    used: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank. Seconds, bytes and steps; "recent" is the last minute, or the last steps if they take longer.

    `run`: URL of its first tier, or memory:NAME; `at`: seconds since 1970; `pid`: of the trainer, `writer`: of its
    writer; `trainer`: "alive", "frozen" (stopped by a signal), "dead", "left" (it let go, and lives) or "closed".
    `doing`: "opening", "training", "paused", "restoring", "leaving", or "starting" until it has said so; `step`: the
    last one, -1 for none; `calls`: steps done since it was opened; `idle_s`: since the last sign of life; `usual_s`:
    what a step usually takes; `step_s`: what the recent ones took, 0 if unknown.

    `stall_s`: what saving made a recent step wait; `stall_share`: of the time; `stalled_s`: in all; `slowed_s`: how
    much longer steps took besides because something was saved, an estimate, None where nobody keeps it. `trained_s` of
    `wall_s` went into steps, since this incarnation began. `saves`, `skipped`: snapshots taken and left out. All of
    this is up to the last call of step(), what that one cost not included.
    `started`: the step that was restored, None for none, in `restore_s` from `restored_from`.

    `in_memory`: the newest step of which memory holds a whole snapshot, `memory_lag` steps behind. `faults`: since
    the writer began, without saves that were asked for; `fault`: the last one, in a line, with its time `fault_at`.
    `leaves_s`: until a writer whose trainer is gone lets go of its memory, None for one that has a trainer.
    Bytes of memory: `trainer_rss`, `writer_rss` (both count the snapshots, which they share), `snapshots`, and
    `available` on this machine.
    """

    run: str = ""
    at: float = 0.0
    rank: int = 0
    world: int = 1
    host: str = ""
    pid: int = 0
    writer: int = 0
    epoch: str = ""
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
        """The newest step in memory that no tier has: killing the writer loses it. None if there is none."""
        durable = max((tier.committed for tier in self.tiers if tier.committed is not None), default=-1)
        return self.in_memory if self.in_memory is not None and self.in_memory > durable else None

    @property
    def steps_s(self) -> float | None:
        """Steps a second, None if nobody knows yet."""
        return 1 / self.step_s if self.step_s > 0 else None

    @property
    def samples_s(self) -> float | None:
        """Samples a second of this rank, where the user has said how many a step has."""
        rate = self.steps_s
        return None if rate is None or self.samples_per_step is None else rate * self.samples_per_step

    @property
    def flops_s(self) -> float | None:
        rate = self.steps_s
        return None if rate is None or self.flops_per_step is None else rate * self.flops_per_step

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: of what the device can do at most, from 0 to 1."""
        flops = self.flops_s
        return None if flops is None or self.peak_flops is None else flops / self.peak_flops

    @property
    def goodput(self) -> float | None:
        """The share of the time since this incarnation began that went into steps; None before the first."""
        return None if not self.calls or self.wall_s <= 0 else min(1.0, self.trained_s / self.wall_s)

    def to_json(self) -> dict[str, Any]:
        derived = ("steps_s", "samples_s", "flops_s", "mfu", "goodput", "not_durable")
        return {"version": VERSION, **asdict(self), **{name: getattr(self, name) for name in derived}}

    @classmethod
    def from_json(cls, data: Any) -> RankStatus:
        """CorruptError if it is none."""
        try:
            most = {"slots": data.get("slots", [])[:MOST_SLOTS], "tiers": data.get("tiers", [])[:MOST_TIERS]}
            return typed(cls, {**data, **most})
        except (AttributeError, TypeError, ValueError) as error:
            raise CorruptError(f"this is no look at a rank: {error}") from None


def shown(url: str) -> str:
    """A URL without what may be a secret: no user, no password, no query. Folders and names stay what they are."""
    parts = urlsplit(url)
    if not parts.scheme or parts.scheme in ("file", "memory"):
        return url
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
