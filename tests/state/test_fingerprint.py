"""What a fingerprint of tensors sees, and which optimizers are trusted to have stepped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from boundaries import adamw
from ckpt.core.format.layout import Layout
from ckpt.core.state.capture import Capture
from ckpt.core.state.fingerprint import ELEMENTS, SampledPlaces
from ckpt.core.state.tensors import as_bytes, spec


def kinds() -> dict[str, Tensor]:
    """Tensors of all widths and forms. What follows `odd` lies at odd places of a slot."""
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
    """A slot with these tensors in it."""
    slot = torch.zeros(layout.arrangement.data_size, dtype=torch.uint8)
    for tensor, offset in zip(tensors, layout.arrangement.offsets, strict=True):
        slot[offset : offset + tensor.nbytes].copy_(as_bytes(tensor.contiguous()))
    return slot


@pytest.mark.parametrize("name", [name for name, tensor in kinds().items() if tensor.numel()])
@pytest.mark.parametrize("where", [0, -1, None], ids=["first", "last", "all"])
def test_whichever_tensor_is_written_to_is_named(name: str, where: int | None) -> None:
    """By the first of its elements, by the last, and by all: in the tensor, in its copy, at every turn; and nothing is
    said of any other, nor while nothing has changed."""
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


def test_a_hundredth_of_the_elements_is_met() -> None:
    """Where there are few tensors, so many of their elements are looked at that writes to some are seen; each time at
    other places, and all of them inside the tensor."""
    tensor = torch.zeros(1000, 1000)
    layout = Layout((spec("t", tensor),), {}, [])
    spots, met = SampledPlaces(layout, [0], [tensor]), 0
    changed = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(0)) < 0.01
    for _ in range(16):
        found = spots.look()
        tensor[changed] += 1.0
        met += found.changed() == {0}
    assert met == 16
    places = {tuple(sorted(_looked_at(spots, tensor))) for _ in range(16)}
    assert len(places) == 16 and all(len(one) in (ELEMENTS - 1, ELEMENTS) for one in places)


def _looked_at(spots: SampledPlaces, tensor: Tensor) -> set[int]:
    """The elements that one fingerprint has, by writing each element's number into it."""
    tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view_as(tensor))
    return {int(value) for found in spots.look()._found for value in found.view(torch.float32)}


def test_the_other_half_of_a_complex_number_is_looked_at() -> None:
    """A write to imaginary parts alone, past torch's counters, is seen in every complex type."""
    for dtype in (torch.complex64, torch.complex128):
        tensor = torch.randn(100, 50, dtype=dtype).t()
        state = {"w": tensor}
        reading = Capture(state).read()
        spots = SampledPlaces(reading.layout, [0], reading.tensors)
        seen = spots.look()
        assert not seen.changed() and not seen.differing(staged(reading.layout, reading.tensors))
        tensor.data.imag.neg_()
        assert seen.changed() == {0} and seen.differing(staged(reading.layout, reading.tensors)) == {0}


def test_a_step_saved_by_hand_behind_it_is_as_much_guarded() -> None:
    """save() right after step() is of the same step: the optimizer has announced itself for both."""
    run = adamw()
    capture = Capture(run.state)
    run.move(run.state, 1)
    for announced, guarded in [([run.state["optim"]], True), ([], False), ([run.state["optim"]], True)]:
        capture.trust(announced)
        for _ in range(2):
            assert any(capture.read().guarded) is guarded
