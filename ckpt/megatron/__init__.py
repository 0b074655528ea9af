"""The adapter for Megatron-core GPT models with a distributed optimizer: save every step, and resume with other sizes
of parallelism.

The state of its `ckpt.Checkpointer` has fp32 weights and moments by the parameter's name in the whole model, as boxes
of the parameter (`ckpt.state.Shards`). Ranks do not communicate. Only `internals` depends on Megatron's internals. No
module of this package depends on the internals of the writer or the trainer.
"""

from ckpt.megatron.attach import attach as attach

__all__ = ["attach"]
