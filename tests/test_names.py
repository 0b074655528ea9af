"""Check the public names of the library's classes."""

from __future__ import annotations

import ast

from processes import REPO

PACKAGES = (REPO / "ckpt", REPO / "backends" / "ckpt_backends")
TWICE = {"CheckpointCallback"}  # one for each trainer, under the name that users know


def test_public_classes_have_distinct_names() -> None:
    names = [
        node.name
        for package in PACKAGES
        for path in package.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == TWICE
