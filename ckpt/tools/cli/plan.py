"""`ckpt plan`: print the forecast of `ckpt.tools.observe.goodput.job_plan` for a planned job, as tables or JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from ckpt.core.cadence.cadence import positive
from ckpt.errors import UsageError
from ckpt.store import folder_of
from ckpt.tools.cli.quantity import Quantity
from ckpt.tools.cli.reading import read_ledger
from ckpt.tools.cli.terminal import example, json_option, opened, place_option, print_json, print_table, put
from ckpt.tools.observe.goodput import job_plan
from ckpt.tools.observe.goodput.job_plan import MEMORY, NUMBERS, PARTS, REPLICA, SHARED, TIERS, Plan, PlannedJob
from ckpt.tools.observe.report.figures import percent
from ckpt.units import count_of, decimal, duration

KINDS = {f"{tier}.{part}": "duration" for tier in TIERS for part in PARTS}
KINDS |= {name: number.kind for name, number in NUMBERS.items()}
ANY = "a folder or bucket that all nodes can reach"


class Assumption(click.ParamType):  # type: ignore[type-arg]
    """An argument NAME=VALUE. The name determines the unit of the value."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        name, equals, text = value.partition("=")
        if not equals or name not in KINDS:
            self.fail(f"{value!r}: expected NAME=VALUE with one of these names: {', '.join(KINDS)}", param, ctx)
        return name, Quantity(KINDS[name]).convert(text, param, ctx)


@click.command(
    epilog=example(
        "ckpt plan --gpus 16384 --params 405B --step-s 5.9 --restart 60s",
        "ckpt plan --gpus 512 --state 980GB --step-s 2.1 --assume shared.cost_s=0.4s",
        "ckpt plan --costs s3://bucket/run1 --gpus 4096   # its measured costs",
    )
)
@click.option("--gpus", type=click.IntRange(1, 10**9), metavar="N", help="Number of ranks in the job.")
@click.option(
    "--per-node", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="Ranks per node."
)
@click.option(
    "--params", type=Quantity("count"), help="Parameters of the model, for example 70B, with 14 bytes of state each."
)
@click.option(
    "--state", type=Quantity("size"), help="Size of the state over all ranks, without replicas; instead of --params."
)
@click.option("--step-s", type=Quantity("duration"), help="Duration of a training step.")
@click.option("--mtbf", type=Quantity("duration"),
              help="Mean time between interruptions. By default the rate per GPU of Llama 3.")  # fmt: skip
@click.option("--restart", type=Quantity("duration"),
              help="Time from a fault to restore(): launcher, imports, process groups. Default 60s.")  # fmt: skip
@click.option("--assume", type=Assumption(), multiple=True,
              help=f"Set another number of the model: {', '.join(NUMBERS)}, or the costs of a tier, for example"
              " shared.cost_s, shared.write_s, shared.restore_s. Repeatable.")  # fmt: skip
@click.option("--goal", type=Quantity("share"), default="99.5%", help="Required goodput.")
@click.option("--costs", "--from", "source", metavar="RUN", help="Use the costs that this run has measured.")
@place_option
@json_option
def plan(source: str | None, as_json: bool, **given: Any) -> int:
    """Forecast the goodput of a long job, recommend where and how often to save, and print what would reach 99.5 %.

    Durations are in seconds, or with a unit: 250ms, 5m, 3.1h, 2d. A number that you do not give is measured or assumed,
    and the output shows which. The restart time matters most, but everystep does not control it.

    A tier is memory (of the node, in a process that survives the trainer), replica (a copy of this memory on another
    node, if enabled) or shared (a bucket or file system that all nodes can reach).

    steps, every: interval between saves; save costs: training time per save; safe after: time until the tier has the
    step; serves: share of the faults after which the tier restores the job; recompute: time to repeat the lost steps.
    """
    try:
        known, tier = ({}, ANY) if source is None else asyncio.run(_measured(source))
        chosen, sources = conclude(given, known, f"measured: {source}")
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    notes = remarks(chosen, known, sources)
    if as_json:
        return print_json({**chosen.to_json(), "sources": sources, "notes": notes})
    show(chosen, sources, notes, tier)
    return 0


async def _measured(url: str) -> tuple[dict[str, float], str]:
    """Return the measured numbers by name, and the URL of the tier whose costs count as those of the shared tier."""
    async with opened(url) as log:
        accounts, _ = await read_ledger(log)
    if not accounts:
        raise UsageError(f"--costs: {url} has no run metrics that can be read")
    found = next(iter(job_plan.last_tier(accounts)), url)
    return job_plan.measured(accounts), str(folder_of(found) or found)


def conclude(given: Mapping[str, Any], known: Mapping[str, float], measured: str) -> tuple[Plan, dict[str, str]]:
    """Return the plan, and the source of each number that is not a default value."""
    job = job_of(given, known)
    base = job_plan.defaults(job)
    options = {"mtbf_s": given["mtbf"], "restart_s": given["restart"]}
    by_hand = dict(given["assume"]) | {name: value for name, value in options.items() if value is not None}
    n = base | job_plan.scaled(known, job, base) | by_hand
    for name in ("mtbf_s", "pcie", "network", "cores", "budget", *(name for name in KINDS if KINDS[name] == "rate")):
        positive(name, n[name])
    if max(n["hang_share"], n["felt"], n["beside"]) > 1:
        raise UsageError("hang_share, felt and beside are shares and must be at most 1")
    kept = {name: measured for name in known if name in n}
    return job_plan.plan(job, n, given["goal"]), kept | dict.fromkeys(by_hand, "given")


def job_of(given: Mapping[str, Any], known: Mapping[str, Any]) -> PlannedJob:
    if given["params"] is not None and given["state"] is not None:
        raise UsageError("--params and --state both set the size of the state: give one")
    gpus = given["gpus"] or known.get("gpus")
    step_s = given["step_s"] if given["step_s"] is not None else known.get("step_s")
    state = given["state"] if given["params"] is None else 14 * given["params"]
    if state is None and "rank_bytes" in known:
        state = known["rank_bytes"] * known["gpus"]
    for option, value in (("--gpus", gpus), ("--params or --state", state), ("--step-s", step_s)):
        if value is None:
            raise UsageError(f"give {option}")
        positive(option, value, most=1e18)
    assert gpus is not None and state is not None and step_s is not None
    return PlannedJob(int(gpus), state, step_s, given["per_node"])


def remarks(chosen: Plan, known: Mapping[str, float], sources: Mapping[str, str]) -> list[str]:
    """Return warnings about assumptions of the plan."""
    n, found = chosen.numbers, list[str]()
    down_s = job_plan.perceive_s(n) + n["restart_s"]
    if down_s >= n["mtbf_s"]:
        found.append(f"The job makes almost no progress: detecting a fault and restarting take {duration(down_s)}")
    if rare := [one.name for one in chosen.forecast.tiers if one.served and one.every_s > n["mtbf_s"] / 3]:
        found.append(f"saves to {', '.join(rare)} are about as rare as faults: their lost time is a rough estimate")
    if known.get("gpus", chosen.job.gpus) < chosen.job.gpus and sources.get("restart_s", "given") != "given":
        ranks = count_of(round(known["gpus"]), "rank")
        found.append(f"The restart time was measured with {ranks} and grows with their number: see --restart")
    hang = 'this assumes on_hang(action="exit") for hangs; the default triggers="auto" only saves and reports them'
    return [*found, hang]


# -- output --


def show(chosen: Plan, sources: Mapping[str, str], notes: Sequence[str], shared: str) -> None:
    job, n, seen = chosen.job, chosen.numbers, chosen.forecast
    put(
        f"{job.gpus:,} GPUs in {job.nodes:,} node{'s' * (job.nodes > 1)}, {decimal(job.state)} of state"
        f" ({decimal(job.rank_bytes)} a GPU), steps of {duration(job.step_s)}, a fault every {duration(n['mtbf_s'])}"
    )
    print()
    rows = []
    for tier, one in zip(chosen.tiers, seen.tiers, strict=True):
        if tier.every:
            times = (duration(value) for value in (one.every_s, tier.cost_s, tier.write_s, tier.restore_s))
            rows.append((tier.name, f"{tier.every:,}", *times, percent(one.served), duration(one.recompute_s)))
    print_table(("tier", "steps", "every", "save costs", "safe after", "restore", "serves", "recompute"), rows)
    parts = [*seen.parts.items(), ("in all", seen.invalid_s)]
    cells = [(name, duration(value), percent(value / seen.wall_s)) for name, value in parts]
    print_table(("part", "per fault", "of the time"), cells)
    verdict = "met" if seen.effective >= chosen.goal else "missed"
    print(f"effective training time: {percent(seen.effective)} (goal {100 * chosen.goal:g} %: {verdict})\n")
    wanted = [
        ("a restart of at most", n["restart_s"], chosen.restart_s),
        ("a fault at most once in", n["mtbf_s"], chosen.mtbf_s),
    ]
    titles = (f"for {100 * chosen.goal:g} %, one of", "now", "wanted")
    cells = [(what, duration(now), duration(to) if to else "that alone is not enough") for what, now, to in wanted]
    print_table(titles, cells)
    put(tiers_line(chosen, shared))
    print()
    print_table(("number", "is", "", "from"), numbers(chosen, sources))
    for note in notes:
        put(f"note: {note}")


def numbers(chosen: Plan, sources: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return rows for the assumed and measured numbers, with their sources."""
    shown: dict[str, Callable[[float], str]] = {"duration": duration, "share": percent, "count": "{:g}".format}
    shown["rate"] = lambda rate: f"{decimal(rate)}/s"
    rows = []
    for name, value in chosen.numbers.items():
        number = NUMBERS.get(name)
        what, source = (number.what, number.source) if number else ("", "")
        rows.append((name, shown[KINDS[name]](value), what, sources.get(name, source)))
    return rows


def tiers_line(chosen: Plan, shared: str) -> str:
    """Return arguments for the Checkpointer to paste. The URL is a placeholder if the user gave none."""
    every = {one.name: one.every for one in chosen.tiers if one.every}
    words = []
    if SHARED in every:
        words.append(f"tiers=ckpt.Tier({shared!r}, every={every[SHARED]})")
    replicas = ", replicas=2" * (REPLICA in every)
    words.append(f"memory=ckpt.Memory(every={every[MEMORY]}{replicas})" if MEMORY in every else "memory=None")
    return ", ".join(words)
