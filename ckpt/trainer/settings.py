"""What a Checkpointer was asked for, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import UsageError
from ckpt.goodput.cadence import Auto
from ckpt.ipc import channel
from ckpt.metrics import Metrics, as_metrics
from ckpt.ranks.world import World
from ckpt.tiers import Memory, Tier, as_tiers


@dataclass(frozen=True)
class Settings:
    """`url`: of the nearest tier, by which the run is found; "memory:NAME" if there is memory only."""

    world: World
    memory: Memory | None
    tiers: list[Tier]
    url: str
    on_busy: str
    on_error: str
    busy_timeout_s: float
    close_timeout_s: float
    metrics: Metrics | None

    @classmethod
    def checked(
        cls,
        tiers: object,
        name: str | None,
        every: str | Auto | None,
        modes: tuple[str, str],
        timeouts_s: tuple[float, float, float],
        metrics: object,
    ) -> Settings:
        """`modes`: on_busy and on_error; `timeouts_s`: of a busy memory, of closing, of agreeing. UsageError."""
        on_busy, on_error = modes
        busy_s, close_s, agree_s = timeouts_s
        if on_busy not in ("wait", "skip") or on_error not in ("raise", "warn"):
            raise UsageError('on_busy is "wait" or "skip", on_error is "raise" or "warn"')
        wanted = as_metrics(metrics)
        world = World.detect(channel.node_id(), timeout_s=agree_s)
        if on_busy == "skip" and world.size > 1:
            raise UsageError(
                'on_busy="skip" is for one rank only: a rank that skips alone leaves no step that all have'
            )
        if wanted is not None:
            wanted.port(world.local_rank)
        memory, durable = as_tiers(tiers, every)
        if not durable and name is None:
            raise UsageError("a run that is kept in memory only needs name=, by which it is found again")
        url = durable[0].url if durable else f"memory:{name}"
        return cls(world, memory, durable, url, on_busy, on_error, busy_s, close_s, wanted)

    @property
    def everywhere(self) -> list[int]:
        """The numbers of all tiers."""
        return list(range(len(self.tiers)))

    @property
    def between(self) -> bool | None:
        """Whether steps that are not due are kept; None if that is to be found out."""
        return None if self.memory is None else self.memory.between

    @property
    def stage(self) -> str:
        """How snapshots leave a device."""
        return "auto" if self.memory is None else self.memory.stage

    @property
    def bus_share(self) -> float:
        """See `ckpt.Memory`."""
        return Memory().bus_share if self.memory is None else self.memory.bus_share

    @property
    def places(self) -> str:
        """For messages."""
        return " or ".join([*(["memory"] if self.memory else []), *(tier.url for tier in self.tiers)])
