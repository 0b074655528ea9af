"""The command that makes a run of what another library has saved: import."""

from __future__ import annotations

from functools import partial

import click

from ckpt.tools.cli.arguments import files, folders
from ckpt.tools.cli.origins import as_option, only_option, open_files
from ckpt.tools.cli.quantity import ByteSize
from ckpt.tools.cli.restore import dry_option, dtype_option, make, shown, so_far, world_option
from ckpt.tools.cli.terminal import act, example, json_option
from ckpt.tools.convert.forms import Wanted
from ckpt.tools.convert.output import local_path


@click.command(
    "import",
    epilog=example(
        "ckpt import model.safetensors runs/start", "ckpt import old/epoch3.pt runs/exp1 --step 3000 --dry-run"
    ),
)
@click.argument("src", shell_complete=files)
@click.argument("run", shell_complete=folders)
@click.option(
    "--step", type=click.IntRange(min=0), metavar="STEP", help="What step it is of. By default what SRC says, else 0."
)
@as_option
@world_option
@only_option
@click.option(
    "--skip-objects",
    is_flag=True,
    help="Leave out, and name, what only code could make again: an argparse.Namespace, an object of a class.",
)
@dtype_option
@click.option("--max-memory", metavar="SIZE", type=ByteSize(), help="What this process may need at most, as 256MiB.")
@dry_option
@json_option
def import_(
    src: str,
    run: str,
    step: int | None,
    at: tuple[str, ...],
    world: int | None,
    only: tuple[str, ...],
    skip_objects: bool,
    dtype: str | None,
    max_memory: int | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Make a run of what another library has saved: a training goes on, or starts, from there.

    SRC: safetensors (a file, or a folder with or without an index), a torch.save file, or a folder of torch's
    distributed checkpoints, Megatron's torch_dist among them. Nothing in it is run: objects that only code could make
    again are named and refused, unless --only means something else or --skip-objects leaves them out. What another
    library wrote has no digests; from here on it has.
    """
    wanted = Wanted(local_path(run), "run", world or 1, only, dtype, step=step)
    opening = open_files(src, at, only, skip_objects=skip_objects)
    return shown(act(make(opening, wanted, max_memory, dry_run), partial(so_far, wanted.path)), as_json)
