"""Entries of a saved state. Joins the versions of an entry that several ranks saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpt.core.format.columns import ODD
from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.values import Json, Path, decode, plain_dtype, show, unpaired
from ckpt.errors import CorruptError

SHARED_KINDS = ("module", "optimizer")  # kinds of which each rank may have only a part
PLAIN = "plain"  # among an optimizer's facts: names of plain tensors that are a rank's shards next to a DTensor
TENSORS = (None, "parameter", "buffer")  # kinds of a tensor in a reference
OBJECT_TAGS = ("enum", "namedtuple", "object", "generator", "given", "parameter")
JOINED_KIND = "optimizer"  # the kind whose values are joined from every rank
KINDS = "kinds"  # among an optimizer's facts: the kinds of its tensors that are not plain, as in references to tensors
DICTS = "dicts"  # among an optimizer's facts: by parameter, the type of its dict if it is not a plain one
ORDERS = "orders"  # a fact: the dimensions of tensors that are not contiguous, from the outermost to the innermost


@dataclass(frozen=True)
class SavedNode:
    """One entry of a saved state. `names`: of its tensors, including aliases."""

    path: Path
    kind: str
    facts: dict[str, Any]
    values: Json
    names: tuple[str, ...]


def joined(nodes: list[SavedNode]) -> SavedNode:
    """Join the nodes of one entry, the reading rank's first. Raise CorruptError if they do not fit together."""
    try:
        return _joined(nodes)
    except ODD as error:
        raise CorruptError(f"what the ranks saved of one entry does not go together: {error}") from None


def _joined(nodes: list[SavedNode]) -> SavedNode:
    first = nodes[0]
    alike = [node for node in nodes if node.kind == first.kind]
    if len(alike) == 1 or first.kind not in SHARED_KINDS:
        return first
    names = tuple(_union(node.names for node in alike))
    if first.kind != JOINED_KIND:
        return replace(first, names=names, facts={**first.facts, **_joined_tensors(alike)})
    return replace(first, names=names, facts=_joined_facts(alike), values=_joined_values(alike))


def _joined_facts(nodes: list[SavedNode]) -> dict[str, Any]:
    """Join the facts of an optimizer, each parameter group separately."""
    own = {name for group in nodes[0].facts["params"] for name in group}  # its facts about these take precedence
    groups = max(len(node.facts["params"]) for node in nodes)
    params = [_union(node.facts["params"][i] for node in nodes if i < len(node.facts["params"])) for i in range(groups)]
    state = [[n for n in node.facts["with_state"] if i == 0 or n not in own] for i, node in enumerate(nodes)]
    mine = set(nodes[0].names)
    plain = _union([n for n in node.facts.get(PLAIN, ()) if i == 0 or n not in mine] for i, node in enumerate(nodes))
    facts = {**nodes[0].facts, **({PLAIN: plain} if plain else {})}
    return {**facts, "params": params, "with_state": _union(state), **_joined_tensors(nodes)}


def _joined_tensors(nodes: list[SavedNode]) -> dict[str, Any]:
    """Join the facts about single tensors. Earlier nodes take precedence."""
    joined = _joined_wrappers(nodes)
    for fact in (ORDERS, KINDS, DICTS):
        found = {name: one for node in reversed(nodes) for name, one in node.facts.get(fact, {}).items()}
        joined |= {fact: found} if found else {}
    return joined


def _joined_wrappers(nodes: list[SavedNode]) -> dict[str, Any]:
    """Join the descriptions of tensors that consist of other tensors."""
    rows = [form for node in reversed(nodes) for form in node.facts.get("wrappers", ())]
    if not all(type(form) is dict and type(form.get("name")) is str for form in rows):
        raise CorruptError("what is stored of tensors that are made of others has no names")
    return {"wrappers": list({form["name"]: form for form in rows}.values())} if rows else {}


def _joined_values(nodes: list[SavedNode]) -> Json:
    """Take the settings of groups from the first node, and plain state of other parameters from any node."""
    own = {name for group in nodes[0].facts["params"] for name in group}
    state = {
        (name, str(key)): [name, key, value]
        for i, node in reversed(list(enumerate(nodes)))
        for name, key, value in node.values["state"]
        if i == 0 or name not in own
    }
    found = {**nodes[0].values, "state": list(state.values())}
    others = {
        owner["param"]: [owner, value]
        for node in reversed(nodes[1:])
        for owner, value in node.values.get("more", ())
        if "param" in owner and owner["param"] not in own
    }
    return {**found, "more": [*found.get("more", ()), *others.values()]} if others else found


def _union(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(dict.fromkeys(one for each in lists for one in each))


# -- check that an entry can be restored --


def check_node(node: SavedNode, find: Callable[[str], TensorSpec | None]) -> None:
    """Raise CorruptError unless a restore can read this entry. `find`: returns the tensor of a name, or None."""
    if node.kind == "optimizer" and not is_optimizer(node):
        raise CorruptError(f"{show(node.path)}: what is stored of it is not the state of an optimizer")
    if node.kind == "custom module" and unpaired(node.values) is None:
        raise CorruptError(f"{show(node.path)}: what is stored of it is not the state of a module")

    def check(reference: Json) -> str:
        tag = str(reference["$"])
        if tag in OBJECT_TAGS or tag.startswith("torch."):  # only torch or the user's code can resolve these
            return f"{tag} {reference['name'] if 'name' in reference else reference['v']!r}"
        if tag not in ("tensor", "ndarray", "wrapper"):
            raise CorruptError(f"unknown tag {tag!r}: written by a newer version?")
        if reference["$"] == "tensor" and reference.get("kind") not in TENSORS:
            raise CorruptError(f"unknown kind of tensor {reference['kind']!r:.80}: written by a newer version?")
        for name in [reference["name"]] if reference["$"] != "wrapper" else _names_in(reference):
            found = find(name) if type(name) is str else None
            if found is None:
                raise CorruptError(f"{show(node.path)} refers to {name!r:.80}, which the checkpoint does not hold")
            if reference["$"] == "ndarray":
                check_array(found, reference)
        return tag

    try:
        decode(node.values, check)
        for form in node.facts.get("wrappers", ()):
            check(form)
    except ODD as error:
        raise CorruptError(f"{show(node.path)}: what is stored of it is damaged: {error}") from None


def _names_in(wrapper: Json) -> list[Any]:
    """Return the names of all tensors that a wrapper consists of."""
    parts = [part for _, part in wrapper["tensors"]]
    return [n for part in parts for n in ([part["name"]] if part["$"] == "tensor" else _names_in(part))]


def is_optimizer(saved: SavedNode) -> bool:
    """Return True if an entry is the state of an optimizer."""

    def texts(value: object) -> bool:
        return type(value) is list and all(type(one) is str for one in value)

    params, values = saved.facts.get("params"), saved.values
    kinds = saved.facts.get(KINDS, {})
    if type(kinds) is not dict or not all(type(one) is dict and one.get("kind") in TENSORS for one in kinds.values()):
        return False
    dicts = saved.facts.get(DICTS, {})
    if not texts(saved.facts.get(PLAIN, [])) or type(dicts) is not dict or not texts(list(dicts.values())):
        return False
    if type(params) is not list or not all(map(texts, params)) or not texts(saved.facts.get("with_state")):
        return False
    if type(values) is not dict or type(values.get("groups")) is not list or type(values.get("state")) is not list:
        return False
    groups = (type(group) is dict and not group.keys() & {"$", "params"} for group in values["groups"])
    more = values.get("more", [])
    owners = (type(row) is list and len(row) == 2 and type(row[0]) is dict for row in more)
    if type(more) is not list or not all(owners) or not all("key" in o or texts([o.get("param")]) for o, _ in more):
        return False
    return all(groups) and all(type(row) is list and len(row) == 3 and texts(row[:1]) for row in values["state"])


def check_array(of: TensorSpec, reference: Json) -> tuple[np.dtype[Any], list[int]]:
    """Return dtype and shape of the array in a tensor. Raise CorruptError or ValueError if it cannot be an array."""
    dtype, shape = plain_dtype(reference["dtype"]), reference["shape"]
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"not a shape: {shape!r:.80}")
    if of.dtype != "U8" or len(of.shape) != 1 or math.prod(shape) * dtype.itemsize != of.nbytes:
        raise ValueError(f"{of.name} does not hold an array of {dtype} of shape {shape!r:.80}")
    return dtype, shape
