"""How commands are told which run, and which checkpoint of it: RUN, RUN@STEP, or RUN --step STEP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ckpt.core.checkpoint import spelling

T = TypeVar("T")


def folders(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """For completion in a shell: a run is a folder, if it is on this machine."""
    return [CompletionItem(begun, type="dir")]


def files(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Where other programs' files are taken as well."""
    return [CompletionItem(begun, type="file")]


def checkpoint_argument(name: str = "url", run: str = "RUN") -> Callable[[Callable[..., T]], Callable[..., T]]:
    """The command gets the run by this name, and `step`: as `ckpt.core.checkpoint.spelling.Wanted`."""

    def add(command: Callable[..., T]) -> Callable[..., T]:
        @click.argument(name, metavar=f"{run}[@STEP]", shell_complete=folders)
        @click.option("--step", type=click.IntRange(min=0), metavar="STEP", help=f"The same as @STEP behind {run}.")
        @functools.wraps(command)
        def with_step(*, step: int | None, **given: Any) -> T:
            given[name], wanted = spelling.split(given[name], step)
            return command(step=wanted, **given)

        return with_step

    return add


class WholeRun(click.ParamType):  # type: ignore[type-arg]
    """Where no step makes sense."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        url, wanted = spelling.split(str(value))
        if wanted is not None:
            self.fail(f"{value} is one checkpoint, and this is about a whole run: give {url}", param, ctx)
        return str(value)


run_argument = click.argument("url", metavar="RUN", type=WholeRun(), shell_complete=folders)
