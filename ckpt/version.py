"""The version of this library, for code that must not import all of it, and a check for a package of the same name.

PyPI has another package `ckpt`, a debugger, with the same import name. If both are installed, their files are mixed in
one folder, and `ckpt/__init__.py` is that of the package installed last.
"""

from __future__ import annotations

import os
import sys
import warnings

VERSION = "0.1.0"
_MEND = "`pip uninstall ckpt`, and then `pip install --force-reinstall everystep`, fix this"


def _check() -> None:
    """Raise ImportError if the imported `ckpt` is another package. It must be fast: every module imports this one."""
    if getattr(sys.modules["ckpt"], "__distribution__", None) != "everystep":
        raise ImportError(f"another package, `ckpt` of PyPI, is installed over everystep: {_MEND}")
    try:
        siblings = os.listdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    except OSError:  # for example, because the package is inside a zip archive
        return
    if any(name.startswith("ckpt-") and name.endswith((".dist-info", ".egg-info")) for name in siblings):
        warnings.warn(
            "another package, `ckpt` of PyPI, is installed in the same folder as everystep, which replaced it: "
            f"{_MEND}",
            stacklevel=3,
        )


def check_known(who: str, what: str, version: str, known: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Raise ImportError unless an adapter supports the installed version of its library.

    `known`: the first supported version and the first unsupported one.
    """
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not known[0] <= number < known[1]:
        supported = " and below ".join(".".join(map(str, bound)) for bound in known)
        raise ImportError(f"{who} supports {what} from {supported}, but {version} is installed")


_check()
