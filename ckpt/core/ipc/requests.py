"""Requests: what a writer is asked, and what it answers. `ckpt.core.writer` says who deals with them (`handles`).

Arenas go by the hex digits of their id, attempts by their text, tiers by their number. What has a form of its own
elsewhere (a layout, a fault, a tier) is that form in JSON, and is checked where it is parsed.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from ckpt.core.ipc.protocol import MOST_BYTES, PROTOCOL, Body, Request
from ckpt.version import VERSION

Json = dict[str, Any]
Owner = tuple[int, str, str | None]  # epoch, nonce, and the attempt that it went back to
Digest = tuple[str, int, str, bool]  # attempt, rank, the digests of its blobs in hex, and whether they came late

# -- whose run it is --


class GreetingReply(Body, frozen=True):
    """What a writer holds, and who it is. `trainer`: its process, `alive`: it lives and is not dead to the writer,
    `taken`: it lives and has lost the run just now, `gone`: nobody writes to the arenas any more. `lost`: tiers whose
    run was removed; `losers`: who has lost the run, and lives; `foreign`: arenas that other ranks staged into;
    `writing`: slots, by arena, that are being written. The descriptors of all `arenas` come with it."""

    pid: int
    alive: bool
    taken: bool
    trainer: int
    since: float
    gone: bool
    lost: list[str]
    arenas: list[str]
    foreign: list[str]
    layouts: dict[str, Json]
    digests: list[Digest]
    writing: list[tuple[str, int]]
    acquires: list[Owner]
    faults: list[Json]
    losers: list[int]
    protocol: int = PROTOCOL
    library: str = VERSION


class Greeting(Request[GreetingReply], frozen=True):
    """A trainer comes, which is the writer's from now on: unless it only is on a `visit`, or the present one lives and
    this is no `takeover`. `losers`: processes that have lost the run to it. (Not `hello`: writers of before there were
    versions would give it their memory.)"""

    takeover: bool = False
    visit: bool = False
    losers: list[int] = field(default_factory=list)
    protocol: int = PROTOCOL
    library: str = VERSION


class WhoseReply(Body, frozen=True):
    """The trainer's process, epoch and nonce that were opened, and processes that have lost the run and are there.
    `roots`: by URL, the ids of the runs that were opened; `sees`: whether the writer sees the file of the question."""

    trainer: int
    owner: tuple[int, str] | None
    losers: list[int]
    roots: dict[str, str]
    sees: bool


class Whose(Request[WhoseReply], frozen=True):
    """Whose run is it, as far as the writer knows? `proof`: a temporary file in the folder of the nearest tier, by
    which the two find out whether they see the same folder; "" for none."""

    proof: str = ""


class Lose(Request[None], frozen=True):
    """Another job takes the run over: the trainer has lost it."""


class Drop(Request[bool], frozen=True):
    """A new run has begun at this path or URL. The writer checks whether that is so in all of its tiers. If it is, and
    its trainer is dead, the writer releases its memory and ends. Replied with whether it does."""


class TierFound(Body, frozen=True):
    """A tier that was opened. `checkpoints`, `damaged`: how many, and records that cannot be read."""

    root: str
    epoch: int
    checkpoints: int
    damaged: list[int]


class OpenRunReply(Body, frozen=True):
    """The tiers as they were found; `cadence`: what the last incarnation saved by, {} for unknown."""

    tiers: list[TierFound]
    cadence: Json


class OpenRun(Request[OpenRunReply], frozen=True):
    """Open the tiers (see `Tier.spec`), without changing anything in them. `check`: refuse if somebody trains the run;
    `auto`: tiers whose cadence is to be found out; `first_try`: of all parts; `acquires`: the history of the memory;
    `next_nonces`: an ACQUIRE with one of these is by the writer's own job;
    `roots`: the ids that the runs in these tiers must have, "" for any."""

    tiers: list[Json]
    linger_s: float
    commit_s: float
    acquires: list[Owner]
    auto: list[str]
    first_try: int = 0
    check: bool = False
    next_nonces: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)


class AcquireRun(Request[list[int]], frozen=True):
    """Take these tiers over, for all ranks, with `restored` as a rollback to there: the epochs that they gave."""

    nonce: str
    floor: int
    restored: str | None
    tiers: list[int]


class PartsHere(Body, frozen=True):
    """Of an attempt of `world` ranks, the parts of these ranks are in a tier."""

    tier: int
    attempt: str
    world: int
    ranks: list[int]


class OwnRun(Request[list[PartsHere]], frozen=True):
    """All ranks have agreed who the owner is: what the disks of single nodes hold a part of, in the tiers to `recover`.
    `roles`: of each tier ranks, place and world, see `Role`."""

    most_bytes = MOST_BYTES
    owner: Owner
    roles: list[tuple[list[int], int, int]]
    recover: list[int]
    next_nonces: list[str] = field(default_factory=list)


class Resume(Request[None], frozen=True):
    """All ranks have recovered: go on with what a crash has interrupted."""


class Complete(Request[None], frozen=True):
    """The other nodes hold their parts of these attempts too."""

    tier: int
    attempts: list[str]


class Distrust(Request[None], frozen=True):
    """A restore found damage in this tier: no checkpoint that is there now is built on."""

    url: str


class Taken(Request[None], frozen=True):
    """Another writer has these arenas as well, and goes on."""

    arenas: list[str]


class Leave(Request[None], frozen=True):
    """The trainer lets go of everything, and may live on: as if it had died."""


class Close(Request[None], frozen=True):
    """The trainer is done: finish what was begun, and leave. `failed`: an error has ended the training."""

    failed: bool = False


# -- memory --


class MakeArena(Request[str], frozen=True):
    """Make an arena of so many slots, or of fewer but at least `least`: its id, and its descriptor. `ranks`: so many
    share this machine; `node`: of its memory, by which the device is."""

    slots: int
    slot_size: int
    least: int
    ranks: int = 1
    node: int | None = None


class KeepArena(Request[None], frozen=True):
    """The trainer has seen that nobody keeps this arena; it looks again when this is answered."""

    arena: str


class HandedOver(Request[None], frozen=True):
    """A writer that took a dead one's place has been given all that its trainer has. Answered when it keeps it."""


class AttachArena(Request[None], frozen=True):
    """An arena, by its descriptor, that the writer is to hold; `foreign`: other ranks staged into it."""

    descriptors = 1
    foreign: bool = False


class WatchArena(Request[None], frozen=True):
    """The staging thread holds the mutex of this arena from now on."""

    arena: str


class ReleaseArena(Request[None], frozen=True):
    """This arena is not needed any more."""

    arena: str


class KnowLayout(Request[None], frozen=True):
    """What the bytes of a slot are: a `Layout`."""

    most_bytes = MOST_BYTES
    layout: Json


class AskDigests(Request[list[Digest]], frozen=True):
    """The digests of snapshots that are known so far; of all, if told."""

    all: bool = False


class Serve(Request[Json], frozen=True):
    """Be ready to keep a copy of another rank's memory: how the writer is reached from other nodes."""


class Partner(Request[None], frozen=True):
    """Who keeps a copy of our memory, which is that of `rank`."""

    contact: Json
    rank: int


class Push(Request[None], frozen=True):
    """A snapshot was sealed: have it copied to the partner."""

    arena: str
    slot: int
    attempt: str


# -- saving --


class WriteSlotReply(Body, frozen=True):
    """Bytes of the snapshot, and of what was stored for it."""

    nbytes: int
    stored: int


class WriteSlot(Request[WriteSlotReply], frozen=True):
    """Make a checkpoint of a sealed slot in one tier; answered when it is durable. `stored`: a writer before this one
    has stored its bytes already. `replicas`: what its part says of replicated tensors, see `format.replicas`."""

    most_bytes = MOST_BYTES
    tier: int
    arena: str
    slot: int
    attempt: str
    stored: bool = False
    replicas: Json = field(default_factory=dict)


class Retract(Request[None], frozen=True):
    """A snapshot must not become a checkpoint, or not stay one."""

    attempt: str
    reason: str


class SavedInTier(Body, frozen=True):
    """What became of a step in a tier; no `error` if it is durable."""

    step: int
    tier: str
    seconds: float
    error: str


class KeepSteps(Request[None], frozen=True):
    """These steps stay in every tier, however old they get, each with a note that says why. What was kept by such a
    request before, and is not among them, may go again. Answered when the run logs say so of those that are there."""

    most_bytes = MOST_BYTES
    notes: list[tuple[int, str]]


class KeptReply(Body, frozen=True):
    """`notes`: step, note, and whether it is there, of what a training has asked to be kept; `saved`: whether the step
    in question is a checkpoint of this history somewhere, or is about to be one."""

    notes: list[tuple[int, str, bool]]
    saved: bool


class AskKept(Request[KeptReply], frozen=True):
    """What stays in the tiers that this rank speaks for, and whether a step is there."""

    step: int


class Persist(Request[list[SavedInTier]], frozen=True):
    """Make these attempts in memory durable, now: what became of each. `far`: the newest in further tiers as well."""

    deadline_s: float
    far: bool
    attempts: list[str]
