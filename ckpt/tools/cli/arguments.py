"""Parse the arguments that name a run and a checkpoint: RUN, RUN@STEP, or RUN --step STEP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ckpt.core.checkpoint import reference

T = TypeVar("T")


def folders(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete folders in a shell, because a local run is a folder."""
    return [CompletionItem(begun, type="dir")]


def files(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete files in a shell, for arguments that also accept files of other programs."""
    return [CompletionItem(begun, type="file")]


def checkpoint_argument(name: str = "url", run: str = "RUN") -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Pass the run to the command as the argument `name`, and the checkpoint as the argument `step`."""

    def add(command: Callable[..., T]) -> Callable[..., T]:
        @click.argument(name, metavar=f"{run}[@STEP]", shell_complete=folders)
        @click.option("--step", type=click.IntRange(min=0), metavar="STEP", help=f"The same as {run}@STEP.")
        @functools.wraps(command)
        def with_step(*, step: int | None, **given: Any) -> T:
            given[name], which = reference.split(given[name], step)
            return command(step=which, **given)

        return with_step

    return add


class WholeRun(click.ParamType):  # type: ignore[type-arg]
    """An argument that names a run. Reject an argument that names one checkpoint of a run."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        url, which = reference.split(str(value))
        if which is not None:
            self.fail(f"{value} names one checkpoint, but this command needs a whole run: give {url}", param, ctx)
        return str(value)


run_argument = click.argument("url", metavar="RUN", type=WholeRun(), shell_complete=folders)
