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
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import psutil

from ckpt import commit, events, link, retain
from ckpt.arena import Arena, Label
from ckpt.codec import blob_digest
from ckpt.errors import CheckpointError, FencedError, FullError, SaveError, StoreError, UsageError, WriterError, to_wire
from ckpt.link import Channel, Message
from ckpt.log import Acquire, RunLog, in_history
from ckpt.manifest import Attempt, new_nonce
from ckpt.manifest import owner as owner_of
from ckpt.mutex import Got
from ckpt.plan import Layout
from ckpt.read import verify
from ckpt.store import open_store
from ckpt.write import Snapshot, Written, digest_blobs, write_part

NICE = 10
RETRY_S = 5.0
MAX_LAYOUTS = 256  # far more than a trainer believes us to have
MEMORY_SHARE = 0.8  # of the available memory, that an arena may take


@dataclass
class Tier:
    """One durable place of the run."""

    url: str
    keep: retain.Keep
    log: RunLog
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
        self.acquires: list[Acquire] = []  # the history that the snapshots in memory belong to
        self.tiers: list[Tier] = []
        self.arenas: dict[str, Arena] = {}
        self.layouts: dict[str, Layout] = {}
        self.digests: dict[Attempt, bytes] = {}
        self.writing: dict[tuple[str, int], int] = {}  # (arena, slot) -> writes in progress
        self.ownership = asyncio.Lock()  # held while the run is taken over by us
        self.tries: dict[Attempt, int] = {}
        self.retracted: set[Attempt] = set()
        self.first_try = 0
        self.linger_s = 600.0
        self.finished = asyncio.Event()
        self.adoptions = 0
        self.loop = asyncio.get_running_loop()
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
        """A trainer introduces itself. It becomes ours unless the present one lives."""
        if self.leaving:
            raise WriterError("this writer is about to leave")
        pid = link.peer_pid(channel.sock)
        alive = not self.dead and pid != self.trainer and _alive(self.trainer)
        reply: Message = {
            "pid": os.getpid(),
            "alive": alive,
            "trainer": self.trainer,
            "gone": self.previous_gone and (pid == self.trainer or not _alive(self.trainer)),
            "arenas": list(self.arenas),
            "layouts": {digest: layout.to_json() for digest, layout in self.layouts.items()},
            "digests": {str(attempt): digests.hex() for attempt, digests in self.digests.items()},
            "writing": [list(key) for key in self.writing],
            "acquires": [[a.epoch, a.nonce, a.restored and str(a.restored)] for a in self.acquires],
        }
        if not alive and channel is not self.channel:
            self.adoptions += 1
            self.previous_gone = reply["gone"]
            self.channel, self.trainer, self.dead = channel, pid, False
            self._start_thread(self._wait_gone, pid)
        return reply, tuple(arena.fd for arena in self.arenas.values())

    async def do_open(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Open the durable places. Without `owner` become the owner and recover; with it go on as that incarnation."""
        self.linger_s = float(message["linger_s"])
        self.first_try = int(message.get("first_try", 0))
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
        if message.get("owner"):
            epoch, nonce = message["owner"]
            self.owner = Acquire(epoch, nonce, None)
        else:
            await self._acquire(int(message.get("floor", 0)), None)
            for tier in self.tiers:
                await commit.recover(tier.log, self._mine(), frozenset(tier.in_flight))
        owner = self._mine()
        reply: Message = {
            "epoch": owner.epoch,
            "nonce": owner.nonce,
            "tiers": [{"checkpoints": len(t.log.state.commits), "damaged": t.log.state.damaged} for t in self.tiers],
        }
        return reply, ()

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

    async def _acquire(self, floor: int, restored: Attempt | None, nonce: str | None = None) -> None:
        async with self.ownership:
            await self._acquire_alone(floor, restored, nonce)

    async def _acquire_alone(self, floor: int, restored: Attempt | None, nonce: str | None) -> None:
        while True:
            nonce = nonce or new_nonce()
            floor = max([floor, *(t.log.state.epoch for t in self.tiers)])
            taken = [await commit.acquire(t.log, nonce, restored=restored, floor=floor) for t in self.tiers]
            self.owner = taken[0] if taken else Acquire(floor + 1, nonce, restored)
            self.acquires.append(self.owner)
            if len({a.epoch for a in taken}) <= 1:
                return
            nonce, floor = None, max(a.epoch for a in taken)  # another job came between: one epoch for all places

    def _mine(self) -> Acquire:
        if self.owner is None:
            raise UsageError("the run has not been opened")
        return self.owner

    async def do_rollback(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """A restore opens an epoch that continues from the attempt it came from."""
        nonce = str(message["nonce"])
        for tier in self.tiers:
            await tier.log.refresh()
            if all(acquire.nonce != nonce for acquire in tier.log.state.acquires):
                tier.log.check_owner(self._mine())
        await self._acquire(self._mine().epoch, Attempt.parse(message["restored"]), nonce)
        return {"epoch": self._mine().epoch, "nonce": self._mine().nonce}, ()

    async def do_arena(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Make an arena, in the background, since touching its pages takes a while."""
        slots, slot_size = int(message["slots"]), int(message["slot_size"])
        free = available_memory()
        if slots * slot_size > MEMORY_SHARE * free:
            raise SaveError(
                f"{slots} snapshots of {slot_size / 2**20:.0f} MiB do not fit into {free / 2**20:.0f} MiB of memory: "
                "lower Memory(keep=), or give the job more memory"
            )
        arena = await asyncio.to_thread(Arena.create, slots, slot_size)
        self.arenas[arena.id.hex()] = arena
        return {"arena": arena.id.hex()}, (arena.fd,)

    async def do_attach(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The trainer gives a new writer the memory that its old one held."""
        arena = Arena.attach(fds[0])
        self.arenas[arena.id.hex()] = arena
        return {}, ()

    async def do_watch(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The staging thread holds the mutex of this arena from now on."""
        self._start_thread(self._watch, self.arenas[message["arena"]], self.adoptions)
        return {}, ()

    async def do_digests(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The digests of snapshots that are known so far."""
        return {"digests": {str(attempt): digests.hex() for attempt, digests in self.digests.items()}}, ()

    async def do_release(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """This arena is not needed any more."""
        arena = self.arenas.pop(message["arena"], None)
        if arena is not None:
            arena.close()
        return {}, ()

    async def do_layout(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        layout = Layout.from_json(message["layout"])
        self.layouts[layout.digest] = layout
        if len(self.layouts) > MAX_LAYOUTS:  # shapes that keep changing; the trainer sends again what it forgot
            used = {label.layout for arena in self.arenas.values() for _, label in arena.sealed()}
            recent = list(self.layouts)[-MAX_LAYOUTS // 2 :]
            self.layouts = {key: self.layouts[key] for key in self.layouts if key in used or key in recent}
        return {}, ()

    async def do_write(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """Make a checkpoint of a sealed slot in one tier; replies when it is durable."""
        tier, arena, slot = self.tiers[message["tier"]], self.arenas[message["arena"]], int(message["slot"])
        label = arena.label(slot)
        if label is None or str(label.attempt) != message["attempt"]:
            raise SaveError(f"slot {slot} does not hold {message['attempt']} any more")
        started = time.monotonic()
        await self._write(tier, arena, slot, label)
        return {"seconds": time.monotonic() - started, "bytes": label.data_size}, ()

    async def do_retract(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """A snapshot turned out not to be of one moment: it must not be committed, or not stay so."""
        attempt = Attempt.parse(message["attempt"])
        self.retracted.add(attempt)
        for tier in self.tiers:
            async with tier.busy:
                await commit.retract(tier.log, self._mine(), attempt)
        return {}, ()

    async def do_close(self, channel: Channel, message: Message, fds: list[int]) -> tuple[Message, tuple[int, ...]]:
        """The trainer is done. Finish what was begun, clean up and leave."""
        self.leaving = True
        self._unlink_socket()  # the next trainer starts with a writer of its own
        try:
            while self.writing:
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

    async def _write(self, tier: Tier, arena: Arena, slot: int, label: Label, reason: str = "due") -> None:
        """A failed attempt stays open: it may be written again by a higher try, and recovery ends what is left."""
        attempt, key = label.attempt, (arena.id.hex(), slot)
        assert attempt is not None
        self.writing[key] = self.writing.get(key, 0) + 1
        tier.in_flight.add(attempt)
        try:
            async with tier.busy:
                if attempt in tier.log.state.commits:
                    return  # a predecessor did it, and could not say so
                number = self.tries.get(attempt, self.first_try)
                self.tries[attempt] = number + 1
                values = json.loads(bytes(arena.values(slot, label)))
                snapshot = Snapshot(attempt, self.layouts[label.layout], arena.data(slot, label.data_size), values)
                async with self.ownership:
                    tier.log.check_owner(self._mine())
                written = await write_part(tier.log.store, snapshot, number=number, reason=reason)
                if attempt in self.retracted:
                    raise SaveError(f"step {attempt.step} was taken back while it was written")
                try:
                    await self._commit(tier, written)
                except FullError:
                    await self._make_room(tier, attempt)
                    raise
            self.digests[attempt] = written.table.digest.tobytes() + blob_digest(arena.values(slot, label))
            events.log.info("step %d is a checkpoint in %s", attempt.step, tier.url)
        finally:
            tier.in_flight.discard(attempt)
            self.writing[key] -= 1
            if not self.writing[key]:
                del self.writing[key]
        self._forget_old()
        if tier.sweeping is None or tier.sweeping.done():
            tier.sweeping = self._spawn(self._sweep(tier))

    async def _commit(self, tier: Tier, written: Written) -> None:
        """Commit as whoever we are by then: a restore may open our next epoch while a checkpoint is on its way."""
        while True:
            mine = self._mine()
            try:
                await commit.commit(tier.log, mine, [written])
                return
            except FencedError:
                async with self.ownership:  # is it we ourselves who are taking over?
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

    def _forget_old(self) -> None:
        held = {label.attempt for arena in self.arenas.values() for _, label in arena.sealed()}
        self.digests = {attempt: d for attempt, d in self.digests.items() if attempt in held}
        self.tries = {attempt: n for attempt, n in self.tries.items() if attempt in held}

    async def _sweep(self, tier: Tier) -> None:
        """Retention: older checkpoints may only go once a newer one has been read back and found sound."""
        try:
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
                self.finished.set()

    async def _check_owner(self) -> None:
        """FencedError once another job has taken the run over: nobody will come for this memory then."""
        for tier in self.tiers:
            with contextlib.suppress(StoreError):
                await tier.log.refresh()
                tier.log.check_owner(self._mine())

    def _holds_something(self) -> bool:
        return any(arena.sealed() for arena in self.arenas.values())

    def _digest_ring(self) -> None:
        for arena in list(self.arenas.values()):
            for slot, label in arena.sealed():
                layout = self.layouts.get(label.layout)
                if layout is not None and label.attempt is not None and label.attempt not in self.digests:
                    blobs = digest_blobs(layout, arena.data(slot, label.data_size))
                    self.digests[label.attempt] = blobs + blob_digest(arena.values(slot, label))

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
                adopted = self.adoptions
                try:
                    await self._write(tier, arena, slot, label, "ring")
                except FencedError:
                    raise
                except Exception as error:
                    events.log.warning("step %d is not durable yet: %s", label.attempt.step, error)
                    complete = False
                finally:
                    if adopted != self.adoptions:  # the new trainer was told that this slot is being written
                        self._tell({"op": "unpinned", "arena": arena.id.hex(), "slot": slot})
        return complete


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
