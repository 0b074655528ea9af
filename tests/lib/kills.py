"""Trainers that are killed at chosen moments, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

import inside
import toy
from processes import PYTHONPATH, eventually, run_script, start_python, writers

STEPS = 60
EVERY = 3
MEMORY, DISK = "memory", "disk"

# Trains the state of a module, which has `build`, `train_step` and `digest` as toy has.
TRAIN = """
import importlib, json, logging, os, sys
import ckpt

run, steps, toy = sys.argv[1], int(sys.argv[2]), importlib.import_module(sys.argv[3])
settings = json.loads(sys.argv[4])
build, wait = settings.pop("build", {}), settings.pop("wait", 0)  # its arguments; at which steps commits are waited for
def tell(word, value):
    print(f"{word} {value}\\n", end="", flush=True)  # in one piece: two threads tell

spares = sys.argv[5:]  # what the writers that replace a killed one are armed with

class NextWriter(logging.Handler):
    def emit(self, record):
        if "started a new writer" in record.getMessage():
            tell("replaced", 1)
            os.environ["CKPT_FAIL"] = spares.pop(0) if spares else ""

logging.getLogger("ckpt").addHandler(NextWriter())
state, open_saves = toy.build(**build), []
with ckpt.Checkpointer(state, ckpt.Tier(run, **settings)) as cp:
    os.environ["CKPT_FAIL"] = spares.pop(0) if spares else ""
    start = cp.restore(default=0)
    tell("start", start)
    for step in range(start + 1, steps + 1):
        toy.train_step(state)
        save = cp.step(step)
        save.wait_staged(60)
        tell("staged", step)
        open_saves += [save] if save.tiers else []
        if wait and step % wait == 0:
            cp.wait(60)
        for save in [s for s in open_saves if s.status == "durable"]:
            tell("committed", save.step)
            open_saves.remove(save)
tell("closed", steps)
tell("digest", toy.digest(state))
"""


@dataclass
class Told:
    """The output of the processes of a run: the newest safe steps, and how the last process ended."""

    start: int = 0
    staged: int = 0
    committed: int = 0
    replaced: int = 0
    digest: str = ""

    def hear(self, output: str) -> None:
        for line in output.splitlines():
            word, _, value = line.partition(" ")
            if word in ("staged", "committed"):
                if value:  # else the kill cut the line off
                    setattr(self, word, max(getattr(self, word), int(value)))
            elif word == "closed":
                self.committed = self.staged = int(value)
            elif word == "start":
                self.start = int(value)
            elif word == "replaced":
                self.replaced += 1
            elif word == "digest":
                self.digest = value

    def safe(self, tier: str) -> int:
        """The step that must be there if this tier, and nothing nearer, is left."""
        return max(self.staged, self.committed) if tier == MEMORY else self.committed


@dataclass
class Chain:
    """One run, and the processes that train it, one after the other."""

    run: str
    told: Told
    left: str = MEMORY  # the nearest tier that the last death has left
    module: str = "toy"  # whose state is trained
    steps: int = STEPS
    settings: dict[str, Any] = field(default_factory=lambda: {"every": EVERY, "keep": 2})  # of the tier, and of TRAIN

    def words(self, steps: int) -> list[object]:
        """The arguments of TRAIN."""
        return [self.run, steps, self.module, json.dumps(self.settings)]

    def train(
        self, fail: str = "", *, steps: int = 0, left: str = MEMORY, spares: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Train until the end or a death that leaves the tier `left`; the start must not be before what was safe."""
        safe = self.told.safe(self.left)
        result = run_script(TRAIN, *self.words(steps or self.steps), *spares, fail=fail)
        self.told.start = -1
        self.told.hear(result.stdout)
        if self.told.start >= 0:
            assert not lost(self.told.start, safe), f"{fail}: {safe} was safe, went on at {self.told.start}"
        self.left = left if self.told.start >= 0 or left == DISK else self.left
        return result

    def finish(self, folder: Path) -> None:
        """Train to the end and look at everything."""
        result = self.train()
        assert result.returncode == 0, result.stderr
        assert self.told.digest == toy.reference(STEPS)
        assert problems(self.run) == []
        assert eventually(lambda: not writers(folder)), "a process is left"


problems = inside.problems_at  # damaged log records, and what is wrong with the bytes of live checkpoints (oracle O2)
steps_on_disk = inside.steps_at  # the checkpoints of the present history, newest first


def lost(start: int, safe: int) -> bool:
    """Return True if a run continued before an acknowledged step (oracle O1)."""
    return start < safe


class Trainer:
    """A training process that one talks to, line by line. `before`: a command that starts it, as `unshare`."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        fail: str = "",
        path: str = "",
        before: Sequence[str] = (),
        stderr: int | None = subprocess.DEVNULL,
        **more: str,
    ) -> None:
        folders = ":".join(filter(None, [path, PYTHONPATH]))
        self.process = start_python(
            [*before, sys.executable, "-c", code, *map(str, arguments)],
            env={**os.environ, "OMP_WAIT_POLICY": "passive", "CKPT_FAIL": fail, "PYTHONPATH": folders, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError, AttributeError):
                pipe.close()

    def line(self) -> str:
        """Return its next line of output, or nothing at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def read_until(self, word: str) -> str:
        """Return all output up to the line that starts with `word`, or to the end."""
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if line.startswith(word):
                break
        return said

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def do(self, line: str = "") -> str:
        """Send a line and return the reply."""
        self.say(line)
        return self.line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


def kill_all(processes: list[psutil.Process]) -> None:
    """Kill processes and wait for their end. Writers have no parent that reaps them immediately."""
    ending = [inside.process_of(process.pid) for process in processes]
    for process in processes:
        process.kill()
    assert eventually(lambda: not any(process.alive for process in ending))
