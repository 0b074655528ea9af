"""The names of parameters, and the memory of the state outside optimizers."""

from __future__ import annotations

import bisect
import math

from torch import Tensor

from ckpt.core.state.sharding import StateEntry, local


class Names(dict[int, StateEntry]):
    """The parameters and plain tensors that optimizers may step, by id, and the memory of all entries outside
    optimizers. `fixed` entries stay from step to step; each reading creates the `loose` ones."""

    def __init__(self) -> None:
        super().__init__()
        self._fixed, self._loose = list[list[StateEntry]](), list[StateEntry]()
        self._spans: tuple[list[Span] | None, list[Span] | None] = None, None

    def note(self, fixed: list[list[StateEntry]], loose: list[StateEntry]) -> None:
        """Set the present entries. Their memory is computed when it is needed."""
        same = len(fixed) == len(self._fixed) and all(a is b for a, b in zip(fixed, self._fixed, strict=True))
        self._fixed, self._loose, self._spans = fixed, loose, (self._spans[0] if same else None, None)

    def hold(self, span: Span | None) -> bool:
        """Return True if the state contains all of a tensor's memory, in one entry or in several."""
        if span is None:
            return False
        fixed, loose = self._spans
        if fixed is None or loose is None:
            fixed = fixed or _joined([entry for each in self._fixed for entry in each])
            loose = _joined(self._loose)
            self._spans = fixed, loose
        return _inside(span, fixed) or _inside(span, loose)


Span = tuple[str, int, float]


def span_of(tensor: Tensor) -> Span | None:
    """Return the device and address range of a tensor. Return None if it has gaps or no memory."""
    shard = local(tensor)
    if not shard.numel() or not shard.data_ptr():
        return None
    reach = sum((size - 1) * stride for size, stride in zip(shard.shape, shard.stride(), strict=True))
    if reach + 1 != shard.numel():
        return None
    return str(shard.device), shard.data_ptr(), shard.data_ptr() + shard.nbytes


def _inside(span: Span, spans: list[Span]) -> bool:
    device, start, stop = span
    i = bisect.bisect_right(spans, (device, start, math.inf)) - 1
    return i >= 0 and spans[i][0] == device and spans[i][2] >= stop


def _joined(entries: list[StateEntry]) -> list[Span]:
    """Return the memory of these tensors as ascending spans that do not touch."""
    found: list[Span] = []
    for device, start, stop in sorted(span for e in entries if (span := span_of(e.tensor)) is not None):
        if found and found[-1][0] == device and start <= found[-1][2]:
            found[-1] = device, found[-1][1], max(stop, found[-1][2])
        else:
            found.append((device, start, stop))
    return found
