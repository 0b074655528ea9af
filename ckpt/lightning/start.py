"""The start of a Lightning training: a file passed to `fit()`, a run that may have finished, and errors of `fit()`."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from ckpt.errors import USER_ERRORS, UsageError
from ckpt.lightning.loop_hooks import inform, warn

ITS_OWN = ("hpc_ckpt_", ".lr_find_", ".scale_batch_size_")  # files of Lightning's requeue and of its tuner
FRAMES = ("lightning", "pytorch_lightning")  # packages whose frames are removed from errors


def given(trainer: Any) -> str:
    """Return the checkpoint file from which the user wants to begin, or "". Files of Lightning's own do not count."""
    path = str(trainer.ckpt_path or "")
    return "" if Path(path).name.startswith(ITS_OWN) else path


def last_file(trainer: Any, path: str, began_from: str, place: str, step: int) -> str:
    """Return the file passed to `fit()` if it is the "last" file, "" if no file was passed. Raise UsageError for a file
    other than the one from which the run in `place` (at `step`) began."""
    last = bool(path) and _is_last(trainer, path)
    if path and not last and path != began_from:
        began = f"from {began_from}" if began_from else "without ckpt_path"
        raise UsageError(
            f"{place} has step {step} of a run that began {began}, but this is "
            f"fit(ckpt_path={path!r}): omit it to continue, or give the callback another location for a new run"
        )
    return path if last else ""


def report_resume(trainer: Any, place: str, step: int, last: str, theirs: int) -> None:
    """Log the restored step. `last`: a file that was passed to `fit()` but not used; it has step `theirs`."""
    if theirs > step and last:
        warn(
            trainer,
            "%s has step %d, but everystep continues at step %d, the newest in %s: to continue from the file, give "
            "the callback another location",
            *(last, theirs, step, place),
        )
    else:
        inform(trainer, "everystep continues at step %d (from %s%s)", step, place, f", not from {last}" if last else "")


def report_finished(trainer: Any, place: str, step: int, limit: str) -> None:
    """Log that the run has finished. `limit`: the trainer's limit that the run has reached."""
    if trainer.is_global_zero:
        warn(
            trainer,
            "nothing to do: the run in %s finished at step %d (%s), and the model is that of its last batch. Raise "
            "the limit to continue training, or use another location for a new run",
            *(place, step, limit or "stopped early, with unchanged limits like `patience`"),
        )


def _is_last(trainer: Any, path: str) -> bool:
    """Return True if the path is the result of `fit(ckpt_path="last")`, or the file that Lightning saves after an
    exception, because the user then wants to continue the run. Savers are recognised by attributes, since two packages
    have classes of these names, and folders by their real path, since Lightning makes relative paths absolute."""
    folder, name = _real(Path(path).parent), Path(path).name
    for saver in trainer.checkpoint_callbacks:
        of_exception, last = getattr(saver, "ckpt_path", ""), getattr(saver, "CHECKPOINT_NAME_LAST", "")
        if of_exception and (_real(Path(of_exception).parent), Path(of_exception).name) == (folder, name):
            return True
        if last and name.startswith(last) and saver.dirpath and _real(saver.dirpath) == folder:
            return True
    return False


def _real(folder: object) -> str:
    return os.path.realpath(str(folder))


def limits(trainer: Any, others: list[Any]) -> list[Any]:
    """Return the limits of the training in this script. While they are unchanged, a finished run stays finished."""
    fit, words = trainer.fit_loop, ("patience", "_duration")  # attributes of EarlyStopping and Timer
    stops = [[one.state_key, *(getattr(one, word, None) for word in words)] for one in others if _stops(one, words)]
    return [fit.max_epochs, fit.epoch_loop.max_steps, stops]


def _stops(one: Any, words: tuple[str, ...]) -> bool:
    return any(isinstance(getattr(one, word, None), (int, float)) for word in words)


def shorten(error: BaseException) -> None:
    """Remove this library's frames from an error that leaves `fit()`. From an error that a user can correct, remove
    Lightning's frames too, unless the error passed through the user's code, whose line the user needs."""
    frames = [_package(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    others = [package for package in frames if package != "ckpt"]
    if isinstance(error, USER_ERRORS) and others and others[-1] in FRAMES:
        logging.getLogger("ckpt").debug("an error in fit()", exc_info=error)
        error.__traceback__, error.__cause__, error.__suppress_context__ = None, None, True
        return
    below = list(itertools.takewhile(lambda package: package != "ckpt", reversed(frames)))
    if any(package != "torch" and package not in sys.stdlib_module_names for package in below):
        at = error.__traceback__
        while at is not None:
            while at.tb_next is not None and _package(at.tb_next.tb_frame) == "ckpt":
                at.tb_next = at.tb_next.tb_next
            at = at.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
