"""Convert OmegaConf containers to plain values and back, because Lightning stores hyper-parameters as they are.

This module never imports OmegaConf: if nothing else has imported it, there are no OmegaConf containers.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

MARK = "everystep.omegaconf"  # key that marks a dict as a stored container; its value is the container's class
FLAGS = ("readonly", "struct")


def to_plain(value: Any, *, marked: bool = True) -> Any:
    """Return the value with each OmegaConf container, also in dicts, lists and tuples, replaced by plain values.
    marked: store the class as well, so that `from_plain` creates the container again."""
    module = sys.modules.get("omegaconf")
    if module is None:
        return value
    if isinstance(value, module.Container):
        content = _content(module.OmegaConf, value)
        if not marked:
            return content
        flags = {name: flag for name in FLAGS if (flag := value._metadata.flags.get(name)) is not None}
        return {MARK: type(value).__name__, "content": content, "flags": flags}
    if isinstance(value, type) and issubclass(value, module.Container):
        return {MARK: value.__name__} if marked else None
    if type(value) is dict:
        return {key: to_plain(one, marked=marked) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(one, marked=marked) for one in value)
    return value


def from_plain(value: Any) -> Any:
    """Return the value with the containers that `to_plain` has marked. Without OmegaConf, use their plain content."""
    if type(value) is dict and MARK in value:
        try:
            module = importlib.import_module("omegaconf")
        except ModuleNotFoundError:
            return value.get("content")
        if "content" not in value:
            return {"ListConfig": module.ListConfig}.get(value[MARK], module.DictConfig)
        made = module.OmegaConf.create(value["content"])
        for name, flag in value["flags"].items():
            made._set_flag(name, flag)
        return made
    if type(value) is dict:
        return {key: from_plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(from_plain(one) for one in value)
    return value


def _content(omegaconf: Any, value: Any) -> Any:
    """Return the content with its interpolations, or resolved if they may refer to a parent, which is not stored."""
    if value._get_parent() is not None:
        with contextlib.suppress(Exception):
            return omegaconf.to_container(value, resolve=True)
    return omegaconf.to_container(value, resolve=False)
