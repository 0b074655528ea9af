"""What to know before a long job: whether places keep what they promise, how fast they are, what the machine allows.

Each check is a small function that returns findings. Nothing is written but below a name of our own
(`.ckpt-doctor-…` in folders, `doctor-…/` elsewhere), which is removed again however it ends; a place that holds
somebody else's files is not written to at all. Every check has a deadline, every measurement a bound in bytes.

Here are the places, and what any store must do. What only folders or S3 have is in `doctor_folder` and `doctor_s3`;
the machine, the link between two nodes, and what follows from it all in `doctor_machine`, `doctor_link`, `doctor_plan`.
Rates are of one process on this machine, at this moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import secrets
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.checkpoint.store_trial import PREFIX
from ckpt.checkpoint.write import upload_from
from ckpt.doctor.findings import (
    GB,
    MIB,
    OK,
    PROBLEM,
    Finding,
    OnBytes,
    StoreRates,
    TierFindings,
    cleaner,
    judge,
    ms,
    noise,
    per_second,
    worst,
)
from ckpt.doctor.folder import disk, file_system, nearest_folder, space
from ckpt.doctor.s3 import bare_s3, bucket
from ckpt.errors import (
    AccessError,
    CheckpointError,
    CorruptError,
    ExistsError,
    FormatError,
    NotFoundError,
    StoreError,
)
from ckpt.format.digest import blob_digest
from ckpt.runlog.log import RunLog
from ckpt.store import PAGE, Store, normalise, open_store, options_of

FOLDER = ".ckpt-doctor-"
LEFT_S = 3600  # a scratch name older than this belongs to a doctor that was killed
CREATORS, ROUNDS = 16, 3
LARGEST = 128 * MIB  # of one object that is written to measure
RANGE, READERS = 8 * MIB, 4
RETRY_S, CLEAN_S = 5.0, 30.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """`size` in bytes and `measure_s` in seconds, for writing and again for reading; `check_s` ends any one check."""

    size: int = 256 * MIB
    measure_s: float = 10.0
    check_s: float = 60.0


# -- a place --


async def examine(url: str, bounds: Bounds, *, on_bytes: OnBytes = None) -> TierFindings:
    """Everything about one place. Raises nothing that a place can be the reason of."""
    cleaned = cleaner(url)
    place = TierFindings(cleaned(url))
    try:
        place.url = cleaned(normalise(url))
        place.options = bool(options_of(url))
        store = open_store(url)
    except (CheckpointError, OSError, ImportError, ValueError, TypeError) as error:
        place.reached = False
        place.findings.append(Finding("open", cleaned(str(error)), PROBLEM, "Correct the URL or its options"))
        return place
    if hasattr(store, "budget_s"):
        store.budget_s = RETRY_S  # what is tried again elsewhere for minutes is told to a person after seconds
    try:
        await _examine(store, place, bounds, on_bytes)
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(store.aclose(), RETRY_S)
    place.findings = [replace(f, value=cleaned(f.value), advice=cleaned(f.advice)) for f in place.findings]
    return place


async def _examine(store: Store, place: TierFindings, bounds: Bounds, on_bytes: OnBytes) -> None:
    add = place.findings.extend
    looked = await bounded("run", look(store), bounds)
    add(looked)
    if looked[0].what == "reach":
        place.reached = False
        return
    root = store.url.removeprefix("file://") if store.url.startswith("file://") else None
    if root is not None:
        lies_on, room = file_system(root), space(root)
        place.shared, place.free = lies_on.shared, room[0].data
        add([lies_on.finding, *room])
    if looked[0].data == "foreign":
        return
    writable = await _probe(store, root, place, bounds, on_bytes)
    if (s3 := bare_s3(store)) is not None:
        add(await bounded("bucket", bucket(s3), bounds))
    elif root is None and writable:
        add([Finding("clock", "this kind of place does not tell its time")])


async def _probe(store: Store, root: str | None, place: TierFindings, bounds: Bounds, on_bytes: OnBytes) -> bool:
    """What needs writing; whether that is allowed at all."""
    add, rates, cached = place.findings.extend, place.rates, False
    try:
        async with scratch(store, root, place.findings) as (inner, prefix):
            allowed = await bounded("permissions", permissions(inner, prefix), bounds)
            add(allowed)
            if worst(allowed) == PROBLEM:
                return False
            add(await bounded("create-if-absent", create_if_absent(inner, prefix), bounds))
            add(await bounded("consistency", consistency(inner, prefix, rates), bounds))
            if root is not None:
                folder = inner.url.removeprefix("file://")
                add(found := await bounded("disk", asyncio.to_thread(disk, folder), bounds))
                cached = any(f.what == "O_DIRECT" and f.verdict != OK for f in found)
            size = bounds.size if place.free is None else min(bounds.size, place.free // 10)
            less = replace(bounds, size=size, check_s=bounds.check_s + 3 * bounds.measure_s)
            add(await bounded("bandwidth", bandwidth(inner, prefix, less, rates, on_bytes, cached=cached), less))
            return True
    except (CheckpointError, OSError) as error:
        add([Finding("write", str(error), PROBLEM, "Without writing there, nothing can be saved to it")])
        return False


async def bounded(what: str, check: Awaitable[list[Finding]], bounds: Bounds) -> list[Finding]:
    """The findings of a check, or why there are none. One that cannot reach its place at all is called "reach"."""
    try:
        async with asyncio.timeout(bounds.check_s):
            return await check
    except TimeoutError:
        name = "reach" if what == "run" else what
        return [Finding(name, f"no answer within {bounds.check_s:g} s", PROBLEM, "Look at the network, and the server")]
    except (CheckpointError, OSError) as error:
        if what == "run" and not isinstance(error, (FormatError, CorruptError)):
            advice = "" if isinstance(error, AccessError) else "Check URL, endpoint and network; nothing was written"
            return [Finding("reach", str(error), PROBLEM, advice)]
        return [Finding(what, str(error), PROBLEM, "Nothing can be relied on there before this works")]


@contextlib.asynccontextmanager
async def scratch(store: Store, root: str | None, findings: list[Finding]) -> AsyncIterator[tuple[Store, str]]:
    """A store and a prefix to write under, that are gone afterwards; if not, a finding says what is left."""
    name = f"{int(time.time())}-{secrets.token_hex(4)}"
    if root is not None:
        async with _scratch_folder(Path(root), FOLDER + name, findings) as inner:
            yield inner, "probe/"
        return
    prefix = f"{PREFIX}{name}/"
    try:
        yield store, prefix
    finally:
        try:
            await asyncio.wait_for(remove(store, prefix), CLEAN_S)
        except (CheckpointError, OSError, TimeoutError) as error:
            findings.append(Finding("scratch", f"{prefix} is left there: {error}", PROBLEM, f"Delete {prefix} by hand"))


@contextlib.asynccontextmanager
async def _scratch_folder(root: Path, name: str, findings: list[Finding]) -> AsyncIterator[Store]:
    """In the folder; or, where a job would make that first, in the nearest one above it."""
    root = nearest_folder(root)
    for left in root.glob(f"{FOLDER}*"):
        if _is_old(left.name.removeprefix(FOLDER)) and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    folder = root / name
    inner: Store | None = None
    try:
        inner = open_store(f"file://{folder}", writable=True)
        yield inner
    finally:
        if inner is not None:
            await inner.aclose()
        for _ in range(100):  # a thread may still be in its last write
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            await asyncio.sleep(0.05)
        else:
            findings.append(Finding("scratch", f"{folder} is left there", PROBLEM, "Delete it by hand"))


def _is_old(name: str) -> bool:
    when = name.partition("-")[0]
    return when.isdigit() and len(when) < 12 and time.time() - int(when) > LEFT_S


async def remove(store: Store, prefix: str) -> None:
    """Every object and unfinished upload under one of our prefixes."""
    assert prefix.startswith(PREFIX) and prefix.endswith("/")
    try:
        await store.drop_uploads(lambda key: not key.startswith(prefix))
    finally:
        await store.delete_many([info.key async for info in store.list(prefix)])


# -- what is there --


async def look(store: Store) -> list[Finding]:
    """Whether there is a run, somebody else's files, or nothing. Only reads; but what an earlier doctor that was
    killed has left goes."""
    log = RunLog(store)
    try:
        await log.open()
    except FormatError as error:
        return await _no_run(store, str(error))
    state = log.state
    history = state.lineage()
    newest = history[0].step if history else None
    said = "no checkpoint yet" if newest is None else f"newest step {newest}"
    text = f"a run: {said}, {len(state.commits)} checkpoints, owner's epoch {state.epoch}"
    data = {"newest": newest, "epoch": state.epoch, "damaged": state.damaged}
    if state.damaged:
        text += f"; damaged records: {', '.join(map(str, state.damaged[:10]))}"
    advice = "See `ckpt verify --all`. It can go on, but nothing is deleted there any more: better begin a new place"
    return [judge("run", text, bool(state.damaged), advice, data, verdict=PROBLEM)]


async def _no_run(store: Store, why: str) -> list[Finding]:
    left: set[str] = set()
    async for info in store.list():
        folder = info.key.partition("/")[0]
        if folder.startswith(PREFIX) and _is_old(folder.removeprefix(PREFIX)):
            left.add(folder + "/")
        elif re.fullmatch(PREFIX + r"[0-9]+-[0-9a-f]{8}", folder):
            continue  # another doctor is at work
        elif info.key == "FORMAT.json":
            return [Finding("run", why, PROBLEM, "Use the version that wrote it, or another place", "foreign")]
        else:
            advice = "Choose a place of its own for each run. Nothing was written there"
            return [Finding("run", f"it holds somebody else's files: {info.key}", PROBLEM, advice, "foreign")]
    for prefix in left:
        await remove(store, prefix)
    return [Finding("run", "none yet, the place is empty")]


# -- what any store must do --


async def permissions(store: Store, prefix: str) -> list[Finding]:
    """Each thing that a run does there, tried once."""
    key, s3 = f"{prefix}permission", bare_s3(store)

    async def abort() -> None:
        if s3 is None:
            upload = await store.upload(f"{prefix}upload", size=2 * PAGE)
            await upload.abort()
        else:
            name = f"{prefix}upload"
            answer = await s3.call("create_multipart_upload", "cannot begin an upload", Key=s3.name(name))
            await s3.drop(name, answer["UploadId"])

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
        except StoreError as error:
            refused.append(Finding("permissions", f"{name}: {error}", PROBLEM, f"Allow these credentials to {name}"))
    return refused or [Finding("permissions", ", ".join(steps))]


async def create_if_absent(store: Store, prefix: str) -> list[Finding]:
    """Twice in turn, and many at once. Commits rest on this alone."""
    advice = "Two jobs could overwrite each other's commits: keep runs where create-if-absent is atomic"
    await store.put(f"{prefix}once", b"first", create=True)
    try:
        await store.put(f"{prefix}once", b"second", create=True)
    except ExistsError:
        pass
    else:
        return [Finding("create-if-absent", "ignored: an object was created twice", PROBLEM, advice)]
    if bytes(await store.get(f"{prefix}once")) != b"first":
        return [Finding("create-if-absent", "refused, and overwritten all the same", PROBLEM, advice)]
    for number in range(ROUNDS):
        if problem := await _race(store, f"{prefix}race{number}"):
            return [Finding("create-if-absent", problem, PROBLEM, advice)]
    return [Finding("create-if-absent", f"atomic: one winner of {CREATORS}, {ROUNDS} times")]


async def _race(store: Store, key: str) -> str:
    """What went wrong when many made the same object at once."""
    bodies = [b"%02d" % number * 64 for number in range(CREATORS)]
    calls = (store.put(key, body, create=True) for body in bodies)
    results = await asyncio.gather(*calls, return_exceptions=True)
    winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
    for result in results:
        if result is not None and not isinstance(result, ExistsError):
            raise result
    if len(winners) != 1:
        return f"not atomic: {len(winners)} of {CREATORS} that created an object at once were told that they had"
    return "" if bytes(await store.get(key)) == winners[0] else "not atomic: the winner's bytes are not there"


async def consistency(
    store: Store, prefix: str, rates: StoreRates, *, rounds: int = 8, most_s: float = 8.0
) -> list[Finding]:
    """Whether what was written, replaced or deleted is seen at once, and how long small objects take."""
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
                    problems["read after write"] = "an older object came back"
            except NotFoundError:
                problems["read after write"] = "what was just written was not there"
            gets.append(time.perf_counter() - at)
        if not await listed(key):
            problems["list after write"] = "what was just written was not listed"
        await store.delete(key)
        if await listed(key):
            problems["list after delete"] = "what was just deleted was still listed"
        if time.monotonic() > end:
            break
    rates.put_s, rates.get_s = statistics.median(puts), statistics.median(gets)
    advice = "Runs are only safe where each answer is the newest: no cache, no gateway that lags behind"
    found = [Finding(what, value, PROBLEM, advice) for what, value in problems.items()]
    found = found or [Finding("consistency", "reads and listings see each write and deletion at once")]
    latency = f"put {ms(rates.put_s)}, get {ms(rates.get_s)} (medians of {len(puts)})"
    advice = "Each checkpoint takes a handful of these in turn; look for a nearer region or a less busy server"
    return [*found, judge("latency", latency, rates.put_s > 0.5, advice)]


async def bandwidth(
    store: Store, prefix: str, bounds: Bounds, rates: StoreRates, on_bytes: OnBytes = None, *, cached: bool = False
) -> list[Finding]:
    """Large objects, written and read as checkpoints are. The rates are those of the largest there was time for.

    `cached`: what was just written is read from this machine's memory, so that reading tells little.
    """
    data = await asyncio.to_thread(noise, min(bounds.size, LARGEST))
    written: list[tuple[int, float, float]] = []  # size, seconds, CPU
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
    large = [one for one in written if one[0] >= max(written)[0] / 2]
    total, seconds, cpu = map(sum, zip(*large, strict=True))
    rates.write, rates.cpu_s = total / seconds, cpu / total
    text = f"write {per_second(rates.write)}, {rates.cpu_s * GB:.2f} CPU-s a GB"
    if not await _read_back(store, prefix, [size for size, _, _ in written], data, bounds, rates, on_bytes):
        advice = "Something on the way changes bytes: memory, disk or network. Do not train on this machine"
        return [Finding("bandwidth", "what was read is not what was written", PROBLEM, advice)]
    text += f", read {per_second(rates.read)}{' from the page cache' * cached}"
    text += f" ({sum(size for size, _, _ in written) / 1e6:.0f} MB)"
    advice = "That is slow for checkpoints: save there rarely, and have a nearer tier as well"
    return [judge("bandwidth", text, min(rates.write, rates.read) < 10e6, advice)]


async def _read_back(
    store: Store, prefix: str, sizes: list[int], data: memoryview, bounds: Bounds, rates: StoreRates, on_bytes: OnBytes
) -> bool:
    """Measure reading, largest objects first; whether every byte is as it was written."""
    done, same = 0, True
    largest_first = sorted(enumerate(sizes), key=lambda one: -one[1])
    spans = [(n, at, min(RANGE, size - at)) for n, size in largest_first for at in range(0, size, RANGE)]
    digests = {(at, length): blob_digest(data[at : at + length]) for _, at, length in spans}
    ranges = iter(spans)

    async def reader() -> None:
        nonlocal done, same
        room = memoryview(mmap.mmap(-1, RANGE + 2 * PAGE))
        for number, start, length in ranges:
            got = await store.get(f"{prefix}bytes{number}", start=start, length=length, into=room)
            same = same and await asyncio.to_thread(blob_digest, got) == digests[start, length]
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
