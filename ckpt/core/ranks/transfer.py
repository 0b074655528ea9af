"""Transfers bytes from a rank that has read them to ranks that need them, over plain TCP during a restore.

    all ranks             Transfer() listens; ranks exchange its `contact`
    receiving rank        `receive` connects to each rank that reads chunks for it, and takes the chunks as they arrive
    sending rank          `wait_for` its recipients, then `send` each chunk as it is read
    all ranks             `wait` until all chunks have arrived, `close` when all ranks are done

A rank that fails closes its connections, so that no rank waits for it. The ranks get the error in their next agreement.
The transfer does not verify bytes, so `take` must compare digests. Addresses and tokens come from the job's key-value
store. A token keeps other jobs out, but nothing is encrypted: anyone who can read the network sees all bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import psutil

from ckpt.core.format.table import MAX_CHUNK
from ckpt.errors import ClosedError, DeadlineError, PeerError
from ckpt.units import count_of

HELLO = struct.Struct("!8s32sI")  # magic, token, rank
MAGIC = b"ckpt-xc2"
BYTE, WELCOME = struct.Struct("B"), 6
HEADER = struct.Struct("!QI")  # number of the chunk, and number of the bytes that follow
ADDRESS_S = 5.0  # timeout to connect to an address, and to receive a client's token
JOIN_S = 5.0  # timeout for threads to end
Take = Callable[[int, memoryview], None]


class Transfer:
    """Sends chunks to other ranks and receives chunks from them. It uses one buffer for each sending rank, which is as
    large as the largest chunk."""

    def __init__(self, rank: int, *, silence_s: float = 60.0) -> None:
        """`silence_s`: if a rank transfers no byte for that long inside a chunk, it counts as gone."""
        self.rank, self._silence_s = rank, silence_s
        self._token = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._recipients: dict[int, tuple[socket.socket, threading.Lock]] = {}  # connections by rank
        self._left = 0  # number of chunks that have not arrived
        self._error: BaseException | None = None
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = listen()
        self._start(self._accept)

    @property
    def contact(self) -> dict[str, Any]:
        """Return the data that other ranks need to connect, as JSON. The token is a secret of the job."""
        return {"port": self._listener.getsockname()[1], "token": self._token, "addresses": addresses()}

    # -- receive --

    def receive(
        self,
        chunks: Mapping[int, Collection[int]],
        contacts: Sequence[dict[str, Any]],
        nodes: Sequence[int],
        take: Take,
        timeout_s: float,
    ) -> None:
        """Receive these chunks in the background.

        - `chunks`: numbers of the chunks, by the rank that sends them.
        - `contacts`, `nodes`: the contact data and the node of every rank.
        - `take`: called once for each chunk, from several threads. The memory is reused after it returns.
        - `timeout_s`: timeout to connect to a rank.
        """
        self._left = sum(map(len, chunks.values()))
        for rank, wanted in chunks.items():
            contact, near = contacts[rank], nodes[rank] == nodes[self.rank]
            places = (["127.0.0.1"] if near else []) + contact["addresses"]
            self._start(self._receive, rank, set(wanted), places, contact, take, time.monotonic() + timeout_s)

    def _receive(
        self, rank: int, chunks: set[int], places: list[str], contact: Any, take: Take, connected_by: float
    ) -> None:
        sock, buffer = None, memoryview(b"")
        try:
            sock = self._connect(places, contact, connected_by)
            while chunks:
                chunk, length = _unpack(sock, HEADER, idle=True)
                if chunk not in chunks or length > MAX_CHUNK:
                    raise PeerError(f"sent an unexpected chunk: {chunk}, {length} bytes")
                if len(buffer) < length:
                    buffer = memoryview(bytearray(length))
                take(chunk, _read(sock, buffer[:length]))
                chunks.remove(chunk)
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()
        except (OSError, PeerError) as error:
            self._fail(PeerError(f"rank {rank} {error.strerror or error if isinstance(error, OSError) else error}"))
        except BaseException as error:
            self._fail(error)
        if sock is not None and chunks:
            _hang_up(sock)

    def _connect(self, places: list[str], contact: Any, connected_by: float) -> socket.socket:
        """Connect to the first address at which the rank responds. Raises PeerError if no address works."""
        problems = []
        for address in places:
            limit_s = max(0.001, min(ADDRESS_S, connected_by - time.monotonic()))
            try:
                sock = self._track(socket.create_connection((address, contact["port"]), limit_s), limit_s)
                sock.sendall(HELLO.pack(MAGIC, contact["token"].encode(), self.rank))
                if _unpack(sock, BYTE) == (WELCOME,):
                    _limit(sock, self._silence_s)
                    return sock
                problems.append(f"{address}: another program listens there")
            except (OSError, PeerError) as error:
                problems.append(f"{address}: {error}")
        raise PeerError(f"cannot be reached ({'; '.join(problems) or 'it has no address'})")

    # -- send --

    def wait_for(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Wait until these ranks have connected to receive. Raises PeerError naming a rank that is late."""
        wanted = set(ranks)
        with self._changed:
            self._changed.wait_for(lambda: self._error or wanted <= self._recipients.keys(), timeout_s)
            if self._error is not None:
                raise self._error
            if absent := sorted(wanted - self._recipients.keys()):
                raise PeerError(f"rank {absent[0]} did not connect within {timeout_s:g} s")

    def send(self, rank: int, chunk: int, data: memoryview) -> None:
        """Send a chunk to a connected rank, from any thread. This may return before the bytes have arrived.

        Raises PeerError if the rank is gone, or accepts no bytes for `silence_s`.
        """
        sock, lock = self._recipients[rank]
        try:
            with lock:
                sock.sendall(HEADER.pack(chunk, data.nbytes), socket.MSG_MORE)
                sock.sendall(data)
        except OSError as error:
            _hang_up(sock)  # after an incomplete chunk, the receiver cannot parse the rest
            raise PeerError(f"rank {rank} no longer receives data: {error.strerror}") from None

    def _accept(self) -> None:
        while not self._closed:
            try:
                self._start(self._welcome, self._track(self._listener.accept()[0], ADDRESS_S))
            except (OSError, RuntimeError):  # the client is already gone, or no descriptor or thread is left
                time.sleep(0.01)

    def _welcome(self, sock: socket.socket) -> None:
        """Accept a connection as a recipient if it sends the token."""
        with contextlib.suppress(OSError, PeerError):
            magic, token, rank = _unpack(sock, HELLO)
            if magic == MAGIC and hmac.compare_digest(token, self._token.encode()):
                sock.sendall(BYTE.pack(WELCOME))
                _limit(sock, self._silence_s)
                with self._changed:
                    self._recipients[rank] = sock, threading.Lock()
                    self._changed.notify_all()
                return
        _hang_up(sock)

    # -- the end --

    def wait(self, timeout_s: float) -> None:
        """Wait until `take` has returned for every chunk.

        Raises the error of `take`. Raises PeerError if a rank sent unexpected data, or disconnected before it had sent
        all chunks. Raises DeadlineError after `timeout_s` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._left, timeout_s)
            if self._error is not None:
                raise self._error
            if self._left:
                raise DeadlineError(
                    f"{count_of(self._left, 'chunk')} of other ranks did not arrive within {timeout_s:g} s"
                )

    def close(self) -> None:
        """End all connections and threads. A thread that is still in `take` after `JOIN_S` continues to run."""
        self._fail(ClosedError("the transfer was closed"))
        with self._changed:
            self._closed = True
        for sock in (self._listener, *self._sockets):
            _hang_up(sock)
        end = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="ckpt-transfer", daemon=True)
        with self._changed:
            thread.start()
            self._threads.append(thread)

    def _track(self, sock: socket.socket, limit_s: float) -> socket.socket:
        """Prepare a new connection, and register it so that `close` ends it."""
        sock.settimeout(None)
        _limit(sock, limit_s)
        # The kernel sizes the buffers, because a size set by hand is cut to rmem_max, often 208 KiB.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that lost power sends nothing. After ten idle seconds, the kernel sends probes for twenty seconds.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._changed:
            if self._closed:
                sock.close()
                raise ConnectionAbortedError("the transfer was closed")
            self._sockets.append(sock)
        return sock


def _read(sock: socket.socket, view: memoryview, *, idle: bool = False) -> memoryview:
    """Fill the view from a socket. `idle`: the first byte may take any time to arrive."""
    got = 0
    while got < len(view):
        try:
            size = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            if got or not idle:
                raise PeerError("has stopped sending data") from None
            continue
        if size == 0:
            raise PeerError("closed the connection before it had sent everything")
        got += size
    return view


def _unpack(sock: socket.socket, form: struct.Struct, *, idle: bool = False) -> tuple[Any, ...]:
    return form.unpack(_read(sock, memoryview(bytearray(form.size)), idle=idle))


def _limit(sock: socket.socket, seconds: float) -> None:
    """Set the timeout of blocking sends and receives."""
    value = struct.pack("ll", *divmod(max(1, int(seconds * 1e6)), 10**6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, value)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def listen() -> socket.socket:
    """Listen on all interfaces, with one socket for IPv6 and IPv4, or for IPv4 alone."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def addresses() -> list[str]:
    """Return the addresses of this machine, fastest interfaces first, without loopback and link-local addresses."""
    stats, found = psutil.net_if_stats(), list[tuple[int, str]]()
    for name, known in psutil.net_if_addrs().items():
        for one in known:
            if name in stats and stats[name].isup and one.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(one.address.partition("%")[0])
                if not (ip.is_loopback or ip.is_link_local):
                    found.append((-stats[name].speed, str(ip)))
    return [address for _, address in sorted(found, key=lambda pair: pair[0])]
