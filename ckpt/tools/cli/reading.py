"""Read the run metrics and the fault reports of a run; shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

from ckpt.core.cadence import ledger
from ckpt.core.cadence.ledger import Account, Decision
from ckpt.core.checkpoint.concurrent import of_each
from ckpt.core.format.manifest import decoded
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CheckpointError, NotFoundError, is_unreadable
from ckpt.guard import report
from ckpt.guard.report import Fault
from ckpt.store import Store, get_small
from ckpt.tools.cli.terminal import print_err

T = TypeVar("T")


async def read_ledger(log: RunLog) -> tuple[list[Account], list[str]]:
    """Return the metrics of all job attempts in order, and the names of damaged files. Print these on stderr too."""
    found, damaged = await read_all(log.store, ledger.PREFIX, ledger.MAX_SIZE, Account.from_bytes, ledger.is_account)
    return ledger.in_order(found), damaged


async def read_all(
    store: Store, prefix: str, most: int, parse: Callable[[memoryview], T], wanted: Callable[[str], bool] = bool
) -> tuple[list[T], list[str]]:
    """Return all small objects under a prefix, parsed, and the names of damaged ones. Print these on stderr too."""
    keys = sorted([info.key async for info in store.list(prefix) if wanted(info.key)])
    found = await read_each(store, keys, most, parse)
    bad = {key: one for key, one in found.items() if isinstance(one, Exception)}
    for error in bad.values():
        if is_unreadable(error):  # the object may be intact, so it does not count as damaged
            raise error
    for key, error in bad.items():
        print_err(f"WARNING: skipped {key}, which is damaged: {error}")
    return [one for one in found.values() if not isinstance(one, Exception)], list(bad)


async def read_each(
    store: Store, keys: Sequence[str], most: int, parse: Callable[[memoryview], T]
) -> dict[str, T | Exception]:
    """Read small objects. Return each parsed object, or its error. Omit objects that were deleted in between."""

    async def read_one(key: str) -> T | Exception:
        try:
            return parse(await get_small(store, key, most))
        except (CheckpointError, ValueError, RecursionError) as error:
            return error

    found = zip(keys, await of_each(keys, read_one), strict=True)
    return {key: one for key, one in found if not isinstance(one, NotFoundError)}


async def read_faults(log: RunLog) -> tuple[list[Fault], list[str]]:
    """Return all fault reports, and the names of damaged reports, which are also printed on stderr."""
    return await read_all(log.store, report.PREFIX, report.MAX_REPORT, fault_from)


def fault_from(raw: memoryview) -> Fault:
    return Fault.from_json(decoded(raw))


def cadence_lines(accounts: Iterable[Account]) -> list[str]:
    """Return a line per tier with its save interval, its first step and its reason. Return [] without decisions."""
    decided = [one.decisions for one in ledger.in_order(accounts) if one.decisions]
    if not decided:
        return []
    newest = decided[-1][-1]
    return [cadence_line(place, decided[-1]) for place in newest.every]


def cadence_line(place: str, decisions: Sequence[Decision]) -> str:
    every = decisions[-1].every[place]
    *_, first = takewhile(lambda one: one.every.get(place) == every, reversed(decisions))
    how = "never" if every <= 0 else "every step" if every == 1 else f"every {every:,} steps"
    why = decisions[-1].why.get(place, "")
    return f"{place}: {how}, since step {max(0, first.step)}{': ' if why else ''}{why}"
