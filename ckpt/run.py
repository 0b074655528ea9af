"""`ckpt.Run`: look after a run from Python, as the commands do from a shell, over the same functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckpt.core.checkpoint import losses, read, retention, spelling
from ckpt.core.checkpoint.retention import Keep, as_keep
from ckpt.core.checkpoint.spelling import Which
from ckpt.core.log.log import Commit, RunLog
from ckpt.errors import CorruptError, UsageError, door
from ckpt.store import normalise, remember_options
from ckpt.tools.convert.export import Exported, export
from ckpt.tools.convert.forms import Wanted, form_for, plan_output
from ckpt.tools.convert.output import local_path
from ckpt.tools.convert.partial import check_target
from ckpt.tools.convert.source_run import checkpoint_of
from ckpt.tools.maintain import prune as upkeep
from ckpt.tools.maintain.examine import Verdict, examine
from ckpt.tools.maintain.listing import CheckpointInfo, checkpoints_of
from ckpt.tools.maintain.remove import plan_removal, remove

T = TypeVar("T")
BY_HAND = "by hand"
WINDOW = 16 << 20  # bytes of a tensor that pass by at once


@door
class Run:
    """A run in one tier: `Run("runs/exp1")`, or a URL. A job may be training there; nothing is held between calls.

    A step is a number or "latest". Raises FormatError where there is no run, NoCheckpointError where there is no such
    checkpoint, CorruptError for what is damaged, UsageError for what may not be done. `storage_options`: as of
    `ckpt.Tier`. What deletes says the names in the run's log first, and waits `grace_s` for those who are reading (by
    default 600 in object stores, 0 in folders).
    """

    def __init__(self, url: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> None:
        text, which = spelling.split(url)
        if which is not None:
            raise UsageError(f"{url} is one checkpoint, and this is about a whole run: give {text}, and the step there")
        self.url = normalise(text)
        remember_options(self.url, storage_options)

    def __repr__(self) -> str:
        return f"<run {self.url}>"

    def list(self) -> list[CheckpointInfo]:
        """All checkpoints, newest first, with what `ckpt ls` says of each."""
        return self._do(_checkpoints)

    def keep(self, step: int | str, note: str = BY_HAND) -> None:
        """No retention and no clean-up takes this one, until `let_go`."""
        self._set_keep(step, note)

    def let_go(self, step: int | str) -> None:
        """It may go again, as its age demands."""
        self._set_keep(step, None)

    def prune(self, keep: Keep | int | str, *, grace_s: float | None = None) -> tuple[int, ...]:
        """Delete older checkpoints than these: so many of the newest, or a `Keep`. The steps that went.

        The newest one is read back first: CorruptError, and nothing goes, if that is damaged.
        """
        wanted = as_keep(keep)

        async def do(log: RunLog) -> tuple[int, ...]:
            stock = await upkeep.take_stock(log)
            plan = upkeep.plan_prune(log, stock, wanted)
            if not (plan.give_up or plan.delete):
                return ()
            land = partial(upkeep.prune, log, stock, wanted, plan.check.attempt)
            return await _carry_out(log, stock, plan.check, land, grace_s)

        return self._do(do)

    def delete(self, step: int | str, *, grace_s: float | None = None) -> None:
        """Delete this checkpoint. UsageError for one that is kept, the last one that can be restored, or one that a
        save under way builds on. The newest other one is read back first: CorruptError if that is damaged."""

        async def do(log: RunLog) -> None:
            stock = await upkeep.take_stock(log)
            commit = read.choose(log, step)
            plan = plan_removal(log, stock, commit)
            land = partial(remove, log, stock, commit.attempt, plan.check.attempt)
            await _carry_out(log, stock, plan.check, land, grace_s)

        self._do(do)

    def verify(self, step: int | str | None = None, *, data: bool = True) -> tuple[Verdict, ...]:
        """Read every byte of one checkpoint, or of all, newest first. Without `data`, only what describes them."""

        async def do(log: RunLog) -> tuple[Verdict, ...]:
            found = log.state.commits.values() if step is None else [read.choose(log, step)]
            ordered = sorted(found, key=lambda commit: commit.attempt, reverse=True)
            return tuple([await examine(log, commit, data=data) for commit in ordered])

        return self._do(do)

    def export(
        self,
        to: str | Path,
        *,
        step: Which = None,
        form: str | None = None,
        only: Sequence[str] = (),
        dtype: str | None = None,
        world: int | None = None,
    ) -> Exported:
        """Write a checkpoint in another form: "safetensors", "torch", "lightning", "dcp", or "run" for `world` ranks;
        by default what `to` ends in, and else a folder of safetensors. Every byte is verified; what appears is whole.

        `only`: shell patterns of names; `dtype`: "bf16", "fp16", "fp32" or "fp64", for weights.
        """
        path = local_path(str(to))
        wanted = Wanted(path, form_for(path, form, world), world or 1, tuple(only), dtype)

        async def do(log: RunLog) -> Exported:
            check_target(path)
            origin = await checkpoint_of(log, step)
            planned = await asyncio.to_thread(plan_output, origin, wanted)
            origin.keep = 2 * WINDOW
            return await export(origin, planned.output, path, window=WINDOW)

        return self._do(do)

    def _set_keep(self, step: int | str, note: str | None) -> None:
        self._do(lambda log: retention.set_keep(log, read.choose(log, step).attempt, note))

    def _do(self, work: Callable[[RunLog], Coroutine[Any, Any, T]]) -> T:
        async def opened() -> T:
            log = await read.open_run(self.url)
            try:
                await losses.warn(log)
                return await work(log)
            finally:
                await log.store.aclose()

        return read.run(opened())


async def _checkpoints(log: RunLog) -> list[CheckpointInfo]:
    return (await checkpoints_of(log))[0]


async def _carry_out(
    log: RunLog, stock: upkeep.RunFiles, check: Commit, land: Any, grace_s: float | None
) -> tuple[int, ...]:
    patience = upkeep.default_grace_s(log.store) if grace_s is None else grace_s
    problems, landed = await upkeep.carry_out(log, stock, check, land, grace_s=patience)
    if problems:
        raise CorruptError(
            f"nothing was done: step {check.step} of {log.store.url}, which would stay, is damaged: {problems[0]}"
        )
    return tuple(sorted(attempt.step for attempt in landed.retire))
