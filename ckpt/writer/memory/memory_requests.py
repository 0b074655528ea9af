"""Requests about memory: arenas, what is in them, and copies of it on other nodes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ckpt.errors import SkippedError
from ckpt.format.layout import Layout
from ckpt.ipc import requests
from ckpt.ipc.arena import Arena
from ckpt.writer.dispatch import Answer, Caller, handles, handles_caller
from ckpt.writer.memory.held_memory import HeldMemory, make_arena
from ckpt.writer.present_trainer import PresentTrainer

KEEP_S = 1.0  # for another process that keeps an arena to let go of it


@dataclass(eq=False)
class MemoryRequests:
    """Everything runs in the writer's event loop; what takes time goes to threads."""

    trainer: PresentTrainer
    held_memory: HeldMemory

    @handles(requests.MakeArena)
    async def make(self, request: requests.MakeArena) -> Answer:
        begun = self.trainer.adoptions
        arena = await asyncio.to_thread(
            make_arena, request.slots, request.slot_size, request.least, ranks=request.ranks, node=request.node
        )
        if begun != self.trainer.adoptions:  # whoever came meanwhile knows nothing of it
            arena.close()
            raise SkippedError("the trainer that asked for this memory has lost the run, or died")
        self.held_memory.add(arena)
        await self._kept(arena.id.hex())
        return Answer(arena.id.hex(), (arena.fd,))

    @handles(requests.KeepArena)
    async def keep(self, request: requests.KeepArena) -> None:
        await self._kept(request.arena)

    @handles(requests.HandedOver)
    async def handed_over(self, request: requests.HandedOver) -> None:
        await asyncio.gather(*map(self._kept, list(self.held_memory.keeping)))
        self.held_memory.handed_over.set()

    async def _kept(self, key: str) -> None:
        await asyncio.to_thread(self.held_memory.keeping[key].begun.wait, KEEP_S)

    @handles_caller(requests.AttachArena)
    def attach(self, request: requests.AttachArena, caller: Caller) -> None:
        self.held_memory.add(Arena.attach(caller.fds[0]), foreign=request.foreign)

    @handles(requests.ReleaseArena)
    def release(self, request: requests.ReleaseArena) -> None:
        self.held_memory.release(request.arena)

    # -- what is in them --

    @handles(requests.KnowLayout)
    def know_layout(self, request: requests.KnowLayout) -> None:
        self.held_memory.keep_layout(Layout.from_json(request.layout))

    @handles(requests.AskDigests)
    async def digests(self, request: requests.AskDigests) -> list[requests.Digest]:
        if request.all:
            await asyncio.to_thread(self.held_memory.digest_ring)
        return self.held_memory.known_digests()

    # -- copies of it on other nodes --

    @handles(requests.Serve)
    def serve(self, request: requests.Serve) -> requests.Json:
        return self.held_memory.mirror.serve()

    @handles(requests.Partner)
    def send_to(self, request: requests.Partner) -> None:
        self.held_memory.mirror.send_to(request.contact, request.rank)

    @handles(requests.Push)
    def push(self, request: requests.Push) -> None:
        memory, slot = self.held_memory, request.slot
        arena = memory.arenas[request.arena]
        label = arena.label(slot)
        if label is not None and str(label.attempt) == request.attempt and label.layout in memory.layouts:
            memory.mirror.push(arena, slot, label, memory.layouts[label.layout])
