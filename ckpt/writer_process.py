"""Assembles the writer process, which owns the snapshots, writes them to the tiers and outlives the trainer.

    python -c 'from ckpt.writer_process import main; main()' FD RUN_KEY LOG STARTED RUN RANK

    ckpt.core.writer              the run, its memory and its tiers; saves, copies to tiers, hands memory to a restart
    ckpt.guard.fault_reports      watches the trainer; implements the core's `TrainerWatch`
    ckpt.tools.observe.telemetry  publishes metrics of the trainer
    ckpt.plugins.replicas         keeps a second copy of the memory on another node

The guard, the tools and the plug-ins import the core, but the core imports none of them. `Dispatch` sends each request
to the object with a method for it. The constructors of the core's classes receive all other dependencies.

The process runs in its own session, at low CPU and I/O priority, without torch. While it holds the memory of a run, it
owns the run's name on this machine, and a second writer that finds the name taken does not start. Two kinds of threads
feed its one event loop: a reader per connection (`server`), and threads that wait for the trainer's death (`life`).

When the trainer dies, the writer digests the snapshots and writes them, newest first. It then waits for a restart,
which finds the writer by RUN_KEY, and exits after `linger_s` seconds. When the trainer closes, it finishes and exits.
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
from ckpt.core.ipc.arena import spare_from_oom
from ckpt.core.ipc.channel import Channel
from ckpt.core.ipc.heartbeat import Process
from ckpt.core.ipc.messages import failure
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.held_run import Background, Dispatch, HeldRun, PresentTrainer
from ckpt.core.writer.life import Life, Server, call_myself, set_title
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.opening import TierOpener
from ckpt.core.writer.promotion import Throttle
from ckpt.core.writer.saver import WriterSaver
from ckpt.errors import CheckpointError, NameTakenError, UsageError, WriterError
from ckpt.guard.fault_reports import FaultReporter
from ckpt.later import bring
from ckpt.plugins.replicas import Replicator
from ckpt.tools.observe.telemetry.observers import Observers

NICE = 10
NUMPY_S = 0.5  # seconds before numpy is imported in the background; the run is usually open by then


async def serve(channel: Channel, listener: socket.socket, key: str, path: str, process: Process) -> None:
    """Assemble the writer and serve until it exits. One event loop runs everything; blocking work goes to threads."""
    background, trainer = Background(), PresentTrainer(channel, process)
    background.loop.call_later(NUMPY_S, background.thread, bring, "numpy")
    memory = HeldMemory(trainer)
    server, run = Server(path, listener, trainer, background), HeldRun(trainer)
    books = Bookkeeper(lambda: run.tiers, trainer.tell)
    saver = WriterSaver(trainer, run, memory, books, Throttle(lambda: trainer.pid), background)
    opener = TierOpener(trainer, run, saver, books, memory)
    watch = FaultReporter(key, trainer, run, memory, saver, books, background)
    life = Life(trainer, run, memory, opener, saver, books, watch, server, background)
    observers = Observers(trainer, run, memory, saver, books, watch)
    core = (run, saver, opener, life, memory)
    replicator = Replicator(memory)  # created first, because it copies a snapshot before that is released
    await server.run(Dispatch(replicator, *core, watch, observers))
    observers.exporter.stop_serving()
    await server.finished.wait()
    await observers.exporter.finish()


def _be_modest() -> None:
    """Lower the priority of this process, because training comes first."""
    os.nice(NICE)
    with contextlib.suppress(OSError):  # if the kernel schedules by session, `nice` only counts within one session
        os.setsid()  # a new session, because the trainer may be in the current one
        with open("/proc/self/autogroup", "w") as group:
            group.write(str(NICE))
    os.chdir("/")  # otherwise this process could keep a folder or a mount busy
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    spare_from_oom()


async def _main(fd: int, key: str, path: str, started: int, run: str, rank: str) -> None:
    """Listen under the run's name, and serve. If the writer cannot start, send the reason to the trainer.

    `started`: start time of the trainer, as in `ipc.heartbeat.Process`; identifies it even if it has died since.
    `run`, `rank`: the run's URL and the trainer's rank, for the process title.
    """
    sock = socket.socket(fileno=fd)
    try:
        listener = link.listen(key)
    except UsageError as error:
        await _refuse(Channel(sock), WriterError(str(error)))
        return
    if listener is None:
        await _refuse(Channel(sock), NameTakenError("another writer of this run is already running"))
        return
    call_myself(link.AT_WORK)
    set_title(run, rank, key, path)
    await serve(Channel(sock), listener, key, path, Process(link.peer_pid(sock), started))


async def _refuse(channel: Channel, error: CheckpointError) -> None:
    """Reply to the trainer's first request with the reason why this process cannot be the run's writer."""
    incoming = await asyncio.to_thread(channel.receive)
    if incoming is not None and incoming.id is not None:
        channel.reply(incoming.id, failure(error))


def main() -> None:
    """Run the writer process. This is its entry point."""
    failpoints.process = "writer"
    logging.basicConfig(level=logging.WARNING, format="everystep writer: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer; deadlines bound the writer's exit
    _be_modest()
    gc.freeze()
    gc.enable()  # garbage collection was off during the imports
    fd, key, path, started, run, rank = sys.argv[1:7]
    asyncio.run(_main(int(fd), key, path, int(started), run, rank))
    os._exit(0)  # do not wait for threads that may still be blocked in a mutex
