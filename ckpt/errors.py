"""The exceptions of this library.

    CheckpointError
    ├── UsageError            the call is wrong, or comes at the wrong moment; nothing was done
    │   ├── InvalidArgumentError  an argument is wrong (also a ValueError)
    │   ├── StateError        something in the state cannot be saved; the message names its path
    │   ├── MismatchError     the checkpoint does not fit the state; nothing was changed
    │   └── ClosedError       the Checkpointer was closed, or belongs to the parent process
    ├── NoCheckpointError     there is no run, or no checkpoint to restore
    ├── FencedError           a newer job owns this run; this one must stop saving
    ├── InUseError            another process trains this run; nothing was changed
    ├── SaveError             one save failed; training and later saves are unaffected
    │   └── SkippedError      a save was skipped because every slot was busy
    ├── WriterError           the writer process cannot be started
    │   └── NameTakenError    another writer of this run has started
    ├── ProtocolError         a message between processes cannot be decoded, or the versions of the processes differ
    ├── PeerError             another rank of the job failed, is gone, or disagrees
    ├── DeadlineError         a wait exceeded its timeout (also a TimeoutError)
    ├── CorruptError          stored bytes do not match their digest
    ├── FormatError           files that this library did not write, or that a newer version wrote
    └── StoreError            a folder or bucket refused an operation
        ├── NotFoundError     no such object
        ├── TruncatedError    an object is shorter than it must be
        ├── UnreadableError   a checkpoint cannot be read now, so nothing is known about its bytes
        ├── ExistsError       create-if-absent found the object present
        ├── FullError         no space left
        ├── AccessError       no such bucket, no permission, or invalid credentials
        ├── RunGoneError      the folder or bucket no longer contains the run that was opened
        ├── TransferError     bytes were not transferred from one rank to another
        └── OutcomeUnknownError   no reply to a commit arrived: it may or may not be recorded

A program checks two things: whether the user must fix the call (`UsageError`), and whether a retry may help
(`retryable`). A person needs to know what is safe and what to do next. The message states the details, and the class
attribute `advice` the rest. A traceback shows the advice below the message (as a note, PEP 678). Commands print the
advice after the message, and replace RUN by the run that the user named.
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
    """Base class of all errors of this library. `advice`: which data is safe, and what to do next."""

    retryable = False
    advice = ""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        if self.advice:
            self.add_note(self.advice)


class UsageError(CheckpointError):
    """The call is wrong, or comes at the wrong moment, so nothing was done. The message explains how to correct it."""


class InvalidArgumentError(UsageError, ValueError):
    """An argument is wrong, so nothing was done. The message has its name, its value and the rule."""


class StateError(UsageError):
    """An entry of the state cannot be saved safely."""

    advice = (
        "This step was not saved; earlier checkpoints are unchanged. Change that entry, or leave it out of the state."
    )


class MismatchError(UsageError):
    """The checkpoint does not fit the state that it is restored into. Nothing was changed."""

    advice = "Neither the state nor the checkpoint was changed. `ckpt show RUN` lists what is stored."


class ClosedError(UsageError):
    """The Checkpointer was closed, or this process was forked from the one that created it."""

    advice = "Nothing was done; earlier checkpoints are unchanged."


class NoCheckpointError(CheckpointError):
    """There is no run at the location, or the run has no such checkpoint."""

    advice = (
        "Nothing was changed. `ckpt ls RUN` lists the checkpoints of a run. restore(default=0) starts from zero if "
        "there is none."
    )


class FencedError(CheckpointError):
    """A newer job has taken ownership of this run."""

    advice = (
        "Checkpoints that this job committed stay in the run. Only the newer job can save from now on: end this "
        "job, or give it another location."
    )


class InUseError(CheckpointError):
    """Another process trains this run. It continues, and nothing was changed."""

    advice = (
        "Stop that process first, or pass takeover=True to fence it and continue from its newest "
        "checkpoint in a tier. "
        "`ckpt show RUN` and ckpt.load only read, so they work while it trains."
    )


class SaveError(CheckpointError):
    """One save failed. The training state is unaffected, and later saves are attempted normally."""

    advice = (
        "The training state is unchanged, and later saves are attempted normally. `ckpt doctor RUN` tests whether the "
        "store works."
    )
    next_is_full = False  # True if the next checkpoint of the tier must not be an increment


class SkippedError(SaveError):
    """This step was not saved, because every slot was busy or memory was not available."""

    advice = (
        "Older checkpoints are unchanged, and later saves are attempted normally. Saving less often "
        '(every="auto") skips fewer steps.'
    )


class WriterError(CheckpointError):
    """The writer process cannot be started, or ends repeatedly."""

    advice = (
        "Checkpoints in folders and buckets are unchanged. Fix the cause and start the training again: "
        "it continues from them."
    )


class NameTakenError(WriterError):
    """Another writer of this run has started on this machine."""


class ProtocolError(CheckpointError):
    """A message could not be decoded, or the writer that holds a run's memory is of another version of this library."""

    advice = (
        "Nothing was changed. A writer of the other version keeps running and keeps its memory. Use its version of "
        "everystep to continue from it."
    )


class PeerError(CheckpointError):
    """Another rank of the job failed, is gone, or requested something different."""

    advice = (
        "Committed checkpoints are unchanged. Check the log of the rank that is named, and start all ranks "
        "again together."
    )


class DeadlineError(CheckpointError, TimeoutError):
    """A wait exceeded its timeout."""

    advice = (
        "Committed checkpoints are not affected. `ckpt top RUN` shows what the run is doing; `ckpt doctor RUN` "
        "tests whether the store responds."
    )

    retryable = True


class CorruptError(CheckpointError):
    """Stored bytes do not match their digest, or a file is not of the expected kind."""

    advice = (
        "No damaged bytes were used. `ckpt verify RUN` lists which checkpoints are intact. `ckpt repair RUN "
        "--from OTHER` repairs them from another copy."
    )


class FormatError(CheckpointError):
    """The location contains files that this library did not write, or that a newer version wrote."""

    advice = "Nothing was changed there. `ckpt import` converts files of other programs into a run."


class StoreError(CheckpointError):
    """A store could not complete an operation."""

    advice = "Earlier checkpoints are unchanged. `ckpt doctor RUN` tests the store and reports what is wrong."

    def __init__(self, message: str, *, retryable: bool = False, advice: str | None = None) -> None:
        if advice is not None:
            self.advice = advice  # for stores that do not contain a run
        super().__init__(message)
        self.retryable = retryable


class NotFoundError(StoreError):
    """The store has no such object."""


class TruncatedError(StoreError):
    """The object ends before the bytes that were requested."""


class UnreadableError(StoreError):
    """A checkpoint cannot be read now, and may be intact. No older checkpoint is used in its place."""

    advice = (
        "Nothing was changed, and the checkpoint may be intact. Restore access to its files (mount, permissions, open "
        "file limit, credentials) and start again. To continue from an older step, name it: restore(step=N)."
    )


class ExistsError(StoreError):
    """Create-if-absent found that the object exists."""


class FullError(StoreError):
    """The store has no space left."""

    advice = (
        "Earlier checkpoints are unchanged. `ckpt prune RUN --keep-last 3` and `ckpt gc RUN` free space; "
        "both show a plan first. By default a tier keeps all checkpoints; a Tier with keep=3 keeps the newest three."
    )


class AccessError(StoreError):
    """The bucket or folder does not exist, or access is denied: no permission, expired or wrong credentials."""


class RunGoneError(StoreError):
    """The folder or bucket no longer contains the run that was opened there."""

    advice = (
        "Restore the run at its location, so that later saves go there again, or restart the training. Steps in memory "
        "stay in memory until a new run begins."
    )

    @classmethod
    def of(cls, url: str) -> RunGoneError:
        return cls(
            f"{url} is no longer this run: it was deleted, moved, emptied or replaced while the job ran. This save is "
            "not stored there"
        )


class TransferError(StoreError):
    """Bytes that one rank has read could not be sent to another rank that needs them."""


class OutcomeUnknownError(StoreError):
    """A commit was sent, but no response arrived in time: it may or may not be recorded. Nothing was deleted."""

    advice = (
        "The checkpoint is recorded completely or not at all: `ckpt ls RUN` shows which. Later saves detect it "
        "automatically."
    )


def is_unreadable(error: BaseException) -> bool:
    """Return True if the store did not deliver the bytes, so that the bytes may be intact.

    An object that is absent or too short is damaged. Any other failure of a store, from EACCES to a timeout, may pass.
    """
    return isinstance(error, StoreError) and not isinstance(error, (NotFoundError, TruncatedError))


USER_ERRORS = (
    UsageError,
    NoCheckpointError,
    FencedError,
    InUseError,
    SaveError,
    FormatError,
    StoreError,
)  # classes of errors whose cause the user can correct


def public_function(function: Callable[P, R]) -> Callable[P, R]:
    """Raise errors that a user can correct without this library's frames, so that a traceback ends at the user's call.

    The logger "ckpt" records the full traceback at DEBUG.
    """

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except USER_ERRORS as error:
            logging.getLogger("ckpt").debug("an error in %s", function.__qualname__, exc_info=True)
            raise error.with_traceback(None) from None

    return entered


SPECIAL = ("__init__", "__exit__", "__getitem__")


def public_class(kind: C) -> C:
    """Apply `public_function` to all public methods of a class."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and (name in SPECIAL or not name.startswith("_")):
            setattr(kind, name, public_function(method))
    return kind


def to_wire(error: BaseException) -> dict[str, Any]:
    """Convert an error to JSON, so that the writer can send it to the trainer or to another rank."""
    message = str(error) or type(error).__name__
    if not isinstance(error, CheckpointError):
        message = f"{type(error).__name__}: {message}"
    return {"error": type(error).__name__, "message": message, "retryable": getattr(error, "retryable", False) is True}


def from_wire(message: dict[str, Any]) -> CheckpointError:
    """Convert the JSON of `to_wire` back to an error. An unknown class becomes CheckpointError."""
    kind = globals().get(message["error"])
    known = isinstance(kind, type) and issubclass(kind, CheckpointError)
    error: CheckpointError = (kind if known else CheckpointError)(message["message"])  # type: ignore[misc]
    error.retryable = bool(message.get("retryable", False))
    return error
