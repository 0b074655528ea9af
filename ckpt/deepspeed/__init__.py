"""How does a DeepSpeed engine save every step, and come back under any ZeRO stage and with any number of ranks?

In: an engine. Out: a `ckpt.Checkpointer` whose state says fp32 weights and moments by parameter name, as runs of the
flattened parameter (`ckpt.Shards`). Only `internals` knows DeepSpeed's inside; nothing here knows the writer's or the
trainer's.
"""

from ckpt.deepspeed.attach import EngineCheckpointer as EngineCheckpointer
from ckpt.deepspeed.attach import attach as attach

__all__ = ["EngineCheckpointer", "attach"]
