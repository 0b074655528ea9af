"""Cast floating-point numbers to another dtype without torch, with torch's rounding.

Numbers are rounded to nearest, ties to even. Values that are too large become infinite, and NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
SPELLINGS = {
    "f64": "F64", "float64": "F64", "fp64": "F64", "double": "F64", "f32": "F32", "float32": "F32", "fp32": "F32",
    "float": "F32", "f16": "F16", "float16": "F16", "fp16": "F16", "half": "F16", "bf16": "BF16", "bfloat16": "BF16",
}  # fmt: skip

CHUNK = 1 << 17  # numbers that are cast at a time, so that intermediate results stay in the CPU cache

Bytes = npt.NDArray[np.uint8]


def dtype_called(text: str) -> str:
    """Return this library's name of a dtype to cast to. Raise UsageError listing the possible dtypes."""
    dtype = SPELLINGS.get(text.removeprefix("torch.").lower())
    if dtype is None:
        raise UsageError(f"cannot cast to {text!r}: choose bf16, fp16, fp32 or fp64")
    return dtype


def floats(raw: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return one row of bytes as a numpy array. bfloat16 becomes float32, which is exact."""
    numbers = raw.view(FLOATS[dtype])
    if dtype != "BF16":
        return numbers
    wide: npt.NDArray[Any] = (numbers.astype(np.uint32) << 16).view("<f4")
    return wide


def cast(raw: Bytes, dtype: str, to: str, into: Bytes) -> None:
    """Cast one row of bytes to another dtype."""
    source, target = raw.view(FLOATS[dtype]), into.view(FLOATS[to])
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(source), CHUNK):
            numbers = floats(source[start : start + CHUNK].view(np.uint8), dtype)
            if to in ("F16", "BF16") and dtype == "F64":
                numbers = numbers.astype("<f4")  # via float32, as torch does, because the rounding then is the same
            target[start : start + CHUNK] = _to_bfloat16(numbers) if to == "BF16" else numbers


def _to_bfloat16(numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Round float32 numbers to bfloat16. Return their bits, which are the upper halves of float32 numbers."""
    single = np.ascontiguousarray(numbers, "<f4")
    bits = single.view("<u4")
    made: npt.NDArray[np.uint16] = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype("<u2")
    made[np.isnan(single)] = 0x7FC0
    return made
