"""The two halves of opening a run: the constructor starts the writer, the first call that needs the run finishes it.

Between them the writer's process starts beside the script's own start. There is no thread: all ranks come to the second
half by a call that they all make, and agree there.
"""

from __future__ import annotations

import contextlib

from ckpt.errors import ClosedError, UsageError
from ckpt.trainer.session import Session


class Opening:
    """Of one Checkpointer. `unfinished`: the run is neither open nor given up; `under_way`: it is being opened.
    `undo`: what ends again all that the constructor began."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.unfinished, self.under_way = True, False
        self.undo = contextlib.ExitStack()

    def finish(self) -> None:
        """Have the run open, once; for one thread at a time. Raises what is wrong with the run, after which nothing is
        left of it, and this Checkpointer is closed. So it is by Ctrl-C."""
        if not self.unfinished:
            return
        if self.under_way:
            raise UsageError("the run is just being opened: from a signal handler it can only be closed")
        self.under_way = True
        try:
            self._session.open()
            if not self.unfinished:
                raise ClosedError("this Checkpointer was closed while it opened the run")
            self.undo.pop_all()
            self.unfinished = False
        except BaseException:
            self.give_up()
            raise
        finally:
            self.under_way = False

    def give_up(self) -> None:
        """Nobody needs the run: it stays as it was, and what its writer held of it stays with that."""
        self.unfinished = False
        self.undo.close()
