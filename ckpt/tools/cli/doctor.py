"""`ckpt doctor`: print the results of `ckpt.tools.doctor.place` as tables or JSON."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckpt.tools.cli.arguments import folders
from ckpt.tools.cli.terminal import example, look_options, print_json, print_table, progress, put
from ckpt.units import count_of, duration

if TYPE_CHECKING:  # imported only where it is used, so that other commands start quickly
    from ckpt.tools.doctor.advice import Cadence
    from ckpt.tools.doctor.findings import Finding, JobSize, TierFindings
    from ckpt.tools.doctor.promises import Bounds

UNREACHABLE = 2
PER_NODE = 8  # ranks per machine, if neither an option, the launcher nor the GPUs give the number


@click.command(
    epilog=example(
        "ckpt doctor /nvme/run1 s3://b/run1 --state-gb 140 --step-s 1.2 --world 64",
        "ckpt doctor s3://b/run1 --option endpoint_url=https://minio.example:9000",
    )
)
@click.argument("urls", metavar="[URL]...", nargs=-1, shell_complete=folders)
@click.option("--size", type=click.IntRange(min=1), default=256, show_default=True, metavar="MIB",
              help="Maximum data to write and read in each location, for at most 10 s each.")  # fmt: skip
@click.option("--state-gb", type=click.FloatRange(min=0, min_open=True), metavar="GB",
              help="Size of the whole job's state, in GB (10**9 bytes).")  # fmt: skip
@click.option("--step-s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Duration of a training step.")  # fmt: skip
@click.option("--world", type=click.IntRange(min=1), default=1, metavar="N", help="Number of ranks in the job.")
@click.option("--per-node", type=click.IntRange(min=1), metavar="N",
              help="Ranks on each machine. By default the number that the launcher sets, otherwise one for each GPU"
                   f" here, otherwise at most {PER_NODE}.")  # fmt: skip
@look_options
def doctor(
    urls: tuple[str, ...],
    size: int,
    state_gb: float | None,
    step_s: float | None,
    world: int,
    per_node: int | None,
    as_json: bool,
) -> int:
    """Check before a long job whether these locations and this machine are safe and fast enough.

    Pass each URL to which a Checkpointer will save. Without a URL, only the machine is checked. doctor removes all
    files that it writes, and does not write to a location with files that are not a run's. With --state-gb and
    --step-s, doctor also recommends a save interval for each location, as a line to paste. Exit code 1: problems; 2: a
    location cannot be read.

    save, restore: duration of one save or restore; under 1 % from every: the shortest interval at which saving costs
    less than 1 % of training; steps: the same interval in steps, for every=.
    """
    from ckpt.tools.doctor.findings import MIB, JobSize
    from ckpt.tools.doctor.promises import Bounds

    job = JobSize(int((state_gb or 0) * 1e9), step_s, world, *local_ranks(world, os.environ, per_node))
    return diagnose(urls, Bounds(size=size * MIB), job, as_json)


def diagnose(urls: Sequence[str], bounds: Bounds, job: JobSize, as_json: bool) -> int:
    """Check the machine and each location, and print the findings and the recommendation."""
    from ckpt.tools.doctor import advice as doctor_plan
    from ckpt.tools.doctor import machine
    from ckpt.tools.doctor.findings import PROBLEM, worst

    watch = machine.ClockWatch()
    health, device_rates = machine.gpus()
    findings = [*machine.machine(job), *health]
    places = with_signals(urls, bounds)
    findings.append(watch.finding())
    for place in places:
        place.findings += doctor_plan.too_full(job, place)
    speed = machine.speed(device_rates, job)
    cadences = doctor_plan.conclude(job, places, speed)
    line = doctor_plan.tiers_line(job, cadences, places, speed)
    verdict = worst([*findings, *(f for place in places for f in place.findings)])
    if as_json:
        print_json(
            {
                "verdict": verdict,
                "machine": [asdict(f) for f in findings],
                "places": [asdict(place) for place in places],
                "cadences": [asdict(one) for one in cadences],
                "tiers": line,
            }
        )
    else:
        show("this machine", findings)
        for place in places:
            show(place.url, place.findings)
        conclude(cadences, line or doctor_plan.why_no_line(job, cadences, places, speed), job)
    if not all(place.reached for place in places):
        return UNREACHABLE
    return 1 if verdict == PROBLEM else 0


def with_signals(urls: Sequence[str], bounds: Bounds) -> list[TierFindings]:
    """Check the locations one after another. Ctrl-C, SIGTERM or a closed terminal end this after files are removed."""
    from ckpt.tools.doctor.place import examine

    async def all_of_them() -> list[TierFindings]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # not if the signal is ignored, as SIGHUP is under nohup
                with contextlib.suppress(RuntimeError, ValueError):  # raised outside the main thread
                    loop.add_signal_handler(number, task.cancel)
        found = []
        for url in urls:
            with progress("measuring", 2 * bounds.size) as on_bytes:
                found.append(await examine(url, bounds, on_bytes=on_bytes))
        return found

    try:
        return asyncio.run(all_of_them())
    except asyncio.CancelledError:
        raise click.Abort from None


# -- arguments --


def local_ranks(world: int, environment: Mapping[str, str], per_node: int | None = None) -> tuple[int, str]:
    """Return the number of ranks on this machine, and its source: --per-node, launcher, GPUs or an assumption."""
    from ckpt.tools.doctor.machine import gpu_count

    if per_node is not None:
        return min(world, per_node), ""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 0:
            return min(world, int(value)), f", from {name}"
    if gpus := gpu_count():
        return min(world, gpus), ", one for each GPU" if world > gpus else ""
    return min(world, PER_NODE), " (assumed: set --per-node)" if world > PER_NODE else ""


# -- output --


def show(title: str, findings: Sequence[Finding]) -> None:
    """Print a table, and below it each advice on its own line, so that it can be copied."""
    put(title)
    print_table(("check", "found", "verdict"), [(f.what, f.value, f.verdict) for f in findings])
    advice = [f for f in findings if f.advice]
    for finding in advice:
        put(f"{finding.verdict}: {finding.what}: {finding.advice}")
    if advice:
        print()


def conclude(cadences: Sequence[Cadence], line: str, job: JobSize) -> None:
    if not cadences:
        return
    size, ranks = f"{job.state / 1e9:,.12g} GB", count_of(job.world, "rank")
    put(f"{size} over {ranks}, {job.local} of them here{job.how}, with the measured rates:")
    rows = [
        (c.where, duration(c.save_s), duration(c.restore_s), duration(c.interval_s), c.every or "give --step-s", c.why)
        for c in cadences
    ]
    print_table(("place", "save", "restore", "under 1 % from every", "steps", "because"), rows)
    put(line)
