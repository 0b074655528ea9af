"""Infer the entries of another library's nested state: modules, optimizers, objects with a state, plain values.

Other libraries save values without their classes, so the structure decides. A dict of only tensors is a module; one
with `state` and `param_groups` is an optimizer. Optimizers number their parameters: names come from the file, or follow
from order and shapes, or stay unknown. A note states which.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, TypeVar

import torch
from msgspec import structs

from ckpt.core.format.values import ORDERS, Json, Path, show
from ckpt.core.state.tensors import order_of
from ckpt.tools.convert.parse_entries import AnyTensor, Parts, Values, is_tensor
from ckpt.tools.convert.source import OriginEntry
from ckpt.tools.convert.source_files import Foreign

FLOATING = {"F64", "F32", "F16", "BF16", "C64", "C128", "C32"}
_NO_PARAMETERS = ("running_mean", "running_var", "num_batches_tracked")
_LIKE_PARAMETER = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum", "acc_delta",
    "exp_inf", "prev", "step_size", "ax", "master_param",
)  # fmt: skip
_MANY = 1000  # maximum assignments of names to count: with that many, the result is ambiguous anyway
_T = TypeVar("_T")


_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


def _without_wrappers(keys: Iterable[str]) -> dict[str, str]:
    """Return for each key the key without the parts that torch.compile and checkpoint wrappers add. Files do not name
    classes, so a part is kept if it has siblings, because a wrapper has only one such attribute."""
    parts = {key: key.split(".") for key in keys}
    members: dict[tuple[str, ...], set[str]] = {}
    for path in parts.values():
        for i, part in enumerate(path):
            members.setdefault(tuple(path[:i]), set()).add(part)

    def added(path: list[str], i: int) -> bool:
        return path[i] in _WRAPPER_PARTS and i + 1 < len(path) and len(members[tuple(path[:i])]) == 1

    return {key: ".".join(p for i, p in enumerate(path) if not added(path, i)) for key, path in parts.items()}


def from_state(what: str, folder: FilePath, root: Any, at: Path, values: Values) -> Foreign:
    """Return the entries of a nested state. A single module, list or tensor is placed at `at`."""
    return _Reading(what, folder, at, values).read(root)


class _Reading:
    def __init__(self, what: str, folder: FilePath, at: Path, values: Values) -> None:
        self._what, self._folder, self._at, self._values = what, folder, at, values
        self._parts = Parts()
        self._entries: list[OriginEntry] = []
        self._modules: list[ModuleNames] = []
        self._optimizers: list[tuple[int, Path, dict[str, Any]]] = []

    def read(self, root: Any) -> Foreign:
        whole = type(root) not in (dict, OrderedDict) or _kind(root) != "stateful" or not root
        if whole:
            self._entry(root, self._at)
        else:
            self._walk(self._loose_module(root), ())
        for number, path, state in self._optimizers:
            self._entries[number] = self._optimizer(path, state)
        parts, notes, step = self._parts, self._values.notes(), _step(root)
        strided = [(p.name, torch.empty_strided(p.sizes, p.strides, device="meta")) for p in parts.pieces if p.strides]
        orders = {name: order_of(tensor) for name, tensor in strided}
        entries = tuple(_with_orders(entry, orders) for entry in self._entries)
        found = self._what, self._folder, tuple(parts.pieces), parts.aliases, entries, notes, step, parts.held
        return Foreign(*found, self._values.objects)

    def _loose_module(self, root: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Move a model's tensors at the top level to `at`, because some trainers store them next to other entries."""
        loose = {k: v for k, v in root.items() if is_tensor(v) and type(k) is str and ("." in k or v.dtype in FLOATING)}
        head = self._at[0] if self._at else None
        if not any("." in key for key in loose) or head in root:
            return root
        self._values.note(self._at, "tensors next to other entries became this module")
        self._module(loose, self._at)
        return {key: value for key, value in root.items() if key not in loose}

    def _walk(self, container: Any, path: Path) -> None:
        for key, value in container.items() if isinstance(container, Mapping) else enumerate(container):
            here = (*path, key)
            if (
                _kind(value) in ("stateful", "plain")
                and type(value) in (dict, OrderedDict, list, tuple)
                and _holds(value)
            ):
                self._walk(value, here)
            else:
                self._entry(value, here)

    def _entry(self, value: Any, path: Path) -> None:
        kind = _kind(value)
        if kind == "module":
            self._module(value, path)
        elif kind == "optimizer":
            self._optimizers.append((len(self._entries), path, value))
            self._entries.append(OriginEntry(path, kind, {}, ()))  # a placeholder, replaced when all modules are known
        else:
            data, names = self._parts.values(value, path)
            self._entries.append(OriginEntry(path, kind, {}, names, data))

    def _module(self, value: Mapping[str, AnyTensor], path: Path) -> None:
        plain = _without_wrappers(value)
        if list(plain) != list(plain.values()):
            self._values.note(path, "removed prefixes that torch.compile and other wrappers add to names")
            value = {plain[key]: tensor for key, tensor in value.items()}
        names = {key: show((*path, key)) for key in value}
        for key, name in names.items():
            self._parts.tensor(name, value[key])
        if names and all(key.startswith("module.") for key in value):
            self._values.note(path, 'all names start with "module.", as in a wrapped module; kept unchanged')
        self._modules.append(ModuleNames(path, {k: (n, value[k]) for k, n in names.items()}, self._parts.aliases))
        self._entries.append(OriginEntry(path, "module", {}, tuple(names.values())))

    # -- optimizers --

    def _optimizer(self, path: Path, saved: dict[str, Any]) -> OriginEntry:
        saved = _unflattened(saved)
        groups = saved["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        called = ParameterNames(self._modules, self._at, self._values.note).of(path, keys, saved)
        encoded: list[dict[str, Json]] = []
        found: list[str] = []
        for i, group in enumerate(groups):
            rest = {key: value for key, value in group.items() if key != "params"}
            encoded.append({})
            for key, value in rest.items():
                encoded[-1][str(key)], names = self._parts.values(value, (*path, "param_groups", i, key))
                found += names
        others: list[Json] = []
        fixed: list[str] = []
        # exports of this library store tensors under "params" that only the optimizer has
        for place, tensor in saved.get("params", {}).items():
            self._parts.tensor(show((*path, "params", place)), tensor)
            fixed.append(show((*path, "params", place)))
        for param, state in saved.get("state", {}).items():
            for key, value in state.items():
                here = (*path, "state", called[param], key)
                if is_tensor(value):
                    self._parts.tensor(show(here), value)
                    fixed.append(show(here))
                else:
                    data, names = self._parts.values(value, here)
                    others.append([called[param], str(key), data])
                    found += names
        facts = {
            "params": [[called[key] for key in group["params"]] for group in groups],
            "with_state": [called[key] for key in saved.get("state", {})],
        }
        return OriginEntry(path, "optimizer", facts, (*fixed, *found), {"groups": encoded, "state": others})


def _with_orders(entry: OriginEntry, orders: Mapping[str, list[int] | None]) -> OriginEntry:
    """Record the order of dimensions in memory for tensors that are not in row-major order."""
    layouts = {name: order for name in entry.names if (order := orders.get(name)) is not None}
    return structs.replace(entry, facts={**entry.facts, ORDERS: layouts}) if layouts else entry


# -- infer the kind of a value from its structure --


def _kind(value: Any) -> str:
    if type(value) not in (dict, OrderedDict):
        return "plain"
    if _is_optimizer(value):
        return "optimizer"
    tensors = [v for v in value.values() if is_tensor(v)]
    if not tensors or not all(type(key) is str for key in value):
        return "stateful"
    if len(tensors) == len(value):
        # the state of random number generators is a dict of tensors of bytes
        return "stateful" if all(t.dtype == "U8" for t in tensors) else "module"
    others = [key for key, v in value.items() if not is_tensor(v)]
    return "custom module" if all(key.endswith("_extra_state") for key in others) else "stateful"


def _holds(value: Any) -> bool:
    """Return True if the value contains a value that must be an entry of its own."""
    return any(
        _kind(part) in ("module", "optimizer", "custom module") or _is_scheduler(part) or _holds(part)
        for part in _parts(value)
    )


def _step(root: Any) -> int | None:
    """Return the training step, which is stored under one of its usual names, or None."""
    steps = [root.get(key) for key in ("global_step", "step")] if type(root) in (dict, OrderedDict) else []
    return next((step for step in steps if type(step) is int and 0 <= step < 2**53), None)


def _parts(value: Any) -> Iterator[Any]:
    if type(value) in (dict, OrderedDict):
        yield from value.values()
    elif type(value) in (list, tuple):
        yield from value


def _is_scheduler(value: Any) -> bool:
    return type(value) in (dict, OrderedDict) and {"last_epoch", "_step_count"} <= value.keys()


def _is_optimizer(value: Mapping[Any, Any]) -> bool:
    return _is_listed(value) or _is_flat(value)


def _is_listed(value: Mapping[Any, Any]) -> bool:
    groups, state = value.get("param_groups"), value.get("state", {})
    own = value.get("params", {})
    if not value.keys() <= {"state", "param_groups", "params"} or type(groups) is not list or not groups:
        return False
    if type(own) is not dict or not all(type(key) is str and is_tensor(one) for key, one in own.items()):
        return False
    if type(state) not in (dict, OrderedDict) or not all(type(s) in (dict, OrderedDict) for s in state.values()):
        return False
    if not all(type(g) in (dict, OrderedDict) and type(g.get("params")) is list for g in groups):
        return False
    keys = [key for group in groups for key in group["params"]]
    plain = all(type(key) in (str, int) for key in keys) and all(type(k) is str for s in state.values() for k in s)
    return plain and len(set(keys)) == len(keys) and set(keys) >= state.keys()


def _is_flat(value: Mapping[Any, Any]) -> bool:
    """Return True for torch's flattened form: `state.<parameter>.<key>` and `param_groups.<parameter>.<setting>`."""
    if not all(type(key) is str and key.startswith(("state.", "param_groups.")) for key in value):
        return False
    settings = [key.removeprefix("param_groups.") for key in value if key.startswith("param_groups.")]
    params = {key.rpartition(".")[0] for key in settings}
    states = (key.removeprefix("state.").rpartition(".")[0] for key in value if key.startswith("state."))
    return bool(params) and "" not in params and params.issuperset(states)


def _unflattened(value: dict[str, Any]) -> dict[str, Any]:
    """Convert a flattened optimizer state to the list form. Consecutive parameters with equal settings form a group."""
    if not _is_flat(value):
        return value
    settings: dict[str, dict[str, Any]] = {}
    state: dict[str, dict[str, Any]] = {}
    for full, one in value.items():
        form, _, rest = full.partition(".")
        name, _, key = rest.rpartition(".")
        (state if form == "state" else settings).setdefault(name, {})[key] = one
    groups: list[dict[str, Any]] = []
    for name, one in settings.items():
        if groups and {k: v for k, v in groups[-1].items() if k != "params"} == one:
            groups[-1]["params"].append(name)
        else:
            groups.append({**one, "params": [name]})
    return {"state": state, "param_groups": groups}


# -- names of an optimizer's parameters --


class ParameterNames:
    """Finds the names of an optimizer's parameters in the modules of the state. `at`: path for bare weights."""

    def __init__(self, modules: Sequence[ModuleNames], at: Path, note: Callable[[Path, str], None]) -> None:
        self._modules, self._at, self._note = modules, at, note

    def of(self, path: Path, keys: list[Any], saved: dict[str, Any]) -> dict[Any, str]:
        """Return the names of an optimizer's parameters, by the keys that the optimizer uses for them."""
        given = [group.get("param_names") for group in saved["param_groups"]]
        own = [name for one in given if type(one) is list for name in one if type(name) is str]
        if len(own) != len(keys) or len(set(own)) != len(own):
            own = [str(key) for key in keys] if all(type(key) is str for key in keys) else []
        if not any(all(name in module.names for name in own) for module in self._modules):
            own = list(_without_wrappers(own).values())
        if own:
            having = {module.path: module for module in self._modules if all(name in module.names for name in own)}
            chosen = self._choose(path, having)
            if chosen is not None:
                return dict(zip(keys, map(chosen.full, own), strict=True))
            self._note(path, "parameters keep their names in the file, because no module has them")
            return dict(zip(keys, own, strict=True))
        shapes = [[_shape(saved.get("state", {}).get(key, {})) for key in g["params"]] for g in saved["param_groups"]]
        found = self._choose(path, {m.path: names for m in self._modules if (names := m.match(shapes)) is not None})
        if found is not None:
            self._note(path, "parameters are numbered in the file; order and shapes determined their names")
            return dict(zip(keys, found, strict=True))
        self._note(path, "parameters are numbered in the file and their names are ambiguous: named by position")
        places = (f"{i}.{j}" for i, group in enumerate(saved["param_groups"]) for j in range(len(group["params"])))
        return dict(zip(keys, places, strict=True))

    def _choose(self, path: Path, fitting: dict[Path, _T]) -> _T | None:
        """Choose one of the modules that fit an optimizer: the only one, or the model rather than its averaged copy."""
        usual = [path for path in fitting if path == self._at or path[-1:] in (("model",), ("state_dict",))]
        if len(fitting) > 1 and len(usual) == 1:
            self._note(path, f"several modules fit its parameters: used {show(usual[0])}")
            return fitting[usual[0]]
        return next(iter(fitting.values())) if len(fitting) == 1 else None


class ModuleNames:
    """The tensors of one module, by their names in the module."""

    def __init__(self, path: Path, names: dict[str, tuple[str, AnyTensor]], aliases: Mapping[str, str]) -> None:
        self.path, self.names, self._aliases = path, names, aliases

    def full(self, name: str) -> str:
        found = self.names[name][0]
        return self._aliases.get(found, found)

    def match(self, groups: list[list[tuple[int, ...] | None]]) -> list[str] | None:
        """Match the parameters of the groups with the module's tensors, in the module's order. Return their full names,
        or None if the match is ambiguous."""
        candidates = [
            (full, tensor.shape)
            for name, (full, tensor) in self.names.items()
            if full not in self._aliases and tensor.dtype in FLOATING and not name.endswith(_NO_PARAMETERS)
        ]
        total = sum(map(len, groups))
        if total == 0 or total > len(candidates):
            return None
        # Number of ways to assign the tensors so far, up to two, by how many parameters of each group are assigned.
        ways: dict[tuple[int, ...], tuple[int, Any]] = {(0,) * len(groups): (1, None)}
        for number, (_, shape) in enumerate(candidates):
            spare = len(candidates) - total
            after: dict[tuple[int, ...], tuple[int, Any]] = {}
            for done, (count, trail) in ways.items():
                if number - sum(done) < spare:
                    _add(after, done, count, trail)
                for i, group in enumerate(groups):
                    if done[i] < len(group) and group[done[i]] in (None, shape):
                        more = (*done[:i], done[i] + 1, *done[i + 1 :])
                        _add(after, more, count, (trail, number, i))
            if len(after) > _MANY:
                return None
            ways = after
        count, trail = ways.get(tuple(map(len, groups)), (0, None))
        if count != 1:
            return None
        given: list[list[str]] = [[] for _ in groups]
        while trail is not None:
            trail, number, i = trail
            given[i].append(candidates[number][0])
        return [name for group in given for name in reversed(group)]


def _add(ways: dict[tuple[int, ...], tuple[int, Any]], key: tuple[int, ...], count: int, trail: Any) -> None:
    ways[key] = (min(2, ways[key][0] + count), trail) if key in ways else (count, trail)


def _shape(state: Any) -> tuple[int, ...] | None:
    """Return the shape of the parameter to which a part of optimizer state belongs, or None if it is unknown."""
    for key in _LIKE_PARAMETER:
        if is_tensor(state.get(key)):
            return tuple(state[key].shape)
    return None
