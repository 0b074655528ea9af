"""Who wants to know what the trainer does: its ledger, its status, and metrics. What it says of itself goes to each."""

from __future__ import annotations

from ckpt.faults.report import Fault
from ckpt.goodput.ledger import Decision
from ckpt.ipc import watch_requests as watch
from ckpt.ipc.requests import Json
from ckpt.metrics import Metrics
from ckpt.telemetry.exporter import Exporter
from ckpt.writer.dispatch import Caller, handles, handles_caller
from ckpt.writer.held_run import HeldRun
from ckpt.writer.present_trainer import PresentTrainer
from ckpt.writer.watch.bookkeeper import Bookkeeper
from ckpt.writer.watch.status import StatusServer


class Observers:
    """Everything runs in the writer's event loop."""

    def __init__(self, trainer: PresentTrainer, run: HeldRun, books: Bookkeeper, status: StatusServer) -> None:
        self._trainer, self._run, self.books, self.status = trainer, run, books, status
        self.exporter = Exporter(status.look, trainer.say, status.metrics_at)

    @handles_caller(watch.KeepBooks)
    def keep_books(self, request: watch.KeepBooks, caller: Caller) -> None:
        self.books.begin(request, caller.fds, self._trainer.pid)

    @handles_caller(watch.Show)
    async def show(self, request: watch.Show, caller: Caller) -> None:
        self.status.begin(request, caller.fds, self._trainer.pid)
        metrics = None if request.metrics is None else Metrics(**request.metrics)
        await self.exporter.begin(metrics, request.rank, request.local_rank)

    @handles(watch.Look)
    async def look(self, request: watch.Look) -> Json:
        return (await self.status.look()).to_json()

    @handles(watch.RestoreDone)
    def restored(self, request: watch.RestoreDone) -> None:
        self.books.restored(request)
        self.status.restored(request)

    @handles(watch.SetCadence)
    def set_cadence(self, request: watch.SetCadence) -> None:
        for tier in self._run.tiers:
            tier.set_every(int(request.decision["every"].get(tier.url, tier.every)))
        self.books.decided(Decision(**request.decision))

    def fault(self, fault: Fault) -> None:
        """One that was seen, by the trainer or by us."""
        self.books.fault(fault)
        self.status.fault(fault)

    def ended(self, how: str) -> None:
        """The trainer has "died", "left" or "closed"."""
        self.status.ended()
        self.books.ended(how)
