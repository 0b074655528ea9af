"""The layouts of snapshots: what a writer has to know before it can do anything with a slot."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from ckpt.format.layout import Layout
from ckpt.ipc import requests
from ckpt.trainer.supervise.current_writer import CurrentWriter, WriterUser
from ckpt.trainer.supervise.memory import SnapshotMemory
from ckpt.trainer.supervise.writer_client import WriterClient

MOST_LAYOUTS = 64  # that are kept without asking whether they are needed
NEWEST = 8  # that are kept in any case


class KnownLayouts(WriterUser):
    """`known`: by digest, those of this rank, and of the memory that its writer holds."""

    def __init__(self, writer: CurrentWriter, memory: SnapshotMemory) -> None:
        self._writer, self._memory = writer, memory
        self.known: dict[str, Layout] = {}
        self._heard: dict[str, Future[tuple[None, list[int]]]] = {}  # when the writer has

    def heard(self, digest: str) -> Future[tuple[None, list[int]]] | None:
        """Done when the writer knows it; None of one that was there before."""
        return self._heard.get(digest)

    def differ_from(self, world: int) -> bool:
        """Whether there are some of another number of ranks: it matters then what is the same in their snapshots."""
        return any(layout.world not in (1, world) for layout in self.known.values())

    def take(self, layouts: Mapping[str, Layout]) -> None:
        """What another writer knows, ours has to know as well."""
        for digest, layout in layouts.items():
            if digest not in self.known:
                self.known[digest] = layout
                self._writer.send(requests.KnowLayout(layout.to_json()))

    def tell(self, layout: Layout) -> None:
        """Before a slot is sealed with it."""
        if layout.digest in self.known:
            return
        said = layout.to_json()  # takes a while: not with the lock, which a signal handler may need
        with self._writer.lock:
            if len(self.known) > MOST_LAYOUTS:
                self._forget_unused()
            self._heard[layout.digest] = self._writer.send(requests.KnowLayout(said))
            self.known[layout.digest] = layout  # last: Ctrl-C may come in between

    def _forget_unused(self) -> None:
        """A state whose shapes keep changing must not fill the memory with layouts."""
        used = {label.layout for arena in self._memory.arenas() for _, label in arena.sealed()}
        used |= {*list(self.known)[-NEWEST:]}
        self.known = {digest: layout for digest, layout in self.known.items() if digest in used}
        self._heard = {digest: heard for digest, heard in self._heard.items() if digest in used}

    def on_new_writer(self, client: WriterClient) -> None:
        for layout in self.known.values():
            client.send(requests.KnowLayout(layout.to_json()))
