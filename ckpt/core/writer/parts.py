"""Commits a checkpoint once the store has every rank's part. Ranks do not communicate: the parts decide."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

<<<<<<< HEAD
from ckpt import events
from ckpt.core.checkpoint import commits, retention
=======
>>>>>>> main
from ckpt.core.checkpoint.commits import Role, abort, commit_or_end, given_up
from ckpt.core.checkpoint.encode import Encoder
from ckpt.core.checkpoint.manifests import intact_manifests, ranks_in
from ckpt.core.checkpoint.write import WrittenManifest
from ckpt.core.format.manifest import CheckpointId, folder_of
from ckpt.core.log.records import Acquire, RunState
from ckpt.core.log.run_log import RunLog
from ckpt.errors import SaveError
from ckpt.store import Store

<<<<<<< HEAD
FAR_PATIENCE = 6  # factor of the timeout for other ranks' parts in slow tiers
OUT_OF_TURN = -1


@dataclass(eq=False)
class Settler:
    """Commits parts in the writer's event loop. `settling`: how many written parts are not committed yet, by the
    adoption of the trainer that requested them, or `OUT_OF_TURN` if other ranks may never write theirs."""

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    background: Background
    settling: Counter[int] = field(default_factory=Counter)

    @contextlib.contextmanager
    def under_way(self, adoption: int | None = None) -> Iterator[None]:
        """Count a save that the writer has to finish before it leaves; by default for the present trainer."""
        begun = self.trainer.adoptions if adoption is None else adoption
        self.settling[begun] += 1
        try:
            yield
        finally:
            self.settling[begun] -= 1

    async def settle(self, tier: OpenTier, written: WrittenManifest) -> None:
        """Wait until a written part is a committed checkpoint in this tier. Raises SaveError if it was aborted."""
        checkpoint = written.checkpoint
        try:
            await self._commit(tier, written)
            if checkpoint.step in (tier.notes or ()) and tier.role.place == 0:
                await tier.keep_noted(self.run.mine())  # before the checkpoint is reported
            tier.flow.committed(int(written.table.length[: written.table.owned].sum()), own_bytes(written))
            events.log.info("step %d is a checkpoint in %s", checkpoint.step, tier.url)
        except FullError:
            await self._make_room(tier, checkpoint)
            raise
        except Exception as error:
            if isinstance(error, SaveError) and error.next_is_full:
                tier.encoder.distrust(checkpoint)
            if written.manifest.world > 1:
                await self._give_up(tier, written, error)
            if checkpoint in tier.log.state.held:
                self._sweep_soon(tier)  # other incomplete checkpoints may have to be removed
            if isinstance(error, RunGoneError):
                await tier.remove_rest(checkpoint, written.manifest.rank)
            raise
        finally:
            tier.in_flight.discard(checkpoint)
        self.held_memory.forget_old()
        self._sweep_soon(tier)

    async def _commit(self, tier: OpenTier, written: WrittenManifest) -> None:
        part, run = written.manifest, self.run
        number = run.tiers.index(tier) if tier in run.tiers else -1
        role = (
            tier.role
            if part.world == tier.role.world
            else commits.Role(tuple(range(part.world)), part.rank, part.world)
        )
        held = StoredNote(number, part.checkpoint, held=True)
        await run.as_owner(
            tier.log,
            lambda mine: settle(
                tier.log,
                run.mine,
                written,
                role,
                encoder=tier.encoder,
                deadline_s=run.commit_s * (FAR_PATIENCE if tier.store.remote else 1),
                on_held=lambda: self.trainer.tell(held),
                on_slow=lambda text: self.trainer.tell(ProblemNote(text)),
            ),
        )

    def _sweep_soon(self, tier: OpenTier) -> None:
        if tier.role.place == 0 and (tier.sweeping is None or tier.sweeping.done()):
            tier.sweeping = self.background.spawn(tier.sweep(self.run.mine(), self.trainer.tell))

    # -- aborting --

    async def tell_others(self, tier: OpenTier, checkpoint: CheckpointId, rank: int, error: BaseException) -> None:
        """Abort a checkpoint because this rank's part will not come, so that other ranks do not wait for it."""
        if tier.role.world > 1 and isinstance(error, Exception) and not isinstance(error, FencedError):
            with contextlib.suppress(CheckpointError):
                await commits.abort(tier.log, self.run.mine(), checkpoint, f"rank {rank}: {error}")

    async def _make_room(self, tier: OpenTier, checkpoint: CheckpointId) -> None:
        """Abort a checkpoint that was written when the disk became full, and free its space."""
        with contextlib.suppress(CheckpointError):
            await commits.abort(tier.log, self.run.mine(), checkpoint, "no space left")
            if checkpoint in tier.log.state.aborted:
                listed = [info.key async for info in tier.log.store.list(folder_of(checkpoint))]
                await retention.delete_unused(tier.log, [key for key in listed if owner_of(key) == checkpoint])

    async def _give_up(self, tier: OpenTier, written: WrittenManifest, error: Exception) -> None:
        """Abort a checkpoint whose commit failed here, so that other ranks do not wait; delete our part if it was
        aborted."""
        part, checkpoint = written.manifest, written.checkpoint
        with contextlib.suppress(CheckpointError):
            if not isinstance(error, FencedError) and part.reason == "due":
                await commits.abort(tier.log, self.run.mine(), checkpoint, f"rank {part.rank}: {error}")
            if checkpoint in tier.log.state.aborted:
                own = [file.key for file in part.files if owner_of(file.key) == checkpoint]
                await retention.delete_unused(tier.log, [manifest_key(checkpoint, part.rank), *own])

    @handles(Retract)
    async def retract(self, request: Retract) -> None:
        """Retract a snapshot that failed or is inconsistent: it must not become or remain a checkpoint."""
        checkpoint = CheckpointId.parse(request.checkpoint)
        self.held_memory.take_back(checkpoint, request.reason)
        failures: list[CheckpointError] = []
        with self.under_way():
            for tier in self.run.tiers:  # all tiers, even if one fails
                try:
                    async with tier.busy:
                        await tier.prepare()
                        await commits.retract(tier.log, self.run.mine(), checkpoint, request.reason)
                except CheckpointError as error:
                    failures.append(error)
        if failures:
            raise failures[0]


def own_bytes(written: WrittenManifest | None) -> int:
    """Return the bytes stored for a part, without those that it shares with older checkpoints."""
    if written is None:
        return 0
    checkpoint = written.checkpoint
    return sum(file.size for file in written.manifest.files if owner_of(file.key) == checkpoint)


@dataclass(eq=False)
class PartWriter:
    """Writes parts in the writer's event loop; blocking work goes to threads.

    `reads`: the number of writes that read a slot, by arena and slot; `stored`: by tier and checkpoint, a future that
    is True if our part is stored.
    """

    trainer: PresentTrainer
    run: HeldRun
    held_memory: HeldMemory
    settler: Settler
    reads: dict[tuple[str, int], int] = field(default_factory=dict)
    stored: dict[tuple[str, CheckpointId], asyncio.Future[bool]] = field(default_factory=dict)

    @contextlib.contextmanager
    def reading(self, arena: Arena, slot: int) -> Iterator[None]:
        """Mark a slot as being read. A trainer that inherits the memory does not overwrite it until `StoredNote`."""
        key, adopted = (arena.id.hex(), slot), self.trainer.adoptions
        self.reads[key] = self.reads.get(key, 0) + 1
        try:
            yield
        finally:
            self.reads[key] -= 1
            if not self.reads[key]:
                del self.reads[key]
                if adopted != self.trainer.adoptions:  # the new trainer waits for the end of this read
                    self.trainer.tell(StoredNote(arena=arena.id.hex(), slot=slot))

    async def store(
        self, tier: OpenTier, arena: Arena, slot: int, label: Label, reason: str = "due", *, last: bool = True
    ) -> WrittenManifest | None:
        """Write this rank's part from memory. Return None if the step is a checkpoint already.

        With a single rank, a failed checkpoint stays open. It may be retried with other files, or recovery ends it.
        With several ranks it is aborted immediately so that they need not wait, unless this was not the `last` try.
        """
        checkpoint, layout = label.checkpoint, self.held_memory.layouts[label.layout]
        assert checkpoint is not None
        tier.in_flight.add(checkpoint)
        try:
            with self.reading(arena, slot):
                written = await self._store(tier, arena, slot, label, layout, checkpoint, reason)
        except BaseException as error:
            tier.in_flight.discard(checkpoint)
            if isinstance(error, RunGoneError):
                await tier.remove_rest(checkpoint, layout.rank)
            if last and reason == "due":
                await self.settler.tell_others(tier, checkpoint, layout.rank, error)
                if checkpoint in tier.log.state.commits:
                    return None  # the part was complete, and another rank has committed it
            raise
        if written is None:
            tier.in_flight.discard(checkpoint)
        return written

    async def _store(
        self,
        tier: OpenTier,
        arena: Arena,
        slot: int,
        label: Label,
        layout: Layout,
        checkpoint: CheckpointId,
        reason: str,
    ) -> WrittenManifest | None:
        def check(problem: str = "was overwritten in memory while it was written") -> None:
            self.trainer.check_not_fenced()  # otherwise the slot may have been released during the write
            # A living trainer may reuse the slot. It changes the label before the first byte.
            if arena.settled(slot) != label:
                raise SaveError(f"step {checkpoint.step} {problem}")

        memory, run = self.held_memory, self.run
        async with tier.busy:
            await tier.prepare()
            if checkpoint in tier.log.state.commits:
                return None  # the previous writer committed it, and died before its reply
            check("is no longer in memory")
            numbers = memory.numbers(tier.url, checkpoint, run.first_number)
            values = json.loads(bytes(arena.values(slot, label)))
            data = arena.data(slot, label.data_size)

            snapshot = RankSnapshot(checkpoint, layout, data, values, label.finite, memory.replicas.get(checkpoint, {}))
            async with run.taking:
                run.succeed(tier.log)
                tier.log.check_owner(run.mine())
            source = InMemory(layout, snapshot.data)
            written = await self.encode(tier, snapshot, source, numbers, reason=reason, check=check)
            if checkpoint in memory.retracted:
                raise SaveError(f"step {checkpoint.step} was given up: {memory.retracted[checkpoint]}")
        digests = written.table.digest[: written.table.owned].tobytes()
        memory.know_digests(checkpoint, layout.rank, digests + chunk_digest(arena.values(slot, label)))
        return written

    async def encode(
        self,
        tier: OpenTier,
        snapshot: RankSnapshot,
        source: ByteSource,
        numbers: Iterator[int],
        *,
        reason: str,
        check: Callable[[], None] = lambda: None,
    ) -> WrittenManifest:
        """Write a part in the encoding of this tier, without chunks that the tier already has. `check` raises if the
        source has changed since."""
        checkpoint, layout, near = snapshot.checkpoint, snapshot.layout, self.run.near(tier)
        previous = await tier.encoder.previous(tier.log, checkpoint, layout)
        if previous is not None:
            tier.builds_on(checkpoint, previous.checkpoint)
        with tier.flow.writing(checkpoint.step, layout.arrangement.data_size):
            written = await tier.encoder.write(
                tier.log.store,
                snapshot,
                source,
                previous,
                numbers=numbers,
                reason=reason,
                bases=_bases(tier, near, layout.rank, reason),
                check=check,
                log=tier.log,
            )
        if near is not None:
            _anchor(tier, near, written)
        return written


def _bases(tier: OpenTier, near: OpenTier | None, rank: int, reason: str) -> Bases:
    """Return the source from which the bases of increments are read."""
    if reason in ("ring", "late"):
        return no_bases
    if near is None:
        return no_bases if tier.store.remote else bases_in(tier.store)
    known: dict[CheckpointId, Table | None] = {}

    async def find(older: CheckpointId) -> Table | None:
        if older not in known:
            known[older] = await _table_of(near, older, rank)
        return known[older]

    return bases_near(near.store, find)


def _anchor(tier: OpenTier, near: OpenTier, written: WrittenManifest) -> None:
    """Make the nearer tier keep the bases of increments in the further tier, if there are any."""
    if tier.encoder.policy.compression == "none" or not tier.encoder.uses_bases:
        near.anchors.pop(tier.url, None)
    elif not written.manifest.needs:
        near.anchors[tier.url] = written.checkpoint


async def _table_of(near: OpenTier, checkpoint: CheckpointId, rank: int) -> Table | None:
    """Return a rank's chunk table of a checkpoint in a nearer tier."""
    found = near.log.state.commits.get(checkpoint)
    mine = next((part for part in found.manifests if part[0] == rank), None) if found is not None else None
    if mine is None:
        return None
    try:
        return (await commits.load_manifest(near.store, checkpoint, rank, expected=mine[1])).table
    except (CorruptError, StoreError):
        return None


# -- commit --


=======
>>>>>>> main
STAGGER_S = 5.0  # how much longer each further rank's writer waits for the first one before it commits instead
POLL_S = (0.01, 0.5)  # seconds between two checks, initial and maximum
FAR_STAGGER_S, FAR_POLL_S = 60.0, (0.5, 10.0)  # the same for remote stores, where each check is a request
REPORT_S, FAR_REPORT_S = 10.0, 60.0  # after which a rank that has not saved its part is reported
GROWTH, FAR_GROWTH = 1.3, 2.0  # growth of the time between two checks


def _is_checkpoint(state: RunState, checkpoint: CheckpointId) -> bool:
    """Return True if it is committed, or was until retention retired it. Raise SaveError if it was aborted."""
    if checkpoint in state.commits or (checkpoint in state.retired and checkpoint not in state.reasons):
        return True
    if state.ended(checkpoint):
        raise given_up(state, checkpoint)
    return False


async def settle(
    log: RunLog,
    owner: Callable[[], Acquire],
    own: WrittenManifest,
    role: Role,
    *,
    deadline_s: float,
    encoder: Encoder | None = None,
    on_held: Callable[[], None] = lambda: None,
    on_slow: Callable[[str], None] = lambda text: None,
) -> None:
    """Commit the checkpoint when all parts are there, or wait until another rank's writer has committed it.

    Raise SaveError if it is aborted, or if parts are missing after `deadline_s`. `encoder`: the encoder of this tier,
    which has a record of damage there. `on_held` is called when this disk has all its parts, but the checkpoint also
    needs those of other nodes. `on_slow` is called once if a rank is late, for example during a long evaluation.
    """
    checkpoint = own.checkpoint
    remote = log.store.remote
    stagger_s, poll_s = (FAR_STAGGER_S, FAR_POLL_S) if remote else (STAGGER_S, POLL_S)
    report_s = FAR_REPORT_S if remote else REPORT_S
    started, pause, told, reported = time.monotonic(), poll_s[0], False, role.place > 0 or len(role.ranks) == 1
    while True:
        waited = time.monotonic() - started
        if waited >= role.place * stagger_s:
            parts = await _present(log.store, checkpoint, own, role)
            if parts is not None and checkpoint not in log.state.held:
                kind, distrusted = "HELD" if role.partial else "COMMIT", encoder.distrusted if encoder else None
                await commit_or_end(log, owner(), parts, kind=kind, distrusted=distrusted)
        elif role.world > 1:
            await log.refresh()
        if _is_checkpoint(log.state, checkpoint):
            return
        log.check_owner(owner())
        if checkpoint in log.state.held and not told:
            told = True
            on_held()
        if waited > report_s and not reported and checkpoint not in log.state.held:
            reported = True
            if missing := await _missing(log.store, checkpoint, own, role):
                on_slow(f"step {checkpoint.step} is not in {log.store.url} yet: rank {missing} has not saved its part")
        if waited > deadline_s:
            await _too_late(log, owner(), own, role, deadline_s)
        await asyncio.sleep(pause)
        pause = min(pause * (FAR_GROWTH if remote else GROWTH), poll_s[1])
        if role.place * stagger_s <= waited:
            await log.refresh()


async def _present(
    store: Store, checkpoint: CheckpointId, own: WrittenManifest, role: Role
) -> list[WrittenManifest] | None:
    """Return the parts that belong in this tier, None while some are missing."""
    if role.ranks == (own.manifest.rank,):
        return [own]
    keys = [info.key async for info in store.list(folder_of(checkpoint))]
    ready = ranks_in(keys)
    if not ready.issuperset(role.ranks):
        return None
    found = await intact_manifests(store, checkpoint, keys, own)
    return [found[rank] for rank in role.ranks] if found.keys() >= set(role.ranks) else None


async def _missing(store: Store, checkpoint: CheckpointId, own: WrittenManifest, role: Role) -> str:
    """Return the ranks whose parts are not there, as text."""
    keys = [info.key async for info in store.list(folder_of(checkpoint))]
    ready = (await intact_manifests(store, checkpoint, keys, own)).keys()  # a damaged part counts as missing
    return ", ".join(map(str, sorted(set(role.ranks) - ready)[:8]))


async def _too_late(log: RunLog, mine: Acquire, own: WrittenManifest, role: Role, deadline_s: float) -> None:
    checkpoint = own.checkpoint
    missing = await _missing(log.store, checkpoint, own, role)
    what = f"the parts of ranks {missing}" if missing else "the word that the disks of other nodes hold theirs"
    reason = f"{what} did not come within {deadline_s:g} s"
    if not role.partial:
        await abort(log, mine, checkpoint, reason)
        if checkpoint in log.state.commits:
            return  # committed at the last moment
    raise SaveError(f"step {checkpoint.step} was not committed: {reason}")
