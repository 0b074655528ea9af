"""Tensors that a restore creates: memory layout and source of values."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt
from ckpt.core.state.tensors import order_of
from parallel import free_port, launch, reports
from processes import run_python

State = dict[str, Any]
Make = Callable[[Any], torch.optim.Optimizer]


class OwnLoader(torch.optim.AdamW):
    """Save through `state_dict()`, as optimizers with state elsewhere do."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)


class Factored(torch.optim.Optimizer):
    """Keep tensors of two memory layouts, one of another shape, and a list of tensors for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"]):
            state = self.state[param]
            if not state:
                state["sum"] = torch.zeros(param.shape)
                if param.dim() == 4:
                    state["last"] = torch.zeros(param.shape).to(memory_format=torch.channels_last)
                state["rows"] = torch.zeros(param.shape[0])
                state["past"] = [torch.zeros_like(param)]
            state["sum"] += param.grad
            state["rows"] += param.grad.flatten(1).sum(1) if param.dim() > 1 else param.grad
            state["past"][0] += param.grad
            param -= 0.1 * (param.grad + state["past"][0])


OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "own loader": lambda p: OwnLoader(p, 1e-2, fused=True),
    "factored": Factored,
}


class Layouts(nn.Module):
    """Weights in every memory layout of torch's own models."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.volume = nn.Conv3d(2, 3, 2).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.point = nn.Conv2d(4, 3, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.deep = nn.Conv2d(3, 3, 3, groups=3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wide = nn.Conv2d(3, 4, 3)
        self.plain = nn.Linear(3, 2)


def trained(make: Make, steps: int) -> State:
    torch.manual_seed(0)
    model = Layouts()
    optim = make(model.parameters())
    for i in range(steps):
        step(model, optim, i)
    return {"model": model, "optim": optim}


def step(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optim.step()


def layouts(value: Any, path: str = "") -> dict[str, Any]:
    """Return the strides of each tensor inside state_dict()s."""
    if isinstance(value, Tensor):
        return {path: value.stride()}
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {k: v for key, one in inner for k, v in layouts(one, f"{path}.{key}").items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_get_their_saved_strides(name: str, tmp_path: Path) -> None:
    """A fresh optimizer restores moments with the original strides, and both continue equally."""
    state, twin = trained(OPTIMIZERS[name], 2), trained(OPTIMIZERS[name], 0)
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        cp.save(2).wait_durable()
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        assert cp.restore() == 2
        wanted = layouts(state["optim"].state_dict()["state"])
        assert wanted.items() <= layouts(twin["optim"].state_dict()["state"]).items()
        for one in (state, twin):
            step(one["model"], one["optim"], 7)
    assert all(map(torch.equal, state["model"].parameters(), twin["model"].parameters()))


@pytest.mark.parametrize("through", ["load", "export", "import of other strides"])
def test_loaded_and_exported_tensors_keep_their_strides(through: str, tmp_path: Path) -> None:
    """`ckpt.load`, an exported file and an imported one return tensors in the saved memory layout."""
    state = trained(OPTIMIZERS["fused AdamW"], 2)
    run, file, again = tmp_path / "run", tmp_path / "out.pt", tmp_path / "again"
    plain = {"ema": state["model"].conv.weight.detach().clone()}
    with ckpt.Checkpointer(state | plain, run) as cp:
        cp.save(2).wait_durable()
    if through == "import of other strides":
        torch.save({"optim": state["optim"].state_dict(), "model": state["model"].state_dict(), **plain}, file)
        command("import", file, again, "--step", "2")
    if through == "export":
        command("export", run, "--to", file, "--format", "torch")
        found = torch.load(file, weights_only=True)
        wanted = {"optim": state["optim"].state_dict(), "model": state["model"].state_dict(), **plain}
        assert layouts(found["optim"]["state"]) == layouts(wanted["optim"]["state"])
        assert torch.equal(found["ema"], plain["ema"]) and found["ema"].stride() == plain["ema"].stride()
        twin = trained(OPTIMIZERS["fused AdamW"], 0)
        for key, one in twin.items():
            one.load_state_dict(found[key])
        for one in (state, twin):
            step(one["model"], one["optim"], 7)
        assert all(map(torch.equal, state["model"].parameters(), twin["model"].parameters()))
    else:
        loaded = ckpt.load(run if through == "load" else again)
        names = {name: param for name, param in state["model"].named_parameters() if name != "gaps"}
        for name, param in names.items():
            moment = state["optim"].state[param]["exp_avg"]
            found = loaded[f"optim.state.model.{name}.exp_avg"]
            assert torch.equal(found, moment), name
            longer = [
                dim for dim, size in enumerate(param.shape) if size > 1
            ]  # strides of dimensions of length 1 have no effect
            strides = [[one.stride()[dim] for dim in longer] for one in (found, torch.zeros_like(param))]
            assert strides[0] == strides[1], name
        assert loaded["ema"].stride() == plain["ema"].stride() and torch.equal(loaded["ema"], plain["ema"])


@pytest.mark.parametrize("shape", [(4, 1, 3, 3), (4, 3, 1, 1), (1, 1, 1, 1)])
def test_layout_of_a_weight_with_a_dimension_of_length_1_is_kept(shape: tuple[int, ...]) -> None:
    """Such a dimension has the stride of another one. torch selects convolutions by all strides."""
    for form in (torch.channels_last, torch.contiguous_format):
        weight = torch.empty(shape, memory_format=form)
        made = torch.empty_permuted(shape, tuple(order_of(weight) or range(4)))
        assert made.stride() == weight.stride()


def command(*arguments: object) -> None:
    run_python([sys.executable, "-m", "ckpt", *map(str, arguments)], check=True, capture_output=True, timeout=100)


# -- several ranks --


class Counting(torch.optim.SGD):
    """Keep a plain number for each parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param]["seen"] = self.state[param].get("seen", 0.0) + float(param.grad.sum())


class Past(torch.optim.SGD):
    """Keep a list of tensors for each parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param].setdefault("past", []).append(param.grad.clone())


DIFFERING: dict[str, tuple[Make, str]] = {
    "AdamW": (
        lambda p: torch.optim.AdamW(p, 0.0),
        "optim.state.net.weight.exp_avg has different values on ranks 0, 1: ",
    ),
    "own loader": (lambda p: OwnLoader(p, 0.0), "optim.state.0.exp_avg has different values on ranks 0, 1: "),
    "number": (lambda p: Counting(p, 0.0), "optim.state.net.weight.seen has different values on ranks 0, 1: "),
    "list": (lambda p: Past(p, 0.0), "optim.state.net.weight.past.0 has different values on ranks 0, 1: "),
}


def differing(make: Make, rank: int, steps: int) -> State:
    net = nn.Linear(4, 4)
    nn.init.ones_(net.weight)
    optim = make([net.weight])
    for _ in range(steps):
        net.weight.grad = torch.full((4, 4), 1.0 + rank)
        optim.step()
    nn.init.zeros_(net.bias)
    return {"net": net, "optim": optim}


def save_differing() -> None:
    """Save equal weights and different moments on two ranks. Restore them into a sharded model."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    for name, (make, _) in DIFFERING.items():
        with ckpt.Checkpointer(differing(make, rank, 2), [ckpt.Tier(folder / name)], memory=None) as cp:
            cp.save(2).wait_durable()
        twin = differing(make, rank, 0)
        with ckpt.Checkpointer(twin, [ckpt.Tier(folder / name)], memory=None) as cp:
            cp.restore()
        moment = str(layouts(twin["optim"].state_dict()["state"]))
        print(json.dumps({"mode": name, "state": repr(twin["optim"].state_dict()["state"]), "moment": moment}))

    def sharded(steps: int) -> State:
        torch.manual_seed(0)
        model, mesh = nn.Module(), init_device_mesh("cpu", (2,))
        for dim, size in enumerate(((5, 3, 3, 3), (4, 6, 2, 2))):
            weight = torch.randn(size).to(memory_format=torch.channels_last)
            model.register_parameter(f"w{dim}", nn.Parameter(DTensor.from_local(weight, mesh, [Shard(dim)])))
        optim = torch.optim.AdamW(model.parameters(), 1e-2)
        for i in range(steps):
            step(model, optim, i)
        return {"model": model, "optim": optim}

    state, twin = sharded(2), sharded(0)
    with ckpt.Checkpointer(state, [ckpt.Tier(folder / "sharded")], memory=None) as cp:
        cp.save(2).wait_durable()
    with ckpt.Checkpointer(twin, [ckpt.Tier(folder / "sharded")], memory=None) as cp:
        cp.restore()
    strides = [
        [one["optim"].state[p]["exp_avg"]._local_tensor.stride() for p in one["model"].parameters()]
        for one in (state, twin)
    ]
    print(json.dumps({"mode": "sharded", "saved": strides[0], "restored": strides[1]}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("ranks")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_created as t; t.save_differing()"
    )
    return folder, reports(launch(2, code, folder, port=free_port()))


@pytest.mark.parametrize("name", DIFFERING)
def test_differing_moments_are_refused_on_other_numbers_of_ranks(name: str, saved_by_two: Any) -> None:
    """Fresh and stepped optimizers are refused alike. With strict=False the parameter starts without state.

    On the same number of ranks each rank gets its own moments."""
    folder, said = saved_by_two
    make, refusal = DIFFERING[name]
    assert said[name][0]["state"] != said[name][1]["state"] and "tensor" in said[name][0]["state"] + "tensor"
    for steps in (0, 1):
        state = differing(make, 0, steps)
        before = repr(state["optim"].state_dict())
        with ckpt.Checkpointer(state, folder / name) as cp:
            with pytest.raises(ckpt.errors.MismatchError, match=refusal):
                cp.restore()
            assert repr(state["optim"].state_dict()) == before
    state = differing(make, 0, 0)
    with ckpt.Checkpointer(state, folder / name) as cp:
        assert cp.restore(strict=False) == 2
        assert cp.last_restore is not None and any(
            "has different values on ranks 0, 1: " in line for line in cp.last_restore.left_out
        )
    assert not state["optim"].state_dict()["state"]


def test_sharded_moments_get_the_strides_of_their_parameters(saved_by_two: Any) -> None:
    """The local shards belong to channels_last DTensors. FSDP itself refuses such parameters."""
    for one in saved_by_two[1]["sharded"]:
        assert one["saved"] == one["restored"] and one["saved"][0] == [27, 1, 9, 3]
