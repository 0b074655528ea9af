"""Text output fits the terminal, and no word is cut."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import toy
from ckpt.tools.cli import terminal
from commands import call, flip, save
from run_files import data_files

__all__ = ["call"]  # a fixture

NAMES = [
    "ls", "show", "verify", "prune", "gc", "rm", "pin", "unpin", "report", "faults", "top", "diff", "plan", "copy",
    "export", "repair", "doctor",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a run in a folder with a long name, and a copy with a damaged tensor."""
    folder = tmp_path_factory.mktemp("runs") / "experiments-of-a-group-with-a-long-name"
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(folder.parent))
    save(folder / "run", toy.build(), range(1, 7))
    patch.undo()
    hurt = Path(shutil.copytree(folder / "run", folder / "hurt"))
    for file in data_files(hurt):
        flip(file, file.stat().st_size // 2)
    return folder / "run", hurt


def commands(run: Path, hurt: Path, fresh: Path) -> dict[str, list[list[object]]]:
    """Return calls of each command that prints a table."""
    return {
        "ls": [[run], [run.parent]],
        "show": [[run], [run, "--only", "*.weight"]],
        "verify": [[run, "--all"], [hurt, "--all"]],
        "prune": [[run, "--keep-last", 2]],
        "gc": [[run]],
        "rm": [[f"{run}@2"]],
        "pin": [[f"{run}@2", "--note", "a long note " * 9]],
        "report": [[run]],
        "faults": [[run]],
        "top": [[run, "--once"]],
        "diff": [[f"{run}@2", f"{run}@4", "--all"]],
        "plan": [["--gpus", 16384, "--params", "405B", "--step-s", 5.9], ["--costs", run, "--gpus", 64]],
        "copy": [[run, fresh / "copy", "--all"]],
        "unpin": [[f"{run}@2"]],
        "export": [[run, "--to", fresh / "hf", "--dtype", "bf16", "--dry-run"]],
        "repair": [[hurt], [hurt, "--from", run]],
        "doctor": [[fresh / "new", "--size", 1, "--state-gb", 14, "--step-s", 1]],
    }


def squeezed(text: str) -> set[str]:
    return set(text.split())


@pytest.mark.parametrize("command", NAMES)
def test_output_fits_80_columns(
    runs: tuple[Path, Path], tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """In a terminal of 80 columns and in a pipe, a line is only wider if it is a single word. All words of a wide
    terminal appear, uncut."""
    for number, arguments in enumerate(commands(*runs, tmp_path)[command]):
        wide = call(command, *arguments).out
        for columns in ("80", None):
            monkeypatch.delenv("COLUMNS") if columns is None else monkeypatch.setenv("COLUMNS", columns)
            if columns is None:
                monkeypatch.setattr(terminal.sys, "__stdout__", None)  # get_terminal_size uses it
            output = call(command, *arguments).out
            long = [line for line in output.splitlines() if cell_len(line) > 80 and len(line.split()) > 1]
            assert output and not long, (number, long)
            if command not in ("doctor", "top"):  # these measure each time
                # Values outside of the table have their title with a colon.
                missing = squeezed(wide) - squeezed(re.sub(r":(\s)", r" \1", output)) - squeezed(output)
                assert not missing, (number, missing)
        monkeypatch.undo()
        monkeypatch.setenv("COLUMNS", "1000")
