"""What a nested state of another library is in our terms: modules, optimizers, objects with a state, plain values.

Other libraries save only values, not what they are of, so that is told by their form: a dict of nothing but tensors is
a module, one with `state` and `param_groups` an optimizer (`ckpt.convert.parse_optimizer`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from ckpt.convert.parse_entries import AnyTensor, Parts, is_tensor
from ckpt.convert.parse_optimizer import FLOATING, ModuleNames, ParameterNames, is_optimizer, unflattened
from ckpt.convert.parse_values import Values
from ckpt.convert.source import OriginEntry
from ckpt.convert.source_files import Foreign
from ckpt.format.values import Json, Path, show
from ckpt.state.sharding import clean


def from_state(what: str, folder: FilePath, root: Any, at: Path, values: Values) -> Foreign:
    """Entries for a nested state. A module that is all there is goes to `at`; so does a list, or a tensor."""
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
        entries = tuple(self._entries)
        return Foreign(self._what, self._folder, tuple(parts.pieces), parts.aliases, entries, notes, step, parts.held)

    def _loose_module(self, root: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Some trainers put a model's tensors beside everything else: those go to `at`. The rest is returned."""
        loose = {k: v for k, v in root.items() if is_tensor(v) and type(k) is str and ("." in k or v.dtype in FLOATING)}
        head = self._at[0] if self._at else None
        if not any("." in key for key in loose) or head in root:
            return root
        self._values.note(self._at, "tensors that were beside everything else became this module")
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
            self._entries.append(OriginEntry(path, kind, {}, ()))  # set when all modules are known
        else:
            data, names = self._parts.values(value, path)
            self._entries.append(OriginEntry(path, kind, {}, names, data))

    def _module(self, value: Mapping[str, AnyTensor], path: Path) -> None:
        if (cleaned := {clean(key): tensor for key, tensor in value.items()}) != value and len(cleaned) == len(value):
            self._values.note(path, "names without what torch.compile and such add to them")
            value = cleaned
        names = {key: show((*path, key)) for key in value}
        for key, name in names.items():
            self._parts.tensor(name, value[key])
        if names and all(key.startswith("module.") for key in value):
            self._values.note(path, 'all names start with "module.", as those of a wrapped module do; kept as they are')
        self._modules.append(ModuleNames(path, {k: (n, value[k]) for k, n in names.items()}, self._parts.aliases))
        self._entries.append(OriginEntry(path, "module", {}, tuple(names.values())))

    # -- optimizers --

    def _optimizer(self, path: Path, saved: dict[str, Any]) -> OriginEntry:
        saved = unflattened(saved)
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
        for place, tensor in saved.get("params", {}).items():  # as we write what only the optimizer holds
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


# -- what a value is, by its form --


def _kind(value: Any) -> str:
    if type(value) not in (dict, OrderedDict):
        return "plain"
    if is_optimizer(value):
        return "optimizer"
    tensors = [v for v in value.values() if is_tensor(v)]
    if not tensors or not all(type(key) is str for key in value):
        return "stateful"
    if len(tensors) == len(value):
        # States of random number generators are dicts of bytes.
        return "stateful" if all(t.dtype == "U8" for t in tensors) else "module"
    others = [key for key, v in value.items() if not is_tensor(v)]
    return "custom module" if all(key.endswith("_extra_state") for key in others) else "stateful"


def _holds(value: Any) -> bool:
    """Whether something with a form of its own is inside: then each part is an entry."""
    return any(
        _kind(part) in ("module", "optimizer", "custom module") or _is_scheduler(part) or _holds(part)
        for part in _parts(value)
    )


def _step(root: Any) -> int | None:
    """Of the training, as trainers call it."""
    found = [root.get(key) for key in ("global_step", "step")] if type(root) in (dict, OrderedDict) else []
    return next((step for step in found if type(step) is int and 0 <= step < 2**53), None)


def _parts(value: Any) -> Iterator[Any]:
    if type(value) in (dict, OrderedDict):
        yield from value.values()
    elif type(value) in (list, tuple):
        yield from value


def _is_scheduler(value: Any) -> bool:
    return type(value) in (dict, OrderedDict) and {"last_epoch", "_step_count"} <= value.keys()
