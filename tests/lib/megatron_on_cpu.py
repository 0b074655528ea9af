"""Lets megatron-core run on a CPU with gloo: import this before Megatron.

Code that requests the GPU gets the CPU, and every tensor reports a CUDA type. Nothing that `ckpt.megatron` uses of
Megatron is replaced.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Stream:
    """A stream on which all work is done immediately."""

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


def nothing(*_: Any, **__: Any) -> None: ...


def here(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same on the CPU, if it is asked for the GPU."""

    def made(*words: Any, **options: Any) -> Tensor:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return make(*words, **options)

    return made


for _name in ("tensor", "zeros", "ones", "empty"):
    setattr(torch, _name, here(getattr(torch, _name)))

_type: Any = Tensor.type
cuda: Any = torch.cuda
tensor: Any = Tensor
tensor.type = lambda self, *kind, **k: _type(self, *kind, **k) if kind or k else _type(self).replace(".", ".cuda.", 1)
tensor.cuda = lambda self, *_, **__: self
cuda.current_device = lambda: "cpu"
cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
cuda.manual_seed = torch.manual_seed
cuda.get_device_capability = lambda *_: (9, 0)
cuda.is_current_stream_capturing = lambda: False
cuda.stream = lambda _: contextlib.nullcontext()
for _name in ("Stream", "current_stream", "default_stream"):
    setattr(cuda, _name, lambda *_, **__: Stream())
for _name in ("synchronize", "empty_cache"):
    setattr(cuda, _name, nothing)
cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing

import megatron.core.tensor_parallel.random as _random  # noqa: E402

logging.getLogger(_random.__name__).setLevel(logging.ERROR)  # the GPU's random numbers are the CPU's here
_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
