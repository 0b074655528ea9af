"""Which checkpoints all ranks together can restore: each says what it sees, and all get the same list.

snapshots on this node, the logs of all tiers -> look -> (all agree) -> sources, newest first
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckpt.core.checkpoint.losses import Loss
from ckpt.core.format.manifest import Attempt
from ckpt.core.format.values import Json
from ckpt.core.log.log import Acquire, Commit, RunLog, in_history
from ckpt.core.ranks.world import World, together
from ckpt.core.restore.early_look import EarlyLook
from ckpt.core.restore.sources import HeldSnapshot, MemorySource, RestoreSource, StoreSource
from ckpt.errors import UsageError

MOST_LOST = 64  # damaged logs that a rank tells the others of


def gather(
    world: World,
    snapshots: Iterable[HeldSnapshot],
    acquires: Iterable[Acquire],
    urls: Sequence[str],
    roots: Sequence[Sequence[int]],
    step: int | None,
    lost: list[Loss] | None = None,
    early: EarlyLook | None = None,
    held_damage: Sequence[Loss] = (),
) -> list[RestoreSource]:
    """Every checkpoint that all ranks together can restore, newest first, memory before disk, what was undone last.

    `snapshots`: on this node; `acquires`: the history as far as memory knows it; `roots`: for each of the tiers `urls`,
    which root each rank has (by the lowest rank that has it). With `step` only checkpoints of that step, and without it
    nothing that was undone or not finite. All ranks get the same list. What damage has taken away is added to `lost`.
    `early`: what was read of these tiers before. `held_damage`: of the memory of this node; it is complete when all
    `snapshots` were taken.
    """
    view = _View(world, urls, roots, early or EarlyLook(), held_damage)
    agreed, damage = together(world, "candidates", lambda: view.look(snapshots, acquires, step), _candidates)
    if lost is not None:
        lost += [Loss(tier, reason, tuple(map(Attempt.parse, attempts))) for tier, reason, attempts in damage]
    places: dict[str, list[int]] = {}
    for attempt, place, _ in agreed:
        places.setdefault(attempt, []).append(place)
    return [view.source(one, places[one[0]]) for one in agreed]


Candidate = tuple[str, int, bool]
"""Attempt; place: 0 is memory, then come the tiers; whether it was undone."""


class _View:
    """What this rank sees: the memory of its node, and all tiers."""

    def __init__(
        self,
        world: World,
        urls: Sequence[str],
        roots: Sequence[Sequence[int]],
        early: EarlyLook,
        held_damage: Sequence[Loss],
    ) -> None:
        self._held_damage = held_damage
        self._world, self._urls, self._roots, self._early = world, urls, roots, early
        self._here: dict[Attempt, list[HeldSnapshot]] = {}
        self._logs: list[RunLog] = []

    def _speaks(self, tier: int) -> bool:
        """For all that have the same root."""
        return self._roots[tier][self._world.rank] == self._world.rank

    def look(self, snapshots: Iterable[HeldSnapshot], acquires: Iterable[Acquire], step: int | None) -> Json:
        """As JSON, for all ranks."""
        for snapshot in snapshots:
            self._here.setdefault(snapshot.attempt, []).append(snapshot)
        found: list[Loss] = list(self._held_damage)
        for i, (log, damage) in enumerate(self._early.logs(self._urls)):
            self._logs.append(log)
            if self._speaks(i):
                found += damage
        known = {*acquires, *(a for log in self._logs for a in log.state.acquires)}
        return {
            "step": step,
            "memory": [_held(attempt, parts) for attempt, parts in self._here.items()],
            "acquires": [[a.epoch, a.nonce, None if a.restored is None else str(a.restored)] for a in known],
            "tiers": [_commits(log) if self._speaks(i) else None for i, log in enumerate(self._logs)],
            "lost": [[one.tier, one.reason, [str(a) for a in one.attempts]] for one in found[:MOST_LOST]],
        }

    def source(self, one: Candidate, places: Sequence[int]) -> RestoreSource:
        """One of those that were agreed on; `places`: all that have the same attempt."""
        text, place, undone = one
        attempt, world = Attempt.parse(text), self._world
        if place == 0:
            mine, speaks = self._here.get(attempt, ()), world.local_rank == 0
            return MemorySource(attempt, mine, alone=world.size == 1, undone=undone, describing=speaks)
        i = place - 1
        state = self._logs[i].state
        commit = state.commits.get(attempt) or state.held.get(attempt)
        return StoreSource(
            self._urls[i],
            attempt,
            commit,
            partial=len(set(self._roots[i])) > 1,
            undone=undone,
            describing=self._speaks(i),
            others=[self._urls[p - 1] for p in places if p not in (0, place)],
            content=self._early.content(self._urls[i], commit),
        )


def _candidates(posts: list[Any]) -> tuple[list[Candidate], list[Json]]:
    """What is whole in one place, and what is lost: tier, reason, attempts. Pure.

    What was undone is what any place knows to be undone: another may have been away when a job went back.
    """
    step = posts[0]["step"]
    for rank, post in enumerate(posts):
        if post["step"] != step:
            raise UsageError(f"rank {rank} asks for {_asked(post['step'])}, rank 0 for {_asked(step)}")
    acquires = {(e, n): Acquire(e, n, r and Attempt.parse(r)) for post in posts for e, n, r in post["acquires"]}
    found: list[tuple[Attempt, int]] = []
    broken: set[Attempt] = set()  # some rank said that it is not finite: restored only if asked for by its step
    places = [[post["memory"], *post["tiers"]] for post in posts]
    for place in range(len(places[0])):
        parts: dict[Attempt, tuple[int, set[int]]] = {}
        for post in places:
            for text, size, ranks, finite in post[place] or ():
                parts.setdefault(Attempt.parse(text), (size, set()))[1].update(ranks)
                if finite is False:
                    broken.add(Attempt.parse(text))
        found += [(attempt, place) for attempt, (size, ranks) in parts.items() if len(ranks) == size]
    history = set(in_history(sorted(acquires.values(), key=lambda a: a.epoch), {attempt for attempt, _ in found}))
    known = [(attempt, place, attempt not in history) for attempt, place in found]
    wanted = [one for one in known if (not one[2] and one[0] not in broken if step is None else one[0].step == step)]
    wanted.sort(key=lambda one: (one[2], -one[0].epoch, -one[0].step, one[1]))
    every = [one for post in posts for one in post["lost"]]
    gone = {Attempt.parse(text) for _, _, attempts in every for text in attempts}
    if step is None:
        gone &= set(in_history(sorted(acquires.values(), key=lambda a: a.epoch), gone))
    lost = [[tier, reason, [a for a in attempts if Attempt.parse(a) in gone]] for tier, reason, attempts in every]
    return [(str(attempt), place, undone) for attempt, place, undone in wanted], lost


def _asked(step: int | None) -> str:
    return "the newest checkpoint" if step is None else f"step {step}"


def _held(attempt: Attempt, parts: list[HeldSnapshot]) -> Json:
    """What the memory of this node has of an attempt, in the same form as `_commits`."""
    finite = False if any(s.label.finite is False for s in parts) else None
    return [str(attempt), parts[0].layout.world, [s.layout.rank for s in parts], finite]


def _commits(log: RunLog) -> list[Json]:
    """What a root has, whole or in part: attempt, ranks that saved, ranks whose part is here, whether it is finite."""
    state = log.state
    every: dict[Attempt, Commit] = {**state.held, **state.commits}
    return [[str(a), c.world, [rank for rank, _ in c.parts], c.finite] for a, c in every.items()]
