"""Preemption notices arrive once from each cloud, whatever faults a metadata service has, and from no other host."""

from __future__ import annotations

import logging
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import UsageError
from ckpt.guard import metadata_request, preemption
from ckpt.guard.preemption import Notice, NoticeWatch, detect, slurm_end
from ckpt.triggers import SOURCES, OnDeadline, OnPreemption, on_deadline, on_preemption
from metadata import FAULTS, HUGE, Metadata
from processes import eventually

AT = 1767225600.0  # 2026-01-01T00:00:00Z
EC2 = {"action": "terminate", "time": "2026-01-01T00:00:00Z"}
EVENT = {
    "EventId": "e1", "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": ["vm0"],
    "EventStatus": "Scheduled", "NotBefore": "Thu, 01 Jan 2026 00:00:00 GMT",
}  # fmt: skip
ANNOUNCE: dict[str, dict[str, Any]] = {
    "ec2": {"ec2": EC2},
    "gce": {"preempted": "TRUE"},
    "azure": {"azure": [EVENT]},
}
MARK = {"ec2": "spot/instance-action", "gce": "preempted", "azure": "scheduledevents"}
FIRMWARE = {
    "ec2": {"sys_vendor": "Amazon EC2", "bios_vendor": "Amazon EC2", "product_name": "p5.48xlarge"},
    "gce": {"sys_vendor": "Google", "bios_vendor": "Google", "product_name": "Google Compute Engine"},
    "azure": {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
}

Found = list[Notice]
Watching = Callable[..., tuple[NoticeWatch, Found]]


@pytest.fixture(autouse=True)
def _no_real_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent faulty tests from querying the metadata service of this machine."""
    monkeypatch.setattr(preemption, "BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(preemption, "AZURE_FIRST_S", 0.0)


@pytest.fixture
def cloud() -> Iterator[Metadata]:
    with Metadata() as found:
        yield found


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    """Start a watch whose notices are collected in a list."""
    started = []

    def start(*triggers: OnPreemption | OnDeadline, **options: Any) -> tuple[NoticeWatch, Found]:
        found: Found = []
        options = {"dmi": tmp_path / "none", "environ": {}, "timeout_s": 0.3, "hold_s": 1, **options}
        watch = NoticeWatch(triggers, options.pop("on_notice", found.append), **options)
        watch.start()
        started.append(watch)
        return watch, found

    yield start
    for watch in started:
        watch.stop()


def trigger_for(source: str, cloud: Metadata) -> OnPreemption:
    return on_preemption(source, base_url=cloud.url, poll_s=0.02)


def polled_again(cloud: Metadata, text: str = "", times: int = 3) -> bool:
    """Return True if more requests follow, so that a notice would have been reported."""
    before = cloud.count(text)
    return eventually(lambda: cloud.count(text) >= before + times)


def firmware(folder: Path, values: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(value + "\n")
    return folder


# -- each cloud --


@pytest.mark.parametrize("source", SOURCES)
def test_notice_arrives_once(source: str, cloud: Metadata, watching: Watching) -> None:
    """No notice comes before the announcement, and one after it, however often it is read."""
    watch, found = watching(trigger_for(source, cloud))
    assert polled_again(cloud, MARK[source], 2)
    assert not found
    cloud.set(**ANNOUNCE[source])
    assert eventually(lambda: len(found) == 1)
    assert found[0].kind == "preemption"
    assert found[0].at == (None if source == "gce" else AT)
    assert polled_again(cloud, MARK[source])
    assert len(found) == 1
    watch._reported.clear()  # negative control: the announcement would be reported again
    assert eventually(lambda: len(found) == 2)


def test_ec2_uses_and_renews_a_token(cloud: Metadata, watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PUT gets a token for 300 s. It is reused, and replaced before it expires or if the service forgets it."""
    _, found = watching(trigger_for("ec2", cloud))
    assert polled_again(cloud, "instance-action", 5)
    tokens = [request for request in cloud.asked if request.target == "/latest/api/token"]
    assert [(t.method, t.headers["x-aws-ec2-metadata-token-ttl-seconds"]) for t in tokens] == [("PUT", "300")]
    cloud.tokens.clear()
    assert eventually(lambda: len(cloud.tokens) > 0)
    monkeypatch.setattr(preemption, "TOKEN_S", 1)
    cloud.set(token_s=1.0)
    cloud.tokens.clear()
    assert eventually(lambda: len(cloud.tokens) > 2)
    cloud.set(ec2=EC2)
    assert eventually(lambda: len(found) == 1)


def test_ec2_rebalance_is_reported_once(cloud: Metadata, watching: Watching) -> None:
    """A rebalance recommendation has its own kind and is reported once, even if its time changes."""
    cloud.set(rebalance={"noticeTime": "2026-01-01T00:00:00Z"})
    _, found = watching(trigger_for("ec2", cloud))
    assert eventually(lambda: len(found) == 1)
    cloud.set(rebalance={"noticeTime": "2026-01-01T00:05:00Z"})
    assert polled_again(cloud, "instance-action")
    assert [(n.kind, n.at) for n in found] == [("rebalance", None)]
    cloud.set(ec2=EC2)
    assert eventually(lambda: [n.kind for n in found] == ["rebalance", "preemption"])


def test_gce_reads_current_value_then_waits(cloud: Metadata, watching: Watching) -> None:
    """The current value is read without waiting. Later requests are held, and contain the last etag."""
    cloud.set(preempted="TRUE")
    _, found = watching(trigger_for("gce", cloud), hold_s=7)
    assert eventually(lambda: len(found) == 1)
    assert eventually(lambda: cloud.count("wait_for_change=true&timeout_sec=7&last_etag=") == 2)
    first = next(request for request in cloud.asked if "preempted" in request.target)
    assert "?" not in first.target
    assert first.headers["metadata-flavor"] == "Google"


def test_gce_maintenance_counts_only_if_terminating(cloud: Metadata, watching: Watching) -> None:
    """Each new announcement counts. A live migration does not, because the process continues."""
    _, found = watching(trigger_for("gce", cloud))
    for value in ("MIGRATE_ON_HOST_MAINTENANCE", "NONE"):
        cloud.set(maintenance=value)
        assert polled_again(cloud, "maintenance-event", 2)
    assert not found
    for count in (1, 2):
        cloud.set(maintenance="TERMINATE_ON_HOST_MAINTENANCE")
        assert eventually(lambda n=count: len(found) == n)  # type: ignore[misc]
        assert found[-1].kind == "preemption"
        cloud.set(maintenance="NONE")
        assert polled_again(cloud, "maintenance-event", 2)
    assert len(found) == 2


@pytest.mark.parametrize("kind", ["Preempt", "Redeploy"])
def test_azure_stopping_events_are_reported_once(kind: str, cloud: Metadata, watching: Watching) -> None:
    """Each event is reported once by its id, even when it starts and its time is cleared. Freeze and completed events
    are not reported. No event is acknowledged, because a POST would start it immediately."""
    over = {**EVENT, "EventId": "e0", "EventStatus": "Completed"}
    odd = ["no event", {}, {**EVENT, "EventId": "e2", "EventType": "Freeze"}, over]
    cloud.set(azure=[*odd, {**EVENT, "EventType": kind}])
    _, found = watching(trigger_for("azure", cloud))
    assert eventually(lambda: len(found) == 1)
    assert found[0].at == AT
    assert "vm0 at 2026-01-01T00:00:00Z" in found[0].what
    cloud.set(azure=[*odd, {**EVENT, "EventType": kind, "EventStatus": "Started", "NotBefore": ""}])
    assert polled_again(cloud)
    assert len(found) == 1
    cloud.set(azure=[{**EVENT, "EventId": "e3", "EventType": kind, "NotBefore": ""}])
    assert eventually(lambda: len(found) == 2)
    assert found[1].at is None
    assert {request.method for request in cloud.asked} == {"GET"}


def test_notice_with_malformed_time_has_none(cloud: Metadata, watching: Watching) -> None:
    """The notice is reported without a time."""
    times: list[Any] = ["", "tomorrow", 5, None, [], "9" * 5000, "2026-13-01T00:00:00Z", "Thu, 99 Foo"]
    cloud.set(
        ec2={"action": "stop", "time": "tomorrow"},
        azure=[{**EVENT, "EventId": f"e{n}", "NotBefore": time} for n, time in enumerate(times)],
    )
    _, found = watching(trigger_for("azure", cloud), trigger_for("ec2", cloud))
    assert eventually(lambda: len(found) == len(times) + 1)
    assert {notice.at for notice in found} == {None}


# -- faults --


ANSWERS = ("redirect", "hang")  # faults that requests of different clouds may handle differently


@pytest.mark.parametrize(
    ("source", "fault"),
    [(source, fault) for source in SOURCES for fault in (FAULTS if source == "azure" else ANSWERS)],
)
def test_watch_survives_faults(
    source: str, fault: str, cloud: Metadata, watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    """Polling continues, nothing is reported, and each thread logs one warning. A notice after the fault arrives."""
    with Metadata() as elsewhere:
        cloud.set(fault=fault, elsewhere=elsewhere.url)
        elsewhere.set(**ANNOUNCE[source])  # a followed redirect would find a notice there
        with caplog.at_level(logging.WARNING, "ckpt"):
            watch, found = watching(trigger_for(source, cloud))
            assert eventually(lambda: cloud.count() >= 3 * len(watch._threads))
            assert not found
            assert not elsewhere.asked
            assert all(len(record.getMessage()) < 400 for record in caplog.records)
            assert eventually(lambda: len(caplog.records) == len(watch._threads))
            cloud.set(fault=None, **ANNOUNCE[source])
            assert eventually(lambda: len(found) == 1)
        assert all(thread.is_alive() for thread in watch._threads)


def test_at_most_64_kib_are_read(cloud: Metadata, watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a huge response is not read."""
    sizes: list[int] = []
    real = metadata_request._Until.readinto
    monkeypatch.setattr(
        metadata_request._Until, "readinto", lambda self, into: sizes.append(real(self, into)) or sizes[-1]
    )
    cloud.set(fault="huge")
    watch, _ = watching(trigger_for("azure", cloud))
    assert eventually(lambda: sum(sizes) > 0)
    watch.stop()
    assert eventually(lambda: not watch._threads[0].is_alive())
    assert 0 < sum(sizes) / cloud.count() < metadata_request.MAX_ANSWER + 2 * 8192 < HUGE


# -- queried services --


def test_proxies_are_not_used(cloud: Metadata, watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxy variables are ignored, because a metadata service is on this machine's own link."""
    with Metadata() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for source in SOURCES:
            cloud.set(**ANNOUNCE[source])
            _, found = watching(trigger_for(source, cloud))
            assert eventually(lambda found=found: len(found) == 1), source  # type: ignore[misc]
        assert not proxy.asked


def test_negative_control_proxies_and_redirects(cloud: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default opener uses the proxy and follows the redirect of these servers."""
    with Metadata() as elsewhere:
        elsewhere.set(fault="garbage")
        cloud.set(fault="redirect", elsewhere=elsewhere.url)
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(cloud.url + "/x").close()
        assert elsewhere.count() == 1
        monkeypatch.setenv("http_proxy", elsewhere.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        urllib.request.build_opener().open(cloud.url + "/x").close()
        assert elsewhere.count() == 2


def test_only_detected_clouds_are_queried(
    cloud: Metadata, watching: Watching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cloud in the firmware no thread starts. Otherwise only that cloud is queried."""
    monkeypatch.setattr(preemption, "BASE_URL", cloud.url)
    plain = firmware(tmp_path / "plain", {"sys_vendor": "LENOVO"})
    watch, _ = watching(on_preemption(), on_deadline(), dmi=plain)
    assert not watch._threads
    assert not cloud.asked
    cloud.set(azure=[EVENT])
    _, found = watching(on_preemption(poll_s=0.02), dmi=firmware(tmp_path / "azure", FIRMWARE["azure"]))
    assert eventually(lambda: len(found) == 1)  # negative control: a detected cloud is queried
    assert cloud.count("scheduledevents") == cloud.count()


@pytest.mark.parametrize(
    "url", ["", "ec2", "https://x", "ftp://x", "http://", "http://x:y", "http://u@x", "http://x?a"]
)
def test_wrong_address_raises_usage_error(url: str) -> None:
    """The error is raised immediately in the caller, not in a thread."""
    with pytest.raises(UsageError, match="base_url"):
        NoticeWatch([OnPreemption(("ec2",), url)], print)


def test_clouds_are_detected_by_firmware(tmp_path: Path) -> None:
    """Each by its own only. A missing folder, unreadable files and hardware by a cloud's vendor are no cloud."""
    for source in SOURCES:
        dmi = firmware(tmp_path / source, FIRMWARE[source])
        (dmi / "bios_version").mkdir()
        assert detect(dmi) == (source,)
    assert detect(tmp_path / "none") == ()
    dmi = firmware(tmp_path / "dmi", {"sys_vendor": "Google", "bios_vendor": "coreboot", "product_name": "Eve"})
    assert detect(dmi) == ()
    firmware(dmi, {"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"})
    (dmi / "chassis_asset_tag").write_bytes(b"\xff\xfe\x00")
    assert detect(dmi) == ()
    firmware(dmi, {"sys_vendor": "Xen", "bios_version": "4.11.amazon"})
    assert detect(dmi) == ("ec2",)


# -- stop --


@pytest.mark.parametrize("fault", ["hang", "drip", None])
def test_stop_does_not_wait_for_requests(fault: str | None, cloud: Metadata, watching: Watching) -> None:
    """stop() returns while requests hang. The threads end too, and nothing is reported afterwards."""
    cloud.set(fault=fault)
    watch, found = watching(trigger_for("gce", cloud), timeout_s=200.0, hold_s=200)
    assert eventually(lambda: cloud.count("preempted") >= 1 + (fault is None))
    assert eventually(lambda: cloud.count("maintenance") >= 1 + (fault is None))
    assert all(thread.is_alive() for thread in watch._threads)
    stopper = threading.Thread(target=watch.stop, daemon=True)
    stopper.start()
    stopper.join(20)
    assert not stopper.is_alive()
    assert eventually(lambda: not any(thread.is_alive() for thread in watch._threads), 20)
    cloud.set(fault=None, preempted="TRUE")
    assert not found


def test_stop_works_during_on_notice(cloud: Metadata, watching: Watching) -> None:
    """on_notice may call stop() itself. If it hangs, stop() from another thread still returns."""
    cloud.set(azure=[EVENT])
    called, release = threading.Event(), threading.Event()
    watches: list[NoticeWatch] = []

    def leave(notice: Notice) -> None:
        called.set()
        release.wait(60)
        watches[0].stop()

    watch, _ = watching(trigger_for("azure", cloud), on_notice=leave)
    watches.append(watch)
    assert called.wait(30)
    stopper = threading.Thread(target=watch.stop, daemon=True)
    stopper.start()
    stopper.join(20)
    assert not stopper.is_alive()
    release.set()
    assert eventually(lambda: not any(thread.is_alive() for thread in watch._threads))


# -- deadlines --


class Clock:
    """A wall clock that does not advance until it is set."""

    def __init__(self, now: float) -> None:
        self.now, self.checks = now, 0

    def __call__(self) -> float:
        self.checks += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(AT)
    monkeypatch.setattr(preemption, "_wall", found)
    monkeypatch.setattr(preemption, "RECHECK_S", 0.02)
    return found


def was_checked(clock: Clock) -> bool:
    before = clock.checks
    return eventually(lambda: clock.checks >= before + 3)


def test_deadline_is_reported_ahead(clock: Clock, watching: Watching) -> None:
    """It comes once, at `at - before_s` by the wall clock, even if that is set back, with the deadline itself."""
    _, found = watching(OnDeadline(AT + 100, before_s=60))
    clock.now = AT - 1000
    assert was_checked(clock)
    clock.now = AT + 39.9
    assert was_checked(clock)
    assert not found
    clock.now = AT + 40
    assert eventually(lambda: len(found) == 1)
    assert found == [Notice("deadline", "the deadline is at 2026-01-01T00:01:40Z", AT + 100)]


def test_past_deadline_only_logs_warning(clock: Clock, watching: Watching, caplog: pytest.LogCaptureFixture) -> None:
    """A past deadline logs a warning and starts no thread."""
    with caplog.at_level(logging.WARNING, "ckpt"):
        watch, found = watching(OnDeadline(AT), OnDeadline(None), environ={"SLURM_JOB_END_TIME": "1000"})
    assert not watch._threads
    assert not found
    assert len(caplog.records) == 2
    assert "has passed" in caplog.text


def test_deadline_is_end_of_slurm_job(clock: Clock, watching: Watching) -> None:
    """on_deadline() without a time uses the end of the Slurm job."""
    _, found = watching(on_deadline(before_s=60), environ={"SLURM_JOB_END_TIME": str(int(AT) + 50)})
    assert eventually(lambda: len(found) == 1)
    assert found == [Notice("deadline", "the Slurm job ends at 2026-01-01T00:00:50Z", AT + 50)]


@pytest.mark.parametrize(
    "text", ["", " ", "soon", "-5", "nan", "inf", "1e400", "1_000", "٣", "9" * 5000, "12.5", "0x10"]
)
def test_malformed_slurm_variable_is_ignored(text: str, watching: Watching, caplog: pytest.LogCaptureFixture) -> None:
    """A malformed value is logged, shortened and ignored. A missing one is not logged."""
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert slurm_end({}) is None
        assert not caplog.records
        assert slurm_end({"SLURM_JOB_END_TIME": text}) is None
        assert len(caplog.records) == 1
        assert len(caplog.text) < 300
        watch, _ = watching(on_deadline(), environ={"SLURM_JOB_END_TIME": text})
        assert not watch._threads
    assert slurm_end({"SLURM_JOB_END_TIME": "1767225600"}) == AT
