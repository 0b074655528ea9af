"""A simulated CUDA device for a torch built without CUDA: `device="cuda"` works, asynchronously and in threads.

It reproduces problems of concurrent copies: torn copies, reused memory, invalid captures, hung streams, failing
kernels and slow page-locking. The rules are C++ code in `src/`, one file per subject. The CUDA code in torch's Python
is used unchanged, and `bindings` provides what it calls.

torch checks for its device once at import, so `install` must come first. A process that has imported torch cannot get
the device: tests run in separate processes with VARIABLE in the environment (../conftest.py). The device is a model:
code that passes may still fail on a GPU, and its times only reflect the knobs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

VARIABLE = "SIMULATED_DEVICE"
"""Environment variable: test processes that have it use the device. Its value sets knobs: "devices=2,d2h_gbs=1"."""


def wanted() -> bool:
    return VARIABLE in os.environ


def install() -> None:
    """Make torch find the device. Build it if necessary."""
    from simulated import build, imports

    assert "torch" not in sys.modules, "torch has already checked for a device"
    imports.install(build.library())


def core() -> Any:
    """Return its C++ module, in a process that has the device."""
    return sys.modules["simulated_core"]


def turn(**knobs: float) -> None:
    """Set knobs (`Knobs` in src/driver.h) of this process."""
    for name, value in knobs.items():
        core().turn(name, value)


@contextlib.contextmanager
def turned(**knobs: float) -> Iterator[None]:
    """Set knobs temporarily, then restore their values from the environment or the defaults."""
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
    """Return the knobs that a process starts with."""
    words = filter(None, os.environ.get(VARIABLE, "").split(","))
    return {name: float(value) for name, _, value in (word.partition("=") for word in words)}


@contextlib.contextmanager
def hung(stream: Any) -> Iterator[None]:
    """Hang a stream like a collective with a dead peer: later work runs only after the block."""
    moment = core().hang(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        moment.reach()


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Prevent the calling thread from invalidating captures, its own or others."""
    before = core().exchange_mode(2)
    try:
        yield
    finally:
        core().exchange_mode(before)


@contextlib.contextmanager
def faulty(stream: Any) -> Iterator[None]:
    """Make the next kernel on this stream fail. From then on every call fails until the end of the block."""
    core().fault(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        core().heal()
