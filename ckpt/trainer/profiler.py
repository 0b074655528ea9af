"""Names for our work in the timelines of profilers: torch.profiler, and Nsight Systems by NVTX.

    ckpt.step      step() and save(), in the thread that trains
    ckpt.wait      an optimizer waits for a copy to end
    ckpt.restore   restore()
    ckpt.stage     a snapshot is copied, in the staging thread

torch.profiler looks at the threads of its own process that it was told to: by itself the one that started it, all of
them with `experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`. NVTX ranges are there
as soon as CUDA is in use; nothing here wakes it up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

from ckpt.trainer.staging.device import begin_range, end_range

P = ParamSpec("P")
T = TypeVar("T")


class span:
    """Around some work. Costs well under a microsecond if nobody profiles."""

    __slots__ = ("_marked", "_name", "_recorded")

    def __init__(self, name: str) -> None:
        self._name, self._recorded, self._marked = name, None, False

    _recorded: Any

    def __enter__(self) -> None:
        # What torch itself asks before it records a range: to enter one costs 10 us even if nobody listens.
        if profiler._is_profiler_enabled:
            self._recorded = torch.profiler.record_function(self._name)
            self._recorded.__enter__()
        self._marked = begin_range(self._name)

    def __exit__(self, *error: object) -> None:
        if self._marked:
            end_range()
        if self._recorded is not None:
            self._recorded.__exit__(*error)


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function whose calls have that name."""

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return function(*args, **kwargs)

        return inside

    return wrap
