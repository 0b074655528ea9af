"""Who stages what: all that ranks hold alike is staged once, in equal shares, and what belongs together stays so."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.partition import GRAIN, Cut, Holding, Seat, share

KEYS = ("exp_avg", "exp_avg_sq")


def alike(name: str, shape: tuple[int, ...], world: int, dtype: str = "F32") -> Holding:
    return Holding(name, dtype, shape, (0,) * len(shape), shape, tuple(range(world)))


def trained(shapes: list[tuple[int, ...]], world: int, dtypes: list[str]) -> tuple[list[Holding], dict[str, str]]:
    """Weights with what Adam has of each, and which weight each of these goes with."""
    held, beside = [], {}
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        held.append(alike(f"model.{i}", shape, world, dtype))
        for key in KEYS:
            held.append(alike(f"optimizer.{i}.{key}", shape, world))
            beside[held[-1].name] = f"model.{i}"
        held.append(alike(f"optimizer.{i}.step", (), world))
        beside[held[-1].name] = f"model.{i}"
    return held, beside


def sizes(cuts: list[Cut], held: list[Holding]) -> int:
    return sum(math.prod(cut.box[1]) * held[cut.holding].item_size for cut in cuts)


def boxes(cuts: list[Cut], held: list[Holding], name: str) -> list[object]:
    return [cut.box for cut in cuts if held[cut.holding].name == name]


shapes = st.lists(st.lists(st.integers(0, 90), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes, st.integers(1, 9), st.data())
def test_every_element_is_staged_once_and_beside_its_weight(
    shapes: list[tuple[int, ...]], world: int, data: st.DataObject
) -> None:
    """Whatever the shapes: all shares together are the whole, and a weight is cut at the rows where its moments are."""
    dtypes = data.draw(st.lists(st.sampled_from(["F32", "BF16", "F64"]), min_size=len(shapes), max_size=len(shapes)))
    held, beside = trained(shapes, world, dtypes)
    seen = [np.zeros(one.full, np.int64) for one in held]
    named = set()
    for rank in range(world):
        cuts = share(held, Seat(rank, world), beside)
        assert cuts == sorted(cuts, key=lambda cut: (cut.holding, cut.box))
        for cut in cuts:
            where = tuple(slice(at, at + n) for at, n in zip(*cut.box, strict=True))
            seen[cut.holding][where] += 1
            named.add(cut.holding)
        for i in range(len(shapes)):
            there = [boxes(cuts, held, name) for name in (f"model.{i}", *(f"optimizer.{i}.{key}" for key in KEYS))]
            assert there[0] == there[1] == there[2]
    assert all((one == 1).all() for one in seen) and named == set(range(len(held)))


def test_without_a_word_tensors_lie_by_their_names() -> None:
    """The control: two ranks cut between weights and moments if nobody says what belongs together."""
    held, beside = trained([(256, 256)] * 4, 2, ["F32"] * 4)
    apart = [boxes(share(held, Seat(rank, 2)), held, "model.0") for rank in range(2)]
    assert apart[0] and not apart[1]
    together = share(held, Seat(0, 2), beside)
    assert boxes(together, held, "model.0") == boxes(together, held, "optimizer.0.exp_avg") != []


@pytest.mark.parametrize("world", [2, 3, 8])
def test_shares_are_of_equal_size(world: int) -> None:
    """Within a row or so, also where weights and moments are cut side by side, and where one is nearly everything."""
    held, beside = trained([(512, 300), (7,), (4096, 700), (1 << 21,)], world, ["F32", "F32", "BF16", "F32"])
    found = [sizes(share(held, Seat(rank, world), beside), held) for rank in range(world)]
    assert sum(found) == sum(one.elements * one.item_size for one in held)
    assert max(found) - min(found) <= 4 * GRAIN
