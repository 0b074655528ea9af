"""Lightning's own checkpoints as everystep runs: `Trainer(plugins=[ckpt.lightning.CheckpointIO()])`.

    trainer = Trainer(plugins=[CheckpointIO()], callbacks=[ModelCheckpoint(every_n_train_steps=1000)])

Every path used by ModelCheckpoint, `trainer.save_checkpoint` or a user becomes a folder (or prefix of a bucket) with a
run of one checkpoint, in which every byte has a digest and nothing is pickled. The folder exists when
`save_checkpoint` returns, and can be read when the save is complete. All commands and `ckpt.load(path)` read it. Use
this plugin if a training saves through Lightning; `CheckpointCallback` saves more, and automatically.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import shutil
import sys
import threading
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import fsspec
import torch

import ckpt.adapters  # noqa: F401 - registers them
from ckpt.core.checkpoint import read, retention
from ckpt.core.checkpoint.commits import acquire, commit, create_run, written_run
from ckpt.core.checkpoint.lease import check_free
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.write import RankSnapshot, page_aligned, write_part
from ckpt.core.format.manifest import CheckpointId, new_nonce
from ckpt.core.state.capture import Capture
from ckpt.core.state.tensors import TORCH_DTYPE
from ckpt.errors import NoCheckpointError, RunGoneError, UsageError
from ckpt.events import log as logger
from ckpt.filling import is_run
from ckpt.lightning.collected import to_device
from ckpt.lightning.configs import from_plain, to_plain
from ckpt.loading import load
from ckpt.store import folder_of, normalise, open_store, remember_options

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import CheckpointIO as Base
else:
    Base = object

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # two names of one project, with separate classes
_made: dict[tuple[type, ...], type] = {}


def with_bases(cls: type, where: str, name: str) -> type:
    """Return `cls` as a subclass of Lightning's class `name` in each of the packages imported in this process."""
    if len(cls.__mro__) > 2 and any(c.__module__.startswith(("lightning.", "pytorch_light")) for c in cls.__mro__):
        return cls
    used = [package for package in PACKAGES if package in sys.modules] or [_import_one()]
    bases = [getattr(importlib.import_module(f"{package}{where}"), name) for package in used]
    key = (cls, *dict.fromkeys(bases))
    if key not in _made:
        made = types.new_class(cls.__name__, key)
        made.__qualname__, made.__module__, made.__doc__ = cls.__qualname__, cls.__module__, cls.__doc__
        _made[key] = made
    return _made[key]


def _import_one() -> str:
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name not in (package, package.partition(".")[0]):
                raise
        else:
            return package
    raise UsageError("Lightning is not installed: pip install 'everystep[lightning]'")


class CheckpointIO(Base):
    """Writes in the background while a Trainer runs: `save_checkpoint` returns when the tensors are copied and the path
    exists.

    An error of the write is raised by the next call, and the Trainer waits for the write when it ends. Outside a
    Trainer, or inside an `AsyncCheckpointIO`, which has its own thread, `save_checkpoint` returns when everything is
    written. A value that needs pickle raises StateError with its path in the state.

    Do not wrap this plugin in an `AsyncCheckpointIO`. That wrapper returns before its thread has created the path, so
    two ModelCheckpoints in one folder overwrite each other's files.

    Checkpoint files of Lightning can be loaded too, if they contain only tensors and plain values.
    """

    def __new__(cls, *args: Any, **arguments: Any) -> CheckpointIO:
        found: CheckpointIO = object.__new__(with_bases(cls, ".plugins.io", "CheckpointIO"))
        return found

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()  # AsyncCheckpointIO saves in its thread, but removes in the Trainer's
        self._writing: tuple[ThreadPoolExecutor, Future[None]] | None = None

    def __reduce__(self) -> Any:
        return CheckpointIO, ()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save a checkpoint, after the previous save has ended. `storage_options`: a dict as in `ckpt.Tier`. Raises
        UsageError for other kinds of options, and StateError for values that cannot be stored."""
        url = normalise(path)
        remember_options(url, storage_options)
        if storage_options and urlsplit(url).scheme == "file":
            raise UsageError(
                f"storage_options with {', '.join(storage_options)} are for buckets, but {url} is a folder"
            )
        with self._lock:
            self._finish()
            writing = _write(url, _freeze(to_plain(checkpoint)), int(checkpoint.get("global_step", 0)))
            if _in_a_run():
                try:
                    read.run(_create(url))  # now, because ModelCheckpoint avoids names of paths that exist
                except BaseException:
                    writing.close()
                    raise
                _forget_listing(url)
                pool = ThreadPoolExecutor(1, "ckpt-lightning")
                self._writing = pool, pool.submit(asyncio.run, writing)
                pool.shutdown(wait=False)  # its thread ends when the write is complete
            else:
                read.run(writing)
                _forget_listing(url)

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        """Return the verified checkpoint. Tensors are on the CPU unless `map_location` is given, as in `torch.load`.
        Files of Lightning are read without executing code, whatever `weights_only` is. Raises FileNotFoundError if the
        path has no checkpoint, or only an unfinished one."""
        with self._lock:
            self._finish()
        url = normalise(path)
        local = folder_of(url)
        if local is not None and local.is_file():
            return torch.load(local, map_location=map_location, weights_only=True)
        if local is not None and not local.exists():
            raise FileNotFoundError(f"checkpoint not found: {path} does not exist")
        try:
            loaded = load(path)
        except NoCheckpointError:
            if read.run(_is_empty(url)):
                raise FileNotFoundError(f"checkpoint not found: {path} is empty") from None
            if not is_run(url):
                raise
            raise FileNotFoundError(
                f"checkpoint not found: the first save to {path} did not finish. Delete it, or use another ckpt_path"
            ) from None
        loaded.all()  # read all tensors together
        checkpoint, device = from_plain(loaded.plain(NAME)), _device(map_location)
        return checkpoint if device is None else to_device(checkpoint, device)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a run of this plugin, a file or a link, if it exists."""
        with self._lock:
            self._finish()
            local = None if folder_of(normalise(path)) is None else Path(path)
            if local is not None and (local.is_file() or local.is_symlink()):
                local.unlink()
            elif local is None or local.exists():
                read.run(_remove(normalise(path)))
                _forget_listing(normalise(path))

    def teardown(self) -> None:
        """Wait for the write in progress and end its thread."""
        with self._lock:
            self._finish()

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            pool, done = writing
            pool.shutdown()
            done.result()


def _in_a_run() -> bool:
    """Return True if a Trainer runs its loops in this thread, because only then it will call teardown()."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_run_stage":
            caller = type(frame.f_locals.get("self"))
            if any(one.__name__ == "Trainer" for one in caller.__mro__):
                return True
        frame = frame.f_back
    return False


NAME = "checkpoint"  # name of the only entry in the state


def _freeze(checkpoint: dict[str, Any]) -> Any:
    """Return the layout, the bytes and the values of the checkpoint, copied now."""
    reading = Capture({NAME: checkpoint}).read()
    layout = reading.layout
    data = page_aligned(layout.arrangement.data_size)
    if layout.arrangement.data_size:
        whole = torch.frombuffer(data, dtype=torch.uint8)
        for spec, offset, tensor in zip(layout.tensors, layout.arrangement.offsets, reading.tensors, strict=True):
            place = whole[offset : offset + spec.nbytes].view(TORCH_DTYPE[spec.dtype]).view(spec.shape)
            place.copy_(tensor)
    return layout, data, reading.values


async def _create(url: str) -> None:
    """Create the run, so that its folder, or its first object in a bucket, exists."""
    store = open_store(url, writable=True)
    try:
        await create_run(store)
    finally:
        await store.aclose()


def _forget_listing(url: str) -> None:
    """Clear the listings that fsspec has cached. ModelCheckpoint looks for existing paths through fsspec, but this
    plugin writes without fsspec."""
    scheme = urlsplit(url).scheme
    if scheme != "file" and scheme in fsspec.registry:  # only a scheme that this process has used has cached listings
        fsspec.core.url_to_fs(url)[0].invalidate_cache()


async def _write(url: str, frozen: Any, step: int) -> None:
    layout, data, values = frozen
    async with written_run(url) as log:
        await check_free(log, lambda text: logger.warning("%s", text))  # a Checkpointer may train the run
        owner = await acquire(log, new_nonce())
        checkpoint = CheckpointId(owner.term, step, owner.nonce)
        try:
            written = await write_part(log.store, RankSnapshot(checkpoint, layout, data, values))
            await commit(log, owner, [written])
        except RunGoneError:
            await OpenTier(url, retention.Keep(1), log).remove_rest(checkpoint)
            raise
        if len(log.state.commits) > retention.ALWAYS:  # only for a path that is saved repeatedly, for example last.ckpt
            await retention.retire(log, owner, retention.Keep(last=1), {checkpoint})


async def _is_empty(url: str) -> bool:
    """Return True if there is no file or object at the URL."""
    store = open_store(url)
    try:
        async for _ in store.list():
            return False
        return True
    finally:
        await store.aclose()


async def _remove(url: str) -> None:
    store = open_store(url)
    try:
        keys = [info.key async for info in store.list()]
        if "FORMAT.json" not in keys and (keys or not store.remote):
            raise UsageError(f"{url} is not an everystep checkpoint, so it was not removed")
        log_first = sorted(keys, key=lambda key: (not key.startswith("log/"), key == "FORMAT.json", key))
        for some in (log_first[i : i + 1000] for i in range(0, len(keys), 1000)):
            await store.delete_many(some)
    finally:
        await store.aclose()
    if (folder := folder_of(url)) is not None:
        shutil.rmtree(folder)


def _device(map_location: Any) -> Any:
    """Return the device to which tensors are moved, or None to keep them on the CPU."""
    if callable(map_location):
        found = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if found is None else found.device
    return map_location.get("cpu") if isinstance(map_location, dict) else map_location
