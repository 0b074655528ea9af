"""One state, divided among ranks in six ways, saved by some and restored by the same, fewer and more ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import inside
from parallel import HIDDEN, LAYERS, MAIN, MODES, WIDTH, free_port, launch, reports

STEPS = 5
Reports = dict[str, list[dict[str, Any]]]
QUICK = {2: (1, 4)}  # saved by: restored by
LONG = {2: (2,), 4: (4, 3, 2, 1), 3: (3, 4, 2), 1: (1, 3)}

_saved: dict[int, Path] = {}
_loaded: dict[tuple[int, int], Reports] = {}


@pytest.fixture
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs every mode in one job, because starting processes is slow; each pair of worlds once."""

    def saved(world: int) -> Path:
        if world not in _saved:
            folder = tmp_path_factory.mktemp(f"saved-by-{world}")
            reports(launch(world, MAIN, "save", folder, folder, STEPS, *MODES, port=free_port()))
            _saved[world] = folder
        return _saved[world]

    def loaded(world: int, to: int) -> Reports:
        folder = saved(world)
        if (world, to) not in _loaded:
            done = launch(to, MAIN, "load", folder, folder, STEPS, *MODES, port=free_port())
            _loaded[world, to] = reports(done)
        return _loaded[world, to]

    loaded.saved = saved  # type: ignore[attr-defined]
    return loaded


def check(found: list[dict[str, Any]], world: int, to: int) -> None:
    assert len(found) == to
    for rank, one in enumerate(found):
        assert "error" not in one, one["error"]
        assert one["wrong"] == [] and one["tensors"] > 0
        assert one["step"] == STEPS
        assert one["own"] == rank % world  # plain values: a rank's own, in turn if there are more ranks now
        assert one["lr"] == found[0]["lr"]


@pytest.mark.parametrize("to", QUICK[2])
@pytest.mark.parametrize("mode", MODES)
def test_what_two_ranks_saved_any_number_restores(job: Any, mode: str, to: int) -> None:
    """Every tensor, gathered, equals bit for bit what was saved, whatever the number of ranks."""
    check(job(2, to)[mode], 2, to)


@pytest.mark.long
@pytest.mark.parametrize(("world", "to"), [(w, to) for w, many in LONG.items() for to in many])
@pytest.mark.parametrize("mode", MODES)
def test_what_other_worlds_saved_any_number_restores(job: Any, mode: str, world: int, to: int) -> None:
    """The same for uneven numbers, and from one to several."""
    check(job(world, to)[mode], world, to)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_read_a_folder_without_each_other(job: Any, mode: str) -> None:
    """Each rank reads what it wants itself, through the page cache, and nothing goes over sockets."""
    size = sum(inside.bytes_by_rank(job.saved(2) / mode))
    for to in QUICK[2]:
        found = job(2, to)[mode]
        assert [one["received"] for one in found] == [0] * to
        assert 0 < sum(one["read"] for one in found) <= size * to


def test_replicas_are_cut_before_they_are_staged(job: Any) -> None:
    """Under DDP each rank has written its half of what both hold, but for what is a rank's own."""
    sizes = inside.bytes_by_rank(job.saved(2) / "ddp")
    assert abs(sizes[0] - sizes[1]) < 0.05 * sum(sizes)
    assert sum(sizes) < 1.2 * (state_size() + inside.bytes_of_tensors(job.saved(2) / "ddp", "rng"))


def state_size() -> int:
    """Bytes of parameters and their two averages."""
    block = 2 * WIDTH + WIDTH * HIDDEN + HIDDEN + HIDDEN * WIDTH + WIDTH
    return 3 * 4 * LAYERS * block


@pytest.mark.parametrize("mode", MODES)
def test_one_process_loads_what_two_saved(job: Any, mode: str) -> None:
    """load() gathers whole tensors, and reads slices of them, without any process group."""
    folder = job.saved(2)
    expected = torch.load(folder / f"{mode}.pt", weights_only=True)
    loaded = ckpt.load(folder / mode, only="model.*")
    names = {name.removeprefix("model."): name for name in loaded if "#" not in name}
    assert len(names) >= 30
    for short, name in names.items():
        assert torch.equal(loaded[name], expected[short]), name
    name = "model.layers.0.up.weight"
    part = ckpt.load(folder / mode).slice(name, slice(3, 30), slice(1, 4))
    assert torch.equal(part, expected["layers.0.up.weight"][3:30, 1:4])


@pytest.mark.parametrize("mode", MODES)
def test_the_command_line_reads_what_ranks_saved(job: Any, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` finds no damage, `show` lists whole tensors, `diff` of two steps lists the differences."""
    folder = str(job.saved(2) / mode)

    def run(*arguments: str) -> tuple[int, Any]:
        code = inside.command(*arguments, "--json")
        return code, json.loads(capsys.readouterr().out)

    code, verdict = run("verify", folder)
    assert code == 0 and verdict["checkpoints"][0]["verdict"] == "sound"
    _, shown = run("show", folder)
    shapes = {t["name"]: t["shape"] for t in shown["tensors"]}
    assert shapes["model.layers.0.up.weight"] == [HIDDEN, WIDTH] and shown["ranks"] == 2
    code, same = run("diff", folder, folder)
    assert code == 0 and same["equal"]
    code, other = run("diff", f"{folder}@4", folder)
    assert code == 1 and "model.layers.0.up.weight" in {t["name"] for t in other["tensors"]}


def test_modes_hold_the_same_names(job: Any) -> None:
    """A state is called the same however it is divided, so that one can be loaded into the other."""
    folder = job.saved(2)
    names = {mode: {n.partition("#")[0] for n in ckpt.load(folder / mode, only="model.*")} for mode in MODES}
    assert all(found == names["ddp"] for found in names.values())
