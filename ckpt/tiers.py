"""The user's configuration of memory and durable tiers, where snapshots and checkpoints are stored."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckpt.core.cadence.cadence import FIRST_DURABLE, Auto, as_every, is_auto
from ckpt.core.checkpoint.retention import Keep, as_keep
from ckpt.errors import InvalidArgumentError
from ckpt.store import normalise, remember_options

COMPRESSION = ("auto", "none", "zstd")
CREDENTIALS = ("AWS_", "GOOGLE_", "AZURE_")  # prefixes of the environment variables that may contain credentials


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory of the writer process, which stores snapshots that survive the trainer: `Checkpointer(memory=)`.

    - `every`: number of steps between snapshots, default 1; a time ("30s", "10min", "2h"); or "auto": as often as 1 %
      of the training time allows. See `ckpt.Auto`.
    - `keep`: number of snapshots, 2 to 12, including the one in progress. Default 2, or at least 3 in a multi-rank job.
      Each takes as much memory as the state. One more is added if a write to a tier takes longer than a step. Fewer are
      kept if memory is short.
    - `linger_s`: seconds for which the writer keeps the memory after the trainer has died and every tier has the newest
      step. Default 120.
    - `replicas`: 2 also copies each snapshot to the memory of another node, in the background, so that snapshots
      survive the loss of a node. Default 1.
    """

    every: int | str | Auto = 1
    keep: int | None = None
    linger_s: float = 120.0
    replicas: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", as_every(self.every))
        if self.keep is not None and (type(self.keep) is not int or not 2 <= self.keep <= 12):
            raise InvalidArgumentError(f"Memory(keep={self.keep!r}): keep must be a whole number from 2 to 12")
        if isinstance(self.linger_s, bool) or not isinstance(self.linger_s, (int, float)) or not self.linger_s >= 0:
            raise InvalidArgumentError(f"Memory(linger_s={self.linger_s!r}): linger_s must be at least 0 seconds")
        if self.replicas not in (1, 2):
            raise InvalidArgumentError(f"Memory(replicas={self.replicas!r}): replicas must be 1 or 2")


DEFAULT_MEMORY = Memory()


@dataclass(frozen=True, slots=True)
class Tier:
    """A durable tier: a folder or a bucket.

    - `url`: folder, or URL of a bucket and prefix.
    - `every`: number of steps between checkpoints, default 100; a time ("30s", "10min", "2h"); or "auto": the interval
      that loses the least time, computed from the cost of a save and the rate of failures. See `ckpt.Auto`.
    - `keep`: "all" (default), the number of newest checkpoints to keep, or a `Keep`.
    - `storage_options`: fsspec options for object stores (`endpoint_url`, `key`, `profile`, ...), in addition to the
      environment and configuration files.
    - `max_mib_s`: limit for bytes sent and received, MiB per second, default no limit.
    - `max_inflight_mib`: limit for bytes in flight at the same time, MiB, default 256.
    - `reader_grace_s`: seconds for which expired files stay, because other processes may be reading them. Default 600
      in object stores, and 0 in folders, because there an open file survives its deletion.
    - `compression`: "zstd" stores each tensor in its smallest lossless form, which may be the difference from an older
      checkpoint; "none" stores raw bytes; "auto" (default) compresses if the store is slower than idle cores.
    - `full_every`: the first two checkpoints, and then one of every `full_every`, are complete, so that a bad file
      cannot damage all checkpoints. The others store only changes. Default 10; 1 makes all checkpoints complete.
    """

    url: str
    every: int | str | Auto = 100
    keep: Keep | int | str = "all"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)  # may contain secrets
    max_mib_s: float | None = None
    max_inflight_mib: int = 256
    reader_grace_s: float | None = None
    compression: str = "auto"
    full_every: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", as_every(self.every))
        object.__setattr__(self, "keep", as_keep(self.keep))
        limits = (self.max_mib_s, self.max_inflight_mib)
        if any(n is not None and (not isinstance(n, (int, float)) or not n > 0) for n in limits):
            raise InvalidArgumentError(f"Tier({self.url!r}): max_mib_s and max_inflight_mib must be numbers above 0")
        if self.reader_grace_s is not None and not self.reader_grace_s >= 0:
            raise InvalidArgumentError(f"Tier({self.url!r}): reader_grace_s must be at least 0 seconds")
        if self.compression not in COMPRESSION:
            raise InvalidArgumentError(
                f'Tier({self.url!r}): compression={self.compression!r}, but it must be "auto", "none" or "zstd"'
            )
        if type(self.full_every) is not int or self.full_every < 1:
            raise InvalidArgumentError(
                f"Tier({self.url!r}): full_every={self.full_every!r}, but it must be a whole number from 1"
            )
        object.__setattr__(self, "url", normalise(self.url))
        if urlsplit(self.url).password:
            raise InvalidArgumentError(
                "the URL contains a password, and URLs are logged: pass the password in storage_options="
            )
        if self.url.startswith("memory:"):
            raise InvalidArgumentError(
                f"{self.url} exists only inside one process and would be lost with it: use memory=ckpt.Memory()"
            )
        try:
            json.dumps(dict(self.storage_options or {}))
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                "storage_options must be plain values (str, int, dict, ...), because they are sent to the writer "
                "process"
            ) from None

    def spec(self) -> dict[str, Any]:
        """Return the data from which the writer opens the tier, including this trainer's credentials."""
        return {
            "url": self.url,
            "keep": asdict(self.keeping),
            "cadence": FIRST_DURABLE if isinstance(self.every, Auto) else self.every,
            "options": None if self.storage_options is None else dict(self.storage_options),
            "max_mib_s": self.max_mib_s,
            "max_inflight_mib": self.max_inflight_mib,
            "grace_s": self.reader_grace_s,
            "incremental": self.full_every > 1,
            "compression": self.compression,
            "full_every": self.full_every,
            "environment": {k: v for k, v in os.environ.items() if k.startswith(CREDENTIALS)},
        }

    @property
    def steps(self) -> int:
        """Return the number of steps between checkpoints. Raise InvalidArgumentError if `every` is a time or "auto"."""
        if not isinstance(self.every, int):
            raise InvalidArgumentError(
                f"{self.url}: every= must be a number of steps here, because only a Checkpointer measures how long "
                "steps take"
            )
        return self.every

    @property
    def keeping(self) -> Keep:
        assert isinstance(self.keep, Keep)
        return self.keep


def as_tiers(
    tiers: object, memory: object = DEFAULT_MEMORY, every: object = None, keep: object = None
) -> tuple[Memory | None, list[Tier]]:
    """Convert the user's arguments to the memory and the durable tiers, nearest first.

    `every` and `keep` apply to tiers given as strings. With every="auto", the default memory is "auto" too. Raises
    InvalidArgumentError if an argument is wrong.
    """
    options: dict[str, Any] = {name: value for name, value in (("every", every), ("keep", keep)) if value is not None}
    given = [] if tiers is None else [tiers] if isinstance(tiers, (str, Path, Memory, Tier)) else tiers
    if isinstance(given, (list, tuple)) and any(isinstance(t, Memory) for t in given):
        raise InvalidArgumentError("Memory is not a tier: pass it as memory=ckpt.Memory(...)")
    if not isinstance(given, (list, tuple)) or not all(isinstance(t, (Tier, str, Path)) for t in given):
        hint = ". The state comes first: Checkpointer(state, tiers)" if isinstance(tiers, dict) else ""
        shown = reprlib.repr(tiers)  # a shortened text, because the user may have passed a whole state by mistake
        raise InvalidArgumentError(f"tiers must be a folder, a URL, a Tier, or a list of these, not {shown}{hint}")
    if not (memory is None or isinstance(memory, Memory)):
        raise InvalidArgumentError(f"memory={reprlib.repr(memory)}: it must be ckpt.Memory(...), or None for no memory")
    if options and not any(isinstance(t, (str, Path)) for t in given):
        use = "Tier(url, every=50, keep=10)" if given else "memory=ckpt.Memory(every=5) without a tier"
        raise InvalidArgumentError(f"{' and '.join(options)}= applies only to tiers given as strings: use {use}")
    durable = [t if isinstance(t, Tier) else Tier(str(t), **options) for t in given]
    if len({t.url for t in durable}) != len(durable) or (tiers is not None and not given):
        raise InvalidArgumentError("tiers must name at least one tier, and each URL once")
    if not durable and memory is None:
        raise InvalidArgumentError("there is nowhere to save: pass a folder or URL, or memory=ckpt.Memory()")
    if memory is DEFAULT_MEMORY and every is not None and is_auto(every):
        memory = Memory(every=as_every(every))
    for tier in durable:
        remember_options(tier.url, tier.storage_options)
    return memory, durable
