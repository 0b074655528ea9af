"""A metadata service on loopback that simulates EC2, GCE and Azure, with faults on demand.

    with Metadata() as cloud:
        cloud.set(preempted="TRUE")     the announcement; waiting requests get it as the reply
        cloud.set(fault="hang")         the fault of every request from now on, None for none
        cloud.asked                     every request so far

It is as strict as the real services: it rejects requests without a token, or without the cloud's header.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

FAULTS = ("500", "403", "redirect", "hang", "half", "drip", "garbage", "huge", "closed")
HUGE = 1 << 20
GCE_KEYS = {"preempted": "preempted", "maintenance-event": "maintenance"}


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: dict[str, str]


class Metadata:
    """`elsewhere`: where the fault "redirect" points to. Everything that is announced is an attribute; see `set`."""

    def __init__(self, elsewhere: str = "") -> None:
        self.ec2: Any = None
        self.rebalance: Any = None
        self.preempted = "FALSE"
        self.maintenance = "NONE"
        self.azure: list[Any] = []
        self.fault: str | None = None
        self.token_s: float | None = None  # None: as long as was requested
        self.with_etag = True
        self.elsewhere = elsewhere
        self.asked: list[Asked] = []
        self.tokens: dict[str, float] = {}
        self.closing = False
        self.changed = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.cloud = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def set(self, **values: Any) -> None:
        with self.changed:
            for name, value in values.items():
                assert hasattr(self, name), name
                setattr(self, name, value)
            self.changed.notify_all()

    def count(self, text: str = "") -> int:
        """Requests so far whose target has the text in it."""
        return sum(text in asked.target for asked in self.asked)

    def __enter__(self) -> Metadata:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.set(closing=True)
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    cloud: Metadata

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hung up


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.cloud = self.server.cloud
        self.cloud.asked.append(Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if self.cloud.fault is not None:
            self._misbehave(self.cloud.fault)
        else:
            self._behave()

    do_PUT = do_POST = do_GET

    def _say(self, status: int, body: str = "", **headers: str) -> None:
        data = body.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    # -- as documented --

    def _behave(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/latest/api/token":
            self._token()
        elif parts.path.startswith("/latest/meta-data/"):
            self._ec2(parts.path.removeprefix("/latest/meta-data/"))
        elif parts.path.startswith("/computeMetadata/v1/instance/"):
            self._gce(parts.path.rpartition("/")[2], query)
        elif parts.path == "/metadata/scheduledevents":
            self._azure(query)
        else:
            self._say(404)

    def _token(self) -> None:
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        if self.command != "PUT" or seconds is None or not 1 <= int(seconds) <= 21600:
            self._say(400)
            return
        token = secrets.token_hex(8)
        self.cloud.tokens[token] = time.monotonic() + (self.cloud.token_s or int(seconds))
        self._say(200, token)

    def _ec2(self, key: str) -> None:
        if self.cloud.tokens.get(self.headers.get("X-aws-ec2-metadata-token", ""), 0) < time.monotonic():
            self._say(401)
            return
        known = {"spot/instance-action": self.cloud.ec2, "events/recommendations/rebalance": self.cloud.rebalance}
        value = known.get(key)
        self._say(404) if value is None else self._say(200, json.dumps(value))

    def _gce(self, key: str, query: dict[str, str]) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._say(403)
            return
        if key not in GCE_KEYS:
            self._say(404)
            return

        def etag() -> str:
            return f"{getattr(self.cloud, GCE_KEYS[key]).encode().hex()[:12]}+/="  # to be quoted in an address

        if query.get("wait_for_change") == "true":
            last = query.get("last_etag") or etag()
            with self.cloud.changed:
                self.cloud.changed.wait_for(
                    lambda: etag() != last or self.cloud.closing, float(query.get("timeout_sec", 3600))
                )
        headers = {"ETag": etag()} if self.cloud.with_etag else {}
        self._say(200, getattr(self.cloud, GCE_KEYS[key]), **headers)

    def _azure(self, query: dict[str, str]) -> None:
        if self.headers.get("Metadata") != "true" or query.get("api-version") != "2020-07-01":
            self._say(400)
            return
        self._say(200, json.dumps({"DocumentIncarnation": 1, "Events": self.cloud.azure}))

    # -- not as documented --

    def _misbehave(self, fault: str) -> None:
        if fault.isdigit():
            self._say(int(fault), "no")
        elif fault == "redirect":
            self._say(302, Location=self.cloud.elsewhere + self.path)
        elif fault == "hang":
            self._hold(fault)
        elif fault == "half":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
            self._hold(fault)
        elif fault == "drip":  # every byte comes in time, the answer never does
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while self.cloud.fault == fault and not self.cloud.closing:
                self.wfile.write(b"x")
                time.sleep(0.02)
        elif fault == "garbage":
            self._say(200, "<html>\x00 welcome, please log in </html>")
        elif fault == "huge":
            self._say(200, " " * HUGE)
        # "closed": nothing at all

    def _hold(self, fault: str) -> None:
        with self.cloud.changed:
            self.cloud.changed.wait_for(lambda: self.cloud.fault != fault or self.cloud.closing, 300)
