"""What the user says about metrics: `Checkpointer(..., metrics=ckpt.Metrics(...))`."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt.errors import UsageError

INSTALL = "pip install 'everystep[metrics]'"


@dataclass(frozen=True, slots=True)
class Metrics:
    """What to tell about a run while it goes on, and where. All of it is done by the writer process, which outlives the
    trainer: it costs the training loop nothing.

    `prometheus_port`: each rank's writer answers at http://HOST:PORT/metrics, with `prometheus_port` plus the rank's
    number on its node as PORT: 8 ranks take 8 ports. `host`: by default 127.0.0.1, which only this machine reaches;
    "0.0.0.0" lets everybody in who can reach the machine, there is no password. `tensorboard`: a local folder, into
    which each rank writes scalars by step, in a folder rank0, rank1, ... of its own, every `every_s` seconds.

    `samples_per_step`: of this rank, for samples a second. `flops_per_step`: floating point operations that one step
    takes on this rank (forward and backward, all its micro-batches); `peak_flops`: what its device can do a second
    at most; both together give the MFU. A plain number stands for `Metrics(prometheus_port=...)`.
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
            raise UsageError(f"prometheus_port is a port from 1 to 65535, not {port!r}")
        if type(self.host) is not str or not self.host:
            raise UsageError(f'host is a name or an address such as "127.0.0.1", not {self.host!r}')
        for name in ("every_s", "samples_per_step", "flops_per_step", "peak_flops"):
            value = getattr(self, name)
            right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            if not right and (value is not None or name == "every_s"):
                raise UsageError(f"{name} is a number above 0, not {value!r}")
        if self.peak_flops is not None and self.flops_per_step is None:
            raise UsageError("peak_flops= is for the MFU, which needs flops_per_step= as well")
        object.__setattr__(self, "tensorboard", self._folder())
        if port is None and self.tensorboard is None:
            raise UsageError("Metrics(): say where they go: prometheus_port=9400, tensorboard='runs/tb', or both")

    def _folder(self) -> str | None:
        """Absolute: the writer works elsewhere."""
        if self.tensorboard is None:
            return None
        if not isinstance(self.tensorboard, (str, os.PathLike)) or not os.fspath(self.tensorboard):
            raise UsageError(f"tensorboard is a folder, not {self.tensorboard!r}")
        text = os.fspath(self.tensorboard)
        if "://" in text:
            raise UsageError(f"tensorboard={text!r}: events go to a local folder; copy them from there")
        return str(Path(text).expanduser().resolve())

    def port(self, local_rank: int) -> int | None:
        """Of a rank, by its number on its node. UsageError if there is no such port."""
        if self.prometheus_port is None:
            return None
        port = self.prometheus_port + local_rank
        if port > 65535:
            raise UsageError(f"prometheus_port={self.prometheus_port} leaves no port for local rank {local_rank}")
        return port

    def check(self) -> None:
        """UsageError if a package that this needs is not installed."""
        for wanted, package in ((self.prometheus_port, "prometheus_client"), (self.tensorboard, "tensorboard")):
            if wanted is not None and importlib.util.find_spec(package) is None:
                raise UsageError(f"metrics= needs {package}, which is not installed: {INSTALL}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def as_metrics(given: object) -> Metrics | None:
    """What a Checkpointer was given. UsageError if it is wrong, or needs a package that is not installed."""
    if given is None:
        return None
    if type(given) is int:
        given = Metrics(prometheus_port=given)
    if not isinstance(given, Metrics):
        raise UsageError(f"metrics= is a port or ckpt.Metrics(...), not {given!r}")
    given.check()
    return given
