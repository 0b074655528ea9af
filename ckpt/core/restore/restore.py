"""Performs a restore, from the search in memory and tiers to the last plain value.

Either all ranks restore the same checkpoint, or none does. The ranks agree four times, each time with a deadline:

    candidates   every rank posts the snapshots on its node; for each storage, one rank posts the checkpoints in the log
                 -> rank 0 chooses from the union: all ranks get the same list of checkpoints, newest first
    place        every rank opens the first checkpoint and compares it with its state, which is still unchanged
                 -> mismatches of all ranks are raised together; otherwise each rank computes what it reads for whom
    fill         every rank reads, verifies and fills its tensors
    finish       plain values, generators and schedulers follow, after all ranks have filled their tensors, because a
                 `load_state_dict` may use collectives
                 -> rank 0 begins a new term (`NewTerm`)

If a checkpoint is damaged on any rank, all ranks try the next one. If only one node can see some snapshots or manifests
(in memory, or on a node-local disk), its ranks describe them to the other ranks. Snapshots of the newest step in memory
are described with the candidates, and all others in an agreement before "place".
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from ckpt.core.checkpoint import chunks, losses, read
from ckpt.core.checkpoint.concurrent import all_of
from ckpt.core.checkpoint.losses import Loss, Skipped, passed_over
from ckpt.core.format.columns import I64
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.values import Json
from ckpt.core.log.run_log import Acquire, Commit, RunLog, in_history
from ckpt.core.ranks.transfer import Transfer
from ckpt.core.ranks.world import World, together
from ckpt.core.restore.sources import (
    HeldSnapshot,
    MemorySource,
    RestoreSource,
    StoreSource,
    Work,
    divided,
    fitting,
    known,
    verified,
    wanted_tensors,
    wishes,
)
from ckpt.core.state.capture import Capture
from ckpt.core.state.filler import Filler
from ckpt.core.state.placement import Placement, comes_from_user, mismatch
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    DeadlineError,
    FormatError,
    NoCheckpointError,
    PeerError,
    StoreError,
    TransferError,
    UnreadableError,
    UsageError,
    is_unreadable,
)
from ckpt.events import log as logger
from ckpt.failpoints import point
from ckpt.store import folder_of

MOST_LOST = 64  # maximum number of losses that a rank posts
COMMITS = 8  # number of candidates whose log records are sent to all ranks; for others, each rank reads the log
DESCRIBED = 256 << 20  # maximum characters that all ranks together may post with the candidates
RETRY_AFTER_S = (0.2, 1.0)
CONNECT_S, TRANSFER_S = 30.0, 600.0  # timeouts to connect to a rank, and to receive all chunks
OVERRIDDEN = (
    "the checkpoint's settings replaced the script's for %s. To use the script's, set them after restore(): in "
    "optimizer.param_groups (lr and initial_lr), and as attributes of the scheduler (base_lrs, T_max)"
)


@dataclass
class Restored:
    """The result of a restore on this rank.

    - `step`, `id`, `tier`: the checkpoint, and the tier it was read from. None if no checkpoint was restored.
    - `verified`: every byte matched a digest that was computed when the step was written to a tier while its trainer
      lived. False for a snapshot in memory that no tier had, and for a step that a writer stored only after a fault.
      Damage before the digest is computed cannot be detected.
    - `seconds`: duration of the restore.
    - `nbytes`, `nbytes_received`: bytes that this rank read, and bytes that other ranks read for it.
    - `skipped`: newer checkpoints that could not be used, or were lost with a damaged log record.
    - `repaired`: damaged data that was read from another tier.
    - `left_out`: entries that did not fit, with strict=False.
    - `overridden`: optimizer settings that the script had changed and that the checkpoint has replaced.
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


# -- the available checkpoints --


class Candidates:
    """The checkpoints that the ranks can restore together, as seen by one rank.

    `gather` agrees on them in one agreement. To agree on other values in the same agreement, call its three steps
    instead: `post` on every rank, `choose` on rank 0 with all posts, and `sources` on every rank.
    """

    def __init__(
        self,
        world: World,
        snapshots: Iterable[HeldSnapshot],
        acquires: Iterable[Acquire],
        urls: Sequence[str],
        roots: Sequence[Sequence[int]],
        step: int | None,
        held_damage: Sequence[Loss] = (),
    ) -> None:
        """
        - `snapshots`: the snapshots on this node. They are collected when `post` iterates over them.
        - `acquires`: the part of the history that is known from memory.
        - `roots`: for each of the tiers `urls` and each rank, the lowest rank that sees the same storage.
        - `step`: if given, only checkpoints of that step; otherwise all except undone and non-finite checkpoints.
        - `held_damage`: damage in the memory of this node, complete once all `snapshots` were read.
        """
        self._world, self._snapshots, self._acquires = world, snapshots, acquires
        self._urls, self._roots, self._step, self._held_damage = urls, roots, step, held_damage
        self._here: dict[CheckpointId, list[HeldSnapshot]] = {}
        self.lost: list[Loss] = []  # losses by damage that any rank has found

    def gather(self) -> list[RestoreSource]:
        return self.sources(together(self._world, "candidates", self.post, self.choose))

    def post(self) -> Json:
        """Collect snapshots, and read the logs of tiers for the ranks that share them. Return this rank's post."""
        for snapshot in self._snapshots:
            self._here.setdefault(snapshot.checkpoint, []).append(snapshot)
        mine = [i for i in range(len(self._urls)) if self._reads(i)]
        logs = read.run(all_of(_read_log(self._urls[i]) for i in mine)) if mine else []
        tiers: list[Json] = [None] * len(self._urls)
        for i, (log, _) in zip(mine, logs, strict=True):
            tiers[i] = [msgspec.to_builtins(commit) for commit in log.state.commits.values()]
        acquires = {*self._acquires, *(a for log, _ in logs for a in log.state.acquires)}
        lost = [*self._held_damage, *(one for _, damage in logs for one in damage)]
        return {
            "step": self._step,
            "memory": [_held(checkpoint, parts) for checkpoint, parts in self._here.items()],
            "acquires": [[a.term, a.nonce, None if a.restored is None else str(a.restored)] for a in acquires],
            "tiers": tiers,
            "lost": [[one.tier, one.reason, [str(a) for a in one.checkpoints]] for one in lost[:MOST_LOST]],
            "described": self._describe_newest(),
        }

    def _reads(self, tier: int) -> bool:
        """Return True if this rank reads a tier's log for all ranks that share the tier."""
        return self._roots[tier][self._world.rank] == self._world.rank

    def _describe_newest(self) -> Json:
        """Describe the snapshots of the step that will probably be restored. Return None if that is too large."""
        world = self._world
        usable = [a for a in self._here if self._step is None or a.step == self._step]
        if world.size == 1 or not usable:
            return None
        newest = max(usable, key=lambda a: (a.term, a.step))
        try:
            described = self._in_memory(newest).describe()
        except CheckpointError:  # raised again if this step is chosen
            return None
        return [str(newest), described] if len(json.dumps(described)) <= DESCRIBED // world.size else None

    def _in_memory(self, checkpoint: CheckpointId, *, undone: bool = False) -> MemorySource:
        """Return the source of a checkpoint in memory. The first rank of a node describes all snapshots that it sees.
        Each other rank describes only its own snapshot, which may have been sealed later."""
        world = self._world
        describes = None if world.local_rank == 0 else [world.rank]
        alone = world.size == 1
        return MemorySource(checkpoint, self._here.get(checkpoint, ()), alone=alone, undone=undone, describes=describes)

    def choose(self, posts: list[Any]) -> Json:
        """Return the losses, and the checkpoints that are complete in one location: newest first, memory before tiers,
        undone ones last. Pure.

        A checkpoint is undone if any location's history shows it, because a location may have missed the rollback.
        """
        step = posts[0]["step"]
        for rank, post in enumerate(posts):
            if post["step"] != step:
                raise UsageError(f"rank {rank} requests {_asked(post['step'])}, rank 0 requests {_asked(step)}")
        acquires = {
            (e, n): Acquire(e, n, r and CheckpointId.parse(r)) for post in posts for e, n, r in post["acquires"]
        }
        owners = sorted(acquires.values(), key=lambda a: a.term)
        found: list[tuple[CheckpointId, int]] = []  # location 0 is memory, and the tiers follow
        broken: set[CheckpointId] = set()  # not finite on some rank, so restored only if this step is requested
        commits: dict[tuple[CheckpointId, int], dict[int, Json]] = {}  # by the rank that read the log
        for place in range(1 + len(self._urls)):
            parts: dict[CheckpointId, tuple[int, set[int]]] = {}
            for reader, post in enumerate(posts):
                for checkpoint, size, ranks, finite, commit in _rows(post, place):
                    parts.setdefault(checkpoint, (size, set()))[1].update(ranks)
                    commits.setdefault((checkpoint, place), {})[reader] = commit
                    if finite is False:
                        broken.add(checkpoint)
            found += [(checkpoint, place) for checkpoint, (size, ranks) in parts.items() if len(ranks) == size]
        history = set(in_history(owners, {checkpoint for checkpoint, _ in found}))
        checked = [(checkpoint, place, checkpoint not in history) for checkpoint, place in found]
        if step is None:
            chosen = [one for one in checked if not one[2] and one[0] not in broken]
        else:
            chosen = [one for one in checked if one[0].step == step]
        chosen.sort(key=lambda one: (one[2], -one[0].term, -one[0].step, one[1]))
        every = [one for post in posts for one in post["lost"]]
        gone = {CheckpointId.parse(text) for _, _, checkpoints in every for text in checkpoints}
        if step is None:
            gone &= set(in_history(owners, gone))
        candidates = []
        for number, (checkpoint, place, undone) in enumerate(chosen):
            carried = place > 0 and (number < COMMITS or self._partial(place - 1))
            candidates.append([str(checkpoint), place, undone, commits[checkpoint, place] if carried else {}])
        lost = [
            [tier, reason, [a for a in checkpoints if CheckpointId.parse(a) in gone]]
            for tier, reason, checkpoints in every
        ]
        return {"candidates": candidates, "lost": lost, "described": _described(posts, candidates)}

    def _partial(self, tier: int) -> bool:
        return len(set(self._roots[tier])) > 1

    def sources(self, chosen: Json) -> list[RestoreSource]:
        """Return the chosen checkpoints as sources that this rank can read."""
        self.lost = [Loss(tier, reason, tuple(map(CheckpointId.parse, ids))) for tier, reason, ids in chosen["lost"]]
        places: dict[str, list[int]] = {}
        for checkpoint, place, *_ in chosen["candidates"]:
            places.setdefault(checkpoint, []).append(place)
        found = [self._source(*one, places=places[one[0]]) for one in chosen["candidates"]]
        if found and chosen["described"] is not None:
            found[0].described = chosen["described"]
        return found

    def _source(
        self, text: str, place: int, undone: bool, commits: dict[str, Json], *, places: Sequence[int]
    ) -> RestoreSource:
        """Return a chosen checkpoint as a source. `places`: all locations that have this checkpoint."""
        checkpoint, world, tier = CheckpointId.parse(text), self._world, place - 1
        if place == 0:
            return self._in_memory(checkpoint, undone=undone)
        reader = self._roots[tier][world.rank]
        commit = {int(rank): one for rank, one in commits.items()}.get(reader)
        return StoreSource(
            self._urls[tier],
            checkpoint,
            None if commit is None else msgspec.convert(commit, Commit),
            partial=self._partial(tier),
            undone=undone,
            describing=self._reads(tier),
            others=[self._urls[p - 1] for p in places if p not in (0, place)],
        )


async def _read_log(url: str) -> tuple[RunLog, list[Loss]]:
    """Read the log of a run, and the losses by damaged records. Retry errors, because this job has opened the run."""
    until = time.monotonic() + chunks.WINDOW_S
    while True:
        try:
            log = await read.open_run(url)
            try:
                return log, await losses.of_log(log)
            finally:
                await log.store.aclose()
        except (FormatError, NoCheckpointError, StoreError) as error:
            if time.monotonic() >= until or (error.retryable and folder_of(url) is None):  # retried long enough
                raise
        await asyncio.sleep(chunks.LONGEST_PAUSE_S / 2)


def _held(checkpoint: CheckpointId, parts: list[HeldSnapshot]) -> Json:
    """Describe a checkpoint in this node's memory: id, number of saving ranks, ranks in memory, False if not finite."""
    finite = False if any(s.label.finite is False for s in parts) else None
    return [str(checkpoint), parts[0].layout.world, [s.layout.rank for s in parts], finite]


def _rows(post: Any, place: int) -> Iterator[tuple[CheckpointId, int, list[int], bool | None, Json]]:
    """Yield the checkpoints that a rank posted for one location, in the same form for memory and tiers."""
    if place == 0:
        for text, size, ranks, finite in post["memory"]:
            yield CheckpointId.parse(text), size, ranks, finite, None
    for row in post["tiers"][place - 1] or () if place else ():
        commit = msgspec.convert(row, Commit)
        yield commit.checkpoint, commit.world, [rank for rank, _ in commit.manifests], commit.finite, row


def _described(posts: list[Any], candidates: list[Json]) -> Json:
    """Return the descriptions of the first candidate, or None if one of its snapshots is not described."""
    if not candidates or candidates[0][1] > 0:
        return None
    checkpoint = candidates[0][0]
    described = [post["described"] for post in posts]
    parts = [one[1] for one in described if one is not None and one[0] == checkpoint]
    held = {rank for post in posts for text, _, ranks, _ in post["memory"] if text == checkpoint for rank in ranks}
    return parts if {part["layout"]["rank"] for each in parts for part in each} == held else None


def _asked(step: int | None) -> str:
    return "the newest checkpoint" if step is None else f"step {step}"


# -- restore the first checkpoint that is usable on all ranks --


class NewTerm(Protocol):
    """Begins a term, in which the history continues from the restored checkpoint."""

    def lead(self, restored: CheckpointId) -> Json:
        """Return the term for the other ranks. Rank 0 calls this once all are restored. Raises no CheckpointError."""


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
    term: NewTerm | None = None,
) -> RestoreSource | None:
    """Restore the first source that is intact for all ranks. Log why others were skipped, and list them in `result`.

    `lost`: losses by damage, which count as skipped if they are newer than the restored step or of the requested `step`

    Raises MismatchError before anything is changed. Raises UnreadableError if a checkpoint cannot be read now from any
    tier that has it. An older checkpoint is not used instead, because the history would continue from it, and the
    newer checkpoint, which may be intact, would never be restored.
    """
    job = _Job(world, capture, result, strict, on_touch, term)
    unreadable: tuple[CheckpointId, str, CheckpointError] | None = None
    for source in sources:
        if unreadable is not None and source.checkpoint != unreadable[0]:
            break
        error = _problem(job, source)
        if error is None:
            result.step, result.id, result.tier = source.checkpoint.step, str(source.checkpoint), source.tier
            result.repaired = list(source.repaired)
            _report_lost(world, lost, source.checkpoint, result, step)
            return source
        if is_unreadable(error):
            unreadable = unreadable or (source.checkpoint, source.tier, error)
            logger.warning("step %d in %s cannot be read now: %s", source.checkpoint.step, source.tier, error)
            continue
        result.skipped.append(Skipped(source.checkpoint.step, source.tier, str(error)))
        advice = "" if source.tier == "memory" else f" (`ckpt repair {source.tier}` may repair it)"
        logger.warning("step %d in %s cannot be used%s: %s", source.checkpoint.step, source.tier, advice, error)
    if unreadable is not None:
        checkpoint, tier, why = unreadable
        raise UnreadableError(
            f"step {checkpoint.step} in {tier} cannot be read now and may be intact, so no older step is used: {why}",
            retryable=why.retryable,
        )
    _report_lost(world, lost, None, result, step)
    return None


@dataclass(frozen=True)
class _Job:
    """The arguments of `restore_first`."""

    world: World
    capture: Capture
    result: Restored
    strict: bool
    on_touch: Callable[[], None]
    term: NewTerm | None


def _problem(job: _Job, source: RestoreSource) -> CheckpointError | None:
    """Restore from this source. Return None, or the error, which is the same on all ranks."""
    direct, pauses = False, iter(RETRY_AFTER_S)
    while True:
        try:
            with _no_collecting():
                _restore(job, source, direct=direct)
            return None
        except (CorruptError, StoreError) as error:
            pause = next(pauses, None) if error.retryable else None
            if pause is None:
                return error.with_traceback(None)  # its frames refer to the unfinished restore
            direct = direct or isinstance(error, TransferError)
        finally:
            source.close()
        time.sleep(pause)  # using an older checkpoint because of a transient fault would lose steps


def _report_lost(
    world: World, lost: Sequence[Loss], chosen: CheckpointId | None, result: Restored, step: int | None
) -> None:
    """Log losses once, on rank 0, and list them in `result` on every rank."""
    missed = passed_over(lost, chosen, step=step)
    result.skipped += missed
    if world.rank == 0 and missed and chosen is not None:
        logger.warning("%s", losses.in_words(missed, chosen.step))
    elif world.rank == 0 and lost and not missed:
        logger.warning("found damage, but no newer checkpoint is known to be lost: %s", losses.listed(lost))


@contextlib.contextmanager
def _no_collecting() -> Iterator[None]:
    """Suspend the garbage collector, because scanning all of torch's objects takes as long as the rest of a restore."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _restore(job: _Job, source: RestoreSource, *, direct: bool) -> None:
    world, result, strict, term = job.world, job.result, job.strict, job.term
    described = source.described
    if source.partial and described is None:
        try:
            described = together(world, "describe", source.describe)
        except UsageError as error:  # too large for one message; another location may need no description
            raise CorruptError(f"the ranks cannot exchange their layouts of this step: {error}") from error
    rank = _RankRestore(job, source)
    try:
        posts = together(
            world,
            "place",
            lambda: rank.place(described or []),
            lambda posts: fitting(posts, source.saved if strict and not job.capture.subset else None),
        )
        point("restore.chosen")
        job.on_touch()
        together(world, "fill", lambda: rank.fill(posts, direct))
        point("restore.filled")

        def end(damaged: list[Any]) -> Json:
            return {"damaged": any(damaged), "term": None if term is None else term.lead(source.checkpoint)}

        ended = together(world, "finish", rank.finish, end)
    finally:
        rank.close()
    source.damaged, source.term = ended["damaged"], ended["term"]
    job.capture.keep_apart(rank.placement.apart)
    _report_left_out(rank.placement, result)
    result.overridden = rank.placement.overridden
    if world.rank == 0 and result.overridden:
        logger.warning(OVERRIDDEN, "; ".join(result.overridden))
    result.verified = source.verified


class _RankRestore:
    """Restores one source on this rank. Call `place`, `fill`, `finish` and `close` in this order."""

    placement: Placement
    _filler: Filler

    def __init__(self, job: _Job, source: RestoreSource) -> None:
        self._job, self._source = job, source
        self._transfer: Transfer | None = None

    def place(self, described: list[Json]) -> Json:
        """Open the source and match its tensors to the state, without changing the state. Return this rank's post."""
        source, capture, world, strict = self._source, self._job.capture, self._job.world, self._job.strict
        source.open(described, capture.layout)
        self.placement = placement = _place(capture, source.saved, strict)
        filled = placement.fills or placement.whole
        if not strict and world.size == 1 and source.saved.tensors and not filled:
            raise mismatch([*placement.problems, "no entry fits, even with strict=False"])
        if not source.saved.complete:
            source.narrow({key: [target.box for target in targets] for key, targets in placement.fills.items()})
        self._filler = filler = Filler(source.saved, placement.fills, placement.whole, in_place=strict)
        post: dict[str, Json] = {"problems": placement.problems if strict else []}
        if world.size > 1:
            self._transfer = Transfer(world.rank)
            post |= {**wishes(source, filler), "contact": self._transfer.contact}
        elif strict and source.saved.world > 1:
            post |= {"tensors": wanted_tensors(source.saved, filler)}
        return post

    def fill(self, posts: list[Any], direct: bool) -> None:
        """Read this rank's part of the chunks, keep the needed chunks, send chunks to others, and receive the rest."""
        source, world, result = self._source, self._job.world, self._job.result
        lengths = source.saved.table.length
        if self._transfer is None:
            source.read(self._filler.chunks, self._filler.add, self._filler.places)
            result.nbytes, result.nbytes_received = int(lengths[self._filler.chunks].sum()), 0
            return
        # Reading from the page cache or shared memory is faster than receiving from another rank. `direct`: the network
        # between the ranks has failed.
        alone = direct or not source.remote
        work = divided(world.rank, posts, range(world.size) if alone else world.nodes)
        try:
            reads = known(source.saved, work.reads)
            expects = known(source.saved, [number for numbers in work.expects.values() for number in numbers])
            self._share(self._transfer, work, reads.tolist(), [one["contact"] for one in posts])
        except BaseException as error:
            self._transfer.close()  # so that no rank waits for this one
            if isinstance(error, PeerError | DeadlineError):
                raise TransferError(str(error), retryable=True) from error
            raise
        result.nbytes, result.nbytes_received = int(lengths[reads].sum()), int(lengths[expects].sum())

    def _share(self, transfer: Transfer, work: Work, reads: list[int], contacts: list[Any]) -> None:
        mine, filler, nodes = set(self._filler.chunks), self._filler, self._job.world.nodes
        number_of = dict(zip(reads, work.reads, strict=True))

        def sink(chunk: int, data: memoryview) -> None:
            if chunk in mine:
                filler.add(chunk, data)
            for rank in work.recipients[number_of[chunk]]:
                transfer.send(rank, number_of[chunk], data)

        def room(chunks: I64) -> I64:
            found = np.zeros(len(chunks), np.int64)
            only = [chunk in mine and not work.recipients[number_of[chunk]] for chunk in chunks.tolist()]
            here = np.array(only, np.bool_)
            found[here] = filler.places(chunks[here])
            return found

        transfer.receive(work.expects, contacts, nodes, verified(self._source.saved, filler), CONNECT_S)
        transfer.wait_for({rank for each in work.recipients.values() for rank in each}, CONNECT_S)
        self._source.read(reads, sink, room)
        transfer.wait(TRANSFER_S)

    def finish(self) -> bool:
        """Restore everything except tensors. Return True if this rank replaced damaged data by data of another tier."""
        self._filler.finish()
        for finish in (*self.placement.finishers, *self.placement.last):
            finish()
        return bool(self._source.repaired)

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()


def _report_left_out(placement: Placement, result: Restored) -> None:
    """Log the entries that strict=False has skipped or cast."""
    if placement.cast:
        counts = Counter(placement.cast.values()).items()
        logger.warning("strict=False cast tensors: %s", ", ".join(f"{n} to {dtype}" for dtype, n in counts))
    result.left_out = list(placement.problems)
    if placement.problems:
        shown = "; ".join(placement.problems[:5])
        more = f"; and {len(placement.problems) - 5} more" if len(placement.problems) > 5 else ""
        logger.warning("strict=False skipped entries that do not fit: %s%s (all in last_restore.left_out)", shown, more)


def _place(capture: Capture, saved: SavedState, strict: bool) -> Placement:
    try:
        return capture.place(saved, strict=strict)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if comes_from_user(error):
            raise
        raise CorruptError(f"the saved data does not describe a state: {type(error).__name__}: {error}") from error
