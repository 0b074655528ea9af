"""Division of reads among ranks: a node reads each needed chunk once, and every rank gets what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.core.restore.sources import RankReads, assign
from ckpt.errors import StoreError

QUICK = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
Case = tuple[Any, Any, Any, list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Generate sizes, wants, can_read and nodes, with a reader for every needed chunk."""
    ranks, chunks = draw(st.integers(1, 8)), draw(st.integers(0, 24))
    nodes = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = draw(st.integers(1, 6))  # few patterns, like real states, or many
    pick = np.sort(rng.integers(0, kinds, chunks)) if draw(st.booleans()) else np.arange(chunks)
    columns = max(kinds, chunks)
    wants = rng.random((ranks, columns)) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    can_read = rng.random((ranks, columns)) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    if draw(st.booleans()):  # each node has its own memory or disk
        first = [nodes.index(node) for node in nodes]
        can_read = can_read[first]
    can_read[rng.integers(0, ranks), wants.any(0) & ~can_read.any(0)] = True
    sizes = rng.integers(0, draw(st.sampled_from([1, 2, 4 << 20])), chunks)
    return sizes, wants[:, pick], can_read[:, pick], nodes


def shares_of(case: Case) -> list[RankReads]:
    return [assign(rank, *case) for rank in range(len(case[3]))]


def broken(shares: Sequence[RankReads], case: Case) -> str:
    """Return the first rule that the shares of all ranks break, or ""."""
    _, wants, can_read, nodes = case
    ranks, chunks = wants.shape
    came = np.zeros((ranks, chunks), int)
    expected = np.zeros((ranks, chunks), bool)
    readers: list[list[int]] = [[] for _ in range(chunks)]
    for rank, share in enumerate(shares):
        if len(share.reads) != len(share.recipients) or any(
            (np.diff(b) <= 0).any() for b in (share.reads, share.expects)
        ):
            return "form"
        for chunk, recipients in zip(share.reads.tolist(), share.recipients, strict=True):
            readers[chunk].append(rank)
            if rank in recipients or list(recipients) != sorted(set(recipients)):
                return "recipients"
            came[list(recipients), chunk] += 1
            came[rank, chunk] += wants[rank, chunk]
            if not recipients and not wants[rank, chunk]:
                return "a chunk is read for no rank"
        expected[rank, share.expects] = True
        for chunk, sender in zip(share.expects.tolist(), share.senders.tolist(), strict=True):
            there = dict(zip(shares[sender].reads.tolist(), shares[sender].recipients, strict=True))
            if rank not in there.get(chunk, ()):
                return "a sender reads each chunk expected from it"
    if (came != wants).any():
        return "each rank that wants a chunk gets it once, and no other rank does"
    for rank, share in enumerate(shares):
        if (wants[rank] & ~expected[rank] & ~np.isin(np.arange(chunks), share.reads)).any():
            return "expected and read chunks equal the wanted ones"
        if not wants[rank, share.expects].all() or np.isin(share.expects, share.reads).any():
            return "a rank expects chunks only from other ranks"
    for chunk in range(chunks):
        able = {n for n, can in zip(nodes, can_read[:, chunk], strict=True) if can}
        wanting = {n for n, want in zip(nodes, wants[:, chunk], strict=True) if want}
        at = [nodes[r] for r in readers[chunk]]
        if not all(can_read[r, chunk] for r in readers[chunk]) or len(at) != len(set(at)):
            return "a reader can read, and is the only one of its node"
        if set(at) != wanting & able and not (wanting and not wanting & able and len(at) == 1):
            return "a node that can read a chunk reads it, and no other node does without need"
        for r in readers[chunk]:
            eager = [q for q in range(ranks) if nodes[q] == nodes[r] and wants[q, chunk] and can_read[q, chunk]]
            if eager and r not in eager:
                return "a rank that wants a chunk reads it"
    return ""


@QUICK
@given(cases())
def test_each_rank_gets_each_needed_blob_once(case: Case) -> None:
    """Each rank gets every needed chunk once from a rank that can read it. A node reads a chunk at most once."""
    assert broken(shares_of(case), case) == ""


def ddp(ranks: int, chunks: int, per_node: int, seed: int = 0) -> Case:
    """Return a case in which all ranks want and can read all chunks."""
    sizes = np.random.default_rng(seed).integers(1, 4 << 20, chunks)
    everything = np.ones((ranks, chunks), bool)
    return sizes, everything, everything, [rank // per_node for rank in range(ranks)]


def test_negative_control_broken_shares_are_found() -> None:
    """Each rule is broken once, and `broken` reports it."""
    case = ddp(4, 40, 2)
    good = shares_of(case)
    first = good[0]
    assert broken(good, case) == ""
    worse = [
        replace(first, recipients=((), *first.recipients[1:])),  # a rank is forgotten
        replace(first, recipients=((1, 2), *first.recipients[1:])),  # a rank gets it twice
        replace(first, recipients=((0, 1), *first.recipients[1:])),  # to itself
        replace(first, reads=first.reads[1:], recipients=first.recipients[1:]),  # one is not read
        replace(first, expects=first.expects[1:], senders=first.senders[1:]),  # one comes that is not expected
        replace(first, senders=first.senders ^ 3),  # a different sender is expected
        replace(first, expects=np.arange(40), senders=np.ones(40, np.int64)),  # a rank expects its own chunks
        replace(first, reads=first.reads[::-1]),
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


@pytest.mark.parametrize("per_node", [1, 8])
def test_equal_wants_give_equal_loads(per_node: int) -> None:
    """If all ranks want and can read all chunks, each reads an equal share of the bytes, to within one chunk."""
    case = ddp(8, 1000, per_node)
    sizes = case[0]
    for share in shares_of(case):
        assert abs(sizes[share.reads].sum() - sizes.sum() / per_node) <= sizes.max()
        assert (np.diff(share.reads) == 1).all()


def test_error_counts_blobs_that_no_rank_can_read() -> None:
    """A chunk that no rank wants needs no reader."""
    sizes, wants, can_read, nodes = ddp(2, 10, 2)
    can_read = can_read.copy()
    can_read[:, 3:6] = False
    with pytest.raises(StoreError, match=r"no rank can read 3 of the requested tensor pieces"):
        assign(0, sizes, wants, can_read, nodes)
    wants = wants.copy()
    wants[:, 3:6] = False
    assert broken(shares_of((sizes, wants, can_read, nodes)), (sizes, wants, can_read, nodes)) == ""
