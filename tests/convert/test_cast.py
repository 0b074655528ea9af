"""Casts between dtypes give the same results as torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ckpt.errors import UsageError
from ckpt.tools.convert import cast

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def converted(tensor: torch.Tensor, dtype: str, to: str) -> torch.Tensor:
    raw = tensor.contiguous().view(torch.uint8).numpy()
    into = np.empty(tensor.numel() * DTYPES[to].itemsize, np.uint8)
    cast.cast(raw, dtype, to, into)
    return torch.from_numpy(into).view(DTYPES[to])


@pytest.mark.parametrize(("dtype", "to"), itertools.permutations(DTYPES, 2))
def test_numbers_are_rounded_as_torch_rounds_them(dtype: str, to: str) -> None:
    """Covers random bits (with infinities, NaN and denormals), halves between neighbors, and the largest numbers."""
    draw = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (400_000 * DTYPES[dtype].itemsize,), dtype=torch.uint8, generator=draw)
    odd = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, 65504.0, 65519.9, 65520.0, 3.3961775e38, 1e-41, 2**-25]
    numbers = torch.cat([bits.view(DTYPES[dtype]), torch.tensor(odd, dtype=torch.float64).to(DTYPES[dtype])])
    ours, theirs = converted(numbers, dtype, to), numbers.to(DTYPES[to])
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])
    assert torch.equal(ours.signbit()[~ours.isnan()], theirs.signbit()[~theirs.isnan()])


def test_negative_control_cutting_off_is_not_rounding() -> None:
    """The same comparison detects truncation instead of rounding."""
    numbers = torch.linspace(0.1, 3.0, 1000)
    dropped = (numbers.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert not torch.equal(dropped, numbers.bfloat16())


def test_common_names_of_dtypes_are_accepted() -> None:
    """Common names of dtypes are accepted. An unknown name raises an error with the valid ones."""
    assert [cast.dtype_called(t) for t in ("bf16", "torch.float16", "FP32", "double")] == ["BF16", "F16", "F32", "F64"]
    for text in ("int8", "fp8", "", "nonsense"):
        with pytest.raises(UsageError, match="bf16, fp16, fp32 or fp64"):
            cast.dtype_called(text)
