"""Everything that depends on torchtitan's internals: the arguments of a checkpoint manager, and how to save them.

Importing it raises ImportError unless the version is in the range `KNOWN` and has every name that is used here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

try:
    import tyro as tyro
    from torchtitan.components.checkpointer import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER
    from torchtitan.components.checkpointer import BaseCheckpointManager as BaseCheckpointManager
    from torchtitan.components.checkpointer import CheckpointManager as OwnManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.tools import filesystem as filesystem
except ImportError as error:
    missing: ImportError | None = error
else:
    missing = None

from ckpt.core.state.nodes import RNG, Resizable
from ckpt.core.state.optimizer_node import Joint
from ckpt.core.state.sharding import ModulePart, named_modules
from ckpt.errors import UsageError
from ckpt.version import check_known

KNOWN = ((0, 3), (0, 4))  # the first supported version, and the first unsupported one
HOOKS = ("_load", "_save", "_maybe_wait_for_staging", "_wait_for_saving", "_close")


VERSION: str | None = getattr(sys.modules.get("torchtitan"), "__version__", None)
if VERSION is None:
    raise ImportError("ckpt.torchtitan needs torchtitan: pip install 'everystep[torchtitan]'") from missing
check_known("ckpt.torchtitan", "torchtitan", VERSION, KNOWN)
if missing is not None:
    raise ImportError(f"torchtitan {VERSION} cannot be used here: {missing}") from missing
for _class, _names in {BaseCheckpointManager: HOOKS, OwnManager: ("_load", "_save_last_step")}.items():
    for _name in _names:
        if not hasattr(_class, _name):
            raise ImportError(f"torchtitan {VERSION} has no {_class.__name__}.{_name}")

RNG_ENTRY = "rng"
ANEW = f"exclude_from_loading=['{DATALOADER}'] starts the data from the beginning"


class Weights:
    """The parameters and persistent buffers of all parts of the model, with their names and their layout in memory.
    torchtitan's own `state_dict()` is not called, because on every rank it gathers and splits fused weights."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """Raise UsageError if a part has state other than tensors, or if two parts have a tensor of the same name."""
        found: dict[str, Tensor] = {}
        homes: list[tuple[str, nn.Module, str]] = []
        for prefix, _, module in (one for part in parts for one in named_modules(part)):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise UsageError(f"ckpt.torchtitan: {prefix} has extra state in addition to tensors: not supported yet")
            for members, passing in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
                for key, tensor in members.items():
                    if tensor is None or key in passing:
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    if found.setdefault(name, tensor) is not tensor:
                        raise UsageError(f"ckpt.torchtitan: two parts of the model have a tensor named {name}")
                    if members is module._buffers:
                        homes.append((name, module, key))
        self.module = ModulePart(parts[0], found)
        self._buffers = [(_owner(self.module, name), module, key) for name, module, key in homes]

    def refresh(self) -> None:
        """Read the buffers again, because the model may have replaced a buffer by another tensor."""
        for own, module, key in self._buffers:
            own[key] = module._buffers[key]


def _owner(module: nn.Module, name: str) -> dict[str, Tensor | None]:
    """Return the buffers of the module that contains the buffer with this name."""
    return module.get_submodule(name.rpartition(".")[0])._buffers


class Batches:
    """torchtitan's data loader. It divides the data into numbered parts, one per rank. Each rank saves its position
    under the number of its part. If the number of ranks has changed, a rank finds its part in the states of all."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._loader.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self._loader, ParallelAwareDataloader) and (gone := self.state_dict().keys() - state.keys()):
            raise UsageError(
                f"this rank's checkpoint does not have the position of {', '.join(gone)} in the data. {ANEW}"
            )
        try:
            self._loader.load_state_dict(state)
        except AssertionError as error:  # torchtitan cannot divide the data among another number of ranks
            raise UsageError(f"{error} {ANEW}") from error

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        if isinstance(self._loader, Resizable):
            self._loader.load_state_dicts(states, rank, world)
        else:
            self.load_state_dict({key: value for state in states for key, value in state.items()})


class NotLoaded:
    """An entry that is saved, but stays unchanged when the other entries are restored."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._entry.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Job:
    """The arguments of a checkpoint manager. `state`: the objects to save, under torchtitan's own names."""

    def __init__(self, config: Any, folder: str, given: dict[str, Any]) -> None:
        """`given`: all keyword arguments of the manager but the first two. Raise UsageError if one cannot be saved."""
        if config.create_seed_checkpoint:
            raise UsageError(
                "ckpt.torchtitan does not create seed checkpoints: create one with torchtitan's own CheckpointManager, "
                "and pass its folder as initial_load_path"
            )
        if config.last_save_in_hf and given["sd_adapter"] is None:
            raise UsageError("last_save_in_hf: torchtitan has no Hugging Face format for this model")
        self._config, self._folder, self._given = config, folder, given
        self._weights = Weights(given["model_parts"])
        self._optimizers = list(given["optimizers"])
        rest = {LR_SCHEDULER: given["lr_schedulers"], RNG_ENTRY: RNG(), **given["states"]}
        if given["dataloader"] is not None:
            rest[DATALOADER] = Batches(given["dataloader"])
        self._left = set(config.exclude_from_loading)
        if unknown := sorted(self._left - {OPTIMIZER, *rest}):
            raise UsageError(f"exclude_from_loading: {', '.join(unknown)} is not in the state ({', '.join(rest)})")
        parts = len(given["model_parts"])
        kinds = len(self._optimizers) // parts  # number of optimizers per part
        joint = [Joint(self._optimizers[kind::kinds]) if parts > 1 else self._optimizers[kind] for kind in range(kinds)]
        self.state: dict[str, Any] = {
            MODEL: self._weights.module,
            OPTIMIZER: joint[0] if kinds == 1 else joint,
            **{name: NotLoaded(one) if name in self._left else one for name, one in rest.items()},
        }

    @property
    def model(self) -> dict[str, Any]:
        """A state with only the weights."""
        return {MODEL: self.state[MODEL]}

    def refresh(self) -> None:
        self._weights.refresh()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context in which the state is filled. At its end, entries not to be loaded get their old values."""
        self.refresh()
        before = [copy.deepcopy(one.state_dict()) for one in self._optimizers] if OPTIMIZER in self._left else []
        yield
        for one, was in zip(self._optimizers, before, strict=False):
            one.state.clear()
            one.load_state_dict(was)

    def load_from_theirs(self) -> bool:
        """Load `initial_load_path` and `initial_load_in_hf` with torchtitan's own manager."""
        with self._theirs(self._folder) as own:
            return bool(own._load(-1))

    def export(self, step: int, folder: str) -> None:
        """Write only the weights to `folder`/step-`step`, like torchtitan's manager at the end. All ranks call this."""
        with self._theirs(folder) as own:
            own._save_last_step(step)

    @contextlib.contextmanager
    def _theirs(self, folder: str) -> Iterator[Any]:
        """Return a context with torchtitan's own manager. It needs memory for a gathered copy of all fused weights."""
        fields = {one.name for one in dataclasses.fields(BaseCheckpointManager.Config)}
        settings = {name: getattr(self._config, name) for name in fields}
        settings |= {"folder": folder, "keep_latest_k": 0, "exclude_from_loading": sorted(self._left - {RNG_ENTRY})}
        given = self._given | {"states": dict(self._given["states"]), "base_folder": ""}
        own = OwnManager.Config(**settings).build(**given)
        try:
            yield own
        finally:
            own.close()
