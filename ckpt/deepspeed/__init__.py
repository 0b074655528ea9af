"""The adapter for DeepSpeed: save every step of an engine, and resume with any ZeRO stage and any number of ranks.

The input is an engine. The output is a `ckpt.Checkpointer` whose state has fp32 weights and moments by parameter name,
as ranges of the flattened parameter (`ckpt.state.Shards`). Only `internals` depends on DeepSpeed's internals. No module
of this package depends on the internals of the writer or the trainer.
"""

from ckpt.deepspeed.attach import EngineCheckpointer as EngineCheckpointer
from ckpt.deepspeed.attach import attach as attach

__all__ = ["EngineCheckpointer", "attach"]
