"""The layouts of snapshots: what a writer has to know before it can do anything with a slot."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from ckpt.format.layout import Layout
from ckpt.ipc import requests
from ckpt.trainer.current_writer import CurrentWriter, WriterUser
from ckpt.trainer.memory import SnapshotMemory
from ckpt.trainer.writer_client import WriterClient

MOST_LAYOUTS = 64  # that are kept without asking whether they are needed
NEWEST = 8  # that are kept in any case
MOST_LISTS = 16  # of guarded tensors, that a writer keeps


class KnownLayouts(WriterUser):
    """`known`: by digest, those of this rank, and of the memory that its writer holds."""

    def __init__(self, writer: CurrentWriter, memory: SnapshotMemory) -> None:
        self._writer, self._memory = writer, memory
        self.known: dict[str, Layout] = {}
        self._heard: dict[str, Future[tuple[None, list[int]]]] = {}  # when the writer has
        self._guarded: list[bool] | None = None
        self._told: list[list[bool]] = []  # what the writer knows by number, of one layout
        self._told_of = ""

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

    def tell(self, layout: Layout, guarded: list[bool]) -> None:
        """Before a slot is sealed with it. `guarded`: of each tensor, whether only optimizer steps change it."""
        known = layout.digest in self.known
        if known and guarded is self._guarded:
            return
        said = {} if known else layout.to_json()  # takes a while: not with the lock, which a signal handler may need
        with self._writer.lock:
            self._tell_guarded(layout, guarded)
            if not known:
                if len(self.known) > MOST_LAYOUTS:
                    self._forget_unused()
                self._heard[layout.digest] = self._writer.send(requests.KnowLayout(said))
                self.known[layout.digest] = layout  # last: Ctrl-C may come in between

    def _tell_guarded(self, layout: Layout, guarded: list[bool]) -> None:
        """All of it once; where optimizers take turns, the same few lists come again and again."""
        if not self._told or len(self._told) == MOST_LISTS or layout.digest != self._told_of:
            self._told, self._told_of = [], layout.digest
        number = next((i for i, one in enumerate(self._told) if one is guarded), len(self._told))
        if number == len(self._told):
            missing = [i for i, one in enumerate(guarded) if one]
            self._writer.send(requests.KnowGuarded(layout.digest, number, missing))
            self._told.append(guarded)
        else:
            self._writer.send(requests.KnowGuarded(layout.digest, number))
        self._guarded = guarded

    def _forget_unused(self) -> None:
        """A state whose shapes keep changing must not fill the memory with layouts."""
        used = {label.layout for arena in self._memory.arenas() for _, label in arena.sealed()}
        used |= {*list(self.known)[-NEWEST:]}
        self.known = {digest: layout for digest, layout in self.known.items() if digest in used}
        self._heard = {digest: heard for digest, heard in self._heard.items() if digest in used}

    def on_new_writer(self, client: WriterClient) -> None:
        self._guarded, self._told = None, []
        for layout in self.known.values():
            client.send(requests.KnowLayout(layout.to_json()))
