"""Notices: each cloud's arrives, once; no fault of a metadata service ends the watch; nobody else is asked."""

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
    """Whatever a test gets wrong, the machine that runs it is not asked."""
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


def ask(source: str, cloud: Metadata) -> OnPreemption:
    return on_preemption(source, base_url=cloud.url, poll_s=0.02)


def asked_again(cloud: Metadata, text: str = "", times: int = 3) -> bool:
    """Whether more questions come, so that what would be reported was seen meanwhile."""
    before = cloud.count(text)
    return eventually(lambda: cloud.count(text) >= before + times)


def firmware(folder: Path, values: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(value + "\n")
    return folder


# -- each cloud --


@pytest.mark.parametrize("source", SOURCES)
def test_a_notice_arrives_once(source: str, cloud: Metadata, watching: Watching) -> None:
    """Nothing before it is announced; then one notice, however often the announcement is read."""
    watch, found = watching(ask(source, cloud))
    assert asked_again(cloud, MARK[source], 2)
    assert not found
    cloud.set(**ANNOUNCE[source])
    assert eventually(lambda: len(found) == 1)
    assert found[0].kind == "preemption"
    assert found[0].at == (None if source == "gce" else AT)
    assert asked_again(cloud, MARK[source])
    assert len(found) == 1
    watch._reported.clear()  # negative control: it is still announced, and would be heard
    assert eventually(lambda: len(found) == 2)


def test_ec2_asks_with_a_token_and_renews_it(
    cloud: Metadata, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PUT for 300 seconds, kept in use; a new one before the old one ends, and when the service forgets it."""
    _, found = watching(ask("ec2", cloud))
    assert asked_again(cloud, "instance-action", 5)
    tokens = [asked for asked in cloud.asked if asked.target == "/latest/api/token"]
    assert [(t.method, t.headers["x-aws-ec2-metadata-token-ttl-seconds"]) for t in tokens] == [("PUT", "300")]
    cloud.tokens.clear()
    assert eventually(lambda: len(cloud.tokens) > 0)
    monkeypatch.setattr(preemption, "TOKEN_S", 1)
    cloud.set(token_s=1.0)
    cloud.tokens.clear()
    assert eventually(lambda: len(cloud.tokens) > 2)
    cloud.set(ec2=EC2)
    assert eventually(lambda: len(found) == 1)


def test_ec2_recommends_once(cloud: Metadata, watching: Watching) -> None:
    """A rebalance recommendation is of its own kind and comes once, even if its time changes."""
    cloud.set(rebalance={"noticeTime": "2026-01-01T00:00:00Z"})
    _, found = watching(ask("ec2", cloud))
    assert eventually(lambda: len(found) == 1)
    cloud.set(rebalance={"noticeTime": "2026-01-01T00:05:00Z"})
    assert asked_again(cloud, "instance-action")
    assert [(n.kind, n.at) for n in found] == [("rebalance", None)]
    cloud.set(ec2=EC2)
    assert eventually(lambda: [n.kind for n in found] == ["rebalance", "preemption"])


def test_gce_looks_at_once_and_then_waits_for_a_change(cloud: Metadata, watching: Watching) -> None:
    """What holds already is read without a wait; then the question is held, with the value that was seen."""
    cloud.set(preempted="TRUE")
    _, found = watching(ask("gce", cloud), hold_s=7)
    assert eventually(lambda: len(found) == 1)
    assert eventually(lambda: cloud.count("wait_for_change=true&timeout_sec=7&last_etag=") == 2)
    first = next(asked for asked in cloud.asked if "preempted" in asked.target)
    assert "?" not in first.target
    assert first.headers["metadata-flavor"] == "Google"


def test_gce_maintenance_that_ends_the_instance(cloud: Metadata, watching: Watching) -> None:
    """It counts each time that it is announced anew; a live migration does not, since the process goes on."""
    _, found = watching(ask("gce", cloud))
    for value in ("MIGRATE_ON_HOST_MAINTENANCE", "NONE"):
        cloud.set(maintenance=value)
        assert asked_again(cloud, "maintenance-event", 2)
    assert not found
    for count in (1, 2):
        cloud.set(maintenance="TERMINATE_ON_HOST_MAINTENANCE")
        assert eventually(lambda n=count: len(found) == n)  # type: ignore[misc]
        assert found[-1].kind == "preemption"
        cloud.set(maintenance="NONE")
        assert asked_again(cloud, "maintenance-event", 2)
    assert len(found) == 2


def test_gce_without_etags(cloud: Metadata, watching: Watching) -> None:
    """A service that gives none is asked again and again, so that no change falls between two questions."""
    cloud.set(with_etag=False)
    _, found = watching(ask("gce", cloud))
    assert asked_again(cloud, "preempted", 4)
    assert cloud.count("wait_for_change") == 0
    cloud.set(preempted="TRUE")
    assert eventually(lambda: len(found) == 1)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_events_that_stop_the_process(kind: str, cloud: Metadata, watching: Watching) -> None:
    """Each is reported once by its id, also when it begins and its time is emptied. Freeze is none, nor is one over.
    None is acknowledged: a POST would start the event at once."""
    over = {**EVENT, "EventId": "e0", "EventStatus": "Completed"}
    odd = ["no event", {}, {**EVENT, "EventId": "e2", "EventType": "Freeze"}, over]
    cloud.set(azure=[*odd, {**EVENT, "EventType": kind}])
    _, found = watching(ask("azure", cloud))
    assert eventually(lambda: len(found) == 1)
    assert found[0].at == AT
    assert "vm0 at 2026-01-01T00:00:00Z" in found[0].what
    cloud.set(azure=[*odd, {**EVENT, "EventType": kind, "EventStatus": "Started", "NotBefore": ""}])
    assert asked_again(cloud)
    assert len(found) == 1
    cloud.set(azure=[{**EVENT, "EventId": "e3", "EventType": kind, "NotBefore": ""}])
    assert eventually(lambda: len(found) == 2)
    assert found[1].at is None
    assert {asked.method for asked in cloud.asked} == {"GET"}


def test_a_malformed_time_is_no_time(cloud: Metadata, watching: Watching) -> None:
    """The notice is reported, without a moment."""
    times: list[Any] = ["", "tomorrow", 5, None, [], "9" * 5000, "2026-13-01T00:00:00Z", "Thu, 99 Foo"]
    cloud.set(
        ec2={"action": "stop", "time": "tomorrow"},
        azure=[{**EVENT, "EventId": f"e{n}", "NotBefore": time} for n, time in enumerate(times)],
    )
    _, found = watching(ask("azure", cloud), ask("ec2", cloud))
    assert eventually(lambda: len(found) == len(times) + 1)
    assert {notice.at for notice in found} == {None}


# -- faults --


ANSWERS = ("403", "redirect", "hang", "garbage")  # that a cloud's own questions may take otherwise than another's


@pytest.mark.parametrize(
    ("source", "fault"),
    [(source, fault) for source in SOURCES for fault in (FAULTS if source == "azure" else ANSWERS)],
)
def test_faults_are_survived(
    source: str, fault: str, cloud: Metadata, watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on asking, nothing is reported, one warning a thread; and a notice after the fault still arrives."""
    with Metadata() as elsewhere:
        cloud.set(fault=fault, elsewhere=elsewhere.url)
        elsewhere.set(**ANNOUNCE[source])  # whoever follows a redirect would find a notice there
        with caplog.at_level(logging.WARNING, "ckpt"):
            watch, found = watching(ask(source, cloud))
            assert eventually(lambda: cloud.count() >= 3 * len(watch._threads))
            assert not found
            assert not elsewhere.asked
            assert all(len(record.getMessage()) < 400 for record in caplog.records)
            assert eventually(lambda: len(caplog.records) == len(watch._threads))
            cloud.set(fault=None, **ANNOUNCE[source])
            assert eventually(lambda: len(found) == 1)
        assert all(thread.is_alive() for thread in watch._threads)


def test_faults_in_between_are_survived(cloud: Metadata, watching: Watching) -> None:
    """Also one that begins after good answers, here while a question is held, and a service that is gone for a
    while."""
    _, found = watching(ask("gce", cloud))
    assert asked_again(cloud, times=2)
    for fault in ("hang", "closed"):
        cloud.set(fault=fault)
        assert asked_again(cloud)
    cloud.set(fault=None, **ANNOUNCE["gce"])
    assert eventually(lambda: len(found) == 1)


def test_no_more_than_64_kib_are_read(cloud: Metadata, watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a huge answer the rest stays where it is."""
    sizes: list[int] = []
    real = metadata_request._Until.readinto
    monkeypatch.setattr(
        metadata_request._Until, "readinto", lambda self, into: sizes.append(real(self, into)) or sizes[-1]
    )
    cloud.set(fault="huge")
    watch, _ = watching(ask("azure", cloud))
    assert eventually(lambda: sum(sizes) > 0)
    watch.stop()
    assert eventually(lambda: not watch._threads[0].is_alive())
    assert 0 < sum(sizes) / cloud.count() < metadata_request.MAX_ANSWER + 2 * 8192 < HUGE


def test_a_report_that_fails_is_not_the_end(cloud: Metadata, watching: Watching) -> None:
    """An exception of on_notice is logged; the next notice is still reported."""
    found: Found = []

    def broken(notice: Notice) -> None:
        found.append(notice)
        raise RuntimeError("no")

    cloud.set(rebalance={"noticeTime": "now"})
    watching(ask("ec2", cloud), on_notice=broken)
    assert eventually(lambda: len(found) == 1)
    cloud.set(ec2=EC2)
    assert eventually(lambda: len(found) == 2)


# -- who is asked --


@pytest.mark.parametrize("source", SOURCES)
def test_proxies_are_not_used(
    source: str, cloud: Metadata, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says; a metadata service is on this machine's own link."""
    with Metadata() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        cloud.set(**ANNOUNCE[source])
        _, found = watching(ask(source, cloud))
        assert eventually(lambda: len(found) == 1)
        assert not proxy.asked


def test_negative_control_proxies_and_redirects(cloud: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual way to ask uses the proxy, and follows the redirect, of these very servers."""
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


def test_nobody_is_asked_unless_detected(
    cloud: Metadata, watching: Watching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cloud in the firmware there is no thread and no connection; with one, that one is asked only."""
    monkeypatch.setattr(preemption, "BASE_URL", cloud.url)
    plain = firmware(tmp_path / "plain", {"sys_vendor": "LENOVO"})
    watch, _ = watching(on_preemption(), on_deadline(), dmi=plain)
    assert not watch._threads
    assert not cloud.asked
    cloud.set(azure=[EVENT])
    _, found = watching(on_preemption(poll_s=0.02), dmi=firmware(tmp_path / "azure", FIRMWARE["azure"]))
    assert eventually(lambda: len(found) == 1)  # negative control: it is asked where it is detected
    assert cloud.count("scheduledevents") == cloud.count()


@pytest.mark.parametrize(
    "url", ["", "ec2", "https://x", "ftp://x", "http://", "http://x:y", "http://u@x", "http://x?a"]
)
def test_a_wrong_address_is_refused(url: str) -> None:
    """At once, where the user sees it, and not in a thread."""
    with pytest.raises(UsageError, match="base_url"):
        NoticeWatch([OnPreemption(("ec2",), url)], print)


@pytest.mark.parametrize("source", SOURCES)
def test_detect(source: str, tmp_path: Path) -> None:
    """Each cloud's firmware names it and no other; a file that cannot be read says nothing."""
    dmi = firmware(tmp_path / "dmi", FIRMWARE[source])
    (dmi / "bios_version").mkdir()
    assert detect(dmi) == (source,)


def test_detect_nothing(tmp_path: Path) -> None:
    """No folder, odd bytes, and makers that have the name of a cloud: not a cloud."""
    assert detect(tmp_path / "none") == ()
    dmi = firmware(tmp_path / "dmi", {"sys_vendor": "Google", "bios_vendor": "coreboot", "product_name": "Eve"})
    assert detect(dmi) == ()
    firmware(dmi, {"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"})
    (dmi / "chassis_asset_tag").write_bytes(b"\xff\xfe\x00")
    assert detect(dmi) == ()
    firmware(dmi, {"sys_vendor": "Xen", "bios_version": "4.11.amazon"})
    assert detect(dmi) == ("ec2",)


# -- the end --


@pytest.mark.parametrize("fault", ["hang", "half", "drip", None])
def test_stop_does_not_wait_for_anybody(fault: str | None, cloud: Metadata, watching: Watching) -> None:
    """While questions hang for minutes, stop() returns; its threads end too, and nothing is reported after it."""
    cloud.set(fault=fault)
    watch, found = watching(ask("gce", cloud), timeout_s=200.0, hold_s=200)
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


def test_stop_during_a_report(cloud: Metadata, watching: Watching) -> None:
    """on_notice may call stop() itself; and one that hangs does not hold up a stop() from elsewhere."""
    cloud.set(azure=[EVENT])
    called, release = threading.Event(), threading.Event()
    watches: list[NoticeWatch] = []

    def leave(notice: Notice) -> None:
        called.set()
        release.wait(60)
        watches[0].stop()

    watch, _ = watching(ask("azure", cloud), on_notice=leave)
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
    """A wall clock that stands still until it is set."""

    def __init__(self, now: float) -> None:
        self.now, self.looks = now, 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(AT)
    monkeypatch.setattr(preemption, "_wall", found)
    monkeypatch.setattr(preemption, "RECHECK_S", 0.02)
    return found


def looked(clock: Clock) -> bool:
    before = clock.looks
    return eventually(lambda: clock.looks >= before + 3)


def test_a_deadline_is_told_ahead(clock: Clock, watching: Watching) -> None:
    """Not before `at - before_s` by the wall clock, then once, with the moment itself."""
    _, found = watching(OnDeadline(AT + 100, before_s=60))
    clock.now = AT + 39.9
    assert looked(clock)
    assert not found
    clock.now = AT + 40
    assert eventually(lambda: len(found) == 1)
    assert found == [Notice("deadline", "the deadline is at 2026-01-01T00:01:40Z", AT + 100)]


def test_a_deadline_past_is_none(clock: Clock, watching: Watching, caplog: pytest.LogCaptureFixture) -> None:
    """A warning, and no thread."""
    with caplog.at_level(logging.WARNING, "ckpt"):
        watch, found = watching(OnDeadline(AT), OnDeadline(None), environ={"SLURM_JOB_END_TIME": "1000"})
    assert not watch._threads
    assert not found
    assert len(caplog.records) == 2
    assert "past" in caplog.text


def test_a_wall_clock_that_is_set(clock: Clock, watching: Watching) -> None:
    """Back: the deadline is as much later. Forward, even beyond the deadline: it is told at once."""
    _, found = watching(OnDeadline(AT + 0.05, before_s=0))
    clock.now = AT - 1000
    assert looked(clock)
    assert not found
    clock.now = AT + 1000
    assert eventually(lambda: len(found) == 1)


def test_the_end_of_the_slurm_job(clock: Clock, watching: Watching) -> None:
    """on_deadline() without a moment takes it from Slurm."""
    _, found = watching(on_deadline(before_s=60), environ={"SLURM_JOB_END_TIME": str(int(AT) + 50)})
    assert eventually(lambda: len(found) == 1)
    assert found == [Notice("deadline", "the Slurm job ends at 2026-01-01T00:00:50Z", AT + 50)]


@pytest.mark.parametrize(
    "text", ["", " ", "soon", "-5", "nan", "inf", "1e400", "1_000", "٣", "9" * 5000, "12.5", "0x10"]
)
def test_a_malformed_slurm_variable(text: str, watching: Watching, caplog: pytest.LogCaptureFixture) -> None:
    """Logged, shortened, and ignored; one that is absent is not even logged."""
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert slurm_end({}) is None
        assert not caplog.records
        assert slurm_end({"SLURM_JOB_END_TIME": text}) is None
        assert len(caplog.records) == 1
        assert len(caplog.text) < 300
        watch, _ = watching(on_deadline(), environ={"SLURM_JOB_END_TIME": text})
        assert not watch._threads
    assert slurm_end({"SLURM_JOB_END_TIME": "1767225600"}) == AT


@pytest.mark.parametrize("at", [1e300, -1e300, 253402300800.0])
def test_a_moment_beyond_the_calendar(at: float, watching: Watching) -> None:
    """It can still be said, and waited for."""
    assert "seconds since 1970" in preemption._when(at)
    watch, found = watching(OnDeadline(at))
    assert len(watch._threads) == (at > 0)
    assert not found
