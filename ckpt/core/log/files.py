"""The files of a run log, one for each record, and which of them count.

Every SNAPSHOT has a number that is a multiple of SNAPSHOT_EVERY. The *floor* is the number of the older of the two
newest intact SNAPSHOTs, or 0 if there are fewer than two. Records below the floor are deleted. A writer that was
suspended before its put may create such a file again; no reader counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import unseal
from ckpt.core.log.records import SNAPSHOT_EVERY, RunState, expand
from ckpt.errors import CorruptError, FormatError, NotFoundError, StoreError
from ckpt.store import Store

MAX_RECORD = 256 << 20  # bytes
MAX_RELISTS = 8  # listings in a row in which a SNAPSHOT was deleted before it was read
NOTHING: Mapping[int, bytes] = MappingProxyType({})


def record_key(seq: int) -> str:
    return f"log/{seq:012d}.json"


def sequence(key: str) -> int | None:
    """Return the number of a record by its name, None for anything else."""
    name = key.removeprefix("log/").removesuffix(".json")
    return int(name) if len(name) == 12 and name.isdigit() and name.isascii() else None


def is_snapshot_number(seq: int) -> bool:
    """Return True if the record with this number is a SNAPSHOT, unless the log was damaged when it was put."""
    return seq > 0 and seq % SNAPSHOT_EVERY == 0


@dataclass(frozen=True, slots=True)
class Listed:
    """A listing of the log.

    sizes        bytes of each record that counts, by number
    below        numbers of files below the floor
    snapshots    numbers of the two newest intact SNAPSHOTs, newest first; fewer if there are fewer
    """

    sizes: dict[int, int]
    below: Sequence[int]
    snapshots: Sequence[int]

    @property
    def floor(self) -> int:
        return self.snapshots[1] if len(self.snapshots) > 1 else 0


class LogFiles:
    """Reads the files of one log. `root`: the id of the run."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.root = ""
        self._intact: dict[int, bool] = {}  # numbers of SNAPSHOTs that were read, and whether they are intact
        self._ordinary: set[int] = set()  # multiples at which an intact record of another type was read
        self._states: dict[int, RunState] = {}  # parsed SNAPSHOTs of the last listing, for `RunLog._restart`

    async def list_records(self, own: Mapping[int, bytes] = NOTHING) -> Listed:
        """List the log, and read the SNAPSHOTs that are new. `own`: a record that was just put.

        A listing needs no order and may come in pages. It contains every file that exists during the whole call. Files
        that are created or deleted during the call may be missing, so callers compare the floors of two listings.
        """
        for _ in range(MAX_RELISTS):
            sizes = {n: info.size async for info in self.store.list("log/") if (n := sequence(info.key)) is not None}
            sizes.update({seq: len(raw) for seq, raw in own.items()})
            snapshots, vanished = list[int](), None
            for seq in sorted(filter(is_snapshot_number, sizes), reverse=True):
                if seq not in self._intact:
                    try:
                        raw = own[seq] if seq in own else await self.read(seq, sizes[seq])
                    except StoreError as error:
                        if error.retryable or not snapshots:
                            raise
                        continue  # a bad sector in the older one: the newest is enough
                    if raw is None and sizes[seq] <= MAX_RECORD:
                        vanished = seq
                        break  # deleted during the call, so there are newer ones
                    state = self.snapshot(seq, raw)
                    self._intact[seq] = state is not None
                    if state is not None:
                        self._states[seq] = state
                if self._intact[seq]:
                    snapshots.append(seq)
                if len(snapshots) == 2:
                    break
            if vanished is None:
                floor = snapshots[1] if len(snapshots) > 1 else 0
                self._states = {seq: state for seq, state in self._states.items() if seq in snapshots}
                below = [seq for seq in sizes if seq < floor]
                return Listed({seq: size for seq, size in sizes.items() if seq >= floor}, below, snapshots)
        raise self._not_found(record_key(vanished or 0))

    def _not_found(self, key: str) -> StoreError:
        """Return the error for a log file that is listed but that the store cannot find."""
        return StoreError(f"{key} in {self.store.url} is listed, but cannot be read now", retryable=True)

    async def read(self, seq: int, size: int | None) -> bytes | None:
        """Return the bytes of a record, or None if it is missing or too large.

        A damaged record of a remote store is read twice, because it may have been damaged in transit. A pipe, a link or
        a folder under a record's name is listed as empty: the record is lost.
        """
        if size is None or size > MAX_RECORD:
            return None
        if size == 0:
            return b""
        raw = await self._get(record_key(seq))
        return raw if not self.store.remote or self._is_sound(seq, raw) else await self._get(record_key(seq))

    async def _get(self, key: str) -> bytes | None:
        try:
            return bytes(await self.store.get(key))
        except NotFoundError:
            return None

    def _is_sound(self, seq: int, raw: bytes | None) -> bool:
        try:
            self.unsealed(seq, raw)
        except CorruptError:
            return False
        return True

    def unsealed(self, seq: int, raw: bytes | None) -> dict[str, Any]:
        """Decode a record. Raise CorruptError unless it has this number and belongs to this run."""
        if raw is None:
            raise CorruptError("missing")
        record = unseal(raw, f"log record {seq}")
        if record.get("seq") != seq or record.get("root") != self.root:
            raise CorruptError(f"log record {seq} belongs to another run or number")
        return record

    def snapshot(self, seq: int, raw: bytes | None) -> RunState | None:
        """Return the state that a SNAPSHOT describes, with itself, or None if it is damaged or of another type."""
        try:
            record = self.unsealed(seq, raw)
            if record["type"] != "SNAPSHOT":
                self._ordinary.add(seq)  # the log was damaged when this was put
                return None
            state = expand(record["body"], seq)
            state.requests[str(record["id"])] = seq
        except (CorruptError, FormatError, KeyError, TypeError):
            return None
        state.next_seq, state.last = seq + 1, file_digest(raw or b"")
        return state
