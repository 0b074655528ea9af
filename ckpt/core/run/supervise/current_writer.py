"""The writer that we have at the moment: it may die at any time, and another takes its place."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from ckpt.core.ipc.protocol import Request
from ckpt.core.run.supervise.writer_client import REQUEST_S, WriterClient
from ckpt.errors import CheckpointError, ClosedError, FencedError, WriterError

R = TypeVar("R")
T = TypeVar("T")
INSIST = 300  # tries, of what a writer may die of

AnyRequest = Request[Any]


class WriterUser:
    """Something that the writer has to know about, and the next one too. See `CurrentWriter.users`."""

    def on_new_writer(self, client: WriterClient) -> None:
        """Another has taken over, and knows nothing yet. Called with the lock; it must not wait for an answer."""

    def on_no_writer(self, error: CheckpointError) -> None:
        """There will be none any more."""

    def in_use(self) -> set[bytes]:
        """Arenas that the writer has something to read from for us."""
        return set()


class CurrentWriter:
    """`client`: the one that we have, or had. `users`: in the order in which the next one is told of what they need.
    `failure`: why there will be none any more; `lost`: to whom the run was lost; `closing`: we hang up ourselves. With
    `lock`, nobody takes over."""

    client: WriterClient

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may come in
        self.users: list[WriterUser] = []
        self.failure: CheckpointError | None = None
        self.lost: FencedError | None = None
        self.closing = False

    def is_current(self, client: WriterClient) -> bool:
        """False too as long as there has been none."""
        return getattr(self, "client", None) is client

    def send(self, request: Request[R], fds: tuple[int, ...] = ()) -> Future[tuple[R, list[int]]]:
        """As `WriterClient.send`."""
        return self.client.send(request, fds)

    def ask(self, request: Request[R], timeout_s: float = REQUEST_S, fds: tuple[int, ...] = ()) -> R:
        """As `WriterClient.ask`."""
        return self.client.ask(request, timeout_s, fds)

    def insist(self, work: Callable[[WriterClient], T], end: float = math.inf) -> T:
        """Ask the writer, and if it dies of it the next one; none any more from `end` on."""
        for tries in itertools.count():
            try:
                return work(self.client)
            except WriterError as error:
                if self.closing:  # by a signal handler
                    raise ClosedError("this Checkpointer was closed meanwhile") from error
                if self.failure is not None or tries > INSIST or time.monotonic() > end:
                    raise
                time.sleep(0.1)  # until the next writer is there
        raise AssertionError

    def in_use(self) -> set[bytes]:
        """Arenas that it has something to read from."""
        return set().union(*(user.in_use() for user in self.users))


class StandingRequests(WriterUser):
    """What each writer is told once, this one and those that follow; of a kind the last one."""

    def __init__(self, writer: CurrentWriter) -> None:
        self._writer = writer
        self._told: dict[type[AnyRequest], tuple[AnyRequest, tuple[int, ...]]] = {}

    def tell(self, request: AnyRequest, fds: tuple[int, ...] = (), *, later: AnyRequest | None = None) -> None:
        """`later`: what the next ones are told instead."""
        self._told[type(request)] = later or request, fds
        self._writer.send(request, fds)

    def amend(self, kind: type[AnyRequest], **changes: Any) -> None:
        """The next ones are told this as well."""
        if kind in self._told:
            request, fds = self._told[kind]
            self._told[kind] = msgspec.structs.replace(request, **changes), fds

    def on_new_writer(self, client: WriterClient) -> None:
        for request, fds in list(self._told.values()):
            client.send(request, fds)
