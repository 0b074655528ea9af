"""Pieces of tensors are assembled from any boxes, in any order, into any part of the whole."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.core.format.boxes import Box
from ckpt.errors import CorruptError, UsageError
from ckpt.tools.convert.source import (
    Assembly,
    Described,
    OriginEntry,
    RankView,
    Want,
    check_patterns,
    describe,
    described,
    select,
)

ITEM = 2


def cut(shape: tuple[int, ...], draw: random.Random) -> list[Box]:
    """Return random boxes that cover an array exactly once."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw.randrange(6)):
        at, size = boxes.pop(draw.randrange(len(boxes)))
        dims = [d for d, n in enumerate(size) if n > 1]
        if not dims:
            boxes.append((at, size))
            continue
        dim = draw.choice(dims)
        n = draw.randrange(1, size[dim])
        first = (*size[:dim], n, *size[dim + 1 :])
        rest = (*size[:dim], size[dim] - n, *size[dim + 1 :])
        boxes += [(at, first), ((*at[:dim], at[dim] + n, *at[dim + 1 :]), rest)]
    return boxes


def part(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    return array[tuple(slice(i, i + n) for i, n in zip(*box, strict=True))]


def put_together(shape: tuple[int, ...], seed: int, *, leave_out: bool = False) -> tuple[Any, Any]:
    """Return the expected parts of an array in pieces, and the assembled ones."""
    draw = random.Random(seed)
    whole = np.arange(1, 1 + math.prod(shape), dtype="<u2").reshape(shape)
    pieces = cut(shape, draw)
    wanted, assembly, wants = [], Assembly(), []
    for _ in range(draw.randrange(1, 4)):
        box = draw.choice(cut(shape, draw))
        count = math.prod(box[1])
        start = draw.randrange(count)
        stop = draw.randrange(start + 1, count + 1)
        wants.append(Want("x", box, start, stop, np.zeros((stop - start) * ITEM, np.uint8)))
        wanted.append(np.ascontiguousarray(part(whole, box)).reshape(-1)[start:stop])
    for number, want in itertools.product(range(len(pieces)), wants):
        assembly.meet(number, pieces[number], want)
    runs = list(assembly.runs())
    draw.shuffle(runs)
    for i, (number, low, high) in enumerate(runs):
        raw = np.ascontiguousarray(part(whole, pieces[number])).reshape(-1).view(np.uint8)
        places = list(range(low, high, draw.choice([ITEM, 3 * ITEM, 100 * ITEM])))
        for start, stop in zip(places, [*places[1:], high], strict=True):
            if leave_out and i == 0:
                continue
            room = assembly.room(number, start, stop)
            if room is not None and draw.random() < 0.5:
                room[:] = raw[start:stop].data
            elif assembly.needs(number, start, stop):
                assembly.add(number, start, raw[start:stop].data)
    return wanted, [want.into.view("<u2") for want in wants]


shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@settings(deadline=None, max_examples=200)
@given(shapes, st.integers(0, 10**9))
def test_pieces_are_assembled(shape: tuple[int, ...], seed: int) -> None:
    """For any pieces and any wanted parts, the result is correct and only needed pieces are read."""
    wanted, found = put_together(shape, seed)
    assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_negative_control_missing_piece_is_detected() -> None:
    """The comparison above fails if one piece is missing."""
    wanted, found = put_together((5, 7), 3, leave_out=True)
    assert not all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))


# -- views --

VIEW = RankView(
    (
        OriginEntry(("model",), "module", {}, ("model.a", "model.tied", "model.b")),
        OriginEntry(
            ("optim",), "optimizer", {"params": [["model.a"]]}, ("optim.state.model.a.exp_avg",), {"groups": []}
        ),
        OriginEntry(("step",), "plain", {}, (), 3),
    ),
    {"model.a": "model.a", "model.b": "model.b", "optim.state.model.a.exp_avg": "optim.state.model.a.exp_avg"},
    {"model.tied": "model.a"},
    step=7,
)


def test_entries_are_selected_by_name() -> None:
    """Modules may lose tensors. Other entries are kept whole or dropped; plain ones are selected by their own name."""
    assert [e.path for e in select(VIEW, ["*"]).entries] == [("model",), ("optim",), ("step",)]
    found = select(VIEW, ["model.tied"])
    assert (dict(found.tensors), dict(found.aliases)) == ({"model.tied": "model.a"}, {})
    assert found.entries == (OriginEntry(("model",), "module", {}, ("model.tied",)),)
    found = select(VIEW, ["model.[at]*"])
    assert (dict(found.tensors), dict(found.aliases)) == ({"model.a": "model.a"}, {"model.tied": "model.a"})
    assert [e.path for e in select(VIEW, ["st?p"]).entries] == [("step",)]
    with pytest.raises(UsageError, match=r"'nosuch'.*model\.a"):
        check_patterns([VIEW], ["model.*", "nosuch"])
    check_patterns([VIEW], ["model.tied", "step.*", "optim*"])


def test_description_survives_a_round_trip() -> None:
    """Entries, aliases and places survive a round trip through text. Damaged text is rejected."""
    places = {"model.a": ("model", "a"), "optim.state.model.a.exp_avg": ("optim", "state", 0, "exp_avg")}
    text = describe(VIEW, places)
    assert described(text) == Described(1, VIEW.entries, VIEW.aliases, places, 7)
    for bad in ("", "[]", "{}", text[:-9], text.replace('"version":1', '"version":2'), "[" * 10**5):
        with pytest.raises(CorruptError):
            described(bad)
