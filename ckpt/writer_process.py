"""The writer process: holds the memory, writes it out, and outlives the trainer. Its parts are put together here.

    python -c 'from ckpt.writer_process import main; main()' FD RUN_KEY LOG STARTED

    ckpt.core.writer              the run, its memory and its tiers; saves, promotes, is inherited
    ckpt.guard.fault_reports      watches the trainer: the core's `TrainerWatch`
    ckpt.tools.observe.telemetry  shows what the trainer does
    ckpt.plugins.replicas         keeps a second copy of the memory on another node

The guard, the tools and the plug-ins know the core, which knows none of them. Requests go to whichever of these objects
have methods for them (`Dispatch`). What else the core has to be given, it gets by its constructors.

The process starts in its own session, at low CPU and I/O priority, without torch, and has the name of the run on this
machine for as long as it holds its memory: whoever finds the name taken does not start. Two kinds of threads feed one
event loop: a reader per connection (`server`), and those that wait for the trainer's death (`life`).

When the trainer dies, the writer digests the snapshots, persists the ring, newest first, and waits for the next
incarnation, which finds it by RUN_KEY; after `linger_s` it leaves. When the trainer closes, it finishes and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys

import psutil

from ckpt import failpoints
from ckpt.core.ipc import channel as link
from ckpt.core.ipc.channel import Channel
from ckpt.core.ipc.free_memory import spare_from_oom
from ckpt.core.ipc.process import Process
from ckpt.core.ipc.protocol import failure
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.dispatch import Background, Dispatch
from ckpt.core.writer.held_run import HeldRun, PresentTrainer
from ckpt.core.writer.life import Life
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.opening import TierOpener
from ckpt.core.writer.persist import Drain, Persister
from ckpt.core.writer.server import Server, call_myself
from ckpt.core.writer.throttle import Throttle
from ckpt.errors import CheckpointError, NameTakenError, UsageError, WriterError
from ckpt.guard.fault_reports import FaultReporter
from ckpt.later import bring
from ckpt.plugins.replicas import Replicator
from ckpt.tools.observe.telemetry.observers import Observers

NICE = 10
NUMPY_S = 0.5  # until it is imported, if nothing has used it before: the run is open by then, as a rule


async def serve(
    channel: Channel, listener: socket.socket, key: str, path: str, process: Process, awaited: bool
) -> None:
    """Put the writer together, and work until it leaves. Everything runs in one event loop; blocking work goes to
    threads."""
    background, trainer = Background(), PresentTrainer(channel, process)
    background.loop.call_later(NUMPY_S, background.thread, bring, "numpy")
    memory = HeldMemory(trainer, awaited=awaited)
    server, run = Server(path, listener, trainer, background), HeldRun(trainer)
    throttle = Throttle(lambda: trainer.pid)
    books = Bookkeeper(lambda: run.tiers, trainer.tell)
    persister = Persister(trainer, run, memory, books, background)
    settler, parts, promoter = persister.settler, persister.parts, persister.promoter
    drain = Drain(trainer, run, memory, parts, settler, throttle, background)
    opener = TierOpener(trainer, run, promoter, books, throttle, memory)
    watch = FaultReporter(key, trainer, run, memory, drain, books, background)
    life = Life(trainer, run, memory, parts, opener, persister, drain, books, watch, server, background)
    observers = Observers(trainer, run, memory, drain, books, watch)
    core = (run, settler, promoter, persister, drain, opener, books, life, memory)
    replicator = Replicator(memory)  # first: a copy goes before the original is given up
    await server.run(Dispatch(replicator, *core, watch, observers))
    observers.exporter.stop_serving()
    await server.finished.wait()
    await observers.exporter.finish()


def _be_modest() -> None:
    """Low priority: training comes first."""
    os.nice(NICE)
    with contextlib.suppress(OSError):  # Linux may share cores out by session first: then `nice` counts only within one
        os.setsid()  # whoever started us made this one, and may be in it
        with open("/proc/self/autogroup", "w") as group:
            group.write(str(NICE))
    os.chdir("/")  # do not keep a folder or a mount busy
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    spare_from_oom()


async def _main(fd: int, key: str, path: str, started: int, awaited: bool) -> None:
    """`started`: when the trainer was, as `ipc.process.Process` says it; it may have died by now. `awaited`: it is
    about to give us the memory that a dead writer held."""
    sock = socket.socket(fileno=fd)
    try:
        listener = link.listen(key)
    except UsageError as error:
        await _refuse(Channel(sock), WriterError(str(error)))
        return
    if listener is None:
        await _refuse(Channel(sock), NameTakenError("another writer of this run has started meanwhile"))
        return
    call_myself(link.AT_WORK)
    await serve(Channel(sock), listener, key, path, Process(link.peer_pid(sock), started), awaited)


async def _refuse(channel: Channel, error: CheckpointError) -> None:
    """Reply to the trainer's first request with the reason why this process cannot be the run's writer."""
    incoming = await asyncio.to_thread(channel.receive)
    if incoming is not None and incoming.id is not None:
        channel.reply(incoming.id, failure(error))


def main() -> None:
    """Entry point of the process."""
    failpoints.process = "writer"
    logging.basicConfig(level=logging.WARNING, format="everystep writer: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer; our end is bounded by deadlines
    _be_modest()
    gc.freeze()
    gc.enable()  # which it was not while all of this was imported
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "1"))
    os._exit(0)  # threads may still sit in a mutex
