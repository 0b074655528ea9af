"""Every error this library raises.

    CheckpointError
    ├── UsageError            the call is wrong; nothing was done
    │   ├── StateError        something in the state cannot be saved; the message names its path
    │   ├── MismatchError     the checkpoint does not fit the state; nothing was changed
    │   └── ClosedError       the Checkpointer was closed, or belongs to the parent process
    ├── NoCheckpointError     there is nothing to restore
    ├── FencedError           a newer job owns this run; this one must stop saving
    ├── InUseError            another process trains this run; nothing was changed
    ├── SaveError             one save failed; training and later saves are unaffected
    │   └── SkippedError      a save was skipped because every slot was busy
    ├── WriterError           the writer process cannot be started
    │   └── NameTakenError    another writer of this run has started meanwhile
    ├── ProtocolError         a message between two processes was not understood, or a writer is of another version
    ├── PeerError             another rank of the job failed, is gone, or disagrees
    ├── DeadlineError         a wait ran past its deadline (also a TimeoutError)
    ├── CorruptError          stored bytes do not match their digest
    ├── FormatError           not a run of ours, or written by a newer version
    └── StoreError            the place where bytes are kept refused
        ├── NotFoundError     no such object
        ├── TruncatedError    an object is shorter than it must be
        ├── UnreadableError   a checkpoint cannot be read now, so nothing is known about its bytes
        ├── ExistsError       create-if-absent found it present
        ├── FullError         no space left
        ├── AccessError       no such bucket, no permission, or credentials that do not hold
        ├── RunGoneError      the folder or bucket is no longer the run that was opened there
        ├── TransferError     bytes did not get from one rank to another
        └── OutcomeUnknownError   a commit may or may not have landed

Two questions matter to a program: is it the user's to fix (`UsageError`), and is it worth a retry (`retryable`)? A
person asks what is safe, and what to do next: the message says what is particular to it, and each class but UsageError
has `advice`, which a traceback shows below the message (as a note, PEP 678) and commands print after it, with the run
that they were given in place of RUN.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


class CheckpointError(Exception):
    """Base of every error here. `advice`: what is safe, and what to do next."""

    retryable = False
    advice = ""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        if self.advice:
            self.add_note(self.advice)


class UsageError(CheckpointError):
    """The call is wrong, and the message says how; nothing was done."""


class StateError(UsageError):
    """Something in the state cannot be saved safely."""

    advice = (
        "Nothing was saved of this step; what was saved before is untouched. Change that entry, or leave it "
        "out of the state."
    )


class MismatchError(UsageError):
    """The checkpoint does not fit the state it is restored into; nothing was changed."""

    advice = "Neither the state nor the checkpoint was changed. `ckpt show RUN` lists what is stored."


class ClosedError(UsageError):
    """The Checkpointer is closed, or this is a forked child of the process that made it."""

    advice = "Nothing was done; what was saved before is untouched."


class NoCheckpointError(CheckpointError):
    """There is nothing to restore."""

    advice = (
        "Nothing was changed. `ckpt ls RUN` lists what a run has. restore(default=0) begins anew where "
        "there is nothing."
    )


class FencedError(CheckpointError):
    """Another, newer job has taken this run over."""

    advice = (
        "What this job committed stays part of the run. Only the newer job saves from now on: end this one, "
        "or give it a location of its own."
    )


class InUseError(CheckpointError):
    """Another process trains this run. It goes on, and nothing was changed."""

    advice = (
        "Stop that process first, and go on from its newest step; or pass takeover=True, which fences that job and "
        "goes on from its newest checkpoint in a tier. "
        "To look at what is stored, `ckpt show RUN` only reads, and so does ckpt.load."
    )


class SaveError(CheckpointError):
    """One save failed. The training state is unaffected, and later saves are tried as ever."""

    advice = (
        "The training state is untouched, and later saves are tried as ever. `ckpt doctor RUN` tries out what a store "
        "can do."
    )


class SkippedError(SaveError):
    """This step was not saved, because every slot was busy, or memory was not ready or is short."""

    advice = (
        "Older checkpoints are untouched, and later steps are tried as ever. Saving less often "
        '(every="auto") leaves out fewer.'
    )


class WriterError(CheckpointError):
    """The writer process cannot be started or keeps dying."""

    advice = (
        "Checkpoints in folders and buckets are untouched. Start the training again once the cause is gone: "
        "it goes on from them."
    )


class NameTakenError(WriterError):
    """Another writer of this run has started on this machine meanwhile."""


class ProtocolError(CheckpointError):
    """A message was not understood, or the writer that holds a run's memory is of another version of this library."""

    advice = (
        "Nothing was changed, and nobody was ended: a writer goes on with what it holds. Start with the version of "
        "everystep that it has."
    )


class PeerError(CheckpointError):
    """Another rank of the job failed, is gone, or wants something else than this one."""

    advice = (
        "Committed checkpoints are untouched. Look at the log of the rank that is named, and start all ranks "
        "again together."
    )


class DeadlineError(CheckpointError, TimeoutError):
    """A wait ran past its deadline."""

    advice = (
        "Nothing that was committed is lost. `ckpt top RUN` shows what the run is doing; `ckpt doctor RUN` "
        "whether a store answers."
    )

    retryable = True


class CorruptError(CheckpointError):
    """Stored bytes do not match their digest, or a file is not what it says it is."""

    advice = (
        "Nothing was taken from the damaged bytes. `ckpt verify RUN` says what is whole. `ckpt repair RUN "
        "--from OTHER` mends."
    )


class FormatError(CheckpointError):
    """Not a run of this library, or written by a newer version of it."""

    advice = "Nothing was changed there. `ckpt import` makes a run of other programs' files."


class StoreError(CheckpointError):
    """A store could not do what was asked."""

    advice = (
        "What was committed before is untouched. `ckpt doctor RUN` tries out what a store can do, and says "
        "what is wrong."
    )

    def __init__(self, message: str, *, retryable: bool = False, advice: str | None = None) -> None:
        if advice is not None:
            self.advice = advice  # where it is no run that refused
        super().__init__(message)
        self.retryable = retryable


class NotFoundError(StoreError):
    """No such object."""


class TruncatedError(StoreError):
    """The object ends before the bytes that were requested."""


class UnreadableError(StoreError):
    """A checkpoint cannot be read at the moment, so nothing is known about its bytes. No other one is used instead."""

    advice = (
        "Nothing was changed, and the checkpoint may be intact. Restore access to its files (mount, permissions, open "
        "file limit, credentials) and start again. To continue from an older step, name it: restore(step=N)."
    )


class ExistsError(StoreError):
    """Create-if-absent found the object present."""


class FullError(StoreError):
    """No space left."""

    advice = (
        "What was committed before is untouched. `ckpt prune RUN --keep-last 3` and `ckpt gc RUN` make room; "
        "both show a plan first. A tier keeps all checkpoints unless its Tier says otherwise: keep=3 keeps three."
    )


class AccessError(StoreError):
    """The place is not there, or refuses us: no such bucket, no permission, expired or wrong credentials."""


class RunGoneError(StoreError):
    """The folder or bucket is no longer the run that was opened there."""

    advice = (
        "Put the run back, and later saves go there again; or start the training again. Steps in memory stay there "
        "until a new run begins."
    )

    @classmethod
    def of(cls, url: str) -> RunGoneError:
        return cls(
            f"{url} is no longer this run: it was deleted, moved, emptied or replaced while the job ran. This save is "
            "not stored there"
        )


class TransferError(StoreError):
    """Bytes that one rank had read did not get to another that wants them."""


class OutcomeUnknownError(StoreError):
    """A commit was sent and no answer came in time: it may or may not have landed. Nothing was deleted."""

    advice = (
        "What was to be recorded is there as a whole, or not at all: `ckpt ls RUN` says which. Later saves find out by "
        "themselves."
    )


def is_unreadable(error: BaseException) -> bool:
    """Return True if the error says nothing about stored bytes: the store did not deliver them.

    An object that is absent or too short is damage. Every other failure of a store, from EACCES to a timeout, may pass.
    """
    return isinstance(error, StoreError) and not isinstance(error, (NotFoundError, TruncatedError))


MENDABLE = (
    UsageError,
    NoCheckpointError,
    FencedError,
    InUseError,
    SaveError,
    FormatError,
    StoreError,
)  # by who reads them


def at_door(function: Callable[P, R]) -> Callable[P, R]:
    """What is the user's to mend comes out of this function without our frames and causes: the last line is the
    caller's. The logger "ckpt" has all of them, at DEBUG."""

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except MENDABLE as error:
            logging.getLogger("ckpt").debug("an error in %s", function.__qualname__, exc_info=True)
            raise error.with_traceback(None) from None

    return entered


SPECIAL = ("__init__", "__exit__", "__getitem__")


def door(kind: C) -> C:
    """The same for a class that people hold: of all its public methods."""
    for name, one in list(vars(kind).items()):
        if isinstance(one, FunctionType) and (name in SPECIAL or not name.startswith("_")):
            setattr(kind, name, at_door(one))
    return kind


def to_wire(error: BaseException) -> dict[str, Any]:
    """The error as JSON, to cross from the writer to the trainer, or to another rank."""
    message = str(error) or type(error).__name__
    if not isinstance(error, CheckpointError):
        message = f"{type(error).__name__}: {message}"
    return {"error": type(error).__name__, "message": message, "retryable": getattr(error, "retryable", False) is True}


def from_wire(message: dict[str, Any]) -> CheckpointError:
    """The other end of `to_wire`; an unknown class becomes a plain CheckpointError."""
    found = globals().get(message["error"])
    known = isinstance(found, type) and issubclass(found, CheckpointError)
    error: CheckpointError = (found if known else CheckpointError)(message["message"])  # type: ignore[misc]
    error.retryable = bool(message.get("retryable", False))
    return error
