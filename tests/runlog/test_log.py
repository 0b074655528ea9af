"""Tests of the run log: the meaning of its records, who may append, and safety under every interleaving of crashes.

The simulator runs the real log, commit and retention code over a store in which every request may be delayed, killed
before or after it took effect, or lose its reply. Two trainers and a cleaner share one run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.core.checkpoint import commits as commits
from ckpt.core.checkpoint import losses, retention
from ckpt.core.checkpoint.commits import Role
from ckpt.core.checkpoint.read import load_all, verify
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.checkpoint.write import RankSnapshot, WrittenManifest, write_part
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import (
    MAX_NEEDS,
    STEPS,
    CheckpointId,
    DataFile,
    Manifest,
    data_key,
    data_number,
    in_deletion_order,
    index_key,
    is_data,
    manifest_key,
    new_nonce,
    owner,
    rank_of,
    seal,
)
from ckpt.core.log.records import Acquire, Commit, Record, RunState, commit_body, expand, fold, in_history, summary
from ckpt.core.log.run_log import RunLog, record_key
from ckpt.core.writer import parts as settling
from ckpt.errors import (
    AccessError,
    CorruptError,
    FormatError,
    OutcomeUnknownError,
    SaveError,
)
from ckpt.store import ObjectInfo
from ckpt_backends.memory import MemoryStore
from interleave import write_increment
from logs import DIGEST, checkpoint, committed, folded, new_log, record, reopened
from run_files import checkpoint_id

LAYOUT = Layout(
    (TensorSpec("w", "F32", (4,)), TensorSpec("n", "I64", ())),
    {},
    [{"path": [], "kind": "x", "facts": {}, "names": []}],
)


def acquired(term: int, restored: CheckpointId | None = None) -> dict[str, Any]:
    return record(
        "ACQUIRE",
        {"term": term, "nonce": f"{term:08x}", "restored": restored and str(restored)},
        request=f"a{term}",
    )


def kept(of: CheckpointId, request: str) -> Callable[[RunState], Record]:
    return lambda state: Record("KEEP", {"checkpoint": str(of), "note": ""}, request)


async def save(log: RunLog, mine: Acquire, step: int, number: int = 0) -> CheckpointId:
    """Save one whole checkpoint; its bytes contain its checkpoint id."""
    named = CheckpointId(mine.term, step, mine.nonce)
    data = memoryview(f"{mine.nonce}{step:016d}".encode())
    snapshot = RankSnapshot(named, LAYOUT, data, [None])
    await commits.commit(log, mine, [await write_part(log.store, snapshot, numbers=itertools.count(number))])
    return named


# -- fold --


def test_fold_commits_once_and_ends_permanently() -> None:
    """COMMIT makes a checkpoint once; ABORT and PLAN end it permanently, in any order."""
    a, b, c = checkpoint(1, 1), checkpoint(1, 2), checkpoint(1, 3)
    plan = record("PLAN", {"retire": [str(a)], "delete": ["packs/x"]})
    abort = record("ABORT", {"checkpoint": str(b), "reason": ""}, request="abort:b")
    state = folded(acquired(1), committed(a), abort, committed(b), committed(c), plan, committed(a))
    assert set(state.commits) == {c}
    assert (state.retired, state.aborted) == ({a}, {b})
    late = folded(committed(c), record("ABORT", {"checkpoint": str(c), "reason": ""}))
    assert set(late.commits) == {c} and not late.aborted


def aborted(of: CheckpointId, reason: str = "", request: str = "") -> dict[str, Any]:
    return record("ABORT", {"checkpoint": str(of), "reason": reason}, request=request or f"abort:{of}")


def needing(of: CheckpointId, *needs: CheckpointId) -> dict[str, Any]:
    body = committed(of)["body"] | {"needs": [str(need) for need in needs]}
    return record("COMMIT", body, request=f"commit:{of}")


def test_record_lists_bases_of_an_increment() -> None:
    """A COMMIT lists them, and a full checkpoint has no such field. A SNAPSHOT keeps the list."""
    a, b, c = (checkpoint(1, step) for step in (1, 2, 3))
    state = folded(acquired(1), committed(a), committed(b), needing(c, a, b))
    assert [state.commits[one].needs for one in (a, b, c)] == [(), (), (a, b)]
    assert [state.commits[one].full for one in (a, b, c)] == [True, True, False]
    assert "needs" not in commit_body(state.commits[a]) and commit_body(state.commits[a]) == committed(a)["body"]
    assert commit_body(state.commits[c]) == needing(c, a, b)["body"]
    state.next_seq = 8
    assert expand(json.loads(json.dumps(summary(state)))).commits == state.commits


OTHERS = {
    "itself": [checkpoint_id(5, 1, "00000001")],
    "a newer one": [checkpoint_id(1, 2, "00000002")],
    "one twice": [checkpoint_id(1), checkpoint_id(1)],
    "in no order": [checkpoint_id(2), checkpoint_id(1)],
    "too many": [checkpoint_id(step) for step in range(MAX_NEEDS + 1)],
    "a path": ["../../x"],
    "a data file": [f"steps/{checkpoint_id(1)}/rank-00000.safetensors"],
    "numbers": 5,
    "text": checkpoint_id(1),
    "a list of lists": [[checkpoint_id(1)]],
    "nothing": None,
}


@pytest.mark.parametrize("name", OTHERS)
def test_record_with_invalid_bases_is_rejected(name: str) -> None:
    """Records and manifests may list only older checkpoints, each once, in order, up to the limit."""
    of = checkpoint(1, 5 if name != "in the order of text" else 50)
    bad = needing(of)
    bad["body"] = bad["body"] | {"needs": OTHERS[name]}
    state, same = folded(acquired(1)), folded(acquired(1))
    with pytest.raises(CorruptError):
        fold(state, {**bad, "seq": 1})
    assert state == same
    with pytest.raises(CorruptError):
        part_of(of, needs=OTHERS[name]).check("a part")


def part_of(of: CheckpointId, files: Sequence[str] = (), **fields: Any) -> Manifest:
    infos = [DataFile(key, 100, 10, DIGEST) for key in files]
    return Manifest(str(of), 0, 1, Layout((), {}, []).shared, [], b"", infos, **fields)


def test_manifest_may_refer_only_to_older_checkpoints() -> None:
    """A manifest may list older checkpoints, the distance to the last full one, and data files of older checkpoints.
    A full checkpoint lists none."""
    older, other = checkpoint(1, 1), checkpoint(1, 2)
    keys = [data_key(checkpoint(1, 5), 0, 3), data_key(older, 0)]
    part_of(checkpoint(1, 5), keys[:1]).check("a part")
    for needs in ([str(older)], [str(other)], [str(older), str(other)], []):
        part = part_of(checkpoint(1, 5), keys if needs else keys[:1], needs=needs, chain=3 if needs else 0)
        part.check("a part")
        assert Manifest.from_bytes(part.to_bytes(), "a part") == part
    told = json.loads(part_of(older).to_bytes())
    assert not told.keys() & {"needs", "chain", "full"}, "a full one has no fields of increments"
    bad: list[dict[str, Any]] = [
        {"chain": 1}, {"chain": -1, "needs": [str(older)]}, {"chain": 1.0, "needs": [str(older)]},
        {"chain": True, "needs": [str(older)]}, {"files": keys}, {"files": [data_key(checkpoint(2, 1), 0)]},
        {"files": [data_key(checkpoint(1, 6), 0)], "needs": [str(older)]},
    ]  # fmt: skip
    for fields in bad:
        with pytest.raises(CorruptError):
            Manifest.from_bytes(part_of(checkpoint(1, 5), **fields).to_bytes(), "a part")


def test_file_names_contain_checkpoint_rank_and_kind() -> None:
    """The name has the checkpoint id, the rank and the kind. Other names have no owner."""
    of = checkpoint(1, 5)
    assert data_key(of, 7) == f"steps/{of}/rank-00007.safetensors"
    assert data_key(of, 7, 12) == f"steps/{of}/rank-00007-00012.safetensors"
    for number in (0, 1, 99999, 100000):
        key = data_key(of, 7, number)
        assert (owner(key), rank_of(key), data_number(key), is_data(key)) == (of, 7, number, True)
    assert (owner(manifest_key(of, 7)), rank_of(manifest_key(of, 7)), is_data(manifest_key(of, 7))) == (of, 7, False)
    assert (owner(index_key(of)), rank_of(index_key(of)), is_data(index_key(of))) == (of, None, False)
    for name in ("rank-00007-.safetensors", "rank-00007-x.safetensors", "rank-00007-1-1.safetensors", "rank-7.json"):
        assert owner(f"steps/{of}/{name}") is None
    for key in (
        f"steps/{of}",
        f"log/{of}/rank-00007.json",
        f"steps/{of}/x/rank-00007.json",
        "steps/5.1-0/index.safetensors",
    ):
        assert owner(key) is None


def test_files_are_deleted_from_the_index_to_the_data() -> None:
    """An interrupted deletion leaves no folder that has an index and lacks data."""
    of = checkpoint(1, 5)
    keys = [data_key(of, 0), manifest_key(of, 0), data_key(of, 0, 1), index_key(of), manifest_key(of, 1)]
    expected = [[index_key(of)], [manifest_key(of, 0), manifest_key(of, 1)], [data_key(of, 0), data_key(of, 0, 1)]]
    assert in_deletion_order(keys) == expected


@pytest.mark.parametrize(
    "bad",
    [
        acquired(0),
        acquired(10**12),
        record("ACQUIRE", {"term": 2.5, "nonce": "x", "restored": None}),
        record("ACQUIRE", {"term": 2, "nonce": "x", "restored": "../1"}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"world": 0}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"world": 2.0}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"world": (1 << 20) + 1}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"manifests": [[0, DIGEST], [1, DIGEST]]}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"world": 3, "manifests": [[1, DIGEST], [0, DIGEST]]}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"world": 3, "manifests": [[1, DIGEST], [1, DIGEST]]}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"world": 3, "manifests": [[3, DIGEST]]}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"world": 3, "manifests": [[True, DIGEST]]}),
        record("COMMIT", {"checkpoint": str(checkpoint(1, 1))}),
        record("ABORT", {"checkpoint": str(checkpoint(1, 1))}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"manifests": []}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"manifests": [[1, DIGEST]]}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"manifests": [[-1, DIGEST]]}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"manifests": [[0, 0, DIGEST]]}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"index": "../../x"}),
        record("COMMIT", committed(checkpoint(1, 1))["body"] | {"finite": 0}),
        record("PLAN", {"retire": ["x"], "delete": []}),
        record("KEEP", {}),
        record("NONSENSE", {"checkpoint": str(checkpoint(1, 1))}),
    ],
)
def test_impossible_record_leaves_state_unchanged(bad: dict[str, Any]) -> None:
    state, same = folded(acquired(1)), folded(acquired(1))
    with pytest.raises(CorruptError):
        fold(state, {**bad, "seq": 1})
    assert state == same


# -- history --


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_history_excludes_checkpoints_beyond_a_rollback(data: st.DataObject) -> None:
    """Random histories: newest first, no duplicates, nothing beyond any later rollback, the current term complete."""
    saved: list[CheckpointId] = []
    acquires: list[Acquire] = []
    gone: set[CheckpointId] = set()
    for term in range(1, data.draw(st.integers(1, 6)) + 1):
        present = [a for a in saved if a not in gone]
        back = data.draw(st.sampled_from([None, *present]))
        acquires.append(Acquire(term, f"{term:08x}", back))
        if back is not None:
            gone |= {a for a in present if (a.term, a.step) > (back.term, back.step)}
        saved += [checkpoint(term, step) for step in data.draw(st.sets(st.integers(0, 50), max_size=4))]
    expected = sorted((a for a in saved if a not in gone), reverse=True)
    assert in_history(acquires, saved) == expected


# -- the chain --


@pytest.mark.parametrize("remote", [False, True])
def test_denied_append_raises_error_with_description(remote: bool) -> None:
    """In a folder without permission, the error states that nothing was written. In a bucket the outcome is unknown,
    since a reply may have been lost. Neither error names a record type."""

    class Refusing(MemoryStore):
        async def put(self, key: str, data: Any, *, create: bool = False) -> None:
            if key == record_key(1):
                raise AccessError("not allowed: Permission denied")
            await super().put(key, data, create=create)

    async def scenario() -> None:
        store = Refusing()
        store.remote = remote
        log, mine = await new_log(store)
        with pytest.raises(OutcomeUnknownError if remote else AccessError) as raised:
            await log.append(kept(checkpoint(1, 1), "mine"), owner=mine)
        said = (
            "cannot determine whether the note that keeps a checkpoint is"
            if remote
            else "the note that keeps a checkpoint cannot be"
        )
        assert (
            str(raised.value).startswith(said) and "KEEP" not in str(raised.value) and "Permission" in str(raised.value)
        )
        assert (await reopened(store)).state.next_seq == 1

    asyncio.run(scenario())


def test_new_term_skips_terms_of_damaged_records() -> None:
    """Two jobs never get the same term, even if the record of one is lost. The gap is left only once."""

    async def scenario() -> None:
        store = MemoryStore()
        log, first = await new_log(store)
        await log.append(kept(checkpoint(1, 1), "between"), owner=first)
        lost = await commits.acquire(log, new_nonce())
        for seq in (1, 2):
            store.objects[record_key(seq)] = b"{}"
        log = await reopened(store)
        later = [await commits.acquire(log, new_nonce()) for _ in range(3)]
        assert [first.term, lost.term] == [1, 2] and later[0].term > lost.term
        assert [owner.term - later[0].term for owner in later] == [0, 1, 2]

    asyncio.run(scenario())


def test_record_of_newer_version_is_never_skipped() -> None:
    """A second read must not skip it: an older version would fork the chain behind a record it cannot read."""

    async def scenario() -> None:
        store = MemoryStore()
        log, mine = await new_log(store)
        newer = {"seq": 1, "prev": log.state.last, "root": log.root, "term": 1, "id": "n", "type": "NEWER", "body": {}}
        store.objects[record_key(1)] = seal(newer)
        for _ in range(2):
            with pytest.raises(FormatError):
                await log.append(kept(checkpoint(1, 1), "mine"), owner=mine)
        assert record_key(2) not in store.objects

    asyncio.run(scenario())


# -- multi-rank --

WORLD = 3
ROWS = 7  # of "w" on each rank


def share_of(rank: int, world: int = WORLD, *, at: int | None = None, rows: int = ROWS, dtype: str = "F32") -> Layout:
    """Return the layout of one rank's share of a sharded tensor; rank 0 also has a replicated number."""
    start = rank * ROWS if at is None else at
    pieces = (TensorSpec("w", dtype, (rows,), whole=(world * ROWS,), offsets=(start,)),)
    components = [{"path": [], "kind": "x", "facts": {}, "names": ["w", "n"]}]
    if rank == 0:
        return Layout((*pieces, TensorSpec("n", "F32", ())), {}, components, rank, world)
    return Layout(pieces, {}, components, rank, world, elsewhere={"n": ("F32", ())})


def data_of(named: CheckpointId, layout: Layout) -> bytes:
    """Return bytes that contain the checkpoint id and the rank."""
    return f"{named.nonce}{named.step:016d}{layout.rank:04d}".encode().ljust(layout.arrangement.data_size, b".")


async def write_share(
    log: RunLog, mine: Acquire, step: int, layout: Layout, *, number: int = 0, reason: str = "due"
) -> WrittenManifest:
    named = CheckpointId(mine.term, step, mine.nonce)
    snapshot = RankSnapshot(named, layout, memoryview(data_of(named, layout)), [None])
    return await write_part(log.store, snapshot, numbers=itertools.count(number), reason=reason)


@dataclass
class Ranks:
    """The writers of one job, each with its own log over the same store. `appended`: records by rank."""

    store: Any
    mine: Acquire
    logs: list[RunLog]
    appended: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    async def open(cls, world: int = WORLD, store: Any = None) -> Ranks:
        store = MemoryStore() if store is None else store
        _, mine = await new_log(store)
        ranks = cls(store, mine, [])
        for rank in range(world):
            ranks.logs.append(await reopened(Heard(store, rank, ranks.appended)))
        return ranks

    def checkpoint(self, step: int = 1) -> CheckpointId:
        return CheckpointId(self.mine.term, step, self.mine.nonce)

    async def write(self, rank: int, step: int = 1, layout: Layout | None = None, **details: Any) -> WrittenManifest:
        return await write_share(self.logs[rank], self.mine, step, layout or share_of(rank, len(self.logs)), **details)

    async def settle(self, own: WrittenManifest, role: Role | None = None, **details: Any) -> None:
        rank, world = own.manifest.rank, len(self.logs)
        role = role or Role(tuple(range(world)), rank, world)
        await settling.settle(self.logs[rank], lambda: self.mine, own, role, **{"deadline_s": 30.0, **details})

    async def save(self, rank: int, **details: Any) -> None:
        await self.settle(await self.write(rank, **details))

    async def check(self, step: int = 1) -> Commit:
        """Return the checkpoint after checking that it was committed once and is complete."""
        state = (await reopened(self.store)).state
        found = state.commits[self.checkpoint(step)]
        assert found.whole and state.damaged == []
        assert [kind for _, kind in self.appended].count("COMMIT") == len(state.commits)
        assert await verify(self.store, found) == []
        (await load_all(self.store, found)).saved()
        return found

    async def reason(self, step: int = 1) -> str:
        """Return why there is no such checkpoint, as a later reader finds it."""
        state = (await reopened(self.store)).state
        assert self.checkpoint(step) not in state.commits and not state.damaged
        return state.reasons[self.checkpoint(step)]


class Heard:
    """Wraps the store for one rank, and records which log records it appended."""

    def __init__(self, inner: Any, rank: int, appended: list[tuple[int, str]]) -> None:
        self.inner, self.rank, self.appended, self.url = inner, rank, appended, inner.url

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def put(self, key: str, data: Any, *, create: bool = False) -> None:
        await self.inner.put(key, data, create=create)
        if key.startswith("log/"):
            self.appended.append((self.rank, json.loads(bytes(data))["type"]))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make writers poll often, and delay further ranks so long that only the first one commits."""
    monkeypatch.setattr(settling, "POLL_S", (0.001, 0.005))
    monkeypatch.setattr(settling, "STAGGER_S", 1000.0)


def refused(results: list[Any]) -> list[str]:
    """Return the messages of writers that all failed with SaveError."""
    assert all(type(result) is SaveError for result in results), results
    return [str(result) for result in results]


@pytest.mark.usefixtures("hasty")
def test_missing_manifest_aborts_checkpoint_after_deadline() -> None:
    """After the deadline, ABORT names the rank. Writers that wait or come later get the reason."""

    async def scenario() -> None:
        ranks = await Ranks.open()
        waiting = [ranks.settle(await ranks.write(rank), deadline_s=0.1) for rank in (0, 1)]
        said = refused(await asyncio.gather(*waiting, return_exceptions=True))
        assert all("the manifests of ranks 2 did not arrive within 0.1 s" in text for text in said)
        assert "ranks 2 did not arrive" in await ranks.reason()
        said += refused(await asyncio.gather(ranks.save(2), return_exceptions=True))
        assert "was aborted: the manifests of ranks 2" in said[-1]
        assert [kind for _, kind in ranks.appended] == ["ABORT"]
        await asyncio.gather(*(ranks.save(rank, step=2) for rank in range(WORLD)))
        await ranks.check(2)

    asyncio.run(scenario())


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("wrong", ["another attempt", "another rank", "damaged", "empty", "no data file"])
def test_wrong_or_damaged_manifest_does_not_count(wrong: str) -> None:
    """A file with the right name is not enough: there is no checkpoint, and ABORT names the rank without a manifest."""

    async def scenario() -> None:
        ranks = await Ranks.open()
        parts = [await ranks.write(rank) for rank in (0, 1)]
        objects, named = ranks.store.objects, ranks.checkpoint()
        await ranks.write(2)
        await ranks.write(2, step=2)
        key = manifest_key(named, 2)
        if wrong == "no data file":
            del objects[data_key(named, rank=2)]
        else:
            sources = {"another attempt": (ranks.checkpoint(2), 2), "another rank": (named, 1)}
            raw = bytearray(objects[manifest_key(*sources.get(wrong, (named, 2)))])
            raw[len(raw) // 2] ^= wrong == "damaged"
            objects[key] = b"" if wrong == "empty" else bytes(raw)
        waiting = (ranks.settle(own, deadline_s=0.1) for own in parts)
        for text in refused(await asyncio.gather(*waiting, return_exceptions=True)):
            assert "the manifests of ranks 2 did not arrive" in text
        assert "the manifests of ranks 2 did not arrive" in await ranks.reason()

    asyncio.run(scenario())


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("there", ["the same", "changed", "shorter"])
def test_existing_index_must_have_identical_bytes(there: str) -> None:
    """The index is a function of the manifests. Other bytes under its name fail the checkpoint, and are named."""

    async def scenario() -> None:
        ranks = await Ranks.open()
        parts = [await ranks.write(rank) for rank in range(3)]
        index = commits.index_of(parts)
        others = {"the same": index, "changed": index[:-1] + b"x", "shorter": index[:-1]}
        ranks.store.objects[index_key(ranks.checkpoint())] = others[there]
        if there == "the same":
            await ranks.settle(parts[0])
            await ranks.check()
        else:
            with pytest.raises(SaveError, match=index_key(ranks.checkpoint())):
                await ranks.settle(parts[0])
            assert not ranks.logs[0].state.commits

    asyncio.run(scenario())


UNFIT: dict[str, tuple[Layout, str]] = {
    "rows twice": (share_of(2, at=ROWS, rows=2 * ROWS), "do not agree about w: some of it was saved 2 times"),
    "a row twice": (share_of(2, at=2 * ROWS - 1, rows=ROWS + 1), "do not agree about w: some of it was saved 2 times"),
    "a hole": (share_of(2, rows=ROWS - 1), "do not agree about w: some of it was not saved"),
    "another dtype": (share_of(2, dtype="I32"), "w is of shape [21] and dtype"),
    "another shape": (
        Layout((TensorSpec("w", "F32", (ROWS,)),), {}, share_of(2).components, 2, WORLD, {}, {"n": ("F32", ())}),
        "w is of shape",
    ),
    "another form of what others stage": (replace(share_of(2), elsewhere={"n": ("F32", (2,))}), "n is of shape [2]"),
    "a tensor less": (
        replace(share_of(2), components=[{**share_of(2).components[0], "names": ["w"]}]),
        "n is not in the state of rank 2",
    ),
    "of another world": (share_of(2, 4), "the manifest of rank 2 of 3 names rank 2 of 4"),
}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("how", UNFIT)
@pytest.mark.parametrize("late", [False, True])
def test_inconsistent_manifests_are_rejected(how: str, late: bool) -> None:
    """Commit and recovery reject a checkpoint in which a piece exists twice or is missing."""

    async def scenario() -> None:
        ranks = await Ranks.open()
        layout, message = UNFIT[how]
        parts = [await ranks.write(rank, layout=layout if rank == 2 else None) for rank in range(WORLD)]
        if late:
            await commits.recover(ranks.logs[0], ranks.mine)
            message = "incomplete" if how == "of another world" else message
        else:
            waiting = (ranks.settle(own, deadline_s=1000) for own in parts)
            said = refused(await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30))
            assert all(message in text for text in said), said
        assert message in await ranks.reason()

    asyncio.run(scenario())


def test_negative_control_consistent_manifests_are_accepted() -> None:
    """The same check accepts the layouts that the bad ones were made from."""

    async def scenario() -> None:
        ranks = await Ranks.open()
        commits.index_of([await ranks.write(rank) for rank in range(3)])

    asyncio.run(scenario())


# -- disks that only some of the ranks see --

HERE = Role((0, 1), 0, 4)


@pytest.mark.usefixtures("hasty")
def test_node_commits_the_manifests_of_its_ranks() -> None:
    """Each node commits what its own ranks have stored, once, and only when all of them have."""

    async def scenario() -> None:
        ranks = await Ranks.open(4)
        own = await ranks.write(0)
        waiting = asyncio.create_task(ranks.settle(own, HERE))
        await asyncio.sleep(0.05)
        assert not waiting.done() and not ranks.appended
        await asyncio.gather(waiting, ranks.settle(await ranks.write(1), replace(HERE, place=1)))
        assert [kind for _, kind in ranks.appended] == ["COMMIT"]
        (found,) = (await reopened(ranks.store)).state.lineage()
        assert (found.world, found.whole) == (4, False) and [rank for rank, _ in found.manifests] == [0, 1]
        assert await verify(ranks.store, found) == []
        with pytest.raises(CorruptError, match="only 2 of the 4 ranks"):
            (await load_all(ranks.store, found)).saved()

    asyncio.run(scenario())


# -- indexes without a record --


@pytest.mark.parametrize("busy", [True, False])
def test_index_counts_as_lost_only_if_it_stays_unrecorded(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that saves all the time has a new index at each check, whose record follows. An index that stays without a
    record may be a lost checkpoint."""
    monkeypatch.setattr(losses, "RECORDED_S", 0.5)
    monkeypatch.setattr(losses, "PAUSE_S", 0.01)

    async def scenario() -> None:
        ranks = await Ranks.open(1)
        log, step = ranks.logs[0], 1
        ranks.store.objects[index_key(ranks.checkpoint(step))] = b"index"
        reader = await reopened(ranks.store)
        listing = ranks.store.list

        async def list_and_save(prefix: str = "") -> AsyncIterator[ObjectInfo]:
            """List, and then save the step that was listed and begin the next one, as a running job does."""
            nonlocal step
            async for info in listing(prefix):
                yield info
            if busy and prefix == STEPS:
                done = Record("COMMIT", committed(ranks.checkpoint(step))["body"], f"commit:{step}")
                await log.append(lambda _: done, owner=None)
                step += 1
                ranks.store.objects[index_key(ranks.checkpoint(step))] = b"index"

        reader.store.list = list_and_save  # type: ignore[method-assign]
        found = await losses.of_log(reader)
        assert [loss.checkpoints for loss in found] == ([] if busy else [(ranks.checkpoint(1),)])

    asyncio.run(scenario())


# -- recovery --


@dataclass
class Left:
    """The files a crash left of a checkpoint: the ranks that wrote, and the expected record."""

    ranks: tuple[int, ...]
    shared: str  # on a disk that all ranks see
    partial: str  # on a disk that only ranks 0 and 1 see
    damaged: tuple[int, ...] = ()


LEFT: dict[str, Left] = {
    "nothing but a data file": Left((), "ABORT", "ABORT"),
    "some parts": Left((0, 1), "ABORT", "COMMIT"),
    "one part": Left((1,), "ABORT", "COMMIT"),
    "all parts": Left((0, 1, 2), "COMMIT", "COMMIT"),
    "all parts, one damaged": Left((0, 1, 2), "ABORT", "COMMIT", damaged=(1,)),
    "all parts, all damaged": Left((0, 1, 2), "ABORT", "ABORT", damaged=(0, 1, 2)),
}


async def leave(ranks: Ranks, step: int, left: Left) -> None:
    for rank in left.ranks:
        await ranks.write(rank, step)
        if rank in left.damaged:
            key = manifest_key(ranks.checkpoint(step), rank)
            ranks.store.objects[key] = ranks.store.objects[key][:-1]
    if not left.ranks:
        ranks.store.objects[data_key(ranks.checkpoint(step), 0)] = b"half"


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("name", LEFT)
def test_recovery_decides_every_unfinished_checkpoint(name: str, partial: bool) -> None:
    """A complete checkpoint gets COMMIT, others ABORT. If other nodes may have the rest, intact manifests suffice."""

    async def scenario() -> None:
        ranks, left = await Ranks.open(), LEFT[name]
        await leave(ranks, 1, left)
        log = await reopened(ranks.store)
        mine = await commits.acquire(log, new_nonce())
        for _ in range(2):
            done = await commits.recover(log, mine, partial=partial)
            expected = left.partial if partial else left.shared
            state = (await reopened(ranks.store)).state
            found = {"COMMIT": state.commits, "ABORT": state.reasons}
            assert [kind for kind, which in found.items() if ranks.checkpoint() in which] == [expected]
            assert state.next_seq == 3 and not state.damaged
        assert not done.rolled_forward and not done.aborted
        if expected == "COMMIT":
            intact = [rank for rank in left.ranks if rank not in left.damaged]
            assert [rank for rank, _ in state.commits[ranks.checkpoint()].manifests] == intact
            assert state.commits[ranks.checkpoint()].world == WORLD
            assert await verify(ranks.store, state.commits[ranks.checkpoint()]) == []

    asyncio.run(scenario())


# -- increments --

TWO = Layout(
    (TensorSpec("f", "F32", (4,)), TensorSpec("w", "F32", (4,))),
    {},
    [{"path": [], "kind": "x", "facts": {}, "names": ["f", "w"]}],
)


def of_two(mine: Acquire, step: int) -> RankSnapshot:
    data = b"never changes...".ljust(16) + f"{step:016d}".encode()
    return RankSnapshot(CheckpointId(mine.term, step, mine.nonce), TWO, memoryview(data), [None])


@dataclass
class Chain:
    """A run with a full checkpoint, step 1, and increments built on it."""

    store: Any
    log: RunLog
    mine: Acquire
    base: WrittenManifest

    @classmethod
    async def open(cls, store: Any = None) -> Chain:
        log, mine = await new_log(MemoryStore() if store is None else store)
        chain = cls(log.store, log, mine, await write_part(log.store, of_two(mine, 1)))
        await commits.commit(log, mine, [chain.base])
        return chain

    def checkpoint(self, step: int) -> CheckpointId:
        return CheckpointId(self.mine.term, step, self.mine.nonce)

    async def build(self, step: int, base: WrittenManifest | None = None) -> WrittenManifest:
        """Write the manifest of an increment."""
        return await write_increment(self.store, of_two(self.mine, step), base or self.base, ["f"])

    async def lose(self, *steps: int) -> None:
        """Retract the checkpoints of these steps."""
        for step in steps:
            await commits.retract(self.log, self.mine, self.checkpoint(step), "it mixes two moments")

    async def records(self) -> list[str]:
        keys = sorted(key for key in self.store.objects if key.startswith("log/"))
        return [json.loads(self.store.objects[key])["type"] for key in keys]

    async def sound(self) -> list[int]:
        """Return the live steps after checking that each is complete."""
        state = (await reopened(self.store)).state
        assert not state.damaged
        for found in state.commits.values():
            assert await verify(self.store, found) == []
        return sorted(found.step for found in state.commits.values())


def test_copied_increment_needs_no_base_checkpoint() -> None:
    """The copy brought the data files of the base along. It is rejected if such a file may be deleted at any time: when
    its checkpoint has ended there, and no live checkpoint uses the file at commit time."""

    async def scenario() -> None:
        for how in ("unknown", "aborted", "in use", "in use no more", "its own"):
            chain = await Chain.open()
            second, third = await chain.build(2), await chain.build(3)
            store = MemoryStore()
            log, mine = await new_log(store)
            store.objects |= {key: raw for key, raw in chain.store.objects.items() if owner(key) is not None}
            used: dict[CheckpointId, set[str]] = {}
            if how.startswith("in use"):
                await commits.commit(log, mine, [second], used={})
                used = {chain.checkpoint(2): set(second.table.files)}
            if how == "its own":
                await commits.commit(log, mine, [chain.base])
                used = {chain.checkpoint(1): set(chain.base.table.files)}
            else:
                with pytest.raises(SaveError, match="which no live checkpoint uses: the next save"):
                    await commits.commit(log, mine, [third])
            if how not in ("unknown", "its own"):
                await commits.abort(log, mine, chain.checkpoint(1), "no")
            if how == "in use no more":
                await commits.retract(log, mine, chain.checkpoint(2), "no")
            if how in ("aborted", "in use no more"):
                with pytest.raises(SaveError, match=r"which no live checkpoint uses\n"):
                    await commits.commit(log, mine, [third], used=used)
                continue
            found = await commits.commit(log, mine, [third], used=used)
            assert found.needs == (chain.checkpoint(1),) and await verify(store, found) == []
            await commits.recover(log, mine)  # the other checkpoints end there, and their data files stay
            for step in (8, 9):
                last = await save(log, mine, step)
            await retention.retire(log, mine, Keep(last=3), {last})
            assert await verify(store, found) == [] and chain.checkpoint(3) in log.state.commits

    asyncio.run(scenario())


def test_chunk_table_with_other_data_files_is_rejected() -> None:
    """Its use of those files would go unnoticed: loading raises CorruptError, and recovery aborts the checkpoint."""

    async def scenario() -> None:
        chain = await Chain.open()
        own = await chain.build(2)
        part = replace(own.manifest, files=own.manifest.files[:1])
        chain.store.objects[manifest_key(chain.checkpoint(2), 0)] = part.to_bytes()
        with pytest.raises(CorruptError, match="names data files that its manifest does not"):
            await commits.load_manifest(chain.store, chain.checkpoint(2), 0)
        await commits.recover(chain.log, chain.mine)
        assert await chain.sound() == [1]

    asyncio.run(scenario())
