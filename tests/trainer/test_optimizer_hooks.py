"""The hook before an update, also in compiled steps."""

from __future__ import annotations

import threading

import torch
from torch import nn

from ckpt.core.snapshot import stage
from ckpt.core.snapshot.stage import UpdateHook


def test_compiled_step_waits_like_any_other() -> None:
    """The hook runs uncompiled each time. The compiler does not trace it, since locks would become constants.

    Its values cause no recompilation."""
    weight, traced, asked, own = nn.Parameter(torch.ones(4)), list[bool](), list[int](), threading.Lock()

    def before() -> None:
        traced.append(torch.compiler.is_compiling())
        with own:
            asked.append(len(asked))

    hook = UpdateHook(before, lambda optimizer: None, lambda optimizer: optimizer is mine)
    mine = torch.optim.SGD([weight], lr=1.0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        step = torch.compile(mine.step, backend="eager")
        for _ in range(12):
            weight.grad = torch.ones(4)
            step()
    finally:
        hook.remove()
    assert asked == list(range(12)) and hook.count == 12 and not any(traced)
    assert torch.equal(weight, torch.full((4,), -11.0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    looked_at = [found() for found in torch._dynamo.convert_frame.input_codes.seen]
    assert looked_at, "the values that the compiler guards are found"
    assert not [code for code in looked_at if code is not None and code.co_filename == stage.__file__]
