"""A whole job at any scale: what it is, what happens to it, where it saves, and what follows (`ckpt.goodput.model`).

    Job, Faults, Machine -> places() -> cadences() -> plan() -> Plan; afford() is the inverse: what would it take

Cadences follow from all the rest, so that whatever is varied is solved with the cadences that it would have.

Every default has a source: measured by a benchmark of this repository, published, or assumed and said to be. What a run
has measured takes their place, see `measured`. Everything is pure. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from ckpt.errors import UsageError
from ckpt.goodput.ledger import Account, in_order
from ckpt.goodput.model import (
    BUSY,
    BUSY_FAR,
    DAY_S,
    LEAST_FAR_S,
    Costs,
    Forecast,
    PlaceCost,
    best_interval,
    nice_steps,
    positive,
    predict,
)

GB = 1e9
PIECE = 16 << 20  # of an upload
REQUESTS = 10  # of a rank and a checkpoint, besides its pieces
GROWN_DAYS = 30  # a place that keeps all is shown as it is after so many days

# -- what a job is, and what happens to it --

CLASSES = ("process", "host", "node", "all")
"""Of faults, by what is gone: the trainer, while the writer on its node lives; all processes and memory of a node whose
disk stays (a reboot, a container that is killed); the node; the memory and the local disks of all nodes."""

LLAMA3: dict[str, tuple[int, str]] = {
    "faulty GPU": (148, "node"),
    "GPU HBM3 memory": (72, "process"),
    "software bug": (54, "process"),
    "network switch or cable": (35, "process"),
    "host maintenance": (32, "node"),
    "GPU SRAM": (19, "process"),
    "GPU system processor": (17, "process"),
    "NIC": (7, "node"),
    "NCCL watchdog timeout": (7, "process"),
    "silent data corruption": (6, "node"),
    "GPU thermal interface, sensor": (6, "node"),
    "SSD": (3, "node"),
    "power supply": (3, "node"),
    "server chassis": (2, "node"),
    "IO expansion board": (2, "node"),
    "dependency": (2, "process"),
    "CPU": (2, "node"),
    "system memory": (2, "node"),
}
"""Unexpected interruptions of Llama 3 in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5). The class of each is our
assumption: a GPU whose memory or firmware fails is reset and its host lives on; what is broken is replaced."""
LLAMA3_MTBF_S = 54 * DAY_S / sum(count for count, _ in LLAMA3.values())
LLAMA3_GPUS = 16384
ALL_SHARE = 0.01  # assumed: none of that table; a power cut, or a job that has to move
HANGS = (35 + 7) / 419  # assumed: what that table calls network and watchdog begins as a hang


def _shares() -> dict[str, float]:
    """By class: 49 % process, 50 % node, 1 % all."""
    total = sum(count for count, _ in LLAMA3.values())
    process = sum(count for count, kind in LLAMA3.values() if kind == "process")
    near = 1 - ALL_SHARE
    return {"process": near * process / total, "host": 0.0, "node": near * (1 - process / total), "all": ALL_SHARE}


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """`state`: bytes over all ranks, nothing twice; `per_node`: ranks of a node."""

    gpus: int
    state: float
    step_s: float
    per_node: int = 8
    days: float = 54.0

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)

    @property
    def rank_bytes(self) -> float:
        return self.state / self.gpus

    @property
    def node_bytes(self) -> float:
        return self.rank_bytes * min(self.per_node, self.gpus)


@dataclass(frozen=True, slots=True)
class Faults:
    """`mtbf_s`: between interruptions of the whole job; `shares`: by class; `hangs`: how many of them are hangs;
    `crash_s`, `hang_s`: until they are noticed; `restart_s`: from there to restore()."""

    mtbf_s: float
    shares: Mapping[str, float] = field(default_factory=_shares)
    hangs: float = HANGS
    crash_s: float = 0.002  # measured: make bench-faults, one node
    hang_s: float = 60.0
    restart_s: float = 60.0

    @property
    def perceive_s(self) -> float:
        return (1 - self.hangs) * self.crash_s + self.hangs * self.hang_s


def scaled_mtbf(gpus: int, mtbf_s: float = LLAMA3_MTBF_S, of_gpus: int = LLAMA3_GPUS) -> float:
    """From one fleet to another: faults per GPU and hour are the same."""
    return mtbf_s * of_gpus / gpus


def hang_s(step_s: float, factor: float = 10.0, min_s: float = 30.0) -> float:
    """How long a hang is not noticed, by on_hang(): so long after the last step, and on average it began half a step
    after that. 1 s is for looking at all ranks (measured: 0.8 to 1.2 s, examples/faults.py)."""
    return max(min_s, factor * step_s) + 1.0 - step_s / 2


@dataclass(frozen=True, slots=True)
class Machine:
    """What moves bytes. `SOURCES` says where each default is from."""

    pcie: float = 25e9
    network: float = 5e9
    disk_write: float = 2e9
    disk_read: float = 3e9
    store_write: float = 0.37e9
    store_read: float = 1.23e9
    store_write_all: float = 200e9
    store_read_all: float = 400e9
    cores: float = 96.0
    host_memory: float = 2e12
    felt: float = 0.1
    beside: float = 0.1
    blocks_s: float = 0.002
    open_s: float = 0.8
    cpu_disk: float = 0.24
    cpu_network: float = 0.5
    cpu_store: float = 0.91


SOURCES = {
    "pcie": ("of a GPU to host memory", "assumed: PCIe 4.0 x16; no GPU was measured"),
    "network": ("between nodes, beside training", "assumed"),
    "disk_write": ("of a node's disk", "assumed"),
    "disk_read": ("of a node's disk", "assumed"),
    "store_write": ("a node, to the shared place", "measured: make bench-storage, two cores"),
    "store_read": ("a node, from the shared place", "measured: make bench-storage, two cores"),
    "store_write_all": ("all nodes together", "assumed"),
    "store_read_all": ("all nodes together", "assumed"),
    "cores": ("of a node", "assumed; background work is spread over all of them"),
    "host_memory": ("of a node", "assumed"),
    "felt": ("of the CPU time of saving is felt by training", "assumed: GPUs train, and most cores idle; else 1"),
    "beside": ("of the time of a copy to host memory is felt", "assumed: copy engines work beside compute"),
    "blocks_s": ("that step() blocks for a snapshot", "measured: make bench, 1.6 ms"),
    "open_s": (
        "that a restore takes besides moving bytes",
        "measured: opening 0.4 s (make bench), plan 0.4 s (make bench-scale)",
    ),
    "cpu_disk": ("s of CPU time a GB, to a folder", "measured: make bench"),
    "cpu_network": ("s of CPU time a GB, at each end of the network", "assumed"),
    "cpu_store": ("s of CPU time a GB, to an object store", "measured: make bench-storage"),
}


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """One that may be saved to. `cost_s`, `write_s`, `restore_s`: as in `PlaceCost`; `survives`: classes of faults;
    `every`: steps, None: to be found, 0: never; `keep`: checkpoints, or snapshots in memory, 0: all; `share`: of
    training that saves to it may take at the most; `note`: what set `every`, if it was not the faults."""

    name: str
    cost_s: float
    write_s: float
    restore_s: float
    survives: tuple[str, ...]
    every: int | None = None
    keep: int = 3
    share: float = 1.0
    note: str = ""


MEMORY, REPLICA, LOCAL, SHARED = "memory", "replica", "local", "shared"
NAMES = (MEMORY, REPLICA, LOCAL, SHARED)


def places(
    job: PlannedJob,
    machine: Machine | None = None,
    names: Iterable[str] = (MEMORY, REPLICA, SHARED),
    budget: float = 0.01,
) -> list[PlannedTier]:
    """What saves and restores of this job take, the nearest place first. The replica is that of Memory(replicas=2).

    Bytes are copied off the GPU beside training, and from there on they move in the background; that takes CPU time, of
    which training feels a part, by a core's share of a node."""
    m = machine or Machine()
    copy, send = job.rank_bytes / m.pcie, job.node_bytes / m.network
    write = copy + job.state / min(m.store_write * job.nodes, m.store_write_all)
    read = job.state / min(m.store_read * job.nodes, m.store_read_all)
    here = m.felt * job.node_bytes / GB / m.cores  # seconds of training for each CPU-s a GB
    all_of_them = [
        PlannedTier(MEMORY, m.blocks_s + m.beside * copy, copy, m.open_s + copy, ("process",), share=budget),
        PlannedTier(
            REPLICA, 2 * m.cpu_network * here, copy + send, m.open_s + copy + send, ("process", "host", "node")
        ),
        PlannedTier(
            LOCAL,
            m.cpu_disk * here,
            copy + job.node_bytes / m.disk_write,
            m.open_s + copy + job.node_bytes / m.disk_read,
            ("process", "host"),
        ),
        PlannedTier(SHARED, m.cpu_store * here, write, m.open_s + copy + read, CLASSES),
    ]
    wanted = set(names)
    return [place for place in all_of_them if place.name in wanted]


# -- a plan --


def served(chosen: Sequence[PlannedTier], shares: Mapping[str, float], step_s: float) -> dict[str, float]:
    """The share of faults after which each place is restored from: the one with the newest step, on average. Where no
    cadence is known yet, the nearest. UsageError where nothing survives."""
    found = dict.fromkeys((place.name for place in chosen), 0.0)
    for kind, share in shares.items():
        left = [place for place in chosen if kind in place.survives and place.every != 0]
        if share > 0 and not left:
            raise UsageError(f"nothing survives {share:.1%} of the faults ({kind}): add a place, or change the shares")
        if share > 0:
            newest = min(left, key=lambda p: 0.0 if p.every is None else p.every * step_s / 2 + p.write_s)
            found[newest.name] += share
    return found


BUSY_FARS = (BUSY_FAR, 5.0, 2.0, 1.0)  # what all share is busy for a tenth of the time, a fifth, half, all of it
COLLAPSE = 0.01  # effective time that the first of these may take, before the next is tried


def cadences(job: PlannedJob, faults: Faults, chosen: Sequence[PlannedTier]) -> list[PlannedTier]:
    """With `every` found for each place where it was not given: 1, 2, 5, 10, 20, … steps, and a note where something
    else than the faults has set it.

    A place is needed by those faults that the nearer ones do not survive, and is best saved to by `best_interval`; a
    disk may be busy for half of the time, what all share for a tenth, unless that takes a hundredth of the effective
    time or more. One write is over before the next begins, also where `every` was given. The replica is sent what
    memory has, as often as the network allows. What serves nothing, and costs something, is not saved to."""
    best = _without_idle(job, faults, chosen, BUSY_FAR)
    before = expected(job, faults, best).effective
    far = next((place for place in best if place.name == SHARED and place.note), None)
    if far is None or before > 1 - COLLAPSE or any(place.name == SHARED and place.every for place in chosen):
        return best
    tried = [best, *(_without_idle(job, faults, chosen, busy) for busy in BUSY_FARS[1:])]
    effective = [expected(job, faults, one).effective for one in tried]
    gentle = next(i for i, share in enumerate(effective) if share >= max(effective) - COLLAPSE)
    if gentle == 0:
        return best
    part = {5.0: "for a fifth of the time", 2.0: "for half of the time"}.get(BUSY_FARS[gentle], "all the time")
    note = (
        f"the shared place may be busy {part} here: by no more than a tenth, as it should be since"
        f" others pay for it too, the effective training time would be {100 * before:.2f} %"
    )
    return [replace(one, note=note) if one.name == SHARED else one for one in tried[gentle]]


def _without_idle(job: PlannedJob, faults: Faults, chosen: Sequence[PlannedTier], busy: float) -> list[PlannedTier]:
    """Cadences, without the places that serve nothing, where that is better: those whose `every` was not given."""
    chosen = list(chosen)
    found = _cadences(job, faults, chosen, busy)
    while True:
        now = expected(job, faults, found).effective
        serving = served(found, faults.shares, job.step_s)
        idle = [one.name for one in found if one.every and not serving[one.name]]
        for place in chosen:
            if place.name not in idle or place.every is not None:
                continue
            if place.name == MEMORY and any(one.name == REPLICA and serving[REPLICA] for one in found):
                continue  # the replica is sent what memory has
            fewer = [replace(one, every=0) if one.name == place.name else one for one in chosen]
            better = _cadences(job, faults, fewer, busy)
            if expected(job, faults, better).effective > now:
                chosen, found = fewer, better
                break
        else:
            return found


def _cadences(job: PlannedJob, faults: Faults, chosen: Sequence[PlannedTier], busy: float) -> list[PlannedTier]:
    free = [replace(place, every=None if place.every else place.every) for place in chosen]
    needed = served(free, faults.shares, job.step_s)
    replica = next((place for place in chosen if place.name == REPLICA and place.every != 0), None)
    found = list[PlannedTier]()
    for place in chosen:
        every, note = place.every, ""
        if place.name == REPLICA:
            memory = next((one.every or 0 for one in found if one.name == MEMORY), 0)
            lap = memory * job.step_s
            every = 0 if every == 0 or not memory else memory * max(1, math.ceil(_apart_s(place) / lap - 1e-9))
            if every and every > memory:
                note = f"of the snapshots, every {every // memory}. is sent there: the network takes no more"
        elif every is None:
            share, cost = needed[place.name], place.cost_s
            if place.name == MEMORY and replica is not None:
                share, cost = share + needed[REPLICA], cost + replica.cost_s
            every, note = _every(place, cost, faults.mtbf_s / share if share else math.inf, job.step_s, busy)
        elif every:
            least = math.ceil(_apart_s(place) / job.step_s - 1e-9)
            if every < least:
                note = f"{place.name} is saved to every {least} steps and not every {every}: {OVERLAP}"
                every = least
        found.append(replace(place, every=every, note=note))
    return found


OVERLAP = "a write has to be over before the next one begins"


def _apart_s(place: PlannedTier) -> float:
    """Seconds of training between two saves, at the least. What a save takes from training is time as well."""
    return max(0.0, place.write_s - place.cost_s)


def _every(place: PlannedTier, cost_s: float, mtbf_s: float, step_s: float, busy: float) -> tuple[int, str]:
    """0 if it is not needed, whatever a save costs. And what else has set it than the faults."""
    if math.isinf(mtbf_s):
        return 0, ""
    bounds = [(_apart_s(place), OVERLAP)]
    if place.name == MEMORY:
        bounds.append((cost_s / place.share, f"it may take {place.share:.3g} of the training time (--budget)"))
    elif place.name == SHARED:
        bounds.append((busy * place.write_s, "what others pay for too may be busy for a tenth of the time"))
        bounds.append((LEAST_FAR_S * busy / BUSY_FAR, "it is saved to once a minute at most"))
    else:
        bounds.append((BUSY * place.write_s, "it may be busy for half of the time"))
    least, why = max(bounds)
    best = best_interval(cost_s, mtbf_s)
    steps, wanted = nice_steps(max(best, least), step_s), nice_steps(best, step_s)
    if steps * step_s < least * (1 - 1e-9):  # a bound is not rounded down
        steps = next(n for n in _nice_from(steps) if n * step_s >= least * (1 - 1e-9))
        if place.name == SHARED and busy < BUSY_FAR:  # every step counts then
            steps = min(steps, _two_digits(math.ceil(least / step_s - 1e-9)))
    note = f"{place.name} is saved to every {steps:,} steps, where every {wanted:,} would lose least: {why}"
    return steps, "" if steps == wanted else note


def _nice_from(steps: int) -> Iterable[int]:
    power: int = 10 ** (len(str(steps)) - 1)
    return (n * power for n in (1, 2, 5, 10, 20) if n * power >= steps)


def _two_digits(steps: int) -> int:
    """Rounded up."""
    power: int = 10 ** max(0, len(str(steps)) - 2)
    return -(-steps // power) * power


def expected(job: PlannedJob, faults: Faults, chosen: Sequence[PlannedTier]) -> Forecast:
    """Once every place has its cadence."""
    return predict(costs_of(job, faults, chosen), faults.mtbf_s, job.step_s)


def costs_of(job: PlannedJob, faults: Faults, chosen: Sequence[PlannedTier]) -> Costs:
    """For `predict`, once every place has its cadence."""
    shares = served(chosen, faults.shares, job.step_s)
    return Costs(
        faults.perceive_s,
        faults.restart_s,
        [
            PlaceCost(
                place.name,
                place.cost_s,
                place.every * job.step_s if place.every else math.inf,
                place.restore_s,
                place.write_s,
                shares[place.name],
            )
            for place in chosen
        ],
    )


@dataclass(frozen=True, slots=True)
class PlannedStorage:
    """Of one place. `kept`, `bytes`: of all that it holds at most, or, if `all` stay, after `GROWN_DAYS`; `node`,
    `all_nodes`: bytes a second while it is written to; `mean`: over time; `objects`: requests a checkpoint, and `day`:
    a day, 0 for what is no object store."""

    name: str
    checkpoint: float
    kept: int
    bytes: float
    node: float
    all_nodes: float
    mean: float
    objects: int = 0
    day: float = 0.0
    all: bool = False


def storage(job: PlannedJob, chosen: Sequence[PlannedTier]) -> list[PlannedStorage]:
    """Full, raw checkpoints: what a dense training with AdamW has, uncompressed."""
    durable = sum(place.name in (LOCAL, SHARED) and place.every != 0 for place in chosen)
    found = []
    for place in chosen:
        if not place.every:
            continue
        every_s = place.every * job.step_s
        kept = place.keep + (durable if place.name in (MEMORY, REPLICA) else 1)
        if not place.keep:
            kept = math.ceil(GROWN_DAYS * DAY_S / every_s)
        rate = job.state / max(place.write_s, 1e-9)
        objects = 0
        if place.name == SHARED:
            objects = job.gpus * (math.ceil(job.rank_bytes / PIECE) + REQUESTS)
        day = objects * DAY_S / every_s
        found.append(
            PlannedStorage(
                place.name,
                job.state,
                kept,
                kept * job.state,
                rate / job.nodes,
                rate,
                min(rate, job.state / every_s),
                objects,
                day,
                not place.keep,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Afford:
    """What still gives `goal`, all else as it is but for the cadences; None: nothing would. `invalid_s`: what a fault
    may take in all; `place`: of `save_cost_s`, the nearest that is saved to. Seconds have three digits, are rounded to
    the safe side, and give the goal as they are; `ANY_S` says that any would."""

    goal: float
    invalid_s: float
    restart_s: float | None
    perceive_s: float | None
    place: str
    save_cost_s: float | None
    mtbf_s: float | None


ANY_S = 1e10
SHORTEST_S = 1e-4


def afford(job: PlannedJob, faults: Faults, chosen: Sequence[PlannedTier], goal: float) -> Afford:
    """Restart, perceiving and a save's cost at the most, the time between faults at the least. `chosen`: as the user
    said it, with no cadence where none was given, since each that is tried has its own."""
    if not 0 < goal < 1:
        raise UsageError(f"--goal: {goal!r} makes no sense: it is a share between 0 and 1, such as 0.995 or 99.5%")
    near = next((one.name for one in cadences(job, faults, chosen) if one.every), chosen[0].name)

    def met(faults: Faults, chosen: Sequence[PlannedTier] = chosen) -> bool:
        return expected(job, faults, cadences(job, faults, chosen)).effective >= goal

    def saving(seconds: float) -> bool:
        return met(faults, [replace(one, cost_s=seconds) if one.name == near else one for one in chosen])

    return Afford(
        goal,
        (1 - goal) * faults.mtbf_s,
        _at_most(lambda seconds: met(replace(faults, restart_s=seconds))),
        _at_most(lambda seconds: met(replace(faults, hangs=1.0, hang_s=seconds))),
        near,
        _at_most(saving),
        _at_least(lambda seconds: met(replace(faults, mtbf_s=seconds)), job.step_s),
    )


Good = Callable[[float], bool]


def _at_most(good: Good) -> float | None:
    """The highest that is good, where low ones are; None if 0 is not."""
    if not good(0.0):
        return None
    if good(ANY_S):
        return ANY_S
    if not good(SHORTEST_S):
        return 0.0
    return next((one for one in _shown(_turn(good, SHORTEST_S, ANY_S), -1) if good(one)), 0.0)


def _at_least(good: Good, least: float) -> float | None:
    """The lowest that is good, from `least` on, where high ones are; None if none is."""
    if good(least):
        return least
    if not good(ANY_S):
        return None
    return next((one for one in _shown(_turn(lambda x: not good(x), least, ANY_S), 1) if good(one)), None)


def _turn(good: Good, low: float, high: float) -> float:
    """From where on it is no longer good, as `low` is, and `high` is not."""
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _shown(seconds: float, way: int) -> Iterable[float]:
    """With three digits in the unit that `in_unit` chooses: the nearest that is not on the wrong side, and some more,
    since cadences come in steps."""
    value, _, unit = in_unit(seconds)
    digit = 10.0 ** (math.floor(math.log10(value)) - 2)
    first = math.floor(value / digit * (1 + 1e-12)) if way < 0 else math.ceil(value / digit * (1 - 1e-12))
    return (float(f"{(first + way * more) * digit:.6g}") * unit for more in range(200) if first + way * more > 0)


_UNITS = ((1.0, 1e-3, "ms"), (100.0, 1.0, "s"), (6000.0, 60.0, "min"), (72 * 3600.0, 3600.0, "h"))


def in_unit(seconds: float) -> tuple[float, str, float]:
    """The number, its unit, and how many seconds that is."""
    unit, name = next(((unit, name) for most, unit, name in _UNITS if seconds < most), (DAY_S, "d"))
    return seconds / unit, name, unit


RESTARTS = (10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """`restarts`: how long one takes, and the effective training time then."""

    job: PlannedJob
    faults: Faults
    places: tuple[PlannedTier, ...]
    forecast: Forecast
    storage: tuple[PlannedStorage, ...]
    afford: Afford
    restarts: tuple[tuple[float, float], ...]

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["forecast"]["invalid_s"] = self.forecast.invalid_s
        for one in data["forecast"]["places"]:
            one["every_s"] = None if math.isinf(one["every_s"]) else one["every_s"]
        return data


def plan(job: PlannedJob, faults: Faults, chosen: Sequence[PlannedTier], goal: float = 0.995) -> Plan:
    """UsageError for what makes no sense."""
    check(job, faults)
    can = afford(job, faults, chosen, goal)
    found = cadences(job, faults, chosen)
    table = []
    for seconds in RESTARTS:
        other = replace(faults, restart_s=seconds)
        table.append((seconds, expected(job, other, cadences(job, other, chosen)).effective))
    forecast = expected(job, faults, found)
    return Plan(job, faults, tuple(found), forecast, tuple(storage(job, found)), can, tuple(table))


def check(job: PlannedJob, faults: Faults) -> None:
    """UsageError, in the words of `ckpt plan`."""
    positive("--gpus", job.gpus, most=1e9)
    positive("--per-node", job.per_node, most=1e6)
    positive("the state", job.state, most=1e18)
    positive("--step-s", job.step_s)
    positive("--days", job.days, most=1e6)
    positive("--mtbf", faults.mtbf_s)
    positive("--hangs", faults.hangs, zero=True, most=1)
    for name, value in (("--crash", faults.crash_s), ("--hang", faults.hang_s), ("--restart", faults.restart_s)):
        positive(name, value, zero=True)
    if job.step_s > faults.mtbf_s:
        raise UsageError(
            f"--step-s: a step of {job.step_s:g} s is longer than the time between faults, {faults.mtbf_s:g} s:"
            " hardly one would ever be done"
        )
    if unknown := set(faults.shares) - set(CLASSES):
        raise UsageError(f"--share: there is no {', '.join(sorted(unknown))}: give {', '.join(CLASSES)}")
    for name, share in faults.shares.items():
        positive(f"--share {name}", share, zero=True, most=1)
    if abs(sum(faults.shares.values()) - 1) > 1e-6:
        raise UsageError(f"--share: the shares sum to {sum(faults.shares.values()):g}, and it has to be 1")


# -- costs that were measured --

PLACE_COSTS = ("cost_s", "write_s", "restore_s")
FAULT_COSTS = ("crash_s", "hang_s", "hangs", "restart_s")


def with_costs(
    given: Mapping[str, Any],
    job: PlannedJob,
    faults: Faults,
    chosen: Sequence[PlannedTier],
    machine: Machine | None = None,
) -> tuple[Faults, list[PlannedTier]]:
    """What was measured or given elsewhere in the place of the defaults: `FAULT_COSTS`, `places` with `PLACE_COSTS`,
    all as they are in `Plan`; `rank_bytes` that a rank had there, and `ranks`, if known.

    What moves bytes is scaled to what a rank of this job has, what does not is not; and more ranks than there were do
    not get more out of the shared place than the machine says. UsageError if it is something else."""
    m = machine or Machine()
    try:
        changes: dict[str, Any] = {
            name: positive(name, given[name], zero=True) for name in FAULT_COSTS if given.get(name) is not None
        }
        scale, ranks = scale_of(given, job), ranks_of(given)
        found = {name: dict(one) for name, one in (given.get("places") or {}).items()}
        if unknown := set(found) - set(NAMES):
            raise UsageError(f"there is no place {', '.join(sorted(unknown))}: {', '.join(NAMES)}")
        better = []
        for place in chosen:
            new: dict[str, float] = {}
            for name, value in found.get(place.name, {}).items():
                if name in PLACE_COSTS and value is not None:
                    theirs = positive(f"{name} of {place.name}", value, zero=True)
                    new[name] = _scaled(theirs, scale, _fixed(place.name, name, m), getattr(place, name))
            if place.name == SHARED and ranks is not None and ranks < job.gpus:
                for name, rate in (("write_s", m.store_write_all), ("restore_s", m.store_read_all)):
                    if name in new:
                        new[name] = max(new[name], job.state / rate)
            better.append(replace(place, **new))  # type: ignore[arg-type]
        return replace(faults, **changes), better
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"these are no costs: {error}") from None


def scale_of(given: Mapping[str, Any], job: PlannedJob) -> float:
    """How many times the bytes of a rank there a rank of this job has."""
    size = given.get("rank_bytes")
    scale = job.rank_bytes / positive("rank_bytes", size, most=1e18) if size is not None else 1.0
    return 1.0 if abs(scale - 1) < 1e-9 else scale


def ranks_of(given: Mapping[str, Any]) -> int | None:
    """None: not known."""
    return None if given.get("ranks") is None else int(positive("ranks", given["ranks"], most=1e9))


def _fixed(place: str, name: str, machine: Machine) -> float:
    """What does not depend on bytes. A durable write commits, as a restore opens: it is taken to last as long at most,
    and to cost what a snapshot does, since nobody has measured either apart from bytes."""
    durable = place in (LOCAL, SHARED)
    if name == "restore_s" or (name == "write_s" and durable):
        return machine.open_s
    return machine.blocks_s if name == "cost_s" and (durable or place == MEMORY) else 0.0


def _scaled(value: float, scale: float, fixed: float, usual: float) -> float:
    """To `scale` times the bytes. `usual`: what is assumed there; how much of what was measured is fixed is not known,
    so that more bytes take at least that, unless all that was measured, scaled, is less."""
    found = min(value, fixed) + scale * max(0.0, value - fixed)
    return max(found, min(scale * value, usual)) if scale > 1 else found


@dataclass(frozen=True, slots=True)
class Measured:
    """What the accounts of a run say. None: not known. By place ("memory" or a URL): `cost_s`, what a save takes from
    training, `write_s`, until it is durable, `restore_s`, of a restore from it; medians but for the first, which the
    newest `Decision` says or, of memory, all rows together. `rank_bytes`: of a checkpoint, of one rank."""

    world: int = 1
    step_s: float | None = None
    training_s: float = 0.0
    interruptions: int = 0
    crash_s: float | None = None
    hang_s: float | None = None
    hangs: float | None = None
    restart_s: float | None = None
    rank_bytes: float | None = None
    cost_s: Mapping[str, float] = field(default_factory=dict)
    write_s: Mapping[str, float] = field(default_factory=dict)
    restore_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def mtbf_s(self) -> float | None:
        return self.training_s / self.interruptions if self.interruptions and self.training_s > 0 else None

    @property
    def urls(self) -> list[str]:
        """Durable places, in the order of the tiers as far as that is known."""
        return [url for url in dict.fromkeys([*self.write_s, *self.restore_s, *self.cost_s]) if url != MEMORY]

    def costs(self) -> dict[str, Any]:
        """For `with_costs`. The last durable place is the shared one, the one before it is local."""
        names = {MEMORY: MEMORY, **dict(zip(self.urls[-2:], (LOCAL, SHARED)[-len(self.urls[-2:]) :], strict=True))}
        found: dict[str, Any] = {name: getattr(self, name) for name in (*FAULT_COSTS, "rank_bytes")}
        found["ranks"] = self.world
        found["places"] = {
            name: {kind: getattr(self, kind).get(source) for kind in PLACE_COSTS} for source, name in names.items()
        }
        return found


def measured(accounts: Iterable[Account]) -> Measured:
    """Of all incarnations; of several accounts of one, the lowest rank's."""
    lowest: dict[int, Account] = {}
    for account in sorted(accounts, key=lambda one: -one.rank):
        lowest[account.number] = account
    history = in_order(lowest.values())
    if not history:
        return Measured()
    step_s = usual_step(history)
    ends = [_Between(one, after, step_s or 0.0) for one, after in pairwise(history)]
    ends = [one for one in ends if one.interrupted]
    last = history[-1]
    count = len(ends) + last.failed
    seen = [one for one in ends if one.perceive_s is not None]
    saves: dict[str, tuple[int, float, int]] = {}
    restores: dict[str, list[float]] = {}
    costs: dict[str, float] = {}
    for account in history:
        for url, one in account.saves.items():
            number, seconds, nbytes = saves.get(url, (0, 0.0, 0))
            saves[url] = number + one.count, seconds + one.seconds, nbytes + one.nbytes
        for restore in account.restores:
            if restore.step is not None:
                restores.setdefault(restore.source, []).append(max(0.0, restore.seconds))
        for decision in account.decisions:
            costs |= {place: max(0.0, cost) for place, cost in decision.costs.items()}
    rows = [row for account in history for row in account.rows]
    snapshots = sum(row.saves for row in rows)
    if MEMORY not in costs and snapshots:
        costs[MEMORY] = max(0.0, sum(row.stalled + row.slowed for row in rows)) / snapshots
    written = [nbytes / number for number, _, nbytes in saves.values() if number and nbytes]
    return Measured(
        world=last.world,
        step_s=step_s,
        training_s=sum(max(0.0, row.seconds) for row in rows),
        interruptions=count,
        crash_s=_middle(one.perceive_s for one in seen if not one.hang),
        hang_s=_middle(one.perceive_s for one in seen if one.hang),
        hangs=sum(one.hang for one in seen) / len(seen) if len(seen) >= 10 else None,
        restart_s=_middle(one.restart_s for one in ends),
        rank_bytes=max(written, default=None),
        cost_s=costs,
        write_s={url: seconds / number for url, (number, seconds, _) in saves.items() if number},
        restore_s={source: median(found) for source, found in restores.items()},
    )


def usual_step(accounts: Iterable[Account]) -> float | None:
    """Seconds of a step beside which nothing is saved: the median over all steps, without the first of each start."""
    found = []
    for account in accounts:
        rows = [row for row in account.rows[1:] if row.steps > 0] or [row for row in account.rows if row.steps > 0]
        found += [((row.seconds - row.stalled - max(0.0, row.slowed)) / row.steps, row.steps) for row in rows]
    found = sorted(one for one in found if one[0] > 0)
    half, past = sum(steps for _, steps in found) / 2, 0
    for seconds, steps in found:
        past += steps
        if past >= half:
            return seconds
    return None


class _Between:
    """What happened from one incarnation to the next."""

    def __init__(self, before: Account, after: Account, step_s: float) -> None:
        end = before.end
        self.interrupted = end is None or before.failed
        fatal = [seen for seen in before.faults if seen.last_thing(before.beat)]  # others were survived
        self.hang = any(seen.kind == "hang" for seen in fatal)
        self.perceive_s: float | None = None
        self.restart_s: float | None = None
        if end is None or not self.interrupted:
            return
        noticed = min([end.at, *(seen.at for seen in fatal)])
        if before.beat:
            self.perceive_s = max(0.0, noticed - before.beat - step_s)
        restored = after.restores[0].at if after.restores else after.opened
        same = before.boot == after.boot and before.boot != ""
        took = restored - noticed if same else after.wall(restored) - before.wall(noticed)
        warm = after.rows[0].seconds - step_s if after.rows and after.rows[0].steps == 1 else 0.0
        self.restart_s = max(0.0, took) + max(0.0, warm)


def _middle(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None
