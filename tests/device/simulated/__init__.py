"""A CUDA device that is simulated, for a torch that is built without CUDA: `device="cuda"` works, late and in threads.

It shows what goes wrong beside training: copies that are torn, memory that somebody else got, captures that are spoilt,
streams that hang, kernels that fail, page-locking that takes long. Its rules are in `src/`: C++, one file a subject.
What torch itself has in Python about CUDA is torch's own, and finds here what it calls (`bindings`).

torch asks for its device once, while it is imported, so `install` comes before that, and a process that has torch
cannot have the device any more: tests run in processes of their own, with VARIABLE in the environment (../conftest.py).
It is a model: what it lets pass may still break on a card, and its times mean nothing but what the knobs say.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

VARIABLE = "SIMULATED_DEVICE"
"""Of the environment: processes of tests that have it have the device. Its value are knobs: "devices=2,d2h_gbs=1"."""


def wanted() -> bool:
    return VARIABLE in os.environ


def install() -> None:
    """Have torch find the device. Builds it if nobody has yet."""
    from simulated import build, imports

    assert "torch" not in sys.modules, "torch has looked for a device already"
    imports.install(build.library())


def core() -> Any:
    """The C++ of it, in a process that has the device."""
    return sys.modules["simulated_core"]


def turn(**knobs: float) -> None:
    """Set knobs (`Knobs` in src/driver.h) of this process."""
    for name, value in knobs.items():
        core().turn(name, value)


@contextlib.contextmanager
def turned(**knobs: float) -> Iterator[None]:
    """Set knobs for a while; back to what they are at first, or were said to be in the environment."""
    turn(**knobs)
    try:
        yield
    finally:
        turn(**{name: from_environment().get(name, FIRST[name]) for name in knobs})


FIRST = {
    "devices": 1, "d2h_gbs": 0, "h2d_gbs": 0, "chunk_bytes": 256 << 10, "kernel_us": 0, "kernels_slowed": 1,
    "clock_ghz": 2, "lock_gbs": 0, "lock_call_bytes": 1e18, "lock_bytes": 1e18, "poison": 1,
}  # fmt: skip


def from_environment() -> dict[str, float]:
    """The knobs that a process begins with."""
    words = filter(None, os.environ.get(VARIABLE, "").split(","))
    return {name: float(value) for name, _, value in (word.partition("=") for word in words)}


@contextlib.contextmanager
def hung(stream: Any) -> Iterator[None]:
    """A collective on this stream whose peer has died: nothing behind it runs until the end."""
    moment = core().hang(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        moment.reach()


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """The calling thread spoils no captures of others, nor its own."""
    before = core().exchange_mode(2)
    try:
        yield
    finally:
        core().exchange_mode(before)


@contextlib.contextmanager
def faulty(stream: Any) -> Iterator[None]:
    """A kernel on this stream fails when its turn comes; from then on every call does, until the end."""
    core().fault(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        core().heal()
