"""First problems on a real GPU: graphs, page-locks, foreign streams, faults, little memory."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import simulated
from boundaries import Run, check_boundaries, close, gradients, read_back
from ckpt.core.format.boxes import Holding
from ckpt.core.restore import sources
from ckpt.core.run.replica_check import Comparison
from ckpt.core.snapshot import device as snapshot_device
from ckpt.core.snapshot import fill as staging_fill
from ckpt.core.state.sharding import LocalPiece
from processes import eventually, run_script
from test_gpu import open_run, ready
from toy_states import State, differences, fill, freeze

__all__ = ["open_run"]  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not simulated.wanted(), reason="simulated device only")]

SIDE = 256
SLOW = 0.05  # GB per second: a snapshot of SIDE takes about 16 ms


def adamw(**settings: Any) -> Run:
    def build() -> State:
        model = nn.Linear(SIDE, SIDE, device="cuda")
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1, **settings)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()

    return Run(build, move)


def returns(work: Callable[[], object], timeout_s: float) -> bool:
    """Return True if `work` returns or raises within the time, in another thread."""
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            work()
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    return ended.wait(timeout_s)


# -- graphs --


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_capture_right_after_a_step_works(mode: Any, open_run: Any) -> None:
    """torch's default mode is "global": our threads neither invalidate the capture nor lose the step."""
    run, current = adamw(fused=True), torch.cuda.current_stream()
    cp = open_run(run.state)
    ready(cp, run)
    x, spoilt = torch.ones(8, device="cuda"), list[RuntimeError]()
    with simulated.turned(d2h_gbs=SLOW):
        for step in range(2, 6):
            save = cp.step(step)
            try:
                with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
                    x.mul_(2)
                    time.sleep(0.03)
            except RuntimeError as error:
                spoilt.append(error)
                torch.cuda.set_stream(current)
            save.wait_staged(60.0)
            run.move(run.state, step + 1)
    assert spoilt == []


def replayed(open_run: Any) -> tuple[Any, State, State, torch.cuda.CUDAGraph]:
    """Return a Checkpointer of an optimizer with a captured step, its state, a twin and the graph."""
    states = []
    for _ in range(2):
        model = nn.Linear(SIDE, SIDE, device="cuda")
        rate = torch.tensor(0.1, device="cuda")
        states.append({"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)})
    gradients(states[0]["model"], 1)
    states[0]["optim"].step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states[0]["optim"].step()
    return open_run(states[0]), *states, graph


def test_fence_before_each_replay_protects_the_copy(open_run: Any) -> None:
    """Weights are copied in the background again, as with the optimizer's hook, and no snapshot is torn."""
    cp, state, twin, graph = replayed(open_run)
    with simulated.turned(d2h_gbs=SLOW):
        for step in range(1, 7):
            cp.before_untracked_update()
            graph.replay()
            boundary = freeze(state)
            save = cp.step(step)
            assert all(weights_guarded(cp))
            cp.before_untracked_update()
            graph.replay()
            save.wait_staged(60.0)
            assert differences(read_back(cp, step, twin), boundary) == []


def weights_guarded(cp: ckpt.Checkpointer) -> list[bool]:
    reading = cp._run.capture.read()
    named = zip(reading.layout.tensors, reading.guarded, strict=True)
    return [guarded for spec, guarded in named if spec.name in ("model.weight", "model.bias")]


def test_negative_control_fence_without_its_wait(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the wait, the replay changes data during the copy, and the snapshot is dropped."""
    cp, _, _, graph = replayed(open_run)
    monkeypatch.setattr(cp._run.hook, "_before", lambda: None)
    with simulated.turned(d2h_gbs=SLOW):
        cp.before_untracked_update()
        graph.replay()
        save = cp.step(1)
        cp.before_untracked_update()
        graph.replay()
        with pytest.raises(ckpt.errors.SaveError, match="changed outside"):
            save.wait_staged(60.0)
    monkeypatch.undo()


def test_fence_within_a_capture_is_rejected(open_run: Any) -> None:
    """A replay would not wait for a fence from the capture."""
    cp, *_ = replayed(open_run)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ckpt.errors.UsageError, match="before the replay"):
        cp.before_untracked_update()


# -- a host that never waits --


def test_scaler_does_not_block_step(open_run: Any) -> None:
    """GradScaler.state_dict() waits for the device, but step() does not."""
    run = adamw(fused=True)
    run.state["scaler"], run.twin["scaler"] = (torch.amp.GradScaler("cuda", init_scale=1024.0) for _ in range(2))
    run.state["scaler"].scale(torch.ones((), device="cuda"))
    cp = open_run(run.state)
    ready(cp, run)
    torch.cuda._sleep(2_000_000_000)
    behind = torch.cuda.current_stream().record_event()
    cp.step(2)
    assert not behind.query(), "step() waited for the device"


# -- page-locks --


@pytest.fixture
def locking(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block page-locking until the event is set. With many ranks, locking 100 GB takes a minute."""
    runtime, allowed = torch.cuda.cudart(), threading.Event()
    register = runtime.cudaHostRegister

    def held(*arguments: Any) -> Any:
        allowed.wait(40.0)
        return register(*arguments)

    monkeypatch.setattr(runtime, "cudaHostRegister", held)
    yield allowed
    allowed.set()


def test_page_locking_does_not_block_the_first_step(open_run: Any, locking: threading.Event) -> None:
    """Copies are slower until it is done, but nothing waits for it."""
    run = adamw(fused=True)
    run.move(run.state, 1)
    cp = open_run(run.state)
    in_time = returns(lambda: cp.step(1), 5.0)
    locking.set()
    assert in_time, "step() waited for page-locking"


KILLED = """
import os, signal, torch
from torch import nn
import ckpt
model = nn.Linear(256, 256, device="cuda")
optim = torch.optim.AdamW(model.parameters(), fused=True)
cp = ckpt.Checkpointer({"model": model, "optim": optim}, options=ckpt.Options(name="locked"))
cp.restore(default=0)
for step in range(1, 4):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    cp.save(step).wait_staged(60.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_page_locking_does_not_block_a_restart(locking: threading.Event) -> None:
    """The adopted memory is read first and page-locked later."""
    assert run_script(KILLED).returncode == -signal.SIGKILL
    run, found = adamw(fused=True), list[Any]()
    torch.cuda.synchronize()

    def start() -> None:
        found.append(ckpt.Checkpointer(run.state, options=ckpt.Options(name="locked")))
        found.append(found[0].restore(default=0))

    in_time = returns(start, 5.0)
    locking.set()
    with contextlib.ExitStack() as stack:
        if not in_time:
            time.sleep(2.0)  # until it has returned and can be closed
        if found:
            stack.callback(close, found[0])
        assert in_time, "the start waited for page-locking"
        assert found[1] == 3


def test_page_locking_works_with_a_small_limit(
    open_run: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux 6.11 to 6.13 reject more than 2 GiB per call. Here the limit is 256 KiB with larger slots. No copy, in
    either direction, crosses the end of a piece."""
    for module in (snapshot_device, staging_fill, sources):
        monkeypatch.setattr(module, "LOCK", 256 << 10)
    run = adamw(fused=True)
    with simulated.turned(lock_call_bytes=256 << 10):
        cp = open_run(run.state)
        assert check_boundaries(cp, run, 2) == []
        arena = cp._run.stager.arena
        slots = [torch.frombuffer(arena.data(slot), dtype=torch.uint8) for slot in range(arena.slots)]
        assert eventually(lambda: all(slot.is_pinned() and slot[-1:].is_pinned() for slot in slots))
        slots.clear()
        assert "could not page-lock" not in caplog.text
        run.move(run.state, 3)
        boundary = freeze(run.state)
        cp.save(3).wait_staged(60.0)
        assert differences(read_back(cp, 3, run.twin), boundary) == []


# -- other users of the device --


def test_copies_continue_if_pool_streams_hang(open_run: Any) -> None:
    """A collective with a dead peer hangs on a stream of torch's pool, which reuses its streams."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    ready(cp, run)
    torch.cuda.synchronize()
    with contextlib.ExitStack() as stack:
        for priority in [0, -1] * 32:
            stack.enter_context(simulated.hung(torch.cuda.Stream(priority=priority)))
        cp.step(2).wait_staged(3.0)


def test_device_fault_keeps_staged_snapshot(open_run: Any) -> None:
    """After an illegal access every call fails. The staged snapshot stays, and close() returns."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    ready(cp, run)
    cp.step(2).wait_staged(60.0)
    run.move(run.state, 3)
    with simulated.faulty(torch.cuda.current_stream()):
        with contextlib.suppress(RuntimeError, ckpt.CheckpointError):
            cp.step(3).wait_staged(10.0)
        newest = cp._run.stager.arena.sealed()[0][1]
        assert newest.checkpoint.step == 2
        assert returns(lambda: cp.close(5.0), 30.0)


# -- memory of the device --


def test_comparing_replicas_uses_little_memory() -> None:
    """It uses at most half of the tensor's memory, because a GPU is nearly full during training."""
    tensor = torch.ones(32 << 20, device="cuda")
    shape = tuple(tensor.shape)
    piece = LocalPiece(Holding("w", "F32", shape, (0,), shape, (0, 1), accelerator=True), tensor)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Comparison([piece]).look()
    assert torch.cuda.max_memory_allocated() - before <= tensor.nbytes // 2


# -- devices --


def test_delayed_device_does_not_block_the_other(open_run: Any) -> None:
    """Each device has its own streams: a delay on one does not block the other, and the snapshot is complete."""

    def build() -> State:
        model = nn.ModuleList([nn.Linear(SIDE, SIDE, device=f"cuda:{i}") for i in range(2)])
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), fused=True)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()

    run = Run(build, move)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    with torch.cuda.device(1):
        torch.cuda._sleep(1_000_000_000)
    behind = torch.cuda.current_stream(1).record_event()
    save = cp.step(2)
    run.move(run.state, 3)
    torch.cuda.current_stream(0).synchronize()
    assert not behind.query()
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []


# -- tensors of every kind --


def kinds() -> Run:
    """Return views, other memory formats and narrow types that no optimizer updates. All are overwritten."""

    def build() -> State:
        base = torch.zeros(SIDE, SIDE, device="cuda")
        images = torch.zeros(8, 16, 9, 9, device="cuda").to(memory_format=torch.channels_last)
        bytes_ = {
            str(dtype): torch.zeros(SIDE, SIDE, dtype=torch.uint8, device="cuda").view(dtype)
            for dtype in (torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
        }
        strided = {"columns": base[:, ::3], "part": base.view(-1)[5:999], "turned": base.t(), "images": images}
        model = nn.Conv2d(8, 8, 3, device="cuda").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return {"mine": {**strided, **bytes_}, "model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}

    def move(state: State, step: int) -> None:
        for seed, tensor in enumerate(state["mine"].values()):
            if tensor.itemsize == 1:
                plain = torch.empty(tensor.shape, dtype=tensor.dtype)
                tensor.copy_(fill(plain, 100 * abs(step) + seed))
        for name in ("turned", "images"):
            state["mine"][name].add_(float(abs(step)))
        gradients(state["model"], abs(step))
        state["optim"].step()

    return Run(build, move)


@pytest.mark.parametrize("piece", [staging_fill.LOCK, 1 << 16])
def test_views_and_narrow_types_are_copied(open_run: Any, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Non-contiguous tensors are copied through temporaries that are not reused before the copy ends. The same holds
    for data that crosses the end of a page-locked piece."""
    monkeypatch.setattr(staging_fill, "LOCK", piece)
    run = kinds()
    with simulated.turned(d2h_gbs=SLOW):
        assert check_boundaries(open_run(run.state), run, 8) == []


def test_strided_tensors_use_one_piece_of_memory(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed and channels-last weights are reordered piece by piece, whatever their size."""
    piece = 1 << 18
    monkeypatch.setattr(staging_fill, "LOCK", piece)
    large = torch.zeros(1024, 1024, device="cuda")
    images = torch.zeros(64, 64, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    model = nn.ParameterList([nn.Parameter(large.t()), nn.Parameter(images)])
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    cp = open_run({"model": model, "optim": optim})
    for param in model:
        param.grad = torch.zeros_like(param)
    for step in (1, 2):
        optim.step()
        cp.save(step).wait_staged(60.0)
    optim.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cp.save(3).wait_staged(60.0)
    assert torch.cuda.max_memory_allocated() - before <= 2 * piece
