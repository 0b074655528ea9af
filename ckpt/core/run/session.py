"""What a run was asked for, and holds while it is open: made in one go, so that what comes in between undoes it."""

from __future__ import annotations

import contextlib
import functools
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from ckpt.best import Best
from ckpt.core.cadence.cadence import Auto
from ckpt.core.checkpoint.concurrent import run
from ckpt.core.checkpoint.identity import Identity, identify
from ckpt.core.format.partition import Seat
from ckpt.core.ipc import channel
from ckpt.core.ipc.heartbeat import Heartbeat
from ckpt.core.ipc.notes import CadenceNote, DamagedNote, PeerDiedNote
from ckpt.core.ipc.watch_requests import KeepBooks, Show
from ckpt.core.ranks.orders import Orders
from ckpt.core.ranks.world import World
from ckpt.core.run.ownership import Ownership
from ckpt.core.run.save_plan import Intervals
from ckpt.core.run.supervise.writer_supervisor import WriterSupervisor
from ckpt.core.run.unsaved_optimizers import UnsavedOptimizers
from ckpt.core.snapshot.device import memory_node, traced
from ckpt.core.snapshot.stage import Stager
from ckpt.core.snapshot.update_gate import UpdateHook
from ckpt.core.state.capture import Capture
from ckpt.errors import CheckpointError, FencedError, InvalidArgumentError, SaveError
from ckpt.events import log
from ckpt.metrics import Metrics
from ckpt.options import Options
from ckpt.saving import Save
from ckpt.tiers import Memory, Tier, as_tiers
from ckpt.version import VERSION


@dataclass(frozen=True)
class Settings:
    """`url`: of the nearest tier, by which the run is found; "memory:NAME" if there is memory only."""

    world: World
    memory: Memory | None
    tiers: list[Tier]
    url: str
    on_busy: str
    on_error: str
    busy_timeout_s: float
    close_timeout_s: float
    metrics: Metrics | None
    best: Best | None

    @classmethod
    def checked(
        cls,
        tiers: object,
        memory: object,
        every: int | str | Auto | None,
        keep: object,
        best: Best | None,
        options: Options,
    ) -> Settings:
        """Check the arguments of a Checkpointer. Raises InvalidArgumentError before anything is created."""
        if not isinstance(options, Options):
            raise InvalidArgumentError(f"options={options!r}: it must be ckpt.Options(...)")
        held, durable = as_tiers(tiers, memory, every, keep)
        if not durable and options.name is None:
            raise InvalidArgumentError(
                "a run in memory only needs a name by which it is found again: options=ckpt.Options(name=...)"
            )
        if best is not None and not (isinstance(best, Best) and durable):
            raise InvalidArgumentError(
                f'best={best!r}: it must be a ckpt.Best("val_loss"), and the run needs a folder or URL'
            )
        world = World.detect(channel.node_id(), timeout_s=options.agree_timeout_s)
        if options.on_busy == "skip" and world.size > 1:
            raise InvalidArgumentError(
                'on_busy="skip" needs a single rank: a rank that skips alone leaves no step that all ranks have'
            )
        assert not isinstance(options.metrics, int)
        if options.metrics is not None:
            options.metrics.port(world.local_rank)
        return cls(
            world=world,
            memory=held,
            tiers=durable,
            url=durable[0].url if durable else f"memory:{options.name}",
            on_busy=options.on_busy,
            on_error=options.on_error,
            busy_timeout_s=options.busy_timeout_s,
            close_timeout_s=options.close_timeout_s,
            metrics=options.metrics,
            best=best,
        )

    @property
    def everywhere(self) -> list[int]:
        """The numbers of all tiers."""
        return list(range(len(self.tiers)))

    @property
    def places(self) -> str:
        """For messages."""
        return " or ".join([*(["memory"] if self.memory else []), *(tier.url for tier in self.tiers)])


class BackgroundErrors:
    """Of one Checkpointer. `on_error`: "raise", or "warn", which only logs. `fenced`: the run was taken over, which is
    raised by every call."""

    def __init__(self, on_error: str) -> None:
        self.fenced: FencedError | None = None
        self._on_error = on_error
        self._heard = False  # whether a call has said that we are fenced
        self._noted: list[tuple[CheckpointError, Save | None]] = []
        self._lock = threading.RLock()  # a signal handler may close us meanwhile

    def note(self, error: CheckpointError, save: Save | None = None) -> None:
        """`save`: whoever waits for that one is told by it."""
        with self._lock:
            if isinstance(error, FencedError):
                before, self.fenced = self.fenced, error
                if before is not None:
                    return  # every call says so by now
            self._noted.append((error, save))
        log.warning("%s", error)

    def forget(self, save: Save) -> None:
        """What was told of it is dealt with; the next error of it is news."""
        with self._lock:
            self._noted = [(error, of) for error, of in self._noted if of is not save]
        save._raised = False

    def check_owner(self) -> None:
        if self.fenced is not None:
            self._heard = True
            raise self.fenced

    def is_known(self, error: CheckpointError) -> bool:
        """Whether a call has said so before."""
        return self._heard and isinstance(error, FencedError)

    def raise_pending(self) -> None:
        with self._lock:
            errors = [error for error, save in self._noted if save is None or not save._raised]
            self._noted = []
        errors = [error for error in errors if not self.is_known(error)]
        if not errors or self._on_error == "warn":
            return
        first = errors[0]
        for error in errors[1:]:
            first.add_note(f"also: {error}")
        self._heard |= isinstance(first, FencedError)
        raise first


@dataclass
class Stats:
    """Seconds that saving took from training. `stalls`: of each of the last saves, the wait before updates included."""

    saves: int = 0
    skipped: int = 0
    stalled_s: float = 0.0
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=10_000), repr=False)


class Stalls:
    """Counts them. `before_update` is called by each optimizer that is about to change what is being copied."""

    def __init__(self, stager: Stager, heartbeat: Heartbeat, timeout_s: float) -> None:
        self.stats = Stats()
        self._stager, self._heartbeat, self._timeout_s = stager, heartbeat, timeout_s
        self._waiting_since: float | None = None  # an optimizer waits for a copy

    def count(self, seconds: float) -> None:
        """Of one save."""
        self.stats.stalled_s += seconds
        self.stats.saves += 1
        self.stats.stalls.append(seconds)

    @traced("ckpt.wait")
    def before_update(self) -> None:
        self._heartbeat.update()
        self._waiting_since = time.perf_counter()
        waited = self._stager.before_update(self._timeout_s)
        self._waiting_since = None
        self.stats.stalled_s += waited
        if waited and self.stats.stalls:
            self.stats.stalls[-1] += waited

    def until_staged(self, save: Save) -> float:
        """What training has waited for this one, in step() and, just now perhaps, before an update."""
        now, since = time.perf_counter(), self._waiting_since
        if save._stalled_s is not None:
            return save._stalled_s + (0.0 if since is None else now - since)
        return now - save._began if save._began else 0.0  # step() waits yet; or it was kept aside, and nobody waited


class Session:
    """Of one Checkpointer. `undo` ends everything again if the rest of opening it fails."""

    def __init__(self, settings: Settings, state: dict[str, Any], takeover: bool, undo: contextlib.ExitStack) -> None:
        self.settings, self.world = settings, settings.world
        self.memory, self.tiers = settings.memory, settings.tiers
        self.began = time.monotonic()
        self.ends = undo.enter_context(contextlib.ExitStack())  # what is stopped when this is closed
        self.errors = BackgroundErrors(settings.on_error)
        self.heartbeat = Heartbeat.create()
        self.stager = Stager()
        undo.callback(self.stager.stop)
        self.ownership = Ownership(self.world, self.tiers, self.memory, settings.url, settings.busy_timeout_s)
        self.supervisor = self.ownership.open(lambda: self._prepare(state, takeover))
        undo.callback(self.supervisor.give_up)
        self.stager.on_writer(self.supervisor.writer.client.pid)
        self.ends.callback(self.ownership.close)
        self.dead_ranks: dict[int, str] = {}  # ranks that were killed or crashed on this machine, and how
        self.supervisor.hear(PeerDiedNote, self._on_peer_died)
        self.supervisor.hear(DamagedNote, self._on_damaged)
        self.supervisor.on_failure = self.errors.note
        self.errors.fenced = self.supervisor.writer.lost  # while it was opened
        self.orders = Orders(self.world)
        self.ends.callback(self.orders.stop)
        known = self.ownership.cadence
        self.intervals = Intervals(
            self.world, self.orders, self.supervisor, self.heartbeat, self.memory, self.tiers, known
        )
        self.stalls = Stalls(self.stager, self.heartbeat, settings.busy_timeout_s)
        self.hook = UpdateHook(self.stalls.before_update, self.capture.unguard, self.capture.concerns)
        self.ends.callback(self.hook.remove)
        self.unsaved = UnsavedOptimizers(self.capture)
        self.ends.callback(self.unsaved.close)

    def _prepare(self, state: dict[str, Any], takeover: bool) -> WriterSupervisor:
        read = functools.cache(lambda: self._read(state))
        seen = self._identify(read)
        key = channel.run_key(self.settings.url, self.world.local_rank, seen.text)
        timeout_s = self.settings.busy_timeout_s
        return WriterSupervisor(
            key, self.tiers, self.memory, self.stager, self.world, timeout_s, takeover, read, seen.root
        )

    def _identify(self, read: Callable[[], object]) -> Identity:
        """Identify the run of the nearest tier. It is created only after `read` found that the state can be saved."""
        if not self.tiers:
            return Identity()
        spec = self.tiers[0].spec()
        seen = run(identify(spec))
        if seen is None:
            read()
            seen = run(identify(spec, create=True))
        assert seen is not None
        return seen

    def _read(self, state: dict[str, Any]) -> int | None:
        """Nobody else trains the run here: look at it. What cannot be saved of the state is said now. By which memory
        of the machine its device is."""
        self.capture = Capture(state, Seat(self.world.rank, self.world.size))
        return memory_node(self.capture.read().tensors)

    def fits(self, data_size: int, values_size: int) -> bool:
        """Whether there is memory for a snapshot of that many bytes."""
        arena = self.stager.arena
        return arena is not None and arena.fits(data_size, values_size)

    def introduce(self) -> None:
        """Have the writer keep the ledger, say what we do to whoever asks, and make memory."""
        self._keep_books()
        self._show()
        if not self.ownership.has_checkpoints:  # else after restore(), which has better use for the cores
            self.supervisor.memory.next.prepare(_predicted_size(self.capture), 1 << 14)

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
        self.supervisor.standing.tell(request, (self.heartbeat.fd,))

    def _keep_books(self) -> None:
        """The writer of the rank that speaks for the nearest tier keeps the ledger: `ckpt.core.writer.bookkeeper`."""
        if self.supervisor.run.roles[0].place > 0 if self.tiers else self.world.rank > 0:
            return
        owner = self.supervisor.owner
        request = KeepBooks(
            epoch=f"{owner.epoch}.{owner.nonce}",
            rank=self.world.rank,
            world=self.world.size,
            url=self.settings.url,
            opening=self.began,
            opened=time.monotonic(),
            places=self.intervals.places(),
            versions={"everystep": VERSION, "torch": torch.__version__, "python": platform.python_version()},
            decides=self.world.rank == 0,
            cadence=self.intervals.began,
        )
        self.supervisor.hear(CadenceNote, self.intervals.propose)
        later = msgspec.structs.replace(request, again=True)
        self.supervisor.standing.tell(request, (self.heartbeat.fd,), later=later)

    def _on_peer_died(self, note: PeerDiedNote) -> None:
        self.dead_ranks[note.rank] = note.summary

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
