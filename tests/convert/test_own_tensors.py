"""Tensors that ranks have separately: their labels, and the ranks that get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt.core.checkpoint.write import build_table
from ckpt.core.format.layout import Layout, TensorSpec
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.format.saved_state import SavedState
from ckpt.tools.convert.source_run import RunOrigin
from run_files import checkpoint_id, data_key


def two_ranks(*own: str) -> SavedState:
    """Return the state of two ranks that each have own tensors with these names."""
    layouts, tables = [], []
    for rank in range(2):
        specs = tuple(TensorSpec(name, "F32", (2,), instance=rank) for name in own)
        component = {"path": ["d"], "kind": "plain", "facts": {}, "names": list(own)}
        layout = Layout(specs, {}, [component], rank, 2, dict.fromkeys(own, rank))
        layouts.append(layout)
        digests = b"".join(bytes([rank + 1] * 16) for _ in own)
        tables.append(build_table(layout, data_key(checkpoint_id(1), rank), digests))
    return SavedState(layouts, [[None], [None]], tables)


def test_names_with_hashes_are_distinguished() -> None:
    """Labels of own tensors never collide with other names."""
    for own in (("queue#",), ("x", "x#1"), ("x", "x#0", "x#1", "x#1#")):
        labels = two_ranks(*own).labels
        assert len(labels) == 2 * len(own) == len(set(labels.values()))


def test_own_tensors_go_to_their_ranks(tmp_path: Path) -> None:
    """With the same number of ranks, each gets its own tensors. Otherwise those of the lowest rank are used."""
    saved = two_ranks("mine")

    class Manifested:
        commit = type("C", (), {"step": 1, "finite": None})
        checkpoint = CheckpointId(1, 1, "aaaaaaaa")
        finite = None

        def saved(self) -> SavedState:
            return saved

    log: Any = type("L", (), {"root": "0" * 32, "store": type("S", (), {"url": "file:///x", "remote": False})})
    manifest: Any = Manifested()
    origin = RunOrigin(log, manifest, saved)
    assert [origin.view(rank, 2).tensors for rank in (0, 1)] == [{"mine": "mine#0"}, {"mine": "mine#1"}]
    assert dict(origin.view(0, 1).tensors) == {"mine": "mine#0"} and "lowest rank" in origin.view(0, 1).notes[0]
    assert "same random numbers" in origin.view(3, 4).notes[0]
