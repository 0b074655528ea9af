"""Real S3 servers on this machine, as processes of whoever makes them; `install.sh` installs what they run.

    with Rgw() as server:
        server.make_bucket("bucket")
        remember_options("s3://bucket/run", server.storage_options)

`Rgw` does as it is told, nearly; `Rclone` ignores conditions. For moto and a proxy of faults see `s3_server`.
"""

from servers.ceph import Rgw
from servers.process import NotInstalledError, Server
from servers.rclone import Rclone

__all__ = ["NotInstalledError", "Rclone", "Rgw", "Server"]
