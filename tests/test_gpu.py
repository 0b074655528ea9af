"""The same promises with an accelerator: `pytest -m gpu`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_staging import Run, check_boundaries, close, gradients, read_back
from test_state import Saved, State, differences, fill, freeze
from torch import nn

import ckpt
from ckpt.stage import Stager
from ckpt.state import Capture
from ckpt.tensors import DTYPE_NAME

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

LARGE = 4096  # 64 MiB a square: its copy to the host takes milliseconds, an update of it microseconds


@pytest.fixture
def open_run() -> Iterator[Callable[..., ckpt.Checkpointer]]:
    """A Checkpointer in memory only, closed at the end whatever became of it."""
    with contextlib.ExitStack() as stack:

        def open_run(state: State, **settings: Any) -> ckpt.Checkpointer:
            cp = ckpt.Checkpointer(state, name="gpu", **settings)
            stack.callback(close, cp)
            cp.restore(default=0)
            return cp

        yield open_run


def adamw(**settings: Any) -> Run:
    def build() -> State:
        model = nn.Linear(LARGE, LARGE, device="cuda")
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1, **settings), "rng": ckpt.RNG()}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()

    return Run(build, move)


@pytest.mark.parametrize("dtype", [d for d in DTYPE_NAME if "float4" not in str(d)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_returns(dtype: torch.dtype) -> None:
    """On the device and beside it, strided and empty: the bytes, and the device, are what they were."""

    def build(seed: int) -> State:
        host = [fill(torch.empty(shape, dtype=dtype), seed + i) for i, shape in enumerate([(3, 5), (), (0, 2)])]
        device = [t.cuda() for t in host]
        return {"host": host, "device": device, "turned": {"t": device[0].t()}}

    state, twin = build(1), build(50)
    wanted = freeze(state)
    Saved(Capture(state).read()).restore(twin)
    assert differences(freeze(twin), wanted) == []
    assert {t.device.type for t in twin["device"]} == {"cuda"} and {t.device.type for t in twin["host"]} == {"cpu"}


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_training_that_goes_on_at_once_never_leaks_in(settings: Any, open_run: Any) -> None:
    """Updates are queued right behind step(), without the host waiting: every snapshot is its boundary."""
    run = adamw(**settings)
    cp = open_run(run.state)
    assert check_boundaries(cp, run, 20) == []


def test_negative_control_without_waiting_the_update_leaks_in(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the compute stream does not wait for the copy, fused updates tear snapshots."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    monkeypatch.setattr(Stager, "before_update", lambda self, timeout_s=0.0: 0.0)
    assert check_boundaries(cp, run, 20) != []


def test_the_copy_begins_after_the_kernels_of_the_step(open_run: Any) -> None:
    """The update is still running when step() is called: the snapshot holds its result, not what was there before."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    for step in range(1, 6):
        torch.cuda._sleep(200_000_000)  # cycles: the device is far behind the host
        run.move(run.state, step)
        cp.save(step).staged(60.0)
        assert differences(read_back(cp, step, run.twin), freeze(run.state)) == []  # nothing was queued since


def test_negative_control_a_copy_that_does_not_wait_reads_the_past(
    open_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the event of the compute stream, the same test goes red."""
    run = adamw(fused=True)
    run.move(run.state, 1)
    cp = open_run(run.state)
    fill_slot = Stager._fill

    def hasty(self: Stager, arena: Any, slot: int, job: Any) -> None:
        fresh = torch.cuda.Stream()
        job.ready = {device: fresh.record_event() for device in job.ready}
        fill_slot(self, arena, slot, job)

    monkeypatch.setattr(Stager, "_fill", hasty)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    run.move(run.state, 2)
    cp.save(2).staged(60.0)
    assert differences(read_back(cp, 2, run.twin), freeze(run.state))


def test_the_host_does_not_wait_for_the_copy(open_run: Any) -> None:
    """The next update is queued while the device still sleeps in front of the copy: nothing blocks the host."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    run.move(run.state, 1)
    cp.save(1).staged(60.0)
    run.move(run.state, 2)
    torch.cuda.synchronize()
    behind = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    behind.record()
    cp.step(2)
    run.move(run.state, 3)
    assert not behind.query()


def test_arenas_are_page_locked(open_run: Any) -> None:
    """Every slot is known to the driver, so copies are asynchronous; and it is given up at the end."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    run.move(run.state, 1)
    save = cp.save(1)
    save.staged(60.0)
    arena = cp._stager.arena
    assert arena is not None
    slots = [torch.frombuffer(arena.data(slot), dtype=torch.uint8) for slot in range(arena.slots)]
    assert len(cp._stager._registered) == arena.slots and all(slot.is_pinned() for slot in slots)
    del slots
    cp.close()
    assert cp._stager._registered == []


def test_states_on_both_sides(open_run: Any) -> None:
    """A model on the device, an optimizer with its state on the host, buffers on both; restored where they were."""

    def build() -> State:
        model = nn.Sequential(nn.Linear(512, 512, device="cuda"), nn.Linear(512, 512))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optim": optim, "mine": {"host": torch.zeros(9), "device": torch.zeros(9).cuda()}}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        for p in state["model"].parameters():  # offloaded moments
            moment = state["optim"].state[p].setdefault("moment", torch.zeros(p.shape))
            moment.add_(p.grad.cpu())
        state["mine"]["host"] += step
        state["mine"]["device"] += step
        state["optim"].step()

    def offloaded(state: State) -> set[str]:
        return {s["moment"].device.type for s in state["optim"].state.values()}

    run = Run(build, move)
    cp = open_run(run.state)
    for step in range(1, 9):
        move(run.state, step)
        boundary = freeze(run.state)
        save = cp.save(step)
        save.staged(60.0)
        assert differences(read_back(cp, step, run.twin), boundary) == []
    assert offloaded(run.twin) == {"cpu"}
    assert run.twin["mine"]["device"].is_cuda and not run.twin["mine"]["host"].is_cuda


@pytest.mark.parametrize("settings", [{"fused": True}, {"capturable": True}, {"foreach": True}], ids=str)
def test_optimizer_state_is_created_where_torch_would_put_it(settings: Any) -> None:
    """Into an optimizer that never stepped: moments on the device, `step` where this kind of optimizer keeps it."""
    run = adamw(**settings)
    run.move(run.state, 1)
    wanted = freeze(run.state)
    Saved(Capture(run.state).read()).restore(run.twin)
    assert differences(freeze(run.twin), wanted) == []

    def devices(state: State) -> list[dict[str, str]]:
        return [{k: v.device.type for k, v in values.items()} for values in state["optim"].state.values()]

    assert devices(run.twin) == devices(run.state)


def test_an_optimizer_inside_a_graph_is_copied_eagerly_and_exactly(open_run: Any) -> None:
    """Replayed steps run no hooks. That is seen at the capture: from then on the copy comes before training."""

    def build() -> State:
        model = nn.Linear(LARGE, LARGE, device="cuda")
        rate = torch.tensor(0.1, device="cuda")
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)}

    state, twin = build(), build()
    optim = state["optim"]
    gradients(state["model"], 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optim.step()
    torch.cuda.current_stream().wait_stream(side)
    cp = open_run(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optim.step()
    reading = cp._capture.read()
    names = [s.name for s in reading.layout.tensors]
    assert not any(g for n, g in zip(names, reading.guarded, strict=True) if n.startswith(("model.", "optim.state")))
    for step in range(1, 16):
        graph.replay()
        boundary = freeze(state)
        save = cp.save(step)
        graph.replay()
        save.staged(60.0)
        assert differences(read_back(cp, step, twin), boundary) == []
    pointers = [t.data_ptr() for values in optim.state.values() for t in values.values()]
    rate = optim.param_groups[0]["lr"]
    cp.restore()
    assert [t.data_ptr() for values in optim.state.values() for t in values.values()] == pointers
    assert optim.param_groups[0]["lr"] is rate  # the graph reads this very tensor
    assert differences(freeze(state), boundary) == []


def test_saving_while_a_graph_is_captured_elsewhere(open_run: Any) -> None:
    """A capture in the user's thread and the staging thread's copies do not disturb each other."""
    run = adamw(fused=True)
    run.move(run.state, 1)
    cp = open_run(run.state)
    cp.save(1).staged(60.0)
    x, graph, outcome = torch.ones(64, 64, device="cuda"), torch.cuda.CUDAGraph(), list[Any]()
    run.move(run.state, 2)
    boundary = freeze(run.state)
    save = cp.step(2)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x @ x
    worker = threading.Thread(target=lambda: outcome.append(save.staged(60.0)))
    worker.start()
    worker.join(60.0)
    graph.replay()
    torch.cuda.synchronize()
    assert outcome and y[0, 0].item() == 64.0
    assert differences(read_back(cp, 2, run.twin), boundary) == []


def test_a_scaler_is_not_disturbed(open_run: Any) -> None:
    """GradScaler skips infinite steps as without us, and its scale and growth are in the snapshot."""

    def build() -> State:
        model = nn.Linear(64, 64, device="cuda")
        return {
            "model": model,
            "optim": torch.optim.AdamW(model.parameters(), fused=True),
            "scaler": torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3),
        }

    def move(state: State, step: int) -> None:
        with torch.autocast("cuda", torch.float16):
            x = torch.full((2, 64), float(step % 5), device="cuda")
            loss = state["model"](x).float().pow(2).mean() * (float("inf") if step % 4 == 0 else 1.0)
        state["optim"].zero_grad()
        state["scaler"].scale(loss).backward()
        state["scaler"].step(state["optim"])
        state["scaler"].update()

    run = Run(build, move)
    torch.manual_seed(0)
    alone = build()
    assert check_boundaries(open_run(run.state), run, 12) == []
    for step in range(1, 13):
        move(alone, step)
        move(alone, -step)
    assert differences(freeze(alone), freeze(run.state)) == []


def test_another_stream_trains(open_run: Any) -> None:
    """Training on a stream of the user's own: the copy waits for that one, and its updates wait for the copy."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert check_boundaries(cp, run, 15) == []


def test_memory_that_is_freed_while_it_is_copied_is_not_reused(open_run: Any) -> None:
    """The allocator may not hand out what a snapshot still reads: the state is replaced right after step()."""

    def build() -> State:
        model = nn.Linear(LARGE, LARGE, device="cuda")
        optim = torch.optim.SGD(model.parameters(), lr=0.1)  # so that the copy of the weights overlaps
        return {"mine": {"t": torch.zeros(LARGE, LARGE, device="cuda")}, "model": model, "optim": optim}

    def move(state: State, step: int) -> None:
        state["mine"]["t"] = torch.full((LARGE, LARGE), float(step), device="cuda")
        for p in state["model"].parameters():
            p.data = torch.full_like(p, float(step))

    run = Run(build, move)
    assert check_boundaries(open_run(run.state), run, 15) == []
