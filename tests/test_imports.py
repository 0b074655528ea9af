"""Tests of imports: their cost, forbidden calls, contracts of `make lint`, and promise tests with only public names."""

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
    """Yield every imported module: at the top, inside functions, and for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield str(node.module)


WRONG_IMPORTS = [
    ("ckpt/core/writer/life.py", "from ckpt.core.snapshot import stage"),
    ("ckpt/writer_process.py", "from ckpt.core.state import tensors"),
    ("ckpt/core/writer/life.py", "def f():\n    from ckpt.guard.report import Fault"),
    ("ckpt/core/format/digest.py", "from ckpt.tools.maintain import damage"),
    ("ckpt/core/log/run_log.py", "def f():\n    import torch"),
    ("backends/ckpt_backends/local.py", "from ckpt.core.log.run_log import RunLog"),
    ("ckpt/tools/maintain/audit.py", "import rich.table"),
    ("ckpt/core/run/training_run.py", "from ckpt.adapters import shards"),
]


def test_import_in_wrong_direction_is_detected(tmp_path: Path) -> None:
    """Such lines break the contracts of `.importlinter`, and each is named. Without them, no contract is broken."""

    def contracts() -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.path[:0] = ['.', 'backends']; from importlinter import cli; cli.lint_imports_command()"
        command = [sys.executable, "-c", code, "--no-cache"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    for package in PACKAGES:
        shutil.copytree(package, tmp_path / package.relative_to(REPO), ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / ".importlinter", tmp_path)
    intact = contracts()
    assert intact.returncode == 0 and "BROKEN" not in intact.stdout, intact.stdout + intact.stderr
    for module, line in WRONG_IMPORTS:
        with open(tmp_path / module, "a") as file:
            file.write(f"\n{line}\n")
    broken = contracts()
    assert broken.returncode == 1 and broken.stdout.count(" BROKEN") == 5, broken.stdout + broken.stderr
    for module, line in WRONG_IMPORTS:
        importer = module.removeprefix("backends/").removesuffix(".py").replace("/", ".")
        imported = line.split()[-3 if "from" in line else -1].removesuffix(".table")
        assert f"{importer} -> {imported}" in broken.stdout, (importer, imported, broken.stdout)


def reads_plain(call: ast.Call) -> bool:
    """Return True for a torch.load that runs no code, by its arguments."""
    said = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return ast.unparse(call.func) == "torch.load" and said.get("weights_only") == "True"


WRITES_TORCH_FILES = {
    name: {"torch.save"} for name in ("tools.convert.to_torch", "tools.convert.to_torch_dist")
}  # exports
READS_PICKLES = {"tools.convert.parse_dcp": {"pickle"}}  # of DCP, with an Unpickler that creates only objects in a list


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_modules_neither_run_code_nor_fork(path: Path) -> None:
    """No pickle in any form, no eval, no fork, no named shared memory."""
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


KNOWS_FOLDERS = {"store", "tools.convert.output"}  # the second one converts a user's URL to a path


def test_only_stores_parse_folder_urls() -> None:
    """Only `ckpt.store` and the stores do; other modules call `folder_of`."""
    for path in (REPO / "ckpt").rglob("*.py"):
        tree = ast.parse(path.read_text())
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        said = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in texts]
        known = any(isinstance(value, str) and re.match(r"\^?file:/+$", value) for value in said)
        assert not known or named(path) in KNOWS_FOLDERS, path


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules in memory after a statement, in its own process."""
    code = f"import sys; sys.path[:0] = {[str(REPO), str(REPO / 'backends')]!r}; {statement}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return {name.split(".")[0] for name in result.stdout.split()}


def test_import_ckpt_is_light() -> None:
    assert loaded_by("import ckpt") & {"torch", "numpy", "click", "rich", "fsspec", "asyncio", "safetensors"} == set()


def test_writer_does_not_import_torch() -> None:
    """Neither at its start nor after it opened a store: torch costs seconds of startup, and hundreds of MB."""
    statement = (
        "import ckpt.writer_process, ckpt.store; ckpt.store.open_store('file:///tmp'); import ckpt_backends.local"
    )
    loaded = loaded_by(statement)
    assert "numpy" in loaded and loaded & {"torch", "click", "rich", "fsspec"} == set()


def test_every_public_name_resolves() -> None:
    """Each name of `__all__` resolves to the object of its home module, and `__all__` has no other."""
    for name in ckpt.__all__:
        value = getattr(ckpt, name)
        assert value is getattr(importlib.import_module(f"ckpt.{ckpt._HOMES[name]}"), name)
    apart = {"deepspeed", "megatron", "ray", "torchtitan"}  # they have their own environments
    for part in apart:
        with pytest.raises(ImportError, match=rf"pip install 'everystep\[{part}\]'"):
            getattr(ckpt, part)
    for part in {*ckpt._PARTS} - apart:
        assert getattr(ckpt, part) is importlib.import_module(f"ckpt.{part}")
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_name'$"):
        _ = ckpt.no_such_name


def test_error_names_module_of_other_names() -> None:
    assert len(ckpt.__all__) == 16
    for part, names in ckpt._ELSEWHERE.items():
        module = importlib.import_module(f"ckpt.{part}")
        for name in names.split():
            assert hasattr(module, name)
            with pytest.raises(AttributeError, match=f"it is ckpt.{part}.{name}$"):
                getattr(ckpt, name)


def test_ckpt_load_stays_the_function() -> None:
    """`ckpt.load` is the function, also after another name of its module was used first."""
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


# -- promise tests: they use public names, or those in tests/lib/inside.py --

PROMISES = sorted((REPO / "tests" / "promises").glob("*.py"))
PUBLIC_MODULES = {"errors", "events", "testing", *ckpt._PARTS}
PUBLIC = PUBLIC_MODULES | {*ckpt.__all__, "__version__"}
INTERNAL = {path.stem for path in (REPO / "ckpt").iterdir() if path.is_dir() or path.suffix == ".py"} - PUBLIC
OBJECTS = [REPO / "ckpt" / "checkpointer.py", REPO / "ckpt" / "saving.py"]  # whose attributes tests could use
PRIVATE = set(re.findall(r"\bself\.(_[a-z]\w*)", "".join(path.read_text() for path in OBJECTS)))


def internals(source: str) -> set[str]:
    """Find internal names in a test: in its code, and in scripts and paths in its strings."""
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
def test_promise_tests_use_only_public_names(path: Path) -> None:
    """They import public names; everything else is in the façade, which alone follows the code."""
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
def test_negative_control_internal_name_is_detected(code: str) -> None:
    """Negative control, one way after the other; the façade itself is detected too."""
    assert internals(code)
    assert internals((REPO / "tests" / "lib" / "inside.py").read_text())


def test_public_names_do_not_count_as_internal() -> None:
    code = """
import ckpt
import ckpt.dcp
from ckpt import Tier, dcp
from ckpt.errors import CheckpointError
from ckpt.lightning import CheckpointIO
ckpt.load(ckpt.events), tensor._version, self._session, "ckpt.errors.StoreError", "runs/ckpt.pt"
"""
    assert internals(code) == set()
