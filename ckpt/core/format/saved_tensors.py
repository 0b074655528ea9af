"""The tensors of a checkpoint, each made of the pieces that ranks have saved of it: whether they agree about it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ckpt.core.format.boxes import Effort
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.partition import GLOBAL
from ckpt.core.format.rank_index import ALL, Key, RanksView, check_cover
from ckpt.core.format.shards import DTYPE_NUMBER, SavedShards
from ckpt.errors import CorruptError


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """`spec` is of the whole tensor; `shards` are numbers in the table that cover it exactly once.

    Of a directory only those that are attached, which cover what was asked for.
    """

    spec: TensorSpec
    shards: Sequence[int]


class _Tensors(Mapping[Key, SavedTensor]):
    """Made when they are asked for: a state that is as it was saved asks for none."""

    def __init__(
        self, rows: dict[Key, tuple[int, ...]], specs: dict[Key, TensorSpec], on_device: Container[Key]
    ) -> None:
        self._rows, self._specs, self._on_device = rows, specs, on_device

    def __getitem__(self, key: Key) -> SavedTensor:
        spec, accelerator = self._specs[key], key in self._on_device
        if spec.whole is not None or spec.accelerator != accelerator:
            spec = TensorSpec(spec.name, spec.dtype, spec.full, accelerator, instance=spec.instance)
        return SavedTensor(spec, self._rows[key])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows


def _check_forms(shards: SavedShards, specs: Sequence[TensorSpec]) -> None:
    """CorruptError unless each shard is of a tensor of this dtype and shape, by the layout of some rank."""
    dims = np.fromiter((len(t.full) for t in specs), np.int64, len(specs))
    wrong = (np.diff(shards.dim_starts) != 3 * dims) | (shards.dtype != [DTYPE_NUMBER.get(t.dtype, -1) for t in specs])
    if not wrong.any():
        ends = np.cumsum(dims)
        at = np.arange(int(dims.sum())) + np.repeat(shards.dim_starts[:-1] - (ends - dims), dims)
        odd = np.flatnonzero(shards.dims[at] != np.fromiter(chain.from_iterable(t.full for t in specs), np.int64))
        wrong[np.searchsorted(ends, odd, "right")] = True
    if wrong.any():
        shard, spec = shards[int(np.argmax(wrong))], specs[int(np.argmax(wrong))]
        raise CorruptError(
            f"{spec.name} is of shape {list(spec.full)} and dtype {spec.dtype} for one rank, and of "
            f"{list(shard.global_shape)} and {shard.dtype} for rank {shard.rank}: they disagree"
        )


def collect(shards: SavedShards, layouts: Sequence[Layout], views: Sequence[RanksView]) -> Mapping[Key, SavedTensor]:
    """Of the layouts of all ranks, and a table of all of them. CorruptError if they do not agree."""
    keys = list(zip(shards.names, shards.instance.tolist(), strict=True))
    rows: dict[Key, tuple[int, ...]] = {key: (i,) for i, key in enumerate(keys)}
    if several := len(rows) < len(keys):
        gathered: dict[Key, list[int]] = {}
        for i, key in enumerate(keys):
            gathered.setdefault(key, []).append(i)
        rows = {key: tuple(numbers) for key, numbers in gathered.items()}
    specs = {(t.name, t.instance): t for layout in layouts for t in layout.tensors}
    if specs.keys() != rows.keys():
        name, _ = min(specs.keys() ^ rows.keys())
        raise CorruptError(f"{name} is not in both the layouts and the table of the checkpoint")
    _check_forms(shards, [specs[key] for key in keys])
    effort, alone = Effort(Effort.left + 4 * len(shards)), shards.whole
    for key, numbers in rows.items() if several or not alone.all() else ():
        if len(numbers) > 1 or not alone[numbers[0]]:
            check_cover(specs[key].full, [shards[i].box for i in numbers], key[0], effort)
    on_device = {(t.name, t.instance) for layout in layouts for t in layout.tensors if t.accelerator}
    tensors = _Tensors(rows, specs, on_device)
    if len(layouts) > 1:
        _check_alike(tensors, layouts, views)
    return tensors


def _check_alike(tensors: Mapping[Key, SavedTensor], layouts: Sequence[Layout], views: Sequence[RanksView]) -> None:
    """What all ranks hold together, all of them must know, and in the same form, whoever staged it."""
    alike = {name: t.spec for (name, instance), t in tensors.items() if instance == GLOBAL}
    for view, layout in zip(views, layouts, strict=True):
        for name in sorted(alike.keys() - set(view.names())):
            raise CorruptError(f"{name} is not in the state of rank {layout.rank}, and others hold it together: {ALL}")
        for name, (dtype, shape) in layout.elsewhere.items():
            if name in alike and (dtype, shape) != (alike[name].dtype, alike[name].shape):
                raise CorruptError(
                    f"{name} is of shape {list(shape)} and dtype {dtype} for rank {layout.rank}, and of "
                    f"{list(alike[name].shape)} and {alike[name].dtype} for others: they disagree"
                )
