"""A durable tier as a writer holds it open: its log, what is on its way there, and how it is kept tidy.

Older checkpoints go only once a newer one has been read back and found sound. In a remote place that would cost as
much as the uploads themselves, so there it is done now and then: the newest one that was read back always stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt import events
from ckpt.core.checkpoint import commit, retention
from ckpt.core.checkpoint.encode import Encoder
from ckpt.core.checkpoint.incremental import Policy
from ckpt.core.checkpoint.read import verify
from ckpt.core.checkpoint.upload_stats import UploadStats
from ckpt.core.format.manifest import Attempt
from ckpt.core.format.manifest import owner as owner_of
from ckpt.core.ipc.notes import DamagedNote, SaidNote
from ckpt.core.ipc.protocol import Note
from ckpt.core.log.log import RunLog
from ckpt.core.log.records import Acquire, RunState, words_of
from ckpt.core.log.trimming import Trimmer
from ckpt.errors import CheckpointError, FencedError, RunGoneError, is_unreadable
from ckpt.store import Store, is_temporary, open_store, remember_options

READ_BACK_EVERY = 10  # checkpoints, in a remote place
LIST_EVERY = 32  # clean-ups, in a remote place: between them only what is known by name goes
OPENING_S = 30.0  # how long a remote place is tried when it is opened: an address may be wrong, and somebody waits
PATIENCE_S = 300.0  # and for each request later
REACHING = ("options", "environment", "max_mib_s", "max_inflight_mib")  # of a spec: how the place is reached


@dataclass
class OpenTier:
    """One durable tier of the run.

    `every`: steps between its checkpoints; `grace_s`: how long readers of what is retired may go on.
    """

    url: str
    keep: retention.Keep
    log: RunLog
    every: int = 1
    grace_s: float = 0.0
    role: commit.Role = field(default_factory=commit.Role)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    verified: set[Attempt] = field(default_factory=set)
    in_flight: set[Attempt] = field(default_factory=set)
    sources: dict[Attempt, set[Attempt]] = field(default_factory=dict)  # what attempts in flight may be built on
    promoting: Counter[Attempt] = field(default_factory=Counter)  # read from here, on their way to further tiers
    encoder: Encoder = field(default_factory=Encoder)
    anchors: dict[str, Attempt] = field(default_factory=dict)  # what further tiers take deltas against, by their URL
    read_back: set[Attempt] = field(default_factory=set)  # sound when they were read
    notes: Mapping[int, str] | None = None  # of steps that training wants kept; None: it has not said
    noting: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0  # checkpoints on their way here, those that wait for their turn among them
    spec: dict[str, Any] = field(default_factory=dict, repr=False)  # perhaps secrets
    opened: bool = True
    root: str = ""  # the id of the run that it must be, if that is known before it is opened
    outdated: list[Store] = field(default_factory=list)  # what is on its way goes on with them
    sweeping: asyncio.Task[None] | None = None
    sweeps: int = 0
    leaving: set[str] = field(default_factory=set)  # names that are deleted when the grace is over
    graces: set[asyncio.Task[None]] = field(default_factory=set)
    warned: set[Attempt] = field(default_factory=set)  # of what cannot be read the user has been told
    tidied: set[Attempt] = field(default_factory=set)  # aborted ones, of which nothing is left
    trimmer: Trimmer = field(default_factory=Trimmer)

    @property
    def store(self) -> Store:
        return self.log.store

    @property
    def flow(self) -> UploadStats:
        return self.encoder.flow

    @property
    def room(self) -> str:
        """What would make some in a folder whose disk is full."""
        there = self.log.state.commits
        if not (fewer := len(retention.choose(self.log.state, retention.Keep(3), self.verified))):
            return f"Free some elsewhere on that disk: the newest checkpoints are all that {self.url} keeps"
        what = f"`ckpt prune {self.url} --keep-last 3` deletes {fewer} of {len(there)} checkpoints"
        return f"Free some: {what}, and keep=3 on its Tier does so from now on"

    async def prepare(self) -> None:
        """Open the place now if it could not be opened before. Raises RunGoneError if it is no longer this run."""
        if not self.opened:
            if self.root:
                await self.log.check_same()
            await self.log.open()
            self.root, self.opened = self.log.root, True
        else:
            await self.log.check_same()

    def set_every(self, steps: int) -> None:
        """Another cadence."""
        self.every = steps
        self.encoder.policy = replace(self.encoder.policy, cadence=steps)

    def builds_on(self, attempt: Attempt, source: Attempt) -> None:
        """Keep a checkpoint from our own clean-up while an attempt that may use its packs is in flight."""
        self.sources = {one: found for one, found in self.sources.items() if one in self.in_flight}
        self.sources.setdefault(attempt, set()).add(source)

    def unpin(self, attempt: Attempt) -> None:
        self.promoting[attempt] -= 1
        if self.promoting[attempt] <= 0:
            del self.promoting[attempt]

    async def drop_uploads(self, mine: Acquire, wanted: set[Attempt]) -> None:
        """Abort what earlier incarnations were uploading when they died, and delete their temporary files."""

        def keep(key: str) -> bool:
            attempt = owner_of(key)
            if attempt is None:
                return not is_temporary(key)
            if attempt in wanted or attempt in self.in_flight:
                return True
            return attempt.epoch >= mine.epoch and not self.log.state.ended(attempt)

        try:
            dropped = await self.store.drop_uploads(keep)
        except CheckpointError as error:
            events.log.warning("unfinished uploads to %s cannot be looked for: %s", self.url, error)
            return
        if dropped:
            events.log.info("aborted %d unfinished uploads to %s", dropped, self.url)

    async def remove_rest(self, attempt: Attempt, rank: int | None = None) -> None:
        """Delete the files of an attempt that was being written when the run was deleted or replaced.

        No other run has files of these names. A restart in the emptied location would be refused because of them.
        Files of a committed checkpoint stay: the location may only have looked as if the run was gone.

        rank: whose files, default: those of all ranks.
        """
        if attempt in self.log.state.commits or attempt in self.log.state.held:
            return
        try:
            whose = f"{attempt}." if rank is None else f"{attempt}.{rank}."
            for own in (f"packs/{whose}", f"parts/{whose}", f"index/{attempt}-"):
                keys = [info.key async for info in self.store.list(own.partition("/")[0] + "/")]
                await self.store.delete_many([key for key in keys if key.startswith(own)])
        except CheckpointError as error:
            events.log.warning("files of step %d may be left in %s: %s", attempt.step, self.url, error)

    async def sweep(self, mine: Acquire, tell: Callable[[Note], None]) -> None:
        """Retention, and of old log records. Errors are no reason to stop anything else: clean-up is tried again after
        the next checkpoint."""
        try:
            await self._sweep(mine, tell)
        except FencedError:
            pass  # the next save says so
        except CheckpointError as error:
            events.log.warning("clean-up of %s has to wait: %s", self.url, error)
        await self.trimmer.step(self.log, mine)

    async def _sweep(self, mine: Acquire, tell: Callable[[Note], None]) -> None:
        await self.keep_noted(mine)
        await self._give_up_old(mine)
        state = self.log.state
        doomed = retention.choose(state, self.keep, self.verified) - self._pinned(state)
        full = not self.store.remote or self.sweeps % LIST_EVERY == 0
        left = set(state.aborted) - self.tidied
        if not doomed and not (left and full):
            return
        history = state.lineage()
        if not history:
            return  # all there is was undone by a rollback; the next checkpoint will make it superfluous
        newest = history[0]
        recent = {c.attempt for c in history[: READ_BACK_EVERY if self.store.remote else 1]}
        if not recent & self.verified:
            # What it took over from one that was read back need not be read again: it costs more than to write it.
            new = bool(newest.needs) and self.read_back.issuperset(newest.needs)
            problems = await verify(self.store, newest, new=new)
            if problems:
                # Others may have been committed on the damaged bytes while these were read.
                self.encoder.distrust(max([newest.attempt, *self.log.state.commits, *self.in_flight]))
                tell(DamagedNote(self.url, newest.step, problems[:10]))
                return
            self.verified = {newest.attempt}
            self.read_back = (self.read_back & state.commits.keys()) | {newest.attempt}
        self.sweeps += 1
        await self._warn(tell)
        await retention.retire(
            self.log,
            mine,
            self.keep,
            self.verified,
            pinned=self._pinned,
            orphans=full,
            spared=frozenset(self.leaving),
            delete=self._delete_later if self.grace_s else None,
        )
        if full:
            self.tidied |= left - self.in_flight

    def _pinned(self, state: RunState) -> set[Attempt]:
        """Also the sources of what is in flight, and what training wants kept, for which no record may have landed."""
        wanted = {attempt for attempt in state.commits if attempt.step in (self.notes or ())}
        sources = set[Attempt]().union(*(self.sources.get(attempt, ()) for attempt in self.in_flight))
        return {*self.promoting, *self.anchors.values(), *sources, *wanted}

    def noted(self) -> dict[int, str]:
        """What training wants kept, and why: as it has said, or the log says since an earlier incarnation."""
        if self.notes is not None:
            return dict(self.notes)
        kept = {one.step: words_of(self.log.state.kept.get(one.attempt, ""))[0] for one in self.log.state.lineage()}
        return {step: ours for step, ours in kept.items() if ours}

    def steps(self) -> set[int]:
        """Of checkpoints of the present history, and of those to be."""
        return {one.step for one in self.log.state.lineage()} | {attempt.step for attempt in self.in_flight}

    async def keep_noted(self, mine: Acquire) -> CheckpointError | None:
        """Have the log say what training wants kept; if that fails, why, and it is tried before the next clean-up."""
        try:
            async with self.noting:
                if self.notes is not None:
                    await retention.keep_steps(self.log, mine, self.notes)
        except FencedError as error:
            return error  # the next save says so
        except CheckpointError as error:
            events.log.warning("%s: which checkpoints are kept cannot be written down now: %s", self.url, error)
            return error
        return None

    async def _warn(self, tell: Callable[[Note], None]) -> None:
        """Once, of each checkpoint that cannot be read, since nothing is cleaned up while it stays."""
        unread: dict[Attempt, CheckpointError] = {}
        await retention.files_of(self.log, self.log.state.commits.values(), unread)
        if unread.keys() - self.warned:  # a predecessor that is still leaving may have retired it meanwhile
            await self.log.refresh()
            unread = {attempt: why for attempt, why in unread.items() if attempt in self.log.state.commits}
        for attempt in sorted(unread.keys() - self.warned):
            error, what = unread[attempt], f"step {attempt.step} of {self.url} cannot be read"
            if is_unreadable(error):
                _say(tell, f"{what} now. Nothing is cleaned up there until it can be read again: {error}")
            else:
                mend = f"`ckpt repair {self.url}` says what can be mended"
                _say(tell, f"{what}, so nothing is cleaned up there while it stays: {error}. {mend}")
        self.warned = set(unread)

    async def _give_up_old(self, mine: Acquire) -> None:
        """What is HELD since long, while newer steps became checkpoints or are HELD as well, will never be one."""
        history, held = self.log.state.lineage(), sorted(self.log.state.held, reverse=True)
        old = set(held[max(self.keep.last, retention.ALWAYS) :])
        if len(history) >= retention.ALWAYS:
            old |= {attempt for attempt in held if attempt < history[retention.ALWAYS - 1].attempt}
        for attempt in sorted(old - self.in_flight):
            await commit.abort(self.log, mine, attempt, "other nodes do not hold their parts", held=True)

    async def _delete_later(self, keys: Sequence[str]) -> None:
        """If we leave before, the next incarnation finds them."""
        self.leaving.update(keys)
        task = asyncio.create_task(self._delete(keys))
        self.graces.add(task)
        task.add_done_callback(self.graces.discard)

    async def _delete(self, keys: Sequence[str]) -> None:
        await asyncio.sleep(self.grace_s)
        try:
            await self.store.delete_many(keys)
        except CheckpointError as error:
            events.log.warning("%d files of %s could not be deleted now: %s", len(keys), self.url, error)
        self.leaving.difference_update(keys)

    async def close(self, mine: Acquire | None, tell: Callable[[Note], None]) -> None:
        """Note what is to be kept, tidy up once more, and let go of the store.

        A remote place is left as it is: to read a large checkpoint back could take longer than anybody waits at an end.
        """
        if self.sweeping is not None:
            if self.store.remote:
                self.sweeping.cancel()
            await asyncio.gather(self.sweeping, return_exceptions=True)
        if mine is not None and self.opened:
            await self.keep_noted(mine)
            if self.sweeping is not None and not self.store.remote:
                await self.sweep(mine, tell)  # it may have lagged behind the last commits
        for task in list(self.graces):
            task.cancel()
        await asyncio.gather(*self.graces, return_exceptions=True)
        for store in (self.store, *self.outdated):
            with contextlib.suppress(CheckpointError):
                await store.aclose()


def _say(tell: Callable[[Note], None], text: str) -> None:
    tell(SaidNote(text))


async def open_place(spec: dict[str, Any], *, later: bool = False, root: str = "", again: bool = False) -> OpenTier:
    """What a trainer says of a tier, opened: created if it is not there, refused if it cannot be trusted.

    `spec`: see `ckpt.tiers.Tier.spec`. `later`: a remote place that cannot be opened now is opened when it is needed.
    `root`: the id of the run that it must be, "" for any; RunGoneError if it is another one or none. `again`: the
    trainer has opened it before: then it is opened when it is that run again.
    """
    store = store_of(spec)
    log = RunLog(store)
    place = OpenTier(str(spec["url"]), retention.Keep(**spec["keep"]), log, spec=spec)
    _settings(place, spec)
    try:
        if root:
            log.root = place.root = root
            await log.check_same()
        await commit.create_run(store)
        await log.open()
    except CheckpointError as error:
        if not (later and store.remote) and not (again and isinstance(error, RunGoneError)):
            await store.aclose()
            raise
        place.opened = False
        events.log.warning("%s cannot be opened now: %s", place.url, error)
    except BaseException:
        await store.aclose()
        raise
    if store.remote:
        store.budget_s = PATIENCE_S
    return place


async def renew(place: OpenTier, spec: dict[str, Any]) -> None:
    """What the next incarnation of the trainer may say otherwise: credentials and limits among it."""
    _settings(place, spec)
    if any(spec.get(key) != place.spec.get(key) for key in REACHING):
        place.outdated.append(place.store)
        place.log.store = store_of(spec)
        place.log.watch()
    place.spec = spec
    store: Any = place.store
    if store.remote:
        store.budget_s = OPENING_S
    if place.opened:
        await place.log.refresh()
    if store.remote:
        store.budget_s = PATIENCE_S


def _settings(place: OpenTier, spec: dict[str, Any]) -> None:
    grace_s = spec.get("grace_s")
    place.keep = retention.Keep(**spec["keep"])
    place.encoder.policy = Policy(
        bool(spec.get("incremental", True)), str(spec.get("compression", "auto")), int(spec.get("full_every", 10))
    )
    place.set_every(int(spec.get("cadence", 1)))
    place.grace_s = float(grace_s) if grace_s is not None else retention.default_grace_s(place.store)


def store_of(spec: Mapping[str, Any], *, writable: bool = True) -> Any:
    """Return the store of a tier, with its credentials and limits. A folder is created if it is to be writable."""
    url = str(spec["url"])
    os.environ.update(spec.get("environment") or {})
    remember_options(url, spec.get("options"))
    rate, in_flight = spec.get("max_mib_s"), float(spec.get("max_inflight_mib") or 256)
    limits = {"bytes_per_s": rate and float(rate) * 2**20, "in_flight": int(in_flight * 2**20)}
    return open_store(url, writable=writable, limits=limits, patience_s=OPENING_S)
