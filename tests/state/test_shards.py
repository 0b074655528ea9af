"""Tests of `ckpt.state.Shards`: tensors with custom sharding are saved and restored on other ranks, errors rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import inside
from ckpt.core.format.boxes import Seat
from ckpt.core.state.capture import Capture
from ckpt.errors import MismatchError, StateError
from parallel import free_port, launch
from shards_toy import MAIN, SHAPES, wholes

FULL = torch.arange(20.0)


def said(pieces: Any, **settings: Any) -> str:
    """Return the error about the pieces of one of two ranks."""
    with pytest.raises(StateError) as error:
        Capture({"s": ckpt.state.Shards(pieces, **settings)}, Seat(0, 2)).read()
    return str(error.value)


WRONG: dict[str, tuple[Any, str]] = {
    "overlap": (
        [ckpt.state.Shard(FULL[:12], (4, 5), start=0), ckpt.state.Shard(FULL[8:], (4, 5), start=8)],
        "s.w: two pieces of this rank claim the same elements",
    ),
    "run out of range": (ckpt.state.Shard(FULL, (4, 5), start=1), "elements 1 to 21 are out of range: there are 20"),
    "box out of range": (
        ckpt.state.Shard(FULL.view(4, 5), (4, 6), (0, 2)),
        "a box of [4, 5] at [0, 2] is out of range",
    ),
    "other dimensions": (
        ckpt.state.Shard(FULL, (4, 5)),
        "a box of [20] at [0, 0] is out of range: the tensor is of shape",
    ),
    "gaps": (ckpt.state.Shard(FULL[::2], (4, 5), start=0), "without gaps; this has shape [10] and strides [2]"),
    "run of rows": (ckpt.state.Shard(FULL.view(4, 5), (4, 5), start=0), "must be memory of one dimension"),
    "shapes": (
        [ckpt.state.Shard(FULL[:10], (4, 5), start=0), ckpt.state.Shard(FULL[10:], (20,), start=10)],
        "all must have the shape and dtype of the whole tensor",
    ),
    "dtypes": (
        [ckpt.state.Shard(FULL[:10], (4, 5), start=0), ckpt.state.Shard(FULL[10:].double(), (4, 5), start=10)],
        "all must have the shape and dtype of the whole tensor",
    ),
    "replicas without this rank": (
        ckpt.state.Shard(FULL, (20,), replicas=(1,)),
        "replicas=[1] must be ranks of [0, 1]",
    ),
    "no shard": ([FULL], "must be a str, and its value a Shard or a list of them"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shards_of_one_rank_are_rejected(name: str) -> None:
    """StateError names the tensor, the error and the remedy."""
    pieces, words = WRONG[name]
    assert words in said({"w": pieces})


def test_other_wrong_arguments_are_rejected() -> None:
    assert "a dict by name, not <class 'list'>" in said([ckpt.state.Shard(FULL, (20,))])
    assert "ranks=[1] must be ranks of this job and include this rank, 0" in said(
        {"w": ckpt.state.Shard(FULL, (20,))}, ranks=(1,)
    )
    assert "must be a str" in said({1: ckpt.state.Shard(FULL, (20,))})


def test_moved_memory_changes_the_layout() -> None:
    """New views of the same memory keep the layout; other memory or another offset changes it."""
    flat, start = torch.arange(20.0), [0]
    pieces = ckpt.state.Shards(lambda: {"w": ckpt.state.Shard(flat[start[0] : 10], (20,), start=start[0])})
    capture = Capture({"s": pieces}, Seat(0, 2))
    first = capture.read()
    assert capture.read().layout is first.layout
    flat = torch.arange(20.0) + 1
    moved = capture.read()
    assert moved.tensors[0].tolist() == [*range(1, 11)]
    start[0] = 3
    assert capture.read().layout.tensors[0].offsets == (3,)


def test_copy_is_guarded_by_named_optimizer() -> None:
    """Only that optimizer guards it: if it is not trusted, the copy is eager."""
    param = nn.Parameter(torch.zeros(20))
    optim = torch.optim.SGD([param], 0.1)
    for optimizer, guarded in ((optim, [True]), (None, [False])):
        capture = Capture({"s": ckpt.state.Shards({"w": ckpt.state.Shard(param, (20,))}, optimizer=optimizer)})
        assert capture.read().guarded == guarded
        assert capture.optimizers == ([optim] if optimizer else [])
        capture.unguard(optim)
        assert capture.read().guarded == [False]
    both = Capture({"s": ckpt.state.Shards({"w": ckpt.state.Shard(param, (20,))}, optimizer=optim), "optim": optim})
    assert both.optimizers == [optim]
    both.read()


def test_two_names_of_one_shard_are_tied(run_dir: str) -> None:
    """It is stored once; tied and untied states are distinguished."""
    flat = torch.arange(20.0)
    one = ckpt.state.Shard(flat, (4, 5), start=0)
    with ckpt.Checkpointer({"s": ckpt.state.Shards({"w": one, "tied": one})}, run_dir) as cp:
        cp.save(1).wait_durable()
        flat.zero_()
        assert cp.restore() == 1 and flat.tolist() == [*range(20)]
    assert sum(inside.bytes_by_rank(run_dir)) == 80
    assert torch.equal(ckpt.load(run_dir)["s.tied"], flat.view(4, 5))
    with ckpt.Checkpointer(
        {"s": ckpt.state.Shards({"w": ckpt.state.Shard(flat, (4, 5), start=0)})}, run_dir + "2"
    ) as cp:
        cp.save(1).wait_durable()
    with ckpt.Checkpointer({"s": ckpt.state.Shards({"w": one, "tied": one})}, run_dir + "2") as cp:
        with pytest.raises(MismatchError, match=r"s\.tied is not in the checkpoint"):
            cp.restore()
    apart = {"w": ckpt.state.Shard(flat, (4, 5), start=0), "tied": ckpt.state.Shard(flat + 1, (4, 5), start=0)}
    with ckpt.Checkpointer({"s": ckpt.state.Shards(apart)}, run_dir + "3") as cp:
        cp.save(1).wait_durable()
    with ckpt.Checkpointer({"s": ckpt.state.Shards({"w": one, "tied": one})}, run_dir + "3") as cp:
        with pytest.raises(MismatchError, match=r"s\.w and s\.tied are one tensor here"):
            cp.restore()


def test_plain_tensor_belongs_to_its_rank() -> None:
    """It may be next to shards, and is copied eagerly, since other code may write to it."""
    pieces = {"w": ckpt.state.Shard(FULL[:10], (20,), start=0), "count": torch.ones(3)}
    optim = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    reading = Capture({"s": ckpt.state.Shards(pieces, optimizer=optim)}, Seat(0, 2)).read()
    assert {t.name: t.instance for t in reading.layout.tensors} == {"s.w": -1, "s.count": 0}
    assert reading.guarded == [True, False]


def test_shards_and_module_restore_each_other(run_dir: str) -> None:
    """Only the name and the shape matter, not what saved them."""
    net, flat = nn.Linear(3, 4), torch.arange(16.0)
    pieces = {
        "weight": ckpt.state.Shard(flat[:12], (4, 3), start=0),
        "bias": ckpt.state.Shard(flat[12:], (4,), start=0),
    }
    with ckpt.Checkpointer({"net": ckpt.state.Shards(pieces)}, run_dir) as cp:
        cp.save(1).wait_durable()
    with ckpt.Checkpointer({"net": net}, run_dir) as cp:
        assert cp.restore() == 1
        assert torch.equal(net.weight, flat[:12].view(4, 3)) and torch.equal(net.bias, flat[12:])
        with torch.no_grad():
            net.weight += 1
        cp.save(2).wait_durable()
    with ckpt.Checkpointer({"net": ckpt.state.Shards(pieces)}, run_dir) as cp:
        assert cp.restore() == 2
    assert torch.equal(flat[:12].view(4, 3), net.weight)


def test_another_shape_is_a_mismatch_and_changes_nothing(run_dir: str) -> None:
    with ckpt.Checkpointer(
        {"s": ckpt.state.Shards({"w": ckpt.state.Shard(FULL.clone(), (4, 5), start=0)})}, run_dir
    ) as cp:
        cp.save(1).wait_durable()
    other = torch.zeros(20)
    with ckpt.Checkpointer({"s": ckpt.state.Shards({"w": ckpt.state.Shard(other, (5, 4), start=0)})}, run_dir) as cp:
        with pytest.raises(MismatchError, match=r"s.w has shape \[4, 5\] in the checkpoint and \[5, 4\] here"):
            cp.restore()
    assert not other.any()


def lines(done: list[Any]) -> list[list[dict[str, Any]]]:
    for process in done:
        assert process.returncode == 0, process.stderr[-4000:]
    return [[json.loads(line) for line in p.stdout.splitlines() if line.startswith("{")] for p in done]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that two ranks saved."""
    run = tmp_path_factory.mktemp("shards") / "run"
    lines(launch(2, MAIN, "save", run, port=free_port()))
    return run


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sharding_restores_on_any_ranks(world: int, saved: Path) -> None:
    """Runs, boxes with gaps, several pieces per name, replicas, and ranks without a piece restore bit for bit."""
    for one in lines(launch(world, MAIN, "load", saved, port=free_port())):
        assert one == [{"step": 3, "wrong": [], "restored": [True]}]


def test_shards_are_saved_once_and_load_whole(saved: Path) -> None:
    assert sum(inside.bytes_by_rank(saved)) == 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    loaded = ckpt.load(saved, step=3)
    assert all(torch.equal(loaded[f"s.{name}"], whole) for name, whole in wholes(3).items())


REFUSED = {
    "twice": ("the ranks do not agree about s.w: some of it was saved 2 times", "must cover it and not overlap"),
    "hole": ("the ranks do not agree about s.w: some of it was not saved", "must cover it and not overlap"),
    "replicas of one": ("some of it was saved 2 times", "list each other as `replicas`"),
    "dtype": ("s.w is of shape [4, 5] and dtype F", "F64", "F32", " for one rank, and of [4, 5] and F"),
    "dtype of nothing": ("s.w is of shape [4, 5] and dtype F64 for rank 1, and of [4, 5] and F32 for others",),
    "shape": ("s.w is of shape ", "[20] and ", "[4, 5] and ", "F32 for one rank, and of "),
    "not named": ("s.v is not in the state of rank 0", "lists a ckpt.state.Shards with an empty list"),
}


def test_inconsistent_shards_of_ranks_are_not_committed(tmp_path: Path) -> None:
    """Every rank's save fails with the tensor and the reason; consistent shards are saved."""
    found = lines(launch(2, MAIN, "refuse", tmp_path / "run", "agreed", *REFUSED, port=free_port()))
    for rank in found:
        assert rank[0] == {"case": "agreed", "said": ""}
        for one in rank[1:]:
            assert one["said"].startswith("SaveError") and all(words in one["said"] for words in REFUSED[one["case"]])
