"""A durable tier that a writer has open: its log, its saves in flight, and its clean-up.

Older checkpoints are deleted only after a newer checkpoint was read back and found intact. In a remote store, reading
all of them back would cost as much as the uploads, so only some are read back, and the newest of these always stays.
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
from ckpt.core.checkpoint import commits, retention
from ckpt.core.checkpoint.encode import Encoder, UploadStats
from ckpt.core.checkpoint.incremental import Policy
from ckpt.core.checkpoint.read import verify
from ckpt.core.format.manifest import CheckpointId, folder_of, rank_of
from ckpt.core.format.manifest import owner as owner_of
from ckpt.core.ipc.messages import Note, ProblemNote
from ckpt.core.log.records import Acquire, RunState, words_of
from ckpt.core.log.run_log import RunLog, Trimmer
from ckpt.errors import CheckpointError, FencedError, RunGoneError, is_unreadable
from ckpt.store import Store, is_temporary, open_store, remember_options
from ckpt.units import count_of

READ_BACK_EVERY = 10  # in a remote store, one of this many checkpoints is read back
LIST_EVERY = 32  # in a remote store, one of this many clean-ups lists files; others delete only known names
OPENING_S = 30.0  # time for retries while a remote store is opened: its address may be wrong, and the user waits
PATIENCE_S = 300.0  # time for retries of each later request
REACHING = ("options", "environment", "max_mib_s", "max_inflight_mib")  # keys of a spec that affect the connection


@dataclass
class OpenTier:
    """A durable tier of the run.

    `every`: steps between its checkpoints. `grace_s`: seconds for which readers may still use retired checkpoints.
    """

    url: str
    keep: retention.Keep
    log: RunLog
    every: int = 1
    grace_s: float = 0.0
    role: commits.Role = field(default_factory=commits.Role)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    verified: set[CheckpointId] = field(default_factory=set)
    in_flight: set[CheckpointId] = field(default_factory=set)
    sources: dict[CheckpointId, set[CheckpointId]] = field(
        default_factory=dict
    )  # checkpoints that a checkpoint in flight may use
    promoting: Counter[CheckpointId] = field(default_factory=Counter)  # being copied to other tiers
    encoder: Encoder = field(default_factory=Encoder)
    anchors: dict[str, CheckpointId] = field(default_factory=dict)  # base checkpoints for other tiers, by URL
    read_back: set[CheckpointId] = field(default_factory=set)  # checkpoints that were read back and found intact
    notes: Mapping[int, str] | None = None  # notes of the steps to keep; None: not yet known
    noting: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0  # number of checkpoints that wait or are being written
    spec: dict[str, Any] = field(default_factory=dict, repr=False)  # may contain secrets
    opened: bool = True
    root: str = ""  # the required run id, if it is known before opening
    outdated: list[Store] = field(default_factory=list)  # former stores, which saves in flight still use
    sweeping: asyncio.Task[None] | None = None
    sweeps: int = 0
    leaving: set[str] = field(default_factory=set)  # files that will be deleted after the grace period
    graces: set[asyncio.Task[None]] = field(default_factory=set)
    warned: set[CheckpointId] = field(default_factory=set)  # unreadable checkpoints that the user was warned of
    everywhere: CheckpointId | None = None  # on a disk of one node: the newest checkpoint known to be on all nodes
    tidied: set[CheckpointId] = field(default_factory=set)  # aborted checkpoints that have no files
    trimmer: Trimmer = field(default_factory=Trimmer)

    @property
    def store(self) -> Store:
        return self.log.store

    @property
    def flow(self) -> UploadStats:
        return self.encoder.flow

    @property
    def room(self) -> str:
        """Return advice for freeing space on the full disk of a folder."""
        there = self.log.state.commits
        if not (fewer := len(retention.choose(self.log.state, retention.Keep(3), self.verified))):
            return f"Free space elsewhere on that disk: {self.url} keeps only the newest checkpoints"
        prune = f"`ckpt prune {self.url} --keep-last 3` deletes {fewer} of {len(there)} checkpoints"
        return f"Free space: {prune}, and keep=3 on its Tier does so from now on"

    async def prepare(self) -> None:
        """Open the tier now if opening failed before. Raise RunGoneError if the tier no longer has this run."""
        if not self.opened:
            if self.root:
                await self.log.check_same()
            await self.log.open()
            self.root, self.opened = self.log.root, True
        else:
            await self.log.check_same()

    def set_every(self, steps: int) -> None:
        """Set the save interval."""
        self.every = steps
        self.encoder.policy = replace(self.encoder.policy, cadence=steps)

    def builds_on(self, checkpoint: CheckpointId, source: CheckpointId) -> None:
        """Protect a checkpoint from this job's clean-up while a checkpoint in flight may use its data files."""
        self.sources = {one: found for one, found in self.sources.items() if one in self.in_flight}
        self.sources.setdefault(checkpoint, set()).add(source)

    def unpin(self, checkpoint: CheckpointId) -> None:
        self.promoting[checkpoint] -= 1
        if self.promoting[checkpoint] <= 0:
            del self.promoting[checkpoint]

    async def drop_uploads(self, owner: Acquire, wanted: set[CheckpointId]) -> None:
        """Abort unfinished uploads of earlier job attempts, and delete their temporary files."""

        def keep(key: str) -> bool:
            checkpoint = owner_of(key)
            if checkpoint is None:
                return not is_temporary(key)
            if checkpoint in wanted or checkpoint in self.in_flight:
                return True
            return checkpoint.term >= owner.term and not self.log.state.ended(checkpoint)

        try:
            dropped = await self.store.drop_uploads(keep)
        except CheckpointError as error:
            events.log.warning("could not list unfinished uploads to %s: %s", self.url, error)
            return
        if dropped:
            events.log.info("aborted %s to %s", count_of(dropped, "unfinished upload"), self.url)

    async def remove_rest(self, checkpoint: CheckpointId, rank: int | None = None) -> None:
        """Delete the files of a checkpoint that was being written while the run was deleted or replaced.

        No other run has files with these names, but a restart in the emptied location would fail because of them. Files
        of a committed checkpoint stay, because the run may only have been unreachable.

        rank: the rank whose files are deleted; default: every rank
        """
        if checkpoint in self.log.state.commits:
            return
        try:
            keys = [info.key async for info in self.store.list(folder_of(checkpoint))]
            own = [
                key for key in keys if owner_of(key) == checkpoint and (rank is None or rank_of(key) in (rank, None))
            ]
            await retention.delete_in_order(self.store, own)
        except CheckpointError as error:
            events.log.warning("could not delete all files of step %d in %s: %s", checkpoint.step, self.url, error)

    async def sweep(self, owner: Acquire, notify: Callable[[Note], None]) -> None:
        """Apply retention, and trim the log. Errors are logged, and the clean-up after the next checkpoint retries."""
        try:
            await self._sweep(owner, notify)
        except FencedError:
            pass  # the next save raises this error
        except CheckpointError as error:
            events.log.warning("could not clean up %s, retrying later: %s", self.url, error)
        await self.trimmer.step(self.log, owner)

    async def _sweep(self, owner: Acquire, notify: Callable[[Note], None]) -> None:
        await self.keep_noted(owner)
        state = self.log.state
        doomed = retention.choose(state, self.keep, self.verified) - self._pinned(state)
        full = not self.store.remote or self.sweeps % LIST_EVERY == 0
        left = set(state.aborted) - self.tidied
        if not doomed and not (left and full):
            return
        history = state.lineage()
        if not history:
            return  # a rollback undid all checkpoints, and the next checkpoint makes them obsolete
        newest = history[0]
        recent = {c.checkpoint for c in history[: READ_BACK_EVERY if self.store.remote else 1]}
        if not recent & self.verified:
            # Data of checkpoints that were read back is not read again, because reading costs more than writing.
            new = bool(newest.needs) and self.read_back.issuperset(newest.needs)
            problems = await verify(self.store, newest, new=new)
            if problems:
                # Other checkpoints may have been built on the damaged bytes meanwhile.
                self.encoder.distrust(max([newest.checkpoint, *self.log.state.commits, *self.in_flight]))
                found = "; ".join(problems[:10])
                text = (
                    f"step {newest.step} in {self.url} is damaged on disk: {found}. Training can continue: the next "
                    f"checkpoint does not build on it. `ckpt repair {self.url}` shows what can be repaired"
                )
                notify(ProblemNote(text, "SaveError"))
                return
            self.verified = {newest.checkpoint}
            self.read_back = (self.read_back & state.commits.keys()) | {newest.checkpoint}
        self.sweeps += 1
        await self._warn(notify)
        await retention.retire(
            self.log,
            owner,
            self.keep,
            self.verified,
            pinned=self._pinned,
            orphans=full,
            spared=frozenset(self.leaving),
            delete=self._delete_later if self.grace_s else None,
        )
        if full:
            self.tidied |= left - self.in_flight

    def _pinned(self, state: RunState) -> set[CheckpointId]:
        """Return the checkpoints that must stay: those that other checkpoints use, and steps that training keeps.

        On a disk of one node, the newest checkpoint that all nodes have stays too, and so do newer ones, because other
        nodes may still be writing them.
        """
        wanted = {checkpoint for checkpoint in state.commits if checkpoint.step in (self.notes or ())}
        sources = set[CheckpointId]().union(*(self.sources.get(checkpoint, ()) for checkpoint in self.in_flight))
        last = self.everywhere
        newer = {one for one in state.commits if last is None or one >= last} if self.role.partial else ()
        return {*self.promoting, *self.anchors.values(), *sources, *wanted, *newer}

    def noted(self) -> dict[int, str]:
        """Return the notes of the steps that training keeps, from this job or otherwise from the log."""
        if self.notes is not None:
            return dict(self.notes)
        kept = {one.step: words_of(self.log.state.kept.get(one.checkpoint, ""))[0] for one in self.log.state.lineage()}
        return {step: ours for step, ours in kept.items() if ours}

    def steps(self) -> set[int]:
        """Return the steps of all checkpoints in the present history or in flight."""
        return {one.step for one in self.log.state.lineage()} | {checkpoint.step for checkpoint in self.in_flight}

    async def keep_noted(self, owner: Acquire) -> CheckpointError | None:
        """Record which steps training keeps. If this fails, return the error; the next clean-up tries again."""
        try:
            async with self.noting:
                if self.notes is not None:
                    await retention.keep_steps(self.log, owner, self.notes)
        except FencedError as error:
            return error  # the next save raises this error
        except CheckpointError as error:
            events.log.warning("%s: could not record which checkpoints to keep, retrying later: %s", self.url, error)
            return error
        return None

    async def _warn(self, notify: Callable[[Note], None]) -> None:
        """Warn once about each unreadable checkpoint, because nothing is cleaned up while it exists."""
        unread: dict[CheckpointId, CheckpointError] = {}
        await retention.files_of(self.log, self.log.state.commits.values(), unread)
        if unread.keys() - self.warned:  # an older writer that still runs may have retired the checkpoint
            await self.log.refresh()
            unread = {checkpoint: why for checkpoint, why in unread.items() if checkpoint in self.log.state.commits}
        for checkpoint in sorted(unread.keys() - self.warned):
            error, problem = unread[checkpoint], f"step {checkpoint.step} of {self.url} cannot be read"
            if is_unreadable(error):
                _send_text(notify, f"{problem} now. Clean-up there stops until it can be read again: {error}")
            else:
                repair = f"`ckpt repair {self.url}` shows what can be repaired"
                _send_text(notify, f"{problem}, so clean-up there stops: {error}. {repair}")
        self.warned = set(unread)

    async def _delete_later(self, keys: Sequence[str]) -> None:
        """Delete files after the grace period. If the writer ends before that, the next job attempt deletes them."""
        self.leaving.update(keys)
        task = asyncio.create_task(self._delete(keys))
        self.graces.add(task)
        task.add_done_callback(self.graces.discard)

    async def _delete(self, keys: Sequence[str]) -> None:
        await asyncio.sleep(self.grace_s)
        try:
            await retention.delete_in_order(self.store, keys)
        except CheckpointError as error:
            events.log.warning("could not delete %s of %s: %s", count_of(len(keys), "file"), self.url, error)
        self.leaving.difference_update(keys)

    async def close(self, owner: Acquire | None, notify: Callable[[Note], None]) -> None:
        """Record which steps to keep, clean up once more, and close the store. Do not clean up a remote store, because
        reading back a large checkpoint could take too long at the end of a job."""
        if self.sweeping is not None:
            if self.store.remote:
                self.sweeping.cancel()
            await asyncio.gather(self.sweeping, return_exceptions=True)
        if owner is not None and self.opened:
            await self.keep_noted(owner)
            if self.sweeping is not None and not self.store.remote:
                await self.sweep(owner, notify)  # the last clean-up may have ended before the last commits
        for task in list(self.graces):
            task.cancel()
        await asyncio.gather(*self.graces, return_exceptions=True)
        for store in (self.store, *self.outdated):
            with contextlib.suppress(CheckpointError):
                await store.aclose()


def _send_text(notify: Callable[[Note], None], text: str) -> None:
    notify(ProblemNote(text))


async def open_place(spec: dict[str, Any], *, later: bool = False, root: str = "", again: bool = False) -> OpenTier:
    """Open a tier as the trainer configured it. Create the run if it does not exist.

    `spec`: see `ckpt.tiers.Tier.spec`. `later`: if a remote store cannot be opened now, open it when it is needed.
    `root`: the required run id, "" for any; raises RunGoneError if the store has another run or none. `again`: the
    trainer has opened the tier before, so if the run is missing now, open it when it is back.
    """
    store = store_of(spec)
    log = RunLog(store)
    place = OpenTier(str(spec["url"]), retention.Keep(**spec["keep"]), log, spec=spec)
    _settings(place, spec)
    try:
        if root:
            log.root = place.root = root
            await log.check_same()
        await commits.create_run(store)
        await log.open()
    except CheckpointError as error:
        if not (later and store.remote) and not (again and isinstance(error, RunGoneError)):
            await store.aclose()
            raise
        place.opened = False
        events.log.warning("could not open %s, retrying later: %s", place.url, error)
    except BaseException:
        await store.aclose()
        raise
    if store.remote:
        store.budget_s = PATIENCE_S
    return place


async def renew(place: OpenTier, spec: dict[str, Any]) -> None:
    """Apply the settings of the next job attempt to an open tier, for example new credentials or limits."""
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
    """Return the store of a tier, with its credentials and limits. With `writable`, create a missing folder."""
    url = str(spec["url"])
    os.environ.update(spec.get("environment") or {})
    remember_options(url, spec.get("options"))
    rate, in_flight = spec.get("max_mib_s"), float(spec.get("max_inflight_mib") or 256)
    limits = {"bytes_per_s": rate and float(rate) * 2**20, "in_flight": int(in_flight * 2**20)}
    return open_store(url, writable=writable, limits=limits, patience_s=OPENING_S)
