"""The trainer's side of `every="auto"`: a cadence that the writer of rank 0 proposes becomes that of all ranks.

All ranks must save the same steps, and no rank may wait for another. So a change takes three words in the job's
key-value store, which threads of all ranks exchange while the training goes on:

    ask      rank 0: this is the new cadence
    heard    every rank: I know of it, and am at that step
    go       rank 0, when all have heard: from this step on, which lies ahead of all of them; or: never mind

A rank that is told too late all the same takes back what it has saved, or not saved, by the old cadence meanwhile; that
is no error. At a restore, which all ranks come to, they agree on the last change of which any of them was told.
"""

from __future__ import annotations

import math
import threading
from dataclasses import asdict
from typing import Any

from ckpt.core.cadence import cadence
from ckpt.core.cadence.cadence import MEMORY, Change, Schedule
from ckpt.core.cadence.ledger import Decision
from ckpt.core.format.manifest import Attempt
from ckpt.core.ipc.heartbeat import Heartbeat
from ckpt.core.ipc.notes import CadenceNote
from ckpt.core.ipc.watch_requests import CadenceOf, SetCadence
from ckpt.core.ranks.world import Mailbox, World, together
from ckpt.core.run.supervise.writer_supervisor import WriterSupervisor
from ckpt.errors import CheckpointError, DeadlineError
from ckpt.events import log
from ckpt.store import folder_of
from ckpt.subscribers import publish
from ckpt.tiers import Memory, Tier

LOOK_S, LOOKS_PER_S = 0.5, 2000  # between two looks; of all ranks together
AGAIN_S = 30.0  # at the most, where the store does not answer
HEAR_S = 120.0  # for all ranks to hear of a change; else it is dropped
AHEAD_S, AHEAD = 5.0, 10  # seconds and steps, by which a change lies ahead of the rank that is farthest
TOO_LATE = "heard too late of a new cadence"


class CadenceSync:
    """Of one Checkpointer. `schedule` is what it saves by."""

    def __init__(
        self,
        world: World,
        supervisor: WriterSupervisor,
        heartbeat: Heartbeat,
        memory: Memory | None,
        tiers: list[Tier],
        known: dict[str, Any],
    ) -> None:
        """`known`: by place, what an earlier incarnation saved by; see `ckpt.core.run.ownership`."""
        self._world, self._supervisor, self._heartbeat = world, supervisor, heartbeat
        self._memory, self._tiers = memory, tiers
        self._auto = any(isinstance(one.every, cadence.Auto) for one in (memory, *tiers) if one is not None)
        every = dict(known.get("every") or {})
        first = [_first(tier.every, every.get(tier.url), cadence.FIRST_DURABLE) for tier in tiers]
        steps = _first(memory.every, every.get(MEMORY), cadence.FIRST_MEMORY) if memory is not None else 0
        self.schedule = Schedule(steps, first)
        self.began = known if self._auto and known else None
        self._number = 0  # of the change that is next
        self._heard = -1  # the last one of which this rank has said so
        self._lock, self._proposing = threading.RLock(), threading.Lock()
        self._stopped = threading.Event()
        self._mail: Mailbox | None = None
        if self._auto and world.size > 1:
            self._mail = world.mailbox()
            if world.rank > 0:
                threading.Thread(target=self._listen, name="ckpt-cadence-sync", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def places(self) -> list[CadenceOf]:
        """What the writer is to decide about; see `ckpt.core.writer.bookkeeper`."""
        now = self.schedule.newest
        found: list[CadenceOf] = []
        if self._memory is not None:
            found.append(CadenceOf(MEMORY, _wire(self._memory.every), now.memory, False))
        for tier, every in zip(self._tiers, now.tiers, strict=True):
            remote = folder_of(tier.url) is None
            found.append(CadenceOf(tier.url, _wire(tier.every), every, remote))
        return found

    # -- rank 0 --

    def propose(self, note: CadenceNote) -> None:
        """From our writer; called by the thread that listens to it, which must not wait."""
        threading.Thread(target=self._propose, args=(note.decision,), name="ckpt-cadence-sync", daemon=True).start()

    def _propose(self, data: dict[str, Any]) -> None:
        if not self._proposing.acquire(blocking=False):
            return  # one after the other; it will be proposed again
        try:
            if self._mail is None:
                with self._lock:
                    self._apply(Decision(**data), self._heartbeat.step + 1)
            else:
                self._agree(self._mail, Decision(**data))
        except CheckpointError as error:
            log.info("the cadence stays as it is: %s", error)
        finally:
            self._proposing.release()

    def _agree(self, mail: Mailbox, decision: Decision) -> None:
        number = self._number
        mail.put(f"cadence/ask/{number}", asdict(decision))
        step = -1
        try:
            steps = mail.wait([f"cadence/heard/{number}/{rank}" for rank in range(1, self._world.size)], HEAR_S)
            fastest_s = (decision.step_s or self._heartbeat.usual_s) / 2
            ahead = AHEAD + (math.ceil(AHEAD_S / fastest_s) if fastest_s > 0 else 0)
            step = max([self._heartbeat.step, *map(int, steps)]) + ahead
        except DeadlineError as error:
            log.info("the cadence stays as it is: %s", error)
        with self._lock:
            if number != self._number:  # a restore came between
                step = -1
            while not self._stopped.is_set():  # whether or not it was put, the same may be put again
                try:
                    mail.put(f"cadence/go/{number}", step)
                    break
                except CheckpointError:
                    self._stopped.wait(LOOK_S)
            if number == self._number:
                self._number += 1
                if step >= 0:
                    self._apply(decision, step)

    # -- the others --

    def _listen(self) -> None:
        usual_s = max(LOOK_S, self._world.size / LOOKS_PER_S)
        pause_s = usual_s
        while not self._stopped.wait(pause_s):
            try:
                self._hear()
                pause_s = usual_s
            except CheckpointError as error:
                if pause_s == usual_s:
                    log.info("whether the cadence changes cannot be heard: %s", error)
                pause_s = min(2 * pause_s, AGAIN_S)
            except (TypeError, ValueError) as error:
                log.warning("a cadence that rank 0 proposes is not understood: %r", error)
                pause_s = AGAIN_S

    def _hear(self) -> None:
        mail, number = self._mail, self._number
        assert mail is not None
        if not mail.poll([f"cadence/ask/{number}"]):
            return
        if self._heard != number:
            mail.put(f"cadence/heard/{number}/{self._world.rank}", self._heartbeat.step)
            self._heard = number
        if not mail.poll([f"cadence/go/{number}"]):
            return
        data, step = mail.wait([f"cadence/ask/{number}", f"cadence/go/{number}"], HEAR_S)
        with self._lock:
            if number == self._number:
                self._number += 1
                if step >= 0:
                    self._apply(Decision(**data), int(step))

    # -- all --

    def settle(self) -> None:
        """Before a restore, to which all ranks come: from now on, whatever the step, the last change holds."""
        with self._lock:
            newest = self.schedule.newest
            if self._mail is not None:
                mine = [self._number, newest.memory, list(newest.tiers)]
                number, memory, tiers = together(self._world, "cadence_sync", lambda: mine, max)
                self._number = number
                newest = Change(-1, memory, tuple(tiers))
            self.schedule = Schedule(newest.memory, newest.tiers)

    def _apply(self, decision: Decision, step: int) -> None:
        old, passed = self.schedule.at(step), self._heartbeat.step
        tiers = zip(self._tiers, old.tiers, strict=True)
        change = Change(
            step,
            decision.every.get(MEMORY, old.memory),
            tuple(decision.every.get(tier.url, every) for tier, every in tiers),
        )
        decision.step = step
        self.schedule.change(change)
        if self._world.size > 1 and passed >= step:
            self._take_back(old, change, passed)
        if self._world.rank == 0:
            log.info("from step %d on: %s", step, "; ".join(cadence.lines(decision)))
        self._supervisor.standing.tell(SetCadence(asdict(decision)))
        publish("decided", step, every=dict(decision.every), why=dict(decision.why))

    def _take_back(self, old: Change, new: Change, passed: int) -> None:
        """Steps that the other ranks save and we did not, or the other way round."""
        owner = self._supervisor.owner
        for step in range(new.step, passed + 1):
            if any((step % a == 0) != (step % b == 0) for a, b in zip(old.tiers, new.tiers, strict=True)):
                attempt = Attempt(owner.epoch, step, owner.nonce)
                self._supervisor.writes.retract(attempt, f"rank {self._world.rank} {TOO_LATE}")


def _first(every: Any, known: Any, default: int) -> int:
    if not isinstance(every, cadence.Auto):
        return int(every)
    return known if type(known) is int and known >= 1 else default


def _wire(every: Any) -> int | tuple[float, float | None, float | None]:
    return (every.budget, every.mtbf_s, every.every_s) if isinstance(every, cadence.Auto) else int(every)
