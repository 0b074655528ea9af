"""Requests about the trainer: its run metrics, its status, its faults. The others are in `ipc.requests`."""

from __future__ import annotations

from ckpt.core.ipc.protocol import MOST_BYTES, Body, Request
from ckpt.core.ipc.requests import Json

# -- metrics and status --


class RestoreDone(Request[None], frozen=True):
    """The trainer has called restore(). Fields of `cadence.ledger.Restore`, and the costs of saving until then."""

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
    """Record the run metrics of the trainer from now on, see `cadence.ledger.Account`. Its heartbeat is sent along.
    `decides`: propose save intervals to it. `again`: an earlier writer began the record. `term`: term of the job since
    its last restore, "" for `epoch`."""

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
    """Use the other save intervals that the ranks have agreed on: a `Decision`."""

    decision: Json


class Show(Request[None], frozen=True):
    """Report the status of this trainer from now on, and serve these metrics. Its heartbeat is sent along."""

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
    """Watch the trainer from now on. Descriptors: its heartbeat, the socket of its signals, the pipe of faulthandler,
    and stderr. `hang`: fields of an `OnHang`. `share`: minimum share of free memory. `echo`: also write to stderr."""

    descriptors = 4
    rank: int
    world: int
    signals: list[int]
    hang: tuple[str, float, float] | None
    share: float | None
    echo: bool


class Heard(Request[None], frozen=True):
    """The fault handler has received the last note, and handles it."""


class Report(Request[str], frozen=True):
    """Write the report of a `Fault`, and return its key. `ends`: the trainer exits because of it, so its death is not
    reported again."""

    most_bytes = MOST_BYTES
    fault: Json
    ends: bool = False


class AskEvidence(Request[list[Json]], frozen=True):
    """Return what the trainer is doing, as an `Evidence`, or [] if it is not watched. `node`: also collect the evidence
    of the other trainers of this node from their writers, for the fault handler."""

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
