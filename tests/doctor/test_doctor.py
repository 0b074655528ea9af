"""`ckpt doctor` detects risks for a long job, leaves nothing behind, and gives advice."""

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


def problems(tier: TierFindings) -> set[str]:
    return {f.what for f in tier.findings if f.verdict == PROBLEM}


def spawn(*arguments: object, **more: str) -> subprocess.Popen[str]:
    path = f"{REPO}:{REPO / 'backends'}"
    args = [sys.executable, "-m", "ckpt", "doctor", *map(str, arguments)]
    return subprocess.Popen(
        args, env={**os.environ, "PYTHONPATH": path, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# -- stores that break a promise --


class RecordingStore(MemoryStore):
    """Keeps its promises and records every key that was written."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__("memory://place", objects=objects)
        self.written: list[str] = []

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        self.written.append(key)
        await super().put(key, data, create=create)


class IgnoresConditions(RecordingStore):
    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        await super().put(key, data)


class ChecksThenWrites(RecordingStore):
    """Rejects a sequential duplicate, but lets several concurrent writers create the same key."""

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        if create and key in self.objects:
            raise ExistsError(key)
        await asyncio.sleep(0)
        await super().put(key, data)


class ReportsAllLost(RecordingStore):
    """Creates the object, but reports to every concurrent writer that another was faster."""

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        await super().put(key, data, create=create)
        if create and "race" in key:
            raise ExistsError(key)


class OverwritesAll(RecordingStore):
    """Reports one winner of a race, but the last writer's bytes are stored."""

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        exists = create and key in self.objects
        await super().put(key, data, create=create and "race" not in key)
        if exists:
            raise ExistsError(key)


class ListsLate(RecordingStore):
    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        late = {key for key in self.written[-1:] if "seen" in key}
        async for info in super().list(prefix):
            if info.key not in late:
                yield info


class ReadsOld(RecordingStore):
    """A cache that ignores replacements of an object."""

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


class FlipsABit(RecordingStore):
    async def get(self, key: str, **range_: Any) -> memoryview:
        data = bytearray(await super().get(key, **range_))
        if "bytes" in key:
            data[len(data) // 2] ^= 1
        return memoryview(data)


class NoDelete(RecordingStore):
    async def delete(self, key: str) -> None:
        raise AccessError("AccessDenied")


class NoPut(RecordingStore):
    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        raise AccessError("AccessDenied")

    async def upload(self, key: str, *, size: int) -> MemoryUpload:
        raise AccessError("AccessDenied")


class Hangs(RecordingStore):
    async def get(self, key: str, **range_: Any) -> memoryview:
        await asyncio.Event().wait()
        raise AssertionError


class SlowUpload(MemoryUpload):
    async def finish(self) -> None:
        await super().finish()
        await asyncio.Event().wait()


class SlowUploads(RecordingStore):
    async def upload(self, key: str, *, size: int) -> MemoryUpload:
        return SlowUpload(self, key, size)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[Store], str]:
    """Make a URL open this store."""

    def give(store: Store) -> str:
        monkeypatch.setattr(doctor, "open_store", lambda url, **_: store)
        return "memory://place"

    return give


def test_store_that_keeps_promises_has_no_problem(given: Any) -> None:
    """Control of the tests below: all is measured without problems, and nothing is left."""
    store = RecordingStore()
    tier = examine(given(store))
    assert tier.reached and tier.usable and not problems(tier)
    assert not store.objects and store.written
    assert tier.rates.write > 0 < tier.rates.read and tier.rates.put_s > 0


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (IgnoresConditions, "create-if-absent"),
        (ChecksThenWrites, "create-if-absent"),
        (ReportsAllLost, "create-if-absent"),
        (OverwritesAll, "create-if-absent"),
        (ListsLate, "list after write"),
        (ReadsOld, "read after write"),
        (FlipsABit, "bandwidth"),
        (NoPut, "permissions"),
    ],
)
def test_store_that_breaks_a_promise_is_a_problem(given: Any, kind: type[RecordingStore], what: str) -> None:
    """Each broken promise is reported under its own name, with advice. No other check fails, and nothing is left."""
    store = kind()
    tier = examine(given(store))
    assert problems(tier) == {what}
    assert kind is not ChecksThenWrites or "simultaneous creations" in named(tier.findings, what).value
    assert all(f.advice for f in tier.findings if f.verdict == PROBLEM)
    assert not tier.usable and not store.objects


def test_advice_names_scratch_that_cannot_be_removed(given: Any) -> None:
    """Without permission to delete, the advice names the prefix that is left."""
    store = NoDelete()
    tier = examine(given(store))
    assert problems(tier) == {"permissions", "scratch"}
    left = {key.partition("/")[0] for key in store.objects}
    assert len(left) == 1 and left.pop() in named(tier.findings, "scratch").advice


def test_store_that_hangs_is_unreachable(given: Any) -> None:
    tier = examine(given(Hangs()), replace(SMALL, check_s=0.2))
    assert not tier.reached and problems(tier) == {"reach"}


@pytest.mark.parametrize(("name", "shown"), [("thesis.tex", "thesis.tex"), ("FORMAT.json", "")])
def test_foreign_files_are_not_touched(given: Any, name: str, shown: str) -> None:
    """Foreign files and runs of an unknown version are a problem. The doctor writes nothing there, not even
    temporarily."""
    store = RecordingStore({name: b"{}"})
    tier = examine(given(store))
    assert problems(tier) == {"run"} and shown in named(tier.findings, "run").value
    assert store.written == [] and store.objects == {name: b"{}"}


def test_scratch_of_a_killed_doctor_is_deleted(given: Any) -> None:
    """Old scratch objects are deleted. Those of a running doctor stay. Neither counts as a foreign file."""
    store = RecordingStore({"doctor-1000000000-0123abcd/x": b"x", f"doctor-{int(time.time())}-0123abcd/x": b"x"})
    tier = examine(given(store))
    assert not problems(tier)
    assert [key for key in store.objects if "-1000000000-" in key] == [] and len(store.objects) == 1


@pytest.mark.parametrize("moment", ["upload", "create-if-absent"])
def test_cancelled_examination_leaves_no_objects(given: Any, moment: str) -> None:
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


def test_negative_control_without_cleanup_leaves_objects(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    async def nothing(store: Store, prefix: str) -> None:
        pass

    store = RecordingStore()
    monkeypatch.setattr(doctor, "remove", nothing)
    examine(given(store))
    assert store.objects


def test_only_scratch_prefixes_are_removed() -> None:
    for prefix in ("", f"{DATA_FOLDER}/", "doctor-1"):
        with pytest.raises(AssertionError):
            asyncio.run(doctor.remove(MemoryStore(), prefix))


# -- folders --


def test_missing_folder_is_examined_but_not_created(tmp_path: Path) -> None:
    tier = examine(str(tmp_path / "a" / "run"))
    assert tier.usable and list(tmp_path.iterdir()) == []
    assert {"file system", "free space", "fsync", "clock"} <= {f.what for f in tier.findings}


def test_folder_with_a_run_stays_unchanged(tmp_path: Path) -> None:
    """The findings include the newest step and the owner's term. The run is unchanged. Damage is a problem."""
    folder = tmp_path / "run"

    async def make() -> None:
        async with local(folder) as store:
            run = await Run.open(store)
            for step in (3, 7):
                await run.save(step)

    asyncio.run(make())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = named((tier := examine(str(folder))).findings, "run")
    assert tier.usable and found.data == {"newest": 7, "term": 1, "damaged": []}
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (folder / "log" / "000000000001.json").write_bytes(b"rubbish")
    assert problems(examine(str(folder))) == {"run"}


def test_small_file_system_is_hardly_written(tmp_path: Path) -> None:
    """At most a tenth of the free space is written, and tmpfs gets advice because it is memory."""
    with volume(tmp_path, "tmpfs", 24) as small:
        written: list[int] = []
        tier = asyncio.run(doctor.examine(str(small.path / "run"), Bounds(), on_bytes=written.append))
        assert not problems(tier) and sum(written) <= 2 * 2.4 * MIB
        assert named(tier.findings, "file system").verdict == ADVICE
        assert list(small.path.iterdir()) == []
        job = JobSize(state=1 * GB)
        assert named(advice.too_full(job, tier), "room").verdict == PROBLEM
        assert advice.too_full(JobSize(state=1 * MIB), tier) == []


def test_full_file_system_reports_only_free_space(tmp_path: Path) -> None:
    """The only problem is free space: no missing permission, and no advice about the doctor's own folder."""
    with volume(tmp_path, "tmpfs", 8) as full:
        with contextlib.suppress(OSError):
            (full.path / "else").write_bytes(bytes(16 * MIB))
        found = examine(str(full.path / "run")).findings
    problems = [one for one in found if one.verdict == PROBLEM]
    assert problems and {one.what for one in problems} == {"free space"}
    assert all("Free some" in one.advice and ".ckpt-doctor" not in one.advice + one.value for one in problems)


def test_read_only_file_system_is_a_problem(tmp_path: Path) -> None:
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
def test_file_system_is_that_of_the_mount(path: str, kind: str, verdict: str, shared: bool) -> None:
    """The innermost and latest mount of a path counts. The advice fits its type and options."""
    found = doctor_folder.file_system(path, MOUNTS)
    assert (found.kind, found.finding.verdict, found.shared) == (kind, verdict, shared)
    assert "soft" not in found.finding.advice or path == "/data/run"
    assert bool(found.finding.advice) == (verdict != OK)


def test_clock_difference_sets_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small difference is fine, 20 s is advice, and 100 s is a problem, in both directions. A step of the local
    clock is detected."""
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


def test_intact_bucket_has_no_problem(server: MotoServer) -> None:
    """An intact bucket has no problem and keeps nothing. Unfinished uploads and a missing rule are reported."""
    remember_options("s3://bucket/run", storage_options(server.url))
    s3 = client(server)
    s3.create_multipart_upload(Bucket="bucket", Key=f"run/{DATA_FOLDER}/left")
    before = contents(server)
    tier = examine("s3://bucket/run", Bounds(size=24 * MIB))
    assert tier.usable and tier.options and contents(server) == before
    assert named(tier.findings, "unfinished uploads").data == 1
    assert named(tier.findings, "clock").verdict == OK
    assert named(tier.findings, "lifecycle").verdict == ADVICE
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
def test_lifecycle_rules_set_the_verdict(rules: list[dict[str, Any]], verdicts: list[str]) -> None:
    """A rule counts if it is enabled and covers the whole run. A rule that deletes part of the run is a problem.
    Versioning without a rule for old versions is advice."""
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


def test_machine_checks_return_findings_everywhere(tmp_path: Path) -> None:
    """Every check of the machine returns a finding on any machine. A kernel without information causes no
    error."""
    found = machine.machine(JobSize())
    assert {"CPUs", "memory", "open files (ulimit -n)"} <= {f.what for f in found}
    assert all(f.advice for f in found if f.verdict != OK)
    assert machine.machine(JobSize(), proc=tmp_path, sys_=tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_limits_are_found(tmp_path: Path, version: int) -> None:
    """Limits of both versions are found, in the group of the process or in a parent."""
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


def test_too_little_memory_is_a_problem(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n"})
    verdicts = [machine.memory(JobSize(state=n * GB, world=4, local=2), proc, tmp_path).verdict for n in (1, 6, 20)]
    assert verdicts == [OK, ADVICE if 4 * 3 > 0.8 * 12.288 else OK, PROBLEM]


def test_local_ranks_follow_option_or_launcher() -> None:
    """The option or the launcher decides, up to the world size. Otherwise a large job gets an assumed number."""
    assert cli_doctor.local_ranks(8, {"LOCAL_WORLD_SIZE": "2"})[0] == 2
    assert cli_doctor.local_ranks(2, {"SLURM_NTASKS_PER_NODE": "8"})[0] == 2
    assert cli_doctor.local_ranks(8, {"LOCAL_WORLD_SIZE": "2"}, 4) == (4, "")
    if not machine.gpu_count():
        assert cli_doctor.local_ranks(4, {}) == (4, "")
        assert cli_doctor.local_ranks(64, {}) == (8, " (assumed: set --per-node)")


# -- GPUs --


def test_slow_gpu_copies_are_advice(tmp_path: Path) -> None:
    assert machine.gpus(lambda command, _: "[24e9]", tmp_path) == ([Finding("GPU", "no GPU here")], [])
    (tmp_path / "nvidia0").touch()
    for copy, verdict in (("[24e9, 12e9]", OK), (None, ADVICE), ("rubbish", ADVICE), ("[]", ADVICE), ("[3e9]", ADVICE)):
        assert worst(machine.gpus(lambda command, _, copy=copy: copy, tmp_path)[0]) == verdict
    assert machine.run_command(["no-such-program"], 1.0) is None
    assert machine.run_command([sys.executable, "-c", "import time; time.sleep(9)"], 0.2) is None


# -- conclusions --

SPEED = Speed(copy=10 * GB, by_device=False, cpus=8, available=100 * GB)
DISK = TierFindings("file:///nvme/run1", rates=StoreRates(write=1 * GB, read=2 * GB, cpu_s=0.1 / GB), free=1000 * GB)
BUCKET = TierFindings("s3://bucket/run1", rates=StoreRates(write=GB // 10, read=GB // 5, cpu_s=0.3 / GB), options=True)


def test_intervals_follow_from_measured_rates() -> None:
    """Durations follow from this machine's share and the measured rates. The tiers line is valid code, in order, with
    round intervals that keep the cost below 1 %."""
    job = JobSize(state=20 * GB, step_s=1.0, world=4, local=2)
    memory, disk, bucket = advice.conclude(job, [BUCKET, DISK], SPEED)
    assert (memory.where, disk.where, bucket.where) == ("memory", DISK.url, BUCKET.url)
    assert memory.save_s == 1.0 and memory.every == 20  # 1 s of copying on 8 CPUs: at least 12.5 s
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


def test_tiers_with_problems_are_not_recommended() -> None:
    """A tier with a problem gets its durations, but is not in the tiers line. Without other tiers the line is empty."""
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


def test_command_prints_line_to_paste(call: Any, tmp_path: Path) -> None:
    """An intact folder exits with 0, prints a line to paste, and gives one document as JSON."""
    code, out, _ = call(tmp_path / "run", "--size", 4, "--state-gb", 0.001, "--step-s", 1)
    assert code == 0 and "tiers=[ckpt.Tier(" in out and "memory=ckpt.Memory(every=" in out and "create-if-absent" in out
    code, out, _ = call(tmp_path / "run", "--size", 4, "--json")
    found = json.loads(out)
    assert code == 0 and found["places"][0]["reached"] and found["machine"][0]["value"] == "plenty"
    assert list(tmp_path.iterdir()) == []


def test_command_explains_a_missing_line_to_paste(call: Any, tmp_path: Path) -> None:
    """If a tier has a problem, the text output has a marked line and the JSON output none. Without a tier or a step
    time, the output names the missing option. The ranks here are those of a node."""
    run, job = tmp_path / "run", ("--size", 4, "--state-gb", 1e6)
    code, wide, _ = call(run, *job, "--step-s", 1, "--world", 64, "--per-node", 16)
    out = " ".join(wide.split())
    assert code == 1 and "Once the problems above are fixed: tiers=[" in out and str(run) in out
    assert "over 64 ranks, 16 of them here, with" in out
    assert json.loads(call(run, *job, "--step-s", 1, "--json")[1])["tiers"] == ""
    assert "Give --step-s" in call(run, *job)[1] and "Give the folder or bucket" in call(*job)[1]


def test_command_exit_codes(call: Any, tmp_path: Path, server: MotoServer) -> None:
    """The exit code is 1 for problems. It is 2 for unreachable tiers, also next to intact ones, and for wrong usage."""
    (tmp_path / "notes.txt").write_text("mine")
    assert call(tmp_path)[0] == 1 and [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    options = ("--option", f"endpoint_url={server.url}", "--option", "key=testing", "--option", "secret=testing")
    assert call("s3://missing/run", tmp_path / "notes.txt", *options)[0] == 2
    assert call(tmp_path, "--option", "b")[0] == 2
    assert call("nosuch://place")[0] == 2


def test_command_prints_no_secrets(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of the options and no password of a URL is printed, on stdout or stderr, as text or JSON."""
    monkeypatch.setattr(doctor, "RETRY_S", 0.5)
    secret, password = "wJalrXUtnFEMI", "hunter2hunter2"
    options = ["endpoint_url=http://me:hunter2hunter2@127.0.0.1:9", "key=AKIAEXAMPLE", f"secret={secret}"]
    arguments = [argument for option in options for argument in ("--option", option)]
    for more in ([], ["--json"]):
        code, out, err = call("s3://bucket/run", f"http://me:{password}@127.0.0.1:9/x", *arguments, *more)
        assert code == 2
        for hidden in (secret, password, "AKIAEXAMPLE"):
            assert hidden not in out + err


def test_secrets_in_driver_errors_are_hidden(given: Any) -> None:
    """Keys and tokens of the options are removed from a driver's messages, at any depth."""

    class LeaksSecrets(RecordingStore):
        async def get(self, key: str, **range_: Any) -> memoryview:
            raise AccessError("no entry for s3cr3t-one at http://me:s3cr3t-two@host/x?X-Sig=s3cr3t-three")

    remember_options("memory://place", {"client_kwargs": {"session_token": "s3cr3t-one"}})
    tier = examine(given(LeaksSecrets()))
    assert problems(tier) == {"reach"} and "s3cr3t" not in str(tier)
    assert named(tier.findings, "reach").value.startswith("no entry for *** at http://host/x")


def test_interrupted_command_leaves_no_folder(tmp_path: Path) -> None:
    process = spawn(tmp_path / "run", "--size", 100_000)
    assert eventually(lambda: any(tmp_path.rglob("bytes1")))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 130 and list(tmp_path.iterdir()) == []


def test_interrupted_command_leaves_no_objects_in_bucket(server: MotoServer) -> None:
    """Ctrl-C leaves neither objects nor unfinished uploads."""
    before = contents(server)
    process = spawn("s3://bucket/interrupted", "--size", 100_000, **environment(server.url))
    assert eventually(lambda: any("bytes1" in key for key in contents(server)[0]))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130 and contents(server) == before
