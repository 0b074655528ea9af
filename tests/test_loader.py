"""Tests of a loader that continues: each sample comes once, on any rank, also if the number of ranks changes."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from parallel import free_port, launch
from processes import REPO, run_python


class Noisy(Dataset[tuple[int, float]]):
    """Samples made with random numbers of every kind."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(())) + random.random() + float(np.random.rand())


def ranks(world: int, size: int, batch: int, **options: Any) -> list[ckpt.Loader]:
    return [ckpt.Loader(range(size), batch, rank=r, world=world, **options) for r in range(world)]


def move(loaders: list[ckpt.Loader], states: list[dict[str, Any]]) -> list[ckpt.Loader]:
    for rank, loader in enumerate(loaders):
        if len(states) == len(loaders):
            loader.load_state_dict(states[rank])
        else:
            loader.load_state_dicts(states, rank, len(loaders))
    return loaders


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 90),
    legs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=5),
    shuffle=st.booleans(),
)
def test_each_sample_comes_once_despite_changes(size: int, legs: list[tuple[int, int, int]], shuffle: bool) -> None:
    """Ranks and batch sizes change within an epoch; each sample comes once, except those that fill the last round."""
    seen: list[int] = []
    states: list[dict[str, Any]] | None = None
    for world, batch, count in [*legs, (1, 3, 10**6)]:
        loaders = ranks(world, size, batch, shuffle=shuffle, seed_samples=False)
        if states is not None:
            move(loaders, states)
        if loaders[0].epoch:
            break
        streams = [iter(loader) for loader in loaders]
        for _ in range(count):
            got = [next(stream, None) for stream in streams]
            if got[0] is None:
                assert got == [None] * world
                break
            seen += [int(i) for b in got if b is not None for i in b]
        states = [loader.state_dict() for loader in loaders]
    most = max(world for world, _, _ in legs)
    counted = Counter(seen)
    assert set(counted) == set(range(size))
    assert len(seen) - size < most * max(1, -(-most // size)), "only the last round may be filled up"


def test_negative_control_torch_loader_repeats_samples() -> None:
    """A rank's loader counts its own samples: one rank that continues for two repeats samples."""
    first = StatefulDataLoader(
        range(64), batch_size=4, sampler=torch.utils.data.DistributedSampler(range(64), 2, 0, shuffle=False)
    )
    stream = iter(first)
    seen = [int(i) for _ in range(4) for i in next(stream)]
    seen += [i + 1 for i in seen]  # those of the other rank
    second = StatefulDataLoader(range(64), batch_size=4, shuffle=False)
    second.load_state_dict(first.state_dict())
    rest = [int(i) for b in second for i in b]
    assert sorted(seen + rest) != list(range(64))


@pytest.mark.parametrize("make", [torch.utils.data.DataLoader, StatefulDataLoader])
def test_samples_of_workers_are_equal_after_restart(make: Any) -> None:
    """This includes augmentation within an epoch, with prefetching workers, and without workers instead of two."""
    whole = ckpt.Loader(Noisy(40), 4, seed=3, make=make)
    expected = [b for _ in range(2) for b in whole]
    assert whole.epoch == 2 and not torch.equal(expected[0][0], expected[10][0])
    first = ckpt.Loader(Noisy(40), 4, seed=3, num_workers=2, make=make, multiprocessing_context="spawn")
    got = []
    for batch in first:
        got.append(batch)
        if len(got) == 3:
            break
    second = ckpt.Loader(Noisy(40), 4, seed=3, make=make)
    second.load_state_dict(first.state_dict())
    assert second.remaining == 7 and len(second) == 10
    while second.epoch < 2:
        got += list(second)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_loader_does_not_use_global_generators() -> None:
    """Iterating over the data, or starting to, draws nothing from the global generators."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    list(ckpt.Loader(Noisy(10), 2))
    after = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_state_of_other_data_is_rejected() -> None:
    """Another length, seed or order; invalid states; ranks at different positions."""
    loader = ckpt.Loader(range(20), 2)
    next(iter(loader))
    state = loader.state_dict()
    other = ckpt.Loader(range(30), 2, seed=1)
    with pytest.raises(ckpt.errors.UsageError, match="samples was 20, is 30; seed was 0, is 1"):
        other.load_state_dict(state)
    assert other.state_dict()["position"] == 0
    with pytest.raises(ckpt.errors.CorruptError):
        other.load_state_dict({"epoch": 1})
    with pytest.raises(ckpt.errors.UsageError, match="different numbers of batches"):
        ckpt.Loader(range(20), 2).load_state_dicts([state, {**state, "position": 9}], 0, 3)


def test_unsupported_datasets_and_arguments_are_rejected() -> None:
    """Datasets without indices, invalid values, and arguments that would change the order."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(())

    for words in ({"dataset": Stream()}, {"dataset": iter(())}, {"batch_size": 0}, {"sampler": [1]}, {"rank": 1}):
        arguments: dict[str, Any] = {"dataset": range(4), **words}
        with pytest.raises(ckpt.errors.UsageError):
            ckpt.Loader(**arguments)


EARLY = """
import os, ckpt
import torch.distributed as dist
loader = ckpt.Loader(range(8), 2)
assert len(list(loader)) == 4
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=0, world_size=1)
assert len(list(loader)) == 4  # one of one, as before
dist.destroy_process_group()
dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=4)
try:
    list(loader)
except ckpt.errors.UsageError as error:
    print(error)
assert len(list(ckpt.Loader(range(8), 2))) == len(list(ckpt.Loader(range(8), 2, rank=1, world=4))) == 1
os._exit(os.write(1, b"") )
"""


def test_loader_created_before_process_group_is_rejected(tmp_path: Path) -> None:
    """Created before the process group, it would give every rank all samples."""
    path = f"{REPO}:{REPO / 'backends'}"
    environment = {**os.environ, "PYTHONPATH": path, "STORE": str(tmp_path / "store")}
    words = [sys.executable, "-u", "-c", "import torch.testing._internal.distributed.fake_pg\n" + EARLY]
    done = run_python(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "rank 0 of 1, but this is now rank 1 of 4" in done.stdout, done.stderr


JOB = """
import os, signal, sys, ckpt, torch
import torch.distributed as dist
if __name__ == "__main__":  # workers are spawned: they come by here too
    dist.init_process_group("gloo")
    rank, (run, kill) = dist.get_rank(), sys.argv[1:]
    loader = ckpt.Loader(range(96), 2, seed=5, num_workers=1, multiprocessing_context="spawn")
    with ckpt.Checkpointer({"loader": loader}, run) as cp:
        step = cp.restore(default=0)
        for batch in loader:
            step += 1
            os.write(1, f"GIVEN {rank} {step} {','.join(str(int(i)) for i in batch)}\\n".encode())
            save = cp.step(step)
            if step == int(kill):
                save.wait_staged()
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    os._exit(0)
"""


def test_killed_job_continues_with_more_ranks(run_dir: str) -> None:
    """SIGKILL of all ranks within an epoch: all job attempts together get each sample once, up to their last steps."""
    given_out: list[int] = []
    for world, kill in ((2, 7), (3, 10), (1, 0)):
        ranks = launch(world, JOB, run_dir, kill, port=free_port(), timeout_s=200)
        lines = [line.split() for rank in ranks for line in rank.stdout.splitlines() if line.startswith("GIVEN")]
        assert lines, [rank.stderr for rank in ranks]
        given_out += [int(i) for line in lines for i in line[3].split(",")]
        assert all((rank.returncode == 0) == (kill == 0) for rank in ranks), [rank.stderr for rank in ranks]
    assert sorted(given_out) == list(range(96))
