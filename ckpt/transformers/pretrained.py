"""Export a run to a folder for `from_pretrained`, and collect during training the files that this needs.

`from_pretrained` needs more than weights. So a run also stores the other files of a hub folder (config.json, the
tokenizer, adapter_config.json), and the names that tensors have in such a folder. Tensors are read in windows.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ckpt.core.checkpoint import read
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.regular_file import read_regular, write_regular
from ckpt.core.format.values import splitter
from ckpt.core.state.sharding import is_dtensor, local, named_buffers, named_modules, named_parameters
from ckpt.core.state.tensors import as_bytes, check_memory
from ckpt.errors import UsageError
from ckpt.events import log
from ckpt.loading import load
from ckpt.tools.convert.cast import FLOATS as CASTABLE
from ckpt.tools.convert.cast import dtype_called
from ckpt.tools.convert.export import Exported, OnBytes, export
from ckpt.tools.convert.output import Output, Sums, local_path
from ckpt.tools.convert.partial import check_target
from ckpt.tools.convert.source import Origin, RankView
from ckpt.tools.convert.source_run import checkpoint_of
from ckpt.tools.convert.to_safetensors import cast_to, plan, prefix_of, weights_of

LONG = 4096  # characters; longer texts are stored as bytes, so that they are not encoded at every step
MOST = 32 << 20  # maximum bytes of a tokenizer, because it is stored with every checkpoint
CHUNK = 64 << 20  # bytes of a tensor that are digested at a time
WINDOW = 16 << 20
PROMPT = "prompt_embeddings"  # name that peft gives the prompts of every method that learns prompts
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
REWRITING = ("pissa_niter", "corda", "lora_ga")  # values of `init_lora_weights` that change weights of the base model
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class Pretrained:
    """The files of a hub folder that are not weights.

    `names`: for each tensor of an adapter, its name in the state. `further`: returns the tensors of an adapter that are
        not in the model's state. `missing`: tensors that only peft can compute.
    """

    files: Mapping[str, str]
    names: Mapping[str, str] | None = None
    further: Callable[[], dict[str, Tensor]] = dict
    missing: Sequence[str] = ()

    def state_dict(self) -> dict[str, Any]:
        names = None if self.names is None else _packed(json.dumps(self.names))
        return {
            "files": {name: _packed(text) for name, text in self.files.items()},
            "names": names,
            "further": [[name, tensor] for name, tensor in self.further().items()],
            "missing": list(self.missing),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, because the files of the current start are newer."""


def _packed(text: str) -> str | np.ndarray[Any, Any]:
    return text if len(text) < LONG else np.frombuffer(text.encode(), np.uint8)


def _text(packed: Any) -> str:
    return packed if isinstance(packed, str) else packed.tobytes().decode()


# -- during training --


def is_adapter(model: nn.Module) -> bool:
    """Return True for a PeftModel, and False for a module that only forwards its attributes to one."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)  # peft may not be installed
    return kind is not None and isinstance(model, kind)


def unused(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of modules that PEFT replaces by trained copies. Such an original, for example of a new head,
    has random weights that differ in each process, and no forward reads them."""
    wrapper: Any = getattr(sys.modules.get("peft.utils.other"), "ModulesToSaveWrapper", ())
    return tuple(f"{name}.original_module." for name, _, one in named_modules(model) if isinstance(one, wrapper))


def adapter_tensors(model: Any, adapter: str | None = None) -> dict[str, Tensor]:
    """Return the live tensors that `save_pretrained` would write for an adapter, under its names. `adapter`: name of
    the adapter, by default the active one."""
    from peft import get_peft_model_state_dict

    live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    vars(model)["get_prompt_embedding_to_save"] = partial(_prompt, model)  # peft's own method may change the training
    try:
        name = adapter or _active(model)
        found: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict=live, adapter_name=name)
    finally:
        del vars(model)["get_prompt_embedding_to_save"]
    plain = {raw_name: name for name, raw_name, _ in named_modules(model)}
    split = splitter(plain)
    parts = {key: split(key) for key in found}  # remove torch.compile's prefixes, which peft keeps in names
    return {key if part is None else f"{plain[part[0]]}.{part[1]}": found[key] for key, part in parts.items()}


def _active(model: Any) -> str:
    active = model.active_adapter
    return active if isinstance(active, str) else active[0]


def pretrained(model: nn.Module, processing: Any) -> Pretrained:
    """Return the files of a hub folder for this model. `processing`: the Trainer's tokenizer or processor, if any."""
    with tempfile.TemporaryDirectory() as folder:
        adapter: dict[str, Any] = {}
        if is_adapter(model):
            _save_adapter_config(model, folder)
            adapter = _adapter(model)
        elif hasattr(model, "config") and hasattr(model.config, "save_pretrained"):
            _save_config(model, folder)
        texts = _texts(folder)
        with tempfile.TemporaryDirectory() as beside:
            if texts and hasattr(processing, "save_pretrained"):
                processing.save_pretrained(beside)
            if sum(path.stat().st_size for path in Path(beside).rglob("*")) <= MOST:
                texts |= _texts(beside)
            else:
                log.warning("the tokenizer is larger than %d MiB, so it is not stored in the run", MOST >> 20)
    return Pretrained(texts, **adapter)


def _adapter(model: Any) -> dict[str, Any]:
    """Return the arguments of `Pretrained` that state where the tensors of an adapter are found."""
    called = {id(t): n for n, t in (*named_buffers(model).items(), *named_parameters(model).items())}
    found = adapter_tensors(model)
    names = {key: called[id(t)] for key, t in found.items() if id(t) in called}
    again = adapter_tensors(model) if len(names) < len(found) else found
    fixed = {key: t for key, t in found.items() if key not in names and again[key] is t}  # SHiRA's indices
    name, whole = _active(model), not any(is_dtensor(p) or hasattr(p, "ds_id") for p in _prompt_parameters(model))
    prompts = [key for key in found if key == PROMPT and key not in names and whole]
    return {
        "names": names,
        "further": lambda: fixed | {key: _prompt(model, name) for key in prompts},
        "missing": sorted(found.keys() - names.keys() - fixed.keys() - set(prompts)),
    }


def _prompt_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all prompt encoders of a PeftModel, or [] for another model."""
    encoders = model._modules.get("prompt_encoder") if is_adapter(model) else None  # peft forwards other attributes
    return [] if encoders is None else list(encoders.parameters())


def _prompt(model: Any, name: str) -> Tensor:
    """Return the prompt that `save_pretrained` would compute. It is computed by a copy of the encoder without dropout,
    because some encoders change their weights in each forward (CPT) or draw random numbers."""
    encoder = copy.deepcopy(model.prompt_encoder[name]).eval()
    copied = SimpleNamespace(
        prompt_encoder={name: encoder}, prompt_tokens=model.prompt_tokens, peft_config=model.peft_config
    )
    with torch.enable_grad():  # as in peft: without gradients, an LSTM rounds in another way
        prompt: Tensor = type(model).get_prompt_embedding_to_save(copied, name)
    return prompt


def _texts(folder: str) -> dict[str, str]:
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".md")
    return {str(path.relative_to(folder)): read_regular(path).decode() for path in paths}


def _save_config(model: Any, folder: str) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


def _save_adapter_config(model: Any, folder: str) -> None:
    config = copy.deepcopy(model.peft_config[_active(model)])
    config.inference_mode = True  # as save_pretrained does
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.get_base_model(), "name_or_path", None)
    config.save_pretrained(folder)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the names, dtypes, shapes and all bytes of these tensors."""
    total = []
    for name, tensor in sorted(tensors.items()):
        check_memory(local(tensor), (name,))
        raw = as_bytes(local(tensor).contiguous())
        parts = [chunk_digest(raw[at : at + CHUNK].cpu().numpy().data) for at in range(0, len(raw), CHUNK)]
        total.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + b"".join(parts))
    return chunk_digest(b"\n".join(total)).hex()


# -- export --


def export_pretrained(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    on_bytes: OnBytes = None,
) -> Exported:
    """Write the newest checkpoint of a run, or that of `step`, as a folder for `from_pretrained`.

    Load it with `AutoModelForX.from_pretrained(folder)`, or `PeftModel.from_pretrained(base, folder)` for an adapter.
    `dtype`: "bf16", "fp16" or "fp32" to cast the weights. `on_bytes`: called with the number of bytes written. The
        tokenizer is included if the Trainer had one. Raises UsageError if the folder exists, or if the run has no model
        of transformers or peft; CorruptError if the bytes read are damaged.
    """
    path = local_path(str(folder))
    check_target(path)
    loaded = load(run, step=step)
    try:
        about = loaded.plain("pretrained")
    except KeyError:
        raise UsageError(
            f"step {loaded.step} of {loaded.url} was not saved by ckpt.transformers: use `ckpt export` to write its "
            "weights"
        ) from None
    files = {name: _text(text) for name, text in about["files"].items()}
    if "config.json" not in files and "adapter_config.json" not in files:
        raise UsageError(f"{loaded.url} has no model of transformers or peft: use `ckpt export` to write its weights")
    names = None if about["names"] is None else {k: f"model.{n}" for k, n in json.loads(_text(about["names"])).items()}
    if names is not None:
        names |= {key: f"pretrained.further.{i}.1" for i, (key, _) in enumerate(about.get("further", ()))}
    if about.get("missing"):
        raise UsageError(
            f"{', '.join(about['missing'])} of the adapter cannot be exported, because peft computes them when it "
            "saves the adapter: restore the run with its training script and call model.save_pretrained()"
        )
    return asyncio.run(_export(loaded.url, loaded.step, path, files, names, dtype, on_bytes))


async def _export(
    run: str,
    step: int,
    path: Path,
    files: dict[str, str],
    names: dict[str, str] | None,
    dtype: str | None,
    on_bytes: OnBytes,
) -> Exported:
    async with read.opened(run) as store:
        origin = await checkpoint_of(await read.open_run(run, store), step)
        output = await asyncio.to_thread(_plan, origin, files, names, dtype)
        origin.keep = 2 * WINDOW
        return await export(origin, output, path, window=WINDOW, on_bytes=on_bytes)


def _plan(origin: Origin, files: dict[str, str], names: dict[str, str] | None, dtype: str | None) -> Output:
    whole = origin.view(0, 1)
    view = weights_of(whole)
    view = replace(view, entries=tuple(e for e in view.entries if e.path == ("model",)))
    view = weights_of(view)
    dtypes = cast_to(origin, [view], dtype)
    if names is None:
        output = plan(origin, view, dtypes, prefix=prefix_of(view))
        files = {**files, "config.json": _with_dtype(files["config.json"], view, dtypes)}
    else:
        view = _renamed(whole, names)
        if dtype is not None:
            dtypes |= {label: dtype_called(dtype) for label in view.tensors.values() if dtypes[label] in CASTABLE}
        output = plan(origin, view, dtypes, single=ADAPTER)
    return replace(output, single=False, finish=_beside(files, output.finish))


def _renamed(view: RankView, names: Mapping[str, str]) -> RankView:
    """Rename the tensors of an adapter to the names that peft uses."""
    found = {}
    for key, name in names.items():
        label = view.tensors.get(view.aliases.get(name, name))
        if label is None:
            raise UsageError(f"{name} of the adapter is not in this checkpoint")
        found[key] = label
    return replace(view, tensors=found, aliases={})


def _with_dtype(config: str, view: RankView, dtypes: Mapping[str, str]) -> str:
    """Set the dtype in the config, because from_pretrained() creates the model with this dtype."""
    kinds = {dtypes[label] for label in view.tensors.values()} & FLOATS.keys()
    values = json.loads(config)
    if len(kinds) == 1:
        values["dtype"] = FLOATS[kinds.pop()]
        values.pop("torch_dtype", None)
    return json.dumps(values, indent=2) + "\n"


def _beside(files: Mapping[str, str], finish: Callable[[Path, Sums], None]) -> Callable[[Path, Sums], None]:
    def both(folder: Path, sums: Sums) -> None:
        finish(folder, sums)
        for name, text in files.items():
            target = folder / name
            if folder not in target.resolve().parents:
                raise UsageError(f"{name!r} is not the name of a file in this folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            write_regular(target, text.encode())

    return both


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that training may change: trained parameters, all tensors of adapters, and buffers. Inactive
    adapters count too, because TRL creates one as the reference, with random weights. So do weights of the base model
    that PEFT has changed, see `_rewritten`."""
    adapted: Any = model
    names = list(adapted.peft_config) if is_adapter(model) else []
    adapter = {id(t) for name in names for t in adapter_tensors(model, name).values()} | _rewritten(model, names)
    adapter |= {id(parameter) for parameter in _prompt_parameters(model)}  # some methods have frozen parameters here
    kept = {n: p for n, p in named_parameters(model).items() if p.requires_grad or id(p) in adapter}
    return named_buffers(model) | kept


def _rewritten(model: nn.Module, names: Sequence[str]) -> set[int]:
    """Return the ids of the base model's weights that PEFT changes when it creates a LoRA adapter. The change depends
    on random numbers or measurements of that process, so the next process would change them in another way."""
    configs = [(name, getattr(cast(Any, model).peft_config[name], "init_lora_weights", None)) for name in names]
    changing = {name for name, init in configs if isinstance(init, str) and init.startswith(REWRITING)}
    modules: Iterator[Any] = (one for _, _, one in named_modules(model))
    layers = (one for one in modules if hasattr(one, "lora_A") and changing & set(one.r))
    return {id(one.get_base_layer().weight) for one in layers}


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the total bytes of these tensors. A tensor with several names counts once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors.values()}.values())
