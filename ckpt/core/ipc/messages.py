"""Typed messages between trainer and writer: encoding, decoding, and validation on arrival.

    Request   from a trainer, a tool or another writer to a writer, which replies. A method marked with `@handles` of
              `ckpt.core.writer.held_run` processes it
    Note      from a writer to its trainer, which sends no reply. `WriterSupervisor.hear` subscribes to it

On the wire, a message is a JSON object: `op` is its name, `id` is the number of a request and its reply, `fds` is the
number of descriptors sent with it, and all other keys are fields. A message that is unknown, malformed or too long is
rejected with an error that names it. Trainers and writers with different values of `PROTOCOL` exchange only errors.

Arenas are identified by their id in hex, checkpoints by the text of their id, and tiers by their number. Objects that
other modules define (a layout, a fault, a tier) are sent in their JSON form, and validated when they are parsed.
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

PROTOCOL = 12  # increase it whenever a message changes
MIB = 1 << 20
MOST_BYTES = 256 * MIB  # maximum size of any message
MOST_NAME = 60  # maximum characters of an unknown name in an error
REPLY = "reply"  # the name of replies; a reply has a value or an error

R = TypeVar("R")
N = TypeVar("N", bound="Message")
T = TypeVar("T")


@functools.cache
def _op(name: str) -> str:
    """Return the name of a message on the wire, for example `write_slot` for `WriteSlot`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag_field="op", tag=_op):
    """A message with a name on the wire."""

    most_bytes: ClassVar[int] = 8 * MIB  # maximum size; larger for messages that grow with the model or the job
    descriptors: ClassVar[int] = 0  # number of descriptors sent with the message


class Request(Message, Generic[R], frozen=True):
    """A request to a writer, which replies with an `R`."""


class Note(Message, frozen=True):
    """A message from a writer to its trainer."""

    most_bytes = MOST_BYTES


class Body(msgspec.Struct, frozen=True):
    """A part of a message or reply."""


class Failure(Body, frozen=True):
    """A reply that reports an error; see `ckpt.errors.to_wire`."""

    error: str
    message: str
    retryable: bool = False


@dataclasses.dataclass(slots=True)
class Incoming:
    """A received message: its name, its number or None, its fields, its size in bytes, and its descriptors."""

    op: str
    id: int | None
    fields: dict[str, Any]
    size: int
    fds: list[int] = dataclasses.field(default_factory=list)

    def drop(self) -> None:
        """Close the descriptors that came with the message."""
        while self.fds:
            with contextlib.suppress(OSError):
                os.close(self.fds.pop())


def table(kinds: Iterable[type[N]]) -> dict[str, type[N]]:
    """Return a dict from the name on the wire to the message type."""
    return {_op(kind.__name__): kind for kind in kinds}


def encode(message: Message, number: int | None = None, fds: int = 0) -> bytes:
    """Encode a message. Raise ProtocolError if it is longer than its type allows."""
    name = _op(type(message).__name__)
    text = _text(name, number, fds, msgspec.structs.asdict(message))
    _check_size(name, len(text), message.most_bytes)
    return text


def encode_reply(value: object, number: int, fds: int = 0) -> bytes:
    """Encode the reply to a request: its value or a `Failure`."""
    text = _text(REPLY, number, fds, msgspec.structs.asdict(value) if isinstance(value, Failure) else {"value": value})
    _check_size(REPLY, len(text), MOST_BYTES)
    return text


def failure(error: BaseException) -> Failure:
    """Convert an error to a reply."""
    return Failure(**to_wire(error))


def _text(name: str, number: int | None, fds: int, fields: dict[str, Any]) -> bytes:
    """Encode with Python's json, because msgspec rejects infinite numbers and file names that are not UTF-8."""
    head = {"op": name} | ({} if number is None else {"id": number}) | ({"fds": fds} if fds else {})
    return json.dumps({**head, **fields}, separators=(",", ":"), default=msgspec.structs.asdict).encode()


def decode(text: bytes | bytearray) -> Incoming | None:
    """Parse a message. Return None for other text. Check only name and number; `message_of` checks the fields."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if type(data) is not dict:
        return None
    op, number = data.get("op"), data.get("id")
    return Incoming(op if type(op) is str else "", number if type(number) is int else None, data, len(text))


def too_long(size: int, begin: bytes) -> Incoming:
    """Return a message for a text that is too long to be read, with the name and number found in its first bytes."""
    op, number = re.search(rb'"op": ?"(\w+)"', begin), re.search(rb'"id": ?(\d{1,18})\b', begin)
    return Incoming(op[1].decode() if op else "", int(number[1]) if number else None, {}, size)


def message_of(incoming: Incoming, known: Mapping[str, type[N]]) -> N:
    """Convert a received message to its type. Raise ProtocolError if the message is unknown or invalid."""
    kind = known.get(incoming.op)
    _check_size(incoming.op, incoming.size, MOST_BYTES if kind is None else kind.most_bytes)
    if kind is None:
        raise refusal(incoming.op, "is not known here")
    found = _convert(incoming.fields, kind, incoming.op)
    if len(incoming.fds) != kind.descriptors:
        raise refusal(incoming.op, f"comes with {kind.descriptors} descriptors, not {len(incoming.fds)}")
    return found


def reply_of(incoming: Incoming, request: Request[R]) -> R:
    """Return the reply to a request. Raise the error that it contains, or ProtocolError if its type is wrong."""
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
        raise refusal(name, f"has {size / MIB:.0f} MiB, limit {most / MIB:.0f} MiB")


def refusal(name: str, problem: str) -> ProtocolError:
    """Return the error for a rejected message. It names this version, because the sender may have another one."""
    named = repr(name[:MOST_NAME]) if name else "a message without a name"
    return ProtocolError(f"{named} {problem} (everystep {VERSION}, protocol {PROTOCOL})")


# -- notes --


class StoredNote(Note, frozen=True):
    """The bytes of a checkpoint are in a tier, or will be copied to it from a nearer tier, so the slot may be reused.
    `checkpoint`: "" if the slot was being written when the trainer connected."""

    tier: int = -1
    checkpoint: str = ""
    arena: str = ""
    slot: int = -1


class ProblemNote(Note, frozen=True):
    """A warning for the trainer's log. `error`: class of the error that the trainer's next call raises: "FencedError"
    if another job owns the run, "SaveError" if a checkpoint was read back and found damaged, "" for none."""

    text: str
    error: str = ""


class CadenceNote(Note, frozen=True):
    """A proposal of cheaper save intervals, as a `Decision`."""

    decision: dict[str, Any]


class Hang(Body, frozen=True):
    """Reports that the trainer makes no progress. `evidence`: an `Evidence` of what the trainer is doing."""

    idle_s: float
    limit_s: float
    usual_s: float
    timings: dict[str, float]
    evidence: dict[str, Any]


class FaultNote(Note, frozen=True):
    """A fault or a request. Values of `kind`: "hang"; "memory" (little is free); "peer" (`rank` of this node has died);
    "trigger" (a person requests a save); "signal" (`raw`: bytes from the trainer's wakeup socket for other handlers;
    `numbers`: signals of triggers). The trainer counts the hangs and triggers that it handles in its heartbeat."""

    kind: str
    why: str = ""
    rank: int = -1
    raw: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    hang: Hang | None = None


# -- ownership of the run --


Json = dict[str, Any]
Owner = tuple[int, str, str | None]  # term, nonce, and the checkpoint that it was restored from
Digest = tuple[str, int, str, bool]  # checkpoint id, rank, digests of its chunks in hex, True if computed late


class LendReply(Body, frozen=True):
    """The memory of a writer. `trainer`: process id of its trainer. `since`: time when the trainer connected, in
    seconds since 1970. `alive`: the trainer runs, so no other process may continue its run. The descriptors of all
    `arenas` come with the reply; `foreign` arenas are read-only. `acquires`: the history of the snapshots, up to the
    present owner. `roots`: ids of the opened runs, by URL. `sees`: True if the writer sees the file `Lend.proof`.

    For the writer's next trainer: `writing_on`: processes (id and start time) whose devices may write to the arenas
    until they have ended; `lost`: tiers whose run was removed; `writing`: slots that are being written to a tier, by
    arena; `faults`: reports that no trainer has received yet."""

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
    sees: bool = False
    writing_on: list[tuple[int, int]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    writing: list[tuple[str, int]] = field(default_factory=list)
    faults: list[Json] = field(default_factory=list)
    protocol: int = field(default_factory=lambda: PROTOCOL)
    library: str = VERSION


class Lend(Request[LendReply], frozen=True):
    """Lend memory, which other ranks only read. `inherit`: serve this trainer from now on, unless your trainer lives.
    `look`: send no arenas. `digest`: first compute missing digests. `fenced`: first read the log, because the caller
    has fenced your job; send no arenas. `proof`: a temporary file in the nearest tier's folder, see
    `LendReply.sees`."""

    inherit: bool = False
    proof: str = ""
    look: bool = False
    digest: bool = False
    fenced: bool = False
    protocol: int = field(default_factory=lambda: PROTOCOL)
    library: str = VERSION


class TierFound(Body, frozen=True):
    """An opened tier. `checkpoints`: number of checkpoints. `damaged`: numbers of records that cannot be read."""

    root: str
    term: int
    checkpoints: int
    damaged: list[int]


class OpenRunReply(Body, frozen=True):
    """The opened tiers. `cadence`: the measured save intervals of the last job attempt, {} if unknown."""

    tiers: list[TierFound]
    cadence: Json


class OpenRun(Request[OpenRunReply], frozen=True):
    """Open the tiers (see `Tier.spec`) without changing them. `check`: raise an error if another job trains the run.
    `auto`: tiers whose save interval is measured. `first_number`: first number of this writer's data files. `acquires`:
    the history of the memory. `next_nonces`: an ACQUIRE record with one of these nonces is from the writer's own job.
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
    """Take ownership of these tiers for all ranks. Return the new terms. `restored`: checkpoint to continue from."""

    nonce: str
    floor: int
    restored: str | None
    tiers: list[int]


class PartsHere(Body, frozen=True):
    """The ranks whose manifests of a checkpoint are in a tier. `world`: number of ranks that saved the checkpoint."""

    tier: int
    checkpoint: str
    world: int
    ranks: list[int]


class OwnRun(Request[list[PartsHere]], frozen=True):
    """Act as the owner that all ranks have agreed on. Return the manifests on node-local disks in tiers to `recover`.
    `roles`: ranks, place and world for each tier, see `Role`."""

    most_bytes = MOST_BYTES
    owner: Owner
    roles: list[tuple[list[int], int, int]]
    recover: list[int]
    next_nonces: list[str] = field(default_factory=list)


class ContinueRun(Request[None], frozen=True):
    """Continue, because all ranks have recovered. `everywhere`: for tiers on the disks of nodes, the newest checkpoint
    that all nodes have. `resume`: resume copies to further tiers that a crash has interrupted."""

    everywhere: list[tuple[int, str]] = field(default_factory=list)
    resume: bool = False


class Leave(Request[None], frozen=True):
    """Finish the saves in progress and exit, because the trainer is done. `keep`: keep the memory and make it durable,
    as after the trainer's death, although its process may still run. `failed`: an error has ended the training."""

    keep: bool = False
    failed: bool = False


# -- memory --


class MakeArena(Request[str], frozen=True):
    """Make an arena with this number of slots, or fewer, but at least `least`. The reply is the arena's id, and comes
    with its descriptor. `most`: maximum number of slots after the trainer has added some. `ranks`: number of ranks on
    this machine. `node`: the NUMA node near the device."""

    slots: int
    slot_size: int
    least: int
    most: int = 0
    ranks: int = 1
    node: int | None = None


class AttachArena(Request[None], frozen=True):
    """Keep this arena, which is sent as a descriptor. The reply is sent once the arena is kept. `foreign`: another rank
    staged into the arena."""

    descriptors = 1
    foreign: bool = False


class UseArena(Request[None], frozen=True):
    """With `used`, detect the death of the staging thread, which owns the mutex of this arena from now on. Otherwise
    release the arena."""

    arena: str
    used: bool


class KnowLayout(Request[None], frozen=True):
    """Remember a `Layout`, which describes the bytes of a slot."""

    most_bytes = MOST_BYTES
    layout: Json


class Partner(Request[Json], frozen=True):
    """Prepare to keep a copy of another rank's memory. The reply has the contact data of this writer for other nodes.
    `contact`: contact data of the writer of `rank`, which keeps a copy of our memory."""

    contact: Json | None = None
    rank: int = 0


# -- saving --


class WriteSlotReply(Body, frozen=True):
    """The number of bytes of a snapshot, and the number of bytes that were stored for it."""

    nbytes: int
    stored: int


class WriteSlot(Request[WriteSlotReply], frozen=True):
    """Make a checkpoint of a sealed slot in one tier. The reply is sent when it is durable. `stored`: the trainer or an
    earlier writer has already stored its bytes. `arena`: "" if the bytes are in no slot. `replicas`: digests of
    replicated tensors for the manifest, see `format.columns`."""

    most_bytes = MOST_BYTES
    tier: int
    arena: str
    slot: int
    checkpoint: str
    stored: bool = False
    replicas: Json = field(default_factory=dict)


class Retract(Request[None], frozen=True):
    """Abort the checkpoint of a snapshot, or retire it if it is already committed. `tier`: None for all tiers."""

    checkpoint: str
    reason: str
    tier: int | None = None


class KeptReply(Body, frozen=True):
    """The pinned steps. `notes`: step, note, and True if a tier has the step. `saved`: True if a tier has the requested
    step as a checkpoint of this history, or it is being saved."""

    notes: list[tuple[int, str, bool]]
    saved: bool


class KeepSteps(Request[KeptReply], frozen=True):
    """Pin these steps in every tier, each with a note of the reason. Unpin all other steps that a `KeepSteps` has
    pinned. `notes`: None changes nothing. The reply is sent when the run logs contain the notes. It lists the pinned
    steps in the tiers that this rank is responsible for, and reports if they have `step`."""

    most_bytes = MOST_BYTES
    notes: list[tuple[int, str]] | None = None
    step: int = -1


class SavedInTier(Body, frozen=True):
    """The result of saving a step to a tier. `error`: "" if the step is durable."""

    step: int
    tier: str
    seconds: float
    error: str


class Persist(Request[list[SavedInTier]], frozen=True):
    """Make these snapshots durable now, and return the results. `far`: also save the newest snapshot to the tiers
    beyond the nearest one."""

    deadline_s: float
    far: bool
    checkpoints: list[str]


# -- the trainer: run metrics, status, faults --


class CadenceOf(Body, frozen=True):
    """The save interval of a tier or memory. `every`: in steps, or the fields of an `Auto`. `now`: current interval."""

    name: str
    every: int | tuple[float, float | None, float | None]
    now: int
    remote: bool


class Books(Body, frozen=True):
    """The run metrics to record, see `cadence.ledger.Account`. `decides`: True to propose save intervals to the
    trainer. `again`: True if an earlier writer began the record."""

    first_term: str
    places: list[CadenceOf]
    versions: dict[str, str]
    decides: bool = False
    cadence: Json | None = None
    again: bool = False


class RestoreDone(Body, frozen=True):
    """A call of restore(), with the fields of `cadence.ledger.Restore` and the costs of saving up to it. `term`: the
    term after the restore. `damaged`: the tier in which damage was found, so no increment builds on its checkpoints."""

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
    damaged: str = ""


class Introduce(Request[None], frozen=True):
    """Report the status of this trainer from now on, and serve these metrics. Its heartbeat is sent along. `books`:
    record its run metrics too; None on ranks that are not the first in the nearest tier. `restored`: a restore before
    this writer started."""

    descriptors = 1
    url: str
    rank: int
    world: int
    local_rank: int
    opening: float
    opened: float
    metrics: Json | None = None
    books: Books | None = None
    restored: RestoreDone | None = None


class RunEvent(Request[None], frozen=True):
    """The trainer has called restore(), or the ranks have agreed on new save intervals (`decision`, a `Decision`)."""

    restored: RestoreDone | None = None
    decision: Json | None = None


class Look(Request[Json], frozen=True):
    """Return the `RankStatus` of the trainer, to any process of this user. With `evidence`, return {"evidence": [...]}
    with an `Evidence` of what the trainer is doing, or [] if it is not watched. `evidence`: "own" for evidence from
    this writer, "node" also from the writers of the other trainers on this node."""

    evidence: str = ""


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


class Report(Request[str], frozen=True):
    """Write the report of a `Fault`, and return its key. `ends`: the trainer exits because of it, so its death is not
    reported again. `peer`: the sender is the writer of another rank on this node, and reports that rank's death."""

    most_bytes = MOST_BYTES
    fault: Json
    ends: bool = False
    peer: bool = False


class TriggerSaveReply(Body, frozen=True):
    """The trainer that received the request."""

    pid: int
    rank: int
    step: int
    doing: str


class TriggerSave(Request[TriggerSaveReply], frozen=True):
    """A person at a shell on this node requests a save."""

    why: str
