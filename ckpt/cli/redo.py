"""What commands say of a run's redo log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ckpt.cli.terminal import count_of, human, say, told
from ckpt.format.manifest import REDO, Attempt
from ckpt.runlog.log import RunLog
from ckpt.store import folder_of


def redo_lines(steps: list[dict[str, Any]]) -> Iterator[str]:
    """What the redo log leads to beyond the newest checkpoint."""
    if steps:
        last = steps[-1]
        how = "is loaded" if last["from_checkpoint"] else "is read from the log"
        size = human(sum(one["stored"] for one in steps) // len(steps))
        yield (
            f"redo log: steps {steps[0]['step']} to {last['step']}, {size} each; to restore the last one, step "
            f"{last['base']} {how}, and {count_of(last['redone'], 'step')} after it redone"
        )


def redo_of(log: RunLog) -> list[dict[str, Any]]:
    """What the redo log leads to. What it does not lead to any more is said on stderr."""
    if not has_redo(log):
        return []
    from ckpt.restore import redo_logs

    logs = redo_logs.look(log.store.url, verify=False)
    found = redo_logs.redoable(logs, log)
    if damage := logs.losses({**log.state.held, **log.state.commits}, log.state.acquires):
        say(f"WARNING: {told(log, damage, [Attempt.parse(one.attempt) for one in found])}")
    return [asdict(one) for one in found]


def has_redo(log: RunLog) -> bool:
    root = folder_of(log.store.url)
    return root is not None and (root / REDO).is_dir()
