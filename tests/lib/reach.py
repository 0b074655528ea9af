"""Record which functions of the library run in a process and in its writer, while a flag file exists.

    record()           context manager for the process that traces: everything that runs inside is recorded
    environment(...)   for a process whose children, such as the writer, shall record as well
    found(folder, pid) the files, classes and functions that ran

Each traced process starts a thread that polls for the flag, and writes one JSON file when the flag has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "EVERYSTEP_REACH"  # an environment variable with the folder of the flag and of what is recorded
_POLL_S = 0.005
_SETTLE_S = 0.3  # the recording processes have written their files by then


@dataclass(frozen=True)
class Reach:
    """Functions that ran, as (file, qualified name)."""

    functions: frozenset[tuple[str, str]]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    @property
    def classes(self) -> set[tuple[str, str]]:
        """Classes of which a method ran. Their names begin with a capital letter, perhaps after an underscore."""
        found = set()
        for file, name in self.functions:
            parts = name.replace("<locals>.", "").split(".")
            found |= {(file, part) for part in parts[:-1] if part.lstrip("_")[:1].isupper()}
        return found

    def __str__(self) -> str:
        return f"{len(self.files)} files, {len(self.classes)} classes, {len(self.functions)} functions"


def install() -> None:
    """Start to record in this process, if the environment has a folder for it. For sitecustomize."""
    place = os.environ.get(FOLDER)
    if not place:
        return
    recording, seen = [False], set[tuple[str, str]]()

    def profile(frame: Any, event: str, arg: object) -> None:
        if event == "call" and recording[0]:
            code = frame.f_code
            if "/ckpt/" in code.co_filename or "/ckpt_backends/" in code.co_filename:
                seen.add((code.co_filename, code.co_qualname))

    def poll() -> None:
        while True:
            wanted = Path(place, "on").exists()
            if recording[0] and not wanted:
                with contextlib.suppress(OSError):
                    Path(place, f"{os.getpid()}.json").write_text(json.dumps(sorted(seen)))
            elif wanted and not recording[0]:
                seen.clear()
            recording[0] = wanted
            time.sleep(_POLL_S)

    threading.setprofile(profile)
    sys.setprofile(profile)
    threading.Thread(target=poll, name="reach", daemon=True).start()


def environment(folder: Path, *, recorded: bool = True) -> dict[str, str]:
    """Return what a Python process needs so that it and its children record into a folder."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text("import reach\nreach.install()\n")
    path = ":".join([str(folder / "site"), str(Path(__file__).parent)])
    return {"PYTHONPATH": path, FOLDER: str(folder) if recorded else ""}


@contextlib.contextmanager
def record() -> Iterator[None]:
    """Record while this lasts, in all processes that were started with the environment of this one."""
    flag = Path(os.environ[FOLDER], "on")
    flag.touch()
    time.sleep(0.1)
    yield
    flag.unlink()
    time.sleep(_SETTLE_S)


def found(folder: Path, pid: int | None = None) -> Reach:
    """Return what one process has recorded, or all."""
    rows = [
        row for path in folder.glob("*.json" if pid is None else f"{pid}.json") for row in json.loads(path.read_text())
    ]
    return Reach(frozenset((file, name) for file, name in rows))
