"""The adapter for torchtitan: a checkpoint manager that saves every step and resumes from the last one.

Input: what torchtitan's trainer passes to its checkpoint manager. Output: a manager with the same interface, which uses
a `ckpt.Checkpointer` and saves weights in the layout that they have in memory. Only `internals` depends on torchtitan's
internals; nothing here depends on the writer's.
"""

from ckpt.torchtitan.manager import CheckpointManager as CheckpointManager

__all__ = ["CheckpointManager"]
