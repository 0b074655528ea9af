"""From one rank's part to a checkpoint of all ranks. No rank asks another: the parts in the store are the truth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ckpt.core.checkpoint.commit import Role, abort, commit_or_end, given_up
from ckpt.core.checkpoint.encode import Encoder
from ckpt.core.checkpoint.parts import ranks_in, sound_parts
from ckpt.core.checkpoint.write import WrittenPart
from ckpt.core.format.manifest import Attempt, folder_of
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import Acquire, RunState
from ckpt.errors import SaveError
from ckpt.store import Store

STAGGER_S = 5.0  # the writer of each further rank waits so much longer before it commits for the first one
POLL_S = (0.01, 0.5)  # seconds between two looks, at first and in the end
FAR_STAGGER_S, FAR_POLL_S = 60.0, (0.5, 10.0)  # the same where each look is a request
REPORT_S, FAR_REPORT_S = 10.0, 60.0  # after which a rank is reported that has not saved its part
GROWTH, FAR_GROWTH = 1.3, 2.0  # of the time between two looks


def _is_checkpoint(state: RunState, attempt: Attempt) -> bool:
    """Or has been one, perhaps so long ago that newer ones have taken its place. SaveError if it will never be."""
    if attempt in state.commits or (attempt in state.retired and attempt not in state.reasons):
        return True
    if state.ended(attempt):
        raise given_up(state, attempt)
    return False


async def settle(
    log: RunLog,
    owner: Callable[[], Acquire],
    own: WrittenPart,
    role: Role,
    *,
    deadline_s: float,
    encoder: Encoder | None = None,
    on_held: Callable[[], None] = lambda: None,
    on_slow: Callable[[str], None] = lambda text: None,
) -> None:
    """From a part to a checkpoint: commit when all ranks' parts are there, or wait until another rank's writer has.

    SaveError if the attempt is given up, or parts are missing after `deadline_s`. `encoder`: of this tier, which knows
    what is damaged there. `on_held` is called when all that belongs into this place is there, and the checkpoint needs
    those of other places as well. `on_slow` is called once if a rank is late: it may be in a long evaluation.
    """
    attempt = Attempt.parse(own.part.attempt)
    remote = log.store.remote
    stagger_s, poll_s = (FAR_STAGGER_S, FAR_POLL_S) if remote else (STAGGER_S, POLL_S)
    report_s = FAR_REPORT_S if remote else REPORT_S
    started, pause, told, reported = time.monotonic(), poll_s[0], False, role.place > 0 or len(role.ranks) == 1
    while True:
        waited = time.monotonic() - started
        if waited >= role.place * stagger_s:
            parts = await _present(log.store, attempt, own, role)
            if parts is not None and attempt not in log.state.held:
                kind, distrusted = "HELD" if role.partial else "COMMIT", encoder.distrusted if encoder else None
                await commit_or_end(log, owner(), parts, kind=kind, distrusted=distrusted)
        elif role.world > 1:
            await log.refresh()
        if _is_checkpoint(log.state, attempt):
            return
        log.check_owner(owner())
        if attempt in log.state.held and not told:
            told = True
            on_held()
        if waited > report_s and not reported and attempt not in log.state.held:
            reported = True
            if missing := await _missing(log.store, attempt, own, role):
                on_slow(f"step {attempt.step} is not in {log.store.url} yet: rank {missing} has not saved its part")
        if waited > deadline_s:
            await _too_late(log, owner(), own, role, deadline_s)
        await asyncio.sleep(pause)
        pause = min(pause * (FAR_GROWTH if remote else GROWTH), poll_s[1])
        if role.place * stagger_s <= waited:
            await log.refresh()


async def _present(store: Store, attempt: Attempt, own: WrittenPart, role: Role) -> list[WrittenPart] | None:
    """The parts of all ranks that belong here, None while some are missing."""
    if role.ranks == (own.part.rank,):
        return [own]
    keys = [info.key async for info in store.list(folder_of(attempt))]
    ready = ranks_in(keys)
    if not ready.issuperset(role.ranks):
        return None
    found = await sound_parts(store, attempt, keys, own)
    return [found[rank] for rank in role.ranks] if found.keys() >= set(role.ranks) else None


async def _missing(store: Store, attempt: Attempt, own: WrittenPart, role: Role) -> str:
    """Return the ranks whose parts are not there, as text."""
    keys = [info.key async for info in store.list(folder_of(attempt))]
    ready = (await sound_parts(store, attempt, keys, own)).keys()  # a damaged one has not come
    return ", ".join(map(str, sorted(set(role.ranks) - ready)[:8]))


async def _too_late(log: RunLog, mine: Acquire, own: WrittenPart, role: Role, deadline_s: float) -> None:
    attempt = Attempt.parse(own.part.attempt)
    missing = await _missing(log.store, attempt, own, role)
    what = f"the parts of ranks {missing}" if missing else "the word that the disks of other nodes hold theirs"
    reason = f"{what} did not come within {deadline_s:g} s"
    if not role.partial:
        await abort(log, mine, attempt, reason)
        if attempt in log.state.commits:
            return  # at the last moment
    raise SaveError(f"step {attempt.step} was not committed: {reason}")
