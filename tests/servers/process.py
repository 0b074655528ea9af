"""Shared code of these servers: processes that end with their parent, a folder, keys and buckets."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import boto3
import psutil
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

START_S = 90.0  # a busy machine with few cores is slow
STOP_S = 10.0


class NotInstalledError(Exception):
    """Raised when the server's program is not installed: `make test-s3` installs it."""


class Server:
    """One server, with its own temporary folder. It listens at `url` from its creation until `stop`.

    Create it in a long-lived thread: processes are killed when the thread that started them ends, however it ends.
    """

    key = secret = "testing"
    region = "us-east-1"

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._running: list[subprocess.Popen[bytes]] = []
        self.folder = new_folder()
        try:
            self._start()
            self.wait_until(self._answers, "answer")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill its processes, and remove its folder."""
        for process in reversed(self._running):
            process.kill()
        for process in self._running:
            process.wait(STOP_S)
        self._running.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def storage_options(self) -> dict[str, Any]:
        """Return the options with which fsspec connects."""
        return {"endpoint_url": self.url, "key": self.key, "secret": self.secret}

    @property
    def client(self) -> Any:
        """Return a boto3 client with short timeouts and without retries."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name=self.region,
            config=Config(connect_timeout=5, read_timeout=30, retries={"max_attempts": 0}),
        )

    def make_bucket(self, name: str) -> str:
        self.client.create_bucket(Bucket=name)
        return name

    def pids(self) -> list[int]:
        return [process.pid for process in self._running]

    def _start(self) -> None:
        raise NotImplementedError

    def _answers(self) -> bool:
        with contextlib.suppress(BotoCoreError, ClientError):
            self.client.list_buckets()
            return True
        return False

    def spawn(self, program: str, *arguments: str, **environment: str) -> None:
        """Start a process that inherits no descriptor except its log file."""
        with open(self.folder / f"{program}.out", "ab") as out:
            command = ["setpriv", "--pdeathsig", "KILL", find(program), *arguments]
            self._running.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    def call(self, program: str, *arguments: str, **environment: str) -> str:
        """Run a command and return its output. Raise RuntimeError if it fails."""
        result = subprocess.run(
            [find(program), *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if result.returncode:
            raise RuntimeError(f"{program} {arguments} ended with {result.returncode}: {result.stderr[-2000:]}")
        return result.stdout

    def wait_until(self, true: Callable[[], bool], what: str) -> None:
        """Wait until `true()` holds. Raise RuntimeError with the last output if a process ends or the time is up."""
        end = time.monotonic() + START_S
        while not true():
            dead = [process.args for process in self._running if process.poll() is not None]
            if dead or time.monotonic() > end:
                paths = [*self.folder.glob("*.out"), *self.folder.glob("log/*.log")]
                said = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in paths)
                raise RuntimeError(f"{type(self).__name__} does not {what}; dead: {dead}\n{said}")
            time.sleep(0.1)


def new_folder() -> Path:
    """Create a folder, in memory if possible. Remove folders of killed processes."""
    home = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    for left in home.glob("ckpt-s3-*"):
        if not psutil.pid_exists(int(left.name.split("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"ckpt-s3-{os.getpid()}-", dir=home))


def find(program: str) -> str:
    """Return a program next to Python, where pip installs programs, or on the path."""
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.exists() else shutil.which(program)
    if found is None:
        raise NotInstalledError(f"{program} is not installed: run `make test-s3`, as root, on Debian or Ubuntu")
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
