"""Where checkpoints are kept, as the user says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckpt.errors import UsageError
from ckpt.retain import Keep
from ckpt.store import normalise


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory, held by the writer process, so that it survives the trainer.

    `every`: steps between snapshots. `keep`: snapshots held (each takes as much memory as the state; one more per
    durable tier is added for the write in flight). `linger_s`: how long the memory is held after the trainer has died.
    `replicas`: 2 has a writer on another node keep a copy of each snapshot, sent over the network in the background,
    so that memory survives the loss of a node. `between`: with `every` above 1, keep of each step between what could
    not be read at a fault, so that no step is lost to it; None: where that costs under 0.1 % of a step.
    """

    every: int = 1
    keep: int = 3
    linger_s: float = 600.0
    replicas: int = 1
    between: bool | None = None

    def __post_init__(self) -> None:
        numbers = type(self.every) is int and type(self.keep) is int and isinstance(self.linger_s, (int, float))
        numbers = numbers and self.replicas in (1, 2) and self.between in (None, True, False)
        if not numbers or self.every < 1 or not 2 <= self.keep <= 12 or self.linger_s < 0:
            raise UsageError(
                f"{self} makes no sense: every counts from 1, keep from 2 to 12, linger_s from 0, replicas is 1 or 2"
            )


@dataclass(frozen=True, slots=True)
class Tier:
    """A durable place: a folder or URL. `every`: steps between checkpoints. `keep`: how many, or a `Keep`."""

    url: str
    every: int = 100
    keep: Keep | int = field(default=3)

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1 or not isinstance(self.keep, (int, Keep)):
            raise UsageError(f"{self} makes no sense: every is a number from 1, keep a number or a Keep")
        object.__setattr__(self, "url", normalise(self.url))
        if isinstance(self.keep, int):
            object.__setattr__(self, "keep", Keep(last=self.keep))

    @property
    def keeping(self) -> Keep:
        assert isinstance(self.keep, Keep)
        return self.keep


def as_tiers(tiers: object) -> tuple[Memory | None, list[Tier]]:
    """What the user passed, as at most one memory tier and the durable ones in order, nearest first."""
    if tiers is None:
        return Memory(), []
    if isinstance(tiers, (str, Path)):
        return Memory(), [Tier(str(tiers))]
    given = [tiers] if isinstance(tiers, (Memory, Tier)) else tiers
    if not isinstance(given, (list, tuple)) or not all(isinstance(t, (Memory, Tier, str, Path)) for t in given):
        raise UsageError(f"tiers must be a folder, a URL, or a list of Memory and Tier, not {tiers!r}")
    memory = [t for t in given if isinstance(t, Memory)]
    durable = [t if isinstance(t, Tier) else Tier(str(t)) for t in given if not isinstance(t, Memory)]
    if len(memory) > 1 or len({t.url for t in durable}) != len(durable) or not given:
        raise UsageError("tiers must name at least one place, at most one Memory, and each URL once")
    return (memory[0] if memory else None), durable
