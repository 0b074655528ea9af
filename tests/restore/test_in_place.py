"""Tests of restores that write bytes directly into live tensors: all guarantees still hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.core.state.filler import Filler
from run_files import data_files

State = dict[str, Any]
Open = Callable[..., ckpt.Checkpointer]

MIB = 1 << 18  # elements of float32


@pytest.fixture
def open_at(tmp_path: Path) -> Iterator[Open]:
    """Open Checkpointers on one folder, and close them at the end."""
    with contextlib.ExitStack() as stack:

        def open_at(state: State, **settings: Any) -> ckpt.Checkpointer:
            tier = ckpt.Tier(str(tmp_path / "run"), **{"every": 1, "keep": 4, **settings})
            cp = ckpt.Checkpointer(state, tier, memory=None, triggers=())
            stack.callback(close, cp)
            return cp

        yield open_at


def close(cp: ckpt.Checkpointer) -> None:
    with contextlib.suppress(ckpt.CheckpointError):
        cp.close()


def saved(open_at: Open, state: State, **settings: Any) -> None:
    cp = open_at(state, **settings)
    cp.restore(default=0)
    cp.save(1).wait_durable(60.0)
    cp.close()


@pytest.mark.parametrize("compression", ["none", "auto"])
def test_equal_tensors_stored_once_are_both_restored(open_at: Open, compression: str) -> None:
    """For example a target network equal to the online one: both are filled from the same bytes of a file."""

    def make() -> State:
        return {"frozen": torch.randn(8 * MIB), "online": torch.zeros(MIB), "target": torch.zeros(MIB)}

    state = make()
    cp = open_at(state, compression=compression)
    cp.restore(default=0)
    for step in range(1, 5):
        state["online"].normal_()
        state["target"].copy_(state["online"])
        cp.save(step).wait_durable(60.0)
    cp.close()
    found = make()
    cp = open_at(found)
    assert cp.restore() == 4
    assert cp.last_restore is not None and not cp.last_restore.skipped
    assert all(torch.equal(found[name], state[name]) for name in state)


def damage(folder: Path, wanted: bytes) -> None:
    """Overwrite the bytes of a tensor in the file that has them."""
    for file in data_files(folder / "run"):
        raw = bytearray(file.read_bytes())
        at = raw.find(wanted)
        if at >= 0:
            raw[at : at + len(wanted)] = bytes(len(wanted))
            file.write_bytes(raw)
            return
    raise AssertionError("no file contains these bytes")


def test_lenient_restore_keeps_missing_tensor(open_at: Open, tmp_path: Path) -> None:
    """The newest checkpoint is damaged, and the older one lacks a tensor: with strict=False it keeps its value."""
    first = {"a": torch.randn(MIB)}
    saved(open_at, first, compression="none")
    second = {"a": torch.randn(MIB), "late": torch.full((MIB,), 1.5)}
    cp = open_at(second, compression="none")
    cp.restore(strict=False)
    second["late"].fill_(1.5)
    cp.save(2).wait_durable(60.0)
    cp.close()
    damage(tmp_path, torch.full((1024,), 1.5).numpy().tobytes())
    live = {"a": torch.zeros(MIB), "late": torch.full((MIB,), -1.0)}
    cp = open_at(live)
    assert cp.restore(strict=False) == 1
    assert torch.equal(live["a"], first["a"]) and bool((live["late"] == -1.0).all())


def test_negative_control_in_place_restore_writes_damage(
    open_at: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If read directly into place, as in a strict restore, the damaged bytes would be in the tensor."""
    begin = Filler.__init__

    def always(self: Filler, saved: Any, fills: Any, whole: Any = (), *, in_place: bool = True) -> None:
        begin(self, saved, fills, whole)

    monkeypatch.setattr(Filler, "__init__", always)
    with pytest.raises(AssertionError):
        test_lenient_restore_keeps_missing_tensor(open_at, tmp_path)


class Pair(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 256)
        self.head = nn.Linear(256, 4096, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_two_tensors_in_one_memory_are_no_damage(open_at: Open) -> None:
    """Saved untied, restored leniently into a tied model: one of the two is restored, and no damage is reported."""
    model = Pair(tied=False)
    saved(open_at, {"m": model}, compression="none")
    live = Pair(tied=True)
    cp = open_at({"m": live})
    assert cp.restore(strict=False) == 1
    assert cp.last_restore is not None and not cp.last_restore.skipped
    found = live.embedding.weight
    assert torch.equal(found, model.embedding.weight) or torch.equal(found, model.head.weight)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_views_of_one_buffer_are_restored(open_at: Open, compression: str) -> None:
    """Flat parameter buffers and their views overlap: while one is decoded and verified, the other is not written."""

    def make() -> State:
        flat = torch.randn(2 * MIB)
        return {"flat": flat, "view": flat[1024:], "part": flat[:MIB]}

    state = make()
    saved(open_at, state, compression=compression)
    for _ in range(2):
        live = make()
        cp = open_at(live)
        assert cp.restore() == 1
        assert torch.equal(live["flat"], state["flat"])
        cp.close()


def test_autograd_detects_writes_of_a_restore(open_at: Open) -> None:
    """Backward through a graph from before the restore raises an error, instead of a wrong gradient."""
    weight = nn.Parameter(torch.ones(MIB))
    saved(open_at, {"w": weight})
    loss = (weight * weight).sum()
    cp = open_at({"w": weight})
    cp.restore()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_store_without_scatter_is_read(open_at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Custom stores need not have it."""
    from ckpt_backends.local import LocalStore

    state = {"t": torch.randn(2 * MIB)}
    saved(open_at, state)
    monkeypatch.delattr(LocalStore, "scatter")
    live = {"t": torch.zeros(2 * MIB)}
    assert open_at(live).restore() == 1
    assert torch.equal(live["t"], state["t"])
