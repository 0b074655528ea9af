"""Save every step of a Lightning training and restore it: a callback, and a CheckpointIO plugin.

The input is a Trainer and its hooks. The output is calls of `ckpt.Checkpointer`. This package does not depend on
internals of the writer or the core.
"""

from ckpt.lightning.callback import CheckpointCallback as CheckpointCallback
from ckpt.lightning.checkpoint_io import CheckpointIO as CheckpointIO

__all__ = ["CheckpointCallback", "CheckpointIO"]
