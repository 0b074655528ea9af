"""Boxes and runs are compared with brute force on an array of its own element numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.core.format.boxes import (
    Box,
    Dims,
    Effort,
    Runs,
    TangledError,
    boxes_of_run,
    boxes_of_runs,
    intersect,
    run_of,
    take,
    times_covered,
    within,
)

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=20_000)

Numbers = npt.NDArray[np.int64]


def numbered(shape: Dims) -> Numbers:
    return np.arange(math.prod(shape)).reshape(shape)


def part(array: npt.NDArray[Any], box: Box) -> npt.NDArray[Any]:
    """Return the part of an array in a box, as a view with as many dimensions."""
    return array[(*(slice(start, start + size) for start, size in zip(*box, strict=True)), ...)]


def all_boxes(shape: Dims) -> list[Box]:
    """Return every non-empty box of an array."""
    spans = [[(i, n) for i in range(size) for n in range(1, size - i + 1)] for size in shape]
    return [(tuple(i for i, _ in each), tuple(n for _, n in each)) for each in itertools.product(*spans)]


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Dims, smallest: int = 1) -> Box:
    starts = [draw(st.integers(0, size - smallest)) for size in shape]
    sizes = [draw(st.integers(smallest, size - start)) for start, size in zip(starts, shape, strict=True)]
    return tuple(starts), tuple(sizes)


def check_run(shape: Dims, start: int, stop: int) -> None:
    elements = numbered(shape)
    boxes = boxes_of_run(shape, start, stop)
    found = [n for box in boxes for n in part(elements, box).ravel().tolist()]
    assert found == list(range(start, stop))
    assert all(len(box[0]) == len(box[1]) == len(shape) and all(box[1]) for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 3), (2, 2, 2, 3)], ids=str)
def test_every_run_is_a_list_of_boxes(shape: Dims) -> None:
    """The boxes have the elements of a run in order, without repetition, in at most 2 d - 1 boxes."""
    count = math.prod(shape)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            check_run(shape, start, stop)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
def test_empty_array_has_no_boxes(shape: Dims) -> None:
    """A run without elements has no boxes either."""
    assert boxes_of_run(shape, 0, 0) == []
    assert boxes_of_run((3, 4), 5, 5) == [] == boxes_of_run((3, 4), 7, 5)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (1, 3), (2, 3, 3)], ids=str)
def test_run_of_a_box_is_minimal(shape: Dims) -> None:
    """The run spans the box's first to last element. If it is as long as the box, it equals the box."""
    elements = numbered(shape)
    for box in all_boxes(shape):
        expected = part(elements, box).ravel()
        start, stop = run_of(box, shape)
        assert (start, stop) == (expected.min(), expected.max() + 1)
        if stop - start == len(expected):
            assert expected.tolist() == list(range(start, stop))


@pytest.mark.parametrize("shape", [(), (4,), (3, 3), (2, 2, 2)], ids=str)
def test_intersection_has_the_common_elements(shape: Dims) -> None:
    """The intersection of any two boxes is a box with exactly the common elements, or None."""
    elements = numbered(shape)
    boxes = all_boxes(shape)
    for a, b in itertools.product(boxes, boxes):
        expected = np.intersect1d(part(elements, a), part(elements, b))
        common = intersect(a, b)
        assert common == intersect(b, a)
        if common is None:
            assert not len(expected)
            continue
        assert part(elements, common).ravel().tolist() == expected.tolist()
        assert (part(part(elements, a), within(common, a)) == part(elements, common)).all()


def test_empty_box_intersects_nothing() -> None:
    """Covers an empty box inside another, at its edge, and with itself."""
    for box in [((1,), (0,)), ((0,), (0,)), ((4,), (0,))]:
        assert intersect(box, ((0,), (4,))) is None and intersect(box, box) is None


@st.composite
def rising_runs(draw: st.DrawFn, size: int) -> Runs:
    """Draw ascending indices below `size` as runs. Neighbors may be separate, and runs may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
    spans = [(low, high - low) for low, high in itertools.pairwise([0, *cuts, size])]
    return [span for span in spans if draw(st.booleans())]


def listed(runs: Runs) -> list[int]:
    return [i for first, count in runs for i in range(first, first + count)]


def check_runs(shape: Dims, runs: list[Runs]) -> None:
    elements = numbered(shape)
    expected = elements[np.ix_(*map(listed, runs))] if shape else elements
    again = np.full(expected.shape, -1)
    boxes = boxes_of_runs(runs)
    for box, at in boxes:
        assert all(box[1])
        part(again, (at, box[1]))[...] = part(elements, box)
    assert (again == expected).all()
    assert sum(math.prod(box[1]) for box, _ in boxes) == expected.size
    if boxes:  # as few as possible: neighbors are joined
        stretches = [1 + sum(b != a + 1 for a, b in itertools.pairwise(listed(each))) for each in runs]
        assert len(boxes) == math.prod(stretches)


@QUICK
@given(shapes, st.data())
def test_chosen_indices_of_every_dimension_are_boxes(shape: Dims, data: st.DataObject) -> None:
    """Assembled at the given places, the boxes equal the result of indexing."""
    check_runs(shape, [data.draw(rising_runs(size)) for size in shape])


@pytest.mark.long
@LONG
@given(shapes, st.data())
def test_chosen_indices_of_every_dimension_are_boxes_long(shape: Dims, data: st.DataObject) -> None:
    """The same test with more examples."""
    check_runs(shape, [data.draw(rising_runs(size)) for size in shape])


@QUICK
@given(rising_runs(20), st.integers(0, 25), st.integers(0, 25))
def test_take_from_runs_equals_slicing(runs: Runs, start: int, stop: int) -> None:
    """Any start and stop work, also beyond the end."""
    found = take(runs, start, stop)
    assert listed(found) == listed(runs)[start:stop]
    assert all(count > 0 for _, count in found)


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


@pytest.mark.long
@LONG
@given(coverings())
def test_coverage_is_counted_exactly_long(case: tuple[Dims, list[Box]]) -> None:
    """The same test with more examples."""
    assert times_covered(*case) == counted(*case)


def test_empty_arrays_are_covered() -> None:
    """No boxes or empty boxes cover an empty array."""
    for boxes in ([], [((0, 0), (0, 3))], [((0, 0), (0, 3)), ((0, 1), (0, 2))]):
        assert times_covered((0, 3), boxes) == (1, 1)


def test_scalar_coverage_equals_number_of_boxes() -> None:
    """An array without dimensions has one box."""
    assert [times_covered((), [((), ())] * n) for n in range(3)] == [(0, 0), (1, 1), (2, 2)]


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


def test_tangled_boxes_raise_an_error() -> None:
    """A few dozen boxes in eight dimensions, as in a hostile file, raise an error without endless work."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 500, (40, 8))
    sizes = rng.integers(1, 500, (40, 8))
    boxes = [(tuple(map(int, a)), tuple(map(int, n))) for a, n in zip(starts, sizes, strict=True)]
    with pytest.raises(TangledError):
        times_covered((1000,) * 8, [*boxes, ((0,) * 8, (1000,) * 8)], Effort(5000))
