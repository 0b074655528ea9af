"""bf16 weights that are roundings of an fp32 tensor: how the tensor is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckpt.core.checkpoint import incremental
from ckpt.core.checkpoint.incremental import find_masters
from ckpt.core.format.layout import Layout, TensorSpec


def test_masters_are_looked_for_once_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tensors have one shape: as many roundings as there are fp32 tensors, and each finds its own."""
    count, calls = 60, [0]
    shapes = [(f"half.{i:03}", "BF16") for i in range(count)] + [(f"m.{i:03}", "F32") for i in range(3 * count)]
    layout = Layout(tuple(TensorSpec(name, dtype, (64,)) for name, dtype in shapes), {}, [])
    dice = np.random.default_rng(1)
    masters = dice.standard_normal((3 * count, 64)).astype(np.float32)
    right = incremental.decode

    def counted(*arguments: Any) -> None:
        calls[0] += 1
        right(*arguments)

    monkeypatch.setattr(incremental, "decode", counted)
    arrangement = layout.arrangement
    data = bytearray(arrangement.data_size)
    for i in range(3 * count):
        at = arrangement.offsets[count + i]
        data[at : at + 256] = masters[i].tobytes()
    for i in range(count):  # each the rounding of one of them
        at, room = arrangement.offsets[i], memoryview(bytearray(128))
        right(incremental.BF16, b"", 128, masters[2 * i].tobytes(), room)
        data[at : at + 128] = room
    view = memoryview(data)

    def peek(number: int) -> memoryview:
        blob = arrangement.blobs[number]
        return view[blob.offset : blob.offset + blob.length]

    found = find_masters(layout, peek)
    assert calls[0] == 3 * count
    owner = {blob.tensor: number for number, blob in enumerate(arrangement.blobs)}
    assert [found[owner[i]] for i in range(count)] == [owner[count + 2 * i] for i in range(count)]
