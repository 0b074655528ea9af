"""docs/format.md is enough to write a reader: `tests/lib/stranger.py` follows it and imports nothing of the library."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import ckpt
import stranger
from commands import increments
from processes import REPO
from run_files import DATA, MANIFEST, checkpoint_files

__all__ = ["increments"]  # a fixture


def check_newest(run: Path) -> set[int]:
    """Check that every tensor of the newest step is equal. Return the codecs that were used."""
    codecs: set[int] = set()
    decode = stranger.decode

    def seen(codec: int, *rest: Any) -> Any:
        codecs.add(codec)
        return decode(codec, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stranger, "decode", seen)
        found, values = stranger.read(run)
    whole = ckpt.load(run)
    assert set(found) == set(whole) and values is not None
    for name in whole:
        expected = whole[name].contiguous()
        assert found[name].tobytes() == expected.reshape(-1).view(torch.uint8).numpy().tobytes(), name
    return codecs


def test_independent_reader_reads_every_codec(increments: Path, run_dir: str) -> None:
    """Covers increments, compressed data files and deltas, with words of 2, 4 and 8 bytes and several chunks."""
    codecs = check_newest(increments)
    torch.manual_seed(1)
    master = nn.Linear(1024, 2200, bias=False)  # more than one chunk
    state = {"master": master, "small": master.weight.detach().bfloat16(), "counts": torch.arange(1 << 20)}
    tiers = [ckpt.Tier(run_dir, every=1, keep=8, compression="zstd", full_every=8)]
    with ckpt.Checkpointer(state, tiers) as cp:
        for step in range(1, 4):
            with torch.no_grad():
                master.weight *= 1.0001
            state["small"].copy_(master.weight)
            state["counts"] += 1
            cp.step(step).wait_durable()
    assert (codecs | check_newest(Path(run_dir))) == {0, 1, 2}


def test_independent_reader_uses_newest_of_the_history(run_dir: str) -> None:
    """After a rollback, later steps are not in the history. Checkpoints that are not finite are not used."""
    state = {"x": torch.zeros(4, dtype=torch.bool), "y": {"n": 0}}
    with ckpt.Checkpointer(state, [ckpt.Tier(run_dir, every=1, keep=9)], memory=None) as cp:
        for step in range(1, 6):
            state["y"]["n"] = step
            cp.step(step, finite=step < 5).wait_durable()
        assert stranger.read(run_dir)[1][1] == {"n": 4}
        cp.restore(step=2)
        assert stranger.read(run_dir)[1][1] == {"n": 2}


def test_negative_control_flipped_bit_is_detected(run_dir: str) -> None:
    """A bit is flipped in a data file, a manifest, and a log record."""
    with ckpt.Checkpointer({"x": torch.randn(1000)}, run_dir) as cp:
        cp.save(1).wait_durable()
    files = checkpoint_files(run_dir, DATA, MANIFEST)
    files.append(max(Path(run_dir, "log").iterdir()))
    for path in files:
        good = path.read_bytes()
        path.write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
        with pytest.raises((AssertionError, ValueError)):
            stranger.read(run_dir)
        path.write_bytes(good)
    assert isinstance(stranger.read(run_dir)[0]["x"], np.ndarray)


def test_raw_checkpoint_of_one_rank_loads_with_safetensors(run_dir: str) -> None:
    """All tensors are in one file, and its metadata has the checkpoint id and the rank."""
    state = {"x": torch.randn(1000), "n": torch.arange(3)}
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, compression="none"), memory=None) as cp:
        cp.save(120).wait_durable()
    (path,) = checkpoint_files(run_dir, DATA)
    found = safetensors.torch.load_file(path)
    assert torch.equal(found["x"], state["x"]) and torch.equal(found["n"], state["n"])
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"checkpoint": path.parent.name, "rank": "0", "step": "120"}
    assert path.parent.name.startswith("000000120.1-") and path.name == "rank-00000.safetensors"
    latest = json.loads(Path(run_dir, "latest.json").read_text())
    assert (latest["checkpoint"], latest["step"]) == (path.parent.name, 120)


def test_reader_is_independent_of_the_library() -> None:
    """The reader imports neither the library nor torch."""
    tree = ast.parse((REPO / "tests" / "lib" / "stranger.py").read_text())
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not any(isinstance(node, ast.ImportFrom) and node.module != "pathlib" for node in ast.walk(tree))
    assert names <= {"base64", "hashlib", "json", "math", "re", "struct", "numpy", "safetensors", "xxhash", "zstandard"}
