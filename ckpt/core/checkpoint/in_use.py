"""Checks in the run's files whether a trainer is using the run, because opening it must not end that training.

The heartbeat is the account in the ledger. The writer updates it every few seconds as long as the trainer lives, and
the last update records its end. On the trainer's machine its process is checked. From another machine a recent account
is watched for a while. This delays a restart only if the machine of the last trainer vanished a few seconds ago.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ckpt.core.cadence.ledger import Account
from ckpt.core.checkpoint.commit import acquire
from ckpt.core.checkpoint.ledger_files import interval_s, newest_accounts
from ckpt.core.checkpoint.open_tier import OpenTier, open_place
from ckpt.core.format.manifest import new_nonce
from ckpt.core.ipc.process import Process, boot_id, namespace
from ckpt.core.log.log import RunLog
from ckpt.errors import CorruptError, FormatError, InUseError, NotFoundError, StoreError, UnreadableError
from ckpt.events import log as logger

BEATS = 3  # missed updates after which no trainer is running
DYING_S = 3.0  # for a killed process to end
LOOK_S, LOOK_FAR_S = 0.2, 2.0
UNSEEN = "Nothing was changed. Make the files in ledger/ readable (mount, permissions, credentials) and start again."
SAME_S = 1.0  # precision of a process's start time


async def check_free(
    log: RunLog, say: Callable[[str], None], ours: Callable[[Account], bool] = lambda account: False
) -> None:
    """Return when no trainer uses this run, as far as can be known. Raise InUseError if one does.

    Raises UnreadableError if the ledger cannot be read now. A damaged account is watched, because a live trainer writes
    it again.

    say: called with a message if the check has to wait.
    ours: returns True for the account of a trainer that is known to have ended.
    """
    began, first, told = time.monotonic(), None, False
    patience_s = BEATS * interval_s(log.store)
    while True:
        waited_s = time.monotonic() - began
        try:
            account = await _holder(log)
        except CorruptError as error:
            if waited_s > patience_s:
                return
            if not told:
                say(f"{log.store.url}: {error}; waiting up to {patience_s:.0f} s to see whether a trainer is using it")
            told = True
            await asyncio.sleep(LOOK_FAR_S if log.store.remote else LOOK_S)
            continue
        if account is None or ours(account):
            return
        if _here(account):
            if not _alive(account):
                return
            if waited_s > DYING_S:
                raise _in_use(log, account)
        elif first is None:
            first, age_s = account, time.time() - account.wall(account.kept)
            if age_s > patience_s:
                return
            say(
                f"{log.store.url}: process {account.pid} on {account.host} trained this run {max(0.0, age_s):.0f} s "
                f"ago; waiting up to {patience_s:.0f} s to see whether it still does"
            )
        elif account.kept != first.kept:
            raise _in_use(log, account)
        elif waited_s > patience_s:
            return
        await asyncio.sleep(LOOK_FAR_S if log.store.remote else LOOK_S)


async def check_unused(specs: Sequence[dict[str, Any]]) -> None:
    """Open these tiers and close them. Raise InUseError if a trainer uses the run."""
    for spec in specs:
        place = await open_place(spec)
        try:
            await check_free(place.log, lambda text: logger.warning("%s", text), _of_this_process)
        finally:
            await place.store.aclose()


async def fence(specs: Sequence[dict[str, Any]]) -> None:
    """Fence the job that owns a run: it can no longer save to these tiers, and its writers release its memory. Nothing
    is changed unless all tiers can be used."""
    places = list[OpenTier]()
    try:
        for spec in specs:
            places.append(await open_place(spec))
        nonce, floor = new_nonce(), max(place.log.state.epoch for place in places)
        for place in places:
            await acquire(place.log, nonce, floor=floor)
    finally:
        for place in places:
            await place.store.aclose()


def _of_this_process(account: Account) -> bool:
    return _here(account) and account.pid == os.getpid()


async def _holder(log: RunLog) -> Account | None:
    """Return the account of the job attempt that owns the run, unless it has ended. Raise CorruptError if it is
    damaged."""
    try:
        account = next(iter(await newest_accounts(log.store, 1, (FormatError, NotFoundError))), None)
    except StoreError as error:
        text = f"cannot check now whether another process trains {log.store.url}, so the run was not opened: {error}"
        raise UnreadableError(text, retryable=error.retryable, advice=UNSEEN) from error
    if account is None or account.end is not None or not log.state.acquires:
        return None
    owner = log.state.acquires[-1]
    return account if account.of(f"{owner.epoch}.{owner.nonce}") else None


def _here(account: Account) -> bool:
    """Return True if its process is visible here while it lives."""
    return (account.boot, account.namespace) == (boot_id(), namespace("pid")) and account.boot != ""


def _alive(account: Account) -> bool:
    process = Process.of(account.pid)
    return process.alive and abs(process.born - account.born) < SAME_S


def _in_use(log: RunLog, account: Account) -> InUseError:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(account.wall(account.opened)))
    where = f"process {account.pid} on {account.host}"
    return InUseError(f"{where} is training {log.store.url} since {since} (last known step: {max(0, account.step)})")
