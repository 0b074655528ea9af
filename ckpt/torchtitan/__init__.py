"""How does a torchtitan job save every step, and come back from the last one?

In: what torchtitan's trainer gives its checkpoint manager. Out: a manager of its own kind over a `ckpt.Checkpointer`,
with weights as they lie in memory. Only `internals` knows torchtitan's inside; nothing here knows the writer's.
"""

from ckpt.torchtitan.manager import CheckpointManager as CheckpointManager

__all__ = ["CheckpointManager"]
