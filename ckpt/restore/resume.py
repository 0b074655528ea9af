"""Going on from a checkpoint: which one, agreed by all ranks, and its bytes from whoever can read them.

    candidates -> for each, newest first: describe -> open -> place -> share the reading -> fill -> all agree

Every rank restores the same checkpoint or none does. Ranks agree through `World`, with deadlines; bytes that several
ranks want are read once per node and passed on (`ckpt.ranks.exchange`). One rank alone does the same without any of
that.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckpt import errors
from ckpt.checkpoint import losses, read
from ckpt.checkpoint.losses import Loss, Skipped, passed_over
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    DeadlineError,
    PeerError,
    StoreError,
    TransferError,
    UsageError,
    from_wire,
    to_wire,
)
from ckpt.events import log as logger
from ckpt.events import point
from ckpt.format.digest import blob_digest
from ckpt.format.manifest import Attempt
from ckpt.format.merged import SavedState
from ckpt.format.values import Json
from ckpt.ranks.exchange import Exchange, assign
from ckpt.ranks.world import World
from ckpt.restore import redo_source
from ckpt.restore.redo_source import Logs, RedoSource
from ckpt.restore.sources import HeldSnapshot, Mask, MemorySource, RestoreSource, StoreSource
from ckpt.runlog.log import Acquire, Commit, RunLog, in_history
from ckpt.state.capture import Capture
from ckpt.state.filler import Filler
from ckpt.state.placement import Placement, mismatch

RETRY_AFTER_S = (0.2, 1.0)
TRANSFER_S = 600.0
MOST_LOST = 64  # damaged logs that a rank tells the others of


@dataclass
class Restored:
    """What `restore()` did on this rank. Bytes that it read itself, and that other ranks read for it; `repaired`: what
    it had to take from a further tier; `left_out`: under strict=False, what did not fit. `redone`: how many steps came
    from a redo log, after `base_step` had been loaded. `skipped`: what was newer and could not be used, or was lost
    with a damaged log record or redo log.

    `verified` is False only for a snapshot that nobody has digested yet.
    """

    step: int | None
    attempt: str | None = None
    tier: str | None = None
    verified: bool = True
    seconds: float = 0.0
    nbytes: int = 0
    nbytes_received: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    redone: int = 0
    base_step: int | None = None


# -- which there are --


def gather(
    world: World,
    snapshots: Iterable[HeldSnapshot],
    acquires: Iterable[Acquire],
    urls: Sequence[str],
    roots: Sequence[Sequence[int]],
    step: int | None,
    lost: list[Loss] | None = None,
) -> list[RestoreSource]:
    """Every checkpoint that all ranks together can restore, newest first, memory before disk, what was undone last.

    `snapshots`: on this node; `acquires`: the history as far as memory knows it; `roots`: for each of the tiers `urls`,
    which root each rank has (by the lowest rank that has it). With `step` only checkpoints of that step, and without it
    nothing that was undone or not finite. All ranks get the same list. What damage has taken away is added to `lost`.
    """
    here: dict[Attempt, list[HeldSnapshot]] = {}
    logs: list[RunLog] = []
    redos: dict[int, Logs] = {}

    def look() -> Json:
        for snapshot in snapshots:
            here.setdefault(snapshot.attempt, []).append(snapshot)
        found: list[Loss] = []
        for i, url in enumerate(urls):
            log, damage = read.run(_log_of(url))
            logs.append(log)
            if roots[i][world.rank] == world.rank:
                found += damage
                redos[i] = redo_source.look(url, verify=False)
        known = {*acquires, *(a for log in logs for a in log.state.acquires)}
        redoable = [_redoable(redos[i], logs[i], known, step, found) if i in redos else None for i in range(len(urls))]
        return {
            "step": step,
            "memory": [_held(attempt, parts) for attempt, parts in here.items()],
            "acquires": [[a.epoch, a.nonce, None if a.restored is None else str(a.restored)] for a in known],
            "tiers": [_commits(log) if roots[i][world.rank] == world.rank else None for i, log in enumerate(logs)],
            "redo": redoable,
            "lost": [[one.tier, one.reason, [str(a) for a in one.attempts]] for one in found[:MOST_LOST]],
        }

    agreed, damage = together(world, "candidates", look, _candidates)
    if lost is not None:
        lost += [Loss(tier, reason, tuple(map(Attempt.parse, attempts))) for tier, reason, attempts in damage]
    found: list[RestoreSource] = []
    for text, place, undone in agreed:
        attempt = Attempt.parse(text)
        if place == 0:
            mine, speaks = here.get(attempt, ()), world.local_rank == 0
            found.append(MemorySource(attempt, mine, alone=world.size == 1, undone=undone, describing=speaks))
            continue
        if place > len(urls):
            i = place - 1 - len(urls)
            known = redos[i] if i in redos else redos.setdefault(i, redo_source.look(urls[i], verify=False))
            others = [url for url in urls if url != urls[i]]
            found.append(_redo_source(world, attempt, known, logs[i], roots[i], others, undone=undone))
            continue
        log, partial = logs[place - 1], len(set(roots[place - 1])) > 1
        commit = log.state.commits.get(attempt) or log.state.held.get(attempt)
        speaks = roots[place - 1][world.rank] == world.rank
        others = [urls[p - 1] for same, p, _ in agreed if same == text and 0 < p <= len(urls) and p != place]
        source = StoreSource(
            urls[place - 1], attempt, commit, partial=partial, undone=undone, describing=speaks, others=others
        )
        found.append(source)
    return found


def _candidates(posts: list[Any]) -> tuple[list[tuple[str, int, bool]], list[Json]]:
    """(attempt, place, undone) of what is whole in one place; place 0 is memory, then come the tiers, then what their
    redo logs lead to. And what is lost: tier, reason, attempts. Pure.

    What was undone is what any place knows to be undone: another may have been away when a job went back.
    """
    step = posts[0]["step"]
    for rank, post in enumerate(posts):
        if post["step"] != step:
            raise UsageError(f"rank {rank} asks for {_asked(post['step'])}, rank 0 for {_asked(step)}")
    acquires = {(e, n): Acquire(e, n, r and Attempt.parse(r)) for post in posts for e, n, r in post["acquires"]}
    found: list[tuple[Attempt, int]] = []
    broken: set[Attempt] = set()  # some rank said that it is not finite: restored only if asked for by its step
    places = [[post["memory"], *post["tiers"], *post["redo"]] for post in posts]
    for place in range(len(places[0])):
        parts: dict[Attempt, tuple[int, set[int]]] = {}
        for post in places:
            for text, size, ranks, finite in post[place] or ():
                parts.setdefault(Attempt.parse(text), (size, set()))[1].update(ranks)
                if finite is False:
                    broken.add(Attempt.parse(text))
        found += [(attempt, place) for attempt, (size, ranks) in parts.items() if len(ranks) == size]
    history = set(in_history(sorted(acquires.values(), key=lambda a: a.epoch), {attempt for attempt, _ in found}))
    known = [(attempt, place, attempt not in history) for attempt, place in found]
    wanted = [one for one in known if (not one[2] and one[0] not in broken if step is None else one[0].step == step)]
    wanted.sort(key=lambda one: (one[2], -one[0].epoch, -one[0].step, one[1]))
    every = [one for post in posts for one in post["lost"]]
    gone = {Attempt.parse(text) for _, _, attempts in every for text in attempts}
    if step is None:
        gone &= set(in_history(sorted(acquires.values(), key=lambda a: a.epoch), gone))
    lost = [[tier, reason, [a for a in attempts if Attempt.parse(a) in gone]] for tier, reason, attempts in every]
    return [(str(attempt), place, undone) for attempt, place, undone in wanted], lost


def _asked(step: int | None) -> str:
    return "the newest checkpoint" if step is None else f"step {step}"


def _held(attempt: Attempt, parts: list[HeldSnapshot]) -> Json:
    """What the memory of this node has of an attempt, in the same form as `_commits`."""
    finite = False if any(s.label.finite is False for s in parts) else None
    return [str(attempt), parts[0].layout.world, [s.layout.rank for s in parts], finite]


def _commits(log: RunLog) -> list[Json]:
    """What a root has, whole or in part: attempt, ranks that saved, ranks whose part is here, whether it is finite."""
    state = log.state
    every: dict[Attempt, Commit] = {**state.held, **state.commits}
    return [[str(a), c.world, [rank for rank, _, _ in c.parts], c.finite] for a, c in every.items()]


def _redoable(logs: Logs, log: RunLog, acquires: Collection[Acquire], step: int | None, lost: list[Loss]) -> list[Json]:
    """What the redo logs of a root lead to, in the same form as `_commits`. What they do not lead to any more is added
    to `lost`."""
    commits = {**log.state.held, **log.state.commits}
    logs.verify(commits, acquires, step)
    lost += logs.losses(commits, acquires)
    return [
        [str(attempt), size, ranks, logs.finite(attempt, ranks)]
        for attempt, (size, ranks) in logs.reach(commits, acquires, step).items()
    ]


def _redo_source(
    world: World,
    attempt: Attempt,
    logs: Logs,
    log: RunLog,
    roots: Sequence[int],
    others: Sequence[str],
    *,
    undone: bool,
) -> RedoSource:
    """The ranks that see the same logs share out whose steps they redo."""
    group = [rank for rank in range(world.size) if roots[rank] == roots[world.rank]]
    saved = sorted(rank for rank, frames in logs.frames.items() if attempt in frames)
    mine = [rank for k, rank in enumerate(saved) if group[k % len(group)] == world.rank]
    commits = {**log.state.held, **log.state.commits}
    alone = world.size == 1
    return RedoSource(
        attempt, logs, commits, mine, alone=alone, undone=undone, initializer=_with_denormals, others=others
    )


def _with_denormals() -> None:
    torch.set_flush_denormal(False)


async def _log_of(url: str) -> tuple[RunLog, list[Loss]]:
    log = await read.open_run(url)
    try:
        return log, await losses.of_log(log)
    finally:
        await log.store.aclose()


# -- one of them --


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

    Raises MismatchError, after which nothing has been changed.
    """
    for source in sources:
        direct = False
        for patience in (*RETRY_AFTER_S, None):
            try:
                with _no_collecting():
                    _restore(world, source, capture, result, strict=strict, on_touch=on_touch, direct=direct)
            except (CorruptError, StoreError) as error:
                if error.retryable and patience is not None:
                    time.sleep(patience)  # to fall back for a passing fault would cost steps for good
                    direct = direct or isinstance(error, TransferError)
                    continue
                result.skipped.append(Skipped(source.attempt.step, source.tier, str(error)))
                advice = "" if source.tier == "memory" else f" (`ckpt repair {source.tier}` may mend it)"
                logger.warning("step %d in %s cannot be used%s: %s", source.attempt.step, source.tier, advice, error)
                break
            finally:
                source.close()
            result.step, result.attempt, result.tier = source.attempt.step, str(source.attempt), source.tier
            result.repaired = list(source.repaired)
            if isinstance(source, RedoSource):
                result.redone, result.base_step = source.redone, source.base_step
            _say_lost(world, lost, source.attempt, result, step)
            return source
    _say_lost(world, lost, None, result, step)
    return None


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
    exchange: Exchange | None = None
    try:
        ready: list[tuple[Placement, Filler]] = []

        def prepare() -> Json:
            nonlocal exchange
            source.open(described)
            placement = _place(capture, source.saved, strict)
            if not strict and world.size == 1 and source.saved.tensors and not placement.fills:
                raise mismatch([*placement.problems, "nothing of it fits, also with strict=False"])
            source.narrow({key: [target.box for target in targets] for key, targets in placement.fills.items()})
            filler = Filler(source.saved, placement.fills, in_place=strict)
            ready.append((placement, filler))
            told: dict[str, Json] = {"problems": placement.problems if strict else []}
            if world.size > 1:
                exchange = Exchange(world.rank, _verified(source.saved, filler))
                told |= {**_wishes(source, filler), "contact": exchange.contact}
            elif strict and source.saved.world > 1:
                told |= {"tensors": _tensors(source.saved, filler)}
            return told

        posts = together(world, "place", prepare, lambda posts: _fitting(posts, source.saved if strict else None))
        placement, filler = ready[0]
        point("restore.chosen")
        on_touch()
        together(world, "fill", lambda: _fill(world, source, filler, exchange, posts, result, direct))
        point("restore.filled")
        together(world, "finish", lambda: _finish(filler, placement))
        capture.keep_apart(placement.apart)
        _say_left_out(placement, result)
        result.verified = source.saved.digested
    finally:
        if exchange is not None:
            exchange.close()


def _say_left_out(placement: Placement, result: Restored) -> None:
    """What strict=False has passed over is not passed over in silence."""
    result.left_out = list(placement.problems)
    if placement.problems:
        shown = "; ".join(placement.problems[:5])
        more = f"; and {len(placement.problems) - 5} more" if len(placement.problems) > 5 else ""
        logger.warning("strict=False took what fits, and not: %s%s (all in last_restore.left_out)", shown, more)


def together(
    world: World, topic: str, work: Callable[[], Json], decide: Callable[[list[Json]], Json] | None = None
) -> Any:
    """Do something on every rank. If it failed anywhere, all raise the same error: all must go on in the same way."""
    post: dict[str, Json] = {}
    failure: Exception | None = None
    try:
        post["value"] = work()
    except Exception as error:
        failure, post["error"] = error, to_wire(error)
    verdict = world.agree(topic, post, lambda posts: _verdict(posts, decide))
    if "error" not in verdict:
        return verdict["value"]
    foreign = failure is not None and not isinstance(failure, CheckpointError)
    if failure is not None and (world.size == 1 or (foreign and verdict["rank"] == world.rank)):
        raise failure  # of ours, all raise the same, word for word
    if failure is not None and verdict["rank"] != world.rank:
        logger.warning("%s failed on this rank as well: %r", topic, failure)
    raise from_wire(verdict["error"]) from failure


def _verdict(posts: list[Any], decide: Callable[[list[Json]], Json] | None) -> dict[str, Json]:
    """What failed first counts, not what failed since a rank failed."""
    failed = [(rank, post["error"]) for rank, post in enumerate(posts) if "error" in post]
    failed.sort(key=lambda one: (one[1]["error"] == TransferError.__name__, one[0]))
    for rank, error in failed[:1]:
        known = error["error"] in vars(errors)  # somebody else's exception is raised by the rank that met it
        message = f"rank {rank}: {error['message']}" if len(posts) > 1 else error["message"]
        return {"rank": rank, "error": {**error, "message": message, **({} if known else {"error": "PeerError"})}}
    values = [post["value"] for post in posts]
    try:
        return {"value": values if decide is None else decide(values)}
    except CheckpointError as error:
        return {"rank": -1, "error": to_wire(error)}


def _place(capture: Capture, saved: SavedState, strict: bool) -> Placement:
    try:
        return capture.place(saved, strict=strict)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CorruptError(f"what was saved does not describe a state: {type(error).__name__}: {error}") from error


def _fitting(posts: list[Any], saved: SavedState | None) -> list[Any]:
    """The posts, or MismatchError. What a rank of many does not want, another must (`saved`: if that matters)."""
    problems: dict[str, list[int]] = {}
    for rank, post in enumerate(posts):
        for problem in post["problems"]:
            problems.setdefault(problem, []).append(rank)
    if problems:
        shown = [p if len(r) == len(posts) else f"rank {', '.join(map(str, r[:8]))}: {p}" for p, r in problems.items()]
        raise mismatch(shown)
    if saved is not None and (len(posts) > 1 or saved.world > 1):
        wanted = np.any([_unpack_mask(post["tensors"], len(saved.keys)) for post in posts], axis=0)
        if lost := _unclaimed(saved, wanted):
            raise mismatch(
                [f"{name} was saved by {_who(saved, name)}, and is in the state of no rank here" for name in lost]
            )
    return posts


def _unclaimed(saved: SavedState, wanted: Mask) -> list[str]:
    """Tensors of modules and optimizers that no rank wants: without them the training would not be the same."""
    claimed = {saved.keys[i][0] for i in np.flatnonzero(wanted).tolist()}
    return [
        name
        for name in sorted(saved.shared_names() - claimed)
        if any(saved.tensors[name, instance].spec.nbytes for instance in saved.instances(name))
    ]


def _tensors(saved: SavedState, filler: Filler) -> str:
    """Which tensors this rank wants something of."""
    shards = np.unique(saved.shard_of_blob[filler.blobs])
    place = {key: i for i, key in enumerate(saved.keys)}
    names, instances = saved.table.columns.names, saved.table.columns.instance
    found = np.zeros(len(place), np.bool_)
    found[[place[names[i], int(instances[i])] for i in shards.tolist()]] = True
    return _pack(np.packbits(found))


def _wishes(source: RestoreSource, filler: Filler) -> dict[str, Json]:
    """What a rank tells the others: the tensors and the blobs that it wants, their sizes, and what it can read.

    Blobs by their numbers among those of all ranks, since a rank may know of a few only. None: it can read all.
    """
    saved, readable = source.saved, source.readable()
    can = None if readable.all() else _pack_numbers(saved.numbers[readable[: saved.table.owned]])
    return {
        "tensors": _tensors(saved, filler),
        "wants": _pack_numbers(saved.numbers[filler.blobs]),
        "sizes": _pack(saved.table.length[filler.blobs].astype("<i4")),
        "can": can,
    }


def _who(saved: SavedState, name: str) -> str:
    instances = saved.instances(name)
    return "all ranks" if instances[0] < 0 else "rank " + ", ".join(map(str, instances[:8]))


def _verified(saved: SavedState, filler: Filler) -> Callable[[int, memoryview], None]:
    """Takes what another rank has read: it came over a network, so it is checked once more."""
    local = dict(zip(saved.numbers[filler.blobs].tolist(), filler.blobs, strict=True))

    def take(number: int, data: memoryview) -> None:
        blob = local[number]
        expected = int(saved.table.length[blob])
        if len(data) != expected or (saved.digested and blob_digest(data) != saved.table.digest[blob].tobytes()):
            raise CorruptError(f"blob {number} was damaged on its way from another rank")
        filler.add(blob, data)

    return take


@dataclass(frozen=True)
class Work:
    """What one rank does, by the numbers of blobs among those of all ranks: it reads some, for these ranks as well, and
    expects others."""

    reads: list[int]
    recipients: dict[int, tuple[int, ...]]
    expects: list[int]


def _divided(rank: int, posts: Sequence[Any], nodes: Sequence[int]) -> Work:
    """The work of a rank. Where all can read everything, only the ranks of its own node matter to it."""
    ranks = list(range(len(posts)))
    if all(post["can"] is None for post in posts):
        ranks = [other for other in ranks if nodes[other] == nodes[rank]]
    wanted = [_unpack_numbers(posts[other]["wants"]) for other in ranks]
    lengths = [np.frombuffer(_unpack(posts[other]["sizes"]), "<i4").astype(np.int64) for other in ranks]
    numbers, first = np.unique(np.concatenate(wanted), return_index=True)
    sizes = np.concatenate(lengths)[first]
    wants = np.zeros((len(ranks), len(numbers)), np.bool_)
    can = np.ones_like(wants)
    for row, (other, mine) in enumerate(zip(ranks, wanted, strict=True)):
        wants[row, np.searchsorted(numbers, mine)] = True
        if posts[other]["can"] is not None:
            can[row] = np.isin(numbers, _unpack_numbers(posts[other]["can"]))
    share = assign(ranks.index(rank), sizes, wants, can, [nodes[other] for other in ranks])
    reads = numbers[share.reads].tolist()
    recipients = [tuple(ranks[i] for i in each) for each in share.recipients]
    return Work(reads, dict(zip(reads, recipients, strict=True)), numbers[share.expects].tolist())


def _fill(
    world: World,
    source: RestoreSource,
    filler: Filler,
    exchange: Exchange | None,
    posts: list[Any],
    result: Restored,
    direct: bool,
) -> None:
    """Read this rank's share, keep what it wants, pass on what others want, and wait for what they pass on."""
    saved, table = source.saved, source.saved.table
    result.nbytes = result.nbytes_received = 0
    if exchange is None:
        source.read(filler.blobs, filler.add, filler.room)
        result.nbytes = int(table.length[filler.blobs].sum())
        return
    # With `direct` nobody passes anything on that all can read: the network between the ranks did not work.
    work = _divided(world.rank, posts, range(world.size) if direct else world.nodes)
    mine = set(filler.blobs)
    reads = _known(saved, work.reads)
    number_of = dict(zip(reads.tolist(), work.reads, strict=True))

    def sink(blob: int, data: memoryview) -> None:
        if blob in mine:
            filler.add(blob, data)
        for rank in work.recipients[number_of[blob]]:
            exchange.send(rank, number_of[blob], data)

    def room(blob: int) -> memoryview | None:
        return filler.room(blob) if blob in mine and not work.recipients[number_of[blob]] else None

    try:
        exchange.expect(work.expects)
        others = {rank for each in work.recipients.values() for rank in each}
        exchange.connect([post["contact"] for post in posts], sorted(others), world.nodes, timeout_s=30.0)
        source.read(reads.tolist(), sink, room)
        exchange.finish_sending()
        exchange.wait(work.expects, TRANSFER_S)
    except (PeerError, DeadlineError) as error:
        exchange.fail(str(error))
        raise TransferError(str(error), retryable=True) from error
    except BaseException as error:
        exchange.fail(str(error))
        raise
    result.nbytes = int(table.length[reads].sum())
    result.nbytes_received = int(table.length[_known(saved, work.expects)].sum())


def _known(saved: SavedState, numbers: Sequence[int]) -> npt.NDArray[np.intp]:
    """Blobs by their numbers among those of all ranks: a rank is only given what it knows of."""
    found = np.minimum(np.searchsorted(saved.numbers, numbers), max(0, len(saved.numbers) - 1))
    if (saved.numbers[found] != np.asarray(numbers, np.int64)).any():
        raise CorruptError("the ranks do not mean the same by the numbers of blobs")
    return found


def _finish(filler: Filler, placement: Placement) -> None:
    filler.finish()
    for finish in (*placement.finishers, *placement.last):
        finish()


def _pack(column: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 1)).decode()


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _unpack_mask(text: str, count: int) -> Mask:
    return np.unpackbits(np.frombuffer(_unpack(text), np.uint8), count=count).astype(np.bool_)


def _pack_numbers(ascending: npt.NDArray[np.int64]) -> str:
    """As the steps from each to the next, which are alike."""
    return _pack(np.diff(ascending, prepend=0).astype("<i8"))


def _unpack_numbers(text: str) -> npt.NDArray[np.int64]:
    return np.cumsum(np.frombuffer(_unpack(text), "<i8"), dtype=np.int64)
