"""A look at a rank as metrics: names with units, and words that say what a high value means. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.telemetry.status import RankStatus

MEMORY = "memory"  # stands for the tier that is memory


@dataclass(frozen=True, slots=True)
class Kind:
    """One metric. `counter`: it only grows while the writer lives; then its name ends in _total where it is served."""

    help: str
    counter: bool = False
    label: str = ""  # besides run and rank


KINDS: dict[str, Kind] = {
    "ckpt_trainer_up": Kind("1 while the training process lives and has not let go of its run, else 0. At 0 the writer"
                            " still holds the last snapshots, for a while."),
    "ckpt_idle_seconds": Kind("Time since the training loop gave the last sign of life. High, compared with"
                              " ckpt_step_seconds: it hangs, is stopped, or does something else."),
    "ckpt_step": Kind("Number of the last step that was done. Behind that of other ranks: this rank is slow."),
    "ckpt_steps": Kind("Steps done since this process opened its run.", counter=True),
    "ckpt_step_seconds": Kind("What the recent steps took, each, saving included. High: look at ckpt_stall_ratio; if"
                              " that is low, checkpointing is not the reason."),
    "ckpt_samples_per_second": Kind("Of this rank, by the samples_per_step that the user gave."),
    "ckpt_flops_per_second": Kind("Of this rank, by the flops_per_step that the user gave."),
    "ckpt_mfu_ratio": Kind("Model FLOPs utilisation: of what the device can do at most, by the user's figures."),
    "ckpt_stall_seconds": Kind("What saving made each of the recent steps wait. High: snapshots are copied more slowly"
                               " than steps come; save less often, or give Memory more slots."),
    "ckpt_stall_ratio": Kind("Share of the recent time that training waited for saving. Above 0.01, checkpointing is"
                             " a bottleneck; about 0, it is none, however slow the steps are."),
    "ckpt_stalled_seconds": Kind("Time that training has waited for saving, in all.", counter=True),
    "ckpt_slowed_seconds": Kind("How much longer steps took because something was saved beside them, besides the wait."
                                " An estimate, of the rank that keeps the ledger. Growing fast: storage takes cores or"
                                " bandwidth from training; max_mib_s= holds it back."),
    "ckpt_goodput_ratio": Kind("Share of the time since this process opened its run that went into steps: not into"
                               " waiting for saves, restoring or pauses. Low right after a start."),
    "ckpt_snapshots": Kind("Snapshots that were taken.", counter=True),
    "ckpt_skipped": Kind("Snapshots that were left out since no slot was free, and saves that a tier was too slow for."
                         " Growing: checkpointing cannot keep up; save less often.", counter=True),
    "ckpt_restore_seconds": Kind("What the last restore took."),
    "ckpt_faults": Kind("Faults that were seen: deaths, hangs, signals and others.", counter=True),
    "ckpt_tier_step": Kind("The newest step that is whole in this tier: what a restart finds there.", label="tier"),
    "ckpt_tier_lag_steps": Kind("Steps that would be lost if this tier alone were left. High and growing: it is slower"
                                " than checkpoints come.", label="tier"),
    "ckpt_tier_lag_seconds": Kind("The same as training time.", label="tier"),
    "ckpt_tier_waiting": Kind("Checkpoints on their way to this tier. Above 1: it is slower than they come.",
                              label="tier"),
    "ckpt_tier_write_bytes_per_second": Kind("Bytes of state that this tier takes a second, now or at the last"
                                             " checkpoint. Low with a high lag: the storage is the bottleneck.",
                                             label="tier"),
    "ckpt_tier_saves": Kind("Checkpoints that this rank's writer brought to this tier.", counter=True, label="tier"),
    "ckpt_tier_failures": Kind("Checkpoints that were not written to this tier; ckpt top says why.", counter=True,
                               label="tier"),
    "ckpt_tier_left_out": Kind("Checkpoints that were left out since this tier was too slow: raise its every=.",
                               counter=True, label="tier"),
    "ckpt_tier_raw_bytes": Kind("Bytes of the states that were saved to this tier.", counter=True, label="tier"),
    "ckpt_tier_stored_bytes": Kind("Bytes that were stored for them: less than raw where increments or compression"
                                   " help.", counter=True, label="tier"),
    "ckpt_process_resident_memory_bytes": Kind("Memory of the training process and of its writer. The snapshots, which"
                                               " they share, may be counted in both.", label="process"),
    "ckpt_snapshot_memory_bytes": Kind("Memory that is set aside for snapshots. High: fewer of Memory(keep=)."),
    "ckpt_host_available_memory_bytes": Kind("Memory that can still be taken on this machine, or in this cgroup. Low:"
                                             " the OOM killer is near."),
    "ckpt_writer_cpu_seconds": Kind("CPU time of the writer, at low priority. Growing by more than 1 a second on a"
                                    " machine whose cores are busy: it may slow training.", counter=True),
    "ckpt_device_busy_ratio": Kind("Share of the time that the accelerator is busy, as its driver says. Low while"
                                   " ckpt_stall_ratio is about 0: training waits for something else than saving."),
    "ckpt_device_used_memory_bytes": Kind("Memory of the accelerator that is taken, by anybody."),
    "ckpt_device_own_memory_bytes": Kind("Memory of the accelerator that the training process has taken."),
    "ckpt_device_memory_bytes": Kind("Memory of the accelerator."),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gauge:
    """One value. `label`: of the kind's label."""

    name: str
    value: float
    label: str = ""


def gauges(look: RankStatus) -> list[Gauge]:
    """All that is known of a rank; what is not known is left out."""
    known = ((name, label, value) for name, label, value in _values(look) if value is not None and math.isfinite(value))
    return [Gauge(name, float(value), label) for name, label, value in known]


def _values(look: RankStatus) -> Iterator[tuple[str, str, float | None]]:
    """Name, label, value."""
    started = look.step >= 0
    yield "ckpt_trainer_up", "", look.trainer in ("alive", "frozen")
    yield "ckpt_idle_seconds", "", look.idle_s
    yield "ckpt_step", "", look.step if started else None
    yield "ckpt_steps", "", look.calls
    yield "ckpt_step_seconds", "", look.step_s or None
    yield "ckpt_samples_per_second", "", look.samples_s
    yield "ckpt_flops_per_second", "", look.flops_s
    yield "ckpt_mfu_ratio", "", look.mfu
    yield "ckpt_stall_seconds", "", look.stall_s if look.step_s else None
    yield "ckpt_stall_ratio", "", look.stall_share if look.step_s else None
    yield "ckpt_stalled_seconds", "", look.stalled_s
    yield "ckpt_slowed_seconds", "", None if look.slowed_s is None else max(0.0, look.slowed_s)
    yield "ckpt_goodput_ratio", "", look.goodput
    yield "ckpt_snapshots", "", look.saves
    yield "ckpt_skipped", "", look.skipped
    yield "ckpt_restore_seconds", "", look.restore_s
    yield "ckpt_faults", "", look.faults
    yield "ckpt_tier_step", MEMORY, look.in_memory
    yield "ckpt_tier_lag_steps", MEMORY, look.memory_lag if started else None
    yield "ckpt_process_resident_memory_bytes", "trainer", look.trainer_rss or None
    yield "ckpt_process_resident_memory_bytes", "writer", look.writer_rss
    yield "ckpt_snapshot_memory_bytes", "", look.snapshots
    yield "ckpt_host_available_memory_bytes", "", look.available
    yield "ckpt_writer_cpu_seconds", "", look.writer_cpu_s
    for tier in look.tiers:
        yield "ckpt_tier_step", tier.url, tier.committed
        yield "ckpt_tier_lag_steps", tier.url, tier.lag_steps if started else None
        yield "ckpt_tier_lag_seconds", tier.url, tier.lag_s if started else None
        yield "ckpt_tier_waiting", tier.url, tier.waiting
        yield "ckpt_tier_write_bytes_per_second", tier.url, tier.rate or None
        yield "ckpt_tier_saves", tier.url, tier.saves
        yield "ckpt_tier_failures", tier.url, tier.failed
        yield "ckpt_tier_left_out", tier.url, tier.left_out
        yield "ckpt_tier_raw_bytes", tier.url, tier.raw
        yield "ckpt_tier_stored_bytes", tier.url, tier.stored
    if look.device is not None:
        yield "ckpt_device_busy_ratio", "", look.device.busy
        yield "ckpt_device_used_memory_bytes", "", look.device.used
        yield "ckpt_device_own_memory_bytes", "", look.device.mine
        yield "ckpt_device_memory_bytes", "", look.device.total
