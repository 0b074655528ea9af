"""`ckpt.load`: whole tensors of a checkpoint, in one process, read when they are asked for."""

from __future__ import annotations

import builtins
import fnmatch
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ckpt.core.checkpoint import losses, read, spelling
from ckpt.core.checkpoint.losses import Skipped
from ckpt.core.checkpoint.spelling import Which
from ckpt.core.format.boxes import Box
from ckpt.core.format.manifest import Attempt
from ckpt.core.format.saved_state import Key, SavedState
from ckpt.core.format.values import Json, decode, show
from ckpt.core.log.log import Commit
from ckpt.core.restore.sources import fill_from_store
from ckpt.core.state.filler import Target
from ckpt.core.state.special_values import as_plain
from ckpt.core.state.tensors import empty, of_kind, to_array
from ckpt.errors import CorruptError, NoCheckpointError, UsageError, at_door, door
from ckpt.events import log as logger
from ckpt.store import normalise, remember_options


@door
class Loaded(Mapping[str, Tensor]):
    """Tensors by name. Each is read, verified and put on the CPU when it is first used, and kept.

    `step` and `url` say what it is; `skipped`: what was newer, and is lost with a damaged record of the log.
    `values(…)` is the Mapping's; plain values are under `plain(path)`.
    """

    def __init__(
        self, url: str, attempt: Attempt, saved: SavedState, names: dict[str, Key], skipped: Sequence[Skipped] = ()
    ) -> None:
        self.url, self.step, self._saved, self._names = url, attempt.step, saved, names
        self.skipped = list(skipped)
        self._attempt = attempt
        self._cache: dict[Key, Tensor] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<step {self.step} of {self.url}: {len(self)} tensors>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        return self._read([self._names[name]])[self._names[name]]

    def all(self) -> dict[str, Tensor]:
        """Every tensor, read in one go; names that shared memory when they were saved share it again."""
        tensors = self._read(list(dict.fromkeys(self._names.values())))
        return {name: tensors[key] for name, key in self._names.items()}

    def slice(self, name: str, *index: builtins.slice | int) -> Tensor:
        """A part of a tensor, of which only the blobs that hold some of it are read: `loaded.slice("w", slice(0, 8))`.

        One index a dimension, from the first on; those left out are taken whole. Steps other than 1 are refused.
        """
        key = self._names[name]
        spec = self._saved.tensors[key].spec
        box, dropped = _box(name, spec.shape, index)
        tensor = empty(replace(spec, shape=box[1]), "cpu")
        read.run(fill_from_store(self.url, self._attempt, self._saved, {key: [Target(tensor, box)]}))
        return tensor[tuple(0 if d in dropped else builtins.slice(None) for d in range(len(spec.shape)))]

    def sub(self, prefix: str) -> Loaded:
        """What lies under a prefix, without it: `load(url).sub("model")` suits `model.load_state_dict`."""
        start = prefix.rstrip(".") + "."
        names = {name.removeprefix(start): key for name, key in self._names.items() if name.startswith(start)}
        if not names:
            raise UsageError(f"no tensor of step {self.step} has a name that starts with {start!r}")
        return Loaded(self.url, self._attempt, self._saved, names, self.skipped)

    def plain(self, path: str, *, rank: int = 0) -> Any:
        """The plain values that a rank had under one entry of the state, such as `plain("epoch")`. KeyError if none.

        A tensor subclass that is made of others comes as a dict of these, and an object of an optimizer as a dict of
        its attributes, since their classes may not be there. Members of enums come as their names."""
        if not 0 <= rank < self._saved.world:
            raise UsageError(f"step {self.step} was saved by ranks 0 to {self._saved.world - 1}, not by rank {rank}")
        for node in self._saved.nodes(rank):
            if show(node.path) == path:
                return decode(node.values, lambda reference: self._extern(reference, rank))
        raise KeyError(path)

    def _extern(self, reference: Json, rank: int) -> object:
        if reference["$"] == "wrapper":
            return {attribute: self._extern(one, rank) for attribute, one in reference["tensors"]}
        if reference["$"] not in ("tensor", "ndarray"):
            return as_plain(reference)
        key = self._saved.resolve(reference["name"], rank, self._saved.world, None, lenient=True)
        if not isinstance(key, tuple):
            raise CorruptError(f"{reference['name']} is not in step {self.step}")
        tensor = self._read([key])[key]
        return of_kind(tensor, reference) if reference["$"] == "tensor" else to_array(tensor, reference)

    def _read(self, keys: list[Key]) -> dict[Key, Tensor]:
        with self._lock:
            missing = [key for key in keys if key not in self._cache]
            if missing:
                saved = self._saved
                made = {key: empty(saved.tensors[key].spec, "cpu", order=saved.order(key)) for key in missing}
                fills = {key: [Target.whole(tensor)] for key, tensor in made.items()}
                read.run(fill_from_store(self.url, self._attempt, self._saved, fills))
                self._cache.update(made)
            return {key: self._cache[key] for key in keys}


def _box(name: str, shape: tuple[int, ...], index: tuple[builtins.slice | int, ...]) -> tuple[Box, set[int]]:
    """An index as a box, and the dimensions that an int takes away."""
    if len(index) > len(shape):
        raise UsageError(f"{name} has {len(shape)} dimensions, not {len(index)}")
    starts, sizes, dropped = [], [], set()
    for dim, size in enumerate(shape):
        at: builtins.slice | int = index[dim] if dim < len(index) else builtins.slice(None)
        if isinstance(at, int):
            if not -size <= at < size:
                raise UsageError(f"{name}: index {at} is outside dimension {dim}, which has {size}")
            dropped.add(dim)
            at = builtins.slice(at % size, at % size + 1)
        start, stop, step = at.indices(size)
        if step != 1:
            raise UsageError(f"{name}: only slices with step 1 can be read, not {at}")
        starts.append(start)
        sizes.append(max(0, stop - start))
    return (tuple(starts), tuple(sizes)), dropped


@at_door
def load(
    url: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    only: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Loaded:
    """The newest checkpoint of a run, or that of `step`, as tensors by name, however many ranks saved it.

    `url`: the run, or one checkpoint of it as `RUN@STEP`, as commands take it; `best`: as `ckpt.Best` scored.
    `only`: a shell pattern such as "model.*". A tensor that ranks have for themselves, and not alike, is called
    `name#rank`. `storage_options`: as of `ckpt.Tier`. Raises FormatError if there is no run, NoCheckpointError if there
    is no such checkpoint, CorruptError if what is read is damaged. What damage has taken away that was newer is said,
    and in `skipped`.
    """
    url, which = spelling.split(url, step)
    if best and which not in (None, spelling.BEST):
        raise UsageError("best=True or a step: one of them")
    which = spelling.BEST if best else which
    place = normalise(url)
    remember_options(place, storage_options)
    commit, saved, skipped = read.run(_open(place, which))
    if skipped:
        logger.warning("%s", losses.in_words(skipped, commit.step))
    names = {n: key for n, key in sorted(saved.labels.items()) if only is None or fnmatch.fnmatchcase(n, only)}
    if not names and only is not None:
        raise UsageError(f"no tensor of step {commit.step} in {place} matches {only!r}")
    return Loaded(place, commit.attempt, saved, names, skipped)


async def _open(place: str, which: Which) -> tuple[Commit, SavedState, list[Skipped]]:
    log, step = await read.open_run(place), spelling.number(which)
    try:
        damage, acquires = await losses.of_log(log), log.state.acquires
        try:
            commit = read.choose(log, which)
        except NoCheckpointError as error:
            if missed := losses.passed_over(damage, None, acquires, step=step):
                raise NoCheckpointError(f"{error}. {losses.listed(missed)}") from None
            raise
        missed = losses.passed_over(damage, commit.attempt, acquires, step=step)
        return commit, await read.load_saved(log.store, commit, keep=True), missed
    finally:
        await log.store.aclose()
