"""The command line on real runs: output, formats and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn

import ckpt
import toy
from ckpt.core.checkpoint.commits import acquire
from ckpt.core.format.manifest import MAJOR, CheckpointId, new_nonce, seal
from ckpt.core.log.run_log import Record, RunLog
from ckpt.guard.report import Fault, SavedStep
from ckpt.store import open_store
from ckpt.tools.cli import app, show, terminal, verify
from ckpt.tools.maintain.examine import examine
from commands import call, flip, increments, save
from processes import REPO, eventually, run_script
from run_files import data_bytes, data_file, data_files, id_at, manifests

__all__ = ["call", "increments"]  # fixtures

COMMANDS = ("ls", "show", "verify", "diff")
HOSTILE = "[red]\x1b[31mworm\x9b\r\u202e[/nosuchtag]"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with the steps 2, 4 and 6. Tests that damage it copy it first."""
    folder = tmp_path_factory.mktemp("made")
    patch = pytest.MonkeyPatch()
    patch.setenv("CKPT_RUNTIME_DIR", str(folder))
    state = toy.build()
    state |= {"tied": state["model"][0].weight, "odd": {"nan": float("nan"), "raw": b"\x00", "big": 10**30}}
    save(folder / "run", state, range(1, 7))
    patch.undo()
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """Return a copy of that run that may be changed."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def arguments_of(command: str, run: Path) -> list[str]:
    return [command, str(run)] if command != "diff" else [command, f"{run}@4", f"{run}@6"]


# -- output of each command --


def test_ls_lists_newest_first(made: Path, call: Any) -> None:
    """Each checkpoint is shown with step, id, time, size, ranks and reason. The newest is marked."""
    found = call("ls", made, "--json")
    rows = found.json["checkpoints"]
    assert (found.code, [r["step"] for r in rows], found.json["url"]) == (0, [6, 4, 2], f"file://{made}")
    assert [r["newest"] for r in rows] == [True, False, False] and all(r["in_history"] for r in rows)
    records = [json.loads(path.read_text()) for path in (made / "log").iterdir()]
    times = {one["body"]["checkpoint"]: one["body"]["time"] for one in records if one["type"] == "COMMIT"}
    assert all(0 < time.time() - when < 3600 for when in times.values())
    for row in rows:
        own = data_bytes(made, of=row["id"])
        part = json.loads(manifests(made, row["step"])[0].read_text())
        assert (row["bytes"], row["ranks"], row["reason"]) == (own, 1, "due")
        assert row["full"] == (not part.get("needs"))
        assert datetime.fromisoformat(row["created"]).timestamp() == int(times[row["id"]])
    lines = call("ls", made).out.splitlines()
    assert lines[0] == f"file://{made}" and re.match(r" +6 .* newest$", lines[2]) and len(lines) == 7


def test_ls_marks_undone_and_omits_retired_steps(run: Path, call: Any) -> None:
    """After a rollback to step 4, step 6 is shown as undone. A checkpoint that a PLAN retired is not shown."""
    two, four = (CheckpointId.parse(id_at(run, step)) for step in (2, 4))

    async def roll_back() -> None:
        log = RunLog(open_store(run))
        await log.open()
        mine = await acquire(log, new_nonce(), restored=four)
        await log.append(lambda _: Record("PLAN", {"retire": [str(two)], "delete": []}, "plan"), owner=mine)
        await log.store.aclose()

    asyncio.run(roll_back())
    rows = {r["step"]: r for r in call("ls", run, "--json").json["checkpoints"]}
    assert rows.keys() == {4, 6}
    assert rows[4]["newest"] and not rows[6]["in_history"]
    assert "undone by a rollback" in call("ls", run).out.splitlines()[2]


def test_show_lists_tensors_values_and_files(made: Path, call: Any) -> None:
    """The output has tensors with dtype, shape and bytes, tied tensors, decoded plain values, data files and totals."""
    found = call("show", made, "--step", 4, "--json").json
    tensors = {t["name"]: t for t in found["tensors"]}
    own = [t for t in tensors.values() if t["alias_of"] is None]
    assert tensors["model.0.weight"] == {
        "name": "model.0.weight", "dtype": "F32", "shape": [64, 64], "bytes": 16384, "alias_of": None,
        "stored": 16384, "held": {"raw": 1}, "depth": 0, "reads": 16384,
    }  # fmt: skip
    assert tensors["tied"]["alias_of"] == "model.0.weight"
    assert (found["step"], found["distinct_tensors"]) == (4, len(own))
    assert found["tensor_bytes"] == sum(t["bytes"] for t in own)
    values = {v["path"]: (v["type"], v["value"]) for v in found["values"]}
    assert values["sched.last_epoch"] == ("int", 4) and len(values["meta.losses"][1]) == 4
    assert values["odd.nan"] == ("float", "nan") and values["odd.big"] == ("int", hex(10**30))
    assert {c["path"]: c["kind"] for c in found["components"]}["optim"] == "optimizer"
    assert [p["size"] for p in found["files"]] == [(made / found["files"][0]["key"]).stat().st_size]
    assert (found["full"], found["needs"], found["older_files"]) == (True, [], 0)
    assert found["stored_bytes"] == found["files"][0]["size"]
    assert found["files"][0]["used"] == found["restore_bytes"] <= found["tensor_bytes"]
    text = call("show", made, "--step", 4).out
    assert re.search(r"^tied +F32 +\(64, 64\) .* model\.0\.weight$", text, re.MULTILINE)
    assert re.search(r"^sched\.last_epoch +int +4$", text, re.MULTILINE)


def test_ls_marks_increments(increments: Path, call: Any) -> None:
    """The size is that of the checkpoint's own data files, and is smaller for an increment."""
    rows = {row["step"]: row for row in call("ls", increments, "--json").json["checkpoints"]}
    assert {step: row["full"] for step, row in rows.items()} == {1: True, 2: True, 3: False, 4: False, 5: True}
    for row in rows.values():
        assert row["bytes"] == data_bytes(increments, of=row["id"]) > 0
    assert max(rows[3]["bytes"], rows[4]["bytes"]) < 0.7 * rows[5]["bytes"]
    lines = call("ls", increments).out.splitlines()
    assert [line.split()[5] for line in lines[2:7]] == ["full", "increment", "increment", "full", "full"]
    assert re.fullmatch(r"5 checkpoints, [0-9.]+ [kM]B written, [0-9.]+ [kM]B in files", lines[-1])


def test_show_describes_how_tensors_are_stored(increments: Path, call: Any) -> None:
    """For each tensor, the output has the stored bytes, their form, the depth of decoding, and the bytes a restore
    reads. For the checkpoint, it has its base, the older files it uses, and consistent totals."""
    found = call("show", increments, "--step", 4, "--json").json
    tensors = {t["name"]: t for t in found["tensors"]}
    held = {name: (t["held"], t["depth"]) for name, t in tensors.items()}
    assert held["frozen"] == ({"reference": 1}, 0) and tensors["frozen"]["stored"] == 0
    assert held["tiny"] == ({"raw": 1}, 0) and tensors["tiny"]["stored"] == 12
    assert held["noise"] == ({"planes": 1}, 0)
    assert held["master"] == ({"delta": 1}, 1) and held["rounded"] == ({"reference": 1}, 0)
    assert 0 < tensors["master"]["stored"] < 0.1 * tensors["master"]["bytes"] < tensors["master"]["reads"]
    assert (found["full"], found["chain"], len(found["needs"])) == (False, 2, 1)
    assert found["older_files"] == sum(not file["own"] for file in found["files"]) > 0
    assert found["stored_bytes"] == sum(file["size"] for file in found["files"] if file["own"])
    assert found["restore_bytes"] == sum(file["used"] for file in found["files"])
    assert found["restore_bytes"] == sum(t["reads"] for t in tensors.values())
    assert sum(t["stored"] for t in tensors.values()) == sum(p["used"] for p in found["files"] if p["own"])
    whole = call("show", increments, "--step", 5, "--json").json
    assert whole["full"] and not whole["needs"] and not whole["older_files"]
    assert not any(t["depth"] for t in whole["tensors"])
    text = call("show", increments, "--step", 4).out
    assert (
        re.search(r"^master +F32 +\(64, 128\) .* delta$", text, re.MULTILINE)
        and "an increment, built on step 3" in text
    )
    gone = "\n".join(show.storage_lines({**found, "needs_there": False}))
    assert found["needs_there"] and "an increment, refers to files of step 2, number 2 after" in gone
    assert all(len(line) <= 100 for line in text.splitlines()[1:]), "all lines except the URL"


def test_verify_reads_older_files_unless_no_data(increments: Path, tmp_path: Path, call: Any) -> None:
    """A flipped bit in a file of step 2 damages the steps that use it. --no-data checks only headers and sizes. The
    announced number of bytes equals the bytes read."""
    run = Path(shutil.copytree(increments, tmp_path / "copy"))
    assert call("verify", run, "--all", "--no-data", "--json").json["data"] is False
    file = data_file(run, 2)
    found = json.loads(call("show", run, "--step", 3, "--json").out)
    assert file in {run / p["key"] for p in found["files"]}
    size = int.from_bytes(file.read_bytes()[:8], "little") + 8
    entries = json.loads(file.read_bytes()[8:size])
    flip(file, size + next(e for n, e in entries.items() if n.startswith("frozen"))["data_offsets"][0] + 9)
    verdicts = {c["step"]: c["verdict"] for c in call("verify", run, "--all", "--json").json["checkpoints"]}
    assert verdicts == {1: "sound", 2: "damaged", 3: "damaged", 4: "damaged", 5: "sound"}
    assert call("verify", run, "--all", "--no-data").code == 0
    os.truncate(file, file.stat().st_size - 1)
    assert call("verify", run, "--all", "--no-data").code == 1

    async def counted() -> tuple[int, int]:
        log = RunLog(open_store(increments))
        await log.open()
        commits, seen = terminal.newest_first(log), list[int]()
        for commit in commits:
            await examine(log, commit, seen.append)
        total = await verify.bytes_to_read(log, commits)
        await log.store.aclose()
        return sum(seen), total

    seen, total = asyncio.run(counted())
    assert seen == total > 0


def test_show_only_filters_tensors(made: Path, call: Any) -> None:
    """A shell pattern selects tensors by name. A pattern without a match is wrong usage."""
    names = [t["name"] for t in call("show", made, "--only", "model.*.weight", "--json").json["tensors"]]
    assert names == ["model.0.weight", "model.1.weight", "model.3.weight"]
    found = call("show", made, "--only", "nothing*")
    assert found.code == 2 and "nothing*" in found.err


def test_verify_of_an_intact_run(made: Path, call: Any) -> None:
    """The exit code is 0 and the verdict is shown for the newest step, a given step, or all."""
    for options, steps in (([], [6]), (["--step", 2], [2]), (["--all"], [6, 4, 2])):
        found = call("verify", made, *options, "--json")
        assert (found.code, found.json["problems"]) == (0, [])
        assert [(c["step"], c["verdict"]) for c in found.json["checkpoints"]] == [(s, "sound") for s in steps]
    assert re.search(r"^ +6 +\S+ +sound$", call("verify", made).out, re.MULTILINE)


def test_verify_names_the_damaged_tensor(run: Path, call: Any) -> None:
    """A flipped byte in a data file gives exit code 1 and the tensor's name. Other checkpoints stay intact."""
    file = data_file(run, 4)
    header = json.loads(file.read_bytes()[8:4096])
    flip(file, 4096 + header["model.3.bias"]["data_offsets"][0] + 5)
    found = call("verify", run, "--all", "--json")
    verdicts = {c["step"]: c for c in found.json["checkpoints"]}
    assert (found.code, [verdicts[s]["verdict"] for s in (6, 4, 2)]) == (1, ["sound", "damaged", "sound"])
    assert [p.split()[0] for p in verdicts[4]["problems"]] == ["model.3.bias"]
    result = call("verify", run, "--step", 4)
    assert result.code == 1 and "model.3.bias is damaged" in result.out
    assert call("verify", run).code == 0


def test_damaged_log_is_reported_on_stderr(run: Path, call: Any) -> None:
    """Commands that still work warn on stderr. If no checkpoint is left, verify exits with 1."""
    flip(sorted((run / "log").iterdir())[-1], 40)
    for command in ("ls", "show", "verify"):
        found = call(command, run, "--json")
        assert "WARNING: " in found.err and "damaged or missing" in found.err and found.json["url"]
        assert found.code == (1 if command == "verify" else 0)
    for path in sorted((run / "log").iterdir())[1:-1]:
        flip(path, 40)
    assert call("verify", run).code == 1
    assert call("verify", run, "--all").code == 1


# -- diff --


def test_diff_of_equal_checkpoints_reads_no_data(run: Path, call: Any) -> None:
    """The digests show that two checkpoints are equal, even if their data files are empty."""
    for file in data_files(run):
        size = file.stat().st_size
        os.truncate(file, 0)
        os.truncate(file, size)
    found = call("diff", f"{run}@4", f"{run}@4", "--json")
    assert (found.code, found.json["equal"], found.json["a"]["step"]) == (0, True, 4)
    assert call("diff", run, run).out == "equal\n"
    assert call("diff", f"{run}@4", run).code == 2  # differences require the bytes, which are damaged


def test_diff_of_two_steps(made: Path, call: Any) -> None:
    """The output has changed tensors with the largest difference, as torch computes it, and plain values by path."""
    found = call("diff", f"{made}@4", f"{made}@6", "--json")
    tensors = {t["name"]: t for t in found.json["tensors"]}
    a, b = ckpt.load(made, step=4), ckpt.load(made, step=6)
    same = {name for name in a if torch.equal(a[name], b[name])} | {"tied"}
    assert found.code == 1 and not found.json["equal"] and tensors.keys() == a.keys() - same
    for name, row in tensors.items():
        if a[name].is_floating_point():
            most = (a[name].double() - b[name].double()).abs().max().item()
            assert row["max_abs_difference"] == most and row["differing"] == (a[name] != b[name]).sum().item()
    values = {v["path"]: (v["a"], v["b"], v["only_in"]) for v in found.json["values"]}
    assert values["sched.last_epoch"] == (4, 6, None) and values["meta.losses.5"][2] == "b"
    assert "odd.nan" not in values and "meta.losses.0" not in values
    text = call("diff", f"{made}@4", f"{made}@6", "--all").out
    assert re.search(r"^value +sched\.last_epoch +4 +6$", text, re.MULTILINE)


def test_diff_of_other_layouts_and_dtypes(tmp_path: Path, call: Any) -> None:
    """Covers tensors in one checkpoint only, changed dtypes or shapes, untied weights, and other dtypes and NaN."""
    t = torch.tensor
    shared = torch.ones(3)
    one = {
        "bf": t([1.0, 2.0], dtype=torch.bfloat16), "half": t([1.0, float("nan")], dtype=torch.float16), "n": t([1, 2]),
        "z": t([1 + 1j]), "shape": torch.ones(2), "dtype": torch.ones(2), "left": torch.ones(1), "same": torch.ones(9),
        "x": shared, "y": shared, "v": {"kind": (1, 2), "n": 1, "gone": None},
    }  # fmt: skip
    two = {
        "bf": t([1.0, 2.5], dtype=torch.bfloat16), "half": t([1.0, 1.0], dtype=torch.float16), "n": t([1, 3]),
        "z": t([1 + 4j]), "shape": torch.ones(3), "dtype": torch.ones(2).double(), "right": torch.ones(1),
        "same": torch.ones(9), "x": torch.ones(3), "y": torch.ones(3), "v": {"kind": [1, 2], "n": True},
    }  # fmt: skip
    for name, state in (("one", one), ("two", two)):
        save(tmp_path / name, state, range(1, 2), every=1)
    found = call("diff", tmp_path / "one", tmp_path / "two", "--json").json
    assert (found["only_in_a"], found["only_in_b"]) == (["left"], ["right"])
    assert sorted(row["name"] for row in found["changed"]) == ["dtype", "shape", "y"]
    assert {row["name"]: (row["differing"], row["max_abs_difference"]) for row in found["tensors"]} == {
        "bf": (1, 0.5), "half": (1, "nan"), "n": (1, 1.0), "z": (1, 3.0),
    }  # fmt: skip
    values = {row["path"]: row["only_in"] for row in found["values"]}
    assert values.items() >= {"v.n": None, "v.gone": "a"}.items()
    text = call("diff", tmp_path / "one", tmp_path / "two").out
    assert re.search(r"^changed +dtype +F32 \(2,\) +F64 \(2,\)$", text, re.MULTILINE)


# -- errors --


@pytest.mark.parametrize("command", app.COMMANDS)
def test_help_has_an_example(command: str, call: Any) -> None:
    """`--help` of each command has an example to copy. The help of `ckpt` lists all commands."""
    found = call(command, "--help")
    assert found.code == 0 and f"ckpt {command} " in found.out.partition("Example:")[2]
    assert "give up" not in found.out.lower()  # checkpoints and files are deleted
    assert " RANGE" not in found.out and max(map(len, found.out.splitlines())) <= 80
    assert f"\n  {command} " in call("--help").out and ckpt.__version__ in call("--version").out


@pytest.mark.parametrize("command", COMMANDS)
def test_unreadable_run_exits_with_code_2(command: str, made: Path, tmp_path: Path, call: Any) -> None:
    """Covers a missing run, a foreign folder and a missing step: no traceback. An unknown scheme is one line."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "FORMAT.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "none", tmp_path / "file", tmp_path / "other", "nosuch://place"):
        found = call(command, place, *([made] if command == "diff" else []))
        lines = 1 if place == "nosuch://place" else 2
        assert (found.code, found.out, len(found.err.splitlines())) == (2, "", lines), (place, found.err)
        assert all(line.startswith("ckpt: ") for line in found.err.splitlines())
    if command != "ls":
        missing = [command, f"{made}@5", made] if command == "diff" else [command, made, "--step", 5]
        found = call(*missing)
        assert (found.code, found.out) == (2, "") and "6, 4, 2" in found.err


def test_wrong_usage_exits_with_code_2(made: Path, call: Any) -> None:
    """Covers unknown commands and options, missing arguments, and exclusive options."""
    for args in (
        ["nosuch"],
        ["ls"],
        ["ls", made, "--nosuch"],
        ["verify", made, "--step", "1", "--all"],
        ["diff", made],
    ):
        assert call(*args).code == 2


def test_other_format_versions_are_rejected(run: Path, call: Any) -> None:
    """A newer major version exits with 2 and advises an upgrade. An older one, which is no longer read, is named in the
    error."""
    path = run / "FORMAT.json"
    fields = {k: v for k, v in json.loads(path.read_text()).items() if k != "digest"}
    for major, text in ((MAJOR + 1, "upgrade"), (2, "format 2.0, this version reads 3.x: use the version that wrote")):
        path.write_bytes(seal({**fields, "major": major}))
        for command in COMMANDS:
            found = call(*arguments_of(command, run))
            assert found.code == 2 and text in found.err.replace("\n", " ")


def test_damaged_checkpoint_exits_with_code_2_if_needed(run: Path, call: Any) -> None:
    """`show` and `diff` report the damage. `ls` reads only the log and lists all checkpoints."""
    flip(manifests(run, 6)[0], 100)
    for args in (["show", run], ["diff", f"{run}@4", run]):
        found = call(*args)
        assert (found.code, found.out) == (2, "") and "step 6 is damaged" in found.err
    found = call("ls", run, "--json")
    assert found.code == 0 and [r["step"] for r in found.json["checkpoints"]] == [6, 4, 2]


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document_with_stable_keys(command: str, made: Path, call: Any) -> None:
    """The keys never change, the output is ASCII, and no tensor data is included."""
    keys = {
        "ls": {"url", "damaged_records", "may_be_lost", "bytes_in_files", "checkpoints"},
        "show": {
            "url", "damaged_records", "step", "id", "ranks", "tensors", "distinct_tensors", "tensor_bytes",
            "components", "values", "files", "full", "needs", "needs_there", "chain", "stored_bytes",
            "older_files", "older_steps", "restore_bytes", "cadence", "info", "parents", "content",
        },
        "verify": {"url", "data", "problems", "unreadable", "checkpoints"},
        "diff": {"a", "b", "equal", "only_in_a", "only_in_b", "changed", "tensors", "values"},
    }  # fmt: skip
    found = call(*arguments_of(command, made), "--json")
    assert found.json.keys() == keys[command] and found.out.isascii()


def test_hostile_names_stay_text(tmp_path: Path, call: Any) -> None:
    """Markup, escapes and direction overrides in names and values never reach a terminal, in any command or error."""
    for name, scale in (("one", 1.0), ("two", 2.0)):
        weight = nn.ParameterDict({"w": nn.Parameter(torch.ones(3) * scale)})
        save(tmp_path / name, {HOSTILE: weight, "v": {HOSTILE: HOSTILE + name}}, range(1, 2), every=1)
    one, two = tmp_path / "one", tmp_path / "two"
    outputs = [call("show", one), call("diff", one, two), call("show", one, "--json"), call("diff", one, two, "--json")]
    (file,) = data_files(one)
    flip(file, -1)
    outputs += [call("verify", one), call("diff", one, two)]
    for found in outputs:
        text = found.out + found.err
        assert "[red]" in text and "worm" in text and "[/nosuchtag]" in text
        assert not set(text) & set("\x1b\x9b\r\u202e")
    assert [found.code for found in outputs] == [0, 1, 0, 1, 1, 2]


def test_negative_control_raw_names_would_reach_the_terminal(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `safe`, the characters that the test above excludes are printed."""
    save(tmp_path / "one", {"v": {HOSTILE: 1}}, range(1, 2), every=1)
    monkeypatch.setattr(terminal, "safe", str)
    assert "\x1b" in call("show", tmp_path / "one").out


# -- as a process --


LIGHT = """
import sys
import time
from ckpt.tools import cli
for words in sys.argv[1:]:
    command, *rest = words.split()
    assert cli.main([command, *rest]) == (command == "diff"), words
    print(command, "numpy" in sys.modules, "torch" in sys.modules, file=sys.stderr)
import torch
print(torch in sys.modules.values(), file=sys.stderr)
"""


def test_torch_is_not_imported(made: Path) -> None:
    """No command imports torch, and `ls` not even numpy. Control: the check detects an import."""
    result = run_script(LIGHT, *(" ".join(arguments_of(command, made)) for command in COMMANDS), fresh=True)
    expected = "ls False False\nshow True False\nverify True False\ndiff True False\nTrue\n"
    assert (result.returncode, result.stderr) == (0, expected)


def test_closed_pipe_exits_quietly(made: Path) -> None:
    """If a pipe's reader is closed before the first byte, the exit code is 141 and nothing is printed."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'backends'}"}
    command = [sys.executable, "-m", "ckpt", "show", str(made)]
    result = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_storage_options_are_parsed() -> None:
    """Options may be nested. Values are parsed as JSON, but keys and secrets stay text. An error does not repeat the
    value."""
    context: Any = None
    given = ["a.b=5", "a.c=x", "anon=true", "secret=123", "url=http://x?y=z", 'config_kwargs={"read_timeout": 5}']
    expected = {"a": {"b": 5, "c": "x"}, "anon": True, "secret": "123", "url": "http://x?y=z"}
    assert terminal.parse_options(context, context, given) == expected | {"config_kwargs": {"read_timeout": 5}}
    for wrong in (["hidden-without-key"], ["=hidden"], ["a=hidden", "a.b=hidden"]):
        with pytest.raises(click.BadParameter) as caught:
            terminal.parse_options(context, context, wrong)
        assert "hidden" not in str(caught.value)


def a_run_at(run: Path) -> Path:
    """Return a run without checkpoints."""
    with ckpt.Checkpointer({"w": torch.ones(2)}, str(run)):
        pass
    return run


@pytest.mark.parametrize(
    ("held", "saved"), [(([61, 60, 57], [63, 62, 60]), "60"), (([61], [63]), "nothing"), (([61], []), "61")]
)
def test_saved_step_of_a_fault_is_common_to_ranks(
    tmp_path: Path, call: Any, held: tuple[list[int], list[int]], saved: str
) -> None:
    """The oldest of their newest steps may be overwritten, so it is not used. Ranks without steps are ignored."""
    run = a_run_at(tmp_path / "run")
    (run / "faults").mkdir()
    for rank, steps in enumerate(held):
        own = [SavedStep(step, "memory", "ring", 0.1) for step in steps]
        one = Fault("death", "killed", rank=rank, world=2, saved=own, term="3.abcdefgh")
        (run / one.key).write_bytes(one.to_bytes())
    (row,) = (line for line in call("faults", run).out.splitlines() if "crash or kill" in line)
    assert row.split("crash or kill")[1].split()[0] == saved


def test_requested_save_is_not_a_fault(tmp_path: Path, call: Any) -> None:
    """`ckpt faults` shows a requested save as such, with its durable step and without advice."""
    run, state = tmp_path / "run", toy.build()
    assert call("faults", a_run_at(run)).out == f"file://{run}\nno faults\n"
    with ckpt.Checkpointer(state, ckpt.Tier(str(run), every=1000)) as cp:
        cp.restore(default=0)
        steps = iter(range(1, 1000))

        def trained() -> bool:
            toy.train_step(state)
            cp.step(next(steps))
            return any((run / "faults").glob("*.json"))

        cp.request_save("before the upgrade")
        assert eventually(trained)
    (incident,) = call("faults", run, "--json").json["incidents"]
    assert incident[0]["asked"] is True and incident[0]["kind"] == "request"
    text = call("faults", run).out
    assert "no faults" in text and "requested" in text and "before the upgrade" in text and "nothing to do" not in text
    assert "last fault" not in call("top", run, "--once").out
    page = call("report", run, "-o", "-").out
    assert 'class="rule asked"' in page and 'class="rule fault"' not in page
