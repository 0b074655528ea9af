"""The size of a checkpoint's metadata."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpt.core.checkpoint.manifests import layout_of
from ckpt.core.checkpoint.write import build_table
from ckpt.core.format.index import Share, build
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import Manifest, SharedLayout, canonical, press, unpress
from ckpt.core.format.table import Table
from run_files import checkpoint_id, data_key

TENSORS, MOST = 4_000, 200  # bytes per tensor and checkpoint
KINDS = ("model.transformer.h.{}.mlp.c_fc{}.weight", "optim.state.transformer.h.{}.mlp.c_fc{}.weight.exp_avg_sq")


def a_layout(count: int = TENSORS, shape: tuple[int, ...] = (16, 4)) -> Layout:
    names = [KINDS[i % 2].format(i // 20, i % 20 // 2) for i in range(count)]
    component = {"path": ["model"], "kind": "module", "facts": {}, "names": names}
    return Layout(tuple(TensorSpec(name, "F32", shape) for name in names), {}, [component])


def sizes_of(layout: Layout) -> dict[str, int]:
    table = build_table(layout, data_key(checkpoint_id(1)), os.urandom(16 * len(layout.arrangement.chunks)))
    manifest = Manifest(checkpoint_id(1), 0, 1, layout.shared, [None], table.to_bytes(), [])
    index = build([Share(0, 1, layout.shared, [None], table)])
    return {
        "header": len(layout.arrangement.header({})), "index": len(index.to_bytes()),
        "manifest": len(manifest.to_bytes())
    }  # fmt: skip


def test_metadata_of_a_checkpoint_is_small() -> None:
    """With names of usual length, metadata takes less than 200 bytes per tensor, most of it in the header of the data
    file, which any safetensors tool reads. Negative control: uncompressed metadata takes more than twice that."""
    layout = a_layout()
    found = sizes_of(layout)
    assert sum(found.values()) < MOST * TENSORS, found
    plain = 2 * sum(column.nbytes for column in plain_columns(layout).values()) + len(canonical(layout.shared.data))
    assert found["header"] + plain > 2 * MOST * TENSORS


def plain_columns(layout: Layout) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    from ckpt.core.format.table import columns_of

    return dict(columns_of(build_table(layout, data_key(checkpoint_id(1)), None).to_bytes(), "a table"))


def test_manifests_in_memory_share_one_layout() -> None:
    """Manifests of two steps with the same layout have one object, which is the layout that was written."""
    layout = a_layout(10)
    table = build_table(layout, data_key(checkpoint_id(1)), None)
    first, second = (Manifest(checkpoint_id(step), 0, 1, layout.shared, [None], b"", []).to_bytes() for step in (1, 2))
    a, b = Manifest.from_bytes(first, "a manifest"), Manifest.from_bytes(second, "a manifest")
    assert a.layout is b.layout and a.layout == layout.shared
    assert layout_of(replace(a, table=table.to_bytes()), table, layout) is layout
    again = layout_of(a, table)
    assert again.arrangement.header({}) == layout.arrangement.header({}) and set(again.tensors) == set(layout.tensors)
    moved = Manifest.from_bytes(replace(a, layout=a_layout(11).shared).to_bytes(), "a manifest")
    assert moved.layout == a_layout(11).shared != a.layout
    assert a.to_bytes() == first and Manifest.from_bytes(a.to_bytes(), "a manifest") == a


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_the_same_tensors_have_the_same_layout_text(world: int) -> None:
    """This holds whichever rank stages a tensor. Own tensors do not change the text if every rank has them."""
    specs = [TensorSpec(f"t{i}", "F32", (4,)) for i in range(4)]
    component = {"path": ["model"], "kind": "module", "facts": {}, "names": [*(t.name for t in specs), "own"]}

    def layout(rank: int) -> Layout:
        staged = [t for i, t in enumerate(specs) if i % world == rank]
        others = {t.name: (t.dtype, t.shape) for t in specs if t not in staged}
        own = TensorSpec("own", "U8", (8,), instance=rank)
        return Layout((*staged, own), {}, [component], rank, world, {"own": rank}, others)

    layouts = [layout(rank) for rank in range(world)]
    assert len({one.shared.text for one in layouts}) == 1
    for one in layouts:
        table = build_table(one, data_key(checkpoint_id(1), one.rank), None)
        again = Layout.of_manifest(SharedLayout(text=one.shared.text), one.rank, world, table.columns.specs())
        assert replace(again, tensors=one.tensors) == one and set(again.tensors) == set(one.tensors)


@pytest.mark.parametrize("count", [0, 1, 160_000])
def test_table_without_chunks_is_read_back(count: int) -> None:
    """The table is read back even if it is highly compressed and declares more than 16 MiB, as for tensors without
    chunks."""
    layout = a_layout(count, shape=(0,))
    table = build_table(layout, data_key(checkpoint_id(1)), b"")
    again = Table.from_bytes(table.to_bytes(), "a table")
    assert again.shards == table.shards and len(again.length) == 0
    assert unpress(press(canonical(layout.shared.data))) == layout.shared.data


def test_equal_digests_are_stored_in_full(tmp_path: Path) -> None:
    """Equal chunks, for example zeros in fresh moments, have separate rows with uncompressed digests."""
    layout = a_layout(20_000, shape=(1,))
    table = build_table(layout, data_key(checkpoint_id(1)), None)
    raw = table.to_bytes()
    assert len(raw) > 16 * 20_000
    assert np.array_equal(Table.from_bytes(raw, "a table").digest, table.digest)
