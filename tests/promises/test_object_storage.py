"""Training that is saved to object storage, and restored from there when nothing else is left."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

import ckpt
import inside
import toy
from ckpt.errors import AccessError, CorruptError, SaveError, UsageError
from commands import flip
from kills import Trainer
from parallel import free_port
from processes import eventually, run_script, writers
from run_files import DATA, DATA_FOLDER, checkpoint_id, data_files, data_key, pattern, select
from s3_server import FaultProxy, MotoServer, environment, storage_options

QUICK = {"connect_timeout": 2, "read_timeout": 2}
runs = count()


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        server.make_bucket("bucket")
        server.make_bucket("runs--use1-az4--x-s3")
        yield server


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto.url) as proxy:
        yield proxy


@pytest.fixture
def url() -> str:
    return f"s3://bucket/run{next(runs)}"


def tier(url: str, server: MotoServer | FaultProxy, *, every: int = 1, **settings: Any) -> ckpt.Tier:
    return ckpt.Tier(url, every, storage_options=storage_options(server.url, **QUICK), **settings)


def failed(save: ckpt.Save, url: str) -> bool:
    """Return True if the save has failed in this tier by now."""
    try:
        save.wait_durable(0, tier=url)
    except ckpt.errors.DeadlineError:
        return False
    except ckpt.CheckpointError:
        return True
    return False


def train(cp: ckpt.Checkpointer, state: dict[str, Any], steps: range, *, wait: bool = False) -> list[ckpt.Save]:
    """`wait`: until each step is where it is due, since a bucket leaves out what comes too fast."""
    saves = []
    for step in steps:
        toy.train_step(state)
        save = cp.step(step)
        if save is not None:
            saves.append(save)
            if wait and save.tiers:
                save.wait_durable(60, tier="all")
    return saves


def digest_after(steps: int) -> str:
    state = toy.build()
    for _ in range(steps):
        toy.train_step(state)
    return toy.digest(state)


ANYWHERE = """
import sys
import ckpt, toy

state = toy.build(seed=7)
with ckpt.Checkpointer(state, sys.argv[1]) as cp:
    start = cp.restore()
    print(start, cp.last_restore.tier, toy.digest(state))
"""


def test_a_machine_that_has_only_the_url_goes_on(moto: MotoServer, url: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Trained into a folder and a bucket; the folder and the memory are gone; by the URL and the environment alone a
    new process has every bit of the newest step back."""
    state = toy.build()
    folder = tmp_path / "run"
    with ckpt.Checkpointer(state, [ckpt.Tier(str(folder), every=2), tier(url, moto, every=4)]) as cp:
        cp.restore(default=0)
        train(cp, state, range(1, 9))
        cp.wait(60)
    shutil.rmtree(folder)
    for name, value in environment(moto.url).items():
        monkeypatch.setenv(name, value)
    found = run_script(ANYWHERE, url)
    assert found.stdout.split() == ["8", url, digest_after(8)], found.stderr
    assert inside.steps_at(url) == [8, 4]


def test_directory_bucket_keeps_a_run(moto: MotoServer, tmp_path: Path, monkeypatch: Any) -> None:
    """S3 Express lists in no order: a run is saved there, verified, and restored by its URL alone."""
    url = f"s3://runs--use1-az4--x-s3/run{next(runs)}"
    state = toy.build()
    with ckpt.Checkpointer(state, tier(url, moto, every=2, keep=2)) as cp:
        cp.restore(default=0)
        train(cp, state, range(1, 7), wait=True)
    names = inside.file_names(url)
    assert len(names) > 7 and names != sorted(names)  # several pages, each in another order
    for name, value in environment(moto.url).items():
        monkeypatch.setenv(name, value)
    found = run_script(ANYWHERE, url)
    assert found.stdout.split() == ["6", url, digest_after(6)], found.stderr
    run = ckpt.Run(url, storage_options=storage_options(moto.url))
    steps = [one.step for one in run.list()]
    assert steps[:2] == [6, 4] and inside.steps_at(url) == steps
    assert {one.verdict for one in run.verify()} == {"sound"}
    assert ckpt.load(url).step == 6


def test_both_tiers_damaged_in_different_chunks(moto: MotoServer, url: str, tmp_path: Path) -> None:
    """One piece is damaged here, another there: both together have it. The same piece in both: the older step."""
    state, folder, second = toy.build(), tmp_path / "run", tmp_path / "second"
    folders = [ckpt.Tier(str(home), every=2) for home in (folder, second)]
    places = [*folders, tier(url, moto, every=4)]
    with ckpt.Checkpointer(state, places) as cp:
        cp.restore(default=0)
        train(cp, state, range(1, 3))
        cp.wait(60)
    for home, offset in ((folder, 100), (second, 9000)):
        (file,) = data_files(home)
        flip(file, file.stat().st_size - offset)
    other = toy.build(seed=4)
    with ckpt.Checkpointer(other, places[:2]) as cp:
        assert cp.restore() == 2
        assert cp.last_restore is not None and len(cp.last_restore.repaired) == 1
    assert toy.digest(other) == digest_after(2)
    flip(file, file.stat().st_size - 100)
    with ckpt.Checkpointer(toy.build(), places[:2]) as cp, pytest.raises(CorruptError):
        cp.restore()


def test_an_outage_does_not_stop_the_training(moto: MotoServer, proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    """While the bucket returns 503, training continues and saves to the folder. When it is back, scheduled checkpoints
    are uploaded, and at the end the last step."""
    state = toy.build()
    places = [ckpt.Tier(str(tmp_path / "run"), every=2), tier(url, proxy, every=4)]
    with ckpt.Checkpointer(state, places) as cp:
        cp.restore(default=0)
        proxy.fail("status", count=100_000, code=503)
        saves = train(cp, state, range(1, 5))
        assert saves[-1].wait_durable(30).step == 4
        train(cp, state, range(5, 7))
        with pytest.raises(ckpt.errors.DeadlineError):
            saves[3].wait_durable(0, tier=url)
        assert proxy.hits()
        proxy.clear()
        assert saves[3].wait_durable(60, tier="all").tier == url
    inside.use_options(url, storage_options(moto.url))
    assert inside.steps_at(url) == [6, 4]


@pytest.mark.parametrize("code, s3_code", [(403, "ExpiredToken"), (404, "NoSuchBucket")])
def test_bucket_without_permission_is_reported(
    proxy: FaultProxy, url: str, tmp_path: Path, code: int, s3_code: str
) -> None:
    """Permission, credentials or the bucket are lost during a run: the next call raises the remedy. The step is in the
    folder, training continues, and later saves succeed."""
    state = toy.build()
    places = [ckpt.Tier(str(tmp_path / "run"), every=1), tier(url, proxy)]
    with ckpt.Checkpointer(state, places) as cp:
        cp.restore(default=0)
        proxy.fail("delay", method="PUT", match=pattern(DATA), s=3.0)  # the folder has the step by then
        proxy.fail("status", method="PUT", count=100_000, code=code, s3_code=s3_code)
        proxy.fail("status", method="POST", count=100_000, code=code, s3_code=s3_code)
        toy.train_step(state)
        first = cp.step(1)
        assert first is not None and first.wait_durable(30).tier.startswith("file://")
        with pytest.raises(SaveError, match="still in file://"):
            first.wait_durable(60, tier="all")
        proxy.clear()
        toy.train_step(state)
        second = cp.step(2)
        assert second is not None and second.wait_durable(60, tier="all").tier == url


def test_missing_bucket_is_rejected_immediately(moto: MotoServer, tmp_path: Path) -> None:
    """Before the training begins, with what to do about it; it is not created, and no process is left."""
    place = tier("s3://nobodys/run", moto)
    with pytest.raises(AccessError, match="nobodys"):
        ckpt.Checkpointer(toy.build(), [ckpt.Tier(str(tmp_path / "run")), place])
    assert not eventually_left()


def eventually_left() -> list[psutil.Process]:
    folder = Path(os.environ["CKPT_RUNTIME_DIR"])
    end = time.monotonic() + 20
    while writers(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return writers(folder)


def test_other_files_are_not_touched(moto: MotoServer, url: str) -> None:
    """A prefix with other files is rejected and unchanged. Files next to a run survive all clean-up."""
    inside.use_options(url, storage_options(moto.url))
    inside.write_files(url, {"notes/mine.txt": b"mine"})
    with pytest.raises(ckpt.errors.FormatError, match="not empty"):
        ckpt.Checkpointer(toy.build(), tier(url, moto))
    assert inside.file_names(url) == ["notes/mine.txt"]
    other, theirs = f"{url}-other", {f"{DATA_FOLDER}/mine.txt", "mine.txt", "log/mine.txt"}
    state = toy.build()
    with ckpt.Checkpointer(state, tier(other, moto, keep=2, reader_grace_s=0)) as cp:
        cp.restore(default=0)
        train(cp, state, range(1, 3), wait=True)
        inside.use_options(other, storage_options(moto.url))
        inside.write_files(other, dict.fromkeys(theirs, b"mine"))
        train(cp, state, range(3, 8), wait=True)
        eventually(lambda: len(inside.steps_at(other)) <= 3, 30)
    assert inside.steps_at(other)[0] == 7 and len(inside.steps_at(other)) <= 3
    assert theirs <= set(inside.file_names(other))


def test_retention_in_a_bucket(moto: MotoServer, url: str) -> None:
    """`keep` applies there, and the files of retired checkpoints are deleted; with a grace period, after its end."""
    state = toy.build()
    with ckpt.Checkpointer(state, tier(url, moto, keep=2, reader_grace_s=0)) as cp:
        cp.restore(default=0)
        train(cp, state, range(1, 9), wait=True)
        eventually(lambda: len(select(inside.file_names(url), DATA)) == len(inside.steps_at(url)) <= 3, 30)
    steps = inside.steps_at(url)
    assert steps[:2] == [8, 7] and len(steps) <= 3  # and the newest that was read back
    assert len(select(inside.file_names(url), DATA)) == len(steps)
    patient = f"{url}-patient"
    with ckpt.Checkpointer(state, tier(patient, moto, keep=2, reader_grace_s=3600)) as cp:
        cp.restore(default=0)
        train(cp, state, range(11, 17), wait=True)
        eventually(lambda: len(inside.steps_at(patient)) <= 3, 30)
    assert len(inside.steps_at(patient)) <= 3
    assert len(select(inside.file_names(patient), DATA)) == 6


def quiet(proxy: FaultProxy) -> int:
    """Wait until no more requests are made, and return how many there were."""
    count = -1
    while count != (count := len(proxy.paths())):
        time.sleep(1)
    return count


def test_requests_are_few(proxy: FaultProxy, url: str) -> None:
    """A checkpoint takes at most its data divided by the part size, plus 11 requests."""
    state = toy.build()
    with ckpt.Checkpointer(state, tier(url, proxy, keep=2, reader_grace_s=3600)) as cp:
        cp.restore(default=0)
        train(cp, state, range(1, 4), wait=True)  # the first clean-up looks at everything
        before = quiet(proxy)
        train(cp, state, range(4, 8), wait=True)
        quiet(proxy)
        # FORMAT.json is read by the clock, however many checkpoints there are.
        paths = [path for path in proxy.paths()[before:] if not path.endswith("/FORMAT.json")]
    assert len(paths) <= 4 * (1 + 11), paths


def test_a_bucket_that_is_too_slow_is_left_behind(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    """If steps come faster than the bucket takes them, some are skipped there with a warning and the remedy. Training
    does not wait, memory is not used up, the folder has all steps, and the newest one reaches the bucket."""
    state = toy.build()
    places = [ckpt.Tier(str(tmp_path / "run"), every=1, keep=20), tier(url, proxy, keep=20)]
    with ckpt.Checkpointer(state, places) as cp:
        cp.restore(default=0)
        proxy.fail("delay", method="PUT", match=pattern(DATA), count=100, s=0.7)
        saves = train(cp, state, range(1, 11))
        for save in saves:
            save.wait_durable(60)
        cp.wait(60)
        assert cp.stats.skipped > 0
        left_out = [save.step for save in saves if failed(save, url)]
        assert left_out and len(left_out) < 10
    inside.use_options(url, storage_options(proxy.url))
    assert len(inside.steps_at(url)) == 10 - len(left_out)


def test_unfinished_uploads_are_aborted_at_the_next_start(moto: MotoServer, url: str) -> None:
    """A multipart upload of a dead process costs money and is invisible: the next start aborts it. Uploads of other
    names stay."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=moto.url,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    prefix = url.removeprefix("s3://bucket/")
    ours, others = f"{prefix}/{data_key(checkpoint_id(50))}", f"{prefix}/{DATA_FOLDER}/mine"
    state = toy.build()
    with ckpt.Checkpointer(state, tier(url, moto)) as cp:
        cp.restore(default=0)
        train(cp, state, range(1, 2))[0].wait_durable(60)
    for key in (ours, others):
        client.create_multipart_upload(Bucket="bucket", Key=key)
    with ckpt.Checkpointer(state, tier(url, moto)) as cp:
        cp.restore()
    open_ones = [one["Key"] for one in client.list_multipart_uploads(Bucket="bucket", Prefix=prefix).get("Uploads", [])]
    assert open_ones == [others]


def test_invalid_settings_are_rejected() -> None:
    """A place in the memory of one process, limits below zero, options that cannot be handed over."""
    for wrong in (
        lambda: ckpt.Tier("memory://run"),
        lambda: ckpt.Tier("s3://b/r", max_mib_s=-1),
        lambda: ckpt.Tier("s3://b/r", max_inflight_mib=0),
        lambda: ckpt.Tier("s3://b/r", reader_grace_s=-1),
        lambda: ckpt.Tier("s3://b/r", storage_options={"session": object()}),
    ):
        with pytest.raises(UsageError):
            wrong()
    assert "secret" not in repr(ckpt.Tier("s3://b/r", storage_options={"secret": "secret"}))


RANKS = """
import json, os, sys
os.environ.update(json.loads(sys.argv[5]))
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ckpt, toy

folder, url, steps, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
dist.init_process_group("gloo")
state = toy.build(seed=dist.get_rank() if steps == 0 else 0)
if dist.get_world_size() > 1:
    state["model"] = DistributedDataParallel(state["model"])
far = ckpt.Tier(url, every=2, storage_options=options)
tiers = [*([ckpt.Tier(folder, every=1)] if folder else []), far]
cp = ckpt.Checkpointer(state, tiers)
start = cp.restore(default=0)
for step in range(start, steps):
    torch.manual_seed(step)
    toy.train_step(state)
    save = cp.step(step + 1)
    if folder:
        save.wait_durable(60)
done = cp.last_restore
print("trained", start, done.tier, toy.digest({**state, "meta": {}}), done.nbytes, done.nbytes_received, flush=True)
sys.stdin.readline()
cp.close()
os._exit(0)  # gloo's threads may abort an interpreter that ends
"""


class Ranks:
    """Two or so processes over gloo, each with a writer."""

    def __init__(self, world: int, folder: str, url: str, steps: int, server: MotoServer | FaultProxy) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        options = json.dumps(storage_options(server.url))
        self.processes = []
        for rank in map(str, range(world)):
            mine = {**meeting, "LOCAL_WORLD_SIZE": str(world), "RANK": rank, "LOCAL_RANK": rank}
            self.processes.append(Trainer(RANKS, folder, url, steps, options, json.dumps(mine)))
        self.said = [process.read_until("trained").split()[1:] for process in self.processes]

    def kill(self) -> None:
        for process in (*(one.process for one in self.processes), *writers(Path(os.environ["CKPT_RUNTIME_DIR"]))):
            process.kill()
            process.wait(10)

    def end(self) -> None:
        for one in self.processes:
            one.say("")
        assert [one.process.wait(60) for one in self.processes] == [0] * len(self.processes)


def test_two_ranks_lose_everything_while_they_upload(
    moto: MotoServer, proxy: FaultProxy, url: str, tmp_path: Path
) -> None:
    """All trainers and writers are killed while the bucket takes nothing. The next two ranks take what is due from the
    folder there; then one rank, with nothing but the URL, has every bit."""
    folder = str(tmp_path / "run")
    proxy.fail("hang", method="PUT", match=pattern(DATA), count=1000)
    job = Ranks(2, folder, url, 4, proxy)
    job.kill()
    inside.use_options(url, storage_options(moto.url))
    assert inside.steps_at(url) == []
    again = Ranks(2, folder, url, 4, moto)
    assert [said[:2] for said in again.said] == [["4", f"file://{folder}"]] * 2
    eventually(lambda: inside.steps_at(url)[:1] == [4], 60)
    again.end()
    alone = Ranks(1, "", url, 0, moto)
    assert [said[:3] for said in alone.said] == [["4", url, job.said[0][2]]]
    alone.end()


def test_two_ranks_download_replicated_tensors_once(moto: MotoServer, url: str) -> None:
    """Each rank downloads a part of what both hold, and gets the rest from the other."""
    first = Ranks(2, "", url, 2, moto)
    first.end()
    inside.use_options(url, storage_options(moto.url))
    size = sum(inside.bytes_by_rank(url))
    again = Ranks(2, "", url, 2, moto)
    assert [said[:3] for said in again.said] == [["2", url, first.said[0][2]]] * 2
    downloaded, received = ([int(said[i]) for said in again.said] for i in (3, 4))
    again.end()
    assert sum(downloaded) <= size and all(received)


def test_two_ranks_bring_the_last_step_to_a_bucket_that_was_down(proxy: FaultProxy, url: str) -> None:
    """Without a folder, while the bucket returns only 503, most steps are skipped by one rank or the other. When it is
    back, both ranks save the last step there at the end."""
    proxy.fail("status", count=100_000, code=503, method="PUT", match=pattern(DATA))
    job = Ranks(2, "", url, 24, proxy)
    proxy.clear()
    job.end()
    inside.use_options(url, storage_options(proxy.url))
    assert inside.steps_at(url)[0] == 24
