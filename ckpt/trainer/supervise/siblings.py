"""Other writers of this run on this machine, and what they hold: of ranks beside us, and of ranks that are no more."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from ckpt.errors import CheckpointError, DeadlineError, InUseError, WriterError
from ckpt.events import log
from ckpt.ipc import channel, requests
from ckpt.ranks.world import World
from ckpt.trainer.supervise import find_writer
from ckpt.trainer.supervise.current_writer import CurrentWriter
from ckpt.trainer.supervise.layouts import KnownLayouts
from ckpt.trainer.supervise.memory import HeldElsewhere, SnapshotMemory
from ckpt.trainer.supervise.opening import RunOpener
from ckpt.trainer.supervise.writer_client import WriterClient


@dataclass(frozen=True)
class Visited:
    """What another writer holds, and whether its trainer lives, which is `trainer`."""

    held: HeldElsewhere
    alive: bool
    trainer: int
    since: float


class Siblings:
    """Of one rank. Orphans are the writers of local ranks that this job does not have: the ranks that are there now
    share them out."""

    def __init__(
        self,
        key: str,
        world: World,
        writer: CurrentWriter,
        memory: SnapshotMemory,
        layouts: KnownLayouts,
        run: RunOpener,
        takeover: bool,
    ) -> None:
        self._key, self._world, self._writer, self._takeover = key, world, writer, takeover
        self._memory, self._layouts, self._run = memory, layouts, run

    def beside(self) -> list[str]:
        """Their keys, ours among them, where there are several ranks."""
        return list(channel.siblings(self._key).values()) if self._world.size > 1 else []

    def _orphans(self) -> list[str]:
        world, found = self._world, channel.siblings(self._key)
        return [key for n, key in found.items() if n >= world.local_size and n % world.local_size == world.local_rank]

    def check_orphans(self) -> None:
        """Before anything is taken: InUseError if such a rank is still trained, and this is no takeover."""
        for key in () if self._takeover else self._orphans():
            found = self._visit_orphan(key)
            if found is not None:
                found.held.close()

    def take_orphans(self) -> dict[str, list[str]]:
        """Have our writer hold what they hold. Returns whose arenas it has now."""
        taken: dict[str, list[str]] = {}
        for key in self._orphans():
            found = self._visit_orphan(key)
            if found is not None:
                self._layouts.take(found.held.layouts)
                self._memory.take(found.held)
                taken[key] = [arena.id.hex() for arena in found.held.arenas]
        return taken

    def dismiss(self, taken: dict[str, list[str]]) -> None:
        """Our writer holds these arenas now, and knows their history: writers that hold no others are not needed."""
        for key, arenas in taken.items():
            client = WriterClient.find(key)
            if client is not None:
                with contextlib.suppress(CheckpointError):
                    client.ask(requests.Taken(arenas), 10.0)
                client.close()

    def _visit_orphan(self, key: str) -> Visited | None:
        """Once its trainer is dead, or has lost the run to us. InUseError if it lives, and this is no takeover."""
        end, told = time.monotonic() + find_writer.DYING_S, False
        while True:
            found = self.visit(key)
            if found is None or not found.alive:
                return found
            found.held.close()
            if self._takeover and not told:
                self._run.open(self._writer.client)  # who lost the run to us has lost it, even if we fail: fail before
                self._take_from(key)
                told = True
            if time.monotonic() > end:
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.since))
                raise InUseError(f"process {found.trainer} on this machine trains a rank of this run, since {since}")
            time.sleep(0.1)

    def _take_from(self, key: str) -> None:
        """Tell a trainer that lives, by its writer, that it has lost the run."""
        client = WriterClient.find(key)
        if client is not None:
            try:
                client.ask(requests.Lose(), find_writer.PATIENT_S)
            finally:
                client.close()

    def visit(self, key: str) -> Visited | None:
        """What another writer of this run on this node holds; it keeps its trainer. None if it is gone. That it does
        not say so is an error: it may be the newest that there is."""
        client = WriterClient.find(key)
        if client is None:
            return None
        try:
            hello, fds = client.greet(find_writer.HELLO_S, find_writer.PATIENT_S, visit=True)
            compare = self._layouts.differ_from(self._world.size)
            digests = client.ask(requests.AskDigests(all=True)) if compare else hello.digests
            held = HeldElsewhere.of(hello, fds, digests)
            return Visited(held, hello.alive, hello.trainer, hello.since)
        except WriterError as error:
            log.warning("a writer on this node is gone, with what it held: %s", error)
            return None
        except (DeadlineError, OSError) as error:  # it stands still, or its memory cannot be mapped here
            raise DeadlineError(
                f"a writer of this run on this machine does not say what it holds ({error}), which may be the newest "
                f"step: try again, or end it (`ps`: {channel.AT_WORK} … {key}) to do without"
            ) from error
        finally:
            client.close()
