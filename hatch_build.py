"""Compiles core/format/kernels.c for a wheel, or in place for an editable install; and makes README fit for PyPI.

If that fails, for whatever reason, the install goes on without it, and core/format/kernels.py does without.
By hand, in place: python hatch_build.py
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # by hand they are not needed
    BuildHookInterface = MetadataHookInterface = object

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+://)[^)]*\)")  # to a place in the repository, or on the same page
SOURCE = Path(__file__).parent / "ckpt" / "core" / "format" / "kernels.c"
FLAGS = "-O3 -fPIC -shared -std=gnu11 -fvisibility=hidden -s"
LIMIT_S = 120


def library_name() -> str:
    """As ckpt/core/format/kernels.py looks for it: one of another source is never taken."""
    return f"kernels-{platform.machine()}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"


def compiled(folder: Path) -> Path:
    """The library, in a folder. Raises whatever keeps it from being made."""
    found = [os.environ.get("CC"), *map(shutil.which, ("cc", "gcc", "clang"))]
    compiler = next((shlex.split(one) for one in found if one), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    unfinished = folder / f".{library_name()}.{os.getpid()}"
    command = [*compiler, *FLAGS.split(), str(SOURCE), "-o", str(unfinished)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if ended.returncode:
        raise RuntimeError(f"{shlex.join(compiler)} failed: {ended.stderr.strip()[-500:]}")
    return unfinished.rename(folder / library_name())


def compile_in_place() -> Path:
    made = compiled(SOURCE.parent)
    for old in SOURCE.parent.glob(f"kernels-{platform.machine()}-*.so"):
        if old != made:
            old.unlink(missing_ok=True)
    return made


class KernelsHook(BuildHookInterface):  # type: ignore[misc, valid-type, unused-ignore]
    """What hatchling calls before it makes a wheel."""

    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            if version == "editable":
                compile_in_place()
                return
            self._folder = tempfile.mkdtemp(prefix="kernels-")
            made = compiled(Path(self._folder))
        except Exception as error:
            self.app.display_warning(f"kernels.c is not compiled, restores from memory will be slower: {error}")
            return
        build_data["force_include"][str(made)] = f"ckpt/core/format/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def as_page(readme: str) -> str:
    """README for a page that has nothing beside it: links into the repository become words, pictures go."""
    blocks = re.split(r"(?ms)(^```.*?^```)", readme)
    blocks[::2] = [LINK.sub(lambda link: "" if link[1] else link[2], text) for text in blocks[::2]]
    return "".join(blocks)


class ReadmeHook(MetadataHookInterface):  # type: ignore[misc, valid-type, unused-ignore]
    """What hatchling asks for what pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": as_page(text)}


if __name__ == "__main__":
    sys.stdout.write(f"{compile_in_place()}\n")
