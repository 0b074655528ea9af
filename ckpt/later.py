"""Import a module when it is first used, to shorten the start of a process.

later("numpy") import numpy as np  # costs nothing yet
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

_importing = threading.RLock()


class _Later(ModuleType):
    """A stand-in for a module. At the first attribute access, it imports the module and then has its attributes."""

    def __getattr__(self, name: str) -> Any:
        bring(self.__name__)
        try:
            return self.__dict__[name]
        except KeyError:
            return getattr(sys.modules[self.__name__], name)  # the module may define its own __getattr__


def later(name: str) -> None:
    """Import this module at its first use, unless it is already imported. No thread may import it during this call."""
    sys.modules.setdefault(name, _Later(name))


def bring(name: str) -> None:
    """Import a postponed module now. Any thread may call this; other threads that need the module wait."""
    with _importing:
        module = sys.modules.get(name)
        if isinstance(module, _Later):
            del sys.modules[name]
            try:
                module.__dict__.update(vars(importlib.import_module(name)))
            except BaseException:
                sys.modules[name] = module
                raise
