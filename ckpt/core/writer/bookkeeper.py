"""Records the run metrics of a trainer in its writer, so that they include everything until the trainer's death.

    the trainer's heartbeat and messages, saves, faults
        -> Account (ckpt.core.cadence.ledger) -> ledger/ in the durable tiers
        -> the cost of saves (ckpt.core.cadence.cadence) -> save intervals

An account has the run metrics of one trainer process. The trainer sends no message for a step, so the writer reads the
last steps from shared memory every half second.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import ParamSpec

from ckpt.core.cadence import cadence, ledger
from ckpt.core.cadence.cadence import MEMORY, Auto, Meter, SaveCost, TierCadence
from ckpt.core.cadence.ledger import (
    TOGETHER_S,
    Account,
    Decision,
    End,
    LandedSave,
    Restore,
    SaveTotals,
    SeenFault,
    StepRow,
)
from ckpt.core.checkpoint import lease
from ckpt.core.checkpoint.lease import Lease, LedgerFiles, find, read_back
from ckpt.core.checkpoint.open_tier import OpenTier
from ckpt.core.ipc.heartbeat import Heartbeat, Process, StepDone, boot_id, namespace
from ckpt.core.ipc.messages import Books, CadenceNote, CadenceOf, Introduce, Note, RestoreDone
from ckpt.events import log
from ckpt.store import LEASE

LOOK_S = 0.5  # interval between two reads of the heartbeat
ROW_S = 10.0  # a row covers this many seconds of training; the first `FINE_ROWS` rows cover one step each
PATIENCE_S = 5.0  # timeout to store the metrics when the writer ends
DECIDE_S, DECIDE_MOST_S = 2.0, 300.0  # shortest and longest pause between two checks of the cost of saves


@dataclass(slots=True)
class Write:
    """The write of a checkpoint to a durable tier."""

    url: str
    began: float
    ended: float | None = None
    failed: bool = False
    stored: int = 0


@dataclass(slots=True)
class _OpenRow:
    """The last row of an account, to which steps are still added."""

    row: StepRow | None = None
    since: float = 0.0

    def add(self, rows: list[StepRow], new: StepRow) -> None:
        """Add some steps. Each of the first steps of an account gets its own row."""
        if len(rows) < ledger.FINE_ROWS:
            rows.append(new)
            return
        if self.row is None:
            self.since = new.at
        self.row = new if self.row is None else self.row.merged(new)
        if self.row.at - self.since >= ROW_S:
            self.finish(rows)

    def finish(self, rows: list[StepRow]) -> None:
        if self.row is not None:
            ledger.append(rows, self.row)
        self.row = None


P = ParamSpec("P")


def harmless(event: Callable[P, None]) -> Callable[P, None]:
    """Log all exceptions of a method, because an error in the metrics must not disturb training or saves."""

    @functools.wraps(event)
    def safe(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            event(*args, **kwargs)
        except Exception:
            log.warning("failed to record an event in the run metrics", exc_info=True)

    return safe


class CadenceAdvice:
    """Proposes save intervals for one trainer. `tiers`: the intervals of memory and of each tier. `meter`: measures the
    trainer's steps. `past`: the accounts of earlier job attempts."""

    def __init__(self, tiers: Iterable[CadenceOf], meter: Meter, *, decides: bool = False) -> None:
        self._tiers = [_cadence(one) for one in tiers]
        self._meter = meter
        self.decides = decides and any(isinstance(one.every, Auto) for one in self._tiers)
        self.past: list[Account] = []
        self._look_at, self._pause_s = time.monotonic() + DECIDE_S, DECIDE_S

    def decided(self, decision: Decision) -> None:
        """Use the save intervals that the ranks have agreed on."""
        self._tiers = [
            TierCadence(one.name, one.every, decision.every.get(one.name, one.now), one.remote) for one in self._tiers
        ]

    def propose(self, account: Account) -> Decision | None:
        """Return better save intervals if a check is due and the measured costs justify a change, else None."""
        now, step_s = time.monotonic(), self._meter.step_s
        if not self.decides or now < self._look_at or step_s is None:
            return None
        costs = {one.name: cost for one in self._tiers if (cost := self._cost(one.name)) is not None}
        settled = all(cadence.enough(one, costs.get(one.name)) for one in self._tiers)
        self._pause_s = min(DECIDE_MOST_S, 1.5 * self._pause_s) if settled else DECIDE_S
        self._look_at = now + self._pause_s
        known = cadence.history([*self.past, account])
        held = account.decisions[-1] if account.decisions else None
        decision = cadence.decide(self._tiers, account.step, step_s, costs, known, account.world, held)
        return decision if cadence.differs(decision, self._tiers) else None

    def _cost(self, name: str) -> SaveCost | None:
        meter = self._meter
        if name == MEMORY:
            save_s, lasted_s, samples, unsure_s = meter.snapshot_s, 0.0, meter.snapshots, meter.snapshot_unsure_s
        else:
            save_s, lasted_s = meter.save_s(name), meter.write_s(name)
            samples, unsure_s = meter.saves(name), meter.save_unsure_s(name)
        return None if save_s is None else SaveCost(save_s, lasted_s, samples, unsure_s)


def _cadence(one: CadenceOf) -> TierCadence:
    return TierCadence(one.name, one.every if isinstance(one.every, int) else Auto(*one.every), one.now, one.remote)


class Bookkeeper:
    """Records run metrics in the event loop. `tiers`: function that returns the durable tiers. `tell`: sends notes."""

    def __init__(self, tiers: Callable[[], list[OpenTier]], tell: Callable[[Note], None]) -> None:
        self._tiers, self._tell = tiers, tell
        self.account: Account | None = None
        self.token = secrets.token_hex(8)  # identifies this writer in the leases that it renews
        self._lease: Lease | None = None
        self._heartbeat: Heartbeat | None = None
        self._meter = Meter()
        self._calls = 0
        self._before: StepDone | None = None  # the previous step
        self._from = 0.0  # time when the run was opened or last restored
        self._fresh = True  # True until the first step after `_from`
        self._taken_up = False  # True if the account continues that of an earlier writer
        self._previous: Account | None = None  # account of the previous trainer, for late fault reports
        self._row = _OpenRow()
        self._writes: list[Write] = []
        self._filing = LedgerFiles(tiers)
        self._taking_up = False  # True while the account of an earlier writer is being read
        self._advice = CadenceAdvice([], self._meter)
        self._task: asyncio.Task[None] | None = None

    # -- one trainer process --

    @harmless
    def begin(self, request: Introduce, books: Books, heartbeat: int, pid: int) -> None:
        """Begin the account of a trainer that has opened the run. `heartbeat`: the descriptor of its heartbeat."""
        self.ended("died")  # ends the previous account, if the trainer's end was not reported
        self.stop()
        self._previous = self.account
        wall, mono = time.time(), time.monotonic()
        self.account = Account(
            term=books.first_term,
            rank=request.rank,
            world=request.world,
            host=socket.gethostname(),
            boot=boot_id(),
            namespace=namespace("pid"),
            pid=pid,
            url=request.url,
            inode=lease.inode_of(request.url),
            anchor=(wall, mono),
            born=Process.of(pid).born,
            opening=request.opening,
            opened=request.opened,
            kept=mono,
            versions=books.versions,
        )
        term = books.first_term if request.restored is None else request.restored.term
        self._lease = Lease.of_trainer(term, self.token, request.rank, pid)
        self._heartbeat = Heartbeat.attach(heartbeat)
        self._meter, self._row, self._writes = Meter(), _OpenRow(), []
        self._calls, self._before, self._from, self._fresh = 0, None, self.account.opened, True
        self._taken_up = False
        self._advice = CadenceAdvice(books.places, self._meter, decides=books.decides)
        self._taking_up = books.again
        if books.cadence:
            self.account.decisions.append(Decision(**books.cadence))
        self._task = asyncio.get_running_loop().create_task(self._look())

    def stop(self) -> None:
        """Stop reading the heartbeat of the trainer."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def look_by_hand(self) -> None:
        """Stop the periodic reads, because tests call `look` themselves."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        """Read the trainer's heartbeat periodically until the trainer has ended."""
        if self._taking_up:
            await self._take_up()
        self.keep(now=True)
        advice, account = self._advice, self.account
        if advice.decides:
            advice.past = [one for one in await read_back(self._tiers()) if account and one.term != account.term]
        while self.account is not None and self.account.end is None:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
                self.keep()
                if (decision := self._advice.propose(self.account)) is not None:
                    self._tell(CadenceNote(asdict(decision)))
            except Exception:
                log.warning("stopped recording the run metrics", exc_info=True)
                return

    async def _take_up(self) -> None:
        """Continue the account that an earlier writer stored. Until it is read, store nothing and count no steps."""
        account = self.account
        known = None if account is None else await find(self._tiers(), account.key)
        self._taking_up = False
        if account is None or account is not self.account:
            return
        if known is not None:
            account.restores[:0], account.faults[:0] = known.restores, known.faults
            account.decisions[:0] = known.decisions
            account.rows, account.step, account.beat = known.rows, known.step, known.beat
            for url, saves in known.saves.items():
                account.saves[url] = saves.plus(account.saves.get(url))
            account.landed[:0] = known.landed
            for bucket, count in known.stalls.items():
                account.stalls[bucket] = account.stalls.get(bucket, 0) + count
            last = known.restores[-1] if known.restores else None
            self._calls, self._taken_up = known.calls, True
            self._from = max(known.beat, 0.0 if last is None else last.at + last.seconds, account.opened)
        self.look()
        self.keep(now=True)

    # -- events --

    def look(self, until: float = math.inf) -> None:
        """Add the steps since the last call to the account, up to the time `until`."""
        if self._heartbeat is None or self.account is None or self._heartbeat.fd < 0 or self._taking_up:
            return
        calls, done = self._heartbeat.since(self._calls)
        missing, self._calls = calls - self._calls - len(done), calls
        for number, one in enumerate(done):
            if one.when > until:
                self._calls -= len(done) - number
                break
            self._take(one, 1 + missing)
            missing = 0
        self.account.kept, self.account.calls = time.monotonic(), self._calls
        horizon = self.account.beat
        self._writes = [w for w in self._writes if w.ended is None or w.ended > horizon]

    def _take(self, done: StepDone, steps: int) -> None:
        """Add one step to the account, or the last of several `steps` that were too fast to be read one by one."""
        account = self.account
        before = self._before or (done if self._taken_up else None)  # costs before the first known step are unknown
        assert account is not None
        start = max(self._from, self._before.when if self._before is not None else 0.0)
        paused = done.paused - (before.paused if before is not None else 0.0)
        seconds = max(0.0, done.when - start - paused)
        stalled = done.stalled - (before.stalled if before is not None else 0.0)
        saves = done.saves - (before.saves if before is not None else 0)
        skipped = done.skipped - (before.skipped if before is not None else 0)
        beside = [w for w in self._writes if w.began < done.when and (w.ended is None or w.ended > start)]
        quiet = not beside and saves == 0
        slowed = 0.0
        if steps == 1 and not self._fresh:  # the first step takes longer for reasons other than saves
            overlaps = (min(w.ended or done.when, done.when) - max(w.began, start) for w in beside)
            names = {w.url for w in beside}
            slowed = self._meter.step(seconds, stalled, saves > 0, names, max(overlaps, default=0.0))
        for write in beside:
            if write.ended is not None and write.ended <= done.when:
                self._meter.saved(write.url, None if write.failed else write.ended - write.began)
        self._before, self._fresh = done, False
        account.step, account.beat = done.step, done.when
        if saves > 0:
            bucket = ledger.stall_bucket(stalled / saves)
            account.stalls[bucket] = account.stalls.get(bucket, 0) + saves
        cost = (seconds, stalled, slowed, steps * quiet, paused, saves, skipped)
        self._row.add(account.rows, StepRow(done.when, done.step, steps, *cost))

    @harmless
    def restored(self, request: RestoreDone) -> None:
        """Record that the trainer has called restore()."""
        if self.account is None:
            return
        self.look(request.at)  # only steps before the restore, because later steps may already be done
        self._row.finish(self.account.rows)
        restore = Restore(**{name: getattr(request, name) for name in Restore.__dataclass_fields__})
        self.account.restores = ledger.bounded([*self.account.restores, restore])
        if self._lease is not None and restore.term:
            self._lease.term = restore.term
        self._from, self._fresh = restore.at + restore.seconds, True
        cost = (request.stalled, request.saves, request.skipped, request.paused)
        self._before = StepDone(0, self._from, *cost)  # so that the next step does not include earlier costs
        if restore.step is not None:
            self.account.step, self.account.beat = restore.step, max(self.account.beat, self._from)
        self.keep(now=True)

    @contextlib.contextmanager
    def saving(self, url: str, nbytes: int, step: int = -1) -> Iterator[Write]:
        """Record the write of a checkpoint to a durable tier. The block performs the write."""
        write = Write(url, time.monotonic())
        self._writes.append(write)
        account = self.account
        try:
            yield write
        except BaseException:
            write.failed = True
            raise
        finally:
            write.ended = time.monotonic()
            if account is not None:
                found, lasted = account.saves.setdefault(url, SaveTotals()), write.ended - write.began
                now = account.step if self._heartbeat is None else self._heartbeat.step
                behind = max(0, now - step) if step >= 0 else 0
                landed = LandedSave(url, write.ended, step, lasted, behind, nbytes, write.stored, write.failed)
                account.landed = ledger.thinned([*account.landed, landed])
                if write.failed:
                    found.failed += 1
                else:
                    found.count += 1
                    found.seconds += lasted
                    found.longest_s = max(found.longest_s, lasted)
                    found.nbytes += nbytes
                    found.stored += write.stored

    @harmless
    def fault(self, pid: int, seen: SeenFault) -> None:
        """Record a fault of the trainer with this process id. The trainer or another process may have detected it."""
        account = next((one for one in (self.account, self._previous) if one and one.pid == pid), None)
        if account is None:
            return
        seen.at = max(account.opening, seen.at)
        account.faults = ledger.bounded([*account.faults, seen])
        if account is self.account:
            self.keep(now=True)
        else:
            self._filing.put(account.key, lambda tier: account.to_bytes(), lease.ledger_interval_s, now=True)

    @harmless
    def ended(self, how: str) -> None:
        """Record that the trainer has closed, left or died. The end is now, or at an earlier fatal fault."""
        account = self.account
        if account is None or account.end is not None:
            return
        self.look()
        self._row.finish(account.rows)
        now = time.monotonic()
        since = account.beat - TOGETHER_S  # the trainer survived earlier faults, because it made more steps
        noticed = [seen.at for seen in account.faults if seen.ends and seen.at >= since and how != "closed"]
        account.end = End(how, max(min([now, *noticed]), account.beat), now)
        if self._lease is not None:
            self._lease.ended = how
        self.keep(now=True)

    @harmless
    def gone(self, pid: int) -> None:
        """Record that the trainer's process has ended. Processes of other trainers are ignored."""
        if self.account is not None and self.account.pid == pid and self.account.end is not None:
            self.account.end.gone = time.monotonic()
            self.keep(now=True)

    # -- storing --

    def keep(self, *, now: bool = False) -> None:
        """Store account and lease if their intervals have passed. With `now`, store them after any put under way."""
        account, held = self.account, self._lease
        if account is None or held is None or self._taking_up:
            return
        held.step = account.step
        self._filing.put(LEASE, lambda tier: self._renewal(held, tier), lease.lease_interval_s, now=now)
        self._filing.put(account.key, lambda tier: self._whole(account).to_bytes(), lease.ledger_interval_s, now=now)

    def _renewal(self, held: Lease, tier: OpenTier) -> bytes | None:
        """Return the next content of the lease, or None if the job has been fenced."""
        fenced = tier.log.state.term > held.number
        return None if fenced else held.renewal(tier.store)

    def _whole(self, account: Account) -> Account:
        """Return the account with the row that is still being filled."""
        if self._row.row is None or account is not self.account:
            return account
        return replace(account, rows=[*account.rows, self._row.row])

    async def finish(self) -> None:
        """Store all metrics before the writer ends. Wait at most `PATIENCE_S`."""
        try:
            if self._taking_up and self._task is not None:
                await asyncio.wait({self._task}, timeout=PATIENCE_S)
            self.keep(now=True)
            self.stop()
            await self._filing.finish(PATIENCE_S)
        except Exception:
            log.warning("failed to record the end of this job attempt in the run metrics", exc_info=True)

    @harmless
    def decided(self, decision: Decision) -> None:
        """Record the save intervals that the ranks have agreed on."""
        if self.account is None:
            return
        decision.at = time.monotonic()
        self.account.decisions = ledger.bounded([*self.account.decisions, decision])
        self._advice.decided(decision)
        self.keep(now=True)
