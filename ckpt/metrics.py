"""`ckpt.Metrics`: which metrics of a run are published, and where. Pass it in `ckpt.Options(metrics=)`."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt.errors import InvalidArgumentError

INSTALL = "pip install 'everystep[metrics]'"


@dataclass(frozen=True, slots=True)
class Metrics:
    """Publishes metrics of a run during the training. The writer process does this, so it does not slow the training.

    - `prometheus_port`: each rank's writer serves http://HOST:PORT/metrics, where PORT is `prometheus_port` plus the
      local rank: 8 ranks use 8 ports. Default None: no server.
    - `host`: address to listen on, default 127.0.0.1 (this machine only). "0.0.0.0" admits the whole network, without a
      password.
    - `tensorboard`: local folder in which each rank writes scalars by step, in its own subfolder rank0, rank1, ...
    - `every_s`: interval between writes, seconds, default 10.
    - `samples_per_step`: samples per step on this rank, for samples per second.
    - `flops_per_step`: floating point operations per step on this rank (forward and backward, all micro-batches).
    - `peak_flops`: peak of the rank's device, floating point operations per second. The MFU needs `flops_per_step` and
      `peak_flops`.

    A number N instead of a `Metrics` is short for `Metrics(prometheus_port=N)`. Raises InvalidArgumentError for wrong
    values.
    """

    prometheus_port: int | None = None
    host: str = "127.0.0.1"
    tensorboard: str | os.PathLike[str] | None = None
    every_s: float = 10.0
    samples_per_step: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        port = self.prometheus_port
        if port is not None and (type(port) is not int or not 1 <= port <= 65535):
            raise InvalidArgumentError(f"prometheus_port={port!r}: it must be a port from 1 to 65535")
        if type(self.host) is not str or not self.host:
            raise InvalidArgumentError(f'host={self.host!r}: it must be a name or an address, for example "127.0.0.1"')
        for name in ("every_s", "samples_per_step", "flops_per_step", "peak_flops"):
            value = getattr(self, name)
            valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            if not valid and (value is not None or name == "every_s"):
                raise InvalidArgumentError(f"{name}={value!r}: it must be a number above 0")
        if self.peak_flops is not None and self.flops_per_step is None:
            raise InvalidArgumentError("peak_flops= without flops_per_step=: the MFU needs both")
        object.__setattr__(self, "tensorboard", self._folder())
        if port is None and self.tensorboard is None:
            raise InvalidArgumentError(
                "Metrics() has no destination: pass prometheus_port=9400, tensorboard='runs/tb', or both"
            )

    def _folder(self) -> str | None:
        """Return the absolute path of the folder, because the writer process has another working directory."""
        if self.tensorboard is None:
            return None
        if not isinstance(self.tensorboard, (str, os.PathLike)) or not os.fspath(self.tensorboard):
            raise InvalidArgumentError(f"tensorboard={self.tensorboard!r}: it must be a folder")
        text = os.fspath(self.tensorboard)
        if "://" in text:
            raise InvalidArgumentError(f"tensorboard={text!r}: it must be a local folder; copy the events from there")
        return str(Path(text).expanduser().resolve())

    def port(self, local_rank: int) -> int | None:
        """Return the port of a rank by its local rank. Raise InvalidArgumentError if the port exceeds 65535."""
        if self.prometheus_port is None:
            return None
        port = self.prometheus_port + local_rank
        if port > 65535:
            raise InvalidArgumentError(
                f"prometheus_port={self.prometheus_port} leaves no port for local rank {local_rank}"
            )
        return port

    def check(self) -> None:
        """Raise InvalidArgumentError if a required package is not installed."""
        for enabled, package in ((self.prometheus_port, "prometheus_client"), (self.tensorboard, "tensorboard")):
            if enabled is not None and importlib.util.find_spec(package) is None:
                raise InvalidArgumentError(f"metrics= needs {package}, which is not installed: {INSTALL}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def as_metrics(given: object) -> Metrics | None:
    """Convert the option `metrics=` to a Metrics. Raise InvalidArgumentError if the value is wrong, or if a required
    package is not installed.
    """
    if given is None:
        return None
    if type(given) is int:
        given = Metrics(prometheus_port=given)
    if not isinstance(given, Metrics):
        raise InvalidArgumentError(f"metrics={given!r}: it must be a port or ckpt.Metrics(...)")
    given.check()
    return given
