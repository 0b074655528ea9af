"""Checks that replicated tensors have the same values on all ranks.

Each rank saves only a slice of a replicated tensor, so a checkpoint is correct only if all ranks hold the same values.
Therefore each manifest contains digests of the whole tensors, and the writer that commits compares them (see
`format.columns`). `step()` digests a sample of the elements of each tensor. If a step goes to a tier, all elements of
those tensors that only optimizers change are digested too, in the background. If ranks differ, the checkpoint fails.

At the start of a run, every `EVERY` steps and after such a failure, the ranks also compare digests directly. If tensors
differ, an error is logged and each rank saves its own copy from then on. Training never waits for these comparisons.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt.core.format.boxes import Holding
from ckpt.core.format.columns import Replicas, Row, replicas
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ranks.world import Mailbox
from ckpt.core.run.training_run import TrainingRun
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.core.state.fingerprint import Fingerprint
from ckpt.core.state.sharding import LocalPiece
from ckpt.core.state.tensors import as_bytes
from ckpt.errors import CheckpointError
from ckpt.events import log

EVERY = 1000  # steps between two comparisons
PIECE = 4 << 20  # elements per digest operation, so that large tensors need little extra device memory
COMPARE_S = 120.0  # timeout for the digests of other ranks
KEPT = 16  # number of snapshots whose samples are kept; larger than the number of slots in memory

Label = tuple[str, int, tuple[int, ...], str]
"""The key of a comparison: name, instance and offsets of a piece of a tensor, and a text that names its elements."""
Found = dict[tuple[int, ...], dict[Label, str]]
"""Digests of pieces of tensors, grouped by the ranks that hold the piece."""


@dataclass(frozen=True)
class _Sampled:
    """The samples of one snapshot."""

    step: int
    some: list[tuple[list[Holding], Fingerprint]]
    whole: Comparison | None

    def found(self) -> Found:
        """Return the digests. Call this after the snapshot has been copied."""
        found = self.whole.digests() if self.whole is not None else {}
        for holdings, sampled in self.some:
            elements = f"some of {len(holdings)} at {self.step}"
            for number, digest in sampled.digests().items():
                holding = holdings[number]
                found.setdefault(holding.replicas, {})[_label(holding, elements)] = digest[:8].hex()
        return found


class ReplicaCheck:
    """Compares the replicated tensors of a run. `differing`: names of those that differ between ranks. A change
    replaces the set, because other threads read it."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._term: int | None = None  # term of the last comparison
        self._sampled: dict[CheckpointId, _Sampled] = {}  # oldest first
        self._compared = set[CheckpointId]()
        self._lock = threading.RLock()  # a signal handler may need it too
        self.differing: set[str] = set()

    def begin(self, snapshot: NewSnapshot, *, durable: bool, closing: bool) -> None:
        """Sample a snapshot. `durable`: it goes to a tier. `closing`: the run is closing, so ranks do not compare."""
        term = snapshot.checkpoint.term
        due = not closing and (self._term != term or snapshot.checkpoint.step % EVERY == 0)
        if self._run.world.size == 1:
            return
        comparison = None
        if due or durable:
            comparison = Comparison(self._run.capture.replicated)
            snapshot.beside = comparison.look
        pairs = zip(snapshot.captured.replicas, snapshot.replicas, strict=True)
        some = [(holdings, sampled) for (holdings, _), sampled in pairs]
        with self._lock:
            self._sampled[snapshot.checkpoint] = _Sampled(snapshot.checkpoint.step, some, comparison)
            for old in list(self._sampled)[:-KEPT]:
                del self._sampled[old]
        if due and not self._run.closed:
            self._term = term
            text = (
                "Snapshots in memory mix these values. From the next snapshot, each rank saves its own; sharded "
                "tensors (HSDP) cannot be saved"
            )
            self._compare_soon(snapshot.checkpoint, text, snapshot)

    def said_of(self, checkpoint: CheckpointId) -> Replicas:
        """Return the digests of replicated tensors for this rank's manifest."""
        with self._lock:
            sampled = self._sampled.get(checkpoint)
        if sampled is None:
            return {}
        rows: dict[tuple[int, ...], list[Row]] = {
            ranks: [(*label, digest) for label, digest in found.items()] for ranks, found in sampled.found().items()
        }
        return replicas(rows)

    def find_differing(self, checkpoint: CheckpointId) -> None:
        """Compare with the other ranks which tensors differ, after a checkpoint has failed because ranks differ."""
        with self._lock:
            again = checkpoint in self._compared or checkpoint not in self._sampled
        if not again and not self._run.closed:
            self._compare_soon(
                checkpoint, "From now on, each rank saves its own; sharded tensors (HSDP) cannot be saved"
            )

    def _compare_soon(self, checkpoint: CheckpointId, text: str, snapshot: NewSnapshot | None = None) -> None:
        """Start a comparison in the background. `snapshot`: wait until this snapshot has been copied."""
        with self._lock:
            sampled = self._sampled.get(checkpoint)
            self._compared = {*self._compared & self._sampled.keys(), checkpoint}
        if sampled is None:
            return
        args = checkpoint, sampled, text, snapshot
        threading.Thread(target=self._compare, args=args, name="ckpt-replicas", daemon=True).start()

    def _compare(self, checkpoint: CheckpointId, sampled: _Sampled, text: str, snapshot: NewSnapshot | None) -> None:
        patience = self._run.settings.busy_timeout_s
        if snapshot is not None and (not snapshot.copied.wait(patience) or snapshot.error is not None):
            return
        world, step = self._run.world, checkpoint.step
        try:
            mailbox, found = self._run.ownership.mailbox(), sampled.found()
            mine = {",".join(map(str, ranks)): digests for ranks, digests in found.items()}
            names = differing(mailbox, f"{checkpoint}", world.rank, world.size, mine, COMPARE_S)
        except CheckpointError as error:
            log.warning("could not compare the replicated tensors of step %d between ranks: %s", step, error)
            return
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            log.error(
                "%s: the values of these replicated tensors differ between ranks at step %d. %s. Find the cause",
                shown,
                step,
                text,
            )
            self.differing = self.differing.union(names)


class Comparison:
    """Digests of this rank's replicated pieces at one step. Call `look` before the tensors change, `digests` later."""

    def __init__(self, pieces: Iterable[LocalPiece]) -> None:
        self._pieces = [p for p in pieces if len(p.holding.replicas) > 1]
        self._found: list[bytes | Tensor] = []

    def look(self) -> None:
        """Compute the digests. On an accelerator, only enqueue the work on the current stream."""
        self._found = [_digest(piece.tensor.detach()) for piece in self._pieces]
        self._pieces = [LocalPiece(p.holding, torch.empty(0)) for p in self._pieces]  # drop references to the tensors

    def digests(self) -> Found:
        """Return the digest of each piece, grouped by the ranks that hold it. Empty before `look`."""
        found: Found = {}
        for piece, digest in zip(self._pieces, self._found, strict=False):
            raw = digest if isinstance(digest, bytes) else digest.cpu().numpy().tobytes()
            found.setdefault(piece.holding.replicas, {})[_label(piece.holding, "all")] = chunk_digest(raw)[:8].hex()
        return found


def _label(holding: Holding, elements: str) -> Label:
    return holding.name, holding.instance, holding.offsets, elements


def _digest(tensor: Tensor) -> bytes | Tensor:
    flat = as_bytes(tensor.contiguous())
    if tensor.device.type == "cpu":
        return chunk_digest(memoryview(flat.numpy().data))
    whole = flat[: len(flat) // 4 * 4].view(torch.int32)
    place = torch.arange(min(PIECE, len(whole)), device=whole.device, dtype=torch.int32)
    found = [_sums(part, place[: len(part)] ^ (7919 * n)) for n, part in enumerate(torch.split(whole, PIECE))]
    return torch.stack([*torch.stack(found).sum(0), flat[-4:].sum()])


def _sums(part: Tensor, place: Tensor) -> Tensor:
    """Return the sum of the elements, and the sum of the elements XORed with their positions."""
    return torch.stack([part.sum(dtype=torch.int64), (part ^ place).sum(dtype=torch.int64)])


def differing(
    mailbox: Mailbox, step: str, rank: int, size: int, mine: dict[str, dict[Label, str]], timeout_s: float
) -> list[str]:
    """Return, on all ranks, the names of the tensors that differ between ranks. Raises DeadlineError, PeerError."""
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
        for *label, digest in post:
            seen.setdefault("\0".join(map(str, label)), set()).add(digest)
    return [label.partition("\0")[0] for label, digests in seen.items() if len(digests) > 1]


def _sum(found: dict[Label, Any]) -> str:
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:32]
