"""How a module is read, and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ckpt.errors import CorruptError, StateError
from ckpt.format.saved_nodes import SavedNode
from ckpt.format.values import Json, Path, encode, pairs, show, unpaired
from ckpt.state.adapters import Collector, Contents, Memories, Places
from ckpt.state.module_state_dict import (
    EXTRA,
    TWO_TENSORS,
    OwnState,
    hand_back,
    hand_resized,
    is_one,
    listen,
    load_into,
)
from ckpt.state.names import Names
from ckpt.state.placement import Placement, references
from ckpt.state.rewrap import facts_of, forms_of, matching
from ckpt.state.sharding import Replicas, StateEntry, is_dtensor, named_modules, replicated_by_ddp, reshard, unwrap
from ckpt.state.tensors import saved_device
from ckpt.state.wrappers import WrapperForm, take_apart


class ModuleNode:
    """An nn.Module: parameters and persistent buffers, in place; and what else it says of itself, see
    `ckpt.state.module_state_dict`."""

    def __init__(self, path: Path, module: nn.Module) -> None:
        self.path = path
        self.whole, self.module = module, unwrap(module)  # `module` identifies it, with or without wrappers
        self._replicas: dict[int, Replicas] = {}
        self._there, self._memories = Places(), Memories()
        self._piece: Contents | None = None
        self._words, self._heard = OwnState(), list[nn.Module]()
        self._forms: dict[str, WrapperForm] = {}  # of what is made of several tensors
        self._order: list[str] = []  # names, and prefixes of modules that say more

    @property
    def kind(self) -> str:
        return "custom module" if self._words.spoken else "module"

    def read(self, names: Names) -> Contents:
        if self._piece is None:
            reshard(self.whole)
        if self._piece is None or self.changed():
            self._piece = self._read()
        return self._and_words(self._piece) if self._words.spoken else self._piece

    def changed(self) -> bool:
        """Whether the module has other tensors than were read, or has them elsewhere; sharded, if it gathers them."""
        if not self._differs():
            return False
        reshard(self.whole)
        return self._differs()

    def _differs(self) -> bool:
        return self._there.differs() or self._memories.changed()

    def _read(self) -> Contents:
        self._piece = None  # should reading fail half-way, what is noted below must not pass for unchanged
        owners: list[dict[str, Any]] = []
        places: list[tuple[dict[str, Any], str, Tensor]] = []
        children: list[tuple[dict[str, Any], str, nn.Module | None]] = []  # and what is no tensor yet
        self._there, self._memories = Places(), Memories()
        modules = list(named_modules(self.whole))
        if len(modules) != len(self._heard) or any(
            one.module is not b for one, b in zip(modules, self._heard, strict=True)
        ):
            self._words, self._heard = listen(self.whole, self.path), [one.module for one in modules]
        self._replicas = replicated_by_ddp(self.whole)
        live: dict[str, tuple[list[StateEntry], WrapperForm | None]] = {}
        order: dict[str, None] = {}
        for prefix, _, module in modules:
            members: tuple[dict[str, Any], ...] = (module._modules, module._parameters, module._buffers)
            owners += members
            children += [(module._modules, key, child) for key, child in module._modules.items()]
            if self._words.speaks(inside := f"{prefix}." if prefix else ""):
                if inside in self._words.speakers:
                    order[inside] = None
                continue
            for owner in members[1:]:
                for key, tensor in owner.items():
                    here = f"{prefix}.{key}" if prefix else key
                    if key in module._non_persistent_buffers_set or here in self._words.left_out:
                        continue
                    if tensor is None:  # it may become one
                        children.append((owner, key, None))
                        continue
                    name = self._words.names.get(here, here)
                    if name in live and not is_one(live[name][0][0].owner.tensor, tensor):
                        raise StateError(f"{self._name(name)}: {TWO_TENSORS}")
                    live[name] = take_apart(self._entry(name, tensor))
                    order[name] = None
                    places.append((owner, key, tensor))
            if inside in self._words.extras:
                order[inside] = None
        self._order = list(order)
        self._there, self._memories = Places([*children, *places], owners), Memories([t for _, _, t in places])
        self._forms = {name: form for name, (_, form) in live.items() if form is not None}
        return Contents([e for entries, _ in live.values() for e in entries], facts=facts_of(self._forms.values()))

    def _entry(self, name: str, tensor: Tensor) -> StateEntry:
        replicas = self._replicas.get(id(tensor))
        return StateEntry(self._name(name), tensor, isinstance(tensor, nn.Parameter), replicas)

    def _name(self, key: str) -> str:
        return show((*self.path, key))

    def _and_words(self, piece: Contents) -> Contents:
        """All that it consists of by key, as its state_dict() would say it."""
        collect, exact = Collector(), Collector(exact=True)  # set_extra_state() gets its values as they were
        state: dict[str, Json] = {}
        for key in self._order:
            if key in self._words.extras:
                value = self._words.extras[key].get_extra_state()
                state[key + EXTRA] = encode(value, (*self.path, key + EXTRA), exact)
            elif key in self._words.speakers:
                for inner, value in self._words.speakers[key].state_dict(keep_vars=True).items():
                    if key + inner in state:
                        raise StateError(f"{self._name(key + inner)}: {TWO_TENSORS}")
                    state[key + inner] = encode(value, (*self.path, key + inner), collect)
            else:
                form = self._forms.get(key)
                state[key] = {"$": "tensor", "name": self._name(key)} if form is None else form.to_json()
        replicas = replicated_by_ddp(self.whole)  # modules with a state_dict() of their own may exchange tensors
        loose = []
        for e in (*collect.entries, *exact.entries):
            of, whole = e.part_of, e.owner.tensor
            mine = replicas.get(id(whole))
            guarded = isinstance(whole, nn.Parameter)
            of = of and StateEntry(of.name, whole, guarded, mine)
            loose.append(StateEntry(e.name, e.tensor, guarded, mine or e.alike, part_of=of, around=e.around))
        return Contents(piece.fixed, loose, pairs(state), piece.facts)

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        piece = self.read(Names())
        lying = {entry.name: entry for entry in piece.fixed}
        said = {entry.name: entry for entry in piece.loose}
        state = self._saved_state(saved)
        free = set(references([value for key, value in state.items() if key.endswith(EXTRA)]))  # may differ each time
        own = {name: entry for name, entry in (lying | said).items() if not self._in_extra(name)}
        resized = self._resized(saved, own, free, placement)
        others = [name for name in saved.names if name not in free and name not in resized]
        names = placement.compare(self.path, others, {name: e for name, e in own.items() if name not in resized})
        for name in matching(names, own, saved.facts, saved.names, placement):
            if name in lying:
                placement.fill(name, lying[name])
            else:
                placement.watch(name, said[name])
        self._prepare_words(state, said, placement)
        self._hand_back(placement, resized)

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        if self._words.spoken:
            return False
        self._hand_back(placement, {})
        return True

    def _hand_back(self, placement: Placement, resized: Mapping[str, tuple[str, Tensor]]) -> None:
        for prefix, module in self._words.loaders.items():
            mine = {self._key(n).removeprefix(prefix): t for n, (p, t) in resized.items() if p == prefix}
            if mine:
                path = (*self.path, prefix.rstrip(".")) if prefix else self.path
                placement.finish(self.path, partial(hand_resized, module, path, mine, placement.strict))
            else:
                placement.finish(self.path, partial(hand_back, module))

    def _resized(
        self, saved: SavedNode, own: Mapping[str, StateEntry], free: set[str], placement: Placement
    ) -> dict[str, tuple[str, Tensor]]:
        """Return what the loaders of modules decide about: saved tensors of other shapes than those here.

        Also those of which there is None here. By name: the prefix of the loader, and a new tensor that will be filled.
        """
        found: dict[str, tuple[str, Tensor]] = {}
        if not self._words.loaders:
            return found
        made_of_several = {part for form in forms_of(saved.facts).values() for part in form.names}
        empty = {
            f"{name}.{key}" if name else key
            for name, _, module in named_modules(self.whole)
            for members in (module._parameters, module._buffers)
            for key, tensor in members.items()
            if tensor is None
        }
        for name in saved.names:
            key, entry = self._key(name), own.get(name)
            prefix = max((p for p in self._words.loaders if key.startswith(p)), key=len, default=None)
            if prefix is None or name in free or name in made_of_several or self._words.speaks(key):
                continue
            if entry is None:
                if key in empty or "." not in key.removeprefix(prefix):
                    found[name] = prefix, placement.create(name, saved_device(placement.spec(name)))
            elif (
                isinstance(entry.alike, Replicas | None)
                and entry.part_of is None
                and not is_dtensor(entry.tensor)
                and placement.spec(name).shape != tuple(entry.tensor.shape)
            ):
                made = placement.create(name, entry.tensor.device, entry.alike, guarded=entry.guarded)
                found[name] = prefix, made
        return found

    def _key(self, name: str) -> str:
        """Return the name within the module."""
        return name[len(self._name("")) :]

    def _in_extra(self, name: str) -> bool:
        return any(name.startswith(self._name(prefix + EXTRA)) for prefix in self._words.extras)

    def _saved_state(self, saved: SavedNode) -> dict[str, Json]:
        """What was saved of it by key. CorruptError if it is not that."""
        if saved.kind == "module":
            return {self._key(name): {"$": "tensor", "name": name} for name in saved.names}
        found = unpaired(saved.values)
        if found is None:
            raise CorruptError(f"{show(self.path)}: what is stored of it is not the state of a module")
        return found

    def _prepare_words(self, state: dict[str, Json], said: Mapping[str, StateEntry], placement: Placement) -> None:
        claimed = set()
        for prefix, module in self._words.extras.items():
            key = prefix + EXTRA
            claimed.add(key)
            if key in state:
                placement.finish(self.path, partial(_set_extra, module, placement.build(state[key])))
            else:
                placement.problem(f"{self._name(key)} is not in the checkpoint")
        for prefix, module in self._words.speakers.items():
            mine = {key: value for key, value in state.items() if key.startswith(prefix)}
            claimed |= mine.keys()
            build = placement.build(pairs({k.removeprefix(prefix): v for k, v in mine.items()}), like=said)
            placement.finish(self.path, partial(_load, module, build, placement.strict))
        for key, value in state.items():
            if key not in claimed and not (type(value) is dict and value.get("$") in ("tensor", "wrapper")):
                placement.problem(f"{self._name(key)} is in the checkpoint, and not in {show(self.path)}")


def _set_extra(module: nn.Module, build: Callable[[], Any]) -> None:
    module.set_extra_state(build())


def _load(module: nn.Module, build: Callable[[], Any], strict: bool) -> None:
    load_into(module, build(), strict=strict)
