"""The example with changing numbers of ranks ends in equal bits, and detects every difference."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from processes import REPO, start_python, writers

sys.path.insert(0, str(REPO / "examples"))

import resize
from resize import Round


def start(*arguments: object, tmp: Path, path: str = "") -> subprocess.Popen[str]:
    """Start the example as a separate process. `path` comes first in Python's module search."""
    environment = {**os.environ, "PYTHONPATH": f"{path}:{REPO}:{REPO / 'backends'}", "TMPDIR": str(tmp)}
    command = [sys.executable, str(REPO / "examples" / "resize.py"), *map(str, arguments)]
    return start_python(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left(tmp: Path) -> list[Any]:
    """Return processes and folders of an example that has ended."""
    return [*writers(tmp), *tmp.glob("everystep-resize-*")]


def judge(folder: Path) -> tuple[int, str]:
    text = io.StringIO()
    return resize.verdict(Console(file=text, width=120), folder), text.getvalue()


def judge_changed(folder: Path, name: str, change: Callable[[Any], None]) -> tuple[int, str]:
    """Return the verdict with one changed file, which is restored afterwards."""
    path = folder / name
    before = path.read_text()
    content = json.loads(before)
    change(content)
    path.write_text(json.dumps(content))
    try:
        return judge(folder)
    finally:
        path.write_text(before)


def test_other_rank_numbers_end_in_equal_bits(tmp_path: Path, own_sockets: Path) -> None:
    """More or fewer ranks, from memory and disk: all values are equal, nothing is left, and changes are detected."""
    tmp, folder = tmp_path / "tmp", tmp_path / "kept"
    tmp.mkdir()
    process = start("--ranks", "2,3,1", "--steps-per-round", 6, "--keep", folder, tmp=tmp)
    text = process.communicate(timeout=280.0)[0]
    assert process.returncode == 0, text
    assert "equal, bit for bit" in text
    rows = [line.split() for line in text.splitlines() if line.split() and line.split()[-1] == "equal"]
    assert [row[0] for row in rows] == ["2", "3", "1"]
    assert ["memory" in row for row in rows] == [False, True, False]
    assert ["disk" in row for row in rows] == [False, False, True]
    assert not left(tmp)
    assert not writers(own_sockets)
    check_that_changes_are_detected(folder)


def check_that_changes_are_detected(folder: Path) -> None:
    """Check that the verdict names one changed digest, loss, tensor, step or source."""
    assert judge(folder)[0] == 0
    rounds = [Round(**one) for one in json.loads((folder / "rounds.json").read_text())]
    name, last = "optim.blocks.1.up.weight.exp_avg", rounds[-1]

    def flip(content: Any) -> None:
        digest = content["tensors"][name]
        content["tensors"][name] = ("1" if digest[0] == "0" else "0") + digest[1:]

    for file in ("round-2/restored.json", f"round-3/step-{last.reached}.json", f"reference/step-{last.start}.json"):
        code, text = judge_changed(folder, file, flip)
        assert (code, text.count("wrong:")) == (1, 1)
        assert f"tensor {name}" in text
        assert "differ" in text
    noted = f"round-1/step-{rounds[1].start}.json"  # compared with the restored state and with the reference
    assert judge_changed(folder, noted, flip)[1].count("wrong:") == 2

    def other_loss(content: Any) -> None:
        content["losses"][1] += 1e-9

    code, text = judge_changed(folder, f"round-3/step-{last.reached}.json", other_loss)
    assert (code, text.count("loss of step 2:")) == (1, 1)
    assert judge_changed(folder, f"round-3/step-{last.reached}.json", lambda c: c["losses"].pop())[0] == 1
    assert judge_changed(folder, "round-3/restored.json", lambda c: c["tensors"].pop(name))[0] == 1
    assert judge_changed(folder, "round-3/restored.json", lambda c: c["tensors"].update(more=""))[0] == 1
    lost = judge_changed(folder, "rounds.json", lambda c: c[0].update(acknowledged=rounds[1].start + 1))
    assert lost[0] == 1 and "was acknowledged" in lost[1]
    assert judge_changed(folder, "rounds.json", lambda c: c[1].update(tier="file:///somewhere"))[0] == 1
    assert judge_changed(folder, "rounds.json", lambda c: c[2].update(tier="memory"))[0] == 1
