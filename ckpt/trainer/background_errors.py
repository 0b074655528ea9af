"""What went wrong in the background: raised by the next call, once."""

from __future__ import annotations

import threading

from ckpt.errors import CheckpointError, FencedError
from ckpt.events import log
from ckpt.save import Save


class BackgroundErrors:
    """Of one Checkpointer. `on_error`: "raise", or "warn", which only logs. `fenced`: the run was taken over, which is
    raised by every call."""

    def __init__(self, on_error: str) -> None:
        self.fenced: FencedError | None = None
        self._on_error = on_error
        self._heard = False  # whether a call has said that we are fenced
        self._noted: list[tuple[CheckpointError, Save | None]] = []
        self._lock = threading.RLock()  # a signal handler may close us meanwhile

    def note(self, error: CheckpointError, save: Save | None = None) -> None:
        """`save`: whoever waits for that one is told by it."""
        with self._lock:
            if isinstance(error, FencedError):
                self.fenced = error
            self._noted.append((error, save))
        log.warning("%s", error)

    def forget(self, save: Save) -> None:
        """What was told of it is dealt with; the next error of it is news."""
        with self._lock:
            self._noted = [(error, of) for error, of in self._noted if of is not save]
        save.told = False

    def check_owner(self) -> None:
        if self.fenced is not None:
            self._heard = True
            raise self.fenced

    def is_known(self, error: CheckpointError) -> bool:
        """Whether a call has said so before."""
        return self._heard and isinstance(error, FencedError)

    def raise_pending(self) -> None:
        with self._lock:
            errors = [error for error, save in self._noted if save is None or not save.told]
            self._noted = []
        errors = [error for error in errors if not self.is_known(error)]
        if not errors or self._on_error == "warn":
            return
        first = errors[0]
        for error in errors[1:]:
            first.add_note(f"also: {error}")
        self._heard |= isinstance(first, FencedError)
        raise first
