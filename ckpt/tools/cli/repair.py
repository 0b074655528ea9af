"""`ckpt repair`: repair damaged files of a run with `ckpt.tools.maintain.repair`.

Without `--yes`, the command prints a plan and changes nothing. `--json` prints one document: the plan, and under `done`
the result, or null if nothing was done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ckpt.core.checkpoint.reference import Which
from ckpt.errors import StoreError, UnreadableError, is_unreadable
from ckpt.store import normalise
from ckpt.tools.cli.arguments import checkpoint_argument
from ckpt.tools.cli.terminal import (
    SHOWN,
    act,
    example,
    from_option,
    human,
    opened,
    plan_options,
    print_err,
    print_few,
    print_json,
    print_table,
    progress,
    put,
)
from ckpt.units import count_of

if TYPE_CHECKING:
    from ckpt.core.log.run_log import Commit, RunLog
    from ckpt.tools.maintain.damage import AuditResult, DataFileDamage
    from ckpt.tools.maintain.repair import Repaired

Found = dict[str, Any]
UNREADABLE = (
    "Restore access to it and run the command again. If it is lost for good (for example a bad sector), move it away "
    "first, so that it can be replaced."
)
NAMES = 2  # maximum names of tensors that are printed for a damaged chunk


@click.command(
    epilog=example(
        "ckpt repair runs/exp1", "ckpt repair /nvme/exp1 --from s3://bucket/exp1 --yes", "ckpt repair runs/exp1 --json"
    )
)
@checkpoint_argument()
@from_option("Another tier of the run with intact bytes")
@plan_options
def repair(url: str, others: Sequence[str], step: Which, yes: bool, as_json: bool) -> int:
    """Repair damaged or missing files, bit for bit. A job may be training in the run.

    Reads all files that the checkpoints need, or that RUN@STEP needs. Prints what is damaged, and the source from which
    each chunk can be repaired: the same file in another location, or an intact copy of the same content. With --yes,
    the files are written again under their names and verified. The old file stays until the new one is complete. Log
    records are not repaired. size: stored bytes of the damaged chunks. steps: the checkpoints that need these chunks.

    If a file cannot be read now, nothing is written, and the exit code is 3. Move away a file that will never be
    readable again. The exit code is 1 if damage remains, or if --yes is missing and damage was found.
    """
    places = [normalise(other) for other in others]
    if normalise(url) in places or len(set(places)) != len(places):
        raise click.UsageError("RUN and all --from must be different locations")
    found = act(_repair(url, places, step, yes, as_json))
    if as_json:
        print_json(found)
    return 1 if found["damaged"] and (found["done"] is None or found["remains"]) else 0


async def _repair(url: str, sources: Sequence[str], step: Which, yes: bool, quiet: bool) -> Found:
    from ckpt.tools.maintain.repair import Repair

    async with contextlib.AsyncExitStack() as stack:
        log = await stack.enter_async_context(opened(url, whole=True))
        others = [await stack.enter_async_context(opened(source)) for source in sources]
        commits = _wanted(log, step)
        work = Repair(log, others, commits)
        try:
            with progress("reading", await work.look()) as on_bytes:
                diagnosis = await work.audit(on_bytes)
            for other in others if diagnosis.any else ():
                if not _kin(log, other):
                    print_err(f"WARNING: {other.store.url} is another run: only chunks with the same content are used")
            lost = sum(piece.stored for data_file in diagnosis.data_files for piece in data_file.pieces)
            with progress("looking for intact bytes", lost) as on_bytes:
                await work.seek(on_bytes)
        except StoreError as error:
            if not is_unreadable(error):
                raise
            raise UnreadableError(
                f"nothing was written, because a file cannot be read now and may be intact: {error}", advice=UNREADABLE
            ) from error
        found: Found = {
            "url": log.store.url,
            "from": list(sources),
            "steps": sorted({commit.step for commit in work.commits}, reverse=True),
            "damaged": diagnosis.any,
            "verdicts": [{"step": a.step, "id": str(a), "verdict": verdict} for a, verdict in work.verdicts()],
            **_summary(diagnosis),
            "remains": diagnosis.remains,
            "done": None,
        }
        if not quiet:
            show(found)
        if yes and diagnosis.any:
            with progress("writing", found["bytes_to_write"]) as on_bytes:
                done = await work.mend(on_bytes)
            found["done"] = _done(done)
            found["remains"] = diagnosis.remains or bool(done.failed)
            if not quiet:
                show_done(found)
        elif not quiet and found["damaged"]:
            put(
                "Nothing was changed yet. Add --yes to repair."
                if found["bytes_to_write"]
                else "Nothing can be repaired."
            )
        return found


def _wanted(log: RunLog, step: Which) -> list[Commit]:
    """Return the checkpoints to check. Raise NoCheckpointError if there are none and no log record is damaged."""
    from ckpt.core.checkpoint import read

    if step is None and (log.state.commits or log.state.damaged):
        return list(log.state.commits.values())
    return [read.choose(log, step)]


def _kin(log: RunLog, other: RunLog) -> bool:
    ours, theirs = log.state, other.state
    return bool(ours.commits.keys() & theirs.commits.keys())


def _summary(found: AuditResult) -> dict[str, Any]:
    pieces = [piece for data_file in found.data_files for piece in data_file.pieces]
    return {
        "damaged_records": found.records,
        "unreadable": [{"step": checkpoint.step, "why": why} for checkpoint, why in found.unread],
        "files": [
            {
                "key": f.key,
                "step": f.step,
                "problem": f.problem,
                "from": f.source or None,
                "repairable": f.raw is not None,
            }
            for f in found.files
        ],
        "data_files": [_file_row(data_file) for data_file in found.data_files],
        "bytes_damaged": sum(piece.stored for piece in pieces),
        "bytes_lost": sum(piece.stored for piece in pieces if piece.cure is None),
        "bytes_to_write": sum(p.info.size for p in found.data_files if p.worth)
        + sum(len(f.raw) for f in found.files if f.raw is not None),
    }


def _file_row(data_file: DataFileDamage) -> dict[str, Any]:
    cure = data_file.header_cure
    return {
        "key": data_file.info.key,
        "size": data_file.info.size if data_file.known else None,
        "problem": data_file.problem or None,
        "header": {
            "damaged": data_file.header and data_file.there is not None,
            "from": cure and cure.where,
            "how": cure and cure.how,
        },
        "pieces": [
            {
                "offset": piece.offset,
                "bytes": piece.stored,
                "steps": piece.steps,
                "tensors": piece.tensors,
                "from": piece.cure and piece.cure.where,
                "how": piece.cure and piece.cure.how,
                "why_not": piece.why if piece.cure is None else None,
            }
            for piece in data_file.pieces
        ],
        "unavailable": data_file.unavailable,
        "write_again": data_file.worth,
        "repairable": data_file.whole_again,
    }


def _done(done: Repaired) -> Found:
    return {
        "files": done.files,
        "data_files": done.data_files,
        "given_up_meanwhile": done.left,
        "failed": [{"key": key, "why": why} for key, why in done.failed],
    }


def show(found: Found) -> None:
    from ckpt.core.checkpoint.losses import one_by_one

    put(f"{found['url']}: {count_of(len(found['verdicts']), 'checkpoint')} read")
    if not found["damaged"]:
        print("nothing is damaged")
        return
    show_verdicts(found["verdicts"])
    print_few([f"{one}, which cannot be repaired" for one in one_by_one(found["damaged_records"])])
    print_few([f"step {step['step']} cannot be checked completely: {step['why']}" for step in found["unreadable"]])
    files = [
        (f["key"], f["step"] if f["step"] is not None else "", f["problem"], f["from"] or "LOST")
        for f in found["files"]
    ]
    for data_file in found["data_files"]:
        header = data_file["header"]
        if data_file["problem"]:
            lost = (
                f"LOST: {human(data_file['unavailable'])} of it are in no location"
                if data_file["unavailable"]
                else "LOST"
            )
            hope = (
                lost
                if not data_file["write_again"]
                else "see below"
                if data_file["repairable"]
                else "partly, see below"
            )
            files.append((data_file["key"], "", data_file["problem"], hope))
        if header["damaged"]:
            origin = f"{header['how']}, {header['from']}" if header["from"] else "LOST"
            files.append((data_file["key"], "", "its header is damaged", origin))
    if files:
        print_table(("file", "step", "what", "available from"), files[:SHOWN])
    rows = _rows(found)
    if rows:
        print_table(("tensor", "steps", "size", "data file", "available from"), rows[:SHOWN])
    more = max(0, len(files) - SHOWN) + max(0, len(rows) - SHOWN)
    if more:
        put(f"{more} more; --json shows all")
    again = [data_file for data_file in found["data_files"] if data_file["write_again"]]
    ready = [f for f in found["files"] if f["repairable"]]
    lost = human(found["bytes_lost"])
    put(f"damaged: {human(found['bytes_damaged'])} of tensors, of which {lost} are lost")
    put(f"to write again: {count_of(len(again) + len(ready), 'file')}, {human(found['bytes_to_write'])}")


def show_verdicts(verdicts: Sequence[Found]) -> None:
    """Print one line for each damaged checkpoint, and one for all others."""
    from ckpt.tools.maintain.prune import some

    bad = [one for one in verdicts if one["verdict"] != "sound"]
    sound = [one["step"] for one in verdicts if one["verdict"] == "sound"]
    print_few([f"step {one['step']}: {one['verdict']}" for one in bad], " that are damaged")
    if sound:
        put(f"step{'s' * (len(sound) > 1)} {some(sound)}: sound")
    print()


def _rows(found: Found) -> list[tuple[object, ...]]:
    """Return rows for damaged chunks, grouped by tensors, data file and source. Chunks without a source come first."""
    from ckpt.tools.maintain.prune import some

    together: dict[tuple[Any, ...], int] = {}
    for data_file in found["data_files"]:
        for piece in data_file["pieces"]:
            names: list[str] = piece["tensors"]
            more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
            steps = some(piece["steps"])
            source = f"{piece['how']}, {piece['from']}" if piece["from"] else f"LOST: {piece['why_not']}"
            key = (not source.startswith("LOST"), ", ".join(names[:NAMES]) + more, steps, data_file["key"], source)
            together[key] = together.get(key, 0) + piece["bytes"]
    ordered = sorted(together.items(), key=lambda item: item[0][0])
    return [(cells[1], cells[2], human(size), *cells[3:]) for cells, size in ordered]


def show_done(found: Found) -> None:
    done = found["done"]
    print_few([f"skipped, because the run no longer needs it: {key}" for key in done["given_up_meanwhile"]])
    print_few([f"failed and unchanged: {one['key']}: {one['why']}" for one in done["failed"]])
    put(f"wrote {count_of(len(done['data_files']) + len(done['files']), 'file')} again and verified them")
    if found["remains"]:
        put("Damage remains: see above. `ckpt verify --all` lists which checkpoints are intact")
