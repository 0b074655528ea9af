"""Compute from measurements how long saves and restores take, and how often to save to each location. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.core.cadence.cadence import least_interval, steps_apart
from ckpt.store import folder_of
from ckpt.tools.doctor.findings import GB, PROBLEM, Finding, JobSize, TierFindings
from ckpt.tools.doctor.machine import Speed

COST = 0.01  # maximum share of training time that saving may cost


@dataclass(frozen=True, slots=True)
class Cadence:
    """The duration of a save and of a restore in one location, and the shortest interval at which saving costs under 1
    % of training. `every`: this interval in steps, None if the duration of a step is unknown."""

    where: str
    save_s: float
    restore_s: float
    interval_s: float
    every: int | None
    why: str


def memory_cadence(job: JobSize, speed: Speed) -> Cadence:
    copy_s = job.here / speed.copy
    if speed.by_device:
        interval = 2 * copy_s
        why = f"copying {job.here / GB:.1f} GB takes {copy_s:.2f} s of the copy engines, in parallel with training"
    else:
        interval = copy_s / (COST * speed.cpus)
        why = f"copying {job.here / GB:.1f} GB takes {copy_s:.2f} CPU-s of {speed.cpus:g} CPUs that also train"
    return Cadence("memory", copy_s, copy_s, interval, in_steps(interval, job.step_s), why)


def place_cadence(job: JobSize, place: TierFindings, speed: Speed) -> Cadence:
    """Return the interval at which saves keep the store busy for at most half of the time, and the CPUs for 1 %."""
    rates, size = place.rates, job.state if place.shared else job.here
    save_s = size / rates.write + 4 * rates.put_s
    restore_s = size / max(rates.read, 1.0) + 4 * rates.get_s
    cpu_s = job.here * (rates.cpu_s + 0.1 / GB)  # 0.1 CPU-s a GB for digests
    busy, costly = least_interval(save_s), cpu_s / (COST * speed.cpus)
    what = "shared by all nodes" if place.shared else "this machine's share"
    why = f"{size / GB:.1f} GB ({what}) take {save_s:.1f} s and {cpu_s:.1f} CPU-s of {speed.cpus:g} CPUs; "
    why += "limited by the CPU" if costly > busy else "limited to half of the store's time"
    interval = max(busy, costly)
    return Cadence(place.url, save_s, restore_s, interval, in_steps(interval, job.step_s), why)


def in_steps(interval_s: float, step_s: float | None) -> int | None:
    return None if step_s is None else steps_apart(0.0, interval_s, step_s)


def conclude(job: JobSize, places: Sequence[TierFindings], speed: Speed) -> list[Cadence]:
    """Return the intervals for memory and for the measured locations, fastest first. Return [] if the size of the state
    is unknown."""
    if not job.state:
        return []
    durable = [place_cadence(job, place, speed) for place in places if place.rates.write > 0]
    return [memory_cadence(job, speed), *sorted(durable, key=lambda one: one.save_s)]


def too_full(job: JobSize, place: TierFindings) -> list[Finding]:
    """Return a finding if three checkpoints do not fit. Two are kept, and a third one is being written."""
    size = job.state if place.shared else job.here
    if place.free is None or not job.state or place.free > 3 * size:
        return []
    text = f"{place.free / GB:.1f} GB free, and a checkpoint takes {size / GB:.1f}"
    return [
        Finding(
            "room", text, PROBLEM, "keep=2 needs space for three checkpoints: free some space, or use a larger disk"
        )
    ]


def tiers_line(
    job: JobSize, cadences: Sequence[Cadence], places: Sequence[TierFindings], speed: Speed, *, mended: bool = False
) -> str:
    """Return the `tiers=` argument of the Checkpointer to paste, without the locations that have problems.

    `mended`: True includes these locations, as if the problems were fixed. Returns "" if the duration of a step is
        unknown or no location remains.
    """
    fine = {place.url for place in places if place.usable or mended}
    memory, durable = cadences[0] if cadences else None, [one for one in cadences[1:] if one.where in fine]
    if job.step_s is None or memory is None or not durable:
        return ""
    slots = len(durable)
    keep = next((k for k in (3, 2) if (k + slots) * job.here <= 0.8 * speed.available), None)
    words = []
    every = 1
    needs = {place.url for place in places if place.options}
    for number, one in enumerate(durable):
        every = max(every, one.every or 1)
        last = number == len(durable) - 1 and number > 0
        keeping = f"ckpt.Keep(last=3, every={100 * every})" if last else "2"
        options = ", storage_options=options" if one.where in needs else ""
        url = folder_of(one.where) or one.where
        words.append(f"ckpt.Tier({str(url)!r}, every={every}, keep={keeping}{options})")
    held = "None" if keep is None else f"ckpt.Memory(every={memory.every}, keep={keep})"
    return f"tiers=[{', '.join(words)}], memory={held}"


def why_no_line(job: JobSize, cadences: Sequence[Cadence], places: Sequence[TierFindings], speed: Speed) -> str:
    """Return what the user must do to get the line to paste, or the line for the time after problems are fixed."""
    if not places:
        return "Give the folder or bucket that the job will save to, to get a line tiers=[…] to paste"
    if len(cadences) < 2:
        return "No line tiers=[…] to paste, because nothing could be written: see above"
    if job.step_s is None:
        return "Give --step-s to get a line tiers=[…] to paste"
    line = tiers_line(job, cadences, places, speed, mended=True)
    return f"Once the problems above are fixed: {line}"
