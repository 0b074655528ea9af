"""Forged runs: every digest is right, but the contents are malicious.

The newest of two genuine checkpoints is forged: manifest, table, index and log record are made again, including
digests. In another run, which two ranks saved, the manifest of the second rank is forged.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import ckpt
import inside
from ckpt.errors import CheckpointError, CorruptError, MismatchError, NoCheckpointError, StoreError
from inside import Job, saved_objects

Objects = dict[str, bytes]
Run = tuple[Objects, Any]  # its files, and the name that all files of its newest checkpoint have in theirs
Json = Any
Change = Callable[[Json], object]


# -- a genuine run --


def state(step: int) -> dict[str, Any]:
    """A little of everything that a state can hold."""
    torch.manual_seed(step)
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optim.step()
    meta = {
        "lr": step / 4,
        "pair": (1, 2),
        "x": torch.arange(6) + step,
        "a": np.arange(4.0) * step,
        "s": np.float32(step),
    }
    return {"model": model, "optim": optim, "meta": meta, "rng": ckpt.RNG()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = [(one["model"].weight, other["model"].weight), (one["meta"]["x"], other["meta"]["x"])]
    whole = all(torch.equal(a, b) for a, b in pairs) and np.array_equal(one["meta"]["a"], other["meta"]["a"])
    return whole and all(one["meta"][key] == other["meta"][key] for key in ("lr", "pair", "s"))


def built(ranks: int, of: Callable[[int], dict[str, Any]] = state) -> Run:
    return asyncio.run(saved_objects([(step, of(step)) for step in (10, 20)], ranks))


@pytest.fixture(scope="module")
def genuine() -> Run:
    """The files of a run with steps 10 and 20, of which step 20 is to be forged."""
    return built(1)


@pytest.fixture(scope="module")
def of_two() -> Run:
    """The same, saved by two ranks, each of them some of every tensor."""
    return built(2)


def put(objects: Objects, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    for key, raw in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return folder


# -- what is looked at --

_opened: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event in ("open", "os.remove", "os.rename", "os.link", "os.mkdir", "os.rmdir"):
        _opened.extend(str(a) for a in arguments[:2] if isinstance(a, str | bytes | os.PathLike))


sys.addaudithook(_audit)


@contextlib.contextmanager
def confined(root: Path) -> Iterator[None]:
    """Check that nothing outside the run is opened, created or removed during this context, in its siblings or in
    /etc."""
    global _opened
    _opened = []
    try:
        yield
        here = [os.path.normpath(p) for p in _opened]
    finally:
        _opened = None
    near = str(root.parent)
    beside = [
        p
        for p in here
        if (p.startswith(f"{near}/") and not (p + "/").startswith(f"{root}/")) or p.startswith("/etc/pass")
    ]
    assert beside == []


def restore_from(source: Any, live: dict[str, Any]) -> None:
    """Restore as `Checkpointer.restore` does. Raise CorruptError where it would try another source."""
    result = inside.restore_first_of([source], live)
    if result.step is None:
        raise CorruptError(result.skipped[0].reason)


def sources(folder: Path) -> list[Any]:
    return inside.sources_in(f"file://{folder}")


def restored(folder: Path, *, exact: bool = False) -> int:
    """Restore the newest usable checkpoint as `Checkpointer.restore` does. Return its step after checking the state.

    `exact`: also check the state if the newest checkpoint was used, whose values are not forged.
    """
    live = state(1)
    with confined(folder):
        problems = []
        for source in sources(folder):
            try:
                restore_from(source, live)
            except (CorruptError, StoreError, MismatchError) as error:
                problems.append(str(error))
                continue
            assert source.checkpoint.step != 10 or same(live, state(10))
            assert not exact or same(live, state(source.checkpoint.step))
            return source.checkpoint.step
        raise NoCheckpointError(f"nothing could be restored: {problems}")


def loaded(folder: Path) -> None:
    """Everything that `ckpt.load` can be asked for."""
    with confined(folder):
        found = ckpt.load(folder)
        found.all()
        for path in ("model", "optim", "meta", "rng"):
            with contextlib.suppress(KeyError):
                found.plain(path)


async def taken_over(folder: Path) -> set[str]:
    """Do what a writer does with a run: own it, recover it, verify, save, clean up. Return the deleted files."""
    store = inside.open_folder(f"file://{folder}")
    before = {info.key async for info in store.list()}
    try:
        job = await Job.open(store)
        await job.verify()
        await job.save(10**6, inside.NOTHING, b"", [])
        assert job.steps[0] == 10**6
        await job.clean_up(last=1)
        return before - {info.key async for info in store.list()}
    finally:
        await store.aclose()


def survives(folder: Path, *, restore: bool = True) -> None:
    """Check that all readers of a run get its contents, or an error of ours. `restore`: restores too."""
    for act in (*([restored] if restore else []), loaded, lambda f: inside.run(taken_over(f))):
        with contextlib.suppress(CheckpointError):
            act(folder)  # type: ignore[operator]


def verified(folder: Path) -> list[str]:
    """The problems that `verify` finds in the newest checkpoint."""
    return inside.problems_of_newest(f"file://{folder}")


def some_value(value: Json) -> Change:
    """In place of the plain value `meta.lr`."""

    def change(document: Json) -> None:
        at = [c["path"] for c in document["layout"]["components"]].index(["meta"])
        assert document["values"][at]["v"][0][0] == "lr"
        document["values"][at]["v"][0][1] = value

    return change


# -- a corpus of mutations --

ATOMS = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 1.5, -0.0, "", "x", "../x", "/etc/passwd", "\ud800", "\n",
        "0" * 64, [], {}, [[]], {"$": "tensor", "name": "meta.x"}, {"$": []}, "1.00000000-20",
        {"$": "ndarray", "name": "meta.a", "dtype": "O", "shape": [1]}, {"$": "scalar", "dtype": "(1,2", "v": ""},
    ]
)  # fmt: skip


def places(document: Json, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document, containers too."""
    found = [prefix] if prefix else []
    items = document.items() if type(document) is dict else enumerate(document) if type(document) is list else ()
    for key, value in items:
        found += places(value, (*prefix, key))
    return found


def mutate(draw: Callable[[Any], Any], document: Json) -> None:
    for _ in range(draw(st.integers(1, 3))):
        found = places(document)
        if not found:
            return
        *way, last = draw(st.sampled_from(found))
        parent = document
        for key in way:
            parent = parent[key]
        action = draw(st.sampled_from(["replace", "replace", "delete", "copy", "swap"]))
        if action == "replace":
            parent[last] = copy.deepcopy(draw(ATOMS))
        elif action == "delete":
            del parent[last]
        elif action == "copy" and type(parent) is list:
            parent.append(copy.deepcopy(parent[last]))
        elif action == "swap":
            others = list(parent) if type(parent) is dict else range(len(parent))
            other = draw(st.sampled_from(list(others)))
            parent[last], parent[other] = parent[other], parent[last]


def corpus(count: int) -> settings:
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, deadline=None, suppress_health_check=quiet)
