"""What to know before a long job: whether places keep what they promise, how fast they are, what the machine allows.

Each check is a small function that returns findings. Nothing is written but below a name of our own
(`.ckpt-doctor-…` in folders, `doctor-…/` elsewhere), which is removed again however it ends; a place that holds
somebody else's files is not written to at all. Every check has a deadline, every measurement a bound in bytes.

GB are 10**9 bytes, as disks and networks count. Rates are of one process on this machine, at this moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import mmap
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from ckpt import link, pressure
from ckpt.arena import Arena
from ckpt.codec import blob_digest
from ckpt.errors import (
    AccessError,
    CheckpointError,
    CorruptError,
    ExistsError,
    FormatError,
    NotFoundError,
    StoreError,
    UsageError,
)
from ckpt.log import RunLog
from ckpt.store import PAGE, Store, normalise, open_store, options_of
from ckpt.write import upload_from

OK, ADVICE, PROBLEM = "ok", "advice", "problem"
FOLDER, PREFIX = ".ckpt-doctor-", "doctor-"
LEFT_S = 3600  # a scratch name older than this belongs to a doctor that was killed
CREATORS, ROUNDS = 16, 3
MIB, GB = 1 << 20, 10**9
LARGEST = 128 * MIB  # of one object that is written to measure
RANGE, READERS = 8 * MIB, 4
RETRY_S, CLEAN_S = 5.0, 30.0
COST = 0.01  # of training that saving may take
OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Finding:
    """`verdict`: "ok", "advice" or "problem"; `advice` says what to do. `data` is more of it for programs, as JSON."""

    what: str
    value: str
    verdict: str = OK
    advice: str = ""
    data: Any = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """`size` in bytes and `measure_s` in seconds, for writing and again for reading; `check_s` ends any one check."""

    size: int = 256 * MIB
    measure_s: float = 10.0
    check_s: float = 60.0


@dataclass
class Rates:
    """`write` and `read` in bytes a second, `put_s` and `get_s` of a small object, `cpu_s` of CPU a byte written."""

    write: float = 0.0
    read: float = 0.0
    put_s: float = 0.0
    get_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class Place:
    """What was found about one URL. `reached`: it could be read. `shared`: all nodes write to the same disks of it."""

    url: str
    findings: list[Finding] = field(default_factory=list)
    rates: Rates = field(default_factory=Rates)
    reached: bool = True
    shared: bool = False
    free: int | None = None
    options: bool = False  # whether it needs some

    @property
    def usable(self) -> bool:
        return self.reached and self.rates.write > 0 and all(f.verdict != PROBLEM for f in self.findings)


def worst(findings: Sequence[Finding]) -> str:
    """The verdict over all of them."""
    return max((f.verdict for f in findings), key=(OK, ADVICE, PROBLEM).index, default=OK)


# -- a place --


async def examine(url: str, bounds: Bounds, *, on_bytes: OnBytes = None) -> Place:
    """Everything about one place. Raises nothing that a place can be the reason of."""
    cleaned = Cleaner(url)
    place = Place(cleaned(url))
    try:
        place.url = cleaned(normalise(url))
        place.options = bool(options_of(url))
        store = open_store(url)
    except (CheckpointError, OSError, ImportError, ValueError, TypeError) as error:
        place.reached = False
        place.findings.append(Finding("open", cleaned(str(error)), PROBLEM, "Correct the URL or its options"))
        return place
    _impatient(store)
    try:
        await _examine(store, place, bounds, on_bytes)
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(store.aclose(), RETRY_S)
    place.findings = [Finding(f.what, cleaned(f.value), f.verdict, cleaned(f.advice), f.data) for f in place.findings]
    return place


async def _examine(store: Store, place: Place, bounds: Bounds, on_bytes: OnBytes) -> None:
    add = place.findings.extend
    looked = await bounded("run", look(store), bounds)
    add(looked)
    if looked[0].what == "reach":
        place.reached = False
        return
    root = store.url.removeprefix("file://") if store.url.startswith("file://") else None
    if root is not None:
        found = file_system(root)
        place.shared, place.free = found.shared, free_bytes(root)
        add([*found.findings, *space(root)])
    if any(f.verdict == PROBLEM and f.what == "run" and f.data == "foreign" for f in looked):
        return
    writable = await _probe(store, root, place, bounds, on_bytes)
    if (s3 := bare_s3(store)) is not None:
        add(await bounded("bucket", bucket(s3), bounds))
    elif root is None and writable:
        add([Finding("clock", "this kind of place does not tell its time")])


async def _probe(store: Store, root: str | None, place: Place, bounds: Bounds, on_bytes: OnBytes) -> bool:
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
            less = Bounds(size, bounds.measure_s, bounds.check_s + 3 * bounds.measure_s)
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


def _impatient(store: Any) -> None:
    """What is tried again elsewhere for minutes is told to a person after seconds."""
    if hasattr(store, "budget_s"):
        store.budget_s = RETRY_S


class Cleaner:
    """Takes passwords and queries out of URLs, and what options call a key or a token out of any text."""

    def __init__(self, url: str) -> None:
        self._secrets: set[str] = set()
        with contextlib.suppress(CheckpointError):
            self._secrets = set(_secrets_in(options_of(url)))

    def __call__(self, text: str) -> str:
        text = re.sub(r"://[^/@\s]*@", "://", re.sub(r"\?[^\s\"'<>)]*=[^\s\"'<>)]*", "", text))
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def _secrets_in(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets_in(value)
        elif len(str(value)) >= 4 and re.search(r"key|secret|token|passw|credential|sas", str(name), re.IGNORECASE):
            yield str(value)


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
    while not root.is_dir() and root != root.parent:
        root = root.parent
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
    newest = f"newest step {history[0].step}" if history else "no checkpoint yet"
    text = f"a run: {newest}, {len(state.commits)} checkpoints, owner's epoch {state.epoch}"
    data = {"newest": history[0].step if history else None, "epoch": state.epoch, "damaged": state.damaged}
    if state.damaged:
        advice = (
            "See `ckpt verify --all`. It can go on, but nothing is deleted there any more: better begin a new place"
        )
        records = ", ".join(map(str, state.damaged[:10]))
        return [Finding("run", f"{text}; damaged records: {records}", PROBLEM, advice, data)]
    return [Finding("run", text, data=data)]


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
    store: Store, prefix: str, rates: Rates, *, rounds: int = 8, most_s: float = 8.0
) -> list[Finding]:
    """Whether what was written, replaced or deleted is seen at once, and how long small objects take."""
    problems: dict[str, str] = {}
    puts: list[float] = []
    gets: list[float] = []
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
    slow = rates.put_s > 0.5
    latency = f"put {_ms(rates.put_s)}, get {_ms(rates.get_s)} (medians of {len(puts)})"
    advice = "Each checkpoint takes a handful of these in turn; look for a nearer region or a less busy server"
    return [*found, Finding("latency", latency, ADVICE if slow else OK, advice if slow else "")]


async def bandwidth(
    store: Store, prefix: str, bounds: Bounds, rates: Rates, on_bytes: OnBytes = None, *, cached: bool = False
) -> list[Finding]:
    """Large objects, written and read as checkpoints are. The rates are those of the largest there was time for.

    `cached`: what was just written is read from this machine's memory, so that reading tells little.
    """
    data = await asyncio.to_thread(_noise, min(bounds.size, LARGEST))
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
    text = f"write {_rate(rates.write)}, {rates.cpu_s * GB:.2f} CPU-s a GB"
    if not await _read_back(store, prefix, [size for size, _, _ in written], data, bounds, rates, on_bytes):
        advice = "Something on the way changes bytes: memory, disk or network. Do not train on this machine"
        return [Finding("bandwidth", "what was read is not what was written", PROBLEM, advice)]
    slow = min(rates.write, rates.read) < 10e6
    advice = "That is slow for checkpoints: save there rarely, and have a nearer tier as well" if slow else ""
    text += (
        f", read {_rate(rates.read)}{' from the page cache' * cached} ({sum(s for s, _, _ in written) / 1e6:.0f} MB)"
    )
    return [Finding("bandwidth", text, ADVICE if slow else OK, advice)]


async def _read_back(
    store: Store, prefix: str, sizes: list[int], data: memoryview, bounds: Bounds, rates: Rates, on_bytes: OnBytes
) -> bool:
    """Measure reading, largest objects first; whether every byte is as it was written."""
    done, same = 0, True
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    spans = [(n, at, min(RANGE, sizes[n] - at)) for n in order for at in range(0, sizes[n], RANGE)]
    digests = {(at, length): blob_digest(data[at : at + length]) for _, at, length in spans}
    ranges = iter(spans)

    async def reader() -> None:
        nonlocal done, same
        scratch_memory = memoryview(mmap.mmap(-1, RANGE + 2 * PAGE))
        for number, start, length in ranges:
            got = await store.get(f"{prefix}bytes{number}", start=start, length=length, into=scratch_memory)
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


def _noise(size: int) -> memoryview:
    """Page-aligned bytes that nothing on the way can make smaller."""
    view = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    for start in range(0, size, 16 * MIB):
        view[start : start + 16 * MIB] = os.urandom(min(16 * MIB, size - start))
    return view


# -- folders --

SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "glusterfs", "afs", "wekafs"}
VOLATILE = {"tmpfs", "ramfs"}


@dataclass(frozen=True, slots=True)
class FileSystem:
    kind: str
    shared: bool
    findings: list[Finding]


def file_system(path: str, mountinfo: str | None = None) -> FileSystem:
    """What a folder lies on. `mountinfo`: the text of /proc/self/mountinfo."""
    text = mountinfo if mountinfo is not None else _text("/proc/self/mountinfo")
    kind, options = mount_of(os.path.realpath(path), text)
    advice = ""
    if kind in VOLATILE:
        advice = "It is memory: nothing there survives a reboot. Save to a disk; memory is what ckpt.Memory() is for"
    elif kind in ("overlay", "aufs"):
        advice = "It is the container's own layer and goes with the container: mount a volume"
    elif kind.startswith("fuse"):
        advice = "A file system in user space: ask its makers whether fsync and link keep their promises"
    elif kind in SHARED and "soft" in options:
        advice = "Mounted soft: the kernel may report an error for what it wrote, and lose it. Mount it hard"
    elif kind in SHARED:
        advice = "Shared over the network: add a tier on a local disk, or save here less often"
    verdict = ADVICE if advice else OK
    if "ro" in options:
        verdict, advice = PROBLEM, "Mounted read-only: mount it for writing"
    elif options & {"nobarrier", "barrier=0"}:
        verdict, advice = PROBLEM, "Without barriers a power cut takes what was acknowledged: mount it with them"
    shared = kind in SHARED or (kind.startswith("fuse") and kind != "fuseblk")
    return FileSystem(kind, shared, [Finding("file system", kind or "unknown", verdict, advice)])


def mount_of(path: str, mountinfo: str) -> tuple[str, set[str]]:
    """Kind and options of the file system that a path lies on."""
    best, kind, options = -1, "", set[str]()
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words, kinds = left.split(), right.split()
        if len(words) < 6 or not kinds:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), words[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # a later mount hides an earlier one
            more = kinds[2].split(",") if len(kinds) > 2 else []
            best, kind, options = len(point), kinds[0], {*words[5].split(","), *more}
    return kind, options


def _existing(path: str) -> str:
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return str(folder)


def free_bytes(path: str) -> int:
    found = os.statvfs(_existing(path))
    return found.f_bavail * found.f_frsize


def space(path: str) -> list[Finding]:
    """Free bytes and inodes."""
    found = os.statvfs(_existing(path))
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    tight = free < 0.05 * total or free < 64 * MIB
    advice = "Free some: a full disk ends saves, not training, but then nothing new is durable" if tight else ""
    rows = [Finding("free space", f"{free / GB:.1f} of {total / GB:.1f} GB", ADVICE if tight else OK, advice, free)]
    if found.f_files:
        few = found.f_favail < 10_000
        advice = "Free some: each checkpoint takes a few files for each rank" if few else ""
        rows.append(Finding("free inodes", f"{found.f_favail}", ADVICE if few else OK, advice))
    return rows


def disk(folder: str) -> list[Finding]:
    """O_DIRECT, the time of fsync, and the clock of whoever keeps the file; in a scratch folder."""
    return [direct_io(f"{folder}/direct"), fsync_time(f"{folder}/sync"), server_clock(f"{folder}/clock")]


def direct_io(path: str) -> Finding:
    memory = mmap.mmap(-1, 4 * PAGE)
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            os.pwrite(fd, memory, 0)
        finally:
            os.close(fd)
    except OSError as error:
        advice = "Writes go through the page cache, at several times the CPU, and take memory from training"
        return Finding("O_DIRECT", f"refused: {error.strerror}", ADVICE, advice)
    return Finding("O_DIRECT", "works")


def fsync_time(path: str, *, times: int = 10, most_s: float = 3.0) -> Finding:
    taken: list[float] = []
    end = time.monotonic() + most_s
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        while len(taken) < times and time.monotonic() < end:
            os.pwrite(fd, os.urandom(PAGE), len(taken) * PAGE)
            at = time.perf_counter()
            os.fsync(fd)
            taken.append(time.perf_counter() - at)
    finally:
        os.close(fd)
    median = statistics.median(taken)
    text = f"{_ms(median)}, at most {_ms(max(taken))}"
    if median > 0.1:
        return Finding("fsync", text, ADVICE, "Slow: others write to this disk, or it has no cache that survives")
    if median < 20e-6:
        return Finding("fsync", text, ADVICE, "Faster than a disk can be: memory, or a disk that does not flush")
    return Finding("fsync", text)


def server_clock(path: str) -> Finding:
    Path(path).write_bytes(b"x")
    return clock_difference(os.stat(path).st_mtime - time.time(), 1.0)


def clock_difference(seconds: float, exact_s: float) -> Finding:
    """`exact_s`: how far off a right clock may seem to be."""
    off = abs(seconds)
    text = f"{'the same' if off <= exact_s else f'{seconds:+.0f} s'} at the other end"
    if off > max(60.0, exact_s):
        advice = "Set the clocks (chrony, NTP): S3 refuses requests that are 15 minutes off, and accounts mislead"
        return Finding("clock", text, PROBLEM, advice, round(seconds, 1))
    late = off > exact_s + 2
    return Finding(
        "clock", text, ADVICE if late else OK, "Set the clocks (chrony, NTP)" if late else "", round(seconds, 1)
    )


# -- S3 --

ABORT_RULE = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}


def bare_s3(store: Any) -> Any:
    """The store beneath all wrapping if it speaks S3, else None."""
    while hasattr(store, "store"):
        store = store.store
    return store if all(hasattr(store, name) for name in ("call", "unfinished", "bucket", "engine")) else None


async def bucket(s3: Any) -> list[Finding]:
    """What S3 knows of besides objects: uploads lying about, rules, versions, how it is reached, its clock."""
    found = [engine(s3), endpoint(s3)]
    for what, check in (("clock", s3_clock), ("unfinished uploads", _uploads), ("lifecycle", _rules)):
        try:
            found += await check(s3)
        except StoreError as error:
            advice = "Not allowed to look, or not known there: ask whoever owns the bucket"
            found.append(Finding(what, str(error), ADVICE, advice))
    return found


def engine(s3: Any) -> Finding:
    if s3.engine == "obstore":
        return Finding("engine", "obstore")
    if importlib.util.find_spec("obstore") is not None:
        return Finding("engine", f"{s3.engine}, though obstore is installed: the options ask for what it cannot do")
    advice = "pip install everystep[obstore]: measured 0.3 instead of 2.1 CPU-seconds a GB written"
    return Finding("engine", f"{s3.engine}", ADVICE, advice)


def endpoint(s3: Any) -> Finding:
    url = str(getattr(getattr(getattr(s3, "_s3", None), "meta", None), "endpoint_url", "") or "")
    url = url or str(s3.options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL") or "https:")
    host = re.sub(r"^[a-z]+://|[:/].*$", "", url)
    near = host in ("localhost", "127.0.0.1", "::1")
    if url.startswith("http:") and not near:
        return Finding(
            "endpoint", "plain http", ADVICE, "Everybody on the way can read and change checkpoints: use https"
        )
    return Finding("endpoint", "https" if url.startswith("https") else "plain http, on this machine")


async def s3_clock(s3: Any) -> list[Finding]:
    at = time.time()
    answer = await s3.call("list_objects_v2", "cannot list", Prefix=s3.prefix, MaxKeys=1)
    middle = (at + time.time()) / 2
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if not date:
        return [Finding("clock", "the server does not say")]
    with contextlib.suppress(ValueError, TypeError):
        return [clock_difference(parsedate_to_datetime(date).timestamp() + 0.5 - middle, 2.0)]
    return [Finding("clock", "the server says no date that can be read")]


async def _uploads(s3: Any) -> list[Finding]:
    left = [key for key, _ in await s3.unfinished() if not key.startswith(PREFIX)]
    if not left:
        return [Finding("unfinished uploads", "none")]
    advice = "Their parts are paid for. A running job may be at them; else the next job that opens the run drops them"
    return [Finding("unfinished uploads", f"{len(left)}", ADVICE, advice, len(left))]


async def _rules(s3: Any) -> list[Finding]:
    try:
        answer = await s3.call("get_bucket_lifecycle_configuration", "cannot read the lifecycle rules")
    except NotFoundError:
        answer = {}
    versions = await s3.call("get_bucket_versioning", "cannot see whether versions are kept")
    return lifecycle(answer.get("Rules", []), s3.bucket, s3.prefix, str(versions.get("Status", "")) == "Enabled")


def lifecycle(rules: Sequence[Mapping[str, Any]], bucket: str, prefix: str, versioned: bool) -> list[Finding]:
    """What a bucket's rules do to a run under a prefix."""
    active = [rule for rule in rules if rule.get("Status") == "Enabled" and not _tagged(rule)]
    whole = [rule for rule in active if prefix.startswith(_prefix(rule))]
    touching = [rule for rule in active if _prefix(rule).startswith(prefix) or rule in whole]
    found = []
    if any("AbortIncompleteMultipartUpload" in rule for rule in whole):
        found.append(Finding("lifecycle", "unfinished uploads are aborted"))
    else:
        wanted = _rule("everystep-unfinished-uploads", prefix, ABORT_RULE)
        advice = _add(wanted, bucket, rules)
        found.append(Finding("lifecycle", "no rule aborts unfinished uploads", ADVICE, advice, wanted))
    for rule in touching:
        days = rule.get("Expiration", {}).get("Days")
        if days is not None or "Date" in rule.get("Expiration", {}):
            advice = "Checkpoints and the log would vanish: exclude this prefix; what is old goes by keep="
            when = f"after {days} days" if days is not None else "on a date"
            found.append(Finding("lifecycle", f"a rule deletes objects {when}", PROBLEM, advice))
        cold = {str(t.get("StorageClass")) for t in rule.get("Transitions", ())} & {"GLACIER", "DEEP_ARCHIVE"}
        if cold:
            advice = "From there nothing is restored within hours: exclude this prefix"
            found.append(Finding("lifecycle", f"a rule moves objects to {', '.join(sorted(cold))}", ADVICE, advice))
    if versioned and not any("NoncurrentVersionExpiration" in rule for rule in whole):
        wanted = _rule("everystep-old-versions", prefix, {"NoncurrentVersionExpiration": {"NoncurrentDays": 1}})
        text = "on: checkpoints that keep= has deleted are still stored, and paid for"
        return [*found, Finding("versioning", text, ADVICE, _add(wanted, bucket, rules), wanted)]
    return [*found, Finding("versioning", "on, and old versions go" if versioned else "off")]


def _prefix(rule: Mapping[str, Any]) -> str:
    chosen = rule.get("Filter") or rule
    return str((chosen.get("And") or chosen).get("Prefix") or "")


def _tagged(rule: Mapping[str, Any]) -> bool:
    chosen = rule.get("Filter") or {}
    return "Tag" in chosen or "Tags" in (chosen.get("And") or {})


def _rule(name: str, prefix: str, action: Mapping[str, Any]) -> dict[str, Any]:
    return {"ID": name, "Status": "Enabled", "Filter": {"Prefix": prefix}, **action}


def _add(rule: Mapping[str, Any], bucket: str, others: Sequence[Any]) -> str:
    text = json.dumps(rule)
    if others:
        return f"Add this to the {len(others)} rules that the bucket has: {text}"
    command = f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} --lifecycle-configuration"
    return f"""{command} '{{"Rules": [{text}]}}'"""


# -- the machine --


@dataclass(frozen=True, slots=True)
class Job:
    """`state` in bytes, over all ranks; `step_s` seconds a step; `world` ranks, `local` of them on this machine."""

    state: int = 0
    step_s: float | None = None
    world: int = 1
    local: int = 1

    @property
    def here(self) -> int:
        """Bytes that this machine saves, replicas cut."""
        return self.state * self.local // self.world


def machine(
    job: Job,
    *,
    proc: Path = Path("/proc"),
    sys_: Path = Path("/sys"),
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """Everything but GPUs and clocks that jump. `proc`, `sys_`: where the kernel tells."""
    found = [versions(), cpus(proc, sys_), memory(job, proc, sys_), *cgroup(proc, sys_), *limits(job)]
    found += [huge_pages(sys_), arena(), kernel(), ptrace(proc, environment), sockets(environment), clock_source(sys_)]
    return found + launcher(environment)


def versions() -> Finding:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        advice = "Fine for looking at runs; training needs torch 2.6 or newer"
        return Finding("versions", f"Python {platform.python_version()}, no torch", ADVICE, advice)
    old = tuple(int(n) for n in re.findall(r"\d+", torch)[:2]) < (2, 6)
    text = f"Python {platform.python_version()}, torch {torch}"
    return Finding("versions", text, PROBLEM if old else OK, "torch 2.6 or newer is needed" if old else "")


def cpu_count(proc: Path = Path("/proc"), sys_: Path = Path("/sys")) -> float:
    """CPUs that this process may use: its affinity, less what a cgroup takes away."""
    found = float(len(os.sched_getaffinity(0)))
    for file in cgroup_files("cpu", "cpu.max", proc, sys_):
        words = _text(file).split()
        if len(words) == 2 and words[0].isdigit():
            found = min(found, int(words[0]) / int(words[1]))
    for file in cgroup_files("cpu", "cpu.cfs_quota_us", proc, sys_):
        quota, period = _text(file).strip(), _text(file.with_name("cpu.cfs_period_us")).strip()
        if quota.isdigit() and period.isdigit():
            found = min(found, int(quota) / int(period))
    return found


def cpus(proc: Path, sys_: Path) -> Finding:
    count = cpu_count(proc, sys_)
    words = _text(proc / "loadavg").split()
    load = float(words[0]) if words else 0.0
    text = f"{count:g}, load {load:g}"
    if count < 2:
        return Finding("CPUs", text, ADVICE, "The writer takes its time from training: give each rank two")
    busy = load > 1.2 * count
    advice = "Others are at work here: what is measured now is less than there is" if busy else ""
    return Finding("CPUs", text, ADVICE if busy else OK, advice)


def memory(job: Job, proc: Path, sys_: Path) -> Finding:
    """Against the snapshots of the ranks here: three, and one that is being written for a tier."""
    room = pressure.room(proc, sys_ / "fs" / "cgroup")
    text = f"{room.available / GB:.1f} of {room.total / GB:.1f} GB available"
    text += "" if room.where == "machine" else " (a cgroup's limit)"
    if not job.state:
        return Finding("memory", text, data=room.available)
    text += f", a snapshot takes {job.here / GB:.1f} GB"
    if 3 * job.here > 0.9 * room.available:
        advice = "Too little for ckpt.Memory, which needs three or more snapshots: more nodes, or more memory"
        return Finding("memory", text, PROBLEM, advice, room.available)
    if 4 * job.here > 0.8 * room.available:
        return Finding("memory", text, ADVICE, "Tight: use ckpt.Memory(keep=2)", room.available)
    return Finding("memory", text, data=room.available)


def cgroup_files(controller: str, name: str, proc: Path, sys_: Path) -> Iterator[Path]:
    """The files of a name in the cgroups around this process, v1 and v2, the nearest first."""
    base = sys_ / "fs" / "cgroup"
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            root = base / controller
        elif number == "0" and not controllers:
            root = base / "unified" if (base / "unified").is_dir() else base
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            if (file := root.joinpath(*parts[:depth], name)).is_file():
                yield file


def cgroup(proc: Path, sys_: Path) -> list[Finding]:
    """Limits on processes, and whether the OOM killer takes all of a container at once."""
    found = []
    most = [int(n) for f in cgroup_files("pids", "pids.max", proc, sys_) if (n := _text(f).strip()).isdigit()]
    if most:
        few = min(most) < 1000
        advice = "Each rank has a writer with some threads, beside data loaders: raise pids.max" if few else ""
        found.append(Finding("cgroup pids", f"{min(most)} at most", ADVICE if few else OK, advice))
    if any(_text(f).strip() == "1" for f in cgroup_files("memory", "memory.oom.group", proc, sys_)):
        advice = "The OOM killer takes the writer along, and memory with it: set singleProcessOOMKill in the kubelet"
        found.append(Finding("cgroup oom group", "on", ADVICE, advice))
    return found


def limits(job: Job) -> list[Finding]:
    """ulimits that matter."""
    files, size, space_, core, lock = (
        resource.getrlimit(kind)[0]
        for kind in (
            resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_CORE,
            resource.RLIMIT_MEMLOCK,
        )
    )  # fmt: skip
    infinite = resource.RLIM_INFINITY
    found = [_limit("open files (ulimit -n)", files, files == infinite or files >= 1024, "Raise it: ulimit -n 65536")]
    if size != infinite:
        small = size < max(job.here, GB)
        advice = "Packs of a rank's whole share are one file: ulimit -f unlimited"
        found.append(_limit("file size (ulimit -f)", size, not small, advice))
    if space_ != infinite:
        advice = "Snapshots are mapped by trainer and writer: ulimit -v unlimited"
        found.append(_limit("address space (ulimit -v)", space_, False, advice))
    advice = "A crash writes the whole memory to a file before anything starts again: ulimit -c 0"
    found.append(_limit("core dumps (ulimit -c)", core, core == 0, advice))
    pinning = lock != infinite and Path("/dev/nvidiactl").exists()
    advice = "RDMA, and some drivers, pin memory under it: ulimit -l unlimited"
    found.append(_limit("locked memory (ulimit -l)", lock, not pinning, advice))
    return found


def _limit(what: str, value: int, fine: bool, advice: str) -> Finding:
    text = "unlimited" if value == resource.RLIM_INFINITY else str(value)
    return Finding(what, text, OK if fine else ADVICE, "" if fine else advice)


def huge_pages(sys_: Path) -> Finding:
    chosen = re.search(r"\[(\w+)\]", _text(sys_ / "kernel/mm/transparent_hugepage/shmem_enabled"))
    if chosen is None:
        return Finding("huge pages for shared memory", "not known")
    fine = chosen[1] in ("advise", "within_size", "always", "force")
    advice = (
        "Memory is made ready at a tenth of the speed: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    )
    return Finding("huge pages for shared memory", chosen[1], OK if fine else ADVICE, "" if fine else advice)


def arena(size: int = 64 * MIB) -> Finding:
    """The very thing that holds snapshots, small: sealed shared memory with a mutex that tells of deaths."""
    try:
        at = time.perf_counter()
        made = Arena.create(1, size)
        rate = size / (time.perf_counter() - at)
        made.mutex.lock()
        made.mutex.unlock()
        made.close()
    except (OSError, MemoryError, AttributeError) as error:
        return Finding("shared memory", f"cannot be made: {error}", PROBLEM, "Linux 3.17 or newer with memfd is needed")
    slow = rate < 0.5e9
    advice = "The first snapshots come late, until all memory is ready: see huge pages" if slow else ""
    return Finding("shared memory", f"made ready at {_rate(rate)}", ADVICE if slow else OK, advice)


def kernel() -> Finding:
    missing = []
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        missing.append("pidfd")
    try:
        os.close(os.eventfd(0))
    except (OSError, AttributeError):
        missing.append("eventfd")
    release = platform.release()
    if missing:
        advice = "Linux 5.3 or newer, and a seccomp filter that lets them pass"
        return Finding("kernel", f"{release}, without {', '.join(missing)}", PROBLEM, advice)
    return Finding("kernel", release)


def ptrace(proc: Path, environment: Mapping[str, str]) -> Finding:
    """Whether stacks of a hung process can be taken from outside."""
    scope = _text(proc / "sys/kernel/yama/ptrace_scope").strip() or "0"
    spy = shutil.which("py-spy", path=environment.get("PATH")) is not None
    text = f"ptrace_scope {scope}, py-spy {'is' if spy else 'not'} installed"
    if scope != "0" and os.geteuid() != 0:
        advice = "Stacks of a hang come from faulthandler alone: sysctl kernel.yama.ptrace_scope=0"
        return Finding("stacks of a hang", text, ADVICE, advice)
    if not spy:
        return Finding("stacks of a hang", text, ADVICE, "pip install py-spy, for stacks of all threads of any process")
    return Finding("stacks of a hang", text)


def sockets(environment: Mapping[str, str]) -> Finding:
    """Where trainer, writer and `ckpt trigger` meet."""
    base = environment.get("XDG_RUNTIME_DIR", "")
    try:
        folder = Path(link.socket_path("doctor")).parent
    except (UsageError, OSError) as error:
        return Finding("XDG_RUNTIME_DIR", f"{base or 'not set'}: {error}", PROBLEM, "The writer cannot be met")
    if base and not folder.is_relative_to(base):
        advice = "It cannot be written to: give all processes of the job a folder of this user, mode 700"
        return Finding("XDG_RUNTIME_DIR", f"{base} is not used, {folder} is", ADVICE, advice)
    return Finding("XDG_RUNTIME_DIR", base or f"not set, {folder} is used")


def clock_source(sys_: Path) -> Finding:
    name = _text(sys_ / "devices/system/clocksource/clocksource0/current_clocksource").strip()
    slow = name in ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
    advice = "Slow to read, often since the TSC was found unstable: look at dmesg" if slow else ""
    return Finding("clock source", name or "not known", ADVICE if slow else OK, advice)


def launcher(environment: Mapping[str, str]) -> list[Finding]:
    """torchrun, Slurm, Kubernetes: what is known to be missing."""
    found = []
    if "TORCHELASTIC_RUN_ID" in environment:
        fine = environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") not in ("", "0")
        advice = "After a restart, workers read addresses of the dead: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        found.append(Finding("launcher", "torchrun", OK if fine else ADVICE, "" if fine else advice))
    if "SLURM_JOB_ID" in environment:
        ends = "SLURM_JOB_END_TIME" in environment
        advice = "The end of the job is not known here: say on_deadline(in_s=...), or --signal=USR1@120"
        found.append(Finding("launcher", "Slurm", OK if ends else ADVICE, "" if ends else advice))
    if "KUBERNETES_SERVICE_HOST" in environment:
        advice = "terminationGracePeriodSeconds above grace_s, and the trainer or torchrun started with exec"
        found.append(Finding("launcher", "Kubernetes", ADVICE, advice))
    return found or [Finding("launcher", "none seen: not inside a job")]


class ClockWatch:
    """Whether the clock of this machine jumps while something else is done."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def finding(self) -> Finding:
        jump = time.time() - time.monotonic() - self._offset
        if abs(jump) > 0.5:
            return Finding("local clock", f"jumped by {jump:+.1f} s meanwhile", ADVICE, "Let chrony or NTP slew it")
        return Finding("local clock", "steady")


# -- GPUs --

COPY = """
import json, time, torch
rates = []
for number in range(torch.cuda.device_count()):
    size = 256 << 20
    there = torch.empty(size, dtype=torch.uint8, device=f"cuda:{number}")
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    here.copy_(there)
    torch.cuda.synchronize(number)
    at = time.perf_counter()
    for _ in range(8):
        here.copy_(there, non_blocking=True)
    torch.cuda.synchronize(number)
    rates.append(8 * size / (time.perf_counter() - at))
print(json.dumps(rates))
"""
Run = Callable[[Sequence[str], float], str | None]


def run_command(words: Sequence[str], timeout_s: float) -> str | None:
    """What a program says, None if it cannot be run, fails, or takes too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def gpus(run: Run = run_command) -> tuple[list[Finding], list[float]]:
    """Their health, and bytes a second from each to pinned host memory (none where that cannot be measured)."""
    text = run(["nvidia-smi", "-q"], 60.0)
    cards = parse_smi(text or "")
    if not cards:
        return [Finding("GPU", "no GPU here")], []
    found = [one for number, card in enumerate(cards) for one in health(number, card)]
    found += xids(run(["dmesg"], 10.0) or "")
    said = run([sys.executable, "-c", COPY], 120.0)
    rates: list[float] = []
    with contextlib.suppress(ValueError, TypeError, IndexError):
        rates = [float(rate) for rate in json.loads((said or "").strip().splitlines()[-1])]
    if not rates:
        advice = "torch cannot use the GPU: look at `python -c 'import torch; torch.cuda.init()'`"
        return [*found, Finding("GPU copy to pinned memory", "not measured", ADVICE, advice)], []
    slow = min(rates) < 10e9
    advice = "Under 10 GB/s: few PCIe lanes, or memory of another socket (numactl)" if slow else ""
    spread = ", ".join(f"{rate / GB:.1f}" for rate in rates)
    return [
        *found,
        Finding("GPU copy to pinned memory", f"{spread} GB/s", ADVICE if slow else OK, advice, rates),
    ], rates


def parse_smi(text: str) -> list[dict[str, str]]:
    """Each GPU of `nvidia-smi -q`, as values by path ("ECC Errors/Volatile/DRAM Uncorrectable")."""
    cards: list[dict[str, str]] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if re.match(r"GPU [0-9A-Fa-f]{8}:", line):
            cards.append({"Bus": line.split(None, 1)[1].strip()})
            path = []
            continue
        indent = len(line) - len(line.lstrip())
        if not cards or not line.strip() or not indent:
            continue
        name, colon, value = line.strip().partition(" : ")
        while path and path[-1][0] >= indent:
            path.pop()
        path.append((indent, name.strip()))
        if colon:
            cards[-1]["/".join(word for _, word in path)] = value.strip()
    return cards


def health(number: int, card: Mapping[str, str]) -> list[Finding]:
    """What one GPU says of itself."""
    name = f"GPU {number}"
    power = card.get("GPU Power Readings/Power Draw") or card.get("GPU Power Readings/Average Power Draw")
    power = power or card.get("Power Readings/Power Draw", "?")
    facts = [card.get("Product Name", "?"), card.get("Temperature/GPU Current Temp", "?"), power]
    found = [Finding(name, ", ".join(facts))]

    def bad(value: str, advice: str, verdict: str = PROBLEM) -> None:
        found.append(Finding(name, value, verdict, advice))

    volatile, aggregate = (
        sum(_count(value) for key, value in card.items() if key.startswith(f"ECC Errors/{kind}/") and _uncorrected(key))
        for kind in ("Volatile", "Aggregate")
    )
    if volatile:
        bad(f"{volatile} uncorrectable ECC errors since the last reset", "Drain this machine and reset the GPU")
    elif aggregate:
        bad(f"{aggregate} uncorrectable ECC errors in its life", "Watch it; replace it if there are more", ADVICE)
    if card.get("ECC Errors/Aggregate/SRAM Threshold Exceeded") == "Yes":
        bad("SRAM error threshold exceeded", "Replace this GPU")
    if card.get("Remapped Rows/Remapping Failure Occurred") == "Yes":
        bad("remapping a row failed", "Replace this GPU")
    if "Yes" in (card.get("Remapped Rows/Pending"), card.get("Retired Pages/Pending Page Blacklist")):
        bad("memory waits to be remapped or retired", "Reset the GPU before the job")
    if _count(card.get("Retired Pages/Double Bit ECC", "")):
        bad(f"{card['Retired Pages/Double Bit ECC']} pages retired", "Replace it if there are more", ADVICE)
    if card.get("GPU Recovery Action", "None") not in ("None", "N/A"):
        bad(f"asks for: {card['GPU Recovery Action']}", "Do so before the job")
    active = sorted(_throttles(card))
    if any(reason.startswith("HW") for reason in active):
        bad(f"slowed down: {', '.join(active)}", "Heat or power supply: one slow GPU slows all ranks")
    elif any("Thermal" in reason for reason in active) or _hot(card):
        bad(f"near its heat limit{': ' if active else ''}{', '.join(active)}", "Look at fans and airflow", ADVICE)
    link_ = "PCI/GPU Link Info/Link Width/"
    now, most = _count(card.get(link_ + "Current", "")), _count(card.get(link_ + "Max", ""))
    if 0 < now < most:
        bad(f"PCIe x{now} of x{most}", "Copies to the host are slow: reseat it, or look at the slot", ADVICE)
    return found


def _uncorrected(key: str) -> bool:
    return "Uncorrectable" in key or "Double Bit" in key


def _count(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _throttles(card: Mapping[str, str]) -> set[str]:
    found = set()
    for key, value in card.items():
        group, _, reason = key.partition("/")
        if group in ("Clocks Event Reasons", "Clocks Throttle Reasons") and value == "Active":
            reason = reason.rpartition("/")[2]
            if "Slowdown" in reason or "Brake" in reason:
                found.add(reason)
    return found


def _hot(card: Mapping[str, str]) -> bool:
    """Within five degrees of where it slows down."""
    left = re.match(r"-?\d+", card.get("Temperature/GPU T.Limit Temp", ""))
    if left:
        return int(left[0]) <= 5
    now, slow = (_count(card.get(f"Temperature/{name}", "")) for name in ("GPU Current Temp", "GPU Slowdown Temp"))
    return 0 < slow <= now + 5


def xids(text: str) -> list[Finding]:
    """Errors that the driver has written to the kernel's log."""
    codes = re.findall(r"NVRM: Xid \((PCI:[0-9a-fA-F:.]+)\): (\d+)", text)
    if not codes:
        return []
    said = ", ".join(f"Xid {code} ({bus})" for bus, code in sorted(set(codes)))
    grave = {code for _, code in codes} & {"48", "63", "64", "74", "79", "94", "95", "119", "120", "140"}
    advice = "See NVIDIA's list of Xid errors" + ("; drain this machine" if grave else "")
    return [Finding("GPU driver", said, PROBLEM if grave else ADVICE, advice)]


# -- between nodes --

_HELLO, _COUNT, _FRAME = struct.Struct("<8sQ"), struct.Struct("<Q"), struct.Struct("<I")
_MAGIC = b"EVDOC001"
PINGS, PING = 50, 64
MOST_SENT = 4 << 30  # whatever the other end asks for
CHUNK = MIB


@dataclass(frozen=True, slots=True)
class Link:
    """`out` and `back` in bytes a second, `round_trip_s` the median."""

    out: float
    back: float
    round_trip_s: float


class _Wire:
    """A connection that ends at a moment, whatever the other end does."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self.sock, self.end = sock, end
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(CHUNK))

    def _wait(self) -> None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end took too long")
        self.sock.settimeout(left)

    def read(self, size: int) -> bytes:
        view = self._buffer[:size]
        while view:
            self._wait()
            count = self.sock.recv_into(view)
            if not count:
                raise ConnectionError("the other end hung up")
            view = view[count:]
        return bytes(self._buffer[:size]) if size <= PAGE else b""

    def write(self, data: bytes | memoryview) -> None:
        self._wait()
        self.sock.sendall(data)

    def send_frames(self, size: int, most_s: float, on_bytes: OnBytes) -> int:
        """Noise, until it is enough or time is over; how much."""
        data, sent, end = _noise(CHUNK), 0, time.monotonic() + most_s
        while sent < size and time.monotonic() < end:
            length = min(CHUNK, size - sent)
            self.write(_FRAME.pack(length))
            self.write(data[:length])
            sent += length
            if on_bytes is not None:
                on_bytes(length)
        self.write(_FRAME.pack(0))
        return sent

    def take_frames(self, size: int, on_bytes: OnBytes) -> int:
        """Read and forget."""
        taken = 0
        while length := _FRAME.unpack(self.read(_FRAME.size))[0]:
            if length > CHUNK or taken + length > size:
                raise ConnectionError("the other end sends more than was agreed")
            self.read(length)
            taken += length
            if on_bytes is not None:
                on_bytes(length)
        return taken


def listening(host: str, port: int) -> socket.socket:
    """A socket for `serve`; port 0 takes any."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1)
    return socket.create_server(("", port), backlog=1)


def serve(
    listener: socket.socket, *, size: int = MOST_SENT, measure_s: float = 10.0, wait_s: float = 600.0,
    on_bytes: OnBytes = None,
) -> str:  # fmt: skip
    """Be the other end of one measurement, then end; who it was. What comes is counted and forgotten.

    TimeoutError if nobody comes within `wait_s`. Somebody who says something else is hung up on.
    """
    end = time.monotonic() + wait_s
    with listener:
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nobody came within {wait_s:g} s")
            listener.settimeout(left)
            sock, peer = listener.accept()
            with sock:
                wire = _Wire(sock, min(end, time.monotonic() + 5.0))
                try:
                    magic, wanted = _HELLO.unpack(wire.read(_HELLO.size))
                except OSError:
                    continue
                if magic == _MAGIC:
                    _serve_one(wire, min(wanted, size, MOST_SENT), measure_s, on_bytes)
                    return str(peer[0]).removeprefix("::ffff:")


def _serve_one(wire: _Wire, size: int, measure_s: float, on_bytes: OnBytes) -> None:
    wire.end = time.monotonic() + 3 * measure_s + 20
    wire.write(_COUNT.pack(size))
    for _ in range(PINGS):
        wire.write(wire.read(PING))
    wire.write(_COUNT.pack(wire.take_frames(size, on_bytes)))
    wire.send_frames(size, measure_s, on_bytes)


def measure_link(host: str, port: int, *, size: int, measure_s: float = 10.0, on_bytes: OnBytes = None) -> Link:
    """To a node that serves. OSError, TimeoutError among them, if it cannot be reached or breaks off."""
    with socket.create_connection((host, port), timeout=10.0) as sock:
        wire = _Wire(sock, time.monotonic() + 3 * measure_s + 20)
        wire.write(_HELLO.pack(_MAGIC, size))
        size = min(size, _COUNT.unpack(wire.read(_COUNT.size))[0])
        trips = []
        for _ in range(PINGS):
            at = time.perf_counter()
            wire.write(b"p" * PING)
            wire.read(PING)
            trips.append(time.perf_counter() - at)
        at = time.perf_counter()
        sent = wire.send_frames(size, measure_s, on_bytes)
        if _COUNT.unpack(wire.read(_COUNT.size))[0] != sent:
            raise ConnectionError("the other end has not got what was sent")
        out = sent / (time.perf_counter() - at)
        at = time.perf_counter()
        back = wire.take_frames(size, on_bytes) / (time.perf_counter() - at)
    return Link(out, back, statistics.median(trips))


def link_findings(found: Link, job: Job) -> list[Finding]:
    slow = min(found.out, found.back) < 125e6
    advice = "Less than 1 Gbit/s: name the fast interface, or look at the cable" if slow else ""
    text = f"{_rate(found.out)} there, {_rate(found.back)} back, one connection"
    late = found.round_trip_s > 2e-3
    far = "Far apart for nodes of one job" if late else ""
    rows = [
        Finding("bandwidth between nodes", text, ADVICE if slow else OK, advice),
        Finding("round trip", _ms(found.round_trip_s), ADVICE if late else OK, far),
    ]
    if job.state:
        seconds = job.here / min(found.out, found.back)
        text = f"a snapshot of {job.here / GB:.1f} GB takes {seconds:.1f} s to the other node"
        rows.append(Finding("Memory(replicas=2)", text))
    return rows


# -- what follows --


@dataclass(frozen=True, slots=True)
class Cadence:
    """How long a save and a restore take in one place, and from which interval on it costs under 1 % of training.
    `every`: in steps, None where nobody said how long one takes."""

    where: str
    save_s: float
    restore_s: float
    interval_s: float
    every: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Speed:
    """Of copies into host memory, in bytes a second; by devices of their own (GPUs), or by the CPUs."""

    copy: float
    by_device: bool
    cpus: float
    available: int


def speed(device_rates: Sequence[float], job: Job) -> Speed:
    """What copies a snapshot here."""
    room = pressure.room().available
    if device_rates:
        return Speed(sum(device_rates[: job.local]), True, cpu_count(), room)
    return Speed(copy_rate() if job.state else 0.0, False, cpu_count(), room)


def copy_rate(size: int = 128 * MIB) -> float:
    """memcpy of one thread into memory that was touched before; more than fits into caches."""
    one, two = memoryview(bytearray(size)), memoryview(bytearray(size))
    times = []
    for _ in range(3):
        at = time.perf_counter()
        two[:] = one
        times.append(time.perf_counter() - at)
    return size / statistics.median(times)


def memory_cadence(job: Job, speed: Speed) -> Cadence:
    copy_s = job.here / speed.copy
    if speed.by_device:
        interval = 2 * copy_s
        why = f"copying {job.here / GB:.1f} GB takes {copy_s:.2f} s of the copy engines, beside forward and backward"
    else:
        interval = copy_s / (COST * speed.cpus)
        why = f"copying {job.here / GB:.1f} GB takes {copy_s:.2f} CPU-s of {speed.cpus:g} CPUs that train as well"
    return Cadence("memory", copy_s, copy_s, interval, in_steps(interval, job.step_s), why)


def place_cadence(job: Job, place: Place, speed: Speed) -> Cadence:
    """A save may keep the place busy for half of the time, and all CPUs for 1 % of it."""
    rates, size = place.rates, job.state if place.shared else job.here
    save_s = size / rates.write + 4 * rates.put_s
    restore_s = size / max(rates.read, 1.0) + 4 * rates.get_s
    cpu_s = job.here * (rates.cpu_s + 0.1 / GB)  # and digests
    busy, costly = 2 * save_s, cpu_s / (COST * speed.cpus)
    what = "all nodes share it" if place.shared else "this machine's share"
    why = f"{size / GB:.1f} GB ({what}) take {save_s:.1f} s and {cpu_s:.1f} CPU-s of {speed.cpus:g} CPUs; "
    why += "the CPU decides" if costly > busy else "it may be busy for half of the time"
    interval = max(busy, costly)
    return Cadence(place.url, save_s, restore_s, interval, in_steps(interval, job.step_s), why)


def in_steps(interval_s: float, step_s: float | None) -> int | None:
    """The next of 1, 2, 5, 10, 20, … steps."""
    if step_s is None:
        return None
    steps = max(1, math.ceil(interval_s / step_s - 1e-9))
    power: int = 10 ** (len(str(steps)) - 1)
    return next(n * power for n in (1, 2, 5, 10) if n * power >= steps)


def conclude(job: Job, places: Sequence[Place], speed: Speed) -> list[Cadence]:
    """Memory first, then the places that were measured, the quickest first. Nothing where the state is not known."""
    if not job.state:
        return []
    durable = [place_cadence(job, place, speed) for place in places if place.rates.write > 0]
    return [memory_cadence(job, speed), *sorted(durable, key=lambda one: one.save_s)]


def too_full(job: Job, place: Place) -> list[Finding]:
    """Three checkpoints must fit: two that are kept, and one that is being written."""
    size = job.state if place.shared else job.here
    if place.free is None or not job.state or place.free > 3 * size:
        return []
    text = f"{place.free / GB:.1f} GB, where a checkpoint takes {size / GB:.1f}"
    return [Finding("free space", text, PROBLEM, "Room for three is needed, with keep=2: free some, or a larger disk")]


def tiers_line(job: Job, cadences: Sequence[Cadence], places: Sequence[Place], speed: Speed) -> str:
    """Ready to be pasted, without places that have problems; empty where steps have no length, or no place is left."""
    fine = {place.url for place in places if place.usable}
    memory, durable = cadences[0] if cadences else None, [one for one in cadences[1:] if one.where in fine]
    if job.step_s is None or memory is None or not durable:
        return ""
    slots = len(durable)
    keep = next((k for k in (3, 2) if (k + slots) * job.here <= 0.8 * speed.available), None)
    words = [] if keep is None else [f"ckpt.Memory(every={memory.every}, keep={keep})"]
    every = 1
    needs = {place.url for place in places if place.options}
    for number, one in enumerate(durable):
        every = max(every, one.every or 1)
        last = number == len(durable) - 1 and number > 0
        keeping = f"ckpt.Keep(last=3, every={100 * every})" if last else "2"
        options = ", storage_options=options" if one.where in needs else ""
        url = one.where.removeprefix("file://")
        words.append(f"ckpt.Tier({url!r}, every={every}, keep={keeping}{options})")
    return f"tiers=[{', '.join(words)}]"


# -- words --


def _text(file: Path | str) -> str:
    with contextlib.suppress(OSError):
        return Path(file).read_bytes().decode("utf-8", "replace")
    return ""


def _rate(rate: float) -> str:
    return f"{rate / GB:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
