"""Makes this job the owner of the run: the ranks open the run together, and begin a new term at the start and after
each restore.

If all ranks see the same tiers, rank 0 acquires the tiers during an agreement that takes place anyway, so a new term
needs no further agreement. If a tier consists of the disks of several nodes, each disk has its own log, and commits the
parts of its own ranks. In that case, all ranks agree on the term, and on the newest checkpoint that all nodes have.
A save to such a tier ends with one verdict for all ranks: `await_nodes`.

In the background, ranks also post when older memory can be released."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from ckpt.core.checkpoint.commits import Role
from ckpt.core.format.boxes import partner
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.messages import ContinueRun, Partner
from ckpt.core.log.run_log import Acquire
from ckpt.core.ranks.world import Mailbox, World, together
from ckpt.core.run.writer_link import HUNG_UP
from ckpt.core.run.writer_supervisor import WriterSupervisor
from ckpt.errors import CheckpointError, SaveError, UsageError, from_wire, to_wire
from ckpt.events import log
from ckpt.failpoints import point
from ckpt.tiers import Memory, Tier
from ckpt.units import count_of

JOIN_S = 1.0
NEWER_S = 24 * 3600.0  # long, because a rank may have to wait a while for memory


class Ownership:
    """Manages the ownership of the run for one `Checkpointer`. `roots`: for each tier and each rank, the lowest rank
    that sees the same storage. `cadence`: the save intervals of the last job attempt."""

    def __init__(self, world: World, tiers: list[Tier], memory: Memory | None, place: str, timeout_s: float) -> None:
        self._world, self._tiers, self._memory = world, tiers, memory
        self._place, self._timeout_s = place, timeout_s
        self._post: Mailbox | None = None
        self._mailing = threading.Lock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.roots: list[list[int]] = []
        self.has_checkpoints = False
        self.cadence: dict[str, Any] = {}
        self.supervisor: WriterSupervisor

    def open(self, make: Callable[[], WriterSupervisor]) -> WriterSupervisor:
        """Get a writer that has opened the tiers, agree with the other ranks, and begin the first term."""
        world = self._world
        made: list[WriterSupervisor] = []

        def prepare() -> Any:
            made.append(make())
            self.supervisor, opened = made[0], made[0].opened
            settings: list[Any] = [[tier.url, str(tier.every)] for tier in self._tiers]
            settings.append([self._place, str(self._memory.every if self._memory else 0)])
            return {
                "settings": settings,
                "roots": opened.roots,
                "newest": opened.term,
                "has": opened.has_checkpoints,
                "cadence": opened.cadence,
            }

        def decide(posts: list[Any]) -> Any:
            found = _open_together(posts)
            self._assign_roles(found["roots"])
            return found | {"term": self.lead(None, found["newest"])}

        try:
            found = together(world, "open", prepare, decide)
            self.has_checkpoints, self.cadence = found["has"], found["cadence"]
            self._assign_roles(found["roots"])
            self.begin_term(found["term"], None, found["newest"])
            self._find_partner()
        except BaseException:
            for supervisor in made:
                supervisor.give_up()
            raise
        return self.supervisor

    def _assign_roles(self, roots: list[list[int]]) -> None:
        """Set the roles in each tier. Ranks that see the same storage commit together, the lowest rank first."""
        self.roots, rank = roots, self._world.rank
        for i, owners in enumerate(roots):
            group = [other for other, owner in enumerate(owners) if owner == owners[rank]]
            self.supervisor.run.roles[i] = Role(tuple(group), group.index(rank), self._world.size)

    def _find_partner(self) -> None:
        """Arrange that a writer on another node keeps a copy of this rank's memory, with `Memory(replicas=2)`."""
        world = self._world
        if self._memory is None or self._memory.replicas < 2 or world.size == 1:
            return
        other = partner(world.rank, world.nodes)
        if other is None:
            log.warning("Memory(replicas=2) needs a second node: all ranks are on one, so memory is kept once")
            return
        contacts = together(world, "partners", lambda: self.supervisor.client.ask(Partner()))
        self.supervisor.tell(Partner(contacts[other], world.rank))

    # -- a new term, the same in all tiers; after a restore, it continues from the restored checkpoint --

    def lead(self, restored: CheckpointId | None, floor: int = 0) -> Any:
        """Acquire the tiers that all ranks share. Rank 0 calls this inside an agreement. Return the term or an error,
        as the argument `term` of `begin_term` on all ranks. Return None if all ranks have to take part."""
        run = self.supervisor.run
        if self._world.size == 1 or any(owner for owners in self.roots for owner in owners):
            return None
        try:
            owner = self._acquire(restored, floor)
            run.own(owner, recover=restored is None)
        except CheckpointError as error:
            wire = to_wire(error)
            return {**wire, "message": f"rank 0: {wire['message']}"}
        return [owner.term, run.turns - 1]

    def begin_term(self, term: Any, restored: CheckpointId | None, floor: int = 0) -> None:
        """Make this process and its writer continue in the new term. `term`: the result of `lead` on rank 0."""
        world, run = self._world, self.supervisor.run
        if isinstance(term, dict):
            raise from_wire(term)
        if term is None:
            self._begin_term_together(restored, floor)
        elif world.rank:
            number, turn = term
            point("run.taken")
            try:
                run.own(Acquire(number, run.nonce(turn), restored), recover=restored is None)
            except CheckpointError as error:
                world.leave(f"could not continue in the new term: {error}")
                raise
        if restored is None:  # recovery has finished in all tiers
            self.supervisor.send(ContinueRun(resume=True))

    def _begin_term_together(self, restored: CheckpointId | None, floor: int) -> None:
        """Begin a term in separate agreements. A single rank and tiers on the disks of nodes use this method."""
        run, owner = self.supervisor.run, self._acquire(restored, floor, all_ranks=True)

        def own() -> list[dict[str, Any]]:
            return [msgspec.structs.asdict(one) for one in run.own(owner, recover=restored is None)]

        if everywhere := together(self._world, "own", own, _everywhere):
            self.supervisor.send(ContinueRun([(tier, checkpoint) for tier, checkpoint in everywhere]))

    def _acquire(self, restored: CheckpointId | None, floor: int, *, all_ranks: bool = False) -> Acquire:
        """Acquire the tiers in which this rank is the lowest, in a term above `floor`. `all_ranks`: all take part."""
        run = self.supervisor.run
        terms = [max(floor, self.supervisor.owner.term)]
        while True:
            nonce = run.nonce(run.turns)
            acquire = partial(run.acquire, nonce, max(terms), restored)
            terms = together(self._world, "acquire", acquire, _union) if all_ranks else acquire()
            if len(terms) == 1:  # otherwise another job has acquired some of the tiers meanwhile
                point("run.taken")
                return Acquire(terms[0], nonce, restored)

    def is_on_nodes(self, tier: int) -> bool:
        """Return True if a tier consists of the disks of several nodes, so that no node sees all of a checkpoint."""
        return len(set(self.roots[tier])) > 1

    def await_nodes(
        self,
        tier: int,
        checkpoint: CheckpointId,
        error: CheckpointError | None,
        then: Callable[[CheckpointError | None], None],
    ) -> None:
        """Call `then` in the background with the outcome of a save on all nodes. `error`: why this node has failed.

        The first rank of each node posts its outcome. Rank 0 waits for these posts, and posts the verdict. If a node
        has failed, the other nodes retire their parts. If a node is silent, its outcome is unknown, and they keep them.
        """
        world, key, first = self._world, f"stored/{tier}/{checkpoint}", self.supervisor.run.roles[tier].place == 0

        def share() -> None:
            failure = error
            try:
                mailbox = self.mailbox()
                if first:
                    mailbox.put(f"{key}/{world.rank}", None if error is None else f"rank {world.rank}: {error}")
                if world.rank == 0:
                    nodes = sorted({0} if error is not None else set(self.roots[tier]))
                    posts = mailbox.wait([f"{key}/{rank}" for rank in nodes], self._timeout_s, self._closed.is_set)
                    mailbox.put(key, next(filter(None, posts), None))
                if error is None and (why := mailbox.wait([key], 2 * self._timeout_s, self._closed.is_set)[0]):
                    failure = SaveError(f"another node failed, {why}")
                    if first:
                        self.supervisor.writes.retract(checkpoint, why, tier)
                elif error is None:
                    self.supervisor.send(ContinueRun([(tier, str(checkpoint))]))
            except CheckpointError as problem:
                unknown = HUNG_UP if self._closed.is_set() else f"other nodes may not have their parts: {problem}"
                failure = error or SaveError(unknown)
            then(failure)

        self._in_background(share)

    def tell_newer(self, term: int) -> None:
        """Post that this rank has newer snapshots. Allow the release of older memory once all have."""

        def tell() -> None:
            try:
                mailbox = self.mailbox()
                mailbox.put(f"newer/{term}/{self._world.rank}", True)
                others = [f"newer/{term}/{rank}" for rank in range(self._world.size)]
                mailbox.wait(others, NEWER_S, self._closed.is_set)
            except CheckpointError as error:
                if not self._closed.is_set():
                    log.warning(
                        "memory from before the restart is kept, because other ranks have none that is newer: %s", error
                    )
                return
            if self.supervisor.owner.term == term:
                self.supervisor.memory.everyone = True

        self._in_background(tell)

    def _in_background(self, work: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, name="ckpt-posts", daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Stop the background waits for other ranks."""
        self._closed.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def mailbox(self) -> Mailbox:
        with self._mailing:
            if self._post is None:
                self._post = self._world.mailbox()
            return self._post


def _open_together(posts: list[Any]) -> dict[str, Any]:
    """Combine the results of opening on all ranks. Raises UsageError if ranks save to different tiers. Pure."""
    for rank, post in enumerate(posts):
        for theirs, ours in zip(post["settings"], posts[0]["settings"], strict=False):
            if theirs != ours:
                raise UsageError(
                    f"rank {rank} saves to {theirs[0]} with every={theirs[1]}, rank 0 to {ours[0]} with every={ours[1]}"
                )
        if len(post["settings"]) != len(posts[0]["settings"]):
            others = count_of(len(post["settings"]) - 1, "tier")
            raise UsageError(f"rank {rank} saves to {others}, rank 0 to another number")
    tiers = len(posts[0]["roots"])
    ids = [[post["roots"][i] for post in posts] for i in range(tiers)]
    roots = [[mine.index(root) for root in mine] for mine in ids]
    return {
        "roots": roots,
        "newest": max(p["newest"] for p in posts),
        "has": any(p["has"] for p in posts),
        "cadence": posts[0]["cadence"],
    }


def _union(lists: list[Any]) -> list[Any]:
    return sorted({one for each in lists for one in each})


def _everywhere(posts: list[Any]) -> list[tuple[int, str]]:
    """Return, for each tier on the disks of nodes, the newest checkpoint whose parts are all on these disks. Pure."""
    found: dict[tuple[int, CheckpointId], tuple[int, set[int]]] = {}
    for part in (part for post in posts for part in post):
        key = part["tier"], CheckpointId.parse(part["checkpoint"])
        found.setdefault(key, (part["world"], set()))[1].update(part["ranks"])
    complete = sorted(key for key, (world, ranks) in found.items() if len(ranks) == world)
    return [(tier, str(checkpoint)) for tier, checkpoint in dict(complete).items()]
