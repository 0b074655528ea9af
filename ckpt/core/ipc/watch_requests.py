"""Requests about what the trainer does: its ledger, its status, its faults. The others are in `ipc.requests`."""

from __future__ import annotations

from ckpt.core.ipc.protocol import MOST_BYTES, Body, Request
from ckpt.core.ipc.requests import Json

# -- what is known of the trainer --


class RestoreDone(Request[None], frozen=True):
    """The trainer has called restore(). As `cadence.ledger.Restore`, and what saving had cost by then."""

    at: float
    seconds: float
    step: int | None
    source: str
    attempt: str
    epoch: str
    stalled: float
    saves: int
    skipped: int
    paused: float
    repaired: int = 0
    passed_over: int = 0
    why: str = ""


class CadenceOf(Body, frozen=True):
    """How often a tier, or memory, is saved to: steps, or the fields of an `Auto`; and `now`."""

    name: str
    every: int | tuple[float, float | None, float | None]
    now: int
    remote: bool


class KeepBooks(Request[None], frozen=True):
    """Keep the ledger of the trainer from now on; see `cadence.ledger.Account`. With its heartbeat. `decides`: a
    cadence may be proposed to it; `again`: a writer before this one has begun."""

    descriptors = 1
    epoch: str
    rank: int
    world: int
    url: str
    opening: float
    opened: float
    places: list[CadenceOf]
    versions: dict[str, str]
    decides: bool = False
    cadence: Json | None = None
    again: bool = False


class SetCadence(Request[None], frozen=True):
    """The ranks save by another cadence from some step on: a `Decision`."""

    decision: Json


class Show(Request[None], frozen=True):
    """The trainer can be looked at from now on, and wants these metrics. With its heartbeat."""

    descriptors = 1
    place: str
    rank: int
    world: int
    local_rank: int
    opening: float
    opened: float
    metrics: Json | None = None
    restored: RestoreDone | None = None


class Look(Request[Json], frozen=True):
    """What does the trainer do, and what is on its way? A `RankStatus`, for anybody of this user."""


# -- faults --


class Arm(Request[None], frozen=True):
    """Watch the trainer from now on: with its heartbeat, the socket of its signals, the pipe of faulthandler, and
    stderr. `hang`: the fields of an `OnHang`; `share`: of memory that is to be available; `echo`: to stderr."""

    descriptors = 4
    rank: int
    world: int
    signals: list[int]
    hang: tuple[str, float, float] | None
    share: float | None
    echo: bool


class Heard(Request[None], frozen=True):
    """The fault handler has taken up what it was told."""


class Report(Request[str], frozen=True):
    """The fault handler's account of a `Fault`: where it is kept. If it `ends` the trainer, its death is no news."""

    most_bytes = MOST_BYTES
    fault: Json
    ends: bool = False


class AskEvidence(Request[list[Json]], frozen=True):
    """Report what the trainer does, as an `Evidence`; none if it is not watched. `node`: of all trainers of this node,
    for the fault handler, which the writer collects from the other writers."""

    node: bool = False


class PeerDied(Request[None], frozen=True):
    """Another rank of this node has died, says its writer."""

    rank: int
    summary: str


class TriggerSaveReply(Body, frozen=True):
    """The trainer that was told."""

    pid: int
    rank: int
    step: int
    doing: str


class TriggerSave(Request[TriggerSaveReply], frozen=True):
    """Somebody at a shell on this node wants a save."""

    why: str
