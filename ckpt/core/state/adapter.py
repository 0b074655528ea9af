"""The interface for everything in a state that is not a dense tensor, a DTensor, an ordinary module or optimizer, a
Stateful object or a plain value.

There are two kinds of adapters:

- **For an object** (`StateAdapter`): flat shards, and modules and optimizers whose own `state_dict()` or loader does
  more than torch's. An adapter is a class of nodes. `owns(value)` claims an object, and its node reads and restores it
  like every `StateNode`: `read` returns named tensors (dense, DTensor, or boxes of a whole), plain values and facts;
  `prepare` matches the saved tensors in the `Placement`.
- **For a tensor** (`TensorAdapter`): subclasses that are made of other tensors, for example those of torchao.
  `owns(kind)` claims a class, `flatten` takes one tensor apart by one level, and `unflatten` builds it again. Names,
  DTensors around or inside it, comparison and filling stay in `ckpt.core.state.wrappers` and `ckpt.core.state.rewrap`.

The first adapter that owns an object gets it. The core reads all other objects itself, and never imports an adapter.
`ckpt.adapters` registers the existing ones, and every reader of a state (`ckpt.checkpointer`, the integrations) imports
that package. Registration is global, because a class means the same in every state of a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ckpt.core.format.values import Json, Path

if TYPE_CHECKING:
    from ckpt.core.state.nodes import StateNode
    from ckpt.core.state.wrappers import WrapperForm


class StateAdapter(Protocol):
    """A class of nodes that reads and restores the objects it owns."""

    def __call__(self, path: Path, value: Any, /) -> StateNode: ...

    def owns(self, value: object, /) -> bool: ...


class TensorAdapter(Protocol):
    """Takes tensors of some subclasses apart, by one level, and builds them again."""

    def owns(self, kind: type, /) -> bool:
        """Return True if tensors of this class are made of other tensors."""

    def flatten(self, tensor: Tensor, /) -> tuple[Sequence[str], list[Any], Json]:
        """Return the attributes that hold the inner tensors, these tensors, and everything else as plain values."""

    def check(self, tensor: Tensor, name: str, /) -> None:
        """Raise StateError if something in the tensor would be lost."""

    def unflatten(self, kind: type, form: WrapperForm, inner: Mapping[str, Tensor], /) -> Tensor:
        """Build a tensor of that class around these. Raise MismatchError if that cannot be done."""


objects: list[StateAdapter] = []
tensors: list[TensorAdapter] = []


def adapter_of(value: object) -> StateAdapter | None:
    """Return the adapter that owns an object, None if the core reads it by itself."""
    return next((one for one in objects if one.owns(value)), None)
