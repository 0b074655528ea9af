"""`ckpt trigger`: request a save from a running job."""

from __future__ import annotations

import click
from msgspec import structs

from ckpt.core.checkpoint.lease import writer_keys
from ckpt.core.ipc import channel
from ckpt.core.ipc.messages import TriggerSave
from ckpt.errors import CheckpointError, UsageError
from ckpt.store import normalise
from ckpt.tools.cli.arguments import folders
from ckpt.tools.cli.terminal import example, json_option, print_json, put

ASK_S = 10.0  # seconds for a writer to reply


@click.command(epilog=example("ckpt trigger runs/exp1 --why 'before the upgrade'", "ckpt trigger memory:exp1"))
@click.argument("run", shell_complete=folders)
@click.option("--why", default="no reason given", help="Reason, shown in the log and the fault report.")
@json_option
def trigger(run: str, why: str, as_json: bool) -> int:
    """Request a save from a running job, on all its ranks. Run the command on a node of the job, as the job's user.

    RUN is the first tier of the Checkpointer, or memory:NAME. The command does not wait for the save: `ckpt faults` and
    the job's log show the result.
    """
    place = run if run.startswith("memory:") else normalise(run)
    keys = writer_keys(place)
    problem = "this run has no writer on this machine that you can reach"
    for _, key in sorted(keys.items()):
        try:
            reply = channel.ask_once(key, TriggerSave(why), ASK_S)
        except CheckpointError as error:
            problem = str(error)
            continue
        if reply is not None:
            if as_json:
                return print_json(structs.asdict(reply))
            put(f"requested a save from rank {reply.rank} (process {reply.pid}) at step {reply.step}")
            return 0
    raise UsageError(
        f"{place}: {problem}. Give the first tier of a Checkpointer that trains here, and run this as the same user"
    )
