"""Ranks that have left: what they never saved, no other rank waits for.

A rank that leaves posts which checkpoints it has a part of. While a save of this rank is under way, a background thread
looks for such posts, and fails each save that a rank which has left has no part of, with an error that names it. A rank
that is merely slow is not failed: the writer reports it, see `ckpt.core.checkpoint.settle`.
"""

from __future__ import annotations

import threading
from typing import Any

from ckpt.core.format.manifest import Attempt
from ckpt.core.ranks.world import Mailbox
from ckpt.core.run.progress import Progress, Staged
from ckpt.core.run.saves import TierWrites
from ckpt.core.run.session import Session
from ckpt.core.run.supervise.writer_link import start_thread
from ckpt.errors import CheckpointError
from ckpt.events import log

LOOK_S, LOOKS_PER_S = 1.0, 500  # between two looks at the store; of all ranks together
AGAIN_S = 30.0  # if the store does not answer
POST_S = 5.0  # for the store to take a post, or to return those of other ranks


class Departures:
    """Posts that this rank leaves, and fails saves that other ranks left without."""

    def __init__(self, session: Session, progress: Progress, staged: Staged, writes: TierWrites) -> None:
        self._session, self._progress, self._staged, self._writes = session, progress, staged, writes
        self._others = [rank for rank in range(session.world.size) if rank != session.world.rank]
        self._posts: dict[int, dict[str, Any]] = {}  # by rank that has left
        self._seen: set[str] = set()  # attempts that were found to miss a rank
        self._looking = threading.RLock()  # a signal handler may close us meanwhile
        self._stopped = threading.Event()
        self._mail: Mailbox | None = None
        if self._others and session.tiers:
            self._thread = threading.Thread(target=self._watch, name="ckpt-departures", daemon=True)
            self._thread.start()
            session.ends.callback(self._stop)

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join(LOOK_S)

    def leave(self, how: str) -> None:
        """Post that this rank saves nothing more. Never raises."""
        if not self._others:
            return
        posted = threading.Event()
        start_thread(lambda: self._post(how, posted), "ckpt-departs")
        posted.wait(POST_S)

    def _post(self, how: str, posted: threading.Event) -> None:
        sealed = [attempt for attempt, _ in self._staged.sealed()]
        step = self._progress.step if self._progress.stepped else None
        post = {"how": how, "step": step, "has": sorted({*sealed, *self._writes.sent})}
        try:
            mail = self._session.ownership.mailbox()
            mail.put(f"left/{self._session.world.rank}", post)
            mail.put("left/any", True)
        except CheckpointError as error:
            log.info("other ranks cannot be told that this one leaves: %s", error)
        finally:
            posted.set()

    def look(self, *, all_left: bool = False) -> None:
        """Read the posts of ranks that have left, and fail what they have no part of. `all_left`: every rank has
        posted. PeerError if the store cannot be reached."""
        with self._looking:
            if self._mail is None:
                self._mail = self._session.world.mailbox()
            new = [rank for rank in self._others if rank not in self._posts]
            if not all_left:
                any_left = bool(new) and self._mail.poll(["left/any"])
                new = [rank for rank in new if any_left and self._mail.poll([f"left/{rank}"])]
            self._posts |= zip(new, self._mail.wait([f"left/{rank}" for rank in new], POST_S), strict=True)
            for attempt in self._writes.under_way():
                self._fail_if_missing(attempt, at_once=all_left)

    def _fail_if_missing(self, attempt: str, *, at_once: bool) -> None:
        """The rank that commits fails it first. If that one has left itself, another does at its next look."""
        missing = [rank for rank, post in sorted(self._posts.items()) if attempt not in post["has"]]
        if not missing:
            return
        supervisor = self._session.supervisor
        if at_once or attempt in self._seen or any(role.place == 0 for role in supervisor.run.roles):
            parsed = Attempt.parse(attempt)
            reason = f"{self.describe(missing[0])} and saved no step {parsed.step}"
            supervisor.writes.retract(parsed, reason)
        self._seen.add(attempt)

    def describe(self, rank: int) -> str:
        """Say how far a rank came that has left."""
        post = self._posts[rank]
        came = f"after step {post['step']}" if post["step"] is not None else "without any step()"
        return f"rank {rank} {post['how']} {came}"

    def behind(self, step: int) -> list[str]:
        """Describe the ranks that left before this step."""
        steps = {rank: -1 if post["step"] is None else post["step"] for rank, post in sorted(self._posts.items())}
        return [self.describe(rank) for rank, last in steps.items() if last < step]

    def _watch(self) -> None:
        usual_s = max(LOOK_S, self._session.world.size / LOOKS_PER_S)
        pause_s = usual_s
        while not self._stopped.wait(pause_s):
            if not self._writes.under_way():
                continue
            try:
                self.look()
                pause_s = usual_s
            except CheckpointError as error:
                log.debug("posts of ranks that left cannot be read: %s", error)
                pause_s = min(2 * pause_s, AGAIN_S)
