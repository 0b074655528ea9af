"""The command that writes a checkpoint in another form: restore."""

from __future__ import annotations

import click

from ckpt.cli.conversion import SO_FAR, dry_option, dtype_option, make, memory_option, shown, world_option
from ckpt.cli.origins import only_option, open_run
from ckpt.cli.quantity import ByteSize
from ckpt.cli.terminal import act, example, from_option, json_option, place_option, step_option
from ckpt.convert.forms import FORMS, Wanted, form_of
from ckpt.convert.output import local_path


@click.command(
    epilog=example(
        "ckpt restore runs/exp1 --to exports/hf --only 'model.*' --dtype bf16",
        "ckpt restore s3://bucket/exp1 --step 500 --to exp1-500.pt",
        "ckpt restore runs/exp1 --to runs/on-8 --world-size 8",
    )
)
@click.argument("url")
@step_option
@click.option("--to", "target", metavar="PATH", required=True, help="What to make: a file or folder that is not there.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(tuple(FORMS)),
    help="safetensors: weights as model hubs have them; torch: one file for torch.load; dcp: a folder for torch's"
    " distributed checkpoints; run: one of ours. By default what PATH ends in (.safetensors; .pt, .pth, .bin and .ckpt"
    " for torch), run if --world-size is given, and else a folder of safetensors.",
)
@world_option
@only_option
@dtype_option
@click.option("--shard-size", metavar="SIZE", type=ByteSize(), help="Bytes of a safetensors file, 5GB by default.")
@memory_option
@from_option("Another location that has the same checkpoint, for what is damaged")
@dry_option
@place_option
@json_option
def restore(
    url: str,
    step: int | None,
    target: str,
    kind: str | None,
    world: int | None,
    only: tuple[str, ...],
    dtype: str | None,
    shard_size: int | None,
    max_memory: int | None,
    others: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Write the newest checkpoint of a run in another form: gathered, cast, or cut for another number of ranks.

    If a redo log leads further, its last step: redone in memory, of which that takes as much as the state has. What was
    loaded and what was redone is said, and --step chooses any other.

    Every byte is verified on the way; what is damaged comes from another step or, with --from, another location, or the
    tensor is named and nothing appears. An interrupted restore goes on where it was when it is called again. Only
    safetensors leave out what is not a weight.
    """
    path = local_path(target)
    chosen = kind or form_of(path) or ("run" if world else "safetensors")
    if world and not FORMS[chosen].divided:
        raise click.UsageError(f"--world-size is for runs, and {target} is to be {chosen}: add --format run")
    if shard_size and (chosen != "safetensors" or form_of(path)):
        raise click.UsageError("--shard-size is for a folder of safetensors")

    wanted = Wanted(path, chosen, world or 1, only, dtype, shard_size)
    opening = open_run(url, step, others, redo=True, max_memory=max_memory)
    return shown(act(make(opening, wanted, max_memory, dry_run), SO_FAR), as_json)
