"""Entries of a checkpoint are selected by name."""

from __future__ import annotations

import pytest

from ckpt.errors import UsageError
from ckpt.tools.convert.source import OriginEntry, RankView, check_patterns, select

VIEW = RankView(
    (
        OriginEntry(("model",), "module", {}, ("model.a", "model.tied", "model.b")),
        OriginEntry(
            ("optim",), "optimizer", {"params": [["model.a"]]}, ("optim.state.model.a.exp_avg",), {"groups": []}
        ),
        OriginEntry(("step",), "plain", {}, (), 3),
    ),
    {"model.a": "model.a", "model.b": "model.b", "optim.state.model.a.exp_avg": "optim.state.model.a.exp_avg"},
    {"model.tied": "model.a"},
    step=7,
)


def test_entries_are_selected_by_name() -> None:
    """Modules may lose tensors. Other entries are kept whole or dropped; plain ones are selected by their own name."""
    assert [e.path for e in select(VIEW, ["*"]).entries] == [("model",), ("optim",), ("step",)]
    found = select(VIEW, ["model.tied"])
    assert (dict(found.tensors), dict(found.aliases)) == ({"model.tied": "model.a"}, {})
    assert found.entries == (OriginEntry(("model",), "module", {}, ("model.tied",)),)
    found = select(VIEW, ["model.[at]*"])
    assert (dict(found.tensors), dict(found.aliases)) == ({"model.a": "model.a"}, {"model.tied": "model.a"})
    assert [e.path for e in select(VIEW, ["st?p"]).entries] == [("step",)]
    with pytest.raises(UsageError, match=r"'nosuch'.*model\.a"):
        check_patterns([VIEW], ["model.*", "nosuch"])
    check_patterns([VIEW], ["model.tied", "step.*", "optim*"])
