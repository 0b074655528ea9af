"""Check before a long job whether locations keep their guarantees, how fast they are, and what the machine allows.

Each check is a small function that returns findings. All files that doctor writes have special names
(`.ckpt-doctor-…` in folders, `doctor-…/` elsewhere) and are always removed. A location with files of other programs is
not written to. Every check has a timeout, and every measurement a limit in bytes.

`ckpt.tools.doctor.promises` has tests for every kind of store, and `folder` and `s3` those for one kind; `machine`
checks the machine, and `advice` computes the recommendation. Rates are those of one process at the time of the check.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path

from ckpt.core.checkpoint.commits import PREFIX
from ckpt.core.log.run_log import RunLog
from ckpt.errors import AccessError, CheckpointError, CorruptError, FormatError, NoCheckpointError
from ckpt.store import Store, exists, folder_of, normalise, open_store, options_of, url_of
from ckpt.tools.doctor.findings import PROBLEM, Finding, OnBytes, TierFindings, cleaner, judge, worst
from ckpt.tools.doctor.folder import disk, file_system, nearest_folder, space
from ckpt.tools.doctor.promises import Bounds, bandwidth, consistency, create_if_absent, permissions
from ckpt.tools.doctor.s3 import bare_s3, bucket
from ckpt.units import count_of

FOLDER = ".ckpt-doctor-"
LEFT_S = 3600  # seconds after which a scratch name is considered left by a killed doctor
RETRY_S, CLEAN_S = 5.0, 30.0


# -- check a location --


async def examine(url: str, bounds: Bounds, *, on_bytes: OnBytes = None) -> TierFindings:
    """Run all checks of one location. Problems become findings; no exception is raised."""
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
        store.budget_s = RETRY_S  # a shorter time for retries than usual, because a person waits
    try:
        await _examine(store, place, bounds, on_bytes)
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(store.aclose(), RETRY_S)
    place.findings = [replace(f, value=cleaned(f.value), advice=cleaned(f.advice)) for f in place.findings]
    return place


async def _examine(store: Store, place: TierFindings, bounds: Bounds, on_bytes: OnBytes) -> None:
    add = place.findings.extend
    found = await bounded("run", inspect(store), bounds)
    add(found)
    if found[0].what == "reach":
        place.reached = False
        return
    folder = folder_of(store.url)
    root = None if folder is None else str(folder)
    if root is not None:
        lies_on, room = file_system(root), space(root)
        place.shared, place.free = lies_on.shared, room[0].data
        add([lies_on.finding, *room])
    if found[0].data == "foreign":
        return
    writable = await _probe(store, root, place, bounds, on_bytes)
    if (s3 := bare_s3(store)) is not None:
        add(await bounded("bucket", bucket(s3), bounds))
    elif root is None and writable:
        add([Finding("clock", "this kind of store has no clock to compare")])


async def _probe(store: Store, root: str | None, place: TierFindings, bounds: Bounds, on_bytes: OnBytes) -> bool:
    """Run the checks that write. Return True if writing is allowed."""
    add, rates = place.findings.extend, place.rates
    try:
        async with scratch(store, root, place.findings) as (inner, prefix):
            allowed = await bounded("permissions", permissions(inner, prefix), bounds)
            add(allowed)
            if worst(allowed) == PROBLEM:
                return False
            add(await bounded("create-if-absent", create_if_absent(inner, prefix), bounds))
            add(await bounded("consistency", consistency(inner, prefix, rates), bounds))
            if root is not None:
                folder = folder_of(inner.url)
                add(await bounded("disk", asyncio.to_thread(disk, str(folder)), bounds))
            size = bounds.size if place.free is None else min(bounds.size, place.free // 10)
            less = replace(bounds, size=size, check_s=bounds.check_s + 3 * bounds.measure_s)
            add(await bounded("bandwidth", bandwidth(inner, prefix, less, rates, on_bytes), less))
            return True
    except (CheckpointError, OSError) as error:
        add([Finding("write", str(error), PROBLEM, "Allow writing there: otherwise nothing can be saved to it")])
        return False


async def bounded(what: str, check: Awaitable[list[Finding]], bounds: Bounds) -> list[Finding]:
    """Run a check with a timeout. An error becomes a finding, named "reach" if the location cannot be reached."""
    try:
        async with asyncio.timeout(bounds.check_s):
            return await check
    except TimeoutError:
        name = "reach" if what == "run" else what
        return [Finding(name, f"no response within {bounds.check_s:g} s", PROBLEM, "Check the network and the server")]
    except (CheckpointError, OSError) as error:
        if what == "run" and not isinstance(error, (FormatError, NoCheckpointError, CorruptError)):
            advice = "" if isinstance(error, AccessError) else "Check URL, endpoint and network; nothing was written"
            return [Finding("reach", str(error), PROBLEM, advice)]
        return [Finding(what, str(error), PROBLEM, "Do not save there before this works")]


@contextlib.asynccontextmanager
async def scratch(store: Store, root: str | None, findings: list[Finding]) -> AsyncIterator[tuple[Store, str]]:
    """Yield a store and a prefix for scratch objects. Remove these at the end; if that fails, add a finding."""
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
            findings.append(
                Finding("scratch", f"could not remove {prefix}: {error}", PROBLEM, f"Delete {prefix} by hand")
            )


@contextlib.asynccontextmanager
async def _scratch_folder(root: Path, name: str, findings: list[Finding]) -> AsyncIterator[Store]:
    """Use a scratch folder inside `root`, or in its nearest existing parent."""
    root = nearest_folder(root)
    for left in root.glob(f"{FOLDER}*"):
        if _is_old(left.name.removeprefix(FOLDER)) and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    folder = root / name
    inner: Store | None = None
    try:
        inner = open_store(url_of(folder), writable=True)
        yield inner
    finally:
        if inner is not None:
            await inner.aclose()
        for _ in range(100):  # retry, because a thread may still be finishing a write
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            await asyncio.sleep(0.05)
        else:
            findings.append(Finding("scratch", f"could not remove {folder}", PROBLEM, "Delete it by hand"))


def _is_old(name: str) -> bool:
    when = name.partition("-")[0]
    return when.isdigit() and len(when) < 12 and time.time() - int(when) > LEFT_S


async def remove(store: Store, prefix: str) -> None:
    """Delete every object and unfinished upload under a scratch prefix."""
    assert prefix.startswith(PREFIX) and prefix.endswith("/")
    try:
        await store.drop_uploads(lambda key: not key.startswith(prefix))
    finally:
        await store.delete_many([info.key async for info in store.list(prefix)])


# -- existing contents --


async def inspect(store: Store) -> list[Finding]:
    """Check whether the location has a run, files of other programs, or nothing. Remove a killed doctor's leftovers."""
    log = RunLog(store)
    try:
        await log.open()
    except (FormatError, NoCheckpointError) as error:
        return await _no_run(store, str(error))
    state = log.state
    history = state.lineage()
    newest = history[0].step if history else None
    newest_text = "no checkpoint yet" if newest is None else f"newest step {newest}"
    text = f"a run: {newest_text}, {count_of(len(state.commits), 'checkpoint')}, current term {state.term}"
    data = {"newest": newest, "term": state.term, "damaged": state.damaged}
    if state.damaged:
        text += f"; damaged records: {', '.join(map(str, state.damaged[:10]))}"
    advice = "See `ckpt verify --all`. The run can continue, but nothing is deleted there: better use a new location"
    return [judge("run", text, bool(state.damaged), advice, data, verdict=PROBLEM)]


async def _no_run(store: Store, why: str) -> list[Finding]:
    left: set[str] = set()
    async for info in store.list():
        folder = info.key.partition("/")[0]
        if folder.startswith(PREFIX) and _is_old(folder.removeprefix(PREFIX)):
            left.add(folder + "/")
        elif re.fullmatch(PREFIX + r"[0-9]+-[0-9a-f]{8}", folder):
            continue  # another doctor is running
        elif await exists(store, "FORMAT.json"):
            return [Finding("run", why, PROBLEM, "Use the version that wrote it, or another location", "foreign")]
        else:
            advice = "Choose a separate location for each run. Nothing was written there"
            return [Finding("run", f"it contains files of another program: {info.key}", PROBLEM, advice, "foreign")]
    for prefix in left:
        await remove(store, prefix)
    return [Finding("run", "none yet, it is empty")]
