"""How does a Megatron-core GPT model with its distributed optimizer save every step, and come back divided otherwise?

In: model chunks and their optimizer. Out: a `ckpt.Checkpointer` whose state says fp32 weights and moments by the name
of the parameter in the whole model, as runs of boxes of it (`ckpt.Shards`): no rank asks another for anything. Only
`internals` knows Megatron's inside; nothing here knows the writer's or the trainer's.
"""

from ckpt.megatron.attach import attach as attach

__all__ = ["attach"]
