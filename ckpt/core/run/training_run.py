"""An open run in the trainer: its settings, its resources, and the progress of the training.

`Settings` checks the arguments of a Checkpointer. `TrainingRun` opens all resources, and releases all of them if one
fails to open. The saver, the restore and the closing use it, and it imports none of them. Only the training thread
changes the progress, but every thread may read it. `BackgroundErrors` keeps errors until the next call raises them.
`UnsavedOptimizers` warns about optimizers that step parameters of the state without being part of the state, because a
restart would lose their moments.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ckpt.best import Best
from ckpt.core.cadence.cadence import Auto
from ckpt.core.checkpoint.concurrent import run
from ckpt.core.checkpoint.lease import Identity, identify
from ckpt.core.format.boxes import Seat
from ckpt.core.ipc import channel
from ckpt.core.ipc.heartbeat import PAUSED, Heartbeat
from ckpt.core.ipc.messages import Books, CadenceNote, FaultNote, Introduce
from ckpt.core.ranks.orders import Orders
from ckpt.core.ranks.world import World
from ckpt.core.run.ownership import Ownership
from ckpt.core.run.save_plan import Intervals
from ckpt.core.run.writer_supervisor import WriterSupervisor
from ckpt.core.snapshot.device import memory_node, traced
from ckpt.core.snapshot.stage import Stager, UpdateHook
from ckpt.core.state.capture import Capture, params_of, steps_for
from ckpt.core.state.nodes import StatefulNode
from ckpt.core.state.optimizer_node import OptimizerNode, all_of_one_state
from ckpt.errors import (
    CheckpointError,
    ClosedError,
    FencedError,
    InvalidArgumentError,
    SkippedError,
    UsageError,
)
from ckpt.events import log
from ckpt.metrics import Metrics
from ckpt.options import Options
from ckpt.saving import Save
from ckpt.tiers import Memory, Tier, as_tiers
from ckpt.version import VERSION

DEPTH = 3  # how many attributes deep a wrapper may hold an optimizer
_watching: weakref.WeakSet[UnsavedOptimizers] = weakref.WeakSet()


class UnsavedOptimizers:
    """Warns once about optimizers that step saved parameters and that no open Checkpointer saves."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned = False
        _watching.add(self)

    def close(self) -> None:
        _watching.discard(self)

    def check(self, stepped: Iterable[Any]) -> None:
        """Check the optimizers that have stepped since the last call. Each optimizer is checked only once."""
        new = [one for one in stepped if one not in self._checked]
        if not new or self._warned:
            return
        self._checked.update(new)
        if unsaved := [one for one in new if self._names(one) and not any(w.saves(one) for w in list(_watching))]:
            self._warned = True
            log.warning(
                "%s stepped parameters of the state, but is not in it. A restart loses its moments and settings: put "
                "it into the state of the Checkpointer",
                _listed([self._described(one) for one in unsaved]),
            )

    def saves(self, optimizer: Any) -> bool:
        """Return True if an optimizer is in the state, or inside a wrapper that is in the state."""
        held = (found for node in self._capture.nodes for found in _saved_with(node))
        return any(one is optimizer or steps_for(optimizer, one) for one in (*self._capture.optimizers, *held))

    def _names(self, optimizer: Any) -> list[str]:
        return [name for p in params_of(optimizer) if (name := self._capture.name_of(p))]

    def _described(self, optimizer: Any) -> str:
        names, kind = self._names(optimizer), type(optimizer)
        count = f"{len(names)} parameter{'s' if len(names) > 1 else ''}"
        return f"{kind.__module__}.{kind.__qualname__} ({count}, {names[0]})"


def _listed(texts: list[str]) -> str:
    more = len(texts) - 1
    return texts[0] if not more else f"{texts[0]} and {more} more optimizer{'s' if more > 1 else ''}"


def _saved_with(node: Any) -> Iterable[Any]:
    """Return the optimizers whose moments a node saves. A module saves none, even of optimizers in its attributes.

    An object that is saved through its `state_dict()` counts if that dict has tensors or parameter groups in it.
    """
    if isinstance(node, OptimizerNode):
        return all_of_one_state(node.optimizer)
    if isinstance(node, StatefulNode) and not node.may_have_moments():
        return ()
    return _optimizers_in(getattr(node, "target", None) or getattr(node, "optimizer", None))


def _optimizers_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the optimizers in the attributes of an object, and the object itself if it is an optimizer."""
    if value is None or isinstance(value, nn.Module | torch.Tensor | type | LRScheduler) or depth > DEPTH:
        return
    if isinstance(value, torch.optim.Optimizer):
        yield value
    held = list(value) if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    for one in list(value.values() if isinstance(value, dict) else held):
        if isinstance(one, torch.optim.Optimizer | list | tuple | dict) or hasattr(type(one), "state_dict"):
            yield from _optimizers_in(one, depth + 1)


# -- the open run --


TURN_S = 0.2  # pause between two checks for the end of the run


@dataclass(frozen=True)
class Settings:
    """The checked arguments of a Checkpointer. `url`: the URL of the nearest tier, or "memory:NAME" without tiers."""

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
                "a run without tiers needs a name, so that a restart finds it: options=ckpt.Options(name=...)"
            )
        if best is not None and not (isinstance(best, Best) and durable):
            raise InvalidArgumentError(
                f'best={best!r}: it must be a ckpt.Best("val_loss"), and the run needs a folder or URL'
            )
        world = World.detect(channel.node_id(), timeout_s=options.agree_timeout_s)
        if options.on_busy == "skip" and world.size > 1:
            raise InvalidArgumentError(
                'on_busy="skip" needs a single rank: if one rank skips a step, that step is incomplete'
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
        """Return the numbers of the tiers, from the nearest to the furthest."""
        return list(range(len(self.tiers)))

    @property
    def places(self) -> str:
        """Return the names of all locations, for messages."""
        return " or ".join([*(["memory"] if self.memory else []), *(tier.url for tier in self.tiers)])


class BackgroundErrors:
    """Errors of background work. The next call raises each error once; with `on_error="warn"`, errors are only logged.
    `fenced`: the error that every call raises once another job owns the run."""

    def __init__(self, on_error: str) -> None:
        self.fenced: FencedError | None = None
        self._on_error = on_error
        self._heard = False  # a call has raised `fenced`
        self._noted: list[tuple[CheckpointError, Save | None]] = []
        self._lock = threading.RLock()  # a signal handler may close the run while this thread holds the lock

    def note(self, error: CheckpointError, save: Save | None = None) -> None:
        """Log an error, and make the next call raise it, unless a wait for `save` raises it first."""
        with self._lock:
            if isinstance(error, FencedError):
                before, self.fenced = self.fenced, error
                if before is not None:
                    return  # every call raises the earlier one already
            self._noted.append((error, save))
        log.warning("%s", error)

    def forget(self, save: Save) -> None:
        """Forget the errors of a save that is retried."""
        with self._lock:
            self._noted = [(error, of) for error, of in self._noted if of is not save]
        save._raised = False

    def check_owner(self) -> None:
        if self.fenced is not None:
            self._heard = True
            raise self.fenced

    def is_known(self, error: CheckpointError) -> bool:
        """Return True if the error is a FencedError and a call has raised it before."""
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
    """Counts saves, and the seconds that training waited for them. `stalls`: the wait for each of the latest saves."""

    saves: int = 0
    skipped: int = 0
    stalled_s: float = 0.0
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=10_000), repr=False)


class TrainingRun:
    """The run that a Checkpointer has open.

    - `step`: the last step passed to step(). `stepped`: step() was called since the last restore, by `thread`.
    - `finite`: the argument `finite` of the last step().
    - `within`: the step that step() or save() is handling, or was handling when it was interrupted.
    - `exchanged`: the weights are temporarily replaced by others, see `not_training`.
    - `restored`: the state was restored. `torn`: a restore failed halfway.
    - `turn`: held by the thread that is in step(), save(), restore() or close().
    - `ends`: the resources to stop when the run is closed.
    """

    def __init__(self, settings: Settings, state: dict[str, Any], takeover: bool, undo: contextlib.ExitStack) -> None:
        """`undo`: releases all resources if opening the run fails later."""
        self.step: int | None = None
        self.stepped = self.exchanged = self.restored = self.torn = self.closed = self.forked = False
        self.thread = 0
        self.finite: bool | None = None
        self.within: int | None = None
        self.turn = threading.RLock()
        self._inside = False  # True while a call has the turn
        self._updates = 0  # number of optimizer steps before the last call of step()
        self.stats = Stats()
        self._waiting_since: float | None = None  # the time since which an optimizer waits for a copy
        self.settings, self.world = settings, settings.world
        self.memory, self.tiers = settings.memory, settings.tiers
        self.began = time.monotonic()
        self.ends = undo.enter_context(contextlib.ExitStack())
        self.errors = BackgroundErrors(settings.on_error)
        self.heartbeat = Heartbeat.create()
        self.stager = Stager()
        undo.callback(self.stager.stop)
        self.ownership = Ownership(self.world, self.tiers, self.memory, settings.url, settings.busy_timeout_s)
        self.supervisor = self.ownership.open(lambda: self._prepare(state, takeover))
        undo.callback(self.supervisor.give_up)
        self.stager.gate.writer_pid = self.supervisor.client.pid
        self.ends.callback(self.ownership.close)
        self.dead_ranks: dict[int, str] = {}  # how ranks on this machine were killed or crashed
        self.supervisor.hear(FaultNote, self._on_fault)
        self.supervisor.on_failure = self.errors.note
        self.errors.fenced = self.supervisor.lost  # set if another job took ownership during opening
        self.orders = Orders(self.world)
        self.ends.callback(self.orders.stop)
        known = self.ownership.cadence
        self.intervals = Intervals(
            self.world, self.orders, self.supervisor, self.heartbeat, self.memory, self.tiers, known
        )
        self.hook = UpdateHook(self._before_update, self.capture.unguard, self.capture.concerns)
        self.ends.callback(self.hook.remove)
        self.unsaved = UnsavedOptimizers(self.capture)
        self.ends.callback(self.unsaved.close)
        undo.callback(setattr, self, "closed", True)

    def _prepare(self, state: dict[str, Any], takeover: bool) -> WriterSupervisor:
        read = functools.cache(lambda: self._read(state))
        seen = self._identify(read)
        key = channel.run_key(self.settings.url, self.world.local_rank, seen.text)
        timeout_s = self.settings.busy_timeout_s
        return WriterSupervisor(
            key, self.tiers, self.memory, self.stager, self.world, timeout_s, takeover, read, seen.root
        )

    def _identify(self, read: Callable[[], object]) -> Identity:
        """Identify the run in the nearest tier. Create it only after `read` has shown that the state can be saved."""
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
        """Read the state and return the NUMA node of its device. Raises an error if an object cannot be saved.

        Call this when no other process on this machine trains the run.
        """
        self.capture = Capture(state, Seat(self.world.rank, self.world.size))
        return memory_node(self.capture.read().tensors)

    def fits(self, data_size: int, values_size: int) -> bool:
        """Return True if memory has room for a snapshot with these sizes in bytes."""
        arena = self.stager.arena
        return arena is not None and arena.fits(data_size, values_size)

    def introduce(self) -> None:
        """Make the writer record run metrics, publish this rank's state, and prepare memory."""
        first = self.supervisor.run.roles[0].place == 0 if self.tiers else self.world.rank == 0
        books, metrics = self._books() if first else None, self.settings.metrics
        request = Introduce(
            url=self.settings.url,
            rank=self.world.rank,
            world=self.world.size,
            local_rank=self.world.local_rank,
            opening=self.began,
            opened=time.monotonic(),
            metrics=None if metrics is None else metrics.to_json(),
            books=books,
        )
        self.supervisor.hear(CadenceNote, self.intervals.propose)
        later = request if books is None else replace(request, books=replace(books, again=True))
        self.supervisor.tell(request, (self.heartbeat.fd,), later=later)
        if not self.ownership.has_checkpoints:  # otherwise restore() needs the cores, and prepares memory
            self.supervisor.memory.next.prepare(_predicted_size(self.capture), 1 << 14)

    def _books(self) -> Books:
        """Return the run metrics that the writer of the first rank in the nearest tier records."""
        owner = self.supervisor.owner
        return Books(
            first_term=f"{owner.term}.{owner.nonce}",
            places=self.intervals.places(),
            versions={"everystep": VERSION, "torch": torch.__version__, "python": platform.python_version()},
            decides=self.world.rank == 0,
            cadence=self.intervals.began,
        )

    def _on_fault(self, note: FaultNote) -> None:
        if note.kind == "peer":
            self.dead_ranks[note.rank] = note.why

    # -- the progress of the training --

    def begin_step(self, step: int, finite: bool | None) -> None:
        """Record that the training has done this step."""
        self.finite = finite
        self.step, self._updates = step, self.hook.count
        self.heartbeat.beat(step, self.stats.stalled_s, self.stats.saves, self.stats.skipped)
        self.stepped, self.exchanged, self.thread = True, False, threading.get_ident()
        optimizers = self.hook.announced()
        self.capture.trust(optimizers)
        self.unsaved.check(optimizers)

    def went_back(self, step: int) -> None:
        """Record that the state was restored from a checkpoint of this step."""
        self.step, self._updates = step, self.hook.count
        self.restored, self.torn = True, False
        self.stepped, self.exchanged, self.finite, self.within = False, False, None, None

    def starts(self, default: object) -> None:
        """Record that training starts without a checkpoint."""
        self.restored, self.finite = True, None
        if isinstance(default, int):
            self.step = default

    @property
    def moved_on(self) -> bool:
        """Return True if an optimizer has begun another step."""
        return self.hook.count != self._updates

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Mark the save of a step. If Ctrl-C interrupts it, the state is unchanged, and close() can stage the step."""
        outer, self.within = self.within, step
        try:
            yield
        except SkippedError:
            self.within = outer
            raise
        self.within = outer

    @contextlib.contextmanager
    def in_turn(self, *, alone: bool = False) -> Iterator[None]:
        """Let one thread in at a time. close() wakes a waiting thread, because close() may wait for that thread.

        `alone`: raise UsageError in a signal handler that has interrupted another call, which needs the present state.
        """
        while not self.turn.acquire(timeout=TURN_S):
            if self.closed or self.forked:
                self.check_usable()
        outer = self._inside
        try:
            if alone and outer:
                raise UsageError("restore() cannot run inside step(), save() or close(), e.g. in a signal handler")
            self._inside = True
            yield
        finally:
            self._inside = outer
            self.turn.release()

    @contextlib.contextmanager
    def pause(self, changes_state: bool) -> Iterator[None]:
        """Mark a pause of the training; see `Checkpointer.not_training`."""
        heartbeat, outer = self.heartbeat, self.exchanged
        if changes_state:
            self.exchanged = True
        before, began = heartbeat.state, time.monotonic()
        heartbeat.touch(PAUSED)
        try:
            yield
            self.exchanged = outer  # skipped after an exception, because the weights may still be replaced
        finally:
            if not self.forked:  # a forked child has no heartbeat
                heartbeat.paused(time.monotonic() - began if before != PAUSED else 0.0)
                heartbeat.touch(before)

    # -- checks --

    def check_not_forked(self) -> None:
        if self.forked:
            raise ClosedError("this process was forked from the trainer: only the trainer saves")

    def check_usable(self, *, restoring: bool = False) -> None:
        self.check_not_forked()
        if self.closed:
            raise ClosedError("this Checkpointer is closed: make a new one")
        self.errors.check_owner()
        if restoring:
            return
        if self.torn:
            raise UsageError("the last restore failed half-way, so the state matches no step: restore again")
        if self.ownership.has_checkpoints and not self.restored:
            raise UsageError(
                f"{self.settings.places} holds checkpoints: call restore() before the first step, or use another "
                "location"
            )

    def check_next(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
            raise InvalidArgumentError(
                f"step={step!r}: it must be the number of completed steps, a whole number from 0"
            )
        if self.step is not None and step <= self.step:
            raise UsageError(f"step {step} cannot follow step {self.step}: steps only go up (restore() goes back)")
        silent = self.capture.has_scaler or self.capture.has_unguarded  # updates may be skipped, or run no hooks
        accumulating = self.hook.count > 0 and not self.moved_on and not silent
        if accumulating and self.capture.holds_gradients():
            raise UsageError(
                f"no optimizer has stepped since step {self.step}: call step() once per optimizer step, not in the "
                "middle of gradient accumulation. After a skipped batch, drop its gradients first"
            )

    def check_same(self) -> None:
        if self.moved_on:
            raise UsageError(f"training went on after step {self.step}: call save() right after step()")

    # -- the time that training has waited --

    def count_stall(self, seconds: float) -> None:
        """Count one save and the time that step() waited for it."""
        self.stats.stalled_s += seconds
        self.stats.saves += 1
        self.stats.stalls.append(seconds)

    @traced("ckpt.wait")
    def _before_update(self) -> None:
        """Make an optimizer wait as long as the tensors that it is about to change are being copied."""
        self.heartbeat.update()
        self._waiting_since = time.perf_counter()
        waited = self.stager.before_update(self.settings.busy_timeout_s)
        self._waiting_since = None
        self.stats.stalled_s += waited
        if waited and self.stats.stalls:
            self.stats.stalls[-1] += waited

    def stalled_by(self, save: Save) -> float:
        """Return the seconds that training has waited for a save, including a current wait before an update."""
        now, since = time.perf_counter(), self._waiting_since
        if save._stalled_s is not None:
            return save._stalled_s + (0.0 if since is None else now - since)
        return now - save._began if save._began else 0.0  # step() is still waiting


def _predicted_size(capture: Capture) -> int:
    """Return the expected size of a snapshot after the first step, because that step creates the optimizer state."""
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
