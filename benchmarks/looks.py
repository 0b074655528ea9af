"""Reads and memory of the commands on a checkpoint of thousands of ranks: a task of `scale.py`.

Each command runs in a separate process. Requests to the folder are counted except those for data files, which contain
only headers here: reads of tensors are not measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckpt
import files_of_run
from ckpt.core.checkpoint import read
from ckpt.dcp import read as dcp_read
from ckpt.tools.cli import app
from ckpt.tools.maintain.audit import Audit
from ckpt_backends.local import LocalStore

Json = dict[str, Any]
ONE = "model.layers.0.attention_norm.weight"


@dataclass
class Counted:
    """Requests to folders except those for data files, and their bytes."""

    requests: int = 0
    nbytes: int = 0
    manifests: int = 0


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    found, get, head = Counted(), LocalStore.get, LocalStore.head

    async def counted(store: LocalStore, key: str, **options: Any) -> Any:
        data = await get(store, key, **options)
        kind = files_of_run.kind_of(key)
        if kind != files_of_run.DATA:
            found.requests, found.nbytes = found.requests + 1, found.nbytes + len(data)
            found.manifests += kind == files_of_run.MANIFEST
        return data

    async def asked(store: LocalStore, key: str) -> Any:
        found.requests += 1
        return await head(store, key)

    LocalStore.get, LocalStore.head = counted, asked  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        LocalStore.get, LocalStore.head = get, head  # type: ignore[method-assign]


def command(*words: str) -> Callable[[str], None]:
    """Return a call of a command. Output and exit code are ignored, since checkpoints without tensors are invalid."""

    def call(url: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            app.main([word.replace("RUN", url) for word in words])

    return call


def one_tensor(url: str) -> None:
    """Export one tensor as `ckpt export --only NAME` does, without its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        command("restore", "RUN", "--only", ONE, "--to", f"{folder}/one.safetensors")(url)


def through_dcp(url: str) -> None:
    """Measure the reads of a rank before its plan, and for one tensor."""
    found = asyncio.run(dcp_read.find([url], None))
    dcp_read.metadata_of(found.saved)
    found.saved.narrowed({found.key(ONE): [((0,), found.saved.tensors[found.key(ONE)].spec.shape)]})


def loaded(url: str) -> None:
    """Call `ckpt.load` for one tensor, whose bytes do not exist."""
    with contextlib.suppress(ckpt.errors.CorruptError):
        ckpt.load(url)[ONE]


def repaired(url: str) -> None:
    """Read everything that `ckpt repair` reads except data files."""

    async def look() -> None:
        log = await read.open_run(url)
        await Audit(log).look()
        await log.store.aclose()

    asyncio.run(look())


LOOKS: dict[str, Callable[[str], None]] = {
    "show": command("show", "RUN", "--json"),
    f"show --only {ONE}": command("show", "RUN", "--json", "--only", ONE),
    "show --all": command("show", "RUN", "--json", "--all"),
    "verify --no-data": command("verify", "RUN", "--no-data"),
    "diff A A": command("diff", "RUN", "RUN"),
    f"restore --only {ONE}": one_tensor,
    f"ckpt.load, {ONE}": loaded,
    f"ckpt.dcp, {ONE}": through_dcp,
    "repair, all but data files": repaired,
}


def look(root: Path, what: str) -> Json:
    began, cpu = time.perf_counter(), time.process_time()
    with counting() as counted:
        LOOKS[what](str(root))
    return {
        "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "requests": counted.requests,
        "read_mb": counted.nbytes / 1e6, "manifests": counted.manifests,
    }  # fmt: skip


def measure(task: Callable[..., Json], root: Path) -> dict[str, Json]:
    return {what: task("look", root=str(root), what=what) for what in LOOKS}


def rows(found: dict[str, dict[str, Json]]) -> list[list[str]]:
    return [
        [f"{size} ranks: {what}", f"{one['cpu_s']:.1f} s", f"{one['peak_mb']:.0f} MB", str(one["requests"]),
         f"{one['read_mb']:.1f} MB", str(one["manifests"])]
        for size, looks in found.items()
        for what, one in looks.items()
    ]  # fmt: skip
