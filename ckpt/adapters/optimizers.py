"""Optimizers that do more than torch's: hooks, an own `state_dict()` or loader, helper objects in their state.

Which ones are asked, and called, is decided here, and so is which packages are trusted to add nothing (`TRUSTED`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ckpt.adapters.objects import ObjectsOf
from ckpt.core.format.saved_nodes import SavedNode
from ckpt.core.format.values import Json, Path, encode, show
from ckpt.core.state.names import Names
from ckpt.core.state.nodes import Collector, Contents, StatefulNode
from ckpt.core.state.optimizer_node import OptimizerNode, Row
from ckpt.core.state.placement import Placement
from ckpt.core.state.sharding import is_dtensor
from ckpt.core.state.special_values import ObjectDecoder, ObjectEncoder
from ckpt.core.state.tensors import as_bytes
from ckpt.core.state.wrappers import is_wrapped
from ckpt.errors import MismatchError
from ckpt.events import log

BEFORE_SAYING = "_optimizer_state_dict_pre_hooks"  # where torch's optimizers have them


class CustomOptimizerNode(OptimizerNode):
    """Any optimizer whose state lies in `.state` and `.param_groups`.

    If it has a `state_dict()` that adds entries to those of torch, these are saved as `extra`, and a restore hands them
    to its `load_state_dict()`. A restore also calls this loader if it, or its hooks, may derive something.
    """

    def __init__(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(path, optimizer)
        self._objects = ObjectsOf(optimizer)
        self._adds_entries, self._same = speaks_for_itself(optimizer), _all_of_one_state(optimizer)
        self._extra: dict[str, Any] = {}  # of the reading that is under way

    @staticmethod
    def owns(value: object) -> bool:
        return isinstance(value, torch.optim.Optimizer)

    def read(self, names: Names) -> Contents:
        self._extra = self._own_entries()  # first: its hooks may write into the groups and the state
        return self._read(names, Collector(self._objects, exact=True))

    def _values(self, collect: Collector) -> dict[str, Any]:
        extra, self._extra = self._extra, {}
        self._objects.begin(self._called)
        values = super()._values(collect)
        if extra:
            values["extra"] = encode(extra, (*self.path, "extra"), collect)
        self._objects.end()
        return values

    def _own_entries(self) -> dict[str, Any]:
        """Run the hooks that prepare a `state_dict()`. Return the entries that the optimizer's own adds to torch's."""
        if not self._adds_entries:
            for one in self._same:
                for hook in tuple((vars(one).get(BEFORE_SAYING) or {}).values()):
                    hook(one)
            return {}
        said = self.optimizer.state_dict()
        return {key: value for key, value in said.items() if key not in ("state", "param_groups")}

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        objects = self._objects.restoring(saved.values)
        if not self._prepare(saved, placement, objects):
            return
        extra = self._saved_extra(saved, placement, objects)
        if extra is not None or any(map(_derives_when_loaded, self._same)):

            def finish() -> None:
                self._load({} if extra is None else extra(), dict(self.optimizer.state))

            placement.finish(self.path, finish)

    def _saved_extra(
        self, saved: SavedNode, placement: Placement, objects: ObjectDecoder
    ) -> Callable[[], dict[str, Any]] | None:
        """Build the entries that a `state_dict()` had added."""
        found = saved.values.get("extra")
        if found is None:
            return None
        if not self._adds_entries:
            placement.problem(f"{show(self.path)}: its state_dict() had entries of its own, and has none here")
            return None
        if self._note_differing({("extra", ""): found}, _rows_of_extra, placement):
            return None
        return placement.build(found, guarded=True, objects=objects)

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        if self._adds_entries or any(map(_derives_when_loaded, self._same)):
            return False
        return self._prepare_as_saved(saved, placement, self._objects.restoring(saved.values))

    def _new_encoder(self) -> ObjectEncoder:
        return ObjectsOf(self.optimizer)

    def _load(self, extra: dict[str, Any], state: dict[Any, Any]) -> None:
        """Call the optimizer's own loader, and undo what torch's does to values, such as casts to dtypes of weights."""
        said = self._say(state)
        try:
            self.optimizer.load_state_dict({**said, **extra})
        except Exception as error:
            if extra:
                raise
            log.warning(
                "%s: its state was restored, but its own load_state_dict() failed with %r, so what the optimizer "
                "derives from its state when it is loaded may be missing",
                show(self.path),
                error,
            )
        for key, values in self.optimizer.state.items():
            if key not in state:
                state[key] = values
            elif isinstance(values, dict) and isinstance(state[key], dict):
                saved = state[key]
                state[key].update({k: v for k, v in values.items() if k not in saved or _is_derived(v, saved[k], key)})
        self._put(state)

    def _say(self, state: dict[Any, Any]) -> dict[str, Any]:
        """Return the `state_dict()` of what was restored. What it writes before it reads would be of this process."""
        held = {key: dict(values) for key, values in state.items() if isinstance(values, dict)}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        hooks = [(vars(one), vars(one).get(BEFORE_SAYING)) for one in self._same]
        try:
            for owner, of_one in hooks:
                if of_one:
                    owner[BEFORE_SAYING] = OrderedDict()
            said = self.optimizer.state_dict()
        finally:
            for owner, of_one in hooks:
                if of_one:
                    owner[BEFORE_SAYING] = of_one
        for key, values in held.items():
            state[key].clear()
            state[key].update(values)
        if type(packed := said.get("param_groups")) is not list or len(packed) != len(groups):
            return said
        return {**said, "param_groups": _Groups({**a, **b} for a, b in zip(packed, groups, strict=True))}


class SeparateOptimizerNode(StatefulNode):
    """An optimizer that keeps its state elsewhere: only its `state_dict()` has it."""

    def __init__(self, path: Path, target: torch.optim.Optimizer) -> None:
        super().__init__(path, target)
        self._objects = ObjectsOf(target)

    @staticmethod
    def owns(value: object) -> bool:
        return isinstance(value, torch.optim.Optimizer) and keeps_elsewhere(value)

    def read(self, names: Names) -> Contents:
        self._objects.begin({})
        contents = self._read(Collector(self._objects))
        self._objects.end()
        return contents

    def _build(self, saved: SavedNode, placement: Placement) -> Callable[[], Any] | None:
        # Its loader wants tensors that lie on the ranks like those that it has.
        like = {entry.name: entry for entry in self.read(Names()).loose}
        objects = self._objects.restoring(saved.values)
        try:
            return placement.build(saved.values, like=like, guarded=True, objects=objects)
        except MismatchError as error:
            placement.problem(f"{show(self.path)} begins anew, since not all of its state can be had: {error}")
            return None

    def _load(self, state: Any) -> None:
        """Torch's own loader casts moments to the dtypes of the weights: undo that."""
        self.target.load_state_dict(state)
        _recast(self.target.state_dict(), state)  # the dicts of parameters in it are those that the optimizer has


def _recast(live: Any, saved: Any) -> Any:
    """Return what a loader made of a value, with the saved tensors where it has changed their dtype."""
    if isinstance(live, Tensor):
        cast = isinstance(saved, Tensor) and saved.shape == live.shape and saved.dtype != live.dtype
        return saved.to(live.device) if cast else live
    if isinstance(live, dict) and isinstance(saved, dict):
        for key in live.keys() & saved.keys():
            live[key] = _recast(live[key], saved[key])
    elif type(live) in (list, tuple) and type(saved) is type(live) and len(live) == len(saved):
        found = [_recast(one, other) for one, other in zip(live, saved, strict=True)]
        if type(live) is tuple:
            return tuple(found)
        live[:] = found
    return live


def _rows_of_extra(values: Json) -> Iterable[tuple[Row, Json]]:
    return [(("extra", ""), values["extra"])] if "extra" in values else []


TRUSTED = {"torch", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "opacus"}
"""Packages whose wrappers of optimizers add nothing to the `state_dict()` of the optimizer inside."""


def speaks_for_itself(optimizer: Any) -> bool:
    """Return True if `state_dict()` may say more than `.state` and `.param_groups`: it is overridden, or has hooks."""
    if vars(optimizer).get("_optimizer_state_dict_post_hooks") or "state_dict" in vars(optimizer):
        return True
    owner = next((one for one in type(optimizer).__mro__ if "state_dict" in vars(one)), None)
    if owner is None:
        return False
    if owner.__module__.split(".")[0] not in TRUSTED:
        return True
    return any(speaks_for_itself(one) for one in _inside(optimizer) if one.state is optimizer.state)


def _derives_when_loaded(optimizer: Any) -> bool:
    """Return True if loading may do more than set `.state` and `.param_groups`: by hooks or an overridden method."""
    names = ("load_state_dict", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    if any(vars(optimizer).get(name) for name in names):
        return True
    owners = (
        next((one for one in type(optimizer).__mro__ if m in vars(one)), None) for m in (names[0], "__setstate__")
    )
    return any(owner is not None and owner.__module__.split(".")[0] not in TRUSTED for owner in owners)


def _all_of_one_state(optimizer: Any) -> list[Any]:
    """Return the optimizer, and those inside it that have the same state."""
    found = [optimizer]
    for outer in found:  # which grows
        inside = (one for one in _inside(outer) if getattr(one, "state", None) is optimizer.state)
        found += [one for one in inside if not any(one is known for known in found)]
    return found


class _Groups(list[dict[str, Any]]):
    """Groups whose values torch's loader takes as they are: its deep copy would make other parameters of them."""

    def __deepcopy__(self, memo: Any) -> list[dict[str, Any]]:
        return [dict(group) for group in self]


def _raw(tensor: Tensor) -> Tensor:
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _is_derived(loaded: Any, saved: Any, param: Any) -> bool:
    """Return True if an optimizer's loader made another value of a saved one, and did not only cast or copy it.

    torch's casts to the dtype of the parameter, and many an optimizer back again.
    """
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if type(loaded) is not type(saved) or is_wrapped(saved) or is_dtensor(saved) or loaded is saved:
            return False
        if loaded.shape != saved.shape:
            return True
        casts = (saved, saved.detach().to(param.dtype)) if isinstance(param, Tensor) else (saved,)
        return not any(torch.equal(_raw(one.detach().to(loaded.device, loaded.dtype)), _raw(loaded)) for one in casts)
    numbers = (bool, int, float, type(None))
    return type(loaded) in numbers and type(saved) in numbers and repr(loaded) != repr(saved)


def _inside(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]


def keeps_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `state_dict()` returns something other than `.state` and `.param_groups`, such as the states of
    several optimizers.

    A wrapper that forwards both and only adds entries to its `state_dict()` keeps nothing elsewhere.
    """
    if not speaks_for_itself(optimizer):
        return False
    owner = next(one for one in type(optimizer).__mro__ if "state_dict" in vars(one))
    if not any(one.state is optimizer.state for one in _inside(optimizer)):
        return owner.__module__.split(".")[0] != "torch" or "state_dict" in vars(optimizer)
    return not {"state", "param_groups"} <= optimizer.state_dict().keys()
