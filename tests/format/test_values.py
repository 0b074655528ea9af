"""Plain values survive a round trip through JSON with type and bits, or are rejected with their path."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter, OrderedDict
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.core.format.values import MAX_DEPTH, decode, encode
from ckpt.core.state.tensors import from_array, to_array
from ckpt.errors import CorruptError, StateError
from plain_values import (
    of_bits,
    values,
)

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=50_000)


def round_trip(value: Any) -> Any:
    """Encode and decode through the stored text. Arrays are kept separately as tensors."""
    arrays: list[Any] = []

    def out(found: object, path: Any) -> Any:
        if not isinstance(found, np.ndarray):
            return None
        tensor, reference = from_array(found, path)
        arrays.append(tensor.clone())
        return {**reference, "name": str(len(arrays) - 1)}

    def back(reference: Any) -> object:
        assert reference["$"] == "ndarray"
        return to_array(arrays[int(reference["name"])], reference)

    text = json.dumps(encode(value, ("root",), out), allow_nan=False, sort_keys=True)  # as in files
    return decode(json.loads(text), back)


def same(a: Any, b: Any) -> bool:
    """Return True if type, order and every bit are equal, including NaN payloads and signs of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and type(a) is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, (date, timedelta)):
        return repr(a) == repr(b)  # includes the fold and the zone
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@QUICK
@given(values)
def test_every_plain_value_survives(value: Any) -> None:
    """Type, order of keys and every bit survive any nesting."""
    assert same(round_trip(value), value)


@pytest.mark.long
@LONG
@given(values)
def test_every_plain_value_survives_long(value: Any) -> None:
    """The same test with more examples."""
    assert same(round_trip(value), value)


def test_negative_control_comparison_is_exact() -> None:
    """`same` detects differences that == does not."""
    pairs: list[tuple[Any, Any]] = [
        (0.0, -0.0), (1, True), (1, 1.0), ((1,), [1]), (of_bits(0x7FF8000000000001), float("nan")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1: 0}, {"1": 0}), (OrderedDict(a=1), {"a": 1}),
        (Counter("a"), {"a": 1}), (datetime(2026, 1, 1), datetime(2026, 1, 1, fold=1)),
        (np.float32(1), np.float64(1)), (np.zeros(2, "<i4"), np.zeros(2, ">i4")), (np.zeros((1, 2)), np.zeros(2)),
    ]  # fmt: skip
    for a, b in pairs:
        assert same(a, a) and same(b, b) and not same(a, b)
        assert not same(round_trip(a), b)


def test_negative_control_plain_json_loses_information() -> None:
    """Negative control of the tags: plain JSON loses the type, the key or the characters of these values."""
    for value in [(1,), {1: 0}, "\ud800\udc00", Counter("a")]:
        assert not same(json.loads(json.dumps(value)), value)
        assert same(round_trip(value), value)


def test_dict_that_looks_like_a_tag_stays_a_dict() -> None:
    """A user's own "$" keys are data, never tags."""
    for value in [{"$": "int", "v": "0x1"}, {"$": "tensor", "name": "x"}, {"$": {"$": None}}, {"v": 1}]:
        assert same(round_trip(value), value)


def test_integers_of_any_size_survive() -> None:
    """This includes integers longer than Python prints, as values and as keys."""
    huge = 10**5000
    with pytest.raises(ValueError):
        str(huge)
    assert same(round_trip({huge: -huge}), {huge: -huge})


def nest(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {1: (value,)}
    return value


def test_depth_limit_is_the_same_on_both_sides() -> None:
    """The deepest allowed value survives. A deeper or recursive one raises an error quickly."""
    deepest = nest((MAX_DEPTH - 1) // 2)
    assert same(round_trip(deepest), deepest)
    ring: list[Any] = []
    ring.append({"again": ring})
    for value in (nest(MAX_DEPTH), ring):
        with pytest.raises(StateError, match="nested deeper"):
            round_trip(value)


@pytest.mark.parametrize(
    "data",
    [
        {"$": "python/object", "v": "os.system"}, {"$": None}, {"$": ["int"], "v": "0x1"}, {"$": "int"},
        {"$": "int", "v": 1}, {"$": "int", "v": "zz"}, {"$": "float", "v": "00"}, {"$": "float", "v": "x" * 16},
        {"$": "bytes", "v": "*"}, {"$": "bytes", "v": 1}, {"$": "str", "v": "00"}, {"$": "str", "v": "7fffffff"},
        {"$": "tuple", "v": "abc"}, {"$": "tuple", "v": {"a": 1}}, {"$": "tuple", "v": None},
        {"$": "dict", "v": [[1]]}, {"$": "dict", "v": [[{"a": 1}, 2]]}, {"$": "dict", "v": [[[], 2]]},
        {"$": "dict", "v": 1}, {"$": "dict", "v": [[{"$": "tensor", "name": "x"}, 1]]}, {"$": "complex", "v": "00"},
        {"$": "set", "v": [[]]}, {"$": "set", "v": 1}, {"$": "frozenset", "v": [{"$": "set", "v": []}]},
        {"$": "deque", "v": [1]}, {"$": "deque", "v": [1], "maxlen": -1}, {"$": "deque", "v": [1], "maxlen": "1"},
        {"$": "deque", "v": "ab", "maxlen": None}, {"$": "set", "v": [{"$": "tensor", "name": "x"}]},
        {"$": "ordered", "v": {"a": 1}}, {"$": "counter", "v": [["a", {"$": "nothing"}]]},
        {"$": "scalar", "dtype": "O", "v": "00" * 8}, {"$": "scalar", "dtype": "f4,f4", "v": "00" * 8},
        {"$": "scalar", "dtype": None, "v": "00" * 8}, {"$": "scalar", "dtype": "f8", "v": "00" * 4},
        {"$": "scalar", "dtype": "((((", "v": "00"}, {"$": "scalar", "dtype": "V8", "v": "00" * 8},
        {"$": "datetime", "v": "yesterday"}, {"$": "datetime", "v": "2026-01-01", "fold": 7}, {"$": "date", "v": 1},
        {"$": "timedelta", "v": [1.5, 0, 0]}, {"$": "timedelta", "v": [10**12, 0, 0]}, {"$": "timedelta", "v": "ab"},
        {1, 2}, object(),
    ],
    ids=lambda data: re.sub(" at 0x[0-9a-f]+", "", str(data)),
)  # fmt: skip
def test_damaged_or_unknown_data_raises_corrupt_error(data: Any) -> None:
    """Unknown tags and impossible contents raise only CorruptError and never give a value."""
    with pytest.raises(CorruptError):
        decode([data])


def test_object_arrays_are_rejected() -> None:
    """A reference with an object or structured dtype is rejected before any array is created."""
    tensor, reference = from_array(np.zeros(2), ())
    for dtype in ("O", "f4,f4", "V8"):
        with pytest.raises(CorruptError):
            decode({**reference, "dtype": dtype}, lambda r: to_array(tensor, r))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["$", "v", "dtype", "a"]), inner),
    max_leaves=8,
)
tagged = st.builds(
    lambda tag, v, dtype: {"$": tag, "v": v, "dtype": dtype, "maxlen": None},
    st.sampled_from(
        ["int", "str", "float", "bytes", "tuple", "dict", "ordered", "counter", "scalar", "tensor", "set", "deque"]
    ),
    json_values,
    st.sampled_from(["f4", "O", "M8", "(", "i4,i4", "|S3", "<U9"]) | st.text(max_size=6),
)


@QUICK
@given(json_values | tagged | st.lists(tagged, max_size=3))
def test_any_json_gives_values_or_corrupt_error(data: Any) -> None:
    """Any JSON gives plain values or raises CorruptError. Nothing else is raised or run."""
    try:
        found = decode(data)
    except CorruptError:
        return
    round_trip(found)  # only encodable values are returned


def test_too_deep_data_raises_corrupt_error() -> None:
    """Extreme depth raises CorruptError long before Python's own limit."""
    data: Any = 0
    for _ in range(100_000):
        data = [data]
    with pytest.raises(CorruptError, match="deep"):
        decode(data)
    while data:
        data = data[0]  # taken apart step by step: freeing it in one go would recurse


def test_long_list_is_encoded_quickly() -> None:
    """A plain list of 20,000 numbers is not checked one by one, but is saved unchanged."""
    numbers = [0.1 * i for i in range(20_000)]
    assert encode(numbers) == numbers and encode(numbers) is not numbers
    assert encode(list(range(100))) == list(range(100))
    for odd in (float("nan"), float("inf"), 2**60, None, True, "x", 1.5):
        mixed = [*range(100), odd]
        assert encode(mixed) == [encode(one) for one in mixed]
        assert [type(one) for one in encode(mixed)] == [type(encode(one)) for one in mixed]
