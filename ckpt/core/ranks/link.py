"""One connection between two ranks: plain TCP, whole frames, and an end that says why."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading

import psutil

HELLO = struct.Struct("!8s32sI")  # magic, token, rank
MAGIC = b"ckpt-xc1"
WELCOME = b"\x06"
HEADER = struct.Struct("!B3xIQ")  # kind, length of what follows, blob
OPEN, BLOB, DONE, FAILED = range(4)
MAX_REASON = 4096


class LinkError(Exception):
    """The other end is not there any more; the text goes on from "rank 3 …"."""


class Link:
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
                    raise LinkError("stands still") from None
                continue
            except OSError as error:
                raise LinkError(f"is gone: {error.strerror}") from None
            if size == 0:
                raise LinkError("hung up before it had sent everything")
            got += size
        return view

    def read_new(self, size: int, *, idle: bool = False) -> bytes:
        return bytes(self.read(memoryview(bytearray(size)), idle=idle))

    def send(self, kind: int, blob: int = 0, data: memoryview | bytes = b"", wait_s: float = -1) -> None:
        """One whole frame, or the connection ends. `wait_s`: for other threads that are sending; -1: any time."""
        if not self._sending.acquire(timeout=wait_s):
            raise LinkError("is busy")
        try:
            parts = [memoryview(HEADER.pack(kind, len(data), blob)), memoryview(data)]
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
            raise LinkError(self._last_word() or f"takes nothing more: {error.strerror}") from None
        finally:
            self._sending.release()

    def _last_word(self) -> str:
        """What the receiving end said before it hung up, if anything. It never speaks otherwise."""
        with contextlib.suppress(OSError, struct.error):
            raw = self.sock.recv(HEADER.size + MAX_REASON, socket.MSG_DONTWAIT)
            if HEADER.unpack_from(raw)[0] == FAILED:
                return f"gave up: {raw[HEADER.size :].decode(errors='replace')}"
        return ""

    def give_up(self, reason: str, limit_s: float) -> None:
        """Say why and hang up; without a word if the other end takes none within `limit_s`."""
        with contextlib.suppress(LinkError, OSError):
            self.limit(limit_s)
            self.send(FAILED, 0, reason.encode(errors="replace")[:MAX_REASON], max(0.0, limit_s))
        self.hang_up()

    def hang_up(self) -> None:
        """Whoever reads or sends on this connection gets its end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        with self._sending:  # no other thread may be about to use a descriptor whose number is free again
            self.sock.close()


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
