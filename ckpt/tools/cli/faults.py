"""`ckpt faults`: list the faults of a run."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import click

from ckpt.guard.report import ADVICE, in_words, incidents
from ckpt.tools.cli.arguments import run_argument
from ckpt.tools.cli.reading import read_faults
from ckpt.tools.cli.terminal import example, look_options, opened, print_json, print_table, put


@click.command(
    epilog=example("ckpt faults runs/exp1", "ckpt faults runs/exp1 --json | jq '.incidents[-1][0].exit_code'")
)
@run_argument
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Show only the newest N incidents.")
@look_options
def faults(url: str, last: int | None, as_json: bool) -> int:
    """List the faults of a run: the rank that detected each fault first, the step of every rank, the saved steps, and
    what to do next.

    Reports of several ranks about one incident are grouped, the earliest first. Requested saves are not faults; they
    are listed below the faults. A call, `ckpt trigger`, a signal or the end of the job's time can request a save.

    when: local time. saved step: the newest step that all ranks have. by ranks: the ranks that reported the incident.
    Below each row: what happened, and what to do.
    """
    found = asyncio.run(_faults(url))
    if last is not None:
        found["incidents"] = found["incidents"][-last:]
    if as_json:
        return print_json(found)
    put(found["url"])
    faults = [one for one in found["incidents"] if not one[0]["asked"]]
    if faults:
        show(faults, "what")
    else:
        put("no faults")
    if asked := [one for one in found["incidents"] if one[0]["asked"]]:
        show(asked, "save")
    return 0


def show(shown: list[list[dict[str, Any]]], what: str) -> None:
    rows, accounts = [], []
    for incident in shown:
        first = incident[0]
        when = datetime.fromisoformat(first["time"]).astimezone().strftime("%F %T")
        saved = dict[int, set[int]]()  # saved steps by rank; a step that some ranks have not saved is lost
        for rank, step in ((one["rank"], s["step"]) for one in incident for s in one["saved"] if not s["error"]):
            saved.setdefault(rank, set()).add(step)
        common = set.intersection(*saved.values()) if saved else set()
        ranks = " ".join(dict.fromkeys(str(one["rank"]) for one in incident))
        kind = in_words(first["kind"], asked=first["asked"])
        rows.append((when, kind, max(common, default="nothing"), ranks))
        advice = "" if first["asked"] else ADVICE.get(first["advice"], "")
        accounts.append(f"{first['summary']} ({advice})" if advice else first["summary"])
    print_table(("when", what, "saved step", "by ranks"), rows, below=accounts)


async def _faults(url: str) -> dict[str, Any]:
    async with opened(url) as log:
        accounts, _ = await read_faults(log)
        found = [[{**one.to_json(), "asked": one.asked} for one in incident] for incident in incidents(accounts)]
        return {"url": log.store.url, "incidents": found}
