"""Load the device before torch, and add the names that torch's Python requires before it uses them."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from simulated.build import NAME


def install(library: Path) -> None:
    """Register the import hooks. torch's C++ finds hooks, kernels and allocator when it is loaded. Its Python finds the
    additions to `torch._C` right after that module is loaded, before `torch.cuda`."""
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, _Finder(library))


def _load_core(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, library, loader=ExtensionFileLoader(NAME, str(library)))
    assert spec is not None and spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    sys.modules[NAME] = core
    return core


class _Finder(MetaPathFinder):
    def __init__(self, library: Path) -> None:
        self._library = library

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch._C":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        spec.loader = _Filled(spec.loader, self._library)
        return spec


class _Filled(Loader):
    def __init__(self, loader: Loader, library: Path) -> None:
        self._loader, self._library = loader, library

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from simulated.bindings import fill

        self._loader.exec_module(module)
        fill(module, _load_core(self._library))
