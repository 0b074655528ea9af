"""What a script on a real card meets first: graphs, page-locks, others' streams, faults, little memory."""

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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not simulated.wanted(), reason="of the simulated device only")]

SIDE = 256
SLOW = 0.05  # GB a second: a snapshot of SIDE takes some 16 ms


def adamw(**settings: Any) -> Run:
    def build() -> State:
        model = nn.Linear(SIDE, SIDE, device="cuda")
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1, **settings)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()

    return Run(build, move)


def returns(work: Callable[[], object], timeout_s: float) -> bool:
    """Whether this comes back in time, in another thread; whatever it raises."""
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            work()
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    return ended.wait(timeout_s)


# -- graphs --


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_capture_right_behind_a_step(mode: Any, open_run: Any) -> None:
    """torch's own default is "global": what our threads do meanwhile neither spoils the capture nor loses the step."""
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


def test_an_optimizer_that_was_captured_before(open_run: Any) -> None:
    """The Checkpointer comes after the capture, as in most scripts: replays run no hook, and no snapshot is torn."""
    model = nn.Linear(SIDE, SIDE, device="cuda")
    rate = torch.tensor(0.1, device="cuda")
    optim = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, fused=True)
    gradients(model, 1)
    optim.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optim.step()
    twin = nn.Linear(SIDE, SIDE, device="cuda")
    there = torch.optim.AdamW(twin.parameters(), lr=rate.clone(), capturable=True, fused=True)
    state = {"model": model, "optim": optim}
    cp = open_run(state)
    with simulated.turned(d2h_gbs=SLOW):
        for step in range(1, 7):
            graph.replay()
            boundary = freeze(state)
            save = cp.step(step)
            graph.replay()
            save.wait_staged(60.0)
            assert differences(read_back(cp, step, {"model": twin, "optim": there}), boundary) == []


def replayed(open_run: Any) -> tuple[Any, State, State, torch.cuda.CUDAGraph]:
    """A Checkpointer of an optimizer whose step is a graph that was captured first, and another such state."""
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


def test_a_fence_before_each_replay(open_run: Any) -> None:
    """Weights are copied beside training again, as if the optimizer's hook had run, and no snapshot is torn."""
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


def test_a_fence_that_waits_for_nothing_is_noticed(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without its wait the replay changes what is being copied, and the snapshot is dropped."""
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


def test_a_fence_within_a_capture_is_refused(open_run: Any) -> None:
    """A replay would not wait for what was said then."""
    cp, *_ = replayed(open_run)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ckpt.errors.UsageError, match="before the replay"):
        cp.before_untracked_update()


# -- a host that need not wait --


def test_a_scaler_does_not_make_step_wait(open_run: Any) -> None:
    """GradScaler.state_dict() waits for the device; step() does not."""
    run = adamw(fused=True)
    run.state["scaler"], run.twin["scaler"] = (torch.amp.GradScaler("cuda", init_scale=1024.0) for _ in range(2))
    run.state["scaler"].scale(torch.ones((), device="cuda"))
    cp = open_run(run.state)
    ready(cp, run)
    torch.cuda._sleep(2_000_000_000)
    behind = torch.cuda.current_stream().record_event()
    cp.step(2)
    assert not behind.query(), "step() has waited for the device"


# -- page-locks --


@pytest.fixture
def locking(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Page-locking does not come to its end until this is set: 100 GB of many ranks behind one lock take a minute."""
    runtime, allowed = torch.cuda.cudart(), threading.Event()
    register = runtime.cudaHostRegister

    def held(*arguments: Any) -> Any:
        allowed.wait(40.0)
        return register(*arguments)

    monkeypatch.setattr(runtime, "cudaHostRegister", held)
    yield allowed
    allowed.set()


def test_page_locking_does_not_hold_the_first_step_up(open_run: Any, locking: threading.Event) -> None:
    """Copies are slower until it is done; nobody waits for it."""
    run = adamw(fused=True)
    run.move(run.state, 1)
    cp = open_run(run.state)
    came = returns(lambda: cp.step(1), 5.0)
    locking.set()
    assert came, "step() has waited until memory was page-locked"


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


def test_page_locking_does_not_hold_a_restart_up(locking: threading.Event) -> None:
    """The memory that is taken over is read first, and page-locked when there is time."""
    assert run_script(KILLED).returncode == -signal.SIGKILL
    run, found = adamw(fused=True), list[Any]()
    torch.cuda.synchronize()

    def start() -> None:
        found.append(ckpt.Checkpointer(run.state, options=ckpt.Options(name="locked")))
        found.append(found[0].restore(default=0))

    came = returns(start, 5.0)
    locking.set()
    with contextlib.ExitStack() as stack:
        if not came:
            time.sleep(2.0)  # until it has come after all, and can be closed
        if found:
            stack.callback(close, found[0])
        assert came, "the start has waited until memory was page-locked"
        assert found[1] == 3


def test_a_system_that_page_locks_little_in_one_call(
    open_run: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux 6.11 to 6.13 refuse more than 2 GiB, which is more than is asked for; here it is 256 KiB, of slots that are
    larger. No copy, out or back, reaches over the end of a piece."""
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
        assert "could not be page-locked" not in caplog.text
        run.move(run.state, 3)
        boundary = freeze(run.state)
        cp.save(3).wait_staged(60.0)
        assert differences(read_back(cp, 3, run.twin), boundary) == []


# -- others who use the device --


def test_copies_go_on_though_every_stream_of_the_pool_hangs(open_run: Any) -> None:
    """A collective whose peer has died hangs on a stream of torch's pool, which gives every stream out many times."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    ready(cp, run)
    torch.cuda.synchronize()
    with contextlib.ExitStack() as stack:
        for priority in [0, -1] * 32:
            stack.enter_context(simulated.hung(torch.cuda.Stream(priority=priority)))
        cp.step(2).wait_staged(3.0)


def test_a_fault_keeps_what_memory_holds(open_run: Any) -> None:
    """After an illegal access every call fails. What was staged before is there still, and closing comes back."""
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


def test_comparing_replicas_takes_little_memory() -> None:
    """However large a tensor is: a card is nearly full when it trains."""
    tensor = torch.ones(32 << 20, device="cuda")
    shape = tuple(tensor.shape)
    piece = LocalPiece(Holding("w", "F32", shape, (0,), shape, (0, 1), accelerator=True), tensor)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Comparison([piece]).look()
    assert torch.cuda.max_memory_allocated() - before <= tensor.nbytes // 2


# -- devices --

ON_SECOND = """
import torch
from torch import nn
import ckpt
model = nn.Linear(256, 256, device="cuda:1")
optim = torch.optim.AdamW(model.parameters(), fused=True)
with ckpt.Checkpointer({"model": model, "optim": optim}, options=ckpt.Options(name="second")) as cp:
    cp.restore(default=0)
    for step in range(1, 4):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optim.step()
        cp.save(step).wait_staged(60.0)
    before = [p.detach().cpu() for p in model.parameters()]
    optim.step()
    cp.restore()
    assert all(map(torch.equal, before, (p.cpu() for p in model.parameters())))
print("woken up:", [d for d in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(d)])
"""


def test_a_rank_that_never_sets_its_device_wakes_no_other() -> None:
    """Everything of it lies on cuda:1. A context on cuda:0 would cost half a gigabyte there, of every rank."""
    result = run_script(ON_SECOND)
    assert result.returncode == 0, result.stderr
    assert "woken up: [1]" in result.stdout


def test_two_devices_of_which_one_is_behind(open_run: Any) -> None:
    """Each has its own streams: what one is late with holds up nothing on the other, and the snapshot is whole."""

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
    """Views, other orders in memory and narrow types, none of which an optimizer steps; all are overwritten at once."""

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
def test_views_and_narrow_types(open_run: Any, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """What is not one piece of memory goes through temporaries, which nobody else gets before they are copied; so does
    what lies over the end of what is page-locked in one call."""
    monkeypatch.setattr(staging_fill, "LOCK", piece)
    run = kinds()
    with simulated.turned(d2h_gbs=SLOW):
        assert check_boundaries(open_run(run.state), run, 8) == []


def test_strided_tensors_take_one_piece_of_device_memory(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that lie transposed, or channels last, are put in order a piece at a time, however large they are."""
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


def test_moments_on_the_host_of_weights_on_the_device(open_run: Any) -> None:
    """An optimizer that is offloaded: host and device are copied side by side, and both are of one moment."""

    def build() -> State:
        model = nn.Linear(SIDE, SIDE, device="cuda")
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            optim.state[p]["moment"] = torch.zeros(p.shape, pin_memory=True)
        return {"model": model, "optim": optim}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()
        for p in state["model"].parameters():
            state["optim"].state[p]["moment"].add_(p.grad.cpu())

    run = Run(build, move)
    with simulated.turned(d2h_gbs=SLOW):
        assert check_boundaries(open_run(run.state), run, 8) == []
    assert {s["moment"].device.type for s in run.twin["optim"].state.values()} == {"cpu"}
