"""Tensors made of other tensors, as libraries of low-bit training have them, and an optimizer that uses them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import ckpt
from toy_states import State, freeze

BLOCK = 4
SIDE = 6
aten = torch.ops.aten


class Quantised(Tensor):
    """Numbers as bytes, with a scale for each block of them. Its context is plain: `label`, and the dtype it shows."""

    codes: Tensor
    scale: Tensor
    label: Any

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, label: Any, dtype: torch.dtype) -> Quantised:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor, label: Any, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.label = codes, scale, label

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.label, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Quantised:
        assert tuple(size) == tuple(inner["codes"].shape) and len(stride) == len(size)
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def of(cls, plain: Tensor, label: Any = "a") -> Quantised:
        codes = torch.zeros(plain.shape, dtype=torch.int8)
        made = cls(codes, torch.ones(-(-plain.numel() // BLOCK)), label, plain.dtype)
        made.store(plain)
        return made

    def store(self, plain: Tensor) -> None:
        flat = plain.detach().float().reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -plain.numel() % BLOCK)).view(-1, BLOCK)
        self.scale.copy_(blocks.abs().amax(1) / 127 + 1e-12)
        self.codes.copy_((blocks / self.scale[:, None]).round().reshape(-1)[: plain.numel()].view(self.codes.shape))

    def plain(self) -> Tensor:
        scales = self.scale.repeat_interleave(BLOCK)[: self.codes.numel()].view(self.codes.shape)
        return (self.codes.float() * scales).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            one = args[0]
            return cls(one.codes, one.scale, one.label, one.dtype)
        args_, kwargs_ = pytree.tree_map_only(Quantised, Quantised.plain, (args, kwargs or {}))
        found = func(*args_, **kwargs_)
        if func._schema.is_mutable and isinstance(args[0], Quantised):
            args[0].store(args_[0])
            return args[0]
        return found


class Other(Quantised):
    """The same, and another class."""


class Odd:
    """A value that cannot be saved as plain."""


class Shell(Tensor):
    """A wrapper around a wrapper and a plain tensor, with a context that is not plain."""

    inner: Quantised
    shift: Tensor
    odd: Any

    @staticmethod
    def __new__(cls, inner: Quantised, shift: Tensor, odd: Any = None) -> Shell:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, inner: Quantised, shift: Tensor, odd: Any = None) -> None:
        self.inner, self.shift, self.odd = inner, shift, odd

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner", "shift"], {"odd": self.odd}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Shell:
        return cls(inner["inner"], inner["shift"], context["odd"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].inner, args[0].shift, args[0].odd)
        raise NotImplementedError(func)


def here(tensor: Any) -> Any:
    """Return this rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Adam8(torch.optim.Optimizer):
    """Momentum that is kept quantised, made at the first step."""

    def __init__(self, params: Any, lr: float = 0.1, label: Any = (1, "m")) -> None:
        super().__init__(params, {"lr": lr})
        self.label = label

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    mean = Quantised.of(torch.zeros(here(p).shape), self.label)
                    if isinstance(p, DTensor):  # around it, not around a view of it, of which this class knows nothing
                        state["exp_avg"] = torch.zeros_like(p)
                        state["exp_avg"]._local_tensor = mean
                    else:
                        state["exp_avg"] = mean
                state["step"] += 1
                moved = here(state["exp_avg"]).plain().lerp(here(p.grad), 0.1)
                here(state["exp_avg"]).copy_(moved)
                here(p).add_(moved, alpha=-group["lr"])


class Net(nn.Module):
    """Weights that are trained, and a parameter and buffers that are made of others."""

    table: Tensor

    def __init__(self, make: Callable[[Tensor], Tensor] = Quantised.of) -> None:
        super().__init__()
        self.body = nn.Linear(SIDE, SIDE)
        self.frozen = nn.Parameter(make(torch.randn(SIDE, SIDE)), requires_grad=False)
        self.register_buffer("table", make(torch.randn(3, SIDE)))

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x) @ self.frozen.plain() + self.table.plain().sum(0)  # type: ignore[attr-defined]
        assert isinstance(found, Tensor)
        return found


def build(seed: int, **settings: Any) -> State:
    torch.manual_seed(seed)
    net = Net()
    loose = [Quantised.of(torch.randn(5)), {"shell": Shell(Quantised.of(torch.randn(4)), torch.randn(4))}]
    return {"net": net, "optim": Adam8(net.body.parameters(), **settings), "mine": loose}


def train(state: State, step: int) -> None:
    torch.manual_seed(step)
    state["optim"].zero_grad()
    state["net"](torch.randn(4, SIDE)).pow(2).mean().backward()
    state["optim"].step()
    with torch.no_grad():
        state["net"].frozen.copy_(torch.randn(SIDE, SIDE))
        state["mine"][0].codes.fill_(step)
        state["mine"][1]["shell"].inner.copy_(torch.randn(4))


def everything(state: State) -> Any:
    """By value, and the moments by the names of their places."""
    return freeze([state["net"], state["optim"], state["mine"]])


def sharded(seed: int, mesh: Any) -> State:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(SIDE, 8), nn.Tanh(), nn.Linear(8, SIDE))
    fully_shard(net, mesh=mesh)
    return {"net": net, "optim": Adam8(net.parameters())}


def train_sharded(state: State, step: int) -> None:
    torch.manual_seed(step)
    state["optim"].zero_grad()
    state["net"](torch.randn(4, SIDE)).pow(2).mean().backward()
    state["optim"].step()


def shares(state: State) -> Any:
    """Return this rank's part of the whole state, by value."""
    moments = [(key, freeze(here(v))) for one in state["optim"].state.values() for key, v in sorted(one.items())]
    return [freeze(here(p)) for p in state["net"].parameters()], moments


def on_ranks(run: str) -> dict[str, Any]:
    """Restore and continue, save, and train a twin that restored the result."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state, twin = sharded(0, mesh), sharded(1, mesh)
    try:
        with ckpt.Checkpointer(state, run) as cp:
            for step in range(cp.restore(default=0) + 1, 4):
                train_sharded(state, step)
                cp.step(step)
    except ckpt.errors.MismatchError as error:
        return {"refused": str(error)}
    with ckpt.Checkpointer(twin, run) as cp:
        step, there = cp.restore(), shares(twin) == shares(state)
        moment = twin["optim"].state[twin["net"][0].weight]["exp_avg"]
    for one in (state, twin):
        train_sharded(one, 9)
    kinds = [type(moment).__name__, type(here(moment)).__name__]
    return {"step": step, "exact": there, "goes_on": shares(twin) == shares(state), "kinds": kinds}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps({"mode": "wrapped", **on_ranks(sys.argv[1])}), flush=True)
    dist.destroy_process_group()
