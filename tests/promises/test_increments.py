"""Increments end to end: a real Checkpointer, its writer process, real files, an S3 server, and faults.

The state has a frozen layer of two chunks, a trained part, an embedding with few changing rows, bf16 weights with fp32
masters, experts of which one is used per step, and every dtype with the bits where mistakes hide.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import inside
from ckpt.errors import CheckpointError, SaveError
from commands import flip
from inside import INCREMENT_POINTS, SavedStep
from kills import Chain, Told, Trainer, kill_all, problems
from model_disk import Volume, volume
from processes import eventually, killed, writers
from run_files import DATA, INDEX, MANIFEST, checkpoint_files, data_files, pattern, select
from s3_server import FaultProxy, MotoServer, storage_options

State = dict[str, Any]
runs = count()


# -- a state, and how it changes --


def odd(dtype: torch.dtype) -> torch.Tensor:
    """Every NaN, both zeros, denormals and infinities of a dtype, and noise."""
    if dtype == torch.bool:
        return torch.tensor([True, False] * 200)
    word = {torch.complex128: 8, torch.complex64: 4, torch.complex32: 2}.get(dtype, dtype.itemsize)
    top = 1 << (8 * word - 1)
    few = [0, 1, top, top + 1, top - 1, 2 * top - 1, top // 2, 3 * (top // 2), top // 2 + 1, (top // 2) + top // 4]
    data = b"".join(n.to_bytes(word, "little") for n in few) * 400
    data += torch.randint(0, 256, (2000 * word,), dtype=torch.uint8).numpy().tobytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def build(seed: int = 0, size: int = 1100) -> State:
    torch.manual_seed(seed)
    frozen = torch.nn.Linear(size, size, bias=False).requires_grad_(False)
    model = torch.nn.ModuleDict({"frozen": frozen, "lora": torch.nn.Linear(size, 40)})
    plain = {
        "embedding": torch.randn(4000, 64),
        "master": torch.randn(300, 300),
        "half": torch.zeros(300, 300, dtype=torch.bfloat16),
        **{f"expert{i}": torch.randn(100, 200) for i in range(4)},
        **{f"odd_{name}": odd(dtype) for name, dtype in inside.DTYPES.items()},
    }
    plain["half"].copy_(plain["master"])
    optim = torch.optim.AdamW(model["lora"].parameters(), lr=1e-2)
    return {"model": model, "optim": optim, "plain": plain, "rng": ckpt.RNG(), "meta": {"steps": 0}}


def train_step(state: State) -> None:
    """For `kills.TRAIN`."""
    state["meta"]["steps"] += 1
    train(state, state["meta"]["steps"])


def train(state: State, step: int) -> None:
    model, plain, width = state["model"], state["plain"], state["model"]["frozen"].in_features
    state["optim"].zero_grad()
    model["lora"](model["frozen"](torch.randn(4, width))).pow(2).mean().backward()
    state["optim"].step()
    plain["embedding"][torch.randint(0, 4000, (20,))] += 0.1
    plain["master"] += 0.001 * torch.randn(300, 300)
    plain["half"].copy_(plain["master"])
    plain[f"expert{step % 4}"] *= 1.01
    names = [name for name in plain if name.startswith("odd")]
    bits = plain[names[step % len(names)]].view(torch.uint8)
    bits[:: max(1, len(bits) // 3)] ^= 1


def tensors(state: State) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": t.detach() for name, t in state["model"].state_dict().items()}
    names = {p: name for name, p in state["model"].named_parameters()}
    for p, values in state["optim"].state.items():
        found |= {f"optim.state.model.{names[p]}.{key}": v for key, v in values.items() if isinstance(v, torch.Tensor)}
    return found | {f"plain.{name}": t for name, t in state["plain"].items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def frozen_copy(state: State) -> dict[str, torch.Tensor]:
    return {name: bits(t).clone() for name, t in tensors(state).items()}


def differing(state: State, wanted: dict[str, torch.Tensor]) -> list[str]:
    found = tensors(state)
    assert found.keys() == wanted.keys()
    return [name for name, t in found.items() if not torch.equal(bits(t), wanted[name])]


def digest(state: State) -> str:
    total = hashlib.sha256()
    for _, t in sorted(tensors(state).items()):
        total.update(bits(t).numpy().tobytes())
    total.update(torch.get_rng_state().numpy().tobytes())
    return total.hexdigest()


# -- the contents of a tier --


def newest(url: str) -> SavedStep:
    """The newest checkpoint of the present history."""
    return next(iter(inside.history(url).values()))


def data_files_in(folder: Path | str) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in data_files(folder):
        with contextlib.suppress(FileNotFoundError):  # deleted during the call
            found[str(path.relative_to(folder))] = path.stat().st_size
    return found


def named(folder: Path | str) -> set[str]:
    return {key for saved in inside.history(folder).values() for key in saved.files}


def verified(url: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the problems that `ckpt verify --all` finds."""
    capsys.readouterr()
    inside.command("verify", url, "--all", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"]
    return found["problems"] + [p for c in found["checkpoints"] for p in c["problems"]]


# -- every bit, at every step --


@pytest.mark.parametrize(
    "compression", ["zstd", *(pytest.param(one, marks=pytest.mark.long) for one in ("none", "auto"))]
)
def test_every_step_restores_bit_exactly(compression: str, run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By load, by its slices and by restore, at every step that is kept; increments name older data files, and with
    compression every codec is used; `verify --all` is clean."""
    state, wanted = build(), dict[int, dict[str, torch.Tensor]]()
    tier = ckpt.Tier(run_dir, every=1, keep=10, compression=compression, full_every=5)
    with ckpt.Checkpointer(state, [tier]) as cp:
        cp.restore(default=0)
        for step in range(1, 8):
            train(state, step)
            save = cp.step(step)
            wanted[step] = frozen_copy(state)
            assert save is not None and save.wait_durable(60).step == step
    found = inside.history(run_dir)
    assert [step for step, saved in found.items() if saved.full] == [5, 2, 1]
    for step, saved in found.items():
        assert (saved.steps_of_files == {step}) == saved.full
        assert saved.needs == ([] if saved.full else [step - 1])
    encodings = sum((saved.encodings for saved in found.values()), Counter[str]())
    if compression == "zstd":
        assert set(encodings) == {"raw", "planes", "delta"}
    if compression == "none":
        assert set(encodings) == {"raw"}
    assert verified(run_dir, capsys) == []
    for step in wanted:
        loaded = ckpt.load(run_dir, step=step)
        for name, data in wanted[step].items():
            assert torch.equal(bits(loaded[name]), data), f"{name} at {step}"
        rows = loaded.slice("plain.embedding", slice(1000, 3000), slice(3, 5))
        whole = wanted[step]["plain.embedding"].view(torch.float32).view(4000, 64)
        assert torch.equal(bits(rows), bits(whole[1000:3000, 3:5]))
    other = build(seed=9)
    with ckpt.Checkpointer(other, [tier]) as cp:
        for step in sorted(wanted, reverse=True):
            assert cp.restore(step=step) == step
            assert differing(other, wanted[step]) == []


# -- what is kept, and what it costs --


def small_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "frozen": {"w": torch.randn(600, 600)},
        "slow": {f"w{i}": torch.randn(100, 100) for i in range(5)},
        "moving": {"w": torch.randn(100, 100)},
    }


FROZEN, SLOW, MOVING = 600 * 600 * 4, 5 * 100 * 100 * 4, 100 * 100 * 4


@pytest.mark.parametrize("keep, full_every, compression", [(3, 2, "zstd"), (2, 1000, "none")])
def test_exactly_the_needed_data_files_stay(keep: int, full_every: int, compression: str, run_dir: str) -> None:
    """Over many checkpoints, every data file that a live one names exists, the newest and the two newest full ones
    stay, and an increment stores only changes. At the end, no unreferenced data file is left."""
    state, before = small_state(), dict[str, int]()
    tier = ckpt.Tier(run_dir, every=1, keep=keep, full_every=full_every, compression=compression)
    with ckpt.Checkpointer(state, [tier]) as cp:
        cp.restore(default=0)
        for step in range(1, 25):
            state["moving"]["w"] += torch.randn(100, 100)
            state["slow"][f"w{step % 5}"] += 1.0
            save = cp.step(step)
            assert save is not None
            save.wait_durable(60)
            if step % 3:
                continue
            while True:  # a clean-up may be under way while we look
                with contextlib.suppress(CheckpointError):
                    found, there = inside.history(run_dir), data_files_in(run_dir)
                    if found.keys() == inside.history(run_dir).keys():
                        break
            assert {key for saved in found.values() for key in saved.files} <= there.keys()
            assert next(iter(found)) == step and len(found) >= min(step, keep)
            assert sum(saved.full for saved in found.values()) >= min(2, step)
            own = sum(size for key, size in there.items() if found[step].owns(key))
            if not found[step].full:
                assert own < 2 * MOVING + SLOW // 2 + 20_000, f"step {step} takes {own}"
            else:
                assert own > 0.7 * (FROZEN + SLOW + MOVING)
            before = there
    there = data_files_in(run_dir)
    assert named(run_dir) == there.keys()
    full = FROZEN + SLOW + MOVING + 20_000
    wholes = sum(saved.full for saved in inside.history(run_dir).values())
    assert sum(there.values()) < (wholes + 1) * full + 2 * len(there) * (MOVING + SLOW // 5 + 9000)
    assert len(before) < 60


def test_negative_control_a_missing_data_file_is_detected(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If the clean-up deleted a data file that only an increment names, both checks of a run would fail."""
    state = small_state()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=1, keep=4, compression="none")) as cp:
        cp.restore(default=0)
        for step in range(1, 5):
            state["moving"]["w"] += 1
            cp.step(step).wait_durable(60)  # type: ignore[union-attr]
    assert verified(run_dir, capsys) == []
    file, _ = newest(run_dir).place_of("frozen.w")
    Path(run_dir, file).unlink()
    assert any(file in problem for problem in verified(run_dir, capsys))
    assert not {file} <= data_files_in(run_dir).keys()


@pytest.mark.parametrize(
    "what, place", [("one data file", "folder"), ("earlier copy", "folder"), ("data files", "bucket")]
)
def test_increment_fails_and_next_is_full_if_its_base_is_gone(
    what: str, place: str, moto: MotoServer, url: str, run_dir: str
) -> None:
    """Somebody deletes data files while the job runs, or puts an earlier copy of the run in its place."""
    state, copy = small_state(), dict[str, bytes]()
    tier = bucket(url, moto, keep="all") if place == "bucket" else ckpt.Tier(run_dir, every=1)
    inside.use_options(url, storage_options(moto.url))
    with ckpt.Checkpointer(state, tier, memory=None) as cp:
        for step in range(1, 8):
            state["moving"]["w"].fill_(step)
            if step == 6:
                with pytest.raises(SaveError, match=rf"builds on {pattern(DATA)}, which is gone"):
                    cp.save(step).wait_durable(60)
                continue
            cp.save(step).wait_durable(60)
            if step == 1:
                copy = inside.read_files(tier.url)
            if step == 5:
                saved = newest(tier.url)
                assert not saved.full
                file = saved.place_of("frozen.w")[0]
                names = inside.file_names(tier.url)
                gone = {"data files": select(names, DATA), "one data file": [file], "earlier copy": names}
                inside.delete_files(tier.url, gone[what])
                inside.write_files(tier.url, copy if what == "earlier copy" else {})
    found = ckpt.load(tier.url)
    assert found.step == 7 and all(bool((found[f"{key}.w"] == state[key]["w"]).all()) for key in ("frozen", "moving"))


# -- deaths --


def chain(run: str, compression: str) -> Chain:
    """A run of increments, and the processes that train it one after the other."""
    tier = {"every": 2, "keep": 3, "full_every": 4, "compression": compression}
    settings = {"build": {"size": 300}, "wait": 4, **tier}
    return Chain(run, Told(), module="test_increments", steps=24, settings=settings)


def check(chain: Chain, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that every bit equals an undisturbed run, all kept checkpoints are intact, and `gc` can delete the rest."""
    state = build(size=300)
    for _ in range(chain.steps):
        train_step(state)
    assert chain.told.digest == digest(state)
    assert verified(chain.run, capsys) == []
    assert problems(chain.run) == []
    assert any(not saved.full for saved in inside.history(chain.run).values()), "not a run of increments"
    inside.command("gc", chain.run, "--yes", "--json")  # what a death left between PLAN and deletion
    assert named(chain.run) == data_files_in(chain.run).keys()
    assert eventually(lambda: not writers(folder)), "a process is left"


@pytest.mark.parametrize("compression", ["zstd", pytest.param("none", marks=pytest.mark.long)])
def test_deaths_while_an_increment_is_saved(
    compression: str, run_dir: str, own_sockets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The writer dies three times during an increment, then both processes together: nothing safe is lost, the next
    start leaves nothing behind, and every bit is right."""
    run = chain(run_dir, compression)
    fails = [f"writer/{point}:kill:{nth}" for nth, point in enumerate(INCREMENT_POINTS, 1)]
    last = "trainer/stage.copied:kill:9,writer/manifest.stored:kill:2"
    result = run.train(fails[0], spares=(*fails[1:], "writer/index.stored:kill:2"))
    assert result.returncode == 0, result.stderr
    assert run.told.replaced >= len(INCREMENT_POINTS)
    check(run, own_sockets, capsys)
    shutil.rmtree(run_dir)
    kill_all(writers(own_sockets))
    run = chain(run_dir, compression)
    assert killed(run.train(last, left="disk"))
    kill_all(writers(own_sockets))
    assert run.train().returncode == 0
    check(run, own_sockets, capsys)


# -- other processes in the same tier --

CLEANER = """
import sys, threading
import inside

url, done = sys.argv[1], []
threading.Thread(target=lambda: done.append(sys.stdin.read()), daemon=True).start()
print("cleaning", flush=True)
rounds = 0
while not done:
    for words in (["prune", url, "--keep-last", "1", "--yes", "--json"], ["gc", url, "--yes", "--json"]):
        try:
            inside.command(*words)
        except Exception as error:
            print("failed", type(error).__name__, error, file=sys.stderr, flush=True)
    rounds += 1
    print("round", rounds, flush=True)
"""


@pytest.mark.parametrize("compression", ["zstd", pytest.param("none", marks=pytest.mark.long)])
def test_cleaners_and_a_trainer_share_a_tier(compression: str, run_dir: str) -> None:
    """While others prune and collect constantly, training continues. A save may fail with an error of ours, but not one
    after it. All live checkpoints stay readable, and restore at the end."""
    state, failed, saved = build(size=300), list[str](), list[int]()
    tier = ckpt.Tier(run_dir, every=1, keep=6, full_every=6, compression=compression)
    with ckpt.Checkpointer(state, [tier]) as cp:
        cp.restore(default=0)
        train(state, 1)
        cp.save(1).wait_durable(60)
        cleaner = Trainer(CLEANER, run_dir)
        cleaner.read_until("round")
        try:
            for step in range(2, 40):
                train(state, step)
                try:
                    save = cp.step(step)
                    assert save is not None
                    save.wait_durable(60)
                    saved.append(step)
                except SaveError as error:
                    failed.append(str(error))
                if step % 4 == 0:
                    assert inside.lasting_problems_at(run_dir) == []
        finally:
            assert cleaner.process.stdin is not None
            cleaner.process.stdin.close()
            said = cleaner.read_until("never")
            cleaner.process.wait(60)
        assert cleaner.process.returncode == 0
        assert said.count("round") > 1, said
        wanted = frozen_copy(state)
        cp.wait(60)
    assert len(saved) > 20 and len(failed) < 10, failed
    assert all("builds on" in text or "retired" in text for text in failed), failed
    assert inside.lasting_problems_at(run_dir) == []
    other = build(seed=5, size=300)
    with ckpt.Checkpointer(other, run_dir) as cp:
        assert cp.restore() == max(saved)
        assert max(saved) < 39 or differing(other, wanted) == []


# -- damage --


def built(folder: str, *, steps: int = 7, second: ckpt.Tier | None = None, **settings: Any) -> dict[int, Any]:
    """A run whose steps 1, 2 and 4 are full and the others increments; what every step was."""
    state, wanted = build(size=300), {}
    tiers = [ckpt.Tier(folder, every=1, keep=4, full_every=4, **settings)]
    with ckpt.Checkpointer(state, [*tiers, *([second] if second else [])]) as cp:
        cp.restore(default=0)
        for step in range(1, steps + 1):
            train(state, step)
            save = cp.step(step)
            wanted[step] = frozen_copy(state)
            assert save is not None
            save.wait_durable(60, tier="all")
    return wanted


def injure(folder: str, what: str) -> None:
    """One bit: in the frozen layer that all increments share, in what deltas of all of them are based on, in a delta of
    the newest only, in its manifest and its index."""
    saved = newest(folder)
    if what == "manifest":
        for path in checkpoint_files(folder, MANIFEST, INDEX, of=saved.id):
            flip(path, path.stat().st_size - 40)
        return
    if what == "shared":
        key, offset = saved.place_of("model.frozen.weight")
        assert not saved.owns(key)
    else:
        key, offset = saved.place_of_base() if what == "base" else saved.place_of_difference()
        assert saved.owns(key) == (what == "delta")
    flip(Path(folder, key), offset + 20)


@pytest.mark.parametrize("what, step", [("shared", 7), ("base", 2), ("delta", 6), ("manifest", 6)])
def test_damage_costs_only_checkpoints_that_share_it(what: str, step: int, run_dir: str) -> None:
    """A flipped bit in the base of all increments, in a delta, or in a manifest: a restore skips the affected
    checkpoints, reports them, and takes the newest intact one. Bytes that another full checkpoint has too come from
    there. Later saves can be read despite more damage."""
    wanted = built(run_dir, compression="zstd")
    assert inside.steps_at(run_dir) == [7, 6, 5, 4, 2]
    injure(run_dir, what)
    other = build(seed=3, size=300)
    with ckpt.Checkpointer(other, ckpt.Tier(run_dir, every=1, keep=4, compression="zstd")) as cp:
        assert cp.restore() == step
        assert differing(other, wanted[step]) == []
        assert cp.last_restore is not None
        skipped = [s for s in cp.last_restore.skipped if "damaged" in s.reason]
        assert len(skipped) == {"shared": 0, "base": 4, "delta": 1, "manifest": 1}[what]
        assert ["step 2" in text for text in cp.last_restore.repaired] == ([True] if what == "shared" else [])
        for more in (step + 1, step + 2):
            train(other, more)
            cp.save(more).wait_durable(60)
        new = frozen_copy(other)
    again = build(seed=4, size=300)
    with ckpt.Checkpointer(again, run_dir) as cp:
        assert cp.restore() == step + 2
        assert differing(again, new) == []


@pytest.mark.parametrize("what", ["shared", "base", "delta"])
def test_damage_is_repaired_from_a_second_tier(what: str, run_dir: str) -> None:
    """If another location has the same steps, stored differently, the newest is restored with the damaged piece from
    there, or from another checkpoint in the same location. The next checkpoint is full where damage was found."""
    second = ckpt.Tier(f"{run_dir}2", every=1, keep=4, compression="none")
    wanted = built(run_dir, compression="zstd", second=second)
    injure(run_dir, what)
    other = build(seed=3, size=300)
    with ckpt.Checkpointer(other, [ckpt.Tier(run_dir, every=1), second]) as cp:
        assert cp.restore() == 7
        assert cp.last_restore is not None and len(cp.last_restore.repaired) == 1
        assert (f"{run_dir}2" in cp.last_restore.repaired[0]) == (what != "shared")
        assert differing(other, wanted[7]) == []
        train(other, 8)
        cp.save(8).wait_durable(60)
        assert inside.newest(run_dir).full and not inside.newest(f"{run_dir}2").full


@pytest.mark.parametrize("keep", [2, 50])
def test_next_checkpoint_is_not_built_on_damage_that_reading_back_has_found(keep: int, run_dir: str) -> None:
    """Before it deletes older checkpoints, the writer reads the newest one back, and stores what is damaged again.

    Control: with keep=50 nothing is deleted and nothing is read, so the next checkpoint refers to the damaged file.
    """
    state, numbers, errors = build(), count(1), list[str]()
    tier = ckpt.Tier(run_dir, every=1, keep=keep, full_every=1000, compression="none")
    cp = ckpt.Checkpointer(state, [tier])
    cp.restore(default=0)

    def save() -> tuple[str, int]:
        """Return the position of the frozen layer."""
        step = next(numbers)
        train(state, step)
        try:
            cp.save(step).wait_durable(60)
        except SaveError as error:  # of the damage that clean-up has noticed
            errors.append(str(error))
        return inside.newest(run_dir).place_of("model.frozen.weight")

    try:
        places = [save() for _ in range(4)]
        assert len(set(places[1:])) == 1
        key, offset = places[-1]
        flip(Path(run_dir, key), offset + 100)
        hope_s = 2.0 if keep == 50 else 6.0
        healed = eventually(lambda: time.sleep(0.2) is None and save() != places[-1], hope_s)
        assert next(numbers) < inside.MAX_CHAIN, "it was long enough for a full one"
        save()
        problems = inside.problems_of_newest(run_dir)
    finally:
        with contextlib.suppress(SaveError):
            cp.close()
    assert healed == (problems == []) == (keep == 2)
    assert all("ckpt repair" in error and "Training can continue" in error for error in errors)


# -- full disks --


@pytest.fixture
def little(tmp_path: Path) -> Iterator[Volume]:
    with volume(tmp_path, "tmpfs", 40) as place:
        yield place


def free(place: Volume) -> int:
    found = os.statvfs(place.path)
    return found.f_bavail * found.f_frsize


def test_the_disk_is_full_in_the_middle_of_an_increment(little: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    """The saves in progress fail with an error, and training continues. With space again, the next one is committed.
    The sources of the failed saves are released, and their files are deleted."""
    url, state, numbers = str(little.path / "run"), build(size=300), count(1)
    tier = ckpt.Tier(url, every=1, keep=2, full_every=50, compression="zstd")
    with ckpt.Checkpointer(state, [tier]) as cp:
        cp.restore(default=0)

        def save() -> None:
            step = next(numbers)
            train(state, step)
            cp.save(step).wait_durable(60)

        for _ in range(4):
            save()
        filler, failed = little.path / "filler", 0
        for _ in range(3):
            room = free(little) - 300_000  # an increment takes more, and its first part fits
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, room)
            try:
                save()
            except SaveError as error:
                assert "no space left" in str(error)
                failed += 1
            filler.unlink()
            with contextlib.suppress(SaveError):  # of the one before, if it was not raised yet
                save()
        assert failed
        for _ in range(8):
            save()
        wanted, last = frozen_copy(state), next(numbers) - 1
        assert inside.lasting_problems_at(url) == []
    assert {step for step, saved in inside.history(url).items() if not saved.full} <= {last, last - 1}
    assert named(url) == data_files_in(url).keys()
    other = build(seed=2, size=300)
    with ckpt.Checkpointer(other, url) as cp:
        assert cp.restore() == last
        assert differing(other, wanted) == []
    assert verified(url, capsys) == []


# -- object storage --

QUICK = {"connect_timeout": 2, "read_timeout": 2}


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto.url) as proxy:
        yield proxy


@pytest.fixture
def url() -> str:
    return f"s3://bucket/increments{next(runs)}"


def bucket(url: str, server: MotoServer | FaultProxy, **settings: Any) -> ckpt.Tier:
    settings = {"every": 1, "keep": 4, "compression": "zstd", **settings}
    return ckpt.Tier(url, storage_options=storage_options(server.url, **QUICK), **settings)


def file_reads(proxy: FaultProxy) -> list[str]:
    return [path for path in proxy.paths() if path.startswith("GET") and re.search(pattern(DATA), path)]


def test_tier_is_raw_in_the_folder_and_compressed_in_the_bucket(
    moto: MotoServer, proxy: FaultProxy, url: str, run_dir: str
) -> None:
    """Raw in the folder, compressed in the bucket, with deltas whose bases are read from the folder: no data file is
    fetched from the bucket for them. When the folder is gone, the bucket alone has every bit of each step."""
    state, wanted = build(size=300), {}
    near = ckpt.Tier(run_dir, every=1, keep=2, compression="none")
    far = bucket(url, proxy, every=2, keep=10)
    with ckpt.Checkpointer(state, [near, far]) as cp:
        cp.restore(default=0)
        for step in range(1, 11):
            train(state, step)
            save = cp.step(step)
            assert save is not None
            save.wait_durable(60, tier="all")
            wanted[step] = frozen_copy(state)
        assert file_reads(proxy) == []
    inside.use_options(url, storage_options(moto.url))
    found = inside.history(url)
    assert [step for step, saved in found.items() if not saved.full] == [10, 8, 6]
    for step, saved in found.items():
        if not saved.full:
            assert saved.encodings["delta"], step
    assert set(inside.history(run_dir).popitem()[1].encodings) == {"raw"}
    assert inside.lasting_problems_at(url) == []
    shutil.rmtree(run_dir)
    other = build(seed=2, size=300)
    with ckpt.Checkpointer(other, bucket(url, moto, every=2)) as cp:
        for step in (10, 8, 4):
            assert cp.restore(step=step) == step
            assert differing(other, wanted[step]) == []


TWO_PLACES = """
import sys, time
import ckpt, test_increments as t

folder, url, steps, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), {options}
state = t.build(size=300)
near = ckpt.Tier(folder, every=1, keep=4, compression="none")
far = ckpt.Tier(url, every=1, keep=4, compression="zstd", storage_options=options)
cp = ckpt.Checkpointer(state, [near, far])
cp.restore(default=0)
for step in range(1, steps + 1):
    t.train(state, step)
    save = cp.step(step)
    save.wait_durable(60) if step == steps else save.wait_durable(60, tier="all")
print("committed", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "steps, match", [(4, pattern(MANIFEST, 4)), pytest.param(3, pattern(DATA, 3), marks=pytest.mark.long)]
)
def test_interrupted_promotion_is_resumed(
    steps: int, match: str, moto: MotoServer, proxy: FaultProxy, url: str, run_dir: str, own_sockets: Path
) -> None:
    """Both processes are killed during the upload of an increment, before or after its data files: the next start
    uploads it, compressed, and continues. Control: before that it is missing."""
    code = TWO_PLACES.format(options=storage_options(proxy.url, **QUICK))
    proxy.fail("hang", method="PUT", match=match, count=1000)
    trainer = Trainer(code, run_dir, url, steps)
    trainer.read_until("committed")
    assert eventually(lambda: bool(proxy.hits()))
    os.kill(trainer.process.pid, signal.SIGKILL)
    kill_all(writers(own_sockets))
    trainer.process.wait(30)
    inside.use_options(url, storage_options(moto.url))
    assert inside.steps_at(url)[0] == steps - 1
    proxy.clear()
    state = build(seed=5, size=300)
    near = ckpt.Tier(run_dir, every=1, keep=4, compression="none")
    with ckpt.Checkpointer(state, [near, bucket(url, moto)]) as cp:
        assert cp.restore() == steps
        assert eventually(lambda: inside.steps_at(url)[0] == steps, 60)
        wanted = frozen_copy(state)
        train(state, steps + 1)
        cp.save(steps + 1).wait_durable(60, tier="all")
    assert inside.lasting_problems_at(url) == []
    assert all(set(saved.encodings) - {"raw"} for saved in inside.history(url).values())
    shutil.rmtree(run_dir)
    other = build(seed=6, size=300)
    with ckpt.Checkpointer(other, bucket(url, moto)) as cp:
        assert cp.restore(step=steps) == steps
    assert differing(other, wanted) == []
