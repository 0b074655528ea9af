"""Nothing that trains is left out of a checkpoint without a word, and a save sends nothing between ranks.

RANK=0 WORLD_SIZE=2 … python -c 'import test_promise_state as t; t.main()' save|load ROOT KIND…    ranks of a small job
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt
import inside
from ckpt.errors import MismatchError
from parallel import free_port, launch, reports
from processes import REPO, run_script

State = dict[str, Any]
WIDTH, STEPS = 8, 3


# -- modules with hooks, optimizers that hold more than their state --


class Fused(nn.Module):
    """Three weights in one. Its hooks gather it, say the three apart, and put them together again."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.register_state_dict_post_hook(divide)
        self.register_load_state_dict_pre_hook(unite)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.wqkv).unflatten(-1, (3, -1)).sum(-2)


def divide(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
    fused = state.pop(prefix + "wqkv").detach()
    parts = (fused.full_tensor() if isinstance(fused, DTensor) else fused).chunk(3)
    for name, part in zip("qkv", parts, strict=True):
        if isinstance(fused, DTensor):
            part = distribute_tensor(part.contiguous(), fused.device_mesh, fused.placements, src_data_rank=None)
        state[f"{prefix}w{name}"] = part


def unite(module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
    parts = [state.pop(f"{prefix}w{name}") for name in "qkv"]
    state[prefix + "wqkv"] = torch.cat(parts)


class Scaled(nn.Linear):
    """Has extra state in addition to its weights, like low-precision layers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x) * (1 + self.seen / 8)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "scale": torch.tensor(self.seen / 8)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Summed(nn.Linear):
    """A hook that asks all ranks at every state_dict(), and changes nothing."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_state_dict_pre_hook(lambda *_: dist.all_reduce(torch.ones(1)))


def build(kind: str, seed: int = 0) -> State:
    torch.manual_seed(seed)
    if kind == "gpt":
        sys.path.insert(0, str(REPO / "examples"))
        import train_gpt

        return train_gpt.build(STEPS, seed)
    net: nn.Module = nn.Sequential(Fused(), Scaled(), nn.Linear(WIDTH, WIDTH))
    if kind == "sharded":
        for layer in net.children():
            fully_shard(layer)
        fully_shard(net)
    elif kind == "summed":
        net.append(Summed())
    if kind == "plain":
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    if kind in ("plain", "summed"):
        net = nn.parallel.DistributedDataParallel(net)
    return {"model": net, "optim": torch.optim.AdamW(net.parameters(), 1e-2)}


def train_step(state: State, step: int) -> float:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    state["optim"].zero_grad()
    if "sched" in state:  # the example's model reads bytes
        x = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(step))
        out = state["model"](x)
        loss = nn.functional.cross_entropy(out.flatten(0, 1), x.flatten())
    else:
        loss = (state["model"](x) - x).pow(2).mean()
    loss.backward()
    state["optim"].step()
    return loss.item()


class Counting(TorchDispatchMode):
    """Counts what is sent between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def save(kind: str, root: str) -> State:
    """Train and save every step. Return the messages between the ranks, and the loss of the step after."""
    state = build(kind)
    seen: list[str] = []
    with ckpt.Checkpointer(state, f"{root}/{kind}") as cp:
        cp.restore(default=0)
        for step in range(STEPS):
            train_step(state, step)
            with Counting() as counting:
                cp.step(step + 1)
            seen += counting.seen
        cp.save(STEPS).wait_durable()
    return {"collectives": seen, "loss": train_step(state, STEPS), "sent": control()}


def control() -> int:
    """Such a sum is seen."""
    with Counting() as counting:
        dist.all_reduce(torch.ones(1))
    return len(counting.seen)


def load(kind: str, root: str) -> State:
    state = build(kind, seed=1)
    with ckpt.Checkpointer(state, f"{root}/{kind}") as cp:
        step = cp.restore()
    return {"step": step, "loss": train_step(state, STEPS)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    action, root, *kinds = sys.argv[1:]
    for kind in kinds:
        try:
            result = {"save": save, "load": load}[action](kind, root)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"mode": kind, "rank": dist.get_rank(), **result}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# -- no collective in a step --

KINDS = ("gpt", "plain", "sharded", "summed")


def test_saving_sends_nothing_with_any_module_hooks(tmp_path: Path) -> None:
    """No step() or save sends anything between ranks, even with hooks that gather or reduce. A job of new processes
    continues with the same loss and the extra state."""
    code = "import test_promise_state as t; t.main()"
    saved = reports(launch(2, code, "save", tmp_path, *KINDS, port=free_port()))
    loaded = reports(launch(2, code, "load", tmp_path, *KINDS, port=free_port()))
    for kind in KINDS:
        for before, after in zip(saved[kind], loaded[kind], strict=True):
            assert before.get("error") is None is after.get("error"), (before, after)
            assert before["collectives"] == [] and before["sent"] == 1
            assert (after["step"], after["loss"]) == (STEPS, before["loss"])


class Counter(nn.Module):
    """Its hooks save what is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.zeros(3)), 0
        self.register_state_dict_post_hook(lambda m, s, p, _: s.update({p + "count": torch.tensor(m.count)}))
        self.register_load_state_dict_pre_hook(lambda m, s, p, *_: setattr(m, "count", int(s.pop(p + "count"))))


class Averaged(nn.Module):
    """Says its average instead of its weight; as much of it, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.average = [torch.zeros(3)]

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        found = super().state_dict(*args, prefix=prefix, **kwargs)
        found[prefix + "weight"] = self.average[0]
        return found

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.average[0].copy_(state[prefix + "weight"])


class Frozen(nn.Module):
    """Leaves its backbone out, which comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_state_dict_post_hook(leave_out)


def leave_out(module: Any, state: dict[str, Any], *_: object) -> None:
    for key in [key for key in state if "backbone" in key]:
        del state[key]


class Derived(nn.Module):
    """A hook that runs after loading keeps something that follows from the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.norm = self.weight.norm().item()
        self.register_load_state_dict_post_hook(lambda m, _: setattr(m, "norm", m.weight.norm().item()))


def restored(state: State, twin: State, tmp_path: Path) -> State:
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        cp.save(1).wait_durable()
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        assert cp.restore() == 1
    return twin


def test_module_entries_added_omitted_or_derived_are_restored(tmp_path: Path) -> None:
    """If hooks and methods change the saved entries, these are restored through them; all other entries directly."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = nn.ModuleDict(
            {"counter": Counter(), "averaged": Averaged(), "frozen": Frozen(), "derived": Derived(), "fused": Fused()}
        )
        with torch.no_grad():
            net["counter"].count, net["counter"].weight[:] = 5 * seed, 1.0 * seed
            net["averaged"].average[0][:] = 2.0 * seed
        return net

    net, twin = make(1), make(2)
    untouched = twin["frozen"].backbone.weight.detach().clone()  # type: ignore[index]
    restored({"net": net}, {"net": twin}, tmp_path)
    assert twin["counter"].count == 5 and twin["counter"].weight.tolist() == [1.0] * 3  # type: ignore[index]
    assert twin["averaged"].average[0].tolist() == [2.0] * 3  # type: ignore[index]
    assert torch.equal(twin["frozen"].head.weight, net["frozen"].head.weight)  # type: ignore[index]
    assert torch.equal(twin["frozen"].backbone.weight, untouched)  # type: ignore[index]
    assert twin["derived"].norm == net["derived"].norm  # type: ignore[index]
    assert torch.equal(twin["fused"].wqkv, net["fused"].wqkv)  # type: ignore[index]


# -- optimizers that keep their state elsewhere --


class Container(torch.optim.Optimizer):
    """Several optimizers that look like one. Its own state is empty."""

    def __init__(self, groups: list[list[nn.Parameter]]) -> None:
        self.optimizers = [torch.optim.AdamW(group, 1e-2) for group in groups]
        super().__init__([p for group in groups for p in group], {"lr": 1e-2})

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): one.state_dict() for i, one in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for i, one in enumerate(self.optimizers):
            one.load_state_dict(state_dict[str(i)])


RESUMED = """
import sys, torch, ckpt, test_promise_state as t
torch.set_num_threads(1)
kind, url, *rest = sys.argv[1:]
state = t.OPTIMIZED[kind](1)
with ckpt.Checkpointer(state, url) as cp:
    print(cp.restore())
    t.optimize(state, t.STEPS)
torch.save(t.numbers(state), rest[0])
"""


def contained(seed: int) -> State:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return {"model": net, "optim": Container([list(net[0].parameters()), list(net[2].parameters())])}


def mastered(seed: int) -> State:
    """A model in bfloat16, and fp32 masters that only the optimizer has."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    return {"model": net, "optim": torch.optim.AdamW(masters, 1e-4)}


def flattened(seed: int) -> State:
    """The masters of all parameters in one flat buffer, as ZeRO has them."""
    state = mastered(seed)
    (group,) = state["optim"].param_groups
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in group["params"]]))
    return {**state, "optim": torch.optim.AdamW([flat], 1e-4)}


class Around(torch.optim.Optimizer):
    """An optimizer around another, as the usual SAM: it leaves the weights as the memory that its own state holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)
            p.data = self.state[p]["old"]
        self.base.step()


def around(seed: int) -> State:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optim = Around(net.parameters())
    return {"optim": optim, "base": optim.base, "model": net}


OPTIMIZED: dict[str, Callable[[int], State]] = {
    "contained": contained,
    "mastered": mastered,
    "flattened": flattened,
    "around": around,
}


def optimize(state: State, step: int) -> None:
    """One step of training; masters get the model's gradients, and the model their values."""
    net, optim = state["model"], state["optim"]
    params = list(net.parameters())
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(params[0].dtype)
    net.zero_grad()
    (net(x) - x).pow(2).mean().backward()
    masters = [p for group in optim.param_groups for p in group["params"]]
    if masters[0] is params[0]:
        optim.step()
        return
    grads = [p.grad.float() for p in params]
    if len(masters) == 1:
        masters[0].grad = torch.cat([g.flatten() for g in grads])
    else:
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
    optim.step()
    values = torch.cat([m.detach().flatten() for m in masters]).split([p.numel() for p in params])
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            p.copy_(value.view_as(p))


def numbers(state: State) -> list[Tensor]:
    """Return all tensors that training changes."""
    optimizers = getattr(state["optim"], "optimizers", [one for key, one in state.items() if key != "model"])
    found = [*state["model"].parameters(), *(p for o in optimizers for g in o.param_groups for p in g["params"])]
    found += [t for o in optimizers for s in o.state.values() for t in s.values()]
    return [t.detach().clone() for t in found]


def goes_on_alike(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    state = OPTIMIZED[kind](0)
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        for step in range(STEPS):
            optimize(state, step)
            cp.step(step + 1)
        cp.save(STEPS).wait_durable()
        optimize(state, STEPS)
    done = run_script(RESUMED, kind, tmp_path / "run", tmp_path / "numbers.pt")
    assert done.stdout.split() == [str(STEPS)], done.stderr[-3000:]
    found = torch.load(tmp_path / "numbers.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(found, numbers(state), strict=True))


def test_wrapping_optimizer_continues_identically(tmp_path: Path) -> None:
    """Also if its own state has the memory of the weights when they are saved, but not at a new start."""
    goes_on_alike("around", tmp_path)


def test_optimizer_with_external_state_continues_identically(tmp_path: Path) -> None:
    """The contents of its own state_dict() are saved and loaded: the next step equals the undisturbed run's, bit for
    bit."""
    goes_on_alike("contained", tmp_path)


# -- parameters that only an optimizer holds --


@pytest.mark.parametrize("kind", ["mastered", "flattened"])
def test_masters_that_only_the_optimizer_holds_come_back(kind: str, tmp_path: Path) -> None:
    """Restored in a fresh process, the next step is that of the untouched run, bit for bit."""
    goes_on_alike(kind, tmp_path)


@contextmanager
def _unchanged(state: State) -> Iterator[None]:
    before = numbers(state)
    yield
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(state), strict=True))


def test_masters_that_were_not_saved_are_missed(tmp_path: Path) -> None:
    """A checkpoint without them, into a state that has them only in its optimizer, is refused; strict=False takes the
    rest. Where something names them, older checkpoints fit as before."""
    state = mastered(0)
    optimize(state, 0)
    with ckpt.Checkpointer({"model": state["model"]}, tmp_path / "run") as cp:
        cp.save(1).wait_durable()
    twin = mastered(1)
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp, _unchanged(twin):
        with pytest.raises(MismatchError):
            cp.restore()

    held: State = {"model": state["model"], "masters": list(state["optim"].param_groups[0]["params"])}
    with ckpt.Checkpointer({**held, "optim": state["optim"]}, tmp_path / "held") as cp:
        cp.save(1).wait_durable()
        assert not [name for name in ckpt.load(tmp_path / "held") if "optim.params" in name]
    with ckpt.Checkpointer(twin, tmp_path / "held") as cp, _unchanged(twin):
        with pytest.raises(MismatchError, match=r"optim\.params\.0\.0 is not in the checkpoint"):
            cp.restore()


def flat_model(seed: int, *, odd: bool) -> State:
    """A flat buffer with the model's parameters as slices; `odd`: with extra space at its end."""
    torch.manual_seed(seed)
    net = nn.Linear(4, 4)
    flat = torch.cat([*(p.detach().flatten() for p in net.parameters()), torch.randn(3 if odd else 0)])
    at = 0
    for p in net.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return {"model": net, "optim": torch.optim.SGD([nn.Parameter(flat)], 0.1, momentum=0.9)}


@pytest.mark.parametrize("odd", [False, True])
def test_memory_shared_with_the_model_is_saved_once(odd: bool, tmp_path: Path) -> None:
    """A flat buffer that the model's parameters fill is theirs; one that they do not fill is saved whole."""
    state = flat_model(0, odd=odd)
    names = inside.guarded_in(state)
    assert ("optim.params.0.0" in names) is odd
    twin = restored(state, flat_model(1, odd=odd), tmp_path)
    assert torch.equal(*(one["optim"].param_groups[0]["params"][0] for one in (state, twin)))
    assert torch.equal(state["model"].weight, twin["model"].weight)
