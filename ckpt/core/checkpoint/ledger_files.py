"""Where accounts are put, and found again: `ledger/` in the durable places.

The lease goes the same way. At most one put per tier is under way, and the newest content follows it. So a tier that
hangs delays neither the others nor the bookkeeper, and older content never lands last.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.core.cadence import ledger
from ckpt.core.cadence.ledger import Account, Decision
from ckpt.core.checkpoint import steady
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.errors import CheckpointError, CorruptError, FormatError, NotFoundError, StoreError
from ckpt.events import log
from ckpt.store import Store, get_small

KEEP_S, KEEP_REMOTE_S = 10.0, 60.0  # between two puts of an account, into a folder and into a bucket
LOOK_BACK = 64  # incarnations that a cadence is derived from
FIND_S, AGAIN_S = 30.0, 2.0  # for an account of before to be read

Content = Callable[[OpenTier], bytes | None]  # None: this tier gets nothing


@dataclass
class _Kept:
    """What was put into one tier.

    at: when each key was put last, by the monotonic clock.
    waiting: what will be put after the put under way, by key.
    """

    at: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    task: asyncio.Task[None] | None = None
    waiting: dict[str, Content] = field(default_factory=dict)


class LedgerFiles:
    """Everything runs in the writer's event loop. `tiers`: the durable places as they are now."""

    def __init__(self, tiers: Callable[[], list[OpenTier]]) -> None:
        self._tiers = tiers
        self._kept: dict[str, _Kept] = {}

    def put(self, key: str, content: Content, interval_s: Callable[[Store], float], *, now: bool = False) -> None:
        """Put an object into each tier for which this rank speaks, without waiting.

        interval_s: seconds between two puts of this key, by store. now: put it at once.
        """
        for tier in self._tiers():
            if not tier.opened or tier.role.place > 0:
                continue
            kept = self._kept.setdefault(tier.url, _Kept())
            if not now and time.monotonic() - kept.at.get(key, -math.inf) < interval_s(tier.store):
                continue
            kept.waiting[key] = content
            if kept.task is None or kept.task.done():
                kept.task = asyncio.get_running_loop().create_task(self._work(tier, kept))

    async def _work(self, tier: OpenTier, kept: _Kept) -> None:
        while kept.waiting:
            key = next(iter(kept.waiting))
            content = kept.waiting.pop(key)
            kept.at[key] = time.monotonic()
            try:
                await tier.prepare()
                if (data := content(tier)) is not None:
                    await tier.log.store.put(key, data)
                kept.failed = False
            except Exception as error:  # said once, and training goes on
                if not kept.failed:
                    log.warning("the ledger could not be put into %s: %s", tier.url, error)
                kept.failed = True

    async def finish(self, timeout_s: float) -> None:
        """Wait for what is on its way; for the nearest tier first."""
        end = time.monotonic() + timeout_s
        for tier in self._tiers():
            kept = self._kept.get(tier.url)
            if kept is not None and kept.task is not None and not kept.task.done():
                await asyncio.wait({kept.task}, timeout=max(0.05, end - time.monotonic()))


def interval_s(store: Store) -> float:
    """Return the seconds between two puts of an account while its trainer lives."""
    return KEEP_REMOTE_S if store.remote else KEEP_S


async def find(tiers: list[OpenTier], key: str) -> Account | None:
    """An account that was put into the nearest tier; None if there is none, or it cannot be read after all."""
    end = time.monotonic() + FIND_S
    while tiers:
        try:
            return Account.from_bytes(await get_small(tiers[0].log.store, key, ledger.MAX_SIZE))
        except NotFoundError:
            return None
        except CheckpointError as error:
            if not isinstance(error, StoreError) or time.monotonic() > end:
                log.warning("what the ledger said of this start is lost: %s", error)
                return None
            await asyncio.sleep(AGAIN_S)
    return None


async def account_keys(store: Store) -> list[str]:
    """Of all accounts, by incarnation; of one, the lowest rank last."""
    listed = await steady.listing(store, ledger.PREFIX)
    return sorted([info.key for info in listed if ledger.is_account(info.key)], key=_order)


def _order(key: str) -> tuple[int, int]:
    number, _, rank = key.removeprefix(ledger.PREFIX).split(".")[:3]
    return int(number), -int(rank)


UNREADABLE = (CorruptError, FormatError, NotFoundError)


async def newest_accounts(
    store: Store, most: int, passing: tuple[type[CheckpointError], ...] = UNREADABLE
) -> list[Account]:
    """The last so many, in order, without those that raise such errors."""
    found: list[Account] = []
    for key in (await account_keys(store))[-most:]:
        with contextlib.suppress(*passing):
            found.append(Account.from_bytes(await steady.get(store, key, limit=ledger.MAX_SIZE)))
    return found


async def read_back(tiers: list[OpenTier], most: int = LOOK_BACK) -> list[Account]:
    """The last incarnations, as the nearest tier has them."""
    try:
        return ledger.in_order(await newest_accounts(tiers[0].log.store, most, (CheckpointError,))) if tiers else []
    except StoreError as error:
        log.info("the ledger of earlier incarnations cannot be read: %s", error)
        return []


def last_decision(accounts: list[Account]) -> Decision | None:
    """What the last incarnation saved by, so that the next one need not find it out again."""
    return next((one.decisions[-1] for one in reversed(accounts) if one.decisions), None)
