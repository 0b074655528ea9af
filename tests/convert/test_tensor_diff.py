"""The differences of two checkpoints equal torch's figures, also across dtypes and formats."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt.tools.convert import tensor_diff
from commands import call, save
from memory_origin import MemoryOrigin

__all__ = ["call"]  # the fixture

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
          "C64": torch.complex64, "BOOL": torch.bool}  # fmt: skip


def compared(a: torch.Tensor, b: torch.Tensor, dtype: str, other: str, window: int) -> tensor_diff.Difference | None:
    one = MemoryOrigin({"x": a, "y": a}, dtype)
    two = MemoryOrigin({"x": b, "y": a.to(b.dtype)}, other)
    pairs = [tensor_diff.Pair("x", "x", "x"), *([tensor_diff.Pair("y", "y", "y")] if dtype == other else [])]
    found = asyncio.run(tensor_diff.differences(one, two, pairs, window=window))
    assert [f.name for f in found] in (["x"], [])
    return found[0] if found else None


@pytest.mark.parametrize("window", [64, 1 << 20])
@pytest.mark.parametrize(
    ("dtype", "other"), [*((d, d) for d in DTYPES), ("F32", "BF16"), ("F64", "F16"), ("BF16", "F16")]
)
def test_figures_equal_those_of_torch(dtype: str, other: str, window: int) -> None:
    """Counts, largest differences and the cosine are correct for all dtypes, for pairs of them, and for any window."""
    draw = torch.Generator().manual_seed(3)
    first = torch.randn(40, 33, generator=draw) * 3
    second = torch.where(torch.rand(40, 33, generator=draw) < 0.3, torch.randn(40, 33, generator=draw), first)
    a, b = (x.to(DTYPES[d]) if d != "BOOL" else x > 0 for x, d in ((first, dtype), (second, other)))
    found = compared(a, b, dtype, other, window)
    wide = torch.complex128 if dtype.startswith("C") else torch.float64
    x, y = a.to(wide).reshape(-1), b.to(wide).reshape(-1)
    size = torch.maximum(x.abs(), y.abs())
    relative = ((x - y).abs() / size)[size > 0].max().item()
    assert found is not None and (found.elements, found.differing) == (a.numel(), (x != y).sum().item())
    assert found.max_abs_difference == pytest.approx((x - y).abs().max().item(), rel=1e-12)
    assert found.max_rel_difference == pytest.approx(relative, rel=1e-12)
    cosine = torch.vdot(x, y).real / x.norm() / y.norm()
    assert found.cosine == pytest.approx(cosine.item(), rel=1e-9)
    assert compared(a, a.clone(), dtype, dtype, window) is None


def test_negative_control_one_bit_is_detected() -> None:
    """A difference in the lowest bit of one element is detected."""
    a = torch.randn(5000)
    b = a.clone()
    b.view(torch.int32)[4711] ^= 1
    found = compared(a, b, "F32", "F32", 4096)
    assert found is not None and found.differing == 1 and found.cosine == pytest.approx(1)


def test_nan_and_zero_are_compared() -> None:
    """NaN on one side is a difference and makes the largest difference NaN. For dtypes unknown to numpy only bits
    count. Zero against another number has relative difference 1."""
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])
    found = compared(one, two, "F32", "F32", 64)
    assert found is not None and found.differing == 1 and np.isnan(found.max_abs_difference or 0)
    byte = torch.arange(8, dtype=torch.uint8)
    found = compared(byte, byte.flip(0), "F8_E4M3", "F8_E4M3", 64)
    assert found is not None and (found.differing, found.max_abs_difference, found.cosine) == (8, None, None)
    found = compared(torch.zeros(3), torch.ones(3), "F32", "F32", 64)
    assert found is not None and (found.max_rel_difference, found.cosine) == (1.0, 0.0)


def test_run_is_compared_with_bf16_files(tmp_path: Path, call: Any) -> None:
    """A run is compared with its weights in bf16 in safetensors: the output shows the rounding of each tensor."""
    torch.manual_seed(0)
    model = nn.Linear(50, 20)
    save(tmp_path / "run", {"model": model}, range(1, 2), every=1)
    assert call("export", tmp_path / "run", "--to", tmp_path / "hf", "--dtype", "bf16").code == 0
    found = call("diff", tmp_path / "run", tmp_path / "hf", "--only", "model.*", "--json")
    assert found.code == 1 and {row["name"] for row in found.json["changed"]} == {"model.weight", "model.bias"}
    rows = {row["name"]: row for row in found.json["tensors"]}
    for name, tensor in model.state_dict().items():
        row, rounded = rows[f"model.{name}"], tensor.bfloat16().float()
        assert (row["dtype"], row["dtype_b"]) == ("F32", "BF16")
        assert row["max_abs_difference"] == pytest.approx((tensor - rounded).abs().max().item(), rel=1e-6)
        assert row["max_rel_difference"] <= 2**-8 and row["cosine"] > 0.9999
    text = call("diff", tmp_path / "run", tmp_path / "hf").out
    assert "cosine" in text and text.startswith("different: ")


def test_runs_and_files_can_be_compared(tmp_path: Path, call: Any) -> None:
    """Each side may be a run or a file. Anything else gives an error line, an advice line and code 2."""
    save(tmp_path / "run", {"model": nn.Linear(3, 2)}, range(1, 2), every=1)
    call("export", tmp_path / "run", "--to", tmp_path / "w.safetensors")
    (tmp_path / "junk").write_text("x")
    sides = [tmp_path / "run", f"{tmp_path / 'run'}@1", tmp_path / "w.safetensors"]
    for a, b in itertools.product(sides, sides):
        assert call("diff", a, b, "--only", "model.*").code == 0, (a, b)
    for args in ((sides[0], tmp_path / "junk"), (tmp_path / "none", sides[0]), (sides[0], f"{tmp_path / 'run'}@7")):
        found = call("diff", *args)
        assert found.code == 2 and len(found.err.splitlines()) == 2
