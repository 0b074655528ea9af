"""Tests of fingerprints: which writes to tensors they detect, and which optimizers are trusted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ckpt.core.format.layout import Layout
from ckpt.core.state.capture import Capture
from ckpt.core.state.fingerprint import SampledPlaces
from ckpt.core.state.tensors import as_bytes, spec


def kinds() -> dict[str, Tensor]:
    """Return tensors of all widths and forms. Those after `odd` have odd offsets in a slot."""
    wide = torch.arange(60_000.0).view(200, 300)
    raw = torch.arange(41, dtype=torch.uint8)
    return {
        "f32": wide.clone(),
        "f64": wide.double(),
        "c128": wide.to(torch.complex128),
        "bf16": wide.bfloat16(),
        "bool": wide > 100,
        "turned": wide.clone().t(),
        "permuted": wide.clone().view(20, 10, 300).permute(2, 0, 1),
        "cut": wide.clone()[:, 10:20],
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "odd": torch.arange(7, dtype=torch.int8),
        "behind": wide.clone(),
        "misplaced": raw[1:],
    }


def staged(layout: Layout, tensors: list[Tensor]) -> Tensor:
    """Return a slot with these tensors."""
    slot = torch.zeros(layout.arrangement.data_size, dtype=torch.uint8)
    for tensor, offset in zip(tensors, layout.arrangement.offsets, strict=True):
        slot[offset : offset + tensor.nbytes].copy_(as_bytes(tensor.contiguous()))
    return slot


@pytest.mark.parametrize("name", [name for name, tensor in kinds().items() if tensor.numel()])
@pytest.mark.parametrize("where", [0, -1, None], ids=["first", "last", "all"])
def test_written_tensor_is_named(name: str, where: int | None) -> None:
    """Writes to the first, the last or all elements are detected in the tensor and in its copy.
    No other tensor is reported, and none without a change."""
    live = kinds()
    layout = Layout(tuple(spec(key, tensor) for key, tensor in live.items()), {}, [])
    spots = SampledPlaces(layout, range(len(live)), list(live.values()))
    number, tensor = list(live).index(name), live[name]
    before = staged(layout, list(live.values()))
    for _ in range(17):
        print_ = spots.look()
        assert print_.changed() == print_.differing(before) == set()
        was = tensor.clone()
        if where is None:
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
        else:
            at = tuple(i if where == 0 else n - 1 for i, n in zip([0] * tensor.dim(), tensor.shape, strict=True))
            tensor[at] = ~tensor[at] if tensor.dtype == torch.bool else tensor[at] * 2 + 1
        assert print_.changed() == {number}
        assert print_.differing(before) == set()
        assert print_.differing(staged(layout, list(live.values()))) == {number}
        tensor.copy_(was)


def test_write_to_imaginary_part_is_detected() -> None:
    """A write only to imaginary parts, without torch's counters, is detected in every complex type."""
    for dtype in (torch.complex64, torch.complex128):
        tensor = torch.randn(100, 50, dtype=dtype).t()
        state = {"w": tensor}
        reading = Capture(state).read()
        spots = SampledPlaces(reading.layout, [0], reading.tensors)
        seen = spots.look()
        assert not seen.changed() and not seen.differing(staged(reading.layout, reading.tensors))
        tensor.data.imag.neg_()
        assert seen.changed() == {0} and seen.differing(staged(reading.layout, reading.tensors)) == {0}
