"""`python -m ckpt.transformers RUN --to FOLDER` writes a folder for `from_pretrained`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ckpt.errors import CheckpointError
from ckpt.tools.cli import STOPPED
from ckpt.tools.cli.export import so_far
from ckpt.tools.cli.terminal import print_err, progress
from ckpt.transformers.pretrained import export_pretrained
from ckpt.units import duration


@click.command(
    epilog="\b\nExample:\n  python -m ckpt.transformers runs/exp1 --to exports/exp1 --dtype bf16",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("run", metavar="RUN[@STEP]")
@click.option("--to", "folder", metavar="DIR", required=True, help="The folder to create. It must not exist.")
@click.option("--step", type=click.IntRange(min=0), metavar="STEP", help="The same as RUN@STEP.")
@click.option("--dtype", help="Cast the weights to bf16, fp16, fp32 or fp64.")
def command(run: str, folder: str, step: int | None, dtype: str | None) -> None:
    """Write a checkpoint of RUN, saved by a CheckpointCallback, as a folder for from_pretrained()."""
    try:
        with progress("writing", 0) as on_bytes:
            done = export_pretrained(run, folder, step=step, dtype=dtype, on_bytes=on_bytes)
    except KeyboardInterrupt:
        print_err(f"stopped. {so_far(Path(folder))}")
        raise click.exceptions.Exit(STOPPED) from None
    print(f"{folder}: {done.nbytes:,} bytes of weights, in {duration(done.seconds)}")


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        return int(command.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:
        return STOPPED
    except CheckpointError as error:
        print(error, *filter(None, [error.advice]), sep="\n", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
