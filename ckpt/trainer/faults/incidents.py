"""What was seen and is to be dealt with."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.faults.report import Fault
from ckpt.ipc.notes import HangNote
from ckpt.ranks.world import World
from ckpt.trainer.supervise.writer_supervisor import WriterSupervisor

SOFT_S = 600.0  # for a save that nobody is in a hurry for


@dataclass
class FaultCall:
    """Something that was seen. `grace_s`: from `seen` on; `leave`: the exit code, None to go on."""

    fault: Fault
    grace_s: float
    leave: int | None = None
    far: bool = False  # the machine may go: to tiers beyond the nearest as well
    signal: int = 0
    note: HangNote | None = None  # of a hang
    seen: float = field(default_factory=time.monotonic)

    @property
    def hurried(self) -> bool:
        return self.grace_s < SOFT_S

    @property
    def left_s(self) -> float:
        return max(0.0, self.seen + self.grace_s - time.monotonic())

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.seen


class Incidents:
    """Of one trainer, in turn. `leaving`: it ends of one of them, what comes now is a consequence; `stopped`: nothing
    is dealt with any more; `error`: what ends the training; `dead_peers`: other ranks that have died, and of what."""

    def __init__(self, world: World, supervisor: WriterSupervisor) -> None:
        self._world, self._supervisor = world, supervisor
        self.queue: queue.SimpleQueue[FaultCall | Callable[[], None] | None] = queue.SimpleQueue()
        self.leaving = self.stopped = False
        self.error: BaseException | None = None
        self.dead_peers: dict[int, str] = {}

    @property
    def me(self) -> str:
        return f"rank {self._world.rank}" if self._world.size > 1 else "the trainer"

    def new(self, kind: str, summary: str, *, how: str, grace_s: float) -> FaultCall:
        owner = self._supervisor.owner
        fault = Fault(kind, summary, how=how, rank=self._world.rank, world=self._world.size)
        fault.attempt = f"{owner.epoch}.{owner.nonce}"
        return FaultCall(fault, grace_s)

    def request(self, summary: str, *, how: str) -> None:
        """Somebody asks for a save."""
        call = self.new("request", summary, how=how, grace_s=SOFT_S)
        call.fault.advice, call.far = "none", True
        self.queue.put(call)
