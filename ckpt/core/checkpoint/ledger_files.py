"""Writes and reads accounts in `ledger/` of the durable tiers.

The lease is written in the same way. Each tier has at most one put in flight, followed by a put of the newest content.
A tier that hangs therefore delays neither the others nor the caller, and older content never replaces newer content.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.core.cadence import ledger
from ckpt.core.cadence.ledger import Account, Decision
from ckpt.core.checkpoint import steady
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.errors import CheckpointError, CorruptError, FormatError, NotFoundError, StoreError
from ckpt.events import log
from ckpt.store import Store, get_small

KEEP_S, KEEP_REMOTE_S = 10.0, 60.0  # between two puts of an account, into a folder and into a bucket
LOOK_BACK = 64  # job attempts from which a save interval is derived
FIND_S, AGAIN_S = 30.0, 2.0  # to read an earlier account

Content = Callable[[OpenTier], bytes | None]  # None: this tier gets nothing


@dataclass
class _Kept:
    """The puts of one key to one tier. `at`: when it was put last, by the monotonic clock; `waiting`: what to put after
    the put in flight."""

    at: float = -math.inf
    failed: bool = False
    task: asyncio.Task[None] | None = None
    waiting: Content | None = None


class LedgerFiles:
    """Writes accounts and the lease, in the writer's event loop. `tiers`: returns the present durable tiers."""

    def __init__(self, tiers: Callable[[], list[OpenTier]]) -> None:
        self._tiers = tiers
        self._kept: dict[tuple[str, str], _Kept] = {}

    def put(self, key: str, content: Content, interval_s: Callable[[Store], float], *, now: bool = False) -> None:
        """Put into each tier that this rank is responsible for, without waiting. `interval_s`: seconds between two puts
        of this key, by store; `now`: put it immediately."""
        for tier in self._tiers():
            if not tier.opened or tier.role.place > 0:
                continue
            kept = self._kept.setdefault((tier.url, key), _Kept())
            if not now and time.monotonic() - kept.at < interval_s(tier.store):
                continue
            kept.waiting = content
            if kept.task is None or kept.task.done():
                kept.task = asyncio.get_running_loop().create_task(self._work(tier, key, kept))

    async def _work(self, tier: OpenTier, key: str, kept: _Kept) -> None:
        while (content := kept.waiting) is not None:
            kept.waiting, kept.at = None, time.monotonic()
            try:
                await tier.prepare()
                if (data := content(tier)) is not None:
                    await tier.log.store.put(key, data)
                kept.failed = False
            except Exception as error:  # logged once; training continues
                if not kept.failed:
                    log.warning("could not write %s to %s: %s", key, tier.url, error)
                kept.failed = True

    async def finish(self, timeout_s: float) -> None:
        """Wait for puts in flight, nearest tier first."""
        end = time.monotonic() + timeout_s
        for tier in self._tiers():
            tasks = [one.task for (url, _), one in self._kept.items() if url == tier.url and one.task is not None]
            if running := [task for task in tasks if not task.done()]:
                await asyncio.wait(running, timeout=max(0.05, end - time.monotonic()))


def interval_s(store: Store) -> float:
    """Return the seconds between two puts of an account while its trainer lives."""
    return KEEP_REMOTE_S if store.remote else KEEP_S


async def find(tiers: list[OpenTier], key: str) -> Account | None:
    """Return an account from the nearest tier. Return None if there is none, or if it cannot be read."""
    end = time.monotonic() + FIND_S
    while tiers:
        try:
            return Account.from_bytes(await get_small(tiers[0].log.store, key, ledger.MAX_SIZE))
        except NotFoundError:
            return None
        except CheckpointError as error:
            if not isinstance(error, StoreError) or time.monotonic() > end:
                log.warning("could not read the run metrics of this job attempt: %s", error)
                return None
            await asyncio.sleep(AGAIN_S)
    return None


async def account_keys(store: Store) -> list[str]:
    """Return the keys of all accounts, by job attempt and then by descending rank."""
    listed = await steady.listing(store, ledger.PREFIX)
    return sorted([info.key for info in listed if ledger.is_account(info.key)], key=_order)


def _order(key: str) -> tuple[int, int]:
    number, _, rank = key.removeprefix(ledger.PREFIX).split(".")[:3]
    return int(number), -int(rank)


UNREADABLE = (CorruptError, FormatError, NotFoundError)


async def newest_accounts(
    store: Store, most: int, passing: tuple[type[CheckpointError], ...] = UNREADABLE
) -> list[Account]:
    """Return the newest accounts in order, without those that raise such errors."""
    found: list[Account] = []
    for key in (await account_keys(store))[-most:]:
        with contextlib.suppress(*passing):
            found.append(Account.from_bytes(await steady.get(store, key, limit=ledger.MAX_SIZE)))
    return found


async def read_back(tiers: list[OpenTier], most: int = LOOK_BACK) -> list[Account]:
    """Return the accounts of the last job attempts from the nearest tier."""
    try:
        return ledger.in_order(await newest_accounts(tiers[0].log.store, most, (CheckpointError,))) if tiers else []
    except StoreError as error:
        log.info("could not read the run metrics of earlier job attempts: %s", error)
        return []


def last_decision(accounts: list[Account]) -> Decision | None:
    """Return the last save intervals, so that the next job attempt need not measure them again."""
    return next((one.decisions[-1] for one in reversed(accounts) if one.decisions), None)
