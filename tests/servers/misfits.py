"""Real servers that cannot hold a run, each a separate process over a folder: FTP, SFTP, WebDAV, two toys.

python misfits.py ftp|sftp|webdav PORT FOLDER
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

from servers.process import Server

USER = "someone"


class Misfit(Server):
    """`scheme`: of its URLs; `driver`: its fsspec class; `bucket`: the beginning of paths."""

    scheme = driver = ""
    bucket = "bucket"

    @property
    def served(self) -> Path:
        return self.folder / "served"

    def left(self) -> list[str]:
        """Return the files that the server holds."""
        return sorted(str(path.relative_to(self.served)) for path in self.served.rglob("*") if path.is_file())

    def _start(self) -> None:
        (self.served / self.bucket).mkdir(parents=True)
        path = os.pathsep.join(sys.path)
        self.spawn("python", "-m", "servers.misfits", self.scheme, str(self.port), str(self.served), PYTHONPATH=path)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5):
            return True
        return False

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self.port, "username": USER, "password": self.secret}


class Ftp(Misfit):
    scheme, driver = "ftp", "FTPFileSystem"


class Sftp(Misfit):
    scheme, driver = "sftp", "SFTPFileSystem"


class WebDav(Misfit):
    scheme, driver = "webdav", "WebdavFileSystem"

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"base_url": self.url, "auth": None}


class ToyGcs(Misfit):
    """An emulator of Google's storage with wrong replies to conditional uploads and ranges."""

    scheme, driver = "gs", "GCSFileSystem"

    def _start(self) -> None:
        self.served.mkdir()
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        self.spawn(
            "gcp-storage-emulator", "--data-dir", str(self.served), "start", *where, "--default-bucket", self.bucket
        )

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"endpoint_url": self.url, "token": "anon", "project": "toy"}

    def left(self) -> list[str]:
        return [name for name in super().left() if "/_softdelete/" not in name]  # deleted files are moved there


class S3rver(Misfit):
    """A stand-in for S3 without support for conditions."""

    scheme, driver = "s3", "S3FileSystem"
    key = secret = "S3RVER"

    def _start(self) -> None:
        self.served.mkdir()
        where = ("--address", "127.0.0.1", "--port", str(self.port), "--directory", str(self.served))
        self.spawn("s3rver", *where, "--configure-bucket", self.bucket)

    @property
    def storage_options(self) -> dict[str, Any]:
        return Server.storage_options.__get__(self)

    def left(self) -> list[str]:
        return [name for name in super().left() if not name.split("/")[-1].startswith("._")]  # its internal files


def serve_ftp(port: int, folder: str) -> None:
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import FTPServer

    users = DummyAuthorizer()
    users.add_user(USER, Server.secret, folder, perm="elradfmwMT")
    handler = type("Handler", (FTPHandler,), {"authorizer": users})
    FTPServer(("127.0.0.1", port), handler).serve_forever()


def serve_webdav(port: int, folder: str) -> None:
    from cheroot.wsgi import Server as Wsgi
    from wsgidav.wsgidav_app import WsgiDAVApp

    settings = {"provider_mapping": {"/": folder}, "simple_dc": {"user_mapping": {"*": True}}, "verbose": 0}
    Wsgi(("127.0.0.1", port), WsgiDAVApp(settings)).start()


def serve_sftp(port: int, folder: str) -> None:
    import asyncio

    import asyncssh

    class Login(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return True

        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return (username, password) == (USER, Server.secret)

    def files(channel: Any) -> Any:
        return asyncssh.SFTPServer(channel, chroot=folder)

    async def serve() -> None:
        key = asyncssh.generate_private_key("ssh-ed25519")
        await asyncssh.listen("127.0.0.1", port, server_factory=Login, server_host_keys=[key], sftp_factory=files)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    {"ftp": serve_ftp, "sftp": serve_sftp, "webdav": serve_webdav}[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
