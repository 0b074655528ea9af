"""The library of this very source, compiled for the tests wherever there is a compiler, whatever is installed."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from ckpt.core.format import kernels
from processes import REPO


def build() -> Any:
    """Return the module hatch_build.py."""
    spec = importlib.util.spec_from_file_location("hatch_build", REPO / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OLD = "'-D__builtin_cpu_supports(x)=0'"  # every question of what the processor can is answered with no


@functools.cache
def compiled_kernels(processor: str = "this one") -> kernels.Kernels | None:
    """None without a compiler. A source that does not compile is an error. "an old one": as such a one runs it."""
    compiler = os.environ.get("CC", "cc") + (f" {OLD}" if processor == "an old one" else "")
    try:
        with mock.patch.dict(os.environ, CC=compiler):
            made = build().compiled(Path(tempfile.mkdtemp(prefix="kernels-")))
    except FileNotFoundError:
        return None
    found = kernels.Kernels(ctypes.CDLL(str(made)))
    made.unlink()
    made.parent.rmdir()
    return found
