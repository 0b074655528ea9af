"""Floating-point numbers of one dtype as another, rounded as torch rounds them, without torch.

To the nearest, halves to even; what is too large becomes infinite, what is not a number stays that.
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

CHUNK = 1 << 17  # numbers at once: what is in between stays in the processor's cache

Bytes = npt.NDArray[np.uint8]


def dtype_called(text: str) -> str:
    """Our name of a dtype that can be cast to. UsageError that lists them."""
    found = SPELLINGS.get(text.removeprefix("torch.").lower())
    if found is None:
        raise UsageError(f"{text!r} is no dtype that numbers can be cast to: choose bf16, fp16, fp32 or fp64")
    return found


def floats(raw: Bytes, dtype: str) -> npt.NDArray[Any]:
    """One row of bytes as numbers that numpy knows: bfloat16 becomes float32, which loses nothing."""
    numbers = raw.view(FLOATS[dtype])
    if dtype != "BF16":
        return numbers
    wide: npt.NDArray[Any] = (numbers.astype(np.uint32) << 16).view("<f4")
    return wide


def cast(raw: Bytes, dtype: str, to: str, into: Bytes) -> None:
    """One row of bytes, as numbers of another dtype."""
    source, target = raw.view(FLOATS[dtype]), into.view(FLOATS[to])
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(source), CHUNK):
            numbers = floats(source[start : start + CHUNK].view(np.uint8), dtype)
            if to in ("F16", "BF16") and dtype == "F64":
                numbers = numbers.astype("<f4")  # in two steps, as torch does
            target[start : start + CHUNK] = _to_bfloat16(numbers) if to == "BF16" else numbers


def _to_bfloat16(numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded."""
    single = np.ascontiguousarray(numbers, "<f4")
    bits = single.view("<u4")
    made: npt.NDArray[np.uint16] = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype("<u2")
    made[np.isnan(single)] = 0x7FC0
    return made
