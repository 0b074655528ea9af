"""Fill a torchtitan job's state from another run."""

from __future__ import annotations

from typing import Any

from ckpt.core.checkpoint import reference
from ckpt.core.restore.restore import Restored
from ckpt.errors import MismatchError
from ckpt.filling import fill as fill_from
from ckpt.filling import is_run as is_run
from ckpt.store import normalise


def fill(state: dict[str, Any], url: str, step: int | None = None, *, only: bool = False) -> Restored:
    """Fill the state from the newest checkpoint of a run, or that of `step`. All ranks must call this and see the run.

    - `only`: True ignores entries of the checkpoint that the state does not have, and casts tensors of another dtype.

    Raises NoCheckpointError if there is none, MismatchError if it does not fit, CorruptError if all are damaged.
    """
    place, which = reference.split(url, step)
    result = fill_from(state, normalise(place), which, strict=not only)
    if odd := [one for one in result.left_out if _entry(one) in state]:
        raise MismatchError(f"step {result.step} of {place} does not fit: {'; '.join(odd[:5])}")
    return result


def _entry(problem: str) -> str:
    """Return the entry of the state that a problem is about, with whose name the text of the problem begins."""
    return problem.split(maxsplit=1)[0].split(".")[0].rstrip(":")
