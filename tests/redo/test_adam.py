"""Predictions of Adam's steps: near enough to be worth their time, and the same bits wherever they are computed."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Adam, AdamW

from ckpt.redo import adam
from ckpt.redo.adam import PIECE, AdamSettings, CoefficientRow, Coefficients, Floats, is_exact, second_moment, weights
from ckpt.redo.optimizer_recipe import GroupWatch
from compiled import compiled_kernels

COUNT, STEPS = 5000, 30
QUICK = settings(max_examples=50, deadline=None)
Turn = Callable[[torch.optim.Optimizer, int], None]

EXACT_SQUARES, NEAR_SQUARES, EXACT_WEIGHTS = 0.65, 0.99, 0.99
"""Shares of words. The gradient comes out of exp_avg rounded, so that its square is often off by a bit."""


@dataclass
class Moment:
    """One parameter's state."""

    weight: Floats
    mean: Floats
    square: Floats

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Moment:
        found = optimizer.state[param]
        return cls(*(t.detach().numpy().copy() for t in (param, found["exp_avg"], found["exp_avg_sq"])))


def predicted(before: Moment, after: Moment, c: Coefficients) -> tuple[Floats, Floats]:
    square, weight = np.empty_like(before.square), np.empty_like(before.weight)
    second_moment(before.mean, after.mean, before.square, c, square)
    weights(before.weight, after.mean, after.square, c, weight)
    return square, weight


def distance(a: Floats, b: Floats) -> Any:
    """In units of the last place, of numbers of one sign."""
    return np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32))


def trained(
    kind: type[Adam],
    *,
    clip: float = 0.0,
    turn: Turn = lambda optimizer, step: None,
    scale: float = 1.0,
    **options: Any,
) -> Iterator[tuple[Moment, Moment, AdamSettings, float]]:
    """Of each step but the first: the state before and after it, what the optimizer was told, its count of steps."""
    torch.manual_seed(0)
    param, wanted = nn.Parameter(torch.randn(COUNT)), torch.randn(COUNT)
    optimizer, watch = kind([param], **options), GroupWatch()
    optimizer.register_step_pre_hook(lambda optimizer, *_: watch.note(optimizer))
    for step in range(STEPS):
        optimizer.zero_grad()
        (scale * (param * torch.randn(COUNT) - wanted).pow(2)).mean().backward()
        if clip:
            nn.utils.clip_grad_norm_([param], clip)
        turn(optimizer, step)
        before = Moment.of(optimizer, param) if step else None
        optimizer.step()
        if before is not None:
            (told,) = watch.told([optimizer])
            assert told is not None
            yield before, Moment.of(optimizer, param), AdamSettings(*told), float(optimizer.state[param]["step"])


def shares(steps: Iterator[tuple[Moment, Moment, AdamSettings, float]]) -> tuple[float, float, float]:
    """Of the words of exp_avg_sq that are predicted exactly, and nearly, and of the weights that are exactly."""
    found = []
    for before, after, told, count in steps:
        c = Coefficients.of(told, count)
        assert c is not None
        square, weight = predicted(before, after, c)
        off = distance(square, after.square)
        found.append(((off == 0).mean(), (off <= 4).mean(), (distance(weight, after.weight) == 0).mean()))
    return tuple(np.mean(found, axis=0))


def good(steps: Iterator[tuple[Moment, Moment, AdamSettings, float]]) -> bool:
    exact, near, of_weights = shares(steps)
    return exact >= EXACT_SQUARES and near >= NEAR_SQUARES and of_weights >= EXACT_WEIGHTS


# -- against torch --


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("way", ["foreach", "single", "fused"])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_torch(kind: type[Adam], way: str, decay: float, maximize: bool) -> None:
    """Most words are what torch makes of them, in each of its ways to step, whatever weight decay acts on."""
    how = {"foreach": way == "foreach", "fused": way == "fused"}
    assert good(trained(kind, weight_decay=decay, maximize=maximize, **how))


def test_decoupled_adam() -> None:
    """An Adam that was told to decouple its weight decay is predicted like an AdamW."""
    assert good(trained(Adam, weight_decay=0.1, decoupled_weight_decay=True))


def _warm(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (step + 1) / STEPS
        group["betas"] = (0.9 - 0.01 * (step % 5), 0.999 - 0.001 * (step % 7))
        group["weight_decay"] = 0.01 * step


SITUATIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip": 1e-3},
    "changing": {"turn": _warm},
    "tensor lr": {"lr": torch.tensor(1e-3), "foreach": False},
    "fused tensor lr": {"lr": torch.tensor(1e-3), "fused": True},
    "tiny gradients": {"scale": 1e-12},
    "huge gradients": {"scale": 1e12},
    "large eps": {"eps": 1.0},
    "no eps": {"eps": 0.0},
    "no mean": {"betas": (0.0, 0.999)},
    "slow": {"betas": (0.99, 0.9999)},
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_situations(name: str) -> None:
    """Clipping, a schedule of all settings, a learning rate that is a tensor, and gradients of any size."""
    assert good(trained(AdamW, **SITUATIONS[name]))


def test_wrong_settings() -> None:
    """A negative control: what was not told right predicts next to nothing."""

    def wrong(change: Callable[[AdamSettings, float], tuple[AdamSettings, float]]) -> tuple[float, float, float]:
        steps = trained(AdamW, weight_decay=0.1)
        return shares((b, a, *change(s, n)) for b, a, s, n in steps)

    _, near, _ = wrong(lambda s, n: (replace(s, beta2=0.99 * s.beta2), n))
    assert near < 0.01
    assert wrong(lambda s, n: (replace(s, beta1=0.99 * s.beta1), n))[1] < 0.01
    assert wrong(lambda s, n: (replace(s, lr=2 * s.lr), n))[2] < 0.1
    assert wrong(lambda s, n: (replace(s, decoupled=False), n))[2] < 0.1
    assert wrong(lambda s, n: (s, n + 1))[2] < 0.5


# -- the same bits everywhere --

ODD = np.array(
    [
        0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 1.0, -1.0, 3.4028235e38, -3.4028235e38,
        math.inf, -math.inf, math.nan,
    ],
    np.float32,
)  # fmt: skip
SOME = Coefficients.of(AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, True), 7.0)
assert SOME is not None


def odd_states() -> tuple[Floats, Floats, Floats]:
    """Every three of the odd numbers, and NaNs of either sign and of several payloads."""
    found = np.array(list(itertools.product(ODD, repeat=3)), np.float32)
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF812345, 0x7FFFFFFF], np.uint32).view(np.float32)
    more = np.array(list(itertools.product(nans, [*nans, np.float32(1)], [*nans, np.float32(2)])), np.float32)
    # As they are: numbers that pass through Python lose their payload.
    more[:, 0] = np.repeat(nans, len(more) // len(nans))
    rows = np.concatenate([found, more])
    return tuple(np.ascontiguousarray(rows[:, i]) for i in range(3))  # type: ignore[return-value]


def both(a: Floats, b: Floats, c: Floats, coefficients: Coefficients = SOME) -> tuple[bytes, bytes]:
    square, weight = np.empty(len(a), np.float32), np.empty(len(a), np.float32)
    second_moment(a, b, c, coefficients, square)
    weights(a, b, c, coefficients, weight)
    return square.tobytes(), weight.tobytes()


def test_odd_numbers() -> None:
    """Nothing is raised or warned of for zeros, denormals, infinities and NaNs; and all NaNs are one."""
    with np.errstate(all="raise"):
        for found in both(*odd_states()):
            bits = np.frombuffer(found, np.uint32)
            nans = np.isnan(bits.view(np.float32))
            assert nans.any() and not nans.all() and (bits[nans] == 0x7FC00000).all()


def test_denormals() -> None:
    """What is too small for a normal number is computed exactly, not flushed to zero."""
    tiny, zero = np.full(64, 1e-40, np.float32), np.zeros(64, np.float32)
    square, weight = np.empty(64, np.float32), np.empty(64, np.float32)
    second_moment(zero, zero, tiny, replace(SOME, beta2=0.5), square)
    weights(tiny, zero, zero, replace(SOME, decay=0.5), weight)
    assert (square == tiny * np.float32(0.5)).all() and (square > 0).all() and (square == weight).all()


def by_hand(w: float, m: float, v: float, c: Coefficients) -> float:
    """One weight, by operations of doubles that are rounded to fp32: for + - * / and roots that is correct rounding."""

    def fp32(x: float) -> float:
        return float(struct.unpack("f", struct.pack("f", x))[0])

    spread = fp32(fp32(fp32(math.sqrt(v)) / c.root) + c.eps)
    return fp32(fp32(w * c.decay) + fp32(fp32(m * c.alpha) / spread))


@QUICK
@given(st.lists(st.floats(2**-20, 1024, width=32), min_size=3, max_size=99))
def test_every_operation_is_rounded(numbers: list[float]) -> None:
    """The weights are those of fp32 operations one by one, in the order of the docstring and none fused."""
    count = len(numbers) // 3
    w, m, v = np.array(numbers[: 3 * count], np.float32).reshape(3, count)
    found = np.empty(count, np.float32)
    weights(w, m, v, SOME, found)
    wanted = [by_hand(*map(float, row), SOME) for row in zip(w, m, v, strict=True)]
    assert found.tolist() == wanted


@QUICK
@given(st.integers(0, 3 * PIECE), st.integers(0, 40), st.integers(0, 7))
def test_pieces(start: int, length: int, shift: int) -> None:
    """A word's prediction depends neither on how long its array is, nor on its place in it, nor on where that lies."""
    random = np.random.default_rng(start)
    whole = [random.standard_normal(3 * PIECE + 50).astype(np.float32) for _ in range(3)]
    odd = odd_states()
    for one, some in zip(whole, odd, strict=True):
        one[start : start + 20] = random.permutation(some)[:20]

    def moved(one: Floats) -> Floats:
        """The same words, elsewhere in memory: what vector instructions take together differs."""
        room = np.empty(length + 8, np.float32)
        room[shift : shift + length] = one[start : start + length]
        return room[shift : shift + length]

    part, all_of_it = both(*map(moved, whole)), both(*whole)
    for some, every in zip(part, all_of_it, strict=True):
        assert some == every[4 * start : 4 * (start + length)]


def test_empty() -> None:
    """Of nothing comes nothing."""
    none = np.empty(0, np.float32)
    assert both(none, none, none) == (b"", b"")


def test_flushing_denormals() -> None:
    """A thread that flushes denormals says so, and one that does not says that."""
    assert is_exact()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert not is_exact()
    finally:
        torch.set_flush_denormal(False)
    assert is_exact()


# -- coefficients --

PLAIN = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, True)
IMPOSSIBLE = {
    "no step": (PLAIN, 0.0),
    "step of no number": (PLAIN, math.nan),
    "before the first": (PLAIN, -3.0),
    "beta1 of one": (replace(PLAIN, beta1=1.0), 5.0),
    "beta2 of one": (replace(PLAIN, beta2=1.0), 5.0),
    "beta2 above one": (replace(PLAIN, beta2=1.5), 5.0),
    "beta1 that overflows": (replace(PLAIN, beta1=1e300), 5.0),
    "half a step of less than nothing": (replace(PLAIN, beta1=-0.5), 1.5),
    "lr of no number": (replace(PLAIN, lr=math.nan), 5.0),
    "endless lr": (replace(PLAIN, lr=math.inf), 5.0),
    "lr beyond fp32": (replace(PLAIN, lr=1e200), 5.0),
    "eps of no number": (replace(PLAIN, eps=math.nan), 5.0),
    "endless decay": (replace(PLAIN, weight_decay=math.inf), 5.0),
    "words": (replace(PLAIN, lr="fast"), 5.0),  # type: ignore[arg-type]
    "nothing": (replace(PLAIN, beta2=None), 5.0),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_settings(name: str) -> None:
    """Settings that the formulas do not know have no coefficients, and are no error."""
    assert Coefficients.of(*IMPOSSIBLE[name]) is None


def stored(row: object) -> Coefficients:
    """From a row of JSON, as a frame has it."""
    (found,) = msgspec.json.decode(json.dumps([row]), type=list[CoefficientRow])
    return Coefficients(*found)


@QUICK
@given(st.builds(AdamSettings, *[st.floats()] * 5, st.booleans()), st.floats())
def test_any_settings(told: AdamSettings, step: float) -> None:
    """Whatever is told: coefficients that come back from JSON as they were, or none."""
    found = Coefficients.of(told, step)
    assert found is None or stored(astuple(found)) == found


def test_fp32() -> None:
    """Coefficients are fp32 numbers: computing with them is the same after they were written and read."""
    found = astuple(SOME)
    assert found == tuple(map(float, np.array(found, np.float32)))


ROWS: list[Any] = [
    None, 7, "1234567", {}, {str(i): 1.0 for i in range(7)}, [], [1.0] * 6, [1.0] * 8, [1.0] * 6 + ["1"],
    [1.0] * 6 + [None], [1.0] * 6 + [True], [1.0] * 6 + [[1.0]], [1.0] * 6 + [math.nan], [math.inf] * 7,
    [1.0] * 6 + [1e39], [1.0] * 6 + [3.41e38], [1.0] * 6 + [10**400], [1.0] * 6 + [-(10**400)],
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row)[:40])
def test_hostile_rows(row: Any) -> None:
    """Rows that no writer makes are refused."""
    with pytest.raises(msgspec.MsgspecError):
        stored(row)


def test_whole_numbers() -> None:
    """JSON does not tell 1 from 1.0."""
    assert stored([1, 0, 1, 1, -1, 1, 0]) == Coefficients(1.0, 0.0, 1.0, 1.0, -1.0, 1.0, 0.0)


def test_compiled_kernels_round_as_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit of a prediction is the same by compiled kernels and by numpy, for any floats, at any count."""
    library = compiled_kernels()
    if library is None:
        pytest.skip("no C compiler")
    rng = np.random.default_rng(5)
    for count in (0, 1, 7, 31, 33, PIECE - 1, PIECE + 5):
        for scale in (1e-40, 1e-3, 1e30, None):
            some = rng.normal(0, 1, (3, count)) * (scale or 1)
            floats = some.astype(np.float32) if scale else rng.integers(0, 1 << 32, (3, count), np.uint32).view("<f4")
            found = []
            for one in (library, None):
                monkeypatch.setattr(adam, "_library", lambda one=one: one)
                into = np.zeros((2, count), np.float32)
                c = Coefficients(10, 0.999, 0.001, 0.99, -0.01, 0.3, 1e-8)
                second_moment(floats[0], floats[1], floats[2], c, into[0])
                weights(floats[0], floats[1], floats[2], c, into[1])
                found.append(into.tobytes())
            assert found[0] == found[1]
