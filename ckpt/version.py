"""The version of this library, for those that may not import all of it; and whether it is the one that was imported.

PyPI has another package `ckpt`, for debugging, that is imported by the same name. Where both are installed, one
`ckpt/__init__.py` is left, of whichever came last, among the files of both.
"""

from __future__ import annotations

import os
import sys
import warnings

VERSION = "0.1.0"
_MEND = "`pip uninstall ckpt`, and then `pip install --force-reinstall everystep`, put that right"


def _check() -> None:
    """All of ours imports this. Cheap: that folder has just been listed by who has found us in it."""
    if getattr(sys.modules["ckpt"], "__distribution__", None) != "everystep":
        raise ImportError(f"another package, `ckpt` of PyPI, is installed over everystep: {_MEND}")
    try:
        beside = os.listdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    except OSError:  # from within an archive, say
        return
    if any(name.startswith("ckpt-") and name.endswith((".dist-info", ".egg-info")) for name in beside):
        warnings.warn(
            f"another package, `ckpt` of PyPI, is installed in the folder of everystep, which has its place: {_MEND}",
            stacklevel=3,
        )


def check_known(who: str, what: str, version: str, known: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """ImportError unless an adapter knows that version of what it is for. `known`: from, and below."""
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not known[0] <= number < known[1]:
        said = " and below ".join(".".join(map(str, one)) for one in known)
        raise ImportError(f"{who} knows {what} from {said}, and this is {version}")


_check()
