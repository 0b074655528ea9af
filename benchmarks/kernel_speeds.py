"""How long the compiled kernels take, beside a memcpy of as many bytes and beside numpy, which does the same.

A part of benchmarks/codecs.py. Everything runs on one pinned core, in turns, by its CPU time. "times memcpy" is the
time of a row over the time of the faster of two plain copies of the bytes that the row is about, libc's memcpy and one
past the caches: 1.15 means that it takes 15 % longer than copying does. Lower is better. Memory is as large as it is in
use: what is copied into an arena does not fit a cache, blobs have 4 MiB.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zstandard

from ckpt.core.checkpoint.put import put
from ckpt.core.format import byteplanes, codec, frames, kernels
from ckpt.core.format.digest import blob_digest

Json = dict[str, Any]
Array = np.ndarray[Any, Any]
Rows = dict[str, tuple[int, Callable[[], object], Callable[[], object]]]  # bytes; compiled; by numpy

MIB = 1 << 20
BLOB = 4 * MIB
WAYS = {"planes": codec.PLANES, "rotated": codec.ROTATED, "delta": codec.DELTA, "float-delta": codec.FLOAT_DELTA}
GOAL = {"copy and digest": 1.15}  # times memcpy


def by_numpy(do: Callable[[], object]) -> Callable[[], object]:
    """The same where nothing was compiled."""

    def run() -> None:
        users = (kernels, "find"), (byteplanes, "_library"), (frames, "_library")
        before = [getattr(module, name) for module, name in users]
        for module, name in users:
            setattr(module, name, lambda: None)
        try:
            do()
        finally:
            for (module, name), one in zip(users, before, strict=True):
                setattr(module, name, one)

    return run


def both(size: int, do: Callable[[], object]) -> tuple[int, Callable[[], object], Callable[[], object]]:
    return size, do, by_numpy(do)


def copies(size: int) -> Rows:
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    into = np.zeros_like(data)
    start, length, place = np.array([[0], [size], [into.ctypes.data]], np.int64)
    digests = np.frombuffer(blob_digest(data.data), np.uint8)[None]
    return {
        "copy past the caches": both(size, lambda: kernels.copy(into, data)),
        "copy and digest": both(size, lambda: put(data.data, start, length, digests, place)),
    }


def words() -> Iterator[tuple[str, tuple[int, Callable[[], object], Callable[[], object]]]]:
    noise = np.random.default_rng(1).integers(0, 256, (2, BLOB), np.uint8)
    for word in (2, 4, 8):
        new, old = (one.view(byteplanes.UNSIGNED[word]) for one in noise)
        for name, way in WAYS.items():
            base = old if codec.CODECS[way].base == "same" else None
            planes, again = codec._Rooms().rows("planes", word, len(new)), np.zeros_like(new)

            def cut(way: int = way, new: Array = new, base: Array | None = base, planes: Array = planes) -> None:
                byteplanes.cut(way, new, base, planes)

            def join(way: int = way, again: Array = again, base: Array | None = base, planes: Array = planes) -> None:
                byteplanes.join(way, list(planes), base, again)

            yield f"{name}, words of {word}: cut", both(BLOB, cut)
            yield f"{name}, words of {word}: join", both(BLOB, join)


def numbers() -> Rows:
    w = np.random.default_rng(2).normal(0, 0.02, BLOB // 4).astype(np.float32)
    short = np.zeros(len(w), np.uint16)
    byteplanes.round_to_bf16(w.view(np.uint32), short)
    exponents = np.ascontiguousarray((w.view(np.uint32) >> 23 & 0xFF).astype(np.uint8))
    room = np.zeros_like(exponents)
    frame = bytes(frames.compress(exponents, room))
    return {
        "bf16 from fp32 (of fp32 bytes)": both(BLOB, lambda: byteplanes.round_to_bf16(w.view(np.uint32), short)),
        "bf16 seen to be derived": both(BLOB, lambda: codec.derives(w.view(np.uint8), short.view(np.uint8))),
        "exponents to a frame": both(len(exponents), lambda: frames.compress(exponents, room)),
        "and back, by zstd": both(len(exponents), lambda: frames.decompress(memoryview(frame), room)),
        "exponents to a frame, zstd 1": both(len(exponents), lambda: zstandard.compress(exponents.data, 1)),
    }


def plain_copies(size: int) -> list[Callable[[], object]]:
    data, into = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return [
        lambda: ctypes.memmove(into.ctypes.data, data.ctypes.data, size),
        lambda: kernels.copy(into, data),
    ]


def kernel_speeds(rounds: int, copied_mib: int = 64) -> Json:
    """By row: GB/s, and seconds over those of a plain copy, compiled and by numpy."""
    rows = copies(copied_mib * MIB) | dict(words()) | numbers()
    if kernels.find() is None:
        print("no compiled kernels: both columns are numpy's")
    found: Json = {}
    for name, (size, *ways) in rows.items():
        each = [*ways, *plain_copies(size)]
        taken: list[list[float]] = [[] for _ in each]
        for turn in range(rounds + 1):  # the first one warms up
            for do, some in zip(each, taken, strict=True):
                began = time.process_time()
                do()
                if turn:
                    some.append(time.process_time() - began)
        compiled, numpy_s, *plain = (statistics.median(some) for some in taken)
        found[name] = {
            "gb_s": size / 1e9 / compiled,
            "numpy_gb_s": size / 1e9 / numpy_s,
            "times_memcpy": compiled / min(plain),
            "numpy_times_memcpy": numpy_s / min(plain),
            "goal_times_memcpy": GOAL.get(name),
        }
    return found
