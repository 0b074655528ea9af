"""One question to a cloud's metadata service: no proxy, no redirect, at most 64 KiB of answer, a limit of time."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import threading
import time
from typing import Any, cast
from urllib.parse import urlsplit

from ckpt.errors import UsageError

BASE_URL = "http://169.254.169.254"  # in all three clouds; by number, since a name would have to be looked up
MAX_ANSWER = 64 << 10


class MetadataService:
    """Asks one address, one question at a time, by itself: it knows of no proxy and goes nowhere else."""

    def __init__(self, base_url: str, timeout_s: float, hold_s: float, stopped: threading.Event) -> None:
        self._host, self._port, self._prefix = address_of(base_url)
        self.timeout_s, self.hold_s, self._stopped = timeout_s, max(1, int(hold_s)), stopped
        self._lock = threading.Lock()  # so that nobody cuts a descriptor that is another's by now
        self._sock: socket.socket | None = None

    def ask(
        self, path: str, headers: dict[str, str], *, method: str = "GET", within_s: float | None = None
    ) -> tuple[int, str, str]:
        """Status, text and ETag. OSError, HTTPException or ValueError if there is no proper answer within the time."""
        within_s = self.timeout_s if within_s is None else within_s
        end = time.monotonic() + within_s
        connection = http.client.HTTPConnection(self._host, self._port, timeout=within_s)
        try:
            connection.connect()
            with self._lock:
                self._sock = connection.sock
            if self._stopped.is_set():
                raise ConnectionAbortedError("nobody wants to know any more")
            connection.request(method, self._prefix + path, headers={**headers, "Connection": "close"})
            response = http.client.HTTPResponse(cast(socket.socket, _Until(connection.sock, end)), method=method)
            response.begin()
            body = response.read(MAX_ANSWER + 1)
        finally:
            with self._lock:
                self._sock = None
                connection.close()
        if len(body) > MAX_ANSWER:
            raise ValueError(f"{path} answers with more than {MAX_ANSWER} bytes")
        return response.status, body.decode(), response.getheader("ETag") or ""

    def cut(self) -> None:
        """End the question that is being asked."""
        with self._lock, contextlib.suppress(OSError):
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)


class _Until(io.RawIOBase):
    """A socket to read from until a moment of the monotonic clock; its own timeout would begin anew at every byte."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer takes too long")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)


def address_of(base_url: str) -> tuple[str, int, str]:
    """Host, port and the start of every path."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(base_url)
        if parts.scheme == "http" and parts.hostname and not parts.query and not parts.username:
            return parts.hostname, parts.port or 80, parts.path.rstrip("/")
    raise UsageError(f"base_url is an address such as {BASE_URL!r}, not {base_url!r}")
