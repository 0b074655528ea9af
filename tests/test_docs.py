"""Tests that everything named in the documents exists: files, modules, names, arguments, commands and options."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import documents
from ckpt.tools.observe.telemetry.gauges import KINDS
from documents import PAGES, Block, blocks, named, prose_problems, python_problems, shell_problems
from processes import REPO

INSIDE = (
    "CONTRIBUTING.md",
    "docs/design.md",
    "docs/protocol.md",
    "docs/format.md",
)  # in these, dotted names are modules
HOMES = ("ckpt", "ckpt/core", "ckpt/tools", "ckpt/tools/observe")  # the roots of dotted names
BELOW = ("", *HOMES, "backends/ckpt_backends", "tests")  # the roots of paths in documents
FILE = re.compile(r"(?<![\w/.*<])((?:[a-z_]+/)+[a-z_0-9]+\.py)\b")
NAME = re.compile(r"`((?:[a-z_]+\.)+)(?!py`)(\w+)(?:\.(\w+))?(?:\(\))?`")


def missing(text: str) -> set[str]:
    """Return the files and `package.module.Name`s of ours that a text names and that do not exist."""
    gone = {path for path in FILE.findall(text) if not any((REPO / below / path).is_file() for below in BELOW)}
    for found in NAME.finditer(text):
        *modules, last = [word for word in (*found[1].split("."), found[2]) if word]
        homes = [REPO.joinpath(home, *[word for word in modules if word != "ckpt"]) for home in HOMES]
        if modules[0] in PACKAGES and not any(_defines(module, last, found[3]) for module in homes):
            gone.add(found[0].strip("`"))
    return gone


PACKAGES = {path.name.removesuffix(".py") for home in HOMES for path in (REPO / home).iterdir()} - {"testing"}


def _defines(module: Path, name: str, member: str | None) -> bool:
    """Return True if a module or package has a module, class, function or value of that name, and that the member."""
    if module.joinpath(f"{name}.py").is_file() or module.joinpath(name).is_dir():
        return True
    file = module.with_suffix(".py") if module.with_suffix(".py").is_file() else module / "__init__.py"
    return file.is_file() and _has(file, name, member)


def _has(file: Path, name: str, member: str | None) -> bool:
    """Return True if a module has this class, function or value, and the class this member."""
    for node in ast.parse(file.read_text()).body:
        names = {getattr(node, "name", "")} | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if name in names:
            inside = {getattr(n, word, "") for n in ast.walk(node) for word in ("name", "attr", "id")}
            if member is None or member in inside:
                return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_names_in_documents_exist(page: Path) -> None:
    """Files and modules that move must move in the documents too."""
    gone = missing(page.read_text())
    assert {word for word in gone if "/" in word or named(page) in INSIDE} == set()


def test_negative_control_missing_names_are_detected() -> None:
    text = "`core/format/nothing.py`, `log.run_log.RunLog.nothing`, `log.run_log.Nothing`, `log.run_log.RunLog`"
    assert missing(text) == {"core/format/nothing.py", "log.run_log.RunLog.nothing", "log.run_log.Nothing"}


# -- blocks --


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_and_commands_name_existing_things(page: Path) -> None:
    """Blocks are valid Python, existing commands with existing options, or other text. Names in sentences exist."""
    problems = prose_problems(page)
    for block in blocks(page):
        problems += [f"line {block.line}: {problem}" for problem in problems_of(block)]
    assert problems == []


def problems_of(block: Block) -> list[str]:
    if block.language == "python":
        return python_problems(block.text)
    if block.language in ("console", "bash"):
        return shell_problems(block)
    return re.findall(r"^(?:\$ .*|(?:import|from) ckpt.*)$", block.text, re.MULTILINE)


@pytest.mark.parametrize(
    ("language", "line"),
    [
        ("python", "ckpt.Tier('runs', evry=3)"),
        ("python", "cp.steps(3)"),
        ("python", "from ckpt import Nothing"),
        ("python", "ckpt.load('runs').nothing"),
        ("console", "$ ckpt ls runs --nothing"),
        ("console", "$ ckpt copy runs"),
        ("console", "$ ckpt nothing runs"),
        ("console", "$ true && ckpt ls runs"),
        ("console", "$ make nothing"),
        ("console", "$ make test NOTHING=1"),
        ("console", "$ pip install 'everystep[nothing]'"),
        ("console", "$ python examples/nothing.py"),
        ("console", "$ python examples/plain.py --nothing"),
        ("console", "$ torchrun --nothing train.py"),
        ("bash", "if true; then"),
        ("bash", "code=$(ckpt faults runs --nothing)"),
        ("text", "$ ckpt ls runs"),
    ],
)
def test_negative_control_wrong_block_is_detected(language: str, line: str) -> None:
    assert problems_of(Block(REPO / "README.md", 1, language, "", f"{line}\n")) != []


def test_negative_control_unknown_language_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\nckpt ls\n```\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "REPO", tmp_path)
        with pytest.raises(AssertionError, match="is none of"):
            blocks(page)


MARK = "<!-- from benchmarks/figures.py --report benchmarks/results/figures.json --markdown -->\n\n"


def test_tables_of_figures_match_results() -> None:
    """README and docs/figures.md contain the tables of the stored results of `make bench`."""
    words = [sys.executable, "benchmarks/figures.py", "--report", "benchmarks/results/figures.json", "--markdown"]
    report = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=True).stdout
    tables = [
        part.partition("\n\n")[0]
        for page in ("README.md", "docs/figures.md")
        for part in (REPO / page).read_text().split(MARK)[1:]
    ]
    assert len(tables) == 5
    assert [table for table in tables if table not in report] == []


def test_metrics_page_matches_code() -> None:
    """The page lists name, type, label and meaning of each metric in the order of the code, and no other."""
    page = (REPO / "docs" / "reference" / "metrics.md").read_text()
    served = {name + "_total" * kind.counter: kind for name, kind in KINDS.items()}
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `ckpt_")]
    assert [(row[0].strip("`"), row[1], row[3].strip("` "), row[4]) for row in rows] == [
        (name, "counter" if kind.counter else "gauge", kind.label, kind.help) for name, kind in served.items()
    ]
    rules = page[page.index("```yaml") :]
    assert rules.count("alert:") == 4 and set(re.findall(r"ckpt_\w+", rules)) <= served.keys()


@pytest.mark.parametrize("page", [page for page in PAGES if "\n::: " in page.read_text()], ids=named)
def test_generated_pages_explain_their_source(page: Path) -> None:
    """In a checkout such a page is empty, so its introduction explains how to build the site, and alternatives."""
    above = page.read_text().partition("\n::: ")[0]
    assert "`make docs`" in above and re.search(r"`--help`|help\(ckpt", above)


def test_readme_stays_short() -> None:
    """README introduces the project; longer text is in docs/."""
    assert len((REPO / "README.md").read_text().splitlines()) <= 112
