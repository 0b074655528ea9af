"""State that TRL, PEFT and the user's own objects have in addition to that of the Trainer.

    FurtherState.state_dict()   attributes of known classes, saved with the Trainer's progress
    further_modules(trainer)    modules of known classes that training changes, saved as entries of the state
    ModuleWatch.changed()       other modules that training changes, which are not saved; for a warning

TRL's trainers count steps and tokens, collect metrics between two log entries, and reuse generated completions for
several optimizer steps. PEFT's AdaLoRA and AdaMSS rank weights by averages of their gradients. This state is not in the
`state_dict()` of model, optimizer or TrainerState. The names of attributes are those of TRL 1.16 and PEFT 0.19.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.utils import logging

from ckpt.core.state.sharding import named_modules, unwrap
from ckpt.errors import InvalidArgumentError

logger = logging.get_logger("transformers.everystep")

COUNTERS = (
    "_step",
    "_total_train_tokens",
    "_current_train_step_time",
    "entropy_coef",  # state of GRPO's adaptive entropy bonus, like the next attribute
    "_last_world_entropy",
)
METRICS, GENERATED = "_metrics", "_buffered_inputs"
AVERAGES = ("ipt", "exp_avg_ipt", "exp_avg_unc")
OF_SUBSPACES = ("exp_avg_ipt_A", "exp_avg_ipt_B", "exp_avg_unc_A", "exp_avg_unc_B")
KINDS = (nn.Module, list, tuple, dict)
OURS = frozenset({"model", "optimizer", "scheduler", "scaler", "rng", "trainer", "pretrained", "ref_model"})


def check_further(state: object) -> dict[str, object]:
    """Return the user's `state=` as a dict. Raise InvalidArgumentError for another type, or for a name that the
    callback uses itself.
    """
    if state is None:
        return {}
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise InvalidArgumentError(f"state= must be a dict of names and objects, such as {{'ema': ema}}, not {state!r}")
    if taken := sorted(OURS & state.keys()):
        raise InvalidArgumentError(
            f"state= must not use the name {taken[0]!r}: the callback saves an object of the Trainer under it"
        )
    return state


def further_modules(trainer: Trainer) -> dict[str, nn.Module]:
    """Return the modules of known trainers that training changes, such as TRL's reference model (`sync_ref_model`)."""
    reference = getattr(trainer, "ref_model", None)
    if getattr(trainer.args, "sync_ref_model", False) and isinstance(reference, nn.Module):
        return {"ref_model": reference}
    return {}


class FurtherState:
    """Attributes of TRL's trainers and of PEFT's AdaLoRA and AdaMSS. Each rank has its own values."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._is_trl = any(one.__module__.partition(".")[0] == "trl" for one in type(trainer).__mro__)
        self._adamss = _adamss(trainer)
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"world": int(self._trainer.args.world_size)}
        if self._is_trl:
            state["counters"] = {
                name: getattr(self._trainer, name) for name in COUNTERS if hasattr(self._trainer, name)
            }
            metrics = getattr(self._trainer, METRICS, None)
            if isinstance(metrics, dict):
                state["metrics"] = {mode: {key: list(rows) for key, rows in of.items()} for mode, of in metrics.items()}
            generated = getattr(self._trainer, GENERATED, None)
            if generated is not None and _is_plain(generated):
                state["generated"] = generated
            elif generated is not None and not self._warned:
                self._warned = True
                logger.warning(
                    "the completions that %s generated contain more than tensors and text, so they are not saved: "
                    "after a "
                    "restart it generates new ones",
                    type(self._trainer).__name__,
                )
        if (found := _adalora(self._trainer)) is not None:
            allocator, config = found
            averages = {name: dict(getattr(allocator, name)) for name in AVERAGES}
            state["adalora"] = {**averages, "rank_pattern": config.rank_pattern}
        if self._adamss:
            state["adamss"] = {
                name: {key: {a: list(values) for a, values in getattr(layer, key).items()} for key in OF_SUBSPACES}
                for name, layer in self._adamss.items()
            }
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        if self._is_trl:
            for name, value in saved.get("counters", {}).items():
                setattr(trainer, name, value)
            for mode, rows in saved.get("metrics", {}).items():
                live = trainer._metrics[mode]
                live.clear()
                for key, values in rows.items():
                    live[key] = list(values)
            if "generated" in saved and saved["world"] == trainer.args.world_size:
                trainer._buffered_inputs = _to(saved["generated"], trainer.accelerator.device)
        found = _adalora(trainer)
        if found is not None and "adalora" in saved:
            allocator, config = found
            devices = {name: parameter.device for name, parameter in allocator_parameters(trainer)}
            for name in AVERAGES:
                moved = {key: value.to(devices.get(key, value.device)) for key, value in saved["adalora"][name].items()}
                setattr(allocator, name, moved)
            config.rank_pattern = saved["adalora"]["rank_pattern"]
        for name, averages in saved.get("adamss", {}).items():
            for key, adapters in averages.items() if name in self._adamss else ():
                layer = self._adamss[name]
                for adapter, values in adapters.items():
                    getattr(layer, key)[adapter] = _to(values, layer.adamss_A[adapter][0].device)


def allocator_parameters(trainer: Trainer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of AdaLoRA's model under the names that its allocator uses."""
    model: Any = unwrap(trainer.model_wrapped)
    yield from model.base_model.model.named_parameters()


def _adalora(trainer: Any) -> tuple[Any, Any] | None:
    """Return the rank allocator of an AdaLoRA model, and the configuration that the allocator changes, or None."""
    peft = sys.modules.get("peft")
    base = getattr(unwrap(trainer.model_wrapped), "base_model", None)
    if peft is None or not isinstance(base, peft.AdaLoraModel) or not hasattr(base, "rankallocator"):
        return None
    return base.rankallocator, base.peft_config[base.trainable_adapter_name]


def _adamss(trainer: Any) -> dict[str, Any]:
    """Return the layers of an AdaMSS model by name. Each layer has lists of averages for each adapter."""
    kind: Any = getattr(sys.modules.get("peft.tuners.adamss.layer"), "AdamssLayer", ())
    modules = named_modules(unwrap(trainer.model_wrapped)) if kind else ()
    return {name: one for name, _, one in modules if isinstance(one, kind)}


def _is_plain(value: object) -> bool:
    """Return True for tensors, text, numbers and None, and for lists, tuples and dicts of such values."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(k) is str and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or type(value) is Tensor


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(one, device) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to(one, device) for one in value)
    return value


class ModuleWatch:
    """Finds modules and lists of weights that training changes and the checkpoint does not contain. For example, a copy
    with averaged weights is often an attribute of the trainer or of a callback, and may be created during training.
    torch counts the writes to each tensor, so a change of the sum of these counters means that there was a write."""

    def __init__(self, trainer: Trainer, saved: Mapping[str, object]) -> None:
        parts = [part for one in (trainer.model, trainer.model_wrapped, *saved.values()) for part in _parts(one)]
        self._known, self._shapes = {id(part) for part in parts}, {part.shape for part in parts if part.dim()}
        self._trainer, self._saved = trainer, {id(one) for one in saved.values()}
        self._seen: dict[str, object] = {}  # for each name, the object that has the attribute
        self._counts: dict[str, object] = {}
        self._find()

    def _find(self) -> None:
        """Begin to watch the attributes that are new since the last call."""
        for owner in (self._trainer, *_callbacks(self._trainer)):
            if id(owner) in self._saved:
                continue
            where = "trainer" if owner is self._trainer else type(owner).__name__
            for key, value in vars(owner).items():
                name = f"{where}.{key}"
                if not isinstance(value, KINDS) or name in self._seen or not (parts := _parts(value)):
                    continue
                self._seen[name] = owner
                weights = isinstance(value, nn.Module) or {part.shape for part in parts} <= self._shapes
                if weights and not self._known & {id(part) for part in parts}:
                    self._counts[name] = _writes(value)

    def changed(self) -> list[str]:
        """Return the names of the values that were written to since they were found. Return each name once."""
        now = {name: getattr(self._seen[name], name.rpartition(".")[2], None) for name in self._counts}
        found = [name for name, value in now.items() if _writes(value) != self._counts[name]]
        for name in found:
            del self._counts[name]
        self._find()
        return found


def _callbacks(trainer: Trainer) -> list[Any]:
    return [one for one in trainer.callback_handler.callbacks if not type(one).__module__.startswith("ckpt.")]


def _parts(value: object) -> list[Tensor]:
    """Return the parameters of a module, or the values of a list or dict if all of them are tensors."""
    if isinstance(value, nn.Module):
        return list(value.parameters())
    several = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return list(several) if all(isinstance(one, Tensor) for one in several) else []


def _writes(value: object) -> object:
    counts = [0 if one.is_inference() else one._version for one in _parts(value)]
    return sum(counts) if isinstance(value, nn.Module) else [*map(id, _parts(value)), *counts]
