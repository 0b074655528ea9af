"""Reads optimizers and restores them.

`OptimizerNode` saves the state of each parameter under the parameter's name, and writes it back directly. It fills live
tensors in place and creates missing ones like their parameter. `Joint` presents several optimizers as one, for a rank
with several pipeline stages that other runs have on several ranks.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain, compress
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ckpt.core.format.columns import ODD
from ckpt.core.format.values import (
    DICTS,
    KINDS,
    PLAIN,
    Json,
    Path,
    SavedNode,
    decode,
    encode,
    encode_key,
    is_optimizer,
    kind_of,
    part_of,
    show,
    splitter,
)
from ckpt.core.state.nodes import (
    Collector,
    Contents,
    Memories,
    Places,
    StateNode,
    overridden,
    settings_of,
    write_back,
)
from ckpt.core.state.placement import Placement, facts_of, forms_of, matching, references
from ckpt.core.state.sharding import (
    Division,
    Names,
    Replicas,
    Span,
    StateEntry,
    is_dtensor,
    is_plain_share,
    local,
    members,
    span_of,
)
from ckpt.core.state.tensors import PLAIN as PLAIN_TENSORS
from ckpt.core.state.tensors import (
    ObjectDecoder,
    ObjectEncoder,
    as_plain,
    decode_constant,
    dims_of_expansion,
    kind_of_tensor,
    of_kind,
    order_of,
    plain_kind,
)
from ckpt.core.state.wrappers import WrapperForm, is_wrapped, take_all_apart
from ckpt.errors import CorruptError, MismatchError, StateError
from ckpt.units import count_of

IN_TURN = ("params", "param_names")  # keys of a group whose values are lists to concatenate


SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}  # settings that schedulers add
DEPTH = 3  # maximum depth of containers in which an optimizer's inner optimizers are found


class OptimizerNode(StateNode):
    """Reads and restores a torch optimizer. State is saved by parameter name and written back directly, because the
    optimizer's own loader would cast dtypes.

    Parameters that it steps and that no other entry contains, for example fp32 masters, are saved with it. State that
    is not a dict of a parameter, for example `state["global"]`, is saved among the values, as `more`. Hooks and loaders
    of the optimizer are not called, and its state may consist only of tensors and plain values. Adapters read all other
    optimizers.
    """

    kind = "optimizer"

    def __init__(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(path)
        self.optimizer: torch.optim.Optimizer = optimizer
        self.settings = settings_of(optimizer)  # the settings of the script that began the run
        self._names: Names | None = None
        self._piece: Contents | None = None
        self._state: object = None
        self._params, self._dicts = list[Any](), list[dict[Any, Any]]()  # keys of the state; dicts of parameters
        self._with_dicts: list[bool] = []  # for each key, True if it is a parameter that has a dict
        self._groups: list[list[Tensor]] = []
        self._there, self._memories = Places(), Memories()
        self._others: list[tuple[str, dict[str, Any], Any]] = []  # values without an own entry, see `_is_entry`
        self._more: list[tuple[Json, Any]] = []  # entries of `state` that are not dicts of parameters, and their keys
        self._nameless: list[tuple[str, Tensor, Span | None]] = []  # parameters named by their position
        self._called: dict[int, str] = {}  # names of the parameters in the state, by id
        self._held: list[bool] = []  # for each nameless parameter, True if another entry contains it
        self._own: dict[str, StateEntry] = {}
        self._encoder: ObjectEncoder | None = None  # encodes objects, if the optimizer may have any

    def read(self, names: Names) -> Contents:
        if self._piece is None or names is not self._names or self.changed() or self._is_held(names) != self._held:
            self._piece = None  # as in ModuleNode, if reading fails midway, the next call must read again
            self._piece = self._read_tensors(names)
        collect = Collector(self._encoder, exact=True)
        values = self._values(collect)
        return Contents(self._piece.fixed, collect.entries, values, self._piece.facts)

    def _values(self, collect: Collector) -> dict[str, Any]:
        state = self.optimizer.state
        values: dict[str, Any] = {
            "groups": [
                {
                    k: encode(v, (*self.path, "param_groups", i, k), collect)
                    for k, v in group.items()
                    if k not in IN_TURN
                }
                for i, group in enumerate(self.optimizer.param_groups)
            ],
            "state": [
                [
                    name,
                    encode_key(key, self.path, collect),
                    encode(held[key], (*self.path, "state", name, part_of(key)), collect),
                ]
                for name, held, key in self._others
            ],
            "settings": self.settings,
        }
        if self._more:
            values["more"] = [
                [owner, encode(state[key], (*self.path, *_path_of_row(("more", _as_text(owner)))), collect)]
                for owner, key in self._more
            ]
        return values

    def changed(self) -> bool:
        """Return True if the optimizer's tensors were replaced or moved since they were read."""
        optimizer = self.optimizer
        state: MutableMapping[Any, Any] = optimizer.state
        if state is not self._state or len(state) != len(self._params):
            return True
        # Compare in insertion order, because a lookup by tensor runs Python code.
        dicts = compress(state.values(), self._with_dicts) if self._more else state.values()
        if not (all(map(is_, state, self._params)) and all(map(is_, dicts, self._dicts))):
            return True
        if len(self._groups) != len(optimizer.param_groups):
            return True
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            if len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                return True
        if self._there.differs() or self._memories.changed():
            return True
        # A key that was None may now have a tensor. Or a key may be gone while another key was added.
        return any(
            key not in values or (_is_entry(key, values[key]) and id(values[key]) not in self._called)
            for _, values, key in self._others
        )

    def _read_tensors(self, names: Names) -> Contents:
        self._names, self._state = names, self.optimizer.state
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self.settings = [
            *self.settings,
            *settings_of(self.optimizer)[len(self.settings) :],
        ]  # the user may have added a group since the last reading
        self._others, self._more, self._there, self._memories = [], [], Places(), Memories()
        self._params, self._dicts, self._with_dicts = list(self.optimizer.state), [], []
        dicts: dict[str, str] = {}  # by parameter: the type of its dict, if that is not a plain dict
        places: list[tuple[dict[str, Any], str, Tensor]] = []
        state: list[StateEntry] = []
        not_plain: list[tuple[Path, Tensor, Tensor]] = []  # tensors of the state, and their parameters
        called, shares = self.param_names(names), self._shares()
        self._called, with_state = called, list[str]()
        for param, values in self.optimizer.state.items():
            name = called.get(id(param)) if isinstance(param, Tensor) else None
            if name is None and isinstance(param, Tensor):
                raise StateError(f"{show(self.path)}: has state of a tensor that is in none of its groups")
            self._with_dicts.append(name is not None and isinstance(values, dict))
            if name is None or not isinstance(values, dict):
                owner = {"key": encode_key(param, self.path, Collector())} if name is None else {"param": name}
                self._more.append((owner, param))
                continue
            with_state.append(name)
            self._dicts.append(values)
            if type(values) is not dict:
                dicts[name] = _kind_of_dict(values, (*self.path, "state", name))
            for key, value in values.items():
                if _is_entry(key, value) and id(value) not in called:
                    path = (*self.path, "state", name, key)
                    state.append(StateEntry(show(path), value, True, _alike(value, param, names, key in shares), param))
                    places.append((values, key, value))
                    if type(value) is not Tensor or value.requires_grad or hasattr(value, "_is_buffer"):
                        not_plain.append((path, value, param))
                else:
                    self._others.append((name, values, key))
        bare = {id(p): p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in names}
        self._nameless = [(called[number], p, span_of(p)) for number, p in bare.items()]
        self._held = self._is_held(names)
        unnamed = (one for one, held in zip(self._nameless, self._held, strict=True) if not held)
        own = [StateEntry(show((*self.path, "params", place)), p, True) for place, p, _ in unnamed]
        (fixed, forms), (params_too, more) = take_all_apart(state), take_all_apart(own)
        self._own = {entry.name: entry for entry in params_too}
        self._there = Places(places, self._dicts)
        self._memories = Memories([*(tensor for _, _, tensor in places), *(p for _, p, _ in self._nameless)])
        params = [[called[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        facts = {"params": params, "with_state": with_state}
        # Names of plain state tensors that are shards of a DTensor parameter, see _alike().
        plain = [one.name for one in fixed if is_dtensor(one.alike) and not is_dtensor(one.owner.tensor)]
        facts |= {PLAIN: plain} if plain else {}
        kinds = {show(path): kind for path, one, param in not_plain if (kind := _kind_of(one, param, path))}
        facts |= {KINDS: kinds} if kinds else {}
        facts |= {DICTS: dicts} if dicts else {}
        return Contents([*fixed, *params_too], facts=facts | facts_of([*forms, *more]))

    def _shares(self) -> set[str]:
        """Return the keys whose plain tensors are this rank's shards, as TransformerEngine stores moments of DTensors.

        A step count of shape [1] looks like a shard of one element, but not next to every parameter.
        """
        shards, others = set[str](), {"step"}
        for param, values in self.optimizer.state.items():
            for key, value in values.items() if is_dtensor(param) and isinstance(values, dict) else ():
                if isinstance(value, Tensor) and not is_dtensor(value) and not is_wrapped(value):
                    (shards if is_plain_share(value, param) else others).add(key)
        return shards - others

    def _is_held(self, names: Names) -> list[bool]:
        return [names.hold(span) for _, _, span in self._nameless]

    def own_name(self, param: Tensor) -> str:
        """Return the name of a parameter that is saved with the optimizer, or "" if it is saved elsewhere."""
        return next((entry.owner.name for entry in self._own.values() if entry.owner.tensor is param), "")

    def param_names(self, names: Names) -> dict[int, str]:
        """Return the parameters' names by id. A parameter without a name in the state is named by its position."""
        return {
            id(p): names[id(p)].name if id(p) in names else f"{i}.{j}"
            for i, group in enumerate(self.optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }

    def _decoder(self, values: Json) -> ObjectDecoder | None:
        """Return the decoder of objects, or None if the optimizer has no objects."""
        return None

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        called = self.param_names(placement.names)
        groups_here = [[called[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        if not is_optimizer(saved):
            raise CorruptError(f"{show(self.path)}: the stored data is not the state of an optimizer")
        params = {called[id(p)]: (p, g) for g in self.optimizer.param_groups for p in g["params"]}
        start = show((*self.path, "params")) + "."
        names = placement.compare(self.path, [name for name in saved.names if name.startswith(start)], self._own)
        for name in matching(names, self._own, saved.facts, saved.names, placement):
            placement.fill(name, self._own[name])
        if kind := self._other_kind(saved):
            here = "was" if placement.strict else "starts without state, because it was"
            placement.problem(f"{show(self.path)} {here} saved by an optimizer of another kind: {kind}")
            return
        self._compare_groups(groups_here, saved.facts["params"], placement)
        dicts: dict[str, str] = saved.facts.get(DICTS, {})
        fresh: dict[str, dict[str, Any]] = {
            name: _DICTS.get(dicts.get(name, ""), dict)() for name in saved.facts["with_state"] if name in params
        }
        self._drop_reshaped(fresh, params, placement)
        self._place_state(fresh, params, saved, placement)
        objects = self._decoder(saved.values)
        others = self._other_state(fresh, saved, placement, objects)
        more = self._more_state(params, saved, placement, objects)
        groups = self._groups_of(saved, placement, objects)

        def finish() -> None:
            for name, key, value in others:
                fresh[name][key] = value()
            state: dict[Any, Any] = {params[name][0]: values for name, values in fresh.items()}
            for key, value in more:
                state[key] = write_back(self.optimizer.state.get(key), value())
            self._put(state)
            groups()

        placement.finish(self.path, finish)
        self._prepare_loader(saved, placement, objects)

    def _prepare_loader(self, saved: SavedNode, placement: Placement, objects: ObjectDecoder | None) -> None:
        """Prepare a call of the optimizer's own loader. Only subclasses that call this loader override this method."""

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        values = saved.values
        if self._others or self._more or not is_optimizer(saved) or self._other_kind(saved):
            return False
        if values["state"] or values.get("more") or values.get("extra"):
            return False
        placement.finish(self.path, self._groups_of(saved, placement, self._decoder(values)))
        return True

    def _put(self, state: dict[Any, Any]) -> None:
        """Replace the optimizer's state by these entries. If a parameter has a plain dict, keep the dict object."""
        live = self.optimizer.state
        for param, values in state.items():
            have = live.get(param)
            if type(have) is type(values) is dict and have is not values:
                have.clear()
                have.update(values)
                state[param] = have
        live.clear()
        live.update(state)

    def _other_kind(self, saved: SavedNode) -> str:
        """Return the difference of the saved kind of optimizer, or "". Kinds differ if each has settings that the other
        lacks. Other versions of torch, schedulers and scripts only add settings."""
        theirs = [key for group in saved.values["groups"] for key in group if key not in SCHEDULED]
        own = [key for key in getattr(self.optimizer, "defaults", {}) if key not in theirs]
        here = {key for group in self.optimizer.param_groups for key in group}
        odd = [key for key in dict.fromkeys(theirs) if key not in here]
        return f"the checkpoint has the settings {_first(odd)}, this optimizer has {_first(own)}" if own and odd else ""

    def _groups_of(self, saved: SavedNode, placement: Placement, objects: ObjectDecoder | None) -> Callable[[], None]:
        """Return the function that restores the settings of the groups."""
        settings = zip(self.optimizer.param_groups, saved.values["groups"], strict=False)
        groups = [placement.build(self._usable(live, group, placement), objects=objects) for live, group in settings]
        then = saved.values.get("settings") or self.settings  # older versions of everystep did not save them

        def finish() -> None:
            own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            for group, build in zip(self.optimizer.param_groups, groups, strict=False):
                _update_group(group, build(), own)
            if text := overridden(then, self.settings, settings_of(self.optimizer)):
                placement.overridden.append(f"{show(self.path)}: {text}")
            self.settings = then

        return finish

    def _place_state(
        self,
        fresh: dict[str, dict[str, Any]],
        params: Mapping[str, tuple[Tensor, dict[str, Any]]],
        saved: SavedNode,
        placement: Placement,
    ) -> None:
        """Match the tensors of the state. If a tensor cannot be restored, its parameter starts without state."""
        prefix = show((*self.path, "state")) + "."
        nested = set(references(saved.values["state"]))  # inside lists and dicts, so not values of their own
        forms = forms_of(saved.facts)
        wholes = {name: form.name for form in forms.values() for name in form.names}
        split, odd, plain = splitter(fresh), set[str](), set(saved.facts.get(PLAIN, ()))
        shares, kinds, made = self._shares(), saved.facts.get(KINDS, {}), dict[int, Tensor]()
        for full in dict.fromkeys(wholes.get(full, full) for full in saved.names if full not in nested):
            found = split(full.removeprefix(prefix)) if full.startswith(prefix) else None
            if found is not None:
                name, key = found
                form, kind, param = forms.get(full), kinds.get(full), params[name][0]
                target = self._target(full, key, *params[name], placement, form, full in plain, shares, kind)
                if target is not None and kind is not None and not _is_of_kind(target, kind, param):
                    target = made.setdefault(id(target), _as_kind(target, kind, param))
                fresh[name][key] = target
                odd |= {name} if target is None else set()
        for name in odd:
            del fresh[name]

    def _other_state(
        self, fresh: dict[str, dict[Any, Any]], saved: SavedNode, placement: Placement, objects: ObjectDecoder | None
    ) -> list[tuple[str, Any, Callable[[], Any]]]:
        """Build the values that are not tensors. If a value is ambiguous, its parameter starts without state."""
        rows = {(name, _as_text(key)): (key, value) for name, key, value in saved.values["state"] if name in fresh}
        unclear = {name for name, _ in self._differing(rows, placement)}
        found = []
        for (name, _), (key, value) in rows.items():
            if name not in unclear:
                try:
                    build = placement.build(value, guarded=True, objects=objects)
                    found.append((name, _key(key, objects), build))
                except MismatchError as error:
                    placement.problem(str(error))
                    unclear.add(name)
        for name in unclear:
            del fresh[name]
        return [row for row in found if row[0] in fresh]

    def _more_state(
        self,
        params: Mapping[str, tuple[Tensor, Any]],
        saved: SavedNode,
        placement: Placement,
        objects: ObjectDecoder | None,
    ) -> list[tuple[Any, Callable[[], Any]]]:
        """Build the entries of the state that are not dicts of parameters."""
        rows = {("more", _as_text(owner)): (owner, value) for owner, value in saved.values.get("more", ())}
        rows = {k: row for k, row in rows.items() if "key" in row[0] or row[0]["param"] in params}
        unclear = self._differing(rows, placement)
        found: list[tuple[Any, Callable[[], Any]]] = []
        for one, (owner, value) in rows.items():
            if one not in unclear:
                build = placement.build(value, guarded=True, objects=objects)
                key = _key(owner["key"], objects) if "key" in owner else params[owner["param"]][0]
                found.append((key, build))
        return found

    def _differing(self, rows: Collection[Row], placement: Placement) -> set[Row]:
        """If the number of ranks changed, record a problem for each row that ranks saved differently. Return those."""
        if not rows or not placement.resized:
            return set()
        ranks_by_value: dict[Row, dict[str, list[int]]] = {}
        try:
            for rank, values in placement.saved.values_of(self.path):
                theirs: dict[Row, Json] = {(name, _as_text(key)): value for name, key, value in values["state"]}
                theirs |= {("more", _as_text(owner)): value for owner, value in values.get("more", ())}
                theirs |= {EXTRA: values["extra"]} if "extra" in values else {}
                for row in theirs.keys() & rows:
                    ranks_by_value.setdefault(row, {}).setdefault(_as_text(theirs[row]), []).append(rank)
        except ODD as error:
            raise CorruptError(f"{show(self.path)}: a rank's stored data is not the state of an optimizer") from error
        differing = {row: by_value for row, by_value in ranks_by_value.items() if len(by_value) > 1}
        for row, by_value in differing.items():
            ranks = sorted(rank for each in by_value.values() for rank in each)
            placement.problem(placement.unclear(show((*self.path, *_path_of_row(row))), ranks))
        return set(differing)

    def _usable(self, live: MutableMapping[str, Any], saved: dict[str, Json], placement: Placement) -> dict[str, Json]:
        """Return the saved settings of a group that have the same kind as the live ones, or are None on one side."""
        found = {}
        for key, value in saved.items():
            if key in IN_TURN:
                continue
            here = encode(live.get(key), (*self.path, "param_groups", 0, "live"), Collector(self._new_encoder()))
            kinds = {kind_of(value), kind_of(here)} - {"None"}
            if len(kinds) < 2 or kinds == {"a number", "a tensor"}:
                found[key] = value
            else:
                placement.problem(f"{show(self.path)}: {key} is {kind_of(value)} in the checkpoint, but not here")
        return found

    def _new_encoder(self) -> ObjectEncoder | None:
        return None

    def _drop_reshaped(
        self, fresh: dict[str, Any], params: Mapping[str, tuple[Tensor, Any]], placement: Placement
    ) -> None:
        """Drop the state of parameters whose shape has changed, because the next step would fail with it."""
        if placement.strict:
            return
        shapes = {name: tensor.spec.whole or tensor.spec.shape for (name, _), tensor in placement.saved.tensors.items()}
        shapes |= placement.shapes
        for name in list(fresh):
            shape = shapes.get(placement.saved.canonical(name, placement.seat.rank))
            if shape is not None and tuple(shape) != tuple(params[name][0].shape):
                del fresh[name]
                placement.problem(
                    f"{show((*self.path, 'state', name))}: starts without state, because its parameter's shape differs"
                )

    def _compare_groups(self, here: list[list[str]], saved: list[list[str]], placement: Placement) -> None:
        """Compare the parameter groups. In a multi-rank job, a rank's groups may have only some of the parameters."""
        part = len(here) == len(saved) and all(set(a) <= set(b) for a, b in zip(here, saved, strict=True))
        if here == saved or (part and not placement.alone):
            return
        have, want = {n for g in here for n in g}, {n for g in saved for n in g}
        if placement.strict:
            odd = sorted(have ^ want if placement.alone else have - want)
            difference = f"not in both: {_first(odd)}" if odd else "other order"
            text = (
                f"the parameter groups differ ({count_of(len(here), 'group')} here, {len(saved)} saved; {difference})"
            )
        else:
            new = sorted(have - want)
            start = f"{len(new)} without state ({_first(new)})" if new else "the groups differ"
            whose = (
                "its settings"
                if len(here) <= len(saved)
                else f"the settings of its first {count_of(len(saved), 'group')}"
            )
            kept = count_of(len(have & want), "parameter")
            text = f"restored the state of {kept}, {start}; {whose} are the checkpoint's"
        placement.problem(f"{show(self.path)}: {text}")

    def _target(
        self,
        full: str,
        key: str,
        param: Tensor,
        group: dict[str, Any],
        placement: Placement,
        form: WrapperForm | None,
        plain: bool,
        shares: set[str],
        kind: dict[str, Json] | None,
    ) -> Tensor | None:
        """Return the tensor to fill: the live one if it fits, else a new one on the device that torch would choose.
        Return None, and record a problem, if the saved tensor cannot be restored.

        `form`: form of the saved wrapper, None for a plain tensor. `plain`: True if the saved tensor is a plain shard
        of a DTensor parameter. `shares`: keys of plain shards here. `kind`: the saved kind, None for a plain tensor.
        """
        live = self.optimizer.state[param].get(key) if param in self.optimizer.state else None
        if kind is not None and isinstance(live, Tensor) and not _is_of_kind(live, kind, param):
            live = None
        beside = _beside(param, placement.names)

        def device_of(name: str) -> torch.device:
            if key == "step" and not (group.get("capturable") or group.get("fused")):
                return torch.device("cpu")
            offloaded = not placement.spec(name).accelerator and placement.saved.accelerated
            return torch.device("cpu") if offloaded else local(param).device

        if form is not None or (isinstance(live, Tensor) and is_wrapped(live)):
            return placement.moment(form, full, live, beside, device_of)
        if isinstance(live, Tensor):
            entry = StateEntry(full, live, True, _alike(live, param, placement.names, key in shares))
            if placement.fits(full, entry):
                placement.fill(full, entry)
                if not is_dtensor(live):
                    placement.filled(full, entry)
                return live
        if (held := placement.names.get(id(param))) is not None:
            rank, canonical = placement.seat.rank, placement.saved.canonical
            if canonical(full, rank) == canonical(held.name, rank):
                return param.detach()  # the saved tensor was the weight itself, as SAM leaves it
        if placement.key_to_create(full, beside, guarded=True, plain=plain) is None:
            return None  # the problem is recorded
        like = None if self._lay_otherwise(full, param, placement) else local(param)
        return placement.create(full, device_of(full), beside, guarded=True, plain=plain, like=like)

    def _lay_otherwise(self, full: str, param: Tensor, placement: Placement) -> bool:
        """Return True if a tensor was saved in another memory layout than its parameter, which has kept its layout."""
        held = placement.names.get(id(param))
        own = placement.saved_order(self.own_name(param) if held is None else held.name)
        return own == (order_of(local(param)) or []) and placement.saved_order(full) not in (own, None)


def _is_entry(key: object, value: object) -> bool:
    """Return True for a tensor that has an entry of its own. An expanded tensor is saved as a value instead."""
    return type(key) is str and isinstance(value, Tensor) and not dims_of_expansion(value)


def _kind_of(value: Tensor, param: Tensor, path: Path) -> dict[str, Json]:
    """Return the kind of a tensor for `_as_kind`, or {} for a plain one. Raise StateError if it would be lost."""
    if is_wrapped(value):
        return {}
    if type(value) is type(param) and type(value) not in PLAIN_TENSORS and not is_dtensor(value):
        return {**plain_kind(value), "like": True}
    return kind_of_tensor(value, path)


def _is_of_kind(value: Tensor, kind: dict[str, Json], param: Tensor) -> bool:
    like = {"like": True} if type(value) is type(param) and type(value) not in PLAIN_TENSORS else {}
    return bool(kind == {**plain_kind(value), **(like if "like" in kind else {})})


def _as_kind(value: Tensor, kind: dict[str, Json], param: Tensor) -> Tensor:
    """Return a tensor of this kind with the same memory. The kind `like` means the class of its parameter."""
    return of_kind(value.as_subclass(type(param)) if kind.get("like") else value, kind)


_DICTS: dict[str, Callable[[], dict[Any, Any]]] = {
    "OrderedDict": OrderedDict,
    **{f"defaultdict({make.__name__})": partial(defaultdict, make) for make in (dict, list, set, int, float)},
}


def _kind_of_dict(values: dict[Any, Any], path: Path) -> str:
    """Return the entry of `_DICTS` that creates a dict like this one. Raise StateError if there is none."""
    kind, make = type(values), getattr(values, "default_factory", None)
    name = f"defaultdict({getattr(make, '__name__', make)})" if kind is defaultdict else kind.__qualname__
    if name in _DICTS and type(_DICTS[name]()) is kind and getattr(_DICTS[name](), "default_factory", None) is make:
        return name
    raise StateError(
        f"{show(path)}: a {kind.__module__}.{name} would come back as a plain dict: keep a dict, an OrderedDict, or a "
        "defaultdict of dict, list, set, int or float there"
    )


Row = tuple[str, str]  # identifies a plain value of the state
EXTRA: Row = ("extra", "")  # the entries that an optimizer's own state_dict() adds


def _as_text(value: Json) -> str:
    return json.dumps(value, sort_keys=True)


def _key(data: Json, objects: ObjectDecoder | None) -> Any:
    """Decode a key of the state."""
    return decode(data, decode_constant) if objects is None else objects.key(data)


def _path_of_row(row: Row) -> Path:
    kind, text = row
    if kind == "more":
        (name,) = json.loads(text).values()
        return (kind, name if type(name) is str else part_of(decode(name, as_plain)))
    return (kind,) if row == EXTRA else ("state", kind, part_of(decode(json.loads(text), as_plain)))


def _first(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")


def inside(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]


def all_of_one_state(optimizer: Any) -> list[Any]:
    """Return the optimizer and the optimizers inside it that have the same state object."""
    found = [optimizer]
    for outer in found:  # the list grows during the loop
        same = (one for one in inside(outer) if getattr(one, "state", None) is optimizer.state)
        found += [one for one in same if not any(one is known for known in found)]
    return found


def forgotten(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the inner optimizers that are missing from the optimizer's `state_dict()`, with the names that hold them.

    SAM has an inner optimizer in an attribute. Other optimizers have several in a list or a dict.
    """
    if isinstance(optimizer, Joint):
        return  # its state consists of the states of its inner optimizers
    for outer in all_of_one_state(optimizer):
        for name, inner in _held_optimizers(vars(outer)):
            if inner.state is not optimizer.state:
                yield name, inner


def _held_optimizers(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the optimizers in attributes, and in lists, tuples and dicts in them."""
    for key, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
        part = key if type(key) in (str, int) else type(key)  # printing a tensor would wait for its device
        here = f"{name}[{part!r}]" if depth else f".{key}"
        if isinstance(one, torch.optim.Optimizer):
            yield here, one
        elif isinstance(one, dict | list | tuple) and depth < DEPTH:
            yield from _held_optimizers(one, here, depth + 1)


def _beside(param: Tensor, names: Names) -> Replicas | Tensor | None:
    """Return the ranks or DTensor of a parameter. Its optimizer state is distributed in the same way."""
    if is_dtensor(param):
        return param
    entry = names.get(id(param))
    return None if entry is None or isinstance(entry.alike, Division) else entry.alike


def _alike(value: Tensor, param: Tensor, names: Names, share: bool) -> Replicas | Tensor | None:
    """Return the result of `_beside`. A plain tensor of a DTensor parameter is a shard only if `share` is true."""
    beside = _beside(param, names)
    if not is_dtensor(beside) or share or is_dtensor(value) or is_wrapped(value):
        return beside
    return Replicas(members(beside)) if value.numel() == 1 else None  # a step count, which is equal on all ranks


@torch.no_grad()
def _update_group(group: MutableMapping[str, Any], saved: dict[str, Any], own: Container[int]) -> None:
    """Restore the settings of a group. `own`: ids of the optimizer's parameters, to which a setting may refer."""
    for key, value in saved.items():
        live = group.get(key)
        if live is value:
            continue
        if id(value) in own:
            group[key] = value
        elif (
            isinstance(live, Tensor)
            and isinstance(value, Tensor)
            and (live.shape, live.dtype) == (value.shape, value.dtype)
            and plain_kind(value) in ({}, plain_kind(live))
        ):
            live.copy_(value)  # in place, because a captured graph reads this tensor object
        elif isinstance(live, torch.device) and isinstance(value, torch.device):
            continue  # keep this rank's device, which may differ from the saved one
        else:
            group[key] = value


# -- several optimizers as one --


class Joint(torch.optim.Optimizer):
    """Presents optimizers with equal groups of different parameters as a single optimizer.

    It is a view, so reads and writes go to the parts. It steps when all parts have stepped. `parts`: in order.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Join optimizers. Raise ValueError if their numbers of groups differ."""
        if len({len(one.param_groups) for one in parts}) != 1:
            raise ValueError("the optimizers have different numbers of groups")
        self.parts = tuple(parts)
        self.defaults = getattr(parts[0], "defaults", {})
        self.state = _States(self.parts)  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        return [_Group(alike) for alike in zip(*(one.param_groups for one in self.parts), strict=True)]


class _Group(MutableMapping[str, Any]):
    """The groups with the same index in all parts."""

    def __init__(self, alike: Sequence[dict[str, Any]]) -> None:
        self._alike = alike

    def __getitem__(self, key: str) -> Any:
        if key in IN_TURN:
            return [one for group in self._alike for one in group[key]]
        return self._alike[0][key]

    def __setitem__(self, key: str, value: Any) -> None:
        for group in self._alike:
            group[key] = value

    def __delitem__(self, key: str) -> None:
        for group in self._alike:
            del group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._alike[0])

    def __len__(self) -> int:
        return len(self._alike[0])


class _States(MutableMapping[Tensor, dict[str, Any]]):
    """The state of all parameters. Look up only existing parameters, or torch's defaultdict creates an entry."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        for part in self._parts:
            if param in part.state:
                values: dict[str, Any] = part.state[param]
                return values
        raise KeyError(param)

    def __setitem__(self, param: Tensor, values: dict[str, Any]) -> None:
        home = next(part for part in self._parts if any(p is param for g in part.param_groups for p in g["params"]))
        home.state[param] = values

    def __delitem__(self, param: Tensor) -> None:
        for part in self._parts:
            part.state.pop(param, None)

    def __iter__(self) -> Iterator[Tensor]:
        return chain.from_iterable(part.state for part in self._parts)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def values(self) -> Any:
        """Return the values of all parts in order, without lookups."""
        return chain.from_iterable(part.state.values() for part in self._parts)

    def clear(self) -> None:
        for part in self._parts:
            part.state.clear()
