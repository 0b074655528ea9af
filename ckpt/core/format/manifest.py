"""Names the files of a run, and reads and writes its small JSON files.

    FORMAT.json                                   marks a run: format version, root id
    latest.json                                   the newest checkpoint, as a hint
    log/<seq>.json                                records, see `ckpt.core.log.records`
    steps/<checkpoint id>/                        the files of one checkpoint:
      rank-00000.safetensors                      tensor bytes of rank 0, raw
      rank-00000-00001.safetensors                further data files of rank 0, encoded
      rank-00000.json                             the manifest of rank 0: `Manifest`
      index.safetensors                           the rank of each piece, see `ckpt.core.format.index`

A writer never reuses the name of a data file, or a number that another writer used. So no manifest names a file from a
failed write. The manifest of a rank is created once, and decides which data files count. The index is derived from the
manifests, so two committers write the same bytes.

Every JSON file is written in a canonical form (sorted keys, no spaces). Its field `digest` is the SHA-256 of its other
fields. A file is damaged if its bytes are not exactly the canonical form of their contents. This check detects any
flipped bit. JSON from storage is untrusted: `decoded` and `typed` check it and convert it to known types.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

import msgspec
import zstandard

from ckpt.core.format.digest import file_digest
from ckpt.errors import CorruptError, FormatError

MAJOR, MINOR = 3, 0
MAX_JSON = 256 << 20  # bytes; a larger file is rejected before parsing
FEW_BYTES, MOST_FOLDS = 16 << 20, 500  # limits of decompressed JSON, see `plain_size`
MAX_FORMAT = 1 << 20
MAX_TERM = 10**12
MAX_WORLD = 1 << 20
MAX_HEADER = 100 << 20  # maximum bytes of a data file's header; safetensors rejects larger headers
MAX_NEEDS = 64  # maximum older checkpoints that a checkpoint builds on
STEPS = "steps/"
_ID = re.compile(r"([0-9]{9}|[1-9][0-9]{9,17})\.([1-9][0-9]{0,11})-([0-9a-f]{8})")


@dataclass(frozen=True, order=True, slots=True)
class CheckpointId:
    """The id of a checkpoint: one step, saved by one job attempt. Text form: `<step, 9 digits>.<term>-<nonce>`."""

    term: int
    step: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.step:09d}.{self.term}-{self.nonce}"

    @classmethod
    def parse(cls, text: object) -> CheckpointId:
        found = _ID.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise CorruptError(f"not a checkpoint id: {text!r}")
        return cls(int(found[2]), int(found[1]), found[3])


def new_nonce() -> str:
    return secrets.token_hex(4)


def nonce_of(job: str, turn: int) -> str:
    """Return the nonce for a job's next term. `turn`: number of terms that the job requested before."""
    return hashlib.sha256(f"{job}:{turn}".encode()).hexdigest()[:8]


def read_needs(texts: Any, checkpoint: CheckpointId) -> tuple[CheckpointId, ...]:
    """Parse the ids that a checkpoint builds on. Raise CorruptError for newer, unsorted or more than MAX_NEEDS ids."""
    if not isinstance(texts, list) or len(texts) > MAX_NEEDS:
        raise CorruptError(f"checkpoint {checkpoint} depends on an impossible number of checkpoints")
    found = tuple(map(CheckpointId.parse, texts))
    if any(a >= b for a, b in itertools.pairwise((*found, checkpoint))):
        raise CorruptError(f"checkpoint {checkpoint} depends on a checkpoint that is not older, or out of order")
    return found


def needs_texts(checkpoints: Iterable[CheckpointId]) -> list[str]:
    """Return ids in the form that `read_needs` parses."""
    return [str(checkpoint) for checkpoint in sorted(set(checkpoints))]


def folder_of(checkpoint: CheckpointId) -> str:
    return f"{STEPS}{checkpoint}/"


def data_key(checkpoint: CheckpointId, rank: int, number: int = 0) -> str:
    """Return the name of a data file. `number`: 0 for the rank's first data file, which is raw, from 1 for others."""
    return f"{folder_of(checkpoint)}rank-{rank:05d}{f'-{number:05d}' if number else ''}.safetensors"


def manifest_key(checkpoint: CheckpointId, rank: int) -> str:
    return f"{folder_of(checkpoint)}rank-{rank:05d}.json"


def index_key(checkpoint: CheckpointId) -> str:
    return f"{folder_of(checkpoint)}index.safetensors"


_OWNED = re.compile(
    r"steps/([0-9]+\.[0-9]+-[0-9a-f]{8})/"
    r"(?:index\.safetensors|rank-([0-9]{5,7})(?:\.json|(-[0-9]{5,9})?(\.safetensors)))"
)


def _parsed(key: str) -> tuple[CheckpointId, re.Match[str]] | None:
    found = _OWNED.fullmatch(key)
    try:
        return (CheckpointId.parse(found[1]), found) if found else None
    except CorruptError:
        return None


def owner(key: str) -> CheckpointId | None:
    """Return the checkpoint id in a file's name, or None if everystep does not use such names."""
    found = _parsed(key)
    return found[0] if found else None


def by_owner(keys: Iterable[str]) -> dict[CheckpointId, list[str]]:
    """Group files by the id of the checkpoint that they belong to."""
    found: dict[CheckpointId, list[str]] = {}
    for key in keys:
        if (checkpoint := owner(key)) is not None:
            found.setdefault(checkpoint, []).append(key)
    return found


def is_data(key: str) -> bool:
    """Return True for the name of a data file."""
    found = _parsed(key)
    return found is not None and found[1][4] is not None


def is_manifest(key: str) -> bool:
    """Return True for the name of the manifest of a rank."""
    return key.endswith(".json") and _parsed(key) is not None


def rank_of(key: str) -> int | None:
    """Return the rank that wrote a file. Return None for an index, or for a name that everystep does not use."""
    found = _parsed(key)
    return int(found[1][2]) if found is not None and found[1][2] is not None else None


def data_number(key: str) -> int:
    """Return the number of a data file, see `data_key`."""
    found = _parsed(key)
    return int((found[1][3] or "-0")[1:]) if found is not None else 0


def in_deletion_order(keys: Iterable[str]) -> list[list[str]]:
    """Group files in the order of deletion: indexes, manifests, data files. A folder without an index is not a
    checkpoint, so after an interrupted deletion nothing looks like one."""
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    for key in keys:
        groups[2 if is_data(key) else 1 if is_manifest(key) else 0].append(key)
    return [group for group in groups if group]


def metadata_of(key: str) -> dict[str, str]:
    """Return the safetensors metadata of a data file."""
    found = _parsed(key)
    if found is None:
        return {}
    return {"checkpoint": str(found[0]), "rank": str(int(found[1][2])), "step": str(found[0].step)}


# -- canonical, self-digested JSON --


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(data: Any) -> bytes:
    return _CANONICAL.encode(data).encode()


def seal(data: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file with these fields and their digest."""
    return canonical({**data, "digest": file_digest(canonical(dict(data)))})


def unseal(raw: bytes | bytearray | memoryview, what: str) -> dict[str, Any]:
    """Return the fields of a sealed file. Raise CorruptError if any byte has changed since it was written."""
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


# -- large JSON that many files share --


class SharedLayout:
    """The layout in a manifest, see `ckpt.core.format.layout.Layout.shared`.

    Its text is equal in the manifests of all ranks with the same tensors, and of all their checkpoints. Manifests in
    memory share one object, which is parsed when it is first used. Do not change `data`.
    """

    __slots__ = ("__weakref__", "_data", "_text")
    _known: ClassVar[WeakValueDictionary[str, SharedLayout]] = WeakValueDictionary()

    def __init__(self, data: dict[str, Any] | None = None, text: str = "") -> None:
        self._data, self._text = data, text

    @classmethod
    def of_text(cls, text: str) -> SharedLayout:
        """Return the layout for a text from a manifest."""
        return cls._known.get(text) or cls._known.setdefault(text, cls(text=text))

    @property
    def text(self) -> str:
        """Return the layout as a zstd frame in base64."""
        if not self._text:
            self._text = press(canonical(self._data))
        return self._text

    @property
    def data(self) -> dict[str, Any]:
        """Return the parsed layout. Raise CorruptError if it is damaged or implausibly large."""
        if self._data is None:
            try:
                data = unpress(self._text)
                if not all(type(data[name]) is kind for name, kind in _LAYOUT.items()):
                    raise ValueError("a field has the wrong type")
            except (KeyError, ValueError) as error:
                raise CorruptError(f"the layout in a manifest is damaged: {error}") from None
            self._data = data
        return self._data

    @property
    def key(self) -> object:
        """Return a value that is equal for layouts with the same text, or unique if the text is unknown."""
        return self._text or id(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedLayout) and self.text == other.text

    __hash__ = None  # type: ignore[assignment]


_LAYOUT = {"aliases": dict, "components": list, "forms": dict, "instances": dict}


def press(text: bytes) -> str:
    """Compress JSON to a text that fits into a JSON string: a zstd frame in base64."""
    return base64.b64encode(zstandard.ZstdCompressor(level=3, write_content_size=True).compress(text)).decode()


def unpress(text: str) -> dict[str, Any]:
    """Return the object in compressed JSON. Raise ValueError if it is not an object or implausibly large."""
    found = parsed(unpressed(text))
    if type(found) is not dict:
        raise ValueError("not an object")
    return found


def plain_size(stored: int) -> int:
    """Return the maximum decompressed size that readers accept for `stored` compressed bytes."""
    return FEW_BYTES + MOST_FOLDS * stored


def unpressed(text: str) -> bytes:
    """Decompress JSON to bytes. Raise ValueError if it is implausibly large or invalid."""
    try:
        frame = base64.b64decode(text, validate=True)
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= min(MAX_JSON, plain_size(len(frame))):
            raise ValueError(f"implausibly large: {size} bytes")
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def parsed(text: bytes) -> Any:
    """Parse JSON. Raise ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


# -- FORMAT.json --


def new_format(root: str | None = None) -> bytes:
    """Return the bytes of a new FORMAT.json. `root`: id of a run whose FORMAT.json was lost, default: a new id."""
    return seal({"format": "everystep", "major": MAJOR, "minor": MINOR, "root": root or secrets.token_hex(16)})


def read_format(raw: bytes | memoryview) -> str:
    """Return the root id. Raise CorruptError for a damaged file, FormatError for an unsupported format or version."""
    data = unseal(raw, "FORMAT.json")
    if data.get("format") != "everystep" or not isinstance(data.get("root"), str):
        raise FormatError("not a run of everystep: FORMAT.json is from another program")
    if (major := data.get("major")) != MAJOR:
        older = type(major) is int and major < MAJOR
        raise FormatError(
            f"this run has format {major}.{data.get('minor')}, this version reads {MAJOR}.x: "
            + ("use the version that wrote it" if older else "upgrade with `pip install -U everystep`")
        )
    return str(data["root"])


# -- manifests --


FEATURES: frozenset[str] = frozenset()
"""Names of the features that this version can read, see `Manifest.features`."""
MAX_PARENTS = 64


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file. `size`: bytes of the file. `header`: SHA-256 of all bytes before the first tensor."""

    key: str
    size: int
    header_size: int
    header: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of one rank in a checkpoint. `values` are tagged plain values.

    `table`: its chunk table, as `ckpt.core.format.table.Table.to_bytes` writes it. In the file it is base64. `files`:
    all data files that the table names, including those of older checkpoints. `needs`: the older checkpoints that this
    checkpoint builds on, in order. `chain`: number of increments since the last full checkpoint. `full`: the last full
    checkpoint; empty for a full checkpoint. `replicas`: see `ckpt.core.format.columns`.

    `info`: the user's notes. `parents`: checkpoints of other runs that this checkpoint continues, as
    `<root id>/<checkpoint id>`. `content`: for a checkpoint of only some tensors, the options `only` and `cast`.
    `features`: names of features that a reader needs; a reader that lacks one of them rejects the manifest.
    """

    checkpoint: str
    rank: int
    world: int
    layout: SharedLayout
    values: list[Any]
    table: bytes
    files: list[DataFile]
    finite: bool | None = None
    reason: str = "due"  # cause of the save, see `ckpt.core.log.records.Commit`
    needs: list[str] = field(default_factory=list)
    chain: int = 0
    full: str = ""
    replicas: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    parents: list[str] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict)
    features: list[str] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        data |= {"files": list(map(asdict, self.files)), "layout": self.layout.text}
        data["table"] = base64.b64encode(self.table).decode()
        for name in ("needs", "chain", "full", "replicas", "info", "parents", "content", "features"):
            if not data[name]:
                del data[name]
        return seal(data)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, what: str) -> Manifest:
        """Read a manifest. Ignore unknown fields. Raise CorruptError if it is damaged. `check` has further checks."""
        data = unseal(raw, what)
        try:
            manifest = msgspec.convert(data, cls, dec_hook=lambda kind, text: SharedLayout.of_text(text))
        except (msgspec.ValidationError, RecursionError) as error:
            raise CorruptError(f"{what} is not a manifest: {error}") from None
        manifest.check(what)
        return manifest

    def check(self, what: str) -> None:
        """Raise CorruptError if a number or name is implausible, and FormatError if a feature is unknown."""
        checkpoint = CheckpointId.parse(self.checkpoint)
        if not 0 <= self.rank < self.world <= MAX_WORLD:
            raise CorruptError(f"{what} has an impossible rank or world")
        if len(self.parents) > MAX_PARENTS:
            raise CorruptError(f"{what} continues an impossible number of checkpoints")
        if unknown := sorted(set(self.features) - FEATURES):
            raise FormatError(
                f"{what} needs the feature {unknown[0]!r:.80}, which this version does not know: upgrade with "
                "`pip install -U everystep`"
            )
        needs = read_needs(self.needs, checkpoint)
        if not 0 <= self.chain < (10**9 if needs else 1):
            raise CorruptError(f"{what} has an impossible number of increments since a full checkpoint")
        if self.full != "" and not (needs and CheckpointId.parse(self.full) < checkpoint):
            raise CorruptError(f"{what} builds on an impossible full checkpoint")
        for file in self.files:
            # A file may belong to an older checkpoint that is not in `needs`, if a checkpoint in `needs` uses it too.
            of = owner(file.key)
            if of is None or not is_data(file.key) or not (of == checkpoint or (needs and of < checkpoint)):
                raise CorruptError(f"{what} names a data file that it cannot have")
            if not 0 <= file.header_size <= min(file.size, MAX_HEADER):
                raise CorruptError(f"{what} names a data file of impossible size")


# -- JSON with types --


T = TypeVar("T")


def decoded(raw: bytes | memoryview) -> Any:
    """Parse JSON. Raise ValueError if it is invalid, or if it contains a number that JSON does not allow."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def typed(kind: type[T], data: object) -> T:
    """Convert data to a dataclass. Ignore unknown fields. Raise ValueError for wrong types or non-finite numbers."""
    try:
        return msgspec.json.decode(msgspec.json.encode(data), type=kind)  # NaN becomes null, which is rejected
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
