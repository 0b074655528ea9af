"""How does a Hugging Face Trainer save every step, and come back? A callback, and an export to its folders.

In: a Trainer and its events. Out: calls of `ckpt.Checkpointer`. It may not know the writer's or the trainer's inside.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.transformers.callback import CheckpointCallback as CheckpointCallback

__all__ = ["CheckpointCallback"]


def __getattr__(name: str) -> Any:
    """The export needs no transformers, whose import takes seconds."""
    if name != "CheckpointCallback":
        raise AttributeError(f"module 'ckpt.transformers' has no attribute {name!r}")
    from ckpt.transformers.callback import CheckpointCallback

    return CheckpointCallback
