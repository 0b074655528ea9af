"""Asynchronous tiered checkpointing for PyTorch: every step saved, no stall, nothing lost.

    with ckpt.Checkpointer({"model": model, "optim": optim}, "runs/exp1") as cp:
        for step in range(cp.restore(default=0), steps):
            train_step()
            cp.step(step + 1)

Names are imported when they are used: `import ckpt` alone does not import torch.
"""

from __future__ import annotations

__distribution__ = "everystep"  # by which ckpt.version knows that this file is ours

import importlib
from typing import TYPE_CHECKING, Any

from ckpt.version import VERSION

__version__ = VERSION

_HOMES = {
    "Auto": "core.cadence.cadence",
    "Best": "best",
    "Checkpoint": "save",
    "Checkpointer": "checkpointer",
    "Keep": "core.checkpoint.retention",
    "Loaded": "loading",
    "Loader": "loader",
    "Memory": "tiers",
    "Metrics": "metrics",
    "RNG": "core.state.stateful",
    "Restored": "core.restore.restore",
    "Run": "run",
    "Save": "save",
    "Shard": "adapters.shards",
    "Shards": "adapters.shards",
    "Stateful": "core.state.stateful",
    "Tier": "tiers",
    "load": "loading",
    "Fault": "guard.report",
    "on_deadline": "triggers",
    "on_exception": "triggers",
    "on_hang": "triggers",
    "on_memory_pressure": "triggers",
    "on_oom": "triggers",
    "on_preemption": "triggers",
    "on_signal": "triggers",
    "CheckpointError": "errors",
    "ClosedError": "errors",
    "CorruptError": "errors",
    "DeadlineError": "errors",
    "ExistsError": "errors",
    "FencedError": "errors",
    "InUseError": "errors",
    "FormatError": "errors",
    "FullError": "errors",
    "MismatchError": "errors",
    "NoCheckpointError": "errors",
    "NotFoundError": "errors",
    "OutcomeUnknownError": "errors",
    "SaveError": "errors",
    "SkippedError": "errors",
    "StateError": "errors",
    "StoreError": "errors",
    "UsageError": "errors",
    "PeerError": "errors",
    "RunGoneError": "errors",
    "WriterError": "errors",
}

# Separate modules; some need an extra.
_PARTS = ("dcp", "deepspeed", "events", "lightning", "megatron", "ray", "torchtitan", "transformers")

__all__ = sorted(_HOMES)  # not those: `import *` should not need an extra

if TYPE_CHECKING:
    from ckpt import dcp as dcp
    from ckpt import deepspeed as deepspeed
    from ckpt import events as events
    from ckpt import lightning as lightning
    from ckpt import megatron as megatron
    from ckpt import ray as ray
    from ckpt import torchtitan as torchtitan
    from ckpt import transformers as transformers
    from ckpt.adapters.shards import Shard as Shard
    from ckpt.adapters.shards import Shards as Shards
    from ckpt.best import Best as Best
    from ckpt.checkpointer import Checkpointer as Checkpointer
    from ckpt.core.cadence.cadence import Auto as Auto
    from ckpt.core.checkpoint.retention import Keep as Keep
    from ckpt.core.restore.restore import Restored as Restored
    from ckpt.core.state.stateful import RNG as RNG
    from ckpt.core.state.stateful import Stateful as Stateful
    from ckpt.errors import CheckpointError as CheckpointError
    from ckpt.errors import ClosedError as ClosedError
    from ckpt.errors import CorruptError as CorruptError
    from ckpt.errors import DeadlineError as DeadlineError
    from ckpt.errors import ExistsError as ExistsError
    from ckpt.errors import FencedError as FencedError
    from ckpt.errors import FormatError as FormatError
    from ckpt.errors import FullError as FullError
    from ckpt.errors import InUseError as InUseError
    from ckpt.errors import MismatchError as MismatchError
    from ckpt.errors import NoCheckpointError as NoCheckpointError
    from ckpt.errors import NotFoundError as NotFoundError
    from ckpt.errors import OutcomeUnknownError as OutcomeUnknownError
    from ckpt.errors import PeerError as PeerError
    from ckpt.errors import RunGoneError as RunGoneError
    from ckpt.errors import SaveError as SaveError
    from ckpt.errors import SkippedError as SkippedError
    from ckpt.errors import StateError as StateError
    from ckpt.errors import StoreError as StoreError
    from ckpt.errors import UsageError as UsageError
    from ckpt.errors import WriterError as WriterError
    from ckpt.guard.report import Fault as Fault
    from ckpt.loader import Loader as Loader
    from ckpt.loading import Loaded as Loaded
    from ckpt.loading import load as load
    from ckpt.metrics import Metrics as Metrics
    from ckpt.run import Run as Run
    from ckpt.save import Checkpoint as Checkpoint
    from ckpt.save import Save as Save
    from ckpt.tiers import Memory as Memory
    from ckpt.tiers import Tier as Tier
    from ckpt.triggers import on_deadline as on_deadline
    from ckpt.triggers import on_exception as on_exception
    from ckpt.triggers import on_hang as on_hang
    from ckpt.triggers import on_memory_pressure as on_memory_pressure
    from ckpt.triggers import on_oom as on_oom
    from ckpt.triggers import on_preemption as on_preemption
    from ckpt.triggers import on_signal as on_signal


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS, "__version__"})


if not TYPE_CHECKING:  # a type checker should know a wrong name as one

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return importlib.import_module(f"ckpt.{name}")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"ckpt.{home}"), name)
        globals()[name] = value
        return value
