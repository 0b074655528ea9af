"""Whether the replicas that are sliced among ranks are really alike.

Slices of different ranks make one checkpoint, which is only right as long as the ranks hold the same. So they compare
digests when a run starts and now and then: first one digest for all that the same ranks hold, and only if these differ
one for each tensor. A tensor that differs is saved by each rank for itself from then on, and an error is logged.
Nothing here is waited for by training.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.format.digest import blob_digest
from ckpt.format.partition import Holding
from ckpt.ranks.world import Mailbox
from ckpt.state.sharding import LocalPiece
from ckpt.state.tensors import as_bytes
from ckpt.trainer.progress import Progress
from ckpt.trainer.session import Session
from ckpt.trainer.staging.snapshot import PendingSnapshot

EVERY = 1000  # steps between two comparisons
PIECE = 4 << 20  # numbers that are looked at in one go: what a device needs for it is little, however large a tensor is
COMPARE_S = 120.0  # until the digests of other ranks are there

Label = tuple[str, int, tuple[int, ...]]
"""What the ranks compare: name, instance and offsets of a piece."""


class ReplicaCheck:
    """Of one Checkpointer. `differing`: tensors that ranks should hold alike, and do not; replaced, never changed."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session, self._progress = session, progress
        self._epoch: int | None = None  # in which they were compared last
        self.differing: set[str] = set()

    def begin(self, job: PendingSnapshot) -> None:
        """At the first save of an epoch, and now and then. Nobody waits for the answer."""
        epoch = job.attempt.epoch
        due = self._epoch != epoch or job.attempt.step % EVERY == 0
        if self._session.world.size == 1 or not due or self._progress.closed:
            return
        self._epoch = epoch
        comparison = Comparison(self._session.capture.replicated)
        job.beside = comparison.look
        threading.Thread(target=self._compare, args=(job, comparison), name="ckpt-replicas", daemon=True).start()

    def _compare(self, job: PendingSnapshot, comparison: Comparison) -> None:
        if not job.copied.wait(self._session.settings.busy_timeout_s) or job.error is not None:
            return
        world, step = self._session.world, job.attempt.step
        try:
            mailbox = self._session.ownership.mailbox()
            names = differing(mailbox, f"{job.attempt}", world.rank, world.size, comparison.digests(), COMPARE_S)
        except CheckpointError as error:
            log.warning("the replicas of step %d could not be compared: %s", step, error)
            return
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            log.error(
                "%s: ranks that should hold the same hold different values at step %d. Steps saved until now mix "
                "them. From the next one on each rank's own are saved, but of sharded tensors (HSDP) still a "
                "mixture. Look for what lets the replicas drift",
                shown,
                step,
            )
            self.differing = self.differing.union(names)


class Comparison:
    """Digests of what this rank holds like others, at one step. `look` while nothing changes, `digests` when it has."""

    def __init__(self, pieces: Iterable[LocalPiece]) -> None:
        self._pieces = [p for p in pieces if len(p.holding.replicas) > 1]
        self._found: list[bytes | Tensor] = []

    def look(self) -> None:
        """On an accelerator the work is only put on the current stream; the result is there when that is."""
        self._found = [_digest(piece.tensor.detach()) for piece in self._pieces]
        self._pieces = [LocalPiece(p.holding, torch.empty(0)) for p in self._pieces]  # let go of the tensors

    def digests(self) -> dict[str, dict[Label, str]]:
        """By the ranks that hold it, of each piece."""
        found: dict[str, dict[Label, str]] = {}
        for piece, digest in zip(self._pieces, self._found, strict=True):
            raw = digest if isinstance(digest, bytes) else digest.cpu().numpy().tobytes()
            ranks = ",".join(map(str, piece.holding.replicas))
            found.setdefault(ranks, {})[_label(piece.holding)] = raw.hex()
        return found


def _label(holding: Holding) -> Label:
    return holding.name, holding.instance, holding.offsets


def _digest(tensor: Tensor) -> bytes | Tensor:
    flat = as_bytes(tensor.contiguous())
    if tensor.device.type == "cpu":
        return blob_digest(memoryview(flat.numpy().data))
    whole = flat[: len(flat) // 4 * 4].view(torch.int32)
    place = torch.arange(min(PIECE, len(whole)), device=whole.device, dtype=torch.int32)
    found = [_sums(part, place[: len(part)] ^ (7919 * n)) for n, part in enumerate(torch.split(whole, PIECE))]
    return torch.stack([*torch.stack(found).sum(0), flat[-4:].sum()])


def _sums(part: Tensor, place: Tensor) -> Tensor:
    """Of the numbers in it, and of these mixed with their places."""
    return torch.stack([part.sum(dtype=torch.int64), (part ^ place).sum(dtype=torch.int64)])


def differing(
    mailbox: Mailbox, step: str, rank: int, size: int, mine: dict[str, dict[Label, str]], timeout_s: float
) -> list[str]:
    """The names of all tensors that ranks hold differently, the same on every rank. DeadlineError, PeerError."""
    sums = {ranks: _sum(found) for ranks, found in mine.items()}
    mailbox.put(f"replicas/{step}/{rank}", sums)
    if rank == 0:
        posts = mailbox.wait([f"replicas/{step}/{r}" for r in range(size)], timeout_s)
        groups = sorted({ranks for post in posts for ranks in post})
        odd = [ranks for ranks in groups if len({post[ranks] for post in posts if ranks in post}) > 1]
        mailbox.put(f"replicas/{step}/groups", odd)
    groups = mailbox.wait([f"replicas/{step}/groups"], 2 * timeout_s)[0]
    if not groups:
        return []
    for ranks in groups:
        if ranks in mine:
            mailbox.put(f"replicas/{step}/{ranks}/{rank}", [[*label, digest] for label, digest in mine[ranks].items()])
    if rank == 0:
        names = [name for ranks in groups for name in _differing(mailbox, step, ranks, timeout_s)]
        mailbox.put(f"replicas/{step}/names", sorted(set(names)))
    found: list[str] = mailbox.wait([f"replicas/{step}/names"], 2 * timeout_s)[0]
    return found


def _differing(mailbox: Mailbox, step: str, ranks: str, timeout_s: float) -> list[str]:
    seen: dict[str, set[str]] = {}
    for post in mailbox.wait([f"replicas/{step}/{ranks}/{rank}" for rank in ranks.split(",")], timeout_s):
        for name, instance, offsets, digest in post:
            seen.setdefault(f"{name}\0{instance}\0{offsets}", set()).add(digest)
    return [label.partition("\0")[0] for label, digests in seen.items() if len(digests) > 1]


def _sum(found: dict[Label, Any]) -> str:
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:32]
