"""`ckpt trigger`: have a running job save now."""

from __future__ import annotations

import click
from msgspec import structs

from ckpt.core.checkpoint.identity import writer_keys
from ckpt.core.ipc import channel
from ckpt.core.ipc.watch_requests import TriggerSave
from ckpt.errors import CheckpointError, UsageError
from ckpt.store import normalise
from ckpt.tools.cli.arguments import folders
from ckpt.tools.cli.terminal import example, json_option, print_json, put

ASK_S = 10.0  # for a writer to answer


@click.command(epilog=example("ckpt trigger runs/exp1 --why 'before the upgrade'", "ckpt trigger memory:exp1"))
@click.argument("run", shell_complete=folders)
@click.option("--why", default="no reason given", help="Goes into the log and the report.")
@json_option
def trigger(run: str, why: str, as_json: bool) -> int:
    """Have a running job save now, on all its ranks. Call it on a node of the job, as its user.

    RUN is the first tier that the Checkpointer was given, or memory:NAME. Returns at once: `ckpt faults` and the job's
    log say what became of it.
    """
    place = run if run.startswith("memory:") else normalise(run)
    keys = writer_keys(place)
    problem = "no writer of this run is on this machine"
    for _, key in sorted(keys.items()):
        try:
            heard = channel.ask_once(key, TriggerSave(why), ASK_S)
        except CheckpointError as error:
            problem = str(error)
            continue
        if heard is not None:
            if as_json:
                return print_json(structs.asdict(heard))
            put(f"told rank {heard.rank} (process {heard.pid}), which is at step {heard.step}")
            return 0
    raise UsageError(
        f"{place}: {problem}. Give the first tier of a Checkpointer that trains here, and run this as the same user"
    )
