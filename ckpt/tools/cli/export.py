"""`ckpt export`, also named `ckpt restore`: write a checkpoint in another format. `ckpt import` uses functions of it.

Export and import need no GPU, one rank and little memory, because tensors are read in windows. Both create new files
and replace nothing; the output appears when it is complete. The formats are in `ckpt.tools.convert.forms`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.core.checkpoint.reference import Which
from ckpt.tools.cli.arguments import checkpoint_argument, files
from ckpt.tools.cli.origins import only_option, open_run
from ckpt.tools.cli.quantity import ByteSize
from ckpt.tools.cli.terminal import (
    act,
    example,
    from_option,
    human,
    look_options,
    print_json,
    print_table,
    progress,
    put,
)
from ckpt.tools.convert.forms import FORMS, Wanted, form_for, form_of, plan_output
from ckpt.tools.convert.output import local_path
from ckpt.units import count_of, duration

if TYPE_CHECKING:  # imported only where it is used, so that `ls` starts quickly
    from ckpt.core.format.layout import TensorSpec
    from ckpt.tools.convert.output import Output
    from ckpt.tools.convert.source import Origin

Found = dict[str, Any]

WINDOW, FAR_WINDOW = 16 << 20, 64 << 20  # bytes of a window without --max-memory; larger for buckets: requests overlap
MOST_RANKS = 4096  # maximum --world-size, because one process plans for all ranks

dtype_option = click.option(
    "--dtype",
    metavar="DTYPE",
    help="Cast floating-point tensors of modules to bf16, fp16, fp32 or fp64. Other tensors are unchanged.",
)
world_option = click.option(
    "--world-size",
    "world",
    type=click.IntRange(1, MOST_RANKS),
    metavar="N",
    help="Write a run that is sharded for N ranks.",
)
memory_option = click.option(
    "--max-memory",
    metavar="SIZE",
    type=ByteSize(),
    help="Maximum memory of this process, for example 256MiB. By default about 200 MiB, or 500 MiB from a bucket,"
    " plus the memory that torch needs for the formats torch and dcp.",
)
dry_option = click.option("--dry-run", is_flag=True, help="Only print what would be written.")


@click.command(
    epilog=example(
        "ckpt export runs/exp1 --to exports/hf --only 'model.*' --dtype bf16",
        "ckpt export s3://bucket/exp1@500 --to exp1-500.pt",
        "ckpt export runs/exp1 --to runs/on-8 --world-size 8",
    )
)
@checkpoint_argument()
@click.option(
    "--to",
    "target",
    metavar="PATH",
    required=True,
    shell_complete=files,
    help="File or folder to create.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(tuple(FORMS)),
    help="safetensors: weights as on model hubs; torch: one file for torch.load; dcp: a folder for torch's"
    " distributed checkpoints; torch_dist: Megatron's, from a run of ckpt.megatron; run: an everystep run. By "
    "default the ending of PATH decides (.safetensors; .ckpt for Lightning; .pt, .pth and .bin for torch). Otherwise"
    " it is run if --world-size is given, else a folder of safetensors.",
)
@world_option
@only_option
@dtype_option
@click.option("--shard-size", metavar="SIZE", type=ByteSize(), help="Size of a safetensors file, default 5GB.")
@memory_option
@from_option("Another location of the same checkpoint, used where bytes are damaged")
@dry_option
@look_options
def export(
    url: str,
    step: Which,
    target: str,
    kind: str | None,
    world: int | None,
    only: tuple[str, ...],
    dtype: str | None,
    shard_size: int | None,
    max_memory: int | None,
    others: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Write the newest checkpoint of a run in another format: gathered, cast, or sharded for another number of ranks.

    Every byte is verified. Damaged chunks are read from another step, or with --from from another location. If a chunk
    has no intact copy, the error names its tensor, and nothing is written. Repeat an interrupted export to continue it.
    Only the format safetensors omits entries that are not weights.
    `ckpt restore` is another name of this command.
    """
    path = local_path(target)
    chosen = form_for(path, kind, world)
    if world and not FORMS[chosen].divided:
        raise click.UsageError(f"--world-size needs --format run, but the format of {target} is {chosen}")
    if shard_size and (chosen != "safetensors" or form_of(path)):
        raise click.UsageError("--shard-size needs a folder of safetensors as output")

    wanted = Wanted(path, chosen, world or 1, only, dtype, shard_size)
    return shown(act(make(open_run(url, step, others), wanted, max_memory, dry_run), partial(so_far, path)), as_json)


def so_far(path: Path) -> str:
    """Return the line that is printed after an interruption: whether the output is complete or can be continued."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        return f"{path} is complete"
    return "Nothing was written yet: repeat the command to continue from here"


async def make(
    opening: contextlib.AbstractAsyncContextManager[Origin], wanted: Wanted, max_memory: int | None, dry_run: bool
) -> Found:
    from ckpt.tools.convert.export import export as write_files
    from ckpt.tools.convert.export import window_for, written
    from ckpt.tools.convert.partial import check_target

    path = wanted.path
    check_target(path)
    async with opening as origin:
        planned = await asyncio.to_thread(plan_output, origin, wanted)
        output, dtypes = planned.output, planned.dtypes
        tensors = list(tensor_rows(origin.tensors, output, dtypes))
        files = planned_files(output, path)
        notes = list(dict.fromkeys((*output.notes, *planned.notes)))
        found: Found = {
            "source": origin.title,
            "target": str(path),
            "format": output.kind,
            "bytes": sum(file["bytes"] for file in files),
            "files": files,
            "tensors": tensors,
            "notes": notes,
            "repaired": [],
            "done": None,
        }
        if not dry_run:
            most = FAR_WINDOW if getattr(origin, "far", False) else WINDOW
            window = most if max_memory is None else min(most, window_for(max_memory))
            origin.keep = 2 * window
            with progress("writing", sum(file.size for file in output.files)) as on_bytes:
                done = await write_files(origin, output, path, window=window, on_bytes=on_bytes)
            files = [{"name": name, "bytes": size} for name, size in written(output, path)]
            found |= {"bytes": done.nbytes, "files": files}
            found |= {"done": asdict(done), "repaired": getattr(origin, "repaired", [])}
        return found


def planned_files(output: Output, path: Path) -> list[Found]:
    """Return the planned files. For formats that torch writes, return a single entry with the size of the tensors."""
    from ckpt.tools.convert.output import TensorRun

    if not output.staged:
        return [{"name": file.name or path.name, "bytes": file.size} for file in output.files]
    size = sum(part.size for file in output.files for part in file.parts if isinstance(part, TensorRun))
    return [{"name": path.name, "bytes": size}]


def tensor_rows(tensors: Mapping[str, TensorSpec], output: Output, dtypes: Mapping[str, str]) -> Iterator[Found]:
    """Yield a row for each tensor that is written, in the order of the files."""
    from ckpt.tools.convert.output import TensorRun

    seen = dict.fromkeys(p.label for file in output.files for p in file.parts if isinstance(p, TensorRun))
    for label in seen:
        spec = tensors[label]
        yield {"name": label, "shape": list(spec.shape), "dtype": spec.dtype, "written_as": dtypes[label]}


def shown(found: Found, as_json: bool) -> int:
    if as_json:
        return print_json(found)
    done = found["done"]
    put(f"{found['source']} -> {found['format']}: {found['target']}")
    if done is None:
        rows = [
            (
                t["name"],
                t["dtype"] if t["dtype"] == t["written_as"] else f"{t['dtype']} -> {t['written_as']}",
                t["shape"],
            )
            for t in found["tensors"]
        ]
        print_table(("tensor", "dtype", "shape"), rows)
    print_table(("file", "size"), [(file["name"], human(file["bytes"])) for file in found["files"]])
    for note in (*found["notes"], *found["repaired"]):
        put(f"Note: {note}")
    count = len(found["tensors"])
    what = f"{count_of(count, 'tensor')}, {human(found['bytes'])}"
    if done is None:
        put(f"{what}. Nothing was written: omit --dry-run to write it.")
        return 0
    resumed = f", of which {human(done['resumed'])} were written before" if done["resumed"] else ""
    rate = human(int((done["nbytes"] - done["resumed"]) / max(done["seconds"], 1e-9)))
    put(f"{what}{resumed}, in {duration(done['seconds'])} ({rate}/s)")
    return 0
