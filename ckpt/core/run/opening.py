"""Opens a run: finds the writer of the last job attempt or starts a new one (`WriterFinder`), opens the tiers through
the writer (`RunOpener`), and finds the snapshots in the memory of this node (`HeldSnapshots`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.core.cadence.cadence import MEMORY, Auto
from ckpt.core.checkpoint.commits import Role
from ckpt.core.checkpoint.lease import check_unused, fence
from ckpt.core.checkpoint.losses import Loss
from ckpt.core.checkpoint.read import run
from ckpt.core.format.manifest import CheckpointId, nonce_of
from ckpt.core.ipc import channel, messages
from ckpt.core.ipc.messages import Json
from ckpt.core.log.run_log import Acquire, in_history
from ckpt.core.ranks.world import World
from ckpt.core.restore.sources import HeldSnapshot
from ckpt.core.run.memory import HeldElsewhere, KnownLayouts, SnapshotMemory, as_digests
from ckpt.core.run.writer_link import REQUEST_S, WriterClient
from ckpt.core.snapshot.stage import Stager
from ckpt.errors import (
    CheckpointError,
    DeadlineError,
    FencedError,
    InUseError,
    NameTakenError,
    RunGoneError,
    StoreError,
    WriterError,
)
from ckpt.events import log
from ckpt.store import folder_of
from ckpt.tiers import Memory, Tier

if TYPE_CHECKING:
    from ckpt.core.run.writer_supervisor import WriterSupervisor

OPEN_S = 300.0
NUMBERS_EACH = 10_000  # data file numbers reserved for each writer of a checkpoint; the next writer uses higher numbers
NEXT_NONCES = 64  # number of times that other jobs may take ownership while this job opens the run or restores


@dataclass(frozen=True)
class Opened:
    """The durable tiers, and the memory of earlier job attempts, as this rank sees them."""

    roots: tuple[str, ...]  # the id of the run in each tier; ranks with equal ids share the location
    term: int  # the highest known term
    has_checkpoints: bool
    cadence: Json  # the measured save intervals of the last job attempt; {} if unknown


class RunOpener:
    """Opens the run for this rank. `owner`: the owner that all ranks agreed on. `roles`: this rank's role per tier."""

    def __init__(
        self,
        writer: WriterSupervisor,
        held: SnapshotMemory,
        tiers: list[Tier],
        memory: Memory | None,
        world: World,
        commit_s: float,
        takeover: bool,
        root: str,
    ) -> None:
        """`root`: the id of the run in the nearest tier, as read by this process."""
        self._roots = [root] if tiers else []  # the ids in all tiers after the run was opened
        self._writer, self._held, self.tiers, self._memory = writer, held, tiers, memory
        self._world, self._commit_s, self._takeover = world, commit_s, takeover
        self.owner = Acquire(0, "", None)
        self.found: list[str] = []  # the ids of the runs in all tiers
        self.roles = [Role((world.rank,), 0, world.size) for _ in tiers]
        self.turns = 0  # number of terms that this job has requested
        self._fenced = False  # True if this start has fenced a job

    def open(self, client: WriterClient, *, writers: int = 0) -> Opened:
        """Make the writer open the tiers without changing them. `writers`: number of this trainer's writers that have
        died."""
        every_of: list[tuple[str, object]] = [(tier.url, tier.every) for tier in self.tiers]
        if self._memory is not None:
            every_of.append((MEMORY, self._memory.every))
        request = messages.OpenRun(
            tiers=[tier.spec() for tier in self.tiers],
            linger_s=self._memory.linger_s if self._memory is not None else 0.0,
            commit_s=self._commit_s,
            first_number=NUMBERS_EACH * writers,
            check=not self._takeover and not self.owner.term and self._world.local_rank == 0,
            auto=[name for name, every in every_of if isinstance(every, Auto)],
            next_nonces=self._next_nonces,
            acquires=[_row(acquire) for acquire in self._held.inherited.acquires],
            roots=self._roots,
        )
        reply = client.ask(request, OPEN_S)
        if not self.owner.term:
            self.found = [tier.root for tier in reply.tiers]
        inherited = self._held.inherited
        terms = [*(a.term for a in inherited.acquires), *(tier.term for tier in reply.tiers)]
        stored = any(tier.checkpoints or tier.damaged for tier in reply.tiers)
        snapshots = any(arena.sealed() for arena in inherited.arenas)
        return Opened(tuple(tier.root for tier in reply.tiers), max([0, *terms]), stored or snapshots, reply.cadence)

    def open_again(self, client: WriterClient, *, writers: int) -> None:
        """Open the run in a writer that replaces a dead one."""
        self.open(client, writers=writers)
        if self.owner.term:
            self._own(client, recover=False)

    @property
    def near(self) -> dict[str, str]:
        """Return a dict from the URL of the nearest tier to the id of the run in it."""
        return dict(zip([tier.url for tier in self.tiers], self._roots[:1], strict=False))

    @property
    def roots(self) -> dict[str, str]:
        """Return a dict from the URL of each tier to the id of the run in it. Call this after `open`."""
        return dict(zip([tier.url for tier in self.tiers], self.found, strict=True))

    def nonce(self, turn: int) -> str:
        """Return the nonce of a term. All ranks compute the same nonce, so that writers recognize their own job."""
        self.turns = turn + 1
        return nonce_of(self._world.job, turn)

    @property
    def _next_nonces(self) -> list[str]:
        """List the nonces by which a writer recognizes that its own job has taken ownership."""
        first = max(0, self.turns - 1)  # a new writer may have to repeat the request with the last nonce
        return [nonce_of(self._world.job, turn) for turn in range(first, first + NEXT_NONCES)]

    def acquire(self, nonce: str, floor: int, restored: CheckpointId | None) -> list[int]:
        """Take ownership of the tiers for which this rank is responsible. Return their terms, which must be equal."""
        mine = self._spoken_for()
        if not mine and (self.roles or self._world.rank > 0):
            return []  # other ranks take ownership of all tiers
        request = messages.AcquireRun(nonce, floor, str(restored) if restored else None, mine)
        return self._writer.insist(lambda client: client.ask(request))  # safe to repeat with the same nonce

    def own(self, owner: Acquire, *, recover: bool) -> list[messages.PartsHere]:
        """Set the owner that all ranks have agreed on. Recover the tiers for which this rank is responsible, and return
        the checkpoints of which they have only some manifests."""
        with self._writer.lock:
            self.owner = owner
            self._roots = self.found  # a replacement writer must find the same runs
            self._held.inherited.acquires.append(owner)
        self._held.count_anew()
        return self._writer.insist(lambda client: self._own(client, recover=recover))

    def _own(self, client: WriterClient, *, recover: bool) -> list[messages.PartsHere]:
        roles = [(list(role.ranks), role.place, role.world) for role in self.roles]
        recovered = self._spoken_for() if recover else []
        return client.ask(messages.OwnRun(_row(self.owner), roles, recovered, self._next_nonces), OPEN_S)

    def _spoken_for(self) -> list[int]:
        return [i for i, role in enumerate(self.roles) if role.place == 0]

    def is_ours(self, owner: messages.Owner) -> bool:
        """Return True if this owner belongs to our history, or is a later owner from our job."""
        ours = {(one.term, one.nonce) for one in (*self._held.inherited.acquires, self.owner)}
        return owner[:2] in ours or owner[1] in {nonce_of(self._world.job, turn) for turn in range(self.turns)}

    def make_way(self, found: WriterClient, hello: messages.LendReply, what: str = "") -> None:
        """Handle a live trainer of the run on this machine. With `takeover`, fence its job in the log, and wait until
        its writer has released the memory. `what`: a prefix of the run's name in messages.

        Raises InUseError if the trainer may continue, or the error that prevents access to the tiers.
        """
        refusal = in_use(self.tiers, hello.trainer, time.time() - hello.since, what)
        if not self._takeover:
            raise refusal
        if not self.tiers:
            raise InUseError(f"{refusal}, and takeover=True needs a folder or URL, through which that job is fenced")
        if not self._fenced:
            run(fence([tier.spec() for tier in self.tiers]))
            self._fenced = True
            log.warning("%s: fenced that job, so it can no longer save", refusal)
        end = time.monotonic() + FREED_S
        while time.monotonic() < end:
            try:
                if not found.ask(messages.Lend(fenced=True), max(0.1, end - time.monotonic())).alive:
                    return
            except WriterError:
                return
            except DeadlineError:
                break
            time.sleep(0.1)
        raise InUseError(
            f"{found.described()}, has not released it within {FREED_S:g} s, although its job is fenced. Start again "
            f"when the memory is free, or end the process: kill -9 {found.found_pid}"
        )


def _row(acquire: Acquire) -> messages.Owner:
    return acquire.term, acquire.nonce, str(acquire.restored) if acquire.restored else None


MEET_S = 60.0  # timeout to connect to the writer that has the run's name, or to get this name for a new writer
DYING_S = 3.0  # timeout for a killed trainer to be detected as dead
FREED_S = 15.0  # timeout for a writer whose job is fenced to release its memory
HELLO_S = 10.0  # timeout for the reply of an existing writer; afterwards, check whether the process is stopped
PATIENT_S = 60.0  # timeout for a writer that is not stopped, because a low-priority process is slow on a busy machine
RESPAWN_LIMIT = 3  # no further writer starts after more than this many deaths of writers within RESPAWN_WINDOW_S
RESPAWN_WINDOW_S = 60.0
TOLD = 4096  # bytes at the end of a writer's log that are searched for its last line

Greeted = tuple[messages.LendReply, list[int]]
Found = tuple[WriterClient, Greeted | None]
"""A writer, with its greeting reply and the descriptors of its arenas, or with None if it was just started."""


class _Leaving(WriterError):
    """The existing writer no longer accepts trainers."""


class _Ended(_Leaving):
    """The existing writer was killed, because it did not respond."""


def in_use(tiers: list[Tier], pid: int, age_s: float | None, what: str = "") -> InUseError:
    """Return an error that names the process that trains this run on this machine, and its start time. `pid`: 0 if the
    process cannot be seen. `what`: a prefix of the run's name."""
    who = f"process {pid}" if pid else "a process that cannot be seen from here (another container)"
    since = "" if age_s is None else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(time.time() - age_s))
    run = tiers[0].url if tiers else "this run, which is in memory only"
    return InUseError(f"{who} on this machine ({socket.gethostname()}) trains {what}{run}{since}")


class WriterFinder:
    """Finds or starts the writer of this rank. `meanwhile`: work that this process does while a writer starts. If this
    work fails, no writer has accepted this trainer yet."""

    def __init__(
        self,
        writer: WriterSupervisor,
        run: RunOpener,
        key: str,
        tiers: list[Tier],
        rank: int,
        meanwhile: Callable[[], object],
    ) -> None:
        self._writer, self._run, self._meanwhile = writer, run, meanwhile
        self._key, self._tiers, self._rank = key, tiers, rank
        self._deaths: list[float] = []
        self._respawns = 0
        self._said = 0  # size of the log when the newest of our writers started

    def find_or_spawn(self) -> Found:
        """Return the writer that has this run's name on this machine, or start one that acquires the name."""
        end = time.monotonic() + MEET_S
        while True:
            client = WriterClient.find(self._key)
            try:
                if client is not None:
                    return self._join(client)
                if others := channel.writers_of(self._key):
                    log.warning(
                        "process %d holds memory of this run on this machine, and cannot be reached from here (another "
                        "container, or another %s): that memory is not restored",
                        others[0],
                        channel.RUNTIME,
                    )
                return self.spawn(), None
            except _Ended:
                end = time.monotonic() + MEET_S
            except (NameTakenError, _Leaving):  # another start was faster, or the writer is about to leave
                pass
            if time.monotonic() > end:
                raise WriterError(f"the last writer of this run has not released its name within {MEET_S:g} s")
            time.sleep(0.02)

    def spawn(self) -> WriterClient:
        """Start a writer. Raises NameTakenError if another writer has the name of this run."""
        client = WriterClient.spawn(self._key, self._tiers[0].url if self._tiers else "memory", self._rank)
        try:
            self._meanwhile()
            client.greet(OPEN_S, OPEN_S)
        except BaseException:
            client.send(messages.Leave())
            client.close()
            raise
        return client

    def _join(self, found: WriterClient) -> Found:
        """Become the trainer of a writer with memory. Raises _Leaving if the writer leaves and frees the name."""
        try:
            self._await_end_of_trainer(found)
            self._meanwhile()
            hello, fds = found.greet(HELLO_S, PATIENT_S)
            if hello.alive:  # another start was faster
                for fd in fds:
                    os.close(fd)
                raise in_use(self._tiers, hello.trainer, time.time() - hello.since)
        except _Ended:
            raise
        except WriterError as error:
            found.close()
            raise _Leaving(str(error)) from None
        except BaseException:
            found.close()
            raise
        if self._tiers and self._tiers[0].url in hello.lost:  # deleted since our check, or different for the writer
            for fd in fds:
                os.close(fd)
            found.send(messages.Leave(keep=True))
            found.close()
            raise RunGoneError.of(self._tiers[0].url)
        return found, (hello, fds)

    def _await_end_of_trainer(self, found: WriterClient) -> None:
        """Wait a moment for this writer to detect the death of its trainer. If the trainer lives, see `make_way`."""
        end = time.monotonic() + DYING_S
        while (reply := self._look(found)).alive:
            if time.monotonic() > end:
                self._run.make_way(found, reply)
            time.sleep(0.1)

    def _look(self, found: WriterClient) -> messages.LendReply:
        """Query a writer about its trainer. Kill a writer that does not reply if the tiers prove that no job trains."""
        try:
            return found.ask_patiently(messages.Lend(look=True), HELLO_S, PATIENT_S)[0]
        except DeadlineError as error:
            if not self._tiers:
                raise InUseError(f"{found.described()}, does not respond: end it to start without its memory") from None
            run(check_unused([tier.spec() for tier in self._tiers]))
            log.warning("%s, does not respond (%s): killing it, and its memory is lost", found.described(), error)
            found.end()
            raise _Ended(str(error)) from None

    # -- replace a writer that has died --

    def respawn(self) -> WriterClient:
        """Start a writer that opens the run. Raises WriterError if several writers die in a row, and FencedError if
        another job now owns the run."""
        while (fresh := self._start_one()) is None:
            log.warning("the new writer failed too")
        return fresh

    def _start_one(self) -> WriterClient | None:
        """Start one writer. Return None if the writer died or a store did not reply."""
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if now - t < RESPAWN_WINDOW_S] + [now]
        path = channel.log_path(self._key)
        if len(self._deaths) > RESPAWN_LIMIT:
            words = last_line(path, self._said)
            why = f"; the last log lines of the last one: {words}" if words else ""
            raise WriterError(f"the writer died {len(self._deaths)} times within {RESPAWN_WINDOW_S:g} s{why}")
        self._respawns += 1
        self._said = os.path.getsize(path) if os.path.exists(path) else 0
        try:
            fresh = self._spawn_in_turn()
        except WriterError as error:
            words = last_line(path, self._said)
            log.warning("%s%s", error, f": {words}" if words else "")
            return None
        try:
            self._run.open_again(fresh, writers=self._respawns)
        except (WriterError, StoreError, DeadlineError) as error:
            log.warning("%s", error)
            fresh.send(messages.Leave())
            fresh.close()
            return None
        return fresh

    def _spawn_in_turn(self) -> WriterClient:
        """Start a writer once the name of the run is free. One of our earlier writers, or a writer of a failed start,
        may still have it. Raises FencedError if another job now owns the run and needs the name."""
        end = time.monotonic() + MEET_S
        while True:
            if self._writer.lost is not None:
                raise self._writer.lost
            if channel.holder(self._key) is None:
                with contextlib.suppress(NameTakenError):
                    return self.spawn()
            found = None
            with contextlib.suppress(CheckpointError):
                found = channel.ask_once(self._key, messages.Lend(look=True), HELLO_S)
            if found is not None and found.acquires and not self._run.is_ours(found.acquires[-1]):
                raise FencedError(f"process {found.trainer} on this machine has opened this run")
            if self._writer.closing or time.monotonic() > end:
                raise WriterError("another writer has the name of this run")
            time.sleep(0.1)


def last_line(path: str, since: int) -> str:
    """Return the last line of a writer's log after `since` bytes, which usually has the error; "" if there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(since, os.path.getsize(path) - TOLD))
        lines = file.read(TOLD).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


FORMER_S = 3.0  # timeout for the reply of a writer that probably holds another run


@dataclass(frozen=True)
class Lent:
    """Memory borrowed from another writer, and that writer's reply."""

    held: HeldElsewhere
    reply: messages.LendReply


class HeldSnapshots:
    """The snapshots in the memory of this node, as seen by one rank. An earlier job with more local ranks leaves
    writers without a trainer (left-over writers). The ranks of this job divide those writers among themselves, borrow
    their memory, and transfer it to their own writers. A former writer has the same path or URL but another key. It
    holds another run, or this run if the folder was restored from a copy or only the nearest tier was emptied."""

    def __init__(
        self,
        key: str,
        writer: WriterSupervisor,
        stager: Stager,
        world: World,
        memory: SnapshotMemory,
        layouts: KnownLayouts,
        run: RunOpener,
    ) -> None:
        self._key, self._writer, self._stager, self._world = key, writer, stager, world
        self._memory, self._layouts, self._run = memory, layouts, run
        self.damage: list[Loss] = []  # damaged snapshots found by the last search

    def sealed(self) -> dict[CheckpointId, int]:
        """Return the slot of each snapshot in the current arena that this number of ranks saved and no rollback has
        undone."""
        arena, found = self._stager.arena, dict[CheckpointId, int]()
        for slot, label in arena.sealed() if arena is not None else ():
            layout = self._layouts.known.get(label.layout)
            if label.checkpoint is not None and layout is not None and layout.world == self._world.size:
                found[label.checkpoint] = slot
        return {checkpoint: found[checkpoint] for checkpoint in in_history(self._memory.inherited.acquires, found)}

    @contextlib.contextmanager
    def holding_still(self, *, alone: bool) -> Iterator[list[CheckpointId]]:
        """Keep the snapshots of the current arena from being overwritten inside the block. With `alone`, keep only the
        newest snapshot and the newest finite one."""
        arena = self._stager.arena
        sealed = list(self.sealed().items()) if arena is not None else []
        if alone and arena is not None:
            broken = {label.checkpoint for _, label in arena.sealed() if label.finite is False}
            sealed = list(dict.fromkeys([*sealed[:1], *[one for one in sealed if one[0] not in broken][:1]]))
        for _, slot in sealed:
            assert arena is not None
            self._stager.slots.pin(arena, slot)
        try:
            yield [checkpoint for checkpoint, _ in sealed]
        finally:
            for _, slot in sealed:
                assert arena is not None
                self._stager.slots.unpin(arena.id, slot)

    @contextlib.contextmanager
    def snapshots(self) -> Iterator[Iterator[HeldSnapshot]]:
        """Yield an iterator over the snapshots of all ranks of the node, valid inside the context. Errors are raised
        during the iteration, so that ranks can agree on them."""
        borrowed: list[HeldElsewhere] = []
        try:
            yield self._look(borrowed)
        finally:
            for held in borrowed:
                held.close()

    def _look(self, borrowed: list[HeldElsewhere]) -> Iterator[HeldSnapshot]:
        inherited = self._memory.inherited
        with contextlib.suppress(CheckpointError):  # the writer has digests of snapshots that it wrote or found
            everything = self._layouts.differ_from(self._world.size)
            reply = self._writer.client.ask(messages.Lend(look=True, digest=everything))
            inherited.digests.update(as_digests(reply.digests))
        layouts = {**inherited.layouts, **self._layouts.known}
        ours = HeldElsewhere(self._memory.all_arenas(), layouts, inherited.digests, damaged=inherited.damaged)
        self.damage[:] = _damage(ours)
        found = {(one.checkpoint, one.layout.rank): one for one in _sealed(ours)}
        for key in self._beside():
            if (there := self._borrow(key)) is not None:
                borrowed.append(there.held)
                self.damage += _damage(there.held)
                inherited.learn(there.held.acquires)
                for one in _sealed(there.held):
                    found.setdefault((one.checkpoint, one.layout.rank), one)
        yield from found.values()

    # -- other writers of this run on this machine --

    def _beside(self) -> list[str]:
        """Return the keys of all writers of this run on this machine, including ours; [] for a single rank."""
        return list(channel.siblings(self._key).values()) if self._world.size > 1 else []

    def _left_over(self) -> list[str]:
        world, found = self._world, channel.siblings(self._key)
        return [key for n, key in found.items() if n >= world.local_size and n % world.local_size == world.local_rank]

    def _share(self, local_rank: int) -> bool:
        """Return True if this rank handles the writer that an earlier job left for this local rank."""
        return local_rank % self._world.local_size == self._world.local_rank

    def _former(self, is_ours: Callable[[messages.LendReply], bool]) -> list[str]:
        """Return the keys of former writers that hold our run. `is_ours` checks the reply of a writer."""
        ours, found = self._key.rpartition("-")[0], list[str]()
        keys = [key for key in channel.at_place(self._key) if key.rpartition("-")[0] != ours]
        if not keys:
            return found
        with _proof(self._run.tiers) as proof:
            for key in (key for key in keys if self._share(int(key.rpartition("-")[2]))):
                with contextlib.suppress(CheckpointError):  # for example a writer of another version
                    reply = channel.ask_once(key, messages.Lend(proof=proof), FORMER_S)
                    if reply is not None and is_ours(reply):
                        found.append(key)
        return found

    def _in_our_folder(self, reply: messages.LendReply) -> bool:
        """Return True if a writer holds the run of our nearest tier, in the same folder."""
        return bool(self._run.near) and reply.sees and self._run.near.items() <= reply.roots.items()

    def _of_our_run(self, reply: messages.LendReply) -> bool:
        """Return True if a writer holds this run in any of its tiers. Call this after the run was opened."""
        return bool((self._run.roots.items() & reply.roots.items()) - (set() if reply.sees else self._run.near.items()))

    def check_left_over(self) -> None:
        """Wait until no trainer of a left-over or former writer trains the run; see `RunOpener.make_way`."""
        for key in [*self._left_over(), *self._former(self._in_our_folder)]:
            if (found := self._borrow_unused(key)) is not None:
                found.held.close()

    def take_left_over(self) -> None:
        """Transfer the memory of left-over writers to our writer."""
        self._take(self._left_over())

    def take_former(self) -> bool:
        """Transfer the memory of former writers that hold this run. Return True if there were such writers."""
        keys = self._former(self._of_our_run)
        self._take(keys)
        return bool(keys)

    def _take(self, keys: list[str]) -> None:
        for key in keys:
            if (found := self._borrow_unused(key)) is not None:
                self._layouts.take(found.held.layouts)
                self._memory.take(found.held)

    def _borrow_unused(self, key: str) -> Lent | None:
        """Borrow a writer's memory once its trainer is dead or its job is fenced. Return None if the writer is gone."""
        end = time.monotonic() + DYING_S
        while True:
            found = self._borrow(key)
            if found is None or not found.reply.alive:
                return found
            found.held.close()
            if time.monotonic() > end and (client := WriterClient.find(key)) is not None:
                try:
                    self._run.make_way(client, found.reply, "a rank of ")
                finally:
                    client.close()
            time.sleep(0.1)

    def _borrow(self, key: str) -> Lent | None:
        """Borrow the memory of another writer of this run on this node. Return None if that writer is gone. Raises
        DeadlineError if it does not reply, because its memory may have the newest step."""
        client = WriterClient.find(key)
        if client is None:
            return None
        try:
            compare = self._layouts.differ_from(self._world.size)
            patient_s = REQUEST_S if compare else PATIENT_S  # digests of a large memory take a while to compute
            reply, fds = client.ask_patiently(messages.Lend(digest=compare), HELLO_S, patient_s)
            return Lent(HeldElsewhere.of(reply, fds), reply)
        except WriterError as error:
            log.warning("a writer on this node ended, and its snapshots are lost: %s", error)
            return None
        except (DeadlineError, OSError) as error:  # the writer hangs, or its memory cannot be mapped
            raise DeadlineError(
                f"{client.described()}, does not share it ({error}). It may have the newest step. Try again, or end "
                f"that process to start without this memory (`ps`: {channel.AT_WORK} … {key})"
            ) from error
        finally:
            client.close()


@contextlib.contextmanager
def _proof(tiers: list[Tier]) -> Iterator[str]:
    """Create a temporary file in the folder of the nearest tier and yield its name; yield "" if there is no folder."""
    folder = folder_of(tiers[0].url) if tiers else None
    name = f".{secrets.token_hex(8)}.tmp"
    if folder is None:
        yield ""
        return
    try:
        (folder / name).touch(exist_ok=False)
        yield name
    except OSError:
        yield ""
    finally:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _sealed(held: HeldElsewhere) -> Iterator[HeldSnapshot]:
    for arena in held.arenas:
        for slot, label in arena.sealed():
            layout = held.layouts.get(label.layout)
            if layout is not None and label.checkpoint is not None:
                known = held.digests.get((label.checkpoint, layout.rank))
                digests, late = (None, False) if known is None else known
                yield HeldSnapshot(arena, slot, label, layout, digests, late)


def _damage(held: HeldElsewhere) -> list[Loss]:
    """List the damaged snapshots in this memory, which may be newer than the intact ones."""
    found = [*held.damaged.values(), *(problem for arena in held.arenas for problem in arena.damage())]
    return [Loss("memory", problem) for problem in found]
