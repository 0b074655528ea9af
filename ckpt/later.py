"""A module that is imported when something of it is used first: for a process that somebody waits for.

later("numpy")
import numpy as np  # costs nothing yet
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

_importing = threading.RLock()


class _Later(ModuleType):
    """What has this in its hands has all of the module by it, from the first use on."""

    def __getattr__(self, name: str) -> Any:
        bring(self.__name__)
        try:
            return self.__dict__[name]
        except KeyError:
            return getattr(sys.modules[self.__name__], name)  # it may make some when they are asked for, or say no


def later(name: str) -> None:
    """Import this module later, unless that was done before. Nobody may import a module in it meanwhile."""
    sys.modules.setdefault(name, _Later(name))


def bring(name: str) -> None:
    """Import it now, if that was put off. For any thread: the others wait."""
    with _importing:
        module = sys.modules.get(name)
        if isinstance(module, _Later):
            del sys.modules[name]
            try:
                module.__dict__.update(vars(importlib.import_module(name)))
            except BaseException:
                sys.modules[name] = module
                raise
