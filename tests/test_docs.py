"""What the documents for contributors name is there: files, modules, and what is in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from processes import REPO

DOCUMENTS = ("CONTRIBUTING.md", "docs/design.md", "docs/protocol.md", "docs/format.md", "README.md")
BELOW = ("", "ckpt", "backends/ckpt_backends", "tests")  # what a path in a document is relative to
FILE = re.compile(r"(?<![\w/.*<])((?:[a-z_]+/)+[a-z_0-9]+\.py)\b")
NAME = re.compile(r"`((?:[a-z_]+\.)+)(?!py`)(\w+)(?:\.(\w+))?(?:\(\))?`")
OF_USERS = "README.md"  # its dotted names are those of scripts


def missing(text: str) -> set[str]:
    """Files, and `package.module.Name`s of ours, that a text names and nobody has."""
    gone = {path for path in FILE.findall(text) if not any((REPO / below / path).is_file() for below in BELOW)}
    for found in NAME.finditer(text):
        *modules, last = [word for word in (*found[1].split("."), found[2]) if word]
        module = REPO.joinpath("ckpt", *[word for word in modules if word != "ckpt"])
        if modules[0] not in PACKAGES or module.joinpath(f"{last}.py").is_file() or module.joinpath(last).is_dir():
            continue
        file = module.with_suffix(".py") if module.with_suffix(".py").is_file() else module / "__init__.py"
        if not file.is_file() or not _has(file, last, found[3]):
            gone.add(found[0].strip("`"))
    return gone


PACKAGES = {path.name.removesuffix(".py") for path in (REPO / "ckpt").iterdir()} - {"testing"}


def _has(file: Path, name: str, member: str | None) -> bool:
    """Whether a module has that class, function or value, and the class that member."""
    for node in ast.parse(file.read_text()).body:
        names = {getattr(node, "name", "")} | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if name in names:
            inside = {getattr(n, word, "") for n in ast.walk(node) for word in ("name", "attr", "id")}
            if member is None or member in inside:
                return True
    return False


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_names_is_there(name: str) -> None:
    """Whoever moves something moves it in the documents too."""
    gone = missing((REPO / name).read_text())
    assert {word for word in gone if "/" in word or name != OF_USERS} == set()


def test_negative_control_what_is_gone_is_seen() -> None:
    text = (
        "`ckpt/format/nothing.py` and `runlog.log.RunLog.nothing`, `runlog.log.Nothing`; `runlog.log.RunLog` is there"
    )
    assert missing(text) == {"ckpt/format/nothing.py", "runlog.log.RunLog.nothing", "runlog.log.Nothing"}
