"""Lists and arrays in samplers and data sets that scripts shuffle or replace from epoch to epoch.

The order that the script created is copied once, and only differences from it are stored.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_NUMBERS = 1 << 16  # maximum items of a list or array that is stored
SAMPLE = 16  # items of each dimension that are compared to detect changes of a longer list or array
LEFT_OUT = "left out"


def sequences(values: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that may be an order of samples."""
    return {key: value for key, value in values.items() if _is_sequence(value)}


def _is_sequence(value: Any) -> bool:
    if type(value) is np.ndarray:
        return value.ndim > 0 and value.dtype.kind in "biuf"
    if type(value) is Tensor:
        return value.dim() > 0 and value.device.type == "cpu" and value.layout is torch.strided
    return type(value) is list


def _is_long(value: Any) -> bool:
    return int(len(value) if isinstance(value, list) else np.prod(value.shape)) > MAX_NUMBERS


def _head(value: Any) -> Any:
    if not _is_long(value):
        return value
    return value[:SAMPLE] if isinstance(value, list) else value[(slice(SAMPLE),) * value.ndim]


def base_of(value: Any) -> Any:
    """Return a copy, with which later values are compared. For a long value, copy only its beginning."""
    head = _head(value)
    return list(head) if isinstance(head, list) else head.clone() if isinstance(head, Tensor) else head.copy()


def change(value: Any, base: Any) -> Any:
    """Return the difference of an order from its base, None if there is none, or LEFT_OUT if it is too long to store.
    base: None if the script has added the attribute later. In a long value, an item that was 0 or None counts as a
    cache that was filled, so it does not lead to LEFT_OUT."""
    if type(value) is not type(base):
        if _is_long(value):
            return None
        base = [] if isinstance(value, list) else value[:0]
    head = _head(value)
    if isinstance(value, list):
        return _list_change(value, head, base)
    if same_shape := head.shape == base.shape:
        differs = (head != base) & ((head == head) | (base == base))  # NaN counts as equal to NaN
        if not bool(differs.any()):
            return None
    if not _is_long(value):
        return ["array", len(base), base_of(value)]
    return LEFT_OUT if not same_shape or bool((differs & (base != 0)).any()) else None


def _list_change(value: list[Any], head: list[Any], base: list[Any]) -> Any:
    if len(head) == len(base) and (all(map(is_, head, base)) or (_kinds(head) <= NUMBERS and head == base)):
        return None
    if not _is_long(value):
        index = {id(item): number for number, item in enumerate(base)}
        order = [index.get(id(item)) for item in value]
        if None not in order:
            return ["order", len(base), np.array(order, np.uint16)]
        if len(_kinds(value)) == 1 and _kinds(value) <= NUMBERS and (items := np.array(value)).dtype.kind in "if":
            return ["list", len(base), items]
    moved = (
        type(new) is type(old) and new is not old and not (type(old) in PLAIN and (new == old or not old))
        for new, old in zip(head, base, strict=False)
    )
    return LEFT_OUT if any(moved) else None


NUMBERS, PLAIN = {int, float}, (bool, int, float, str, bytes)


def _kinds(items: list[Any]) -> set[type]:
    return set(map(type, items))


def put(values: dict[str, Any], key: str, base: Any, saved: Any) -> None:
    """Set an attribute to the order that `change` has returned, or to its base if `change` has returned None."""
    live: Any = values.get(key)
    if live is not None and saved is None and (base is None or change(live, base) in (None, LEFT_OUT)):
        return
    kind, size, items = ("base", len(base), base) if saved is None else saved
    if size != (0 if base is None else len(base)):  # the script has other data than when it was saved
        return
    if kind == "order":
        items = [base[number] for number in items.tolist()]
    elif kind == "list":
        items = items.tolist()
    if isinstance(live, list) and isinstance(items, list):
        live[:] = items
    elif isinstance(items, list) or not _fits(live, items):
        values[key] = base_of(items)
    elif isinstance(live, Tensor):
        live.detach().copy_(items)
    else:
        live[...] = items


def _fits(live: Any, items: Any) -> bool:
    """Return True if the items of an array can be written into the live array."""
    if type(live) is not type(items) or live.shape != items.shape or live.dtype != items.dtype:
        return False
    return isinstance(live, Tensor) or bool(live.flags.writeable)
