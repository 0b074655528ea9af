"""The saves of torch's DCP that are in progress in this process: one per tier. All of them finish before the exit.

torch does not notify a storage writer when a save fails on another rank. A save therefore counts as in progress while
the thread that began it is inside torch's save function. Only `.result()` raises an error of `dcp.async_save`, so the
error of the last save is also logged at the end of the script.
"""

from __future__ import annotations

import concurrent.futures.thread  # its own hook at the end of the interpreter comes before ours, so it runs after it
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import SaveError
from ckpt.events import log

SAVER = "_save_state_dict"  # name of torch's function that makes one save, from its plan to its commit
ASYNC = "AsyncCheckpointExecutor"  # name prefix of the threads in which torch saves, one thread per save
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class SaveInFlight:
    """A save that writes to a tier."""

    step: int
    thread: threading.Thread


_lock = threading.Lock()
_claims: dict[str, SaveInFlight] = {}  # the save in progress to each tier, by URL
_failed: str | None = None  # the error of the last save, if it was a dcp.async_save


def claim(urls: Sequence[str], step: int) -> None:
    """Register a save of this thread. Raise SaveError if another save to one of these tiers is in progress; the new
    save is then not made."""
    own = SaveInFlight(step, threading.current_thread())
    with _lock:
        for url in urls:
            other = _claims.get(url)
            if other is not None and other.thread is not own.thread and _is_saving(other.thread):
                raise SaveError(
                    f"step {step} is not saved, because step {other.step} is still being saved to {url}: call "
                    ".result() of that save before the next dcp.async_save"
                )
        _claims.update(dict.fromkeys(urls, own))


def release() -> None:
    """Unregister the save of this thread when it has ended."""
    current = threading.current_thread()
    with _lock:
        for url in [url for url, claim in _claims.items() if claim.thread is current]:
            del _claims[url]


def wait_for(urls: Sequence[str]) -> None:
    """Wait until no dcp.async_save of this process is writing to these tiers, so that a read finds its step."""
    warned = False
    for thread in threading.enumerate():
        while thread is not threading.current_thread() and thread.name.startswith(ASYNC) and thread.is_alive():
            with _lock:
                claimed = {url for url, claim in _claims.items() if claim.thread is thread}
            if claimed and claimed.isdisjoint(urls):
                break  # its tiers are known and are others; a thread without a claim has only begun
            if not warned:
                log.warning("a dcp.async_save is under way: %s will be read when the save has ended", ", ".join(urls))
            warned = True
            time.sleep(POLL_S)


def check_time(step: int) -> None:
    """Raise SaveError if the interpreter is exiting, because it can no longer start threads."""
    if concurrent.futures.thread._shutdown:
        raise SaveError(
            f"step {step} cannot be saved while the interpreter ends: save before that, not in an atexit handler"
        )


def watch(name: object) -> None:
    """Store the error of the save that begins in this thread if it belongs to a future. `name`: id of the save."""
    global _failed
    _failed, frame = None, sys._getframe().f_back
    while frame is not None and frame.f_code.co_filename != concurrent.futures.thread.__file__:
        frame = frame.f_back
    future = None if frame is None else getattr(frame.f_locals.get("self"), "future", None)
    if isinstance(future, concurrent.futures.Future):
        future.add_done_callback(lambda done: _note_error(name, done))


def _note_error(name: object, done: concurrent.futures.Future[object]) -> None:
    global _failed
    if (error := done.exception()) is not None:
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
        _failed = f"{name}: {causes[0]}"  # only its text, because its frames would keep the saved state in memory


def _is_saving(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != SAVER:
        frame = frame.f_back
    return frame is not None


def _wait() -> None:
    """Wait for unfinished saves when the interpreter exits. Registered with `threading`, so it runs while threads can
    still be started."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    for thread in others:
        while thread.is_alive() and (thread.name.startswith(ASYNC) or _is_saving(thread)):
            time.sleep(POLL_S)
    if _failed is not None:
        log.error("the last save of this script failed: %s", _failed)


threading._register_atexit(_wait)  # type: ignore[attr-defined]
