"""A tensor with elements outside its storage is refused by name. Unallocated memory is never read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import ckpt
from ckpt.core.snapshot import fill
from ckpt.core.snapshot.fill import SlotDigests
from ckpt.core.state.capture import Capture
from ckpt.core.state.tensors import as_bytes, memory_of
from ckpt.dcp.rank_write import dense
from ckpt.errors import SaveError, StateError
from inside import Saved
from toy_states import State
from wrapped_toy import Quantised

FREED = r"needs \d+ bytes, and its storage has \d+"


def trained(size: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size))
    optim = torch.optim.Adam(net.parameters())
    net(torch.randn(3, size)).sum().backward()
    optim.step()
    return net, optim


def in_model(tensor: Callable[[Any, Any], Tensor]) -> tuple[State, Tensor]:
    net, optim = trained()
    return {"net": net, "optim": optim}, tensor(net, optim)


def of_view(offset: int) -> tuple[State, Tensor]:
    whole = torch.ones(100)
    return {"a": {"whole": whole, "view": whole[offset : offset + 10]}}, whole


def in_dtensor() -> tuple[State, Tensor]:
    mesh = init_device_mesh("cpu", (1,))
    found = distribute_tensor(torch.ones(8), mesh, [Replicate()])
    return {"w": found}, found._local_tensor


def in_wrapper() -> tuple[State, Tensor]:
    found = Quantised.of(torch.ones(6, 6))
    return {"w": found}, found.codes


def in_shards() -> tuple[State, Tensor]:
    found = torch.ones(8)
    return {"s": ckpt.state.Shards({"w": ckpt.state.Shard(found, (8,))})}, found


class Says:
    def __init__(self) -> None:
        self.tensor = torch.ones(8)

    def state_dict(self) -> State:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: State) -> None:
        self.tensor = state["tensor"]


def said() -> tuple[State, Tensor]:
    found = Says()
    return {"o": found}, found.tensor


def plain() -> tuple[State, Tensor]:
    found = torch.ones(1000)
    return {"w": found}, found


PLACES: dict[str, tuple[Callable[[], tuple[State, Tensor]], str]] = {
    "plain": (plain, "w"),
    "parameter": (lambda: in_model(lambda net, optim: net[0].weight), r"net\.0\.weight"),
    "buffer": (lambda: in_model(lambda net, optim: net[1].running_mean), r"net\.1\.running_mean"),
    "moment": (lambda: in_model(lambda net, optim: optim.state[net[0].weight]["exp_avg"]), r"optim\.state\..*exp_avg"),
    "view": (lambda: of_view(10), r"a\.(view|whole)"),
    "DTensor": (in_dtensor, "w"),
    "wrapper": (in_wrapper, r"w\.codes"),
    "shards": (in_shards, r"s\.w"),
    "object": (said, r"o\.tensor"),
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("one_rank")
def test_freed_tensor_is_refused_by_name_wherever_it_is(place: str, left: int) -> None:
    """It is refused in the first reading, later readings and a restore, and saved again after reallocation."""
    build, name = PLACES[place]
    state, tensor = build()
    capture = Capture(state)
    before = Saved(capture.read())
    size = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(left)
    for again in (capture, capture, Capture(state)):
        with pytest.raises(StateError, match=f"{name}: .*{FREED}"):
            again.read()
    with pytest.raises(StateError, match=f"{name}: .*{FREED}"):
        before.restore(state)
    tensor.untyped_storage().resize_(size)
    capture.read()
    Saved(capture.read()).restore(state)


def test_storage_that_shrank_at_its_old_address_is_detected() -> None:
    """The allocator may return the same address again."""
    for _ in range(100):
        tensor = torch.ones(256)
        capture = Capture({"net": holder(tensor)})
        capture.read()
        address = tensor.data_ptr()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(512)
        if tensor.data_ptr() == address:
            break
    else:
        pytest.skip("the allocator never gave the same address again")
    with pytest.raises(StateError, match=rf"net\.w: .*{FREED}"):
        capture.read()


def holder(tensor: Tensor) -> nn.Module:
    found = nn.Module()
    found.register_buffer("w", tensor)
    return found


def test_tensors_without_memory_of_their_own_are_refused() -> None:
    with pytest.raises(StateError, match=r"w: .*ZeroTensor.*clone"):
        Capture({"w": torch._efficientzerotensor((3,))}).read()  # type: ignore[attr-defined]

    def read(x: Tensor) -> Tensor:
        with pytest.raises(StateError, match=r"w: .*vmap"):
            Capture({"w": x}).read()
        return x

    torch.func.vmap(read)(torch.ones(2, 2))
    assert memory_of(torch.ones(0)) is None
    Capture({"empty": torch.ones(0), "none left": torch.ones(3)[3:]}).read()


def test_dcp_refuses_freed_tensors_by_name() -> None:
    for tensor in (torch.ones(1000), torch.ones(10, 100).t()):
        tensor.untyped_storage().resize_(40)
        with pytest.raises(StateError, match=f"w: .*{FREED}"):
            dense(tensor, "w")
    assert dense(torch.ones(1).expand(5), "w").tolist() == [1.0] * 5


def test_saving_leaves_storages_resizable(tmp_path: Path) -> None:
    """A buffer may grow after a save, or be freed and refilled."""
    net = holder(torch.ones(1 << 20))
    with ckpt.Checkpointer({"net": net}, tmp_path / "run", every=1) as cp:
        for step in range(1, 7):  # it is copied, then detected as unchanged
            cp.step(step)
            if step > 3:
                size = net.w.untyped_storage().nbytes()  # type: ignore[operator, union-attr]
                net.w.untyped_storage().resize_(size)  # type: ignore[operator, union-attr]
                net.w.resize_(net.w.numel() + 100)  # type: ignore[operator, union-attr]
                net.w.fill_(step)  # type: ignore[operator, union-attr]
        cp.save(7)
    assert ckpt.load(tmp_path / "run")["net.w"].tolist() == [6.0] * ((1 << 20) + 300)


@pytest.mark.parametrize("size", [100, 1500])
def test_tensor_freed_right_after_a_step_is_an_error(size: int, tmp_path: Path) -> None:
    """Tensors that only optimizers change are copied during training. torch does not free a tensor during a read."""
    net, optim = trained(size)
    weight: Any = net[0].weight  # type: ignore[index]
    with pytest.raises((StateError, SaveError, RuntimeError), match=r"net\.0\.weight|not resizable"):
        with ckpt.Checkpointer({"net": net, "optim": optim}, tmp_path / "run", every=1) as cp:
            cp.step(1)
            weight.untyped_storage().resize_(0)
            cp.step(2)


def test_copy_of_a_tensor_keeps_its_storage_from_being_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, begun, freed = torch.randn(1 << 20), torch.empty(1 << 20), threading.Event(), threading.Event()

    def slow(tensor: Tensor) -> Tensor:
        if tensor is target:  # the source has been opened
            begun.set()
            assert freed.wait(10)
        return as_bytes(tensor)

    monkeypatch.setattr(fill, "as_bytes", slow)
    digests = SlotDigests()
    digests.open(0, Capture({"w": source}).read().layout)
    copying = threading.Thread(target=digests.put, args=(0, target, source))
    copying.start()
    assert begun.wait(10)
    with pytest.raises(RuntimeError, match="not resizable"):
        source.untyped_storage().resize_(0)
    freed.set()
    copying.join()
    assert torch.equal(source, target)
