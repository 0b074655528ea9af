"""State transitions of a writer, and its memory after another job owns the run."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from ckpt.core.checkpoint import commits as commits
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.arena import SEALED, Arena, Label
from ckpt.core.ipc.heartbeat import Process
from ckpt.core.writer.held_run import Background, HeldRun, PresentTrainer
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.saver import WriterSaver
from ckpt.errors import FencedError
from ckpt_backends.memory import MemoryStore
from logs import new_log
from run_files import MANIFEST, kind_of

SIZE = 4096


class Slow(MemoryStore):
    """Wait before the start of a data file."""

    def __init__(self) -> None:
        super().__init__("file:///near")
        self.began, self.go_on = asyncio.Event(), asyncio.Event()

    async def upload(self, key: str, *, size: int, replace: bool = False) -> Any:
        self.began.set()
        await self.go_on.wait()
        return await super().upload(key, size=size, replace=replace)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "negative control"])
def test_write_fails_if_its_slot_is_released_meanwhile(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer job owns the run, and the writer releases its memory during a write.

    No data of the released slot gets a manifest, which the newer job would commit. Without both checks it does."""
    if not checked:
        monkeypatch.setattr(PresentTrainer, "check_not_fenced", lambda self, channel=None: None)
        monkeypatch.setattr(Arena, "settled", lambda self, slot: label)
        monkeypatch.setattr(OpenTier, "prepare", lambda self: asyncio.sleep(0))
    layout = Layout((TensorSpec("w", "F32", (SIZE // 4,)),), {}, [])
    arena = Arena.create(1, SIZE + 4096)
    label = Label(SEALED, 1, CheckpointId(1, 5, "0" * 8), layout.digest, SIZE, 2, 0.0)

    async def main() -> list[str]:
        nonlocal label
        trainer = PresentTrainer(None, Process.of(os.getpid()))
        memory, run, store = HeldMemory(trainer), HeldRun(trainer), Slow()
        log, owner = await new_log(store)
        label = Label(SEALED, 1, CheckpointId(owner.term, 5, owner.nonce), layout.digest, SIZE, 2, 0.0)
        arena.data(0)[:SIZE] = b"x" * SIZE
        arena.set_label(0, label)
        arena.values(0, label)[:] = b"[]"
        memory.add(arena)
        memory.keep_layout(layout)
        tier = OpenTier(store.url, Keep(3), log, role=commits.Role())
        run.tiers.append(tier)
        run.become(owner)
        unused: Any = None
        saver = WriterSaver(trainer, run, memory, unused, unused, Background())
        writing = asyncio.create_task(saver.store_part(tier, arena, 0, label))
        await store.began.wait()
        trainer.fence(FencedError("another job"))
        memory.free_all()
        store.go_on.set()
        if checked:
            with pytest.raises(FencedError):
                await writing
        else:
            await writing
        assert bytes(arena.data(0)[:SIZE]) == bytes(SIZE) and not memory.arenas
        return [key for key in store.objects if kind_of(key) == MANIFEST]

    assert bool(asyncio.run(main())) == (not checked)
