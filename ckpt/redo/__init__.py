"""What changed in a step, and how is that done again? Every step as frames, small because an update is predicted.

In: two states of the same tensors. Out: a log of frames, and the later state, bit for bit. It knows files and the
format; it may not know the trainer, the writer, or which checkpoint a log goes on from.

EXPERIMENTAL, and behind this door: nothing else of it, nor what speaks to it in the trainer, the writer and a restore,
is imported before a tier logs every step or a place has such logs. `.importlinter` says who may.
"""

from ckpt.format.manifest import REDO
from ckpt.store import folder_of


def has_logs(url: str) -> bool:
    """Whether a place may have redo logs: whether there is a folder for them."""
    root = folder_of(url)
    return root is not None and (root / REDO).is_dir()
