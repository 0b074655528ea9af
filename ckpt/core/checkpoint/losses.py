"""Finds checkpoints that were lost to damage, so that a restore of an older step reports the loss.

The content of a damaged log record is unknown. But an index file is stored just before the record that commits its
checkpoint. So a checkpoint that has an index, and no record that ends it, may be lost. This also detects the loss of
the newest record, which leaves no gap in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt.core.format.manifest import STEPS, CheckpointId, index_key, owner
from ckpt.core.log.records import Acquire, in_history
from ckpt.core.log.run_log import RunLog
from ckpt.events import log as logger

UNCLEAR = "may have been taken back"  # part of the reason in an ABORT of a checkpoint that may have been committed
SHOWN = 4  # maximum number of problems in a message
RECORDED_S = 4.0  # maximum time between the write of an index and of its record, on a busy machine
PAUSE_S = 0.25
NO_RECORD = "no log record shows"


@dataclass(frozen=True)
class Skipped:
    """A newer checkpoint that could not be used, or the newest step that damage may have lost."""

    step: int
    tier: str
    reason: str


@dataclass(frozen=True)
class Loss:
    """Damage in one tier. `checkpoints`: checkpoints that may be lost, in any order. If there are many, only the newest
    of each job attempt is listed."""

    tier: str
    reason: str
    checkpoints: tuple[CheckpointId, ...] = ()


async def of_log(log: RunLog) -> list[Loss]:
    """Return the possible losses by damaged or missing records. Raise StoreError if files cannot be read now."""
    lost, end = await _unrecorded(log), time.monotonic() + RECORDED_S
    while lost and not log.state.damaged and time.monotonic() < end:
        await asyncio.sleep(PAUSE_S)  # a running job writes the record right after the index
        lost &= await _unrecorded(log)  # newer ones do not count, because a job may save all the time
    state = log.state
    if not state.damaged:
        return [Loss(log.store.url, _unrecorded_steps(lost), of_each(lost))] if lost else []
    lost |= {a for a in state.aborted if UNCLEAR in state.reasons.get(a, "")}
    return [Loss(log.store.url, f"{records(state.damaged)}{_may_have(lost)}", of_each(lost))]


async def warn(log: RunLog) -> None:
    """Log a warning for each possible loss by damaged or missing records."""
    for loss in await of_log(log):
        logger.warning("%s: %s", loss.tier, loss.reason)


async def _unrecorded(log: RunLog) -> set[CheckpointId]:
    """Return the checkpoints that have an index but no record that ends them. The log is read after the listing."""
    begun = [info.key async for info in log.store.list(STEPS)]
    with_index = {a for key in begun if (a := owner(key)) is not None and key == index_key(a)}
    if any(not log.state.ended(a) for a in with_index):
        await log.refresh()
    return {a for a in with_index if not log.state.ended(a)}


def _unrecorded_steps(lost: Iterable[CheckpointId]) -> str:
    steps = sorted({checkpoint.step for checkpoint in lost})
    shown = ", ".join(map(str, steps[-SHOWN:]))
    which = f"step {shown} is a checkpoint, but it has"
    if len(steps) > 1:
        which = f"steps {shown} are checkpoints, but each has"
    return (
        f"{NO_RECORD} that {which} an index: the newest record is missing, or the job was stopped just before it wrote "
        "this record. The next start of the job records complete checkpoints"
    )


def records(damaged: Sequence[int]) -> str:
    shown = ", ".join(map(str, damaged[:SHOWN])) + ", …" * (len(damaged) > SHOWN)
    return f"log record{'s' * (len(damaged) > 1)} {shown} {'are' if len(damaged) > 1 else 'is'} damaged or missing"


def one_by_one(damaged: Iterable[int]) -> list[str]:
    """Return a line for each damaged record, but one line for many consecutive records."""
    spans: list[list[int]] = []
    for seq in sorted(damaged):
        if spans and seq == spans[-1][1] + 1:
            spans[-1][1] = seq
        else:
            spans.append([seq, seq])
    found: list[str] = []
    for first, last in spans:
        if last - first < SHOWN:
            found += [f"log record {seq} is damaged or missing" for seq in range(first, last + 1)]
        else:
            found.append(f"log records {first} to {last} are damaged or missing")
    return found


def _may_have(lost: Iterable[CheckpointId]) -> str:
    steps = sorted({checkpoint.step for checkpoint in lost})
    if not steps:
        return ", and its content is unknown"
    shown = ", ".join(map(str, steps[-SHOWN:]))
    return f", and may have made step{'s' * (len(steps) > 1)} {shown} a checkpoint"


def of_each(checkpoints: Iterable[CheckpointId]) -> tuple[CheckpointId, ...]:
    """Return the newest checkpoint of each job attempt."""
    found: dict[tuple[int, str], CheckpointId] = {}
    for checkpoint in sorted(checkpoints):
        found[checkpoint.term, checkpoint.nonce] = checkpoint
    return tuple(found.values())


def passed_over(
    losses: Iterable[Loss], chosen: CheckpointId | None, acquires: Iterable[Acquire] = (), *, step: int | None = None
) -> list[Skipped]:
    """Return the losses that are newer than the chosen checkpoint and in the present history. With `step`, return the
    losses of that step, unless a checkpoint of it was chosen."""
    found = []
    known = sorted(acquires, key=lambda acquire: acquire.term)
    for loss in losses:
        if step is None:
            newer = [a for a in in_history(known, loss.checkpoints) if chosen is None or a > chosen]
        else:
            newer = [a for a in loss.checkpoints if chosen is None and a.step == step]
        if newer:
            found.append(Skipped(max(newer).step, loss.tier, loss.reason))
    return found


def listed(damage: Iterable[Loss | Skipped]) -> str:
    return "; ".join(dict.fromkeys(f"{one.tier}: {one.reason}" for one in damage))


def in_words(skipped: Sequence[Skipped], chosen: int) -> str:
    """Describe all losses as one line of text."""
    last = max(one.step for one in skipped)
    count = max(0, last - chosen)
    steps = "1 step" if count == 1 else f"{count} steps"
    return f"{steps} after step {chosen}, up to step {last}, skipped because of damage: {listed(skipped)}"
