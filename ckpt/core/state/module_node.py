"""How a module is read, and put back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ckpt.core.format.saved_nodes import SavedNode
from ckpt.core.format.values import Json, Path, decode, encode, pairs, show, unpaired
from ckpt.core.state.adapters import Collector, Contents, Memories, Places
from ckpt.core.state.module_state_dict import (
    EXTRA,
    GATHERS,
    REARRANGES,
    TWO_TENSORS,
    OwnState,
    hand_back,
    hand_resized,
    is_one,
    listen,
    load_into,
)
from ckpt.core.state.module_trial import Untried, accepts, as_its_own, without_memory
from ckpt.core.state.names import Names
from ckpt.core.state.placement import Placement, references
from ckpt.core.state.rewrap import facts_of, forms_of, matching
from ckpt.core.state.sharding import Replicas, StateEntry, is_dtensor, named_modules, replicated_by_ddp, reshard, unwrap
from ckpt.core.state.tensors import saved_device
from ckpt.core.state.wrappers import WrapperForm, take_apart
from ckpt.errors import CheckpointError, CorruptError, StateError
from ckpt.events import log


class ModuleNode:
    """An nn.Module: parameters and persistent buffers, in place; and what else it says of itself, see
    `ckpt.core.state.module_state_dict`."""

    def __init__(self, path: Path, module: nn.Module) -> None:
        self.path = path
        self.whole, self.module = module, unwrap(module)  # `module` identifies it, with or without wrappers
        self._replicas: dict[int, Replicas] = {}
        self._there, self._memories = Places(), Memories()
        self._piece: Contents | None = None
        self._words, self._heard = OwnState(), list[nn.Module]()
        self._forms: dict[str, WrapperForm] = {}  # of what is made of several tensors
        self._untried: list[str] = []  # why loaders could not be asked whether they accept the checkpoint
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
        problems, self._untried = len(placement.problems), []
        free = set(references([value for key, value in state.items() if key.endswith(EXTRA)]))  # may differ each time
        own = {name: entry for name, entry in (lying | said).items() if not self._in_extra(name)}
        theirs = [name for name in saved.names if name not in free]
        differing = self._differing(theirs, own, placement)
        resized = self._resized(saved, theirs, own, placement)
        whole = self._loaders_of_all(saved, state, own, differing - resized.keys(), placement)
        given = {name for name in (*own, *theirs) if whole and self._key(name).startswith(tuple(whole))}
        resized = {name: prefix for name, prefix in resized.items() if name not in given}
        omitted = resized.keys() | (given & differing)
        live = {name: entry for name, entry in own.items() if name not in omitted}
        names = placement.compare(self.path, [name for name in theirs if name not in omitted], live)
        for name in matching(names, own, saved.facts, saved.names, placement):
            if name in lying and name not in given:
                placement.fill(name, lying[name])
            else:
                placement.watch(name, own[name])
        self._prepare_words(state, lying | said, whole, placement)
        self._hand_back(placement, self._created(resized, own, placement), whole)
        if whole:
            placement.finish(self.path, self._forget)
        if len(placement.problems) > problems:
            placement.problems += self._untried

    def _forget(self) -> None:
        """Read all of it again: its state_dict() may have other keys now."""
        self._piece, self._heard = None, []

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        if self._words.spoken:
            return False
        self._hand_back(placement, {}, {})
        return True

    def _hand_back(
        self, placement: Placement, resized: Mapping[str, tuple[str, Tensor]], whole: Mapping[str, nn.Module]
    ) -> None:
        for prefix, module in self._words.loaders.items():
            if prefix in whole:
                continue
            mine = {self._key(n).removeprefix(prefix): t for n, (p, t) in resized.items() if p == prefix}
            if mine:
                path = (*self.path, prefix.rstrip(".")) if prefix else self.path
                placement.finish(self.path, partial(hand_resized, module, path, mine, placement.strict))
            else:
                placement.finish(self.path, partial(hand_back, module))

    def _resized(
        self, saved: SavedNode, theirs: Collection[str], own: Mapping[str, StateEntry], placement: Placement
    ) -> dict[str, str]:
        """Return what the loaders of modules decide about: saved tensors of other shapes than those here.

        Also those of which there is None here. By name: the prefix of the loader.
        """
        found: dict[str, str] = {}
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
        for name in theirs:
            key, entry = self._key(name), own.get(name)
            prefix = max((p for p in self._words.loaders if key.startswith(p)), key=len, default=None)
            if prefix is None or name in made_of_several or self._words.speaks(key):
                continue
            if entry is None:
                if key in empty or "." not in key.removeprefix(prefix):
                    found[name] = prefix
            elif _has_other_shape(name, entry, placement):
                found[name] = prefix
        return found

    def _created(
        self, resized: Mapping[str, str], own: Mapping[str, StateEntry], placement: Placement
    ) -> dict[str, tuple[str, Tensor]]:
        """Return what `_resized` found, with new tensors that will be filled."""
        found: dict[str, tuple[str, Tensor]] = {}
        for name, prefix in resized.items():
            if (entry := own.get(name)) is None:
                made = placement.create(name, saved_device(placement.spec(name)))
            else:
                assert isinstance(entry.alike, Replicas | None)
                made = placement.create(name, entry.tensor.device, entry.alike, guarded=entry.guarded)
            found[name] = prefix, made
        return found

    def _differing(self, theirs: Collection[str], own: Mapping[str, StateEntry], placement: Placement) -> set[str]:
        """Return the names of tensors that are on one side only, or have another shape on the other one."""
        if not (self._words.loaders or self._words.speakers):
            return set()  # nobody would be asked about them
        shared = (name for name in theirs if name in own and _has_other_shape(name, own[name], placement))
        return {*(own.keys() ^ set(theirs)), *shared}

    def _loaders_of_all(
        self,
        saved: SavedNode,
        state: Mapping[str, Json],
        own: Mapping[str, StateEntry],
        differing: Collection[str],
        placement: Placement,
    ) -> dict[str, nn.Module]:
        """Return modules of which something differs, and whose own loaders accept all of their saved state.

        They get all of it. By prefix; none of them lies in another one.
        """
        words, found = self._words, dict[str, nn.Module]()
        keys = {self._key(name) for name in differing} | {key for key in state if self._is_unclaimed(key, state[key])}
        for prefix, module in (*words.speakers.items(), *words.loaders.items()):
            speaks = prefix in words.speakers
            if not any(key.startswith(prefix) for key in keys) or not (
                speaks or self._lies_plainly(prefix, saved, own)
            ):
                continue
            try:
                state_of_it = {
                    key.removeprefix(prefix): decode(value, partial(without_memory, placement.spec))
                    for key, value in state.items()
                    if key.startswith(prefix)
                }
            except CheckpointError:
                continue
            try:
                accepted = accepts(module, state_of_it, plain=not speaks)
            except Untried as error:
                path = (*self.path, prefix.rstrip(".")) if prefix else self.path
                self._untried.append(f"{show(path)}: {error}")
                continue
            if accepted:
                found = {p: inner for p, inner in found.items() if not p.startswith(prefix)} | {prefix: module}
                keys = {key for key in keys if not key.startswith(prefix)}
        return found

    def _lies_plainly(self, prefix: str, saved: SavedNode, own: Mapping[str, StateEntry]) -> bool:
        """Return True if what is saved of a module is what its loader takes: plain tensors, as its state_dict() has
        them."""
        rearranged = [
            p for (verdict, _), ps in self._words.notes.items() if verdict in (GATHERS, REARRANGES) for p in ps
        ]
        wrappers = (self._key(name) for name in forms_of(saved.facts))
        return (
            not any(p.startswith(prefix) or prefix.startswith(p) for p in rearranged)
            and not any(key.startswith(prefix) for key in wrappers)
            and all(_is_plain(entry) for name, entry in own.items() if self._key(name).startswith(prefix))
        )

    def _is_unclaimed(self, key: str, value: Json) -> bool:
        """Return True for a saved value that is not a tensor and that no module here asks for by itself."""
        if self._words.speaks(key) or any(key == prefix + EXTRA for prefix in self._words.extras):
            return False
        return not (type(value) is dict and value.get("$") in ("tensor", "wrapper"))

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

    def _prepare_words(
        self,
        state: dict[str, Json],
        live: Mapping[str, StateEntry],
        whole: Mapping[str, nn.Module],
        placement: Placement,
    ) -> None:
        claimed = set()
        for prefix, module in self._words.extras.items():
            key = prefix + EXTRA
            if key.startswith(tuple(whole)):
                continue
            claimed.add(key)
            if key in state:
                placement.finish(self.path, partial(_set_extra, module, placement.build(state[key])))
            else:
                placement.problem(f"{self._name(key)} is not in the checkpoint")
        outer = {p: m for p, m in self._words.speakers.items() if not p.startswith(tuple(whole))}
        for prefix, module in (*outer.items(), *whole.items()):
            mine = {key: value for key, value in state.items() if key.startswith(prefix)}
            claimed |= mine.keys()
            build = placement.build(pairs({k.removeprefix(prefix): v for k, v in mine.items()}), like=live)
            plain = prefix not in self._words.speakers
            placement.finish(self.path, partial(_load, module, self.path, build, placement.strict, plain))
        for key, value in state.items():
            if key not in claimed and self._is_unclaimed(key, value):
                placement.problem(f"{self._name(key)} is in the checkpoint, and not in {show(self.path)}")


def _has_other_shape(name: str, entry: StateEntry, placement: Placement) -> bool:
    """Return True for a plain tensor that was saved with another shape."""
    return _is_plain(entry) and placement.spec(name).shape != tuple(entry.tensor.shape)


def _is_plain(entry: StateEntry) -> bool:
    """Return True unless a tensor is sharded, or a part of another one."""
    return isinstance(entry.alike, Replicas | None) and entry.part_of is None and not is_dtensor(entry.tensor)


def _set_extra(module: nn.Module, build: Callable[[], Any]) -> None:
    module.set_extra_state(build())


def _load(module: nn.Module, path: Path, build: Callable[[], Any], strict: bool, plain: bool) -> None:
    found = load_into(module, as_its_own(module, build()) if plain else build(), strict=strict)
    texts = {"not in the checkpoint": "missing_keys", "in the checkpoint, and not in the module": "unexpected_keys"}
    for text, name in texts.items():
        if keys := getattr(found, name, ()):
            log.warning("%s: its load_state_dict() accepted that these are %s: %s", show(path), text, ", ".join(keys))
