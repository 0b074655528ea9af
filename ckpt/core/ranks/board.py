"""The key-value store of a job, through which its ranks exchange JSON.

Keys are polled with `check`, with a growing pause. The `wait` of a TCPStore is not used: it blocks all other requests
of its connection, cannot be interrupted, logs two warnings at each timeout, and exceeds its own timeout if the host of
the store hangs.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any, TypeVar

from ckpt.errors import PeerError, UsageError

Json = Any
T = TypeVar("T")

ANSWER_S = 60.0  # timeout of one request to the store, whose host may wait for a name lookup first
PAUSE_S = 0.25  # longest pause between two polls of the store
SQUEEZE = 4 << 10  # bytes from which a value is compressed
MAX_VALUE = 1 << 30  # bytes, compressed
PIECE = 7 << 20  # bytes in one key of the store; a TCPStore drops the connection at 8 MiB


class Board:
    """A connection to the store, for any thread. A request without a reply within `answer_s` raises PeerError."""

    def __init__(self, store: Any) -> None:
        self._store, self.answer_s = store, ANSWER_S
        self._lock = threading.Lock()
        self._silent = False

    def another(self) -> Board:
        """Return another connection to the store, if it can have several."""
        return Board(self._ask(self._store.clone) if hasattr(self._store, "clone") else self._store)

    def put(self, key: str, body: bytes) -> None:
        if len(body) > PIECE:
            starts = range(0, len(body), PIECE)
            for i, start in enumerate(starts):
                self._ask(partial(self._store.set, f"{key}/{i}", body[start : start + PIECE]))
            body = b"p%d" % len(starts)
        self._ask(partial(self._store.set, key, body))

    def create(self, key: str, body: bytes) -> bytes:
        """Put a value of at most `PIECE` bytes unless the key exists. Return the value in the store."""
        return bytes(self._ask(lambda: self._store.compare_set(key, "", body)))

    def read(self, key: str) -> bytes:
        """Return the value that `create` has put."""
        return bytes(self._ask(lambda: self._store.get(key)))

    def get(self, keys: list[str]) -> list[Json]:
        """Return the values of existing keys."""
        bodies = self._ask(lambda: [bytes(self._store.get(key)) for key in keys])
        return [unpack(self._joined(key, body)) for key, body in zip(keys, bodies, strict=True)]

    def _joined(self, key: str, body: bytes) -> bytes:
        """Join a value that was too large for one key."""
        if body[:1] != b"p" or not body[1:].isdigit():
            return body
        return b"".join(bytes(self._ask(partial(self._store.get, f"{key}/{i}"))) for i in range(int(body[1:])))

    def has(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda: self._store.check(keys)))

    def missing(
        self, keys: list[str], timeout_s: float, in_vain: Callable[[Board], bool] = lambda board: False
    ) -> set[str]:
        """Wait for these keys. Return those that are missing after the timeout, or once `in_vain` returns True."""
        end, pause = time.monotonic() + timeout_s, 0.001
        while not self.has(keys):
            left = end - time.monotonic()
            if left <= 0 or in_vain(self):
                return {key for key in keys if not self.has([key])}
            time.sleep(min(pause, left))
            pause = min(pause * 1.2, PAUSE_S)  # a growing pause detects keys that arrive early with little delay
        return set()

    def drop(self, keys: list[str]) -> None:
        """Delete these keys, if the store can. Absent ones are ignored."""
        if hasattr(self._store, "delete_key"):
            with contextlib.suppress(PeerError):
                self._ask(lambda: [self._store.delete_key(key) for key in keys])

    def _ask(self, request: Callable[[], T]) -> T:
        """Run a request in its own thread: requests have no deadline, and one to a frozen host never returns."""
        answer: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except Exception as error:
                answer.set_exception(error)

        with self._lock:
            if not self._silent:
                try:
                    threading.Thread(target=run, daemon=True).start()
                except RuntimeError:  # the interpreter is shutting down and starts no threads
                    run()
                self._silent = not futures.wait([answer], self.answer_s).done
            if self._silent:
                raise PeerError(f"the store of the job cannot be reached: no answer within {self.answer_s:g} s")
        try:
            return answer.result()
        except (RuntimeError, OSError) as error:  # torch raises RuntimeError
            raise PeerError(f"the store of the job cannot be reached: {str(error).partition(chr(10))[0]}") from error


class Alone:
    """The store of a single-rank job, for its mailbox and its orders."""

    def __init__(self) -> None:
        values: dict[str, bytes] = {}
        self.set, self.get = values.__setitem__, values.__getitem__
        self.compare_set: Callable[[str, str, bytes], bytes] = lambda key, _, body: values.setdefault(key, body)
        self.check: Callable[[list[str]], bool] = lambda keys: values.keys() >= set(keys)


def pack(value: Json) -> bytes:
    """Return JSON after a byte for its form: `j` plain, `z` compressed. Raises UsageError if it cannot be JSON."""
    try:
        text = json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"ranks tell each other JSON only: {error}") from None
    body = b"j" + text if len(text) <= SQUEEZE else b"z" + zlib.compress(text)
    if len(body) > MAX_VALUE:
        raise UsageError(f"{len(body)} bytes are too much for one message between ranks, which holds {MAX_VALUE}")
    return body


def unpack(body: bytes) -> Json:
    try:
        if body[:1] not in (b"j", b"z"):
            raise ValueError(body[:20])
        return json.loads(zlib.decompress(body[1:]) if body[:1] == b"z" else body[1:])
    except (ValueError, zlib.error, RecursionError) as error:
        raise PeerError(f"the store of the job holds something that is no message of ours: {error}") from None
