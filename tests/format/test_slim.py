"""Parts of thousands of ranks, read without what they say alike: the directory of them is the same to the byte."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processes import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import scale
from ckpt.core.checkpoint import commit_checks, parts, read
from ckpt.core.format import join_ranks
from ckpt.core.format.manifest import Part, canonical, press, unpress
from ckpt.core.format.rank_index import Directory
from ckpt.core.format.slim import Slim
from ckpt.errors import CorruptError, SaveError
from run_files import manifests

Json = dict[str, Any]
WORLD = scale.World(stages=2, tensor=2, fsdp=2, layers=2, width=32)
OWN = -1


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of 8 ranks, of which no checkpoint is made yet."""
    root = tmp_path_factory.mktemp("slim") / "run"
    root.mkdir()
    (root / "FORMAT.json").write_bytes(scale.new_format())
    for first in range(0, WORLD.size, WORLD.per_stage):
        scale.write_ranks(WORLD, str(root), first, first + WORLD.per_stage)
    return root


def found(root: Path, *, partial: bool = False) -> list[Any]:
    async def work() -> list[Any]:
        async with read.opened(root.as_uri()) as store:
            keys = [info.key async for info in store.list()]
            there = await parts.sound_parts(store, scale.ATTEMPT, keys, partial=partial)
            return [there[rank] for rank in sorted(there)]

    return read.run(work())


def few_are_many(monkeypatch: pytest.MonkeyPatch, many: int = 0) -> None:
    monkeypatch.setattr(parts, "MANY", many)
    monkeypatch.setattr(commit_checks, "MANY", many)


@pytest.mark.parametrize("rows", [1, 7, 1 << 18])
def test_the_directory_of_slim_parts_is_that_of_whole_ones(
    root: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """To the byte, with however many rows at once. And they are slim: no table, no pack, fewer values."""
    monkeypatch.setattr(commit_checks, "WHOLE", 0)
    expected = commit_checks.index_of(found(root))
    monkeypatch.setattr(join_ranks, "AT_ONCE", rows)
    assert commit_checks.index_of(found(root)) == expected
    few_are_many(monkeypatch)
    slim = found(root)
    assert all(
        one.pieces is not None and not (len(one.table.length) or one.part.table or one.part.packs) for one in slim
    )
    assert commit_checks.index_of(slim) == expected
    assert all(one.pieces is None and one.part.packs for one in found(root, partial=True))


def test_slim_parts_share_what_they_say_alike(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one stage have one object for components, instances and names. Negative control: not without."""
    for many, shared in ((0, True), (64, False)):
        few_are_many(monkeypatch, many)
        one, two = found(root)[1:3]
        for field in ("components", "instances"):
            assert (one.part.layout[field] is two.part.layout[field]) == shared


@pytest.mark.parametrize("many", [0, 64], ids=["slim", "whole"])
def test_a_directory_says_whose_values_are_the_same(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    """All ranks, but for those that have a value of their own; 1, 1.0 and True are different ones."""
    monkeypatch.setattr(commit_checks, "WHOLE", 0)
    few_are_many(monkeypatch, many)
    copy = Path(shutil.copytree(root, tmp_path / "run"))
    for rank, value in ((1, True), (2, 1.0), (3, 1), (6, 1)):
        (path,) = manifests(copy, rank=rank)
        part = Part.from_bytes(path.read_bytes(), "a part")
        said = zip(part.layout["components"], part.values, strict=True)
        values = [value if component["path"] == ["tokens"] else one for component, one in said]
        path.write_bytes(replace(part, values=values).to_bytes())
    index = Directory.from_bytes(commit_checks.index_of(found(copy)), "an index", WORLD.size)
    assert index.alike == (0, 1, 2, 3, 0, 0, 3, 0)


def test_slim_parts_are_no_share_of_a_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that holds some ranks only keeps their tables: nothing may be written from what has none."""
    few_are_many(monkeypatch)
    with pytest.raises(SaveError, match="do not form a checkpoint"):
        commit_checks.index_of(found(root), "HELD")
    assert commit_checks.index_of(found(root, partial=True), "HELD")


@pytest.mark.parametrize("what", ["lost", "twice", "another rank", "values"])
def test_what_ranks_do_not_agree_about_is_seen(root: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A rank that is left out, one that is there twice, one that says it is another, and values of other entries."""
    few_are_many(monkeypatch)
    mine = found(root)
    one = mine[3]
    if what == "lost":
        mine[3] = replace(one, pieces=replace(one.pieces, names=(), rank=None))
    elif what == "twice":
        mine[3] = replace(one, pieces=replace(mine[2].pieces, rank=3))
    elif what == "another rank":
        mine[3] = replace(one, pieces=replace(one.pieces, rank=4))
    else:
        mine[3] = replace(one, part=replace(one.part, values=[None]))
    with pytest.raises(SaveError):
        commit_checks.index_of(mine)


# -- layouts --

texts = st.one_of(
    st.text(max_size=6), st.sampled_from(['":3,', ":3,", "\\", '"', 'a":3}', ",", "a", "a b", "é", "\ud800"])
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
dims = st.lists(st.integers(0, 2**40), max_size=3)
rows_of_layouts = st.one_of(
    st.tuples(texts, st.just("F32"), dims, st.booleans()),
    st.tuples(texts, st.just("F32"), dims, st.booleans(), st.none() | dims, dims, st.integers(-1, 5)),
)


@st.composite
def layouts(draw: st.DrawFn) -> Json:
    return {
        "aliases": draw(st.dictionaries(texts, texts, max_size=3)),
        "components": draw(st.lists(st.fixed_dictionaries({"kind": texts, "facts": json_values}), max_size=3)),
        "elsewhere": draw(st.dictionaries(texts, st.tuples(texts, dims), max_size=3)),
        "instances": draw(st.dictionaries(texts, st.integers(0, 12) | st.just(3), max_size=5)),
        "rank": 3,
        "tensors": draw(st.lists(rows_of_layouts, max_size=4)),
        "world": 13,
    }


def expected(layout: Any) -> Json:
    rows = {(row[0], row[6] if len(row) > 6 else -1) for row in layout["tensors"] if row[3]}
    return {
        "aliases": layout["aliases"],
        "components": layout["components"],
        "elsewhere": layout["elsewhere"],
        "instances": {name: OWN if n == layout["rank"] else n for name, n in layout["instances"].items()},
        "rank": layout["rank"],
        "tensors": [[name, "", [], True, None, [], instance] for name, instance in sorted(rows)],
    }


def same(slim: Any, layout: Json) -> bool:
    """In every byte that is made of it: 1, 1.0 and True are different."""
    return repr({name: slim[name] for name in expected(layout)}) == repr(expected(layout))


@settings(max_examples=100, deadline=None)
@given(st.lists(layouts(), min_size=1, max_size=3))
def test_a_slim_layout_is_what_json_says(said: list[Json]) -> None:
    """Whatever the names: also those that look like the end of one and a number, and after others were read."""
    slim = Slim()
    for layout in said:
        text = press(canonical(layout))
        assert same(slim.layout(text), unpress(text))


PLAIN = {"aliases": "{}", "components": "[]", "elsewhere": "{}", "instances": "{}", "rank": "3", "tensors": "[]"}
LARGE = "123456789012345678901234567890"
ODD = {
    "a field twice": {"aliases": '{},"aliases":{"a":"b"}'},
    "a large number": {"components": f'[{{"kind":"a","facts":{{"n":{LARGE}}}}}]'},
    "a large instance": {"instances": f'{{"a":{LARGE}}}'},
    "a large instance of a tensor": {"tensors": f'[["a","F32",[1],true,null,[],{LARGE}]]'},
    "no number": {"components": '[{"kind":"a","facts":{"n":NaN}}]'},
    "spaces": {"instances": ' { "a": 3 , "b":3,"c" : 3} ', "aliases": " {} "},
    "one for true": {"tensors": '[["a","F32",[],1]]'},
    "its own at both ends": {"instances": '{"a":3,"b":33,"c":3}'},
    "a fraction": {"instances": '{"a":3.0,"b":3}'},
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_layout_is_read_as_json_has_it(what: str) -> None:
    """What the quick reader refuses, the other reads; and both agree."""
    text = "{" + ",".join(f'"{name}":{value}' for name, value in {**PLAIN, **ODD[what]}.items()) + "}"
    assert same(Slim().layout(press(text.encode())), json.loads(text))


@pytest.mark.parametrize(
    "text", [b"[]", b"{}", b"3", b"", b'{"aliases":{}', b"[" * 5000, b'{"tensors":[[1]],"rank":3,"instances":{}}']
)
def test_what_is_no_layout_is_said_to_be_none(text: bytes) -> None:
    with pytest.raises(ValueError):
        Slim().layout(press(text))


def test_a_layout_of_another_rank_is_refused(root: Path) -> None:
    """Its instances are counted from that."""
    one = found(root)[2].part
    slim = Slim()
    mine = replace(one, layout=slim.layout(press(canonical(dict(one.layout)))))
    assert slim.part(mine).packs == []
    with pytest.raises(CorruptError, match="layout of rank 2"):
        slim.part(replace(mine, rank=1))
