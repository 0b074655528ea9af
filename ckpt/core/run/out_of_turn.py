"""Save out of turn: the newest step that all ranks can have, within the time that is left.

    request_save -> agree on a step that all training loops save, or stage the last step and take what is in memory
                 -> have the writer make it durable -> Outcome

The guard calls `request_save` when it sees a fault, and so does a user who asks for a save. The training loop takes
part by two calls in each `step()`: `due` returns whether this step was requested, `answer` passes the save on. Other
ranks hear of a request by a round (`ckpt.core.ranks.save_rounds`), and a rank that had passed the step of a round calls
another. No call here waits for the training loop, another rank or the writer without a deadline.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass, field

from ckpt.core.format.manifest import Attempt
from ckpt.core.ipc.heartbeat import NEVER, OPENING, RESTORING
from ckpt.core.ipc.requests import Persist, SavedInTier
from ckpt.core.ranks.save_rounds import Round, SaveRounds, step_ahead
from ckpt.core.run.progress import Progress, Staged
from ckpt.core.run.saves import Saves
from ckpt.core.run.session import Session
from ckpt.core.run.step_keeper import StepKeeper
from ckpt.errors import CheckpointError, FencedError, PeerError, WriterError
from ckpt.events import log
from ckpt.save import Save

PATIENT_S = 600.0  # for a save that nobody is in a hurry for
LIVE_S = 10.0  # for a copy of the step that an exception came into
PERSIST_S = 60.0  # for what is in memory to become durable, if the other ranks have it too
COPYING_S = 2.0  # for a copy that is under way
GUESS_S = 0.1
PATIENCE_S = 0.5  # for the training loop to come, beyond what its steps take
ROUND_S = 1.0  # for the other ranks to be told
MISSED = 3  # rounds that may be called because some rank was past the step
MOST_WHY = 200  # characters of a reason that other ranks log


@dataclass
class Outcome:
    """What a request has saved. All seconds count from the request.

    saved: steps and where they are ("memory" or a URL), by how they were saved. "agreed": by the training loops;
        "live": staged after an exception in step(); "ring": memory had them already
    staged_s: when memory had what there was to stage; None if the training loops saved a step
    durable_s: when the steps were durable, or had failed; None if the writer was not asked, or did not answer
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


class OutOfTurn:
    """Saves one Checkpointer out of turn. `due`, `answer` and `went_back` belong to the training loop."""

    def __init__(self, session: Session, progress: Progress, staged: Staged, saves: Saves, keeper: StepKeeper) -> None:
        self._session, self._progress, self._staged = session, progress, staged
        self._saves, self._keeper = saves, keeper
        self._world, self._supervisor, self._heartbeat = session.world, session.supervisor, session.heartbeat
        self._turn = threading.Lock()  # of the thread that deals with a request, or with a round of another rank
        self._answers: dict[int, Save] = {}
        self._answered = threading.Condition()
        self._last_due = -1
        self._rounds: SaveRounds | None = None
        self._stopped = False

    def start(self) -> None:
        """Listen to other ranks."""
        if self._world.size > 1:
            self._rounds = self._world.save_rounds(self._on_round)

    def stop(self, timeout_s: float) -> None:
        """Listen no more. A request that is being dealt with is finished first, if it is in time."""
        self._stopped = True
        with self._answered:
            self._answered.notify_all()
        if self._rounds is not None:
            self._rounds.stop()
        if self._turn.acquire(timeout=timeout_s):
            self._turn.release()

    # -- the training loop --

    def due(self, step: int) -> bool:
        """Return True if this step was requested. One comparison with a number in shared memory."""
        at = self._heartbeat.save_at
        if step < at or at == self._last_due:
            return False
        self._last_due = at
        return True

    def went_back(self) -> None:
        """Forget which step was requested, because step numbers come again."""
        self._last_due, self._heartbeat.save_at = -1, NEVER
        with self._answered:
            self._answers.clear()

    def answer(self, save: Save | None) -> None:
        """Pass on the save of the step that was due; None if there was none."""
        with self._answered:
            if save is not None:
                self._answers = {**dict(list(self._answers.items())[-8:]), self._last_due: save}
            self._answered.notify_all()

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
        """Save the newest step that all ranks can have. Return what became of it, in time or soon after.

        why: for the logs of the other ranks
        deadline: by time.monotonic(), None if nobody is in a hurry
        far: what is in memory goes to the tiers behind the nearest one too
        leaving: this process ends after that
        hung: the training loop of some rank stands still
        loop_ended: this is the thread that trains, and it comes to no further step()

        Nothing is saved before the first step: what is in memory or durable then is of an earlier start, and stays.
        """
        outcome, alone = Outcome(), self._world.size == 1
        end = outcome.began + PATIENT_S if deadline is None else deadline
        with contextlib.nullcontext() if loop_ended else self._turn:  # the loop waits for no other request
            if not self._can_save:
                return outcome
            blocked = hung or bool(self._session.dead_ranks)  # somebody's training loop cannot come
            held = self._staged.newest_step(min(COPYING_S, _left(end)))
            ready = held is not None and held == self._heartbeat.step
            # What memory has already need not be waited for, unless all ranks have the time to save the same step.
            ask = not (blocked or loop_ended) and (not ready or not (alone or leaving))
            if ask and self._save_agreed(outcome, why, end, hurried=deadline is not None):
                return outcome
            if not ready and (step := self._stage_last()) is not None:
                outcome.add("live", step, "memory", outcome.passed_s)
            outcome.staged_s = outcome.passed_s
            if not alone and not blocked:
                for _ in range(MISSED):  # until the round is ours, and not another rank's for a step
                    called = self._call_round(-1, why, end)
                    if called is None or called.step < 0:
                        break
            if blocked and leaving and self._supervisor.memory.outlives_us:
                self._note_memory(outcome)  # the writer makes it durable while the launcher starts the next trainer
            else:
                self._persist(outcome, end, far=far)
        return outcome

    def await_copy(self) -> None:
        """Wait for a copy that is under way to be in memory: training went on while the state became durable."""
        if self._can_save:
            self._staged.newest_step(COPYING_S)

    def give_memory_back(self) -> int:
        """Do with one snapshot less. Return how many bytes that frees. With several ranks this one may be a step
        behind, and what is left must still hold a step that all have."""
        if not self._can_save:
            return 0
        stager = self._session.stager
        return stager.give_up_slot() if self._world.size == 1 else stager.give_up_slot(3)

    @property
    def _can_save(self) -> bool:
        return self._heartbeat.step >= 0 and self._heartbeat.state not in (OPENING, RESTORING)

    def _stage_last(self) -> int | None:
        """Stage the last step if an exception came into its step(). Return the step if memory has it.

        Only the thread that trains can do this.
        """
        progress = self._progress
        if threading.get_ident() != progress.thread:
            return None
        self._keeper.stage_last(time.monotonic() + LIVE_S, live=False)
        return progress.step if self._staged.newest_step(0.0) == progress.step else None

    # -- one step of all training loops --

    def _save_agreed(self, outcome: Outcome, why: str, end: float, *, hurried: bool) -> bool:
        """Have the training loops of all ranks save one step; False if they do not come."""
        if (agreed := self._agree(why, end)) is None:
            return False
        ahead, needed_s = agreed
        patience_s = min(_left(end) / 2, 3 * needed_s + PATIENCE_S) if hurried else _left(end)
        patient, tried = time.monotonic() + patience_s, list[Save]()
        while time.monotonic() < patient and not self._stopped:
            with self._answered:  # this step, or one that was called for later
                found = [save for step, save in self._answers.items() if step >= ahead and save not in tried]
                if not found:
                    self._answered.wait(min(1.0, _left(patient)))
                    continue
            tried.append(found[0])
            if self._follow_save(outcome, found[0], end):
                return True
        return False

    def _agree(self, why: str, end: float) -> tuple[int, float] | None:
        """Have the training loops of all ranks save one step. Return it, and how long they usually take until then."""
        for _ in range(MISSED):
            if self._stopped:
                return None
            step, usual_s = self._heartbeat.step, self._usual_s()
            ahead = step + 1
            if self._rounds is not None:
                called = self._call_round(step_ahead(step, usual_s, self._rounds.pause_s), why, end)
                if called is None or called.step < 0:
                    return None
                ahead = called.step
            if self.set_step(ahead):
                return ahead, (ahead - step) * usual_s
            # It was another's round, too early for us: call a later one.
        return None

    def _usual_s(self) -> float:
        """How long a step takes; as long as nobody has learnt that, a guess from what happens now."""
        if usual_s := self._heartbeat.usual_s:
            return usual_s
        before = self._heartbeat.step
        time.sleep(GUESS_S)
        return GUESS_S / max(1, self._heartbeat.step - before)

    def set_step(self, step: int) -> bool:
        """Have the training loop save this step; False if it has passed it already."""
        if self._heartbeat.step < step:
            self._heartbeat.save_at = step
            if self._heartbeat.step < step or self._last_due == step:
                return True
        if not self._saves.is_sent(step):  # else it went to disk in another way
            owner, rank = self._supervisor.owner, self._world.rank
            attempt = Attempt(owner.epoch, step, owner.nonce)
            self._supervisor.writes.retract(attempt, f"rank {rank} had passed step {step} by then")
        return False

    def _follow_save(self, outcome: Outcome, save: Save, end: float) -> bool:
        """Until it is as safe as it gets; False if it failed, perhaps since another rank had passed that step."""
        passed = dict[str, float]()
        try:
            save.staged(_left(end))
            passed["memory"] = outcome.passed_s
            for tier in save.tiers:
                save.committed(_left(end), tier=tier)
                passed[tier] = outcome.passed_s
        except CheckpointError as error:
            log.info("step %d was not saved out of turn: %s", save.step, error)
            return False
        for tier, seconds in passed.items():
            outcome.add("agreed", save.step, tier, seconds)
        outcome.durable_s = outcome.passed_s
        return True

    # -- other ranks --

    def _call_round(self, step: int, why: str, end: float) -> Round | None:
        """Tell the other ranks; None if they cannot be told in time."""
        if self._rounds is None:
            return None
        found: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        rounds = self._rounds

        def post() -> None:
            try:
                found.put(rounds.call(step, why[:MOST_WHY], _left(end)))
            except PeerError as error:
                log.warning("%s", error)
                found.put(None)

        threading.Thread(target=post, name="ckpt-round", daemon=True).start()
        with contextlib.suppress(queue.Empty):
            return found.get(timeout=ROUND_S)
        return None

    def _on_round(self, heard: Round) -> None:
        """Another rank has called; in the thread that heard it. What is quick is done at once."""
        log.info("rank %d asks for a save: %s", heard.rank, heard.why)
        if self._can_save and (heard.step < 0 or not self.set_step(heard.step)):
            end = time.monotonic() + heard.grace_s
            following = threading.Thread(target=self._follow, args=(heard, end), name="ckpt-follow-round", daemon=True)
            following.start()

    def _follow(self, heard: Round, end: float) -> None:
        with self._turn:
            if self._stopped or not self._can_save:
                return
            try:
                if heard.step >= 0:  # we were past that step: call for a later one
                    self._agree(heard.why, end)
                else:  # somebody cannot come: make durable what is in memory
                    self.await_copy()
                    self._persist(Outcome(), end, far=False)
            except Exception:
                log.exception("the request of rank %d could not be dealt with", heard.rank)

    # -- what is in memory --

    def _persist(self, outcome: Outcome, end: float, *, far: bool) -> None:
        """Have the writer make durable what is in memory."""
        before_s = outcome.passed_s
        self._note_memory(outcome)
        deadline_s = min(_left(end), PERSIST_S)
        try:
            with self._supervisor.held.holding_still(alone=self._world.size == 1) as attempts:
                request = Persist(deadline_s, far, [str(attempt) for attempt in attempts])
                saved = self._supervisor.client.ask(request, deadline_s + 1.0)
        except CheckpointError as error:
            if not isinstance(error, FencedError):  # which was said
                log.warning("what is in memory is not durable: %s", error)
            return
        for one in saved:
            outcome.add("ring", one.step, one.tier, before_s + one.seconds, one.error)
        outcome.durable_s = outcome.passed_s

    def _note_memory(self, outcome: Outcome) -> None:
        if isinstance(self._supervisor.writer.failure, WriterError):
            return  # there is no writer any more, and memory ends with us
        known = {saved.step for saved in outcome.saved.get("live", ())}
        steps = sorted((attempt.step for attempt in self._supervisor.held.sealed()), reverse=True)
        wanted = steps[:1] if self._world.size == 1 else steps  # of several ranks the newest may not be common
        for step in wanted:
            if step not in known:
                outcome.add("ring", step, "memory", outcome.passed_s)


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())
