"""How bytes that one rank has read get to the others that want them.

    assign: wants, can_read -> who reads what           pure (`ckpt.core.ranks.assign`)
    Exchange: listen -> expect -> connect -> send, wait     plain TCP, open only while a restore is under way

Bytes move in blobs: numbered pieces of at most 64 MiB, usually 4. What arrives is handed on as it came over the wire;
whoever takes it compares digests. Addresses and tokens come from the job's own key-value store. A token keeps strangers
and other jobs out; it hides nothing from somebody who can listen in on the network.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckpt.core.format.table import MAX_BLOB
from ckpt.core.ranks.link import (
    BLOB,
    DONE,
    FAILED,
    HEADER,
    HELLO,
    MAGIC,
    MAX_REASON,
    OPEN,
    WELCOME,
    Link,
    LinkError,
    addresses,
    listen,
)
from ckpt.errors import ClosedError, DeadlineError, PeerError, UsageError

ATTEMPT_S = 5.0  # for one address, and for a stranger to say who it is
LAST_WORD_S = 2.0  # to tell peers that this rank gave up
JOIN_S = 5.0
CONNECTING = 16  # at the same time


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
        self._outgoing: dict[int, Link] = {}
        self._links: list[Link] = []  # both ways; some may have ended
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
                except (OSError, LinkError) as error:
                    problems.append(f"{address}: {error}")
            raise PeerError(f"rank {rank} cannot be reached ({'; '.join(problems) or 'it has no address'})")

        with ThreadPoolExecutor(CONNECTING, "ckpt-connect") as pool:
            tries = [pool.submit(reach, rank) for rank in sorted(set(recipients) - self._outgoing.keys())]
        for one in tries:  # all have ended: also where one failed the others are connected, and can be told by `fail`
            one.result()

    def _dial(self, rank: int, address: str, port: int, token: str, limit_s: float) -> None:
        link = Link(socket.create_connection((address, port), limit_s), limit_s)
        try:
            link.sock.sendall(HELLO.pack(MAGIC, token.encode(), self.rank))
            if link.read_new(1) != WELCOME:
                raise LinkError("something else listens there")
            link.send(OPEN)  # it may count on this connection: nobody tries another address any more
            link.limit(self._silence_s)
            link.known = True
            with self._changed:
                if self._closed:
                    raise LinkError("the exchange was closed")
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
            self._outgoing[rank].send(BLOB, blob, data)
        except LinkError as gone:
            raise PeerError(f"rank {rank} {gone}") from None

    def finish_sending(self) -> None:
        """Tell all that were connected to that nothing more comes: without it, `close` looks like a failure to them.

        Who has all it expects may be gone already; that is no error.
        """
        for link in list(self._outgoing.values()):
            with contextlib.suppress(LinkError):
                link.send(DONE)

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
                link = Link(self._listener.accept()[0], ATTEMPT_S)
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

    def _serve(self, link: Link) -> None:
        try:
            rank = self._welcome(link)
        except (LinkError, OSError):
            link.close()
            return
        try:
            self._receive(link, rank)
        except LinkError as gone:
            with self._changed:
                self._lost.append(f"rank {rank} {gone}")
                self._changed.notify_all()
        except BaseException as error:
            self._break(error)
            link.give_up(str(error) or type(error).__name__, LAST_WORD_S)
        finally:
            link.close()

    def _welcome(self, link: Link) -> int:
        """The rank at the other end, once it has shown the token and heard the answer."""
        magic, token, rank = HELLO.unpack(link.read_new(HELLO.size))
        if magic != MAGIC or not hmac.compare_digest(token, self._token.encode()):
            raise LinkError("is a stranger")
        link.sock.sendall(WELCOME)
        # One that found this too slow and tries another address hangs up here; it is not lost.
        if HEADER.unpack(link.read_new(HEADER.size)) != (OPEN, 0, 0):
            raise LinkError("is a stranger")
        link.limit(self._silence_s)
        link.known = True
        with self._changed:
            self._senders.add(rank)
        return int(rank)

    def _receive(self, link: Link, rank: int) -> None:
        """Take blobs until the rank has sent its last."""
        buffer = memoryview(b"")
        while True:
            kind, length, blob = HEADER.unpack(link.read_new(HEADER.size, idle=True))
            if kind == DONE:
                with self._changed:
                    return self._senders.discard(rank)
            if kind == FAILED:
                reason = link.read_new(min(length, MAX_REASON))
                raise LinkError(f"gave up: {reason.decode(errors='replace')}")
            if kind != BLOB or length > MAX_BLOB:
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
