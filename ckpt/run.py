"""`ckpt.Run`: manage a run from Python with the functions that the commands use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckpt.core.checkpoint import losses, read, reference, retention
from ckpt.core.checkpoint.reference import Which
from ckpt.core.checkpoint.retention import Keep, as_keep
from ckpt.core.log.run_log import Commit, RunLog
from ckpt.errors import CorruptError, InvalidArgumentError, public_class
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
WINDOW = 16 << 20  # maximum bytes of a tensor that are in memory at the same time


@public_class
class Run:
    """A run in one tier: `Run("runs/exp1")`, or a URL. A job may train in the run. Nothing is locked between calls.

    - `url`: folder or URL of the run.
    - `storage_options`: as in `ckpt.Tier`.

    A step is a number or "latest". Methods that delete first record in the run's log which files they will delete, then
    wait `grace_s` seconds for readers (default 600 in object stores, 0 in folders).

    Raises NoCheckpointError if there is no run or no such checkpoint, CorruptError if it is damaged, and
    InvalidArgumentError if the operation is not allowed.
    """

    def __init__(self, url: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> None:
        text, which = reference.split(url)
        if which is not None:
            raise InvalidArgumentError(
                f"{url} names one checkpoint, but Run takes a whole run: pass {text}, and give the step to its methods"
            )
        self.url = normalise(text)
        remember_options(self.url, storage_options)

    def __repr__(self) -> str:
        return f"<run {self.url}>"

    def list(self) -> list[CheckpointInfo]:
        """List all checkpoints, newest first, with the fields of `ckpt ls`."""
        return self._do(_checkpoints)

    def pin(self, step: int | str, note: str = BY_HAND) -> None:
        """Protect this checkpoint from retention and clean-up until `unpin`.

        - `step`: number of the step, or "latest".
        - `note`: reason that `ckpt ls` shows.
        """
        self._set_pin(step, note)

    def unpin(self, step: int | str) -> None:
        """Remove the protection of `pin`, so that retention applies to this checkpoint again.

        - `step`: number of the step, or "latest".
        """
        self._set_pin(step, None)

    def prune(self, keep: Keep | int | str, *, grace_s: float | None = None) -> tuple[int, ...]:
        """Delete the checkpoints that `keep` does not retain, and return their steps.

        - `keep`: how many of the newest checkpoints to keep, or a `Keep`.
        - `grace_s`: seconds between the log record and the deletion, for readers; see the class.

        The newest checkpoint is read back first. If it is damaged, CorruptError is raised and nothing is deleted.
        """
        retention_rule = as_keep(keep)

        async def do(log: RunLog) -> tuple[int, ...]:
            stock = await upkeep.take_stock(log)
            plan = upkeep.plan_prune(log, stock, retention_rule)
            if not (plan.give_up or plan.delete):
                return ()
            land = partial(upkeep.prune, log, stock, retention_rule, plan.check.checkpoint)
            return await _carry_out(log, stock, plan.check, land, grace_s)

        return self._do(do)

    def delete(self, step: int | str, *, grace_s: float | None = None) -> None:
        """Delete this checkpoint.

        - `step`: number of the step, or "latest".
        - `grace_s`: seconds between the log record and the deletion, for readers; see the class.

        The newest other checkpoint is read back first. If it is damaged, CorruptError is raised and nothing is deleted.
        Raises InvalidArgumentError if the checkpoint to delete is pinned, is the last one that can be restored, or is
        the base of a save in progress.
        """

        async def do(log: RunLog) -> None:
            stock = await upkeep.take_stock(log)
            commit = read.choose(log, step)
            plan = plan_removal(log, stock, commit)
            land = partial(remove, log, stock, commit.checkpoint, plan.check.checkpoint)
            await _carry_out(log, stock, plan.check, land, grace_s)

        self._do(do)

    def verify(self, step: int | str | None = None, *, data: bool = True) -> tuple[Verdict, ...]:
        """Read every byte of one checkpoint, or of all checkpoints, newest first.

        - `step`: number of the step, or "latest"; None for all checkpoints.
        - `data`: False reads only the metadata. Default True.
        """

        async def do(log: RunLog) -> tuple[Verdict, ...]:
            commits = log.state.commits.values() if step is None else [read.choose(log, step)]
            ordered = sorted(commits, key=lambda commit: commit.checkpoint, reverse=True)
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
        """Write a checkpoint in another format. Every byte is verified. The output appears only when it is complete.

        - `to`: file or folder to create.
        - `step`: number of the step, "latest" or "best"; None for the newest.
        - `form`: "safetensors", "torch", "lightning", "dcp" or "run". Default: by the ending of `to`, otherwise a
          folder of safetensors files.
        - `only`: shell patterns of tensor names, default all.
        - `dtype`: "bf16", "fp16", "fp32" or "fp64" to cast the weights; default unchanged.
        - `world`: number of ranks of the checkpoint in the form "run", default 1.
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

    def _set_pin(self, step: int | str, note: str | None) -> None:
        self._do(lambda log: retention.set_keep(log, read.choose(log, step).checkpoint, note))

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
            f"nothing was deleted, because step {check.step} of {log.store.url}, which would remain, is damaged: "
            f"{problems[0]}"
        )
    return tuple(sorted(checkpoint.step for checkpoint in landed.retire))
