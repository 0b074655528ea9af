"""Runs the requests of several processes to one object store in random orders, with faults.

The actors run the library itself: its log, commits, recovery, retention and reading. They are jobs of some ranks that
take over the run from each other, cleaners and readers. Checkpoints are full, or increments that refer to data files of
older ones. Each request waits until the simulator lets it through, one at a time, chosen by a seeded generator. Time
passes only when the simulator advances it. A seed always gives the same schedule, and `Failure` shows it request by
request.

Possible results of a request, as with a real object store:

    done                        with a reply
    lost, not done              StoreError, retryable, and nothing happened
    lost, done                  StoreError, retryable, but it happened
    lost, lands later           StoreError, retryable, and it happens later, perhaps after its sender has died
    409                         StoreError, retryable: another conditional request was in progress
    412 on our own              ExistsError for the object that this request created: a lower layer retried it
    killed before, after, lands later    its sender gets no reply, and has ended

The oracle checks each change of the store with a reader of its own, see `Oracle`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import logging
import random
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from ckpt.core.checkpoint import chunks, commits, read, retention, write
from ckpt.core.checkpoint.commits import Role
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.checkpoint.write import RankSnapshot, WrittenManifest, write_part
from ckpt.core.format import manifest
from ckpt.core.format.digest import file_digest
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import (
    CheckpointId,
    DataFile,
    data_key,
    index_key,
    manifest_key,
    metadata_of,
    new_format,
    owner,
)
from ckpt.core.format.table import Table
from ckpt.core.log import records, run_log
from ckpt.core.log.run_log import Acquire, RunLog, Trimmer
from ckpt.core.writer import parts as settling
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    ExistsError,
    FencedError,
    NoCheckpointError,
    NotFoundError,
    OutcomeUnknownError,
    SaveError,
    StoreError,
)
from ckpt.store import ObjectInfo, check_prefix
from ckpt.tools.maintain import prune
from ckpt_backends import retry

LATENCY_S = 0.01  # virtual; of each request
JUST_NOW_S = 0.1  # a listing may leave out what is so new
MAX_TURNS = 4_000  # of one schedule; then all actors stop, as at a power cut
SNAPSHOT_EVERY = 3  # so that the few records of a schedule reach several
ROWS = 4
FROZEN = ("f", "g")  # tensors that rarely change; "w" always does


class Violation(Exception):
    """A rule was broken."""


@dataclass
class Failure:
    """A broken property, and the schedule that led to it."""

    seed: int
    problem: str
    trace: str

    def __str__(self) -> str:
        return f"schedule {self.seed}: {self.problem}\n{self.trace}"


# -- time --


class Loop(asyncio.BaseEventLoop):
    """An event loop without sockets, threads or real time. When no task is ready, `idle` decides what happens.

    `idle(seconds)`: until the next timer, None if there is none.
    """

    def __init__(self, idle: Callable[[float | None], None]) -> None:
        super().__init__()
        self.now, self._idle = 0.0, idle
        self._selector = self

    def select(self, timeout: float | None) -> tuple[()]:
        if timeout != 0:
            self._idle(timeout)
        return ()

    def _process_events(self, events: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


PLAYED = (commits, settling, manifest, read, retention, retry, run_log, chunks, prune, write)  # those that take part


def _users_of(name: str) -> list[Any]:
    """Those that use the module `time`, `random` or `secrets`."""
    real = importlib.import_module(name)
    return [module for module in PLAYED if getattr(module, name, None) is real]


@contextlib.contextmanager
def virtual(loop: Loop, dice: random.Random) -> Iterator[None]:
    """In here the library has no clock, no chance and no memory but those of one schedule."""
    clock = SimpleNamespace(**dict.fromkeys(("monotonic", "time", "perf_counter"), loop.time), sleep=None)
    tokens = SimpleNamespace(
        token_hex=lambda n=16: f"{dice.getrandbits(8 * n):0{2 * n}x}", token_bytes=lambda n=16: dice.randbytes(n)
    )
    changes: list[tuple[Any, str, Any]] = [(m, "time", clock) for m in _users_of("time")]
    changes += [(m, "random", dice) for m in _users_of("random")]
    changes += [(module, "_DICE", dice) for module in PLAYED if hasattr(module, "_DICE")]
    changes += [(m, "secrets", tokens) for m in _users_of("secrets")]
    changes += [(settling, far + "STAGGER_S", 0.3) for far in ("", "FAR_")]
    changes += [(settling, far + "POLL_S", (0.05, 0.2)) for far in ("", "FAR_")]
    changes += [(retention, "_cache", {})]
    changes += [(module, "SNAPSHOT_EVERY", SNAPSHOT_EVERY) for module in (run_log, records)]
    changes += [(records, "KEPT_REQUESTS", 2 * SNAPSHOT_EVERY), (run_log, "GRACE_S", 0.15)]
    changes += [(logging.getLogger("ckpt"), "disabled", True)]
    before = [(what, name, getattr(what, name)) for what, name, _ in changes]
    for what, name, value in changes:
        setattr(what, name, value)
    try:
        yield
    finally:
        for what, name, value in before:
            setattr(what, name, value)


# -- the store, and what becomes of requests --


@dataclass(eq=False)
class Actor:
    """A process. `mine`: the job attempt that it writes as, unless it has none (`fenced` is false)."""

    name: str
    weight: float = 1.0
    dead: bool = False
    stopped: int = -1  # suspended, until the record of this number is deleted
    fenced: bool = True
    mine: Acquire | None = None
    waiting: list[Request] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    job: Job | None = None
    sources: set[tuple[CheckpointId, CheckpointId]] = field(
        default_factory=set
    )  # its increments in flight, and their bases


@dataclass(eq=False, slots=True)
class Request:
    """`effect` does it, to the objects, and returns the answer; `create`: it may fail because something is there."""

    actor: Actor
    name: str
    key: str
    effect: Callable[[], Any]
    changes: bool
    create: bool
    answer: asyncio.Future[Any]


class SimStore:
    """The store as one actor sees it; all share the objects of one `Sim`."""

    url = "sim://run"
    remote = True

    def __init__(self, sim: Sim, actor: Actor) -> None:
        self.sim, self.actor = sim, actor

    async def request(
        self, name: str, key: str, effect: Callable[[], Any], *, changes: bool = False, create: bool = False
    ) -> Any:
        if self.actor.dead or self.sim.over:
            raise asyncio.CancelledError
        answer = self.sim.loop.create_future()
        self.actor.waiting.append(Request(self.actor, name, key, effect, changes, create, answer))
        return await answer

    async def put(self, key: str, data: Any, *, create: bool = False) -> None:
        sim, raw, actor, mine = self.sim, bytes(data), self.actor, self.actor.mine
        if key.startswith("log/"):
            sim.oracle.ask(raw, actor)
        await self.request(
            "create" if create else "put",
            key,
            lambda: sim.put(key, raw, create, mine, fenced=actor.fenced),
            changes=True,
            create=create,
        )

    async def upload(self, key: str, *, size: int, replace: bool = False) -> SimUpload:
        return SimUpload(self, key, size, replace)

    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        limit: int | None = None,
    ) -> memoryview:
        def effect() -> memoryview:
            raw = self.sim.found(key)
            if limit is not None and len(raw) > limit:
                raise CorruptError(f"{key} is implausibly large")
            end = len(raw) if length is None else start + length
            if end > len(raw):
                raise StoreError(f"{key} holds {len(raw)} bytes, {end} were asked for")
            return memoryview(raw)[start:end]

        found: memoryview = await self.request("get", key, effect)
        return found

    async def head(self, key: str) -> ObjectInfo:
        found: ObjectInfo = await self.request("head", key, lambda: ObjectInfo(key, len(self.sim.found(key))))
        return found

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        return Listing(self, prefix)

    async def delete(self, key: str) -> None:
        await self.request("delete", key, lambda: self.sim.delete(key), changes=True)

    async def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:  # as far as the request gets before it is lost
            await self.delete(key)

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        return 0

    async def aclose(self) -> None:
        pass


class Listing:
    """A listing comes in pages, each a request of its own: it is of no one moment, and in any order."""

    def __init__(self, store: SimStore, prefix: str) -> None:
        self.store, self.prefix = store, check_prefix(prefix)
        self.after = (-1, "")
        self.page: list[ObjectInfo] = []
        self.more = True

    def __aiter__(self) -> Listing:
        return self

    async def __anext__(self) -> ObjectInfo:
        if not self.page and self.more:
            words = f"{self.prefix}* after {self.after[1] or 'nothing'}"
            self.page = await self.store.request("list", words, self._next)
            self.more = len(self.page) == self.store.sim.page
            self.page.reverse()
        if not self.page:
            raise StopAsyncIteration
        self.after = self._place(self.page[-1].key)
        return self.page.pop()

    def _place(self, key: str) -> tuple[int, str]:
        """Return the position of a name in the listing."""
        return zlib.crc32(f"{self.store.sim.seed} {key}".encode()), key

    def _next(self) -> list[ObjectInfo]:
        sim = self.store.sim
        keys = [key for key in sim.objects if key.startswith(self.prefix) and self._place(key) > self.after]
        keys = [key for key in sorted(keys, key=self._place) if not sim.overlooks(self.store.actor, key)]
        return [ObjectInfo(key, len(sim.objects[key])) for key in keys[: sim.page]]


class SimUpload:
    """An upload whose only request is its end: its parts are invisible before."""

    part = 0

    def __init__(self, store: SimStore, key: str, size: int, replace: bool) -> None:
        self.store, self.key, self.data, self.create = store, key, bytearray(size), not replace

    async def write_at(self, offset: int, view: memoryview) -> None:
        self.data[offset : offset + len(view)] = view

    async def finish(self) -> None:
        sim, key, raw, create = self.store.sim, self.key, bytes(self.data), self.create
        await self.store.request("finish", key, lambda: sim.put(key, raw, create), changes=True, create=create)

    async def abort(self) -> None:
        pass


class Sim:
    """One schedule: the objects, the actors, and what happens next."""

    def __init__(self, seed: int) -> None:
        self.seed, self.dice = seed, random.Random(seed)
        dice = self.dice
        self.loop = Loop(self.idle)
        self.loop.set_exception_handler(lambda loop, context: None)  # errors of tasks are looked at in the end
        self.objects: dict[str, bytes] = {}
        self.born: dict[str, float] = {}
        self.overlooked: set[tuple[Actor, str]] = set()
        self.oracle = Oracle(self)
        self.actors: list[Actor] = []
        self.late: list[Request] = []
        self.trace: list[tuple[float, str, str, str, str]] = []
        self.origins: dict[
            tuple[CheckpointId, int], dict[str, CheckpointId]
        ] = {}  # of frozen tensors: when they last changed
        self.over = False
        self.problem = ""
        self.turns = 0
        self.page = dice.choice((1000, 1000, 3))  # keys of one request that lists
        self.lose = dice.choice((0.0, 0.05, 0.1, 0.25))  # of requests that change anything; others are lost less often
        self.kill = dice.choice((0.0, 0.003, 0.01))
        self.doubled = dice.choice((0.0, 0.0, 0.1))  # 412 on our own
        self.tries_again = dice.random() < 0.3
        self.change = dice.choice((0.01, 0.05, 0.2))  # of who is quick and who is slow
        self.conflict = dice.choice((0.0, 0.0, 0.1))
        self.untidy = dice.random() < 0.3
        self.long = dice.random() < 0.2  # one actor appends many records while others stand still
        self.suspend = 0.3 if self.long else dice.choice((0.0, 0.0, 0.1))

    def staged(self, checkpoint: CheckpointId, layout: Layout) -> bytes:
        """Create the snapshot of a rank in memory: its bytes identify checkpoint and rank."""
        origins = self.origins.get((checkpoint, layout.rank), {})
        found = [f"{origins.get(name, checkpoint)} {layout.rank} {name}" for name in sorted((*FROZEN, "w"))]
        return b"".join(hashlib.sha256(text.encode()).digest()[: 4 * ROWS] for text in found)

    def overlooks(self, actor: Actor, key: str) -> bool:
        """A listing of a folder runs while others write: it may have a record but lack the one before. This happens
        once."""
        if not self.untidy or not key.startswith("log/") or self.loop.now - self.born.get(key, 0.0) > JUST_NOW_S:
            return False
        newest = max(one for one in self.objects if one.startswith("log/0"))
        if key == newest or (actor, key) in self.overlooked or self.dice.random() < 0.5:
            return False
        self.overlooked.add((actor, key))
        return True

    # Effects of requests.

    def found(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFoundError(f"{key} is not there")
        return self.objects[key]

    def put(self, key: str, raw: bytes, create: bool, mine: Acquire | None = None, *, fenced: bool = True) -> None:
        if create and key in self.objects:
            raise ExistsError(f"{key} exists")
        before, self.objects[key] = self.objects.get(key), raw
        self.born[key] = self.loop.now
        self.oracle.stored(key, raw, before, mine, fenced)

    def delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self.oracle.deleted(key)

    # The next event.

    def idle(self, timeout: float | None) -> None:
        """All tasks wait: let one request through, or let time pass until the next timer."""
        self.turns += 1
        if self.turns > MAX_TURNS:
            self.say("all actors", "stopped after MAX_TURNS turns")
            self.stop()
            return
        dice = self.dice
        if dice.random() < self.change:  # some stand still for long: they wake up as zombies
            for actor in self.actors:
                actor.weight = dice.choice((0.02, 1, 1, 3, 10))
        choices: list[Any] = [actor for actor in self.actors if actor.waiting and not self.is_suspended(actor)]
        weights = [actor.weight for actor in choices]
        if self.late:
            choices.append("late")
            weights.append(0.02 if self.long else 0.1)
        if timeout is not None:
            choices.append("clock")
            weights.append(0.3)
        if not choices:
            choices = [actor for actor in self.actors if actor.waiting]
            weights = [1.0] * len(choices)
        if not choices:
            raise Violation("all actors wait for ever")
        chosen = dice.choices(choices, weights)[0]
        if chosen == "clock":
            assert timeout is not None
            self.loop.now += timeout if len(choices) == 1 else min(timeout, 0.3)
        elif chosen == "late":
            self.land_late()
        else:
            self.loop.now += LATENCY_S
            request = chosen.waiting.pop(dice.randrange(len(chosen.waiting)))
            may_stop = request.create and request.key.startswith("log/0") and chosen.name != "talker"
            if may_stop and dice.random() < self.suspend:
                self.say(chosen.name, request.name, request.key, "suspended")
                chosen.stopped = int(request.key[4:16])
                chosen.waiting.append(request)
            else:
                self.answer(request)

    def is_suspended(self, actor: Actor) -> bool:
        """Some are, the whole process, until what they were about to say is long past."""
        if actor.stopped < 0:
            return False
        gone = actor.stopped < self.oracle.floor and f"log/{actor.stopped:012d}.json" not in self.objects
        if gone or self.dice.random() < 0.002:
            actor.stopped = -1
        return actor.stopped >= 0

    def answer(self, request: Request) -> None:
        """Decide about one request."""
        dice, actor, answer = self.dice, request.actor, request.answer
        if answer.done():  # the sender has stopped waiting, but the request is still in flight
            if request.changes and dice.random() < 0.5:
                self.do(request, "nobody waits, done")
        elif dice.random() < self.kill:
            self.fate(request, "killed", dice.choice(("not done", "done", "lands later")))
            self.kill_process(actor)
        elif dice.random() < (self.lose if request.changes else self.lose / 5):
            self.fate(request, "lost", dice.choice(("not done", "done", "lands later")))
            answer.set_exception(StoreError("no answer", retryable=True))
        elif request.create and dice.random() < self.conflict:
            self.fate(request, "409", "not done")
            answer.set_exception(StoreError("409: a conditional request is going on", retryable=True))
        elif request.create and dice.random() < self.doubled:
            self.do(request, "412 on our own")
            answer.set_exception(ExistsError(f"{request.key} exists"))
        else:
            result = self.do(request, "done")
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

    def fate(self, request: Request, what: str, how: str) -> None:
        if request.changes and how == "done":
            self.do(request, f"{what}, done")
            return
        if request.changes and how == "lands later":
            self.late.append(request)
        else:
            how = "not done"
        self.say(request.actor.name, request.name, request.key, f"{what}, {how}")

    def do(self, request: Request, fate: str) -> Any:
        self.say(request.actor.name, request.name, request.key, fate)
        try:
            return request.effect()
        except (StoreError, CorruptError) as error:
            self.say(request.actor.name, request.name, request.key, f"  {type(error).__name__}")
            return error

    def land_late(self) -> None:
        request = self.late.pop(self.dice.randrange(len(self.late)))
        self.do(request, "lands now")

    def kill_process(self, actor: Actor) -> None:
        """kill -9: of one process, or of the whole job."""
        whole = actor.job.actors if actor.job is not None and self.dice.random() < 0.5 else [actor]
        for one in whole:
            self.say(one.name, "dies")
            one.dead = True
            one.waiting.clear()
            for task in one.tasks:
                task.cancel()

    def stop(self) -> None:
        for actor in self.actors:
            actor.dead = True
            actor.waiting.clear()
            for task in actor.tasks:
                task.cancel()

    # The actors.

    def actor(self, name: str, job: Job | None = None) -> Actor:
        actor = Actor(name, job=job)
        self.actors.append(actor)
        return actor

    def store(self, actor: Actor) -> Any:
        """The place as a process opens it: in some schedules with the library's own retries in front of it."""
        store = SimStore(self, actor)
        return retry.Retry(store, base_s=0.05, most_s=0.5, budget_s=1.0) if self.tries_again else store

    def start(self, actor: Actor, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        actor.tasks.append(task)
        return task

    def say(self, who: str, what: str, key: str = "", fate: str = "") -> None:
        self.trace.append((self.loop.now, who, what, key, fate))

    def told(self) -> str:
        """The schedule, request by request."""
        lines = []
        for number, (now, who, what, key, fate) in enumerate(self.trace):
            short = key.replace("00000000", "~").removesuffix(".json") + self.oracle.notes.get(number, "")
            lines.append(f"{number:5d} {now:8.2f} s  {who:10s} {what:8s} {short:72s} {fate}".rstrip())
        return "\n".join(lines)


# -- the oracle --


class Oracle:
    """Properties that must hold after every change of the store. It reads records itself, without the library's log.

    * No live COMMIT names a missing or wrong byte, and it has the manifests of all ranks.
    * Records never change, form a chain without gaps, and no request is in the log twice. Only records below the
    older of the two newest SNAPSHOTs are deleted, and a later file at their number is not a record.
    * Terms grow, and no actor writes for a job attempt that has been fenced.
    * A checkpoint that has ended is not ended again. No file of an unfinished or a staying checkpoint is listed for
    deletion.
    * The newest checkpoint of the history is never retired, unless it is rolled back with a reason. Nor are its
    newest two full ones.
    * At a commit, every file that a checkpoint names is its own or used by a live one, and none is in a PLAN.
    * No writer appends a PLAN that retires the sources of its own increments in flight.
    * An acknowledged checkpoint exists until a PLAN retires it; a save that was reported as failed never becomes
    one.
    """

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.notes: dict[int, str] = {}  # on lines of the trace
        self.records: list[bytes] = []
        self.places: list[int] = []  # the numbers of SNAPSHOTs
        self.too_late = 0  # records put where deleted ones were
        self.awaited: list[tuple[int, asyncio.Future[None]]] = []
        self.requests: set[str] = set()
        self.acquires: list[Acquire] = []
        self.live: dict[CheckpointId, dict[str, Any]] = {}
        self.files: dict[CheckpointId, dict[str, bytes]] = {}  # of live ones
        self.needed: dict[str, set[CheckpointId]] = {}
        self.doomed: set[str] = set()  # files that a PLAN deletes
        self.asked: set[str] = set()  # requests that were put, whatever became of them
        self.increments = 0
        self.ended: dict[CheckpointId, str] = {}
        self.acknowledged: set[CheckpointId] = set()

    def stored(self, key: str, raw: bytes, before: bytes | None, mine: Acquire | None, fenced: bool) -> None:
        if before is not None and before != raw and (key.startswith("log/") or key in self.needed):
            raise Violation(f"{key} was overwritten")
        if key.startswith("log/") and before is None:
            if json.loads(raw)["seq"] < self.floor:
                self.too_late += 1
                self.notes[len(self.sim.trace) - 1] = "  too late"
            else:
                self.record(key, raw, mine, fenced)

    @property
    def floor(self) -> int:
        return self.places[-2] if len(self.places) > 1 else 0

    def deleted(self, key: str) -> None:
        if key in self.needed:
            raise Violation(f"{key} was deleted, and {named(self.needed[key])} is live")
        if key == "FORMAT.json" or (key.startswith("log/") and int(key[4:16]) >= self.floor):
            raise Violation(f"{key} was deleted")

    def record(self, key: str, raw: bytes, mine: Acquire | None, fenced: bool) -> None:
        record = json.loads(raw)
        kind, body, seq = record["type"], record["body"], record["seq"]
        named = body.get("checkpoint") or " ".join(body.get("retire", ())) or body.get("term", "")
        self.notes[len(self.sim.trace) - 1] = f"  {kind} {named}"
        if seq != len(self.records) or key != f"log/{seq:012d}.json":
            raise Violation(f"{key} leaves a hole behind {len(self.records)} records")
        if seq and record["prev"] != hashlib.sha256(self.records[-1]).hexdigest():
            raise Violation(f"{key} does not follow the record before")
        self.records.append(raw)
        for count, reached in self.awaited:
            if count == len(self.records) and not reached.done():
                reached.set_result(None)
        if kind == "SNAPSHOT":
            self.places.append(seq)
            return  # it must say what we know already: the end of the schedule looks at it
        if record["id"] in self.requests:
            raise Violation(f"{record['id']} is in the log twice")
        self.requests.add(record["id"])
        newest = self.acquires[-1] if self.acquires else None
        if kind == "ACQUIRE":
            if newest is not None and body["term"] <= newest.term:
                raise Violation(f"term {body['term']} after {newest.term}")
            back = None if body["restored"] is None else CheckpointId.parse(body["restored"])
            self.acquires.append(Acquire(body["term"], body["nonce"], back))
            return
        stale = mine is None or newest is None or (mine.term, mine.nonce) != (newest.term, newest.nonce)
        if fenced and stale:
            raise Violation(f"{kind} by {mine}, which {newest} has overtaken")
        if kind == "PLAN":
            self.plan(body)
        elif kind in ("COMMIT", "ABORT"):
            checkpoint = CheckpointId.parse(body["checkpoint"])
            if checkpoint in self.live or checkpoint in self.ended:
                raise Violation(f"{kind} of {checkpoint}, which is {self.ended.get(checkpoint, 'live')}")
            if kind == "COMMIT":
                self.committed(checkpoint, body)
            else:
                self.ended[checkpoint] = "aborted"

    def ask(self, raw: bytes, actor: Actor) -> None:
        """A writer is about to put a record; what is put again was decided before."""
        record = json.loads(raw)
        if record["type"] == "PLAN" and record["id"] not in self.asked:
            own = {str(source) for _, source in actor.sources}
            if (gone := own & set(record["body"]["retire"])) and "reason" not in record["body"]:
                raise Violation(f"{actor.name} retires {', '.join(gone)}, which its own increments are built on")
        self.asked.add(record["id"])

    def committed(self, checkpoint: CheckpointId, body: dict[str, Any]) -> None:
        if [rank for rank, _ in body["manifests"]] != list(range(body["world"])):
            raise Violation(f"{checkpoint} was committed without the parts of all ranks")
        self.live[checkpoint] = body
        index = index_key(checkpoint)
        self.files[checkpoint] = {index: self.must_be(index, checkpoint, body["index"])}
        for rank, digest in body["manifests"]:
            key = manifest_key(checkpoint, rank)
            part = json.loads(self.must_be(key, checkpoint, digest))
            rows = Table.from_bytes(base64.b64decode(part["table"]), key)
            for name in (key, *(file["key"] for file in part["files"]), *rows.files):
                self.files[checkpoint][name] = self.must_be(name, checkpoint)
                if name in self.doomed:
                    raise Violation(f"{checkpoint} is live, and {name} was up for deletion before")
            if self.read(rows) != self.sim.staged(checkpoint, layout_of(rank, body["world"])):
                raise Violation(f"{checkpoint} was committed with other bytes than rank {rank} saved")
        self.increments += "needs" in body
        for name in self.files[checkpoint]:
            if owner(name) != checkpoint and name not in self.needed:
                raise Violation(f"{checkpoint} is live, and {name} was in use by no other")
        for name in self.files[checkpoint]:
            self.needed.setdefault(name, set()).add(checkpoint)

    def read(self, rows: Table) -> bytes:
        """Read all bytes that a table names."""
        places = zip(rows.file.tolist(), rows.offset.tolist(), rows.length.tolist(), strict=True)
        return b"".join(self.sim.objects[rows.files[file]][at : at + length] for file, at, length in places)

    def must_be(self, key: str, checkpoint: CheckpointId, digest: str = "") -> bytes:
        raw = self.sim.objects.get(key)
        if raw is None:
            raise Violation(f"{checkpoint} is live, and {key} is not there")
        if digest and hashlib.sha256(raw).hexdigest() != digest:
            raise Violation(f"{checkpoint} is live, and {key} is not what it was")
        return raw

    def plan(self, body: dict[str, Any]) -> None:
        history = self.history()
        newest, full = history[:1], [a for a in history if not self.live[a].get("needs")][:2]
        for checkpoint in map(CheckpointId.parse, body["retire"]):
            if checkpoint not in self.live:
                raise Violation(f"PLAN retires {checkpoint}, which is {self.ended.get(checkpoint, 'open')}")
            if checkpoint in newest and "reason" not in body:
                raise Violation(f"PLAN retires the newest checkpoint, {checkpoint}")
            if checkpoint in full and "reason" not in body:
                raise Violation(f"PLAN retires {checkpoint}, one of the newest two full ones")
            del self.live[checkpoint]
            self.ended[checkpoint] = "retired"
            for key in self.files.pop(checkpoint):
                self.needed[key].discard(checkpoint)
                if not self.needed[key]:
                    del self.needed[key]
        for key in body["delete"]:
            of = owner(key)
            if key in self.needed:
                raise Violation(f"PLAN deletes {key}, and {named(self.needed[key])} is live")
            if of is not None and of not in self.live and of not in self.ended:
                raise Violation(f"PLAN deletes {key} of an attempt that is open")
        self.doomed.update(body["delete"])

    def history(self) -> list[CheckpointId]:
        return run_log.in_history(self.acquires, self.live)

    def acknowledge(self, checkpoint: CheckpointId) -> None:
        """Record that a checkpoint was acknowledged as durable."""
        if checkpoint not in self.live and self.ended.get(checkpoint) != "retired":
            raise Violation(f"{checkpoint} was acknowledged, and is {self.ended.get(checkpoint, 'open')}")
        self.acknowledged.add(checkpoint)

    def fail(self, checkpoint: CheckpointId) -> None:
        """Record that a save was reported as failed."""
        if checkpoint in self.live or checkpoint not in self.ended:
            state = "live" if checkpoint in self.live else "open"
            raise Violation(f"{checkpoint} was reported as failed, and is {state}")

    def agrees(self, log: RunLog) -> None:
        """Check that the library's state of the whole log equals the records."""
        state = log.state
        if state.damaged:
            raise Violation(f"the log was called damaged: {state.damaged}")
        if state.next_seq != len(self.records):
            raise Violation(f"{state.next_seq} records were read of {len(self.records)}")
        if [(a.term, a.nonce, a.restored) for a in state.acquires] != [
            (a.term, a.nonce, a.restored) for a in self.acquires
        ]:
            raise Violation(f"the log says {state.acquires}, and they were {self.acquires}")
        if state.commits.keys() != self.live.keys():
            raise Violation(f"the log says that {set(state.commits)} are live, and it is {set(self.live)}")
        for checkpoint, how in self.ended.items():
            if checkpoint not in (state.aborted if how == "aborted" else state.retired):
                raise Violation(f"{checkpoint} was {how}, and the log does not say so")
        lost = self.acknowledged - state.commits.keys() - state.retired
        if lost:
            raise Violation(f"{lost} were acknowledged, and are gone")


def named(checkpoints: set[CheckpointId]) -> str:
    return " and ".join(map(str, sorted(checkpoints)))


# -- what actors do: around the library as `ckpt.core.writer.saver` does it --


@functools.cache
def layout_of(rank: int, world: int) -> Layout:
    """Return the layout that one rank stages of replicated tensors."""
    whole, at = ((world * ROWS,), (rank * ROWS,)) if world > 1 else (None, ())
    names = sorted((*FROZEN, "w"))
    pieces = tuple(TensorSpec(name, "F32", (ROWS,), whole=whole, offsets=at) for name in names)
    return Layout(pieces, {}, [{"path": [], "kind": "x", "facts": {}, "names": names}], rank, world)


def rows_of(table: Table) -> dict[str, int]:
    """Each tensor is one chunk."""
    return {shard.name: row for row, shard in enumerate(table.shards)}


def takes(base: WrittenManifest, same: Sequence[str]) -> dict[str, str]:
    """Return the data files of these tensors in an older manifest."""
    rows = rows_of(base.table)
    return {name: base.table.files[int(base.table.file[rows[name]])] for name in same}


async def write_increment(
    store: Any, snapshot: RankSnapshot, base: WrittenManifest, same: Sequence[str], *, number: int = 0
) -> WrittenManifest:
    """Like `write_part`, but tensors that are the `same` as in an older manifest refer to its data files."""
    layout, checkpoint = snapshot.layout, snapshot.checkpoint
    rank, taken, rows = layout.rank, takes(base, same), rows_of(base.table)
    own = [i for i, piece in enumerate(layout.tensors) if piece.name not in taken]
    data = b"".join(snapshot.data[4 * ROWS * i : 4 * ROWS * (i + 1)] for i in own)
    key = data_key(checkpoint, rank, number + 1)
    header = Layout(tuple(layout.tensors[i] for i in own), {}, []).arrangement.header(metadata_of(key))
    files = [key, *sorted(set(taken.values()))]
    whole = write.build_table(layout, key, write.digest_chunks(layout, snapshot.data))
    places = {layout.tensors[i].name: (0, len(header) + 4 * ROWS * n) for n, i in enumerate(own)}
    places |= {name: (files.index(file), int(base.table.offset[rows[name]])) for name, file in taken.items()}
    file, offset = zip(*(places[shard.name] for shard in whole.shards), strict=True)
    table = replace(whole, file=np.array(file), offset=np.array(offset), files=tuple(files))
    upload = await store.upload(key, size=len(header) + len(data))
    await upload.write_at(0, memoryview(header + data))
    await upload.finish()
    known = {info.key: info for info in base.manifest.files}
    known[key] = DataFile(key, len(header) + len(data), len(header), file_digest(header))
    named, previous = [known[one] for one in files], base
    return await write.finish_manifest(store, snapshot, table, named, reason="due", base=previous)


def kept_same(sim: Sim, snapshot: RankSnapshot, base: WrittenManifest) -> list[str]:
    """The frozen tensors that have not changed since an older part."""
    now = sim.origins.get((snapshot.checkpoint, snapshot.layout.rank), {})
    then = sim.origins.get((CheckpointId.parse(base.manifest.checkpoint), base.manifest.rank), {})
    return [name for name in FROZEN if name in now and now[name] == then.get(name)]


@dataclass
class Job:
    """Ranks that save together. `mine`: the job attempt, which rank 0 creates and passes to the others."""

    sim: Sim
    name: str
    world: int
    steps: int
    back: bool  # goes back to an older checkpoint, rather than on from the newest
    mine: asyncio.Future[tuple[Acquire, int]]
    nonce: str
    actors: list[Actor] = field(default_factory=list)


async def until(sim: Sim, records: int) -> None:
    """Until so much has happened, or for a while."""
    if len(sim.oracle.records) < records:
        reached = sim.loop.create_future()
        sim.oracle.awaited.append((records, reached))
        await asyncio.wait([reached], timeout=2.0 * records)


async def insist(work: Callable[[], Coroutine[Any, Any, Any]], times: int = 4) -> Any:
    """Retry while it is useful."""
    for _ in range(times - 1):
        try:
            return await work()
        except StoreError as error:
            if not error.retryable and not isinstance(error, OutcomeUnknownError):
                raise
            await asyncio.sleep(0.1)
    return await work()


class Rank:
    """One rank's writer: a part of each step, then the checkpoint, by whoever is first; and old ones go."""

    def __init__(self, job: Job, actor: Actor, rank: int) -> None:
        self.job, self.actor, self.rank = job, actor, rank
        self.sim, self.world = job.sim, job.world
        self.log = RunLog(job.sim.store(actor))
        self.layout = layout_of(rank, job.world)
        self.stored: list[WrittenManifest] = []  # what increments may be taken against, whatever has become of it
        self.newest: CheckpointId | None = None  # what memory holds
        self.sweeping: asyncio.Task[Any] | None = None
        self.trimmer = Trimmer()

    @property
    def mine(self) -> Acquire:
        assert self.actor.mine is not None
        return self.actor.mine

    async def run(self, begin: int) -> None:
        await until(self.sim, begin)
        if self.rank == 0:
            try:
                await self.open()
            finally:
                if not self.job.mine.done():
                    self.job.mine.cancel()
        self.actor.mine, step = await asyncio.shield(self.job.mine)
        await insist(self.log.open if self.rank else self.log.refresh)
        if self.rank == 0:
            await insist(lambda: commits.recover(self.log, self.mine))
        await self.remember()
        tasks = []
        for number in range(1, self.job.steps + 1):
            checkpoint = CheckpointId(self.mine.term, step + number, self.mine.nonce)
            written = await self.write(checkpoint)
            if written is not None:
                tasks.append(self.sim.start(self.actor, self.settle(checkpoint, written)))
                if self.sim.dice.random() < 0.5:
                    await asyncio.wait(tasks[-1:])
        for task in tasks:
            await task
        if self.sweeping is not None:
            await self.sweeping

    async def open(self) -> None:
        await insist(lambda: commits.create_run(self.log.store))
        await insist(self.log.open)
        back = self.log.state.lineage()[1:3] if self.job.back else []
        restored = back[-1].checkpoint if back else None
        mine = await insist(lambda: commits.acquire(self.log, self.job.nonce, restored=restored))
        history = self.log.state.lineage()
        self.job.mine.set_result((mine, history[0].step if history else 0))

    async def remember(self) -> None:
        """Remember this rank's manifest of a checkpoint in the history, if it has one."""
        for found in self.log.state.lineage()[:2]:
            if self.rank < found.world and self.sim.dice.random() < 0.7:
                rank, digest = found.manifests[self.rank]
                with contextlib.suppress(StoreError, CorruptError):
                    part = await commits.load_manifest(self.log.store, found.checkpoint, rank, expected=digest)
                    self.stored.append(part)
                    self.newest = self.newest or found.checkpoint

    def stage(self, checkpoint: CheckpointId) -> RankSnapshot:
        """Frozen tensors change now and then; when it is tried again nothing does."""
        key, dice = (checkpoint, self.rank), self.sim.dice
        if key not in self.sim.origins:
            before = self.sim.origins.get((self.newest, self.rank), {}) if self.newest is not None else {}
            same = {name: before[name] for name in FROZEN if name in before and dice.random() < 0.85}
            self.sim.origins[key] = dict.fromkeys(FROZEN, checkpoint) | same
            self.newest = checkpoint
        return RankSnapshot(checkpoint, self.layout, memoryview(self.sim.staged(checkpoint, self.layout)), [None])

    async def write(self, checkpoint: CheckpointId, number: int = 0) -> WrittenManifest | None:
        """Write and commit. A single rank retries with data files of higher numbers. With others it aborts the
        checkpoint."""
        try:
            self.log.check_owner(self.mine)
            snapshot = self.stage(checkpoint)
            written = await self.write_less(snapshot, number)
            if written is None:
                written = await write_part(self.log.store, snapshot, numbers=itertools.count(number))
            self.stored.append(written)
            return written
        except StoreError:
            if self.world == 1 and number < 2:
                return await self.write(checkpoint, number + 1)
            if self.world > 1:
                await self.give_up(checkpoint)
            self.landed(checkpoint)
            return None

    async def write_less(self, snapshot: RankSnapshot, number: int) -> WrittenManifest | None:
        """An increment, if it can be one. Whether its base is still there is seen in the end."""
        dice, state = self.sim.dice, self.log.state
        older = [
            (CheckpointId.parse(w.manifest.checkpoint), w) for w in self.stored if kept_same(self.sim, snapshot, w)
        ]
        bases = [(of, w) for of, w in older if of < snapshot.checkpoint and commits.vouches(state, w)][-4:]
        if not bases or dice.random() < 0.15:
            return None
        of, base = dice.choice(bases)
        self.actor.sources.add((snapshot.checkpoint, of))
        return await write_increment(self.log.store, snapshot, base, kept_same(self.sim, snapshot, base), number=number)

    async def settle(self, checkpoint: CheckpointId, written: WrittenManifest) -> None:
        role = Role(tuple(range(self.world)), self.rank, self.world)
        try:
            await settling.settle(self.log, lambda: self.mine, written, role, deadline_s=2.0)
            self.sim.oracle.acknowledge(checkpoint)
        except FencedError:
            raise
        except SaveError:
            self.sim.oracle.fail(checkpoint)
            await self.give_up(checkpoint, written)
        except StoreError:
            await self.unsure(checkpoint, written)
        self.landed(checkpoint)
        if self.rank == 0 and (self.sweeping is None or self.sweeping.done()):
            work = tidy(self.log, self.mine, Keep(last=1), self.trimmer, self.actor)
            self.sweeping = self.sim.start(self.actor, work)

    def landed(self, checkpoint: CheckpointId) -> None:
        """The checkpoint is no longer in flight."""
        self.actor.sources = {(one, source) for one, source in self.actor.sources if one != checkpoint}

    async def unsure(self, checkpoint: CheckpointId, written: WrittenManifest) -> None:
        """The store failed, so the outcome is unknown. With others the checkpoint is aborted; a single rank may save it
        again."""
        if self.world > 1:
            await self.give_up(checkpoint, written)
        elif self.sim.dice.random() < 0.7:
            again = await self.write(checkpoint, 2)
            if again is not None:
                await self.settle(checkpoint, again)

    async def give_up(self, checkpoint: CheckpointId, written: WrittenManifest | None = None) -> None:
        """Abort a checkpoint so that the other ranks need not wait, and delete this rank's files of it."""
        with contextlib.suppress(StoreError):
            await commits.abort(self.log, self.mine, checkpoint, "given up")
            if checkpoint in self.log.state.commits:
                self.sim.oracle.acknowledge(checkpoint)
            if checkpoint in self.log.state.aborted:
                self.sim.oracle.fail(checkpoint)
                for key in [] if written is None else given_up(checkpoint, written):
                    await self.log.store.delete(key)


def given_up(checkpoint: CheckpointId, written: WrittenManifest) -> list[str]:
    """The files that go with an attempt that was aborted: not those that it only refers to."""
    files = [file.key for file in written.manifest.files if owner(file.key) == checkpoint]
    return [manifest_key(checkpoint, written.manifest.rank), *files]


async def tidy(log: RunLog, mine: Acquire | None, keep: Keep, trimmer: Trimmer, actor: Actor) -> None:
    """Retention as the writer runs it: read the newest back, then let older ones go, except for the sources of its own
    increments; and the log stays small."""

    def pinned(state: records.RunState) -> set[CheckpointId]:
        return {source for _, source in actor.sources}

    await trimmer.step(log, mine)
    if log.state.damaged:
        raise Violation(f"records were called damaged: {log.state.damaged}")
    with contextlib.suppress(StoreError):
        history = log.state.lineage()
        if history and not await read.verify(log.store, history[0]):
            await retention.retire(log, mine, keep, {history[0].checkpoint}, pinned=pinned)


async def cleaner(sim: Sim, actor: Actor, begin: int) -> None:
    """A process that only cleans up, for the present job attempt or for none. Without one, no job fences it."""
    await until(sim, begin)
    actor.fenced = sim.dice.random() < 0.5
    log = RunLog(sim.store(actor))
    await insist(log.open)
    trimmer = Trimmer()
    for _ in range(sim.dice.randint(1, 3)):
        await insist(log.refresh)
        if log.state.acquires:
            actor.mine = log.state.acquires[-1] if actor.fenced else None
            try:
                await tidy(log, actor.mine, Keep(last=sim.dice.randint(1, 3)), trimmer, actor)
            except FencedError:
                continue
        await asyncio.sleep(sim.dice.random())


async def shell(sim: Sim, actor: Actor, begin: int) -> None:
    """`ckpt gc` and `ckpt prune`: by hand, while others are at work."""
    await until(sim, begin)
    actor.fenced, dice = False, sim.dice
    log = RunLog(sim.store(actor))
    await insist(log.open)
    for _ in range(dice.randint(1, 2)):
        stock = await prune.take_stock(log)
        if dice.random() < 0.5:
            plan = prune.plan_gc(log.store.url, log.state, stock, [], dice.random() < 0.5)
            landed, _ = await prune.gc(log, stock, plan.ending)
        else:
            checked = read.choose(log)
            if await read.verify(log.store, checked):
                continue
            prune.plan_prune(log, stock, Keep(last=1))
            landed = await prune.prune(log, stock, Keep(last=1), checked.checkpoint)
        await prune.delete(log.store, [(key, 0) for key in landed.delete], grace_s=dice.choice((0.0, 1.0)))


async def talker(sim: Sim, actor: Actor, begin: int) -> None:
    """Appends many records without a job attempt, so that the log becomes long and is trimmed during other actors'
    reads."""
    await until(sim, begin)
    actor.fenced, dice = False, sim.dice
    log = RunLog(sim.store(actor))
    await insist(log.open)
    trimmer = Trimmer()
    for _ in range(dice.randint(20, 40) if sim.long else dice.randint(4, 12)):
        text = f"said {dice.getrandbits(60)}"
        some = CheckpointId(1, 1, "0" * 8)
        with contextlib.suppress(StoreError):
            await log.append(lambda _, text=text, some=some: idle(some, text), owner=None)
        await trimmer.step(log, None)
        await asyncio.sleep(dice.choice((0.0, 0.0, 0.3)))


def idle(checkpoint: CheckpointId, request: str) -> records.Record:
    """Return a record that changes nothing."""
    return records.Record("KEEP", {"checkpoint": str(checkpoint), "note": "", "keep": False}, request)


async def taker_back(sim: Sim, actor: Actor, begin: int) -> None:
    """Retracts a new checkpoint for the present job attempt, because it is damaged."""
    await until(sim, begin)
    log = RunLog(sim.store(actor))
    await insist(log.open)
    history = log.state.lineage()
    if history:
        actor.mine = mine = log.state.acquires[-1]
        wrong = sim.dice.choice(history[:3]).checkpoint
        await insist(lambda: commits.retract(log, mine, wrong, "of no one moment"))


async def reader(sim: Sim, actor: Actor, begin: int) -> None:
    """Restores: bit-exactly a checkpoint, not older than the newest that was acknowledged when it began."""
    await until(sim, begin)
    for _ in range(3):
        acknowledged = set(sim.oracle.acknowledged)
        log = await insist(lambda: read.open_run("", sim.store(actor)))
        if log.state.damaged:
            raise Violation(f"a reader called records damaged: {log.state.damaged}")
        known = run_log.in_history(log.state.acquires, acknowledged - log.state.retired)
        try:
            chosen = read.choose(log)
        except NoCheckpointError:
            if known:
                raise Violation(f"{known[0]} was acknowledged, and a reader found nothing") from None
            return
        if known and (known[0].term, known[0].step) > (chosen.checkpoint.term, chosen.step):
            raise Violation(f"{known[0]} was acknowledged, and a reader found {chosen.checkpoint}")
        try:
            await restore(sim, log, chosen.checkpoint)
            sim.say(actor.name, "restored", str(chosen.checkpoint))
            return
        except (NotFoundError, CorruptError) as error:  # a table is made up for by another, which is gone as well
            if chosen.checkpoint in sim.oracle.live:
                raise Violation(f"{chosen.checkpoint} is live, and a reader found that {error}") from error
        except StoreError:
            continue


async def restore(sim: Sim, log: RunLog, checkpoint: CheckpointId) -> None:
    manifest = await read.load_all(log.store, log.state.commits[checkpoint])
    found: dict[int, bytes] = {}
    reads = read.plan_reads(manifest.table, range(len(manifest.table.length)))
    await read.fetch(log.store, manifest.table, reads, lambda chunk, data: found.__setitem__(chunk, bytes(data)))
    world = len(manifest.manifests)
    wanted = b"".join(sim.staged(checkpoint, layout_of(rank, world)) for rank in range(world))
    if b"".join(found[chunk] for chunk in sorted(found)) != wanted:
        raise Violation(f"a reader got other bytes than {checkpoint} saved")


# -- a schedule --


async def _everybody(sim: Sim) -> None:
    dice = sim.dice
    if dice.random() < 0.7:
        sim.objects["FORMAT.json"] = new_format()
    tasks: list[asyncio.Task[Any]] = []
    for name in "ABC"[: dice.choice((1, 2, 2, 2, 3))]:
        world = dice.choice((1, 1, 2, 2, 2, 3))
        job = Job(
            sim, name, world, dice.randint(1, 4), dice.random() < 0.3, sim.loop.create_future(),
            f"{dice.getrandbits(32):08x}",
        )  # fmt: skip
        begin = 0 if name == "A" else dice.randint(0, 8)
        job.actors = [sim.actor(f"{name}{rank}" if world > 1 else name, job) for rank in range(world)]
        for rank, actor in enumerate(job.actors):
            tasks.append(sim.start(actor, Rank(job, actor, rank).run(begin)))
    others: list[tuple[str, float, Any]] = [
        ("cleaner", 0.6, cleaner), ("cleaner 2", 0.3, cleaner), ("shell", 0.3, shell), ("reader", 0.4, reader),
        ("talker", 0.4, talker),
        ("taker back", 0.2, taker_back),
    ]  # fmt: skip
    for name, chance, work in others:
        if dice.random() < chance or (name == "talker" and sim.long):
            actor = sim.actor(name)
            tasks.append(sim.start(actor, work(sim, actor, dice.randint(2, 12))))
    await _all_end(sim, tasks)


async def _all_end(sim: Sim, tasks: list[asyncio.Task[Any]]) -> None:
    """Errors of the library end a process as they would; anything else is an error of its own."""
    while tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks = [task for task in tasks if task not in done]
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                who = next(actor.name for actor in sim.actors if task in actor.tasks)
                sim.say(who, "ends", f"{type(error).__name__}: {error}"[:100])
                if not isinstance(error, CheckpointError):
                    raise error
    for task in itertools.chain.from_iterable(actor.tasks for actor in sim.actors):
        if task.done() and not task.cancelled() and isinstance(error := task.exception(), Violation):
            raise error


async def _afterwards(sim: Sim) -> None:
    """After all actors have ended: the next one must find an intact run, end unfinished checkpoints, and save."""
    sim.lose = sim.kill = sim.conflict = sim.doubled = sim.suspend = 0.0
    sim.untidy = False
    sim.turns = 0
    sim.stop()
    actor = sim.actor("last")
    store = sim.store(actor)
    task = sim.start(actor, _finish(sim, actor, store))
    await task


async def _finish(sim: Sim, actor: Actor, store: Any) -> None:
    oracle = sim.oracle
    await commits.create_run(store)
    log = RunLog(store)
    await log.open()
    actor.mine = mine = await commits.acquire(log, "ffffffff")
    left = {of for key in sim.objects if (of := owner(key)) is not None}
    await commits.recover(log, mine)
    if open_ones := {str(a) for a in left if a not in oracle.live and a not in oracle.ended}:
        raise Violation(f"recovery left {open_ones} open")
    written: WrittenManifest | None = None
    for step in (10**6, 10**6 + 1, 10**6 + 2):  # a full one, and increments
        checkpoint, layout = CheckpointId(mine.term, step, mine.nonce), layout_of(0, 1)
        sim.origins[checkpoint, 0] = dict.fromkeys(FROZEN, CheckpointId(mine.term, 10**6, mine.nonce))
        snapshot = RankSnapshot(checkpoint, layout, memoryview(sim.staged(checkpoint, layout)), [None])
        if written is None:
            written = await write_part(store, snapshot)
        else:
            written = await write_increment(store, snapshot, written, FROZEN)
        await settling.settle(log, lambda: mine, written, Role(), deadline_s=2.0)
        oracle.acknowledge(checkpoint)
    await retention.retire(log, mine, Keep(last=1), {checkpoint})
    while sim.late:
        sim.land_late()
    await commits.recover(log, mine)
    await retention.retire(log, mine, Keep(last=1), {checkpoint})
    if left_over := {key for key in sim.objects if owner(key) is not None} - oracle.needed.keys():
        raise Violation(f"clean-up left {sorted(left_over)}, which nothing needs")
    trimmer = Trimmer()
    await trimmer.step(log, mine)
    await asyncio.sleep(2 * run_log.GRACE_S)
    await trimmer.step(log, mine)
    left = [int(key[4:16]) for key in sim.objects if key.startswith("log/0")]
    if min(left) != oracle.floor or len(left) > 2 * SNAPSHOT_EVERY:
        raise Violation(f"trimming left {sorted(left)}, and the floor is {oracle.floor}")
    fresh, whole = RunLog(store), RunLog(store, whole=True)
    for one in (fresh, whole):
        await one.open()
    for one in (log, fresh, whole):
        await one.refresh()
        oracle.agrees(one)
    for live in oracle.live:
        await restore(sim, fresh, live)


def schedule(seed: int) -> Failure | None:
    """Run one; None if nothing was broken."""
    return play(Sim(seed))


def play(sim: Sim) -> Failure | None:
    """The same, of a `Sim` that can be looked into afterwards."""
    with virtual(sim.loop, sim.dice):
        try:
            sim.loop.run_until_complete(_everybody(sim))
            sim.loop.run_until_complete(_afterwards(sim))
            return None
        except Violation as error:
            return Failure(sim.seed, str(error), sim.told())
        finally:
            _end(sim)


def _end(sim: Sim) -> None:
    """No task, and no coroutine in the middle of something, outlives its schedule."""
    sim.over = True
    sim.stop()
    while tasks := asyncio.all_tasks(sim.loop):
        for task in tasks:
            task.cancel()
        sim.loop._idle = lambda timeout: None  # all waiting tasks were cancelled
        sim.loop.run_until_complete(asyncio.wait(tasks))
        for task in tasks:
            if not task.cancelled():
                task.exception()
    sim.loop.close()
