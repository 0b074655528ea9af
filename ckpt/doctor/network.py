"""The network between two nodes: one serves, the other measures. Each ends by itself, whatever the other does."""

from __future__ import annotations

import socket
import statistics
import struct
import time
from dataclasses import dataclass

from ckpt.doctor.findings import GB, MIB, Finding, JobSize, OnBytes, judge, ms, noise, per_second
from ckpt.store import PAGE

_HELLO, _COUNT, _FRAME = struct.Struct("<8sQ"), struct.Struct("<Q"), struct.Struct("<I")
_MAGIC = b"EVDOC001"
PINGS, PING = 50, 64
MOST_SENT = 4 << 30  # whatever the other end asks for
CHUNK = MIB


@dataclass(frozen=True, slots=True)
class Link:
    """`out` and `back` in bytes a second, `round_trip_s` the median."""

    out: float
    back: float
    round_trip_s: float


class _Wire:
    """A connection that ends at a moment, whatever the other end does."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self.sock, self.end = sock, end
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(CHUNK))

    def _wait(self) -> None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end took too long")
        self.sock.settimeout(left)

    def read(self, size: int) -> bytes:
        view = self._buffer[:size]
        while view:
            self._wait()
            count = self.sock.recv_into(view)
            if not count:
                raise ConnectionError("the other end hung up")
            view = view[count:]
        return bytes(self._buffer[:size]) if size <= PAGE else b""

    def write(self, data: bytes | memoryview) -> None:
        self._wait()
        self.sock.sendall(data)

    def send_frames(self, size: int, most_s: float, on_bytes: OnBytes) -> int:
        """Noise, until it is enough or time is over; how much."""
        data, sent, end = noise(CHUNK), 0, time.monotonic() + most_s
        while sent < size and time.monotonic() < end:
            length = min(CHUNK, size - sent)
            self.write(_FRAME.pack(length))
            self.write(data[:length])
            sent += length
            if on_bytes is not None:
                on_bytes(length)
        self.write(_FRAME.pack(0))
        return sent

    def take_frames(self, size: int, on_bytes: OnBytes) -> int:
        """Read and forget."""
        taken = 0
        while length := _FRAME.unpack(self.read(_FRAME.size))[0]:
            if length > CHUNK or taken + length > size:
                raise ConnectionError("the other end sends more than was agreed")
            self.read(length)
            taken += length
            if on_bytes is not None:
                on_bytes(length)
        return taken


def listening(host: str, port: int) -> socket.socket:
    """A socket for `serve`; port 0 takes any."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1)
    return socket.create_server(("", port), backlog=1)


def serve(
    listener: socket.socket, *, size: int = MOST_SENT, measure_s: float = 10.0, wait_s: float = 600.0,
    on_bytes: OnBytes = None,
) -> str:  # fmt: skip
    """Be the other end of one measurement, then end; who it was. What comes is counted and forgotten.

    TimeoutError if nobody comes within `wait_s`. Somebody who says something else is hung up on.
    """
    end = time.monotonic() + wait_s
    with listener:
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nobody came within {wait_s:g} s")
            listener.settimeout(left)
            sock, peer = listener.accept()
            with sock:
                wire = _Wire(sock, min(end, time.monotonic() + 5.0))
                try:
                    magic, wanted = _HELLO.unpack(wire.read(_HELLO.size))
                except OSError:
                    continue
                if magic == _MAGIC:
                    _serve_one(wire, min(wanted, size, MOST_SENT), measure_s, on_bytes)
                    return str(peer[0]).removeprefix("::ffff:")


def _serve_one(wire: _Wire, size: int, measure_s: float, on_bytes: OnBytes) -> None:
    wire.end = time.monotonic() + 3 * measure_s + 20
    wire.write(_COUNT.pack(size))
    for _ in range(PINGS):
        wire.write(wire.read(PING))
    wire.write(_COUNT.pack(wire.take_frames(size, on_bytes)))
    wire.send_frames(size, measure_s, on_bytes)


def measure_link(host: str, port: int, *, size: int, measure_s: float = 10.0, on_bytes: OnBytes = None) -> Link:
    """To a node that serves. OSError, TimeoutError among them, if it cannot be reached or breaks off."""
    with socket.create_connection((host, port), timeout=10.0) as sock:
        wire = _Wire(sock, time.monotonic() + 3 * measure_s + 20)
        wire.write(_HELLO.pack(_MAGIC, size))
        size = min(size, _COUNT.unpack(wire.read(_COUNT.size))[0])
        trips = []
        for _ in range(PINGS):
            at = time.perf_counter()
            wire.write(b"p" * PING)
            wire.read(PING)
            trips.append(time.perf_counter() - at)
        at = time.perf_counter()
        sent = wire.send_frames(size, measure_s, on_bytes)
        if _COUNT.unpack(wire.read(_COUNT.size))[0] != sent:
            raise ConnectionError("the other end has not got what was sent")
        out = sent / (time.perf_counter() - at)
        at = time.perf_counter()
        back = wire.take_frames(size, on_bytes) / (time.perf_counter() - at)
    return Link(out, back, statistics.median(trips))


def link_findings(found: Link, job: JobSize) -> list[Finding]:
    rate, trip = min(found.out, found.back), found.round_trip_s
    text = f"{per_second(found.out)} there, {per_second(found.back)} back, one connection"
    advice = "Less than 1 Gbit/s: name the fast interface, or look at the cable"
    rows = [
        judge("bandwidth between nodes", text, rate < 125e6, advice),
        judge("round trip", ms(trip), trip > 2e-3, "Far apart for nodes of one job"),
    ]
    if job.state:
        seconds = job.here / rate
        text = f"a snapshot of {job.here / GB:.1f} GB takes {seconds:.1f} s to the other node"
        rows.append(Finding("Memory(replicas=2)", text))
    return rows
