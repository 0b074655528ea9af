"""Imported before torchtitan: it trains on accelerators, and takes the CPU for one then."""

from __future__ import annotations

import types

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.pipelining import schedules

torch._utils._get_available_device_type = lambda: "cpu"
for _name, _found in {
    "get_device_name": "cpu",
    "get_device_properties": types.SimpleNamespace(total_memory=1 << 34),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "device_count": 1,
    "current_device": 0,
}.items():
    setattr(torch.cpu, _name, lambda *_, _found=_found: _found)
if not hasattr(dist, "set_timeout"):  # of torch versions to come
    dist.set_timeout = lambda *_, **__: None


def _by_microbatches(old):  # torchtitan hands them over divided, as torch versions to come take them
    def step(self, *args, arg_mbs=None, kwarg_mbs=None, target_mbs=None, **more):
        if kwarg_mbs is None:
            return old(self, *args, **more)
        words = {key: torch.cat([one[key] for one in kwarg_mbs]) for key in kwarg_mbs[0]}
        first = [torch.cat(column) for column in zip(*arg_mbs or (), strict=True)]
        return old(self, *first, target=torch.cat(target_mbs) if target_mbs else None, **words, **more)

    return step


schedules.PipelineScheduleMulti.step = _by_microbatches(schedules.PipelineScheduleMulti.step)
