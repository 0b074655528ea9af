"""The adapter for Megatron-core GPT models with a distributed optimizer: save every step, and resume with another
division.

Input: model chunks and their optimizer. Output: a `ckpt.Checkpointer` whose state has fp32 weights and moments by the
name of the parameter in the whole model, as boxes of it (`ckpt.state.Shards`). Ranks do not communicate. Only
`internals` depends on Megatron's internals; nothing here depends on the internals of the writer or the trainer.
"""

from ckpt.megatron.attach import attach as attach

__all__ = ["attach"]
