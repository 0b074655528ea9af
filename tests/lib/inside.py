"""Give tests of promises what they need from inside the library.

Files in `tests/promises` import only public names of `ckpt`, and this module. When the code behind a promise is
rewritten, this module follows it and the promises stay as they are; `tests/test_imports.py` checks that. So a name here
says what a test needs, not how the library does it today.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click.testing
import pytest
import torch

import ckpt
from ckpt import loading
from ckpt import store as stores
from ckpt.checkpoint import blobs, incremental, losses, parts, read, retention, steady, write
from ckpt.checkpoint import commit as commits
from ckpt.checkpoint.scrub import Scrub
from ckpt.cli import app
from ckpt.errors import CheckpointError, NoCheckpointError, NotFoundError, StateError
from ckpt.failpoints import INCREMENT_POINTS as INCREMENT_POINTS
from ckpt.failpoints import POINTS as POINTS
from ckpt.failpoints import TRAINER_POINTS as TRAINER_POINTS
from ckpt.failpoints import WRITER_POINTS as WRITER_POINTS
from ckpt.format import codec, manifest
from ckpt.format.digest import blob_digest
from ckpt.format.layout import BLOB, Layout, TensorSpec, pages
from ckpt.format.manifest import Attempt, index_key, owner, table_key
from ckpt.format.table import Table
from ckpt.ipc import process
from ckpt.ipc.arena import SEALED, Arena, Label
from ckpt.ranks.world import World
from ckpt.redo.frame_file import StoredFrame as StoredFrame
from ckpt.restore import redo_logs as redo_logs
from ckpt.restore import sources
from ckpt.restore.candidates import gather
from ckpt.restore.redo_logs import look as look
from ckpt.restore.restore_first import restore_first
from ckpt.restore.sources import HeldSnapshot, MemorySource, RestoreSource, StoreSource
from ckpt.runlog.log import RunLog, record_key
from ckpt.runlog.records import MARK, Acquire, Commit, RunState
from ckpt.state.capture import Capture
from ckpt.state.filler import Filler
from ckpt.state.structure import Structure
from ckpt.state.tensors import TORCH_DTYPE
from ckpt.trainer.closing import Closing
from ckpt.trainer.faults.fault_handler import FaultHandler
from ckpt.trainer.ownership import Ownership
from ckpt.trainer.saves import TierWrites
from ckpt.trainer.session import Session
from ckpt.trainer.staging.snapshot import PendingSnapshot
from ckpt.trainer.staging.stage import Stager
from ckpt.trainer.step_keeper import StepKeeper
from ckpt.trainer.supervise import find_writer, writer_client
from ckpt.trainer.supervise.next_arena import NextArena
from ckpt.trainer.supervise.writes import KnownLayouts

T = TypeVar("T")

# Re-exported above: the names of all fail points, by the process that gets there. Tests visit each of them.
# `StoredFrame`, `look` and `redo_logs` go with the redo log.
# And here, by its name in a file, each dtype that can be saved.
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
    """Run a coroutine to its end, also if an event loop is running."""
    return read.run(work)


def _with_log(url: str | Path, work: Callable[[RunLog], Awaitable[T]]) -> T:
    """Do something with the log of an existing run."""

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


def finite_at(url: str | Path) -> dict[int, bool | None]:
    """Map each step of a run to what its log says of `finite`."""
    return {commit.step: commit.finite for commit in _state(url).commits.values()}


def kept_at(url: str | Path) -> dict[int, str]:
    """Map the steps that a training keeps to the reasons it has given."""
    return {attempt.step: note.removeprefix(MARK) for attempt, note in _state(url).kept.items()}


@dataclass(frozen=True)
class LogView:
    """What the log of one place of a run says."""

    steps: list[int]  # of the present history, ascending
    ranks: dict[str, tuple[int, ...]]  # of each checkpoint, those whose files are in this place
    held_ids: list[str]  # of steps whose files are here, and which may lack those of other places

    @property
    def held(self) -> list[int]:
        """The steps of `held_ids`, ascending."""
        return sorted(Attempt.parse(one).step for one in self.held_ids)


def log_at(folder: Path) -> LogView:
    """Return what the log of a place says."""
    state = _state(folder)
    ranks = {str(attempt): tuple(rank for rank, _, _ in commit.parts) for attempt, commit in state.commits.items()}
    steps = sorted(commit.step for commit in state.lineage())
    return LogView(steps, ranks, [str(attempt) for attempt in state.held])


def problems_at(url: str | Path) -> list[str]:
    """Verify every byte of every live checkpoint. Return all that is wrong, damaged log records included."""

    async def look(log: RunLog) -> list[str]:
        found = [f"log record {seq} is damaged" for seq in log.state.damaged]
        for commit in log.state.commits.values():
            found += await read.verify(log.store, commit)
        return found

    return _with_log(url, look)


def lasting_problems_at(url: str | Path) -> list[str]:
    """Verify a run that others write to: return what is wrong with checkpoints that are live before and after."""

    async def look(log: RunLog) -> list[str]:
        found: list[tuple[Attempt, str]] = []
        for commit in log.state.lineage():
            found += [(commit.attempt, problem) for problem in await read.verify(log.store, commit)]
        await log.refresh()
        return [problem for attempt, problem in found if attempt in log.state.commits]

    return _with_log(url, look)


def problems_of_newest(url: str | Path) -> list[str]:
    """Verify every byte of the newest checkpoint of the present history. Return what is wrong."""

    async def look(log: RunLog) -> list[str]:
        return await read.verify(log.store, log.state.lineage()[0])

    return _with_log(url, look)


def losses_at(url: str | Path, meanwhile: Callable[[], object] = lambda: None, after_s: float = 0.0) -> list[int]:
    """List the steps that a reader says are lost. `meanwhile` happens while it looks, after so many seconds."""

    async def look(log: RunLog) -> list[int]:
        asyncio.get_running_loop().call_later(after_s, meanwhile)
        return [attempt.step for loss in await losses.of_log(log) for attempt in loss.attempts]

    return _with_log(url, look)


def step_of_file(key: str) -> int | None:
    """Return the step whose checkpoint has written a file of a run, None if its name does not say one."""
    found = owner(key)
    return found.step if found else None


def take_back(url: str | Path, choose: Callable[[list[int]], Collection[int]]) -> list[int]:
    """Retract checkpoints, as somebody else does who gives them up. `choose` gets the steps of the history, newest
    first. Return what it has chosen."""

    async def work() -> list[int]:
        store = stores.open_store(url, writable=True)
        try:
            log = RunLog(store)
            await log.open()
            chosen = choose([commit.step for commit in log.state.lineage()])
            for commit in log.state.lineage():
                if commit.step in chosen:
                    await commits.retract(log, None, commit.attempt, "a test")  # type: ignore[arg-type]
            return list(chosen)
        finally:
            await store.aclose()

    return read.run(work())


def rewrite_format(run: Path, **fields: object) -> None:
    """Change fields of the file that says what a run is written in, and make its digest right again."""
    path = run / "FORMAT.json"
    path.write_bytes(manifest.seal({**manifest.unseal(path.read_bytes(), "it"), **fields}))


def race_to_keep(url: str, times: int) -> None:
    """Have two processes, as it were, write a note on the same checkpoint at the same moment, several times."""

    async def both() -> None:
        logs = [await read.open_run(url) for _ in range(2)]
        attempt = next(iter(logs[0].state.commits))
        for n in range(times):
            await asyncio.gather(*(retention.set_keep(log, attempt, f"{n} {id(log)}") for log in logs))
        await asyncio.gather(*(log.store.aclose() for log in logs))

    asyncio.run(both())


def append_record(folder: str, before: Callable[[Any], None]) -> None:
    """Open a run for writing and append a record to its log. `before` gets the store, when all but that is done."""

    async def append() -> None:
        async with commits.written_run(folder) as log:
            mine = await commits.acquire(log, "0" * 8)
            before(log.store)
            await commits.abort(log, mine, Attempt(mine.epoch, 1, mine.nonce), "a test")

    read.run(append())


# -- what a checkpoint consists of --

ENCODINGS = {
    codec.RAW: "raw",
    codec.DELTA: "delta",
    codec.FLOAT_DELTA: "float delta",
    codec.BF16: "derived",
}  # the others are called by their numbers


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
        """The name that all its files have in theirs."""
        return str(self._commit.attempt)

    @property
    def full(self) -> bool:
        """Return True if it needs no file of an older checkpoint."""
        return self._commit.full

    @property
    def needs(self) -> list[int]:
        """The older steps that it was built on."""
        return [attempt.step for attempt in self._commit.needs]

    @property
    def files(self) -> set[str]:
        """The data files in which its tensors lie, of whichever checkpoint."""
        return set(self._table.packs)

    @property
    def ranks(self) -> set[int]:
        """The ranks that have saved its tensors."""
        return {shard.rank for shard in self._table.shards}

    @property
    def steps_of_files(self) -> set[int]:
        return {step for key in self._table.packs if (step := step_of_file(key)) is not None}

    def owns(self, key: str) -> bool:
        """Return True if this checkpoint has written that file."""
        return owner(key) == self._commit.attempt

    @property
    def encodings(self) -> Counter[str]:
        """How often each encoding is used: see `ENCODINGS`."""
        return Counter(ENCODINGS.get(code, str(code)) for code in self._table.codec.tolist())

    @property
    def has_bases(self) -> bool:
        """Return True if it knows pieces that others are stored as differences to."""
        return len(self._table.length) > self._table.owned

    def _shard(self, name: str) -> int:
        return next(i for i, shard in enumerate(self._table.shards) if shard.name == name)

    def place_of(self, name: str, piece: int = 0) -> tuple[str, int]:
        """Return the file and the offset of a piece of a tensor."""
        return self._table.place(self._table.blobs(self._shard(name))[piece])

    def place_of_difference(self) -> tuple[str, int]:
        """Return the file and the offset of the first piece that is stored as a difference."""
        return self._table.place(self._first_difference())

    def place_of_base(self) -> tuple[str, int]:
        """Return the file and the offset of what that piece is a difference to."""
        return self._table.place(int(self._table.base[self._first_difference()]))

    def _first_difference(self) -> int:
        table = self._table
        return next(b for b in range(table.owned) if table.codec[b] in (codec.DELTA, codec.FLOAT_DELTA))

    def bases_of(self, name: str) -> set[int]:
        """The steps to which the pieces of a tensor that this checkpoint has written are differences."""
        table = self._table
        of = [step_of_file(key) for key in table.packs]
        rows = [b for b in table.blobs(self._shard(name)) if table.base[b] >= table.owned]
        found = {of[table.pack[table.base[b]]] for b in rows if of[table.pack[b]] == self.step}
        return {step for step in found if step is not None}

    def suspect(self, name: str) -> Any:
        """Return what a writer remembers of the first piece of a tensor once it has found it damaged."""
        return self.place_of(name)

    @property
    def small_files(self) -> list[str]:
        """Patterns of the files that say where its tensors lie."""
        return [f"index/{self.id}*", table_key(self._commit.attempt, 0, 0)]


def history(url: str | Path) -> dict[int, SavedStep]:
    """Every checkpoint of the present history by its step, newest first; also while others write and clean up."""

    async def look(log: RunLog) -> dict[int, SavedStep]:
        while True:
            present = log.state.lineage()
            try:
                return {c.step: SavedStep(c, (await read.load_manifest(log.store, c)).table) for c in present}
            except NotFoundError:
                if (await log.refresh()).lineage() == present:
                    raise  # else it was retired meanwhile

    return _with_log(url, look)


def newest(url: str | Path) -> SavedStep:
    """The newest checkpoint, by its index alone, whatever other files are damaged or gone."""

    async def look(log: RunLog) -> SavedStep:
        commit = log.state.lineage()[0]
        index = index_key(commit.attempt, commit.index)
        return SavedStep(commit, await parts.load_table(log.store, index, commit.index))

    return _with_log(url, look)


def bytes_by_rank(url: str | Path) -> list[int]:
    """How many bytes of tensors each rank has written of the newest checkpoint."""

    async def look(log: RunLog) -> list[int]:
        found = await read.load_manifest(log.store, read.choose(log))
        return [sum(pack.size - pack.header_size for pack in part.packs) for part in found.parts]

    return _with_log(url, look)


def bytes_of_tensors(url: str | Path, prefix: str) -> int:
    """How many bytes the tensors of the newest checkpoint have whose names begin so."""

    async def look(log: RunLog) -> int:
        found = await read.load_manifest(log.store, read.choose(log))
        return sum(shard.nbytes for shard in found.saved().table.shards if shard.name.startswith(prefix))

    return _with_log(url, look)


MAX_CHAIN = incremental.MAX_CHAIN  # so many increments on one another, then comes a full checkpoint


def scrub_twice(url: str) -> tuple[list[list[Any]], list[int], list[bool]]:
    """Read a place in the background twice, as a writer does. Return for each round what has been found until then,
    how many bytes have been read until then, and whether there was anything to do."""

    async def look(log: RunLog) -> tuple[list[list[Any]], list[int], list[bool]]:
        found: list[Any] = []
        scrub = Scrub(log, 1e12, commits.Role, lambda: False, found.append)
        seen, amounts, fresh = [], [], []
        for _ in range(2):
            fresh.append(await scrub.round())
            seen.append(list(found))
            amounts.append(scrub.nbytes)
        return seen, amounts, fresh

    return _with_log(url, look)


SCRUB_SOON = """
import importlib.machinery, sys

class Soon:
    def find_spec(self, name, path=None, target=None):
        if name != "ckpt.checkpoint.scrub":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def impatient(module):
            run(module)
            module.PAUSE_S = module.ROUND_S = 0.2
        spec.loader.exec_module = impatient
        return spec

sys.meta_path.insert(0, Soon())
"""  # a sitecustomize.py with which writers read what they have stored at once, and again and again


# -- files in a folder or a bucket --


def use_options(url: str, options: dict[str, Any]) -> None:
    """Say how this process reaches a bucket."""
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
    """List the files of a place."""

    async def names(store: Any) -> list[str]:
        return [info.key async for info in store.list(prefix)]

    return _with_store(url, names)


def read_files(url: str) -> dict[str, bytes]:
    """Read every file of a place."""

    async def contents(store: Any) -> dict[str, bytes]:
        return {info.key: bytes(await store.get(info.key)) async for info in store.list()}

    return _with_store(url, contents)


def write_files(url: str, files: dict[str, bytes]) -> None:
    """Write files to a place, whatever is there."""

    async def put(store: Any) -> None:
        for key, raw in files.items():
            await store.put(key, raw)

    _with_store(url, put, writable=True)


def delete_files(url: str) -> None:
    """Delete every file of a place."""

    async def delete(store: Any) -> None:
        await store.delete_many([info.key async for info in store.list()])

    _with_store(url, delete, writable=True)


def open_folder(folder: str) -> Any:
    """Return the store of a folder, opened for writing."""
    return stores.open_store(folder, writable=True)


WITHOUT_FENCE = """
import ckpt.runlog.log
ckpt.runlog.log.RunLog.check_owner = lambda self, owner: None
"""  # a sitecustomize.py with which a writer does not notice that the run has another owner


# -- processes --

WRITER = "ckpt.writer.main"  # a word in the command line of each writer


class Process(Protocol):
    """A process as the library knows it: by more than its number."""

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...


def process_of(pid: int) -> Process:
    """Return a process that is not taken for another one which gets its number later."""
    return process.Process.of(pid)


MOST_RESTARTS_OF_WRITER = find_writer.RESPAWN_LIMIT  # after so many deaths in a row no writer is started any more


def run_in_writers(patch: pytest.MonkeyPatch, code: str) -> None:
    """Have each writer that this process starts run a line of code first."""
    patch.setattr(writer_client, "_BOOT", f"{code}; {writer_client._BOOT}")


# -- moments within a call, at which a test makes something happen --

Moment = tuple[type, str]

STATE_IS_READ: Moment = (Capture, "read")
RUN_IS_TAKEN: Moment = (Ownership, "take_over")
MADE: dict[str, Moment] = {  # what comes one after the other when a Checkpointer is made
    "introduce": (Session, "introduce"),
    "show": (Session, "_show"),
    "prepare": (Session, "_prepare"),
    "watch for faults": (FaultHandler, "start"),
}
STEPPING: dict[str, Moment] = {  # in `step()`; what comes then is another thread's, to which no signal comes
    "prepare memory": (NextArena, "prepare"),
    "tell the layout": (KnownLayouts, "tell"),
    "hand over": (Stager, "submit"),
}
LAST_STEP_IS_STAGED: Moment = (StepKeeper, "stage_last")
CLOSING: dict[str, Moment] = {  # in `close()`, one after the other
    "save the last step": (Closing, "_save_last"),
    "stage the last step": LAST_STEP_IS_STAGED,
    "wait for writes": (TierWrites, "wait"),
    "end": (Closing, "_end"),
    "let go": (Closing, "_let_go"),
}
WRITE_IS_ASKED_FOR: Moment = (TierWrites, "write")


def interrupt_at(
    patch: pytest.MonkeyPatch,
    moment: Moment,
    act: Callable[[], object],
    *,
    before: bool = True,
    always: bool = False,
    only: bool = False,
) -> None:
    """Have something happen at the first time, or `always`, that this moment comes: before what is done then, after it,
    or, with `only`, in place of it."""
    owner, method = moment
    original, left = getattr(owner, method), [act]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if before and left:
            (left[0] if always else left.pop())()
        if only:
            return None
        found = original(*arguments, **options)
        if not before and left:
            (left[0] if always else left.pop())()
        return found

    patch.setattr(owner, method, interrupted)


# -- a Checkpointer --


def wait_for_writes(cp: ckpt.Checkpointer, timeout_s: float) -> None:
    """Wait as `wait()` does, and raise nothing of what has failed."""
    cp._kept.wait(timeout_s, None)


def state_of(cp: ckpt.Checkpointer) -> dict[str, Any]:
    """Return the state that it saves."""
    return cp._session.capture.state


def differing_replicas(cp: ckpt.Checkpointer) -> Any:
    """Return what it knows of replicas that are not alike any more."""
    return cp._saves._replicas.differing


def scores(callback: Any) -> list[tuple[float, int]]:
    """Return the best scores that a trainer's callback has noted, each with its step."""
    return list(callback._best.scores)


# -- a run that is written without torch and without processes --

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""The dtype, by its name in a file, and the shape of each tensor."""

PIECE = BLOB  # bytes: larger tensors have several pieces, each with a digest of its own
PAGE = stores.PAGE  # bytes: pieces of different tensors do not share one


@dataclass(frozen=True)
class Contents:
    """Tensors of some kind, and how their bytes lie in one snapshot."""

    layout: Layout

    @classmethod
    def of(cls, tensors: Tensors) -> Contents:
        """The first has a second name, as tied weights do. There is one plain value besides."""
        specs = tuple(TensorSpec(name, dtype, shape) for name, (dtype, shape) in tensors.items())
        component = {"path": ["x"], "kind": "plain", "facts": {}, "names": list(tensors)}
        return cls(Layout(specs, {"tied": specs[0].name}, [component]))

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return self.layout.arrangement.data_size

    @property
    def names(self) -> list[str]:
        """The tensors in the order in which their bytes lie."""
        return [self.layout.tensors[i].name for i in self.layout.arrangement.order]

    def offset_of(self, name: str) -> int:
        """Where the bytes of a tensor begin."""
        names = [tensor.name for tensor in self.layout.tensors]
        return self.layout.arrangement.offsets[names.index(name)]

    def name_at(self, position: int) -> str:
        """The tensor to which a byte belongs."""
        pieces = self.layout.arrangement.blobs
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
    damaged: list[int]  # log records that were damaged when it came

    @classmethod
    async def open(cls, store: Any, *, recover: bool = True) -> Job:
        """Take a run over, or begin it. `recover`: commit what the job before has written and not committed."""
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
        """Go on as the job that has the run."""
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

    async def write(self, step: int, contents: Contents, data: bytes, values: list[Any]) -> write.WrittenPart:
        """Store all of a checkpoint but the record that makes it one."""
        attempt = Attempt(self.owner.epoch, step, self.owner.nonce)
        snapshot = write.RankSnapshot(attempt, contents.layout, memoryview(data), values)
        return await write.write_part(self.log.store, snapshot)

    async def commit(self, written: write.WrittenPart) -> None:
        await commits.commit(self.log, self.owner, [written])

    async def save(self, step: int, contents: Contents, data: bytes, values: list[Any]) -> None:
        await self.commit(await self.write(step, contents, data, values))

    async def abort(self, written: write.WrittenPart) -> None:
        """Say that what was written never becomes a checkpoint."""
        await commits.abort(self.log, self.owner, Attempt.parse(written.part.attempt), "it mixes two moments")

    async def retract(self, written: write.WrittenPart) -> None:
        """Take a checkpoint back."""
        await commits.retract(self.log, self.owner, Attempt.parse(written.part.attempt), "it mixes two moments")

    async def clean_up(self, last: int) -> list[int]:
        """Keep so many of the newest checkpoints. Return the steps that were given up."""
        newest_one = self.log.state.lineage()[0].attempt
        given_up = await retention.retire(self.log, self.owner, retention.Keep(last=last), {newest_one})
        return sorted(attempt.step for attempt in given_up)


async def read_back(store: Any) -> ReadBack:
    """Read the newest checkpoint that can be read, as a restore does. NoCheckpointError if there is none."""
    log = await read.open_run(store.url, store)
    problems: list[str] = []
    for found in log.state.lineage():
        try:
            return await _read_one(store, found)
        except CheckpointError as error:
            problems.append(str(error))
    raise NoCheckpointError(f"nothing can be restored: {problems}, log {log.state.damaged}")


async def _read_one(store: Any, found: Commit) -> ReadBack:
    whole = await read.load_manifest(store, found)
    of, saved = whole.layout(), whole.saved()
    offsets = dict(zip((t.name for t in of.tensors), of.arrangement.offsets, strict=True))
    data = bytearray(of.arrangement.data_size)
    pieces = [blob for key in saved.tensors for blob in saved.blobs(key)]
    seen = 0

    def sink(blob: int, view: memoryview) -> None:
        nonlocal seen
        start = offsets[whole.table.shards[int(saved.shard_of_blob[blob])].name] + int(saved.position[blob])
        data[start : start + len(view)] = view
        seen += len(view)

    await read.fetch(store, whole.table, read.plan_reads(whole.table, pieces), sink)
    assert seen == len(data)
    return ReadBack(found.step, bytes(data), whole.parts[0].values)


async def check_unreadable(store: Any, step: int) -> None:
    """Fail unless this step is no checkpoint of the history, or cannot be loaded."""
    log = await read.open_run(store.url, store)
    for found in log.state.lineage():
        if found.step == step:
            with pytest.raises(CheckpointError):
                await read.load_saved(store, found)


async def problems_in(store: Any, step: int) -> list[str]:
    """Verify one checkpoint. Return what is wrong."""
    log = await read.open_run(store.url, store)
    return await read.verify(log.store, read.choose(log, step))


class _Equal:
    """Equals every other."""

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
    """Take every piece of a tensor that is read from a file for what was saved."""
    patch.setattr(blobs, "blob_digest", lambda view: _AnyBytes())


def trust_small_files(patch: pytest.MonkeyPatch) -> None:
    """Take every small file of a checkpoint for what was saved."""

    def trusting(raw: bytes, what: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(bytes(raw))
        del data["digest"]
        return data

    patch.setattr(manifest, "unseal", trusting)
    patch.setattr(parts, "file_digest", lambda data: _AnyText())


def try_again_for(patch: pytest.MonkeyPatch, window_s: float, first_pause_s: float | None = None) -> None:
    """Say for how long reads that fail are tried again."""
    patch.setattr(steady, "WINDOW_S", window_s)
    if first_pause_s is not None:
        patch.setattr(steady, "FIRST_PAUSE_S", first_pause_s)


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
        """Bytes of tensors."""
        return self._held.label.data_size

    @property
    def data(self) -> memoryview:
        """The bytes of the tensors, in the order of `contents.names`."""
        return self._held.arena.data(self._held.slot, self._held.label.data_size)

    @property
    def values(self) -> memoryview:
        """The plain values."""
        return self._held.arena.values(self._held.slot, self._held.label)

    @property
    def label(self) -> memoryview:
        """The bytes that say what snapshot this is, of one that lies in the first slot."""
        return self._held.arena.view[PAGE + 8 : PAGE + 104]

    def without_digests(self) -> Snapshot:
        """The same, if nobody had computed digests of it."""
        return Snapshot(replace(self._held, digests=None))

    def overwrite(self) -> None:
        """Have another process use the slot again."""
        self._held.arena.set_label(self._held.slot, replace(self._held.label, order=self._held.label.order + 1))

    def put_back(self) -> None:
        """Undo `overwrite`."""
        self._held.arena.set_label(self._held.slot, self._held.label)

    @property
    def source(self) -> RestoreSource:
        return MemorySource(self._held.attempt, [self._held], alone=True)


def snapshot_of(state: dict[str, Any], fill: Callable[[Contents], bytes]) -> Snapshot:
    """Make a sealed snapshot of a state, with other bytes in its tensors and the digests that a writer would have."""
    reading = Capture(state).read()
    layout, values, data = reading.layout, json.dumps(reading.values).encode(), fill(Contents(reading.layout))
    arena = Arena.create(1, layout.arrangement.data_size + PAGE + len(values))
    arena.data(0)[: len(data)] = data
    label = Label(SEALED, 1, Attempt(1, 1, "0" * 8), layout.digest, len(data), len(values), 0.0)
    arena.set_label(0, label)
    arena.values(0, label)[:] = values
    digests = write.digest_blobs(layout, memoryview(data)) + blob_digest(values)
    return Snapshot(HeldSnapshot(arena, 0, label, layout, digests))


class Bench:
    """Stages states into shared memory, and commits them to a folder, without a writer process."""

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
        """Stage a state. `verified`: somebody computes digests of it."""
        reading = Capture(state).read()
        layout, text = reading.layout, json.dumps(reading.values).encode()
        size = layout.arrangement.data_size
        arena = Arena.create(2, pages(size) + len(text) + 4096)
        self._arenas.append(arena)
        self._stager.use(arena, lambda: None)
        self._step += 1
        job = PendingSnapshot(Attempt(self._owner.epoch, self._step, self._owner.nonce), reading, text)
        self._stager.submit(job)
        assert job.copied.wait(30.0) and job.error is None, job.error
        assert job.place is not None
        label = arena.label(job.place[1])
        assert label is not None
        digests = write.digest_blobs(layout, arena.data(job.place[1], size)) + blob_digest(text)
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
        layout, attempt = held.layout, held.attempt
        data = held.arena.data(held.slot, layout.arrangement.data_size)
        values = json.loads(held.values())

        async def put() -> Commit:
            log = RunLog(stores.open_store(self.url, writable=True))
            await log.open()
            try:
                written = await write.write_part(log.store, write.RankSnapshot(attempt, layout, data, values))
                return await commits.commit(log, self._owner, [written])
            finally:
                await log.store.aclose()

        return StoreSource(self.url, attempt, asyncio.run(put()))

    def close(self) -> None:
        self._stager.stop()
        for arena in self._arenas:
            arena.close()


class SharedMemory:
    """The memory that a trainer of this process and its writer share, mapped once more: to damage it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @classmethod
    def of_this_process(cls) -> SharedMemory:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:ckpt-arena"):
                    return cls(Arena.attach(os.dup(int(name))))
        raise AssertionError("there is no arena")

    @property
    def header(self) -> dict[str, memoryview]:
        """What says how the memory is divided, and its parts."""
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
        """What says which snapshot lies in which slot."""
        return self._arena.view[PAGE : 2 * PAGE]

    def _entry(self) -> memoryview:
        at = PAGE + self._arena.sealed()[0][0] * PAGE // 16
        return self._arena.view[at : at + PAGE // 16]

    @property
    def newest_sequence(self) -> memoryview:
        """The number that is odd while the label of the newest snapshot is changed."""
        return self._entry()[:8]

    @property
    def newest_label(self) -> memoryview:
        """What says which snapshot the newest is."""
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


def tensor_of(state: dict[str, Any], name: str) -> torch.Tensor:
    """Return what a state has under the name that a tensor of it has in checkpoints."""
    reading = Capture(state).read()
    return dict(zip([t.name for t in reading.layout.tensors], reading.tensors, strict=True))[name]


def restore_first_of(
    sources: Sequence[RestoreSource],
    into: dict[str, Any],
    *,
    strict: bool = True,
    on_touch: Callable[[], None] = lambda: None,
) -> ckpt.Restored:
    """Restore from the first source that can be used, in one process. Its `step` is None if none can.

    `on_touch` is called before anything of the state is changed.
    """
    result, capture = ckpt.Restored(step=None), Capture(into)
    with contextlib.suppress(StateError):
        capture.read()  # as whoever opens a run does
    found = restore_first(World(), sources, capture, result, strict=strict, on_touch=on_touch)
    result.step = None if found is None else found.attempt.step
    return result


def restore_folder(url: str | Path, into: dict[str, Any], ranks: World | None = None) -> ckpt.Restored:
    """Restore the newest checkpoint of a run that nobody takes over and mends before. Its `step` is None if there is
    none. `ranks`: see `threads.together`."""
    world, result, lost = ranks or World(), ckpt.Restored(step=None), list[losses.Loss]()
    found_there = gather(world, [], [], [str(url)], [[0] * world.size], None, lost)
    found = restore_first(world, found_there, Capture(into), result, strict=True, on_touch=lambda: None, lost=lost)
    result.step = None if found is None else found.attempt.step
    return result


def lost_in_folder(url: str | Path, into: dict[str, Any], ranks: World) -> list[Any]:
    """Look for what can be restored of a run. Return what each rank is told of steps that are lost."""
    result, lost = ckpt.Restored(step=None), list[losses.Loss]()
    gather(ranks, [], [], [str(url)], [[0] * ranks.size], None, lost)
    restore_first(ranks, [], Capture(into), result, strict=True, on_touch=lambda: None, lost=lost)
    return result.skipped


def sources_in(url: str | Path) -> list[RestoreSource]:
    """The checkpoints of a run that can be restored, newest first."""
    return gather(World(), [], [], [str(url)], [[0]], None)


def trust_memory(patch: pytest.MonkeyPatch) -> None:
    """Take what is copied out of memory for what was saved."""
    put = sources.put

    def trusting(memory: Any, starts: Any, lengths: Any, digests: Any, places: Any) -> list[int]:
        return put(memory, starts, lengths, None, places)

    patch.setattr(sources, "put", trusting)


def take_every_layout_for_the_same(patch: pytest.MonkeyPatch) -> None:
    """Have a restore believe that the state lies as what was saved."""
    patch.setattr(Structure, "is_as_saved", lambda self, saved, pieces: True)


def take_no_layout_for_the_same(patch: pytest.MonkeyPatch) -> None:
    """Have a restore place each tensor by itself, also if the state lies as what was saved."""
    patch.setattr(Structure, "is_as_saved", lambda self, saved, pieces: False)


def note_filled_as_they_lie(patch: pytest.MonkeyPatch) -> list[list[str]]:
    """Note, for each restore from now on, which tensors are filled without being placed one by one."""
    seen: list[list[str]] = []
    fill = Filler.__init__

    def noting(self: Filler, saved: Any, fills: Any, lying: Any = (), **options: Any) -> None:
        seen.append([saved.table.shards[number].name for number, _ in lying])
        fill(self, saved, fills, lying, **options)

    patch.setattr(Filler, "__init__", noting)
    return seen


def note_loaded(patch: pytest.MonkeyPatch) -> list[str]:
    """Note the names of the tensors that `ckpt.load` reads from now on."""
    seen: list[str] = []
    fetch = loading.fill_from_store

    async def noting(url: str, attempt: Attempt, saved: Any, fills: dict[Any, Any]) -> None:
        seen.extend(name for name, _ in fills)
        await fetch(url, attempt, saved, fills)

    patch.setattr(loading, "fill_from_store", noting)
    return seen
