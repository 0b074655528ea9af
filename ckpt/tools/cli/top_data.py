"""Collect the current data of a run for `ckpt top`: query the run's writers on this machine, and read its location.

Each of these runs in its own thread, so that neither a stopped writer nor a hanging bucket blocks the display.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ckpt.core.cadence import ledger
from ckpt.core.cadence.ledger import Account
from ckpt.core.checkpoint.lease import account_keys, writer_keys
from ckpt.core.ipc import channel as link
from ckpt.core.ipc.messages import Look
from ckpt.core.log.run_log import RunLog
from ckpt.errors import CheckpointError, FormatError, NoCheckpointError, UsageError
from ckpt.guard import report
from ckpt.guard.report import Fault
from ckpt.store import Store, open_store
from ckpt.tools.cli.reading import fault_from, read_each
from ckpt.tools.cli.terminal import PATIENCE_S, print_err
from ckpt.tools.cli.top_view import RunStored, TopView
from ckpt.tools.observe.goodput.accounting import settled
from ckpt.tools.observe.telemetry.status import RankStatus, shown

ASK_S = 2.0  # seconds for a writer to reply
PLACES_S, PLACE_WAIT_S = 10.0, 10.0  # seconds between two reads of the run's location; timeout of one read
FIRST_S = 5.0  # seconds for the first read of the location, if no writer has replied
LEAVE_S = 1.0  # seconds for the threads to end at exit
MOST_STARTS, MOST_FAULTS = 64, 256  # maximum number of metrics files and of faults to read, newest first
ASKED_AT_ONCE = 32


class RunWatch:
    """Queries the run's writers on this machine, and reads the run's location."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.shown = shown(place)
        self._there = None if place.startswith("memory:") else StoreWatch(place)
        self._asking = ThreadPoolExecutor(ASKED_AT_ONCE, "ckpt-top")
        self._looks: list[RankStatus] = []
        self._silent: dict[int, str] = {}
        self._stop = threading.Event()

    def __enter__(self) -> RunWatch:
        if self._there is not None:
            self._there.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._asking.shutdown(wait=False, cancel_futures=True)
        if self._there is not None and not self._there.leave():
            status = _exit_code_of(exc[1])
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(status)  # do not wait for a thread that hangs in a store, because it cannot be ended

    def first(self, *, patient: bool) -> TopView:
        """Return the first state. Raise an error if there is no such run. `patient`: True waits for the run's location
        even if writers have replied."""
        self.ask()
        patient |= not (self._looks or self._silent)
        stored = None if self._there is None else self._there.wait(FIRST_S if patient else 0.0)
        if self._looks or self._silent:
            return self.view()
        if stored is None and self._there is None:
            raise UsageError(
                f"{self.shown}: this run has no writer on this machine that you can reach. Run the "
                "command as the user who runs the training"
            )
        if stored is not None and stored.missing:
            raise NoCheckpointError(f"{stored.error}. Give the folder or URL that a Checkpointer saves to")
        if stored is None or not stored.at:
            why = "it has not responded in time" if stored is None else stored.error
            raise UsageError(f"{self.shown} cannot be read: {why}")
        return self.view()

    def view(self) -> TopView:
        """Return the current state without waiting."""
        stored = None if self._there is None else self._there.stored
        known = stored if stored is not None and not (stored.missing and self._looks) else None
        if known is not None and known.seen_host == socket.gethostname() and not (self._looks or self._silent):
            known = replace(known, running=False)  # the metrics in the location lag behind the writers by one update
        reading = self._there is not None and stored is None
        return TopView(self.shown, tuple(self._looks), dict(self._silent), known, reading, time.time())

    def ask(self) -> None:
        """Query all writers of this run on this machine."""
        keys = writer_keys(self.place)
        looks, silent = list[RankStatus](), dict[int, str]()
        for number, found in zip(keys, self._asking.map(_ask, keys.values()), strict=True):
            if isinstance(found, RankStatus):
                # A trainer that is starting has not sent its rank to the writer yet, so use the local rank.
                looks.append(found if found.run else replace(found, rank=number))
            elif found:
                silent[number] = found
        self._looks, self._silent = looks, silent

    def follow(self, interval_s: float) -> None:
        """Query the writers repeatedly, in a background thread."""

        def work() -> None:
            while not self._stop.wait(interval_s):
                with contextlib.suppress(Exception):  # the next query repeats whatever failed
                    self.ask()

        threading.Thread(target=work, name="ckpt-top-ask", daemon=True).start()


def writers_here() -> list[RankStatus | tuple[int, str]]:
    """Return the state of each writer of this user on this machine, or its process id (0 if unknown) and the error."""
    keys = link.all_keys()
    with ThreadPoolExecutor(ASKED_AT_ONCE, "ckpt-top") as asking:
        looks = list(asking.map(_ask, keys))
    found = zip(keys, looks, strict=True)
    return [(link.holder(key) or 0, look) if isinstance(look, str) else look for key, look in found if look]


def _exit_code_of(error: object) -> int:
    """Print an error, which would be lost because the process exits immediately. Return its exit code."""
    if error is None:
        return 0
    if isinstance(error, BrokenPipeError):
        return 141
    if isinstance(error, CheckpointError):
        for text in filter(None, (str(error), error.advice)):
            print_err(text)
    elif isinstance(error, BaseException):
        traceback.print_exception(error)
    return 2


def _ask(key: str) -> RankStatus | str:
    """Return the state that a writer reports, the reason why it did not reply, or "" if the writer does not exist."""
    channel = link.connect(key)
    if channel is None:
        return ""  # only the socket of a killed writer is left
    try:
        look = channel.ask(Look(), ASK_S)
        return "does not respond" if look is None else RankStatus.from_json(look)
    except (CheckpointError, KeyError, TypeError):
        return "is of another version"
    finally:
        channel.close()


class StoreWatch(threading.Thread):
    """Reads the run's location periodically in its own event loop."""

    def __init__(self, url: str) -> None:
        super().__init__(name="ckpt-top-place", daemon=True)
        self._url = url
        self._log: RunLog | None = None
        self.stored: RunStored | None = None
        self._first = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._accounts: dict[str, Account] = {}
        self._faults: dict[str, Fault | Exception] = {}

    def wait(self, timeout_s: float) -> RunStored | None:
        self._first.wait(timeout_s)
        return self.stored

    def leave(self) -> bool:
        """Stop reading. Return True once the thread has ended."""
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
        self.join(LEAVE_S)
        return not self.is_alive()

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._follow())

    async def _follow(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            while True:
                try:
                    await asyncio.wait_for(self._look(), PLACE_WAIT_S)
                except TimeoutError:
                    self._failed("it does not respond")
                except Exception as error:  # a driver may raise any kind of exception
                    self._failed(
                        str(error) or type(error).__name__, missing=isinstance(error, (FormatError, NoCheckpointError))
                    )
                self._first.set()
                await asyncio.sleep(PLACES_S)
        finally:
            if self._log is not None:
                with contextlib.suppress(Exception):
                    await self._log.store.aclose()

    def _failed(self, why: str, *, missing: bool = False) -> None:
        known = self.stored or RunStored(shown(self._url))
        self.stored = replace(known, error=why, missing=missing)

    async def _look(self) -> None:
        if self._log is None:
            log = RunLog(open_store(self._url, patience_s=PATIENCE_S))
            try:
                await log.open()
            except BaseException:
                await log.store.aclose()
                raise
            self._log = log
        state = await self._log.refresh()
        history = state.lineage()
        known = self.stored or RunStored(shown(self._url))
        self.stored = replace(
            known,
            at=time.time(),
            error="",
            missing=False,
            newest=history[0].step if history else None,
            checkpoints=len(history),
            ranks=history[0].world if history else 0,
        )
        await self._read(self._log.store)
        self.stored = self._account(self.stored)

    async def _read(self, store: Store) -> None:
        """Read the newest metrics and faults. Files of ended job attempts are read only once. Damaged files are
        skipped; `ckpt report` and `ckpt faults` list them."""
        names = (await account_keys(store))[-MOST_STARTS:]
        ended = {key for key, one in self._accounts.items() if one.end is not None and key not in names[-2:]}
        some = await read_each(store, [key for key in names if key not in ended], ledger.MAX_SIZE, Account.from_bytes)
        known = {key: self._accounts[key] for key in names if key in self._accounts}
        self._accounts = known | {key: one for key, one in some.items() if isinstance(one, Account)}
        names = sorted([info.key async for info in store.list(report.PREFIX)])[-MOST_FAULTS:]
        self._faults |= await read_each(
            store, [key for key in names if key not in self._faults], report.MAX_REPORT, fault_from
        )

    def _account(self, known: RunStored) -> RunStored:
        accounts = ledger.in_order(self._accounts.values())
        faults = sorted((one for one in self._faults.values() if isinstance(one, Fault)), key=lambda one: one.when)
        if seen := [one for one in faults if not one.asked]:
            incident = report.incidents(seen)[-1]  # its first report is the cause
            last_at = max(one.time for one in incident)
            known = replace(known, faults=len(seen), fault=incident[0].line, fault_at=last_at)
        if not accounts:
            return known
        last = accounts[-1]
        found = settled(accounts, faults, now=time.time()).statement
        return replace(
            known,
            seen_step=last.step if last.step >= 0 else None,
            seen_at=last.wall(last.beat if last.step >= 0 else last.kept),
            seen_rank=last.rank,
            seen_host=last.host,
            nearest=shown(last.url),
            ended="" if last.end is None else last.end.how,
            running=found.running,
            effective=found.effective if found.steps else None,
            starts=len(accounts),
        )
