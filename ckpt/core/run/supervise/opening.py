"""The run, as each writer is told of it: opened, taken over, and owned by this incarnation."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.core.cadence.cadence import MEMORY, Auto
from ckpt.core.checkpoint.commit import Role
from ckpt.core.format.manifest import Attempt, nonce_of
from ckpt.core.ipc import requests
from ckpt.core.ipc.requests import Json
from ckpt.core.log.log import Acquire
from ckpt.core.ranks.world import World
from ckpt.core.run.supervise.current_writer import CurrentWriter
from ckpt.core.run.supervise.memory import SnapshotMemory
from ckpt.core.run.supervise.writer_client import WriterClient
from ckpt.tiers import Memory, Tier

OPEN_S = 300.0
NUMBERS_EACH = 10_000  # data files of one checkpoint that a writer may write; its successor begins behind them
NEXT_NONCES = 64  # how often other jobs may take ownership while this one opens the run or restores


@dataclass(frozen=True)
class Opened:
    """What the durable tiers, and the memory of earlier incarnations, look like to this rank."""

    roots: tuple[str, ...]  # of every tier, the id of what is there; equal ids are one shared place
    epoch: int  # the highest that is known
    has_checkpoints: bool
    cadence: Json  # what the last incarnation saved by, if that is to be found out; {} if nobody knows


class RunOpener:
    """Of one rank. `owner`: what all ranks have agreed on; `roles`: of this rank, for each tier."""

    def __init__(
        self,
        writer: CurrentWriter,
        held: SnapshotMemory,
        tiers: list[Tier],
        memory: Memory | None,
        world: World,
        commit_s: float,
        takeover: bool,
        root: str,
    ) -> None:
        """`root`: the id of the run in the nearest tier, as this process sees it."""
        self._roots = [root] if tiers else []  # once the run was opened, of all tiers
        self._writer, self._held, self.tiers, self._memory = writer, held, tiers, memory
        self._world, self._commit_s, self._takeover = world, commit_s, takeover
        self.owner = Acquire(0, "", None)
        self.found: list[str] = []  # the ids of the runs in all tiers
        self.roles = [Role((world.rank,), 0, world.size) for _ in tiers]
        self._nonces: list[str] = []  # those that this job has asked for a term with

    def open(self, client: WriterClient, *, writers: int = 0) -> Opened:
        """Have the durable places opened; nothing in them is changed. `writers`: of ours that have died before."""
        request = requests.OpenRun(
            tiers=[tier.spec() for tier in self.tiers],
            linger_s=self._memory.linger_s if self._memory is not None else 0.0,
            commit_s=self._commit_s,
            first_number=NUMBERS_EACH * writers,
            check=not self._takeover and not self.owner.epoch and self._world.local_rank == 0,
            auto=[name for name, every in self._cadences() if isinstance(every, Auto)],
            next_nonces=self._next_nonces,
            acquires=[_row(acquire) for acquire in self._held.inherited.acquires],
            roots=self._roots,
        )
        reply = client.ask(request, OPEN_S)
        if not self.owner.epoch:
            self.found = [tier.root for tier in reply.tiers]
        inherited = self._held.inherited
        epochs = [*(a.epoch for a in inherited.acquires), *(tier.epoch for tier in reply.tiers)]
        stored = any(tier.checkpoints or tier.damaged for tier in reply.tiers)
        snapshots = any(arena.sealed() for arena in inherited.arenas)
        return Opened(tuple(tier.root for tier in reply.tiers), max([0, *epochs]), stored or snapshots, reply.cadence)

    def _cadences(self) -> list[tuple[str, object]]:
        memory: list[tuple[str, object]] = [(MEMORY, self._memory.every)] if self._memory is not None else []
        return memory + [(tier.url, tier.every) for tier in self.tiers]

    def open_again(self, client: WriterClient, *, writers: int) -> None:
        """By a writer that takes the place of one that has died."""
        self.open(client, writers=writers)
        if self.owner.epoch:
            self._own(client, recover=False)

    @property
    def near(self) -> dict[str, str]:
        """The id of the run in the nearest tier, by its URL."""
        return dict(zip([tier.url for tier in self.tiers], self._roots[:1], strict=False))

    @property
    def roots(self) -> dict[str, str]:
        """The ids of the runs in all tiers, by URL, once they are open."""
        return dict(zip([tier.url for tier in self.tiers], self.found, strict=True))

    @property
    def turns(self) -> int:
        """How many terms this job has asked for."""
        return len(self._nonces)

    def nonce(self, turn: int) -> str:
        """Return the nonce of a term. All ranks compute the same, so that no writer takes it for another job."""
        self._nonces = [nonce_of(self._world.job, n) for n in range(turn + 1)]
        return self._nonces[-1]

    @property
    def _next_nonces(self) -> list[str]:
        """List the nonces by which a writer recognizes that its own job has taken ownership."""
        first = max(0, len(self._nonces) - 1)  # a new writer may have to ask again with the last one
        return [nonce_of(self._world.job, turn) for turn in range(first, first + NEXT_NONCES)]

    def acquire(self, nonce: str, floor: int, restored: Attempt | None) -> list[int]:
        """Take over the places that this rank speaks for; the epochs that they gave. All have to be the same."""
        mine = self._spoken_for()
        if not mine and (self.roles or self._world.rank > 0):
            return []  # others speak for all of them
        request = requests.AcquireRun(nonce, floor, str(restored) if restored else None, mine)
        return self._writer.insist(lambda client: client.ask(request))  # again with the same nonce: done at most once

    def own(self, owner: Acquire, *, recover: bool) -> list[requests.PartsHere]:
        """All ranks agree on the owner. Of the tiers that this rank recovers: what only parts are here of."""
        with self._writer.lock:
            self.owner = owner
            self._roots = self.found  # a writer that takes the place of a dead one must find the same
            self._held.inherited.acquires.append(owner)
        self._held.count_anew()
        return self._writer.insist(lambda client: self._own(client, recover=recover))

    def _own(self, client: WriterClient, *, recover: bool) -> list[requests.PartsHere]:
        roles = [(list(role.ranks), role.place, role.world) for role in self.roles]
        recovered = self._spoken_for() if recover else []
        return client.ask(requests.OwnRun(_row(self.owner), roles, recovered, self._next_nonces), OPEN_S)

    def _spoken_for(self) -> list[int]:
        return [i for i, role in enumerate(self.roles) if role.place == 0]

    def is_ours(self, owner: requests.Owner) -> bool:
        """Return True if this is an owner of our history, or will be."""
        ours = {(one.epoch, one.nonce) for one in (*self._held.inherited.acquires, self.owner)}
        return owner[:2] in ours or owner[1] in self._nonces

    def resume(self) -> None:
        """Resume interrupted copies to further tiers: what earlier terms left unfinished was ended in all tiers."""
        self._writer.send(requests.Resume())

    def complete(self, tier: int, attempts: list[Attempt]) -> None:
        """All places hold their parts of these."""
        self._writer.send(requests.Complete(tier, [str(a) for a in attempts]))

    def distrust(self, url: str) -> None:
        """Have the next checkpoint of a tier be full, because a restore found damage there."""
        self._writer.send(requests.Distrust(url))


def _row(acquire: Acquire) -> requests.Owner:
    return acquire.epoch, acquire.nonce, str(acquire.restored) if acquire.restored else None
