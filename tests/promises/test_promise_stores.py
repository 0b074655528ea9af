"""The location of a run: which checkpoints stay there, who may read it, and which locations are rejected."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import ckpt
import inside
import toy
from ckpt.errors import SaveError, StoreError, UsageError
from model_disk import volume
from processes import REPO, eventually, killed, run_script
from run_files import KINDS, keys_in, kind_of

# -- who may read a run --

LIFE = """
import os, signal, sys
os.umask(int(sys.argv[2], 8))
import ckpt, toy
state = toy.build()
tiers = [ckpt.Tier(sys.argv[1], every=2, keep=2)]
options = ckpt.Options(metrics=ckpt.Metrics(tensorboard=sys.argv[3]))
with ckpt.Checkpointer(state, tiers, memory=ckpt.Memory(linger_s=0), options=options) as cp:
    cp.restore(default=0)
    for step in range(1, 12):
        toy.train_step(state)
        cp.step(step).wait_staged(30)
        if step % 2 == 0:
            cp.save(step).wait_durable(30)
    os.kill(os.getpid(), signal.SIGKILL)
"""
COMMAND = """
import os, runpy, sys
os.umask(int(sys.argv[1], 8))
sys.argv = ["ckpt", *sys.argv[2:]]
runpy.run_module("ckpt", run_name="__main__")
"""


@pytest.mark.parametrize("umask", [0o027, 0o002])
def test_a_run_is_as_readable_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    """Every file of a run has mode 0666 less the umask, every folder 0777: after commits, retirement, a SIGKILL and the
    writer's report about it. The same applies to the folders above it, exports, and a report."""
    home = tmp_path / "team"
    run, text = home / "someone" / "run", f"{umask:o}"
    result = run_script(LIFE, run, text, home / "boards")
    assert killed(result), result.stderr
    assert eventually(lambda: any(run.glob("faults/*.json"))), "the writer tells what it saw"
    for words in (
        ["restore", run, "--to", home / "out" / "exp.safetensors"],
        ["restore", run, "--to", home / "out" / "other", "--format", "run"],
        ["report", run, "-o", home / "page.html"],
    ):
        result = run_script(COMMAND, text, *words)
        assert result.returncode == 0, result.stderr
    made = [home, *home.rglob("*")]
    assert {kind_of(key) for key in keys_in(run)} >= {*KINDS, "format", "log", "faults", "ledger"}
    wrong = {str(path): f"{mode:o}" for path in made if (mode := mode_of(path)) != usual(path) & ~umask}
    assert not wrong


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def usual(path: Path) -> int:
    return 0o777 if path.is_dir() else 0o666


# -- what stays --


@pytest.mark.parametrize(
    ("settings", "stay"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"keep": "all"}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"keep": 3}, [6, 7, 8]),
        ({"keep": ckpt.Keep(last=2, every=4)}, [4, 7, 8]),
    ],
    ids=["nothing", "all", "three", "some"],
)
def test_keep_rules_decide_which_checkpoints_stay(run_dir: str, settings: dict[str, Any], stay: list[int]) -> None:
    """All checkpoints, a number, or a `Keep`, through the writer, which deletes nothing else; `ckpt prune` accepts the
    same settings afterwards."""
    state = toy.build()
    with ckpt.Checkpointer(state, [ckpt.Tier(run_dir, every=1, full_every=1, **settings)], memory=None) as cp:
        for step in range(1, 9):
            toy.train_step(state)
            save = cp.step(step)
            assert save is not None
            save.wait_durable(60)
    assert steps_of(run_dir) == stay
    assert json.loads(told("prune", run_dir, "--keep-last", "all", "--yes", "--json").stdout)["give_up"] == []
    assert steps_of(run_dir) == stay
    assert told("prune", run_dir, "--keep-last", 2, "--yes").exit_code == 0
    assert steps_of(run_dir) == stay[-2:]


def test_plain_location_keeps_everything(tmp_path: Path) -> None:
    """A folder or URL that is not a `Tier` keeps everything, in every argument for tiers; a `Tier` is the same in all
    of them."""
    folder, three = str(tmp_path / "run"), ckpt.Tier(str(tmp_path / "run"), keep=3)
    for kept, given in ((True, folder), (False, three)):
        words: Any = [given]
        keeps = [inside.keep_of(words), inside.keep_of_dcp(words)]
        if kept:
            keeps += [inside.keep_of(words, every) for every in ("auto", 20, "10min")]
        assert [keep.all for keep in keeps] == [kept] * len(keeps)
        assert all(keep.last == 3 for keep in keeps)


@pytest.mark.parametrize("keep", ["some", "3", "", 0, -1, True, 2.5, None, ["all"]])
def test_other_settings_are_rejected(keep: Any) -> None:
    with pytest.raises(UsageError, match=r"all|from 1"):
        ckpt.Tier("/tmp/run", keep=keep)


def test_full_disk_error_names_the_remedy(tmp_path: Path) -> None:
    """If everything is kept, a disk fills up: the error explains how to delete older checkpoints. After that the same
    run continues, and its checkpoints are intact."""
    with volume(tmp_path, "tmpfs", 8) as place:
        run, state = str(place.path / "run"), toy.build()
        with ckpt.Checkpointer(state, ckpt.Tier(run, every=1, full_every=1)) as cp:
            with pytest.raises(SaveError, match=r"no space left.*ckpt prune .* --keep-last 3.*keep=3") as caught:
                for step in range(1, 1000):
                    toy.train_step(state)
                    save = cp.step(step)
                    assert save is not None
                    save.wait_durable(60)
            assert f"file://{run}" in str(caught.value)
            full = steps_of(run)
            assert full == list(range(1, step)) and len(full) > 10
            pruned = told("prune", run, "--keep-last", 3, "--yes")
            assert pruned.exit_code == 0, pruned.output
            toy.train_step(state)
            assert cp.save(step + 1).wait_durable(60).step == step + 1
        assert steps_of(run) == [*full[-3:], step + 1]
        assert told("verify", run, "--all").exit_code == 0


# -- places that cannot hold a run --


class Honest(MemoryFileSystem):  # type: ignore[misc]
    """Objects of a class of its own each; what is deleted was there."""

    def __init_subclass__(cls) -> None:
        cls.store, cls.pseudo_dirs = {}, [""]
        cls.protocol = cls.__name__.lower()
        fsspec.register_implementation(cls.protocol, f"{__name__}.{cls.__name__}", clobber=True)

    store: dict[str, Any] = {}  # noqa: RUF012 - as of MemoryFileSystem
    pseudo_dirs = [""]  # noqa: RUF012


class Keeping(Honest):
    """A store that works correctly."""


class Twice(Honest):
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        super().pipe_file(path, value, **more)


class Both(Honest):
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        there = self.exists(path)
        super().pipe_file(path, value, **more)
        if there and mode == "create":
            raise FileExistsError(path)


class Whole(Honest):
    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        return bytes(super().cat_file(path, **more))


class First(Honest):
    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        return bytes(super().cat_file(path, **more))[: None if end is None else end - (start or 0)]


class Looking(Honest):
    pipe_file = fsspec.AbstractFileSystem.pipe_file  # looks, and then writes


class Lost(Honest):
    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        if path.endswith("/probe"):
            raise FileNotFoundError(path)
        return bytes(super().cat_file(path, start=start, end=end, **more))


class Unlisted(Honest):
    def find(self, path: str, *details: Any, **more: Any) -> Any:
        return {name: info for name, info in super().find(path, *details, **more).items() if "probe" not in name}


MISFITS = {
    "twice": "create if absent: an object can be created twice",
    "both": "create if absent: it reports that an object exists, but overwrites it",
    "whole": "ranges: a request for 13 bytes of an object from byte 7 fails .*bytes were requested",
    "first": "ranges: a request for 13 bytes of an object from byte 7 returns other bytes",
    "lost": "read after write: an object that was just stored cannot be found",
    "unlisted": "read after write: an object that was just stored is not listed",
    "looking": "create if absent: its driver, Looking, cannot create an object only if it is absent",
}


@pytest.mark.parametrize("scheme", MISFITS)
def test_unsuitable_store_is_rejected_by_name(scheme: str) -> None:
    """When it is opened, with its URL and what it did, and nothing is left there; also where a run was copied to it,
    which stays as it was. The same driver without the fault holds one."""
    driver = fsspec.get_filesystem_class(scheme)

    def refused() -> None:
        with pytest.raises(StoreError, match=MISFITS[scheme]) as caught:
            inside.open_place(f"{scheme}://bucket/run")
        assert str(caught.value).startswith(f"{scheme}://bucket/run cannot store a run, because it does not guarantee ")
        assert "gs:// or az://" in str(caught.value) and not caught.value.retryable

    refused()
    assert driver.store == {}
    inside.open_place("keeping://bucket/run")
    (made,) = Keeping.store
    assert made.endswith("bucket/run/FORMAT.json")
    driver().pipe({made.replace("keeping", scheme): bytes(Keeping.store[made].getvalue())})
    before = {path: bytes(file.getvalue()) for path, file in driver.store.items()}
    if scheme not in ("both", "lost", "unlisted"):  # they show when other bytes are written
        refused()
    assert {path: bytes(file.getvalue()) for path, file in driver.store.items()} == before


def test_guarantees_in_errors_are_those_of_the_guide() -> None:
    """Each error names a guarantee that the guide explains."""
    page = (REPO / "docs/guide/storage.md").read_text()
    named = {error.partition(":")[0] for error in MISFITS.values()}
    assert named == {"create if absent", "read after write", "ranges"}
    for guarantee in [*named, "rename", "fsync of folders", "append", "order"]:
        assert f"| **{guarantee}** |" in page


def steps_of(run: str | Path) -> list[int]:
    return sorted(one["step"] for one in json.loads(told("ls", run, "--json").stdout)["checkpoints"])


def told(*words: object) -> Any:
    return inside.invoke(*words)
