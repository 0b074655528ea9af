"""Ceph's object gateway over one monitor and one OSD, all in memory and on loopback.

The daemons trust each other; the S3 side has its keys. It starts in about fifteen seconds.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from servers.process import Server, free_port

GIB = 1 << 30

# Settings from the monitor replace a program's knowledge of the cluster while it already sends requests: sometimes one
# is sent without the cluster's name and rejected. All settings are in the file, so that daemons need not request them;
# the command `ceph` always does.
ENVIRONMENT = {"CEPH_ARGS": "--no-mon-config"}
TRIES = 20


class Rgw(Server):
    """`size`: capacity of the OSD in bytes; memory is used as objects arrive. Deleted objects are freed within seconds.

    It supports conditions on a plain PUT, and ignores those at the end of a multipart upload.
    """

    def __init__(self, *, size: int = 8 * GIB) -> None:
        self.size = size
        super().__init__()

    def _start(self) -> None:
        self._monitor, self._cluster = f"[v1:127.0.0.1:{free_port()}]", str(uuid.uuid4())
        for name in ("mon", "osd", "rgw", "log"):
            (self.folder / name).mkdir()
        self._conf.write_text(self._settings())
        self._start_monitor()
        self._start_osd()
        keys = ("--access-key", self.key, "--secret-key", self.secret)
        self._run("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)
        self._serve("radosgw", "-n", "client.rgw")

    def collect(self) -> None:
        """Free deleted objects immediately."""
        self._run("radosgw-admin", "gc", "process", "--include-all")

    @property
    def _conf(self) -> Path:
        return self.folder / "ceph.conf"

    def _run(self, program: str, *arguments: str) -> str:
        return self.call(program, "-c", str(self._conf), *arguments, **ENVIRONMENT)

    def _ask(self, *arguments: str) -> str:
        """Query the monitor, with a command that may be repeated."""
        for _ in range(TRIES):
            try:
                return self._run("ceph", "--connect-timeout", "60", *arguments)
            except RuntimeError as error:
                if "EPERM" not in str(error):
                    raise
                refused = error
        raise refused

    def _serve(self, program: str, *arguments: str) -> None:
        self.spawn(program, "-f", "-c", str(self._conf), *arguments, **ENVIRONMENT)

    def _start_monitor(self) -> None:
        monmap = str(self.folder / "monmap")
        self.call("monmaptool", "--create", "--addv", "a", self._monitor, "--fsid", self._cluster, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._serve("ceph-mon", "-i", "a")
        self._ask("status")

    def _start_osd(self) -> None:
        osd = str(uuid.uuid4())
        self._ask("osd", "new", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._serve("ceph-osd", "-i", "0")
        self.wait_until(lambda: "1 up" in self._ask("osd", "stat"), "get its OSD up")

    def _settings(self) -> str:
        folder = self.folder
        return f"""\
[global]
fsid = {self._cluster}
mon host = {self._monitor}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/log/$name.log
mon data = {folder}/mon
osd data = {folder}/osd

# One of everything, and no opinion about how full the disks of this machine are.
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 2
mon max pg per osd = 2000
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0

osd objectstore = memstore
memstore device bytes = {self.size}
memstore page set = false

# Deleted objects are freed after seconds, not hours: they lie in memory.
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
rgw frontends = beast endpoint={self.url[7:]}
rgw enable ops log = false
rgw thread pool size = 64
debug ms = 0
debug osd = 0
debug rgw = 0

[client.rgw]
rgw data = {folder}/rgw
"""
