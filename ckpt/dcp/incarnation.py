"""The identity of this process as a job, and the data that this process keeps for each tier.

All processes that save for one job have the same `Incarnation`: the trainer, and the process that `dcp.async_save` may
start, which receives it with the pickled writer. Loading a checkpoint begins a new `Incarnation` that
continues from it; later checkpoints leave the history, as after `Checkpointer.restore`. The log has these facts too.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.core.format.manifest import CheckpointId, new_nonce
from ckpt.core.log.run_log import Acquire, Trimmer


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One job. `restored`: the checkpoint that it continues from; None means the newest. `number`: higher if newer."""

    nonce: str
    restored: CheckpointId | None
    number: int = field(compare=False)

    def name(self, turn: int) -> str:
        """Return the name of the job's term number `turn`. A job opens a new term to retry a failed step."""
        return hashlib.sha256(f"{self.nonce}:{turn}".encode()).hexdigest()[:8] if turn else self.nonce


@dataclass
class Known:
    """The data that this process keeps for a tier. `root`: id of the run that this process opened there, or ""."""

    root: str = ""
    trusted: bool = False  # True once the store has created an object only if it was absent
    open: set[CheckpointId] = field(default_factory=set)  # begun by this process, but neither committed nor aborted
    verified: set[CheckpointId] = field(default_factory=set)
    read_back: CheckpointId | None = None  # the last checkpoint of which this process has read its share back
    cleared: set[CheckpointId] = field(default_factory=set)  # aborted checkpoints whose files are all deleted
    sweeps: int = 0
    leaving: list[tuple[float, list[str]]] = field(default_factory=list)  # time of deletion, names of the files
    trimmer: Trimmer = field(default_factory=Trimmer)


_lock = threading.Lock()
_incarnations: dict[str, Incarnation] = {}
_owners: dict[tuple[str, ...], tuple[Incarnation, Acquire]] = {}  # by the URLs of the tiers
_known: dict[str, Known] = {}
_numbers = itertools.count(1)


def incarnation_of(urls: Sequence[str]) -> Incarnation:
    """Return the newest `Incarnation` that is stored for these tiers, or a new one. Store it for all of these tiers."""
    with _lock:
        there = [_incarnations[url] for url in urls if url in _incarnations]
        newest = max(there, key=lambda i: i.number, default=None) or Incarnation(new_nonce(), None, next(_numbers))
        _incarnations.update(dict.fromkeys(urls, newest))
        return newest


def went_back(roots: Mapping[str, str], checkpoint: CheckpointId) -> None:
    """Record that a checkpoint was loaded, so that later saves continue from it. `roots`: by URL, the id of the run
    that was read; another run may have replaced the one that this process opened before."""
    with _lock:
        _incarnations.update(dict.fromkeys(roots, Incarnation(new_nonce(), checkpoint, next(_numbers))))
    for url, root in roots.items():
        if known(url).root not in ("", root):
            forget(url)
        known(url).root = root


def adopt(urls: Sequence[str], incarnation: Incarnation) -> None:
    """Use the `Incarnation` of another process for these tiers until this process loads a checkpoint itself."""
    with _lock:
        _incarnations.update(dict.fromkeys(urls, replace(incarnation, number=next(_numbers))))


def forget(url: str, *, open: set[CheckpointId] | None = None) -> None:
    """Discard the data of a tier whose run is gone. `open`: checkpoints of which files may remain in the tier."""
    with _lock:
        _known[url] = Known(open=open or set())
        for urls in [urls for urls in _owners if url in urls]:
            del _owners[urls]


def known(url: str) -> Known:
    with _lock:
        return _known.setdefault(url, Known())


def owner_known(urls: tuple[str, ...], job: Incarnation) -> Acquire | None:
    """Return the term with which this job last saved to these tiers."""
    found, owner = _owners.get(urls, (None, None))
    return owner if found == job else None


def note_owner(urls: tuple[str, ...], job: Incarnation, owner: Acquire) -> None:
    _owners[urls] = (job, owner)
