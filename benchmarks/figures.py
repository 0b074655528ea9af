"""All libraries compared, everystep against its goals, and where the time goes.

    make bench            or: python benchmarks/figures.py [--only NAME ...] [--size small] [--folder DIR]
    python benchmarks/figures.py --json FILE --picture FILE.svg
    python benchmarks/figures.py --report FILE --markdown        # the tables of an earlier run

Measured are the limits of the machine (`limits.py`), then each library in turn (`contest.py`: one process trains and
saves, and a new one restores), in rounds of alternating order, so that drift affects all. Then come the figures of
everystep alone (`own.py`). Each process gets its own folder on the same disk. Medians are over all cycles and rounds.

- *best peer*: the minimum of the column among the other libraries that finished a round with equal restores. One that
  does not fsync counts too, and is marked.
- *more during a save*: peak memory beyond that right before the save; *held*: beyond the same training without a
  library; *beyond slots*: the part of it that is not an intended snapshot.
- *own.py* prints lines {"kind": "own", "figure": NAME, ...}; `own_figures` selects those with a goal.

Exit status 1: everystep failed, or something restored differs from what was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from usage import FAMILY, family, watching

Json = dict[str, Any]

HERE = Path(__file__).parent
OURS = "everystep"
QUICKEST = "torch_checkpointing"  # has the quickest save call
MARK = uuid.uuid4().hex  # marks the processes started here
LIMIT_S = 600.0  # for one process of `contest.py`
OWN_LIMIT_S = 1800.0
LINGER_S = 5.0  # how long a library's background work may continue after its process has ended
GB, MIB, GIB = 1e9, 1 << 20, 1 << 30
STOPPED = "stopped before the end"
SAID_LINES = 15  # number of stderr lines kept of a failure
PR_SET_CHILD_SUBREAPER = 36
NEGLIGIBLE_S = 0.005  # CPU seconds per cycle; the kernel counts in hundredths

ESTIMATE_S = {"small": (15.0, 20.0, 60.0), "full": (60.0, 60.0, 300.0)}  # limits; one library per round; own.py

ALONE = """
import json, os, statistics, sys, time
from usage import memory
from workload import SIZES, Training
training = Training.build(SIZES[sys.argv[1]])
took = []
for _ in range(8):
    started = time.perf_counter()
    training.step()
    took.append(time.perf_counter() - started)
found = {"memory": memory(os.getpid()), "nbytes": training.nbytes, "step_s": statistics.median(took)}
print(json.dumps({"kind": "alone", **found}))
"""  # the same training without a library, as the reference for memory

COLUMNS = {
    "blocks_s": "blocks",
    "lost_s": "lost",
    "durable_s": "durable",
    "during_bytes": "more during a save",
    "held_bytes": "held",
    "beyond_bytes": "beyond slots",
    "cold_s": "restore, cold",
    "warm_s": "warm",
    "memory_s": "from memory",
    "open_s": "opening",
}


# -- processes --


def child(
    command: list[str],
    tags: Json,
    *,
    keep: Callable[[Json], None],
    python: Path | None = None,
    limit_s: float = LIMIT_S,
) -> bool:
    """Run a command, pass each line it prints to `keep`, with `tags`, and return True if it finished.

    Between "memory begins" and "memory ends" its memory is sampled into a line "memory". If it fails or exceeds the
    limit, a line "failed" has the end of its output.
    """
    known = set(family(os.getpid(), MARK))
    late = threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [str(python or sys.executable), *command],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        )

        def end() -> None:
            """End a process and those it started. The output ends with the last process that has it open."""
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                late.set()
                kill(family(process.pid))
                process.wait()
            clear(known)

        ending = threading.Thread(target=end, name="bench-end")
        ending.start()
        try:
            for line in with_memory(lines(process), process.pid):
                keep({**tags, **line})
        except BaseException:
            kill(family(process.pid))
            raise
        finally:
            ending.join()
            assert process.stdout is not None
            process.stdout.close()
        if process.returncode == 0:
            return True
        errors.seek(0)
        said = [one.strip() for one in deque(errors, SAID_LINES) if one.strip()]
        why = f"not done after {limit_s:g} s" if late.is_set() else f"ended with {process.returncode}"
        keep({**tags, "kind": "failed", "why": why, "said": said})
        return False


def environment() -> dict[str, str]:
    """Return the environment with the repository in the path. Each library keeps its own number of threads. Compiled
    modules are kept, as in an installed package."""
    not_ours = {"OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"}
    mine = {key: value for key, value in os.environ.items() if key not in not_ours}
    path = [str(HERE.parent), str(HERE.parent / "backends"), str(HERE)]
    return {**mine, "PYTHONPATH": os.pathsep.join(path), FAMILY: MARK}


def lines(process: subprocess.Popen[str]) -> Iterator[Json]:
    """Yield the JSON lines of the output; libraries print other things too."""
    assert process.stdout is not None
    for text in process.stdout:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and "kind" in line:
                yield line


def with_memory(said: Iterable[Json], pid: int) -> Iterator[Json]:
    """Yield the same lines, with one "memory" line for those between the two memory marks."""
    with contextlib.ExitStack() as stack:
        peak = None
        for line in said:
            if line["kind"] == "memory begins":
                peak = stack.enter_context(watching(pid, every_s=0.05))
            elif line["kind"] == "memory ends" and peak is not None:
                stack.close()
                yield {"kind": "memory", "before": peak.before, "most": peak.most, "slots": line.get("slots", 0)}
            else:
                yield line


def adopt() -> None:
    """Adopt processes whose parents ended as children of this one, so that none is overlooked."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def clear(known: set[int]) -> None:
    """Wait for a library's background work, and end it if it stays, so that the next library is undisturbed."""
    deadline = time.monotonic() + LINGER_S
    while left := [pid for pid in family(os.getpid(), MARK) if pid not in known]:
        if time.monotonic() > deadline:
            kill(left)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- measuring --


@dataclass(frozen=True)
class Plan:
    names: list[str]
    rounds: int
    cycles: int
    size: str

    @property
    def seconds(self) -> float:
        """Return the approximate duration of all measurements."""
        limits_s, round_s, own_s = ESTIMATE_S[self.size]
        return limits_s + self.rounds * len(self.names) * round_s + own_s * (OURS in self.names)


def measure(plan: Plan, folder: Path, kept: list[Json]) -> None:
    """Yield all lines in the order in which they arrive."""
    from environments import python_for

    tell("the limits of the machine")
    mib = ["--mib", "128"] if plan.size == "small" else []
    child([str(HERE / "limits.py"), "--folder", str(folder), *mib], {}, keep=kept.append)
    alone: dict[Path, list[Json]] = {}
    for number in range(plan.rounds):
        for name in plan.names if number % 2 == 0 else reversed(plan.names):
            tags = {"library": name, "round": number}
            started, first = time.monotonic(), len(kept)
            try:
                python = python_for(name)
            except Exception as error:  # any error of an installation
                kept.append({**tags, "kind": "failed", "why": "not installed", "said": str(error).splitlines()})
            else:
                if python not in alone:
                    child(["-c", ALONE, plan.size], {}, python=python, keep=alone.setdefault(python, []).append)
                kept += [{**tags, **line} for line in alone[python] if line["kind"] == "alone"]
                turn(plan, folder, python, tags, kept)
            took = time.monotonic() - started
            tell(f"round {number + 1} of {plan.rounds}, {name}: {in_short(kept[first:])} ({took:.0f} s)")
    if OURS in plan.names and (HERE / "own.py").exists():
        tell("figures of everystep alone")
        with own_folder(folder) as place:
            command = [str(HERE / "own.py"), "--folder", str(place), "--size", plan.size]
            child(command, {"part": "own"}, limit_s=OWN_LIMIT_S, keep=kept.append)


def turn(plan: Plan, folder: Path, python: Path, tags: Json, kept: list[Json]) -> None:
    """Measure one library: one process saves, and one restores."""
    with own_folder(folder) as place:
        asked = [tags["library"], "--folder", str(place), "--size", plan.size, "--cycles", str(plan.cycles)]
        for what in ("save", "restore"):
            command = [str(HERE / "contest.py"), what, *asked]
            if not child(command, {**tags, "part": what}, python=python, keep=kept.append):
                return


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Create a folder. On exit, remove it and flush the disk before the next library starts."""
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.sync()


def in_short(said: list[Json]) -> str:
    if failed := next((line for line in said if line["kind"] == "failed"), None):
        return reason(failed)
    cycles = [line for line in said if line["kind"] == "cycle"]
    restored = [line for line in said if line["kind"] == "restored"]
    parts = [f"{COLUMNS[key]} {seconds(median(line[key] for line in cycles))}" for key in ("lost_s", "durable_s")]
    parts += [f"restored {seconds(line['seconds'])}" for line in restored if line["source"] == "cold"]
    return ", ".join(parts) + ("" if all(line["equal"] for line in restored) else ", NOT EQUAL")


def machine(folder: Path) -> Json:
    """Return the properties of the machine, without anything that identifies its owner."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": model[0].partition(":")[2].strip() if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "kernel": platform.release().partition("-")[0],
        "file_system": file_system(folder),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "load_before": os.getloadavg()[0],
    }


def file_system(folder: Path) -> str:
    mounts = [m for m in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(m.mountpoint)]
    return str(max(mounts, key=lambda m: len(m.mountpoint)).fstype) if mounts else "unknown"


# -- summary: pure --


def summary(said: list[Json]) -> Json:
    """Summarize all lines: each library, the best peers, goals, limits."""
    names = list(dict.fromkeys(line["library"] for line in said if "library" in line))
    found = {name: of_library([line for line in said if line.get("library") == name]) for name in names}
    limits = {line["name"]: line for line in said if line["kind"] == "limit"}
    own = own_figures([line for line in said if line["kind"] == "own"])
    differs = [line["figure"] for line in said if line["kind"] == "own" and line.get("equal") is False]
    failed = [line for line in said if line["kind"] == "failed" and "library" not in line]
    best = {key: found_best for key in COLUMNS if (found_best := best_peer(found, key)) is not None}
    return {
        "libraries": found,
        "best": best,
        "goals": goals(found, limits, own),
        "limits": limits,
        "own": own,
        "failed": [reason(line) for line in failed],
        "wrong": wrong(found, any(line.get("part") == "own" for line in failed))
        + [f"{OURS} restored something else than was saved: {what}" for what in differs],
    }


def own_figures(said: list[Json]) -> dict[str, float]:
    """Return the results of `own.py` that have goals; for small tensors, the worst cost."""
    by_name = {line["figure"]: line for line in said}
    tensors = {line["count"]: line for line in said if line["figure"] == "tensors"}
    found: dict[str, float] = {}
    if every := by_name.get("every step"):
        found |= {"blocks_p99_s": every["blocks_p99_s"], "every_step_factor": every["ratio"]}
    if start := by_name.get("start"):
        found["arena_ready_gb_s"] = start["arena_bytes"] / GB / start["ready_s"]
    if alone := by_name.get("alone"):
        found["staged_to_durable_gb_s"] = alone["nbytes"] / GB / alone["written_s"]
    if {1_000, 10_000} <= tensors.keys():
        many, few = tensors[10_000], tensors[1_000]
        costs = ("blocks_s", "staged_s", "committed_s", "restore_s")
        found["small_tensors_factor"] = max(many[cost] / few[cost] / 10 for cost in costs)
    return found


def of_library(said: list[Json]) -> Json:
    """Return medians over the cycles of all finished rounds, with minimum and maximum."""
    failures = {line["round"]: reason(line) for line in said if line["kind"] == "failed"}
    done = [line for line in said if line["round"] not in failures]
    start = [line for line in done if line["kind"] == "start"]
    cycles = [line for line in done if line["kind"] == "cycle"]
    restored = [line for line in said if line["kind"] == "restored"]
    told: dict[str, list[float]] = {key: [c[key] for c in cycles] for key in ("blocks_s", "lost_s", "durable_s")}
    for source in ("cold", "warm", "memory"):
        told[f"{source}_s"] = [r["seconds"] for r in restored if r["source"] == source and r in done]
    told["open_s"] = [r["open_s"] for r in restored if r["source"] == "cold" and r in done]
    told |= memory_of(done)
    return {
        "failures": sorted(set(failures.values())),
        "rounds": len({line["round"] for line in done}),
        "cycles": len(cycles),
        "fsync": all(line["fsync"] for line in start) if start else None,
        "equal": all(r["equal"] for r in restored) if restored else None,
        "nbytes": next((line["nbytes"] for line in said if line["kind"] == "alone"), None),
        "figures": {key: median(values) for key, values in told.items() if values},
        "spread": {key: [min(values), max(values)] for key, values in told.items() if values},
        "cpu": cpu_of(cycles),
    }


def memory_of(said: list[Json]) -> dict[str, list[float]]:
    alone = next((line["memory"] for line in said if line["kind"] == "alone"), None)
    peaks = [line for line in said if line["kind"] == "memory"]
    found = {"during_bytes": [line["most"] - line["before"] for line in peaks]}
    if alone is not None:
        found["held_bytes"] = [line["most"] - alone for line in peaks]
        found["beyond_bytes"] = [line["most"] - alone - line["slots"] for line in peaks]
    return found


def cpu_of(cycles: list[Json]) -> dict[str, list[float]]:
    """Return median user and system seconds by thread or process, without negligible ones, and medians of their totals.
    The latter are not the sums of the former."""
    who = dict.fromkeys(name for cycle in cycles for name in cycle["cpu_s"])
    told = {name: [cycle["cpu_s"].get(name, [0.0, 0.0]) for cycle in cycles] for name in who}
    found = {
        name: [median(user for user, _ in used), median(system for _, system in used)] for name, used in told.items()
    }
    found = {name: used for name, used in found.items() if max(map(abs, used)) >= NEGLIGIBLE_S}
    if cycles:
        sums = [[sum(used[i] for used in cycle["cpu_s"].values()) for i in (0, 1)] for cycle in cycles]
        found["all"] = [median(user for user, _ in sums), median(system for _, system in sums)]
    return found


def best_peer(found: dict[str, Json], key: str, *, fsync: bool = False) -> Json | None:
    """Return the minimum of a column among the peers, and everystep's ratio to it. `fsync`: only peers that do."""
    peers = {
        name: one["figures"][key]
        for name, one in found.items()
        if name != OURS and key in one["figures"] and one["equal"] and (one["fsync"] or not fsync)
    }
    if not peers:
        return None
    name = min(peers, key=lambda peer: peers[peer])
    least = MIB if key.endswith("_bytes") else 0.0  # almost zero, or below it because of noise
    ours = found[OURS]["figures"].get(key) if OURS in found else None
    ratio = ours / peers[name] if ours is not None and peers[name] > least else None
    return {"peer": name, "value": peers[name], "ratio": ratio}


def wrong(found: dict[str, Json], own_failed: bool) -> list[str]:
    """Return the reasons for exit status 1."""
    told = [f"{name} restored something else than was saved" for name, one in found.items() if one["equal"] is False]
    if OURS in found and (found[OURS]["failures"] or found[OURS]["equal"] is None):
        told.append(f"{OURS} failed")
    return told + (["own.py failed"] if own_failed else [])


# -- goals: pure --


def goals(found: dict[str, Json], limits: dict[str, Json], own: dict[str, float]) -> list[Json]:
    """Compare everystep with its goals. `met` is None for goals that were not measured."""
    figures = found[OURS]["figures"] if OURS in found else {}
    nbytes = found[OURS]["nbytes"] if OURS in found else None

    def limit(name: str) -> float | None:
        return limits.get(name, {}).get("gb_s") or None

    def rate(key: str) -> float | None:
        return nbytes / GB / figures[key] if nbytes and key in figures else None

    quickest = found.get(QUICKEST, {}).get("figures", {}).get("blocks_s", 1.0)
    told = [
        goal("blocks, median", figures.get("blocks_s"), min(0.003, quickest), "s", note=f"or as {QUICKEST}"),
        goal("blocks, 99th percentile", own.get("blocks_p99_s"), 0.010, "s"),
        against_peers("lost", "lost_s", found, 0.5),
        against_peers("durable", "durable_s", found, 0.4),
    ]
    best = best_peer(found, "durable_s")
    if best is not None and not found[best["peer"]]["fsync"]:
        told.append(against_peers("durable", "durable_s", found, 0.4, fsync=True))
    written = over(own.get("staged_to_durable_gb_s"), limit("O_DIRECT write"))
    digest_s = over(nbytes / GB if nbytes else None, limit("xxh3-128, 2 threads"))
    copy_s = over(nbytes / GB if nbytes else None, limit("memcpy, 2 threads"))
    memory_s = figures.get("memory_s")
    from_memory = over(memory_s - digest_s, copy_s) if memory_s is not None and digest_s is not None else None
    beside = f"a digest pass, {seconds(digest_s)}, taken off" if digest_s is not None else ""
    cold = over(rate("cold_s"), limit("O_DIRECT read"))
    ready = over(own.get("arena_ready_gb_s"), limit("populate a memfd"))
    beyond = over(figures.get("beyond_bytes"), nbytes)
    told += [
        goal("staged to durable, rate / raw O_DIRECT write", written, 0.8, "x", least=True),
        goal("memory beyond slots / state", beyond, 0.1, "x"),
        goal("restore from memory, time / memcpy by 2 threads", from_memory, 1.3, "x", note=beside),
        goal("restore, cold, rate / raw O_DIRECT read", cold, 0.7, "x", least=True),
        *(against_peers(title, key, found, 1.0) for title, key in RESTORES.items()),
        *(opening_included(title, key, found) for title, key in RESTORES.items() if key != "memory_s"),
        goal("every step to memory, time / a step without saves", own.get("every_step_factor"), 1.25, "x"),
        goal("arena ready, rate / populating a memfd", ready, 0.5, "x", least=True),
        goal("10,000 small tensors, cost of one / among 1,000", own.get("small_tensors_factor"), 2.0, "x"),
    ]
    return told


RESTORES = {"restore, cold": "cold_s", "restore, warm": "warm_s", "restore from memory": "memory_s"}


def goal(what: str, ours: float | None, bound: float, unit: str, *, least: bool = False, note: str = "") -> Json:
    """Return one goal. `least`: True for a lower bound."""
    met = None if ours is None else (ours >= bound if least else ours <= bound)
    return {"what": what, "ours": ours, "bound": bound, "unit": unit, "least": least, "met": met, "note": note}


def against_peers(title: str, key: str, found: dict[str, Json], bound: float, *, fsync: bool = False) -> Json:
    best = best_peer(found, key, fsync=fsync)
    who = "best peer that fsyncs" if fsync else "best peer"
    if best is None:
        return goal(f"{title} / {who}", None, bound, "x", note="no peer has it")
    note = best["peer"] + (", which does not fsync" if key == "durable_s" and not found[best["peer"]]["fsync"] else "")
    if best["ratio"] is None and best["value"] <= 0:
        note += " lost less than noise"
    return goal(f"{title} / {who}", best["ratio"], bound, "x", note=note)


def opening_included(title: str, key: str, found: dict[str, Json]) -> Json:
    """Return the times of a user who starts a new process."""
    both = {
        name: {**one, "figures": {key: one["figures"][key] + one["figures"].get("open_s", 0.0)}}
        for name, one in found.items()
        if key in one["figures"]
    }
    return against_peers(f"{title}, opening included", key, both, 1.0)


def over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def reason(line: Json) -> str:
    """Return the reason for a failure in one line."""
    why = f"{line['part']} {line['why']}" if "part" in line else str(line["why"])
    return f"{why}: {line['said'][-1]}" if line.get("said") else why


# -- tables --


def seconds(value: float) -> str:
    if abs(value) < 0.0995:
        return f"{value * 1e3:.1f} ms" if abs(value) < 0.00995 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if abs(value) < 9.95 else f"{value:.1f} s"


def shown(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key.endswith("_s"):
        return seconds(value)
    return f"{value / GIB:.2f} GiB" if abs(value) > 0.0995 * GIB else f"{value / MIB:.0f} MiB"


def times(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f} x" if ratio < 99.5 else f"{ratio:.0f} x"


def table(title: str, head: list[str], rows: list[list[str]], *, markdown: bool = False, left: int = 1) -> str:
    """Format text, or Markdown. The first columns are left-aligned, the others right-aligned."""
    if markdown:
        cells = [head, ["---" if i < left else "---:" for i in range(len(head))], *rows]
        return f"{title}:\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in cells)
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: list[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip()

    return "\n".join([title, "", line(head), line(["-" * width for width in widths]), *map(line, rows)])


def library_table(found: Json, *, markdown: bool = False) -> str:
    libraries, best = found["libraries"], found["best"]
    rows, notes = [], []
    for name, one in libraries.items():
        figures = one["figures"]
        notes += [f"{name} failed: {why}" for why in one["failures"]]
        if not figures:
            rows.append([name, *["-"] * len(COLUMNS), "-", "failed"])
            continue
        cells = [shown(key, figures.get(key)) for key in COLUMNS]
        rows.append([name, *cells, "yes" if one["fsync"] else "no", {True: "yes", False: "NO"}.get(one["equal"], "-")])
    rows.append(["best peer", *(shown(key, best.get(key, {}).get("value")) for key in COLUMNS), "", ""])
    ratios = (best.get(key, {}).get("ratio") for key in COLUMNS)
    rows.append([f"{OURS} / best peer", *map(times, ratios), "", ""])
    told = table("The libraries, medians", ["", *COLUMNS.values(), "fsync", "equal"], rows, markdown=markdown)
    who: dict[str, list[str]] = {}
    for key, one in best.items():
        who.setdefault(one["peer"], []).append(COLUMNS[key])
    notes = [f"best: {peer} ({', '.join(titles)})" for peer, titles in who.items()] + notes
    return "\n".join([told, "", *(f"- {note}" for note in notes)]).rstrip()


SHORT = {
    "blocks_s": "a save blocks the training for",
    "lost_s": "total slowdown by one save",
    "durable_s": "until the save is durable",
    "cold_s": "restore from disk, files not in the page cache",
    "memory_s": "restore from memory",
}


def short_table(found: Json, *, markdown: bool = False) -> str:
    """Format the table of README: everystep, the best peer by name, and the ratio."""
    ours, rows = found["libraries"][OURS]["figures"], []
    for key, what in SHORT.items():
        best = found["best"][key]
        peer = f"{shown(key, best['value'])} ({best['peer']})"
        rows.append([what, shown(key, ours.get(key)), peer, times(best["ratio"])])
    return table(
        "In short, medians", ["", OURS, "best peer", "everystep / peer (below 1 is better)"], rows, markdown=markdown
    )


def goal_table(found: Json, *, markdown: bool = False) -> str:
    rows = []
    for one in found["goals"]:
        show = seconds if one["unit"] == "s" else times
        ours = "-" if one["ours"] is None else show(one["ours"])
        bound = ("at least " if one["least"] else "at most ") + show(one["bound"])
        verdict = {True: "met", False: "missed", None: "not measured"}[one["met"]]
        rows.append([one["what"] + (f" ({one['note']})" if one["note"] else ""), ours, bound, verdict])
    return table("Ours against its goals", ["", "measured", "goal", ""], rows, markdown=markdown)


def cpu_table(found: Json, *, markdown: bool = False) -> str:
    rows = []
    for name, one in found["libraries"].items():
        label = name
        for who, (user, system) in one["cpu"].items():
            rows.append([label, who, seconds(user), seconds(system), seconds(user + system)])
            label = "" if not markdown else name
    title = "Where the time goes: CPU time of a save beyond what training takes, medians"
    return table(title, ["", "thread or process", "user", "system", "together"], rows, markdown=markdown, left=2)


def limit_table(found: Json, *, markdown: bool = False) -> str:
    rows = []
    for name, one in found["limits"].items():
        figures = ["-", one["error"]] if one.get("error") else [f"{one['gb_s']:.2f}", f"{one['cpu_s_per_gb']:.3f}"]
        rows.append([name, *figures])
    return table("Limits of the machine", ["", "GB/s", "CPU s a GB"], rows, markdown=markdown)


def about(told: Json) -> str:
    m, asked = told["machine"], told["asked"]
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']:g} GiB, Linux {m['kernel']}, {m['file_system']}, torch "
        f"{m['torch']}, Python {m['python']}, {m['date']}; load before {m['load_before']:.1f}; state: {asked['size']}, "
        f"{asked['rounds']} rounds of {asked['cycles']} cycles"
    )


def report(told: Json, found: Json, *, markdown: bool = False) -> str:
    parts = [
        about(told),
        *(make(found, markdown=markdown) for make in (library_table, short_table, goal_table, cpu_table, limit_table)),
    ]
    parts += ["\n".join(f"Failed: {why}" for why in found["failed"])] if found["failed"] else []
    return "\n\n".join(parts)


# -- from the command line --


def tell(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {what}", file=sys.stderr, flush=True)


def measured(arguments: argparse.Namespace) -> Json:
    from peers import MODULES

    adopt()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if unknown := [name for name in arguments.only or () if name not in MODULES]:
        sys.exit(f"unknown: {', '.join(unknown)}; there are: {', '.join(MODULES)}")
    names = [name for name in MODULES if name in (arguments.only or MODULES)]
    plan = Plan(names, arguments.rounds, arguments.cycles, arguments.size)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.folder) as name:
        folder = Path(name)
        told: Json = {"machine": machine(folder), "asked": vars(plan)}
        tell(f"{len(names)} libraries, about {plan.seconds / 60:.0f} minutes; more where one is installed first")
        if told["machine"]["file_system"] in ("tmpfs", "overlay"):
            tell(f"the folder is on {told['machine']['file_system']}, not on a disk: --folder")
        started = time.monotonic()
        told["lines"] = kept = list[Json]()
        try:
            measure(plan, folder, kept)
        except KeyboardInterrupt:
            kept.append({"kind": "failed", "why": STOPPED})
        told["took_s"] = time.monotonic() - started
    tell(f"{told['took_s'] / 60:.0f} minutes in all")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these libraries; default: all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=3, help="timed saves per library and round")
    parser.add_argument("--size", choices=list(ESTIMATE_S), default="full", help="full: 1.5 GiB of state")
    parser.add_argument(
        "--folder", type=Path, help="a folder on the disk to test; default: the folder for temporary files"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all lines, the summary and machine facts there"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="measure nothing, and show the results written by --json"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    arguments = parser.parse_args()
    told: Json = json.loads(arguments.report.read_text()) if arguments.report else measured(arguments)
    found = summary(told["lines"])
    if arguments.json:
        arguments.json.write_text(json.dumps({**told, "summary": found}, indent=1))
    if arguments.picture:
        from picture import draw

        arguments.picture.write_text(draw(found))
    print(report(told, found, markdown=arguments.markdown))
    for why in found["wrong"]:
        tell(f"WRONG: {why}")
    return 1 if found["wrong"] or STOPPED in found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
