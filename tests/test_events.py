"""Tests of events about saves: subscribers, the log, and the timelines of profilers."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

import ckpt
from ckpt import events, subscribers
from ckpt.core.cadence.ledger import Account
from ckpt.core.snapshot.device import span
from ckpt.errors import SkippedError
from ckpt.subscribers import Event, Subscribers
from parallel import free_port, launch
from processes import eventually, run_script

WAIT_S = 60.0


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    """Return the list of all events of this process from now on."""
    found: list[Event] = []
    stop = events.subscribe(found.append)
    yield found
    stop()


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters())}


def train(of: dict[str, Any]) -> None:
    of["optim"].zero_grad()
    of["model"](torch.randn(4, 32)).pow(2).mean().backward()
    of["optim"].step()


# -- subscribers --


def test_subscribers_receive_events_in_order_on_one_thread() -> None:
    """All subscribers are called on one separate thread, and not after they unsubscribed."""
    board, first, second = Subscribers(), list[tuple[int | None, int]](), list[Event]()
    stop = board.subscribe(lambda event: first.append((event.step, threading.get_ident())))
    board.subscribe(second.append)
    for step in range(100):
        board.publish("staged", step, stall_s=0.1)
    assert board.flush(WAIT_S)
    stop()
    board.publish("closed", None)
    assert board.flush(WAIT_S)
    assert [step for step, _ in first] == list(range(100))
    assert len({thread for _, thread in first}) == 1 and first[0][1] != threading.get_ident()
    assert [event.kind for event in second] == ["staged"] * 100 + ["closed"]
    assert second[0].stall_s == 0.1 and second[0].error is None and second[0].at > 0
    json.dumps([event.to_json() for event in second])
    assert set(second[0].to_json()) == {"kind", "step", "at", "stall_s"}


def test_failing_subscriber_is_logged_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    board, told, others = Subscribers(), list[str](), list[str]()

    def bad(event: Event) -> None:
        told.append(event.kind)
        raise ValueError("no")

    board.subscribe(bad)
    board.subscribe(lambda event: others.append(event.kind))
    kinds = ["staged", "staged", "committed", "staged"]
    for kind in kinds:
        board.publish(kind, 1)
    assert board.flush(WAIT_S) and told == others == kinds
    said = [record for record in caplog.records if "subscriber" in record.message]
    assert [record.exc_info is not None for record in said] == [True, True]


def test_slow_subscriber_drops_and_counts_oldest_events() -> None:
    """The queue is bounded and keeps the newest events; publishing never waits, and a flush ends."""
    board, gate, found = Subscribers(), threading.Event(), list[Event]()

    def slow(event: Event) -> None:
        gate.wait(WAIT_S)
        found.append(event)

    board.subscribe(slow)
    board.publish("staged", -1)
    assert eventually(lambda: board._busy)
    for step in range(subscribers.MOST + 10):
        board.publish("staged", step)
    assert not board.flush(0.01)
    gate.set()
    assert board.flush(WAIT_S)
    assert [event.step for event in found] == [-1, *range(10, subscribers.MOST + 10)]
    assert [event.dropped for event in found[:3]] == [0, 10, 0] and found[1].to_json()["dropped"] == 10


def test_subscriber_may_publish_subscribe_and_flush() -> None:
    board, found = Subscribers(), list[int | None]()

    def busy(event: Event) -> None:
        found.append(event.step)
        if event.step == 1:
            board.publish("staged", 2)
            board.flush(WAIT_S)
            board.subscribe(lambda event: None)()
            stop()

    stop = board.subscribe(busy)
    board.publish("staged", 1)
    assert board.flush(WAIT_S) and found == [1]


# -- events of a Checkpointer --


def test_saves_publish_events_and_log_lines(heard: list[Event], run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """Events are sent for each staged step, each commit in each tier with the bytes in the ledger, the restore and the
    end.
    The log has exactly one line for each durable save."""
    caplog.set_level(logging.INFO, "ckpt")
    tiers = [ckpt.Tier(run_dir, every=2), ckpt.Tier(f"{run_dir}2", every=4)]
    of = state()
    with ckpt.Checkpointer(of, tiers, memory=ckpt.Memory(every=1)) as cp:
        cp.restore(default=0)
        for step in range(1, 9):
            train(of)
            save = cp.step(step)
            assert save is not None
            save.wait_staged(WAIT_S)
    near, far = f"file://{run_dir}", f"file://{run_dir}2"
    kinds = [event.kind for event in heard]
    assert kinds[-1] == "closed" and "restored" not in kinds and "failed" not in kinds  # all sent before close() ended
    staged = [event for event in heard if event.kind == "staged"]
    assert [event.step for event in staged] == list(range(1, 9))
    assert all((event.stall_s or 0) > 0 and event.nbytes == staged[0].nbytes for event in staged)
    committed = [event for event in heard if event.kind == "committed"]
    assert sorted((event.tier, event.step) for event in committed) == sorted(
        [(near, 2), (near, 4), (near, 6), (near, 8), (far, 4), (far, 8)]
    )
    for event in committed:  # a step is staged before it is committed
        assert kinds.index("staged") <= heard.index(event)
        assert heard.index(next(one for one in staged if one.step == event.step)) < heard.index(event)
        assert event.nbytes == staged[0].nbytes and (event.seconds or 0) > 0
    (path,) = Path(run_dir, "ledger").iterdir()
    account = Account.from_bytes(path.read_bytes())
    known = {(one.url, one.step): (one.nbytes, one.stored) for one in account.landed if not one.failed}
    assert known == {(event.tier, event.step): (event.nbytes, event.stored) for event in committed}
    lines = [record.getMessage() for record in caplog.records if " committed to " in record.getMessage()]
    assert len(lines) == len(committed)
    assert sum(line.startswith(f"step 8 committed to {far} in ") and " as " in line for line in lines) == 1
    assert {r.levelno for r in caplog.records if " committed to " in r.getMessage()} == {logging.INFO}

    heard.clear()
    with ckpt.Checkpointer(state(), tiers, memory=ckpt.Memory(every=1)) as cp:
        assert cp.restore() == 8
    (restored,) = [event for event in heard if event.kind == "restored"]
    assert (restored.step, restored.repaired) == (8, 0) and restored.source in ("memory", near)
    assert [event.kind for event in heard] == ["restored", "closed"]


@pytest.mark.parametrize("every", ["auto", "1h"])
def test_chosen_save_interval_is_published(heard: list[Event], run_dir: str, every: str) -> None:
    """The event has the tier, the interval and the reason. Times become steps, and memory is saved at every step."""
    of = state()
    with ckpt.Checkpointer(of, run_dir, every=every) as cp:
        cp.restore(default=0)
        step = 0

        def go_on() -> bool:
            nonlocal step
            for _ in range(5):
                step += 1
                train(of)
                cp.step(step)
            return any(event.kind == "decided" for event in heard)

        assert eventually(go_on, WAIT_S)
    decided = next(event for event in heard if event.kind == "decided")
    assert f"file://{run_dir}" in (decided.every or {}) and set(decided.why or {}) <= set(decided.every or {})
    if every == "1h":
        assert decided.every and decided.every["memory"] == 1 and decided.every[f"file://{run_dir}"] > 1000


FAILING = """
import json, os, signal, sys, time
import torch
import ckpt
from ckpt import events

kinds = []

def tell(event):
    os.write(1, (json.dumps(event.to_json()) + "\\n").encode())
    kinds.append(event.kind)

events.subscribe(tell)
run, last = sys.argv[1], int(sys.argv[2])
of = {"w": torch.zeros(1000)}
with ckpt.Checkpointer(of, ckpt.Tier(run, every=2), options=ckpt.Options(on_error="warn")) as cp:
    for step in range(cp.restore(default=0), last):
        save = cp.step(step + 1)
        save.wait_staged(60)
        if (step + 1) % 2 == 0:
            try:
                save.wait_durable(60)
            except ckpt.errors.SaveError:
                pass
    if last == 5:
        assert not events.log.handlers
        while "committed" not in kinds:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("<b>boom</b>")
"""


def told(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_failures_and_faults_are_published(run_dir: str) -> None:
    """A failed write is reported with its tier and error. After SIGKILL, the next start reports that fault, and then
    its own exception before it ends.
    Without logging configured, stderr has the errors and nothing else."""
    first = run_script(FAILING, run_dir, 5, fail="writer/data_file.written:eio:1")
    assert first.returncode == -signal.SIGKILL, first.stderr
    said = [line for line in first.stderr.splitlines() if not line.startswith("everystep writer:")]
    assert said and all("step 2 was not written" in line for line in said)
    failed = [one for one in told(first) if one["kind"] == "failed"]
    assert [(one["step"], one["tier"]) for one in failed] == [(2, f"file://{run_dir}")] and failed[0]["error"]
    assert [one["step"] for one in told(first) if one["kind"] == "committed"] == [4]

    second = run_script(FAILING, run_dir, 7)
    assert second.returncode == 1 and "boom" in second.stderr
    found = told(second)
    faults = [one for one in found if one["kind"] == "fault"]
    assert [one["fault"] for one in faults] == ["death", "exception"] and "was killed" in faults[0]["account"]
    assert [one["step"] for one in found if one["kind"] == "restored"] == [5]
    assert found[-1]["kind"] == "closed"


RANK = """
import datetime, logging, os, sys
import torch, torch.distributed as dist
import ckpt

logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(levelname)s %(message)s")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
with ckpt.Checkpointer({"w": torch.full((100,), float(dist.get_rank()))}, sys.argv[1]) as cp:
    cp.restore(default=0)
    cp.save(1).wait_durable(120)
sys.stdout.flush()
os._exit(0)
"""


def test_only_rank_0_logs_durable_save_at_info(run_dir: str) -> None:
    ranks = launch(2, RANK, run_dir, port=free_port(), timeout_s=180, LOCAL_WORLD_SIZE="2")
    said = [rank.stdout for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    lines = [[line for line in text.splitlines() if "step 1 committed to" in line] for text in said]
    assert [[line.split()[0] for line in each] for each in lines] == [["INFO"], ["DEBUG"]]
    assert "(of rank 0)" in lines[0][0]


def test_dropped_step_is_published_as_failure(heard: list[Event], run_dir: str) -> None:
    """A step dropped because all slots were in use is reported as a failure of memory."""
    of = {"w": torch.zeros(4)}
    with ckpt.Checkpointer(of, run_dir, options=ckpt.Options(on_busy="skip", on_error="warn")) as cp:
        cp.restore(default=0)
        cp.save(1).wait_staged(WAIT_S)
        arena = cp._run.stager.arena
        assert arena is not None
        arena.most = arena.slots  # no further slot fits
        for slot in range(arena.slots):  # as if all of them were being written
            cp._run.stager.slots.pin(arena, slot)
        save = cp.step(2)
        assert save is not None
        with pytest.raises(SkippedError):
            save.wait_staged(WAIT_S)
        for slot in range(arena.slots):
            cp._run.stager.slots.unpin(arena.id, slot)
    failed = [event for event in heard if event.kind == "failed"]
    assert [(event.step, event.tier) for event in failed] == [(2, "memory")]
    assert "still being written" in (failed[0].error or "")


# -- profilers --


def test_profilers_record_ckpt_ranges(run_dir: str, tmp_path: Path) -> None:
    """Ranges appear in the training thread, and in the staging thread if profiled. No device is initialized."""
    from torch._C._profiler import _ExperimentalConfig

    of = state()
    config = _ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with ckpt.Checkpointer(of, run_dir) as cp:
        cp.restore(default=0)
        with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
            for step in range(1, 4):
                train(of)
                save = cp.step(step)
                assert save is not None
                save.wait_staged(WAIT_S)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = [one for one in found if str(one.get("name", "")).startswith("ckpt.") and one.get("ph") == "X"]
    counts = {name: sum(one["name"] == name for one in ranges) for name in ("ckpt.step", "ckpt.wait", "ckpt.stage")}
    assert counts == {"ckpt.step": 3, "ckpt.wait": 3, "ckpt.stage": 3}
    threads = {name: {one["tid"] for one in ranges if one["name"] == name} for name in counts}
    assert threads["ckpt.stage"].isdisjoint(threads["ckpt.step"]) and threads["ckpt.wait"] == threads["ckpt.step"]

    with torch.profiler.profile(activities=activities) as profile, ckpt.Checkpointer(state(), run_dir) as cp:
        assert cp.restore() == 3
    assert [one.device_type for one in profile.events() if one.name == "ckpt.restore"] == [DeviceType.CPU]
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_nvtx_ranges_exist_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range is open inside the span, and closed after it. (Without a profiler, a GPU does not count ranges.)"""
    torch.zeros(1, device="cuda")
    calls, push, pop = list[str](), torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (calls.append(name), push(name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: (calls.append("end"), pop()))
    with span("ckpt.step"):
        assert calls == ["ckpt.step"]
    assert calls == ["ckpt.step", "end"]
