"""A file as `torch.save` writes it: the whole state as one dict, for `torch.load`.

What is in it is what `torch.save({"model": model.state_dict(), "optim": optim.state_dict(), …}, path)` would have put
there, and beside it one text, under the name `convert.source.DESCRIPTION`, from which an import makes the state
again.
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
    """A file; of the tensors, what has been written to it need not be in memory."""

    def __init__(self, file: IO[bytes], tensors: Tensors) -> None:
        self._file, self._tensors = file, tensors

    def write(self, data: Any, /) -> int:
        count = self._file.write(data)
        self._tensors.forget()
        return count


Shape = Callable[[dict[str | int, Any]], dict[Any, Any]]  # of a nested state, before it is saved


def plan(origin: Origin, view: RankView, dtypes: Mapping[str, str], shape: Shape = dict) -> Output:
    """`dtypes`: as what to write each tensor, by label. The one file has no name yet. `shape`: what to make of the
    nested state; by default that is what is saved.

    The file can be loaded with `weights_only=True` and with `mmap=True`; tensors that are tied share memory in it.
    UsageError if the state has no room for the description, or something was left out that other values need.
    """
    native = Builder(view, Tensors(origin, dtypes), numbered=True, text_keys=False).build()
    shape(native.root)  # what is wrong is said before anything is made
    file, orders = stage(origin, view, dtypes), orders_of(view)
    if odd := [one for one, order in orders.items() if sorted(order) != list(range(len(origin.tensors[one].shape)))]:
        raise CorruptError(f"{odd[0]}: {orders[odd[0]]!r:.80} is not an order of its dimensions")

    def finish(out: Path, sums: Sums) -> None:
        tensors = Tensors(origin, dtypes, output.staged_path(out, file), file, orders)
        with out.open("wb") as target:
            root = Builder(view, tensors, numbered=True, text_keys=False).build().root
            torch.save(shape(root), cast(IO[bytes], _Frugal(target, tensors)))

    output = Output("torch.save", (file,), finish, single=True, staged=True, notes=native.notes)
    return output
