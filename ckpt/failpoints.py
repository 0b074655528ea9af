"""Named points at which a test can inject a failure.

`point("file.written")` marks a moment at which a failure must not lose data. Normally it costs one comparison with
None. In tests, the environment variable `CKPT_FAIL` arms points, each as `[process/]name:action[:nth]`, with commas:

    CKPT_FAIL=writer/data file.written:kill:2        SIGKILL the writer when it reaches the point the second time
    CKPT_FAIL=trainer/stage.copied:stop         SIGSTOP the trainer
    CKPT_FAIL=writer/log.linked:eio             raise OSError(EIO)

`POINTS` lists all names, so that tests can visit each one. An unknown name is rejected.
"""

from __future__ import annotations

import errno
import os
import signal

from ckpt.events import log

TRAINER_POINTS = (
    "stage.claimed",  # the slot is labelled FILLING
    "stage.eager",  # buffers and plain values are in the slot
    "stage.copied",  # every byte is in the slot, but it is not sealed yet
    "stage.sealed",  # the slot's state is SEALED
    "save.requested",  # the writer has received a request to save
    "restore.chosen",  # a checkpoint was chosen; the state is still unchanged
    "restore.filled",  # tensors are filled, but plain values are not
    "run.taken",  # the log names this job as owner, but the writers are not notified yet
)
WRITER_POINTS = (
    "data_file.opened",
    "data_file.written",
    "data_file.synced",
    "manifest.stored",
    "index.stored",
    "log.synced",  # the record's temporary file is durable
    "log.linked",  # the record has its name, but the folder is not synced yet
    "log.appended",
    "log.trimming",  # some of the old records are deleted
    "acquire.done",
    "recover.done",
    "plan.landed",
    "sweep.deleted",
    "drain.started",
    "mirror.taken",  # another rank's snapshot is in this node's memory, but it is not sealed yet
)
INCREMENT_POINTS = (  # points in a writer that stores an increment or compresses
    "data_files.stored",  # all data files of the increment are durable
)
OFFLINE_POINTS = (  # points in a command that converts a checkpoint
    "export.window",  # some bytes are about to be written
    "export.whole",  # all files are complete, but still have temporary names
    "export.appeared",  # the files have their final names, but the temporary folder still exists
)
POINTS = (
    *TRAINER_POINTS,
    *WRITER_POINTS,
    *INCREMENT_POINTS,
    *OFFLINE_POINTS,
)

process = "trainer"  # name of this process in CKPT_FAIL; the writer sets it to "writer" when it starts


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
    """Mark a moment at which a failure must not lose data. Do nothing unless a test has armed the point."""
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
