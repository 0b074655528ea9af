"""The ranks of a training job, and how they agree without collectives.

They use the key-value store of torch's launchers (TCPStore, HashStore, FileStore), when a run is opened, restored and
closed, never while a step is saved. First they meet. After that, each agreement is a turn: every rank posts what it
has, rank 0 collects, decides and posts the verdict. Keys:

    everystep/worlds/<rank>     a token of the process that wants to meet the others as this rank
    everystep/answers/<token>   the name <n> of the meeting, from rank 0
    everystep/<n>/here/<rank>, everystep/<n>/nodes    each rank's node, and the nodes of all
    everystep/<n>/<turn>/<rank>, everystep/<n>/<turn>/verdict, everystep/<n>/mail/<key>, everystep/<n>/farewell/<rank>
    everystep/<n>/orders/<generation>/<number>      see `ckpt.core.ranks.orders`
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ckpt import errors
from ckpt.core.ipc import channel
from ckpt.core.ranks.board import ANSWER_S, PAUSE_S, Alone, Board, Json, pack, unpack
from ckpt.errors import CheckpointError, DeadlineError, PeerError, TransferError, UsageError, from_wire, to_wire
from ckpt.events import log as logger

Decide = Callable[[list[Json]], Json]
T = TypeVar("T")

GRACE_S = 15.0  # the others wait longer than rank 0 by this, because it may come later than they do
LEFT = "left"  # topic of a rank that comes to no further turn
KEPT_MAIL = 64  # messages of a rank that stay in the store
SHOWN = 8  # names in a message; of the rest, the count


class World:
    """The ranks of a job. Calls may come from one thread at a time; a background thread takes a `mailbox`.

    `rank` of `size`; `job`: identifies this start of the job; `nodes`: the node index of every rank; `node`: this
    rank's; `local_rank`: its place among the `local_size` ranks of its node, in rank order. Nodes are numbered in the
    order of their lowest ranks.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, store: Any = None, *, node: str = "", timeout_s: float = 300.0
    ) -> None:
        """`node`: any string, equal for the ranks that share memory. With more than one rank, all of them meet here."""
        if not 0 <= rank < size or (size > 1 and store is None):
            raise UsageError(f"rank {rank} of {size} with store {store!r}: a rank is below the size, and several meet")
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store = Alone() if size == 1 else store  # kept: a TCPStore lives as long as its object
        self._board = Board(self._store).another()
        self._turn = 0
        self._done: list[str] = []  # keys that nobody needs any more
        self._stale: list[str] = []  # keys that nobody needs once all have come to the next turn
        self.job, nodes = self._meet(node)  # `job` is new for each start of the job
        self.prefix = f"everystep/{self.job}/"  # of all keys
        self.nodes: tuple[int, ...] = tuple(nodes)
        self.node = self.nodes[rank]
        self.local_rank, self.local_size = self.nodes[:rank].count(self.node), self.nodes.count(self.node)

    def _meet(self, node: str) -> tuple[str, list[int]]:
        """Return the name of this meeting, which rank 0 gives to the processes that are there now, and their nodes.

        A launcher may keep its store over restarts (torchrun does), with the posts of dead processes. So a rank
        believes only an answer to its own token, and rank 0 answers until every rank has acknowledged.
        """
        board, token = self._board, secrets.token_hex(8)
        if self.rank:
            board.put(f"everystep/worlds/{self.rank}", pack(token))
            name = str(self._answer(f"everystep/answers/{token}"))
            board.put(f"everystep/{name}/here/{self.rank}", pack(node))
            return name, list(self._answer(f"everystep/{name}/nodes"))
        answered: dict[int, str] = {}
        here = [f"everystep/{token}/here/{rank}" for rank in range(1, self.size)]
        end, pause = time.monotonic() + self.timeout_s, 0.001
        while here and not board.has(here):
            for rank in range(1, self.size):
                key = f"everystep/worlds/{rank}"
                found = str(board.get([key])[0]) if board.has([key]) else ""
                if found and answered.get(rank) != found:
                    board.put(f"everystep/answers/{found}", pack(token))
                    answered[rank] = found
            if time.monotonic() > end:
                absent = [rank for rank, key in enumerate(here, 1) if not board.has([key])]
                raise DeadlineError(f"meet: rank {_some(absent)} did not come within {self.timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.2, PAUSE_S)
        nodes = _numbered([node, *map(str, board.get(here))])
        if self.size > 1:
            board.put(f"everystep/{token}/nodes", pack(nodes))
            self._stale.append(f"everystep/{token}/nodes")
        board.drop([*here, *(f"everystep/answers/{found}" for found in answered.values())])
        return token, nodes

    def _answer(self, key: str) -> Json:
        """Wait for what rank 0 posts while the ranks meet."""
        if self._board.missing([key], self.timeout_s + GRACE_S):
            raise DeadlineError(f"meet: rank 0 did not answer within {self.timeout_s + GRACE_S:g} s")
        return self._board.get([key])[0]

    @classmethod
    def detect(cls, node: str, *, timeout_s: float = 300.0) -> World:
        """The ranks of torch's default process group, else this process alone.

        UsageError in a process of several, as WORLD_SIZE says, that has made no process group.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            hint_at_restarts()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            store = dist.distributed_c10d._get_default_store()
            return cls(dist.get_rank(), dist.get_world_size(), store, node=node, timeout_s=timeout_s)
        size = os.environ.get("WORLD_SIZE", "")
        if size.isdecimal() and int(size) > 1 and not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                f"WORLD_SIZE={size}, but this process has not met the others: "
                "call torch.distributed.init_process_group() before making a Checkpointer"
            )
        return cls(node=node, timeout_s=timeout_s)

    def agree(
        self,
        topic: str,
        mine: Json,
        decide: Decide | None = None,
        *,
        timeout_s: float | None = None,
        dead: Callable[[], Mapping[int, str]] = dict,
    ) -> Json:
        """Post `mine` and return what `decide` makes of the values of all ranks, in rank order.

        All ranks make the same calls in the same order. `decide` runs on rank 0, once all have posted; the others wait
        for it, so that rank 0 can also act for all. Without it, all get the list. An error of `decide` is raised on all
        ranks: with its class if it is one of ours, else as PeerError. For work that may fail, see `together`.
        `timeout_s`: for all ranks to come, from when rank 0 comes. `dead`: returns the ranks that will not come, and
        why.

        Raises DeadlineError naming the ranks that did not come, or because rank 0 did not answer; PeerError if the
        ranks make different calls, a rank has left or died, or the store cannot be reached; UsageError if a value is
        not JSON or is too large.
        """
        decide, timeout_s = decide or list, self.timeout_s if timeout_s is None else timeout_s
        if self.size == 1:
            return decide([mine])
        turn, self._turn = f"{self.prefix}{self._turn}/", self._turn + 1
        try:
            post = pack({"topic": topic, "value": mine})
        except UsageError as error:
            with contextlib.suppress(CheckpointError):
                self._take_turn(turn, topic, pack({"topic": topic, "error": _wire(error)}), decide, timeout_s, dead)
            raise
        return self._take_turn(turn, topic, post, decide, timeout_s, dead)

    def leave(self, why: str, timeout_s: float = 5.0) -> None:
        """Have the next turn fail at once on all ranks, because this one will not come. Never raises."""
        if self.size == 1:
            return
        self._board.answer_s = min(self._board.answer_s, timeout_s)
        post = pack({"topic": LEFT, "error": _wire(PeerError(f"rank {self.rank} {why}"))})
        with contextlib.suppress(Exception):
            for key in (str(self.rank) if self.rank else "verdict", LEFT):
                self._board.put(f"{self.prefix}{self._turn}/{key}", post)

    def connect(self) -> Board:
        """Return a new connection for a background thread. PeerError if the store does not answer."""
        return Board(self._store).another()

    def mailbox(self) -> Mailbox:
        """For a background thread: messages to other ranks, over a connection of its own."""
        return Mailbox(self.connect(), f"{self.prefix}mail/")

    def farewell(self, timeout_s: float = 10.0) -> None:
        """Every rank's last call. Rank 0, which often hosts the store, waits here for the others. Never raises."""
        self._board.answer_s = min(ANSWER_S, timeout_s)
        with contextlib.suppress(Exception):
            keys = [f"{self.prefix}farewell/{rank}" for rank in range(1, self.size)]
            if self.rank:
                self._board.put(keys[self.rank - 1], pack(None))
                self._board.has(keys[:1])  # its answer says that the word has arrived
            elif not self._board.missing(keys, timeout_s):
                self._board.drop([*self._done, *self._stale, *keys])

    def _take_turn(
        self,
        turn: str,
        topic: str,
        post: bytes,
        decide: Decide,
        timeout_s: float,
        dead: Callable[[], Mapping[int, str]],
    ) -> Json:
        if self.rank == 0:
            return self._lead(turn, topic, post, decide, timeout_s, dead)
        self._board.put(f"{turn}{self.rank}", post)
        if self._board.missing([f"{turn}verdict"], timeout_s + GRACE_S, lambda _: 0 in dead()):
            if 0 in (known := dead()):
                raise PeerError(f"{topic}: rank 0 does not come any more: {known[0]}")
            raise DeadlineError(f"{topic}: rank 0 did not answer within {timeout_s + GRACE_S:g} s")
        verdict = _message(self._board.get([f"{turn}verdict"])[0], "rank 0")
        if "error" in verdict:
            raise from_wire(verdict["error"])
        return verdict["value"]

    def _lead(
        self,
        turn: str,
        topic: str,
        post: bytes,
        decide: Decide,
        timeout_s: float,
        dead: Callable[[], Mapping[int, str]],
    ) -> Json:
        told = ""
        try:
            values = self._collect(turn, topic, post, timeout_s, dead)
            told = "rank 0: "
            verdict = pack({"value": decide(values)})
        except Exception as error:
            self._board.put(f"{turn}verdict", pack({"error": _wire(error, told)}))
            raise
        self._board.put(f"{turn}verdict", verdict)
        self._board.drop(self._done)
        self._done = []
        return unpack(verdict)["value"]  # as the others get it: JSON makes lists of tuples

    def _collect(
        self, turn: str, topic: str, post: bytes, timeout_s: float, dead: Callable[[], Mapping[int, str]]
    ) -> list[Json]:
        keys = {rank: f"{turn}{rank}" for rank in range(1, self.size)}
        left: dict[str, str] = {}

        def in_vain(board: Board) -> bool:
            """Return True if a rank has left or died."""
            left.update((keys[rank], why) for rank, why in dead().items() if rank and not board.has([keys[rank]]))
            return bool(left) or board.has([f"{turn}{LEFT}"])

        missing = self._board.missing(list(keys.values()), timeout_s, in_vain)
        if missing and self._board.has([f"{turn}{LEFT}"]):
            raise PeerError(f"{topic}: {self._board.get([f'{turn}{LEFT}'])[0]['error']['message']}")
        for rank, key in keys.items():
            if key in left and key in missing:
                raise PeerError(f"{topic}: rank {rank} does not come any more: {left[key]}")
        came = [rank for rank, key in keys.items() if key not in missing]
        posts = {0: unpack(post)} | dict(zip(came, self._board.get([keys[rank] for rank in came]), strict=True))
        self._stale += [*keys.values(), f"{turn}verdict"]
        if not missing:  # everybody has come this far, and so is done with all that was posted before
            self._done += self._stale[:-1]  # dropped after the others have their answer
            del self._stale[:-1]
        return _values(topic, posts, [r for r, key in keys.items() if key in missing], timeout_s)


@functools.cache
def hint_at_restarts() -> None:
    """Log once if torchrun restarts ranks with the key-value store of those that died (pytorch#135712)."""
    most, shares = os.environ.get("TORCHELASTIC_MAX_RESTARTS", ""), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    unset = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1" and shares != "False"
    if most.isdecimal() and int(most) > 0 and unset:
        logger.warning(
            "torchrun restarts this job up to %s times, and most restarts fail in torch itself because new ranks read "
            "the addresses of dead ones (pytorch#135712). Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun",
            most,
        )


class Mailbox:
    """Messages between background threads of the ranks. Calls may come from any thread; a wait holds up nobody.

    A key is put once, by one rank, and stays until that rank has put `KEPT_MAIL` more: who waits for it has read it by
    then, and the store does not grow. PeerError when the store cannot be reached.
    """

    def __init__(self, board: Board, prefix: str) -> None:
        self._board, self._prefix = board, prefix
        self._sent: deque[str] = deque()

    def put(self, key: str, value: Json) -> None:
        """UsageError when the value is not JSON or is too large."""
        self._board.put(self._prefix + key, pack(value))
        self._sent.append(self._prefix + key)
        if len(self._sent) > KEPT_MAIL:
            self._board.drop([self._sent.popleft()])

    def wait(self, keys: Sequence[str], timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> list[Json]:
        """The values, once all are there. DeadlineError names those that are not in time, or when it is `stopped`."""
        missing = self._board.missing([self._prefix + key for key in keys], timeout_s, lambda _: stopped())
        if missing:
            names = [key for key in keys if self._prefix + key in missing]
            raise DeadlineError(f"no word from other ranks within {timeout_s:g} s: {_some(names)}")
        return self._board.get([self._prefix + key for key in keys])

    def poll(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return self._board.has([self._prefix + key for key in keys])


def _message(value: Json, who: str) -> dict[str, Any]:
    """A post or a verdict, checked: it has a value or an error."""
    if type(value) is dict and "error" not in value and "value" in value:
        return value
    wire = value.get("error") if type(value) is dict else None
    if type(wire) is not dict or {type(wire.get(key)) for key in ("error", "message")} != {str}:
        raise PeerError(f"{who} posted something that is no message of ours; is its version of this library another?")
    return {"topic": value.get("topic"), "error": wire}


def _wire(error: BaseException, told: str = "") -> dict[str, str]:
    """An error as the other ranks shall raise it, with `told` in front."""
    wire = to_wire(error)
    name = wire["error"] if isinstance(error, CheckpointError) else PeerError.__name__
    return {"error": name, "message": told + wire["message"]}


def _values(topic: str, posts: dict[int, Json], missing: list[int], timeout_s: float) -> list[Json]:
    """What the ranks brought, in rank order, or the error that all of them shall raise."""
    messages = {rank: _message(post, f"rank {rank}") for rank, post in posts.items()}
    for message in messages.values():
        if message.get("topic") == LEFT:
            raise PeerError(f"{topic}: {message['error']['message']}")
    for rank, message in messages.items():
        if message.get("topic") != topic:
            raise PeerError(
                f"rank 0 came to {topic!r}, rank {rank} to {message.get('topic')!r}: "
                "all ranks must make the same calls in the same order"
            )
    if missing:
        raise DeadlineError(f"{topic}: rank {_some(missing)} did not come within {timeout_s:g} s")
    for rank, message in messages.items():
        if "error" in message:  # it could not say what it has
            raise from_wire({**message["error"], "message": f"rank {rank}: {message['error']['message']}"})
    return [message["value"] for message in messages.values()]


def _some(names: Sequence[object]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more


def _numbered(names: list[str]) -> list[int]:
    """Equal names get equal numbers, counted in the order in which they first come."""
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return [number[name] for name in names]


def together(
    world: World, topic: str, work: Callable[[], Json], decide: Callable[[list[Json]], Json] | None = None
) -> Any:
    """Do some work on every rank, and agree on the results (see `World.agree`).

    If it failed on any rank, raise the same error on all ranks, so that all go on in the same way.
    """
    post: dict[str, Json] = {}
    failure: Exception | None = None
    try:
        post["value"] = work()
    except Exception as error:
        failure, post["error"] = error, to_wire(error)
    verdict = world.agree(topic, post, lambda posts: _verdict(posts, decide))
    if "error" not in verdict:
        return verdict["value"]
    foreign = failure is not None and not isinstance(failure, CheckpointError)
    if failure is not None and (world.size == 1 or (foreign and verdict["rank"] == world.rank)):
        raise failure  # of ours, all raise the same, word for word
    if failure is not None and verdict["rank"] != world.rank:
        logger.warning("%s failed on this rank as well: %r", topic, failure)
    raise from_wire(verdict["error"]) from failure


def made_together(topic: str, make: Callable[[], T]) -> T:
    """What each rank makes of its own. If that failed anywhere, all raise the same error: none waits for that rank."""
    world = World.detect(channel.node_id())
    made: list[T] = []
    try:
        together(world, topic, lambda: made.append(make()))
    finally:
        world.farewell()
    return made[0]


def _verdict(posts: list[Any], decide: Callable[[list[Json]], Json] | None) -> dict[str, Json]:
    """What failed first counts, not what failed since a rank failed."""
    failed = [(rank, post["error"]) for rank, post in enumerate(posts) if "error" in post]
    failed.sort(key=lambda one: (one[1]["error"] == TransferError.__name__, one[0]))
    for rank, error in failed[:1]:
        known = error["error"] in vars(errors)  # somebody else's exception is raised by the rank that met it
        message = f"rank {rank}: {error['message']}" if len(posts) > 1 else error["message"]
        return {"rank": rank, "error": {**error, "message": message, **({} if known else {"error": "PeerError"})}}
    values = [post["value"] for post in posts]
    try:
        return {"value": values if decide is None else decide(values)}
    except CheckpointError as error:
        return {"rank": -1, "error": to_wire(error)}
