"""Reads modules and restores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ckpt.core.format.saved_nodes import SavedNode
from ckpt.core.format.values import Path, show
from ckpt.core.state.names import Names
from ckpt.core.state.nodes import Contents, Memories, Places
from ckpt.core.state.placement import Placement
from ckpt.core.state.rewrap import facts_of, matching
from ckpt.core.state.sharding import (
    NamedModule,
    Replicas,
    StateEntry,
    local,
    named_modules,
    replicated_by_ddp,
    reshard,
    storage_of,
    unwrap,
)
from ckpt.core.state.wrappers import WrapperForm, take_apart
from ckpt.errors import StateError

TWO_TENSORS = (
    "two tensors of the module get this name, so one of them would be lost. Rename one of them; wrappers such as "
    "torch.compile's add nothing to the names of the tensors in them"
)


class ModuleNode:
    """Reads and restores the parameters and persistent buffers of an `nn.Module`, in place. It calls none of the
    module's own code: an adapter reads any other entries of its `state_dict()`."""

    def __init__(self, path: Path, module: nn.Module) -> None:
        self.path = path
        self.whole, self.module = module, unwrap(module)  # `module` identifies it, with or without wrappers
        self._replicas: dict[int, Replicas] = {}
        self._there, self._memories = Places(), Memories()
        self._piece: Contents | None = None
        self._forms: dict[str, WrapperForm] = {}  # forms of the wrapper tensors, by name

    @property
    def kind(self) -> str:
        return "module"

    def read(self, names: Names) -> Contents:
        if self._piece is None:
            reshard(self.whole)
        if self._piece is None or self.changed():
            self._piece = None  # if reading fails midway, the next call must read again
            self._piece = self._read(list(named_modules(self.whole)))
        return self._piece

    def changed(self) -> bool:
        """Return True if tensors were replaced or moved since the last reading. Reshard it first if necessary."""
        if not self._differs():
            return False
        reshard(self.whole)
        return self._differs()

    def _differs(self) -> bool:
        return self._there.differs() or self._memories.changed()

    def _read(self, modules: Sequence[NamedModule]) -> Contents:
        owners: list[dict[str, Any]] = []
        places: list[tuple[dict[str, Any], str, Tensor]] = []
        children: list[tuple[dict[str, Any], str, nn.Module | None]] = []  # child modules, and tensors that are None
        self._there, self._memories = Places(), Memories()
        self._replicas = replicated_by_ddp(self.whole)
        live: dict[str, tuple[list[StateEntry], WrapperForm | None]] = {}
        for prefix, _, module in modules:
            members: tuple[dict[str, Any], ...] = (module._modules, module._parameters, module._buffers)
            owners += members
            children += [(module._modules, key, child) for key, child in module._modules.items()]
            for owner in members[1:]:
                for key, tensor in owner.items():
                    name = self._saved_as(f"{prefix}.{key}" if prefix else key)
                    if name is None or key in module._non_persistent_buffers_set:
                        continue
                    if tensor is None:  # it may be set later
                        children.append((owner, key, None))
                        continue
                    if name in live and not is_one(live[name][0][0].owner.tensor, tensor):
                        raise StateError(f"{self._name(name)}: {TWO_TENSORS}")
                    live[name] = take_apart(self._entry(name, tensor))
                    places.append((owner, key, tensor))
        self._there, self._memories = Places([*children, *places], owners), Memories([t for _, _, t in places])
        self._forms = {name: form for name, (_, form) in live.items() if form is not None}
        return Contents([e for entries, _ in live.values() for e in entries], facts=facts_of(self._forms.values()))

    def _saved_as(self, name: str) -> str | None:
        """Return the name of a tensor in the checkpoint. Return None if it is not saved directly."""
        return name

    def _entry(self, name: str, tensor: Tensor) -> StateEntry:
        replicas = self._replicas.get(id(tensor))
        return StateEntry(self._name(name), tensor, isinstance(tensor, nn.Parameter), replicas)

    def _name(self, key: str) -> str:
        return show((*self.path, key))

    def prepare(self, saved: SavedNode, placement: Placement) -> None:
        own = {entry.name: entry for entry in self.read(Names()).fixed}
        names = placement.compare(self.path, saved.names, own)
        for name in matching(names, own, saved.facts, saved.names, placement):
            placement.fill(name, own[name])

    def prepare_as_saved(self, saved: SavedNode, placement: Placement) -> bool:
        return True


def memory_id(tensor: Tensor) -> object:
    """Return a key that is equal for tensors in the same storage."""
    return storage_of(tensor) or id(tensor)


def view_id(tensor: Tensor) -> object:
    """Return a key that is equal for the same view of the same storage."""
    if (memory := memory_id(tensor)) == id(tensor):
        return memory
    return memory, local(tensor).storage_offset(), tensor.shape, local(tensor).stride()


def is_one(a: Tensor, b: Tensor) -> bool:
    """Return True for the same tensor, or the same view of the same storage."""
    return a is b or view_id(a) == view_id(b)
