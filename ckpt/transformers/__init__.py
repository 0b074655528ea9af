"""Save every step of a Hugging Face Trainer and restore it: a callback, and an export to its folders.

The callback turns the events of a Trainer into calls of `ckpt.Checkpointer`. This package does not depend on internals
of the writer or the core.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.transformers.callback import CheckpointCallback as CheckpointCallback

__all__ = ["CheckpointCallback"]


def __getattr__(name: str) -> Any:
    """Import the callback when it is used: the export does not need transformers, whose import takes seconds."""
    if name != "CheckpointCallback":
        raise AttributeError(f"module 'ckpt.transformers' has no attribute {name!r}")
    from ckpt.transformers.callback import CheckpointCallback

    return CheckpointCallback
