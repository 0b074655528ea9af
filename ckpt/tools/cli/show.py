"""`ckpt show`: list what a checkpoint contains and how it is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from ckpt.core.checkpoint import lease, read
from ckpt.core.checkpoint.manifests import MANY, sizes_of_many
from ckpt.core.checkpoint.reference import Which, matches
from ckpt.core.format.index import Index
from ckpt.core.format.manifest import CheckpointId, DataFile, Manifest, owner
from ckpt.core.format.saved_state import SavedState
from ckpt.core.log.records import Commit
from ckpt.errors import CheckpointError
from ckpt.store import Store
from ckpt.tools import describe
from ckpt.tools.cli.arguments import checkpoint_argument
from ckpt.tools.cli.reading import cadence_lines
from ckpt.tools.cli.terminal import (
    example,
    human,
    look_options,
    opened,
    print_json,
    print_table,
    put,
    short,
)
from ckpt.units import count_of

RECENT = 4  # number of newest job attempts whose metrics are read

NOTES = ("info", "parents", "content")  # fields that come from a manifest; None if no manifest was read
TYPES = {"NoneType": "none", "Reference": "tensor"}  # names of types as users know them


@click.command(epilog=example("ckpt show runs/exp1", "ckpt show runs/exp1@500 --only 'model.*.weight'"))
@checkpoint_argument()
@click.option(
    "--only",
    metavar="PATTERN",
    help="Only tensors whose name matches this shell pattern, or below a matching name (model).",
)
@click.option("--all", "every", is_flag=True, help="Show what each rank has stored, even with more than 64 ranks.")
@look_options
def show(url: str, step: Which, only: str | None, every: bool, as_json: bool) -> int:
    """List what a checkpoint contains and how it is stored: tensors, plain values, files.

    stored: bytes that this checkpoint wrote for a tensor. held: how its chunks are stored: raw, as planes (compressed),
    as delta (the compressed difference from an older checkpoint), as reference to a file of an older checkpoint, or as
    another tensor with the same bytes. used: bytes of a data file that a restore reads.

    With more than 64 ranks, only the index and the manifest of one rank are read. To see how tensors are stored, use
    --all, or --only for some tensors. The plain values shown are those of the first rank that has any.
    """
    found = asyncio.run(_show(url, step, only, every))
    if as_json:
        return print_json(found)
    put(f"step {found['step']} of {found['url']}, checkpoint {found['id']}, ranks: {found['ranks']}")
    titles = ("tensor", "dtype", "shape", "size", "stored", "held", "same memory as")
    print_table(titles, [tensor_row(t) for t in found["tensors"]])
    if only is None:
        print_table(("component", "kind"), [(c["path"], c["kind"]) for c in found["components"]])
        rows = [(v["path"], TYPES.get(v["type"], v["type"]), short(v["value"])) for v in found["values"]]
        print_table(("value", "type", "is"), rows)
        files = [(p["key"], human(p["size"]), human(p["used"]), "" if p["own"] else p["step"]) for p in found["files"]]
        if files:
            print_table(("data file", "size", "used", "of step"), files)
    put(f"{count_of(found['distinct_tensors'], 'tensor')}, {human(found['tensor_bytes'])}")
    for line in [*storage_lines(found), *saving_lines(found)] if only is None else ():
        put(line)
    return 0


def saving_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the current save intervals and the reasons for them, if any were measured."""
    if found["cadence"]:
        yield "save intervals, as measured:"
        yield from (f"  {line}" for line in found["cadence"])


def tensor_row(tensor: dict[str, Any]) -> tuple[object, ...]:
    """Return the cells of a tensor's row."""
    if tensor["alias_of"]:
        return tensor["name"], tensor["dtype"], tensor["shape"], human(tensor["bytes"]), "", "", tensor["alias_of"]
    if (counts := tensor["held"]) is None:
        return tensor["name"], tensor["dtype"], tensor["shape"], human(tensor["bytes"]), "", "", ""
    held = ", ".join(word if len(counts) == 1 else f"{count} {word}" for word, count in counts.items())
    sizes = human(tensor["bytes"]), human(tensor["stored"])
    return tensor["name"], tensor["dtype"], tensor["shape"], *sizes, held, ""


def storage_lines(found: dict[str, Any]) -> Iterator[str]:
    for name in NOTES:
        if found[name]:
            yield f"{name}: {short(found[name])}"
    written = f"{human(found['stored_bytes'])} written"
    if found["full"]:
        yield f"a full checkpoint: {written}, all in its own files"
    else:
        steps = [CheckpointId.parse(checkpoint).step for checkpoint in found["needs"]]
        on = f"built on {', '.join(f'step {step}' for step in steps)}"
        if not found["needs_there"]:
            older = found["older_steps"]
            on = f"refers to files of step{'s' * (len(older) > 1)} {', '.join(map(str, older))}"
        behind = "" if found["chain"] is None else f", number {found['chain']} after a full one"
        yield f"an increment, {on}{behind}: {written}"
        yield f"files of older checkpoints that it uses: {found['older_files']}"
    if found["restore_bytes"] is None:
        yield "--all shows what each rank has stored and what a restore reads"
    else:
        yield f"a restore reads {human(found['restore_bytes'])}"


async def _show(url: str, step: Which, only: str | None, every: bool) -> dict[str, Any]:
    async with opened(url) as log:
        commit = read.choose(log, step)
        async with read.there(log, commit):
            contents = await _contents(log.store, commit, only, every)
        return {
            "url": log.store.url,
            "damaged_records": log.state.damaged,
            "step": commit.step,
            "id": str(commit.checkpoint),
            "ranks": commit.world,
            "full": commit.full,
            "needs": list(map(str, commit.needs)),
            "needs_there": all(need in log.state.commits for need in commit.needs),
            "cadence": cadence_lines(await lease.newest_accounts(log.store, RECENT, (CheckpointError,))),
            **contents,
        }


async def _contents(store: Store, commit: Commit, only: str | None, every: bool) -> dict[str, Any]:
    """Read the contents of a checkpoint. With many ranks, read only the manifest that was requested."""
    found: read.Manifests | Index | None = None
    if MANY < commit.world == len(commit.manifests):
        found = await read.index_or_none(store, commit)
    found = found or await read.load_all(store, commit)
    whole = found if isinstance(found, read.Manifests) else None
    saved = read.saved_by(found, commit, (store.url,))
    tensors = [t for t in describe.tensors_of(saved).values() if only is None or matches(t.name, [only])]
    if only is not None and not tensors:
        raise click.UsageError(f"no tensor of step {commit.step} matches {only!r}; * matches any text")
    keys = {t.name: saved.labels[t.name] for t in tensors if t.alias_of is None}
    storages, manifests = describe.Storages(commit.checkpoint, keys.values()), list[Manifest]()
    if whole is not None:
        storages.add(whole.table)
        manifests += whole.manifests
    elif every:
        async for share in read.in_turn(store, commit):
            some = await share
            storages.add(some.table)
            manifests += some.manifests
        saved.told({manifest.rank: manifest.values for manifest in manifests})
    elif only is not None:
        ranks = {rank for key in keys.values() for rank in saved.holders(key).tolist()}
        async for table in read.tables_in_turn(store, commit, sorted(ranks)):
            storages.add(table)
    known = bool(manifests) or only is not None
    return {
        "tensors": [_tensor(t, storages.of(keys[t.name]) if t.name in keys and known else None) for t in tensors],
        "distinct_tensors": len(keys),
        "tensor_bytes": sum(t.bytes for t in tensors if t.name in keys),
        **_entries_json(describe.entries_of(saved, once=not manifests)),
        **(_files(commit, manifests, storages.used) if manifests else await _listed(store, commit, saved)),
    }


def _tensor(tensor: describe.Tensor, storage: describe.BlobStorage | None) -> dict[str, Any]:
    """Return how a tensor is stored, if its manifest was read. Another name for the same memory takes no space."""
    if storage is None and tensor.alias_of is not None:
        storage = describe.NOTHING
    unknown = dict.fromkeys(("stored", "held", "depth", "reads"))
    return {**asdict(tensor), **(unknown if storage is None else asdict(storage))}


def _entries_json(entries: describe.Entries) -> dict[str, Any]:
    return {
        "components": [{"path": path, "kind": str(facts.get("kind"))} for path, (facts, _) in entries.items()],
        "values": [
            {"path": path, "type": type(value).__name__, "value": describe.jsonable(value)}
            for start in entries
            for path, value in describe.leaves_of(entries, start)
        ],
    }


def _files(commit: Commit, manifests: Sequence[Manifest], used: Mapping[str, int]) -> dict[str, Any]:
    files = {file.key: file for manifest in manifests for file in manifest.files}
    return {
        "chain": max((manifest.chain for manifest in manifests), default=0),
        **{name: getattr(manifests[0], name) for name in NOTES},
        "stored_bytes": sum(file.size for file in files.values() if owner(file.key) == commit.checkpoint),
        "restore_bytes": sum(used.values()),
        **_older(commit, used),
        "files": [_file_row(file, commit.checkpoint, used.get(file.key, 0)) for file in files.values()],
    }


async def _listed(store: Store, commit: Commit, saved: SavedState) -> dict[str, Any]:
    """Return the fields of `_files` for many ranks, as far as the index and a listing contain them."""
    sizes, files = await sizes_of_many(store, commit.checkpoint, commit.world), saved.index.files
    unknown: dict[str, Any] = {"chain": None, "restore_bytes": None, "files": [], **dict.fromkeys(NOTES)}
    return {**unknown, "stored_bytes": sum(sizes.get(key, 0) for key in files), **_older(commit, files)}


def _older(commit: Commit, used: Iterable[str]) -> dict[str, Any]:
    """Return the files of other checkpoints that this checkpoint uses."""
    owners = [of for key in used if (of := owner(key)) is not None and of != commit.checkpoint]
    return {"older_files": len(owners), "older_steps": sorted({of.step for of in owners}, reverse=True)}


def _file_row(file: DataFile, checkpoint: CheckpointId, used: int) -> dict[str, Any]:
    whose = owner(file.key)
    return {**asdict(file), "own": whose == checkpoint, "step": None if whose is None else whose.step, "used": used}
