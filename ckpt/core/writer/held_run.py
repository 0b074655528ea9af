"""What all parts of the writer share: the table of requests, its event loop, its trainer, and the run that it has open.

Any object with methods below `@handles` can be given to `Dispatch`: of the core, of the guard, or of tools. If several
objects handle a type, they do so in the order in which they were given, and the result of the first is the reply. If a
type has no method, the writer does not start.

The owner of the run is the last one in the run log. The writer acts as that owner, or as the next owner of its own
trainer: a restore may begin the next term while a checkpoint is being written.
"""

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
    """The sender of a request, and the descriptors that came with it."""

    channel: Channel
    fds: list[int]


class Answer(NamedTuple):
    """A reply with descriptors."""

    value: object
    fds: tuple[int, ...]


H = TypeVar("H", bound=Callable[..., object])
HANDLERS: dict[type[Request[Any]], list[Callable[..., object]]] = {}


def handles(kind: type[Request[Any]]) -> Callable[[H], H]:
    """Mark a method as the handler of this type of request. It returns the reply or raises an error, and may be async.
    If it has a parameter `caller`, it also gets the caller."""

    def enter(handler: H) -> H:
        HANDLERS.setdefault(kind, []).append(handler)
        return handler

    return enter


class Dispatch:
    """Passes requests to the handlers of these objects. Raises TypeError if a type has none."""

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
            raise TypeError(f"nobody deals with {', '.join(missing)}")

    def request(self, incoming: Incoming) -> Request[Any]:
        """Return the request in a message. Raises ProtocolError if it is not one."""
        return message_of(incoming, self._kinds)

    async def answer(self, request: Request[Any], caller: Caller) -> object:
        """Call the handlers, and return or raise the result of the first."""
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
            f"this writer is of everystep {VERSION}, protocol {PROTOCOL}, and keeps its memory for that: everystep "
            f"{greeting.library} speaks protocol {greeting.protocol}"
        )


class Background:
    """Tasks and threads of the event loop in which it is made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # strong references, because the loop keeps none

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task in the background. If it fails, the error is logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            events.log.error("background task failed", exc_info=error)

    def thread(self, target: Callable[..., None], *arguments: object) -> None:
        """Start a thread that the process does not wait for."""
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def post(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop, from such a thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: we are leaving
            self.loop.call_soon_threadsafe(function, *arguments)


# -- the open run --


LOST_S = 5.0  # timeout for a tier to return the id of its run
T = TypeVar("T")


class PresentTrainer:
    """The trainer that this writer serves, or served until it died, left or lost the run."""

    def __init__(self, channel: Channel | None, process: Process) -> None:
        self.adoptions = 0  # trainers that have inherited this writer
        self.fenced: FencedError | None = None  # why its job no longer owns the run
        self._earlier: list[Process] = []  # trainers detected as dead whose processes may not have ended
        self._begin(channel, process)

    def _begin(self, channel: Channel | None, process: Process) -> None:
        self.channel, self.process = channel, process
        self.since = time.time()
        self.dead = False  # True if it sends nothing more
        self.left = False  # True if it has left; its process may live
        self.closed = False  # True if it has left and needs no memory to be kept
        self.announced = False  # True if it has explained its end
        self.ended_at: float | None = None  # when it was found to have died, left, closed or lost the run (monotonic)
        self.crashed = asyncio.Event()  # set by whoever sees it crash: a large process takes a while to die of that

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def writing_on(self) -> list[Process]:
        """Processes that were found dead, and whose devices may write to the arenas until they have ended."""
        found = [*self._earlier, *([] if self.left else [self.process])]
        return [one for one in dict.fromkeys(found) if one.alive]

    def adopted_by(self, channel: Channel, process: Process) -> None:
        """Serve this trainer from now on."""
        self._earlier = self.writing_on
        self.adoptions += 1
        self._begin(channel, process)

    def disown(self) -> None:
        """Keep requests of this trainer that are under way from changing the owner of the run."""
        self.adoptions += 1
        self.closed = False

    def end(self) -> None:
        """Note when it died, left, closed or lost the run; the first call counts."""
        self.ended_at = self.ended_at or time.monotonic()

    def fence(self, error: FencedError) -> None:
        """Fence it, because another job owns the run: from now on all its requests fail."""
        events.log.warning("%s", error)
        self.fenced = error
        self.tell(ProblemNote(str(error), "FencedError"))
        self.dead = self.announced = True
        self.disown()

    def check_not_fenced(self, channel: Channel | None = None) -> None:
        """Raise FencedError if it has lost the run. `channel`: the sender of a request."""
        if self.fenced is not None and channel in (None, self.channel):
            raise FencedError(str(self.fenced))

    # -- notes --

    def tell(self, note: Note) -> None:
        """Send a note, if it is connected."""
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(note)

    def say(self, text: str) -> None:
        """Log a warning here and in the trainer."""
        events.log.warning("%s", text)
        self.tell(ProblemNote(text))

    # -- connections --

    def hung_up(self, channel: Channel) -> None:
        """Forget a closed connection. This is not evidence of death; only the pidfd and the mutex are."""
        if channel is self.channel:
            self.channel = None

    # -- for reports --

    def state(self) -> str:
        """Return its state as in `ckpt.tools.observe.telemetry.status.RankStatus`."""
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
    """The run that this writer has open. `tiers`: the nearest first. From the trainer's `OpenRun`: `linger_s`, how long
    memory is kept for the next trainer; `commit_s`, the timeout for the parts of other ranks; `first_number`, of data
    files."""

    def __init__(self, trainer: PresentTrainer) -> None:
        self._trainer = trainer
        self.tiers: list[OpenTier] = []
        self.owner: Acquire | None = None
        self.next_nonces: frozenset[str] = frozenset()  # an ACQUIRE with one of these is by our own job
        self.acquires: list[Acquire] = []  # the history that the snapshots in memory belong to
        self.taking = asyncio.Lock()  # held while the run is taken over by us
        self.linger_s, self.commit_s, self.first_number = 120.0, 600.0, 0
        self.leaves_at: float | None = None  # when memory is released, once all of it is durable (monotonic)

    # -- who owns it --

    def mine(self) -> Acquire:
        """Return the owner that this writer acts as. Raises UsageError before the run was opened."""
        if self.owner is None:
            raise UsageError("the run has not been opened")
        return self.owner

    def become(self, owner: Acquire) -> None:
        """Act as this owner from now on."""
        if self.owner is None or (owner.term, owner.nonce) != (self.owner.term, self.owner.nonce):
            self.owner = owner
            self.acquires.append(owner)

    def succeed(self, log: RunLog) -> None:
        """Write with the newest term of the log if our own job took it: the trainer may die before it sends OwnRun."""
        if log.state.acquires and log.state.acquires[-1].nonce in self.next_nonces:
            self.become(log.state.acquires[-1])

    async def as_owner(self, log: RunLog, act: Callable[[Acquire], Awaitable[T]]) -> T:
        """Do this as the owner. If it is fenced by a newer term of our own job, do it again with that."""
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
        """Raise FencedError if another trainer has come since this adoption, because its changes must stay."""
        if begun != self._trainer.adoptions:
            raise FencedError("another process has taken this run over")

    async def check_owner(self, tiers: Iterable[OpenTier] | None = None) -> None:
        """Raise FencedError if another job owns the run, according to the logs of these tiers, by default of all."""
        for tier in (tier for tier in tiers or self.tiers if tier.opened):
            with contextlib.suppress(StoreError):
                await tier.log.refresh()
                self.succeed(tier.log)
                tier.log.check_owner(self.mine())

    # -- its tiers --

    def near(self, tier: OpenTier) -> OpenTier | None:
        """Return the nearest tier if a further one is filled from it, because it is quicker than the network."""
        nearest = self.tiers[0] if self.tiers else None
        return nearest if nearest is not None and nearest is not tier and not nearest.store.remote else None

    def spoken_for(self) -> list[OpenTier]:
        """Return the tiers in which this rank is the first one."""
        return [tier for tier in self.tiers if tier.role.place == 0]

    @handles(KeepSteps)
    async def keep_steps(self, request: KeepSteps) -> KeptReply:
        """Keep steps; clean-up spares them from now on, before the records exist. If two tiers have different notes,
        those of the nearer one count."""
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
        """Return the URLs of tiers that no longer contain the run that was opened there. A tier that does not reply is
        not one of them."""
        found = []
        for tier in (tier for tier in (self.tiers if tiers is None else tiers) if tier.opened):
            with contextlib.suppress(CheckpointError, TimeoutError):
                if not await asyncio.wait_for(tier.log.same(), LOST_S):
                    found.append(tier.url)
        return found

    async def replaced(self) -> bool:
        """Return True if another run has begun in every tier, so that no trainer can come for this memory."""
        if not self.tiers or not all(tier.opened for tier in self.tiers):
            return False
        with contextlib.suppress(CheckpointError, TimeoutError):
            return all([await asyncio.wait_for(tier.log.replaced(), LOST_S) for tier in self.tiers])
        return False

    @property
    def roots(self) -> dict[str, str]:
        """Return the ids of the runs in the tiers, by URL."""
        return {tier.url: tier.log.root for tier in self.tiers if tier.log.root}

    def sees(self, proof: str) -> bool:
        """Return True if the folder of the nearest tier has this temporary file."""
        folder = folder_of(self.tiers[0].url) if self.tiers else None
        return folder is not None and is_temporary(proof) and "/" not in proof and (folder / proof).exists()


def acquire_of(owner: Owner) -> Acquire:
    """Convert an owner from its form in messages."""
    term, nonce, restored = owner
    return Acquire(term, nonce, None if restored is None else CheckpointId.parse(restored))
