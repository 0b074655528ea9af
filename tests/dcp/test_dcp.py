"""torch's dcp.save, async_save and load with `ckpt.dcp`: bit-exact resharding, one history, no code execution.

Rank processes run `main()` of this file with a list of actions, see `ranks`.
"""

from __future__ import annotations

import datetime
import io
import json
import logging
import os
import pickle
import shutil
import sys
import threading
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckpt
import ckpt.dcp
from ckpt import failpoints
from ckpt.core.checkpoint import read
from ckpt.core.log.run_log import RunLog
from ckpt.dcp import coordinator, in_flight, incarnation, objects, rank_write
from ckpt.dcp import read as dcp_source
from ckpt.store import open_store
from ckpt.tools.cli.app import cli
from commands import flip
from inside import trust_tensor_data
from parallel import build, free_port, gathered, launch, train_step
from processes import REPO, run_script
from run_files import data_files, indexes, manifests
from s3_server import MotoServer, storage_options

pytestmark = pytest.mark.filterwarnings("ignore")
MODES = {"fsdp": "thread", "hsdp": "sync", "tp": "sync", "fsdp_tp": "sync"}  # how each parallel mode is saved


@pytest.fixture(autouse=True)
def first_job() -> Iterator[None]:
    another_job()
    yield
    another_job()


MEMORIES: Any = (incarnation._incarnations, incarnation._owners, incarnation._known, in_flight._claims)


def another_job() -> None:
    """Make `ckpt.dcp` treat this process as another job from now on."""
    for memory in MEMORIES:
        memory.clear()


def save_by_another_job(step: int, places: Any) -> None:
    """Save as another job, then restore the state of this one."""
    before = [dict(memory) for memory in MEMORIES]
    another_job()
    save({"n": step}, step, places)
    another_job()
    for memory, content in zip(MEMORIES, before, strict=True):
        memory.update(content)


def save(state: dict[str, Any], step: int, places: Any, **kwargs: Any) -> None:
    writer = places if isinstance(places, ckpt.dcp.StorageWriter) else ckpt.dcp.StorageWriter(places)
    dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, **kwargs)


def load(state: dict[str, Any], places: Any, step: int | None = None, **kwargs: Any) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=step, storage_reader=ckpt.dcp.StorageReader(places, **kwargs))
    return state


def refused(call: Callable[[], object]) -> BaseException:
    """Return the error of rank 0."""
    with pytest.raises(CheckpointException) as caught:
        call()
    return caught.value.failures[0][0]


def records(url: str) -> RunLog:
    async def load_log() -> RunLog:
        log = await read.open_run(url)
        await log.store.aclose()
        return log

    return read.run(load_log())


def history(url: str) -> list[int]:
    return [commit.step for commit in records(url).state.lineage()]


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy())


def same(a: Any, b: Any) -> bool:
    """Return True if the dtype, the shape and every bit are equal."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    return type(a) is type(b) and bool(a == b)


# -- one process --


def every_kind() -> dict[str, Any]:
    dtypes = [dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)]
    known = [dtype for dtype in dict.fromkeys(dtypes) if dtype in rank_write.DTYPE_NAME]
    state: dict[str, Any] = {}
    for dtype in known:
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        state[str(dtype)] = raw.view(dtype)
    base = torch.randn(6, 8)
    return state | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "transposed": base.t(),
        "strided": base[1:5:2, ::3],
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "large": torch.randn(3_000_001),  # several chunks and writes, a multiple of neither size
        "nested": {"list": [1, 2.5, "x", None, torch.arange(3)], "deep": {"tuple": (1, (2,)), "flag": True}},
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


def emptied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return torch.zeros(state.shape, dtype=torch.uint8 if "float4" in str(state.dtype) else state.dtype).view(
            state.dtype
        )
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    return [emptied(value) for value in state] if isinstance(state, list) else 0


def flat(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, (dict, list)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from flat(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, state


def test_every_dtype_and_form_comes_back_bit_for_bit(run_dir: str) -> None:
    state = every_kind()
    save(state, 5, run_dir)
    found = dict(flat(load(emptied(state), run_dir)))
    assert [name for name, value in flat(state) if not same(value, found[name])] == []
    whole = ckpt.load(run_dir)
    assert [n for n, v in flat(state) if isinstance(v, Tensor) and not same(v.detach(), whole[n])] == []
    there = f"{run_dir}-2"
    for args in (["ls"], ["verify"], ["show"], ["copy", there, "--yes"], ["diff", there], ["prune", "--keep-last=2"]):
        done = CliRunner().invoke(cli, [args[0], run_dir, *args[1:]])
        assert done.exit_code == 0, done.output
    assert same(ckpt.load(there)["scalar"], torch.tensor(2.5))


def test_negative_control_one_bit_is_seen() -> None:
    """The comparison above detects a difference in one bit, in dtype or only in shape."""
    a = torch.zeros(3)
    b = a.clone()
    b.view(torch.uint8)[5] ^= 1
    assert same(a, a.clone()) and not same(a, b) and not same(a, a.int()) and not same(a, a[None])


def test_converter_restores_names_and_nesting_from_metadata(run_dir: str) -> None:
    """The metadata is complete: torch's converter starts with an empty state and restores all names and nesting."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {"model": {"w": torch.randn(3, 2)}, "step": 7, "list": [torch.ones(2), {"x": "y"}]}
    save(state, 1, run_dir)
    found: dict[str, Any] = {}
    _load_state_dict(found, ckpt.dcp.StorageReader(run_dir), no_dist=True, planner=_EmptyStateDictLoadPlanner())
    assert same(found["model"]["w"], state["model"]["w"]) and found["step"] == 7 and found["list"][1] == {"x": "y"}


class BytesPath(os.PathLike[bytes]):
    def __fspath__(self) -> bytes:
        return b"step-5"


def test_step_is_parsed_from_the_end_of_the_id(run_dir: str) -> None:
    """A checkpoint id is a name, a path, a number or step=. Any other id is rejected before anything is written."""
    good = (
        Path("out/step-500"),
        "s3://b/x/step-500/",
        "iter_0000500",
        np.int64(500),
        "2024-11-21/step-500",
        "exp1-500",
    )
    for given in ("step-500", "500", 500, *good):
        assert ckpt.dcp.step_of(given) == 500 and ckpt.dcp.StorageWriter.validate_checkpoint_id(given)
    odd = ("1" + "0" * 25, "step-1e6", "step-1e-6", "step-1.5", "out/-5", "2024-11-21", "step-500.0", b"5", BytesPath())
    for wrong in ("latest", "", -1, True, 1.5, "step-5-final", 10**18, "9" * 30, *odd):
        with pytest.raises(ckpt.errors.UsageError, match="has no step"):
            ckpt.dcp.step_of(wrong)
        assert not ckpt.dcp.StorageReader.validate_checkpoint_id(wrong)
    error = refused(lambda: dcp.save({"w": torch.ones(1)}, storage_writer=ckpt.dcp.StorageWriter(run_dir)))
    assert isinstance(error, ckpt.errors.UsageError) and "the step is missing" in str(error)
    assert not Path(run_dir).exists() and ckpt.dcp.latest(run_dir) is None
    dcp.save({"w": torch.ones(1)}, storage_writer=ckpt.dcp.StorageWriter(run_dir, step=8))
    assert history(run_dir) == [8] and ckpt.dcp.latest(run_dir) == 8


def test_save_rejects_unsupported_tensors_and_names(run_dir: str) -> None:
    """Tensors without values, invalid file names and dtypes that cannot be loaded are rejected."""
    error = refused(lambda: save({"w": torch.empty(2, device="meta")}, 4, run_dir))
    assert isinstance(error, ckpt.errors.StateError) and "meta device" in str(error)
    for name in ("__metadata__", "a\ud800"):
        error = refused(lambda name=name: save({name: torch.ones(2)}, 4, run_dir))
        assert isinstance(error, ckpt.errors.StateError) and ascii(name) in str(error)
    save({"w": torch.ones(2)}, 4, run_dir)
    odd = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
    assert isinstance(refused(lambda: load({"w": odd}, run_dir)), ckpt.errors.MismatchError)


def test_missing_or_mismatched_data_raises_clear_errors(run_dir: str, tmp_path: Path) -> None:
    """The step or the run is missing, the folder belongs to others, or a name or shape does not match."""
    save({"w": torch.ones(2)}, 3, run_dir)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for call, text in (
        (lambda: load({"w": torch.ones(2)}, run_dir, 4), "does not have step 4 .available steps: 3"),
        (lambda: load({"w": torch.ones(2)}, tmp_path / "none"), "no run at"),
        (lambda: load({"w": torch.ones(2)}, tmp_path / "other"), "no run at"),
        (lambda: load({"v": torch.ones(2)}, run_dir), "Missing key in checkpoint state_dict: v"),
        (lambda: load({"w": torch.ones(5)}, run_dir), "Size mismatch"),
        (lambda: save({"w": torch.ones(2)}, 3, tmp_path / "other"), "not empty and not a run"),
    ):
        with pytest.raises(CheckpointException, match=text):
            call()
    for places in (ckpt.Memory(), [run_dir, ckpt.Memory()], [], [run_dir, run_dir], 5):
        with pytest.raises(ValueError):
            ckpt.dcp.StorageWriter(places)  # type: ignore[arg-type]
    error = refused(lambda: save({"w": torch.sparse_coo_tensor(size=(2, 2))}, 4, run_dir))
    assert isinstance(error, ckpt.errors.StateError) and "w: this tensor" in str(error)
    save({"w": torch.ones(2)}, 4, run_dir)
    assert history(run_dir) == [4, 3]


def test_dcp_loads_weights_saved_by_a_checkpointer(run_dir: str) -> None:
    net = torch.nn.Linear(3, 2)
    with ckpt.Checkpointer({"model": net}, run_dir) as cp:
        cp.restore(default=0)
        cp.save(5).wait_durable()
    assert same(load({"model": {"weight": torch.zeros(2, 3)}}, run_dir)["model"]["weight"], net.weight.detach())


# -- one history --


def test_resume_keeps_history_and_rollback_drops_newer_steps(run_dir: str) -> None:
    """As with a Checkpointer, the next save after a load removes the newer steps from the history. A load with
    resume=False does not affect the history."""
    state = {"w": torch.zeros(3), "n": 0}
    tier = ckpt.Tier(run_dir, every=1, keep=20)
    for step in (1, 2, 3):
        save(state | {"n": step}, step, tier)
    another_job()
    assert load(state, tier)["n"] == 3
    assert load(emptied(state), tier, 1, resume=False)["n"] == 1
    save(state, 4, tier)
    assert history(run_dir) == [4, 3, 2, 1]
    load(state, tier, 2)
    assert history(run_dir) == [4, 3, 2, 1]  # loading alone changes nothing
    save(state | {"n": 33}, 3, tier)
    assert history(run_dir) == [3, 2, 1] and load(state, tier)["n"] == 33
    assert load(state, tier, 4)["n"] == 3  # it can still be loaded by its number


def test_save_rejects_steps_that_do_not_increase(run_dir: str) -> None:
    """Saving the same step again or an older one raises a clear error and changes nothing. A plain folder keeps all
    checkpoints, like torch's own writer. A Tier applies its retention, see below."""
    state, writer = {"w": torch.zeros(3)}, ckpt.dcp.StorageWriter(run_dir)
    for step in (1, 2, 3, 5):
        save(state, step, writer)
    for step, text in ((5, "has already saved"), (4, "steps must increase")):
        assert text in str(refused(lambda step=step: save(state, step, writer)))
    save(state, 6, writer)
    assert history(run_dir) == [6, 5, 3, 2, 1]


def test_newer_job_fences_an_older_job(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if each save creates a new writer. Negative control: without the check, the save succeeds."""
    state = {"w": torch.zeros(3)}
    save(state, 1, run_dir)
    older = dict(incarnation._incarnations), dict(incarnation._owners)
    another_job()
    load(state, run_dir)
    save(state, 2, run_dir)
    for keep_owner in (True, False):
        another_job()
        incarnation._incarnations.update(older[0])
        incarnation._owners.update(older[1] if keep_owner else {})
        assert isinstance(refused(lambda: save(state, 3, run_dir)), ckpt.errors.FencedError)
    assert history(run_dir) == [2, 1]
    monkeypatch.setattr(RunLog, "check_owner", lambda self, owner: None)
    save(state, 3, run_dir)
    assert 3 in {checkpoint.step for checkpoint in records(run_dir).state.commits}


def test_pickled_writer_keeps_its_job_until_a_load(run_dir: str) -> None:
    """As with mp.spawn, a new process continues from the step it loads. Without a load it shares the parent's job."""
    state, tier = {"w": torch.zeros(3)}, ckpt.Tier(run_dir, every=1, keep=20)
    writer = ckpt.dcp.StorageWriter(tier)
    for step in (1, 2, 3):
        save(state, step, writer)
    raw = pickle.dumps(writer)
    another_job()
    writer = pickle.loads(raw)
    save(state, 4, writer)
    assert len(records(run_dir).state.acquires) == 1
    load(state, tier, 2)
    save(state, 3, writer)
    assert history(run_dir) == [3, 2, 1] and len(records(run_dir).state.acquires) == 2


@pytest.mark.parametrize("then", ["put back", "loaded", "deleted"])
def test_save_raises_if_another_run_lies_at_its_path(then: str, run_dir: str) -> None:
    """Nothing is written there. Saves work again when the run is back, the other run is loaded or the path is empty."""
    folder, aside = Path(run_dir), Path(f"{run_dir}-aside")
    save({"n": 1}, 1, run_dir)
    folder.rename(aside)
    save_by_another_job(100, run_dir)
    before = sorted(folder.rglob("*"))
    for step in (2, 3):
        assert isinstance(refused(lambda step=step: save({"n": step}, step, run_dir)), ckpt.errors.RunGoneError)
    assert sorted(folder.rglob("*")) == before
    if then == "loaded":
        assert load({"n": 0}, run_dir)["n"] == 100
    else:
        shutil.rmtree(folder)
    if then == "put back":
        aside.rename(folder)
    save({"n": 101}, 101, run_dir)
    assert history(run_dir) == {"put back": [101, 1], "loaded": [101, 100], "deleted": [101]}[then]


@pytest.mark.parametrize("replaced", [False, True])
def test_save_leaves_no_files_if_its_run_is_deleted(
    replaced: bool, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier is emptied while a rank writes, and another job may start a run there. Both jobs can save afterwards."""
    real, before = rank_write.write, list[str]()

    async def names() -> list[str]:
        store = open_store(run_dir)
        try:
            return [info.key async for info in store.list()]
        finally:
            await store.aclose()

    async def gone(store: Any, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(rank_write, "write", real)
        await store.delete_many(await names())
        if replaced:
            save_by_another_job(100, run_dir)
            before.extend(await names())
        return await real(store, *args, **kwargs)

    save({"n": 1}, 1, run_dir)
    monkeypatch.setattr(rank_write, "write", gone)
    assert isinstance(refused(lambda: save({"n": 2}, 2, run_dir)), ckpt.errors.SaveError)
    assert read.run(names()) == before
    if replaced:
        another_job()
    save({"n": 101}, 101, run_dir)
    assert history(run_dir) == ([101, 100] if replaced else [101])


# -- background saves --


class Slow(DefaultSavePlanner):
    """A planner whose save blocks until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.begun.set()
        assert self.go.wait(60)
        return super().resolve_data(write_item)


def begin_save(step: int, writer: Any) -> tuple[Any, Slow]:
    saving = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=step, storage_writer=writer, planner=(slow := Slow()))
    assert slow.begun.wait(60)
    return saving, slow


def test_save_is_rejected_while_another_is_pending(run_dir: str) -> None:
    """With one writer or two, the older save completes and the next one succeeds. Other folders are unaffected."""
    writer = ckpt.dcp.StorageWriter(run_dir)
    saving, slow = begin_save(1, writer)
    for step, other in ((2, writer), (3, ckpt.dcp.StorageWriter(run_dir))):
        later = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=step, storage_writer=other)
        error = refused(later.result)
        assert isinstance(error, ckpt.errors.SaveError) and "step 1 is still being saved" in str(error)
    save({"w": torch.ones(3)}, 2, f"{run_dir}-2")
    slow.go.set()
    saving.result()
    save({"w": torch.ones(3)}, 4, writer)
    assert history(run_dir) == [4, 1] and not records(run_dir).state.aborted


@pytest.mark.parametrize("moment", ["create_local_plan", "resolve_data"])
def test_load_waits_for_pending_async_save_to_its_tier(moment: str, run_dir: str) -> None:
    """The load also waits if that save has no plan yet. Here the save continues once the load waits."""
    go, reached = threading.Event(), threading.Event()

    class Planner(DefaultSavePlanner):
        def __getattribute__(self, name: str) -> Any:
            if name == moment:
                reached.set()
                assert go.wait(60)
            return super().__getattribute__(name)

    class Waiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "a dcp.async_save is under way" in record.getMessage():
                go.set()

    writer, other, handler = ckpt.dcp.StorageWriter(run_dir), f"{run_dir}-2", Waiting()
    for place in (writer, other):
        save({"n": 1}, 1, place)
    saving = dcp.async_save({"n": 2}, checkpoint_id=2, storage_writer=writer, planner=Planner())
    assert reached.wait(60)
    logging.getLogger("ckpt").addHandler(handler)
    try:
        if moment == "resolve_data":
            assert load({"n": 0}, other)["n"] == 1 and not go.is_set()
        assert load({"n": 0}, run_dir)["n"] == 2 and ckpt.dcp.latest(run_dir) == 2
    finally:
        logging.getLogger("ckpt").removeHandler(handler)
        go.set()
        saving.result()


def test_load_does_not_change_branch_of_pending_save(run_dir: str) -> None:
    state, writer = {"w": torch.zeros(3)}, ckpt.dcp.StorageWriter(run_dir)
    for step in (1, 2):
        save(state, step, writer)

    class Late(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            load({"w": torch.zeros(3)}, run_dir, 1)
            return super().create_local_plan()

    save(state, 3, writer, planner=Late())
    assert history(run_dir) == [3, 2, 1]
    save(state, 2, writer)
    assert history(run_dir) == [2, 1]


LAST_SAVE = """
import atexit, sys, warnings, torch, torch.distributed.checkpoint as dcp, ckpt.dcp
warnings.simplefilter("ignore")
writer = ckpt.dcp.StorageWriter(sys.argv[1])
def late():
    try:
        dcp.save({"n": 2}, checkpoint_id=2, storage_writer=writer)
    except BaseException as error:
        print(error)
atexit.register(late)
dcp.async_save({"w": torch.ones(3_000_000)}, checkpoint_id=1, storage_writer=writer)
"""


def run_last_save(script: str, run_dir: str) -> tuple[str, str]:
    """Return what the script printed and logged. It ends without an error."""
    done = run_script(script, run_dir)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def test_last_async_save_of_a_script_completes(run_dir: str) -> None:
    """The save completes without .result(), as with torch's own writer. A later save fails with a clear error."""
    printed, logged = run_last_save(LAST_SAVE, run_dir)
    assert history(run_dir) == [1] and "not in an atexit handler" in printed and "failed" not in logged


@pytest.mark.parametrize("last", ["an async save", "the one before"])
def test_error_of_the_last_async_save_is_logged_at_the_end_of_the_script(last: str, run_dir: str) -> None:
    """The script never calls .result(), which would raise the error."""
    Path(run_dir).mkdir()
    Path(run_dir, "notes.txt").write_text("not a run")
    script = LAST_SAVE.replace("atexit.register(late)", "").rstrip()
    if last == "the one before":
        script += ".exception()\nwriter = ckpt.dcp.StorageWriter(sys.argv[1] + '-2')\nlate()"
    logged = run_last_save(script, run_dir)[1]
    assert ("the last save of this script failed: 1: " in logged) is (last == "an async save"), logged


# -- several tiers --


def test_each_tier_applies_its_interval_and_retention(tmp_path: Path) -> None:
    """The nearest tier comes first and gets the steps that no tier schedules. Checkpoint ids match in all tiers."""
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [ckpt.Tier(str(near), every=2, keep=2), ckpt.Tier(str(far), every=4, keep=ckpt.Keep(last=2, every=8))]
    writer, state = ckpt.dcp.StorageWriter(tiers), {"w": torch.randn(1000), "n": 0}
    for step in range(2, 23, 2):
        save(state | {"n": step}, step, writer)
    save(state | {"n": 23}, 23, writer)
    assert history(str(near)) == [23, 22] and history(str(far)) == [20, 16, 8]
    assert (len(data_files(near)), len(data_files(far))) == (2, 3)
    assert {a.term for a in records(str(near)).state.commits} == {a.term for a in records(str(far)).state.commits}
    assert load(state, tiers)["n"] == 23 and load(state, tiers, 8)["n"] == 8
    assert load(state, str(far))["n"] == 20


def test_bucket_outage_is_reported_while_folder_still_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage_options of the Tier apply, also in another process. During an outage the folder still gets saves."""
    with MotoServer() as server:
        server.make_bucket("bucket")
        near, far = str(tmp_path / "near"), "s3://bucket/run"
        tiers = [ckpt.Tier(near, 1, keep=3), ckpt.Tier(far, 2, keep=2, storage_options=storage_options(server.url))]
        writer, state = ckpt.dcp.StorageWriter(tiers), {"w": torch.randn(3_000_000), "n": 0}
        for step in range(1, 9):
            save(state | {"n": step}, step, writer)
        assert history(far) == [8, 6]
        flip(data_files(near)[-1], 5_000_000)
        found = load(emptied(state), tiers, resume=False)
        assert found["n"] == 8 and same(found["w"], state["w"])
        writer = pickle.loads(pickle.dumps(writer))  # as the process of dcp.async_save receives it
    monkeypatch.setattr(coordinator, "PATIENCE_S", 0.2)
    error = refused(lambda: save(state | {"n": 10}, 10, writer))
    assert isinstance(error, ckpt.errors.SaveError) and f"not written to {far}" in str(error)
    save(state | {"n": 11}, 11, writer)
    assert history(near) == [11, 10, 8] and load(state, tiers[:1])["n"] == 11


def test_a_failed_step_can_be_saved_again(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry has another id, with a new term. Earlier checkpoints stay in the history."""
    state, writer = {"w": torch.randn(10), "n": 1}, ckpt.dcp.StorageWriter(run_dir)
    save(state, 1, writer)
    for point in ("data_file.opened", "data_file.written", "manifest.stored", "index.stored"):
        monkeypatch.setattr(failpoints, "_armed", failpoints._parse(f"{point}:eio"))
        refused(lambda: save(state | {"n": 2}, 2, writer))
        monkeypatch.setattr(failpoints, "_armed", None)
        assert history(run_dir) == [1], point
    save(state | {"n": 2}, 2, writer)
    save(state | {"n": 3}, 3, writer)
    assert history(run_dir) == [3, 2, 1] and load(state, run_dir, 2)["n"] == 2
    assert len(records(run_dir).state.aborted) == 4


def test_a_state_that_changes_while_it_is_written_is_refused(tmp_path: Path) -> None:
    """Two tiers must get the same bytes. Negative control: a state that does not change is saved."""

    class Restless(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            found = super().resolve_data(write_item)
            return found.add_(1) if isinstance(found, Tensor) else found

    places = [tmp_path / "a", tmp_path / "b"]
    error = refused(lambda: save({"w": torch.zeros(9)}, 1, places, planner=Restless()))
    assert "changed while it was written" in str(error)
    save({"w": torch.zeros(9)}, 2, places, planner=DefaultSavePlanner())
    assert history(str(places[1])) == [2]


def test_next_save_deletes_files_of_failed_saves(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new job deletes them too, even if its own save also fails, so a nearly full disk recovers."""
    state, writer = {"w": torch.randn(100_000)}, ckpt.dcp.StorageWriter(run_dir)
    save(state, 1, writer)
    for step in (2, 3):
        monkeypatch.setattr(failpoints, "_armed", failpoints._parse("manifest.stored:eio"))
        refused(lambda step=step: save({"w": torch.randn(100_000)}, step, writer))
        monkeypatch.setattr(failpoints, "_armed", None)
    assert len(data_files(run_dir)) == 2  # step 3 deleted that of step 2
    another_job()

    async def full(*args: Any, **kwargs: Any) -> Any:
        raise ckpt.errors.FullError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(rank_write, "write", full)
        assert "no space left. `ckpt gc" in str(refused(lambda: save(state, 4, writer)))
    assert data_files(run_dir, 2) == data_files(run_dir, 3) == []
    save(state, 5, writer)
    assert history(run_dir) == [5, 1] and same(load(emptied(state), run_dir)["w"], state["w"])


def test_cached_plans_do_not_disable_retention(run_dir: str) -> None:
    """With enable_plan_caching each rank sends an old plan. The checkpoint id is still new, and `keep` still
    applies, also after a rollback."""
    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__annotations__:
        pytest.skip("this version of torch keeps no plans")
    state, tier = {"w": torch.zeros(3), "n": 0}, ckpt.Tier(run_dir, every=1, keep=2)
    writer = ckpt.dcp.StorageWriter(tier)

    class Kept(DefaultSavePlanner):
        """A planner class with its own cached plans."""

    def kept(step: int) -> None:
        save(state | {"n": step}, step, writer, planner=Kept(enable_plan_caching=True))

    for step in range(1, 7):
        kept(step)
    assert history(run_dir) == [6, 5] and load(emptied(state), tier, 6, resume=False)["n"] == 6
    assert load(state, tier, 5)["n"] == 5
    kept(6)
    assert history(run_dir) == [6, 5]


def test_load_raises_if_ranks_select_different_steps(run_dir: str) -> None:
    """A save may end while the ranks load. An error is better than a mix of two steps."""
    plans = [LoadPlan([], storage_data=f"1.00000000-{step}") for step in (5, 5, 6)]
    reader = ckpt.dcp.StorageReader(run_dir)
    assert reader.prepare_global_plan(plans[:2]) == plans[:2]
    with pytest.raises(ckpt.errors.PeerError, match="pass a checkpoint_id"):
        reader.prepare_global_plan(plans)


def test_save_rejects_a_folder_that_ranks_do_not_share(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a rank writes to its own disk cannot be committed."""
    real = rank_write.write

    async def elsewhere(store: Any, *args: Any, **kwargs: Any) -> Any:
        written = await real(store, *args, **kwargs)
        for path in manifests(run_dir):
            path.unlink()
        return written

    monkeypatch.setattr(rank_write, "write", elsewhere)
    assert "all ranks share" in str(refused(lambda: save({"w": torch.ones(1)}, 1, run_dir)))


def test_an_empty_state_is_a_checkpoint(run_dir: str) -> None:
    save({}, 1, run_dir)
    save({"n": 5}, 2, run_dir)
    assert load({}, run_dir, 1) == {} and load({"n": 0}, run_dir) == {"n": 5}


# -- damaged and hostile data --


def file_of(run: str | Path) -> Path:
    return data_files(run)[0]


def test_damage_is_repaired_from_second_tier_or_reported(tmp_path: Path) -> None:
    """A flipped bit never reaches a tensor: the chunk is read from the other tier, or an error names the tensor."""
    near, far = tmp_path / "near", tmp_path / "far"
    state = {"v": torch.zeros(10, dtype=torch.float64), "w": torch.randn(100_000)}
    save(state, 1, [near, far])
    flip(file_of(near), file_of(near).stat().st_size - 5000)
    into = emptied(state)
    assert same(load(into, [near, far])["w"], state["w"])
    with pytest.raises(CheckpointException, match="w is damaged"):
        load(emptied(state), near)
    file_of(far).unlink()
    with pytest.raises(CheckpointException, match="w is damaged"):
        load(emptied(state), [near, far])


def test_negative_control_without_digests_damage_would_get_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The byte that the test above flips is really read."""
    state = {"w": torch.randn(100_000)}
    save(state, 1, tmp_path / "run")
    flip(file_of(tmp_path / "run"), file_of(tmp_path / "run").stat().st_size - 5000)
    trust_tensor_data(monkeypatch)
    assert not same(load({"w": torch.zeros(100_000)}, tmp_path / "run")["w"], state["w"])


def test_load_falls_back_if_a_manifest_is_damaged(run_dir: str) -> None:
    """Without an id the newest readable checkpoint is loaded. With an id, the error describes the damage."""
    state = {"w": torch.zeros(3), "n": 0}
    for step in (1, 2):
        save(state | {"n": step}, step, run_dir)
    flip(manifests(run_dir, 2)[0], 40)
    with pytest.raises(CheckpointException, match=r"damaged|digest"):
        load(state, run_dir, 2)
    assert load(state, run_dir)["n"] == 1


def test_load_retries_if_its_step_is_retired(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer with a small `keep` may retire the step that a reader has selected."""
    save({"n": 1}, 1, run_dir)
    real, calls = read.load_all, list[int]()

    async def gone(store: Any, commit: Any) -> Any:
        calls.append(commit.step)
        if len(calls) == 1:
            raise ckpt.errors.NotFoundError("retired")
        return await real(store, commit)

    monkeypatch.setattr(read, "load_all", gone)
    assert load({"n": 0}, run_dir)["n"] == 1 and calls == [1, 1]


def test_load_ignores_a_wrong_index(run_dir: str) -> None:
    """Manifests override an index of another step and an index with a changed name."""
    state = {"some_weights": torch.zeros(3), "n": 0}
    for step in (1, 2):
        save(state | {"n": step}, step, run_dir)
    one, two = indexes(run_dir)
    whole = two.read_bytes()
    for hostile in (one.read_bytes(), whole.replace(b"some_weights", b"sham_weights"), b"", b"x" * 1000):
        assert hostile != whole
        two.write_bytes(hostile)
        assert load(state, run_dir)["n"] == 2


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.mark),)


def test_object_with_code_is_rejected_before_any_change(run_dir: str, tmp_path: Path) -> None:
    """Negative control: a reader with trusted=True runs the code."""
    mark = tmp_path / "mark"
    save({"w": torch.ones(3), "object": Bomb(str(mark))}, 1, run_dir)
    state = {"w": torch.zeros(3), "object": None}
    error = refused(lambda: load(state, run_dir))
    assert (
        isinstance(error, ckpt.errors.UsageError) and "object of step 1" in str(error) and "trusted=True" in str(error)
    )
    assert not mark.exists() and same(state["w"], torch.zeros(3))
    load(state, run_dir, trusted=True)
    assert mark.exists() and same(state["w"], torch.ones(3))


def test_objects_that_are_not_archives_are_rejected() -> None:
    for raw in (b"", b"PK\x03\x04", os.urandom(300), pickle.dumps(print), pickle.dumps(Bomb("/nowhere"))):
        with pytest.raises(ckpt.errors.UsageError, match="rejected"):
            objects.check_object("x", memoryview(raw))
    objects.check_object("x", pickled({"a": [1, "x", (2.5, None)], "t": torch.ones(3)}))


HARMLESS: list[Any] = [
    *(io.BytesIO(b"abc"), deque([1, [2]]), deque([1], 3), deque(), Decimal("-1.5E+7"), Decimal("NaN"), Fraction(-1, 3)),
    *(uuid.UUID(int=5), uuid.uuid1(), slice(1, None), range(1, 9, 2), frozenset([1, "a", (2,)]), frozenset()),
    *(PurePosixPath("a/b"), [deque([Decimal(1), frozenset([Fraction(2)])])]),
]


def test_harmless_objects_are_loaded_without_trust(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """Saving them logs no warning, and loading restores their types and values."""
    state = {"w": torch.ones(3), **{f"o{i}": value for i, value in enumerate(HARMLESS)}}
    save(state, 1, run_dir)
    assert "trusted" not in caplog.text
    found: dict[str, Any] = {"w": torch.zeros(3), **{f"o{i}": None for i in range(len(HARMLESS))}}
    load(found, run_dir)
    for i, value in enumerate(HARMLESS):
        back = found[f"o{i}"]
        assert type(back) is type(value)
        if isinstance(value, io.BytesIO):
            assert (back.getvalue(), back.tell()) == (value.getvalue(), value.tell())
        elif isinstance(value, frozenset):  # its order depends on the hash seed
            assert back == value
        else:
            assert repr(back) == repr(value)
    with torch.serialization.safe_globals([deque, uuid.UUID]):  # the user's own entries stay
        objects.check_object("x", pickled(deque([1])))
        assert {deque, uuid.UUID} <= set(torch.serialization.get_safe_globals())
    assert not set(objects.STAND_INS) & set(torch.serialization.get_safe_globals())


class Odd:
    """An object with a pickle that Python would never write for its class."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


@pytest.mark.parametrize(
    "how",
    [
        (Fraction, ("1e999999999",)),
        (Decimal, ((0, (1,), 10**9),)),
        (deque, (Odd(Path.touch, (Path("/nowhere/mark"),)),)),
        (deque, (), {"append": print}),
        (range, (0.5,)),
        (getattr, (deque, "append")),
    ],
    ids=lambda how: how[0].__name__,
)
def test_odd_pickles_of_harmless_classes_are_refused(how: Any) -> None:
    with pytest.raises(ckpt.errors.UsageError, match="rejected"):
        objects.check_object("x", pickled(Odd(*how)))


def pickled(value: Any) -> memoryview:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer()


def test_objects_without_code_load_and_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Bytes, dates and paths are loaded. A rejection names the class, and saving such an object warns once."""
    for value in (b"", b"x", datetime.datetime(2026, 1, 2), datetime.timedelta(3), datetime.UTC, Path("a/b")):
        objects.check_object("x", pickled({"value": value}))
    with torch.serialization.safe_globals([datetime.date, Plain]):
        objects.check_object("x", pickled(Plain()))
        named = torch.serialization.get_safe_globals()
        assert datetime.date in named and datetime.datetime not in named  # the user's own entries stay
    with pytest.raises(ckpt.errors.UsageError, match=r"\(Unsupported global: GLOBAL test_dcp.Plain\)"):
        objects.check_object("x", pickled(Plain()))
    for _ in range(2):
        objects.warn_once("unheard.of", pickled(Plain()))
        objects.warn_once("unheard.of.number", pickled(5))
    assert [r.getMessage()[:16] for r in caplog.records if "test_dcp.Plain" in r.getMessage()] == ["unheard.of can o"]


class Plain:
    """A user-defined class that torch does not allow by default."""


def test_invalid_facts_raise_corrupt_error(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any invalid `facts` about objects and nesting raise CorruptError."""
    save({"w": torch.ones(3)}, 1, run_dir)
    saved = read.run(dcp_source.find([f"file://{run_dir}"], None)).saved
    component = saved.views[0].components[0]
    for facts in (
        {},
        {"objects": 5, "mappings": None},
        {"objects": [[]], "mappings": None},
        {"objects": [], "mappings": {"w": "w"}},
        {"objects": [], "mappings": {"w": [5]}},
        {"objects": [], "mappings": {"w": ["l", -1]}},
        {"objects": [], "mappings": {"w": ["l", 300_000]}},
    ):
        monkeypatch.setitem(component, "facts", facts)
        with pytest.raises(ckpt.errors.CorruptError):
            dcp_source.metadata_of(saved)


# -- several ranks --


def ranks(world: int, *actions: list[Any], check: bool = True, timeout_s: float = 120.0) -> list[dict[str, Any]]:
    """Run actions as the ranks of a job. Return the reports of the ranks in rank order."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_dcp; test_dcp.main()"
    done = launch(world, code, json.dumps(actions), port=free_port(), timeout_s=timeout_s)
    found = []
    for process in done:
        assert process.returncode == 0 or not check, process.stderr[-4000:]
        found += [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return found


def app(state: dict[str, Any], step: int) -> dict[str, Any]:
    model, optim = get_state_dict(state["model"], state["optim"])
    return {
        "model": model,
        "optim": optim,
        "sched": state["sched"].state_dict(),
        "step": step,
        "bag": [{"a": (1, "x")}],
    }


def job_save(mode: str, root: str, how: str) -> dict[str, Any]:
    """Train and save steps 1 and 2. Also write the expected state, gathered by torch itself."""
    state = build(mode)
    places = [f"{root}/{mode}", ckpt.Tier(f"{root}/{mode}-far", every=2)]
    writer = ckpt.dcp.StorageWriter(places)
    apart = dist.new_group() if how != "sync" else None
    saving: Any = None
    for step in (1, 2):
        train_step(mode, state, step)
        expected = gathered(state)
        if dist.get_rank() == 0:
            torch.save(expected, f"{root}/{mode}-{step}.pt")
        given = app(state, step)
        if how == "sync":
            dcp.save(given, checkpoint_id=f"{root}/out/step-{step}", storage_writer=writer)
            continue
        if saving is not None:
            saving.result()
        kind = AsyncCheckpointerType(how)
        saving = dcp.async_save(
            given,
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            async_checkpointer_type=kind,
            process_group=apart if how == "thread" else None,
        )
        train_step(mode, state, 77)  # these changes must not reach the pending save
    if saving is not None:
        saving.result()
    return {}


def job_load(mode: str, root: str, step: int) -> dict[str, Any]:
    state = build(mode)
    train_step(mode, state, 99)
    given = app(state, -1)
    dcp.load(given, checkpoint_id=step, storage_reader=ckpt.dcp.StorageReader(f"{root}/{mode}"))
    set_state_dict(state["model"], state["optim"], model_state_dict=given["model"], optim_state_dict=given["optim"])
    expected = torch.load(f"{root}/{mode}-{step}.pt", weights_only=True)
    found = gathered(state)
    wrong = [n for n in expected.keys() | found.keys() if n not in found or not torch.equal(found[n], expected[n])]
    return {
        "wrong": wrong,
        "tensors": len(found),
        "plain": [given["step"], given["bag"][0]["a"], given["sched"]["last_epoch"]],
    }


def job_fail(root: str, point: str) -> dict[str, Any]:
    """Fail or kill rank 1 in its second save. Report each rank's error and whether the next save works."""
    writer, outcomes = ckpt.dcp.StorageWriter(f"{root}/run"), []
    for step in (1, 2, 3):
        if dist.get_rank() == 1 and step == 2:
            failpoints._armed = failpoints._parse(point)
        try:
            dcp.save(toy(step), checkpoint_id=step, storage_writer=writer)
            outcomes.append("saved")
        except BaseException as error:
            outcomes.append(f"{type(error).__name__}: {error}"[:20] + f"{error}"[-800:])
            if not isinstance(error, CheckpointException):
                break  # torch reports a lost rank
        failpoints._armed = None
    return {"outcomes": outcomes}


def toy(step: int) -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(40.0).reshape(10, 4) + step
    return {
        "divided": dist.tensor.distribute_tensor(whole, mesh, [dist.tensor.Shard(0)], src_data_rank=None),
        "alike": torch.full((5,), float(step)),
        f"only_{rank}": torch.full((3,), float(rank)),
        "n": step,
    }


def job_resume(root: str) -> dict[str, Any]:
    state = toy(0)
    dcp.load(state, storage_reader=ckpt.dcp.StorageReader(f"{root}/run"))
    n, first = state["n"], float(state["divided"].full_tensor()[0, 0])
    dcp.save(toy(n + 5), checkpoint_id=n + 5, storage_writer=ckpt.dcp.StorageWriter(f"{root}/run"))
    return {"n": n, "first": first, "own": state[f"only_{dist.get_rank()}"].tolist()}


def job_differ(root: str) -> dict[str, Any]:
    """Save different steps from the ranks, then to folders that the ranks do not share."""
    rank, found = dist.get_rank(), []
    for writer, step in (
        (ckpt.dcp.StorageWriter(f"{root}/apart"), 5 + rank),
        (ckpt.dcp.StorageWriter(f"{root}/apart-{rank}"), 5),
    ):
        try:
            dcp.save(toy(step), checkpoint_id=step, storage_writer=writer)
            found.append("saved")
        except CheckpointException as error:
            found.append(str(error)[-400:])
    return {"outcomes": found}


def job_cached(root: str) -> dict[str, Any]:
    """Save three steps with cached plans on all ranks."""
    writer = ckpt.dcp.StorageWriter(f"{root}/cached")
    for step in (1, 2, 3):
        dcp.save(
            toy(step), checkpoint_id=step, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True)
        )
    return {}


JOBS = {
    job.__name__.removeprefix("job_"): job for job in (job_save, job_load, job_fail, job_resume, job_differ, job_cached)
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for name, *arguments in json.loads(sys.argv[1]):
        result = JOBS[name](*arguments)
        print(json.dumps({"job": [name, *arguments], "rank": dist.get_rank(), **result}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that exits


Reports = tuple[Path, dict[int, list[dict[str, Any]]]]
POINTS = {"data_file.opened": "eio", "data_file.written": "enospc", "manifest.stored": "eio"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Return the folder and the reports of jobs, by world size. Jobs are few because each start takes long."""
    root = tmp_path_factory.mktemp("jobs")
    ranks(4, *(["save", mode, f"{root}", how] for mode, how in MODES.items()))
    killed = ranks(2, ["fail", f"{root}/killed", "data_file.written:kill"], check=False, timeout_s=60)
    loads = [["load", mode, f"{root}", step] for mode, step in (("fsdp", 1), *((mode, 2) for mode in MODES))]
    fails = [["fail", f"{root}/{point}", f"{point}:{fault}"] for point, fault in POINTS.items()]
    resumes = [["resume", f"{root}/{name}"] for name in ("killed", *POINTS)]
    others = [["differ", f"{root}"], ["cached", f"{root}"], ["save", "fsdp", f"{root}/process", "process"]]
    (root / "process").mkdir()
    by_process = [["load", "fsdp", f"{root}/process", step] for step in (1, 2)]
    two = ranks(2, *loads, *fails, *resumes, *others)
    return root, {0: killed, 2: two, 1: ranks(1, loads[0], *by_process), 3: ranks(3, *loads[:2])}


def test_every_sharding_loads_in_every_other(reports: Reports) -> None:
    """Four ranks save FSDP2, HSDP, TP and FSDP with TP, also in a thread. One to three ranks load the same bits."""
    root, results = reports
    for mode in MODES:
        assert history(f"{root}/{mode}") == [2, 1] and history(f"{root}/{mode}-far") == [2]
        expected, whole = torch.load(root / f"{mode}-2.pt", weights_only=True), ckpt.load(root / mode)
        assert {"model.layers.0.up.weight", "bag.0.a"} <= set(whole)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.sub("model").items())
    for world, count in ((1, 3), (2, 10), (3, 6)):
        found = [one for one in results[world] if one["job"][0] == "load"]
        assert len(found) == count
        for one in found:
            _, mode, folder, step = one["job"]
            sync = MODES[mode] == "sync" and not folder.endswith("process")
            term = step if sync else 2 * step - 1  # a training step follows each save
            assert (one["wrong"], one["plain"]) == ([], [step, [1, "x"], term]), one
            assert one["tensors"] > 30


def test_async_save_by_a_process(reports: Reports) -> None:
    """The process belongs to the trainer's job: one term, two steps. The test above checks its bits."""
    root, _ = reports
    assert history(f"{root}/process/fsdp") == [2, 1]
    assert len(records(f"{root}/process/fsdp").state.acquires) == 1


@pytest.mark.parametrize("point", POINTS)
def test_failure_on_one_rank_fails_all_ranks(reports: Reports, point: str) -> None:
    """All ranks receive the reason, the checkpoint is aborted, and the next save succeeds."""
    root, results = reports
    both = [one["outcomes"] for one in results[2] if one["job"][:2] == ["fail", f"{root}/{point}"]]
    assert len(both) == 2
    for texts in both:
        assert [text[:5] for text in texts] == ["saved", "Check", "saved"]
        assert "Error" in texts[1]
    state = records(f"{root}/{point}/run").state
    assert [a.step for a in state.aborted] == [2] and "rank 1" in next(iter(state.reasons.values()))
    assert history(f"{root}/{point}/run") == [8, 3, 1]


def test_job_resumes_after_rank_is_killed_during_save(reports: Reports) -> None:
    """The next job aborts the incomplete checkpoint, restores the previous step and saves more."""
    root, results = reports
    assert [one["outcomes"][0] for one in results[0]] == ["saved"] and "saved" not in results[0][0]["outcomes"][1:]
    found = [one for one in results[2] if one["job"] == ["resume", f"{root}/killed"]]
    expected = [(1, 1.0, [0.0] * 3), (1, 1.0, [1.0] * 3)]
    assert sorted((one["n"], one["first"], one["own"]) for one in found) == expected
    state = records(f"{root}/killed/run").state
    assert history(f"{root}/killed/run") == [6, 1] and [a.step for a in state.aborted] == [2]


def test_save_raises_if_ranks_disagree(reports: Reports) -> None:
    """The ranks disagree about the step or about the folder. Cached plans work with several ranks."""
    root, results = reports
    found = [one["outcomes"] for one in results[2] if one["job"][0] == "differ"]
    assert len(found) == 2
    for texts in found:
        assert "saves step 6, but the coordinator" in texts[0] and "the coordinator to" in texts[1]
    assert history(f"{root}/cached") == [3, 2, 1]
    assert ckpt.load(root / "cached", step=2)["divided"][0, 0] == 2.0


def test_example_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks start as with torchrun, then one."""
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    for world, begins in ((2, "starts at step 0"), (1, "starts at step 60")):
        done = launch(world, code, REPO / "examples" / "dcp.py", tmp_path / "run", port=free_port())
        assert all(rank.returncode == 0 for rank in done), done[0].stderr[-3000:]
        assert begins in done[0].stdout
    assert history(str(tmp_path / "run")) == [60, 50, 40]
