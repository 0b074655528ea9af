"""The connections of the writer. It listens under the name of the run on this machine while it holds memory.

A thread reads each connection. A task of the event loop handles each request. Tasks begin in the order in which
requests arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from ckpt import events
from ckpt.core.ipc import channel as link
from ckpt.core.ipc.channel import Channel
from ckpt.core.ipc.protocol import Incoming, Request, failure
from ckpt.core.writer.dispatch import Answer, Background, Caller, Dispatch
from ckpt.core.writer.held_run import PresentTrainer
from ckpt.errors import CheckpointError, ProtocolError, WriterError

AGAIN_S = 1.0  # pause after a connection could not be accepted, for lack of descriptors


class Server:
    """Serves the connections of the writer. `path`: the path of its socket, "" if it has none."""

    def __init__(self, path: str, listener: socket.socket, trainer: PresentTrainer, background: Background) -> None:
        self._path, self._trainer, self._background = path, trainer, background
        self._listener: socket.socket | None = listener
        self._dispatch: Dispatch | None = None
        self.left = asyncio.Event()  # once set, no trainer is accepted
        self.finished = asyncio.Event()

    async def run(self, dispatch: Dispatch) -> None:
        """Serve until the name is released. Replies and work go on until `finished`."""
        assert self._listener is not None and self._trainer.channel is not None
        self._dispatch = dispatch
        self._listener.setblocking(False)
        self._listen()
        self._background.thread(self._read, self._trainer.channel)
        await self.left.wait()

    def leave(self) -> None:
        """Release the name, so that the next trainer starts its own writer."""
        self.left.set()
        listener, self._listener = self._listener, None
        if listener is None:
            return
        call_myself(link.LEAVING)
        self._background.loop.remove_reader(listener)
        listener.close()
        with contextlib.suppress(OSError):
            if self._path and os.path.getsize(self._path) == 0:
                os.unlink(self._path)

    def check_stays(self) -> None:
        """Raise WriterError for a trainer that connects while this writer leaves. The trainer then waits for the name
        and starts its own writer."""
        if self.left.is_set():
            raise WriterError("this writer is about to leave")

    # -- connections --

    def _listen(self) -> None:
        if self._listener is not None:
            self._background.loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors, for example: clients wait
            self._background.loop.remove_reader(listener)
            self._background.loop.call_later(AGAIN_S, self._listen)
            return
        if link.same_user(sock):
            sock.setblocking(True)
            self._background.thread(self._read, Channel(sock))
        else:
            sock.close()

    def _read(self, channel: Channel) -> None:
        assert self._dispatch is not None
        while (incoming := channel.receive()) is not None:
            try:
                request = self._dispatch.request(incoming)
            except ProtocolError as error:
                incoming.drop()
                events.log.warning("refused: %s", error)
                _reply(channel, incoming.id, failure(error))
                continue
            self._background.post(self._on_request, self._dispatch, channel, incoming, request)
        self._background.post(self._on_lost, channel)

    def _on_lost(self, channel: Channel) -> None:
        channel.close()
        self._trainer.hung_up(channel)

    def _on_request(self, dispatch: Dispatch, channel: Channel, incoming: Incoming, request: Request[object]) -> None:
        self._background.spawn(self._answer(dispatch, channel, incoming, request))

    async def _answer(self, dispatch: Dispatch, channel: Channel, incoming: Incoming, request: Request[object]) -> None:
        value: object
        try:
            self._trainer.check_not_fenced(channel)
            value = await dispatch.answer(request, Caller(channel, incoming.fds))
        except Exception as error:
            if self.left.is_set() and isinstance(error, RuntimeError):  # the worker threads have ended already
                error = WriterError("this writer is about to leave")
            elif not isinstance(error, CheckpointError):
                events.log.exception("the writer failed at %r", incoming.op)
            value = failure(error)
        _reply(channel, incoming.id, *(value if isinstance(value, Answer) else (value,)))


def _reply(channel: Channel, number: int | None, value: object, fds: tuple[int, ...] = ()) -> None:
    """Reply to a request that has a number. If the reply cannot be sent, send the error instead."""
    if number is not None:
        with contextlib.suppress(OSError):
            try:
                channel.reply(number, value, fds)
            except (ProtocolError, TypeError, ValueError) as error:
                channel.reply(number, failure(error))


def call_myself(name: str) -> None:
    """Set the name of this process, as shown by `ps` and read by `link.writers_of`."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)
