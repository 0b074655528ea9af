"""Asynchronous tiered checkpointing for PyTorch: every step saved, no stall, nothing lost.

    with ckpt.Checkpointer({"model": model, "optim": optim}, "runs/exp1") as cp:
        for step in range(cp.restore(default=0), steps):
            train_step()
            cp.step(step + 1)

Submodules are imported on first use, so `import ckpt` alone does not import torch.
"""

from __future__ import annotations

__distribution__ = "everystep"  # `ckpt.version` checks this name to recognize the package

import importlib
from typing import TYPE_CHECKING, Any

from ckpt.version import VERSION

__version__ = VERSION

_HOMES = {
    "Auto": "core.cadence.cadence",
    "Best": "best",
    "CheckpointError": "errors",
    "Checkpointer": "checkpointer",
    "Keep": "core.checkpoint.retention",
    "Loader": "loader",
    "Memory": "tiers",
    "Metrics": "metrics",
    "Options": "options",
    "RNG": "core.state.nodes",
    "Restored": "core.restore.restore",
    "Run": "run",
    "Save": "saving",
    "Tier": "tiers",
    "load": "loading",
    "save": "single",
}

# Submodules that users import by name. Those for other libraries need an extra.
_PARTS = (
    "dcp", "deepspeed", "errors", "events", "lightning", "megatron", "ray", "state", "torchtitan", "transformers",
    "triggers", "types",
)  # fmt: skip

# Names that users look for in this module, by the module that has them. The AttributeError names that module.
_ELSEWHERE = {
    "errors": (
        "ClosedError CorruptError DeadlineError ExistsError FencedError FormatError FullError InUseError "
        "InvalidArgumentError MismatchError NoCheckpointError NotFoundError OutcomeUnknownError PeerError RunGoneError "
        "SaveError SkippedError StateError StoreError UsageError WriterError"
    ),
    "state": "Shard Shards Stateful",
    "triggers": "on_deadline on_exception on_hang on_memory_pressure on_oom on_preemption on_signal",
    "types": "Checkpoint CheckpointInfo Exported Fault Loaded Stats Verdict",
}

__all__ = sorted(_HOMES)  # without the submodules, because `import *` must not need an extra

if TYPE_CHECKING:
    from ckpt import dcp as dcp
    from ckpt import deepspeed as deepspeed
    from ckpt import errors as errors
    from ckpt import events as events
    from ckpt import lightning as lightning
    from ckpt import megatron as megatron
    from ckpt import ray as ray
    from ckpt import state as state
    from ckpt import torchtitan as torchtitan
    from ckpt import transformers as transformers
    from ckpt import triggers as triggers
    from ckpt import types as types
    from ckpt.best import Best as Best
    from ckpt.checkpointer import Checkpointer as Checkpointer
    from ckpt.core.cadence.cadence import Auto as Auto
    from ckpt.core.checkpoint.retention import Keep as Keep
    from ckpt.core.restore.restore import Restored as Restored
    from ckpt.core.state.nodes import RNG as RNG
    from ckpt.errors import CheckpointError as CheckpointError
    from ckpt.loader import Loader as Loader
    from ckpt.loading import load as load
    from ckpt.metrics import Metrics as Metrics
    from ckpt.options import Options as Options
    from ckpt.run import Run as Run
    from ckpt.saving import Save as Save
    from ckpt.single import save as save
    from ckpt.tiers import Memory as Memory
    from ckpt.tiers import Tier as Tier


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS, "__version__"})


if not TYPE_CHECKING:  # a type checker would otherwise accept unknown names

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return importlib.import_module(f"ckpt.{name}")
        home = _HOMES.get(name)
        if home is None:
            module = next((part for part, names in _ELSEWHERE.items() if name in names.split()), None)
            hint = "" if module is None else f": it is ckpt.{module}.{name}"
            raise AttributeError(f"module 'ckpt' has no attribute {name!r}{hint}")
        value = getattr(importlib.import_module(f"ckpt.{home}"), name)
        globals()[name] = value
        return value
