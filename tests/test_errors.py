"""Tests of error messages: each states what happened, and its advice what is safe and what to do next."""

from __future__ import annotations

import argparse
import ast
import json
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import ckpt
from ckpt import errors
from ckpt.core.state.placement import mismatch
from ckpt.errors import CheckpointError, FullError, from_wire, to_wire
from ckpt.tools.cli import app


def kinds(base: type[CheckpointError] = CheckpointError) -> Iterator[type[CheckpointError]]:
    for kind in base.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
            yield from kinds(kind)


@pytest.mark.parametrize("kind", sorted(set(kinds()), key=lambda kind: kind.__name__))
def test_every_error_has_advice(kind: type[CheckpointError]) -> None:
    """Each public class has advice, a traceback shows it once, and it names existing commands.
    Wrong calls need none, since their message is complete."""
    error = kind("it went wrong")
    assert str(error) == "it went wrong" and bool(error.advice) == (
        kind not in (errors.UsageError, errors.InvalidArgumentError)
    )
    shown = "".join(traceback.format_exception(error))
    assert shown.endswith(f"it went wrong\n{error.advice}\n" if error.advice else "it went wrong\n")
    for command in re.findall(r"`ckpt (\w+)", error.advice):
        assert command in app.cli.list_commands(None)  # type: ignore[arg-type]


def test_mismatch_states_once_that_nothing_was_changed() -> None:
    """The message has the problems and the remedy, and only the advice has that nothing was changed."""
    shown = "".join(traceback.format_exception(mismatch(["w has shape [2] in the checkpoint and [3] here"])))
    assert shown.count("changed") == 1 and "w has shape [2]" in shown
    assert (
        "Change the model back, or pass strict=False to restore the entries that fit (dtypes are converted)." in shown
    )


def test_messages_name_no_page_of_the_repository() -> None:
    """An installed package has no docs/ folder, so no message names a file there."""
    texts = list[str]()
    for path in Path(ckpt.__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        strings = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
        texts += [node.value for node in strings if isinstance(node.value, str)]
    assert len(texts) > 1000 and not [text for text in texts if "docs/" in text]


def test_advice_survives_pickle_and_wire() -> None:
    """An error of the writer raised in the trainer has its advice once; so has a pickled one."""
    for error in (from_wire(to_wire(FullError("no space"))), pickle.loads(pickle.dumps(FullError("no space")))):
        assert type(error) is FullError and "".join(traceback.format_exception(error)).count("ckpt gc") == 1


def test_advice_is_shown_to_users(tmp_path: Path) -> None:
    """The advice appears in the traceback of a script, and after the message of a command."""
    script = f"import ckpt; ckpt.load({str(tmp_path / 'nothing')!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and errors.NoCheckpointError.advice in done.stderr, done.stderr
    command = [sys.executable, "-m", "ckpt", "show", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    first, second = done.stderr.splitlines()
    assert "`ckpt import` creates a run from another program's files" in first and "nothing" in first
    assert second == "ckpt: Nothing was changed.", "`ckpt ls` would fail too"


@pytest.mark.parametrize("kind", sorted(set(kinds()), key=lambda kind: kind.__name__))
def test_hint_never_names_the_called_command(kind: type[CheckpointError]) -> None:
    """Each command prints all advice except sentences about itself or about Python calls."""
    for command in app.COMMANDS:
        said = app.advice_of(kind("no"), [command, "--json", "RUN"])
        assert f"`ckpt {command}" not in said and not re.search(r"\w\(|URL", said)
        left_out = [one for one in re.split(r"(?<=\.) ", kind.advice) if one not in said]
        assert all(f"`ckpt {command}" in one or re.search(r"\w\(", one) for one in left_out)


def test_hints_contain_the_given_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hints contain the given run instead of RUN or URL, so they can be copied. Wrong calls get no hint."""
    run = tmp_path / "a run"
    with ckpt.Checkpointer({"model": torch.nn.Linear(2, 2)}, str(run)) as cp:
        cp.step(1)
    assert app.main(["show", f"{run}@9"]) == 2
    assert f"`ckpt ls '{run}'` lists the checkpoints" in (said := capsys.readouterr().err) and "default=" not in said
    assert app.main(["show", str(run), "--step", "9"]) == 2
    assert f"`ckpt ls '{run}'` lists the checkpoints" in capsys.readouterr().err
    assert app.main(["show", "http:/x"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_hint_names_the_affected_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full destination does not suggest pruning the source, and a folder of files is not called a run."""
    runs = [str(tmp_path / name) for name in ("run", "run2")]
    for run in runs:
        with ckpt.Checkpointer({"model": torch.nn.Linear(2, 2)}, run) as cp:
            cp.step(1)
    assert app.main(["diff", f"{runs[0]}@1", f"{runs[1]}@9"]) == 2
    assert f"`ckpt ls {runs[1]}` lists" in capsys.readouterr().err
    assert app.main(["diff", f"{runs[0]}@9", f"{runs[1]}@1"]) == 2
    assert f"`ckpt ls {runs[0]}` lists" in capsys.readouterr().err
    said = app.advice_of(FullError(f"no space left: (log/1.json in file://{runs[1]})"), ["copy", *runs, "--yes"])
    assert f"prune {runs[1]} --keep" in said and f"gc {runs[1]}`" in said
    assert "prune RUN --keep" in app.advice_of(FullError("no space left"), ["copy", *runs])
    (tmp_path / "file").write_text("x")
    assert app.main(["restore", runs[0], "--to", str(tmp_path / "file" / "x.pt")]) == 2
    assert capsys.readouterr().err.count("ckpt: ") == 1


def test_rm_without_step_explains_deletion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without @STEP nothing is deleted. The error asks for a step, and explains how to delete a whole run."""
    run = tmp_path / "run"
    with ckpt.Checkpointer({"model": torch.nn.Linear(2, 2)}, str(run)) as cp:
        cp.step(1)
    before = sorted(run.rglob("*"))
    assert app.main(["rm", str(run), "--yes"]) == 2 and sorted(run.rglob("*")) == before
    said = capsys.readouterr().err
    assert f"{run}@STEP" in said and "delete its folder" in said and "ckpt top" in said


def test_failed_import_does_not_advise_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["import", str(tmp_path / "nothing"), str(tmp_path / "run")]) == 2
    assert "`ckpt import" not in (said := capsys.readouterr().err) and "does not exist" in said
    assert app.main(["ls", str(tmp_path)]) == 2
    assert "`ckpt import`" in capsys.readouterr().err


def test_user_errors_end_in_line_of_caller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors that a user can correct have advice, no cause, and only the wrapper's frame. At DEBUG the log has all."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    model = torch.nn.Linear(2, 2)
    with ckpt.Checkpointer({"model": model}, str(tmp_path / "run")) as cp:
        cp.step(1)
        cp.save().wait_durable(60.0, tier="all")
        calls = [
            (ckpt.errors.NoCheckpointError, lambda: ckpt.load(tmp_path / "nothing")),
            (ckpt.errors.NoCheckpointError, lambda: ckpt.Run(tmp_path / "nothing").list()),
            (ckpt.errors.InvalidArgumentError, lambda: ckpt.Run(f"{tmp_path}@5")),
            (ckpt.errors.NoCheckpointError, lambda: ckpt.load(tmp_path / "run", step=7)),
            (ckpt.errors.UsageError, lambda: ckpt.load(tmp_path / "run").slice("model.weight", 7)),
            (ckpt.errors.StateError, lambda: ckpt.Checkpointer({"it": object()}, str(tmp_path / "new"))),
            (ckpt.errors.FormatError, lambda: ckpt.Checkpointer({"model": model}, str(tmp_path / "other"))),
            (ckpt.errors.StoreError, lambda: ckpt.Checkpointer({"model": model}, str(tmp_path / "file" / "run"))),
            (ckpt.errors.UsageError, lambda: ckpt.Checkpointer({"model": model}, str(tmp_path / "run"))),
            (ckpt.errors.UsageError, lambda: cp.step(1)),
            (ckpt.errors.NoCheckpointError, lambda: cp.restore(step=9)),
        ]
        for kind, call in calls:
            with caplog.at_level("DEBUG", "ckpt"), pytest.raises(kind) as raised:
                call()
            frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
            assert frames[0].startswith("test_user_errors") and frames[1:] == ["<lambda>", "entered"], (kind, frames)
            told = "".join(traceback.format_exception(raised.value))
            assert told.count("Traceback") == 1 and told.count(raised.value.advice or "Traceback") == 1
            assert "Traceback" in caplog.text and "an error in " in caplog.text, kind
            caplog.clear()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (DataLoader([1, 2]), "ckpt.Loader"),
        (iter(DataLoader([1, 2])), "ckpt.Loader"),
        (argparse.Namespace(lr=1), "vars(...)"),
        ((n for n in range(3)), "torch.Generator"),
    ],
)
def test_common_wrong_state_entries_are_explained(value: object, told: str, tmp_path: Path) -> None:
    """The error names what to save instead."""
    with pytest.raises(ckpt.errors.StateError, match=re.escape(told)):
        ckpt.Checkpointer({"model": torch.nn.Linear(2, 2), "it": value}, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_gc_reports_no_own_file_as_foreign(tmp_path: Path) -> None:
    with ckpt.Checkpointer({"model": torch.nn.Linear(2, 2)}, str(tmp_path)) as cp:
        cp.step(1)
    command = [sys.executable, "-m", "ckpt", "gc", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["foreign"] == [] and (tmp_path / "ledger").is_dir()
