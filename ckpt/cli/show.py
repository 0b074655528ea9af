"""`ckpt show`: what a checkpoint consists of, and how that is stored."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from ckpt.checkpoint import describe, ledger_files, read
from ckpt.checkpoint.spelling import LATEST, Which
from ckpt.cli.arguments import checkpoint_argument
from ckpt.cli.reading import cadence_lines
from ckpt.cli.terminal import (
    count_of,
    example,
    human,
    look_options,
    opened,
    print_json,
    print_table,
    put,
    redo_lines,
    redo_of,
    short,
)
from ckpt.errors import CheckpointError, NoCheckpointError
from ckpt.format.manifest import Attempt, PackInfo, owner

RECENT = 4  # incarnations


@click.command(epilog=example("ckpt show runs/exp1", "ckpt show runs/exp1@500 --only 'model.*.weight'"))
@checkpoint_argument()
@click.option("--only", metavar="PATTERN", help="Only tensors whose name matches this shell pattern.")
@look_options
def show(url: str, step: Which, only: str | None, as_json: bool) -> int:
    """Say what a checkpoint consists of, and how that is stored: tensors, plain values, files.

    stored: bytes that this checkpoint wrote for a tensor. held: how its pieces are stored; raw, as planes (compressed),
    as delta (the difference to an older one), derived (bf16 that is the rounding of fp32, which costs nothing), as
    reference to a file of an older checkpoint, or as another tensor, which has the same bytes.
    used: what a restore reads of a pack.
    """
    found = asyncio.run(_show(url, step, only))
    if as_json:
        return print_json(found)
    put(f"step {found['step']} of {found['url']}, attempt {found['attempt']}, ranks: {found['ranks']}")
    titles = ("tensor", "dtype", "shape", "size", "stored", "held", "same memory as")
    print_table(titles, [tensor_row(t) for t in found["tensors"]])
    if only is None:
        print_table(("component", "kind"), [(c["path"], c["kind"]) for c in found["components"]])
        print_table(("value", "type", "is"), [(v["path"], v["type"], short(v["value"])) for v in found["values"]])
        packs = [(p["key"], human(p["size"]), human(p["used"]), "" if p["own"] else p["step"]) for p in found["packs"]]
        print_table(("pack", "size", "used", "of step"), packs)
    put(f"{count_of(found['distinct_tensors'], 'tensor')}, {human(found['tensor_bytes'])}")
    for line in [*storage_lines(found), *saving_lines(found), *redo_lines(found["redo"])] if only is None else ():
        put(line)
    return 0


def saving_lines(found: dict[str, Any]) -> Iterator[str]:
    """How often the run saves now, where that was found out, and why."""
    if found["cadence"]:
        yield "saved, as has been found out:"
        yield from (f"  {line}" for line in found["cadence"])


def tensor_row(tensor: dict[str, Any]) -> tuple[object, ...]:
    """What a person reads of a tensor."""
    if tensor["alias_of"]:
        return tensor["name"], tensor["dtype"], tensor["shape"], human(tensor["bytes"]), "", "", tensor["alias_of"]
    counts = tensor["held"]
    held = ", ".join(word if len(counts) == 1 else f"{count} {word}" for word, count in counts.items())
    sizes = human(tensor["bytes"]), human(tensor["stored"])
    return tensor["name"], tensor["dtype"], tensor["shape"], *sizes, held, ""


def storage_lines(found: dict[str, Any]) -> Iterator[str]:
    written = f"{human(found['stored_bytes'])} stored anew"
    if found["full"]:
        yield f"a full checkpoint: {written}, all of it in files of its own"
    else:
        steps = [Attempt.parse(attempt).step for attempt in found["needs"]]
        on = f"built on {', '.join(f'step {step}' for step in steps)}"
        if not found["needs_there"]:
            older = sorted({pack["step"] for pack in found["packs"] if not pack["own"] and pack["used"]}, reverse=True)
            on = f"refers to files of step{'s' * (len(older) > 1)} {', '.join(map(str, older))}"
        yield f"an increment, {on}, number {found['chain']} after a full one: {written}"
        yield f"files of older checkpoints that it uses: {found['older_packs']}"
    yield f"a restore reads {human(found['restore_bytes'])}"


async def _show(url: str, step: Which, only: str | None) -> dict[str, Any]:
    async with opened(url) as log:
        redone = redo_of(log)
        try:
            manifest = await read.manifest_of(log, step)
        except NoCheckpointError as error:
            raise _redone_instead(error, step, redone) from None
        saved, table = manifest.saved(), manifest.table
        tensors = [t for t in describe.tensors_of(saved).values() if only is None or fnmatch.fnmatchcase(t.name, only)]
        if only is not None and not tensors:
            raise click.UsageError(f"no tensor of step {manifest.commit.step} matches {only!r}; * stands for anything")
        distinct, entries = [t for t in tensors if t.alias_of is None], describe.entries_of(saved)
        storages = describe.Storages(table, manifest.attempt)
        stored = {t.name: asdict(storages.of(list(saved.blobs(saved.labels[t.name])))) for t in distinct}
        used = describe.used_of(table)
        packs = {pack.key: pack for part in manifest.parts for pack in part.packs}
        return {
            "url": log.store.url,
            "damaged_records": log.state.damaged,
            "step": manifest.commit.step,
            "attempt": str(manifest.attempt),
            "ranks": manifest.commit.world,
            "full": manifest.commit.full,
            "needs": list(map(str, manifest.commit.needs)),
            "needs_there": all(need in log.state.commits for need in manifest.commit.needs),
            "chain": max((part.chain for part in manifest.parts), default=0),
            "stored_bytes": sum(pack.size for pack in packs.values() if owner(pack.key) == manifest.attempt),
            "redo": redone,
            "cadence": cadence_lines(await ledger_files.newest_accounts(log.store, RECENT, (CheckpointError,))),
            "older_packs": sum(owner(key) != manifest.attempt for key in used),
            "restore_bytes": sum(used.values()),
            "tensors": [{**asdict(t), **stored.get(t.name, asdict(describe.NOTHING))} for t in tensors],
            "distinct_tensors": len(distinct),
            "tensor_bytes": sum(t.bytes for t in distinct),
            "components": [{"path": path, "kind": str(facts.get("kind"))} for path, (facts, _) in entries.items()],
            "values": list(_values(entries)),
            "packs": [_pack(pack, manifest.attempt, used.get(pack.key, 0)) for pack in packs.values()],
        }


def _values(entries: describe.Entries) -> Iterator[dict[str, Any]]:
    for start in entries:
        for path, value in describe.leaves_of(entries, start):
            yield {"path": path, "type": type(value).__name__, "value": describe.jsonable(value)}


def _redone_instead(error: NoCheckpointError, step: Which, redone: list[dict[str, Any]]) -> NoCheckpointError:
    """What was asked for may be a step of the redo log."""
    found = next((one for one in redone if step in (None, LATEST, one["step"])), None)
    if found is None:
        return error
    return NoCheckpointError(
        f"{error}. Step {found['step']} is in the redo log, which leads to it from step {found['base']}: "
        f"`ckpt restore RUN@{found['step']} --to PATH` redoes it, and Checkpointer(...).restore(step=...) does"
    )


def _pack(pack: PackInfo, attempt: Attempt, used: int) -> dict[str, Any]:
    whose = owner(pack.key)
    return {**asdict(pack), "own": whose == attempt, "step": None if whose is None else whose.step, "used": used}
