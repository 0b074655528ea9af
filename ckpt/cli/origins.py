"""What the offline commands read: a run, or files of another library, opened by what the user has called it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import click

from ckpt.checkpoint import spelling, steady
from ckpt.checkpoint.spelling import Which
from ckpt.cli.terminal import opened, progress, say
from ckpt.convert.output import local_path
from ckpt.errors import FormatError, UsageError
from ckpt.redo import has_logs
from ckpt.store import normalise

if TYPE_CHECKING:  # what `ls` need not wait for is imported where it is used
    from ckpt.convert.source import Origin
    from ckpt.convert.source_redo import RedoneOrigin
    from ckpt.runlog.log import RunLog


def place_in_state(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    """a.b as a path."""
    if not all(parts := tuple(text.split("."))):
        raise click.BadParameter("give a name such as model, or several with dots between", context, parameter)
    return parts


only_option = click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Only tensors and entries whose name matches this shell pattern, or that belong to what is called so (model,"
    " 'model.layers.*'); repeatable.",
)
as_option = click.option(
    "--as",
    "at",
    metavar="NAME",
    default="model",
    show_default=True,
    callback=place_in_state,
    help="Where in the state bare weights of other programs belong.",
)


@contextlib.asynccontextmanager
async def open_run(
    url: str, step: Which, others: Sequence[str] = (), *, redo: bool = False, max_memory: int | None = None
) -> AsyncIterator[Origin]:
    """A checkpoint of a run; or a step that its redo log leads to, if that is asked for, or with `redo` the newest."""
    from ckpt.convert.source_run import checkpoint_of

    with contextlib.suppress(UsageError, OSError):  # if it cannot be read now, its store reports that
        path = local_path(url)
        files = path.is_file() or (path / ".metadata").exists() or next(path.glob("*.safetensors"), None)
        if files and not (path / "FORMAT.json").exists() and not (path / "log").exists():
            raise FormatError(
                f"{url} holds files of another program: `ckpt import {url} RUN` makes a run of them first"
            )
    async with opened(url) as log:
        others = [normalise(other) for other in others]
        newest = redo and step in (None, spelling.LATEST)
        with progress("redoing steps", 0) if has_logs(log.store.url) else contextlib.nullcontext():
            redone = await asyncio.to_thread(_redone, log, spelling.number(step), newest, max_memory, others)
        if redone is not None:
            async with contextlib.aclosing(redone):
                yield redone
            return
        yield await checkpoint_of(log, step, others)


def _redone(
    log: RunLog, step: int | None, newest: bool, max_memory: int | None, others: Sequence[str]
) -> RedoneOrigin | None:
    history = log.state.lineage()
    is_checkpoint = any(commit.step == step for commit in history) if step is not None else not newest
    if is_checkpoint or not has_logs(log.store.url):
        return None
    from ckpt.convert import export, source_redo  # which need torch
    from ckpt.faults.memory_pressure import available_memory

    room = available_memory() if max_memory is None else min(available_memory(), max_memory - export.resident())
    try:
        return source_redo.redone(log, step, max(0, room - export.SPARE - export.SHARES * export.SMALLEST), others)
    except (UsageError, MemoryError) as error:  # it takes too much
        if step is not None or not history:
            raise
        say(f"{error or 'not enough memory for the redo log'}. So it is the newest checkpoint instead")
        return None


@contextlib.asynccontextmanager
async def open_files(
    src: str, at: tuple[str, ...], only: Sequence[str] = (), *, skip_objects: bool = False
) -> AsyncIterator[Origin]:
    """Files of another library. FormatError if they are not of one that is known, UsageError if what is wanted of them
    has objects in it."""
    from ckpt.convert import parse_dcp, parse_safetensors, parse_torch, parse_torch_dist
    from ckpt.convert.source_files import FilesOrigin, admit, stamps_of

    def parsed() -> FilesOrigin:
        path = local_path(src)
        if not path.exists():
            raise FormatError(f"{src} does not exist")
        if (path / "FORMAT.json").exists():
            raise FormatError(f"{src} is a run already: `ckpt restore` makes another form, `ckpt copy` another copy")
        parsers = (parse_torch_dist, parse_dcp, parse_safetensors, parse_torch)
        parser = next((one for one in parsers if one.sniff(path)), None)
        if parser is None:
            raise FormatError(
                f"{src} is nothing that is known here: give a safetensors file or folder, a file of torch.save, or a "
                "folder of torch.distributed.checkpoint (it has a file called .metadata)"
            )
        before = stamps_of(path)
        foreign = parser.parse(path, at)
        with parse_torch.told(path):
            return FilesOrigin(admit(foreign, only, skip=skip_objects), before)

    origin = await steady.files(parsed)
    try:
        yield origin
    finally:
        await origin.aclose()


@contextlib.asynccontextmanager
async def open_either(text: str, at: tuple[str, ...]) -> AsyncIterator[Origin]:
    """A run, or files of another library."""
    foreign = await steady.files(_is_foreign, text)
    async with open_files(text, at, skip_objects=True) if foreign else open_run(*spelling.split(text)) as origin:
        for note in origin.view().notes if foreign else ():
            say(f"{text}: {note}")
        yield origin


def _is_foreign(text: str) -> bool:
    with contextlib.suppress(UsageError):
        path = local_path(text)
        run = (path / "FORMAT.json").exists() or (path / "log").exists()
        return not run and (path.is_file() or (path.is_dir() and any(path.iterdir())))
    return False
