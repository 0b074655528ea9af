"""Who reads what when several ranks want the same bytes, and how these get from one rank to another.

    assign: wants, can_read -> a Share for each rank        pure; every rank computes the same
    Exchange: listen -> expect -> connect -> send, wait     plain TCP, open only while a restore is under way

Bytes move in blobs: numbered pieces of at most 64 MiB, usually 4. What arrives is handed on as it came over the wire;
whoever takes it compares digests. Addresses and tokens come from the job's own key-value store. A token keeps strangers
and other jobs out; it hides nothing from somebody who can listen in on the network.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from ckpt.errors import ClosedError, DeadlineError, PeerError, StoreError, UsageError
from ckpt.format.columns import I64
from ckpt.format.table import MAX_BLOB

Bools = npt.NDArray[np.bool_]

ATTEMPT_S = 5.0  # for one address, and for a stranger to say who it is
LAST_WORD_S = 2.0  # to tell peers that this rank gave up
JOIN_S = 5.0
CONNECTING = 16  # at the same time

_HELLO = struct.Struct("!8s32sI")  # magic, token, rank
_MAGIC = b"ckpt-xc1"
_WELCOME = b"\x06"
_HEADER = struct.Struct("!B3xIQ")  # kind, length of what follows, blob
_OPEN, _BLOB, _DONE, _FAILED = range(4)
_MAX_REASON = 4096


@dataclass(frozen=True, eq=False)
class RankReads:
    """What one rank does.

    `reads`: the blobs it reads, ascending. `recipients`: for each of them, the other ranks that get it, ascending.
    `expects`: the blobs that come to it from others, ascending.
    """

    reads: I64
    recipients: tuple[tuple[int, ...], ...]
    expects: I64


def assign(rank: int, sizes: I64, wants: Bools, can_read: Bools, nodes: Sequence[int]) -> RankReads:
    """The share of `rank`. Given the same arguments, the shares of all ranks fit together.

    `sizes`: bytes of each blob. `wants` and `can_read`: ranks x blobs. `nodes`: the node of each rank. A node that can
    read what it wants does so once, by a rank that wants it itself if one can. What a node cannot read comes from one
    rank elsewhere, from one that reads it anyway if there is one. Bytes are levelled out over the ranks, in runs as
    long as can be. StoreError if nobody can read some blob that is wanted.
    """
    lost = int(np.count_nonzero(wants.any(0) & ~can_read.any(0)))
    if lost:
        raise StoreError(f"no rank can read {lost} of the blobs that are wanted")
    node = np.unique(np.asarray(nodes), return_inverse=True)[1]
    source = _sources(sizes, wants, can_read, node, int(node[rank]))
    mine = source == rank
    reads = np.flatnonzero(mine.any(0))
    given = wants[:, reads] & mine[:, reads][node]
    given[rank] = False
    recipients: list[tuple[int, ...]] = [()] * reads.size
    for rows, places in _groups(given):
        ranks = tuple(rows.tolist())
        for i in places.tolist():
            recipients[i] = ranks
    return RankReads(reads, tuple(recipients), np.flatnonzero(wants[rank] & ~mine[node[rank]]))


def _sources(sizes: I64, wants: Bools, can_read: Bools, node: npt.NDArray[np.intp], own: int) -> npt.NDArray[np.int32]:
    """Nodes x blobs: the rank from which the ranks of a node have a blob, -1 where none of them wants it.

    Where no node needs another one, only the row of node `own` is filled: the time does not grow with the job.
    """
    members = [np.flatnonzero(node == n) for n in range(int(node.max()) + 1)]
    wanted = np.array([wants[ranks].any(0) for ranks in members])
    needed = wanted & ~np.array([can_read[ranks].any(0) for ranks in members])
    far = np.flatnonzero(needed.any(0))  # what some node cannot read itself
    source, load = np.full(wanted.shape, -1, np.int32), np.zeros(node.size, np.int64)
    for n in range(len(members)) if far.size else [own]:
        able, both = can_read[members[n]], wants[members[n]] & can_read[members[n]]
        _deal(sizes, np.where(both.any(0), both, able) & wanted[n], members[n], load, source[n])
    if far.size:
        anyway = np.zeros((node.size, far.size), np.bool_)
        for row in source[:, far]:
            at = np.flatnonzero(row >= 0)
            anyway[row[at], at] = True
        chosen = np.full(far.size, -1, np.int32)
        eligible = np.where(anyway.any(0), anyway, can_read[:, far])
        _deal(sizes[far], eligible, np.arange(node.size), load, chosen)
        source[:, far] = np.where(needed[:, far], chosen, source[:, far])
    return source


def _deal(sizes: I64, eligible: Bools, ranks: npt.NDArray[np.intp], load: I64, reader: npt.NDArray[np.int32]) -> None:
    """Give each blob that has eligible ranks to one of them, in `reader`, and count its bytes in `load`.

    Blobs with the same eligible ranks are dealt in runs, the first to the rank with the least load, each as long as it
    takes to lift all of them to one level. All numbers are integers, so that every machine comes to the same result.
    """
    for rows, blobs in _groups(eligible):
        able = ranks[rows]
        able = able[np.argsort(load[able], kind="stable")]
        ends = np.cumsum(sizes[blobs])
        total = int(ends[-1])
        before = load[able]
        levels = -((total + np.cumsum(before)) // -np.arange(1, able.size + 1))  # if the first 1, 2, 3 … took all
        shares = np.minimum(np.cumsum(np.maximum(levels.min() - before, 0)), total)
        cuts = np.searchsorted(2 * ends - sizes[blobs], 2 * shares, side="right")  # by the middle of each blob
        reader[blobs] = np.repeat(able, np.diff(cuts, prepend=0))
        load[able] += np.diff(np.concatenate([[0], ends])[cuts], prepend=0)


def _groups(table: Bools) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    """Columns that are equal and not empty: the rows that are set, the columns ascending; fewest rows first."""
    packed = np.packbits(table, axis=0)
    order = np.lexsort(packed)
    packed = packed[:, order]
    runs = np.split(order, np.flatnonzero((packed[:, 1:] != packed[:, :-1]).any(0)) + 1)
    groups = [(np.flatnonzero(table[:, run[0]]), run) for run in runs if run.size]
    return sorted((g for g in groups if g[0].size), key=lambda g: (g[0].size, int(g[1][0])))


class _GoneError(Exception):
    """The other end is not there any more; the text goes on from "rank 3 …"."""


class _Link:
    """One connection. `send` may be called from any thread, `read` from one."""

    def __init__(self, sock: socket.socket, limit_s: float) -> None:
        self.sock, self._sending = sock, threading.Lock()
        self.known = False  # the other end is a rank of this job
        sock.settimeout(None)
        self.limit(limit_s)
        # Buffers stay the kernel's: it lets them grow, and a size set by hand is cut to rmem_max, often 208 KiB.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that lost its power says nothing. After ten idle seconds the kernel asks, and waits for twenty.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def limit(self, seconds: float) -> None:
        """How long a call may stand still, either way."""
        value = struct.pack("ll", *divmod(max(1, int(seconds * 1e6)), 10**6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self.sock.setsockopt(socket.SOL_SOCKET, option, value)

    def read(self, view: memoryview, *, idle: bool = False) -> memoryview:
        """The view, filled. `idle`: its first byte may take any time to come."""
        got = 0
        while got < len(view):
            try:
                size = self.sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                if got or not idle:
                    raise _GoneError("stands still") from None
                continue
            except OSError as error:
                raise _GoneError(f"is gone: {error.strerror}") from None
            if size == 0:
                raise _GoneError("hung up before it had sent everything")
            got += size
        return view

    def read_new(self, size: int, *, idle: bool = False) -> bytes:
        return bytes(self.read(memoryview(bytearray(size)), idle=idle))

    def send(self, kind: int, blob: int = 0, data: memoryview | bytes = b"", wait_s: float = -1) -> None:
        """One whole frame, or the connection ends. `wait_s`: for other threads that are sending; -1: any time."""
        if not self._sending.acquire(timeout=wait_s):
            raise _GoneError("is busy")
        try:
            parts = [memoryview(_HEADER.pack(kind, len(data), blob)), memoryview(data)]
            while parts:
                sent = self.sock.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][sent:]
        except BaseException as error:
            self.hang_up()
            if not isinstance(error, OSError):
                raise
            raise _GoneError(self._last_word() or f"takes nothing more: {error.strerror}") from None
        finally:
            self._sending.release()

    def _last_word(self) -> str:
        """What the receiving end said before it hung up, if anything. It never speaks otherwise."""
        with contextlib.suppress(OSError, struct.error):
            raw = self.sock.recv(_HEADER.size + _MAX_REASON, socket.MSG_DONTWAIT)
            if _HEADER.unpack_from(raw)[0] == _FAILED:
                return f"gave up: {raw[_HEADER.size :].decode(errors='replace')}"
        return ""

    def give_up(self, reason: str, limit_s: float) -> None:
        """Say why and hang up; without a word if the other end takes none within `limit_s`."""
        with contextlib.suppress(_GoneError, OSError):
            self.limit(limit_s)
            self.send(_FAILED, 0, reason.encode(errors="replace")[:_MAX_REASON], max(0.0, limit_s))
        self.hang_up()

    def hang_up(self) -> None:
        """Whoever reads or sends on this connection gets its end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        with self._sending:  # no other thread may be about to use a descriptor whose number is free again
            self.sock.close()


class Exchange:
    """Sends blobs to other ranks and takes theirs: made, told what to `expect`, `connect`ed, and `close`d.

    It listens from the start. `on_blob(blob, data)` is called from several threads, once for each expected blob; the
    memory is reused after it returns. Memory in use: one buffer of its largest blob for each rank that sends to here.
    """

    def __init__(self, rank: int, on_blob: Callable[[int, memoryview], None], *, silence_s: float = 60.0) -> None:
        """`silence_s`: a peer that neither takes nor gives a byte for so long, inside a blob, counts as gone."""
        self.rank, self._on_blob, self._silence_s = rank, on_blob, silence_s
        self._token = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._expected: set[int] | None = None  # not said yet
        self._untouched: set[int] = set()  # of these nothing has come
        self._left = 0  # blobs that on_blob has not had
        self._senders: set[int] = set()  # have connected to here and not finished
        self._lost: list[str] = []  # peers that are gone, and why
        self._error: BaseException | None = None  # what went wrong here
        self._closed = False
        self._outgoing: dict[int, _Link] = {}
        self._links: list[_Link] = []  # both ways; some may have ended
        self._listener = listen()
        self._threads = [threading.Thread(target=self._accept, name="ckpt-exchange", daemon=True)]
        self._threads[0].start()

    @property
    def contact(self) -> dict[str, Any]:
        """What others need to connect, as JSON. The token is a secret of the job."""
        port = self._listener.getsockname()[1]
        return {"rank": self.rank, "port": port, "token": self._token, "addresses": addresses()}

    def expect(self, blobs: Iterable[int]) -> None:
        """Say which blobs will come; `wait` does it if nobody did.

        To be called before `connect`. A blob that comes earlier waits in its connection, and its sender with it: ranks
        that first send to each other and only then say what they expect would wait until they time out.
        """
        wanted = {int(blob) for blob in blobs}
        with self._changed:
            if self._expected is None:
                self._expected, self._untouched, self._left = wanted, set(wanted), len(wanted)
                self._changed.notify_all()
            elif self._expected != wanted:
                raise UsageError("this exchange was told to expect other blobs before")

    def connect(
        self, contacts: Sequence[dict[str, Any]], recipients: Iterable[int], nodes: Sequence[int], timeout_s: float
    ) -> None:
        """Connect to every rank in `recipients`. `contacts`: of these at least; `nodes`: the node of each rank.

        PeerError names a rank that does not answer, or not as itself, at any of its addresses.
        """
        found, end = {contact["rank"]: contact for contact in contacts}, time.monotonic() + timeout_s

        def reach(rank: int) -> None:
            if rank not in found:
                raise PeerError(f"rank {rank} left no contact")
            contact, problems = found[rank], []
            near = ["127.0.0.1"] if nodes[rank] == nodes[self.rank] else []
            for address in [*near, *contact["addresses"]]:
                try:
                    limit_s = max(0.001, min(ATTEMPT_S, end - time.monotonic()))
                    return self._dial(rank, address, contact["port"], contact["token"], limit_s)
                except (OSError, _GoneError) as error:
                    problems.append(f"{address}: {error}")
            raise PeerError(f"rank {rank} cannot be reached ({'; '.join(problems) or 'it has no address'})")

        with ThreadPoolExecutor(CONNECTING, "ckpt-connect") as pool:
            tries = [pool.submit(reach, rank) for rank in sorted(set(recipients) - self._outgoing.keys())]
        for one in tries:  # all have ended: also where one failed the others are connected, and can be told by `fail`
            one.result()

    def _dial(self, rank: int, address: str, port: int, token: str, limit_s: float) -> None:
        link = _Link(socket.create_connection((address, port), limit_s), limit_s)
        try:
            link.sock.sendall(_HELLO.pack(_MAGIC, token.encode(), self.rank))
            if link.read_new(1) != _WELCOME:
                raise _GoneError("something else listens there")
            link.send(_OPEN)  # it may count on this connection: nobody tries another address any more
            link.limit(self._silence_s)
            link.known = True
            with self._changed:
                if self._closed:
                    raise _GoneError("the exchange was closed")
                self._links.append(link)
                self._outgoing[rank] = link
        except BaseException:
            link.close()
            raise

    def send(self, rank: int, blob: int, data: memoryview) -> None:
        """Send to a rank that was connected to; from any thread. The bytes may still be on their way on return.

        PeerError if the rank gave up (with its reason), is gone, or takes nothing for `silence_s`.
        """
        data = data.cast("B")
        if len(data) > MAX_BLOB or rank not in self._outgoing:
            raise UsageError(f"blob {blob} of {len(data)} bytes is too large, or rank {rank} is not connected")
        try:
            self._outgoing[rank].send(_BLOB, blob, data)
        except _GoneError as gone:
            raise PeerError(f"rank {rank} {gone}") from None

    def finish_sending(self) -> None:
        """Tell all that were connected to that nothing more comes: without it, `close` looks like a failure to them.

        Who has all it expects may be gone already; that is no error.
        """
        for link in list(self._outgoing.values()):
            with contextlib.suppress(_GoneError):
                link.send(_DONE)

    def fail(self, reason: str) -> None:
        """Tell all connected ranks that this one gave up, so that nobody waits for it, and hang up.

        Takes seconds at most; who does not take the reason in time finds that the connection ended. Ends `wait`, too.
        """
        self._break(PeerError(f"this rank gave up: {reason}"))
        end = time.monotonic() + LAST_WORD_S
        for link in list(self._links):
            if link.known:
                link.give_up(reason, end - time.monotonic())

    def wait(self, expects: Iterable[int], timeout_s: float) -> None:
        """Until every expected blob was handed to `on_blob`.

        Raises what `on_blob` raised; PeerError if a rank sent what it should not or, while blobs are missing, gave up
        (with its reason) or hung up; DeadlineError after `timeout_s` seconds in all, with how many are missing.
        """
        self.expect(expects)
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._lost or not self._left, timeout_s)
            if self._error is not None:
                raise self._error
            if not self._left:
                return
            missing = f"{self._left} of {len(self._expected or ())} blobs are missing"
            if self._lost:
                raise PeerError(f"{self._lost[0]} ({missing})")
            busy = ", ".join(map(str, sorted(self._senders))) or "none"
            raise DeadlineError(f"{missing} after {timeout_s:g} s (connected and not finished: {busy})")

    def close(self) -> None:
        """End all connections and threads. A thread that is still in `on_blob` after seconds is left to itself."""
        self._break(ClosedError("the exchange was closed"))
        with self._changed:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for link in self._links:
            link.hang_up()
        end = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        self._listener.close()
        for link in self._links:
            link.close()

    def _break(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                link = _Link(self._listener.accept()[0], ATTEMPT_S)
                thread = threading.Thread(target=self._serve, args=(link,), name="ckpt-exchange", daemon=True)
                with self._changed:
                    if self._closed:
                        link.close()
                        break
                    thread.start()
                    self._links.append(link)
                    self._threads.append(thread)
            except (OSError, RuntimeError):  # the caller is gone already, or no descriptor or thread is to be had
                time.sleep(0.01)

    def _serve(self, link: _Link) -> None:
        try:
            rank = self._welcome(link)
        except (_GoneError, OSError):
            link.close()
            return
        try:
            self._receive(link, rank)
        except _GoneError as gone:
            with self._changed:
                self._lost.append(f"rank {rank} {gone}")
                self._changed.notify_all()
        except BaseException as error:
            self._break(error)
            link.give_up(str(error) or type(error).__name__, LAST_WORD_S)
        finally:
            link.close()

    def _welcome(self, link: _Link) -> int:
        """The rank at the other end, once it has shown the token and heard the answer."""
        magic, token, rank = _HELLO.unpack(link.read_new(_HELLO.size))
        if magic != _MAGIC or not hmac.compare_digest(token, self._token.encode()):
            raise _GoneError("is a stranger")
        link.sock.sendall(_WELCOME)
        # One that found this too slow and tries another address hangs up here; it is not lost.
        if _HEADER.unpack(link.read_new(_HEADER.size)) != (_OPEN, 0, 0):
            raise _GoneError("is a stranger")
        link.limit(self._silence_s)
        link.known = True
        with self._changed:
            self._senders.add(rank)
        return int(rank)

    def _receive(self, link: _Link, rank: int) -> None:
        """Take blobs until the rank has sent its last."""
        buffer = memoryview(b"")
        while True:
            kind, length, blob = _HEADER.unpack(link.read_new(_HEADER.size, idle=True))
            if kind == _DONE:
                with self._changed:
                    return self._senders.discard(rank)
            if kind == _FAILED:
                reason = link.read_new(min(length, _MAX_REASON))
                raise _GoneError(f"gave up: {reason.decode(errors='replace')}")
            if kind != _BLOB or length > MAX_BLOB:
                raise PeerError(f"rank {rank} sent what is no message (kind {kind}, {length} bytes)")
            self._claim(rank, blob)
            if len(buffer) < length:
                buffer = memoryview(bytearray(length))
            self._on_blob(blob, link.read(buffer[:length]))
            with self._changed:
                self._left -= 1
                if not self._left:
                    self._changed.notify_all()

    def _claim(self, rank: int, blob: int) -> None:
        """This connection brings the blob. Waits until it is known which are expected."""
        with self._changed:
            self._changed.wait_for(lambda: self._expected is not None or self._error)
            if self._error is not None:
                raise self._error
            if blob not in self._untouched:
                raise PeerError(f"rank {rank} sent blob {blob}, which is not expected, or not twice")
            self._untouched.remove(blob)


def listen() -> socket.socket:
    """On all interfaces: IPv6 and IPv4 by one socket, or IPv4 alone."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def addresses() -> list[str]:
    """Where other machines may reach this one: no loopback, nothing link-local; the fastest interfaces first."""
    stats, found = psutil.net_if_stats(), list[tuple[int, str]]()
    for name, known in psutil.net_if_addrs().items():
        for one in known:
            if name in stats and stats[name].isup and one.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(one.address.partition("%")[0])
                if not (ip.is_loopback or ip.is_link_local):
                    found.append((-stats[name].speed, str(ip)))
    return [address for _, address in sorted(found, key=lambda pair: pair[0])]
