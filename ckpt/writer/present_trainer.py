"""Our trainer, as its writer knows it: who it is, what it is told, what became of it, and who lost the run before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import psutil

from ckpt import events
from ckpt.errors import FencedError
from ckpt.ipc import channel as link
from ckpt.ipc.channel import Channel
from ckpt.ipc.notes import FencedNote, SaidNote
from ckpt.ipc.process import Process
from ckpt.ipc.protocol import Note


class PresentTrainer:
    """The trainer of the run that this writer works for, or worked for until it died, left or lost the run."""

    def __init__(self, channel: Channel | None, process: Process) -> None:
        self.adoptions = 0  # trainers that have taken this writer over
        self._losers: dict[Channel, str] = {}  # who has lost the run to another trainer, and what they are told
        self._lost_by: list[Process] = []  # the same, and those that our trainer knows of
        self._begin(channel, process)

    def _begin(self, channel: Channel | None, process: Process) -> None:
        self.channel, self.process = channel, process
        self.since = time.time()
        self.dead = False  # whether nothing more is to come from it
        self.left = False  # whether it lives, and has said that it is done
        self.closed = False  # whether it waits no longer for what is unfinished
        self.announced = False  # whether it has said that, and why, it is about to end
        self.dispossessed = False  # whether it has lost the run, and lives

    @property
    def pid(self) -> int:
        return self.process.pid

    def adopted_by(self, channel: Channel, process: Process) -> None:
        """This is our trainer from now on."""
        self.adoptions += 1
        self._begin(channel, process)

    def disown(self) -> None:
        """What it has asked for, and is under way, must not change whose run it is any more."""
        self.adoptions += 1
        self.closed = False

    def dispossess(self, text: str) -> None:
        """It has lost the run, and is told so whenever it asks for something."""
        self.fenced(text)
        if self.channel is not None:
            self._losers[self.channel], self.channel = text, None
        self.dead = self.announced = self.dispossessed = True
        self.disown()

    # -- what it is told --

    def tell(self, note: Note) -> None:
        """If it is there."""
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(note)

    def say(self, text: str) -> None:
        """For its log, and ours."""
        events.log.warning("%s", text)
        self.tell(SaidNote(text))

    def fenced(self, text: str) -> None:
        """It has lost the run."""
        events.log.warning("%s", text)
        self.tell(FencedNote(text))

    # -- connections --

    def hung_up(self, channel: Channel) -> None:
        """End-of-file is never evidence of death: the pidfd and the mutex are."""
        self._losers.pop(channel, None)
        if channel is self.channel:
            self.channel = None

    def check_not_lost(self, channel: Channel) -> None:
        """FencedError for a trainer that has lost the run."""
        if channel in self._losers:
            raise FencedError(self._losers[channel])

    def knows_losers(self, pids: Iterable[int]) -> None:
        """These have lost the run too, says a trainer."""
        self._lost_by += map(Process.of, pids)

    def losers(self, trainer: Process) -> list[int]:
        """Who has lost this run, and lives: each is told when it looks, and none trains it any more. `trainer`: the one
        that has it, or is about to."""
        self._lost_by += [Process.of(link.peer_pid(loser.sock)) for loser in self._losers]
        self._lost_by = [one for one in dict.fromkeys(self._lost_by) if one.alive and one != trainer]
        return [one.pid for one in self._lost_by]

    # -- what became of it --

    def state(self) -> str:
        """As `ckpt.telemetry.status.RankStatus` says it."""
        if self.closed:
            return "closed"
        try:
            status = psutil.Process(self.pid).status()
        except psutil.Error:
            return "dead"
        if not self.process.alive:
            return "dead"
        if self.dead:
            return "left"
        return "frozen" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"
