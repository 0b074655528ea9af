"""Objects for the state of a Checkpointer."""

from __future__ import annotations

from ckpt.adapters.shards import Shard, Shards
from ckpt.core.state.nodes import RNG, Stateful
from ckpt.loader import Loader

__all__ = ["RNG", "Loader", "Shard", "Shards", "Stateful"]
