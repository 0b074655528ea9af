"""A channel of orders, through which ranks agree on the steps to save without a collective.

Fixed intervals need no order, because every rank computes from its step number whether a save is scheduled. All other
saves use orders. Any rank can post an order, and every rank executes it, including the rank that posted it:

    save       save the first step that is not below `step`, to every tier     `ckpt.core.run.closing`
    persist    make the steps in memory durable, because a training loop hangs `ckpt.core.run.closing`
    interval   from `step` on, save at other intervals                         `ckpt.core.run.save_plan`

**Types.** `Order` is one order. `Orders` is this rank's end of the channel. Save and interval orders change
`ckpt.core.run.save_plan.SavePlan`, and the training loop reads only this plan.

**Calls.** `hear(kind, handler)` for each kind, then `start`. After that:

    post (any thread)      create the next number in the job's key-value store, unless it exists
                           -> execute that number -> repeat until the order with that number is ours
    reader (a thread)      if the next number exists, execute it and repeat; otherwise pause
    execute (under a lock) skip a number that was executed already -> call the handler
    restore (main thread)  suspend -> the ranks agree -> begin(generation) -> resume when the state is restored

The training loop calls none of these functions, and never waits for a thread that calls them.

**Invariants.** `test_negative_control_broken_rule_is_found` in `tests/model/test_orders_at_random.py` removes each rule
in turn. The names of its cases are in parentheses.

1. Each number has one order. Every rank executes the numbers in order, each once (a number is executed twice).
2. A save order saves one step: each rank saves the first step that is not below the ordered step. If a rank has passed
   that step and memory has lost it, the rank fails the save of exactly that step (a rank saves the next step instead;
   the loop decides without the lock; one order displaces another).
3. After an interval order, each step goes to the same tiers on all ranks, or its save fails (a late rank keeps the
   steps of the old interval).
4. An order from before a restore is never executed after the restore. Keys contain a generation, which the restore's
   first agreement raises. From then until the state is restored, a rank neither posts nor executes orders (a restore
   keeps the generation; orders are read during a restore).
5. If a post fails, either the order is in the store and all ranks execute it, or no rank does (a rank executes what it
   could not post).

**Faults.**

- *The poster dies*: the store has the whole order or nothing, because `compare_set` creates number and body together.
- *Two ranks post at the same time*: one gets the number. The other executes that order, then joins it or posts again.
- *A rank is far ahead*: it uses the slot if memory still has the step. Otherwise it fails that save and orders a later
  step. *A rank is far behind*: the order waits in the plan until the loop reaches the step.
- *A rank hangs*: its reader still executes orders, and any other rank can post. The requester detects that the save
  does not come, and orders `persist`.
- *The store is slow*: ranks read less often. *The store does not respond*: `post` raises `PeerError` after `POST_S`,
  and the caller saves the steps in its own memory. The reader reconnects while the run is open.
- *The job has a single rank*: the channel works the same way, with a dict as the store and without a reader.
- *A restart has another number of ranks*: keys begin with the name of the meeting (`ckpt.core.ranks.world`), which is
  new in each job attempt.

Orders stay in the store, because there are few. Scores (`ckpt.core.run.restoring`) are not orders, because all ranks
wait for them. Nor are posts of departing ranks (`ckpt.core.run.closing`): N closing ranks would cause N x N requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.core.ranks.world import Board, Json, World, pack, unpack
from ckpt.errors import PeerError
from ckpt.events import log

LOOK_S = 0.25  # pause of the reader between two requests
LOOKS_PER_S = 2000  # limit of requests per second by the whole job to the host of the store
SLOW = 20  # if the store is slow, the reader pauses for this multiple of the duration of a request
AGAIN_S = 30.0  # longest pause of the reader
POST_S = 1.0  # timeout of a request to the store while an order is posted
STOP_S = 2.0  # timeout for the reader to end, because it may hang in the store


@dataclass(frozen=True, slots=True)
class Order:
    """One order. `number`: counts from 0 in each generation. `rank`: the poster. `body`: data that its kind needs."""

    generation: int
    number: int
    rank: int
    kind: str
    step: int
    body: Json


class Orders:
    """Posts and executes orders on this rank. `pause_s`: the present pause of the reader, 0 for a single rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._handlers: dict[str, Callable[[Order], None]] = {}
        self._lock = threading.RLock()  # a signal handler may post
        self._generation = self._next = 0
        self._suspended = False
        self._usual_s = max(LOOK_S, world.size / LOOKS_PER_S) if world.size > 1 else 0.0
        self.pause_s = self._usual_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._boards: tuple[Board, Board] | None = self._connect()  # to read and to post; None if they have failed

    def hear(self, kind: str, handler: Callable[[Order], None]) -> None:
        """Register the handler of this kind of order. The handler must return soon. Call this before `start`."""
        self._handlers[kind] = handler

    def start(self) -> None:
        """Execute orders of other ranks from now on."""
        if self._world.size > 1:
            self._thread = threading.Thread(target=self._read, name="ckpt-orders", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop reading orders. Posting still works."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def post(self, kind: str, step: int, body: Json, *, join: int | None = None) -> Order:
        """Post an order, and return it when this rank has executed it.

        step: for kinds that apply to a later step, at least two ahead of this rank's last step
        join: if another rank posts an order of this kind at the same time, for this step or a later one, accept and
            return that order instead

        Raises PeerError if the store does not respond, or during a restore. The order may still be in the store.
        """
        generation = -1 if self._suspended else self._generation  # the generation in which the caller chose the step
        while True:
            with self._lock:
                if self._suspended or self._generation != generation:
                    raise PeerError("the order was dropped, because a restore is under way")
                order = Order(generation, self._next, self._world.rank, kind, step, body)
            ours = pack([order.rank, kind, step, body])
            found = self._create(self._key(generation, order.number), ours)
            there = self._execute(order.generation, order.number, found)
            if found == ours:
                return order
            if join is not None and there is not None and there.kind == kind and there.step >= join:
                return there

    def _create(self, key: str, body: bytes) -> bytes:
        boards = self._boards
        if boards is None:
            raise PeerError("cannot reach the torch.distributed store: it did not respond to the last request")
        try:
            return boards[1].create(key, body)
        except PeerError:
            self._boards = None  # the reader reconnects
            raise

    def _connect(self) -> tuple[Board, Board]:
        """Open two connections to the store, so that no post waits for a read. This may take seconds."""
        reads, posts = self._world.connect(), self._world.connect()
        posts.answer_s = POST_S
        return reads, posts

    def catch_up(self) -> None:
        """Execute all orders that are in the store. Raises PeerError if the store does not respond."""
        self._boards = boards = self._boards or self._connect()
        board = boards[0]
        while not self._suspended:
            generation, number = self._generation, self._next
            if not board.has([self._key(generation, number)]):
                return
            self._execute(generation, number, board.read(self._key(generation, number)))

    def _key(self, generation: int, number: int) -> str:
        return f"{self._world.prefix}orders/{generation}/{number}"

    def _execute(self, generation: int, number: int, raw: bytes) -> Order | None:
        """Execute an order, unless another thread did or a restore has begun. Return the order if it is readable."""
        try:
            rank, kind, step, body = unpack(raw)
            order = Order(generation, number, int(rank), str(kind), int(step), body)
        except (TypeError, ValueError, PeerError) as error:
            order = None
            log.warning("skipped order %d of this job, which cannot be read: %r", number, error)
        with self._lock:
            if self._suspended or (generation, number) != (self._generation, self._next):
                return order
            self._next += 1
            if order is not None and (handler := self._handlers.get(order.kind)) is not None:
                try:
                    handler(order)
                except Exception:
                    log.exception("the %s order of rank %d could not be executed", order.kind, order.rank)
        return order

    def _read(self) -> None:
        while not self._stopped.wait(self.pause_s):
            began = time.monotonic()
            try:
                self.catch_up()
                self.pause_s = min(AGAIN_S, max(self._usual_s, SLOW * (time.monotonic() - began)))
            except PeerError as error:
                if self._boards is not None:
                    log.info("could not read the orders of other ranks, retrying: %s", error)
                self._boards, self.pause_s = None, min(AGAIN_S, 2 * self.pause_s)

    # -- a restore, in which all ranks take part --

    def suspend(self) -> int:
        """Stop posting and executing orders until `resume`. Return the generation, which is equal on all ranks."""
        with self._lock:
            self._suspended = True
            return self._generation

    def begin(self, generation: int) -> None:
        """Ignore all earlier orders. All ranks call this with the generation that they agreed on."""
        with self._lock:
            self._generation, self._next = generation, 0

    def resume(self) -> None:
        """Post and execute orders again."""
        with self._lock:
            self._suspended = False
