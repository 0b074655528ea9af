"""Whose run it is: found out, agreed among the ranks, and taken over when a run is opened or restored.

Also what ranks tell each other in the background afterwards: which nodes hold their parts of a checkpoint, and whether
every rank has newer memory than that of before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from ckpt.core.checkpoint.commit import Role
from ckpt.core.format.manifest import Attempt
from ckpt.core.format.partition import partner
from ckpt.core.ipc.notes import HeldNote
from ckpt.core.ipc.requests import Partner
from ckpt.core.log.log import Acquire
from ckpt.core.ranks.world import Mailbox, World, together
from ckpt.core.run.supervise.writer_supervisor import WriterSupervisor
from ckpt.errors import CheckpointError, UsageError
from ckpt.events import log
from ckpt.failpoints import point
from ckpt.tiers import Memory, Tier

JOIN_S = 1.0
NEWER_S = 24 * 3600.0  # a rank whose memory is being made takes its time


class Ownership:
    """Of one Checkpointer. `roots`: of every tier, for each rank the lowest rank that sees the same place."""

    def __init__(self, world: World, tiers: list[Tier], memory: Memory | None, place: str, timeout_s: float) -> None:
        self._world, self._tiers, self._memory = world, tiers, memory
        self._place, self._timeout_s = place, timeout_s
        self._post: Mailbox | None = None
        self._mailing = threading.Lock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.roots: list[list[int]] = []
        self.has_checkpoints = False
        self.cadence: dict[str, Any] = {}  # what the last incarnation saved by
        self.supervisor: WriterSupervisor

    def open(self, make: Callable[[], WriterSupervisor]) -> WriterSupervisor:
        """Find out what there is, agree with the other ranks, and take the run over."""
        world = self._world
        made: list[WriterSupervisor] = []

        def prepare() -> Any:
            made.append(make())
            opened = made[0].opened
            settings: list[Any] = [[tier.url, str(tier.every)] for tier in self._tiers]
            settings.append([self._place, str(self._memory.every if self._memory else 0)])
            return {
                "settings": settings,
                "roots": opened.roots,
                "epoch": opened.epoch,
                "has": opened.has_checkpoints,
                "cadence": opened.cadence,
            }

        try:
            found = together(world, "open", prepare, _open_together)
            self.supervisor = made[0]
            self.roots, self.has_checkpoints = found["roots"], found["has"]
            self.cadence = found["cadence"]
            for i, roots in enumerate(self.roots):
                group = [rank for rank in range(world.size) if roots[rank] == roots[world.rank]]
                self.supervisor.run.roles[i] = Role(tuple(group), group.index(world.rank), world.size)
            self.supervisor.hear(HeldNote, self._on_held)
            self.take_over(found["epoch"], None)
            self._find_partner()
        except BaseException:
            for supervisor in made:
                supervisor.give_up()
            raise
        return self.supervisor

    def _find_partner(self) -> None:
        """With `Memory(replicas=2)` a writer on another node keeps a copy of this rank's memory."""
        world = self._world
        if self._memory is None or self._memory.replicas < 2 or world.size == 1:
            return
        other = partner(world.rank, world.nodes)
        if other is None:
            log.warning("Memory(replicas=2) needs a second node: all ranks are on one, so memory is kept once")
            return
        contacts = together(world, "partners", lambda: self.supervisor.client.ask(Partner()))
        self.supervisor.memory.push_copies()
        self.supervisor.standing.tell(Partner(contacts[other], world.rank))

    def take_over(self, floor: int, restored: Attempt | None) -> None:
        """Open an epoch, the same in all tiers; with `restored` one that continues from there."""
        world, run = self._world, self.supervisor.run
        while True:
            nonce = run.next_nonce()
            epochs = together(world, "acquire", partial(run.acquire, nonce, floor, restored), _union)
            if len(epochs) == 1:
                break
            floor = max(epochs)  # another job came between: one epoch for all tiers
        point("run.taken")
        owner = Acquire(epochs[0], nonce, restored)

        def own() -> list[dict[str, Any]]:
            return [msgspec.structs.asdict(one) for one in run.own(owner, recover=restored is None)]

        complete = together(world, "own", own, _complete)
        if restored is None:
            run.resume()
        for i in range(len(self._tiers)):
            attempts = [Attempt.parse(text) for number, text in complete if number == i]
            if attempts and run.roles[i].place == 0:
                run.complete(i, attempts)

    def _on_held(self, note: HeldNote) -> None:
        """The parts that belong on this node's disk are there: a checkpoint once those of all nodes are."""
        tier, attempt = note.tier, Attempt.parse(note.attempt)
        if self.supervisor.run.roles[tier].place > 0:
            return
        roots, otherwise = sorted(set(self.roots[tier])), f"step {attempt.step} is on this node's disk only"
        complete = partial(self.supervisor.run.complete, tier, [attempt])
        self._when_all(f"held/{tier}/{attempt}", roots, self._timeout_s, complete, otherwise)

    def tell_newer(self, epoch: int) -> None:
        """Older memory may go when every rank has newer snapshots: until then it may be the newest that all have."""

        def note() -> None:
            if self.supervisor.owner.epoch == epoch:
                self.supervisor.memory.everyone = True

        otherwise = "memory of before the restart is kept on, since other ranks have no newer"
        self._when_all(f"newer/{epoch}", range(self._world.size), NEWER_S, note, otherwise)

    def _when_all(
        self, key: str, ranks: Iterable[int], timeout_s: float, then: Callable[[], None], otherwise: str
    ) -> None:
        """Post this, in the background, and go on when all of these ranks have. `otherwise`: what that means if not."""

        def tell() -> None:
            try:
                mailbox = self.mailbox()
                mailbox.put(f"{key}/{self._world.rank}", True)
                mailbox.wait([f"{key}/{rank}" for rank in ranks], timeout_s, self._closed.is_set)
                then()
            except CheckpointError as error:
                if not self._closed.is_set():
                    log.warning("%s: %s", otherwise, error)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=tell, name="ckpt-posts", daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Wait for no other rank any more."""
        self._closed.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def mailbox(self) -> Mailbox:
        with self._mailing:
            if self._post is None:
                self._post = self._world.mailbox()
            return self._post


def _open_together(posts: list[Any]) -> dict[str, Any]:
    """What the ranks found, as one: of each tier, for every rank the lowest rank that sees the same place. Pure."""
    for rank, post in enumerate(posts):
        for theirs, ours in zip(post["settings"], posts[0]["settings"], strict=False):
            if theirs != ours:
                raise UsageError(
                    f"rank {rank} saves to {theirs[0]} every {theirs[1]} steps, rank 0 to {ours[0]} every {ours[1]}"
                )
        if len(post["settings"]) != len(posts[0]["settings"]):
            raise UsageError(f"rank {rank} saves to {len(post['settings']) - 1} tiers, rank 0 to another number")
    tiers = len(posts[0]["roots"])
    ids = [[post["roots"][i] for post in posts] for i in range(tiers)]
    roots = [[mine.index(root) for root in mine] for mine in ids]
    return {
        "roots": roots,
        "epoch": max(p["epoch"] for p in posts),
        "has": any(p["has"] for p in posts),
        "cadence": posts[0]["cadence"],
    }


def _union(lists: list[Any]) -> list[Any]:
    return sorted({one for each in lists for one in each})


def _complete(posts: list[Any]) -> list[tuple[int, str]]:
    """Of what the disks of single nodes hold: (tier, attempt) of which all parts are there. Pure."""
    found: dict[tuple[int, str], tuple[int, set[int]]] = {}
    for part in (part for post in posts for part in post):
        found.setdefault((part["tier"], part["attempt"]), (part["world"], set()))[1].update(part["ranks"])
    return [key for key, (world, ranks) in found.items() if len(ranks) == world]
