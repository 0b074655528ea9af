"""The trainer's interface to its writer, and the replacement of a writer that dies.

A `WriterSupervisor` finds the writer that survived the last job attempt or starts a new one, and opens the durable
tiers through it. When the writer dies, the supervisor starts another writer, and sends it the layouts, the memory, the
standing requests and the writes, in this order. Each writer has its own `WriterClient` for messages.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from msgspec.structs import replace

from ckpt.core.ipc import messages
from ckpt.core.ipc.messages import Note, Request
from ckpt.core.log.run_log import Acquire
from ckpt.core.ranks.world import World
from ckpt.core.run.memory import Acknowledgements, KnownLayouts, SnapshotMemory, Writes
from ckpt.core.run.opening import HeldSnapshots, RunOpener, WriterFinder
from ckpt.core.run.writer_link import WriterClient
from ckpt.core.snapshot.stage import Stager
from ckpt.errors import CheckpointError, ClosedError, FencedError, SaveError, WriterError
from ckpt.events import log
from ckpt.tiers import Memory, Tier

N = TypeVar("N", bound=Note)
R = TypeVar("R")
T = TypeVar("T")
INSIST = 300  # maximum number of retries of a request, because the request itself may crash the writer


class WriterSupervisor:
    """Owns the connection to the writer. Methods may be called from any thread.

    client: the connection to the current writer, or to the last one; it is not replaced while `lock` is held
    failure: the error because of which no further writer starts, or None
    lost: the error if another job owns the run, or None
    closing: True if this trainer is disconnecting
    run: opens the run, and has its owner
    memory: the arenas of this rank; held: the snapshots in the memory of this node
    layouts, writes, acknowledgements: the layouts, writes and acknowledgements of this rank's snapshots
    """

    client: WriterClient

    def __init__(
        self,
        key: str,
        tiers: list[Tier],
        memory: Memory | None,
        stager: Stager,
        world: World,
        commit_s: float,
        takeover: bool = False,
        node: Callable[[], int | None] = lambda: None,
        root: str = "",
    ) -> None:
        """`node`: see `SnapshotMemory`. It reads the state, so it is called while the writer starts. `root`: see
        `RunOpener`."""
        self._tiers = tiers
        self.lock = threading.RLock()  # a signal handler may interrupt the thread that holds the lock
        self.failure: CheckpointError | None = None
        self.lost: FencedError | None = None
        self.closing = False
        self._standing: dict[type[Request[Any]], tuple[Request[Any], tuple[int, ...]]] = {}
        self._hears: dict[type[Note], list[Callable[[Any], None]]] = {}
        self._adopted = False
        self.faults: list[messages.Json] = []  # faults of earlier job attempts that no trainer has received yet
        self.on_failure: Callable[[CheckpointError], None] = lambda error: None
        self.memory = SnapshotMemory(self, stager, world, tiers, memory, node)
        self.layouts = KnownLayouts(self, self.memory)
        self.writes = Writes(self, stager)
        self.acknowledgements = Acknowledgements(self, self.layouts)
        self.run = RunOpener(self, self.memory, tiers, memory, world, commit_s, takeover, root)
        self.held = HeldSnapshots(key, self, stager, world, self.memory, self.layouts, self.run)
        self._finder = WriterFinder(self, self.run, key, tiers, world.rank, node)
        self.hear(messages.StoredNote, self._on_stored)
        self.hear(messages.ProblemNote, self._on_problem)
        self.held.check_left_over()
        self._meet()
        try:
            self.held.take_left_over()
            self.opened = self.insist(self.run.open)
            if self.held.take_former():
                self.opened = self.insist(self.run.open)  # our writer must know the history of that memory
        except BaseException:
            self.give_up()
            raise

    def _meet(self) -> None:
        """Find or start the writer, and map the memory that the writer holds."""
        client, greeted = self._finder.find_or_spawn()
        self.client = client
        if greeted is None:
            self._listen(client)
            return
        hello, fds = greeted
        self.memory.inherit(hello, fds)
        self.layouts.known = dict(self.memory.inherited.layouts)
        self.faults = hello.faults
        self._listen(client)
        log.info("inherited the memory that process %d left", hello.trainer)
        self._adopted = True
        self.memory.adopt()

    def give_up(self) -> None:
        """Disconnect, because the run could not be opened. The writer keeps memory of an earlier job attempt."""
        self.closing = True
        self.client.send(messages.Leave(keep=bool(self.memory.inherited.arenas)))
        self.client.close()
        self.memory.close()

    # -- the writer --

    def send(self, request: Request[R], fds: tuple[int, ...] = ()) -> Future[tuple[R, list[int]]]:
        """Send to the current writer; see `WriterClient.send`."""
        return self.client.send(request, fds)

    def insist(self, request: Callable[[WriterClient], T], end: float = math.inf) -> T:
        """Call `request` with the client of the writer. If the writer dies during the call, repeat the call with the
        next writer, until `end`."""
        for tries in itertools.count():
            try:
                return request(self.client)
            except WriterError as error:
                if self.closing:  # by a signal handler
                    raise ClosedError("this Checkpointer was closed during the call") from error
                if self.failure is not None or tries > INSIST or time.monotonic() > end:
                    raise
                time.sleep(0.1)  # the next writer is starting
        raise AssertionError

    def tell(self, request: Request[Any], fds: tuple[int, ...] = (), *, later: Request[Any] | None = None) -> None:
        """Send a request to this writer. Later writers get the last request of this type, or `later` if it is given."""
        with self.lock:
            self._standing[type(request)] = later or request, fds
            self.send(request, fds)

    def amend(self, kind: type[Request[Any]], **changes: Any) -> None:
        """Change the request of this type that is sent to the next writers."""
        if kind in self._standing:
            request, fds = self._standing[kind]
            self._standing[kind] = replace(request, **changes), fds

    def _listen(self, client: WriterClient) -> None:
        client.listen(self._on_note, self._on_lost)

    def hear(self, kind: type[N], handler: Callable[[N], None]) -> None:
        """Call `handler` with notes of this type, after earlier handlers. Notes without a handler are dropped."""
        self._hears.setdefault(kind, []).append(handler)

    def _on_note(self, note: Note) -> None:
        for handler in self._hears.get(type(note), ()):
            handler(note)

    def _on_stored(self, note: messages.StoredNote) -> None:
        if not note.checkpoint:
            self.memory.on_read(note.arena, note.slot)
        else:
            self.writes.on_stored(note)

    def _on_problem(self, note: messages.ProblemNote) -> None:
        if note.error == "FencedError":
            error = FencedError(note.text)
            with self.lock:
                self.lost = self.lost or error
            self.acknowledgements.on_no_writer(error)
            self.on_failure(error)
        elif note.error:
            self.on_failure(SaveError(note.text))
        else:
            log.warning("%s", note.text)

    def _on_lost(self) -> None:
        """Replace the dead writer. The trainer maps the memory too, so it passes the memory to the next writer.

        The next writer starts without the lock, so that staging continues. `Writes` keeps pending writes until then.
        """
        with self.lock:
            if self.closing or self.failure is not None:
                return
        try:
            fresh = self._finder.respawn()
        except Exception as error:  # for example out of descriptors
            with self.lock:
                self._fail(error if isinstance(error, CheckpointError) else WriterError(repr(error)))
            return
        with self.lock:
            if self.closing:
                fresh.send(messages.Leave())
                fresh.close()
                return
            self.layouts.on_new_writer(fresh)
            self.memory.on_new_writer(fresh)
            for request, fds in list(self._standing.values()):
                fresh.send(request, fds)
            self.writes.on_new_writer(fresh)
            self.client = fresh  # last, because a `Leave` must not arrive before the memory
        with contextlib.suppress(CheckpointError, TimeoutError):  # this writer has died too, or the run is closing
            self.memory.await_attached()
        if fresh.alive:
            self.acknowledgements.settle()
            log.warning("started a new writer; training was not affected")
        self._listen(fresh)

    def _fail(self, error: CheckpointError) -> None:
        failure = error
        if isinstance(error, FencedError):
            self.lost = self.lost or error
        else:
            failure = WriterError(f"the writer is lost, so nothing is saved: {error}")
        self.failure = failure
        self.on_failure(failure)
        self.writes.on_no_writer(failure)
        self.acknowledgements.on_no_writer(failure)

    # -- the run --

    @property
    def owner(self) -> Acquire:
        return self.run.owner

    # -- memory --

    @property
    def inherits(self) -> bool:
        """Return True if the writer holds snapshots of an earlier job attempt."""
        return self._adopted and any(arena.sealed() for arena in self.memory.arenas())

    @property
    def survives(self) -> bool:
        """Return True if the writer keeps its snapshots, or writes them out, when this process dies."""
        return self.memory.lasts or bool(self._tiers)

    # -- the end --

    def leave(self, timeout_s: float) -> None:
        """Disconnect, within `timeout_s`. The writer keeps the memory and makes it durable, as after the death of this
        process. If the writer has died, the next writer gets the memory first."""
        end = time.monotonic() + timeout_s
        if self.failure is None:
            try:
                leave = messages.Leave(keep=True)
                self.insist(lambda client: client.ask(leave, max(0.1, end - time.monotonic())), end)
            except FencedError:
                pass  # another job owns the run
            except CheckpointError as error:
                log.warning("cannot determine whether the writer keeps the snapshots in memory: %s", error)
        with self.lock:
            self.closing = True
        self.client.close()
        self.acknowledgements.on_no_writer(WriterError("the writer had died when the trainer released its memory"))
        self.memory.close()

    def close(self, timeout_s: float, *, failed: bool = False) -> None:
        """Wait until the writer has finished. Raises DeadlineError after `timeout_s`; the writer then continues alone.
        `failed`: True if an error has ended the training, for the run metrics."""
        with self.lock:
            self.closing = True
        try:
            if self.failure is None:
                with contextlib.suppress(WriterError):  # it died; the caller has waited for its writes
                    self.client.ask(messages.Leave(failed=failed), max(timeout_s, 0.1))
        finally:
            self.client.close()
            self.acknowledgements.on_no_writer(WriterError("the writer had died when the Checkpointer was closed"))
            self.memory.close()

    def forget(self) -> None:
        """Close a forked child's copies of the parent's descriptors."""
        self.client.forget()
        self.memory.forget()
