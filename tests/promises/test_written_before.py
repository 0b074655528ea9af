"""Runs that an earlier version has written are read bit for bit: see `fixtures/make_runs.py`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckpt
import inside
from parallel import free_port, launch
from processes import REPO
from run_files import data_files
from s3_server import MotoServer, environment
from toy_states import differences, freeze

FIXTURES = REPO / "tests" / "fixtures"
sys.path.insert(0, str(FIXTURES))
import make_runs  # noqa: E402

KINDS = ("folder", "increments", "ranks", "bucket")
Place = Callable[..., str]
EXPECTED = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import make_runs, test_written_before
torch.set_num_threads(1)
dist.init_process_group("gloo")
state = make_runs.divided()
test_written_before.check_restore(state, sys.argv[2], "ranks")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The location of a copy of a run: a folder, or a bucket with the same objects."""
    with contextlib.ExitStack() as stack:

        def made(kind: str, change: Callable[[Path], None] = lambda run: None) -> str:
            shutil.copytree(FIXTURES / "runs" / kind, tmp_path / kind)
            change(tmp_path / kind / "run")
            if kind != "bucket":
                return str(tmp_path / kind / "run")
            server = stack.enter_context(MotoServer())
            for name, value in environment(server.url).items():
                monkeypatch.setenv(name, value)
            _upload(server, tmp_path / kind)
            return "s3://bucket/run"

        yield made


def _upload(server: MotoServer, folder: Path) -> None:
    import boto3

    server.make_bucket("bucket")
    client = boto3.client("s3", endpoint_url=server.url)
    for path in folder.rglob("run/**/*"):
        if path.is_file():
            client.put_object(Bucket="bucket", Key=str(path.relative_to(folder)), Body=path.read_bytes())


def expected(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of the newest step, and plain values."""
    with safe_open(FIXTURES / "runs" / kind / "expected.safetensors", "pt") as file:
        values = {key: json.loads(text) for key, text in file.metadata().items()}
        return {name: file.get_tensor(name) for name in file.keys()}, values  # noqa: SIM118


def differing(found: dict[str, torch.Tensor], kind: str) -> list[str]:
    wanted, _ = expected(kind)
    names = found.keys() | wanted.keys()
    same = {n for n in found.keys() & wanted.keys() if found[n].dtype == wanted[n].dtype}
    return sorted(n for n in names if n not in same or not torch.equal(found[n], wanted[n]))


def check_restore(state: dict[str, Any], url: str, kind: str) -> None:
    """A Checkpointer gives back every bit of the newest step, and the plain values."""
    with ckpt.Checkpointer(state, ckpt.Tier(url, every=1000)) as cp:
        assert cp.restore() == make_runs.STEPS[kind]
        done = cp.last_restore
        assert done is not None and not done.skipped
    assert differing(make_runs.tensors(state), kind) == []
    _, values = expected(kind)
    assert state["plain"]["losses"] == values["losses"]
    assert state["optim"].param_groups[0]["lr"] == values["lr"]


@pytest.mark.parametrize("kind", KINDS)
def test_restored(place: Place, kind: str) -> None:
    """By a Checkpointer; of four ranks by one."""
    state = make_runs.build(make_runs.ROWS if kind == "increments" else 16)
    check_restore(state, place(kind), kind)


def test_restored_by_as_many_ranks(place: Place) -> None:
    done = launch(make_runs.WORLD, EXPECTED, FIXTURES, place("ranks"), port=free_port())
    assert [process.returncode for process in done] == [0] * make_runs.WORLD, done[0].stderr


@pytest.mark.parametrize("kind", KINDS)
def test_loaded(place: Place, kind: str) -> None:
    assert differing(dict(ckpt.load(place(kind))), kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_verified(place: Place, kind: str) -> None:
    assert inside.main(["verify", place(kind), "--all"]) == 0


def test_another_format_is_refused(place: Place) -> None:
    """By its number, with nothing restored and nothing changed."""

    state = make_runs.build(16)
    before = freeze(state)
    url = place("folder", lambda run: inside.rewrite_format(run, major=1))
    with pytest.raises(ckpt.errors.FormatError, match=r"format 1\."):
        ckpt.Checkpointer(state, ckpt.Tier(url))
    assert differences(freeze(state), before) == []


def test_increments_refer_to_older_packs_and_are_encoded() -> None:
    """Else the fixture would show nothing."""
    saved = inside.newest(FIXTURES / "runs" / "increments" / "run")
    assert saved.steps_of_files > {saved.step}
    assert set(saved.encodings) > {"raw"}
    assert saved.has_bases, "and one is a difference"


@pytest.mark.parametrize("kind", KINDS)
def test_negative_control_a_flipped_byte_is_not_accepted(place: Place, kind: str) -> None:
    """The last one of each data file; of what all ranks have, each has stored a copy."""

    def flip(run: Path) -> None:
        for file in data_files(run):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)

    url = place(kind, flip)
    assert inside.main(["verify", url, "--all"]) == 1
    with pytest.raises(ckpt.errors.CorruptError):
        dict(ckpt.load(url))
