"""What follows from what was measured: how long saves and restores take, how often to save, and where. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.core.cadence.model import least_interval, steps_apart
from ckpt.store import folder_of
from ckpt.tools.doctor.findings import GB, PROBLEM, Finding, JobSize, TierFindings
from ckpt.tools.doctor.machine import Speed

COST = 0.01  # of training that saving may take


@dataclass(frozen=True, slots=True)
class Cadence:
    """How long a save and a restore take in one place, and from which interval on it costs under 1 % of training.
    `every`: in steps, None where nobody said how long one takes."""

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
        why = f"copying {job.here / GB:.1f} GB takes {copy_s:.2f} s of the copy engines, beside forward and backward"
    else:
        interval = copy_s / (COST * speed.cpus)
        why = f"copying {job.here / GB:.1f} GB takes {copy_s:.2f} CPU-s of {speed.cpus:g} CPUs that train as well"
    return Cadence("memory", copy_s, copy_s, interval, in_steps(interval, job.step_s), why)


def place_cadence(job: JobSize, place: TierFindings, speed: Speed) -> Cadence:
    """A save may keep the place busy for half of the time, and all CPUs for 1 % of it."""
    rates, size = place.rates, job.state if place.shared else job.here
    save_s = size / rates.write + 4 * rates.put_s
    restore_s = size / max(rates.read, 1.0) + 4 * rates.get_s
    cpu_s = job.here * (rates.cpu_s + 0.1 / GB)  # and digests
    busy, costly = least_interval(save_s), cpu_s / (COST * speed.cpus)
    what = "all nodes share it" if place.shared else "this machine's share"
    why = f"{size / GB:.1f} GB ({what}) take {save_s:.1f} s and {cpu_s:.1f} CPU-s of {speed.cpus:g} CPUs; "
    why += "the CPU decides" if costly > busy else "it may be busy for half of the time"
    interval = max(busy, costly)
    return Cadence(place.url, save_s, restore_s, interval, in_steps(interval, job.step_s), why)


def in_steps(interval_s: float, step_s: float | None) -> int | None:
    return None if step_s is None else steps_apart(0.0, interval_s, step_s)


def conclude(job: JobSize, places: Sequence[TierFindings], speed: Speed) -> list[Cadence]:
    """Memory first, then the places that were measured, the quickest first. Nothing where the state is not known."""
    if not job.state:
        return []
    durable = [place_cadence(job, place, speed) for place in places if place.rates.write > 0]
    return [memory_cadence(job, speed), *sorted(durable, key=lambda one: one.save_s)]


def too_full(job: JobSize, place: TierFindings) -> list[Finding]:
    """Three checkpoints must fit: two that are kept, and one that is being written."""
    size = job.state if place.shared else job.here
    if place.free is None or not job.state or place.free > 3 * size:
        return []
    text = f"{place.free / GB:.1f} GB, where a checkpoint takes {size / GB:.1f}"
    return [Finding("room", text, PROBLEM, "Room for three is needed, with keep=2: free some, or a larger disk")]


def tiers_line(
    job: JobSize, cadences: Sequence[Cadence], places: Sequence[TierFindings], speed: Speed, *, mended: bool = False
) -> str:
    """Ready to be pasted, without places that have problems, unless these are taken as `mended`; empty where steps have
    no length, or no place is left."""
    fine = {place.url for place in places if place.usable or mended}
    memory, durable = cadences[0] if cadences else None, [one for one in cadences[1:] if one.where in fine]
    if job.step_s is None or memory is None or not durable:
        return ""
    slots = len(durable)
    keep = next((k for k in (3, 2) if (k + slots) * job.here <= 0.8 * speed.available), None)
    words = [] if keep is None else [f"ckpt.Memory(every={memory.every}, keep={keep})"]
    every = 1
    needs = {place.url for place in places if place.options}
    for number, one in enumerate(durable):
        every = max(every, one.every or 1)
        last = number == len(durable) - 1 and number > 0
        keeping = f"ckpt.Keep(last=3, every={100 * every})" if last else "2"
        options = ", storage_options=options" if one.where in needs else ""
        url = folder_of(one.where) or one.where
        words.append(f"ckpt.Tier({str(url)!r}, every={every}, keep={keeping}{options})")
    return f"tiers=[{', '.join(words)}]"


def why_no_line(job: JobSize, cadences: Sequence[Cadence], places: Sequence[TierFindings], speed: Speed) -> str:
    """What is missing for one, or how it is once the places have no problems any more."""
    if not places:
        return "Give the folder or bucket that the job shall save to: then there is a line tiers=[…] here to paste"
    if len(cadences) < 2:
        return "Nothing could be written, see above: so there is no line tiers=[…] to paste"
    if job.step_s is None:
        return "Give --step-s: then there is a line tiers=[…] here to paste"
    line = tiers_line(job, cadences, places, speed, mended=True)
    return f"Once the problems above are mended: {line}"
