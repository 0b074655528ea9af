"""What the small JSON files of a run say, and the names of all files.

    FORMAT.json                                   this is a run of ours, version, root id
    packs/<attempt>.<rank>.<try>.safetensors      tensor bytes
    packs/<attempt>.<rank>.<try>-<n>.safetensors  the same of a part that has several packs: n = 0, 1, ...
    parts/<attempt>.<rank>.<try>.json             the manifest of one rank, see `Part`
    index/<attempt>-<digest>.safetensors          all tables of a checkpoint, merged; of many ranks the directory of
                                                  them, see `ckpt.core.format.rank_index`. Named by content, so that two
                                                  committers cannot disagree about one name
    log/<seq>.json                                records, see `ckpt.core.log.records`

Every JSON file is written in one canonical form (sorted keys, no spaces) and carries the SHA-256 of itself without the
`digest` field. A file whose bytes are not exactly the canonical form of what they parse to is damaged: one flipped bit
anywhere is noticed.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import zstandard

from ckpt.core.format.digest import file_digest
from ckpt.errors import CorruptError, FormatError

MAJOR, MINOR = 3, 0
MAX_JSON = 256 << 20  # bytes; refused before parsing
FEW_BYTES, MOST_FOLDS = 16 << 20, 500  # what is pressed may say so much, and more only so many times its size
MAX_FORMAT = 1 << 20
MAX_EPOCH = 10**12
MAX_WORLD = 1 << 20
MAX_HEADER = 100 << 20  # of a pack; safetensors refuses more
MAX_NEEDS = 64  # older checkpoints that one is built on
_ATTEMPT = re.compile(r"([1-9][0-9]{0,11})\.([0-9a-f]{8})-(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True, order=True, slots=True)
class Attempt:
    """The saving of one step by one incarnation. Text form: `<epoch>.<nonce>-<step>`."""

    epoch: int
    step: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.epoch}.{self.nonce}-{self.step}"

    @classmethod
    def parse(cls, text: object) -> Attempt:
        found = _ATTEMPT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise CorruptError(f"not an attempt: {text!r}")
        return cls(int(found[1]), int(found[3]), found[2])


def new_nonce() -> str:
    return secrets.token_hex(4)


def nonce_of(job: str, turn: int) -> str:
    """Return the nonce of a job's next term. turn: counts the terms that the job has asked for, from 0."""
    return hashlib.sha256(f"{job}:{turn}".encode()).hexdigest()[:8]


def read_needs(texts: Any, attempt: Attempt) -> tuple[Attempt, ...]:
    """The attempts that one was built on. CorruptError unless all are older, in their order, and not too many."""
    if not isinstance(texts, list) or len(texts) > MAX_NEEDS:
        raise CorruptError(f"attempt {attempt} needs an impossible number of others")
    found = tuple(map(Attempt.parse, texts))
    if any(a >= b for a, b in itertools.pairwise((*found, attempt))):
        raise CorruptError(f"attempt {attempt} needs one that is not older, or not in its place")
    return found


def needs_texts(attempts: Iterable[Attempt]) -> list[str]:
    """As `read_needs` wants them."""
    return [str(attempt) for attempt in sorted(set(attempts))]


def pack_key(attempt: Attempt, rank: int, number: int, segment: int | None = None) -> str:
    """`segment`: counts the packs of a part that has several; None if it has one."""
    return f"packs/{attempt}.{rank}.{number}{'' if segment is None else f'-{segment}'}.safetensors"


def part_key(attempt: Attempt, rank: int, number: int) -> str:
    return f"parts/{attempt}.{rank}.{number}.json"


def index_key(attempt: Attempt, digest: str) -> str:
    return f"index/{attempt}-{digest[:16]}.safetensors"


_OWNED = re.compile(
    r"(?:(packs)|parts|index)/([0-9]+\.[0-9a-f]{8}-[0-9]+)"
    r"(?:\.([0-9]{1,9})\.([0-9]{1,9})(?(1)(?:-[0-9]{1,9})?)|-[0-9a-f]{16})\.(?:safetensors|json)"
)


def owner(key: str) -> Attempt | None:
    """The attempt that a pack, part or index file belongs to, by its name; None if it is not ours."""
    found = _OWNED.fullmatch(key)
    try:
        return Attempt.parse(found[2]) if found else None
    except CorruptError:
        return None


def by_owner(keys: Iterable[str]) -> dict[Attempt, list[str]]:
    """The files of each attempt."""
    found: dict[Attempt, list[str]] = {}
    for key in keys:
        if (attempt := owner(key)) is not None:
            found.setdefault(attempt, []).append(key)
    return found


def rank_and_try(key: str) -> tuple[int, int]:
    """Return the rank and the try that a pack or a part belongs to. CorruptError if it is neither."""
    found = _OWNED.fullmatch(key)
    if found is None or found[3] is None:
        raise CorruptError(f"not a part: {key}")
    return int(found[3]), int(found[4])


# -- canonical, self-digested JSON --


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(data: Any) -> bytes:
    return _CANONICAL.encode(data).encode()


def seal(data: Mapping[str, Any]) -> bytes:
    """The file: the fields and their digest."""
    return canonical({**data, "digest": file_digest(canonical(dict(data)))})


def unseal(raw: bytes | bytearray | memoryview, what: str) -> dict[str, Any]:
    """The fields of a sealed file. CorruptError unless every byte is as it was written."""
    if len(raw) > MAX_JSON:
        raise CorruptError(f"{what} is implausibly large: {len(raw)} bytes")
    raw = bytes(raw)
    try:
        data = json.loads(raw)
        texts = {key: canonical(key) + b":" + canonical(value) for key, value in sorted(data.items())}
        whole = b"{" + b",".join(texts.values()) + b"}" == raw
        claimed = data.pop("digest")
        del texts["digest"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError(f"{what} is damaged: not readable as JSON") from None
    if not whole or claimed != file_digest(b"{" + b",".join(texts.values()) + b"}"):
        raise CorruptError(f"{what} is damaged: its digest does not match")
    assert isinstance(data, dict)
    return data


# -- what is large and says the same at each checkpoint --


class PressedObject(dict[str, Any]):
    """A JSON object, and the text that it is kept as in other JSON. To be looked at only."""

    __slots__ = ("text",)

    def __init__(self, fields: Mapping[str, Any], text: str = "") -> None:
        super().__init__(fields)
        self.text = text or press(canonical(self))


def press(text: bytes) -> str:
    """JSON, to stand as a text in other JSON: a zstd frame in base64."""
    return base64.b64encode(zstandard.ZstdCompressor(level=3, write_content_size=True).compress(text)).decode()


@lru_cache(4)
def unpress(text: str) -> PressedObject:
    """The object. ValueError if it is not one, or implausibly large. Who reads the same again gets the same."""
    found = parsed(unpressed(text))
    if type(found) is not dict:
        raise ValueError("no object")
    return PressedObject(found, text)


def plain_size(stored: int) -> int:
    """Return how many bytes so many compressed bytes may become. Readers refuse more before they decompress them."""
    return FEW_BYTES + MOST_FOLDS * stored


def unpressed(text: str) -> bytes:
    """The JSON. ValueError if it is implausibly large, or was not pressed."""
    try:
        frame = base64.b64decode(text, validate=True)
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= min(MAX_JSON, plain_size(len(frame))):
            raise ValueError(f"implausibly large: {size} bytes")
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def parsed(text: bytes) -> Any:
    """ValueError if it is no JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


# -- FORMAT.json --


def new_format(root: str | None = None) -> bytes:
    """`root`: the id of a run whose FORMAT.json was lost; by default a new one."""
    return seal({"format": "everystep", "major": MAJOR, "minor": MINOR, "root": root or secrets.token_hex(16)})


def read_format(raw: bytes | memoryview) -> str:
    """The root id. CorruptError if it is damaged, FormatError if it is not ours or from a newer major version."""
    data = unseal(raw, "FORMAT.json")
    if data.get("format") != "everystep" or not isinstance(data.get("root"), str):
        raise FormatError("not a run of everystep: FORMAT.json says otherwise")
    if (major := data.get("major")) != MAJOR:
        older = type(major) is int and major < MAJOR
        raise FormatError(
            f"this run has format {major}.{data.get('minor')}, this version reads {MAJOR}.x: "
            + ("use the version that wrote it" if older else "upgrade with `pip install -U everystep`")
        )
    return str(data["root"])


# -- parts --


@dataclass(frozen=True, slots=True)
class PackInfo:
    """`size` in bytes; `header` is the SHA-256 of everything before the first tensor."""

    key: str
    size: int
    header_size: int
    header: str


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of one attempt. `layout` is as `ckpt.core.format.layout.Layout.to_json`, best `as_json`;
    `values` tagged plain values.

    `table`: its chunk table, as `ckpt.core.format.table.Table.to_bytes` writes it. In the file it is base64.
    `packs`: all that the table names, also those of older attempts. `needs`: the older attempts that it was built on,
    in their order: what it uses of still older ones, these used too. `chain`: how many increments lie between it and
    the last full one; 0 for a part that needs nothing. `full`: which that is; empty for a part that needs nothing.
    `replicas`: see `ckpt.core.format.replicas`.
    """

    attempt: str
    rank: int
    number: int
    world: int
    layout: dict[str, Any]
    values: list[Any]
    table: bytes
    packs: list[PackInfo]
    finite: bool | None = None
    layout_digest: str = ""
    reason: str = "due"  # why it was saved, see `ckpt.core.log.records.Commit`
    needs: list[str] = field(default_factory=list)
    chain: int = 0
    full: str = ""
    replicas: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        data = {one.name: getattr(self, one.name) for one in fields(self)}  # asdict() would copy the layout, row by row
        data["packs"] = [asdict(pack) for pack in self.packs]
        data["table"] = base64.b64encode(self.table).decode()
        data["layout"] = (self.layout if isinstance(self.layout, PressedObject) else PressedObject(self.layout)).text
        if not self.needs:  # a full one says what it has always said
            del data["needs"], data["chain"], data["full"]
        if not self.replicas:
            del data["replicas"]
        return seal(data)

    def check(self, what: str) -> None:
        """CorruptError unless every field is of its type and every number plausible."""
        attempt = Attempt.parse(self.attempt)
        numbers = (self.rank, self.number, self.world)
        if any(type(n) is not int for n in numbers) or not 0 <= self.rank < self.world <= MAX_WORLD or self.number < 0:
            raise CorruptError(f"{what} is of an impossible rank, try or world")
        needs = read_needs(self.needs, attempt)
        if type(self.chain) is not int or not 0 <= self.chain < (10**9 if self.needs else 1):
            raise CorruptError(f"{what} lies at an impossible place behind a full one")
        if self.full != "" and not (needs and Attempt.parse(self.full) < attempt):
            raise CorruptError(f"{what} builds on an impossible full one")
        kinds = (
            (self.layout, dict), (self.values, list), (self.table, bytes), (self.layout_digest, str),
            (self.reason, str), (self.finite, (bool, type(None))), (self.replicas, dict),
        )  # fmt: skip
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise CorruptError(f"{what} has a field of the wrong type")
        for pack in self.packs:
            sizes = (pack.header_size, pack.size)
            named = isinstance(pack.key, str) and pack.key.startswith("packs/")
            if not named or any(type(n) is not int for n in sizes):
                raise CorruptError(f"{what} names an impossible pack")
            # A pack may be of an older attempt that `needs` does not name: what is named there has it from that one.
            if (of := owner(pack.key)) is None or not (of == attempt or (needs and of < attempt)):
                raise CorruptError(f"{what} names a pack that it cannot have")
            if not 0 <= pack.header_size <= min(pack.size, MAX_HEADER):
                raise CorruptError(f"{what} names a pack of impossible size")

    @classmethod
    def from_bytes(
        cls, raw: bytes | memoryview, what: str, layout_of: Callable[[str], dict[str, Any]] = unpress
    ) -> Part:
        """`layout_of`: makes a layout of what stands for it."""
        data = unseal(raw, what)
        try:
            packs, pressed = [PackInfo(**pack) for pack in data.pop("packs")], data.pop("layout")
            if type(pressed) is not str:
                raise ValueError("its layout is not one")
            table = base64.b64decode(data.pop("table"), validate=True)
            part = cls(packs=packs, layout=layout_of(pressed), table=table, **data)
            part.check(what)
        except (TypeError, KeyError, ValueError) as error:
            raise CorruptError(f"{what} is not a part: {error}") from None
        return part
