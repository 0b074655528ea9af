"""Sends requests to a cloud's metadata service, without proxy or redirect, for at most 64 KiB and with a timeout."""

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

BASE_URL = "http://169.254.169.254"  # the address is the same in all three clouds; a name would need DNS
MAX_ANSWER = 64 << 10


class MetadataService:
    """Sends requests to one address, one at a time, without proxies or redirects."""

    def __init__(self, base_url: str, timeout_s: float, hold_s: float, stopped: threading.Event) -> None:
        self._host, self._port, self._prefix = address_of(base_url)
        self.timeout_s, self.hold_s, self._stopped = timeout_s, max(1, int(hold_s)), stopped
        self._lock = threading.Lock()  # prevents `cut` from closing a descriptor number that is in use by another file
        self._sock: socket.socket | None = None

    def ask(
        self, path: str, headers: dict[str, str], *, method: str = "GET", within_s: float | None = None
    ) -> tuple[int, str, str]:
        """Return status, text and ETag. Raise OSError, HTTPException or ValueError if no valid response arrives."""
        within_s = self.timeout_s if within_s is None else within_s
        end = time.monotonic() + within_s
        connection = http.client.HTTPConnection(self._host, self._port, timeout=within_s)
        try:
            connection.connect()
            with self._lock:
                self._sock = connection.sock
            if self._stopped.is_set():
                raise ConnectionAbortedError("the watch was stopped")
            connection.request(method, self._prefix + path, headers={**headers, "Connection": "close"})
            response = http.client.HTTPResponse(cast(socket.socket, _Until(connection.sock, end)), method=method)
            response.begin()
            body = response.read(MAX_ANSWER + 1)
        finally:
            with self._lock:
                self._sock = None
                connection.close()
        if len(body) > MAX_ANSWER:
            raise ValueError(f"the response of {path} has more than {MAX_ANSWER} bytes")
        return response.status, body.decode(), response.getheader("ETag") or ""

    def cut(self) -> None:
        """Abort the current request."""
        with self._lock, contextlib.suppress(OSError):
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)


class _Until(io.RawIOBase):
    """Reads a socket until a deadline, because the socket's own timeout would restart with every byte."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the response takes too long")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)


def address_of(base_url: str) -> tuple[str, int, str]:
    """Split a URL into host, port and the common prefix of all paths. Raise UsageError if it is not an http address."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(base_url)
        if parts.scheme == "http" and parts.hostname and not parts.query and not parts.username:
            return parts.hostname, parts.port or 80, parts.path.rstrip("/")
    raise UsageError(f"base_url={base_url!r}: it must be an http address, for example {BASE_URL!r}")
