"""An S3 on this machine, and a proxy before it that makes requests fail: for tests, benchmarks and examples.

    with MotoServer() as server, FaultProxy(server.url) as proxy:
        server.make_bucket("bucket")
        remember_options("s3://bucket/run", storage_options(proxy.url))
        proxy.fail("status", method="PUT", match="log/", count=2, code=503, s3_code="SlowDown")

Both are processes of their own on free ports of the loopback interface, and end when the process that started them
does, however it ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Self

KEY = SECRET = "testing"
REGION = "us-east-1"
HOST = "127.0.0.1"
FAULTS = "/__faults__"


def storage_options(url: str, **config: Any) -> dict[str, Any]:
    """Return s3fs options for a server here; `config` is for botocore, for example `read_timeout=1`."""
    options: dict[str, Any] = {"endpoint_url": url, "key": KEY, "secret": SECRET}
    return options | ({"config_kwargs": config} if config else {})


def environment(url: str) -> dict[str, str]:
    """The same as environment variables, for a process."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
    }


# -- for those who start them --


class Server:
    """A process that serves `url` until `stop`."""

    def __init__(self, role: str, *arguments: str) -> None:
        # -I: nothing of this folder, or of the caller's path, is imported by mistake.
        command = [sys.executable, "-I", os.path.abspath(__file__), role, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()  # printed when it listens
        if not port:
            raise RuntimeError(f"the {role} server did not start: exit status {self.process.wait()}")
        self.url = f"http://{HOST}:{port}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        request = urllib.request.Request(self.url + path, data=None if method == "GET" else body, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as reply:
            answer: bytes = reply.read()
            return answer


class MotoServer(Server):
    """moto's S3, in memory. It takes any key and secret, and honours `If-None-Match` also in races.

    A bucket whose name ends in `--x-s3` is a directory bucket, see `as_directory_bucket`.
    """

    def __init__(self) -> None:
        super().__init__("moto")

    def make_bucket(self, name: str) -> str:
        self._ask("PUT", f"/{name}")
        return name

    def reset(self) -> None:
        """Delete all buckets of the server."""
        self._ask("POST", "/moto-api/reset")


class FaultProxy(Server):
    """Forwards requests to `upstream`, unless a rule applies. See `fail` for the rules."""

    def __init__(self, upstream: str) -> None:
        super().__init__("proxy", upstream)

    def fail(self, kind: str, *, method: str = "", match: str = "", skip: int = 0, count: int = 1, **more: Any) -> None:
        """Add a rule for requests of a method whose path and query contain the regular expression `match`.

        The first `skip` of them pass, the next `count` fail; the first matching rule applies. Kinds:

        status          `code` (503) with `s3_code` ("SlowDown") as the document, and nothing is done
        error_body      status 200, but an error document with `s3_code`, and nothing is done
        hang            no reply, and nothing is done
        delay           nothing happens for `s` seconds, then it succeeds
        late_reply      the request is executed after `s` seconds, with a reply if the client still waits
        reset           the connection is reset, and nothing is done
        lost_reply      the request is executed, then the connection is reset
        truncate        the connection is reset after `after` bytes of the reply's body
        short           the connection is closed normally there, although more was announced
        corrupt         one bit of the reply's body is flipped, at byte `offset`
        corrupt_request the same for the body of the request
        """
        if kind not in KINDS:
            raise ValueError(f"no such kind of fault: {kind!r}")
        rule = {"kind": kind, "method": method, "match": match, "skip": skip, "count": count, **more}
        self._ask("POST", FAULTS, json.dumps([rule]).encode())

    def clear(self) -> None:
        """Forget rules, hits and counts."""
        self._ask("DELETE", FAULTS)

    def hits(self) -> list[tuple[str, str, str]]:
        """(method, path with query, kind) of every request that a rule was applied to."""
        return [(method, path, kind) for method, path, kind in json.loads(self._ask("GET", FAULTS))["hits"]]

    def requests(self) -> Counter[str]:
        """Return the number of requests by method, including failed ones."""
        return Counter(json.loads(self._ask("GET", FAULTS))["requests"])

    def paths(self) -> list[str]:
        """Each request so far, as "PUT /bucket/run/log/0.json"."""
        return list(json.loads(self._ask("GET", FAULTS))["paths"])


# -- the processes --

KINDS = (
    "status", "error_body", "hang", "delay", "late_reply", "reset", "lost_reply", "truncate", "short", "corrupt",
    "corrupt_request",
)  # fmt: skip
CHUNK = 1 << 18
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


def serve_moto() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    list_without_order()
    server = make_server(HOST, 0, one_at_a_time(as_directory_bucket(app)), threaded=True)
    ready(server.port)
    server.serve_forever()


SESSION = "<CreateSessionResult><Credentials><SessionToken>{0}</SessionToken><SecretAccessKey>{0}</SecretAccessKey>\
<AccessKeyId>{0}</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
DIRECTORY_PAGE = 7  # names
UNSUPPORTED = {"HTTP_CONTENT_MD5", "HTTP_X_AMZ_ACL", "HTTP_X_AMZ_TAGGING", "HTTP_X_AMZ_REQUEST_PAYER"}


def as_directory_bucket(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Refuse what a directory bucket of S3 Express refuses, by AWS's reference of each request.

    Requests need the token of a session. The prefix of a listing ends in "/" or is empty. `start-after`, the first
    version of listings, markers of upload ids and MD5 are unknown. Parts of an upload are numbered without gaps.
    """
    from werkzeug.wrappers import Request, Response

    def problem(request: Request) -> tuple[int, str] | None:
        query, numbers = request.args, re.findall(rb"<PartNumber>(\d+)</PartNumber>", request.get_data())
        is_listing = request.method == "GET" and request.path.count("/") == 1
        if "x-amz-s3session-token" not in request.headers:
            return 403, "AccessDenied"
        if is_listing and (query.get("list-type") != "2" and "uploads" not in query):
            return 501, "NotImplemented"
        if is_listing and not f"/{query.get('prefix', '')}".endswith("/"):
            return 400, "InvalidArgument"
        if "start-after" in query or "upload-id-marker" in query or query.get("delimiter", "/") != "/":
            return 501, "NotImplemented"
        if UNSUPPORTED & request.environ.keys():
            return 501, "NotImplemented"
        if request.method == "POST" and "uploadId" in query and [*map(int, numbers)] != [*range(1, len(numbers) + 1)]:
            return 400, "InvalidPart"
        return None

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(environ)
        name, is_bucket = request.path.split("/")[1], request.path.count("/") == 1
        if not name.endswith("--x-s3") or (is_bucket and request.method in ("PUT", "HEAD")):
            return app(environ, start_response)
        if is_bucket and "session" in request.args:
            return Response(SESSION.format(SECRET), mimetype="application/xml")(environ, start_response)
        if (found := problem(request)) is not None:
            code, s3_code = found
            text = document({"kind": "status", "s3_code": s3_code})
            return Response(text, status=code, mimetype="application/xml")(environ, start_response)
        environ["wsgi.input"] = io.BytesIO(request.get_data())
        return app(environ, start_response)

    return answer


def list_without_order() -> None:
    """Have moto list directory buckets as AWS does: in no order, and in pages, here of very few names."""
    from moto.s3.models import S3Backend

    in_order = S3Backend.list_objects_v2

    def place(key: Any) -> str:
        return hashlib.md5(key.name.encode()).hexdigest()

    def shuffled(
        self: Any, bucket: Any, prefix: Any, delimiter: Any, continuation_token: str | None, *rest: Any, **more: Any
    ) -> Any:
        if not bucket.name.endswith("--x-s3"):
            return in_order(self, bucket, prefix, delimiter, continuation_token, *rest, **more)
        keys = sorted(self.list_objects(bucket, prefix, None, marker=None, max_keys=None)[0], key=place)
        keys = [key for key in keys if place(key) > (continuation_token or "")]
        page = keys[:DIRECTORY_PAGE]
        return page, len(keys) > len(page), place(page[-1]) if len(keys) > len(page) else None

    S3Backend.list_objects_v2 = shuffled


def one_at_a_time(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Run moto's requests one at a time, because it checks for an object and then creates it, in threads, so that a
    race could have two winners. The body is read before, so that a slow client delays no other."""
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH")
        stream = environ["wsgi.input"]
        body = stream.read(int(length)) if length else stream.read() if environ.get("wsgi.input_terminated") else b""
        environ["wsgi.input"] = io.BytesIO(body)
        with lock:
            return list(app(environ, start_response))

    return answer


class Proxy:
    """The fault proxy's own side. The Host header stays as it was, or signatures would not hold."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.rules: list[dict[str, Any]] = []
        self.forget()

    def forget(self) -> None:
        self.rules.clear()
        self.hits: list[tuple[str, str, str]] = []
        self.paths: list[str] = []

    async def serve(self) -> None:
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

        skip = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # what the client did not send, we do not
        async with ClientSession(
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=None),
            skip_auto_headers=skip,
            auto_decompress=False,
        ) as self.session:
            app = web.Application(client_max_size=1 << 40)
            app.router.add_route("*", FAULTS, self.administer)
            app.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            ready(runner.addresses[0][1])
            await asyncio.Event().wait()

    async def administer(self, request: Any) -> Any:
        from aiohttp import web

        if request.method == "POST":
            self.rules += await request.json()
        elif request.method == "DELETE":
            self.forget()
        methods = Counter(path.split()[0] for path in self.paths)
        return web.json_response({"rules": self.rules, "hits": self.hits, "requests": methods, "paths": self.paths})

    def rule_for(self, request: Any) -> dict[str, Any]:
        for rule in self.rules:
            fits = rule["method"] in ("", request.method) and re.search(rule["match"], request.raw_path)
            if not fits or rule["count"] <= 0:
                continue
            if rule["skip"] > 0:
                rule["skip"] -= 1
                return {"kind": ""}
            rule["count"] -= 1
            self.hits.append((request.method, request.raw_path, rule["kind"]))
            return rule
        return {"kind": ""}

    async def handle(self, request: Any) -> Any:
        from aiohttp import ClientError, web

        self.paths.append(f"{request.method} {request.raw_path}")
        rule = self.rule_for(request)
        kind = rule["kind"]
        try:
            if kind in ("status", "error_body"):
                await request.read()
                code = 200 if kind == "error_body" else rule.get("code", 503)
                return web.Response(status=code, content_type="application/xml", text=document(rule))
            if kind == "hang":
                await asyncio.Event().wait()
            if kind == "delay":
                await asyncio.sleep(rule["s"])
            if kind == "reset":
                return reset(request)
            return await self.pass_on(request, rule)
        except (ClientError, ConnectionError):  # either side is gone: so is the other
            return reset(request)

    async def pass_on(self, request: Any, rule: dict[str, Any]) -> Any:
        from yarl import URL

        kind = rule["kind"]
        body = request.content if request.body_exists else None
        if body is not None and kind in ("corrupt_request", "late_reply", "lost_reply"):
            body = await request.read()  # complete, before anything is done: the client may disconnect
        if kind == "corrupt_request" and body is not None:
            body = flipped(body, rule.get("offset", 0))
        if kind == "late_reply":
            await asyncio.sleep(rule["s"])
        async with self.session.request(
            request.method,
            URL(self.upstream + request.raw_path, encoded=True),
            headers=[(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP],
            data=body,
            allow_redirects=False,
        ) as answer:
            if kind == "lost_reply":
                await answer.read()
                return reset(request)
            return await self.pass_back(request, answer, rule)

    async def pass_back(self, request: Any, answer: Any, rule: dict[str, Any]) -> Any:
        from aiohttp import web

        kind, cut, flip = rule["kind"], rule.get("after", 0), rule.get("offset", 0)
        headers = [(name, value) for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP]
        if request.method == "HEAD":
            return web.Response(status=answer.status, reason=answer.reason, headers=headers)
        reply = web.StreamResponse(status=answer.status, reason=answer.reason, headers=dict(headers))
        await reply.prepare(request)
        done = 0
        async for chunk in answer.content.iter_chunked(CHUNK):
            if kind in ("truncate", "short") and done + len(chunk) > cut:
                await reply.write(chunk[: cut - done])
                await asyncio.sleep(0.02)  # a reset overtakes what is still in the socket
                if kind == "truncate":
                    return reset(request)
                request.transport.close()
                return reply
            if kind == "corrupt" and done <= flip < done + len(chunk):
                chunk = flipped(chunk, flip - done)
            await reply.write(chunk)
            done += len(chunk)
        await reply.write_eof()
        return reply


def document(rule: dict[str, Any]) -> str:
    code = rule.get("s3_code", "InternalError" if rule["kind"] == "error_body" else "SlowDown")
    return f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'


def flipped(data: bytes, offset: int) -> bytes:
    copy = bytearray(data)
    if offset < len(copy):
        copy[offset] ^= 1
    return bytes(copy)


def reset(request: Any) -> Any:
    """RST instead of an answer, or of the rest of one."""
    from aiohttp import web

    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    return web.Response()


def ready(port: int) -> None:
    print(port, flush=True)


def end_with_the_parent() -> None:
    """Nobody writes to the pipe; it is closed when the process at its other end is gone."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main(role: str, *arguments: str) -> None:
    end_with_the_parent()
    if role == "moto":
        serve_moto()
    else:
        asyncio.run(Proxy(*arguments).serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
