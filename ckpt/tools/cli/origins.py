"""Open the source of a command that works without a job: a run, or files of another library."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import click

from ckpt.core.checkpoint import chunks, reference
from ckpt.core.checkpoint.reference import Which
from ckpt.errors import FormatError, UsageError
from ckpt.store import normalise
from ckpt.tools.cli.terminal import opened, print_err
from ckpt.tools.convert.output import local_path

if TYPE_CHECKING:  # imported only where it is used, so that `ls` starts quickly
    from ckpt.tools.convert.source import Origin


def place_in_state(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    """Parse a text like a.b as a path in the state."""
    if not all(parts := tuple(text.split("."))):
        raise click.BadParameter(
            f"{text!r} has an empty part: give a name like model, or several joined with dots", context, parameter
        )
    return parts


only_option = click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Only tensors and entries whose name matches this shell pattern, or that lie below a matching name (model,"
    " 'model.layers.*'); repeatable.",
)
as_option = click.option(
    "--as",
    "at",
    metavar="NAME",
    default="model",
    show_default=True,
    callback=place_in_state,
    help="Path in the state at which bare weights of other programs are placed.",
)


@contextlib.asynccontextmanager
async def open_run(url: str, step: Which, others: Sequence[str] = ()) -> AsyncIterator[Origin]:
    """Open a checkpoint of a run, by default the newest."""
    from ckpt.tools.convert.source_run import checkpoint_of

    with contextlib.suppress(UsageError, OSError):  # if the path cannot be read now, the store below raises the error
        path = local_path(url)
        files = path.is_file() or (path / ".metadata").exists() or next(path.glob("*.safetensors"), None)
        if files and not (path / "FORMAT.json").exists() and not (path / "log").exists():
            raise FormatError(
                f"{url} contains files of another program: convert them first with `ckpt import {url} RUN`"
            )
    async with opened(url) as log:
        yield await checkpoint_of(log, step, [normalise(other) for other in others])


@contextlib.asynccontextmanager
async def open_files(
    src: str, at: tuple[str, ...], only: Sequence[str] = (), *, skip_objects: bool = False
) -> AsyncIterator[Origin]:
    """Open files of another library. Raise FormatError if their format is unknown, UsageError if the selected entries
    contain objects that only code could recreate."""
    from ckpt.tools.convert import parse_dcp, parse_safetensors, parse_torch, parse_torch_dist
    from ckpt.tools.convert.source_files import FilesOrigin, admit, stamps_of

    def parsed() -> FilesOrigin:
        path = local_path(src)
        if not path.exists():
            raise FormatError(f"{src} does not exist")
        if (path / "FORMAT.json").exists():
            raise FormatError(f"{src} is already a run: `ckpt export` converts it, and `ckpt copy` copies it")
        parsers = (parse_torch_dist, parse_dcp, parse_safetensors, parse_torch)
        parser = next((one for one in parsers if one.sniff(path)), None)
        if parser is None:
            raise FormatError(
                f"{src} has an unknown format: give a safetensors file or folder, a file of torch.save, or a "
                "folder of torch.distributed.checkpoint (with a file called .metadata)"
            )
        before = stamps_of(path)
        foreign = parser.parse(path, at)
        with parse_torch.naming_file(path):
            return FilesOrigin(admit(foreign, only, skip=skip_objects), before)

    origin = await chunks.files(parsed)
    try:
        yield origin
    finally:
        await origin.aclose()


@contextlib.asynccontextmanager
async def open_either(text: str, at: tuple[str, ...]) -> AsyncIterator[Origin]:
    """Open a run, or files of another library."""
    foreign = await chunks.files(_is_foreign, text)
    async with open_files(text, at, skip_objects=True) if foreign else open_run(*reference.split(text)) as origin:
        for note in origin.view().notes if foreign else ():
            print_err(f"{text}: {note}")
        yield origin


def _is_foreign(text: str) -> bool:
    with contextlib.suppress(UsageError):
        path = local_path(text)
        run = (path / "FORMAT.json").exists() or (path / "log").exists()
        return not run and (path.is_file() or (path.is_dir() and any(path.iterdir())))
    return False
