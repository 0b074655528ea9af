"""The partition of staging: replicated data is staged once, in equal shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.core.format.boxes import GRAIN, Cut, Holding, Seat, share

KEYS = ("exp_avg", "exp_avg_sq")


def replicated(name: str, shape: tuple[int, ...], world: int, dtype: str = "F32") -> Holding:
    return Holding(name, dtype, shape, (0,) * len(shape), shape, tuple(range(world)))


def trained(shapes: list[tuple[int, ...]], world: int, dtypes: list[str]) -> list[Holding]:
    """Return weights with the state that Adam has for each."""
    held = []
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        held.append(replicated(f"model.{i}", shape, world, dtype))
        held += [replicated(f"optimizer.{i}.{key}", shape, world) for key in KEYS]
        held.append(replicated(f"optimizer.{i}.step", (), world))
    return held


def sizes(cuts: list[Cut], held: list[Holding]) -> int:
    return sum(math.prod(cut.box[1]) * held[cut.holding].item_size for cut in cuts)


shapes = st.lists(st.lists(st.integers(0, 90), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes, st.integers(1, 9), st.data())
def test_every_element_is_staged_once(shapes: list[tuple[int, ...]], world: int, data: st.DataObject) -> None:
    """For any shapes, all shares together are the whole state."""
    dtypes = data.draw(st.lists(st.sampled_from(["F32", "BF16", "F64"]), min_size=len(shapes), max_size=len(shapes)))
    held = trained(shapes, world, dtypes)
    seen = [np.zeros(one.full, np.int64) for one in held]
    named = set()
    for rank in range(world):
        cuts = share(held, Seat(rank, world))
        assert cuts == sorted(cuts, key=lambda cut: (cut.holding, cut.box))
        for cut in cuts:
            where = tuple(slice(at, at + n) for at, n in zip(*cut.box, strict=True))
            seen[cut.holding][where] += 1
            named.add(cut.holding)
    assert all((one == 1).all() for one in seen) and named == set(range(len(held)))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_shares_are_of_equal_size(world: int) -> None:
    """Shares differ by about a row, even if one tensor has nearly all data."""
    held = trained([(512, 300), (7,), (4096, 700), (1 << 21,)], world, ["F32", "F32", "BF16", "F32"])
    found = [sizes(share(held, Seat(rank, world)), held) for rank in range(world)]
    assert sum(found) == sum(one.elements * one.item_size for one in held)
    assert max(found) - min(found) <= 4 * GRAIN
