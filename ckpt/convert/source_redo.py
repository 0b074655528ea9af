"""A step of the redo log as an origin: what it begins with is loaded into memory, and the steps after it redone there.

So it takes as much memory as the state has, of all ranks that saved it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckpt.checkpoint import losses
from ckpt.checkpoint.losses import Loss
from ckpt.checkpoint.put import Room
from ckpt.checkpoint.read import Sink
from ckpt.convert.source import RankView
from ckpt.convert.source_run import SavedOrigin
from ckpt.errors import CheckpointError, CorruptError, FormatError, StoreError, UsageError, is_unreadable
from ckpt.events import log as logger
from ckpt.format.manifest import Attempt
from ckpt.format.table import Table
from ckpt.restore.redo_logs import Logs, look
from ckpt.restore.redo_source import RedoSource
from ckpt.runlog.log import RunLog, in_history
from ckpt.units import decimal


class RedoneOrigin(SavedOrigin):
    """Of an open source, which it closes."""

    def __init__(self, log: RunLog, source: RedoSource, finite: bool | None) -> None:
        super().__init__(log.store.url, source.attempt, source.saved, far=False, finite=finite)
        self.repaired = source.repaired
        self.about |= {"redone": source.redone, "base_step": source.base_step}
        self._source = source

    def view(self, rank: int = 0, world: int = 1) -> RankView:
        found = super().view(rank, world)
        steps = f"{self._source.redone} step{'s' * (self._source.redone != 1)} after it"
        note = f"step {self.step} comes from the redo log: step {self._source.base_step} was loaded, and {steps} redone"
        return replace(found, notes=(*found.notes, note))

    async def fetch(self, table: Table, blobs: Sequence[int], sink: Sink, room: Room) -> None:
        await asyncio.to_thread(self._source.read, blobs, sink, room)

    async def aclose(self) -> None:
        self._source.close()


def redone(log: RunLog, step: int | None, most: int, others: Sequence[str] = ()) -> RedoneOrigin | None:
    """Step `step`, or the newest one if it is newer than the newest checkpoint. None if the redo logs lead to none, or
    if a step that training went back behind is a checkpoint as well.

    `most`: bytes of memory that the state may take; UsageError if it has more. `others`: URLs of places that may have
    what is damaged of the checkpoint that it begins with. Errors are those of the step that was asked for; without one,
    a step that cannot be redone is said, and the one before it is tried.
    """
    logs = look(log.store.url, verify=False)
    commits = {**log.state.held, **log.state.commits}
    logs.verify(commits, log.state.acquires, step)
    damage = logs.losses(commits, log.state.acquires)
    reach = logs.reach(commits, log.state.acquires, step)
    newest = max((commit.attempt for commit in log.state.lineage() if commit.finite is not False), default=None)
    failure: CheckpointError | None = None
    for attempt in _candidates(log, reach, step, newest):
        _check_room(logs, attempt, most)
        ranks = reach[attempt][1]
        source = RedoSource(
            attempt, logs, commits, ranks, alone=True, undone=False, initializer=lambda: None, others=others
        )
        try:
            source.open([])
            _say_lost(damage, attempt, log, step)
            return RedoneOrigin(log, source, logs.finite(attempt, ranks))
        except (CorruptError, FormatError, StoreError) as error:
            source.close()
            if is_unreadable(error):
                raise
            failure = failure or error.with_traceback(None)  # whose frames hold the memory of what was begun
            logger.warning("step %d cannot be redone: %s", attempt.step, error)
        except BaseException:
            source.close()
            raise
    if step is not None and failure is not None:
        raise failure
    if step is None:
        _say_lost(damage, newest, log, step)
    if step is not None and logs.problems and not any(commit.step == step for commit in log.state.commits.values()):
        raise CorruptError(f"step {step} is no checkpoint, and the redo log is damaged: {'; '.join(logs.problems[:4])}")
    return None


def _candidates(
    log: RunLog, reach: Mapping[Attempt, tuple[int, Collection[int]]], step: int | None, newest: Attempt | None
) -> list[Attempt]:
    """What all ranks' logs lead to: those of the present history first, the newest of them before all."""
    whole = [one for one, (world, ranks) in reach.items() if len(ranks) == world]
    history = set(in_history(log.state.acquires, whole))
    if step is None:
        whole = [one for one in whole if newest is None or one > newest]
    elif any(commit.step == step for commit in log.state.commits.values()):
        whole = [one for one in whole if one in history]
    return sorted(whole, key=lambda one: (one in history, one), reverse=True)


def _say_lost(damage: Sequence[Loss], chosen: Attempt | None, log: RunLog, step: int | None) -> None:
    missed = losses.passed_over(damage, chosen, log.state.acquires, step=step)
    if missed:
        logger.warning("%s", losses.in_words(missed, 0 if chosen is None else chosen.step))


def _check_room(logs: Logs, attempt: Attempt, most: int) -> None:
    """UsageError if all ranks' shares have more bytes."""
    found = [frames[attempt].frame for frames in logs.frames.values() if attempt in frames]
    needed = sum(frame.layout.arrangement.data_size for frame in found)
    if needed > most:
        raise UsageError(
            f"step {attempt.step} is in the redo log, and redone in memory: it takes {decimal(needed)}, and "
            f"{decimal(most)} may be taken"
        )
