"""How does a Hugging Face Trainer save every step, and come back? A callback, and an export to its folders.

In: a Trainer and its events. Out: calls of `ckpt.Checkpointer`. It may not know the writer's or the trainer's inside.
"""

from ckpt.transformers.callback import CheckpointCallback as CheckpointCallback

__all__ = ["CheckpointCallback"]
