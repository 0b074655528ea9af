"""The ranks of a training job, and their agreements without collectives.

Ranks exchange JSON through the key-value store of torch's launchers (TCPStore, HashStore, FileStore) when a run is
opened, restored and closed. While a step is saved, they use it only after a change of the optimizer state
(`ckpt.core.run.common_state`). `Board` is a connection to this store. It polls keys with `check`, with a growing pause,
because the `wait` of a TCPStore blocks all other requests of its connection, cannot be interrupted, logs two warnings
at each timeout, and exceeds its own timeout if the host of the store hangs.

First the ranks meet (`World`). After that, each agreement is a turn: every rank posts a value, and rank 0 collects the
values, decides and posts the verdict. `together` runs work that may fail on every rank, and agrees on the results.
`Mailbox` transfers messages of background threads. Keys:

    everystep/worlds/<rank>     a token of the process that wants to join as this rank
    everystep/answers/<token>   the name <n> of the meeting, posted by rank 0
    everystep/<n>/here/<rank>, everystep/<n>/nodes    each rank's node, and the nodes of all
    everystep/<n>/<turn>/<rank>, everystep/<n>/<turn>/verdict, everystep/<n>/mail/<key>, everystep/<n>/farewell/<rank>
    everystep/<n>/orders/<generation>/<number>      see `ckpt.core.ranks.orders`
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import Any, TypeVar

from ckpt import errors
from ckpt.core.ipc import channel
from ckpt.errors import CheckpointError, DeadlineError, PeerError, TransferError, UsageError, from_wire, to_wire
from ckpt.events import log as logger

Json = Any
T = TypeVar("T")

ANSWER_S = 60.0  # timeout of a request to the store, whose host may first wait for a name lookup
PAUSE_S = 0.25  # longest pause between two polls of the store
SQUEEZE = 4 << 10  # values of at least this many bytes are compressed
MAX_VALUE = 1 << 30  # maximum bytes of a compressed value
PIECE = 7 << 20  # maximum bytes in a key of the store, because a TCPStore drops the connection at 8 MiB


class Board:
    """A connection to the store, for any thread. Requests raise PeerError if no reply comes within `answer_s`."""

    def __init__(self, store: Any) -> None:
        self._store, self.answer_s = store, ANSWER_S
        self._lock = threading.Lock()
        self._silent = False

    def another(self) -> Board:
        """Return another connection to the store, or share this one if the store allows only one."""
        return Board(self._ask(self._store.clone) if hasattr(self._store, "clone") else self._store)

    def put(self, key: str, body: bytes) -> None:
        if len(body) > PIECE:
            starts = range(0, len(body), PIECE)
            for i, start in enumerate(starts):
                self._ask(partial(self._store.set, f"{key}/{i}", body[start : start + PIECE]))
            body = b"p%d" % len(starts)
        self._ask(partial(self._store.set, key, body))

    def create(self, key: str, body: bytes) -> bytes:
        """Put a value of at most `PIECE` bytes unless the key exists. Return the value in the store."""
        return bytes(self._ask(lambda: self._store.compare_set(key, "", body)))

    def read(self, key: str) -> bytes:
        """Return a value that `create` has put."""
        return bytes(self._ask(lambda: self._store.get(key)))

    def get(self, keys: list[str]) -> list[Json]:
        """Return the values of existing keys."""
        bodies = self._ask(lambda: [bytes(self._store.get(key)) for key in keys])
        return [unpack(self._joined(key, body)) for key, body in zip(keys, bodies, strict=True)]

    def _joined(self, key: str, body: bytes) -> bytes:
        """Join a value that was split because it was too large for one key."""
        if body[:1] != b"p" or not body[1:].isdigit():
            return body
        return b"".join(bytes(self._ask(partial(self._store.get, f"{key}/{i}"))) for i in range(int(body[1:])))

    def has(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda: self._store.check(keys)))

    def missing(
        self, keys: list[str], timeout_s: float, in_vain: Callable[[Board], bool] = lambda board: False
    ) -> set[str]:
        """Wait for these keys. Return the keys that are missing after the timeout or once `in_vain` returns True."""
        end, pause = time.monotonic() + timeout_s, 0.001
        while not self.has(keys):
            left = end - time.monotonic()
            if left <= 0 or in_vain(self):
                return {key for key in keys if not self.has([key])}
            time.sleep(min(pause, left))
            pause = min(pause * 1.2, PAUSE_S)  # keys that arrive early are detected with little delay
        return set()

    def drop(self, keys: list[str]) -> None:
        """Delete these keys, if the store supports that. Missing keys are ignored."""
        if hasattr(self._store, "delete_key"):
            with contextlib.suppress(PeerError):
                self._ask(lambda: [self._store.delete_key(key) for key in keys])

    def _ask(self, request: Callable[[], T]) -> T:
        """Run a request in its own thread, because it has no deadline, and never returns if the host is frozen."""
        answer: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except Exception as error:
                answer.set_exception(error)

        with self._lock:
            if not self._silent:
                try:
                    threading.Thread(target=run, daemon=True).start()
                except RuntimeError:  # the interpreter is exiting and starts no threads
                    run()
                self._silent = not futures.wait([answer], self.answer_s).done
            if self._silent:
                raise PeerError(f"cannot reach the torch.distributed store: no response within {self.answer_s:g} s")
        try:
            return answer.result()
        except (RuntimeError, OSError) as error:  # torch raises RuntimeError
            raise PeerError(f"cannot reach the torch.distributed store: {str(error).partition(chr(10))[0]}") from error


class Alone:
    """The store of a single-rank job, used by its mailbox and its orders."""

    def __init__(self) -> None:
        values: dict[str, bytes] = {}
        self.set, self.get = values.__setitem__, values.__getitem__
        self.compare_set: Callable[[str, str, bytes], bytes] = lambda key, _, body: values.setdefault(key, body)
        self.check: Callable[[list[str]], bool] = lambda keys: values.keys() >= set(keys)


def pack(value: Json) -> bytes:
    """Encode as JSON after a byte for the form: `j` plain, `z` compressed. Raises UsageError if this is impossible."""
    try:
        text = json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a message between ranks must be JSON: {error}") from None
    body = b"j" + text if len(text) <= SQUEEZE else b"z" + zlib.compress(text)
    if len(body) > MAX_VALUE:
        raise UsageError(f"a message between ranks has {len(body)} bytes, more than the limit of {MAX_VALUE}")
    return body


def unpack(body: bytes) -> Json:
    try:
        if body[:1] not in (b"j", b"z"):
            raise ValueError(body[:20])
        return json.loads(zlib.decompress(body[1:]) if body[:1] == b"z" else body[1:])
    except (ValueError, zlib.error, RecursionError) as error:
        raise PeerError(f"the torch.distributed store contains an invalid message: {error}") from None


# -- ranks and agreements --


Decide = Callable[[list[Json]], Json]

GRACE_S = 15.0  # extra timeout for the other ranks, because rank 0 may begin a turn later
LEFT = "left"  # topic posted by a rank that takes part in no further turn
KEPT_MAIL = 64  # number of a rank's messages that stay in the store
SHOWN = 8  # maximum number of names listed in a message


class World:
    """The ranks of a job. One thread at a time may call it; a background thread uses a `mailbox`.

    `rank` of `size`: this rank. `job`: id of this job attempt. `nodes`: node index of every rank. `node`: node index of
    this rank. `local_rank`: its index among the `local_size` ranks of its node, in rank order. Nodes are numbered in
    the order of their lowest ranks.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, store: Any = None, *, node: str = "", timeout_s: float = 300.0
    ) -> None:
        """`node`: any string that is equal for ranks that share memory. With several ranks, wait for all of them."""
        if not 0 <= rank < size or (size > 1 and store is None):
            raise UsageError(f"rank={rank}, size={size}: rank must be below size, and size > 1 needs a store")
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store = Alone() if size == 1 else store  # keep a reference, because a TCPStore ends with its object
        self._board = Board(self._store).another()
        self._turn = 0
        self._done: list[str] = []  # keys that are no longer needed
        self._stale: list[str] = []  # keys that are no longer needed once all ranks have posted in the next turn
        self.job, nodes = self._meet(node)  # `job` is new for each job attempt
        self.prefix = f"everystep/{self.job}/"  # prefix of all keys
        self.nodes: tuple[int, ...] = tuple(nodes)
        self.node = self.nodes[rank]
        self.local_rank, self.local_size = self.nodes[:rank].count(self.node), self.nodes.count(self.node)

    def _meet(self, node: str) -> tuple[str, list[int]]:
        """Return the name of this meeting, which rank 0 gives to the live processes, and the nodes of all ranks.

        A launcher may keep its store across restarts, with the posts of dead processes, as torchrun does. So a rank
        accepts only a reply to its own token, and rank 0 replies until every rank has acknowledged.
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
                raise DeadlineError(f"meet: rank {_some(absent)} did not arrive within {self.timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.2, PAUSE_S)
        nodes = _numbered([node, *map(str, board.get(here))])
        if self.size > 1:
            board.put(f"everystep/{token}/nodes", pack(nodes))
            self._stale.append(f"everystep/{token}/nodes")
        board.drop([*here, *(f"everystep/answers/{found}" for found in answered.values())])
        return token, nodes

    def _answer(self, key: str) -> Json:
        """Wait for a value that rank 0 posts during the meeting."""
        if self._board.missing([key], self.timeout_s + GRACE_S):
            raise DeadlineError(f"meet: rank 0 did not respond within {self.timeout_s + GRACE_S:g} s")
        return self._board.get([key])[0]

    @classmethod
    def detect(cls, node: str, *, timeout_s: float = 300.0) -> World:
        """Return the ranks of torch's default process group, or this process alone if there is none.

        Raises UsageError if WORLD_SIZE is above 1 but the process group is not initialized.
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
                f"WORLD_SIZE={size}, but torch.distributed is not initialized: "
                "call torch.distributed.init_process_group() before creating a Checkpointer"
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
        """Post `mine` and return the result of `decide` for the values of all ranks, in rank order.

        All ranks must make the same calls in the same order. `decide` runs on rank 0 once all have posted. The other
        ranks wait for its result, so rank 0 can also act for all ranks in it. Without `decide`, all ranks get the list
        of values. An error of `decide` is raised on all ranks, as its own class if it is a CheckpointError, otherwise
        as PeerError. If work may fail, see `together`. `timeout_s`: time for all ranks to post, from the call on rank
        0. `dead`: returns the ranks that have died, and why.

        Raises DeadlineError naming the ranks that did not post, or if rank 0 did not reply. Raises PeerError if the
        ranks make different calls, a rank has left or died, or the store cannot be reached. Raises UsageError if a
        value is not JSON or is too large.
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
        """Make the next turn fail immediately on all ranks, because this rank will not take part. Never raises."""
        if self.size == 1:
            return
        self._board.answer_s = min(self._board.answer_s, timeout_s)
        post = pack({"topic": LEFT, "error": _wire(PeerError(f"rank {self.rank} {why}"))})
        with contextlib.suppress(Exception):
            for key in (str(self.rank) if self.rank else "verdict", LEFT):
                self._board.put(f"{self.prefix}{self._turn}/{key}", post)

    def connect(self) -> Board:
        """Return a new connection for a background thread. Raises PeerError if the store does not respond."""
        return Board(self._store).another()

    def mailbox(self) -> Mailbox:
        """Return a mailbox with a separate connection, for messages of a background thread to other ranks."""
        return Mailbox(self.connect(), f"{self.prefix}mail/")

    def farewell(self, timeout_s: float = 10.0) -> None:
        """Make the last call of this rank. Rank 0, which often hosts the store, waits for the others. Never raises."""
        self._board.answer_s = min(ANSWER_S, timeout_s)
        with contextlib.suppress(Exception):
            keys = [f"{self.prefix}farewell/{rank}" for rank in range(1, self.size)]
            if self.rank:
                self._board.put(keys[self.rank - 1], pack(None))
                self._board.has(keys[:1])  # the reply to this request confirms that the put has arrived
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
                raise PeerError(f"{topic}: rank 0 has left: {known[0]}")
            raise DeadlineError(f"{topic}: rank 0 did not respond within {timeout_s + GRACE_S:g} s")
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
        prefix = ""
        try:
            values = self._collect(turn, topic, post, timeout_s, dead)
            prefix = "rank 0: "
            verdict = pack({"value": decide(values)})
        except Exception as error:
            self._board.put(f"{turn}verdict", pack({"error": _wire(error, prefix)}))
            raise
        self._board.put(f"{turn}verdict", verdict)
        self._board.drop(self._done)
        self._done = []
        return unpack(verdict)["value"]  # like on the other ranks, where JSON turns tuples into lists

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
                raise PeerError(f"{topic}: rank {rank} has left: {left[key]}")
        came = [rank for rank, key in keys.items() if key not in missing]
        posts = {0: unpack(post)} | dict(zip(came, self._board.get([keys[rank] for rank in came]), strict=True))
        self._stale += [*keys.values(), f"{turn}verdict"]
        if not missing:  # all ranks are in this turn, so earlier posts are no longer needed
            self._done += self._stale[:-1]  # dropped once the verdict is posted
            del self._stale[:-1]
        return _values(topic, posts, [r for r, key in keys.items() if key in missing], timeout_s)


@functools.cache
def hint_at_restarts() -> None:
    """Log once if torchrun restarts ranks with the key-value store of the ranks that died (pytorch#135712)."""
    most, shares = os.environ.get("TORCHELASTIC_MAX_RESTARTS", ""), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    unset = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1" and shares != "False"
    if most.isdecimal() and int(most) > 0 and unset:
        logger.warning(
            "torchrun restarts this job up to %s times, and most restarts fail in torch itself because new ranks read "
            "the addresses of dead ones (pytorch#135712). Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun",
            most,
        )


class Mailbox:
    """Messages between background threads of the ranks. Any thread may call it, and a wait blocks no other call.

    A key is put once, by one rank, and stays until that rank has put `KEPT_MAIL` more keys. By then, its readers have
    read it. So the store does not grow. Methods raise PeerError if the store cannot be reached.
    """

    def __init__(self, board: Board, prefix: str) -> None:
        self._board, self._prefix = board, prefix
        self._sent: deque[str] = deque()

    def put(self, key: str, value: Json) -> None:
        """Post a value. Raises UsageError if it is not JSON or is too large."""
        self._board.put(self._prefix + key, pack(value))
        self._sent.append(self._prefix + key)
        while len(self._sent) > KEPT_MAIL:
            self._board.drop([self._sent.popleft()])

    def create(self, key: str, value: Json) -> Json:
        """Post a value unless another rank has. Return the value that all ranks read."""
        self._sent.append(self._prefix + key)
        return unpack(self._board.create(self._prefix + key, pack(value)))

    def wait(self, keys: Sequence[str], timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> list[Json]:
        """Return the values once all keys exist. Raises DeadlineError naming the missing keys, or once `stopped()`."""
        missing = self._board.missing([self._prefix + key for key in keys], timeout_s, lambda _: stopped())
        if missing:
            names = [key for key in keys if self._prefix + key in missing]
            raise DeadlineError(f"no response from other ranks within {timeout_s:g} s: {_some(names)}")
        return self._board.get([self._prefix + key for key in keys])

    def poll(self, keys: Sequence[str]) -> bool:
        """Return True if all keys exist."""
        return self._board.has([self._prefix + key for key in keys])


def _message(value: Json, who: str) -> dict[str, Any]:
    """Check that a post or a verdict has a value or an error, and return it."""
    if type(value) is dict and "error" not in value and "value" in value:
        return value
    wire = value.get("error") if type(value) is dict else None
    if type(wire) is not dict or {type(wire.get(key)) for key in ("error", "message")} != {str}:
        raise PeerError(f"{who} posted an invalid message: use the same version of everystep on all ranks")
    return {"topic": value.get("topic"), "error": wire}


def _wire(error: BaseException, prefix: str = "") -> dict[str, str]:
    """Return an error in the form from which the other ranks raise it, with `prefix` before its message."""
    wire = to_wire(error)
    name = wire["error"] if isinstance(error, CheckpointError) else PeerError.__name__
    return {"error": name, "message": prefix + wire["message"]}


def _values(topic: str, posts: dict[int, Json], missing: list[int], timeout_s: float) -> list[Json]:
    """Return the posted values in rank order, or raise the error that all ranks must raise."""
    messages = {rank: _message(post, f"rank {rank}") for rank, post in posts.items()}
    for message in messages.values():
        if message.get("topic") == LEFT:
            raise PeerError(f"{topic}: {message['error']['message']}")
    for rank, message in messages.items():
        if message.get("topic") != topic:
            raise PeerError(
                f"rank 0 called {topic!r}, rank {rank} called {message.get('topic')!r}: "
                "all ranks must make the same calls in the same order"
            )
    if missing:
        raise DeadlineError(f"{topic}: rank {_some(missing)} did not arrive within {timeout_s:g} s")
    for rank, message in messages.items():
        if "error" in message:  # the rank could not post its value
            raise from_wire({**message["error"], "message": f"rank {rank}: {message['error']['message']}"})
    return [message["value"] for message in messages.values()]


def _some(names: Sequence[object]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more


def _numbered(names: list[str]) -> list[int]:
    """Number names in the order of their first occurrence. Equal names get equal numbers."""
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return [number[name] for name in names]


def together(
    world: World, topic: str, work: Callable[[], Json], decide: Callable[[list[Json]], Json] | None = None
) -> Any:
    """Call `work` on every rank, and agree on the results (see `World.agree`).

    If `work` fails on any rank, all ranks raise the same error, so that all continue in the same way.
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
        raise failure  # otherwise, all ranks raise a CheckpointError with the same message
    if failure is not None and verdict["rank"] != world.rank:
        logger.warning("%s failed on this rank as well: %r", topic, failure)
    raise from_wire(verdict["error"]) from failure


def made_together(topic: str, make: Callable[[], T]) -> T:
    """Call `make` on every rank and return the result. If it fails on any rank, all ranks raise the same error."""
    world = World.detect(channel.node_id())
    made: list[T] = []
    try:
        together(world, topic, lambda: made.append(make()))
    finally:
        world.farewell()
    return made[0]


def _verdict(posts: list[Any], decide: Callable[[list[Json]], Json] | None) -> dict[str, Json]:
    """Return the decision or the first failure. A TransferError is chosen only if no rank has another error."""
    failed = [(rank, post["error"]) for rank, post in enumerate(posts) if "error" in post]
    failed.sort(key=lambda one: (one[1]["error"] == TransferError.__name__, one[0]))
    for rank, error in failed[:1]:
        known = error["error"] in vars(errors)  # otherwise only the failed rank raises the original exception
        message = f"rank {rank}: {error['message']}" if len(posts) > 1 else error["message"]
        return {"rank": rank, "error": {**error, "message": message, **({} if known else {"error": "PeerError"})}}
    values = [post["value"] for post in posts]
    try:
        return {"value": values if decide is None else decide(values)}
    except CheckpointError as error:
        return {"rank": -1, "error": to_wire(error)}
