"""The sealed snapshots in the memory of this node: of our writer, of those beside it, and of ranks that are no more."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt.core.checkpoint.losses import Loss
from ckpt.core.format.manifest import Attempt
from ckpt.core.ipc import channel, requests
from ckpt.core.log.log import in_history
from ckpt.core.ranks.world import World
from ckpt.core.restore.sources import HeldSnapshot
from ckpt.core.run.supervise.current_writer import CurrentWriter
from ckpt.core.run.supervise.find_writer import DYING_S, HELLO_S, PATIENT_S, Intruder
from ckpt.core.run.supervise.memory import HeldElsewhere, SnapshotMemory, as_digests
from ckpt.core.run.supervise.opening import RunOpener
from ckpt.core.run.supervise.writer_client import REQUEST_S, WriterClient
from ckpt.core.run.supervise.writes import KnownLayouts
from ckpt.core.snapshot.stage import Stager
from ckpt.errors import CheckpointError, DeadlineError, WriterError
from ckpt.events import log
from ckpt.store import folder_of
from ckpt.tiers import Tier

FORMER_S = 3.0  # for a writer to reply that probably holds another run


@dataclass(frozen=True)
class Lent:
    """What another writer has lent us, and its reply."""

    held: HeldElsewhere
    reply: requests.LendReply


class HeldSnapshots:
    """The snapshots in the memory of this node, as one rank sees them. Of another job with more local ranks, writers
    without a trainer are left over: the ranks of this job share them, borrow their memory, and have their own writers
    hold it. So are former writers, which have the same path or URL and another key: they hold another run, or this one,
    if its folder was restored from a copy, or if only the nearest tier was emptied."""

    def __init__(
        self,
        key: str,
        writer: CurrentWriter,
        stager: Stager,
        world: World,
        memory: SnapshotMemory,
        layouts: KnownLayouts,
        run: RunOpener,
        intruder: Intruder,
    ) -> None:
        self._key, self._writer, self._stager, self._world = key, writer, stager, world
        self._memory, self._layouts, self._run, self._intruder = memory, layouts, run, intruder
        self.damage: list[Loss] = []  # of the snapshots that were looked for last

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
        borrowed: list[HeldElsewhere] = []
        try:
            yield self._look(borrowed)
        finally:
            for held in borrowed:
                held.close()

    def _look(self, borrowed: list[HeldElsewhere]) -> Iterator[HeldSnapshot]:
        inherited = self._memory.inherited
        with contextlib.suppress(CheckpointError):  # the writer digests what it writes, and the ring after a death
            everything = self._layouts.differ_from(self._world.size)
            reply = self._writer.ask(requests.Lend(look=True, digest=everything), REQUEST_S)
            inherited.digests.update(as_digests(reply.digests))
        layouts = {**inherited.layouts, **self._layouts.known}
        ours = HeldElsewhere(self._memory.all_arenas(), layouts, inherited.digests, damaged=inherited.damaged)
        self.damage[:] = _damage(ours)
        found = {(one.attempt, one.layout.rank): one for one in _sealed(ours)}
        for key in self._beside():
            if (there := self._borrow(key)) is not None:
                borrowed.append(there.held)
                self.damage += _damage(there.held)
                inherited.learn(there.held.acquires)
                for one in _sealed(there.held):
                    found.setdefault((one.attempt, one.layout.rank), one)
        yield from found.values()

    # -- other writers of this run on this machine --

    def _beside(self) -> list[str]:
        """Their keys, ours among them, where there are several ranks."""
        return list(channel.siblings(self._key).values()) if self._world.size > 1 else []

    def _left_over(self) -> list[str]:
        world, found = self._world, channel.siblings(self._key)
        return [key for n, key in found.items() if n >= world.local_size and n % world.local_size == world.local_rank]

    def _share(self, local_rank: int) -> bool:
        """Return True if this rank is the one that looks at what another local rank has left."""
        return local_rank % self._world.local_size == self._world.local_rank

    def _former(self, is_ours: Callable[[requests.LendReply], bool]) -> list[str]:
        """Return the keys of former writers that hold our run, which `is_ours` tells by their replies."""
        ours, found = self._key.rpartition("-")[0], list[str]()
        keys = [key for key in channel.at_place(self._key) if key.rpartition("-")[0] != ours]
        if not keys:
            return found
        with _proof(self._run.tiers) as proof:
            for key in (key for key in keys if self._share(int(key.rpartition("-")[2]))):
                with contextlib.suppress(CheckpointError):  # of another version, for example
                    reply = channel.ask_once(key, requests.Lend(proof), FORMER_S)
                    if reply is not None and is_ours(reply):
                        found.append(key)
        return found

    def _in_our_folder(self, reply: requests.LendReply) -> bool:
        """Return True for a writer that holds the run of our nearest tier, in the very same folder."""
        return bool(self._run.near) and reply.sees and self._run.near.items() <= reply.roots.items()

    def _of_our_run(self, reply: requests.LendReply) -> bool:
        """Return True for a writer that holds this run, by any of its tiers. The run has to be open."""
        return bool((self._run.roots.items() & reply.roots.items()) - (set() if reply.sees else self._run.near.items()))

    def check_left_over(self) -> None:
        """Before anything is taken: wait until no trainer of such a writer trains the run. See `Intruder`."""
        for key in [*self._left_over(), *self._former(self._in_our_folder)]:
            if (found := self._borrow_unused(key)) is not None:
                found.held.close()

    def take_left_over(self) -> None:
        """Have our writer hold what writers without a trainer hold."""
        self._take(self._left_over())

    def take_former(self) -> bool:
        """The same of former writers that hold this run. Return True if there were some."""
        keys = self._former(self._of_our_run)
        self._take(keys)
        return bool(keys)

    def _take(self, keys: list[str]) -> None:
        for key in keys:
            if (found := self._borrow_unused(key)) is not None:
                self._layouts.take(found.held.layouts)
                self._memory.take(found.held)

    def _borrow_unused(self, key: str) -> Lent | None:
        """Once its trainer is dead, or its job is fenced."""
        end = time.monotonic() + DYING_S
        while True:
            found = self._borrow(key)
            if found is None or not found.reply.alive:
                return found
            found.held.close()
            if time.monotonic() > end and (client := WriterClient.find(key)) is not None:
                try:
                    self._intruder.make_way(client, found.reply, "a rank of ")
                finally:
                    client.close()
            time.sleep(0.1)

    def _borrow(self, key: str) -> Lent | None:
        """What another writer of this run on this node holds. None if it is gone. That it does not reply is an error:
        its memory may be the newest that there is."""
        client = WriterClient.find(key)
        if client is None:
            return None
        try:
            compare = self._layouts.differ_from(self._world.size)
            reply, fds = client.ask_patiently(requests.Lend(digest=compare), HELLO_S, PATIENT_S)
            return Lent(HeldElsewhere.of(reply, fds), reply)
        except WriterError as error:
            log.warning("a writer on this node is gone, with what it held: %s", error)
            return None
        except (DeadlineError, OSError) as error:  # it stands still, or its memory cannot be mapped here
            raise DeadlineError(
                f"{client.described()}, does not lend it ({error}), and it may be the newest step: try again, or end "
                f"it (`ps`: {channel.AT_WORK} … {key}) to do without"
            ) from error
        finally:
            client.close()


@contextlib.contextmanager
def _proof(tiers: list[Tier]) -> Iterator[str]:
    """Yield the name of a temporary file in the folder of the nearest tier, "" if there is none."""
    folder = folder_of(tiers[0].url) if tiers else None
    name = f".{secrets.token_hex(8)}.tmp"
    if folder is None:
        yield ""
        return
    try:
        (folder / name).touch(exist_ok=False)
        yield name
    except OSError:
        yield ""
    finally:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _sealed(held: HeldElsewhere) -> Iterator[HeldSnapshot]:
    for arena in held.arenas:
        for slot, label in arena.sealed():
            layout = held.layouts.get(label.layout)
            if layout is not None and label.attempt is not None:
                known = held.digests.get((label.attempt, layout.rank))
                digests, late = (None, False) if known is None else known
                yield HeldSnapshot(arena, slot, label, layout, digests, late)


def _damage(held: HeldElsewhere) -> list[Loss]:
    """What cannot be used of it, and perhaps was newer than all that can be."""
    found = [*held.damaged.values(), *(problem for arena in held.arenas for problem in arena.damage())]
    return [Loss("memory", problem) for problem in found]
