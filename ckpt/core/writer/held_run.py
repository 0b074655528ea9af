"""The state that all parts of the writer share, and the dispatch of requests to their handlers.

`Dispatch` accepts objects from the core, the guard or tools, and calls their methods that are marked with `@handles`.
If several objects handle a type of request, they are called in the order in which they were given, and the result of
the first is the reply. If a type has no handler, the writer does not start. `Background` runs tasks and threads.

`PresentTrainer` is the trainer that the writer serves, and `HeldRun` is the run that it has open. The newest ACQUIRE
record of the run log names the owner of the run. The writer acts as that owner, or as the next owner of its own job,
because a restore may begin the next term while a checkpoint is being written."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import psutil

from ckpt import events
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.channel import Channel
from ckpt.core.ipc.heartbeat import Process, number_in_proc
from ckpt.core.ipc.messages import (
    PROTOCOL,
    Incoming,
    KeepSteps,
    KeptReply,
    Lend,
    Note,
    Owner,
    ProblemNote,
    Request,
    message_of,
    table,
)
from ckpt.core.log.run_log import Acquire, RunLog
from ckpt.errors import CheckpointError, FencedError, ProtocolError, StoreError, UsageError
from ckpt.store import folder_of, is_temporary
from ckpt.version import VERSION


@dataclass(frozen=True)
class Caller:
    """The sender of a request, and the file descriptors that came with the request."""

    channel: Channel
    fds: list[int]


class Answer(NamedTuple):
    """A reply that has file descriptors."""

    value: object
    fds: tuple[int, ...]


H = TypeVar("H", bound=Callable[..., object])
HANDLERS: dict[type[Request[Any]], list[Callable[..., object]]] = {}


def handles(kind: type[Request[Any]]) -> Callable[[H], H]:
    """Mark a method as a handler of this type of request. The method returns the reply or raises an error, and may be
    async. If it has a parameter `caller`, it also gets the caller."""

    def enter(handler: H) -> H:
        HANDLERS.setdefault(kind, []).append(handler)
        return handler

    return enter


class Dispatch:
    """Passes requests to the handlers of these objects. Raises TypeError if a type of request has no handler."""

    def __init__(self, *objects: object) -> None:
        self._kinds = table(HANDLERS)
        self._bound: dict[type[Request[Any]], list[Callable[..., object]]] = {
            kind: [
                getattr(one, handler.__name__)
                for one in objects
                for handler in handlers
                if getattr(type(one), handler.__name__, None) is handler
            ]
            for kind, handlers in HANDLERS.items()
        }
        if missing := [kind.__name__ for kind in Request.__subclasses__() if not self._bound.get(kind)]:
            raise TypeError(f"no handler for {', '.join(missing)}")

    def request(self, incoming: Incoming) -> Request[Any]:
        """Return the request in a message. Raises ProtocolError if the message is not a request."""
        return message_of(incoming, self._kinds)

    async def answer(self, request: Request[Any], caller: Caller) -> object:
        """Call all handlers of a request, and return the result of the first."""
        replies = []
        for handler in self._bound[type(request)]:
            wants_caller = "caller" in inspect.signature(handler).parameters
            found = handler(request, caller) if wants_caller else handler(request)
            replies.append(await found if inspect.isawaitable(found) else found)
        return replies[0]


def check_version(greeting: Lend) -> None:
    """Raise ProtocolError for a trainer of another version, before anything changes."""
    if greeting.protocol != PROTOCOL:
        raise ProtocolError(
            f"this writer has everystep {VERSION}, protocol {PROTOCOL}, and keeps its memory for this protocol. "
            f"This trainer has everystep {greeting.library}, protocol {greeting.protocol}"
        )


class Background:
    """Tasks and threads of the event loop in which this object is made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # strong references, because the loop keeps none

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task in the background. If the task fails, its error is logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            events.log.error("background task failed", exc_info=error)

    def thread(self, target: Callable[..., None], *arguments: object) -> None:
        """Start a thread that ends with the process."""
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def post(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop. Background threads use this method."""
        with contextlib.suppress(RuntimeError):  # the loop has closed, because the writer is leaving
            self.loop.call_soon_threadsafe(function, *arguments)


# -- the open run --


LOST_S = 5.0  # timeout for a tier to return the id of its run
T = TypeVar("T")


class PresentTrainer:
    """The trainer that this writer serves, or that it served last."""

    def __init__(self, channel: Channel | None, process: Process) -> None:
        self.adoptions = 0  # number of trainers that have inherited this writer
        self.fenced: FencedError | None = None  # set if its job no longer owns the run
        self._earlier: list[Process] = []  # dead trainers whose processes may not have ended
        self._begin(channel, process)

    def _begin(self, channel: Channel | None, process: Process) -> None:
        self.channel, self.process = channel, process
        self.since = time.time()
        self.dead = False  # True if it sends no more messages
        self.left = False  # True if it has left, even if its process lives
        self.closed = False  # True if it has left and no memory must be kept
        self.announced = False  # True if it has reported why it ends
        self.ended_at: float | None = None  # monotonic time at which its end was detected
        self.crashed = asyncio.Event()  # set at a crash, which is earlier than the end of a large process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def writing_on(self) -> list[Process]:
        """Return the dead trainers whose devices may write to arenas until their processes end."""
        found = [*self._earlier, *([] if self.left else [self.process])]
        return [one for one in dict.fromkeys(found) if one.alive]

    def adopted_by(self, channel: Channel, process: Process) -> None:
        """Serve this trainer from now on."""
        self._earlier = self.writing_on
        self.adoptions += 1
        self._begin(channel, process)

    def disown(self) -> None:
        """Keep this trainer's requests that are under way from changing the owner of the run."""
        self.adoptions += 1
        self.closed = False

    def end(self) -> None:
        """Record the time at which the trainer died, left, closed or lost the run. Only the first call counts."""
        self.ended_at = self.ended_at or time.monotonic()

    def fence(self, error: FencedError) -> None:
        """Fence the trainer, because another job owns the run. All its later requests fail."""
        events.log.warning("%s", error)
        self.fenced = error
        self.tell(ProblemNote(str(error), "FencedError"))
        self.dead = self.announced = True
        self.disown()

    def check_not_fenced(self, channel: Channel | None = None) -> None:
        """Raise FencedError if the trainer has lost the run. With `channel`, raise only for the trainer's channel."""
        if self.fenced is not None and channel in (None, self.channel):
            raise FencedError(str(self.fenced))

    # -- notes --

    def tell(self, note: Note) -> None:
        """Send a note to the trainer if it is connected."""
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(note)

    def say(self, text: str) -> None:
        """Log a warning in the writer and in the trainer."""
        events.log.warning("%s", text)
        self.tell(ProblemNote(text))

    # -- connections --

    def hung_up(self, channel: Channel) -> None:
        """Forget a closed connection. It does not prove that the trainer is dead; only the pidfd and the mutex do."""
        if channel is self.channel:
            self.channel = None

    # -- for reports --

    def state(self) -> str:
        """Return the trainer's state for `ckpt.tools.observe.telemetry.status.RankStatus`."""
        if self.closed:
            return "closed"
        try:
            status = psutil.Process(number_in_proc(self.pid)).status()
        except psutil.Error:
            return "dead"
        if not self.process.alive:
            return "dead"
        if self.dead:
            return "left"
        return "frozen" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"


class HeldRun:
    """The run that this writer has open. `tiers`: nearest first. Three values come from the trainer's `OpenRun`.
    `linger_s`: time to keep memory for the next trainer. `commit_s`: timeout for the files of other ranks.
    `first_number`: first number of a data file."""

    def __init__(self, trainer: PresentTrainer) -> None:
        self._trainer = trainer
        self.tiers: list[OpenTier] = []
        self.owner: Acquire | None = None
        self.next_nonces: frozenset[str] = frozenset()  # an ACQUIRE with one of these nonces is from our own job
        self.acquires: list[Acquire] = []  # the ownership history of the snapshots in memory
        self.taking = asyncio.Lock()  # held while our job takes ownership of the run
        self.linger_s, self.commit_s, self.first_number = 120.0, 600.0, 0
        self.leaves_at: float | None = None  # monotonic time when memory is released, once all of it is durable

    # -- the owner of the run --

    def mine(self) -> Acquire:
        """Return the owner on whose behalf this writer acts. Raises UsageError before the run was opened."""
        if self.owner is None:
            raise UsageError("the run has not been opened")
        return self.owner

    def become(self, owner: Acquire) -> None:
        """Act as this owner from now on."""
        if self.owner is None or (owner.term, owner.nonce) != (self.owner.term, self.owner.nonce):
            self.owner = owner
            self.acquires.append(owner)

    def succeed(self, log: RunLog) -> None:
        """Adopt the newest term in the log if our job acquired it, as the trainer may die before it sends OwnRun."""
        if log.state.acquires and log.state.acquires[-1].nonce in self.next_nonces:
            self.become(log.state.acquires[-1])

    async def as_owner(self, log: RunLog, act: Callable[[Acquire], Awaitable[T]]) -> T:
        """Call `act` with the owner. If a newer term of our own job has fenced it, repeat the call with that term."""
        while True:
            mine = self.mine()
            try:
                return await act(mine)
            except FencedError:
                async with self.taking:
                    self.succeed(log)
                    if self.mine() == mine:
                        raise

    def check_still(self, begun: int) -> None:
        """Raise FencedError if another trainer has come since adoption `begun`, because its changes must stay."""
        if begun != self._trainer.adoptions:
            raise FencedError("another process has taken ownership of this run")

    async def check_owner(self, tiers: Iterable[OpenTier] | None = None) -> None:
        """Raise FencedError if the log of one of these tiers (default: all) shows that another job owns the run."""
        for tier in (tier for tier in tiers or self.tiers if tier.opened):
            with contextlib.suppress(StoreError):
                await tier.log.refresh()
                self.succeed(tier.log)
                tier.log.check_owner(self.mine())

    # -- its tiers --

    def near(self, tier: OpenTier) -> OpenTier | None:
        """Return the tier from which `tier` is filled: the nearest one if it is local and another tier, else None."""
        nearest = self.tiers[0] if self.tiers else None
        return nearest if nearest is not None and nearest is not tier and not nearest.store.remote else None

    def spoken_for(self) -> list[OpenTier]:
        """Return the tiers for which this rank is responsible, because it is the first of their ranks."""
        return [tier for tier in self.tiers if tier.role.place == 0]

    @handles(KeepSteps)
    async def keep_steps(self, request: KeepSteps) -> KeptReply:
        """Pin steps. Clean-up spares them immediately, before the records exist. If two tiers have different notes for
        a step, use the note in the nearer tier."""
        tiers = self.spoken_for()
        for tier in tiers if request.notes is not None else ():
            tier.notes = dict(request.notes or ())
        tiers = [tier for tier in tiers if tier.opened]
        if request.notes is not None:
            found = await asyncio.gather(*(tier.keep_noted(self.mine()) for tier in tiers))
            for error in filter(None, found):
                raise error
        notes = {step: note for tier in reversed(tiers) for step, note in tier.noted().items()}
        there = set().union(*(tier.steps() for tier in tiers))
        return KeptReply([(step, note, step in there) for step, note in notes.items()], request.step in there)

    async def lost(self, tiers: Iterable[OpenTier] | None = None) -> list[str]:
        """Return the URLs of tiers that no longer contain the run that was opened in them. Tiers that do not reply are
        left out."""
        found = []
        for tier in (tier for tier in (self.tiers if tiers is None else tiers) if tier.opened):
            with contextlib.suppress(CheckpointError, TimeoutError):
                if not await asyncio.wait_for(tier.log.same(), LOST_S):
                    found.append(tier.url)
        return found

    async def replaced(self) -> bool:
        """Return True if another run has begun in every tier, so that no trainer will come for this memory."""
        if not self.tiers or not all(tier.opened for tier in self.tiers):
            return False
        with contextlib.suppress(CheckpointError, TimeoutError):
            return all([await asyncio.wait_for(tier.log.replaced(), LOST_S) for tier in self.tiers])
        return False

    @property
    def roots(self) -> dict[str, str]:
        """Return a dict from the URL of each tier to the id of the run in it."""
        return {tier.url: tier.log.root for tier in self.tiers if tier.log.root}

    def sees(self, proof: str) -> bool:
        """Return True if the folder of the nearest tier has this temporary file."""
        folder = folder_of(self.tiers[0].url) if self.tiers else None
        return folder is not None and is_temporary(proof) and "/" not in proof and (folder / proof).exists()


def acquire_of(owner: Owner) -> Acquire:
    """Convert an owner from its form in messages."""
    term, nonce, restored = owner
    return Acquire(term, nonce, None if restored is None else CheckpointId.parse(restored))
