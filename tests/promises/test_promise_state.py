"""Nothing that trains is left out of a checkpoint without a word, nothing is asked for at every step that need not be,
and what somebody forged ends in an error of ours.

RANK=0 WORLD_SIZE=2 … python -c 'import test_promise_state as t; t.main()' save|load ROOT KIND…    ranks of a small job
"""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import json
import logging
import random
import resource
import sys
import traceback
from collections import Counter as Counter_
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt
import test_hostile
from ckpt.cli import app
from ckpt.errors import CheckpointError, MismatchError
from ckpt.format import codec, join_ranks, rank_index
from ckpt.format.digest import blob_digest, file_digest
from ckpt.format.manifest import Part, index_key, part_key, table_key
from ckpt.format.table import DTYPES, Table
from ckpt.runlog.log import record_key
from ckpt.state.capture import Capture
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
    """Extra state beside its weights, as layers of low precision have it."""

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
    """Train and save every step; what went between the ranks meanwhile, and the loss of the step after."""
    state = build(kind)
    seen: list[str] = []
    with ckpt.Checkpointer(state, f"{root}/{kind}") as cp:
        cp.restore(default=0)
        for step in range(STEPS):
            train_step(state, step)
            with Counting() as counting:
                cp.step(step + 1)
            seen += counting.seen
        cp.save(STEPS).committed()
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


def test_saving_sends_nothing_whatever_hooks_a_model_has(tmp_path: Path) -> None:
    """Between ranks nothing is sent in any step() or save, with hooks that gather or reduce; and a job of new processes
    goes on with the same loss, extra state and all."""
    code = "import test_promise_state as t; t.main()"
    saved = reports(launch(2, code, "save", tmp_path, *KINDS, port=free_port()))
    loaded = reports(launch(2, code, "load", tmp_path, *KINDS, port=free_port()))
    for kind in KINDS:
        for before, after in zip(saved[kind], loaded[kind], strict=True):
            assert before.get("error") is None is after.get("error"), (before, after)
            assert before["collectives"] == [] and before["sent"] == 1
            assert (after["step"], after["loss"]) == (STEPS, before["loss"])


class Asked(nn.Linear):
    """Counts how often it is asked for its state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.asked = 0
        self.register_state_dict_pre_hook(self._note)

    def _note(self, *_: object) -> None:
        self.asked += 1


class Turned(nn.Module):
    """Its hook says a copy of its weight, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.register_state_dict_post_hook(turn)


def turn(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
    state[prefix + "turned"] = state.pop(prefix + "weight").detach().t().contiguous()


def test_a_module_is_asked_once_and_read_as_it_lies(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks that only divide or turn are not run at every reading; where they make copies, that is said once."""
    state: State = {"net": nn.ModuleList([Fused(), Turned(), Turned(), Asked()])}
    capture = Capture(state)
    with caplog.at_level(logging.WARNING, "ckpt"):
        layouts = [capture.read().layout for _ in range(5)]
        Capture(state).read()
    assert set(layouts[0].by_name) == {"net.0.wqkv", "net.1.weight", "net.2.weight", "net.3.weight", "net.3.bias"}
    assert all(layout is layouts[0] for layout in layouts)
    assert state["net"][3].asked == 2  # by each of the two
    said = [r.getMessage() for r in caplog.records if "rearranges" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("net.1 and 1 more (Turned)")


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
        cp.save(1).committed()
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp:
        assert cp.restore() == 1
    return twin


def test_what_a_module_adds_leaves_out_or_derives_is_kept(tmp_path: Path) -> None:
    """Where hooks and methods change what must be saved, it comes back as they say; beside others as they lie."""

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


class Forwarding(torch.optim.Optimizer):
    """A wrapper around one: its state is that one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


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
    """All that trains."""
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
        cp.save(STEPS).committed()
        optimize(state, STEPS)
    done = run_script(RESUMED, kind, tmp_path / "run", tmp_path / "numbers.pt")
    assert done.stdout.split() == [str(STEPS)], done.stderr[-3000:]
    found = torch.load(tmp_path / "numbers.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(found, numbers(state), strict=True))


def test_an_optimizer_around_another_goes_on_alike(tmp_path: Path) -> None:
    """Also where the weights are the memory that its own state holds when they are saved, and not at a fresh start."""
    goes_on_alike("around", tmp_path)


def test_an_optimizer_inside_another_is_not_forgotten(tmp_path: Path) -> None:
    """The outer one's state_dict() says nothing of its moments: the user is told to add it."""
    state = around(0)
    del state["base"]
    with pytest.raises(ckpt.StateError, match=r"optim: .* in \.base.* put that one into the state"):
        ckpt.Checkpointer(state, tmp_path / "run")


def test_an_optimizer_that_keeps_its_state_elsewhere_goes_on_alike(tmp_path: Path) -> None:
    """What its own state_dict() says is saved and handed back: the next step is the untouched run's, bit for bit."""
    goes_on_alike("contained", tmp_path)


def test_a_wrapper_that_forwards_is_read_like_what_it_wraps() -> None:
    """State by parameter name, guarded as ever."""
    net = nn.Linear(2, 2)
    inner = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    inner.step()
    plain = Capture({"m": net, "o": inner}).read()
    wrapped = Capture({"m": net, "o": Forwarding(inner)}).read()
    assert wrapped.layout == plain.layout and wrapped.guarded == plain.guarded


def test_what_an_optimizer_keeps_and_cannot_be_saved_is_refused_by_name() -> None:
    """Rather than left out."""

    class Odd(Container):
        def state_dict(self) -> dict[str, Any]:
            return {"scaler": object()}

    with pytest.raises(ckpt.StateError, match=r"optim\.scaler"):
        Capture({"optim": Odd([[nn.Parameter(torch.ones(2))]])}).read()


# -- parameters that only an optimizer holds --


@pytest.mark.parametrize("kind", ["mastered", "flattened"])
def test_masters_that_only_the_optimizer_holds_come_back(kind: str, tmp_path: Path) -> None:
    """Restored in a fresh process, the next step is that of the untouched run, bit for bit."""
    goes_on_alike(kind, tmp_path)


def test_masters_are_saved_under_the_optimizers_name_and_guarded(tmp_path: Path) -> None:
    """Like other parameters."""
    state = mastered(0)
    optimize(state, 0)
    capture = Capture(state)
    reading = capture.read()
    names = [t.name for t in reading.layout.tensors]
    guarded = dict(zip(names, reading.guarded, strict=True))
    assert guarded["optim.params.0.0"] and guarded["optim.params.0.3"] and not guarded["model.0.weight"]


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
        cp.save(1).committed()
    twin = mastered(1)
    with ckpt.Checkpointer(twin, tmp_path / "run") as cp, _unchanged(twin):
        with pytest.raises(MismatchError):
            cp.restore()

    held: State = {"model": state["model"], "masters": list(state["optim"].param_groups[0]["params"])}
    with ckpt.Checkpointer({**held, "optim": state["optim"]}, tmp_path / "held") as cp:
        cp.save(1).committed()
        assert not [name for name in ckpt.load(tmp_path / "held") if "optim.params" in name]
    with ckpt.Checkpointer(twin, tmp_path / "held") as cp, _unchanged(twin):
        with pytest.raises(MismatchError, match=r"optim\.params\.0\.0 is not in the checkpoint"):
            cp.restore()


def test_masters_go_to_a_file_of_torch_and_back(tmp_path: Path) -> None:
    """Beside the state of their optimizer, whose own loader does not mind them; and an import brings them back."""
    state, twin = mastered(0), mastered(1)
    optimize(state, 0)
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        cp.save(1).committed()
    file, again = str(tmp_path / "x.pt"), str(tmp_path / "again")
    for command in (["restore", str(tmp_path / "run"), "--to", file, "--format", "torch"], ["import", file, again]):
        with redirect_stdout(io.StringIO()), suppress(SystemExit):
            app.main(command)
    saved = torch.load(file, weights_only=True)["optim"]
    assert torch.equal(saved["params"]["0.1"], state["optim"].param_groups[0]["params"][1])
    twin["optim"].load_state_dict(saved)
    with ckpt.Checkpointer(twin, again) as cp:
        assert cp.restore() == 1
    assert all(map(torch.equal, numbers(state), numbers(twin)))


def flat_model(seed: int, *, odd: bool) -> State:
    """A flat buffer of which the model's parameters are slices; `odd`: with room at its end that nobody else has."""
    torch.manual_seed(seed)
    net = nn.Linear(4, 4)
    flat = torch.cat([*(p.detach().flatten() for p in net.parameters()), torch.randn(3 if odd else 0)])
    at = 0
    for p in net.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return {"model": net, "optim": torch.optim.SGD([nn.Parameter(flat)], 0.1, momentum=0.9)}


@pytest.mark.parametrize("odd", [False, True])
def test_memory_that_the_model_has_already_is_not_saved_again(odd: bool, tmp_path: Path) -> None:
    """A flat buffer that the model's parameters fill is theirs; one that they do not fill is saved whole."""
    state = flat_model(0, odd=odd)
    names = set(Capture(state).read().layout.by_name)
    assert ("optim.params.0.0" in names) is odd
    twin = restored(state, flat_model(1, odd=odd), tmp_path)
    assert torch.equal(*(one["optim"].param_groups[0]["params"][0] for one in (state, twin)))
    assert torch.equal(state["model"].weight, twin["model"].weight)


def test_slices_of_what_the_state_holds_are_not_saved_again() -> None:
    """Parameters that are views of one tensor of the state, with or without gradients; and once it is another tensor,
    they are."""
    flat = torch.randn(12)
    slices = [nn.Parameter(flat[:8]), nn.Parameter(flat[8:])]
    state: State = {"masters": flat, "optim": torch.optim.SGD(slices, 0.1)}
    capture = Capture(state)
    assert set(capture.read().layout.by_name) == {"masters"}
    state["masters"] = flat.clone()
    assert {"optim.params.0.0", "optim.params.0.1"} <= set(capture.read().layout.by_name)


# -- what somebody forged, digests and all --


def everything(step: int) -> State:
    """Each kind of entry that a state can have."""
    torch.manual_seed(step)
    net = nn.Sequential(Counter(), Scaled(), nn.Linear(WIDTH, 2))
    optim = torch.optim.AdamW(net[1].parameters())
    net[1](torch.ones(1, WIDTH)).sum().backward()
    optim.step()
    lr = torch.optim.lr_scheduler
    sched = lr.SequentialLR(optim, [lr.ConstantLR(optim), lr.ExponentialLR(optim, 0.9)], [2])
    return {
        "model": net,
        "optim": optim,
        "sched": sched,
        "scaler": torch.amp.GradScaler("cpu"),
        "loader": ckpt.Loader(range(100), 2),
        "drawn": torch.Generator().manual_seed(step),
        "numpy": np.random.default_rng(step),
        "python": random.Random(step),
        "meta": {"lr": step / 4, "pair": (1, 2), "x": torch.arange(6) + step, "a": np.arange(4.0) * step},
        "rng": ckpt.RNG(),
    }


KINDS_OF_VALUES: list[Any] = [
    None, True, 7, -1.5, 10**40, "x", [], {}, [[]], [{"x": 1}], {"x": []}, {"$": "tuple", "v": [1]}, {"$": "what"},
    {"$": "tensor", "name": "meta.x"}, {"$": "tensor", "name": []}, {"$": "dict", "v": [[1, 2]]},
    {"$": "ndarray", "name": "meta.x", "dtype": "<f8", "shape": [1]}, {"$": "int", "v": "-0x" + "f" * 40},
]  # fmt: skip


def at(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy of a document with another value in one place."""
    found = copy.deepcopy(document)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = copy.deepcopy(value)
    return found


def forged() -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Every place of every entry's values and facts, each with some values of other kinds; the outer ones with all."""
    reading = Capture(everything(1)).read()
    sources = {
        "values": json.loads(json.dumps(reading.values)),
        "facts": [c["facts"] for c in reading.layout.components],
    }
    turn = itertools.cycle(KINDS_OF_VALUES)
    for what, document in sources.items():
        for place in test_hostile.places(document):
            if any(type(key) is int and key > 3 for key in place[1:]):
                continue  # of long lists the beginning
            many = KINDS_OF_VALUES if len(place) < (3 if what == "values" else 4) else [next(turn)]
            for value in many:

                def change(part: Any, what: str = what, place: Any = place, value: Any = value) -> None:
                    if what == "values":
                        part["values"] = at(part["values"], place, value)
                    else:
                        facts = at([c["facts"] for c in part["layout"]["components"]], place, value)
                        for component, one in zip(part["layout"]["components"], facts, strict=True):
                            component["facts"] = one

                yield f"{what} {place} = {value!r}", change


def test_values_of_another_kind_are_errors_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands in the place of a value or fact, resealed: it is restored, or there is an error of ours; and
    after a MismatchError nothing was changed."""
    caplog.set_level(logging.CRITICAL, "ckpt")
    monkeypatch.setattr(test_hostile, "state", everything)
    run = asyncio.run(test_hostile._built(1))
    wrong = []
    ended: Counter_[str] = Counter_()
    live = everything(3)
    for name, change in forged():
        objects = test_hostile.forge(run, part=change)
        folder = test_hostile.put({k: v for k, v in objects.items() if "-10." not in k}, tmp_path / "run")
        before = trained(live)
        try:
            test_hostile.restore_from(test_hostile.sources(folder)[0], live)
            ended["taken"] += 1
        except CheckpointError as error:
            ended[type(error).__name__] += 1
            if isinstance(error, MismatchError) and trained(live) != before:
                wrong.append(f"{name}: changed before {error}")
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
        if trained(live) != before:
            live = everything(3)  # of what was forged nothing may be left
    assert not wrong, "\n".join(wrong[:40])
    assert min(ended["taken"], ended["CorruptError"], ended["MismatchError"]) > 20, ended


def trained(state: State) -> list[object]:
    tensors = numbers({"model": state["model"], "optim": state["optim"]})
    return [state["sched"].last_epoch, *(tensor.tolist() for tensor in tensors)]


# -- small files that would keep a reader busy --


def stray(run: test_hostile.Run) -> test_hostile.Objects:
    """Two hundred records, each far behind the one before."""
    return run[0] | {record_key(99_000 * i): b"{}" for i in range(1, 200)}


def dotted(run: test_hostile.Run) -> test_hostile.Objects:
    """The name of an optimizer's tensor, of dots alone."""

    def change(part: Any) -> None:
        layout, name = part["layout"], "optim.state." + "." * 3_000_000
        layout["aliases"][name] = layout["tensors"][0][0]
        layout["components"][1]["names"].append(name)

    return test_hostile.forge(run, part=change)


def swollen(run: test_hostile.Run) -> test_hostile.Objects:
    """A tensor of 256 GiB, every blob of it the same few hundred bytes."""
    count, size = 4000, 64 << 20
    plain = bytes(size)
    frame, pack = codec.encode(1, plain, 4), f"packs/{run[1]}.0.0.safetensors"
    digest, stored = (np.frombuffer(blob_digest(one), np.uint8) for one in (plain, frame))

    def change(columns: Any) -> None:
        first, dims = int(columns["blob_ends"][0]), int(columns["dim_ends"][0])
        columns["dtypes"][0] = DTYPES.index("U8")
        columns["dims"] = np.concatenate([[count * size, 0, count * size], columns["dims"][dims:]])
        columns["dim_ends"] += 3 - dims
        row = {"pack": 0, "offset": len(run[0][pack]), "stored": len(frame), "length": size, "codec": 1, "base": -1}
        for name, value in row.items():
            new = np.full(count, value, columns[name].dtype)
            columns[name] = np.concatenate([new, columns[name][first:]])
        columns["digest"] = np.concatenate([np.tile(digest, (count, 1)), columns["digest"][first:]])
        columns["stored_digest"] = np.tile(stored, (count, 1))
        columns["blob_ends"] += count - first

    def part(document: Any) -> None:
        document["packs"][0]["size"] += len(frame)

    objects = test_hostile.forge(run, part=part, columns=change)
    return objects | {pack: run[0][pack] + frame}


def crowded(run: test_hostile.Run) -> test_hostile.Objects:
    """A directory of two ranks whose few compressed bytes are hundreds of megabytes of empty lists."""
    objects, attempt = run
    parts = [Part.from_bytes(objects[part_key(attempt, rank, 0)], "a part") for rank in range(2)]
    tables = [Table.from_bytes(objects[table_key(attempt, rank, 0)], "a table") for rank in range(2)]
    columns = dict(join_ranks.build(parts, tables).columns)
    lists = b'{"aliases":[{}],"components":[],"instances":[{}],"values":[' + b"[]," * (80 << 20)
    columns["views"] = np.frombuffer(lists + b'0],"views":[[0,[],0,0]]}', np.uint8)
    columns["view"] = np.zeros(2, np.int32)
    raw = rank_index.Directory(columns, (), (), (), ()).to_bytes()
    last = max(key for key in objects if key.startswith("log/"))
    record = json.loads(objects[last])
    record["body"]["index"] = file_digest(raw)
    return objects | {last: test_hostile.sealed(record), index_key(attempt, file_digest(raw)): raw}


def busy(folder: str) -> None:
    """Verify and restore each, with the time of the processor limited: without bounds each takes minutes."""
    torch.set_num_threads(1)
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    one, two = (asyncio.run(test_hostile._built(world)) for world in (1, 2))
    cases = {"stray": stray(one), "dotted": dotted(one), "swollen": swollen(one), "crowded": crowded(two)}
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    for name, objects in cases.items():
        assert sum(map(len, objects.values())) < 8 << 20
        place = test_hostile.put(objects, Path(folder) / "run")
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit):
            app.main(["verify", str(place)])
        with suppress(CheckpointError):
            test_hostile.restored(place)
        print(name, flush=True)


def test_small_files_do_not_keep_a_reader_busy(tmp_path: Path) -> None:
    """Missing records, dots in names, blobs that swell, columns that swell: what is done about them is bounded."""
    done = run_script("import sys, test_promise_state as t; t.busy(sys.argv[1])", tmp_path)
    assert done.stdout.split() == ["stray", "dotted", "swollen", "crowded"], (done.returncode, done.stderr[-3000:])
