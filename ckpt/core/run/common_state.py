"""Finds the optimizer state that only some ranks have, so that it is not divided among all of them.

Each rank saves a slice of the optimizer state of a replicated parameter. That is correct only if all ranks have this
state. Muon, for example, keeps the momentum of a parameter on one rank. No rank can detect this alone. So the ranks
compare their state, optimizer by optimizer, whenever a rank's layout has changed:

    own (training thread)   the layout is unchanged -> nothing is sent
                            put the digests -> the first rank of the group waits for all -> one verdict for all ranks

**Verdict.** Each checkpoint has one verdict for each group of ranks, because `Mailbox.create` is atomic. It lists the
optimizers whose state differs, or is None if some rank did not report in time.

**Invariants.**

1. State is divided only after a verdict that all ranks of the group took part in. Each of them reads this verdict
   before its next save, even if the wait for it was interrupted.
2. State of a listed optimizer belongs to each rank alone, for as long as the process lives.
3. After None, a rank divides what was divided before, and nothing else. The silent rank does the same, whether its
   layout has not changed or it reports at a later step. If divided state is gone from this rank alone, its save fails.
   The next durable saves compare once more, because one rank may have been short of memory or slow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckpt.core.format.boxes import Holding
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ranks.world import Json, Mailbox
from ckpt.core.run.training_run import TrainingRun
from ckpt.errors import DeadlineError, SaveError
from ckpt.events import log

WAIT_S = 30.0  # timeout for the digests of other ranks, which reach the same step at about the same time
AGAIN_S, AGAINS = 1.0, 3  # timeout and maximum number of further comparisons after a rank did not report in time
Ranks = tuple[int, ...]
Item = tuple[str, str, tuple[int, ...]]  # name, dtype and shape of a tensor
State = dict[str, frozenset[Item]]  # the tensors of each optimizer


@dataclass
class _Group:
    """The knowledge of this rank about a group of ranks.

    - `reported`: the state at the last comparison. `common`: the state that is divided.
    - `differing`: the optimizers whose state differs.
    - `pending`: the keys of comparisons whose verdicts were not read yet, and what this rank reported.
    - `again`: the number of further comparisons, after a rank did not report in time.
    """

    reported: State | None = None
    common: State = field(default_factory=dict)
    differing: set[str] = field(default_factory=set)
    pending: dict[str, State] = field(default_factory=dict)
    again: int = 0


class CommonState:
    """Compares the optimizer state of this rank with that of the other ranks."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._groups: dict[Ranks, _Group] = {}

    @property
    def unsure(self) -> bool:
        """Return True if another comparison may find more state that all ranks have."""
        return any(one.again for one in self._groups.values())

    def own(
        self, checkpoint: CheckpointId, groups: Mapping[Ranks, Mapping[str, Sequence[Holding]]], timeout_s: float
    ) -> set[str]:
        """Return the names of the tensors that belong to this rank alone. Only a changed layout needs other ranks.

        groups: the state that may be divided, by the ranks that would divide it and by optimizer

        Raises SaveError if state that the other ranks still divide is gone, and PeerError.
        """
        for ranks in sorted({*groups, *self._groups}):
            known, here = self._groups.setdefault(ranks, _Group()), groups.get(ranks, {})
            state = {path: frozenset(map(_item, held)) for path, held in here.items() if path not in known.differing}
            if state != known.reported or known.pending or known.again:
                known.pending[f"state/{checkpoint}/{','.join(map(str, ranks))}"] = state
                self._compare(ranks, checkpoint.step, min(AGAIN_S if state == known.reported else WAIT_S, timeout_s))
        return {
            one.name
            for ranks, here in groups.items()
            for path, held in here.items()
            for one in held
            if _item(one) not in self._groups[ranks].common.get(path, ())
        }

    def _compare(self, ranks: Ranks, step: int, timeout_s: float) -> None:
        known, verdicts = self._groups[ranks], Future[list[Json]]()
        pending = dict(known.pending)

        def run() -> None:
            try:
                verdicts.set_result(self._verdicts(pending, ranks, timeout_s))
            except BaseException as error:
                verdicts.set_exception(error)

        try:  # in a thread, because a signal handler may save here while the mailbox is locked
            threading.Thread(target=run, name="ckpt-state", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            run()
        for (key, state), verdict in zip(pending.items(), verdicts.result(), strict=True):
            known.pending.pop(key, None)
            if verdict is not None:
                self._apply(known, state, verdict)
        if verdict is not None:
            return
        for path, items in known.common.items():
            if gone := items - state.get(path, frozenset()):
                raise SaveError(
                    f"step {step} was not saved: this rank no longer has {min(gone)[0]}, but the other ranks "
                    "still save it together with this rank. Change the state of an optimizer on all ranks at the same "
                    "step"
                )
        known.again = AGAINS if state != known.reported else known.again - 1
        known.reported = state
        log.warning(
            "not all of the ranks %s reported their optimizer state at step %d within %g s. Each rank saves all of its "
            "new state, so that checkpoints are larger",
            *(", ".join(map(str, ranks)), step, timeout_s),
        )

    def _verdicts(self, pending: dict[str, State], ranks: Ranks, timeout_s: float) -> list[Json]:
        """Return the verdict of each pending comparison, the same on all ranks. Only the last one is waited for."""
        mailbox = self._run.ownership.mailbox()
        *before, last = pending
        found = [mailbox.create(f"{key}/verdict", None) for key in before]
        mailbox.put(f"{last}/{self._run.world.rank}", {path: _digest(items) for path, items in pending[last].items()})
        return [*found, self._verdict(mailbox, last, ranks, timeout_s)]

    def _verdict(self, mailbox: Mailbox, key: str, ranks: Ranks, timeout_s: float) -> Json:
        first = self._run.world.rank == ranks[0]

        def decided() -> bool:
            self._run.heartbeat.touch(self._run.heartbeat.state)  # so that this is not detected as a hang
            return first and mailbox.poll([f"{key}/verdict"])

        try:
            if not first:
                return mailbox.wait([f"{key}/verdict"], timeout_s, decided)[0]
            verdict = differing(mailbox.wait([f"{key}/{rank}" for rank in ranks], timeout_s, decided))
        except DeadlineError:
            verdict = None
        return mailbox.create(f"{key}/verdict", verdict)

    def _apply(self, known: _Group, state: State, verdict: list[str]) -> None:
        if new := sorted({*verdict} - known.differing):
            log.info("%s: the ranks have different optimizer state, so each rank saves its own", ", ".join(new))
        known.differing.update(verdict)
        known.reported = {path: items for path, items in state.items() if path not in known.differing}
        known.common, known.again = known.reported, 0


def differing(posts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the optimizers whose state differs between ranks. Pure."""
    return sorted(path for path in {path for post in posts for path in post} if len({p.get(path) for p in posts}) > 1)


def _item(one: Holding) -> Item:
    return one.name, one.dtype, one.full


def _digest(items: Iterable[Item]) -> str:
    return chunk_digest(repr(sorted(items)).encode()).hex()
