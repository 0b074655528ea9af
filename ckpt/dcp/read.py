"""Read a checkpoint for torch's DCP: create its `Metadata`, and fill the items of a load plan."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckpt.core.checkpoint import chunks, losses, read
from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.format.saved_state import Key, SavedState
from ckpt.core.log.run_log import Acquire, RunLog, RunState, in_history, infer_root
from ckpt.core.restore.sources import fill_from_store
from ckpt.core.state.filler import Target
from ckpt.core.state.tensors import DTYPE_NAME, TORCH_DTYPE, empty
from ckpt.dcp.objects import check_object
from ckpt.dcp.rank_write import KIND
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    MismatchError,
    NoCheckpointError,
    NotFoundError,
    StoreError,
    UnreadableError,
    is_unreadable,
)
from ckpt.events import log as logger
from ckpt.store import folder_of

T = TypeVar("T")

SPARSE = 10_000  # a list may have this many more elements than the state has names, because empty elements have no name


@dataclass(frozen=True)
class Found:
    """A checkpoint to read. `others`: further tiers that may have the checkpoint. `roots`: for each tier that has it,
    the id of the run, by URL."""

    url: str
    checkpoint: CheckpointId
    saved: SavedState
    others: tuple[str, ...]
    roots: dict[str, str]

    def key(self, name: str) -> Key:
        key = self.saved.labels.get(name)
        if key is None:
            raise MismatchError(f"{name} is not in step {self.checkpoint.step} of {self.url}")
        return key


# -- choose the checkpoint --


async def find(urls: Sequence[str], step: int | None) -> Found:
    """Find the checkpoint of a step, or the newest readable one of the current history, in the nearest tier. Damage in
    one tier is repaired from the others. Without `step`, an older checkpoint replaces a damaged or lost one. Raise
    StoreError if the newest checkpoint, or a tier that may have it, cannot be read now, because only the user can
    decide to continue from an older one."""
    try:
        return await _find(urls, step)
    except NotFoundError:
        return await _find(urls, step)  # retention deleted the checkpoint in between, so a newer one exists


async def _find(urls: Sequence[str], step: int | None) -> Found:
    logs, first = await _open_logs(urls)
    states = {url: log.state for url, log in logs.items()}
    if first is not None and not states:
        raise first
    if step is None and isinstance(first, StoreError) and is_unreadable(first):
        raise UnreadableError(
            f"one tier cannot be read now and may have a newer step than the others: {first}. To continue without it, "
            "pass a checkpoint_id, or remove the tier",
            retryable=first.retryable,
        ) from first
    for checkpoint in _candidates(states, step):
        having = [url for url, state in states.items() if checkpoint in state.commits]
        away: StoreError | None = None
        for url in having:
            try:
                async with read.opened(url) as store:
                    saved = await read.load_saved(
                        store, states[url].commits[checkpoint], [u for u in having if u != url]
                    )
            except CheckpointError as error:
                first = first or error
                if isinstance(error, StoreError) and is_unreadable(error):
                    away = away or error
                logger.warning("step %d cannot be read from %s: %s", checkpoint.step, url, error)
                continue
            term = (checkpoint.term, checkpoint.nonce)
            roots = {u: log.root for u, log in logs.items() if term in {(a.term, a.nonce) for a in log.state.acquires}}
            return Found(url, checkpoint, saved, tuple(u for u in urls if u != url), roots)
        if away is not None:
            text = f"step {checkpoint.step} cannot be read now: {away}. To use an older step, pass its checkpoint_id"
            raise UnreadableError(text, retryable=away.retryable) from away
    if first is not None:
        raise first
    raise _nothing(states, step)


async def latest(urls: Sequence[str]) -> int | None:
    """Return the newest step, or None if there is no checkpoint or no run. Raise StoreError if a tier is temporarily
    unreadable."""
    there = [url for url in urls if await _again(url, lambda url=url: _is_run(url))]  # type: ignore[misc]
    with contextlib.suppress(NoCheckpointError):
        if there:
            return (await find(there, None)).checkpoint.step
    return None


async def _is_run(url: str) -> bool:
    async with read.opened(url) as store:
        try:
            await store.head("FORMAT.json")
        except NotFoundError:
            return await infer_root(store) is not None
        return True


async def _open_logs(urls: Sequence[str]) -> tuple[dict[str, RunLog], CheckpointError | None]:
    """Return the logs, already closed, and the most important error. An unreadable tier is the most important."""
    logs: dict[str, RunLog] = {}
    first: CheckpointError | None = None
    for url in urls:
        try:
            logs[url] = await _again(url, lambda url=url: _log(url))  # type: ignore[misc]
        except CheckpointError as error:
            if first is None or (is_unreadable(error) and not is_unreadable(first)):
                first = error
            if len(urls) > 1:
                logger.warning("skipped %s: %s", url, error)
    return logs, first


async def _log(url: str) -> RunLog:
    log = await read.open_run(url)
    try:
        await losses.warn(log)
    finally:
        await log.store.aclose()
    return log


async def _again(url: str, read_folder: Callable[[], Awaitable[T]]) -> T:
    """Retry a read of a folder for a short time if it cannot be read. Remote stores retry by themselves for longer."""
    until = time.monotonic() + chunks.WINDOW_S
    while True:
        try:
            return await read_folder()
        except StoreError as error:
            if not is_unreadable(error) or folder_of(url) is None or time.monotonic() >= until:
                raise
        await asyncio.sleep(chunks.FIRST_PAUSE_S)


def _candidates(states: dict[str, RunState], step: int | None) -> Iterator[CheckpointId]:
    """Yield checkpoints in the order to try. A tier that was unreachable may lack a rollback that the others record."""
    acquires: dict[int, Acquire] = {}
    for acquire in (a for state in states.values() for a in state.acquires):
        if acquires.get(acquire.term, acquire).restored is None:
            acquires[acquire.term] = acquire
    commits = {a: commit for state in states.values() for a, commit in state.commits.items()}
    history = in_history(acquires.values(), commits)
    if step is None:
        yield from (a for a in history if commits[a].finite is not False)
        return
    same = [a for a in (*history, *sorted(commits, reverse=True)) if a.step == step]
    yield from same[:1]


def _nothing(states: dict[str, RunState], step: int | None) -> NoCheckpointError:
    steps = sorted({a.step for state in states.values() for a in state.commits}, reverse=True)
    wanted = "a checkpoint" if step is None else f"step {step}"
    there = ", ".join(map(str, steps[:20])) or "none"
    return NoCheckpointError(f"{' and '.join(states)} does not have {wanted} (available steps: {there})")


# -- metadata of the checkpoint --


def metadata_of(saved: SavedState) -> Metadata:
    """Return the metadata for torch's planners. Raises CorruptError if the manifests are inconsistent."""
    try:
        facts = [c["facts"] for view in saved.views for c in view.components if c["kind"] == KIND]
        objects = {name for one in facts for name in one["objects"]}
        mappings = [one["mappings"] for one in facts if one["mappings"] is not None]
        longest = len(saved.labels) + SPARSE
        planner_data = dict(ChainMap(*({n: _path(path, longest) for n, path in one.items()} for one in mappings)))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the manifests' data on torch's names is damaged: {error!r}") from None
    entries: dict[str, STORAGE_TYPES] = {}
    # Tensors with the same sharding share one list, because there may be thousands of ranks.
    chunks: dict[int, list[ChunkStorageMetadata]] = {}
    for name, key in saved.labels.items():
        spec = saved.tensors[key].spec
        if name in objects and (spec.dtype != "U8" or len(spec.shape) != 1):
            raise CorruptError(f"{name} is listed as an object, but stored as a tensor")
        how = saved.index.pattern_number(saved.index.number[key])
        if how not in chunks:
            chunks[how] = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in saved.boxes(key)]
        entries[name] = BytesStorageMetadata() if name in objects else _entry(spec, chunks[how])
    return Metadata(entries, planner_data=planner_data if mappings else None)


def _path(path: Any, longest: int) -> tuple[str | int, ...]:
    """Check a path of names and list indexes. `longest` limits the size of the lists that torch will create."""
    if type(path) is not list or not path or type(path[0]) is not str:
        raise TypeError(f"not a path: {path!r:.80}")
    for part in path:
        if type(part) is not str and not (type(part) is int and 0 <= part < longest):
            raise ValueError(f"not a path: {path!r:.80}")
    return tuple(path)


def _entry(spec: TensorSpec, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    if spec.dtype not in TORCH_DTYPE:
        raise FormatError(f"{spec.name} has dtype {spec.dtype}, which this version of torch does not support")
    return TensorStorageMetadata(TensorProperties(TORCH_DTYPE[spec.dtype]), torch.Size(spec.shape), chunks)


# -- bytes of the checkpoint --


def fill(found: Found, plan: LoadPlan, planner: LoadPlanner, *, trusted: bool) -> None:
    """Read and verify the items of a plan into the planner's tensors. Objects are read first: if one is rejected, all
    tensors are unchanged. CorruptError names a tensor without an intact copy; tensors before it are filled."""
    objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
    tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
    rooms = {name: empty(found.saved.tensors[found.key(name)].spec, "cpu") for name in _names(objects)}
    _read(found, {found.key(name): [Target.whole(room)] for name, room in rooms.items()})
    if not trusted:
        for name, room in rooms.items():
            check_object(f"{name} of step {found.checkpoint.step}", room.numpy().data)
    targets = [_target(planner.resolve_tensor(item).detach(), item) for item in tensors]
    fills: dict[Key, list[Target]] = {}
    for item, target in zip(tensors, targets, strict=True):
        fills.setdefault(found.key(item.storage_index.fqn), []).append(target)
    _read(found, fills)
    for item, target in zip(tensors, targets, strict=True):
        planner.commit_tensor(item, target.tensor)
    for item in objects:
        planner.load_bytes(item, io.BytesIO(rooms[item.storage_index.fqn].numpy().tobytes()))


def _read(found: Found, fills: dict[Key, list[Target]]) -> None:
    read.run(fill_from_store(found.url, found.checkpoint, found.saved, fills, found.others))


def _names(items: Sequence[ReadItem]) -> list[str]:
    return list(dict.fromkeys(item.storage_index.fqn for item in items))


def _target(tensor: Tensor, item: ReadItem) -> Target:
    sizes = tuple(item.lengths)
    if tuple(tensor.shape) != sizes:
        raise MismatchError(
            f"{item.storage_index.fqn}: the planner returned a tensor of {list(tensor.shape)} for {list(sizes)}"
        )
    if tensor.dtype not in DTYPE_NAME:
        raise MismatchError(f"{item.storage_index.fqn}: a tensor of dtype {tensor.dtype} cannot be filled")
    chunk = item.storage_index.offset or (0,) * len(sizes)
    return Target(tensor, (tuple(i + j for i, j in zip(chunk, item.storage_offsets, strict=True)), sizes))
