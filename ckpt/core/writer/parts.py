"""Commits a checkpoint once the store has the parts of all ranks. Ranks read the store instead of communicating."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ckpt.core.checkpoint.commits import Role, abort, commit_or_end, given_up
from ckpt.core.checkpoint.encode import Encoder
from ckpt.core.checkpoint.manifests import intact_manifests, ranks_in
from ckpt.core.checkpoint.write import WrittenManifest
from ckpt.core.format.manifest import CheckpointId, folder_of
from ckpt.core.log.records import Acquire, RunState
from ckpt.core.log.run_log import RunLog
from ckpt.errors import SaveError
from ckpt.store import Store

STAGGER_S = 5.0  # time that each further rank's writer waits for the ranks before it, before it commits itself
POLL_S = (0.01, 0.5)  # seconds between two checks, initial and maximum
FAR_STAGGER_S, FAR_POLL_S = 60.0, (0.5, 10.0)  # the same for remote stores, where each check is a request
REPORT_S, FAR_REPORT_S = 10.0, 60.0  # after which a rank that has not saved its shard is reported
GROWTH, FAR_GROWTH = 1.3, 2.0  # growth of the time between two checks


def _is_checkpoint(state: RunState, checkpoint: CheckpointId) -> bool:
    """Return True if the checkpoint is committed, or was retired by retention. Raise SaveError if it was aborted."""
    if checkpoint in state.commits or (checkpoint in state.retired and checkpoint not in state.reasons):
        return True
    if state.ended(checkpoint):
        raise given_up(state, checkpoint)
    return False


async def settle(
    log: RunLog,
    owner: Callable[[], Acquire],
    own: WrittenManifest,
    role: Role,
    *,
    deadline_s: float,
    encoder: Encoder | None = None,
    on_slow: Callable[[str], None] = lambda text: None,
) -> None:
    """Commit the checkpoint when the store has the parts of all its ranks, or wait until another rank's writer has
    committed it.

    Raise SaveError if the checkpoint is aborted, or if parts are missing after `deadline_s`. `encoder`: the encoder of
    this tier, which records damage in it. `on_slow` is called once if a rank is late, for example during a long
    evaluation.
    """
    checkpoint = own.checkpoint
    remote = log.store.remote
    stagger_s, poll_s = (FAR_STAGGER_S, FAR_POLL_S) if remote else (STAGGER_S, POLL_S)
    report_s = FAR_REPORT_S if remote else REPORT_S
    started, pause, reported = time.monotonic(), poll_s[0], role.place > 0 or len(role.ranks) == 1
    while True:
        waited = time.monotonic() - started
        if waited >= role.place * stagger_s:
            parts = await _present(log.store, checkpoint, own, role)
            if parts is not None:
                await commit_or_end(log, owner(), parts, distrusted=encoder.distrusted if encoder else None)
        elif role.world > 1:
            await log.refresh()
        if _is_checkpoint(log.state, checkpoint):
            return
        log.check_owner(owner())
        if waited > report_s and not reported:
            reported = True
            if missing := await _missing(log.store, checkpoint, own, role):
                on_slow(f"step {checkpoint.step} is not in {log.store.url} yet: rank {missing} has not saved its shard")
        if waited > deadline_s:
            await _too_late(log, owner(), own, role, deadline_s)
        await asyncio.sleep(pause)
        pause = min(pause * (FAR_GROWTH if remote else GROWTH), poll_s[1])
        if role.place * stagger_s <= waited:
            await log.refresh()


async def _present(
    store: Store, checkpoint: CheckpointId, own: WrittenManifest, role: Role
) -> list[WrittenManifest] | None:
    """Return the parts that belong in this tier, or None while some are missing."""
    if role.ranks == (own.manifest.rank,):
        return [own]
    keys = [info.key async for info in store.list(folder_of(checkpoint))]
    ready = ranks_in(keys)
    if not ready.issuperset(role.ranks):
        return None
    found = await intact_manifests(store, checkpoint, keys, own)
    return [found[rank] for rank in role.ranks] if found.keys() >= set(role.ranks) else None


async def _missing(store: Store, checkpoint: CheckpointId, own: WrittenManifest, role: Role) -> str:
    """Return a text with the ranks whose parts are missing or damaged, at most eight."""
    keys = [info.key async for info in store.list(folder_of(checkpoint))]
    ready = (await intact_manifests(store, checkpoint, keys, own)).keys()  # a damaged part counts as missing
    return ", ".join(map(str, sorted(set(role.ranks) - ready)[:8]))


async def _too_late(log: RunLog, mine: Acquire, own: WrittenManifest, role: Role, deadline_s: float) -> None:
    checkpoint = own.checkpoint
    missing = await _missing(log.store, checkpoint, own, role)
    what = f"the manifests of ranks {missing}" if missing else "the commit by another rank's writer"
    reason = f"{what} did not arrive within {deadline_s:g} s"
    await abort(log, mine, checkpoint, reason)
    if checkpoint in log.state.commits:
        return  # committed at the last moment
    raise SaveError(f"step {checkpoint.step} was not committed: {reason}")
