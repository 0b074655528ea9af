"""Tests of a replica of the memory on another node. Nodes are distinguished by their socket folders, on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.core.format.boxes import partner
from ckpt.core.format.layout import Layout, TensorSpec, pages
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.arena import EMPTY, FILLING, SEALED, Arena, Label
from ckpt.core.ipc.messages import Partner
from ckpt.core.writer.memory import HeldMemory
from ckpt.plugins.replicas import Replicator
from parallel import free_port, launch
from processes import eventually, writers

TRAINER = """
import hashlib, json, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import ckpt

root, action, replicas = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["CKPT_RUNTIME_DIR"] = f"{root}/node{rank * int(os.environ['NODES']) // world}"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 301), torch.nn.Linear(301, 8))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optim = torch.optim.AdamW(model.parameters())
state = {"model": model, "optim": optim, "rng": ckpt.RNG(), "own": {"rank": rank}}

def digest():
    found = [p.full_tensor() for p in model.parameters()]
    found += [optim.state[p]["exp_avg"].full_tensor() for p in model.parameters() if p in optim.state]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in found)).hexdigest()

cp = ckpt.Checkpointer(state, memory=ckpt.Memory(replicas=replicas), options=ckpt.Options(name=root))
start = cp.restore(default=0)
report = {"rank": rank, "start": start, "tier": cp.last_restore.tier, "own": state["own"]["rank"], "restored": digest()}
for step in range(start, start + 7):
    model(torch.ones(2, 8)).sum().backward()
    optim.step()
    optim.zero_grad()
    save = cp.step(step + 1)
save.wait_staged()
print(json.dumps({**report, "trained": digest()}), flush=True)
dist.barrier()
if action == "die":
    time.sleep(2.0)  # what is sealed is on its way to the other node
    os.kill(os.getpid(), 9)
cp.close()
dist.destroy_process_group()
"""


def train(root: Path, world: int, nodes: int, action: str, replicas: int, fails: str = "") -> list[dict[str, Any]]:
    done = launch(world, TRAINER, root, action, replicas, port=free_port(), NODES=str(nodes))
    if fails:
        assert all(fails in p.stderr for p in done), [p.stderr[-2000:] for p in done]
        return []
    assert all(p.returncode == (-9 if action == "die" else 0) for p in done), [p.stderr[-2000:] for p in done]
    return [json.loads(p.stdout.splitlines()[-1]) for p in done]


def lose(folder: Path) -> None:
    """Kill all processes of a node, with their memory."""
    for process in writers(folder):
        process.kill()
    assert eventually(lambda: not writers(folder))


@pytest.mark.parametrize("replicas", [2, 1])
def test_memory_survives_the_loss_of_a_node(tmp_path: Path, replicas: int) -> None:
    """With a replica, the survivors restore the last step from memory on fewer ranks; without it, restore fails."""
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir(mode=0o700)
    before = train(tmp_path, 4, 2, "die", replicas)
    lose(tmp_path / "node1")
    if replicas == 2:
        after = train(tmp_path, 2, 1, "close", 1)
        assert [one["start"] for one in after] == [7, 7]
        assert {one["tier"] for one in after} == {"memory"}
        assert {one["restored"] for one in after} == {before[0]["trained"]}
        assert [one["own"] for one in after] == [0, 1]
    else:
        train(tmp_path, 2, 1, "close", 1, fails="NoCheckpointError")
    lose(tmp_path)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((0, 0, 1, 1), [2, 3, 0, 1]),
        ((0, 1, 0, 1), [1, 0, 3, 2]),
        ((0, 0, 0, 1), [3, 3, 3, 0]),
        ((0, 0, 1, 2), [2, 2, 3, 0]),
        ((0, 0), [None, None]),
    ],
)
def test_partners_are_on_other_nodes(nodes: tuple[int, ...], expected: list[int | None]) -> None:
    """Each rank's replica is on the next node; with one node there is none."""
    assert [partner(rank, nodes) for rank in range(len(nodes))] == expected


# -- both ends in one process --


def snapshot(arena: Arena, slot: int, layout: Layout, step: int) -> Label:
    size = layout.arrangement.data_size
    pattern = bytes((step * 7 + i) % 256 for i in range(256))
    arena.data(slot, size)[:] = (pattern * (size // 256 + 1))[:size]
    start = pages(size)
    arena.data(slot)[start : start + 4] = b"[1]\n"
    label = Label(SEALED, step, CheckpointId(1, step, "0" * 8), layout.digest, size, 4, 1.0)
    arena.set_label(slot, label)
    return label


def layout_of(elements: int) -> Layout:
    names = [{"path": ["w"], "kind": "plain", "facts": {}, "names": ["w"]}]
    return Layout((TensorSpec("w", "F32", (elements,)),), {}, names, 3, 4)


def replicator() -> Replicator:
    """Return a replicator with its own memory."""
    return Replicator(HeldMemory(SimpleNamespace()))  # type: ignore[arg-type]


def push(sender: Replicator, arena: Arena, slot: int, layout: Layout, step: int) -> Label:
    memory = sender._memory
    memory.arenas[arena.id.hex()], memory.layouts[layout.digest] = arena, layout
    return snapshot(arena, slot, layout, step)


async def pushed(taker: Replicator, sender: Replicator, arena: Arena, layout: Layout, steps: range) -> None:
    sender.partner(Partner({**taker.partner(Partner()), "addresses": ["127.0.0.1"]}, 3))
    for step in steps:
        push(sender, arena, step % arena.slots, layout, step)
        for _ in range(500):
            await asyncio.sleep(0.01)
            if 3 in taker.arenas and any(
                la.checkpoint.step == step for _, la in taker.arenas[3].sealed() if la.checkpoint
            ):
                break


def test_pushed_snapshots_arrive_unchanged() -> None:
    """Data, plain values and label of each snapshot arrive; new ones replace old ones, as in the source."""

    async def work() -> None:
        taker, sender = replicator(), replicator()
        layout = layout_of(300_000)
        arena = Arena.create(3, pages(layout.arrangement.data_size) + 4096)
        await pushed(taker, sender, arena, layout, range(1, 6))
        copies = {label.checkpoint: (slot, label) for slot, label in taker.arenas[3].sealed()}
        originals = {label.checkpoint: (slot, label) for slot, label in arena.sealed()}
        assert copies.keys() == originals.keys() and taker._memory.layouts[layout.digest] == layout
        for checkpoint, (slot, label) in originals.items():
            there, copy = copies[checkpoint]
            assert taker.arenas[3].data(there, label.data_size) == arena.data(slot, label.data_size)
            assert taker.arenas[3].values(there, copy) == b"[1]\n" == arena.values(slot, label)
        taker.close()
        sender.close()

    asyncio.run(work())


def test_snapshot_overwritten_during_transfer_is_dropped() -> None:
    """The trainer reuses the slot during the transfer: the received snapshot mixes two steps, and stays unsealed."""

    async def work() -> None:
        taker, sender = replicator(), replicator()
        layout = layout_of(8_000_000)
        arena = Arena.create(2, pages(layout.arrangement.data_size) + 4096)
        await pushed(taker, sender, arena, layout, range(1, 2))
        label = push(sender, arena, 0, layout, 2)
        for _ in range(1000):
            await asyncio.sleep(0.001)
            states = [taker.arenas[3].label(slot) for slot in range(2)]
            if any(la is not None and la.state == FILLING for la in states):
                break
        arena.set_label(0, Label(FILLING, 9, CheckpointId(1, 9, "0" * 8), layout.digest, label.data_size, 4, 1.0))
        for _ in range(500):
            await asyncio.sleep(0.01)
            if all(la is not None and la.state in (EMPTY, SEALED) for la in map(taker.arenas[3].label, range(2))):
                break
        assert [la.checkpoint.step for _, la in taker.arenas[3].sealed() if la.checkpoint] == [1]
        taker.close()
        sender.close()

    asyncio.run(work())


def test_connections_without_token_are_closed() -> None:

    async def work() -> None:
        taker, sender = replicator(), replicator()
        contact = taker.partner(Partner())
        reader, writer = await asyncio.open_connection("127.0.0.1", contact["port"])
        writer.write(b"x" * 32 + b"\xff" * 100)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10.0) == b""
        layout = layout_of(1000)
        arena = Arena.create(2, pages(layout.arrangement.data_size) + 4096)
        await pushed(taker, sender, arena, layout, range(1, 2))
        assert [la.checkpoint.step for _, la in taker.arenas[3].sealed() if la.checkpoint] == [1]
        taker.close()
        sender.close()

    asyncio.run(work())
