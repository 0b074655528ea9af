"""What Adam and AdamW make of their state in one step, computed again, so that only what differs need be stored.

After a step the new exp_avg tells what the gradient was (it is a mean of it and the old one), so exp_avg_sq and the
weights follow from it:

    gradient = m + (m' - m) / (1 - beta1)
    v'       = beta2 v + (1 - beta2) gradient²
    w'       = (1 - lr wd) w - lr / bias1 m' / (sqrt(v') / sqrt(bias2) + eps)        wd: decoupled weight decay only

Clipping, coupled weight decay and `maximize` are in the gradient already. A prediction need not be right: its exact
difference to the truth is stored. It must be the same wherever it is computed, so every operation is one correctly
rounded fp32 operation of numpy in the order written here, none fused, and the powers and quotients of settings, which
differ between libraries, are not computed again: their fp32 values are stored (`Coefficients`). Any change to this
arithmetic needs a new VERSION. Pure functions over fp32 arrays; any thread may call them.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from ckpt.format import kernels

VERSION = 1
PIECE = 1 << 15  # numbers at a time, so that what is in between stays in a core's own cache

_LARGEST = float(np.finfo(np.float32).max)
_Number = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
CoefficientRow = tuple[_Number, _Number, _Number, _Number, _Number, _Number, _Number]

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """What one parameter group told its last step. `decoupled`: whether weight decay acts on the weights themselves;
    `step`: which step that was, for parameters whose own count another rank stages; None: not known."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: float | None = None


@dataclass(frozen=True, slots=True)
class Coefficients:
    """All that the formulas take besides the tensors; each is an fp32 number."""

    inverse: float  # 1 / (1 - beta1)
    beta2: float
    gain: float  # 1 - beta2
    decay: float  # 1 - lr wd
    alpha: float  # -lr / bias1
    root: float  # sqrt(bias2)
    eps: float

    @classmethod
    def of(cls, settings: AdamSettings, step: float) -> Coefficients | None:
        """For the `step`-th step of a parameter; None if it is none that these formulas know."""
        s = settings
        try:
            decay = 1 - s.lr * s.weight_decay if s.decoupled else 1.0
            alpha = -s.lr / (1 - s.beta1**step)
            root = math.sqrt(1 - s.beta2**step)
            rows = (1 / (1 - s.beta1), s.beta2, 1 - s.beta2, decay, alpha, root, s.eps)
            with np.errstate(all="ignore"):
                found = tuple(float(np.float32(one)) for one in rows)
        except (ArithmeticError, ValueError, TypeError):
            return None
        return cls(*found) if all(map(math.isfinite, found)) and found[5] > 0 else None


def second_moment(m: Floats, m_next: Floats, v: Floats, c: Coefficients, into: Floats) -> None:
    """Fill `into` with exp_avg_sq after the step, from exp_avg before and after it, and exp_avg_sq before."""
    if (library := _library()) is not None and _contiguous(m, m_next, v, into):
        library.second_moment(m, m_next, v, (c.inverse, c.beta2, c.gain), into)
        return
    _second_moment(m, m_next, v, c, into)


def _second_moment(m: Floats, m_next: Floats, v: Floats, c: Coefficients, into: Floats) -> None:
    inverse, beta2, gain = np.float32(c.inverse), np.float32(c.beta2), np.float32(c.gain)
    with np.errstate(all="ignore"):
        for at in _pieces(len(into)):
            gradient, squares, out = _rooms.take(0, len(into[at])), _rooms.take(1, len(into[at])), into[at]
            np.subtract(m_next[at], m[at], out=gradient)
            np.multiply(gradient, inverse, out=gradient)
            np.add(gradient, m[at], out=gradient)
            np.multiply(gradient, gain, out=squares)
            np.multiply(squares, gradient, out=squares)
            np.multiply(v[at], beta2, out=out)
            np.add(out, squares, out=out)
            _same_nans(out)


def weights(w: Floats, m_next: Floats, v_next: Floats, c: Coefficients, into: Floats) -> None:
    """Fill `into` with the weights after the step, from those before it, and both moments after it."""
    if (library := _library()) is not None and _contiguous(w, m_next, v_next, into):
        library.weights(w, m_next, v_next, (c.decay, c.alpha, c.root, c.eps), into)
        return
    _weights(w, m_next, v_next, c, into)


def _weights(w: Floats, m_next: Floats, v_next: Floats, c: Coefficients, into: Floats) -> None:
    decay, alpha, root, eps = np.float32(c.decay), np.float32(c.alpha), np.float32(c.root), np.float32(c.eps)
    with np.errstate(all="ignore"):
        for at in _pieces(len(into)):
            spread, change, out = _rooms.take(0, len(into[at])), _rooms.take(1, len(into[at])), into[at]
            np.sqrt(v_next[at], out=spread)
            np.divide(spread, root, out=spread)
            np.add(spread, eps, out=spread)
            np.multiply(m_next[at], alpha, out=change)
            np.divide(change, spread, out=change)
            np.multiply(w[at], decay, out=out)
            np.add(out, change, out=out)
            _same_nans(out)


def _contiguous(*some: Floats) -> bool:
    return all(one.flags.c_contiguous and len(one) == len(some[0]) for one in some)


@functools.cache
def _library() -> kernels.Kernels | None:
    return kernels.trusted("predict Adam", _rounds_as_numpy)


def _rounds_as_numpy(library: kernels.Kernels) -> bool:
    """Of all kinds of floats."""
    noise: Floats = np.random.default_rng(0).integers(0, 1 << 32, (3, 4321), np.uint32).view(np.float32)
    noise[:, :2000] = np.random.default_rng(1).normal(0, 1e-3, (3, 2000)) ** 2
    one, two, three = noise
    by_them, by_numpy = np.zeros_like(noise[:2]), np.zeros_like(noise[:2])
    c = Coefficients(10, 0.999, 0.001, 1, -1, 0.1, 1e-8)
    library.second_moment(one, two, three, (c.inverse, c.beta2, c.gain), by_them[0])
    library.weights(one, two, three, (c.decay, c.alpha, c.root, c.eps), by_them[1])
    _second_moment(one, two, three, c, by_numpy[0])
    _weights(one, two, three, c, by_numpy[1])
    return by_them.tobytes() == by_numpy.tobytes()


def is_exact() -> bool:
    """Whether this thread computes with denormals, as the formulas want it: a switch of the processor, which torch's
    set_flush_denormal turns."""
    tiny = np.full(8, 1e-40, np.float32)
    return bool((np.multiply(tiny, np.float32(0.5)) > 0).all())


def _same_nans(found: Floats) -> None:
    """Which of its many NaNs an operation makes differs between processors."""
    if math.isnan(float(np.add.reduce(found))):
        np.copyto(found, np.float32("nan"), where=np.isnan(found))


def _pieces(count: int) -> Iterator[slice]:
    return (slice(at, at + PIECE) for at in range(0, count, PIECE))


class _Rooms(threading.local):
    """Work space of each thread."""

    def __init__(self) -> None:
        self._rooms = [np.empty(PIECE, np.float32) for _ in range(2)]

    def take(self, number: int, count: int) -> Floats:
        found: Floats = self._rooms[number][:count]
        return found


_rooms = _Rooms()
