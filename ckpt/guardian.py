"""The trainer's side of memory and writer: who holds what, and what happens when one of them is lost.

A `Guardian` finds the writer that survived the last incarnation or spawns one, opens the durable tiers through it, gets
arenas from it, gives memory to a new writer when the old one dies, and sends slots to be written.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckpt.arena import Arena
from ckpt.client import Reply, WriterClient
from ckpt.errors import CheckpointError, DeadlineError, SaveError, StoreError, WriterError
from ckpt.events import log, point
from ckpt.link import Message
from ckpt.log import Acquire, in_history
from ckpt.manifest import Attempt, new_nonce
from ckpt.plan import Layout
from ckpt.sources import MemorySource
from ckpt.stage import Stager
from ckpt.tiers import Memory, Tier

OPEN_S = 300.0
RESPAWN_LIMIT = 3  # writers that die within RESPAWN_WINDOW_S, before we stop trying
RESPAWN_WINDOW_S = 60.0


@dataclass
class Written:
    """A slot on its way to one tier."""

    attempt: Attempt
    arena: Arena
    slot: int
    tier: int
    done: Callable[[CheckpointError | None], None]
    tries: int = 0


@dataclass
class Inherited:
    """Memory of an earlier incarnation."""

    arenas: list[Arena] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    digests: dict[Attempt, bytes] = field(default_factory=dict)
    acquires: list[Acquire] = field(default_factory=list)


class Guardian:
    """Owns the connection to the writer. Methods may be called from any thread."""

    def __init__(self, key: str, tiers: list[Tier], memory: Memory | None, stager: Stager) -> None:
        self._key, self._tiers, self._stager = key, tiers, stager
        self._linger_s = memory.linger_s if memory is not None else 0.0
        self._ring = memory.keep if memory is not None else 1
        self._lock = threading.RLock()
        self._layouts: dict[str, Layout] = {}
        self._writes: list[Written] = []
        self._deaths: list[float] = []
        self._respawns = 0
        self._closing = False
        self._adopted = False
        self._mourned: WriterClient | None = None  # the last one whose death was seen to
        self._asked_size = 0
        self._refused_size = float("inf")
        self._preparing: Future[Reply] | None = None
        self.on_damaged: Callable[[Message], None] = lambda note: None
        self.on_failure: Callable[[CheckpointError], None] = lambda error: None
        self.failure: CheckpointError | None = None  # why there is no writer any more
        self.owner = Acquire(0, "", None)
        self.has_checkpoints = False
        self.inherited = Inherited()
        self._spares: list[Arena] = []  # inherited or outgrown, kept until a newer snapshot is sealed
        self.client = self._find_or_spawn()
        try:
            self._open(self.client)
        except BaseException:
            self._closing = True
            if not self.inherited.arenas:  # memory of an earlier run stays with its writer, for a better try
                self.client.send("close")
            self.client.close()
            raise

    # -- the writer --

    def _find_or_spawn(self) -> WriterClient:
        found = WriterClient.find(self._key)
        if found is None:
            return self._listen(WriterClient.spawn(self._key), greet=True)
        self._listen(found)
        try:
            hello, fds = found.ask("hello", timeout_s=10.0)
        except CheckpointError as error:
            log.warning("a writer is there and does not answer (%s): starting a new one", error)
            found.close()
            return self._listen(WriterClient.spawn(self._key), greet=True)
        self._inherit(hello, fds)
        if hello["alive"]:
            log.warning("process %d still trains this run here: it is fenced off now", hello["trainer"])
            found.close()
            ours = self._listen(WriterClient.spawn(self._key), greet=True)
            for layout in self._layouts.values():  # our writer has to know what we know
                ours.send("layout", layout=layout.to_json())
            return ours
        log.info("took over the memory that process %d left", hello["trainer"])
        self._adopted = True
        self._stager.hold(0 if hello["gone"] else 1)
        for arena, slot in hello["writing"]:
            for mine in self.inherited.arenas:
                if mine.id.hex() == arena:
                    self._stager.pin(mine, slot)
        if self.inherited.arenas:
            # The newest arena goes on being used; the others are only read.
            self._spares = self.inherited.arenas[:-1]
            self._adopt(self.inherited.arenas[-1], found)
        return found

    def _listen(self, client: WriterClient, greet: bool = False) -> WriterClient:
        client.on_note, client.on_lost = self._on_note, lambda: self._on_lost(client)
        if greet:
            client.ask("hello", timeout_s=OPEN_S)
        return client

    def _inherit(self, hello: Message, fds: list[int]) -> None:
        self.inherited = Inherited(
            [Arena.attach(fd) for fd in fds],
            {digest: Layout.from_json(layout) for digest, layout in hello["layouts"].items()},
            {Attempt.parse(attempt): bytes.fromhex(digests) for attempt, digests in hello["digests"].items()},
            [Acquire(e, n, None if r is None else Attempt.parse(r)) for e, n, r in hello["acquires"]],
        )
        self._layouts = dict(self.inherited.layouts)

    def _open(self, client: WriterClient, *, again: bool = False) -> None:
        specs = [{"url": t.url, "last": t.keeping.last, "every": t.keeping.every} for t in self._tiers]
        floor = max([0, *(a.epoch for a in self.inherited.acquires)])
        extra = {"owner": [self.owner.epoch, self.owner.nonce]} if again else {"floor": floor}
        reply, _ = client.ask(
            "open",
            timeout_s=OPEN_S,
            tiers=specs,
            linger_s=self._linger_s,
            first_try=1000 * self._respawns,
            acquires=[[a.epoch, a.nonce, a.restored and str(a.restored)] for a in self.inherited.acquires],
            **extra,
        )
        if not again:
            self.owner = Acquire(reply["epoch"], reply["nonce"], None)
            self.inherited.acquires.append(self.owner)
            stored = any(tier["checkpoints"] or tier["damaged"] for tier in reply["tiers"])
            self.has_checkpoints = stored or bool(self.snapshots())

    def _on_note(self, note: Message) -> None:
        if note["op"] == "gone":
            self._stager.hold(-1)
        elif note["op"] == "unpinned":
            self._stager.unpin(bytes.fromhex(note["arena"]), int(note["slot"]))
        elif note["op"] == "damaged":
            self.on_damaged(note)

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
        except CheckpointError as error:
            with self._lock:
                self._fail(error)
            return
        with self._lock:
            if self._closing:
                fresh.send("close")
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
        fresh = WriterClient.spawn(self._key)
        try:
            self._listen(fresh, greet=True)
            self._open(fresh, again=True)
        except (WriterError, StoreError, DeadlineError) as error:
            log.warning("%s", error)
            fresh.send("close")
            fresh.close()
            return None
        return fresh

    def _hand_over(self, client: WriterClient) -> None:
        """All that a new writer needs to know; in this order, and without waiting for it."""
        for layout in self._layouts.values():
            client.send("layout", layout=layout.to_json())
        for arena in self._arenas():
            client.send("attach", fds=(arena.fd,))
        if (current := self._stager.arena) is not None:
            client.send("watch", arena=current.id.hex())
        self._preparing = None
        for write in list(self._writes):
            self._send(write)

    def _fail(self, error: CheckpointError) -> None:
        self.failure = WriterError(f"there is no writer any more, so nothing is saved: {error}")
        self.on_failure(self.failure)
        for write in self._writes:
            self._stager.unpin(write.arena.id, write.slot)
            write.done(self.failure)
        self._writes.clear()

    def holds(self, arena: Arena) -> bool:
        """Whether our writer has this arena; it does not have that of another job that still lives."""
        return any(arena is mine for mine in self._arenas())

    def _arenas(self) -> list[Arena]:
        current = self._stager.arena
        return [*self._spares, *([current] if current is not None else [])]

    # -- memory --

    def prepare(self, data_size: int, values_size: int, *, again: bool = False) -> None:
        """Have memory for snapshots of this size made in the background, unless there is enough or it is being made.

        A size that was refused is asked for again only if told.
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
            self._asked_size = size
            slots = self._ring + max(1, len(self._tiers))
            self._preparing = self.client.send("arena", slots=slots, slot_size=size)

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
        except CheckpointError:
            with self._lock:
                self._preparing, self._refused_size = None, self._asked_size
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
                self.client.send("release", arena=made["arena"])
                self._refused_size = self._asked_size
                raise SaveError(f"the memory for snapshots cannot be mapped: {error}. See ulimit -v") from error
            self._adopt(arena, self.client)
            if previous is not None:
                self._spares.append(previous)

    def _adopt(self, arena: Arena, client: WriterClient) -> None:
        def watch() -> None:
            client.send("watch", arena=arena.id.hex())

        self._stager.use(arena, watch)

    def on_sealed(self) -> None:
        """A snapshot was sealed in the present arena: older ones are not needed any more."""
        if not self._spares and not self.inherited.arenas:
            return
        with self._lock:
            busy = {write.arena.id for write in self._writes}
            old = {a.id: a for a in (*self._spares, *self.inherited.arenas) if a is not self._stager.arena}
            for arena in (a for key, a in old.items() if key not in busy):
                self.client.send("release", arena=arena.id.hex())
                arena.close()
            self._spares = [a for a in self._spares if a.id in busy]
            self.inherited.arenas = []

    def tell_layout(self, layout: Layout) -> None:
        """Before a slot is sealed with it."""
        if layout.digest in self._layouts:
            return
        with self._lock:
            if layout.digest not in self._layouts:
                if len(self._layouts) > 64:
                    self._forget_layouts()
                self._layouts[layout.digest] = layout
                self.client.send("layout", layout=layout.to_json())

    def _forget_layouts(self) -> None:
        """A state whose shapes keep changing must not fill the memory with layouts."""
        used = {label.layout for arena in self._arenas() for _, label in arena.sealed()} | {*list(self._layouts)[-8:]}
        self._layouts = {digest: layout for digest, layout in self._layouts.items() if digest in used}

    def snapshots(self) -> list[MemorySource]:
        """Sealed snapshots that can be restored: those of the present history, and marked as such those undone."""
        with contextlib.suppress(CheckpointError):  # the writer digests what it writes, and the ring after a death
            reply, _ = self.client.ask("digests", timeout_s=10.0)
            known = {Attempt.parse(attempt): bytes.fromhex(digests) for attempt, digests in reply["digests"].items()}
            self.inherited.digests.update(known)
        arenas = {arena.id: arena for arena in (*self.inherited.arenas, *self._arenas())}
        found: dict[Attempt, MemorySource] = {}
        for arena in arenas.values():
            for slot, label in arena.sealed():
                layout = self._layouts.get(label.layout)
                if layout is not None and label.attempt is not None:
                    digests = self.inherited.digests.get(label.attempt)
                    found[label.attempt] = MemorySource(arena, slot, label, layout, digests)
        history = set(in_history(self.inherited.acquires, found))
        for attempt, source in found.items():
            source.undone = attempt not in history
        return list(found.values())

    # -- writing --

    def write(self, write: Written) -> None:
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

    def _send(self, write: Written) -> None:
        write.tries += 1
        future = self.client.send(
            "write", tier=write.tier, arena=write.arena.id.hex(), slot=write.slot, attempt=str(write.attempt)
        )
        future.add_done_callback(lambda f: self._on_written(write, f))

    def _on_written(self, write: Written, future: Future[Reply]) -> None:
        error = future.exception()
        with self._lock:
            if isinstance(error, WriterError) and write.tries <= RESPAWN_LIMIT and not self._closing:
                return  # the next writer gets it
            if write not in self._writes:
                return
            self._writes.remove(write)
            self._stager.unpin(write.arena.id, write.slot)
        if error is not None and not isinstance(error, CheckpointError):
            error = SaveError(str(error))
        write.done(error)

    def retract(self, attempt: Attempt) -> None:
        """This snapshot must not become a checkpoint, or not stay one."""
        self.client.send("retract", attempt=str(attempt))

    def rollback(self, restored: Attempt) -> None:
        """Open the epoch that continues from a restored attempt."""
        nonce = new_nonce()  # the same if it has to be asked again: then it is done at most once
        for tries in itertools.count():
            try:
                reply, _ = self.client.ask("rollback", restored=str(restored), nonce=nonce)
                break
            except WriterError:
                if self.failure is not None or tries > 100 * RESPAWN_LIMIT:
                    raise
                time.sleep(0.1)  # until the next writer is there
        with self._lock:
            self.owner = Acquire(reply["epoch"], reply["nonce"], restored)
            self.inherited.acquires.append(self.owner)

    # -- the end --

    @property
    def inherits(self) -> bool:
        """Whether the writer holds snapshots of an earlier incarnation."""
        return self._adopted and any(arena.sealed() for arena in self._arenas())

    def leave(self) -> None:
        """Hang up, and let the writer treat the end of this process as a death: it keeps the memory and persists it."""
        with self._lock:
            self._closing = True
        self.client.close()

    def close(self, timeout_s: float) -> None:
        """Let the writer finish and leave. DeadlineError if it has not within `timeout_s`; it goes on by itself."""
        with self._lock:
            self._closing = True
        try:
            if self.failure is None:
                with contextlib.suppress(WriterError):  # it died; what it had to write was waited for before
                    self.client.ask("close", timeout_s=max(timeout_s, 0.1))
        finally:
            self.client.close()
            for arena in {a.id: a for a in (*self.inherited.arenas, *self._arenas())}.values():
                arena.close()

    def forget(self) -> None:
        """In a forked child: close our copies of what belongs to the parent."""
        self.client.forget()
        for arena in {a.id: a for a in (*self.inherited.arenas, *self._arenas())}.values():
            os.close(arena.fd)
            arena.fd = -1
