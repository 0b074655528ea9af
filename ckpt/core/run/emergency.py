"""Emergency saves: save the newest step that all ranks can provide within the remaining time.

    request_save -> order a step that all training loops save; or stage the last step and use the steps in memory
                 -> the writer makes it durable -> Outcome

The guard calls `request_save` on a fault, and when a user requests a save. Other ranks receive orders
through `ckpt.core.ranks.orders`, and every rank executes them here. The saver publishes each ordered save in
`Saver.answers`. Every wait for the training loop, another rank or the writer has a deadline.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass, field
from functools import partial

from ckpt.core.ipc.heartbeat import OPENING, RESTORING
from ckpt.core.ipc.requests import Persist, SavedInTier
from ckpt.core.log.log import Acquire
from ckpt.core.ranks.orders import Order
from ckpt.core.run.save_plan import Late
from ckpt.core.run.saver import TOO_LATE, Saver
from ckpt.core.run.supervise.writer_link import start_thread
from ckpt.core.run.training_run import TrainingRun
from ckpt.errors import CheckpointError, FencedError, PeerError, WriterError
from ckpt.events import log
from ckpt.saving import Save

PATIENT_S = 600.0  # timeout of a save without a deadline
LIVE_S = 10.0  # timeout to copy the step that an exception has interrupted
PERSIST_S = 60.0  # timeout for the steps in memory to become durable, if the other ranks have them too
COPYING_S = 2.0  # timeout for a copy that is under way
GUESS_S = 0.1
PATIENCE_S = 0.5  # extra time for the training loop to reach an ordered step
AHEAD = 2  # an order names a step this far ahead of the posting rank, plus the steps in two polls of the readers
TRIES = 3  # orders for one request; another is posted if some rank had passed the ordered step
MOST_WHY = 200  # characters of a reason that other ranks log


@dataclass
class Outcome:
    """The result of a request. All times are in seconds since the request.

    saved: steps and their location ("memory" or a URL), grouped by how they were saved. "agreed": by the training
        loops; "live": staged after an exception in step(); "ring": already in memory
    staged_s: when staging of the last step ended; None if the training loops saved a step
    durable_s: when the steps were durable or had failed; None if the writer got no request or did not reply
    """

    began: float = field(default_factory=time.monotonic)
    saved: dict[str, list[SavedInTier]] = field(default_factory=dict)
    staged_s: float | None = None
    durable_s: float | None = None

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.began

    def add(self, how: str, step: int, tier: str, seconds: float, error: str = "") -> None:
        self.saved.setdefault(how, []).append(SavedInTier(step, tier, seconds, error))


class EmergencySaver:
    """Saves the state of a run on request."""

    def __init__(self, run: TrainingRun, saver: Saver) -> None:
        self._run, self._saver = run, saver
        self._world, self._supervisor, self._heartbeat = run.world, run.supervisor, run.heartbeat
        self._orders = run.orders
        self._turn = threading.Lock()  # held by the thread that handles a request or an order of another rank
        self._stopped = False
        self._orders.hear("save", self._on_save)
        self._orders.hear("persist", self._on_persist)
        self._orders.hear("interval", self._on_interval)

    def stop(self, timeout_s: float) -> None:
        """Stop handling requests. Wait up to `timeout_s` for one that is being handled."""
        self._stopped = True
        with self._saver.answered:
            self._saver.answered.notify_all()
        if self._turn.acquire(timeout=timeout_s):
            self._turn.release()

    # -- the port --

    def request_save(
        self,
        why: str,
        deadline: float | None = None,
        *,
        far: bool = False,
        leaving: bool = False,
        hung: bool = False,
        loop_ended: bool = False,
    ) -> Outcome:
        """Save the newest step that all ranks can provide. Return the result by the deadline or soon after.

        why: the reason, for the logs of the other ranks
        deadline: a time of time.monotonic(), or None
        far: also write to the tiers beyond the nearest one
        leaving: this process ends after the save
        hung: the training loop of some rank does not proceed
        loop_ended: the caller is the training thread, and will not call step() again

        Before the first step this saves nothing: memory and tiers keep the steps of earlier job attempts.
        """
        outcome, alone = Outcome(), self._world.size == 1
        end = outcome.began + PATIENT_S if deadline is None else deadline
        with contextlib.nullcontext() if loop_ended else self._turn:  # the training thread must not wait here
            if not self._can_save:
                return outcome
            blocked = hung or bool(self._run.dead_ranks)  # the training loop of some rank cannot save
            held = self._saver.newest_step(min(COPYING_S, _left(end)))
            ready = held is not None and held == self._heartbeat.step
            # A step in memory is enough, unless there is time for all ranks to save the same step.
            ask = not (blocked or loop_ended) and (not ready or not (alone or leaving))
            if ask and self._save_ordered(outcome, why, end, hurried=deadline is not None):
                return outcome
            if not ready and (step := self._stage_last()) is not None:
                outcome.add("live", step, "memory", outcome.passed_s)
            outcome.staged_s = outcome.passed_s
            if not alone and not blocked:
                self._order("persist", -1, why, end, 0, join=-1)
            if blocked and leaving and self._supervisor.memory.outlives_us:
                self._note_memory(outcome)  # the writer makes it durable while the launcher starts the next trainer
            else:
                self._persist(outcome, end, far=far)
        return outcome

    def await_copy(self) -> None:
        """Wait until a copy that is under way has ended."""
        if self._can_save:
            self._saver.newest_step(COPYING_S)

    def give_memory_back(self) -> int:
        """Release one slot and return its size in bytes. With several ranks, the remaining slots must still hold a
        step that all ranks have."""
        if not self._can_save:
            return 0
        stager = self._run.stager
        return stager.give_up_slot() if self._world.size == 1 else stager.give_up_slot(3)

    @property
    def _can_save(self) -> bool:
        return self._heartbeat.step >= 0 and self._heartbeat.state not in (OPENING, RESTORING)

    def _stage_last(self) -> int | None:
        """Stage the last step if an exception interrupted its step(). Return the step if memory has it.

        Only the training thread can do this. Other threads get None.
        """
        if threading.get_ident() != self._run.thread:
            return None
        self._saver.stage_last(time.monotonic() + LIVE_S, live=False)
        return self._run.step if self._saver.newest_step(0.0) == self._run.step else None

    # -- one step, saved by all training loops --

    def _save_ordered(self, outcome: Outcome, why: str, end: float, *, hurried: bool) -> bool:
        """Make the training loops of all ranks save one step. Return False if they do not."""
        before, usual_s = self._heartbeat.step, self._usual_s()
        if (order := self._order_save(usual_s, why, end, TRIES)) is None:
            return False
        needed_s = max(1, order.step - before) * usual_s
        patience_s = min(_left(end) / 2, 3 * needed_s + PATIENCE_S) if hurried else _left(end)
        patient, tried = time.monotonic() + patience_s, list[Save]()
        while time.monotonic() < patient and not self._stopped:
            with self._saver.answered:  # look for this step, or one that was ordered later
                found = [save for save in self._saver.answers if save.step >= order.step and save not in tried]
                if not found:
                    self._saver.answered.wait(min(1.0, _left(patient)))
                    continue
            tried.append(found[0])
            if self._follow_save(outcome, found[0], end):
                return True
        return False

    def _order_save(self, usual_s: float, why: str, end: float, tries: int) -> Order | None:
        """Order the first step that all ranks can still save, or join an order of another rank."""
        step = self._heartbeat.step
        pauses = math.ceil(2 * self._orders.pause_s / usual_s) if usual_s > 0 else 0
        ahead = 1 if self._world.size == 1 else AHEAD + pauses
        return self._order("save", step + ahead, why, end, tries, join=step + 1)

    def _usual_s(self) -> float:
        """Return the duration of a step in seconds. If none is known yet, measure it."""
        if usual_s := self._heartbeat.usual_s:
            return usual_s
        before = self._heartbeat.step
        time.sleep(GUESS_S)
        return GUESS_S / max(1, self._heartbeat.step - before)

    def _order(self, kind: str, step: int, why: str, end: float, tries: int, *, join: int) -> Order | None:
        """Post an order, or join one of another rank. Return None if the store does not respond."""
        try:
            body = {"why": why[:MOST_WHY], "grace_s": _left(end), "tries": tries}
            return self._orders.post(kind, step, body, join=join)
        except PeerError as error:
            log.warning("%s", error)
            return None

    def _follow_save(self, outcome: Outcome, save: Save, end: float) -> bool:
        """Wait until a save is in all its tiers. Return False if it failed, for example because a rank was past it."""
        passed = dict[str, float]()
        try:
            passed[save.wait_staged(_left(end)).tier] = outcome.passed_s
            for tier in save.tiers:
                save.wait_durable(_left(end), tier=tier)
                passed[tier] = outcome.passed_s
        except CheckpointError as error:
            log.info("the requested save of step %d failed: %s", save.step, error)
            return False
        for tier, seconds in passed.items():
            outcome.add("agreed", save.step, tier, seconds)
        outcome.durable_s = outcome.passed_s
        return True

    # -- orders to the whole job, handled in the thread that reads or posts them --

    def _on_save(self, order: Order) -> None:
        if order.rank != self._world.rank:
            log.info("rank %d requests a save: %s", order.rank, order.body["why"])
        late = self._run.intervals.plan.order(order.step)
        if late is not None:
            work = partial(self._save_late, order, late, self._supervisor.owner, time.monotonic())
            start_thread(work, "ckpt-late-save")

    def _save_late(self, order: Order, late: Late, owner: Acquire, began: float) -> None:
        """Save from memory a step that this rank had already passed. If memory has lost it, order a later step."""
        self._saver.newest_step(COPYING_S)
        if owner != self._supervisor.owner:
            return  # the state was restored since, so the same number means another step
        save = self._saver.save_late(late, owner, f"had passed step {late.step} when it was ordered")
        if save is not None:
            self._saver.answer(save)
        elif order.body["tries"] > 1 and not (self._run.intervals.plan.awaits_step or self._stopped):
            end = began + order.body["grace_s"]
            self._order_save(self._usual_s(), order.body["why"], end, order.body["tries"] - 1)

    def _on_persist(self, order: Order) -> None:
        if order.rank != self._world.rank:
            log.info("rank %d requests a save of what is in memory: %s", order.rank, order.body["why"])
            start_thread(partial(self._persist_ordered, time.monotonic() + order.body["grace_s"]), "ckpt-persist")

    def _persist_ordered(self, end: float) -> None:
        with self._turn:
            if not self._stopped and self._can_save:
                self.await_copy()
                self._persist(Outcome(), end, far=False)

    def _on_interval(self, order: Order) -> None:
        for late in self._run.intervals.change(order):
            self._saver.save_late(late, self._supervisor.owner, TOO_LATE)

    # -- what is in memory --

    def _persist(self, outcome: Outcome, end: float, *, far: bool) -> None:
        """Make the writer write the steps in memory to durable tiers."""
        before_s = outcome.passed_s
        self._note_memory(outcome)
        deadline_s = min(_left(end), PERSIST_S)
        try:
            with self._supervisor.held.holding_still(alone=self._world.size == 1) as attempts:
                request = Persist(deadline_s, far, [str(attempt) for attempt in attempts])
                saved = self._supervisor.client.ask(request, deadline_s + 1.0)
        except CheckpointError as error:
            if not isinstance(error, FencedError):  # it is raised or logged elsewhere
                log.warning("the steps in memory were not made durable: %s", error)
            return
        for one in saved:
            outcome.add("ring", one.step, one.tier, before_s + one.seconds, one.error)
        outcome.durable_s = outcome.passed_s

    def _note_memory(self, outcome: Outcome) -> None:
        if isinstance(self._supervisor.writer.failure, WriterError):
            return  # no writer survives this process, so its memory is lost with it
        known = {saved.step for saved in outcome.saved.get("live", ())}
        steps = sorted((attempt.step for attempt in self._supervisor.held.sealed()), reverse=True)
        wanted = steps[:1] if self._world.size == 1 else steps  # with several ranks, the newest may not be common
        for step in wanted:
            if step not in known:
                outcome.add("ring", step, "memory", outcome.passed_s)


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())
