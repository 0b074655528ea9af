"""`ckpt diff`: compare two checkpoints. It needs no GPU, and little memory because it reads tensors in windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpt.core.checkpoint.reference import matches
from ckpt.errors import UsageError
from ckpt.tools.cli.arguments import files
from ckpt.tools.cli.origins import as_option, only_option, open_either
from ckpt.tools.cli.terminal import act, example, look_options, print_json, print_table, progress, put, short
from ckpt.units import count_of

if TYPE_CHECKING:  # imported only where it is used, so that `ls` starts quickly
    from ckpt.tools.convert.source import Origin

Found = dict[str, Any]
WORST = 10  # maximum differences of each kind that are shown without --all
OTHERS = ("difference", "name", "A", "B")
CHANGED = ("tensor", "elements", "differing", "largest", "relative", "cosine")


@click.command(
    epilog=example(
        "ckpt diff runs/exp1@500 runs/exp1@600",
        "ckpt diff runs/exp1 exports/hf --only 'model.*' --json",
    )
)
@click.argument("a", shell_complete=files)
@click.argument("b", shell_complete=files)
@only_option
@as_option
@click.option("--all", "every", is_flag=True, help=f"Show all differences, not only the {WORST} largest.")
@look_options
def diff(a: str, b: str, only: tuple[str, ...], at: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Compare two checkpoints. Each is a RUN, a RUN@STEP, or files that `ckpt import` accepts.

    For each tensor that differs, print how many elements differ, the largest absolute difference, the largest relative
    difference, and the cosine of the angle between both tensors. Tensors of different dtypes are compared too. Only
    tensors whose digests differ are read. The exit code is 1 if anything differs. A summary comes first, then the
    largest differences.

    elements: number of elements; differing: number of elements that differ; largest: largest absolute difference;
    relative: largest difference relative to the larger value, 0 to 2; cosine: 1 if they have the same direction.
    """
    found = act(_diff(a, b, only, at), so_far=lambda: "Nothing was changed")
    if as_json:
        print_json(found)
    else:
        show(found, every)
    return 0 if found["equal"] else 1


async def _diff(a: str, b: str, only: Sequence[str], at: tuple[str, ...]) -> Found:
    from ckpt.tools import describe
    from ckpt.tools.convert import tensor_diff
    from ckpt.tools.describe import jsonable

    async with open_either(a, at) as one, open_either(b, at) as two:
        (here, entries_a), (there, entries_b) = (sides_of(origin, only) for origin in (one, two))
        if only and not any((here, there, entries_a, entries_b)):
            raise UsageError(
                f"no name matches {' or '.join(map(repr, only))}: `ckpt show` lists the names; * matches any text"
            )
        shared = [t for name, t in here.items() if name in there]
        alike = [
            t for t in shared if t.shape == there[t.name].shape and tensor_diff.comparable(t.dtype, there[t.name].dtype)
        ]
        met = {(one.names[t.name], two.names[t.name]): t.name for t in reversed(alike)}  # compare shared tensors once
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
    """Return for each name all names that refer to the same tensor."""
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(origin.names[name], set()).add(name)
    return {name: frozenset(groups[origin.names[name]]) for name in names}


def sides_of(origin: Origin, only: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the selected tensors by name, and the selected plain values."""
    from ckpt.tools import describe
    from ckpt.tools.convert.source import entry_matches

    tensors = describe.all_names(origin.tensors, origin.names)
    entries = origin.plain(lambda path: not only or entry_matches(path, only))
    return {n: t for n, t in tensors.items() if not only or matches(n, only)}, entries


def summary(found: Found) -> str:
    """Return "equal", or the number of differing entries of each kind."""
    counts = {
        "only in A": len(found["only_in_a"]),
        "only in B": len(found["only_in_b"]),
        "of another shape or dtype": len(found["changed"]),
        "with other bytes": len(found["tensors"]),
    }
    parts = [f"{count_of(count, 'tensor')} {what}" for what, count in counts.items() if count]
    if found["values"]:
        parts.append(f"{count_of(len(found['values']), 'plain value')} that differ")
    return "equal" if found["equal"] else f"different: {', '.join(parts)}"


def worst_first(row: dict[str, Any]) -> float:
    """Return a sort key that puts NaN differences first, and then the largest differences."""
    most = row["max_abs_difference"]
    return -float(most) if isinstance(most, (int, float)) else -math.inf


def show(found: Found, every: bool) -> None:
    put(summary(found))
    if not found["equal"]:
        print()
    more = 0
    for titles, rows in ((OTHERS, list(other_rows(found))), (CHANGED, list(changed_rows(found)))):
        if rows:
            print_table(titles, rows if every else rows[:WORST])
        more += 0 if every else len(rows[WORST:])
    if more:
        put(f"--all shows {count_of(more, 'more difference')}")


def other_rows(found: Found) -> Iterator[tuple[object, ...]]:
    """Yield rows for entries that are on one side only, or that differ in shape, dtype or kind."""
    yield from (("only in A", name, "", "") for name in found["only_in_a"])
    yield from (("only in B", name, "", "") for name in found["only_in_b"])
    for row in found["changed"]:
        yield "changed", row["name"], *(f"{t['dtype']} {t['shape']}" + same_as(t) for t in (row["a"], row["b"]))
    for row in found["values"]:
        yield "value", row["path"], *("" if row["only_in"] not in (None, side) else short(row[side]) for side in "ab")


def changed_rows(found: Found) -> Iterator[tuple[object, ...]]:
    """Yield rows for tensors that differ only in their values, the largest difference first."""
    for row in sorted(found["tensors"], key=worst_first):
        numbers = (row[key] for key in ("max_abs_difference", "max_rel_difference", "cosine"))
        yield row["name"], row["elements"], row["differing"], *("" if n is None else brief(n) for n in numbers)


def brief(number: object) -> str:
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def same_as(tensor: dict[str, Any]) -> str:
    return f", shares memory with {tensor['alias_of']}" if tensor["alias_of"] else ""
