"""A second copy of the memory on another node, so that a snapshot survives the loss of a node.

Each writer sends every new snapshot of its trainer to the writer of a rank on another node (`Memory(replicas=2)`).
The receiving writer stores the copy in a separate arena, labelled like the original. Training is not affected, because
only sealed snapshots are sent. If the network is too slow for every step, only the newest snapshot is sent next.

This is a plug-in: `ckpt.writer_process` creates a `Replicator` next to the core's writer. The `Replicator` handles its
own request `Partner`, and `Retract` in addition to the core. The core knows the copies only as `HeldMemory.copies`,
from which a restore may read.

    push:   token, then for each snapshot: header (JSON), data, plain values, and one byte: 1 complete, 0 overwritten
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import struct
from dataclasses import replace
from typing import Any

from ckpt.core.format.layout import Layout, pages
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc import messages
from ckpt.core.ipc.arena import EMPTY, FILLING, SEALED, Arena, Label
from ckpt.core.ranks.transfer import addresses, listen
from ckpt.core.writer.held_run import handles
from ckpt.core.writer.memory import HeldMemory, check_room
from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.failpoints import point

CHUNK = 4 << 20
CONNECT_S = 5.0
RETRY_S = 2.0
POLL_S = 0.02  # interval between two checks for a new snapshot
SILENCE_S = 120.0  # seconds without a byte in either direction after which a peer is considered lost
MAX_HEADER = 64 << 20
OLD_AFTER = 64  # snapshots that this rank sends between two checks; a rank that sent none in this period is gone
_SIZE = struct.Struct("!I")


class Replicator:
    """Both ends of replication: receives another rank's snapshots, and sends this rank's snapshots to a partner."""

    def __init__(self, memory: HeldMemory) -> None:
        self._memory, self.arenas = memory, memory.copies
        self._fresh: set[int] = set()  # ranks that have sent a snapshot since the last `_drop_old`
        self._pushed = 0
        self._token = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._partner: dict[str, Any] | None = None
        self._rank = 0
        self._sent = -1  # order number of the last snapshot that was sent
        self._withdrawn: list[CheckpointId] = []
        self._warned = False

    # -- receive --

    @handles(messages.Partner)
    def partner(self, request: messages.Partner) -> messages.Json:
        """Listen, and return the address for other writers. Send our snapshots to `contact` from now on, if given."""
        if request.contact is not None:
            started = self._partner is not None
            self._partner, self._rank = request.contact, request.rank
            if not started:
                self._start(self._send())
        if self._listener is None:
            self._listener = listen()
            self._listener.setblocking(False)
            self._start(self._accept(self._listener))
        return {"port": self._listener.getsockname()[1], "token": self._token, "addresses": addresses()}

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # for example, no free descriptors; the partner will connect again
                await asyncio.sleep(RETRY_S)
                continue
            sock.setblocking(False)
            self._start(self._take(sock))

    async def _take(self, sock: socket.socket) -> None:
        try:
            with contextlib.closing(sock):
                token = await _read(sock, len(self._token))
                if hmac.compare_digest(bytes(token), self._token.encode()):
                    while True:
                        await self._take_one(sock)
        except (OSError, TimeoutError, ValueError, KeyError, TypeError, CheckpointError, MemoryError) as error:
            log.info("stopped receiving a copy of another rank's memory: %s", error)

    async def _take_one(self, sock: socket.socket) -> None:
        size = _SIZE.unpack(await _read(sock, _SIZE.size, wait_s=None))[0]
        if size > MAX_HEADER:
            raise ValueError(f"a header of {size} bytes is too large")
        header = json.loads(bytes(await _read(sock, size)))
        if "drop" in header:
            self._discard(int(header["rank"]), CheckpointId.parse(header["drop"]))
            return
        rank, layout = int(header["rank"]), Layout.from_json(header["layout"])
        checkpoint, values_size = CheckpointId.parse(header["checkpoint"]), int(header["values_size"])
        arena = await self._arena_for(rank, int(header["slots"]), int(header["slot_size"]))
        data_size = layout.arrangement.data_size
        if not values_size >= 0 or not arena.fits(data_size, values_size):
            raise ValueError("a snapshot does not fit into its slot")
        order = 1 + max([0, *(label.order for _, label in arena.sealed())])
        held = arena.sealed()
        empty = sorted(set(range(arena.slots)) - {slot for slot, _ in held})
        slot = empty[0] if empty else held[-1][0]
        finite = header["finite"]
        if finite is not None and type(finite) is not bool:
            raise ValueError("the flag finite of a snapshot is not a bool")
        label = Label(FILLING, order, checkpoint, layout.digest, data_size, values_size, float(header["time"]), finite)
        arena.set_label(slot, label)
        self._memory.keep_layout(layout)
        await _read_into(sock, arena.data(slot, data_size))
        start = pages(data_size)
        await _read_into(sock, arena.data(slot)[start : start + values_size])
        whole = bytes(await _read(sock, 1)) == b"\x01"
        point("mirror.taken")
        arena.set_label(slot, _sealed(label) if whole else Label(EMPTY))
        self._fresh.add(rank)

    def _discard(self, rank: int, checkpoint: CheckpointId) -> None:
        """Drop a snapshot that its sender has retracted."""
        arena = self.arenas.get(rank)
        for slot, label in arena.sealed() if arena is not None else ():
            if arena is not None and label.checkpoint == checkpoint:
                arena.set_label(slot, Label(EMPTY))

    async def _arena_for(self, rank: int, slots: int, slot_size: int) -> Arena:
        arena = self.arenas.get(rank)
        if arena is None or arena.slot_size < slot_size:
            check_room(slots, slot_size)
            made = await asyncio.to_thread(Arena.create, slots, slot_size)
            if arena is not None:
                arena.close()
            self.arenas[rank] = arena = made
        return arena

    def _drop_old(self) -> None:
        """Drop the copies of ranks that have sent no snapshot since the last call, because these ranks are gone."""
        for rank in self.arenas.keys() - self._fresh:
            self.arenas.pop(rank).close()
        self._fresh.clear()

    # -- send --

    def _newest(self) -> tuple[Arena, int, Label, Layout] | None:
        """Return the newest snapshot of our trainer, or None if the partner already has it."""
        memory = self._memory
        for arena, slot, label in memory.ring():
            if label.checkpoint in memory.retracted or arena.id.hex() in memory.foreign:
                continue
            if label.order <= self._sent or (layout := memory.layouts.get(label.layout)) is None:
                return None
            return arena, slot, label, layout
        return None

    @handles(messages.Retract)
    def take_back(self, request: messages.Retract) -> None:
        """Drop a snapshot of our trainer that turned out to be inconsistent, and the partner's copy of it."""
        if self._partner is not None:
            self._withdrawn.append(CheckpointId.parse(request.checkpoint))

    async def _send(self) -> None:
        while True:
            try:
                sock, partner = await self._connect()
                with contextlib.closing(sock):
                    while partner is self._partner:
                        while self._withdrawn:
                            await self._send_drop(sock, self._withdrawn[0])
                            self._withdrawn.pop(0)
                        if (found := self._newest()) is None:
                            await asyncio.sleep(POLL_S)
                            continue
                        await self._send_one(sock, *found)
                        self._sent = found[2].order
                        self._pushed += 1
                        if self._pushed % OLD_AFTER == 0:
                            self._drop_old()
            except (OSError, TimeoutError) as error:
                warn = log.info if self._warned else log.warning
                self._warned = True
                warn("memory is currently not copied to another node: %s", error)
                await asyncio.sleep(RETRY_S)
                self._sent = -1  # send the newest again, because the partner may have been replaced or restarted

    async def _send_drop(self, sock: socket.socket, checkpoint: CheckpointId) -> None:
        header = json.dumps({"rank": self._rank, "drop": str(checkpoint)}).encode()
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.sock_sendall(sock, _SIZE.pack(len(header)) + header), SILENCE_S)

    async def _connect(self) -> tuple[socket.socket, dict[str, Any]]:
        loop, problem = asyncio.get_running_loop(), OSError("the partner has no address")
        partner = self._partner
        assert partner is not None
        for address in partner["addresses"]:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                await asyncio.wait_for(loop.sock_connect(sock, (address, partner["port"])), CONNECT_S)
                await asyncio.wait_for(loop.sock_sendall(sock, partner["token"].encode()), CONNECT_S)
                return sock, partner
            except (OSError, TimeoutError) as error:
                sock.close()
                problem = OSError(f"{address}: {error}")
        raise problem

    async def _send_one(self, sock: socket.socket, arena: Arena, slot: int, label: Label, layout: Layout) -> None:
        if arena.label(slot) != label:
            return
        loop = asyncio.get_running_loop()
        header = json.dumps(
            {
                "rank": self._rank,
                "checkpoint": str(label.checkpoint),
                "layout": layout.to_json(),
                "values_size": label.values_size,
                "time": label.time,
                "finite": label.finite,
                "slots": arena.slots,
                "slot_size": arena.slot_size,
            }
        ).encode()
        for part in (memoryview(_SIZE.pack(len(header)) + header), arena.data(slot, label.data_size)):
            for start in range(0, len(part), CHUNK):
                await asyncio.wait_for(loop.sock_sendall(sock, part[start : start + CHUNK]), SILENCE_S)
        await asyncio.wait_for(loop.sock_sendall(sock, arena.values(slot, label)), SILENCE_S)
        whole = arena.label(slot) == label  # False if the trainer has overwritten the slot while it was sent
        await loop.sock_sendall(sock, b"\x01" if whole else b"\x00")

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._listener is not None:
            self._listener.close()


def _sealed(label: Label) -> Label:
    return replace(label, state=SEALED)


async def _read(sock: socket.socket, size: int, wait_s: float | None = SILENCE_S) -> bytearray:
    data = bytearray(size)
    await _read_into(sock, memoryview(data), wait_s)
    return data


async def _read_into(sock: socket.socket, view: memoryview, wait_s: float | None = SILENCE_S) -> None:
    loop, done = asyncio.get_running_loop(), 0
    while done < len(view):
        count = await asyncio.wait_for(loop.sock_recv_into(sock, view[done : done + CHUNK]), wait_s)
        if not count:
            raise OSError("the peer closed the connection")
        done += count
