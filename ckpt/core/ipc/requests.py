"""Requests to a writer, and its replies. Methods with the decorator `handles` in `ckpt.core.writer` process them.

Arenas are identified by their id in hex, checkpoints by the text of their id, tiers by their number. Objects that other
modules define (a layout, a fault, a tier) are sent as their JSON form, and validated when they are parsed.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from ckpt.core.ipc.protocol import MOST_BYTES, PROTOCOL, Body, Request
from ckpt.version import VERSION

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
    epoch: int
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
    attempt: str
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
    attempts: list[str]


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
    attempt: str


# -- saving --


class WriteSlotReply(Body, frozen=True):
    """Bytes of the snapshot, and bytes that were stored for it."""

    nbytes: int
    stored: int


class WriteSlot(Request[WriteSlotReply], frozen=True):
    """Make a checkpoint of a sealed slot in one tier. The reply is sent when it is durable. `stored`: the trainer or an
    earlier writer has already stored its bytes. `arena`: "" if no slot has them. `replicas`: digests of replicated
    tensors for its manifest, see `format.replicas`."""

    most_bytes = MOST_BYTES
    tier: int
    arena: str
    slot: int
    attempt: str
    stored: bool = False
    replicas: Json = field(default_factory=dict)


class Retract(Request[None], frozen=True):
    """Abort the checkpoint of a snapshot, or retire it if it is committed already."""

    attempt: str
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
    attempts: list[str]
