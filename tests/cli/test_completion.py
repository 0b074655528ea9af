"""Shell completion, set up as in docs/guide/operate.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.tools.cli.app import COMMANDS
from processes import PYTHONPATH, REPO

GUIDE = (REPO / "docs/guide/operate.md").read_text()


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a command `ckpt`."""
    command = tmp_path / "bin" / "ckpt"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckpt "$@"\n')
    command.chmod(0o755)
    (tmp_path / "runs-of-mine").mkdir()
    return {**os.environ, "PYTHONPATH": PYTHONPATH, "PATH": f"{command.parent}:{os.environ['PATH']}"}


def completed(text: str, shell: dict[str, str], where: Path) -> list[str]:
    """Return bash's completions of this line, with the setup line of the guide."""
    (line,) = re.findall(r'`(eval "\$\(_CKPT_COMPLETE=bash_source ckpt\)")`', GUIDE)
    given = text.split(" ")
    script = f"{line}\ncomplete -p ckpt\nCOMP_WORDS=({text}) COMP_CWORD={len(given) - 1}\n"
    script += 'compopt() { compgen -o "$2" -- "${COMP_WORDS[$COMP_CWORD]}"; }\n'  # bash allows it only in a completion
    script += f"_ckpt_completion ckpt '{given[-1]}' '{given[-2]}'\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=shell, cwd=where, capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stderr, done.stderr
    registered, *found = done.stdout.split("\n")
    assert "-F _ckpt_completion ckpt" in registered
    return [one for one in found if one]


def test_bash_completes_commands_options_and_folders(shell: dict[str, str], tmp_path: Path) -> None:
    assert completed("ckpt re", shell, tmp_path) == [name for name in COMMANDS if name.startswith("re")]
    assert completed("ckpt verify --no", shell, tmp_path) == ["--no-data"]
    assert completed("ckpt restore x --format d", shell, tmp_path) == ["dcp"]
    assert completed("ckpt ls runs", shell, tmp_path) == ["runs-of-mine"]
    assert completed("ckpt diff a runs", shell, tmp_path) == ["runs-of-mine"]


@pytest.mark.parametrize(("name", "first"), [("zsh", "#compdef ckpt"), ("fish", "function _ckpt_completion")])
def test_other_shells_have_completion_scripts(shell: dict[str, str], name: str, first: str) -> None:
    assert f"_CKPT_COMPLETE={name}_source ckpt" in GUIDE
    done = subprocess.run(
        ["ckpt"],
        env={**shell, "_CKPT_COMPLETE": f"{name}_source"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith(first) and not done.stderr
    if shutil.which(name):
        subprocess.run([name, "-n"], input=done.stdout, text=True, timeout=60, check=True)
