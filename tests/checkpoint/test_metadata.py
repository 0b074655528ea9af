"""The size of a checkpoint's metadata."""

from __future__ import annotations

import os

import numpy as np
import pytest

from ckpt.core.checkpoint.write import build_table
from ckpt.core.format.index import Share, build
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import Manifest, canonical, press, unpress
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


@pytest.mark.parametrize("count", [0, 160_000])
def test_table_without_chunks_is_read_back(count: int) -> None:
    """The table is read back even if it is highly compressed and declares more than 16 MiB, as for tensors without
    chunks."""
    layout = a_layout(count, shape=(0,))
    table = build_table(layout, data_key(checkpoint_id(1)), b"")
    again = Table.from_bytes(table.to_bytes(), "a table")
    assert again.shards == table.shards and len(again.length) == 0
    assert unpress(press(canonical(layout.shared.data))) == layout.shared.data
