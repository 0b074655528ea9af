"""What an import costs, what no module does, that `make lint` sees an import that goes the wrong way, and that tests of
promises know the library from outside."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from processes import REPO

PACKAGES = (REPO / "ckpt", REPO / "backends" / "ckpt_backends")
MODULES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


def named(path: Path) -> str:
    package = next(package for package in PACKAGES if package in path.parents)
    return ".".join(path.relative_to(package).with_suffix("").parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere: at the top, inside functions, and for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield str(node.module)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ckpt/core/writer/life.py", "from ckpt.core.snapshot import stage"),
        ("ckpt/writer_process.py", "from ckpt.core.state import tensors"),
        ("ckpt/core/writer/life.py", "def f():\n    from ckpt.guard.report import Fault"),
        ("ckpt/core/format/digest.py", "from ckpt.tools.maintain import damage"),
        ("ckpt/core/log/run_log.py", "def f():\n    import torch"),
        ("backends/ckpt_backends/local.py", "from ckpt.core.log.run_log import RunLog"),
        ("ckpt/tools/maintain/audit.py", "import rich.table"),
        ("ckpt/core/run/training_run.py", "from ckpt.adapters import shards"),
        (None, ""),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_seen(module: str | None, line: str, tmp_path: Path) -> None:
    """Each contract of `.importlinter` is broken by such a line, and none of them is without it."""
    for package in PACKAGES:
        shutil.copytree(package, tmp_path / package.relative_to(REPO), ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / ".importlinter", tmp_path)
    if module is not None:
        with open(tmp_path / module, "a") as file:
            file.write(f"\n{line}\n")
    code = "import sys; sys.path[:0] = ['.', 'backends']; from importlinter import cli; cli.lint_imports_command()"
    ended = subprocess.run([sys.executable, "-c", code, "--no-cache"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == (0 if module is None else 1), ended.stdout + ended.stderr
    assert ("BROKEN" in ended.stdout) == (module is not None)


def reads_plain(call: ast.Call) -> bool:
    """torch.load that runs no code, as it says itself."""
    said = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return ast.unparse(call.func) == "torch.load" and said.get("weights_only") == "True"


WRITES_TORCH_FILES = {
    name: {"torch.save"} for name in ("tools.convert.to_torch", "tools.convert.to_torch_dist")
}  # exports
READS_PICKLES = {"tools.convert.parse_dcp": {"pickle"}}  # of DCP, by an Unpickler that makes only what is in a list


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_nothing_that_runs_code_or_forks(path: Path) -> None:
    """No pickle in any guise, no eval, no fork, no named shared memory."""
    tree = ast.parse(path.read_text())
    banned = {
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "marshal",
        "shelve",
        "multiprocessing",
        "joblib",
        "runpy",
        "code",
    }
    assert {name.split(".")[0] for name in imported(tree)} & banned == READS_PICKLES.get(named(path), set())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and not reads_plain(node)}
    bad = {
        "eval",
        "exec",
        "compile",
        "__import__",
        "os.fork",
        "os.forkpty",
        "os.system",
        "torch.load",
        "torch.save",
        "np.load",
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
    }
    assert called & bad == WRITES_TORCH_FILES.get(named(path), set())
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell"):
            assert ast.unparse(node.value) == "False"


KNOWS_FOLDERS = {"store", "tools.convert.output"}  # the second takes what a user has written off a path


def test_who_knows_what_the_url_of_a_folder_looks_like() -> None:
    """`ckpt.store` and the stores themselves: everybody else asks `folder_of`."""
    for path in (REPO / "ckpt").rglob("*.py"):
        tree = ast.parse(path.read_text())
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        said = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in texts]
        known = any(isinstance(value, str) and re.match(r"\^?file:/+$", value) for value in said)
        assert not known or named(path) in KNOWS_FOLDERS, path


def loaded_by(statement: str) -> set[str]:
    """The top-level modules in memory after a statement, in a process of its own."""
    code = f"import sys; sys.path[:0] = {[str(REPO), str(REPO / 'backends')]!r}; {statement}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return {name.split(".")[0] for name in result.stdout.split()}


def test_import_ckpt_is_light() -> None:
    """`import ckpt` alone pays for nothing heavy."""
    assert loaded_by("import ckpt") & {"torch", "numpy", "click", "rich", "fsspec", "asyncio", "safetensors"} == set()


def test_the_writer_has_no_torch() -> None:
    """Neither at its start nor once it has opened a store: seconds of start-up, and hundreds of MB."""
    statement = (
        "import ckpt.writer_process, ckpt.store; ckpt.store.open_store('file:///tmp'); import ckpt_backends.local"
    )
    loaded = loaded_by(statement)
    assert "numpy" in loaded and loaded & {"torch", "click", "rich", "fsspec"} == set()


def test_every_public_name_is_there() -> None:
    """Each name of `__all__` resolves, to what its home defines, and `__all__` has no other."""
    for name in ckpt.__all__:
        value = getattr(ckpt, name)
        assert value is getattr(importlib.import_module(f"ckpt.{ckpt._HOMES[name]}"), name)
    apart = {"deepspeed", "megatron", "ray", "torchtitan"}  # they have environments of their own
    for part in apart:
        with pytest.raises(ImportError, match=rf"pip install 'everystep\[{part}\]'"):
            getattr(ckpt, part)
    for part in {*ckpt._PARTS} - apart:
        assert getattr(ckpt, part) is importlib.import_module(f"ckpt.{part}")
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_name'$"):
        _ = ckpt.no_such_name


def test_names_of_other_modules_are_named_by_the_error() -> None:
    """Each is there, and only there."""
    assert len(ckpt.__all__) == 16
    for part, names in ckpt._ELSEWHERE.items():
        module = importlib.import_module(f"ckpt.{part}")
        for name in names.split():
            assert hasattr(module, name)
            with pytest.raises(AttributeError, match=f"it is ckpt.{part}.{name}$"):
                getattr(ckpt, name)


def test_a_name_that_a_module_has_too_stays_what_it_is() -> None:
    """`ckpt.load` is the function, also after something else of its module was used first."""
    for first in ("ckpt.types.Loaded", "ckpt.load"):
        loaded_by(f"import ckpt; {first}; assert callable(ckpt.load)")


def test_type_checkers_see_the_same_names() -> None:
    """The imports for type checkers list exactly the names that are resolved lazily."""
    tree = ast.parse((REPO / "ckpt" / "__init__.py").read_text())
    listed = {
        alias.asname: str(node.module)
        for block in ast.walk(tree)
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"ckpt.{home}" for name, home in ckpt._HOMES.items()}
    assert listed == homes | dict.fromkeys(ckpt._PARTS, "ckpt")


# -- tests of promises: what they know of the library is public, or in tests/lib/inside.py --

PROMISES = sorted((REPO / "tests" / "promises").glob("*.py"))
PUBLIC_MODULES = {"errors", "events", "testing", *ckpt._PARTS}
PUBLIC = PUBLIC_MODULES | {*ckpt.__all__, "__version__"}
INTERNAL = {path.stem for path in (REPO / "ckpt").iterdir() if path.is_dir() or path.suffix == ".py"} - PUBLIC
OBJECTS = [REPO / "ckpt" / "checkpointer.py", REPO / "ckpt" / "saving.py"]  # whose attributes tests come across
PRIVATE = set(re.findall(r"\bself\.(_[a-z]\w*)", "".join(path.read_text() for path in OBJECTS)))


def internals(source: str) -> set[str]:
    """Find what a test names that is internal: in its own code, and in the scripts and paths that its strings hold."""
    tree, found = ast.parse(source), set[str]()
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for text in (ast.unparse(tree), *texts):
        found |= {f"ckpt.{name}" for name in re.findall(r"\bckpt\.(\w+)", text) if name in INTERNAL}
        for names in re.findall(r"\bfrom ckpt import ([\w, ]+)", text):
            found |= {f"ckpt.{name}" for name in re.findall(r"(\w+)(?: as \w+)?", names) if name not in PUBLIC | {"as"}}
        deep = re.findall(rf"\b(?:from|import) (ckpt\.(?:{'|'.join(PUBLIC_MODULES)})\.\w+)", text)
        private = re.findall(r"\b(\w+)\.(_[a-z]\w*)", text)
        found |= {*deep, *(f"{of}.{name}" for of, name in private if name in PRIVATE and of != "self")}
    return found


@pytest.mark.parametrize("path", PROMISES, ids=lambda path: path.stem)
def test_promises_know_the_library_from_outside(path: Path) -> None:
    """They import public names; for everything else there is the façade, which alone follows the code."""
    assert internals(path.read_text()) == set()


@pytest.mark.parametrize(
    "code",
    [
        "from ckpt.core.log.run_log import RunLog",
        "from ckpt import failpoints",
        "from ckpt import Tier, store as stores",
        "import ckpt.core.checkpoint.commits as commits",
        "from ckpt.dcp.storage import _tiers",
        "def test() -> None:\n    from ckpt.tools.cli.app import cli",
        "ckpt.core.run.training_run.TrainingRun._prepare",
        'patch.setattr("ckpt.core.checkpoint.write.CHUNK", 1)',
        'CODE = """\nimport os\nfrom ckpt.core.snapshot.stage import Stager\n"""',
        "cp._run.stager.stop()",
        'first.do("cp._closing.abandon()")',
        "save._staged.result()",
    ],
)
def test_a_promise_that_knows_the_inside_is_seen(code: str) -> None:
    """Negative control, one way after the other; and the façade itself is seen."""
    assert internals(code)
    assert internals((REPO / "tests" / "lib" / "inside.py").read_text())


def test_public_names_are_not_taken_for_internal_ones() -> None:
    """Nor is what other libraries call private."""
    code = """
import ckpt
import ckpt.dcp
from ckpt import Tier, dcp
from ckpt.errors import CheckpointError
from ckpt.lightning import CheckpointIO
ckpt.load(ckpt.events), tensor._version, self._session, "ckpt.errors.StoreError", "runs/ckpt.pt"
"""
    assert internals(code) == set()
