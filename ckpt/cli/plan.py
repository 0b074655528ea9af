"""`ckpt plan`: what `ckpt.goodput.model` says of a job that has not begun, for people and programs.

Every number has a source: what was given, what a run has measured (`--from`), what was saved (`--costs`), what the
README measured, or an assumption.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from ckpt.cli.report import read_ledger
from ckpt.cli.terminal import example, json_option, opened, place_option, print_json, print_table, safe
from ckpt.errors import UsageError
from ckpt.format.regular_file import read_regular
from ckpt.goodput import breakdown, job_plan, model
from ckpt.goodput.job_plan import Faults, Machine, Measured, Plan, PlannedJob

ENOUGH = 3  # interruptions, to say anything about the time between them
ROUGH = 3.0  # intervals that the time between faults has to have, for `forecast` to be good with several places
MUCH = 10.0  # times the bytes that were measured: worth a remark
YEAR_S = 365.25 * model.DAY_S
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": model.DAY_S, "years": YEAR_S}
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4, "p": 5}
NUMBER = r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)"
WHOSE: dict[str, tuple[str, ...]] = {
    "pcie": (job_plan.MEMORY,),
    "beside": (job_plan.MEMORY,),
    "blocks_s": (job_plan.MEMORY,),
    "network": (job_plan.REPLICA,),
    "cpu_network": (job_plan.REPLICA,),
    "disk_write": (job_plan.LOCAL,),
    "disk_read": (job_plan.LOCAL,),
    "cpu_disk": (job_plan.LOCAL,),
}
"""Which place a value of the machine is for. What is not here is for the shared place, or for all."""
FOR_ALL = ("cores", "felt", "open_s")
CONSUMED = ("store_write_all", "store_read_all", "host_memory")  # what counts also where all of a place was measured
Sources = dict[str, str]
FC = TypeVar("FC", bound=Callable[..., Any] | click.Command)


def duration(text: str) -> float:
    found = re.fullmatch(NUMBER + r" *(ms|s|min|m|h|d|years)?", text)
    if found is None:
        raise ValueError(text)
    return float(found[1]) * UNITS[found[2] or "s"]


def days(text: str) -> float:
    found = re.fullmatch(NUMBER, text)
    return float(found[1]) if found else duration(text) / model.DAY_S


def share(text: str) -> float:
    found = re.fullmatch(NUMBER + r" *(%)?", text)
    if found is None:
        raise ValueError(text)
    return float(found[1]) / (100 if found[2] else 1)


def size(text: str) -> float:
    """UsageError for what may be bits or bytes."""
    found = re.fullmatch(NUMBER + r" *(?:([kmgtp]?)(i?)(b|bits?)?)(?:/s|ps)?", text, re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise ValueError(text)
    bits = len(found[4] or "") > 1
    if not bits and "b" in (found[4] or ""):
        prefix = f"{found[1]}{found[2].upper()}{found[3]}"
        raise UsageError(f"{text!r}: bits or bytes? Say {prefix}B for bytes, or {prefix}bit for bits")
    return float(found[1]) * (1024.0 if found[3] else 1000.0) ** POWERS[found[2].lower()] / (8 if bits else 1)


def count(text: str) -> float:
    found = re.fullmatch(NUMBER + r" *([kmbt])?", text, re.IGNORECASE)
    if found is None:
        raise ValueError(text)
    return float(found[1]) * 1000.0 ** POWERS[(found[2] or "").lower()]


def whole(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise ValueError(text)
    return int(text)


def kept(text: str) -> int:
    """0: all."""
    return 0 if text == "all" else whole(text)


Read = Callable[[str], float]
SUCH_AS: dict[Read, str] = {
    duration: "a duration, such as 90s or 3.1h",
    days: "a duration, such as 54d, or a number of days",
    share: "a share, such as 0.01 or 1%",
    size: "a size, such as 5.7TB",
    count: "a number, such as 70B",
    whole: "a whole number from 1",
    kept: 'a whole number from 1, or "all"',
}


def read(text: str, how: Read, context: click.Context, parameter: click.Parameter) -> float:
    """BadParameter if it is nothing that `how` reads."""
    try:
        found = how(text.strip())
        if math.isfinite(found):
            return found
    except UsageError as error:
        raise click.BadParameter(str(error), context, parameter) from None
    except (ValueError, OverflowError):
        pass
    raise click.BadParameter(f"{text!r} is not {SUCH_AS[how]}", context, parameter)


def number(
    *names: str, how: Read, help: str, metavar: str | None = None, default: str | None = None
) -> Callable[[FC], FC]:
    """An option with a unit."""

    def callback(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
        return None if text is None else read(text, how, context, parameter)

    return click.option(
        *names,
        callback=callback,
        metavar=metavar or how.__name__.upper(),
        help=help,
        default=default,
        show_default=default is not None,
    )


def pairs(
    name: str, known: Sequence[str], how: Mapping[str, Read] | Read, metavar: str, help: str
) -> Callable[[FC], FC]:
    """An option NAME=VALUE, repeatable for other names. `how`: one for all, or by name."""

    def callback(context: click.Context, parameter: click.Parameter, given: Sequence[str]) -> list[tuple[str, float]]:
        found: dict[str, float] = {}
        for one in given:
            key, equals, text = one.partition("=")
            if not equals or key not in known:
                what = f"{one!r}: give {metavar}, the first of {', '.join(known)}"
                raise click.BadParameter(what, context, parameter)
            if key in found:
                raise click.BadParameter(f"{key} is given twice", context, parameter)
            found[key] = read(text, how if callable(how) else how[key], context, parameter)
        return list(found.items())

    return click.option(name, callback=callback, multiple=True, metavar=metavar, help=f"{help} Repeatable.")


HELD: dict[str, Read] = {
    name: whole if name in (job_plan.MEMORY, job_plan.REPLICA) else kept for name in job_plan.NAMES
}
MACHINE: dict[str, Read] = {f.name: size for f in fields(Machine)}
MACHINE |= dict.fromkeys(("blocks_s", "open_s"), duration) | dict.fromkeys(("felt", "beside"), share)
MACHINE |= dict.fromkeys(("cores", "cpu_disk", "cpu_network", "cpu_store"), count)


@click.command(
    epilog=example(
        "ckpt plan --gpus 16384 --params 405B --step-s 5.9 --restart 60s",
        "ckpt plan --gpus 512 --state 980GB --step-s 2.1 --mtbf 2d --places memory,shared --save-cost shared=0.4s",
        "ckpt plan --from s3://bucket/run1 --gpus 4096        # what this run has measured, at another scale",
        "ckpt plan --gpus 64 --params 8B --step-s 1.3 --json > plan.json; ckpt plan … --costs plan.json",
    )
)
@click.option("--gpus", type=click.IntRange(min=1), help="Ranks of the job.")
@click.option("--per-node", type=click.IntRange(min=1), default=8, show_default=True, help="Ranks of a node.")
@number("--params", how=count, metavar="N", help="Parameters of the model, such as 405e9 or 70B.")
@click.option("--bytes-per-param", type=float, default=14.0, show_default=True,
              help="2 for bf16 weights, 4 for their fp32 masters, 8 for two fp32 moments.")  # fmt: skip
@number("--state", how=size, help="Instead of --params: bytes over all ranks, nothing twice.")
@number("--step-s", how=duration, help="How long a training step takes.")
@number("--days", how=days, metavar="DAYS", default="54", help="How long the job trains, such as 54 or 54d.")
@number("--mtbf", how=duration, help="Mean time between interruptions. By default that of Llama 3, per GPU.")
@click.option("--interruptions", type=click.IntRange(min=1), help="Instead of --mtbf: so many in --days.")
@click.option("--of-gpus", type=click.IntRange(min=1),
              help="These were seen in a job of so many GPUs: they are scaled to --gpus.")  # fmt: skip
@pairs("--share", job_plan.CLASSES, share, "CLASS=SHARE",
       "Of the faults, by what is gone: process (the trainer), host (all processes of a node), node, all. What is not"
       " named is 0.")  # fmt: skip
@number("--hangs", how=share, help="Of the faults, those that are hangs, such as 0.1 or 10%.")
@number("--crash", how=duration, help="How long a crash is not noticed.")
@number("--hang", how=duration, help="How long a hang is not noticed.")
@number("--restart", how=duration,
        help="From noticing to restore(): launcher, imports, process groups, warm-up. 60s by default.")  # fmt: skip
@click.option("--places", metavar="PLACE,…",
              help="Where to save: memory, replica (of it, on another node), local (disks), shared. By default all but"
              " local, and no replica where there is one node.")  # fmt: skip
@pairs("--every", job_plan.NAMES, whole, "PLACE=STEPS", "Save so often, instead of as often as is best.")
@pairs("--save-cost", job_plan.NAMES, duration, "PLACE=DURATION", "What one save takes from training.")
@pairs("--write", job_plan.NAMES, duration, "PLACE=DURATION", "How long a save takes until it is safe.")
@pairs("--restore", job_plan.NAMES, duration, "PLACE=DURATION", "How long a restore takes.")
@pairs("--machine", tuple(MACHINE), MACHINE, "NAME=VALUE",
       "What moves bytes, in bytes a second (pcie=50GB, network=400Gbit), shares of what is felt (felt=100%), durations"
       f" (open_s=1s), CPU seconds a GB: {', '.join(MACHINE)}.")  # fmt: skip
@pairs("--keep", job_plan.NAMES, HELD, "PLACE=N", 'Checkpoints that are kept, 3 by default; "all" in durable places.')
@number("--budget", how=share, default="1%", help="Of the training time, what saving to memory may take.")
@click.option("--price", type=float, help="What a TB (10**12 bytes) in the shared place costs in a month.")
@number("--goal", how=share, default="99.5%", help="Effective training time that is wanted.")
@click.option("--from", "run", metavar="URL", help="Take what this run has measured: costs, faults, size, steps.")
@click.option("--costs", "costs_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Take what was given or measured from what --json printed.")  # fmt: skip
@place_option
@json_option
def plan(run: str | None, costs_file: Path | None, as_json: bool, price: float | None, **given: Any) -> int:
    """Before a long job: how much of its time will be training, how often should it save where, and what would it take
    for 99.5 %?

    Durations are seconds, or such as 250ms, 5m, 3.1h, 2d. Each number that is not given is measured or assumed: which,
    is said. The restart matters most, and is not ours.

    A place is memory (of the node, held by a process that survives the trainer), replica (of it, on another node),
    local (the node's own disk) or shared (a bucket or file system that all nodes reach).
    """
    try:
        found = None if run is None else asyncio.run(read_run(run))
        costs = None if costs_file is None else read_costs(costs_file)
        chosen, sources = conclude(given, found, run, costs)
        if price is not None:
            model.positive("--price", price, zero=True)
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    machine, known = machine_of(given, costs or {}), [one for one in (found and found.costs(), costs) if one]
    notes, stands_on = remarks(chosen, sources, machine, known), assumptions(chosen, machine, sources)
    if as_json:
        facts = {"assumptions": stands_on, "notes": notes, "price": month(chosen, price)}
        return print_json({**chosen.to_json(), "costs": worth_keeping(chosen, machine, sources, known), **facts})
    show(chosen, stands_on, notes, price)
    return 0


# -- what was given, measured and saved --


async def read_run(url: str) -> Measured:
    """UsageError if it has no accounts; damaged ones are said on stderr, and passed over."""
    async with opened(url) as log:
        accounts, damaged = await read_ledger(log)
    if not accounts:
        what = "keeps no ledger: it was not saved by a Checkpointer of this version"
        raise UsageError(f"--from: {url} {'has a ledger that is damaged as a whole' if damaged else what}")
    return job_plan.measured(accounts)


def read_costs(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(read_regular(path))
        found = found.get("costs", found)
        if not isinstance(found, dict) or not set(found) & {*job_plan.FAULT_COSTS, "places", "machine"}:
            raise ValueError("there are none in it")
    except (AttributeError, ValueError, OSError, RecursionError) as error:
        raise UsageError(f"--costs: {path} is nothing that --json printed: {error}") from None
    return found


def conclude(
    given: Mapping[str, Any], found: Measured | None, run: str | None, costs: Mapping[str, Any] | None
) -> tuple[Plan, Sources]:
    """The plan, and where what it stands on is from, where that is no default."""
    job, sources = job_of(given, found)
    sources = {name: "given" if what == "given" else f"measured: {run}" for name, what in sources.items()}
    mtbf_s, sources["mtbf"] = mtbf_of(given, found, job, run)
    machine = machine_of(given, costs or {})
    sources |= {name: "given" for name, _ in given["machine"]}
    faults = Faults(mtbf_s, hang_s=job_plan.hang_s(job.step_s))
    if given["share"]:
        faults = replace(faults, shares=dict(given["share"]))
        sources["shares"] = "given"
    job_plan.check(job, faults)
    model.positive("--budget", given["budget"], most=1)
    chosen = job_plan.places(job, machine, places_of(given, job), given["budget"])
    if found is not None:
        faults, chosen = job_plan.with_costs(found.costs(), job, faults, chosen, machine)
        sources |= dict.fromkeys(said(found.costs()), f"measured: {run}")
        if found.restart_s is not None:
            sources["restart_s"] += f", with {ranks(found.world)}"
    if costs is not None:
        faults, chosen = job_plan.with_costs(costs, job, faults, chosen, machine)
        theirs = costs.get("sources")
        for name in said(costs):
            if sources.get(name) != "given":
                source = theirs.get(name) if isinstance(theirs, dict) else None
                sources[name] = source if isinstance(source, str) else "--costs"
    for name, option in (("hangs", "hangs"), ("crash_s", "crash"), ("hang_s", "hang"), ("restart_s", "restart")):
        if given[option] is not None:
            faults = replace(faults, **{name: given[option]})
            sources[name] = "given"
    options = {"every": "every", "cost_s": "save_cost", "write_s": "write", "restore_s": "restore", "keep": "keep"}
    for name, option in options.items():
        for place, value in given[option]:
            if place not in {one.name for one in chosen}:
                raise UsageError(f"--{option.replace('_', '-')}: {place} is not among --places")
            if name == "every" and place == job_plan.REPLICA:
                raise UsageError("--every: the replica is sent what memory has: give --every memory=STEPS")
            chosen = [replace(one, **{name: value}) if one.name == place else one for one in chosen]
            sources[f"{place} {name}"] = "given"
    return job_plan.plan(job, faults, chosen, given["goal"]), sources


def said(costs: Mapping[str, Any]) -> list[str]:
    """What is in them, by the names that sources have."""
    names = [name for name in job_plan.FAULT_COSTS if costs.get(name) is not None]
    for place, one in (costs.get("places") or {}).items():
        names += [f"{place} {name}" for name in job_plan.PLACE_COSTS if one.get(name) is not None]
    return [*names, *(costs.get("machine") or {})]


def worth_keeping(
    chosen: Plan, machine: Machine, sources: Sources, known: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What was given or measured, and where, for --costs: not what was assumed, nor what follows from steps. `known`:
    what it was taken from, the last first."""
    kept: dict[str, Any] = {name: getattr(chosen.faults, name) for name in job_plan.FAULT_COSTS if name in sources}
    places = {
        place.name: {name: getattr(place, name) for name in job_plan.PLACE_COSTS if f"{place.name} {name}" in sources}
        for place in chosen.places
    }
    kept["places"] = {name: one for name, one in places.items() if one}
    kept["machine"] = {name: getattr(machine, name) for name in MACHINE if name in sources}
    kept["rank_bytes"] = chosen.job.rank_bytes
    kept["ranks"] = next((job_plan.ranks_of(one) for one in reversed(known) if one.get("ranks") is not None), None)
    return {**kept, "sources": {name: sources[name] for name in said(kept)}}


def ranks(count: int) -> str:
    return f"{count:,} rank{'s' * (count > 1)}"


def job_of(given: Mapping[str, Any], found: Measured | None) -> tuple[PlannedJob, Sources]:
    known = found or Measured()
    gpus = given["gpus"] if given["gpus"] is not None else known.world if found else None
    step_s = given["step_s"] if given["step_s"] is not None else known.step_s
    state, sources = None, {"gpus": "given" if given["gpus"] is not None else "run"}
    if given["params"] is not None and given["state"] is not None:
        raise UsageError("--params and --state say the same thing: give one")
    if given["params"] is not None:
        per_param = model.positive("--bytes-per-param", given["bytes_per_param"], most=1e6)
        state = model.positive("--params", given["params"], most=1e18) * per_param
    elif given["state"] is not None:
        state = model.positive("--state", given["state"], most=1e18)
    elif known.rank_bytes:
        state = known.rank_bytes * known.world
        sources["state"] = "run"
    for option, value in (("--gpus", gpus), ("--params or --state", state), ("--step-s", step_s)):
        if value is None:
            more = "" if found is None else ": the run does not say it"
            raise UsageError(f"give {option}{more}")
    assert gpus is not None and state is not None and step_s is not None
    model.positive("--gpus", gpus, most=1e9)
    model.positive("--days", given["days"], most=1e6)
    sources |= {"step_s": "given" if given["step_s"] is not None else "run", "state": sources.get("state", "given")}
    return PlannedJob(gpus, state, step_s, given["per_node"], given["days"]), sources


def mtbf_of(given: Mapping[str, Any], found: Measured | None, job: PlannedJob, run: str | None) -> tuple[float, str]:
    """And where it is from."""
    of_gpus, text = given["of_gpus"], "given"
    if given["mtbf"] is not None and given["interruptions"] is not None:
        raise UsageError("--mtbf and --interruptions say the same thing: give one")
    if given["mtbf"] is not None:
        mtbf_s = model.positive("--mtbf", given["mtbf"])
    elif given["interruptions"] is not None:
        mtbf_s = job.days * model.DAY_S / model.positive("--interruptions", given["interruptions"])
    elif of_gpus is not None:
        raise UsageError("--of-gpus says of which job --mtbf or --interruptions are: give one of them")
    elif found is not None and found.interruptions >= ENOUGH and found.mtbf_s is not None:
        mtbf_s, of_gpus, text = found.mtbf_s, found.world, f"measured: {found.interruptions} interruptions of {run}"
    else:
        return job_plan.scaled_mtbf(job.gpus), "419 interruptions of Llama 3 in 54 days on 16,384 GPUs, per GPU"
    if of_gpus is None or of_gpus == job.gpus:
        return mtbf_s, text
    model.positive("--of-gpus", of_gpus, most=1e9)
    return job_plan.scaled_mtbf(job.gpus, mtbf_s, of_gpus), f"{text}, for {of_gpus:,} GPUs, and scaled"


def machine_of(given: Mapping[str, Any], costs: Mapping[str, Any]) -> Machine:
    """As given, as it was given for `costs`, or as it is by default."""
    theirs = costs.get("machine") or {}
    if not isinstance(theirs, dict) or not set(theirs) <= set(MACHINE):
        raise UsageError(f"these are no costs: the machine is {theirs!r}")
    values = {}
    for name, value in (theirs | dict(given["machine"])).items():
        zero = MACHINE[name] is not size and name != "cores"
        most = 1.0 if MACHINE[name] is share else 1e18
        values[name] = model.positive(f"--machine {name}", value, zero=zero, most=most)
    return replace(Machine(), **values)


def places_of(given: Mapping[str, Any], job: PlannedJob) -> list[str]:
    if given["places"] is None:
        replica = [job_plan.REPLICA] if job.nodes > 1 else []
        return [job_plan.MEMORY, *replica, job_plan.SHARED]
    names = [name.strip() for name in given["places"].split(",")]
    if unknown := set(names) - set(job_plan.NAMES):
        raise UsageError(f"--places: there is no {', '.join(sorted(unknown))!r}: {', '.join(job_plan.NAMES)}")
    if job_plan.REPLICA in names and (job_plan.MEMORY not in names or job.nodes < 2):
        raise UsageError("--places: a replica is one of memory, on another node: name memory too, and have two nodes")
    return names


# -- what it stands on --


def assumptions(chosen: Plan, machine: Machine, sources: Sources) -> list[dict[str, Any]]:
    """Each number that is no outcome, and where it is from."""
    faults = chosen.faults
    shares = ", ".join(f"{name} {percent(share, 1)}" for name, share in faults.shares.items() if share)
    crash = "measured: make bench-faults, on one node"
    if faults.shares.get("node", 0) + faults.shares.get("all", 0) > 0:
        crash += "; how long a node that is lost is not noticed was NOT measured"
    rows: list[tuple[str, Any, str, str]] = [
        ("mtbf", faults.mtbf_s, lasting(faults.mtbf_s), ""),
        ("shares", dict(faults.shares), shares, "assumed, from the causes in the same paper; `all` is a guess"),
        (
            "hangs",
            faults.hangs,
            f"{percent(faults.hangs, 1)} of the faults",
            "assumed: network and watchdog, same paper",
        ),
        ("crash_s", faults.crash_s, lasting(faults.crash_s), crash),
        ("hang_s", faults.hang_s, lasting(faults.hang_s), 'on_hang(action="exit"): 10 x a step, at least 30 s'),
        ("restart_s", faults.restart_s, lasting(faults.restart_s), "assumed: NOT OURS, and matters most"),
    ]
    found = [
        {"what": what, "value": value, "shown": shown, "from": sources.get(what, source)}
        for what, value, shown, source in rows
    ]
    there = {
        place.name: [f"{place.name} {kind}" in sources for kind in job_plan.PLACE_COSTS] for place in chosen.places
    }
    for name, (what, source) in job_plan.SOURCES.items():
        whose = job_plan.NAMES if name in FOR_ALL else WHOSE.get(name, (job_plan.SHARED,))
        whose = (job_plan.MEMORY, job_plan.REPLICA) if name == "host_memory" else whose
        used = any(place in there if name in CONSUMED else not all(there.get(place, [True])) for place in whose)
        if not used and name not in sources:
            continue  # it says nothing about places that are not there, or were measured
        value = getattr(machine, name)
        shown = f"{in_words(name, value)} {what}"
        found.append({"what": name, "value": value, "shown": shown, "from": sources.get(name, source)})
    for name, source in sources.items():
        if " " in name:
            place, kind = name.split(" ")
            value = next((getattr(one, kind) for one in chosen.places if one.name == place), None)
            if value is not None:
                shown = lasting(value) if kind.endswith("_s") else f"{value:,} steps" if kind == "every" else str(value)
                found.append({"what": name, "value": value, "shown": shown, "from": source})
    return found


def in_words(name: str, value: float) -> str:
    """A value of the machine."""
    how = MACHINE[name]
    if how is duration:
        return lasting(value)
    if how is share:
        return f"{100 * value:.3g} %"
    return f"{value:g}" if how is count else human(value) if name == "host_memory" else f"{human(value)}/s"


def remarks(chosen: Plan, sources: Sources, machine: Machine, known: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """What somebody ought to know about it. `known`: what was measured, or saved by --json."""
    job, faults, seen, found = chosen.job, chosen.faults, chosen.forecast, []
    down = faults.perceive_s + faults.restart_s
    if down >= faults.mtbf_s:
        found.append(
            f"It makes no progress to speak of: perceiving and restarting take {lasting(down)}, and the next fault"
            f" comes after {lasting(faults.mtbf_s)}"
        )
    elif seen.effective < 0.5:
        found.append("More than half of the time is lost: what takes most of it is in the table of parts")
    found += [place.note[0].upper() + place.note[1:] for place in chosen.places if place.note]
    found += unlike(chosen, sources, known)
    used = [place for place in seen.places if place.served]
    rare = [place.name for place in used if place.every_s > faults.mtbf_s / ROUGH]
    if len(used) > 1 and rare:
        found.append(
            f"{', '.join(rare)} is saved to about as rarely as faults come: what is lost there is a rough guess"
        )
    held = sum(one.bytes for one in chosen.storage if one.name in (job_plan.MEMORY, job_plan.REPLICA)) / job.nodes
    if held > machine.host_memory:
        whose = "it was said to have" if "host_memory" in sources else "it is assumed to have"
        found.append(
            f"Snapshots take {human(held)} of a node's memory, and {whose} {human(machine.host_memory)}"
            " (--machine host_memory=…): use more nodes, or --keep memory=2"
        )
    if "hang_s" not in sources and faults.hangs:
        found += about_hangs(chosen)
    if idle := [place.name for place in chosen.places if not place.every]:
        found.append(f"It is better not to save to {', '.join(idle)}: no fault of these shares needs it")
    return [
        *found,
        'every="auto" finds cadences by itself, from what the run measures: folders and buckets as here, and memory as'
        " often as 1 % of the training time allows, where here it is so that the sum is least, within --budget",
        "Steps between snapshots that are copied at a fault (Memory(between=True)) are not counted",
        "What is lost to faults during recovery is counted; those of a node and of its replica at once are `all`",
    ]


def about_hangs(chosen: Plan) -> list[str]:
    faults = chosen.faults
    quicker = job_plan.hang_s(chosen.job.step_s, 3, 10)
    found = [
        f'That a hang takes {lasting(faults.hang_s)} needs on_hang(action="exit"), as in the line above: the default'
        ' triggers="auto" save and report it, and the job hangs on until somebody ends it'
    ]
    if (saved := faults.hangs * (faults.hang_s - quicker)) > 0.01 * chosen.forecast.invalid_s:
        found.append(
            f'on_hang(action="exit", factor=3, min_s=10) notices hangs after {lasting(quicker)} instead of'
            f" {lasting(faults.hang_s)}: {lasting(saved)} less per fault"
        )
    return found


def unlike(chosen: Plan, sources: Sources, known: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where this job is quite another than what was measured."""
    job, found = chosen.job, []
    for one in known:
        number, scale = job_plan.ranks_of(one), job_plan.scale_of(one, job)
        if number is not None and number < job.gpus and sources.get("restart_s", "given") != "given":
            found.append(
                f"A restart was measured with {ranks(number)}: with {job.gpus:,} it takes longer. Give --restart if you"
                " know how long"
            )
        if not 1 / MUCH < scale < MUCH and any((one.get("places") or {}).values()):
            there = human(job.rank_bytes / scale)
            found.append(
                f"Costs were measured with {there} a rank, and are scaled to {human(job.rank_bytes)}: that is rough"
            )
    return list(dict.fromkeys(found))


# -- for people --


def show(chosen: Plan, stands_on: Sequence[Mapping[str, Any]], notes: Sequence[str], price: float | None) -> None:
    job, faults, seen = chosen.job, chosen.faults, chosen.forecast
    count = job.days * model.DAY_S / faults.mtbf_s
    print(
        f"{job.gpus:,} GPUs in {job.nodes:,} node{'s' * (job.nodes > 1)}, {human(job.state)} of state"
        f" ({human(job.rank_bytes)} a GPU), steps of {lasting(job.step_s)}, a fault every {lasting(faults.mtbf_s)}:"
        f" {count:,.{1 if count < 10 else 0}f} in {job.days:g} days\n"
    )
    print_table(("number", "is", "from"), [(row["what"], row["shown"], row["from"]) for row in stands_on])
    rows = []
    for place, one in zip(chosen.places, seen.places, strict=True):
        if place.every:
            recompute = lasting(one.recompute_s) if one.served else ""
            steps = f"{place.every:,} step{'s' * (place.every > 1)}"
            times = (lasting(one.every_s), lasting(place.cost_s), lasting(place.write_s))
            rows.append((place.name, steps, *times, percent(one.served, 1), lasting(place.restore_s), recompute))
    titles = ("place", "every", "which is", "a save costs", "safe after", "serves", "restore", "recompute")
    print_table(titles, rows)
    print_table(("part", "per fault", "of the time", ""), parts(chosen))
    effective, goal = unlike_each_other(seen.effective, chosen.afford.goal)
    verdict = "met" if seen.effective >= chosen.afford.goal else "missed"
    lost = lasting((1 - seen.effective) * job.days * model.DAY_S)
    print(f"effective training time: {effective} (goal {goal}: {verdict}); {lost} of {job.days:g} days are lost\n")
    show_goal(chosen)
    show_storage(chosen, price)
    print(safe(tiers_line(chosen)))
    print(safe(triggers_line(chosen)), end="\n\n")
    for note in notes:
        print(safe(f"{note}."))


def parts(chosen: Plan) -> list[tuple[str, str, str, str]]:
    """What a fault costs, and what that is made of where it is no number of above."""
    faults, seen = chosen.faults, chosen.forecast
    why = {
        "perceive": f"{percent(faults.hangs, 1)} hangs x {lasting(faults.hang_s)}, others {lasting(faults.crash_s)}",
        "recompute": f"{lasting(seen.unfinished_s)} of it the step that was cut off",
        "saving": "between two faults",
    }
    rows = [(name, value, why.get(name, "")) for name, value in seen.parts.items()]
    rows.append(("in all", seen.invalid_s, ""))
    return [(name, lasting(value), f"{100 * value / seen.wall_s:.3g} %", more) for name, value, more in rows]


def show_goal(chosen: Plan) -> None:
    can = chosen.afford
    shares = unlike_each_other(*(share for _, share in chosen.restarts))
    print_table(
        ("a restart of", "effective"),
        [(lasting(restart), share) for (restart, _), share in zip(chosen.restarts, shares, strict=True)],
    )
    goal = f"{100 * can.goal:.6g} %"
    print(f"For {goal}, {lasting(can.invalid_s)} per fault, it takes one of these, all else as above:")
    near = next(place for place in chosen.places if place.name == can.place)
    rows = [
        ("restart at most", chosen.faults.restart_s, can.restart_s),
        ("perceive at most, on average", chosen.faults.perceive_s, can.perceive_s),
        (f"a save to {near.name} at most", near.cost_s, can.save_cost_s),
        ("a fault at most once in", chosen.faults.mtbf_s, can.mtbf_s),
    ]
    print_table(("what", "now", "wanted"), [(what, lasting(now), wanted(to)) for what, now, to in rows])


def wanted(seconds: float | None) -> str:
    """All digits of what `fleet.afford` found, which is round, and can be given as an option."""
    if seconds is None:
        return "that alone is not enough"
    if seconds >= job_plan.ANY_S:
        return "any: it can do without"
    value, unit, _ = job_plan.in_unit(seconds)
    return f"{value:.6g} {unit}"


def unlike_each_other(*shares: float) -> list[str]:
    """In percent, with as many digits as it takes to tell them from each other."""
    for digits in range(2, 9):
        found = [percent(share, digits) for share in shares]
        if len(set(found)) == len(set(shares)):
            break
    return found


def show_storage(chosen: Plan, price: float | None) -> None:
    rows = []
    for one in chosen.storage:
        requests = f"{one.objects:,} a checkpoint, {one.day:,.0f} a day" if one.objects else ""
        a_node = human(one.bytes / chosen.job.nodes) if one.name != job_plan.SHARED else ""
        rates = f"{human(one.node)}/s a node, {human(one.all_nodes)}/s in all, {human(one.mean)}/s on average"
        number = f"{one.kept:,} after {job_plan.GROWN_DAYS} days" if one.all else one.kept
        rows.append((one.name, number, human(one.bytes), a_node, rates, requests))
    print_table(("storage", "checkpoints", "bytes", "a node", "written at", "requests"), rows)
    if (cost := month(chosen, price)) is not None:
        print(f"The shared place: {cost:,.0f} a month, requests not counted\n")


def month(chosen: Plan, price: float | None) -> float | None:
    """What the shared place costs."""
    stored = [one.bytes for one in chosen.storage if one.name == job_plan.SHARED]
    return None if price is None or not stored else stored[0] / 1e12 * price


def tiers_line(chosen: Plan) -> str:
    """Ready to be pasted, but for the URLs."""
    words = []
    names = [place.name for place in chosen.places]
    for place in chosen.places:
        if place.name == job_plan.MEMORY and place.every:
            more = ", replicas=2" if job_plan.REPLICA in names else ""
            words.append(f"ckpt.Memory(every={place.every}, keep={place.keep}{more})")
        elif place.name != job_plan.REPLICA and place.every:
            url = "/nvme/run1" if place.name == job_plan.LOCAL else "s3://bucket/run1"
            keeping = place.keep or '"all"'
            words.append(f'ckpt.Tier("{url}", every={place.every}, keep={keeping})')
    return f"tiers=[{', '.join(words)}]"


def triggers_line(chosen: Plan) -> str:
    """Those of "auto", but that a hang ends the trainer, as `hang_s` has it."""
    others = ("signal", "preemption", "deadline", "exception", "oom", "memory_pressure")
    return f'triggers=[{", ".join(f"ckpt.on_{name}()" for name in others)}, ckpt.on_hang(action="exit")]'


def lasting(seconds: float) -> str:
    if seconds < 2 * YEAR_S or math.isinf(seconds):
        return breakdown.duration(seconds)
    return f"{float(f'{seconds / YEAR_S:.2g}'):,g} years"


def percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def human(number: float) -> str:
    for unit, length in (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= length:
            return f"{number / length:.3g} {unit}"
    return f"{number:.0f} B"
