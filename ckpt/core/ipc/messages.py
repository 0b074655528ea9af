"""Typed messages between trainer and writer: encoding, decoding, and validation on arrival.

    Request   from a trainer, a tool or another writer to a writer, which replies   `requests`, `watch_requests`
    Note      from a writer to its trainer, which sends no reply                    `notes`

On the wire, a message is a JSON object: `op` is its name, `id` is the number of a request and its reply, `fds` is the
number of descriptors sent with it, and all other keys are fields. A message that is unknown, malformed or too long is
rejected with an error that names it. A trainer and a writer with different values of `PROTOCOL` do not use each other,
because they can exchange only errors.

Notes: messages from a writer to its trainer without a request. Modules of the trainer subscribe to them with
`WriterSupervisor.hear`.

Requests to a writer, and its replies. Methods with the decorator `handles` in `ckpt.core.writer` process them.

Arenas are identified by their id in hex, checkpoints by the text of their id, tiers by their number. Objects that other
modules define (a layout, a fault, a tier) are sent as their JSON form, and validated when they are parsed.

Requests about the trainer: its run metrics, its status, its faults. The others are in `ipc.messages`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import field

from ckpt.errors import ProtocolError, from_wire, to_wire
from ckpt.version import VERSION

PROTOCOL = 10  # increase it whenever a message changes
MIB = 1 << 20
MOST_BYTES = 256 * MIB  # of any message
MOST_NAME = 60  # maximum characters of an unknown name in an error
REPLY = "reply"  # the name of replies; a reply has a value or an error

R = TypeVar("R")
N = TypeVar("N", bound="Message")
T = TypeVar("T")


@functools.cache
def _op(name: str) -> str:
    """Return the name of a message on the wire: `write_slot` for `WriteSlot`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag_field="op", tag=_op):
    """A message with a name on the wire."""

    most_bytes: ClassVar[int] = 8 * MIB  # more for messages that grow with the model or the job
    descriptors: ClassVar[int] = 0  # number of descriptors sent with it


class Request(Message, Generic[R], frozen=True):
    """A request to a writer, which replies with an `R`."""


class Note(Message, frozen=True):
    """A message from a writer to its trainer."""

    most_bytes = MOST_BYTES


class Body(msgspec.Struct, frozen=True):
    """A part of a message or reply."""


class Failure(Body, frozen=True):
    """A reply that is an error; see `ckpt.errors.to_wire`."""

    error: str
    message: str
    retryable: bool = False


@dataclasses.dataclass(slots=True)
class Incoming:
    """A received message: its name, its number or None, its fields, and its size in bytes."""

    op: str
    id: int | None
    fields: dict[str, Any]
    size: int
    fds: list[int] = dataclasses.field(default_factory=list)

    def drop(self) -> None:
        """Close the descriptors that came with it."""
        while self.fds:
            with contextlib.suppress(OSError):
                os.close(self.fds.pop())


def table(kinds: Iterable[type[N]]) -> dict[str, type[N]]:
    """Return message types by their name on the wire."""
    return {_op(kind.__name__): kind for kind in kinds}


def encode(message: Message, number: int | None = None, fds: int = 0) -> bytes:
    """Encode a message. Raise ProtocolError if it is too long for its type."""
    name = _op(type(message).__name__)
    text = _text(name, number, fds, msgspec.structs.asdict(message))
    _check_size(name, len(text), message.most_bytes)
    return text


def encode_reply(value: object, number: int, fds: int = 0) -> bytes:
    """Encode the reply to a request, or a `Failure`."""
    text = _text(REPLY, number, fds, msgspec.structs.asdict(value) if isinstance(value, Failure) else {"value": value})
    _check_size(REPLY, len(text), MOST_BYTES)
    return text


def failure(error: BaseException) -> Failure:
    """Return an error as a reply."""
    return Failure(**to_wire(error))


def _text(name: str, number: int | None, fds: int, fields: dict[str, Any]) -> bytes:
    """Encode with Python's json, because msgspec rejects infinite numbers and file names that are not UTF-8."""
    head = {"op": name} | ({} if number is None else {"id": number}) | ({"fds": fds} if fds else {})
    return json.dumps({**head, **fields}, separators=(",", ":"), default=msgspec.structs.asdict).encode()


def decode(text: bytes | bytearray) -> Incoming | None:
    """Parse a message, None if it is not one. Only its name and number are checked here, its fields by its type."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if type(data) is not dict:
        return None
    op, number = data.get("op"), data.get("id")
    return Incoming(op if type(op) is str else "", number if type(number) is int else None, data, len(text))


def too_long(size: int, begin: bytes) -> Incoming:
    """Return a message that is too long to be read, with the name and number found in its first bytes."""
    op, number = re.search(rb'"op": ?"(\w+)"', begin), re.search(rb'"id": ?(\d{1,18})\b', begin)
    return Incoming(op[1].decode() if op else "", int(number[1]) if number else None, {}, size)


def message_of(incoming: Incoming, known: Mapping[str, type[N]]) -> N:
    """Convert to a typed message. Raise ProtocolError if it is unknown or invalid."""
    kind = known.get(incoming.op)
    _check_size(incoming.op, incoming.size, MOST_BYTES if kind is None else kind.most_bytes)
    if kind is None:
        raise refusal(incoming.op, "is not known here")
    found = _convert(incoming.fields, kind, incoming.op)
    if len(incoming.fds) != kind.descriptors:
        raise refusal(incoming.op, f"comes with {kind.descriptors} descriptors, not {len(incoming.fds)}")
    return found


def reply_of(incoming: Incoming, request: Request[R]) -> R:
    """Return the reply to a request. Raise the error in it, or ProtocolError if its type is wrong."""
    kind: type[R] = type(request).__orig_bases__[0].__args__[0]  # type: ignore[attr-defined]
    name = f"the reply to {_op(type(request).__name__)}"
    if "error" in incoming.fields:
        raise from_wire(msgspec.structs.asdict(_convert(incoming.fields, Failure, name)))
    return _convert(incoming.fields.get("value"), kind, name)


def _convert(data: object, kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise refusal(name, f"is malformed: {error}") from None


def _check_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise refusal(name, f"has {size / MIB:.0f} MiB, where {most / MIB:.0f} MiB are the most")


def refusal(name: str, problem: str) -> ProtocolError:
    """Return the error for a rejected message. It has our version, for a peer of another version."""
    named = repr(name[:MOST_NAME]) if name else "a message without a name"
    return ProtocolError(f"{named} {problem} (everystep {VERSION}, protocol {PROTOCOL})")


# -- notes --


class SlotReadNote(Note, frozen=True):
    """A slot may be reused: all bytes of this checkpoint are in this tier, or will be copied there from a nearer one.
    `checkpoint` is "" if the slot was being written when the trainer connected."""

    arena: str
    slot: int
    tier: int = -1
    checkpoint: str = ""


class HeldNote(Note, frozen=True):
    """This node's disk has all its parts of a checkpoint. The other parts belong on the disks of other nodes."""

    tier: int
    checkpoint: str


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


# -- requests and replies --


Json = dict[str, Any]
Owner = tuple[int, str, str | None]  # term, nonce, and the checkpoint that it was restored from
Digest = tuple[str, int, str, bool]  # checkpoint, rank, digests of its chunks in hex, True if computed late

# -- ownership of the run --


class LendReply(Body, frozen=True):
    """The memory of a writer. `trainer`: its process. `since`: when that connected, in seconds since 1970. `alive`: it
    runs, so no other process may continue its run. The descriptors of all `arenas` come with the reply; the `foreign`
    ones are read-only. `acquires`: the history of the snapshots, up to the present owner. `roots`: the ids of the
    opened runs, by URL. `sees`: True if the writer sees the file `Lend.proof`."""

    pid: int
    alive: bool
    trainer: int
    since: float
    arenas: list[str]
    foreign: list[str]
    layouts: dict[str, Json]
    digests: list[Digest]
    acquires: list[Owner]
    roots: dict[str, str]
    sees: bool
    protocol: int = PROTOCOL
    library: str = VERSION


class Lend(Request[LendReply], frozen=True):
    """Lend memory to another rank of this job, or of a new one, which only reads it. `look`: send no arenas. `digest`:
    compute missing digests first. `fenced`: send no arenas, and read the log first, because the caller has fenced our
    job there; WriterError if this writer leaves. `proof`: the name of a temporary file in the folder of the nearest
    tier, which shows whether the writer sees the same folder."""

    proof: str = ""
    look: bool = False
    digest: bool = False
    fenced: bool = False
    protocol: int = PROTOCOL
    library: str = VERSION


class GreetingReply(LendReply, frozen=True, kw_only=True):
    """The memory that a trainer inherits. `writing_on`: processes (number and start time) whose devices may write to
    the arenas until they have ended; `lost`: tiers whose run was removed; `writing`: slots that are being written to a
    tier, by arena; `faults`: reports that no trainer has received yet."""

    writing_on: list[tuple[int, int]]
    lost: list[str]
    writing: list[tuple[str, int]]
    faults: list[Json]


class Greeting(Request[GreetingReply], frozen=True):
    """Serve this trainer from now on, unless the writer's own trainer lives."""

    protocol: int = PROTOCOL
    library: str = VERSION


class TierFound(Body, frozen=True):
    """A tier that was opened. `checkpoints`: their number. `damaged`: records that cannot be read."""

    root: str
    term: int
    checkpoints: int
    damaged: list[int]


class OpenRunReply(Body, frozen=True):
    """The tiers as they were found; `cadence`: the measured save intervals of the last job attempt, {} if unknown."""

    tiers: list[TierFound]
    cadence: Json


class OpenRun(Request[OpenRunReply], frozen=True):
    """Open the tiers (see `Tier.spec`) without changing them. `check`: raise if another job trains the
    run; `auto`: tiers whose save interval is to be measured; `first_number`: of the data files of this writer;
    `acquires`: the history of the memory; `next_nonces`: an ACQUIRE with one of these is by the writer's own job;
    `roots`: the ids that the runs in these tiers must have, "" for any."""

    tiers: list[Json]
    linger_s: float
    commit_s: float
    acquires: list[Owner]
    auto: list[str]
    first_number: int = 0
    check: bool = False
    next_nonces: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)


class AcquireRun(Request[list[int]], frozen=True):
    """Take ownership of these tiers for all ranks. Return their new terms. `restored`: the checkpoint to continue."""

    nonce: str
    floor: int
    restored: str | None
    tiers: list[int]


class PartsHere(Body, frozen=True):
    """The ranks, out of `world`, whose parts of a checkpoint are in a tier."""

    tier: int
    checkpoint: str
    world: int
    ranks: list[int]


class OwnRun(Request[list[PartsHere]], frozen=True):
    """All ranks have agreed on the owner. Return the parts on node-local disks, in the tiers to `recover`.
    `roles`: ranks, place and world of each tier, see `Role`."""

    most_bytes = MOST_BYTES
    owner: Owner
    roles: list[tuple[list[int], int, int]]
    recover: list[int]
    next_nonces: list[str] = field(default_factory=list)


class Resume(Request[None], frozen=True):
    """All ranks have recovered: resume copies to further tiers that a crash interrupted."""


class Complete(Request[None], frozen=True):
    """The other nodes have their parts of these checkpoints too."""

    tier: int
    checkpoints: list[str]


class Distrust(Request[None], frozen=True):
    """A restore found damage in this tier: do not build increments on the checkpoints that are there now."""

    url: str


class Leave(Request[None], frozen=True):
    """The trainer is done: finish the saves in progress, and exit. `keep`: keep the memory and persist it, as after the
    trainer's death, although its process may still run. `failed`: an error has ended the training."""

    keep: bool = False
    failed: bool = False


# -- memory --


class MakeArena(Request[str], frozen=True):
    """Make an arena with this number of slots, or fewer but at least `least`. The reply is its id, with its descriptor.
    `ranks`: number of ranks on this machine; `node`: the NUMA node near the device."""

    slots: int
    slot_size: int
    least: int
    ranks: int = 1
    node: int | None = None


class AttachArena(Request[None], frozen=True):
    """Keep this arena, which is sent as a descriptor. The reply is sent once the arena is kept. `foreign`: other ranks
    staged into it."""

    descriptors = 1
    foreign: bool = False


class WatchArena(Request[None], frozen=True):
    """Watch the mutex of this arena, which the staging thread owns from now on."""

    arena: str


class ReleaseArena(Request[None], frozen=True):
    """Release the arena with this id."""

    arena: str


class KnowLayout(Request[None], frozen=True):
    """Remember a `Layout`, which describes the bytes of a slot."""

    most_bytes = MOST_BYTES
    layout: Json


class Partner(Request[Json], frozen=True):
    """Prepare to keep a copy of another rank's memory. The reply has the contact data of this writer for other nodes.
    `contact`: contact data of the writer that keeps a copy of our memory, the writer of `rank`."""

    contact: Json | None = None
    rank: int = 0


class Push(Request[None], frozen=True):
    """Copy a sealed snapshot to the partner."""

    arena: str
    slot: int
    checkpoint: str


# -- saving --


class WriteSlotReply(Body, frozen=True):
    """Bytes of the snapshot, and bytes that were stored for it."""

    nbytes: int
    stored: int


class WriteSlot(Request[WriteSlotReply], frozen=True):
    """Make a checkpoint of a sealed slot in one tier. The reply is sent when it is durable. `stored`: the trainer or an
    earlier writer has already stored its bytes. `arena`: "" if no slot has them. `replicas`: digests of replicated
    tensors for its manifest, see `format.columns`."""

    most_bytes = MOST_BYTES
    tier: int
    arena: str
    slot: int
    checkpoint: str
    stored: bool = False
    replicas: Json = field(default_factory=dict)


class Retract(Request[None], frozen=True):
    """Abort the checkpoint of a snapshot, or retire it if it is committed already."""

    checkpoint: str
    reason: str


class SavedInTier(Body, frozen=True):
    """The result of saving a step to a tier; no `error` if it is durable."""

    step: int
    tier: str
    seconds: float
    error: str


class KeptReply(Body, frozen=True):
    """The steps that a training keeps. `notes`: step, note, and whether it exists. `saved`: True if the requested step
    is a checkpoint of this history in some tier, or is being saved."""

    notes: list[tuple[int, str, bool]]
    saved: bool


class KeepSteps(Request[KeptReply], frozen=True):
    """Keep these steps in every tier, regardless of their age, each with a note of the reason. Release all others that
    such a request named before. None changes nothing. The reply is sent when the run logs contain the notes. It lists
    the kept steps in the tiers that this rank is responsible for, and whether they have `step`."""

    most_bytes = MOST_BYTES
    notes: list[tuple[int, str]] | None = None
    step: int = -1


class Persist(Request[list[SavedInTier]], frozen=True):
    """Make these snapshots durable now, and return the results. `far`: also save the newest one to the other tiers,
    which are farther away."""

    deadline_s: float
    far: bool
    checkpoints: list[str]


# -- the trainer: run metrics, status, faults --


# -- metrics and status --


class RestoreDone(Request[None], frozen=True):
    """The trainer has called restore(). Fields of `cadence.ledger.Restore`, and the costs of saving until then."""

    at: float
    seconds: float
    step: int | None
    source: str
    checkpoint: str
    term: str
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
    its last restore, "" for `first_term`."""

    descriptors = 1
    first_term: str
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
