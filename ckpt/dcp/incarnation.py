"""The identity of this process as a job, and what it remembers of each tier.

All processes that save for a job share its *incarnation*: the trainer, and the process that `dcp.async_save` may start,
which receives it with the pickled writer. Loading a checkpoint begins a new one, which continues from there: later
checkpoints then leave the history, as after `Checkpointer.restore`. All of this can be lost: the log has it too.
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
    """A job. `restored`: the checkpoint that it continues from, None: the newest. `number`: greater for newer ones."""

    nonce: str
    restored: CheckpointId | None
    number: int = field(compare=False)

    def name(self, turn: int) -> str:
        """Return the name of one of its terms: it opens another one to retry a step whose save failed."""
        return hashlib.sha256(f"{self.nonce}:{turn}".encode()).hexdigest()[:8] if turn else self.nonce


@dataclass
class Known:
    """The state that this process keeps for a tier. `root`: id of the run that was opened there, "" before that."""

    root: str = ""
    trusted: bool = False  # it was seen to create objects only if absent
    open: set[CheckpointId] = field(default_factory=set)  # begun here, and neither committed nor aborted
    verified: set[CheckpointId] = field(default_factory=set)
    read_back: CheckpointId | None = None  # the last one whose share was read back here
    cleared: set[CheckpointId] = field(default_factory=set)  # aborted, and all its files are deleted
    sweeps: int = 0
    leaving: list[tuple[float, list[str]]] = field(default_factory=list)  # names, and when they may be deleted
    trimmer: Trimmer = field(default_factory=Trimmer)


_lock = threading.Lock()
_incarnations: dict[str, Incarnation] = {}
_owners: dict[tuple[str, ...], tuple[Incarnation, Acquire]] = {}  # by the URLs of the tiers
_known: dict[str, Known] = {}
_numbers = itertools.count(1)


def incarnation_of(urls: Sequence[str]) -> Incarnation:
    """Return this job, as these tiers know it."""
    with _lock:
        there = [_incarnations[url] for url in urls if url in _incarnations]
        newest = max(there, key=lambda i: i.number, default=None) or Incarnation(new_nonce(), None, next(_numbers))
        _incarnations.update(dict.fromkeys(urls, newest))
        return newest


def went_back(roots: Mapping[str, str], checkpoint: CheckpointId) -> None:
    """Record that a checkpoint was loaded: later saves continue from it. `roots`: ids of the runs that were read, by
    URL; they may differ from the ones known."""
    with _lock:
        _incarnations.update(dict.fromkeys(roots, Incarnation(new_nonce(), checkpoint, next(_numbers))))
    for url, root in roots.items():
        if known(url).root not in ("", root):
            forget(url)
        known(url).root = root


def adopt(urls: Sequence[str], incarnation: Incarnation) -> None:
    """Adopt the job of another process, until this process loads a checkpoint itself."""
    with _lock:
        _incarnations.update(dict.fromkeys(urls, replace(incarnation, number=next(_numbers))))


def forget(url: str, *, open: set[CheckpointId] | None = None) -> None:
    """Forget a tier whose run is gone. `open`: checkpoints whose files may remain there."""
    with _lock:
        _known[url] = Known(open=open or set())
        for urls in [urls for urls in _owners if url in urls]:
            del _owners[urls]


def known(url: str) -> Known:
    with _lock:
        return _known.setdefault(url, Known())


def owner_known(urls: tuple[str, ...], mine: Incarnation) -> Acquire | None:
    """Return the term with which this job last saved to these tiers."""
    found, owner = _owners.get(urls, (None, None))
    return owner if found == mine else None


def note_owner(urls: tuple[str, ...], mine: Incarnation, owner: Acquire) -> None:
    _owners[urls] = (mine, owner)
