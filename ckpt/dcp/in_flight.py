"""The saves of torch's DCP in progress in this process: one at a time per tier, and none is lost at the end.

torch does not notify a writer when a save fails on another rank. A save therefore counts as in progress while the
thread that began it is inside torch's call. An error of `dcp.async_save` is raised only by `.result()`, so the error of
the last one is logged at the end of the script.
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

SAVER = "_save_state_dict"  # torch's function that makes one save, from plan to end
ASYNC = "AsyncCheckpointExecutor"  # name of torch's threads that save: one per save
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class SaveInFlight:
    """A save that writes to a tier."""

    step: int
    thread: threading.Thread


_lock = threading.Lock()
_claims: dict[str, SaveInFlight] = {}  # by URL
_failed: str | None = None  # why the last save failed, if it was async


def claim(urls: Sequence[str], step: int) -> None:
    """Register a save of this thread. Raises SaveError while another one is in progress there: the newer is not
    made."""
    own = SaveInFlight(step, threading.current_thread())
    with _lock:
        for url in urls:
            other = _claims.get(url)
            if other is not None and other.thread is not own.thread and _is_saving(other.thread):
                raise SaveError(
                    f"step {step} is not saved, because step {other.step} is still being saved to {url}: call "
                    ".result() "
                    "of that save before the next dcp.async_save"
                )
        _claims.update(dict.fromkeys(urls, own))


def release() -> None:
    """Unregister the save of this thread, which has ended."""
    current = threading.current_thread()
    with _lock:
        for url in [url for url, claim in _claims.items() if claim.thread is current]:
            del _claims[url]


def wait_for(urls: Sequence[str]) -> None:
    """Wait until no dcp.async_save of this process is in progress there, so that a read finds its step."""
    told = False
    for thread in threading.enumerate():
        while thread is not threading.current_thread() and thread.name.startswith(ASYNC) and thread.is_alive():
            with _lock:
                claimed = {url for url, claim in _claims.items() if claim.thread is thread}
            if claimed and claimed.isdisjoint(urls):
                break  # without a claim it has only begun, and where it goes is not known
            if not told:
                log.warning("a dcp.async_save is under way: %s is read when it has ended", ", ".join(urls))
            told = True
            time.sleep(POLL_S)


def check_time(step: int) -> None:
    """SaveError if it is too late: threads can no longer be started."""
    if concurrent.futures.thread._shutdown:
        raise SaveError(
            f"step {step} cannot be saved while the interpreter ends: save before that, not in an atexit handler"
        )


def watch(name: object) -> None:
    """Remember the error of the save that begins in this thread, if a future holds it. `name`: id of the save."""
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
        _failed = f"{name}: {causes[0]}"  # not the error itself, because its frames hold the saved state


def _is_saving(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != SAVER:
        frame = frame.f_back
    return frame is not None


def _wait() -> None:
    """Wait for unfinished saves at the end of the interpreter, while threads can still start, like torch's own
    writer."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    for thread in others:
        while thread.is_alive() and (thread.name.startswith(ASYNC) or _is_saving(thread)):
            time.sleep(POLL_S)
    if _failed is not None:
        log.error("the last save of this script failed: %s", _failed)


threading._register_atexit(_wait)  # type: ignore[attr-defined]
