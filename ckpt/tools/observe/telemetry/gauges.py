"""Convert the status of a rank to metrics with names, units, and descriptions that interpret high values. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from ckpt.tools.observe.telemetry.status import RankStatus

MEMORY = "memory"  # label value of memory, which counts as a tier


@dataclass(frozen=True, slots=True)
class Kind:
    """One metric. `value`: returns its value for a rank, or a dict by the values of its `label`; None if unknown.
    `counter`: True if it only grows while the writer lives; its served name then ends in _total."""

    value: Callable[[RankStatus], float | dict[str, float | None] | None]
    help: str
    counter: bool = False
    label: str = ""  # name of a label in addition to run and rank


def _tiers(name: str) -> Callable[[RankStatus], dict[str, float | None]]:
    return lambda look: {tier.url: getattr(tier, name) for tier in look.tiers}


def _device(name: str) -> Callable[[RankStatus], float | None]:
    return lambda look: getattr(look.device, name, None)


def _started(look: RankStatus) -> bool:
    return look.step >= 0


KINDS: dict[str, Kind] = {
    "ckpt_trainer_up": Kind(attrgetter("trains"),
        "1 while the training process lives and has not released its run, else 0. At 0 the writer still holds the "
        "last snapshots for a while."),
    "ckpt_idle_seconds": Kind(attrgetter("idle_s"),
        "Time since the last sign of life of the training loop. If high compared with ckpt_step_seconds, training "
        "hangs, is stopped, or does other work."),
    "ckpt_step": Kind(lambda look: look.step if _started(look) else None,
        "The last step done. If behind other ranks, this rank is slow."),
    "ckpt_steps": Kind(attrgetter("calls"), "Steps done since this process opened its run.", counter=True),
    "ckpt_step_seconds": Kind(lambda look: look.step_s or None,
        "Duration of recent steps, including saving. If high, check ckpt_stall_ratio; if that is low, checkpointing "
        "is not the reason."),
    "ckpt_samples_per_second": Kind(attrgetter("samples_s"),
        "Samples per second of this rank, from samples_per_step."),
    "ckpt_flops_per_second": Kind(attrgetter("flops_s"), "FLOPs per second of this rank."),
    "ckpt_mfu_ratio": Kind(attrgetter("mfu"),
        "Model FLOPs utilisation: share of the device's peak, from flops_per_step and peak_flops."),
    "ckpt_stall_seconds": Kind(lambda look: look.stall_s if look.step_s else None,
        "Time that each recent step waited for saving. If high, snapshots are copied more slowly than steps come: "
        "save less often, or give Memory more slots."),
    "ckpt_stall_ratio": Kind(lambda look: look.stall_share if look.step_s else None,
        "Share of the recent time that training waited for saving. Above 0.01, checkpointing is a bottleneck; near "
        "0 it is not, however slow the steps are."),
    "ckpt_stalled_seconds": Kind(attrgetter("stalled_s"),
        "Total time that training has waited for saving.", counter=True),
    "ckpt_slowed_seconds": Kind(lambda look: None if look.slowed_s is None else max(0.0, look.slowed_s),
        "Extra time of steps during a save, in addition to the wait. An estimate, of the rank that records the run "
        "metrics. If it grows fast, storage takes cores or bandwidth from training; max_mib_s= limits it."),
    "ckpt_goodput_ratio": Kind(attrgetter("goodput"),
        "Share of the time since this process opened its run that went into steps, not into waiting for saves, "
        "restoring or pauses. Low after a start."),
    "ckpt_snapshots": Kind(attrgetter("saves"), "Snapshots taken.", counter=True),
    "ckpt_skipped": Kind(attrgetter("skipped"),
        "Snapshots skipped because no slot was free, and saves skipped because a tier was too slow. If it grows, "
        "checkpointing cannot keep up: save less often.", counter=True),
    "ckpt_restore_seconds": Kind(attrgetter("restore_s"), "Duration of the last restore."),
    "ckpt_faults": Kind(attrgetter("faults"),
        "Detected faults: crashes, hangs, signals and others.", counter=True),
    "ckpt_tier_step": Kind(lambda look: {MEMORY: look.in_memory} | _tiers("committed")(look),
        "The newest complete step in this tier, which a restart would restore.", label="tier"),
    "ckpt_tier_lag_steps": Kind(
        lambda look: {MEMORY: look.memory_lag} | _tiers("lag_steps")(look) if _started(look) else {},
        "Steps that would be lost if only this tier survived. If high and growing, the tier is slower than the rate of "
        "checkpoints.", label="tier"),
    "ckpt_tier_lag_seconds": Kind(lambda look: _tiers("lag_s")(look) if _started(look) else {},
        "Training time that would be lost if only this tier survived.", label="tier"),
    "ckpt_tier_waiting": Kind(_tiers("waiting"),
        "Checkpoints waiting for this tier. Above 1, the tier is slower than their rate.", label="tier"),
    "ckpt_tier_write_bytes_per_second": Kind(lambda look: {tier.url: tier.rate or None for tier in look.tiers},
        "Bytes of state per second that this tier takes, now or for the last checkpoint. If low with a high lag, "
        "the storage is the bottleneck.", label="tier"),
    "ckpt_tier_saves": Kind(_tiers("saves"),
        "Checkpoints that this rank's writer wrote to this tier.", counter=True, label="tier"),
    "ckpt_tier_failures": Kind(_tiers("failed"),
        "Checkpoints that could not be written to this tier; ckpt top shows why.", counter=True, label="tier"),
    "ckpt_tier_left_out": Kind(_tiers("left_out"),
        "Checkpoints skipped because this tier was too slow: raise its every=.", counter=True, label="tier"),
    "ckpt_tier_raw_bytes": Kind(_tiers("raw"),
        "Bytes of the states saved to this tier.", counter=True, label="tier"),
    "ckpt_tier_stored_bytes": Kind(_tiers("stored"),
        "Bytes stored for these states: less than their size if increments or compression help.",
        counter=True, label="tier"),
    "ckpt_process_resident_memory_bytes": Kind(
        lambda look: {"trainer": look.trainer_rss or None, "writer": look.writer_rss},
        "Memory of the training process and its writer. The shared snapshots may be counted in both.",
        label="process"),
    "ckpt_snapshot_memory_bytes": Kind(attrgetter("snapshots"),
        "Memory reserved for snapshots. If high, reduce Memory(keep=)."),
    "ckpt_host_available_memory_bytes": Kind(attrgetter("available"),
        "Free memory on this machine or in this cgroup. If low, the OOM killer is near."),
    "ckpt_writer_cpu_seconds": Kind(attrgetter("writer_cpu_s"),
        "CPU time of the writer, at low priority. If it grows by more than 1 per second on a machine with busy "
        "cores, it may slow training.", counter=True),
    "ckpt_device_busy_ratio": Kind(_device("busy"),
        "Share of the time that the accelerator is busy, from its driver. If low while ckpt_stall_ratio is near 0, "
        "training does not wait for saving but for something else."),
    "ckpt_device_used_memory_bytes": Kind(_device("used"), "Used memory of the accelerator, by all processes."),
    "ckpt_device_own_memory_bytes": Kind(_device("mine"),
        "Memory of the accelerator used by the training process."),
    "ckpt_device_memory_bytes": Kind(_device("total"), "Total memory of the accelerator."),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gauge:
    """One value of a metric. `label`: value of the metric's additional label."""

    name: str
    value: float
    label: str = ""


def gauges(look: RankStatus) -> list[Gauge]:
    """Return all metrics of a rank whose values are known."""
    found = []
    for name, kind in KINDS.items():
        values = kind.value(look)
        for label, value in values.items() if isinstance(values, dict) else [("", values)]:
            if value is not None and math.isfinite(value):
                found.append(Gauge(name, float(value), label))
    return found
