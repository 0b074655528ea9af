"""Forecast for a planned job of any size: its tiers, save intervals and goodput (`ckpt.core.cadence.cadence`). No I/O.

    PlannedJob, numbers -> tiers() -> cadences() -> plan() -> Plan

Every number has a source: given by the user, measured by a run (`measured`), measured by a benchmark of this
repository, published, or assumed and marked as assumed. Save intervals are computed from all other numbers, also when
one of these is varied. Times are seconds, and sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ckpt.core.cadence.cadence import (
    FLEET_GPU_S,
    Costs,
    Forecast,
    TierCost,
    best_interval,
    least_interval,
    positive,
    predict,
    steps_apart,
)
from ckpt.core.cadence.ledger import Account, in_order
from ckpt.errors import UsageError
from ckpt.tools.observe.goodput.accounting import settled

GB = 1e9
MEMORY, REPLICA, SHARED = TIERS = ("memory", "replica", "shared")
PARTS = ("cost_s", "write_s", "restore_s")  # costs of a tier that a run can measure: see TierCost
SURVIVES = {MEMORY: ("process",), REPLICA: ("process", "node"), SHARED: ("process", "node", "all")}

FAULTS_ENOUGH, HANGS_ENOUGH = 3, 10  # minimum interruptions to compute a rate, and to compute the share of hangs


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a plan needs: its default, its unit, its meaning, and its source."""

    value: float
    kind: str
    what: str
    source: str


NUMBERS = {
    "mtbf_s": Number(
        FLEET_GPU_S, "duration", "between interruptions of the job", "419 interruptions of Llama 3 in 54 days, per GPU"
    ),
    "hang_s": Number(30.0, "duration", "until a hang is detected", "on_hang(): ten steps, 30 s"),
    "restart_s": Number(60.0, "duration", "from detecting a fault to restore()", "assumed: matters most"),
    "crash_s": Number(0.002, "duration", "until a crash is detected", "measured: make bench-faults; not for nodes"),
    "hang_share": Number(42 / 419, "share", "of the faults are hangs", "network and watchdog, Llama 3's table 5"),
    "node_share": Number(0.99 * 207 / 419, "share", "of the faults also end a node", "assumed from Llama 3's causes"),
    "all_share": Number(0.01, "share", "of the faults end all nodes", "a guess: a power cut, or a job that moves"),
    "budget": Number(0.01, "share", "of training that saving to memory may take", 'as for every="auto"'),
    "pcie": Number(25e9, "rate", "of a GPU to host memory", "assumed: PCIe 4.0 x16; no GPU was measured"),
    "network": Number(5e9, "rate", "between nodes, during training", "assumed"),
    "store_write": Number(0.37e9, "rate", "a node, to the shared tier", "measured: make bench-storage, two cores"),
    "store_read": Number(1.23e9, "rate", "a node, from the shared tier", "measured: make bench-storage, two cores"),
    "store_write_all": Number(200e9, "rate", "of all nodes to the shared tier", "assumed"),
    "store_read_all": Number(400e9, "rate", "of all nodes from the shared tier", "assumed"),
    "cores": Number(96.0, "count", "cores of a node, shared by background work", "assumed"),
    "felt": Number(0.1, "share", "of the CPU time of saving slows training", "assumed: GPUs train, else 100 %"),
    "beside": Number(0.1, "share", "of a copy to host memory slows training", "assumed: copy engines run in parallel"),
    "blocks_s": Number(0.002, "duration", "that step() blocks for a snapshot", "measured: make bench, 1.6 ms"),
    "open_s": Number(0.8, "duration", "of a restore without moving bytes", "measured: make bench, make bench-scale"),
    "cpu_network": Number(0.5, "count", "s of CPU time a GB, at each end of the network", "assumed"),
    "cpu_store": Number(0.91, "count", "s of CPU time a GB, to an object store", "measured: make bench-storage"),
}
"""A plan also accepts the measured costs of a tier, as <tier>.<part>, in seconds."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A planned job. `state`: bytes over all ranks without replicas; `per_node`: ranks per node."""

    gpus: int
    state: float
    step_s: float
    per_node: int = 8

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)

    @property
    def rank_bytes(self) -> float:
        return self.state / self.gpus


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier of the planned job. `survives`: the kinds of faults that it survives. `every`: save interval in steps, 0
    for never, None if it is still to be computed. The costs are those in `TierCost`."""

    name: str
    cost_s: float
    write_s: float
    restore_s: float
    survives: tuple[str, ...]
    every: int | None = None


Numbers = Mapping[str, float]


def defaults(job: PlannedJob) -> dict[str, float]:
    """Return the default numbers. on_hang() detects a hang after ten steps without progress, but not before 30 s."""
    n = {name: number.value for name, number in NUMBERS.items()}
    n["mtbf_s"] /= job.gpus
    n["hang_s"] = max(n["hang_s"], 10 * job.step_s) + 1.0 - job.step_s / 2
    return n


def shares(n: Numbers) -> dict[str, float]:
    """Return the shares of the faults that end the trainer, its node, or all nodes."""
    found = {"node": n["node_share"], "all": n["all_share"]}
    process = 1 - sum(found.values())
    if min(process, *found.values()) < 0:
        raise UsageError("the shares of faults sum to more than 1, or one is negative")
    return {"process": process, **found}


def perceive_s(n: Numbers) -> float:
    return (1 - n["hang_share"]) * n["crash_s"] + n["hang_share"] * n["hang_s"]


def tiers(job: PlannedJob, n: Numbers) -> list[PlannedTier]:
    """Return the tiers with their costs, nearest first. Measured numbers take precedence. The replica is that of
    Memory(replicas=2), if there is another node. Copies from the GPU run in parallel with training, and all further
    copies in the background, where a share of their CPU time slows training."""
    node_bytes = job.rank_bytes * min(job.per_node, job.gpus)
    copy, send, opens = job.rank_bytes / n["pcie"], node_bytes / n["network"], n["open_s"] + job.rank_bytes / n["pcie"]
    put = job.state / min(n["store_write"] * job.nodes, n["store_write_all"])
    get = job.state / min(n["store_read"] * job.nodes, n["store_read_all"])
    felt = n["felt"] * node_bytes / GB / n["cores"]  # seconds by which one CPU-s per GB slows training
    both_ends = 2 * felt * n["cpu_network"]
    times = {  # calculated values, which measured ones replace below
        MEMORY: (n["blocks_s"] + n["beside"] * copy, copy, opens),
        REPLICA: (both_ends, copy + send, opens + send),
        SHARED: (felt * n["cpu_store"], copy + put, opens + get),
    }
    found = []
    for name, taken in times.items():
        if name != REPLICA or job.nodes > 1:
            cost_s, write_s, restore_s = (n.get(f"{name}.{part}", s) for part, s in zip(PARTS, taken, strict=True))
            found.append(PlannedTier(name, cost_s, write_s, restore_s, SURVIVES[name]))
    return found


# -- a plan --


def served(chosen: Sequence[PlannedTier], n: Numbers, step_s: float) -> dict[str, float]:
    """Return the share of the faults that are restored from each tier: the one with the newest step on average, or the
    nearest one if intervals are unknown. Raise UsageError if no tier survives a kind of fault."""
    found = dict.fromkeys((one.name for one in chosen), 0.0)
    for kind, share in shares(n).items():
        left = [one for one in chosen if kind in one.survives and one.every != 0]
        if share > 0 and not left:
            raise UsageError(f"nothing survives {share:.1%} of the faults ({kind}): add a tier, or change the shares")
        if share > 0:
            newest = min(left, key=lambda one: 0.0 if one.every is None else one.every * step_s / 2 + one.write_s)
            found[newest.name] += share
    return found


def cadences(job: PlannedJob, n: Numbers, chosen: Sequence[PlannedTier]) -> list[PlannedTier]:
    """Set `every` of the tiers. A tier is used for the faults that nearer tiers do not survive; if there are none,
    nothing is saved to it. A replica gets the snapshots that memory has, as often as the network allows."""
    needed = served([replace(one, every=None) for one in chosen], n, job.step_s)
    replica_s = sum(one.cost_s for one in chosen if one.name == REPLICA)
    found = list[PlannedTier]()
    for one in chosen:
        share = needed[one.name]
        if one.name == MEMORY:
            share += needed.get(REPLICA, 0.0)
            found.append(_with_cadence(one, one.cost_s + replica_s, share, job, n))
        elif one.name == REPLICA:
            lap, least = found[0].every or 0, math.ceil(max(0.0, one.write_s - one.cost_s) / job.step_s - 1e-9)
            found.append(replace(one, every=lap * max(1, math.ceil(least / lap)) if lap and share else 0))
        else:
            found.append(_with_cadence(one, one.cost_s, share, job, n))
    return found


def _with_cadence(one: PlannedTier, cost_s: float, share: float, job: PlannedJob, n: Numbers) -> PlannedTier:
    if not share:
        return replace(one, every=0)
    mtbf_s = n["mtbf_s"] / share
    if one.name == MEMORY:  # a write must end before the next one begins
        least_s = max(cost_s / n["budget"], one.write_s - cost_s)
    else:
        least_s = least_interval(one.write_s, mtbf_s, shared=True)
    return replace(one, every=steps_apart(best_interval(cost_s, mtbf_s), least_s, job.step_s))


def expected(job: PlannedJob, n: Numbers, chosen: Sequence[PlannedTier]) -> Forecast:
    """Forecast the goodput when every tier has its interval."""
    share = served(chosen, n, job.step_s)
    every_s = {tier.name: tier.every * job.step_s if tier.every else math.inf for tier in chosen}
    costs = [TierCost(t.name, t.cost_s, every_s[t.name], t.restore_s, t.write_s, share[t.name]) for t in chosen]
    return predict(Costs(perceive_s(n), n["restart_s"], costs), n["mtbf_s"])


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for a job. `restart_s`: longest restart with which the job reaches `goal`. `mtbf_s`: shortest MTBF with
    which it does, with adapted intervals. None: changing this number alone is not enough."""

    job: PlannedJob
    numbers: Numbers
    tiers: tuple[PlannedTier, ...]
    forecast: Forecast
    goal: float
    restart_s: float | None
    mtbf_s: float | None

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["forecast"]["invalid_s"] = self.forecast.invalid_s
        for one in data["forecast"]["tiers"]:
            one["every_s"] = None if math.isinf(one["every_s"]) else one["every_s"]
        return data


def plan(job: PlannedJob, n: Numbers, goal: float = 0.995) -> Plan:
    """Plan the tiers of a job. Raise UsageError for impossible numbers."""
    if not 0 < goal < 1:
        raise UsageError(f"--goal: {goal!r} must be a share between 0 and 1, for example 0.995 or 99.5%")
    if job.step_s > n["mtbf_s"]:
        raise UsageError(f"a step of {job.step_s:g} s is longer than the time between faults, {n['mtbf_s']:g} s")

    def effective(name: str, value: float) -> float:
        varied = {**n, name: value}
        return expected(job, varied, cadences(job, varied, tiers(job, n))).effective

    found = cadences(job, n, tiers(job, n))
    restart_s = _turn(lambda value: effective("restart_s", value) >= goal, 1e-3, 1e9)
    mtbf_s = _turn(lambda value: effective("mtbf_s", value) >= goal, 1e11, job.step_s)
    return Plan(job, n, tuple(found), expected(job, n, found), goal, restart_s, mtbf_s)


def _turn(good: Callable[[float], bool], fine: float, bad: float) -> float | None:
    """Return the value nearest to `bad` that is still good. Return None if `fine` is not good."""
    if not good(fine):
        return None
    for _ in range(60):
        middle = math.sqrt(fine * bad)
        fine, bad = (middle, bad) if good(middle) else (fine, middle)
    return fine


# -- numbers that a run has measured --


def measured(accounts: Iterable[Account]) -> dict[str, float]:
    """Return the numbers that a run has measured, by their names in the plan, plus `gpus`, `step_s` and `rank_bytes`.
    Its last durable tier counts as the shared tier."""
    history = in_order(accounts)
    bill = settled(history).statement
    if not history:
        return {}
    seen = [one for one in bill.interruptions if one.counted and one.kind not in ("rollback", "taken over")]
    hangs = [one.cost.perceive for one in seen if one.kind == "hang"]
    known: dict[str, float | None] = {
        "gpus": history[-1].world,
        "step_s": bill.usual_step_s,
        "mtbf_s": bill.mtbf_s if bill.count >= FAULTS_ENOUGH else None,
        "hang_s": _middle(hangs),
        "crash_s": _middle([one.cost.perceive for one in seen if one.kind not in ("hang", "unknown")]),
        "hang_share": len(hangs) / len(seen) if len(seen) >= HANGS_ENOUGH else None,
        "restart_s": _middle([one.cost.restart for one in seen if one.resumed and not one.cost.unknown]),
    }
    known |= _of_tiers(history)
    rows = [row for account in history for row in account.rows]
    if known["memory.cost_s"] is None and (snapshots := sum(row.saves for row in rows)):
        known["memory.cost_s"] = max(0.0, sum(row.stalled + row.slowed for row in rows)) / snapshots
    return {name: float(value) for name, value in known.items() if value is not None}


def last_tier(accounts: Iterable[Account]) -> list[str]:
    """Return the URL of the last durable tier, which counts as the shared tier. Return [] if nothing was saved."""
    return list(dict.fromkeys(url for account in in_order(accounts) for url in account.saves))[-1:]


def _of_tiers(history: Sequence[Account]) -> dict[str, float | None]:
    known: dict[str, float | None] = {}
    names = {MEMORY: MEMORY, **dict.fromkeys(last_tier(history), SHARED)}
    for url, name in names.items():
        saves = [account.saves[url] for account in history if url in account.saves]
        count, nbytes = sum(one.count for one in saves), sum(one.nbytes for one in saves)
        known[f"{name}.write_s"] = sum(one.seconds for one in saves) / count if count else None
        known["rank_bytes"] = nbytes / count if nbytes and count else known.get("rank_bytes")
        restores = [one for account in history for one in account.restores if one.source == url]
        known[f"{name}.restore_s"] = _middle([one.seconds for one in restores if one.step is not None])
        decided = [each.costs[url] for account in history for each in account.decisions if url in each.costs]
        known[f"{name}.cost_s"] = max(0.0, decided[-1]) if decided else None
    return known


def scaled(known: Numbers, job: PlannedJob, n: Numbers) -> dict[str, float]:
    """Scale the numbers of a run to another job. Costs of moving bytes scale with the bytes per rank, and faults with
    the number of GPUs. The shared tier's rates have a limit for all ranks. Raise UsageError if invalid."""
    there, gpus = known.get("rank_bytes", job.rank_bytes), known.get("gpus", job.gpus)
    scale = job.rank_bytes / positive("rank_bytes", there)
    found = dict[str, float]()
    for name, value in known.items():
        if name in ("gpus", "step_s", "rank_bytes"):
            continue
        if name not in n and name not in {f"{tier}.{part}" for tier in TIERS for part in PARTS}:
            raise UsageError(f"a plan has no number {name!r}")
        value, part = positive(name, value, zero=True), name.partition(".")[2]
        if part:  # only the cost of moving bytes scales; opening, committing and blocking of step() do not
            fixed = min(value, n["blocks_s"] if part == "cost_s" else n["open_s"])
            value = fixed + scale * (value - fixed)
        found[name] = value * positive("gpus", gpus) / job.gpus if name == "mtbf_s" else value
    for part, rate in (("shared.write_s", n["store_write_all"]), ("shared.restore_s", n["store_read_all"])):
        if part in found and gpus < job.gpus:
            found[part] = max(found[part], job.state / rate)
    return found


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None
