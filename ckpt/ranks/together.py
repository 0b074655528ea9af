"""Something that every rank does, and that has failed for all if it has failed for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt import errors
from ckpt.errors import CheckpointError, TransferError, from_wire, to_wire
from ckpt.events import log as logger
from ckpt.ranks.board import Json
from ckpt.ranks.world import World


def together(
    world: World, topic: str, work: Callable[[], Json], decide: Callable[[list[Json]], Json] | None = None
) -> Any:
    """Do something on every rank. If it failed anywhere, all raise the same error: all must go on in the same way."""
    post: dict[str, Json] = {}
    failure: Exception | None = None
    try:
        post["value"] = work()
    except Exception as error:
        failure, post["error"] = error, to_wire(error)
    verdict = world.agree(topic, post, lambda posts: _verdict(posts, decide))
    if "error" not in verdict:
        return verdict["value"]
    foreign = failure is not None and not isinstance(failure, CheckpointError)
    if failure is not None and (world.size == 1 or (foreign and verdict["rank"] == world.rank)):
        raise failure  # of ours, all raise the same, word for word
    if failure is not None and verdict["rank"] != world.rank:
        logger.warning("%s failed on this rank as well: %r", topic, failure)
    raise from_wire(verdict["error"]) from failure


def _verdict(posts: list[Any], decide: Callable[[list[Json]], Json] | None) -> dict[str, Json]:
    """What failed first counts, not what failed since a rank failed."""
    failed = [(rank, post["error"]) for rank, post in enumerate(posts) if "error" in post]
    failed.sort(key=lambda one: (one[1]["error"] == TransferError.__name__, one[0]))
    for rank, error in failed[:1]:
        known = error["error"] in vars(errors)  # somebody else's exception is raised by the rank that met it
        message = f"rank {rank}: {error['message']}" if len(posts) > 1 else error["message"]
        return {"rank": rank, "error": {**error, "message": message, **({} if known else {"error": "PeerError"})}}
    values = [post["value"] for post in posts]
    try:
        return {"value": values if decide is None else decide(values)}
    except CheckpointError as error:
        return {"rank": -1, "error": to_wire(error)}
