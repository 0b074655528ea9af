"""What a run holds while it is open: made in one go, so that whatever comes in between undoes it again."""

from __future__ import annotations

import contextlib
import platform
import time
from typing import Any

import torch

from ckpt import __version__
from ckpt.errors import SaveError
from ckpt.format.partition import Seat
from ckpt.ipc import channel
from ckpt.ipc.heartbeat import Heartbeat
from ckpt.ipc.notes import CadenceNote, DamagedNote
from ckpt.ipc.watch_requests import KeepBooks, Show
from ckpt.state.capture import Capture
from ckpt.trainer.background_errors import BackgroundErrors
from ckpt.trainer.cadence_sync import CadenceSync
from ckpt.trainer.ownership import Ownership
from ckpt.trainer.redo import RedoClient
from ckpt.trainer.settings import Settings
from ckpt.trainer.staging.device import memory_node
from ckpt.trainer.staging.optimizer_hooks import UpdateHook
from ckpt.trainer.staging.stage import Stager
from ckpt.trainer.stalls import Stalls
from ckpt.trainer.supervise.writer_supervisor import WriterSupervisor


class Session:
    """Of one Checkpointer. `undo` ends everything again if the rest of opening it fails."""

    def __init__(self, settings: Settings, state: dict[str, Any], takeover: bool, undo: contextlib.ExitStack) -> None:
        self.settings, self.world = settings, settings.world
        self.memory, self.tiers = settings.memory, settings.tiers
        self.began = time.monotonic()
        self.ends = undo.enter_context(contextlib.ExitStack())  # what is stopped when this is closed
        self.errors = BackgroundErrors(settings.on_error)
        self.heartbeat = Heartbeat.create()
        self.stager = Stager(settings.stage, settings.bus_share)
        undo.callback(self.stager.stop)
        self.ownership = Ownership(self.world, self.tiers, self.memory, settings.url, settings.busy_timeout_s)
        self.supervisor = self.ownership.open(lambda: self._prepare(state, takeover))
        undo.callback(self.supervisor.give_up)
        self.supervisor.hear(DamagedNote, self._on_damaged)
        self.supervisor.on_failure = self.errors.note
        self.errors.fenced = self.supervisor.lost  # while it was opened
        self.cadence = CadenceSync(
            self.world, self.supervisor, self.heartbeat, self.memory, self.tiers, self.ownership.cadence
        )
        self.ends.callback(self.cadence.stop)
        self.stalls = Stalls(self.stager, self.heartbeat, settings.busy_timeout_s)
        self.hook = UpdateHook(self.stalls.before_update, self.capture.unguard, self.capture.concerns)
        self.ends.callback(self.hook.remove)
        logging_tiers = {i: tier.url for i, tier in enumerate(self.tiers) if tier.log_every_step}
        self.redo = RedoClient(logging_tiers, self.supervisor, self.stager, self.capture, self.errors.note)
        self.hook.on_step = self.redo.watch.note if logging_tiers else None

    def _prepare(self, state: dict[str, Any], takeover: bool) -> WriterSupervisor:
        self.capture = Capture(state, Seat(self.world.rank, self.world.size))
        node = memory_node(self.capture.read().tensors)  # what cannot be saved is said now
        key, timeout_s = channel.run_key(self.settings.url, self.world.local_rank), self.settings.busy_timeout_s
        return WriterSupervisor(key, self.tiers, self.memory, self.stager, self.world, timeout_s, takeover, node)

    def fits(self, data_size: int, values_size: int) -> bool:
        """Whether there is memory for a snapshot of that many bytes."""
        arena = self.stager.arena
        return arena is not None and arena.fits(data_size, values_size)

    def introduce(self) -> None:
        """Have the writer keep the ledger, say what we do to whoever asks, and make memory."""
        self._keep_books()
        self._show()
        if not self.ownership.has_checkpoints:  # else after restore(), which has better use for the cores
            self.supervisor.memory.prepare(_predicted_size(self.capture), 1 << 14)

    def _show(self) -> None:
        """Whoever wants to know what we do asks the writer: `ckpt top`, and metrics."""
        seat, metrics = (self.world.rank, self.world.size, self.world.local_rank), self.settings.metrics
        request = Show(
            self.settings.url,
            *seat,
            opening=self.began,
            opened=time.monotonic(),
            metrics=None if metrics is None else metrics.to_json(),
        )
        self.supervisor.show(request, (self.heartbeat.fd,))

    def _keep_books(self) -> None:
        """The writer of the rank that speaks for the nearest tier keeps the ledger: `ckpt.writer.watch.bookkeeper`."""
        if self.supervisor.roles[0].place > 0 if self.tiers else self.world.rank > 0:
            return
        owner = self.supervisor.owner
        request = KeepBooks(
            epoch=f"{owner.epoch}.{owner.nonce}",
            rank=self.world.rank,
            world=self.world.size,
            url=self.settings.url,
            opening=self.began,
            opened=time.monotonic(),
            places=self.cadence.places(),
            versions={"everystep": __version__, "torch": torch.__version__, "python": platform.python_version()},
            decides=self.world.rank == 0,
            cadence=self.cadence.began,
        )
        self.supervisor.hear(CadenceNote, self.cadence.propose)
        self.supervisor.keep_books(request, (self.heartbeat.fd,))

    def _on_damaged(self, note: DamagedNote) -> None:
        problems = "; ".join(note.problems)
        self.errors.note(
            SaveError(
                f"step {note.step} in {note.tier} is damaged on disk: {problems}. Training can go on: the next "
                f"checkpoint does not build on it. `ckpt repair {note.tier}` says what can be mended"
            )
        )


def _predicted_size(capture: Capture) -> int:
    """Bytes of a snapshot once the optimizers have their state: so that memory can be made before the first step."""
    layout = capture.read().layout
    staged: dict[str, int] = {}
    for tensor in layout.tensors:
        staged[tensor.name] = staged.get(tensor.name, 0) + tensor.nbytes
    size = sum(staged.values())
    for optimizer in capture.optimizers:
        if optimizer.state:
            continue
        copies = 2
        if isinstance(optimizer, torch.optim.SGD):
            copies = int(any(group["momentum"] for group in optimizer.param_groups))
        elif any(group.get("amsgrad") for group in optimizer.param_groups):
            copies = 3
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        size += sum(copies * staged.get(capture.name_of(p), 0) + 64 for p in params)
    return size
