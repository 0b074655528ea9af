"""Real servers on this machine, each a child process; `install.sh` installs their programs.

    with Rgw() as server:
        server.make_bucket("bucket")
        remember_options("s3://bucket/run", server.storage_options)

`Rgw` honours most conditions of requests, and `Rclone` ignores them. `Azurite` is Azure's blob storage. `misfits` has
servers that cannot hold a run. For moto and a fault proxy see `s3_server`.
"""

from servers.azure import Azurite
from servers.ceph import Rgw
from servers.process import NotInstalledError, Server
from servers.rclone import Rclone

__all__ = ["Azurite", "NotInstalledError", "Rclone", "Rgw", "Server"]
