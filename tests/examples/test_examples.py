"""The examples survive kills, detect a wrong bit, and leave no processes or files."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from processes import REPO, eventually, start_python, writers
from s3_server import MotoServer, environment

EXAMPLES = REPO / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402
import train_gpt  # noqa: E402


def start(script: str, *arguments: object, tmp: Path) -> subprocess.Popen[str]:
    """Start an example as a separate process with readable output."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPO}:{REPO / 'backends'}",
        "TMPDIR": str(tmp),
        "OMP_WAIT_POLICY": "passive",  # other tests may want the cores
    }
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return start_python(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process: subprocess.Popen[str], beginning: str) -> str:
    """Return the first line with this beginning."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return line.rstrip()
    raise AssertionError(f"no line begins with {beginning!r}:\n{''.join(lines)}")


def judge(folder: Path, alone: dict[str, Any], saved: dict[str, Any]) -> tuple[int, str]:
    """Return exit code and text of the demo's verdict on two outcomes."""
    for name, outcome in (("alone", alone), ("saved", saved)):
        (folder / f"{name}.json").write_text(json.dumps(outcome))
    text = io.StringIO()
    return demo.verdict(Console(file=text, width=120), folder, []), text.getvalue()


def test_plain_example_continues_after_kill(run_dir: str, tmp_path: Path, own_sockets: Path) -> None:
    """After SIGKILL the plain example loses at most the step in flight and finishes. Its writer exits."""
    first = start("plain.py", run_dir, tmp=tmp_path)
    assert read_until(first, "starts at") == "starts at step 0"
    read_until(first, "step 300:")
    first.kill()
    first.communicate()
    second = start("plain.py", run_dir, tmp=tmp_path)
    # The update to step 300 began only when step 299 was in memory.
    assert int(read_until(second, "starts at").split()[-1]) >= 299
    read_until(second, "done: 1500 steps")
    second.communicate(timeout=60.0)
    assert second.returncode == 0
    assert eventually(lambda: not writers(own_sockets))


def test_demo_ends_with_equal_bits_without_processes(tmp_path: Path, own_sockets: Path) -> None:
    """Killed with and without loss of memory, training ends with the bits of the uninterrupted run."""
    process = start("demo.py", "--steps", 12, "--keep", tmp=tmp_path)
    text = process.communicate(timeout=200.0)[0]
    assert process.returncode == 0, text
    assert "equal, bit for bit" in text
    assert "from memory" in text
    assert "from local disk" in text
    assert not writers(own_sockets)
    [folder] = tmp_path.glob("everystep-demo-*")
    outcome = json.loads((folder / "saved.json").read_text())
    assert len(outcome["losses"]) == 12
    assert outcome["digests"].keys() > {"model.embed.weight", "optim.0.exp_avg", "optim.0.step", "batches", "rng"}


def test_demo_fails_on_one_wrong_bit(tmp_path: Path) -> None:
    """The verdict fails for a flipped bit, a different loss or a missing tensor, and names it."""
    state = train_gpt.build(steps=2)
    train_gpt.train_step(state, train_gpt.corpus())
    alone = {"losses": list(state["losses"]), "digests": train_gpt.digests(state)}
    assert judge(tmp_path, alone, {"losses": list(state["losses"]), "digests": train_gpt.digests(state)})[0] == 0

    moment = next(iter(state["optim"].state.values()))["exp_avg"]
    moment.view(-1).numpy().view("u1")[5] ^= 1
    code, text = judge(tmp_path, alone, {**alone, "digests": train_gpt.digests(state)})
    assert (code, text.count("wrong:")) == (1, 1)
    assert "tensor optim.0.exp_avg" in text

    assert judge(tmp_path, alone, {**alone, "losses": [alone["losses"][0] + 1e-6]})[0] == 1
    assert judge(tmp_path, alone, {**alone, "losses": []})[0] == 1
    fewer = dict(list(alone["digests"].items())[1:])
    assert judge(tmp_path, alone, {**alone, "digests": fewer})[0] == 1
    assert judge(tmp_path, {**alone, "digests": fewer}, alone)[0] == 1


def test_s3_example_continues_elsewhere_from_bucket(
    tmp_path: Path, own_sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the loss of trainer, writer and folder, another machine continues from the bucket, bit for bit."""
    with MotoServer() as server:
        server.make_bucket("bucket")
        for name, value in environment(server.url).items():
            monkeypatch.setenv(name, value)
        whole = start("s3.py", "s3://bucket/whole", "--folder", tmp_path / "whole", "--steps", 300, tmp=tmp_path)
        expected = read_until(whole, "done:")
        first = start("s3.py", "s3://bucket/run", "--folder", tmp_path / "a", "--steps", 300, tmp=tmp_path)
        assert read_until(first, "starts at") == "starts at step 0"
        read_until(first, "step 200:")
        first.send_signal(signal.SIGSTOP)  # otherwise it would detect the loss of its writer
        for process in writers(own_sockets):
            process.kill()
        first.kill()
        first.wait()
        assert eventually(lambda: not writers(own_sockets))
        shutil.rmtree(tmp_path / "a")
        second = start("s3.py", "s3://bucket/run", "--folder", tmp_path / "b", "--steps", 300, tmp=tmp_path)
        assert read_until(second, "starts at") == "starts at step 200, from s3://bucket/run"
        assert read_until(second, "done:") == expected
        assert whole.wait(60) == second.wait(60) == 0
