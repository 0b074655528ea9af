"""The writer process: holds the memory, writes it out, and outlives the trainer.

    python -c 'from ckpt.writer import main; main()' FD RUN_KEY SOCKET

It starts in its own session, at low CPU and I/O priority, without torch. Two kinds of threads feed one event loop:
a reader per connection, and a watcher per arena that sits in the trainer's robust mutex until the trainer dies.

When the trainer dies, the writer digests the snapshots, persists the ring, newest first, and waits for the next
incarnation, which finds it by SOCKET; after `linger_s` it leaves. When the trainer closes, it finishes and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from ckpt import commit, events, link, retain
from ckpt.arena import Arena, Label
from ckpt.codec import blob_digest
from ckpt.errors import CheckpointError, FencedError, FullError, SaveError, StoreError, UsageError, WriterError, to_wire
from ckpt.link import Channel, Message
from ckpt.log import Acquire, RunLog, in_history
from ckpt.manifest import Attempt, part_key, table_key
from ckpt.manifest import owner as owner_of
from ckpt.mirror import Mirror
from ckpt.mutex import Got
from ckpt.plan import Layout
from ckpt.read import verify
from ckpt.store import open_store
from ckpt.write import Snapshot, Written, digest_blobs, write_part

NICE = 10
RETRY_S = 5.0
LATE_S = 30.0  # for the parts of other ranks, when nobody is left to wait for them
MAX_LAYOUTS = 256  # far more than a trainer believes us to have
MEMORY_SHARE = 0.8  # of the available memory, that an arena may take


@dataclass
class Tier:
    """One durable place of the run."""

    url: str
    keep: retain.Keep
    log: RunLog
    role: commit.Role = field(default_factory=commit.Role)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    verified: set[Attempt] = field(default_factory=set)
    in_flight: set[Attempt] = field(default_factory=set)
    sweeping: asyncio.Task[None] | None = None


class Writer:
    """The state of the process. Everything runs in one event loop; blocking work goes to threads."""

    def __init__(self, channel: Channel, key: str, path: str) -> None:
        self.key, self.path = key, path
        self.channel: Channel | None = channel
        self.trainer = link.peer_pid(channel.sock)
        self.dead = False  # whether that trainer has died
        self.leaving = False
        self.previous_gone = True  # whether no earlier trainer can write to the arenas any more
        self.owner: Acquire | None = None
        self.heir = ""  # the nonce of the owner that our trainer is about to be
        self.acquires: list[Acquire] = []  # the history that the snapshots in memory belong to
        self.tiers: list[Tier] = []
        self.arenas: dict[str, Arena] = {}
        self.foreign: set[str] = set()  # those that other ranks staged into: nobody goes on in them here
        self.layouts: dict[str, Layout] = {}
        self.digests: dict[tuple[Attempt, int], bytes] = {}  # by attempt, and rank that took the snapshot
        self.writing: dict[tuple[str, int], int] = {}  # (arena, slot) -> writes in progress
        self.settling: dict[int, int] = {}  # parts that are written and not committed yet, by adoption
        self.ownership = asyncio.Lock()  # held while the run is taken over by us
        self.tries: dict[Attempt, int] = {}
        self.retracted: set[Attempt] = set()
        self.first_try = 0
        self.linger_s = 600.0
        self.commit_s = 600.0  # how long the parts of other ranks are waited for
        self.finished = asyncio.Event()
        self.adoptions = 0
        self.loop = asyncio.get_running_loop()
        self.mirror = Mirror(check_room, self._keep_layout)
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> None:
        assert self.channel is not None
        self._start_thread(self._read, self.channel)
        self._start_thread(self._accept, listener)
        self._start_thread(self._wait_gone, self.trainer)
        await self.finished.wait()
        self._unlink_socket()

    def _unlink_socket(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_ino == self.inode:
                os.unlink(self.path)
                output = self.path.removesuffix(".sock") + ".log"
                if os.path.getsize(output) == 0:
                    os.unlink(output)

    inode = 0  # of our socket, so that we never remove a successor's

    # -- threads that feed the loop --

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: we are leaving
            self.loop.call_soon_threadsafe(function, *arguments)

    def _read(self, channel: Channel) -> None:
        while (received := channel.receive()) is not None:
            self._post(self._on_message, channel, *received)
        self._post(self._on_lost, channel)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:  # out of descriptors, say: the next incarnation will try again
                time.sleep(1.0)
                continue
            if link.same_user(sock):
                self._start_thread(self._read, Channel(sock))
            else:
                sock.close()

    def _watch(self, arena: Arena, adoptions: int) -> None:
        """Sits in the mutex of the trainer's staging thread until it is let go of, or its owner dies."""
        got = arena.mutex.lock()
        arena.mutex.unlock()
        if got is Got.OWNER_DIED:
            self._post(self._on_death, adoptions)

    def _wait_gone(self, pid: int) -> None:
        """Copies by a device may outlive the notice of death; after this nobody writes the memory any more."""
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            select.select([fd], [], [])
            os.close(fd)
        self._post(self._on_gone, pid)

    # -- events --

    def _on_message(self, channel: Channel, message: Message, fds: list[int]) -> None:
        self._spawn(self._handle(channel, message, fds))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _on_lost(self, channel: Channel) -> None:
        """End-of-file is never evidence of death: the pidfd and the mutex are."""
        channel.close()
        if channel is self.channel:
            self.channel = None

    def _on_gone(self, pid: int) -> None:
        if pid == self.trainer:
            self._on_death(self.adoptions)
        elif not self.previous_gone:
            self.previous_gone = True
            self._tell({"op": "gone"})

    def _on_death(self, adoptions: int) -> None:
        if not self.dead and adoptions == self.adoptions:
            self.dead = True
            self._spawn(self._outlive(adoptions))

    def _tell(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(message, fds)

    # -- requests --

    async def _handle(self, channel: Channel, message: Message, fds: list[int]) -> None:
        try:
            handler = getattr(self, f"do_{message['op']}", None)
            if handler is None:
                raise UsageError(f"the writer does not know {message['op']!r}: is it of another version?")
            reply, out = await handler(channel, message, fds)
        except Exception as error:
            if not isinstance(error, CheckpointError):
                events.log.exception("the writer failed at %r", message.get("op"))
            reply, out = to_wire(error), ()
        if "id" in message:
            with contextlib.suppress(OSError):
                channel.send({**reply, "op": "reply", "id": message["id"]}, out)

    async def do_hello(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """A trainer introduces itself. It becomes ours unless the present one lives, or it is only a `visit`."""
        if self.leaving and not message.get("visit"):
            raise WriterError("this writer is about to leave")
        pid = link.peer_pid(channel.sock)
        copies = self.mirror.arenas.values() if message.get("visit") else ()  # no trainer goes on in them
        shown = [*self.arenas.values(), *copies]
        alive = not self.dead and pid != self.trainer and _alive(self.trainer)
        reply: Message = {
            "pid": os.getpid(),
            "alive": alive,
            "trainer": self.trainer,
            "gone": self.previous_gone and (pid == self.trainer or not _alive(self.trainer)),
            "arenas": [arena.id.hex() for arena in shown],
            "foreign": list(self.foreign),
            "layouts": {digest: layout.to_json() for digest, layout in self.layouts.items()},
            "digests": self._known_digests(),
            "writing": [list(key) for key in self.writing],
            "acquires": [[a.epoch, a.nonce, a.restored and str(a.restored)] for a in self.acquires],
        }
        if not alive and channel is not self.channel and not message.get("visit"):
            self.adoptions += 1
            self.previous_gone = reply["gone"]
            self.channel, self.trainer, self.dead = channel, pid, False
            self._start_thread(self._wait_gone, pid)
        return reply, tuple(arena.fd for arena in shown)

    async def do_open(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Open the durable places, without changing anything in them."""
        self.linger_s, self.commit_s = float(message["linger_s"]), float(message["commit_s"])
        self.first_try = int(message.get("first_try", 0))
        self.heir = str(message.get("heir", ""))
        self.acquires = [Acquire(e, n, None if r is None else Attempt.parse(r)) for e, n, r in message["acquires"]]
        known = {tier.url: tier for tier in self.tiers}  # one of them may be writing the ring at this moment
        tiers = []
        for spec in message["tiers"]:
            keep = retain.Keep(spec["last"], spec["every"])
            tier = known.pop(spec["url"], None) or await self._open_tier(spec["url"], keep)
            tier.keep = keep
            await tier.log.refresh()
            tiers.append(tier)
        self.tiers = tiers
        reply: Message = {
            "tiers": [
                {
                    "root": t.log.root,
                    "epoch": t.log.state.epoch,
                    "checkpoints": len(t.log.state.commits) + len(t.log.state.held),
                    "damaged": t.log.state.damaged,
                }
                for t in self.tiers
            ],
        }
        return reply, ()

    async def do_acquire(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Take the places numbered `tiers` over, for all ranks. With `restored` as a rollback of the present owner."""
        nonce, restored = str(message["nonce"]), message["restored"]
        back = None if restored is None else Attempt.parse(restored)
        tiers = [self.tiers[i] for i in message["tiers"]]
        for tier in tiers if back is not None else ():
            await tier.log.refresh()
            if all(acquire.nonce != nonce for acquire in tier.log.state.acquires):
                tier.log.check_owner(self._mine())
        floor = max([int(message["floor"]), *(t.log.state.epoch for t in tiers)])
        taken = [await commit.acquire(t.log, nonce, restored=back, floor=floor) for t in tiers]
        return {"epochs": sorted({a.epoch for a in taken} or {floor + 1})}, ()

    async def do_own(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """All ranks have agreed who the owner is, and this writer's part in committing."""
        epoch, nonce, restored = message["owner"]
        owner = Acquire(epoch, nonce, None if restored is None else Attempt.parse(restored))
        async with self.ownership:
            for tier in self.tiers:
                await tier.log.refresh()  # the writer of another rank appended it: by an older log we would be fenced
            self._become(owner)
        for tier, (ranks, place, world) in zip(self.tiers, message["roles"], strict=True):
            tier.role = commit.Role(tuple(ranks), place, world)
            await tier.log.refresh()  # another rank's writer has appended who the owner is
        for i in message.get("recover", ()):
            tier = self.tiers[i]
            await commit.recover(tier.log, self._mine(), frozenset(tier.in_flight), partial=tier.role.partial)
        parts = []
        for i in message.get("recover", ()):
            state = self.tiers[i].log.state
            if self.tiers[i].role.partial:
                for attempt, one in {**state.held, **state.commits}.items():
                    ranks = [rank for rank, _, _ in one.parts]
                    parts.append({"tier": i, "attempt": str(attempt), "world": one.world, "ranks": ranks})
        return {"parts": parts}, ()

    async def do_heir(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """By this nonce our trainer, or another rank, is about to take the run over: that is no other job."""
        self.heir = str(message["nonce"])
        return {}, ()

    def _succeed(self, log: RunLog) -> None:
        """Go on as the owner that the log names, if it is the heir: the trainer may die before it can say so."""
        if log.state.acquires and log.state.acquires[-1].nonce == self.heir:
            self._become(log.state.acquires[-1])

    def _become(self, owner: Acquire) -> None:
        if self.owner is None or (owner.epoch, owner.nonce) != (self.owner.epoch, self.owner.nonce):
            self.owner = owner
            self.acquires.append(owner)

    async def do_complete(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The other places hold their parts of these attempts too."""
        tier = self.tiers[message["tier"]]
        for attempt in message["attempts"]:
            await commit.complete(tier.log, self._mine(), Attempt.parse(attempt))
        return {}, ()

    async def _open_tier(self, url: str, keep: retain.Keep) -> Tier:
        store = open_store(url, writable=True)
        try:
            await commit.create_run(store)
            log = RunLog(store)
            await log.open()
        except BaseException:
            await store.aclose()
            raise
        return Tier(url, keep, log)

    def _mine(self) -> Acquire:
        if self.owner is None:
            raise UsageError("the run has not been opened")
        return self.owner

    async def do_arena(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Make an arena, in the background, since touching its pages takes a while."""
        slots, slot_size = int(message["slots"]), int(message["slot_size"])
        check_room(slots, slot_size)
        arena = await asyncio.to_thread(Arena.create, slots, slot_size)
        self.arenas[arena.id.hex()] = arena
        return {"arena": arena.id.hex()}, (arena.fd,)

    async def do_attach(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The trainer gives a new writer the memory that its old one held."""
        arena = Arena.attach(fds[0])
        self.arenas[arena.id.hex()] = arena
        if message.get("foreign"):
            self.foreign.add(arena.id.hex())
        return {}, ()

    async def do_taken(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Another writer has our memory as well, and goes on: nothing keeps us here if our trainer is dead."""
        if self.dead:
            self.adoptions += 1  # what we would do after its death is not ours to do any more
            self.leaving = True
            self._spawn(self._leave())
        return {}, ()

    async def _leave(self) -> None:
        await self._finish_begun()
        self.finished.set()

    async def do_watch(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The staging thread holds the mutex of this arena from now on."""
        self._start_thread(self._watch, self.arenas[message["arena"]], self.adoptions)
        return {}, ()

    async def do_digests(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The digests of snapshots that are known so far; of all, if told."""
        if message.get("all"):
            await asyncio.to_thread(self._digest_ring)
        return {"digests": self._known_digests()}, ()

    def _known_digests(self) -> list[list[Any]]:
        return [[str(attempt), rank, digests.hex()] for (attempt, rank), digests in list(self.digests.items())]

    async def do_release(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """This arena is not needed any more."""
        arena = self.arenas.pop(message["arena"], None)
        if arena is not None:
            arena.close()
        return {}, ()

    async def do_layout(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        self._keep_layout(Layout.from_json(message["layout"]))
        return {}, ()

    def _keep_layout(self, layout: Layout) -> None:
        self.layouts[layout.digest] = layout
        if len(self.layouts) > MAX_LAYOUTS:  # shapes that keep changing; the trainer sends again what it forgot
            arenas = (*self.arenas.values(), *self.mirror.arenas.values())
            used = {label.layout for arena in arenas for _, label in arena.sealed()}
            recent = list(self.layouts)[-MAX_LAYOUTS // 2 :]
            self.layouts = {key: self.layouts[key] for key in self.layouts if key in used or key in recent}

    async def do_serve(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Be ready to keep a copy of another rank's memory."""
        return {"contact": self.mirror.serve()}, ()

    async def do_partner(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Who keeps a copy of ours."""
        self.mirror.send_to(message["contact"], int(message["rank"]))
        return {}, ()

    async def do_push(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """A snapshot was sealed: have it copied to the partner."""
        arena, slot = self.arenas[message["arena"]], int(message["slot"])
        label = arena.label(slot)
        if label is not None and str(label.attempt) == message["attempt"] and label.layout in self.layouts:
            self.mirror.push(arena, slot, label, self.layouts[label.layout])
        return {}, ()

    async def do_write(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Make a checkpoint of a sealed slot in one tier; replies when it is durable."""
        number, slot = message["tier"], int(message["slot"])
        tier, arena = self.tiers[number], self.arenas[message["arena"]]
        label = arena.label(slot)
        if label is not None and str(label.attempt) == message["attempt"]:
            written = await self._store(tier, arena, slot, label)
        else:  # a predecessor stored it, and died before it was committed: since then the slot was used again
            attempt = Attempt.parse(message["attempt"])
            written = await commit.stored_part(tier.log.store, attempt, tier.role.ranks[tier.role.place])
            if written is None:
                raise SaveError(f"slot {slot} does not hold {attempt} any more")
            tier.in_flight.add(attempt)
        if written is not None:
            self._tell({"op": "stored", "tier": number, "attempt": message["attempt"]})
            with self._settles():
                await self._settle(tier, written)
        return {}, ()

    async def do_retract(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """A snapshot failed, or turned out not to be of one moment: it must not be committed, or not stay so."""
        attempt, reason = Attempt.parse(message["attempt"]), str(message["reason"])
        self.retracted.add(attempt)
        self.mirror.take_back(attempt)
        for tier in self.tiers:
            async with tier.busy:
                await commit.retract(tier.log, self._mine(), attempt, reason)
        return {}, ()

    async def do_leave(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The trainer lets go of everything, and may go on living: as if it had died."""
        self._on_death(self.adoptions)
        return {}, ()

    async def do_close(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The trainer is done. Finish what was begun, clean up and leave."""
        self.leaving = True
        self._unlink_socket()  # the next trainer starts with a writer of its own
        try:
            # What an earlier trainer began may wait for parts that never come.
            while self.writing or self.settling.get(self.adoptions):
                await asyncio.sleep(0.01)
            for tier in self.tiers:
                if tier.sweeping is not None:
                    await asyncio.gather(tier.sweeping, return_exceptions=True)
                    await self._sweep(tier)  # it may have lagged behind the last commits
                await tier.log.store.aclose()
        finally:
            self.loop.call_later(0.05, self.finished.set)  # after the reply has left
        return {}, ()

    # -- writing --

    async def _store(self, tier: Tier, arena: Arena, slot: int, label: Label, reason: str = "due") -> Written | None:
        """Write this rank's part; None if the attempt is a checkpoint already.

        Alone, a failed attempt stays open: it may be written again by a higher try, and recovery ends what is left.
        With others it is given up at once, so that they need not wait.
        """
        attempt, key, layout = label.attempt, (arena.id.hex(), slot), self.layouts[label.layout]
        assert attempt is not None
        self.writing[key] = self.writing.get(key, 0) + 1
        tier.in_flight.add(attempt)
        adopted = self.adoptions
        try:
            async with tier.busy:
                if attempt in tier.log.state.commits:
                    tier.in_flight.discard(attempt)
                    return None  # a predecessor did it, and could not say so
                number = self.tries.get(attempt, self.first_try)
                self.tries[attempt] = number + 1
                values = json.loads(bytes(arena.values(slot, label)))
                snapshot = Snapshot(attempt, layout, arena.data(slot, label.data_size), values)
                async with self.ownership:
                    self._succeed(tier.log)
                    tier.log.check_owner(self._mine())
                written = await write_part(tier.log.store, snapshot, number=number, reason=reason)
                if attempt in self.retracted:
                    raise SaveError(f"step {attempt.step} was taken back while it was written")
            values_digest = blob_digest(arena.values(slot, label))
            self.digests[attempt, layout.rank] = written.table.digest.tobytes() + values_digest
            return written
        except BaseException as error:
            tier.in_flight.discard(attempt)
            given_up = reason == "due" and not isinstance(error, FencedError)
            if layout.world > 1 and given_up and isinstance(error, Exception):
                with contextlib.suppress(CheckpointError):
                    await commit.abort(tier.log, self._mine(), attempt, f"rank {layout.rank}: {error}")
                if attempt in tier.log.state.commits:
                    return None  # the part was whole, and others were quick
            raise
        finally:
            self.writing[key] -= 1
            if not self.writing[key]:
                del self.writing[key]
                if adopted != self.adoptions:  # the new trainer was told that this slot is being written
                    self._tell({"op": "unpinned", "arena": arena.id.hex(), "slot": slot})

    @contextlib.contextmanager
    def _settles(self) -> Iterator[None]:
        begun = self.adoptions
        self.settling[begun] = self.settling.get(begun, 0) + 1
        try:
            yield
        finally:
            self.settling[begun] -= 1

    async def _settle(self, tier: Tier, written: Written) -> None:
        """From a part to a checkpoint: with the parts of the other ranks, if there are any."""
        attempt = Attempt.parse(written.part.attempt)
        try:
            await self._commit(tier, written)
            events.log.info("step %d is a checkpoint in %s", attempt.step, tier.url)
        except FullError:
            await self._make_room(tier, attempt)
            raise
        except Exception as error:
            if written.part.world > 1:
                await self._give_up(tier, written, error)
            if attempt in tier.log.state.held:
                self._sweep_soon(tier)  # others of its kind may have been there for long
            raise
        finally:
            tier.in_flight.discard(attempt)
        self._forget_old()
        self._sweep_soon(tier)

    def _sweep_soon(self, tier: Tier) -> None:
        if tier.role.place == 0 and (tier.sweeping is None or tier.sweeping.done()):
            tier.sweeping = self._spawn(self._sweep(tier))

    async def _commit(self, tier: Tier, written: Written) -> None:
        """Commit as whoever we are by then: a restore may open our next epoch while a checkpoint is on its way."""
        part, number = written.part, self.tiers.index(tier) if tier in self.tiers else -1
        role = (
            tier.role if part.world == tier.role.world else commit.Role(tuple(range(part.world)), part.rank, part.world)
        )
        held: Message = {"op": "held", "tier": number, "attempt": part.attempt}
        while True:
            mine = self._mine()
            try:
                await commit.settle(
                    tier.log, self._mine, written, role, deadline_s=self.commit_s, on_held=lambda: self._tell(held)
                )
                return
            except FencedError:
                async with self.ownership:  # is it we ourselves who are taking over?
                    self._succeed(tier.log)
                    if self._mine() == mine:
                        raise

    async def _make_room(self, tier: Tier, attempt: Attempt) -> None:
        """All of it was written, and then the disk was full: give the attempt up, and its space back."""
        with contextlib.suppress(CheckpointError):
            await commit.abort(tier.log, self._mine(), attempt, "no space left")
            if attempt in tier.log.state.aborted:
                for prefix in ("packs/", "parts/", "index/"):
                    for key in [i.key async for i in tier.log.store.list(f"{prefix}{attempt}")]:
                        if owner_of(key) == attempt:
                            await tier.log.store.delete(key)

    async def _give_up(self, tier: Tier, written: Written, error: Exception) -> None:
        """The others need not wait for a committer that failed; and our part of what they gave up takes no space."""
        part, attempt = written.part, Attempt.parse(written.part.attempt)
        with contextlib.suppress(CheckpointError):
            if not isinstance(error, FencedError) and part.reason == "due":
                await commit.abort(tier.log, self._mine(), attempt, f"rank {part.rank}: {error}")
            if attempt in tier.log.state.aborted:
                keys = [*(pack.key for pack in part.packs), part_key(attempt, part.rank, part.number)]
                for key in [*keys, table_key(attempt, part.rank, part.number)]:
                    await tier.log.store.delete(key)

    def _forget_old(self) -> None:
        arenas = (*self.arenas.values(), *self.mirror.arenas.values())
        held = {label.attempt for arena in arenas for _, label in arena.sealed()}
        self.digests = {(attempt, rank): d for (attempt, rank), d in self.digests.items() if attempt in held}
        self.tries = {attempt: n for attempt, n in self.tries.items() if attempt in held}

    async def _sweep(self, tier: Tier) -> None:
        """Retention: older checkpoints may only go once a newer one has been read back and found sound."""
        try:
            await self._give_up_old(tier)
            doomed = retain.choose(tier.log.state, tier.keep, tier.verified)
            if not doomed and not tier.log.state.aborted:
                return
            history = tier.log.state.lineage()
            if not history:
                return  # all there is was undone by a rollback; the next checkpoint will make it superfluous
            newest = history[0]
            if newest.attempt not in tier.verified:
                problems = await verify(tier.log.store, newest)
                if problems:
                    self._tell({"op": "damaged", "tier": tier.url, "step": newest.step, "problems": problems[:10]})
                    return
                tier.verified = {newest.attempt}
            await retain.retire(tier.log, self._mine(), tier.keep, tier.verified)
        except FencedError:
            pass  # the next save says so
        except CheckpointError as error:
            events.log.warning("clean-up of %s has to wait: %s", tier.url, error)

    async def _give_up_old(self, tier: Tier) -> None:
        """What is HELD since long, while newer steps became checkpoints or are HELD as well, will never be one."""
        history, held = tier.log.state.lineage(), sorted(tier.log.state.held, reverse=True)
        old = set(held[max(tier.keep.last, retain.ALWAYS) :])
        if len(history) >= retain.ALWAYS:
            old |= {attempt for attempt in held if attempt < history[retain.ALWAYS - 1].attempt}
        for attempt in sorted(old - tier.in_flight):
            await commit.abort(tier.log, self._mine(), attempt, "other nodes do not hold their parts", held=True)

    # -- after the trainer's death --

    async def _outlive(self, adoptions: int) -> None:
        """Persist the ring, keep the memory for the next incarnation, leave at the deadline."""
        events.point("drain.started")
        deadline = time.monotonic() + self.linger_s
        await asyncio.to_thread(self._digest_ring)
        try:
            while adoptions == self.adoptions and not await self._drain(adoptions) and time.monotonic() < deadline:
                await asyncio.sleep(min(RETRY_S, self.linger_s))
            looked = float("-inf")
            while adoptions == self.adoptions and time.monotonic() < deadline and self._holds_something():
                if time.monotonic() > looked + RETRY_S:
                    looked = time.monotonic()
                    await self._check_owner()
                await asyncio.sleep(min(0.2, self.linger_s))
        except FencedError as error:
            events.log.warning("%s", error)  # a newer job went on without us
        finally:
            if adoptions == self.adoptions:
                self.leaving = True
                await self._finish_begun()
                self.finished.set()

    async def _finish_begun(self) -> None:
        """What is being written is finished; for the parts of other ranks, which may never come, only a while."""
        end = time.monotonic() + self.commit_s
        while self.writing and time.monotonic() < end:
            await asyncio.sleep(0.01)
        end = time.monotonic() + min(LATE_S, self.commit_s)
        while any(self.settling.values()) and time.monotonic() < end:
            await asyncio.sleep(0.01)

    async def _check_owner(self) -> None:
        """FencedError once another job has taken the run over: nobody will come for this memory then."""
        for tier in self.tiers:
            with contextlib.suppress(StoreError):
                await tier.log.refresh()
                self._succeed(tier.log)
                tier.log.check_owner(self._mine())

    def _holds_something(self) -> bool:
        return any(arena.sealed() for arena in (*self.arenas.values(), *self.mirror.arenas.values()))

    def _digest_ring(self) -> None:
        for arena in (*self.arenas.values(), *self.mirror.arenas.values()):
            for slot, label in arena.sealed():
                layout = self.layouts.get(label.layout)
                if layout is None or label.attempt is None or (label.attempt, layout.rank) in self.digests:
                    continue
                blobs = digest_blobs(layout, arena.data(slot, label.data_size))
                found = blobs + blob_digest(arena.values(slot, label))
                if arena.label(slot) == label:  # the trainer may be alive, and go on
                    self.digests[label.attempt, layout.rank] = found

    async def _drain(self, adoptions: int) -> bool:
        """Write every sealed snapshot that is not durable yet to the nearest tier, newest first. False: try again."""
        complete = True
        ring = sorted(
            ((label.order, arena, slot, label) for arena in self.arenas.values() for slot, label in arena.sealed()),
            key=lambda item: -item[0],
        )
        history = set(in_history(self.acquires, (la.attempt for _, _, _, la in ring if la.attempt is not None)))
        for _, arena, slot, label in ring:
            if label.attempt not in history:
                continue  # undone by a rollback
            for tier in self.tiers[:1]:
                if adoptions != self.adoptions:
                    return True  # the next incarnation has the memory now, and decides
                done = label.attempt in tier.in_flight or label.attempt in self.retracted
                if label.attempt is None or done or tier.log.state.ended(label.attempt):
                    continue
                complete &= await self._save_late(tier, arena, slot, label)
        return complete

    async def _save_late(self, tier: Tier, arena: Arena, slot: int, label: Label) -> bool:
        """One snapshot of the ring, after the trainer's death. False: it has to be tried again."""
        assert label.attempt is not None
        stored = False
        try:
            written = await self._store(tier, arena, slot, label, "ring")
            stored = True
            if written is not None and written.part.world == 1:
                await self._settle(tier, written)
            elif written is not None:  # other ranks may never have taken this step: do not wait for them here
                self._spawn(self._settle_late(tier, written))
        except FencedError:
            raise
        except Exception as error:
            events.log.warning("step %d is not durable yet: %s", label.attempt.step, error)
            return stored and self.layouts[label.layout].world > 1
        return True

    async def _settle_late(self, tier: Tier, written: Written) -> None:
        try:
            with self._settles():
                await self._settle(tier, written)
        except CheckpointError as error:
            events.log.warning("step %d is in memory only: %s", Attempt.parse(written.part.attempt).step, error)


def _alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def available_memory() -> int:
    """Bytes that can be taken without pushing anything out: of the machine, or of the cgroup if that is less."""
    free = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            with open(limit) as a, open(used) as b:
                left = int(a.read()) - int(b.read())
            with contextlib.suppress(OSError), open(os.path.dirname(used) + "/memory.stat") as stat:
                cache = dict(line.split() for line in stat)  # pages of files that are given back when memory is short
                left += int(cache.get("total_inactive_file", cache.get("inactive_file", 0)))
            free = min(free, max(0, left))
    return free


def check_room(slots: int, slot_size: int) -> None:
    """SaveError if an arena of this size would take memory that is not free."""
    free = available_memory()
    if slots * slot_size > MEMORY_SHARE * free:
        raise SaveError(
            f"{slots} snapshots of {slot_size / 2**20:.0f} MiB do not fit into {free / 2**20:.0f} MiB of memory: "
            "lower Memory(keep=), or give the job more memory"
        )


def _be_modest() -> None:
    """Low priority: training comes first."""
    os.nice(NICE)
    os.chdir("/")  # do not keep a folder or a mount busy
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)


async def _main(fd: int, key: str, path: str) -> None:
    sock = socket.socket(fileno=fd)
    listener = link.listen(path)
    writer = Writer(Channel(sock), key, path)
    writer.inode = os.stat(path).st_ino
    await writer.run(listener)


def main() -> None:
    """Entry point of the process."""
    events.process = "writer"
    logging.basicConfig(level=logging.WARNING, format="everystep writer: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer; our end is bounded by deadlines
    _be_modest()
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
    os._exit(0)  # threads may still sit in a mutex
