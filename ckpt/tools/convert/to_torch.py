"""Write the whole state as one dict in a file for `torch.load`.

The contents are those of `torch.save({"model": model.state_dict(), "optim": optim.state_dict(), …}, path)`. A text
under the key `convert.source.DESCRIPTION` is added, from which an import rebuilds the state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from ckpt.errors import CorruptError
from ckpt.tools.convert.output import Output, Sums
from ckpt.tools.convert.source import Origin, RankView
from ckpt.tools.convert.torch_state import Builder, Tensors, orders_of, stage


class _Frugal(io.RawIOBase):
    """A file object that releases the memory of tensors after they are written."""

    def __init__(self, file: IO[bytes], tensors: Tensors) -> None:
        self._file, self._tensors = file, tensors

    def write(self, data: Any, /) -> int:
        count = self._file.write(data)
        self._tensors.forget()
        return count


Shape = Callable[[dict[str | int, Any]], dict[Any, Any]]  # a function that changes the nested state before it is saved


def plan(origin: Origin, view: RankView, dtypes: Mapping[str, str], shape: Shape = dict) -> Output:
    """Plan the file. The caller chooses its name. `dtypes`: dtype to write, by label. `shape`: changes the nested
    state. torch can load the file with `weights_only=True` and `mmap=True`; tied tensors share memory in it. Raise
    UsageError if the state uses the key of the description, or if a value refers to a tensor that is excluded."""
    native = Builder(view, Tensors(origin, dtypes), numbered=True, text_keys=False).build()
    shape(native.root)  # called once now, because it may raise an error
    file, orders = stage(origin, view, dtypes), orders_of(view)
    if odd := [one for one, order in orders.items() if sorted(order) != list(range(len(origin.tensors[one].shape)))]:
        raise CorruptError(f"{odd[0]}: {orders[odd[0]]!r:.80} is not a permutation of its dimensions")

    def finish(out: Path, sums: Sums) -> None:
        tensors = Tensors(origin, dtypes, output.staged_path(out, file), file, orders)
        with out.open("wb") as target:
            root = Builder(view, tensors, numbered=True, text_keys=False).build().root
            torch.save(shape(root), cast(IO[bytes], _Frugal(target, tensors)))

    output = Output("torch.save", (file,), finish, single=True, staged=True, notes=native.notes)
    return output
