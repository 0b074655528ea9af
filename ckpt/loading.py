"""`ckpt.load`: read whole tensors of a checkpoint in one process, each when it is first used, or fill a state."""

from __future__ import annotations

import builtins
import difflib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from ckpt.core.checkpoint import losses, read, reference
from ckpt.core.checkpoint.losses import Skipped
from ckpt.core.checkpoint.reference import Which
from ckpt.core.format.boxes import Box
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.format.saved_state import Key, SavedState
from ckpt.core.format.values import Json, decode, show
from ckpt.core.log.run_log import Commit
from ckpt.core.restore.restore import Restored
from ckpt.core.restore.sources import fill_from_store
from ckpt.core.state.filler import Target
from ckpt.core.state.tensors import as_plain, empty, of_kind, to_array
from ckpt.errors import CorruptError, InvalidArgumentError, NoCheckpointError, public_class, public_function
from ckpt.events import log as logger
from ckpt.filling import fill
from ckpt.store import normalise, remember_options
from ckpt.units import count_of

MOST_NAMES = 20  # maximum names in an error message


@public_class
class Loaded(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name. Each is read and verified on first use, kept, and stays on the CPU.

    `step` and `url` identify the checkpoint. `skipped` lists newer checkpoints that were lost with a damaged log
    record. `values()` returns tensors, as in any Mapping; `plain(path)` returns plain values.
    """

    def __init__(
        self,
        url: str,
        checkpoint: CheckpointId,
        saved: SavedState,
        names: dict[str, Key],
        skipped: Sequence[Skipped] = (),
    ) -> None:
        self.url, self.step, self._saved, self._names = url, checkpoint.step, saved, names
        self.skipped = list(skipped)
        self._checkpoint = checkpoint
        self._cache: dict[Key, Tensor] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<step {self.step} of {self.url}: {count_of(len(self), 'tensor')}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(self._unknown(name))
        return self._read([self._names[name]])[self._names[name]]

    def all(self) -> dict[str, Tensor]:
        """Read all tensors together. Tensors that shared memory when they were saved share it again."""
        tensors = self._read(list(dict.fromkeys(self._names.values())))
        return {name: tensors[key] for name, key in self._names.items()}

    def slice(self, name: str, *index: builtins.slice | int) -> Tensor:
        """Read a part of a tensor: `loaded.slice("w", slice(0, 8))`. Only chunks that overlap the part are read.

        - `name`: name of the tensor.
        - `index`: one index per dimension, beginning with the first dimension; missing ones mean the whole dimension.

        Raises InvalidArgumentError for a slice with a step other than 1.
        """
        if name not in self._names:
            raise KeyError(self._unknown(name))
        key = self._names[name]
        spec = self._saved.tensors[key].spec
        box, dropped = _box(name, spec.shape, index)
        tensor = empty(replace(spec, shape=box[1]), "cpu")
        with self._lock:
            read.run(fill_from_store(self.url, self._checkpoint, self._saved, {key: [Target(tensor, box)]}))
        return tensor[tuple(0 if d in dropped else builtins.slice(None) for d in range(len(spec.shape)))]

    def sub(self, prefix: str) -> Loaded:
        """Return the tensors below a prefix, without it: `load(url).sub("model")` fits `model.load_state_dict`."""
        start = prefix.rstrip(".") + "."
        names = {name.removeprefix(start): key for name, key in self._names.items() if name.startswith(start)}
        if not names:
            raise InvalidArgumentError(f"no tensor of step {self.step} has a name that starts with {start!r}")
        return Loaded(self.url, self._checkpoint, self._saved, names, self.skipped)

    def plain(self, path: str, *, rank: int = 0) -> Any:
        """Return the plain values that one rank saved under an entry of the state, for example `plain("epoch")`.

        Three kinds of values are replaced, because their classes may not be installed: tensor subclasses by dicts of
        their inner tensors, objects of optimizers by dicts of their attributes, and enum members by their names. Raises
        KeyError with the names of all entries if there is no such entry.
        """
        if not 0 <= rank < self._saved.world:
            raise InvalidArgumentError(
                f"step {self.step} was saved by ranks 0 to {self._saved.world - 1}, not by rank {rank}"
            )
        for node in self._saved.nodes(rank):
            if show(node.path) == path:
                return decode(node.values, lambda reference: self._extern(reference, rank))
        raise KeyError(self._unknown_entry(path, rank))

    def _extern(self, reference: Json, rank: int) -> object:
        if reference["$"] == "wrapper":
            return {attribute: self._extern(inner, rank) for attribute, inner in reference["tensors"]}
        if reference["$"] not in ("tensor", "ndarray"):
            return as_plain(reference)
        key = self._saved.resolve(reference["name"], rank, self._saved.world, None, lenient=True)
        if not isinstance(key, tuple):
            raise CorruptError(f"{reference['name']} is not in step {self.step}")
        tensor = self._read([key])[key]
        return of_kind(tensor, reference) if reference["$"] == "tensor" else to_array(tensor, reference)

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._names, 3) or [n for n in self._names if n.endswith(f".{name}")][:3]
        return f"no tensor {name!r} in step {self.step}" + (f"; did you mean {', '.join(near)}?" if near else "")

    def _unknown_entry(self, path: str, rank: int) -> str:
        entries = [show(node.path) for node in self._saved.nodes(rank)]
        near = difflib.get_close_matches(path, entries, 3)
        meant = f"; did you mean {', '.join(near)}?" if near else ""
        more = f" and {len(entries) - MOST_NAMES} more" if len(entries) > MOST_NAMES else ""
        names = f"{', '.join(entries[:MOST_NAMES])}{more}"
        return f"no entry {path!r} in step {self.step}{meant or '.'} The entries are: {names}"

    def _read(self, keys: list[Key]) -> dict[Key, Tensor]:
        with self._lock:
            missing = [key for key in keys if key not in self._cache]
            if missing:
                saved = self._saved
                made = {key: empty(saved.tensors[key].spec, "cpu", order=saved.order(key)) for key in missing}
                fills = {key: [Target.whole(tensor)] for key, tensor in made.items()}
                read.run(fill_from_store(self.url, self._checkpoint, self._saved, fills))
                self._cache.update(made)
            return {key: self._cache[key] for key in keys}


def _box(name: str, shape: tuple[int, ...], index: tuple[builtins.slice | int, ...]) -> tuple[Box, set[int]]:
    """Return the box that an index selects, and the set of the dimensions that an int index removes."""
    if len(index) > len(shape):
        raise InvalidArgumentError(f"{name} has {count_of(len(shape), 'dimension')}, not {len(index)}")
    starts, sizes, dropped = [], [], set()
    for dim, size in enumerate(shape):
        at: builtins.slice | int = index[dim] if dim < len(index) else builtins.slice(None)
        if isinstance(at, int):
            if not -size <= at < size:
                raise InvalidArgumentError(f"{name}: index {at} is out of range for dimension {dim} of size {size}")
            dropped.add(dim)
            at = builtins.slice(at % size, at % size + 1)
        start, stop, step = at.indices(size)
        if step != 1:
            raise InvalidArgumentError(f"{name}: {at} has step {step}, but only step 1 can be read")
        starts.append(start)
        sizes.append(max(0, stop - start))
    return (tuple(starts), tuple(sizes)), dropped


@overload
def load(
    url: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    only: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Loaded: ...
@overload
def load(
    url: str | Path,
    *,
    into: dict[str, Any],
    step: int | None = None,
    best: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Restored: ...


@public_function
def load(
    url: str | Path,
    *,
    into: dict[str, Any] | None = None,
    step: int | None = None,
    best: bool = False,
    only: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Loaded | Restored:
    """Open the newest checkpoint of a run, or that of `step`, as whole tensors by name, regardless of the number of
    ranks that saved it. With `into`, fill a state instead.

    - `url`: the run, or one of its checkpoints as `RUN@STEP`.
    - `into`: dict of modules, optimizers, tensors and plain values, as for `ckpt.Checkpointer`. It is filled in place,
      bit for bit, and the result is a `Restored`. Every entry must be in the checkpoint and must fit; otherwise
      MismatchError is raised and nothing is changed. Other entries of the checkpoint are ignored. In a multi-rank job,
      all ranks must make the same call.
    - `step`: number of the step, default the newest.
    - `best`: True opens the checkpoint with the best score; see `ckpt.Best`.
    - `only`: shell pattern of tensor names, for example "model.*.weight", or the name of an entry, for example "model",
      which selects all tensors below it. Not allowed with `into`.
    - `storage_options`: as in `ckpt.Tier`.

    The run is only read, so its job can continue. Without `into`, a tensor of which ranks saved separate copies with
    different values is named `name#rank`. Newer checkpoints that are lost to damage are logged and listed in `skipped`.
    Raises NoCheckpointError if there is no run or no such checkpoint, and CorruptError if the bytes read are damaged.
    """
    if into is not None and only is not None:
        raise InvalidArgumentError("only= selects tensors by name, but the entries of into= select what is loaded")
    url, which = reference.split(url, step)
    if best and which not in (None, reference.BEST):
        raise InvalidArgumentError("pass best=True or a step, not both")
    which = reference.BEST if best else which
    location = normalise(url)
    remember_options(location, storage_options)
    if into is not None:
        return fill(into, location, which, subset=True)
    commit, saved, skipped = read.run(_open(location, which))
    if skipped:
        logger.warning("%s", losses.in_words(skipped, commit.step))
    names = {n: key for n, key in sorted(saved.labels.items()) if only is None or reference.matches(n, [only])}
    if not names and only is not None:
        raise InvalidArgumentError(f"no tensor of step {commit.step} in {location} matches {only!r}")
    return Loaded(location, commit.checkpoint, saved, names, skipped)


async def _open(location: str, which: Which) -> tuple[Commit, SavedState, list[Skipped]]:
    log, step = await read.open_run(location), reference.number(which)
    try:
        damage, acquires = await losses.of_log(log), log.state.acquires
        try:
            commit = read.choose(log, which)
        except NoCheckpointError as error:
            if missed := losses.passed_over(damage, None, acquires, step=step):
                raise NoCheckpointError(f"{error}. {losses.listed(missed)}") from None
            raise
        missed = losses.passed_over(damage, commit.checkpoint, acquires, step=step)
        return commit, await read.load_saved(log.store, commit), missed
    finally:
        await log.store.aclose()
