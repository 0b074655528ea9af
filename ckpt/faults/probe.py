"""What a trainer is doing, asked from outside where it can be, since a trainer that hangs answers nothing.

`sample`, `parse_dump`, `py_spy` and `Probe` are for the writer; `own_stack` and `flight_recorder` for a thread inside
the trainer that is still alive. What they find becomes an `Evidence` (ckpt/faults/hang.py), which also judges it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from ckpt.faults import hang
from ckpt.faults.hang import MAX_ITEMS, Evidence, plain
from ckpt.ipc.heartbeat import Beat

DUMP_SIGNAL = signal.SIGRTMIN + 6  # answered by faulthandler; no default of anybody's
_FLIGHT_S = 1.0
_LAST = 8  # entries of the flight recorder
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
    """One look at a process from outside; without its stack, see `dataclasses.replace`. Takes about a millisecond.

    `ours`: bytes that the process wrote for us so far, such as dumps of its stack, which are no sign of life. That
    `pid` still is the same process, the caller must know.
    """
    state, cpu_s, written = hang.GONE, 0.0, -1
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
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
    """Bytes from the network, loopback included: of the whole host, as the kernel does not count them by process."""
    with contextlib.suppress(OSError):
        return sum(one.bytes_recv for one in psutil.net_io_counters(pernic=True, nowrap=False).values())
    return 0


# -- stacks --


def _frame(function: str, file: str, line: object) -> str:
    return plain(f"{function[:200]} ({file[-700:]}:{line})")


def own_stack(thread_id: int) -> tuple[str, ...]:
    """Of a thread of this process, innermost first; () if there is no such thread."""
    frame, found = sys._current_frames().get(thread_id), list[str]()
    while frame is not None and len(found) < MAX_ITEMS:
        found.append(_frame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@dataclass(slots=True)
class _Thread:
    main: bool = False  # known to be
    current: bool = False
    frames: list[str] = field(default_factory=list)

    @property
    def started(self) -> bool:
        """By another thread: so it is not the main one."""
        return bool(self.frames) and self.frames[-1].startswith("_bootstrap (")


_HEADER = re.compile(r"(?:(Current thread|Thread) 0x[0-9a-fA-F]+\b.*|Stack) \(most recent call first\):")
_LINE = re.compile(r'  File (?:"(.*)"|\?\?\?), line ([0-9]+|\?\?\?) in (.*)')
_PY_SPY = re.compile(r'Thread ([0-9]+)(?: \([^()]*\))?(?:: "(.*)")?')
_PY_SPY_LINE = re.compile(r"    (.+) \((.*?)(?::([0-9]+))?\)")


def parse_dump(text: str) -> tuple[str, ...]:
    """The main thread of the last dump in a text: its frames, innermost first. () if it is not among them.

    Of faulthandler, whichever thread wrote it and for whatever reason, or of py-spy. faulthandler begins with the
    newest thread, so the main one comes last. Beyond a hundred threads it goes missing (a line "..."), and is known
    only if it is the current one.
    """
    lines = text.splitlines()
    if any(_PY_SPY.fullmatch(line) for line in lines):
        threads = list(_py_spy_threads(lines))
        return next((tuple(thread.frames) for thread in threads if thread.main), ())
    threads, cut = _last_dump(lines)
    if threads and not cut and (not threads[-1].started or len(threads) == 1):
        return tuple(threads[-1].frames)
    return next((tuple(thread.frames) for thread in threads if thread.current and not thread.started), ())


def _last_dump(lines: Iterable[str]) -> tuple[list[_Thread], bool]:
    """Its threads, and whether some are missing. Within a dump an empty line comes between two threads."""
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


def _py_spy_threads(lines: Iterable[str]) -> Iterator[_Thread]:
    pid, thread = "", _Thread()
    for line in lines:
        if line.startswith("Process "):
            pid = line.removeprefix("Process ").partition(":")[0]
        elif header := _PY_SPY.fullmatch(line):
            thread = _Thread(main=header[1] == pid or header[2] == "MainThread")
            yield thread
        elif (match := _PY_SPY_LINE.fullmatch(line)) and len(thread.frames) < MAX_ITEMS:
            thread.frames.append(_frame(match[1], match[2], match[3] or "???"))


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
    """The collective, or other wait for the other ranks, that a stack is in; "" for none that can be seen.

    The reduction of DistributedDataParallel is not visible in Python: "backward" may or may not be one. A wait() of
    a user's own for the handle of an asynchronous collective is not visible either, see `flight_recorder`.
    """
    for frame in stack:
        match = _IN.fullmatch(frame)
        if match is None or not _LIBRARY.search(match[2]):
            break  # the user's own code, which does something else inside
        if _DISTRIBUTED.search(match[2]) and _WAITS.search(match[1]):
            return match[1].lstrip("_")
        if match[1] == "_engine_run_backward" and _TORCH.search(match[2]):
            return "backward"
    return ""


def py_spy(pid: int, timeout_s: float = 2.0) -> str:
    """A dump for `parse_dump` by the command `py-spy`; "" where it is not installed, not permitted or too slow.

    It blocks, and does not stop the process. The command line that py-spy shows is left out: it is nobody's business.
    """
    command = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if command is None:
        return ""
    words = [command, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    text = done.stdout.decode(errors="replace") if done.returncode == 0 else ""
    start = text.find("\nThread ")  # a command line can have several lines
    return f"Process {pid}:\n{text[start:]}" if start >= 0 else ""


# -- the flight recorder of torch --

_asking = threading.Lock()  # held by the thread that asks, for as long as it takes


def flight_recorder() -> tuple[str, ...]:
    """The last collectives of this process, oldest first, as "seq=12 all_reduce started"; () where nothing is known.

    scheduled, started or completed (gloo knows no start). Never raises, and waits for a second at most.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d") if "torch.distributed" in sys.modules else None
    if c10d is None or not _asking.acquire(blocking=False):  # else an earlier one stands in there still
        return ()
    found: list[str] = []

    def ask() -> None:
        try:
            entries = list[Any]()
            for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # what CPU and CUDA builds of torch have
                if dump := getattr(c10d, name, None):
                    entries += json.loads(dump()).get("entries", [])
            found.extend(shorten(entries))
        except Exception:  # an unknown version of it, at worst
            pass
        finally:
            _asking.release()

    try:
        thread = threading.Thread(target=ask, name="ckpt-flight", daemon=True)
        thread.start()
    except RuntimeError:  # no thread to be had
        _asking.release()
        return ()
    thread.join(_FLIGHT_S)
    return () if thread.is_alive() else tuple(found)


def shorten(entries: list[Any]) -> list[str]:
    """The last ones, the last of each group, and the first that have not completed; the recorder's own, as texts."""
    entries = sorted(entries, key=lambda entry: int(entry.get("time_created_ns") or 0))
    lasts = {_group(entry): i for i, entry in enumerate(entries) if not entry.get("is_p2p")}
    waiting = [i for i, entry in enumerate(entries) if not _completed(entry)]
    chosen = {*range(len(entries))[-_LAST:], *list(lasts.values())[-_LAST:], *waiting[:_LAST]}
    return [_entry(entries[i]) for i in sorted(chosen)]


def _completed(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _group(entry: dict[str, Any]) -> str:
    """Its name and what it is for; "" for the default one."""
    name, purpose = [*map(str, entry.get("process_group") or ()), "", ""][:2]
    if purpose == "default_pg":
        return ""
    return f"{name[:100]}:{purpose[:100]}" if purpose not in ("", "undefined") else name[:100]


def _entry(entry: dict[str, Any]) -> str:
    p2p, group = bool(entry.get("is_p2p")), _group(entry)
    number = f"p2p={int(entry['p2p_seq_id'])}" if p2p else f"seq={int(entry['collective_seq_id'])}"
    name = "_".join(str(entry.get("profiling_name") or "?").rpartition(":")[2].split())[:200]
    state = "completed" if _completed(entry) else "started" if entry.get("state") == "started" else "scheduled"
    return plain(f"{number} {name} {state}" + (f" in {group}" if group else ""))


# -- bpftrace --

_SCRIPT = """
BEGIN {{ @left[{pid}] = nsecs; }}
tracepoint:sched:sched_switch /pid == {pid}/ {{ @left[tid] = nsecs; }}
tracepoint:sched:sched_switch /@left[args->next_pid]/ {{
  @off[args->next_pid] = sum(nsecs - @left[args->next_pid]); delete(@left[args->next_pid]);
}}
END {{ @end = nsecs; }}
"""


class Probe:
    """How long each thread of a process was not on a CPU, by bpftrace: only where root asks for it.

    It takes bpftrace seconds and hundreds of MB to start, so nothing here does so of its own accord.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Whether it runs now: not without root, or where bpftrace is not installed."""
        command = shutil.which("bpftrace")
        if self._process is not None or command is None or os.geteuid() != 0:
            return False
        words = [command, "-f", "json", "-e", _SCRIPT.format(pid=int(self.pid))]
        null = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(words, stdin=null, stdout=subprocess.PIPE, stderr=null)
        except OSError:
            return False
        return True

    def stop(self, timeout_s: float = 5.0) -> dict[int, float]:
        """End it. Seconds by thread id, the one of the main thread being the process's; {} for nothing known."""
        process, self._process = self._process, None
        if process is None:
            return {}
        process.send_signal(signal.SIGINT)  # which makes it print
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        return summary(out.decode(errors="replace"))


def summary(text: str) -> dict[int, float]:
    """Of what the script printed: time off the CPU, that of threads which have not come back included."""
    maps: dict[str, Any] = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
            found = json.loads(line)
            maps.update(found["data"] if found.get("type") == "map" else {})
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        off = {int(tid): float(ns) / 1e9 for tid, ns in maps.get("@off", {}).items()}
        for tid, since in maps.get("@left", {}).items():
            off[int(tid)] = off.get(int(tid), 0.0) + max(0.0, float(maps.get("@end", since)) - float(since)) / 1e9
        return off
    return {}
