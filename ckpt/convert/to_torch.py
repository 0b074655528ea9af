"""A file as `torch.save` writes it: the whole state as one dict, for `torch.load`.

What is in it is what `torch.save({"model": model.state_dict(), "optim": optim.state_dict(), …}, path)` would have put
there, and beside it one text, under the name `ckpt.convert.source.DESCRIPTION`, from which an import makes the state
again.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt.convert.output import OutFile, Output
from ckpt.convert.source import Origin, RankView
from ckpt.convert.torch_native import Builder, StandIns, save


def plan(origin: Origin, view: RankView, dtypes: Mapping[str, str]) -> Output:
    """`dtypes`: as what to write each tensor, by label. The one file has no name yet.

    The file can be loaded with `weights_only=True` and with `mmap=True`; tensors that are tied share memory in it.
    UsageError if the state has no room for the description, or something was left out that other values need.
    """
    stand_ins = StandIns(origin, dtypes)
    native = Builder(view, stand_ins, numbered=True, text_keys=False).build()
    size, parts, sums = save(native.root, 0, stand_ins.source)
    file = OutFile("", size, tuple(parts), tuple(sums))
    return Output("torch.save", (file,), lambda folder, sums: None, single=True, notes=native.notes)
