"""The logs of a run, and what its newest checkpoint consists of, read while the run is being opened.

A restore that comes later looks only for what was appended since: each record names the one before it, so that what was
read early is the beginning of what is there now, or that is seen. What goes wrong early is nobody's business: whoever
looks again meets it, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from ckpt.core.checkpoint import losses, read, steady
from ckpt.core.checkpoint.concurrent import all_of
from ckpt.core.checkpoint.losses import Loss
from ckpt.core.format.rank_index import Directory
from ckpt.core.log.log import Commit, RunLog
from ckpt.errors import CheckpointError, FormatError, NoCheckpointError, StoreError
from ckpt.store import folder_of, open_store

WAIT_S = 5.0  # for a look that was begun: one that hangs is left alone

Content = read.Manifest | Directory


@dataclass
class _Seen:
    """In one place. `content`: what `commit`, the newest checkpoint, consists of."""

    log: RunLog
    commit: Commit | None = None
    content: Content | None = None


class EarlyLook:
    """Begun when it is made, for each of these places in a thread of its own; of each log good for one restore."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self._looks: dict[str, Future[_Seen | None]] = {}
        self._seen: dict[str, _Seen] = {}
        for url in urls:
            look = self._looks[url] = Future()
            look.set_running_or_notify_cancel()  # whoever gives up waiting for it does not end it
            threading.Thread(target=_look, args=(url, look), name="ckpt-look", daemon=True).start()

    def logs(self, urls: Iterable[str]) -> list[tuple[RunLog, list[Loss]]]:
        """Of each place the log as it is now, and what may be lost with damaged records."""
        return read.run(all_of(map(self._log, urls)))

    def content(self, url: str, commit: Commit | None) -> Content | None:
        """What this checkpoint consists of, if that was seen, of a log that was asked for; it is verified."""
        seen = self._seen.get(url)
        return seen.content if seen is not None and commit is not None and seen.commit == commit else None

    async def _log(self, url: str) -> tuple[RunLog, list[Loss]]:
        """Read the log of a run that this job has opened: whatever fails here may pass."""
        until = time.monotonic() + steady.WINDOW_S
        while True:
            try:
                return await self._read_log(url)
            except (FormatError, NoCheckpointError, StoreError) as error:
                if time.monotonic() >= until or (error.retryable and folder_of(url) is None):  # retried long enough
                    raise
            await asyncio.sleep(steady.LONGEST_PAUSE_S / 2)

    async def _read_log(self, url: str) -> tuple[RunLog, list[Loss]]:
        seen = await self._taken(url)
        if seen is not None:
            seen.log.store = open_store(url)
            try:
                await seen.log.refresh()
            finally:
                await seen.log.store.aclose()
            if not seen.log.state.damaged:  # else it may be another run, or was mended meanwhile
                self._seen[url] = seen
                return seen.log, []
        log = await read.open_run(url)
        try:
            return log, await losses.of_log(log)
        finally:
            await log.store.aclose()

    async def _taken(self, url: str) -> _Seen | None:
        """What was seen early there: once."""
        look = self._looks.pop(url, None)
        if look is not None:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.wrap_future(look), WAIT_S)
        return None


def _look(url: str, look: Future[_Seen | None]) -> None:
    try:
        look.set_result(asyncio.run(_first_look(url)))
    except Exception:
        look.set_result(None)


async def _first_look(url: str) -> _Seen:
    log = await read.open_run(url, open_store(url, patience_s=0))  # nobody waits for it
    seen = _Seen(log)
    try:
        if not log.state.damaged:
            with contextlib.suppress(CheckpointError):
                commit = read.choose(log)
                seen.content, seen.commit = await read.consists_of(log.store, commit), commit
    finally:
        await log.store.aclose()
    return seen
