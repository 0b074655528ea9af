"""Kill a training run twice, and get exactly the same bits as without kills.

    make demo

A small GPT is trained twice: once without checkpoints, as the reference, and once with everystep. There the trainer is
killed with SIGKILL, restarted, killed together with its writer, and restarted. Then every loss and every tensor of the
two are compared, bit for bit. The training processes themselves measure all numbers shown.

Exit code: 0 if everything is equal and no acknowledged step was lost, 1 if not, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ckpt.core.checkpoint.lease import key_of

TRAINER = Path(__file__).with_name("train_gpt.py")
FIRST_KILL, SECOND_KILL = 0.35, 0.74  # of all steps
LINGER_S = 60.0  # if this process is killed, the writer exits after this time


class DemoError(Exception):
    """Raised when training did not do what the demo needs."""


@dataclass
class Incident:
    """One kill, and the restore that followed it."""

    killed: str
    reached: int  # the last finished step
    acknowledged: int  # the newest step that the surviving tiers had acknowledged
    tier: str | None = None
    restored: int = 0
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        return max(0, self.reached - self.restored)

    @property
    def kept_its_word(self) -> bool:
        return self.restored >= self.acknowledged

    @property
    def place(self) -> str:
        return {None: "nothing", "memory": "memory"}.get(self.tier, "local disk")


@dataclass
class Track:
    """One training from its first step to its last, however often it was killed."""

    name: str
    steps: int
    losses: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    kills: list[int] = field(default_factory=list)
    done: int = 0
    doing: str = ""

    def add(self, line: dict[str, Any]) -> None:
        self.done, self.doing = line["step"], ""
        self.losses[self.done] = line["loss"]
        self.seconds.append(line["seconds"])
        self.stalls.append(line["stall_s"])


class View:
    """Draws both tracks: a progress bar and a line of losses for each, with a mark at each kill."""

    def __init__(self, console: Console, tracks: list[Track]) -> None:
        self._console, self._tracks = console, tracks
        self._full, self._empty, self._mark, self._levels = ("━", "─", "✖", "▁▂▃▄▅▆▇█")
        if console.options.ascii_only:
            self._full, self._empty, self._mark, self._levels = ("#", "-", "X", "_.-=+*%@")

    def __rich__(self) -> RenderableType:
        width = max(20, min(72, self._console.width - 36))
        grid = Table.grid(padding=(0, 2))
        for min_width in (9, width, 14):
            grid.add_column(min_width=min_width, no_wrap=True)
        for track in self._tracks:
            speed = f"{statistics.median(track.seconds) * 1e3:.0f} ms a step" if track.seconds else ""
            grid.add_row(track.name, self._bar(track, width), f"{track.done}/{track.steps}")
            grid.add_row("", self._curve(track, width), track.doing or speed)
        return Group(Text(), grid)

    def _bar(self, track: Track, width: int) -> Text:
        reached = track.done * width // track.steps
        marks = {self._column(track, step, width) for step in track.kills}
        cells = ("killed" if c in marks else "done" if c < reached else "open" for c in range(width))
        looks = {"killed": (self._mark, "bold red"), "done": (self._full, "green"), "open": (self._empty, "dim")}
        bar = Text()
        for cell, run in itertools.groupby(cells):
            glyph, style = looks[cell]
            bar.append(glyph * len(list(run)), style)
        return bar

    def _curve(self, track: Track, width: int) -> Text:
        """Draw the mean loss per column, on one scale; the steep start is cut off."""
        columns: dict[int, list[float]] = {}
        for step, loss in track.losses.items():
            columns.setdefault(self._column(track, step, width), []).append(loss)
        every = sorted(loss for t in self._tracks for loss in t.losses.values()) or [0.0]
        low, high = every[0], every[int(0.93 * len(every))]
        top = len(self._levels) - 1
        share = {c: (statistics.fmean(losses) - low) / ((high - low) or 1.0) for c, losses in columns.items()}
        heights = {c: round(min(1.0, x) * top) for c, x in share.items()}
        return Text("".join(self._levels[heights[c]] if c in heights else " " for c in range(width)), "cyan")

    def _column(self, track: Track, step: int, width: int) -> int:
        return (step - 1) * width // track.steps


class Demo:
    """Starts trainers, one at a time, and watches them."""

    def __init__(self, console: Console, folder: Path, steps: int) -> None:
        self.console, self.folder, self.steps = console, folder, steps
        self.every = max(2, steps // 10)
        self.run = folder / "run"
        self.alone, self.saved = Track("alone", steps), Track("everystep", steps)
        self.incidents: list[Incident] = []
        self.view = View(console, [self.alone, self.saved])
        self.live = Live(self.view, console=console, refresh_per_second=8)
        self._trainer: subprocess.Popen[bytes] | None = None

    def play(self) -> None:
        """Run all trainings. Raise DemoError if a process ends in an unexpected way."""
        with self.live if self.console.is_terminal else contextlib.nullcontext():
            self.say(f"Training a small GPT for {self.steps} steps, without checkpoints: the reference.")
            self._train(self.alone, "--outcome", self.folder / "alone.json")
            self.say(f"The same with everystep: each step into memory, one in {self.every} to disk.")
            with_run = (self.run, "--every", self.every, "--linger-s", LINGER_S)
            for share, what, extra in (
                (FIRST_KILL, "trainer", ()),
                (SECOND_KILL, "trainer and writer", ("--kill-writer",)),
            ):
                at = max(self.every + 1, int(share * self.steps))
                killing = ("--kill-at", at, "--kill-when", "random", *extra)
                acknowledged = self._train(self.saved, *with_run, *killing)
                self._note_kill(what, acknowledged)
            self._train(self.saved, *with_run, "--outcome", self.folder / "saved.json")

    def _note_kill(self, what: str, acknowledged: dict[str, Any] | None) -> None:
        if acknowledged is None:
            raise DemoError("the trainer should have been killed, but finished")
        if what == "trainer":
            held = acknowledged["staged"]
        else:
            held = acknowledged["committed"]
            if not none_left(self.run):
                raise DemoError("the writer should have been killed, but is still running")
        self.incidents.append(Incident(what, self.saved.done, held or 0))
        self.saved.kills.append(self.saved.done)
        self.say(f"Killed {what} with SIGKILL in the middle of step {self.saved.done + 1}.", "bold red")

    def _train(self, track: Track, *options: object) -> dict[str, Any] | None:
        """Run one process; return its last event if it killed itself, None if it finished."""
        track.doing = "starting ..."
        last_words = None
        for line in self._lines(*options):
            if line["event"] == "trained":
                track.add(line)
                self._say_progress(track)
            elif line["event"] == "restored":
                self._note_restored(track, line)
            elif line["event"] == "kill":
                last_words = line
        code = self._trainer.returncode if self._trainer is not None else None
        if code != (0 if last_words is None else -signal.SIGKILL):
            raise DemoError(f"a trainer ended with exit code {code}:\n{self._errors().read_text()[-2000:]}")
        return last_words

    def _say_progress(self, track: Track) -> None:
        """Print progress if nothing can be drawn."""
        if not self.console.is_terminal and track.done % max(1, self.steps // 5) == 0:
            self.say(f"  step {track.done} of {self.steps}, loss {track.losses[track.done]:.3f}")

    def _note_restored(self, track: Track, line: dict[str, Any]) -> None:
        track.doing, track.done = "", line["step"]
        if not self.incidents:
            return
        incident = self.incidents[-1]
        incident.tier, incident.restored, incident.seconds = line["tier"], line["step"], line["seconds"]
        lost = f"{count(incident.lost)} lost" if incident.lost else "nothing lost"
        self.say(
            f"Restored step {incident.restored} from {incident.place} in {show_s(incident.seconds)}, {lost}.", "green"
        )

    def _lines(self, *options: object) -> Iterator[dict[str, Any]]:
        command = [sys.executable, str(TRAINER), *map(str, options), "--json", "--steps", str(self.steps)]
        with self._errors().open("ab") as errors:
            self._trainer = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only this process, which cleans up
                # Waiting threads must not spin: on a busy machine that would make a step many times slower.
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            )
        assert self._trainer.stdout is not None
        with self._trainer.stdout as stdout:
            yield from map(json.loads, stdout)
        self._trainer.wait()

    def _errors(self) -> Path:
        return self.folder / "trainer.log"

    def say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave no process behind."""
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer.wait()
        for process in processes(self.run):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if not none_left(self.run):
            self.say("Cannot kill a process of this demo.", "bold red")

    # -- the end --

    def judge(self) -> int:
        """Print the result, and return the exit code."""
        self.say("")
        self.console.print(self._table())
        median, worst = statistics.median(self.saved.stalls), max(self.saved.stalls)
        self.say(f"Saving took {median * 1e3:.1f} ms (median; at most {worst * 1e3:.1f} ms).")
        ms = [statistics.median(track.seconds) * 1e3 for track in (self.alone, self.saved)]
        self.say(f"A step took {ms[0]:.0f} ms alone, and {ms[1]:.0f} ms with everystep (medians, other load included).")
        broken = [f"step {i.acknowledged}, acknowledged and lost" for i in self.incidents if not i.kept_its_word]
        return verdict(self.console, self.folder, broken)

    def _table(self) -> Table:
        table = Table("killed", "after", "restored", "from", "lost", "took")
        for i in self.incidents:
            after, restored = f"step {i.reached}", f"step {i.restored}"
            table.add_row(i.killed, after, restored, i.place, count(i.lost), show_s(i.seconds))
        return table


def verdict(console: Console, folder: Path, broken: list[str]) -> int:
    """Compare the two outcomes in a folder, print the result, and return the exit code."""
    alone, saved = (json.loads((folder / f"{name}.json").read_text()) for name in ("alone", "saved"))
    problems = compare(alone, saved) + broken
    for problem in problems[:10]:
        console.print(f"wrong: {problem}", style="red", highlight=False)
    if problems:
        console.print(f"FAILED: {len(problems)} differences.", style="bold red", highlight=False)
        return 1
    losses, tensors = len(alone["losses"]), len(alone["digests"])
    text = f"All {losses} losses and all {tensors} tensors of the two trainings are equal, bit for bit."
    console.print(text, style="bold green", highlight=False)
    return 0


def compare(reference: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the losses and tensors in which two outcomes differ; empty if they are equal."""
    problems = []
    mine, theirs = reference["losses"], other["losses"]
    if len(mine) != len(theirs):
        problems.append(f"{len(mine)} losses alone, and {len(theirs)} with everystep")
    pairs = enumerate(zip(mine, theirs, strict=False), start=1)
    problems += [f"loss of step {step}: {x!r} alone, and {y!r} with everystep" for step, (x, y) in pairs if x != y]
    mine, theirs = reference["digests"], other["digests"]
    problems += [f"tensor {name}" for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    return problems


def processes(run: Path) -> list[psutil.Process]:
    """Return trainers and writers of a run. A writer has the key of its run among its arguments."""
    key = key_of(run)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if key in words or (str(TRAINER) in words and str(run) in words):
                found.append(process)
    return found


def none_left(run: Path, timeout_s: float = 10.0) -> bool:
    """Wait until the killed processes of a run are gone; return False on a timeout."""
    end = time.monotonic() + timeout_s
    while processes(run):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def count(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def show_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="steps to train, at least 10 (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the checkpoints")
    options = parser.parse_args()
    if options.steps < 10:
        parser.error("--steps must be at least 10")
    return options


def main() -> int:
    options = parse()
    console = Console()
    # Clean up on every signal except SIGKILL.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    folder = Path(tempfile.mkdtemp(prefix="everystep-demo-"))
    demo = Demo(console, folder, options.steps)
    try:
        demo.play()
        return demo.judge()
    except DemoError as error:
        console.print(f"FAILED: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # cleanup is quick, and must not be interrupted
        demo.stop()
        if options.keep:
            console.print(f"Kept; list it with: ckpt ls {demo.run}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
