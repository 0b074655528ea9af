"""Notes: messages from a writer to its trainer without a request. Parts of the trainer subscribe to them with
`WriterSupervisor.hear`."""

from __future__ import annotations

from typing import Any

from ckpt.core.ipc.protocol import Note


class SlotReadNote(Note, frozen=True):
    """A slot may be used again: all bytes of this attempt are in this tier, or will come there from a nearer one.
    Without an attempt: it was being written when the trainer came."""

    arena: str
    slot: int
    tier: int = -1
    attempt: str = ""


class HeldNote(Note, frozen=True):
    """All parts that belong on this node's disk are there, which are not all parts."""

    tier: int
    attempt: str


class DamagedNote(Note, frozen=True):
    """A checkpoint was read back, and is not what was written."""

    tier: str
    step: int
    problems: list[str]


class CadenceNote(Note, frozen=True):
    """Propose other save intervals, which would cost less: a `Decision`."""

    decision: dict[str, Any]


class SaidNote(Note, frozen=True):
    """A warning for the trainer's log."""

    text: str


class FencedNote(Note, frozen=True):
    """The run was lost to another trainer."""

    text: str


class PeerDiedNote(Note, frozen=True):
    """Another rank of this node has died."""

    rank: int
    summary: str


class SignalNote(Note, frozen=True):
    """Signals that the writer has read from the trainer's wakeup socket; other handlers there may wait for them.
    `numbers`: those that are triggers, and that the trainer has not handled. It replies with `Heard`."""

    raw: list[int]
    numbers: list[int]


class TriggerNote(Note, frozen=True):
    """A person requests a save from a shell."""

    why: str


class HangNote(Note, frozen=True):
    """The trainer makes no more steps; `evidence` is an `Evidence` of it. It replies with `Heard`."""

    idle_s: float
    limit_s: float
    usual_s: float
    timings: dict[str, float]
    evidence: dict[str, Any]


class PressureNote(Note, frozen=True):
    """Memory runs short. Sizes in bytes."""

    available: int
    total: int
    why: str
