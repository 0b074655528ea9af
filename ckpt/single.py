"""`ckpt.save`: write one checkpoint without a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.checkpointer import Checkpointer
from ckpt.core.checkpoint import read
from ckpt.core.ranks.world import made_together
from ckpt.errors import InvalidArgumentError, NoCheckpointError, public_function
from ckpt.saving import Checkpoint
from ckpt.store import normalise, remember_options
from ckpt.tiers import Tier


@public_function
def save(
    url: str | Path,
    state: dict[str, Any],
    *,
    step: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Save the state as a run with one checkpoint. The checkpoint is durable when this returns.

    - `url`: folder or URL. It must not contain a checkpoint, because nothing is overwritten.
    - `state`: dict, as for `ckpt.Checkpointer`.
    - `step`: number of the step, default 0.
    - `storage_options`: as in `ckpt.Tier`.

    In a multi-rank job, all ranks must make the same call. `ckpt.load(url, into=state)` restores the checkpoint, and a
    Checkpointer can continue from it. If the call is interrupted, the checkpoint is stored completely or not at all,
    and may appear a moment later. Raises InvalidArgumentError if there is a checkpoint already, StateError if the state
    cannot be saved, and SaveError or StoreError if it cannot be written.
    """
    tier = Tier(str(url), every=1, full_every=1, storage_options=storage_options)
    remember_options(tier.url, storage_options)
    made_together("save", partial(_check_empty, tier.url))
    with Checkpointer(state, tier, memory=None, triggers=None) as cp:
        if cp._run.ownership.has_checkpoints:  # another process has saved a checkpoint since `_check_empty`
            raise _taken(tier.url)
        return cp.save(step).wait_durable()


def _check_empty(url: str) -> None:
    """Raise InvalidArgumentError if the location has a checkpoint. Called before a job that trains there is fenced."""
    try:
        log = read.run(read.open_run(normalise(url)))
    except NoCheckpointError:
        return
    read.run(log.store.aclose())
    if log.state.commits or log.state.damaged:
        raise _taken(url)


def _taken(url: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{url} already has checkpoints, and ckpt.save does not overwrite: use another path")
