"""The port to whoever watches the trainer: what the core of the writer calls when a trainer dies, changes or ends.

The core notices by itself that a trainer has died, and saves what is in memory. A watch finds out why it died, whether
it hangs, and whether memory runs out. `ckpt.guard.fault_reports` is one; `ckpt.writer_process` passes it to the core.

    the core calls    the methods below
    a watch handles   its own requests, by `@handles` methods
    a watch reads     `PresentTrainer`, `HeldRun`, `HeldMemory`, `Drain`
    a watch writes    `PresentTrainer.crashed`, which is earlier than the end of the process, `PresentTrainer.announced`
                      if the trainer has explained its end, and `Bookkeeper.fault`
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ckpt.core.ipc.requests import Json


class TrainerWatch(Protocol):
    """Watches the present trainer, once the trainer has asked for it. All methods are called in the event loop."""

    def died(self, drained: asyncio.Event) -> None:
        """Report the end of a trainer that has died, left or lost the run, unless it has announced that itself.

        drained: set once what is in memory is durable; never, if the next trainer comes first.
        """

    def hand_over(self) -> list[Json]:
        """Stop watching: another trainer comes. Return the reports that no trainer has received yet."""

    def stop(self) -> None:
        """Stop watching: the trainer has closed, or has lost the run."""
