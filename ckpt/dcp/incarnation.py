"""By which name this process is known as a job, and what it remembers of each place that it saves to.

A job is known by its *incarnation*, which every process that saves for it has alike: the trainer, and the process that
`dcp.async_save` may start, which gets it with the pickled writer. Loading a checkpoint begins a new one, which goes on
from there: what was saved beyond it is then no part of the history any more, as after `Checkpointer.restore`. All of it
can be lost: the log says it again.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.core.format.manifest import Attempt, new_nonce
from ckpt.core.log.log import Acquire
from ckpt.core.log.trimming import Trimmer


@dataclass(frozen=True, slots=True)
class Incarnation:
    """`restored`: the checkpoint that it goes on from; None: from all there is. `number`: greater in a newer one."""

    nonce: str
    restored: Attempt | None
    number: int = field(compare=False)

    def name(self, turn: int) -> str:
        """Of its epochs: it opens another one to save a step again that could not be saved."""
        return hashlib.sha256(f"{self.nonce}:{turn}".encode()).hexdigest()[:8] if turn else self.nonce


@dataclass
class Known:
    """Of one place, in this process. `root`: the id of the run that was opened there, "" before that."""

    root: str = ""
    trusted: bool = False  # it was seen to create only what is absent
    open: set[Attempt] = field(default_factory=set)  # begun here, and neither committed nor aborted
    verified: set[Attempt] = field(default_factory=set)
    read_back: Attempt | None = None  # the last one whose share was read again here
    cleared: set[Attempt] = field(default_factory=set)  # given up, and nothing is left of them
    sweeps: int = 0
    leaving: list[tuple[float, list[str]]] = field(default_factory=list)  # names, and when they may be deleted
    trimmer: Trimmer = field(default_factory=Trimmer)


_lock = threading.Lock()
_incarnations: dict[str, Incarnation] = {}
_owners: dict[tuple[str, ...], tuple[Incarnation, Acquire]] = {}  # by the places that are saved to
_known: dict[str, Known] = {}
_numbers = itertools.count(1)


def incarnation_of(urls: Sequence[str]) -> Incarnation:
    """This job, as these places know it."""
    with _lock:
        there = [_incarnations[url] for url in urls if url in _incarnations]
        newest = max(there, key=lambda i: i.number, default=None) or Incarnation(new_nonce(), None, next(_numbers))
        _incarnations.update(dict.fromkeys(urls, newest))
        return newest


def went_back(roots: Mapping[str, str], attempt: Attempt) -> None:
    """The state is that of a checkpoint now: what is saved to these places from now on goes on from there. `roots`: by
    URL the id of the run that was read, which may be another one than this process knew there."""
    with _lock:
        _incarnations.update(dict.fromkeys(roots, Incarnation(new_nonce(), attempt, next(_numbers))))
    for url, root in roots.items():
        if known(url).root not in ("", root):
            forget(url)
        known(url).root = root


def adopt(urls: Sequence[str], incarnation: Incarnation) -> None:
    """This process is of the job that another one has told of, until it loads a checkpoint itself."""
    with _lock:
        _incarnations.update(dict.fromkeys(urls, replace(incarnation, number=next(_numbers))))


def forget(url: str, *, open: set[Attempt] | None = None) -> None:
    """What is remembered of a place is no more: its run is gone. `open`: attempts of which files may be left there."""
    with _lock:
        _known[url] = Known(open=open or set())
        for urls in [urls for urls in _owners if url in urls]:
            del _owners[urls]


def known(url: str) -> Known:
    with _lock:
        return _known.setdefault(url, Known())


def owner_known(urls: tuple[str, ...], mine: Incarnation) -> Acquire | None:
    """The epoch that this incarnation last saved by to these places."""
    found, owner = _owners.get(urls, (None, None))
    return owner if found == mine else None


def note_owner(urls: tuple[str, ...], mine: Incarnation, owner: Acquire) -> None:
    _owners[urls] = (mine, owner)
