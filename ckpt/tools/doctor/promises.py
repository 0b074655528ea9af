"""Test what every store must guarantee (permissions, create-if-absent, consistency), and measure its speed."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ckpt.core.checkpoint.write import upload_from
from ckpt.core.format.digest import chunk_digest
from ckpt.errors import ExistsError, FullError, NotFoundError, StoreError
from ckpt.store import PAGE, Store
from ckpt.tools.doctor.findings import GB, MIB, PROBLEM, Finding, OnBytes, StoreRates, judge, noise
from ckpt.tools.doctor.s3 import bare_s3
from ckpt.units import decimal, duration

CREATORS, ROUNDS = 16, 3
LARGEST = 128 * MIB  # maximum size of an object that is written to measure the speed
RANGE, READERS = 8 * MIB, 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a check. `size`: bytes to write. `measure_s`: seconds for writing, and again for reading. `check_s`:
    timeout of any check, seconds."""

    size: int = 256 * MIB
    measure_s: float = 10.0
    check_s: float = 60.0


async def permissions(store: Store, prefix: str) -> list[Finding]:
    """Try once each operation that a run needs, and return a finding for each that is not allowed."""
    key, s3 = f"{prefix}permission", bare_s3(store)

    async def abort() -> None:
        if s3 is None:
            upload = await store.upload(f"{prefix}upload", size=2 * PAGE)
            await upload.abort()
        else:
            name = f"{prefix}upload"
            response = await s3.call("create_multipart_upload", "cannot begin an upload", Key=s3.name(name))
            await s3.drop(name, response["UploadId"])

    async def listing() -> None:
        async for _ in store.list(prefix):
            return

    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "put": lambda: store.put(key, b"x"),
        "get": lambda: store.get(key),
        "list": listing,
        "abort an upload": abort,
        "delete": lambda: store.delete(key),
    }
    refused: list[Finding] = []
    for name, step in steps.items():
        try:
            await step()
        except NotFoundError as error:
            refused += [] if refused else [Finding("permissions", f"{name}: {error}", PROBLEM, "See consistency")]
        except FullError:
            refused.append(
                Finding("free space", f"{name}: no space left", PROBLEM, "Free some space: nothing can be saved")
            )
        except StoreError as error:
            refused.append(Finding("permissions", f"{name}: {error}", PROBLEM, f"Allow these credentials to {name}"))
    return refused or [Finding("permissions", ", ".join(steps))]


async def create_if_absent(store: Store, prefix: str) -> list[Finding]:
    """Check that an object cannot be created twice, in turn or by many callers concurrently. Commits rely on this."""
    advice = "Two jobs could overwrite each other's commits: keep runs where create-if-absent is atomic"
    await store.put(f"{prefix}once", b"first", create=True)
    try:
        await store.put(f"{prefix}once", b"second", create=True)
    except ExistsError:
        pass
    else:
        return [Finding("create-if-absent", "ignored: an object was created twice", PROBLEM, advice)]
    if bytes(await store.get(f"{prefix}once")) != b"first":
        return [Finding("create-if-absent", "a rejected write replaced the object", PROBLEM, advice)]
    for number in range(ROUNDS):
        if problem := await _race(store, f"{prefix}race{number}"):
            return [Finding("create-if-absent", problem, PROBLEM, advice)]
    return [Finding("create-if-absent", f"atomic: one winner of {CREATORS}, {ROUNDS} times")]


async def _race(store: Store, key: str) -> str:
    """Let many callers create the same object at the same time. Return what went wrong, or ""."""
    bodies = [b"%02d" % number * 64 for number in range(CREATORS)]
    calls = (store.put(key, body, create=True) for body in bodies)
    results = await asyncio.gather(*calls, return_exceptions=True)
    winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
    for result in results:
        if result is not None and not isinstance(result, ExistsError):
            raise result
    if len(winners) != 1:
        return f"not atomic: {len(winners)} of {CREATORS} simultaneous creations of one object succeeded"
    return "" if bytes(await store.get(key)) == winners[0] else "not atomic: the winner's bytes were not stored"


async def consistency(
    store: Store, prefix: str, rates: StoreRates, *, rounds: int = 8, most_s: float = 8.0
) -> list[Finding]:
    """Check that writes and deletions are visible immediately, and measure the latency of small objects."""
    problems: dict[str, str] = {}
    puts, gets = list[float](), list[float]()
    end = time.monotonic() + most_s

    async def listed(key: str) -> bool:
        return key in [info.key async for info in store.list(prefix)]

    for number in range(rounds):
        key = f"{prefix}seen{number}"
        for body in (b"old" * 100, b"new, and longer" * 100):
            at = time.perf_counter()
            await store.put(key, body)
            puts.append(time.perf_counter() - at)
            at = time.perf_counter()
            try:
                if bytes(await store.get(key)) != body:
                    problems["read after write"] = "an older object was returned"
            except NotFoundError:
                problems["read after write"] = "an object just written was not found"
            gets.append(time.perf_counter() - at)
        if not await listed(key):
            problems["list after write"] = "an object just written was not listed"
        await store.delete(key)
        if await listed(key):
            problems["list after delete"] = "an object just deleted was still listed"
        if time.monotonic() > end:
            break
    rates.put_s, rates.get_s = statistics.median(puts), statistics.median(gets)
    advice = "Runs are only safe if every response is current: use no cache and no lagging gateway"
    findings = [Finding(what, value, PROBLEM, advice) for what, value in problems.items()]
    findings = findings or [Finding("consistency", "reads and listings show each write and deletion immediately")]
    latency = f"put {duration(rates.put_s)}, get {duration(rates.get_s)} (medians of {len(puts)})"
    advice = "Each checkpoint needs a few of these in turn: use a nearer region or a less busy server"
    return [*findings, judge("latency", latency, rates.put_s > 0.5, advice)]


async def bandwidth(
    store: Store, prefix: str, bounds: Bounds, rates: StoreRates, on_bytes: OnBytes = None
) -> list[Finding]:
    """Write and read large objects, as checkpoints do. The rates are those of the largest size within the time."""
    data = await asyncio.to_thread(noise, min(bounds.size, LARGEST))
    written: list[tuple[int, float, float]] = []  # for each object: size, seconds, CPU seconds
    end = time.monotonic() + bounds.measure_s

    async def piece(offset: int, length: int) -> memoryview:
        return data[offset : offset + length]

    left, size = bounds.size, min(MIB, bounds.size)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(bounds.measure_s):
            while left > 0 and size > 0:
                at, cpu = time.perf_counter(), time.process_time()
                await upload_from(store, f"{prefix}bytes{len(written)}", size, piece, on_bytes)
                took = time.perf_counter() - at
                written.append((size, took, time.process_time() - cpu))
                left -= size
                affordable = int(size / took * (end - time.monotonic()) / 2)
                size = min(left, 4 * size, len(data), max(affordable, MIB))
    if not written:
        text = f"not {min(MIB, bounds.size) / 1e6:.0f} MB in {bounds.measure_s:g} s"
        return [Finding("bandwidth", text, PROBLEM, "Far too slow to save to")]
    large = [write for write in written if write[0] >= max(written)[0] / 2]
    total, seconds, cpu = map(sum, zip(*large, strict=True))
    rates.write, rates.cpu_s = total / seconds, cpu / total
    text = f"write {decimal(rates.write)}/s, {rates.cpu_s * GB:.2f} CPU-s a GB"
    if not await _read_back(store, prefix, [size for size, _, _ in written], data, bounds, rates, on_bytes):
        advice = "Memory, disk or network changes bytes. Do not train on this machine"
        return [Finding("bandwidth", "the bytes read differ from the bytes written", PROBLEM, advice)]
    text += f", read {decimal(rates.read)}/s"
    text += f" ({sum(size for size, _, _ in written) / 1e6:.0f} MB)"
    advice = "This is slow for checkpoints: save there rarely, and add a nearer tier"
    return [judge("bandwidth", text, min(rates.write, rates.read) < 10e6, advice)]


async def _read_back(
    store: Store, prefix: str, sizes: list[int], data: memoryview, bounds: Bounds, rates: StoreRates, on_bytes: OnBytes
) -> bool:
    """Read the objects back, largest first, and measure the rate. Return True if every byte is as it was written."""
    done, same = 0, True
    largest_first = sorted(enumerate(sizes), key=lambda item: -item[1])
    spans = [(n, at, min(RANGE, size - at)) for n, size in largest_first for at in range(0, size, RANGE)]
    digests = {(at, length): chunk_digest(data[at : at + length]) for _, at, length in spans}
    ranges = iter(spans)

    async def reader() -> None:
        nonlocal done, same
        room = memoryview(mmap.mmap(-1, RANGE + 2 * PAGE))
        for number, start, length in ranges:
            got = await store.get(f"{prefix}bytes{number}", start=start, length=length, into=room)
            same = same and await asyncio.to_thread(chunk_digest, got) == digests[start, length]
            done += length
            if on_bytes is not None:
                on_bytes(length)

    at = time.perf_counter()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(bounds.measure_s), asyncio.TaskGroup() as group:
            for _ in range(READERS):
                group.create_task(reader())
    rates.read = done / (time.perf_counter() - at)
    return same
