"""The same promises with an accelerator: `pytest -m gpu`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import inside
from boundaries import Run, check_boundaries, gradients, open_run, read_back
from processes import eventually, run_script
from toy_states import State, differences, fill, freeze

__all__ = ["open_run"]  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

# 64 MiB a square: its copy to the host takes milliseconds, an update of it microseconds. A simulated device is slower.
LARGE = int(os.environ.get("GPU_TEST_SIDE", "4096"))
LONG = 2_000_000_000  # cycles, about a second: whatever does not wait for such a kernel is long over when it ends

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")


class Spins:
    """Long kernels in front of copies, on the stream that copies; `under_way` while the last one has not ended."""

    def __init__(self) -> None:
        self.eager = self.overlapped = False  # which of the two copies of a snapshot to hold up
        self.ends: list[torch.cuda.Event] = []

    @property
    def under_way(self) -> bool:
        return bool(self.ends) and not self.ends[-1].query()


@pytest.fixture
def spins(monkeypatch: pytest.MonkeyPatch) -> Spins:
    """Copies that begin late, on the device, as behind other traffic: who does not wait for them comes first."""
    spins = Spins()

    def late(streams: list[Any], beside_training: bool) -> None:
        for stream in streams if (spins.overlapped if beside_training else spins.eager) else ():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG)
            spins.ends.append(stream.record_event())

    inside.before_copies(monkeypatch, late)
    return spins


def ready(cp: ckpt.Checkpointer, run: Run) -> Any:
    """One step saved, so that memory is there, and another one done; the boundary behind it."""
    run.move(run.state, 1)
    cp.save(1).wait_staged(60.0)
    run.move(run.state, 2)
    return freeze(run.state)


def adamw(**settings: Any) -> Run:
    def build() -> State:
        model = nn.Linear(LARGE, LARGE, device="cuda")
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1, **settings), "rng": ckpt.RNG()}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()

    return Run(build, move)


@pytest.mark.parametrize("dtype", [d for d in inside.DTYPES.values() if "float4" not in str(d)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_returns(dtype: torch.dtype) -> None:
    """Tensors on and off the device, strided and empty, return with the same bytes and device."""

    def build(seed: int) -> State:
        host = [fill(torch.empty(shape, dtype=dtype), seed + i) for i, shape in enumerate([(3, 5), (), (0, 2)])]
        device = [t.cuda() for t in host]
        return {"host": host, "device": device, "turned": {"t": device[0].t()}}

    state, twin = build(1), build(50)
    wanted = freeze(state)
    inside.save_and_restore(state, twin)
    assert differences(freeze(twin), wanted) == []
    assert {t.device.type for t in twin["device"]} == {"cuda"} and {t.device.type for t in twin["host"]} == {"cpu"}


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_snapshot_has_no_later_updates_if_training_continues_immediately(settings: Any, open_run: Any) -> None:
    """Updates are queued right behind step(), without the host waiting: every snapshot is its boundary."""
    run = adamw(**settings)
    cp = open_run(run.state)
    assert check_boundaries(cp, run, 20) == []


def test_negative_control_without_waiting_the_update_leaks_in(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the compute stream does not wait for the copy, fused updates tear snapshots."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    inside.let_updates_pass(monkeypatch)
    assert check_boundaries(cp, run, 20) != []


def test_the_copy_begins_after_the_kernels_of_the_step(open_run: Any) -> None:
    """The device is far behind the host when step() is called: the snapshot holds what the update is going to write."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    before = ready(cp, run)
    for step in range(3, 6):
        torch.cuda._sleep(LONG)
        run.move(run.state, step)
        updated = torch.cuda.current_stream().record_event()
        save = cp.step(step)
        assert not updated.query(), "the update had ended: this shows nothing"
        save.wait_staged(60.0)
        after = freeze(run.state)
        assert differences(read_back(cp, step, run.twin), after) == []
        assert differences(after, before)
        before = after


def test_negative_control_a_copy_that_does_not_wait_reads_the_past(
    open_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With events of idle streams, the whole snapshot is the step before."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    before = ready(cp, run)
    inside.copy_before_the_step_has_ended(monkeypatch)
    inside.check_no_copies(monkeypatch)  # else it is noticed, and dropped
    torch.cuda._sleep(LONG)
    run.move(run.state, 3)
    updated = torch.cuda.current_stream().record_event()
    cp.step(3).wait_staged(60.0)
    assert not updated.query(), "the copy waited all the same"
    torch.cuda.synchronize()
    snapshot = read_back(cp, 3, run.twin)
    assert differences(snapshot, before) == []
    assert differences(snapshot, freeze(run.state))


def test_updates_wait_for_the_copy_and_the_host_does_not(open_run: Any, spins: Spins) -> None:
    """The copy begins a second late. The update is queued in that time, and runs after it."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    spins.overlapped = True
    save = cp.step(2)
    run.move(run.state, 3)
    assert eventually(lambda: spins.under_way), "the host has waited for the copy"
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []
    assert differences(freeze(run.state), boundary)


def test_negative_control_an_update_that_does_not_wait_is_in_the_snapshot(
    open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only the host waits for the copy to be queued, the update runs first."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    inside.let_updates_pass(monkeypatch, until="queued")
    inside.check_no_copies(monkeypatch, nor_versions=True)  # else it is noticed, and dropped
    spins.overlapped = True
    save = cp.step(2)
    run.move(run.state, 3)
    assert eventually(lambda: spins.under_way)
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary)


def test_negative_control_a_host_that_waits_is_noticed(
    open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the copy itself, as is right without a device, lets the late copy end."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    ready(cp, run)
    inside.let_updates_pass(monkeypatch, until="copied")
    spins.overlapped = True
    cp.step(2)
    run.move(run.state, 3)
    assert spins.ends and not spins.under_way


def test_the_host_runs_ahead_of_the_device_by_more_than_a_step(open_run: Any) -> None:
    """Even if the last snapshot is not copied yet, the next step() does not wait, and both snapshots are right."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    torch.cuda._sleep(LONG)
    behind = torch.cuda.current_stream().record_event()
    saves = [cp.step(2)]
    run.move(run.state, 3)
    saves.append(cp.step(3))
    assert not behind.query(), "step() has waited for the copy before"
    for save in saves:
        save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []
    assert differences(read_back(cp, 3, run.twin), freeze(run.state)) == []


def buffers() -> Run:
    """Large tensors that no optimizer steps, inside and outside a module; `move` overwrites them immediately."""

    def build() -> State:
        model = nn.Linear(8, 8, device="cuda")
        model.register_buffer("mean", torch.zeros(LARGE, LARGE, device="cuda"))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optim": optim, "mine": {"t": torch.zeros(LARGE, LARGE, device="cuda")}}

    def move(state: State, step: int) -> None:
        state["model"].mean.fill_(float(step))
        state["mine"]["t"].data.fill_(float(step))  # leaves no trace in version counters
        gradients(state["model"], abs(step))
        state["optim"].step()

    return Run(build, move)


@pytest.mark.parametrize("clones", [True, False])
def test_buffers_may_be_overwritten_immediately(
    open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch, clones: bool
) -> None:
    """Unguarded tensors are copied a second late: from clones, or before the user's next kernels. The host continues
    either way."""
    inside.clone_at_most(monkeypatch, 1 << 40 if clones else 0)
    run = buffers()
    cp = open_run(run.state)
    boundary = ready(cp, run)
    spins.eager = True
    save = cp.step(2)
    run.state["model"].mean.fill_(-1.0)
    run.state["mine"]["t"].data.fill_(-1.0)
    assert not spins.ends or spins.under_way, "step() has waited for the copy"
    save.wait_staged(60.0)
    assert spins.ends, "nothing was held up"
    assert differences(read_back(cp, 2, run.twin), boundary) == []
    assert run.state["model"].mean[0, 0].item() == -1.0


def test_negative_control_buffers_are_overwritten_if_the_stream_does_not_wait(
    open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another stream than the caller's waits for the copy, the snapshot contains later values."""
    inside.clone_at_most(monkeypatch, 0)
    run = buffers()
    cp = open_run(run.state)
    boundary = ready(cp, run)
    inside.hold_other_streams(monkeypatch)
    spins.eager = True
    save = cp.step(2)
    run.state["model"].mean.fill_(-1.0)
    run.state["mine"]["t"].data.fill_(-1.0)
    assert eventually(lambda: spins.under_way)
    save.wait_staged(60.0)
    found = "".join(differences(read_back(cp, 2, run.twin), boundary))
    assert "mean" in found and "mine" in found


def test_negative_control_buffers_are_overwritten_if_they_are_not_cloned(
    open_run: Any, spins: Spins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the clones that keep out what comes later."""
    inside.clone_nothing(monkeypatch)
    run = buffers()
    cp = open_run(run.state)
    boundary = ready(cp, run)
    spins.eager = True
    save = cp.step(2)
    run.state["model"].mean.fill_(-1.0)
    run.state["mine"]["t"].data.fill_(-1.0)
    assert eventually(lambda: spins.under_way)
    save.wait_staged(60.0)
    found = "".join(differences(read_back(cp, 2, run.twin), boundary))
    assert "mean" in found and "mine" in found


def test_every_stream_that_updates_waits(open_run: Any, spins: Spins) -> None:
    """Two optimizers, each on a stream of its own: the second one waits for the copy as well."""

    def build() -> State:
        models = [nn.Linear(LARGE, LARGE, device="cuda") for _ in range(2)]
        return {"nets": models, "optims": [torch.optim.AdamW(m.parameters(), fused=True) for m in models]}

    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def move(state: State, step: int) -> None:
        for net, optim, stream in zip(state["nets"], state["optims"], streams, strict=True):
            with torch.cuda.stream(stream):
                gradients(net, abs(step))
                optim.step()

    run = Run(build, move)
    torch.cuda.synchronize()
    cp = open_run(run.state)
    run.move(run.state, 1)
    torch.cuda.synchronize()
    cp.save(1).wait_staged(60.0)
    run.move(run.state, 2)
    torch.cuda.synchronize()
    boundary = freeze(run.state)
    spins.overlapped = True
    save = cp.step(2)
    run.move(run.state, 3)
    assert eventually(lambda: spins.under_way)
    save.wait_staged(60.0)
    torch.cuda.synchronize()
    assert differences(read_back(cp, 2, run.twin), boundary) == []


def test_memory_that_is_freed_long_before_it_is_copied_is_not_reused(open_run: Any, spins: Spins) -> None:
    """Weights are replaced right after step(), and what the allocator then gives out is filled: the copy is late."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    boundary = ready(cp, run)
    spins.eager = spins.overlapped = True
    save = cp.step(2)
    for p in run.state["model"].parameters():
        p.data = torch.full_like(p, 7.0)
    run.state["optim"].state.clear()
    filled = [torch.full((LARGE, LARGE), 9.0, device="cuda") for _ in range(4)]
    assert eventually(lambda: spins.under_way)
    save.wait_staged(60.0)
    assert differences(read_back(cp, 2, run.twin), boundary) == []
    del filled


def test_a_refusal_to_lock_memory_does_not_come_up_later(
    open_run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps the last error of a thread, and the next kernel's check would raise it: copying strided tensors."""
    taken: list[int] = []

    def take(address: int, size: int) -> None:
        if not taken and int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
            taken.append(address)  # so that the next try is refused

    inside.before_pages_are_locked(monkeypatch, take)
    state: State = {"turned": torch.randn(LARGE, 64, device="cuda").t(), "plain": torch.randn(9, device="cuda")}
    twin: State = {"turned": torch.zeros(LARGE, 64, device="cuda").t(), "plain": torch.zeros(9, device="cuda")}
    cp = open_run(state)
    try:
        cp.save(1).wait_staged(60.0)
        assert eventually(lambda: "could not page-lock" in caplog.text)
        assert differences(read_back(cp, 1, twin), freeze(state)) == []
    finally:
        for address in taken:
            torch.cuda.cudart().cudaHostUnregister(address)


@two_devices
def test_states_on_two_devices(open_run: Any) -> None:
    """Parts of a model on each: both streams are waited for, and wait."""

    def build() -> State:
        model = nn.ModuleList([nn.Linear(LARGE, LARGE, device=f"cuda:{i}") for i in range(2)])
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), fused=True)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()

    run = Run(build, move)
    assert check_boundaries(open_run(run.state), run, 10) == []


ON_SECOND = """
import torch
from torch import nn
import ckpt, inside
from processes import eventually
torch.cuda.set_device(1)
model = nn.Linear(512, 512, device="cuda")
optim = torch.optim.AdamW(model.parameters(), fused=True)
with ckpt.Checkpointer({"model": model, "optim": optim}, options=ckpt.Options(name="second")) as cp:
    cp.restore(default=0)
    for step in range(1, 4):
        model(torch.ones(2, 512, device="cuda")).sum().backward()
        optim.step()
        cp.save(step).wait_staged(60.0)
    slots = [torch.frombuffer(slot, dtype=torch.uint8) for slot in inside.slots_of(cp)[:2]]
    assert eventually(lambda: all(slot.is_pinned() for slot in slots))
    del slots
print("first device used:", torch._C._cuda_hasPrimaryContext(0))
"""


@two_devices
def test_a_rank_uses_no_other_device_than_its_own() -> None:
    """The staging thread begins with device 0, as any thread does: it must not take memory there."""
    result = run_script(ON_SECOND)
    assert result.returncode == 0, result.stderr
    assert "first device used: False" in result.stdout


def test_arenas_are_page_locked(open_run: Any) -> None:
    """Every slot is soon registered with the driver, so copies are asynchronous; at the end it is released."""
    run = adamw(fused=True)
    cp = open_run(run.state)
    run.move(run.state, 1)
    save = cp.save(1)
    save.wait_staged(60.0)
    slots = [torch.frombuffer(slot, dtype=torch.uint8) for slot in inside.slots_of(cp)]
    assert eventually(lambda: all(slot.is_pinned() and slot[-1:].is_pinned() for slot in slots))
    slots.clear()
    cp.close()
    assert inside.page_locks(cp) == {}


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
    guarded = inside.guarded(cp)
    assert not any(guarded[name] for name in guarded if name.startswith(("model.", "optim.state")))
    for step in range(1, 16):
        graph.replay()
        boundary = freeze(state)
        save = cp.save(step)
        graph.replay()
        save.wait_staged(60.0)
        assert differences(read_back(cp, step, twin), boundary) == []
    pointers = [t.data_ptr() for values in optim.state.values() for t in values.values()]
    rate = optim.param_groups[0]["lr"]
    cp.restore()
    assert [t.data_ptr() for values in optim.state.values() for t in values.values()] == pointers
    assert optim.param_groups[0]["lr"] is rate  # the graph reads this very tensor
    assert differences(freeze(state), boundary) == []
