"""The trainer's side of redo logs: every sealed step is sent to be logged, and its slot kept until the next one is.

Slots that the writer has not come to yet are not used again, so a training that steps faster than its log waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from typing import Any

from ckpt.errors import CheckpointError, FencedError, SaveError, WriterError
from ckpt.events import log as logger
from ckpt.format.manifest import Attempt
from ckpt.ipc.arena import Arena
from ckpt.ipc.requests import ForgetRedo, KnowRecipes, LogStep, LogStepReply
from ckpt.redo.append import WORTH
from ckpt.redo.optimizer_recipe import GroupWatch, find_recipes
from ckpt.save import Save
from ckpt.state.capture import Capture, Reading
from ckpt.subscribers import publish
from ckpt.trainer.staging.stage import Stager
from ckpt.trainer.supervise.current_writer import WriterUser
from ckpt.trainer.supervise.writer_client import WriterClient
from ckpt.trainer.supervise.writer_supervisor import WriterSupervisor
from ckpt.units import decimal, duration

OFTEN = 0.5  # of what has a recipe, that is to be predicted


@dataclass
class _Logging:
    """A slot on its way into one log."""

    save: Save
    attempt: Attempt
    arena: Arena
    slot: int
    tier: int
    url: str
    settings: list[list[Any] | None]


class RedoClient(WriterUser):
    """Of one Checkpointer. `tiers`: the URLs of those that log, by their number. Any thread may call."""

    def __init__(
        self,
        tiers: dict[int, str],
        supervisor: WriterSupervisor,
        stager: Stager,
        capture: Capture,
        on_error: Callable[[CheckpointError, Save], None],
    ) -> None:
        self.watch = GroupWatch()
        self._tiers, self._supervisor, self._stager, self._capture = tiers, supervisor, stager, capture
        self._on_error = on_error
        self._lock = threading.RLock()
        self._pending: list[_Logging] = []
        self._previous: dict[int, tuple[bytes, int]] = {}  # by tier: the slot that the next step is taken against
        self._recipes: KnowRecipes | None = None
        self._replies = 0
        self._failing: set[int] = set()  # tiers whose last step is missing in the log, which was said
        supervisor.writer.users.append(self)  # after all the others

    @property
    def urls(self) -> list[str]:
        return list(self._tiers.values())

    def told(self) -> list[list[Any] | None]:
        """What optimizers were told at their last steps; to be asked for within step()."""
        return self.watch.told([optimizer for _, optimizer, _ in self._capture.stepping])

    def prepare(self, reading: Reading) -> None:
        """Before a step of this layout is logged."""
        layout = reading.layout
        if self._recipes is not None and self._recipes.layout == layout.digest:
            return
        recipes = find_recipes(layout, reading.tensors, self._capture.stepping)
        with self._lock:
            self._recipes = KnowRecipes(layout.digest, [astuple(one) for one in recipes])
            self._supervisor.writer.send(self._recipes)

    def log(self, save: Save, attempt: Attempt, place: tuple[Arena, int], settings: list[list[Any] | None]) -> None:
        """A step was sealed."""
        for tier, url in self._tiers.items():
            one = _Logging(save, attempt, *place, tier, url, settings)
            with self._supervisor.writer.lock, self._lock:  # else the next one gets it twice, or out of turn
                self._stager.slots.pin(*place)
                self._pending.append(one)
                self._send(one)

    def reset(self) -> None:
        """The training goes on somewhere else: the next step stands alone."""
        with self._lock:
            if not self._pending:  # else the slot of the step before is still looked at
                self._let_go()
            self._supervisor.writer.send(ForgetRedo())

    # -- between the processes --

    def _send(self, one: _Logging) -> None:
        if self._supervisor.failure is not None:
            self._fail(one, self._supervisor.failure)
            return
        request = LogStep(one.tier, one.arena.id.hex(), one.slot, str(one.attempt), one.settings)
        future = self._supervisor.client.send(request)
        future.add_done_callback(lambda future: self._on_logged(one, future))

    def _on_logged(self, one: _Logging, future: Future[tuple[LogStepReply, list[int]]]) -> None:
        error = future.exception()
        with self._lock:
            if one not in self._pending:
                return
            if isinstance(error, WriterError) and self._supervisor.failure is None:
                return  # the next writer gets it
            if error is not None:
                self._fail(one, error if isinstance(error, CheckpointError) else SaveError(repr(error)))
                return
            self._pending.remove(one)
            before = self._previous.get(one.tier)
            if before is not None:
                self._stager.slots.unpin(*before)
            self._previous[one.tier] = (one.arena.id, one.slot)
            again = one.tier in self._failing
            self._failing.discard(one.tier)
            reply = future.result()[0]
        if again:
            logger.warning("the redo log of %s goes on with step %d", one.url, one.save.step)
        one.save.set_logged(one.url)
        facts = {"nbytes": reply.raw, "stored": reply.stored, "seconds": reply.seconds}
        publish("logged", one.save.step, tier=one.url, **facts)
        self._say(one, reply)

    def _fail(self, one: _Logging, error: CheckpointError) -> None:
        """The step is missing in the log; the next one stands alone. Of several in a row the first is told to those who
        do not ask, as a full disk lasts for many."""
        self._pending.remove(one)
        self._stager.slots.unpin(one.arena.id, one.slot)
        before = self._previous.pop(one.tier, None)
        if before is not None:
            self._stager.slots.unpin(*before)
        if not isinstance(error, FencedError):
            held = "" if self._supervisor.failure is not None else ". It is still in memory"
            error = SaveError(f"step {one.save.step} is not in the redo log of {one.url}: {error}{held}")
        if one.tier not in self._failing or isinstance(error, FencedError):
            self._failing.add(one.tier)
            self._on_error(error, one.save)
        publish("failed", one.save.step, tier=one.url, error=str(error))
        one.save.set_logged(one.url, error)

    def on_new_writer(self, client: WriterClient) -> None:
        with self._lock:
            self._let_go()
            if self._recipes is not None:
                client.send(self._recipes)
            for one in list(self._pending):
                self._send(one)

    def on_no_writer(self, error: CheckpointError) -> None:
        with self._lock:
            self._let_go()
            for one in list(self._pending):
                self._fail(one, error)

    def _let_go(self) -> None:
        for arena, slot in self._previous.values():
            self._stager.slots.unpin(arena, slot)
        self._previous.clear()

    def in_use(self) -> set[bytes]:
        with self._lock:
            return {one.arena.id for one in self._pending}

    def _say(self, one: _Logging, reply: LogStepReply) -> None:
        """Once: what the log is worth with the real optimizer."""
        if reply.base is None or self._replies >= 2:
            return
        self._replies += 1
        if self._replies < 2:  # moments that begin with zeros tell little
            return
        share = reply.stored / max(1, reply.raw)
        sizes = f"{decimal(reply.stored)} of {decimal(reply.raw)} a step, in {duration(reply.seconds)}"
        if share > WORTH:
            logger.warning(
                "the redo log in %s takes %s: it saves next to nothing with this optimizer. Without log_every_step "
                "training has less to wait for",
                one.url,
                sizes,
            )
        elif reply.known and reply.predicted < OFTEN * reply.known:
            logger.warning(
                "the redo log in %s takes %s: steps of this optimizer are not what was predicted, so differences to the"
                " step before are stored instead",
                one.url,
                sizes,
            )
        else:
            how = "" if reply.known else "; its optimizer has no formula here, differences are stored"
            logger.info("the redo log in %s takes %s%s", one.url, sizes, how)
