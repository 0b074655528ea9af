"""Checks `lease.json`, which the writer renews as long as its trainer lives, to find a trainer that uses the run.

A start must not end a running training. `check_free` reads the lease and decides in this order:

1. The lease is missing, records that its trainer has ended, or is the caller's own: the run is free.
2. The lease is the present owner's, and its process can be seen from here: the run is free if that process has ended.
3. Otherwise the file is watched, for 30 s in a folder and 60 s in a bucket: the run is in use if the file changes.

Rule 3 covers trainers on other machines and in other PID namespaces, copies of a run, a damaged lease, a lease of a
newer version, and an owner that has written no lease yet. Clocks of two machines are never compared.

A fenced job does not renew the lease. If it does so once more before it has read the log, the owner's next renewal
replaces its content.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.core.checkpoint.commit import acquire
from ckpt.core.checkpoint.open_tier import OpenTier, open_place
from ckpt.core.format.manifest import new_nonce, seal, unseal
from ckpt.core.format.typed_json import typed
from ckpt.core.ipc.process import Process, boot_id, namespace
from ckpt.core.log.log import RunLog
from ckpt.errors import CorruptError, FormatError, InUseError, NotFoundError, StoreError, UnreadableError
from ckpt.events import log as logger
from ckpt.store import LEASE, Store, folder_of, get_small

VERSION = 1
MAX_SIZE = 64 << 10
RENEW_S, RENEW_REMOTE_S = 10.0, 20.0  # between two renewals, in a folder and in a bucket
MISSED = 3  # missed renewals after which no trainer is running
DYING_S = 3.0  # how long a process that was killed may take to end
LOOK_S, LOOK_REMOTE_S = 0.2, 2.0
SAME_S = 1.0  # accuracy of the start time of a process
UNSEEN = "Nothing was changed. Make lease.json readable (mount, permissions, credentials) and start again."


@dataclass
class Lease:
    """The content of lease.json, about one trainer process.

    term: "<term>.<nonce>" of the job that owns the run, as in the log.
    token: random, of the writer that renews the lease.
    boot, namespace: the machine since its last boot, and the PID namespace. born: see `Process.born`.
    inode: of the run's FORMAT.json, because a copied run has another one. 0 in a bucket.
    opened: seconds since 1970, for people.
    renewed: the number of renewals, so that each one changes the file.
    ended: how the trainer ended, "" while it lives.
    """

    term: str
    token: str
    rank: int
    pid: int
    born: float
    host: str
    boot: str
    namespace: int
    opened: float
    inode: int = 0
    step: int = -1
    renewed: int = 0
    ended: str = ""

    @classmethod
    def of_trainer(cls, term: str, token: str, rank: int, pid: int) -> Lease:
        """Return the lease of a trainer on this machine."""
        born, host, there = Process.of(pid).born, socket.gethostname(), (boot_id(), namespace("pid"))
        return cls(term, token, rank, pid, born, host, *there, time.time())

    @property
    def number(self) -> int:
        """Return the number of the term."""
        return int(self.term.partition(".")[0])

    @property
    def visible(self) -> bool:
        """Return True if its process can be seen from here while it lives."""
        return (self.boot, self.namespace) == (boot_id(), namespace("pid")) and self.boot != ""

    @property
    def alive(self) -> bool:
        """Return True if its process runs. The process must be visible from here."""
        process = Process.of(self.pid)
        return process.alive and abs(process.born - self.born) < SAME_S

    def renewal(self, store: Store) -> bytes:
        """Return the next content of lease.json in a store."""
        self.renewed += 1
        return seal({"version": VERSION, **asdict(self), "inode": inode_of(store.url)})

    @classmethod
    def parse(cls, raw: bytes | memoryview) -> Lease:
        """Raise CorruptError if the file is damaged, FormatError if a newer version wrote it."""
        data = unseal(raw, LEASE)
        try:
            if data.pop("version") > VERSION:
                raise FormatError("lease.json was written by a newer version of everystep")
            lease = typed(cls, data)
            lease.number  # noqa: B018
            return lease
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"lease.json is not a lease: {error!r}") from None


async def check_free(
    log: RunLog, say: Callable[[str], None], ours: Callable[[Lease], bool] = lambda lease: False
) -> None:
    """Return once no trainer uses this run.

    say: called with a message if that takes a while.
    ours: True for a lease of a trainer that is known to have ended.
    Raises InUseError if a trainer uses the run, UnreadableError if the lease cannot be read now.
    """
    began, first = time.monotonic(), None
    patience_s = MISSED * interval_s(log.store)
    while log.state.acquires and (raw := await _read(log)) is not None:
        lease = None
        with contextlib.suppress(CorruptError, FormatError):
            lease = Lease.parse(raw)
        if lease is not None and (lease.ended or ours(lease)):
            return
        waited_s = time.monotonic() - began
        owner = log.state.acquires[-1]
        mine = lease is not None and lease.term == f"{owner.epoch}.{owner.nonce}" and lease.visible
        if lease is not None and mine and not lease.alive:
            return
        if lease is not None and mine and lease.inode == inode_of(log.store.url):
            if waited_s > DYING_S:
                raise in_use(log.store, lease)
        elif first is None:
            first = raw
            who = "a process" if lease is None else f"process {lease.pid} on {lease.host}"
            say(
                f"{log.store.url}: {who} trained this run; waiting up to {patience_s:.0f} s to see whether it still "
                "does. takeover=True does not wait"
            )
        elif raw != first:
            raise in_use(log.store, lease)
        elif waited_s > patience_s:
            return
        await asyncio.sleep(LOOK_REMOTE_S if log.store.remote else LOOK_S)


async def check_unused(specs: Sequence[dict[str, Any]]) -> None:
    """Open these tiers and close them. Raise InUseError if a trainer uses the run."""
    for spec in specs:
        place = await open_place(spec)
        try:
            await check_free(place.log, lambda text: logger.warning("%s", text), _of_this_process)
        finally:
            await place.store.aclose()


async def fence(specs: Sequence[dict[str, Any]]) -> None:
    """Fence the job that owns a run: it can no longer save to these tiers, and its writers release its memory.
    Nothing is changed unless all tiers can be used."""
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


def interval_s(store: Store) -> float:
    """Return the seconds between two renewals of a lease in this store."""
    return RENEW_REMOTE_S if store.remote else RENEW_S


def inode_of(url: str) -> int:
    """Return the inode of FORMAT.json in a run's folder, 0 if there is none. A copied run has another one."""
    folder = folder_of(url)
    with contextlib.suppress(OSError):
        return 0 if folder is None else os.stat(folder / "FORMAT.json").st_ino
    return 0


def in_use(store: Store, lease: Lease | None) -> InUseError:
    if lease is None:
        return InUseError(f"another process trains {store.url}: it renews a lease that this version cannot read")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lease.opened))
    return InUseError(
        f"process {lease.pid} on {lease.host} trains {store.url} since {since}; it was at step {max(0, lease.step)} "
        "just now"
    )


def _of_this_process(lease: Lease) -> bool:
    return lease.visible and lease.pid == os.getpid()


async def _read(log: RunLog) -> bytes | None:
    """Return the bytes of the lease, None if there is none."""
    try:
        with contextlib.suppress(NotFoundError):
            return bytes(await get_small(log.store, LEASE, MAX_SIZE))
        await log.check_same()  # a mount that is away for a moment hides the lease, too
        with contextlib.suppress(NotFoundError):
            return bytes(await get_small(log.store, LEASE, MAX_SIZE))
        return None
    except CorruptError:
        return b""  # longer than any lease
    except StoreError as error:
        text = f"cannot check now whether another process trains {log.store.url}, so it was not taken over: {error}"
        raise UnreadableError(text, retryable=error.retryable, advice=UNSEEN) from error
