"""The adapter for torchtitan: a checkpoint manager that saves every step and resumes from the last one.

The manager has the same interface as torchtitan's own checkpoint manager. It uses a `ckpt.Checkpointer`, and saves
weights in the layout that they have in memory. Only `internals` depends on torchtitan's internals. No module of this
package depends on the writer's internals.
"""

from ckpt.torchtitan.manager import CheckpointManager as CheckpointManager

__all__ = ["CheckpointManager"]
