"""The commands that carry checkpoints to other forms and back, and compare them: restore, import, diff.

Each needs no GPU, no ranks and little memory: tensors pass by in windows. `restore` and `import` make something new and
replace nothing; what they make appears when it is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckpt.cli.terminal import (
    example,
    human,
    json_option,
    opened,
    place_option,
    print_json,
    print_table,
    progress,
    safe,
    say,
    short,
    split_step,
    step_option,
)
from ckpt.convert.output import local_path
from ckpt.errors import FormatError, UsageError
from ckpt.store import normalise

if TYPE_CHECKING:  # what `ls` need not wait for is imported where it is used
    from ckpt.convert.output import Output
    from ckpt.convert.source import Origin
    from ckpt.convert.source_redo import RedoneOrigin
    from ckpt.format.layout import TensorSpec
    from ckpt.runlog.log import RunLog

T = TypeVar("T")
Found = dict[str, Any]

WINDOW, FAR_WINDOW = 16 << 20, 64 << 20  # bytes of a window where no bound is given; several requests, from far away
MOST_RANKS = 4096  # that one process plans for
FILES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".ckpt": "torch", ".bin": "torch"}
FORMATS = ("safetensors", "torch", "dcp", "run")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)


def size_of(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """500MB, 2GiB, 1e9 and such as bytes."""
    found = _SIZE.fullmatch(text.strip()) if text is not None else None
    if text is None:
        return None
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{text!r} is no size: give one such as 500MB or 2GiB", context, parameter)
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** (" KMGT".index(found[2].upper()) if found[2] else 0))


def place_in_state(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    """a.b as a path."""
    if not all(parts := tuple(text.split("."))):
        raise click.BadParameter("give a name such as model, or several with dots between", context, parameter)
    return parts


only_option = click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Only tensors and entries whose name matches this shell pattern, or that belong to what is called so (model,"
    " 'model.layers.*'); repeatable.",
)
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
    callback=size_of,
    help="What this process may need at most, such as 256MiB. By default about 200 MiB, 500 MiB from a bucket, and what"
    " torch needs if FORMAT is torch or dcp.",
)
from_option = click.option(
    "--from",
    "others",
    metavar="URL",
    multiple=True,
    help="Another place that has the same checkpoint, for what is damaged; repeatable.",
)
as_option = click.option(
    "--as",
    "at",
    default="model",
    show_default=True,
    callback=lambda context, parameter, text: place_in_state(context, parameter, text),
    help="Where in the state bare weights of other programs belong.",
)
dry_option = click.option("--dry-run", is_flag=True, help="Only say what would be made.")


# -- restore and import --


@click.command(
    epilog=example(
        "ckpt restore runs/exp1 --to exports/hf --only 'model.*' --dtype bf16",
        "ckpt restore s3://bucket/exp1 --step 500 --to exp1-500.pt",
        "ckpt restore runs/exp1 --to runs/on-8 --world-size 8",
    )
)
@click.argument("url")
@step_option
@click.option("--to", "target", metavar="PATH", required=True, help="What to make: a file or folder that is not there.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="safetensors: weights as model hubs have them; torch: one file for torch.load; dcp: a folder for torch's"
    " distributed checkpoints; run: one of ours. By default what PATH ends in (.safetensors; .pt, .pth, .bin and .ckpt"
    " for torch), run if --world-size is given, and else a folder of safetensors.",
)
@world_option
@only_option
@dtype_option
@click.option("--shard-size", metavar="SIZE", callback=size_of, help="Bytes of a safetensors file, 5GB by default.")
@memory_option
@from_option
@dry_option
@place_option
@json_option
def restore(
    url: str,
    step: int | None,
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
    """Write the newest checkpoint of a run in another form: gathered, cast, or cut for another number of ranks.

    If a redo log leads further, its last step: redone in memory, of which that takes as much as the state has. What was
    loaded and what was redone is said, and --step chooses any other.

    Every byte is verified on the way; what is damaged comes from another step or, with --from, another place, or the
    tensor is named and nothing appears. An interrupted restore goes on where it was when it is called again. Only
    safetensors leave out what is not a weight.
    """
    path = local_path(target)
    chosen = kind or FILES.get(path.suffix, "run" if world else "safetensors")
    if world and chosen != "run":
        raise click.UsageError(f"--world-size is for runs, and {target} is to be {chosen}: add --format run")
    if shard_size and (chosen != "safetensors" or path.suffix in FILES):
        raise click.UsageError("--shard-size is for a folder of safetensors")

    def plan(origin: Origin) -> Planned:
        return plan_output(origin, path, chosen, world or 1, only, dtype, shard_size, None)

    opening = open_run(url, step, others, redo=True, max_memory=max_memory)
    found = act(_make(opening, plan, path, max_memory, dry_run))
    return shown(found, as_json)


@click.command(
    "import",
    epilog=example(
        "ckpt import model.safetensors runs/start", "ckpt import old/epoch3.pt runs/exp1 --step 3000 --dry-run"
    ),
)
@click.argument("src")
@click.argument("run")
@click.option("--step", type=click.IntRange(min=0), help="What step it is of. By default what SRC says, else 0.")
@as_option
@world_option
@only_option
@dtype_option
@click.option("--max-memory", metavar="SIZE", callback=size_of, help="What this process may need at most, as 256MiB.")
@dry_option
@json_option
def import_(
    src: str,
    run: str,
    step: int | None,
    at: tuple[str, ...],
    world: int | None,
    only: tuple[str, ...],
    dtype: str | None,
    max_memory: int | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Make a run of what another library has saved: a training goes on, or starts, from there with `restore()`.

    SRC: safetensors (a file, or a folder with or without an index), a torch.save file, or a folder of torch's
    distributed checkpoints. Nothing in it is run: files that hold code are refused. What another library wrote has no
    digests; from here on it has.
    """
    path = local_path(run)

    def plan(origin: Origin) -> Planned:
        return plan_output(origin, path, "run", world or 1, only, dtype, None, step)

    found = act(_make(open_files(src, at), plan, path, max_memory, dry_run))
    return shown(found, as_json)


@dataclass(frozen=True)
class Planned:
    """What to make, and as what each tensor is written, by label."""

    output: Output
    dtypes: Mapping[str, str]
    notes: tuple[str, ...] = ()


def act(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        say("stopped. Nothing has appeared yet: call the same again, and it goes on from here")
        raise click.Abort from None


@contextlib.asynccontextmanager
async def open_run(
    url: str, step: int | None, others: Sequence[str] = (), *, redo: bool = False, max_memory: int | None = None
) -> AsyncIterator[Origin]:
    """A checkpoint of a run; or a step that its redo log leads to, if that is asked for, or with `redo` the newest."""
    from ckpt.checkpoint import read
    from ckpt.convert.source_dcp_run import untangled
    from ckpt.convert.source_run import RunOrigin

    with contextlib.suppress(UsageError):
        path = local_path(url)
        files = path.is_file() or (path / ".metadata").exists() or next(path.glob("*.safetensors"), None)
        if files and not (path / "FORMAT.json").exists() and not (path / "log").exists():
            raise FormatError(
                f"{url} holds files of another program: `ckpt import {url} RUN` makes a run of them first"
            )
    async with opened(url) as log:
        others = [normalise(other) for other in others]
        redone = await asyncio.to_thread(_redone, log, step, redo, max_memory, others)
        if redone is not None:
            async with contextlib.aclosing(redone):
                yield redone
            return
        run = RunOrigin(log, await read.manifest_of(log, step), others)
        yield await untangled(run)


def _redone(
    log: RunLog, step: int | None, newest: bool, max_memory: int | None, others: Sequence[str]
) -> RedoneOrigin | None:
    from ckpt.convert import export, source_redo
    from ckpt.faults.memory_pressure import available_memory

    history = log.state.lineage()
    if any(commit.step == step for commit in history) if step is not None else not newest:
        return None
    room = available_memory() if max_memory is None else min(available_memory(), max_memory - export.resident())
    try:
        return source_redo.redone(log, step, max(0, room - export.SPARE - export.SHARES * export.SMALLEST), others)
    except (UsageError, MemoryError) as error:  # it takes too much
        if step is not None or not history:
            raise
        say(f"{error or 'not enough memory for the redo log'}. So it is the newest checkpoint instead")
        return None


@contextlib.asynccontextmanager
async def open_files(src: str, at: tuple[str, ...]) -> AsyncIterator[Origin]:
    """Files of another library. FormatError if they are not of one that is known; CorruptError if their own checksums
    say that they are damaged."""
    from ckpt.convert import parse_dcp, parse_safetensors, parse_torch
    from ckpt.convert.source_files import FilesOrigin, stamps_of

    path = local_path(src)
    if not path.exists():
        raise FormatError(f"{src} does not exist")
    if (path / "FORMAT.json").exists():
        raise FormatError(f"{src} is a run already: `ckpt restore` makes another form of it, `ckpt copy` another copy")
    parser = next((one for one in (parse_dcp, parse_safetensors, parse_torch) if one.sniff(path)), None)
    if parser is None:
        raise FormatError(
            f"{src} is nothing that is known here: give a safetensors file or folder, a file of torch.save, or a "
            "folder of torch.distributed.checkpoint (it has a file called .metadata)"
        )
    before = stamps_of(path)
    origin = FilesOrigin(parser.parse(path, at), before)
    try:
        with progress("checking", origin.checked_bytes) as on_bytes:
            await origin.check(on_bytes)
        yield origin
    finally:
        await origin.aclose()


def plan_output(
    origin: Origin,
    path: Path,
    kind: str,
    world: int,
    only: Sequence[str],
    dtype: str | None,
    shard_size: int | None,
    step: int | None,
) -> Planned:
    from ckpt.convert import to_safetensors
    from ckpt.convert.source import check_patterns, select

    views = [origin.view(rank, world) for rank in range(world)]
    if only:
        check_patterns(views, only)
        views = [select(view, only, whole=kind != "safetensors") for view in views]
    elif kind == "safetensors":
        views = [to_safetensors.weights_of(view) for view in views]
    dtypes = to_safetensors.cast_to(origin, views, dtype)
    if kind == "run":
        from ckpt.convert import to_run

        number = next(n for n in (step, views[0].step, 0) if n is not None)
        finite = getattr(origin, "finite", None)
        return Planned(to_run.plan(origin, views, dtypes, step=number, finite=finite), dtypes)
    view = views[0]
    if kind == "safetensors":
        single = path.name if path.suffix in FILES else ""
        prefix = to_safetensors.prefix_of(view)
        shard = shard_size or to_safetensors.SHARD
        return Planned(
            to_safetensors.plan(origin, view, dtypes, shard=shard, single=single, prefix=prefix), dtypes, view.notes
        )
    if kind == "torch":
        from ckpt.convert import to_torch

        return Planned(to_torch.plan(origin, view, dtypes), dtypes, view.notes)
    from ckpt.convert import to_dcp

    return Planned(to_dcp.plan(origin, view, dtypes), dtypes, view.notes)


async def _make(
    opening: contextlib.AbstractAsyncContextManager[Origin],
    plan: Callable[[Origin], Planned],
    path: Path,
    max_memory: int | None,
    dry_run: bool,
) -> Found:
    from ckpt.convert.export import check_target, export, window_for

    check_target(path)
    async with opening as origin:
        planned = await asyncio.to_thread(plan, origin)
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
    what = f"{count} tensor{'s' * (count != 1)}, {human(found['bytes'])}"
    if done is None:
        print(f"{what}. Nothing was made: leave out --dry-run, and it is.")
        return 0
    resumed = f", of which {human(done['resumed'])} were there from before" if done["resumed"] else ""
    rate = human(int((done["nbytes"] - done["resumed"]) / max(done["seconds"], 1e-9)))
    print(f"{what}{resumed}, in {done['seconds']:.1f} s ({rate}/s)")
    return 0


# -- diff --


@click.command(
    epilog=example(
        "ckpt diff runs/exp1@500 runs/exp1@600",
        "ckpt diff runs/exp1 exports/hf --only 'model.*' --json",
    )
)
@click.argument("a")
@click.argument("b")
@only_option
@as_option
@place_option
@json_option
def diff(a: str, b: str, only: tuple[str, ...], at: tuple[str, ...], as_json: bool) -> int:
    """Compare two checkpoints, each given as URL or URL@STEP, or files as `ckpt import` takes them.

    For each tensor that differs: how many elements do, the largest absolute difference, the largest one relative to
    the larger of the two, and the cosine of the angle between both, also across dtypes. Exit code 1 if anything
    differs. Only tensors whose digests differ are read, in pieces.
    """
    found = act(_diff(a, b, only, at))
    if as_json:
        print_json(found)
    else:
        if not found["equal"]:
            print_table(("difference", "name", "A", "B", "relative", "cosine"), list(diff_rows(found)))
        print("equal" if found["equal"] else "different")
    return 0 if found["equal"] else 1


def open_either(text: str, at: tuple[str, ...]) -> contextlib.AbstractAsyncContextManager[Origin]:
    """A run, or files of another library."""
    with contextlib.suppress(UsageError):
        path = local_path(text)
        if (path / "FORMAT.json").exists() or (path / "log").exists():
            return open_run(text, None)  # also if its name ends like a step
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            return open_files(text, at)
    return open_run(*split_step(text))


async def _diff(a: str, b: str, only: Sequence[str], at: tuple[str, ...]) -> Found:
    from ckpt.checkpoint import describe
    from ckpt.checkpoint.describe import jsonable
    from ckpt.convert import tensor_diff

    async with open_either(a, at) as one, open_either(b, at) as two:
        (here, entries_a), (there, entries_b) = (sides_of(origin, only) for origin in (one, two))
        if only and not any((here, there, entries_a, entries_b)):
            raise UsageError(
                f"nothing matches {' or '.join(map(repr, only))}: `ckpt show` lists names; * stands for any"
            )
        shared = [t for name, t in here.items() if name in there]
        alike = [
            t for t in shared if t.shape == there[t.name].shape and tensor_diff.comparable(t.dtype, there[t.name].dtype)
        ]
        met = {(one.names[t.name], two.names[t.name]): t.name for t in reversed(alike)}  # tied ones once
        pairs = [tensor_diff.Pair(n, a, b) for (a, b), n in reversed(met.items()) if not one.same(a, two, b)]
        total = sum(here[p.name].bytes + there[p.name].bytes for p in pairs)
        tied_a, tied_b = (tied_groups(origin, here.keys() & there.keys()) for origin in (one, two))
        with progress("comparing", total) as on_bytes:
            differing = await tensor_diff.differences(one, two, pairs, on_bytes=on_bytes)
        found: Found = {
            "only_in_a": [name for name in here if name not in there],
            "only_in_b": [name for name in there if name not in here],
            "changed": [
                {"name": t.name, "a": asdict(t), "b": asdict(there[t.name])}
                for t in shared
                if (t.dtype, t.shape) != (there[t.name].dtype, there[t.name].shape)
                or (t.alias_of != there[t.name].alias_of and tied_a[t.name] != tied_b[t.name])
            ],
            "tensors": [{key: jsonable(value) for key, value in asdict(d).items()} for d in differing],
            "values": list(describe.differing_values(entries_a, entries_b)),
        }
        sides = {side: {"what": origin.title, **origin.about} for side, origin in (("a", one), ("b", two))}
        return {**sides, "equal": not any(found.values()), **found}


def tied_groups(origin: Origin, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Of each of these names, those that stand for the same tensor."""
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(origin.names[name], set()).add(name)
    return {name: frozenset(groups[origin.names[name]]) for name in names}


def sides_of(origin: Origin, only: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors by label, and plain values: those that are wanted."""
    from ckpt.checkpoint import describe
    from ckpt.convert.source import matches

    tensors, entries = describe.all_names(origin.tensors, origin.names), origin.plain()
    if only:
        tensors = {n: t for n, t in tensors.items() if matches(n, only)}
        entries = {n: e for n, e in entries.items() if matches(n, only) or matches(f"{n}.", only)}
    return tensors, entries


def diff_rows(found: Found) -> Iterator[tuple[object, ...]]:
    """What a person reads: difference, name, A, B, and how much."""
    yield from (("only in A", name, "", "", "", "") for name in found["only_in_a"])
    yield from (("only in B", name, "", "", "", "") for name in found["only_in_b"])
    for row in found["changed"]:
        yield "changed", row["name"], *(f"{t['dtype']} {t['shape']}" + same_as(t) for t in (row["a"], row["b"])), "", ""
    for row in found["tensors"]:
        most = "" if row["max_abs_difference"] is None else f"by at most {row['max_abs_difference']}"
        more = ("" if row[key] is None else row[key] for key in ("max_rel_difference", "cosine"))
        yield "bytes", row["name"], f"{row['differing']} of {row['elements']} elements", most, *map(brief, more)
    for row in found["values"]:
        sides = ("" if row["only_in"] not in (None, side) else short(row[side]) for side in "ab")
        yield "value", row["path"], *sides, "", ""


def brief(number: object) -> str:
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def same_as(tensor: dict[str, Any]) -> str:
    return f", the same memory as {tensor['alias_of']}" if tensor["alias_of"] else ""
