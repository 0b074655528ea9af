"""Notes: messages from a writer to its trainer without a request. Modules of the trainer subscribe to them with
`WriterSupervisor.hear`."""

from __future__ import annotations

from typing import Any

from ckpt.core.ipc.protocol import Note


class SlotReadNote(Note, frozen=True):
    """A slot may be reused: all bytes of this checkpoint are in this tier, or will be copied there from a nearer one.
    `attempt` is "" if the slot was being written when the trainer connected."""

    arena: str
    slot: int
    tier: int = -1
    attempt: str = ""


class HeldNote(Note, frozen=True):
    """This node's disk has all its parts of a checkpoint. The other parts belong on the disks of other nodes."""

    tier: int
    attempt: str


class DamagedNote(Note, frozen=True):
    """A checkpoint was read back and found damaged."""

    tier: str
    step: int
    problems: list[str]


class CadenceNote(Note, frozen=True):
    """Proposes cheaper save intervals: a `Decision`."""

    decision: dict[str, Any]


class SaidNote(Note, frozen=True):
    """A warning for the trainer's log."""

    text: str


class FencedNote(Note, frozen=True):
    """Another trainer has taken ownership of the run."""

    text: str


class PeerDiedNote(Note, frozen=True):
    """Another rank of this node has died."""

    rank: int
    summary: str


class SignalNote(Note, frozen=True):
    """Signals that the writer has read from the trainer's wakeup socket; other handlers there may wait for them.
    `numbers`: triggers among them that the trainer has not handled. The trainer replies with `Heard`."""

    raw: list[int]
    numbers: list[int]


class TriggerNote(Note, frozen=True):
    """A person requests a save from a shell."""

    why: str


class HangNote(Note, frozen=True):
    """The trainer makes no progress. `evidence`: an `Evidence` of that. The trainer replies with `Heard`."""

    idle_s: float
    limit_s: float
    usual_s: float
    timings: dict[str, float]
    evidence: dict[str, Any]


class PressureNote(Note, frozen=True):
    """Little memory is available. Sizes are in bytes."""

    available: int
    total: int
    why: str
