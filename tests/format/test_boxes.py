"""The check that boxes cover an array exactly once is compared with brute force, and is bounded."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.core.format.boxes import (
    Box,
    Dims,
    boxes_of_run,
    times_covered,
)

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def part(array: npt.NDArray[Any], box: Box) -> npt.NDArray[Any]:
    """Return the part of an array in a box, as a view with as many dimensions."""
    return array[(*(slice(start, start + size) for start, size in zip(*box, strict=True)), ...)]


full_shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Dims, smallest: int = 1) -> Box:
    starts = [draw(st.integers(0, size - smallest)) for size in shape]
    sizes = [draw(st.integers(smallest, size - start)) for start, size in zip(starts, shape, strict=True)]
    return tuple(starts), tuple(sizes)


def counted(shape: Dims, boxes: list[Box]) -> tuple[int, int]:
    times = np.zeros(shape, np.int64)
    for box in boxes:
        part(times, box)[...] += 1
    return int(times.min()), int(times.max())


@st.composite
def pieces_of(draw: st.DrawFn, box: Box) -> list[Box]:
    """Draw a recursive division of a box into boxes."""
    longest = [d for d, size in enumerate(box[1]) if size > 1]
    if not longest or draw(st.integers(0, 3)) == 0:
        return [box]
    dim = draw(st.sampled_from(longest))
    at = draw(st.integers(1, box[1][dim] - 1))
    (starts, sizes), found = box, list[Box]()
    for low, size in ((0, at), (at, sizes[dim] - at)):
        start = (*starts[:dim], starts[dim] + low, *starts[dim + 1 :])
        found += draw(pieces_of((start, (*sizes[:dim], size, *sizes[dim + 1 :]))))
    return found


@st.composite
def coverings(draw: st.DrawFn) -> tuple[Dims, list[Box]]:
    """Draw an array and boxes: a partition, with boxes removed, doubled or added."""
    shape = draw(full_shapes)
    boxes = draw(pieces_of(((0,) * len(shape), shape)))
    for _ in range(draw(st.integers(0, 2))):
        change = draw(st.sampled_from(["drop", "double", "add", "empty"]))
        if change == "drop" and boxes:
            boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        elif change == "double" and boxes:
            boxes.append(draw(st.sampled_from(boxes)))
        elif change == "add":
            boxes.append(draw(boxes_in(shape)))
        elif shape:
            boxes.append(((0,) * len(shape), (0, *shape[1:])))
    return shape, draw(st.permutations(boxes))


@QUICK
@given(coverings())
def test_coverage_is_counted_exactly(case: tuple[Dims, list[Box]]) -> None:
    """Minimum and maximum are exact for partitions, holes, overlaps and no boxes."""
    assert times_covered(*case) == counted(*case)


def test_empty_arrays_are_covered() -> None:
    """No boxes or empty boxes cover an empty array."""
    for boxes in ([], [((0, 0), (0, 3))], [((0, 0), (0, 3)), ((0, 1), (0, 2))]):
        assert times_covered((0, 3), boxes) == (1, 1)


def test_negative_control_box_off_by_one() -> None:
    """If one box of a grid is moved, smaller or larger, the result is never (1, 1)."""
    grid = [((i, j), (2, 3)) for i in range(0, 8, 2) for j in range(0, 9, 3)]
    assert times_covered((8, 9), grid) == (1, 1)
    for k, ((i, j), (m, n)) in enumerate(grid):
        wrong = [((i, j), (m - 1, n)), ((i, j), (m, n - 1)), ((i + 1, j), (m - 1, n)), ((i, j + 1), (m, n - 1))]
        wrong += [((i, j), (m + 1, n))] if i + m < 8 else [((i - 1, j), (m + 1, n))]
        for box in wrong:
            assert times_covered((8, 9), [*grid[:k], box, *grid[k + 1 :]]) != (1, 1)


def test_many_shards_are_counted_in_time() -> None:
    """A comparison of all pairs or elements would not finish for a thousand ranks' rows and columns."""
    size = 1 << 20
    rows = [((i * size // 1024, 0), (size // 1024, size)) for i in range(1024)]
    assert times_covered((size, size), rows) == (1, 1)
    grid = [((i * size // 64, j * size // 64), (size // 64, size // 64)) for i in range(64) for j in range(64)]
    assert times_covered((size, size), grid) == (1, 1)
    assert times_covered((size, size), grid[1:]) == (0, 1)
    assert times_covered((size, size), [*grid, ((5, 5), (1, 1))]) == (1, 2)


def test_slices_within_rows_are_counted_in_time() -> None:
    """A thousand replicas share an array with long rows, so all cuts differ."""
    shape, ranks = (3000, 3, 12_345), 1024
    cuts = [math.prod(shape) * rank // ranks for rank in range(ranks + 1)]
    boxes = [box for low, high in itertools.pairwise(cuts) for box in boxes_of_run(shape, low, high)]
    assert times_covered(shape, boxes) == (1, 1)
    for k in (0, len(boxes) // 2, len(boxes) - 1):
        assert times_covered(shape, [*boxes[:k], *boxes[k + 1 :]]) == (0, 1)
