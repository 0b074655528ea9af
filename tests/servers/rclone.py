"""A folder that rclone serves as S3. It ignores conditions of requests, so clients can overwrite anything."""

from __future__ import annotations

from servers.process import Server


class Rclone(Server):
    def _start(self) -> None:
        served = self.folder / "served"
        served.mkdir()
        pair = f"{self.key},{self.secret}"
        self.spawn(
            "rclone", "serve", "s3", str(served), "--addr", self.url[7:], "--auth-key", pair, "--config=/dev/null"
        )
