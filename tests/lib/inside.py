"""Give tests of promises what they need from inside the library.

Files in `tests/promises` import only public names of `ckpt`, and this module. When the code behind a promise is
rewritten, this module follows it and the promises stay unchanged; `tests/test_imports.py` checks that. So a name here
describes what a test needs, not how the library does it today. Stores (`ckpt_backends`) are not inside: their contract
is public.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click.testing
import pytest
import torch

import ckpt
import ckpt.adapters
from ckpt import failpoints, loading
from ckpt import store as stores
from ckpt.core.checkpoint import chunks, incremental, lease, losses, manifests, open_tier, read, retention, write
from ckpt.core.checkpoint import commits as commits
from ckpt.core.format import codec, manifest
from ckpt.core.format.digest import chunk_digest, file_digest
from ckpt.core.format.index import Share, build
from ckpt.core.format.layout import CHUNK, Layout, TensorSpec, pages
from ckpt.core.format.manifest import CheckpointId, Manifest, data_key, index_key, manifest_key, owner
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.table import FILE, Table, columns_of, merge
from ckpt.core.ipc import channel, heartbeat
from ckpt.core.ipc.arena import SEALED, Arena, Label
from ckpt.core.ipc.messages import MOST_BYTES
from ckpt.core.log.records import MARK, Acquire, Commit, RunState
from ckpt.core.log.run_log import RunLog, record_key
from ckpt.core.ranks import world as worlds
from ckpt.core.ranks.world import World
from ckpt.core.restore import sources
from ckpt.core.restore.restore import Candidates, restore_first
from ckpt.core.restore.sources import HeldSnapshot, MemorySource, RestoreSource, StoreSource
from ckpt.core.run import common_state, opening, writer_link
from ckpt.core.run.closing import Closing
from ckpt.core.run.memory import KnownLayouts, NextArena, SnapshotMemory
from ckpt.core.run.opening import HeldSnapshots, RunOpener
from ckpt.core.run.ownership import Ownership
from ckpt.core.run.replica_check import ReplicaCheck
from ckpt.core.run.saver import Saver
from ckpt.core.run.training_run import TrainingRun
from ckpt.core.snapshot import device, direct, snapshot, stage
from ckpt.core.snapshot.fill import SlotDigests, SlotFiller
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.core.snapshot.stage import Stager
from ckpt.core.state.capture import Capture, CapturedState, Structure
from ckpt.core.state.filler import Filler
from ckpt.core.state.tensors import TORCH_DTYPE
from ckpt.errors import CheckpointError, CorruptError, FormatError, NoCheckpointError, NotFoundError, StateError
from ckpt.failpoints import INCREMENT_POINTS as INCREMENT_POINTS
from ckpt.failpoints import POINTS as POINTS
from ckpt.failpoints import TRAINER_POINTS as TRAINER_POINTS
from ckpt.failpoints import WRITER_POINTS as WRITER_POINTS
from ckpt.guard.fault_handler import FaultHandler
from ckpt.tiers import as_tiers
from ckpt.tools.cli import app
from ckpt.tools.convert import source_files
from ckpt_backends.memory import MemoryStore

T = TypeVar("T")

# Re-exported above: the names of all fail points, by process, because tests visit each of them. `DTYPES` maps the name
# of each dtype in files to the dtype.
DTYPES: dict[str, torch.dtype] = TORCH_DTYPE


# -- the command line, in this process --


def main(words: Sequence[str]) -> int:
    """Run a command as a shell does. Return its exit code."""
    return app.main(words)


def command(*words: object) -> Any:
    """Run a command that prints to stdout. Return what it returns, and raise what it raises."""
    return app.cli.main([str(word) for word in words], standalone_mode=False)


def invoke(*words: object, standalone_mode: bool = True) -> click.testing.Result:
    """Run a command with its output captured."""
    return click.testing.CliRunner().invoke(app.cli, [str(word) for word in words], standalone_mode=standalone_mode)


# -- a run in a folder or a bucket --


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. This works inside a running event loop too."""
    return read.run(work)


def _with_log(url: str | Path, work: Callable[[RunLog], Awaitable[T]]) -> T:
    """Open the log of an existing run, call `work` with it, and close the store."""

    async def look() -> T:
        log = await read.open_run(str(url))
        try:
            return await work(log)
        finally:
            await log.store.aclose()

    return read.run(look())


def _state(url: str | Path) -> RunState:
    async def state(log: RunLog) -> RunState:
        return log.state

    return _with_log(url, state)


def steps_at(url: str | Path) -> list[int]:
    """List the steps of the present history, newest first."""
    return [commit.step for commit in _state(url).lineage()]


def kept_at(url: str | Path) -> dict[int, str]:
    """Map each step that the training pinned to the note it gave."""
    return {checkpoint.step: note.removeprefix(MARK) for checkpoint, note in _state(url).kept.items()}


@dataclass(frozen=True)
class LogView:
    """A summary of the log of a tier."""

    steps: list[int]  # of the present history, ascending
    ranks: dict[str, tuple[int, ...]]  # checkpoint id: the ranks whose files are in this tier


def log_at(folder: Path) -> LogView:
    """Read the log of a tier."""
    state = _state(folder)
    ranks = {
        str(checkpoint): tuple(rank for rank, _ in commit.manifests) for checkpoint, commit in state.commits.items()
    }
    steps = sorted(commit.step for commit in state.lineage())
    return LogView(steps, ranks)


def problems_at(url: str | Path) -> list[str]:
    """Verify every byte of every live checkpoint. Return all problems, including damaged log records."""

    async def look(log: RunLog) -> list[str]:
        found = [f"log record {seq} is damaged" for seq in log.state.damaged]
        for commit in log.state.commits.values():
            found += await read.verify(log.store, commit)
        return found

    return _with_log(url, look)


def lasting_problems_at(url: str | Path) -> list[str]:
    """Verify a run that is being written to. Return the problems of checkpoints that were live before and after."""

    async def look(log: RunLog) -> list[str]:
        found: list[tuple[CheckpointId, str]] = []
        for commit in log.state.lineage():
            found += [(commit.checkpoint, problem) for problem in await read.verify(log.store, commit)]
        await log.refresh()
        return [problem for checkpoint, problem in found if checkpoint in log.state.commits]

    return _with_log(url, look)


def problems_of_newest(url: str | Path) -> list[str]:
    """Verify every byte of the newest checkpoint of the present history. Return its problems."""

    async def look(log: RunLog) -> list[str]:
        return await read.verify(log.store, log.state.lineage()[0])

    return _with_log(url, look)


def losses_at(url: str | Path, meanwhile: Callable[[], object] = lambda: None, after_s: float = 0.0) -> list[int]:
    """List the steps that a reader reports as lost. `meanwhile`: called `after_s` seconds after it opened the log."""

    async def look(log: RunLog) -> list[int]:
        asyncio.get_running_loop().call_later(after_s, meanwhile)
        return [checkpoint.step for loss in await losses.of_log(log) for checkpoint in loss.checkpoints]

    return _with_log(url, look)


def step_of_file(key: str) -> int | None:
    """Return the step of the checkpoint that wrote a file, or None if the file name contains no step."""
    found = owner(key)
    return found.step if found else None


def rewrite_format(run: Path, **fields: object) -> None:
    """Change fields of a run's FORMAT.json and recompute its digest."""
    path = run / "FORMAT.json"
    path.write_bytes(manifest.seal({**manifest.unseal(path.read_bytes(), "it"), **fields}))


def race_to_keep(url: str, times: int) -> None:
    """Write a note on one checkpoint through two open logs at the same moment, `times` times."""

    async def both() -> None:
        logs = [await read.open_run(url) for _ in range(2)]
        checkpoint = next(iter(logs[0].state.commits))
        for n in range(times):
            await asyncio.gather(*(retention.set_keep(log, checkpoint, f"{n} {id(log)}") for log in logs))
        await asyncio.gather(*(log.store.aclose() for log in logs))

    asyncio.run(both())


def append_record(folder: str, before: Callable[[Any], None]) -> None:
    """Open a run for writing and append a record to its log. Call `before` with the store right before the append."""

    async def append() -> None:
        async with commits.written_run(folder) as log:
            mine = await commits.acquire(log, "0" * 8)
            before(log.store)
            await commits.abort(log, mine, CheckpointId(mine.term, 1, mine.nonce), "a test")

    read.run(append())


# -- what a checkpoint consists of --


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint of a run, and where its tensors lie."""

    _commit: Commit
    _table: Table

    @property
    def step(self) -> int:
        return self._commit.step

    @property
    def id(self) -> str:
        """The checkpoint id, which is part of the name of each of its files."""
        return str(self._commit.checkpoint)

    @property
    def full(self) -> bool:
        """Return True if it needs no file of an older checkpoint."""
        return self._commit.full

    @property
    def needs(self) -> list[int]:
        """The older steps that it was built on."""
        return [checkpoint.step for checkpoint in self._commit.needs]

    @property
    def files(self) -> set[str]:
        """The data files that contain its tensors, including files of older checkpoints."""
        return set(self._table.files)

    @property
    def ranks(self) -> set[int]:
        """The ranks that have saved its tensors."""
        return {shard.rank for shard in self._table.shards}

    @property
    def steps_of_files(self) -> set[int]:
        return {step for key in self._table.files if (step := step_of_file(key)) is not None}

    def owns(self, key: str) -> bool:
        """Return True if this checkpoint wrote the file."""
        return owner(key) == self._commit.checkpoint

    @property
    def encodings(self) -> Counter[str]:
        """How often each codec is used, by name: raw, planes, delta."""
        return Counter(codec.CODECS[number] for number in self._table.codec.tolist())

    @property
    def has_bases(self) -> bool:
        """Return True if some of its pieces are stored as differences to a base."""
        return len(self._table.length) > self._table.owned

    def _shard(self, name: str) -> int:
        return next(i for i, shard in enumerate(self._table.shards) if shard.name == name)

    def place_of(self, name: str, piece: int = 0) -> tuple[str, int]:
        """Return the file and the offset of a piece of a tensor."""
        return self._table.place(self._table.chunks(self._shard(name))[piece])

    def place_of_difference(self) -> tuple[str, int]:
        """Return the file and the offset of the first piece that is stored as a difference."""
        return self._table.place(self._first_difference())

    def place_of_base(self) -> tuple[str, int]:
        """Return the file and the offset of the base of that piece."""
        return self._table.place(int(self._table.base[self._first_difference()]))

    def _first_difference(self) -> int:
        table = self._table
        return next(b for b in range(table.owned) if table.codec[b] == codec.DELTA)


def history(url: str | Path) -> dict[int, SavedStep]:
    """Map each step of the present history to its checkpoint, newest first. The run may be in use."""

    async def look(log: RunLog) -> dict[int, SavedStep]:
        while True:
            present = log.state.lineage()
            try:
                return {c.step: SavedStep(c, (await read.load_all(log.store, c)).table) for c in present}
            except NotFoundError:
                if (await log.refresh()).lineage() == present:
                    raise  # otherwise it was retired during the call

    return _with_log(url, look)


def newest(url: str | Path) -> SavedStep:
    """Return the newest checkpoint, read from its manifests alone. Its other files may be damaged or missing."""

    async def look(log: RunLog) -> SavedStep:
        commit = log.state.lineage()[0]
        tables = await manifests.load_ranks(log.store, commit, [rank for rank, _ in commit.manifests])
        return SavedStep(commit, merge([table for _, table in tables.values()]))

    return _with_log(url, look)


def bytes_by_rank(url: str | Path) -> list[int]:
    """Return the bytes of tensor data that each rank wrote to the newest checkpoint."""

    async def look(log: RunLog) -> list[int]:
        found = await read.load_all(log.store, read.choose(log))
        return [sum(file.size - file.header_size for file in part.files) for part in found.manifests]

    return _with_log(url, look)


def bytes_of_tensors(url: str | Path, prefix: str) -> int:
    """Return the total size of those tensors of the newest checkpoint whose names start with `prefix`."""

    async def look(log: RunLog) -> int:
        found = await read.load_all(log.store, read.choose(log))
        return sum(shard.nbytes for shard in found.saved().table.shards if shard.name.startswith(prefix))

    return _with_log(url, look)


MAX_CHAIN = incremental.MAX_CHAIN  # after this many increments in a row comes a full checkpoint


# -- files in a folder or a bucket --


def use_options(url: str, options: dict[str, Any]) -> None:
    """Set the storage options with which this process opens a bucket."""
    stores.remember_options(url, options)


def _with_store(url: str, work: Callable[[Any], Awaitable[T]], *, writable: bool = False) -> T:
    async def look() -> T:
        store = stores.open_store(url, writable=writable)
        try:
            return await work(store)
        finally:
            await store.aclose()

    return read.run(look())


def file_names(url: str, prefix: str = "") -> list[str]:
    """List the files of a folder or bucket."""

    async def names(store: Any) -> list[str]:
        return [info.key async for info in store.list(prefix)]

    return _with_store(url, names)


def read_files(url: str) -> dict[str, bytes]:
    """Read every file of a folder or bucket."""

    async def contents(store: Any) -> dict[str, bytes]:
        return {info.key: bytes(await store.get(info.key)) async for info in store.list()}

    return _with_store(url, contents)


def write_files(url: str, files: dict[str, bytes]) -> None:
    """Write files to a folder or bucket, overwriting existing ones."""

    async def put(store: Any) -> None:
        for key, raw in files.items():
            await store.put(key, raw)

    _with_store(url, put, writable=True)


def delete_files(url: str, keys: Sequence[str]) -> None:
    """Delete files of a folder or bucket."""

    async def delete(store: Any) -> None:
        await store.delete_many(list(keys))

    _with_store(url, delete, writable=True)


def open_folder(folder: str) -> Any:
    """Return the store of a folder, opened for writing."""
    return stores.open_store(folder, writable=True)


WITHOUT_FENCE = """
import ckpt.core.log.run_log
ckpt.core.log.run_log.RunLog.check_owner = lambda self, owner: None
"""  # a sitecustomize.py that makes a writer ignore that another job owns the run


def check_free(run: Path, say: Callable[[str], object]) -> None:
    """Raise InUseError if a trainer uses the run."""
    _with_log(run, lambda log: lease.check_free(log, say))  # type: ignore[arg-type]


def read_live_state_slowly(seconds: float) -> None:
    """In this process, take this long for each range of a state that is written directly."""
    read = direct.LiveBytes.read

    def slowly(self: Any, *arguments: Any) -> None:
        time.sleep(seconds)
        read(self, *arguments)

    direct.LiveBytes.read = slowly  # type: ignore[method-assign]


def of_newer_version(raw: bytes) -> bytes:
    """Return a sealed file as a newer version of everystep would have written it."""
    return manifest.seal({**manifest.unseal(raw, "lease.json"), "version": 99})


def see_dead_trainers_after(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set how long this process waits before it considers a silent trainer dead."""
    patch.setattr(lease, "DYING_S", seconds)
    patch.setattr(lease, "lease_interval_s", lambda store: seconds)


def keep_of(tiers: Any, every: Any = None) -> ckpt.Keep:
    """Return the retention rule of the only tier, parsed as `Checkpointer` parses its arguments."""
    (tier,) = as_tiers(tiers, every=every)[1]
    return tier.keeping


def keep_of_dcp(tiers: Any) -> ckpt.Keep:
    """Return the retention rule of the only tier, parsed as `ckpt.dcp` parses its arguments."""
    from ckpt.dcp import storage  # torch's part of it takes a second to import

    (tier,) = storage._tiers(tiers)
    return tier.keeping


def open_place(url: str) -> None:
    """Open a tier as a writer does, which creates the run, and close it."""

    async def honest() -> None:
        place = await open_tier.open_place(ckpt.Tier(url).spec())
        await place.close(None, lambda message: None)

    asyncio.run(honest())


def create_run(url: str) -> None:
    """Create a run in a folder or bucket, if it has none."""
    _with_store(url, commits.create_run, writable=True)


# -- processes --

WRITER = "ckpt-writer"  # part of the command line of each writer process


class Process(Protocol):
    """Identifies a process by its PID and start time."""

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...


def process_of(pid: int) -> Process:
    """Return the process that has this PID now. A later process with the same PID is not taken for it."""
    return heartbeat.Process.of(pid)


MOST_RESTARTS_OF_WRITER = opening.RESPAWN_LIMIT  # deaths in a row after which no new writer is started


def run_in_writers(patch: pytest.MonkeyPatch, code: str, *, instead: bool = False) -> None:
    """Make each writer that this process starts run a line of code first, or nothing else."""
    patch.setattr(writer_link, "_BOOT", code if instead else f"{code}; {writer_link._BOOT}")


MEMORY_IS_SHORT = "import ckpt.core.writer.life as life; life.SHORT = 2.0"  # for `run_in_writers`


def compare_no_replicas() -> None:
    """Turn off the comparison of replicas across ranks in this process."""
    ReplicaCheck.said_of = lambda self, checkpoint: {}  # type: ignore[method-assign]
    ReplicaCheck._compare_soon = lambda self, *given: None  # type: ignore[method-assign]


def wait_for_ranks_for(grace_s: float) -> None:
    """Set how long this process waits for other ranks beyond the agreed timeout."""
    worlds.GRACE_S = grace_s


def rank(number: int, size: int, store: Any, *, node: str, **options: Any) -> World:
    """Return the communication object of a rank, for ranks that are threads of this process."""
    return World(number, size, store, node=node, **options)


def arm(fail: str) -> None:
    """Arm a fail point in this process. `fail` has the syntax of the variable CKPT_FAIL."""
    failpoints._armed = failpoints._parse(fail)


def at_points_of_staging(act: Callable[[str], object]) -> None:
    """Call `act` with the name of each fail point that the staging thread reaches."""
    stage.point = act  # type: ignore[assignment]


def disarm() -> None:
    """Undo `arm` and `at_points_of_staging`."""
    stage.point, failpoints._armed = failpoints.point, None


FOREVER = pytest.MonkeyPatch()  # for scripts in their own process, where nothing must be undone


def wait_for_writers_for(answer_s: float, meet_s: float | None = None, patient_s: float | None = None) -> None:
    """Set how long this process waits for a writer to answer, for one that is not stopped, and for one to appear."""
    opening.HELLO_S, opening.PATIENT_S = answer_s, patient_s or answer_s
    if meet_s is not None:
        opening.MEET_S = meet_s


def wait_for_release_for(seconds: float) -> None:
    """Set how long this process waits for the writer of a fenced job to release its memory."""
    opening.FREED_S = seconds


def stop_writer_after_its_first_answer() -> None:
    """Stop the writer that this process finds as soon as it has answered once, and never resume it."""
    ask = writer_link.WriterClient.ask_patiently

    def stopping(self: Any, *arguments: Any) -> Any:
        found = ask(self, *arguments)
        if found[0].alive:
            os.kill(found[0].pid, signal.SIGSTOP)
            opening.DYING_S = 0.0
        return found

    writer_link.WriterClient.ask_patiently = stopping  # type: ignore[method-assign]


def wake_no_writer() -> None:
    """Make this process not resume stopped writers."""
    writer_link.WriterClient._wake = lambda self: 0  # type: ignore[method-assign, assignment]


def name_of_writer(run: str, rank: int = 0) -> str:
    """Return the socket name of the writer of a run in memory. `run`: `memory:NAME`."""
    return channel.run_key(run, rank)


def name_of_writer_in(folder: str) -> str:
    """Return the socket name of the writer of a run in a folder."""
    return lease.key_of(folder)


def begin_folder(folder: str) -> None:
    """Create an empty run in a folder, so that its writer has a socket name."""
    read.run(lease.identify(ckpt.Tier(folder).spec(), create=True))


def writer_named(run: str, rank: int = 0) -> int | None:
    """Return the PID of the process that owns the socket name of a run's writer, or None."""
    return channel.holder(name_of_writer(run, rank))


def writers_in(folder: str) -> list[int]:
    """Return the PIDs of the writers of a run in a folder."""
    return channel.writers_of(name_of_writer_in(folder))


def take_name_of_writer(name: str) -> Any:
    """Take the socket name of a writer. Return a socket that never replies, or None if the name is taken."""
    return channel.listen(name)


def names_taken(name: str) -> dict[int, str]:
    """Map each rank of a run to the socket name of its writer on this machine."""
    return channel.siblings(name)


def addresses_of(name: str) -> list[str]:
    """Return the socket addresses at which a writer may listen."""
    return [channel._address(name, number) for number in range(channel.NAMES)]


VARIABLE_OF_NAMES = channel.RUNTIME  # the environment variable that separates the socket names of runs


def can_connect(name: str) -> bool:
    """Return True if a writer of this user listens under this name."""
    found = channel.connect(name)
    if found is not None:
        found.close()
    return found is not None


def log_of_writer(name: str) -> str:
    """Return the log file of a writer of this name, or an empty string if no safe folder exists."""
    return channel.log_path(name)


LARGEST_MESSAGE = MOST_BYTES  # bytes, between a trainer and its writer


# -- moments within a call, at which a test interferes --

Moment = tuple[type, str]

STATE_IS_READ: Moment = (Capture, "read")
RUN_IS_TAKEN: Moment = (Ownership, "begin_term")
MADE: dict[str, Moment] = {  # in order, while a Checkpointer is made
    "introduce": (TrainingRun, "introduce"),
    "prepare": (TrainingRun, "_prepare"),
    "watch for faults": (FaultHandler, "start"),
}
STEPPING: dict[str, Moment] = {  # in `step()`, in the main thread; other threads receive no signal
    "prepare memory": (NextArena, "prepare"),
    "tell the layout": (KnownLayouts, "tell"),
    "hand over": (Stager, "submit"),
}
LAST_STEP_IS_STAGED: Moment = (Saver, "stage_last")
CLOSING: dict[str, Moment] = {  # in order, in `close()`
    "save the last step": (Closing, "_save_last"),
    "stage the last step": LAST_STEP_IS_STAGED,
    "wait for writes": (Saver, "wait"),
    "end": (Closing, "_end"),
    "let go": (Closing, "_release"),
}
STAGING_THREAD_IS_ASKED: Moment = (Stager, "do")
MEMORY_IS_ADOPTED: Moment = (Stager, "use")
MEMORY_IS_PREPARED: Moment = (SnapshotMemory, "take_prepared")
COPIED_BESIDE_TRAINING: Moment = (SlotFiller, "fill_guarded")
LEFT_OVER_MEMORY_IS_TAKEN: Moment = (HeldSnapshots, "take_left_over")
FILE_IS_CONVERTED: Moment = (source_files.FilesOrigin, "_read")


def interrupt_at(
    patch: pytest.MonkeyPatch,
    moment: Moment,
    act: Callable[[], object],
    *,
    before: bool = True,
    always: bool = False,
) -> None:
    """Call `act` the first time, or `always`, that a moment is reached: before it, or after it if `before` is False."""
    owner, method = moment
    original, left = getattr(owner, method), [act]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if before and left:
            (left[0] if always else left.pop())()
        found = original(*arguments, **options)
        if not before and left:
            (left[0] if always else left.pop())()
        return found

    patch.setattr(owner, method, interrupted)


def act_instead(patch: pytest.MonkeyPatch, moment: Moment, act: Callable[[], object]) -> None:
    """Call `act` instead of the code of a moment, each time it is reached."""
    patch.setattr(*moment, lambda *arguments, **options: act())


def kill_first_writer_before_it_opens() -> None:
    """Make this process kill its first writer when that writer is about to open the run."""
    original, tries = RunOpener.open, list[object]()

    def killing(self: Any, client: Any, **more: Any) -> Any:
        tries.append(client)
        if len(tries) == 1:
            os.kill(client.pid, signal.SIGKILL)
        return original(self, client, **more)

    RunOpener.open = killing  # type: ignore[method-assign]


def stop_before_sealing(step: int) -> None:
    """Make this process stop itself with SIGSTOP before it seals the snapshot of a step."""
    set_label = Arena.set_label

    def stopping(arena: Arena, slot: int, label: Label) -> None:
        if label.state == SEALED and label.checkpoint is not None and label.checkpoint.step == step:
            Arena.set_label = set_label  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.3)  # another thread may get it
        set_label(arena, slot, label)

    Arena.set_label = stopping  # type: ignore[method-assign]


def before_copies(patch: pytest.MonkeyPatch, act: Callable[[list[Any], bool], object]) -> None:
    """Call `act` in the staging thread before tensors are copied to shared memory. Its arguments: the copy streams, and
    whether training goes on during this copy."""
    copy, fill, beside = SlotFiller.copy, SlotFiller.fill_guarded, list[object]()

    def guarded(self: SlotFiller, arena: Any, slot: int, job: Any) -> None:
        beside.append(job)
        try:
            fill(self, arena, slot, job)
        finally:
            beside.clear()

    def late(self: SlotFiller, pairs: Any, streams: Any, *more: Any) -> None:
        if pairs:
            act(list(streams.values()), bool(beside))
        copy(self, pairs, streams, *more)

    patch.setattr(SlotFiller, "copy", late)
    patch.setattr(SlotFiller, "fill_guarded", guarded)


def after_each_large_copy(patch: pytest.MonkeyPatch, act: Callable[[torch.Tensor], object]) -> None:
    """Call `act` with each large host tensor after it was copied to shared memory."""
    put = SlotDigests.put

    def meanwhile(self: SlotDigests, number: int, target: torch.Tensor, source: torch.Tensor, **options: Any) -> None:
        put(self, number, target, source, **options)
        act(source)

    patch.setattr(SlotDigests, "put", meanwhile)


# -- how a device copies --


def let_updates_pass(patch: pytest.MonkeyPatch, until: str = "") -> None:
    """Make no stream of an optimizer wait for the copy of the last snapshot. The host does not wait either, or only
    until that copy is "queued" or "copied"."""

    def passing(self: Stager, timeout_s: float = 60.0) -> float:
        job = self.gate.snapshot
        if job is not None and until:
            (job.enqueued if until == "queued" else job.copied).wait(timeout_s)
            self.gate.snapshot = None
        return 0.0

    patch.setattr(Stager, "before_update", passing)


def copy_before_the_step_has_ended(patch: pytest.MonkeyPatch) -> None:
    """Make copies wait for idle streams instead of the caller's stream."""

    idle = {torch.device("cuda", n): torch.cuda.Stream(n) for n in range(torch.cuda.device_count())}  # made while idle

    def hasty(job: NewSnapshot) -> None:
        job.ready = {device: idle[device].record_event() for device in job.streams}

    patch.setattr(NewSnapshot, "mark_ready", hasty)


def hold_other_streams(patch: pytest.MonkeyPatch) -> None:
    """Make other streams than the caller's wait for copies."""
    begin = NewSnapshot.__init__

    def changed(self: NewSnapshot, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.streams = {device: torch.cuda.Stream(device) for device in self.streams}

    patch.setattr(NewSnapshot, "__init__", changed)


def check_no_copies(patch: pytest.MonkeyPatch, *, nor_versions: bool = False) -> None:
    """Turn off the check that a tensor did not change while it was copied."""
    for check in ("check_copies", "check_versions")[: 1 + nor_versions]:
        patch.setattr(NewSnapshot, check, lambda *_: None)


def clone_at_most(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Set how many bytes of the tensors that are copied now may be cloned on the device."""
    patch.setattr(snapshot, "MOST", nbytes)


def clone_nothing(patch: pytest.MonkeyPatch) -> None:
    """Make the caller continue as if the tensors that are copied now had been cloned."""

    def no_clones(job: NewSnapshot, files: Any) -> bool:
        job.taken_early = True
        return True

    patch.setattr(NewSnapshot, "clone_early", no_clones)


def before_pages_are_locked(patch: pytest.MonkeyPatch, act: Callable[[int, int], object]) -> None:
    """Call `act` with address and size before memory is page-locked."""
    register = device.lock_pages

    def late(address: int, size: int, where: torch.device) -> int:
        act(address, size)
        return register(address, size, where)

    patch.setattr(device, "lock_pages", late)


def page_locks(cp: ckpt.Checkpointer) -> Any:
    """Return the page-locked ranges of snapshot memory."""
    return cp._run.stager.page_locks.held


# -- a Checkpointer --


def memory_ready(cp: ckpt.Checkpointer) -> None:
    """Wait until all snapshot memory is ready, so that no step is skipped for lack of it."""
    cp._run.supervisor.memory.take_prepared(30.0)
    end = time.monotonic() + 30.0
    while (arena := cp._run.stager.arena) is not None and arena.ready < arena.slots and time.monotonic() < end:
        time.sleep(0.002)


def restore_from_memory(cp: ckpt.Checkpointer, step: int, into: dict[str, Any]) -> None:
    """Restore the snapshot of a step from shared memory into another state."""
    with cp._run.supervisor.held.snapshots() as snapshots:
        snapshot = next(s for s in snapshots if s.checkpoint.step == step)
        result = restore_first_of([Snapshot(snapshot).source], into)
    assert result.step == step, result.skipped


def finite_in_memory(cp: ckpt.Checkpointer) -> set[bool | None]:
    """Return the values of `finite` of the snapshots in memory."""
    arena = cp._run.stager.arena
    assert arena is not None
    return {label.finite for _, label in arena.sealed()}


def slots_of(cp: ckpt.Checkpointer) -> list[memoryview]:
    """Return the memory of each slot."""
    arena = cp._run.stager.arena
    assert arena is not None
    return [arena.data(slot) for slot in range(arena.slots)]


def give_up_slots(cp: ckpt.Checkpointer) -> None:
    """Release slots, as under memory pressure, until no more can be released."""
    while cp._run.stager.give_up_slot():
        pass


def when_staged(save: ckpt.Save, act: Callable[[], object]) -> None:
    """Call `act` when staging has succeeded or failed."""
    save._staged.add_done_callback(lambda _: act())


def copied_at_once(cp: ckpt.Checkpointer) -> set[Any]:
    """Return the optimizer-owned tensors that are copied before `step()` returns because other code writes to them."""
    return cp._run.capture.eager


def guarded(cp: ckpt.Checkpointer) -> dict[str, bool]:
    """Map each tensor to True if only an optimizer writes to it, so that it may be copied during training."""
    reading = cp._run.capture.read()
    return dict(zip([t.name for t in reading.layout.tensors], reading.guarded, strict=True))


def updates_announced(cp: ckpt.Checkpointer) -> int:
    """Count the optimizer updates that hooks have announced."""
    return cp._run.hook.count


def current_step(cp: ckpt.Checkpointer) -> int | None:
    """Return the step that the live state is at."""
    return cp._run.step


def is_closed(cp: ckpt.Checkpointer) -> bool:
    """Return True once `close()` has begun."""
    return cp._run.closed


def abandon(cp: ckpt.Checkpointer) -> None:
    """Abandon saves in progress, as an exception on one rank of a multi-rank job does."""
    cp._closing.abandon()


def close_at_exit(cp: ckpt.Checkpointer) -> None:
    """Close it as the end of the interpreter does."""
    cp._closing.close_at_exit()


def fail_in_background(cp: ckpt.Checkpointer, error: ckpt.CheckpointError) -> None:
    """Record an error that the next call raises."""
    cp._run.errors.note(error)


def run_in_staging_thread(cp: ckpt.Checkpointer, act: Callable[[], object]) -> None:
    """Call `act` in the staging thread before its next task."""
    cp._run.stager._worker.put(act)


def do_before_it_lets_go_of_memory(cp: ckpt.Checkpointer, act: Callable[[], object]) -> None:
    """Call `act` before the staging thread stops at close."""
    stager, stop = cp._run.stager, cp._run.stager.stop

    def late(*arguments: Any) -> Any:
        act()
        return stop(*arguments)

    stager.stop = late  # type: ignore[method-assign]


def wait_for_writes(cp: ckpt.Checkpointer, timeout_s: float) -> None:
    """Wait as `wait()` does, without raising errors of failed saves."""
    cp._kept.wait(timeout_s, None)


def state_of(cp: ckpt.Checkpointer) -> dict[str, Any]:
    """Return the state that it saves."""
    return cp._run.capture.state


def differing_replicas(cp: ckpt.Checkpointer) -> Any:
    """Return the replicas that were found to differ across ranks."""
    return cp._saver.replicas.differing


def scores(callback: Any) -> list[tuple[float, int]]:
    """Return the best scores that a trainer callback has recorded, each with its step."""
    return list(callback._best.scores)


# -- a run that is written without torch and without processes --

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""The dtype, by its name in a file, and the shape of each tensor."""

PIECE = CHUNK  # bytes: larger tensors have several pieces, each with a digest of its own
PAGE = stores.PAGE  # bytes: pieces of different tensors do not share one


@dataclass(frozen=True)
class Contents:
    """Describes tensors and the order of their bytes in a snapshot."""

    layout: Layout

    @classmethod
    def of(cls, tensors: Tensors) -> Contents:
        """Give the first tensor a second name, as tied weights have, and add one plain value."""
        specs = tuple(TensorSpec(name, dtype, shape) for name, (dtype, shape) in tensors.items())
        component = {"path": ["x"], "kind": "plain", "facts": {}, "names": list(tensors)}
        return cls(Layout(specs, {"tied": specs[0].name}, [component]))

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return self.layout.arrangement.data_size

    @property
    def names(self) -> list[str]:
        """The tensors in the order of their bytes."""
        return [self.layout.tensors[i].name for i in self.layout.arrangement.order]

    def name_at(self, position: int) -> str:
        """The tensor that contains this byte."""
        pieces = self.layout.arrangement.chunks
        piece = next(one for one in pieces if one.offset <= position < one.offset + one.length)
        return self.layout.tensors[piece.tensor].name

    @property
    def digest(self) -> str:
        return self.layout.digest


@dataclass(frozen=True)
class ReadBack:
    """A checkpoint as it was read."""

    step: int
    data: bytes  # in the order of `Contents.names`
    values: Any


@dataclass
class Job:
    """A job that has a run open for writing, as a writer does."""

    log: RunLog
    owner: Acquire
    damaged: list[int]  # log records that were damaged when it opened the run

    @classmethod
    async def open(cls, store: Any, *, recover: bool = True) -> Job:
        """Take ownership of a run, or create it. `recover`: commit finished checkpoints of the previous job."""
        await commits.create_run(store)
        log = RunLog(store)
        await log.open()
        damaged = list(log.state.damaged)
        job = cls(log, await commits.acquire(log, manifest.new_nonce()), damaged)
        if recover:
            await commits.recover(log, job.owner)
        return job

    @classmethod
    async def go_on(cls, store: Any) -> Job:
        """Continue as the job that owns the run."""
        log = await read.open_run(store.url, store)
        return cls(log, log.state.acquires[-1], list(log.state.damaged))

    @property
    def steps(self) -> list[int]:
        """The steps of the present history, newest first."""
        return [commit.step for commit in self.log.state.lineage()]

    @property
    def last_record(self) -> str:
        """The name of the newest log record."""
        return record_key(self.log.state.next_seq - 1)

    async def write(self, step: int, contents: Contents, data: bytes, values: list[Any]) -> write.WrittenManifest:
        """Store all files of a checkpoint, without the record that commits it."""
        checkpoint = CheckpointId(self.owner.term, step, self.owner.nonce)
        snapshot = write.RankSnapshot(checkpoint, contents.layout, memoryview(data), values)
        return await write.write_part(self.log.store, snapshot)

    async def commit(self, written: write.WrittenManifest) -> None:
        await commits.commit(self.log, self.owner, [written])

    async def save(self, step: int, contents: Contents, data: bytes, values: list[Any]) -> None:
        await self.commit(await self.write(step, contents, data, values))

    async def verify(self) -> None:
        """Read every byte of the checkpoints of the present history."""
        for found in self.log.state.lineage():
            await read.verify(self.log.store, found)

    async def abort(self, written: write.WrittenManifest) -> None:
        """Record that a written checkpoint will not be committed."""
        await commits.abort(
            self.log, self.owner, CheckpointId.parse(written.manifest.checkpoint), "it mixes two moments"
        )

    async def retract(self, written: write.WrittenManifest) -> None:
        """Retract a checkpoint of the run."""
        await commits.retract(
            self.log, self.owner, CheckpointId.parse(written.manifest.checkpoint), "it mixes two moments"
        )

    async def clean_up(self, last: int) -> list[int]:
        """Expire all but the newest `last` checkpoints. Return the expired steps."""
        newest_one = self.log.state.lineage()[0].checkpoint
        given_up = await retention.retire(self.log, self.owner, retention.Keep(last=last), {newest_one})
        return sorted(checkpoint.step for checkpoint in given_up)


async def read_back(store: Any) -> ReadBack:
    """Read the newest readable checkpoint, as a restore does. Raise NoCheckpointError if there is none."""
    log = await read.open_run(store.url, store)
    problems: list[str] = []
    for found in log.state.lineage():
        try:
            return await _read_one(store, found)
        except CheckpointError as error:
            problems.append(str(error))
    raise NoCheckpointError(f"nothing can be restored: {problems}, log {log.state.damaged}")


async def _read_one(store: Any, found: Commit) -> ReadBack:
    whole = await read.load_all(store, found)
    of, saved = whole.layout(), whole.saved()
    offsets = dict(zip((t.name for t in of.tensors), of.arrangement.offsets, strict=True))
    data = bytearray(of.arrangement.data_size)
    pieces = [chunk for key in saved.tensors for chunk in saved.chunks(key)]
    seen = 0

    def sink(chunk: int, view: memoryview) -> None:
        nonlocal seen
        start = offsets[whole.table.shards[int(saved.shard_of_chunk[chunk])].name] + int(saved.position[chunk])
        data[start : start + len(view)] = view
        seen += len(view)

    await read.fetch(store, whole.table, read.plan_reads(whole.table, pieces), sink)
    assert seen == len(data)
    return ReadBack(found.step, bytes(data), whole.manifests[0].values)


async def check_unreadable(store: Any, step: int) -> None:
    """Fail if this step can be loaded."""
    log = await read.open_run(store.url, store)
    for found in log.state.lineage():
        if found.step == step:
            with pytest.raises(CheckpointError):
                await read.load_saved(store, found)


async def checked_steps(store: Any) -> list[int]:
    """Verify every byte of every live checkpoint. Return their steps; fail if anything is damaged."""
    log = await read.open_run(store.url, store)
    assert not log.state.damaged
    for found in log.state.commits.values():
        assert await read.verify(store, found) == []
    return sorted(checkpoint.step for checkpoint in log.state.commits)


def write_in_pieces_of(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Set how many bytes of a data file one call writes."""
    patch.setattr(write, "CHUNK", nbytes)


async def problems_in(store: Any, step: int) -> list[str]:
    """Verify one checkpoint. Return its problems."""
    log = await read.open_run(store.url, store)
    return await read.verify(log.store, read.choose(log, step))


class _Equal:
    """An object that equals every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class _AnyBytes(_Equal, bytes):
    """The digest of every piece."""


class _AnyText(_Equal, str):
    """The digest of every file."""


def trust_tensor_data(patch: pytest.MonkeyPatch) -> None:
    """Turn off the digest check of tensor data that is read from files."""
    patch.setattr(chunks, "chunk_digest", lambda view: _AnyBytes())


def trust_small_files(patch: pytest.MonkeyPatch) -> None:
    """Turn off the digest check of the small files of a checkpoint."""

    def trusting(raw: bytes, what: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(bytes(raw))
        del data["digest"]
        return data

    patch.setattr(manifest, "unseal", trusting)
    patch.setattr(manifests, "file_digest", lambda data: _AnyText())


def try_again_for(patch: pytest.MonkeyPatch, window_s: float, first_pause_s: float | None = None) -> None:
    """Set how long failing reads are retried."""
    patch.setattr(chunks, "_others", chunks._Faults())  # as in a process that has not failed yet
    patch.setattr(chunks, "WINDOW_S", window_s)
    if first_pause_s is not None:
        patch.setattr(chunks, "FIRST_PAUSE_S", first_pause_s)


# -- a run whose files are forged, digests and all --

NOTHING = Contents(Layout((), {}, []))


name_of_record = record_key  # of a log, by its number


async def saved_objects(
    states: Sequence[tuple[int, dict[str, Any]]], ranks: int
) -> tuple[dict[str, bytes], CheckpointId]:
    """Save states that `ranks` ranks hold as replicas, each under its step. Return the files and the id of the last
    checkpoint."""
    store = MemoryStore()
    job = await Job.open(store, recover=False)
    for step, state in states:
        reading = Capture(state).read()
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in reading.tensors]
        shares = [_divided(reading.layout, raw, rank, ranks) for rank in range(ranks)]
        written = [await job.write(step, Contents(layout), data, reading.values) for layout, data in shares]
        await commits.commit(job.log, job.owner, written)
    return store.objects, CheckpointId(job.owner.term, step, job.owner.nonce)


def _divided(layout: Layout, raw: list[bytes], rank: int, world: int) -> tuple[Layout, bytes]:
    """Return one rank's share of a replicated state: some rows of each tensor, some of the small tensors."""
    pieces, data, elsewhere = list[TensorSpec](), list[bytes](), {}
    for i, (t, whole) in enumerate(zip(layout.tensors, raw, strict=True)):
        rows = t.shape[0] if t.shape else 0
        if world > 1 and rows >= world:
            low, high = rows * rank // world, rows * (rank + 1) // world
            size, at = len(whole) // rows, (low, *(0 for _ in t.shape[1:]))
            pieces.append(replace(t, shape=(high - low, *t.shape[1:]), whole=t.shape, offsets=at))
            data.append(whole[low * size : high * size])
        elif i % world == rank:
            pieces.append(t)
            data.append(whole)
        else:
            elsewhere[t.name] = (t.dtype, t.shape)
    mine = replace(layout, tensors=tuple(pieces), rank=rank, world=world, elsewhere=elsewhere)
    return mine, b"".join(data[i] for i in mine.arrangement.order)


def resealed(document: Any) -> bytes:
    """Serialise a document with a valid digest."""
    if isinstance(document.get("layout"), dict):
        document = document | {"layout": manifest.press(manifest.canonical(document["layout"]))}
    return manifest.seal({k: v for k, v in document.items() if k != "digest"})


def opened_part(raw: bytes) -> Any:
    """Parse the manifest of a rank, with its layout unpacked for changes."""
    document: Any = json.loads(raw)
    return document | {"layout": json.loads(manifest.canonical(manifest.unpress(document["layout"])))}


def table_in(raw_part: bytes) -> bytes:
    """Return the chunk table in the manifest of a rank."""
    return Manifest.from_bytes(raw_part, "a part").table


def _indexed(manifests: list[bytes], before: bytes) -> bytes:
    """Return the index of these manifests, or the one before if they do not fit together."""
    try:
        found = [Manifest.from_bytes(raw, "a part") for raw in manifests]
        shares = [Share(p.rank, p.world, p.layout, p.values, Table.from_bytes(p.table, "a table")) for p in found]
        return build(shares).to_bytes()
    except (CorruptError, FormatError):
        return before


def forge(
    run: tuple[dict[str, bytes], CheckpointId],
    *,
    rank: int = 0,
    manifest: Callable[[Any], object] = lambda document: None,
    columns: Callable[[Any], object] = lambda columns: None,
    table: bytes | None = None,
    raw_part: bytes | None = None,
    body: Callable[[Any], object] = lambda body: None,
    record: Callable[[Any], object] = lambda record: None,
) -> dict[str, bytes]:
    """Change the files of one rank in the newest checkpoint, and recompute all digests. Return the files of the run."""
    objects, checkpoint = dict(run[0]), run[1]
    key, last = manifest_key(checkpoint, rank), max(k for k in objects if k.startswith("log/"))
    log_record = json.loads(objects[last])
    found = {k: v.copy() for k, v in columns_of(table_in(objects[key]), "a table").items()}
    columns(found)
    if table is None:
        table = FILE.to_bytes(found)
    document = opened_part(objects[key])
    document["table"] = base64.b64encode(table).decode()
    manifest(document)
    raw_part = raw_part or resealed(document)
    objects[key] = raw_part
    log_record["body"]["manifests"][rank] = [rank, file_digest(raw_part)]
    manifests = [objects[manifest_key(checkpoint, r)] for r, _ in log_record["body"]["manifests"]]
    index = _indexed(manifests, objects[index_key(checkpoint)])
    log_record["body"] |= {"index": file_digest(index)}
    body(log_record["body"])
    record(log_record)
    objects |= {index_key(checkpoint): index, last: resealed(log_record)}
    return objects


# -- a snapshot in shared memory --


@dataclass(frozen=True)
class Snapshot:
    """A sealed snapshot in shared memory, as a restore finds it after a death."""

    _held: HeldSnapshot

    @property
    def contents(self) -> Contents:
        return Contents(self._held.layout)

    @property
    def size(self) -> int:
        """Return the bytes of its tensors."""
        return self._held.label.data_size

    @property
    def data(self) -> memoryview:
        """The bytes of the tensors, in the order of `contents.names`."""
        return self._held.arena.data(self._held.slot, self._held.label.data_size)

    @property
    def values(self) -> memoryview:
        """Return its plain values."""
        return self._held.arena.values(self._held.slot, self._held.label)

    @property
    def label(self) -> memoryview:
        """The bytes of its label. Only for a snapshot in the first slot."""
        return self._held.arena.view[PAGE + 8 : PAGE + 104]

    def without_digests(self) -> Snapshot:
        """Return the same snapshot without digests."""
        return Snapshot(replace(self._held, digests=None))

    def overwrite(self) -> None:
        """Relabel the slot, as if another process had reused it."""
        self._held.arena.set_label(self._held.slot, replace(self._held.label, order=self._held.label.order + 1))

    def put_back(self) -> None:
        """Undo the change of `overwrite`."""
        self._held.arena.set_label(self._held.slot, self._held.label)

    @property
    def source(self) -> RestoreSource:
        return MemorySource(self._held.checkpoint, [self._held], alone=True)


def snapshot_of(state: dict[str, Any], fill: Callable[[Contents], bytes]) -> Snapshot:
    """Make a sealed snapshot of a state with digests. `fill` returns the bytes of its tensors."""
    reading = Capture(state).read()
    layout, values, data = reading.layout, json.dumps(reading.values).encode(), fill(Contents(reading.layout))
    arena = Arena.create(1, layout.arrangement.data_size + PAGE + len(values))
    arena.data(0)[: len(data)] = data
    label = Label(SEALED, 1, CheckpointId(1, 1, "0" * 8), layout.digest, len(data), len(values), 0.0)
    arena.set_label(0, label)
    arena.values(0, label)[:] = values
    digests = write.digest_chunks(layout, memoryview(data)) + chunk_digest(values)
    return Snapshot(HeldSnapshot(arena, 0, label, layout, digests))


class Bench:
    """Stages states into shared memory and commits them to a folder, without a writer process."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}"
        self._step = 0
        self._stager, self._arenas = Stager(), list[Arena]()
        self._owner: Acquire = asyncio.run(self._open())

    async def _open(self) -> Acquire:
        store = stores.open_store(self.url, writable=True)
        await commits.create_run(store)
        log = RunLog(store)
        await log.open()
        owner = await commits.acquire(log, "0badcafe")
        await store.aclose()
        return owner

    def snapshot(self, state: dict[str, Any], *, verified: bool = True) -> Snapshot:
        """Stage a state. `verified`: compute its digests."""
        reading = Capture(state).read()
        layout, text = reading.layout, json.dumps(reading.values).encode()
        size = layout.arrangement.data_size
        arena = Arena.create(2, pages(size) + len(text) + 4096)
        self._arenas.append(arena)
        self._stager.use(arena, lambda: None)
        self._step += 1
        job = NewSnapshot(CheckpointId(self._owner.term, self._step, self._owner.nonce), reading, text)
        self._stager.submit(job)
        assert job.copied.wait(30.0) and job.error is None, job.error
        assert job.place is not None
        label = arena.label(job.place[1])
        assert label is not None
        digests = write.digest_chunks(layout, arena.data(job.place[1], size)) + chunk_digest(text)
        return Snapshot(HeldSnapshot(arena, job.place[1], label, layout, digests if verified else None))

    def memory(self, state: dict[str, Any], *, verified: bool = True) -> RestoreSource:
        """A snapshot of a state, to restore from."""
        return self.snapshot(state, verified=verified).source

    def disk(self, state: dict[str, Any]) -> RestoreSource:
        """A checkpoint of a state, to restore from."""
        return self.store(self.snapshot(state))

    def store(self, snapshot: Snapshot) -> RestoreSource:
        """Commit a snapshot to the folder, to restore from there."""
        held = snapshot._held
        layout, checkpoint = held.layout, held.checkpoint
        data = held.arena.data(held.slot, layout.arrangement.data_size)
        values = json.loads(held.values())

        async def put() -> Commit:
            log = RunLog(stores.open_store(self.url, writable=True))
            await log.open()
            try:
                written = await write.write_part(log.store, write.RankSnapshot(checkpoint, layout, data, values))
                return await commits.commit(log, self._owner, [written])
            finally:
                await log.store.aclose()

        return StoreSource(self.url, checkpoint, asyncio.run(put()))

    def close(self) -> None:
        self._stager.stop()
        for arena in self._arenas:
            arena.close()


class SharedMemory:
    """Maps the memory that this process shares with its writer a second time, to damage it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @classmethod
    def of_this_process(cls) -> SharedMemory:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:ckpt-arena"):
                    return cls(Arena.attach(os.dup(int(name))))
        raise AssertionError("this process maps no arena")

    @property
    def header(self) -> dict[str, memoryview]:
        """The header of the arena, whole and by field."""
        view = self._arena.view
        return {
            "all": view[:PAGE],
            "magic": view[:8],
            "slot size": view[16:24],
            "id": view[24:40],
            "counts": view[40:48],
            "lock": view[256:304],
        }

    @property
    def labels(self) -> memoryview:
        """The labels of all slots."""
        return self._arena.view[PAGE : 2 * PAGE]

    def _entry(self) -> memoryview:
        at = PAGE + self._arena.sealed()[0][0] * PAGE // 16
        return self._arena.view[at : at + PAGE // 16]

    @property
    def newest_sequence(self) -> memoryview:
        """The sequence number of the newest label. It is odd while the label is being changed."""
        return self._entry()[:8]

    @property
    def newest_label(self) -> memoryview:
        """The label of the newest snapshot."""
        return self._entry()[8:]

    @property
    def newest_data(self) -> memoryview:
        """The bytes of the tensors of the newest snapshot."""
        slot, label = self._arena.sealed()[0]
        return self._arena.data(slot, label.data_size)


# -- capturing and restoring, without a Checkpointer --


def readable(state: dict[str, Any]) -> None:
    """Read a state as each save does. StateError if it cannot be saved."""
    Capture(state).read()


class Saved:
    """Holds one moment of a state as bytes and JSON text, as files do."""

    def __init__(self, reading: CapturedState) -> None:
        from toy_states import raw  # which imports much of torch

        self.layout = json.dumps(reading.layout.to_json())
        self.values = json.dumps(reading.values)
        self.data = {s.key: raw(t) for s, t in zip(reading.layout.tensors, reading.tensors, strict=True)}

    def restore(self, state: dict[str, Any], *, strict: bool = True) -> None:
        layout = Layout.from_json(json.loads(self.layout))
        table = write.build_table(layout, data_key(CheckpointId(1, 1, "0badcafe"), 0), None)
        saved = SavedState([layout], [json.loads(self.values)], [table], digested=False)
        placement = Capture(state).place(saved, strict=strict)
        placement.check()
        filler = Filler(saved, placement.fills, placement.whole)
        in_order = (layout.tensors[i] for i in layout.arrangement.order)
        shards = [self.data[spec.key] for spec in in_order]
        for chunk in filler.chunks:
            start, length = int(saved.position[chunk]), int(table.length[chunk])
            data = shards[int(saved.shard_of_chunk[chunk])][start : start + length]
            filler.add(chunk, memoryview(bytearray(data)))
        filler.finish()
        for finish in (*placement.finishers, *placement.last):
            finish()


def save_and_restore(state: dict[str, Any], into: dict[str, Any]) -> None:
    """Serialise a state and restore it into another one."""
    Saved(Capture(state).read()).restore(into)


def guarded_in(state: dict[str, Any]) -> dict[str, bool]:
    """Map each tensor that is saved of a state to True if only an optimizer writes to it."""
    reading = Capture(state).read()
    return dict(zip([t.name for t in reading.layout.tensors], reading.guarded, strict=True))


def tensor_of(state: dict[str, Any], name: str) -> torch.Tensor:
    """Return the tensor of a state that has this name in checkpoints."""
    reading = Capture(state).read()
    return dict(zip([t.name for t in reading.layout.tensors], reading.tensors, strict=True))[name]


def restore_first_of(
    sources: Sequence[RestoreSource],
    into: dict[str, Any],
    *,
    strict: bool = True,
    known: bool = False,
    on_touch: Callable[[], None] = lambda: None,
) -> ckpt.Restored:
    """Restore from the first usable source, in one process. `step` of the result is None if there is none.

    `known`: read the state first, as opening a run does. `on_touch` is called before the state is changed.
    """
    result, capture = ckpt.Restored(step=None), Capture(into)
    if known:
        with contextlib.suppress(StateError):
            capture.read()
    found = restore_first(World(), sources, capture, result, strict=strict, on_touch=on_touch)
    result.step = None if found is None else found.checkpoint.step
    return result


def restore_folder(url: str | Path, into: dict[str, Any], ranks: World | None = None) -> ckpt.Restored:
    """Restore the newest checkpoint of a run without opening it for writing, which would repair it. `step` of the
    result is None if there is none. `ranks`: see `threads.together`."""
    world, result = ranks or World(), ckpt.Restored(step=None)
    candidates = Candidates(world, [], [], [str(url)], [[0] * world.size], None)
    found_there, capture = candidates.gather(), Capture(into)
    found = restore_first(world, found_there, capture, result, strict=True, on_touch=lambda: None, lost=candidates.lost)
    result.step = None if found is None else found.checkpoint.step
    return result


def lost_in_folder(url: str | Path, into: dict[str, Any], ranks: World) -> list[Any]:
    """Look for checkpoints of a run on all ranks. Return the lost steps that this rank reports."""
    result, candidates = ckpt.Restored(step=None), Candidates(ranks, [], [], [str(url)], [[0] * ranks.size], None)
    candidates.gather()
    restore_first(ranks, [], Capture(into), result, strict=True, on_touch=lambda: None, lost=candidates.lost)
    return result.skipped


def sources_in(url: str | Path) -> list[RestoreSource]:
    """List the checkpoints of a run that can be restored, newest first."""
    return Candidates(World(), [], [], [str(url)], [[0]], None).gather()


def trust_memory(patch: pytest.MonkeyPatch) -> None:
    """Turn off the digest check of data that is copied out of shared memory."""
    put = sources.put

    def trusting(memory: Any, starts: Any, lengths: Any, digests: Any, places: Any) -> list[int]:
        return put(memory, starts, lengths, None, places)

    patch.setattr(sources, "put", trusting)


def take_every_layout_for_the_same(patch: pytest.MonkeyPatch) -> None:
    """Make a restore treat each state as having the layout of the checkpoint."""
    patch.setattr(Structure, "is_as_saved", lambda self, saved, pieces: True)


def take_no_layout_for_the_same(patch: pytest.MonkeyPatch) -> None:
    """Make a restore place each tensor by itself, even if the state has the layout of the checkpoint."""
    patch.setattr(Structure, "is_as_saved", lambda self, saved, pieces: False)


def note_filled_as_they_lie(patch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record, for each restore from now on, the tensors that are filled without being placed one by one."""
    seen: list[list[str]] = []
    fill = Filler.__init__

    def noting(self: Filler, saved: Any, fills: Any, whole: Any = (), **options: Any) -> None:
        seen.append([saved.table.shards[number].name for number, _ in whole])
        fill(self, saved, fills, whole, **options)

    patch.setattr(Filler, "__init__", noting)
    return seen


def note_loaded(patch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the tensors that `ckpt.load` reads from now on."""
    seen: list[str] = []
    fetch = loading.fill_from_store

    async def noting(url: str, checkpoint: CheckpointId, saved: Any, fills: dict[Any, Any]) -> None:
        seen.extend(name for name, _ in fills)
        await fetch(url, checkpoint, saved, fills)

    patch.setattr(loading, "fill_from_store", noting)
    return seen


def wait_for_common_state(seconds: float) -> None:
    """Set how long a rank with new optimizer state waits for the other ranks to report theirs."""
    common_state.WAIT_S = seconds


def assume_common_state() -> None:
    """Have each rank divide all optimizer state next to replicated parameters, whether the others have it or not."""
    common_state.CommonState.own = lambda self, checkpoint, groups, timeout_s: set()  # type: ignore[method-assign]
