"""A state without room in memory is written from the live tensors, range by range."""

from __future__ import annotations

import random

import pytest
import torch

from ckpt.core.checkpoint.write import digest_chunks
from ckpt.core.snapshot.direct import LiveBytes
from ckpt.core.state.capture import Capture
from ckpt.core.state.tensors import as_bytes

MIB = 1 << 20


def odd_state() -> dict[str, object]:
    """Return tensors that are large, small, empty, strided, conjugated and of odd sizes."""
    torch.manual_seed(0)
    return {
        "large": torch.randn(3 * MIB + 5),
        "channels_last": torch.randn(4, 8, 64, 65).to(memory_format=torch.channels_last),
        "transposed": torch.randn(1031, 517).t(),
        "slice": torch.randn(300, 400)[::3, 5:-7:2],
        "conjugated": torch.randn(65, 3, dtype=torch.complex64).conj(),
        "negative": torch.randn(65, 3, dtype=torch.complex128).conj().imag,
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "flags": torch.rand(77, 13) > 0.5,
        "bytes": torch.randint(0, 255, (4 * MIB + 1,), dtype=torch.uint8),
    }


def expected(reading: object) -> bytearray:
    """Return the bytes of a slot: each tensor, row by row, at its offset."""
    data = bytearray(reading.layout.arrangement.data_size)  # type: ignore[attr-defined]
    offsets = reading.layout.arrangement.offsets  # type: ignore[attr-defined]
    for tensor, offset in zip(reading.tensors, offsets, strict=True):  # type: ignore[attr-defined]
        raw = bytes(as_bytes(tensor.resolve_conj().resolve_neg().contiguous()).numpy())
        data[offset : offset + len(raw)] = raw
    return data


@pytest.mark.parametrize("seed", range(6))
def test_ranges_of_live_tensors_have_the_bytes_and_digests_of_a_slot(seed: int) -> None:
    reading = Capture(odd_state()).read()
    whole, random_ = expected(reading), random.Random(seed)
    live, found = LiveBytes(reading), bytearray(len(whole))
    position = 0
    while position < len(whole):
        length = min(len(whole) - position, random_.choice([1, 3, 4097, MIB + 3, 8 * MIB]))
        live.read(position, memoryview(found)[position : position + length])
        position += length
    assert found == whole
    assert live.digests() == digest_chunks(reading.layout, memoryview(whole))
