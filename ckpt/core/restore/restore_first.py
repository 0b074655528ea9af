"""Tries the sources, newest first, until one fills the state of all ranks; how long each of them may take.

    candidates -> for each, newest first: describe -> open -> place -> share the reading -> fill -> all agree

Every rank restores the same checkpoint or none does. Ranks agree through `World`, with deadlines. Each rank reads the
bytes that it wants from the memory and the folders of its node. What a node cannot read comes from a rank of another
node, and what several ranks of a node want of a bucket is downloaded once and passed on (`ranks.exchange`).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.core.checkpoint import losses
from ckpt.core.checkpoint.losses import Loss, Skipped, passed_over
from ckpt.core.format.columns import I64
from ckpt.core.format.manifest import Attempt
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.values import Json
from ckpt.core.ranks.exchange import Exchange
from ckpt.core.ranks.world import World, together
from ckpt.core.restore.division import Work, divided, fitting, known, verified, wanted_tensors, wishes
from ckpt.core.restore.sources import RestoreSource
from ckpt.core.state.capture import Capture
from ckpt.core.state.filler import Filler
from ckpt.core.state.placement import Placement, comes_from_user, mismatch
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    DeadlineError,
    PeerError,
    StoreError,
    TransferError,
    UnreadableError,
    UsageError,
    is_unreadable,
)
from ckpt.events import log as logger
from ckpt.failpoints import point

RETRY_AFTER_S = (0.2, 1.0)
OVERRIDDEN = (
    "the checkpoint's settings were taken for %s. To have the script's, set them again after the restore: "
    "docs/guide/state.md"
)
CONNECT_S, TRANSFER_S = 30.0, 600.0  # between ranks: to meet, and for all that one sends another


@dataclass
class Restored:
    """What a restore did on this rank.

    - `step`, `id`, `tier`: the checkpoint, and where it was read from. None if there was none.
    - `verified`: every byte matched a digest that was computed when the step was written to a tier while its trainer
      lived. False for a snapshot in memory that no tier had, and for a step that a writer stored only after a fault.
      Damage before the digest is computed cannot be detected.
    - `seconds`: duration of the restore.
    - `nbytes`, `nbytes_received`: bytes that this rank read, and bytes that other ranks read for it.
    - `skipped`: newer checkpoints that could not be used, or were lost with a damaged log record.
    - `repaired`: damaged parts that were read from another tier.
    - `left_out`: entries that did not fit, with strict=False.
    - `overridden`: settings of optimizers that the script has changed, and that the checkpoint's replaced.
    """

    step: int | None
    id: str | None = None
    tier: str | None = None
    verified: bool = True
    seconds: float = 0.0
    nbytes: int = 0
    nbytes_received: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    overridden: list[str] = field(default_factory=list)


def restore_first(
    world: World,
    sources: Sequence[RestoreSource],
    capture: Capture,
    result: Restored,
    *,
    strict: bool,
    on_touch: Callable[[], None],
    lost: Sequence[Loss] = (),
    step: int | None = None,
) -> RestoreSource | None:
    """Restore from the first source that is sound for all ranks; why others were not is said, and noted in `result`.

    `lost`: what damage has taken away: so is that of it which is newer, or of the `step` that was asked for.

    Raises MismatchError, after which nothing has been changed; and UnreadableError if a checkpoint cannot be read now
    from any tier that has it. An older one is not used instead: the history would continue from there, and the intact
    newer one would never be restored again.
    """
    unreadable: tuple[Attempt, str, CheckpointError] | None = None
    for source in sources:
        if unreadable is not None and source.attempt != unreadable[0]:
            break
        error = _problem(world, source, capture, result, strict=strict, on_touch=on_touch)
        if error is None:
            result.step, result.id, result.tier = source.attempt.step, str(source.attempt), source.tier
            result.repaired = list(source.repaired)
            _say_lost(world, lost, source.attempt, result, step)
            return source
        if is_unreadable(error):
            unreadable = unreadable or (source.attempt, source.tier, error)
            logger.warning("step %d in %s cannot be read now: %s", source.attempt.step, source.tier, error)
            continue
        result.skipped.append(Skipped(source.attempt.step, source.tier, str(error)))
        advice = "" if source.tier == "memory" else f" (`ckpt repair {source.tier}` may mend it)"
        logger.warning("step %d in %s cannot be used%s: %s", source.attempt.step, source.tier, advice, error)
    if unreadable is not None:
        attempt, tier, why = unreadable
        raise UnreadableError(
            f"step {attempt.step} in {tier} cannot be read now and may be intact, so no older step was restored: {why}",
            retryable=why.retryable,
        )
    _say_lost(world, lost, None, result, step)
    return None


def _problem(
    world: World,
    source: RestoreSource,
    capture: Capture,
    result: Restored,
    *,
    strict: bool,
    on_touch: Callable[[], None],
) -> CheckpointError | None:
    """Restore from this source. Why it cannot be used, if it cannot: the same for all ranks."""
    direct, pauses = False, iter(RETRY_AFTER_S)
    while True:
        try:
            with _no_collecting():
                _restore(world, source, capture, result, strict=strict, on_touch=on_touch, direct=direct)
            return None
        except (CorruptError, StoreError) as error:
            pause = next(pauses, None) if error.retryable else None
            if pause is None:
                return error.with_traceback(None)  # whose frames hold what was begun
            direct = direct or isinstance(error, TransferError)
        finally:
            source.close()
        time.sleep(pause)  # to fall back for a passing fault would cost steps for good


def _say_lost(world: World, lost: Sequence[Loss], chosen: Attempt | None, result: Restored, step: int | None) -> None:
    """Once, for all ranks; each of them has it in `result`."""
    missed = passed_over(lost, chosen, step=step)
    result.skipped += missed
    if world.rank == 0 and missed and chosen is not None:
        logger.warning("%s", losses.in_words(missed, chosen.step))
    elif world.rank == 0 and lost and not missed:
        logger.warning("damage was found, and nothing newer is known to be lost by it: %s", losses.listed(lost))


@contextlib.contextmanager
def _no_collecting() -> Iterator[None]:
    """To search all objects of torch for garbage takes as long as all the rest of a restore, which leaves none."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _restore(
    world: World,
    source: RestoreSource,
    capture: Capture,
    result: Restored,
    *,
    strict: bool,
    on_touch: Callable[[], None],
    direct: bool,
) -> None:
    try:
        described = together(world, "describe", source.describe) if source.partial else []
    except UsageError as error:  # more than one message holds; another location may need no telling
        raise CorruptError(f"the ranks cannot tell each other what they have of it: {error}") from error
    mine = _Try(world, source, capture, strict)
    whole = strict and not capture.subset
    try:
        told = together(
            world, "place", lambda: mine.prepare(described), lambda p: fitting(p, source.saved if whole else None)
        )
        point("restore.chosen")
        on_touch()
        result.nbytes, result.nbytes_received = 0, 0
        together(world, "fill", lambda: mine.fill(told, result, direct))
        point("restore.filled")
        source.damaged = together(world, "finish", mine.finish, any)
        capture.keep_apart(mine.placement.apart)
        _say_left_out(mine.placement, result)
        result.overridden = mine.placement.overruled
        if world.rank == 0 and result.overridden:
            logger.warning(OVERRIDDEN, "; ".join(result.overridden))
        result.verified = source.verified
    finally:
        mine.close()


class _Try:
    """This rank's part in restoring from a source."""

    placement: Placement
    _filler: Filler

    def __init__(self, world: World, source: RestoreSource, capture: Capture, strict: bool) -> None:
        self._world, self._source, self._capture, self._strict = world, source, capture, strict
        self._exchange: Exchange | None = None

    def prepare(self, described: list[Json]) -> Json:
        """Open the source and say where its tensors go, without changing anything; what the other ranks must know."""
        source, world, strict = self._source, self._world, self._strict
        source.open(described, self._capture.layout)
        self.placement = placement = _place(self._capture, source.saved, strict)
        filled = placement.fills or placement.lying
        if not strict and world.size == 1 and source.saved.tensors and not filled:
            raise mismatch([*placement.problems, "nothing of it fits, also with strict=False"])
        if source.saved.directory is not None:
            source.narrow({key: [target.box for target in targets] for key, targets in placement.fills.items()})
        self._filler = filler = Filler(source.saved, placement.fills, placement.lying, in_place=strict)
        told: dict[str, Json] = {"problems": placement.problems if strict else []}
        if world.size > 1:
            self._exchange = Exchange(world.rank, verified(source.saved, filler))
            told |= {**wishes(source, filler), "contact": self._exchange.contact}
        elif strict and source.saved.world > 1:
            told |= {"tensors": wanted_tensors(source.saved, filler)}
        return told

    def fill(self, told: list[Any], result: Restored, direct: bool) -> None:
        """Read this rank's share, keep what it wants, pass on what others want, and wait for what they pass on."""
        lengths, exchange = self._source.saved.table.length, self._exchange
        if exchange is None:
            self._source.read(self._filler.blobs, self._filler.add, self._filler.places)
            result.nbytes = int(lengths[self._filler.blobs].sum())
            return
        # What the page cache or shared memory holds, each rank reads faster than it receives. `direct`: the network
        # between the ranks has failed.
        alone = direct or not self._source.remote
        work = divided(self._world.rank, told, range(self._world.size) if alone else self._world.nodes)
        try:
            reads, expects = known(self._source.saved, work.reads), known(self._source.saved, work.expects)
            self._share(exchange, work, reads.tolist(), [one["contact"] for one in told])
        except (PeerError, DeadlineError) as error:
            exchange.fail(str(error))
            raise TransferError(str(error), retryable=True) from error
        except BaseException as error:
            exchange.fail(str(error))
            raise
        result.nbytes, result.nbytes_received = int(lengths[reads].sum()), int(lengths[expects].sum())

    def _share(self, exchange: Exchange, work: Work, reads: list[int], contacts: list[Any]) -> None:
        mine, filler = set(self._filler.blobs), self._filler
        number_of = dict(zip(reads, work.reads, strict=True))

        def sink(blob: int, data: memoryview) -> None:
            if blob in mine:
                filler.add(blob, data)
            for rank in work.recipients[number_of[blob]]:
                exchange.send(rank, number_of[blob], data)

        def room(blobs: I64) -> I64:
            found = np.zeros(len(blobs), np.int64)
            only = [blob in mine and not work.recipients[number_of[blob]] for blob in blobs.tolist()]
            here = np.array(only, np.bool_)
            found[here] = filler.places(blobs[here])
            return found

        exchange.expect(work.expects)
        others = {rank for each in work.recipients.values() for rank in each}
        exchange.connect(contacts, sorted(others), self._world.nodes, CONNECT_S)
        self._source.read(reads, sink, room)
        exchange.finish_sending()
        exchange.wait(work.expects, TRANSFER_S)

    def finish(self) -> bool:
        """Return True if this rank took anything from elsewhere because it is damaged in this source."""
        self._filler.finish()
        for finish in (*self.placement.finishers, *self.placement.last):
            finish()
        return bool(self._source.repaired)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


def _say_left_out(placement: Placement, result: Restored) -> None:
    """What strict=False has passed over, or cast, is not passed over in silence."""
    if placement.cast:
        counts = Counter(placement.cast.values()).items()
        logger.warning("strict=False cast tensors: %s", ", ".join(f"{n} to {dtype}" for dtype, n in counts))
    result.left_out = list(placement.problems)
    if placement.problems:
        shown = "; ".join(placement.problems[:5])
        more = f"; and {len(placement.problems) - 5} more" if len(placement.problems) > 5 else ""
        logger.warning("strict=False took what fits, and not: %s%s (all in last_restore.left_out)", shown, more)


def _place(capture: Capture, saved: SavedState, strict: bool) -> Placement:
    try:
        return capture.place(saved, strict=strict)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if comes_from_user(error):
            raise
        raise CorruptError(f"what was saved does not describe a state: {type(error).__name__}: {error}") from error
