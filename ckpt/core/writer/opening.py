"""Opens a run and takes ownership of it, for a trainer that starts or restores.

OpenRun      reads the tiers without changing them
AcquireRun   appends the next owner to the logs, for all ranks
OwnRun       once all ranks know the owner, finishes or aborts the checkpoints that earlier owners left unfinished
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.core.cadence.ledger import Decision
from ckpt.core.checkpoint import commits
from ckpt.core.checkpoint.lease import Lease, check_free, last_decision, read_back
from ckpt.core.checkpoint.open_tier import OpenTier, open_place, renew
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc import messages
from ckpt.core.ipc.messages import PartsHere, ProblemNote, TierFound
from ckpt.core.writer.bookkeeper import Bookkeeper
from ckpt.core.writer.held_run import Caller, HeldRun, PresentTrainer, acquire_of, handles
from ckpt.core.writer.memory import HeldMemory
from ckpt.core.writer.promotion import IdleCores, threads
from ckpt.core.writer.saver import WriterSaver
from ckpt.errors import OutcomeUnknownError, StoreError, UsageError

LOOK_BACK = 4  # number of earlier job attempts in which to look for save intervals


@dataclass(eq=False)
class TierOpener:
    """Handles requests to open and own a run, in the writer's event loop."""

    trainer: PresentTrainer
    run: HeldRun
    saver: WriterSaver
    books: Bookkeeper
    held_memory: HeldMemory

    @handles(messages.OpenRun)
    async def open(self, request: messages.OpenRun) -> messages.OpenRunReply:
        """Open the tiers of a run. With `check`, raise InUseError if another job trains the run."""
        run, begun = self.run, self.trainer.adoptions
        run.linger_s, run.commit_s = request.linger_s, request.commit_s
        run.first_number, run.next_nonces = request.first_number, frozenset(request.next_nonces)
        run.acquires = [acquire_of(one) for one in request.acquires]
        known = {tier.url: tier for tier in run.tiers}  # reuse open tiers, because one may be writing now
        tiers: list[OpenTier] = []
        again, roots = bool(run.first_number), [*request.roots, *[""] * len(request.tiers)]
        for spec, root in zip(request.tiers, roots, strict=False):
            # A writer that replaces a dead one must not fail when a bucket is temporarily unreachable.
            try:
                tiers.append(await self._open_tier(spec, known, root, later=bool(again and tiers), again=again))
            except StoreError as error:
                raise self._as_it_stands(error, str(spec["url"]), tiers) from error
        if request.check:
            for tier in (tier for tier in tiers if tier.opened):
                await check_free(tier.log, lambda text: self.trainer.tell(ProblemNote(text)), self._has_ended)
        run.check_still(begun)
        _check_one_run(tiers)
        run.tiers = tiers
        for tier in tiers:  # drop bases of increments that were kept for a removed tier
            tier.anchors = {url: a for url, a in tier.anchors.items() if any(url == t.url for t in tiers[1:])}
        found = [_found(tier) for tier in tiers]
        decision = await self._last_cadence(request.auto) if request.auto else None
        return messages.OpenRunReply(found, {} if decision is None else asdict(decision))

    def _as_it_stands(self, error: StoreError, url: str, tiers: Sequence[OpenTier]) -> StoreError:
        """Return an error that names the newest step known without this tier, and how to continue without the tier. Do
        not skip the tier automatically, because it may have a newer step, or another job may train in it."""
        here = [(one.step, tier.url) for tier in tiers if tier.opened for one in tier.log.state.lineage()[:1]]
        here += [(label.checkpoint.step, "memory") for _, _, label in self.held_memory.ring()[:1] if label.checkpoint]
        if not here or isinstance(error, OutcomeUnknownError):
            return error
        step, where = max(here)
        return type(error)(
            f"{error}. {where} has step {step}; a newer one or another job there cannot be ruled out without "
            f"{url}. To continue from step {step} for now, remove that tier: when it is added again, "
            "saves go there again",
            retryable=error.retryable,
        )

    async def _open_tier(
        self, spec: dict[str, Any], known: dict[str, OpenTier], root: str, *, later: bool, again: bool
    ) -> OpenTier:
        tier = known.pop(spec["url"], None)
        if tier is not None and tier.url not in await self.run.lost([tier]):
            await renew(tier, spec)
            return tier
        # The tier is new, or its run was removed or replaced.
        tier = await open_place(spec, later=later, root=root, again=again)
        if caveat := getattr(tier.store, "caveat", ""):
            self.trainer.tell(ProblemNote(caveat))
        tier.encoder.threads, tier.encoder.pace, tier.encoder.idle = threads(), self.saver.throttle, IdleCores()
        return tier

    def _has_ended(self, lease: Lease) -> bool:
        """Return True for a lease of this writer's previous trainer, or of the process that is now the new trainer."""
        return lease.token == self.books.token or (lease.visible and lease.pid == self.trainer.pid)

    async def _last_cadence(self, auto: list[str]) -> Decision | None:
        """Return the save intervals of the last job attempt, so that they need not be measured again."""
        known = await read_back(self.run.tiers, LOOK_BACK)
        decision = last_decision([*known, *([self.books.account] if self.books.account else [])])
        for tier in self.run.tiers:
            every = None if decision is None else decision.every.get(tier.url)
            if tier.url in auto and type(every) is int and every >= 1:
                tier.set_every(every)
        return decision

    @handles(messages.AcquireRun)
    async def acquire(self, request: messages.AcquireRun) -> list[int]:
        """Append the next owner to the logs. With `restored`, the present owner rolls the run back."""
        run, begun = self.run, self.trainer.adoptions
        nonce, back = request.nonce, None if request.restored is None else CheckpointId.parse(request.restored)
        tiers = [run.tiers[i] for i in request.tiers]
        for tier in tiers if back is not None else ():
            await tier.log.refresh()
            if all(acquire.nonce != nonce for acquire in tier.log.state.acquires):
                tier.log.check_owner(run.mine())
        async with run.taking:
            run.check_still(begun)
            floor = max([request.floor, *(t.log.state.term for t in tiers)])
            taken = [await commits.acquire(t.log, nonce, restored=back, floor=floor) for t in tiers]
        return sorted({a.term for a in taken} or {floor + 1})

    async def own(self, request: messages.OwnRun) -> list[PartsHere]:
        """Act as the new owner, set this rank's roles in committing, and recover its tiers."""
        run, owner, begun = self.run, acquire_of(request.owner), self.trainer.adoptions
        async with run.taking:
            for tier in (tier for tier in run.tiers if tier.opened):
                await tier.log.refresh()  # another rank's writer appended the owner; an old log would fence us
            run.check_still(begun)
            run.become(owner)
            run.next_nonces = frozenset(request.next_nonces)
        for tier, (ranks, place, world) in zip(run.tiers, request.roles, strict=True):
            tier.role = commits.Role(tuple(ranks), place, world)
        return [parts for i in request.recover for parts in await self._recover(i, run.tiers[i])]

    async def _recover(self, number: int, tier: OpenTier) -> list[PartsHere]:
        """Finish or abort unfinished checkpoints in a tier. If the tier is node-local, return the parts in it."""
        mine, wanted = self.run.mine(), self.saver.to_copy(tier)
        await commits.recover(tier.log, mine, frozenset(tier.in_flight | wanted), partial=tier.role.partial)
        await tier.drop_uploads(mine, wanted)
        if not tier.role.partial:
            return []
        here = tier.log.state.commits.values()
        return [PartsHere(number, str(c.checkpoint), c.world, [rank for rank, _ in c.manifests]) for c in here]

    # -- after the run was opened --

    @handles(messages.Introduce)
    def introduce(self, request: messages.Introduce, caller: Caller) -> None:
        if request.books is not None:
            self.books.begin(request, request.books, os.dup(caller.fds[0]), self.trainer.pid)
        self._distrust(request.restored)

    @handles(messages.RunEvent)
    def on_event(self, request: messages.RunEvent) -> None:
        if request.restored is not None:
            self._distrust(request.restored)
            self.books.restored(request.restored)
        if request.decision is not None:
            for tier in self.run.tiers:
                tier.set_every(int(request.decision["every"].get(tier.url, tier.every)))
            self.books.decided(Decision(**request.decision))

    def _distrust(self, restored: messages.RestoreDone | None) -> None:
        """Build no more increments on checkpoints of earlier terms, in the tier in which a restore has found damage."""
        for tier in (tier for tier in self.run.tiers if restored is not None and tier.url == restored.damaged):
            tier.encoder.distrust(CheckpointId(self.run.mine().term, 0, ""))

    @handles(messages.ContinueRun)
    def go_on(self, request: messages.ContinueRun) -> None:
        """Note which checkpoints all nodes have. Then resume interrupted copies."""
        for number, checkpoint in request.everywhere:
            tier, known = self.run.tiers[number], CheckpointId.parse(checkpoint)
            tier.everywhere = known if tier.everywhere is None else max(tier.everywhere, known)
        if request.resume:
            self.saver.begin_to_resume()


def _found(tier: OpenTier) -> TierFound:
    state = tier.log.state
    return TierFound(tier.log.root, state.term, len(state.commits), state.damaged)


def _check_one_run(tiers: Sequence[OpenTier]) -> None:
    """Raise UsageError if two tiers have checkpoints of different runs: no job attempt owned both, by its nonce.
    Otherwise the run with more terms would take ownership of the other run, and retention would delete its checkpoints.
    """
    seen: list[tuple[str, set[str]]] = []
    for tier in (tier for tier in tiers if tier.opened and tier.log.state.commits):
        state = tier.log.state
        nonces = {one.nonce for one in state.acquires} | {one.nonce for one in state.commits}
        for url, others in seen:
            if nonces.isdisjoint(others):
                raise UsageError(
                    f"{url} and {tier.url} have checkpoints of different runs, which were never used together. "
                    "Nothing was changed. Pass the tiers of one run, or a new location"
                )
        seen.append((tier.url, nonces))
