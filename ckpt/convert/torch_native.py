"""A state as torch itself would be given it to save, of tensors that have no memory; and the bytes around them.

    view -> nested dict of stand-ins -> what torch.save writes, with holes where the tensors' bytes belong

torch writes every container itself, so what is written here is what this version of torch writes and reads.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt.convert.output import Literal, Run, Sum
from ckpt.convert.source import DESCRIPTION, MAX_DESCRIPTION, Origin, OriginEntry, RankView, describe, fingerprint
from ckpt.errors import CheckpointError, CorruptError, UsageError
from ckpt.format.boxes import Box
from ckpt.format.values import Json, decode, plain_dtype, show, splitter
from ckpt.state.placement import references
from ckpt.state.tensors import DTYPE_NAME, TORCH_DTYPE

WEIGHTS = ("module", "custom module")
WIDEST_INT = 2032  # bits; longer integers are written in a way that torch.load refuses
_NUMPY_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAME}

Place = tuple[str | int, ...]


# -- tensors without memory --


@dataclass(frozen=True, slots=True)
class StandInFor:
    """Whose bytes belong where a stand-in is. `box`: all of that tensor; `dtype`: as it is written."""

    label: str
    box: Box
    dtype: str


class StandIns:
    """Tensors that cost no memory, each standing for one of the origin. Asked twice for the same, the same."""

    def __init__(self, origin: Origin, dtypes: Mapping[str, str]) -> None:
        self._origin, self._dtypes = origin, dtypes
        self._made: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}
        self._sources: dict[int, StandInFor] = {}
        self._mode = FakeTensorMode()

    def tensor(self, label: str) -> Tensor:
        return self._make(label, TORCH_DTYPE[self._dtypes[label]], self._origin.tensors[label].shape)

    def array(self, label: str, reference: Json) -> Tensor | None:
        """For a numpy array, which lies in the origin as plain bytes. None if torch has no such dtype."""
        if type(reference.get("shape")) is not list:
            raise CorruptError(f"{reference.get('name')} has no shape")
        dtype, shape = plain_dtype(reference.get("dtype")), tuple(reference["shape"])
        if not all(type(n) is int and n >= 0 for n in shape):
            raise CorruptError(f"{reference['name']} has no shape: {shape!r:.80}")
        ours = _NUMPY_NAMES.get(dtype.name) if dtype.isnative and dtype.kind in "biufc" else None
        if ours is None or self._dtypes[label] != "U8":
            return None
        if math.prod(shape) * dtype.itemsize != self._origin.tensors[label].nbytes:
            raise CorruptError(f"{reference['name']} has another number of bytes than its shape says")
        return self._make(label, ours, shape)

    def of_form(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """One that stands for nothing."""
        with self._mode, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # some dtypes are said to be experimental
            return torch.empty(shape, dtype=TORCH_DTYPE[dtype])

    def source(self, tensor: Tensor) -> StandInFor:
        return self._sources[id(tensor)]

    def _make(self, label: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        key = label, dtype, shape
        if key not in self._made:
            made = self._made[key] = self.of_form(DTYPE_NAME[dtype], shape)
            full = self._origin.tensors[label].shape
            self._sources[id(made)] = StandInFor(label, ((0,) * len(full), full), self._dtypes[label])
        return self._made[key]


# -- what torch would have been given --


@dataclass(frozen=True, slots=True)
class _Named:
    """A tensor, or an array, that is still to be put in its place."""

    name: str
    reference: Json = None


class _Branch(dict[str | int, Any]):
    """A container that only the paths of entries tell of: a dict, or a list if its keys are 0, 1, 2, …"""


@dataclass(frozen=True)
class Groups:
    """The groups of one optimizer. `at`: its path; `params`: the names in each group, as they are written."""

    at: Place
    params: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Native:
    """`root`: what to save; `places`: the keys that lead to each tensor; `notes`: what was changed on the way."""

    root: dict[str | int, Any]
    places: Mapping[str, Place]
    optimizers: tuple[Groups, ...]
    notes: tuple[str, ...]


def _form(value: object) -> tuple[str, tuple[int, ...]] | None:
    return (DTYPE_NAME[value.dtype], tuple(value.shape)) if isinstance(value, Tensor) else None


class Builder:
    """Makes what torch would have been given. `numbered`: optimizers call their parameters 0, 1, 2, … as torch's own
    `state_dict` does; else they call them by name, as `torch.distributed.checkpoint` does. `text_keys`: in places, keys
    of dicts are text, as in the latter's files."""

    def __init__(self, view: RankView, stand_ins: StandIns, *, numbered: bool, text_keys: bool) -> None:
        self._view, self._stand_ins, self._numbered, self._text_keys = view, stand_ins, numbered, text_keys
        self._places: dict[str, Place] = {}
        self._optimizers: list[Groups] = []
        self._changed: Counter[str] = Counter()
        self._modules = {name: e.path for e in view.entries if e.kind in WEIGHTS for name in e.names}

    def build(self) -> Native:
        """UsageError if the names of the state leave no room for what is written beside it."""
        root = _Branch()
        for entry in self._view.entries:
            _insert(root, entry.path, self._value(entry))
        found = self._settle(_rooted(root), ())
        if DESCRIPTION in found:
            raise UsageError(f"the state has an entry called {DESCRIPTION}, which is reserved")
        text = describe(self._known(), self._places, fingerprint(found, _form))
        if len(text) <= MAX_DESCRIPTION:
            found[DESCRIPTION] = text
        else:
            self._changed[f"a description of {len(text)} bytes is left out, so an import has to guess"] += 1
        notes = tuple(f"{text} ({count})" for text, count in self._changed.items())
        return Native(found, self._places, tuple(self._optimizers), notes)

    def _known(self) -> RankView:
        """Without the names of tensors that were left out."""
        has = self._has
        entries = tuple(replace(e, names=tuple(filter(has, e.names))) for e in self._view.entries)
        return replace(self._view, entries=entries)

    def _has(self, name: str) -> bool:
        return self._view.aliases.get(name, name) in self._view.tensors

    def _value(self, entry: OriginEntry) -> Any:
        if entry.kind == "module":
            return self._module(entry)
        if entry.kind == "optimizer":
            try:
                return self._optimizer(entry)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CorruptError(f"{show(entry.path)}: not the state of an optimizer: {error!r}") from None
        value = decode(entry.values, _named)
        return OrderedDict(value) if entry.kind == "custom module" and type(value) is dict else value

    def _module(self, entry: OriginEntry) -> OrderedDict[str, Any]:
        prefix = show(entry.path) + "." if entry.path else ""
        return OrderedDict((n.removeprefix(prefix), _Named(n)) for n in entry.names if self._has(n))

    def _optimizer(self, entry: OriginEntry) -> dict[str, Any]:
        facts, values = entry.facts, entry.values
        names = [name for group in facts["params"] for name in group]
        called = self._relative(names)
        keys: dict[str, int | str] = {n: i for i, n in enumerate(names)} if self._numbered else dict(called)
        state: dict[str, dict[str, Any]] = {name: {} for name in facts["with_state"]}
        self._fill(entry, state)
        for name, key, value in values["state"]:
            if name in state:
                state[name][key] = decode(value, _named)
        groups = []
        for settings, params in zip(values["groups"], facts["params"], strict=True):
            group = decode(settings, _named)
            group["params"] = [keys[name] for name in params]
            group.setdefault("param_names", [called[name] for name in params])
            groups.append(group)
        self._optimizers.append(Groups(entry.path, tuple(tuple(called[n] for n in g) for g in facts["params"])))
        start = show((*entry.path, "params")) + "."  # what only the optimizer holds; torch's own loader ignores it
        own = {n.removeprefix(start): _Named(n) for n in entry.names if n.startswith(start) and self._has(n)}
        saved = {"state": {keys[name]: found for name, found in state.items()}, "param_groups": groups}
        return saved | {"params": own} if own else saved

    def _fill(self, entry: OriginEntry, state: dict[str, dict[str, Any]]) -> None:
        """Tensors of the state, each under its parameter's name and its own key."""
        prefix = show((*entry.path, "state")) + "."
        inside = set(references(entry.values["state"])) | set(references(entry.values["groups"]))
        split = splitter(state)
        for full in entry.names:
            if full.startswith(prefix) and full not in inside and self._has(full):
                found = split(full.removeprefix(prefix))
                if found is None:
                    raise CorruptError(f"{full} is state of no parameter of its optimizer")
                state[found[0]][found[1]] = _Named(full)

    def _relative(self, names: Sequence[str]) -> dict[str, str]:
        """Parameters as their module names them; as the state names them if that would not be clear."""
        found = {}
        for name in names:
            path = self._modules.get(name)
            found[name] = name if not path else name.removeprefix(show(path) + ".")
        return found if len(set(found.values())) == len(found) else {name: name for name in names}

    def _settle(self, value: Any, at: Place, *, text_keys: bool | None = None) -> Any:
        """Stand-ins in the places of names, and nothing that `torch.load(weights_only=True)` would refuse."""
        kind, text = type(value), self._text_keys if text_keys is None else text_keys
        if kind is _Named:
            return self._stand_in(value, at)
        if kind in (dict, OrderedDict, Counter):
            for key, one in value.items():
                value[key] = self._settle(one, (*at, str(key) if text else key), text_keys=text)
            return value
        if kind in (list, tuple):
            text = text and kind is list  # DCP leaves tuples whole, with all that is in them
            return kind(self._settle(one, (*at, i), text_keys=text) for i, one in enumerate(value))
        if isinstance(value, np.generic):
            return self._number(value)
        if kind is bytes and not value:
            self._changed["empty bytes became an empty bytearray"] += 1
            return bytearray()
        if kind is int and value.bit_length() > WIDEST_INT:
            self._changed["a very large integer became hexadecimal text"] += 1
            return hex(value)
        return value

    def _stand_in(self, named: _Named, at: Place) -> Tensor:
        name = self._view.aliases.get(named.name, named.name)
        if name not in self._view.tensors:
            raise UsageError(f"{named.name} is left out, but the values beside it need it: leave out all of {show(at)}")
        self._places.setdefault(name, at)
        label = self._view.tensors[name]
        if named.reference is None:
            return self._stand_ins.tensor(label)
        found = self._stand_ins.array(label, named.reference)
        if found is not None:
            self._changed["numpy arrays became tensors"] += 1
            return found
        self._changed[f"numpy arrays of {named.reference['dtype']} became tensors of their bytes"] += 1
        return self._stand_ins.tensor(label)

    def _number(self, value: np.generic) -> Any:
        kind = value.dtype.kind
        if kind in "biufc":
            self._changed["numpy scalars became Python numbers"] += 1
            found = value.item()  # of a long double that is one again
            return (
                found if type(found) in (bool, int, float, complex) else complex(found) if kind == "c" else float(found)
            )
        self._changed["numpy times became text"] += 1
        return str(value)


def _named(reference: Json) -> object:
    if reference.get("$") not in ("tensor", "ndarray"):
        raise CorruptError(f"unknown tag {reference.get('$')!r}: written by a newer version?")
    return _Named(str(reference["name"]), reference if reference["$"] == "ndarray" else None)


def _insert(root: _Branch, path: Place, value: Any) -> None:
    """Put an entry's value where its path says; with an empty path it is the root itself."""
    branch: Any = root
    if not path:
        if not isinstance(value, Mapping):
            raise UsageError("the state itself is not a dict")
        if twice := branch.keys() & value.keys():
            raise UsageError(f"two entries of the state are called {next(iter(twice))!r}")
        branch.update(value)
        return
    for key in path[:-1]:
        branch = branch.setdefault(key, _Branch())
        if type(branch) is not _Branch:
            raise UsageError(f"{show(path)}: an entry of the state lies inside another")
    if path[-1] in branch:
        raise UsageError(f"two entries of the state are called {show(path)}")
    branch[path[-1]] = value


def _rooted(branch: _Branch) -> dict[str | int, Any]:
    return {key: _grown(value) for key, value in branch.items()}


def _grown(value: Any) -> Any:
    if type(value) is not _Branch:
        return value
    if list(value) == list(range(len(value))):
        return [_grown(one) for one in value.values()]
    return _rooted(value)


# -- the bytes around tensors --


@dataclass(frozen=True, slots=True)
class TensorGap:
    """Bytes `start` to `stop` of a container, for a tensor; their CRC-32 belongs to each of `crcs`."""

    start: int
    stop: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Container:
    """What torch.save writes, but for the bytes of tensors. `literals`: (place, bytes); all in rising order."""

    size: int
    literals: tuple[tuple[int, bytes], ...]
    holes: tuple[TensorGap, ...]


def container(value: object) -> Container:
    """What torch.save makes of stand-ins and plain values. No byte of a tensor is needed, or written."""
    recorder = _Recorder()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(value, cast(Any, recorder))
    return recorder.container()


def fill(form: Container, at: int, sources: Sequence[StandInFor]) -> tuple[list[Literal | Run], list[Sum]]:
    """A container at byte `at` of a file, with what belongs into its holes, in their order."""
    if len(sources) != len(form.holes):
        raise _unknown_format(f"{len(form.holes)} records for {len(sources)} tensors")
    parts: list[Literal | Run] = [Literal(at + place, data) for place, data in form.literals]
    sums = []
    for hole, source in zip(form.holes, sources, strict=True):
        run = Run(at + hole.start, source.label, source.box, source.dtype)
        if run.size != hole.stop - hole.start:
            raise _unknown_format(f"{hole.stop - hole.start} bytes for {source.label}, which has {run.size}")
        parts.append(run)
        sums.append(Sum(at + hole.start, at + hole.stop, "crc32", tuple(at + place for place in hole.crcs)))
    return sorted(parts, key=lambda part: part.at), sums


def joined(parts: Iterable[Literal | Run]) -> tuple[Literal | Run, ...]:
    """The same bytes, in as few parts as can be."""
    found: list[Literal | Run] = []
    for literal, some in itertools.groupby(parts, lambda part: isinstance(part, Literal)):
        each = list(some)
        found += [Literal(each[0].at, b"".join(cast(Literal, one).data for one in each))] if literal else each
    return tuple(found)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors inside plain containers that have any bytes, each once, in the order in which torch.save meets and
    writes them: a container's from its first to its last."""
    found: dict[int, Tensor] = {}
    _collect(value, found)
    return list(found.values())


def _collect(value: Any, found: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.numel():
            found.setdefault(id(value), value)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, found)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _collect(one, found)


class _Recorder:
    """A file that keeps what torch writes, and notes what it skips."""

    def __init__(self) -> None:
        self._size = 0
        self._literals: list[tuple[int, bytearray]] = []
        self._holes: list[tuple[int, int]] = []

    def write(self, data: memoryview) -> int:
        if not self._literals or self._literals[-1][0] + len(self._literals[-1][1]) != self._size:
            self._literals.append((self._size, bytearray()))
        self._literals[-1][1].extend(data)
        self._size += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or offset <= 0:
            raise _unknown_format("it goes back in the file")
        self._holes.append((self._size, self._size + offset))
        self._size += offset
        return self._size

    def flush(self) -> None:
        pass

    def container(self) -> Container:
        literals = {at: bytes(data) for at, data in self._literals}
        last = max(literals)
        records = [(size, crc) for size, crc in _directory(literals[last], last) if size is not None]
        holes = []
        for (start, stop), (size, crc) in zip(self._holes, records, strict=True):
            if size != stop - start or literals.get(stop, b"")[:4] != _DESCRIPTOR:
                raise _unknown_format(f"no record of {stop - start} bytes")
            holes.append(TensorGap(start, stop, (stop + 4, crc)))
        return Container(self._size, tuple(literals.items()), tuple(holes))


_DESCRIPTOR, _RECORD = b"PK\x07\x08", b"PK\x01\x02"  # behind the bytes of a record; its line in the directory


def _directory(tail: bytes, base: int) -> Iterator[tuple[int | None, int]]:
    """Of each record of a zip file: the size, None unless bytes of a tensor are in it, and where the file's directory
    has its CRC-32. `tail`: the last bytes of the file, which begin at byte `base`, and have all of the directory."""
    (at,) = struct.unpack_from("<I", tail, len(tail) - 6)
    if at == 0xFFFFFFFF:  # beyond 4 GiB: the end says where the larger end is, and that where the directory is
        (end,) = struct.unpack_from("<Q", tail, len(tail) - 34)
        (at,) = struct.unpack_from("<Q", tail, end - base + 48)
    at -= base
    if at < 0 or tail[at : at + 4] != _RECORD:
        raise _unknown_format("its directory is not at its end")
    while tail[at : at + 4] == _RECORD:
        size, name, extra, comment = struct.unpack_from("<IHHH", tail, at + 24)
        if size == 0xFFFFFFFF:
            size = _long_size(tail[at + 46 + name : at + 46 + name + extra])
        of_tensor = size and tail[at + 46 : at + 46 + name].split(b"/")[1:2] == [b"data"]
        yield size if of_tensor else None, base + at + 16
        at += 46 + name + extra + comment


def _long_size(extra: bytes) -> int:
    """The size of a record beyond 4 GiB, which comes first of the numbers that had no room."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return int(struct.unpack_from("<Q", extra, at + 4)[0])
        at += 4 + length
    raise _unknown_format("a record without a size")


def _unknown_format(detail: str) -> CheckpointError:
    return CheckpointError(
        f"torch {torch.__version__} writes torch.save files in a way that is not known here ({detail}): upgrade with "
        "`pip install -U everystep`, or choose another format"
    )


Sourced = Callable[[Tensor], StandInFor]


def save(value: object, at: int, source: Sourced) -> tuple[int, list[Literal | Run], list[Sum]]:
    """torch.save of a value, at byte `at` of a file: its size, its parts, and the checksums it needs."""
    form = container(value)
    parts, sums = fill(form, at, [source(tensor) for tensor in tensors_of(value)])
    return form.size, parts, sums
