"""Inspects a trainer from outside, because a hanging trainer does not respond.

`sample` and `parse_dump` are used by the writer, `own_stack` inside the trainer. `ckpt.guard.hang` collects their
results in an `Evidence` and evaluates them.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

from ckpt.core.ipc.heartbeat import Beat, number_in_proc
from ckpt.guard import hang
from ckpt.guard.hang import MAX_ITEMS, Evidence, plain

DUMP_SIGNAL = signal.SIGRTMIN + 6  # makes faulthandler write all stacks; no standard use conflicts with it
_STATES = {
    psutil.STATUS_RUNNING: hang.RUNNING,
    psutil.STATUS_SLEEPING: hang.SLEEPING,
    psutil.STATUS_IDLE: hang.SLEEPING,
    psutil.STATUS_DISK_SLEEP: hang.DISK,
    psutil.STATUS_STOPPED: hang.STOPPED,
    psutil.STATUS_TRACING_STOP: hang.STOPPED,
    psutil.STATUS_ZOMBIE: hang.ZOMBIE,
    psutil.STATUS_DEAD: hang.ZOMBIE,
}


def sample(pid: int, rank: int, beat: Beat, *, ours: int = 0) -> Evidence:
    """Inspect a process once from outside. The caller adds the stack. Takes about a millisecond.

    `ours`: bytes that the process wrote for this library, for example stack dumps; they are subtracted because they
        are not a sign of life. The caller must ensure that `pid` is still the same process.
    """
    state, cpu_s, written = hang.GONE, 0.0, -1
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(number_in_proc(pid))
        with process.oneshot():
            state = _STATES.get(process.status(), hang.UNKNOWN)
            times = process.cpu_times()
            cpu_s = times.user + times.system
            with contextlib.suppress(psutil.AccessDenied):
                written = max(0, process.io_counters().write_chars - ours)
    return Evidence(
        rank=rank,
        host=plain(socket.gethostname()),
        pid=pid,
        step=beat.step,
        calls=beat.calls,
        idle_s=time.monotonic() - beat.when,
        state=state,
        cpu_s=cpu_s,
        written=written,
        received=_received(),
    )


def _received() -> int:
    """Return the bytes received by the whole host, including loopback. The kernel does not count them per process."""
    with contextlib.suppress(OSError):
        return sum(one.bytes_recv for one in psutil.net_io_counters(pernic=True, nowrap=False).values())
    return 0


# -- stacks --


def _frame(function: str, file: str, line: object) -> str:
    return plain(f"{function[:200]} ({file[-700:]}:{line})")


def own_stack(thread_id: int) -> tuple[str, ...]:
    """Return the stack of a thread of this process, innermost frame first; () if the thread does not exist."""
    frame, frames = sys._current_frames().get(thread_id), list[str]()
    while frame is not None and len(frames) < MAX_ITEMS:
        frames.append(_frame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


@dataclass(slots=True)
class _Thread:
    current: bool = False
    frames: list[str] = field(default_factory=list)

    @property
    def started(self) -> bool:
        """Return True if another thread started this one, which is then not the main thread."""
        return bool(self.frames) and self.frames[-1].startswith("_bootstrap (")


_HEADER = re.compile(r"(?:(Current thread|Thread) 0x[0-9a-fA-F]+\b.*|Stack) \(most recent call first\):")
_LINE = re.compile(r'  File (?:"(.*)"|\?\?\?), line ([0-9]+|\?\?\?) in (.*)')


def parse_dump(text: str) -> tuple[str, ...]:
    """Return the main thread's frames in the last dump of a text, innermost first; () if they are missing. Any thread
    may have made faulthandler write the dump. It begins with the newest thread, so the main thread comes last. With
    more than a hundred threads, faulthandler omits the main thread (and writes "...") unless it is current."""
    threads, cut = _last_dump(text.splitlines())
    if threads and not cut and (not threads[-1].started or len(threads) == 1):
        return tuple(threads[-1].frames)
    return next((tuple(thread.frames) for thread in threads if thread.current and not thread.started), ())


def _last_dump(lines: Iterable[str]) -> tuple[list[_Thread], bool]:
    """Return the threads of the last dump. Return also True if threads are missing. Empty lines separate threads."""
    threads, cut, joined, before = list[_Thread](), False, False, "-"
    for line in lines:
        if header := _HEADER.fullmatch(line):
            if not (joined and not before):
                threads, cut = [], False
            threads.append(_Thread(current=header[1] == "Current thread"))
            joined = True
        elif threads and joined and (match := _LINE.fullmatch(line)):
            if len(threads[-1].frames) < MAX_ITEMS:
                threads[-1].frames.append(_frame(match[3], match[1] or "???", match[2]))
        elif line == "...":
            cut = True
        elif line and not line.startswith("  "):
            joined = False
        before = line
    return threads, cut


_IN = re.compile(r"(\S+) \((.*):[0-9?]+\)")
_TORCH = re.compile(r"(^|/)torch/")
_DISTRIBUTED = re.compile(r"(^|/)torch/(distributed/|nn/parallel/distributed\.py$)")
_LIBRARY = re.compile(
    r"^<frozen |(^|/)torch/|/lib(64)?/python3[^/]*/(?!(site|dist)-packages/)|^(threading|selectors)\.py$"
)
_WAITS = re.compile(
    r"reduce|gather|scatter|all_?to_?all|broadcast|barrier|send|recv|wait|synchronize|rendezvous|^new_(sub)?group|"
    r"^split_group|^init_process_group|^_new_process_group_helper"
)


def collective_of(stack: Iterable[str]) -> str:
    """Return the collective, or another wait for other ranks, in which a stack is; "" if none is visible. The
    collectives of DistributedDataParallel are not visible in Python, so "backward" may or may not be one. A wait() for
    an asynchronous collective in the user's code is not visible either."""
    for frame in stack:
        match = _IN.fullmatch(frame)
        if match is None or not _LIBRARY.search(match[2]):
            break  # frames of the user's code inside the call: it does not wait for a collective
        if _DISTRIBUTED.search(match[2]) and _WAITS.search(match[1]):
            return match[1].lstrip("_")
        if match[1] == "_engine_run_backward" and _TORCH.search(match[2]):
            return "backward"
    return ""
