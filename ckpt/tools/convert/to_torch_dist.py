"""Write a run of `ckpt.megatron` as Megatron's own `torch_dist` checkpoint, which any parallel sizes can load.

The output is a folder of torch's distributed checkpoints with the keys of Megatron's `ShardedTensor`s and an optimizer
saved as `fully_reshardable`, plus `common.pt` with plain values and `metadata.json`. All layers of the decoder are one
tensor whose first dimension is the layer. The weights have two keys for the same bytes: one for the model, whose
weights Megatron rounds to its compute dtype, and one for the optimizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt.errors import UsageError
from ckpt.tools.convert.output import Output, Sums
from ckpt.tools.convert.source import DESCRIPTION, Origin, RankView
from ckpt.tools.convert.to_dcp import FILE, Aliases, Rows, write
from ckpt.tools.convert.torch_state import Builder, Tensors, stage

NEEDED = ("model", "optim", "megatron")  # entries that every run of `ckpt.megatron` has
RANDOM, SCHEDULE = "rng", "sched"
LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
MASTERS, MOMENTS = "optimizer.state.param.", ("exp_avg", "exp_avg_sq")
HOW = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
NUMBERS = "random numbers are omitted: Megatron starts from its seed"


def plan(origin: Origin, view: RankView, dtypes: Mapping[str, str]) -> Output:
    """Plan the files. `dtypes`: dtype to write, by label. Raise UsageError if the run is not of `ckpt.megatron`, or if
    Megatron has no form for it."""
    paths = {entry.path for entry in view.entries}
    if not {(name,) for name in NEEDED} <= paths:
        raise UsageError("this is not a run of ckpt.megatron, so it cannot be written as torch_dist: choose dcp")
    if any(dtypes[label] != origin.tensors[label].dtype for label in view.tensors.values()):
        raise UsageError("torch_dist stores fp32 weights, which Megatron rounds when loading: omit --dtype")
    chosen = _without_numbers(view)

    def checkpoint(tensors: Tensors) -> tuple[dict[str, Any], Aliases, dict[str, Any]]:
        root = Builder(chosen, tensors, numbered=False, text_keys=False).build().root
        return *sharded(root["model"], root["optim"]), common(root, view.step or 0)

    checkpoint(Tensors(origin, dtypes))
    file = stage(origin, chosen, dtypes, FILE)

    def finish(out: Path, _: Sums) -> None:
        tensors = Tensors(origin, dtypes, output.staged_path(out, file), file)
        own, aliases, plain = checkpoint(tensors)
        torch.save(plain, out / "common.pt")
        write(out, own, {name: (name,) for name in own}, aliases, tensors)
        (out / "metadata.json").write_text(json.dumps(METADATA))

    notes = (NUMBERS,) if (RANDOM,) in paths else ()
    output = Output("torch_dist", (file,), finish, staged=True, notes=notes)
    return output


def _without_numbers(view: RankView) -> RankView:
    entries = tuple(entry for entry in view.entries if entry.path != (RANDOM,))
    names = {view.aliases.get(name, name) for entry in entries for name in entry.names}
    return replace(view, entries=entries, tensors={name: view.tensors[name] for name in view.tensors if name in names})


# -- values that Megatron divides among ranks --


def sharded(model: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> tuple[dict[str, Any], Aliases]:
    """Return the sharded tensors by Megatron's keys, and aliases for tensors with two keys."""
    tensors, aliases = dict[str, Any](), Aliases()
    layers: dict[str, dict[int, Tensor]] = {}
    for prefix, name, tensor in _by_prefix(model, moments):
        if match := LAYER.fullmatch(name):
            layers.setdefault(f"{prefix}{match[1]}{match[3]}", {})[int(match[2])] = tensor
        else:
            tensors[prefix + name] = tensor
    count = max((number for one in layers.values() for number in one), default=-1) + 1
    tensors |= {key: Rows(_all_of(key, one, count)) for key, one in layers.items()}
    for key in [key for key in tensors if key.startswith(MASTERS)]:
        aliases[key.removeprefix(MASTERS)] = key, (key.removeprefix(MASTERS),)
    return tensors | _nothing(model, count), aliases


def _by_prefix(model: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield for each tensor the prefix of its key, the rest of the key, and the tensor."""
    for name, weight in model.items():
        states = {key: moments.get(f"state.{name}.{key}") for key in MOMENTS}
        yield ("" if None in states.values() else MASTERS), name, weight  # a weight without moments is frozen
        yield from ((f"optimizer.state.{key}.", name, moment) for key, moment in states.items() if moment is not None)


def _all_of(key: str, layers: Mapping[int, Tensor], count: int) -> list[Tensor]:
    if sorted(layers) != list(range(count)) or len({(one.dtype, one.shape) for one in layers.values()}) != 1:
        raise UsageError(
            f"{key}: layers differ or only some are trained, but torch_dist stores them as one tensor: choose dcp"
        )
    return [layers[number] for number in range(count)]


def _nothing(model: Mapping[str, Tensor], count: int) -> dict[str, list[None]]:
    """Return empty extra state for each module that has some, because Megatron expects these keys even without fp8."""
    matched = (LAYER.fullmatch(name) for name, weight in model.items() if weight.dim() == 2)
    linear = {f"{m[1]}{m[3].removesuffix('.weight')}" for m in matched if m and m[3].endswith(".weight")}
    attention = {"decoder.layers.self_attention.core_attention"}  # a module of Transformer Engine
    return {f"{key}._extra_state/shard_{i}_{count}": [None] for key in linear | attention for i in range(count)}


# -- values that are the same on all ranks --


def common(root: Mapping[str | int, Any], step: int) -> dict[str, Any]:
    """Return plain values under Megatron-LM's names, and the user's own entries under their names in the run."""
    saved = root["megatron"]
    if saved["step"] is None:
        raise UsageError(
            "the optimizer's step is unknown, because the rank whose values are used updates no parameters"
        )
    groups = [{**group, "step": saved["step"]} for group in saved["groups"]]
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    if scale := saved["scale"]:
        optimizer["grad_scaler"] = {**scale, "scale": torch.tensor([scale["scale"]], dtype=torch.float32)}
    found = {"checkpoint_version": 3.0, "iteration": step, "optimizer": optimizer, "content_metadata": HOW}
    own = {str(key): one for key, one in root.items() if key not in (*NEEDED, RANDOM, DESCRIPTION)}
    if SCHEDULE in own:
        own["opt_param_scheduler"] = own.pop(SCHEDULE)
    if taken := sorted(own.keys() & (found.keys() | {"model", "args"})):
        raise UsageError(f"{taken[0]} is a reserved name in Megatron's file: exclude it with --only")
    return found | own
