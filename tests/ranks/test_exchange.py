"""Who reads what for whom, and the connections on which it goes: all that is wanted comes, once, or an error does."""

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
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.core.format.table import MAX_BLOB
from ckpt.core.ranks import exchange, link
from ckpt.core.ranks.assign import RankReads, assign
from ckpt.core.ranks.exchange import Exchange
from ckpt.errors import DeadlineError, PeerError, StoreError
from processes import REPO, eventually, start_python

QUICK = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=20_000)
Case = tuple[Any, Any, Any, list[int]]
S = 20.0  # a deadline that is met or a bug


# -- the plan --


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sizes, wants, can_read and nodes; every blob that is wanted can be read by somebody."""
    ranks, blobs = draw(st.integers(1, 8)), draw(st.integers(0, 24))
    nodes = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = draw(st.integers(1, 6))  # few patterns, as real states have, and then many
    pick = np.sort(rng.integers(0, kinds, blobs)) if draw(st.booleans()) else np.arange(blobs)
    columns = max(kinds, blobs)
    wants = rng.random((ranks, columns)) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    can_read = rng.random((ranks, columns)) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    if draw(st.booleans()):  # each node has a memory or disk of its own
        first = [nodes.index(node) for node in nodes]
        can_read = can_read[first]
    can_read[rng.integers(0, ranks), wants.any(0) & ~can_read.any(0)] = True
    sizes = rng.integers(0, draw(st.sampled_from([1, 2, 4 << 20])), blobs)
    return sizes, wants[:, pick], can_read[:, pick], nodes


def shares_of(case: Case) -> list[RankReads]:
    return [assign(rank, *case) for rank in range(len(case[3]))]


def broken(shares: Sequence[RankReads], case: Case) -> str:
    """The first rule that the shares of all ranks break, "" if they keep them all."""
    _, wants, can_read, nodes = case
    ranks, blobs = wants.shape
    came = np.zeros((ranks, blobs), int)
    expected = np.zeros((ranks, blobs), bool)
    readers: list[list[int]] = [[] for _ in range(blobs)]
    for rank, share in enumerate(shares):
        if len(share.reads) != len(share.recipients) or any(
            (np.diff(b) <= 0).any() for b in (share.reads, share.expects)
        ):
            return "form"
        for blob, recipients in zip(share.reads.tolist(), share.recipients, strict=True):
            readers[blob].append(rank)
            if rank in recipients or list(recipients) != sorted(set(recipients)):
                return "recipients"
            came[list(recipients), blob] += 1
            came[rank, blob] += wants[rank, blob]
            if not recipients and not wants[rank, blob]:
                return "a read for nobody"
        expected[rank, share.expects] = True
    if (came != wants).any():
        return "everyone who wants a blob has it once, nobody else"
    for rank, share in enumerate(shares):
        if (wants[rank] & ~expected[rank] & ~np.isin(np.arange(blobs), share.reads)).any():
            return "what is expected and what is read is what is wanted"
        if not wants[rank, share.expects].all() or np.isin(share.expects, share.reads).any():
            return "only what comes from others is expected"
    for blob in range(blobs):
        able = {n for n, can in zip(nodes, can_read[:, blob], strict=True) if can}
        wanting = {n for n, want in zip(nodes, wants[:, blob], strict=True) if want}
        at = [nodes[r] for r in readers[blob]]
        if not all(can_read[r, blob] for r in readers[blob]) or len(at) != len(set(at)):
            return "a reader can read, and is the only one of its node"
        if set(at) != wanting & able and not (wanting and not wanting & able and len(at) == 1):
            return "who can read for itself does, and nobody beyond need"
        for r in readers[blob]:
            eager = [q for q in range(ranks) if nodes[q] == nodes[r] and wants[q, blob] and can_read[q, blob]]
            if eager and r not in eager:
                return "who wants a blob itself reads it"
    return ""


@QUICK
@given(cases())
def test_shares_fit_together(case: Case) -> None:
    """Whoever wants a blob gets it once; readers can read; a node reads a blob once at most, and only if it must."""
    assert broken(shares_of(case), case) == ""


@pytest.mark.long
@LONG
@given(cases())
def test_shares_fit_together_long(case: Case) -> None:
    """The same, many times."""
    assert broken(shares_of(case), case) == ""


@QUICK
@given(cases())
def test_every_rank_comes_to_the_same(case: Case) -> None:
    """Equal arguments give equal shares, whatever the memory behind them looks like and whatever nodes are called."""
    sizes, wants, can_read, nodes = case
    other = (sizes.copy(), np.asfortranarray(wants), can_read.copy()[:, ::-1][:, ::-1], [n * 1000 - 7 for n in nodes])
    for a, b in zip(shares_of(case), shares_of(other), strict=True):
        assert (a.reads.tolist(), a.recipients, a.expects.tolist()) == (
            b.reads.tolist(),
            b.recipients,
            b.expects.tolist(),
        )
        assert a.reads.dtype == a.expects.dtype == np.int64


def ddp(ranks: int, blobs: int, per_node: int, seed: int = 0) -> Case:
    """All want all and can read all."""
    sizes = np.random.default_rng(seed).integers(1, 4 << 20, blobs)
    everything = np.ones((ranks, blobs), bool)
    return sizes, everything, everything, [rank // per_node for rank in range(ranks)]


def test_negative_control_a_broken_plan_is_seen() -> None:
    """Each rule is broken once, and `broken` says so."""
    case = ddp(4, 40, 2)
    good = shares_of(case)
    first = good[0]
    assert broken(good, case) == ""
    worse = [
        RankReads(first.reads, ((), *first.recipients[1:]), first.expects),  # somebody is forgotten
        RankReads(first.reads, ((1, 2), *first.recipients[1:]), first.expects),  # somebody gets it twice
        RankReads(first.reads, ((0, 1), *first.recipients[1:]), first.expects),  # to itself
        RankReads(first.reads[1:], first.recipients[1:], first.expects),  # one is not read
        RankReads(first.reads, first.recipients, first.expects[1:]),  # one comes that is not expected
        RankReads(first.reads, first.recipients, np.arange(40)),  # its own are expected
        RankReads(first.reads[::-1], first.recipients, first.expects),
    ]
    for share in worse:
        assert broken([share, *good[1:]], case)
    sizes, wants, can_read, nodes = case
    blind = can_read.copy()
    blind[0] = False
    assert broken(good, (sizes, wants, blind, nodes))  # reads what it cannot
    assert broken(good, (sizes, wants, can_read, [0, 0, 0, 0]))  # two readers in one node
    lazy = wants.copy()
    lazy[0] = False
    assert broken(shares_of((sizes, lazy, blind, nodes)), (sizes, lazy, can_read, nodes)) == ""
    assert broken(shares_of((sizes, lazy, can_read & ~wants | ~lazy, nodes)), (sizes, lazy, can_read, nodes))


@pytest.mark.parametrize("per_node", [1, 2, 8])
def test_equal_wants_make_equal_loads(per_node: int) -> None:
    """Where all want all and can read all, a rank reads its part of the node's bytes within one blob, in one run."""
    case = ddp(8, 1000, per_node)
    sizes = case[0]
    for share in shares_of(case):
        assert abs(sizes[share.reads].sum() - sizes.sum() / per_node) <= sizes.max()
        assert (np.diff(share.reads) == 1).all()


def test_a_replaced_node_is_served_by_all_others_and_nothing_is_read_more_often() -> None:
    """Node 0 lost its memory: each other node reads all once, as before, and each gives a part to node 0."""
    sizes, wants, can_read, nodes = ddp(8, 1000, 2)
    can_read = can_read.copy()
    can_read[:2] = False
    shares = shares_of((sizes, wants, can_read, nodes))
    assert sum(len(share.reads) for share in shares) == 3 * 1000
    given_away = [sizes[[b for b, to in zip(s.reads, s.recipients, strict=True) if 0 in to]].sum() for s in shares[2:]]
    assert all(abs(n - sizes.sum() / 6) <= 2 * sizes.max() for n in given_away)


def test_blobs_that_nobody_can_read_are_counted() -> None:
    """The error says how many; a blob that nobody wants needs no reader."""
    sizes, wants, can_read, nodes = ddp(2, 10, 2)
    can_read = can_read.copy()
    can_read[:, 3:6] = False
    with pytest.raises(StoreError, match=r"no rank can read 3 of the pieces"):
        assign(0, sizes, wants, can_read, nodes)
    wants = wants.copy()
    wants[:, 3:6] = False
    assert broken(shares_of((sizes, wants, can_read, nodes)), (sizes, wants, can_read, nodes)) == ""


# -- the connections --


class Inbox:
    """Keeps a copy of what comes."""

    def __init__(self) -> None:
        self.blobs: dict[int, bytes] = {}
        self.lock = threading.Lock()

    def __call__(self, blob: int, data: memoryview) -> None:
        with self.lock:
            assert blob not in self.blobs
            self.blobs[blob] = bytes(data)


def ignore(blob: int, data: memoryview) -> None:
    pass


@contextlib.contextmanager
def several(
    count: int, on_blob: Callable[[int, memoryview], None] = ignore, silence_s: float = S
) -> Iterator[list[Exchange]]:
    found = [Exchange(rank, on_blob, silence_s=silence_s) for rank in range(count)]
    try:
        yield found
    finally:
        for one in found:
            one.close()


def link_up(sender: Exchange, *receivers: Exchange) -> None:
    """All on one node."""
    contacts = json.loads(json.dumps([one.contact for one in receivers]))
    sender.connect(contacts, [one.rank for one in receivers], [0] * 16, S)


def raw_peer(to: Exchange, rank: int = 9) -> socket.socket:
    """A connection that says what an honest peer says first, and then whatever a test sends on it."""
    sock = socket.create_connection(("127.0.0.1", to.contact["port"]), S)
    sock.sendall(struct.pack("!8s32sI", b"ckpt-xc1", to.contact["token"].encode(), rank))
    assert sock.recv(1) == b"\x06"
    sock.sendall(header(0))
    return sock


def header(kind: int, length: int = 0, blob: int = 0) -> bytes:
    return struct.pack("!B3xIQ", kind, length, blob)


def test_everyone_sends_to_everyone() -> None:
    """Four ranks, blobs of any size, empty ones too, several threads that send: each arrives whole, where it should."""
    rng = random.Random(0)
    blobs = [rng.randbytes(rng.choice([0, 0, 1, 100, 70_000, 1 << 20])) for _ in range(120)] + [rng.randbytes(9 << 20)]
    source = [rng.randrange(4) for _ in blobs]
    to = [[r for r in range(4) if r != source[b] and rng.random() < 0.7] for b in range(len(blobs))]
    boxes = [Inbox() for _ in range(4)]
    with contextlib.ExitStack() as stack:
        ranks = [Exchange(rank, box) for rank, box in enumerate(boxes)]
        for one in ranks:
            stack.callback(one.close)
        expects = [[b for b in range(len(blobs)) if rank in to[b]] for rank in range(4)]
        for rank in ranks:
            rank.expect(expects[rank.rank])
        for rank in ranks:
            link_up(rank, *(other for other in ranks if other is not rank))

        def send(rank: int, part: int) -> None:
            for b in range(part, len(blobs), 2):
                for recipient in to[b] if source[b] == rank else ():
                    ranks[rank].send(recipient, b, memoryview(blobs[b]))

        threads = [threading.Thread(target=send, args=(rank, part)) for rank in range(4) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(S)
        for rank in ranks:
            rank.finish_sending()
        for rank in ranks:
            rank.wait(expects[rank.rank], S)
        for rank, box in enumerate(boxes):
            assert box.blobs == {b: blobs[b] for b in expects[rank]}


def test_the_deadline_says_how_many_are_missing() -> None:
    """And which ranks are connected and have not finished."""
    with several(3) as (a, b, c):
        c.expect(range(5))
        link_up(a, c)
        link_up(b, c)
        a.send(2, 0, memoryview(b"x"))
        b.finish_sending()
        with pytest.raises(DeadlineError, match=r"4 of 5 blobs are missing after 0.3 s .*not finished: 0\)"):
            c.wait(range(5), 0.3)


# -- who may connect --


def test_who_cannot_be_reached_is_named() -> None:
    """By a wrong token, and with the right one the same rank is let in; without a contact; and where nobody listens any
    more: those that answer are connected to all the same."""
    with several(3) as (a, b, c):
        wrong = {**b.contact, "token": "0" * 32}
        with pytest.raises(PeerError, match="rank 1 cannot be reached"):
            a.connect([wrong], [1], [0, 0, 0], S)
        with pytest.raises(PeerError, match="rank 1 left no contact"):
            a.connect([], [1], [0, 0, 0], S)
        link_up(c, b)
        c.send(1, 0, memoryview(b"x"))
        b.wait([0], S)
        contacts = [one.contact for one in (b, c)]
        b.close()
        with pytest.raises(PeerError, match="rank 1 cannot be reached"):
            a.connect(contacts, [1, 2], [0, 0, 0], S)
        a.send(2, 1, memoryview(b"x"))
        c.wait([1], S)


def test_the_next_address_is_tried() -> None:
    """Where one address leads to nobody, or to somebody else, another one is found."""
    with several(2) as (a, b), socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with other.accept()[0] as found:
                found.recv(100)
                found.sendall(b"?")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerError, match="something else listens"):
            a.connect([{**b.contact, "port": other.getsockname()[1], "addresses": ["127.0.0.1"]}], [1], [0, 1], S)
        thread.join(S)
        a.connect([{**b.contact, "addresses": ["255.255.255.255", "127.0.0.1"]}], [1], [0, 1], S)
        a.send(1, 0, memoryview(b"x"))
        b.wait([0], S)


def addresses_here() -> list[str]:
    """Of both kinds; IPv6 on machines that have it."""
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return ["127.0.0.1", "::1"]
    return ["127.0.0.1"]


def test_ranks_of_one_node_need_no_network() -> None:
    """They meet on the loopback interface; ranks of two nodes do not, whatever listens there: they need an address."""
    for address in addresses_here():
        with several(2) as (a, b):
            a.connect([{**b.contact, "addresses": [address]}], [1], [0, 1], S)
            a.send(1, 0, memoryview(b"x"))
            b.wait([0], S)
    with several(2) as (a, b):
        lonely = {**b.contact, "addresses": []}
        with pytest.raises(PeerError, match=r"rank 1 cannot be reached \(it has no address\)"):
            a.connect([lonely], [1], [0, 1], S)
        a.connect([lonely], [1], [0, 0], S)
        a.send(1, 0, memoryview(b"x"))
        b.wait([0], S)


def test_strangers_do_not_disturb() -> None:
    """Garbage, half a greeting, a wrong token, silence: hung up on, and what is under way goes on."""
    box = Inbox()
    with several(2, box) as (a, b), contextlib.ExitStack() as stack:
        b.expect(range(8))
        link_up(a, b)
        greeting = struct.pack("!8s32sI", b"ckpt-xc1", b"0" * 32, 0)
        noise = (
            b"GET / HTTP/1.1\r\n\r\n" + b"\r\n" * 40,
            random.Random(0).randbytes(9000),
            greeting,
            greeting[:20],
            b"",
        )
        for i, words in enumerate(noise):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", b.contact["port"]), S))
            sock.sendall(words)
            a.send(1, i, memoryview(b"%d" % i))
            if len(words) >= len(greeting):
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
        for words in (b"", header(1, 1, 5) + b"x"):  # knew the token, but was not heard in time, or does not go on
            half = socket.create_connection(("127.0.0.1", b.contact["port"]), S)
            half.sendall(struct.pack("!8s32sI", b"ckpt-xc1", b.contact["token"].encode(), 5))
            assert half.recv(1) == b"\x06"
            with half, contextlib.suppress(OSError):  # it may have hung up in the meantime
                half.sendall(words)
                half.shutdown(socket.SHUT_WR)
                assert half.recv(1) == b""
        for i in range(5, 8):
            a.send(1, i, memoryview(b"%d" % i))
        b.wait(range(8), S)
        assert box.blobs == {i: b"%d" % i for i in range(8)}
        assert not b._lost


def test_addresses_are_such_as_others_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither loopback nor link-local nor an interface that is down; the fastest first. A contact is JSON."""

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
    monkeypatch.setattr(link.psutil, "net_if_addrs", lambda: there)
    monkeypatch.setattr(link.psutil, "net_if_stats", lambda: stats)
    with several(1) as (a,):
        assert json.loads(json.dumps(a.contact)) == a.contact
        assert a.contact["addresses"] == ["10.1.0.1", "fd00::1", "10.0.0.1"]
        assert a.contact["rank"] == 0 and len(a.contact["token"]) == 32


# -- what goes wrong --


def test_fail_reaches_who_waits_and_who_sends() -> None:
    """With its reason, at once: the one that waits for its blobs, and the one whose blobs it no longer takes."""
    with several(3) as (a, b, c):
        a.expect([]), b.expect([1]), c.expect([2])
        link_up(a, b)
        link_up(c, a)
        assert eventually(lambda: bool(a._senders and b._senders))
        a.fail("its disk is on fire")
        with pytest.raises(PeerError, match=r"rank 0 gave up: its disk is on fire \(1 of 1 blobs are missing\)"):
            b.wait([1], S)
        with pytest.raises(PeerError, match="rank 0 gave up: its disk is on fire"):
            while True:
                c.send(0, 5, memoryview(bytes(1000)))
        with pytest.raises(PeerError, match="this rank gave up: its disk is on fire"):
            a.wait([], S)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (header(1, 1, 2) + b"x" + header(1, 1, 2) + b"x", "rank 9 sent blob 2, which is not expected, or not twice"),
        (header(1, 1, 77) + b"x", "rank 9 sent blob 77"),
        (header(1, MAX_BLOB + 1, 1), "no message .kind 1, 67108865 bytes"),
        (header(1, 2**32 - 1, 1), "no message"),
        (header(9), "no message .kind 9"),
        (header(3, 2**32 - 1) + bytes(4096), "gave up"),
        (header(1, 100, 1) + b"x", "hung up before"),
        (header(1)[:5], "hung up before"),
        (b"", "hung up before"),
    ],
)
def test_a_peer_that_talks_nonsense(words: bytes, problem: str) -> None:
    """A blob twice, one not expected, too large a one, an unknown message, an end in the middle: PeerError."""
    box = Inbox()
    with several(1, box) as (a,):
        a.expect([1, 2])
        with raw_peer(a) as peer:
            peer.sendall(words)
            peer.shutdown(socket.SHUT_WR)
            with pytest.raises(PeerError, match=problem):
                a.wait([1, 2], S)
        assert set(box.blobs) <= {2}


def test_negative_control_a_peer_that_makes_sense() -> None:
    """The same hand-made connection with the right words: all is well, so what was seen above is what was said."""
    box = Inbox()
    with several(1, box) as (a,):
        with raw_peer(a) as peer:
            peer.sendall(header(1, 1, 2) + b"x" + header(1, 0, 1) + header(2))
            peer.shutdown(socket.SHUT_WR)
            a.wait([1, 2], S)
        assert box.blobs == {1: b"", 2: b"x"}
        assert eventually(lambda: not a._senders) and not a._lost


def test_a_peer_that_finished_may_leave() -> None:
    """Who has sent its all and hung up is not missed, while another one takes its time."""
    with several(3) as (a, b, c):
        c.expect([0, 1])
        link_up(a, c)
        link_up(b, c)
        a.send(2, 0, memoryview(b"x"))
        a.finish_sending()
        a.close()
        assert eventually(lambda: c._senders == {1})
        b.send(2, 1, memoryview(b"x"))
        c.wait([0, 1], S)
        c.close()
        with pytest.raises(PeerError):
            while True:
                b.send(2, 1, memoryview(b"x"))
        b.finish_sending()  # to one that has left: not an error


@pytest.mark.parametrize("words", [header(1, 9, 2) + b"x", header(1, 9, 2), header(1, 9, 2)[:3]])
def test_silence_inside_a_blob(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between blobs a peer may take its time; one that stops half-way, wherever, is gone."""
    monkeypatch.setattr(exchange, "ATTEMPT_S", 1000.0)
    with several(1, silence_s=0.2) as (a,):
        a.expect([1, 2])
        with raw_peer(a) as peer:
            peer.sendall(header(1, 1, 1) + b"x")
            time.sleep(0.5)
            assert not a._lost
            peer.sendall(words)
            with pytest.raises(PeerError, match="rank 9 stands still"):
                a.wait([1, 2], S)


# -- other processes --

CHILD = """
import json, sys, time
from ckpt.core.ranks.exchange import Exchange
mine, theirs, nodes = int(sys.argv[1]), 1 - int(sys.argv[1]), json.loads(sys.argv[2])
got = {}
x = Exchange(mine, lambda blob, data: got.update({blob: bytes(data)}))
x.expect(range(0, 100, 2))
print(json.dumps(x.contact), flush=True)
x.connect([json.loads(sys.stdin.readline())], [theirs], nodes, 20)
print("connected", flush=True)
def send(blobs):
    for b in blobs:
        x.send(theirs, b, memoryview(bytes([b]) * (b * 1000)))
"""


@contextlib.contextmanager
def child(code: str, peer: Exchange, nodes: list[int]) -> Iterator[subprocess.Popen[str]]:
    """Rank 1 in a process of its own, connected to `peer` and `peer` to it."""
    process = start_python(
        [sys.executable, "-c", CHILD + code, "1", json.dumps(nodes)],
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
            peer.connect([contact], [1], nodes, 1000.0)
            assert process.stdout.readline() == "connected\n"
            try:
                yield process
            finally:
                process.kill()
    finally:
        assert process.returncode is not None


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_two_processes(nodes: list[int]) -> None:
    """Both send and take; ranks of one node by loopback, others by the addresses of their interfaces."""
    box = Inbox()
    with several(1, box) as (a,):
        if nodes[1] and not a.contact["addresses"]:
            pytest.skip("no interface but loopback is up")
        a.expect(range(1, 100, 2))
        code = "send(range(1, 100, 2)); x.finish_sending(); x.wait(range(0, 100, 2), 20)\n"
        code += "print(got == {b: bytes([b]) * (b * 1000) for b in range(0, 100, 2)}); x.close()"
        with child(code, a, nodes) as process:
            for b in range(0, 100, 2):
                a.send(1, b, memoryview(bytes([b]) * (b * 1000)))
            a.finish_sending()
            a.wait(range(1, 100, 2), S)
            assert process.stdout and process.stdout.readline() == "True\n"
            assert process.wait(S) == 0
        assert box.blobs == {b: bytes([b]) * (b * 1000) for b in range(1, 100, 2)}


@pytest.mark.parametrize("inside", [True, False])
def test_a_peer_that_is_killed(inside: bool) -> None:
    """In the middle of a blob or between two: who waits for it gets PeerError long before the deadline, and who sends
    to it, too."""
    with several(1) as (a,):
        a.expect(range(100))
        first = "x._outgoing[theirs].sock.sendall(bytes.fromhex('01000000000001000000000000000063') + b'x')"
        with child(
            f"send(range(10)); {first if inside else 'pass'}; print('sent', flush=True); time.sleep(60)", a, [0, 0]
        ) as it:
            assert it.stdout and it.stdout.readline() == "sent\n"
            assert eventually(lambda: a._left == 90 and len(a._untouched) == 90 - inside)
            it.send_signal(signal.SIGKILL)
            with pytest.raises(PeerError, match=r"rank 1 .*90 of 100 blobs are missing"):
                a.wait(range(100), S)
            with pytest.raises(PeerError, match="rank 1"):
                while True:
                    a.send(1, 0, memoryview(bytes(1000)))


def test_a_peer_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes nothing holds up its sender for `silence_s`, not for ever; then the connection has ended."""
    monkeypatch.setattr(exchange, "ATTEMPT_S", 1000.0)
    with several(1, silence_s=0.3) as (a,):
        with child("time.sleep(60)", a, [0, 0]) as process:
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(PeerError, match="rank 1 takes nothing more"):
                for b in range(0, 100, 2):
                    a.send(1, b, memoryview(bytes(4 << 20)))
            with pytest.raises(PeerError, match="rank 1 takes nothing more"):
                a.send(1, 98, memoryview(b""))
            process.send_signal(signal.SIGCONT)
            time.sleep(0.3)
            with pytest.raises(PeerError, match="rank 1"):  # what follows a cut blob could not be understood
                a.send(1, 98, memoryview(b""))


# -- what is left behind --


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    gc.collect()
    me = psutil.Process()
    return me.num_threads(), me.num_fds()


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """After close(), however it went, and however often it is called: no thread, no descriptor."""
    monkeypatch.setattr(exchange, "JOIN_S", 1000.0)
    before = held()
    with several(4) as ranks:
        for one in ranks:
            one.expect([0, 1] if one.rank else [])
            link_up(one, *(other for other in ranks if other is not one))
        stranger = socket.create_connection(("127.0.0.1", ranks[0].contact["port"]), S)
        during = held()
        assert during[0] >= before[0] + 16 and during[1] >= before[1] + 28  # negative control: these are seen
        ranks[0].send(1, 0, memoryview(b"x"))
        ranks[2].fail("no reason")
        ranks[3].finish_sending()
        with pytest.raises(PeerError, match="gave up"):
            ranks[3].wait([0, 1], S)
        ranks[3].close()
    stranger.close()
    for one in ranks:
        one.close()
    assert held() <= before and all(now <= then for now, then in zip(held(), before, strict=True))
    with pytest.raises(PeerError):
        ranks[0].send(1, 1, memoryview(b"x"))
