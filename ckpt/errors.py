"""Every error this library raises.

    CheckpointError
    ├── UsageError            the call is wrong; nothing was done
    │   ├── StateError        something in the state cannot be saved; the message names its path
    │   ├── MismatchError     the checkpoint does not fit the state; nothing was changed
    │   └── ClosedError       the Checkpointer was closed, or belongs to the parent process
    ├── NoCheckpointError     there is nothing to restore
    ├── FencedError           a newer job owns this run; this one must stop saving
    ├── SaveError             one save failed; training and later saves are unaffected
    │   └── SkippedError      a save was skipped because every slot was busy
    ├── WriterError           the writer process cannot be started
    ├── PeerError             another rank of the job failed, is gone, or disagrees
    ├── DeadlineError         a wait ran past its deadline (also a TimeoutError)
    ├── CorruptError          stored bytes do not match their digest
    ├── FormatError           not a run of ours, or written by a newer version
    └── StoreError            the place where bytes are kept refused
        ├── NotFoundError     no such object
        ├── ExistsError       create-if-absent found it present
        ├── FullError         no space left
        ├── AccessError       no such bucket, no permission, or credentials that do not hold
        ├── TransferError     bytes did not get from one rank to another
        └── OutcomeUnknownError   a commit may or may not have landed

Two questions matter about an error: is it the user's to fix (`UsageError`), and is it worth a retry (`retryable`)?
"""

from __future__ import annotations

from typing import Any


class CheckpointError(Exception):
    """Base of every error here."""

    retryable = False


class UsageError(CheckpointError):
    """The call is wrong; nothing was done."""


class StateError(UsageError):
    """Something in the state cannot be saved safely."""


class MismatchError(UsageError):
    """The checkpoint does not fit the state it is restored into; nothing was changed."""


class ClosedError(UsageError):
    """The Checkpointer is closed, or this is a forked child of the process that made it."""


class NoCheckpointError(CheckpointError):
    """There is nothing to restore."""


class FencedError(CheckpointError):
    """Another, newer job has taken this run over."""


class SaveError(CheckpointError):
    """One save failed. The state in memory, older checkpoints and later saves are unaffected."""


class SkippedError(SaveError):
    """This step was not saved, because every slot was busy or memory was not ready."""


class WriterError(CheckpointError):
    """The writer process cannot be started or keeps dying."""


class PeerError(CheckpointError):
    """Another rank of the job failed, is gone, or wants something else than this one."""


class DeadlineError(CheckpointError, TimeoutError):
    """A wait ran past its deadline."""

    retryable = True


class CorruptError(CheckpointError):
    """Stored bytes do not match their digest, or a file is not what it says it is."""


class FormatError(CheckpointError):
    """Not a run of this library, or written by a newer version of it."""


class StoreError(CheckpointError):
    """A store could not do what was asked."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class NotFoundError(StoreError):
    """No such object."""


class ExistsError(StoreError):
    """Create-if-absent found the object present."""


class FullError(StoreError):
    """No space left."""


class AccessError(StoreError):
    """The place is not there, or refuses us: no such bucket, no permission, expired or wrong credentials."""


class TransferError(StoreError):
    """Bytes that one rank had read did not get to another that wants them."""


class OutcomeUnknownError(StoreError):
    """A commit was sent and no answer came in time: it may or may not have landed. Nothing was deleted."""


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
