"""Tests of metrics from the writer: served and recorded values match the training, before and after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client.core
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ckpt
import toy
from ckpt.core.checkpoint.lease import key_of
from ckpt.core.ipc import channel
from ckpt.core.ipc.messages import Look
from ckpt.errors import CorruptError, UsageError
from ckpt.metrics import Metrics, as_metrics
from ckpt.store import normalise
from ckpt.tools.observe.telemetry import exporter
from ckpt.tools.observe.telemetry.exporter import families, tag_of
from ckpt.tools.observe.telemetry.gauges import KINDS, gauges
from ckpt.tools.observe.telemetry.nvml import Devices
from ckpt.tools.observe.telemetry.status import DeviceStatus, RankStatus, SlotStatus, TierStatus, shown
from live_child import child
from parallel import free_port
from processes import eventually, writers

PATIENCE_S = 60.0


Sample = dict[tuple[str, ...], float]


def scrape(port: int) -> dict[str, Sample]:
    """Return samples by name and by label values except run; {} if the endpoint does not respond."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    found: dict[str, Sample] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = tuple(value for name, value in sorted(one.labels.items()) if name != "run")
            found.setdefault(one.name, {})[labels] = one.value
    return found


def scraped(port: int, condition: Callable[[dict[str, Sample]], bool]) -> dict[str, Sample]:
    """Wait until the condition is true, and return the served samples."""
    last: dict[str, Sample] = {}

    def look() -> bool:
        nonlocal last
        last = scrape(port)
        try:
            return bool(last) and condition(last)
        except KeyError:  # not known yet
            return False

    assert eventually(look, PATIENCE_S), last
    return last


def scalars(folder: Path, tag: str, rank: int = 0) -> list[tuple[int, float]]:
    """Return steps and values, as TensorBoard reads them."""
    if not (folder / f"rank{rank}").is_dir():
        return []
    found = EventAccumulator(str(folder / f"rank{rank}"))
    found.Reload()
    return [(one.step, one.value) for one in found.Scalars(f"ckpt/{tag}")] if f"ckpt/{tag}" in str(found.Tags()) else []


def look_at(run_dir: str, number: int = 0) -> RankStatus:
    reply = channel.ask_once(key_of(run_dir, number), Look(), 30.0)
    assert reply is not None
    return RankStatus.from_json(reply)


@contextmanager
def training(run_dir: str, **options: Any) -> Iterator[tuple[ckpt.Checkpointer, Callable[[int], int]]]:
    """Yield a Checkpointer in this process, and a function that trains steps."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run_dir, every=10), options=ckpt.Options(**options)) as cp:
        step = cp.restore(default=0)

        def go(steps: int) -> int:
            nonlocal step
            for _ in range(steps):
                toy.train_step(state)
                step += 1
                save = cp.step(step)
                if step == 1 and save is not None:
                    save.wait_staged(PATIENCE_S)  # memory is ready from now on, and no step is skipped
            cp.wait(PATIENCE_S)
            return step

        yield cp, go


# -- the user's configuration --

REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (lambda: Metrics(), "Metrics() has no destination"),
    "port 0": (lambda: Metrics(0), "prometheus_port=0: it must be a port from 1 to 65535"),
    "port high": (lambda: Metrics(65536), "prometheus_port=65536"),
    "port text": (lambda: Metrics("9400"), "prometheus_port='9400'"),  # type: ignore[arg-type]
    "port true": (lambda: Metrics(True), "prometheus_port=True"),
    "host": (lambda: Metrics(9400, host=""), "host='': it must be a name"),
    "folder": (lambda: Metrics(tensorboard=3), "tensorboard=3: it must be a folder"),  # type: ignore[arg-type]
    "bucket": (lambda: Metrics(tensorboard="s3://bucket/tb"), "a local folder"),
    "every 0": (lambda: Metrics(9400, every_s=0), "every_s=0: it must be a number above 0"),
    "every none": (lambda: Metrics(9400, every_s=None), "every_s"),  # type: ignore[arg-type]
    "samples": (
        lambda: Metrics(9400, samples_per_step=float("nan")),
        "samples_per_step=nan: it must be a number above 0",
    ),
    "flops": (lambda: Metrics(9400, flops_per_step=-1), "flops_per_step"),
    "peak alone": (lambda: Metrics(9400, peak_flops=1e15), "flops_per_step="),
    "no port left": (lambda: Metrics(65535).port(1), "leaves no port for local rank 1"),
    "text": (lambda: as_metrics("9400"), "a port or ckpt.Metrics"),
    "true": (lambda: as_metrics(True), "a port or ckpt.Metrics"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_metrics_options_are_rejected(name: str) -> None:
    wrong, words = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        wrong()
    assert words in str(caught.value)


def test_number_as_metrics_is_a_port() -> None:
    """None disables metrics. A node's ports are consecutive. A folder path becomes absolute for the writer."""
    assert as_metrics(None) is None and as_metrics(9400) == Metrics(prometheus_port=9400)
    assert Metrics(9400).port(3) == 9403 and Metrics(tensorboard="x").port(3) is None
    assert Metrics(tensorboard=Path("x")).tensorboard == str(Path.cwd() / "x")
    assert Metrics(**Metrics(9400, tensorboard="x", samples_per_step=8).to_json()) == Metrics(
        9400, tensorboard="x", samples_per_step=8
    )


def test_missing_metrics_package_fails_before_start(
    run_dir: str, own_sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised before anything starts: no writer and no folder exist."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for metrics in (9400, Metrics(tensorboard=run_dir)):
        with pytest.raises(UsageError, match=r"pip install 'everystep\[metrics\]'"):
            ckpt.Checkpointer(toy.build(), run_dir, options=ckpt.Options(metrics=metrics))
    assert not writers(own_sockets) and not Path(run_dir).exists()


# -- status and metrics as values --

FULL = RankStatus(
    run="file:///data/run",
    rank=3,
    world=8,
    trainer="alive",
    doing="training",
    step=120,
    calls=20,
    idle_s=0.5,
    step_s=0.25,
    stall_s=0.001,
    stall_share=0.004,
    stalled_s=0.02,
    slowed_s=0.1,
    trained_s=5.0,
    wall_s=10.0,
    started=100,
    restore_s=1.5,
    in_memory=120,
    trainer_rss=100,
    writer_rss=200,
    samples_per_step=32,
    flops_per_step=1e12,
    peak_flops=8e12,
    slots=(SlotStatus("sealed", 120, "1.abc-120", 4096), SlotStatus("filling")),
    tiers=(
        TierStatus("file:///data/run", 10, committed=110, lag_steps=10, lag_s=2.5, rate=1e9, saves=2, raw=5, stored=3),
    ),
    device=DeviceStatus("H100", 0.75, 5, 6, 7),
)


def test_every_metric_has_name_and_help() -> None:
    """Names follow the conventions, each has help text, and a complete status gives all of them."""
    found = {one.name for one in gauges(FULL)}
    assert found == set(KINDS)
    for name, kind in KINDS.items():
        assert name.startswith("ckpt_") and kind.help.endswith(".") and not name.endswith("_total")
    text = {family.name: family for family in families(FULL, prometheus_client.core)}
    assert len(text) == len(KINDS)
    values = {(s.name, s.labels.get("tier", "")): s.value for f in text.values() for s in f.samples}
    assert values["ckpt_samples_per_second", ""] == 128 and values["ckpt_mfu_ratio", ""] == 0.5
    assert values["ckpt_goodput_ratio", ""] == 0.5 and values["ckpt_steps_total", ""] == 20
    assert values["ckpt_tier_lag_seconds", "file:///data/run"] == 2.5
    assert all(s.labels["run"] == FULL.run and s.labels["rank"] == "3" for f in text.values() for s in f.samples)


def test_status_is_readable_across_versions() -> None:
    """A round trip changes nothing; unknown fields are ignored, and missing ones get defaults."""
    data = json.loads(json.dumps(FULL.to_json(), allow_nan=False))
    assert RankStatus.from_json(data) == FULL
    assert (
        RankStatus.from_json({**data, "new": [1], "slots": [{"state": "sealed", "colour": 3}]}).slots[0].state
        == "sealed"
    )
    assert RankStatus.from_json({}) == RankStatus()
    for wrong in (None, [], 3, {"step": "12"}, {"step": 1.5}, {"at": float("nan")}, {"slots": 3}, {"tiers": [None]},
                  {"rank": True}, {"rank": None}, {"device": 3}, {"tiers": [{"url": None}]}):  # fmt: skip
        with pytest.raises(CorruptError):
            RankStatus.from_json(wrong)


def test_urls_have_no_secrets() -> None:
    """User, password and signature are removed; folders stay unchanged, whatever is in their names."""
    assert shown("s3://bucket/run") == "s3://bucket/run"
    assert shown("https://AKIA:pw@host:9/run?sig=abc#x") == "https://host:9/run"
    assert shown("file:///data/a?b@c") == "file:///data/a?b@c" and shown("memory:me@here") == "memory:me@here"


class Nvml:
    """A driver with two devices, the second of which runs process 7."""

    def __init__(self, count: int = 2, broken: str = "") -> None:
        self.count, self.broken, self.calls = count, broken, 0

    def nvmlInit(self) -> None:
        if self.broken == "init":
            raise OSError("no driver")

    def nvmlDeviceGetCount(self) -> int:
        self.calls += 1
        if self.broken == "count":
            raise OSError("lost")
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"device %d" % handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=10 + handle, total=100)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if self.broken == "rates":
            raise OSError("not of a partition")
        return SimpleNamespace(gpu=80)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=7, usedGpuMemory=5)] * (handle == 1)


def test_device_of_process_is_found_by_driver() -> None:
    assert Devices(Nvml()).look(7) == DeviceStatus("device 1", 0.8, 5, 11, 100)
    assert Devices(Nvml()).look(8) is None
    assert Devices(Nvml(1)).look(8) == DeviceStatus("device 0", 0.8, None, 10, 100)
    assert Devices(Nvml(0)).look(8) is None
    assert Devices(Nvml(broken="rates")).look(7) == DeviceStatus("device 1", None, 5, 11, 100)


# -- real writers --


def torch_in(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_metrics_match_the_training(run_dir: str, tmp_path: Path) -> None:
    """Steps, saves and stalls match the trainer in the status, at the endpoint and in TensorBoard. The writer does not
    import torch. Only this machine is served. At the end the port is free, and the last step is recorded."""
    port, folder = free_port(), tmp_path / "tb"
    metrics = Metrics(port, tensorboard=folder, every_s=0.2, samples_per_step=8, flops_per_step=1e9, peak_flops=1e12)
    url = normalise(run_dir)
    with training(run_dir, metrics=metrics) as (cp, go):
        go(30)
        found = scraped(port, lambda all: all["ckpt_step"][("0",)] == 30 and ("0", url) in all["ckpt_tier_step"])
        look = look_at(run_dir)
        assert torch_in(os.getpid()) and not torch_in(look.writer)
        assert (look.trainer, look.doing, look.step, look.calls, look.pid) == ("alive", "training", 30, 30, os.getpid())
        assert (
            look.saves == cp.stats.saves - 1 == 29
            and look.stalled_s
            == pytest.approx(  # as of the last call of step()
                cp.stats.stalled_s - cp.stats.stalls[-1], abs=1e-6
            )
        )
        # A slot being written may have an older step than its neighbors.
        assert {slot.state for slot in look.slots} == {"sealed"} and max(slot.step for slot in look.slots) == 30
        assert look.in_memory == 30 and look.memory_lag == 0 and look.started is None and not look.serves.endswith(":0")
        tier = look.tiers[0]
        assert (tier.url, tier.every, tier.committed, tier.lag_steps, tier.saves, tier.failed) == (url, 10, 30, 0, 3, 0)
        assert tier.raw > 0 and tier.stored > 0 and tier.writing is None and not tier.error
        assert found["ckpt_trainer_up"] == {("0",): 1} and found["ckpt_steps_total"] == {("0",): 30}
        assert found["ckpt_snapshots_total"] == {("0",): 29} and found["ckpt_skipped_total"] == {("0",): 0}
        assert found["ckpt_tier_step"] == {("0", "memory"): 30, ("0", url): 30}
        assert found["ckpt_tier_saves_total"] == {("0", url): 3}
        assert found["ckpt_tier_raw_bytes_total"] == {("0", url): tier.raw}
        assert found["ckpt_stalled_seconds_total"][("0",)] == pytest.approx(look.stalled_s)
        rate = 1 / found["ckpt_step_seconds"][("0",)]
        assert found["ckpt_samples_per_second"][("0",)] == pytest.approx(8 * rate)
        assert found["ckpt_mfu_ratio"][("0",)] == pytest.approx(rate / 1000)
        assert 0 < found["ckpt_goodput_ratio"][("0",)] <= 1
        assert found["ckpt_process_resident_memory_bytes"][("trainer", "0")] > 2**26
        assert not psutil.Process(look.writer).net_connections() or {
            one.laddr.ip for one in psutil.Process(look.writer).net_connections() if one.status == "LISTEN"
        } == {"127.0.0.1"}
        assert eventually(lambda: (30, 30.0) in scalars(folder, "steps"), PATIENCE_S)
        go(3)
    assert eventually(lambda: not scrape(port), PATIENCE_S)
    assert eventually(lambda: (33, 4.0) in scalars(folder, "tier_saves/" + url), PATIENCE_S)  # its last action
    for tag, wanted in (("step", 33), ("tier_saves/" + url, 4), (f"tier_raw_bytes/{url}", None)):
        steps = scalars(folder, tag)
        assert [step for step, _ in steps] == sorted(step for step, _ in steps)
        assert wanted is None or steps[-1] == (33, wanted)
    assert all(value == step for step, value in scalars(folder, "step"))


def test_metrics_continue_after_trainer_is_killed(run_dir: str, tmp_path: Path, own_sockets: Path) -> None:
    """After SIGKILL the endpoint reports the dead trainer, counts the fault, and shows the tier catching up.
    The next trainer is served at the same port, with its restore time. Steps in TensorBoard never go back, and repeat
    only where a trainer or a writer ended."""
    port, folder, url = free_port(), tmp_path / "tb", normalise(run_dir)
    with child(run_dir, port, folder) as (process, go):
        assert go(25) == {"step": 25, "saves": 25}
        scraped(port, lambda all: all["ckpt_step"][("0",)] == 25 and all["ckpt_tier_lag_steps"][("0", url)] == 5)
        assert eventually(lambda: (25, 25.0) in scalars(folder, "step"), PATIENCE_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
        dead = scraped(
            port, lambda all: all["ckpt_faults_total"][("0",)] == 1 and all["ckpt_tier_step"][("0", url)] == 25
        )
        assert dead["ckpt_trainer_up"] == {("0",): 0} and dead["ckpt_step"] == {("0",): 25}
        assert dead["ckpt_tier_lag_steps"][("0", url)] == 0 and dead["ckpt_tier_step"][("0", "memory")] == 25
        assert ("trainer", "0") not in dead["ckpt_process_resident_memory_bytes"]
        look = look_at(run_dir)
        assert look.trainer == "dead" and "after step 25" in look.fault and look.pid == process.pid
        first = look.writer
    metrics = Metrics(port, tensorboard=folder, every_s=0.2)
    with training(run_dir, metrics=metrics) as (cp, go):
        assert go(4) == 29
        again = scraped(port, lambda all: all["ckpt_trainer_up"][("0",)] == 1 and all["ckpt_step"][("0",)] == 29)
        assert again["ckpt_steps_total"] == {("0",): 4} and again["ckpt_restore_seconds"][("0",)] > 0
        look = look_at(run_dir)
        assert look.writer == first and look.started == 25 and look.restored_from == "memory"
        assert look.pid == os.getpid() and look.serves == f"http://127.0.0.1:{port}/metrics"
        assert eventually(lambda: (29, 29.0) in scalars(folder, "step"), PATIENCE_S)
        # When its writer is killed, the next one serves.
        psutil.Process(first).kill()
        scraped(port, lambda all: all.get("ckpt_step") == {("0",): 29})
        assert look_at(run_dir).writer != first
        cp.wait(PATIENCE_S)
        go(1)
        new = scraped(port, lambda all: all["ckpt_step"][("0",)] == 30)
        assert new["ckpt_restore_seconds"] == again["ckpt_restore_seconds"]  # the new writer has received it
        assert eventually(lambda: (30, 30.0) in scalars(folder, "step"), PATIENCE_S)  # it loads TensorBoard first
    assert eventually(lambda: scalars(folder, "step")[-1] == (30, 30.0), PATIENCE_S)  # its last action
    steps = [step for step, _ in scalars(folder, "step")]
    assert steps == sorted(steps) and {step for step in steps if steps.count(step) > 1} <= {25, 29, 30}  # ends


def test_port_in_use_is_served_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning explains the remedy, and once the port is free, it is served."""
    for name in ("PATIENCE_S", "SOON_S", "AGAIN_S"):
        monkeypatch.setattr(exporter, name, 0.01)
    said, served = list[str](), list[str]()

    async def look() -> RankStatus:
        return FULL

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def main(taken: socket.socket) -> None:
        port = taken.getsockname()[1]
        serving = exporter.Exporter(look, said.append, served.append)
        await serving.begin(Metrics(port), 0, 0)
        await until(lambda: bool(said))
        assert f"127.0.0.1:{port}" in said[0] and "use another prometheus_port=" in said[0] and not any(served)
        taken.close()
        await until(lambda: served[-1:] == [f"http://127.0.0.1:{port}/metrics"])
        assert (await asyncio.to_thread(scrape, port))["ckpt_step"] == {("3",): 120}
        await serving.stop()
        assert len(said) == 1 and served[-1] == ""

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asyncio.run(main(taken))


def test_unwritable_folder_only_logs_a_warning(run_dir: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning is logged and steps are saved. In a writable folder scalars are written, even if it was deleted."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    taken = socket.create_server(("127.0.0.1", 0))  # also a port that is in use
    metrics = Metrics(taken.getsockname()[1], tensorboard=blocked / "tb", every_s=0.05)
    with taken, training(run_dir, metrics=metrics) as (_, go), caplog.at_level(logging.WARNING, "ckpt"):
        go(10)
        assert eventually(lambda: "cannot serve metrics" in caplog.text, PATIENCE_S)

        def said() -> list[str]:
            return [one.getMessage() for one in caplog.records if "cannot write scalars" in one.getMessage()]

        assert eventually(lambda: bool(said()), PATIENCE_S) and str(blocked) in said()[0]
        assert look_at(run_dir).tiers[0].committed == 10
        blocked.unlink()
        assert eventually(lambda: (10, 10.0) in scalars(blocked / "tb", "step"), PATIENCE_S)
        shutil.rmtree(blocked)  # a cleanup by another process
        go(1)
        assert eventually(lambda: (11, 11.0) in scalars(blocked / "tb", "step"), PATIENCE_S)
        assert len(said()) == 1


def test_failing_tier_reports_its_error(run_dir: str, tmp_path: Path) -> None:
    """The status has the count and the last error until a save succeeds again; the nearest tier is unaffected."""
    far, away = tmp_path / "far", tmp_path / "away"
    tiers = [ckpt.Tier(run_dir, every=1), ckpt.Tier(str(far), every=1)]
    with ckpt.Checkpointer(toy.build(), tiers, options=ckpt.Options(on_error="warn")) as cp:
        cp.restore(default=0)

        def go(step: int) -> None:
            save = cp.step(step)
            assert save is not None
            with contextlib.suppress(ckpt.CheckpointError):
                cp.wait(PATIENCE_S)

        go(1)
        far.rename(away)
        far.write_text("no folder")
        go(2)
        near, tier = look_at(run_dir).tiers
        assert tier.failed >= 1 and tier.error and tier.committed == 1 and tier.lag_steps == 1
        assert near.failed == 0 and not near.error and near.committed == 2
        far.unlink()
        away.rename(far)
        go(3)
        assert eventually(lambda: look_at(run_dir).tiers[1].committed == 3, PATIENCE_S)
        assert look_at(run_dir).tiers[1].error == "" and look_at(run_dir).tiers[1].failed == tier.failed


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from ckpt.tools.observe.telemetry.exporter import EventFile

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
events = EventFile(Path(sys.argv[1]))
failed = 0
for step in range(40):
    if step == 10:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
    if step == 20:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        events.write(step, {"ckpt/step": step, "ckpt/half": step / 2, "ckpt/more": 0.1, "ckpt/and_more": 0.2})
    except OSError:
        failed += 1
assert 0 < failed < 11, failed
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
print(failed)
"""


def test_full_disk_leaves_complete_records(tmp_path: Path) -> None:
    """A partial record would damage later ones: it is removed, and writing continues when there is space."""
    folder = tmp_path / "rank0"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, folder], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = scalars(tmp_path, "step")
    assert len(steps) == 40 - int(done.stdout) and all(value == step for step, value in steps)
    assert {step for step, _ in steps} >= {*range(5), *range(20, 40)}
    assert all(value == step / 2 for step, value in scalars(tmp_path, "half"))


def test_each_rank_has_own_port_and_folder(run_dir: str, tmp_path: Path, own_sockets: Path) -> None:
    """With two ranks on a node, each is served by its own writer, and none appears twice."""
    folder, meet = tmp_path / "tb", free_port()
    port = next(found for found in iter(free_port, 0) if not scrape(found + 1))
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meet)}
    with child(run_dir, port, folder, RANK="0", **world) as (_, go0):
        with child(run_dir, port, folder, RANK="1", **world) as (_, go1):
            with ThreadPoolExecutor() as pool:  # a checkpoint needs the shards of both
                assert list(pool.map(lambda go: go(12), (go0, go1))) == [{"step": 12, "saves": 12}] * 2
            for rank in (0, 1):
                found = scraped(port + rank, lambda all: True)
                assert found["ckpt_step"] == {(str(rank),): 12}
                assert eventually(lambda: (12, 12.0) in scalars(folder, "step", rank), PATIENCE_S)  # noqa: B023
            assert {look_at(run_dir, n).rank for n in (0, 1)} == {0, 1}


def test_negative_control_nothing_is_served_without_metrics(run_dir: str, own_sockets: Path) -> None:
    with training(run_dir) as (_, go):
        go(3)
        (writer,) = writers(own_sockets)
        assert not [one for one in writer.net_connections("inet") if one.status == "LISTEN"]
        assert look_at(run_dir).serves == "" and look_at(run_dir).step == 3
    assert tag_of(gauges(replace(FULL, tiers=()))[0]) == "ckpt/trainer_up"
