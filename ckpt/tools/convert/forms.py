"""The formats of an export. To add a format, add a module with a function `plan`, and an entry in FORMS.

A plan lists the files and their tensors; `ckpt.tools.convert.export` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:  # at runtime, only the module of the requested format is imported
    from ckpt.tools.convert.output import Output
    from ckpt.tools.convert.source import Origin, RankView


PRETRAINED = ("pretrained",)  # path of the entry in which `ckpt.transformers` stores the other files of a hub folder
NO_CONFIG = (
    "no config.json or adapter_config.json is written. `python -m ckpt.transformers RUN --to FOLDER` writes a folder "
    "with "
    "them, for from_pretrained()"
)
# suffixes of formats that are not supported, for a clear error
OTHERS = (".gguf", ".ggml", ".onnx", ".h5", ".npz", ".npy", ".msgpack", ".tflite", ".pkl", ".zip", ".tar")


@dataclass(frozen=True)
class Wanted:
    """The user's request for an export. `form`: a key of FORMS."""

    path: Path
    form: str
    world: int = 1
    only: Sequence[str] = ()
    dtype: str | None = None
    shard_size: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class Planned:
    """The files to write, and the new dtype of each tensor by its label."""

    output: Output
    dtypes: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """A format. `plan`: returns the output, given the origin, the ranks' views, the dtypes and the request.

    `suffixes`: file name suffixes of this format. `weights_only`: True if it omits entries that are not weights.
        `divided`: True if it can be sharded for several ranks.
    """

    plan: Callable[[Origin, list[RankView], Mapping[str, str], Wanted], Output]
    suffixes: tuple[str, ...] = ()
    weights_only: bool = False
    divided: bool = False


def form_of(path: Path) -> str:
    """Return the format that belongs to the suffix of a file name, or "" for any other name."""
    return next((name for name, form in FORMS.items() if path.suffix in form.suffixes), "")


def form_for(path: Path, given: str | None, world: int | None) -> str:
    """Return the requested format, or that of the name's suffix. Other names mean a folder of safetensors. Raise
    InvalidArgumentError for the suffix of an unsupported format."""
    if path.suffix.lower() in OTHERS and given is None:
        suffixes = ", ".join(f"{name} ({', '.join(form.suffixes)})" for name, form in FORMS.items() if form.suffixes)
        raise InvalidArgumentError(
            f"{path.name}: the format {path.suffix} is not supported. Files can be {suffixes}, folders safetensors, "
            "dcp or run; other programs can convert safetensors"
        )
    return given or form_of(path) or ("run" if world else "safetensors")


def plan_output(origin: Origin, wanted: Wanted) -> Planned:
    from ckpt.tools.convert.source import check_patterns, select
    from ckpt.tools.convert.to_safetensors import cast_to, weights_of

    form = FORMS[wanted.form]
    views = [origin.view(rank, wanted.world) for rank in range(wanted.world)]
    hub = form.weights_only and not form_of(wanted.path) and any(e.path == PRETRAINED for e in views[0].entries)
    if wanted.only:
        check_patterns(views, wanted.only)
        views = [select(view, wanted.only, whole=not form.weights_only) for view in views]
    elif form.weights_only:
        views = [weights_of(view) for view in views]
    dtypes = cast_to(origin, views, wanted.dtype)
    notes = () if form.divided else views[0].notes
    return Planned(form.plan(origin, views, dtypes, wanted), dtypes, (*notes, NO_CONFIG) if hub else notes)


def _safetensors(origin: Origin, views: list[RankView], dtypes: Mapping[str, str], wanted: Wanted) -> Output:
    from ckpt.tools.convert import to_safetensors

    (view,) = views
    prefix, shard = to_safetensors.prefix_of(view), wanted.shard_size or to_safetensors.SHARD
    single = wanted.path.name if form_of(wanted.path) else ""
    return to_safetensors.plan(origin, view, dtypes, shard=shard, single=single, prefix=prefix)


def _torch(origin: Origin, views: list[RankView], dtypes: Mapping[str, str], wanted: Wanted) -> Output:
    from ckpt.tools.convert import to_torch

    return to_torch.plan(origin, views[0], dtypes)


def _lightning(origin: Origin, views: list[RankView], dtypes: Mapping[str, str], wanted: Wanted) -> Output:
    from ckpt.tools.convert import to_lightning

    if wanted.only:
        raise InvalidArgumentError("a .ckpt file of Lightning contains a whole run: omit --only, or add --format")
    return to_lightning.plan(origin, views[0], dtypes)


def _dcp(origin: Origin, views: list[RankView], dtypes: Mapping[str, str], wanted: Wanted) -> Output:
    from ckpt.tools.convert import to_dcp

    return to_dcp.plan(origin, views[0], dtypes)


def _torch_dist(origin: Origin, views: list[RankView], dtypes: Mapping[str, str], wanted: Wanted) -> Output:
    from ckpt.tools.convert import to_torch_dist

    return to_torch_dist.plan(origin, views[0], dtypes)


def _run(origin: Origin, views: list[RankView], dtypes: Mapping[str, str], wanted: Wanted) -> Output:
    from ckpt.tools.convert import to_run

    step = next(n for n in (wanted.step, views[0].step, 0) if n is not None)
    return to_run.plan(
        origin, views, dtypes, step=step, finite=getattr(origin, "finite", None), parents=getattr(origin, "parents", ())
    )


FORMS = {
    "safetensors": Form(_safetensors, (".safetensors",), weights_only=True),
    "torch": Form(_torch, (".pt", ".pth", ".bin")),
    "lightning": Form(_lightning, (".ckpt",)),
    "dcp": Form(_dcp),
    "torch_dist": Form(_torch_dist),
    "run": Form(_run, divided=True),
}
