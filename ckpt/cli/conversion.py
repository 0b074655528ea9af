"""What the commands share that carry checkpoints to other forms and back: restore, import.

Each needs no GPU, no ranks and little memory: tensors pass by in windows. Both make something new and replace nothing;
what they make appears when it is whole. The forms are in `ckpt.convert.forms`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.quantity import ByteSize
from ckpt.cli.terminal import count_of, human, print_json, print_table, progress, safe
from ckpt.convert import forms
from ckpt.convert.forms import Wanted

if TYPE_CHECKING:  # what `ls` need not wait for is imported where it is used
    from ckpt.convert.output import Output
    from ckpt.convert.source import Origin
    from ckpt.format.layout import TensorSpec

Found = dict[str, Any]

SO_FAR = "Nothing has appeared yet"
WINDOW, FAR_WINDOW = 16 << 20, 64 << 20  # bytes of a window where no bound is given; several requests, from far away
MOST_RANKS = 4096  # that one process plans for

dtype_option = click.option(
    "--dtype",
    help="Cast the weights to bf16, fp16, fp32 or fp64: floating-point tensors of modules. Others stay as they are.",
)
world_option = click.option(
    "--world-size",
    "world",
    type=click.IntRange(1, MOST_RANKS),
    help="Cut it for a job of so many ranks, as a run of ours.",
)
memory_option = click.option(
    "--max-memory",
    metavar="SIZE",
    type=ByteSize(),
    help="What this process may need at most, such as 256MiB. By default about 200 MiB, 500 MiB from a bucket, and what"
    " torch needs if FORMAT is torch or dcp.",
)
dry_option = click.option("--dry-run", is_flag=True, help="Only say what would be made.")


async def make(
    opening: contextlib.AbstractAsyncContextManager[Origin], wanted: Wanted, max_memory: int | None, dry_run: bool
) -> Found:
    from ckpt.convert.export import export, window_for
    from ckpt.convert.partial import check_target

    path = wanted.path
    check_target(path)
    async with opening as origin:
        planned = await asyncio.to_thread(forms.plan_output, origin, wanted)
        output, dtypes = planned.output, planned.dtypes
        total = sum(file.size for file in output.files)
        notes = list(dict.fromkeys((*output.notes, *planned.notes)))
        found: Found = {
            "source": origin.title,
            "target": str(path),
            "format": output.kind,
            "bytes": total,
            "files": [{"name": file.name or path.name, "bytes": file.size} for file in output.files],
            "tensors": list(tensor_rows(origin.tensors, output, dtypes)),
            "notes": notes,
            "repaired": [],
            "done": None,
        }
        if not dry_run:
            most = FAR_WINDOW if getattr(origin, "far", False) else WINDOW
            window = most if max_memory is None else min(most, window_for(max_memory))
            origin.keep = 2 * window
            with progress("writing", total) as on_bytes:
                done = await export(origin, output, path, window=window, on_bytes=on_bytes)
            found |= {"done": asdict(done), "repaired": getattr(origin, "repaired", [])}
        return found


def tensor_rows(tensors: Mapping[str, TensorSpec], output: Output, dtypes: Mapping[str, str]) -> Iterator[Found]:
    """What is written of each tensor, in the order of the files."""
    from ckpt.convert.output import Run

    seen = dict.fromkeys(p.label for file in output.files for p in file.parts if isinstance(p, Run))
    for label in seen:
        spec = tensors[label]
        yield {"name": label, "shape": list(spec.shape), "dtype": spec.dtype, "written_as": dtypes[label]}


def shown(found: Found, as_json: bool) -> int:
    if as_json:
        return print_json(found)
    done = found["done"]
    print(safe(f"{found['source']} -> {found['format']}: {found['target']}"))
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
        print(safe(f"Note: {note}"))
    count = len(found["tensors"])
    what = f"{count_of(count, 'tensor')}, {human(found['bytes'])}"
    if done is None:
        print(f"{what}. Nothing was made: leave out --dry-run, and it is.")
        return 0
    resumed = f", of which {human(done['resumed'])} were there from before" if done["resumed"] else ""
    rate = human(int((done["nbytes"] - done["resumed"]) / max(done["seconds"], 1e-9)))
    print(f"{what}{resumed}, in {done['seconds']:.1f} s ({rate}/s)")
    return 0
