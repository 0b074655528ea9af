"""Entries of a saved state, and what several ranks say of one, as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ckpt.errors import CorruptError
from ckpt.format.columns import ODD
from ckpt.format.values import Json, Path

SHARED_KINDS = ("module", "optimizer")  # of which each rank may hold some part
PLAIN = "plain"  # among an optimizer's facts: names of plain tensors that are a rank's shards next to a DTensor
JOINED_KIND = "optimizer"  # of which the values of all ranks are joined
ORDERS = "orders"  # a fact: the dimensions of tensors that are not contiguous, from the outermost to the innermost


@dataclass(frozen=True)
class SavedNode:
    """One entry of a saved state. `names`: of its tensors, aliases too."""

    path: Path
    kind: str
    facts: dict[str, Any]
    values: Json
    names: tuple[str, ...]


def joined(nodes: list[SavedNode]) -> SavedNode:
    """What ranks say of one entry, the one that asks first. CorruptError if that does not go together."""
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
    """Parameter groups joined one by one."""
    own = {name for group in nodes[0].facts["params"] for name in group}  # what it says of these is the truth
    groups = max(len(node.facts["params"]) for node in nodes)
    params = [_union(node.facts["params"][i] for node in nodes if i < len(node.facts["params"])) for i in range(groups)]
    state = [[n for n in node.facts["with_state"] if i == 0 or n not in own] for i, node in enumerate(nodes)]
    mine = set(nodes[0].names)
    plain = _union([n for n in node.facts.get(PLAIN, ()) if i == 0 or n not in mine] for i, node in enumerate(nodes))
    facts = {**nodes[0].facts, **({PLAIN: plain} if plain else {})}
    return {**facts, "params": params, "with_state": _union(state), **_joined_tensors(nodes)}


def _joined_tensors(nodes: list[SavedNode]) -> dict[str, Any]:
    """What is said of single tensors; what a rank has itself it knows best."""
    orders = [node.facts.get(ORDERS, {}) for node in reversed(nodes)]
    found = {name: order for each in orders for name, order in each.items()}
    return {**_joined_wrappers(nodes), **({ORDERS: found} if found else {})}


def _joined_wrappers(nodes: list[SavedNode]) -> dict[str, Any]:
    """How tensors that are made of several look."""
    rows = [form for node in reversed(nodes) for form in node.facts.get("wrappers", ())]
    if not all(type(form) is dict and type(form.get("name")) is str for form in rows):
        raise CorruptError("what is stored of tensors that are made of others has no names")
    return {"wrappers": list({form["name"]: form for form in rows}.values())} if rows else {}


def _joined_values(nodes: list[SavedNode]) -> Json:
    """The settings of the groups are the first one's; plain state of single parameters is anybody's."""
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
