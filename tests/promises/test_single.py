"""Single checkpoints: `ckpt.save` writes one, and `ckpt.load(into=)` fills a state from one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import toy
from commands import flip
from parallel import free_port, launch
from processes import killed, run_script
from run_files import data_files
from s3_server import MotoServer, storage_options

SAVE = """
import sys, toy, ckpt
state = toy.build(seed=3)
toy.train_step(state)
print(toy.digest(state), flush=True)
ckpt.save(sys.argv[1], state)
"""


def trained(seed: int = 3) -> dict[str, Any]:
    state = toy.build(seed=seed)
    toy.train_step(state)
    return state


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return copies of all tensors of the model and the optimizer."""
    moments = [value for kept in state["optim"].state.values() for value in kept.values()]
    return [tensor.detach().clone() for tensor in [*state["model"].state_dict().values(), *moments]]


def test_single_checkpoint_is_loaded_bit_for_bit(run_dir: str) -> None:
    """All of the state, or some of its entries. A Checkpointer continues from it as well."""
    saved, other = trained(), toy.build(seed=1)
    found = ckpt.save(run_dir, saved, step=7)
    assert (found.step, found.tier) == (7, f"file://{run_dir}")
    assert toy.digest(other) != toy.digest(saved)  # negative control
    assert ckpt.load(run_dir, into=other).step == 7 and toy.digest(other) == toy.digest(saved)
    fresh = toy.build(seed=2)
    ckpt.load(f"{run_dir}@7", into={"model": fresh["model"]})
    assert all(map(torch.equal, fresh["model"].state_dict().values(), saved["model"].state_dict().values()))
    with ckpt.Checkpointer(again := toy.build(seed=4), run_dir) as cp:
        assert cp.restore() == 7 and toy.digest(again) == toy.digest(saved)


def test_nothing_is_overwritten_and_a_job_is_not_fenced(run_dir: str) -> None:
    """Neither the save that is rejected nor a load affects a job that trains there."""
    state = trained()
    with ckpt.Checkpointer(state, run_dir, every=1) as cp:
        cp.restore(default=0)
        cp.save(1).wait_durable(60)
        with pytest.raises(ckpt.errors.InvalidArgumentError, match="does not overwrite"):
            ckpt.save(run_dir, trained(seed=5))
        assert ckpt.load(run_dir, into=(other := toy.build())).step == 1 and toy.digest(other) == toy.digest(state)
        cp.save(2).wait_durable(60)  # a fenced job would raise FencedError
    (Path(run_dir).parent / "notes").mkdir()
    (Path(run_dir).parent / "notes" / "thesis.txt").write_text("x")
    with pytest.raises(ckpt.errors.FormatError):
        ckpt.save(Path(run_dir).parent / "notes", state)


@pytest.mark.parametrize(
    "fail",
    [
        "writer/data_file.opened:kill",
        "trainer/stage.copied:kill",
        "trainer/save.requested:kill",
        "writer/log.linked:eio",
    ],
)
def test_interrupted_save_is_complete_or_not_there(run_dir: str, fail: str) -> None:
    """A kill or a disk error at any moment. What is there is whole, and a repeated call works if nothing is."""
    done = run_script(SAVE, run_dir, fail=fail)
    assert killed(done) or "Error" in done.stderr or done.returncode == 0, done.stderr
    digest, state = done.stdout.strip(), toy.build(seed=1)
    try:
        ckpt.load(run_dir, into=state)
    except ckpt.errors.NoCheckpointError:
        assert done.returncode != 0
        again = run_script(SAVE, run_dir)
        if again.returncode:  # the writer of the killed process has stored the checkpoint meanwhile
            assert "does not overwrite" in again.stderr, again.stderr
        ckpt.load(run_dir, into=state)
    assert toy.digest(state) == digest


def test_load_changes_nothing_if_the_state_does_not_fit(run_dir: str) -> None:
    ckpt.save(run_dir, trained())
    for change in (
        lambda state: state.update(more=torch.zeros(1)),
        lambda state: state.update(model=nn.Linear(3, 3)),
        lambda state: state.update(optim=torch.optim.AdamW(nn.Linear(3, 3).parameters())),
    ):
        change(state := trained(seed=1))
        before = tensors(state)
        with pytest.raises(ckpt.errors.MismatchError):
            ckpt.load(run_dir, into=state)
        assert len(before) == len(tensors(state)) and all(map(torch.equal, before, tensors(state)))
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="only="):
        ckpt.load(run_dir, into=toy.build(), only="model.*")  # type: ignore[call-overload]


def test_load_uses_no_damaged_byte(run_dir: str) -> None:
    """If the only checkpoint is damaged, the error says so. An older one is used if it is intact."""
    state = trained()
    with ckpt.Checkpointer(state, run_dir, every=1, memory=None) as cp:
        cp.restore(default=0)
        cp.save(1).wait_durable(60)
        first, known = toy.digest(state), set(data_files(run_dir))
        toy.train_step(state)
        cp.save(2).wait_durable(60)
    for path in set(data_files(run_dir)) - known:
        flip(path, path.stat().st_size // 2)
    found = ckpt.load(run_dir, into=(other := toy.build(seed=1)))
    assert found.step == 1 and toy.digest(other) == first and found.skipped[0].step == 2
    with pytest.raises(ckpt.errors.CorruptError):
        ckpt.load(run_dir, into=toy.build(), step=2)


RANKS = """
import sys, toy, ckpt, torch.distributed as dist
dist.init_process_group("gloo")
state = toy.build(seed=3)
toy.train_step(state)
ckpt.save(sys.argv[1], state)
other = toy.build(seed=1)
ckpt.load(sys.argv[1], into=other)
assert toy.digest(other) == toy.digest(state)
print(toy.digest(state))
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_save_and_load_together(run_dir: str) -> None:
    """A checkpoint of two ranks loads on two ranks and on one."""
    done = launch(2, RANKS, run_dir, port=free_port())
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    ckpt.load(run_dir, into=(state := toy.build(seed=1)))
    assert toy.digest(state) == done[0].stdout.strip()


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        server.make_bucket("bucket")
        yield server


def test_bucket_holds_a_single_checkpoint(moto: MotoServer) -> None:
    options, saved, other = storage_options(moto.url), trained(), toy.build(seed=1)
    found = ckpt.save("s3://bucket/one", saved, storage_options=options)
    assert found.tier == "s3://bucket/one"
    ckpt.load("s3://bucket/one", into=other, storage_options=options)
    assert toy.digest(other) == toy.digest(saved)
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="does not overwrite"):
        ckpt.save("s3://bucket/one", saved, storage_options=options)
