"""State that a Lightning training keeps outside its state_dict: metrics, outputs of steps, and flags of parameters.

Each class reads and restores one kind of this state. The script sets the initial values, so only the differences from
the beginning of the training are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, partialmethod
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import prune

from ckpt.core.format.values import decode, encode
from ckpt.errors import StateError

State = dict[str, Any]
NUMBERS = (bool, int, float)
MAX_ITEMS = 8192  # maximum items of a list that is read at the end of an epoch; longer lists are not saved
MAX_RUNS = 64


class Flags:
    """requires_grad of parameters, and the training mode and track_running_stats of modules. Callbacks and hooks change
    these flags during the training, for example to freeze and unfreeze layers in certain epochs."""

    def __init__(self, module: Any) -> None:
        self._places = [(f"{name}.requires_grad", p, "requires_grad") for name, p in module.named_parameters()]
        for name, one in module.named_modules():
            self._places.append((f"{name}.training", one, "training"))
            if "track_running_stats" in vars(one):
                self._places.append((f"{name}.track_running_stats", one, "track_running_stats"))
        self._begun = self.now()

    def now(self) -> list[bool]:
        return [getattr(owner, key) for _, owner, key in self._places]

    def set(self, flags: list[bool]) -> None:
        """Set all flags to values that `now` has returned."""
        for (_, owner, key), flag in zip(self._places, flags, strict=True):
            if getattr(owner, key) != flag:
                setattr(owner, key, flag)

    def read(self) -> State:
        """Return the flags that differ from the beginning of the training."""
        now = self.now()
        if now == self._begun:
            return {}
        changes = zip(self._places, now, self._begun, strict=True)
        return {name: flag for (name, _, _), flag, begun in changes if flag != begun}

    def put(self, saved: State) -> None:
        for name, owner, key in self._places:
            if name in saved and type(saved[name]) is bool:
                setattr(owner, key, saved[name])


class CollectedMetrics:
    """Metrics of torchmetrics in a module or a callback: submodules, attributes, and items of lists and dicts."""

    def __init__(self, trainer: Any, callbacks: list[Any]) -> None:
        self._owners = [("", trainer.lightning_module)]
        self._owners += [
            (f"{c.state_key}:", c) for c in callbacks if type(c).__module__.partition(".")[0] not in LIGHTNING
        ]
        self._found: list[tuple[str, Any]] = []
        self._begun: dict[str, State] = {}
        self._growing: list[tuple[Any, int]] = []
        self.find()

    def find(self) -> None:
        """Find all metrics again, because scripts may have created more of them in hooks."""
        found: dict[int, tuple[str, Any]] = {}
        for prefix, owner in self._owners:
            for name, one in _metrics(owner):
                found.setdefault(id(one), (prefix + name, one))
        self._found = list(found.values())
        for name, one in self._found:
            if name not in self._begun:
                self._begun[name] = {key: (value, _version(value)) for key, value in _attributes(one).items()}
        self._growing = [(one, len(one)) for _, one in self._found if _grows(one)]

    def read(self) -> State:
        if any(len(one) != known for one, known in self._growing):
            self.find()
        for _, one in self._found:  # reading a metric updates the other metrics of its group
            if getattr(one, "_groups_checked", False) and getattr(one, "_enable_compute_groups", False):
                one._compute_groups_create_state_ref()
        return {name: self._read(name, one) for name, one in self._found}

    def _read(self, name: str, metric: Any) -> State:
        begun = self._begun[name]
        more = {k: v for k, v in _attributes(metric).items() if k not in begun or _differs(v, begun[k])}
        if _grows(metric):
            more["len()"] = len(metric)
        values = {key: list(v) if isinstance(v, list) else v for key, v in _state(metric).items()}
        return {"values": values, "updates": getattr(metric, "_update_count", 0), "more": more}

    def put(self, saved: State) -> None:
        """Restore the metrics that exist already."""
        self.find()
        for name, one in self._found:
            if name in saved and _grows(one):
                _grow(one, saved[name]["more"].get("len()", 0))
        self.find()
        for name, one in self._found:
            if name in saved:
                _put(one, saved[name])


LIGHTNING = ("lightning", "pytorch_lightning")


def is_metric(one: object) -> bool:
    return hasattr(one, "_update_count") and hasattr(one, "_defaults")


_OF_MODULES = frozenset(vars(torch.nn.Module()))


def _metrics(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of an object by name, including collections and trackers of metrics."""
    modules = list(owner.named_modules()) if isinstance(owner, torch.nn.Module) else [("", owner)]
    for name, module in modules:
        if is_metric(module) or _grows(module) or hasattr(module, "_groups_checked"):
            yield name, module
        elif type(module).__module__.partition(".")[0] not in ("torch", *LIGHTNING):
            for key, value in vars(module).items():
                if key not in _OF_MODULES:
                    yield from _held(f"{name}.{key}" if name else key, value, depth=2)


def _held(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        for inner, one in value.named_modules() if _of_metrics(value) else ():
            if is_metric(one) or _of_metrics(one):
                yield f"{name}.{inner}" if inner else name, one
    elif depth and type(value) in (dict, list, tuple) and len(value) <= MAX_RUNS:
        for key, one in value.items() if type(value) is dict else enumerate(value):
            yield from _held(f"{name}.{key}", one, depth - 1)


def _of_metrics(one: object) -> bool:
    return is_metric(one) or _grows(one) or hasattr(one, "_groups_checked")


def _grows(one: object) -> bool:
    return hasattr(one, "_increment_called") and hasattr(one, "_base_metric")  # is a MetricTracker


def _grow(tracker: Any, count: int) -> None:
    """Give a MetricTracker as many steps as it had when it was saved."""
    while len(tracker) < count:
        tracker.increment()
    while len(tracker) > count:
        tracker._modules.popitem()  # `del` would rename the remaining metrics


def _state(metric: Any) -> State:
    return {key: getattr(metric, key) for key in getattr(metric, "_defaults", {}) if hasattr(metric, key)}


_PASSING = {"_computed", "_forward_cache", "_update_count", "_cache", "training"}


def _attributes(metric: Any) -> State:
    """Return the numbers and tensors that a metric has in addition to its state, as wrappers of metrics do."""
    states = getattr(metric, "_defaults", {})
    return {
        key: value
        for key, value in vars(metric).items()
        if (type(value) in NUMBERS or value is None or isinstance(value, Tensor))
        and key not in states
        and key not in _PASSING
        and not (key.startswith("_") and value is None)
    }


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _differs(one: Any, begun: tuple[Any, int]) -> bool:
    value, version = begun
    if isinstance(one, Tensor) or isinstance(value, Tensor):
        return one is not value or _version(one) != version
    return type(one) is not type(value) or bool(one != value)


def _put(metric: Any, saved: State) -> None:
    device = getattr(metric, "device", torch.device("cpu"))
    for key, value in {**saved["values"], **saved["more"]}.items():
        if key != "len()":
            setattr(metric, key, to_device(value, device))
    if is_metric(metric):
        metric._update_count, metric._computed = saved["updates"], None


class Outputs:
    """Lists that the module, or a callback, fills at each step and reads in on_train_epoch_end, for example
    `self.training_step_outputs`, or `pl_module.training_step_outputs` in a callback. Only lists are included whose
    names occur in the code of this hook, or of a method that it calls."""

    def __init__(self, trainer: Any, callbacks: list[Any]) -> None:
        module = trainer.lightning_module
        read = [read_by(one, "on_train_epoch_end") for one in (module, *callbacks)]
        self._places: list[tuple[str, Any, str]] = [(name, module, name) for name in sorted(set().union(*read))]
        for one, names in zip(callbacks, read[1:], strict=True):
            self._places += [(f"{one.state_key}:{name}", one, name) for name in sorted(names)]
        self._begun = {(name, k): (v, len(v)) for name, k, v in self._lists()}
        self.left_out: set[str] = set()

    def _lists(self) -> Iterator[tuple[str, str | int | None, list[Any]]]:
        for name, owner, key in self._places:
            value = vars(owner).get(key)
            lists = value if isinstance(value, dict) else {None: value}
            yield from ((name, k, v) for k, v in lists.items() if isinstance(v, list) and type(k) in KEYS)

    def read(self) -> State:
        """Return the lists that differ from the beginning. `left_out` gets the names of lists that cannot be stored."""
        found: State = {}
        for name, key, items in self._lists():
            begun, length = self._begun.get((name, key), (None, 0))
            if len(items) == length and (begun is items or not items):
                continue
            if (runs := _runs(items)) is None:
                self.left_out.add(name)
            else:
                found.setdefault(name, []).append([key, runs])
        return found

    def put(self, saved: State, device: Any) -> None:
        for name, owner, key in self._places:
            for inner, runs in saved.get(name, ()):
                value = vars(owner).get(key)
                there = value if inner is None else value.setdefault(inner, []) if isinstance(value, dict) else None
                if isinstance(there, list):
                    there[:] = to_device([item for run in runs for item in _items(run)], device)


class ModelStructure:
    """Parameter groups that were added during the training, and pruned parameters. BaseFinetuning and scripts add
    groups when they unfreeze layers; ModelPruning replaces parameters."""

    def __init__(self, trainer: Any, callbacks: list[Any]) -> None:
        self._module = trainer.lightning_module
        self._groups = [(optimizer, list(optimizer.param_groups)) for optimizer in trainer.optimizers]
        self._pruners = [c for c in callbacks if any(cls.__name__ == "ModelPruning" for cls in type(c).__mro__)]

    def read(self) -> State:
        """Return the initial number of groups of each optimizer, and the pruned parameters, each with its value in the
        last forward, because the next pruning uses this value."""
        pruned = [[name, key, getattr(module, key).detach()] for name, module, key in self._pruned()]
        shared = [number for number, old, new in self._originals() if old.data_ptr() == new.data_ptr()]
        copies = [[number, old.detach()] for number, old, _ in self._originals() if number not in shared]
        groups = [len(groups) for _, groups in self._groups]
        return {"groups": groups, "pruned": pruned, "shared": shared, "copies": copies}

    def _originals(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each tensor that ModelPruning has copied for the lottery ticket, with the parameter itself. From the
        first pruning on, both share their memory, so that the second pruning resets nothing."""
        layers = [(c, layer) for c in self._pruners for layer in (getattr(c, "_original_layers", None) or {}).values()]
        pairs = [(c, layer["data"], i, name) for c, layer in layers for i, name in layer["names"]]
        for number, (callback, copy, i, name) in enumerate(pairs):
            module = callback._parameters_to_prune[i][0]
            old, new = getattr(copy, name), getattr(module, f"{name}_orig", getattr(module, name))
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                yield number, old, new

    def _pruned(self) -> Iterator[tuple[str, Any, str]]:
        for name, module in self._module.named_modules() if self._pruners else ():
            for key in [key.removesuffix("_mask") for key in module._buffers if key.endswith("_mask")]:
                if f"{key}_orig" in module._parameters:
                    yield name, module, key

    def put(self, saved: State, device: Any) -> None:
        values = {(name, key): value for name, key, value in saved["pruned"]}
        for name, module, key in self._pruned():
            if (value := values.get((name, key))) is not None:
                setattr(module, key, to_device(value, device))
        copies = dict(saved.get("copies", ()))  # older versions did not save copies
        for number, old, new in self._originals():
            if number in saved["shared"]:
                old.data = new.data
            elif number in copies:
                old.data.copy_(copies[number])

    def match(self, saved: dict[Any, Any]) -> None:
        """Add groups to the optimizers and prune parameters of the model, so that both match a saved state."""
        structure = decode(saved[("trainer",)].values, lambda tensor: None)["structure"]
        params = {f"model.{name}": param for name, param in self._module.named_parameters()}
        there = {(name, key) for name, _, key in self._pruned()}
        for name, key, _ in structure["pruned"] if self._pruners else ():
            if (name, key) not in there:
                prune.identity(self._module.get_submodule(name), key)  # type: ignore[no-untyped-call]
        for number, (optimizer, groups) in enumerate(self._groups):
            optimizer.param_groups[:] = groups  # remove groups that an earlier try with another state may have added
            node = saved.get(("optim", number))
            if node is None or "params" not in node.facts or structure["groups"][number : number + 1] != [len(groups)]:
                continue
            settings = decode(node.values["settings"])
            for names, numbers in list(zip(node.facts["params"], settings, strict=False))[len(groups) :]:
                tuples = {k: tuple(v) if type(v) is list else v for k, v in numbers.items()}
                if all(name in params for name in names):
                    optimizer.add_param_group({**tuples, "params": [params[name] for name in names]})


KEYS = (str, int, type(None))
EMPTY = CellType()


def read_by(owner: Any, method: str) -> set[str]:
    """Return the names of attributes in the code of a method, and in the object's methods that it calls."""
    classes = [c for c in type(owner).__mro__ if c.__module__.partition(".")[0] not in (*LIGHTNING, "torch")]
    names: set[str] = set()
    pending, seen = [method], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for one in (owner, *classes):  # the method of each class may call that of the next class by super()
            used = {used for code in _codes(vars(one).get(name)) for used in _names(code)}
            names |= used
            pending += used
    return names


def _codes(function: Any) -> Iterator[CodeType]:
    """Yield the code of a method or property, and of functions in the closure of its decorator."""
    pending, seen = [function], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(code := getattr(one, "__code__", None), CodeType):
            yield code
        if isinstance(one, (FunctionType, MethodType, property, staticmethod, classmethod, partial, partialmethod)):
            pending += [getattr(one, key, None) for key in ("__wrapped__", "__func__", "fget", "func")]
            pending += [cell.cell_contents for cell in getattr(one, "__closure__", None) or () if cell != EMPTY]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)


def _runs(items: list[Any]) -> list[State] | None:
    """Return the items in groups of the same form, tensors stacked into one. Return None if they cannot be stored."""
    if len(items) > MAX_ITEMS:
        return None
    forms = [_form(item) for item in items]
    if None in forms:
        return None
    found: list[State] = []
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or forms[end] != forms[start]:
            found.append(_run(items[start:end]))
            if len(found) > MAX_RUNS:
                return None
            start = end
    return found


def _form(item: Any) -> Any:
    """Return a value that is equal for two items that can be stacked. Return None if the item cannot be stored."""
    if isinstance(item, Tensor):
        plain = type(item) in (Tensor, torch.nn.Parameter) and item.layout is torch.strided
        return ("tensor", item.dtype, item.shape, item.device) if plain else None
    if type(item) in (dict, list, tuple):
        parts = list(item.items()) if type(item) is dict else list(enumerate(item))
        forms = [(key, _form(value)) for key, value in parts]
        return None if any(form is None for _, form in forms) else (type(item), tuple(forms))
    if type(item) is float:
        return ("float",)
    try:
        encode(item)
    except StateError:
        return None
    return ("plain",)


def _run(items: list[Any]) -> State:
    first = items[0]
    room = 1 << (len(items) - 1).bit_length()  # a power of two, so that the stored shape changes rarely
    if type(first) is float:
        numbers = torch.zeros(room, dtype=torch.float64)
        numbers[: len(items)] = torch.tensor(items, dtype=torch.float64)
        return {"kind": "float", "count": len(items), "whole": numbers}
    if isinstance(first, Tensor):
        whole = first.new_zeros((room, *first.shape))
        torch.stack([item.detach() for item in items], out=whole[: len(items)])
        return {"kind": "tensor", "count": len(items), "whole": whole}
    if type(first) in (dict, list, tuple):
        keys = list(first) if type(first) is dict else list(range(len(first)))
        columns = [_run([item[key] for item in items]) for key in keys]
        return {"kind": type(first).__name__, "count": len(items), "keys": keys, "columns": columns}
    return {"kind": "plain", "count": len(items), "items": items}


def _items(run: State) -> list[Any]:
    if run["kind"] == "tensor":
        return [one.clone() for one in run["whole"][: run["count"]]]
    if run["kind"] == "float":
        return list(run["whole"][: run["count"]].tolist())
    if run["kind"] == "plain":
        return list(run["items"])
    columns = [_items(column) for column in run["columns"]]
    rows = [[column[i] for column in columns] for i in range(run["count"])]
    if run["kind"] == "dict":
        return [dict(zip(run["keys"], row, strict=True)) for row in rows]
    return rows if run["kind"] == "list" else [tuple(row) for row in rows]


def to_device(value: Any, device: Any) -> Any:
    """Return a value with all tensors in it moved to a device."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(value, Tensor, lambda tensor: tensor.to(device))
