"""The sealed snapshots in the memory of this node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ckpt.errors import CheckpointError
from ckpt.format.manifest import Attempt
from ckpt.ipc import requests
from ckpt.ranks.world import World
from ckpt.restore.sources import HeldSnapshot
from ckpt.runlog.log import in_history
from ckpt.trainer.staging.stage import Stager
from ckpt.trainer.supervise.current_writer import CurrentWriter
from ckpt.trainer.supervise.layouts import KnownLayouts
from ckpt.trainer.supervise.memory import HeldElsewhere, SnapshotMemory, as_digests
from ckpt.trainer.supervise.siblings import Siblings
from ckpt.trainer.supervise.writer_client import REQUEST_S


class HeldSnapshots:
    """As one rank sees them."""

    def __init__(
        self,
        writer: CurrentWriter,
        stager: Stager,
        world: World,
        memory: SnapshotMemory,
        layouts: KnownLayouts,
        siblings: Siblings,
    ) -> None:
        self._writer, self._stager, self._world = writer, stager, world
        self._memory, self._layouts, self._siblings = memory, layouts, siblings

    def sealed(self) -> dict[Attempt, int]:
        """Slots of the present arena that hold what these ranks took, and no rollback has undone."""
        arena, found = self._stager.arena, dict[Attempt, int]()
        for slot, label in arena.sealed() if arena is not None else ():
            layout = self._layouts.known.get(label.layout)
            if label.attempt is not None and layout is not None and layout.world == self._world.size:
                found[label.attempt] = slot
        return {attempt: found[attempt] for attempt in in_history(self._memory.inherited.acquires, found)}

    @contextlib.contextmanager
    def holding_still(self, *, alone: bool) -> Iterator[list[Attempt]]:
        """Inside, the snapshots of the present arena are not overwritten; of a rank that is `alone` the newest, and the
        newest that is finite."""
        arena = self._stager.arena
        sealed = list(self.sealed().items()) if arena is not None else []
        if alone and arena is not None:
            broken = {label.attempt for _, label in arena.sealed() if label.finite is False}
            sealed = list(dict.fromkeys([*sealed[:1], *[one for one in sealed if one[0] not in broken][:1]]))
        for _, slot in sealed:
            assert arena is not None
            self._stager.slots.pin(arena, slot)
        try:
            yield [attempt for attempt, _ in sealed]
        finally:
            for _, slot in sealed:
                assert arena is not None
                self._stager.slots.unpin(arena.id, slot)

    @contextlib.contextmanager
    def snapshots(self) -> Iterator[Iterator[HeldSnapshot]]:
        """Of all ranks of the node; valid inside the context. Looked for when they are asked for, so that ranks can
        agree on what goes wrong with it."""
        visited: list[HeldElsewhere] = []
        try:
            yield self._look(visited)
        finally:
            for held in visited:
                held.close()

    def _look(self, visited: list[HeldElsewhere]) -> Iterator[HeldSnapshot]:
        inherited = self._memory.inherited
        with contextlib.suppress(CheckpointError):  # the writer digests what it writes, and the ring after a death
            everything = self._layouts.differ_from(self._world.size)
            inherited.digests.update(as_digests(self._writer.ask(requests.AskDigests(all=everything), REQUEST_S)))
        layouts = {**inherited.layouts, **self._layouts.known}
        ours = HeldElsewhere(self._memory.all_arenas(), layouts, inherited.digests)
        found = {(one.attempt, one.layout.rank): one for one in _sealed(ours)}
        for key in self._siblings.beside():
            if (there := self._siblings.visit(key)) is not None:
                visited.append(there.held)
                inherited.learn(there.held.acquires)
                for one in _sealed(there.held):
                    found.setdefault((one.attempt, one.layout.rank), one)
        yield from found.values()


def _sealed(held: HeldElsewhere) -> Iterator[HeldSnapshot]:
    for arena in held.arenas:
        for slot, label in arena.sealed():
            layout = held.layouts.get(label.layout)
            if layout is not None and label.attempt is not None:
                digests = held.digests.get((label.attempt, layout.rank))
                yield HeldSnapshot(arena, slot, label, layout, digests)
