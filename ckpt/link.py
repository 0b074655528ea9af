"""The wire between trainer and writer: length-prefixed JSON and descriptors over a unix socket.

No pickle crosses it. Each message is a dict with `op`; one with `id` expects a reply with the same `id`.
"""

from __future__ import annotations

import array
import collections
import contextlib
import hashlib
import json
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt.errors import UsageError

Message = dict[str, Any]
MAX_MESSAGE = 256 << 20
_MAX_FDS = 16
SEND_S = 10


class Channel:
    """One end. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # A reader that stands still must not hold up the sender for ever; what was cut off ends the connection.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._fds: collections.deque[int] = collections.deque()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """OSError when the other end is gone."""
        body = json.dumps({**message, "fds": len(fds)} if fds else message, separators=(",", ":")).encode()
        data = memoryview(struct.pack(">I", len(body)) + body)
        with self._sending:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sent = self.sock.sendmsg([data], ancillary)
            self.sock.sendall(data[sent:])

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, None at the end, or where something comes that is not a message."""
        while True:
            if len(self._buffer) >= 4:
                size = struct.unpack_from(">I", self._buffer)[0]
                if size > MAX_MESSAGE:
                    return None
                if len(self._buffer) >= 4 + size:
                    return self._take(size)
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, _MAX_FDS)
            except OSError:
                return None
            for fd in fds:
                os.set_inheritable(fd, False)
            self._fds.extend(fds)
            if not data:
                return None
            self._buffer += data

    def _take(self, size: int) -> tuple[Message, list[int]] | None:
        try:
            message = json.loads(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            count = message.pop("fds", 0) if type(message) is dict else -1
        except (ValueError, RecursionError):
            return None
        if type(count) is not int or not 0 <= count <= len(self._fds):
            return None
        return message, [self._fds.popleft() for _ in range(count)]

    def hang_up(self) -> None:
        """End the connection in both directions; whoever is in `receive` gets the end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    def forget(self) -> None:
        """In a forked child: close our copy without a word to the other end."""
        self.sock.close()


def run_key(place: str, local_rank: int) -> str:
    """Names the writer of a run on this host, so that a restarted trainer finds it."""
    text = "\0".join([place, str(os.getuid()), socket.gethostname()])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}-{local_rank}"


def siblings(key: str) -> dict[int, str]:
    """The keys of all writers of the same run on this host, by local rank; one may be gone by now."""
    run, folder = key.rpartition("-")[0], Path(socket_path(key)).parent
    found = (path.stem.rpartition("-") for path in folder.glob(f"{run}-*.sock"))
    return {int(number): f"{run}-{number}" for _, _, number in found if number.isdigit()}


def node_id() -> str:
    """Equal for processes that can hand each other memory: those that see the same folder of sockets."""
    folder = os.stat(Path(socket_path("x")).parent)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{folder.st_dev}:{folder.st_ino}"


def socket_path(key: str) -> str:
    """In $XDG_RUNTIME_DIR or a folder of this user's own. UsageError if the folder could be anyone else's."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_absolute() and os.access(base, os.W_OK | os.X_OK):
        folder = Path(base) / "everystep"
    else:
        folder = Path(tempfile.gettempdir()) / f"everystep-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise UsageError(f"{folder} must be a folder that only you can open: remove it, or `chmod 700` it")
    return str(folder / f"{key}.sock")


def _peer(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def same_user(sock: socket.socket) -> bool:
    """Whether the other end belongs to the user of this process."""
    return _peer(sock)[1] == os.getuid()


def peer_pid(sock: socket.socket) -> int:
    """The process that made the other end."""
    return _peer(sock)[0]


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """The same file by a name that fits into a socket address, which ends at 107 bytes."""
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def connect(path: str) -> Channel | None:
    """To a writer that listens there, None if there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(2.0)
    try:
        with _short(path) as address:
            _connect(sock, address)
        if not same_user(sock):
            raise UsageError(f"{path} belongs to another user")
    except OSError:
        sock.close()
        return None
    sock.settimeout(None)
    return Channel(sock)


def _connect(sock: socket.socket, address: str) -> None:
    """Where many ask at once the queue may be full for a moment, which does not mean that nobody is there."""
    end = time.monotonic() + 2.0
    while True:
        try:
            return sock.connect(address)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def ask_once(key: str, op: str, timeout_s: float, **fields: Any) -> Message | None:
    """One question to the writer of a key, over a connection of its own; None if it does not answer in time."""
    channel = connect(socket_path(key))
    if channel is None:
        return None
    try:
        channel.sock.settimeout(timeout_s)
        channel.send({"op": op, "id": 0, **fields})
        received = channel.receive()
        return received[0] if received is not None else None
    except OSError:
        return None
    finally:
        channel.close()


def listen(path: str) -> socket.socket:
    """Take the name over, whoever had it, without a moment at which it is missing."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    with _short(temporary) as address:
        sock.bind(address)
    os.chmod(temporary, 0o600)
    sock.listen(128)  # all ranks of a node may ask all writers at once
    os.replace(temporary, path)
    return sock
