"""Nothing grows beyond what can be read at once: files, classes and functions of the library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from processes import REPO

MOST = {"file": 400, "class": 300, "function": 40}  # lines
PACKAGES = (REPO / "ckpt", REPO / "backends" / "ckpt_backends")


def sizes(path: Path, text: str) -> Iterator[tuple[str, str, int]]:
    """Of a file and all that is in it: its kind, a name for it, and how many lines it has."""
    name = path.relative_to(REPO).as_posix()
    yield "file", name, len(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield "class", f"{name}:{node.name}", _lines(node)
            for item in node.body:
                if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield "function", f"{name}:{node.name}.{item.name}", _lines(item)
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield "function", f"{name}:{node.name}", _lines(node)


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def larger() -> dict[str, int]:
    files = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    found = [one for path in files for one in sizes(path, path.read_text())]
    return {name: size for kind, name, size in found if size > MOST[kind]}


def test_nothing_grows_beyond_what_can_be_read_at_once() -> None:
    """Divide it by what it is about."""
    assert larger() == {}


def test_negative_control_a_large_one_is_seen() -> None:
    text = "class A:\n    def f(self):\n" + "        pass\n" * 50
    assert ("function", "x.py:A.f", 51) in list(sizes(REPO / "x.py", text))


TWICE = {"CheckpointCallback"}  # one for each trainer, under the name that users know


def test_no_two_public_classes_have_one_name() -> None:
    """Who reads a name knows what it is."""
    names = [
        node.name
        for package in PACKAGES
        for path in package.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == TWICE
