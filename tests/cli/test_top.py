"""`ckpt top` for runs that train, died, ended or never existed, in any terminal and with hostile names."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

import ckpt
import toy
from ckpt.store import normalise, open_store
from ckpt.tools.cli import top_data
from ckpt.tools.cli.top_data import RunWatch
from ckpt.tools.cli.top_view import RunStored, TopView, lines
from ckpt.tools.observe.telemetry.status import DeviceStatus, RankStatus, SlotStatus, TierStatus
from commands import Result, run_here
from live_child import child
from processes import PYTHONPATH, eventually, writers

PATIENCE_S = 60.0
RUN = "file:///data/runs/exp1"
FAR = "s3://bucket/exp1"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUTF8": "1", **more}


def top(*arguments: str, **more: str) -> Result:
    """Run `ckpt top` once in this process with other environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_data, "LEAVE_S", PATIENCE_S)  # prevents a slow machine from ending this process
        for name, value in more.items():
            patch.setenv(name, value)
        return run_here("top", *arguments)


def seen(run: str, **more: str) -> dict[str, Any]:
    """Return the JSON output for a run."""
    done = top(run, "--once", "--json", **more)
    assert done.code == 0, done.err
    return dict(done.json)


@contextmanager
def training(run: str, steps: int = 12) -> Iterator[ckpt.Checkpointer]:
    """Yield a trainer in this process after `steps` steps."""
    state = toy.build()
    with ckpt.Checkpointer(state, ckpt.Tier(run, every=10)) as cp:
        for step in range(cp.restore(default=0), steps):
            toy.train_step(state)
            cp.step(step + 1)
        cp.wait(PATIENCE_S)
        yield cp


# -- views --


def rank_status(rank: int = 0, **more: Any) -> RankStatus:
    """Return the status of one of eight healthy ranks."""
    fields: dict[str, Any] = {
        "run": RUN,
        "rank": rank,
        "world": 8,
        "host": "node1",
        "trainer": "alive",
        "doing": "training",
        "step": 1234,
        "calls": 1234,
        "usual_s": 0.1,
        "step_s": 0.1,
        "stall_s": 0.0001,
        "stall_share": 0.001,
        "in_memory": 1234,
        "snapshots": 10**9,
        "trainer_rss": 3 * 10**9,
        "slots": (SlotStatus("sealed", 1234), SlotStatus("eager", 1235), SlotStatus("filling"), SlotStatus("empty")),
        "tiers": (
            TierStatus(RUN, 10, 1230, 1234, 50, 100, 1e9, 1, 4, 0.4, 123, raw=10**9, stored=10**8),
            TierStatus(FAR, 100, 1200, rate=1e7, lag_steps=34, lag_s=3.4),
        ),
    }
    return RankStatus(**{**fields, **more})


def picture(view: TopView, width: int = 240, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(Group(*lines(view, width, height)))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def test_view_shows_problems() -> None:
    """The view shows dead, frozen and silent trainers, failing and slow tiers, and an unresponsive writer."""
    assert "not training: the trainer is dead" in picture(TopView(RUN, [rank_status(trainer="dead", world=1)]))
    assert "frozen" in picture(TopView(RUN, [rank_status(trainer="frozen")]))
    assert "silent for 30 s" in picture(TopView(RUN, [rank_status(idle_s=30.0)]))
    assert "silent" not in picture(TopView(RUN, [rank_status(idle_s=30.0, usual_s=10.0)]))  # its steps take that long
    assert "silent" not in picture(TopView(RUN, [rank_status(idle_s=30.0, doing="paused")]))
    failing = TierStatus(FAR, 10, failed=3, error="access denied", waiting=3)
    text = picture(TopView(RUN, [rank_status(tiers=(failing,))]))
    assert "3 failed" in text and f"{FAR}: access denied" in text and "3 on their way" in text
    long = replace(failing, error="step 9 was left out in it, which has taken nothing for 15 s: see whether it answers")
    narrow = picture(TopView(RUN, [rank_status(tiers=(long,))]), 80)
    assert "3 failed" in narrow and "see whether it answers" in " ".join(narrow.split()), narrow
    assert "no whole snapshot" in picture(TopView(RUN, [rank_status(in_memory=None)]))
    text = picture(TopView(RUN, [rank_status()], {3: "does not respond"}))
    assert "local rank 3" in text and "does not respond" in text and "elsewhere" not in text  # may be one of those
    text = picture(TopView(RUN, stored=RunStored(RUN, error="no route to host")))
    assert "no trainer on this machine" in text and "cannot be read: no route to host" in text


@pytest.mark.parametrize("width", [10, 40, 200])
def test_view_fits_into_any_terminal(width: int) -> None:
    ranks = [rank_status(rank, fault="x" * 500, fault_at="2026", doing="tränen語語") for rank in range(8)]
    for view in (
        TopView(RUN, ranks, stored=RunStored(RUN * 5, 1.0)),
        TopView(RUN * 20, (), {0: "語" * 50}),
        TopView("語" * 99),
    ):
        assert all(cell_len(line) <= width for line in picture(view, width).splitlines())
    assert width < 40 or "1,234" in picture(TopView(RUN, ranks), width)
    whole = picture(TopView(RUN, ranks, stored=RunStored(RUN, 1.0, effective=0.5)), width)
    assert width < 40 or ("steps/s" in whole and "effective 50.00 %" in whole)  # no part of the first lines is cut


def test_worst_of_many_ranks_are_shown() -> None:
    """Dead, lagging and stalling ranks are shown. One line summarizes the others."""
    ranks = [rank_status(rank, world=64) for rank in range(64)]
    ranks[40] = replace(ranks[40], trainer="dead")
    ranks[50] = replace(ranks[50], step=1200)
    ranks[60] = replace(ranks[60], stall_share=0.2)
    text = picture(TopView(RUN, ranks), height=14)
    assert len(text.splitlines()) <= 14
    order = [int(rank) for rank in re.findall(r"^r(\d+) ", text, re.MULTILINE)]
    assert order[:3] == [40, 50, 60] and len(order) < 14
    assert f"{64 - len(order)} more ranks, none worse" in text and "stall at most 0.1 %" in text
    assert (
        len(re.findall(r"^r\d+ ", picture(TopView(RUN, ranks)), re.MULTILINE)) == 64
    )  # negative control: room for all


HOSTILE = "[red]ha[/red] \x1b[2J\x1b]0;owned\x07 \x9b31m \u202egnp.exe \r\n[link=x]"


def test_hostile_names_are_shown_as_text() -> None:
    """Escape sequences and markup in names and messages are shown as text, also through rich."""
    bad = rank_status(
        doing=HOSTILE, host=HOSTILE, fault=HOSTILE, fault_at=HOSTILE, trainer=HOSTILE, slots=(SlotStatus(HOSTILE),),
        tiers=(TierStatus(HOSTILE, error=HOSTILE),), device=DeviceStatus(HOSTILE, 0.5),
    )  # fmt: skip
    stored = RunStored(
        HOSTILE, 1.0, HOSTILE, seen_step=1, seen_host=HOSTILE, ended=HOSTILE, fault=HOSTILE, fault_at="9"
    )
    for view in (TopView(HOSTILE, [bad, rank_status(1)], {7: HOSTILE}, stored), TopView(HOSTILE, (), {}, stored)):
        assert all(line.isprintable() for line in picture(view, 400).splitlines())
        output = io.StringIO()
        Console(file=output, width=400, force_terminal=True, color_system="standard").print(Group(*lines(view, 400)))
        assert "[red]ha[/red]" in output.getvalue() and "owned\x07" not in output.getvalue()
        assert "\x1b[2J" not in output.getvalue() and "\x1b]" not in output.getvalue()
    assert Text.from_markup("[red]ha[/red]").plain == "ha"  # negative control: markup would have vanished


# -- runs --


def test_run_is_shown_through_its_whole_life(run_dir: str) -> None:
    """Covers a missing run, training, a killed trainer whose writer holds the memory, and a run that ended."""
    never = top(run_dir, "--once")
    assert never.code == 2 and "no run at" in never.err and "that a Checkpointer saves to" in never.err
    nowhere = top("memory:nobody")
    assert nowhere.code == 2 and "this run has no writer on this machine" in nowhere.err
    with child(run_dir) as (process, go):
        assert go(25)["step"] == 25
        found = seen(run_dir)
        (rank,) = found["ranks"]
        assert found["trains"] and found["run"] == normalise(run_dir) and found["world"] == 1 and not found["elsewhere"]
        assert (rank["step"], rank["pid"], rank["trainer"], rank["in_memory"]) == (25, process.pid, "alive", 25)
        assert rank["tiers"][0]["committed"] == 20 and rank["tiers"][0]["lag_steps"] == 5
        assert found["place"]["newest"] == 20 and found["place"]["checkpoints"] == 2 and not found["place"]["error"]
        process.send_signal(signal.SIGSTOP)
        assert seen(run_dir)["ranks"][0]["trainer"] == "frozen"
        process.kill()
        process.wait()
        assert eventually(lambda: seen(run_dir)["ranks"][0]["tiers"][0]["committed"] == 25, PATIENCE_S)
        assert eventually(lambda: seen(run_dir)["place"]["fault"] != "", PATIENCE_S)
        found = seen(run_dir)
        assert not found["trains"] and found["ranks"][0]["trainer"] == "dead" and found["place"]["newest"] == 25
        assert "after step 25" in found["ranks"][0]["fault"] and found["place"]["ended"] == "died"
        text = top(run_dir)
        assert text.code == 0 and "\x1b" not in text.out
        assert "not training: the trainer is dead, its writer holds the memory" in text.out
        assert "step 25" in text.out and "last fault" in text.out
    with training(run_dir, 31):
        assert seen(run_dir)["ranks"][0]["started"] == 25
        assert "training" in top(run_dir, "--once").out
    assert eventually(lambda: not seen(run_dir)["ranks"], PATIENCE_S)
    found = seen(run_dir)
    assert not found["trains"] and found["place"]["newest"] == 31 and found["place"]["ended"] == "closed"
    assert found["place"]["seen_step"] == 31 and 0 < found["place"]["effective"] < 1
    text = top(run_dir, "--once", COLUMNS="40")
    assert text.code == 0 and "no trainer on this machine" in text.out and "step 31" in text.out
    assert all(len(line) <= 40 for line in text.out.splitlines())


def test_top_lists_writers_of_this_machine(run_dir: str, own_sockets: Path) -> None:
    """`ckpt top` alone lists writers with their memory, undurable steps, and the time until they exit."""
    none = top()
    assert none.code == 0 and "no writer" in none.out
    with child(run_dir) as (process, go):
        assert go(25)["step"] == 25
        (one,) = top("--json").json["writers"]
        (writer,) = writers(own_sockets)
        assert (one["writer"], one["trainer"], one["not_durable"], one["leaves_s"]) == (writer.pid, "alive", 25, None)
        assert one["run"] == normalise(run_dir) and one["snapshots"] > 0
        process.kill()
        process.wait()
        assert eventually(lambda: top("--json").json["writers"][0]["not_durable"] is None, PATIENCE_S)
        (one,) = top("--json").json["writers"]
        assert one["trainer"] == "dead" and 0 < one["leaves_s"] <= 120
        assert str(writer.pid) in top().out and "dead" in top().out
        assert f"writer {writer.pid} holds" in top(run_dir).out
        writer.suspend()
        assert top("--json").json["silent"] == [{"writer": writer.pid, "why": "does not respond"}]
        writer.kill()
        assert eventually(lambda: "no writer" in top().out, PATIENCE_S)


def test_dead_trainer_and_writer_are_not_shown_running(run_dir: str, own_sockets: Path) -> None:
    """The recent run metrics show a running trainer, but this machine shows that it is gone."""
    with child(run_dir) as (process, go):
        assert go(12)["step"] == 12
        assert eventually(lambda: seen(run_dir)["place"]["seen_step"] is not None, PATIENCE_S)
        for one in writers(own_sockets):
            one.suspend()  # so that it does not detect the trainer's end
        process.kill()
        process.wait()
        for one in writers(own_sockets):
            one.kill()
        assert eventually(lambda: not seen(run_dir)["silent"], PATIENCE_S)
        text = top(run_dir, "--once").out
    assert "no trainer on this machine" in text and "it has run on" in text and "it runs on" not in text, text


def test_ranks_on_other_machines_are_distinguished(run_dir: str, own_sockets: Path, tmp_path: Path) -> None:
    """Each of two nodes sees its own rank live and the other from storage. The JSON output distinguishes them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    other = own_sockets / "other"
    other.mkdir(mode=0o700)
    with child(run_dir, RANK="0", **world) as (_, go0):
        with child(run_dir, RANK="1", CKPT_RUNTIME_DIR=str(other), **world) as (_, go1):
            threads = [threading.Thread(target=go, args=(12,)) for go in (go0, go1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            here, there = seen(run_dir), seen(run_dir, CKPT_RUNTIME_DIR=str(other))
            assert ([one["rank"] for one in here["ranks"]], here["elsewhere"], here["world"]) == ([0], [1], 2)
            assert ([one["rank"] for one in there["ranks"]], there["elsewhere"]) == ([1], [0])
            assert here["place"]["newest"] == there["place"]["newest"] == 10 and here["place"]["ranks"] == 2
            assert there["ranks"][0]["step"] == 12 and there["place"]["seen_rank"] == 0
            text = top(run_dir, "--once").out
            assert "world 2 (1 here)" in text and "1 rank elsewhere" in text
            assert "the run's location has step 10 of all ranks" in text


def test_top_finds_memory_runs_and_later_tiers(run_dir: str, tmp_path: Path) -> None:
    """A run without tiers is found by its name. A query by a later tier names the first one."""
    with ckpt.Checkpointer(toy.build(), options=ckpt.Options(name="alone")) as cp:
        cp.restore(default=0)
        cp.step(5)
        found = seen("memory:alone")
        assert found["run"] == "memory:alone" and found["ranks"][0]["step"] == 5 and found["place"] is None
        assert not found["ranks"][0]["tiers"]
    far = str(tmp_path / "far")
    with ckpt.Checkpointer(toy.build(), [ckpt.Tier(run_dir, every=1), ckpt.Tier(far, every=1)]) as cp:
        cp.restore(default=0)
        cp.step(5)
        cp.wait(PATIENCE_S)
        assert [tier["committed"] for tier in seen(run_dir)["ranks"][0]["tiers"]] == [5, 5]
    text = top(far, "--once", COLUMNS="200").out
    assert "step 5" in text and f"its first tier, which shows it live:\n{normalise(run_dir)}\n" in text


# -- stores that hang --


class Hanging:
    """A store whose listing hangs once `hangs` is set."""

    def __init__(self, url: str, hang: Callable[[], Any]) -> None:
        self._store, self._hang, self.hangs = open_store(url), hang, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._hang if name == "list" and self.hangs else found


def test_hanging_store_does_not_block_the_view(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are still shown live, the stored data is marked as old, and exiting does not wait."""
    made: list[Hanging] = []

    async def never(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(3600)
        yield

    def opens(url: str, **options: Any) -> Any:
        made.append(Hanging(url, never))
        return made[-1]

    monkeypatch.setattr(top_data, "open_store", opens)
    monkeypatch.setattr(top_data, "PLACES_S", 0.05)
    monkeypatch.setattr(top_data, "PLACE_WAIT_S", 0.5)
    with training(run_dir), RunWatch(normalise(run_dir)) as sources:
        view = sources.first(patient=True)
        assert view.looks[0].step == 12 and view.stored is not None and view.stored.newest == 10
        made[0].hangs = True

        def old() -> bool:
            stored = sources.view().stored
            return stored is not None and stored.error == "it does not respond"

        assert eventually(old, PATIENCE_S)
        sources.ask()
        view = sources.view()
        assert view.looks[0].step == 12 and view.stored is not None and view.stored.newest == 10
        assert "it does not respond" in picture(view)


def test_unreachable_bucket_fails_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket's address never responds: after a while the command fails with a clear error."""
    monkeypatch.setattr(top_data, "FIRST_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        keys = {
            "AWS_ACCESS_KEY_ID": "AKIASECRET",
            "AWS_SECRET_ACCESS_KEY": "hidden",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        done = top("s3://bucket/run", "--once", "--option", f"endpoint_url={address}", **keys)
        assert done.code == 2 and "cannot be read" in done.err and "SECRET" not in done.err


# -- terminals --


COLOUR = r"\x1b\[[\d;]*3[1-6]m"


def plain_of(text: str) -> str:
    """Remove cursor movements and colors."""
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text)


class Terminal:
    """Runs `ckpt top` in its own terminal."""

    def __init__(self, *arguments: str, columns: int = 100, rows: int = 24, **more: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.slave)
        command = [sys.executable, "-m", "ckpt", "top", *arguments]
        settings = environment(**{"TERM": "xterm", "LANG": "C.UTF-8", **more})
        settings.pop("COLUMNS", None)
        settings.pop("LINES", None)
        if "NO_COLOR" not in more:
            settings.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            command, stdin=self.slave, stdout=self.slave, stderr=self.slave, env=settings, start_new_session=True
        )
        self.output = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def read(self) -> str:
        while select.select([self.master], [], [], 0)[0]:
            self.output += os.read(self.master, 1 << 16).decode("utf-8", "replace")
        return self.output

    def shows(self, text: str) -> bool:
        return eventually(lambda: text in self.read(), PATIENCE_S)

    def ended(self) -> int:
        assert eventually(lambda: self.read() is not None and self.process.poll() is not None, PATIENCE_S)
        self.read()
        return int(self.process.returncode)

    def is_restored(self) -> bool:
        """Return True if the view is gone, the cursor is visible, and the settings are as before."""
        output, now = self.output, termios.tcgetattr(self.slave)
        gone = output.rfind("\x1b[?1049l") > output.rfind("\x1b[?1049h") >= 0
        return gone and output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") and now == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@contextmanager
def terminal(*arguments: str, **options: Any) -> Iterator[Terminal]:
    made = Terminal(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def test_view_is_live_until_a_signal(run_dir: str) -> None:
    """Steps appear when they are done, also after the terminal was resized. Ctrl-C and SIGTERM end it, and the terminal
    is restored."""
    state = toy.build()
    with ckpt.Checkpointer(state, run_dir) as cp:
        cp.restore(default=0)
        toy.train_step(state)
        cp.step(77001)
        with terminal(run_dir, "--interval", "0.2") as shell:
            assert shell.shows("step 77,001") and shell.shows("tier")
            assert "\x1b[?1049h" in shell.output and re.search(COLOUR, shell.output)
            toy.train_step(state)
            cp.step(88002)
            assert shell.shows("step 88,002")
            shell.resize(30, 10)
            os.killpg(shell.process.pid, signal.SIGWINCH)
            start = len(shell.read())
            assert eventually(lambda: shell.read()[start:].count("\x1b[H") > 3, PATIENCE_S)
            last = shell.output[start:].split("\x1b[H")[-2]
            drawn = [plain_of(one) for one in re.split(r"[\r\n]+", last)]
            assert "step 88,002" in "".join(drawn) and max(map(cell_len, drawn)) <= 30
        for leave in (signal.SIGINT, signal.SIGTERM):
            with terminal(run_dir, "--interval", "0.2", NO_COLOR="1") as shell:
                assert shell.shows("step 88,002")
                assert not re.search(COLOUR, shell.output)
                shell.process.send_signal(leave)
                assert shell.ended() == 0 and shell.is_restored(), shell.output


def test_dumb_terminal_gets_plain_text(run_dir: str) -> None:
    """With TERM=dumb it prints one view without escapes, in ASCII if required, and exits."""
    with training(run_dir):
        with terminal(run_dir, TERM="dumb", columns=40) as shell:
            assert shell.ended() == 0 and "step 12" in shell.output and "\x1b" not in shell.output
            assert all(cell_len(line) <= 40 for line in shell.output.splitlines())
        settings = environment(PYTHONUTF8="0", PYTHONIOENCODING="ascii")
        command = [sys.executable, "-m", "ckpt", "top", run_dir, "--once"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=settings, check=True)
        assert done.stdout.isascii() and re.search(r" training +[#.]{2,4} ", done.stdout)
