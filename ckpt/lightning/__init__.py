"""How does a Lightning training save every step, and come back? A callback, and a CheckpointIO plugin.

In: a Trainer and its hooks. Out: calls of `ckpt.Checkpointer`. It may not know the writer's or the trainer's inside.
"""

from ckpt.lightning.callback import CheckpointCallback as CheckpointCallback
from ckpt.lightning.checkpoint_io import CheckpointIO as CheckpointIO

__all__ = ["CheckpointCallback", "CheckpointIO"]
