"""The connection between a trainer and a writer: a Unix socket that carries length-prefixed JSON and descriptors.

The messages are in `ckpt.core.ipc.messages`. Pickle is not used.

A trainer finds a writer by the name of an abstract socket, not by a file, so no folder has to be configured and none
can be deleted. The kernel gives a name to only one process at a time, until that process ends. If another user of the
machine has taken a name, a few other names are tried.
"""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import hashlib
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ckpt.core.ipc.heartbeat import boot_id, namespace, number_in_proc
from ckpt.core.ipc.messages import (
    MOST_BYTES,
    Incoming,
    Message,
    Request,
    decode,
    encode,
    encode_reply,
    reply_of,
    too_long,
)
from ckpt.errors import UsageError

R = TypeVar("R")
_MAX_FDS = 16
_BEGIN = 128  # number of bytes of a too long message that are parsed, because they contain its name
SEND_S = 10
CONNECT_S = 2.0
BIND_S = 1.0  # timeout for the owner of a name to reply, or for the name to become free
NAMES = 4
PLACE = 16  # number of characters of a key for the path or URL, and for the run's identity
QUEUE = 4096  # all ranks of a node may connect to all writers at the same time
RUNTIME = "CKPT_RUNTIME_DIR"
AT_WORK, LEAVING = "ckpt-writer", "ckpt-leaving"  # process names of a writer
_LISTENING = "00010000"  # flags of a listening socket in /proc/net/unix


class Channel:
    """One end of a connection. Any thread may call `send` and `reply`, but only one thread `receive`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # A stopped reader must not block the sender forever. A truncated message ends the connection.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._fds: collections.deque[int] = collections.deque()
        self._over = False  # True if no more messages are read

    def send(self, message: Message, number: int | None = None, fds: tuple[int, ...] = ()) -> None:
        """Send a message. Raise OSError if the other end is closed, and ProtocolError if the message is too long."""
        self.transmit(encode(message, number, len(fds)), fds)

    def reply(self, number: int, value: object, fds: tuple[int, ...] = ()) -> None:
        """Reply to the request with this number."""
        self.transmit(encode_reply(value, number, len(fds)), fds)

    def transmit(self, body: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send an encoded message with its descriptors."""
        data = memoryview(struct.pack(">I", len(body)) + body)
        with self._sending:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sent = self.sock.sendmsg([data], ancillary)
            self.sock.sendall(data[sent:])

    def receive(self) -> Incoming | None:
        """Return the next message, or None at the end of the connection or after invalid data."""
        while not self._over:
            if len(self._buffer) >= 4:
                size = struct.unpack_from(">I", self._buffer)[0]
                if size > MOST_BYTES and len(self._buffer) >= _BEGIN:
                    self._over = True
                    return too_long(size, bytes(self._buffer[4:_BEGIN]))
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
        self._drop()  # the channel was closed during the read
        return None

    def _take(self, size: int) -> Incoming | None:
        found = decode(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        count = found.fields.get("fds", 0) if found is not None else -1
        if type(count) is not int or not 0 <= count <= len(self._fds):
            return None  # it is unknown which message has which descriptors
        if found is not None:
            found.fds += [self._fds.popleft() for _ in range(count)]
        return found

    def ask(self, request: Request[R], timeout_s: float) -> R | None:
        """Send one request and return its reply, or None after the timeout. Raise the error that the reply contains. No
        other thread may call `receive`."""
        try:
            self.sock.settimeout(timeout_s)
            self.send(request, 0)
            received = self.receive()
        except OSError:
            return None
        return None if received is None else reply_of(received, request)

    def hang_up(self) -> None:
        """Shut the connection down in both directions. A thread that is in `receive` gets None."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._over = True
        self.hang_up()
        self.sock.close()
        self._drop()

    def _drop(self) -> None:
        """Close the descriptors of messages that are never received."""
        with contextlib.suppress(IndexError):  # two threads may do this concurrently
            while True:
                os.close(self._fds.popleft())

    def forget(self) -> None:
        """Close the socket in a forked child, without ending the parent's connection."""
        self.sock.close()


def run_key(place: str, local_rank: int, identity: str = "") -> str:
    """Return the key of a run's writer on this host, by which a restarted trainer finds it.

    identity: `ckpt.core.checkpoint.lease.Identity.text`. A path or URL alone does not identify a run.
    """
    return f"{_digest(place, str(os.getuid()))}{_digest(identity)}-{local_rank}"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:PLACE]


def at_place(key: str) -> list[str]:
    """Return the keys of the writers on this host whose run has the same path or URL, even if it is another run."""
    return [one for one in all_keys() if one[:PLACE] == key[:PLACE]]


def siblings(key: str) -> dict[int, str]:
    """Return the keys of the writers of this run on this host, by local rank. Some writers may have just ended."""
    run = key.rpartition("-")[0]
    found: dict[int, str] = {}
    for name, _, listening in _bound():
        if listening and name.startswith(f"@everystep/{_scope()}/{run}-"):
            number = name.rpartition(f"/{run}-")[2].partition("/")[0]
            if number.isdecimal():
                found[int(number)] = f"{run}-{number}"
    return dict(sorted(found.items()))


def all_keys() -> list[str]:
    """Return the keys of this user's writers on this host. Some writers may have just ended."""
    named = re.compile(rf"@everystep/{re.escape(_scope())}/([0-9a-f]{{{2 * PLACE}}}-\d+)(/\d+)?")
    found = {match[1] for name, _, listening in _bound() if listening and (match := named.fullmatch(name))}
    return sorted(found)


def _bound() -> Iterator[tuple[str, str, bool]]:
    """Yield name, inode number, and True if listening, for each named socket of this network namespace."""
    with contextlib.suppress(FileNotFoundError), open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split(maxsplit=7)
            if len(fields) == 8:
                yield fields[7].strip(), fields[6], fields[3] == _LISTENING


def node_id() -> str:
    """Return a text that is equal for processes that can share memory, because they see the same socket names."""
    return f"{boot_id()}:{namespace('net')}:{_scope()}"


def _scope() -> str:
    """Return the scope of socket names: the user, and the RUNTIME folder if set, which isolates tests."""
    folder = os.environ.get(RUNTIME)
    return str(os.getuid()) if not folder else f"{os.getuid()}-{hashlib.sha256(folder.encode()).hexdigest()[:12]}"


def _address(key: str, number: int) -> str:
    return f"\0everystep/{_scope()}/{key}" + (f"/{number}" if number else "")


def log_path(key: str) -> str:
    """Return the path of a writer's log file, for troubleshooting; "" if there is no suitable folder.

    The file is in $CKPT_RUNTIME_DIR if that is set, otherwise in a private folder of this user in /tmp or /dev/shm.
    """
    chosen = os.environ.get(RUNTIME)
    for base in [chosen] if chosen else ["/tmp", "/dev/shm"]:
        folder = Path(base) / f"everystep-{os.getuid()}"
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700, parents=bool(chosen))
            info = folder.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077:
                return str(folder / f"{key}.log")
    return ""


def _peer(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def same_user(sock: socket.socket) -> bool:
    """Return True if the other end of a socket belongs to the user of this process."""
    return _peer(sock)[1] == os.getuid()


def peer_pid(sock: socket.socket) -> int:
    """Return the id of the process that created the other end of a socket."""
    return _peer(sock)[0]


def connect(key: str) -> Channel | None:
    """Connect to the writer with this key. Return None if no such writer listens."""
    for number in range(NAMES):
        with contextlib.suppress(OSError):
            return _reach(_address(key, number))
    return None


class _OtherUserError(OSError):
    """A process of another user listens on this name."""

    def __init__(self, uid: int) -> None:
        super().__init__(f"a process of the user {uid} listens there")
        self.uid = uid


def _reach(address: str) -> Channel:
    """Connect to the process that listens on a name.

    Raises OSError if no process listens or accepts, and _OtherUserError if the process belongs to another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        end = time.monotonic() + CONNECT_S
        while True:
            try:
                sock.connect(address)
                break
            except BlockingIOError:  # the queue is full, because many processes connect at the same time
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        if not same_user(sock):
            raise _OtherUserError(_peer(sock)[1])
        sock.settimeout(None)
        return Channel(sock)
    except BaseException:
        sock.close()
        raise


def ask_once(key: str, request: Request[R], timeout_s: float) -> R | None:
    """Send one request to a writer over a new connection. Return the reply, or None if it does not arrive in time."""
    channel = connect(key)
    if channel is None:
        return None
    try:
        return channel.ask(request, timeout_s)
    finally:
        channel.close()


def listen(key: str) -> socket.socket | None:
    """Acquire a socket name exclusively, until this socket is closed or its process ends. Return None if it is taken.

    Raises UsageError if other users of the machine have all names.
    """
    if holder(key) is not None:
        return None
    other = ""
    for number in range(NAMES):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end = time.monotonic() + BIND_S
        while True:
            try:
                sock.bind(_address(key, number))
                sock.listen(QUEUE)
                return sock
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    sock.close()
                    raise
            try:
                owner = _holder(_address(key, number))
            except _OtherUserError as error:
                other = f" (uid {error.uid})"
                break
            late = time.monotonic() > end  # the owner may have been stopped before it listened
            if owner is not None or (late and _bound_by(_address(key, number)) is not None):
                sock.close()
                return None
            if late:
                break  # a process of another user has the name, and does not listen
            time.sleep(0.01)  # the owner may be about to listen, or to end
        sock.close()
    raise UsageError(
        f"another user of this machine{other} uses the socket names of this run (@{_address(key, 0)[1:]}). End that "
        f"user's process, or set the environment variable {RUNTIME} to a folder of your own: it gives your runs other "
        "names"
    )


def holder(key: str) -> int | None:
    """Return the id of this user's process that has a name, 0 if it is not visible, None if there is none."""
    for number in range(NAMES):
        with contextlib.suppress(_OtherUserError):
            if (pid := _holder(_address(key, number))) is not None:
                return pid
    return None


def _holder(address: str) -> int | None:
    """Like `holder`, return the process of this user that has a socket name. Raises _OtherUserError."""
    try:
        channel = _reach(address)
    except _OtherUserError:
        raise
    except BlockingIOError:  # the process is stopped, and its queue is full
        return _bound_by(address)
    except OSError:
        return None
    pid = peer_pid(channel.sock)
    channel.close()
    return pid


def _bound_by(address: str) -> int | None:
    """Return the visible process of this user that has a socket name, even if it does not listen."""
    sockets = {f"socket:[{number}]" for name, number, _ in _bound() if name == f"@{address[1:]}"}
    for folder in Path("/proc").iterdir() if sockets else ():
        with contextlib.suppress(OSError):
            mine = folder.name.isdecimal() and folder.stat().st_uid == os.getuid()
            if mine and not sockets.isdisjoint(_open_in(folder)):
                return int(folder.name)
    return None


def _open_in(folder: Path) -> Iterator[str]:
    """Yield the targets of the open descriptors of a process, given its folder in /proc."""
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor was closed after the listing
            yield os.readlink(descriptor)


def writers_of(key: str) -> list[int]:
    """Return this user's running writers of a run on this machine, even if they have no reachable socket name."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            mine = folder.name.isdecimal() and folder.stat().st_uid == os.getuid()
            if mine and _is_writer(folder, key, AT_WORK):
                found.append(int(folder.name))
    return found


def is_writer(pid: int, key: str, *states: str) -> bool:
    """Return True if a process is a writer of this run in one of these states. Raises OSError if it is not visible."""
    return _is_writer(Path(f"/proc/{number_in_proc(pid)}"), key, *(states or (AT_WORK, LEAVING)))


def _is_writer(folder: Path, key: str, *states: str) -> bool:
    if key.encode() not in (folder / "cmdline").read_bytes().split(b"\0"):
        return False
    return (folder / "comm").read_text().strip() in states
