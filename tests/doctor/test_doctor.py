"""`ckpt doctor`: it sees what would hurt a long job, leaves nothing behind, and says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import AccessError, ExistsError
from ckpt.store import Buffer, ObjectInfo, Store, remember_options
from ckpt.tools.cli import app
from ckpt.tools.cli import doctor as cli_doctor
from ckpt.tools.doctor import advice, machine
from ckpt.tools.doctor import folder as doctor_folder
from ckpt.tools.doctor import place as doctor
from ckpt.tools.doctor import s3 as doctor_s3
from ckpt.tools.doctor.findings import (
    ADVICE,
    GB,
    MIB,
    OK,
    PROBLEM,
    Finding,
    JobSize,
    StoreRates,
    TierFindings,
    clock_difference,
    worst,
)
from ckpt.tools.doctor.machine import Speed
from ckpt.tools.doctor.promises import Bounds
from ckpt_backends.memory import MemoryStore, MemoryUpload
from model_disk import Run, local, volume
from processes import REPO, eventually
from run_files import DATA_FOLDER
from s3_server import KEY, MotoServer, environment, storage_options

SMALL = Bounds(size=4 * MIB, measure_s=5.0, check_s=20.0)


def examine(url: str, bounds: Bounds = SMALL) -> TierFindings:
    return asyncio.run(doctor.examine(url, bounds))


def named(findings: Sequence[Finding], what: str) -> Finding:
    found = [f for f in findings if f.what == what]
    assert len(found) == 1, (what, findings)
    return found[0]


def problems(place: TierFindings) -> set[str]:
    return {f.what for f in place.findings if f.verdict == PROBLEM}


def spawn(*arguments: object, **more: str) -> subprocess.Popen[str]:
    path = f"{REPO}:{REPO / 'backends'}"
    words = [sys.executable, "-m", "ckpt", "doctor", *map(str, arguments)]
    return subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": path, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# -- stores that break a promise --


class Noted(MemoryStore):
    """Keeps its promises, and notes what was ever written."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__("memory://place", objects=objects)
        self.written: list[str] = []

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        self.written.append(key)
        await super().put(key, data, create=create)


class IgnoresConditions(Noted):
    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        await super().put(key, data)


class LooksThenWrites(Noted):
    """In turn all is well; at once, many win."""

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        if create and key in self.objects:
            raise ExistsError(key)
        await asyncio.sleep(0)
        await super().put(key, data)


class SaysAllLost(Noted):
    """Creates, and tells everybody that somebody else was quicker."""

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        await super().put(key, data, create=create)
        if create and "race" in key:
            raise ExistsError(key)


class OverwritesAll(Noted):
    """Of many at once one is told that it made the object, and the last one's bytes are there."""

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        taken = create and key in self.objects
        await super().put(key, data, create=create and "race" not in key)
        if taken:
            raise ExistsError(key)


class ListsLate(Noted):
    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        late = {key for key in self.written[-1:] if "seen" in key}
        async for info in super().list(prefix):
            if info.key not in late:
                yield info


class ReadsOld(Noted):
    """A cache that is not told of a replacement."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, bytes] = {}

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        await super().put(key, data, create=create)
        self.first.setdefault(key, bytes(data))

    async def get(self, key: str, **range_: Any) -> memoryview:
        if "seen" in key and key in self.objects:
            return memoryview(self.first[key])
        return await super().get(key, **range_)


class FlipsABit(Noted):
    async def get(self, key: str, **range_: Any) -> memoryview:
        data = bytearray(await super().get(key, **range_))
        if "bytes" in key:
            data[len(data) // 2] ^= 1
        return memoryview(data)


class NoDelete(Noted):
    async def delete(self, key: str) -> None:
        raise AccessError("AccessDenied")


class NoPut(Noted):
    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        raise AccessError("AccessDenied")

    async def upload(self, key: str, *, size: int) -> MemoryUpload:
        raise AccessError("AccessDenied")


class Hangs(Noted):
    async def get(self, key: str, **range_: Any) -> memoryview:
        await asyncio.Event().wait()
        raise AssertionError


class SlowUpload(MemoryUpload):
    async def finish(self) -> None:
        await super().finish()
        await asyncio.Event().wait()


class SlowUploads(Noted):
    async def upload(self, key: str, *, size: int) -> MemoryUpload:
        return SlowUpload(self, key, size)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[Store], str]:
    """Has a URL mean this store."""

    def give(store: Store) -> str:
        monkeypatch.setattr(doctor, "open_store", lambda url, **_: store)
        return "memory://place"

    return give


def test_a_store_that_keeps_its_promises(given: Any) -> None:
    """Everything is measured, nothing is a problem, and nothing is left: the control of the tests below."""
    store = Noted()
    place = examine(given(store))
    assert place.reached and place.usable and not problems(place)
    assert not store.objects and store.written
    assert place.rates.write > 0 < place.rates.read and place.rates.put_s > 0


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (IgnoresConditions, "create-if-absent"),
        (LooksThenWrites, "create-if-absent"),
        (SaysAllLost, "create-if-absent"),
        (OverwritesAll, "create-if-absent"),
        (ListsLate, "list after write"),
        (ReadsOld, "read after write"),
        (FlipsABit, "bandwidth"),
        (NoPut, "permissions"),
    ],
)
def test_a_store_that_breaks_a_promise(given: Any, kind: type[Noted], what: str) -> None:
    """Each lie is a problem under its own name, with advice, and no other check is blamed; nothing is left there."""
    store = kind()
    place = examine(given(store))
    assert problems(place) == {what}
    assert kind is not LooksThenWrites or "simultaneous creations" in named(place.findings, what).value
    assert all(f.advice for f in place.findings if f.verdict == PROBLEM)
    assert not place.usable and not store.objects


def test_what_cannot_be_removed_is_said(given: Any) -> None:
    """Without the right to delete, the person is told which prefix is left."""
    store = NoDelete()
    place = examine(given(store))
    assert problems(place) == {"permissions", "scratch"}
    left = {key.partition("/")[0] for key in store.objects}
    assert len(left) == 1 and left.pop() in named(place.findings, "scratch").advice


def test_a_place_that_does_not_answer(given: Any) -> None:
    """A deadline ends the wait, and the place counts as one that cannot be read."""
    place = examine(given(Hangs()), replace(SMALL, check_s=0.2))
    assert not place.reached and problems(place) == {"reach"}


@pytest.mark.parametrize(("name", "said"), [("thesis.tex", "thesis.tex"), ("FORMAT.json", "")])
def test_other_peoples_files_are_not_touched(given: Any, name: str, said: str) -> None:
    """A place with foreign files, or a run of a version that we do not know, is a problem, and not one object is
    written there, not even for a moment."""
    store = Noted({name: b"{}"})
    place = examine(given(store))
    assert problems(place) == {"run"} and said in named(place.findings, "run").value
    assert store.written == [] and store.objects == {name: b"{}"}


def test_what_a_killed_doctor_has_left(given: Any) -> None:
    """Old scratch objects go, those of a doctor at work stay, and neither makes the place a foreign one."""
    store = Noted({"doctor-1000000000-0123abcd/x": b"x", f"doctor-{int(time.time())}-0123abcd/x": b"x"})
    place = examine(given(store))
    assert not problems(place)
    assert [key for key in store.objects if "-1000000000-" in key] == [] and len(store.objects) == 1


@pytest.mark.parametrize("moment", ["upload", "create-if-absent"])
def test_cancelled_in_the_middle(given: Any, moment: str) -> None:
    """Whenever it is interrupted, what was written goes."""
    store = SlowUploads()

    async def main() -> None:
        task = asyncio.create_task(doctor.examine(given(store), SMALL))
        key = "bytes0" if moment == "upload" else "once"
        while not any(key in name for name in store.written):
            await asyncio.sleep(0)
        assert store.objects
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert store.objects == {}


def test_negative_control_without_the_clean_up(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would see what is left."""

    async def nothing(store: Store, prefix: str) -> None:
        pass

    store = Noted()
    monkeypatch.setattr(doctor, "remove", nothing)
    examine(given(store))
    assert store.objects


def test_nothing_but_its_own_prefix_is_removed() -> None:
    """The clean-up refuses any prefix that is not one of its own."""
    for prefix in ("", f"{DATA_FOLDER}/", "doctor-1"):
        with pytest.raises(AssertionError):
            asyncio.run(doctor.remove(MemoryStore(), prefix))


# -- folders --


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    """It is not made; what it would lie on is examined, and nothing is left."""
    place = examine(str(tmp_path / "a" / "run"))
    assert place.usable and list(tmp_path.iterdir()) == []
    assert {"file system", "free space", "fsync", "clock"} <= {f.what for f in place.findings}


def test_a_folder_with_a_run(tmp_path: Path) -> None:
    """The newest step and the owner's epoch are said; the run is as it was, to the byte; damage is a problem."""
    folder = tmp_path / "run"

    async def make() -> None:
        async with local(folder) as store:
            run = await Run.open(store)
            for step in (3, 7):
                await run.save(step)

    asyncio.run(make())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = named((place := examine(str(folder))).findings, "run")
    assert place.usable and found.data == {"newest": 7, "term": 1, "damaged": []}
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (folder / "log" / "000000000001.json").write_bytes(b"rubbish")
    assert problems(examine(str(folder))) == {"run"}


def test_a_small_file_system(tmp_path: Path) -> None:
    """Of what is free no more than a tenth is written, and that tmpfs is memory is said."""
    with volume(tmp_path, "tmpfs", 24) as small:
        written: list[int] = []
        place = asyncio.run(doctor.examine(str(small.path / "run"), Bounds(), on_bytes=written.append))
        assert not problems(place) and sum(written) <= 2 * 2.4 * MIB
        assert named(place.findings, "file system").verdict == ADVICE
        assert list(small.path.iterdir()) == []
        job = JobSize(state=1 * GB)
        assert named(advice.too_full(job, place), "room").verdict == PROBLEM
        assert advice.too_full(JobSize(state=1 * MIB), place) == []


def test_a_full_file_system(tmp_path: Path) -> None:
    """It is full, and says so: not that anybody lacks a permission, and no command about a folder of doctor's own."""
    with volume(tmp_path, "tmpfs", 8) as full:
        with contextlib.suppress(OSError):
            (full.path / "else").write_bytes(bytes(16 * MIB))
        found = examine(str(full.path / "run")).findings
    problems = [one for one in found if one.verdict == PROBLEM]
    assert problems and {one.what for one in problems} == {"free space"}
    assert all("Free some" in one.advice and ".ckpt-doctor" not in one.advice + one.value for one in problems)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    """It is a problem, not a crash."""
    with volume(tmp_path, "tmpfs", 8) as small:
        subprocess.run(["mount", "-o", "remount,ro", str(small.path)], check=True)
        assert {"file system", "write"} <= problems(examine(str(small.path / "run")))


MOUNTS = r"""
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 21 0:25 / /data rw - nfs4 server:/export rw,soft,vers=4.2
31 21 0:26 / /data/deep rw - lustre mds:/x rw
32 21 0:27 / /with\040space rw - xfs /dev/sdb rw,nobarrier
33 21 0:28 / /ro ro,relatime - ext4 /dev/sdc rw
34 21 0:29 / /over rw - ext4 /dev/sdd rw
35 34 0:30 / /over rw - tmpfs none rw
36 21 0:31 / /layer rw - overlay overlay rw,lowerdir=/secret
37 21 0:32 / /user rw - fuse.s3fs s3fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "verdict", "shared"),
    [
        ("/home/run", "ext4", OK, False),
        ("/data/run", "nfs4", ADVICE, True),
        ("/database", "ext4", OK, False),
        ("/data/deep/er", "lustre", ADVICE, True),
        ("/with space/run", "xfs", PROBLEM, False),
        ("/ro/run", "ext4", PROBLEM, False),
        ("/over/run", "tmpfs", ADVICE, False),
        ("/layer/run", "overlay", ADVICE, False),
        ("/user/run", "fuse.s3fs", ADVICE, True),
    ],
)
def test_file_systems(path: str, kind: str, verdict: str, shared: bool) -> None:
    """The mount that a path lies on is the innermost and latest; advice fits its kind and options."""
    found = doctor_folder.file_system(path, MOUNTS)
    assert (found.kind, found.finding.verdict, found.shared) == (kind, verdict, shared)
    assert "soft" not in found.finding.advice or path == "/data/run"
    assert bool(found.finding.advice) == (verdict != OK)


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right clock is fine, a little off is advice, a minute a problem, in either direction; a step of the local one
    meanwhile is seen."""
    verdicts = [clock_difference(s, 1.0).verdict for s in (0.0, -0.9, 2.5, 20, -20, 100, -100)]
    assert verdicts == [OK, OK, OK, ADVICE, ADVICE, PROBLEM, PROBLEM]
    watch, real = machine.ClockWatch(), time.time
    assert watch.finding().verdict == OK
    monkeypatch.setattr(time, "time", lambda: real() + 30)
    assert watch.finding().verdict == ADVICE


# -- S3 --


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    with MotoServer() as made:
        made.make_bucket("bucket")
        yield made


def client(server: MotoServer) -> Any:
    import boto3

    return boto3.client(
        "s3", endpoint_url=server.url, aws_access_key_id=KEY, aws_secret_access_key=KEY, region_name="us-east-1"
    )


def contents(server: MotoServer) -> tuple[list[str], list[str]]:
    s3 = client(server)
    objects = [o["Key"] for o in s3.list_objects_v2(Bucket="bucket").get("Contents", ())]
    return objects, [u["Key"] for u in s3.list_multipart_uploads(Bucket="bucket").get("Uploads", ())]


def test_s3(server: MotoServer) -> None:
    """A sound bucket has no problem and keeps nothing; uploads lying about and a missing rule are said."""
    remember_options("s3://bucket/run", storage_options(server.url))
    s3 = client(server)
    s3.create_multipart_upload(Bucket="bucket", Key=f"run/{DATA_FOLDER}/left")
    before = contents(server)
    place = examine("s3://bucket/run", Bounds(size=24 * MIB))
    assert place.usable and place.options and contents(server) == before
    assert named(place.findings, "unfinished uploads").data == 1
    assert named(place.findings, "clock").verdict == OK
    assert named(place.findings, "lifecycle").verdict == ADVICE
    rule = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "run/"}}
    aborts = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}
    versions = {"NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
    s3.put_bucket_lifecycle_configuration(
        Bucket="bucket", LifecycleConfiguration={"Rules": [{**rule, **aborts, **versions}]}
    )
    s3.put_bucket_versioning(Bucket="bucket", VersioningConfiguration={"Status": "Enabled"})
    try:
        again = examine("s3://bucket/run", SMALL)
        assert named(again.findings, "lifecycle").verdict == OK
        assert named(again.findings, "versioning").verdict == OK
    finally:
        s3.delete_bucket_lifecycle(Bucket="bucket")
        s3.put_bucket_versioning(Bucket="bucket", VersioningConfiguration={"Status": "Suspended"})


def test_a_bucket_that_is_missing(server: MotoServer) -> None:
    """It cannot be read, and what to do is said."""
    remember_options("s3://missing/run", storage_options(server.url))
    place = examine("s3://missing/run")
    assert not place.reached and "NoSuchBucket" in named(place.findings, "reach").value


ABORTS = {"Status": "Enabled", "Filter": {"Prefix": ""}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}
EXPIRES = {"Status": "Enabled", "Expiration": {"Days": 9}}


@pytest.mark.parametrize(
    ("rules", "verdicts"),
    [
        ([], [ADVICE, OK]),
        ([ABORTS], [OK, OK]),
        ([{**ABORTS, "Filter": {"Prefix": "run1/"}}], [OK, OK]),
        ([{**ABORTS, "Filter": {"Prefix": "run2/"}}], [ADVICE, OK]),
        ([{**ABORTS, "Filter": {"Tag": {"Key": "a", "Value": "b"}}}], [ADVICE, OK]),
        ([{**ABORTS, "Filter": {"And": {"Prefix": "run1/", "Tags": []}}}], [ADVICE, OK]),
        ([{**ABORTS, "Status": "Disabled"}], [ADVICE, OK]),
        ([{**ABORTS, "Expiration": {"Days": 30}}], [OK, PROBLEM, OK]),
        ([ABORTS, {**EXPIRES, "Prefix": f"run1/{DATA_FOLDER}/"}], [OK, PROBLEM, OK]),
        ([ABORTS, {**EXPIRES, "Prefix": "run2/"}], [OK, OK]),
        ([{**ABORTS, "Transitions": [{"Days": 1, "StorageClass": "GLACIER"}]}], [OK, ADVICE, OK]),
    ],
)
def test_lifecycle_rules(rules: list[dict[str, Any]], verdicts: list[str]) -> None:
    """A rule counts if it is enabled and holds for the whole run; one that deletes any of it is a problem. Versioning
    without a rule for old versions is advice."""
    assert [f.verdict for f in doctor_s3.lifecycle(rules, "run1/", False)] == verdicts
    found = named(doctor_s3.lifecycle(rules, "run1/", True), "versioning")
    assert found.verdict == ADVICE and "NoncurrentVersionExpiration" in found.advice
    old = {"Status": "Enabled", "Filter": {"Prefix": ""}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
    assert named(doctor_s3.lifecycle([*rules, old], "run1/", True), "versioning").verdict == OK


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# -- the machine --


def test_this_machine(tmp_path: Path) -> None:
    """Every check of the machine has something to say, whatever machine this is; a kernel that tells nothing is no
    error."""
    found = machine.machine(JobSize())
    assert {"CPUs", "memory", "open files (ulimit -n)"} <= {f.what for f in found}
    assert all(f.advice for f in found if f.verdict != OK)
    assert machine.machine(JobSize(), proc=tmp_path, sys_=tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_cgroups(tmp_path: Path, version: int) -> None:
    """Limits of either version are found, on the process's group or one around it."""
    proc, sys_ = tmp_path / "proc", tmp_path / "sys"
    if version == 2:
        tree(proc, {"self/cgroup": "0::/pod/app\n"})
        tree(sys_ / "fs/cgroup/pod", {"cpu.max": "50000 100000\n"})
        tree(sys_ / "fs/cgroup/pod/app", {"memory.oom.group": "1\n"})
    else:
        tree(proc, {"self/cgroup": "4:pids:/pod/app\n3:cpu,cpuacct:/pod\n"})
        tree(sys_ / "fs/cgroup/cpu/pod", {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"})
    assert machine.cpu_count(proc, sys_) == 0.5
    assert [f.verdict for f in machine.oom_group(proc, sys_)] == [ADVICE] * (version == 2)


def test_a_machine_with_shortcomings(tmp_path: Path) -> None:
    """Too little memory for the state is told, with advice."""
    proc = tree(tmp_path / "proc", {"meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n"})
    verdicts = [machine.memory(JobSize(state=n * GB, world=4, local=2), proc, tmp_path).verdict for n in (1, 6, 20)]
    assert verdicts == [OK, ADVICE if 4 * 3 > 0.8 * 12.288 else OK, PROBLEM]


def test_ranks_of_this_machine() -> None:
    """As was said, by the launcher, at most all; where nobody knows, not all of a large job, and that is told."""
    assert cli_doctor.local_ranks(8, {"LOCAL_WORLD_SIZE": "2"})[0] == 2
    assert cli_doctor.local_ranks(2, {"SLURM_NTASKS_PER_NODE": "8"})[0] == 2
    assert cli_doctor.local_ranks(8, {"LOCAL_WORLD_SIZE": "2"}, 4) == (4, "")
    if not machine.gpu_count():
        assert cli_doctor.local_ranks(4, {}) == (4, "")
        assert cli_doctor.local_ranks(64, {}) == (8, " (assumed: set --per-node)")


# -- GPUs --


def test_gpu_copies(tmp_path: Path) -> None:
    """Where there is none, that is said, and is no problem; slow or impossible copies are advice."""
    assert machine.gpus(lambda words, _: "[24e9]", tmp_path) == ([Finding("GPU", "no GPU here")], [])
    (tmp_path / "nvidia0").touch()
    for copy, verdict in (("[24e9, 12e9]", OK), (None, ADVICE), ("rubbish", ADVICE), ("[]", ADVICE), ("[3e9]", ADVICE)):
        assert worst(machine.gpus(lambda words, _, copy=copy: copy, tmp_path)[0]) == verdict
    assert machine.run_command(["no-such-program"], 1.0) is None
    assert machine.run_command([sys.executable, "-c", "import time; time.sleep(9)"], 0.2) is None


# -- what follows --

SPEED = Speed(copy=10 * GB, by_device=False, cpus=8, available=100 * GB)
DISK = TierFindings("file:///nvme/run1", rates=StoreRates(write=1 * GB, read=2 * GB, cpu_s=0.1 / GB), free=1000 * GB)
BUCKET = TierFindings("s3://bucket/run1", rates=StoreRates(write=GB // 10, read=GB // 5, cpu_s=0.3 / GB), options=True)


def test_cadences() -> None:
    """How long things take follows from the share of this machine and the measured rates; the tiers line is valid
    code, in order, with round cadences that keep the cost below one in a hundred."""
    job = JobSize(state=20 * GB, step_s=1.0, world=4, local=2)
    memory, disk, bucket = advice.conclude(job, [BUCKET, DISK], SPEED)
    assert (memory.where, disk.where, bucket.where) == ("memory", DISK.url, BUCKET.url)
    assert memory.save_s == 1.0 and memory.every == 20  # 1 s of copying among 8 CPUs: 12.5 s and more
    assert disk.save_s == 10.0 and disk.restore_s == 5.0
    assert disk.interval_s == pytest.approx(max(20.0, 2.0 / 0.08)) and disk.every == 50
    assert bucket.save_s == 100.0 and bucket.every == 200
    line = advice.tiers_line(job, [memory, disk, bucket], [BUCKET, DISK], SPEED)
    given = eval(f"dict({line})", {"ckpt": ckpt, "options": {}})
    assert (given["memory"].every, given["memory"].keep) == (20, 3)
    near, far = given["tiers"]
    assert (near.url, near.every) == ("file:///nvme/run1", 50) and (far.every, far.keeping.last) == (200, 3)
    gpu = advice.memory_cadence(job, replace(SPEED, by_device=True, copy=40 * GB))
    assert gpu.every == 1


def test_places_with_problems_are_not_recommended() -> None:
    """A bad place has its times told, and does not come into the tiers line; without any, there is none."""
    job = JobSize(state=GB, step_s=1.0)
    bad = replace(DISK, findings=[Finding("create-if-absent", "ignored", PROBLEM, "...")])
    cadences = advice.conclude(job, [bad, BUCKET], SPEED)
    line = advice.tiers_line(job, cadences, [bad, BUCKET], SPEED)
    assert len(cadences) == 3 and "nvme" not in line and "s3://" in line
    assert advice.tiers_line(job, cadences[:2], [bad], SPEED) == ""
    assert advice.tiers_line(replace(job, step_s=None), cadences, [BUCKET], SPEED) == ""
    assert advice.conclude(JobSize(), [DISK], SPEED) == []
    nfs = replace(DISK, shared=True)
    assert advice.place_cadence(JobSize(state=8 * GB, world=8, local=1), nfs, SPEED).save_s == 8.0


# -- the command --


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(machine, "gpus", lambda: ([Finding("GPU", "no GPU here")], []))
    monkeypatch.setattr(machine, "machine", lambda job: [Finding("memory", "plenty")])

    def run(*arguments: object) -> tuple[int, str, str]:
        code = app.main(["doctor", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_command(call: Any, tmp_path: Path) -> None:
    """A sound folder: code 0, for people with a line to paste, for programs one document."""
    code, out, _ = call(tmp_path / "run", "--size", 4, "--state-gb", 0.001, "--step-s", 1)
    assert code == 0 and "tiers=[ckpt.Tier(" in out and "memory=ckpt.Memory(every=" in out and "create-if-absent" in out
    code, out, _ = call(tmp_path / "run", "--size", 4, "--json")
    found = json.loads(out)
    assert code == 0 and found["places"][0]["reached"] and found["machine"][0]["value"] == "plenty"
    assert list(tmp_path.iterdir()) == []


def test_the_line_to_paste_or_why_there_is_none(call: Any, tmp_path: Path) -> None:
    """A place with a problem: the line as it is without that, marked so, and none for programs. Nothing to measure, or
    no step: what to give. The ranks here are those of a node."""
    run, job = tmp_path / "run", ("--size", 4, "--state-gb", 1e6)
    code, wide, _ = call(run, *job, "--step-s", 1, "--world", 64, "--per-node", 16)
    out = " ".join(wide.split())
    assert code == 1 and "Once the problems above are fixed: tiers=[" in out and str(run) in out
    assert "over 64 ranks, 16 of them here, with" in out
    assert json.loads(call(run, *job, "--step-s", 1, "--json")[1])["tiers"] == ""
    assert "Give --step-s" in call(run, *job)[1] and "Give the folder or bucket" in call(*job)[1]


def test_command_codes(call: Any, tmp_path: Path, server: MotoServer) -> None:
    """1 for problems, 2 for what cannot be read, also beside something sound, and for wrong usage."""
    (tmp_path / "notes.txt").write_text("mine")
    assert call(tmp_path)[0] == 1 and [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    options = ("--option", f"endpoint_url={server.url}", "--option", "key=testing", "--option", "secret=testing")
    assert call("s3://missing/run", tmp_path / "notes.txt", *options)[0] == 2
    assert call(tmp_path, "--option", "b")[0] == 2
    assert call("nosuch://place")[0] == 2


def test_no_secrets(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what options call a key, nor what a URL carries, comes out: on stdout, on stderr, in either form."""
    monkeypatch.setattr(doctor, "RETRY_S", 0.5)
    secret, password = "wJalrXUtnFEMI", "hunter2hunter2"
    options = ["endpoint_url=http://me:hunter2hunter2@127.0.0.1:9", "key=AKIAEXAMPLE", f"secret={secret}"]
    words = [word for option in options for word in ("--option", option)]
    for more in ([], ["--json"]):
        code, out, err = call("s3://bucket/run", f"http://me:{password}@127.0.0.1:9/x", *words, *more)
        assert code == 2
        for hidden in (secret, password, "AKIAEXAMPLE"):
            assert hidden not in out + err


def test_a_store_that_tells_secrets(given: Any) -> None:
    """Whatever a driver says, what the options call a key or a token does not come out, at any depth."""

    class Tells(Noted):
        async def get(self, key: str, **range_: Any) -> memoryview:
            raise AccessError("no entry for s3cr3t-one at http://me:s3cr3t-two@host/x?X-Sig=s3cr3t-three")

    remember_options("memory://place", {"client_kwargs": {"session_token": "s3cr3t-one"}})
    place = examine(given(Tells()))
    assert problems(place) == {"reach"} and "s3cr3t" not in str(place)
    assert named(place.findings, "reach").value.startswith("no entry for *** at http://host/x")


def test_interrupted_in_a_folder(tmp_path: Path) -> None:
    """SIGTERM leaves no scratch folder."""
    process = spawn(tmp_path / "run", "--size", 100_000)
    assert eventually(lambda: any(tmp_path.rglob("bytes1")))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 130 and list(tmp_path.iterdir()) == []


def test_interrupted_in_a_bucket(server: MotoServer) -> None:
    """Ctrl-C leaves neither objects nor unfinished uploads."""
    before = contents(server)
    process = spawn("s3://bucket/interrupted", "--size", 100_000, **environment(server.url))
    assert eventually(lambda: any("bytes1" in key for key in contents(server)[0]))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130 and contents(server) == before
