"""Receives notices that this machine or job will end, from the cloud's metadata service and from the clock.

A cloud notifies its machines through a metadata service at a link-local address: EC2 two minutes before the end, GCE
and Azure half a minute before it. Daemon threads query the service directly, without proxy or redirect, for at most
64 KiB per response, with a timeout for every request. They continue after any response. They never acknowledge an
Azure event, because Azure starts an acknowledged event immediately.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ckpt.events import log
from ckpt.guard.metadata_request import BASE_URL, MetadataService, address_of
from ckpt.triggers import OnDeadline, OnPreemption

DMI = Path("/sys/class/dmi/id")
MAX_PAUSE_S = 60.0
TOKEN_S = 300  # seconds that an EC2 token is valid
AZURE_FIRST_S = 150.0  # timeout of the first request: it makes Azure enable events, which takes up to two minutes
RECHECK_S = 1.0  # seconds after which a change of the wall clock is detected at the latest

_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"  # chassis tag of Azure; plain Hyper-V has only the same vendor
_AZURE_STOPS = {"Preempt": "evict", "Terminate": "delete", "Reboot": "reboot", "Redeploy": "redeploy"}
_wall = time.time


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice that a machine or job will end. `kind`: "preemption", "rebalance" or "deadline". `what`: a sentence for
    people. `at`: time of the end in seconds since 1970, or None if unknown."""

    kind: str
    what: str
    at: float | None


Found = tuple[Hashable, Notice]
"""A notice with a key. A notice with a key that was seen before is not reported again."""


def detect(dmi: Path = DMI) -> tuple[str, ...]:
    """Return the clouds that the firmware names, or () for no cloud. Reads only files."""
    names = ("sys_vendor", "bios_vendor", "bios_version", "product_name", "chassis_asset_tag")
    vendor, bios, version, product, tag = (_text(dmi / name) for name in names)
    is_cloud = {
        "ec2": "Amazon EC2" in (vendor, bios) or "amazon" in version,  # older machines with Xen have only the version
        "gce": product == "Google Compute Engine",
        "azure": tag == _AZURE_TAG,
    }
    return tuple(name for name, found in is_cloud.items() if found)


def slurm_end(environ: Mapping[str, str]) -> float | None:
    """Return the end of the Slurm job in seconds since 1970. Return None outside Slurm, or if the end is unknown."""
    text = environ.get("SLURM_JOB_END_TIME")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        log.warning("SLURM_JOB_END_TIME is not a number of seconds and is ignored: %.40r", text)
        return None
    return float(text)


class NoticeWatch:
    """Watches for the notices of the triggers. Calls `on_notice` in its own thread, once per notice. `on_notice` must
    return quickly, because the next notice waits for it. `timeout_s`: timeout of one request. `hold_s`: time for which
    GCE may delay a response until a value changes. Raises UsageError for an invalid `base_url`."""

    def __init__(
        self,
        triggers: Iterable[OnPreemption | OnDeadline],
        on_notice: Callable[[Notice], None],
        *,
        dmi: Path = DMI,
        environ: Mapping[str, str] = os.environ,
        timeout_s: float = 5.0,
        hold_s: float = 60.0,
    ) -> None:
        self._on_notice = on_notice
        self._environ, self._timeout_s, self._hold_s = environ, timeout_s, hold_s
        self._stopped = threading.Event()
        self._reporting = threading.RLock()  # reentrant, because on_notice may call stop()
        self._reported: set[Hashable] = set()
        self._threads: list[threading.Thread] = []
        self._services: list[MetadataService] = []
        self._deadlines: list[OnDeadline] = []
        self._clouds: dict[tuple[str, str], float] = {}  # for each source and address, the seconds between requests
        for trigger in triggers:
            if isinstance(trigger, OnDeadline):
                self._deadlines.append(trigger)
                continue
            for source in trigger.sources or detect(dmi):
                key = (source, BASE_URL if trigger.base_url is None else trigger.base_url)
                self._clouds[key] = min(trigger.poll_s, self._clouds.get(key, trigger.poll_s))
        for _, base_url in self._clouds:
            address_of(base_url)

    def start(self) -> None:
        """Start the threads that the triggers need, which may be none."""
        if self._threads or self._stopped.is_set():
            return
        for (source, base_url), poll_s in self._clouds.items():
            for make in _FEEDS[source]:
                self._services.append(MetadataService(base_url, self._timeout_s, self._hold_s, self._stopped))
                self._spawn(f"ckpt-{source}", self._follow, make(self._services[-1], poll_s), poll_s)
        for at, before_s, what in dict.fromkeys(self._moments()):
            if at <= _wall():
                log.warning("%s, which has passed, so no save is made before it", what)
            else:
                self._spawn("ckpt-deadline", self._await, at, before_s, what)

    def stop(self) -> None:
        """Stop reporting notices. Return within a second, even if a metadata service hangs."""
        self._stopped.set()
        for service in self._services:
            service.cut()
        if self._reporting.acquire(timeout=0.5):  # wait up to 0.5 s for a report in progress
            self._reporting.release()

    def _spawn(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, name=name, daemon=True))
        self._threads[-1].start()

    def _follow(self, feed: _Feed, poll_s: float) -> None:
        """Query a service repeatedly, less often while it fails."""
        failures, log_failure = 0, log.warning
        while not self._stopped.is_set():
            try:
                for key, notice in feed.look():
                    self._report(key, notice)
                failures, pause = 0, feed.pause_s
            except Exception as error:  # a service may return anything, and this thread must not end
                if self._stopped.is_set():
                    return
                log_failure("cannot query %s for preemption notices, retrying: %.200r", feed.cloud, error)
                pause, log_failure = min(MAX_PAUSE_S, poll_s * 2**failures), log.debug
                failures = min(failures + 1, 16)
            self._stopped.wait(min(pause, threading.TIMEOUT_MAX))

    def _moments(self) -> Iterator[tuple[float, float, str]]:
        for deadline in self._deadlines:
            if deadline.at is not None:
                yield deadline.at, deadline.before_s, f"the deadline is{_when(deadline.at)}"
            elif (end := slurm_end(self._environ)) is not None:
                yield end, deadline.before_s, f"the Slurm job ends{_when(end)}"

    def _await(self, at: float, before_s: float, what: str) -> None:
        # Read the clock repeatedly, because it may be changed while this thread waits.
        while (left := at - before_s - _wall()) > 0:
            if self._stopped.wait(min(left, RECHECK_S)):
                return
        self._report(("deadline", at, before_s), Notice("deadline", what, at))

    def _report(self, key: Hashable, notice: Notice) -> None:
        with self._reporting:
            if key in self._reported or self._stopped.is_set():
                return
            self._reported.add(key)
            try:
                self._on_notice(notice)
            except Exception:
                log.exception("failed to handle a notice: %s", notice.what)


# -- one class for each cloud --


class _Feed(ABC):
    """Receives one kind of notice from a cloud. `look` queries the service once and yields the current notices.
    `pause_s`: seconds until the next query."""

    cloud = ""

    def __init__(self, service: MetadataService, pause_s: float) -> None:
        self._service, self.pause_s = service, pause_s

    @abstractmethod
    def look(self) -> Iterator[Found]: ...


class _Ec2(_Feed):
    cloud = "EC2"
    _token, _renew_at, _rebalance = "", 0.0, False

    def look(self) -> Iterator[Found]:
        action = self._get("spot/instance-action")
        if action is not None:
            at = _moment(action.get("time"))
            verb = action["action"] if action["action"] in ("terminate", "stop", "hibernate") else "interrupt"
            yield ("ec2", verb, at), Notice("preemption", f"EC2 will {verb} this instance{_when(at)}", at)
        # noticeTime is the time when the notice was sent, not the time of an interruption
        if not self._rebalance and "noticeTime" in (self._get("events/recommendations/rebalance") or {}):
            self._rebalance = True
            yield ("ec2", "rebalance"), Notice("rebalance", "EC2 may interrupt this instance before long", None)

    def _get(self, path: str) -> dict[str, Any] | None:
        if time.monotonic() >= self._renew_at:
            now, seconds = time.monotonic(), {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            status, token, _ = self._service.ask("/latest/api/token", seconds, method="PUT")
            _expect(status, "the token")
            self._token, self._renew_at = token, now + 0.8 * TOKEN_S
        status, text, _ = self._service.ask(f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})
        if status == 404:
            return None
        if status == 401:
            self._renew_at = 0.0
        _expect(status, path)
        return _object(text)


class _Gce(_Feed):
    """Queries one key. With `last_etag`, the service responds as soon as the value differs from that ETag's."""

    cloud = "GCE"
    _key, _alarm, _what = "preempted", "TRUE", "GCE will preempt this instance within 30 s"
    _etag, _calm = "", 0  # `_calm`: number of harmless values so far, so that an alarm after one is a new notice

    def __init__(self, service: MetadataService, pause_s: float) -> None:
        super().__init__(service, min(pause_s, 1.0))  # a short pause, because the service itself delays its response

    def look(self) -> Iterator[Found]:
        path, within_s = f"/computeMetadata/v1/instance/{self._key}", self._service.timeout_s
        if self._etag:
            hold_s = self._service.hold_s
            path += f"?wait_for_change=true&timeout_sec={hold_s}&last_etag={quote(self._etag, '')}"
            within_s += hold_s
        status, text, etag = self._service.ask(path, {"Metadata-Flavor": "Google"}, within_s=within_s)
        _expect(status, self._key)
        value = text.strip()
        if len(value) > 64 or not value.replace("_", "").isupper():
            raise ValueError(f"{self._key} has an unknown value")
        self._etag = etag
        if value == self._alarm:
            yield ("gce", self._key, self._calm), Notice("preemption", self._what, None)
        else:
            self._calm += 1


class _GceMaintenance(_Gce):
    _key, _alarm = "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"
    _what = "GCE will stop this instance for maintenance"


class _Azure(_Feed):
    """Azure sends an event to every machine of a scale set. All events count, because a job uses several machines."""

    cloud = "Azure"
    _answered = False

    def look(self) -> Iterator[Found]:
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        within_s = self._service.timeout_s if self._answered else max(AZURE_FIRST_S, self._service.timeout_s)
        status, text, _ = self._service.ask(path, {"Metadata": "true"}, within_s=within_s)
        _expect(status, "scheduledevents")
        events = _object(text)["Events"]
        self._answered = True
        for event in events:
            kind = str(event.get("EventType")) if isinstance(event, dict) else ""
            if kind not in _AZURE_STOPS or event.get("EventStatus") in ("Completed", "Canceled"):
                continue
            at = _moment(event.get("NotBefore"))  # Azure leaves it empty once the event has begun
            what = f"Azure will {_AZURE_STOPS[kind]} {_machines(event.get('Resources'))}{_when(at)}"
            yield ("azure", str(event.get("EventId") or (kind, at))), Notice("preemption", what, at)


_FEEDS: dict[str, tuple[type[_Feed], ...]] = {"ec2": (_Ec2,), "gce": (_Gce, _GceMaintenance), "azure": (_Azure,)}


# -- parse and format values --


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _expect(status: int, what: str) -> None:
    if status != 200:
        raise ValueError(f"HTTP status {status} for {what}")


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the response is not a JSON object")
    return found


def _moment(text: object) -> float | None:
    """Parse a time in the formats of EC2 and Azure. Return seconds since 1970, or None if the text is not a time."""
    if not isinstance(text, str):
        return None
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
            found = parse(text)
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return None


def _when(at: float | None) -> str:
    if at is None:
        return ""
    try:
        return f" at {datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return f" at {at:g} seconds since 1970"


def _machines(names: object) -> str:
    """Return the names of the affected machines, without characters that could break a log line."""
    known = names if isinstance(names, list) else []
    return ", ".join(str(name)[:64] for name in known[:4] if str(name).isprintable()) or "this machine"
