"""Tests of connections between ranks: every chunk arrives once and complete, or the ranks get an error in time."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ckpt.core.format.table import MAX_CHUNK
from ckpt.core.ranks import transfer
from ckpt.core.ranks.transfer import Transfer
from ckpt.errors import CorruptError, PeerError
from processes import REPO, eventually, start_python

S = 20.0  # a deadline that is only missed in case of a bug


class Inbox:
    """Copies received chunks."""

    def __init__(self) -> None:
        self.chunks: dict[int, bytes] = {}
        self.lock = threading.Lock()

    def __call__(self, chunk: int, data: memoryview) -> None:
        with self.lock:
            assert chunk not in self.chunks
            self.chunks[chunk] = bytes(data)


def ignore(chunk: int, data: memoryview) -> None:
    pass


@contextlib.contextmanager
def several(count: int, silence_s: float = S) -> Iterator[list[Transfer]]:
    found = [Transfer(rank, silence_s=silence_s) for rank in range(count)]
    try:
        yield found
    finally:
        for one in found:
            one.close()


def receive(
    at: Transfer,
    chunks: Mapping[int, Any],
    ranks: list[Transfer],
    take: Callable[[int, memoryview], None] = ignore,
    timeout_s: float = S,
) -> None:
    """Receive with all ranks on one node."""
    at.receive(chunks, json.loads(json.dumps([one.contact for one in ranks])), [0] * len(ranks), take, timeout_s)


def raw_sender() -> tuple[socket.socket, dict[str, Any]]:
    """Return a listener that a test operates by hand, and its contact."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(S)
    return listener, {"port": listener.getsockname()[1], "token": "t" * 32, "addresses": ["127.0.0.1"]}


def welcomed(listener: socket.socket) -> socket.socket:
    sock = listener.accept()[0]
    sock.settimeout(S)
    hello = struct.unpack("!8s32sI", sock.recv(44, socket.MSG_WAITALL))
    assert hello == (b"ckpt-xc2", b"t" * 32, 0)
    sock.sendall(b"\x06")
    return sock


def header(chunk: int, length: int) -> bytes:
    return struct.pack("!QI", chunk, length)


def test_all_ranks_send_to_each_other() -> None:
    """Four ranks, chunks of any size, also empty ones, two sending threads each: every chunk arrives complete."""
    rng = random.Random(0)
    chunks = [rng.randbytes(rng.choice([0, 0, 1, 100, 70_000, 1 << 20])) for _ in range(120)] + [rng.randbytes(9 << 20)]
    source = [rng.randrange(4) for _ in chunks]
    to = [[r for r in range(4) if r != source[b] and rng.random() < 0.7] for b in range(len(chunks))]
    boxes = [Inbox() for _ in range(4)]
    with several(4) as ranks:
        for rank, one in enumerate(ranks):
            wanted = {r: [b for b in range(len(chunks)) if source[b] == r and rank in to[b]] for r in range(4)}
            receive(one, wanted, ranks, boxes[rank])
        for rank, one in enumerate(ranks):
            one.wait_for({r for b in range(len(chunks)) if source[b] == rank for r in to[b]}, S)

        def send(rank: int, part: int) -> None:
            for b in range(part, len(chunks), 2):
                for recipient in to[b] if source[b] == rank else ():
                    ranks[rank].send(recipient, b, memoryview(chunks[b]))

        threads = [threading.Thread(target=send, args=(rank, part)) for rank in range(4) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(S)
        for one in ranks:
            one.wait(S)
        for rank, box in enumerate(boxes):
            assert box.chunks == {b: chunks[b] for b in range(len(chunks)) if rank in to[b]}


# -- connections --


def test_unreachable_rank_is_named() -> None:
    """The token is wrong, or its listener is gone. With the correct token, the same rank is accepted."""
    with several(3) as ranks:
        a, b, c = ranks
        contacts = [one.contact for one in ranks]
        a.receive({1: [0]}, [{}, {**contacts[1], "token": "0" * 32}], [0, 0], ignore, S)
        with pytest.raises(PeerError, match="rank 1 cannot be reached"):
            a.wait(S)
        with pytest.raises(PeerError, match=r"rank 0 did not connect within 0.1 s"):
            b.wait_for([0], 0.1)
        receive(c, {1: [0]}, ranks)
        b.wait_for([2], S)
        b.send(2, 0, memoryview(b"x"))
        c.wait(S)
    with several(1) as (a,):
        a.receive({1: [0]}, contacts, [0, 0], ignore, S)  # they are closed by now
        with pytest.raises(PeerError, match="rank 1 cannot be reached"):
            a.wait(S)


def test_next_address_is_tried() -> None:
    """If one address does not respond, or another server does."""
    with several(2) as (a, b), socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with other.accept()[0] as found:
                found.recv(100)
                found.sendall(b"?")

        thread = threading.Thread(target=answer)
        thread.start()
        wrong = {**b.contact, "port": other.getsockname()[1], "addresses": ["127.0.0.1"]}
        a.receive({1: [0]}, [{}, wrong], [0, 1], ignore, S)
        with pytest.raises(PeerError, match="another program listens"):
            a.wait(S)
        thread.join(S)
    with several(2) as (a, b):
        a.receive({1: [0]}, [{}, {**b.contact, "addresses": ["255.255.255.255", "127.0.0.1"]}], [0, 1], ignore, S)
        b.wait_for([0], S)
        b.send(0, 0, memoryview(b"x"))
        a.wait(S)


def addresses_here() -> list[str]:
    """Return loopback addresses: IPv4, and IPv6 on machines that have it."""
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return ["127.0.0.1", "::1"]
    return ["127.0.0.1"]


def test_ranks_of_one_node_need_no_network() -> None:
    """They connect through the loopback interface. Ranks of two nodes need an address."""
    for address in addresses_here():
        with several(2) as (a, b):
            a.receive({1: [0]}, [{}, {**b.contact, "addresses": [address]}], [0, 1], ignore, S)
            b.wait_for([0], S)
            b.send(0, 0, memoryview(b"x"))
            a.wait(S)
    for nodes in ([0, 1], [0, 0]):
        with several(2) as (a, b):
            a.receive({1: [0]}, [{}, {**b.contact, "addresses": []}], nodes, ignore, S)
            if nodes[1]:
                with pytest.raises(PeerError, match=r"rank 1 cannot be reached \(it has no address\)"):
                    a.wait(S)
            else:
                b.wait_for([0], S)
                b.send(0, 0, memoryview(b"x"))
                a.wait(S)


def test_strangers_do_not_disturb_a_transfer() -> None:
    """Garbage, half a greeting, a wrong token and silence: the connection is closed, and the transfer continues."""
    box = Inbox()
    with several(2) as ranks, contextlib.ExitStack() as stack:
        a, b = ranks
        receive(b, {0: range(5)}, ranks, box)
        a.wait_for([1], S)
        greeting = struct.pack("!8s32sI", b"ckpt-xc2", b"0" * 32, 1)
        noise = (
            b"GET / HTTP/1.1\r\n\r\n" + b"\r\n" * 40,
            random.Random(0).randbytes(9000),
            greeting,
            greeting[:20],
            b"",
        )
        for i, words in enumerate(noise):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", a.contact["port"]), S))
            sock.sendall(words)
            a.send(1, i, memoryview(b"%d" % i))
            if len(words) >= len(greeting):
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
        b.wait(S)
        assert box.chunks == {i: b"%d" % i for i in range(5)} and list(a._recipients) == [1]


def test_addresses_are_reachable_from_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback, link-local and inactive interfaces are skipped; the fastest comes first. A contact is JSON."""

    def address(text: str) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET6 if ":" in text else socket.AF_INET, address=text)

    there = {
        "lo": [address("127.0.0.1"), address("::1")],
        "slow": [address("10.0.0.1"), address("fe80::1%slow")],
        "fast": [address("10.1.0.1"), address("fd00::1"), SimpleNamespace(family=socket.AF_PACKET, address="00:00")],
        "down": [address("10.2.0.1")],
    }
    speed = {"lo": 0, "slow": 1000, "fast": 100_000, "down": 400_000}
    stats = {name: SimpleNamespace(isup=name != "down", speed=speed[name]) for name in there}
    monkeypatch.setattr(transfer.psutil, "net_if_addrs", lambda: there)
    monkeypatch.setattr(transfer.psutil, "net_if_stats", lambda: stats)
    with several(1) as (a,):
        assert json.loads(json.dumps(a.contact)) == a.contact
        assert a.contact["addresses"] == ["10.1.0.1", "fd00::1", "10.0.0.1"] and len(a.contact["token"]) == 32


# -- failures --


def test_error_of_take_is_raised_and_the_sender_stops() -> None:
    def refuse(chunk: int, data: memoryview) -> None:
        raise CorruptError(f"chunk {chunk} is damaged")

    with several(2) as ranks:
        a, b = ranks
        receive(b, {0: [7, 8]}, ranks, refuse)
        a.wait_for([1], S)
        a.send(1, 7, memoryview(b"x"))
        with pytest.raises(CorruptError, match="chunk 7 is damaged"):
            b.wait(S)
        with pytest.raises(PeerError, match="rank 1 no longer receives data"):
            while True:
                a.send(1, 8, memoryview(bytes(1000)))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (header(2, 1) + b"x" + header(2, 1) + b"x", "rank 1 sent an unexpected chunk: 2, 1 bytes"),
        (header(77, 1) + b"x", "rank 1 sent an unexpected chunk: 77"),
        (header(1, MAX_CHUNK + 1), "rank 1 sent an unexpected chunk: 1, 67108865 bytes"),
        (header(1, 100) + b"x", "rank 1 closed the connection before"),
        (header(1, 1)[:5], "rank 1 closed the connection before"),
        (b"", "rank 1 closed the connection before"),
        (header(2, 1) + b"x" + header(1, 0), ""),  # negative control: correct headers are accepted
    ],
)
def test_unexpected_bytes_of_a_sender_are_an_error(words: bytes, problem: str) -> None:
    box = Inbox()
    listener, contact = raw_sender()
    with several(1) as (a,), listener:
        a.receive({1: [1, 2]}, [{}, contact], [0, 1], box, S)
        with welcomed(listener) as peer:
            peer.sendall(words)
            peer.shutdown(socket.SHUT_WR)
            if problem:
                with pytest.raises(PeerError, match=problem):
                    a.wait(S)
            else:
                a.wait(S)
        assert set(box.chunks) <= {2} if problem else box.chunks == {1: b"", 2: b"x"}


@pytest.mark.parametrize("words", [header(2, 9) + b"x", header(2, 9), header(2, 9)[:3]])
def test_silence_inside_a_blob_is_an_error(words: bytes) -> None:
    """Between chunks a sender may pause."""
    listener, contact = raw_sender()
    with several(1, silence_s=0.2) as (a,), listener:
        a.receive({1: [1, 2]}, [{}, contact], [0, 1], ignore, S)
        with welcomed(listener) as peer:
            peer.sendall(header(1, 1) + b"x")
            time.sleep(0.5)
            assert a._error is None
            peer.sendall(words)
            with pytest.raises(PeerError, match="rank 1 has stopped sending data"):
                a.wait(S)


# -- other processes --

CHILD = """
import json, sys, time
from ckpt.core.ranks.transfer import Transfer
nodes, got = json.loads(sys.argv[1]), {}
x = Transfer(1)
print(json.dumps(x.contact), flush=True)
contact = json.loads(sys.stdin.readline())
x.receive({0: range(0, 100, 2)}, [contact], nodes, lambda chunk, data: got.update({chunk: bytes(data)}), 20)
x.wait_for([0], 20)
print("connected", flush=True)
def send(chunks):
    for b in chunks:
        x.send(0, b, memoryview(bytes([b]) * (b * 1000)))
"""


@contextlib.contextmanager
def child(
    code: str, peer: Transfer, nodes: list[int], take: Callable[[int, memoryview], None] = ignore
) -> Iterator[subprocess.Popen[str]]:
    """Start rank 1 in its own process, connected with `peer` in both directions."""
    process = start_python(
        [sys.executable, "-c", CHILD + code, json.dumps(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
    )
    try:
        with process:
            assert process.stdin and process.stdout
            contact = json.loads(process.stdout.readline())
            print(json.dumps(peer.contact), file=process.stdin, flush=True)
            peer.receive({1: range(1, 100, 2)}, [{}, contact], nodes, take, S)
            peer.wait_for([1], S)
            assert process.stdout.readline() == "connected\n"
            try:
                yield process
            finally:
                process.kill()
    finally:
        assert process.returncode is not None


@pytest.mark.parametrize("inside", [True, False])
def test_killed_peer_ends_wait_and_send(inside: bool) -> None:
    """Killed within a chunk or between two, long before the deadline."""
    with several(1) as (a,):
        first = "x._recipients[0][0].sendall(bytes.fromhex('000000000000006300000100') + b'x')"
        code = f"send(range(1, 20, 2)); {first if inside else 'pass'}; print('sent', flush=True); time.sleep(60)"
        with child(code, a, [0, 0]) as it:
            assert it.stdout and it.stdout.readline() == "sent\n"
            assert eventually(lambda: a._left == 40)
            it.send_signal(signal.SIGKILL)
            with pytest.raises(PeerError, match="rank 1 "):
                a.wait(S)
            with pytest.raises(PeerError, match="rank 1 no longer receives data"):
                while True:
                    a.send(1, 0, memoryview(bytes(1000)))


def test_stopped_peer_ends_send_after_silence() -> None:
    """The connection has ended then, since bytes after a cut chunk could not be parsed."""
    with several(1, silence_s=0.3) as (a,), child("time.sleep(60)", a, [0, 0]) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerError, match="rank 1 no longer receives data"):
            for b in range(0, 100, 2):
                a.send(1, b, memoryview(bytes(4 << 20)))
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        with pytest.raises(PeerError, match="rank 1 no longer receives data"):
            a.send(1, 98, memoryview(b"x"))


# -- cleanup --


def resources() -> tuple[int, int]:
    """Return the numbers of threads and descriptors of this process."""
    gc.collect()
    me = psutil.Process()
    return me.num_threads(), me.num_fds()


def test_close_leaves_no_thread_and_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds after any kind of transfer and repeated close calls."""
    monkeypatch.setattr(transfer, "JOIN_S", 1000.0)
    before = resources()
    with several(4) as ranks:
        for one in ranks:
            receive(one, {r: [r] for r in range(4) if r != one.rank}, ranks)
        for one in ranks:
            one.wait_for([r for r in range(4) if r != one.rank], S)
        stranger = socket.create_connection(("127.0.0.1", ranks[0].contact["port"]), S)
        during = resources()
        assert during[0] >= before[0] + 16 and during[1] >= before[1] + 28  # negative control: these are counted
        ranks[0].send(1, 0, memoryview(b"x"))
        ranks[2].close()
        with pytest.raises(PeerError, match="rank 2 closed the connection"):
            ranks[3].wait(S)
        ranks[3].close()
    stranger.close()
    for one in ranks:
        one.close()
    assert all(now <= then for now, then in zip(resources(), before, strict=True))
    with pytest.raises(PeerError):
        ranks[0].send(1, 1, memoryview(b"x"))
