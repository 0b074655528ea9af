"""A look at a rank as metrics: names with units, and words that say what a high value means. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from ckpt.tools.observe.telemetry.status import RankStatus

MEMORY = "memory"  # stands for the tier that is memory


@dataclass(frozen=True, slots=True)
class Kind:
    """One metric. `value`: of a rank, or one for each value of its `label`; None where it is not known. `counter`: it
    only grows while the writer lives; then its name ends in _total where it is served."""

    value: Callable[[RankStatus], float | dict[str, float | None] | None]
    help: str
    counter: bool = False
    label: str = ""  # besides run and rank


def _tiers(name: str) -> Callable[[RankStatus], dict[str, float | None]]:
    return lambda look: {tier.url: getattr(tier, name) for tier in look.tiers}


def _device(name: str) -> Callable[[RankStatus], float | None]:
    return lambda look: getattr(look.device, name, None)


def _started(look: RankStatus) -> bool:
    return look.step >= 0


KINDS: dict[str, Kind] = {
    "ckpt_trainer_up": Kind(attrgetter("trains"),
        "1 while the training process lives and has not let go of its run, else 0. At 0 the writer still holds the "
        "last snapshots, for a while."),
    "ckpt_idle_seconds": Kind(attrgetter("idle_s"),
        "Time since the training loop gave the last sign of life. High, compared with ckpt_step_seconds: it hangs, "
        "is stopped, or does something else."),
    "ckpt_step": Kind(lambda look: look.step if _started(look) else None,
        "Number of the last step that was done. Behind that of other ranks: this rank is slow."),
    "ckpt_steps": Kind(attrgetter("calls"), "Steps done since this process opened its run.", counter=True),
    "ckpt_step_seconds": Kind(lambda look: look.step_s or None,
        "What the recent steps took, each, saving included. High: look at ckpt_stall_ratio; if that is low, "
        "checkpointing is not the reason."),
    "ckpt_samples_per_second": Kind(attrgetter("samples_s"),
        "Of this rank, by the samples_per_step that the user gave."),
    "ckpt_flops_per_second": Kind(attrgetter("flops_s"), "Of this rank, by the flops_per_step that the user gave."),
    "ckpt_mfu_ratio": Kind(attrgetter("mfu"),
        "Model FLOPs utilisation: of what the device can do at most, by the user's figures."),
    "ckpt_stall_seconds": Kind(lambda look: look.stall_s if look.step_s else None,
        "What saving made each of the recent steps wait. High: snapshots are copied more slowly than steps come; "
        "save less often, or give Memory more slots."),
    "ckpt_stall_ratio": Kind(lambda look: look.stall_share if look.step_s else None,
        "Share of the recent time that training waited for saving. Above 0.01, checkpointing is a bottleneck; about "
        "0, it is none, however slow the steps are."),
    "ckpt_stalled_seconds": Kind(attrgetter("stalled_s"),
        "Time that training has waited for saving, in all.", counter=True),
    "ckpt_slowed_seconds": Kind(lambda look: None if look.slowed_s is None else max(0.0, look.slowed_s),
        "How much longer steps took because something was saved beside them, besides the wait. An estimate, of the "
        "rank that keeps the ledger. Growing fast: storage takes cores or bandwidth from training; max_mib_s= holds "
        "it back."),
    "ckpt_goodput_ratio": Kind(attrgetter("goodput"),
        "Share of the time since this process opened its run that went into steps: not into waiting for saves, "
        "restoring or pauses. Low right after a start."),
    "ckpt_snapshots": Kind(attrgetter("saves"), "Snapshots that were taken.", counter=True),
    "ckpt_skipped": Kind(attrgetter("skipped"),
        "Snapshots that were left out since no slot was free, and saves that a tier was too slow for. Growing: "
        "checkpointing cannot keep up; save less often.", counter=True),
    "ckpt_restore_seconds": Kind(attrgetter("restore_s"), "What the last restore took."),
    "ckpt_faults": Kind(attrgetter("faults"),
        "Faults that were seen: deaths, hangs, signals and others.", counter=True),
    "ckpt_tier_step": Kind(lambda look: {MEMORY: look.in_memory} | _tiers("committed")(look),
        "The newest step that is whole in this tier: what a restart finds there.", label="tier"),
    "ckpt_tier_lag_steps": Kind(
        lambda look: {MEMORY: look.memory_lag} | _tiers("lag_steps")(look) if _started(look) else {},
        "Steps that would be lost if this tier alone were left. High and growing: it is slower than checkpoints "
        "come.", label="tier"),
    "ckpt_tier_lag_seconds": Kind(lambda look: _tiers("lag_s")(look) if _started(look) else {},
        "The same as training time.", label="tier"),
    "ckpt_tier_waiting": Kind(_tiers("waiting"),
        "Checkpoints on their way to this tier. Above 1: it is slower than they come.", label="tier"),
    "ckpt_tier_write_bytes_per_second": Kind(lambda look: {tier.url: tier.rate or None for tier in look.tiers},
        "Bytes of state that this tier takes a second, now or at the last checkpoint. Low with a high lag: the "
        "storage is the bottleneck.", label="tier"),
    "ckpt_tier_saves": Kind(_tiers("saves"),
        "Checkpoints that this rank's writer brought to this tier.", counter=True, label="tier"),
    "ckpt_tier_failures": Kind(_tiers("failed"),
        "Checkpoints that were not written to this tier; ckpt top says why.", counter=True, label="tier"),
    "ckpt_tier_left_out": Kind(_tiers("left_out"),
        "Checkpoints that were left out since this tier was too slow: raise its every=.", counter=True, label="tier"),
    "ckpt_tier_raw_bytes": Kind(_tiers("raw"),
        "Bytes of the states that were saved to this tier.", counter=True, label="tier"),
    "ckpt_tier_stored_bytes": Kind(_tiers("stored"),
        "Bytes that were stored for them: less than raw where increments or compression help.",
        counter=True, label="tier"),
    "ckpt_process_resident_memory_bytes": Kind(
        lambda look: {"trainer": look.trainer_rss or None, "writer": look.writer_rss},
        "Memory of the training process and of its writer. The snapshots, which they share, may be counted in both.",
        label="process"),
    "ckpt_snapshot_memory_bytes": Kind(attrgetter("snapshots"),
        "Memory that is set aside for snapshots. High: fewer of Memory(keep=)."),
    "ckpt_host_available_memory_bytes": Kind(attrgetter("available"),
        "Memory that can still be taken on this machine, or in this cgroup. Low: the OOM killer is near."),
    "ckpt_writer_cpu_seconds": Kind(attrgetter("writer_cpu_s"),
        "CPU time of the writer, at low priority. Growing by more than 1 a second on a machine whose cores are "
        "busy: it may slow training.", counter=True),
    "ckpt_device_busy_ratio": Kind(_device("busy"),
        "Share of the time that the accelerator is busy, as its driver says. Low while ckpt_stall_ratio is about 0: "
        "training waits for something else than saving."),
    "ckpt_device_used_memory_bytes": Kind(_device("used"), "Memory of the accelerator that is taken, by anybody."),
    "ckpt_device_own_memory_bytes": Kind(_device("mine"),
        "Memory of the accelerator that the training process has taken."),
    "ckpt_device_memory_bytes": Kind(_device("total"), "Memory of the accelerator."),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gauge:
    """One value. `label`: of the kind's label."""

    name: str
    value: float
    label: str = ""


def gauges(look: RankStatus) -> list[Gauge]:
    """All that is known of a rank; what is not known is left out."""
    found = []
    for name, kind in KINDS.items():
        values = kind.value(look)
        for label, value in values.items() if isinstance(values, dict) else [("", values)]:
            if value is not None and math.isfinite(value):
                found.append(Gauge(name, float(value), label))
    return found
