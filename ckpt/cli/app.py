"""The command `ckpt`: look at runs from a shell, or ask a running one to save. It needs no torch.

Exit codes: 0 fine or equal; 1 damaged or different; 2 wrong usage, or it cannot be read (stderr says why).

What commands share, and how they show things, is in `ckpt.cli.terminal`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ckpt import __version__
from ckpt.checkpoint import losses
from ckpt.cli.terminal import (
    SAYING,
    OnBytes,
    count_of,
    example,
    human,
    json_option,
    opened,
    place_option,
    print_few,
    print_json,
    print_table,
    progress,
    safe,
    say,
    short,
    split_step,
    step_option,
    told,
)
from ckpt.errors import CheckpointError, CorruptError, FormatError, NoCheckpointError, NotFoundError, StoreError
from ckpt.events import log as logger
from ckpt.faults.report import ADVICE, MAX_REPORT, Fault, incidents
from ckpt.faults.report import PREFIX as FAULTS
from ckpt.format.digest import file_digest
from ckpt.format.manifest import MAX_JSON, REDO, Attempt, owner, part_key, rank_and_try, read_format
from ckpt.format.typed_json import decoded
from ckpt.runlog.log import Commit, RunLog
from ckpt.store import Store, folder_of, get_small

if TYPE_CHECKING:  # what `ls` need not wait for is imported where it is used
    pass

PARALLEL = 64  # small files read at once
RECENT = 4  # incarnations
NAMED = re.compile(r"\b(packs|parts|index)/[\w.-]+\.(safetensors|json)\b")  # a file of a checkpoint, in a message


ELSEWHERE = {  # commands, by the modules that have them
    "copy": "maintain",
    "diff": "diff",
    "doctor": "doctor",
    "gc": "maintain",
    "import": "convert",
    "keep": "maintain",
    "plan": "plan",
    "prune": "maintain",
    "repair": "repair",
    "report": "report",
    "restore": "convert",
    "top": "top",
    "trigger": "trigger",
}


class Commands(click.Group):
    """Those of this module, and others, which are imported when they are asked for: `ls` should not wait for them."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *ELSEWHERE])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in ELSEWHERE:
            return super().get_command(context, name)
        module = importlib.import_module(f"ckpt.cli.{ELSEWHERE[name]}")
        command: click.Command = getattr(module, "import_" if name == "import" else name)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt")
def cli() -> None:
    """Look at runs of everystep. URL is what a Checkpointer was given: a folder, or a URL such as s3://bucket/run1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    logger.addHandler(SAYING)  # once, however often this is called
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name need not fit the terminal's encoding
    try:
        status = cli.main(arguments, prog_name="ckpt", standalone_mode=False)
        print(end="", flush=True)
        return int(status or 0)
    except click.ClickException as error:
        error.show()
    except click.Abort:
        return 130
    except SystemExit:  # click's way of leaving when a pipe is closed
        return 141  # as a shell says of SIGPIPE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails as well
        return 141
    except OSError as error:  # of stdout: stores have errors of their own
        say(f"cannot write: {error.strerror or error}")
    except CheckpointError as error:
        say(f"{error}{hint(sys.argv[1:] if arguments is None else arguments, error)}")
        if error.advice:
            say(error.advice)
    except MemoryError:
        say("not enough memory for this")
    return 2


def hint(arguments: Sequence[str], error: CheckpointError) -> str:
    """For those who gave URL@STEP, as `ckpt diff` takes it, to another command."""
    if not isinstance(error, FormatError) or arguments[:1] not in (["show"], ["verify"], ["repair"], ["restore"]):
        return ""
    step = next((step for _, step in map(split_step, map(str, arguments[1:])) if step is not None), None)
    return "" if step is None else f" (use --step {step})"


@cli.command(epilog=example("ckpt ls runs/exp1", "ckpt ls runs/exp1 --json | jq '.checkpoints[0].step'"))
@click.argument("url")
@place_option
@json_option
def ls(url: str, as_json: bool) -> int:
    """List the checkpoints of a run, newest first.

    The size is what each wrote itself: an increment uses files of older ones besides.
    """
    found = asyncio.run(_ls(url))
    if as_json:
        return print_json(found)
    rows = []
    for row in found["checkpoints"]:
        when = datetime.fromisoformat(row["created"]).astimezone().strftime("%F %T") if row["created"] else "?"
        history = "newest" if row["newest"] else "" if row["in_history"] else "undone by a rollback"
        history = "not finite" if row["finite"] is False else history
        kept = "" if row["kept"] is None else f"kept: {row['kept']}"
        history = ", ".join(part for part in (history, kept) if part)
        size, kind = "gone" if row["gone"] else human(row["bytes"]), "full" if row["full"] else "increment"
        rows.append((row["step"], row["attempt"], when, size, kind, row["ranks"], row["reason"], history))
    print(safe(found["url"]))
    print_table(("step", "attempt", "when", "size", "kind", "ranks", "why", "history"), rows)
    written = human(sum(row["bytes"] for row in found["checkpoints"]))
    count = count_of(len(rows), "checkpoint")
    print(f"{count}, {written} written, {human(found['bytes_in_files'])} in files")
    for line in redo_lines(found["redo"]):
        print(line)
    return 0


def redo_lines(steps: list[dict[str, Any]]) -> Iterator[str]:
    """What the redo log leads to beyond the newest checkpoint."""
    if steps:
        last = steps[-1]
        how = "is loaded" if last["from_checkpoint"] else "is read from the log"
        size = human(sum(one["stored"] for one in steps) // len(steps))
        yield (
            f"redo log: steps {steps[0]['step']} to {last['step']}, {size} each; to restore the last one, step "
            f"{last['base']} {how}, and {count_of(last['redone'], 'step')} after it redone"
        )


async def _ls(url: str) -> dict[str, Any]:
    async with opened(url) as log:
        commits, created = newest_first(log), []
        for start in range(0, len(commits), PARALLEL):
            created += await asyncio.gather(*(created_at(log, c) for c in commits[start : start + PARALLEL]))
        history = {c.attempt: i for i, c in enumerate(log.state.lineage())}
        sizes, in_files = await sizes_of(log, commits)
        rows = [
            {
                "step": c.step,
                "attempt": str(c.attempt),
                "created": when,
                "bytes": size or 0,
                "gone": size is None,
                "full": c.full,
                "ranks": c.world,
                "reason": c.reason,
                "finite": c.finite,
                "newest": history.get(c.attempt) == 0,
                "in_history": c.attempt in history,
                "kept": log.state.kept.get(c.attempt),
            }
            for c, when, size in zip(commits, created, sizes, strict=True)
            if c.attempt in log.state.commits  # not retired while we looked
        ]
        return {
            "url": log.store.url,
            "damaged_records": log.state.damaged,
            "may_be_lost": sorted({a.step for one in await losses.of_log(log) for a in one.attempts}),
            "bytes_in_files": in_files,
            "checkpoints": rows,
            "redo": redo_of(log),
        }


def redo_of(log: RunLog) -> list[dict[str, Any]]:
    """What the redo log leads to. What it does not lead to any more is said on stderr."""
    if not has_redo(log):
        return []
    from ckpt.restore import redo_logs

    logs = redo_logs.look(log.store.url, verify=False)
    found = redo_logs.redoable(logs, log)
    if damage := logs.losses({**log.state.held, **log.state.commits}, log.state.acquires):
        say(f"WARNING: {told(log, damage, [Attempt.parse(one.attempt) for one in found])}")
    return [asdict(one) for one in found]


def has_redo(log: RunLog) -> bool:
    root = folder_of(log.store.url)
    return root is not None and (root / REDO).is_dir()


async def created_at(log: RunLog, commit: Commit) -> str | None:
    """When rank 0 finished its part, in UTC; None, and a word about it, if the part cannot tell."""
    try:
        rank, number, digest = commit.parts[0]
        key = part_key(commit.attempt, rank, number)
        raw = await get_small(log.store, key, MAX_JSON)
        if file_digest(raw) != digest:  # with the right digest, the part needs no check field by field
            raise CorruptError(f"{key} is not the part that was committed: its digest differs")
        return datetime.fromtimestamp(json.loads(bytes(raw))["created"], UTC).isoformat(timespec="seconds")
    except (StoreError, CorruptError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        from ckpt.checkpoint.read import still_live

        if await still_live(log, commit):
            say(f"WARNING: step {commit.step} is damaged: {error}. `ckpt verify --all` says more")
        return None


@cli.command(epilog=example("ckpt show runs/exp1", "ckpt show runs/exp1 --step 500 --only 'model.*.weight'"))
@click.argument("url")
@step_option
@click.option("--only", metavar="PATTERN", help="Only tensors whose name matches this shell pattern.")
@place_option
@json_option
def show(url: str, step: int | None, only: str | None, as_json: bool) -> int:
    """Say what a checkpoint consists of, and how that is stored: tensors, plain values, files.

    Stored: bytes that this checkpoint wrote for a tensor. Held: how its pieces are stored; raw, as planes (compressed),
    as delta (the difference to an older one), derived (bf16 that is the rounding of fp32, which costs nothing), as
    reference to a file of an older checkpoint, or as another tensor, which has the same bytes.
    """
    found = asyncio.run(_show(url, step, only))
    if as_json:
        return print_json(found)
    print(safe(f"step {found['step']} of {found['url']}, attempt {found['attempt']}, ranks: {found['ranks']}"))
    titles = ("tensor", "dtype", "shape", "size", "stored", "held", "same memory as")
    print_table(titles, [tensor_row(t) for t in found["tensors"]])
    if only is None:
        print_table(("component", "kind"), [(c["path"], c["kind"]) for c in found["components"]])
        print_table(("value", "type", "is"), [(v["path"], v["type"], short(v["value"])) for v in found["values"]])
        packs = [(p["key"], human(p["size"]), human(p["used"]), "" if p["own"] else p["step"]) for p in found["packs"]]
        print_table(("pack", "size", "used", "of step"), packs)
    print(f"{found['distinct_tensors']} tensors, {human(found['tensor_bytes'])}")
    for line in [*storage_lines(found), *saving_lines(found), *redo_lines(found["redo"])] if only is None else ():
        print(safe(line))
    return 0


def saving_lines(found: dict[str, Any]) -> Iterator[str]:
    """How often the run saves now, where that was found out, and why."""
    if found["cadence"]:
        yield 'saved, as every="auto" has found out:'
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


async def _show(url: str, step: int | None, only: str | None) -> dict[str, Any]:
    from ckpt.checkpoint import describe, ledger_files, read
    from ckpt.cli.report import cadence_lines

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
            "values": [
                {"path": path, "type": type(value).__name__, "value": describe.jsonable(value)}
                for start in entries
                for path, value in describe.leaves_of(entries, start)
            ],
            "packs": [
                {**asdict(pack), **_whose(pack.key, manifest.attempt), "used": used.get(pack.key, 0)}
                for pack in packs.values()
            ],
        }


def _redone_instead(error: NoCheckpointError, step: int | None, redone: list[dict[str, Any]]) -> NoCheckpointError:
    """What was asked for may be a step of the redo log."""
    found = next((one for one in redone if step in (None, one["step"])), None)
    if found is None:
        return error
    return NoCheckpointError(
        f"{error}. Step {found['step']} is in the redo log, which leads to it from step {found['base']}: "
        f"`ckpt restore URL --step {found['step']} --to PATH` redoes it, and Checkpointer(...).restore(step=...) does"
    )


def _whose(key: str, attempt: Attempt) -> dict[str, Any]:
    whose = owner(key)
    return {"own": whose == attempt, "step": None if whose is None else whose.step}


@cli.command(epilog=example("ckpt verify runs/exp1", "ckpt verify runs/exp1 --all --json"))
@click.argument("url")
@step_option
@click.option("--all", "every", is_flag=True, help="Every checkpoint instead of the newest.")
@click.option(
    "--data/--no-data",
    default=True,
    help="--data, the default: read every byte that a restore would, in files of older checkpoints too, and decode it."
    " --no-data: only the log, the parts and tables, and the headers and sizes of the packs; quick, and blind to damage"
    " in tensors.",
)
@place_option
@json_option
def verify(url: str, step: int | None, every: bool, data: bool, as_json: bool) -> int:
    """Read every byte of a checkpoint and check it. Exit code 1 if anything is damaged, the log included.

    `ckpt repair` puts right what it finds, as far as that can be had somewhere.
    """
    if every and step is not None:
        raise click.UsageError("--step and --all exclude each other")
    found = asyncio.run(_verify(url, step, every, data))
    if as_json:
        print_json(found)
    else:
        print_table(("step", "attempt", "verdict"), [tuple(c.values())[:3] for c in found["checkpoints"]])
        for problems in (found["problems"], list(by_problem(found["checkpoints"]))):
            print_few(problems)
        if any(c["problems"] for c in found["checkpoints"]) or any(map(mendable, found["problems"])):
            print(safe(f"`ckpt repair {found['url']}` may mend it"))
    return 1 if found["problems"] or any(c["problems"] for c in found["checkpoints"]) else 0


def mendable(problem: str) -> bool:
    return not problem.startswith(("log record", "redo log"))


def by_problem(checkpoints: list[dict[str, Any]]) -> Iterator[str]:
    """What is wrong, once for all checkpoints that suffer from it."""
    from ckpt.maintain.prune import some

    steps: dict[str, list[int]] = {}
    for one in checkpoints:
        for problem in one["problems"]:
            steps.setdefault(problem, []).append(one["step"])
    for problem, who in steps.items():
        yield f"step{'s' * (len(who) > 1)} {some(who)}: {problem}"


async def _verify(url: str, step: int | None, every: bool, data: bool) -> dict[str, Any]:
    async with opened(url, whole=True) as log:
        problems = [f"log record {seq} is damaged or missing" for seq in log.state.damaged]
        problems += [one.reason for one in await losses.of_log(log) if one.attempts]
        problems += await asyncio.to_thread(_redo_problems, log, data)
        try:
            read_format(await log.store.get("FORMAT.json"))
        except (CorruptError, StoreError) as error:  # the log made up for it
            problems.append(str(error))
        commits = to_verify(log, step, every)
        total = await bytes_to_read(log, commits) if data and sys.stderr.isatty() else 0
        with progress("verifying", total) if total else contextlib.nullcontext() as on_bytes:
            checkpoints = [await examine(log, commit, on_bytes, data=data) for commit in commits]
        return {"url": log.store.url, "data": data, "problems": problems, "checkpoints": checkpoints}


def _redo_problems(log: RunLog, data: bool) -> list[str]:
    """What is damaged in redo logs; the torn end that a killed job leaves is not."""
    if not has_redo(log):
        return []
    from ckpt.restore import redo_logs

    return [f"redo log: {problem}" for problem in redo_logs.look(log.store.url, verify=data).problems]


def to_verify(log: RunLog, step: int | None, every: bool) -> list[Commit]:
    """NoCheckpointError if there is none; but if log records are damaged, that is what has to be said."""
    from ckpt.checkpoint import read

    if every and log.state.commits:
        return newest_first(log)
    if step is None and log.state.damaged and not log.state.lineage():
        return []
    return [read.choose(log, step)]


async def bytes_to_read(log: RunLog, commits: list[Commit]) -> int:
    """Of tensors, in all files that these checkpoints use; of what is damaged, as far as that can be known."""
    from ckpt.checkpoint import read

    total = 0
    for commit in commits:
        with contextlib.suppress(CorruptError, StoreError):
            table = (await read.load_manifest(log.store, commit)).table
            total += sum(b.nbytes for b in read.plan_reads(table, range(table.owned), far=log.store.remote))
    return total


async def examine(log: RunLog, commit: Commit, on_bytes: OnBytes = None, *, data: bool = True) -> dict[str, Any]:
    """One checkpoint's verdict: sound, damaged, or retired while we looked."""
    from ckpt.checkpoint import read

    problems = await read.verify(log.store, commit, data=data, on_bytes=on_bytes)
    verdict = "damaged" if problems else "sound"
    if problems and not await read.still_live(log, commit):
        problems, verdict = [], "retired"
    problems = await plainly(log.store, problems)
    return {"step": commit.step, "attempt": str(commit.attempt), "verdict": verdict, "problems": problems}


async def plainly(store: Store, problems: list[str]) -> list[str]:
    """The same, but of a file that is not there only that."""
    found, gone = list[str](), dict[str, bool]()
    for problem in problems:
        if named := NAMED.search(problem):
            key = named[0]
            if key not in gone:
                try:
                    await store.head(key)
                    gone[key] = False
                except StoreError as error:
                    gone[key] = isinstance(error, NotFoundError)
            problem = f"{key} is gone" if gone[key] else problem
        found.append(problem)
    return list(dict.fromkeys(found))


@cli.command(epilog=example("ckpt faults runs/exp1", "ckpt faults runs/exp1 --json | jq '.incidents[-1][0].exit_code'"))
@click.argument("url")
@click.option("--last", type=click.IntRange(min=1), help="Only so many of the newest incidents.")
@place_option
@json_option
def faults(url: str, last: int | None, as_json: bool) -> int:
    """What went wrong in a run: who saw it first, where every rank stood, what was saved, what to do.

    Accounts of several ranks of the same incident come together, the earliest first.
    """
    found = asyncio.run(_faults(url))
    if last is not None:
        found["incidents"] = found["incidents"][-last:]
    if as_json:
        return print_json(found)
    print(safe(found["url"]))
    rows = []
    for incident in found["incidents"]:
        first = incident[0]
        when = datetime.fromisoformat(first["time"]).astimezone().strftime("%F %T")
        durable = max((s["step"] for one in incident for s in one["saved"] if not s["error"]), default="nothing")
        ranks = " ".join(str(one["rank"]) for one in incident)
        rows.append((when, first["kind"], ranks, durable, first["summary"], ADVICE.get(first["advice"], "")))
    print_table(("when", "what", "ranks", "saved", "account", "advice"), rows)
    return 0


async def _faults(url: str) -> dict[str, Any]:
    async with opened(url) as log:
        accounts = []
        async for info in log.store.list(FAULTS):
            try:
                raw = await get_small(log.store, info.key, MAX_REPORT)
                accounts.append(Fault.from_json(decoded(raw)))
            except (CorruptError, StoreError, ValueError, RecursionError) as error:
                say(f"WARNING: {info.key} cannot be read: {error}")
        found = [[one.to_json() for one in incident] for incident in incidents(accounts)]
        return {"url": log.store.url, "incidents": found}


# -- what commands share --


def newest_first(log: RunLog) -> list[Commit]:
    return sorted(log.state.commits.values(), key=lambda c: c.attempt, reverse=True)


async def sizes_of(log: RunLog, commits: list[Commit]) -> tuple[list[int | None], int]:
    """Bytes of the packs that each checkpoint wrote: not those of older ones that it uses, nor of tries that failed.

    None if a full one has no pack of some part any more. And the bytes of all packs there are.
    """
    sizes = {(c.attempt, rank, number): 0 for c in commits for rank, number, _ in c.parts}
    there, total = set(), 0
    async for info in log.store.list("packs/"):
        attempt = owner(info.key)
        total += info.size
        if attempt is not None and (key := (attempt, *rank_and_try(info.key))) in sizes:
            sizes[key] += info.size
            there.add(key)
    found: list[int | None] = []
    for commit in commits:
        mine = [(commit.attempt, rank, number) for rank, number, _ in commit.parts]
        gone = commit.full and not there.issuperset(mine)
        found.append(None if gone else sum(sizes[key] for key in mine))
    return found, total
