"""`ckpt import`: convert files of another library into a run."""

from __future__ import annotations

from functools import partial

import click

from ckpt.tools.cli.arguments import files, folders
from ckpt.tools.cli.export import dry_option, dtype_option, make, shown, so_far, world_option
from ckpt.tools.cli.origins import as_option, only_option, open_files
from ckpt.tools.cli.quantity import ByteSize
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
    "--step",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Step of the new checkpoint. By default the step that SRC contains, otherwise 0.",
)
@as_option
@world_option
@only_option
@click.option(
    "--skip-objects",
    is_flag=True,
    help="Skip objects that only code could recreate, for example an argparse.Namespace, and list them.",
)
@dtype_option
@click.option("--max-memory", metavar="SIZE", type=ByteSize(), help="Maximum memory of the process, for example 1GiB.")
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
    """Convert files of another library into a run, from which a training can continue or start.

    SRC: safetensors (a file, or a folder with or without an index), a torch.save file, or a folder of torch's
    distributed checkpoints, including Megatron's torch_dist. No code in SRC is executed. If it has objects that only
    code could recreate, they are listed and the import is rejected, unless --only excludes them or --skip-objects skips
    them. Files of other libraries have no digests; the new run has digests.
    """
    wanted = Wanted(local_path(run), "run", world or 1, only, dtype, step=step)
    opening = open_files(src, at, only, skip_objects=skip_objects)
    return shown(act(make(opening, wanted, max_memory, dry_run), partial(so_far, wanted.path)), as_json)
