"""Build a state in the form that torch saves: a nested dict of tensors and plain values.

The state is built twice. The first time, its tensors have no memory, to detect errors early. The second time, their
bytes are in a file (`stage`) that is mapped, so that torch can write a state of any size without having it in memory.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from ckpt.core.format.values import ORDERS, Json, decode, part_of, plain_dtype, show, splitter
from ckpt.core.state.placement import references
from ckpt.core.state.tensors import DTYPE_NAME, TORCH_DTYPE, as_plain
from ckpt.errors import CorruptError, UsageError
from ckpt.tools.convert.output import Literal, OutFile, TensorRun
from ckpt.tools.convert.source import DESCRIPTION, MAX_DESCRIPTION, Origin, OriginEntry, RankView, describe, fingerprint

WEIGHTS = ("module", "custom module")
WIDEST_INT = 2032  # maximum bits of an integer that torch.load accepts
ALIGN = 64  # bytes to which tensors are aligned
UNMAPPED = (errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # errors of file systems that cannot map files
_NUMPY_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAME}

Place = tuple[str | int, ...]


# -- tensors --


def stage(origin: Origin, view: RankView, dtypes: Mapping[str, str], name: str = "") -> OutFile:
    """Plan a file that contains the bytes of all tensors of a view."""
    parts, at = list[Literal | TensorRun](), 0
    for label in dict.fromkeys(view.tensors.values()):
        shape = origin.tensors[label].shape
        run = TensorRun(at, label, ((0,) * len(shape), shape), dtypes[label])
        gap = Literal(at + run.size, bytes(-run.size % ALIGN))
        parts += [part for part in (run, gap) if part.size]
        at += run.size + gap.size
    return OutFile(name, at, tuple(parts))


class Tensors:
    """The tensors of an origin. Equal requests return the same tensor. `staged`: path of the file with the bytes, which
    `stage` has planned as `file`; None for tensors without memory."""

    def __init__(
        self,
        origin: Origin,
        dtypes: Mapping[str, str],
        staged: Path | None = None,
        file: OutFile | None = None,
        orders: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """`orders`: result of `orders_of`: for a label, the dimensions from outermost to innermost in memory."""
        self._origin, self._dtypes, self._orders = origin, dtypes, orders
        self._made: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}
        self._bytes: dict[str, np.ndarray[Any, Any]] | None = None
        self._mapped: mmap.mmap | None = None
        if staged is not None and file is not None:
            runs = [part for part in file.parts if isinstance(part, TensorRun)]
            data = b"" if not runs else self._opened(staged)
            self._bytes = {run.label: np.frombuffer(data, np.uint8, run.size, run.at) for run in runs}

    def _opened(self, staged: Path) -> bytearray | mmap.mmap:
        """Map the staged file, or read it into memory if its file system cannot map files."""
        with staged.open("rb") as stream:
            try:
                self._mapped = mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            except OSError as error:
                if error.errno not in UNMAPPED:
                    raise
                data = bytearray(os.fstat(stream.fileno()).st_size)
                del data[stream.readinto(data) :]
                return data
        return self._mapped

    def forget(self) -> None:
        """Release the memory of mapped bytes. They are read again from the file when they are used."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def tensor(self, label: str) -> Tensor:
        return self._make(label, TORCH_DTYPE[self._dtypes[label]], self._origin.tensors[label].shape)

    def array(self, label: str, reference: Json) -> Tensor | None:
        """Return a numpy array, which the origin stores as plain bytes, as a tensor. None if torch lacks its dtype."""
        if type(reference.get("shape")) is not list:
            raise CorruptError(f"{reference.get('name')} has no shape")
        dtype, shape = plain_dtype(reference.get("dtype")), tuple(reference["shape"])
        if not all(type(n) is int and n >= 0 for n in shape):
            raise CorruptError(f"{reference['name']} has no shape: {shape!r:.80}")
        ours = _NUMPY_NAMES.get(dtype.name) if dtype.isnative and dtype.kind in "biufc" else None
        if ours is None or self._dtypes[label] != "U8":
            return None
        if math.prod(shape) * dtype.itemsize != self._origin.tensors[label].nbytes:
            raise CorruptError(f"{reference['name']} has a number of bytes that does not match its shape")
        return self._make(label, ours, shape)

    def _make(self, label: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        key = label, dtype, shape
        if key not in self._made:
            if self._bytes is None:
                self._made[key] = torch.empty(shape, dtype=dtype, device="meta")
            elif label not in self._bytes:
                self._made[key] = torch.empty(shape, dtype=dtype)  # a tensor without elements needs no mapped memory
            else:
                self._made[key] = torch.from_numpy(self._bytes[label]).view(dtype).reshape(shape)
                if (order := self._orders.get(label)) is not None:  # such tensors stay in memory until the end
                    self._made[key] = torch.empty_permuted(shape, tuple(order), dtype=dtype).copy_(self._made[key])
        return self._made[key]


def orders_of(view: RankView) -> dict[str, Sequence[int]]:
    """Return by label the memory layout of tensors that are not in row-major order. Raise CorruptError if invalid."""
    layouts = dict[str, Sequence[int]]()
    for entry in view.entries:
        orders = entry.facts.get(ORDERS, {})
        if type(orders) is not dict:
            raise CorruptError(f"{show(entry.path)}: the memory layout of its tensors is not a dict")
        for name, order in orders.items():
            label = view.tensors.get(view.aliases.get(name, name))
            if type(order) is not list or not all(type(dim) is int for dim in order):
                raise CorruptError(f"{name}: {order!r:.80} is not a permutation of its dimensions")
            if label is not None:
                layouts[label] = order
    return layouts


# -- build the state that torch would have received --


@dataclass(frozen=True, slots=True)
class _Named:
    """A placeholder for a tensor or array that is inserted later."""

    name: str
    reference: Json = None


class _Branch(dict[str | int, Any]):
    """A container known only from the paths of entries. It becomes a list if its keys are 0, 1, 2, …"""


@dataclass(frozen=True)
class Groups:
    """The groups of one optimizer. `at`: path of the optimizer. `params`: names of each group's parameters."""

    at: Place
    params: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Native:
    """The state that was built. `root`: value to save. `places`: path of each tensor. `notes`: what was changed."""

    root: dict[str | int, Any]
    places: Mapping[str, Place]
    optimizers: tuple[Groups, ...]
    notes: tuple[str, ...]


def _form(value: object) -> tuple[str, tuple[int, ...]] | None:
    return (DTYPE_NAME[value.dtype], tuple(value.shape)) if isinstance(value, Tensor) else None


class Builder:
    """Builds the state that torch would have saved.

    `numbered`: True numbers the parameters of optimizers, like torch's `state_dict`; False names them, like
        `torch.distributed.checkpoint`. `text_keys`: keys of dicts are text in paths, as in files of the latter.
    """

    def __init__(self, view: RankView, tensors: Tensors, *, numbered: bool, text_keys: bool) -> None:
        self._view, self._tensors, self._numbered, self._text_keys = view, tensors, numbered, text_keys
        self._places: dict[str, Place] = {}
        self._optimizers: list[Groups] = []
        self._changed: Counter[str] = Counter()
        self._modules = {name: e.path for e in view.entries if e.kind in WEIGHTS for name in e.names}

    def build(self) -> Native:
        """Build the state. Raise UsageError if an entry uses the key of the description."""
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
            self._changed[f"a description of {len(text)} bytes is omitted, so an import has to infer the entries"] += 1
        notes = tuple(f"{text} ({count})" for text, count in self._changed.items())
        return Native(found, self._places, tuple(self._optimizers), notes)

    def _known(self) -> RankView:
        """Return the view without the tensors that were omitted from the state."""
        has = self._has
        entries = tuple(structs.replace(e, names=tuple(filter(has, e.names))) for e in self._view.entries)
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
                state[name][decode(key, _named)] = decode(value, _named)
        groups = []
        for settings, params in zip(values["groups"], facts["params"], strict=True):
            group = decode(settings, _named)
            group["params"] = [keys[name] for name in params]
            group.setdefault("param_names", [called[name] for name in params])
            groups.append(group)
        self._optimizers.append(Groups(entry.path, tuple(tuple(called[n] for n in g) for g in facts["params"])))
        # "params" has the tensors that only the optimizer has; torch's own loader ignores this key
        start = show((*entry.path, "params")) + "."
        own = {n.removeprefix(start): _Named(n) for n in entry.names if n.startswith(start) and self._has(n)}
        more = {
            decode(one["key"], _named) if "key" in one else keys[one["param"]]: decode(value, _named)
            for one, value in values.get("more", ())
            if "key" in one or one["param"] in keys
        }
        saved = {"state": {keys[name]: found for name, found in state.items()} | more, "param_groups": groups}
        extra = decode(values["extra"], _named) if values.get("extra") else {}
        return (saved | {"params": own} if own else saved) | extra

    def _fill(self, entry: OriginEntry, state: dict[str, dict[str, Any]]) -> None:
        """Insert the tensors of an optimizer's state under their parameter and key."""
        prefix = show((*entry.path, "state")) + "."
        inside = set(references(entry.values))
        split = splitter(state)
        for full in entry.names:
            if full.startswith(prefix) and full not in inside and self._has(full):
                found = split(full.removeprefix(prefix))
                if found is None:
                    raise CorruptError(f"{full} belongs to no parameter of its optimizer")
                state[found[0]][found[1]] = _Named(full)

    def _relative(self, names: Sequence[str]) -> dict[str, str]:
        """Return the names of parameters relative to their module, or full names if those are ambiguous."""
        found = {}
        for name in names:
            path = self._modules.get(name)
            found[name] = name if not path else name.removeprefix(show(path) + ".")
        return found if len(set(found.values())) == len(found) else {name: name for name in names}

    def _settle(self, value: Any, at: Place, *, text_keys: bool | None = None) -> Any:
        """Replace placeholders by tensors, and convert values that `torch.load(weights_only=True)` would reject."""
        kind, text = type(value), self._text_keys if text_keys is None else text_keys
        if kind is _Named:
            return self._tensor(value, at)
        if kind in (dict, OrderedDict, Counter):
            for key, item in list(value.items()):
                # a key of another type may contain objects that torch does not load
                if type(key) not in (str, int, float, bool, type(None)):
                    del value[key]
                    key = self._settle(key, at, text_keys=text)
                value[key] = self._settle(item, (*at, str(key) if text else part_of(key)), text_keys=text)
            return value
        if kind in (list, tuple):
            text = text and kind is list  # DCP stores a tuple with its contents as one value
            return kind(self._settle(item, (*at, i), text_keys=text) for i, item in enumerate(value))
        if kind is set:
            return {self._settle(item, at, text_keys=text) for item in value}
        if kind in (frozenset, deque):
            self._changed[f"a {kind.__name__} became a {'list' if kind is deque else 'tuple'}"] += 1
            items = [self._settle(item, (*at, i), text_keys=text) for i, item in enumerate(value)]
            return items if kind is deque else tuple(items)
        if isinstance(value, np.generic):
            return self._number(value)
        if isinstance(value, (date, timedelta)):
            self._changed["dates and times became text"] += 1
            return str(value)
        if isinstance(value, (Fraction, Decimal, PurePath, range, slice)):
            self._changed["fractions, decimals, paths, ranges and slices became text"] += 1
            return str(value)
        if kind is bytes and not value:
            self._changed["empty bytes became an empty bytearray"] += 1
            return bytearray()
        if kind is int and value.bit_length() > WIDEST_INT:
            self._changed["a very large integer became hexadecimal text"] += 1
            return hex(value)
        return value

    def _tensor(self, named: _Named, at: Place) -> Tensor:
        name = self._view.aliases.get(named.name, named.name)
        if name not in self._view.tensors:
            raise UsageError(f"{named.name} is excluded, but other values need it: exclude all of {show(at)}")
        self._places.setdefault(name, at)
        label = self._view.tensors[name]
        if named.reference is None:
            return self._tensors.tensor(label)
        found = self._tensors.array(label, named.reference)
        if found is not None:
            self._changed["numpy arrays became tensors"] += 1
            return found
        self._changed[f"numpy arrays of {named.reference['dtype']} became tensors of their bytes"] += 1
        return self._tensors.tensor(label)

    def _number(self, value: np.generic) -> Any:
        kind = value.dtype.kind
        if kind in "biufc":
            self._changed["numpy scalars became Python numbers"] += 1
            found = value.item()  # item() of a long double returns a long double again
            return (
                found if type(found) in (bool, int, float, complex) else complex(found) if kind == "c" else float(found)
            )
        self._changed["numpy times became text"] += 1
        return str(value)


def _named(reference: Json) -> object:
    if reference.get("$") == "wrapper":  # several tensors and a class that may not be installed elsewhere
        return {attribute: _named(one) for attribute, one in reference["tensors"]}
    if reference.get("$") not in ("tensor", "ndarray"):
        return as_plain(reference)
    return _Named(str(reference["name"]), reference if reference["$"] == "ndarray" else None)


def _insert(root: _Branch, path: Place, value: Any) -> None:
    """Insert an entry's value at its path. With an empty path, the value becomes the root itself."""
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
