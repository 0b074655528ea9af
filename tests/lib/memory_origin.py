"""Tensors in memory as an origin, as `ckpt.tools.convert` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckpt.core.format.layout import TensorSpec
from ckpt.errors import CorruptError
from ckpt.tools.convert.source import RankView, Want


class MemoryOrigin:
    """Sends memory to requests. `fail_after`: the number of requests after which one reply is damaged."""

    title = identity = "memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: str = "F32") -> None:
        self.live, self.about, self.keep, self.fail_after = tensors, dict[str, Any](), 0, -1
        self.tensors = {name: TensorSpec(name, dtype, tuple(t.shape)) for name, t in tensors.items()}
        self.names = {name: name for name in tensors}

    def plain(self) -> dict[str, Any]:
        return {}

    def view(self, rank: int = 0, world: int = 1) -> RankView:
        return RankView((), self.names, {})

    def same(self, label: str, other: Any, theirs: str) -> bool:
        return False

    async def read(self, wants: Sequence[Want]) -> None:
        for want in wants:
            self.fail_after -= 1
            if self.fail_after == 0:
                raise CorruptError(f"{want.label} is damaged")
            flat = self.part(want.label, want.box).reshape(-1)[want.start : want.stop]
            want.into[:] = flat.view(torch.uint8).numpy()

    def part(self, label: str, box: Any) -> torch.Tensor:
        return self.live[label][tuple(slice(i, i + n) for i, n in zip(*box, strict=True))].contiguous()

    async def unchanged(self) -> None:
        pass

    async def aclose(self) -> None:
        pass
