"""Every field of the format, forged by an expert attacker: all digests are valid, but the content is malicious.

See `forgery`. A restore, a load and a writer must use the older checkpoint or raise an error of ours, in bounded
time and memory.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import random
import struct
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import inside
from ckpt.core.format.boxes import Box
from ckpt.core.format.digest import chunk_digest, file_digest
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import (
    CheckpointId,
    Manifest,
    SharedLayout,
    canonical,
    manifest_key,
    press,
)
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.table import COLUMNS as COLUMNS_OF
from ckpt.core.format.table import FILE, SavedShard, Table, columns_of
from ckpt.core.format.values import decode
from ckpt.core.log.run_log import record_key
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
)
from forgery import (
    Change,
    Json,
    Objects,
    Run,
    confined,
    genuine,
    mutate,
    of_two,
    put,
    restored,
    some_value,
    survives,
    taken_over,
    verified,
)
from inside import forge, opened_part, resealed
from processes import run_script
from run_files import data_key, step_of

__all__ = ["genuine", "of_two"]  # fixtures
pytestmark = pytest.mark.timeout(60)  # a hang is a failure


# -- manifests --


def component(key: str, value: Json) -> Change:
    def change(document: Json) -> None:
        document["layout"]["components"][0][key] = value

    return change


def field(key: str, value: Json) -> Change:
    return lambda document: document.update({key: value})


def of_layout(key: str, value: Json) -> Change:
    return lambda document: document["layout"].update({key: value})


def first_file(**changes: Json) -> Change:
    return lambda document: document["files"][0].update(changes)


def every_value(value: Json) -> Change:
    return lambda document: document.update(values=[value for _ in document["values"]])


def nested(depth: int, inner: Json = 0) -> Json:
    for _ in range(depth):
        inner = [inner]
    return inner


def nested_keys(depth: int) -> Json:
    inner: Json = "key"
    for _ in range(depth):
        inner = {"$": "dict", "v": [[inner, 0]]}
    return inner


EVIL_PARTS: dict[str, Change] = {
    "alias of nothing": of_layout("aliases", {"x": "nothing"}),
    "alias of an alias": of_layout("aliases", {"x": "y", "y": "x"}),
    "no components": of_layout("components", []),
    "component without a path": lambda d: d["layout"]["components"][0].pop("path"),
    "component of another kind": component("kind", "stateful"),
    "component with unknown tensors": component("names", ["nothing"]),
    "values are all null": every_value(None),
    "values with odd state": every_value({"groups": [], "state": [[[], [], 1]]}),
    "value with an unknown tag": some_value({"$": "os.system", "v": "id"}),
    "float of the wrong size": some_value({"$": "float", "v": "00"}),
    "scalar of objects": some_value({"$": "scalar", "dtype": "|O", "v": "00" * 8}),
    "scalar of a huge type": some_value({"$": "scalar", "dtype": "<V999999999", "v": "00"}),
    "deep list": some_value(nested(400)),
    "deep keys": some_value(nested_keys(150)),
    "tensor of an unknown name": some_value({"$": "tensor", "name": "nothing"}),
    "array of objects": some_value({"$": "ndarray", "name": "meta.a", "dtype": "|O", "shape": [4]}),
    "array of a huge shape": some_value({"$": "ndarray", "name": "meta.a", "dtype": "<f8", "shape": [2**62, 2**62]}),
    "array of another size": some_value({"$": "ndarray", "name": "meta.a", "dtype": "<U1000", "shape": [4]}),
    "world of two": field("world", 2),
    "huge world": field("world", 10**12),
    "another rank": field("rank", 1),
    "id of another step": lambda d: d.update(checkpoint=d["checkpoint"].replace("020.", "010.")),
    "id is a path": field("checkpoint", "../../etc"),
    "no data files field": lambda d: d.pop("files"),
    "features are a text": field("features", "sparse"),
    "content is a text": field("content", "all"),
    "more parents than a run can have": field("parents", ["root/000000001.1-00000000"] * 1000),
    "missing field": lambda d: d.pop("world"),
    "data file outside": first_file(key="../../outside"),
    "data file is absolute": first_file(key="/etc/passwd"),
    "data file with a newline": lambda d: d["files"][0].update(key=d["files"][0]["key"] + "\n"),
    "data file is a log record": first_file(key="log/000000000000.json"),
    "data file of another size": first_file(size=10),
    "data file of a huge size": first_file(size=2**70),
    "header beyond the data file": first_file(header_size=2**40),
    "data file in arabic digits": lambda d: d["files"][0].update(key=d["files"][0]["key"].replace("1-", "\u0661-", 1)),
    "missing data file": lambda d: d["files"][0].update(key=d["files"][0]["key"].replace("0.sa", "0-00007.sa")),
}  # fmt: skip


OTHER_STATES = ("component of another kind", "kind of another", "more groups")
"""Changes that give an intact checkpoint of another state: only a restore into this one detects them."""


NEWER: dict[str, Change] = {
    "an unknown field": field("exec", "print()"),
    "a data file with an unknown field": first_file(exec=1),
    "info, parents and content": lambda d: d.update(
        info={"lr": 1}, parents=["root/000000001.1-00000000"], content={"only": ["model.*"]}
    ),
    "an unknown feature": field("features", ["sparse"]),
}


@pytest.mark.parametrize("name", NEWER)
def test_reader_ignores_unknown_fields_but_not_features(genuine: Run, name: str, tmp_path: Path) -> None:
    """`features` lists what a reader must support. The error names the feature. No older step is restored."""
    folder = put(forge(genuine, manifest=NEWER[name]), tmp_path / "run")
    if name == "an unknown feature":
        with pytest.raises(FormatError, match=r"'sparse'.*upgrade"):
            restored(folder)
    else:
        assert restored(folder) == 20
    survives(folder, restore=False)


# -- tables --


def column(name: str, value: Callable[[Any], Any]) -> Change:
    return lambda columns: columns.update({name: value(columns[name].copy())})


def put_at(index: int, value: int) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array.reshape(-1)[index] = value
        return array

    return change


def text(value: str | bytes) -> Callable[[Any], Any]:
    return lambda array: np.frombuffer(value if isinstance(value, bytes) else value.encode(), np.uint8)


EVIL_TABLES: dict[str, Change] = {
    "offset beyond the data file": column("offset", put_at(0, 10**9)),
    "offset of 2**63 - 1": column("offset", put_at(0, 2**63 - 1)),
    "offset into another tensor": column("offset", lambda a: np.roll(a, 1)),
    "length of 2**40": lambda c: (column("length", put_at(0, 2**40))(c), column("stored", put_at(0, 2**40))(c)),
    "unknown codec": column("codec", put_at(0, 1)),
    "data file number beyond": column("file", put_at(0, 7)),
    "data files outside": column("files", text('["../../outside"]')),
    "data files with a newline": column("files", text('["steps/000000001.1-00000000/rank-00000.safetensors\\n"]')),
    "data files of numbers": column("files", text("[5]")),
    "data files nested": column("files", text("[" * 10**6)),
    "data files that are missing": column("files", text('["steps/000000001.1-00000000/rank-00000.safetensors"]')),
    "names not UTF-8": column("names", put_at(0, 255)),
    "name ends that fall": column("name_ends", put_at(0, 10**6)),
    "dims below zero": column("dims", put_at(0, -1)),
    "dims too many": column("dim_ends", put_at(0, 1)),
    "shards outside": lambda c: column("dims", lambda a: a + 1)(c),
    "unknown dtype": column("dtypes", put_at(0, 250)),
    "chunk ends falling": column("chunk_ends", put_at(0, 10**6)),
    "digests too few": column("digest", lambda a: a[:-1]),
    "other digests": column("digest", lambda a: a ^ 1),
    "no shards": lambda c: c.update({k: v[:0] for k, v in c.items() if k != "files"}),
    "no columns": lambda c: c.clear(),
}


def no_column(name: str) -> Change:
    return lambda columns: columns.pop(name)


WRONG_KINDS: dict[str, Callable[[Any], Any]] = {
    "floats": lambda a: a.astype(np.float64),
    "halves": lambda a: a.astype(np.float16),
    "unsigned": lambda a: a.astype(np.uint64),
    "complex": lambda a: a.astype(np.complex64),
    "a grid": lambda a: a.reshape(1, -1),
    "one number": lambda a: np.resize(a, ()),
    "one more": lambda a: np.concatenate([a.reshape(-1), a.reshape(-1)[-1:]]),
}
COLUMNS = (
    "names", "name_ends", "dtypes", "accelerated", "ranks", "instances", "dims", "dim_ends", "chunk_ends", "file",
    "offset", "stored", "length", "codec", "base", "digest", "stored_digest", "files",
)  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_column_of_another_type_raises_corrupt_error(genuine: Run, name: str, tmp_path: Path) -> None:
    """A column that is missing or has another dtype, shape or length raises CorruptError or gives an equal table. The
    file stores no dtypes, so values of another type with the same number of bytes are just other numbers."""
    objects, checkpoint = genuine
    raw = inside.table_in(objects[manifest_key(checkpoint, 0)])
    whole = Table.from_bytes(raw, "the table")
    for kind, change in {"missing": None, **WRONG_KINDS}.items():
        columns = columns_of(raw, "a table")
        if change is None:
            del columns[name]
        else:
            was, columns[name] = columns[name], np.ascontiguousarray(change(columns[name]))
            if columns[name].nbytes == was.nbytes and columns[name].tobytes() != was.tobytes():
                continue
        try:
            found = Table.from_bytes(FILE.to_bytes(columns), kind)
        except CorruptError:
            continue
        assert found.shards == whole.shards and found.files == whole.files, kind
        assert all(np.array_equal(getattr(found, c), getattr(whole, c)) for c in ("offset", "stored", "digest", "file"))
    folder = put(forge(genuine, columns=no_column(name)), tmp_path / "run")
    assert restored(folder) == 10


def test_overlapping_chunks_match_their_digests(genuine: Run, tmp_path: Path) -> None:
    """Two shards may share bytes, as with deduplication. Memory use stays within the declared shapes."""

    def overlap(columns: Json) -> None:
        sizes = columns["stored"]
        a, b = next((i, j) for i in range(len(sizes)) for j in range(i + 1, len(sizes)) if sizes[i] == sizes[j] > 0)
        columns["offset"][a], columns["digest"][a] = columns["offset"][b], columns["digest"][b]

    folder = put(forge(genuine, columns=overlap), tmp_path / "run")
    assert restored(folder) == 20
    survives(folder, restore=False)


# -- multi-rank checkpoints --


def of_kind(kind: str, **changes: Json) -> Change:
    """Change the facts of a component."""

    def change(document: Json) -> None:
        next(c for c in document["layout"]["components"] if c["kind"] == kind)["facts"].update(changes)

    return change


def of_optimizer(**changes: Json) -> Change:
    def change(document: Json) -> None:
        at = [c["kind"] for c in document["layout"]["components"]].index("optimizer")
        document["values"][at].update(changes)

    return change


def other_form(form: Json) -> Change:
    def change(document: Json) -> None:
        found = document["layout"]["forms"]
        found[next(iter(found))] = form

    return change


EVIL_SHARES: dict[str, Change] = {
    "instances of a rank beyond": of_layout("instances", {"model.weight": 2}),
    "form of another shape": other_form(["F32", [7, 7]]),
    "form of another dtype": other_form(["C128", []]),
    "form of a huge shape": other_form(["F32", [2**40, 2**40]]),
    "forms are a list": of_layout("forms", [["x", "F32"]]),
    "no forms": lambda d: d["layout"].pop("forms"),
    "aliases to unknown tensors": of_layout("aliases", {"x": "nothing"}),
    "components that miss shared tensors": lambda d: d["layout"]["components"][0].update(names=[]),
    "no components": lambda d: (of_layout("components", [])(d), field("values", [])(d)),
    "part of the other rank": field("rank", 0),
    "part of three ranks": field("world", 3),
    "values of another number": field("values", []),
}  # fmt: skip


ODD_COMPONENTS: dict[str, Change] = {
    "groups a number": of_kind("optimizer", params=5),
    "groups of unknown tensors": of_kind("optimizer", params=[["nothing"]]),
    "more groups": of_kind("optimizer", params=[[], [], []]),
    "with state a number": of_kind("optimizer", with_state=5),
    "values' groups a number": of_optimizer(groups=5),
    "kind of another": lambda d: [c.update(kind="plain") for c in d["layout"]["components"]],
    "all optimizers": lambda d: [c.update(kind="optimizer") for c in d["layout"]["components"]],
    "paths swapped": lambda d: d["layout"]["components"].reverse(),
    "own instances of everything": lambda d: d["layout"].update(instances=dict.fromkeys(d["layout"]["forms"], 1)),
}


@pytest.mark.parametrize("name", ODD_COMPONENTS)
def test_inconsistent_components_raise_our_errors(of_two: Run, name: str, tmp_path: Path) -> None:
    """A rank's data about a module or an optimizer is merged with that of the others: it is accepted or skipped."""
    folder = put(forge(of_two, rank=1, manifest=ODD_COMPONENTS[name]), tmp_path / "run")
    assert restored(folder) == 20 or verified(folder) or name in OTHER_STATES
    survives(folder, restore=False)


def cut_piece(which: int, value: int) -> Change:
    """Change the first number of the shape (0), the offsets (1) or the sizes (2) of the first piece of a tensor."""

    def change(columns: Json) -> None:
        for start, end in itertools.pairwise([0, *columns["dim_ends"].tolist()]):
            k = (end - start) // 3
            if k and (columns["dims"][start : start + k] != columns["dims"][start + 2 * k : end]).any():
                columns["dims"][start + which * k] = value
                return
        raise AssertionError("no piece")

    return change


EVIL_INDEXES: dict[str, Change] = {
    "instances of a missing rank": column("instances", lambda a: a + 1),
    "one instance": column("instances", put_at(0, 1)),
    "no instances": lambda c: c.pop("instances"),
    "huge ranks": column("ranks", lambda a: a + 10**9),
    "pieces moved": column("dims", lambda a: a[::-1].copy()),
    "a whole tensor smaller than the piece": cut_piece(0, 1),
    "a piece beyond its tensor": cut_piece(1, 2**40),
    "a piece at the offset of another": cut_piece(1, 0),
    "an invalid accelerator": column("accelerated", put_at(0, 2)),
}


def in_body(**changes: Json) -> Change:
    return lambda body: body.update(changes)


def cut_at(run: Run, byte: int) -> Change:
    """Split a chunk of eight-byte numbers of the newest checkpoint in two, with valid digests."""
    file = run[0][data_key(run[1])]

    def change(columns: Json) -> None:
        at = columns["dtypes"].tolist().index(1)  # each tensor before it has one chunk
        start, length = int(columns["offset"][at]), int(columns["length"][at])
        for key in ("file", "offset", "stored", "length", "codec", "base", "digest"):
            columns[key] = np.insert(columns[key], at, columns[key][at], axis=0)
        for i, (low, high) in enumerate([(start, start + byte), (start + byte, start + length)], at):
            columns["offset"][i] = low
            columns["stored"][i] = columns["length"][i] = high - low
            columns["digest"][i] = np.frombuffer(chunk_digest(file[low:high]), np.uint8)
        columns["chunk_ends"][at:] += 1

    return change


@pytest.mark.parametrize(("byte", "expected"), [(16, 20), (8, 20), (3, 10), (12, 10)])
def test_chunk_must_end_at_an_element(genuine: Run, byte: int, expected: int, tmp_path: Path) -> None:
    """Chunks of eight-byte numbers with any other length are rejected, since no reader could place them."""
    folder = put(forge(genuine, columns=cut_at(genuine, byte)), tmp_path / "run")
    assert restored(folder, exact=True) == expected
    survives(folder, restore=False)


EVIL_WORLDS: dict[str, Change] = {
    "a world of one": in_body(world=1),
    "a world of a million": in_body(world=1 << 20),
    "the other part": lambda body: body.update(manifests=body["manifests"][1:]),
    "a part twice": lambda body: body.update(manifests=[body["manifests"][0]] * 2),
    "parts in another order": lambda body: body["manifests"].reverse(),
    "parts swapped": lambda body: body.update(manifests=[[0, body["manifests"][1][1]], [1, body["manifests"][0][1]]]),
    "a part of a rank beyond": lambda body: body["manifests"][1].__setitem__(0, 2),
    "index of one part": lambda body: body.update(index="0" * 64),
}


@pytest.mark.parametrize("name", EVIL_WORLDS)
def test_evil_commit_of_two_ranks_is_skipped(of_two: Run, name: str, tmp_path: Path) -> None:
    """A record lists wrong manifests. If only its index is missing, the chunk tables are sufficient."""
    folder = put(forge(of_two, body=EVIL_WORLDS[name]), tmp_path / "run")
    assert restored(folder) == (20 if name == "index of one part" else 10)
    survives(folder, restore=False)


@pytest.mark.parametrize("kind", ["COMMIT", "ABORT"])
def test_forged_records_change_no_checkpoint(of_two: Run, kind: str, tmp_path: Path) -> None:
    """No record undoes a COMMIT or creates a checkpoint without files."""
    body = json.loads(of_two[0][max(k for k in of_two[0] if k.startswith("log/"))])["body"] | {"reason": "x" * 10**6}
    objects = appended(of_two, type=kind, body={**body, "world": 3}, id="other")
    folder = put(objects, tmp_path / "run")
    assert restored(folder) == 20
    survives(folder, restore=False)
    nobody = {**body, "checkpoint": str(CheckpointId(of_two[1].term, 30, of_two[1].nonce))}
    folder = put(appended(of_two, type=kind, body=nobody), tmp_path / "run")
    assert restored(folder) == 20
    survives(folder, restore=False)


def test_commit_of_many_manifests_uses_bounded_resources(of_two: Run, tmp_path: Path) -> None:
    """Missing manifests are neither all read at the same time nor one by one forever."""
    parts = [[rank, "0" * 64] for rank in range(30_000)]
    folder = put(forge(of_two, body=in_body(manifests=parts, world=len(parts))), tmp_path / "run")
    before = resident()
    assert restored(folder) == 10
    assert resident() - before < 300 << 20
    survives(folder)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def tangled(count: int, dimensions: int) -> list[Box]:
    dice = random.Random(1)
    starts = [tuple(dice.randrange(400) for _ in range(dimensions)) for _ in range(count)]
    return [(at, tuple(dice.randrange(300, 600) for _ in at)) for at in starts]


@pytest.mark.parametrize(("count", "dimensions"), [(20, 20), (1000, 3)])
def test_tangled_boxes_raise_an_error_within_seconds(count: int, dimensions: int) -> None:
    """The boxes make the check for overlaps as slow as possible: it raises CorruptError within seconds."""
    boxes, shape = tangled(count, dimensions), (1000,) * dimensions
    specs = tuple(TensorSpec("x", "U8", size, whole=shape, offsets=at) for at, size in dict(boxes).items())
    columns = {name: np.zeros(0, np.int64) for name in ("file", "offset", "stored", "length", "codec", "base")}
    shards = tuple(SavedShard("x", "U8", shape, at, size) for at, size in boxes)
    digests = {name: np.zeros((0, 16), np.uint8) for name in ("digest", "stored_digest")}
    table = Table(shards, np.zeros(count + 1, np.int64), files=(), **digests, **columns)
    started = time.process_time()
    with pytest.raises(CorruptError, match="do not agree about x"):
        SavedState([Layout(specs, {}, [])], [[]], [table])
    assert time.process_time() - started < 30, "a bound, not a measure: without one it takes days"


def zip_of(inner: bytes) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr("archive/data.pkl", inner)
    return raw.getvalue()


def header(entries: str | bytes, tail: bytes = b"") -> bytes:
    entries = entries if isinstance(entries, bytes) else entries.encode()
    return struct.pack("<Q", len(entries)) + entries + tail


def entry(dtype: str, shape: str, ends: str) -> bytes:
    return header(f'{{"names":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{ends}}}}}', bytes(64))


EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
RAW_TABLES: dict[str, bytes] = {
    "nothing": b"",
    "header of 2**63": struct.pack("<Q", 2**63) + b"{}",
    "deep header": header("[" * 10**6),
    "header of 20 MB": header("{" + " " * (20 << 20) + "}"),
    "many entries": header("{" + ",".join(f'"{i}":{EMPTY}' for i in range(10**5)) + "}"),
    "huge shape": entry("U8", f"[{2**62},{2**62}]", "[0,64]"),
    "offsets beyond": entry("U8", "[1000000000]", "[0,1000000000]"),
    "unknown dtype": entry("PICKLE", "[64]", "[0,64]"),
}  # fmt: skip


# -- the log --


EVIL_COMMITS: dict[str, Change] = {
    "world of zero": in_body(world=0),
    "huge world": in_body(world=10**12),
    "no parts": in_body(manifests=[]),
    "part of a huge rank": in_body(manifests=[[10**4000, "0" * 64]]),
    "part with a path for a digest": in_body(manifests=[[0, "../../outside"]]),
    "index is a path": in_body(index="../../../../etc/passwd"),
    "id is a path": in_body(checkpoint="../../x"),
    "id of a huge term": in_body(checkpoint="000000020." + "9" * 4000 + "-00000000"),
    "missing": lambda body: body.clear(),
}


EVIL: dict[str, tuple[str, Iterable[str], Callable[[Run, str], Objects]]] = {
    "manifest": ("genuine", EVIL_PARTS, lambda run, name: forge(run, manifest=EVIL_PARTS[name])),
    "table": ("genuine", EVIL_TABLES, lambda run, name: forge(run, columns=EVIL_TABLES[name])),
    "bytes of a table": ("genuine", RAW_TABLES, lambda run, name: forge(run, table=RAW_TABLES[name])),
    "commit": ("genuine", EVIL_COMMITS, lambda run, name: forge(run, body=EVIL_COMMITS[name])),
    "manifest of a rank": ("of_two", EVIL_SHARES, lambda run, name: forge(run, rank=1, manifest=EVIL_SHARES[name])),
    "table of a rank": ("of_two", EVIL_INDEXES, lambda run, name: forge(run, rank=1, columns=EVIL_INDEXES[name])),
}


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, (_, names, _) in EVIL.items() for name in names])
def test_forged_checkpoint_is_skipped(what: str, name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The older checkpoint is restored, `verify` reports the newest, and other readers raise only our own errors."""
    fixture, _, forged = EVIL[what]
    folder = put(forged(request.getfixturevalue(fixture), name), tmp_path / "run")
    assert restored(folder) == 10
    if what not in ("commit", "bytes of a table"):
        assert verified(folder) or name in OTHER_STATES
    survives(folder, restore=False)


def appended(run: Run, **fields: Json) -> Objects:
    """Return the run with one more record, with a valid chain and digest."""
    objects = dict(run[0])
    last = max(k for k in objects if k.startswith("log/"))
    before = json.loads(objects[last])
    record = {**before, "seq": before["seq"] + 1, "prev": file_digest(objects[last]), "id": "evil", **fields}
    objects[record_key(before["seq"] + 1)] = resealed(record)
    return objects


def half(**changes: Json) -> Json:
    """Return the body of a record with one of two ranks' manifests, for a checkpoint without files."""
    body = {"checkpoint": "000000030.1-00000000", "world": 2, "manifests": [[0, "0" * 64]], "index": "0" * 64}
    return {**body, "finite": None, "reason": "due", "time": 0.0, **changes}


EVIL_RECORDS: dict[str, dict[str, Json]] = {
    "type is a list": {"type": ["COMMIT"]},
    "of a newer version": {"type": "MERGE", "body": {}},
    "snapshot": {"type": "SNAPSHOT", "body": {"state": {}}},
    "body is null": {"body": None},
    "sequence is a fraction": {"seq": 3.0},
    "other root": {"root": "0" * 32},
    "other chain": {"prev": "0" * 64},
    "term of 10**30": {"type": "ACQUIRE", "body": {"term": 10**30, "nonce": "0" * 8, "restored": None}},
    "restored from a path": {"type": "ACQUIRE", "body": {"term": 2, "nonce": "0" * 8, "restored": "../x"}},
    "deletes outside": {"type": "PLAN", "body": {"retire": [], "delete": ["../../outside", "/etc/passwd"]}},
    "keeps null": {"type": "KEEP", "body": {"checkpoint": None}},
    "aborts a list": {"type": "ABORT", "body": {"checkpoint": []}},
    "commits after the last year": {"type": "COMMIT", "body": half(time=1e300)},
    "commits nothing": {"type": "COMMIT", "body": {}},
    "commits a rank twice": {"type": "COMMIT", "body": half(manifests=[[1, "0" * 64]] * 2)},
}


@pytest.mark.parametrize("name", EVIL_RECORDS)
def test_evil_record_does_not_hide_checkpoints(genuine: Run, name: str, tmp_path: Path) -> None:
    """The newest checkpoint is restored and the run can continue. Only a newer record type raises FormatError."""
    fields = EVIL_RECORDS[name]
    folder = put(appended(genuine, **fields), tmp_path / "run")
    (tmp_path / "outside").write_text("x")
    if "type" in fields and fields["type"] not in ("ACQUIRE", "COMMIT", "PLAN", "KEEP", "ABORT", "SNAPSHOT"):
        with pytest.raises(FormatError):
            restored(folder)
        return
    assert restored(folder) == 20
    with confined(folder):
        deleted = inside.run(taken_over(folder))
    assert (tmp_path / "outside").exists()
    assert all(step_of(key) == 10 for key in deleted)


@pytest.mark.parametrize(
    "name",
    [
        "steps/{0}/rank-9999999.json", "steps/{0}/rank-x.json", "steps/{0}/rank-00000-99999.safetensors",
        "steps/{0}/more/rank-00000.json", "steps/x/index.safetensors",
    ],
)  # fmt: skip
def test_stray_file_does_not_block_a_run(of_two: Run, name: str, tmp_path: Path) -> None:
    """A stray file of a checkpoint, or of an attempt that never became one, is ignored when the run is opened."""
    for checkpoint in (of_two[1], CheckpointId(1, 30, "00000000")):
        folder = put({**of_two[0], name.format(checkpoint): b"{}"}, tmp_path / "run")
        assert restored(folder) == 20
        inside.run(taken_over(folder))


# -- sparse and oversized files --


BOUNDED = """
import json, os, pathlib, resource, sys
import forgery, inside
from ckpt.errors import CheckpointError
folder = pathlib.Path(sys.argv[1])
size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30),) * 2)
for name in sorted(p.name for p in folder.iterdir()):
    for act in (forgery.restored, forgery.loaded, lambda f: inside.run(forgery.taken_over(f))):
        try:
            act(folder / name)
        except CheckpointError:
            pass
    print(name, "done")
"""


def test_memory_is_bounded_for_forged_sizes(genuine: Run, tmp_path: Path) -> None:
    """A process with 1 GiB beyond its imports handles the worst input: sparse files, bombs and false sizes."""
    runs = tmp_path / "runs"
    objects, checkpoint = genuine
    sparse = {
        "a part": manifest_key(checkpoint, 0),
        "a record": record_key(2),
        "the format": "FORMAT.json",
        "a data file": data_key(checkpoint, 0),
    }
    for name, key in sparse.items():
        folder = put(forge(genuine), runs / f"1 TiB of {name}".replace(" ", "-"))
        os.truncate(folder / key, 1 << 40)
    lies = {
        "shape": forge(genuine, columns=column("dims", put_at(0, 2**40))),
        "length": forge(genuine, columns=EVIL_TABLES["length of 2**40"]),
        "world": forge(genuine, manifest=field("world", 10**12)),
        "empty-lists": forge(genuine, raw_part=b'{"a":[' + b"[]," * (1 << 20) + b"[]]}"),
        "record": {**objects, record_key(2): b"[" * (8 << 20)},
        "header": forge(genuine, table=RAW_TABLES["header of 20 MB"]),
        "pack-in-parts": forge(genuine, manifest=first_file(size=1 << 40, header_size=100 << 20)),
    }
    for name, forged in lies.items():
        put(forged, runs / name)
    twice = put(forge(genuine, columns=repeated), runs / "a-tensor-of-petabytes")
    assert (twice / "FORMAT.json").exists()
    result = run_script(BOUNDED, runs)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("done") == len(sparse) + len(lies) + 1


def repeated(columns: Json) -> None:
    """Return a table that builds a huge tensor from many references to one small chunk."""
    count = 1 << 14
    columns["dims"][0] *= 1
    first = int(columns["chunk_ends"][0])
    for key in ("file", "offset", "stored", "length", "codec", "base"):
        columns[key] = np.concatenate([np.repeat(columns[key][:first], count), columns[key][first:]])
    columns["digest"] = np.concatenate([np.repeat(columns["digest"][:first], count, axis=0), columns["digest"][first:]])
    columns["chunk_ends"] += first * (count - 1)


def test_oversized_tensor_raises_checkpoint_error(tmp_path: Path) -> None:
    """A consistent but false size raises our error, not a RuntimeError of torch."""
    from ckpt.core.state.tensors import empty

    with pytest.raises(CheckpointError, match="no memory for x"):
        empty(TensorSpec("x", "F64", (2**55,)), "cpu")


# -- a corpus of mutations --


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_layouts_and_values(of_two: Run, data: st.DataObject) -> None:
    """Only the parsers run, which is faster than a restore."""
    document = opened_part(of_two[0][manifest_key(of_two[1], 1)])
    subject = data.draw(st.sampled_from([document["layout"], document["values"]]))
    mutate(data.draw, subject)
    with contextlib.suppress(CheckpointError):
        Layout.of_manifest(SharedLayout(text=press(canonical(subject))), 1, 2, ())
    with contextlib.suppress(CheckpointError):
        decode(subject, lambda reference: None)


@given(raw=st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_corrupt_error(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        Table.from_bytes(raw, "rubbish")


def pressed(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


FRAME = zstandard.ZstdCompressor(write_content_size=True)
ODD_LAYOUTS: dict[str, Any] = {
    "a list of its own": [],
    "nothing": "",
    "a frame that does not say its size": pressed(zstandard.ZstdCompressor(write_content_size=False).compress(b"{}")),
    "no JSON": pressed(FRAME.compress(b"{")),
    "a deep list": pressed(FRAME.compress(b"[" * 100_000 + b"]" * 100_000)),
    "a bomb": pressed(FRAME.compress(b'{"tensors":[' + bytes(200 << 20))),
}


@pytest.mark.parametrize("name", ODD_LAYOUTS)
def test_invalid_layout_raises_corrupt_error(genuine: Run, name: str, tmp_path: Path) -> None:
    """Any other value in its place raises CorruptError, and the older step is restored."""
    folder = put(forge(genuine, manifest=lambda d: d.update(layout=ODD_LAYOUTS[name])), tmp_path / "run")
    with pytest.raises(CorruptError):
        Manifest.from_bytes((folder / manifest_key(genuine[1], 0)).read_bytes(), "a part").layout.data  # noqa: B018
    assert restored(folder) == 10


def odd_tables(raw: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield files of the entries of a table, each with one defect."""
    files = safetensors.numpy.load(raw)

    def entry(data: bytes) -> np.ndarray[Any, Any]:
        return np.frombuffer(data, np.uint8)

    def counts(**changed: object) -> dict[str, Any]:
        return files | {"counts": entry(canonical(json.loads(files["counts"].tobytes()) | changed))}

    yield "without counts", {name: column for name, column in files.items() if name != "counts"}
    yield "with a column more", files | {"more": files["base"]}
    yield "of more rows than stored", counts(offset=1 << 20)
    yield "of rows without end", counts(length=1 << 40)
    yield "of half a row", counts(offset=1.5)
    yield "of a negative number of rows", counts(base=-1)
    yield "plain", files | {"offset": entry(bytes(64))}
    yield "in two frames", files | {"offset": np.concatenate([files["offset"], files["offset"]])}
    yield "cut off", files | {"offset": files["offset"][:-1]}
    names = 300 << 20
    bomb = entry(FRAME.compress(bytes(names)))
    yield "a bomb", counts(names=names) | {"names": bomb}
    rows = 4 << 20
    many = {name: FRAME.compress(np.zeros(rows, COLUMNS_OF[name]).tobytes()) for name in ("name_ends", "dtypes")}
    yield "of many rows in few bytes", counts(name_ends=rows, dtypes=rows) | {n: entry(c) for n, c in many.items()}


def test_invalid_columns_raise_corrupt_error(genuine: Run) -> None:
    """An invalid file raises CorruptError before anything of the declared size is allocated. The original is read."""
    raw = inside.table_in(genuine[0][manifest_key(genuine[1], 0)])
    assert len(Table.from_bytes(raw, "the table").shards)
    for name, files in odd_tables(raw):
        with pytest.raises(CorruptError):
            Table.from_bytes(safetensors.numpy.save(files), name)
            pytest.fail(name)
