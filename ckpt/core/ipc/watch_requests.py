"""Requests about the trainer: its run metrics, its status, its faults. The others are in `ipc.requests`."""

from __future__ import annotations

from ckpt.core.ipc.protocol import MOST_BYTES, Body, Request
from ckpt.core.ipc.requests import Json

# -- metrics and status --


class RestoreDone(Request[None], frozen=True):
    """The trainer has called restore(). The fields of `cadence.ledger.Restore`, and the costs of saving until then."""

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
    """The save interval of a tier, or of memory: in steps, or the fields of an `Auto`; `now`: the current one."""

    name: str
    every: int | tuple[float, float | None, float | None]
    now: int
    remote: bool


class KeepBooks(Request[None], frozen=True):
    """Record the run metrics of the trainer from now on; see `cadence.ledger.Account`. With its heartbeat. `decides`:
    propose save intervals to it; `again`: a writer before this one has begun; `term`: of the job since its last
    restore, "" for `epoch`."""

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
    term: str = ""


class SetCadence(Request[None], frozen=True):
    """The ranks have agreed on other save intervals: a `Decision`."""

    decision: Json


class Show(Request[None], frozen=True):
    """Report the status of this trainer from now on, and serve these metrics. With its heartbeat."""

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
    """Return the `RankStatus` of the trainer, to any process of this user."""


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
    """The fault handler handles the last note that it got."""


class Report(Request[str], frozen=True):
    """Write the report of a `Fault`, and return its key. `ends`: the trainer exits because of it, so its death is not
    reported again."""

    most_bytes = MOST_BYTES
    fault: Json
    ends: bool = False


class AskEvidence(Request[list[Json]], frozen=True):
    """Report what the trainer does, as an `Evidence`; none if it is not watched. `node`: of all trainers of this node,
    for the fault handler, which the writer collects from the other writers."""

    node: bool = False


class PeerDied(Request[None], frozen=True):
    """Another rank of this node has died. Sent by its writer."""

    rank: int
    summary: str


class TriggerSaveReply(Body, frozen=True):
    """The trainer that got the request."""

    pid: int
    rank: int
    step: int
    doing: str


class TriggerSave(Request[TriggerSaveReply], frozen=True):
    """A person at a shell on this node requests a save."""

    why: str
