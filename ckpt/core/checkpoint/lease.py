"""Identifies a run, checks that no other trainer uses it (`lease.json`), and stores accounts (`ledger/`).

**Identity.** `Identity` distinguishes runs that have the same path or URL. Two containers may mount different folders
at one path, and two endpoints may have buckets of the same name. The root id of FORMAT.json identifies a run; an empty
folder gets a root id before any other file. A copied folder has the same root id, so the identity also contains device
and inode of a folder. Device and inode may change although the folder stays the same (FUSE, NFS, a restored backup). In
that case, `Identity.root` and the folder itself decide.

**Lease.** The writer renews `lease.json` as long as its trainer lives. A start must not end a running training, so
`check_free` reads the lease and decides in this order:

1. If the lease is missing, records that its trainer has ended, or is the caller's own, the run is free.
2. If the lease belongs to the present owner, and its process is visible, the run is free if that process has ended.
3. Otherwise the file is watched, for 30 s in a folder and 60 s in a bucket. The run is in use if the file changes.

Rule 3 covers trainers on other machines and in other PID namespaces, copies of a run, a damaged lease, a lease of a
newer version, and an owner that has written no lease yet. Clocks of two machines are never compared. A fenced job stops
renewing the lease when it reads the log. The owner's next renewal replaces a late renewal of a fenced job.

**Accounts.** `LedgerFiles` writes accounts and the lease to the durable tiers. Each tier has at most one put in flight,
followed by a put of the newest content. So a tier that hangs delays neither other tiers nor the caller, and older
content never replaces newer content.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.core.cadence import ledger
from ckpt.core.cadence.ledger import Account, Decision
from ckpt.core.checkpoint import chunks, commits
from ckpt.core.checkpoint.commits import acquire
from ckpt.core.checkpoint.open_tier import OpenTier, open_place
from ckpt.core.format.manifest import MAX_FORMAT, new_nonce, read_format, seal, typed, unseal
from ckpt.core.ipc import channel
from ckpt.core.ipc.heartbeat import Process, boot_id, namespace
from ckpt.core.log.run_log import RunLog, infer_root
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    InUseError,
    NotFoundError,
    StoreError,
    UnreadableError,
)
from ckpt.events import log
from ckpt.events import log as logger
from ckpt.store import LEASE, Store, folder_of, get_small, normalise, open_store


@dataclass(frozen=True)
class Identity:
    """The identity of a run, as this process sees it.

    root: the root id, "" for a run that is in memory only
    text: a text that is equal for all processes that see the same run at its path or URL
    """

    root: str = ""
    text: str = ""


async def identify(spec: Mapping[str, Any], *, create: bool = False) -> Identity | None:
    """Identify the run of a tier. If there is no run, create it with `create`, otherwise return None.

    spec: see `ckpt.tiers.Tier.spec`
    Raises FormatError if the location has other files, and StoreError if it cannot be read or created.
    """
    from ckpt.core.checkpoint.open_tier import store_of

    store = store_of(spec, writable=create)
    try:
        with contextlib.suppress(NotFoundError):
            return await _seen(store)
        if not create:
            return None
        await commits.create_run(store)
        return await _seen(store)
    finally:
        await store.aclose()


async def _seen(store: Store) -> Identity:
    try:
        root: str | None = read_format(await get_small(store, "FORMAT.json", MAX_FORMAT))
    except CorruptError as error:
        if (root := await infer_root(store)) is None:
            raise FormatError(f"{store.url} is not a run, or its log is damaged: {error}") from None
    assert root is not None
    return Identity(root, f"{root}\0{_where(store)}")


def _where(store: Any) -> str:
    """Return a text that distinguishes this folder or endpoint from others with the same path or URL."""
    if (folder := folder_of(store.url)) is not None:
        found = os.stat(folder)
        return f"{found.st_dev}:{found.st_ino}"
    while hasattr(store, "store"):
        store = store.store
    return str(getattr(store, "endpoint", ""))


def writer_keys(place: str) -> dict[int, str]:
    """Return the keys of the writers on this machine that own the run at a path, URL or memory:NAME, by local rank.

    If this process can read the run, writers of another run with the same path or URL are left out. A bucket is read
    only if the writers belong to several runs.
    """
    found = channel.at_place(channel.run_key(place, 0))
    several = len({key.rpartition("-")[0] for key in found}) > 1
    identity = _read_identity(place) if several or (found and folder_of(place) is not None) else None
    if identity is not None:
        return channel.siblings(channel.run_key(place, 0, identity.text))
    return {int(key.rpartition("-")[2]): key for key in found}


def _read_identity(place: str) -> Identity | None:
    """Return the identity of the run at a path or URL, or None if this process cannot read it."""
    from ckpt.core.checkpoint.concurrent import run

    async def read() -> Identity:
        store = open_store(place, patience_s=0)
        try:
            return await _seen(store)
        finally:
            await store.aclose()

    try:
        return run(read())
    except CheckpointError:
        return None


def key_of(folder: str | os.PathLike[str], local_rank: int = 0) -> str:
    """Return the key of the writer that owns or would own the run in a folder."""
    place = normalise(str(folder))
    found = _read_identity(place)
    return channel.run_key(place, local_rank, "" if found is None else found.text)


# -- lease.json --


VERSION = 1
MAX_SIZE = 64 << 10
RENEW_S, RENEW_REMOTE_S = 10.0, 20.0  # time between two renewals, in a folder and in a bucket
MISSED = 3  # after this many missed renewals, the trainer counts as ended
DYING_S = 3.0  # maximum time for a killed process to end
LOOK_S, LOOK_REMOTE_S = 0.2, 2.0
SAME_S = 1.0  # start times that differ by less than this belong to one process
UNSEEN = "Nothing was changed. Make lease.json readable (mount, permissions, credentials) and start again."


@dataclass
class Lease:
    """The content of lease.json, which describes one trainer process.

    term: "<term>.<nonce>" of the job that owns the run, as in the log
    token: random text that identifies the writer that renews the lease
    boot: id of the machine's last boot. namespace: PID namespace of the process. born: see `Process.born`
    inode: inode of the run's FORMAT.json, because a copied run has another inode; 0 in a bucket
    opened: time in seconds since 1970, for people
    renewed: number of renewals, so that each renewal changes the file
    ended: how the trainer ended, "" while it lives
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
        """Return the term as a number."""
        return int(self.term.partition(".")[0])

    @property
    def visible(self) -> bool:
        """Return True if this process can see whether the lease's process lives."""
        return (self.boot, self.namespace) == (boot_id(), namespace("pid")) and self.boot != ""

    @property
    def alive(self) -> bool:
        """Return True if the lease's process runs. Call this only if the lease is `visible`."""
        process = Process.of(self.pid)
        return process.alive and abs(process.born - self.born) < SAME_S

    def renewal(self, store: Store) -> bytes:
        """Return the bytes of the next renewal in a store."""
        self.renewed += 1
        return seal({"version": VERSION, **asdict(self), "inode": inode_of(store.url)})

    @classmethod
    def parse(cls, raw: bytes | memoryview) -> Lease:
        """Decode a lease. Raise CorruptError if it is damaged, and FormatError if a newer version wrote it."""
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
    """Return once it is certain that no trainer uses this run.

    say: called with a message if the check takes a while
    ours: returns True for a lease of a trainer that is known to have ended
    Raises InUseError if a trainer uses the run, and UnreadableError if the lease cannot be read now.
    """
    began, first = time.monotonic(), None
    patience_s = MISSED * lease_interval_s(log.store)
    while log.state.acquires and (raw := await _read_lease(log)) is not None:
        lease = None
        with contextlib.suppress(CorruptError, FormatError):
            lease = Lease.parse(raw)
        if lease is not None and (lease.ended or ours(lease)):
            return
        waited_s = time.monotonic() - began
        owner = log.state.acquires[-1]
        mine = lease is not None and lease.term == f"{owner.term}.{owner.nonce}" and lease.visible
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
    """Open these tiers, check each one, and close them. Raise InUseError if a trainer uses the run."""
    for spec in specs:
        place = await open_place(spec)
        try:
            await check_free(place.log, lambda text: logger.warning("%s", text), _of_this_process)
        finally:
            await place.store.aclose()


async def fence(specs: Sequence[dict[str, Any]]) -> None:
    """Fence the job that owns a run. It can no longer save to these tiers, and its writers release its memory. If a
    tier cannot be opened, nothing is changed."""
    places = list[OpenTier]()
    try:
        for spec in specs:
            places.append(await open_place(spec))
        nonce, floor = new_nonce(), max(place.log.state.term for place in places)
        for place in places:
            await acquire(place.log, nonce, floor=floor)
    finally:
        for place in places:
            await place.store.aclose()


def lease_interval_s(store: Store) -> float:
    """Return the seconds between two renewals of a lease in this store."""
    return RENEW_REMOTE_S if store.remote else RENEW_S


def inode_of(url: str) -> int:
    """Return the inode of FORMAT.json in a run's folder, which differs in a copy of the run; 0 if there is none."""
    folder = folder_of(url)
    with contextlib.suppress(OSError):
        return 0 if folder is None else os.stat(folder / "FORMAT.json").st_ino
    return 0


def in_use(store: Store, lease: Lease | None) -> InUseError:
    if lease is None:
        return InUseError(f"another process trains {store.url}: it renews a lease that this version cannot read")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lease.opened))
    return InUseError(
        f"process {lease.pid} on {lease.host} has trained {store.url} since {since} and has reached step "
        f"{max(0, lease.step)}"
    )


def _of_this_process(lease: Lease) -> bool:
    return lease.visible and lease.pid == os.getpid()


async def _read_lease(log: RunLog) -> bytes | None:
    """Return the bytes of the lease, or None if there is no lease."""
    try:
        with contextlib.suppress(NotFoundError):
            return bytes(await get_small(log.store, LEASE, MAX_SIZE))
        await log.check_same()  # a mount that is away for a moment also hides the lease
        with contextlib.suppress(NotFoundError):
            return bytes(await get_small(log.store, LEASE, MAX_SIZE))
        return None
    except CorruptError:
        return b""  # the file is longer than any lease
    except StoreError as error:
        text = f"cannot check now whether another process trains {log.store.url}, so this one did not open it: {error}"
        raise UnreadableError(text, retryable=error.retryable, advice=UNSEEN) from error


# -- ledger/ --


KEEP_S, KEEP_REMOTE_S = 10.0, 60.0  # time between two puts of an account, into a folder and into a bucket
LOOK_BACK = 64  # number of job attempts from which a save interval is derived
FIND_S, AGAIN_S = 30.0, 2.0  # timeout to read an earlier account, and pause before a retry

Content = Callable[[OpenTier], bytes | None]  # returns the bytes to put into a tier, or None


@dataclass
class _Kept:
    """The puts of one key to one tier. `at`: time of the last put, by the monotonic clock. `waiting`: content to put
    after the put in flight."""

    at: float = -math.inf
    failed: bool = False
    task: asyncio.Task[None] | None = None
    waiting: Content | None = None


class LedgerFiles:
    """Writes accounts and the lease, in the writer's event loop. `tiers`: function that returns the durable tiers."""

    def __init__(self, tiers: Callable[[], list[OpenTier]]) -> None:
        self._tiers = tiers
        self._kept: dict[tuple[str, str], _Kept] = {}

    def put(self, key: str, content: Content, interval_s: Callable[[Store], float], *, now: bool = False) -> None:
        """Put content into each tier that this rank is responsible for, without waiting. `interval_s`: returns the
        seconds between two puts of this key in a store. `now`: True to put it immediately."""
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
        """Wait for the puts in flight, nearest tier first, at most `timeout_s`."""
        end = time.monotonic() + timeout_s
        for tier in self._tiers():
            tasks = [one.task for (url, _), one in self._kept.items() if url == tier.url and one.task is not None]
            if running := [task for task in tasks if not task.done()]:
                await asyncio.wait(running, timeout=max(0.05, end - time.monotonic()))


def ledger_interval_s(store: Store) -> float:
    """Return the seconds between two puts of an account while the trainer lives."""
    return KEEP_REMOTE_S if store.remote else KEEP_S


async def find(tiers: list[OpenTier], key: str) -> Account | None:
    """Return an account from the nearest tier, or None if it does not exist or cannot be read."""
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
    """Return the keys of all accounts, ordered by job attempt and then by descending rank."""
    listed = await chunks.listing(store, ledger.PREFIX)
    return sorted([info.key for info in listed if ledger.is_account(info.key)], key=_order)


def _order(key: str) -> tuple[int, int]:
    number, _, rank = key.removeprefix(ledger.PREFIX).split(".")[:3]
    return int(number), -int(rank)


UNREADABLE = (CorruptError, FormatError, NotFoundError)


async def newest_accounts(
    store: Store, most: int, passing: tuple[type[CheckpointError], ...] = UNREADABLE
) -> list[Account]:
    """Return the newest accounts in order. Leave out accounts whose reading raises an error in `passing`."""
    found: list[Account] = []
    for key in (await account_keys(store))[-most:]:
        with contextlib.suppress(*passing):
            found.append(Account.from_bytes(await chunks.get(store, key, limit=ledger.MAX_SIZE)))
    return found


async def read_back(tiers: list[OpenTier], most: int = LOOK_BACK) -> list[Account]:
    """Return the accounts of the last job attempts, from the nearest tier."""
    try:
        return ledger.in_order(await newest_accounts(tiers[0].log.store, most, (CheckpointError,))) if tiers else []
    except StoreError as error:
        log.info("could not read the run metrics of earlier job attempts: %s", error)
        return []


def last_decision(accounts: list[Account]) -> Decision | None:
    """Return the save intervals decided last, so that the next job attempt need not measure them again."""
    return next((one.decisions[-1] for one in reversed(accounts) if one.decisions), None)
