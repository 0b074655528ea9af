"""Having the newest state saved that all ranks can have, within the time that is left.

agree on a step that all training loops save, or take what is in memory -> have the writer make it durable
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from ckpt.core.format.manifest import Attempt
from ckpt.core.ipc.heartbeat import NEVER, OPENING, RESTORING
from ckpt.core.ipc.requests import Persist
from ckpt.core.ranks.save_rounds import Round, SaveRounds, step_ahead
from ckpt.core.run.progress import Progress, Staged
from ckpt.core.run.saves import Saves
from ckpt.core.run.session import Session
from ckpt.core.run.step_keeper import StepKeeper
from ckpt.errors import CheckpointError, FencedError, PeerError, WriterError
from ckpt.events import log
from ckpt.guard.incidents import FaultCall, Incidents
from ckpt.guard.report import SavedStep
from ckpt.save import Save

LIVE_S = 10.0  # for a copy of the step that an exception came into
PERSIST_S = 60.0  # for what is in memory to become durable, if the other ranks have it too
COPYING_S = 2.0  # for a copy that is under way
GUESS_S = 0.1
PATIENCE_S = 0.5  # for the training loop to come, beyond what its steps take
ROUND_S = 1.0  # for the other ranks to be told
MISSED = 3  # rounds that may be called because some rank was past the step


class LiveRun:
    """What may be done to a run when there is a fault. Any thread may call it, and none of it hangs."""

    def __init__(self, session: Session, progress: Progress, staged: Staged, saves: Saves, keeper: StepKeeper) -> None:
        self._session, self._progress = session, progress
        self._staged, self._saves, self._keeper = staged, saves, keeper

    def in_memory(self, timeout_s: float) -> int | None:
        """The newest step that memory holds; waits for a copy that is under way."""
        return self._staged.newest_step(timeout_s)

    def stage_last(self) -> int | None:
        """Stage the last step if an exception came into its step(). Return the step if memory has it.

        Only the thread that trains can do this.
        """
        progress = self._progress
        if threading.get_ident() != progress.thread:
            return None
        self._keeper.stage_last(time.monotonic() + LIVE_S, live=False)
        return progress.step if self.in_memory(0.0) == progress.step else None

    def give_up(self, attempt: Attempt) -> None:
        """This rank will not take part in an attempt that others may have begun."""
        if not self._saves.is_sent(attempt.step):
            rank = self._session.world.rank
            self._session.supervisor.writes.retract(attempt, f"rank {rank} had passed step {attempt.step} by then")

    def give_memory_back(self) -> int:
        """Do with one snapshot less; how many bytes that is. Of several ranks one may be a step behind: what is left
        must still hold a step that all have."""
        stager = self._session.stager
        return stager.give_up_slot() if self._session.world.size == 1 else stager.give_up_slot(3)


class Securer:
    """Of one trainer. `due`, `went_back` and `answer` are for the training loop."""

    def __init__(self, actions: LiveRun, incidents: Incidents) -> None:
        self._actions, self._incidents = actions, incidents
        self._world, self._supervisor, self._heartbeat = incidents.world, incidents.supervisor, incidents.heartbeat
        self._answers: dict[int, Save] = {}
        self._answered = threading.Condition()
        self._last_due = -1
        self._rounds: SaveRounds | None = None

    def start(self) -> None:
        """Listen to other ranks."""
        if self._world.size > 1:
            self._rounds = self._world.save_rounds(self._on_round)

    def stop(self) -> None:
        with self._answered:
            self._answered.notify_all()
        if self._rounds is not None:
            self._rounds.stop()

    # -- the training loop --

    def due(self, step: int) -> bool:
        """Whether this step is to be saved out of turn. One comparison with a number in shared memory."""
        at = self._heartbeat.save_at
        if step < at or at == self._last_due:
            return False
        self._last_due = at
        return True

    def went_back(self) -> None:
        """Step numbers come again: what was due is not due any more."""
        self._last_due, self._heartbeat.save_at = -1, NEVER
        with self._answered:
            self._answers.clear()

    def answer(self, save: Save | None) -> None:
        """The step that was due has been saved."""
        with self._answered:
            if save is not None:
                self._answers = {**dict(list(self._answers.items())[-8:]), self._last_due: save}
            self._answered.notify_all()

    # -- a fault --

    @property
    def can_save(self) -> bool:
        """Not before the first step: what is in memory or durable then is of an earlier incarnation, and stays."""
        return self._heartbeat.step >= 0 and self._heartbeat.state not in (OPENING, RESTORING)

    def secure(self, call: FaultCall, *, leaving: bool, at_hand: bool = False) -> None:
        """Have the newest state saved that all ranks can have. `at_hand`: this is the thread that trains."""
        fault, alone = call.fault, self._world.size == 1
        blocked = bool(self._incidents.dead_peers) or fault.kind == "hang"  # somebody's training loop cannot come
        for summary in self._incidents.dead_peers.values():
            fault.summary += f" (before that: {summary})"
        held = self._actions.in_memory(min(COPYING_S, call.left_s))
        ready = held is not None and held == self._heartbeat.step
        # What memory has already need not be waited for, unless all ranks should save the same step in their own time.
        ask = not ready or not (alone or leaving)
        if ask and not blocked and not at_hand and self._agree(call):
            return
        if not ready and (step := self._actions.stage_last()) is not None:
            fault.saved.append(SavedStep(step, "memory", "live", call.passed_s))
        fault.timings["staged_s"] = call.passed_s
        if not alone and not blocked:
            for _ in range(MISSED):  # until the round is ours, and not another rank's for a step
                called = self._call_round(call, -1)
                if called is None or called.step < 0:
                    break
        if blocked and leaving and self._supervisor.memory.outlives_us:
            self._note_memory(call)  # the writer makes it durable while the launcher starts the next trainer
        else:
            self._persist(call)

    def await_copy(self) -> None:
        """Training went on while the state became durable: a copy that is under way gets into memory."""
        if self.can_save:
            self._actions.in_memory(COPYING_S)

    def free_memory(self, call: FaultCall) -> None:
        """Of the host, where little is left."""
        if self.can_save:
            with contextlib.suppress(CheckpointError):
                freed = self._actions.give_memory_back()
                call.fault.summary += f"; gave {freed / 2**20:.0f} MiB of snapshots back" if freed else ""

    # -- one step of all training loops --

    def _agree(self, call: FaultCall) -> bool:
        """Have the training loops of all ranks save one step; False if they do not come."""
        for _ in range(MISSED):
            if self._incidents.stopped:
                return False
            step, usual_s = self._heartbeat.step, self._usual_s()
            ahead = step + 1
            if self._rounds is not None:
                called = self._call_round(call, step_ahead(step, usual_s, self._rounds.pause_s))
                if called is None or called.step < 0:
                    return False
                ahead = called.step
            if not self.set_step(ahead):
                continue  # another's round, too early for us: call a later one
            patience_s = call.left_s
            if call.hurried:
                patience_s = min(call.left_s / 2, 3 * (ahead - step) * usual_s + PATIENCE_S)
            return self._await_answer(call, ahead, patience_s)
        return False

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
        owner = self._supervisor.owner
        self._actions.give_up(Attempt(owner.epoch, step, owner.nonce))
        return False

    def _await_answer(self, call: FaultCall, ahead: int, patience_s: float) -> bool:
        """Until this step, or one that was called for later, is saved."""
        end, tried = time.monotonic() + patience_s, list[Save]()
        while time.monotonic() < end and not self._incidents.stopped:
            with self._answered:
                found = [save for step, save in self._answers.items() if step >= ahead and save not in tried]
                if not found:
                    self._answered.wait(min(1.0, max(0.0, end - time.monotonic())))
                    continue
            tried.append(found[0])
            if self._follow_save(call, found[0]):
                return True
        return False

    def _follow_save(self, call: FaultCall, save: Save) -> bool:
        """Until it is as safe as it gets; False if it failed, perhaps since another rank had passed that step."""
        saved: list[SavedStep] = []
        try:
            save.staged(call.left_s)
            saved.append(SavedStep(save.step, "memory", "agreed", call.passed_s))
            for tier in save.tiers:
                save.committed(call.left_s, tier=tier)
                saved.append(SavedStep(save.step, tier, "agreed", call.passed_s))
        except CheckpointError as error:
            log.info("step %d was not saved out of turn: %s", save.step, error)
            return False
        call.fault.saved += saved
        call.fault.timings["durable_s"] = call.passed_s
        return True

    # -- other ranks --

    def _call_round(self, call: FaultCall, step: int) -> Round | None:
        """Tell the other ranks; None if they cannot be told in time."""
        if self._rounds is None:
            return None
        found: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        rounds = self._rounds

        def post() -> None:
            try:
                found.put(rounds.call(step, call.fault.kind, call.fault.summary[:200], call.left_s))
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
        if heard.step < 0:
            self._incidents.queue.put(lambda: self._follow_ring(heard))
        elif self.can_save and not self.set_step(heard.step):
            self._incidents.queue.put(lambda: self._follow_later(heard))

    def _follow_ring(self, heard: Round) -> None:
        """Somebody cannot come: make durable what is in memory."""
        if self.can_save:
            self.await_copy()
            self._persist(self._call_of(heard))

    def _follow_later(self, heard: Round) -> None:
        """We were past that step: call for a later one."""
        self._agree(self._call_of(heard))

    def _call_of(self, heard: Round) -> FaultCall:
        return self._incidents.new(heard.kind, heard.why, how=f"rank {heard.rank}", grace_s=heard.grace_s)

    # -- what is in memory --

    def _persist(self, call: FaultCall) -> None:
        """Have the writer make durable what is in memory."""
        before_s = call.passed_s
        self._note_memory(call)
        deadline_s = min(call.left_s, PERSIST_S)
        try:
            with self._supervisor.held.holding_still(alone=self._world.size == 1) as attempts:
                request = Persist(deadline_s, call.far, [str(attempt) for attempt in attempts])
                saved = self._supervisor.client.ask(request, deadline_s + 1.0)
        except CheckpointError as error:
            if not isinstance(error, FencedError):  # which was said
                log.warning("what is in memory is not durable: %s", error)
            return
        for one in saved:
            call.fault.saved.append(SavedStep(one.step, one.tier, "ring", before_s + one.seconds, one.error))
        call.fault.timings["durable_s"] = call.passed_s

    def _note_memory(self, call: FaultCall) -> None:
        if isinstance(self._supervisor.writer.failure, WriterError):
            return  # there is no writer any more, and memory ends with us
        known = {saved.step for saved in call.fault.saved if saved.tier == "memory"}
        steps = sorted((attempt.step for attempt in self._supervisor.held.sealed()), reverse=True)
        wanted = steps[:1] if self._world.size == 1 else steps  # of several ranks the newest may not be common
        call.fault.saved += [SavedStep(s, "memory", "ring", call.passed_s) for s in wanted if s not in known]
