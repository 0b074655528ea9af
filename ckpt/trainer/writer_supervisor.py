"""The trainer's side of memory and writer: who holds what, and what happens when one of them is lost.

A `WriterSupervisor` finds the writer that survived the last incarnation or spawns one, opens the durable tiers through
it, gets arenas from it, gives memory to a new writer when the old one dies, and sends slots to be written.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ckpt.checkpoint.commit import Role
from ckpt.checkpoint.in_use import check_places
from ckpt.checkpoint.read import run
from ckpt.errors import (
    CheckpointError,
    DeadlineError,
    FencedError,
    InUseError,
    NameTakenError,
    SaveError,
    SkippedError,
    StoreError,
    WriterError,
)
from ckpt.events import log, point
from ckpt.faults.report import Fault
from ckpt.format.layout import Layout
from ckpt.format.manifest import Attempt
from ckpt.goodput.cadence import MEMORY, Auto
from ckpt.ipc import channel, notes, requests
from ckpt.ipc import watch_requests as watch
from ckpt.ipc.arena import Arena
from ckpt.ipc.claim import Claim
from ckpt.ipc.protocol import Note, Request
from ckpt.ipc.requests import Json
from ckpt.ranks.world import World
from ckpt.restore.sources import HeldSnapshot
from ckpt.runlog.log import Acquire, in_history
from ckpt.tiers import Memory, Tier
from ckpt.trainer.replica_rescue import MissingTensors
from ckpt.trainer.stage import Stager
from ckpt.trainer.writer_client import REQUEST_S, WriterClient

OPEN_S = 300.0
T = TypeVar("T")
N = TypeVar("N", bound=Note)
MEET_S = 60.0  # for the name of a run to be ours, or that of a writer that we can ask
DYING_S = 3.0  # for a trainer that was killed to be seen as dead
HELLO_S = 10.0  # for a writer that was left to answer; it may be stopped
PATIENT_S = 60.0  # if it is not: at low priority it may get little of a busy machine, and it has the newest steps
RELIEF_S = 10.0  # for the writer of a dead rank to answer
RESPAWN_LIMIT = 3  # writers that die within RESPAWN_WINDOW_S, before we stop trying
RESPAWN_WINDOW_S = 60.0
MOST_LISTS = 16  # of guarded tensors, that a writer keeps


class _Leaving(WriterError):
    """The writer that was found does not take another trainer any more."""


class _Ended(_Leaving):
    """It was killed, since it did not answer."""


@dataclass
class WriteInFlight:
    """A slot on its way to one tier."""

    attempt: Attempt
    arena: Arena
    slot: int
    tier: int
    done: Callable[[CheckpointError | None], None]
    tries: int = 0
    stored: bool = False  # its bytes are in the store: the slot may be used again
    nbytes: int = 0  # when it is done: of the snapshot, and of what was stored for it
    nbytes_stored: int = 0


@dataclass(frozen=True)
class UnheldSlot:
    """A sealed slot of memory that only we have. `done`: told when the next writer has it too, or why none has."""

    attempt: Attempt
    arena: Arena
    slot: int
    done: Callable[[CheckpointError | None], None]


@dataclass
class Inherited:
    """Memory of an earlier incarnation."""

    arenas: list[Arena] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    digests: dict[tuple[Attempt, int], bytes] = field(default_factory=dict)  # by attempt and rank
    acquires: list[Acquire] = field(default_factory=list)


@dataclass(frozen=True)
class Visited:
    """What another writer of this run on this node holds, and whether its trainer lives, which is `trainer`."""

    arenas: list[Arena]
    layouts: dict[str, Layout]
    digests: dict[tuple[Attempt, int], bytes]  # by attempt and rank
    acquires: list[Acquire]
    alive: bool
    trainer: int
    since: float

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


@dataclass(frozen=True)
class Opened:
    """What the durable tiers, and the memory of earlier incarnations, look like to this rank."""

    roots: tuple[str, ...]  # of every tier, the id of what is there; equal ids are one shared place
    epoch: int  # the highest that is known
    has_checkpoints: bool
    cadence: Json  # what the last incarnation saved by, if that is to be found out; {} if nobody knows


class WriterSupervisor:
    """Owns the connection to the writer. Methods may be called from any thread."""

    def __init__(
        self,
        key: str,
        tiers: list[Tier],
        memory: Memory | None,
        stager: Stager,
        world: World,
        commit_s: float,
        takeover: bool = False,
    ) -> None:
        self._key, self._tiers, self._stager, self._world = key, tiers, stager, world
        self._commit_s, self._takeover = commit_s, takeover
        self._linger_s = memory.linger_s if memory is not None else 0.0
        self._memory, self._memory_kept = memory, self._linger_s > 0
        self._ring = memory.keep if memory is not None else 1
        self._lock = threading.RLock()
        self._layouts: dict[str, Layout] = {}
        self._heard: dict[str, Future[tuple[None, list[int]]]] = {}  # of those: when the writer has
        self._writes: list[WriteInFlight] = []
        self._unkept: dict[tuple[bytes, int], UnheldSlot] = {}  # by slot
        self._deaths: list[float] = []
        self._losers: list[int] = []  # who has lost the run to us, and may not have heard of it: stopped, say
        self._retracts: dict[Attempt, str] = {}
        self._foreign: set[bytes] = set()  # arenas that other ranks staged into
        self._respawns = 0
        self._closing = False
        self._adopted = False
        self._mourned: WriterClient | None = None  # the last one whose death was seen to
        self._asked_size = self._asked = self._asked_slots = 0
        self._said_short = False  # that memory is
        self._refused_size = float("inf")
        self._preparing: Future[tuple[str, list[int]]] | None = None
        self._hears: dict[type[Note], Callable[[Any], None]] = {}
        self._hear_all()
        self.on_failure: Callable[[CheckpointError], None] = lambda error: None
        self.on_new_writer: Callable[[WriterClient], None] = lambda client: None  # it knows nothing that others told
        self.on_no_writer: Callable[[CheckpointError], None] = lambda error: None  # there will be none any more
        self.also_in_use: Callable[[], set[bytes]] = set  # arenas that somebody else has something read from
        self._guarded: list[bool] | None = None
        self._told: list[list[bool]] = []  # what the writer knows by number, of one layout
        self._told_of = ""
        self._arming: tuple[watch.Arm, tuple[int, ...]] | None = None
        self._books: tuple[watch.KeepBooks, tuple[int, ...]] | None = None
        self._shown: tuple[watch.Show, tuple[int, ...]] | None = None
        self._decision: watch.SetCadence | None = None
        self.faults: list[Fault] = []  # of earlier incarnations, that nobody was told yet
        self.failure: CheckpointError | None = None  # why there is no writer any more
        self.lost: FencedError | None = None  # to whom this run was lost
        self.owner = Acquire(0, "", None)
        self._successor = ""
        self.roles: list[Role] = [Role((world.rank,), 0, world.size) for _ in tiers]
        self.inherited = Inherited()
        self._contact: Json | None = None  # of the writer that keeps a copy of our memory
        self.everyone = False  # whether every rank has sealed enough of them
        self._newer = 0  # snapshots sealed since the memory was inherited, outgrown or restored
        self._spares: list[Arena] = []  # inherited or outgrown, kept until a newer snapshot is sealed
        self._claim = Claim(key)
        try:
            self._check_orphans()
            self.client = self._find_or_spawn()
        except BaseException:
            self._claim.drop()
            raise
        self._claim.take_soon()  # a trainer that has lost the run, and stands still, may have it yet
        try:
            taken = self._take_orphans()
            self.opened = self._open(self.client)
            self._dismiss(taken)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """The run could not be opened. Memory of an earlier run stays with its writer, for a better try."""
        self._closing = True
        self.client.send(requests.Leave() if self.inherited.arenas else requests.Close())
        self.client.close()
        self._claim.drop()
        self._drop_prepared()

    # -- the writer --

    def _enter(self) -> None:
        """Have the name of this run's trainer, before anything of the run is touched. InUseError if somebody else who
        lives has it, unless we take the run over, or it has lost the run. One that was killed just now may take a
        moment to be seen as dead."""
        end = time.monotonic() + DYING_S
        while (other := self._claim.take()) is not None and not self._takeover:
            if (found := self._whose()) is not None and other in found.losers:
                return  # it stands still, and has the name until it hears of that
            if time.monotonic() > end:
                who = f"process {other}" if other else "a process that cannot be seen from here (another container)"
                raise InUseError(f"{who} on this machine trains this run")
            time.sleep(0.1)

    def _whose(self) -> requests.WhoseReply | None:
        """Whose run it is, says the writer that has its name; None if there is none that can say it."""
        with contextlib.suppress(CheckpointError):
            return channel.ask_once(self._key, requests.Whose(), HELLO_S)
        return None

    def _find_or_spawn(self) -> WriterClient:
        """The writer that has this run's name on this machine, or a new one, which takes the name."""
        began = time.monotonic()
        end = began + MEET_S
        while True:
            self._enter()
            client = WriterClient.find(self._key)
            try:
                if client is not None:
                    return self._join(client)
                # Who trains it, and has lost its writer, is about to have another, which gets its memory.
                if self._claim.take() is None or time.monotonic() > began + HELLO_S:
                    self._say_unreachable()
                    return self._spawn()
            except _Ended:
                began = time.monotonic()
                end = began + MEET_S
            except (NameTakenError, _Leaving):  # another start was quicker, or it is about to leave
                pass
            if time.monotonic() > end:
                raise WriterError(f"the last writer of this run has not let go of its name within {MEET_S:g} s")
            time.sleep(0.02)

    def _spawn(self) -> WriterClient:
        client = WriterClient.spawn(self._key)
        try:
            client.greet(OPEN_S, OPEN_S, losers=self._losers)
        except BaseException:
            client.close()
            raise
        return self._listen(client)

    def _say_unreachable(self) -> None:
        if others := channel.writers_of(self._key):
            log.warning(
                "process %d holds memory of this run on this machine, and cannot be reached from here (another "
                "container, or another %s): it is not restored from",
                others[0],
                channel.RUNTIME,
            )

    def _join(self, found: WriterClient) -> WriterClient:
        """Take over the memory that a writer holds. _Leaving if it had to go: the name is free, or will be."""
        try:
            hello, fds = self._greet(found)
        except _Ended:
            raise
        except WriterError as error:
            found.close()
            raise _Leaving(str(error)) from None
        except BaseException:
            found.close()
            raise
        if hello.lost and len(hello.lost) == len(self._tiers):
            log.warning(
                "%s: the run that was here is gone. What was held in memory of it is let go of, and a new run begins. "
                "To keep it, put the folder back before you start",
                " and ".join(hello.lost),
            )
            for fd in fds:
                os.close(fd)
            found.ask(requests.Drop())
            found.close()
            raise _Leaving("the run whose memory it held is gone")
        self._losers = hello.losers
        self._inherit(hello, fds)
        self._listen(found)
        if hello.taken:
            log.warning("process %d trained this run here: it is fenced off now", hello.trainer)
        else:
            log.info("took over the memory that process %d left", hello.trainer)
        self._adopted = True
        self._stager.slots.hold(0 if hello.gone else 1)
        for arena, slot in hello.writing:
            for mine in self.inherited.arenas:
                if mine.id.hex() == arena:
                    self._stager.pin(mine, slot)
        self._foreign = {bytes.fromhex(arena) for arena in hello.foreign}
        usable = [arena for arena in self.inherited.arenas if arena.id not in self._foreign]
        # The newest arena goes on being used; the others are only read, as are those of other ranks, and of a trainer
        # that lives.
        self._spares = [arena for arena in self.inherited.arenas if arena not in usable[-1:]]
        if usable:
            self._adopt(usable[-1], found)
        return found

    def _greet(self, found: WriterClient) -> Greeted:
        """Introduce ourselves. A trainer that was killed just now may take a moment to be seen as dead; one that lives
        loses the run only if we take it over, and can use the places."""
        end = time.monotonic() + DYING_S
        while True:
            hello, fds = self._say_hello(found)
            if not hello.alive:
                return hello, fds
            for fd in fds:
                os.close(fd)
            if self._takeover:
                run(check_places([tier.spec() for tier in self._tiers]))
                return self._say_hello(found, takeover=True)
            if time.monotonic() > end:
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(hello.since))
                raise InUseError(f"process {hello.trainer} on this machine trains this run, since {since}")
            time.sleep(0.1)

    def _say_hello(self, found: WriterClient, *, takeover: bool = False) -> Greeted:
        """A writer that does not answer is ended; not that of a trainer that lives, unless we take the run over."""
        try:
            return found.greet(HELLO_S, PATIENT_S, takeover=takeover)
        except DeadlineError as error:
            if not self._takeover:
                self._enter()
                run(check_places([tier.spec() for tier in self._tiers], unused=True))
            log.warning("a writer of this run does not answer (%s): it is ended, and its memory with it", error)
            found.end()
            raise _Ended(str(error)) from None

    def _listen(self, client: WriterClient) -> WriterClient:
        client.listen(self._on_note, lambda: self._on_lost(client))
        return client

    def _inherit(self, hello: requests.GreetingReply, fds: list[int]) -> None:
        self.inherited = Inherited([Arena.attach(fd) for fd in fds], *_known(hello))
        self._layouts = dict(self.inherited.layouts)
        for data in hello.faults:
            with contextlib.suppress(CheckpointError):
                self.faults.append(Fault.from_json(data))

    def _orphans(self) -> list[str]:
        """The writers of local ranks that this job does not have: the ranks that are there now share them out."""
        world, found = self._world, channel.siblings(self._key)
        return [key for n, key in found.items() if n >= world.local_size and n % world.local_size == world.local_rank]

    def _check_orphans(self) -> None:
        """Before anything is taken: InUseError if such a rank is still trained, and this is no takeover."""
        for key in () if self._takeover else self._orphans():
            found = self._visit_orphan(key)
            if found is not None:
                found.close()

    def _take_orphans(self) -> dict[str, list[str]]:
        """Have our writer hold what they hold. Returns whose arenas it has now."""
        taken: dict[str, list[str]] = {}
        for key in self._orphans():
            found = self._visit_orphan(key)
            if found is not None:
                self._take(found)
                taken[key] = [arena.id.hex() for arena in found.arenas]
        return taken

    def _take(self, found: Visited) -> None:
        self.inherited.layouts.update(found.layouts)
        self.inherited.digests.update(found.digests)
        self._learn(found.acquires)
        for digest, layout in found.layouts.items():
            if digest not in self._layouts:
                self._layouts[digest] = layout
                self.client.send(requests.KnowLayout(layout.to_json()))
        held = {arena.id for arena in self.inherited.arenas}  # a start that was cut off has taken some before
        for arena in found.arenas:
            if arena.id in held:
                arena.close()
                continue
            self.inherited.arenas.append(arena)
            self._spares.append(arena)
            self._foreign.add(arena.id)
            self.client.ask(requests.AttachArena(foreign=True), fds=(arena.fd,))

    def _learn(self, acquires: list[Acquire]) -> None:
        self.inherited.acquires += [a for a in acquires if a not in self.inherited.acquires]

    def _dismiss(self, taken: dict[str, list[str]]) -> None:
        """Our writer holds these arenas now, and knows their history: writers that hold no others are not needed."""
        for key, arenas in taken.items():
            client = WriterClient.find(key)
            if client is not None:
                with contextlib.suppress(CheckpointError):
                    client.ask(requests.Taken(arenas), 10.0)
                client.close()

    def _visit_orphan(self, key: str) -> Visited | None:
        """Once its trainer is dead, or has lost the run to us. InUseError if it lives, and this is no takeover."""
        end, told = time.monotonic() + DYING_S, False
        while True:
            found = self._visit(key)
            if found is None or not found.alive:
                return found
            found.close()
            if self._takeover and not told:
                self._open(self.client)  # who lost the run to us has lost it, even if we fail: fail before
                self._take_from(key)
                told = True
            if time.monotonic() > end:
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.since))
                raise InUseError(f"process {found.trainer} on this machine trains a rank of this run, since {since}")
            time.sleep(0.1)

    def _take_from(self, key: str) -> None:
        """Tell a trainer that lives, by its writer, that it has lost the run."""
        client = WriterClient.find(key)
        if client is not None:
            try:
                client.ask(requests.Lose(), PATIENT_S)
            finally:
                client.close()

    def _visit(self, key: str) -> Visited | None:
        """What another writer of this run on this node holds; it keeps its trainer. None if it is gone. That it does
        not say so is an error: it may be the newest that there is."""
        client = WriterClient.find(key)
        if client is None:
            return None
        try:
            hello, fds = client.greet(HELLO_S, PATIENT_S, visit=True)
            layouts, digests, acquires = _known(hello)
            if self._must_compare():
                digests = _digests(client.ask(requests.AskDigests(all=True)))
            arenas = [Arena.attach(fd) for fd in fds]
            return Visited(arenas, layouts, digests, acquires, hello.alive, hello.trainer, hello.since)
        except WriterError as error:
            log.warning("a writer on this node is gone, with what it held: %s", error)
            return None
        except (DeadlineError, OSError) as error:  # it stands still, or its memory cannot be mapped here
            raise DeadlineError(
                f"a writer of this run on this machine does not say what it holds ({error}), which may be the newest "
                f"step: try again, or end it (`ps`: {channel.AT_WORK} … {key}) to do without"
            ) from error
        finally:
            client.close()

    def relieve(self, key: str, fill: Callable[[MissingTensors], list[int]]) -> str:
        """Finish the copy that the dead trainer of another writer could not; which attempt is whole now, "" if none."""
        client = WriterClient.find(key)
        if client is None:
            return ""
        try:
            gap, fds = client.ask_for_fds(requests.AskGap(), RELIEF_S)
            if gap is None:
                return ""
            attempt, layout = Attempt.parse(gap.attempt), Layout.from_json(gap.layout)
            arena = Arena.attach(fds[0])
            try:
                numbers = fill(MissingTensors(attempt, arena, gap.slot, layout, tuple(gap.missing)))
            finally:
                arena.close()
            return str(attempt) if client.ask(requests.Filled(gap.attempt, numbers), RELIEF_S) else ""
        finally:
            client.close()

    def _must_compare(self) -> bool:
        """Whether it matters what is the same in snapshots of several ranks: their digests have to be known then."""
        return any(layout.world not in (1, self._world.size) for layout in self._layouts.values())

    def _open(self, client: WriterClient) -> Opened:
        """Have the durable places opened; nothing in them is changed."""
        request = requests.OpenRun(
            tiers=[tier.spec() for tier in self._tiers],
            linger_s=self._linger_s,
            commit_s=self._commit_s,
            first_try=1000 * self._respawns,
            check=not self._takeover and not self.owner.epoch and self._world.local_rank == 0,
            auto=[one for one, every in self._cadences() if isinstance(every, Auto)],
            successor=self._successor,
            acquires=[_row(acquire) for acquire in self.inherited.acquires],
        )
        reply = client.ask(request, OPEN_S)
        epochs = [*(a.epoch for a in self.inherited.acquires), *(tier.epoch for tier in reply.tiers)]
        stored = any(tier.checkpoints or tier.damaged for tier in reply.tiers)
        snapshots = any(arena.sealed() for arena in self.inherited.arenas)
        return Opened(tuple(tier.root for tier in reply.tiers), max([0, *epochs]), stored or snapshots, reply.cadence)

    def _cadences(self) -> list[tuple[str, object]]:
        memory: list[tuple[str, object]] = [(MEMORY, self._memory.every)] if self._memory is not None else []
        return memory + [(tier.url, tier.every) for tier in self._tiers]

    def announce(self, nonce: str) -> None:
        """Before any rank takes the run over by this nonce: our writer must not take us for another job."""
        self._successor = nonce
        self._insist(lambda client: client.ask(requests.Successor(nonce)))

    def acquire(self, nonce: str, floor: int, restored: Attempt | None) -> list[int]:
        """Take over the places that this rank speaks for; the epochs that they gave. All have to be the same."""
        mine = [i for i, role in enumerate(self.roles) if role.place == 0]
        if not mine and (self.roles or self._world.rank > 0):
            return []  # others speak for all of them
        request = requests.AcquireRun(nonce, floor, str(restored) if restored else None, mine)
        return self._insist(lambda client: client.ask(request))  # again with the same nonce it is done at most once

    def own(self, owner: Acquire, *, recover: bool) -> list[requests.PartsHere]:
        """All ranks agree on the owner. Of the tiers that this rank recovers: what only parts are here of."""
        with self._lock:
            self.owner = owner
            self.inherited.acquires.append(owner)
        self._newer, self.everyone = 0, False
        return self._insist(lambda client: self._own(client, recover=recover))

    def _insist(self, work: Callable[[WriterClient], T]) -> T:
        """Ask the writer, and if it dies of it the next one."""
        for tries in itertools.count():
            try:
                return work(self.client)
            except WriterError:
                if self.failure is not None or tries > 100 * RESPAWN_LIMIT:
                    raise
                time.sleep(0.1)  # until the next writer is there
        raise AssertionError

    def _own(self, client: WriterClient, *, recover: bool) -> list[requests.PartsHere]:
        roles = [(list(role.ranks), role.place, role.world) for role in self.roles]
        mine = [i for i, role in enumerate(self.roles) if role.place == 0] if recover else []
        return client.ask(requests.OwnRun(_row(self.owner), roles, mine), OPEN_S)

    def resume(self) -> None:
        """All ranks have taken the run over: what was on its way to further tiers can go on."""
        self.client.send(requests.Resume())

    def complete(self, tier: int, attempts: list[Attempt]) -> None:
        """All places hold their parts of these."""
        self.client.send(requests.Complete(tier, [str(a) for a in attempts]))

    def doubt(self, url: str, attempt: Attempt, ranges: Iterable[tuple[str, int]]) -> None:
        """These bytes of a place were found damaged: nothing is to be built on them."""
        self.client.send(requests.Doubt(url, str(attempt), sorted(ranges)))

    def _hear_all(self) -> None:
        """What the writer says of memory and of the run. Others listen to the rest, once they are there."""
        self.hear(notes.GoneNote, lambda note: self._stager.slots.hold(-1))
        self.hear(notes.UnpinnedNote, lambda note: self._stager.unpin(bytes.fromhex(note.arena), note.slot))
        self.hear(notes.StoredNote, self._on_stored)
        self.hear(notes.SaidNote, lambda note: log.warning("%s", note.text))
        self.hear(notes.FencedNote, self._on_fenced)

    def hear(self, kind: type[N], handler: Callable[[N], None]) -> None:
        """Who deals with a kind of notes; those that nobody does are passed over."""
        self._hears[kind] = handler

    def _on_note(self, note: Note) -> None:
        if (handler := self._hears.get(type(note))) is not None:
            handler(note)

    def _on_fenced(self, note: notes.FencedNote) -> None:
        error = FencedError(note.text)
        self._lose(error)
        self.on_failure(error)

    def _on_stored(self, note: notes.StoredNote) -> None:
        with self._lock:
            for write in self._writes:
                if (write.tier, str(write.attempt)) == (note.tier, note.attempt) and not write.stored:
                    write.stored = True
                    self._stager.unpin(write.arena.id, write.slot)

    def _on_lost(self, client: WriterClient) -> None:
        """The writer died: the memory is ours as well, so a new one gets it, and the writes begin again.

        The new one is made ready without the lock, so that staging goes on; what is to be written waits in `_writes`.
        """
        with self._lock:
            if self._closing or self.failure is not None or client is not self.client or client is self._mourned:
                return
            self._mourned = client
        try:
            while (fresh := self._start_another()) is None:
                log.warning("the new writer cannot go on either")
        except Exception as error:  # out of descriptors, say
            with self._lock:
                self._fail(error if isinstance(error, CheckpointError) else WriterError(repr(error)))
            return
        with self._lock:
            if self._closing:
                fresh.send(requests.Close())
                fresh.close()
                return
            self.client = fresh
            self._hand_over(fresh)
        if fresh.alive:
            log.warning("a new writer has taken over; training was not affected")
        else:
            self._on_lost(fresh)

    def _start_another(self) -> WriterClient | None:
        """A writer that has opened the run, or None if it died of that or the store did not answer."""
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if now - t < RESPAWN_WINDOW_S] + [now]
        if len(self._deaths) > RESPAWN_LIMIT:
            raise WriterError(f"the writer died {len(self._deaths)} times within {RESPAWN_WINDOW_S:g} s")
        self._respawns += 1
        try:
            fresh = self._spawn_in_turn()
        except WriterError as error:
            log.warning("%s", error)
            return None
        try:
            self._open(fresh)
            if self.owner.epoch:
                self._own(fresh, recover=False)
        except (WriterError, StoreError, DeadlineError) as error:
            log.warning("%s", error)
            fresh.send(requests.Close())
            fresh.close()
            return None
        return fresh

    def _spawn_in_turn(self) -> WriterClient:
        """A new writer, once whoever has the name goes: one of ours that is slow to end, or of a start that came to
        nothing. FencedError if the run is another's by now: who has lost it must not stand in the way."""
        end = time.monotonic() + MEET_S
        while True:
            if self.lost is not None:
                raise self.lost
            if channel.holder(self._key) is None:
                with contextlib.suppress(NameTakenError):
                    return self._spawn()
            self._check_mine()
            if self._closing or time.monotonic() > end:
                raise WriterError("another writer has the name of this run")
            time.sleep(0.1)

    def _check_mine(self) -> None:
        """FencedError if the writer that has the name serves an owner that is none of ours."""
        found = self._whose()
        ours = {(one.epoch, one.nonce) for one in (*self.inherited.acquires, self.owner)}
        owner = None if found is None else found.owner
        if found is not None and owner is not None and owner not in ours and owner[1] != self._successor:
            raise FencedError(f"process {found.trainer} on this machine has opened this run")

    def _hand_over(self, client: WriterClient) -> None:
        """All that a new writer needs to know; in this order, and without waiting for it."""
        self._guarded, self._told = None, []
        for layout in self._layouts.values():
            client.send(requests.KnowLayout(layout.to_json()))
        for arena in self._arenas():
            client.send(requests.AttachArena(foreign=arena.id in self._foreign), (arena.fd,))
        if (current := self._stager.arena) is not None:
            client.send(requests.WatchArena(current.id.hex()))
        if self._contact is not None:
            client.send(requests.Partner(self._contact, self._world.rank))
        if self._arming is not None:
            client.send(*self._arming)
        if self._books is not None:
            client.send(*self._books)
        if self._decision is not None:
            client.send(self._decision)
        if self._shown is not None:
            client.send(*self._shown)
        for attempt, reason in list(self._retracts.items()):
            self._send_retract(client, attempt, reason)
        self._drop_prepared()
        for write in list(self._writes):
            self._send(write)
        for arena in {one.arena.id: one.arena for one in self._unkept.values()}.values():
            self._ask_to_keep(client, arena)
        self.on_new_writer(client)

    def _lose(self, error: FencedError) -> None:
        self.lost = self.lost or error
        self._claim.drop()

    def _fail(self, error: CheckpointError) -> None:
        self.failure = error
        if isinstance(error, FencedError):
            self._lose(error)
        else:
            self.failure = WriterError(f"there is no writer any more, so nothing is saved: {error}")
        self.on_failure(self.failure)
        for write in self._writes:
            self._release(write)
            write.done(self.failure)
        self._writes.clear()
        self._forgo(self.failure)
        self.on_no_writer(self.failure)

    def holds(self, arena: Arena) -> bool:
        """Whether our writer has this arena; it does not have that of another job that still lives."""
        return any(arena is mine for mine in self._arenas())

    def sealed(self) -> dict[Attempt, int]:
        """Slots of the present arena that hold what these ranks took, and no rollback has undone."""
        arena, found = self._stager.arena, dict[Attempt, int]()
        for slot, label in arena.sealed() if arena is not None else ():
            layout = self._layouts.get(label.layout)
            if label.attempt is not None and layout is not None and layout.world == self._world.size:
                found[label.attempt] = slot
        return {attempt: found[attempt] for attempt in in_history(self.inherited.acquires, found)}

    @contextlib.contextmanager
    def holding_still(self, *, alone: bool) -> Iterator[list[Attempt]]:
        """Inside, the snapshots of the present arena are not overwritten; of a rank that is `alone` the newest, and the
        newest that is finite."""
        arena = self._stager.arena
        sealed = list(self.sealed().items())
        if alone:
            broken = {la.attempt for _, la in (arena.sealed() if arena is not None else ()) if la.finite is False}
            sealed = list(dict.fromkeys([*sealed[:1], *[one for one in sealed if one[0] not in broken][:1]]))
        for _, slot in sealed:
            if arena is not None:
                self._stager.pin(arena, slot)
        try:
            yield [attempt for attempt, _ in sealed]
        finally:
            for _, slot in sealed:
                if arena is not None:
                    self._stager.unpin(arena.id, slot)

    def _arenas(self) -> list[Arena]:
        current = self._stager.arena
        return [*self._spares, *([current] if current is not None else [])]

    # -- memory --

    def prepare(self, data_size: int, values_size: int, *, again: bool = False) -> None:
        """Have memory for snapshots of this size made in the background, unless there is enough or it is being made.

        Where memory is short it holds fewer of them. A size that was refused is asked for again only if told.
        """
        size = data_size + 4 * values_size + (1 << 18)
        with self._lock:
            arena = self._stager.arena
            if self.failure or (arena is not None and arena.fits(data_size, values_size)):
                return
            if self._preparing is not None and self._asked_size >= data_size + values_size:
                return
            if not again and data_size + values_size >= self._refused_size:
                return
            self._asked_size, self._asked = size, data_size + values_size
            # A redo log takes a step against the one before, which must not be overwritten meanwhile.
            logged = any(tier.log_every_step for tier in self._tiers)
            slots = self._asked_slots = self._ring + max(1, len(self._tiers)) + logged
            least = 1 if self._tiers and not logged else 2
            self._drop_prepared(self.client)
            self._preparing = self.client.send(requests.MakeArena(slots, size, least))

    def _drop_prepared(self, client: WriterClient | None = None) -> None:
        """Nobody takes what was prepared any more: its descriptor would hold all of that memory, and so would the
        writer (`client`, if it goes on)."""
        with self._lock:
            future, self._preparing = self._preparing, None

        def drop(future: Future[tuple[str, list[int]]]) -> None:
            if not future.cancelled() and future.exception() is None:
                made, fds = future.result()
                for fd in fds:
                    os.close(fd)
                if client is not None:
                    client.send(requests.ReleaseArena(made))

        if future is not None:
            future.add_done_callback(drop)

    def take_prepared(self, timeout_s: float) -> None:
        """Move to the memory that was prepared; waits up to `timeout_s` for it. Raises why it could not be made."""
        with self._lock:
            future = self._preparing
        if future is None:
            return
        try:
            made, fds = future.result(timeout_s)
        except WriterError:
            with self._lock:
                self._preparing = None  # not a refusal: the next writer is asked again
            return
        except CheckpointError as error:
            with self._lock:
                self._preparing, self._refused_size = None, self._asked
            if isinstance(error, SkippedError):
                self._say_short(f"{error}. Until then training goes on, and steps are not saved")
            raise
        except TimeoutError:
            return
        with self._lock:
            if future is not self._preparing:
                return
            self._preparing = None
            previous = self._stager.arena
            try:
                arena = Arena.attach(fds[0])
            except OSError as error:
                os.close(fds[0])
                self.client.send(requests.ReleaseArena(made))
                self._refused_size = self._asked
                refusal = SkippedError(f"the memory for snapshots cannot be mapped: {error}. See ulimit -v")
                self._say_short(f"{refusal}. Training goes on, and steps are not saved")
                raise refusal from error
            self._refused_size = float("inf")
            self._said_short &= arena.slots < self._asked_slots
            if previous is not None:
                self._spares.append(previous)
                self._newer = 0
            client = self.client
        self._adopt(arena, client)  # without the lock, which the staging thread takes when a job ends
        if arena.slots < self._asked_slots:
            held = f"{arena.slots} of {self._asked_slots} snapshots of {arena.slot_size / 2**20:.0f} MiB fit"
            without = "" if self.rings else ", so none is kept there: only steps that are due in a tier are saved"
            self._say_short(f"{held}{without}")

    def _say_short(self, what: str) -> None:
        """Once, as long as it is."""
        if not self._said_short:
            log.warning("memory is short: %s", what)
        self._said_short = True

    @property
    def rings(self) -> bool:
        """Whether there is memory for one snapshot and the next: else none is held but on its way to a durable tier.

        Of several ranks one may be a step behind: what the others overwrite must not be the newest that all have.
        """
        arena = self._stager.arena
        if arena is None:
            return self._refused_size == float("inf")
        return bool(arena.slots >= (2 if self._world.size == 1 else 3))

    def refused(self, nbytes: int) -> bool:
        """Whether memory for snapshots of this size was asked for, and is not there."""
        return nbytes >= self._refused_size

    def _adopt(self, arena: Arena, client: WriterClient) -> None:
        def watch() -> None:
            client.send(requests.WatchArena(arena.id.hex()))

        self._stager.use(arena, watch)

    def on_sealed(self, *, sound: bool = True) -> None:
        """A snapshot was sealed in the present arena. When there are enough of a `sound` training, older memory is not
        needed any more.

        Another rank may be one step behind, and die: then the step before is the newest that all have.
        """
        self._newer += sound
        arena = self._stager.arena
        if self._contact is not None and arena is not None:
            for slot, label in arena.sealed()[:1]:
                self.client.send(requests.Push(arena.id.hex(), slot, str(label.attempt)))
        if (not self._spares and not self.inherited.arenas) or not self.superseded:
            return
        with self._lock:
            busy = {write.arena.id for write in self._writes} | self.also_in_use()
            old = {a.id: a for a in (*self._spares, *self.inherited.arenas) if a is not self._stager.arena}
            for arena in (a for key, a in old.items() if key not in busy):
                self.client.send(requests.ReleaseArena(arena.id.hex()))
                arena.close()
            self._spares = [a for a in self._spares if a.id in busy]
            self.inherited.arenas = []

    @property
    def newer(self) -> int:
        """How many snapshots were sealed since the run was opened or restored."""
        return self._newer

    @property
    def superseded(self) -> bool:
        """Whether what was in memory before is not needed any more: every rank has newer snapshots."""
        return self._newer >= 1 if self._world.size == 1 else self._newer >= 2 and self.everyone

    def serve(self) -> Json:
        """Have the writer take copies of another rank's memory; how it is reached."""
        return self.client.ask(requests.Serve())

    def copy_to(self, contact: Json) -> None:
        """Have the writer send a copy of each snapshot to another one."""
        self._contact = contact
        self.client.send(requests.Partner(contact, self._world.rank))

    def arm(self, request: watch.Arm, fds: tuple[int, ...]) -> None:
        """Have the writer watch us, this one and those that follow; see `ckpt.writer.watchdog`."""
        self._arming = request, fds
        self.client.send(request, fds)

    def keep_books(self, request: watch.KeepBooks, fds: tuple[int, ...]) -> None:
        """Have the writer keep the ledger, this one and those that follow; see `ckpt.writer.bookkeeper`."""
        self._books = msgspec.structs.replace(request, again=True), fds
        self.client.send(request, fds)

    def show(self, request: watch.Show, fds: tuple[int, ...]) -> None:
        """Let the writer be asked what we do, this one and those that follow; see `ckpt.writer.status`."""
        self._shown = request, fds
        self.client.send(request, fds)

    def tell_restored(self, request: watch.RestoreDone) -> None:
        """For the ledger, and for those who look."""
        if self._shown is not None:
            self._shown = msgspec.structs.replace(self._shown[0], restored=request), self._shown[1]
        self.client.send(request)

    def tell_cadence(self, decision: Json) -> None:
        """From some step on all ranks save by another cadence."""
        self._decision = watch.SetCadence(decision)
        self.client.send(self._decision)

    @contextlib.contextmanager
    def one_writer(self) -> Iterator[None]:
        """Inside, no other one takes over."""
        with self._lock:
            yield

    def tell(self, request: Request[Any]) -> None:
        """Something that needs no answer."""
        self.client.send(request)

    @property
    def has_memory(self) -> bool:
        """Whether snapshots outlive this process."""
        arena = self._stager.arena
        return self._memory_kept and self.failure is None and (arena is None or arena.is_kept())

    # -- what is acknowledged --

    @property
    def survives(self) -> bool:
        """Whether the writer does something for what it holds when we die: keep it, or write it out."""
        return self._memory_kept or bool(self._tiers)

    def acknowledge(
        self, attempt: Attempt, arena: Arena, slot: int, done: Callable[[CheckpointError | None], None]
    ) -> None:
        """Call `done` once a process that survives this one has the slot, and knows its layout: at once, unless our
        writer has died, or the layout is new. With an error if there will be none any more, or if the slot was used
        again before there was one."""
        label = arena.label(slot)
        heard = None if label is None else self._heard.get(label.layout)
        if heard is not None and not heard.done():
            closed = WriterError(f"closed before the writer had heard of the layout of step {attempt.step}")
            heard.add_done_callback(
                lambda _: done(closed) if self._closing else self.acknowledge(attempt, arena, slot, done)
            )
            return
        refusal = None if heard is None else heard.exception()
        if isinstance(refusal, CheckpointError) and not isinstance(refusal, WriterError):
            done(refusal)  # who has lost the run, say, is not listened to
            return
        if arena.is_kept():
            done(None)
            return
        one = UnheldSlot(attempt, arena, slot, done)
        with self._lock:
            error, before = self.failure, self._unkept.pop((arena.id, slot), None)
            if self._closing:
                error = error or WriterError("the Checkpointer was closed, and there is no writer any more")
            if error is None:
                self._unkept[arena.id, slot] = one
                self._ask_to_keep(self.client, arena)
        if before is not None:
            before.done(_used_again(before))
        if error is not None:
            done(error)

    def _ask_to_keep(self, client: WriterClient, arena: Arena) -> None:
        future = client.send(requests.KeepArena(arena.id.hex()))
        future.add_done_callback(lambda future: self._on_keep(client, arena, future.exception()))

    def _on_keep(self, client: WriterClient, arena: Arena, error: BaseException | None) -> None:
        """The writer should have it by now."""
        if isinstance(error, WriterError):
            return  # the next one is asked
        with self._lock:
            kept = arena.is_kept()
            if error is None and not kept:
                self._ask_to_keep(client, arena)
                return
            found = [self._unkept.pop(key) for key in list(self._unkept) if key[0] == arena.id]
        for one in found:
            holds = any((slot, label.attempt) == (one.slot, one.attempt) for slot, label in arena.sealed())
            refusal = error if isinstance(error, FencedError) else None  # who has lost the run is not kept anything for
            one.done(refusal or (None if kept and holds else _used_again(one)))

    def _forgo(self, error: CheckpointError) -> None:
        with self._lock:
            found, self._unkept = list(self._unkept.values()), {}
        for one in found:
            one.done(error)

    def tell_layout(self, layout: Layout, guarded: list[bool]) -> None:
        """Before a slot is sealed with it. `guarded`: of each tensor, whether only optimizer steps change it."""
        known = layout.digest in self._layouts
        if known and guarded is self._guarded:
            return
        said = {} if known else layout.to_json()  # takes a while: not with the lock, which a signal handler may need
        with self._lock:
            self._tell_guarded(layout, guarded)
            if not known:
                if len(self._layouts) > 64:
                    self._forget_layouts()
                self._heard[layout.digest] = self.client.send(requests.KnowLayout(said))
                self._layouts[layout.digest] = layout  # last: Ctrl-C may come in between

    def _tell_guarded(self, layout: Layout, guarded: list[bool]) -> None:
        """All of it once; where optimizers take turns, the same few lists come again and again."""
        if not self._told or len(self._told) == MOST_LISTS or layout.digest != self._told_of:
            self._told, self._told_of = [], layout.digest
        number = next((i for i, one in enumerate(self._told) if one is guarded), len(self._told))
        if number == len(self._told):
            missing = [i for i, one in enumerate(guarded) if one]
            self.client.send(requests.KnowGuarded(layout.digest, number, missing))
            self._told.append(guarded)
        else:
            self.client.send(requests.KnowGuarded(layout.digest, number))
        self._guarded = guarded

    def _forget_layouts(self) -> None:
        """A state whose shapes keep changing must not fill the memory with layouts."""
        used = {label.layout for arena in self._arenas() for _, label in arena.sealed()} | {*list(self._layouts)[-8:]}
        self._layouts = {digest: layout for digest, layout in self._layouts.items() if digest in used}
        self._heard = {digest: heard for digest, heard in self._heard.items() if digest in used}

    @contextlib.contextmanager
    def snapshots(self) -> Iterator[Iterator[HeldSnapshot]]:
        """Sealed snapshots in the memory of this node, of all its ranks; valid inside the context. Looked for when they
        are asked for, so that ranks can agree on what goes wrong with it."""
        visited: list[Arena] = []
        try:
            yield self._snapshots(visited)
        finally:
            for arena in visited:
                arena.close()

    def _snapshots(self, visited: list[Arena]) -> Iterator[HeldSnapshot]:
        with contextlib.suppress(CheckpointError):  # the writer digests what it writes, and the ring after a death
            rows = self.client.ask(requests.AskDigests(all=self._must_compare()), REQUEST_S)
            self.inherited.digests.update(_digests(rows))
        arenas = {arena.id: arena for arena in (*self.inherited.arenas, *self._arenas())}
        known = {**self.inherited.layouts, **self._layouts}
        found = {
            (s.attempt, s.layout.rank): s for a in arenas.values() for s in _sealed(a, known, self.inherited.digests)
        }
        for key in channel.siblings(self._key).values() if self._world.size > 1 else ():
            if (there := self._visit(key)) is not None:
                visited += there.arenas
                self._learn(there.acquires)
                for snapshot in (s for arena in there.arenas for s in _sealed(arena, there.layouts, there.digests)):
                    found.setdefault((snapshot.attempt, snapshot.layout.rank), snapshot)
        yield from found.values()

    # -- writing --

    def write(self, write: WriteInFlight) -> None:
        """Have a sealed slot written; its slot is pinned until then. `done` is called with the error, if any."""
        with self._lock:
            self._stager.pin(write.arena, write.slot)
            if self.failure is not None:
                self._stager.unpin(write.arena.id, write.slot)
                write.done(self.failure)
                return
            self._writes.append(write)
            self._send(write)
        point("save.requested")

    def _send(self, write: WriteInFlight) -> None:
        write.tries += 1
        place = write.arena.id.hex(), write.slot
        future = self.client.send(requests.WriteSlot(write.tier, *place, str(write.attempt), write.stored))
        future.add_done_callback(lambda f: self._on_written(write, f))

    def _on_written(self, write: WriteInFlight, future: Future[tuple[requests.WriteSlotReply, list[int]]]) -> None:
        error = future.exception()
        with self._lock:
            if isinstance(error, WriterError) and write.tries <= RESPAWN_LIMIT and not self._closing:
                return  # the next writer gets it
            if write not in self._writes:
                return
            self._writes.remove(write)
            self._release(write)
        if error is None:
            reply, _ = future.result()
            write.nbytes, write.nbytes_stored = reply.nbytes, reply.stored
        elif not isinstance(error, CheckpointError):
            error = SaveError(str(error))
        write.done(error)

    def _release(self, write: WriteInFlight) -> None:
        if not write.stored:
            write.stored = True
            self._stager.unpin(write.arena.id, write.slot)

    def retract(self, attempt: Attempt, reason: str) -> None:
        """This snapshot must not become a checkpoint, or not stay one."""
        with self._lock:
            self._retracts[attempt] = reason  # until it is done: the writer may die before
            self._send_retract(self.client, attempt, reason)

    def _send_retract(self, client: WriterClient, attempt: Attempt, reason: str) -> None:
        def done(future: Future[tuple[None, list[int]]]) -> None:
            if not isinstance(future.exception(), WriterError):
                self._retracts.pop(attempt, None)

        client.send(requests.Retract(str(attempt), reason)).add_done_callback(done)

    # -- the end --

    @property
    def inherits(self) -> bool:
        """Whether the writer holds snapshots of an earlier incarnation."""
        return self._adopted and any(arena.sealed() for arena in self._arenas())

    def leave(self) -> None:
        """Hang up, and let the writer treat that as our death: it keeps the memory and persists it."""
        with self._lock:
            self._closing = True
        self.client.send(requests.Leave())
        self.client.close()
        self._claim.drop()
        self._forgo(WriterError("there was no writer when the trainer let go of its memory"))

    def close(self, timeout_s: float, *, failed: bool = False) -> None:
        """Let the writer finish and leave. DeadlineError if it has not within `timeout_s`; it goes on by itself.
        `failed`: an error has ended the training, which is for the ledger."""
        with self._lock:
            self._closing = True
        try:
            if self.failure is None:
                with contextlib.suppress(WriterError):  # it died; what it had to write was waited for before
                    self.client.ask(requests.Close(failed), max(timeout_s, 0.1))
        finally:
            self.client.close()
            self._claim.drop()
            self._drop_prepared()
            self._forgo(WriterError("there was no writer when the Checkpointer was closed"))
            for arena in {a.id: a for a in (*self.inherited.arenas, *self._arenas())}.values():
                arena.close()

    def forget(self) -> None:
        """In a forked child: close our copies of what belongs to the parent."""
        self.client.forget()
        self._claim.forget()
        for arena in {a.id: a for a in (*self.inherited.arenas, *self._arenas())}.values():
            os.close(arena.fd)
            arena.fd = -1


Greeted = tuple[requests.GreetingReply, list[int]]
Known = tuple[dict[str, Layout], dict[tuple[Attempt, int], bytes], list[Acquire]]


def _known(hello: requests.GreetingReply) -> Known:
    """What a writer says about the memory that it holds."""
    layouts = {digest: Layout.from_json(layout) for digest, layout in hello.layouts.items()}
    acquires = [Acquire(e, n, None if r is None else Attempt.parse(r)) for e, n, r in hello.acquires]
    return layouts, _digests(hello.digests), acquires


def _used_again(one: UnheldSlot) -> SaveError:
    return SaveError(
        f"step {one.attempt.step} was in the trainer's memory only, since the writer had died, and a newer step took "
        "its place before another writer had it"
    )


def _row(acquire: Acquire) -> requests.Owner:
    return acquire.epoch, acquire.nonce, str(acquire.restored) if acquire.restored else None


def _digests(rows: list[requests.Digest]) -> dict[tuple[Attempt, int], bytes]:
    return {(Attempt.parse(attempt), rank): bytes.fromhex(found) for attempt, rank, found in rows}


def _sealed(
    arena: Arena, layouts: Mapping[str, Layout], digests: Mapping[tuple[Attempt, int], bytes]
) -> Iterator[HeldSnapshot]:
    for slot, label in arena.sealed():
        layout = layouts.get(label.layout)
        if layout is not None and label.attempt is not None:
            yield HeldSnapshot(arena, slot, label, layout, digests.get((label.attempt, layout.rank)))
