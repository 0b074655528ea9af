"""The named points at which a test may make something fail.

`point("pack.written")` marks a moment that matters for safety. In normal runs it is one comparison with None. Under
test, the environment variable `CKPT_FAIL` arms points, each as `[process/]name:action[:nth]`, several separated by
commas:

    CKPT_FAIL=writer/pack.written:kill:2        SIGKILL the writer the second time it gets there
    CKPT_FAIL=trainer/stage.copied:stop         SIGSTOP the trainer
    CKPT_FAIL=writer/log.linked:eio             raise OSError(EIO)

`POINTS` lists every name, so that tests can visit them all and a misspelt one is refused.
"""

from __future__ import annotations

import errno
import os
import signal

from ckpt.events import log

TRAINER_POINTS = (
    "stage.claimed",  # a slot is marked FILLING
    "stage.eager",  # buffers and plain values are in the slot
    "stage.copied",  # every byte is in the slot, not sealed yet
    "stage.sealed",  # the slot says SEALED
    "save.requested",  # the writer was told to write
    "restore.chosen",  # a checkpoint was chosen, nothing written to the state
    "restore.filled",  # tensors are filled, values not yet
    "run.taken",  # the log says that the run is ours, the writers have not been told
)
WRITER_POINTS = (
    "pack.opened",
    "pack.written",
    "pack.synced",
    "part.stored",
    "index.stored",
    "log.synced",  # the record's temporary file is durable
    "log.linked",  # the record has its name, the directory is not synced
    "log.appended",
    "log.trimming",  # some of the old records are deleted
    "acquire.done",
    "recover.done",
    "plan.landed",
    "sweep.deleted",
    "drain.started",
    "mirror.taken",  # another rank's snapshot is in our memory, not sealed yet
)
INCREMENT_POINTS = (  # of a writer that stores an increment, or compresses
    "packs.stored",  # all of its packs are durable
)
OFFLINE_POINTS = (  # of a command that makes something new of a checkpoint
    "export.window",  # some bytes are about to be written
    "export.whole",  # all is there, and nothing has its name yet
    "export.appeared",  # it has, and what it was made in is still there
)
POINTS = (
    *TRAINER_POINTS,
    *WRITER_POINTS,
    *INCREMENT_POINTS,
    *OFFLINE_POINTS,
)

process = "trainer"  # the writer sets this to "writer" when it starts


def _parse(text: str) -> dict[str, list[object]]:
    armed: dict[str, list[object]] = {}
    for item in filter(None, text.split(",")):
        name, _, rest = item.partition(":")
        action, _, nth = rest.partition(":")
        if name.rpartition("/")[2] not in POINTS:
            raise ValueError(f"CKPT_FAIL names an unknown point: {name!r}")
        armed[name] = [action or "kill", int(nth or 1)]
    return armed


_armed = _parse(os.environ["CKPT_FAIL"]) if os.environ.get("CKPT_FAIL") else None


def point(name: str) -> None:
    """Mark a moment that matters; does nothing unless a test armed it."""
    if _armed is None:
        return
    rule = _armed.get(f"{process}/{name}") or _armed.get(name)
    if rule is None:
        return
    rule[1] = int(str(rule[1])) - 1
    if rule[1] != 0:
        return
    action = rule[0]
    log.warning("fail point %s: %s", name, action)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        number = getattr(errno, str(action).upper())
        raise OSError(number, os.strerror(number))
