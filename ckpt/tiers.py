"""Where checkpoints are kept, as the user says it."""

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
from ckpt.errors import UsageError
from ckpt.store import normalise, remember_options

COMPRESSION = ("auto", "none", "zstd")
CREDENTIALS = ("AWS_", "GOOGLE_", "AZURE_")  # so begin the names of what says who one is


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory, held by the writer process, so that it survives the trainer.

    `every`: steps between snapshots; "30s", "10min" or "2h": as many as last so long, see `ckpt.Auto`; "auto": as often
    as 1 % of the training time allows.
    `keep`: snapshots held (each takes as much memory as the state; one more per durable tier is added for the write in
    flight; fewer where memory is short).
    `linger_s`: how long the memory is held after the trainer has died. `replicas`: 2 has a writer on another
    node keep a copy of each snapshot, sent over the network in the background, so that memory survives the loss of a
    node.
    """

    every: int | str | Auto = 1
    keep: int = 3
    linger_s: float = 600.0
    replicas: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", as_every(self.every))
        numbers = type(self.keep) is int and isinstance(self.linger_s, (int, float))
        numbers = numbers and self.replicas in (1, 2)
        if not numbers or not 2 <= self.keep <= 12 or self.linger_s < 0:
            raise UsageError(f"{self} makes no sense: keep counts from 2 to 12, linger_s from 0, replicas is 1 or 2")


@dataclass(frozen=True, slots=True)
class Tier:
    """A durable tier: a folder or URL. `every`: steps between checkpoints; "30s", "10min" or "2h": as many as last so
    long; "auto": what loses least, by what a save costs and how often the place is needed, see `ckpt.Auto`. `keep`:
    "all" of them stay; a number: so many of the newest; or a `Keep`.

    For object stores: `storage_options` are those of fsspec (`endpoint_url`, `key`, `profile`, ...), beside what the
    environment and configuration files say; `max_mib_s` throttles what is sent and read, and at most `max_inflight_mib`
    are on their way at any moment. `reader_grace_s`: how long what is retired stays, for those who are reading it; by
    default 600 in object stores and 0 in folders, where an open file survives its deletion.

    `incremental`: what has not changed since the checkpoint before is not stored again. Every `full_every`-th
    checkpoint is stored as a whole all the same, and the first two: no bad file can spoil all there is. `compression`:
    "zstd" stores each tensor in the smallest form that gives back the same bits, also as the difference to an older
    one; "none" never does; "auto" does where the place takes bytes more slowly than idle cores compress them.
    """

    url: str
    every: int | str | Auto = 100
    keep: Keep | int | str = "all"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)  # perhaps secrets
    max_mib_s: float | None = None
    max_inflight_mib: int = 256
    reader_grace_s: float | None = None
    incremental: bool = True
    compression: str = "auto"
    full_every: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", as_every(self.every))
        object.__setattr__(self, "keep", as_keep(self.keep))
        limits = (self.max_mib_s, self.max_inflight_mib)
        if any(n is not None and (not isinstance(n, (int, float)) or not n > 0) for n in limits):
            raise UsageError(f"{self} makes no sense: max_mib_s and max_inflight_mib are numbers above 0")
        if self.reader_grace_s is not None and not self.reader_grace_s >= 0:
            raise UsageError(f"{self} makes no sense: reader_grace_s is a number from 0")
        self._check_increments()
        object.__setattr__(self, "url", normalise(self.url))
        if urlsplit(self.url).password:
            raise UsageError("a password does not belong into a URL, which is logged: give it in storage_options=")
        if self.url.startswith("memory:"):
            raise UsageError(f"{self.url} lives in one process only, and would end with it: use ckpt.Memory()")
        try:
            json.dumps(dict(self.storage_options or {}))
        except (TypeError, ValueError):
            raise UsageError("storage_options must be plain values: they are handed to the writer process") from None

    def _check_increments(self) -> None:
        for right, name, wanted in (
            (self.compression in COMPRESSION, "compression", '"auto", "none" or "zstd"'),
            (type(self.incremental) is bool, "incremental", "True or False"),
            (
                type(self.full_every) is int and self.full_every >= 1,
                "full_every",
                "a whole number from 1 (1: always full)",
            ),
        ):
            if not right:
                raise UsageError(f"Tier({self.url!r}): {name}={getattr(self, name)!r}, and it has to be {wanted}")

    def spec(self) -> dict[str, Any]:
        """What the writer needs to know of it: the environment too, since one that is there may be of another."""
        return {
            "url": self.url,
            "keep": asdict(self.keeping),
            "cadence": FIRST_DURABLE if isinstance(self.every, Auto) else self.every,
            "options": None if self.storage_options is None else dict(self.storage_options),
            "max_mib_s": self.max_mib_s,
            "max_inflight_mib": self.max_inflight_mib,
            "grace_s": self.reader_grace_s,
            "incremental": self.incremental,
            "compression": self.compression,
            "full_every": self.full_every,
            "environment": {k: v for k, v in os.environ.items() if k.startswith(CREDENTIALS)},
        }

    @property
    def steps(self) -> int:
        """Between two checkpoints, where that is fixed. UsageError where it is to be found out."""
        if not isinstance(self.every, int):
            raise UsageError(f"{self.url}: a Checkpointer sees how long steps take. Here every= is a number of them")
        return self.every

    @property
    def keeping(self) -> Keep:
        assert isinstance(self.keep, Keep)
        return self.keep


def as_tiers(tiers: object, every: object = None, keep: object = None) -> tuple[Memory | None, list[Tier]]:
    """What the user passed, as at most one memory tier and the durable ones in order, nearest first.

    `every` and `keep` are of the tiers that are given as a string. A list of strings gets memory as one string does; a
    list with a `Tier` or a `Memory` says itself what there is. Memory is saved at every step, or as often as "auto"
    finds out; where it is all there is, `every` is of it.
    """
    said: dict[str, Any] = {name: value for name, value in (("every", every), ("keep", keep)) if value is not None}
    given = [] if tiers is None else [tiers] if isinstance(tiers, (str, Path, Memory, Tier)) else tiers
    if not isinstance(given, (list, tuple)) or not all(isinstance(t, (Memory, Tier, str, Path)) for t in given):
        hint = ". The state comes first: Checkpointer(state, tiers)" if isinstance(tiers, dict) else ""
        shown = reprlib.repr(tiers)  # of a state that was given in their place: not all its numbers
        raise UsageError(f"tiers must be a folder, a URL, or a list of Memory and Tier, not {shown}{hint}")
    words, memory = [t for t in given if isinstance(t, (str, Path))], [t for t in given if isinstance(t, Memory)]
    if (keep is not None and not words) or (said and given and not words):
        raise UsageError(f"{' and '.join(said)}: of tiers that are given as a string. Say Tier(url, every=50, keep=10)")
    durable = [t if isinstance(t, Tier) else Tier(str(t), **said) for t in given if not isinstance(t, Memory)]
    if len(memory) > 1 or len({t.url for t in durable}) != len(durable) or (tiers is not None and not given):
        raise UsageError("tiers must name at least one tier, at most one Memory, and each URL once")
    if not memory and (len(words) == len(given) or said):
        memory = [Memory() if every is None or (given and not is_auto(every)) else Memory(every=as_every(every))]
    for tier in durable:
        remember_options(tier.url, tier.storage_options)
    return (memory[0] if memory else None), durable
