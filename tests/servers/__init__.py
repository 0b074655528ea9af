"""Real servers on this machine, as processes of whoever makes them; `install.sh` installs what they run.

    with Rgw() as server:
        server.make_bucket("bucket")
        remember_options("s3://bucket/run", server.storage_options)

`Rgw` does as it is told, nearly; `Rclone` ignores conditions. `Azurite` is Azure's blob storage. What can hold no run
is in `misfits`. For moto and a proxy of faults see `s3_server`.
"""

from servers.azure import Azurite
from servers.ceph import Rgw
from servers.process import NotInstalledError, Server
from servers.rclone import Rclone

__all__ = ["Azurite", "NotInstalledError", "Rclone", "Rgw", "Server"]
