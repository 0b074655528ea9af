"""Plain values of every kind."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from datetime import timedelta, timezone
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst


def of_bits(bits: int) -> float:
    found: float = struct.unpack(">d", struct.pack(">Q", bits))[0]
    return found


# Every character, lone and paired surrogates included, and words that look like our own tags.
texts = st.text(st.characters(codec=None)) | st.sampled_from(
    ["", "$", "v", "\ud800\udc00", "\udc80", "tensor", "\x00", "😀"]
)


integers = st.integers() | st.integers(-(2**5000), 2**5000) | st.sampled_from([2**53, -(2**53), 2**53 - 1])


floats = st.floats() | st.integers(0, 2**64 - 1).map(of_bits) | st.just(-0.0)


dtypes = (
    npst.boolean_dtypes()
    | npst.integer_dtypes(endianness="?")
    | npst.unsigned_integer_dtypes(endianness="?")
    | npst.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | npst.complex_number_dtypes(endianness="?")
    | npst.datetime64_dtypes(endianness="?")
    | npst.timedelta64_dtypes(endianness="?")
    | npst.byte_string_dtypes(endianness="?", max_len=5)
    | npst.unicode_string_dtypes(endianness="?", max_len=5)
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """0-d, empty, Fortran order, strided, reversed and read-only ones too; bits at random, NaN payloads included."""
    dtype, shape = draw(dtypes), draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    if dtype.kind in "bSU":  # not every pattern of bits is a bool or a character
        found = draw(npst.arrays(dtype, shape))
    else:
        found = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype).reshape(shape)
    change = draw(st.sampled_from(["none", "fortran", "reversed", "transposed", "writable"]))
    if change == "fortran":
        return np.asfortranarray(found)
    if change == "reversed" and found.ndim:
        return found[::-1]
    return found.T if change == "transposed" else found.copy() if change == "writable" else found


def scalar(array: np.ndarray[Any, Any]) -> Any:
    return array.reshape(-1)[0] if array.size else np.float32(1)


scalars = arrays().filter(lambda a: a.dtype.kind in "biufcmM").map(scalar)


def _readable(offset: timedelta) -> bool:
    """Python reads an offset of less than a second as none at all, so such a zone is refused."""
    return not offset or timedelta(seconds=1) <= abs(offset) < timedelta(1)


zones = st.none() | st.timedeltas(timedelta(-1), timedelta(1)).filter(_readable).map(timezone)


times = st.dates() | st.timedeltas() | st.datetimes(timezones=zones)


leaves = st.none() | st.booleans() | integers | floats | texts | st.binary() | scalars | arrays() | times


keys = texts | integers


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(keys, inner), max_size=4)
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | pairs.map(dict)
        | pairs.map(OrderedDict)
        | pairs.map(lambda p: Counter(dict(p)))
    )


values = st.recursive(leaves, containers, max_leaves=12)
